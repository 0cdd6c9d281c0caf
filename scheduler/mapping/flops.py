"""FLOPs of a model, per token: what MFU counts. A multiply-add is two.

Model FLOPs are those of the forward pass three times (forward, and backward for inputs and for weights), whatever is computed
again or dropped: recomputation, padding to a capacity and uneven routing are costs of a run, not work of the model
(PaLM, arXiv:2204.02311, appendix B). docs/counting.md has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping.job import Job
from commlayer.scheduler.mapping.model import ModelShape, head_sizes
from commlayer.scheduler.mapping.parameters import layer_of

__all__ = ["Flops", "forward", "mfu", "of_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """FLOPs of one token's forward pass, each the sum over the layers. ``attention_core``: QKᵀ and PV, causal."""

    attention_projections: float
    attention_core: float
    router: float
    experts: float
    shared: float
    dense_ffn: float
    head: float

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
        )


@lru_cache(maxsize=1024)
def forward(model: ModelShape, sequence: int) -> Flops:
    """A token's forward pass in a sequence of ``sequence`` tokens.

    A matrix costs two FLOPs per element; the embedding is a look-up and costs none, norms and activations are not counted. Of the
    attention's scores causal masking leaves (s + 1) / 2 a token on average: taken is s / 2, the half of what is without it.
    """
    one, sparse = layer_of(model), model.moe_layers
    bias = (model.heads + 2 * model.kv_heads) * model.head_dim if model.qkv_bias and model.latent is None else 0
    return Flops(
        attention_projections=2.0 * model.layers * (one.attention - bias),
        # of a head's key and its value: 2 products · 2 FLOPs · s / 2 positions leave s of each element
        attention_core=float(model.layers * sequence * model.heads * head_sizes(model)[1]),
        router=2.0 * sparse * one.router,
        experts=2.0 * sparse * one.experts * model.top_k / model.experts,
        shared=2.0 * sparse * one.shared,
        dense_ffn=2.0 * model.dense_layers * one.dense_ffn,
        head=2.0 * model.vocabulary * model.hidden,
    )


def of_step(job: Job) -> float:
    """Model FLOPs of a step: three forward passes of every token."""
    return 3 * forward(job.model, job.sequence).total * job.tokens


def mfu(job: Job, step_us: float, peak_tflops: float) -> float:
    """Model FLOPs over what ``job.gpus`` GPUs of ``peak_tflops`` could do in ``step_us``.

    Raises UsageError where either is not positive.
    """
    if step_us <= 0 or peak_tflops <= 0:
        raise UsageError(f"mfu: expected a positive step_us and peak_tflops, got {step_us!r} and {peak_tflops!r}")
    return of_step(job) / (step_us * job.gpus * peak_tflops * 1e6)  # µs · 1e12 FLOP/s = 1e6
