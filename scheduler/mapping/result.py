"""The result of an estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from commlayer.scheduler.conflicts import Forecast
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.pipeline_schedule import StageTimes

__all__ = ["Memory", "StepEstimate", "Traffics", "describe_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of the fullest GPU. ``buffers``: what communication and the largest temporary tensors need."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


@dataclass(frozen=True, slots=True)
class Traffics:
    """The traffic of one collective of a step: ``count`` calls of ``logical_bytes`` each (nccl-tests' S), by one rank.

    ``name``: what it is for (dispatch, combine, gather_tokens …); ``axis``: whose group; ``us``: priced alone, of one call.
    """

    name: str
    axis: str
    lane: str
    collective: str
    logical_bytes: int
    nodes: tuple[int, ...]
    count: int
    us: float
    plan: str
    bottleneck: str


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """One step of ``job`` by ``setup``. Times in µs.

    Attributes:
        step_us: of the whole step. tokens_per_s: of all GPUs. mfu: model FLOPs over peak (causal attention counted by half).
        parts: step_us taken apart, by name, in order; they add up to it: attention, experts, dense, memory (what is bound by
            it: norms, SwiGLU, permutations), head, recompute, dispatch, combine, tp, cp, pp, gradients, parameters (what is
            exposed of each), bubble, optimizer.
        exposed_us: communication that nothing hides, by lane (ep, tp, pp, cp, dp).
        traffics: every collective of a step, of one rank of the last stage. forward, backward: the simulated course of the first
            stage's layers with the first micro-batch (beside the gathering of weights) and with the last (beside gradients); of
            one layer where nothing of that is overlapped. ranks: one micro-batch through all layers of each pipeline rank.
        links_us: as ``exposed_us``, by link class. bottleneck: of these and of compute what the step spends most in.
    """

    job: Job
    setup: Setup
    cluster: str
    software: str
    step_us: float
    mfu: float
    tflops: float
    memory: Memory
    memory_limit: float
    parts: Mapping[str, float]
    exposed_us: Mapping[str, float]
    traffics: tuple[Traffics, ...] = field(
        repr=False
    )  # hundreds of collectives, and thousands of steps: nobody reads them
    bubble: float
    bottleneck: str
    forward: Forecast | None = field(default=None, repr=False)
    backward: Forecast | None = field(default=None, repr=False)
    notes: tuple[str, ...] = field(default=())
    links_us: Mapping[str, float] = field(default_factory=dict)
    ranks: tuple[StageTimes, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        setup, needed = self.setup, f"{self.memory.total / 1e9:.1f} of {self.memory_limit / 1e9:.1f} GB"
        degrees = " ".join(f"{name}={getattr(setup, name)}" for name in ("tp", "cp", "dp", "pp", "vpp", "ep", "etp"))
        return (
            f"{self.job.model.name} on {setup.gpus} GPUs of {self.cluster} by {self.software}, {degrees}: a step of "
            f"{self.step_us / 1e3:,.1f} ms, {self.tokens_per_s / setup.gpus:,.0f} tokens/s and {self.tflops:,.0f} TFLOP/s a GPU, "
            f"MFU {self.mfu:.1%}, most of it {self.bottleneck}, memory {needed}{'' if self.fits else ': does not fit'}"
        )

    @property
    def tokens_per_s(self) -> float:
        return self.job.tokens / self.step_us * 1e6

    @property
    def link(self) -> str:
        """The link class that the step waits for longest; "" where it waits for none."""
        return max(self.links_us, key=lambda name: self.links_us[name], default="")

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.memory_limit


def describe_memory(needed: Memory) -> str:
    """Its parts, the largest first."""
    names = ("weights", "gradients", "optimizer", "activations", "buffers")
    parts = sorted(((getattr(needed, name), name) for name in names), reverse=True)
    return ", ".join(f"{name} {size / 1e9:.1f}" for size, name in parts)
