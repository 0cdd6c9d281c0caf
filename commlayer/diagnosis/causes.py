"""The cause of a hang in one sentence, and how sure it is.

A diagnosis lists all that is wrong: circles, calls that differ, ranks that do not come. Most of these
are consequences of one thing. A rank that has left a call out ends in a circle, in calls that differ,
or alone, by what comes next in its program. Places tell it: from the lost call on, the rank makes its
calls of the group from the places that the others reach one call later.

Rejected: judging by places where nothing hangs. Ranks may make one call from different places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from commlayer.calls.group_life import LIFE_KEY
from commlayer.calls.ring import MESSAGES
from commlayer.diagnosis.call_logs import NO_THREAD, CallLog, RankLog
from commlayer.diagnosis.diagnosis_words import call_words, ranks_words, short_call
from commlayer.diagnosis.findings import (
    Cause,
    Cycle,
    Diagnosis,
    GroupCalls,
    LastCalls,
    Mismatch,
    Missing,
    NamedCall,
    Waiter,
)
from commlayer.diagnosis.matching import shared_signature

__all__ = ["with_cause"]

_MOST_CALLS = 4
_MOST_GROUPS = 64
_MOST_EXTENDED = 16
"""The number of calls that are inferred at most beyond a rank's last one: numbers in files may be
of any size."""
_ENOUGH_ALIKE = 16
"""The number of calls that two ranks make from the same places, after which it is likely that they
have made equally many before."""
_CERTAINTIES = ("unknown", "likely", "proven")
_Calls = Mapping[int, CallLog]
"""Calls of a rank in one group, by number."""


def with_cause(
    diagnosis: Diagnosis,
    logs: Sequence[RankLog],
    circles_are: str = "proven",
    at_most: str = "proven",
    *,
    knows_members: bool = False,
) -> Diagnosis:
    """Return the diagnosis with its cause, and with each group's last calls.

    Args:
        logs: the logs that it was made from.
        circles_are: ``proven``, ``likely`` where what ranks wait for was partly inferred, or
            ``unknown`` where it is known to lack calls.
        at_most: the most that can be said of any cause: ``likely`` where the logs were inferred.
        knows_members: the logs list the ranks of all groups, so that no other rank is in a call that does not end.
    """
    if not diagnosis.has_found and not (diagnosis.is_timeout and diagnosis.under_way):
        return diagnosis
    groups = _groups(logs)
    shift = _first_shift(groups)
    cause = shift or _cause(diagnosis, logs, groups, circles_are, knows_members=knows_members)
    if cause is not None:
        cause = msgspec.structs.replace(cause, certainty=_lesser(cause.certainty, at_most))
    return msgspec.structs.replace(diagnosis, cause=cause, groups=tuple(_last_calls(groups)))


def _lesser(*certainties: str) -> str:
    return min(certainties, key=_CERTAINTIES.index)


def _cause(
    diagnosis: Diagnosis, logs: Sequence[RankLog], groups: Sequence[_Group], circles_are: str, *, knows_members: bool
) -> Cause | None:
    for finding in diagnosis.findings:
        if isinstance(finding, Mismatch):
            return _differing(finding, bool(diagnosis.shared))
    for finding in diagnosis.findings:
        if isinstance(finding, Cycle):
            return _order(finding, circles_are)
    missing = [each for each in diagnosis.findings if isinstance(each, Missing)]
    for why in ("late", "silent"):  # a rank that is seen in no call, before one of which nothing is seen
        missing = missing or [each for each in _doubted_by_idle(diagnosis.waits, logs) if each.why == why]
    if missing:
        return _absent(missing, groups)
    stalled = _stalled(diagnosis, groups, knows_members=knows_members)
    return stalled or (_absent(diagnosis.waits, groups) if diagnosis.waits else None)


def _doubted_by_idle(waits: Sequence[Missing], logs: Sequence[RankLog]) -> list[Missing]:
    """The waits. Of a rank of which nothing is seen it cannot be told whether it waits too, where a rank is in no call."""
    idle = sorted(log.rank for log in logs if not log.waits and all(each.issued == each.done for each in log.groups))
    if not idle:
        return list(waits)
    doubt = f"it may wait for {ranks_words(idle)}, which {'is' if len(idle) == 1 else 'are'} seen in no call"
    return [
        msgspec.structs.replace(each, doubt="; ".join(filter(None, (each.doubt, doubt))), certainty="unknown")
        if each.why == "silent" and each.at is None
        else each
        for each in waits
    ]


# Calls that a rank has left out, or made too many


class _Group(msgspec.Struct, kw_only=True):
    """A group in all logs: ``calls`` of each rank, and how many it has ``made`` and ``done``;
    ``assumed``: the ranks of which these numbers are taken for granted."""

    name: str
    ranks: tuple[int, ...]
    calls: dict[int, dict[int, CallLog]]
    made: dict[int, int]
    done: dict[int, int]
    assumed: set[int] = set()


def _groups(logs: Sequence[RankLog]) -> list[_Group]:
    groups: dict[str, _Group] = {}
    for log in logs:
        own = []
        for each in log.groups:
            group = groups.get(each.key)
            if group is None:
                group = _Group(name=str(each), ranks=each.ranks, calls={}, made={}, done={})
                groups[each.key] = group
            group.made[log.rank], group.done[log.rank] = each.issued, each.done
            group.assumed |= {log.rank} if each.is_assumed else set()
            own.append(group.calls.setdefault(log.rank, {}))
        for call in log.calls:
            if not call.is_message and not log.groups[call.group].key.endswith(LIFE_KEY):
                own[call.group][call.number] = call
    return list(groups.values())


def _first_shift(groups: Iterable[_Group]) -> Cause | None:
    """The first group in which one rank's calls are the others' with one left out, or one more."""
    for group in groups:
        calls = {rank: each for rank, each in group.calls.items() if each}
        if len(calls) < 2:
            continue
        number, odd = _first_unlike(calls)
        if len(odd) != 1:
            continue
        others = [each for each in calls if each != odd[0] and number in calls[each]]
        other, is_pair = others[0], len(others) == 1  # which one of two is at fault is not seen
        if _is_by_threads(calls[odd[0]], calls[other], number):
            return _threads(group, odd[0], other, number, is_pair=is_pair)
        pairs = [(odd[0], other), (other, odd[0])]
        pairs = [pair for pair in pairs[: 2 if is_pair else 1] if _is_known(calls[pair[0]], calls[pair[1]], number)]
        if pairs and all(_has_gone_on(calls[rank], number) for rank in pairs[0]):
            return _apart(group, odd[0], other, number, is_pair=is_pair)
        for its, theirs in pairs:
            shift = _shift(calls[its], calls[theirs], number)
            if shift:
                return _shifted(group, its, theirs, number, shift, is_pair=is_pair)
    return None


def _first_unlike(calls: Mapping[int, _Calls]) -> tuple[int, list[int]]:
    """The first number of which ranks make unlike calls, or from unlike places, and those that
    differ from most others."""
    numbers = sorted({number for each in calls.values() for number in each})
    for number in numbers:
        identities = {rank: _identity(each[number]) for rank, each in calls.items() if number in each}
        counts = Counter(identities.values())
        if len(counts) > 1:
            most = counts.most_common(1)[0][0]
            return number, [rank for rank, each in identities.items() if each != most]
    return 0, []


def _identity(call: CallLog) -> tuple[object, ...]:
    return *shared_signature(call), call.site


def _is_known(its: _Calls, theirs: _Calls, number: int) -> bool:
    """Whether both have made the other one's call ``number`` under one number before.

    Ranks that take turns at two places, as where each broadcasts in its turn, are never at one place.
    """
    apart = _identity(theirs[number])
    return any(
        at < number and at in its and _identity(its[at]) == _identity(call) == apart for at, call in theirs.items()
    )


def _shift(its: _Calls, theirs: _Calls, number: int) -> int:
    """1: from ``number`` on, a rank's calls are those that others make one later; −1: one before;
    0: neither."""
    ahead = dict(theirs)
    for _ in range(_MOST_EXTENDED):
        if max(ahead) > max(its) or not _extend(ahead):
            break
    if _runs(its, ahead, number, 1):
        return 1
    if _runs(its, ahead, number, -1):
        return -1
    # Where all calls are alike, those behind one of another kind would also be the others' own next ones.
    is_replaced = shared_signature(its[number]) != shared_signature(theirs[number])
    is_replaced = is_replaced and _runs(its, ahead, number + 1, 0)
    return -1 if _runs(its, ahead, number + 1, -1) and not is_replaced else 0


def _is_by_threads(its: _Calls, theirs: _Calls, number: int) -> bool:
    """Whether two ranks make two calls in two orders, and a rank makes them from two threads."""
    pairs = [(calls.get(number), calls.get(number + 1)) for calls in (its, theirs)]
    makers = [{call.maker for call in pair if call is not None} for pair in pairs]
    (its_first, its_second), (their_first, their_second) = pairs
    swaps = [
        one is not None and two is not None and _identity(one) == _identity(two)
        for one, two in ((its_first, their_second), (its_second, their_first))
    ]
    return any(len(each - {NO_THREAD}) > 1 for each in makers) and any(swaps)


def _has_gone_on(calls: _Calls, number: int) -> bool:
    """Whether a rank had made call ``number`` after the one before it earlier too, as at a step's end.

    Where each of two ranks has, neither has left a single call out: their steps differ.
    """
    pairs = [(_identity(calls[at - 1]), _identity(calls[at])) for at in calls if at <= number and at - 1 in calls]
    return number - 1 in calls and pairs.count((_identity(calls[number - 1]), _identity(calls[number]))) > 1


def _extend(calls: dict[int, CallLog]) -> bool:
    """Add the call that would come next, if the last one was followed by another one before."""
    last = max(calls)
    for number in sorted(calls, reverse=True):
        is_same = number != last and _identity(calls[number]) == _identity(calls[last])
        if is_same and number + 1 in calls:
            calls[last + 1] = calls[number + 1]
            return True
    return False


def _runs(its: _Calls, theirs: _Calls, first: int, shift: int) -> bool:
    pairs = [(its[at], theirs.get(at + shift)) for at in sorted(its) if at >= first]
    return bool(pairs) and all(other is not None and _identity(call) == _identity(other) for call, other in pairs)


def _shifted(group: _Group, rank: int, other: int, number: int, shift: int, *, is_pair: bool) -> Cause:
    left, made = "left out a call", "made a call too many"
    who = f"rank {rank} has {left if shift > 0 else made} of group {group.name}"
    if is_pair:
        who += f", or rank {other} has {made if shift > 0 else left}"
    return _unlike(group, rank, other, number, "skipped" if shift > 0 else "extra", who, is_pair=is_pair)


def _apart(group: _Group, rank: int, other: int, number: int, *, is_pair: bool) -> Cause:
    who = f"rank {rank} or rank {other}" if is_pair else f"rank {rank}"
    who += f" is at another place of its steps, as it has made more calls of group {group.name}, or fewer"
    return _unlike(group, rank, other, number, "steps", who, is_pair=is_pair)


def _threads(group: _Group, rank: int, other: int, number: int, *, is_pair: bool) -> Cause:
    who = (
        f"threads of a rank make calls of group {group.name} in no certain order (give each thread a group of its own)"
    )
    return _unlike(group, rank, other, number, "threads", who, is_pair=is_pair)


def _unlike(group: _Group, rank: int, other: int, number: int, what: str, who: str, *, is_pair: bool) -> Cause:
    """A cause that follows from what ``rank`` makes as a call, and ``other`` as the same one."""
    call = NamedCall.of_log(rank, group.name, group.calls[rank][number])
    theirs = NamedCall.of_log(other, group.name, group.calls[other][number])
    return Cause(
        what=what,
        certainty="likely",
        ranks=(rank, other) if is_pair else (rank,),
        calls=(call, theirs),
        words=(
            f"{who}: as call #{number} rank {rank} makes {call.kind} at {call.site}, "
            f"rank {other} {theirs.kind} at {theirs.site}"
        ),
    )


# Other causes


def _differing(found: Mismatch, has_shared: bool) -> Cause:
    has_majority = 2 * len(found.odd) < len(found.calls)
    ranks = found.odd if has_majority else tuple(call.rank for call in found.calls)
    calls = tuple(call for call in found.calls if call.rank in ranks)
    at = "; ".join(f"rank {call.rank} at {call.site}" for call in calls[:_MOST_CALLS])
    return Cause(
        what="threads" if has_shared else found.what,
        certainty="proven",
        ranks=ranks,
        calls=calls,
        words=f"call #{found.number} of group {found.group} is not one call: {found.words} ({at})",
    )


def _order(cycle: Cycle, certainty: str) -> Cause:
    calls = tuple(msgspec.structs.replace(step.call, site=step.call.site or step.site) for step in cycle.steps)
    ranks = tuple(sorted({call.rank for call in calls}))
    groups = sorted({call.group for call in calls})
    waits = ", ".join(
        f"rank {call.rank} waits in {short_call(call)} of group {call.group} at {call.site}"
        for call in calls[:_MOST_CALLS]
    )
    more = f", and {len(calls) - _MOST_CALLS} more" if len(calls) > _MOST_CALLS else ""
    do = (
        f"make their calls of groups {', '.join(groups)} in different orders"
        if len(groups) > 1
        else f"make their calls of group {groups[0]} in different orders"
    )
    if len(ranks) == 1:
        do = "waits for a call of its own"
    return Cause(
        what="order",
        certainty=certainty,
        ranks=ranks,
        calls=calls,
        words=f"{ranks_words(ranks)} {do}: {waits}{more}",
    )


def _absent(missing: Sequence[Missing], groups: Sequence[_Group]) -> Cause:
    first = max(missing, key=lambda each: len(each.waiting) + len(each.behind))
    sureness = _sureness(first, groups)
    absence = "has not come"
    what, state, certainty = {
        "gone": ("ended", f"has ended{first.how and f' {first.how}'}", "proven"),
        "late": ("absent", "is in no call", "proven"),
        "silent": ("no dump", "has left no dump or log", "likely"),
        "held": ("held", "waits in other calls of its own", "likely"),
    }[first.why]
    if first.at is not None:
        what, state = "elsewhere", f"is at {first.at}, in no call"
    elif first.why == "late":
        state = "is in no recorded call" if first.doubt else state
        enqueued = _enqueued(first.call, groups)
        if enqueued is not None:
            state, absence = f"has enqueued {short_call(first.call)} at {enqueued.site}", "its device has not come"
            certainty = "likely"
        elif first.last is not None:
            state += f" since {short_call(first.last)} at {first.last.site}"
    is_unseen = first.why == "silent" and first.at is None
    doubt = first.doubt or ("it is dead, stopped, or its files are not here" if is_unseen else "")
    state += f" ({doubt})" if doubt else ""
    if is_unseen:  # no file says so of a rank that is not seen
        absence = "may not have come"
    others = sorted({waiter.call.rank for waiter in first.waiting})
    ranks = tuple(sorted({each.call.rank for each in missing}))
    others_missing = [rank for rank in ranks if rank != first.call.rank]
    more = f" (and so for {ranks_words(others_missing)})" if others_missing else ""
    if sureness != "proven":
        more += f", or {'has' if len(others) == 1 else 'have'} made a call too many"
    return Cause(
        what=what,
        certainty=_lesser(certainty, first.certainty, sureness),
        ranks=ranks,
        calls=tuple(each.last or each.call for each in missing),
        words=(
            f"rank {first.call.rank} {state}, and {absence} to {short_call(first.call)} of group "
            f"{first.call.group}, for which {_waiting(others)}"
            f"{more}"
        ),
    )


def _enqueued(call: NamedCall, groups: Sequence[_Group]) -> CallLog | None:
    """The call as a rank's host has enqueued it, whose device has not begun it; None: it has not."""
    own = (group.calls.get(call.rank, {}) for group in groups if group.name == call.group)
    return next((calls[call.number] for calls in own if call.number in calls), None)


def _sureness(missing: Missing, groups: Sequence[_Group]) -> str:
    """How sure it is that a rank which has not come is at fault, and not the few that wait for it with a call too many.

    Sure are more ranks than those that have not come, as no two make the same call too many; or all
    calls of the group, if they are recorded, and of two places one is always the other's counterpart.
    """
    rank, number = missing.call.rank, missing.call.number
    if missing.why not in ("late", "silent"):
        return "proven"
    if missing.call.kind in MESSAGES:  # as many wait as have not come
        return "likely"
    waiting = {waiter.call.rank for waiter in missing.waiting}
    come, absent, is_whole, num_alike = set(waiting), {rank}, False, 0
    for group in groups:
        if rank not in group.ranks:
            continue
        made = group.made.get(rank, 0)
        is_silent = missing.why == "silent"
        come |= {each for each in group.made if group.made[each] > (group.done[each] if is_silent else made)} - {rank}
        if group.name != missing.call.group or not waiting <= set(group.made):
            continue
        absent |= {each for each in group.made if group.made[each] < number}
        its = group.calls.get(rank, {})
        alike = [each for each in waiting if not is_silent and _are_counterparts(group.calls[each], its)]
        is_whole = any(len(its) == made and len(group.calls[each]) == group.made[each] for each in alike)
        num_alike = max((len(its.keys() & group.calls[each].keys()) for each in alike), default=0)
    if len(come) > len(absent) or (is_whole and len(absent) == 1):
        return "proven"
    is_likely = is_whole or num_alike >= _ENOUGH_ALIKE or len(come) > 1 or missing.at is not None
    return "likely" if is_likely else "unknown"


def _are_counterparts(one: _Calls, other: _Calls) -> bool:
    """Whether two ranks make each call of one place at one place of the other's program, as far as it is recorded."""
    pairs = {(_identity(one[number]), _identity(other[number])) for number in one.keys() & other.keys()}
    return len(pairs) == len({mine for mine, _ in pairs}) == len({its for _, its in pairs})


def _waiting(ranks: Sequence[int]) -> str:
    """``rank 3 waits``, ``ranks 0 and 1 wait``."""
    return f"{ranks_words(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def _stalled(diagnosis: Diagnosis, groups: Sequence[_Group], *, knows_members: bool) -> Cause | None:
    waiting = [waiter for missing in diagnosis.waits for waiter in missing.waiting]
    met = [waiter for waiter in diagnosis.under_way if waiter not in waiting]  # in calls that all have come to
    if not met:
        return None
    first = _first_in_line(diagnosis.under_way)
    calls = tuple(waiter.call for waiter in first)
    ranks = tuple(sorted({call.rank for call in calls}))
    longest = max([waiter for waiter in first if waiter in met] or met, key=lambda waiter: waiter.waited_s)
    where = f"{call_words(longest.call)}, at {longest.site}"
    if diagnosis.without and not knows_members:
        return Cause(
            what="no dump",
            certainty="likely",
            ranks=diagnosis.without,
            calls=calls,
            words=(f"{ranks_words(diagnosis.without)} left no dump or log, and {_waiting(ranks)} in {where}"),
        )
    name, number = _call_key(longest)
    has_ended = longest.call.kind not in MESSAGES and any(
        done >= number for group in groups if group.name == name for done in group.done.values()
    )
    inside = sorted(waiter.call.rank for waiter in first if _call_key(waiter) == (name, number))
    on = f" on {ranks_words(inside)}" if has_ended else ""
    return Cause(
        what="stalled",
        certainty="unknown",
        ranks=ranks,
        calls=calls,
        words=(
            f"all ranks have come to {where}, and it does not end{on}: the network, a rank that is "
            "stopped, or roots, operations or splits that differ, which dumps do not record"
        ),
    )


def _first_in_line(waiters: Sequence[Waiter]) -> list[Waiter]:
    """Choose the waiters whose call is the oldest of every rank that waits in it: a call behind another holds up nobody."""
    oldest: dict[int, Waiter] = {}
    for each in sorted(waiters, key=lambda waiter: -waiter.waited_s):
        oldest.setdefault(each.call.rank, each)
    behind = {_call_key(each) for each in waiters if _call_key(each) != _call_key(oldest[each.call.rank])}
    return [each for each in waiters if _call_key(each) not in behind] or list(oldest.values())


def _call_key(waiter: Waiter) -> tuple[str, int]:
    return waiter.call.group, waiter.call.number


# Last calls


def _last_calls(groups: Iterable[_Group]) -> Iterator[GroupCalls]:
    shown = 0
    for group in groups:
        seen = {(made, group.done[rank]) for rank, made in group.made.items() if rank not in group.assumed}
        is_even = len(seen) == 1 and all(made == done for made, done in seen)
        if is_even or not any(group.calls.values()) or shown == _MOST_GROUPS:
            continue
        shown += 1
        alike: dict[tuple[object, ...], list[int]] = {}
        for rank, made in sorted(group.made.items()):
            call = group.calls[rank].get(made)
            site = None if call is None else call.site
            alike.setdefault((made, group.done[rank], site, rank in group.assumed), []).append(rank)
        yield GroupCalls(
            group=group.name,
            ranks=group.ranks,
            last=tuple(_last(group, ranks) for ranks in alike.values()),
        )


def _last(group: _Group, ranks: Sequence[int]) -> LastCalls:
    made = group.made[ranks[0]]
    call = group.calls[ranks[0]].get(made)
    return LastCalls(
        ranks=tuple(ranks),
        made=made,
        done=group.done[ranks[0]],
        is_assumed=ranks[0] in group.assumed,
        call=None if call is None else NamedCall.of_log(ranks[0], group.name, call),
    )
