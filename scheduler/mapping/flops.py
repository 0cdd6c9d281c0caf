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
from commlayer.scheduler.mapping.model import ModelShape, head_sizes, linear_flops, mean_positions
from commlayer.scheduler.mapping.parameters import count, layer_of

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

    A matrix costs two FLOPs per element; the embedding is a look-up and costs none, norms and activations are not counted.
    Windows count (:func:`~commlayer.scheduler.mapping.model.mean_positions`), and linear attention
    (:func:`~commlayer.scheduler.mapping.model.linear_flops`), and every module of multi-token prediction, with a head of its own
    (as Megatron-LM counts them).
    """
    one, extra, counted = layer_of(model), model.mtp_layers, count(model)
    sparse = counted.experts // one.experts if one.experts else 0
    core = (model.softmax_layers + extra) * 2 * mean_positions(model, sequence) * model.heads * head_sizes(model)[1]
    if model.linear is not None:
        core += model.linear.layers * linear_flops(model.linear)
    return Flops(
        attention_projections=2.0 * (counted.attention - _biases(model)),
        attention_core=float(core),
        router=2.0 * sparse * model.experts * model.hidden,
        experts=2.0 * sparse * model.top_k * (one.experts // model.experts - model.expert_vectors),
        shared=2.0 * sparse * one.shared,
        dense_ffn=2.0 * counted.dense_ffn,
        head=2.0 * model.vocabulary * model.hidden * (1 + extra),
        mtp_projections=2.0 * counted.mtp_projections,
    )


def _biases(model: ModelShape) -> int:
    """Elements of all biases of queries, keys and values."""
    if not model.qkv_bias or model.latent is not None:
        return 0
    queries = model.heads * (1 + model.gated_attention)
    return (model.softmax_layers + model.mtp_layers) * (queries + 2 * model.kv_heads) * model.head_dim


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
