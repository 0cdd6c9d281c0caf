"""DeepSpeed's MoE layers without tensor parallelism on our token dispatcher: its gate and its experts, whose tokens go by plan.

DeepSpeed sends the whole capacity of every expert in one even all_to_all, empty places too, and a token once for each of its
choices. Its gate has said by then which token goes where, so here only tokens go, and over nodes once to each, where that is
predicted to be faster. Its capacity still says which choices are dropped.

Between the gate and the sum nothing is left of the layer's forward pass but the experts, so it is written anew here, in a few
lines; which functions DeepSpeed's own calls there is compared when a layer is planned. Experts compute row by row, and get theirs
in another order, with less padding: losses are the same but for the order of sums.

Shapes: T tokens of this rank, K choices of each, L local experts, H hidden, R rows that this rank's experts receive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from commlayer.integrations.groups import planned_from, say_first
from commlayer.integrations.moe.dispatcher import TokenDispatcher

__all__ = ["dispatching_forward", "sends_places"]

_CALLED = ("gate", "_route_slots", "_sparse_encode", "_AllToAll", "experts", "_sparse_decode")


def sends_places(layer: type[Any]) -> bool:
    """Whether the forward pass of DeepSpeed's ``layer`` is the one that :func:`dispatching_forward` stands for: its gate says
    where each choice goes, and tokens are put into places of an even all_to_all."""
    forward: Any = layer.forward
    return set(_CALLED) <= set(forward.__code__.co_names)


def dispatching_forward(tokens: TokenDispatcher) -> Callable[..., torch.Tensor]:
    """Make the forward pass of a layer of DeepSpeed's whose tokens ``tokens`` moves."""

    def forward(self: Any, *given: torch.Tensor, **_: object) -> torch.Tensor:
        x = given[0]
        flat = x.reshape(-1, x.shape[-1])
        self.l_aux, _, _, experts, _, gates, self.exp_counts = self.gate(flat, given[1], True, False)
        indices, weights = experts.t().to(torch.int64).contiguous(), gates.t().contiguous()
        handle = tokens.prepare(indices, like=flat, weights=weights)
        say_first("DeepSpeed", partial(_first_words, tokens))
        rows, counts = tokens.dispatch(flat, handle)
        return tokens.combine(_computed(self.experts, rows, counts), handle, weights).reshape(x.shape)

    return forward


def _computed(
    experts: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, counts: Sequence[int]
) -> torch.Tensor:
    """Run DeepSpeed's ``experts``, which want as many rows each, on ``rows`` [R, H], sorted by expert, of which each has
    ``counts`` [L]."""
    most, hidden = max(1, *counts), rows.shape[1]
    if counts == (most,):
        return experts(rows.view(1, 1, most, hidden)).view(most, -1)
    places = torch.cat([torch.arange(expert * most, expert * most + count) for expert, count in enumerate(counts)])
    places = places.to(rows.device)
    laid = rows.new_zeros(len(counts) * most, hidden).index_copy(0, places, rows)
    computed = experts(laid.view(1, len(counts), most, hidden))
    return computed.reshape(len(counts) * most, -1).index_select(0, places)


def _first_words(tokens: TokenDispatcher) -> str:
    decision, ep = tokens.decision, tokens.grid.ep
    assert decision is not None  # of the call that was just prepared
    return (
        f"DeepSpeed's MoE layers exchange tokens over EP {ep.size} by our dispatcher, planned {planned_from(ep)}; the first "
        f"{decision.name} by {decision.reason}"
    )
