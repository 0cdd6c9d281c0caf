"""Plans run in the memory of one process, over all ranks at once: what a plan gives by itself, without links and processes.

Steps run one after the other on all ranks: what a step sends is read when it begins, and has arrived when it ends. That is
one of the orders that a plan allows, and a sound plan gives the same bits in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from commlayer.profiles.errors import InternalError
from commlayer.scheduler.call_moves import RankMoves, Splits, rank_moves
from commlayer.scheduler.group_moves import Nodes
from commlayer.scheduler.moves import Buffer, Moves, Region
from commlayer.scheduler.plan import Plan
from commlayer.transport.call_memory import Reducer
from commlayer.transport.contract import Coder

__all__ = ["everyones_moves", "run_in_memory"]

_CODED = (Buffer.ENCODED, Buffer.ARRIVED)


def everyones_moves(
    kind: str,
    plan: Plan,
    nodes: Nodes,
    *,
    root: int = 0,
    blocks: Sequence[int] | None = None,
    splits: Sequence[Splits] = (),
) -> list[RankMoves]:
    """The moves of every member of a group (:func:`rank_moves`); ``splits``: of exchanges, each member's."""
    counts = [sent for sent, _ in splits]
    each = splits or [((), ())] * sum(map(len, nodes))
    return [
        rank_moves(kind, plan, nodes, rank, root=root, blocks=blocks, splits=mine, counts=counts)
        for rank, mine in enumerate(each)
    ]


def run_in_memory(
    plan: Plan,
    ranks: Sequence[RankMoves],
    buffers: Sequence[dict[Buffer, torch.Tensor]],
    reduce: Reducer | None,
    coder: Coder | None,
) -> None:
    """Run the plan on all ranks; ``buffers``: input and output of each, 1-D uint8, which are one where the call is in place."""
    memory = [_Memory(mine, each.sizes, reduce, coder) for each, mine in zip(ranks, buffers, strict=True)]
    for index in range(len(plan.steps)):
        posted = {
            (me, message.peer, message.tag): memory[me].at(message.region).clone()
            for me, each in enumerate(ranks)
            for message in each.steps[index].sends
        }
        for me, each in enumerate(ranks):
            memory[me].move(each.steps[index])
        for me, each in enumerate(ranks):
            for message in each.steps[index].receives:
                data = posted.pop((message.peer, me, message.tag), None)
                if data is None or data.numel() != message.region.size:
                    raise InternalError(
                        f"{plan.name}, step {index}: member {me} waits for what {message.peer} sends not"
                    )
                memory[me].at(message.region).copy_(data)


class _Memory:
    def __init__(
        self,
        given: dict[Buffer, torch.Tensor],
        sizes: Mapping[Buffer, int],
        reduce: Reducer | None,
        coder: Coder | None,
    ) -> None:
        self._buffers = {buffer: torch.zeros(size, dtype=torch.uint8) for buffer, size in sizes.items()} | given
        self._reduce, self._coder = reduce, coder

    def at(self, region: Region) -> torch.Tensor:
        data = self._buffers[region.buffer]
        if not 0 <= region.start <= region.stop <= data.numel():
            raise InternalError(f"{region} is not in a buffer of {data.numel()} bytes")
        return data[region.start : region.stop]

    def move(self, moves: Moves) -> None:
        """The work of a step on one rank beside its messages, in the order of :class:`Moves`."""
        for copy in moves.copies:
            self.at(copy.target).copy_(self.at(copy.source).clone())
        for reduction in moves.reductions:
            self._sum(self.at(reduction.target), reduction.sources)
        if moves.encodes or moves.decodes:
            assert self._coder is not None
            for encode in moves.encodes:
                self._coder.encode(self.at(encode.source), self.at(encode.target))
            for decode in moves.decodes:
                self._coder.decode(self.at(decode.source), self.at(decode.target))

    def _sum(self, target: torch.Tensor, sources: Sequence[Region]) -> None:
        coded = [source.buffer in _CODED for source in sources]
        if any(coded):
            assert self._coder is not None
            self._coder.add(target, [self.at(source) for source in sources], coded)
            return
        assert self._reduce is not None
        dtype = self._reduce.dtype
        self._reduce.reduce(target.view(dtype), [self.at(source).view(dtype) for source in sources])
