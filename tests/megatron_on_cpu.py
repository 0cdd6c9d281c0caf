"""Megatron-Core on a machine without CUDA: what it asks of torch.cuda, answered for the CPU.

Megatron takes the device of new tensors, streams and random numbers from torch.cuda. With these answers its layers, experts,
dispatchers, DDP and gradient reduction run on the CPU as they are, which is enough to try a program of one's own on an emulated
cluster, and to compare dispatchers. Its optimizers, which know CUDA's types of tensors only, do not.

    PYTHONPATH=CHECKOUT/tests commlayer emulate … -- python -m megatron_on_cpu pretrain_gpt.py …

runs a program of Megatron-LM's, with its training loop, optimizers and logs: there whatever names a CUDA device gets the CPU, and
tensors say that they are CUDA's. What only a GPU can compute (fused kernels, Transformer Engine) its options must leave out.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from run_as_main import run_as_main
from torch.overrides import TorchFunctionMode

__all__ = ["stand_in_for_cuda"]


class _Event:
    """An event on the CPU, where what was launched has ended."""

    def record(self, *_: object) -> None:
        pass

    wait = synchronize = record


class _Stream:
    """A stream on the CPU, on which everything ends where it is launched."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def wait_stream(self, _: object) -> None:
        pass

    wait_event = wait_stream

    def record_event(self, *_: object) -> _Event:
        return _Event()


def stand_in_for_cuda() -> None:
    """Answer for the CPU what Megatron-Core asks of torch.cuda, from now on and for the whole process.

    What it has compiled by torch.compile runs as it is written.
    """
    torch.compiler.set_stance(
        "force_eager"
    )  # without it each process would compile for the CPU what is fused for a GPU
    cuda: Any = torch.cuda
    default = _Stream()
    cuda.current_device = lambda: torch.device("cpu")
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = lambda *_: default
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    logging.getLogger(random.__name__).setLevel(
        logging.ERROR
    )  # it warns that numbers meant for a GPU were drawn on the CPU
    # Only what comes from a device is made a numpy array there; splits that stay tensors torch refuses.
    dispatchers: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatchers.maybe_move_tensor_to_cpu = _on_host
    vars(importlib.import_module("megatron.core.transformer.moe.moe_utils")).setdefault(
        "te_general_gemm"
    )  # 0.16 asks for it


def _on_host(x: Any, as_numpy: bool = False, **_: object) -> Any:
    return x.numpy() if as_numpy and isinstance(x, torch.Tensor) else x


class _CpuForCuda(TorchFunctionMode):
    """Has torch make its tensors on the CPU where a program names a CUDA device, and say that their types are CUDA's."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func`` for the CPU."""
        given = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not given:
            return str(func(*args)).replace("torch.", "torch.cuda.")  # optimizers sort parameters by these names
        if "device" in given:
            given["device"] = _on_cpu(given["device"])
        if func is torch.Tensor.to:
            args = tuple(map(_on_cpu, args))
        return func(*args, **given)


def _on_cpu(named: Any) -> Any:
    """The CPU in place of a CUDA device; whatever else is given, as it is."""
    is_cuda = str(named).startswith("cuda") if isinstance(named, (str, torch.device)) else False
    return torch.device("cpu") if is_cuda else named


@contextlib.contextmanager
def _answering_a_program() -> Iterator[None]:
    """Answer what Megatron-LM's training loop asks, beyond the layers: whether and what a GPU is, and how full."""
    stand_in_for_cuda()
    cuda: Any = torch.cuda
    gpu = SimpleNamespace(name="CPU", major=8, minor=0, multi_processor_count=1, total_memory=1 << 34)
    cuda.is_available, cuda.device_count = (lambda: True), (lambda: 1)
    cuda.get_device_properties, cuda.get_device_capability = (lambda *_: gpu), (lambda *_: (gpu.major, gpu.minor))
    for name in ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats", "manual_seed_all"):
        setattr(cuda, name, _nothing)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *_: 0)
    cuda.memory_stats = lambda *_: {}
    _compile_nothing()
    with _CpuForCuda():
        yield


def _nothing(*_: object) -> None:
    pass


def _compile_nothing() -> None:
    """Leave out what Megatron-LM compiles when it starts: kernels for a GPU, and the index of its data where that is there."""
    with contextlib.suppress(ModuleNotFoundError):  # versions without it compile none
        vars(importlib.import_module("megatron.legacy.fused_kernels"))["load"] = _nothing
    with contextlib.suppress(ModuleNotFoundError):  # then it is to be compiled
        importlib.import_module("megatron.core.datasets.helpers_cpp")
        vars(importlib.import_module("megatron.core.datasets.utils"))["compile_helpers"] = _nothing


def _run_program() -> None:
    """Run the program of Megatron-LM's that the command line names."""
    usage = "usage: python -m megatron_on_cpu PROGRAM.py and its arguments"
    if sys.argv[1:] and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[1]))  # the program's Megatron, before any other
    with _answering_a_program():
        run_as_main(sys.argv[1:], usage)


if __name__ == "__main__":
    _run_program()
