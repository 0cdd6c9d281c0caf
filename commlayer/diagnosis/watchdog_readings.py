"""The diagnosis of a job from the lines of its watchdogs alone.

They say less than a dump: the oldest call of each group that has timed out, and the numbers of the
last ones that were enqueued. What is wrong is found in the graph of all groups, as from logs;
before that, it is inferred, and said in :attr:`~commlayer.diagnosis.findings.Diagnosis.assumed`:

- A group's members: those that report on it. Where all of these but a few are evenly spaced, as
  ranks of a mesh are, the others too; and all members, where only one mesh has its ranks at the
  places that they report of this group and of those beside it. A call that gathers or scatters
  tells by its sizes how many they are.
- A rank whose lines are there, and whose watchdog reports no timeout of a group in which others
  have timed out, has not come to their call: it would have timed out too, soon after.
- The order in which a rank enqueued its calls: from the moments at which they timed out.

Whatever hangs on a rank without lines is not told, and neither is what messages wait for: each rank
numbers its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from commlayer.diagnosis.call_logs import CallLog, GroupLog, RankLog, inferred_log
from commlayer.diagnosis.dump_groups import collective_kind
from commlayer.diagnosis.findings import Cause, Cycle, Diagnosis, Mismatch, Missing, Waiter, diagnose
from commlayer.diagnosis.program_ends import ProgramEnd, with_ends
from commlayer.diagnosis.watchdog_lines import EITHER, GroupReport, RankReport, TimedOutCall, WatchdogLines
from commlayer.profiles.counted import counted, listed
from commlayer.profiles.printable import shortened

__all__ = ["diagnose_watchdogs"]

_SWITCHES = (
    "for more, run with TORCH_FR_BUFFER_SIZE=2000, TORCH_NCCL_DUMP_ON_TIMEOUT=1 and "
    "TORCH_FR_DUMP_TEMP_FILE=/shared/trace_rank_ (on older torch TORCH_NCCL_TRACE_BUFFER_SIZE and "
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE), and give the dumps and logs of all ranks"
)
_MESSAGES = ("SEND", "RECV", "COALESCED", "UNKNOWN")
"""Kinds of torch's that are messages, or may be."""
_LEAST_APART_NS = 5_000_000
"""Times of calls that are nearer do not tell their order: a watchdog looks, and writes
milliseconds."""
_LEAST_FOLLOWED_S = 30.0
"""For so long lines have to go on after a group's first timeout before it says something that a
rank has not reported one: ranks make a call at moments that differ. torch waits for a minute before
it ends processes, so that all can dump."""
_MOST_GROUPS = 4
_LEAST_KNOWN = 3
"""The number of members that have to be known before others are inferred from even spacing."""


@dataclass(frozen=True)
class _Group:
    """A group. ``reports``: by the rank that reports; ``ranks``: its members, as far as known;
    ``is_complete``: whether there can be no others; ``is_in_mesh``: whether there are none by the
    mesh; ``fault``: why its numbers cannot be compared, empty: they can; ``followed_s``: for how
    long lines go on after its first timeout."""

    name: str
    description: str
    reports: dict[int, GroupReport]
    ranks: tuple[int, ...]
    is_complete: bool = False
    is_in_mesh: bool = False
    fault: str = ""
    followed_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.description} ({self.name})" if self.description else self.name

    @property
    def silent(self) -> tuple[int, ...]:
        """The members that do not report on it."""
        return tuple(rank for rank in self.ranks if rank not in self.reports)

    @property
    def least_size(self) -> int:
        """How many members it has at least, by the places that are reported."""
        return max(2, 1 + max(report.place for report in self.reports.values()))


def diagnose_watchdogs(
    lines: WatchdogLines, ends: Sequence[ProgramEnd] = ()
) -> dict[str, tuple[list[RankLog], Diagnosis]]:
    """Return of each job in the lines the logs that they amount to, and what is wrong. ``ends``:
    how programs have ended.

    Where nothing is found, ``open`` says which calls have timed out, why it cannot be told who is
    behind, and what to switch on.
    """
    if lines.remarks and not lines.reports:
        sentences = (*lines.remarks, _SWITCHES)
        return {"": ([], Diagnosis(findings=(), waits=(), ranks=(), without=(), is_timeout=True, open=sentences))}
    jobs: dict[str, list[RankReport]] = {}
    for report in lines.reports:
        jobs.setdefault(report.job, []).append(report)
    is_only = len(jobs) == 1
    return {
        "" if is_only else job: _diagnosed(reports, lines, ends if is_only else ()) for job, reports in jobs.items()
    }


def _diagnosed(
    reports: Sequence[RankReport], lines: WatchdogLines, ends: Sequence[ProgramEnd]
) -> tuple[list[RankLog], Diagnosis]:
    by_rank = {report.rank: report for report in reports}
    # The job has as many ranks at least: up to the last one that is seen, or as many as a call
    # gathers from.
    gathered = max((count for each in reports for own in each.groups.values() for count in _sizes([own])), default=0)
    last = gathered - 1 if gathered <= 2 * len(by_rank) else 0
    size = max([*by_rank, *(end.rank for end in ends), last]) + 1
    groups = _groups(by_rank, {end.rank for end in ends}, size)
    ranks = tuple(sorted({*by_rank, *(rank for group in groups.values() for rank in group.ranks)}))
    logs = [_log(report, groups, ranks) for report in reports]
    diagnosis = with_ends(diagnose(logs), ends)
    assumed = []
    if lines.are_thinned:
        differing = tuple(finding for finding in diagnosis.findings if isinstance(finding, Mismatch))
        diagnosis = msgspec.structs.replace(diagnosis, findings=differing, waits=())
    elif not diagnosis.findings and not _culprits(diagnosis) and _has_order(reports):
        in_order = [_log(report, groups, ranks, only_oldest=True) for report in reports]
        likely = diagnose(in_order)
        if any(isinstance(finding, Cycle) for finding in likely.findings):
            logs, diagnosis = in_order, likely
            assumed.append("a rank's calls are taken to begin on the device in the order in which they were enqueued")
    waits, under_way, cause = tuple(_culprits(diagnosis)), tuple[Waiter, ...](), None
    is_found = bool(diagnosis.findings or waits)
    if is_found:
        assumed += _assumed(groups, diagnosis)
    elif not lines.are_thinned:
        cause = _aside(by_rank, ends, size, max((group.followed_s for group in groups.values()), default=0.0))
        under_way = () if cause else tuple(_met(diagnosis, groups, reports))
        is_found = cause is not None and cause.certainty != "unknown"
        if under_way:
            assumed.append("a group has no members but those that report on it, and those of the same mesh")
    return logs, msgspec.structs.replace(
        diagnosis,
        waits=waits,
        under_way=under_way,
        cause=cause,
        assumed=tuple(assumed),
        open=() if is_found else tuple(_open(groups)),
        remarks=(*lines.remarks, *_messengers(groups)),
    )


def _culprits(diagnosis: Diagnosis) -> list[Missing]:
    """The ranks that others wait for, of which lines are there: in no call, or in messages, of
    which it is not told for whom.

    Which rank holds up the others where one is in a collective is open: not all members of its
    group are known.
    """
    return [
        missing
        for missing in diagnosis.waits
        if missing.why == "late" or any(waiter.call.kind in _MESSAGES for waiter in missing.held)
    ]


def _aside(by_rank: dict[int, RankReport], ends: Sequence[ProgramEnd], size: int, followed_s: float) -> Cause | None:
    """The cause that is seen without knowing who is in which group: a rank whose program has ended,
    the only one that is in no call, or the few without a line, where all others wait. The watchdog
    of a rank that lives hears of a timeout wherever its program is."""
    how = {end.rank: end.how for end in ends}
    waiting = [rank for rank, report in sorted(by_rank.items()) if report.is_in_flight]
    lost = sorted(set(range(size)) - by_rank.keys() - how.keys())
    idle = [rank for rank in by_rank if rank not in waiting and rank not in how]
    if not waiting:
        return None
    if how:
        rank = min(how)
        what, certainty, ranks, state = "ended", "likely", tuple(how), f"has ended {how[rank]}"
    elif not lost and len(idle) == 1 and len(waiting) > 1 and followed_s >= _LEAST_FOLLOWED_S:
        rank = idle[0]
        if any(group.enqueued > group.completed for group in by_rank[rank].groups.values()):
            return None
        what, certainty, ranks, state = "absent", "likely", (rank,), "is in no call"
    elif lost and not idle and len(lost) <= len(waiting):
        rank = lost[0]
        what, certainty, ranks = "no dump", "unknown", tuple(lost)
        state = "has left no line: it is dead or stopped, or its log is not here"
    else:
        return None
    also = f" (and so for {listed('rank', others, 8)})" if (others := [each for each in ranks if each != rank]) else ""
    wait = "waits in a call that does" if len(waiting) == 1 else "wait in calls that do"
    words = f"rank {rank} {state}{also}, and {listed('rank', waiting, 8)} {wait} not end"
    return Cause(what=what, certainty=certainty, ranks=ranks, calls=(), words=words)


def _met(diagnosis: Diagnosis, groups: dict[str, _Group], reports: Iterable[RankReport]) -> Iterator[Waiter]:
    """The waits in calls that all members that are known have come to. None where a rank is in no
    call, or a group lacks a member that is not known: what all wait for may be that one."""
    met: set[tuple[str, int]] = set()
    if diagnosis.without or not all(report.is_in_flight for report in reports):
        return
    for name, group in groups.items():
        numbers = {rank: report.call.number for rank, report in group.reports.items() if report.call}
        has_all = group.is_complete or group.is_in_mesh or len(group.ranks) >= group.least_size
        if numbers and (group.fault or not has_all):
            return
        if numbers and set(numbers) == set(group.ranks) and len(set(numbers.values())) == 1 < len(numbers):
            met.add((group.description or name, max(numbers.values())))
    yield from (waiter for waiter in diagnosis.under_way if (waiter.call.group, waiter.call.number) in met)


# Groups


def _groups(by_rank: dict[int, RankReport], ended: set[int], size: int) -> dict[str, _Group]:
    """The groups in which calls have timed out, and the one of all ranks, in a job of ``size``
    ranks; ``ended``: ranks whose programs have."""
    reports_of: dict[str, dict[int, GroupReport]] = {}
    for rank, report in by_rank.items():
        for name, own in report.groups.items():
            reports_of.setdefault(name, {})[rank] = own
    faults = _faults(reports_of)
    in_mesh = _in_meshes(reports_of, faults, size)
    last_ns = max(report.last_ns for report in by_rank.values())
    groups = {}
    for name, reports in reports_of.items():
        is_default = any(report.is_default for report in reports.values())
        has_all = is_default or size == 2 or size in _sizes(reports.values())
        ranks = range(size) if has_all else in_mesh.get(name) or _members(reports, size)
        # For how many seconds lines go on after the first timeout; 0 where times are not known.
        noticed = [report.call.noticed_ns for report in reports.values() if report.call is not None]
        first_ns = min(filter(None, noticed), default=0)
        groups[name] = _Group(
            name,
            list(reports.values())[-1].description,
            reports,
            tuple(ranks),
            is_complete=is_default or len(ranks) == size > 1,
            is_in_mesh=name in in_mesh,
            fault=faults.get(name, ""),
            followed_s=(last_ns - first_ns) / 1e9 if first_ns else 0.0,
        )
    groups = _with_only_candidates(groups, by_rank, size)
    for name, group in groups.items():
        about_to = set(group.silent) & (by_rank.keys() - ended)  # they have lines, and may have been about to report
        if about_to and group.followed_s < _LEAST_FOLLOWED_S:
            members = tuple(rank for rank in group.ranks if rank not in about_to)
            groups[name] = replace(group, ranks=members, is_complete=False, is_in_mesh=False)
    return groups


def _faults(reports_of: dict[str, dict[int, GroupReport]]) -> dict[str, str]:
    """Why the numbers of some groups cannot be compared, by the group's name."""
    faults: dict[str, str] = {}
    places: set[tuple[str, int]] = set()
    for name, rank, own in ((name, rank, own) for name, its in reports_of.items() for rank, own in its.items()):
        if (name, own.place) in places:
            faults[name] = "several groups go by this name"
        places.add((name, own.place))
        if own.call is not None and own.call.kind in _MESSAGES:
            faults.setdefault(name, "messages are numbered by each rank for itself")
        elif own.call is not None and own.call.kind == EITHER:
            faults.setdefault(name, f"two of the calls of rank {rank} cannot be told apart")
        elif own.completed > own.enqueued or (own.call and own.completed >= own.call.number):
            faults.setdefault(name, "the numbers of its calls and messages are mixed")
    descriptions = {name: list(its.values())[-1].description for name, its in reports_of.items()}
    for name, description in descriptions.items():
        # split_group gives all parts one name; where parts have their own, the name is one group's.
        if description.startswith("mesh_") and list(descriptions.values()).count(description) == 1:
            faults.setdefault(name, "the groups of a mesh's dimension may all go by this name")
    return faults


def _in_meshes(reports_of: dict[str, dict[int, GroupReport]], faults: dict[str, str], size: int) -> dict[str, range]:
    """The members of the groups of each dimension of a mesh, where only one mesh of ``size`` ranks
    at most puts ranks at the places that they report: groups of one description, or which are each
    rank's n-th one."""
    dimensions: dict[str, list[tuple[str, int, GroupReport]]] = {}
    for name, rank, own in ((name, rank, own) for name, its in reports_of.items() for rank, own in its.items()):
        dimension = own.description or (str(own.index) if own.index > 0 else "")
        if dimension and not own.is_default and name not in faults:
            dimensions.setdefault(dimension, []).append((name, rank, own))
    members: dict[str, range] = {}
    for seen in dimensions.values():
        if len(seen) < _LEAST_KNOWN:
            continue
        last = max(own.place for _, _, own in seen)
        sizes = _sizes(own for _, _, own in seen)
        fits = [
            starts
            for step in range(1, size // (last + 1) + 1)
            for count in range(max(2, last + 1), size // step + 1)
            if not sizes or count in sizes
            if (starts := _starts([(name, rank, own.place) for name, rank, own in seen], step, count))
        ]
        if len(fits) == 1:
            members |= fits[0]
    return members


def _sizes(reports: Iterable[GroupReport]) -> set[int]:
    """How many ranks a group has by the call that timed out: as many times as much comes out of an
    all_gather as goes in, and of a reduce_scatter the reverse. Empty: they do not say."""
    sizes = set()
    for report in reports:
        call = report.call
        kind = collective_kind(call.kind) if call else ""
        if call and kind in ("all_gather", "reduce_scatter") and min(call.elements, call.expected) > 0:
            small, large = sorted((call.elements, call.expected))
            sizes.add(large // small if large % small == 0 else 0)
    return sizes if len(sizes) == 1 and min(sizes) > 1 else set()


def _starts(seen: Sequence[tuple[str, int, int]], step: int, count: int) -> dict[str, range]:
    """The members of each group, if ``count`` ranks that are ``step`` apart are one; empty: they
    are not."""
    members: dict[str, range] = {}
    for name, rank, place in seen:
        start = rank - place * step
        group = members.setdefault(name, range(start, start + step * count, step))
        if rank // step % count != place or group.start != start:
            return {}
    return members if len({group.start for group in members.values()}) == len(members) else {}


def _members(reports: dict[int, GroupReport], size: int) -> Sequence[int]:
    """The ranks of a group, by place: those that report, and the few that have to be between or
    behind them in a regular mesh."""
    places: dict[int, int] = {}
    for rank, report in reports.items():
        places.setdefault(report.place, rank)
    known = [places[place] for place in sorted(places)]
    count = _dividing(max(2, max(places) + 1), size)
    first, last = min(places), max(places)
    missing = count - len(known)
    if len(known) < _LEAST_KNOWN or not 0 < missing <= len(known) // _LEAST_KNOWN:
        return known
    step, rest = divmod(places[last] - places[first], last - first)
    start = places[first] - step * first
    if rest or step < 1 or any(places[place] != start + step * place for place in places):
        return known
    ranks = range(start, start + step * count, step)
    return ranks if start >= 0 and ranks[-1] < size else known


def _dividing(least: int, size: int) -> int:
    """The number of members, ``least`` or more, that a group can have in a mesh of ``size`` ranks,
    which it divides."""
    return next((count for count in range(least, size + 1) if size % count == 0), least)


def _with_only_candidates(groups: dict[str, _Group], by_rank: dict[int, RankReport], size: int) -> dict[str, _Group]:
    """Complete the groups that lack one member where only one rank can be it.

    That is none of the group's, and none of another group's of the same description, as these
    divide the ranks among them. Where one group lacks a member, and one such rank has no call in
    flight, it is that one.
    """
    idle = {rank for rank, report in by_rank.items() if not report.is_in_flight}
    candidates: dict[str, set[int]] = {}
    for name, group in groups.items():
        lacks_one = len(group.ranks) + 1 == _dividing(group.least_size, size)
        if lacks_one and group.description and not group.is_complete and not group.fault and len(by_rank) == size:
            siblings = {
                rank for each in groups.values() if each.description == group.description for rank in each.ranks
            }
            candidates[name] = set(range(size)) - siblings
    completed = dict(groups)
    for name, ranks in candidates.items():
        only = ranks & idle if len(candidates) == 1 and len(ranks & idle) == 1 else ranks
        if len(only) == 1:
            completed[name] = replace(groups[name], ranks=tuple(sorted((*groups[name].ranks, *only))))
    return completed


# Logs


def _log(
    report: RankReport,
    groups: dict[str, _Group],
    ranks: tuple[int, ...],
    *,
    only_oldest: bool = False,
) -> RankLog:
    """The log of a rank. ``only_oldest``: of its calls in flight only the one that was enqueued
    first has begun."""
    in_flight = sorted(
        (group for group in report.groups.values() if group.call),
        key=lambda group: group.call.issued_ns if group.call else 0,
    )
    begun = in_flight[:1] if only_oldest else in_flight
    group_logs, calls = list[GroupLog](), list[CallLog]()
    for name, own in report.groups.items():
        group = groups[name]
        if group.fault and own.call is None:
            continue
        if own.call is not None:
            thread = begun.index(own) + 1 if own in begun else 0
            calls.append(_call(len(group_logs), own, own.call, group, thread))
        done = own.call.number - 1 if own.call else own.completed
        # One whose numbers cannot be compared is the rank's own, so that its call waits for nobody
        # known.
        members = (report.rank,) if group.fault else group.ranks
        has_begun = own in begun or own.call is None
        group_logs.append(
            GroupLog(
                key=f"{group.name}|{','.join(map(str, members))}",
                name=group.name,
                ranks=members,
                description=group.description,
                issued=max(own.enqueued, own.call.number if own.call else 0) if has_begun else done,
                done=done,
            )
        )
    return inferred_log(
        job=report.job,
        rank=report.rank,
        ranks=ranks,
        reason="timeout",
        now_ns=report.last_ns,
        groups=group_logs,
        calls=calls,
    )


def _call(place: int, own: GroupReport, call: TimedOutCall, group: _Group, thread: int) -> CallLog:
    is_message = call.kind in _MESSAGES
    return CallLog(
        group=place,
        number=call.number,
        kind=call.kind if is_message else collective_kind(call.kind),
        site=own.site,
        state="started" if own.started >= call.number else "issued",
        elements=-1 if is_message or group.fault else call.elements,
        thread=thread,
        is_async=True,
        issued_ns=call.issued_ns,
    )


def _has_order(reports: Iterable[RankReport]) -> bool:
    """Tell whether the calls that each rank has in flight have times far enough from each other to
    tell their order."""
    for report in reports:
        times = sorted(group.call.issued_ns for group in report.groups.values() if group.call)
        pairs = itertools.pairwise(times)
        if len(times) > 1 and (not times[0] or any(later - earlier < _LEAST_APART_NS for earlier, later in pairs)):
            return False
    return True


# What was inferred, and what is open


def _assumed(groups: dict[str, _Group], diagnosis: Diagnosis) -> list[str]:
    culprits = {missing.call.rank for missing in _culprits(diagnosis)}
    sentences = []
    inferred = [str(group) for group in groups.values() if group.silent and not group.is_complete]
    if inferred:
        sentences.append(
            f"members of {listed('group', inferred, 4)} are taken from those that report, and from even spacing as in a mesh"
        )
    for group in groups.values():
        silent = sorted(culprits & set(group.silent))
        if silent:
            sentences.append(
                f"{listed('rank', silent, 8)} would have reported a timeout of group {group} too, had the call been made within "
                f"{group.followed_s:.0f} s of the others'"
            )
    return sentences


def _messengers(groups: dict[str, _Group]) -> Iterator[str]:
    """Which group only passes the failure on: the one of all ranks, through whose store ranks tell
    each other to dump."""
    in_flight = {name for name, group in groups.items() if any(each.call for each in group.reports.values())}
    for name, group in groups.items():
        numbers = {(each.enqueued, each.completed) for each in group.reports.values()}
        if in_flight - {name} and name not in in_flight and len(numbers) == 1 and all(a == b for a, b in numbers):
            yield f"group {group} only passes the failure on: none of its calls is in flight on any rank whose lines are here"


def _open(groups: dict[str, _Group]) -> list[str]:
    """Say what is known of each group whose calls timed out, and why it does not say who is
    behind."""
    sentences: dict[str, int] = {}
    for group in groups.values():
        calls = {rank: report.call for rank, report in group.reports.items() if report.call is not None}
        if not calls:
            continue
        which = sorted({f"{collective_kind(call.kind)} #{call.number}" for call in calls.values()})
        first = min(call.number for call in calls.values())
        behind = [rank for rank, report in group.reports.items() if report.enqueued < first]
        why = (
            "all members whose lines are here have enqueued it: another one has not, or the transfer itself hangs "
            "(network, device)"
        )
        if behind:
            have = "has" if len(behind) == 1 else "have"
            why = f"{listed('rank', behind, 8)} {have} not come to it, held up in another group"
        sentence = (
            f"cannot tell what holds up group {shortened(str(group))}: {listed('rank', sorted(calls), 8)} timed out in "
            f"{' or '.join(which[:4])}, and {group.fault or why}"
        )
        sentences[sentence] = len(calls)
    if not sentences:
        return ["cannot tell: no line names a call that has timed out", _SWITCHES]
    shown = sorted(sentences, key=lambda sentence: -sentences[sentence])[:_MOST_GROUPS]
    others = len(sentences) - len(shown)
    return [
        *shown,
        *([f"nor what holds up {counted(others, 'more group')}"] if others else []),
        _SWITCHES,
    ]
