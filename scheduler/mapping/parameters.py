"""How many parameters a model has, and how many of them the fullest GPU of a mapping holds.

Counted is what a decoder of :class:`~commlayer.scheduler.mapping.model.ModelShape` multiplies by: embedding, head, projections
(and biases of queries, keys and values), router, experts, norms. Left out, for they are below 0.01 % of any model of the
catalog: the norms of queries and keys, a shared expert's gate, a router's bias, biases of norms and of the head.
docs/counting.md has the formulas, and the counts beside the published sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping.job import Setup
from commlayer.scheduler.mapping.model import ModelShape
from commlayer.scheduler.mapping.software import MEGATRON, Software
from commlayer.scheduler.mapping.stage_parameters import (
    Elements,
    Ways,
    axis_of_whole,
    end_elements,
    layer_elements,
    ways_of,
)

__all__ = [
    "Held",
    "LayerParameters",
    "Parameters",
    "Stage",
    "check",
    "count",
    "held",
    "held_elements",
    "layer_of",
    "per_gpu",
    "replicas",
    "shard_elements",
    "stage_layers",
    "stages",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Of a whole model, each the sum over its layers. ``active_experts``: of ``experts``, what one token passes through."""

    embedding: int
    head: int
    attention: int
    router: int
    experts: int
    shared: int
    dense_ffn: int
    norms: int
    active_experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts

    @property
    def expert(self) -> int:
        """What expert parallelism shards."""
        return self.experts

    @property
    def dense(self) -> int:
        """All but the routed experts."""
        return self.embedding + self.head + self.attention + self.router + self.shared + self.dense_ffn + self.norms

    @property
    def active(self) -> int:
        """A token's: everything but the experts that it does not take. The embedding counts, as in published numbers."""
        return self.dense + self.active_experts


class LayerParameters(NamedTuple):
    """Of one layer. What of it a rank has: :mod:`~commlayer.scheduler.mapping.stage_parameters`.

    ``sharded``: of attention, what heads have of their own (queries and output; of latent attention: the projections up and the
    output). ``keys_values``: what heads may share. ``copied``: what all share (of latent attention: the projections down).
    ``experts``: all routed ones.
    """

    sharded: int
    keys_values: int
    copied: int
    norms: int
    router: int
    shared: int
    dense_ffn: int
    experts: int

    @property
    def attention(self) -> int:
        return self.sharded + self.keys_values + self.copied


class Stage(NamedTuple):
    """A pipeline stage: which one, its layers, and how many of these are the model's first dense ones."""

    number: int
    layers: int
    dense: int


class Held(NamedTuple):
    """Parameters on a GPU of ``stage``, in all and of one of its layers, one with experts where it has any.

    Of what tp splits, of what each of its ranks has whole (both are on all ranks of dp and cp besides), and of experts.
    """

    stage: Stage
    elements: Elements
    layer: Elements

    @property
    def total(self) -> int:
        return sum(self.elements)


@lru_cache(maxsize=256)
def layer_of(model: ModelShape) -> LayerParameters:
    """One layer of ``model``, with its dense FFN (that only the first layers have) beside router and experts."""
    hidden, ffn = model.hidden, model.matrices * model.hidden
    latent = model.latent
    norms = 2 * hidden
    if latent is None:
        width, key_width = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim
        bias = int(model.qkv_bias)
        sharded, keys_values, copied = (2 * hidden + bias) * width, (hidden + bias) * key_width, 0
    else:
        query = latent.nope_dim + latent.rope_dim
        up = (latent.q_rank or hidden) * query + latent.kv_rank * (latent.nope_dim + latent.value_dim)
        sharded, keys_values = model.heads * (up + latent.value_dim * hidden), 0
        copied = hidden * (latent.q_rank + latent.kv_rank + latent.rope_dim)
        norms += latent.q_rank + latent.kv_rank
    return LayerParameters(
        sharded=sharded,
        keys_values=keys_values,
        copied=copied,
        norms=norms,
        router=hidden * model.experts,
        shared=ffn * model.shared_width,
        dense_ffn=ffn * model.dense_width,
        experts=ffn * model.width * model.experts,
    )


@lru_cache(maxsize=256)
def count(model: ModelShape) -> Parameters:
    """Every parameter of ``model``. The head is nothing of its own where it is tied to the embedding."""
    one, sparse = layer_of(model), model.moe_layers
    vocabulary = model.vocabulary * model.hidden
    return Parameters(
        embedding=vocabulary,
        head=0 if model.ties_embeddings else vocabulary,
        attention=model.layers * one.attention,
        router=sparse * one.router,
        experts=sparse * one.experts,
        shared=sparse * one.shared,
        dense_ffn=model.dense_layers * one.dense_ffn,
        norms=model.layers * one.norms + model.hidden,
        active_experts=sparse * one.experts // model.experts * model.top_k,
    )


def check(model: ModelShape, setup: Setup, software: Software = MEGATRON) -> None:
    """Whether the degrees divide the model.

    Raises:
        UsageError: tp does not divide the heads (or the width of an FFN that the software splits over it), ep the experts, etp
            an expert's width; the layers do not go into pp · vpp chunks. Names the number and what it must divide.
    """
    held(model, setup, software)


def _check(model: ModelShape, ways: Ways) -> None:
    parts = [("tp", ways.tp, "heads", model.heads), ("ep", ways.ep, "experts", model.experts)]
    parts.append(("etp", ways.etp, "width of an expert", model.width))
    if ways.splits_ffn:
        parts += [
            ("tp", ways.tp, "shared width", model.shared_width),
            ("tp", ways.tp, "dense width", model.dense_width),
        ]
    for axis, degree, name, number in parts:
        if number % degree:
            raise UsageError(
                f"{axis}={degree}: expected a divisor of the {name} of {model.name}, {number}: {_near(degree, number)}"
            )
    if model.latent is None and model.kv_heads % ways.tp and ways.tp % model.kv_heads:
        raise UsageError(
            f"tp={ways.tp}: expected a divisor or a multiple of the {model.kv_heads} key-value heads of {model.name}"
        )


def _near(degree: int, number: int) -> str:
    below = next(each for each in range(min(degree, number), 0, -1) if number % each == 0)
    above = next((each for each in range(degree + 1, number + 1) if number % each == 0), below)
    return f"take {below}" + (f" or {above}" if above != below else "")


@lru_cache(maxsize=4096)
def stages(layers: int, dense_layers: int, pp: int, vpp: int) -> tuple[Stage, ...]:
    """The first pipeline stage, the second and the last: what is between them holds no more than the second.

    The layers are cut into pp · vpp chunks as equally as they go, the larger ones first: of ceil(layers / (pp · vpp)), the others
    of one less. Chunk c is on stage c mod pp, as Megatron's interleaved schedule lays them.

    Raises:
        UsageError: a chunk would be empty; names the nearest degrees for which none is.
    """
    chunks = pp * vpp
    if chunks > layers:
        ways = [f"pp={layers // vpp}"] * (vpp <= layers) + [f"vpp={layers // pp}"] * (pp <= layers and vpp > 1)
        raise UsageError(
            f"{layers} layers do not fill pp={pp} × vpp={vpp} = {chunks} chunks: expected no chunk without a layer; take at most "
            f"{' or '.join(ways) or f'{layers} chunks'}"
        )
    each, larger = divmod(layers, chunks)
    first_dense = [max(0, min(each + (c < larger), dense_layers - c * each - min(c, larger))) for c in range(chunks)]
    return tuple(
        Stage(
            stage,
            sum(each + (c < larger) for c in range(stage, chunks, pp)),
            sum(first_dense[stage::pp]),
        )
        for stage in sorted({0, min(1, pp - 1), pp - 1})
    )


def stage_layers(model: ModelShape, setup: Setup) -> int:
    """Layers of the fullest pipeline stage. Raises UsageError as :func:`stages`."""
    return stages(model.layers, model.dense_layers, setup.pp, setup.vpp)[0].layers


def held(model: ModelShape, setup: Setup, software: Software = MEGATRON) -> tuple[Held, ...]:
    """What a GPU of each of :func:`stages` holds, counted as its gradients are
    (:mod:`~commlayer.scheduler.mapping.stage_parameters`).

    Tensor parallelism divides attention and FFN by tp, and leaves norms, router and the projections down of latent attention
    whole; a key-value head is held by at least one rank, and by several where tp exceeds their number. ``ulysses`` leaves all
    that whole (MegaScale-MoE, section 3.1). The first stage has the embedding, the last the final norm and the head, which is a
    second copy of the embedding where the two are tied and pp > 1 (Megatron).

    Args:
        software: whether tp divides embedding, head and FFNs at all, and what is held of key-value heads that it does not divide.

    Raises:
        UsageError: as :func:`check`.
    """
    return _held(model, setup.pp, setup.vpp, ways_of(setup, software))


@lru_cache(maxsize=1 << 16)
def _held(model: ModelShape, pp: int, vpp: int, ways: Ways) -> tuple[Held, ...]:
    _check(model, ways)
    found = []
    for stage in stages(model.layers, model.dense_layers, pp, vpp):
        sparse, dense = (layer_elements(model, ways, is_moe) for is_moe in (True, False))
        ends = end_elements(model, ways, pp, stage.number)
        parts = zip(sparse, dense, ends, strict=True)
        elements = Elements(*((stage.layers - stage.dense) * a + stage.dense * b + c for a, b, c in parts))
        found.append(Held(stage, elements, sparse if stage.layers > stage.dense else dense))
    return tuple(found)


def per_gpu(model: ModelShape, setup: Setup, software: Software = MEGATRON) -> tuple[int, int]:
    """(dense, expert) parameters of the fullest GPU: of the stage that has most. Errors: as :func:`held`."""
    fullest = max(held(model, setup, software), key=lambda each: each.total).elements
    return fullest.split + fullest.whole, fullest.expert


def replicas(setup: Setup, software: Software) -> tuple[int, int, int]:
    """GPUs that hold the same of what tp splits, of what its ranks have whole, and of experts: over so many ZeRO shards.

    Megatron-LM's distributed optimizer does not look across tp, although all its ranks have the second.
    """
    split = setup.dp * setup.cp
    return split, split * setup.tp if axis_of_whole(setup, software) == "stage" else split, setup.edp


def held_elements(model: ModelShape, setup: Setup, software: Software) -> float:
    """Parameters of the fullest GPU, all together. Raises UsageError as :func:`held`."""
    return float(max(each.total for each in held(model, setup, software)))


def shard_elements(model: ModelShape, setup: Setup, software: Software) -> float:
    """Parameters whose optimizer state the fullest GPU keeps: from ZeRO-1 on its share of what it holds, of each kind over
    those that hold the same (:func:`replicas`); all without. Raises UsageError as :func:`held`."""
    if setup.zero == 0:
        return held_elements(model, setup, software)
    over = replicas(setup, software)
    return max(
        sum(elements / number for elements, number in zip(each.elements, over, strict=True))
        for each in held(model, setup, software)
    )
