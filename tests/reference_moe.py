"""The mixture of experts as its definition reads: one process, one token after another. Slow, and obviously right.

Every fast path is held against it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F  # noqa: N812  torch's own name for it

__all__ = ["reference_combine", "reference_experts", "reference_moe"]

Weights = Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""The weights of each expert of the model: w_gate [F, H], w_up [F, H], w_down [H, F]."""


def reference_experts(x: torch.Tensor, expert: int, weights: Weights) -> torch.Tensor:
    """Run one expert on one token [H]; return [H]."""
    gate, up, down = weights[expert]
    return down @ (F.silu(gate @ x) * (up @ x))


def reference_combine(choices: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum over choices, ``Σ_k weights[k] · choices[k]``: the sum of the first half plus the sum of the second, down to
    single products.
    """
    if len(choices) == 1:
        return choices[0] * weights[0]
    half = len(choices) // 2
    return reference_combine(choices[:half], weights[:half]) + reference_combine(choices[half:], weights[half:])


def reference_moe(x: torch.Tensor, indices: torch.Tensor, gates: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Run the mixture on tokens ``x`` [T, H], the experts ``indices`` [T, K] that each chose (−1: dropped) and their
    ``gates`` [T, K] → [T, H].
    """
    outputs = []
    for token in range(x.shape[0]):
        chosen = [int(expert) for expert in indices[token]]
        choices = [x[token] * 0 if e < 0 else reference_experts(x[token], e, weights) for e in chosen]
        outputs.append(reference_combine(choices, list(gates[token])))
    return torch.stack(outputs) if outputs else x * 0
