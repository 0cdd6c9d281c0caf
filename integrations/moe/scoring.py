"""Scores of tokens, and the choices that follow from them: pure functions of tensors, whose rows do
not depend on each other.

Shapes: T tokens, H hidden, E experts, K choices per token, G groups of experts.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from commlayer.integrations.moe.routing_config import RouterConfig

__all__ = ["choose_experts", "first_highest", "fixed_shape_logits", "limit_to_groups", "score", "weigh"]

_TINY = 1e-20
"""Keeps a sum of scores from being 0, as in DeepSeek-V3 and Megatron-Core."""
_TILE_EXPERTS = 16
_BLOCK_TOKENS_CPU, _BLOCK_TOKENS = 128, 1024
"""The fixed shape of a block of logits. 128 rows cost the CPU no time; an accelerator wants fewer,
larger products."""


def fixed_shape_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply ``x`` [T, H] by ``weight`` [E, H]: logits [T, E] in FP32 or FP64, whose rows depend
    on nothing but the token."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    num_experts = weight.shape[0]
    columns = pad(weight.to(dtype), (0, 0, 0, -num_experts % _TILE_EXPERTS)).t()
    block_tokens = _BLOCK_TOKENS_CPU if x.device.type == "cpu" else _BLOCK_TOKENS
    blocks = []
    for block in x.split(block_tokens):
        full = block.to(dtype)
        if len(block) < block_tokens:  # padding by nothing would copy all the same
            full = pad(full, (0, 0, 0, block_tokens - len(block)))
        blocks.append((full @ columns)[: len(block), :num_experts])
    return torch.cat(blocks)


def score(logits: torch.Tensor, config: RouterConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute scores [T, E], by which experts are chosen and weighed, and probabilities [T, E],
    which sum to 1, for the losses.
    """
    if config.score == "sigmoid":
        # In FP64: the FP32 one's last bit depends on where an element lies on the CPU (vector body
        # or scalar tail).
        scores = logits.double().sigmoid().to(logits.dtype)
        return scores, scores / (scores.sum(-1, keepdim=True) + _TINY)
    probabilities = logits.softmax(-1)
    return (logits if config.order == "topk_softmax" else probabilities), probabilities


def weigh(scores: torch.Tensor, config: RouterConfig) -> torch.Tensor:
    """Turn the chosen experts' scores [T, K] into weights [T, K]."""
    if config.order == "topk_softmax":
        scores = scores.softmax(-1)
    elif config.normalise and config.top_k > 1:
        scores = scores / (scores.sum(-1, keepdim=True) + _TINY)
    return scores * config.scaling_factor


def choose_experts(scores: torch.Tensor, bias: torch.Tensor | None, config: RouterConfig) -> torch.Tensor:
    """Choose the experts of each token by its ``scores`` [T, E], plus ``bias`` [E] where there is
    one: [T, K] int64."""
    if bias is not None:
        scores = scores + bias
    if config.num_groups is not None and config.top_groups is not None:
        num_summed = 1 if bias is None else 2
        scores = limit_to_groups(scores, config.num_groups, config.top_groups, num_summed)
    return first_highest(scores, config.top_k)


def first_highest(scores: torch.Tensor, number: int) -> torch.Tensor:
    """The indices of the ``number`` highest scores of each row, highest first, among equal ones the
    lowest index first."""
    scores, chosen = scores.clone(), []
    for _ in range(number):
        highest = scores.argmax(-1, keepdim=True)
        scores.scatter_(-1, highest, -math.inf)
        chosen.append(highest)
    return torch.cat(chosen, -1)


def limit_to_groups(scores: torch.Tensor, num_groups: int, top_groups: int, num_summed: int) -> torch.Tensor:
    """Return ``scores`` [T, E] with −inf outside of the best groups: those with the highest sum of
    ``num_summed`` best scores.
    """
    grouped = scores.view(len(scores), num_groups, scores.shape[1] // num_groups)
    of_group = grouped.topk(min(num_summed, grouped.shape[2])).values.sum(-1)
    outside = torch.ones_like(of_group, dtype=torch.bool).scatter(1, first_highest(of_group, top_groups), False)
    return grouped.masked_fill(outside.unsqueeze(-1), -math.inf).view_as(scores)
