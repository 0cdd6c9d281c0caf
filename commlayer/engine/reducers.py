"""Sums (and products, minima, …) of blocks in memory, in a fixed order.

Half-precision blocks of one reduction are summed in FP32 and rounded once: torch's own loop over two of them at a time would
round after each. (A plan over nodes has a reduction inside the node and one between nodes, so it rounds once for each.) All
other dtypes are summed as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from commlayer.transport.contract import Reducer

__all__ = ["reducer"]

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
