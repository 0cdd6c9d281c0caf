"""The diagnosis of a job from dumps of torch's Flight Recorder, of any backend.

Each dump is read as the log of a rank, and the logs are diagnosed as those that our own ranks
write. A dump says less than a log. What it leaves out is taken as follows, and
:attr:`~commlayer.diagnosis.findings.Diagnosis.assumed` says so:

- Gloo's recorder notes when a call was made and when it ended. A thread is taken to wait in its last call, if that
  has not ended: which calls are asynchronous is not recorded. A group's ranks are not recorded either: its members are
  those that recorded calls of it. Messages are not recorded; they count as operations of their group, whose number
  (op_id) then grows faster than that of its collectives. Where they are there, nobody is known to be in no call.
- NCCL's recorder, and those of other devices, note what the host has enqueued. A call that has begun on the device is
  one that the rank has made; one that is only enqueued is held by calls that have begun. Which calls have begun is
  recorded where the job had TORCH_NCCL_ENABLE_TIMING=1. Without it, two readings are tried. The first takes all calls
  that are enqueued as made: what is wrong then is proven. The second takes calls to begin in the order in which they
  were enqueued: what is wrong then is likely.
- A host that has enqueued nothing more is taken to wait for its device.
- A ring that has lost calls, and has none of a group that its dump lists, has lost all calls of it. The rank is taken
  to have made and ended those that others had made before the oldest call in its ring, and no later one.

Rejected: judging each group by itself, as torch's analyzer does: a circle over two groups has
nothing wrong in either.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from commlayer.diagnosis.call_logs import (
    NO_THREAD,
    CallLog,
    GroupLog,
    MessageCount,
    RankLog,
    Site,
    inferred_log,
)
from commlayer.diagnosis.causes import with_cause
from commlayer.diagnosis.diagnosis_words import ranks_words
from commlayer.diagnosis.dump_groups import (
    DumpGroups,
    collective_kind,
    contradicted_lists,
    entry_bytes,
    entry_dtype,
)
from commlayer.diagnosis.evidence_files import named
from commlayer.diagnosis.findings import Cycle, Diagnosis, Mismatch, diagnose
from commlayer.diagnosis.program_ends import ProgramEnd, with_ends
from commlayer.diagnosis.program_stacks import ProgramPlace, with_places
from commlayer.diagnosis.recorder_dumps import Dump, Entry
from commlayer.profiles.counted import counted, listed
from commlayer.profiles.errors import UsageError
from commlayer.profiles.printable import shortened

__all__ = ["diagnose_dumps", "without_contradictions"]

_LONG_WAIT_S = 60.0
_CLOCKS_APART_NS = 5_000_000_000
"""Clocks of machines may differ by so much."""
_MET = ("all_reduce", "all_gather", "reduce_scatter", "barrier")
"""Kinds of calls that end on no rank before all have made them."""
_MOST_LOST = 8


def diagnose_dumps(
    dumps: Sequence[Dump], places: Sequence[ProgramPlace] = (), ends: Sequence[ProgramEnd] = ()
) -> tuple[list[RankLog], Diagnosis]:
    """Return the logs that the dumps of one job amount to, and what is wrong. ``places``: where
    programs are; ``ends``: how some have ended.

    Ranks that wait for each other are told of only where a call is overdue: calls may overlap on a
    device, and be waited for later on a host, so the dumps of a sound job may look like a circle
    for a moment.

    Raises:
        UsageError: dumps that contradict each other.
    """
    groups = DumpGroups(dumps)
    outdated: set[int] = set()
    logs, diagnosis = _read(dumps, groups)
    while old := _outdated(dumps, logs, diagnosis):
        outdated |= old
        dumps = [dump for dump in dumps if dump.rank not in old]
        logs, diagnosis = _read(dumps, groups)
    is_on_device = _is_on_device(dumps)
    # Gloo counts operations of a group by op_id, its collectives by collective_seq_id: the one grows
    # faster than the other where there are messages between collectives, which are not recorded.
    has_messages = False
    for dump in dumps:
        leads: dict[tuple[tuple[str, str], int], int] = {}
        for entry in (entry for entry in dump.entries if entry.is_on_host):
            lead = entry.op_id - entry.collective_seq_id
            has_messages |= lead > leads.get((entry.process_group, entry.pg_id), lead)
            leads[entry.process_group, entry.pg_id] = lead
    left_out = sum(dump.num_left_out for dump in dumps)
    diagnosis = msgspec.structs.replace(
        with_ends(with_places(diagnosis, places), ends),
        assumed=(
            *diagnosis.assumed,
            *([_LEFT_OUT.format(counted(left_out, "call"))] if left_out else []),
            *_assumed(diagnosis, logs, groups, is_on_device=is_on_device),
        ),
    )
    diagnosis = msgspec.structs.replace(
        diagnosis, open=tuple(_open(dumps, diagnosis, outdated, has_messages=has_messages))
    )
    doubts = [] if is_on_device else [_IN_MESSAGE if has_messages else _NO_MESSAGES]
    doubts += [_IN_OWN_GROUP] if left_out else []
    diagnosis = _doubted(diagnosis, dumps, doubts, outdated)
    circles_are = "unknown" if has_messages else "likely"
    return logs, with_cause(diagnosis, logs, circles_are, knows_members=not groups.inferred)


def without_contradictions(dumps: Sequence[Dump], damaged: list[str]) -> list[Dump]:
    """Return the dumps of which each fits the groups that the others list; ``damaged`` takes what
    is wrong with the rest."""
    rest: list[Dump] = []
    sound = list(dumps)
    while len(sound) != len(rest):  # what is left out may have been all that spoke for another one
        rest, sound = sound, []
        wrong_lists = contradicted_lists(rest)
        for dump in rest:
            names = [name for name, ranks in dump.group_ranks.items() if (name, ranks) in wrong_lists]
            if names:
                damaged.append(
                    f"{named(dump.path)}: expected of group {shortened(names[0])} the ranks that the other dumps tell of, got "
                    "others: give the dumps of one job; it is left out"
                )
            else:
                sound.append(dump)
        groups = DumpGroups(sound)
        sound = [dump for dump in sound if _fits(dump, groups, damaged)]
    return sound


def _fits(dump: Dump, groups: DumpGroups, damaged: list[str]) -> bool:
    """Whether the calls of a dump are of groups that have its rank; ``damaged`` takes why not."""
    try:
        _records(dump, groups)
    except UsageError as error:
        damaged.append(f"{error}; it is left out")
        return False
    return True


def _is_on_device(dumps: Sequence[Dump]) -> bool:
    return any(not entry.is_on_host for dump in dumps for entry in dump.entries)


def _read(dumps: Sequence[Dump], groups: DumpGroups) -> tuple[list[RankLog], Diagnosis]:
    """The logs of dumps, in the reading that explains the hang, and what is wrong by it."""
    knows_beginnings = not _is_on_device(dumps) or all(dump.knows_beginnings for dump in dumps if dump.entries)
    logs = [_log(dump, groups, "recorded" if knows_beginnings else "enqueued") for dump in dumps]
    diagnosis = diagnose(logs)
    if not any(log.reason == "timeout" for log in logs):
        mismatches = tuple(each for each in diagnosis.findings if isinstance(each, Mismatch))
        return logs, msgspec.structs.replace(diagnosis, findings=mismatches)
    if not knows_beginnings and not diagnosis.findings:
        in_order = [_log(dump, groups, "in order") for dump in dumps]
        likely = diagnose(in_order)
        if likely.findings:
            assumed = (
                "the dumps do not say which calls have begun on the device (TORCH_NCCL_ENABLE_TIMING=1 has them do so): "
                "a rank's calls are taken to begin in the order in which they were enqueued"
            )
            return in_order, msgspec.structs.replace(likely, assumed=(assumed,))
    return logs, diagnosis


def _outdated(dumps: Sequence[Dump], logs: Sequence[RankLog], diagnosis: Diagnosis) -> set[int]:
    """The ranks whose dumps are of an earlier moment than what they would be blamed for, or of an
    earlier hang.

    Each is known only up to its dump: that a call has not ended on it says nothing where the dump
    of another rank shows that the call has ended since, and that it is in no call says nothing of
    one that had not taken a minute by then.
    """
    refuted = {*_refuted(dumps, logs), *_of_earlier_run(logs)}
    if refuted or diagnosis.findings:
        return refuted
    now_ns = {log.rank: log.now_ns for log in logs}
    old = set()
    for missing in diagnosis.waits:
        rank = missing.call.rank
        made_ns = [now_ns[each.call.rank] - int(each.waited_s * 1e9) for each in missing.waiting]
        if missing.why != "late" or not made_ns:
            continue
        is_earlier = now_ns[rank] + _CLOCKS_APART_NS < max(now_ns[each.call.rank] for each in missing.waiting)
        if is_earlier and now_ns[rank] < min(made_ns) + int(_LONG_WAIT_S * 1e9):
            old.add(rank)
    return old


def _refuted(dumps: Sequence[Dump], logs: Sequence[RankLog]) -> Iterator[int]:
    """The ranks whose next call of a group has ended on another member after their dumps were
    written."""
    ended: dict[str, list[tuple[GroupLog, int, Mapping[int, int]]]] = {}
    for dump, log in zip(dumps, logs, strict=True):
        for group in log.groups:
            if group.done and not group.is_assumed:
                ended_at = {  # by number, where that is recorded
                    entry.collective_seq_id: entry.time_discovered_completed_ns
                    for entry in dump.entries
                    if (entry.process_group[0], entry.message) == (group.name, None)
                    and entry.time_discovered_completed_ns
                }
                ended.setdefault(group.key, []).append((group, log.now_ns, ended_at))
    newest_ns = max((log.now_ns for log in logs), default=0)
    for dump, log in zip(dumps, logs, strict=True):
        if newest_ns <= log.now_ns + _CLOCKS_APART_NS:
            continue
        own = {group.key: group for group in log.groups}
        latest_ns = log.now_ns + _CLOCKS_APART_NS
        for key, others in ended.items():
            if log.rank not in others[0][0].ranks or (own[key].is_assumed if key in own else dump.lost):
                continue
            number = own[key].done + 1 if key in own else 1
            if any(
                number <= group.done and min(now_ns, ended_at.get(number, now_ns)) > latest_ns
                for group, now_ns, ended_at in others
            ):
                yield log.rank
                break


def _of_earlier_run(logs: Sequence[RankLog]) -> Iterator[int]:
    """The ranks on which a call had ended when their dumps were written that another one made after
    that, as the processes of a later run do."""
    made_ns: dict[str, dict[int, int]] = {}
    for log in logs:
        for call in log.calls:
            if call.kind in _MET:
                times = made_ns.setdefault(log.groups[call.group].key, {})
                times[call.number] = max(times.get(call.number, 0), call.issued_ns)
    newest_ns = max((made for times in made_ns.values() for made in times.values()), default=0)
    for log in logs:
        latest_ns = log.now_ns + _CLOCKS_APART_NS
        ended = [group for group in log.groups if not group.is_assumed and newest_ns > latest_ns]
        if any(
            made > latest_ns and number <= group.done
            for group in ended
            for number, made in made_ns.get(group.key, {}).items()
        ):
            yield log.rank


def _assumed(diagnosis: Diagnosis, logs: Sequence[RankLog], groups: DumpGroups, *, is_on_device: bool) -> Iterator[str]:
    """The sentences on what was taken for granted in the reading of dumps."""
    if groups.assumed:
        yield groups.assumed
    if any(isinstance(finding, Cycle) for finding in diagnosis.findings):
        yield (
            "a host that has enqueued nothing more is taken to wait for its device"
            if is_on_device
            else "a thread is taken to wait in its last call: Gloo does not record which calls are asynchronous"
        )
    in_flight = {group.key for log in logs for group in log.groups if group.done < group.issued}
    lost: dict[tuple[str, int], list[int]] = {}
    for rank, group in ((log.rank, group) for log in logs for group in log.groups):
        if group.is_assumed and group.key in in_flight:
            lost.setdefault((str(group), group.issued), []).append(rank)
    for (group_name, number), ranks in list(lost.items())[:_MOST_LOST]:
        yield (
            f"{listed('rank', ranks, 8)} made no call of group {group_name}{f' after #{number}' if number else ''}: the ring "
            "has lost what is older than the calls in it (TORCH_FR_BUFFER_SIZE makes it longer)"
        )


# What the recorders leave out


_IN_MESSAGE = "it may be in a message, which Gloo's recorder leaves out", "unknown"
_NO_MESSAGES = "Gloo's recorder leaves messages out", "likely"
_OLDER = "the one that is here is older than this call"
_IN_OWN_GROUP = "it may be in a call of commlayer's groups, of which torch's recorder sees but some", "unknown"
_LEFT_OUT = (
    "{} of commlayer's own groups are left out, as torch's recorder sees but some: give the calls-*.json of ranks"
)
_ONLY_LATE = "it may only be late: no call has taken as long as its timeout", "likely"


def _open(
    dumps: Sequence[Dump], diagnosis: Diagnosis, outdated: Collection[int], *, has_messages: bool
) -> Iterator[str]:
    """The sentences on what cannot be told: of devices that have begun none of the calls that are
    enqueued, where nothing else is found, of ranks whose dumps are outdated, and where messages are
    not recorded."""
    entries = [entry for dump in dumps for entry in dump.entries]
    held = {
        dump.rank
        for dump in dumps
        for entry in dump.entries
        if not (entry.is_on_host or entry.has_begun) and _is_overdue(entry, dump.written_ns)
    }
    if held and not (diagnosis.findings or diagnosis.waits or diagnosis.under_way):
        yield (
            f"cannot tell what holds up {ranks_words(sorted(held))}: calls are enqueued there, and no device has begun "
            "them within their timeout. Something before them in the stream does not end, which dumps do not record"
        )
    if outdated:
        yield (
            f"cannot tell what {ranks_words(sorted(outdated))} did after the dump, which is older than the others: "
            "give the dumps of one moment"
        )
    is_on_host = bool(entries) and all(entry.is_on_host for entry in entries)
    if has_messages or (is_on_host and all(entry.has_ended for entry in entries)):
        yield (
            "cannot tell who waits in messages: Gloo's recorder leaves them out"
            f"{'' if has_messages else ', and no rank is in a collective'}"
        )


def _doubted(
    diagnosis: Diagnosis, dumps: Sequence[Dump], doubts: Sequence[tuple[str, str]], outdated: Collection[int]
) -> Diagnosis:
    """The diagnosis with reasons why ranks that are in no call may not be at fault.

    ``doubts``: each with the certainty that remains; ``outdated``: ranks whose dumps are too old.
    Where a program is known to be, or known to be in a call, stacks have said more of it than that
    messages are left out.
    """
    waits = []
    written_ns = {dump.rank: dump.written_ns for dump in dumps}
    for missing in diagnosis.waits:
        rank = missing.call.rank
        if missing.why == "silent" and rank in outdated:
            missing = msgspec.structs.replace(missing, doubt=_OLDER)
        is_known = missing.at is not None or missing.certainty == "unknown"
        of_it = [] if is_known else list(doubts)
        # A dump says no more than when it was written.
        if not any(
            _is_overdue(entry, min(dump.written_ns, written_ns.get(rank, dump.written_ns)))
            for dump in dumps
            for entry in dump.entries
        ):
            of_it.append(_ONLY_LATE)
        for doubt in of_it if missing.why == "late" else ():
            missing = missing.doubted(*doubt)
        waits.append(missing)
    return msgspec.structs.replace(diagnosis, waits=tuple(waits))


# Logs


@dataclass(frozen=True)
class _Record:
    """An entry of a dump in its group. ``peer``: the global rank of a message's other end, −1 for
    collectives; ``number``: the call's among its group's, or the message's among those of its
    line."""

    entry: Entry
    group: GroupLog
    peer: int
    number: int

    @property
    def line(self) -> tuple[str, str, int]:
        """The calls that it is numbered with: its group's, or the messages with that peer."""
        return self.group.key, self.entry.message.kind if self.entry.message else "", self.peer


def _records(dump: Dump, groups: DumpGroups) -> list[_Record]:
    """The calls of a dump. Where the ring at either end of a message has lost calls, the messages
    that have not ended are counted alone: they are the newest at both ends."""
    counts: Counter[tuple[str, str, int]] = Counter()
    of_name = {name: groups.group(dump, name) for name in {entry.process_group[0] for entry in dump.entries}}
    records = []
    for entry in dump.entries:
        group = of_name[entry.process_group[0]]
        peer, number = -1, entry.collective_seq_id
        if entry.message is not None:
            if entry.message.peer >= len(group.ranks):
                raise UsageError(
                    f"{named(dump.path)}: expected messages between the {len(group.ranks)} ranks of group "
                    f"{shortened(group.name)}, got {shortened(entry.profiling_name)}"
                )
            peer = sorted(group.ranks)[entry.message.peer]
            if peer in groups.lossy and entry.has_ended:
                continue
            line = group.key, entry.message.kind, peer
            counts[line] += 1
            number = counts[line]
        records.append(_Record(entry, group, peer, number))
    return records


def _log(dump: Dump, groups: DumpGroups, reading: str) -> RankLog:
    """Return the log of the rank of ``dump``. ``reading``: which calls have begun on a device, see
    :func:`_begun`."""
    records = _records(dump, groups)
    own = list({record.group.key: record.group for record in records}.values())
    order = {group.key: place for place, group in enumerate(own)}
    is_on_host = all(record.entry.is_on_host for record in records)
    begun = records if is_on_host else _begun(records, reading)
    # A device's rank has a thread for each call that the device is in, the oldest of each line that
    # has not ended.
    oldest: dict[tuple[str, str, int], int] = {}
    for record in begun:
        if not (is_on_host or record.entry.has_ended):
            oldest.setdefault(record.line, id(record))
    threads = {record: index for index, record in enumerate(oldest.values(), 1)}
    calls = []
    for record in records:
        thread = _thread(record.entry) if is_on_host else threads.get(id(record), NO_THREAD)
        calls.append(_call(record, order[record.group.key], thread, is_on_host=is_on_host))
    group_logs = []
    for group in own:
        of_group = [each for each in begun if each.group is group]
        messages = Counter((each.entry.message.kind, each.peer) for each in of_group if each.entry.message)
        issued = max((each.number for each in of_group if each.entry.message is None), default=0)
        open_ = [each.number for each in of_group if each.entry.message is None and not each.entry.has_ended]
        counts = tuple(MessageCount(kind, peer, 0, count) for (kind, peer), count in messages.items())
        done = min(open_) - 1 if open_ else issued
        group_logs.append(msgspec.structs.replace(group, issued=issued, done=done, messages=counts))
    # A ring that has lost all calls of a group had those that anybody had made before the oldest one
    # in it.
    oldest_ns = min((entry.time_created_ns for entry in dump.entries), default=0)
    recorded = {entry.process_group[0] for entry in dump.entries}
    for name in (name for name in dump.group_ranks if dump.lost and name not in recorded):
        made_at = groups.made_at.get(name, {})
        newest = max((number for number, at_ns in made_at.items() if at_ns <= oldest_ns), default=0)
        lost = groups.group(dump, name)
        group_logs.append(msgspec.structs.replace(lost, issued=newest, done=newest, is_assumed=True))
    now_ns = max([dump.written_ns, *(record.entry.time_created_ns for record in records)])
    return inferred_log(
        rank=dump.rank,
        ranks=groups.ranks,
        reason="timeout" if any(_is_overdue(each.entry, now_ns, _LONG_WAIT_S) for each in records) else "asked",
        now_ns=now_ns,
        groups=group_logs,
        calls=calls,
        is_on_device=not is_on_host,
    )


def _begun(records: Sequence[_Record], reading: str) -> list[_Record]:
    """Return the calls that the rank is taken to have made.

    ``reading``: ``recorded``: those of which the recorder says that they have begun; ``enqueued``:
    all; ``in order``: those that have ended, and the oldest of the others (a message with the
    others of its batch).
    """
    if reading == "enqueued":
        return list(records)
    if reading == "recorded":
        return [record for record in records if record.entry.has_begun]
    oldest = next((record.entry for record in records if not record.entry.has_ended), None)

    def is_with_oldest(entry: Entry) -> bool:
        if oldest is None or oldest.message is None or entry.message is None:
            return entry is oldest
        return (entry.pg_id, entry.p2p_seq_id) == (oldest.pg_id, oldest.p2p_seq_id)

    return [record for record in records if record.entry.has_ended or is_with_oldest(record.entry)]


def _thread(entry: Entry) -> int:
    return int(entry.thread_id) if re.fullmatch(r"[0-9]{1,20}", entry.thread_id) else 0


def _call(record: _Record, place: int, thread: int, *, is_on_host: bool) -> CallLog:
    entry = record.entry
    sent, received = entry_bytes(entry)
    frame = entry.frames[0] if entry.frames else None
    return CallLog(
        group=place,
        number=record.number,
        kind=entry.message.kind if entry.message else collective_kind(entry.profiling_name.partition(":")[2]),
        site=Site("", 0, "") if frame is None else Site(frame.filename, frame.line, frame.name),
        state="done" if entry.has_ended else "started" if entry.has_begun else "issued",
        dtype=entry_dtype(entry)[0],
        sent=sent,
        received=received,
        peer=record.peer,
        thread=thread,
        is_async=not is_on_host,
        issued_ns=entry.time_created_ns,
        made_by=_thread(entry),
    )


def _is_overdue(entry: Entry, now_ns: int, most_s: float = math.inf) -> bool:
    """Whether a call has taken as long as its own timeout (without one, a minute), or
    ``most_s``."""
    limit_s = min(entry.timeout_ms / 1e3 or _LONG_WAIT_S, most_s)
    return not entry.has_ended and now_ns - entry.time_created_ns >= limit_s * 1e9
