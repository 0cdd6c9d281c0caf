"""The diagnosis of a job that hangs, from its ranks' logs: calls that differ, the smallest circle,
or the missing rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from commlayer.diagnosis.call_logs import NO_THREAD, CallLog, RankLog, Site
from commlayer.diagnosis.graph import ANY, Blocked, Graph, Node
from commlayer.diagnosis.matching import difference, message_difference, shared_signature
from commlayer.profiles.counted import counted, listed

__all__ = [
    "Cause",
    "Cycle",
    "CycleStep",
    "Diagnosis",
    "GroupCalls",
    "LastCalls",
    "Mismatch",
    "Missing",
    "NamedCall",
    "Trouble",
    "Waiter",
    "diagnose",
]

_MOST_STARTS = 64
"""The number of stuck threads from which the smallest circle is looked for: in a large job one
circle holds up thousands."""
_MOST_CYCLES = 4
_MOST_SHIFT = 2
_MOMENT_NS = 1_000_000_000
"""Who has ended may have made the call that others are still in, as at the end of a job: so long
that is taken for granted."""


class NamedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call in a finding. ``number``: of its group's collectives, or of the messages with ``peer``
    and ``tag``. ``state``: ``issued`` where a device has not begun it, else ``started`` or ``done``;
    empty: not made."""

    rank: int
    group: str
    kind: str
    number: int
    site: Site | None = None
    dtype: str = ""
    num_bytes: int = -1
    elements: int = -1
    op: str = ""
    root: int = -1
    peer: int = -1
    tag: int = 0
    thread: str = ""
    stage: str = ""
    state: str = ""

    @classmethod
    def of_log(cls, rank: int, group: str, call: CallLog) -> NamedCall:
        """The call ``call`` in the log of ``rank``, of the group that people call ``group``."""
        return cls(
            rank=rank,
            group=group,
            kind=call.kind,
            number=call.number,
            site=call.site,
            dtype=call.dtype,
            num_bytes=max(call.sent, call.received),
            elements=call.elements,
            op=call.op,
            root=call.root,
            peer=call.peer,
            tag=call.tag,
            stage=call.stage,
            state=call.state,
        )


class CycleStep(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of a circle: blocked in ``call`` at ``site``, which needs ``missing`` of the next
    one."""

    call: NamedCall
    site: Site
    missing: NamedCall


class Waiter(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that waits in ``call``, at ``site``, for ``waited_s`` seconds by now."""

    call: NamedCall
    site: Site
    waited_s: float = -1.0


class Cycle(msgspec.Struct, frozen=True, kw_only=True, tag="cycle"):
    """Ranks that wait for each other, each for the next one, the last for the first. ``behind``:
    others that wait for them."""

    steps: tuple[CycleStep, ...]
    behind: tuple[int, ...]


class Mismatch(msgspec.Struct, frozen=True, kw_only=True, tag="mismatch"):
    """Calls of one number in one group that differ. ``what``: collective, dtype, operation, root,
    size or splits."""

    group: str
    number: int
    what: str
    odd: tuple[int, ...]
    calls: tuple[NamedCall, ...]
    words: str
    hint: str = ""


class Missing(msgspec.Struct, frozen=True, kw_only=True, tag="missing"):
    """A rank that has not made a call for which others wait. ``why``: ``gone`` (it has ended),
    ``late`` (no call holds it), ``silent`` (no log of it) or ``held`` (it waits in calls of its
    own, ``held``, for a rank of which another thread waits here).

    ``last``: the last call that a thread of it made which waits in none; ``at``: where its program is now.
    ``behind``: who waits for one that waits for it. ``doubt``: the reason why
    it may be in a call all the same, or only late; ``certainty``: how sure it is then that the rank is
    at fault, as in :class:`Cause`."""

    call: NamedCall
    why: str
    waiting: tuple[Waiter, ...]
    how: str = ""
    last: NamedCall | None = None
    at: Site | None = None
    idle_s: float = -1.0
    held: tuple[Waiter, ...] = ()
    behind: tuple[Waiter, ...] = ()
    doubt: str = ""
    certainty: str = "proven"


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """A group whose collectives two threads of a rank call at once, so that no order of them is the
    same on all ranks.

    ``ranks``: those on which it is seen; ``calls``: of the first of them, where its threads wait.
    """

    group: str
    ranks: tuple[int, ...]
    calls: tuple[Waiter, ...]


Trouble = Mismatch | Cycle | Missing


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why a job hangs, in one sentence.

    ``what``: ``order`` (of groups), ``skipped`` or ``extra`` (a call that a rank left out, or made too
    many), ``collective``, ``dtype``, ``operation``, ``root``, ``size`` or ``splits`` (calls that
    differ in these), ``threads`` (that share a group), ``ended`` (a rank), ``absent`` (a rank is in no
    call), ``elsewhere`` (its program is known to be at another place), ``no dump`` (of a rank),
    ``held`` (by a thread of its own rank), ``stalled`` (all have come to a call, and it does not
    end). ``certainty``: ``proven``, ``likely`` or ``unknown``. ``ranks``: at fault; ``calls``: theirs.
    """

    what: str
    certainty: str
    ranks: tuple[int, ...]
    calls: tuple[NamedCall, ...]
    words: str


class LastCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The newest call of a group on ``ranks``, which have all come equally far. ``made``, ``done``:
    how many calls of the group they have made, and how many of these have ended. ``is_assumed``: this
    is taken for granted, as their rings have lost all calls of the group."""

    ranks: tuple[int, ...]
    made: int
    done: int
    call: NamedCall | None
    is_assumed: bool = False


class GroupCalls(msgspec.Struct, frozen=True, kw_only=True):
    """A group in which calls have not ended, or of which ranks have made unequally many."""

    group: str
    ranks: tuple[int, ...]
    last: tuple[LastCalls, ...]


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The result. ``findings``: what is wrong; ``waits``: ranks that others wait for, which may
    still come; ``under_way``: ranks in calls that all have come to, and that have not ended;
    ``open``: sentences on what cannot be told, so that nobody may say that nothing is wrong;
    ``remarks``: sentences on what the logs show beside.

    ``shared``: groups that several threads use at once, which may be why. ``ranks``: those of the
    job; ``without``: those that no log is of. ``is_timeout``: whether a wait had timed out: then
    who is waited for is no longer only late. ``assumed``: what was taken for granted, where the
    ranks' logs do not say it. ``cause`` and ``groups``: set by
    :func:`~commlayer.diagnosis.causes.with_cause`.
    """

    findings: tuple[Trouble, ...]
    waits: tuple[Missing, ...]
    ranks: tuple[int, ...]
    without: tuple[int, ...]
    is_timeout: bool
    under_way: tuple[Waiter, ...] = ()
    shared: tuple[Shared, ...] = ()
    open: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    cause: Cause | None = None
    groups: tuple[GroupCalls, ...] = ()

    @property
    def has_found(self) -> bool:
        """Whether something is wrong, or a wait has timed out and the logs do not say why."""
        return bool(self.findings or self.cause) or (self.is_timeout and bool(self.waits or self.open))

    @property
    def has_cause(self) -> bool:
        """Whether calls are found to be wrong, and not only ranks that do not come: then no rank's
        log says more."""
        return any(isinstance(finding, Mismatch | Cycle) for finding in self.findings)


def diagnose(logs: Sequence[RankLog]) -> Diagnosis:
    """Merge the logs of ranks, of one job and of about one moment, and find what is wrong.

    Nothing is found where every blocked rank waits for one that is free; :attr:`Diagnosis.waits`
    says for whom.
    """
    graph = Graph(sorted(logs, key=lambda log: log.rank))
    mismatches = [*_mismatches(graph), *_message_mismatches(graph)]
    cycles = _cycles(graph)
    ranks = sorted(set(graph.views).union(*(log.ranks for log in logs)))
    is_timeout = any(log.reason == "timeout" for log in logs)
    is_over = is_timeout or any(log.reason in ("program", "abort") for log in logs)  # nobody is still on the way
    return Diagnosis(
        findings=(*mismatches, *cycles, *_gone(graph, 0 if is_over else _MOMENT_NS)),
        waits=tuple(_late(graph)),
        shared=tuple(_shared(graph)),
        ranks=tuple(ranks),
        without=tuple(rank for rank in ranks if rank not in graph.views),
        is_timeout=is_timeout,
        under_way=_waiters(graph, graph.under_way()),
    )


# Calls that differ


def _mismatches(graph: Graph) -> Iterable[Mismatch]:
    """The first of each group: what comes after it need not be meant to match."""
    numbers: dict[str, dict[int, dict[int, CallLog]]] = {}
    for rank, view in graph.views.items():
        for (key, number), call in view.collectives.items():
            if number <= view.issued(key):
                numbers.setdefault(key, {}).setdefault(number, {})[rank] = call
    for key in sorted(numbers):
        for number in sorted(numbers[key]):
            calls = numbers[key][number]
            unlike = difference(calls, graph.members[key]) if len(calls) > 1 else None
            if unlike is not None:
                hints = _shift(graph, key, number, calls, unlike.odd), _threads(graph, key, number)
                yield Mismatch(
                    group=graph.names[key],
                    number=number,
                    what=unlike.what,
                    odd=unlike.odd,
                    calls=tuple(_call(graph, rank, key, call) for rank, call in sorted(calls.items())),
                    words=unlike.words,
                    hint="; ".join(hint for hint in hints if hint),
                )
                break


def _shift(graph: Graph, key: str, number: int, calls: dict[int, CallLog], odd: Sequence[int]) -> str:
    """Whether the odd rank's calls are the others' with some left out, or some too many."""
    others = [rank for rank in calls if rank not in odd]
    if len(odd) != 1 or not others:
        return ""
    theirs, its = graph.views[others[0]].collectives, graph.views[odd[0]].collectives

    def run(one: dict[tuple[str, int], CallLog], other: dict[tuple[str, int], CallLog], shift: int) -> bool:
        pairs = []
        at = number
        while (key, at) in one and (key, at + shift) in other:
            pairs.append(shared_signature(one[key, at]) == shared_signature(other[key, at + shift]))
            at += 1
        return bool(pairs) and all(pairs)

    for shift in range(1, _MOST_SHIFT + 1):
        calls_are = counted(shift, "call")
        if run(its, theirs, shift):
            return f"rank {odd[0]} goes on as if it had left out {calls_are} of this group"
        if run(theirs, its, shift):
            return f"rank {odd[0]} goes on as if it had made {calls_are} of this group too many"
    return ""


def _threads(graph: Graph, key: str, number: int) -> str:
    """Whether several threads of a rank make the group's calls about that one."""
    ranks = []
    for rank, view in graph.views.items():
        near = range(number - _MOST_SHIFT, number + _MOST_SHIFT + 1)
        calls = [view.collectives[key, each] for each in near if (key, each) in view.collectives]
        if len({call.thread for call in calls if call.thread != NO_THREAD}) > 1:
            ranks.append(rank)
    if not ranks:
        return ""
    make = "makes" if len(ranks) == 1 else "make"
    return (
        f"{listed('rank', ranks)} {make} calls of this group from several threads: give each thread a group of its own"
    )


def _shared(graph: Graph) -> Iterable[Shared]:
    blocked_in: dict[str, dict[int, list[Blocked]]] = {}
    for blocked in graph.blocked:
        call = blocked.call
        if not blocked.is_message and (call is None or not call.is_async):
            blocked_in.setdefault(blocked.group, {}).setdefault(blocked.rank, []).append(blocked)
    for key, by_rank in sorted(blocked_in.items()):
        ranks = [rank for rank, threads in sorted(by_rank.items()) if len(threads) > 1]
        if ranks:
            yield Shared(group=graph.names[key], ranks=tuple(ranks), calls=_waiters(graph, by_rank[ranks[0]]))


def _message_mismatches(graph: Graph) -> Iterable[Mismatch]:
    from_any = {
        (rank, key, tag)
        for rank, view in graph.views.items()
        for key, kind, peer, tag, _ in view.messages
        if (kind, peer) == ("recv", ANY)
    }
    for rank, view in graph.views.items():
        for (key, kind, peer, tag, number), send in sorted(view.messages.items()):
            other = graph.views.get(peer)
            if kind != "send" or other is None or (peer, key, tag) in from_any:
                continue  # of receives from any rank nobody knows which one takes this message
            recv = other.messages.get((key, "recv", rank, tag, number))
            words = "" if recv is None else message_difference(send, recv)
            if recv is not None and words:
                yield Mismatch(
                    group=graph.names[key],
                    number=number,
                    what="size",
                    odd=(peer,),
                    calls=(_call(graph, rank, key, send), _call(graph, peer, key, recv)),
                    words=words,
                )


# Circles


def _cycles(graph: Graph) -> list[Cycle]:
    """The smallest circle of each part of the graph that is stuck by itself."""
    stuck = graph.stuck_threads
    ahead = {_id(each): graph.reasons(each) for each in stuck}
    behind: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for start, reasons in ahead.items():
        for _, other in reasons:
            if other is not None:
                behind.setdefault(_id(other), set()).add(start)
    cycles: list[Cycle] = []
    remaining = dict.fromkeys(_id(each) for each in stuck)
    while remaining and len(cycles) < _MOST_CYCLES:
        starts = list(remaining)[:_MOST_STARTS]
        path = _smallest(list(dict.fromkeys([*starts, *(_on_circle(each, ahead) for each in starts)])), ahead)
        if not path:
            break
        members = {_id(blocked) for blocked, _ in path}
        waiting = _reach(members, behind)
        cycles.append(
            Cycle(
                steps=tuple(_step(graph, blocked, node) for blocked, node in path),
                behind=tuple(sorted({rank for rank, _ in waiting - members} - {rank for rank, _ in members})),
            )
        )
        for each in waiting | members:
            remaining.pop(each, None)
    return cycles


def _id(blocked: Blocked) -> tuple[int, int]:
    return blocked.rank, blocked.thread


_Ahead = dict[tuple[int, int], list[tuple[Node, Blocked | None]]]


def _on_circle(start: tuple[int, int], ahead: _Ahead) -> tuple[int, int]:
    """Return the first thread that comes again on a way from ``start``: those that wait may be in no circle themselves."""
    here, seen = start, set[tuple[int, int]]()
    while here not in seen:
        seen.add(here)
        here = next((_id(other) for _, other in ahead.get(here, []) if other is not None), here)
    return here


def _smallest(starts: Sequence[tuple[int, int]], ahead: _Ahead) -> list[tuple[Blocked, Node]]:
    """The shortest circle through any of ``starts``: each thread with the call that it needs of the
    next one."""
    best: list[tuple[Blocked, Node]] = []
    for start in starts:
        path = _circle(start, ahead, len(best) or len(ahead) + 1)
        if path and (not best or len(path) < len(best)):
            best = path
        if len(best) == 1:
            break
    return best


def _circle(start: tuple[int, int], ahead: _Ahead, most: int) -> list[tuple[Blocked, Node]]:
    """The shortest way from ``start`` back to it, of fewer than ``most`` steps."""
    came: dict[tuple[int, int], tuple[tuple[int, int], Node, Blocked]] = {}
    edge, length = [start], 0
    while edge and length < most:
        further: list[tuple[int, int]] = []
        for here in edge:
            for node, other in ahead.get(here, []):
                if other is None or _id(other) in came:
                    continue
                came[_id(other)] = here, node, other
                if _id(other) == start:
                    return _way(start, came)
                further.append(_id(other))
        edge, length = further, length + 1
    return []


def _way(
    start: tuple[int, int], came: dict[tuple[int, int], tuple[tuple[int, int], Node, Blocked]]
) -> list[tuple[Blocked, Node]]:
    needed: list[tuple[tuple[int, int], Node]] = []
    at = start
    while True:
        before, node, _ = came[at]
        needed.append((before, node))
        at = before
        if at == start:
            break
    return [(came[each][2], node) for each, node in reversed(needed)]


def _reach(members: set[tuple[int, int]], behind: dict[tuple[int, int], set[tuple[int, int]]]) -> set[tuple[int, int]]:
    """All that wait for these, themselves or through others."""
    reached, ahead = set(members), list(members)
    while ahead:
        new = behind.get(ahead.pop(), set()) - reached
        reached |= new
        ahead += new
    return reached


def _step(graph: Graph, blocked: Blocked, needed: Node) -> CycleStep:
    return CycleStep(call=_blocked_call(graph, blocked), site=blocked.site, missing=_needed(graph, needed))


# Ranks that are missing


def _gone(graph: Graph, least_ns: int) -> list[Missing]:
    """Ranks that have ended, and for which others are stuck and have waited for so long."""
    waiting: dict[Node, list[Blocked]] = {}
    for blocked in graph.stuck_threads:
        if least_ns and graph.views[blocked.rank].log.now_ns - blocked.since_ns < least_ns:
            continue
        for node, other in graph.reasons(blocked):
            if other is None:
                waiting.setdefault(node, []).append(blocked)
    first: dict[int, Node] = {}
    for node in sorted(waiting, key=lambda node: (-len(waiting[node]), node)):
        first.setdefault(node.rank, node)
    return [
        Missing(
            call=_needed(graph, node),
            why="gone",
            how=graph.gone.get(rank, ""),
            waiting=_waiters(graph, waiting[node]),
        )
        for rank, node in sorted(first.items())
    ]


def _late(graph: Graph) -> Iterable[Missing]:
    """For each rank that others wait for, the call of it that most wait for; every thread that
    waits is in one of them."""
    waiting_for: dict[Node, list[Blocked]] = {}
    for blocked, node in graph.late():
        waiting_for.setdefault(node, []).append(blocked)
    direct = {_id(each) for waiting in waiting_for.values() for each in waiting}
    behind: dict[int, list[Blocked]] = {}
    for blocked in graph.blocked:
        if blocked.awaits in graph.stuck or _id(blocked) in direct:
            continue
        ranks = {node.rank for node in graph.ahead(blocked)}
        if ranks - {blocked.rank}:
            behind.setdefault(min(ranks - {blocked.rank}), []).append(blocked)
        else:  # what holds those it waits for is another thread of its own rank, which perhaps waits for this one
            yield from _held(graph, blocked)
    first: dict[int, Node] = {}
    for node in sorted(waiting_for, key=lambda node: (-len(waiting_for[node]), node)):
        first.setdefault(node.rank, node)
    for rank, node in sorted(first.items()):
        view = graph.views.get(rank)
        if view is None:
            yield Missing(
                call=_needed(graph, node),
                why="silent",
                waiting=_waiters(graph, waiting_for[node]),
                behind=_waiters(graph, behind.get(rank, ())),
            )
            continue
        calls = [call for call in view.log.calls if call.thread not in view.blocked]
        last = calls[-1] if calls else None
        thread = _thread_of(view.log, last)
        yield Missing(
            call=_needed(graph, node),
            why="late",
            waiting=_waiters(graph, waiting_for[node]),
            last=None if last is None else _call(graph, rank, view.log.groups[last.group].key, last),
            at=thread,
            idle_s=-1.0 if last is None else (view.log.now_ns - last.issued_ns) / 1e9,
            behind=_waiters(graph, behind.get(rank, ())),
        )


def _held(graph: Graph, blocked: Blocked) -> Iterable[Missing]:
    """The ranks for which a thread itself waits, and what those wait in."""
    for node in graph.unmade(blocked):
        if node.rank != blocked.rank and node.rank in graph.views:
            yield Missing(
                call=_needed(graph, node),
                why="held",
                waiting=_waiters(graph, [blocked]),
                held=_waiters(graph, list(graph.views[node.rank].blocked.values())),
            )


def _thread_of(log: RankLog, last: CallLog | None) -> Site | None:
    """Where the thread is now that made that call; without one, the main thread."""
    for thread in log.threads:
        if thread.ident == last.thread if last is not None else thread.name == "MainThread":
            return thread.site
    return None


def _waiters(graph: Graph, blocked: Sequence[Blocked]) -> tuple[Waiter, ...]:
    return tuple(
        Waiter(
            call=_blocked_call(graph, each),
            site=each.site,
            waited_s=(graph.views[each.rank].log.now_ns - each.since_ns) / 1e9,
        )
        for each in blocked
    )


# Calls, as findings show them


def _blocked_call(graph: Graph, blocked: Blocked) -> NamedCall:
    if blocked.call is not None:
        return _call(graph, blocked.rank, blocked.group, blocked.call)
    return NamedCall(
        rank=blocked.rank,
        group=graph.names.get(blocked.group, blocked.group),
        kind=blocked.kind,
        number=blocked.number,
        peer=blocked.peer,
        tag=blocked.tag,
    )


def _call(graph: Graph, rank: int, key: str, call: CallLog) -> NamedCall:
    return NamedCall.of_log(rank, graph.names.get(key, key), call)


def _needed(graph: Graph, node: Node) -> NamedCall:
    """A call that has not been made, or not been started; what it should be another member
    knows."""
    if node.kind:
        kind = node.kind
        return NamedCall(
            rank=node.rank,
            group=graph.names.get(node.group, node.group),
            kind=kind,
            number=node.number,
            peer=node.peer,
            tag=node.tag,
        )
    own = graph.views.get(node.rank)
    call = None if own is None else own.collectives.get((node.group, node.number))
    if call is not None:  # queued behind the group's calls before it, or enqueued on a device
        return _call(graph, node.rank, node.group, call)
    for view in graph.views.values():
        call = view.collectives.get((node.group, node.number))
        if call is not None:
            return NamedCall(
                rank=node.rank, group=graph.names[node.group], kind=call.kind, number=node.number, dtype=call.dtype
            )
    return NamedCall(rank=node.rank, group=graph.names.get(node.group, node.group), kind="its call", number=node.number)
