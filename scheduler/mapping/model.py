"""A model's shape: the numbers that parameters, FLOPs, activations and traffic follow from."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal, get_args

from commlayer.profiles.errors import UsageError

__all__ = [
    "MOST_LAYERS",
    "MOST_OF_A_SIZE",
    "AttentionWindow",
    "LatentAttention",
    "LinearAttention",
    "LinearKind",
    "ModelShape",
    "head_sizes",
    "kv_heads_needed",
    "kv_heads_of_rank",
    "layer_kinds",
    "linear_flops",
    "mean_positions",
    "mean_tiles",
]

LinearKind = Literal["lightning", "gated_delta"]
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
    """

    tokens: int
    layers: int
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Attention with a state of fixed size in place of scores, in ``layers`` of the model's layers.

    ``lightning`` (MiniMax-01, arXiv:2501.08313): queries, keys, values, a gate and the output, of ``value_heads`` heads of
    ``value_dim``; ``key_heads`` and ``key_dim`` are the same. ``gated_delta`` (Gated Delta Networks, arXiv:2412.06464;
    Qwen3-Next): queries and keys have ``key_heads`` heads of ``key_dim``, values and gate ``value_heads`` of ``value_dim``, and
    queries, keys and values go through a short convolution of ``kernel`` positions.
    """

    kind: LinearKind
    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 0


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
        gated_attention: whether the attention's output has a gate, which the projection of queries makes too (Qwen3-Next).
        clamps: the inputs of the experts' activation function are limited (gpt-oss's swiglu_limit).
        latent: in place of grouped queries.
        window: where not all layers attend to the whole sequence.
        linear: the attention of those layers that have no scores.
        mtp_layers: modules of multi-token prediction that are trained, beside ``layers`` (DeepSeek-V3, section 2.2): each has two
            norms, a projection of two hidden states to one, a layer as the model's last, and a norm; embedding and head are
            the model's.
        vectors, moe_vectors, expert_vectors, end_vectors: elements of vectors that nothing else here counts, of each layer that
            has scores (norms of queries and keys, sinks, the output's bias), of each one with experts (the router's bias, a
            shared expert's gate), of each expert (biases), and at the model's end (the head's bias).
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
    qkv_bias: bool = False
    gated_attention: bool = False
    clamps: bool = False
    latent: LatentAttention | None = None
    window: AttentionWindow | None = None
    linear: LinearAttention | None = None
    mtp_layers: int = 0
    vectors: int = 0
    moe_vectors: int = 0
    expert_vectors: int = 0
    end_vectors: int = 0
    family: str = ""
    published: float = 0.0
    source: str = ""

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
        rules = {
            "kv_heads": (self.heads % self.kv_heads == 0, f"a divisor of heads={self.heads}"),
            "top_k": (self.top_k <= self.experts, f"at most experts={self.experts}"),
            "router_groups": (not self.experts % self.router_groups, f"a divisor of experts={self.experts}"),
            "router_group_limit": (
                self.router_group_limit <= self.router_groups
                and self.top_k * self.router_groups <= self.router_group_limit * self.experts,
                f"at most router_groups={self.router_groups}, and room for top_k={self.top_k} in them",
            ),
            "dense_layers": (self.dense_layers <= self.layers, f"at most layers={self.layers}"),
            "dense_width": (bool(self.dense_width) or not self.dense_layers, "the width of the dense layers"),
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
            "mtp_layers": (
                not self.mtp_layers or (self.linear is None and self.mtp_layers <= self.layers),
                f"at most layers={self.layers}"
                if self.linear is None
                else "0: which kind of attention a module for more tokens has is not known where layers differ",
            ),
            "linear": (self.linear is None or _is_sound(self.linear, self.layers), _LINEAR.format(self.layers)),
        }
        for name, (sound, expected) in rules.items():
            if not sound:
                raise UsageError(f"model {self.name!r}, {name}: expected {expected}, got {getattr(self, name)!r}")

    def __hash__(self) -> int:
        """Hash a few fields alone, which equal models share: a search looks a model up millions of times."""
        return hash((self.name, self.layers, self.hidden, self.experts, self.top_k))

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
    def expanded_kv_heads(self) -> int:
        """The heads of keys and values that attention works on: latent attention expands one for each query's."""
        return self.kv_heads if self.latent is None else self.heads


_MAY_BE_NONE = (
    *("shared_width", "dense_layers", "dense_width", "mtp_layers"),
    *("vectors", "moe_vectors", "expert_vectors", "end_vectors"),
)
_LINEAR = (
    "one of lightning and gated_delta, at most {} layers, sizes of at least 1, value heads that are a multiple of the key heads, "
    "and a kernel where it is gated_delta"
)


def _is_sound(linear: LinearAttention, layers: int) -> bool:
    sizes = (linear.layers, linear.key_heads, linear.value_heads, linear.key_dim, linear.value_dim)
    return (
        linear.kind in get_args(LinearKind)
        and min(sizes) > 0
        and linear.layers <= layers
        and linear.value_heads % linear.key_heads == 0
        and (linear.kernel > 0) == (linear.kind == "gated_delta")
    )


@lru_cache(maxsize=1024)
def layer_kinds(model: ModelShape) -> tuple[bool, ...]:
    """For each layer of ``model``, in order, whether it has experts."""
    dense = frozenset(model.dense_at or range(model.dense_layers))
    return tuple(layer not in dense for layer in range(model.layers))


@lru_cache(maxsize=1024)
def mean_positions(model: ModelShape, sequence: int) -> float:
    """Positions that a token attends to, the mean over the tokens of a sequence and over the layers that have scores.

    Causal attention meets (s + 1) / 2; taken is s / 2, the half of what is without a mask, and so in every chunk. In a sliding
    window of w tokens it is w, less for the first w of the sequence: w - w² / 2s.
    """
    whole, window = sequence / 2, model.window
    if window is None or not model.softmax_layers:
        return whole
    size = min(window.tokens, sequence)
    if window.chunked:
        full, rest = divmod(sequence, size)
        part = (full * size * size + rest * rest) / 2 / sequence
    else:
        part = size - size * size / 2 / sequence
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

    Of each head ``lightning`` adds key times value to the state and reads it by the query; the delta rule also reads it by the
    key, and takes from it what it read (Megatron-LM counts four such products too). What kernels compute more, chunk by chunk,
    is not the model's.
    """
    products = 2 if linear.kind == "lightning" else 4
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
        return size, 2 * size, size
    key = latent.nope_dim + latent.rope_dim
    return key, key + latent.value_dim, latent.value_dim
