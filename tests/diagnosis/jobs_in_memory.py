"""Jobs of ranks that run without processes: programs over several groups, run in any order of their steps, and their logs.

A step blocks as on Gloo: a collective until all members have called it, a message until its other end is posted.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from commlayer.diagnosis.call_logs import CallLog, GroupLog, MessageCount, RankLog, Site, ThreadLog, WaitLog

__all__ = ["KINDS", "Groups", "Job", "Op", "Program", "legal_program", "run"]

THREAD = 7


@dataclass(frozen=True)
class Op:
    """A step of a rank's program: a call (collective, send or recv; ``is_async``: waited for later), or the wait for one.

    ``mark``: names the call among those of its rank; its wait has the same one. ``line``: where in the program it stands.
    ``thread``: of the rank's, by number.
    """

    kind: str
    group: str = ""
    mark: int = -1
    line: int = 0
    is_async: bool = False
    dtype: str = "float32"
    sent: int = 64
    op: str = "SUM"
    root: int = -1
    peer: int = -1
    tag: int = 0
    to: tuple[int, ...] | None = None
    of: tuple[int, ...] | None = None
    thread: int = 0


Groups = dict[str, tuple[int, ...]]
Program = dict[int, list[Op]]


@dataclass
class Rank:
    """A rank at one moment: where in its program it is, and what it has called."""

    program: list[Op]
    at: int = 0
    calls: list[tuple[Op, int]] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    issued: dict[str, int] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    posted: dict[tuple[str, str, int, int], int] = field(default_factory=dict)
    is_in_call: bool = False
    waited_since: int = 0


class Job:
    """A job: ``groups``: members of each; ``program``: the steps of each rank."""

    def __init__(self, groups: Groups, program: Program) -> None:
        self.groups, self.ranks = groups, {rank: Rank(list(ops)) for rank, ops in program.items()}
        self.clock = 0

    def step(self, rank: int) -> bool:
        """Let a rank go on by one step, where it can; a call that blocks takes two: to be made, and to end."""
        here = self.ranks[rank]
        if here.at >= len(here.program):
            return False
        op = here.program[here.at]
        if op.kind == "wait":
            if not here.is_in_call:
                self.clock += 1
                here.is_in_call, here.waited_since = True, self.clock
                return True
            called = next(each for each, _ in here.calls if each.mark == op.mark)
            return self._end(here, rank, called)
        if not here.is_in_call:
            self._issue(here, op)
            here.is_in_call = not op.is_async
            here.at += op.is_async
            return True
        return self._end(here, rank, op)

    def _end(self, here: Rank, rank: int, called: Op) -> bool:
        if not self._is_over(rank, called, here.numbers[called.mark]):
            return False
        here.at, here.is_in_call = here.at + 1, False
        return True

    def _issue(self, here: Rank, op: Op) -> None:
        self.clock += 1
        if op.kind in ("send", "recv"):
            key = op.group, op.kind, op.peer, op.tag
            number = here.posted[key] = here.posted.get(key, 0) + 1
        else:
            number = here.issued[op.group] = here.issued.get(op.group, 0) + 1
        here.numbers[op.mark] = number
        here.calls.append((op, self.clock))

    def _is_over(self, rank: int, op: Op, number: int) -> bool:
        if op.kind in ("send", "recv"):
            other = "recv" if op.kind == "send" else "send"
            return self.ranks[op.peer].posted.get((op.group, other, rank, op.tag), 0) >= number
        return all(self.ranks[member].issued.get(op.group, 0) >= number for member in self.groups[op.group])

    def _settle(self) -> None:
        for rank in self.ranks.values():
            for group, issued in rank.issued.items():
                met = min(self.ranks[member].issued.get(group, 0) for member in self.groups[group])
                rank.done[group] = min(issued, met)

    def log(self, rank: int, reason: str = "signal", gone: dict[int, str] | None = None) -> RankLog:
        """The log of a rank as it is now."""
        self._settle()
        here = self.ranks[rank]
        keys = [key for key, members in self.groups.items() if rank in members]
        waits = []
        if here.is_in_call:
            op = here.program[here.at]
            called = op if op.kind != "wait" else next(each for each, _ in here.calls if each.mark == op.mark)
            if op.kind == "wait" or called.kind in ("send", "recv"):
                waits.append(
                    WaitLog(
                        thread=THREAD,
                        group=keys.index(called.group),
                        kind=called.kind,
                        number=here.numbers[called.mark],
                        peer=called.peer,
                        tag=called.tag,
                        site=Site("train.py", op.line, "step"),
                        since_ns=max(
                            here.waited_since, next(at for each, at in here.calls if each.mark == called.mark)
                        ),
                    )
                )
        calls = [self._call(here, keys, op, at) for op, at in here.calls]
        return RankLog(
            job="simulated",
            rank=rank,
            ranks=tuple(self.ranks),
            reason=reason,
            now_ns=self.clock,
            groups=tuple(
                GroupLog(
                    key=key,
                    name=key,
                    ranks=self.groups[key],
                    issued=here.issued.get(key, 0),
                    done=here.done.get(key, 0),
                    messages=tuple(
                        MessageCount(kind, peer, tag, count)
                        for (group, kind, peer, tag), count in here.posted.items()
                        if group == key
                    ),
                )
                for key in keys
            ),
            calls=tuple(calls),
            waits=tuple(waits),
            threads=(ThreadLog(ident=THREAD, name="MainThread", site=Site("train.py", 999, "load")),),
            gone=gone or {},
        )

    def _call(self, here: Rank, keys: list[str], op: Op, at: int) -> CallLog:
        is_message = op.kind in ("send", "recv")
        number = here.numbers[op.mark]
        state = "done" if not is_message and number <= here.done.get(op.group, 0) else "started"
        return CallLog(
            group=keys.index(op.group),
            number=number,
            kind=op.kind,
            site=Site("train.py", op.line, "step"),
            state=state,
            dtype=op.dtype,
            sent=0 if op.kind == "recv" else op.sent,
            received=0 if op.kind == "send" else op.sent,
            op="" if is_message else op.op,
            root=op.root,
            to=op.to,
            of=op.of,
            peer=op.peer,
            tag=op.tag,
            thread=THREAD,
            is_async=is_message or op.is_async,
            issued_ns=at,
        )


def run(job: Job, random_: random.Random, steps: int | None = None) -> None:
    """Run the ranks in random order, until nobody can go on, or for so many steps."""
    while steps is None or steps > 0:
        ranks = list(job.ranks)
        random_.shuffle(ranks)
        if not any(job.step(rank) for rank in ranks):
            return
        if steps is not None:
            steps -= 1


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")


def legal_program(
    random_: random.Random, num_ranks: int, num_calls: int, num_groups: int = 4
) -> tuple[Groups, Program]:
    """Groups, and programs of which every order of steps ends: one sequence of calls of which each rank makes its own."""
    groups = {"world": tuple(range(num_ranks))}
    for index in range(1, num_groups):
        groups[f"g{index}"] = tuple(sorted(random_.sample(range(num_ranks), random_.randint(2, num_ranks))))
    program: Program = {rank: [] for rank in range(num_ranks)}
    pending: dict[int, list[Op]] = {rank: [] for rank in range(num_ranks)}
    for mark in range(1, num_calls + 1):
        line = mark
        group = random_.choice(list(groups))
        members = groups[group]
        if random_.random() < 0.25:
            sender, receiver = random_.sample(members, 2)
            calls = {
                sender: Op("send", group, mark, line, peer=receiver, tag=line % 2),
                receiver: Op("recv", group, mark, line, peer=sender, tag=line % 2),
            }
        else:
            calls = _collective(random_, random_.choice(KINDS), group, members, mark, line)
        for rank, op in calls.items():
            is_async = random_.random() < 0.3
            program[rank].append(replace(op, is_async=is_async))
            if is_async:
                pending[rank].append(op)
        for rank, waiting in pending.items():
            while waiting and random_.random() < 0.4:
                op = waiting.pop(random_.randrange(len(waiting)))
                program[rank].append(Op("wait", op.group, op.mark, 1000 + op.line))
    for rank, waiting in pending.items():
        program[rank] += [Op("wait", op.group, op.mark, 1000 + op.line) for op in waiting]
    return groups, program


def _collective(
    random_: random.Random, kind: str, group: str, members: tuple[int, ...], mark: int, line: int
) -> dict[int, Op]:
    size = 64 * random_.randint(1, 4)
    root = random_.choice(members) if kind == "broadcast" else -1
    sizes = {(a, b): random_.randint(0, 9) for a in members for b in members}
    calls = {}
    for rank in members:
        op = Op(kind, group, mark, line, sent=size, root=root, op="SUM" if "reduce" in kind else "")
        if kind == "all_to_all":
            to, of = tuple(sizes[rank, other] for other in members), tuple(sizes[other, rank] for other in members)
            op = replace(op, to=to, of=of, sent=sum(to))
        if kind == "barrier":
            op = replace(op, dtype="", sent=0)
        calls[rank] = op
    return calls
