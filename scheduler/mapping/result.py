"""The result of an estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from commlayer.profiles.counted import counted
from commlayer.scheduler.conflicts import Forecast
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.pipeline_schedule import StageTimes
from commlayer.scheduler.mapping.validity import CaseKind, CheckedRow, Validity

__all__ = ["Memory", "StepEstimate", "Traffics", "describe_memory", "describe_validity", "kind_words"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of the fullest GPU. ``buffers``: what communication and the largest temporary tensors need. ``offloaded``: of its
    activations, that lie in the host's memory meanwhile; no part of ``total``."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    offloaded: float = 0.0

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
        parts: step_us taken apart, by name, in order; they add up to it: attention, experts, dense, memory (what is
            bound by it: norms, SwiGLU, permutations), head, recompute, host (what is exposed of its launches), dispatch,
            combine, tp, cp, pp, gradients, parameters (what is exposed of each), bubble, optimizer; and offload, where
            activations cross to the host.
        mean_parts: the same as the mean of the pipeline's ranks has it, what they wait for the slowest as bubble; empty where
            nobody asked for all of an estimate.
        exposed_us: communication that nothing hides, by lane (ep, tp, pp, cp, dp, and offload: to the host).
        traffics: every collective of a step, of one rank of the last stage. forward, backward: the simulated course of the first
            stage's layers with the first micro-batch (beside the gathering of weights) and with the last (beside gradients); of
            one layer where nothing of that is overlapped. merged: of one layer, forward with one micro-batch and backward with
            another, where the schedule merges them. ranks: one micro-batch through all layers of each pipeline rank.
        links_us: as ``exposed_us``, by link class. bottleneck: of these and of compute what the step spends most in.
        validity: how far such a case has been checked; None: nobody asked.
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
    merged: Forecast | None = field(default=None, repr=False)
    notes: tuple[str, ...] = field(default=())
    links_us: Mapping[str, float] = field(default_factory=dict)
    ranks: tuple[StageTimes, ...] = field(default=(), repr=False)
    validity: Validity | None = field(default=None, repr=False)
    mean_parts: Mapping[str, float] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        setup, needed = self.setup, f"{self.memory.total / 1e9:.1f} of {self.memory_limit / 1e9:.1f} GB"
        degrees = " ".join(f"{name}={getattr(setup, name)}" for name in ("tp", "cp", "dp", "pp", "vpp", "ep", "etp"))
        return (
            f"{self.job.model.name} on {counted(setup.gpus, 'GPU')} of {self.cluster} by {self.software}, {degrees}: a step of "
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
    def waits_us(self) -> dict[str, float]:
        """The time that the step waits for each link class, its host and other stages, by words; the longest first."""
        waits_us = {f"{link} links": us for link, us in self.links_us.items() if us > 0}
        if host_us := self.parts.get("host", 0.0):
            waits_us["its host"] = host_us
        if bubble_us := self.parts.get("bubble", 0.0):
            waits_us["other pipeline stages"] = bubble_us
        return dict(sorted(waits_us.items(), key=lambda each: -each[1]))

    @property
    def interval_us(self) -> tuple[float, float]:
        """The interval in which the step lies, by published runs, and in which ``step_us`` does; of no
        width where nobody asked. Products in BF16 do not go beyond their peak."""
        if self.validity is None:
            return self.step_us, self.step_us
        low, high = self.validity.interval(self.step_us)
        if self.setup.precision == "bf16":  # what was measured is inside all the same
            low = max(low, self.step_us * min(self.mfu, 1.0, 1 + self.validity.own))
        return low, high

    @property
    def likely_us(self) -> float:
        """The step that half of such runs take longer than; ``step_us`` where nobody asked."""
        low, high = self.interval_us
        likely = self.step_us * (1 + (self.validity.middle if self.validity else 0.0))
        return min(max(likely, low), high)

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.memory_limit


def describe_memory(needed: Memory) -> str:
    """Its parts, the largest first."""
    names = ("weights", "gradients", "optimizer", "activations", "buffers")
    parts = sorted(((getattr(needed, name), name) for name in names), reverse=True)
    return ", ".join(f"{name} {size / 1e9:.1f}" for size, name in parts)


def describe_validity(estimate: StepEstimate) -> list[str]:
    """The trust that an estimate deserves, in sentences: its interval, then the nearest published runs. Empty
    where nobody asked."""
    validity = estimate.validity
    if validity is None:
        return []
    low, high = estimate.interval_us
    tokens = estimate.job.tokens
    half = "" if validity.is_unseen else f", more than {estimate.likely_us / 1e3:,.0f} ms in half of them"
    said = (
        f"{validity.word}: a step takes {low / 1e3:,.0f} to {high / 1e3:,.0f} ms in 8 of 10 such cases{half}; "
        f"MFU {estimate.mfu * estimate.step_us / high:.1%} to {estimate.mfu * estimate.step_us / low:.1%}, "
        f"{tokens / high * 1e6:,.0f} to {tokens / low * 1e6:,.0f} tokens/s; {_known(validity)}"
    )
    return [said, *(_near(validity.kind, row) for row in validity.nearest)]


def _known(validity: Validity) -> str:
    kind = kind_words(validity.kind)
    if validity.fitted is not None:
        pairs, number = validity.fitted.num_pairs, validity.fitted.differences
        differences = counted(number, "trait") if number else "no trait"
        return f"fitted to what was measured: by {pairs} pairs of published runs that differ in {differences} ({kind})"
    if validity.is_new:
        return f"no published run that we know of was on such a machine ({kind})"
    if validity.is_new_attention:
        return f"no published run of a model with {validity.kind.attention} attention could be predicted ({kind})"
    if not validity.num_rows:
        if not validity.nearest:
            return f"no published run is known ({kind})"
        others = counted(len(validity.kind.differs(validity.nearest[0].kind)), "trait")
        return f"by published runs that differ from this kind ({kind}) in {others} or more"
    runs, sources = counted(validity.num_rows, "published run"), counted(validity.num_sources, "source")
    return f"{runs} of this kind ({kind}), of {sources}"


def _near(kind: CaseKind, row: CheckedRow) -> str:
    """A near run: how far off it was predicted, and what is different about it."""
    others = kind.differs(row.kind)
    difference = f"differs in {', '.join(others)}" if others else "of this kind"
    return f"nearest: {row.key}: took {1 + row.error:.2f} times as long as predicted; {difference}"


def kind_words(kind: CaseKind) -> str:
    """A kind of case in words, without its model and size."""
    where = {"alone": "experts whole", "inside": "experts inside a node", "between": "experts between nodes"}
    machine = [kind.generation.capitalize(), kind.fabric, kind.software]
    words = [*machine, kind.precision.upper(), where[kind.experts], kind.dispatcher]
    if kind.overlap != "none":
        words.append(f"overlap {kind.overlap}")
    return ", ".join(
        [*words, *["fused experts"] * kind.fused, *["short layers"] * kind.short, *["sharded weights"] * kind.sharded]
    )
