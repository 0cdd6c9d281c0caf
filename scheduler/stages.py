"""The stages of all_gather, reduce_scatter and all_reduce over nodes, as steps."""

from __future__ import annotations

from commlayer.profiles.links import Resource
from commlayer.scheduler.plan import Buffer, Op, Step, Strategy
from commlayer.scheduler.traffic import Traffic

__all__ = ["Stages", "Steps"]

_AHEAD = 2


class Steps(list[Step]):
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


class Stages:
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
        self.all = Steps()

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
                crossed.append(self._cross(j, partial[j]))
            share()
            if not self.is_one_level and j >= _AHEAD:
                summed.append(self._last_sum(j - _AHEAD, crossed[j - _AHEAD]))
        if self.is_one_level:
            return partial
        return summed + [self._last_sum(j, crossed[j]) for j in range(len(summed), self.chunks)]

    def _cross(self, chunk: int, summed: int) -> int:
        """The node's sums go to the owners of the blocks."""
        part, staged = self.size / self.width / self.chunks, (Buffer.STAGING, Buffer.STAGING)
        return self.all.put(Op.ALL_TO_ALL, Resource.INTER, chunk, part, (summed,), staged, self.m)

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
