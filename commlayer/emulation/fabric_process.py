"""The fabric's own side: it builds the network, answers requests, and cleans up when its parent is
gone."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
from collections.abc import Sequence
from typing import Any, NoReturn

from commlayer.emulation.namespaces import (
    become_root_of_user_namespace,
    kill_processes_in,
    namespace_id,
    new_network,
    node_name,
    private_hosts_file,
)
from commlayer.emulation.network import FabricLinks, NodeLinks, node_mac
from commlayer.emulation.protocol import CONTROL_ADDRESS, MESSAGE_BYTES, LinkSpec, error_reply
from commlayer.emulation.rates import format_rate, parse_rate
from commlayer.emulation.relay import SharedDelay, start_relay
from commlayer.profiles.errors import InternalError, UsageError

__all__ = ["fabric_main"]


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
        self._relay: int | None = None
        self._delay: SharedDelay | None = None

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
        for links_of_node in self._nodes:
            links_of_node.plug(self._spec.slowed_delay_us if self._spec.delay_by == "netem" else 0.0)
        if by_relay:
            macs = [bytes.fromhex(node_mac(node).replace(":", "")) for node in range(self._num_nodes)]
            self._delay = SharedDelay(self._spec.slowed_delay_us)
            self._relay = start_relay(ports, macs, self._delay)
        self.shape({"inter": self._spec.inter, "intra": self._spec.intra}, range(self._num_nodes))
        shared = [mount_fd, *([] if self._user_fd is None else [self._user_fd])]
        socket.send_fds(self._parent, [b"{}"], shared)
        for pair in fds:
            socket.send_fds(self._parent, [b"{}"], list(pair))
            os.close(pair[0])
            os.close(pair[1])

    def shape(self, rates: dict[str, int | None], nodes: Sequence[int]) -> None:
        """Set rates; a link that has its rate already is left alone (a change would refill its
        token bucket)."""
        for node in nodes:
            for link, rate in rates.items():
                if self._rates[node][link] == rate:
                    continue
                if link == "intra":
                    self._nodes[node].intra.set(self._spec.slowed(rate))
                else:
                    inner = self._nodes[node].inter
                    if inner is None:
                        raise InternalError(f"node {node} has no cable yet")
                    inner.set(self._spec.slowed(rate))
                    self._links.ports[node].set(self._spec.slowed(rate))
                self._rates[node][link] = rate

    def delay(self, delay_us: float) -> None:
        """Change the delay between nodes."""
        if self._delay is not None:
            self._delay.set(delay_us)
        elif self._spec.delay_by == "netem":
            for links in self._nodes:
                links.delay_by(delay_us)
        else:
            raise UsageError("this emulated cluster has no delay: make it with one (delay_us), and then change it")

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
            message = connection.recv(MESSAGE_BYTES)
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
            if request["op"] == "shape_pair":
                sender, receiver = request["nodes"]
                if sender == receiver or not all(_is_node(node, self._num_nodes) for node in (sender, receiver)):
                    raise UsageError(
                        f"nodes: expected two different ones of 0 to {self._num_nodes - 1}, "
                        f"got {sender!r} and {receiver!r}"
                    )
                rate = self._parsed(request["rate"], "rate")
                self._nodes[sender].slow_down_to(receiver, self._spec.slowed(rate))
                return {}
            if request["op"] == "delay":
                self.delay(request["delay_us"] * self._spec.scale)
                return {}
            rates = {link: self._parsed(rate, link) for link, rate in request["rates"].items()}
            node = request["node"]
            if node is not None and not _is_node(node, self._num_nodes):
                raise UsageError(f"node: expected None (all) or 0 to {self._num_nodes - 1}, got {node!r}")
            self.shape(rates, range(self._num_nodes) if node is None else [node])
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the one who asked
            return error_reply(error)
        return {}

    def _parsed(self, rate: str | None, name: str) -> int | None:
        return None if rate is None else parse_rate(rate, name, self._spec.scale)

    def clean_up(self) -> None:
        """Kill what still lives in the nodes, and the relay."""
        kill_processes_in(self._networks)
        if self._relay is not None:
            os.kill(self._relay, signal.SIGKILL)
            os.waitpid(self._relay, 0)


def _is_node(node: object, num_nodes: int) -> bool:
    return isinstance(node, int) and 0 <= node < num_nodes


def fabric_main(control: socket.socket, num_nodes: int, spec: LinkSpec, user_namespace: bool) -> NoReturn:
    """Body of the forked process; never returns into the parent's code."""
    try:
        # Objects of the parent must not be finalised here: their descriptors' numbers are reused
        # below.
        gc.disable()
        gc.freeze()
        os.setsid()
        # Close every inherited descriptor but one: a copied pipe end would keep its other side from
        # seeing the end.
        os.closerange(3, control.fileno())
        os.closerange(control.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        null = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(null, standard)
        if null > 2:
            os.close(null)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        try:
            fabric = _FabricProcess(control, num_nodes, spec, user_namespace)
            fabric.build()
        except Exception as error:  # noqa: BLE001 - reported to the parent, who raises it
            control.send(json.dumps(error_reply(error)).encode())
        else:
            fabric.serve()
            fabric.clean_up()
    finally:
        os._exit(0)
