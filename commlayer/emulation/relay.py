"""Delay of the emulated wire without the kernel's netem: a process between the cables.

Where sch_netem exists the kernel delays packets; many small kernels are built without it. Then the cables end in no
bridge, but in packet sockets of this process, which keeps each frame for the delay and sends it on by its hardware
address. Rates stay the kernel's business: the token buckets sit on both ends of every cable, as without a delay.

Frames cross as the kernel has them, 64 KiB segmentation-offload packets with unfinished checksums (PACKET_VNET_HDR), so
a 400 Mbit/s wire is under a thousand frames a second. TAP devices with the same offloads were the alternative: they have
no queue of their own in this direction, and would have replaced the veth pair and its buckets.

Frames wait in one queue per destination, in the order in which they came: with a constant delay that is the order of
their release. Arrival is the kernel's time stamp, so that a late wake-up of this process is not added to the delay.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import NoReturn

from commlayer.emulation import syscalls

__all__ = ["Relay", "SharedDelay", "start_relay"]

_ETH_P_ALL = 3
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE, _SO_TIMESTAMPNS = 32, 33, 35
_TIMESPEC = struct.Struct("@ll")
_DELAY = struct.Struct("@q")
_VNET_HEADER_BYTES = 10
_FRAME_BYTES = 70_000
_FRAMES_PER_READ = 64
_RECEIVE_BUFFER_BYTES = 16 << 20
_SEND_BUFFER_BYTES = 3 << 19
"""The kernel doubles it: 3 MiB, below the token bucket's 4 MiB, so that a full wire holds frames back here and drops none."""
_QUEUE_BYTES = 64 << 20
"""The bytes that one destination may have waiting; beyond, frames are dropped, as a switch does."""


def _set_buffer(port: socket.socket, force: int, plain: int, size: int) -> None:
    try:
        port.setsockopt(socket.SOL_SOCKET, force, size)
    except PermissionError:  # in a user namespace: as much as the machine allows everyone
        port.setsockopt(socket.SOL_SOCKET, plain, size)


class _Queue:
    """Frames on their way to one node."""

    def __init__(self, port: socket.socket) -> None:
        self.port = port
        self.blocked = False
        self._frames: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0

    def put(self, release_ns: int, frame: bytes) -> None:
        if self._waiting_bytes + len(frame) <= _QUEUE_BYTES:
            self._frames.append((release_ns, frame))
            self._waiting_bytes += len(frame)

    def send_due(self, now_ns: int) -> None:
        """Send what is due; stops where the wire does not take more now."""
        frames = self._frames
        self.blocked = False
        while frames and frames[0][0] <= now_ns:
            try:
                self.port.send(frames[0][1])
            except BlockingIOError:
                self.blocked = True
                return
            except OSError:
                pass  # the wire dropped it (full, or the node is gone), as wires do: TCP sends it again
            self._waiting_bytes -= len(frames.popleft()[1])

    def next_release_ns(self) -> int | None:
        return self._frames[0][0] if self._frames and not self.blocked else None


class SharedDelay:
    """The present delay, in memory that the relay and the process that started it share. Frames never overtake each other."""

    def __init__(self, delay_us: float) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.set(delay_us)

    def set(self, delay_us: float) -> None:
        """Delay what comes from now on by so much."""
        self._memory[: _DELAY.size] = _DELAY.pack(round(delay_us * 1_000))

    @property
    def ns(self) -> int:
        """The delay in nanoseconds."""
        delay_ns: int = _DELAY.unpack_from(self._memory)[0]
        return delay_ns


class Relay:
    """The loop: frames in, frames out a delay later. Port i leads to the node whose eth0 has `macs[i]`."""

    def __init__(self, ports: Sequence[socket.socket], macs: Sequence[bytes], delay: SharedDelay) -> None:
        self._delay = delay
        self._queues = [_Queue(port) for port in ports]
        self._by_mac = dict(zip(macs, self._queues, strict=True))

    def run(self) -> NoReturn:
        """Run for ever."""
        ports = [queue.port for queue in self._queues]
        while True:
            now_ns = time.time_ns()
            for queue in self._queues:
                queue.send_due(now_ns)
            releases = [when for queue in self._queues if (when := queue.next_release_ns()) is not None]
            timeout_s = max(0.0, (min(releases) - time.time_ns()) / 1e9) if releases else None
            blocked = [queue.port for queue in self._queues if queue.blocked]
            # select and not epoll: Python's epoll waits whole milliseconds.
            readable, _, _ = select.select(ports, blocked, [], timeout_s)
            for port in readable:
                self._take(port)

    def _take(self, port: socket.socket) -> None:
        delay_ns = self._delay.ns
        for _ in range(_FRAMES_PER_READ):
            try:
                frame, ancillary, _, _ = port.recvmsg(_FRAME_BYTES, 64)
            except OSError:
                return
            # Between now and never earlier than a delay ago: the clock may be set while we run.
            now_ns = time.time_ns()
            arrived_ns = now_ns
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(data) >= _TIMESPEC.size:
                    seconds, nanoseconds = _TIMESPEC.unpack_from(data)
                    arrived_ns = min(now_ns, seconds * 1_000_000_000 + nanoseconds)
            release_ns = max(arrived_ns + delay_ns, now_ns)
            destination = self._by_mac.get(frame[_VNET_HEADER_BYTES : _VNET_HEADER_BYTES + 6])
            if destination is not None:
                destination.put(release_ns, frame)
            elif frame[_VNET_HEADER_BYTES] & 1:
                for queue in self._queues:
                    if queue.port is not port:
                        queue.put(release_ns, frame)


def start_relay(names: Sequence[str], macs: Sequence[bytes], delay: SharedDelay) -> int:
    """Fork the relay between the named interfaces of this network namespace; returns its process id.

    Raises:
        OSError: no packet sockets.
    """
    ports = []
    for name in names:
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        port.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        _set_buffer(port, _SO_RCVBUFFORCE, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        _set_buffer(port, _SO_SNDBUFFORCE, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        port.bind((name, _ETH_P_ALL))
        port.setblocking(False)
        ports.append(port)
    parent_pid = os.getpid()
    pid = syscalls.fork()
    if pid == 0:
        try:
            gc.disable()
            syscalls.die_with_parent(parent_pid)
            with contextlib.suppress(OSError):
                # It carries every rank's traffic: on a machine full of busy ranks it must not wait for its turn.
                os.setpriority(os.PRIO_PROCESS, 0, -10)
            syscalls.set_timer_slack_ns(1_000)
            Relay(ports, macs, delay).run()
        finally:
            os._exit(1)
    for port in ports:
        port.close()
    return pid
