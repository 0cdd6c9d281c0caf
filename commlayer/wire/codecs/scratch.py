"""Memory for intermediate values that stays in a core's cache: one set for each thread, made once.

Fresh temporaries of a whole tensor miss the cache and fault their pages in; that is most of what plain expressions cost.
Calls come from progress threads in inference mode as well as from the caller's, so the memory is made outside it: a tensor
made inside could not be written outside.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["TILE_ELEMENTS", "constant", "pieces", "scratch"]

TILE_ELEMENTS = 131072
"""The number of elements that are worked on at a time: half a MiB in FP32, about a core's second-level cache. With a
quarter of it the calls of torch (1 to 3 µs each, seven for a tile) weigh half as much as their work; with four times as
much nothing is gained.
"""
_MAX_VIEWS = 256


class _Memory(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[object, torch.Tensor] = {}
        self.views: dict[object, torch.Tensor] = {}


_MEMORY = _Memory()


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return memory of this thread with any content: the same for all shapes of one name and dtype."""
    key = (name, shape, dtype)
    view = _MEMORY.views.get(key)
    return _make_view(key, name, dtype, shape, None) if view is None else view


def constant(value: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor full of ``value``, for integer operations: they are twice as fast with a tensor as with a scalar."""
    key = (value, shape, dtype)
    view = _MEMORY.views.get(key)
    return _make_view(key, value, dtype, shape, value) if view is None else view


def pieces(x: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """Split as ``x.split(size)`` does, without the 5 µs that it takes where there is nothing to split."""
    return (x,) if x.shape[0] <= size else x.split(size)


def _make_view(
    key: object, name: object, dtype: torch.dtype, shape: tuple[int, ...], value: int | None
) -> torch.Tensor:
    if len(_MEMORY.views) >= _MAX_VIEWS:  # shapes come and go with the numbers of tokens
        _MEMORY.views.clear()
    size = torch.Size(shape).numel()
    with torch.inference_mode(False):
        buffer = _MEMORY.buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(max(size, TILE_ELEMENTS), dtype=dtype)
            _MEMORY.buffers[name, dtype] = buffer if value is None else buffer.fill_(value)
            stale = [key for key in _MEMORY.views if isinstance(key, tuple) and (key[0], key[2]) == (name, dtype)]
            for old in stale:  # they would keep the smaller buffer alive
                del _MEMORY.views[old]
        view = _MEMORY.views[key] = buffer[:size].view(shape)
    return view
