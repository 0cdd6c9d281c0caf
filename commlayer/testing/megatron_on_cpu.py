"""Megatron-Core on a machine without CUDA: what it asks of torch.cuda, answered for the CPU.

Megatron takes the device of new tensors, streams and random numbers from torch.cuda. With these answers its layers, experts,
dispatchers, DDP and gradient reduction run on the CPU as they are, which is enough to try a program on an emulated cluster,
and to compare dispatchers. Its optimizers, which know CUDA's types of tensors only, do not.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from typing import Any

import torch

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
