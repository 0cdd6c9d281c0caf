"""A diagnosis in words: which ranks, in which calls, from where in the program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from commlayer.calls.group_life import LIFE_KEY
from commlayer.diagnosis.call_logs import MAKING, CallLog, RankLog, Site
from commlayer.diagnosis.findings import (
    Cause,
    Cycle,
    Diagnosis,
    GroupCalls,
    Mismatch,
    Missing,
    NamedCall,
    Shared,
    Trouble,
    Waiter,
)
from commlayer.diagnosis.long_waits import LongWait
from commlayer.profiles.counted import counted
from commlayer.profiles.printable import printable
from commlayer.units import format_binary

__all__ = [
    "call_words",
    "headline",
    "in_words",
    "log_words",
    "one_line",
    "ranks_words",
    "short_call",
    "wait_words",
    "waits_words",
]

_MOST_RANKS = 16
_MOST_CALLS = 8
_MOST_GROUPS = 12
_LAST_CALLS = 10
_WAYS = {"send": "to", "recv": "from"}


def in_words(diagnosis: Diagnosis) -> str:
    """The whole diagnosis, some lines of text."""
    lines = [] if diagnosis.cause is None else [_cause(diagnosis.cause)]
    for finding in diagnosis.findings:
        lines += _finding(finding)
    for missing in diagnosis.waits:
        lines += _missing(missing)
    for shared in diagnosis.shared:
        lines += _shared(shared)
    if diagnosis.under_way and not (diagnosis.findings or diagnosis.waits or diagnosis.shared):
        lines += _under_way(diagnosis.under_way)
    lines += diagnosis.open
    lines += _last_calls(diagnosis.groups)
    if not lines:
        lines = ["nothing is wrong: no rank waits for another one, and all calls that can be compared agree"]
    if diagnosis.without:
        lines.append(f"no log of {ranks_words(diagnosis.without)}, of {len(diagnosis.ranks)}")
    lines += diagnosis.remarks
    lines += [f"assumed: {each}" for each in diagnosis.assumed]
    return "\n".join(lines)


def _cause(cause: Cause) -> str:
    """The cause, with how sure it is."""
    sure = {"proven": "cause", "likely": "likely cause"}
    return f"{sure.get(cause.certainty, 'the cause cannot be told')}: {cause.words}"


def _last_calls(groups: Sequence[GroupCalls]) -> list[str]:
    """The groups in which calls have not ended, and how far each of their ranks has come."""
    lines = ["last calls:"] if groups else []
    for group in groups[:_MOST_GROUPS]:
        states = []
        for last in group.last[:_MOST_CALLS]:
            if last.is_assumed:
                states.append(
                    f"{ranks_words(last.ranks)}: not in {'its ring' if len(last.ranks) == 1 else 'their rings'}"
                )
                continue
            if last.call is None:
                states.append(f"{ranks_words(last.ranks)}: {last.made} made, {last.done} ended")
                continue
            state = "ended" if last.done >= last.made else "has not ended"
            what = f"{short_call(last.call)} at {last.call.site}, {state}"
            states.append(f"{ranks_words(last.ranks)}: {what}")
        lines.append(f"  group {group.group}: {'; '.join(states)}")
    if len(groups) > _MOST_GROUPS:
        lines.append(f"  and {len(groups) - _MOST_GROUPS} more groups")
    return lines


def one_line(diagnosis: Diagnosis) -> str:
    """The first finding in one sentence, and how many more there are."""
    if diagnosis.cause is not None:
        return _cause(diagnosis.cause)
    findings = [*diagnosis.findings, *diagnosis.waits]
    if not findings:
        return in_words(diagnosis).splitlines()[0]
    more = f", and {len(findings) - 1} more" if len(findings) > 1 else ""
    return f"{headline(findings[0])}{more}"


def wait_words(log: RankLog, wait: LongWait, diagnosis: Diagnosis, folder: Path) -> str:
    """The long wait of the rank of ``log`` in a line: since when, in which call, for whom, and how
    to see more."""
    index = next(index for index, group in enumerate(log.groups) if group.key == wait.key)
    group = str(log.groups[index])
    call = NamedCall(
        rank=log.rank, group=group, kind=wait.kind, number=wait.number, peer=wait.peer, tag=wait.tag, site=None
    )
    what = index, wait.kind, wait.number, wait.peer, wait.tag
    for each in log.calls:
        if (each.group, each.kind, each.number, each.peer, each.tag) == what:
            call = NamedCall.of_log(log.rank, group, each)
    at = "" if call.site is None else f", called at {call.site}"
    has_found = diagnosis.findings or diagnosis.waits
    why = one_line(diagnosis) if has_found else "no rank is found that it waits for"
    return (
        f"rank {log.rank} has waited for {(log.now_ns - wait.since_ns) / 1e9:.0f} s in {call_words(call)}{at}: {why}. "
        f"To see where every rank is: kill -USR1 {log.pid} on {printable(log.host)}, or commlayer diagnose {folder} there"
    )


def headline(finding: Trouble) -> str:
    """The finding in one sentence."""
    return _finding(finding)[0].rstrip(":")


def _finding(finding: Trouble) -> list[str]:
    if isinstance(finding, Cycle):
        return _cycle(finding)
    return _mismatch(finding) if isinstance(finding, Mismatch) else _missing(finding)


def _cycle(cycle: Cycle) -> list[str]:
    ranks = sorted({step.call.rank for step in cycle.steps})
    if len(ranks) == 1:
        lines = [f"{ranks_words(ranks)} waits for itself:"]
    else:
        lines = [f"{ranks_words(ranks)} wait for each other, in a circle of {len(cycle.steps)}:"]
    for step in cycle.steps:
        missing = step.missing
        lines.append(f"  rank {step.call.rank} waits in {call_words(step.call)}, {_where(step.call, step.site)},")
        # One that has been called is queued behind the group's calls before it.
        lines.append(f"    for rank {missing.rank}, which has {_not_come(missing)} of group {missing.group}")
    if cycle.behind:
        are = "waits" if len(cycle.behind) == 1 else "wait"
        lines.append(f"  {ranks_words(cycle.behind)} {are} for these")
    return lines


def _not_come(missing: NamedCall) -> str:
    """A call that a rank has not made, or that its host has enqueued and its device has not begun."""
    if missing.state != "issued":
        return f"not come to {_short(missing)}"
    return f"enqueued and not begun {_short(missing)}, at {missing.site},"


def _where(call: NamedCall, site: Site) -> str:
    """The place of a wait, and of the call that it is for where that is another one."""
    if call.site is None or call.site == site:
        return f"at {site}"
    return f"called at {call.site} and waited for at {site}"


def _mismatch(found: Mismatch) -> list[str]:
    what = "message" if found.calls[0].kind in ("send", "recv") else "call"
    verb = "differs" if len(found.odd) == 1 else "differ"
    lines = [f"{ranks_words(found.odd)} {verb} in {what} #{found.number} of group {found.group}: {found.words}:"]
    for ranks, call in _alike(found.calls):
        lines.append(f"  {ranks_words(ranks)}: {call_words(call)}, at {call.site}")
    if found.hint:
        lines.append(f"  {found.hint}")
    return lines


def _alike(calls: Sequence[NamedCall]) -> list[tuple[list[int], NamedCall]]:
    """The calls without those that read the same, and the ranks that made each."""
    alike: dict[tuple[str, str], tuple[list[int], NamedCall]] = {}
    for call in calls:
        alike.setdefault((call_words(call), str(call.site)), ([], call))[0].append(call.rank)
    return sorted(alike.values(), key=lambda each: len(each[0]))[:_MOST_CALLS]


def _missing(missing: Missing) -> list[str]:
    call = missing.call
    state = {
        "gone": f"has ended ({missing.how or 'it is no more'}) before",
        "late": "has not come to",
        "held": "has not come to",
        "silent": "left no dump or log, and may not have come to",
    }[missing.why]
    waiting = sorted({waiter.call.rank for waiter in missing.waiting})
    are = "waits" if len(waiting) == 1 else "wait"
    who = f"{'a thread of ' if missing.why == 'held' else ''}{ranks_words(waiting)}"
    lines = [f"rank {call.rank} {state} {_short(call)} of group {call.group}, for which {who} {are}:"]
    if missing.at is not None:
        lines.append(f"  rank {call.rank} is at {missing.at}, in no call")
    if missing.last is not None:
        since = f", {missing.idle_s:.1f} s ago" if missing.idle_s >= 0 else ""
        begun = ", enqueued and not begun," if missing.last.state == "issued" else ""
        lines.append(f"  its last call{begun} was {call_words(missing.last)}, at {missing.last.site}{since}")
    lines += _waiting("", (*missing.held, *missing.waiting))
    return lines + _waiting("behind it ", missing.behind)


def _shared(shared: Shared) -> list[str]:
    use = "uses" if len(shared.ranks) == 1 else "use"
    calls = [
        f"  rank {each.call.rank} in {call_words(each.call)}, {_where(each.call, each.site)}" for each in shared.calls
    ]
    return [
        f"{ranks_words(shared.ranks)} {use} group {shared.group} from several threads at once:",
        *calls[:_MOST_CALLS],
        "  whose calls have no order that is the same on all ranks: give each thread a group of its own",
    ]


def _waiting(before: str, waiters: Sequence[Waiter]) -> list[str]:
    lines = []
    for ranks, waiter in _waiters(waiters):
        are = "waits" if len(ranks) == 1 else "wait"
        words = f"{call_words(waiter.call)}, {_where(waiter.call, waiter.site)}"
        lines.append(f"  {before}{ranks_words(ranks)} {are} in {words}")
    return lines


def _under_way(waiters: Sequence[Waiter]) -> list[str]:
    ranks = sorted({waiter.call.rank for waiter in waiters})
    are = "waits" if len(ranks) == 1 else "wait"
    lines = [
        f"no call is missing, and all that can be compared agree; {ranks_words(ranks)} {are} for the end of calls:"
    ]
    for alike, waiter in _waiters(waiters):
        are = "waits" if len(alike) == 1 else "wait"
        where = f"{call_words(waiter.call)}, {_where(waiter.call, waiter.site)}"
        lines.append(f"  {ranks_words(alike)} {are} in {where}, for {waiter.waited_s:.1f} s")
    return lines


def _waiters(waiters: Sequence[Waiter]) -> list[tuple[list[int], Waiter]]:
    alike: dict[tuple[str, str], tuple[list[int], Waiter]] = {}
    for waiter in waiters:
        alike.setdefault((call_words(waiter.call), str(waiter.site)), ([], waiter))[0].append(waiter.call.rank)
    return list(alike.values())[:_MOST_CALLS]


def _short(call: NamedCall) -> str:
    return f"{short_call(call)}, tag {call.tag}," if call.tag and call.kind in _WAYS else short_call(call)


def short_call(call: NamedCall) -> str:
    """A call's kind and number, and a message's other end."""
    if call.kind in MAKING:  # each makes one group
        return call.kind
    if call.kind not in _WAYS:
        return f"{call.kind} #{call.number}"
    return f"{call.kind} #{call.number} {_WAYS[call.kind]} {'any rank' if call.peer < 0 else f'rank {call.peer}'}"


def call_words(call: NamedCall) -> str:
    """A call: its kind and number, what it moves, and its group."""
    about = [call.dtype, format_binary(call.num_bytes) if call.num_bytes >= 0 else "", call.op]
    about += [counted(call.elements, "element")] if call.elements >= 0 else []
    about += [f"root {call.root}" if call.root >= 0 else "", printable(call.stage)]
    inside = ", ".join(word for word in about if word and call.kind != "barrier")
    return f"{_short(call)}{f' ({inside})' if inside else ''} of group {call.group}"


def ranks_words(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0, 1 and 4``."""
    listed = [str(rank) for rank in ranks]
    if len(listed) == 1:
        return f"rank {listed[0]}"
    if len(listed) > _MOST_RANKS:
        return f"ranks {', '.join(listed[:_MOST_RANKS])} and {len(listed) - _MOST_RANKS} more"
    return f"ranks {', '.join(listed[:-1])} and {listed[-1]}"


def waits_words(ranks: Sequence[int]) -> str:
    """``rank 3 waits``, ``ranks 0 and 1 wait``."""
    return f"{ranks_words(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def log_words(log: RankLog) -> str:
    """One rank's own log: where it is, what it waits for, and its last calls."""
    lines = [f"rank {log.rank} (process {log.pid} on {printable(log.host)}):"]
    lines += [f"  thread {printable(thread.name)} is at {thread.site}" for thread in log.threads]
    if log.hidden:
        among = ", among them the main thread" if log.main in log.hidden else ""
        lines.append(f"  {len(log.hidden)} more threads not shown{among}")
    for wait in log.waits:
        lines.append(f"  waits at {wait.site} for {wait.kind} #{wait.number} of group {log.groups[wait.group]}")
    for group in (each for each in log.groups if not each.key.endswith(LIFE_KEY)):
        lines.append(f"  group {group}: {group.issued} calls made, {group.done} done")
    lines += [f"  {_logged(log, call)}" for call in log.calls[-_LAST_CALLS:]]
    return "\n".join(lines)


def _logged(log: RankLog, call: CallLog) -> str:
    shown = NamedCall.of_log(log.rank, str(log.groups[call.group]), call)
    age_s = (log.now_ns - call.issued_ns) / 1e9
    return f"{call.state:7} {call_words(shown)}, at {call.site}, {age_s:.1f} s ago"
