"""The diagnosis of a job that hangs, from its ranks' logs: calls that differ, the smallest circle,
or the missing rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from commlayer.calls.ring import MESSAGES
from commlayer.diagnosis.call_logs import NO_THREAD, CallLog, RankLog, Site
from commlayer.diagnosis.graph import ANY, Blocked, Graph, GroupRecord, Node
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
    "lesser",
]

_MOST_STARTS = 64
"""The number of stuck threads from which the smallest circle is looked for: in a large job one
circle holds up thousands."""
_MOST_CYCLES = 4
_MOST_SHIFT = 2
_MOMENT_NS = 1_000_000_000
"""Who has ended may have made the call that others are still in, as at the end of a job: so long
that is taken for granted."""


_CERTAINTIES = ("unknown", "likely", "proven")


def lesser(*certainties: str) -> str:
    """Return the least sure of these."""
    return min(certainties, key=_CERTAINTIES.index)


class NamedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call in a finding. ``number``: of its group's collectives, or of the messages with ``peer``
    and ``tag``. ``state``: ``issued`` where a device has not begun it, else ``started`` or
    ``done``; empty: not made."""

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

    ``last``: the last call that a thread of it made which waits in none; ``at``: where its program
    is now. ``behind``: who waits for one that waits for it. ``doubt``: the reason why it may be in
    a call all the same, or only late; ``certainty``: how sure it is then that the rank is at fault,
    as in :class:`Cause`."""

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

    def doubted(self, doubt: str, certainty: str) -> Missing:
        """The same with one more reason for doubt, and at most as sure as ``certainty``."""
        doubts = "; ".join(filter(None, (self.doubt, doubt)))
        return msgspec.structs.replace(self, doubt=doubts, certainty=lesser(self.certainty, certainty))


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

    ``what``: ``order`` (of groups), ``skipped`` or ``extra`` (a call that a rank left out, or made
    too many), ``collective``, ``dtype``, ``operation``, ``root``, ``size`` or ``splits`` (calls
    that differ in these), ``threads`` (that share a group), ``ended`` (a rank), ``absent`` (a rank
    is in no call), ``elsewhere`` (its program is known to be at another place), ``no dump`` (of a
    rank), ``held`` (by a thread of its own rank), ``stalled`` (all have come to a call, and it does
    not end). ``certainty``: ``proven``, ``likely`` or ``unknown``. ``ranks``: at fault; ``calls``:
    theirs.
    """

    what: str
    certainty: str
    ranks: tuple[int, ...]
    calls: tuple[NamedCall, ...]
    words: str


class LastCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The newest call of a group on ``ranks``, which have all come equally far. ``made``, ``done``:
    how many calls of the group they have made, and how many of these have ended. ``is_assumed``:
    this is taken for granted, as their rings have lost all calls of the group."""

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
    ranks = sorted(set(graph.views).union(*(log.ranks for log in logs)))
    is_timeout = any(log.reason == "timeout" for log in logs)
    is_over = is_timeout or any(log.reason in ("program", "abort") for log in logs)  # nobody is still on the way
    waiting: dict[Node, list[Blocked]] = {}  # for ranks that have ended
    for blocked in graph.stuck_threads:
        if not is_over and graph.views[blocked.rank].log.now_ns - blocked.wait.since_ns < _MOMENT_NS:
            continue
        for node, other in graph.reasons(blocked):
            if other is None:
                waiting.setdefault(node, []).append(blocked)
    gone = [
        Missing(
            call=_needed(graph, node),
            why="gone",
            how=graph.gone.get(rank, ""),
            waiting=_waiters(graph, waiting[node]),
        )
        for rank, node in _most_waited_for(waiting)
    ]
    return Diagnosis(
        findings=(*_mismatches(graph), *_message_mismatches(graph), *_cycles(graph), *gone),
        waits=tuple(_late(graph)),
        shared=tuple(_shared(graph)),
        ranks=tuple(ranks),
        without=tuple(rank for rank in ranks if rank not in graph.views),
        is_timeout=is_timeout,
        under_way=_waiters(
            graph, [each for each in graph.blocked if each.awaits not in graph.stuck and not graph.late(each)]
        ),
    )


# Calls that differ


def _mismatches(graph: Graph) -> Iterator[Mismatch]:
    """The first of each group: what comes after it need not be meant to match."""
    for _, group in sorted(graph.groups.items()):
        by_number: dict[int, dict[int, CallLog]] = {}
        for rank, its in group.calls.items():
            for number, call in its.items():
                if number <= group.made[rank]:
                    by_number.setdefault(number, {})[rank] = call
        for number, calls in sorted(by_number.items()):
            unlike = difference(calls, group.ranks) if len(calls) > 1 else None
            if unlike is not None:
                hints = _shift(group, number, list(calls), unlike.odd), _threads(group, number)
                yield Mismatch(
                    group=group.name,
                    number=number,
                    what=unlike.what,
                    odd=unlike.odd,
                    calls=tuple(NamedCall.of_log(rank, group.name, call) for rank, call in sorted(calls.items())),
                    words=unlike.words,
                    hint="; ".join(filter(None, hints)),
                )
                break


def _shift(group: GroupRecord, number: int, ranks: Sequence[int], odd: Sequence[int]) -> str:
    """Whether the odd rank's calls are the others' with some left out, or some too many."""
    others = [rank for rank in ranks if rank not in odd]
    if len(odd) != 1 or not others:
        return ""
    its, theirs = group.calls[odd[0]], group.calls[others[0]]
    for shift in range(1, _MOST_SHIFT + 1):
        calls_are = counted(shift, "call")
        for one, other, words in (
            (its, theirs, f"left out {calls_are} of this group"),
            (theirs, its, f"made {calls_are} of this group too many"),
        ):
            pairs, at = [], number
            while at in one and at + shift in other:
                pairs.append(shared_signature(one[at]) == shared_signature(other[at + shift]))
                at += 1
            if pairs and all(pairs):
                return f"rank {odd[0]} goes on as if it had {words}"
    return ""


def _threads(group: GroupRecord, number: int) -> str:
    """Whether several threads of a rank make the group's calls about that one."""
    near = range(number - _MOST_SHIFT, number + _MOST_SHIFT + 1)
    makers = {rank: {calls[each].thread for each in near if each in calls} for rank, calls in group.calls.items()}
    ranks = [rank for rank, threads in makers.items() if len(threads - {NO_THREAD}) > 1]
    if not ranks:
        return ""
    make = "makes" if len(ranks) == 1 else "make"
    return (
        f"{listed('rank', ranks)} {make} calls of this group from several threads: give each thread a group of its own"
    )


def _shared(graph: Graph) -> Iterator[Shared]:
    blocked_in: dict[str, dict[int, list[Blocked]]] = {}
    for blocked in graph.blocked:
        call = blocked.call
        if blocked.wait.kind not in MESSAGES and (call is None or not call.is_async):
            blocked_in.setdefault(blocked.group, {}).setdefault(blocked.rank, []).append(blocked)
    for key, by_rank in sorted(blocked_in.items()):
        ranks = [rank for rank, threads in sorted(by_rank.items()) if len(threads) > 1]
        if ranks:
            yield Shared(group=graph.groups[key].name, ranks=tuple(ranks), calls=_waiters(graph, by_rank[ranks[0]]))


def _message_mismatches(graph: Graph) -> Iterator[Mismatch]:
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
                name = graph.groups[key].name
                yield Mismatch(
                    group=name,
                    number=number,
                    what="size",
                    odd=(peer,),
                    calls=(NamedCall.of_log(rank, name, send), NamedCall.of_log(peer, name, recv)),
                    words=words,
                )


# Circles

_Thread = tuple[int, int]
_Ahead = dict[_Thread, list[tuple[Node, Blocked | None]]]


def _cycles(graph: Graph) -> Iterator[Cycle]:
    """The smallest circle of each part of the graph that is stuck by itself."""
    ahead: _Ahead = {each.thread: graph.reasons(each) for each in graph.stuck_threads}
    behind: dict[_Thread, set[_Thread]] = {}
    waits = [(other, start) for start, reasons in ahead.items() for _, other in reasons]
    for other, start in waits:
        if other is not None:
            behind.setdefault(other.thread, set()).add(start)
    remaining = dict.fromkeys(ahead)
    for _ in range(_MOST_CYCLES):
        starts = dict.fromkeys(list(remaining)[:_MOST_STARTS])
        for here in list(starts):  # which may be in no circle: the first thread that comes again on a way from it is
            seen = set[_Thread]()
            while here not in seen:
                seen.add(here)
                here = next((other.thread for _, other in ahead.get(here, []) if other is not None), here)
            starts[here] = None
        path: list[tuple[Blocked, Node]] = []
        for start in starts:
            path = _circle(start, ahead, len(path) - 1 if path else len(ahead) + 1) or path
        if not path:
            break
        members = {blocked.thread for blocked, _ in path}
        waiting, rest = set(members), list(members)
        while rest:
            further = behind.get(rest.pop(), set()) - waiting
            waiting |= further
            rest += further
        yield Cycle(
            steps=tuple(
                CycleStep(call=_blocked_call(graph, each), site=each.wait.site, missing=_needed(graph, node))
                for each, node in path
            ),
            behind=tuple(sorted({rank for rank, _ in waiting - members} - {rank for rank, _ in members})),
        )
        for thread in waiting:
            remaining.pop(thread, None)


def _circle(start: _Thread, ahead: _Ahead, most: int) -> list[tuple[Blocked, Node]]:
    """The shortest circle through ``start``, of at most ``most`` steps: each thread with the call
    that it needs of the next one."""
    came: dict[_Thread, tuple[_Thread, Node, Blocked]] = {}
    edge, length = [start], 0
    while edge and length < most and start not in came:
        further: list[_Thread] = []
        for here in edge:
            for node, other in ahead.get(here, []):
                if other is not None and other.thread not in came:
                    came[other.thread] = here, node, other
                    further.append(other.thread)
        edge, length = further, length + 1
    path: list[tuple[Blocked, Node]] = []
    at = start
    while start in came and not (path and at == start):
        at, node, _ = came[at]
        path.append((came[at][2], node))
    return path[::-1]


# Ranks that are missing


def _most_waited_for(waiting: dict[Node, list[Blocked]]) -> list[tuple[int, Node]]:
    """Each rank, in order, with the call of it that most wait for."""
    first: dict[int, Node] = {}
    for node in sorted(waiting, key=lambda node: (-len(waiting[node]), node)):
        first.setdefault(node.rank, node)
    return sorted(first.items())


def _late(graph: Graph) -> Iterator[Missing]:
    """For each rank that others wait for, the call of it that most wait for; every thread that
    waits is in one of them."""
    waiting_for: dict[Node, list[Blocked]] = {}
    behind: dict[int, list[Blocked]] = {}
    for blocked in graph.blocked:
        if blocked.awaits in graph.stuck:
            continue
        if nodes := graph.late(blocked):
            for node in nodes:
                waiting_for.setdefault(node, []).append(blocked)
            continue
        if ranks := {node.rank for node in graph.late(blocked, through_threads=True)} - {blocked.rank}:
            behind.setdefault(min(ranks), []).append(blocked)
            continue
        yield from _held(graph, blocked)
    for rank, node in _most_waited_for(waiting_for):
        missing = Missing(
            call=_needed(graph, node),
            why="late" if rank in graph.views else "silent",
            waiting=_waiters(graph, waiting_for[node]),
            behind=_waiters(graph, behind.get(rank, ())),
        )
        if rank in graph.views:
            view = graph.views[rank]
            last = next((call for call in reversed(view.log.calls) if call.thread not in view.blocked), None)
            # Where the thread is that made that call; without one, the main thread.
            at = (
                thread.site
                for thread in view.log.threads
                if (thread.ident == last.thread if last is not None else thread.name == "MainThread")
            )
            missing = msgspec.structs.replace(missing, at=next(at, None))
            if last is not None:
                name = graph.groups[view.log.groups[last.group].key].name
                idle_s = (view.log.now_ns - last.issued_ns) / 1e9
                missing = msgspec.structs.replace(missing, last=NamedCall.of_log(rank, name, last), idle_s=idle_s)
        yield missing


def _held(graph: Graph, blocked: Blocked) -> Iterator[Missing]:
    """The ranks for which a thread itself waits, and what those wait in. What holds them is another
    thread of its own rank, which perhaps waits for this one."""
    for node in graph.behind([blocked.awaits], through_threads=False):
        is_unmade = node.what == "made" and not graph.is_made(node)
        if is_unmade and node.rank != blocked.rank and node.rank in graph.views:
            yield Missing(
                call=_needed(graph, node),
                why="held",
                waiting=_waiters(graph, [blocked]),
                held=_waiters(graph, list(graph.views[node.rank].blocked.values())),
            )


def _waiters(graph: Graph, blocked: Sequence[Blocked]) -> tuple[Waiter, ...]:
    return tuple(
        Waiter(
            call=_blocked_call(graph, each),
            site=each.wait.site,
            waited_s=(graph.views[each.rank].log.now_ns - each.wait.since_ns) / 1e9,
        )
        for each in blocked
    )


# Calls, as findings show them


def _blocked_call(graph: Graph, blocked: Blocked) -> NamedCall:
    name, wait = graph.groups[blocked.group].name, blocked.wait
    if blocked.call is not None:
        return NamedCall.of_log(blocked.rank, name, blocked.call)
    return NamedCall(rank=blocked.rank, group=name, kind=wait.kind, number=wait.number, peer=wait.peer, tag=wait.tag)


def _needed(graph: Graph, node: Node) -> NamedCall:
    """A call that has not been made, or not been started; what it should be another member
    knows."""
    group = graph.groups[node.group]
    needed = NamedCall(
        rank=node.rank, group=group.name, kind=node.kind, number=node.number, peer=node.peer, tag=node.tag
    )
    if node.kind:
        return needed
    own = group.calls.get(node.rank, {}).get(node.number)
    if own is not None:  # queued behind the group's calls before it, or enqueued on a device
        return NamedCall.of_log(node.rank, group.name, own)
    its = next((calls[node.number] for calls in group.calls.values() if node.number in calls), None)
    if its is None:
        return msgspec.structs.replace(needed, kind="its call")
    return msgspec.structs.replace(needed, kind=its.kind, dtype=its.dtype)
