"""FLOPs of a model, per token: what MFU counts. A multiply-add is two.

Model FLOPs are those of the forward pass three times (forward, and backward for inputs and for
weights), whatever is computed again or dropped: recomputation, padding to a capacity and uneven
routing are costs of a run, not work of the model (PaLM, arXiv:2204.02311, appendix B).
docs/counting.md has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from commlayer.scheduler.mapping.job import Job
from commlayer.scheduler.mapping.layer_table import model_operations
from commlayer.scheduler.mapping.model import ModelShape
from commlayer.scheduler.mapping.parameters import count

__all__ = ["Flops", "forward", "of_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """FLOPs of one token's forward pass, each the sum over the layers. ``attention_core``: QKᵀ and
    PV, causal."""

    attention_projections: float
    attention_core: float
    router: float
    experts: float
    shared: float
    dense_ffn: float
    head: float
    mtp_projections: float = 0.0

    @property
    def total(self) -> float:
        return (
            self.attention_projections
            + self.attention_core
            + self.router
            + self.experts
            + self.shared
            + self.dense_ffn
            + self.head
            + self.mtp_projections
        )


@lru_cache(maxsize=1024)
def forward(model: ModelShape, sequence: int) -> Flops:
    """A token's forward pass in a sequence of ``sequence`` tokens.

    A matrix costs two FLOPs per element; the embedding is a look-up and costs none, norms and
    activations are not counted. Windows count
    (:func:`~commlayer.scheduler.mapping.model.mean_positions`), and chosen positions, and linear attention
    (:func:`~commlayer.scheduler.mapping.model.linear_flops`), and every module of multi-token
    prediction, with a head of its own (as Megatron-LM counts them).
    """
    parts = {"attention": 0.0, "router": 0.0, "experts": 0.0, "shared": 0.0, "dense_ffn": 0.0}
    core = 0.0
    for op, layers in model_operations(model):
        for each in op.weights:
            if each.part != "norms":
                share = model.top_k / model.experts if each.part == "experts" else 1.0
                part = each.part if each.part in parts else "attention"
                parts[part] += 2.0 * layers * (each.elements - each.vectors) * share
        if op.core is not None:
            core += layers * op.core.flops(model, sequence)
    projections = parts.pop("attention")
    return Flops(
        attention_projections=projections,
        attention_core=core,
        head=2.0 * model.vocabulary * model.hidden * (1 + model.mtp_layers),
        mtp_projections=2.0 * count(model).mtp_projections,
        **parts,
    )


def of_step(job: Job) -> float:
    """Model FLOPs of a step: three forward passes of every token."""
    return 3 * forward(job.model, job.sequence).total * job.tokens
