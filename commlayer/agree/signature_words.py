"""The words for a call by which ranks compare it.

They stand apart from the comparison (:mod:`commlayer.agree.signature_check`): a group writes them, and loads
the comparison only where COMMLAYER_DEBUG asks for it.
"""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import ReduceOp

from commlayer.scheduler.plan import Plan

__all__ = ["signature_words"]


def signature_words(
    collective: str,
    tensor: torch.Tensor | None,
    num_bytes: int,
    *,
    op: ReduceOp.RedOpType | None = None,
    root: int | None = None,
    sizes: tuple[int, ...] | None = None,
    plan: Plan | None = None,
) -> str:
    """Write a call as all ranks of a group must make it. ``root``: its global rank."""
    parts = [f"{num_bytes} bytes"]
    if tensor is not None:
        parts.append(str(tensor.dtype).removeprefix("torch."))
    if op is not None:
        parts.append(op.name)
    if root is not None:
        parts.append(f"root {root}")
    if sizes is not None:
        parts.append(f"sizes {list(sizes)}")
    parts.append(f"plan {plan.name if plan else 'flat'}")
    return f"{collective}({', '.join(parts)})"
