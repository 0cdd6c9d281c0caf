"""Activations in the host's memory: modules whose inputs go there in the forward pass, and come back before their backward.

As Megatron-Core's fine-grained offloading (``--offload-modules``; megatron/core/pipeline_parallel/
fine_grained_activation_offload.py), by its names, joined by ``+``. What autograd keeps inside a module leaves the GPU:

- ``attn_norm``: the input of the norm before attention. Without latent attention that norm is one kernel with the projections,
  and its input leaves with ``qkv_linear``.
- ``qkv_linear``: the input of the projections, and of latent attention what is between those down and up.
- ``core_attn``: queries, keys and values; and the output, a copy of which stays unless ``attn_proj`` goes as well.
- ``attn_proj``: the input of the projection behind attention.
- ``mlp_norm``: the input of the norm before the experts; in dense layers that is one kernel with their first product.
- ``expert_fc1``: the input of the experts. ``moe_act``: that of their activation function.

What is computed again besides is not kept in any case, but crosses all the same where its module is named.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, get_args

from commlayer.scheduler.mapping.recomputation import joined_modules, modules_of

__all__ = ["KEPT", "OFFLOADABLE", "Offload", "canonical_offload", "offloaded_modules", "unfit_offload"]

Offload = str
""":data:`KEPT`, or modules joined by +, in the order of :data:`OFFLOADABLE`."""
_Offloadable = Literal["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]
OFFLOADABLE: tuple[str, ...] = get_args(_Offloadable)
KEPT: Offload = "none"
"""All activations stay on the GPU."""
_EXPERTS = frozenset({"expert_fc1", "moe_act"})


@lru_cache(maxsize=1024)
def offloaded_modules(offload: Offload) -> frozenset[str]:
    """The modules whose inputs leave the GPU. Raises UsageError for an unknown word."""
    if offload == KEPT:
        return frozenset()
    return joined_modules("offload", offload, OFFLOADABLE, (KEPT,))


def canonical_offload(offload: Offload) -> Offload:
    """The same with each module once, in one order. Raises as :func:`offloaded_modules`."""
    modules = offloaded_modules(offload)
    return "+".join(module for module in OFFLOADABLE if module in modules) or KEPT


def unfit_offload(offload: Offload, recompute: str) -> str:
    """Why modules cannot be offloaded beside what is computed again, as Megatron-Core refuses it; empty where they can."""
    modules = offloaded_modules(offload)
    if "attn_proj" in modules and "core_attn" not in modules:
        return "the input of attn_proj is the output of core_attn, which keeps it: add core_attn"
    if modules and recompute == "full":
        return "with recompute full a layer keeps its input alone, and no module has anything to offload: take another"
    if modules & _EXPERTS and "moe" in modules_of(recompute):
        which = " and ".join(module for module in OFFLOADABLE if module in modules & _EXPERTS)
        return f"moe is computed again as a whole, {which} in it: leave one of them out"
    return ""
