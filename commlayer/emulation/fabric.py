"""The fabric: a process that builds the cluster's network, keeps it, and changes it on request.

It is forked once per cluster, sits in the namespace of the wires, hands the nodes' namespaces to
the parent as file descriptors, and serves `shape` requests from the parent (a socket pair) and from
any process inside a node (an abstract Unix socket, which is private to the node's network
namespace). When the parent is gone it kills what still lives in the nodes, also what left its
process group, and exits; with it the kernel removes namespaces, cables and queues.

A process of its own, and not netlink calls in the parent, because the calling thread would have to
change namespaces, and because pyroute2 runs an event loop.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from typing import Any

from commlayer.emulation import syscalls
from commlayer.emulation.fabric_process import fabric_main
from commlayer.emulation.namespaces import RankSpaces, kill_processes_in, namespace_id
from commlayer.emulation.protocol import MESSAGE_BYTES, LinkSpec, raise_reply
from commlayer.profiles.errors import RightsError

__all__ = ["Fabric"]

_PATIENCE_S = 10.0
"""How long the process may take to end, before it is killed."""


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
        self.pid = syscalls.fork()
        if self.pid == 0:
            fabric_main(childs_end, num_nodes, spec, user_namespace)
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
        message, fds, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, count)
        if not message:
            raise RightsError("the process that builds the emulated network died (out of memory? see dmesg)")
        raise_reply(json.loads(message))
        return fds

    @property
    def fds(self) -> list[int]:
        """Every descriptor that the parent holds; a rank closes them once it has entered its
        node."""
        spaces = [fd for space in self.spaces for fd in (space.net_fd, space.uts_fd)]
        return [self._socket.fileno(), *self._shared_fds, *spaces]

    def request(self, message: dict[str, object]) -> dict[str, Any]:
        """Send one request and return the reply; the caller keeps other threads out.

        Raises:
            UsageError, RightsError: as the fabric replied, or because it is gone.
        """
        try:
            self._socket.send(json.dumps(message).encode())
            raw = self._socket.recv(MESSAGE_BYTES)
        except OSError:
            raw = b""
        if not raw:
            raise RightsError("the process that keeps the emulated network is gone: close the cluster, make another")
        reply: dict[str, Any] = json.loads(raw)
        raise_reply(reply)
        return reply

    def kill_strays(self) -> None:
        """Kill what still lives in the nodes' namespaces."""
        kill_processes_in(self._networks)

    def close(self) -> None:
        """End the fabric process and give every descriptor back; harmless when repeated, or in a
        forked copy."""
        if self._socket.fileno() < 0:
            return
        _, *fds = self.fds
        if os.getpid() == self._owner:
            # Not only closed: some other child of ours may hold a copy of this end.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if os.getpid() == self._owner:
            deadline = time.monotonic() + _PATIENCE_S
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                    if time.monotonic() > deadline:
                        os.kill(self.pid, signal.SIGKILL)
                    time.sleep(0.001)
        for fd in fds:
            os.close(fd)
        self.spaces, self._shared_fds = [], []
