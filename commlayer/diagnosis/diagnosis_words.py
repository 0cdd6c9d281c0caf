"""A diagnosis in words: which ranks, in which calls, from where in the program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from commlayer.calls.group_life import LIFE_KEY
from commlayer.diagnosis.call_logs import MAKING, RankLog, Site
from commlayer.diagnosis.findings import (
    Cause,
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
_Item = TypeVar("_Item", NamedCall, Waiter)
_WAYS = {"send": "to", "recv": "from"}


def in_words(diagnosis: Diagnosis) -> str:
    """The whole diagnosis, some lines of text."""
    lines = [] if diagnosis.cause is None else [_cause(diagnosis.cause)]
    for finding in (*diagnosis.findings, *diagnosis.waits):
        lines += _finding(finding)
    for shared in diagnosis.shared:
        lines += _shared(shared)
    if diagnosis.under_way and not (diagnosis.findings or diagnosis.waits or diagnosis.shared):
        who = waits_words(sorted({waiter.call.rank for waiter in diagnosis.under_way}))
        lines.append(f"no call is missing, and all that can be compared agree; {who} for the end of calls:")
        lines += _waiting(diagnosis.under_way, has_times=True)
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
            state = f"{last.made} made, {last.done} ended"
            if last.is_assumed:
                state = f"not in {'its ring' if len(last.ranks) == 1 else 'their rings'}"
            elif last.call is not None:
                has_ended = "ended" if last.done >= last.made else "has not ended"
                state = f"{short_call(last.call)} at {last.call.site}, {has_ended}"
            states.append(f"{ranks_words(last.ranks)}: {state}")
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
    call = NamedCall(rank=log.rank, group=group, kind=wait.kind, number=wait.number, peer=wait.peer, tag=wait.tag)
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
    if isinstance(finding, Missing):
        return _missing(finding)
    if isinstance(finding, Mismatch):
        what = "message" if finding.calls[0].kind in _WAYS else "call"
        verb = "differs" if len(finding.odd) == 1 else "differ"
        where = f"{what} #{finding.number} of group {finding.group}"
        lines = [f"{ranks_words(finding.odd)} {verb} in {where}: {finding.words}:"]
        for ranks, call in sorted(_alike(finding.calls), key=lambda each: len(each[0]))[:_MOST_CALLS]:
            lines.append(f"  {ranks_words(ranks)}: {call_words(call)}, at {call.site}")
        return [*lines, *([f"  {finding.hint}"] if finding.hint else [])]
    ranks = sorted({step.call.rank for step in finding.steps})
    lines = [f"{ranks_words(ranks)} wait for each other, in a circle of {len(finding.steps)}:"]
    if len(ranks) == 1:
        lines = [f"{ranks_words(ranks)} waits for itself:"]
    for step in finding.steps:
        missing = step.missing
        lines.append(f"  rank {step.call.rank} waits in {call_words(step.call)}, {_where(step.call, step.site)},")
        come = f"not come to {_short(missing)}"
        if missing.state == "issued":  # queued behind the group's calls before it, or enqueued on a device
            come = f"enqueued and not begun {_short(missing)}, at {missing.site},"
        lines.append(f"    for rank {missing.rank}, which has {come} of group {missing.group}")
    return [*lines, *([f"  {waits_words(finding.behind)} for these"] if finding.behind else [])]


def _where(call: NamedCall, site: Site) -> str:
    """The place of a wait, and of the call that it is for where that is another one."""
    if call.site is None or call.site == site:
        return f"at {site}"
    return f"called at {call.site} and waited for at {site}"


def _alike(items: Sequence[_Item]) -> list[tuple[list[int], _Item]]:
    """The calls, or the waits in calls, without those that read the same, and the ranks of each."""
    alike: dict[tuple[str, str], tuple[list[int], _Item]] = {}
    for item in items:
        call = item.call if isinstance(item, Waiter) else item
        alike.setdefault((call_words(call), str(item.site)), ([], item))[0].append(call.rank)
    return list(alike.values())


def _missing(missing: Missing) -> list[str]:
    call = missing.call
    state = {
        "gone": f"has ended ({missing.how or 'it is no more'}) before",
        "late": "has not come to",
        "held": "has not come to",
        "silent": "left no dump or log, and may not have come to",
    }[missing.why]
    who = waits_words(sorted({waiter.call.rank for waiter in missing.waiting}))
    who = f"{'a thread of ' if missing.why == 'held' else ''}{who}"
    lines = [f"rank {call.rank} {state} {_short(call)} of group {call.group}, for which {who}:"]
    if missing.at is not None:
        lines.append(f"  rank {call.rank} is at {missing.at}, in no call")
    if missing.last is not None:
        since = f", {missing.idle_s:.1f} s ago" if missing.idle_s >= 0 else ""
        begun = ", enqueued and not begun," if missing.last.state == "issued" else ""
        lines.append(f"  its last call{begun} was {call_words(missing.last)}, at {missing.last.site}{since}")
    return [*lines, *_waiting((*missing.held, *missing.waiting)), *_waiting(missing.behind, "behind it ")]


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


def _waiting(waiters: Sequence[Waiter], before: str = "", *, has_times: bool = False) -> Iterator[str]:
    for ranks, waiter in _alike(waiters)[:_MOST_CALLS]:
        since = f", for {waiter.waited_s:.1f} s" if has_times else ""
        yield f"  {before}{waits_words(ranks)} in {call_words(waiter.call)}, {_where(waiter.call, waiter.site)}{since}"


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
    for call in log.calls[-_LAST_CALLS:]:
        shown = NamedCall.of_log(log.rank, str(log.groups[call.group]), call)
        age_s = (log.now_ns - call.issued_ns) / 1e9
        lines.append(f"  {call.state:7} {call_words(shown)}, at {call.site}, {age_s:.1f} s ago")
    return "\n".join(lines)
