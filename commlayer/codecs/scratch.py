"""Memory for intermediate values that stays in a core's cache: one set for each thread, made once.

Fresh temporaries of a whole tensor miss the cache and fault their pages in; that is most of what plain expressions cost.
Calls come from progress threads in inference mode as well as from the caller's, so the memory is made outside it: a tensor
made inside could not be written outside.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["TILE_ELEMENTS", "constant", "scratch"]

TILE_ELEMENTS = 32768
"""Elements worked on at a time: 128 KiB in FP32, of which two fit into a usual second-level cache. At half of it the calls of
torch (1 to 2 µs each) weigh as much as their work."""


class _Memory(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[object, torch.Tensor] = {}


_MEMORY = _Memory()


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory of this thread, the same at each call with these arguments."""
    key = (name, shape, dtype)
    found = _MEMORY.buffers.get(key)
    if found is None:
        found = _MEMORY.buffers[key] = _carve(name, shape, dtype)
    return found


def constant(value: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor full of ``value``: operations of integers with one are twice as fast as with a scalar."""
    key = (value, shape, dtype)
    found = _MEMORY.buffers.get(key)
    if found is None:
        _forget_some()
        with torch.inference_mode(False):
            found = _MEMORY.buffers[key] = torch.full(shape, value, dtype=dtype)
    return found


def _carve(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A view of the one buffer that all shapes of this name and dtype share."""
    _forget_some()
    size = torch.Size(shape).numel()
    base = _MEMORY.buffers.get((name, dtype))
    with torch.inference_mode(False):
        if base is None or base.numel() < size:
            base = _MEMORY.buffers[name, dtype] = torch.empty(max(size, TILE_ELEMENTS), dtype=dtype)
        return base[:size].view(shape)


def _forget_some() -> None:
    """Shapes come and go with the numbers of tokens: do not keep views of all of them."""
    if len(_MEMORY.buffers) > 256:
        _MEMORY.buffers.clear()
