"""Bits: what every plan gives that is run in the memory of one process, and what it sends and needs for that.

Each case is one call by all ranks of a group: a collective, a plan, the nodes, a dtype, an operation. The backward pass of a
collective is a call as well, of the mirrored collective, and so in the same list.
Values are made of whole numbers and powers of two, so that all processors draw the same; their sums round, so that the order of
a sum shows in its bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from fence_cases import Case, Facts
from plans_in_memory import everyones_moves, run_in_memory

from commlayer.profiles.errors import PlanError
from commlayer.profiles.links import Resource
from commlayer.scheduler import Buffer, Gather, Op, Plan, Scaling, Strategy, Traffic, Wire, WireFormat, build
from commlayer.scheduler.call_moves import RankMoves
from commlayer.scheduler.moves import Region
from commlayer.scheduler.plan import Span
from commlayer.scheduler.rails import exchange_over
from commlayer.scheduler.replicated import replicated_moves, staging_bytes
from commlayer.transport.call_memory import reducer
from commlayer.wire.codecs import Codec

__all__ = ["cases", "drawn", "fingerprint"]

Nodes = tuple[tuple[int, ...], ...]
Splits = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
SHAPES = ((2,), (4,), (2, 2), (3, 1), (1, 1, 1), (2, 1, 3), (4, 4), (2, 2, 2, 2))
WAYS = (
    *((Strategy.DIRECT, 1, 1), (Strategy.DIRECT, 3, 1), (Strategy.HIERARCHICAL, 1, 1), (Strategy.LEADERS, 1, 1)),
    *((Strategy.PIPELINED, 2, 1), (Strategy.PIPELINED, 5, 1), (Strategy.PIPELINED, 16, 1), (Strategy.PIPELINED, 2, 3)),
    *((Strategy.RING, 1, 1), (Strategy.RING, 2, 1)),
)
NATIVE = Wire(WireFormat.NATIVE)
WIRES = (
    (Wire(WireFormat.BF16, 16), torch.float32),
    (Wire(WireFormat.INT8, 256, Scaling.BLOCK), torch.float32),
    (Wire(WireFormat.FP8_E4M3, 16), torch.float32),
    (Wire(WireFormat.FP8_E4M3, 256, Scaling.BLOCK), torch.bfloat16),
    (Wire(WireFormat.FP8_E4M3, 16, Scaling.CHANNEL), torch.bfloat16),
    (Wire(WireFormat.FP8_E5M2, 64, power_of_two=True), torch.bfloat16),
)
SUMS = ("all_reduce", "reduce_scatter")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8)
OPERATIONS = (
    (torch.float32, "product"),
    (torch.bfloat16, "product"),
    (torch.float32, "min"),
    (torch.float16, "max"),
    (torch.int32, "bxor"),
)
_HEX = 24
"""Digits of a hash that are kept."""


class Call(NamedTuple):
    """One call by all ranks of a group. ``splits``: of an exchange, the bytes that each rank sends to each, and gets."""

    kind: str
    plan: Plan
    nodes: Nodes
    dtype: torch.dtype
    op: str = "sum"
    root: int = 0
    splits: Splits = ()

    @property
    def key(self) -> str:
        traffic = self.plan.traffic
        words = [
            f"{traffic.collective} of {traffic.logical_bytes} bytes",
            self.plan.name,
            "+".join(map(str, map(len, self.nodes))),
        ]
        words += [str(self.dtype).removeprefix("torch."), self.op if traffic.collective in SUMS else ""]
        words += [f"replicated {traffic.replication}, {self.plan.gather.value}"] if self.kind == "replicated" else []
        words += [f"lane {traffic.lane}"] if traffic.lane else []
        words += [f"rates {traffic.rates}"] if traffic.rates else []
        words += [f"root {self.root}"] if traffic.collective == "broadcast" else []
        words += [f"over {self.plan.steps[0].leg.span.value}"] if self.kind == "over" else []
        wire = self.plan.wire
        words += [] if wire.is_native else [f"rows of {wire.row_elements} scaled by {wire.scaling}"]
        return f"{self.kind}: {' | '.join(filter(None, words))}"


def cases() -> list[Case]:
    """Every case, in a fixed order."""
    calls = [*_over_nodes(), *_exchanges(), *_replicated()]
    return [Case(call.key, partial(_result, call)) for call in calls]


def drawn(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """``count`` values of a dtype, the same on all processors: whole numbers, times powers of two where they are floats."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(0, 100, (count,), generator=generator).to(dtype)
    whole = torch.randint(-(1 << 12), 1 << 12, (count,), generator=generator).double()
    exponents = torch.randint(-14, -7, (count,), generator=generator).double()
    return torch.ldexp(whole, exponents).to(dtype)


def fingerprint(tensors: Sequence[torch.Tensor]) -> str:
    """The first digits of the SHA-256 of the bytes of tensors."""
    digest = hashlib.sha256()
    for each in tensors:
        digest.update(each.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:_HEX]


def _nodes(shape: Sequence[int]) -> Nodes:
    return tuple(tuple(range(start, stop)) for start, stop in pairwise([0, *accumulate(shape)]))


def _traffic(
    collective: str, shape: tuple[int, ...], size: int, wire: Wire, element_bytes: int, **more: Any
) -> Traffic:
    link = Resource.INTER if len(shape) > 1 else Resource.INTRA
    elements = 0 if wire.is_native else element_bytes
    return Traffic(size, sum(shape), 1, link, collective, shape, wires=(wire,), element_bytes=elements, **more)


def _plans(traffic: Traffic, wire: Wire) -> Iterator[Plan]:
    for strategy, chunks, pieces in WAYS:
        with contextlib.suppress(PlanError):  # it does not apply to this traffic
            yield build(traffic, strategy, chunks, wire=wire, pieces=pieces)


def _over_nodes() -> Iterator[Call]:
    for shape in SHAPES:
        for collective in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
            yield from _natively(collective, shape)
            yield from _encoded(collective, shape)


def _natively(collective: str, shape: tuple[int, ...]) -> Iterator[Call]:
    """In the tensor's own bytes."""
    nodes = _nodes(shape)
    root = sum(shape) - 1 if collective == "broadcast" else 0
    for dtype in DTYPES if collective in SUMS else (torch.float32, torch.uint8):
        for traffic in _native_traffics(collective, shape, dtype):
            for plan in _plans(traffic, NATIVE):
                if bool(traffic.slow_pairs) is (plan.strategy is Strategy.RING):
                    yield Call("whole", plan, nodes, dtype, root=root)
    for dtype, op in OPERATIONS if collective in SUMS else ():
        size = sum(shape) * 160 * dtype.itemsize
        for plan in _plans(_traffic(collective, shape, size, NATIVE, dtype.itemsize), NATIVE):
            if plan.strategy is not Strategy.RING:
                yield Call("whole", plan, nodes, dtype, op)


def _native_traffics(collective: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Traffic]:
    """Sizes of whole blocks, and others where the collective allows it; slow pairs of nodes, lanes, and unequal cards."""
    make = partial(_traffic, collective, shape, wire=NATIVE, element_bytes=dtype.itemsize)
    whole, uneven = sum(shape) * 160 * dtype.itemsize, 773 * dtype.itemsize
    for size in (whole, uneven) if collective in ("all_reduce", "broadcast") else (whole,):
        yield make(size=size)
        if len(shape) > 2:
            yield make(size=size, slow_pairs=((0, 1, 0.25),))
    if dtype is torch.float32:
        yield make(size=whole, lane="dp")
        if len(shape) > 1 and collective == "all_reduce":
            yield make(size=whole, rates=(1.0, 0.5, *(1.0,) * (len(shape) - 2)))


def _encoded(collective: str, shape: tuple[int, ...]) -> Iterator[Call]:
    if collective == "broadcast":
        return
    for wire, dtype in WIRES:
        row = wire.row_elements * wire.row_multiple * dtype.itemsize
        for plan in _plans(_traffic(collective, shape, sum(shape) * 2 * row, wire, dtype.itemsize), wire):
            yield Call("encoded", plan, _nodes(shape), dtype)


def _exchanges() -> Iterator[Call]:
    """Exchanges of rows of any numbers: in two levels, over the ranks of a node or a rail, and encoded."""
    for shape in SHAPES:
        n = sum(shape)
        if len(shape) > 1 and max(shape) > 1:
            plan = build(_traffic("all_to_all_v", shape, n * 512, NATIVE, 4), Strategy.HIERARCHICAL)
            for dtype in (torch.float32, torch.uint8):
                yield Call("split", plan, _nodes(shape), dtype, splits=_splits(shape, 64))
        if len(shape) > 1 and len(set(shape)) == 1 and shape[0] > 1:
            for span in (Span.NODE, Span.RAIL):
                yield Call(
                    "over",
                    exchange_over(span, shape, 4096),
                    _nodes(shape),
                    torch.float32,
                    splits=_splits(shape, 64, span),
                )
        for wire, dtype in WIRES:
            row = wire.row_elements * wire.row_multiple * dtype.itemsize
            for plan in _plans(_traffic("all_to_all_v", shape, n * 4 * row, wire, dtype.itemsize), wire):
                yield Call("encoded exchange", plan, _nodes(shape), dtype, splits=_splits(shape, row))


def _splits(shape: Sequence[int], unit: int, span: Span = Span.GROUP) -> Splits:
    """Up to four units for each, and none for some; over a part of the group, none for the others."""
    size = sum(shape)
    node_of = [node for node, width in enumerate(shape) for _ in range(width)]

    def sent(sender: int, receiver: int) -> int:
        is_near = node_of[sender] == node_of[receiver]
        is_on_rail = sender % shape[0] == receiver % shape[0]
        reached = {Span.GROUP: True, Span.NODE: is_near, Span.RAIL: not is_near and is_on_rail}[span]
        return unit * ((3 * sender + 5 * receiver) % 5) if reached or sender == receiver else 0

    ranks = range(size)
    return tuple((tuple(sent(me, k) for k in ranks), tuple(sent(k, me) for k in ranks)) for me in ranks)


def _replicated() -> Iterator[Call]:
    """The all_to_all of tokens that are the same on all ranks of a node."""
    ways = (
        *((Strategy.FLAT, 1), (Strategy.HIERARCHICAL, 1), (Strategy.PIPELINED, 3), (Strategy.PIPELINED, 8)),
        *((Strategy.PIPELINED_COPY, 2), (Strategy.PIPELINED_COPY, 5)),
    )
    for e, t in ((2, 1), (2, 2), (2, 4), (3, 2), (4, 3)):
        for size in (e * 3072, e * 5000):
            for gather in Gather:
                for strategy, chunks in ways:
                    try:
                        plan = build(Traffic(size, e, t, Resource.INTER), strategy, chunks, gather)
                    except PlanError:
                        continue
                    if strategy is not Strategy.FLAT or gather is Gather.WHOLE:
                        yield Call("replicated", plan, _nodes((t,) * e), torch.uint8)


def _result(call: Call) -> Facts:
    """Run the call, and say what came out, how much was sent in how many messages, and what memory it took."""
    moves = _grid_moves(call) if call.kind == "replicated" else _group_moves(call)
    outputs = _run_on_grid(call, moves) if call.kind == "replicated" else _run(call, moves)
    sent = [message.region.size for each in moves for step in each.steps for message in step.sends]
    memory = {buffer.value: sum(each.sizes.get(buffer, 0) for each in moves) for buffer in Buffer}
    return {
        "sha256": fingerprint(outputs),
        "steps": len(call.plan.steps),
        "messages": len(sent),
        "sent": sum(sent),
        "memory": {name: size for name, size in memory.items() if size},
    }


def _group_moves(call: Call) -> list[RankMoves]:
    size = sum(map(len, call.nodes))
    traffic = call.plan.traffic
    blocks = [traffic.logical_bytes // size] * size if traffic.collective in ("all_gather", "reduce_scatter") else None
    return everyones_moves(call.kind, call.plan, call.nodes, root=call.root, blocks=blocks, splits=call.splits)


def _run(call: Call, moves: Sequence[RankMoves]) -> list[torch.Tensor]:
    size, traffic = sum(map(len, call.nodes)), call.plan.traffic
    whole, block = traffic.logical_bytes, traffic.logical_bytes // size
    sent = [block if traffic.collective == "all_gather" else whole] * size
    received = [block if traffic.collective == "reduce_scatter" else whole] * size
    if call.splits:
        sent, received = [sum(out) for out, _ in call.splits], [sum(come) for _, come in call.splits]
    seed = zlib.crc32(call.key.encode())
    buffers = []
    for rank in range(size):
        x = drawn(call.dtype, sent[rank] // call.dtype.itemsize, seed + rank).view(torch.uint8)
        is_in_place = traffic.collective in ("all_reduce", "broadcast")
        output = x if is_in_place else torch.zeros(received[rank], dtype=torch.uint8)
        buffers.append({Buffer.INPUT: x, Buffer.OUTPUT: output})
    wire = call.plan.wire
    coder = None if wire.is_native else Codec(wire, call.dtype, "pass").on_bytes()
    run_in_memory(call.plan, moves, buffers, reducer(call.dtype, call.op), coder)
    return [each[Buffer.OUTPUT] for each in buffers]


def _grid_moves(call: Call) -> list[RankMoves]:
    staging = staging_bytes(call.plan)
    sizes = {Buffer.STAGING: staging} if staging else {}
    places = [(node, place) for node, members in enumerate(call.nodes) for place in range(len(members))]
    return [RankMoves(replicated_moves(call.plan, *place), sizes) for place in places]


def _run_on_grid(call: Call, moves: Sequence[RankMoves]) -> list[torch.Tensor]:
    """Run it on a grid, whose messages name a peer of the column in an all_to_all and of the row in an all_gather."""
    width, size = len(call.nodes[0]), call.plan.traffic.logical_bytes
    inputs = [drawn(call.dtype, size, node) for node in range(len(call.nodes))]
    memory = [
        {
            Buffer.INPUT: inputs[rank // width],
            Buffer.OUTPUT: torch.zeros(size, dtype=torch.uint8),
            Buffer.STAGING: torch.zeros(each.sizes.get(Buffer.STAGING, 0), dtype=torch.uint8),
        }
        for rank, each in enumerate(moves)
    ]

    def part(rank: int, region: Region) -> torch.Tensor:
        return memory[rank][region.buffer][region.start : region.stop]

    for index, step in enumerate(call.plan.steps):

        def peer_of(rank: int, peer: int, is_between: bool = step.op is Op.ALL_TO_ALL) -> int:
            return peer * width + rank % width if is_between else rank // width * width + peer

        posted = {
            (rank, peer_of(rank, message.peer), message.tag): part(rank, message.region).clone()
            for rank, each in enumerate(moves)
            for message in each.steps[index].sends
        }
        for rank, each in enumerate(moves):
            for message in each.steps[index].receives:
                data = posted.pop((peer_of(rank, message.peer), rank, message.tag))
                part(rank, message.region).copy_(data)
            for copy in each.steps[index].copies:
                part(rank, copy.target).copy_(part(rank, copy.source).clone())
        assert not posted, "a message was sent that nobody receives"
    return [mine[Buffer.OUTPUT] for mine in memory]
