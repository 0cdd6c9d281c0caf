"""Whether launching kernels explains what is missing in short layers: a count of a layer's kernels, and what they take a host.

A host launches a layer's kernels one by one, and the GPU cannot be faster. Counted are those that Megatron-Core and Transformer
Engine launch at least, less what CUDA graphs hold:

- one for each norm, product, rotary embedding, fused attention, residual sum, activation function, copy and collective call; in
  FP8 one more for each tensor that is cast (weights are cast once a step);
- a product and a cast for each local expert (GroupedLinear: cuBLAS on several streams);
- the router's 31 forward, or 17 where kernels dispatch (NVIDIA's guide to DeepSeek-V3 on GB200, sections 2.1.4 and 2.2.1), and
  backward its two products, as nobody says more.

The time of a launch is that of PyTorch's ``nn.Linear`` forward, one kernel, on the host (TransformerEngine#2053, 2025-08-11),
which is short for Transformer Engine's modules in Python, of which the same table has 99.66 µs for a ``Linear`` on GB200. That of
an expert's product is longer (:data:`PRODUCT_US`): cuBLAS is asked for an algorithm each time. Forward and backward are compared
apart, as the host waits for the counts of tokens in every forward pass of an all_to_all, and is not ahead of the GPU then. Left
out: a floor of the estimate's passes made of these, as it explains hardly a far row. Rejected: a dearer launch, fitted to the
rows, which others of them contradict (:data:`DEAR`).
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

__all__ = ["DEAR", "HOST_US", "PRODUCT_US", "Launches", "launches", "section"]

HOST_US = {"x86": 13.48, "grace": 37.08}
"""The host's time for PyTorch's nn.Linear forward, µs: a DGX H100 (Xeon Platinum 8480C), and a GB200 (TransformerEngine#2053)."""
PRODUCT_US = 33.4
"""The host's time for one expert's product in Transformer Engine's grouped product of several streams, µs: 0.267 ms for eight
of 128 × 2048 × 2048 in NVFP4, which a Blackwell does in a quarter of that by one launch (TransformerEngine#3134, 2026-06-17; on
which host is not said)."""
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
no public number that we found explains the rows. Below is what a layer with experts launches at least for a micro-batch, times
what PyTorch's `nn.Linear` takes a host ({x86} µs on a DGX H100's Xeon, {grace} µs on a GB200's Grace: TransformerEngine#2053),
and {product} µs for each expert's product (0.267 ms for eight small ones: TransformerEngine#3134), beside the passes as
predicted, forward + backward, and the whole layer as published (the step without the pipeline's bubble, over layers and
micro-batches). An all_to_all has the host wait in each forward pass, so that neither pass can take less than its launches.
`benchmarks/published_launches.py` says what is counted.
"""
_SAID = """
By this count {late} of these {far} rows launch a pass for longer than it is predicted to take; the largest change of a layer that
this makes is {most}. Launches {dear} times as dear would make up for much, but of all {all} runs {faster} take less than that, as
published. Other sources say that launches matter,
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


def _launched_us(each: Outcome) -> tuple[float, float]:
    """The host's time for a layer's launches, forward and backward."""
    assert each.estimate is not None
    job, setup, row = each.estimate.job, each.estimate.setup, each.row
    number, host_us = launches(job, setup, row), HOST_US["grace" if row.system.startswith("gb") else "x86"]
    products = 0 if "experts" in _HELD[row.graph] else 2 * max(1, job.model.experts // setup.ep)
    dearer_us = max(PRODUCT_US - host_us, 0.0)
    again = products if setup.recompute == "full" else 0
    return number.forward * host_us + products * dearer_us, number.backward * host_us + (
        2 * products + again
    ) * dearer_us


def section(found: Sequence[Outcome], far: float) -> str:
    """Rows with short layers that were predicted too fast by more than ``far``: their launches beside what their layers take."""
    lines, late, faster, most = [], 0, 0, 0.0
    for each in found:
        assert each.estimate is not None
        launched, layer_us = _launched_us(each), _layer_us(each.estimate)
        published_us = layer_us * each.predicted / each.published
        faster += published_us < DEAR * sum(launched)
        if each.kind is not None and each.kind.short and (each.error or 0.0) > far:
            waited_us = sum(max(us - passed_us, 0.0) for us, passed_us in zip(launched, each.passes_us, strict=True))
            late, most = late + (waited_us > 0), max(most, waited_us / layer_us)
            number = sum(launches(each.estimate.job, each.estimate.setup, each.row))
            lines.append((each.row.key, number, *map(_both, (launched, each.passes_us)), f"{published_us / 1e3:.1f}"))
    if not lines:
        return ""
    head = ("row", "launches", "they take, ms", "passes as predicted, ms", "layer as published, ms")
    said = _SAID.format(late=late, far=len(lines), most=f"{most:.0%}", dear=DEAR, all=len(found), faster=faster)
    return "\n\n".join((prose(_TEXT.format(product=PRODUCT_US, **HOST_US)), prose(said), table(head, lines)))


def _both(passes_us: tuple[float, float]) -> str:
    return " + ".join(f"{us / 1e3:.1f}" for us in passes_us)


def _layer_us(estimate: StepEstimate) -> float:
    """The time of a layer for a micro-batch, all that a step has beside them taken for theirs (as in validity.kind_of)."""
    setup, busy_us = estimate.setup, estimate.step_us * (1 - estimate.bubble)
    return busy_us / setup.micro_batches(estimate.job) / (estimate.job.model.layers / setup.pp)
