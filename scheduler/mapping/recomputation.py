"""Recomputation: what a layer does not keep for its backward pass, but computes again.

Three words, and modules by Megatron-Core's names (``--recompute-modules``), joined by ``+`` where
there are several:

- ``none``; ``full``: a layer's input stays, all else is made again; ``megascale``: MegaScale-MoE's
  choice (A.2).
- ``core_attn``: attention's core; Megatron's ``selective`` is another name of it. With fused
  attention, whose output the projection behind it keeps, that frees nothing.
- ``moe_act``: the experts' activation function. ``layernorm``: both norms.
- ``mla_up_proj``: the projections up of latent attention, and so queries, keys and values.
- ``mlp``: a dense layer's FFN. ``shared_experts``: what all tokens pass through.
- ``moe``: all experts of a layer with its router, and its tokens travel once more.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Literal, get_args

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping.hardware import Gpu
from commlayer.scheduler.mapping.layer_table import model_operations
from commlayer.scheduler.mapping.model import ModelShape
from commlayer.scheduler.mapping.precisions import recipe_of

__all__ = [
    "MODULES",
    "RECOMPUTE",
    "Module",
    "Recompute",
    "canonical",
    "joined_modules",
    "modules_in",
    "modules_of",
    "recompute_order",
    "recomputes_less",
    "unfit_modules",
    "unfit_recomputation",
    "ways_of",
]

Recompute = str
"""One of :data:`RECOMPUTE`, or modules joined by +, in the order of :data:`MODULES`."""
Module = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]
MODULES: tuple[Module, ...] = get_args(Module)
RECOMPUTE: tuple[Recompute, ...] = ("none", "megascale", "full")
"""The ways that a search tries unless it is told otherwise, from the least to the most."""
_OTHER_NAMES = {"selective": "core_attn"}
"""Names that mean the same way of recomputation, as ``--recompute-granularity selective`` does
without modules."""
_PARTS: dict[str, str] = {
    "mla_up_proj": "latent attention",
    "mlp": "layers without experts",
    "moe": "layers with experts",
    "moe_act": "layers with experts",
    "shared_experts": "shared experts",
}
"""The part of a model that a module is of, where not every model has it."""


@lru_cache(maxsize=1024)
def modules_of(recompute: Recompute) -> frozenset[str]:
    """The modules that are computed again; empty for the three words. Raises UsageError for an
    unknown word."""
    if recompute in RECOMPUTE:
        return frozenset()
    return joined_modules("recompute", recompute, MODULES, RECOMPUTE)


def ways_of(recompute: Recompute) -> frozenset[str]:
    """The names by which operations say that they are made again: the word itself, or the modules that it joins;
    empty for ``none``.

    Raises as :func:`modules_of`.
    """
    if recompute == "none":
        return frozenset()
    return modules_of(recompute) or frozenset({recompute})


def joined_modules(field: str, words: str, modules: Collection[str], alone: Collection[str]) -> frozenset[str]:
    """The modules that ``words`` joins by a plus. ``alone``: words that such a field takes by
    themselves. Raises UsageError."""
    found = words.split("+")
    if unknown := [word for word in found if word not in modules]:
        raise UsageError(
            f"{field}: expected {', '.join(alone)}, or some of {', '.join(modules)} joined by +, got {unknown[0]!r}"
        )
    return frozenset(found)


def canonical(recompute: Recompute) -> Recompute:
    """The same by its own name, with each module once, in one order. Raises as :func:`modules_of`."""
    recompute = _OTHER_NAMES.get(recompute, recompute)
    modules = modules_of(recompute)
    return "+".join(module for module in MODULES if module in modules) if modules else recompute


def recompute_order(recompute: Recompute) -> tuple[int, int, str]:
    """Orders ways of recomputation from the least to the most: modules, the more of them the later,
    behind none."""
    modules = modules_of(recompute)
    return (0, len(modules), recompute) if modules else (RECOMPUTE.index(recompute), 0, "")


def recomputes_less(one: Recompute, other: Recompute) -> bool:
    """Whether a step with ``one`` is known to be no longer than with ``other``: of modules where both norms are among them,
    which every layer has. What only some layers compute again may be free, on stages that wait, and hide gradients."""
    known = ("megascale", "full") if one == "none" else ("full",)
    return other != one and (other in known or (one == "none" and "layernorm" in modules_of(other)))


@lru_cache(maxsize=256)
def modules_in(model: ModelShape) -> frozenset[str]:
    """The modules that the layers of ``model`` have: those that its operations name."""
    ops = (op for op, _ in model_operations(model))
    named = frozenset(module for op in ops for module in op.remade) | {"layernorm"}  # every layer has norms
    return named & frozenset(MODULES)


def unfit_modules(
    recompute: Recompute, *, precision: str, is_merged: bool, there: Collection[str] = frozenset(MODULES)
) -> str:
    """Why modules cannot be computed again so; empty where they can.

    Args:
        precision: the recipe's name; is_merged: whether passes of two micro-batches are merged;
            there: the modules that the model has (:func:`modules_in`).
    """
    modules = modules_of(recompute)
    if missing := [module for module in MODULES if module in modules and module not in there]:
        return f"{missing[0]} is of {_PARTS[missing[0]]}, which the model does not have"
    if precision == "fp8-delayed" and modules & {"moe_act", "layernorm"}:
        return "fp8-delayed cannot cast moe_act and layernorm again, as its scales follow from a history: take another recipe"
    if is_merged and "moe" in modules:
        return "moe is merged with another micro-batch's pass: take its parts, such as moe_act+shared_experts"
    return ""


def unfit_recomputation(model: ModelShape, gpu: Gpu, recompute: Recompute, precision: str, is_merged: bool) -> str:
    """Why ``model`` cannot compute its activations again so on ``gpu``; empty where it can.
    ``is_merged``: as :func:`unfit_modules`.

    Raises UsageError for a precision that the GPU does not have.
    """
    recipe = recipe_of(precision, gpu)
    name = precision if recipe is None else recipe.name
    why = unfit_modules(recompute, precision=name, is_merged=is_merged, there=modules_in(model))
    return f"precision {precision} is {name} on {gpu.name}, and {why}" if name != precision and name in why else why
