"""Bytes of the fullest GPU: weights, gradients, optimizer state, activations and the largest temporary tensors.

Mixed precision as Megatron-Core has it: BF16 weights, gradients summed in FP32 (or BF16), Adam with FP32 weights and two
moments, in FP32 or less. With a recipe of FP8 (:mod:`commlayer.scheduler.mapping.precisions`) the operands of products are kept
in FP8, one copy of each, and weights have FP8 copies beside them, or in place of them.

Activations are those of flash attention, a fused SwiGLU that applies the gating weights, and permuted tokens; MegaScale-MoE's
appendix A.2 (``LayerShape`` in tests/paper_activations.py) is the special case of heads · head_dim = hidden and no shared
expert. docs/counting.md derives every formula and the table of ZeRO.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping import parameters
from commlayer.scheduler.mapping.hardware import Gpu
from commlayer.scheduler.mapping.job import Attention, Job, Setup
from commlayer.scheduler.mapping.model import ModelShape, head_sizes, kv_heads_needed, layer_kinds
from commlayer.scheduler.mapping.offloading import KEPT, Offload, offloaded_modules
from commlayer.scheduler.mapping.pipeline_layout import EVEN_LAYOUT
from commlayer.scheduler.mapping.pipeline_schedule import in_flight_by_chunk, in_flight_chunks, is_dual
from commlayer.scheduler.mapping.precisions import Recipe, recipe_of
from commlayer.scheduler.mapping.recomputation import Recompute, modules_of
from commlayer.scheduler.mapping.result import Memory
from commlayer.scheduler.mapping.software import MEGATRON, Software, splits_ffn

__all__ = [
    "LayerElements",
    "Room",
    "estimate",
    "have_room",
    "in_flight",
    "kept_elements",
    "offloaded_elements",
    "offloaded_layer_bytes",
    "rooms",
    "state_bytes_per_parameter",
]

_WEIGHT = 2  # bytes of a BF16 weight or activation
_LOGIT = 6  # BF16 logits, and their FP32 copy that the loss keeps
_LAYERS_AHEAD = 2
"""The layers whose offloaded activations are on the GPU all the same: that which computes, and its neighbour, whose copies are
under way."""


class LayerElements(NamedTuple):
    """Elements that one layer keeps for its backward pass.

    ``attention``, ``dense`` (a dense FFN) and ``shared``: per token of a rank's share. ``row``: per row of an expert, of the
    rank's part of its width.
    """

    attention: float
    dense: float
    shared: float
    row: float


@lru_cache(maxsize=1024)
def kept_elements(
    model: ModelShape,
    recompute: Recompute,
    attention: Attention,
    tp: int,
    etp: int,
    operand: float = 1.0,
    gated: float = 1.0,
    output_kept: float = 0.0,
) -> LayerElements:
    """Count what a layer keeps. A rank's share are a sample's tokens over tp · cp; an FFN under tp has tp times as many,
    narrower.

    ``none``: a layer's input, its norm, queries, keys and values, the attention's output (twice under ``ulysses``, before and
    after its all_to_all), the second norm's input and output; an expert's input, the products of its first matrices, and what
    goes into the last. ``selective`` (MegaScale-MoE, A.2): input, queries, keys, values, attention's output, the second norm's
    input, the products of an expert's first matrices. ``full``: a layer's input alone (Megatron). Modules: as ``none`` without
    what they compute again (:mod:`commlayer.scheduler.mapping.recomputation`).

    ``operand``: what is kept of an element that goes into a product, in BF16 elements: 1, or in FP8 a half and its scales. There
    attention's output and the second norm's are kept in both, for others need them in BF16 (attention; the router). ``gated``:
    the same of what goes into a gated activation function. ``output_kept``: the same of attention's output, where one copy is
    enough; 0: it is not.
    """
    if recompute == "full":
        return LayerElements(model.hidden, 0, 0, 0)
    first: float = model.matrices - 1  # products of the first matrices: gate and up, or one
    if model.gated:
        first *= gated
    latent = model.latent
    query, keys_values, output = _attention_elements(model, tp)
    cast = operand if operand < 1 else 0.0  # a copy beside what is kept in BF16
    # of latent attention before the norms, and after them, where the projections up do not make them again: their layers have
    # the norms in them (Transformer Engine's; DeepSeek-V3, section 3.2.3: all norms are made again)
    down = (1 + operand) * (latent.q_rank + latent.kv_rank) + latent.rope_dim if latent else 0.0
    if latent and "mla_up_proj" in modules_of(recompute):
        down -= operand * (latent.q_rank + latent.kv_rank)
    if recompute == "selective":
        kept = 2 * model.hidden + query + keys_values + output
        return LayerElements(kept, first * model.dense_width, first * model.shared_width, first * model.width / etp)
    twice = 2 if attention == "ulysses" else 1
    modules = modules_of(recompute)
    norms = 0.0 if "layernorm" in modules else (1 + operand) * model.hidden
    expanded = 0.0 if "mla_up_proj" in modules else query + keys_values
    activated = 0.0 if "moe_act" in modules else operand
    into_shared = cast * model.hidden if model.shared_width and norms else 0.0
    into_dense = (operand - 1) * model.hidden if norms else 0.0  # no router needs it in BF16 there
    is_moe_kept, is_shared_kept = "moe" not in modules, not modules & {"moe", "shared_experts"}
    return LayerElements(
        attention=2 * model.hidden + norms + expanded + down + (twice * output_kept or twice + cast) * output,
        dense=into_dense + (first + operand) * model.dense_width if "mlp" not in modules else 0.0,
        shared=into_shared + (first + operand) * model.shared_width if is_shared_kept else 0.0,
        row=operand * model.hidden + (first + activated) * model.width / etp if is_moe_kept else 0.0,
    )


def _attention_elements(model: ModelShape, tp: int) -> tuple[float, float, float]:
    """Elements per token that attention works on: queries (and a gate), keys with values, outputs; the mean over a model's
    kinds of attention. A window of attention changes none of them: scores are never kept."""
    kv_heads = model.heads if model.latent else max(model.kv_heads, tp)  # tp ranks hold at least one head each
    heads = (model.heads * (1 + model.gated_attention), kv_heads, model.heads)
    query, keys_values, output = (number * size for number, size in zip(heads, head_sizes(model), strict=True))
    linear = model.linear
    if linear is None:
        return query, keys_values, output
    keys, values, part = (
        linear.key_heads * linear.key_dim,
        linear.value_heads * linear.value_dim,
        linear.layers / model.layers,
    )
    softmax = 1 - part
    return (
        query * softmax + (keys + values) * part,
        keys_values * softmax + (keys + values) * part,
        output * softmax + values * part,
    )


@lru_cache(maxsize=1024)
def offloaded_elements(
    model: ModelShape,
    offload: Offload,
    recompute: Recompute,
    attention: Attention,
    tp: int,
    etp: int,
    operand: float = 1.0,
    gated: float = 1.0,
    original: float = 1.0,
    output_kept: float = 0.0,
) -> tuple[LayerElements, LayerElements]:
    """Count what of :func:`kept_elements` leaves the GPU, and what crosses to the host for it, of a layer with experts (a dense
    one has ``attention`` alone: its second norm and its FFN are no modules of these).

    More crosses than leaves where two modules keep one tensor (attention's output crosses for both, and leaves with the second),
    and where it is computed again as well. ``operand``, ``gated``, ``output_kept``: as there. ``original``: what crosses of an
    element that goes into the experts' first product, in BF16 elements: Megatron-Core keeps it in BF16 for that, but with MXFP8.
    """
    modules = offloaded_modules(offload)
    query, keys_values, output = _attention_elements(model, tp)
    remade, is_selective = modules_of(recompute), recompute == "selective"
    latent, hidden = model.latent, model.hidden
    is_cast, copies = operand < 1 and not is_selective, 2 if attention == "ulysses" and not is_selective else 1
    norm = 0.0 if is_selective or "layernorm" in remade else operand * hidden
    down = (1 + operand) * (latent.q_rank + latent.kv_rank) + latent.rope_dim if latent else 0.0
    left = 0.0 if is_selective else down  # of what is projected down
    if latent and "mla_up_proj" in remade:
        left -= operand * (latent.q_rank + latent.kv_rank)
    expanded = 0.0 if "mla_up_proj" in remade else query + keys_values
    fused = 0.0 if latent else hidden
    one_copy = output_kept or 1.0
    # of attention, that the projection behind it keeps beside attention itself
    own_output = (copies - 1) * one_copy + (0.0 if output_kept else operand * is_cast)
    is_let_go = own_output > 0 or "attn_proj" in modules
    first = (model.matrices - 1) * (gated if model.gated else 1.0) * model.width / etp
    parts = {  # what leaves, and what crosses, for each token
        "attn_norm": (hidden - fused, hidden - fused),
        "qkv_linear": (norm + fused + left, operand * hidden + fused + down),
        "core_attn": (expanded + output * one_copy * is_let_go, query + keys_values + output * one_copy),
        "attn_proj": (output * own_output, output * max(own_output, output_kept or operand)),
        "mlp_norm": (hidden, hidden),
        "expert_fc1": (0.0, 0.0) if is_selective else (operand * hidden, original * hidden),
        "moe_act": (first, first),
    }

    def counted(side: int) -> LayerElements:
        found = {module: parts[module][side] for module in modules}
        shared, row = found.pop("mlp_norm", 0.0), found.pop("expert_fc1", 0.0) + found.pop("moe_act", 0.0)
        return LayerElements(attention=sum(found.values()), dense=0.0, shared=shared, row=row)

    return counted(0), counted(1)


def in_flight(setup: Setup, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations ``stage`` holds at once, at most, each through all chunks of the stage
    (:func:`~commlayer.scheduler.mapping.pipeline_schedule.in_flight_chunks`).

    1F1B: pp - stage. Interleaved (Narayanan 2021, arXiv:2104.04473; the warm-up of Megatron-Core), for stage 0
    pp · (1 + (pp - 1) / (pp · vpp)).
    """
    chunks = in_flight_chunks(setup.schedule, setup.pp, stage, micro_batches, setup.vpp)
    return chunks / setup.chunks_per_rank


def state_bytes_per_parameter(
    zero: int, replicas: float, gradient_bytes: int, adam_bytes: float = 12
) -> tuple[float, float, float]:
    """Bytes of weight, gradient and optimizer state that each of ``replicas`` GPUs keeps of a parameter, by ZeRO stage.

    ``adam_bytes``: of a main weight and two moments; 12: all in FP32.
    """
    return (
        _WEIGHT / replicas if zero >= 3 else _WEIGHT,
        gradient_bytes / replicas if zero >= 2 else gradient_bytes,
        adam_bytes / replicas if zero >= 1 else adam_bytes,
    )


def estimate(
    job: Job, setup: Setup, gradient_bytes: int = 4, *, software: Software = MEGATRON, gpu: Gpu | None = None
) -> Memory:
    """Bytes of the fullest GPU in a step of ``job`` by ``setup``.

    Args:
        gradient_bytes: of an element in the sums of gradients.
        software: whether tp splits embedding, head and FFNs; whether ZeRO shards what all tp ranks have over these too; whether
            context parallelism gathers keys and values or passes them on; and whether what was gathered is kept for the backward
            pass, or gathered again; in what formats the optimizer's state is, and how much of it lies in the host's memory.
        gpu: which decides how many copies a recipe of FP8 needs; None: weights and operands are counted in BF16.

    Raises:
        UsageError: degrees that do not divide the model (:func:`~commlayer.scheduler.mapping.parameters.check`), or
            ``gradient_bytes`` other than 2 or 4.
        GroupError: the batch does not split over dp and micro-batches.
    """
    counting = _Counting(job, setup, gradient_bytes, software, gpu)
    every = parameters.held(job.model, setup, software)
    if is_dual(setup.schedule) and setup.pipeline_layout != EVEN_LAYOUT:
        # of ranks with as many layers the first is not the fullest where its chunk with more micro-batches has fewer layers
        every = _of_ranks(job.model, setup, every)
    return max(map(counting.of, every), key=lambda found: found.total)


class Room(NamedTuple):
    """The memory of a pipeline rank, in bytes: what is left of it (below zero: what it lacks), what one layer more takes, as the
    mean of the rank's chunks keeps its activations, and what a layer keeps of one micro-batch."""

    left: float
    layer: float
    kept: float


def rooms(
    job: Job,
    setup: Setup,
    limit: float,
    gradient_bytes: int = 4,
    *,
    software: Software = MEGATRON,
    gpu: Gpu | None = None,
) -> list[Room]:
    """The room of each pipeline rank in ``limit`` bytes, where the layout of ``setup`` is spelt out; by layers that have experts,
    where the rank has any. Other arguments and errors as :func:`estimate`."""
    counting = _Counting(job, setup, gradient_bytes, software, gpu)
    stages = parameters.held(job.model, setup, software)
    ranks = _of_ranks(job.model, setup, stages)
    return [Room(limit - counting.of(held).total, *counting.layer_bytes(held)) for held in ranks]


def _of_ranks(
    model: ModelShape, setup: Setup, every: tuple[parameters.StageElements, ...]
) -> tuple[parameters.StageElements, ...]:
    """The elements that each pipeline rank holds, taken from those of each kind of stage."""
    places = parameters.stage_of_ranks(model, setup.pp, setup.vpp, setup.schedule, setup.pipeline_layout)
    return tuple(
        every[place]._replace(stage=every[place].stage._replace(number=rank)) for rank, place in enumerate(places)
    )


def have_room(
    job: Job,
    setup: Setup,
    limit: float,
    gradient_bytes: int = 4,
    *,
    software: Software = MEGATRON,
    gpu: Gpu | None = None,
) -> bool:
    """Whether ``limit`` bytes of each GPU may have room for the model's layers, however they are laid on a pipeline's ranks: for
    those of either kind, if there were no others. Other arguments and errors as :func:`estimate`."""
    counting = _Counting(job, setup, gradient_bytes, software, gpu)
    ranks, kinds = range(setup.pp // setup.copies), layer_kinds(job.model)
    return all(
        sum(counting.most_layers(rank, is_moe, limit) for rank in ranks) >= kinds.count(is_moe) for is_moe in set(kinds)
    )


class _Counting:
    """The bytes of a GPU of any stage. Raises as :func:`estimate`."""

    def __init__(self, job: Job, setup: Setup, gradient_bytes: int, software: Software, gpu: Gpu | None) -> None:
        if gradient_bytes not in (2, 4):
            raise UsageError(f"gradient_bytes: expected 2 (BF16) or 4 (FP32), got {gradient_bytes!r}")
        self.setup, self.gradient_bytes = setup, gradient_bytes
        self.micro_batches = setup.micro_batches(job)
        recipe = None if gpu is None else recipe_of(setup.precision, gpu)
        self.sizes = _sizes(job, setup, software, recipe)
        self.over = parameters.replicas(setup, software)
        adam = software.adam_bytes * (1 - software.offloaded_optimizer)
        self.per = [state_bytes_per_parameter(setup.zero, number, gradient_bytes, adam) for number in self.over]
        self.layers = parameters.layer_elements(job.model, setup, software)
        self.copies = 0.0
        """Bytes of the FP8 copies of a weight, less what is not kept beside them."""
        if recipe is not None and gpu is not None and setup.zero < 3:
            self.copies = recipe.copies(gpu) * recipe.copy_bytes() - (_WEIGHT if software.keeps_fp8_weights else 0)

    def of(self, held: parameters.StageElements) -> Memory:
        """A GPU of this stage."""
        setup, sizes, stage = self.setup, self.sizes, held.stage
        weights, gradients, optimizer = self._state(held.elements)
        weights += self.copies * held.multiplied
        under_way = self._under_way(held)
        activations = self._over_chunks(held, sizes.sparse, sizes.dense)
        if setup.has_head(stage.number):
            activations += sizes.logits
        if setup.has_modules(stage.number):
            activations += sizes.modules * under_way[setup.chunk_of_modules(stage.number)]
        tasks = 2 if setup.is_merged else 1  # both have a layer under way
        buffers, away = sizes.working * tasks, 0.0
        if setup.offload != KEPT:
            there = sizes.offloaded
            left = self._over_chunks(held, there.sparse_left, there.dense_left)
            mean = (stage.sparse * there.sparse_left + stage.dense * there.dense_left) / max(stage.layers, 1)
            activations -= left
            buffers += min(left, _LAYERS_AHEAD * tasks * mean)
            away = self._over_chunks(held, there.sparse_crosses, there.dense_crosses)
        if setup.zero >= 2:
            buffers += _absent(held, self.over) * (self.gradient_bytes + (_WEIGHT if setup.zero >= 3 else 0))
        return Memory(
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            activations=activations,
            buffers=buffers,
            offloaded=away,
        )

    def _under_way(self, held: parameters.StageElements) -> tuple[float, ...]:
        setup = self.setup
        return in_flight_by_chunk(setup.schedule, setup.pp, held.stage.number, self.micro_batches, setup.vpp)

    def _over_chunks(self, held: parameters.StageElements, sparse: float, dense: float) -> float:
        """The bytes of all layers of a stage, each as often as micro-batches are under way in its chunk."""
        found = sum(
            number * (with_experts * sparse + without * dense)
            for number, (with_experts, without) in zip(self._under_way(held), held.chunks, strict=True)
        )
        stage = held.stage
        if self.setup.schedule == "1f1b-overlap" and stage.layers:
            # a layer of a forward task is there before one of the backward task is freed
            found += (stage.sparse * sparse + stage.dense * dense) / stage.layers
        return found

    def layer_bytes(self, held: parameters.StageElements) -> tuple[float, float]:
        """The bytes of one layer more of the stage, its activations as the mean of its chunks has them, and these of one
        micro-batch."""
        under_way = in_flight(self.setup, held.stage.number, self.micro_batches)
        sizes = self.sizes
        kept = (
            sizes.sparse - sizes.offloaded.sparse_left
            if held.stage.sparse
            else sizes.dense - sizes.offloaded.dense_left
        )
        return sum(self._state(held.layer)) + self.copies * held.multiplied_layer + kept * under_way, kept

    def most_layers(self, rank: int, is_moe: bool, limit: float) -> int:
        """Layers of one kind that a rank has room for at most: with DualPipe and its V in the chunk with fewest micro-batches,
        else in all chunks alike, as even and balanced layouts have them."""
        setup, sizes = self.setup, self.sizes
        under_way = in_flight(setup, rank, self.micro_batches)
        if is_dual(setup.schedule):
            under_way = min(in_flight_by_chunk(setup.schedule, setup.pp, rank, self.micro_batches, setup.vpp))
        there, (elements, multiplied) = sizes.offloaded, self.layers[is_moe]
        kept = sizes.sparse - there.sparse_left if is_moe else sizes.dense - there.dense_left
        each = sum(self._state(elements)) + self.copies * multiplied + under_way * kept
        left = limit - sizes.working - (sizes.logits if setup.has_head(rank) else 0.0)
        return max(0, math.floor(left / each))

    def _state(self, elements: parameters.Elements) -> list[float]:
        """Weights, gradients and optimizer state of parameters, without FP8 copies."""
        return [
            sum(number * each[state] for number, each in zip(elements, self.per, strict=True)) for state in range(3)
        ]


def offloaded_layer_bytes(
    job: Job, setup: Setup, gpu: Gpu | None = None, *, software: Software = MEGATRON, is_moe: bool = True
) -> float:
    """Bytes that cross to the host for one layer and a micro-batch, and come back for its backward pass."""
    found = _offloaded(job, setup, software, None if gpu is None else recipe_of(setup.precision, gpu))
    return found.sparse_crosses if is_moe else found.dense_crosses


def _absent(held: parameters.StageElements, over: tuple[int, int, int]) -> float:
    """Parameters of one layer that other GPUs keep, and that are here only while they are needed."""
    return sum(elements * (1 - 1 / number) for elements, number in zip(held.layer, over, strict=True))


class _Offloaded(NamedTuple):
    """Bytes that leave the GPU of a layer with experts, or a dense one, and a micro-batch, and those that cross for it."""

    sparse_left: float
    sparse_crosses: float
    dense_left: float
    dense_crosses: float


_NOTHING = _Offloaded(0.0, 0.0, 0.0, 0.0)


def _offloaded(job: Job, setup: Setup, software: Software, recipe: Recipe | None) -> _Offloaded:
    if setup.offload == KEPT:
        return _NOTHING
    tokens, rows = _tokens_and_rows(job, setup)
    operand, gated, output = _formats(software, recipe)
    original = operand if recipe is not None and recipe.megatron == "mxfp8" else 1.0
    way = (setup.offload, setup.recompute, setup.attention, setup.tp, setup.etp)
    found = []
    for each in offloaded_elements(job.model, *way, operand, gated, original, output):
        found.append(_WEIGHT * (tokens * (each.attention + each.shared) + rows * each.row))
        found.append(_WEIGHT * tokens * each.attention)
    sparse_left, dense_left, sparse_crosses, dense_crosses = found
    return _Offloaded(sparse_left, sparse_crosses, dense_left, dense_crosses)


class _Sizes(NamedTuple):
    """Bytes that are the same on all stages: of a layer and a micro-batch, of the logits, of what modules of multi-token
    prediction keep beside their layers (both hidden states, and their norms), of the largest temporary tensors; and what of a
    layer is offloaded."""

    sparse: float
    dense: float
    logits: float
    modules: float
    working: float
    offloaded: _Offloaded


def _tokens_and_rows(job: Job, setup: Setup) -> tuple[float, float]:
    """A rank's share of a micro-batch's tokens, and the rows that its experts take of it.

    The ranks of etp_ep bring as many choices as they are, and each row is on etp of them. With a capacity its buffers are as
    large as the capacity, whatever the routing; without one the busiest rank has ``imbalance`` times the mean, where there are
    others that have other experts.
    """
    tokens = setup.micro_batch * job.sequence / (setup.cp * setup.tp)
    spread = min(job.imbalance, setup.ep)
    if job.capacity_factor is not None:
        spread = job.capacity_factor
    return tokens, (tokens if job.model.moe_layers else 0.0) * job.model.top_k * setup.etp * spread


def _formats(software: Software, recipe: Recipe | None) -> tuple[float, float, float]:
    """The sizes, in BF16 elements, that are kept of an element that goes into a product, of one that goes into a gated activation
    function, and of attention's output, where one copy is enough (0: it is not)."""
    operand, output = (1.0, 0.0) if recipe is None else (recipe.copy_bytes() / _WEIGHT, recipe.output_bytes / _WEIGHT)
    return operand, 1 / _WEIGHT if software.keeps_fp8_activations else 1.0, output


def _sizes(job: Job, setup: Setup, software: Software, recipe: Recipe | None) -> _Sizes:
    model, tp = job.model, setup.tp
    tokens, rows = _tokens_and_rows(job, setup)
    routed = tokens if model.moe_layers else 0.0
    kept, again = _layer_elements(
        _Layer(
            model,
            setup.recompute,
            setup.attention,
            tp,
            setup.cp,
            setup.etp,
            *_formats(software, recipe),
        ),
        _keeps(setup, software),
    )
    exchanged = rows if setup.dispatch == "all_to_all" else routed * setup.etp * setup.ep
    working = 2 * exchanged * model.hidden  # to the experts and back
    working += max(rows * again.row + tokens * again.shared, tokens * again.dense) + tokens * again.attention
    # the gradient of the widest tensor
    working += (model.matrices - 1) * max(
        rows * model.width / setup.etp, tokens * max(model.shared_width, model.dense_width)
    )
    if tp > 1 and setup.attention == "tensor":
        working += tokens * tp * model.hidden
    if setup.cp > 1:
        # All blocks, or the one that is attended to and the one that arrives.
        working += tokens * _keys_values(model, tp) * (setup.cp if software.context == "gather" else 2)
    return _Sizes(
        sparse=_WEIGHT * (tokens * (kept.attention + kept.shared) + rows * kept.row),
        dense=_WEIGHT * tokens * (kept.attention + kept.dense),
        logits=_LOGIT * tokens * model.vocabulary * (1 + model.mtp_layers),  # tp · tokens meet 1 / tp of the vocabulary
        modules=_WEIGHT * tokens * 4 * model.hidden * model.mtp_layers,
        working=_WEIGHT * working,
        offloaded=_offloaded(job, setup, software, recipe),
    )


def _keys_values(model: ModelShape, tp: int) -> int:
    """Elements per token of a rank's share that context parallelism moves: the expanded keys and values of its heads."""
    return tp * max(kv_heads_needed(model, tp)) * head_sizes(model)[1]


class _Layer(NamedTuple):
    model: ModelShape
    recompute: Recompute
    attention: Attention
    tp: int
    cp: int
    etp: int
    operand: float
    gated: float
    output_kept: float


class _Keeps(NamedTuple):
    """Whether software keeps what it gathered, by kind, until the backward pass."""

    sequence: bool
    ffn_sequence: bool
    context: bool


def _keeps(setup: Setup, software: Software) -> _Keeps:
    sequence = not software.gathers_again and setup.tp > 1 and setup.attention == "tensor"
    context = not software.gathers_again and setup.cp > 1 and software.context == "gather"
    return _Keeps(sequence, sequence and splits_ffn(software, setup.attention), context)


@lru_cache(maxsize=4096)
def _layer_elements(layer: _Layer, keeps: _Keeps) -> tuple[LayerElements, LayerElements]:
    """The elements that are kept, and those that recomputation brings back for the layer whose backward pass runs.

    Selective recomputation gathers sequences again, and keeps what attention itself works on.
    """
    formats = layer.operand, layer.gated, layer.output_kept
    kept = kept_elements(layer.model, layer.recompute, layer.attention, layer.tp, layer.etp, *formats)
    if modules := modules_of(layer.recompute):
        remade = bool(modules & {"moe", "mlp", "shared_experts"})
        kept = _with_gathered(kept, layer, keeps._replace(ffn_sequence=keeps.ffn_sequence and not remade))
    elif layer.recompute == "none":
        kept = _with_gathered(kept, layer, keeps)
    elif layer.recompute == "selective":
        kept = _with_gathered(kept, layer, _Keeps(False, False, keeps.context))
    whole = kept_elements(layer.model, "none", layer.attention, layer.tp, layer.etp, *formats)
    whole = _with_gathered(whole, layer, keeps)
    return kept, LayerElements(*(a - b for a, b in zip(whole, kept, strict=True)))


def _with_gathered(kept: LayerElements, layer: _Layer, keeps: _Keeps) -> LayerElements:
    """With the inputs of attention, and its keys and values, in place of the rank's part of them, and with the inputs of FFNs
    that tp splits beside it."""
    model, tp = layer.model, layer.tp
    more = (tp - 1) * model.hidden * keeps.sequence + (layer.cp - 1) * _keys_values(model, tp) * keeps.context
    ffn = tp * model.hidden * keeps.ffn_sequence
    return kept._replace(
        attention=kept.attention + more,
        dense=kept.dense + ffn,
        shared=kept.shared + (ffn if model.shared_width else 0),
    )
