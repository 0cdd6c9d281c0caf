"""The clock of a rank's emulated accelerator: when what was launched is done, and who waits for it.

An accelerator is a queue: an operation begins when it is launched and the former has ended, and lasts as long as its device
needs. The host launches it and goes on. So it is here, but for the values: they are computed at once, on the host's core, while
the operation lasts by this clock. Where a GPU's host or stream would wait (a collective begins on the data, a value is read, the
program synchronises), the caller sleeps until the clock says that all is done. A sleeping rank holds no core, and threads of
commlayer and Gloo, which move bytes meanwhile, find it free.

Rejected: to sleep through each operation, as a device whose launches are synchronous. Whatever the host does between two
operations (Python, copies of rows, activations) would then stand between them on every step, which a GPU's host hides behind the
operation before; on a machine whose ranks share cores that is the most of it. Rejected too: a clock that only counts, which
nobody waits for. Wires are real here, so computation must last in real time for them to run beside it.

The host runs ahead by a bounded lead, as a GPU's does by the length of its launch queue: a program that reads the time
without synchronising is wrong by no more. What a host cannot do in time makes an operation *late*, which is counted: an
emulation that is late is none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from commlayer.device_time import await_device, device_busy_until, device_time
from commlayer.emulation.accelerators.device import Accelerator

__all__ = ["DeviceClock", "DeviceReport", "await_device", "device_busy_until", "device_clock"]

LEAD_S = 0.25
"""How far the host may run ahead of its device."""
_TOLERANCE_S = 200e-6
"""What a sleep may oversleep on a busy machine: an operation that ends so much after its time is not late."""


@dataclass(frozen=True)
class DeviceReport:
    """The work of a rank's accelerator in a run. Seconds are this machine's.

    Attributes:
        rank: the rank.
        operations, flops: how many operations took time, and their FLOPs.
        busy_s: how long they lasted, as declared.
        late, late_s: how many of them this machine ended after their time, and by how much in all.
        cpu_s, wall_s: the process's processor time, and the time that passed.
    """

    rank: int
    operations: int
    flops: float
    busy_s: float
    late: int
    late_s: float
    cpu_s: float
    wall_s: float

    @property
    def slowness(self) -> float:
        """How many times longer than declared the operations took; 1.0 where none was late."""
        return 1.0 + self.late_s / self.busy_s if self.busy_s else 1.0


class DeviceClock:
    """One per rank, for all of its threads: operations are one after another, like kernels that fill a GPU.

    ``now``, ``sleep``: replaceable, for tests.
    """

    def __init__(
        self,
        device: Accelerator,
        rank: int = 0,
        *,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        lead_s: float = LEAD_S,
    ) -> None:
        self.device, self.rank = device, rank
        self.now, self._sleep, self._lead_s = now, sleep, lead_s
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._operations = self._late = 0
        self._flops = self._busy_s = self._late_s = 0.0
        self._began_at, self._began_cpu = now(), time.process_time()

    def launched(self, at: float, flops: float, num_bytes: float = 0.0) -> None:
        """Take in an operation that was launched at ``at`` and whose values are there now; return when the host may go on."""
        lasts_s, now = self.device.seconds(flops, num_bytes), self.now()
        if lasts_s <= 0:
            return
        with self._lock:
            ends_at = max(at, self._free_at) + lasts_s
            late_s = now - ends_at
            self._free_at = max(ends_at, now)
            self._operations += 1
            self._flops += flops
            self._busy_s += lasts_s
            if late_s > _TOLERANCE_S:
                self._late += 1
                self._late_s += late_s
        ahead_s = ends_at - now - self._lead_s
        if ahead_s > 0:
            self._sleep(ahead_s)

    def synchronize(self) -> None:
        """Return when all that was launched is done."""
        self.wait_until(self._free_at)

    def wait_until(self, at: float) -> None:
        """Return when this clock says ``at``, or at once where it is past."""
        left_s = at - self.now()
        if left_s > 0:
            self._sleep(left_s)

    def busy_until(self) -> float | None:
        """Return when all that was launched by now is done; None where it is."""
        free_at = self._free_at
        return free_at if free_at > self.now() else None

    def report(self) -> DeviceReport:
        """Return what has been done so far."""
        return DeviceReport(
            self.rank,
            self._operations,
            self._flops,
            self._busy_s,
            self._late,
            self._late_s,
            time.process_time() - self._began_cpu,
            self.now() - self._began_at,
        )


def device_clock() -> DeviceClock | None:
    """Return the clock of this process's emulated accelerator, or None: then nothing is emulated."""
    time = device_time()
    return time if isinstance(time, DeviceClock) else None
