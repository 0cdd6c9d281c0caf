"""Devices that torch knows by a module of their own (``torch.cuda``), behind the contract: their
streams and events.

CUDA's is written for, and to be judged on, a machine with a GPU (``make test-gpu``); the simulated
device that torch sees (tests/simulated/torch_device.py) runs the same lines on any.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from commlayer.devices.device_contract import Stream, StreamEvent, TimedEvent

__all__ = ["AcceleratorDevice", "AcceleratorEvent", "AcceleratorStream", "why_no_holds"]

_HIGH, _NORMAL = -1, 0
"""CUDA has more levels on some devices; NCCL's kernels, which run on streams of torch's groups,
have these two."""


class AcceleratorEvent:
    """An event of torch's that has been recorded."""

    __slots__ = ("event",)

    def __init__(self, event: Any) -> None:
        self.event = event

    def is_done(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()

    def elapsed_us(self, since: TimedEvent) -> float:
        """The time from ``since`` to here, µs: both were recorded by
        :meth:`AcceleratorStream.record_time`."""
        assert isinstance(since, AcceleratorEvent)  # of this device
        return float(since.event.elapsed_time(self.event)) * 1e3


class AcceleratorStream:
    """A stream of torch's."""

    __slots__ = ("_module", "stream")

    def __init__(self, module: Any, stream: Any) -> None:
        self._module, self.stream = module, stream

    def launch(self, work: Callable[[], object]) -> None:
        with self._module.stream(self.stream):
            work()

    def record(self) -> AcceleratorEvent:
        return AcceleratorEvent(self.stream.record_event())

    def record_time(self) -> AcceleratorEvent:
        return AcceleratorEvent(self.stream.record_event(self._module.Event(enable_timing=True)))

    def wait(self, event: StreamEvent) -> None:
        assert isinstance(event, AcceleratorEvent)  # of this device
        self.stream.wait_event(event.event)

    def call_host(self, work: Callable[[], object]) -> None:
        """Have a thread of the host call ``work`` when the stream has come so far; for streams that
        can, which CUDA's are not asked for: futures know of these."""
        self.stream.launch("a future", work)

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self.stream)

    def hold(self, busy: torch.Tensor, least: int, most_us: float) -> None:
        if busy.device.type != "cuda":
            self.stream.hold(busy, least, most_us)
            return
        from commlayer.devices.hold_kernel import hold_here

        with self._module.stream(self.stream):
            hold_here(busy, least, most_us)


class AcceleratorDevice:
    """The device of a process, such as ``torch.device("cuda", 0)``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)

    @property
    def current(self) -> AcceleratorStream:
        return AcceleratorStream(self._module, self._module.current_stream(self.device))

    @property
    def is_capturing(self) -> bool:
        asked = getattr(self._module, "is_current_stream_capturing", None)  # which devices without graphs have not
        return asked is not None and bool(asked())

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        assert isinstance(stream, AcceleratorStream)
        return self._module.stream(stream.stream)  # type: ignore[no-any-return]

    def stream(self, *, is_high: bool) -> AcceleratorStream:
        return AcceleratorStream(self._module, self._module.Stream(self.device, priority=_HIGH if is_high else _NORMAL))

    def empty(self, num_bytes: int) -> torch.Tensor:
        # A tensor that is made in inference mode can be written in it only, and buffers are kept.
        with torch.inference_mode(False):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def synchronize(self) -> None:
        self._module.synchronize(self.device)


_NO = ("", "0", "false", "no", "off")


def why_no_holds(device_type: str, environment: Mapping[str, str]) -> str:
    """Say why no stream of such a device may be held back, and what to do; empty where it may.
    Pure.

    A hold must stop nothing but its own stream. Where kernels of all streams begin in the order in
    which the host launched them, what is launched behind a hold would wait for it too, even the
    calls for whose sake it holds.
    """
    if device_type == "simulated":
        return ""
    if device_type != "cuda":
        return f"streams are held on CUDA and on the simulated device, and nothing is known that would hold one on {device_type}"
    if environment.get("NCCL_LAUNCH_ORDER_IMPLICIT", "").strip().lower() not in _NO:
        return "NCCL_LAUNCH_ORDER_IMPLICIT has kernels begin in the order of the program, so none goes before: unset it"
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1":
        return "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams in one queue, so that nothing goes before: unset it"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed, whose kernel holds a stream: pip install 'triton>=3.2'"
    return ""
