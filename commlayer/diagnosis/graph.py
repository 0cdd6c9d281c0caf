"""The wait-for graph of a job over all its groups, and who is stuck in it for good.

A call of a group ends when every member has made its own call of that number (a send when its
receive has been posted, as with Gloo, and a receive when its send has), and after the group's calls
before it. A member that has not made it yet will, unless it is gone, or all threads that could make
it are blocked in other calls. So a node of this graph waits for all of its clauses, and a clause is
met by any of its nodes: an AND-OR graph, as MPI's deadlock detectors have it (Hilbrich et al., "MPI
runtime error detection with MUST: advances in deadlock detection", SC 2012). Whatever cannot be
reached from what is free is stuck.

Collectives are taken to wait for all members, as the MPI standard lets them: a program that needs a
broadcast's root to return early is wrong, even where it happens to run. Logs of ranks need not be
of one moment: a rank that was seen blocked, before or after another one, goes on only when the call
that it waits for has been made, so a circle of such ranks was one all along.

Rejected: matching group by group, as torch's Flight Recorder does; a circle over two groups has
nothing wrong in either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from commlayer.calls.group_life import LIFE_KEY
from commlayer.diagnosis.call_logs import CallLog, RankLog, Site

__all__ = ["Blocked", "Graph", "Need", "Node", "View"]

_OTHER = {"send": "recv", "recv": "send"}
ANY = -1


class Node(NamedTuple):
    """Something that has to happen.

    ``done``: that call of ``rank`` ends; ``made``: ``rank`` makes it (of a message: number
    ``number`` of ``kind``, with ``peer`` and ``tag``); ``met``: all members make it, so that a
    large group is looked through once, and not for each member that waits; ``free``: thread
    ``number`` of ``rank`` comes back from what it waits for.
    """

    what: str
    rank: int
    group: str
    number: int
    kind: str = ""
    peer: int = ANY
    tag: int = 0


class Need(NamedTuple):
    """A clause: any of ``nodes`` has to happen. None of them: it cannot, because ``rank`` is
    gone."""

    nodes: tuple[Node, ...]
    rank: int = ANY


class Blocked(NamedTuple):
    """A thread of a rank that waits for one of its calls. ``site``: of the wait; ``call``: where
    the ring still has it."""

    rank: int
    thread: int
    group: str
    kind: str
    number: int
    peer: int
    tag: int
    site: Site
    since_ns: int
    call: CallLog | None

    @property
    def is_message(self) -> bool:
        return self.kind in _OTHER

    @property
    def awaits(self) -> Node:
        """The node that has to happen for it to go on."""
        if self.is_message:
            return Node("done", self.rank, self.group, self.number, self.kind, self.peer, self.tag)
        return Node("done", self.rank, self.group, self.number)


class View:
    """One rank's log, by group key and number."""

    def __init__(self, log: RankLog) -> None:
        self.log = log
        self.groups = {group.key: group for group in log.groups}
        self.collectives: dict[tuple[str, int], CallLog] = {}
        self.messages: dict[tuple[str, str, int, int, int], CallLog] = {}
        self.issuers: dict[str, set[int]] = {}
        alive = {*(thread.ident for thread in log.threads), *log.hidden} or {call.thread for call in log.calls}
        for call in log.calls:
            key = log.groups[call.group].key
            if call.thread in alive:
                self.issuers.setdefault(_made_by_same(key), set()).add(call.thread)
            if call.is_message:
                self.messages[key, call.kind, call.peer, call.tag, call.number] = call
            else:  # one that was refused, and made again, is there twice: the later one counts
                self.collectives[key, call.number] = call
        self.threads = alive

    def issued(self, key: str) -> int:
        group = self.groups.get(key)
        return 0 if group is None else group.issued

    def done(self, key: str) -> int:
        group = self.groups.get(key)
        return 0 if group is None else group.done

    def posted(self, key: str, kind: str, peer: int, tag: int) -> int:
        """How many messages of this kind have been posted."""
        group = self.groups.get(key)
        if group is None:
            return 0
        return sum(each.count for each in group.messages if (each.kind, each.peer, each.tag) == (kind, peer, tag))

    @cached_property
    def blocked(self) -> dict[int, Blocked]:
        """The call that each thread waits for: in an explicit wait, or the last one it made, which
        returns only at its end."""
        by_thread: dict[int, Blocked] = {}
        for call in self.log.calls:
            key = self.log.groups[call.group].key
            if call.is_message or call.is_async or call.number <= self.done(key) or call.thread not in self.threads:
                continue
            if call.number > self.issued(key):  # refused
                continue
            before = by_thread.get(call.thread)
            if before is None or before.since_ns <= call.issued_ns:
                by_thread[call.thread] = Blocked(
                    rank=self.log.rank,
                    thread=call.thread,
                    group=key,
                    kind=call.kind,
                    number=call.number,
                    peer=ANY,
                    tag=0,
                    site=call.site,
                    since_ns=call.issued_ns,
                    call=call,
                )
        for wait in self.log.waits:
            key = self.log.groups[wait.group].key
            if wait.kind not in _OTHER and wait.number <= self.done(key):
                continue
            before = by_thread.get(wait.thread)
            if before is None or before.since_ns <= wait.since_ns:
                if wait.kind in _OTHER:
                    call_there = self.messages.get((key, wait.kind, wait.peer, wait.tag, wait.number))
                else:
                    call_there = self.collectives.get((key, wait.number))
                by_thread[wait.thread] = Blocked(
                    rank=self.log.rank,
                    thread=wait.thread,
                    group=key,
                    kind=wait.kind,
                    number=wait.number,
                    peer=wait.peer,
                    tag=wait.tag,
                    site=wait.site,
                    since_ns=wait.since_ns,
                    call=call_there,
                )
        return {thread: each for thread, each in by_thread.items() if not self._has_gone_on(each)}

    def _has_gone_on(self, blocked: Blocked) -> bool:
        """Whether the thread has made another call since, so that the one it waited for has
        failed."""
        return any(
            call.thread == blocked.thread and call.issued_ns > blocked.since_ns
            for call in reversed(self.log.calls[-_LOOK_BACK:])
        )


_LOOK_BACK = 64


def _made_by_same(key: str) -> str:
    """A key that groups share whose calls the same threads make: a thread that has made one group
    makes the next one too."""
    return LIFE_KEY if key.endswith(LIFE_KEY) else key


class Graph:
    """The graph of these logs. ``gone``: ranks that have ended, and how.

    A rank that has written a log was there then. Who hears a moment later that it has ended cannot
    say what it called between: mostly the call that others are still in, and its program's end.
    """

    def __init__(self, logs: Sequence[RankLog]) -> None:
        self.views = {log.rank: View(log) for log in logs}
        self.gone: dict[int, str] = {}
        for log in logs:
            self.gone |= {rank: how for rank, how in log.gone.items() if self._has_ended(rank)}
        self.members: dict[str, tuple[int, ...]] = {}
        self.names: dict[str, str] = {}
        for log in logs:
            for group in log.groups:
                self.members.setdefault(group.key, group.ranks)
                self.names.setdefault(group.key, str(group))
        self.blocked = [each for view in self.views.values() for each in view.blocked.values()]
        self.blocked.sort(key=lambda each: (each.rank, each.since_ns))
        self._needs: dict[Node, list[Need]] = {}

    def _has_ended(self, rank: int) -> bool:
        view = self.views.get(rank)
        return view is None or rank in view.log.gone

    # What a node needs

    def needs(self, node: Node) -> list[Need]:
        """All of them, or ``node`` does not happen."""
        needs = self._needs.get(node)
        if needs is None:
            needs = self._needs[node] = self._needs_of_met(node) if node.what == "met" else self._needs_of(node)
        return needs

    def _needs_of(self, node: Node) -> list[Need]:
        view = self.views.get(node.rank)
        if view is None:  # nothing is known of it: taken to be on its way
            return [Need((), node.rank)] if node.rank in self.gone and node.what == "made" else []
        if node.what == "free":
            blocked = view.blocked.get(node.number)
            return [] if blocked is None else [Need((blocked.awaits,))]
        if node.kind:
            return self._needs_of_message(view, node)
        return self._needs_of_call(view, node)

    def _needs_of_met(self, node: Node) -> list[Need]:
        """The members that have not begun the call."""
        views = ((rank, self.views.get(rank)) for rank in self.members.get(node.group, ()))
        return [
            Need((Node("made", rank, node.group, node.number),), rank)
            for rank, view in views
            if view is None or node.number > min(view.issued(node.group), view.done(node.group) + 1)
        ]

    def _needs_of_call(self, view: View, node: Node) -> list[Need]:
        if node.what == "made":
            if view.issued(node.group) < node.number:
                return self._needs_of_making(view, node)
            # It has been called: it starts after those of its group before it.
            return self._before(view, node)
        if view.done(node.group) >= node.number:
            return []
        return [*self._before(view, node), Need((Node("met", ANY, node.group, node.number),))]

    def _before(self, view: View, node: Node) -> list[Need]:
        if node.number <= view.done(node.group) + 1:
            return []
        return [Need((Node("done", node.rank, node.group, node.number - 1),))]

    def _needs_of_message(self, view: View, node: Node) -> list[Need]:
        if node.what == "made":
            if view.posted(node.group, node.kind, node.peer, node.tag) >= node.number:
                return []
            if node.kind == "recv" and view.posted(node.group, node.kind, ANY, node.tag):
                return []  # whether it takes this one is not known
            return self._needs_of_making(view, node)
        if node.peer == ANY:
            others = [rank for rank in self.members.get(node.group, ()) if rank != node.rank]
            received = {rank: view.posted(node.group, "recv", rank, node.tag) for rank in others}  # by its name
            nodes = [Node("made", rank, node.group, received[rank] + 1, "send", node.rank, node.tag) for rank in others]
            return [Need(tuple(nodes))]
        other = Node("made", node.peer, node.group, node.number, _OTHER[node.kind], node.rank, node.tag)
        return [Need((other,), node.peer)]

    def _needs_of_making(self, view: View, node: Node) -> list[Need]:
        threads = view.issuers.get(_made_by_same(node.group)) or view.threads
        if not threads or any(thread not in view.blocked for thread in threads):
            return [Need((), node.rank)] if node.rank in self.gone else []
        return [Need(tuple(Node("free", node.rank, "", thread) for thread in sorted(threads)))]

    # Who is stuck

    @cached_property
    def stuck(self) -> set[Node]:
        """All nodes behind blocked threads that cannot happen any more, whatever free threads
        do."""
        users: dict[Node, list[tuple[Node, Need]]] = {}
        seen: set[Node] = set()
        ahead = [each.awaits for each in self.blocked]
        while ahead:
            node = ahead.pop()
            if node in seen:
                continue
            seen.add(node)
            for need in self.needs(node):
                ahead += need.nodes
                for other in need.nodes:
                    users.setdefault(other, []).append((node, need))
        unmet = {node: set(self.needs(node)) for node in seen}
        ready = [node for node in seen if not unmet[node]]
        while ready:
            for user, need in users.get(ready.pop(), ()):
                if need in unmet[user]:
                    unmet[user].remove(need)
                    if not unmet[user]:
                        ready.append(user)
        self.clauses = {
            node: [need for need in self.needs(node) if need in unmet[node]] for node in seen if unmet[node]
        }
        return set(self.clauses)

    @cached_property
    def stuck_threads(self) -> list[Blocked]:
        """The blocked threads that never go on."""
        return [each for each in self.blocked if each.awaits in self.stuck]

    def reasons(self, blocked: Blocked) -> list[tuple[Node, Blocked | None]]:
        """Why a stuck thread is: calls that are not made (or, of a call made, not ended), and the
        stuck threads that would have to make them; None: the rank is gone."""
        reasons: list[tuple[Node, Blocked | None]] = []
        seen: set[Node] = set()
        ahead = deque([blocked.awaits])
        while ahead:
            node = ahead.popleft()
            if node in seen:
                continue
            seen.add(node)
            for need in self.clauses.get(node, []):
                if not need.nodes:
                    reasons.append((node, None))
                for each in need.nodes:
                    if each.what == "free":
                        reasons.append((node, self.views[each.rank].blocked[each.number]))
                    else:
                        ahead.append(each)
        return reasons

    # Who is waited for, but not stuck

    def under_way(self) -> list[Blocked]:
        """Blocked threads that wait for nobody: all that they wait for has been called, and has not
        ended yet."""
        late = {(blocked.rank, blocked.thread) for blocked, _ in self.late()}
        stuck = self.stuck
        return [each for each in self.blocked if each.awaits not in stuck and (each.rank, each.thread) not in late]

    def late(self) -> list[tuple[Blocked, Node]]:
        """Blocked threads that are not stuck, and the calls that they wait for of ranks that may
        still make them."""
        free = [each for each in self.blocked if each.awaits not in self.stuck]
        return [(blocked, node) for blocked in free for node in self._behind(blocked) if self._may_be_late(node)]

    def ahead(self, blocked: Blocked) -> set[Node]:
        """The calls that ranks may still make, in no call, for which a thread waits in the end:
        itself, or behind threads that would have to go on first."""
        return {node for node in self._behind(blocked, through_threads=True) if self._may_be_late(node)}

    def unmade(self, blocked: Blocked) -> list[Node]:
        """The calls for which a thread itself waits, and which their ranks have not made, whatever
        holds those."""
        return [node for node in self._behind(blocked) if node.what == "made" and not self._is_made(node)]

    def _behind(self, blocked: Blocked, *, through_threads: bool = False) -> Iterator[Node]:
        """The nodes that a thread waits for, the nearest first. ``through_threads``: also those for
        which others wait that would have to go on first."""
        ahead, seen = deque([blocked.awaits]), set[Node]()
        while ahead:
            node = ahead.popleft()
            if node not in seen:
                seen.add(node)
                yield node
                nodes = (each for need in self.needs(node) for each in need.nodes)
                ahead += [each for each in nodes if through_threads or each.what != "free"]

    def _may_be_late(self, node: Node) -> bool:
        """Whether it is a call that its rank has not made, and that rank is not blocked."""
        if node.what != "made":
            return False
        if node.rank not in self.views:
            return node.rank not in self.gone
        return not self._is_made(node) and not self.needs(node)

    def _is_made(self, node: Node) -> bool:
        view = self.views.get(node.rank)
        if view is None:
            return False
        if node.kind:
            return view.posted(node.group, node.kind, node.peer, node.tag) >= node.number
        return view.issued(node.group) >= node.number
