"""A store that counts what one rank asks of it, and the most messages that a rank may send: how a start grows with the ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store  # torch.distributed has it too, but not for type checkers

from commlayer.agree.tree import FAN_OUT

__all__ = ["CountingStore", "most_messages"]


def most_messages(size: int) -> int:
    """Bound the messages, sent and received, of one rank in one gather of ``size`` ranks."""
    return min(2 * (FAN_OUT + 1), 2 * math.ceil(math.log2(max(size, 2))) + 2)


class CountingStore(Store):
    """``inner``, with its operations counted by name in ``operations``, and the bytes that they carry in ``num_bytes``.

    Pass it to ``init_process_group(store=…)``. An operation on several keys is one for each of them. What goes through a client
    of somebody's own (``clone``) is not counted.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self.inner: Any = inner  # torch's annotations lack a part of its methods
        self.operations: Counter[str] = Counter()
        self.num_bytes = 0

    def count(self, name: str, times: int = 1, num_bytes: int = 0) -> None:
        """Count ``times`` operations of that name, which carry ``num_bytes`` together."""
        self.operations[name] += times
        self.num_bytes += num_bytes

    def set(self, key: str, value: bytes | str) -> None:
        """Store's own, counted; so are all the others."""
        self.count("set", 1, len(value))
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        """See :meth:`set`."""
        value: bytes = self.inner.get(key)
        self.count("get", 1, len(value))
        return value

    def add(self, key: str, value: int) -> int:
        """See :meth:`set`."""
        self.count("add")
        return int(self.inner.add(key, value))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """See :meth:`set`."""
        self.count("compare_set", 1, len(desired))
        return bytes(self.inner.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        """See :meth:`set`."""
        self.count("delete")
        return bool(self.inner.delete_key(key))

    def check(self, keys: list[str]) -> bool:
        """See :meth:`set`."""
        self.count("check", len(keys))
        return bool(self.inner.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """See :meth:`set`."""
        self.count("wait", len(keys))
        if timeout is None:
            self.inner.wait(keys)
        else:
            self.inner.wait(keys, timeout)

    def append(self, key: str, value: str) -> None:
        """See :meth:`set`."""
        self.count("append", 1, len(value))
        self.inner.append(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """See :meth:`set`."""
        values: list[bytes] = self.inner.multi_get(keys)
        self.count("get", len(keys), sum(map(len, values)))
        return values

    def multi_set(self, keys: list[str], values: Sequence[str]) -> None:
        """See :meth:`set`."""
        self.count("set", len(keys), sum(map(len, values)))
        self.inner.multi_set(keys, values)

    def num_keys(self) -> int:
        """See :meth:`set`."""
        self.count("num_keys")
        return int(self.inner.num_keys())

    def has_extended_api(self) -> bool:
        """Whether ``inner`` has multi_get, multi_set and append."""
        return bool(self.inner.has_extended_api())

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of ``inner``."""
        self.inner.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        """The timeout of ``inner``."""
        timeout: timedelta = self.inner.timeout
        return timeout

    def clone(self) -> Store:
        """A client of its own, which is not counted."""
        clone: Store = self.inner.clone()
        return clone
