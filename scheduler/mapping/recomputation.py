"""Recomputation: what a layer does not keep for its backward pass, but computes again.

Three words, and modules by Megatron-Core's names (``--recompute-modules``), joined by ``+`` where there are several:

- ``none``; ``full``: a layer's input stays, all else is made again; ``selective``: MegaScale-MoE's choice (A.2).
- ``core_attn``: attention's core. With fused attention, whose output the projection behind it keeps, that frees nothing.
- ``moe_act``: the experts' activation function. ``layernorm``: both norms.
- ``mla_up_proj``: the projections up of latent attention, and so queries, keys and values.
- ``mlp``: a dense layer's FFN. ``shared_experts``: what all tokens pass through.
- ``moe``: all experts of a layer with its router, and its tokens travel once more.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, get_args

from commlayer.profiles.errors import UsageError

__all__ = ["MODULES", "RECOMPUTE", "Module", "Recompute", "canonical", "modules_of", "recompute_order", "unfit_modules"]

Recompute = str
"""One of :data:`RECOMPUTE`, or modules joined by +, in the order of :data:`MODULES`."""
Module = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]
MODULES: tuple[Module, ...] = get_args(Module)
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
"""The ways that a search tries unless it is told otherwise, from the least to the most."""


@lru_cache(maxsize=1024)
def modules_of(recompute: Recompute) -> frozenset[str]:
    """The modules that are computed again; empty for the three words. Raises UsageError for an unknown word."""
    if recompute in RECOMPUTE:
        return frozenset()
    found = recompute.split("+")
    if unknown := [word for word in found if word not in MODULES]:
        raise UsageError(
            f"recompute: expected {', '.join(RECOMPUTE)}, or some of {', '.join(MODULES)} joined by +, got {unknown[0]!r}"
        )
    return frozenset(found)


def canonical(recompute: Recompute) -> Recompute:
    """The same with each module once, in one order. Raises as :func:`modules_of`."""
    modules = modules_of(recompute)
    return "+".join(module for module in MODULES if module in modules) if modules else recompute


def recompute_order(recompute: Recompute) -> tuple[int, int, str]:
    """Orders ways of recomputation from the least to the most: modules, the more of them the later, behind none."""
    modules = modules_of(recompute)
    return (0, len(modules), recompute) if modules else (RECOMPUTE.index(recompute), 0, "")


def unfit_modules(recompute: Recompute, *, is_latent: bool, precision: str, is_merged: bool) -> str:
    """Why modules cannot be computed again so; empty where they can.

    Args:
        is_latent: whether the model has latent attention. is_merged: whether passes of two micro-batches are merged.
    """
    modules = modules_of(recompute)
    if "mla_up_proj" in modules and not is_latent:
        return "mla_up_proj is of latent attention, which the model does not have"
    if precision == "fp8-delayed" and modules & {"moe_act", "layernorm"}:
        return "fp8-delayed cannot cast moe_act and layernorm again, as its scales follow from a history: take another recipe"
    if is_merged and "moe" in modules:
        return "moe is merged with another micro-batch's pass: take its parts, such as moe_act+shared_experts"
    return ""
