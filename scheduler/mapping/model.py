"""A model's shape: the numbers that parameters, FLOPs, activations and traffic follow from."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from commlayer.profiles.errors import UsageError

__all__ = ["LatentAttention", "ModelShape", "head_sizes", "kv_heads_needed", "kv_heads_of_rank"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder with MoE layers, in elements.

    Attributes:
        layers: in all; the first ``dense_layers`` of them have one dense FFN of width ``dense_width``, the others experts.
        hidden, heads, kv_heads, head_dim: of attention. ``kv_heads`` is heads / m in MegaScale-MoE's table 1.
        experts, top_k, width: routed experts of a MoE layer, how many each token takes, and an expert's inner width.
        router_groups, router_group_limit: experts are in so many equal groups (DeepSeek's n_group), and those of a token in at
            most so many of them (topk_group).
        shared_width: inner width of what every token passes through beside them; 0: none.
        vocabulary: of the embedding, and of the head unless ``ties_embeddings``.
        gated: an FFN has three matrices (SwiGLU), else two.
        qkv_bias: whether the projections of queries, keys and values have one.
        latent: in place of grouped queries.
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
    gated: bool = True
    ties_embeddings: bool = False
    qkv_bias: bool = False
    latent: LatentAttention | None = None
    family: str = ""
    published: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("shared_width", "dense_layers", "dense_width") else 1
            if field.type == "int" and (type(value) is not int or value < least):
                raise UsageError(
                    f"model {self.name!r}, {field.name}: expected a whole number of at least {least}, got {value!r}"
                )
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
        }
        for name, (sound, expected) in rules.items():
            if not sound:
                raise UsageError(f"model {self.name!r}, {name}: expected {expected}, got {getattr(self, name)!r}")

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
