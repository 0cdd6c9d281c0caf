"""A model's shape: the numbers that parameters, FLOPs, activations and traffic follow from."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal, get_args

from commlayer.profiles.errors import UsageError

__all__ = [
    "MOST_LAYERS",
    "MOST_OF_A_SIZE",
    "AttentionIndexer",
    "AttentionWindow",
    "CompressedAttention",
    "LatentAttention",
    "LinearAttention",
    "LinearKind",
    "ModelShape",
    "Reach",
    "head_sizes",
    "kv_heads_needed",
    "kv_heads_of_rank",
    "layer_kinds",
    "linear_flops",
    "mean_positions",
    "mean_tiles",
    "mechanisms",
    "split_by_tp",
]

LinearKind = Literal["lightning", "gated_delta", "kda", "mamba2"]
MOST_LAYERS, MOST_OF_A_SIZE = 10_000, 10**9
"""Bounds of what a model can have, above which a file is damaged, and nothing ends."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): queries, keys and values go through low ranks.

    ``q_rank`` 0: queries are projected directly. A head's query and key have ``nope_dim`` + ``rope_dim`` elements, its
    value has ``value_dim``; the rotated part of the key is shared by all heads.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The part of a sequence that a token of ``layers`` of the model's layers attends to.

    ``tokens`` before it and itself among them; where ``chunked``, those of them that are in its own chunk of so many (Llama 4).
    ``heads``, ``kv_heads``: of these layers, where they have others than the model's (0: they have
    not); ``vectors``, as of :class:`ModelShape`, is theirs then.
    """

    tokens: int
    layers: int
    chunked: bool = False
    heads: int = 0
    kv_heads: int = 0
    vectors: int = 0


@dataclass(frozen=True, slots=True)
class AttentionIndexer:
    """A small attention that chooses the positions that the large one attends to.

    It scores every earlier position by ``heads`` queries of ``head_dim`` and one key, and ``top_k``
    positions are attended to (DeepSeek-V3.2, arXiv:2512.02556, section 2.1). Of a model's layers
    ``layers`` attend so; ``scored_layers`` of these score, the others take over what the layer
    before them chose (GLM-5.2). ``weighs_heads``: a projection weighs the heads' scores, else they
    are one group each (MiniMax-M3). ``pool``: what is scored are keys of so many positions, as gates
    weigh them (GLM-5.3).
    """

    heads: int
    head_dim: int
    top_k: int
    layers: int
    scored_layers: int
    weighs_heads: bool = True
    pool: int = 1


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """Attention over the last tokens, and one entry for several tokens before them (DeepSeek-V4,
    arXiv:2606.19348, section 2.3).

    Keys have one head, and are the values as well. Queries go through ``q_rank``. The output of
    each of ``groups`` of heads is projected to ``out_rank``, and all of these to the hidden size.
    Every layer attends to the last ``window`` tokens; ``sparse_layers`` also to entries of
    ``sparse_rate`` tokens that the model's indexer chooses, ``dense_layers`` to all entries of
    ``dense_rate`` tokens.
    """

    q_rank: int
    rope_dim: int
    groups: int
    out_rank: int
    window: int
    sparse_layers: int
    sparse_rate: int
    dense_layers: int
    dense_rate: int


@dataclass(frozen=True, slots=True)
class Reach:
    """The positions that a token attends to: of one in ``stride``, all before it, or the last
    ``tokens`` of them; where ``chunked``, those in its own chunk of so many."""

    tokens: int = 0
    stride: int = 1
    chunked: bool = False

    def positions(self, sequence: int) -> float:
        """Count them, the mean over the tokens of a sequence. Causal attention meets (s + 1) / 2;
        taken is s / 2. In a window of w tokens it is w, less for the first w: w - w² / 2s."""
        length = sequence / self.stride
        if not self.tokens:
            return length / 2
        size = min(self.tokens, length)
        if self.chunked:
            full, rest = divmod(length, size)
            return (full * size * size + rest * rest) / 2 / length
        return size - size * size / 2 / length


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Attention with a state of fixed size in place of scores, in ``layers`` of the model's layers.

    ``lightning`` (MiniMax-01, arXiv:2501.08313): queries, keys, values, a gate and the output, of ``value_heads`` heads of
    ``value_dim``; ``key_heads`` and ``key_dim`` are the same. ``gated_delta`` (Gated Delta Networks, arXiv:2412.06464;
    Qwen3-Next): queries and keys have ``key_heads`` heads of ``key_dim``, values and gate ``value_heads`` of ``value_dim``, and
    queries, keys and values go through a short convolution of ``kernel`` positions. ``kda`` (Kimi
    Delta Attention, arXiv:2510.26692): the same with a decay of each element of a key, which comes
    from a projection through one head's size, and so does the gate unless
    ``full_rank_gate``. ``mamba2`` (arXiv:2405.21060; Nemotron-H): ``key_heads`` are its groups,
    ``key_dim`` the state's size, values and gate as above; its convolution has biases.
    """

    kind: LinearKind
    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 0
    full_rank_gate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder of layers with experts or with a dense FFN, in elements.

    A model without experts has ``dense_layers`` = ``layers``, and 1 as ``experts``, ``top_k`` and ``width``.

    Attributes:
        layers: in all; ``dense_layers`` of them have one dense FFN of width ``dense_width``, the others experts.
        dense_at: which layers are dense, from 0; empty: the first ``dense_layers``.
        hidden, heads, kv_heads, head_dim: of attention. ``kv_heads`` is heads / m in MegaScale-MoE's table 1.
        experts, top_k, width: routed experts of a MoE layer, how many each token takes, and an expert's inner width.
        router_groups, router_group_limit: experts are in so many equal groups (DeepSeek's n_group), and those of a token in at
            most so many of them (topk_group).
        shared_width: inner width of what every token passes through beside them; 0: none.
        vocabulary: of the embedding, and of the head unless ``ties_embeddings``.
        gated: an FFN has three matrices (SwiGLU), else two.
        qkv_bias: whether the projections of queries, keys and values have one.
        value_dim: elements of a head's value; 0: ``head_dim`` (MiMo-V2's are fewer).
        query_rank: queries are projected through so many elements, with a norm (Step-3); 0: directly.
        gated_attention: whether the attention's output has a gate, which the projection of queries makes too (Qwen3-Next).
        clamps: the inputs of the experts' activation function are limited (gpt-oss's swiglu_limit).
        latent: in place of grouped queries.
        window: where not all layers attend to the whole sequence.
        linear: the attention of those layers that have no scores.
        indexer: what chooses the positions that attention attends to, in some layers or in all.
        compressed: in place of grouped queries and of latent attention.
        without_ffn: the dense layers have no FFN, and no norm before one: attention alone, as those
            of Nemotron-H that another mixing layer follows.
        expert_hidden: elements of a token as routed experts have it, and as it travels to them: it is
            projected to these before, and back after (LatentMoE, arXiv:2601.18089); 0: ``hidden``.
        streams: residual streams that every layer mixes, before attention and before the FFN
            (hyper-connections, arXiv:2512.24880); 1: one residual sum.
        approximates: what the described model has and this shape leaves out, and about how much
            that weighs; empty: nothing.
        mtp_layers: modules of multi-token prediction that are trained, beside ``layers`` (DeepSeek-V3, section 2.2): each has two
            norms, a projection of two hidden states to one, a layer as the model's last, and a norm; embedding and head are
            the model's.
        vectors, moe_vectors, expert_vectors, end_vectors: elements of vectors that nothing else here counts, of each layer that
            has scores (norms of queries and keys, sinks, the output's bias), of each one with experts (the router's bias, a
            shared expert's gate), of each expert (biases), and at the model's end (the head's bias).
        rotary_base, norm_epsilon: the base of rotary embeddings and the epsilon of norms, which change no size and no time, for
            exports; 0: unknown.
        family: whose compute efficiency is calibrated together (:mod:`commlayer.scheduler.mapping.compute`); the name if empty.
        published: parameters in all as published, 0 where nobody did. ``source``: where the numbers come from.

    Raises:
        UsageError: a number out of its range, or numbers that do not go together; names the field.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    width: int
    vocabulary: int
    router_groups: int = 1
    router_group_limit: int = 1
    shared_width: int = 0
    dense_layers: int = 0
    dense_width: int = 0
    dense_at: tuple[int, ...] = ()
    gated: bool = True
    ties_embeddings: bool = False
    value_dim: int = 0
    query_rank: int = 0
    qkv_bias: bool = False
    gated_attention: bool = False
    clamps: bool = False
    latent: LatentAttention | None = None
    window: AttentionWindow | None = None
    linear: LinearAttention | None = None
    indexer: AttentionIndexer | None = None
    compressed: CompressedAttention | None = None
    without_ffn: bool = False
    expert_hidden: int = 0
    streams: int = 1
    mtp_layers: int = 0
    vectors: int = 0
    moe_vectors: int = 0
    expert_vectors: int = 0
    end_vectors: int = 0
    rotary_base: float = 0.0
    norm_epsilon: float = 0.0
    family: str = ""
    published: float = 0.0
    source: str = ""
    approximates: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in _MAY_BE_NONE else 1
            if field.type == "int" and (type(value) is not int or value < least):
                raise UsageError(
                    f"model {self.name!r}, {field.name}: expected a whole number of at least {least}, got {value!r}"
                )
            most = MOST_LAYERS if field.name == "layers" else MOST_OF_A_SIZE
            if field.type == "int" and value > most:
                raise UsageError(f"model {self.name!r}, {field.name}: expected at most {most:,}, got {value}")
        indexer = self.indexer
        rules = {
            "rotary_base": (0 <= self.rotary_base < math.inf, "a number of at least 0"),
            "norm_epsilon": (0 <= self.norm_epsilon < 1, "a number from 0 to 1"),
            "kv_heads": (self.heads % self.kv_heads == 0, f"a divisor of heads={self.heads}"),
            "top_k": (self.top_k <= self.experts, f"at most experts={self.experts}"),
            "router_groups": (not self.experts % self.router_groups, f"a divisor of experts={self.experts}"),
            "router_group_limit": (
                self.router_group_limit <= self.router_groups
                and self.top_k * self.router_groups <= self.router_group_limit * self.experts,
                f"at most router_groups={self.router_groups}, and room for top_k={self.top_k} in them",
            ),
            "dense_layers": (self.dense_layers <= self.layers, f"at most layers={self.layers}"),
            "dense_width": (
                not self.dense_width if self.without_ffn else bool(self.dense_width) or not self.dense_layers,
                "0, as no dense layer has an FFN" if self.without_ffn else "the width of the dense layers",
            ),
            "dense_at": (
                not self.dense_at
                or (
                    self.dense_at == tuple(sorted(set(self.dense_at)))
                    and len(self.dense_at) == self.dense_layers
                    and 0 <= self.dense_at[0] <= self.dense_at[-1] < self.layers
                ),
                f"the dense_layers={self.dense_layers} of them, ascending, each below layers={self.layers}",
            ),
            "window": (
                self.window is None or (self.window.tokens > 0 and 0 < self.window.layers <= self.softmax_layers),
                f"at least one token, in 1 to {self.softmax_layers} layers",
            ),
            "mtp_layers": (self.mtp_layers <= self.layers, f"at most layers={self.layers}"),
            "linear": (self.linear is None or _is_sound(self.linear, self.layers), _LINEAR.format(self.layers)),
            "indexer": (
                indexer is None
                or (
                    self.window is None
                    and min(indexer.heads, indexer.head_dim, indexer.top_k, indexer.pool) > 0
                    and 0 < indexer.scored_layers <= indexer.layers <= self.softmax_layers
                ),
                _INDEXER.format(self.softmax_layers),
            ),
            "compressed": (self._has_sound_compression(), _COMPRESSED),
        }
        for name, (sound, expected) in rules.items():
            if not sound:
                raise UsageError(f"model {self.name!r}, {name}: expected {expected}, got {getattr(self, name)!r}")

    def __hash__(self) -> int:
        """Hash a few fields alone, which equal models share: a search looks a model up millions of times."""
        return hash((self.name, self.layers, self.hidden, self.experts, self.top_k))

    def _has_sound_compression(self) -> bool:
        found = self.compressed
        if found is None:
            return True
        sizes = (found.q_rank, found.groups, found.out_rank, found.window, found.sparse_rate, found.dense_rate)
        chosen = 0 if self.indexer is None else self.indexer.layers
        return (
            min(sizes) > 0
            and min(found.sparse_layers, found.dense_layers) >= 0
            and found.sparse_layers + found.dense_layers <= self.layers
            and chosen == found.sparse_layers
            and self.heads % found.groups == 0
            and self.kv_heads == 1
            and not (self.latent or self.window or self.linear)
        )

    @property
    def softmax_layers(self) -> int:
        """Layers whose attention has scores: all but those of ``linear``."""
        return self.layers - (self.linear.layers if self.linear is not None else 0)

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers

    @property
    def matrices(self) -> int:
        """The number of matrices of an FFN: 3 where it is gated, else 2."""
        return 3 if self.gated else 2

    @property
    def routed_hidden(self) -> int:
        """Elements of a token as routed experts have it, and as it travels to them."""
        return self.expert_hidden or self.hidden

    @property
    def needs_whole_sequences(self) -> bool:
        """Whether a rank must have all tokens of a sequence: states, and entries of several tokens,
        are passed on by no software here."""
        return self.linear is not None or self.compressed is not None

    @property
    def expanded_kv_heads(self) -> int:
        """The heads of keys and values that attention works on: latent attention expands one for each query's."""
        return self.kv_heads if self.latent is None else self.heads


_MAY_BE_NONE = (
    *("shared_width", "dense_layers", "dense_width", "mtp_layers"),
    *("value_dim", "query_rank", "expert_hidden"),
    *("vectors", "moe_vectors", "expert_vectors", "end_vectors"),
)
_LINEAR = (
    "one of lightning, gated_delta, kda and mamba2, at most {} layers, sizes of at least 1, value heads that are a multiple of "
    "the key heads, and a kernel but for lightning"
)
_INDEXER = "sizes of at least 1, at most {} layers, some of which score, and no window beside it"
_COMPRESSED = (
    "sizes of at least 1, groups that divide the heads, one key-value head, no more layers than the "
    "model has, an indexer for its sparse ones, and no other kind of attention beside it"
)


def _is_sound(linear: LinearAttention, layers: int) -> bool:
    sizes = (linear.layers, linear.key_heads, linear.value_heads, linear.key_dim, linear.value_dim)
    return (
        linear.kind in get_args(LinearKind)
        and min(sizes) > 0
        and linear.layers <= layers
        and linear.value_heads % linear.key_heads == 0
        and (linear.kernel > 0) == (linear.kind != "lightning")
    )


@lru_cache(maxsize=1024)
def layer_kinds(model: ModelShape) -> tuple[bool, ...]:
    """For each layer of ``model``, in order, whether it has experts."""
    dense = frozenset(model.dense_at or range(model.dense_layers))
    return tuple(layer not in dense for layer in range(model.layers))


@lru_cache(maxsize=1024)
def mean_positions(model: ModelShape, sequence: int) -> float:
    """Positions that a token attends to, the mean over the tokens of a sequence and over the layers
    that have scores (:meth:`Reach.positions`), as windows leave them."""
    whole, window = Reach().positions(sequence), model.window
    if window is None or not model.softmax_layers:
        return whole
    part = Reach(window.tokens, chunked=window.chunked).positions(sequence)
    return (window.layers * part + (model.softmax_layers - window.layers) * whole) / model.softmax_layers


@lru_cache(maxsize=1024)
def mean_tiles(model: ModelShape, sequence: int, size: int) -> float:
    """The tiles of ``size`` keys that one of as many queries meets under a causal mask, the mean over a sequence and over the
    layers that have scores.

    The first meets one, each next one more, and in a sliding window of w tokens at most w / size + 1.
    """
    window, whole = model.window, (sequence / size + 1) / 2
    if window is None or not model.softmax_layers:
        return whole
    tokens = min(window.tokens, sequence)
    if window.chunked:
        part = (tokens / size + 1) / 2
    else:
        most = min(tokens / size + 1, sequence / size)
        part = most - most * (most - 1) / 2 / (sequence / size)
    return (window.layers * part + (model.softmax_layers - window.layers) * whole) / model.softmax_layers


def linear_flops(linear: LinearAttention) -> float:
    """A token's FLOPs in a layer's linear attention, beside its projections, as if token by token.

    Of each head ``lightning`` and ``mamba2`` add key times value to the state and read it by the
    query; the delta rules also read it by the key, and take from it what they read (Megatron-LM
    counts four such products too). What kernels compute more, chunk by chunk, is not the model's.
    """
    products = 2 if linear.kind in ("lightning", "mamba2") else 4
    return 2.0 * products * linear.value_heads * linear.key_dim * linear.value_dim


@lru_cache(maxsize=1024)
def kv_heads_of_rank(heads: int, kv_heads: int, parts: int) -> tuple[int, ...]:
    """How many key-value heads each of ``parts`` ranks needs for its query heads, which lie consecutively and as even as can
    be: a head that two ranks need counts on both."""
    shared_by, stop, found = heads // kv_heads, 0, []
    for part in range(parts):
        start, stop = stop, stop + heads // parts + (part < heads % parts)
        found.append(-(-stop // shared_by) - start // shared_by if stop > start else 0)
    return tuple(found)


def kv_heads_needed(model: ModelShape, tp: int) -> tuple[int, ...]:
    """How many heads of keys and values each tp rank attends with; latent attention expands as many as it has queries."""
    return kv_heads_of_rank(model.heads, model.expanded_kv_heads, tp)


def head_sizes(model: ModelShape) -> tuple[int, int, int]:
    """Elements of a query, of a key and its value together, and of a value, of one head."""
    latent, size = model.latent, model.head_dim
    if latent is None:
        value = model.value_dim or size
        return size, size + value, value
    key = latent.nope_dim + latent.rope_dim
    return key, key + latent.value_dim, latent.value_dim


def split_by_tp(model: ModelShape) -> list[tuple[str, int]]:
    """List what tensor parallelism splits of attention: each by name, and how many there are."""
    parts = [("heads", model.heads)]
    if model.linear is not None:
        parts.append(("key heads of linear attention", model.linear.key_heads))
    if model.window is not None and model.window.heads:
        parts.append(("heads of windowed layers", model.window.heads))
    if model.compressed is not None:
        parts.append(("groups of heads", model.compressed.groups))
    return parts


def mechanisms(model: ModelShape) -> list[str]:
    """Name what a model has beside grouped queries, latent attention, windows and experts."""
    names = {
        "linear attention": model.linear is not None,
        "attention with an indexer": model.indexer is not None,
        "compressed attention": model.compressed is not None,
        "other heads in windowed layers": model.window is not None and model.window.heads > 0,
        "values of another size than keys": model.value_dim > 0,
        "queries of a low rank": model.query_rank > 0,
        "gated latent attention": model.latent is not None and model.gated_attention,
        "experts on a latent space": model.expert_hidden > 0,
        "hyper-connections": model.streams > 1,
        "layers without an FFN": model.without_ffn,
    }
    return [name for name, has in names.items() if has]
