"""The collective calls of a training step, for a job, a way of running it, and a trainer's
software.

One description for the simulated step (:mod:`commlayer.scheduler.mapping.simulate`) and for the
test that holds it against what the run time counts (:func:`commlayer.stats`), call by call and byte
by byte (``tests/scheduler/mapping``). What one layer sends for a micro-batch comes first, what a
step sends beside its layers second.

Rows are positions of a sequence; between the sharded parts each rank has S/(cp·tp) of them.
Sources: Megatron-LM's sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198, section
4.2.2), DeepSpeed-Ulysses (arXiv:2309.14509), Ring Attention as Transformer Engine runs it, the six
phases of MoE Parallel Folding's dispatcher (its figure 4), and MegaScale-MoE (section 3.2; A.2 for
what megascale recomputation sends again).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.dispatch_price import INDEX_BYTES, WEIGHT_BYTES
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.layer_table import LayerOp, layer_table
from commlayer.scheduler.mapping.parameters import (
    StageEnds,
    bucket_bytes,
    by_axis,
    cut_of,
    end_parameters,
    ends_at,
    layer_parameters,
    layers_of,
    replicated_elements,
    stage_parameters,
)
from commlayer.scheduler.mapping.recomputation import ways_of
from commlayer.scheduler.mapping.software import Software
from commlayer.scheduler.plan import Span

__all__ = [
    "SEND_RECV",
    "StepCollective",
    "axis_size",
    "dispatched_rows",
    "layer_backward",
    "layer_forward",
    "rows_of_rank",
    "step_exchanges",
    "whole_step",
]

SEND_RECV = "send_recv"
"""The collective of messages between two ranks: the stages of a pipeline, the neighbours in a
ring."""
_DEGREES = frozenset({"tp", "cp", "dp", "pp", "etp", "ep", "edp"})
_MIRRORS = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
_COUNT_BYTES = 8  # int64
_STATISTIC_BYTES = 8  # FP64
_LOSS_BYTES = 4
_SHARD_ELEMENTS = 1024
"""Shards are whole rows of so many elements, of which each has scales of its own in a wire format."""


@dataclass(frozen=True, slots=True)
class StepCollective:
    """``count`` calls of one kind by one rank.

    Attributes:
        name: what it is; of a gradient's way back with ``_gradient`` behind it, of what is sent
            once more for the backward pass with ``_again``.
        axis: whose group, of :meth:`Setup.layout <commlayer.scheduler.mapping.job.Setup.layout>`.
        lane: its class of traffic.
        collective: one of the scheduler's (:mod:`commlayer.scheduler.traffic`), or ``send_recv`` for messages.
        logical_bytes: of one call, nccl-tests' S: the gathered total, the whole input of a
            reduce_scatter, the tensor of an all_reduce or a message, and what a rank sends in an
            all_to_all_v (its bound, the busiest rank's, where routing is uneven).
        place: where in a layer or a step: ``before_attention``, ``context``, ``after_attention``,
            ``balance``, ``counts``, ``dispatch``, ``gather_experts``, ``scatter_experts``,
            ``combine``, ``before_ffn``, ``after_ffn``, ``gradients``, ``parameters``, ``boundary``,
            ``embedding``, ``head``, ``loss``. A gradient has its activation's.
        over: of an all_to_all_v, among the ranks of each rail or node only
            (:mod:`commlayer.scheduler.rails`).
    """

    name: str
    axis: str
    lane: str
    collective: str
    logical_bytes: int
    place: str
    count: int = 1
    over: Span = Span.GROUP

    def renamed(self, suffix: str, collective: str = "", logical_bytes: int = -1) -> StepCollective:
        """With another name, and another collective and size where they are given."""
        size = self.logical_bytes if logical_bytes < 0 else logical_bytes
        name, kind = self.name + suffix, collective or self.collective
        return StepCollective(name, self.axis, self.lane, kind, size, self.place, self.count, self.over)


def _mirrored(exchange: StepCollective) -> StepCollective:
    """The way back of what it moved: all_gather and reduce_scatter are each other's, others their
    own."""
    collective = _MIRRORS.get(exchange.collective, exchange.collective)
    return exchange.renamed("_gradient", collective)


def _kept(setup: Setup, *exchanges: StepCollective) -> tuple[StepCollective, ...]:
    """Keep the exchanges that have somebody to talk to, and something to say."""
    return tuple(each for each in exchanges if _is_sent(setup, each))


def _is_sent(setup: Setup, exchange: StepCollective) -> bool:
    return bool(exchange.count and exchange.logical_bytes and axis_size(setup, exchange.axis) > 1)


def axis_size(setup: Setup, axis: str) -> int:
    """Ranks of a group of ``axis``. Raises GroupError for an unknown one."""
    if axis in _DEGREES:  # most of them, and the search asks for millions
        return int(getattr(setup, axis))
    return math.prod(size for size, _ in setup.layout(axis))


def rows_of_rank(job: Job, setup: Setup) -> int:
    """Positions of a sequence on one rank between the sharded parts: the fullest rank's where cp·tp
    does not divide them."""
    return -(-job.sequence // (setup.cp * setup.tp))


# What one layer sends


def layer_forward(job: Job, setup: Setup, software: Software, *, moe: bool = True) -> tuple[StepCollective, ...]:
    """List the exchanges of the forward pass of one micro-batch. ``moe`` False: of a layer with a
    dense FFN."""
    sent = (each for _, each in _sent(job, setup, software, moe))
    return (*_layer_weights(job, setup, software, moe), *sent)


def layer_backward(job: Job, setup: Setup, software: Software, *, moe: bool = True) -> tuple[StepCollective, ...]:
    """List the exchanges of the backward pass: what recomputation sends again first, then every
    exchange's way back, the last one's first.

    What is sent again for the gradient of weights (a sequence that was gathered) comes before the
    gradient that it runs beside.
    """
    forward, ways = _sent(job, setup, software, moe), ways_of(setup.recompute)
    backward = [*_layer_weights(job, setup, software, moe, is_backward=True)]
    backward += [each.renamed("_again") for op, each in forward if ways & (op.remade | {"full"})]
    # Gradients go to the experts by combine's way back, and come home by dispatch's: each with its own size.
    ways_back = forward
    if moe and software.dispatch_precision != "bf16":
        ways_back = _sent(job, setup, software, moe, of_gradients=True)
    for (op, each), (_, back) in zip(reversed(forward), reversed(ways_back), strict=True):
        if each.place in ("counts", "balance"):
            continue
        # The gathered input of a product, which is not kept, is gathered again for the gradient of the weights.
        is_gathered = op.overlaps and each.axis == "tp"
        if software.gathers_again and is_gathered and not (setup.recompute == "megascale" and ways & op.remade):
            backward.append(each.renamed("_again"))
        if each.collective == SEND_RECV:  # keys, values and their gradients go round, both
            backward.append(each.renamed("_gradient", logical_bytes=2 * each.logical_bytes))
        else:
            backward.append(_mirrored(back))
    if setup.zero < 2:
        return tuple(backward)
    # What is not kept whole is summed with every micro-batch.
    held = layer_parameters(job.model, setup, software, moe)
    return (*backward, *_kept(setup, *(_scattered_sum(axis, count, software) for axis, count in held.items())))


def dispatched_rows(job: Job, setup: Setup) -> int:
    """Rows that a rank sends to experts, for a micro-batch: T·k, the busiest rank's; padded to the
    capacity where there is one.

    Of ranks that have all experts (ep = 1) none is busier than the others. A capacity of
    ceil(factor · T·k / E) rows for every expert (MoE Parallel Folding's text; its equation 4 is for
    k = 1).
    """
    choices = rows_of_rank(job, setup) * setup.micro_batch * job.model.top_k
    if job.capacity_factor is None:
        return round(choices * min(job.imbalance, setup.ep))
    return job.model.experts * math.ceil(job.capacity_factor * choices / job.model.experts - 1e-9)


def _sent(
    job: Job, setup: Setup, software: Software, moe: bool, *, of_gradients: bool = False
) -> list[tuple[LayerOp, StepCollective]]:
    """The exchanges of a layer's operations, each with its own. ``of_gradients``: those for the
    experts with the sizes of what each call's way back sends."""
    tokens_bytes = rows_of_rank(job, setup) * setup.micro_batch * software.activation_bytes
    dispatched: dict[str, list[StepCollective]] = {}
    for each in _dispatched(job, setup, software, of_gradients=of_gradients) if moe else ():
        dispatched.setdefault(each.place, []).append(each)
    found = []
    for op in layer_table(job.model, cut_of(setup, software), moe):
        if op.exchange is not None:
            name, axis, collective, elements = op.exchange
            size, count = tokens_bytes * elements, 1
            if axis == "cp":  # blocks of all ranks are gathered, or passed on
                collective, size, count = (
                    (SEND_RECV, size, setup.cp - 1) if software.context == "ring" else (collective, size * setup.cp, 1)
                )
            found.append((op, StepCollective(name, axis, axis, collective, size, op.name, count)))
        elif op.name in dispatched:
            found += [(op, each) for each in dispatched[op.name]]
    return [(op, each) for op, each in found if _is_sent(setup, each)]


def _dispatched(job: Job, setup: Setup, software: Software, *, of_gradients: bool) -> Iterator[StepCollective]:
    """The exchanges for the experts: what their balance is judged by, how many rows go where, and these, out and home.

    By all_to_all over ep and all_gather over etp; or all tokens go to all ranks that hold experts, with their choices
    and weights, and sums come back.
    """
    model, both, axis = job.model, setup.ep * setup.etp, "etp_ep" if setup.etp > 1 else "ep"
    size = (2 * model.experts + 3) * _STATISTIC_BYTES * software.balances
    yield StepCollective("balance", "stage", "dp", "all_reduce", size, "balance")
    fixed, each, reached = software.count_words
    if job.capacity_factor is None or fixed:  # padded rows need none, but for what ranks tell each other beside
        words = fixed + each * model.experts + (reached * setup.ep if setup.etp == 1 else 0)
        yield StepCollective("counts", axis, "ep", "all_gather", words * _COUNT_BYTES * both, "counts")
    if setup.exchange == "all_gather":
        tokens = rows_of_rank(job, setup) * setup.micro_batch * both
        size, choices = tokens * model.routed_hidden * software.activation_bytes, tokens * model.top_k
        yield StepCollective("choices", axis, "ep", "all_gather", choices * INDEX_BYTES, "counts")
        yield StepCollective("tokens", axis, "ep", "all_gather", size, "dispatch")
        yield StepCollective("weights", axis, "ep", "all_gather", choices * WEIGHT_BYTES, "combine")
        yield StepCollective("tokens_sum", axis, "ep", "reduce_scatter", size, "combine")
        return
    rows = dispatched_rows(job, setup)
    out, home = (
        rows * software.row_bytes(model.routed_hidden, to_experts=way is not of_gradients) for way in (True, False)
    )
    weights = rows * WEIGHT_BYTES * software.sends_weights
    yield StepCollective("dispatch", "ep", "ep", "all_to_all_v", out, "dispatch")
    yield StepCollective("dispatch_weights", "ep", "ep", "all_to_all_v", weights, "dispatch")
    yield StepCollective("experts_gather", "etp", "ep", "all_gather", out * setup.etp, "gather_experts")
    yield StepCollective("experts_gather_weights", "etp", "ep", "all_gather", weights * setup.etp, "gather_experts")
    yield StepCollective("experts_sum", "etp", "ep", "reduce_scatter", home * setup.etp, "scatter_experts")
    yield StepCollective("combine", "ep", "ep", "all_to_all_v", home, "combine")


def _layer_weights(
    job: Job, setup: Setup, software: Software, moe: bool, *, is_backward: bool = False
) -> tuple[StepCollective, ...]:
    """ZeRO-3: a layer's weights are gathered where they are needed, also once more for the backward pass."""
    if setup.zero < 3:
        return ()
    held = layer_parameters(job.model, setup, software, moe)
    gathered = [_gathered_weights(axis, count, setup, software) for axis, count in held.items()]
    return _kept(setup, *([each.renamed("_again") for each in gathered] if is_backward else gathered))


def _gathered_weights(axis: str, elements: int, setup: Setup, software: Software, count: int = 1) -> StepCollective:
    size = elements * software.gathered_weight_bytes(setup.precision)
    return StepCollective(f"{axis}_parameters", axis, "dp", "all_gather", size, "parameters", count)


def _scattered_sum(axis: str, elements: int, software: Software, count: int = 1) -> StepCollective:
    size = elements * software.gradient_bytes
    return StepCollective(f"{axis}_gradients", axis, "dp", "reduce_scatter", size, "gradients", count)


# What a step sends beside its layers


def step_exchanges(job: Job, setup: Setup, software: Software, *, stage: int = 0) -> tuple[StepCollective, ...]:
    """List the exchanges of one rank of pipeline stage ``stage``, for a whole step, beside what its
    layers send for each micro-batch.

    Gradients come in the order in which a backward pass makes them; ``count``: of equal layers or
    buckets, and of micro-batches.

    Raises:
        UsageError: no such stage. GroupError: the batch cannot be split.
    """
    if not 0 <= stage < setup.pp:
        raise UsageError(f"stage: expected one of {setup.pp}, from 0, got {stage}")
    # Activations to the next stage, their gradients to the one before. With interleaved chunks the last stage's neighbour is the
    # first, but for the model's own ends; where the V of DualPipeV turns there is none.
    elements = job.model.streams * job.model.hidden
    size = rows_of_rank(job, setup) * setup.micro_batch * elements * software.activation_bytes
    turns = setup.schedule == "dualpipev" and stage == setup.pp - 1
    ends = ends_at(job.model, setup, stage)
    passes = setup.micro_batches(job) // setup.copies
    forth, back = (
        passes * (len(setup.pipeline.chunks(stage)) - is_end - turns) for is_end in (ends.head, ends.embedding)
    )
    activations = StepCollective("activations", "pp", "pp", SEND_RECV, size, "boundary", forth)
    boundaries = activations, replace(_mirrored(activations), count=back)
    return _kept(setup, *boundaries, *_ends(job, setup, software, ends), *_sums(job, setup, software, stage, ends))


def whole_step(job: Job, setup: Setup, software: Software, *, stage: int = 0) -> tuple[StepCollective, ...]:
    """Everything that one rank of this stage sends in a step."""
    micro_batches = setup.micro_batches(job) // setup.copies
    found: list[StepCollective] = []
    for moe, count in zip((False, True), layers_of(job.model, setup, stage), strict=True):
        if count:
            layer = layer_forward(job, setup, software, moe=moe) + layer_backward(job, setup, software, moe=moe)
            found += [replace(each, count=each.count * count * micro_batches) for each in layer]
    return (*found, *step_exchanges(job, setup, software, stage=stage))


def _ends(job: Job, setup: Setup, software: Software, ends: StageEnds) -> list[StepCollective]:
    """Embedding, head and loss. Where tp splits the vocabulary, partial rows of the embedding are
    summed and scattered, the head's input is gathered, and the loss needs the largest logit, the
    label's and the sum of exponentials (Megatron-LM)."""
    sent, whole = setup.micro_batches(job) // setup.copies, rows_of_rank(job, setup) * setup.tp * setup.micro_batch
    found: list[StepCollective] = []
    modules = sent * job.model.mtp_layers
    heads = sent + modules
    if software.splits_ends:
        size = whole * job.model.hidden * software.activation_bytes
        if ends.embedding:
            embedding = StepCollective("embedding", "tp", "tp", "reduce_scatter", size, "embedding", sent)
            found += [embedding, _mirrored(embedding)]
        if ends.head:
            head = StepCollective("head", "tp", "tp", "all_gather", size, "head", heads)
            again = [replace(head, name="head_again")] if software.gathers_again else []
            found += [head, *again, _mirrored(head)]
            found.append(StepCollective("vocabulary", "tp", "tp", "all_reduce", whole * _LOSS_BYTES, "loss", 3 * heads))
        if ends.modules:
            # a module's own embedding of the token, and the two hidden states that its projection joins
            token = StepCollective("mtp_embedding", "tp", "tp", "reduce_scatter", size, "embedding", modules)
            joined = StepCollective("mtp_joined", "tp", "tp", "all_gather", 2 * size, "head", modules)
            found += [token, _mirrored(token), joined, _mirrored(joined)]
    axis = "world" if software.sums_loss_over_world else "dp_cp"
    if axis == "world" or ends.head:
        found.append(StepCollective("loss", axis, "ep" if axis == "world" else "dp", "all_reduce", _LOSS_BYTES, "loss"))
    return found


def _sums(job: Job, setup: Setup, software: Software, stage: int, ends: StageEnds) -> list[StepCollective]:
    """List the sums of gradients, and the gathers of sharded parameters, over the data-parallel
    ranks.

    Without ZeRO that is an all_reduce, with ZeRO 1 a reduce_scatter and an all_gather. With ZeRO 2
    the layers sum their gradients themselves, and with ZeRO 3 they gather their parameters too, so
    neither is listed here.
    """
    found: list[StepCollective] = []
    over_tp = replicated_elements(job.model, setup, software, stage) * software.gradient_bytes
    found.append(StepCollective("replicated_gradients", "tp", "tp", "all_reduce", over_tp, "gradients"))
    ties, modules = job.model.ties_embeddings, job.model.mtp_layers > 0
    has_copy = (ties and ends.head) or (modules and ends.modules)
    if (ties or modules) and setup.pp > 1 and ends.embedding != has_copy:
        # Of the stages with the embedding and with its copy alone; there is no axis of those.
        _, size = end_parameters(job.model, setup, software, 0)[0][0]
        found.append(
            StepCollective("tied_gradients", "pp", "pp", "all_reduce", size * software.gradient_bytes, "gradients")
        )
    if setup.zero == 0 and software.bucket_bytes is not None:
        # an all_reduce of each bucket of at most so many bytes
        held = stage_parameters(job.model, setup, software, stage)
        cut = bucket_bytes(held, software.gradient_bytes, software.bucket_bytes)
        found += [
            StepCollective(f"{axis}_gradients", axis, "dp", "all_reduce", size, "gradients", count)
            for axis, sizes in cut.items()
            for size, count in Counter(sizes).items()
        ]
    elif software.bucket_bytes is not None and setup.zero == 1:
        # a flat buffer for each axis: its gradients after the backward pass, its parameters after the step
        for axis, elements in by_axis(stage_parameters(job.model, setup, software, stage)).items():
            row = axis_size(setup, axis) * _SHARD_ELEMENTS
            filled = -(-elements // row) * row
            found += [_scattered_sum(axis, filled, software), _gathered_weights(axis, filled, setup, software)]
    else:
        found += _of_layers(job, setup, software, stage)
    if setup.copies > 1:
        found += _of_copies(job, setup, software, stage)
    return found


def _of_copies(job: Job, setup: Setup, software: Software, stage: int) -> list[StepCollective]:
    """List what the two pipeline ranks send each other that have the same layers with DualPipe:
    they sum what the data-parallel ranks have summed, and with ZeRO 1 each has half of it, and
    sends the weights of that back."""
    elements = 0.0
    for axis, number in stage_parameters(job.model, setup, software, stage):
        elements += number / (axis_size(setup, axis) if setup.zero else 1)
    size = round(elements * software.gradient_bytes)
    # An all_reduce of two ranks sends as much as it has; a reduce_scatter half of it.
    parts = {"gradients": size, "parameters": 0}
    if setup.zero:
        weights = round(elements * software.gathered_weight_bytes(setup.precision))
        parts = {"gradients": size // 2, "parameters": weights // 2}
    return [StepCollective(f"copies_{place}", "pp", "dp", SEND_RECV, sent, place) for place, sent in parts.items()]


def _of_layers(job: Job, setup: Setup, software: Software, stage: int) -> list[StepCollective]:
    """Layer by layer: without ZeRO an all_reduce of each, with ZeRO 1 to 3 what is sharded. From 2 on
    the layers send their own gradients; what is no layer's is sent with every micro-batch too."""
    sent = setup.micro_batches(job) // setup.copies
    found = []
    first, last = end_parameters(job.model, setup, software, stage)
    ends = [(axis, elements, 1) for axis, elements in by_axis([*last, *first]).items()]
    dense, moe = layers_of(job.model, setup, stage)
    layers = [
        (axis, elements, count)
        for is_moe, count in ((True, moe), (False, dense))
        if count
        for axis, elements in layer_parameters(job.model, setup, software, is_moe).items()
    ]
    for unit in [*ends, *layers]:
        axis, elements, count = unit
        if setup.zero == 0:
            size = elements * software.gradient_bytes
            found.append(StepCollective(f"{axis}_gradients", axis, "dp", "all_reduce", size, "gradients", count))
            continue
        if setup.zero == 1 or unit in ends:
            found.append(_scattered_sum(axis, elements, software, count * (1 if setup.zero == 1 else sent)))
        if setup.zero <= 2 or unit in ends:
            times = 1 if setup.zero <= 2 else 2 * sent
            found.append(_gathered_weights(axis, elements, setup, software, count * times))
    return found
