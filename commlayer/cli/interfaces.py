"""Network interfaces, and which of them Gloo would take. Linux; elsewhere addresses stay unknown."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GlooChoice", "Interface", "gloo_address", "interfaces"]

_SIOCGIFADDR = 0x8915
_LOOPBACK = "127."


@dataclass(frozen=True)
class Interface:
    """One network interface; ``address`` is its IPv4 address, or empty."""

    name: str
    address: str
    state: str
    speed_mbit: int | None

    def describe(self) -> str:
        """Describe address, state and speed, as far as known."""
        speed = f"{self.speed_mbit} Mbit/s" if self.speed_mbit else ""
        return ", ".join(word for word in (self.address or "no IPv4 address", self.state, speed) if word)


def interfaces() -> list[Interface]:
    """List the interfaces of this network namespace."""
    known = []
    for _, name in socket.if_nameindex():
        address = ""
        with contextlib.suppress(ImportError, OSError):  # not Linux, or no address
            from fcntl import ioctl

            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                reply = ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            address = socket.inet_ntoa(reply[20:24])
        state, speed = _read(name, "operstate"), _read(name, "speed")
        # The driver says -1 where it does not know.
        rate = int(speed) if speed.isdecimal() else None
        known.append(Interface(name, address, "" if state == "unknown" else state, rate))
    return known


def _read(name: str, entry: str) -> str:
    try:
        return Path(f"/sys/class/net/{name}/{entry}").read_text(encoding="ascii").strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class GlooChoice:
    """The interface that Gloo would listen on, and what to do about it; ``is_wrong`` where it could not start."""

    names: tuple[str, ...]
    address: str
    why: str
    advice: str = ""
    is_wrong: bool = False

    def describe(self) -> str:
        """Describe interface, address, and the rule that led there."""
        return f"{', '.join(self.names) or '?'} ({self.address or 'no address'}): {self.why}"


def gloo_address(environment: Mapping[str, str] | None = None) -> GlooChoice:
    """Follow torch's rule: GLOO_SOCKET_IFNAME, else the address of this host's name, else loopback."""
    environment = os.environ if environment is None else environment
    known = {each.name: each.address for each in interfaces()}
    asked = tuple(name for name in environment.get("GLOO_SOCKET_IFNAME", "").split(",") if name)
    if asked:
        missing = [name for name in asked if name not in known]
        advice = f"no interface {', '.join(missing)} here: there are {', '.join(known)}" if missing else ""
        return GlooChoice(asked, known.get(asked[0], ""), "GLOO_SOCKET_IFNAME", advice, bool(missing))
    host = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
        why = f"the host name {host} resolves to it"
    except OSError:
        address, why = "127.0.0.1", f"the host name {host} does not resolve"
    if address.startswith(_LOOPBACK):
        names: tuple[str, ...] = ("lo",)
    else:
        names = tuple(name for name, own in known.items() if own == address)
    others = [name for name, own in known.items() if own and not own.startswith(_LOOPBACK)]
    advice = ""
    if address.startswith(_LOOPBACK):
        hint = f"GLOO_SOCKET_IFNAME={others[0]}" if others else "GLOO_SOCKET_IFNAME to an interface with an address"
        advice = f"ranks on other machines cannot reach it: for several machines set {hint}. For one it is fine"
    return GlooChoice(names, address, why, advice)
