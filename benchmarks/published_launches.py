"""Whether launching kernels explains what is missing in short layers: a count of a layer's kernels, and what they take a host.

A host launches a layer's kernels one by one, and the GPU cannot be faster. Counted are those that Megatron-Core and Transformer
Engine launch at least, less what CUDA graphs hold:

- one for each norm, product, rotary embedding, fused attention, residual sum, activation function, copy and collective call; in
  FP8 one more for each tensor that is cast (weights are cast once a step);
- a product and a cast for each local expert (GroupedLinear: cuBLAS on several streams);
- the router's 31 forward, or 17 where kernels dispatch (NVIDIA's guide to DeepSeek-V3 on GB200, sections 2.1.4 and 2.2.1), and
  backward its two products, as nobody says more.

The time of a launch is that of PyTorch's ``nn.Linear`` forward, one kernel, on the host (TransformerEngine#2053, 2025-08-11).
That is long for kernels that a loop in C++ launches, as experts', and short for Transformer Engine's modules in Python, of which
the same table has 99.66 µs for a ``Linear`` on GB200. Left out: a floor of the estimate's layers made of these, as it explains no
far row. Rejected: a dearer launch, fitted to the rows, which others of them contradict (:data:`DEAR`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from papers_text import prose, table
from published_data import Published
from published_predict import Outcome

from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.result import StepEstimate
from commlayer.scheduler.mapping.software import MEGATRON, with_dispatcher
from commlayer.scheduler.mapping.step_collectives import layer_backward, layer_forward

__all__ = ["DEAR", "HOST_US", "Launches", "launches", "section"]

HOST_US = {"x86": 13.48, "grace": 37.08}
"""The host's time for PyTorch's nn.Linear forward, µs: a DGX H100 (Xeon Platinum 8480C), and a GB200 (TransformerEngine#2053)."""
_ROUTER, _ROUTER_BESIDE_KERNELS = 31, 17
_HELD = {
    "none": (),
    "router": ("router", "shared"),
    "attention and router": ("attention", "router", "shared"),
    "attention, router and shared experts": ("attention", "router", "shared"),
    "full iteration": ("attention", "router", "shared", "experts", "copies", "calls"),
}
"""The parts of a layer that a row's graphs hold; each is launched at once. Those of the router hold shared experts too (the
guide, section 2.3)."""

DEAR = 3
"""The factor by which a launch would have to be dearer to make up for what is missing in many rows with x86 hosts."""
_TEXT = """
### Short layers and launches

Sources call runs like these bound by the host, which launches kernels more slowly than they run. Launches are not modelled, as
no public number that we found explains the rows. Below is what a layer with experts launches at least for a micro-batch, forward
and backward, times what PyTorch's `nn.Linear` takes a host ({x86} µs on a DGX H100's Xeon, {grace} µs on a GB200's Grace:
TransformerEngine#2053), beside the whole layer as predicted and as published (the step without the pipeline's bubble, over
layers and micro-batches). `benchmarks/published_launches.py` says what is counted.
"""
_SAID = """
By this count {late} of these {far} rows launch for longer than their layers are predicted to take. Launches {dear} times as dear
would make up for much, but of all {all} runs {faster} take less than that, as published. Other sources say that launches matter,
and that they are not all: of what the steps in NVIDIA's guide to DeepSeek-V3 on GB200 saved, 37 % is of those that concern the
host alone (fewer kernels in the router, graphs, cores bound; from its table of TFLOP/s); and CUDA graphs of attention and router
shortened one Qwen3-30B's step on 16 H100 from 623 to 484 ms (TP2 PP2 EP4), and another's not at all (EP16: 41.36 s without,
42.00 s with; Megatron-Bridge, docs/training/cuda-graphs.md and skills/nemo-mbridge-perf-cuda-graphs/card.yaml).
"""


class Launches(NamedTuple):
    """Kernels that a host launches for a micro-batch in one layer with experts."""

    forward: int
    backward: int

    def held(self) -> Launches:
        """The same in a graph: one launch each way."""
        return Launches(min(1, self.forward), min(1, self.backward))


def launches(job: Job, setup: Setup, row: Published) -> Launches:
    """Count the kernels of a layer with experts that a host launches one by one, and the graphs that it launches."""
    held = _HELD[row.graph]
    found = [each.held() if name in held else each for name, each in _parts(job, setup, row).items()]
    forward = sum(each.forward for each in found)
    again = forward if setup.recompute == "full" else 0
    return Launches(forward, sum(each.backward for each in found) + again)


def _parts(job: Job, setup: Setup, row: Published) -> dict[str, Launches]:
    model, casts = job.model, int(setup.precision != "bf16")
    by_kernels = row.dispatcher != "nccl"
    local = max(1, model.experts // setup.ep)
    products, norms = (2, 1) if model.latent is None else (4 + bool(model.latent.q_rank), 2 + bool(model.latent.q_rank))
    around = norms + 4  # two rotations, the core, the residual sum, whose gradient is itself
    attention, experts = _products(products, casts), _products(2 * local, casts)
    copies = 2 if by_kernels or local == 1 else 4  # out and home; where a rank has several experts, once more by expert
    software = with_dispatcher(MEGATRON, row.dispatcher)
    found = {
        "attention": Launches(attention.forward + around, attention.backward + around - 1),
        "router": Launches(_ROUTER_BESIDE_KERNELS if by_kernels else _ROUTER, 2),
        "copies": Launches(copies, copies),
        "experts": Launches(experts.forward + 1, experts.backward + 1),
        "calls": Launches(len(layer_forward(job, setup, software)), len(layer_backward(job, setup, software))),
    }
    if model.shared_width:
        shared = _products(2, casts)
        found["shared"] = Launches(shared.forward + 1, shared.backward + 1)
    return found


def _products(number: int, casts: int) -> Launches:
    """Forward one each and a cast of what goes in; backward two, and a cast of the gradient."""
    return Launches(number * (1 + casts), number * (2 + casts))


def section(found: Sequence[Outcome], far: float) -> str:
    """Rows with short layers that were predicted too fast by more than ``far``: their launches beside what their layers take."""
    lines, late, faster = [], 0, 0
    for each in found:
        assert each.estimate is not None
        number, layer_us = sum(launches(each.estimate.job, each.estimate.setup, each.row)), _layer_us(each.estimate)
        launched_us = number * HOST_US["grace" if each.row.system.startswith("gb") else "x86"]
        published_us = layer_us * each.predicted / each.published
        faster += published_us < DEAR * launched_us
        if each.kind is not None and each.kind.short and (each.error or 0.0) > far:
            late += launched_us > layer_us
            lines.append((each.row.key, number, *(f"{us / 1e3:.1f}" for us in (launched_us, layer_us, published_us))))
    if not lines:
        return ""
    head = ("row", "launches", "they take, ms", "layer as predicted, ms", "layer as published, ms")
    said = _SAID.format(late=late, far=len(lines), dear=DEAR, all=len(found), faster=faster)
    return "\n\n".join((prose(_TEXT.format(**HOST_US)), prose(said), table(head, lines)))


def _layer_us(estimate: StepEstimate) -> float:
    """The time of a layer for a micro-batch, all that a step has beside them taken for theirs (as in validity.kind_of)."""
    setup, busy_us = estimate.setup, estimate.step_us * (1 - estimate.bubble)
    return busy_us / setup.micro_batches(estimate.job) / (estimate.job.model.layers / setup.pp)
