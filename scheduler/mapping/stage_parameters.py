"""The parameters that one rank of a pipeline stage holds, and over which axis the gradient of each is summed.

``dp_cp``: what tensor parallelism splits. ``edp``: experts. ``stage`` (dp, cp and tp together): what every tp rank has whole and
uses on rows of its own; where the software sums that over tp by itself (Megatron-LM), it counts as ``dp_cp``, and as ``tp`` too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from commlayer.scheduler.mapping.job import Attention, Setup
from commlayer.scheduler.mapping.model import ModelShape
from commlayer.scheduler.mapping.software import Software

__all__ = ["bucket_bytes", "end_parameters", "layer_parameters", "layers_of", "replicated_elements", "stage_parameters"]

Sized = tuple[str, int]
"""Axis, elements."""


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
    for axis, elements in _on_axes(_layer(model, _key(setup), software.splits_ends, moe), setup, software):
        found[axis] = found.get(axis, 0) + elements
    return found


def replicated_elements(model: ModelShape, setup: Setup, software: Software, stage: int) -> int:
    """Elements whose gradients are summed over tp by themselves: norms and routers, which see a part of the sequence."""
    if _axis_of_replicas(setup, software) == "stage":
        return 0
    return sum(elements for kind, elements in _stage(model, setup, software, stage) if kind == _WHOLE)


def end_parameters(model: ModelShape, setup: Setup, software: Software, stage: int) -> tuple[list[Sized], list[Sized]]:
    """Embedding, and norm with head, on one rank of this stage, in order."""
    first, last = _ends(model, setup, software, stage)
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


Key = tuple[int, int, int, Attention]
_WHOLE = "whole"
"""In place of an axis: all tp ranks have it."""


def _key(setup: Setup) -> Key:
    return setup.tp, setup.ep, setup.etp, setup.attention


def _axis_of_replicas(setup: Setup, software: Software) -> str:
    """With Ulysses nearly everything is whole on all tp ranks, and summed at once."""
    return "dp_cp" if software.sums_replicas_over_tp and setup.attention == "tensor" else "stage"


def _on_axes(parameters: Iterable[Sized], setup: Setup, software: Software) -> list[Sized]:
    axis = _axis_of_replicas(setup, software)
    return [(axis if kind == _WHOLE else kind, elements) for kind, elements in parameters]


def _stage(model: ModelShape, setup: Setup, software: Software, stage: int) -> list[Sized]:
    dense, moe = layers_of(model, setup, stage)
    first, last = _ends(model, setup, software, stage)
    each = [_layer(model, _key(setup), software.splits_ends, is_moe) for is_moe in (False, True)]
    return [*first, *each[0] * dense, *each[1] * moe, *last]


def _ends(model: ModelShape, setup: Setup, software: Software, stage: int) -> tuple[list[Sized], list[Sized]]:
    whole = model.vocabulary * model.hidden
    table = ("dp_cp", -(-whole // setup.tp)) if software.splits_ends else (_WHOLE, whole)
    first = [table] if stage == 0 else []
    if stage < setup.pp - 1:
        return first, []
    is_own = stage > 0 or not model.ties_embeddings
    return first, [(_WHOLE, model.hidden), *([table] if is_own else [])]


@lru_cache(maxsize=4096)
def _layer(model: ModelShape, key: Key, splits_shared: bool, moe: bool) -> tuple[Sized, ...]:
    tp, ep, etp, _ = key
    found: list[Sized] = [(_WHOLE, model.hidden), *_attention(model, key), (_WHOLE, model.hidden)]
    if not moe:
        return (*found, *[("dp_cp", model.hidden * -(-model.dense_width // tp))] * model.matrices)
    found.append((_WHOLE, model.experts * model.hidden))
    found += [("edp", -(-model.experts // ep) * -(-model.width // etp) * model.hidden)] * model.matrices
    if model.shared_width:
        width = -(-model.shared_width // tp) if splits_shared else model.shared_width
        found += [("dp_cp" if splits_shared else _WHOLE, width * model.hidden)] * model.matrices
    return tuple(found)


def _attention(model: ModelShape, key: Key) -> Iterator[Sized]:
    """Its projections: whole on every rank with Ulysses; else each has its heads, and what cannot be split whole."""
    tp, _, _, kind = key
    parts, split = (1, _WHOLE) if kind == "ulysses" else (tp, "dp_cp")
    hidden, latent = model.hidden, model.latent
    if latent is not None:
        head = latent.nope_dim + latent.rope_dim
        if latent.q_rank:
            yield _WHOLE, hidden * latent.q_rank
        yield split, (latent.q_rank or hidden) * model.heads * head // parts
        yield _WHOLE, hidden * (latent.kv_rank + latent.rope_dim)
        yield split, latent.kv_rank * model.heads * (latent.nope_dim + latent.value_dim) // parts
        yield split, model.heads * latent.value_dim * hidden // parts
        return
    bias = 1 if model.qkv_bias else 0
    width = model.heads * model.head_dim
    is_split = model.kv_heads % parts == 0
    yield split, width * (hidden + bias) // parts
    for _ in range(2):
        size = model.kv_heads * model.head_dim * (hidden + bias)
        yield (split, size // parts) if is_split else (_WHOLE, size)
    yield split, width * hidden // parts
