"""The memory of a call: tensors in one piece, as bytes and in parts, and how parts are reduced.

Blocks of half precision are summed in FP32 and rounded once: torch's own loop over two of them at a
time would round after each. (A plan over nodes has a reduction inside the node and one between
nodes, so it rounds once for each.) All other dtypes are summed as they are. Blocks are reduced in a
fixed order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from commlayer.profiles.errors import TensorError
from commlayer.scheduler.plan import Buffer

__all__ = [
    "Buffers",
    "CallMemory",
    "Reducer",
    "as_bytes",
    "as_row",
    "plain",
    "reducer",
    "require_dense",
]

_STRIDED = torch.strided
_BYTE = torch.uint8
_MAX_PARTS = 4096
_MAY_BE_WRITTEN = 0x200  # PyBUF_WRITE of Python's C interface
# A function of our own: argument types that are set on ctypes.pythonapi's are those of everybody
# who calls it.
_memory_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)


class CallMemory(dict[tuple[int, int, torch.dtype], torch.Tensor]):
    """The memory of one buffer of a call, and its parts: ``memory[start, stop, dtype]`` is the
    bytes from ``start`` to ``stop`` as a 1-D tensor of ``dtype``, whose elements begin at multiples
    of its size.

    ``tensor``: 1-D uint8 [bytes]; on the CPU ``bytes`` is the same as a memoryview. It is made from
    an address, and holds no memory: a slice of it must not outlive this object, which holds the
    tensor. (Rejected: ``tensor.numpy()``. It makes the storage one that can never be resized again,
    and most tensors are a caller's.)

    A part is made when it is first asked for, and kept: a slice of a tensor costs ten times what a
    slice of a memoryview does, and more than the copy of a small message. A buffer that is kept
    between calls keeps its parts too. It is a dictionary because messages and sums look parts up,
    and a method would be a call of Python for each.
    """

    __slots__ = ("_typed", "bytes", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        if tensor.is_cpu:
            self.bytes: memoryview = _memory_at(tensor.data_ptr(), tensor.nbytes, _MAY_BE_WRITTEN)
        self._typed: dict[torch.dtype, torch.Tensor] = {_BYTE: tensor}

    def __missing__(self, key: tuple[int, int, torch.dtype]) -> torch.Tensor:
        start, stop, dtype = key
        width = dtype.itemsize
        typed = self._typed.get(dtype)
        if typed is None:
            elements = self.tensor[: self.tensor.numel() // width * width]
            typed = self._typed[dtype] = elements.view(dtype)
        if len(self) >= _MAX_PARTS:
            self.clear()
        part = self[key] = typed[start // width : stop // width]
        return part


Buffers = Mapping[Buffer, CallMemory]
"""Input, output and staging of one call."""


def plain(x: torch.Tensor) -> torch.Tensor:
    """``x`` without history and contiguous: itself where it is, else a copy. Signs and conjugations
    put off are carried out.

    Raises TensorError for sparse tensors.
    """
    require_dense(x)
    x = x.detach() if x.requires_grad else x
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    return x.contiguous()


def require_dense(x: torch.Tensor) -> None:
    """Raises TensorError for sparse tensors."""
    if x.layout is not _STRIDED:
        raise TensorError(
            f"expected a dense tensor, got {x.layout}: only all_reduce takes sparse tensors; use x.to_dense()"
        )


def as_row(x: torch.Tensor) -> torch.Tensor:
    """The elements of ``x``, which is contiguous, as a 1-D view with stride 1.

    ``x.view(-1)`` keeps the stride of a tensor of one or no elements, which is contiguous with any,
    and torch views bytes only where it is 1.
    """
    return x.as_strided((x.numel(),), (1,))


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of ``x`` as 1-D uint8 [bytes]; a view where ``x`` is plain. Every dtype passes,
    FP8 and NaN payloads too."""
    if x.layout is not _STRIDED or not x.is_contiguous() or x.is_conj() or x.is_neg() or x.requires_grad:
        x = plain(x)
    # As as_row has it, without a call; most are such rows, of which torch makes another view for nothing.
    row = x if x.dim() == 1 and x.stride(0) == 1 else x.as_strided((x.numel(),), (1,))
    return row.view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Reducer:
    """``reduce(target, sources)`` reduces sources into a target, all 1-D of ``dtype``."""

    dtype: torch.dtype
    reduce: Callable[[torch.Tensor, Sequence[torch.Tensor]], None]


Pairwise = Callable[..., torch.Tensor]
_OPERATIONS: dict[str, Pairwise] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
"""The reductions of two blocks to one, by c10d's name in small letters."""
_HALF = (torch.float16, torch.bfloat16)


@lru_cache(maxsize=256)
def reducer(dtype: torch.dtype, op: str) -> Reducer:
    """How to reduce blocks of ``dtype``."""
    pairwise = _OPERATIONS[op]

    def reduce(into: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        if len(sources) == 1:
            into.copy_(sources[0])
            return
        first, second, *rest = sources
        if dtype in _HALF and op in ("sum", "product"):
            total = pairwise(first.float(), second)
            for block in rest:
                pairwise(total, block, out=total)
            into.copy_(total)
            return
        pairwise(first, second, out=into)
        for block in rest:
            pairwise(into, block, out=into)

    return Reducer(dtype, reduce)
