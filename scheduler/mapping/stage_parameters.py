"""The parameters that one rank of a pipeline stage holds, and over which axis the gradient of each is summed.

``dp_cp``: what tensor parallelism splits. ``edp``: experts. ``stage`` (dp, cp and tp together): what every tp rank has whole and
uses on rows of its own; where the software sums that over tp by itself (Megatron-LM), it counts as ``dp_cp``, and as ``tp`` too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from commlayer.scheduler.mapping.job import Setup
from commlayer.scheduler.mapping.model import ModelShape
from commlayer.scheduler.mapping.software import Software, splits_ffn

__all__ = [
    "Elements",
    "Ways",
    "axis_of_whole",
    "bucket_bytes",
    "end_elements",
    "end_parameters",
    "layer_elements",
    "layer_parameters",
    "layers_of",
    "replicated_elements",
    "stage_parameters",
    "ways_of",
]

Sized = tuple[str, int]
"""Axis, elements."""


class Ways(NamedTuple):
    """What decides which parameters a rank of a stage has. ``splits_…``: whether tp does."""

    tp: int
    ep: int
    etp: int
    splits_attention: bool
    splits_ffn: bool
    splits_ends: bool
    keeps_whole_kv: bool


class Elements(NamedTuple):
    """On one rank: of what tp splits, of what each of its ranks has whole, and of experts."""

    split: int
    whole: int
    expert: int


def ways_of(setup: Setup, software: Software) -> Ways:
    """Of a setup, run by this software."""
    return Ways(
        setup.tp,
        setup.ep,
        setup.etp,
        setup.attention == "tensor",
        splits_ffn(software, setup.attention),
        software.splits_ends,
        software.keeps_whole_kv,
    )


def axis_of_whole(setup: Setup, software: Software) -> str:
    """Over which axis is shared, and summed, what all tp ranks have: with Ulysses that is nearly everything, summed at once."""
    return "dp_cp" if software.sums_replicas_over_tp and setup.attention == "tensor" else "stage"


@lru_cache(maxsize=4096)
def layer_elements(model: ModelShape, ways: Ways, moe: bool) -> Elements:
    """Of one layer."""
    return _summed(_layer(model, ways, moe))


def end_elements(model: ModelShape, ways: Ways, pp: int, stage: int) -> Elements:
    """Of embedding, last norm and head, as far as this stage has them."""
    first, last = _ends(model, ways, pp, stage)
    return _summed([*first, *last])


def layers_of(model: ModelShape, setup: Setup, stage: int) -> tuple[int, int]:
    """Layers with a dense FFN, and with experts, of pipeline stage ``stage``: as even as can be, the first stages one more.

    With interleaved chunks a stage's layers lie apart; dense ones, which come first, then are those of its first chunk.
    """
    chunks = setup.pp * setup.vpp
    dense = moe = 0
    for chunk in range(stage, chunks, setup.pp):
        longer = model.layers % chunks
        first = chunk * (model.layers // chunks) + min(chunk, longer)
        count = model.layers // chunks + (chunk < longer)
        here = max(0, min(model.dense_layers - first, count))
        dense, moe = dense + here, moe + count - here
    return dense, moe


def layer_parameters(model: ModelShape, setup: Setup, software: Software, moe: bool) -> dict[str, int]:
    """Elements of one layer on one rank, by axis."""
    found: dict[str, int] = {}
    for axis, elements in _on_axes(_layer(model, ways_of(setup, software), moe), setup, software):
        found[axis] = found.get(axis, 0) + elements
    return found


def replicated_elements(model: ModelShape, setup: Setup, software: Software, stage: int) -> int:
    """Elements whose gradients are summed over tp by themselves: norms and routers, which see a part of the sequence."""
    if axis_of_whole(setup, software) == "stage":
        return 0
    return sum(elements for kind, elements in _stage(model, setup, software, stage) if kind == _WHOLE)


def end_parameters(model: ModelShape, setup: Setup, software: Software, stage: int) -> tuple[list[Sized], list[Sized]]:
    """Embedding, and norm with head, on one rank of this stage, in order."""
    first, last = _ends(model, ways_of(setup, software), setup.pp, stage)
    return _on_axes(first, setup, software), _on_axes(last, setup, software)


def stage_parameters(model: ModelShape, setup: Setup, software: Software, stage: int) -> list[Sized]:
    """Every parameter of this stage, in the order of its modules."""
    return _on_axes(_stage(model, setup, software, stage), setup, software)


def bucket_bytes(parameters: Iterable[Sized], element_bytes: int, limit: int) -> dict[str, list[int]]:
    """The buckets of each axis, in the order in which a backward pass fills them: as
    :class:`commlayer.integrations.buckets.GradientBuckets` cuts them."""
    found: dict[str, list[int]] = {}
    for axis, elements in reversed(list(parameters)):
        size, open_ = elements * element_bytes, found.setdefault(axis, [0])
        if open_[-1] and open_[-1] + size > limit:
            open_.append(0)
        open_[-1] += size
    return found


_WHOLE = "whole"
"""In place of an axis: all tp ranks have it."""


def _summed(parameters: Iterable[Sized]) -> Elements:
    found = {"dp_cp": 0, _WHOLE: 0, "edp": 0}
    for kind, elements in parameters:
        found[kind] += elements
    return Elements(*found.values())


def _on_axes(parameters: Iterable[Sized], setup: Setup, software: Software) -> list[Sized]:
    axis = axis_of_whole(setup, software)
    return [(axis if kind == _WHOLE else kind, elements) for kind, elements in parameters]


def _stage(model: ModelShape, setup: Setup, software: Software, stage: int) -> list[Sized]:
    dense, moe = layers_of(model, setup, stage)
    ways = ways_of(setup, software)
    first, last = _ends(model, ways, setup.pp, stage)
    return [*first, *_layer(model, ways, False) * dense, *_layer(model, ways, True) * moe, *last]


def _ends(model: ModelShape, ways: Ways, pp: int, stage: int) -> tuple[list[Sized], list[Sized]]:
    whole = model.vocabulary * model.hidden
    table = ("dp_cp", -(-whole // ways.tp)) if ways.splits_ends else (_WHOLE, whole)
    first = [table] if stage == 0 else []
    if stage < pp - 1:
        return first, []
    is_own = stage > 0 or not model.ties_embeddings
    return first, [(_WHOLE, model.hidden), *([table] if is_own else [])]


@lru_cache(maxsize=4096)
def _layer(model: ModelShape, ways: Ways, moe: bool) -> tuple[Sized, ...]:
    found: list[Sized] = [(_WHOLE, model.hidden), *_attention(model, ways), (_WHOLE, model.hidden)]
    if not moe:
        return (*found, *_ffn(model, ways, model.dense_width))
    found.append((_WHOLE, model.experts * model.hidden))
    local, width = -(-model.experts // ways.ep), -(-model.width // ways.etp)
    found += [("edp", local * width * model.hidden)] * model.matrices
    return (*found, *_ffn(model, ways, model.shared_width))


def _ffn(model: ModelShape, ways: Ways, width: int) -> list[Sized]:
    """That every token goes through, alone in its layer or beside the routed experts."""
    if not width:
        return []
    each = ("dp_cp", -(-width // ways.tp) * model.hidden) if ways.splits_ffn else (_WHOLE, width * model.hidden)
    return [each] * model.matrices


def _attention(model: ModelShape, ways: Ways) -> Iterator[Sized]:
    """Its projections: whole on every rank with Ulysses; else each has its heads, and what cannot be split whole."""
    parts, split = (ways.tp, "dp_cp") if ways.splits_attention else (1, _WHOLE)
    hidden, latent = model.hidden, model.latent
    if latent is not None:
        head = latent.nope_dim + latent.rope_dim
        if latent.q_rank:
            yield _WHOLE, hidden * latent.q_rank
            yield _WHOLE, latent.q_rank  # the norm
        yield split, (latent.q_rank or hidden) * model.heads * head // parts
        yield _WHOLE, hidden * (latent.kv_rank + latent.rope_dim)
        yield _WHOLE, latent.kv_rank
        yield split, latent.kv_rank * model.heads * (latent.nope_dim + latent.value_dim) // parts
        yield split, model.heads * latent.value_dim * hidden // parts
        return
    bias = 1 if model.qkv_bias else 0
    width = model.heads * model.head_dim
    is_whole = model.kv_heads % parts != 0 and ways.keeps_whole_kv
    yield split, width * (hidden + bias) // parts
    for _ in range(2):
        heads = model.kv_heads if is_whole else -(-model.kv_heads // parts)
        yield _WHOLE if is_whole else split, heads * model.head_dim * (hidden + bias)
    yield split, width * hidden // parts
