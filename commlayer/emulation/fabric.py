"""The fabric: a process that builds the cluster's network, keeps it, and changes it on request.

It is forked once per cluster, sits in the namespace of the wires, hands the nodes' namespaces to the parent as file
descriptors, and serves `shape` requests from the parent (a socket pair) and from any process inside a node (an abstract
Unix socket, which is private to the node's network namespace). When the parent is gone it kills what still lives in the
nodes, also what left its process group, and exits; with it the kernel removes namespaces, cables and queues.

A process of its own, and not netlink calls in the parent, because the calling thread would have to change namespaces,
and because pyroute2 runs an event loop.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from commlayer.emulation import syscalls
from commlayer.emulation.namespaces import (
    RankSpaces,
    become_root_of_user_namespace,
    namespace_id,
    new_network,
    node_name,
    private_hosts_file,
    processes_in,
)
from commlayer.emulation.network import FabricLinks, NodeLinks
from commlayer.emulation.rates import format_rate, parse_rate
from commlayer.emulation.relay import start_relay
from commlayer.profiles.errors import CommlayerError, InternalError, RightsError, UsageError

__all__ = ["CONTROL_ADDRESS", "Fabric", "LinkSpec", "kill_processes_in", "raise_reply"]

CONTROL_ADDRESS = "\0commlayer-emulation"
"""Abstract Unix address, in every node's own namespace, where the fabric listens for requests."""

_MESSAGE_BYTES = 65536


@dataclass(frozen=True)
class LinkSpec:
    """What the wires shall be. Rates in bytes per second (None: unshaped); delay one way, between nodes."""

    inter: int | None
    intra: int | None
    delay_us: float
    delay_by: str
    """``none``, ``netem`` (the kernel's) or ``relay`` (ours)."""


class _FabricProcess:
    """The child's side."""

    def __init__(self, parent: socket.socket, num_nodes: int, spec: LinkSpec, user_namespace: bool) -> None:
        self._parent = parent
        self._num_nodes = num_nodes
        self._spec = spec
        self._user_fd: int | None = None
        if user_namespace:
            become_root_of_user_namespace()
            self._user_fd = os.open("/proc/self/ns/user", os.O_RDONLY)
        self._nodes: list[NodeLinks] = []
        self._networks: list[str] = []
        self._rates: list[dict[str, int | None]] = [{"inter": None, "intra": None} for _ in range(num_nodes)]
        self._selector = selectors.DefaultSelector()

    def build(self) -> None:
        """Make the namespaces and the network, and send the descriptors to the parent."""
        mount_fd = private_hosts_file(self._num_nodes)
        fds: list[tuple[int, int]] = []
        for node in range(self._num_nodes):
            fds.append(new_network(node_name(node)))
            self._nodes.append(NodeLinks(node))
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind(CONTROL_ADDRESS)
            listener.listen(64)
            self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._networks = [namespace_id(net_fd) for net_fd, _ in fds]
        new_network("fabric")
        by_relay = self._spec.delay_by == "relay"
        links = self._links = FabricLinks(with_bridge=not by_relay)
        ports = [links.cable(node, net_fd) for node, (net_fd, _) in enumerate(fds)]
        for node in self._nodes:
            node.plug(self._spec.delay_us if self._spec.delay_by == "netem" else 0.0)
        if by_relay:
            start_relay(ports, self._spec.delay_us)
        self.shape({"inter": self._spec.inter, "intra": self._spec.intra}, range(self._num_nodes))
        shared = [mount_fd, *([] if self._user_fd is None else [self._user_fd])]
        socket.send_fds(self._parent, [b"{}"], shared)
        for pair in fds:
            socket.send_fds(self._parent, [b"{}"], list(pair))
            os.close(pair[0])
            os.close(pair[1])

    def shape(self, rates: dict[str, int | None], nodes: Sequence[int]) -> None:
        """Set rates; a link that has its rate already is left alone (a change would refill its token bucket)."""
        for node in nodes:
            for link, rate in rates.items():
                if self._rates[node][link] == rate:
                    continue
                if link == "intra":
                    self._nodes[node].intra.set(rate)
                else:
                    inner = self._nodes[node].inter
                    if inner is None:
                        raise InternalError(f"node {node} has no cable yet")
                    inner.set(rate)
                    self._links.ports[node].set(rate)
                self._rates[node][link] = rate

    def serve(self) -> None:
        """Answer requests until the parent closes its end."""
        self._selector.register(self._parent, selectors.EVENT_READ, self._answer)
        while True:
            for key, _ in self._selector.select():
                if not key.data(key.fileobj) and key.fileobj is self._parent:
                    return

    def _accept(self, listener: socket.socket) -> bool:
        connection, _ = listener.accept()
        self._selector.register(connection, selectors.EVENT_READ, self._answer)
        return True

    def _answer(self, connection: socket.socket) -> bool:
        try:
            message = connection.recv(_MESSAGE_BYTES)
        except OSError:
            message = b""
        if not message:
            self._selector.unregister(connection)
            if connection is not self._parent:
                connection.close()
            return False
        with contextlib.suppress(OSError):
            connection.send(json.dumps(self._reply(message)).encode())
        return True

    def _reply(self, message: bytes) -> dict[str, Any]:
        try:
            request = json.loads(message)
            if request["op"] == "rates":
                return {"rates": [{k: format_rate(v) for k, v in rates.items()} for rates in self._rates]}
            rates = {
                link: None if rate is None else parse_rate(rate, link) for link, rate in request["rates"].items()
            }
            self.shape(rates, _chosen_nodes(request["node"], self._num_nodes))
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the one who asked
            return _error_reply(error)
        return {}

    def clean_up(self) -> None:
        """Kill what still lives in the nodes."""
        kill_processes_in(self._networks)


def _chosen_nodes(node: int | None, num_nodes: int) -> Sequence[int]:
    if node is None:
        return range(num_nodes)
    if not isinstance(node, int) or not 0 <= node < num_nodes:
        raise UsageError(f"node: expected None (all) or 0 to {num_nodes - 1}, got {node!r}")
    return [node]


def _error_reply(error: Exception) -> dict[str, Any]:
    kind = "usage" if isinstance(error, UsageError) else "rights" if isinstance(error, OSError) else "internal"
    text = str(error) if isinstance(error, CommlayerError) else f"{type(error).__name__}: {error}"
    return {"error": text, "kind": kind}


def raise_reply(reply: dict[str, Any]) -> None:
    """Raise the error that a reply of the fabric carries, if it carries one."""
    if "error" in reply:
        kinds: dict[str, type[CommlayerError]] = {"usage": UsageError, "rights": RightsError}
        raise kinds.get(reply["kind"], InternalError)(reply["error"])


def kill_processes_in(networks: Sequence[str], patience_s: float = 5.0) -> None:
    """SIGKILL every process in these networks, again until none is left (they may fork while we look)."""
    deadline = time.monotonic() + patience_s
    while (pids := processes_in(networks)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def _fabric_main(control: socket.socket, num_nodes: int, spec: LinkSpec, user_namespace: bool) -> NoReturn:
    """Body of the forked process; never returns into the parent's code."""
    try:
        # Objects of the parent must not be finalised here: their descriptors' numbers are reused below.
        gc.disable()
        gc.freeze()
        os.setsid()
        _keep_only(control.fileno())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        try:
            fabric = _FabricProcess(control, num_nodes, spec, user_namespace)
            fabric.build()
        except Exception as error:  # noqa: BLE001 - reported to the parent, who raises it
            control.send(json.dumps(_error_reply(error)).encode())
        else:
            fabric.serve()
            fabric.clean_up()
    finally:
        os._exit(0)


def _keep_only(fd: int) -> None:
    """Close every inherited descriptor but one: a copied pipe end would keep its other side from seeing the end."""
    os.closerange(3, fd)
    os.closerange(fd + 1, os.sysconf("SC_OPEN_MAX"))
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    if null > 2:
        os.close(null)


class Fabric:
    """The parent's side: the nodes' namespaces, and a line to the fabric process."""

    def __init__(self, num_nodes: int, spec: LinkSpec, *, user_namespace: bool) -> None:
        """Start the process and wait until the network stands.

        Raises:
            RightsError: the kernel refused a namespace, a link or a queue.
        """
        self._owner = os.getpid()
        self.spaces: list[RankSpaces] = []
        self._shared_fds: list[int] = []
        self._socket, childs_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            _fabric_main(childs_end, num_nodes, spec, user_namespace)
        childs_end.close()
        try:
            self._shared_fds = self._receive_fds(2)
            mount_fd, user_fd = self._shared_fds[0], (self._shared_fds[1] if user_namespace else None)
            for _ in range(num_nodes):
                net_fd, uts_fd = self._receive_fds(2)
                self.spaces.append(RankSpaces(net_fd, uts_fd, mount_fd, user_fd))
            self._networks = [namespace_id(space.net_fd) for space in self.spaces]
        except BaseException:
            self.close()
            raise

    def _receive_fds(self, count: int) -> list[int]:
        message, fds, _, _ = socket.recv_fds(self._socket, _MESSAGE_BYTES, count)
        if not message:
            raise RightsError("the process that builds the emulated network died (out of memory? see dmesg)")
        raise_reply(json.loads(message))
        return fds

    @property
    def fds(self) -> list[int]:
        """Every descriptor that the parent holds; a rank closes them once it has entered its node."""
        spaces = [fd for space in self.spaces for fd in (space.net_fd, space.uts_fd)]
        return [self._socket.fileno(), *self._shared_fds, *spaces]

    def request(self, message: dict[str, object]) -> dict[str, Any]:
        """Send one request and return the reply; the caller keeps other threads out.

        Raises:
            UsageError, RightsError: as the fabric replied, or because it is gone.
        """
        try:
            self._socket.send(json.dumps(message).encode())
            raw = self._socket.recv(_MESSAGE_BYTES)
        except OSError:
            raw = b""
        if not raw:
            raise RightsError("the process that keeps the emulated network is gone: it was killed, or the cluster closed")
        reply: dict[str, Any] = json.loads(raw)
        raise_reply(reply)
        return reply

    def kill_strays(self) -> None:
        """Kill what still lives in the nodes' namespaces."""
        kill_processes_in(self._networks)

    def close(self) -> None:
        """End the fabric process and give every descriptor back; harmless when repeated, or in a forked copy."""
        if self._socket.fileno() < 0:
            return
        _, *fds = self.fds
        self._socket.close()
        if os.getpid() == self._owner:
            _reap(self.pid, patience_s=10.0)
        for fd in fds:
            os.close(fd)
        self.spaces, self._shared_fds = [], []


def _reap(pid: int, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)
