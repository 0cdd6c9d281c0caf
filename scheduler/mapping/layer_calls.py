"""What one layer sends for a micro-batch, forward and backward, in order.

Rows are positions of a sequence; between the sharded parts each rank has S/(cp·tp) of them. Sources: Megatron-LM's sequence
parallelism (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2), DeepSpeed-Ulysses (arXiv:2309.14509), Ring Attention as
Transformer Engine runs it, the six phases of MoE Parallel Folding's dispatcher (its figure 4), and MegaScale-MoE (section 3.2;
A.2 for what selective recomputation sends again).
"""

from __future__ import annotations

import math

from commlayer.scheduler.mapping.exchange import (
    SEND_RECV,
    Exchange,
    head_sizes,
    kept,
    kv_heads_needed,
    mirrored,
    rows_of_rank,
)
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.parameters import layer_parameters
from commlayer.scheduler.mapping.software import Software, splits_ffn

__all__ = ["dispatched_rows", "layer_backward", "layer_forward"]

_INDEX_BYTES = 8  # int64
_WEIGHT_BYTES = 4  # gating weights are FP32
_STATISTIC_BYTES = 8  # FP64
_AGAIN = {
    "tensor": ("sequence", "dispatch", "dispatch_weights", "experts_gather", "experts_gather_weights", "tokens"),
    "ulysses": ("rows", "dispatch", "dispatch_weights", "experts_gather", "experts_gather_weights", "tokens"),
}
"""What selective recomputation sends again: the inputs of attention's projections, or of its last one, and of the experts."""


def layer_forward(job: Job, setup: Setup, software: Software, *, moe: bool = True) -> tuple[Exchange, ...]:
    """Of the forward pass of one micro-batch. ``moe`` False: of a layer with a dense FFN."""
    attention = (*_parameters(job, setup, software, moe), *_attention(job, setup, software))
    return (*attention, *(_experts(job, setup, software) if moe else _dense(job, setup, software)))


def layer_backward(job: Job, setup: Setup, software: Software, *, moe: bool = True) -> tuple[Exchange, ...]:
    """Of the backward pass: what recomputation sends again first, then every exchange's way back, the last one's first.

    What is sent again for the gradient of weights (a sequence that was gathered) comes before the gradient that it runs beside.
    """
    forward = (*_attention(job, setup, software), *(_experts if moe else _dense)(job, setup, software))
    found = [*_parameters(job, setup, software, moe, again=True)]
    if setup.recompute == "full":
        found += [_again(each) for each in forward]
    elif setup.recompute == "selective":
        found += [_again(each) for each in forward if each.name in _AGAIN[setup.attention]]
    for each in reversed(forward):
        if each.place in ("counts", "router"):
            continue
        if _is_gathered_again(each, setup, software):
            found.append(_again(each))
        if each.collective == SEND_RECV:  # keys, values and their gradients go round, both
            found.append(each.renamed("_gradient", logical_bytes=2 * each.logical_bytes))
        else:
            found.append(mirrored(each))
    return (*found, *_gradients(job, setup, software, moe))


def dispatched_rows(job: Job, setup: Setup) -> int:
    """Rows that a rank sends to experts, for a micro-batch: T·k, the busiest rank's; padded to the capacity where there is one.

    Of ranks that have all experts (ep = 1) none is busier than the others. A capacity of ceil(factor · T·k / E) rows for every
    expert (MoE Parallel Folding's text; its equation 4 is for k = 1).
    """
    choices = rows_of_rank(job, setup) * setup.micro_batch * job.model.top_k
    if job.capacity_factor is None:
        return round(choices * min(job.imbalance, setup.ep))
    return job.model.experts * math.ceil(job.capacity_factor * choices / job.model.experts - 1e-9)


def _again(exchange: Exchange) -> Exchange:
    return exchange.renamed("_again")


def _is_gathered_again(exchange: Exchange, setup: Setup, software: Software) -> bool:
    """The gathered input of a product, which is not kept: Megatron-LM gathers it again for the gradient of the weights."""
    is_sent_already = setup.recompute == "selective" and exchange.name in _AGAIN[setup.attention]
    return (
        software.gathers_again
        and not is_sent_already
        and exchange.axis == "tp"
        and exchange.collective == "all_gather"
        and exchange.place in ("before_attention", "before_ffn")
    )


def _attention(job: Job, setup: Setup, software: Software) -> tuple[Exchange, ...]:
    model, width = job.model, software.activation_bytes
    rows = rows_of_rank(job, setup) * setup.micro_batch
    query, key_value, value = head_sizes(model)
    needed = kv_heads_needed(model, setup.tp)
    if setup.attention == "tensor":
        whole = rows * setup.tp * model.hidden * width
        before = Exchange("sequence", "tp", "tp", "all_gather", whole, "before_attention")
        after = Exchange("attention_sum", "tp", "tp", "reduce_scatter", whole, "after_attention")
    else:
        to_heads = rows * (model.heads * query + sum(needed) * key_value) * width
        before = Exchange("heads", "tp", "tp", "all_to_all_v", to_heads, "before_attention")
        to_rows = rows * model.heads * value * width
        after = Exchange("rows", "tp", "tp", "all_to_all_v", to_rows, "after_attention")
    block = rows * setup.tp * max(needed) * key_value * width
    if software.context == "ring":
        context = Exchange("context", "cp", "cp", SEND_RECV, block, "context", setup.cp - 1)
    else:
        context = Exchange("context", "cp", "cp", "all_gather", block * setup.cp, "context")
    return kept(setup, before, context, after)


def _dense(job: Job, setup: Setup, software: Software) -> tuple[Exchange, ...]:
    """Of a dense FFN, or a shared expert, that tp splits: the sequence is gathered before it, and the sums are scattered."""
    if not splits_ffn(software, setup.attention):
        return ()
    whole = rows_of_rank(job, setup) * setup.tp * setup.micro_batch * job.model.hidden * software.activation_bytes
    return kept(
        setup,
        Exchange("ffn_sequence", "tp", "tp", "all_gather", whole, "before_ffn"),
        Exchange("ffn_sum", "tp", "tp", "reduce_scatter", whole, "after_ffn"),
    )


def _experts(job: Job, setup: Setup, software: Software) -> tuple[Exchange, ...]:
    before: tuple[Exchange, ...] = ()
    after: tuple[Exchange, ...] = ()
    if job.model.shared_width:
        before, after = _halves(_dense(job, setup, software))
    if software.balances:
        size = (2 * job.model.experts + 3) * _STATISTIC_BYTES
        before = (*kept(setup, Exchange("balance", "stage", "dp", "all_reduce", size, "router")), *before)
    if setup.dispatch == "all_gather":
        return (*before, *_gathered(job, setup, software), *after)
    return (*before, *_exchanged(job, setup, software), *after)


def _halves(pair: tuple[Exchange, ...]) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    return pair[:1], pair[1:]


def _exchanged(job: Job, setup: Setup, software: Software) -> tuple[Exchange, ...]:
    """all_to_all over ep, all_gather over etp, and back."""
    model = job.model
    rows = dispatched_rows(job, setup)
    size, weights = rows * model.hidden * software.activation_bytes, rows * _WEIGHT_BYTES * software.sends_weights
    return kept(
        setup,
        *_counts(job, setup, software),
        Exchange("dispatch", "ep", "ep", "all_to_all_v", size, "dispatch"),
        Exchange("dispatch_weights", "ep", "ep", "all_to_all_v", weights, "dispatch"),
        Exchange("experts_gather", "etp", "ep", "all_gather", size * setup.etp, "gather_experts"),
        Exchange("experts_gather_weights", "etp", "ep", "all_gather", weights * setup.etp, "gather_experts"),
        Exchange("experts_sum", "etp", "ep", "reduce_scatter", size * setup.etp, "scatter_experts"),
        Exchange("combine", "ep", "ep", "all_to_all_v", size, "combine"),
    )


def _gathered(job: Job, setup: Setup, software: Software) -> tuple[Exchange, ...]:
    """All tokens go to all ranks that hold experts, with their choices and weights, and sums come back."""
    model, axis = job.model, "etp_ep" if setup.etp > 1 else "ep"
    tokens = rows_of_rank(job, setup) * setup.micro_batch * setup.ep * setup.etp
    size = tokens * model.hidden * software.activation_bytes
    return kept(
        setup,
        *_counts(job, setup, software),
        Exchange("choices", axis, "ep", "all_gather", tokens * model.top_k * _INDEX_BYTES, "counts"),
        Exchange("tokens", axis, "ep", "all_gather", size, "dispatch"),
        Exchange("weights", axis, "ep", "all_gather", tokens * model.top_k * _WEIGHT_BYTES, "combine"),
        Exchange("tokens_sum", axis, "ep", "reduce_scatter", size, "combine"),
    )


def _counts(job: Job, setup: Setup, software: Software) -> tuple[Exchange, ...]:
    """How many rows go where. Padded rows need none, but for what ranks tell each other beside (:class:`Software`)."""
    fixed, each = software.count_words
    if job.capacity_factor is not None and not fixed:
        return ()
    size = (fixed + each * job.model.experts) * _INDEX_BYTES * setup.ep * setup.etp
    return (Exchange("counts", "etp_ep" if setup.etp > 1 else "ep", "ep", "all_gather", size, "counts"),)


def _parameters(job: Job, setup: Setup, software: Software, moe: bool, *, again: bool = False) -> tuple[Exchange, ...]:
    """ZeRO-3: a layer's weights are gathered where they are needed."""
    if setup.zero < 3:
        return ()
    found = [
        Exchange(f"{axis}_parameters", axis, "dp", "all_gather", count * software.parameter_bytes, "parameters")
        for axis, count in layer_parameters(job.model, setup, software, moe).items()
    ]
    return kept(setup, *(map(_again, found) if again else found))


def _gradients(job: Job, setup: Setup, software: Software, moe: bool) -> tuple[Exchange, ...]:
    """ZeRO-2 and 3: what is not kept whole is summed with every micro-batch."""
    if setup.zero < 2:
        return ()
    return kept(
        setup,
        *(
            Exchange(f"{axis}_gradients", axis, "dp", "reduce_scatter", count * software.gradient_bytes, "gradients")
            for axis, count in layer_parameters(job.model, setup, software, moe).items()
        ),
    )
