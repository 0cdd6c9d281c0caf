"""What a step sends beside its layers: gradients and sharded parameters, the ends of the model, and between pipeline stages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping.exchange import SEND_RECV, Exchange, axis_size, kept, mirrored, rows_of_rank
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.layer_calls import layer_backward, layer_forward
from commlayer.scheduler.mapping.parameters import (
    bucket_bytes,
    end_parameters,
    layer_parameters,
    layers_of,
    replicated_elements,
    stage_parameters,
)
from commlayer.scheduler.mapping.software import Software

__all__ = ["step_exchanges", "whole_step"]

_LOSS_BYTES = 4
_SHARD_ELEMENTS = 1024
"""Shards are whole rows of so many elements: :class:`commlayer.integrations.parameters.ShardedOptimizer`."""


def step_exchanges(job: Job, setup: Setup, software: Software, *, stage: int = 0) -> tuple[Exchange, ...]:
    """Of one rank of pipeline stage ``stage``, for a whole step, beside what its layers send for each micro-batch.

    Gradients come in the order in which a backward pass makes them; ``count``: of equal layers or buckets, and of micro-batches.

    Raises:
        UsageError: no such stage. GroupError: the batch cannot be split.
    """
    if not 0 <= stage < setup.pp:
        raise UsageError(f"stage: expected one of {setup.pp}, from 0, got {stage}")
    return (
        *_boundaries(job, setup, software, stage),
        *_ends(job, setup, software, stage),
        *_sums(job, setup, software, stage),
    )


def whole_step(job: Job, setup: Setup, software: Software, *, stage: int = 0) -> tuple[Exchange, ...]:
    """Everything that one rank of this stage sends in a step."""
    micro_batches = setup.micro_batches(job)
    found: list[Exchange] = []
    for moe, count in zip((False, True), layers_of(job.model, setup, stage), strict=True):
        if count:
            layer = layer_forward(job, setup, software, moe=moe) + layer_backward(job, setup, software, moe=moe)
            found += [each.times(count * micro_batches) for each in layer]
    return (*found, *step_exchanges(job, setup, software, stage=stage))


def _boundaries(job: Job, setup: Setup, software: Software, stage: int) -> tuple[Exchange, ...]:
    """Activations to the next stage, their gradients to the one before. With interleaved chunks the last stage's neighbour is the
    first, but for the model's own ends."""
    size = rows_of_rank(job, setup) * setup.micro_batch * job.model.hidden * software.activation_bytes
    sent = setup.micro_batches(job)
    forth, back = (sent * (setup.vpp - (stage == end)) for end in (setup.pp - 1, 0))
    activations = Exchange("activations", "pp", "pp", SEND_RECV, size, "boundary", forth)
    return kept(setup, activations, replace(mirrored(activations), count=back))


def _ends(job: Job, setup: Setup, software: Software, stage: int) -> tuple[Exchange, ...]:
    """Embedding, head and loss. Where tp splits the vocabulary, partial rows of the embedding are summed and scattered, the
    head's input is gathered, and the loss needs the largest logit, the label's and the sum of exponentials (Megatron-LM)."""
    sent, whole = setup.micro_batches(job), rows_of_rank(job, setup) * setup.tp * setup.micro_batch
    found: list[Exchange] = []
    if software.splits_ends:
        size = whole * job.model.hidden * software.activation_bytes
        if stage == 0:
            embedding = Exchange("embedding", "tp", "tp", "reduce_scatter", size, "embedding", sent)
            found += [embedding, mirrored(embedding)]
        if stage == setup.pp - 1:
            head = Exchange("head", "tp", "tp", "all_gather", size, "head", sent)
            again = [replace(head, name="head_again")] if software.gathers_again else []
            found += [head, *again, mirrored(head)]
            found.append(Exchange("vocabulary", "tp", "tp", "all_reduce", whole * _LOSS_BYTES, "loss", 3 * sent))
    axis = "world" if software.sums_loss_over_world else "dp_cp"
    if axis == "world" or stage == setup.pp - 1:
        found.append(Exchange("loss", axis, "ep" if axis == "world" else "dp", "all_reduce", _LOSS_BYTES, "loss"))
    return kept(setup, *found)


def _sums(job: Job, setup: Setup, software: Software, stage: int) -> tuple[Exchange, ...]:
    """Of gradients, and the gathers of sharded parameters. All in all: 0 all_reduce; 1 reduce_scatter and all_gather; with 2 the
    layers' gradients, and with 3 their parameters too, are the layers' own (:mod:`~commlayer.scheduler.mapping.layer_calls`)."""
    found: list[Exchange] = []
    over_tp = replicated_elements(job.model, setup, software, stage) * software.gradient_bytes
    found.append(Exchange("replicated_gradients", "tp", "tp", "all_reduce", over_tp, "gradients"))
    if job.model.ties_embeddings and setup.pp > 1 and stage in (0, setup.pp - 1):
        # Of the first and last stage alone; there is no axis of those two.
        _, size = end_parameters(job.model, setup, software, 0)[0][0]
        found.append(Exchange("tied_gradients", "pp", "pp", "all_reduce", size * software.gradient_bytes, "gradients"))
    if setup.zero == 0:
        found += _all_reduced(job, setup, software, stage)
    elif software.bucket_bytes is not None and setup.zero == 1:
        found += _of_flat_buffers(job, setup, software, stage)
    else:
        found += _of_layers(job, setup, software, stage)
    return kept(setup, *found)


def _all_reduced(job: Job, setup: Setup, software: Software, stage: int) -> list[Exchange]:
    if software.bucket_bytes is None:
        return [
            Exchange(
                f"{axis}_gradients", axis, "dp", "all_reduce", elements * software.gradient_bytes, "gradients", count
            )
            for axis, elements, count in _units(job, setup, software, stage)
        ]
    parameters = stage_parameters(job.model, setup, software, stage)
    cut = bucket_bytes(parameters, software.gradient_bytes, software.bucket_bytes)
    return [
        Exchange(f"{axis}_gradients", axis, "dp", "all_reduce", size, "gradients", count)
        for axis, sizes in cut.items()
        for size, count in Counter(sizes).items()
    ]


def _of_flat_buffers(job: Job, setup: Setup, software: Software, stage: int) -> list[Exchange]:
    """One reduce_scatter of each axis' gradients after the backward pass, one all_gather of its parameters after the step."""
    totals: dict[str, int] = {}
    for axis, elements in stage_parameters(job.model, setup, software, stage):
        totals[axis] = totals.get(axis, 0) + elements
    found = []
    for axis, elements in totals.items():
        whole = -(-elements // (axis_size(setup, axis) * _SHARD_ELEMENTS)) * axis_size(setup, axis) * _SHARD_ELEMENTS
        found.append(
            Exchange(f"{axis}_gradients", axis, "dp", "reduce_scatter", whole * software.gradient_bytes, "gradients")
        )
        found.append(
            Exchange(f"{axis}_parameters", axis, "dp", "all_gather", whole * software.parameter_bytes, "parameters")
        )
    return found


def _of_layers(job: Job, setup: Setup, software: Software, stage: int) -> list[Exchange]:
    """ZeRO-1 to 3, layer by layer. From 2 on the layers send their own gradients; what is no layer's is sent with every
    micro-batch too."""
    sent = setup.micro_batches(job)
    found = []
    ends = set(_end_units(job, setup, software, stage))
    for unit in _units(job, setup, software, stage):
        axis, elements, count = unit
        is_end = unit in ends
        gradients = Exchange(
            f"{axis}_gradients", axis, "dp", "reduce_scatter", elements * software.gradient_bytes, "gradients", count
        )
        parameters = Exchange(
            f"{axis}_parameters", axis, "dp", "all_gather", elements * software.parameter_bytes, "parameters", count
        )
        if setup.zero == 1 or is_end:
            found.append(gradients if setup.zero == 1 else gradients.times(sent))
        if setup.zero <= 2 or is_end:
            found.append(parameters if setup.zero <= 2 else parameters.times(2 * sent))
    return found


def _units(job: Job, setup: Setup, software: Software, stage: int) -> list[tuple[str, int, int]]:
    """(axis, elements, how many): head and norm, layers with experts, dense layers, embedding."""
    dense, moe = layers_of(job.model, setup, stage)
    layers = [
        (axis, elements, count)
        for is_moe, count in ((True, moe), (False, dense))
        if count
        for axis, elements in layer_parameters(job.model, setup, software, is_moe).items()
    ]
    return [*_end_units(job, setup, software, stage), *layers]


def _end_units(job: Job, setup: Setup, software: Software, stage: int) -> list[tuple[str, int, int]]:
    first, last = end_parameters(job.model, setup, software, stage)
    found: dict[str, int] = {}
    for axis, elements in (*last, *first):
        found[axis] = found.get(axis, 0) + elements
    return [(axis, elements, 1) for axis, elements in found.items()]
