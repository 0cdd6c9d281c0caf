"""The stages of collectives whose bytes cross links in a wire format.

On one level (``flat_direct``) every block is encoded by who sends it: MegaScale-MoE's reduce_scatter as an all_to_all in BF16
with FP32 sums by the owner (section 5). Over nodes the inside stays native, and what crosses between them is encoded: the sum
of a whole node is rounded once, and each byte of the slow link carries twice as much. An all_to_all encodes what goes to other
nodes.

Steps are listed so that the thread which encodes and decodes first feeds the wire: all chunks are encoded and sent before the
first is waited for.
"""

from __future__ import annotations

from collections.abc import Callable

from commlayer.profiles.links import Resource
from commlayer.scheduler.plan import Buffer, Op, Step, Strategy
from commlayer.scheduler.stages import Stages, Steps
from commlayer.scheduler.traffic import Traffic
from commlayer.scheduler.wire import Wire

__all__ = ["EncodedStages", "exchange_steps"]


class EncodedStages(Stages):
    """all_gather, reduce_scatter and all_reduce. See the base class for the order of steps."""

    def __init__(self, traffic: Traffic, strategy: Strategy, chunks: int, wire: Wire) -> None:
        super().__init__(traffic, strategy, chunks)
        self.ratio = wire.ratio(traffic.element_bytes)

    def steps(self) -> tuple[Step, ...]:
        if self.traffic.collective == "all_gather":
            self._gather([], Buffer.INPUT)
            return tuple(self.all)
        return super().steps()

    def _encode(self, chunk: int, size: float, after: tuple[int, ...], source: Buffer) -> int:
        return self.all.put(Op.ENCODE, Resource.DEVICE, chunk, size, after, (source, Buffer.ENCODED), 1)

    def _decode(self, chunk: int, size: float, after: int) -> int:
        return self.all.put(Op.DECODE, Resource.DEVICE, chunk, size, (after,), (Buffer.ARRIVED, Buffer.OUTPUT), 1)

    def _move(self, op: Op, resource: Resource, chunk: int, size: float, after: int, width: int) -> int:
        buffers = (Buffer.ENCODED, Buffer.ARRIVED)
        return self.all.put(op, resource, chunk, size * self.ratio, (after,), buffers, width)

    def _sum(self) -> list[int]:
        if not self.is_one_level:
            return super()._sum()
        part = self.size / self.chunks
        crossed: list[int] = []
        summed: list[int] = []
        for j in range(self.chunks):
            encoded = self._encode(j, part, (), Buffer.INPUT)
            crossed.append(self._move(Op.ALL_TO_ALL, self.intra, j, part, encoded, self.width))
            if j >= self.ahead:
                summed.append(self._decode(j - self.ahead, part, crossed[j - self.ahead]))
        return summed + [self._decode(j, part, crossed[j]) for j in range(len(summed), self.chunks)]

    def _cross(self, chunk: int, summed: int, between: list[Callable[[], None]]) -> tuple[int, ...]:
        assert not between  # encoded messages are not cut into pieces
        part = self.size / self.width / self.chunks
        encoded = self._encode(chunk, part * (self.m - 1) / self.m, (summed,), Buffer.STAGING)
        return (self._move(Op.ALL_TO_ALL, Resource.INTER, chunk, part, encoded, self.m),)

    def _last_sum(self, chunk: int, crossed: tuple[int, ...]) -> int:
        return self._decode(chunk, self.block * (self.m - 1) / self.chunks, crossed[0])

    def _gather(self, ready: list[int], source: Buffer) -> None:
        """The owner, too, keeps what the others decode, so that all ranks hold the same bits."""
        chunks, whole = self.chunks, self.size / self.chunks
        moved: list[int] = []
        link, width, part = (self.intra, self.width, whole) if self.is_one_level else self._rail(whole)
        previous: tuple[int, ...] = ()

        def place(j: int) -> tuple[int, ...]:
            decoded = self._decode(j, part * (width - 1) / width, moved[j])
            if self.is_one_level:
                return ()
            buffers = (Buffer.OUTPUT, Buffer.OUTPUT)
            after = (decoded, *previous)  # see Stages._gather
            return (self.all.put(Op.ALL_GATHER, self.intra, j, whole, after, buffers, self.width),)

        for j in range(chunks):
            encoded = self._encode(j, self.block / chunks, (ready[j],) if ready else (), source)
            moved.append(self._move(Op.ALL_GATHER, link, j, part, encoded, width))
            if j >= self.ahead:
                previous = place(j - self.ahead)
        for j in range(max(chunks - self.ahead, 0), chunks):
            previous = place(j)

    def _rail(self, whole: float) -> tuple[Resource, int, float]:
        return Resource.INTER, self.m, whole / self.width


def exchange_steps(traffic: Traffic, chunks: int, wire: Wire) -> tuple[Step, ...]:
    """An all_to_all with any splits: to ranks of the own node as they are, to others encoded; on one node all are encoded."""
    size, width = float(traffic.logical_bytes), max(traffic.nodes)
    far = (traffic.group_size - width) / traffic.group_size if len(traffic.nodes) > 1 else 1.0
    part, ratio = size / chunks, wire.ratio(traffic.element_bytes)
    steps, moved = Steps(), []
    coded = (Buffer.ENCODED, Buffer.ARRIVED)
    for j in range(chunks):
        after = (steps.put(Op.ENCODE, Resource.DEVICE, j, part * far, (), (Buffer.INPUT, Buffer.ENCODED), 1),)
        moved.append(steps.put(Op.ALL_TO_ALL, traffic.link, j, part * ratio, after, coded, traffic.group_size))
        if j == 0:  # the wire is busy now
            near = (Buffer.INPUT, Buffer.OUTPUT)
            if len(traffic.nodes) > 1 and width > 1:
                steps.put(Op.ALL_TO_ALL, Resource.INTRA, 0, size * (1 - far), (), near, width)
            steps.put(Op.COPY, Resource.DEVICE, 0, size / traffic.group_size, (), near, 1)
    for j in range(chunks):
        steps.put(Op.DECODE, Resource.DEVICE, j, part * far, (moved[j],), (Buffer.ARRIVED, Buffer.OUTPUT), 1)
    return tuple(steps)
