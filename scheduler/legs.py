"""Kinds of legs, and the order in which their steps are posted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import cached_property, lru_cache

from commlayer.profiles.curve import Curve
from commlayer.profiles.errors import InternalError
from commlayer.profiles.links import Resource, bus_factor
from commlayer.scheduler.lanes import level_of
from commlayer.scheduler.moves import Moves
from commlayer.scheduler.plan import CurveKey, Cut, Leg, Op, Plan, Step
from commlayer.scheduler.slow_pairs import ring_hindrance
from commlayer.scheduler.traffic import Traffic

__all__ = ["AHEAD", "LATE", "CodedLeg", "ExchangeLeg", "LegOrder", "LocalLeg", "OwnCallLeg", "Phase"]

AHEAD = 2
_BF16_BYTES = 2
LATE = -1
"""The lag of as many chunks as there are: all at once at the end; or, where the number of chunks on the link is bounded and
so whoever posts them waits for it, ``AHEAD`` of them, between the others."""

Turn = tuple[Leg, int]
"""A leg, and how many chunks later than the first legs of its phase its steps are posted."""
Phase = tuple[Turn, ...]
_Place = tuple[int, int, tuple[int, ...]]
"""The place of a step in the order: the number of its leg, its chunk, the steps that it waits for."""
_MOST_ORDERS = 256


_OWN_CALLS = {
    Op.ALL_GATHER: "all_gather_single",
    Op.ALL_TO_ALL: "all_to_all_v",
    Op.REDUCE_SCATTER: "reduce_scatter_single",
}
"""The curves of the backend's own calls, where messages have one of the operation's name."""


class ExchangeLeg(Leg):
    """Messages, which are timed by the curve of the same name on as many ranks."""

    def curve_keys(self, plan: Plan) -> tuple[CurveKey, ...]:
        return ((self.op.value, self.resource(plan.traffic), self.span.ranks(plan.traffic)),)


class OwnCallLeg(ExchangeLeg):
    """A collective as one call of the backend's own, whatever that does inside; but for an all_to_all it is a ring."""

    def curve_keys(self, plan: Plan) -> tuple[CurveKey, ...]:
        return ((_OWN_CALLS.get(self.op, self.op.value), plan.traffic.link, plan.traffic.group_size),)

    def hindrance(self, plan: Plan) -> float:
        """A ring of the backend's own goes in the order of ranks, whatever pairs are slow."""
        if self.op is Op.ALL_TO_ALL or self.resource(plan.traffic) is not Resource.INTER:
            return super().hindrance(plan)
        return ring_hindrance(plan.traffic, range(len(plan.traffic.nodes)))

    def connections(self, traffic: Traffic) -> int:
        return super().connections(traffic) if self.op is Op.ALL_TO_ALL else 1

    def share_of_link(self, traffic: Traffic, curve: Curve) -> float:
        """In a ring over nodes one edge a node crosses the link between them."""
        is_inside = traffic.link is not Resource.INTER or len(traffic.nodes) < 2
        if self.op is Op.ALL_TO_ALL or is_inside:
            return super().share_of_link(traffic, curve)
        return bus_factor(curve.collective, curve.group_size) / min(traffic.nodes)

    def moves(self, place: object, tag: int, chunk: int) -> Moves:
        raise InternalError(f"{self.name} is a call of the backend's own: nothing else moves its bytes")


class LocalLeg(Leg):
    """Work in the rank's own memory, timed by the curve of the operation; its span says whose data it works on."""

    is_exchange = False

    def resource(self, traffic: Traffic) -> Resource:
        return Resource.DEVICE

    def connections(self, traffic: Traffic) -> int:
        return 1

    def share_of_link(self, traffic: Traffic, curve: Curve) -> float:
        return bus_factor(curve.collective, curve.group_size)

    def curve_keys(self, plan: Plan) -> tuple[CurveKey, ...]:
        return ((self.op.value, Resource.DEVICE, 1),)


class CodedLeg(LocalLeg):
    """Encoding into the plan's wire format, or decoding. What FP8 and INT8 cost goes by elements; their curves are of BF16."""

    def curve_keys(self, plan: Plan) -> tuple[CurveKey, ...]:
        return ((f"{self.op.value}_{plan.wire}", Resource.DEVICE, 1),)

    def looked_up(self, size: float, plan: Plan) -> float:
        return size * _BF16_BYTES / plan.traffic.element_bytes if plan.wire.format.is_scaled else size


class LegOrder:
    """The legs of a strategy, in the order in which their steps are posted: one phase after the other, and in a phase chunk by
    chunk, each leg's as many chunks later as it says."""

    def __init__(self, *phases: Phase) -> None:
        self.phases = phases

    def __add__(self, other: LegOrder) -> LegOrder:
        return LegOrder(*self.phases, *other.phases)

    @cached_property
    def legs(self) -> tuple[Leg, ...]:
        """In the order in which bytes pass them."""

        def depth(leg: Leg) -> int:
            return 1 + max(map(depth, leg.after), default=0)

        return tuple(sorted((leg for phase in self.phases for leg, _ in phase), key=depth))

    def order(self, chunks: int) -> Iterator[tuple[Leg, int]]:
        """Which leg of which chunk is posted, one after the other; nobody waits for a link whose chunks are counted."""
        legs = [leg for phase in self.phases for leg, _ in phase]
        return ((legs[kind], chunk) for kind, chunk, _ in _order(self, chunks, 1, chunks))

    def steps(self, cut: Cut) -> tuple[Step, ...]:
        """The steps of a call, in plan order."""
        late = AHEAD if level_of(cut.traffic.lane) else cut.chunks
        kinds = [(leg, leg.resource(cut.traffic), leg.size(cut)) for phase in self.phases for leg, _ in phase]
        found = []
        for kind, chunk, after in _order(self, cut.chunks, cut.pieces, late):
            leg, resource, size = kinds[kind]
            found.append(Step(leg, resource, chunk, size, after))
        return tuple(found)


@lru_cache(maxsize=_MOST_ORDERS)
def _order(schedule: LegOrder, chunks: int, pieces: int, late: int) -> tuple[_Place, ...]:
    """Which steps are posted one after the other. The same for calls of all sizes, so it is kept."""
    order: list[_Place] = []
    lines: dict[int, _Posted] = {}
    for phase in schedule.phases:
        rows = []
        for leg, lag in phase:
            line = lines[id(leg)] = _Posted(leg, len(lines), chunks, pieces, order)
            rows.append((line, late if lag == LATE else lag))
        for line, _ in rows:  # some wait for legs that are posted earlier and listed later
            line.waits = [lines[id(leg)] for leg in line.leg.after if id(leg) in lines]
        for slot in range(chunks + max(lag for _, lag in rows)):
            due = deque((line, slot - lag) for line, lag in rows if lag <= slot)
            while due:
                line, chunk = due.popleft()
                for _ in line.post(chunk):
                    if line.leg.yields and due:
                        other, its_chunk = due.popleft()
                        deque(other.post(its_chunk), maxlen=0)
    return tuple(order)


class _Posted:
    """The steps of one leg, as far as they have been posted."""

    def __init__(self, leg: Leg, number: int, chunks: int, pieces: int, order: list[_Place]) -> None:
        self.leg, self.number, self.order = leg, number, order
        self.chunks = 1 if leg.is_whole else chunks
        self.pieces = pieces if leg.is_in_pieces else 1
        self.waits: list[_Posted] = []
        self.posted: list[tuple[int, ...]] = []
        """The indices of its steps, by chunk."""

    def post(self, chunk: int) -> Iterator[None]:
        """Post a chunk, where there is one, piece by piece."""
        if chunk >= self.chunks:
            return
        after = [index for line in self.waits for index in line.posted[0 if line.leg.is_whole else chunk]]
        if self.leg.is_in_turn and chunk:
            after += self.posted[-1]
        found, waits = [], tuple(after)
        for piece in range(chunk * self.pieces, (chunk + 1) * self.pieces):
            found.append(len(self.order))
            self.order.append((self.number, piece, waits))
            yield
        self.posted.append(tuple(found))
