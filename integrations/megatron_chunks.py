"""Megatron-Core's MoE layer in chunks of tokens: while its experts compute one, others go out to them, or come back.

Megatron's layer calls dispatch, experts and combine one after the other. In chunks the way of some tokens may be hidden behind
the computation of others: whether that is worth while is for the plan to predict, and no step has been measured to gain by it.

Between the layer's calls of the dispatcher stands one method that asks for rows and gives them to the experts,
``routed_experts_compute``. A layer that is made gets a subclass of its own class, in which that method does all three, chunk by
chunk, where the plan has several chunks; the calls of the dispatcher before and after it then hand on what they get. Rejected:
another ``forward``, which would be a copy of Megatron's, with its recomputation and CUDA graphs; a function set on the layer,
which a copy of the layer would call with the first one's experts.

Weight gradients of an expert are sums over chunks, so they are rounded in another order than in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

__all__ = ["ChunkedExperts", "compute_in_chunks", "why_in_one_chunk"]

_METHODS = ("forward", "dispatch", "routed_experts_compute", "combine")
"""The methods of MoELayer that tokens pass from the router on, and that a subclass must leave as they are."""


class ChunkedExperts(nn.Module):
    """The experts of a layer of Megatron's as our dispatcher calls them. They stay the layer's: this is part of no model."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, rows: torch.Tensor, expert_rows: Sequence[int], weights: torch.Tensor | None) -> torch.Tensor:
        """Run the experts on ``rows`` [R, H], of which each has its number, weighted by ``weights`` [R, 1]; None: by 1."""
        each = rows.new_ones(rows.shape[0], dtype=torch.float32) if weights is None else weights.view(-1)
        out, bias = self.experts(rows, torch.tensor(expert_rows), each)
        assert bias is None  # Megatron asserts it too
        return out  # type: ignore[no-any-return]


def why_in_one_chunk(layer: Any, stock: type) -> str | None:
    """Tell why the tokens of this layer cannot go in chunks; None where they can. ``stock``: Megatron's MoELayer."""
    if not hasattr(stock, "routed_experts_compute"):
        return "this Megatron-Core's MoELayer has no routed_experts_compute"
    own = [name for name in _METHODS if getattr(type(layer), name) is not getattr(stock, name)]
    if own:
        return f"{type(layer).__name__} has a {own[0]} of its own"
    if getattr(layer.config, "fp8", None) or getattr(layer.config, "fp4", None):
        return "recipes of FP8 and FP4 go by the passes of an expert"
    if getattr(layer.config, "delay_wgrad_compute", False):
        return "delay_wgrad_compute takes the weight gradients of one pass"
    return None


def compute_in_chunks(layer: Any) -> None:
    """Have ``layer`` run its experts chunk by chunk where its dispatcher, a MegatronDispatcher, has several."""
    made: Any = _chunked
    layer.__class__ = made(type(layer))


@cache
def _chunked(stock: Any) -> type:
    def routed_experts_compute(self: Any, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        """Run the experts; on tokens [T, H] and weights [T, K] that have not been sent, with their dispatch and combine."""
        if self.token_dispatcher.goes_in_chunks:
            return self.token_dispatcher.run(hidden_states, probs), None
        return stock.routed_experts_compute(self, hidden_states, probs)

    members = {"routed_experts_compute": routed_experts_compute, "__doc__": stock.__doc__}
    return type(f"Chunked{stock.__name__}", (stock,), members)
