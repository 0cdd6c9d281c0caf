"""Arguments in every form: what plain Gloo takes is taken, with the same bits; what it refuses is refused clearly."""

from __future__ import annotations

import array
import collections
import fractions
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fake_world import FakeVerbs, FakeWorld
from faulty_verbs import FaultyVerbs, wrong_bytes_at
from ranks import start_with
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import _coalescing_manager

from commlayer.backend.exchanges import _whole_numbers
from commlayer.profiles.errors import CommlayerError, TensorError, UsageError
from commlayer.testing.payload import expect_bits
from commlayer.testing.plugin import ClusterFactory
from commlayer.transport.call_memory import as_bytes

SIZE = 4
BEYOND = {
    "dtype": "Gloo moves nine dtypes and reduces eight",
    "complex": "torch.distributed shows complex tensors as pairs in most verbs, but not in gather, nor on the group itself",
    "AVG of integers": "Gloo averages floats",
    "layout": "Gloo refuses what is not contiguous, or moves the wrong elements of it",
    "unequal": "Gloo's lists are of equal tensors",
    "shape": "Gloo compares shapes of outputs, not numbers of elements",
    "overlap": "Gloo joins coalesced tensors by their strides, which have no meaning in a dimension of one",
    "leaf": "torch's dispatcher refuses to write into some parameters, or views of them",
    "splits": "a tensor or an iterator of integers",
    "generator": "pybind11 uses one up before it finds the form of the call that is meant",
}
"""The arguments that are taken beyond Gloo, and why Gloo does not take it. All else is refused on both or on neither."""
MOVED = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.int16,
    torch.uint16,
    torch.float8_e4m3fn,
    torch.complex128,
]
GLOO_MOVES = {*MOVED[:9], torch.complex64, torch.complex128}  # torch.distributed shows complex ones to it as pairs
REDUCED = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int32,
    torch.uint8,
    torch.int64,
    torch.complex64,
    torch.bool,
    torch.int16,
]
GLOO_REDUCES = {torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.int64}
OPS = ["SUM", "SUM", "MAX", "MIN", "PRODUCT", "AVG", "BAND", "BOR", "BXOR"]
SHAPES: list[tuple[int, ...]] = [
    (1,),
    (1, 1),
    (),
    (0,),
    (0, 3),
    (3,),
    (4, 1),
    (1, 4),
    (2, 3),
    (1, 1, 2),
    (40, 5),
    (3, 0),
]


class Draw:
    """Choices of one case: ``shared`` ones are the same on all ranks, ``own`` ones this rank's."""

    def __init__(self, seed: str, rank: int, *, is_straight: bool = False) -> None:
        """``is_straight``: every tensor contiguous, as torch makes it."""
        self.rank, self.is_straight = rank, is_straight
        self.shared, self.own = random.Random(seed), random.Random(f"{seed} {rank}")
        self.own_layouts = random.Random(f"{seed} {rank} layouts")
        self.beyond: set[str] = set()
        self.is_contiguous = False
        self.log: list[str] = []

    def one_of(self, options: Sequence[Any], weights: Sequence[int] | None = None) -> Any:
        found = self.shared.choices(options, weights)[0]
        self.log.append(getattr(found, "__name__", str(found)))
        return found

    def moved_dtype(self, *, is_spelt_out: bool = False) -> torch.dtype:
        dtype: torch.dtype = self.one_of(MOVED)
        if dtype not in GLOO_MOVES:
            self.beyond.add("dtype")
        elif is_spelt_out and dtype.is_complex:
            self.beyond.add("complex")
        return dtype

    def reduced_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.one_of(REDUCED)
        if dtype not in GLOO_REDUCES:
            self.beyond.add("dtype")
        return dtype

    def op(self, dtype: torch.dtype) -> Any:
        name = self.one_of(OPS)
        if name == "AVG" and not dtype.is_floating_point:
            self.beyond.add("AVG of integers")
        return getattr(dist.ReduceOp, name)

    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.one_of(SHAPES)
        return shape

    def numbers(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Small whole numbers, of which every order of a reduction gives the same bits; other ones on every rank."""
        count = torch.Size(shape).numel()
        values = torch.tensor([self.own.randint(0, 4) for _ in range(count)], dtype=torch.float64).reshape(tuple(shape))
        return values.to(torch.float32).to(dtype) if dtype is not torch.complex128 else values.to(dtype)

    def laid_out(self, x: torch.Tensor, is_input: bool = True) -> torch.Tensor:
        """``x`` as some program would have it."""
        way = self.shared.choices(["plain", "odd", "parameter", "strided"], [4, 6, 1, 0 if self.is_contiguous else 1])[
            0
        ]
        self.log.append(way)
        if self.is_straight:
            return x.clone()
        if way == "odd":
            return odd(x, self.own_layouts)
        if way == "strided":
            self.beyond.add("layout")  # on all ranks alike, also where there is one element
            wide = torch.zeros((*x.shape, 2), dtype=x.dtype)[..., 0]
            wide.copy_(x)
            return wide
        if way == "parameter" and is_input and x.is_floating_point() and x.dtype.itemsize > 1:
            self.beyond.add("leaf")
            return torch.nn.Parameter(x.clone())
        return x.clone()

    def given(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.laid_out(self.numbers(shape, dtype))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.laid_out(torch.zeros(tuple(shape), dtype=dtype), is_input=False)

    def number(self, value: int, *, is_spelt_out: bool = False) -> Any:
        """A rank or tag, as some program would say it. torch.distributed looks ranks up, and finds no tensor."""
        return self.one_of([*NUMBERS, torch.tensor] if is_spelt_out else NUMBERS)(value)

    def tensors(self, made: list[Any]) -> Any:
        return self.one_of(HOLDERS)(made)


def odd(x: torch.Tensor, own: random.Random) -> torch.Tensor:
    """``x`` with other strides where they mean nothing, somewhere in a larger memory: contiguous all the same."""
    strides = list(torch.empty(x.shape).stride())
    for dim, length in enumerate(x.shape):
        if length == 1 or x.numel() < 2:
            strides[dim] = own.randint(0, 9)
    start = own.randint(0, 3)
    memory = torch.zeros(start + x.numel() + 1, dtype=x.dtype)
    made = memory.as_strided(x.shape, strides, start)
    made.copy_(x)
    assert made.is_contiguous()
    return made


def whole(x: int) -> int:
    return x


NUMBERS: list[Callable[[int], Any]] = [whole, np.int64, np.int32, np.uint8]


class Counts(collections.UserList[Any]):
    """A sequence that is no list."""


def generated(made: Iterable[Any]) -> Any:
    return (each for each in made)


HOLDERS: list[Callable[[list[Any]], Any]] = [list, tuple, collections.deque, generated, Counts]


def bits(x: torch.Tensor) -> bytes:
    copied = x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(copied.view(torch.uint8).tolist()) if copied.numel() else b""


def finish(work: Any) -> None:
    if work is not None:
        work.wait()


Call = Callable[[Draw, Any], list[torch.Tensor]]


def all_reduce(draw: Draw, group: Any) -> list[torch.Tensor]:
    dtype = draw.reduced_dtype()
    x = draw.given(draw.shape(), dtype)
    finish(dist.all_reduce(x, draw.op(dtype), group=group, async_op=draw.one_of([False, True])))
    return [x]


def all_reduce_spelt_out(draw: Draw, group: Any) -> list[torch.Tensor]:
    dtype = draw.reduced_dtype()
    x, op = draw.given(draw.shape(), dtype), draw.op(dtype)
    if draw.one_of([False, True]):
        finish(group.allreduce(x, op))
    else:
        opts = dist.AllreduceOptions()
        opts.reduceOp = op
        finish(group.allreduce(draw.tensors([x]), opts))
    return [x]


def all_reduce_coalesced(draw: Draw, group: Any) -> list[torch.Tensor]:
    dtype = draw.reduced_dtype()
    xs = [draw.given(draw.shape(), dtype) for _ in range(draw.one_of([0, 1, 2, 3], [1, 5, 5, 5]))]
    draw.beyond.add("overlap")
    dist.all_reduce_coalesced(xs, draw.op(dtype), group=group)
    return xs


def all_gather(draw: Draw, group: Any) -> list[torch.Tensor]:
    dtype, shape = draw.moved_dtype(), draw.shape()
    x, outs = draw.given(shape, dtype), [draw.empty(shape, dtype) for _ in range(SIZE)]
    finish(dist.all_gather(outs, x, group=group, async_op=draw.one_of([False, True])))
    return outs


def all_gather_uneven(draw: Draw, group: Any) -> list[torch.Tensor]:
    draw.beyond.add("unequal")
    dtype = draw.moved_dtype()
    shapes = [draw.shape() for _ in range(SIZE)]
    x, outs = draw.given(shapes[draw.rank], dtype), [draw.empty(shape, dtype) for shape in shapes]
    dist.all_gather(outs, x, group=group)
    return outs


def all_gather_spelt_out(draw: Draw, group: Any) -> list[torch.Tensor]:
    dtype, shape = draw.moved_dtype(is_spelt_out=True), draw.shape()
    x, outs = draw.given(shape, dtype), [draw.empty(shape, dtype) for _ in range(SIZE)]
    if draw.one_of([False, True]):
        draw.beyond.add("generator")
        finish(group.allgather(draw.tensors(outs), x))
    else:
        finish(group.allgather(draw.tensors([draw.tensors(outs)]), draw.tensors([x]), AllgatherOptions()))
    return outs


def all_gather_into_tensor(draw: Draw, group: Any) -> list[torch.Tensor]:
    dtype, shape = draw.moved_dtype(), draw.shape()
    form = draw.one_of(["joined", "stacked", "flat"], [2, 1, 1])
    if form == "joined" and shape:
        whole_shape: tuple[int, ...] = (SIZE * shape[0], *shape[1:])
    else:
        whole_shape = (SIZE, *shape) if form == "stacked" else (SIZE * torch.Size(shape).numel(),)
        draw.beyond.add("shape")
    x, out = draw.given(shape, dtype), draw.empty(whole_shape, dtype)
    finish(dist.all_gather_single(out, x, group=group, async_op=draw.one_of([False, True])))
    return [out]


def all_gather_coalesced(draw: Draw, group: Any) -> list[torch.Tensor]:
    dtype, shapes = draw.moved_dtype(), [draw.shape() for _ in range(draw.one_of([1, 2]))]
    xs = [draw.given(shape, dtype) for shape in shapes]
    rows = [[draw.empty(shape, dtype) for shape in shapes] for _ in range(SIZE)]
    dist.all_gather_coalesced(rows, xs, group=group)
    return [x for row in rows for x in row]


def reduce_scatter(draw: Draw, group: Any) -> list[torch.Tensor]:
    dtype, shape = draw.reduced_dtype(), draw.shape()
    out, xs = draw.empty(shape, dtype), [draw.given(shape, dtype) for _ in range(SIZE)]
    finish(dist.reduce_scatter(out, xs, draw.op(dtype), group=group, async_op=draw.one_of([False, True])))
    return [out]


def reduce_scatter_uneven(draw: Draw, group: Any) -> list[torch.Tensor]:
    draw.beyond.add("unequal")
    dtype = draw.reduced_dtype()
    shapes = [draw.shape() for _ in range(SIZE)]
    out, xs = draw.empty(shapes[draw.rank], dtype), [draw.given(shape, dtype) for shape in shapes]
    dist.reduce_scatter(out, xs, draw.op(dtype), group=group)
    return [out]


def reduce_scatter_spelt_out(draw: Draw, group: Any) -> list[torch.Tensor]:
    dtype, shape = draw.reduced_dtype(), draw.shape()
    out, xs = draw.empty(shape, dtype), [draw.given(shape, dtype) for _ in range(SIZE)]
    if draw.one_of([False, True]):
        finish(group.reduce_scatter(out, draw.tensors(xs), draw.op(dtype)))
    else:
        opts = dist.ReduceScatterOptions()
        opts.reduceOp = draw.op(dtype)
        finish(group.reduce_scatter(draw.tensors([out]), draw.tensors([draw.tensors(xs)]), opts))
    return [out]


def reduce_scatter_tensor(draw: Draw, group: Any) -> list[torch.Tensor]:
    dtype, shape = draw.reduced_dtype(), draw.shape()
    shape = shape or (1,)  # Gloo looks for the first dimension of one that has none, and crashes
    out, x = draw.empty(shape, dtype), draw.given((SIZE * shape[0], *shape[1:]), dtype)
    finish(dist.reduce_scatter_single(out, x, draw.op(dtype), group=group, async_op=draw.one_of([False, True])))
    return [out]


def broadcast(draw: Draw, group: Any) -> list[torch.Tensor]:
    x, src = draw.given(draw.shape(), draw.moved_dtype()), draw.shared.randrange(SIZE)
    finish(dist.broadcast(x, draw.number(src), group=group, async_op=draw.one_of([False, True])))
    return [x]


def broadcast_spelt_out(draw: Draw, group: Any) -> list[torch.Tensor]:
    x, src = draw.given(draw.shape(), draw.moved_dtype(is_spelt_out=True)), draw.shared.randrange(SIZE)
    if draw.one_of([False, True]):
        finish(group.broadcast(x, draw.number(src, is_spelt_out=True)))
    else:
        finish(group.broadcast(x, root=draw.number(src, is_spelt_out=True)))
    return [x]


def reduce(draw: Draw, group: Any) -> list[torch.Tensor]:
    dtype, dst = draw.reduced_dtype(), draw.shared.randrange(SIZE)
    x = draw.given(draw.shape(), dtype)
    finish(dist.reduce(x, draw.number(dst), draw.op(dtype), group=group, async_op=draw.one_of([False, True])))
    return [x] if draw.rank == dst else []


def reduce_spelt_out(draw: Draw, group: Any) -> list[torch.Tensor]:
    dtype, dst = draw.reduced_dtype(), draw.shared.randrange(SIZE)
    x = draw.given(draw.shape(), dtype)
    finish(group.reduce(x, draw.number(dst, is_spelt_out=True), draw.op(dtype)))
    return [x] if draw.rank == dst else []


def gather(draw: Draw, group: Any) -> list[torch.Tensor]:
    dtype, shape, dst = draw.moved_dtype(is_spelt_out=True), draw.shape(), draw.shared.randrange(SIZE)
    x, outs = draw.given(shape, dtype), [draw.empty(shape, dtype) for _ in range(SIZE)]
    outs = outs if draw.rank == dst else []
    finish(dist.gather(x, outs or None, draw.number(dst), group=group, async_op=draw.one_of([False, True])))
    return outs


def gather_spelt_out(draw: Draw, group: Any) -> list[torch.Tensor]:
    dtype, shape, dst = draw.moved_dtype(is_spelt_out=True), draw.shape(), draw.shared.randrange(SIZE)
    x, outs = draw.given(shape, dtype), [draw.empty(shape, dtype) for _ in range(SIZE)]
    opts = dist.GatherOptions()
    opts.rootRank = dst
    at_root = draw.tensors([draw.tensors(outs)])
    finish(group.gather(at_root if draw.rank == dst else [], draw.tensors([x]), opts))
    return outs if draw.rank == dst else []


def scatter(draw: Draw, group: Any) -> list[torch.Tensor]:
    dtype, shape, src = draw.moved_dtype(), draw.shape(), draw.shared.randrange(SIZE)
    out, xs = draw.empty(shape, dtype), [draw.given(shape, dtype) for _ in range(SIZE)]
    given = xs if draw.rank == src else None
    finish(dist.scatter(out, given, draw.number(src), group=group, async_op=draw.one_of([False, True])))
    return [out]


def scatter_spelt_out(draw: Draw, group: Any) -> list[torch.Tensor]:
    dtype, shape, src = draw.moved_dtype(is_spelt_out=True), draw.shape(), draw.shared.randrange(SIZE)
    out, xs = draw.empty(shape, dtype), [draw.given(shape, dtype) for _ in range(SIZE)]
    opts = dist.ScatterOptions()
    opts.rootRank = src
    at_root = draw.tensors([draw.tensors(xs)])
    finish(group.scatter(draw.tensors([out]), at_root if draw.rank == src else [], opts))
    return [out]


def all_to_all(draw: Draw, group: Any) -> list[torch.Tensor]:
    dtype = draw.moved_dtype()
    if draw.one_of([True, False]):
        shapes = [[draw.shape()] * SIZE] * SIZE
    else:
        shapes = [[draw.shape() for _ in range(SIZE)] for _ in range(SIZE)]
        draw.beyond.add("unequal")
    xs = [draw.given(shape, dtype) for shape in shapes[draw.rank]]
    outs = [draw.empty(row[draw.rank], dtype) for row in shapes]
    finish(dist.all_to_all(outs, xs, group=group, async_op=draw.one_of([False, True])))
    return outs


SPLITS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "int64": np.array,
    "int32": lambda v: np.array(v, np.int32),
    "uint8": lambda v: np.array(v, np.uint8),
    "strided": lambda v: np.array(v).repeat(2)[::2],
    "objects": lambda v: np.array(v, object),
    "float32": lambda v: np.array(v, np.float32),
    "scalars": lambda v: [np.int64(each) for each in v],
    "tensor scalars": lambda v: [torch.tensor(each) for each in v],
    "float tensor scalars": lambda v: [torch.tensor(float(each)) for each in v],
    "one-element tensors": lambda v: [torch.tensor([each]) for each in v],
    "Size": torch.Size,
    "generator": generated,
    "map": lambda v: map(int, v),
    "deque": collections.deque,
    "array": lambda v: array.array("q", v),
    "bytearray": bytearray,
    "memoryview": lambda v: memoryview(array.array("q", v)),
    "fractions": lambda v: [fractions.Fraction(each) for each in v],
    "UserList": Counts,
    "keys": lambda v: v if len(set(v)) < len(v) else dict.fromkeys(v).keys(),
}
BEYOND_SPLITS: dict[str, Callable[[list[int]], Any]] = {"tensor": torch.tensor, "iterator": iter}
WRONG_SPLITS: dict[str, Callable[[list[int]], Any]] = {
    "float64": lambda v: np.array(v, float),
    "floats": lambda v: [float(each) for each in v],
    "rows": lambda v: np.array([v]),
    "0-dim": lambda v: np.array(v[0]),
    "float tensor": lambda v: torch.tensor(v).float(),
    "strings": lambda v: [str(each) for each in v],
    "string": lambda v: "".join(map(str, v)),
    "bytes": bytes,
    "dict": lambda v: dict.fromkeys(v),
    "None": lambda v: [None for _ in v],
    "one": lambda v: v[0],
    "too many": lambda v: [*v, 0],
    "too few": lambda v: v[:-1] if v[-1] else [*v, 1],
    "too large": lambda v: [v[0] + 1, *v[1:]],
    "negative": lambda v: [v[0] + 1 + v[1], -1, *v[2:]],
    "huge": lambda v: [2**70, *v[1:]],
}


def all_to_all_single(draw: Draw, group: Any) -> list[torch.Tensor]:
    dtype, row = draw.moved_dtype(), draw.one_of([(), (1,), (3,), (1, 1), (2, 1)])
    table = [[draw.shared.randint(0, 3) for _ in range(SIZE)] for _ in range(SIZE)]
    kind = draw.one_of(["taken", "beyond", "wrong"], [8, 1, 2])
    forms = {"taken": SPLITS, "beyond": BEYOND_SPLITS, "wrong": WRONG_SPLITS}[kind]
    sent, received = table[draw.rank], [each[draw.rank] for each in table]
    if kind == "beyond":
        draw.beyond.add("splits")
    x, out = draw.given((sum(sent), *row), dtype), draw.empty((sum(received), *row), dtype)
    first, second = forms[draw.one_of(list(forms))], forms[draw.one_of(list(forms))] if kind != "wrong" else list
    is_async = draw.one_of([False, True])
    finish(dist.all_to_all_single(out, x, second(received), first(sent), group=group, async_op=is_async))
    return [out]


def all_to_all_single_even(draw: Draw, group: Any) -> list[torch.Tensor]:
    dtype, row, rows = draw.moved_dtype(), draw.one_of([(), (1,), (3,)]), draw.one_of([0, 4, 8])
    x, out = draw.given((rows, *row), dtype), draw.empty((rows, *row), dtype)
    empty: list[Any] = [None, [], (), np.array([], np.int64), torch.Size([]), range(0)]
    finish(dist.all_to_all_single(out, x, draw.one_of(empty), draw.one_of(empty), group=group))
    return [out]


def send_and_recv(draw: Draw, group: Any) -> list[torch.Tensor]:
    draw.is_contiguous = True  # what Gloo has sent before it refuses would arrive at the next case
    dtype, shape, tag = draw.moved_dtype(), draw.shape(), draw.number(draw.shared.randrange(5))
    x, out = draw.given(shape, dtype), draw.empty(shape, dtype)
    to, source = draw.number((draw.rank + 1) % SIZE), draw.number((draw.rank - 1) % SIZE)
    if draw.one_of([False, True]) and out.numel():
        source = None
    if draw.rank % 2:
        dist.recv(out, source, group=group, tag=tag)
        dist.send(x, to, group=group, tag=tag)
    else:
        dist.send(x, to, group=group, tag=tag)
        dist.recv(out, source, group=group, tag=tag)
    return [out]


def isend_and_irecv(draw: Draw, group: Any) -> list[torch.Tensor]:
    draw.is_contiguous = True  # what Gloo has sent before it refuses would arrive at the next case
    dtype, shape = draw.moved_dtype(), draw.shape()
    x, out = draw.given(shape, dtype), draw.empty(shape, dtype)
    to, source = (draw.rank + 1) % SIZE, (draw.rank - 1) % SIZE
    if draw.one_of([False, True]):
        works = [dist.isend(x, to, group=group), dist.irecv(out, source, group=group)]
    else:
        ops = [dist.P2POp(dist.isend, x, to, group), dist.P2POp(dist.irecv, out, source, group)]
        works = list(dist.batch_isend_irecv(ops))
    for work in works:
        finish(work)
    return [out]


def coalesced_reductions(draw: Draw, group: Any) -> list[torch.Tensor]:
    dtype = draw.reduced_dtype()
    op = draw.op(dtype)
    xs = [draw.given(draw.shape(), dtype) for _ in range(2)]
    with _coalescing_manager(group):
        for x in xs:
            dist.all_reduce(x, op, group=group)
    return xs


def functional_forms(draw: Draw, group: Any) -> list[torch.Tensor]:
    which = draw.one_of(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
    dtype = draw.reduced_dtype()
    x = draw.given(draw.one_of([(4,), (4, 1), (8, 3), (0,), (4, 1, 1)]), dtype)
    if which == "all_reduce":
        return [functional.wait_tensor(functional.all_reduce(x, "sum", group))]
    if which == "all_gather":
        return [functional.wait_tensor(functional.all_gather_tensor(draw.given((1, 1), dtype), 0, group))]
    if which == "reduce_scatter":
        draw.beyond.add("shape")
        return [functional.wait_tensor(functional.reduce_scatter_tensor(x, "sum", 0, group))]
    if which == "broadcast":
        return [functional.wait_tensor(functional.broadcast(x, draw.shared.randrange(SIZE), group))]
    splits = [x.shape[0] // SIZE] * SIZE
    return [functional.wait_tensor(functional.all_to_all_single(x, splits, splits, group))]


def objects(draw: Draw, group: Any) -> list[torch.Tensor]:
    mine: Any = draw.own.choice([None, "", "text" * 50, {"a": [1, 2]}, np.arange(3), torch.arange(3.0)[::2], ()])
    found: list[Any] = [None] * SIZE
    dist.all_gather_object(found, mine, group=group)
    dst = draw.shared.randrange(SIZE)
    gathered: Any = [None] * SIZE if draw.rank == dst else None
    dist.gather_object(mine, gathered, draw.number(dst), group=group)
    shared = [mine, draw.rank]
    dist.broadcast_object_list(shared, dst, group=group)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, found if draw.rank == dst else None, dst, group=group)
    text = repr([found, gathered, shared, scattered])
    return [torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)]


VERBS: list[Call] = [
    all_reduce,
    all_reduce_spelt_out,
    all_reduce_coalesced,
    all_gather,
    all_gather_uneven,
    all_gather_spelt_out,
    all_gather_into_tensor,
    all_gather_coalesced,
    reduce_scatter,
    reduce_scatter_uneven,
    reduce_scatter_spelt_out,
    reduce_scatter_tensor,
    broadcast,
    broadcast_spelt_out,
    reduce,
    reduce_spelt_out,
    gather,
    gather_spelt_out,
    scatter,
    scatter_spelt_out,
    all_to_all,
    all_to_all_single,
    all_to_all_single_even,
    send_and_recv,
    isend_and_irecv,
    coalesced_reductions,
    functional_forms,
    objects,
]


Outcome = list[bytes] | Exception


def outcome(call: Call, draw: Draw, group: Any) -> Outcome:
    with torch.inference_mode() if draw.shared.random() < 0.1 else nullcontext():
        try:
            return [bits(x) for x in call(draw, group)]
        except Exception as error:  # noqa: BLE001  to be compared
            return error


def difference(call: Call, seed: str, rank: int, ours: Any, gloo: Any) -> tuple[str, str]:
    """How one case went ("taken", "beyond" or "refused"), and what is wrong with it, or nothing."""
    draw = Draw(seed, rank)
    theirs, found = outcome(call, Draw(seed, rank), gloo), outcome(call, draw, ours)
    case = f"rank {rank}, {seed}, {draw.log}: "
    if isinstance(found, Exception) and isinstance(theirs, Exception):
        is_clear = isinstance(found, CommlayerError) or without_names(found) == without_names(theirs)
        return "refused", "" if is_clear else f"{case}refused with {found!r}"
    if isinstance(found, Exception):
        return "taken", f"{case}Gloo takes it, and we raise {found!r}"
    if isinstance(theirs, Exception) and not draw.beyond:
        return "beyond", f"{case}Gloo raises {theirs!r}, and we take it"
    how = "beyond" if isinstance(theirs, Exception) else "taken"
    if "layout" in draw.beyond:  # what Gloo makes of it contiguous
        theirs = outcome(call, Draw(seed, rank, is_straight=True), gloo)
    return how, "" if isinstance(theirs, Exception) or found == theirs else f"{case}got {found}, Gloo {theirs}"


def without_names(error: Exception) -> tuple[type, str]:
    """The error that torch.distributed itself raised, before it asked any group."""
    return type(error), re.sub("<.*?>", "", str(error))


CASES = 10
FEW: dict[Call, int] = {objects: 3}  # pickles, slowly


@pytest.mark.cluster
@pytest.mark.parametrize("plan", ["", "hierarchical"])
def test_every_form_that_gloo_takes_is_taken_with_the_same_bits(emulated_cluster: ClusterFactory, plan: str) -> None:
    """The same calls on both backends, of arguments drawn at random: bits, and who is refused, are equal."""
    import torch._dynamo

    def job() -> tuple[collections.Counter[tuple[str, str]], list[str]]:
        torch.set_num_threads(1)
        if plan:
            os.environ["COMMLAYER_PLAN"] = plan
        limit = timedelta(seconds=30)
        dist.init_process_group("commlayer", timeout=limit)
        ours, gloo = (dist.new_group(backend=backend, timeout=limit) for backend in ("commlayer", "gloo"))
        tally: collections.Counter[tuple[str, str]] = collections.Counter()
        wrong: list[str] = []
        for call in VERBS:
            for case in range(FEW.get(call, CASES)):
                how, what = difference(call, f"{call.__name__} {case}", dist.get_rank(), ours, gloo)
                tally[call.__name__, how] += 1
                wrong += [what] if what else []
                if "timed out" in what.lower() or "connection" in what.lower():
                    return tally, wrong  # ranks are not in step any more
        return tally, wrong

    for tally, wrong in emulated_cluster(2, 2).run(job):
        assert not wrong, "\n".join(wrong)
        assert sum(tally.values()) == sum(FEW.get(call, CASES) for call in VERBS)
        taken = {name for (name, how), count in tally.items() if how == "taken" and count >= 3}
        assert taken >= {call.__name__ for call in VERBS} - {"all_gather_uneven"}


def default_group() -> Any:
    """Verbs of the backend's own, torch's annotations lack."""
    return dist.group.WORLD


def mistakes(rank: int, group: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls that no rank can mean, and of which torch.distributed's own checks see nothing."""
    x, four, peer = torch.ones(2), [torch.zeros(2) for _ in range(SIZE)], (rank + 1) % SIZE
    place, sparse = torch.ones(1).expand(8), torch.ones(2).to_sparse()
    yield "no tensors", lambda: group.allreduce([])
    yield "no tensors", lambda: dist.all_reduce_coalesced([], group=group)
    yield "no tensors", lambda: group.broadcast([], dist.BroadcastOptions())
    yield "no tensors", lambda: group.reduce([], dist.ReduceOptions())
    yield "no tensors", lambda: group.reduce_scatter([], [], dist.ReduceScatterOptions())
    yield "no tensors", lambda: group.allgather([four], [], AllgatherOptions())
    yield "no tensors", lambda: group.gather([], [], dist.GatherOptions())
    yield "no tensors", lambda: group.scatter([], [], dist.ScatterOptions())
    yield "4 output tensors, got 0", lambda: dist.all_to_all([], [], group=group)
    yield "4 output tensors, got 3", lambda: dist.all_to_all(four[:3], four, group=group)
    yield "expected a tensor, got a float", lambda: group.allreduce([1.0])
    yield "expected a tensor, got a ndarray", lambda: group.allreduce([np.ones(2)])
    yield "expected a tensor, got a list", lambda: group.broadcast([[1.0]], dist.BroadcastOptions())
    yield "needs one list of 4 tensors", lambda: dist.all_gather(four[:3], x, group=group)
    yield "needs one list of 4 tensors", lambda: dist.all_gather([*four, x], x, group=group)
    yield "needs one list of 4 tensors", lambda: dist.reduce_scatter(x, four[:3], group=group)
    yield "the same dtype in all", lambda: group.allgather([y.double() for y in four], x)
    yield "both must be the same", lambda: group.alltoall_base(torch.zeros(4).int(), torch.ones(4), [], [])
    yield "broadcast from root 4: expected a rank of the group, 0 to 3", lambda: group.broadcast(x, SIZE)
    yield "broadcast from root -1", lambda: group.broadcast(x, -1)
    yield "reduce to root 4", lambda: group.reduce(x, SIZE)
    yield "gather to root 4", lambda: group.gather(four, x, SIZE)
    yield "scatter from root 4", lambda: group.scatter(x, four, SIZE)
    yield "expected a rank of the group", lambda: group.send([x], SIZE, 0)
    yield "send takes one tensor, got 2", lambda: group.send([x, x], peer, 0)
    yield "recv takes one tensor, got 0", lambda: group.recv([], peer, 0)
    yield "recv from any rank takes a tensor with elements", lambda: group.recv_anysource([torch.empty(0)], 0)
    yield "expected a dense tensor", lambda: dist.broadcast(sparse, 0, group=group)
    yield "expected a dense tensor", lambda: dist.all_gather_single(torch.zeros(8), sparse, group=group)
    yield "several elements in one place", lambda: dist.all_reduce(place, group=group)
    yield "several elements in one place", lambda: dist.broadcast(place, 0, group=group)
    yield "several elements in one place", lambda: dist.all_gather_single(place, x, group=group)
    yield "several elements in one place", lambda: group.recv([place], peer, 0)


@pytest.mark.cluster
@pytest.mark.parametrize("plan", ["", "hierarchical"])
def test_mistakes_are_refused_before_anything_is_sent(emulated_cluster: ClusterFactory, plan: str) -> None:
    def job() -> None:
        os.environ.update({"COMMLAYER_PLAN": plan} if plan else {})
        dist.init_process_group("commlayer", timeout=timedelta(seconds=30))
        for text, call in mistakes(dist.get_rank(), default_group()):
            with pytest.raises(UsageError, match=re.escape(text)):
                finish(call())
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.tolist() == [SIZE] * 3

    emulated_cluster(2, 2).run(job)


@pytest.mark.cluster
@pytest.mark.parametrize("plan", ["", "hierarchical"])
def test_splits_come_in_every_form(emulated_cluster: ClusterFactory, plan: str) -> None:
    """Megatron-Core's dispatcher passes numpy arrays, and their truth cannot be asked."""

    def job() -> None:
        os.environ.update({"COMMLAYER_PLAN": plan} if plan else {})
        dist.init_process_group("commlayer", timeout=timedelta(seconds=30))
        rank = dist.get_rank()
        sent, received = [rank + 1, 2, 0, 3], [[1, 2, 3, 4], [2] * 4, [0] * 4, [3] * 4][rank]
        wanted = [10.0 * source + k for source, many in enumerate(received) for k in range(many)]
        x = torch.cat([torch.arange(float(many)) + 10 * rank for many in sent])
        for form in (*SPLITS.values(), *BEYOND_SPLITS.values()):
            out = torch.empty(sum(received))
            dist.all_to_all_single(out, x, form(received), form(sent))
            assert out.tolist() == wanted
            dist.all_to_all_single(out, x, received, form(sent), async_op=True).wait()
            assert out.tolist() == wanted
        for form in WRONG_SPLITS.values():
            for splits in ((form(received), sent), (received, form(sent))):
                with pytest.raises(TensorError, match=rf"rank {rank}.*put_split_sizes must be"):
                    dist.all_to_all_single(torch.empty(sum(received)), x, *splits)

    emulated_cluster(2, 2).run(job)


@pytest.mark.cluster
def test_refused_splits_are_told_to_ranks_that_compare(emulated_cluster: ClusterFactory) -> None:
    def job() -> str:
        os.environ["COMMLAYER_DEBUG"] = "detail"
        start_with(3.0)
        x, splits = torch.ones(2), np.array([1.5, 0.5]) if dist.get_rank() else np.array([1, 1])
        with pytest.raises((TensorError, CommlayerError)) as caught:
            dist.all_to_all_single(torch.empty(2), x, [1, 1], splits)
        if dist.get_rank():  # as long as the other waits
            dist.distributed_c10d._get_default_store().wait(["told"], timedelta(seconds=60))
        else:
            dist.distributed_c10d._get_default_store().set("told", "")
        return str(caught.value)

    waited, refused = emulated_cluster(1, 2).run(job)
    assert "input_split_sizes must be whole numbers" in refused
    assert "rank 1 (its call #1 was refused there: all_to_all: TensorError: " in waited


@pytest.mark.cluster
@pytest.mark.parametrize("plan", ["", "hierarchical"])
def test_an_average_of_parameters(emulated_cluster: ClusterFactory, plan: str) -> None:
    """Gloo divides in place, which autograd forbids; the group was taken for broken then, and its connections were closed."""

    def job() -> None:
        os.environ.update({"COMMLAYER_PLAN": plan} if plan else {})
        dist.init_process_group("commlayer", timeout=timedelta(seconds=30))
        rank = dist.get_rank()
        for is_async in (False, True):
            weight = torch.nn.Parameter(torch.full((3,), float(rank)))
            leaf = torch.full((3,), float(rank), requires_grad=True)
            part = torch.zeros(1, requires_grad=True)
            finish(dist.all_reduce(weight, dist.ReduceOp.AVG, async_op=is_async))
            finish(dist.all_reduce(leaf, dist.ReduceOp.AVG, async_op=is_async))
            assert weight.tolist() == leaf.tolist() == [1.5] * 3
            whole = torch.full((SIZE,), float(rank))
            finish(dist.reduce_scatter_single(part, whole, dist.ReduceOp.AVG, async_op=is_async))
            assert part.item() == 1.5
            finish(dist.reduce(leaf, 0, dist.ReduceOp.AVG, async_op=is_async))
            finish(dist.broadcast(weight, 1, async_op=is_async))
            assert weight.requires_grad
            assert leaf.requires_grad

    emulated_cluster(2, 2).run(job)


ODD = [torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.uint16, torch.int64]


@pytest.mark.cluster
@pytest.mark.parametrize("plan", ["", "hierarchical"])
def test_tensors_of_one_element_have_any_stride(emulated_cluster: ClusterFactory, plan: str) -> None:
    """They are contiguous with every stride, and bytes are to be seen with a stride of one only."""

    def job() -> None:
        os.environ.update({"COMMLAYER_PLAN": plan} if plan else {})
        dist.init_process_group("commlayer", timeout=timedelta(seconds=30))
        rank, group = dist.get_rank(), default_group()
        for dtype in ODD:
            x, outs = thirds(dtype, rank % 2), [thirds(dtype, 0) for _ in range(SIZE)]
            group.allgather([outs], [x]).wait()
            assert [int(out.real) for out in outs] == [0, 1, 0, 1]
            uneven = [thirds(dtype, 0, count) for count in (1, 0, 1, 2)]
            group.allgather([uneven], [thirds(dtype, 1, uneven[rank].numel())]).wait()
            assert [y.real.tolist() for y in uneven] == [[1], [], [1], [1, 1]]
            whole = torch.zeros(SIZE, 1, dtype=dtype).as_strided((SIZE, 1), (1, 7))
            group.all_gather_single(whole, x).wait()
            assert whole.real.flatten().tolist() == [0, 1, 0, 1]
            came = thirds(dtype, 0)
            group.all_to_all_single(
                came,
                x,
                [1 if k == (rank - 1) % SIZE else 0 for k in range(SIZE)],
                [1 if k == (rank + 1) % SIZE else 0 for k in range(SIZE)],
            ).wait()
            assert int(came.real) == (rank - 1) % 2
            group.broadcast(x, root=1).wait()
            assert int(x.real) == 1
            received = thirds(dtype, 0)
            group.start_batch([(thirds(dtype, 1), (rank + 1) % SIZE)], [(received, (rank - 1) % SIZE)]).wait()
            assert int(received.real) == 1
            if "float8" not in str(dtype):
                group.allreduce(x, dist.ReduceOp.SUM).wait()
                assert int(x.real) == (1 if dtype is torch.bool else SIZE)
                group._reduce_scatter_base(x, torch.ones(SIZE, dtype=dtype)).wait()
                assert int(x.real) == (1 if dtype is torch.bool else SIZE)

    emulated_cluster(2, 2).run(job)


def thirds(dtype: torch.dtype, value: int, count: int = 1) -> torch.Tensor:
    """[count] of ``value``, every third of a larger memory; contiguous where there is one element, or none."""
    return torch.full((9,), value).to(dtype)[1::3][:count]


@pytest.mark.parametrize("dtype", ODD)
def test_bytes_of_tensors_with_any_stride(dtype: torch.dtype) -> None:
    own = random.Random(7)
    for shape in [*SHAPES, (1, 0), (1, 1, 1)]:
        for _ in range(5):
            x = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
            made = odd(x, own)
            seen = as_bytes(made)
            assert seen.tolist() == list(bits(x))
            assert seen.stride() == (1,)
            assert seen.data_ptr() == made.data_ptr() or not x.numel()


def test_the_kit_for_communicators_takes_any_stride() -> None:
    """The fake moves such tensors, a fault changes one, and the comparison finds it."""

    def job(verbs: FakeVerbs) -> list[float]:
        x, out = thirds(torch.float32, verbs.rank), torch.zeros(2)
        verbs.all_gather(out, x)
        return out.tolist()

    assert FakeWorld(2).run(job) == [[0, 1], [0, 1]]
    x = thirds(torch.float32, 3)
    liar = FaultyVerbs(FakeWorld(1).ranks[0], wrong_bytes_at(0, "all_reduce"))
    liar.all_reduce(x)
    with pytest.raises(AssertionError, match=r"expected 3.0 \(bytes 00004040\), got 3.0000002"):
        expect_bits(x, torch.tensor([3.0]), 0)


def test_counts_are_whole_numbers() -> None:
    for form in (*SPLITS.values(), *BEYOND_SPLITS.values()):
        found = _whole_numbers(form([3, 0, 1]))
        assert found == [3, 0, 1]
        assert {type(each) for each in found} == {int}
    empties: list[Any] = [None, [], (), np.array([]), torch.tensor([]), range(0)]
    for empty in empties:
        assert _whole_numbers(empty) == []
    assert _whole_numbers(range(1, 4)) == [1, 2, 3]
    assert _whole_numbers(np.array([True, False])) == [1, 0]
    for name in (
        "float64",
        "floats",
        "rows",
        "0-dim",
        "float tensor",
        "strings",
        "string",
        "bytes",
        "dict",
        "None",
        "one",
    ):
        with pytest.raises(TypeError):
            _whole_numbers(WRONG_SPLITS[name]([3, 0, 1]))


@pytest.mark.parametrize("value", [1.5, float("nan")])
def test_numbers_that_gloo_would_cut_are_cut_alike(value: float) -> None:
    """pybind11 asks numpy's floats for their int, which NaN has not."""
    if value == value:
        assert _whole_numbers(np.array([value], np.float32)) == [1]
    else:
        with pytest.raises(ValueError, match="NaN"):
            _whole_numbers(np.array([value], np.float32))
