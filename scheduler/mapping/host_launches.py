"""Kernels that a host launches for a layer, and the time that a GPU waits for them.

A host launches a layer's kernels one by one, and a GPU that has nothing in its queue waits. Counted
are the rows of a layer's table (mapping/layer_table.py) and its calls:

- a kernel for each product, move in memory, core of attention, call, and way into the order of
  experts; two products backward; in FP8 one more for each tensor that is cast;
- a product and a cast for each local expert (Transformer Engine's GroupedLinear: cuBLAS on several
  streams), or one for all where experts are fused;
- the router's, which NVIDIA counted (:data:`_ROUTER`); backward its two products, as nobody says more.

What a CUDA graph holds is launched at once (:attr:`Software.graphs`).

Of each launch a part of its time is exposed, whatever the GPU computes: most kernels of a layer are
short, between few long ones. How much, is set by the published runs of Megatron-Core, as no
public number says (:class:`~commlayer.scheduler.mapping.hardware.Gpu`, docs/published.md).

A host that waits in every layer for counts cannot run ahead, so that a pass takes at least as long as
the host is busy with its calls (:func:`host_calls`), however few tokens there are: of AWS's runs those
with micro-batches of 1 and of 4 sequences, and with passes merged, differ by a few per cent a layer,
and those with 4 and with 8 experts on a rank not at all.
Rejected: this alone, without the exposed part, whose mean error over the runs of Megatron-Core is 19 %,
where a sum has 13 %.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.layer_table import layer_table
from commlayer.scheduler.mapping.parameters import cut_of
from commlayer.scheduler.mapping.software import Graphed, Software
from commlayer.scheduler.mapping.step_collectives import layer_backward, layer_forward

__all__ = ["LayerLaunches", "host_calls", "layer_launches", "waits_for_counts"]

_ROUTER, _ROUTER_BESIDE_KERNELS = 31, 17
"""Kernels of a router's forward pass, with calls of all_to_all, and where kernels dispatch (NVIDIA's
guide to DeepSeek-V3 on GB200, sections 2.1.4 and 2.2.1)."""
_GRAPHED: dict[str, Graphed] = {
    **dict.fromkeys(("norm", "before_attention", "projections", "rotation", "context", "core"), "attention"),
    **dict.fromkeys(("after_attention", "out"), "attention"),
    **dict.fromkeys(("middle", "router", "balance", "counts", "before_ffn", "shared", "after_ffn"), "router"),
}
"""The graph that can hold a segment of a layer; others only one of the whole step can. A router's holds
shared experts too (the guide, section 2.3)."""


class LayerLaunches(NamedTuple):
    """Kernels and graphs that a host launches for a micro-batch in one layer."""

    forward: int
    backward: int


def layer_launches(
    job: Job, setup: Setup, software: Software, *, is_moe: bool = True, posts: bool = False
) -> LayerLaunches:
    """Count what a host launches for one layer. With full recomputation the backward pass launches
    the forward pass's again. A graph of the whole step holds nothing where the host has to read
    counts in it; ``posts`` as of :func:`waits_for_counts`."""
    is_held = "step" in software.graphs and not waits_for_counts(job, setup, software, posts=posts)
    if software.host == "unknown" or is_held:
        return LayerLaunches(0, 0)
    return _counted(job, setup, software, is_moe)


def host_calls(job: Job, setup: Setup, software: Software, *, is_moe: bool = True) -> LayerLaunches:
    """Count the calls by which a host launches one layer. All experts of a rank are one call, which
    launches their kernels in a loop of C++; a router's backward pass is taken to have as many as its
    forward pass. Kernels that dispatch are taken to leave a host as many as calls of all_to_all:
    AWS's Kimi-K2 takes 5 % longer with them (docs/published.md, micro-batch 1)."""
    software = replace(software, kernels=None, fuses_experts=True)
    return _counted(job, setup, software, is_moe, are_calls=True)


def _counted(job: Job, setup: Setup, software: Software, is_moe: bool, *, are_calls: bool = False) -> LayerLaunches:
    """Count a layer by its operations and its calls, with what graphs hold as one. ``are_calls``: the host's, as of
    :func:`host_calls`."""
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    for op in layer_table(job.model, cut_of(setup, software), is_moe):
        num_forward = num_backward = len(op.moves) + (op.core is not None)
        for product in op.products:
            groups = 1 if software.fuses_experts else product.groups
            casts = product.casts if product.casts is not None else (groups, groups)
            in_fp8 = setup.precision != "bf16" and not product.stays_bf16
            num_forward += groups + casts[0] * in_fp8
            num_backward += 2 * groups + casts[1] * in_fp8
        if op.name == "router":
            num_forward += (_ROUTER if software.kernels is None else _ROUTER_BESIDE_KERNELS) - len(op.products)
            num_backward = max(num_forward, num_backward) if are_calls else num_backward
        if op.reorders:  # calls bring rows by sender, and experts want them in their own order
            again = software.kernels is None and job.model.experts > setup.ep
            num_forward, num_backward = num_forward + 1 + again, num_backward + 1 + again
        forward[_GRAPHED.get(op.name, "")] += num_forward
        backward[_GRAPHED.get(op.name, "")] += num_backward
    for launches, calls in ((forward, layer_forward), (backward, layer_backward)):
        for call in calls(job, setup, software, moe=is_moe):
            launches[_GRAPHED.get(call.place, "")] += call.count
    parts = forward.keys() | backward.keys()
    of_forward, of_backward = (
        sum(1 if part in software.graphs else launches[part] for part in parts) for launches in (forward, backward)
    )
    return LayerLaunches(of_forward, of_backward + of_forward * (setup.recompute == "full"))


def waits_for_counts(job: Job, setup: Setup, software: Software, *, posts: bool = False) -> bool:
    """Whether the host reads in every layer with experts how many tokens come: with calls of
    all_to_all, but where every expert has its capacity; and with kernels, where the host ``posts``
    what they send."""
    reads = setup.ep > 1 and job.capacity_factor is None and (software.kernels is None or posts)
    return reads and software.host == "waits"
