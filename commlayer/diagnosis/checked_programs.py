"""Programs checked before they run: each rank's calls and waits, run without time, in the graph of jobs that hang.

A call is issued at once and a wait lasts until all members of its group have issued theirs, so however fast ranks are they come
to rest at the same place: at their ends, or where the graph says who waits for whom. Lanes change nothing in it, because a hold
ends by itself (:mod:`commlayer.scheduler.lanes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from commlayer.diagnosis.call_logs import CallLog, GroupLog, RankLog, Site, ThreadLog, WaitLog
from commlayer.diagnosis.findings import Diagnosis, diagnose
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.programs import Compute, Issue, Item, PlannedCall

__all__ = ["check_programs"]

_THREAD = 1


class _Walker:
    """One rank on its way through its program."""

    def __init__(self, rank: int, program: Sequence[Item], groups: Mapping[str, Sequence[int]]) -> None:
        self.rank, self.program, self.at = rank, program, 0
        self.keys = [key for key, members in groups.items() if rank in members]
        self.issued: dict[str, int] = dict.fromkeys(self.keys, 0)
        self.calls: list[tuple[PlannedCall, int, int]] = []
        self.numbers: dict[PlannedCall, tuple[str, int]] = {}

    def issue(self, call: PlannedCall) -> None:
        key = _group(call)
        if key not in self.issued:
            raise UsageError(f"rank {self.rank} issues {call.name!r} in group {key!r}, of which it is no member")
        self.issued[key] += 1
        self.numbers[call] = key, self.issued[key]
        self.calls.append((call, self.issued[key], self.at))

    def awaited(self, call: PlannedCall) -> tuple[str, int]:
        if call not in self.numbers:
            raise UsageError(f"rank {self.rank} waits for {call.name!r}, which it has not issued")
        return self.numbers[call]

    def site(self, place: int) -> Site:
        item = self.program[place]
        what = item.name if isinstance(item, Compute) else item.call.name
        return Site(f"program of rank {self.rank}", place + 1, f"{type(item).__name__}({what})")


def check_programs(programs: Mapping[int, Sequence[Item]], groups: Mapping[str, Sequence[int]]) -> Diagnosis:
    """Check the programs of ranks against each other: calls that differ, ranks that would wait for each other or in vain.

    Args:
        programs: of each rank; the places in what is found count their items from 1.
        groups: the members of each :attr:`~commlayer.scheduler.programs.PlannedCall.group`; where a call has none its lane is
            the group.

    Raises UsageError for a call in a group of others, a Wait for what was not issued, a member without a program.
    """
    strange = sorted({rank for members in groups.values() for rank in members} - set(programs))
    if strange:
        raise UsageError(f"groups: expected ranks that have a program, got {strange}")
    walkers = {rank: _Walker(rank, program, groups) for rank, program in programs.items()}
    is_moving = True
    while is_moving:
        is_moving = bool(sum(_walk(walker, walkers, groups) for walker in walkers.values()))
    ended = {rank: "its program ends here" for rank, each in walkers.items() if each.at == len(each.program)}
    return diagnose([_log(walker, walkers, groups, ended) for walker in walkers.values()])


def _walk(walker: _Walker, walkers: Mapping[int, _Walker], groups: Mapping[str, Sequence[int]]) -> bool:
    """Go on as far as it goes now. Whether that was any way at all."""
    began = walker.at
    while walker.at < len(walker.program):
        item = walker.program[walker.at]
        if isinstance(item, Issue):
            walker.issue(item.call)
        elif not isinstance(item, Compute):
            key, number = walker.awaited(item.call)
            if _met(key, walkers, groups) < number:
                break
        walker.at += 1
    return walker.at > began


def _met(key: str, walkers: Mapping[int, _Walker], groups: Mapping[str, Sequence[int]]) -> int:
    """How many calls of a group all of its members have issued."""
    return min(walkers[rank].issued[key] for rank in groups[key])


def _log(
    walker: _Walker, walkers: Mapping[int, _Walker], groups: Mapping[str, Sequence[int]], ended: Mapping[int, str]
) -> RankLog:
    waits: tuple[WaitLog, ...] = ()
    if walker.at < len(walker.program):
        item = walker.program[walker.at]
        assert not isinstance(item, Compute)
        key, number = walker.awaited(item.call)
        wait = WaitLog(
            thread=_THREAD,
            group=walker.keys.index(key),
            kind=item.call.plan.traffic.collective,
            number=number,
            site=walker.site(walker.at),
            since_ns=len(walker.program),
        )
        waits = (wait,)
    return RankLog(
        job="",
        rank=walker.rank,
        ranks=tuple(walkers),
        reason="program",
        groups=tuple(
            GroupLog(
                key=key,
                name=key,
                ranks=tuple(groups[key]),
                issued=walker.issued[key],
                done=_met(key, walkers, groups),
            )
            for key in walker.keys
        ),
        calls=tuple(
            CallLog(
                group=walker.keys.index(_group(call)),
                number=number,
                kind=call.plan.traffic.collective,
                site=walker.site(place),
                sent=call.plan.traffic.logical_bytes,
                to=_shares(call, groups),
                of=_shares(call, groups),
                thread=_THREAD,
                is_async=True,
                issued_ns=place,
            )
            for call, number, place in walker.calls
        ),
        waits=waits,
        threads=(ThreadLog(ident=_THREAD, name="program", site=walker.site(min(walker.at, len(walker.program) - 1))),)
        if walker.program
        else (),
        gone=dict(ended),
    )


def _shares(call: PlannedCall, groups: Mapping[str, Sequence[int]]) -> tuple[int, ...] | None:
    """Bytes for each member, of an exchange whose parts are all alike."""
    if call.plan.traffic.collective != "all_to_all":
        return None
    size = len(groups[_group(call)])
    return (call.plan.traffic.logical_bytes // size,) * size


def _group(call: PlannedCall) -> str:
    return call.group or call.lane
