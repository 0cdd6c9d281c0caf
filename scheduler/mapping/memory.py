"""Bytes of the fullest GPU: weights, gradients, optimizer state, activations and the largest
temporary tensors.

Mixed precision as Megatron-Core has it: BF16 weights, gradients summed in FP32 (or BF16), Adam with
FP32 weights and two moments, in FP32 or less. With a recipe of FP8
(:mod:`commlayer.scheduler.mapping.precisions`) the operands of products are kept in FP8, one copy
of each, and weights have FP8 copies beside them, or in place of them.

Activations are those of flash attention, a fused SwiGLU that applies the gating weights, and
permuted tokens; MegaScale-MoE's appendix A.2 (``LayerShape`` in tests/paper_activations.py) is the
special case of heads · head_dim = hidden and no shared expert. docs/counting.md derives every
formula and the table of ZeRO.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping import parameters
from commlayer.scheduler.mapping.hardware import Gpu
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.layer_table import Format, LayerCut, LayerOp, Saved, layer_table
from commlayer.scheduler.mapping.layer_work import expert_rows, tokens_of
from commlayer.scheduler.mapping.model import ModelShape, head_sizes, kv_heads_needed, layer_kinds
from commlayer.scheduler.mapping.offloading import KEPT, Offload, offloaded_modules
from commlayer.scheduler.mapping.pipeline_layout import EVEN_LAYOUT
from commlayer.scheduler.mapping.pipeline_schedule import in_flight_by_chunk, in_flight_chunks, is_dual
from commlayer.scheduler.mapping.precisions import Recipe, recipe_of
from commlayer.scheduler.mapping.recomputation import Recompute, ways_of
from commlayer.scheduler.mapping.result import Memory
from commlayer.scheduler.mapping.software import MEGATRON, Software

__all__ = [
    "Formats",
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
"""The layers whose offloaded activations are on the GPU all the same: that which computes, and its
neighbour, whose copies are under way."""


class Formats(NamedTuple):
    """The kept part of an element, in BF16 elements.

    ``operand``: of one that goes into a product: 1, or in FP8 a half and its scales. There what
    others need in BF16 as well is kept in both (attention's output; what a router reads).
    ``gated``: of what goes into a gated activation function. ``output``: of attention's output,
    where one copy is enough; 0: it is not. ``routed``: what crosses to the host of an element that
    goes into the experts' first product; Megatron-Core keeps it in BF16 for that, but with MXFP8.
    """

    operand: float = 1.0
    gated: float = 1.0
    output: float = 0.0
    routed: float = 1.0

    def sizes(self) -> dict[Format, float]:
        cast = self.operand if self.operand < 1 else 0.0
        return {
            "bf16": 1.0,
            "operand": self.operand,
            "cast": cast,
            "recast": self.operand - 1,
            "routed": self.operand,
            "gated": self.gated,
            "output": self.output or 1.0,
            "output_cast": 0.0 if self.output else cast,
        }


_IN_BF16 = Formats()


class LayerElements(NamedTuple):
    """Elements that one layer keeps: per ``token`` of a rank's share, and per ``row`` of its
    experts."""

    token: float
    row: float

    def of(self, tokens: float, rows: float) -> float:
        return tokens * self.token + rows * self.row


@lru_cache(maxsize=4096)
def kept_elements(
    model: ModelShape, recompute: Recompute, cut: LayerCut, formats: Formats = _IN_BF16, is_moe: bool = True
) -> LayerElements:
    """Count what a layer keeps for its backward pass. A rank's share are a sample's tokens over tp
    · cp; an FFN under tp has tp times as many, narrower.

    ``none``: what its operations keep (mapping/layer_table.py). ``megascale`` (MegaScale-MoE, A.2),
    or modules: as ``none`` without what they compute again. ``full``: a layer's input alone
    (Megatron).
    """
    ops, sizes, ways = layer_table(model, cut, is_moe), formats.sizes(), ways_of(recompute)
    if recompute == "full":
        return LayerElements(ops[0].saved[0].elements, 0.0)
    if recompute == "megascale":
        sizes["output"] = 1.0  # in BF16 whatever the recipe
    return _summed((each, part * sizes[each.format]) for each, part in _saved(ops) if not each.remade & ways)


def _saved(ops: Iterable[LayerOp]) -> list[tuple[Saved, float]]:
    """List what operations keep, with the part of the layers that has it."""
    return [(each, op.part) for op in ops for each in op.saved]


def _summed(saved: Iterable[tuple[Saved, float]]) -> LayerElements:
    found = {"token": 0.0, "row": 0.0}
    for each, size in saved:
        found[each.per] += each.elements * size
    return LayerElements(found["token"], found["row"])


@lru_cache(maxsize=1024)
def offloaded_elements(
    model: ModelShape,
    offload: Offload,
    recompute: Recompute,
    cut: LayerCut,
    formats: Formats = _IN_BF16,
    is_moe: bool = True,
) -> tuple[LayerElements, LayerElements]:
    """Count what of :func:`kept_elements` leaves the GPU, and what crosses to the host for it.

    More crosses than leaves where two modules keep one tensor (attention's output crosses for both,
    and leaves with the second), and where it is computed again as well.
    """
    modules, ways, sizes = offloaded_modules(offload), ways_of(recompute), formats.sizes()
    if recompute == "megascale":
        modules -= {"expert_fc1"}
    saved = _saved(layer_table(model, cut, is_moe))
    named = [(each, part) for each, part in saved if each.offload in modules]
    # The projection's own copies of attention's output; without any it keeps the same tensor.
    own = [each for each, _ in saved if each.offload == "attn_proj" and not each.remade & ways and sizes[each.format]]
    stays: frozenset[str] = frozenset() if own or "attn_proj" in modules else frozenset({"output"})

    def crossing(each: Saved) -> float:
        if each.format == "routed":
            return formats.routed
        if each.offload != "attn_proj" or own:
            return sizes[each.format] * (each.offload != "attn_proj" or each in own)
        return (formats.output or formats.operand) * (each.format == "output_cast")

    leaves = ((each, part) for each, part in named if not each.remade & ways and each.format not in stays)
    return (
        _summed((each, part * sizes[each.format]) for each, part in leaves),
        _summed((each, part * crossing(each)) for each, part in named),
    )


def in_flight(setup: Setup, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations ``stage`` holds at once, at most, each through all chunks of
    the stage (:func:`~commlayer.scheduler.mapping.pipeline_schedule.in_flight_chunks`).

    1F1B: pp - stage. Interleaved (Narayanan 2021, arXiv:2104.04473; the warm-up of Megatron-Core),
    for stage 0 pp · (1 + (pp - 1) / (pp · vpp)).
    """
    chunks = in_flight_chunks(setup.schedule, setup.pp, stage, micro_batches, setup.vpp)
    return chunks / len(setup.pipeline.chunks(stage))


def state_bytes_per_parameter(
    zero: int, replicas: float, gradient_bytes: int, adam_bytes: float = 12
) -> tuple[float, float, float]:
    """Bytes of weight, gradient and optimizer state that each of ``replicas`` GPUs keeps of a
    parameter, by ZeRO stage.

    ``adam_bytes``: of a main weight and two moments; 12: all in FP32.
    """
    return (
        _WEIGHT / replicas if zero >= 3 else _WEIGHT,
        gradient_bytes / replicas if zero >= 2 else gradient_bytes,
        adam_bytes / replicas if zero >= 1 else adam_bytes,
    )


def estimate(job: Job, setup: Setup, *, software: Software = MEGATRON, gpu: Gpu | None = None) -> Memory:
    """Bytes of the fullest GPU in a step of ``job`` by ``setup``.

    Args:
        software: whether tp splits embedding, head and FFNs; whether ZeRO shards what all tp ranks
            have over these too; whether context parallelism gathers keys and values or passes them
            on; and whether what was gathered is kept for the backward pass, or gathered again; in
            what formats the optimizer's state is, and how much of it lies in the host's memory.
        gpu: which decides how many copies a recipe of FP8 needs; None: weights and operands are
            counted in BF16.

    Raises:
        UsageError: degrees that do not divide the model
            (:func:`~commlayer.scheduler.mapping.parameters.check`), or ``software.gradient_bytes`` other
            than 2 or 4. GroupError: the batch does not split over dp and micro-batches.
    """
    counting = _Counting(job, setup, software, gpu)
    every = parameters.held(job.model, setup, software)
    if is_dual(setup.schedule) and setup.pipeline_layout != EVEN_LAYOUT:
        # of ranks with as many layers the first is not the fullest where its chunk with more micro-batches has fewer layers
        every = _of_ranks(job.model, setup, every)
    return max(map(counting.of, every), key=lambda found: found.total)


class Room(NamedTuple):
    """The memory of a pipeline rank, in bytes: what is left of it (below zero: what it lacks), what
    one layer more takes, as the mean of the rank's chunks keeps its activations, and what a layer
    keeps of one micro-batch."""

    left: float
    layer: float
    kept: float


def rooms(job: Job, setup: Setup, limit: float, *, software: Software = MEGATRON, gpu: Gpu | None = None) -> list[Room]:
    """The room of each pipeline rank in ``limit`` bytes, where the layout of ``setup`` is spelt
    out; by layers that have experts, where the rank has any. Other arguments and errors as
    :func:`estimate`."""
    counting = _Counting(job, setup, software, gpu)
    stages = parameters.held(job.model, setup, software)
    ranks = _of_ranks(job.model, setup, stages)
    return [Room(limit - counting.of(held).total, *counting.layer_bytes(held)) for held in ranks]


def _of_ranks(
    model: ModelShape, setup: Setup, every: tuple[parameters.StageElements, ...]
) -> tuple[parameters.StageElements, ...]:
    """The elements that each pipeline rank holds, taken from those of each kind of stage."""
    places = parameters.stage_of_ranks(model, setup.pipeline)
    return tuple(
        every[place]._replace(stage=every[place].stage._replace(number=rank)) for rank, place in enumerate(places)
    )


def have_room(job: Job, setup: Setup, limit: float, *, software: Software = MEGATRON, gpu: Gpu | None = None) -> bool:
    """Whether ``limit`` bytes of each GPU may have room for the model's layers, however they are
    laid on a pipeline's ranks: for those of either kind, if there were no others. Other arguments
    and errors as :func:`estimate`."""
    counting = _Counting(job, setup, software, gpu)
    kinds = layer_kinds(job.model)
    return all(sum(counting.most_layers(is_moe, limit)) >= kinds.count(is_moe) for is_moe in set(kinds))


class _Counting:
    """The bytes of a GPU of any stage. Raises as :func:`estimate`."""

    def __init__(self, job: Job, setup: Setup, software: Software, gpu: Gpu | None) -> None:
        gradient_bytes = software.gradient_bytes
        if gradient_bytes not in (2, 4):
            raise UsageError(f"gradient_bytes: expected 2 (BF16) or 4 (FP32), got {gradient_bytes!r}")
        self.model, self.setup, self.gradient_bytes = job.model, setup, gradient_bytes
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
        activations = self._over_chunks(held, *(each.kept for each in sizes.layers))
        if stage.ends.head:
            activations += sizes.logits
        if stage.ends.modules:
            laid = parameters.chunks_laid(self.model, setup.pipeline)
            own = [laid[chunk].modules > 0 for chunk in setup.pipeline.chunks(stage.number)]
            activations += sizes.modules * under_way[own.index(True)]
        tasks = 2 if setup.is_merged else 1  # both have a layer under way
        buffers, away = sizes.working * tasks, 0.0
        if setup.offload != KEPT:
            leaves = [each.leaves for each in sizes.layers]
            left = self._over_chunks(held, *leaves)
            mean = (stage.sparse * leaves[0] + stage.dense * leaves[1]) / max(stage.layers, 1)
            activations -= left
            buffers += min(left, _LAYERS_AHEAD * tasks * mean)
            away = self._over_chunks(held, *(each.crosses for each in sizes.layers))
        if setup.zero >= 2:
            # parameters of one layer that other GPUs keep, and that are here only while they are needed
            absent = sum(elements * (1 - 1 / number) for elements, number in zip(held.layer, self.over, strict=True))
            buffers += absent * (self.gradient_bytes + (_WEIGHT if setup.zero >= 3 else 0))
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
        """The bytes of all layers of a stage, each as often as micro-batches are under way in its
        chunk."""
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
        """The bytes of one layer more of the stage, its activations as the mean of its chunks has
        them, and these of one micro-batch."""
        under_way = in_flight(self.setup, held.stage.number, self.micro_batches)
        stays = self.sizes.layers[not held.stage.sparse].stays
        return sum(self._state(held.layer)) + self.copies * held.multiplied_layer + stays * under_way, stays

    def most_layers(self, is_moe: bool, limit: float) -> Iterator[int]:
        """Layers of one kind that each rank has room for at most: with DualPipe and its V in the chunk
        with fewest micro-batches, else in all chunks alike, as even and balanced layouts have
        them."""
        setup, sizes = self.setup, self.sizes
        (elements, multiplied), stays = self.layers[is_moe], sizes.layers[not is_moe].stays
        held = sum(self._state(elements)) + self.copies * multiplied
        for rank in range(setup.pp // setup.copies):
            under_way = in_flight(setup, rank, self.micro_batches)
            if is_dual(setup.schedule):
                under_way = min(in_flight_by_chunk(setup.schedule, setup.pp, rank, self.micro_batches, setup.vpp))
            left = limit - sizes.working - sizes.logits * parameters.ends_at(self.model, setup, rank).head
            yield max(0, math.floor(left / (held + under_way * stays)))

    def _state(self, elements: parameters.Elements) -> list[float]:
        """Weights, gradients and optimizer state of parameters, without FP8 copies."""
        return [
            sum(number * each[state] for number, each in zip(elements, self.per, strict=True)) for state in range(3)
        ]


def offloaded_layer_bytes(
    job: Job, setup: Setup, gpu: Gpu | None = None, *, software: Software = MEGATRON, is_moe: bool = True
) -> float:
    """Bytes that cross to the host for one layer and a micro-batch, and come back for its backward
    pass."""
    recipe = None if gpu is None else recipe_of(setup.precision, gpu)
    return _layer_bytes(job, setup, software, recipe)[not is_moe].crosses


class _LayerBytes(NamedTuple):
    """The activations of a layer and a micro-batch, bytes: those it makes, those that
    it keeps for the backward pass, what of that leaves the GPU, and what crosses to the host for it."""

    made: float
    kept: float
    leaves: float
    crosses: float

    @property
    def stays(self) -> float:
        return self.kept - self.leaves


def _layer_bytes(job: Job, setup: Setup, software: Software, recipe: Recipe | None) -> tuple[_LayerBytes, _LayerBytes]:
    """The activations of a layer with experts, and of a dense one."""
    tokens, rows = _tokens_and_rows(job, setup)
    cut, formats = parameters.cut_of(setup, software), _formats(software, recipe)

    def of(is_moe: bool) -> _LayerBytes:
        way, away = setup.recompute, _NOTHING
        if setup.offload != KEPT:
            away = offloaded_elements(job.model, setup.offload, way, cut, formats, is_moe)
        kept = (kept_elements(job.model, each, cut, formats, is_moe) for each in ("none", way))
        return _LayerBytes(*(_WEIGHT * each.of(tokens, rows) for each in (*kept, *away)))

    return of(True), of(False)


_NOTHING = LayerElements(0.0, 0.0), LayerElements(0.0, 0.0)


class _Sizes(NamedTuple):
    """Bytes that are the same on all stages: of a layer with experts, and of a dense one; of the
    logits, of what modules of multi-token prediction keep beside their layers (both hidden states,
    and their norms), and of the largest temporary tensors."""

    layers: tuple[_LayerBytes, _LayerBytes]
    logits: float
    modules: float
    working: float


def _tokens_and_rows(job: Job, setup: Setup) -> tuple[float, float]:
    """A rank's share of a micro-batch's tokens, and the rows that its experts take of it: with a
    capacity its buffers are as large as that, whatever the routing; without one the busiest rank's
    (:func:`expert_rows`)."""
    return tokens_of(job, setup)[1], expert_rows(job, setup) if job.model.moe_layers else 0.0


def _formats(software: Software, recipe: Recipe | None) -> Formats:
    gated = 1 / _WEIGHT if software.keeps_fp8_activations else 1.0
    if recipe is None:
        return Formats(gated=gated)
    operand = recipe.copy_bytes() / _WEIGHT
    return Formats(operand, gated, recipe.output_bytes / _WEIGHT, operand if recipe.megatron == "mxfp8" else 1.0)


def _sizes(job: Job, setup: Setup, software: Software, recipe: Recipe | None) -> _Sizes:
    model, tp = job.model, setup.tp
    tokens, rows = _tokens_and_rows(job, setup)
    routed = tokens if model.moe_layers else 0.0
    layers = _layer_bytes(job, setup, software, recipe)
    exchanged = rows if setup.exchange == "all_to_all" else routed * setup.etp * setup.ep
    working = 2 * exchanged * model.routed_hidden  # to the experts and back
    # the gradient of the widest tensor
    working += (model.matrices - 1) * max(
        rows * model.width / setup.etp, tokens * max(model.shared_width, model.dense_width)
    )
    if tp > 1 and setup.attention == "tensor":
        working += tokens * tp * model.hidden
    if setup.cp > 1:
        # All blocks, or the one that is attended to and the one that arrives.
        blocks = setup.cp if software.context == "gather" else 2
        working += tokens * tp * max(kv_heads_needed(model, tp)) * head_sizes(model)[1] * blocks
    return _Sizes(
        layers=layers,
        logits=_LOGIT * tokens * model.vocabulary * (1 + model.mtp_layers),  # tp · tokens meet 1 / tp of the vocabulary
        modules=_WEIGHT * tokens * 4 * model.hidden * model.mtp_layers,
        # and what recomputation brings back for one layer
        working=_WEIGHT * working + max(each.made - each.kept for each in layers),
    )
