"""Programs that hang: shapes of training jobs, spoiled in one place, and what has to be said of each.

A program is the steps of every rank, as in :mod:`jobs_in_memory`. So one program is run in memory, for
dumps with the states that NCCL's recorder writes, and by real processes on torch's Gloo, for dumps of
torch's own recorder (:mod:`gloo_recordings`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from jobs_in_memory import Groups, Job, Op, Program, run

from commlayer.diagnosis.findings import Diagnosis

__all__ = ["Hang", "StrictJob", "Verdict", "hangs", "judged", "slow_jobs", "stuck"]

_STEPS = 3
_SPOILED_STEP = 1


@dataclass(frozen=True)
class Hang:
    """A program that hangs.

    ``causes``: the names of causes that are right; ``ranks``: those that have to be named; ``lines``: of
    each of them, the places in the program of which one has to be named. ``unrecorded``: the same three
    for a recorder that notes no messages. ``absent``: ranks without a dump; ``most``: entries of a ring;
    ``stopped``: ranks that are stopped (SIGSTOP) where their program ends.
    """

    name: str
    groups: Groups
    program: Program
    causes: frozenset[str]
    ranks: frozenset[int]
    lines: dict[int, frozenset[int]]
    unrecorded: tuple[frozenset[str], frozenset[int]] | None = None
    absent: tuple[int, ...] = ()
    most: int = 200
    stopped: tuple[int, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """A judgement of a diagnosis. ``is_false``: it blames a cause or ranks that are not at fault, and does not
    say that this cannot be told."""

    cause: bool
    ranks: bool
    places: bool
    is_false: bool
    words: str


def judged(hang: Hang, diagnosis: Diagnosis, *, has_messages: bool) -> Verdict:
    """Hold a diagnosis against what is wrong. ``has_messages``: the recorder notes messages."""
    cause = diagnosis.cause
    if cause is None:
        return Verdict(cause=False, ranks=False, places=False, is_false=False, words="nothing")
    causes, ranks = hang.causes, hang.ranks
    is_at_fault = cause.what in causes and ranks <= set(cause.ranks)
    if not has_messages and hang.unrecorded is not None:
        causes, ranks = hang.unrecorded
    named = {call.rank: call.site.line for call in cause.calls if call.site is not None}
    with_dump = [rank for rank in ranks if rank not in hang.absent and rank in hang.lines]
    is_right = cause.what in causes
    has_ranks = ranks <= set(cause.ranks)
    # Who only waits in a message is innocent, though a recorder without messages sees no more of it.
    return Verdict(
        cause=is_right,
        ranks=has_ranks,
        places=all(named.get(rank) in hang.lines[rank] for rank in with_dump),
        is_false=cause.certainty != "unknown" and not is_at_fault,
        words=f"{cause.what} {','.join(map(str, cause.ranks))} ({cause.certainty})",
    )


class StrictJob(Job):
    """A job in which calls that differ do not end."""

    def _is_over(self, rank: int, op: Op, number: int) -> bool:
        if not super()._is_over(rank, op, number) or op.kind in ("send", "recv"):
            return super()._is_over(rank, op, number)
        called = [
            (each.kind, each.dtype, each.sent)
            for member in self.groups[op.group]
            for each, _ in self.ranks[member].calls
            if each.group == op.group and self.ranks[member].numbers[each.mark] == number
            if each.kind not in ("send", "recv")
        ]
        return len(set(called)) == 1


def stuck(hang: Hang) -> Job:
    """The job where nobody can go on."""
    job = StrictJob(hang.groups, hang.program)
    run(job, random.Random(1))
    return job


# Shapes of jobs: groups by the dimension of a mesh that they are of, and the calls of one step


@dataclass(frozen=True)
class _Shape:
    """A job: ``groups``, and the calls that a rank makes in each step."""

    name: str
    groups: Groups
    step: Callable[[int], list[Op]]

    @property
    def num_ranks(self) -> int:
        return len(self.groups["world"])


def _mesh(num_ranks: int, inner: str, outer: str) -> Groups:
    """Pairs of neighbours as ``inner``, and ranks of one place in their pair as ``outer``."""
    pairs = {f"{inner}{rank}": (rank, rank + 1) for rank in range(0, num_ranks, 2)}
    columns = {f"{outer}{rank}": tuple(range(rank, num_ranks, 2)) for rank in (0, 1)}
    return {"world": tuple(range(num_ranks)), **pairs, **columns}


def _ddp(num_ranks: int) -> _Shape:
    return _Shape(
        f"ddp {num_ranks}",
        {"world": tuple(range(num_ranks))},
        lambda _: [Op("all_reduce", "world", line=10 + at, sent=64 << at) for at in range(3)],
    )


def _fsdp(num_ranks: int) -> _Shape:
    members = tuple(range(num_ranks))
    gathers = [Op("all_gather", "fsdp", line=20 + at, sent=32 << at, op="") for at in range(3)]
    scatters = [Op("reduce_scatter", "fsdp", line=30 + at, sent=256 << at) for at in range(3)]
    norm = Op("all_reduce", "world", line=40, sent=4)
    return _Shape(
        f"fsdp {num_ranks}",
        {"world": members, "fsdp": members},
        lambda _: [*gathers, *scatters, norm],
    )


def _tensor_parallel(num_ranks: int) -> _Shape:
    def step(rank: int) -> list[Op]:
        tp, dp = f"tp{rank // 2 * 2}", f"dp{rank % 2}"
        return [
            Op("all_reduce", tp, line=50, sent=64),
            Op("all_gather", tp, line=51, sent=128, op=""),
            Op("all_reduce", dp, line=60, sent=512),
            Op("all_reduce", "world", line=70, sent=4),
        ]

    return _Shape(f"tp+dp {num_ranks}", _mesh(num_ranks, "tp", "dp"), step)


def _experts(num_ranks: int) -> _Shape:
    def step(rank: int) -> list[Op]:
        ep, dp = f"ep{rank // 2 * 2}", f"dp{rank % 2}"
        exchange = Op("all_to_all", ep, line=80, sent=64, op="", to=(32, 32), of=(32, 32))
        return [
            exchange,
            replace(exchange, line=81, sent=128, to=(64, 64), of=(64, 64)),
            Op("all_reduce", dp, line=90, sent=512),
            Op("barrier", "world", line=95, sent=0, dtype="", op=""),
        ]

    return _Shape(f"ep+dp {num_ranks}", _mesh(num_ranks, "ep", "dp"), step)


def _pipeline(num_ranks: int) -> _Shape:
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

    return _Shape(f"pipeline {num_ranks}", {"world": tuple(range(num_ranks))}, step)


def _broadcasts(num_ranks: int) -> _Shape:
    return _Shape(
        f"broadcasts {num_ranks}",
        {"world": tuple(range(num_ranks)), "shard": tuple(range(num_ranks))},
        lambda _: [
            Op("broadcast", "world", line=120, sent=128, root=0, op=""),
            Op("all_reduce", "shard", line=121, sent=64),
            Op("broadcast", "world", line=122, sent=256, root=0, op=""),
            Op("all_reduce", "world", line=123, sent=4),
        ],
    )


def _program(shape: _Shape) -> Program:
    program: Program = {}
    for rank in range(shape.num_ranks):
        ops = [op for _ in range(_STEPS) for op in shape.step(rank)]
        program[rank] = [replace(op, mark=at) for at, op in enumerate(ops)]
    return program


# What is spoiled


_EXTRA_MARK = 10_000
_PAIRED = {"skipped", "extra"}
"""Of two ranks either may be meant: one has left a call out, or the other has made one too many."""


def _spoiled(shape: _Shape, fault: str, rank: int) -> tuple[Program, set[str]] | None:
    """The program with a fault of ``rank``, and the names of its cause; None: it cannot be there."""
    program = _program(shape)
    ops = program[rank]
    length = len(shape.step(rank))
    at = _SPOILED_STEP * length
    last = at + length - 1
    if fault == "swap":
        if ops[last - 1].group == ops[last].group:
            return None
        ops[last - 1], ops[last] = ops[last], ops[last - 1]
        return program, {"order"}
    if fault == "skip":
        skipped = ops.pop(at)
        # A rank that goes on in another group may come back to the call, for all that is seen.
        causes = {"skipped", "order"} if ops[at].group != skipped.group else {"skipped"}
        return program, causes | (_PAIRED if len(shape.groups[skipped.group]) == 2 else set())
    if fault == "extra":
        extra = replace(ops[at], mark=_EXTRA_MARK, line=ops[at].line + 500)
        ops.insert(at, extra)
        return program, _PAIRED if len(shape.groups[extra.group]) == 2 else {"extra"}
    if fault in ("end", "stop"):
        del ops[at + 1 :]
        return program, {"absent"} if fault == "end" else {"no dump"}
    return _altered(program, ops, at, fault)


def _altered(program: Program, ops: list[Op], at: int, fault: str) -> tuple[Program, set[str]] | None:
    if ops[at].kind in ("send", "recv") or (fault != "kind" and ops[at].kind == "all_to_all"):
        return None
    changes: dict[str, dict[str, Any]] = {
        "kind": {"kind": "barrier", "dtype": "", "op": "", "sent": 0, "root": -1, "to": None},
        "dtype": {"dtype": "int32"},
        "size": {"sent": ops[at].sent * 2},
    }
    ops[at] = replace(ops[at], line=777, **changes[fault])
    return program, {{"kind": "collective"}.get(fault, fault)}


_FAULTS = ("swap", "skip", "extra", "end", "stop", "kind", "dtype", "size")


def hangs(most_ranks: int = 8) -> Iterator[Hang]:
    """All programs of at most so many ranks. Some leave a dump out, in some rings are short."""
    sizes = [size for size in (2, 4, 8, 16, 32) if size <= most_ranks]
    for size in sizes:
        makers = [_ddp, _fsdp, _broadcasts]
        makers += [_tensor_parallel, _experts, _pipeline] if size > 2 else []
        for index, maker in enumerate(makers):
            for turn, fault in enumerate(_FAULTS):
                hang = _hang(maker(size), fault, (index + turn) % size)
                if hang is not None:
                    yield hang
    if most_ranks >= 4:
        yield from _circles()


def _hang(shape: _Shape, fault: str, rank: int) -> Hang | None:
    spoiled = _spoiled(shape, fault, rank)
    if spoiled is None:
        return None
    program, causes = spoiled
    job = StrictJob(shape.groups, program)
    run(job, random.Random(1))
    if all(here.at >= len(here.program) for here in job.ranks.values()):
        return None  # this order of calls is as good
    spoiled_lines = {op.line for op in program[rank][_SPOILED_STEP * len(shape.step(rank)) - 1 :]}
    is_message = any(op.kind in ("send", "recv") for op in shape.step(rank))
    if is_message and fault in ("skip", "extra"):
        causes = {*causes, "order"}
    others = [each for each in program if each != rank and each not in _pair(shape, rank)]
    has_absent = fault in ("swap", "kind", "dtype") and len(others) > 2
    return Hang(
        name=f"{shape.name}: {fault} on rank {rank}",
        groups=shape.groups,
        program=program,
        causes=frozenset(causes),
        ranks=frozenset({rank}),
        lines={} if fault == "stop" else {rank: frozenset(spoiled_lines)},
        unrecorded=_without_messages(job) if is_message else None,
        absent=(others[-1],) if has_absent and len(others) % 2 else (),
        most=12 if fault in ("end", "extra") else 200,
        stopped=(rank,) if fault == "stop" else (),
    )


def _pair(shape: _Shape, rank: int) -> set[int]:
    """The ranks that are in a group of two with this one."""
    pairs = (ranks for ranks in shape.groups.values() if rank in ranks and len(ranks) == 2)
    return {each for ranks in pairs for each in ranks}


def _without_messages(job: Job) -> tuple[frozenset[str], frozenset[int]]:
    """What can be said without messages: the ranks that are in no collective are waited for, and why cannot be told."""
    away = {
        rank
        for rank, here in job.ranks.items()
        if here.at >= len(here.program) or here.program[here.at].kind in ("send", "recv")
    }
    return frozenset({"absent", "no dump"}), frozenset(sorted(away)[:1])


def _circles() -> Iterator[Hang]:
    """Circles over two and three groups, beside ranks that wait behind them."""
    for size in (2, 3):
        pairs = {f"g{at}": (at, (at + 1) % size) for at in range(size)}
        if size == 2:
            pairs = {"g0": (0, 1), "g1": (0, 1)}
        calls = [Op("all_reduce", f"g{at}", mark=at, line=200 + at) for at in range(size)]
        end = Op("all_reduce", "world", mark=9, line=210)
        program = {}
        for rank in range(size):
            before = [replace(call, mark=20 + at) for at, call in enumerate(calls) if rank in pairs[call.group]]
            program[rank] = [*before, calls[rank], calls[rank - 1], end]
        program[size] = [end]
        for absent in ((), (size,)):
            yield Hang(
                name=f"circle over {size} groups{', a dump left out' if absent else ''}",
                groups={"world": tuple(range(size + 1)), **pairs},
                program=program,
                causes=frozenset({"order"}),
                ranks=frozenset(range(size)),
                lines={rank: frozenset({200 + rank}) for rank in range(size)},
                absent=absent,
            )


def slow_jobs(number: int) -> Iterator[tuple[Groups, Program]]:
    """Sound programs, whose ranks may be seen anywhere in them."""
    makers = (_ddp, _fsdp, _tensor_parallel, _experts, _pipeline, _broadcasts)
    for index in range(number):
        shape = makers[index % len(makers)](4 + 4 * (index % 2))
        yield shape.groups, _program(shape)
