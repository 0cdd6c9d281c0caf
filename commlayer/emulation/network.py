"""Links and queues of the emulated cluster, over netlink (pyroute2). Runs in the fabric process only.

    node0 [eth0] ══ veth ══ [port0]┐
    node1 [eth0] ══ veth ══ [port1]┤ bridge, in the fabric's own namespace
                    …              ┘

A token bucket sits on both ends of each cable: on eth0 for what the node sends, on the port for what it receives. Where the way
to another node is slower, a class of its own inside the bucket of eth0 holds back what goes there, and nothing else.
"""

from __future__ import annotations

import socket
from typing import Any

from commlayer.emulation.namespaces import node_address
from commlayer.emulation.rates import MAX_BYTES_PER_S
from commlayer.profiles.errors import InternalError

__all__ = ["FabricLinks", "NodeLinks", "add_netem", "node_mac", "open_netlink"]

_ROOT = 0xFFFFFFFF
_BURST_BYTES = 68 * 1024
_BURST_S = 0.5e-3
_LIMIT_BYTES = 4 * 1024 * 1024
_NETEM_LIMIT_PACKETS = 100_000
_ETH_P_IP = 0x0800
_PEERS = 0x20
"""The handle of what tells packets to different nodes apart."""


def open_netlink() -> Any:
    """A netlink socket that stays with the network namespace in which it is opened.

    Raises:
        ImportError: pyroute2 is not installed.
    """
    from pyroute2 import IPRoute

    return IPRoute()


def _index(netlink: Any, name: str) -> int:
    return int(netlink.link_lookup(ifname=name)[0])


class _Shaper:
    """The token bucket of one interface.

    The burst is as small as it can be, since what a message saves by it, a stream of messages does not (with 128 KiB,
    messages of 64 to 256 KiB were measured above the link's rate): a packet of loopback's 64 KiB and its headers must
    pass whole, or is dropped; and fast wires need half a millisecond between two timers. Limit 4 MiB: deep enough that
    TCP never loses a packet to the queue with a few dozen connections. HTB with classes was rejected: one class a link
    needs no tree.
    """

    def __init__(self, netlink: Any, index: int, parent: int = _ROOT, handle: str = "1:") -> None:
        self._netlink, self._index, self._parent, self._handle = netlink, index, parent, handle
        self._active = False

    def set(self, bytes_per_s: int | None) -> None:
        """Change the rate; packets in the queue stay there.

        A bucket is never removed again, its packets would be lost with it and TCP would wait for its timer: unshaped
        then means the largest rate, which is more than a veth pair carries.
        """
        if bytes_per_s is None and not self._active:
            return
        self._hold(bytes_per_s)

    def inside(self) -> int:
        """The place inside the bucket for a queue of queues. Where there is no bucket, one that holds nothing back is made."""
        if not self._active:
            self._hold(None)
        return int(self._handle.rstrip(":"), 16) << 16 | 1

    def _hold(self, bytes_per_s: int | None) -> None:
        rate = MAX_BYTES_PER_S if bytes_per_s is None else bytes_per_s
        self._netlink.tc(
            "change" if self._active else "add",
            "tbf",
            self._index,
            handle=self._handle,
            parent=self._parent,
            rate=rate,
            burst=max(_BURST_BYTES, int(rate * _BURST_S)),
            limit=_LIMIT_BYTES,
        )
        self._active = True


class _PeerShaper:
    """The rates of one interface to single other nodes, each a class inside the interface's bucket: HTB, told apart by address.

    A class stands before the bucket, not behind it: what waits for a slow way does not hold up what goes another one.
    """

    def __init__(self, netlink: Any, index: int, parent: int) -> None:
        self._netlink, self._index = netlink, index
        self._peers: set[int] = set()
        netlink.tc("add", "htb", index, handle=_PEERS << 16, parent=parent, default=0)  # other packets pass at once

    def set(self, peer: int, bytes_per_s: int | None) -> None:
        """Change the rate to a node; None: as fast as the interface."""
        rate = MAX_BYTES_PER_S if bytes_per_s is None else bytes_per_s
        burst = max(_BURST_BYTES, int(rate * _BURST_S))
        handle = _PEERS << 16 | (peer + 1)
        self._netlink.tc(
            "change-class" if peer in self._peers else "add-class",
            "htb",
            self._index,
            handle=handle,
            parent=_PEERS << 16,
            rate=rate,
            ceil=rate,
            burst=burst,
            cburst=burst,
        )
        if peer not in self._peers:
            address = int.from_bytes(socket.inet_aton(node_address(peer)), "big")
            key = f"{address:#010x}/0xffffffff+16"  # the destination, in an IPv4 header
            self._netlink.tc(
                "add-filter",
                "u32",
                self._index,
                parent=_PEERS << 16,
                prio=1,
                protocol=_ETH_P_IP,
                target=handle,
                keys=[key],
            )
        self._peers.add(peer)


def add_netem(netlink: Any, index: int, delay_us: float, verb: str = "add") -> None:
    """Put the kernel's delay queue at the root of an interface (handle ``9:``, its child is ``9:1``), or ``change`` its delay."""
    netlink.tc(verb, "netem", index, handle="9:", parent=_ROOT, delay=round(delay_us), limit=_NETEM_LIMIT_PACKETS)


class NodeLinks:
    """The interfaces inside one node's namespace; construct it while the process is in that namespace."""

    def __init__(self, node: int) -> None:
        self._netlink = open_netlink()
        self._node = node
        loopback = _index(self._netlink, "lo")
        self._netlink.link("set", index=loopback, state="up")
        self.intra = _Shaper(self._netlink, loopback)
        self.inter: _Shaper | None = None
        self._peers: _PeerShaper | None = None
        self._eth0 = 0

    def plug(self, netem_delay_us: float) -> None:
        """Configure eth0 once the cable is there."""
        index = self._eth0 = _index(self._netlink, "eth0")
        self._netlink.addr("add", index=index, address=node_address(self._node), prefixlen=16)
        self._netlink.link("set", index=index, state="up")
        if netem_delay_us:
            # tc's own documented order: the delay outside, the rate as its child.
            add_netem(self._netlink, index, netem_delay_us)
            self.inter = _Shaper(self._netlink, index, parent=0x00090001, handle="10:")
        else:
            self.inter = _Shaper(self._netlink, index)

    def delay_by(self, delay_us: float) -> None:
        """Change how long what this node sends is delayed."""
        add_netem(self._netlink, self._eth0, delay_us, "change")

    def slow_down_to(self, peer: int, bytes_per_s: int | None) -> None:
        """Change the rate of what this node sends to another one; None: as fast as its interface."""
        if self.inter is None:
            raise InternalError(f"node {self._node} has no cable yet")
        if self._peers is None:
            self._peers = _PeerShaper(self._netlink, self._eth0, self.inter.inside())
        self._peers.set(peer, bytes_per_s)


def node_mac(node: int) -> str:
    """Hardware address of a node's eth0: fixed, so that the relay needs no learning."""
    return f"02:77:00:00:{node // 256:02x}:{node % 256:02x}"


class FabricLinks:
    """The cables and what joins them; construct it while the process is in the fabric's namespace."""

    def __init__(self, *, with_bridge: bool) -> None:
        self._netlink = open_netlink()
        self._bridge: int | None = None
        if with_bridge:
            self._netlink.link("add", ifname="bridge", kind="bridge")
            self._bridge = _index(self._netlink, "bridge")
            self._netlink.link("set", index=self._bridge, state="up")
        self.ports: list[_Shaper] = []

    def cable(self, node: int, net_fd: int) -> str:
        """Lay a veth pair into a node's namespace; returns the name of the fabric's end."""
        port = f"port{node}"
        peer = {"ifname": "eth0", "address": node_mac(node), "net_ns_fd": net_fd}
        self._netlink.link("add", ifname=port, kind="veth", peer=peer)
        index = _index(self._netlink, port)
        if self._bridge is not None:
            self._netlink.link("set", index=index, master=self._bridge)
        self._netlink.link("set", index=index, state="up")
        self.ports.append(_Shaper(self._netlink, index))
        return port
