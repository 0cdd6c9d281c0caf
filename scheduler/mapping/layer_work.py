"""The computation of a layer on one GPU, forward and backward, µs: matrix products, attention, and what memory bounds.

T: tokens that a tensor-parallel group shares (micro_batch · sequence / cp), t = T/tp: tokens of one rank between the sharded
parts. A product of T rows takes 2·T·inner·columns FLOPs forward; backward one such product for its input's gradient and one for
its weight's, which adds to a main gradient in FP32. Everything between products is bound by memory: bytes read and written, BF16,
one kernel each where software fuses them (RMSNorm; SwiGLU; rotary embeddings; residual sums; rows in the order of experts and
back, and where a rank has several experts once more, as rows arrive by sender; what experts have beside that, their biases and
clamps, in as many kernels as PyTorch makes of it where software does not fuse it).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import NamedTuple

from commlayer.scheduler.mapping.compute import TILE, CoreTiles, GpuCompute, MeasuredCompute
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.model import ModelShape, head_sizes, linear_flops, mean_positions, mean_tiles
from commlayer.scheduler.mapping.recomputation import modules_of

__all__ = ["LayerWork", "Product", "TokenArrival", "expert_rows", "head_work", "layer_work", "tokens_of"]

AnyCompute = GpuCompute | MeasuredCompute
_BYTES = 2
_NARROW_HEAD = 64
"""Elements of a head up to which attention is timed by its tiles."""
_CLAMPED = 8, 10
"""Elements that limiting both halves of an FFN's first products moves, forward and backward, for each of its width: each half is
read and written, and both are joined (Megatron-Core, fusions/fused_bias_geglu.py, weighted_bias_quick_geglu_impl)."""
_BIASED = 6, 8
"""The same for the bias that experts add to their output, times a token's weight, for each hidden element: a product, a sum, and
all experts' rows joined; backward two products that are summed, over rows and over elements, and the rows joined
(Megatron-Core, transformer/moe/experts.py, TEGroupedMLP._apply_bias, in BF16)."""
_LOGIT_PASSES = 4 + 4 + 2
"""Bytes per logit forward: FP32 maximum and sum, and BF16 logits written; backward the same."""


class TokenArrival(NamedTuple):
    """How tokens come that kernels send once to each rank: as so many ``rows`` on a rank, which are then read and put into the
    order of experts. ``is_copied``: a call reads and writes each of them once more itself, into this order and into blocks for
    products in FP8, where a token is once for each of its experts on the rank."""

    rows: float
    is_copied: bool


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product [rows, inner] × [inner, columns], ``groups`` of them that share the rows.

    ``uneven``: as routing has it. ``casts``: in FP8, the kernels that cast what goes in, and backward the output's gradient; 0:
    another product's kernel does.
    """

    rows: float
    inner: float
    columns: float
    groups: int = 1
    uneven: bool = False
    casts: tuple[int, int] = (1, 1)

    @property
    def flops(self) -> float:
        """Forward: a multiply and an add count 2."""
        return 2.0 * self.rows * self.inner * self.columns


@dataclass(frozen=True, slots=True)
class Times:
    """µs of one segment: forward; backward for the input's gradient and the weight's (0.0 where there is none)."""

    forward: float
    input_gradient: float = 0.0
    weight_gradient: float = 0.0

    @property
    def backward(self) -> float:
        return self.input_gradient + self.weight_gradient

    def __mul__(self, part: float) -> Times:
        return Times(part * self.forward, part * self.input_gradient, part * self.weight_gradient)

    def __add__(self, other: Times) -> Times:
        return Times(
            self.forward + other.forward,
            self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient,
        )


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Segments between which a layer communicates.

    ``norm``: before attention; ``projections``: q, k, v and their rotation; ``core``; ``out``; ``middle``: residual sum and the
    norm before the FFN; ``router``; ``permute``: rows into the order of experts; ``experts`` with their SwiGLU
    (``expert_memory``) and ``expert_biases``, those that are kernels of their own; ``unpermute``:
    the weighted sum of what came home; ``shared``: what all tokens pass through (also a dense layer's FFN). ``forward``,
    ``backward``: of all segments, µs; ``weights``: of ``backward``, the products for weights' gradients. ``up_projections``: of
    ``projections`` forward, latent attention's up, µs.
    """

    norm: Times
    projections: Times
    rotation: Times
    core: Times
    out: Times
    middle: Times
    router: Times
    permute: Times
    experts: Times
    expert_memory: Times
    expert_biases: Times
    unpermute: Times
    shared: Times
    up_projections: float = 0.0
    forward: float = field(init=False)
    backward: float = field(init=False)
    weights: float = field(init=False)

    def __post_init__(self) -> None:
        segments = [getattr(self, name) for name in _SEGMENTS]
        object.__setattr__(self, "forward", sum(each.forward for each in segments))
        object.__setattr__(self, "backward", sum(each.backward for each in segments))
        products = (self.projections, self.out, self.router, self.experts, self.shared)
        object.__setattr__(self, "weights", sum(each.weight_gradient for each in products))

    @property
    def attention_weights(self) -> float:
        """The part of ``weights`` that attention's products take, which runs beside a message to the next stage."""
        return self.projections.weight_gradient + self.out.weight_gradient

    @property
    def beside_us(self) -> float:
        """The time of what may run beside a layer's own exchange of tokens, forward and backward: experts, and what is shared."""
        return sum(each.forward + each.backward for each in self._of_experts)

    @property
    def _of_experts(self) -> tuple[Times, ...]:
        memory = self.expert_memory, self.expert_biases
        return (self.permute, self.experts, *memory, self.unpermute, self.shared)

    def remade(self, recompute: str) -> float:
        """The time of what a way of recomputation computes again, µs. ``selective`` (MegaScale-MoE, A.2): norms, the order of
        experts, SwiGLU."""
        if recompute == "full":
            return self.forward
        if recompute == "selective":
            return self.norm.forward + self.middle.forward + self.expert_memory.forward + self.permute.forward
        modules = modules_of(recompute)
        is_moe = self.router.forward > 0
        times = {
            "core_attn": self.core.forward,
            "layernorm": 2 * self.norm.forward,
            "mla_up_proj": self.up_projections + self.rotation.forward,
            "mlp": 0.0 if is_moe else self.shared.forward,
        }
        if is_moe and "moe" in modules:
            times["moe"] = self.router.forward + sum(each.forward for each in self._of_experts)
        elif is_moe:
            times |= {"moe_act": self.expert_memory.forward, "shared_experts": self.shared.forward}
        return sum(us for module, us in times.items() if module in modules)

    def step_us(self, recompute: str) -> float:
        """The time of a forward and a backward pass, µs."""
        return self.forward + self.backward + self.remade(recompute)


_SEGMENTS = tuple(each.name for each in fields(LayerWork) if each.type == "Times")


def tokens_of(job: Job, setup: Setup) -> tuple[float, float]:
    """T of a tensor-parallel group and t of one rank, per micro-batch."""
    shared = setup.micro_batch * job.sequence / setup.cp
    return shared, shared / setup.tp


def expert_rows(job: Job, setup: Setup) -> float:
    """Rows that a rank's experts compute in a micro-batch (the busiest rank's): its tokens' choices times those of the etp ranks
    with which it shares them. Padded to the capacity where there is one, in place of the imbalance."""
    _, own = tokens_of(job, setup)
    spread = min(job.imbalance, setup.ep)  # all rows on one rank is ep times the mean
    if job.capacity_factor is not None:
        spread = job.capacity_factor
    return own * job.model.top_k * spread * setup.etp


def layer_work(
    job: Job,
    setup: Setup,
    compute: AnyCompute,
    is_moe: bool = True,
    splits_shared: bool = True,
    fuses_experts: bool = False,
    arrival: TokenArrival | None = None,
) -> LayerWork:
    """The work of one layer for a micro-batch. Cached by what it depends on.

    ``splits_shared``: tp splits shared experts and dense FFNs; else each rank has them whole, for its own tokens.
    ``fuses_experts``: experts' activation function, biases and clamps are part of their products
    (:class:`commlayer.scheduler.mapping.software.Software`). ``arrival``: of rows by kernels that send a token once
    to each rank; None: tokens go by all_to_all, which wants them by rank.
    """
    key = _Key(
        job.model,
        job.sequence,
        expert_rows(job, setup),
        (setup.tp, setup.cp, setup.ep, setup.etp, setup.micro_batch),
        setup.attention == "tensor",
        splits_shared,
        setup.precision,
        is_moe,
        job.capacity_factor is None,
        fuses_experts,
        arrival,
    )
    return _layer_work(key, compute)


class _Key(NamedTuple):
    model: ModelShape
    sequence: int
    rows: float
    degrees: tuple[int, int, int, int, int]
    splits_attention: bool
    splits_shared: bool
    precision: str
    is_moe: bool
    uneven: bool
    fuses_experts: bool
    arrival: TokenArrival | None


@lru_cache(maxsize=65536)
def _layer_work(key: _Key, compute: AnyCompute) -> LayerWork:
    model, rows, precision = key.model, key.rows, key.precision
    tp, cp, ep, etp, micro_batch = key.degrees
    whole = micro_batch * key.sequence / cp
    own = whole / tp
    split, at = (tp, whole) if key.splits_attention else (1, own)
    hidden, tokens = model.hidden, own * model.hidden
    router = permute = unpermute = experts = expert_memory = expert_biases = Times(0.0)
    if key.is_moe:
        local, width, sent = max(1, model.experts // ep), model.width / etp, rows / etp * hidden
        copied = _copied(key, tokens, rows * hidden, local, etp)
        router = _products([Product(own, hidden, model.experts)], "bf16", compute)
        weighted = sent if key.arrival is None else 0.0  # backward, gradients of their sum and of its weights
        permute, unpermute = _memory(copied, copied, compute), _memory(copied, copied + weighted, compute)
        experts, expert_memory = _ffn(model, rows, width, local, precision, compute, key.uneven, key.fuses_experts)
        if not key.fuses_experts:
            if model.clamps:
                expert_memory += _memory(_CLAMPED[0] * rows * width, _CLAMPED[1] * rows * width, compute)
            if model.expert_vectors:
                expert_biases = _memory(_BIASED[0] * rows * hidden, _BIASED[1] * rows * hidden, compute)
    shared_width = model.shared_width if key.is_moe else model.dense_width
    shared = Times(0.0)
    if shared_width:
        parts, rows_of_shared = (tp, whole) if key.splits_shared else (1, own)
        products, memory = _ffn(model, rows_of_shared, shared_width / parts, 1, precision, compute)
        shared = products + memory
    attention = _attention(key, at, split, whole, compute)
    return LayerWork(
        norm=_memory(2 * tokens, 4 * tokens, compute),
        projections=attention.projections,
        rotation=attention.rotation,
        core=attention.core,
        out=attention.out,
        middle=_memory(5 * tokens, 6 * tokens, compute) + _memory(3 * tokens, 2 * tokens, compute),
        router=router,
        permute=permute,
        experts=experts,
        expert_memory=expert_memory,
        expert_biases=expert_biases,
        unpermute=unpermute,
        shared=shared,
        up_projections=_products(_projections(model, at, split)[1:], precision, compute).forward
        if model.latent
        else 0.0,
    )


def _copied(key: _Key, tokens: float, rows: float, local: int, etp: int) -> float:
    """Elements that are read and written for the order of experts, each way: of ``tokens`` and experts' ``rows``, in elements."""
    if key.arrival is not None:
        received = key.arrival.rows * key.model.hidden
        if key.arrival.is_copied:
            return max(rows - received, 0.0)
        copied = received + rows
    else:
        copied = (
            tokens + rows / etp + (2 * rows if local * etp > 1 else 0.0)
        )  # they come by sender, and are wanted by expert
    is_padded = key.uneven and key.precision != "bf16"  # Transformer Engine's Fp8Padding, and Fp8Unpadding
    return copied + 2 * rows * is_padded


class _Attention(NamedTuple):
    projections: Times
    rotation: Times
    core: Times
    out: Times


def _attention(key: _Key, rows: float, split: int, whole: float, compute: AnyCompute) -> _Attention:
    """The segments of a layer's attention; where the model has two kinds of it, their mean over its layers."""
    model, precision, tp, linear = key.model, key.precision, key.degrees[0], key.model.linear
    rotated = 2 * _rotated(model) * rows / split
    found = _Attention(
        _products(_projections(model, rows, split), precision, compute),
        _memory(rotated, rotated, compute),
        _core(model, key.sequence, whole, tp, precision, compute),
        _products([Product(rows, model.heads * head_sizes(model)[2] / split, model.hidden)], precision, compute),
    )
    if linear is None:
        return found
    keys, values = linear.key_heads * linear.key_dim / split, linear.value_heads * linear.value_dim / split
    gated = rows * (2 * keys + 3 * values)  # what goes into the core, its output, and the gate's product with that
    flops = whole / tp * linear_flops(linear)
    other = _Attention(
        _products([Product(rows, model.hidden, 2 * keys + 2 * values)], precision, compute),
        _memory(gated, 2 * gated, compute),
        Times(compute.attention_us(flops, precision), compute.attention_us(2 * flops, precision, backward=True)),
        _products([Product(rows, values, model.hidden)], precision, compute),
    )
    part = linear.layers / model.layers
    return _Attention(*(a * (1 - part) + b * part for a, b in zip(found, other, strict=True)))


def _ffn(
    model: ModelShape,
    rows: float,
    width: float,
    groups: int,
    precision: str,
    compute: AnyCompute,
    uneven: bool = False,
    fuses: bool = False,
) -> tuple[Times, Times]:
    """Products of an FFN of that inner width, and its activation function between them.

    ``fuses``, in FP8: rows of all groups are cast by one kernel, and the first products hand on what the last ones read, as these
    do backward (Transformer Engine, ops/fused/grouped_mlp.py): the activation function then takes no time of its own.
    """
    fuses = fuses and precision != "bf16"
    inner = (model.matrices - 1) * width
    first_casts, last_casts = ((1, 0), (0, 1)) if fuses else ((groups, groups), (groups, groups))
    first = Product(rows, model.hidden, inner, groups, uneven, first_casts)
    last = Product(rows, width, model.hidden, groups, uneven, last_casts)
    products = _products([first, last], precision, compute)
    if fuses:
        return products, Times(0.0)
    return products, _memory(model.matrices * rows * width, (2 * model.matrices - 1) * rows * width, compute)


def _memory(forward: float, backward: float, compute: AnyCompute) -> Times:
    """Elements read and written."""
    return Times(compute.memory_us(forward * _BYTES), compute.memory_us(backward * _BYTES))


def _products(wanted: Iterable[Product], precision: str, compute: AnyCompute) -> Times:
    return sum((_product(each, precision, compute) for each in wanted), Times(0.0))


def head_work(job: Job, setup: Setup, compute: AnyCompute, *, head: bool = True, modules: bool = True) -> Times:
    """The last norm, the head and the loss, for a micro-batch; the vocabulary is split over tp. In BF16, as the router: FP8
    recipes (Transformer Engine's, MegaScale-MoE's) leave both alone.

    Once more for each module of multi-token prediction, with its two norms and its projection of both, that tp splits too.

    ``head``, ``modules``: whether the stage has the one (with the losses of the modules), and the others.
    """
    whole, own = tokens_of(job, setup)
    model = job.model
    norm = compute.memory_us(2 * own * model.hidden * _BYTES)
    total = Times(0.0)
    if head:
        columns = model.vocabulary / setup.tp
        times = _product(Product(whole, model.hidden, columns), "bf16", compute)
        logits = compute.memory_us(whole * columns * _LOGIT_PASSES)
        total += (times + Times(logits + norm, logits + 2 * norm)) * (1 + model.mtp_layers)
    if modules and model.mtp_layers:
        joined = _product(Product(whole, 2 * model.hidden, model.hidden / setup.tp), setup.precision, compute)
        total += (joined + Times(2 * norm, 4 * norm)) * model.mtp_layers
    return total


def _product(product: Product, precision: str, compute: AnyCompute) -> Times:
    rows, inner, columns, groups = product.rows / product.groups, product.inner, product.columns, product.groups
    # the input forward and the output's gradient backward; weights are cast once a step (Estimator)
    cast = [
        compute.cast_us(product.rows * width, precision, kernels) if kernels else 0.0
        for width, kernels in zip((inner, columns), product.casts, strict=True)
    ]
    uneven = product.uneven
    return Times(
        compute.gemm_us(rows, inner, columns, precision, groups, uneven=uneven) + cast[0],
        compute.gemm_us(rows, columns, inner, precision, groups, uneven=uneven) + cast[1],
        compute.gemm_us(inner, rows, columns, precision, groups, accumulates=True),
    )


def _core(model: ModelShape, sequence: int, tokens: float, tp: int, precision: str, compute: AnyCompute) -> Times:
    """Causal attention: each token meets half the sequence, or what windows leave of it, the mean over the model's layers.
    Backward takes 2.5 times the FLOPs: scores are made again (Dao 2022). Narrow heads are timed by tiles."""
    heads, tiles = model.heads / tp, None
    flops = 2.0 * tokens * mean_positions(model, sequence) * head_sizes(model)[1] * heads
    if model.latent is None and model.head_dim <= _NARROW_HEAD:
        queries = heads * tokens / TILE
        tiles = CoreTiles(queries, queries * mean_tiles(model, sequence, TILE))
    return Times(
        compute.attention_us(flops, precision, tiles=tiles),
        compute.attention_us(2.5 * flops, precision, backward=True, tiles=tiles),
    )


def _projections(model: ModelShape, rows: float, split: int) -> list[Product]:
    latent = model.latent
    if latent is None:
        keys = max(model.kv_heads / split, 1.0)  # fewer key-value heads than ranks: each has one
        queries = model.heads * (1 + model.gated_attention) / split
        return [Product(rows, model.hidden, (queries + 2 * keys) * model.head_dim)]
    query = model.heads * head_sizes(model)[0] / split
    down = [Product(rows, model.hidden, latent.kv_rank + latent.rope_dim + latent.q_rank)]
    up = [Product(rows, latent.q_rank or model.hidden, query)]
    return [*down, *up, Product(rows, latent.kv_rank, model.heads * (latent.nope_dim + latent.value_dim) / split)]


def _rotated(model: ModelShape) -> float:
    """Elements per token that rotary embeddings read, and write."""
    if model.latent is not None:
        return model.latent.rope_dim * (model.heads + 1)
    return model.head_dim * (model.heads + model.kv_heads)
