"""Traffic → candidate plans: the one table of strategies, for every collective.

Over nodes of l ranks each, m nodes, n = m·l ranks, S logical bytes:

- all_gather: every rank sends its block to one rank of each other node (the wire carries each byte once a node instead of
  l times), then each node gathers.
- reduce_scatter: the mirror: a node exchanges and sums, so that one partial sum of each block leaves it, and the owner of
  the block sums those of all nodes.
- all_reduce: a reduce_scatter, then an all_gather of what was summed.
- broadcast: the root scatters inside its node, its node's ranks send their slices to the other nodes at the same time, every
  node gathers.
- all_to_all_v: inside the node to the rank that relays for the destination, the one at its place, then one message from there: l
  times fewer messages between nodes, of the same bytes. It pays where latency rules.
- all_to_all, of tokens that are the same on all ranks of a node: each rank sends its share of them between nodes, then each node
  gathers (MoNTA's strategies, :mod:`commlayer.scheduler.replicated`).

``flat_direct`` is the same with the whole group as one node: every rank to every rank, sums on the spot and in rank order.

Two more ways over nodes are ``leaders``, where one rank of each node collects, exchanges with those of the other nodes, and hands
out (:mod:`commlayer.scheduler.leaders`), and ``ring``, an all_gather, a reduce_scatter or an all_reduce round the nodes where the
way between two of them is slow and an order of nodes goes round it (:mod:`commlayer.scheduler.ring_legs`).

Rejected: rings of ranks, and of nodes where no pair is slow. They need n−1 or m−1 steps one after the other, each with the
latency of a message, and sum in an order that depends on the block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

from commlayer.profiles.errors import PlanError
from commlayer.scheduler import encoded_legs, group_legs, replicated
from commlayer.scheduler.broadcast import BROADCAST
from commlayer.scheduler.lanes import level_of, paced
from commlayer.scheduler.leaders import BY_LEADERS, MOST_STAGED, staging_of_leaders
from commlayer.scheduler.legs import LegOrder, OwnCallLeg
from commlayer.scheduler.moves import MAX_TAGS, Buffer
from commlayer.scheduler.plan import Cut, Gather, Op, Plan, Span, Strategy, is_duplex
from commlayer.scheduler.ring_legs import round_nodes
from commlayer.scheduler.traffic import GROUP_COLLECTIVES, Traffic
from commlayer.scheduler.two_level import TWO_LEVEL
from commlayer.scheduler.wire import NATIVE, Wire

__all__ = ["CHUNK_COUNTS", "assembled", "build", "candidates", "finer_plans", "schedule_of"]

CHUNK_COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""The chunk counts that are searched. Finer grids change the predicted time by less than any profile's error."""
_OWN_CALLS = {
    name: LegOrder(((OwnCallLeg(f"own {name}", op, Span.GROUP, Buffer.INPUT, Buffer.OUTPUT), 0),))
    for name, op in ((name, Op(name.removesuffix("_v"))) for name in GROUP_COLLECTIVES)
}
_OVER_NODES = {**group_legs.OVER_NODES, "all_to_all_v": TWO_LEVEL, "broadcast": BROADCAST}
_IN_PIECES = ("all_gather", "all_reduce", "reduce_scatter")
_PIECES = (16, 12, 8, 6, 4, 3, 2)
_FINE_COUNTS = (256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2)
"""The numbers of chunks of a call that yields to others: more than it takes to fill a pipeline."""
_LEAST_DUPLEX = 16
"""Chunks of an all_reduce on unequal cards, at least, where its size allows it."""
_WHOLE = (Strategy.FLAT, Strategy.DIRECT, Strategy.HIERARCHICAL, Strategy.LEADERS)
"""Strategies of plans in one chunk."""
_CHUNKED = (Strategy.PIPELINED, Strategy.PIPELINED_COPY)
_CHUNKED_ENCODED = (Strategy.DIRECT, Strategy.PIPELINED)
_MOST_IN_RING = 32
"""Nodes that a chunk goes round one after the other. Of more, a pair would have to be below 3 % to be in anybody's way."""
_LEAST_STEPS = 2
"""Steps of a chunk, at least."""
_TOO_MANY_TAGS = (
    f"it needs more than {MAX_TAGS} message tags, and no transport could tell its messages apart: use fewer chunks"
)


def build(
    traffic: Traffic,
    strategy: Strategy,
    chunks: int = 1,
    gather: Gather = Gather.REMOTE,
    wire: Wire = NATIVE,
    pieces: int = 1,
) -> Plan:
    """Build the plan of that name. ``gather``: what a node gathers of replicated tokens; other plans have no such choice.

    Raises PlanError where strategy, wire format or pieces do not apply to the traffic, or it needs too many chunks.
    """
    if traffic.collective == "all_to_all" and strategy in _WHOLE:
        chunks = 1
    _check(traffic, strategy, chunks, wire, pieces)
    plan = assembled(traffic, strategy, chunks, gather, wire, pieces)
    if strategy is not Strategy.FLAT and len(plan.steps) * plan.tags_per_step > MAX_TAGS:
        raise PlanError(_refusal(traffic, strategy, _TOO_MANY_TAGS))
    return plan


def assembled(
    traffic: Traffic,
    strategy: Strategy,
    chunks: int = 1,
    gather: Gather = Gather.REMOTE,
    wire: Wire = NATIVE,
    pieces: int = 1,
) -> Plan:
    """Put the plan together from its legs, without asking whether it applies to the traffic."""
    if traffic.collective != "all_to_all" or strategy is Strategy.FLAT:
        gather = Gather.WHOLE
    cut = Cut(
        traffic,
        chunks,
        pieces,
        wire,
        gather,
        is_on_one_level=strategy is Strategy.DIRECT,
        is_ring=strategy is Strategy.RING,
    )
    steps = schedule_of(traffic, strategy, wire, chunks, gather).steps(cut)
    if chunks * pieces > 1 and level_of(traffic.lane):
        steps = paced(steps, traffic.link)
    return Plan(traffic, strategy, chunks, gather, steps, wire, pieces)


def schedule_of(
    traffic: Traffic, strategy: Strategy, wire: Wire, chunks: int = 1, gather: Gather = Gather.REMOTE
) -> LegOrder:
    """The legs of a strategy that applies to the traffic, in so many chunks."""
    collective, is_direct = traffic.collective, strategy is Strategy.DIRECT
    if collective == "all_to_all":
        return replicated.REPLICATED_LEGS[strategy, gather]
    if strategy is Strategy.FLAT:
        return _OWN_CALLS[collective]
    if strategy is Strategy.LEADERS:
        return BY_LEADERS[collective]
    if strategy is Strategy.RING:
        return round_nodes(collective, len(traffic.nodes), has_insides=max(traffic.nodes) > 1)
    if not is_direct and is_duplex(traffic, chunks, wire):
        return group_legs.ALL_REDUCE_DUPLEX
    if wire.is_native:
        return (group_legs.ON_ONE_LEVEL if is_direct else _OVER_NODES)[collective]
    if collective == "all_to_all_v" and len(traffic.nodes) > 1 and max(traffic.nodes) > 1:
        return encoded_legs.EXCHANGE_OVER_NODES
    return (encoded_legs.ENCODED_ON_ONE_LEVEL if is_direct else encoded_legs.ENCODED_OVER_NODES)[collective]


def candidates(
    traffic: Traffic,
    gather: Gather,
    min_slice_bytes: float,
    max_chunks: int,
    strategies: Collection[Strategy] = tuple(Strategy),
) -> Iterator[Plan]:
    """Every plan of ``strategies`` worth pricing, simple ones first; where nothing moves a flat one.

    Chunks of which a rank sends less than ``min_slice_bytes`` (MoNTA's I_minimal) are left out: there a step costs its latency
    and splitting can only lose.
    """
    allowed = [each for each in Strategy if each in strategies and (traffic.logical_bytes or each is Strategy.FLAT)]
    counts = [
        count
        for count in CHUNK_COUNTS
        if count <= max_chunks and traffic.logical_bytes / (count * traffic.num_slices) >= min_slice_bytes
    ]
    all_counts = counts
    if is_duplex(traffic, 2, NATIVE):  # what is collected is a chunk behind what is shared, and prices do not know it
        counts = [count for count in counts if count >= _LEAST_DUPLEX] or counts[-1:]
    for wire in traffic.wires:
        for strategy in filter(allowed.__contains__, _WHOLE):
            with contextlib.suppress(PlanError):
                yield build(traffic, strategy, 1, gather, wire)
        if traffic.slow_pairs and wire.is_native and Strategy.RING in allowed:
            for count in (1, *all_counts):  # else every node sends to every other one as fast, and simpler
                try:
                    yield build(traffic, Strategy.RING, count)
                except PlanError:  # noqa: PERF203  two nodes, a collective that has none, or too many messages
                    break
        for strategy in filter(allowed.__contains__, _CHUNKED if wire.is_native else _CHUNKED_ENCODED):
            for count in counts:
                try:
                    yield build(traffic, strategy, count, gather, wire)
                except PlanError:  # noqa: PERF203  among others: hundreds of nodes, and too many messages to tell apart
                    break


def finer_plans(
    plan: Plan, min_slice_bytes: float, is_worth: Callable[[Plan, float], bool] | None = None
) -> Iterator[Plan]:
    """Make the plans that ``plan`` becomes where it yields to others between exchanges: the finest first.

    Over nodes in its own format its chunks cross in pieces; everything else is cut into more chunks, of ``min_slice_bytes`` a
    rank or more.

    ``is_worth(coarsest, cut)`` may leave plans out before they are made, which takes long: their exchanges are those of the
    coarsest of these plans, each ``cut`` times smaller. Elements in another format are cut at rows, so it is not asked there.
    """
    traffic = plan.traffic
    if traffic.collective not in _IN_PIECES or not traffic.logical_bytes:
        return
    if plan.wire.is_native and plan.strategy in (Strategy.HIERARCHICAL, Strategy.PIPELINED):
        cuts = [(Strategy.PIPELINED, plan.chunks, pieces) for pieces in _PIECES]
    else:
        cut_as = Strategy.DIRECT if plan.strategy is Strategy.FLAT else plan.strategy
        cuts = [
            (cut_as, chunks, 1)
            for chunks in _FINE_COUNTS
            if chunks > plan.chunks and traffic.logical_bytes / (chunks * traffic.group_size) >= min_slice_bytes
        ]
    coarsest = None
    if is_worth is not None and plan.wire.is_native and cuts:
        with contextlib.suppress(PlanError):
            coarsest = build(traffic, *cuts[-1][:2], pieces=cuts[-1][2])
    for strategy, chunks, pieces in cuts:
        cut = 1.0 if coarsest is None else chunks * pieces / (coarsest.chunks * coarsest.pieces)
        if coarsest is not None and is_worth is not None and not is_worth(coarsest, cut):
            continue
        with contextlib.suppress(PlanError):  # a collective whose exchanges cannot be cut, or too many messages
            yield build(traffic, strategy, chunks, wire=plan.wire, pieces=pieces)


def _check(traffic: Traffic, strategy: Strategy, chunks: int, wire: Wire, pieces: int) -> None:
    if traffic.collective == "all_to_all":
        objection = replicated.objection(traffic, strategy, chunks, wire, pieces)
    elif wire.is_native:
        objection = _objection(traffic, strategy, chunks)
    else:
        objection = _encoding_objection(traffic, strategy, chunks, wire)
    least_apart = len(traffic.nodes) or traffic.group_size
    if not objection and chunks > 1 and _LEAST_STEPS * chunks * least_apart > MAX_TAGS:
        objection = _TOO_MANY_TAGS  # found before all those steps are made
    is_in_pieces = strategy is Strategy.PIPELINED and wire.is_native and traffic.collective in _IN_PIECES
    if not objection and pieces > 1 and not is_in_pieces:
        objection = "its exchanges between nodes cannot go out in pieces"
    if objection:
        raise PlanError(_refusal(traffic, strategy, objection))


def _refusal(traffic: Traffic, strategy: Strategy, why: str) -> str:
    what = f"{traffic.collective} over nodes {traffic.nodes}" if traffic.nodes else str(traffic)
    return f"{strategy.value} does not apply to {what}: {why}"


def _objection(traffic: Traffic, strategy: Strategy, chunks: int) -> str:
    """Why not; empty where the strategy applies."""
    if chunks < 1 or (chunks > 1 and strategy not in (Strategy.PIPELINED, Strategy.DIRECT, Strategy.RING)):
        return f"it cannot have {chunks} chunks"
    if strategy is Strategy.FLAT:
        return "a call of the backend's own sums in an order of its own" if traffic.is_ordered else ""
    if traffic.group_size == 1 or traffic.logical_bytes == 0:
        return "nothing moves"
    if strategy is Strategy.DIRECT:
        return "it is the flat form" if traffic.collective in ("broadcast", "all_to_all_v") else ""
    if traffic.is_ordered and traffic.collective in ("all_reduce", "reduce_scatter"):
        return "sums over nodes are not in rank order"
    if strategy is Strategy.PIPELINED_COPY:
        return "it is for replicated tokens"
    return _objection_over_nodes(traffic, strategy, chunks)


def _objection_over_nodes(traffic: Traffic, strategy: Strategy, chunks: int) -> str:
    if strategy is Strategy.RING:
        is_round = traffic.collective in _IN_PIECES and 2 < len(traffic.nodes) <= _MOST_IN_RING
        what = "an all_gather, a reduce_scatter or an all_reduce"
        return "" if is_round else f"it is {what} over three to {_MOST_IN_RING} nodes"
    if len(traffic.nodes) == 1 or max(traffic.nodes) == 1:
        return "it needs several nodes, and several ranks on one of them"
    if strategy is Strategy.LEADERS and (staged := staging_of_leaders(traffic)) > MOST_STAGED:
        return f"a leader would need {staged >> 20} MiB beside the tensor, more than {MOST_STAGED >> 20}"
    if traffic.collective == "all_to_all_v":
        if strategy is Strategy.LEADERS:
            return "its ranks have something else for each other, and a leader would have to sort it"
        return "it pays for small messages only, which are not cut" if chunks > 1 else ""
    return ""


def _encoding_objection(traffic: Traffic, strategy: Strategy, chunks: int, wire: Wire) -> str:
    """Why its elements cannot cross in that format; empty where they can."""
    if traffic.element_bytes == 0 or wire not in traffic.wires:
        return f"its elements may not go in {wire}"
    not_encoded = (Strategy.FLAT, Strategy.LEADERS, Strategy.PIPELINED_COPY, Strategy.RING)
    if traffic.collective == "broadcast" or strategy in not_encoded:
        return "nothing is encoded in it"
    if strategy is Strategy.DIRECT and chunks >= 1:
        return "nothing moves" if traffic.group_size == 1 or traffic.logical_bytes == 0 else ""
    if traffic.collective == "all_to_all_v":
        return "messages between nodes are encoded by who sends them"
    return _objection(traffic, strategy, chunks)
