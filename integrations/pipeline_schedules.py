"""Micro-batches through the stages of a pipeline: activations one way, their gradients back.

Two schedules that compute the same. ``gpipe``: all micro-batches forward, then all backward. ``1f1b`` (PipeDream-Flush,
Megatron-LM's): a stage goes ahead by as many micro-batches as stages follow it, then takes turns, so that it keeps the
activations of at most as many as there are stages.

What a stage sends goes in one exchange with what it will receive for its *next* task, posted before the present one is computed:
transfers in both directions run beside the computation. One receive is not posted ahead: that of a gradient, before the
activations that it is the answer to have been sent. Where messages go one by one in the order in which they were issued (NCCL,
on one communicator), two neighbours would wait for each other. So is every order that a stage issues safe without buffers; a
test runs all sizes that way.

An exchange that only sends is waited for two turns later, or what was sent would stay until the end. That cannot deadlock, under
either schedule, at whatever turn it is done:

- Where exchanges go one by one in the order of issue, without buffers, all that a stage issues later starts after this exchange
  has ended anyway. So the end of this exchange hangs on nothing that the stage does later, and the stage loses nothing but time
  by waiting for it. As the schedule ends there without these waits, it ends with them.
- A network that does more at once ends an exchange as soon as both sides have posted its messages. Go through what happens in
  the strict one, in its order: whatever has been posted there by then has been posted here too, so each wait ends here that
  ended there.

Two turns, not one: a message has the time of one whole task, and of what the next one waits for, before it holds anybody up.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple, get_args

import torch

from commlayer.collectives import Exchange, GroupCommunicator
from commlayer.integrations.buckets import GradientBuckets
from commlayer.profiles.errors import TensorError, UsageError

__all__ = ["Schedule", "StageEnds", "StageTask", "most_ahead", "run_pipeline", "tasks_of"]

Schedule = Literal["gpipe", "1f1b"]
_TURNS = 2
"""After which an exchange that only sends is waited for."""


class StageTask(NamedTuple):
    """One pass of one micro-batch."""

    is_forward: bool
    m: int


def tasks_of(
    schedule: Schedule, stage: int, num_stages: int, num_micro_batches: int, *, in_pairs: bool = False
) -> list[StageTask]:
    """List the tasks of a stage, in order.

    ``in_pairs``: a task runs beside the one before it, so that under ``1f1b`` a stage goes ahead by twice as many: one
    micro-batch is forward beside another that is backward.

    Raises UsageError for no such schedule.
    """
    if schedule not in get_args(Schedule):
        raise UsageError(f"schedule must be one of {', '.join(get_args(Schedule))}, got {schedule!r}")
    # One stage alone need not keep the activations of all micro-batches under either.
    behind = num_stages - 1 - stage
    is_gpipe = schedule == "gpipe" and (num_stages > 1 or in_pairs)
    in_pairs_ahead = min(num_micro_batches, most_ahead(stage, num_stages))
    ahead = num_micro_batches if is_gpipe else in_pairs_ahead if in_pairs else behind
    tasks = []
    for step in range(num_micro_batches + ahead):
        if step < num_micro_batches:
            tasks.append(StageTask(True, step))
        if step >= ahead:
            tasks.append(StageTask(False, step - ahead))
    return tasks


def most_ahead(stage: int, num_stages: int) -> int:
    """Return by how many micro-batches a stage goes ahead under 1F1B where two go through it at a time."""
    return 2 * (num_stages - 1 - stage)


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
    """Run forward and backward pass of every micro-batch. Collective over ``pp``, whose ranks are the stages, in order.

    Args:
        stage: what this rank does with micro-batch m: ``stage(m, x)`` gets the activations of the stage before (None on the
            first, which has its own input) and returns its own; on the last stage it returns a loss, a scalar.
        pp: the stages.
        shapes: of the activations of each micro-batch, the same between all stages.
        dtype: of the activations.
        device: of the activations.
        schedule: ``gpipe`` or ``1f1b``, see the module. Collectives that the stage makes over *other* groups come in another
            order under each, so all ranks of those groups take the same.
        gradients: of what the stage computes with: their sums start in the last micro-batch's backward pass. Who passes
            them calls ``finish()`` after this.

    Returns:
        The losses on the last stage, in the order of micro-batches, detached; nothing elsewhere. Gradients are added to those
        of the parameters.

    Raises:
        UsageError: no micro-batches, or no such schedule.
        TensorError, PeerError, CollectiveTimeoutError: as the stage and messages do.
    """
    if not shapes:
        raise UsageError("run_pipeline() needs at least one micro-batch: pass its activations' shape")
    tasks = tasks_of(schedule, pp.rank, pp.size, len(shapes))
    ends = StageEnds(pp, shapes, dtype, device)
    inputs: dict[int, torch.Tensor | None] = {}
    outputs: dict[int, torch.Tensor] = {}
    losses = []
    for task, then in zip_longest(tasks, tasks[1:]):
        received, m = ends.turn(task, then), task.m
        if task.is_forward:
            x = inputs[m] = None if received is None else received.requires_grad_()
            outputs[m] = stage(m, x)
            ends.check(task, outputs[m])
            ends.send(task, outputs[m].detach())
            continue
        x, y = inputs.pop(m), outputs.pop(m)
        is_last = m == len(shapes) - 1
        with contextlib.nullcontext() if gradients is None or is_last else gradients.accumulating():
            gradient = _backward(x, y, received)
        if gradient is not None:
            ends.send(task, gradient)
        if pp.rank == pp.size - 1:
            losses.append(y.detach())
    ends.finish()
    return losses


def _backward(x: torch.Tensor | None, y: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Run the backward pass of a stage from ``y`` to its input ``x``, whose gradient it returns; None where there is no input."""
    if y.requires_grad:  # not behind a first stage that is frozen: what comes back is of no use there
        torch.autograd.backward(y, gradient)
    if x is None:
        return None
    return torch.zeros_like(x) if x.grad is None else x.grad


class StageEnds:
    """The messages to and from both neighbours. Those without elements are not sent: both sides know the shapes."""

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
        self._sending: deque[tuple[int, Exchange]] = deque()  # that only send, by the turn in which they were started

    def turn(self, task: StageTask, then: StageTask | None) -> torch.Tensor | None:
        """Return what ``task`` needs of a neighbour, once it is there; None where there is none. Before that, all that is
        to be sent goes, and what the next task needs is asked for."""
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
        """The next stage has room for what was said, and would take other bytes for it. Raises TensorError."""
        wanted = tuple(self._shapes[task.m])
        if self._pp.rank < self._pp.size - 1 and (tuple(y.shape) != wanted or y.dtype != self._dtype):
            raise TensorError(
                f"stage {self._pp.rank} of {self._pp.size}, micro-batch {task.m}: expected activations of shape {list(wanted)}, "
                f"{self._dtype}, as run_pipeline() was told; got {list(y.shape)}, {y.dtype}: pass their shapes and dtype (under "
                "autocast that of the activations, or cast them)"
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
        """Wait for what only sends and was started in ``last_turn`` or before. No deadlock: see the module."""
        while self._sending and self._sending[0][0] <= last_turn:
            self._sending.popleft()[1].wait()

    def _exchange(self, tasks: Sequence[StageTask]) -> None:
        receives = []
        for task in tasks:
            source = self._pp.rank + (-1 if task.is_forward else 1)
            if 0 <= source < self._pp.size:
                shape = self._shapes[task.m]
                receives.append((task, torch.empty(*shape, dtype=self._dtype, device=self._device), source))
        if not receives and not self._to_send:
            return
        sends, self._to_send = self._to_send, []
        under_way = self._pp.start_exchange(sends, [(x, source) for _, x, source in receives])
        self._posted |= {task: (x, under_way) for task, x, _ in receives}
        if not receives:
            self._sending.append((self._turn, under_way))
