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

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from commlayer.calls.group_life import LIFE_KEY
from commlayer.calls.ring import MESSAGES
from commlayer.diagnosis.call_logs import CallLog, RankLog, WaitLog

__all__ = ["Blocked", "Graph", "GroupRecord", "Need", "Node", "View", "groups_of"]

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
    """A thread of ``rank`` that waits for one of its calls of ``group``, whose key that is.
    ``call``: where the ring still has it."""

    rank: int
    group: str
    wait: WaitLog
    call: CallLog | None

    @property
    def thread(self) -> tuple[int, int]:
        """The rank, and its thread."""
        return self.rank, self.wait.thread

    @property
    def awaits(self) -> Node:
        """The node that has to happen for it to go on."""
        wait = self.wait
        if wait.kind in MESSAGES:
            return Node("done", self.rank, self.group, wait.number, wait.kind, wait.peer, wait.tag)
        return Node("done", self.rank, self.group, wait.number)


class View:
    """One rank's log: its calls, by the key of their group and by number; how many of each group it
    has ``issued``, how many of these are ``done``, and how many messages it has ``posted``."""

    def __init__(self, log: RankLog) -> None:
        self.log = log
        self.issued = Counter({group.key: group.issued for group in log.groups})
        self.done = Counter({group.key: group.done for group in log.groups})
        self.posted: Counter[tuple[str, str, int, int]] = Counter()
        for group in log.groups:
            for each in group.messages:
                self.posted[group.key, each.kind, each.peer, each.tag] += each.count
        self.collectives: dict[str, dict[int, CallLog]] = {}
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
                self.collectives.setdefault(key, {})[call.number] = call
        self.threads = alive

    @cached_property
    def blocked(self) -> dict[int, Blocked]:
        """The call that each thread waits for: in an explicit wait, or the last one it made, which
        returns only at its end."""
        keys = [group.key for group in self.log.groups]
        waits = [
            WaitLog.of(call, call.thread)
            for call in self.log.calls
            if not (call.is_message or call.is_async)
            and self.done[keys[call.group]] < call.number <= self.issued[keys[call.group]]  # else it was refused
            and call.thread in self.threads
        ]
        latest: dict[int, WaitLog] = {}
        for wait in (*waits, *self.log.waits):
            is_over = wait.kind not in MESSAGES and wait.number <= self.done[keys[wait.group]]
            if not is_over and (wait.thread not in latest or latest[wait.thread].since_ns <= wait.since_ns):
                latest[wait.thread] = wait
        blocked = {}
        for thread, wait in latest.items():
            recent = self.log.calls[-_LOOK_BACK:]
            if any(call.thread == thread and call.issued_ns > wait.since_ns for call in recent):
                continue  # it has made another call since, so that the one it waited for has failed
            key = keys[wait.group]
            call = self.collectives.get(key, {}).get(wait.number)
            if wait.kind in MESSAGES:
                call = self.messages.get((key, wait.kind, wait.peer, wait.tag, wait.number))
            blocked[thread] = Blocked(self.log.rank, key, wait, call)
        return blocked


_LOOK_BACK = 64


def _made_by_same(key: str) -> str:
    """A key that groups share whose calls the same threads make: a thread that has made one group
    makes the next one too."""
    return LIFE_KEY if key.endswith(LIFE_KEY) else key


@dataclass
class GroupRecord:
    """A group in all logs. ``ranks``: its members; ``calls``: the collectives of each rank, by
    number; ``made``, ``done``: how many each has made, and how many of these have ended;
    ``assumed``: the ranks of which that is taken for granted."""

    key: str
    name: str
    ranks: tuple[int, ...]
    calls: dict[int, dict[int, CallLog]] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    assumed: set[int] = field(default_factory=set)


def groups_of(views: Iterable[View]) -> dict[str, GroupRecord]:
    """Return the groups in the logs, by key."""
    groups: dict[str, GroupRecord] = {}
    for view in views:
        rank = view.log.rank
        for each in view.log.groups:
            group = groups.setdefault(each.key, GroupRecord(each.key, str(each), each.ranks))
            group.calls[rank] = view.collectives.get(each.key, {})
            group.made[rank], group.done[rank] = each.issued, each.done
            if each.is_assumed:
                group.assumed.add(rank)
    return groups


class Graph:
    """The graph of these logs. ``gone``: ranks that have ended, and how.

    A rank that has written a log was there then. Who hears a moment later that it has ended cannot
    say what it called between: mostly the call that others are still in, and its program's end.
    """

    def __init__(self, logs: Sequence[RankLog]) -> None:
        self.views = {log.rank: View(log) for log in logs}
        self.groups = groups_of(self.views.values())
        self.gone: dict[int, str] = {}
        for log in logs:
            for rank, how in log.gone.items():
                if rank not in self.views or rank in self.views[rank].log.gone:
                    self.gone[rank] = how
        self.blocked = [each for view in self.views.values() for each in view.blocked.values()]
        self.blocked.sort(key=lambda each: (each.rank, each.wait.since_ns))
        self._needs: dict[Node, list[Need]] = {}

    # What a node needs

    def needs(self, node: Node) -> list[Need]:
        """All of them, or ``node`` does not happen."""
        needs = self._needs.get(node)
        if needs is not None:
            return needs
        view = self.views.get(node.rank)
        if node.what == "met":  # the members that have not begun the call
            needs = [
                Need((Node("made", rank, node.group, node.number),), rank)
                for rank in (self.groups[node.group].ranks if node.group in self.groups else ())
                if (its := self.views.get(rank)) is None
                or node.number > min(its.issued[node.group], its.done[node.group] + 1)
            ]
        elif view is None:  # nothing is known of it: taken to be on its way
            needs = [Need((), node.rank)] if node.rank in self.gone and node.what == "made" else []
        elif node.what == "free":
            blocked = view.blocked.get(node.number)
            needs = [] if blocked is None else [Need((blocked.awaits,))]
        elif node.kind:
            needs = self._needs_of_message(view, node)
        elif node.what == "made" and view.issued[node.group] < node.number:
            needs = self._needs_of_making(view, node)
        else:  # it starts after those of its group before it, and ends when all have come
            is_done = view.done[node.group] >= node.number
            is_next = view.done[node.group] + 1 >= node.number
            needs = [] if is_next else [Need((Node("done", node.rank, node.group, node.number - 1),))]
            if node.what == "done" and not is_done:
                needs.append(Need((Node("met", ANY, node.group, node.number),)))
        self._needs[node] = needs
        return needs

    def _needs_of_message(self, view: View, node: Node) -> list[Need]:
        if node.what == "made":
            if self.is_made(node):
                return []
            if node.kind == "recv" and view.posted[node.group, node.kind, ANY, node.tag]:
                return []  # whether it takes this one is not known
            return self._needs_of_making(view, node)
        if node.peer == ANY:
            others = [rank for rank in self.groups[node.group].ranks if rank != node.rank]
            received = {rank: view.posted[node.group, "recv", rank, node.tag] for rank in others}  # by its name
            nodes = [Node("made", rank, node.group, received[rank] + 1, "send", node.rank, node.tag) for rank in others]
            return [Need(tuple(nodes))]
        other = Node("made", node.peer, node.group, node.number, _OTHER[node.kind], node.rank, node.tag)
        return [Need((other,), node.peer)]

    def _needs_of_making(self, view: View, node: Node) -> list[Need]:
        threads = view.issuers.get(_made_by_same(node.group)) or view.threads
        if not threads or any(thread not in view.blocked for thread in threads):
            return [Need((), node.rank)] if node.rank in self.gone else []
        return [Need(tuple(Node("free", node.rank, "", thread) for thread in sorted(threads)))]

    def is_made(self, node: Node) -> bool:
        """Whether its rank has made the call, or the message, as far as is known."""
        view = self.views.get(node.rank)
        if view is None:
            return False
        if node.kind:
            return view.posted[node.group, node.kind, node.peer, node.tag] >= node.number
        return view.issued[node.group] >= node.number

    def behind(
        self, starts: Iterable[Node], *, through_threads: bool = True, only_unmet: bool = False
    ) -> Iterator[Node]:
        """Yield ``starts`` and the nodes that they wait for, the nearest first.
        ``through_threads``: also those for which others wait that would have to go on first;
        ``only_unmet``: by needs that are never met."""
        ahead = deque(starts)
        seen = set[Node]()
        while ahead:
            node = ahead.popleft()
            if node not in seen:
                seen.add(node)
                yield node
                needs = self.stuck.get(node, []) if only_unmet else self.needs(node)
                nodes = (each for need in needs for each in need.nodes)
                ahead += [each for each in nodes if through_threads or each.what != "free"]

    # Who is stuck

    @cached_property
    def stuck(self) -> dict[Node, list[Need]]:
        """All nodes behind blocked threads that cannot happen any more, whatever free threads do,
        and which of their needs are not met."""
        users: dict[Node, list[tuple[Node, Need]]] = {}
        unmet: dict[Node, set[Need]] = {}
        for node in self.behind(each.awaits for each in self.blocked):
            unmet[node] = set(self.needs(node))
            for need in unmet[node]:
                for other in need.nodes:
                    users.setdefault(other, []).append((node, need))
        ready = [node for node in unmet if not unmet[node]]
        while ready:
            for user, need in users.get(ready.pop(), ()):
                if need in unmet[user]:
                    unmet[user].remove(need)
                    if not unmet[user]:
                        ready.append(user)
        return {node: [need for need in self.needs(node) if need in unmet[node]] for node in unmet if unmet[node]}

    @cached_property
    def stuck_threads(self) -> list[Blocked]:
        """The blocked threads that never go on."""
        return [each for each in self.blocked if each.awaits in self.stuck]

    def reasons(self, blocked: Blocked) -> list[tuple[Node, Blocked | None]]:
        """Why a stuck thread is: calls that are not made (or, of a call made, not ended), and the
        stuck threads that would have to make them; None: the rank is gone."""
        reasons: list[tuple[Node, Blocked | None]] = []
        for node in self.behind([blocked.awaits], through_threads=False, only_unmet=True):
            for need in self.stuck.get(node, ()):
                free = (each for each in need.nodes if each.what == "free")
                reasons += [(node, self.views[each.rank].blocked[each.number]) for each in free]
                if not need.nodes:
                    reasons.append((node, None))
        return reasons

    # Who is waited for, but not stuck

    def late(self, blocked: Blocked, *, through_threads: bool = False) -> list[Node]:
        """The calls that ranks may still make, in no call, for which a thread waits;
        ``through_threads``: also behind threads that would have to go on first."""
        nodes = self.behind([blocked.awaits], through_threads=through_threads)
        return [node for node in nodes if node.what == "made" and not self.is_made(node) and not self.needs(node)]
