"""The stages of all_gather, reduce_scatter and all_reduce over nodes, as steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from commlayer.profiles.links import Resource
from commlayer.scheduler.lanes import level_of
from commlayer.scheduler.plan import Buffer, Op, Step, Strategy
from commlayer.scheduler.traffic import Traffic

__all__ = ["AHEAD", "Stages", "Steps"]

AHEAD = 2


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
    the node is posted ``AHEAD`` chunks before its sum, and no earlier: all of them at once would leave the wire idle at the
    beginning. The last sum of a chunk waits for the wire, so it comes as many chunks later.
    """

    def __init__(self, traffic: Traffic, strategy: Strategy, chunks: int, pieces: int = 1) -> None:
        self.traffic, self.chunks, self.pieces = traffic, chunks, pieces
        self.is_one_level = strategy is Strategy.DIRECT
        # How many chunks later is placed what comes from other nodes: all at once at the end, or, where their number on the link
        # is bounded and so whoever posts them waits for it, between them.
        self.ahead = AHEAD if level_of(traffic.lane) else chunks
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
        self._arrived: list[int] = []
        self._partial: list[int] = []
        for _ in range(AHEAD):
            self._share()
        if self.is_one_level:
            for _ in range(self.chunks):
                self._first_sum()
                self._share()
            return self._partial
        crossed: list[tuple[int, ...]] = []
        summed: list[int] = []
        for j in range(self.chunks):
            if len(self._partial) <= j:
                self._first_sum()
            # Between the pieces of this chunk, which are posted as the link takes them, what the next ones need: the link is not
            # to wait for it.
            between = [self._share, self._first_sum] if self.pieces > 1 else []
            if self.pieces > 1 and j >= AHEAD:
                between.insert(1, partial(self._sum_nodes, summed, crossed))
            crossed.append(self._cross(j, self._partial[j], between))
            if self.pieces == 1:
                self._share()
                if j >= AHEAD:
                    self._sum_nodes(summed, crossed)
        while len(summed) < self.chunks:
            self._sum_nodes(summed, crossed)
        return summed

    def _share(self) -> None:
        """The next chunk to the ranks of the node."""
        if (j := len(self._arrived)) < self.chunks:
            buffers, whole = (Buffer.INPUT, Buffer.STAGING), self.size / self.chunks
            self._arrived.append(self.all.put(Op.ALL_TO_ALL, self.intra, j, whole, (), buffers, self.width))

    def _first_sum(self) -> None:
        """Of the next chunk, over the ranks of the node."""
        if (j := len(self._partial)) < self.chunks:
            added = self.size / self.width / self.chunks * (self.width - 1)
            buffers = Buffer.STAGING, Buffer.OUTPUT if self.is_one_level else Buffer.STAGING
            self._partial.append(self.all.put(Op.REDUCE, Resource.DEVICE, j, added, (self._arrived[j],), buffers, 1))

    def _pieces_of(self, chunk: int) -> range:
        return range(chunk * self.pieces, (chunk + 1) * self.pieces)

    def _cross(self, chunk: int, summed: int, between: list[Callable[[], None]]) -> tuple[int, ...]:
        """The node's sums go to the owners of the blocks; after each piece one of ``between``, and then what is left of them."""
        part, staged = self.size / self.width / self.chunks / self.pieces, (Buffer.STAGING, Buffer.STAGING)
        found = []
        for piece in self._pieces_of(chunk):
            found.append(self.all.put(Op.ALL_TO_ALL, Resource.INTER, piece, part, (summed,), staged, self.m))
            if between:
                between.pop(0)()
        for work in between:
            work()
        return tuple(found)

    def _sum_nodes(self, summed: list[int], crossed: list[tuple[int, ...]]) -> None:
        """The last step of the next chunk."""
        summed.append(self._last_sum(len(summed), crossed[len(summed)]))

    def _last_sum(self, chunk: int, crossed: tuple[int, ...]) -> int:
        added = self.block * (self.m - 1) / self.chunks
        return self.all.put(Op.REDUCE, Resource.DEVICE, chunk, added, crossed, (Buffer.STAGING, Buffer.OUTPUT), 1)

    def _gather(self, ready: list[int], source: Buffer) -> None:
        """From the owners to one rank of each other node, then to all ranks of the node."""
        rails: list[tuple[int, ...]] = []
        previous: tuple[int, ...] = ()
        for j in range(self.chunks):
            rails.append(self._to_rails(j, ready[j], source))
            if j >= self.ahead:
                previous = self._inside(j - self.ahead, ready, rails, previous)
        for j in range(max(self.chunks - self.ahead, 0), self.chunks):
            previous = self._inside(j, ready, rails, previous)

    def _to_rails(self, chunk: int, ready: int, source: Buffer) -> tuple[int, ...]:
        if self.is_one_level:
            return (ready,)
        rail = self.size / self.width / self.chunks / self.pieces
        waits = () if source is Buffer.INPUT else (ready,)
        return tuple(
            self.all.put(Op.ALL_GATHER, Resource.INTER, piece, rail, waits, (source, Buffer.OUTPUT), self.m)
            for piece in self._pieces_of(chunk)
        )

    def _inside(
        self, chunk: int, ready: list[int], rails: list[tuple[int, ...]], previous: tuple[int, ...]
    ) -> tuple[int, ...]:
        # The chunk before is waited for as well: what has arrived is copied out by whoever waits for it, and the time for
        # that is now, with the next chunk on the wire, not at the end.
        waits_for = tuple(dict.fromkeys((ready[chunk], *rails[chunk], *previous)))
        buffers = (Buffer.OUTPUT, Buffer.OUTPUT)
        size = self.size / self.chunks
        return (self.all.put(Op.ALL_GATHER, self.intra, chunk, size, waits_for, buffers, self.width),)
