"""The connections of one group of CPU ranks: those of the backend's own calls, those that planned
messages take, and others for one purpose each.

Each is made at the first call that needs it, which all members make together: most groups of a
trainer never need more than the backend's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed has them too, but not for type checkers

from commlayer.failures.board import FailureBoard, own_client
from commlayer.failures.descriptors import CLIENT, require, shortfall
from commlayer.failures.endings import bury
from commlayer.failures.forks import never_free_in_child
from commlayer.failures.waits import bounded, end_wait, keep, wait_for_message, woken
from commlayer.scheduler.plan import Op
from commlayer.settings import MOST_CONNECTIONS, Settings
from commlayer.transport.contract import Channel, break_connections
from commlayer.transport.gloo import GlooTransport
from commlayer.transport.gloo_groups import gloo_in_order, needed_descriptors
from commlayer.transport.shared_memory.shared_messages import SharedMemoryGroup, sharing_memory

__all__ = ["Connections"]

_Made = TypeVar("_Made")


class Connections:
    """Makes the connections of one group, and breaks them all where a rank fails.

    ``nodes``: for each node that the group touches, its members as ranks *of the group*, of which
    this is ``rank``. ``global_ranks[i]`` is member i's rank in the job (for error messages).
    ``store`` is the group's own. ``board`` is where failures of the group are known.

    ``own_calls`` is the inner group of the backend's own calls, once there is one: a failure breaks
    its connections too, so that nobody waits for the rest of a timeout.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        nodes: Sequence[Sequence[int]],
        global_ranks: Sequence[int],
        store: Store,
        settings: Settings,
        timeout_s: float,
        board: FailureBoard,
    ) -> None:
        self.name, self.rank, self.global_ranks = name, rank, tuple(global_ranks)
        self.timeout_s, self.board = timeout_s, board
        self.own_calls: dist.ProcessGroup | None = None
        self.most = MOST_CONNECTIONS
        """Over how many connections plans may contend: less once so many could not be made."""
        self._nodes, self._store, self._settings = nodes, store, settings
        self._transport: GlooTransport | None = None
        self._purposes: list[dist.ProcessGroup] = []
        """Groups that were made here, each for one purpose, and are let go of here."""
        self._waited_for: set[dist.Work] = set()
        """Messages of ``own_calls`` that are waited for: see GlooTransport."""
        board.on_break(self._wake)

    def messages(self, number: int = 1) -> GlooTransport:
        """The transport of plans' messages: inside nodes through shared memory, else over the
        connections of the backend's own calls, under tags of their own; where ``number`` asks for
        several, over new ones too. Made at the first call that asks for them, which is
        collective."""
        if self._transport is None:
            own = self.of_own_calls()

            def share() -> dist.ProcessGroup:
                return sharing_memory(own, self.rank, self._nodes, self.timeout_s, self._settings, self.board)

            with self.board.connecting(self.global_ranks, self.name, "messages", self.timeout_s, self.abort):
                group = bounded(share, self.board, self.timeout_s, "messages")
            peers = tuple((rank, member) for member, rank in enumerate(self.global_ranks))
            self._transport = GlooTransport(dict.fromkeys(Op, Channel(self.name, group, peers)), self.board)
        if number > self.number:
            self._transport.widen(self._more(number, lambda purpose: self._made(purpose, self.timeout_s)))
        return self._transport

    @property
    def number(self) -> int:
        """Over how many connections messages may go to a member on another node by now."""
        return 1 if self._transport is None else 1 + len(self._transport.others)

    def shortage(self, number: int) -> str:
        """Say why this process cannot have so many connections with every member; "" where it
        may."""
        more = number - self.number
        needed = more * (needed_descriptors(len(self.global_ranks)) + CLIENT)
        return shortfall(needed, f"{self._where(f'{number} connections')}, {more} groups more")

    def try_more(self, number: int, patience_s: float) -> tuple[list[dist.ProcessGroup], str]:
        """Make what lacks for so many connections with every member, for :meth:`widen`; and say why
        it cannot be made here, if it cannot: then nothing breaks, and others may have made theirs.
        Collective."""
        errors: list[Exception] = []

        def made(purpose: str) -> dist.ProcessGroup | None:
            try:
                return self._bounded(purpose, self.timeout_s, patience_s)
            except (RuntimeError, OSError) as error:  # a TimeoutError is an OSError
                errors.append(error)
                return None

        groups = [group for group in self._more(number, made) if group is not None]
        return groups, str(errors[0]) if errors else ""

    def widen(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Send parts of large messages over ``groups`` too. On all ranks, before the same call."""
        self.messages().widen(groups)

    def _more(self, number: int, connect: Callable[[str], _Made]) -> list[_Made]:
        """``connect`` for each connection that lacks, on threads: each waits for the link some
        times."""
        numbers = range(self.number + 1, number + 1)
        with ThreadPoolExecutor(len(numbers)) as threads:
            return list(threads.map(connect, [f"messages, connection {each}" for each in numbers]))

    def of_own_calls(self) -> dist.ProcessGroup:
        """Gloo's own calls: the backend's group where this object serves one, else one on
        connections of its own, made at the first call of this, which is collective then."""
        if self.own_calls is None:
            self.own_calls = self.connect("own calls", self.timeout_s)
        return self.own_calls

    def connect(self, purpose: str, timeout_s: float) -> dist.ProcessGroup:
        """A Gloo group of the members for one purpose, let go of with the others.

        Collective. Raises PeerError, CollectiveTimeoutError where a member does not come.
        """
        group = self._made(purpose, timeout_s)
        self._purposes.append(group)
        return group

    def _made(self, purpose: str, timeout_s: float) -> dist.ProcessGroup:
        with self.board.connecting(self.global_ranks, self.name, purpose, timeout_s, self.abort):
            return self._bounded(purpose, timeout_s, timeout_s)

    def _bounded(self, purpose: str, timeout_s: float, patience_s: float) -> dist.ProcessGroup:
        """A group as of :meth:`connect`, given up after ``patience_s``, which breaks nothing where
        it fails."""

        # A client of its own: the groups of a process share one, whose waits hold its lock. Two
        # groups that connect on two threads, in another order on another rank, would wait for each
        # other for ever.
        size = len(self.global_ranks)

        def make() -> dist.ProcessGroup:
            require(needed_descriptors(size) + CLIENT, f"{self._where(purpose)}: a group of {size} ranks")
            store = PrefixStore(f"commlayer/{purpose}", own_client(self._store))
            gloo = gloo_in_order(store, self.rank, size, timedelta(seconds=timeout_s))
            never_free_in_child(gloo)
            return cast("dist.ProcessGroup", gloo)  # a backend has those of a group's verbs that are called

        return bounded(make, self.board, patience_s, purpose)

    def _where(self, purpose: str) -> str:
        return f"rank {self.global_ranks[self.rank]}, group {self.name}, {purpose}"

    def wait_for_message(self, work: dist.Work, timeout: timedelta) -> None:
        """Return when a message of ``own_calls`` has gone or come. Raises RuntimeError: Gloo's, or
        that the group has been broken meanwhile."""
        self._waited_for.add(work)  # before the look at the board: whoever breaks it looks here afterwards
        try:
            if self.board.is_broken or not wait_for_message(work, timeout, self.board):
                raise woken()
        finally:
            self._waited_for.discard(work)

    def _wake(self) -> None:
        """The board is broken: end the waits for messages of ``own_calls``, and break its
        connections."""
        for work in list(self._waited_for):
            end_wait(work)
        self._break_own_calls()

    def abort(self, why: str | None = None) -> None:
        """After a failure: wake up the ranks that wait for this one, and tell them ``why`` where
        the failure is ours."""
        if why is not None:
            self.board.leave(why)
        if self._transport is not None:
            self._transport.abort()
        self._break_own_calls()

    def _break_own_calls(self) -> None:
        group = self.own_calls  # another thread may be closing it
        if group is not None:
            break_connections(group, [member for member in range(len(self.global_ranks)) if member != self.rank])

    def close(self) -> None:
        """Let go of all. Not collective: whoever closes has seen its last call end."""
        self.board.close()
        groups = self._let_go()  # only this list refers to them now
        if self.board.has_abandoned:
            for group in groups:
                keep(group)
        else:
            bury(groups)

    def _let_go(self) -> list[object]:
        groups: list[object] = list(self._purposes)
        if self._transport is not None:
            groups += self._transport.release()
        for group in groups:
            if isinstance(group, SharedMemoryGroup):
                group.close()
        self._transport, self.own_calls = None, None
        self._purposes.clear()
        return groups
