"""The chunk pipeline through the experts: dispatch of chunk j+1 beside the experts of j beside the combine of j−1.

MegaScale-MoE, section 4.2, between nodes where it fuses within one: the same plan vocabulary, with compute as a resource.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from commlayer.profiles.links import Resource
from commlayer.scheduler.plan import Buffer, Gather, Op, Plan, Step, Strategy
from commlayer.scheduler.price import Timeline, schedule
from commlayer.scheduler.traffic import Traffic

__all__ = ["ExpertTimes", "choose_chunks", "pipeline", "time_pipeline"]

Micros = Callable[[float], float]
"""Bytes → µs."""


@dataclass(frozen=True, slots=True)
class ExpertTimes:
    """What the experts of a rank take, measured: ``times_us[i]`` for ``rows[i]`` rows, ascending.

    Between the points on a line; beyond them in proportion to the nearest.
    """

    rows: tuple[int, ...]
    times_us: tuple[float, ...]

    def at(self, rows: float) -> float:
        """µs for ``rows`` rows; what is below the first point costs as much: a kernel that is not filled."""
        if rows <= 0:
            return 0.0
        if rows <= self.rows[0]:
            return self.times_us[0]
        for index in range(1, len(self.rows)):
            if rows <= self.rows[index]:
                low, high = self.rows[index - 1], self.rows[index]
                part = (rows - low) / (high - low)
                return self.times_us[index - 1] * (1 - part) + self.times_us[index] * part
        return self.times_us[-1] * rows / self.rows[-1]


def pipeline(traffic: Traffic, chunks: int) -> Plan:
    """The plan of one forward pass: in the order in which the dispatcher posts.

    ``traffic``: the exchange of all rows, one way. A compute step's bytes are those of the rows that it works on.
    """
    size = traffic.logical_bytes / chunks
    steps: list[Step] = []
    places: dict[tuple[str, int], int] = {}

    def post(kind: str, op: Op, resource: Resource, chunk: int, after: Sequence[tuple[str, int]]) -> None:
        places[kind, chunk] = len(steps)
        earlier = tuple(places[key] for key in after)
        steps.append(Step(op, resource, chunk, size, earlier, Buffer.INPUT, Buffer.OUTPUT, traffic.group_size))

    post("dispatch", Op.ALL_TO_ALL, traffic.link, 0, ())
    for chunk in range(chunks):
        if chunk + 1 < chunks:
            post("dispatch", Op.ALL_TO_ALL, traffic.link, chunk + 1, ())
        post("experts", Op.COMPUTE, Resource.COMPUTE, chunk, [("dispatch", chunk)])
        post("combine", Op.ALL_TO_ALL, traffic.link, chunk, [("experts", chunk)])
    return Plan(traffic, Strategy.FLAT, chunks, Gather.WHOLE, tuple(steps))


def time_pipeline(plan: Plan, exchange_us: Micros, experts_us: Micros) -> Timeline:
    """The timeline of a :func:`pipeline`; each function takes a chunk's bytes."""
    times = {Op.ALL_TO_ALL: exchange_us, Op.COMPUTE: experts_us}
    return Timeline(plan, tuple(schedule(plan, [times[step.op](step.bytes) for step in plan.steps])))


def choose_chunks(
    traffic: Traffic,
    exchange_us: Micros,
    experts_us: Micros,
    *,
    posting_us: float = 0.0,
    allowed: Sequence[int] = (1, 2, 4, 8),
    tolerance: float = 0.05,
) -> tuple[int, dict[int, float]]:
    """The fewest chunks predicted within ``tolerance`` of the fastest, and the µs of each number, forward and backward.

    The backward pass sends as much and computes twice: for each product one for its input and one for its weight.
    ``posting_us``: what each chunk costs the processor that computes, in each pass, for the messages of its two exchanges.
    """
    priced = {}
    for chunks in allowed:
        plan = pipeline(traffic, chunks)
        passes = [lambda size, times=times: times * experts_us(size) + posting_us for times in (1, 2)]
        priced[chunks] = sum(time_pipeline(plan, exchange_us, compute_us).total_us for compute_us in passes)
    best_us = min(priced.values())
    return min(chunks for chunks, time_us in priced.items() if time_us <= best_us * (1 + tolerance)), priced
