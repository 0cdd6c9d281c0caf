"""Analysis of the traces of a job's ranks: time by lane, who comes late, what was predicted. No
files, no printing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from commlayer.profiles.errors import UsageError
from commlayer.profiles.links import COLLECTIVES, bus_factor
from commlayer.traces.call_records import CallRecord, Mark
from commlayer.traces.chrome_of_job import lane_place, running
from commlayer.traces.intervals import length
from commlayer.traces.rank_files import RankTrace

__all__ = [
    "GroupTimes",
    "LaneTimes",
    "PlanErrors",
    "RankLateness",
    "Selected",
    "Window",
    "group_times",
    "lane_times",
    "lateness",
    "matched_calls",
    "plans",
    "select",
]

_Key = tuple[str, tuple[int, ...], int, int]
_Shared = dict[int, tuple[CallRecord, Callable[[int], int]]]
"""The records of one call by rank, each with what makes its stamps comparable."""


@dataclass(frozen=True, slots=True)
class Window:
    """The window of an analysis: the calls that the program issued in this part of the job.

    ``step``: in the mark "step 3" of each rank. ``since_us``, ``until_us``: in this time from the
    first call or mark of any rank.
    """

    step: int | None = None
    since_us: float | None = None
    until_us: float | None = None


@dataclass(frozen=True, slots=True)
class Selected:
    """One rank's part of the window. ``to_job_ns``: makes its stamps comparable."""

    trace: RankTrace
    calls: tuple[CallRecord, ...]
    to_job_ns: Callable[[int], int]

    @property
    def span_ns(self) -> int:
        """The time from the first call issued to the last one's end, or to the end of the program's
        waiting."""
        ends = [max([call.end_ns, call.enqueue_ns, *(end for _, end in call.waited)]) for call in self.calls]
        return max(ends) - min(call.enqueue_ns for call in self.calls) if ends else 0


def select(traces: Sequence[RankTrace], window: Window | None = None) -> list[Selected]:
    """Select the calls of each rank that lie in the window. Raises UsageError for a step that no
    rank has marked."""
    window = window or Window()
    clocks = [trace.job_clock() for trace in traces]
    first_ns = []
    for trace, clock in zip(traces, clocks, strict=True):
        stamps = [call.enqueue_ns for call in trace.calls] + [mark.start_ns for mark in trace.marks]
        first_ns.append(clock(min(stamps, default=trace.opened_ns)))
    begin_ns = min(first_ns, default=0)
    since_ns = begin_ns + round((window.since_us or 0.0) * 1e3)
    until_ns = float("inf") if window.until_us is None else begin_ns + window.until_us * 1e3
    if window.step is not None and not any(_marked(trace, window.step) for trace in traces):
        names = {mark.name for trace in traces for mark in trace.marks}
        steps = sorted(int(name[5:]) for name in names if name.startswith("step ") and name[5:].isdecimal())
        there = f"steps {steps[0]} to {steps[-1]}" if steps else "none: Recorder.mark('step 3', …) marks one"
        raise UsageError(f"expected a step that the program has marked, got {window.step}; there are {there}")
    selected = []
    for trace, clock in zip(traces, clocks, strict=True):
        spans = _marked(trace, window.step)
        calls = tuple(
            call
            for call in trace.calls
            if since_ns <= clock(call.enqueue_ns) < until_ns
            and (spans is None or any(mark.start_ns <= call.enqueue_ns < mark.end_ns for mark in spans))
        )
        selected.append(Selected(trace, calls, clock))
    return selected


def _marked(trace: RankTrace, step: int | None) -> list[Mark] | None:
    return None if step is None else [mark for mark in trace.marks if mark.name == f"step {step}"]


@dataclass(slots=True)
class LaneTimes:
    """One lane, over ranks: counts and bytes are sums, times are means over the ranks that have
    calls in the lane, µs.

    ``busy_us``: at least one of its steps was under way; of a call without steps the call counts.
    ``queued_us``: from issue to the queue's turn, and ``held_us``: at chunk edges for higher lanes;
    sums over calls. ``exposed_us``: a thread of the program was blocked by one of its calls.
    ``inter_bytes``, ``intra_bytes``: sent by those calls of which it is known;
    ``known_logical_bytes``: what the callers of those moved. ``num_unknown``: the other calls; one
    of 0 bytes sends none. ``num_unfinished``: calls without an end, which are in no time.
    """

    lane: str
    num_calls: int = 0
    num_ranks: int = 0
    busy_us: float = 0.0
    queued_us: float = 0.0
    held_us: float = 0.0
    exposed_us: float = 0.0
    logical_bytes: int = 0
    inter_bytes: int = 0
    intra_bytes: int = 0
    known_logical_bytes: int = 0
    num_unknown: int = 0
    num_unfinished: int = 0

    @property
    def wire_ratio(self) -> float | None:
        """Bytes sent over logical bytes, of the calls whose bytes are known; None where those moved
        nothing."""
        if not self.known_logical_bytes:
            return None
        return (self.inter_bytes + self.intra_bytes) / self.known_logical_bytes


def lane_times(ranks: Sequence[Selected], *, together: bool = False) -> list[LaneTimes]:
    """Add up each lane that has calls, those that go first above. ``together``: all of them as one,
    named "all"."""
    lanes: dict[str, LaneTimes] = {}
    for rank in ranks:
        by_lane: defaultdict[str, list[CallRecord]] = defaultdict(list)
        for call in rank.calls:
            by_lane["all" if together else call.lane].append(call)
        for lane, calls in by_lane.items():
            times = lanes.setdefault(lane, LaneTimes(lane))
            ended = [call for call in calls if call.end_ns]
            known = [call for call in calls if not call.logical_bytes or min(call.inter_bytes, call.intra_bytes) >= 0]
            spans = (running(call) if call.steps else [(call.start_ns, call.end_ns)] for call in ended)
            times.num_ranks += 1
            times.num_calls += len(calls)
            times.num_unfinished += len(calls) - len(ended)
            times.num_unknown += len(calls) - len(known)
            times.busy_us += length(span for each in spans for span in each) / 1e3
            times.queued_us += sum(call.start_ns - call.enqueue_ns for call in ended) / 1e3
            times.held_us += sum(call.held_ns for call in ended) / 1e3
            times.exposed_us += length(span for call in calls for span in call.waited) / 1e3
            times.logical_bytes += sum(call.logical_bytes for call in calls)
            times.inter_bytes += sum(max(call.inter_bytes, 0) for call in known)
            times.intra_bytes += sum(max(call.intra_bytes, 0) for call in known)
            times.known_logical_bytes += sum(call.logical_bytes for call in known)
    for times in lanes.values():
        for name in ("busy_us", "queued_us", "held_us", "exposed_us"):
            setattr(times, name, getattr(times, name) / times.num_ranks)
    return sorted(lanes.values(), key=lambda times: lane_place(times.lane))


@dataclass(slots=True)
class RankLateness:
    """The lateness of one rank at the calls that it shares with others, µs after the first rank of
    each call.

    A rank has come to a call when its queue has: from then on the others wait for it. ``num_last``:
    calls to which it came last, and later than the first by more than the clocks can be wrong.
    ``worst``: the call of ``worst_us``.
    """

    rank: int
    host: str
    num_calls: int = 0
    median_us: float = 0.0
    worst_us: float = 0.0
    worst: str = ""
    num_last: int = 0
    late_us: list[float] = field(default_factory=list)


def lateness(ranks: Sequence[Selected], host_errors_ns: Mapping[int, int] | None = None) -> list[RankLateness]:
    """Compute the lateness of each rank, also of one without calls; those that are last most often
    first. Calls of one rank alone do not count, and so no batch of messages: nobody says which of
    another rank's belongs to it.

    Args:
        host_errors_ns: by how much stamps of a rank's host may be off, for calls of dumps whose times no device has
            recorded. Durations, from which the times of the others are, need no clock.
    """
    host_errors = host_errors_ns or {}
    by_rank = {rank.trace.rank: RankLateness(rank.trace.rank, rank.trace.host) for rank in ranks}
    errors = {rank.trace.rank: max(rank.trace.error_ns, 0) for rank in ranks}
    for shared in matched_calls(ranks).values():
        came = {rank: clock(call.start_ns) for rank, (call, clock) in shared.items() if call.start_ns}
        if len(came) < 2:
            continue
        first = min(came, key=lambda rank: came[rank])
        last = max(came, key=lambda rank: came[rank])
        error_ns = sum(
            errors[rank] if shared[rank][0].end_ns > 0 else max(errors[rank], host_errors.get(rank, 0))
            for rank in (first, last)
        )
        if came[last] - came[first] > error_ns:
            by_rank[last].num_last += 1
        for rank, ns in came.items():
            each, late_us = by_rank[rank], (ns - came[first]) / 1e3
            each.late_us.append(late_us)
            if late_us > each.worst_us:
                call = shared[rank][0]
                each.worst_us, each.worst = late_us, f"{call.collective} #{call.sequence} in {call.group}"
    for each in by_rank.values():
        each.num_calls = len(each.late_us)
        each.median_us = median(each.late_us) if each.late_us else 0.0
    return sorted(by_rank.values(), key=lambda each: (-each.num_last, -each.median_us, each.rank))


def matched_calls(ranks: Iterable[Selected]) -> dict[_Key, _Shared]:
    """Return the records of each call on its ranks. A group that was made anew under its old name counts
    from the beginning: then the nth record of a number belongs to the nth of the others. All records
    of a rank are counted, for a window may begin between the ranks of a call."""
    matched: dict[_Key, _Shared] = {}
    for rank in ranks:
        seen: Counter[tuple[str, tuple[int, ...], int]] = Counter()
        selected = set(map(id, rank.calls))
        for call in rank.trace.calls:
            key = call.group, call.ranks, call.sequence
            if id(call) in selected:
                matched.setdefault((*key, seen[key]), {})[rank.trace.rank] = call, rank.to_job_ns
            seen[key] += 1
    return matched


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """The calls of one collective in all groups of one name and size, such as every tp group of two ranks.

    ``num_calls``: a call of all its ranks counts once. ``median_bytes``: logical bytes of a call.
    ``median_us``, ``worst_us``: the time from where the last rank came to the last end; None where
    that is known of no call. ``busbw_gbps``: median bus bandwidth over those times, as nccl-tests
    defines it; None also where no bytes are known.
    """

    group: str
    num_ranks: int
    collective: str
    num_calls: int
    median_bytes: int
    median_us: float | None
    worst_us: float | None
    busbw_gbps: float | None


def group_times(ranks: Sequence[Selected]) -> list[GroupTimes]:
    """Sum up the collectives of groups of more than one rank; those that take longest in all first,
    as far as times are known."""
    calls: defaultdict[tuple[str, int, str], list[tuple[int, float | None]]] = defaultdict(list)
    for (group, members, *_), shared in matched_calls(ranks).items():
        if len(members) > 1:
            records = [call for call, _ in shared.values()]
            num_bytes = max(call.logical_bytes for call in records)
            calls[group, len(members), records[0].collective].append((num_bytes, _together_us(shared)))
    rows = {}
    for (group, size, collective), each in calls.items():
        times = [us for _, us in each if us is not None]
        factor = bus_factor(collective, size) if collective in COLLECTIVES else 0.0
        rates = [factor * num_bytes / us / 1e3 for num_bytes, us in each if us and num_bytes and factor]
        num_bytes = round(median(num_bytes for num_bytes, _ in each))
        row = GroupTimes(
            group, size, collective, len(each), num_bytes, _median(times), max(times, default=None), _median(rates)
        )
        rows[row] = sum(times)
    return sorted(rows, key=lambda row: (-rows[row], row.group, row.collective))


@dataclass(slots=True)
class PlanErrors:
    """Predicted against measured times of one collective moved by one plan, of the calls that no
    rank held for a higher lane: of the others nobody knows how long they would have taken.

    ``ratio``: median over the ranks' calls of measured / predicted time, each from where the rank
    came to the call; ``ratio_together``: median over calls of the time from where the last rank
    came to the last end, which no late rank makes longer; None where no call has the records of all
    its ranks. ``num_calls`` counts ranks' calls that are compared, and ``num_held`` those left out
    because a rank held its part; where that is all of them, the times are None.
    """

    collective: str
    plan: str
    num_calls: int
    num_held: int
    predicted_us: float | None
    measured_us: float | None
    ratio: float | None
    ratio_together: float | None


def plans(ranks: Sequence[Selected]) -> list[PlanErrors]:
    """Compare predicted and measured times by collective and plan, of the calls that had a
    prediction and have ended; medians.
    """
    alone: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    together: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    held: Counter[tuple[str, str]] = Counter()
    for shared in matched_calls(ranks).values():
        compared = [(call, clock) for call, clock in shared.values() if call.predicted_us > 0 and call.end_ns > 0]
        if any(call.held_ns > 0 for call, _ in shared.values()):  # the others waited for those who held theirs
            held.update((call.collective, call.plan) for call, _ in compared)
            continue
        for call, _ in compared:
            alone[call.collective, call.plan].append((call.predicted_us, (call.end_ns - call.start_ns) / 1e3))
        kinds = {(call.collective, call.plan) for call, _ in compared}
        us = _together_us(shared) if len(kinds) == 1 and len(compared) == len(shared) > 1 else None
        if us is not None:
            together[kinds.pop()].append(us / max(call.predicted_us for call, _ in compared))
    return [
        PlanErrors(
            *kind,
            len(times := alone.get(kind, [])),
            held[kind],
            _median([predicted for predicted, _ in times]),
            _median([measured for _, measured in times]),
            _median([measured / predicted for predicted, measured in times]),
            _median(together.get(kind, [])),
        )
        for kind in sorted({*alone, *held})
    ]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _together_us(shared: _Shared) -> float | None:
    """The time of a call from where its last rank came to the last end, µs, which no late rank
    makes longer. None where a rank's record is not there or has no end, and where none tells when
    the call ran."""
    records = [call for call, _ in shared.values()]
    if len(records) < len(records[0].ranks) or not all(call.start_ns and call.end_ns > 0 for call in records):
        return None
    # A device's inner backend says no end of a call but when it was given it: such a call has no
    # plan, and nobody counts its bytes. A call of no bytes on the CPU looks like that, and is no
    # loss; a device's barriers have no records.
    if all(call.plan == "flat" and not call.logical_bytes and call.collective != "barrier" for call in records):
        return None
    came_ns = max(clock(call.start_ns) for call, clock in shared.values())
    ended_ns = max(clock(call.end_ns) for call, clock in shared.values())
    return (ended_ns - came_ns) / 1e3
