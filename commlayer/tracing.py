"""When each step of a running plan really started and ended, as one rank sees it.

Rejected: asking Gloo's works whether they are completed. A Gloo receive says so only after somebody waited for it. So a
thread for each resource waits for its steps in plan order and stamps the time; each work still has one waiter only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from commlayer.profiles.links import Resource
from commlayer.scheduler.plan import Plan
from commlayer.scheduler.price import Timeline
from commlayer.transport import Call

__all__ = ["traced", "traced_whole"]


class _Trace:
    def __init__(self, plan: Plan, call: Call) -> None:
        self.plan, self.call = plan, call
        count = len(plan.steps)
        self.posted = [threading.Event() for _ in range(count)]
        self.ended = [threading.Event() for _ in range(count)]
        self.start_us = [0.0] * count
        self.end_us = [0.0] * count
        self.failure: BaseException | None = None
        self.origin = time.perf_counter()

    def now_us(self) -> float:
        return (time.perf_counter() - self.origin) * 1e6

    def watch(self, resource: Resource) -> None:
        for index, step in enumerate(self.plan.steps):
            if step.resource is not resource:
                continue
            self.posted[index].wait()
            try:
                if self.failure is None:
                    self.call.require(index, index)
            except BaseException as error:  # noqa: BLE001  carried to the calling thread, raised there
                self.failure = error
            self.end_us[index] = self.now_us()
            self.ended[index].set()

    def drive(self) -> None:
        try:
            for index, step in enumerate(self.plan.steps):
                for earlier in step.after:
                    self.ended[earlier].wait()
                if self.failure is not None:
                    break
                self.start_us[index] = self.now_us()
                self.call.post(index)
                self.posted[index].set()
        except BaseException as error:  # noqa: BLE001  the watchers must be released first; raised by timeline()
            self.failure = self.failure or error
        finally:
            for event in self.posted:
                event.set()

    def timeline(self) -> Timeline:
        if self.failure is not None:
            raise self.failure
        self.call.finish()
        free: dict[Resource, float] = {}
        spans = []
        for step, posted, end in zip(self.plan.steps, self.start_us, self.end_us, strict=True):
            start = min(max(posted, free.get(step.resource, 0.0)), end)
            free[step.resource] = end
            spans.append((start, end))
        return Timeline(self.plan, tuple(spans))


def traced(plan: Plan, call: Call) -> Timeline:
    """Drive ``call`` and return its measured timeline, µs from the call. The call's transport must wait on the host.

    A step's start is when it was posted or when its resource became free, whichever is later. Raises what the call raises.
    """
    trace = _Trace(plan, call)
    watchers = [
        threading.Thread(target=trace.watch, args=(resource,), name=f"commlayer-trace-{resource.value}", daemon=True)
        for resource in {step.resource for step in plan.steps}
    ]
    for watcher in watchers:
        watcher.start()
    trace.drive()
    for watcher in watchers:
        watcher.join()
    return trace.timeline()


def traced_whole(plan: Plan, run: Callable[[], None]) -> Timeline:
    """The timeline of a plan of one step that the backend does in one call."""
    begin = time.perf_counter()
    run()
    return Timeline(plan, ((0.0, (time.perf_counter() - begin) * 1e6),))
