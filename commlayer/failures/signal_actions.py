"""The system's action for a signal, read and put back: Python does not know of handlers in C."""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["SignalAction", "system_library"]

_ACTION_BYTES = 512
"""More than the system's struct sigaction has."""


class SignalAction:
    """The action of the system for the signal ``number``, as it is when this is made. Raises OSError where it cannot be read."""

    def __init__(self, number: int) -> None:
        self._number, self._action = int(number), ctypes.create_string_buffer(_ACTION_BYTES)
        if system_library().sigaction(self._number, None, self._action) != 0:
            raise OSError(f"the action of signal {self._number} cannot be read")

    @property
    def handler(self) -> bytes:
        """The address of the handler: the first field; of others parts are left as they were."""
        return self._action.raw[: ctypes.sizeof(ctypes.c_void_p)]

    def put_back(self) -> None:
        """Have the system do so again."""
        system_library().sigaction(self._number, self._action, None)


def system_library() -> Any:
    """The functions of the system's library: Python's own ``signal`` would put handlers of its own in their place."""
    system: Any = ctypes.CDLL(None)
    system.signal.restype = ctypes.c_void_p
    system.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    return system
