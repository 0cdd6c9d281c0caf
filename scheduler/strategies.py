"""Traffic → candidate plans.

The strategies are MoNTA's (table 6). What differs from the paper is ``Gather.REMOTE``, the default of this runtime:

- the local block is copied from the input instead of being gathered from its own copies, so that the all_gather moves
  (e−1)/e of the tensor (half of it with two nodes);
- ``pipelined`` receives every piece where it finally belongs, so that MoNTA's interleaving copy is not needed; it costs
  e−1 messages a peer instead of one. ``pipelined_copy`` keeps one message a peer and pays with a copy.

``Gather.WHOLE`` is the paper to the letter, for its profile, for comparison, and for the ablation in the benchmark.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from commlayer.profiles.errors import PlanError
from commlayer.profiles.links import Resource
from commlayer.scheduler.group_strategies import build_group, group_candidates
from commlayer.scheduler.plan import Buffer, Gather, Op, Plan, Step, Strategy
from commlayer.scheduler.traffic import Traffic
from commlayer.scheduler.wire import NATIVE, Wire

__all__ = ["CHUNK_COUNTS", "build", "candidates", "flat", "hierarchical", "pipelined", "pipelined_copy"]

CHUNK_COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""The chunk counts that are searched. Finer grids change the predicted time by less than any profile's error."""


def flat(traffic: Traffic) -> Plan:
    """One all_to_all of the whole buffer: what torch.distributed does."""
    step = Step(Op.ALL_TO_ALL, traffic.link, 0, float(traffic.logical_bytes), (), Buffer.INPUT, Buffer.OUTPUT)
    return Plan(traffic, Strategy.FLAT, 1, Gather.WHOLE, (step,))


def hierarchical(traffic: Traffic, gather: Gather = Gather.REMOTE) -> Plan:
    """MoNTA O1 (eq. 11): each rank sends its 1/t slice between nodes, then the node gathers."""
    return Plan(traffic, Strategy.HIERARCHICAL, 1, gather, _in_place_steps(traffic, 1, gather))


def pipelined(traffic: Traffic, chunks: int, gather: Gather = Gather.REMOTE) -> Plan:
    """MoNTA O2 (algorithm 1): all_to_all of chunk j+1 ∥ all_gather of chunk j; WHOLE also copies, on the same resource."""
    _check_chunks(chunks)
    if gather is Gather.REMOTE:
        return Plan(traffic, Strategy.PIPELINED, chunks, gather, _in_place_steps(traffic, chunks, gather))
    return Plan(traffic, Strategy.PIPELINED, chunks, gather, _staged_steps(traffic, chunks, gather, Resource.INTRA))


def pipelined_copy(traffic: Traffic, chunks: int, gather: Gather = Gather.REMOTE) -> Plan:
    """MoNTA O3 (algorithm 2): all_to_all ∥ all_gather ∥ copy, three chunks in flight."""
    _check_chunks(chunks)
    return Plan(
        traffic, Strategy.PIPELINED_COPY, chunks, gather, _staged_steps(traffic, chunks, gather, Resource.DEVICE)
    )


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
    if strategy is Strategy.DIRECT or not can_drop(traffic):
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


def _check_chunks(chunks: int) -> None:
    if chunks < 1:
        raise PlanError(f"a pipelined plan needs 1 or more chunks, got {chunks}")


def _gathered_bytes(traffic: Traffic, gather: Gather) -> float:
    blocks = traffic.group_size if gather is Gather.WHOLE else traffic.group_size - 1
    return float(traffic.block_bytes * blocks)


def _exchanges(traffic: Traffic, chunks: int, target: Buffer) -> list[Step]:
    """The all_to_all of every chunk. They wait for nothing, so an executor may post all of them at once."""
    size = traffic.logical_bytes / (chunks * traffic.replication)
    return [Step(Op.ALL_TO_ALL, traffic.link, j, size, (), Buffer.INPUT, target) for j in range(chunks)]


def _local_copy(traffic: Traffic, gather: Gather) -> list[Step]:
    """The block that stays on this rank: copied while the wire is busy, instead of gathered."""
    if gather is Gather.WHOLE:
        return []
    return [Step(Op.COPY, Resource.DEVICE, 0, float(traffic.block_bytes), (), Buffer.INPUT, Buffer.OUTPUT)]


def _in_place_steps(traffic: Traffic, chunks: int, gather: Gather) -> tuple[Step, ...]:
    steps = _exchanges(traffic, chunks, Buffer.OUTPUT) + _local_copy(traffic, gather)
    size = _gathered_bytes(traffic, gather) / chunks
    steps += [Step(Op.ALL_GATHER, Resource.INTRA, j, size, (j,), Buffer.OUTPUT, Buffer.OUTPUT) for j in range(chunks)]
    return tuple(steps)


def _staged_steps(traffic: Traffic, chunks: int, gather: Gather, copy_on: Resource) -> tuple[Step, ...]:
    """Chunks land in staging and are copied to their place.

    The copy of chunk j is listed behind the all_gather of chunk j+1 when it has a resource of its own, so that an
    executor that copies on its own thread has already posted what the copy should overlap.
    """
    steps = _exchanges(traffic, chunks, Buffer.STAGING) + _local_copy(traffic, gather)
    size = _gathered_bytes(traffic, gather) / chunks
    gathers: list[int] = []
    copied = 0

    def copy() -> None:
        nonlocal copied
        after = (gathers[copied],)
        steps.append(Step(Op.COPY, copy_on, copied, size, after, Buffer.STAGING, Buffer.OUTPUT))
        copied += 1

    for j in range(chunks):
        gathers.append(len(steps))
        steps.append(Step(Op.ALL_GATHER, Resource.INTRA, j, size, (j,), Buffer.STAGING, Buffer.STAGING))
        if copy_on is Resource.INTRA or j > 0:
            copy()
    while copied < chunks:
        copy()
    return tuple(steps)
