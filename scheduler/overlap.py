"""The chunk pipeline through the experts: dispatch of chunk j+1 beside the experts of j beside the combine of j−1.

MegaScale-MoE, section 4.2, between nodes where it fuses within one: the same plan vocabulary, with compute as a resource.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from commlayer.profiles.links import Resource
from commlayer.scheduler.legs import LegOrder, LocalLeg, OwnCallLeg
from commlayer.scheduler.moves import Buffer, Moves
from commlayer.scheduler.plan import CurveKey, Cut, Gather, Op, Plan, Span, Step, Strategy
from commlayer.scheduler.price import Timeline, schedule
from commlayer.scheduler.traffic import Traffic

__all__ = [
    "COMBINE",
    "DISPATCH",
    "EXPERTS",
    "LATER_CHUNKS",
    "SLICES",
    "ExpertTimes",
    "choose_slices",
    "pipeline",
    "posted",
]

SLICES = ((8,), (4, 4), (2, 4, 2), (2, 2, 2, 2), (1, 3, 3, 1), (2, 3, 2, 1), (1, 2, 2, 2, 1), (1,) * 8)
"""Eighths of the tokens in each chunk. Nothing hides the way out of the first and the way back of the last: small ones cost
less there than more chunks would everywhere. What is put off hides the way back of the last in the backward pass, where the
order is reversed."""
LATER_CHUNKS = 2
"""The number of chunks whose products for weights are put off. Others' fill the time until the next chunk's gradients come."""

Micros = Callable[[float], float]
"""Bytes → µs."""


class ExpertWork(LocalLeg):
    """The experts' own work on the rows of a chunk. No profile knows what it takes."""

    def resource(self, traffic: Traffic) -> Resource:
        return Resource.COMPUTE

    def curve_keys(self, plan: Plan) -> tuple[CurveKey, ...]:
        return ((self.op.value, Resource.COMPUTE, 1),)

    def moves(self, place: object, tag: int, chunk: int) -> Moves:
        return Moves()


DISPATCH = OwnCallLeg("dispatch", Op.ALL_TO_ALL, Span.GROUP, Buffer.INPUT, Buffer.OUTPUT)
EXPERTS = ExpertWork("experts", Op.COMPUTE, Span.SELF, Buffer.INPUT, Buffer.OUTPUT, (DISPATCH,))
COMBINE = OwnCallLeg("combine", Op.ALL_TO_ALL, Span.GROUP, Buffer.INPUT, Buffer.OUTPUT, (EXPERTS,))


@dataclass(frozen=True, slots=True)
class ExpertTimes:
    """Measured times of the experts of a rank: ``times_us[i]`` for ``rows[i]`` rows, ascending.

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


def posted(chunks: int, ahead: int) -> Iterator[tuple[str, int]]:
    """(``dispatch``, ``experts`` or ``combine``, chunk) in the order in which the dispatcher posts.

    ``ahead``: how many chunks are on their way to the experts before that which is computed: all where there is a gradient, in
    both passes, else one.
    """
    for leg, chunk in _ahead(ahead).order(chunks):
        yield leg.name, chunk


def pipeline(traffic: Traffic, slices: Sequence[int], *, ahead: int = 1) -> Plan:
    """The plan of one pass, in the order of :func:`posted`.

    ``traffic``: the exchange of all rows, one way. ``slices``: in what proportion chunks share them. A compute step's bytes are
    those of the rows that it works on.
    """
    chunks, whole = len(slices), sum(slices)
    even = _ahead(ahead).steps(Cut(traffic, chunks))
    steps = tuple(replace(step, bytes=traffic.logical_bytes * slices[step.chunk] / whole) for step in even)
    return Plan(traffic, Strategy.FLAT, chunks, Gather.WHOLE, steps)


@lru_cache
def _ahead(chunks: int) -> LegOrder:
    """Order the posting so that so many chunks are on their way to the experts before that which is computed."""
    return LegOrder(((DISPATCH, 0), (EXPERTS, chunks), (COMBINE, chunks)))


@lru_cache
def _all_ahead(chunks: int, link: Resource) -> Plan:
    """The order of one pass in so many chunks, all of which are on their way before the first is computed; of no size of its own.

    Kept, as dispatches of every layer and step ask for it: in what proportion chunks share the rows, and of how many, changes
    their steps' times, but not their order."""
    return pipeline(Traffic(chunks, 2, link=link, collective="all_to_all_v", nodes=(2,)), (1,) * chunks, ahead=chunks)


def choose_slices(
    traffic: Traffic,
    exchange_us: Micros,
    experts_us: Micros,
    *,
    posting_us: float = 0.0,
    puts_off: bool = False,
    allowed: Sequence[tuple[int, ...]] = SLICES,
    tolerance: float = 0.03,
) -> tuple[tuple[int, ...], dict[tuple[int, ...], float]]:
    """The slices with the fewest chunks predicted within ``tolerance`` of the fastest (of those, the fastest); and the µs of
    each, forward and backward, or of one chunk alone, where more could not hide enough.

    Where there is a gradient all chunks are on their way before the first is computed, in both passes. The backward pass sends as
    much and computes twice: for each product one for its input and one for its weight. ``puts_off``: those for weights are made
    behind all others for the last chunks (LATER_CHUNKS), when these have been sent. ``posting_us``: what each chunk costs the
    processor that computes, in each pass, for the messages of its two exchanges.
    """

    def pass_us(slices: Sequence[int], products: int, num_later: int = 0) -> float:
        """``num_later``: of how many chunks, the last ones, one product is made behind all others."""
        plan, first_later = _all_ahead(len(slices), traffic.link), len(slices) - num_later
        sizes = [traffic.logical_bytes * part / sum(slices) for part in slices]
        exchanges, experts = [exchange_us(size) for size in sizes], [experts_us(size) for size in sizes]

        def step_us(step: Step) -> float:
            if step.op is not Op.COMPUTE:
                return exchanges[step.chunk]
            return (products - (step.chunk >= first_later)) * experts[step.chunk] + posting_us

        spans = schedule(plan, [step_us(step) for step in plan.steps])
        later_us = sum(experts[max(0, first_later) :])
        computed = max(end for step, (_, end) in zip(plan.steps, spans, strict=True) if step.op is Op.COMPUTE)
        return max(Timeline(plan, tuple(spans)).total_us, computed + (later_us if num_later else 0.0))

    num_later = LATER_CHUNKS if puts_off else 0
    whole = (sum(allowed[0]),)
    if (
        whole in allowed
    ):  # the shorter of exchanges and products can be hidden at most: where that is too little, ask no further
        exchanged_us, worked_us = 2 * exchange_us(traffic.logical_bytes), experts_us(traffic.logical_bytes)
        whole_us = pass_us(whole, 1) + pass_us(whole, 2, num_later)
        hidden_us = min(exchanged_us, worked_us) + min(exchanged_us, 2 * worked_us)
        if whole_us <= (whole_us - hidden_us) * (1 + tolerance):
            return whole, {whole: whole_us}
    priced = {slices: pass_us(slices, 1) + pass_us(slices[::-1], 2, num_later) for slices in allowed}
    best_us = min(priced.values())
    near = [slices for slices, time_us in priced.items() if time_us <= best_us * (1 + tolerance)]
    return min(near, key=lambda slices: (len(slices), priced[slices])), priced
