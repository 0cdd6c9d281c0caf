"""A simulated device that torch itself sees, as ``torch.device("simulated")``: for programs that train, without a GPU.

Its tensors are torch's own (views, autograd, DDP's buckets, FSDP2's parameters), its operators are launched on streams and run
later, by a thread of the process, and its streams are delayed by a seed. So DDP, fully_shard and layers of this package run on it
as they would on CUDA, and where one of them, or the backend, leaves a wait out, values are wrong.

torch has one place for a device that it does not know (PrivateUse1), so a process that uses another such device cannot use this
one. Autograd runs in a thread of its own, whose current stream is the default stream.
"""

from __future__ import annotations

import atexit
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from commlayer.profiles.errors import UsageError
from commlayer.testing.simulated.torch_memory import TorchMemory
from commlayer.testing.simulated.torch_operators import DEVICE_NAME, Operators
from commlayer.testing.simulated.torch_streams import QueueMark, QueueRunner, StreamDelays, StreamQueue

__all__ = ["TorchEvent", "TorchSimulator", "TorchStream", "made_device"]

_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1.value)


class TorchSimulator:
    """The device of this process: its streams, its memory, its operators."""

    def __init__(self, delays: StreamDelays, memory_bytes: int, timeout_s: float) -> None:
        self.runner = QueueRunner(delays, timeout_s)
        self.memory = TorchMemory(memory_bytes, self.runner)
        self.queues: list[StreamQueue] = [self.runner.queue("default stream")]
        self.default = TorchStream(self, 0)
        self._here = threading.local()
        self.operators = Operators(self.memory, self.runner, lambda: self.current.queue)
        self.operators.register(lambda stream: self.queues[stream.stream_id])

    @property
    def current(self) -> TorchStream:
        """The stream on which this thread launches."""
        stream: TorchStream = getattr(self._here, "stream", self.default)
        return stream

    def use(self, stream: TorchStream) -> None:
        """Launch this thread's work on ``stream`` from now on."""
        self._here.stream = stream

    def new_stream(self, name: str = "") -> TorchStream:
        """A stream of its own; ``name``: for messages."""
        number = len(self.queues)
        self.queues.append(self.runner.queue(name or f"stream {number}"))
        return TorchStream(self, number)

    def synchronize(self) -> None:
        """Make the host wait until all streams have run what was launched on them."""
        for mark in [self.runner.record(queue) for queue in self.queues]:
            self.runner.until(mark, "to wait for the device")

    def reseed(self, delays: StreamDelays) -> None:
        """Delay streams by other draws from now on."""
        self.synchronize()
        self.runner.reseed(delays)


class TorchEvent:
    """A point in a stream's work, as ``torch.cuda.Event`` is one."""

    def __init__(
        self, device: Any = None, *, enable_timing: bool = False, blocking: bool = False, **other: Any
    ) -> None:
        del device, enable_timing, blocking, other
        self._simulator = _require_made()
        self._mark = QueueMark(is_done=True)

    def record(self, stream: TorchStream | None = None) -> TorchEvent:
        """Set it behind all that was launched on ``stream`` (the current one) so far."""
        self._mark = self._simulator.runner.record((stream or self._simulator.current).queue)
        return self

    def wait(self, stream: TorchStream | None = None) -> None:
        """Make ``stream`` (the current one) wait for it. The host does not."""
        self._simulator.runner.wait_for((stream or self._simulator.current).queue, self._mark)

    def query(self) -> bool:
        """Whether it was reached."""
        return self._mark.is_done

    def synchronize(self) -> None:
        """Make the host wait for it."""
        self._simulator.runner.until(self._mark, "to wait for an event")


class TorchStream(torch.Stream):
    """A queue of work, as ``torch.cuda.Stream`` is one."""

    simulator: TorchSimulator
    queue: StreamQueue
    _before: list[TorchStream]

    def __new__(cls, simulator: Any = None, number: int | None = None, **other: Any) -> TorchStream:
        """``TorchStream()`` and ``TorchStream(device, priority=…)`` make a stream of this process's device."""
        del other
        if not isinstance(simulator, TorchSimulator) or number is None:
            return _require_made().new_stream()
        made: Any = super().__new__(cls, stream_id=number, device_index=0, device_type=_TYPE)
        made.simulator, made.queue, made._before = simulator, simulator.queues[number], []
        return made  # type: ignore[no-any-return]

    def launch(self, label: str, work: Callable[[], object]) -> None:
        """Run ``work`` behind what it was given before; ``label``: for messages."""
        self.simulator.runner.launch(self.queue, label, work)

    def wait_event(self, event: Any) -> None:
        """Make it wait for ``event``. The host does not."""
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """Make it wait for all that ``stream`` was given so far. The host does not."""
        self.simulator.runner.wait_for(self.queue, self.simulator.runner.record(stream.queue))

    def record_event(self, event: Any = None) -> Any:
        """The point behind all that it was given so far."""
        return (event or TorchEvent()).record(self)

    def query(self) -> bool:
        """Whether all that it was given has run."""
        return not self.queue.pieces

    def synchronize(self) -> None:
        """Make the host wait for it."""
        self.simulator.runner.until(self.simulator.runner.record(self.queue), "to wait for a stream")

    def __enter__(self) -> TorchStream:
        self._before.append(self.simulator.current)
        self.simulator.use(self)
        return self

    def __exit__(self, *failure: object) -> None:
        self.simulator.use(self._before.pop())


_made: TorchSimulator | None = None


def _require_made() -> TorchSimulator:
    if _made is None:
        raise UsageError(
            "expected the simulated device to be registered: call commlayer.testing.simulated_device first"
        )
    return _made


def made_device(delays: StreamDelays | None, *, memory_bytes: int, timeout_s: float) -> TorchSimulator | None:
    """Register the device with torch, and return it; None where it is registered, and has other delays from now on.

    Raises UsageError where torch's place for such a device is another's.
    """
    global _made
    if _made is not None:
        _made.reseed(delays or StreamDelays())
        return None
    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        raise UsageError(
            f"expected no other device in torch's place for one of others, got {taken!r}: use another process"
        )
    _setup_privateuseone_for_python_backend(DEVICE_NAME, backend_module=_module())
    _made = TorchSimulator(delays or StreamDelays(), memory_bytes, timeout_s)
    _let_storages_be_freed()
    torch.accelerator.synchronize = lambda device=None: _require_made().synchronize()
    torch.accelerator.current_stream = lambda device=None: _require_made().current
    atexit.register(_made.runner.stop)
    return _made


def _let_storages_be_freed() -> None:
    """Let ``resize_`` of a storage spoil it instead: it is called to free the memory, or to have it again."""
    resize = torch.UntypedStorage.resize_

    def resize_or_spoil(storage: Any, size: int) -> Any:
        if storage.device.type != DEVICE_NAME:
            return resize(storage, size)
        made = _require_made()
        if size not in (0, storage.size()):
            raise UsageError(
                f"a storage of the simulated device has {storage.size()} bytes, or none, got resize_({size})"
            )
        if size == 0:
            made.memory.spoil(storage, made.current.queue)
        return storage

    torch.UntypedStorage.resize_ = resize_or_spoil  # type: ignore[assignment]


@contextmanager
def _stream(stream: TorchStream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with stream:
        yield


@contextmanager
def _device(device: Any) -> Iterator[None]:
    _set_device(device)
    yield


def _set_device(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    if index not in (0, None):
        raise UsageError(f"a process has one simulated device, 0, got {device!r}")


def _module() -> types.ModuleType:
    """``torch.simulated``."""
    module: Any = types.ModuleType(
        f"torch.{DEVICE_NAME}", "A simulated device: see commlayer.testing.simulated_device."
    )
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device, module.device = _set_device, _device
    module._is_in_bad_fork = lambda: _made is not None and _made.runner.is_bad_fork
    module.Stream, module.Event, module.stream = TorchStream, TorchEvent, _stream
    module.current_stream = lambda device=None: _require_made().current
    module.default_stream = lambda device=None: _require_made().default
    module.set_stream = lambda stream: _require_made().use(stream)
    module.synchronize = lambda device=None: _require_made().synchronize()
    module.manual_seed = module.manual_seed_all = lambda seed: None  # its numbers are drawn by the CPU's generator
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.memory_allocated = lambda device=None: _require_made().memory.allocated
    module.empty_cache = lambda: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module  # type: ignore[no-any-return]
