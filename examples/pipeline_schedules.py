"""Micro-batches through the stages of a pipeline: activations one way, their gradients back.

Two schedules that compute the same. ``gpipe``: all micro-batches forward, then all backward.
``1f1b`` (PipeDream-Flush, Megatron-LM's): a stage goes ahead by as many micro-batches as stages
follow it, then takes turns, so that it keeps the activations of at most as many as there are
stages.

A stage has one task under way, or two (:func:`run_overlapped_pipeline`), of which it runs the
parts (:mod:`examples.pass_parts`) in turns. Losses and gradients have the same bits
either way: micro-batches come to each parameter in the same order, because of two tasks the
earlier is always ahead. The order of all calls follows from the stage and the number of
micro-batches alone, so all ranks of a stage issue theirs alike. Rejected: to go on with whichever
of the two is ready, which hides more of a late exchange, and deadlocks where ranks differ.

What a stage sends goes in one exchange with what it will receive for its *next* task, posted
before the present one is computed: transfers in both directions run beside the computation. One
receive is not posted ahead: that of a gradient, before the activations that it is the answer to
have been sent. Where messages go one by one in the order in which they were issued (NCCL, on one
communicator), two neighbours would wait for each other. So is every order that a stage issues safe
without buffers; a test runs all sizes that way.

An exchange that only sends is waited for two turns later, or what was sent would stay until the
end. That cannot deadlock, under either schedule, at whatever turn it is done:

- Where exchanges go one by one in the order of issue, without buffers, all that a stage issues
  later starts after this exchange has ended anyway. So the end of this exchange hangs on nothing
  that the stage does later, and the stage loses nothing but time by waiting for it. As the schedule
  ends there without these waits, it ends with them.
- A network that does more at once ends an exchange as soon as both sides have posted its messages.
  Go through what happens in the strict one, in its order: whatever has been posted there by then
  has been posted here too, so each wait ends here that ended there.

Two turns, not one: a message has the time of one whole task, and of what the next one waits for,
before it holds anybody up.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple, get_args

import torch

from commlayer.collectives import Exchange, GroupCommunicator
from commlayer.integrations.remat import is_rematerialising
from commlayer.profiles.errors import TensorError, UsageError
from examples.buckets import GradientBuckets
from examples.pass_parts import CutPass, Parts

__all__ = ["Schedule", "StageTask", "run_overlapped_pipeline", "run_pipeline", "tasks_of"]

Schedule = Literal["gpipe", "1f1b"]
_TURNS = 2
"""After which an exchange that only sends is waited for."""
_ENDED = object()


class StageTask(NamedTuple):
    """One pass of one micro-batch."""

    is_forward: bool
    m: int


def tasks_of(
    schedule: Schedule,
    stage: int,
    num_stages: int,
    num_micro_batches: int,
    *,
    in_pairs: bool = False,
) -> list[StageTask]:
    """List the tasks of a stage, in order.

    ``in_pairs``: a task runs beside the one before it, so that under ``1f1b`` a stage goes ahead by
    twice as many: one micro-batch is forward beside another that is backward.

    Raises UsageError for no such schedule.
    """
    if schedule not in get_args(Schedule):
        raise UsageError(f"schedule must be one of {', '.join(get_args(Schedule))}, got {schedule!r}")
    behind = num_stages - 1 - stage
    ahead = min(num_micro_batches, 2 * behind) if in_pairs else behind
    # One stage alone need not keep the activations of all micro-batches under either.
    if schedule == "gpipe" and (num_stages > 1 or in_pairs):
        ahead = num_micro_batches
    tasks = []
    for step in range(num_micro_batches + ahead):
        if step < num_micro_batches:
            tasks.append(StageTask(True, step))
        if step >= ahead:
            tasks.append(StageTask(False, step - ahead))
    return tasks


def run_pipeline(
    stage: Callable[[int, torch.Tensor | None], torch.Tensor],
    pp: GroupCommunicator,
    shapes: Sequence[Sequence[int]],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    schedule: Schedule = "gpipe",
    gradients: GradientBuckets | None = None,
) -> list[torch.Tensor]:
    """Run forward and backward pass of every micro-batch. Collective over ``pp``, whose ranks are
    the stages, in order.

    Args:
        stage: what this rank does with micro-batch m: ``stage(m, x)`` gets the activations of the
            stage before (None on the first, which has its own input) and returns its own; on the
            last stage it returns a loss, a scalar.
        pp: the stages.
        shapes: of the activations of each micro-batch, the same between all stages.
        dtype: of the activations.
        device: of the activations.
        schedule: ``gpipe`` or ``1f1b``, see the module. Collectives that the stage makes over
            *other* groups come in another order under each, so all ranks of those groups take the
            same.
        gradients: of what the stage computes with: their sums start in the last micro-batch's
            backward pass. Who passes them calls ``finish()`` after this.

    Returns:
        The losses on the last stage, in the order of micro-batches, detached; nothing elsewhere.
        Gradients are added to those of the parameters.

    Raises:
        UsageError: no micro-batches, or no such schedule.
        TensorError, PeerError, CollectiveTimeoutError: as the stage and messages do.
    """
    if not shapes:
        raise UsageError("run_pipeline() needs at least one micro-batch: pass its activations' shape")

    def in_one_part(m: int, x: torch.Tensor | None) -> Parts[torch.Tensor]:
        yield from ()
        return stage(m, x)

    ends = StageEnds(pp, shapes, dtype, device)
    return _StageRun(in_one_part, pp, ends, schedule, gradients, in_pairs=False).run(len(shapes))


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
    """Run forward and backward pass of every micro-batch, two at a time: one's tokens travel to
    experts while the other is computed. Collective over ``pp``.

    A stage goes from one of its two tasks to the other where an exchange is under way that the next
    part waits for. Under ``gpipe`` two forward passes meet, then two backward passes; under
    ``1f1b`` one of each, as in DualPipe and in Megatron-Core's overlap of the expert all_to_all.
    There a stage goes ahead by 2 (p − 1 − s) micro-batches instead of p − 1 − s, so that beside
    each backward pass there is a forward pass whose input has come.

    Args:
        stage: as of :func:`run_pipeline`, but returns its forward pass in parts, such as
            :meth:`examples.block.MoETransformerLayer.parts`; the first begins at
            once.
        pp, shapes, dtype, device, schedule, gradients: as there. Collectives of the stage over
            other groups come in another order than there.

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
    ends = StageEnds(pp, shapes, dtype, device)
    return _StageRun(stage, pp, ends, schedule, gradients, in_pairs=True).run(len(shapes))


class _StageRun:
    """One stage's tasks: those under way, earlier ones first, and what later ones need of them.

    ``in_pairs``: two may be under way; else one.
    """

    def __init__(
        self,
        stage: Callable[[int, torch.Tensor | None], Parts[torch.Tensor]],
        pp: GroupCommunicator,
        ends: StageEnds,
        schedule: Schedule,
        gradients: GradientBuckets | None,
        *,
        in_pairs: bool,
    ) -> None:
        self._stage = stage
        self._pp = pp
        self._ends = ends
        self._schedule = schedule
        self._gradients = gradients
        self._in_pairs = in_pairs
        self._is_last_stage = pp.rank == pp.size - 1
        self._num_micro_batches = 0
        self._inputs: dict[int, torch.Tensor | None] = {}
        self._passes: dict[int, CutPass] = {}
        self._under_way: dict[StageTask, Generator[None, None, None]] = {}
        self._losses: list[torch.Tensor] = []

    def run(self, num_micro_batches: int) -> list[torch.Tensor]:
        """Run all tasks, and return the losses."""
        pp, self._num_micro_batches = self._pp, num_micro_batches
        tasks = tasks_of(self._schedule, pp.rank, pp.size, num_micro_batches, in_pairs=self._in_pairs)
        for task, then in zip_longest(tasks, tasks[1:]):
            while self._under_way and not self._may_join(task):
                self._go_on()
            self._begin(task, then)
        while self._under_way:
            self._go_on()
        self._ends.finish()
        return self._losses

    def _may_join(self, task: StageTask) -> bool:
        """Whether ``task`` may begin beside what is under way: behind its own forward pass, and,
        where it waits for an answer, behind those which the next stage has to begin before it can
        end that answer. Under 1F1B only a forward pass begins so, beside a backward pass, whose
        exchanges then meet attention: what fills and drains the pipeline goes one by one, or the
        next stage would wait for two before it has one."""
        if not self._in_pairs or len(self._under_way) > 1 or self._is_behind(task):
            return False
        if self._schedule == "gpipe":
            return True
        return task.is_forward and not any(each.is_forward for each in self._under_way)

    def _is_behind(self, task: StageTask) -> bool:
        """Whether a forward pass is under way that a backward pass comes behind."""
        if task.is_forward:
            return False
        last = task.m
        if not self._is_last_stage:
            behind = 2 * (self._pp.size - 1 - self._pp.rank)
            last += (self._num_micro_batches if self._schedule == "gpipe" else behind) - 1
        return any(each.is_forward and each.m <= last for each in self._under_way)

    def _begin(self, task: StageTask, then: StageTask | None) -> None:
        """Begin ``task`` when what it needs of a neighbour is there, and run its first part."""
        if then is not None and self._is_behind(then):
            then = None  # asked for when those have been sent: no order of messages rests on buffers
        received = self._ends.turn(task, then)
        run = self._forward if task.is_forward else self._backward
        self._under_way[task] = run(task, received)
        self._step(task)

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
                    f"micro-batch {task.m} has ended before an earlier one: cut all micro-batches "
                    "into as many parts, or their messages change places"
                )

    def _forward(self, task: StageTask, received: torch.Tensor | None) -> Generator[None, None, None]:
        x = self._inputs[task.m] = None if received is None else received.requires_grad_()
        made = self._passes[task.m] = CutPass(self._stage(task.m, x))
        while made.forward():
            yield
        self._ends.check(task, made.result)
        self._ends.send(task, made.result.detach())
        if self._is_last_stage:
            self._losses.append(made.result.detach())

    def _backward(self, task: StageTask, received: torch.Tensor | None) -> Generator[None, None, None]:
        x, parts = self._inputs.pop(task.m), self._passes.pop(task.m).backward(received)
        # Gradients of the last micro-batch may go when they are there: those of all others have
        # come to the same parameters.
        is_last = task.m == self._num_micro_batches - 1
        gradients = None if is_last else self._gradients
        while True:
            # Not around all parts: between two of them another micro-batch's run.
            with contextlib.nullcontext() if gradients is None else gradients.accumulating():
                has_ended = next(parts, _ENDED) is _ENDED
            if has_ended:
                break
            yield
        if x is not None:
            self._ends.send(task, torch.zeros_like(x) if x.grad is None else x.grad)


class StageEnds:
    """The messages to and from both neighbours. Those without elements are not sent: both sides
    know the shapes."""

    def __init__(
        self,
        pp: GroupCommunicator,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self._pp, self._shapes, self._dtype, self._device = pp, shapes, dtype, device
        self._to_send: list[tuple[torch.Tensor, int]] = []
        self._posted: dict[StageTask, tuple[torch.Tensor, Exchange]] = {}
        self._turn = 0
        # Exchanges that only send, by the turn in which they were started.
        self._sending: deque[tuple[int, Exchange]] = deque()

    def turn(self, task: StageTask, then: StageTask | None) -> torch.Tensor | None:
        """Return what ``task`` needs of a neighbour, once it is there; None where there is none.
        Before that, all that is to be sent goes, and what the next task needs is asked for."""
        self._turn += 1
        is_answer = then is not None and task.is_forward and not then.is_forward
        ahead = [] if then is None or is_answer else [then]
        if task not in self._posted:  # one exchange each: they are waited for one after the other
            self._exchange([task])
            if ahead:
                self._exchange(ahead)
        else:
            self._exchange(ahead)
        x = None
        if task in self._posted:
            x, under_way = self._posted.pop(task)
            under_way.wait()
        self._let_go(self._turn - _TURNS)
        return x

    def check(self, task: StageTask, y: torch.Tensor) -> None:
        """Check that the next stage has room for ``y``, and would read it as such. Raises
        TensorError."""
        wanted = tuple(self._shapes[task.m])
        is_last_stage = self._pp.rank == self._pp.size - 1
        if not is_last_stage and (tuple(y.shape) != wanted or y.dtype != self._dtype):
            raise TensorError(
                f"stage {self._pp.rank} of {self._pp.size}, micro-batch {task.m}: expected "
                f"activations of shape {list(wanted)}, {self._dtype}, as run_pipeline() was told; "
                f"got {list(y.shape)}, {y.dtype}: pass their shapes and dtype (under autocast that "
                "of the activations, or cast them)"
            )

    def send(self, task: StageTask, x: torch.Tensor) -> None:
        """At the next turn: what ``task`` has made, to whoever goes on with it."""
        destination = self._pp.rank + (1 if task.is_forward else -1)
        if 0 <= destination < self._pp.size:
            self._to_send.append((x.contiguous(), destination))

    def finish(self) -> None:
        self._exchange([])
        self._let_go(self._turn)

    def _let_go(self, last_turn: int) -> None:
        """Wait for what only sends and was started in ``last_turn`` or before. No deadlock: see the
        module."""
        while self._sending and self._sending[0][0] <= last_turn:
            self._sending.popleft()[1].wait()

    def _exchange(self, tasks: Sequence[StageTask]) -> None:
        receives = []
        for task in tasks:
            source = self._pp.rank + (-1 if task.is_forward else 1)
            if 0 <= source < self._pp.size:
                x = torch.empty(*self._shapes[task.m], dtype=self._dtype, device=self._device)
                receives.append((task, x, source))
        if not receives and not self._to_send:
            return
        sends, self._to_send = self._to_send, []
        under_way = self._pp.start_exchange(sends, [(x, source) for _, x, source in receives])
        self._posted |= {task: (x, under_way) for task, x, _ in receives}
        if not receives:
            self._sending.append((self._turn, under_way))
