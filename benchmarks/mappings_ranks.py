"""The program that every rank of ``make bench-mappings`` runs: steps of the model, curves of its groups, and computation alone.

The ranks of a node share the cores of that node alone, so that a stage of a pipeline that waits does not lend its cores to
another: what is computed takes as long whatever the others do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from mappings_job import GPUS, MODEL, NODES, RANKS, SEQUENCE, Case
from shape_profiles import measure_groups

from commlayer.collectives import GroupCommunicator
from commlayer.emulation import await_device
from commlayer.emulation.accelerators.device_clock import device_clock
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.router import RouterConfig
from commlayer.measure.profiler import SweepOptions
from commlayer.profiles.sweep import Repeats
from examples.block import MoETransformerLayer
from examples.context_parallel import context_parallel_attention
from examples.language_model import MoELanguageModel

__all__ = ["ComputeTimes", "Layer", "run_compute", "run_curves", "run_steps"]

_COLLECTIVES = ("all_gather_single", "reduce_scatter_single", "all_reduce", "all_to_all_v")


@dataclass(frozen=True)
class Layer:
    """One layer alone on each rank: positions and sequences of its input, how many experts it has, a token's choices, and µs of
    the forward and the backward pass."""

    sequence: int
    batch: int
    experts: int
    top_k: int
    forward_us: float
    backward_us: float


@dataclass(frozen=True)
class ComputeTimes:
    """(FLOPs, µs) of one product; of the attention's core, forward and backward; and whole layers. All ranks at once."""

    products: list[tuple[float, float]]
    core_forward: list[tuple[float, float]]
    core_backward: list[tuple[float, float]]
    layers: list[Layer]


def start(backend: str, lanes: str = "off") -> None:
    """Initialise this rank, on the cores of its node; where it stands for an accelerator, which computes elsewhere, on any."""
    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= NODES and device_clock() is None:
        share = len(cores) // NODES
        node = rank // RANKS
        os.sched_setaffinity(0, cores[node * share : (node + 1) * share])
    torch.set_num_threads(1)
    os.environ["COMMLAYER_PROFILE"] = "none"  # nothing is planned: every call is the backend's own
    os.environ["COMMLAYER_LANES"] = lanes
    dist.init_process_group(backend)


def slowest(value: float) -> float:
    """Over all ranks."""
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def run_steps(cases: list[Case], steps: int, warmup: int) -> list[list[float]]:
    """µs of each timed step of each case: from a common start until the last rank is done. Forward pass, backward pass and the
    sums of gradients; no optimizer."""
    start("commlayer", "on" if cases[0].overlaps else "off")
    found = []
    for case in cases:
        with FoldedMesh(case.degrees) as mesh:
            model = MoELanguageModel(case.config, mesh)
            times = []
            for step in range(warmup + steps):
                generator = torch.Generator().manual_seed(step)
                tokens = torch.randint(MODEL.vocabulary, (SEQUENCE, case.job.global_batch), generator=generator)
                model.zero_grad()
                dist.barrier()
                begin = time.perf_counter()
                model.train_step(tokens, tokens.roll(-1, 0), num_micro_batches=case.micro_batches)
                await_device()
                times.append(slowest((time.perf_counter() - begin) * 1e6))
            found.append(times[warmup:])
    dist.destroy_process_group()
    return found


def run_curves(shapes: dict[str, list[tuple[int, ...]]], max_bytes: int, rate_gbps: float) -> dict[str, str]:
    """A profile, as text, of every shape of group."""
    start("gloo")
    options = SweepOptions(
        min_bytes=1024,
        max_bytes=max_bytes,
        factor=4.0,
        repeats=Repeats(warmup=1, min_repeats=5, max_repeats=15, half_width=0.05, budget_us=1.5e6),
        inter_gbps=rate_gbps / RANKS,
    )
    found = {}
    for name, groups in shapes.items():
        wanted = (*_COLLECTIVES, *(["send_recv"] if len(groups[0]) == 2 else []))
        profile = measure_groups(
            groups,
            options,
            name=f"emulated {name}",
            source="make bench-mappings",
            collectives=wanted,
        )
        found[name] = profile.to_json()
    dist.destroy_process_group()
    return found


def timed(task: Callable[[], object], seconds: float) -> float:
    """µs of ``task`` where all ranks run it at once: what it takes of a core, times the ranks that share each. By processor time,
    which other work on the machine hardly changes; the median over ranks. Of a rank that stands for an accelerator, what that and
    its host take, by the clock."""
    clock = time.process_time if device_clock() is None else time.perf_counter
    task()
    await_device()
    begin = time.perf_counter()
    task()
    await_device()
    times = max(3, round(seconds / max(slowest(time.perf_counter() - begin), 1e-9)))
    dist.barrier()
    begin = clock()
    for _ in range(times):
        task()
    await_device()
    mine = torch.tensor([(clock() - begin) * 1e6 / times], dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(GPUS)]
    dist.all_gather(everyone, mine)
    sharing = max(1.0, RANKS / len(os.sched_getaffinity(0))) if device_clock() is None else 1.0
    return median(float(each) for each in everyone) * sharing


def run_compute(seconds: float) -> ComputeTimes:
    """Each point for about ``seconds``."""
    start("gloo")
    products = [_product(rows, seconds) for rows in (16, 64, 256, 512, 1024, 2048)]
    cores = [_core(batch, heads, seconds) for batch, heads in ((1, 2), (1, 4), (1, 8), (2, 8), (4, 8))]
    wanted = ((SEQUENCE, 1, 8, 2), (SEQUENCE, 2, 8, 2), (SEQUENCE, 4, 8, 2), (SEQUENCE, 2, 2, 2), (SEQUENCE, 4, 2, 2))
    layers = [_layer(*each, seconds) for each in wanted]
    dist.destroy_process_group()
    return ComputeTimes(products, [core[0] for core in cores], [core[1] for core in cores], layers)


def _product(rows: int, seconds: float) -> tuple[float, float]:
    """The mean of a product and those of its two gradients."""
    hidden, width = MODEL.hidden, MODEL.width
    x, w, g = torch.randn(rows, hidden), torch.randn(width, hidden), torch.randn(rows, width)
    total = timed(lambda: (x @ w.t(), g @ w, g.t() @ x), seconds)
    return 2.0 * rows * hidden * width, total / 3


def _core(batch: int, heads: int, seconds: float) -> tuple[tuple[float, float], tuple[float, float]]:
    kv_heads = max(1, heads * MODEL.kv_heads // MODEL.heads)
    cp = GroupCommunicator(None, "cp")
    q = torch.randn(SEQUENCE, batch, heads, MODEL.head_dim, requires_grad=True)
    k, v = (torch.randn(SEQUENCE, batch, kv_heads, MODEL.head_dim, requires_grad=True) for _ in range(2))

    def forward() -> torch.Tensor:
        return context_parallel_attention(q, k, v, cp=cp, seq_len=SEQUENCE)

    gradient = torch.randn(forward().shape)
    alone = timed(forward, seconds)
    both = timed(lambda: forward().backward(gradient), seconds)
    flops = 2.0 * batch * SEQUENCE * SEQUENCE / 2 * 2 * MODEL.head_dim * heads
    return (flops, alone), (2.5 * flops, max(both - alone, 1.0))


def _layer(sequence: int, batch: int, experts: int, top_k: int, seconds: float) -> Layer:
    router = RouterConfig(num_experts=experts, top_k=top_k, capacity_factor=1.0, pad_to_capacity=True)
    layer = MoETransformerLayer(
        MODEL.hidden, MODEL.heads, MODEL.kv_heads, MODEL.width, router, dispatch="all_to_all", chunks="auto"
    )
    x = torch.randn(sequence, batch, MODEL.hidden, requires_grad=True)
    gradient = torch.randn(sequence, batch, MODEL.hidden)

    def both() -> None:
        layer.zero_grad()
        x.grad = None
        layer(x).backward(gradient)

    alone = timed(lambda: layer(x), seconds)
    return Layer(sequence, batch, experts, top_k, alone, timed(both, seconds) - alone)
