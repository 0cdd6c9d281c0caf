"""The legs of collectives whose bytes cross links in a wire format.

On one level (``flat_direct``) every block is encoded by who sends it: MegaScale-MoE's reduce_scatter as an all_to_all in BF16
with FP32 sums by the owner (section 5). Over nodes the inside stays native, and what crosses between them is encoded: the sum
of a whole node is rounded once, and each byte of the slow link carries twice as much. An all_to_all encodes what goes to other
nodes.

Steps are posted so that the thread which encodes and decodes first feeds the wire: all chunks are encoded and sent before the
first is waited for.
"""

from __future__ import annotations

from commlayer.scheduler.encoded_moves import EncodedPlace, ExchangePlace
from commlayer.scheduler.group_legs import SHARE, SUM_NODE, SUM_NODES, Cross, SpreadSlices
from commlayer.scheduler.group_moves import exchanged
from commlayer.scheduler.legs import AHEAD, LATE, CodedLeg, ExchangeLeg, LegOrder, LocalLeg
from commlayer.scheduler.moves import Buffer, Copy, Decode, Encode, Message, Moves, Reduction, filled
from commlayer.scheduler.plan import Cut, Op, Span
from commlayer.scheduler.traffic import Traffic

__all__ = ["ENCODED_ON_ONE_LEVEL", "ENCODED_OVER_NODES", "EXCHANGE_OVER_NODES"]


class _Send(ExchangeLeg):
    """Encoded messages of a chunk."""

    def size(self, cut: Cut) -> float:
        return super().size(cut) * cut.ratio


# Sums on one level


class EncodeBlocks(CodedLeg):
    """Everyone's block of this rank's input, its own too."""

    def moves(self, place: EncodedPlace, tag: int, chunk: int) -> Moves:
        pieces = [piece for i in range(len(place.here)) for piece in place.pieces(0, i, chunk)]
        return Moves(encodes=tuple(Encode(place.layout.region(self.source, p), place.outgoing(0, p)) for p in pieces))


class SendBlocks(_Send):
    """Everyone's block goes to its owner."""

    def moves(self, place: EncodedPlace, tag: int, chunk: int) -> Moves:
        own = place.pieces(0, place.i, chunk)
        return exchanged(
            tag,
            ((k, place.outgoing(0, p)) for i, k in place.others for p in place.pieces(0, i, chunk)),
            ((k, place.crossed(i, p)) for i, k in place.others for p in own),
        )


class DecodeBlocks(CodedLeg):
    """The owner adds what the ranks have encoded, in rank order."""

    def moves(self, place: EncodedPlace, tag: int, chunk: int) -> Moves:
        sums = []
        for piece in place.pieces(0, place.i, chunk):
            own = place.outgoing(0, piece)
            sources = (own if i == place.i else place.crossed(i, piece) for i in range(len(place.here)))
            sums.append(Reduction(tuple(sources), place.output(piece)))
        return Moves(reductions=tuple(sums))


# Sums over nodes


class EncodeSums(CodedLeg):
    """This node's sums of the other nodes' blocks."""

    def size(self, cut: Cut) -> float:
        num_nodes = len(cut.traffic.nodes)
        return cut.over_rails(cut.size) / cut.chunks * (num_nodes - 1) / num_nodes

    def moves(self, place: EncodedPlace, tag: int, chunk: int) -> Moves:
        pieces = [(b, piece) for b in place.away for piece in place.pieces(b, place.i, chunk)]
        return Moves(encodes=tuple(Encode(place.partial(b, p), place.outgoing(b, p)) for b, p in pieces))


class DecodeSums(CodedLeg):
    """The owner adds the other nodes' sums to its own node's, which is not rounded. Nodes of different sizes cut its block at
    different places, and a message is decoded as a whole: then one node after the other is added to what is there."""

    def size(self, cut: Cut) -> float:
        return SUM_NODES.size(cut)

    def moves(self, place: EncodedPlace, tag: int, chunk: int) -> Moves:
        own = place.own(chunk)
        others = [[piece for _, piece in place.mine(b, chunk)] for b in place.away]
        if all(len(pieces) == 1 and pieces == own for pieces in others):
            crossed = tuple(place.crossed(b, own[0]) for b in place.away)
            return Moves(reductions=(Reduction((place.partial(place.a, own[0]), *crossed), place.output(own[0])),))
        sums = [Reduction((place.partial(place.a, piece),), place.output(piece)) for piece in own]
        for b, pieces in zip(place.away, others, strict=True):
            for piece in pieces:
                target = place.output(piece)
                sums.append(Reduction((target, place.crossed(b, piece)), target))
        return Moves(reductions=tuple(sums))


# Gathers


class EncodeOwn(CodedLeg):
    """This rank's block, for whoever gets it; and decoded again in its own output, so that all ranks hold the same bits."""

    def size(self, cut: Cut) -> float:
        return cut.block / cut.chunks

    def moves(self, place: EncodedPlace, tag: int, chunk: int) -> Moves:
        own = place.own(chunk)
        sent = [piece for b in place.away for _, piece in place.mine(b, chunk)]
        pieces = {(piece.start, piece.stop): piece for piece in (*own, *sent)}.values()
        encodes = tuple(Encode(place.output(piece, self.source), place.gathered(piece)) for piece in pieces)
        return Moves(encodes=encodes, decodes=tuple(Decode(place.gathered(p), place.output(p)) for p in own))


class CodedRails(ExchangeLeg):
    """Each owner's pieces go to the ranks that handle them on the other nodes."""

    def size(self, cut: Cut) -> float:
        return cut.over_rails(cut.size / cut.chunks) * cut.ratio

    def moves(self, place: EncodedPlace, tag: int, chunk: int) -> Moves:
        return exchanged(
            tag,
            ((k, place.gathered(p)) for b in place.away for k, p in place.mine(b, chunk)),
            ((p.owner, place.coming(p)) for b in place.away for p in place.pieces(b, place.i, chunk)),
        )


class DecodeRails(CodedLeg):
    """Decode what this rank handles of the other nodes' blocks."""

    def size(self, cut: Cut) -> float:
        num_nodes = len(cut.traffic.nodes)
        return cut.over_rails(cut.size / cut.chunks) * (num_nodes - 1) / num_nodes

    def moves(self, place: EncodedPlace, tag: int, chunk: int) -> Moves:
        pieces = [piece for b in place.away for piece in place.pieces(b, place.i, chunk)]
        return Moves(decodes=tuple(Decode(place.coming(p), place.output(p)) for p in pieces))


class SendToAll(_Send):
    """Each owner's block goes to everyone."""

    def moves(self, place: EncodedPlace, tag: int, chunk: int) -> Moves:
        mine = [place.gathered(piece) for piece in place.own(chunk)]
        return exchanged(
            tag,
            ((k, region) for _, k in place.others for region in mine),
            ((k, place.coming(p)) for i, k in place.others for p in place.pieces(0, i, chunk)),
        )


class DecodeAll(CodedLeg):
    """Everyone else's block."""

    def size(self, cut: Cut) -> float:
        n = cut.traffic.group_size
        return cut.size / cut.chunks * (n - 1) / n

    def moves(self, place: EncodedPlace, tag: int, chunk: int) -> Moves:
        pieces = [piece for i, _ in place.others for piece in place.pieces(0, i, chunk)]
        return Moves(decodes=tuple(Decode(place.coming(p), place.output(p)) for p in pieces))


# An all_to_all with any splits: to ranks of the own node as they are, to others encoded; on one node all are encoded


def _far(traffic: Traffic, near: int) -> float:
    """Compute the part of the ranks that gets encoded messages from one whose node holds ``near`` of them."""
    return (traffic.group_size - near) / traffic.group_size if len(traffic.nodes) > 1 else 1.0


class EncodeFar(CodedLeg):
    """Encode what goes to ranks that are far."""

    def size(self, cut: Cut) -> float:
        return cut.size / cut.chunks * _far(cut.traffic, min(cut.traffic.nodes))

    def moves(self, place: ExchangePlace, tag: int, chunk: int) -> Moves:
        return Moves(encodes=tuple(Encode(n, e) for _, n, e in place.coded(Buffer.INPUT, chunk)))


class SendFar(_Send):
    """Encoded messages to, and from, ranks that are far."""

    def moves(self, place: ExchangePlace, tag: int, chunk: int) -> Moves:
        sends = tuple(Message(k, tag, e) for k, _, e in place.coded(Buffer.INPUT, chunk))
        return Moves(sends, tuple(Message(k, tag, e) for k, _, e in place.coded(Buffer.OUTPUT, chunk)))


class DecodeFar(EncodeFar):
    def moves(self, place: ExchangePlace, tag: int, chunk: int) -> Moves:
        return Moves(decodes=tuple(Decode(e, n) for _, n, e in place.coded(Buffer.OUTPUT, chunk)))


class SendNear(ExchangeLeg):
    """Messages to ranks of the own node."""

    is_whole = True

    def size(self, cut: Cut) -> float:
        return cut.size * (1 - _far(cut.traffic, max(cut.traffic.nodes)))

    def moves(self, place: ExchangePlace, tag: int, chunk: int) -> Moves:
        sends = (Message(k, tag, place.whole(Buffer.INPUT, k)) for k in place.near)
        return filled(sends, (Message(k, tag, place.whole(Buffer.OUTPUT, k)) for k in place.near))


class KeepOwn(LocalLeg):
    """Copy what a rank has for itself."""

    is_whole = True

    def size(self, cut: Cut) -> float:
        return cut.block

    def moves(self, place: ExchangePlace, tag: int, chunk: int) -> Moves:
        own = (place.whole(buffer, place.rank) for buffer in (Buffer.INPUT, Buffer.OUTPUT))
        return filled(copies=(Copy(*own),))


_IN, _OUT, _STAGED, _CODED, _ARRIVED = Buffer.INPUT, Buffer.OUTPUT, Buffer.STAGING, Buffer.ENCODED, Buffer.ARRIVED

ENCODE_BLOCKS = EncodeBlocks("encode blocks", Op.ENCODE, Span.GROUP, _IN, _CODED)
SEND_BLOCKS = SendBlocks("send blocks", Op.ALL_TO_ALL, Span.GROUP, _CODED, _ARRIVED, (ENCODE_BLOCKS,))
DECODE_BLOCKS = DecodeBlocks("decode and sum", Op.DECODE, Span.GROUP, _ARRIVED, _OUT, (SEND_BLOCKS,))

ENCODE_SUMS = EncodeSums("encode sums", Op.ENCODE, Span.RAIL, _STAGED, _CODED, (SUM_NODE,))
CROSS = Cross("cross rails", Op.ALL_TO_ALL, Span.RAIL, _CODED, _ARRIVED, (ENCODE_SUMS,))
DECODE_SUMS = DecodeSums("decode and sum nodes", Op.DECODE, Span.RAIL, _ARRIVED, _OUT, (CROSS,))

ENCODE_OWN = EncodeOwn("encode own block", Op.ENCODE, Span.SELF, _IN, _CODED)
ENCODE_SUM = EncodeOwn("encode own sum", Op.ENCODE, Span.SELF, _OUT, _CODED, (DECODE_BLOCKS, DECODE_SUMS))
RAILS = CodedRails("rails", Op.ALL_GATHER, Span.RAIL, _CODED, _ARRIVED, (ENCODE_OWN, ENCODE_SUM))
DECODE_RAILS = DecodeRails("decode", Op.DECODE, Span.RAIL, _ARRIVED, _OUT, (RAILS,))
SPREAD = SpreadSlices("spread in node", Op.ALL_GATHER, Span.NODE, _OUT, _OUT, (DECODE_RAILS,))
SEND_TO_ALL = SendToAll("send to all", Op.ALL_GATHER, Span.GROUP, _CODED, _ARRIVED, (ENCODE_OWN, ENCODE_SUM))
DECODE_ALL = DecodeAll("decode all", Op.DECODE, Span.GROUP, _ARRIVED, _OUT, (SEND_TO_ALL,))

ENCODE_FAR = EncodeFar("encode for others", Op.ENCODE, Span.GROUP, _IN, _CODED)
SEND_FAR = SendFar("send to others", Op.ALL_TO_ALL, Span.GROUP, _CODED, _ARRIVED, (ENCODE_FAR,))
SEND_NEAR = SendNear("send in node", Op.ALL_TO_ALL, Span.NODE, _IN, _OUT)
KEEP_OWN = KeepOwn("keep own", Op.COPY, Span.SELF, _IN, _OUT)
DECODE_FAR = DecodeFar("decode from others", Op.DECODE, Span.GROUP, _ARRIVED, _OUT, (SEND_FAR,))

_SUMS = LegOrder(((ENCODE_SUMS, AHEAD), (CROSS, AHEAD), (SHARE, 0), (DECODE_SUMS, 2 * AHEAD), (SUM_NODE, AHEAD - 1)))
ENCODED_OVER_NODES = {
    "all_gather": LegOrder(((ENCODE_OWN, 0), (RAILS, 0), (DECODE_RAILS, LATE), (SPREAD, LATE))),
    "reduce_scatter": _SUMS,
    "all_reduce": _SUMS + LegOrder(((ENCODE_SUM, 0), (RAILS, 0), (DECODE_RAILS, LATE), (SPREAD, LATE))),
}
_SUMS_OF_ALL = ((ENCODE_BLOCKS, 0), (SEND_BLOCKS, 0), (DECODE_BLOCKS, LATE))
ENCODED_ON_ONE_LEVEL = {
    "all_gather": LegOrder(((ENCODE_OWN, 0), (SEND_TO_ALL, 0), (DECODE_ALL, LATE))),
    "reduce_scatter": LegOrder(_SUMS_OF_ALL),
    "all_reduce": LegOrder((*_SUMS_OF_ALL, (ENCODE_SUM, LATE), (SEND_TO_ALL, LATE)), ((DECODE_ALL, 0),)),
    "all_to_all_v": LegOrder(((ENCODE_FAR, 0), (SEND_FAR, 0), (KEEP_OWN, 0)), ((DECODE_FAR, 0),)),
}
EXCHANGE_OVER_NODES = LegOrder(((ENCODE_FAR, 0), (SEND_FAR, 0), (SEND_NEAR, 0), (KEEP_OWN, 0)), ((DECODE_FAR, 0),))
"""An all_to_all where some of the ranks are on this one's node."""
