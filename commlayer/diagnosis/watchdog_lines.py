"""Lines of the watchdog of torch's ProcessGroupNCCL, in text logs: which call timed out, and how
far each group had come.

They are read as torch 2.3 to 2.13 writes them (``ProcessGroupNCCL.cpp``), wherever they stand in a
line: launchers put ``[default3]:``, ``3: `` or a time in front. Older lines name no group. The rank
of the job is in torch's own ``[rank3]:``; the one beside a group's name is the place in that group.

Rejected: the numbers that launchers put in front, as ranks: torchrun counts on each machine, and
Slurm counts tasks.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from commlayer.diagnosis.call_logs import Site
from commlayer.diagnosis.recorder_dumps import rank_in_name
from commlayer.profiles.counted import counted
from commlayer.profiles.printable import printable

__all__ = [
    "EITHER",
    "GroupReport",
    "RankReport",
    "TimedOutCall",
    "WatchdogLines",
    "has_watchdog_lines",
    "read_watchdog_lines",
    "watchdog_part",
]

_MARKS = (b"WorkNCCL(", b"last enqueued ", b"Last enqueued ")
_USED = (b"ProcessGroupNCCL", b"WorkNCCL(", b"enqueued ")
_MOST_IN_LINE = 1 << 13
_MOST_IN_FRAME = 1000
_MOST_RANKS = 1 << 17
_FAILURE_GAP_NS = 300 * 10**9
"""The silence of the watchdogs between two failures: a job that was started again numbers its calls
anew. Ranks that time out in one failure do so within a minute or two, and the processes end."""
EITHER = "call"
"""The kind of a call that may be either of two: the lines of two watchdogs lie in each other."""
_NONE_YET = 1 << 62
"""The least number that stands for torch's −1, which some versions write as if it had no sign."""

_LAUNCHED = re.compile(r"\[rank(\d{1,7})\]:\s*\[")
_RAY = re.compile(r"\(([\w.]{1,100}) pid=\d+")
_TIME = re.compile(r"\[[EWIF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9}) ")
_GROUP = re.compile(
    r"\[PG (?:ID (?P<id>\d{1,9}) PG GUID )?(?P<name>[^\s()\]]{1,200})\s?(?:\((?P<description>.{1,200}?)\))? "
    r"Rank (?P<place>\d{1,7})\]"
)
_TIMED_OUT = re.compile(
    r"\[Rank (?P<place>\d{1,7})\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d{1,18}), "
    r"OpType=(?P<kind>\w{1,60})(?:, NumelIn=(?P<sent>\d{1,18}), NumelOut=(?P<expected>\d{1,18}))?, "
    r"Timeout\(ms\)=\d{1,18}\) ran for (?P<ran>\d{1,18}) milliseconds"
)
_STATUS = re.compile(
    r"(?:(?:detected by watchdog at work(?: sequence id)?|Timeout at NCCL work): (?P<work>\d{1,18})\D.{0,20}?|debug info\. )"
    r"[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,20}), "
    r"(?:last started (?:NCCL )?work: (?P<started>-?\d{1,20})(?: \(\w*\))?, )?"
    r"last completed (?:NCCL )?work: (?P<completed>-?\d{1,20})"
)
_STACK = "Stack trace of the failed collective:"
_FRAME = re.compile(r"#(\d{1,4}) (.{1,200}?) from (\S{1,500}):(\d{1,9})\s*$")
_OURS = re.compile(r"WorkNCCL\(|enqueued ")
_REPEATED = re.compile(r"\[repeated (\d{1,9})x across cluster\]")


@dataclass(frozen=True)
class TimedOutCall:
    """A call that timed out. ``kind``: torch's, such as ``ALLTOALL_BASE``, or :data:`EITHER`;
    ``elements``, ``expected``: those sent, and those that come out of it, −1: not known;
    ``issued_ns``, ``noticed_ns``: when it was enqueued, and when the watchdog wrote, in the year
    2000, 0: not known."""

    number: int
    kind: str
    elements: int
    expected: int
    issued_ns: int
    noticed_ns: int


@dataclass
class GroupReport:
    """The progress of a rank in a group. ``place``: the rank's, in the group; ``enqueued``,
    ``completed``: numbers of its last such calls, 0: none; ``started``: the same, −1: not recorded;
    ``index``: which of the rank's own groups it is, −1: not told."""

    name: str
    description: str
    place: int
    index: int = -1
    enqueued: int = 0
    started: int = -1
    completed: int = 0
    call: TimedOutCall | None = None
    site: Site = field(default_factory=lambda: Site("", 0, ""))

    @property
    def is_default(self) -> bool:
        """Tell whether it is the group of all ranks."""
        return self.description == "default_pg" or (not self.description and self.name == "0")


@dataclass
class RankReport:
    """The lines of a rank in one failure. ``job``: the Ray actors that it is one of, as several
    jobs may share a log; ``groups``: by name; ``last_ns``: the time of its last line."""

    job: str
    rank: int
    groups: dict[str, GroupReport] = field(default_factory=dict)
    last_ns: int = 0

    @property
    def is_in_flight(self) -> bool:
        """Tell whether a call of the rank has timed out."""
        return any(group.call for group in self.groups.values())


@dataclass(frozen=True)
class _Event:
    """A line. ``rank``: −1: not told; ``work``: the number that a status is about, −1: none."""

    job: str
    rank: int
    time_ns: int
    group: GroupReport | None = None
    place: int = -1
    work: int = -1
    call: TimedOutCall | None = None
    site: Site | None = None


def has_watchdog_lines(data: bytes) -> bool:
    """Tell whether a text has such lines."""
    return any(mark in data for mark in _MARKS)


def watchdog_part(data: bytes) -> bytes:
    """Return the lines of a log that :func:`read_watchdog_lines` reads: few of many."""
    lines = re.split(rb"[\r\n]+", data)
    return b"\n".join(
        line[:_MOST_IN_LINE]
        for line in lines
        if any(mark in line for mark in _USED) or (b"#" in line and b" from " in line)
    )


@dataclass(frozen=True)
class WatchdogLines:
    """The lines of all ranks of one failure. ``remarks``: sentences on lines that are not used;
    ``are_thinned``: lines of some ranks are left out, so that it says nothing where a rank has
    none."""

    reports: tuple[RankReport, ...]
    remarks: tuple[str, ...]
    are_thinned: bool


def read_watchdog_lines(texts: Iterable[tuple[str, bytes]]) -> WatchdogLines:
    """Read the lines of the last failure in the logs of one or several jobs.

    ``texts``: the names of files, and what is in them.
    """
    events, repeated = list[_Event](), 0
    for name, data in texts:
        lines = re.split(r"[\r\n]+", data.decode("utf-8", "replace"))
        events += _events(lines, rank_in_name(name))
        for match in map(_REPEATED.search, filter(_OURS.search, lines)):
            repeated += int(match[1]) if match else 0
    remarks = []
    if repeated:
        remarks.append(f"Ray has left out {repeated} such lines of other ranks: run the job with RAY_DEDUP_LOGS=0")
    placed = [event for event in events if event.rank >= 0]
    unplaced = [event for event in events if event.rank < 0 and (event.call or event.group)]
    if unplaced and not placed:
        remarks.append(
            f"the rank is missing in {counted(len(unplaced), 'line')} of watchdogs: torch writes it since 2.2"
        )
    last = _last_failure(placed)
    if len(last) < len(placed):
        remarks.append("lines of an earlier failure are left out: the job was started again")
    by_rank: dict[tuple[str, int], list[_Event]] = {}
    for event in last:
        by_rank.setdefault((event.job, event.rank), []).append(event)
    reports = tuple(_report(*key, of_rank) for key, of_rank in sorted(by_rank.items()))
    return WatchdogLines(reports, tuple(remarks), are_thinned=repeated > 0)


def _events(lines: Sequence[str], rank_of_file: int | None) -> Iterator[_Event]:
    """The lines that say something, in their order, with the places in the program below a failed
    call."""
    stack_of: _Event | None = None
    frames: list[Site] = []
    for full in (*lines, ""):
        line = full[:_MOST_IN_LINE]
        frame = _FRAME.search(line[:_MOST_IN_FRAME]) if stack_of is not None else None
        if frame is not None and int(frame[1]) == len(frames):
            frames.append(Site(frame[3], int(frame[4]), frame[2]))
            continue
        if stack_of is not None and frames:  # the innermost place that is not torch's; the innermost where each is
            yield replace(stack_of, site=next((site for site in frames if "/torch/" not in site.file), frames[0]))
        stack_of, frames = None, []
        event = _event(line, rank_of_file) if "ProcessGroupNCCL" in line or _OURS.search(line) else None
        if event is not None and _STACK in line:
            stack_of = event
        elif event is not None:
            yield event


def _event(line: str, rank_of_file: int | None) -> _Event | None:
    """Read what a line says; None: two ranks have written into it at once, or it names a rank that
    no job has."""
    group, timed_out = _GROUP.search(line), _TIMED_OUT.search(line)
    start = min((match.start() for match in (group, timed_out) if match), default=len(line))
    launched = _LAUNCHED.findall(line[:start])
    is_default = group is not None and (group["description"] == "default_pg" or group["id"] == "0")
    rank = int(launched[-1]) if launched else int(group["place"]) if group and is_default else rank_of_file
    if group and is_default and rank != int(group["place"]):
        return None
    if (rank or 0) >= _MOST_RANKS or (group and int(group["place"]) >= _MOST_RANKS):
        return None
    ray = _RAY.search(line[:start])
    time_ns = _time_ns(line)
    call = None
    if timed_out is not None:
        issued_ns = max(time_ns - int(timed_out["ran"]) * 10**6, 0) if time_ns else 0
        elements, expected = (-1 if timed_out[end] is None else int(timed_out[end]) for end in ("sent", "expected"))
        call = TimedOutCall(int(timed_out["number"]), timed_out["kind"], elements, expected, issued_ns, time_ns)
    place = int(timed_out["place"]) if timed_out else -1
    status = _STATUS.search(line)
    event = _Event(ray[1] if ray else "", -1 if rank is None else rank, time_ns, call=call, place=place)
    if group is None or (status is None and call is None):
        return event
    described = group["description"] or ("default_pg" if group["id"] == "0" else "")
    name, description = printable(group["name"], keep=""), printable(described, keep="")
    report = GroupReport(name, description, int(group["place"]), int(group["id"] or -1))
    if status is None:  # the exception that a watchdog ends with, some time after it had noticed
        late = call and replace(call, issued_ns=0, noticed_ns=0)
        return replace(event, group=report, place=report.place, call=late)
    report.enqueued, report.completed = _number(status["enqueued"]), _number(status["completed"])
    if status["started"]:
        report.started = _number(status["started"]) or -1
    return replace(event, group=report, place=report.place, work=int(status["work"] or -1), call=None)


def _number(text: str) -> int:
    """A sequence number; 0 for torch's −1, and for one that torch 2.3 had not set."""
    number = int(text)
    return number if 0 <= number < _NONE_YET else 0


def _time_ns(line: str) -> int:
    """The time of a line of torch's, in the leap year 2000, as torch writes no year; 0: it has
    none."""
    match = _TIME.search(line)
    if match is None:
        return 0
    month, day, hour, minute, second = map(int, match.groups()[:5])
    try:
        moment = datetime(2000, month, day, hour, minute, second, tzinfo=timezone.utc)
    except ValueError:
        return 0
    return int(moment.timestamp()) * 10**9 + int(match[6].ljust(9, "0"))


def _last_failure(events: Sequence[_Event]) -> list[_Event]:
    """The events after the last long silence, or the last start anew; those without times are of
    one failure."""
    times = sorted({event.time_ns for event in events if event.time_ns})
    gaps = [later for earlier, later in itertools.pairwise(times) if later - earlier > _FAILURE_GAP_NS]
    latest: dict[tuple[object, ...], tuple[int, int]] = {}
    for event in sorted(events, key=lambda event: event.time_ns):
        group = event.group
        if group is None or not event.time_ns or not group.enqueued:
            continue
        key = event.job, event.rank, group.name, group.index, group.place
        before_ns, enqueued = latest.get(key, (0, 0))
        if group.enqueued < enqueued and before_ns < event.time_ns:  # it was started anew between these two lines
            between = itertools.pairwise(time_ns for time_ns in times if before_ns <= time_ns <= event.time_ns)
            gaps.append(max(between, key=lambda pair: pair[1] - pair[0])[1])
        latest[key] = event.time_ns, group.enqueued
    return [event for event in events if not event.time_ns or event.time_ns >= max(gaps, default=0)]


def _report(job: str, rank: int, events: Sequence[_Event]) -> RankReport:
    """Put a rank's lines together: a call that timed out belongs to the group whose status names
    its number and place."""
    report = RankReport(job, rank, last_ns=max(event.time_ns for event in events))
    calls: list[tuple[TimedOutCall, int]] = []
    last_group: GroupReport | None = None
    for event in events:
        if event.group is None:
            if event.call is not None:
                calls.append((event.call, event.place))
            elif event.site is not None and last_group is not None:
                last_group.site = event.site
            continue
        group = report.groups.setdefault(event.group.name, event.group)
        last_group = group
        group.enqueued = max(group.enqueued, event.group.enqueued)
        group.started = max(group.started, event.group.started)
        group.completed = max(group.completed, event.group.completed)
        group.call = _named(group.call, event.call)
        matches = [each for each in calls if (each[0].number, each[1]) == (event.work, event.place)]
        if group.call is None and len(matches) == 1:
            group.call = matches[0][0]
            calls.remove(matches[0])
        elif group.call is None and matches:  # each may be another group's: as much as they share
            kinds = {(call.kind, call.elements, call.expected) for call, _ in matches}
            kind, elements, expected = kinds.pop() if len(kinds) == 1 else (EITHER, -1, -1)
            noticed_ns = min(call.noticed_ns for call, _ in matches)
            group.call = TimedOutCall(event.work, kind, elements, expected, issued_ns=0, noticed_ns=noticed_ns)
    return report


def _named(call: TimedOutCall | None, by: TimedOutCall | None) -> TimedOutCall | None:
    """The call of a group, with the kind in a line that names the group where it may be either of
    two."""
    if by is None or (call is not None and (call.kind, call.number) != (EITHER, by.number)):
        return call
    return by if call is None else replace(call, kind=by.kind, elements=by.elements, expected=by.expected)
