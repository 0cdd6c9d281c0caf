"""How many parameters a model has, how many of them a GPU of a mapping holds, and over which axis
the gradient of each is summed.

A layer's parameters are those of its operations (mapping/layer_table.py), as one rank has them; a
model's own are those of a rank that shares with nobody. Their axes: ``dp_cp``: what tensor
parallelism splits. ``edp``: experts. ``stage`` (dp, cp and tp together): what every tp rank has
whole and uses on rows of its own; where the software sums that over tp by itself (Megatron-LM), it
counts as ``dp_cp``, and as ``tp`` too.

Counted is what a decoder of :class:`~commlayer.scheduler.mapping.model.ModelShape` has: embedding,
head, projections, router, experts, norms, and the vectors beside them. Where some layers have
linear attention, a layer here has the mean of the two kinds; the model's own count is exact.
docs/counting.md has the formulas, and the counts beside transformers' and the published sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping.divisors import divisors, nearest
from commlayer.scheduler.mapping.job import Setup
from commlayer.scheduler.mapping.layer_table import (
    WHOLE,
    LayerCut,
    Weight,
    layer_table,
    model_operations,
)
from commlayer.scheduler.mapping.model import ModelShape, layer_kinds, split_by_tp
from commlayer.scheduler.mapping.offloading import KEPT
from commlayer.scheduler.mapping.pipeline_layout import EVEN_LAYOUT, Pipeline, PipelineChunk, laid_chunks
from commlayer.scheduler.mapping.pipeline_schedule import is_dual
from commlayer.scheduler.mapping.recomputation import modules_in, unfit_modules
from commlayer.scheduler.mapping.software import MEGATRON, Software, splits_ffn

__all__ = [
    "Elements",
    "Parameters",
    "Stage",
    "StageElements",
    "StageEnds",
    "axis_of_whole",
    "bucket_bytes",
    "by_axis",
    "check",
    "chunks_laid",
    "count",
    "cut_of",
    "end_parameters",
    "ends_at",
    "held",
    "held_elements",
    "kinds_of_chunks",
    "layer_elements",
    "layer_parameters",
    "layers_of",
    "mean_elements",
    "replicas",
    "replicated_elements",
    "shard_elements",
    "stage_parameters",
    "stages",
]

Sized = tuple[str, int]
"""Axis, elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters of a whole model, each the sum over its layers. ``active_experts``: of
    ``experts``, what one token passes through."""

    embedding: int
    head: int
    attention: int
    router: int
    experts: int
    shared: int
    dense_ffn: int
    norms: int
    active_experts: int
    mtp_projections: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.experts

    @property
    def expert(self) -> int:
        """The parameters that expert parallelism shards."""
        return self.experts

    @property
    def dense(self) -> int:
        """All but the routed experts."""
        ends = self.embedding + self.head + self.mtp_projections
        return ends + self.attention + self.router + self.shared + self.dense_ffn + self.norms

    @property
    def active(self) -> int:
        """A token's: everything but the experts that it does not take. The embedding counts, as in
        published numbers."""
        return self.dense + self.active_experts


class StageEnds(NamedTuple):
    """The parts of a model's ends that a stage has; ``modules``: of multi-token prediction."""

    embedding: bool
    head: bool
    modules: bool


class Stage(NamedTuple):
    """A pipeline stage: its number, and how many layers it has with a dense FFN and with experts.

    ``kinds``: for each of its layers, in order, whether it has experts. ``alike``: so many stages
    have as many layers of each kind, and the same ends, as this one, which is the first of them.
    """

    number: int
    dense: int
    sparse: int
    kinds: tuple[bool, ...]
    ends: StageEnds
    alike: int = 1

    @property
    def layers(self) -> int:
        return self.dense + self.sparse

    @property
    def numbers(self) -> tuple[tuple[bool, int], ...]:
        """(whether they have experts, how many) of each kind of layers that it has."""
        return tuple(each for each in ((True, self.sparse), (False, self.dense)) if each[1])


class Elements(NamedTuple):
    """Parameters on one rank: of what tp splits, of what each of its ranks has whole, and of
    experts."""

    split: int
    whole: int
    expert: int


class StageElements(NamedTuple):
    """Parameters on a GPU of ``stage``, in all and of one of its layers, one with experts where it
    has any.

    Of what tp splits, of what each of its ranks has whole (both are on all ranks of dp and cp
    besides), and of experts. ``multiplied``: those of linear layers, which recipes of FP8 cast (not
    embedding, head, router and norms), in all and of one layer. ``chunks``: for each chunk of the
    stage how many layers it has with experts, and with a dense FFN.
    """

    stage: Stage
    elements: Elements
    layer: Elements
    multiplied: int
    multiplied_layer: int
    chunks: tuple[tuple[int, int], ...]

    @property
    def total(self) -> int:
        return sum(self.elements)


@lru_cache(maxsize=256)
def count(model: ModelShape) -> Parameters:
    """Every parameter of ``model``. The head is nothing of its own where it is tied to the
    embedding."""
    elements: Counter[str] = Counter()
    for op, layers in model_operations(model):
        for each in op.weights:
            elements[each.part] += layers * each.elements
    vocabulary, extra = model.vocabulary * model.hidden, model.mtp_layers
    return Parameters(
        embedding=vocabulary,
        head=0 if model.ties_embeddings else vocabulary,
        attention=elements["sharded"] + elements["keys_values"] + elements["copied"],
        router=elements["router"],
        experts=elements["experts"],
        shared=elements["shared"],
        dense_ffn=elements["dense_ffn"],
        norms=elements["norms"] + (1 + 3 * extra) * model.hidden + model.end_vectors,
        active_experts=elements["experts"] // model.experts * model.top_k,
        mtp_projections=extra * 2 * model.hidden * model.hidden,
    )


def check(model: ModelShape, setup: Setup, software: Software = MEGATRON) -> None:
    """Whether the degrees divide the model.

    Raises:
        UsageError: tp does not divide the heads (or the width of an FFN that the software splits
            over it), ep the experts, etp an expert's width; the layers do not go into pp · vpp
            chunks; cp with linear attention, whose states no software here passes on, or with compressed; or
            activations that are offloaded by software that has no way to. Names the number and what
            it must divide.
    """
    held(model, setup, software)
    if why := unfit_modules(setup.recompute, precision="", is_merged=False, there=modules_in(model)):
        raise UsageError(f"recompute {setup.recompute} of {model.name}: {why}")
    if setup.offload != KEPT and not software.offloads:
        raise UsageError(
            f"offload {setup.offload}: {software.name} keeps activations on the GPU: take the software megatron, or offload none"
        )
    if model.needs_whole_sequences and setup.cp > 1:
        kind = "linear" if model.linear is not None else "compressed"
        raise UsageError(
            f"cp={setup.cp}: {model.name} has layers of {kind} attention, which are planned without it: take cp=1"
        )


def _check(model: ModelShape, cut: LayerCut) -> None:
    parts = [("tp", cut.tp, *each) for each in split_by_tp(model)]
    parts += [("ep", cut.ep, "experts", model.experts), ("etp", cut.etp, "width of an expert", model.width)]
    if cut.splits_ffn:
        parts += [
            ("tp", cut.tp, "shared width", model.shared_width),
            ("tp", cut.tp, "dense width", model.dense_width),
        ]
    for axis, degree, name, number in parts:
        if number % degree:
            instead = " or ".join(map(str, nearest(degree, divisors(number))))
            raise UsageError(
                f"{axis}={degree}: expected a divisor of the {name} of {model.name}, {number}: take {instead}"
            )
    if model.latent is None and model.kv_heads % cut.tp and cut.tp % model.kv_heads:
        raise UsageError(
            f"tp={cut.tp}: expected a divisor or a multiple of the {model.kv_heads} key-value heads of {model.name}"
        )


@lru_cache(maxsize=4096)
def stage_of_ranks(model: ModelShape, pipeline: Pipeline) -> tuple[int, ...]:
    """For each pipeline rank which of :func:`stages` is like it, by its place among them."""
    kinds = {_kind(model, pipeline, stage.number): i for i, stage in enumerate(stages(model, pipeline))}
    return tuple(kinds[_kind(model, pipeline, rank)] for rank in range(pipeline.pp))


def _kind(model: ModelShape, pipeline: Pipeline, rank: int) -> tuple[object, ...]:
    """Return what makes a rank like another: the ends of the model are like no other."""
    kinds = _kinds(model, pipeline, rank)
    each: tuple[int, ...] = ()
    if pipeline.is_mixed:
        laid = kinds_of_chunks(model, pipeline)
        each = tuple(len(laid[chunk]) for chunk in pipeline.chunks(rank))
    return _ends_of(model, pipeline, rank), len(kinds) - sum(kinds), sum(kinds), each


@lru_cache(maxsize=1 << 14)
def stages(model: ModelShape, pipeline: Pipeline) -> tuple[Stage, ...]:
    """The pipeline's stages: the first, those between by their layers, the last.

    The layers are cut into pp · vpp chunks as its layout says
    (:mod:`commlayer.scheduler.mapping.pipeline_layout`). ``even``: as equally as they go, the
    larger ones first: of ceil(layers / (pp · vpp)), the others of one less. Where the last has
    modules for more tokens too, it has the fewest, as in Megatron-Bridge's layouts of DeepSeek-V3
    (but with DualPipe, for which nobody published one). Chunk c is on stage c mod pp, as Megatron's
    interleaved schedule lays them, or where DualPipe has it.

    Raises:
        UsageError: a chunk would be empty; names the nearest degrees for which none is. A layout
        that does not hold this model.
    """
    found: dict[tuple[object, ...], Stage] = {}
    for number in range(pipeline.pp):
        key = _kind(model, pipeline, number)
        known = found.get(key)
        kinds = _kinds(model, pipeline, number)
        one = Stage(number, len(kinds) - sum(kinds), sum(kinds), kinds, _ends_of(model, pipeline, number))
        found[key] = known._replace(alike=known.alike + 1) if known else one
    return tuple(found.values())


def layers_of(model: ModelShape, setup: Setup, stage: int) -> tuple[int, int]:
    """Layers with a dense FFN, and with experts, of pipeline stage ``stage``, cut as :func:`stages`
    says."""
    kinds = _kinds(model, setup.pipeline, stage)
    return len(kinds) - sum(kinds), sum(kinds)


def chunks_laid(model: ModelShape, pipeline: Pipeline) -> tuple[PipelineChunk, ...]:
    """The content of each of the pipeline's chunks. Raises as :func:`stages`."""
    num, layers = pipeline.num_chunks, model.layers
    pp, vpp, schedule, layout = pipeline
    if layout == EVEN_LAYOUT and num > layers and is_dual(schedule):
        raise UsageError(
            f"{layers} layers do not fill the {num} chunks of {schedule} with pp={pp}: expected no chunk without a layer; "
            f"take at most pp={layers * pp // num}"
        )
    if layout == EVEN_LAYOUT and num > layers:
        ways = [f"pp={layers // vpp}"] * (vpp <= layers) + [f"vpp={layers // pp}"] * (pp <= layers and vpp > 1)
        alone = ", or a pipeline layout with the embedding or the head alone in a chunk" if num <= layers + 2 else ""
        raise UsageError(
            f"{layers} layers do not fill pp={pp} × vpp={vpp} = {num} chunks: expected no chunk without a layer; take at most "
            f"{' or '.join(ways) or f'{layers} chunks'}{alone}"
        )
    is_relieved = bool(model.mtp_layers) and not is_dual(schedule)
    return laid_chunks(layout, num, layers, model.mtp_layers, is_relieved=is_relieved)


@lru_cache(maxsize=1 << 14)
def kinds_of_chunks(model: ModelShape, pipeline: Pipeline) -> tuple[tuple[bool, ...], ...]:
    """For each chunk, and each of its layers, whether it has experts; those of modules for more
    tokens are among them."""
    every, found, first = layer_kinds(model), [], 0
    for chunk in chunks_laid(model, pipeline):
        found.append((*every[first : first + chunk.layers], *every[-1:] * chunk.modules))
        first += chunk.layers
    return tuple(found)


@lru_cache(maxsize=1 << 16)
def _kinds(model: ModelShape, pipeline: Pipeline, stage: int) -> tuple[bool, ...]:
    """For each layer of a stage, chunk by chunk, whether it has experts."""
    every = kinds_of_chunks(model, pipeline)
    return tuple(is_moe for chunk in pipeline.chunks(stage) for is_moe in every[chunk])


@lru_cache(maxsize=1 << 16)
def _ends_of(model: ModelShape, pipeline: Pipeline, stage: int) -> StageEnds:
    laid = chunks_laid(model, pipeline)
    own = [laid[chunk] for chunk in pipeline.chunks(stage)]
    return StageEnds(
        any(chunk.has_embedding for chunk in own),
        any(chunk.has_head for chunk in own),
        any(chunk.modules for chunk in own),
    )


def held(model: ModelShape, setup: Setup, software: Software = MEGATRON) -> tuple[StageElements, ...]:
    """Count what a GPU of the first stage holds, of the second and of the last: those between hold
    no more than the second. Of every kind of stage where dense layers lie between others, and with
    DualPipe and its V, whose ranks have a large chunk with a small one, or two large ones, and with
    a layout that is spelt out.

    Tensor parallelism divides attention and FFN by tp, and leaves norms, router and the projections
    down of latent attention whole; a key-value head is held by at least one rank, and by several
    where tp exceeds their number. ``ulysses`` leaves all that whole (MegaScale-MoE, section 3.1).
    The first stage has the embedding, the last the final norm and the head, which is a second copy
    of the embedding where the two are tied and pp > 1 (Megatron).

    Args:
        software: whether tp divides embedding, head and FFNs at all, and what is held of key-value
            heads that it does not divide.

    Raises:
        UsageError: as :func:`check`.
    """
    return _held(model, setup.pipeline, _cut_of_weights(setup, software))


@lru_cache(maxsize=1 << 16)
def _held(model: ModelShape, pipeline: Pipeline, cut: LayerCut) -> tuple[StageElements, ...]:
    _check(model, cut)
    every = stages(model, pipeline)
    layers = [_layer(model, cut, is_moe) for is_moe in (True, False)]
    sparse, dense = map(_summed, layers)
    cast = list(map(_multiplied, layers))
    laid = kinds_of_chunks(model, pipeline)
    found = []
    # Of dense layers that come first the second stage has no fewer experts than any behind it.
    for stage in dict.fromkeys(
        every if pipeline.is_mixed or model.dense_at else (every[0], every[min(1, len(every) - 1)], every[-1])
    ):
        first, last = _ends(model, cut, stage.ends)
        parts = zip(sparse, dense, _summed([*first, *last]), strict=True)
        elements = Elements(*(stage.sparse * a + stage.dense * b + c for a, b, c in parts))
        multiplied = stage.sparse * cast[0] + stage.dense * cast[1] + _multiplied([*first, *last])
        one = (sparse, cast[0]) if stage.sparse else (dense, cast[1])
        own = [laid[chunk] for chunk in pipeline.chunks(stage.number)]
        chunks = tuple((sum(kinds), len(kinds) - sum(kinds)) for kinds in own)
        found.append(StageElements(stage, elements, one[0], multiplied, one[1], chunks))
    return tuple(found)


def replicas(setup: Setup, software: Software) -> tuple[int, int, int]:
    """GPUs that hold the same of what tp splits, of what its ranks have whole, and of experts: over
    so many ZeRO shards.

    Megatron-LM's distributed optimizer does not look across tp, although all its ranks have the
    second.
    """
    split = setup.dp * setup.cp * setup.copies
    return split, split * setup.tp if axis_of_whole(setup, software) == "stage" else split, setup.edp * setup.copies


def held_elements(model: ModelShape, setup: Setup, software: Software) -> float:
    """Parameters of the fullest GPU, all together. Raises UsageError as :func:`held`."""
    return float(max(each.total for each in held(model, setup, software)))


def shard_elements(model: ModelShape, setup: Setup, software: Software) -> float:
    """Parameters whose optimizer state the fullest GPU keeps: from ZeRO-1 on its share of what it
    holds, of each kind over those that hold the same (:func:`replicas`); all without. Raises
    UsageError as :func:`held`."""
    if setup.zero == 0:
        return held_elements(model, setup, software)
    over = replicas(setup, software)
    return max(
        sum(elements / number for elements, number in zip(each.elements, over, strict=True))
        for each in held(model, setup, software)
    )


def _multiplied(parameters: Iterable[Weight]) -> int:
    """Elements of linear layers' weights, which recipes cast."""
    left_out = ("embedding", "head", "router", "norms")
    return sum(each.elements for each in parameters if each.part not in left_out)


@lru_cache(maxsize=1 << 14)
def _mean(model: ModelShape, ranks: float, cut: LayerCut) -> Elements:
    sparse, dense = (_summed(_layer(model, cut, is_moe)) for is_moe in (True, False))
    kinds = layer_kinds(model)
    number = sum(kinds) + model.mtp_layers * kinds[-1], len(kinds) - sum(kinds) + model.mtp_layers * (not kinds[-1])
    first, last = _ends(model, cut, StageEnds(True, True, True))
    parts = zip(sparse, dense, _summed([*first, *last]), strict=True)
    return Elements(*(int((number[0] * a + number[1] * b + c) / ranks) for a, b, c in parts))


@lru_cache(maxsize=1 << 14)
def _layers(model: ModelShape, cut: LayerCut) -> dict[bool, tuple[Elements, int]]:
    found = {is_moe: _layer(model, cut, is_moe) for is_moe in set(layer_kinds(model))}
    return {is_moe: (_summed(layer), _multiplied(layer)) for is_moe, layer in found.items()}


def layer_elements(model: ModelShape, setup: Setup, software: Software) -> dict[bool, tuple[Elements, int]]:
    """Count what a GPU has of a layer with experts, and of a dense one, as far as the model has
    such: all of it, and what of it recipes cast."""
    return _layers(model, _cut_of_weights(setup, software))


def mean_elements(model: ModelShape, setup: Setup, software: Software) -> Elements:
    """Count what a GPU holds at least, the mean over the pipeline's ranks, however the layers are
    laid on them."""
    return _mean(model, setup.pp / setup.copies, _cut_of_weights(setup, software))


def axis_of_whole(setup: Setup, software: Software) -> str:
    """Over which axis is shared, and summed, what all tp ranks have: with Ulysses that is nearly
    everything, summed at once."""
    return "dp_cp" if software.sums_replicas_over_tp and setup.attention == "tensor" else "stage"


def layer_parameters(model: ModelShape, setup: Setup, software: Software, moe: bool) -> dict[str, int]:
    """Elements of one layer on one rank, by axis."""
    return by_axis(_on_axes(_layer(model, _cut_of_weights(setup, software), moe), setup, software))


def by_axis(parameters: Iterable[Sized]) -> dict[str, int]:
    """The elements over each axis, in order of first use."""
    totals: dict[str, int] = {}
    for axis, elements in parameters:
        totals[axis] = totals.get(axis, 0) + elements
    return totals


def replicated_elements(model: ModelShape, setup: Setup, software: Software, stage: int) -> int:
    """Elements whose gradients are summed over tp by themselves: norms and routers, which see a
    part of the sequence."""
    if axis_of_whole(setup, software) == "stage":
        return 0
    return sum(each.elements for each in _stage(model, setup, software, stage) if each.axis == WHOLE)


def end_parameters(model: ModelShape, setup: Setup, software: Software, stage: int) -> tuple[list[Sized], list[Sized]]:
    """Embedding, and norm with head, on one rank of this stage, in order."""
    first, last = _ends(model, _cut_of_weights(setup, software), ends_at(model, setup, stage))
    return _on_axes(first, setup, software), _on_axes(last, setup, software)


def stage_parameters(model: ModelShape, setup: Setup, software: Software, stage: int) -> list[Sized]:
    """Every parameter of this stage, in the order of its modules."""
    return _on_axes(_stage(model, setup, software, stage), setup, software)


def bucket_bytes(parameters: Iterable[Sized], element_bytes: int, limit: int) -> dict[str, list[int]]:
    """The buckets of each axis, in the order in which a backward pass fills them: as
    ``examples/buckets.py`` cuts them."""
    found: dict[str, list[int]] = {}
    for axis, elements in reversed(list(parameters)):
        size, open_ = elements * element_bytes, found.setdefault(axis, [0])
        if open_[-1] and open_[-1] + size > limit:
            open_.append(0)
        open_[-1] += size
    return found


def cut_of(setup: Setup, software: Software) -> LayerCut:
    """How ``setup`` cuts a layer over ranks, and what ``software`` fuses and keeps of it."""
    gathers_once, fuses = not software.gathers_again, software.fuses_experts
    return LayerCut(
        *_splits(setup, software),
        cp=setup.cp,
        keeps_sequences=gathers_once,
        keeps_context=gathers_once and software.context == "gather",
        fuses_experts=fuses,
        fuses_activation=fuses and setup.precision != "bf16",
    )


def _cut_of_weights(setup: Setup, software: Software) -> LayerCut:
    """The same as far as parameters depend on it: few of all mappings differ in that."""
    return LayerCut(*_splits(setup, software))


def _splits(setup: Setup, software: Software) -> tuple[int, int, int, bool, bool, bool, bool]:
    """The first fields of a :class:`LayerCut`, on which parameters depend."""
    return (
        setup.tp,
        setup.ep,
        setup.etp,
        setup.attention == "tensor",
        splits_ffn(software, setup.attention),
        software.splits_ends,
        software.keeps_whole_kv,
    )


def _summed(parameters: Iterable[Weight]) -> Elements:
    found = {"dp_cp": 0, WHOLE: 0, "edp": 0}
    for each in parameters:
        found[each.axis] += each.elements
    return Elements(*found.values())


def _on_axes(parameters: Iterable[Weight], setup: Setup, software: Software) -> list[Sized]:
    axis = axis_of_whole(setup, software)
    return [(axis if each.axis == WHOLE else each.axis, each.elements) for each in parameters]


def _stage(model: ModelShape, setup: Setup, software: Software, stage: int) -> list[Weight]:
    dense, sparse = layers_of(model, setup, stage)
    cut = _cut_of_weights(setup, software)
    first, last = _ends(model, cut, ends_at(model, setup, stage))
    return [*first, *_layer(model, cut, False) * dense, *_layer(model, cut, True) * sparse, *last]


def ends_at(model: ModelShape, setup: Setup, stage: int) -> StageEnds:
    """The parts of a model's ends that pipeline stage ``stage`` has."""
    return _ends_of(model, setup.pipeline, stage)


def _ends(model: ModelShape, cut: LayerCut, has: StageEnds) -> tuple[list[Weight], list[Weight]]:
    whole, modules = model.vocabulary * model.hidden, model.mtp_layers * has.modules
    axis, elements = ("dp_cp", -(-whole // cut.tp)) if cut.splits_ends else (WHOLE, whole)
    first = [Weight("embedding", axis, elements)] if has.embedding else []
    is_own = has.head and not (has.embedding and model.ties_embeddings)
    head = [Weight("head", axis, elements)] if is_own else []
    # Modules of multi-token prediction read the embedding, of which their stage has a copy then (Megatron-LM).
    is_there = has.embedding or (has.head and model.ties_embeddings)
    copy = [Weight("embedding", axis, elements)] if modules and not is_there else []
    two = 2 * model.hidden * model.hidden
    projections = [Weight("mtp", axis, -(-two // cut.tp) if cut.splits_ends else two)] * modules
    vectors = 3 * modules * model.hidden + has.head * (model.hidden + model.end_vectors)
    norms = [Weight("norms", WHOLE, vectors)] if vectors else []
    return first, [*copy, *projections, *norms, *head]


@lru_cache(maxsize=4096)
def _layer(model: ModelShape, cut: LayerCut, moe: bool) -> tuple[Weight, ...]:
    """Every parameter of a layer on one rank, in the order of its modules, in which what all tokens
    pass through is the last."""
    ops = sorted(layer_table(model, cut, moe), key=lambda op: op.name == "shared")
    return tuple(each for op in ops for each in op.weights)
