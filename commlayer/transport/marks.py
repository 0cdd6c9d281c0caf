"""Marks of calls: what all ranks must have alike beside sizes, in four bytes that travel in the
head of a message.

A message inside a node has a head, with room for them. Messages between nodes have none, and a mark
sent for itself would be a message more; but every plan over several nodes also sends inside them.
"""

from __future__ import annotations

from functools import lru_cache

import torch

__all__ = ["NO_MARK", "mark_of", "mark_text"]

NO_MARK = 0
"""The mark of messages that say nothing of their call."""

_COLLECTIVES = ("all_gather", "all_reduce", "broadcast", "reduce_scatter", "all_to_all_v", "all_to_all")
_OPS = ("sum", "product", "min", "max", "band", "bor", "bxor", "avg")
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
_ROOTS = 1 << 16
_SUMMED = ("all_reduce", "reduce_scatter")
_OTHER = "of another kind"


@lru_cache(maxsize=1024)
def mark_of(collective: str, dtype: torch.dtype, op: str, root: int) -> int:
    """The mark of such a call. ``op`` counts where there are sums, ``root``, a rank of the group,
    in a broadcast.

    From the lowest bits: root (16), dtype (6), op (4), collective (4), each of the last three plus
    1; 0: none that is listed.
    """
    mark = _place(_COLLECTIVES, collective)
    mark = mark << 4 | (_place(_OPS, op) if collective in _SUMMED else 0)
    mark = mark << 6 | _place(_DTYPES, dtype)
    return mark << 16 | (root % _ROOTS if collective == "broadcast" else 0)


def mark_text(mark: int) -> str:
    """A mark in words, such as ``all_reduce(float32, max)``."""
    if mark == NO_MARK:
        return "a call without a mark (a message, or an exchange of rows)"
    root, dtype, op = mark % _ROOTS, mark >> 16 & 0x3F, mark >> 22 & 0xF
    collective = _at(_COLLECTIVES, mark >> 26)
    words = [_at(_DTYPES, dtype).removeprefix("torch.")]
    if op or collective in _SUMMED:
        words.append(_at(_OPS, op))
    if collective == "broadcast":
        words.append(f"root {root} of the group")
    return f"{collective}({', '.join(words)})"


def _place(known: tuple[object, ...], value: object) -> int:
    return known.index(value) + 1 if value in known else 0


def _at(known: tuple[object, ...], place: int) -> str:
    return str(known[place - 1]) if 0 < place <= len(known) else _OTHER
