"""A store for ranks that are connected already: what one of them sets, all have, by one gather over
their connections.

A Gloo group finds its members through a store, in which each rank sets its address and asks for
those of all others: n waits and n gets a rank. Where the same ranks have one group already, the
addresses of the next one go round in it, and the job's store, which one process serves to all
ranks, is not asked at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from torch._C._distributed_c10d import Store  # torch.distributed has it too, but not for type checkers

from commlayer.agree.messages import ControlMessage, Peers, check_alike
from commlayer.agree.tree import gather_by_tree

__all__ = ["GatheredStore"]


class _Entry(ControlMessage, frozen=True):
    key: str
    value: bytes
    note: dict[str, str]


class GatheredStore(Store):
    """The store of ``peers``, all of whom call :meth:`set` equally often; whatever they set is
    there when it returns.

    It is for making one group: whoever makes it keeps this object alive meanwhile, since C++ does
    not. ``note``: what this rank tells beside, by name: see :meth:`check_notes`.
    """

    def __init__(self, peers: Peers, timeout_s: float, purpose: str, note: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._peers, self._timeout_s, self._purpose = peers, timeout_s, purpose
        self._entries: dict[str, bytes] = {}
        self._note = dict(note or {})
        self._notes: list[dict[str, str]] = []

    def set(self, key: str, value: bytes | str) -> None:
        """Tell all ranks ``value``, and hear theirs. Collective; raises as
        :func:`commlayer.agree.tree.gather_by_tree`."""
        own_entry = _Entry(key, value.encode() if isinstance(value, str) else bytes(value), self._note)
        entries = gather_by_tree(own_entry, _Entry, self._peers, self._timeout_s, self._purpose)
        self._entries |= {entry.key: entry.value for entry in entries}
        self._notes = [entry.note for entry in entries]

    def check_notes(self) -> None:
        """Raise DisagreementError, on all ranks alike, where they told different notes; it names
        ranks and values."""
        if self._notes:
            check_alike(list(zip(self._peers.ranks, self._notes, strict=True)))

    def get(self, key: str) -> bytes:
        """The value of a key that some rank has set. Raises KeyError for another one."""
        return self._entries[key]

    def check(self, keys: list[str]) -> bool:
        """Whether all of ``keys`` have been set."""
        return all(key in self._entries for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Raise KeyError unless all of ``keys`` have been set: none of them would come by
        waiting."""
        for key in keys:
            self.get(key)
