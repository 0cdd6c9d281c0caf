"""Plan + profile → timeline: when each step starts and ends.

The steps are list-scheduled: a resource takes its steps in plan order, one at a time, each as soon as the steps it waits
for have ended. Where the profile says that two resources slow each other down, steps that run side by side progress at
the slower rate (a fluid model: a step's work is its time alone, done at 1/slowdown while the other resource is busy).
A chunk of a stream is never faster than the link's peak: a message measured alone may be, where the wire takes a burst on
credit, but the chunks behind it pay the credit back.
MoNTA's equations 8 to 11 and the closed forms of its algorithms follow from this and are tests of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commlayer.profiles.errors import InternalError
from commlayer.profiles.links import Resource, bus_factor
from commlayer.profiles.profile import Profile
from commlayer.scheduler.plan import Op, Plan

__all__ = ["Timeline", "price"]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The predicted (or measured) course of a plan: ``spans[i]`` is (start_us, end_us) of step i."""

    plan: Plan
    spans: tuple[tuple[float, float], ...]
    is_extrapolated: bool = False

    @property
    def total_us(self) -> float:
        """From the call to the end of the last step, µs."""
        return max((end for _, end in self.spans), default=0.0)

    def busy_us(self) -> dict[Resource, float]:
        """For how long each resource works, µs."""
        busy: dict[Resource, float] = {}
        for step, (start, end) in zip(self.plan.steps, self.spans, strict=True):
            busy[step.resource] = busy.get(step.resource, 0.0) + end - start
        return busy

    @property
    def bottleneck(self) -> Resource:
        """The resource that is busy longest: to be faster, move less over it."""
        busy = self.busy_us()
        return max(busy, key=lambda resource: busy[resource])


def price(plan: Plan, profile: Profile, *, interference: bool = True) -> Timeline:
    """Predict the timeline of ``plan`` on the cluster that ``profile`` describes, µs.

    Every step is looked up at its own (chunk's) size, copies included. Raises PlanError where the profile has no curve
    for an operation. ``interference=False`` prices resources as independent, which is what MoNTA's closed forms do.
    """
    durations, is_extrapolated = _durations(plan, profile)
    resources = {step.resource for step in plan.steps}
    slow = {(a, b): profile.slowdown(a, b) for a in resources for b in resources if a is not b} if interference else {}
    is_slowed = any(factor > 1.0 for factor in slow.values())
    spans = _fluid(plan, durations, slow) if is_slowed else _independent(plan, durations)
    return Timeline(plan, tuple(spans), is_extrapolated)


def _durations(plan: Plan, profile: Profile) -> tuple[list[float], bool]:
    """Each step's time alone, µs, and whether one of them lies outside the measured sizes."""
    known: dict[tuple[Op, float], float] = {}
    is_extrapolated = False
    durations = []
    for step in plan.steps:
        key = (step.op, step.bytes)
        duration = known.get(key)
        if duration is None:
            link, size = _LINKS.get(step.op, plan.traffic.link), _group_size(step.op, plan)
            curve = profile.curve(step.op.value, link, size)
            duration = curve.at(step.bytes)
            if plan.chunks > 1:
                duration = max(duration, step.bytes * bus_factor(step.op.value, size) / (profile.peaks.of(link) * 1e3))
            known[key] = duration
            is_extrapolated = is_extrapolated or curve.is_extrapolated(step.bytes)
        durations.append(duration)
    return durations, is_extrapolated


_LINKS = {Op.COPY: Resource.DEVICE, Op.ALL_GATHER: Resource.INTRA}


def _group_size(op: Op, plan: Plan) -> int:
    return {Op.COPY: 1, Op.ALL_GATHER: plan.traffic.replication}.get(op, plan.traffic.group_size)


def _independent(plan: Plan, durations: Sequence[float]) -> list[tuple[float, float]]:
    free: dict[Resource, float] = {}
    spans: list[tuple[float, float]] = []
    for step, duration in zip(plan.steps, durations, strict=True):
        start = free.get(step.resource, 0.0)
        for earlier in step.after:
            end = spans[earlier][1]
            if end > start:
                start = end
        free[step.resource] = start + duration
        spans.append((start, start + duration))
    return spans


def _fluid(  # noqa: C901  one flat loop: a call for each of its parts would be paid at every step
    plan: Plan, durations: Sequence[float], slow: dict[tuple[Resource, Resource], float]
) -> list[tuple[float, float]]:
    """List-schedule with interference. Written for speed (a plan is priced for every candidate of a decision):

    resources are small integers, and the work left on each is scaled by how fast it shrinks in the present company.
    """
    steps = plan.steps
    kinds = list({step.resource: None for step in steps})
    place = {resource: i for i, resource in enumerate(kinds)}
    queues: list[list[int]] = [[] for _ in kinds]
    for index in range(len(steps) - 1, -1, -1):
        queues[place[steps[index].resource]].append(index)  # the head is popped from the end
    stretches = _stretches(kinds, slow)
    start, end = [0.0] * len(steps), [-1.0] * len(steps)
    running = [-1] * len(kinds)  # the step that each resource works on
    left = [0.0] * len(kinds)  # µs of undisturbed work left
    everyone = range(len(kinds))
    now = 0.0
    while True:
        mask = 0
        for k in everyone:
            if running[k] < 0 and queues[k]:
                index = queues[k][-1]
                for earlier in steps[index].after:
                    if end[earlier] < 0.0:
                        break
                else:
                    running[k] = index
                    left[k] = durations[index]
                    start[index] = now
                    queues[k].pop()
            if running[k] >= 0:
                mask |= 1 << k
        if not mask:
            break
        stretch = stretches[mask]
        passed = min([left[k] * stretch[k] for k in everyone if running[k] >= 0])
        now += passed
        for k in everyone:
            index = running[k]
            if index >= 0:
                left[k] -= passed / stretch[k]
                if left[k] <= 1e-12 * durations[index]:
                    end[index] = now
                    running[k] = -1
    if min(end, default=0.0) < 0.0:
        raise InternalError(f"the steps of {plan.name} wait for each other in a circle")
    return list(zip(start, end, strict=True))


def _stretches(kinds: Sequence[Resource], slow: dict[tuple[Resource, Resource], float]) -> list[list[float]]:
    """By the set of busy resources (a bit mask): how many times as long each of them takes."""
    table = []
    for mask in range(1 << len(kinds)):
        busy = [resource for k, resource in enumerate(kinds) if mask >> k & 1]
        row = []
        for resource in kinds:
            factor = 1.0
            for other in busy:
                if other is not resource:
                    factor *= slow.get((resource, other), 1.0)
            row.append(factor)
        table.append(row)
    return table
