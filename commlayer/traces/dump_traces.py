"""Traces made from dumps of torch's Flight Recorder, for the analysis that our own traces have.

A dump says when the host made a call, by the host's wall clock, and that it has ended. How long it
took is recorded on a device whose events have times (``duration_ms``), from where the rank came to
the call. All ranks of most collectives end together: nobody has the result before the last rank has
come. So the rank whose call took least came last, and the others came earlier by what theirs took
longer; that needs no clock. A call is laid as late as the recorder permits: it ended before it was
seen to have ended, and before the group's next call began.

Rejected: the difference of the times at which beginning and end were discovered, for torch looks
for both at once; and the next call of a thread as the end of the one before it, which may be
asynchronous.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from commlayer.diagnosis.call_logs import GroupLog
from commlayer.diagnosis.dump_groups import DumpGroups, collective_kind, entry_bytes
from commlayer.diagnosis.recorder_dumps import Dump, Entry
from commlayer.profiles.counted import counted, listed
from commlayer.profiles.printable import shortened
from commlayer.traces.call_records import CallRecord
from commlayer.traces.clock import ClockReading, Stamps, clock_offset_ns
from commlayer.traces.rank_files import RankTrace
from commlayer.units import format_us

__all__ = ["DumpTraces", "traces_of_dumps"]

_ENDS_TOGETHER = ("all_gather", "all_reduce", "all_to_all", "barrier", "reduce_scatter")
"""The collectives that no rank leaves before every rank has come."""
_SIZED_BY_OUTPUT = ("all_gather", "gather")
_SIZED_BY_INPUT = ("reduce_scatter", "scatter")
_MOST_BYTES = 1 << 60
_MOST_MS = 1e9
_MOST_NAMED = 8


@dataclass(frozen=True)
class DumpTraces:
    """The traces of a job's ranks. ``host_errors_ns``: by how much each rank's host stamps may be
    off from those of the first rank, as far as that is known; ``is_size_known``: whether a dump
    lists all ranks of the job; ``notes``: the cautions that a reader must know."""

    ranks: list[RankTrace]
    host_errors_ns: dict[int, int]
    is_size_known: bool
    notes: list[str]


@dataclass(slots=True)
class _RankCall:
    """An entry of one rank, and the record that it becomes. ``life``: how often its group had been
    made anew by then, as far as the ring tells; ``nth``: among the entries of its number, of which
    a coalesced call has several."""

    entry: Entry
    record: CallRecord
    life: int
    nth: int

    @property
    def key(self) -> tuple[str, tuple[int, ...], int, int]:
        """The same on all ranks of the call."""
        return self.record.group, self.record.ranks, self.record.sequence, self.nth

    @property
    def duration_ns(self) -> int:
        """The time that it took on the device, 0 where that is not recorded or cannot be."""
        ms = self.entry.duration_ms
        return round(ms * 1e6) if ms is not None and 0 < ms < _MOST_MS and not self.is_too_long else 0

    @property
    def is_too_long(self) -> bool:
        """Whether it is recorded to have taken longer than from when it was made until it was seen
        to have ended."""
        seen_ns, ms = self.entry.time_discovered_completed_ns, self.entry.duration_ms
        return bool(seen_ns and ms is not None and ms * 1e6 > seen_ns - self.entry.time_created_ns)


_Calls = dict[tuple[str, tuple[int, ...], int, int], dict[int, _RankCall]]
"""The ranks' entries of each call, in the order of the numbers of each group."""


def traces_of_dumps(dumps: Sequence[Dump]) -> DumpTraces:
    """Turn dumps, read with all their calls, into traces. Messages are left out.

    Raises:
        UsageError: dumps that contradict each other.
    """
    groups = DumpGroups(dumps)
    by_rank = _calls_by_rank(dumps, groups)
    calls: _Calls = {}
    for each in sorted((each for calls_ in by_rank.values() for each in calls_), key=lambda each: each.key):
        calls.setdefault(each.key, {})[each.record.rank] = each
    # Bounds of what is to be added to the clock of every rank but the first for that of the first: the
    # middle and half the distance, ns; None: they share no call whose end was seen.
    samples: dict[int, list[Stamps]] = {dump.rank: [] for dump in dumps[1:]}
    for shared in calls.values():
        stamps = {
            rank: (each.entry.time_created_ns, each.entry.time_discovered_completed_ns)
            for rank, each in shared.items()
            if each.entry.time_created_ns
            and each.entry.time_discovered_completed_ns
            and each.record.collective in _ENDS_TOGETHER
        }
        of_first = stamps.pop(dumps[0].rank, None)
        if of_first is not None:
            for rank, of_rank in stamps.items():
                samples[rank].append((*of_first, *of_rank))
    bounds = {rank: clock_offset_ns(of_rank) if of_rank else None for rank, of_rank in samples.items()}
    offsets = {rank: _offset_ns(bound) for rank, bound in bounds.items()}
    world_size = max(groups.ranks) + 1
    is_size_known = any(len(ranks) == world_size for each in groups.listed.values() for ranks in each)
    _lay_out(calls, offsets)
    origin_ns = min(
        (each.record.enqueue_ns + offsets.get(rank, 0) for rank, of_rank in by_rank.items() for each in of_rank),
        default=0,
    )
    traces = [
        RankTrace(
            job="",
            rank=dump.rank,
            world_size=world_size,
            host="",
            pid=0,
            versions={},
            readings=(ClockReading(origin_ns, offsets.get(dump.rank, 0), -1, origin_ns),),
            opened_ns=origin_ns - offsets.get(dump.rank, 0),
            closed_ns=max([dump.written_ns, *(each.record.end_ns for each in by_rank[dump.rank])]),
            num_dropped=0,
            calls=tuple(each.record for each in by_rank[dump.rank]),
            marks=(),
        )
        for dump in dumps
    ]
    return DumpTraces(traces, _host_errors_ns(bounds), is_size_known, list(_notes(dumps, groups, calls, bounds)))


def _calls_by_rank(dumps: Sequence[Dump], groups: DumpGroups) -> dict[int, list[_RankCall]]:
    """The collectives of each rank, oldest first, with groups named so that no two have one name
    and the same ranks."""
    groups_of = {
        dump.rank: {name: groups.group(dump, name) for name in {entry.process_group[0] for entry in dump.entries}}
        for dump in dumps
    }
    by_key = {group.key: group for of_rank in groups_of.values() for group in of_rank.values()}
    counts = Counter((group.description, group.ranks) for group in by_key.values())
    words = {}  # for each group: its description, with its name where another one of its ranks has the same
    for key, group in by_key.items():
        is_only = counts[group.description, group.ranks] == 1
        described = group.description if is_only or not group.description else f"{group.description} ({group.name})"
        words[key] = shortened(described or group.name)
    by_rank = {dump.rank: list(_rank_calls(dump, groups_of[dump.rank], words)) for dump in dumps}
    # Of groups that were made anew the names say which of them each one is. A ring that has lost
    # calls has lost the oldest lives of a group, so there they are counted from the newest one.
    with_losses = {dump.rank for dump in dumps if dump.lost}
    lives: dict[tuple[str, tuple[int, ...], str], dict[int, int]] = defaultdict(dict)
    for each in (each for calls in by_rank.values() for each in calls):
        lives[each.record.group, each.record.ranks, each.record.plan][each.record.rank] = each.life + 1
    for rank, each in ((rank, each) for rank, calls in by_rank.items() for each in calls):
        of_ranks = lives[each.record.group, each.record.ranks, each.record.plan]
        num_lives = max(of_ranks.values())
        lost = num_lives - of_ranks[rank] if rank in with_losses else 0
        if num_lives > 1:
            each.record.group += f" ({each.life + lost + 1} of {num_lives})"
    return by_rank


def _rank_calls(dump: Dump, groups: Mapping[str, GroupLog], words: Mapping[str, str]) -> Iterator[_RankCall]:
    """The collectives of a dump, oldest first. A group that is made anew counts its calls from 1
    again; of a group on several backends each one counts its own."""
    latest: Counter[tuple[str, str]] = Counter()
    lives: Counter[tuple[str, str]] = Counter()
    seen: Counter[tuple[str, str, int, int]] = Counter()
    for entry in dump.entries:
        if entry.message is not None:
            continue
        backend, _, name = entry.profiling_name.partition(":")
        kind = collective_kind(name)
        group = groups[entry.process_group[0]]
        # In nccl-tests' sense, 0 where they are not known; of an uneven all_to_all what the rank
        # sent or received, whichever is more.
        sent, received = entry_bytes(entry)
        size = received if kind in _SIZED_BY_OUTPUT else sent if kind in _SIZED_BY_INPUT else max(sent, received)
        record = CallRecord(
            lane="",
            group=words[group.key],
            ranks=group.ranks,
            rank=dump.rank,
            sequence=entry.collective_seq_id,
            collective=kind,
            plan=shortened(backend),
            logical_bytes=size if kind != "barrier" and 0 < size < _MOST_BYTES else 0,
            enqueue_ns=max(entry.time_created_ns, 1),  # 0 is "not yet"
            start_ns=entry.time_created_ns,
            end_ns=-1 if entry.has_ended else 0,
        )
        line = group.name, backend
        lives[line] += entry.collective_seq_id < latest[line]
        latest[line] = entry.collective_seq_id
        call = (*line, lives[line], entry.collective_seq_id)
        yield _RankCall(entry, record, lives[line], seen[call])
        seen[call] += 1


# Clocks


def _offset_ns(bounds: tuple[int, int] | None) -> int:
    """The correction of a clock: none where the bounds permit that the hosts' clocks agree, as they
    are set by NTP far more closely than the recorder looks."""
    if bounds is None:
        return 0
    middle, half = bounds
    return middle if abs(middle) > half else 0


def _host_errors_ns(bounds: Mapping[int, tuple[int, int] | None]) -> dict[int, int]:
    """The most by which each clock can still differ from the first rank's, with its correction."""
    return {rank: abs(bound[0] - _offset_ns(bound)) + bound[1] for rank, bound in bounds.items() if bound is not None}


# Times


def _lay_out(calls: _Calls, offsets: Mapping[int, int]) -> None:
    """Write begin and end into the records of calls whose ranks all recorded how long theirs
    took."""
    latest_ns: dict[tuple[str, tuple[int, ...]], int] = {}
    for (group, ranks, *_), shared in reversed(calls.items()):
        if not all(each.duration_ns and each.record.collective in _ENDS_TOGETHER for each in shared.values()):
            continue
        seen_ns = [
            each.entry.time_discovered_completed_ns + offsets.get(rank, 0)
            for rank, each in shared.items()
            if each.entry.time_discovered_completed_ns
        ]
        if (group, ranks) in latest_ns:
            seen_ns.append(latest_ns[group, ranks])
        least_ns = max(
            each.record.enqueue_ns + offsets.get(rank, 0) + each.duration_ns for rank, each in shared.items()
        )
        end_ns = max(min(seen_ns, default=least_ns), least_ns)
        latest_ns[group, ranks] = end_ns - max(each.duration_ns for each in shared.values())
        for rank, each in shared.items():
            each.record.end_ns = end_ns - offsets.get(rank, 0)
            each.record.start_ns = each.record.end_ns - each.duration_ns


# Notes


def _notes(
    dumps: Sequence[Dump], groups: DumpGroups, calls: _Calls, bounds: Mapping[int, tuple[int, int] | None]
) -> Iterator[str]:
    if lost := [dump.rank for dump in dumps if dump.lost]:
        yield (
            f"the rings of {listed('rank', lost, _MOST_NAMED)} have lost their oldest calls (TORCH_FR_BUFFER_SIZE makes "
            "rings longer): calls are compared from where all ranks have them"
        )
    if groups.assumed:
        yield groups.assumed
    if alone := sum(len(ranks) < 2 for _, ranks, *_ in calls):
        yield f"{counted(alone, 'call')} of groups of one rank, as far as the dumps tell: in no table"
    yield from _notes_on_times({key: shared for key, shared in calls.items() if len(key[1]) > 1})
    if len(dumps) < 2:
        return
    first = dumps[0].rank
    for rank, bound in bounds.items():
        if bound is not None and (offset_ns := _offset_ns(bound)):
            yield (
                f"the clock of rank {rank} differs from that of rank {first} by {format_us(abs(offset_ns) / 1e3)}, "
                f"give or take {format_us(bound[1] / 1e3)}: corrected"
            )
    agreeing = [error for rank, error in _host_errors_ns(bounds).items() if not _offset_ns(bounds[rank])]
    if agreeing:
        worst_us = max(agreeing) / 1e3
        yield f"stamps are of the hosts' wall clocks, which may be apart by {format_us(worst_us)} for all that dumps tell"
    if unknown := [rank for rank, bound in bounds.items() if bound is None]:
        yield (
            f"stamps are of the hosts' wall clocks: nothing tells how far those of {listed('rank', unknown, _MOST_NAMED)} "
            f"are from that of rank {first}, if they are on other hosts"
        )


def _notes_on_times(calls: _Calls) -> Iterator[str]:
    """Say of which calls times are known, and whose lateness is the host's."""
    without: defaultdict[str, int] = defaultdict(int)
    num_rooted = 0
    for shared in calls.values():
        kinds = {each.record.collective for each in shared.values()}
        if not kinds.issubset(_ENDS_TOGETHER):
            num_rooted += 1
        elif any(each.record.end_ns < 0 for each in shared.values()):
            is_on_host = any(each.entry.is_on_host for each in shared.values())
            without["host" if is_on_host else "device"] += 1
    if without["host"]:
        yield (
            f"no time of {counted(without['host'], 'call')} on the host: Gloo's recorder notes when a call is made, and "
            "not when it ends"
        )
    if without["device"]:
        yield (
            f"no time of {counted(without['device'], 'call')} on a device: not all of its ranks recorded how long it took "
            "(TORCH_NCCL_ENABLE_TIMING=1 has them do so)"
        )
    entries = [each.entry for shared in calls.values() for each in shared.values()]
    if unstamped := sum(not entry.time_created_ns for entry in entries):
        yield f"no stamp of {counted(unstamped, 'entry', 'entries')}: without a duration, their ranks are not compared"
    if too_long := sum(each.is_too_long for shared in calls.values() for each in shared.values()):
        yield (
            f"{counted(too_long, 'recorded duration')} not believed: longer than from when the call was made until it was "
            "seen to have ended"
        )
    if num_rooted:
        yield f"no time of {counted(num_rooted, 'call')} with a root, or of a foreign kind: its ranks end one by one"
    if without["device"]:
        yield "where a call has no time, a rank is late by when its host made the call, not by when its device came to it"
