"""Traffic → candidate plans."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from commlayer.profiles.errors import PlanError
from commlayer.profiles.links import Resource
from commlayer.scheduler.group_strategies import build_group, group_candidates
from commlayer.scheduler.legs import LegOrder
from commlayer.scheduler.plan import Cut, Gather, Plan, Strategy
from commlayer.scheduler.replicated import FLAT, IN_PLACE, PIPELINED, PIPELINED_COPY
from commlayer.scheduler.traffic import Traffic
from commlayer.scheduler.wire import NATIVE, Wire

__all__ = ["CHUNK_COUNTS", "build", "candidates", "flat", "hierarchical", "pipelined", "pipelined_copy"]

CHUNK_COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""The chunk counts that are searched. Finer grids change the predicted time by less than any profile's error."""


def flat(traffic: Traffic) -> Plan:
    """One all_to_all of the whole buffer: what torch.distributed does."""
    return Plan(traffic, Strategy.FLAT, 1, Gather.WHOLE, FLAT.steps(Cut(traffic)))


def hierarchical(traffic: Traffic, gather: Gather = Gather.REMOTE) -> Plan:
    """MoNTA O1 (eq. 11): each rank sends its 1/t slice between nodes, then the node gathers."""
    return _plan(traffic, Strategy.HIERARCHICAL, 1, gather, IN_PLACE)


def pipelined(traffic: Traffic, chunks: int, gather: Gather = Gather.REMOTE) -> Plan:
    """MoNTA O2 (algorithm 1): all_to_all of chunk j+1 ∥ all_gather of chunk j; WHOLE also copies, on the same resource."""
    return _plan(traffic, Strategy.PIPELINED, chunks, gather, PIPELINED)


def pipelined_copy(traffic: Traffic, chunks: int, gather: Gather = Gather.REMOTE) -> Plan:
    """MoNTA O3 (algorithm 2): all_to_all ∥ all_gather ∥ copy, three chunks in flight."""
    return _plan(traffic, Strategy.PIPELINED_COPY, chunks, gather, PIPELINED_COPY)


def build(
    traffic: Traffic,
    strategy: Strategy,
    chunks: int = 1,
    gather: Gather = Gather.REMOTE,
    wire: Wire = NATIVE,
    pieces: int = 1,
) -> Plan:
    """The plan of that name. Raises PlanError where strategy, wire format or pieces do not apply to the traffic."""
    if traffic.collective != "all_to_all":
        return build_group(traffic, strategy, chunks, wire, pieces)
    if pieces > 1:
        raise PlanError("tokens that are replicated inside nodes go in chunks only")
    if not wire.is_native:
        raise PlanError("tokens that are replicated inside nodes go in their own format")
    if strategy is Strategy.FLAT:
        return flat(traffic)
    if strategy is Strategy.LEADERS:
        raise PlanError(
            "leaders is for groups whose ranks hold tokens of their own, not for replicated ones: use hierarchical"
        )
    if strategy in (Strategy.DIRECT, Strategy.RING) or not can_drop(traffic):
        raise PlanError(
            f"{strategy.value} needs tokens that are replicated inside nodes and a group that crosses nodes; this traffic "
            f"has replication {traffic.replication}, group size {traffic.group_size} over {traffic.link.value}: use flat"
        )
    if strategy is Strategy.HIERARCHICAL:
        return hierarchical(traffic, gather)
    maker = pipelined if strategy is Strategy.PIPELINED else pipelined_copy
    return maker(traffic, chunks, gather)


def can_drop(traffic: Traffic) -> bool:
    """Whether dropping to slices can pay at all: several holders of the same tokens, and a wire between the nodes."""
    return traffic.replication > 1 and traffic.group_size > 1 and traffic.link is Resource.INTER


def candidates(
    traffic: Traffic,
    gather: Gather,
    min_slice_bytes: float,
    max_chunks: int,
    strategies: Collection[Strategy] = tuple(Strategy),
) -> Iterator[Plan]:
    """Every plan worth pricing, simple ones first; of the collectives over nodes none but those of ``strategies`` are made.

    Chunks whose all_to_all buffer would fall below ``min_slice_bytes`` (MoNTA's I_minimal) are left out: there a step
    costs its latency and splitting can only lose.
    """
    if traffic.collective != "all_to_all":
        yield from group_candidates(traffic, CHUNK_COUNTS, min_slice_bytes, max_chunks, strategies)
        return
    yield flat(traffic)
    if not can_drop(traffic) or traffic.logical_bytes == 0:
        return
    yield hierarchical(traffic, gather)
    counts = [
        n
        for n in CHUNK_COUNTS
        if n <= max_chunks and traffic.logical_bytes / (n * traffic.replication) >= min_slice_bytes
    ]
    for count in counts:
        yield pipelined(traffic, count, gather)
    for count in counts:
        yield pipelined_copy(traffic, count, gather)


def _plan(traffic: Traffic, strategy: Strategy, chunks: int, gather: Gather, schedules: dict[Gather, LegOrder]) -> Plan:
    if chunks < 1:
        raise PlanError(f"a pipelined plan needs 1 or more chunks, got {chunks}")
    return Plan(traffic, strategy, chunks, gather, schedules[gather].steps(Cut(traffic, chunks, gather=gather)))
