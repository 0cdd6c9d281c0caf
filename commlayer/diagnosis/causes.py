"""The cause of a hang in one sentence, and how sure it is.

A diagnosis lists all that is wrong: circles, calls that differ, ranks that do not come. Most of
these are consequences of one thing. A rank that has left a call out ends in a circle, in calls that
differ, or alone, by what comes next in its program. Places tell it: from the lost call on, the rank
makes its calls of the group from the places that the others reach one call later.

Rejected: judging by places where nothing hangs. Ranks may make one call from different places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from commlayer.calls.group_life import LIFE_KEY
from commlayer.calls.ring import MESSAGES
from commlayer.diagnosis.call_logs import NO_THREAD, CallLog, RankLog
from commlayer.diagnosis.diagnosis_words import call_words, ranks_words, short_call, waits_words
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
    lesser,
)
from commlayer.diagnosis.graph import GroupRecord, View, groups_of
from commlayer.diagnosis.matching import shared_signature
from commlayer.profiles.counted import listed

__all__ = ["with_cause"]

_MOST_CALLS = 4
_MOST_GROUPS = 64
_MOST_EXTENDED = 16
"""The number of calls that are inferred at most beyond a rank's last one: numbers in files may be
of any size."""
_ENOUGH_ALIKE = 16
"""The number of calls that two ranks make from the same places, after which it is likely that they
have made equally many before."""
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
    groups = list(groups_of(map(View, logs)).values())
    for group in groups:
        if group.key.endswith(LIFE_KEY):  # ranks make groups from different places
            group.calls = {rank: {} for rank in group.calls}
    shift = next((cause for group in groups if (cause := _shifted(group)) is not None), None)
    cause = shift or _cause(diagnosis, logs, groups, circles_are, knows_members=knows_members)
    if cause is not None:
        cause = msgspec.structs.replace(cause, certainty=lesser(cause.certainty, at_most))
    return msgspec.structs.replace(diagnosis, cause=cause, groups=tuple(_last_calls(groups)))


def _cause(
    diagnosis: Diagnosis,
    logs: Sequence[RankLog],
    groups: Sequence[GroupRecord],
    circles_are: str,
    *,
    knows_members: bool,
) -> Cause | None:
    for finding in diagnosis.findings:
        if isinstance(finding, Mismatch):
            has_majority = 2 * len(finding.odd) < len(finding.calls)
            calls = tuple(call for call in finding.calls if call.rank in finding.odd or not has_majority)
            at = "; ".join(f"rank {call.rank} at {call.site}" for call in calls[:_MOST_CALLS])
            return Cause(
                what="threads" if diagnosis.shared else finding.what,
                certainty="proven",
                ranks=finding.odd if has_majority else tuple(call.rank for call in finding.calls),
                calls=calls,
                words=f"call #{finding.number} of group {finding.group} is not one call: {finding.words} ({at})",
            )
    for finding in diagnosis.findings:
        if isinstance(finding, Cycle):
            return _order(finding, circles_are)
    missing = [each for each in diagnosis.findings if isinstance(each, Missing)]
    waits = diagnosis.waits
    idle = sorted(log.rank for log in logs if not log.waits and all(each.issued == each.done for each in log.groups))
    if idle:  # of a rank of which nothing is seen it cannot be told whether it waits too
        doubt = f"it may wait for {ranks_words(idle)}, which {'is' if len(idle) == 1 else 'are'} seen in no call"
        waits = tuple(
            each.doubted(doubt, "unknown") if each.why == "silent" and each.at is None else each for each in waits
        )
    for why in ("late", "silent"):  # a rank that is seen in no call, before one of which nothing is seen
        missing = missing or [each for each in waits if each.why == why]
    if missing:
        return _absent(missing, groups)
    stalled = _stalled(diagnosis, groups, knows_members=knows_members)
    return stalled or (_absent(diagnosis.waits, groups) if diagnosis.waits else None)


# Calls that a rank has left out, or made too many


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

    Ranks that take turns at two places, as where each broadcasts in its turn, are never at one
    place.
    """
    apart = _identity(theirs[number])
    return any(
        at < number and at in its and _identity(its[at]) == _identity(call) == apart for at, call in theirs.items()
    )


def _shift(its: _Calls, theirs: _Calls, number: int) -> int:
    """1: from ``number`` on, a rank's calls are those that others make one later; −1: one before;
    0: neither."""
    ahead = dict(theirs)
    for _ in range(_MOST_EXTENDED):  # by the call that would come next, if the last one was followed by another before
        last = max(ahead)
        alike = (
            at for at in sorted(ahead, reverse=True) if at != last and _identity(ahead[at]) == _identity(ahead[last])
        )
        before = next((at for at in alike if at + 1 in ahead), None)
        if last > max(its) or before is None:
            break
        ahead[last + 1] = ahead[before + 1]
    if _runs(its, ahead, number, 1):
        return 1
    if _runs(its, ahead, number, -1):
        return -1
    # Where all calls are alike, those behind one of another kind would also be the others' own next
    # ones.
    is_replaced = shared_signature(its[number]) != shared_signature(theirs[number])
    is_replaced = is_replaced and _runs(its, ahead, number + 1, 0)
    return -1 if _runs(its, ahead, number + 1, -1) and not is_replaced else 0


def _has_gone_on(calls: _Calls, number: int) -> bool:
    """Whether a rank had made call ``number`` after the one before it earlier too, as at a step's
    end.

    Where each of two ranks has, neither has left a single call out: their steps differ.
    """
    pairs = [(_identity(calls[at - 1]), _identity(calls[at])) for at in calls if at <= number and at - 1 in calls]
    return number - 1 in calls and pairs.count((_identity(calls[number - 1]), _identity(calls[number]))) > 1


def _runs(its: _Calls, theirs: _Calls, first: int, shift: int) -> bool:
    pairs = [(its[at], theirs.get(at + shift)) for at in sorted(its) if at >= first]
    return bool(pairs) and all(other is not None and _identity(call) == _identity(other) for call, other in pairs)


def _shifted(group: GroupRecord) -> Cause | None:
    """The cause, where one rank's calls of a group are the others' with one left out, or one more,
    or in no order."""
    calls = {rank: each for rank, each in group.calls.items() if each}
    number, odd = _first_unlike(calls)
    if len(odd) != 1:
        return None
    rank = odd[0]
    peers = [each for each in calls if each != rank and number in calls[each]]
    other, is_pair = peers[0], len(peers) == 1  # which one of two is at fault is not seen
    firsts, seconds = ([calls[each].get(at) for each in (rank, other)] for at in (number, number + 1))
    makers = [{call.maker for call in pair if call is not None} for pair in zip(firsts, seconds, strict=True)]
    are_swapped = any(
        one is not None and two is not None and _identity(one) == _identity(two)
        for one, two in zip(firsts, reversed(seconds), strict=True)
    )
    pairs = [(rank, other), (other, rank)] if is_pair else [(rank, other)]
    pairs = [(its, theirs) for its, theirs in pairs if _is_known(calls[its], calls[theirs], number)]
    what, who = "", ""
    if are_swapped and any(len(each - {NO_THREAD}) > 1 for each in makers):
        what = "threads"
        who = f"threads of a rank make calls of group {group.name} in no certain order (give each thread a group of its own)"
    elif pairs and all(_has_gone_on(calls[each], number) for each in pairs[0]):
        what, who = "steps", f"rank {rank} or rank {other}" if is_pair else f"rank {rank}"
        who += f" is at another place of its steps, as it has made more calls of group {group.name}, or fewer"
    else:
        for its, theirs in pairs:
            if not what and (shift := _shift(calls[its], calls[theirs], number)):
                what, rank, other = "skipped" if shift > 0 else "extra", its, theirs
                lacks, exceeds = "left out a call", "made a call too many"
                own, others = (lacks, exceeds) if shift > 0 else (exceeds, lacks)
                who = f"rank {rank} has {own} of group {group.name}" + f", or rank {other} has {others}" * is_pair
    if not what:
        return None
    call, others_call = (NamedCall.of_log(each, group.name, calls[each][number]) for each in (rank, other))
    return Cause(
        what=what,
        certainty="likely",
        ranks=(rank, other) if is_pair else (rank,),
        calls=(call, others_call),
        words=(
            f"{who}: as call #{number} rank {rank} makes {call.kind} at {call.site}, "
            f"rank {other} {others_call.kind} at {others_call.site}"
        ),
    )


# Other causes


def _order(cycle: Cycle, certainty: str) -> Cause:
    calls = tuple(msgspec.structs.replace(step.call, site=step.call.site or step.site) for step in cycle.steps)
    ranks = tuple(sorted({call.rank for call in calls}))
    groups = sorted({call.group for call in calls})
    waits = ", ".join(
        f"rank {call.rank} waits in {short_call(call)} of group {call.group} at {call.site}"
        for call in calls[:_MOST_CALLS]
    )
    more = f", and {len(calls) - _MOST_CALLS} more" if len(calls) > _MOST_CALLS else ""
    do = f"make their calls of {listed('group', groups)} in different orders"
    if len(ranks) == 1:
        do = "waits for a call of its own"
    return Cause(
        what="order",
        certainty=certainty,
        ranks=ranks,
        calls=calls,
        words=f"{ranks_words(ranks)} {do}: {waits}{more}",
    )


def _absent(missing: Sequence[Missing], groups: Sequence[GroupRecord]) -> Cause:
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
        # The call as the rank's host has enqueued it, whose device has not begun it.
        own = (group.calls.get(first.call.rank, {}) for group in groups if group.name == first.call.group)
        enqueued = next((calls[first.call.number] for calls in own if first.call.number in calls), None)
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
        certainty=lesser(certainty, first.certainty, sureness),
        ranks=ranks,
        calls=tuple(each.last or each.call for each in missing),
        words=(
            f"rank {first.call.rank} {state}, and {absence} to {short_call(first.call)} of group "
            f"{first.call.group}, for which {waits_words(others)}"
            f"{more}"
        ),
    )


def _sureness(missing: Missing, groups: Sequence[GroupRecord]) -> str:
    """How sure it is that a rank which has not come is at fault, and not the few that wait for it
    with a call too many.

    Sure are more ranks than those that have not come, as no two make the same call too many; or all
    calls of the group, if they are recorded, and of two places one is always the other's
    counterpart.
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
        is_whole, num_alike = False, 0
        for each, theirs in group.calls.items():
            shared = theirs.keys() & its.keys()
            pairs = {(_identity(theirs[at]), _identity(its[at])) for at in shared}
            are_counterparts = len(pairs) == len({one for one, _ in pairs}) == len({two for _, two in pairs})
            if each in waiting and not is_silent and are_counterparts:
                is_whole = is_whole or (len(its) == made and len(theirs) == group.made[each])
                num_alike = max(num_alike, len(shared))
    if len(come) > len(absent) or (is_whole and len(absent) == 1):
        return "proven"
    is_likely = is_whole or num_alike >= _ENOUGH_ALIKE or len(come) > 1 or missing.at is not None
    return "likely" if is_likely else "unknown"


def _stalled(diagnosis: Diagnosis, groups: Sequence[GroupRecord], *, knows_members: bool) -> Cause | None:
    waiting = [waiter for missing in diagnosis.waits for waiter in missing.waiting]
    met = [waiter for waiter in diagnosis.under_way if waiter not in waiting]  # in calls that all have come to
    if not met:
        return None
    # The oldest of every rank that waits in it: a call behind another one holds up nobody.
    oldest: dict[int, Waiter] = {}
    for each in sorted(diagnosis.under_way, key=lambda waiter: -waiter.waited_s):
        oldest.setdefault(each.call.rank, each)
    keys = [(_call_key(each), _call_key(oldest[each.call.rank])) for each in diagnosis.under_way]
    behind = {key for key, first_key in keys if key != first_key}
    first = [each for each in diagnosis.under_way if _call_key(each) not in behind] or list(oldest.values())
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
            words=(f"{ranks_words(diagnosis.without)} left no dump or log, and {waits_words(ranks)} in {where}"),
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


def _call_key(waiter: Waiter) -> tuple[str, int]:
    return waiter.call.group, waiter.call.number


# Last calls


def _last_calls(groups: Iterable[GroupRecord]) -> Iterator[GroupCalls]:
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
        last = []
        for ranks in alike.values():
            first = ranks[0]
            call = group.calls[first].get(group.made[first])
            last.append(
                LastCalls(
                    ranks=tuple(ranks),
                    made=group.made[first],
                    done=group.done[first],
                    is_assumed=first in group.assumed,
                    call=None if call is None else NamedCall.of_log(first, group.name, call),
                )
            )
        yield GroupCalls(group=group.name, ranks=group.ranks, last=tuple(last))
