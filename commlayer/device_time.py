"""When the device of this process is done with what was launched on it, where something here keeps its time.

CUDA keeps its own, by streams. An emulated accelerator (:mod:`commlayer.emulation.accelerators`) has none: it gives the process a
clock, and what would wait for a device asks here. Without a clock nothing waits.
"""

from __future__ import annotations

from typing import Protocol

from commlayer.calls.instruments import Instrument, listen_to_all, stop_listening_to_all
from commlayer.calls.ring import Call
from commlayer.forked_child import in_forked_child

__all__ = ["DeviceTime", "await_device", "device_busy_until", "device_time", "use_device_time"]


class DeviceTime(Protocol):
    """The time of a device. Times are seconds of the clock that keeps it."""

    def synchronize(self) -> None:
        """Return when all that was launched is done."""

    def wait_until(self, at: float) -> None:
        """Return when the clock says ``at``, or at once where it is past."""

    def busy_until(self) -> float | None:
        """Return when all that was launched by now is done; None where it is."""


_time: DeviceTime | None = None


def device_time() -> DeviceTime | None:
    """Return what keeps the time of this process's device, or None."""
    return _time


def use_device_time(time: DeviceTime | None) -> None:
    """Have ``time`` keep the time of this process's device, or nothing."""
    global _time
    _time = time
    stop_listening_to_all(_behind_device)
    if time is not None:
        listen_to_all(_behind_device)


class _BehindDevice(Instrument):
    """Has calls begin when the device has done what their caller has launched, as NCCL's do.

    A synchronous call waits here; whoever runs an asynchronous one waits then.
    """

    def issued(self, call: Call) -> None:
        until = device_busy_until()
        if until is None:
            return
        if call.is_async:
            call.begins_after_s = until
        else:
            await_device(until)


_behind_device = _BehindDevice()


def await_device(until: float | None = None) -> None:
    """Return when this process's emulated accelerator has done what was launched; at once where there is none.

    A collective begins so, as NCCL's do on the stream of those who call them; and so do measurements end. ``until``: when what a
    call has to wait for is done, as :func:`device_busy_until` said when it was made; what was launched since is not waited for.
    """
    if _time is not None:
        if until is None:
            _time.synchronize()
        else:
            _time.wait_until(until)


def device_busy_until() -> float | None:
    """Return when this process's emulated accelerator will have done what was launched; None where it has, or there is none.

    For calls that begin later than they are made, on a thread of their own: the host goes on, as behind NCCL's calls.
    """
    return None if _time is None else _time.busy_until()


@in_forked_child
def _forget_time() -> None:
    use_device_time(None)  # a forked child, such as a DataLoader's worker, is no rank: it computes on the host
