"""CUDA as a device: torch's streams and events behind the contract.

Written for, and to be judged on, a machine with a GPU (``make test-gpu``); without one those tests skip and say so.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from commlayer.devices.contract import Stream, StreamEvent

__all__ = ["CudaDevice", "CudaEvent", "CudaStream"]

_HIGH, _NORMAL = -1, 0
"""CUDA has more levels on some devices; NCCL's kernels, which run on streams of torch's groups, have these two."""


class CudaEvent:
    """A ``torch.cuda.Event`` that has been recorded."""

    __slots__ = ("event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_done(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()


class CudaStream:
    """A ``torch.cuda.Stream``."""

    __slots__ = ("stream",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def launch(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def record(self) -> CudaEvent:
        return CudaEvent(self.stream.record_event())

    def wait(self, event: StreamEvent) -> None:
        assert isinstance(event, CudaEvent)  # of this device
        self.stream.wait_event(event.event)

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self.stream)


class CudaDevice:
    """One GPU of this process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def current(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self.device))

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        assert isinstance(stream, CudaStream)
        return torch.cuda.stream(stream.stream)

    def stream(self, *, is_high: bool) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self.device, priority=_HIGH if is_high else _NORMAL))

    def empty(self, num_bytes: int) -> torch.Tensor:
        # A tensor that is made in inference mode can be written in it only, and buffers are kept.
        with torch.inference_mode(False):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
