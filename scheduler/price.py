"""Plan + profile → timeline: when each step starts and ends.

The steps are list-scheduled: a resource takes its steps in plan order, one at a time, each as soon as the steps it waits
for have ended. Where the profile says that two resources slow each other down, steps that run side by side progress at
the slower rate (a fluid model: a step's work is its time alone, done at 1/slowdown while the other resource is busy).
Pieces of a chunk follow each other on the link, so many at once, and are looked up at the size of those together.
A chunk of a stream is never faster than the link's peak: a message measured alone may be, where the wire takes a burst on
credit, but the chunks behind it pay the credit back. Nor is any exchange on uneven nodes beyond the sizes that were measured: the
bytes through the busiest card are what their plans differ in, and a slope over few sizes may promise a call of the backend's own
more than the card can carry.
MoNTA's equations 8 to 11 and the closed forms of its algorithms follow from this and are tests of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from commlayer.profiles.curve import Curve
from commlayer.profiles.errors import InternalError
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile
from commlayer.scheduler.lanes import CHUNKS_IN_FLIGHT
from commlayer.scheduler.plan import Plan, Step

__all__ = [
    "Timeline",
    "curve_of",
    "curves_of",
    "durations_of",
    "price",
    "schedule",
]

_NEVER = math.inf


@dataclass(frozen=True, slots=True)
class Timeline:
    """The predicted (or measured) course of a plan: ``spans[i]`` is (start_us, end_us) of step i."""

    plan: Plan
    spans: tuple[tuple[float, float], ...]
    is_extrapolated: bool = False

    @property
    def total_us(self) -> float:
        """The time from the call to the end of the last step, µs."""
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
    A flat plan that a transport runs as one call of its own is timed by the curve ``all_to_all_single``, where there is
    one; every other exchange by ``all_to_all``.
    """
    durations, is_extrapolated = durations_of(plan, profile)
    kinds = tuple(dict.fromkeys([step.resource for step in plan.steps]))
    companies = _companies(kinds, profile) if interference else None
    spans = _fluid(plan, durations, companies) if companies else schedule(plan, durations)
    return Timeline(plan, tuple(spans), is_extrapolated)


def durations_of(plan: Plan, profile: Profile) -> tuple[list[float], bool]:
    """Each step's time alone, µs, and whether one of them lies outside the measured sizes."""
    latest: dict[int, tuple[float, float]] = {}  # by leg: bytes and time of its latest step; nearly all are of one size
    is_extrapolated = False
    durations = []
    for step in plan.steps:
        leg, size = step.leg, step.bytes
        known = latest.get(id(leg))
        if known is None or known[0] != size:
            curve = curve_of(step, plan, profile)
            at_once = CHUNKS_IN_FLIGHT if plan.pieces > 1 and step.resource is plan.traffic.link else 1
            looked_up, time_us = leg.looked_up(size, plan) * at_once, 0.0
            if curve is not None:
                hindrance = leg.hindrance(plan)
                looked_up *= hindrance
                time_us = curve.at(looked_up) / at_once
                is_beyond = curve.is_extrapolated(looked_up)
                is_extrapolated = is_extrapolated or is_beyond
                if plan.is_chunked or (is_beyond and not plan.traffic.is_uniform):
                    share = leg.share_of_link(plan.traffic, curve)
                    time_us = max(time_us, size * hindrance * share / (profile.peaks.of(curve.link) * 1e3))
            known = latest[id(leg)] = size, time_us
        durations.append(known[1])
    return durations, is_extrapolated


def curves_of(plan: Plan, profile: Profile) -> set[Curve]:
    """The curves that the plan's steps are timed by. Raises PlanError where one is missing."""
    found = (curve_of(step, plan, profile) for step in {id(step.leg): step for step in plan.steps}.values())
    return {curve for curve in found if curve is not None}


def curve_of(step: Step, plan: Plan, profile: Profile) -> Curve | None:
    """The curve that times a step; None for one that takes no time."""
    return step.leg.curve(profile, plan, step.bytes) if step.bytes else None


def schedule(plan: Plan, durations: Sequence[float]) -> list[tuple[float, float]]:
    """When each step starts and ends, µs, where step i takes ``durations[i]`` and resources do not slow each other down."""
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
    plan: Plan, durations: Sequence[float], companies: _Companies
) -> list[tuple[float, float]]:
    """List-schedule with interference. Written for speed (a plan is priced for every candidate of a decision):

    resources are small integers, and for each is kept when its step will end. That changes only when the set of busy
    resources does, and an idle resource is looked at only when the step that its next one waits for has ended.
    """
    afters = [step.after for step in plan.steps]
    heads, following = _queues(plan)
    stretches, members = companies.stretches, companies.members
    start, end = [0.0] * len(afters), [_NEVER] * len(afters)
    running = heads.copy()  # the step that each busy resource works on
    finish = [_NEVER] * len(heads)  # when that ends, if the company (``mask``) stays
    sleepers: dict[int, tuple[int, ...]] = {}  # by step: the idle resources whose next one waits for it
    woken = tuple(range(len(heads)))
    mask = staying = 0  # sets of resources: those busy, and those of them whose step goes on
    stretch = stretches[0]
    now = 0.0
    while True:
        busy = staying
        begun = []
        for k in woken:
            index = heads[k]
            if index < 0:
                continue
            for earlier in afters[index]:
                if end[earlier] == _NEVER:
                    sleepers[earlier] = (*sleepers.get(earlier, ()), k)
                    break
            else:
                start[index] = now
                running[k] = index
                heads[k] = following[index]
                busy |= 1 << k
                begun.append(k)
        if not busy:
            break
        if busy != mask:
            changed = stretches[busy]
            for k in members[staying]:
                finish[k] = now + (finish[k] - now) / stretch[k] * changed[k]
            mask, stretch = busy, changed
        for k in begun:
            finish[k] = now + durations[running[k]] * stretch[k]
        now = min(finish)
        k = finish.index(now)
        end[running[k]] = now
        finish[k] = _NEVER
        staying = mask ^ 1 << k
        woken = (*sleepers.pop(running[k], ()), k)
    if sleepers:
        raise InternalError(f"the steps of {plan.name} wait for each other in a circle")
    return list(zip(start, end, strict=True))


def _queues(plan: Plan) -> tuple[list[int], list[int]]:
    """The first step of each resource, and for each step the next one of its resource (or -1)."""
    latest: dict[Resource, int] = {}
    heads: list[int] = []
    following = [-1] * len(plan.steps)
    for index, step in enumerate(plan.steps):
        if step.resource in latest:
            following[latest[step.resource]] = index
        else:
            heads.append(index)
        latest[step.resource] = index
    return heads, following


@dataclass(frozen=True, slots=True)
class _Companies:
    """The slowdowns by the set of busy resources, a bit mask: how many times as long each of them takes, and which they are."""

    stretches: list[list[float]]
    members: list[tuple[int, ...]]


@lru_cache(maxsize=64)
def _companies(kinds: tuple[Resource, ...], profile: Profile) -> _Companies | None:
    """None where no resource slows another one down. Kept, because every candidate of a decision asks for the same."""
    if all(profile.slowdown(a, b) == 1.0 for a in kinds for b in kinds):
        return None
    stretches: list[list[float]] = [[1.0] * len(kinds)]
    members: list[tuple[int, ...]] = [()]
    for k, other in enumerate(kinds):  # each set without k, and then the same with k
        factors = [1.0 if resource is other else profile.slowdown(resource, other) for resource in kinds]
        stretches += [[before * factor for before, factor in zip(row, factors, strict=True)] for row in stretches]
        members += [(*busy, k) for busy in members]
    return _Companies(stretches, members)
