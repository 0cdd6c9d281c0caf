"""The rights that emulation needs, and which of them this machine grants."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass

from commlayer.emulation import syscalls

__all__ = ["INSTALL_HINT", "Rights", "rights"]

INSTALL_HINT = "pyroute2 is not installed: pip install 'pyroute2>=0.8'"
_NO_NAMESPACES = "no right to create network namespaces (CAP_SYS_ADMIN)"
_REMEDY = "run as root, in a container with --cap-add SYS_ADMIN --cap-add NET_ADMIN, or allow user namespaces"


@dataclass(frozen=True)
class Rights:
    """The rights that the kernel grants this process."""

    netns: bool
    """Whether nodes can be network namespaces."""
    shaping: bool
    """Whether links can have a rate (sch_tbf)."""
    delay: str
    """The means of delay: ``netem`` (the kernel's), ``relay`` (a userspace process between the cables) or ``none``."""
    reason: str
    """The right that is missing and what to do about it; empty if none is."""
    user_namespace: bool = False
    """Whether the rights come from a user namespace of our own, not from the process itself."""


@functools.cache
def rights() -> Rights:
    """Find out which rights there are, once per process, by trying: a forked child makes a namespace and a veth pair
    with a token bucket.
    """
    if importlib.util.find_spec("pyroute2") is None:
        return Rights(False, False, "none", INSTALL_HINT)
    import pyroute2  # noqa: F401 - here, so that no forked child pays for the import

    from commlayer.emulation.namespaces import has_capabilities

    user_namespace = not has_capabilities()
    words = _in_child(lambda: _try_out(user_namespace)).split("\n")
    if "netns" not in words:
        return Rights(False, False, "none", f"{_NO_NAMESPACES}: {' '.join(words) or 'the probe died'}; {_REMEDY}")
    shaping = "tbf" in words
    delay = "netem" if "netem" in words else "relay" if "packet" in words else "none"
    missing = [] if shaping else ["the kernel has no token bucket (sch_tbf): rates cannot be shaped"]
    if delay == "none":
        missing.append("delay needs the kernel's sch_netem or packet sockets (CONFIG_PACKET)")
    return Rights(True, shaping, delay, "; ".join(missing), user_namespace)


def _try_out(user_namespace: bool) -> str:
    import socket

    from commlayer.emulation import namespaces, network

    if user_namespace:
        namespaces.become_root_of_user_namespace()
    namespaces.private_hosts_file(1)
    net_fd, _ = namespaces.new_network("probe")
    node = network.NodeLinks(0)
    namespaces.new_network("fabric")
    netlink = network.open_netlink()
    network.FabricLinks(with_bridge=True).cable(0, net_fd)
    node.plug(0.0)
    words = ["netns"]
    with contextlib.suppress(Exception):
        node.intra.set(10**6)
        words.append("tbf")
    with contextlib.suppress(Exception):
        network.add_netem(netlink, netlink.link_lookup(ifname="port0")[0], 1000.0)
        words.append("netem")
    with contextlib.suppress(OSError):
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()
        words.append("packet")
    return "\n".join(words)


def _in_child(probe: Callable[[], str]) -> str:
    """The text that `probe` returns, or its error, computed in a forked child whose namespaces end with it."""
    reader, writer = os.pipe()
    pid = syscalls.fork()
    if pid == 0:
        try:
            text = probe()
        except BaseException as error:  # noqa: BLE001 - this process ends here
            text = f"{type(error).__name__}: {error}"
        finally:
            with contextlib.suppress(BaseException):
                os.write(writer, text.encode()[:4096])
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as stream:
        text = stream.read()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    return text
