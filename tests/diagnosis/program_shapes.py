"""Shapes of training jobs: the groups of their meshes, and the calls that each rank makes in a step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from jobs_in_memory import Groups, Op, Program

__all__ = ["Shape", "program_of", "shapes", "slow_jobs"]

_STEPS = 3


@dataclass(frozen=True)
class Shape:
    """A job: ``groups``, and the calls that a rank makes in each of ``steps`` steps; in ``spoiled_step``
    a fault is put."""

    name: str
    groups: Groups
    step: Callable[[int], list[Op]]
    steps: int = _STEPS
    spoiled_step: int = 1

    @property
    def num_ranks(self) -> int:
        return len(self.groups["world"])


def _mesh(num_ranks: int, inner: str, outer: str, width: int) -> Groups:
    """``width`` neighbours as ``inner``, and ranks of one place among their neighbours as ``outer``."""
    rows = {f"{inner}{rank}": tuple(range(rank, rank + width)) for rank in range(0, num_ranks, width)}
    columns = {f"{outer}{rank}": tuple(range(rank, num_ranks, width)) for rank in range(width)}
    return {"world": tuple(range(num_ranks)), **rows, **columns}


def _ddp(num_ranks: int, width: int) -> Shape:
    return Shape(
        f"ddp {num_ranks}",
        {"world": tuple(range(num_ranks))},
        lambda _: [Op("all_reduce", "world", line=10 + at, sent=64 << at) for at in range(3)],
    )


def _fsdp(num_ranks: int, width: int) -> Shape:
    members = tuple(range(num_ranks))
    size = 8 * num_ranks  # a reduce_scatter's input is a multiple of its ranks
    gathers = [Op("all_gather", "fsdp", line=20 + at, sent=32 << at, op="") for at in range(3)]
    scatters = [Op("reduce_scatter", "fsdp", line=30 + at, sent=max(256, size) << at) for at in range(3)]
    norm = Op("all_reduce", "world", line=40, sent=4)
    return Shape(
        f"fsdp {num_ranks}",
        {"world": members, "fsdp": members},
        lambda _: [*gathers, *scatters, norm],
    )


def _tensor_parallel(num_ranks: int, width: int) -> Shape:
    def step(rank: int) -> list[Op]:
        tp, dp = f"tp{rank // width * width}", f"dp{rank % width}"
        return [
            Op("all_reduce", tp, line=50, sent=64),
            Op("all_gather", tp, line=51, sent=128, op=""),
            Op("all_reduce", dp, line=60, sent=512),
            Op("all_reduce", "world", line=70, sent=4),
        ]

    return Shape(f"tp+dp {num_ranks}", _mesh(num_ranks, "tp", "dp", width), step)


def _experts(num_ranks: int, width: int) -> Shape:
    def exchange(line: int, part: int) -> Op:
        parts = (part,) * width
        return Op("all_to_all", "", line=line, sent=part * width, op="", to=parts, of=parts)

    def step(rank: int) -> list[Op]:
        ep, dp = f"ep{rank // width * width}", f"dp{rank % width}"
        return [
            replace(exchange(80, 32), group=ep),
            replace(exchange(81, 64), group=ep),
            Op("all_reduce", dp, line=90, sent=512),
            Op("barrier", "world", line=95, sent=0, dtype="", op=""),
        ]

    return Shape(f"ep+dp {num_ranks}", _mesh(num_ranks, "ep", "dp", width), step)


def _uneven_experts(num_ranks: int, width: int) -> Shape:
    """Exchange tokens as a router does: the split of each pair of ranks is a number of its own, which both know."""

    def part(sender: int, receiver: int) -> int:
        return 16 + 4 * ((3 * sender + 5 * receiver) % 7)

    def step(rank: int) -> list[Op]:
        members = range(rank // width * width, rank // width * width + width)
        to, of = tuple(part(rank, each) for each in members), tuple(part(each, rank) for each in members)
        ep = f"ep{members[0]}"
        return [
            Op("all_to_all", ep, line=82, sent=sum(to), op="", to=to, of=of),
            Op("all_to_all", ep, line=83, sent=sum(of), op="", to=of, of=to),
            Op("all_reduce", f"dp{rank % width}", line=90, sent=512),
        ]

    return Shape(f"uneven ep+dp {num_ranks}", _mesh(num_ranks, "ep", "dp", width), step)


def _pipeline(num_ranks: int, width: int) -> Shape:
    def step(rank: int) -> list[Op]:
        before, after = rank - 1, rank + 1
        ops = []
        if before >= 0:
            ops.append(Op("recv", "world", line=100, peer=before))
        if after < num_ranks:
            ops += [
                Op("send", "world", line=101, peer=after),
                Op("recv", "world", line=102, peer=after),
            ]
        if before >= 0:
            ops.append(Op("send", "world", line=103, peer=before))
        return [*ops, Op("all_reduce", "world", line=110, sent=4)]

    return Shape(f"pipeline {num_ranks}", {"world": tuple(range(num_ranks))}, step)


def _broadcasts(num_ranks: int, width: int) -> Shape:
    return Shape(
        f"broadcasts {num_ranks}",
        {"world": tuple(range(num_ranks)), "shard": tuple(range(num_ranks))},
        lambda _: [
            Op("broadcast", "world", line=120, sent=128, root=0, op=""),
            Op("all_reduce", "shard", line=121, sent=64),
            Op("broadcast", "world", line=122, sent=256, root=0, op=""),
            Op("all_reduce", "world", line=123, sent=4),
        ],
    )


_FLAT = (_ddp, _fsdp, _broadcasts)
_MESHES = (_tensor_parallel, _experts, _pipeline)


def shapes(most_ranks: int, seed: int = 0) -> Iterator[tuple[int, Shape]]:
    """The shapes of 2 to ``most_ranks`` ranks, each with its place among those of its size.

    ``seed`` other than 0: other sizes, meshes of other widths, calls of a step in another order, and
    other steps are spoiled.
    """
    if not seed:
        for size in (each for each in (2, 4, 8, 16, 32) if each <= most_ranks):
            for index, maker in enumerate((*_FLAT, *(_MESHES if size > 2 else ()))):
                yield index, maker(size, 2)
            yield 6, _uneven_experts(size, 2)
        return
    random_ = random.Random(seed)
    for size in (each for each in (3, 6, 12, 18, 24) if each <= most_ranks):
        width = random_.choice([each for each in (2, 3, 4, 6) if size % each == 0 and each < size] or [size])
        for index, maker in enumerate((*_FLAT, *(_MESHES if size > 3 else ()), _uneven_experts)):
            yield random_.randrange(size), _shuffled(maker(size, width), random_, index)


def _shuffled(shape: Shape, random_: random.Random, index: int) -> Shape:
    """The shape with the calls of its steps in another order, the same on all ranks; messages stay."""
    steps = random_.randint(3, 5)
    spoiled_step = random_.randrange(1, steps - 1)
    order = list(range(len(shape.step(0))))
    if not any(op.kind in ("send", "recv") for op in shape.step(0)):
        random_.shuffle(order)

    def step(rank: int) -> list[Op]:
        ops = shape.step(rank)
        return [ops[at] for at in order] if len(ops) == len(order) else ops

    return replace(shape, step=step, steps=steps, spoiled_step=spoiled_step)


def program_of(shape: Shape) -> Program:
    """The calls of all ranks in all steps, each marked by its place."""
    program: Program = {}
    for rank in range(shape.num_ranks):
        ops = [op for _ in range(shape.steps) for op in shape.step(rank)]
        program[rank] = [replace(op, mark=at) for at, op in enumerate(ops)]
    return program


def slow_jobs(number: int) -> Iterator[tuple[Groups, Program]]:
    """Sound programs, whose ranks may be seen anywhere in them."""
    makers = (*_FLAT, *_MESHES, _uneven_experts)
    for index in range(number):
        shape = makers[index % len(makers)](4 + 4 * (index % 2), 2)
        yield shape.groups, program_of(shape)
