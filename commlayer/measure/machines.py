"""A rank's machine as the cache of profiles tells machines apart: by its links and processor, and not by its name.

Pods and cloud machines have another name in every job, and the same links. Whatever this does not see (a switch, a quota of the
network) is found by the check of a cached profile (`scheduler/experience/start_check.py`).
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import struct
from pathlib import Path

from commlayer.agree.messages import ControlMessage
from commlayer.settings import Settings
from commlayer.transport.shared_memory.shared_messages import wants_shared_memory

__all__ = ["Machine", "describe_machine"]

_SIOCGIFADDR, _SIOCGIFMTU, _SIOCGIFHWADDR, _SIOCETHTOOL = (
    0x8915,
    0x8921,
    0x8927,
    0x8946,
)  # netdevice(7), linux/sockios.h
_ETHTOOL_GSET, _ETHTOOL_GDRVINFO = 0x1, 0x3
_UNKNOWN_SPEED = (0, 0xFFFF, 0xFFFFFFFF)
_UNKNOWN = "unknown"


class Machine(ControlMessage, frozen=True):
    """The part of a machine on which times of messages depend. ``interface``: kind, driver, speed and MTU of Gloo's."""

    interface: str
    processor: str
    cores: int
    shares_memory: bool


def describe_machine(settings: Settings) -> Machine:
    """This rank's machine. Raises nothing: whatever cannot be found is said to be unknown."""
    name = _interface()
    interface = _UNKNOWN
    if name is not None:
        kind = _number(_asked(name, _SIOCGIFHWADDR), "H")
        mtu = _number(_asked(name, _SIOCGIFMTU), "i")
        answer = _ethtool(name, _ETHTOOL_GDRVINFO, 256)
        driver = _UNKNOWN if answer is None else answer[4:36].split(b"\0")[0].decode("ascii", "replace")
        answer, speed = _ethtool(name, _ETHTOOL_GSET, 64), _UNKNOWN
        if answer is not None:  # in Mbit/s, as the driver says
            low, high = struct.unpack_from("H", answer, 12)[0], struct.unpack_from("H", answer, 28)[0]
            if (high << 16 | low) not in _UNKNOWN_SPEED:
                speed = str(high << 16 | low)
        interface = f"kind {kind} driver {driver} speed {speed} mtu {mtu}"
    processor = platform.machine()
    with contextlib.suppress(OSError):  # the model, of which not every architecture tells the name
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "cpu model", "CPU part"):
                processor += f" {value.strip()}"
                break
    return Machine(interface, processor, os.cpu_count() or 0, wants_shared_memory(settings))


def _interface() -> str | None:
    """The interface that Gloo takes: the one that is set, else the one to which this machine's name leads."""
    if named := os.environ.get("GLOO_SOCKET_IFNAME"):
        return named.split(",")[0]
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        for _, name in socket.if_nameindex():
            if socket.inet_ntoa((_asked(name, _SIOCGIFADDR) or b"\0" * 24)[20:24]) == address:
                return name
    return None


def _asked(name: str, request: int, data: bytes = b"") -> bytes | None:
    """The kernel's answer (a ``struct ifreq``) to ``request`` about an interface; None where there is none."""
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        return fcntl.ioctl(any_socket, request, struct.pack("16s240s", name.encode()[:15], data))
    return None


def _number(answer: bytes | None, form: str) -> str:
    return _UNKNOWN if answer is None else str(struct.unpack_from(form, answer, 16)[0])


def _ethtool(name: str, command: int, size: int) -> bytes | None:
    """The answer of the interface's driver, which the kernel writes into memory that the request points to."""
    import ctypes

    memory = ctypes.create_string_buffer(struct.pack("I", command), size)
    pointer = struct.pack("P", ctypes.addressof(memory))
    return None if _asked(name, _SIOCETHTOOL, pointer) is None else memory.raw
