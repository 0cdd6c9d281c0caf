"""A bounded dictionary of what was found out once: decisions, prepared plans, predicted times of steps."""

from __future__ import annotations

import threading
from typing import TypeVar

__all__ = ["Kept"]

Key = TypeVar("Key")
Value = TypeVar("Value")


class Kept(dict[Key, Value]):
    """A dictionary of the latest ``most`` entries; what is added beyond them drives out the oldest.

    Several threads may add at once, as groups that share a planner do. It is asked with ``get``, as any dictionary, which costs
    no call of Python where the answer is there. Rejected: functools.lru_cache, which calls the function itself, hashes all of
    its arguments, and ties a method's object to itself.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self._lock = threading.Lock()

    def add(self, key: Key, value: Value) -> Value:
        """Keep ``value``, and return it."""
        with self._lock:
            if len(self) >= self.most:
                del self[next(iter(self))]
            self[key] = value
        return value
