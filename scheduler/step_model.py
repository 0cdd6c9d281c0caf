"""The load of a step on the resource that it occupies, and how steps of different calls share one.

A step's time alone is what ``price`` takes. Of that time a part is work that the resource itself does, at the rate that
the step's curve sustains: its ``use``, 1.0 for a large message and little for a small one, whose time is latency. The
model:

- Steps of different calls on one resource share it *max-min fairly*: nobody is slowed while the uses add up to at most
  1; beyond that all have the same part of the resource, except those that need less, who have what they need. Two
  streams of large messages run at half their speed each, and a message that is mostly latency is hardly slowed by
  either. That is what connections of a network do in the long run, and what a memory does.
- What is fair is fair between connections, not between calls: a step counts for as many as it sends over. That is TCP's way,
  and that of a card between its queue pairs. On an emulated cluster (2 nodes of 4 ranks, 400 Mbit/s a node) an all_to_all over
  all ranks, of 4 connections a rank, took 1.31 times as long beside an exchange of pairs, of one, as alone: fair by connection
  says 1.25, by call 2.
- What one resource suffers from another that is busy is the profile's slowdown, as in ``price``.

Rejected: latency first, then bytes that share the link. An exchange is many messages whose latencies and bytes overlap,
so no instant divides it, and the order in which two calls' phases meet would decide the prediction. Not modelled: a
small message queues behind the bytes of a large one in the buffers of a wire, which lengthens its latency; ranks that
are late; and NCCL's kernels, which also compete for the GPU (that is the profile's slowdown of COMPUTE).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import truediv

from commlayer.profiles.errors import UsageError
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile
from commlayer.scheduler.plan import Plan
from commlayer.scheduler.price import curve_of, durations_of

__all__ = ["Load", "loads_of", "speeds"]

_SLACK = 1 + 1e-12
"""Uses that add up to 1 but for rounding fit."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load that a step is.

    ``alone_us``: its time with nothing beside it. ``use``: the part of its resource that it then uses, 0 to 1.
    ``weight``: for how many it counts where its resource is shared.
    """

    resource: Resource
    alone_us: float
    use: float = 1.0
    weight: float = 1.0


def loads_of(plan: Plan, profile: Profile, durations_us: Sequence[float] | None = None) -> tuple[Load, ...]:
    """The load of each step of ``plan``.

    ``durations_us``: what each step takes alone, µs, instead of what the profile says (measured times, or steps of
    computation, which no profile prices); such steps are taken to fill their resource. What shares a link counts for as many
    as it has connections there.

    Raises PlanError where the profile cannot price the plan, UsageError where ``durations_us`` are not one for each
    step.
    """
    weights = [float(step.leg.connections(plan.traffic)) for step in plan.steps]
    if durations_us is not None:
        if len(durations_us) != len(plan.steps) or not all(0 <= time_us < float("inf") for time_us in durations_us):
            raise UsageError(
                f"durations_us of {plan.name}: expected {len(plan.steps)} times of at least 0 µs, got {tuple(durations_us)}"
            )
        return tuple(
            Load(step.resource, time_us, 1.0, weight)
            for step, time_us, weight in zip(plan.steps, durations_us, weights, strict=True)
        )
    times, _ = durations_of(plan, profile)
    best: dict[tuple[str, Resource, int], float] = {}
    found = []
    for step, alone_us, weight in zip(plan.steps, times, weights, strict=True):
        curve = curve_of(step, plan, profile)
        use = 1.0
        if curve is not None and alone_us > 0:
            if curve.key not in best:  # bytes per µs that it reaches at some size
                best[curve.key] = max(map(truediv, curve.bytes, curve.time_us))
            sustained = best[curve.key]
            work_us = step.leg.looked_up(step.bytes, plan) / sustained
            if plan.is_chunked:  # as in price: a burst on credit is paid back by the chunks behind it
                share = step.leg.share_of_link(plan.traffic, curve)
                work_us = max(work_us, step.bytes * share / (profile.peaks.of(curve.link) * 1e3))
            use = min(1.0, work_us / alone_us)
        found.append(Load(step.resource, alone_us, use, weight))
    return tuple(found)


def speeds(loads: Sequence[Load]) -> list[float]:
    """How fast steps that share one resource progress, each relative to its time alone: 0 < speed ≤ 1. Max-min fair by
    weight.
    """
    if sum(load.use for load in loads) <= _SLACK:
        return [1.0] * len(loads)
    found = [1.0] * len(loads)
    left, weights = 1.0, sum(load.weight for load in loads)
    for index in sorted(range(len(loads)), key=lambda k: (loads[k].use / loads[k].weight, k)):
        load = loads[index]
        part = left * load.weight / weights
        if load.use > part:
            found[index] = part / load.use
        left -= min(load.use, part)
        weights -= load.weight
    return found
