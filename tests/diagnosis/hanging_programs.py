"""Programs that hang: shapes of training jobs, spoiled in one place, and what has to be said of each.

A program is the steps of every rank, as in :mod:`jobs_in_memory`. So one program is run in memory, for
dumps with the states that NCCL's recorder writes, and by real processes on torch's Gloo, for dumps of
torch's own recorder (:mod:`gloo_recordings`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from jobs_in_memory import Groups, Job, Op, Program, run
from program_shapes import Shape, program_of, shapes

from commlayer.diagnosis.findings import Diagnosis

__all__ = ["AWAY", "Hang", "StrictJob", "Verdict", "hangs", "judged", "seen_in_lines", "stuck"]

AWAY = ("lock", "load", "sync")
"""Steps of a program that are no calls: a lock that nobody gives back, data that does not come, and
``.item()``, which waits for all calls before it."""


@dataclass(frozen=True)
class Hang:
    """A program that hangs.

    ``causes``: the names of causes that are right; ``ranks``: those that have to be named; ``lines``: of
    each of them, the places in the program of which one has to be named. ``unrecorded``: the same three
    for a recorder that notes no messages. ``absent``: ranks without a dump; ``most``: entries of a ring;
    ``stopped``: ranks that are stopped (SIGSTOP) where their program ends.

    ``says``: a text that the cause has to have in it. ``endless``: groups and marks of calls that end on no rank, as
    where the network fails. ``died``: the lines that a job's log has of ranks that died. ``is_on_gloo``:
    whether Gloo can show the hang: there a death ends the others' calls too.
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
    says: str = ""
    endless: frozenset[tuple[str, int]] = frozenset()
    died: dict[int, tuple[str, ...]] = field(default_factory=dict)
    is_on_gloo: bool = True


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
    is_right = cause.what in causes and hang.says in cause.words
    has_ranks = ranks <= set(cause.ranks)
    # Who only waits in a message is innocent, though a recorder without messages sees no more of it.
    return Verdict(
        cause=is_right,
        ranks=has_ranks,
        places=all(named.get(rank) in hang.lines[rank] for rank in with_dump),
        is_false=cause.certainty != "unknown" and not is_at_fault,
        words=f"{cause.what} {','.join(map(str, cause.ranks))} ({cause.certainty})",
    )


_SHOWN_AS = {
    "order": {"skipped", "extra", "steps"},
    "absent": {"elsewhere", "ended", "no dump"},
    "collective": {"skipped", "extra", "steps", "threads"},
    "size": {"skipped", "extra", "steps", "threads", "dtype", "splits", "collective"},
    "stalled": {"dtype", "splits"},
}
"""The names that lines of watchdogs alone may have for causes: they have no call but the one that timed out,
no dtype, and no splits; totals of splits cannot be compared where not all members are known to be there."""


def seen_in_lines(hang: Hang) -> Hang:
    """The same hang as lines of watchdogs alone may name it, and no places."""
    names = {name for name, causes in _SHOWN_AS.items() if causes & hang.causes}
    return replace(hang, causes=hang.causes | names, lines={}, says="")


class StrictJob(Job):
    """A job in which calls that differ do not end, and neither do those of the groups and marks in ``endless``."""

    def __init__(self, groups: Groups, program: Program, endless: frozenset[tuple[str, int]] = frozenset()) -> None:
        super().__init__(groups, program)
        self.endless = endless

    def step(self, rank: int) -> bool:
        here = self.ranks[rank]
        if here.at < len(here.program) and here.program[here.at].kind in AWAY:
            is_over = here.program[here.at].kind == "sync"  # the calls before it have ended
            here.at += is_over
            return is_over
        return super().step(rank)

    def _is_over(self, rank: int, op: Op, number: int) -> bool:
        if (op.group, op.mark) in self.endless:
            return False
        if not super()._is_over(rank, op, number) or op.kind in ("send", "recv"):
            return super()._is_over(rank, op, number)
        if op.kind == "all_to_all":
            return self._has_equal_parts(op, number)
        called = [
            (each.kind, each.dtype, each.sent, each.root)
            for member in self.groups[op.group]
            for each, _ in self.ranks[member].calls
            if each.group == op.group and self.ranks[member].numbers[each.mark] == number
            if each.kind not in ("send", "recv")
        ]
        return len(set(called)) == 1

    def _settle(self) -> None:
        for rank, here in self.ranks.items():
            here.done = dict(here.issued)
            for op, _ in reversed(here.calls):
                number = here.numbers[op.mark]
                if op.kind not in ("send", "recv") and not self._is_over(rank, op, number):
                    here.done[op.group] = number - 1

    def _has_equal_parts(self, op: Op, number: int) -> bool:
        """Whether each rank expects of each other what that one sends."""
        members = self.groups[op.group]
        calls = [
            next(
                each
                for each, _ in self.ranks[member].calls
                if each.group == op.group and self.ranks[member].numbers[each.mark] == number
            )
            for member in members
        ]
        size = range(len(members))
        return all(call.kind == op.kind and call.to and call.of for call in calls) and all(
            calls[a].to[b] == calls[b].of[a]  # type: ignore[index]
            for a in size
            for b in size
        )


def stuck(hang: Hang) -> Job:
    """The job where nobody can go on."""
    job = StrictJob(hang.groups, hang.program, hang.endless)
    run(job, random.Random(1))
    return job


# What is spoiled


_EXTRA_MARK, _THREAD_MARK = 10_000, 20_000
_EVALUATION = Op("all_gather", "world", mark=30_000, line=300, sent=16, op="")
_PAIRED = {"skipped", "extra"}
"""Of two ranks either may be meant: one has left a call out, or the other has made one too many."""


@dataclass
class _Spoiled:
    """A program with a fault. ``causes``: names that are right for it; ``lines``: where its rank may be,
    None: from the place of the fault on; ``more``: other fields of its :class:`Hang`."""

    program: Program
    causes: set[str]
    lines: set[int] | None = None
    more: dict[str, Any] = field(default_factory=dict)


def _spoiled(shape: Shape, fault: str, rank: int) -> _Spoiled | None:
    """The program with a fault of ``rank``; None: it cannot be there."""
    program = program_of(shape)
    ops = program[rank]
    length = len(shape.step(rank))
    at = shape.spoiled_step * length
    last = at + length - 1
    if fault in ("swap", "sync"):
        if ops[last - 1].group == ops[last].group:
            return None
        ops[last - 1], ops[last] = ops[last], ops[last - 1]
        if fault == "sync":  # what comes after it cannot be enqueued
            ops.insert(last, Op("sync", line=620))
        return _Spoiled(program, {"order"})
    if fault == "skip":
        return _without_one(shape, program, rank, at)
    if fault == "extra":
        extra = replace(ops[at], mark=_EXTRA_MARK, line=ops[at].line + 500)
        ops.insert(at, extra)
        return _Spoiled(program, _PAIRED if len(shape.groups[extra.group]) == 2 else {"extra"})
    if fault in ("end", "stop"):
        del ops[at + 1 :]
        return _Spoiled(program, {"absent"} if fault == "end" else {"no dump"})
    if fault in ("lock", "load"):
        line = 600 if fault == "lock" else 610
        ops.insert(at + 1, Op(fault, line=line))
        return _Spoiled(program, {"elsewhere"}, more={"says": f"train.py:{line}"})
    if fault in _DEATHS:
        del ops[at + 1 :]
        says, lines = _DEATHS[fault]
        died = {rank: tuple(each.format(rank=rank) for each in lines)}
        return _Spoiled(program, {"ended"}, more={"says": says, "died": died, "is_on_gloo": False})
    is_message = any(op.kind in ("send", "recv") for op in shape.step(rank))
    if fault in ("ahead", "behind", "network", "threads", "thread"):
        return None if is_message else _by_all(shape, program, fault, rank)
    return _altered(program, ops, at, fault, shape)


def _without_one(shape: Shape, program: Program, rank: int, at: int) -> _Spoiled:
    """The program in which ``rank`` leaves out its call ``at``."""
    ops = program[rank]
    skipped = ops.pop(at)
    causes = {"skipped"}
    if ops[at].group != skipped.group:
        causes.add("order")  # a rank that goes on in another group may come back to the call, for all that is seen
    if [op.group for op in shape.step(rank)].count(skipped.group) == 1:
        causes.add("absent")  # its calls are all alike, and the rank only ends one call early
    return _Spoiled(program, causes | (_PAIRED if len(shape.groups[skipped.group]) == 2 else set()))


_DEATHS: dict[str, tuple[str, tuple[str, ...]]] = {
    "exception": (
        "CUDA out of memory",
        (
            "[rank{rank}]: Traceback (most recent call last):",
            '[rank{rank}]:   File "train.py", line 41, in <module>',
            "[rank{rank}]:     loss = step(batch)",
            '[rank{rank}]:   File "/lib/python3.11/site-packages/torch/nn/modules/module.py", line 7, in forward',
            "[rank{rank}]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        ),
    ),
    "killed": (
        "SIGKILL",
        (
            "Root Cause (first observed failure):",
            "[0]:",
            "  time      : 2026-09-03_05:20:03",
            "  host      : node1",
            "  rank      : {rank} (local_rank: 0)",
            "  exitcode  : -9 (pid: 4242) ",
            "  error_file: <N/A>",
            "  traceback : Signal 9 (SIGKILL) received by PID 4242",
        ),
    ),
}
"""Deaths: what is said of each, and the lines that a job's log has of it."""


def _by_all(shape: Shape, program: Program, fault: str, rank: int) -> _Spoiled:
    """A fault in calls that all ranks make: a whole step too few or too many, a network that fails, threads."""
    length = len(shape.step(rank))
    at = shape.spoiled_step * length
    first = program[rank][at]
    if fault == "network":
        members = shape.groups[first.group]
        endless = frozenset({(first.group, first.mark)})
        more = {
            "endless": endless,
            "is_on_gloo": False,
            "ranks": frozenset(members),
            "lines": {each: frozenset({first.line}) for each in members},
        }
        return _Spoiled(program, {"stalled"}, more=more)
    if fault in ("ahead", "behind"):
        for each in program:
            steps = [shape.step(each) for _ in range(6)]
            if each == rank:
                steps = steps[1:] if fault == "ahead" else [*steps, shape.step(each)]
            evaluated_after = (2, 4) if each != rank else (2, 3) if fault == "ahead" else (2, 5)
            ops = []
            for index, step in enumerate(steps, 1):
                ops += [*step, *([_EVALUATION] if index in evaluated_after else [])]
            program[each] = [replace(op, mark=mark) for mark, op in enumerate(ops)]
        # Over several groups the step shows as an order of them, or as one call of a group that has no more in a step.
        causes = {"steps"} if first.group == "world" else {"steps", "order", "skipped"}
        lines = {_EVALUATION.line} if fault == "ahead" else {op.line for op in shape.step(rank)}
        return _Spoiled(program, causes, lines)
    saved = Op("all_gather", first.group, _THREAD_MARK, 400, sent=16, op="", thread=1)
    for each, ops in program.items():
        one = ops[at]
        two = replace(saved, group=one.group)
        if fault == "threads":  # both threads call at once, and on one rank the other one is first
            ops[at : at + 1] = (
                [replace(two, is_async=True), one] if each == rank else [replace(one, is_async=True), two]
            )
        elif each != rank:
            call = replace(saved, group="world", is_async=True)
            program[each] = [*ops, call, Op("wait", "world", _THREAD_MARK, 410)]
    if fault == "threads":
        return _Spoiled(program, {"threads"}, {400, first.line})
    return _Spoiled(program, {"absent"})


def _altered(program: Program, ops: list[Op], at: int, fault: str, shape: Shape) -> _Spoiled | None:
    call = ops[at]
    is_split = fault in ("splits", "parts")
    if call.kind in ("send", "recv") or (fault == "root") != (call.kind == "broadcast" and fault == "root"):
        return None
    if (call.kind == "all_to_all") != is_split and fault != "kind":
        return None
    size = len(call.to or ())
    step = 16
    changes: dict[str, dict[str, Any]] = {
        "kind": {"kind": "barrier", "dtype": "", "op": "", "sent": 0, "root": -1, "to": None, "of": None},
        "dtype": {"dtype": "int32"},
        "size": {"sent": call.sent * 2},
        "root": {"root": shape.groups[call.group][-1]},
    }
    if is_split and call.to:
        # "splits": more is sent to the last member than it expects; "parts": as much less to the first.
        to = [*call.to[:-1], call.to[-1] + step]
        to[0] -= step if fault == "parts" and size > 1 else 0
        changes[fault] = {"to": tuple(to), "sent": sum(to)}
    ops[at] = replace(call, line=777, **changes[fault])
    cause = {"kind": "collective", "parts": "splits"}.get(fault, fault)
    # Dumps record neither roots nor the parts of an exchange, only how much it sends.
    causes = {cause, "stalled"} if fault in ("root", "parts") else {cause}
    return _Spoiled(program, causes, more={"is_on_gloo": fault != "parts"})


_FAULTS = ("swap", "skip", "extra", "end", "stop", "kind", "dtype", "size")
_LATER_FAULTS = (
    "splits",
    "parts",
    "root",
    "sync",
    "threads",
    "thread",
    "network",
    "ahead",
    "behind",
    "lock",
    "load",
    *_DEATHS,
)


def hangs(most_ranks: int = 8, seed: int = 0) -> Iterator[Hang]:
    """All programs of at most so many ranks. Some leave a dump out, in some rings are short.

    ``seed`` other than 0: programs of other sizes and orders, see :func:`program_shapes.shapes`.
    """
    for index, shape in shapes(most_ranks, seed):
        for turn, fault in enumerate((*_FAULTS, *_LATER_FAULTS)):
            hang = _hang(shape, fault, (index + turn) % shape.num_ranks)
            if hang is not None:
                yield hang
    if most_ranks >= 4 and not seed:
        yield from _circles()


def _hang(shape: Shape, fault: str, rank: int) -> Hang | None:
    spoiled = _spoiled(shape, fault, rank)
    if spoiled is None:
        return None
    program, causes = spoiled.program, spoiled.causes
    job = StrictJob(shape.groups, program, spoiled.more.get("endless", frozenset()))
    run(job, random.Random(1))
    if all(here.at >= len(here.program) for here in job.ranks.values()):
        return None  # this order of calls is as good
    at = shape.spoiled_step * len(shape.step(rank))
    lines = spoiled.lines or {op.line for op in program[rank][at - 1 :]}
    is_message = any(op.kind in ("send", "recv") for op in shape.step(rank))
    if is_message and fault in ("skip", "extra"):
        causes = {*causes, "order"}
    others = [each for each in program if each != rank and each not in _pair(shape, rank)]
    has_absent = fault in ("swap", "kind", "dtype", "sync", "threads", "lock") and len(others) > 2
    is_gone = fault == "stop" or fault in _DEATHS
    fields: dict[str, Any] = {
        "ranks": frozenset({rank}),
        "lines": {} if is_gone else {rank: frozenset(lines)},
        "unrecorded": _without_messages(job) if is_message and fault not in ("lock", "load") else None,
        "absent": (others[-1],) if has_absent and len(others) % 2 else (),
        "most": 12 if fault in ("end", "extra", "lock") else 200,
        "stopped": (rank,) if is_gone else (),
        **spoiled.more,
    }
    return Hang(
        name=f"{shape.name}: {fault} on rank {rank}",
        groups=shape.groups,
        program=program,
        causes=frozenset(causes),
        **fields,
    )


def _pair(shape: Shape, rank: int) -> set[int]:
    """The ranks that are in a group of two with this one."""
    pairs = (ranks for ranks in shape.groups.values() if rank in ranks and len(ranks) == 2)
    return {each for ranks in pairs for each in ranks}


def _without_messages(job: Job) -> tuple[frozenset[str], frozenset[int]]:
    """What can be said without messages: the ranks that are in no collective are waited for, and why cannot be told."""
    away = {
        rank
        for rank, here in job.ranks.items()
        if here.at >= len(here.program) or here.program[here.at].kind in ("send", "recv", *AWAY)
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
