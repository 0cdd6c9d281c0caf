"""A transformer layer as one table of operations, in the order of its forward pass.

Each row (:class:`LayerOp`) says what an operation of one rank has, computes, moves and keeps, for each
token, row or position: sizes that depend on the model and on how it is cut over ranks
(:class:`LayerCut`), not on a micro-batch. Everything else is a fold over the rows: parameters
(mapping/parameters.py), the time of computation and of what is computed again
(mapping/layer_work.py), memory and what leaves it for the host's (mapping/memory.py). A new kind of
attention is a function here that returns its rows.

Where a model has two kinds of attention, a layer here has the rows of both, each by its part of the
layers.

Between products everything is bound by memory: elements read and written, one kernel each where
software fuses them (RMSNorm; SwiGLU; rotary embeddings; residual sums).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from commlayer.scheduler.mapping.model import (
    AttentionIndexer,
    CompressedAttention,
    LatentAttention,
    LinearAttention,
    ModelShape,
    Reach,
    head_sizes,
    kv_heads_needed,
    layer_kinds,
    linear_flops,
    mean_positions,
)

__all__ = [
    "WHOLE",
    "Core",
    "Format",
    "LayerCut",
    "LayerOp",
    "MemoryKernel",
    "Per",
    "Product",
    "Saved",
    "Weight",
    "attention_kinds",
    "layer_table",
    "model_operations",
]

WHOLE = "whole"
"""In place of an axis: all tp ranks have it."""
Per = Literal["token", "attention", "ffn", "row"]
"""The rows of a product, or what elements are counted for.

``token``: a rank's own. ``attention``, ``ffn``: those that its projections, or FFNs that all tokens
pass through, have on a rank: a tp group's where tp splits them. ``row``: of a rank's experts.
"""
Format = Literal["bf16", "operand", "cast", "recast", "routed", "gated", "output", "output_cast"]
"""How an element is kept for the backward pass.

``bf16``. ``operand``: as what goes into a product. ``cast``: the copy of that beside one in BF16;
``recast``: in place of one that is counted elsewhere. ``routed``: as what goes into experts' first
product, ``gated``: into a gated activation function. ``output``: as attention's output,
``output_cast``: as the copy of it that a product reads.
"""
_KINDS: dict[Per, str] = {"token": "dense", "ffn": "dense", "attention": "attention", "row": "experts"}
_NARROW_HEAD = 64
"""Elements of a head up to which attention is timed by its tiles."""
_CLAMPED = 8, 10
"""Elements that limiting both halves of an FFN's first products moves, forward and backward, for
each of its width: each half is read and written, and both are joined (Megatron-Core,
fusions/fused_bias_geglu.py, weighted_bias_quick_geglu_impl)."""
_BIASED = 6, 8
"""The same for the bias that experts add to their output, times a token's weight, for each hidden
element: a product, a sum, and all experts' rows joined; backward two products that are summed, over
rows and over elements, and the rows joined (Megatron-Core, transformer/moe/experts.py,
TEGroupedMLP._apply_bias, in BF16)."""
_FLASH_BACKWARD = 2.5
"""FLOPs of attention's backward pass over those of its forward: scores are made again (Dao 2022)."""


class LayerCut(NamedTuple):
    """How a layer is cut over ranks; and, from ``cp`` on, what parameters do not depend on: what a
    rank fuses and keeps of it.

    ``splits_attention``, ``splits_ffn``, ``splits_ends`` (embedding and head): whether tp does.
    ``keeps_whole_kv``: as of :class:`~commlayer.scheduler.mapping.software.Software`.
    ``keeps_sequences``, ``keeps_context``: whether sequences, or keys and values, that were
    gathered are kept for the backward pass. ``fuses_experts``: experts' biases and clamps are part
    of their products, ``fuses_activation``: and so is their activation function.
    """

    tp: int = 1
    ep: int = 1
    etp: int = 1
    splits_attention: bool = True
    splits_ffn: bool = True
    splits_ends: bool = True
    keeps_whole_kv: bool = False
    cp: int = 1
    keeps_sequences: bool = False
    keeps_context: bool = False
    fuses_experts: bool = False
    fuses_activation: bool = False


class Weight(NamedTuple):
    """A parameter on one rank.

    ``part``: ``sharded``, what heads of attention have of their own (queries and output; of latent
    attention: the projections up and the output); ``keys_values``, what they may share; ``copied``,
    what all share (of latent attention: the projections down; an indexer; the weights of
    hyper-connections); ``norms``; ``router``; ``shared``, what all tokens pass through beside the
    routed experts, as the projections to a latent space of these, and back; ``dense_ffn``;
    ``experts``, the routed ones; beside layers ``embedding``, ``head`` and ``mtp``. ``axis`` over
    which its gradient is summed: ``dp_cp``, ``edp``, or WHOLE. ``vectors``: those of its elements
    that no product multiplies, such as biases.
    """

    part: str
    axis: str
    elements: int
    vectors: int = 0


class Product(NamedTuple):
    """A matrix product [rows, inner] × [inner, columns], ``groups`` of them that share the rows.

    ``casts``: in FP8, the kernels that cast what goes in, and backward the output's gradient; None:
    one for each group. ``stays_bf16``: in every recipe.
    """

    per: Per
    inner: float
    columns: float
    groups: int = 1
    casts: tuple[int, int] | None = None
    stays_bf16: bool = False


class MemoryKernel(NamedTuple):
    """A kernel that the memory's rate bounds: elements that it reads and writes, forward and
    backward."""

    per: Per
    forward: float
    backward: float


class Core(NamedTuple):
    """The FLOPs of attention's core for each token of a tp group: for each position that it attends
    to, and by itself.

    ``backward``: FLOPs of the backward pass over those. ``narrow_heads``: a rank's, where they are
    timed by tiles. ``reach``: to which positions; None: to those that the model's windows leave,
    the mean over its layers.
    """

    per_position: float
    per_token: float
    backward: float
    narrow_heads: float = 0.0
    reach: Reach | None = None

    def flops(self, model: ModelShape, sequence: int) -> float:
        """FLOPs of a token of a tp group, forward, the mean over a sequence."""
        reach = self.reach
        positions = mean_positions(model, sequence) if reach is None else reach.positions(sequence)
        return self.per_position * positions + self.per_token


class Exchange(NamedTuple):
    """A call of the group of ``axis``, of ``elements`` for each of a rank's tokens: of its logical
    bytes, nccl-tests' S. By all_gather of blocks along ``cp``, as software does that
    (mapping/step_collectives.py)."""

    name: str
    axis: str
    collective: str
    elements: int


class Saved(NamedTuple):
    """Elements that are kept for the backward pass, per ``token`` or ``row``.

    ``remade``: the ways of recomputation, besides ``full``, that make them again (``megascale``, or
    modules). ``offload``: the module with which they go to the host's memory; empty: they stay.
    """

    elements: float
    remade: frozenset[str] = frozenset()
    offload: str = ""
    format: Format = "bf16"
    per: Per = "token"


@dataclass(frozen=True, slots=True)
class LayerOp:
    """One operation of a layer, on one rank.

    Attributes:
        name: the segment of the layer that it is part of; several operations may be of one.
        products, core, moves: what it computes.
        exchange: what it sends. The calls by which tokens go to experts and back are the
            dispatcher's (mapping/step_collectives.py); for these there are rows without one, where
            they are in a pass.
        overlaps: the segment beside whose work an exchange travels backward, and forward where
            software does that.
        saved: what is kept of its inputs. The first operation's first is the layer's own input,
            which always is.
        remade: the ways of recomputation that compute it, or send it, again, besides ``full``.
        norm: elements for each token that the norm in it reads and writes, which ``layernorm``
            computes again; 0: there is none.
        is_routed: whether it is of the routed experts, or of the ways of tokens to them and home.
        reorders: rows ``in`` the order of experts, or ``out`` of it; empty: it does not.
        part: of the model's layers, that which has it.
    """

    name: str
    weights: tuple[Weight, ...] = ()
    products: tuple[Product, ...] = ()
    core: Core | None = None
    exchange: Exchange | None = None
    overlaps: str = ""
    moves: tuple[MemoryKernel, ...] = ()
    saved: tuple[Saved, ...] = ()
    remade: frozenset[str] = frozenset()
    norm: float = 0.0
    is_routed: bool = False
    reorders: Literal["", "in", "out"] = ""
    part: float = 1.0

    @property
    def kind(self) -> str:
        """The part of a step's time as which its computation counts: ``attention``, ``experts``,
        ``dense``, or ``memory``."""
        if self.core is not None:
            return "attention"
        return _KINDS[self.products[0].per] if self.products else "memory"


@lru_cache(maxsize=1 << 14)
def layer_table(model: ModelShape, cut: LayerCut, is_moe: bool) -> tuple[LayerOp, ...]:
    """The operations of a layer with experts, or with a dense FFN, in the order of its forward
    pass."""
    return tuple(_rows(model, cut, is_moe, _attention(model, cut)))


def model_operations(model: ModelShape) -> Iterator[tuple[LayerOp, int]]:
    """Each operation of the layers of a whole model, as a rank has it that shares with nobody, and
    how many layers have it: modules for more tokens too, with the first kind of attention and the
    last layer's FFN."""
    uncut, kinds, extra = LayerCut(), layer_kinds(model), model.mtp_layers
    for place, (ops, layers) in enumerate(attention_kinds(model, uncut)):
        yield from ((op, layers + extra * (place == 0)) for op in ops)
    for is_moe in (True, False):
        number = kinds.count(is_moe) + extra * (kinds[-1] is is_moe)
        if number:
            yield from ((op, number) for op in _rows(model, uncut, is_moe, ()))


def _rows(model: ModelShape, cut: LayerCut, is_moe: bool, attention: Iterable[LayerOp]) -> Iterator[LayerOp]:
    hidden, sequence = model.hidden, cut.tp * model.hidden
    norm = Weight("norms", WHOLE, hidden)
    normed = _ways("megascale layernorm")
    gathers = cut.splits_attention and cut.keeps_sequences
    streams = [_streams(model)] if model.streams > 1 else []
    yield from streams
    yield LayerOp(
        "norm",
        weights=(norm,),
        moves=(MemoryKernel("token", 2 * hidden, 4 * hidden),),
        saved=(
            # but for latent attention the norm is one kernel with the projections, and its input leaves with theirs
            Saved(hidden, offload="qkv_linear" if model.latent is None else "attn_norm"),
            Saved(hidden, normed, "qkv_linear", "operand"),
            Saved((sequence - hidden) * gathers, _ways("megascale")),
        ),
        remade=_ways("megascale"),
        norm=2 * hidden,
    )
    yield from attention
    if not is_moe and model.without_ffn:
        return
    yield from streams
    yield LayerOp(
        "middle",  # the residual sum with the norm before the FFN, and the layer's last residual sum
        weights=(norm,),
        moves=(MemoryKernel("token", 5 * hidden, 6 * hidden), MemoryKernel("token", 3 * hidden, 2 * hidden)),
        saved=(
            Saved(hidden, offload="mlp_norm" if is_moe else ""),
            Saved(hidden, normed),
        ),
        remade=_ways("megascale"),
        norm=2 * hidden,
    )
    if not is_moe:  # of width 0 where the model has no dense layers, and nobody asks but memory's buffers
        yield from _ffn(model, cut, "dense_ffn", model.dense_width)
        return
    before, shared, after = _ffn(model, cut, "shared", model.shared_width)
    yield LayerOp(
        "router",
        weights=(Weight("router", WHOLE, model.experts * hidden + model.moe_vectors, model.moe_vectors),),
        products=(Product("token", hidden, model.experts, stays_bf16=True),),
        remade=_ways("moe"),
    )
    yield LayerOp("balance")  # its losses look at the tokens of all ranks, where software does that
    yield LayerOp("counts", remade=_ways("moe"))
    yield from (before, shared) if model.shared_width else ()
    yield from (_latent_experts(model, model.expert_hidden),) if model.expert_hidden else ()
    yield from (replace(op, is_routed=True) for op in _experts(model, cut))
    yield from (after,) if model.shared_width else ()


def _streams(model: ModelShape) -> LayerOp:
    """Hyper-connections before attention or an FFN: of all streams, normed together, one product
    makes the weights by which they are read, mixed and written to (DeepSeek-V4, section 2.2)."""
    number, elements = model.streams, model.streams * model.hidden
    weights = number * (number + 2)
    vectors = weights + 3  # a base of each weight, and three scales
    return LayerOp(
        "streams",
        weights=(Weight("copied", WHOLE, weights * elements + vectors, vectors),),
        products=(Product("token", elements, weights),),
        # one sum of them is read; then they, and what is added to them, are read, and they are written
        moves=(MemoryKernel("token", 3 * elements + 2 * model.hidden, 6 * elements + 4 * model.hidden),),
        saved=(Saved(elements),),
    )


def _attention(model: ModelShape, cut: LayerCut) -> Iterator[LayerOp]:
    """The rows of each kind of attention that the model has, by its part of the layers. What the
    first of them sends, all layers are taken to send."""
    kinds = attention_kinds(model, cut)
    for kind, (ops, layers) in enumerate(kinds):
        for op in ops:
            if op.exchange is not None:
                yield from [op] * (kind == 0)
            elif len(kinds) == 1:
                yield op
            else:
                weights = [each._replace(elements=round(each.elements * layers / model.layers)) for each in op.weights]
                yield replace(op, weights=tuple(weights), part=layers / model.layers)


def attention_kinds(model: ModelShape, cut: LayerCut) -> list[tuple[tuple[LayerOp, ...], int]]:
    """The rows of each kind of attention that the model has, and in how many of its layers it
    is. Modules for more tokens have the first."""
    kinds = [(tuple(_softmax(each, cut, scores)), layers) for each, scores, layers in _scored(model)]
    if model.linear is not None:
        kinds.append((tuple(_linear(model.linear, model.hidden, cut)), model.linear.layers))
    return [(ops, layers) for ops, layers in kinds if layers]


class _Scores(NamedTuple):
    """The scores of one kind of attention.

    ``reach``: to which positions, as of :class:`Core`. ``indexer``: what chooses these; ``is_own``:
    and scores them in the same layer. ``rate``: tokens of an entry behind the window of compressed
    attention; 0: there are none.
    """

    reach: Reach | None = None
    indexer: AttentionIndexer | None = None
    is_own: bool = False
    rate: int = 0


def _scored(model: ModelShape) -> Iterator[tuple[ModelShape, _Scores, int]]:
    """The kinds of attention with scores, each with the model as its layers have it, and how many
    these are."""
    window, indexer, compressed = model.window, model.indexer, model.compressed
    if compressed is not None:
        chosen = Reach(indexer.top_k if indexer else 0, compressed.sparse_rate)
        sparse = _Scores(chosen, indexer, True, compressed.sparse_rate)
        dense = _Scores(Reach(stride=compressed.dense_rate), rate=compressed.dense_rate)
        alone = model.layers - compressed.sparse_layers - compressed.dense_layers
        yield model, _Scores(), alone
        yield model, sparse, compressed.sparse_layers
        yield model, dense, compressed.dense_layers
    elif indexer is not None:
        chosen = Reach(indexer.top_k)
        yield model, _Scores(chosen, indexer, is_own=True), indexer.scored_layers
        yield model, _Scores(chosen, indexer), indexer.layers - indexer.scored_layers
        yield model, _Scores(Reach()), model.softmax_layers - indexer.layers
    elif window is not None and window.heads:
        reach = Reach(window.tokens, chunked=window.chunked)
        own = replace(model, heads=window.heads, kv_heads=window.kv_heads, vectors=window.vectors, window=None)
        yield replace(model, window=None), _Scores(Reach()), model.softmax_layers - window.layers
        yield own, _Scores(reach), window.layers
    else:
        yield model, _Scores(), model.softmax_layers


def _softmax(model: ModelShape, cut: LayerCut, scores: _Scores) -> Iterator[LayerOp]:
    """Attention with scores, of grouped queries, latent or compressed. A window changes nothing
    that is kept: scores never are."""
    hidden, tp = model.hidden, cut.tp
    parts, axis = (tp, "dp_cp") if cut.splits_attention else (1, WHOLE)
    query, key_value, value = head_sizes(model)
    needed, sequence = kv_heads_needed(model, tp), tp * hidden
    megascale = _ways("megascale")
    if cut.splits_attention:
        gathered = Exchange("sequence", "tp", "all_gather", sequence)
        yield LayerOp("before_attention", exchange=gathered, overlaps="projections", remade=megascale)
    yield from _projected(model, cut, scores)
    rotated: float = model.head_dim * (model.heads + model.kv_heads)
    if model.latent is not None:
        rotated = model.latent.rope_dim * (model.heads + 1)
    elif model.compressed is not None:  # of queries, keys and the output
        rotated = model.compressed.rope_dim * (2 * model.heads + 1)
    rotated = 2 * rotated / parts
    expanded = _ways("mla_up_proj" if model.latent else "")
    yield LayerOp("rotation", moves=(MemoryKernel("attention", rotated, rotated),), remade=expanded)
    if not cut.splits_attention:
        to_heads = model.heads * query + sum(needed) * key_value
        yield LayerOp("before_attention", exchange=Exchange("heads", "tp", "all_to_all_v", to_heads))
    context = tp * max(needed) * key_value
    yield LayerOp("context", exchange=Exchange("context", "cp", "all_gather", context), overlaps="core")
    yield from _core(model, cut, scores, context)
    if not cut.splits_attention:
        to_rows = Exchange("rows", "tp", "all_to_all_v", model.heads * value)
        yield LayerOp("after_attention", exchange=to_rows, remade=megascale)
    joined, width = model.compressed, model.heads * value
    if joined is not None:  # groups of heads, each projected by itself
        yield LayerOp(
            "out",
            weights=(Weight("sharded", axis, width * joined.out_rank // parts),),
            products=(Product("attention", width / parts, joined.out_rank),),
            saved=(Saved(width, megascale, "attn_proj"),),
        )
        width = joined.groups * joined.out_rank
    yield LayerOp(
        "out",
        weights=(
            Weight("sharded", axis, width * hidden // parts),
            *([Weight("norms", WHOLE, model.vectors)] if model.vectors else []),
        ),
        products=(Product("attention", width / parts, hidden),),
        saved=_into_out(width, cut),
    )
    if cut.splits_attention:
        yield LayerOp("after_attention", exchange=Exchange("attention_sum", "tp", "reduce_scatter", sequence))


def _projected(model: ModelShape, cut: LayerCut, scores: _Scores) -> Iterator[LayerOp]:
    """The projections of queries, keys and values, of a gate, and of what chooses positions."""
    if model.compressed is not None:
        yield from _compressed(model, model.compressed, cut, scores)
    elif model.latent is not None:
        yield from _latent(model, model.latent, cut)
    else:
        yield from _grouped_queries(model, cut)
    if scores.indexer is not None and scores.is_own:
        yield _indexer(model, scores.indexer, cut, scores.rate)


def _core(model: ModelShape, cut: LayerCut, scores: _Scores, context: int) -> Iterator[LayerOp]:
    """Scores, and values by them. ``context``: elements of all heads' keys and values.

    Where positions are chosen, each token has keys of its own, which all heads of latent attention
    share then, as they are in the latent space (DeepSeek-V3.2, section 2.1).
    """
    query, key_value, value = head_sizes(model)
    heads = model.heads / cut.tp
    expanded = _ways("mla_up_proj" if model.latent else "")
    queries = model.heads * (1 + (model.gated_attention and model.latent is None)) * query
    # tp ranks hold at least one head each
    keys = (model.heads if model.latent else max(model.kv_heads, cut.tp)) * key_value
    read, output, reach = key_value, model.heads * value, scores.reach
    if model.compressed is not None:
        read, keys = 2 * query, cut.tp * query  # keys are the values
        behind, reach = scores.reach, Reach(model.compressed.window)
        if behind is not None and scores.rate:
            entries = Saved(cut.tp * query / scores.rate, offload="core_attn")
            yield LayerOp(
                "core",
                core=Core(2.0 * read * heads, 0.0, _FLASH_BACKWARD, reach=behind),
                saved=(entries,),
                remade=_ways("core_attn"),
            )
    elif model.latent is not None and scores.indexer is not None:
        shared, rank = model.latent.kv_rank + model.latent.rope_dim, model.latent.kv_rank
        read, queries, keys, output = shared + rank, model.heads * shared, cut.tp * shared, model.heads * rank
        yield LayerOp("out", saved=(Saved(model.heads * value, _ways("megascale"), "attn_proj"),))
    is_narrow = model.latent is None and model.head_dim <= _NARROW_HEAD and reach is None
    yield LayerOp(
        "core",
        core=Core(2.0 * read * heads, 0.0, _FLASH_BACKWARD, heads if is_narrow else 0.0, reach),
        saved=(
            Saved(queries + keys, expanded, "core_attn"),
            Saved(output, offload="core_attn", format="output"),
            Saved((cut.cp - 1) * context * cut.keeps_context),
        ),
        remade=_ways("core_attn"),
    )


def _indexer(model: ModelShape, indexer: AttentionIndexer, cut: LayerCut, rate: int) -> LayerOp:
    """The projections and the scores of an indexer, over all earlier positions, or over entries of
    ``rate`` tokens; each tp rank has it whole. Its backward pass is taken to make the gradients of
    all scores, although later training only looks at those of chosen positions."""
    latent, compressed = model.latent, model.compressed
    inner = latent.q_rank if latent is not None else compressed.q_rank if compressed is not None else 0
    hidden, size, queries = model.hidden, indexer.head_dim, indexer.heads * indexer.head_dim
    weighed = indexer.heads * indexer.weighs_heads
    keys, norms, stride = size, 2 * size, indexer.pool
    if rate:  # two of each entry, and gates that weigh its tokens, with a bias of each place
        keys, norms, stride = 4 * size, size + 2 * rate * size, rate
    elif indexer.pool > 1:
        keys, norms = 2 * size, norms + indexer.pool * size
    gathered = cut.tp if cut.splits_attention else 1
    return LayerOp(
        "indexer",
        weights=(
            Weight("copied", WHOLE, (inner or hidden) * queries + hidden * (keys + weighed)),
            Weight("norms", WHOLE, norms),
        ),
        products=(
            Product("attention", inner or hidden, queries),
            Product("attention", hidden, keys + weighed),
        ),
        core=Core(2.0 * queries, 0.0, 2.0, reach=Reach(stride=stride)),
        # queries, keys, and the chosen positions, four bytes each
        saved=(Saved(gathered * (queries + keys + 2 * indexer.top_k)),),
    )


def _into_out(output: int, cut: LayerCut) -> tuple[Saved, ...]:
    """List what the projection behind attention keeps beside attention itself: rows, after Ulysses'
    exchange, and a cast copy."""
    rows = () if cut.splits_attention else (Saved(output, _ways("megascale"), "attn_proj", "output"),)
    return (*rows, Saved(output, _ways("megascale"), "attn_proj", "output_cast"))


def _grouped_queries(model: ModelShape, cut: LayerCut) -> Iterator[LayerOp]:
    parts, axis = (cut.tp, "dp_cp") if cut.splits_attention else (1, WHOLE)
    hidden, size, bias = model.hidden, model.head_dim, int(model.qkv_bias)
    queries = model.heads * (1 + model.gated_attention)
    keys = max(model.kv_heads / parts, 1.0)  # fewer key-value heads than ranks: each has one
    is_whole = model.kv_heads % parts != 0 and cut.keeps_whole_kv
    of_keys, kv_heads = (WHOLE, model.kv_heads) if is_whole else (axis, -(-model.kv_heads // parts))
    both, rank = (size, model.value_dim or size), model.query_rank
    if rank:
        yield LayerOp(
            "projections",
            weights=(Weight("copied", WHOLE, hidden * rank), Weight("norms", WHOLE, rank)),
            products=(Product("attention", hidden, rank),),
            saved=(Saved(rank, _ways("megascale"), "qkv_linear"),),
        )
    inner = rank or hidden
    yield LayerOp(
        "projections",
        weights=(
            Weight("sharded", axis, queries * size * (inner + bias) // parts, queries * size * bias // parts),
            *[
                Weight("keys_values", of_keys, kv_heads * each * (hidden + bias), kv_heads * each * bias)
                for each in both
            ],
        ),
        products=(
            (Product("attention", rank, queries / parts * size), Product("attention", hidden, keys * sum(both)))
            if rank
            else (Product("attention", hidden, queries / parts * size + keys * sum(both)),)
        ),
    )


def _compressed(
    model: ModelShape, compressed: CompressedAttention, cut: LayerCut, scores: _Scores
) -> Iterator[LayerOp]:
    """Queries of a low rank, one head of keys that are the values too, and what makes entries of
    several tokens: elements and gates that weigh them. Where entries are chosen, each is made of
    two such, of its own tokens and of those before (DeepSeek-V4, section 2.3.1)."""
    parts, axis = (cut.tp, "dp_cp") if cut.splits_attention else (1, WHOLE)
    hidden, size, rank = model.hidden, model.head_dim, compressed.q_rank
    columns = (4 * size if scores.indexer else 2 * size) if scores.rate else 0
    places = columns // 2 * scores.rate + size * (scores.rate > 0)  # a bias of each place, and a norm
    megascale = _ways("megascale")
    yield LayerOp(
        "projections",
        weights=(
            Weight("copied", WHOLE, hidden * (rank + size + columns)),
            Weight("norms", WHOLE, rank + size + places),
            Weight("sharded", axis, rank * model.heads * size // parts),
        ),
        products=(
            Product("attention", hidden, rank + size + columns),
            Product("attention", rank, model.heads * size / parts),
        ),
        saved=(
            Saved(rank + size + columns, megascale, "qkv_linear"),
            Saved(rank, megascale, "qkv_linear", "operand"),
        ),
    )


def _latent(model: ModelShape, latent: LatentAttention, cut: LayerCut) -> Iterator[LayerOp]:
    """Projections down, one product for both, and up. Layers of the latter have the norms in them
    (Transformer Engine's), and ``mla_up_proj`` makes these again too (DeepSeek-V3, section
    3.2.3)."""
    parts, axis = (cut.tp, "dp_cp") if cut.splits_attention else (1, WHOLE)
    hidden, heads, ranks = model.hidden, model.heads, latent.q_rank + latent.kv_rank
    key, inner = latent.nope_dim + latent.rope_dim, latent.q_rank or model.hidden
    query_down = Weight("copied", WHOLE, hidden * latent.q_rank), Weight("norms", WHOLE, latent.q_rank)
    megascale = _ways("megascale")
    yield LayerOp(
        "projections",
        weights=(*(query_down if latent.q_rank else ()), Weight("sharded", axis, inner * heads * key // parts)),
        products=(Product("attention", inner, heads * key / parts),),
        remade=_ways("mla_up_proj"),
    )
    yield LayerOp(
        "projections",
        weights=(
            Weight("copied", WHOLE, hidden * (latent.kv_rank + latent.rope_dim)),
            Weight("norms", WHOLE, latent.kv_rank),
        ),
        products=(Product("attention", hidden, ranks + latent.rope_dim),),
        saved=(
            Saved(ranks + latent.rope_dim, megascale, "qkv_linear"),
            Saved(ranks, megascale | {"mla_up_proj"}, "qkv_linear", "operand"),
        ),
    )
    if model.gated_attention:
        gate = heads * latent.value_dim
        yield LayerOp(
            "projections",
            weights=(Weight("sharded", axis, hidden * gate // parts),),
            products=(Product("attention", hidden, gate / parts),),
            saved=(Saved(gate, offload="core_attn"),),
        )
    expanded = heads * (latent.nope_dim + latent.value_dim)
    yield LayerOp(
        "projections",
        weights=(Weight("sharded", axis, latent.kv_rank * expanded // parts),),
        products=(Product("attention", latent.kv_rank, expanded / parts),),
        remade=_ways("mla_up_proj"),
    )


def _linear(linear: LinearAttention, hidden: int, cut: LayerCut) -> Iterator[LayerOp]:
    """Attention with a state in place of scores, split over tp by heads."""
    parts, axis = (cut.tp, "dp_cp") if cut.splits_attention else (1, WHOLE)
    keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
    projected = 2 if linear.kind != "kda" or linear.full_rank_gate else 1  # values, and a gate
    yield LayerOp(
        "projections",  # of queries, keys, values and the gate
        weights=(Weight("sharded", axis, hidden * (2 * keys + projected * values) // parts),),
        products=(Product("attention", hidden, 2 * keys / parts + projected * values / parts),),
    )
    if linear.kind == "kda":
        # Decays, and a gate, are projections of a low rank, through the size of one head (Kimi Linear, arXiv:2510.26692,
        # section 4).
        elements, inner = keys + (2 - projected) * values, (3 - projected) * linear.value_dim
        yield LayerOp(
            "projections",
            weights=(
                Weight("copied", WHOLE, hidden * inner),
                Weight("sharded", axis, linear.value_dim * elements // parts),
            ),
            products=(
                Product("attention", hidden, inner),
                Product("attention", linear.value_dim, elements / parts),
            ),
            saved=(Saved(inner, _ways("megascale")), Saved(elements, offload="core_attn")),
        )
    gated = (2 * keys + 3 * values) / parts  # what goes into the core, its output, and the gate's product with that
    yield LayerOp("rotation", moves=(MemoryKernel("attention", gated, 2 * gated),))
    yield LayerOp(
        "core",
        core=Core(0.0, linear_flops(linear) / cut.tp, 2.0),
        saved=(
            Saved(2 * (keys + values), offload="core_attn"),
            Saved(values, offload="core_attn", format="output"),
        ),
        remade=_ways("core_attn"),
    )
    yield LayerOp(
        "out",
        weights=(Weight("sharded", axis, values * hidden // parts), *_state_weights(linear, hidden, parts, axis)),
        products=(Product("attention", values / parts, hidden),),
        saved=_into_out(values, cut),
    )


def _state_weights(linear: LinearAttention, hidden: int, parts: int, axis: str) -> list[Weight]:
    """The parameters of linear attention beside its projections."""
    keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
    if linear.kind == "lightning":
        return [Weight("norms", WHOLE, values)]
    heads, kernel = linear.value_heads, linear.kernel
    steps, taps, vectors = {  # columns of steps (and decays), a convolution's taps, and vectors
        "gated_delta": (2 * heads, kernel, 2 * heads + linear.value_dim),
        "kda": (heads, kernel, keys + heads + linear.value_dim),
        "mamba2": (heads, kernel + 1, 3 * heads + values),
    }[linear.kind]
    return [
        Weight("sharded", axis, hidden * steps // parts),
        Weight("sharded", axis, (2 * keys + values) * taps // parts),
        Weight("norms", WHOLE, vectors),
    ]


def _latent_experts(model: ModelShape, latent: int) -> LayerOp:
    """The projections to the space of the routed experts, and back from it (LatentMoE). Both are
    timed before tokens travel, although the second comes after."""
    both = 2 * model.hidden * latent
    return LayerOp(
        "latent_experts",
        weights=(Weight("shared", WHOLE, both),),
        products=(Product("token", model.hidden, latent), Product("token", latent, model.hidden)),
        saved=(Saved(latent, _ways("moe")),),
        remade=_ways("moe"),
    )


def _experts(model: ModelShape, cut: LayerCut) -> Iterator[LayerOp]:
    """The routed experts, and the ways of tokens to them and home. What ``permute`` and
    ``unpermute`` move depends on how tokens come (mapping/layer_work.py)."""
    hidden, matrices, width = model.routed_hidden, model.matrices, model.width / cut.etp
    moe, held, local = _ways("moe"), -(-model.experts // cut.ep), max(1, model.experts // cut.ep)
    again = moe | {"megascale"}
    yield LayerOp("permute", reorders="in", remade=again)
    yield LayerOp("dispatch", remade=again)
    yield LayerOp("gather_experts", remade=again)
    weights = [Weight("experts", "edp", held * -(-model.width // cut.etp) * hidden)] * matrices
    if model.expert_vectors:
        vectors = -(-held * model.expert_vectors // cut.etp)
        weights.append(Weight("experts", "edp", vectors, vectors))
    inner = (matrices - 1) * width
    # Where they are fused, all groups' rows are cast by one kernel, and the first products hand on what the last ones
    # read, as these do backward (Transformer Engine, ops/fused/grouped_mlp.py).
    casts = ((1, 0), (0, 1)) if cut.fuses_activation else (None, None)
    yield LayerOp(
        "experts",
        weights=tuple(weights),
        products=(
            Product("row", hidden, inner, local, casts[0]),
            Product("row", width, hidden, local, casts[1]),
        ),
        saved=(Saved(hidden, again, "expert_fc1", "routed", "row"),),
        remade=moe,
    )
    moves = [MemoryKernel("row", matrices * width, (2 * matrices - 1) * width)] if not cut.fuses_activation else []
    if model.clamps and not cut.fuses_experts:
        moves.append(MemoryKernel("row", *(number * width for number in _CLAMPED)))
    yield LayerOp(
        "expert_memory",
        moves=tuple(moves),
        saved=(
            Saved(inner, moe, "moe_act", "gated" if model.gated else "bf16", "row"),
            Saved(width, again | {"moe_act"}, "", "operand", "row"),
        ),
        remade=again | {"moe_act"},
    )
    if model.expert_vectors and not cut.fuses_experts:
        yield LayerOp(
            "expert_biases", moves=(MemoryKernel("row", *(number * hidden for number in _BIASED)),), remade=moe
        )
    yield LayerOp("scatter_experts", remade=moe)
    yield LayerOp("combine", remade=moe)
    yield LayerOp("unpermute", reorders="out", remade=moe)


def _ffn(model: ModelShape, cut: LayerCut, part: str, width: int) -> tuple[LayerOp, LayerOp, LayerOp]:
    """The FFN that every token goes through, alone in its layer or beside the routed experts. Where
    tp splits it, the sequence is gathered before it, and the sums are scattered."""
    parts, axis = (cut.tp, "dp_cp") if cut.splits_ffn else (1, WHOLE)
    hidden, matrices, inner = model.hidden, model.matrices, (model.matrices - 1) * width
    is_shared = part == "shared"
    remade = _ways("moe shared_experts" if is_shared else "mlp")
    gathered = cut.tp * hidden * cut.splits_ffn
    sequence = gathered * (cut.tp > 1 and cut.splits_attention and cut.keeps_sequences)
    saved = [
        # beside experts a router needs it in BF16 as well
        Saved(hidden, remade | {"megascale", "layernorm"}, format="cast" if is_shared else "recast"),
        Saved(inner, remade, format="gated" if model.gated else "bf16"),
        Saved(width, remade | {"megascale"}, format="operand"),
        Saved(sequence, _ways("megascale moe mlp shared_experts")),
    ]
    shared = LayerOp(
        "shared",
        weights=(Weight(part, axis, -(-width // parts) * hidden),) * matrices,
        products=(Product("ffn", hidden, inner / parts), Product("ffn", width / parts, hidden)),
        moves=(MemoryKernel("ffn", matrices * width / parts, (2 * matrices - 1) * width / parts),),
        saved=tuple(saved),
        remade=remade,
    )
    gather = Exchange("ffn_sequence", "tp", "all_gather", gathered)
    scatter = Exchange("ffn_sum", "tp", "reduce_scatter", gathered)
    return (
        LayerOp("before_ffn", exchange=gather, overlaps="shared", remade=remade),
        shared,
        LayerOp("after_ffn", exchange=scatter, remade=remade),
    )


def _ways(words: str) -> frozenset[str]:
    return frozenset(words.split())
