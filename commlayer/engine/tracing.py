"""When each step of a running plan really started and ended, as one rank sees it.

Rejected: asking Gloo's works whether they are completed. A Gloo receive says so only after somebody
waited for it. So a thread for each resource waits for its steps in plan order and stamps the time;
each work still has one waiter only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

import torch

from commlayer.calls.ring import Call, StepRecord
from commlayer.engine.runner import drive
from commlayer.profiles.links import Resource
from commlayer.scheduler.moves import Moves
from commlayer.scheduler.plan import Plan
from commlayer.scheduler.price import Timeline
from commlayer.transport.contract import StartedPlan

__all__ = [
    "Recorded",
    "RecordedCall",
    "StepTimes",
    "record_steps",
    "recorded",
    "traced",
]


class StepTimes(NamedTuple):
    """The times of one step, on the clock of ``time.perf_counter_ns``: when what it waits for had
    ended, when it was posted (after any hold), and when it had ended."""

    enqueue_ns: int
    start_ns: int
    end_ns: int


class Recorded(NamedTuple):
    """The result of :func:`recorded`: the times of each step in plan order, and for how long the
    gate held steps back, ns."""

    steps: list[StepTimes]
    held_ns: int


class RecordedCall:
    """A call whose steps are timed: a StartedPlan around another one, so that whoever drives that
    one can drive this.

    ``call``: started, of a transport that waits on the host. ``gate``: called with a step's index
    just before it is posted, returns for how long it held the step back, ns. A context manager:
    however it is left, the threads that watch are let go. After :meth:`finish`, :attr:`recorded`
    has the times.
    """

    def __init__(self, plan: Plan, call: StartedPlan, gate: Callable[[int], int] | None = None) -> None:
        self.plan = plan
        self.begin_ns = time.perf_counter_ns()
        self._call, self._gate = call, gate
        count = len(plan.steps)
        self._posted = [threading.Event() for _ in range(count)]
        self._ended = [threading.Event() for _ in range(count)]
        self._enqueue_ns, self._start_ns, self._end_ns = [0] * count, [0] * count, [0] * count
        self._held_ns = 0
        self._is_inference = torch.is_inference_mode_enabled()
        self._is_left = False
        self._failure: BaseException | None = None
        self._watchers = [
            threading.Thread(
                target=self._watch, args=(resource,), name=f"commlayer-trace-{resource.value}", daemon=True
            )
            for resource in {step.resource for step in plan.steps}
        ]

    def _watch(self, resource: Resource) -> None:
        with torch.inference_mode(self._is_inference):  # a mode of threads, in which the call's buffers may be
            for index, step in enumerate(self.plan.steps):
                if step.resource is not resource:
                    continue
                self._posted[index].wait()
                try:
                    if self._failure is None and not self._is_left:
                        self._call.require(index, index)
                except BaseException as error:  # noqa: BLE001  carried to the driving thread, raised there
                    self._failure = error
                self._end_ns[index] = time.perf_counter_ns()
                self._ended[index].set()

    @property
    def steps(self) -> Sequence[Moves]:
        """The moves of the call that is timed."""
        return self._call.steps

    def require(self, earlier: int, index: int) -> None:
        """Return when step ``earlier`` has ended. Raises what any step so far has raised."""
        del index  # the host waits, whoever comes next
        self._ended[earlier].wait()
        if self._failure is not None:
            raise self._failure

    def post(self, index: int) -> None:
        """Start step ``index``, after the gate. Raises what any step so far has raised."""
        if self._failure is not None:
            raise self._failure
        self._enqueue_ns[index] = time.perf_counter_ns()
        if self._gate is not None:
            self._held_ns += self._gate(index)
        self._start_ns[index] = time.perf_counter_ns()
        self._call.post(index)
        self._posted[index].set()

    def finish(self) -> None:
        """Return when every step, and the call, has ended. Raises what a step raised. Every step
        must have been posted."""
        for ended in self._ended:
            ended.wait()
        self._release()
        if self._failure is not None:
            raise self._failure
        self._call.finish()

    @property
    def recorded(self) -> Recorded:
        """Times of the steps, once the call is finished."""
        times = zip(self._enqueue_ns, self._start_ns, self._end_ns, strict=True)
        return Recorded([StepTimes(*each) for each in times], self._held_ns)

    def _release(self) -> None:
        self._is_left = True
        for posted in self._posted:
            posted.set()
        for watcher in self._watchers:
            if watcher.is_alive():
                watcher.join()

    def __enter__(self) -> RecordedCall:
        try:
            for watcher in self._watchers:
                watcher.start()
        except RuntimeError:  # as many threads as may be; those that have been started wait for steps
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()


def _driven(plan: Plan, call: StartedPlan, gate: Callable[[int], int] | None) -> RecordedCall:
    with RecordedCall(plan, call, gate) as timed:
        drive(plan, timed)
        timed.finish()
    return timed


def recorded(plan: Plan, call: StartedPlan, gate: Callable[[int], int] | None = None) -> Recorded:
    """Drive ``call`` to its end, as :func:`commlayer.engine.runner.drive` and ``finish()`` would;
    return when its steps ran.

    ``gate`` is called on this thread before each step is posted. The call's transport must wait on
    the host. Costs a thread for each resource. Raises what the call or the gate raises.
    """
    return _driven(plan, call, gate).recorded


def record_steps(call: Call, plan: Plan, started: StartedPlan, found: Recorded) -> None:
    """Write into ``call``, whose plan has ended, when its steps ran, what each sent, and for how
    long they were held."""
    call.held_ns = found.held_ns
    call.steps = tuple(
        StepRecord(
            step.op.value,
            step.resource.value,
            step.chunk,
            step.bytes,
            sum(message.region.size for message in moves.sends),
            *times,
        )
        for step, moves, times in zip(plan.steps, started.steps, found.steps, strict=True)
    )


def traced(plan: Plan, call: StartedPlan, gate: Callable[[int], int] | None = None) -> Timeline:
    """Drive ``call`` and return its measured timeline, µs from the call. The call's transport must
    wait on the host.

    A step's start is when it was posted or when its resource became free, whichever is later.
    ``gate``: as :func:`recorded`. Costs a thread for each resource and a wake-up a step, so it is
    for pictures and audits, not for timing. Raises what the call raises.
    """
    timed = _driven(plan, call, gate)
    free: dict[Resource, int] = {}
    spans = []
    for step, times in zip(plan.steps, timed.recorded.steps, strict=True):
        start_ns = min(max(times.start_ns, free.get(step.resource, 0)), times.end_ns)
        free[step.resource] = times.end_ns
        spans.append(((start_ns - timed.begin_ns) / 1e3, (times.end_ns - timed.begin_ns) / 1e3))
    return Timeline(plan, tuple(spans))
