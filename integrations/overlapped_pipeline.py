"""Micro-batches through the stages of a pipeline, two at a time: one's tokens travel to experts while the other is computed.

The schedules are those of :mod:`commlayer.integrations.pipeline_schedules`, whose tasks this runs in parts
(:mod:`commlayer.integrations.pass_parts`): a stage has two tasks under way, and goes from one to the other where an exchange
is under way that the next part waits for. Under ``gpipe`` two forward passes meet, then two backward passes; under ``1f1b``
one of each, as in DualPipe and in Megatron-Core's overlap of the expert all_to_all. There a stage goes ahead by 2 (p − 1 − s)
micro-batches instead of p − 1 − s, so that beside each backward pass there is a forward pass whose input has come.

Losses and gradients have the same bits as from :func:`~commlayer.integrations.pipeline_schedules.run_pipeline`: micro-batches
come to each parameter in the same order, because of two tasks the earlier is always ahead.

The order of all calls follows from the stage and the number of micro-batches alone, so all ranks of a stage issue theirs
alike. Rejected: to go on with whichever of the two is ready, which hides more of a late exchange, and deadlocks where ranks
differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from itertools import zip_longest

import torch

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.buckets import GradientBuckets
from commlayer.integrations.pass_parts import CutPass, Parts
from commlayer.integrations.pipeline_schedules import Schedule, StageEnds, StageTask, most_ahead, tasks_of
from commlayer.integrations.remat import is_rematerialising
from commlayer.profiles.errors import UsageError

__all__ = ["run_overlapped_pipeline"]

_AT_ONCE = 2


def run_overlapped_pipeline(
    stage: Callable[[int, torch.Tensor | None], Parts[torch.Tensor]],
    pp: GroupCommunicator,
    shapes: Sequence[Sequence[int]],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    schedule: Schedule = "1f1b",
    gradients: GradientBuckets | None = None,
) -> list[torch.Tensor]:
    """Run forward and backward pass of every micro-batch, two at a time. Collective over ``pp``.

    Args:
        stage: as of :func:`~commlayer.integrations.pipeline_schedules.run_pipeline`, but returns its forward pass in parts,
            such as :meth:`commlayer.integrations.block.MoETransformerLayer.parts`; the first begins at once.
        pp, shapes, dtype, device, schedule, gradients: as there. Collectives of the stage over other groups come in another order
            than there.

    Returns:
        The losses on the last stage, in the order of micro-batches, detached; nothing elsewhere.

    Raises:
        UsageError: no micro-batches, or no such schedule.
        TensorError, PeerError, CollectiveTimeoutError: as the stage and messages do.
    """
    if is_rematerialising():
        raise UsageError("run_overlapped_pipeline() in a Rematerialise: enter one inside a part, or use run_pipeline()")
    if not shapes:
        raise UsageError("run_overlapped_pipeline() needs at least one micro-batch: pass its activations' shape")
    tasks = tasks_of(schedule, pp.rank, pp.size, len(shapes), in_pairs=True)
    ahead = len(shapes) if schedule == "gpipe" else most_ahead(pp.rank, pp.size)
    ends = StageEnds(pp, shapes, dtype, device)
    run = _Run(stage, pp, ends, len(shapes), gradients, ahead, is_in_pairs=schedule == "1f1b")
    for task, then in zip_longest(tasks, tasks[1:]):
        run.make_room_for(task)
        run.begin(task, then)
    run.end()
    return run.losses


class _Run:
    """The tasks of one stage that are under way, earlier ones first, and what later ones need of them."""

    def __init__(
        self,
        stage: Callable[[int, torch.Tensor | None], Parts[torch.Tensor]],
        pp: GroupCommunicator,
        ends: StageEnds,
        num_micro_batches: int,
        gradients: GradientBuckets | None,
        ahead: int,
        *,
        is_in_pairs: bool,
    ) -> None:
        self._stage, self._ends, self._gradients = stage, ends, gradients
        self._ahead, self._is_in_pairs = ahead, is_in_pairs
        self._last, self._is_last_stage = num_micro_batches - 1, pp.rank == pp.size - 1
        self._inputs: dict[int, torch.Tensor | None] = {}
        self._passes: dict[int, CutPass] = {}
        self._under_way: dict[StageTask, Generator[None, None, None]] = {}
        self.losses: list[torch.Tensor] = []

    def make_room_for(self, task: StageTask) -> None:
        """Go on with what is under way until ``task`` may begin: behind its own forward pass, and, where it waits for an answer,
        behind those which the next stage has to begin before it can end that answer."""
        while self._under_way and not self._may_join(task):
            self._go_on()

    def _may_join(self, task: StageTask) -> bool:
        """Whether ``task`` may begin beside what is under way. Under 1F1B only a forward pass does, beside a backward pass, whose
        exchanges then meet attention: what fills and drains the pipeline goes one by one, or the next stage would wait for two
        before it has one."""
        if len(self._under_way) >= _AT_ONCE or self._is_behind(task):
            return False
        return not self._is_in_pairs or (task.is_forward and not any(each.is_forward for each in self._under_way))

    def _is_behind(self, task: StageTask) -> bool:
        """Whether a forward pass is under way that a backward pass comes behind."""
        needed = -1 if task.is_forward else task.m if self._is_last_stage else task.m + self._ahead - 1
        return any(each.is_forward and each.m <= needed for each in self._under_way)

    def begin(self, task: StageTask, then: StageTask | None) -> None:
        """Begin ``task`` when what it needs of a neighbour is there, and run its first part."""
        if then is not None and self._is_behind(then):
            then = None  # asked for when those have been sent: no order of messages rests on buffers
        received = self._ends.turn(task, then)
        self._under_way[task] = self._forward(task, received) if task.is_forward else self._backward(task, received)
        self._step(task)

    def end(self) -> None:
        while self._under_way:
            self._go_on()
        self._ends.finish()

    def _go_on(self) -> None:
        """Run the next part of each task, the earliest first."""
        for task in list(self._under_way):
            self._step(task)

    def _step(self, task: StageTask) -> None:
        if next(self._under_way[task], _ENDED) is _ENDED:
            first = next(each for each in self._under_way if each.is_forward == task.is_forward)
            del self._under_way[task]
            if first is not task:
                raise UsageError(
                    f"micro-batch {task.m} has ended before an earlier one: cut all micro-batches into as many parts, or their "
                    "messages change places"
                )

    def _forward(self, task: StageTask, received: torch.Tensor | None) -> Generator[None, None, None]:
        x = self._inputs[task.m] = None if received is None else received.requires_grad_()
        made = self._passes[task.m] = CutPass(self._stage(task.m, x))
        while made.forward():
            yield
        self._ends.check(task, made.result)
        self._ends.send(task, made.result.detach())
        if self._is_last_stage:
            self.losses.append(made.result.detach())

    def _backward(self, task: StageTask, received: torch.Tensor | None) -> Generator[None, None, None]:
        x, parts = self._inputs.pop(task.m), self._passes.pop(task.m).backward(received)
        while True:
            # Not around all parts: between two of them another micro-batch's run.
            with self._accumulating(task.m):
                has_ended = next(parts, _ENDED) is _ENDED
            if has_ended:
                break
            yield
        if x is not None:
            self._ends.send(task, torch.zeros_like(x) if x.grad is None else x.grad)

    def _accumulating(self, m: int) -> contextlib.AbstractContextManager[None]:
        """Gradients of the last micro-batch may go when they are there: those of all others have come to the same parameters."""
        if self._gradients is None or m == self._last:
            return contextlib.nullcontext()
        return self._gradients.accumulating()


_ENDED = object()
