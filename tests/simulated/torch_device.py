"""A simulated device that torch itself sees, as ``torch.device("simulated")``: for programs that train, without a GPU.

Its tensors are torch's own (views, autograd, DDP's buckets, FSDP2's parameters), its operators are launched on streams and run
later, by a thread of the process, and its streams are delayed by a seed. So DDP, fully_shard and layers of this package run on it
as they would on CUDA, and where one of them, or the backend, leaves a wait out, values are wrong.

torch has one place for a device that it does not know (PrivateUse1), so a process that uses another such device cannot use this
one. Autograd runs in a thread of its own, whose current stream is the default stream.
"""

from __future__ import annotations

import atexit
import math
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from commlayer.profiles.errors import UsageError
from commlayer.transport.accelerators import register_accelerator
from commlayer.wire.codecs.encoded_rows import register_row_path
from simulated.torch_communicator import make_communicator
from simulated.torch_operators import DEVICE_NAME
from simulated.torch_rows import SimulatedRows
from simulated.torch_simulator import (
    TorchEvent,
    TorchSimulator,
    TorchStream,
    find_simulator,
    make_simulator,
    require_simulator,
)
from simulated.torch_streams import StreamDelays

__all__ = ["simulated_device"]


def simulated_device(
    delays: StreamDelays | None = None, *, memory_bytes: int = 1 << 28, timeout_s: float = 60.0
) -> torch.device:
    """Register the simulated device with torch, once in a process, and return it; again: with other delays.

    Before ``init_process_group``, whose groups then have an inner backend for it. ``delays``: how its streams are delayed, by
    which seed; ``memory_bytes``: what it has; ``timeout_s``: how long the host waits for a device on which nothing moves.

    Raises UsageError where torch's place for such a device is another's, and for delays that are no :class:`StreamDelays`,
    no whole number of bytes, or no time; and where a backward pass has run before, here or in the process that this one was
    forked from, because torch's autograd then knows no such device.
    """
    if delays is not None and not isinstance(delays, StreamDelays):
        raise UsageError(f"expected StreamDelays(seed=…), got {delays!r}")
    _check(memory_bytes, timeout_s)
    made = find_simulator()
    if made is not None:
        made.reseed(delays or StreamDelays())
        return torch.device(DEVICE_NAME, 0)
    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        raise UsageError(
            f"expected no other device in torch's place for one of others, got {taken!r}: use another process"
        )
    _setup_privateuseone_for_python_backend(DEVICE_NAME, backend_module=_module())
    made = make_simulator(delays or StreamDelays(), memory_bytes, timeout_s)
    _let_storages_be_freed()
    _let_groups_use(made)
    torch.accelerator.synchronize = lambda device=None: require_simulator().synchronize()
    torch.accelerator.current_stream = lambda device=None: require_simulator().current
    atexit.register(made.runner.stop)
    device = torch.device(DEVICE_NAME, 0)
    _require_autograd(device)
    return device


def _require_autograd(device: torch.device) -> None:
    """Raise UsageError where autograd knows no such device: it counts devices at a process's first backward pass."""
    x = torch.zeros(1, device=device, requires_grad=True)
    try:
        (x * 1).sum().backward()
    except RuntimeError as error:
        if "device_ready_queues" not in str(error):
            raise
        raise UsageError(
            "a backward pass has run in this process, or in the one that it was forked from, before simulated_device(): torch's "
            "autograd does not come to know devices later; call simulated_device() first"
        ) from error


def _check(memory_bytes: object, timeout_s: object) -> None:
    if not isinstance(memory_bytes, int) or isinstance(memory_bytes, bool) or memory_bytes < 1:
        raise UsageError(f"memory_bytes: expected a whole number of at least 1, got {memory_bytes!r}")
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s < math.inf:  # type: ignore[operator]  # a number by now
        raise UsageError(f"timeout_s: expected a number of seconds above 0, got {timeout_s!r}")


def _let_groups_use(simulator: TorchSimulator) -> None:
    """Have groups of the backend commlayer take tensors of the device."""
    register_accelerator(DEVICE_NAME, make_communicator(simulator))
    register_row_path(DEVICE_NAME, SimulatedRows)
    devices: dict[str, list[str]] = dist.Backend.backend_capability
    if DEVICE_NAME not in devices.setdefault("commlayer", []):
        devices["commlayer"].append(DEVICE_NAME)


def _let_storages_be_freed() -> None:
    """Let ``resize_`` of a storage spoil it instead: it is called to free the memory, or to have it again."""
    resize = torch.UntypedStorage.resize_

    def resize_or_spoil(storage: Any, size: int) -> Any:
        if storage.device.type != DEVICE_NAME:
            return resize(storage, size)
        made = require_simulator()
        if size not in (0, storage.size()):
            raise UsageError(
                f"a storage of the simulated device has {storage.size()} bytes, or none, got resize_({size})"
            )
        if size == 0:
            made.memory.spoil(storage)
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
        f"torch.{DEVICE_NAME}", "A simulated device: see simulated.torch_device.simulated_device."
    )
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device, module.device = _set_device, _device
    module._is_in_bad_fork = lambda: (made := find_simulator()) is not None and made.runner.is_bad_fork
    module.Stream, module.Event, module.stream = TorchStream, TorchEvent, _stream
    module.current_stream = lambda device=None: require_simulator().current
    module.default_stream = lambda device=None: require_simulator().default
    module.set_stream = lambda stream: require_simulator().use(stream)
    module.synchronize = lambda device=None: require_simulator().synchronize()
    module.manual_seed = module.manual_seed_all = lambda seed: None  # its numbers are drawn by the CPU's generator
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.memory_allocated = lambda device=None: require_simulator().memory.allocated
    module.empty_cache = lambda: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module  # type: ignore[no-any-return]
