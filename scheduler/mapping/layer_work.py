"""The computation of a layer on one GPU, forward and backward, µs: a fold over its operations
(mapping/layer_table.py).

T: tokens that a tensor-parallel group shares (micro_batch · sequence / cp), t = T/tp: tokens of one
rank between the sharded parts. A product of T rows takes 2·T·inner·columns FLOPs forward; backward
one such product for its input's gradient and one for its weight's, which adds to a main gradient in
FP32. Everything between products is bound by memory: bytes read and written, BF16. Rows go into the
order of experts and back, and where a rank has several experts once more, as rows arrive by sender.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from commlayer.profiles.errors import InternalError
from commlayer.scheduler.mapping.compute import TILE, CoreTiles, GpuCompute, MeasuredCompute
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.layer_table import Core, LayerCut, LayerOp, Per, Product, layer_table
from commlayer.scheduler.mapping.model import ModelShape, mean_tiles
from commlayer.scheduler.mapping.parameters import cut_of
from commlayer.scheduler.mapping.recomputation import ways_of
from commlayer.scheduler.mapping.software import MEGATRON, Software

__all__ = ["LayerWork", "TokenArrival", "expert_rows", "head_work", "layer_work", "tokens_of"]

AnyCompute = GpuCompute | MeasuredCompute
_BYTES = 2
_LOGIT_PASSES = 4 + 4 + 2
"""Bytes per logit forward: FP32 maximum and sum, and BF16 logits written; backward the same."""


class TokenArrival(NamedTuple):
    """How tokens come that kernels send once to each rank: as so many ``rows`` on a rank, which are
    then read and put into the order of experts. ``is_copied``: a call reads and writes each of them
    once more itself, into this order and into blocks for products in FP8, where a token is once for
    each of its experts on the rank."""

    rows: float
    is_copied: bool


@dataclass(frozen=True, slots=True)
class Times:
    """µs of one segment: forward; backward for the input's gradient and the weight's (0.0 where
    there is none)."""

    forward: float = 0.0
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


_NO_TIMES = Times()
_HIDING = ("projections", "core", "shared")
"""The segments beside whose work an exchange can travel."""


class SegmentOrder:
    """The segments of a layer, exchanges among them, in the order of its forward pass.

    ``kinds``: the part of a step's time as which each counts. ``gathers``: by segment, the exchange
    that travels beside its work. ``around``: those that are not of the routed experts, nor of the
    ways of tokens to them and home.

    Raises InternalError for rows whose exchanges no program of a layer would send.
    """

    def __init__(self, ops: tuple[LayerOp, ...]) -> None:
        for op in ops:
            if op.overlaps not in ("", *_HIDING) or (op.is_routed and op.exchange is not None):
                raise InternalError(
                    f"the exchange {op.name} of a layer would not be sent: expected one beside "
                    f"{', '.join(_HIDING)} or nothing, and none of routed experts"
                )
        self.ops = ops
        self.kinds = {op.name: op.kind for op in reversed(ops)}
        self.gathers = {op.overlaps: op.name for op in ops if op.overlaps}
        self.around = tuple(dict.fromkeys(op.name for op in ops if not op.is_routed))

    def is_remade(self, segment: str, ways: frozenset[str]) -> bool:
        """Whether ways of recomputation but ``full`` compute a segment, or send it, again."""
        return any(op.remade & ways for op in self.ops if op.name == segment)


@lru_cache(maxsize=1 << 14)
def _order_of(model: ModelShape, cut: LayerCut, is_moe: bool) -> SegmentOrder:
    return SegmentOrder(layer_table(model, cut, is_moe))


class LayerWork:
    """The times of a layer's segments, by the names that its operations have for them.

    ``forward``, ``backward``: of all segments, µs; ``weights``: of ``backward``, the products for
    weights' gradients.
    """

    def __init__(self, order: SegmentOrder, times: tuple[Times, ...], norms_us: tuple[float, ...]) -> None:
        """``times`` of each operation; ``norms_us``: of the norm in it."""
        self.order = order
        self._rows = tuple(zip(order.ops, times, norms_us, strict=True))
        self._segments: dict[str, Times] = {}
        for op, each, _ in self._rows:
            known = self._segments.get(op.name)
            self._segments[op.name] = each if known is None else known + each
        self.forward = sum(each.forward for each in times)
        self.backward = sum(each.backward for each in times)
        self.weights = sum(each.weight_gradient for each in times)
        self.attention_weights = self["projections"].weight_gradient + self["out"].weight_gradient
        """The part of ``weights`` that attention's products take, which runs beside a message to
        the next stage."""
        self.beside_us = sum(
            each.forward + each.backward for op, each, _ in self._rows if op.is_routed or op.name == "shared"
        )
        """The time of what may run beside a layer's own exchange of tokens, forward and backward:
        experts, and what is shared."""

    def __getitem__(self, segment: str) -> Times:
        """The times of a segment; none where the layer does not have it."""
        return self._segments.get(segment, _NO_TIMES)

    def remade(self, recompute: str) -> float:
        """The time of what a way of recomputation computes again, µs. ``layernorm``: of the norms
        alone, where they are fused with other work."""
        if recompute == "full":
            return self.forward
        ways = ways_of(recompute)
        return sum(
            times.forward if op.remade & ways else norm_us * ("layernorm" in ways) for op, times, norm_us in self._rows
        )

    def step_us(self, recompute: str) -> float:
        """The time of a forward and a backward pass, µs."""
        return self.forward + self.backward + self.remade(recompute)


def tokens_of(job: Job, setup: Setup) -> tuple[float, float]:
    """T of a tensor-parallel group and t of one rank, per micro-batch."""
    shared = setup.micro_batch * job.sequence / setup.cp
    return shared, shared / setup.tp


def expert_rows(job: Job, setup: Setup) -> float:
    """Rows that a rank's experts compute in a micro-batch (the busiest rank's): its tokens' choices
    times those of the etp ranks with which it shares them. Padded to the capacity where there is
    one, in place of the imbalance."""
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
    software: Software = MEGATRON,
    arrival: TokenArrival | None = None,
) -> LayerWork:
    """The work of one layer for a micro-batch. Cached by what it depends on."""
    micro_batch = _MicroBatch(
        job.model,
        job.sequence,
        setup.micro_batch,
        expert_rows(job, setup),
        setup.precision,
        job.capacity_factor is None,
        arrival,
    )
    return _layer_work(micro_batch, cut_of(setup, software), is_moe, compute)


class _MicroBatch(NamedTuple):
    """The tokens that come to a layer: ``rows`` for a rank's experts, ``is_uneven`` as routing has them."""

    model: ModelShape
    sequence: int
    sequences: int
    rows: float
    precision: str
    is_uneven: bool
    arrival: TokenArrival | None


@lru_cache(maxsize=65536)
def _layer_work(batch: _MicroBatch, cut: LayerCut, is_moe: bool, compute: AnyCompute) -> LayerWork:
    timing = _Timing(batch, cut, compute)
    order = _order_of(batch.model, cut, is_moe)
    around = _around_experts(
        batch._replace(rows=0.0, is_uneven=False, arrival=None), cut._replace(ep=1, etp=1), is_moe, compute
    )
    others = iter(around)
    rows = [timing.row(op) if op.is_routed else next(others) for op in order.ops]
    return LayerWork(order, tuple(times for times, _ in rows), tuple(norm_us for _, norm_us in rows))


@lru_cache(maxsize=1 << 14)
def _around_experts(
    batch: _MicroBatch, cut: LayerCut, is_moe: bool, compute: AnyCompute
) -> tuple[tuple[Times, float], ...]:
    """The times of a layer's operations but for those of the routed experts, on which ep and etp
    have no influence: a search asks for them with some hundred different cuts of the experts."""
    timing = _Timing(batch, cut, compute)
    return tuple(timing.row(op) for op in _order_of(batch.model, cut, is_moe).ops if not op.is_routed)


class _Timing:
    """Times the operations of a layer for one micro-batch."""

    def __init__(self, batch: _MicroBatch, cut: LayerCut, compute: AnyCompute) -> None:
        self.batch, self.cut, self.compute = batch, cut, compute
        self.group_tokens = batch.sequences * batch.sequence / cut.cp
        own = self.group_tokens / cut.tp
        self.rows: dict[Per, float] = {
            "token": own,
            "attention": self.group_tokens if cut.splits_attention else own,
            "ffn": self.group_tokens if cut.splits_ffn else own,
            "row": batch.rows,
        }

    def row(self, op: LayerOp) -> tuple[Times, float]:
        """µs of one operation, by its part of the layers, and of the norm in it."""
        norm_bytes = op.norm * self.rows["token"] * _BYTES
        total = self._reordered(op.reorders) if op.reorders else _NO_TIMES
        for product in op.products:
            total += self._product(product)
        for moves in op.moves:
            rows = self.rows[moves.per]
            total += self._memory(moves.forward * rows, moves.backward * rows)
        if op.core is not None:
            total += self._core(op.core)
        return total * op.part, self.compute.memory_us(norm_bytes) if norm_bytes else 0.0

    def _product(self, product: Product) -> Times:
        precision = "bf16" if product.stays_bf16 else self.batch.precision
        is_routed = product.per == "row"
        casts = product.casts or (product.groups, product.groups)
        rows = self.rows[product.per]
        uneven = is_routed and self.batch.is_uneven
        return _product(
            rows, product.inner, product.columns, precision, self.compute, product.groups, uneven=uneven, casts=casts
        )

    def _core(self, core: Core) -> Times:
        """Causal attention: each token meets half the sequence, or what windows leave of it, the
        mean over the model's layers. Narrow heads are timed by tiles."""
        batch, tiles = self.batch, None
        flops = self.group_tokens * core.flops(batch.model, batch.sequence)
        if core.narrow_heads:
            queries = core.narrow_heads * self.group_tokens / TILE
            tiles = CoreTiles(queries, queries * mean_tiles(batch.model, batch.sequence, TILE))
        return Times(
            self.compute.attention_us(flops, batch.precision, tiles=tiles),
            self.compute.attention_us(core.backward * flops, batch.precision, backward=True, tiles=tiles),
        )

    def _reordered(self, way: str) -> Times:
        """Rows on their way ``in`` the order of experts, or ``out`` of it."""
        batch, hidden = self.batch, self.batch.model.routed_hidden
        rows, arrival, sent = batch.rows * hidden, batch.arrival, batch.rows / self.cut.etp * hidden
        is_padded = batch.is_uneven and batch.precision != "bf16"  # Transformer Engine's Fp8Padding, and Fp8Unpadding
        padded = 2 * rows * is_padded
        if arrival is None:
            local = max(1, batch.model.experts // self.cut.ep)
            # they come by sender, and are wanted by expert
            again = 2 * rows if local * self.cut.etp > 1 else 0.0
            copied = self.rows["token"] * hidden + rows / self.cut.etp + again + padded
        elif arrival.is_copied:
            copied = max(rows - arrival.rows * hidden, 0.0)
        else:
            copied = arrival.rows * hidden + rows + padded
        # backward, gradients of their sum and of its weights
        weighted = sent if arrival is None and way == "out" else 0.0
        return self._memory(copied, copied + weighted)

    def _memory(self, forward: float, backward: float) -> Times:
        """Elements read and written."""
        return Times(self.compute.memory_us(forward * _BYTES), self.compute.memory_us(backward * _BYTES))


def _product(
    rows: float,
    inner: float,
    columns: float,
    precision: str,
    compute: AnyCompute,
    groups: int = 1,
    *,
    uneven: bool = False,
    casts: tuple[int, int] = (1, 1),
) -> Times:
    # the input forward and the output's gradient backward; weights are cast once a step (StepParts)
    cast = [
        compute.cast_us(rows * width, precision, kernels) if kernels else 0.0
        for width, kernels in zip((inner, columns), casts, strict=True)
    ]
    each = rows / groups
    return Times(
        compute.gemm_us(each, inner, columns, precision, groups, uneven=uneven) + cast[0],
        compute.gemm_us(each, columns, inner, precision, groups, uneven=uneven) + cast[1],
        compute.gemm_us(inner, each, columns, precision, groups, accumulates=True),
    )


def head_work(job: Job, setup: Setup, compute: AnyCompute, *, head: bool = True, modules: bool = True) -> Times:
    """The last norm, the head and the loss, for a micro-batch; the vocabulary is split over tp. In
    BF16, as the router: FP8 recipes (Transformer Engine's, MegaScale-MoE's) leave both alone.

    Once more for each module of multi-token prediction, with its two norms and its projection of
    both, that tp splits too.

    ``head``, ``modules``: whether the stage has the one (with the losses of the modules), and the
    others.
    """
    whole, own = tokens_of(job, setup)
    model = job.model
    norm = compute.memory_us(2 * own * model.hidden * _BYTES)
    total = Times()
    if head:
        columns = model.vocabulary / setup.tp
        times = _product(whole, model.hidden, columns, "bf16", compute)
        logits = compute.memory_us(whole * columns * _LOGIT_PASSES)
        total += (times + Times(logits + norm, logits + 2 * norm)) * (1 + model.mtp_layers)
    if modules and model.mtp_layers:
        joined = _product(whole, 2 * model.hidden, model.hidden / setup.tp, setup.precision, compute)
        total += (joined + Times(2 * norm, 4 * norm)) * model.mtp_layers
    return total
