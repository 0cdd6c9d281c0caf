"""Traffic of a group whose ranks all hold tokens of their own → candidate plans.

Over nodes of l ranks each, m nodes, n = m·l ranks, S logical bytes:

- all_gather: every rank sends its block to one rank of each other node (the wire carries each byte once a node instead of
  l times), then each node gathers.
- reduce_scatter: the mirror: a node exchanges and sums, so that one partial sum of each block leaves it, and the owner of
  the block sums those of all nodes.
- all_reduce: a reduce_scatter, then an all_gather of what was summed.
- broadcast: the root scatters inside its node, its node's ranks send their slices to the other nodes at the same time, every
  node gathers.
- all_to_all_v: inside the node by the destination's place in its node, then one message to each other node: l times fewer
  messages between nodes, of the same bytes. It pays where latency rules.

``flat_direct`` is the same with the whole group as one node: every rank to every rank, sums on the spot and in rank order.
Rejected: rings. They need n−1 steps one after the other, each with the latency of a message, and sum in an order that
depends on the block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from commlayer.profiles.errors import PlanError
from commlayer.profiles.links import Resource
from commlayer.scheduler.moves import MAX_TAGS, tags_per_step
from commlayer.scheduler.plan import Buffer, Gather, Op, Plan, Step, Strategy
from commlayer.scheduler.traffic import Traffic

__all__ = ["build_group", "group_candidates"]

_OWN_CALL = {
    "all_gather": Op.ALL_GATHER,
    "all_reduce": Op.ALL_REDUCE,
    "all_to_all_v": Op.ALL_TO_ALL,
    "broadcast": Op.BROADCAST,
    "reduce_scatter": Op.REDUCE_SCATTER,
}
_AHEAD = 2
_LEAST_STEPS = 2
"""Steps of a chunk, at least."""
_TOO_MANY_TAGS = (
    f"it needs more than {MAX_TAGS} message tags, and no transport could tell its messages apart: use fewer chunks"
)
_COUNT_BYTES = 8
"""A count of bytes travels as an int64."""


def build_group(traffic: Traffic, strategy: Strategy, chunks: int = 1) -> Plan:
    """The plan of that name. Raises PlanError where the strategy does not apply to the traffic, or needs too many chunks."""
    _check(traffic, strategy, chunks)
    if strategy is Strategy.FLAT:
        size, op = float(traffic.logical_bytes), _OWN_CALL[traffic.collective]
        steps: tuple[Step, ...] = (
            Step(op, traffic.link, 0, size, (), Buffer.INPUT, Buffer.OUTPUT, traffic.group_size),
        )
    elif traffic.collective == "all_to_all_v":
        steps = _two_level_steps(traffic)
    elif traffic.collective == "broadcast":
        steps = _broadcast_steps(traffic, chunks)
    else:
        steps = _Stages(traffic, strategy, chunks).steps()
    plan = Plan(traffic, strategy, chunks, Gather.WHOLE, steps)
    if strategy is not Strategy.FLAT and len(steps) * tags_per_step(plan) > MAX_TAGS:
        raise PlanError(_refusal(traffic, strategy, _TOO_MANY_TAGS))
    return plan


def group_candidates(
    traffic: Traffic, chunk_counts: tuple[int, ...], min_slice_bytes: float, max_chunks: int
) -> Iterator[Plan]:
    """Every plan worth pricing, simple ones first. Chunks below ``min_slice_bytes`` a rank are left out."""
    for strategy in (Strategy.FLAT, Strategy.DIRECT, Strategy.HIERARCHICAL):
        with contextlib.suppress(PlanError):
            yield build_group(traffic, strategy)
    for count in chunk_counts:
        if count > max_chunks or traffic.logical_bytes / (count * traffic.group_size) < min_slice_bytes:
            return
        try:
            yield build_group(traffic, Strategy.PIPELINED, count)
        except PlanError:  # among others: hundreds of nodes, and too many messages to tell apart
            return


def _check(traffic: Traffic, strategy: Strategy, chunks: int) -> None:
    objection = _objection(traffic, strategy, chunks)
    if not objection and chunks > 1 and _LEAST_STEPS * chunks * len(traffic.nodes) > MAX_TAGS:
        objection = _TOO_MANY_TAGS  # found before all those steps are made
    if objection:
        raise PlanError(_refusal(traffic, strategy, objection))


def _refusal(traffic: Traffic, strategy: Strategy, why: str) -> str:
    return f"{strategy.value} does not apply to {traffic.collective} over nodes {traffic.nodes}: {why}"


def _objection(traffic: Traffic, strategy: Strategy, chunks: int) -> str:
    """Why not; empty where the strategy applies."""
    if chunks < 1 or (chunks > 1 and strategy is not Strategy.PIPELINED):
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
    if len(traffic.nodes) == 1 or max(traffic.nodes) == 1:
        return "it needs several nodes, and several ranks on one of them"
    if not traffic.is_uniform and (chunks > 1 or traffic.collective == "all_to_all_v"):
        return "nodes hold different numbers of its ranks"
    if chunks > 1 and traffic.collective == "all_to_all_v":
        return "it pays for small messages only, which are not cut"
    return ""


class _Steps(list[Step]):
    def put(
        self,
        op: Op,
        resource: Resource,
        chunk: int,
        size: float,
        after: tuple[int, ...],
        buffers: tuple[Buffer, Buffer],
        group_size: int,
    ) -> int:
        """Append a step and return its index."""
        self.append(Step(op, resource, chunk, size, after, *buffers, group_size))
        return len(self) - 1


class _Stages:
    """The stages of all_gather, reduce_scatter and all_reduce, chunk by chunk.

    Posting occupies the thread where bytes are copied into shared memory, and so do sums. So the exchange of a chunk inside
    the node is posted ``_AHEAD`` chunks before its sum, and no earlier: all of them at once would leave the wire idle at the
    beginning. The last sum of a chunk waits for the wire, so it comes as many chunks later.
    """

    def __init__(self, traffic: Traffic, strategy: Strategy, chunks: int) -> None:
        self.traffic, self.chunks = traffic, chunks
        self.is_one_level = strategy is Strategy.DIRECT
        self.intra = traffic.link if self.is_one_level else Resource.INTRA
        self.m = 1 if self.is_one_level else len(traffic.nodes)
        self.width = traffic.group_size if self.is_one_level else max(traffic.nodes)
        self.size = float(traffic.logical_bytes)
        self.block = self.size / traffic.group_size
        self.all = _Steps()

    def steps(self) -> tuple[Step, ...]:
        if self.traffic.collective == "all_gather":
            copy = self.all.put(Op.COPY, Resource.DEVICE, 0, self.block, (), (Buffer.INPUT, Buffer.OUTPUT), 1)
            self._gather([copy] * self.chunks, Buffer.INPUT)
            return tuple(self.all)
        summed = self._sum()
        if self.traffic.collective == "all_reduce":
            self._gather(summed, Buffer.OUTPUT)
        return tuple(self.all)

    def _sum(self) -> list[int]:
        """Exchange and sum inside the node, then between nodes. Returns the last step of each chunk."""
        staged = (Buffer.STAGING, Buffer.STAGING)
        whole, part = self.size / self.chunks, self.size / self.width / self.chunks
        target = Buffer.OUTPUT if self.is_one_level else Buffer.STAGING
        arrived: list[int] = []
        partial: list[int] = []
        crossed: list[int] = []
        summed: list[int] = []

        def share() -> None:
            if (j := len(arrived)) < self.chunks:
                buffers = (Buffer.INPUT, Buffer.STAGING)
                arrived.append(self.all.put(Op.ALL_TO_ALL, self.intra, j, whole, (), buffers, self.width))

        for _ in range(_AHEAD):
            share()
        for j in range(self.chunks):
            added = part * (self.width - 1)
            partial.append(
                self.all.put(Op.REDUCE, Resource.DEVICE, j, added, (arrived[j],), (Buffer.STAGING, target), 1)
            )
            if not self.is_one_level:
                crossed.append(self.all.put(Op.ALL_TO_ALL, Resource.INTER, j, part, (partial[j],), staged, self.m))
            share()
            if not self.is_one_level and j >= _AHEAD:
                summed.append(self._last_sum(j - _AHEAD, crossed[j - _AHEAD]))
        if self.is_one_level:
            return partial
        return summed + [self._last_sum(j, crossed[j]) for j in range(len(summed), self.chunks)]

    def _last_sum(self, chunk: int, crossed: int) -> int:
        added = self.block * (self.m - 1) / self.chunks
        return self.all.put(Op.REDUCE, Resource.DEVICE, chunk, added, (crossed,), (Buffer.STAGING, Buffer.OUTPUT), 1)

    def _gather(self, ready: list[int], source: Buffer) -> None:
        """From the owners to one rank of each other node, then to all ranks of the node."""
        rail, whole = self.size / self.width / self.chunks, self.size / self.chunks
        after = ready
        if not self.is_one_level:
            waits = [() if source is Buffer.INPUT else (ready[j],) for j in range(self.chunks)]
            after = [
                self.all.put(Op.ALL_GATHER, Resource.INTER, j, rail, waits[j], (source, Buffer.OUTPUT), self.m)
                for j in range(self.chunks)
            ]
        previous: tuple[int, ...] = ()
        for j in range(self.chunks):
            # The chunk before is waited for as well: what has arrived is copied out by whoever waits for it, and the time for
            # that is now, with the next chunk on the wire, not at the end.
            waits_for = tuple(dict.fromkeys((ready[j], after[j], *previous)))
            buffers = (Buffer.OUTPUT, Buffer.OUTPUT)
            previous = (self.all.put(Op.ALL_GATHER, self.intra, j, whole, waits_for, buffers, self.width),)


def _broadcast_steps(traffic: Traffic, chunks: int) -> tuple[Step, ...]:
    size, num_nodes, width = float(traffic.logical_bytes), len(traffic.nodes), max(traffic.nodes)
    out = (Buffer.OUTPUT, Buffer.OUTPUT)
    steps = _Steps()
    part = size / chunks
    scattered = [steps.put(Op.SCATTER, Resource.INTRA, j, part, (), out, width) for j in range(chunks)]
    crossed = [
        steps.put(Op.ALL_GATHER, Resource.INTER, j, part * num_nodes / width, (scattered[j],), out, num_nodes)
        for j in range(chunks)
    ]
    for j in range(chunks):
        steps.put(Op.ALL_GATHER, Resource.INTRA, j, part, (crossed[j],), out, width)
    return tuple(steps)


def _two_level_steps(traffic: Traffic) -> tuple[Step, ...]:
    """What a rank sends is known to itself only, so the ranks of a node tell each other how much is coming first."""
    size, num_nodes, width = float(traffic.logical_bytes), len(traffic.nodes), max(traffic.nodes)
    steps = _Steps()
    counted = steps.put(
        Op.ALL_TO_ALL,
        Resource.INTRA,
        0,
        float(traffic.group_size * _COUNT_BYTES),
        (),
        (Buffer.STAGING, Buffer.STAGING),
        width,
    )
    sorted_ = steps.put(Op.ALL_TO_ALL, Resource.INTRA, 0, size, (counted,), (Buffer.INPUT, Buffer.TRANSIT), width)
    crossed = steps.put(Op.ALL_TO_ALL, Resource.INTER, 0, size, (sorted_,), (Buffer.TRANSIT, Buffer.STAGING), num_nodes)
    steps.put(Op.COPY, Resource.DEVICE, 0, size, (crossed,), (Buffer.STAGING, Buffer.OUTPUT), 1)
    return tuple(steps)
