"""The legs of all_gather, reduce_scatter and all_reduce, and how their strategies are put together from them.

Posting occupies the thread where bytes are copied into shared memory, and so do sums. So the exchange of a chunk inside
the node is posted ``AHEAD`` chunks before it is sent on, and no earlier: all of them at once would leave the wire idle at the
beginning. The last sum of a chunk waits for the wire, so it comes as many chunks later. Where a chunk crosses in pieces, which
are posted as the link takes them, the other legs go between those: what the next chunk needs, so that the link does not wait.

On one level the whole group is one node, so the same legs share, sum and spread.
"""

from __future__ import annotations

from itertools import pairwise

from commlayer.scheduler.group_moves import GroupPlace, Piece, exchanged
from commlayer.scheduler.legs import AHEAD, LATE, ExchangeLeg, LegOrder, LocalLeg
from commlayer.scheduler.moves import Buffer, Copy, Moves, Reduction, Region
from commlayer.scheduler.plan import Cut, Op, Span

__all__ = ["ALL_REDUCE_DUPLEX", "ON_ONE_LEVEL", "OVER_NODES", "SHARE", "SUM_NODE", "SUM_NODES", "Cross", "SpreadSlices"]


class OwnBlock(LocalLeg):
    """An all_gather's own block, copied to its place."""

    is_whole = True

    def size(self, cut: Cut) -> float:
        return cut.block

    def moves(self, place: GroupPlace, tag: int, chunk: int) -> Moves:
        base, size = place.layout.bases[place.rank], place.layout.blocks[place.rank]
        copy = Copy(Region(Buffer.INPUT, 0, size), Region(Buffer.OUTPUT, base, base + size))
        return Moves(copies=(copy,)) if size else Moves()


class Share(ExchangeLeg):
    """Each peer gets its slices of this rank's input."""

    def moves(self, place: GroupPlace, tag: int, chunk: int) -> Moves:
        mine = place.handled(place.i, chunk)
        region = place.layout.region
        return exchanged(
            tag,
            ((k, region(Buffer.INPUT, piece)) for i, k in place.others for _, piece in place.handled(i, chunk)),
            ((k, place.arrival(i, b, piece)) for i, k in place.others for b, piece in mine),
        )


class SumShares(LocalLeg):
    """The sum over the ranks that have shared, in their order."""

    def size(self, cut: Cut) -> float:
        width = self.span.ranks(cut.traffic)
        return cut.size / width / cut.chunks * (width - 1)

    def moves(self, place: GroupPlace, tag: int, chunk: int) -> Moves:
        if len(place.here) == 1:
            return Moves()
        sums = []
        for b, piece in place.handled(place.i, chunk):
            sources = tuple(
                place.layout.region(Buffer.INPUT, piece) if i == place.i else place.arrival(i, b, piece)
                for i in range(len(place.here))
            )
            partial = place.partial(b, piece)
            sums.append(Reduction(sources, partial))
            if self.target is Buffer.OUTPUT:  # nobody else has more to add
                sums.append(Reduction((partial,), place.output(piece)))
        return Moves(reductions=tuple(sums))


class Cross(ExchangeLeg):
    """The nodes' sums go to the owners of the blocks."""

    is_in_pieces = True
    yields = True

    def size(self, cut: Cut) -> float:
        return cut.over_rails(cut.size) / cut.chunks / cut.pieces * cut.ratio

    def moves(self, place: GroupPlace, tag: int, chunk: int) -> Moves:
        parts = place.plan.pieces
        return exchanged(
            tag,
            ((p.owner, place.outgoing(b, p)) for b in place.away for p in place.pieces(b, place.i, chunk, parts)),
            ((k, place.crossed(b, p)) for b in place.away for k, p in place.mine(b, chunk, parts)),
        )


class SumNodes(LocalLeg):
    """The sum over the nodes, this one first: at once wherever all of them have a piece of this rank's block, which nodes of
    different sizes cut at different places."""

    def size(self, cut: Cut) -> float:
        return cut.block * (len(cut.traffic.nodes) - 1) / cut.chunks

    def moves(self, place: GroupPlace, tag: int, chunk: int) -> Moves:
        sums = []
        for own in place.own(chunk):
            pieces = [own, *(piece for b in place.away for _, piece in place.mine(b, chunk))]
            for start, stop in pairwise(sorted({edge for piece in pieces for edge in (piece.start, piece.stop)})):
                piece = Piece(own.owner, start, stop, own.offset + start - own.start)
                crossed = (place.crossed(b, piece) for b in place.away)
                sums.append(Reduction((place.partial(place.a, piece), *crossed), place.output(piece)))
        return Moves(reductions=tuple(sums))


class Rails(ExchangeLeg):
    """Each owner's pieces go to the ranks that handle them on the other nodes."""

    is_in_pieces = True

    def size(self, cut: Cut) -> float:
        return cut.over_rails(cut.size) / cut.chunks / cut.pieces

    def moves(self, place: GroupPlace, tag: int, chunk: int) -> Moves:
        parts = place.plan.pieces
        handled = (p for b in place.away for p in place.pieces(b, place.i, chunk, parts))
        return exchanged(
            tag,
            ((k, place.output(p, self.source)) for b in place.away for k, p in place.mine(b, chunk, parts)),
            ((p.owner, place.layout.region(Buffer.OUTPUT, p)) for p in handled),
        )


class SpreadSlices(ExchangeLeg):
    """Every rank gets what each of its peers handles.

    It waits for the chunk before as well: what has arrived is copied out by whoever waits for it, and the time for that is now,
    with the next chunk on the wire, not at the end.
    """

    is_in_turn = True

    def moves(self, place: GroupPlace, tag: int, chunk: int) -> Moves:
        mine = [place.output(piece) for _, piece in place.handled(place.i, chunk)]
        return exchanged(
            tag,
            ((k, region) for _, k in place.others for region in mine),
            ((k, place.output(piece)) for i, k in place.others for _, piece in place.handled(i, chunk)),
        )


_IN, _OUT, _STAGED = Buffer.INPUT, Buffer.OUTPUT, Buffer.STAGING

OWN_BLOCK = OwnBlock("own block", Op.COPY, Span.SELF, _IN, _OUT)
SHARE = Share("share in node", Op.ALL_TO_ALL, Span.NODE, _IN, _STAGED)
SUM_NODE = SumShares("sum node", Op.REDUCE, Span.NODE, _STAGED, _STAGED, (SHARE,))
CROSS = Cross("cross rails", Op.ALL_TO_ALL, Span.RAIL, _STAGED, _STAGED, (SUM_NODE,))
SUM_NODES = SumNodes("sum nodes", Op.REDUCE, Span.RAIL, _STAGED, _OUT, (CROSS,))
RAILS = Rails("rails", Op.ALL_GATHER, Span.RAIL, _IN, _OUT)
RAILS_OF_SUMS = Rails("rails of sums", Op.ALL_GATHER, Span.RAIL, _OUT, _OUT, (SUM_NODES,))
SPREAD = SpreadSlices(
    "spread in node", Op.ALL_GATHER, Span.NODE, _OUT, _OUT, (OWN_BLOCK, SUM_NODES, RAILS, RAILS_OF_SUMS)
)

SHARE_WITH_ALL = Share("share with all", Op.ALL_TO_ALL, Span.GROUP, _IN, _STAGED)
SUM_ALL = SumShares("sum all", Op.REDUCE, Span.GROUP, _STAGED, _OUT, (SHARE_WITH_ALL,))
SPREAD_TO_ALL = SpreadSlices("spread to all", Op.ALL_GATHER, Span.GROUP, _OUT, _OUT, (OWN_BLOCK, SUM_ALL))

_SUMS = LegOrder(((CROSS, AHEAD), (SHARE, 0), (SUM_NODES, 2 * AHEAD), (SUM_NODE, AHEAD - 1)))
OVER_NODES = {
    "all_gather": LegOrder(((OWN_BLOCK, 0), (RAILS, 0), (SPREAD, LATE))),
    "reduce_scatter": _SUMS,
    "all_reduce": _SUMS + LegOrder(((RAILS_OF_SUMS, 0), (SPREAD, LATE))),
}
ALL_REDUCE_DUPLEX = LegOrder(
    (
        (CROSS, AHEAD),
        (SHARE, 0),
        (SUM_NODES, 2 * AHEAD),
        (RAILS_OF_SUMS, 2 * AHEAD),
        (SPREAD, 3 * AHEAD),
        (SUM_NODE, AHEAD - 1),
    )
)
"""The same as an all_reduce over nodes, but that a chunk's sums are sent as soon as they are there: where cards are unequal."""
_SUMS_OF_ALL = LegOrder(((SHARE_WITH_ALL, 0), (SUM_ALL, AHEAD - 1)))
ON_ONE_LEVEL = {
    "all_gather": LegOrder(((OWN_BLOCK, 0), (SPREAD_TO_ALL, 0))),
    "reduce_scatter": _SUMS_OF_ALL,
    "all_reduce": _SUMS_OF_ALL + LegOrder(((SPREAD_TO_ALL, 0),)),
}
