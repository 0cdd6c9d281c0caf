"""Jobs, which say what is to be trained, and setups, each one way of doing it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from commlayer.profiles.errors import GroupError, UsageError
from commlayer.scheduler.mapping.folded import FoldedMapping
from commlayer.scheduler.mapping.imbalance import Loads
from commlayer.scheduler.mapping.model import ModelShape
from commlayer.scheduler.mapping.offloading import KEPT, Offload, canonical_offload, unfit_offload
from commlayer.scheduler.mapping.pipeline_layout import (
    AUTO_LAYOUT,
    EVEN_LAYOUT,
    Pipeline,
    canonical_layout,
    parse_layout,
)
from commlayer.scheduler.mapping.pipeline_schedule import (
    PipelineSchedule,
    merges,
    unfit,
)
from commlayer.scheduler.mapping.precisions import Precision
from commlayer.scheduler.mapping.recomputation import Recompute, canonical, unfit_modules

__all__ = ["Attention", "ExchangeKind", "Job", "Precision", "Recompute", "Setup"]

ExchangeKind = Literal["all_to_all", "all_gather"]
Attention = Literal["tensor", "ulysses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job: what is to be trained, whatever the mapping.

    Attributes:
        global_batch: sequences a step, of all GPUs together.
        sequence: tokens in each.
        capacity_factor: experts have capacity_factor · tokens · top_k / experts rows each, filled up or dropped, so that neither
            ``imbalance`` nor ``loads`` can be given beside it; None: every choice (dropless).
        imbalance: rows of the busiest rank of an expert group over their mean, at least 1; 1.0: routing is even.
            (:mod:`commlayer.scheduler.mapping.imbalance` has it from a distribution of experts' loads.)
        loads: experts' popularity; in place of ``imbalance``, which then follows from ep.

    Raises:
        UsageError: a number out of its range; uneven routing beside a capacity.
    """

    model: ModelShape
    gpus: int
    global_batch: int
    sequence: int
    capacity_factor: float | None = None
    imbalance: float = 1.0
    loads: Loads | None = None

    def __post_init__(self) -> None:
        _check_whole(self, "gpus", "global_batch", "sequence")
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise UsageError(f"capacity_factor: expected a positive number or None, got {self.capacity_factor!r}")
        if not 1 <= self.imbalance < math.inf:
            raise UsageError(f"imbalance: expected at least 1 (the busiest rank over the mean), got {self.imbalance!r}")
        if self.capacity_factor is not None and (self.imbalance > 1 or self.loads is not None):
            given = "imbalance" if self.loads is None else "loads"
            raise UsageError(
                f"{given}: with capacity_factor={self.capacity_factor:g} every expert has as many rows, filled up or dropped, "
                f"however uneven routing is: leave out one of them"
            )

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A mapping and how it is run: what the search chooses.

    Attributes:
        gpus, tp, cp, pp, ep, etp: as :class:`~commlayer.scheduler.mapping.folded.FoldedMapping`.
        vpp: chunks of layers that each pipeline rank has, interleaved; 1: none are, as with DualPipe.
        micro_batch: sequences of a micro-batch of one data-parallel rank.
        recompute: of activations in the backward pass: ``none``, ``megascale`` (MegaScale-MoE A.2), ``full`` (a layer's input
            stays), or modules by Megatron's names (:mod:`commlayer.scheduler.mapping.recomputation`).
        precision: of matrix products, by a recipe (:mod:`commlayer.scheduler.mapping.precisions`); ``fp8``: the GPU's usual one.
        exchange: the collective by which tokens go to experts.
        attention: ``tensor`` (Megatron's TP with sequence parallelism) or ``ulysses`` (DeepSpeed-Ulysses, MegaScale-MoE's SP).
        zero: what data parallelism shards: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too.
        folded: the MoE mapping is free of the attention's. False: as before folding, etp = tp and ep is a part of dp, beyond cp,
            and where it is more than that (or another factor of it) of cp too.
        schedule: of micro-batches in the pipeline (:mod:`commlayer.scheduler.mapping.pipeline_schedule`).
        offload: activations that lie in the host's memory until their backward pass, by Megatron's names of modules
            (:mod:`commlayer.scheduler.mapping.offloading`); ``none``: all stay.
        pipeline_layout: which layers each chunk has: ``even``, ``auto``, or spelt out, such as ``Et*3|(tt|)*6tL``
            (:mod:`commlayer.scheduler.mapping.pipeline_layout`); it is kept in one way of writing.

    Raises:
        UsageError: a number or a word out of its range; a schedule that does not go with the other degrees, with what is
            recomputed, or with what is sharded; a layout that is none, or of another number of chunks.
        GroupError: degrees that do not divide, or that are not of the unfolded kind although ``folded`` is False.
    """

    gpus: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    micro_batch: int = 1
    recompute: Recompute = "none"
    precision: Precision = "bf16"
    exchange: ExchangeKind = "all_to_all"
    attention: Attention = "tensor"
    zero: int = 1
    folded: bool = True
    schedule: PipelineSchedule = "1f1b"
    offload: Offload = KEPT
    pipeline_layout: str = EVEN_LAYOUT

    def __post_init__(self) -> None:
        _check_whole(self, "gpus", "tp", "cp", "pp", "ep", "etp", "vpp", "micro_batch")
        if type(self.zero) is not int or not 0 <= self.zero <= 3:
            raise UsageError(f"zero: expected 0, 1, 2 or 3, got {self.zero!r}")
        words = {
            "precision": Precision,
            "exchange": ExchangeKind,
            "attention": Attention,
            "schedule": PipelineSchedule,
        }
        for name, kind in words.items():
            if getattr(self, name) not in get_args(kind):
                raise UsageError(f"{name}: expected {' or '.join(get_args(kind))}, got {getattr(self, name)!r}")
        if self.gpus % (self.tp * self.cp * self.pp) or self.gpus % (self.etp * self.ep * self.pp):
            # its message names the nearest degrees that do divide
            FoldedMapping(self.gpus, self.tp, self.cp, self.pp, self.ep, self.etp)
        _check_ways(self)
        if self.pipeline_layout != EVEN_LAYOUT:
            object.__setattr__(self, "pipeline_layout", canonical_layout(self.pipeline_layout))
        if self.pipeline_layout not in (EVEN_LAYOUT, AUTO_LAYOUT):
            chunks, pipeline = len(parse_layout(self.pipeline_layout)), self.pipeline
            if chunks != pipeline.num_chunks:
                times = f" × vpp={self.vpp}" if self.vpp > 1 else ""
                raise UsageError(
                    f"pipeline layout {self.pipeline_layout}: it has {chunks} chunks, but pp={self.pp}{times} with "
                    f"{self.schedule} makes {pipeline.num_chunks}: change it, pp or vpp"
                )
        if not self.folded and (self.etp != self.tp or self.cp % (self.ep // math.gcd(self.ep, self.dp))):
            raise GroupError(
                f"unfolded means etp = tp (got etp={self.etp}, tp={self.tp}) and ep={self.ep} a part of dp={self.dp} × "
                f"cp={self.cp}: change them, or let the mapping fold"
            )

    @property
    def dp(self) -> int:
        """Data parallelism of attention."""
        return self.gpus // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Data parallelism of experts."""
        return self.gpus // (self.etp * self.ep * self.pp)

    def layout(self, axis: str) -> tuple[tuple[int, int], ...]:
        """How the ranks of ``axis`` lie: (size, stride) of each part; its first group holds rank 0.

        Axes: tp, cp, dp, pp, etp, ep, edp, tp_cp, dp_cp, etp_ep, stage, world. Folded: as FoldedMapping, innermost tp-cp-dp-pp
        and etp-ep-edp-pp. Unfolded: ep lies in dp, beyond tp·cp, and what dp has no room for in cp; etp's ranks are tp's, edp's
        are what is left of cp and dp. (MoE Parallel Folding, section 4.4: then "the EP group spans across multiple context
        parallelism groups". Its table 5 has such mappings with ep > dp.)
        """
        if axis not in _LAYOUTS:
            raise GroupError(f"expected one of the axes {', '.join(_LAYOUTS)}, got {axis!r}")
        return _LAYOUTS[axis](self)

    def micro_batches(self, job: Job) -> int:
        """Count the micro-batches of each data-parallel rank in a step. Raises GroupError where the batch cannot be split so."""
        each = self.dp * self.micro_batch
        if job.global_batch % each:
            raise GroupError(
                f"global_batch={job.global_batch} is no multiple of dp={self.dp} × micro_batch={self.micro_batch} = {each}: "
                "change the batch, the micro-batch or the degrees"
            )
        return job.global_batch // each

    @property
    def pipeline(self) -> Pipeline:
        """How the layers are cut into chunks, and laid on ranks."""
        return Pipeline(self.pp, self.vpp, self.schedule, self.pipeline_layout)

    @property
    def copies(self) -> int:
        """Pipeline ranks that have the same layers, and share the micro-batches: two with DualPipe."""
        return 2 if self.schedule == "dualpipe" else 1

    @property
    def is_merged(self) -> bool:
        """Whether forward and backward of two micro-batches are merged layer by layer."""
        return merges(self.schedule)

    def check(self, job: Job) -> None:
        """Whether it is a way to do ``job``, as far as the model has no say in that.

        Raises:
            GroupError: another number of GPUs; a batch or a sequence that it does not divide; chunks of layers without a
                pipeline, or whose order needs a multiple of pp micro-batches; too few micro-batches for the schedule.
        """
        if self.gpus != job.gpus:
            raise GroupError(f"the job has {job.gpus} GPUs, but the setup {self.gpus}: give both as many")
        if job.sequence % (self.cp * self.tp):
            raise GroupError(
                f"cp={self.cp} × tp={self.tp} must divide a sequence of {job.sequence} tokens: change them, or pad sequences"
            )
        count = self.micro_batches(job)
        if self.vpp > 1 and (self.pp == 1 or count % self.pp):
            raise GroupError(
                f"vpp={self.vpp}: interleaved chunks need a pipeline, and a multiple of pp={self.pp} micro-batches, got {count}: "
                "set vpp to 1, or change pp, the batch or the micro-batch"
            )
        if why := unfit(self.schedule, self.pp, self.vpp, count):
            raise GroupError(f"schedule {self.schedule}: {why}")

    def __str__(self) -> str:
        """The mapping in words, such as ``TP2 CP1 EP8 ETP1 PP8 VPP7 DP8 mb1 bf16 all_to_all``."""
        words = [
            f"TP{self.tp} CP{self.cp} EP{self.ep} ETP{self.etp} PP{self.pp} VPP{self.vpp} DP{self.dp}",
            f"micro-batch {self.micro_batch}",
            "" if self.recompute == "none" else f"recompute {self.recompute}",
            "" if self.precision == "bf16" else self.precision,
            "" if self.exchange == "all_to_all" else self.exchange,
            "" if self.attention == "tensor" else self.attention,
            "" if self.zero == 1 else f"ZeRO {self.zero}",
            "" if self.folded else "unfolded",
            "" if self.schedule == "1f1b" else self.schedule,
            "" if self.offload == KEPT else f"offload {self.offload}",
            "" if self.pipeline_layout == EVEN_LAYOUT else f"layout {self.pipeline_layout}",
        ]
        return ", ".join(word for word in words if word)


_Layout = tuple[tuple[int, int], ...]


def _ep(setup: Setup) -> _Layout:
    if setup.folded:
        return ((setup.ep, setup.etp),)
    outer = math.gcd(setup.ep, setup.dp)
    return (setup.ep // outer, setup.tp), (outer, setup.tp * setup.cp)


def _edp(setup: Setup) -> _Layout:
    if setup.folded:
        return ((setup.edp, setup.etp * setup.ep),)
    outer, beyond = math.gcd(setup.ep, setup.dp), setup.tp * setup.cp
    inner = setup.ep // outer
    return (setup.cp // inner, setup.tp * inner), (setup.dp // outer, beyond * outer)


_LAYOUTS: dict[str, Callable[[Setup], _Layout]] = {
    "tp": lambda setup: ((setup.tp, 1),),
    "cp": lambda setup: ((setup.cp, setup.tp),),
    "dp": lambda setup: ((setup.dp, setup.tp * setup.cp),),
    "pp": lambda setup: ((setup.pp, setup.gpus // setup.pp),),
    "tp_cp": lambda setup: ((setup.tp * setup.cp, 1),),
    "dp_cp": lambda setup: ((setup.dp * setup.cp, setup.tp),),
    "stage": lambda setup: ((setup.gpus // setup.pp, 1),),
    "world": lambda setup: ((setup.gpus, 1),),
    "etp": lambda setup: ((setup.etp, 1),),
    "ep": _ep,
    "edp": _edp,
    "etp_ep": lambda setup: ((setup.etp * setup.ep, 1),) if setup.folded else ((setup.tp, 1), *_ep(setup)),
}
"""The layout of each axis (:meth:`Setup.layout`)."""


def _check_whole(given: Job | Setup, *names: str) -> None:
    for name in names:
        value = getattr(given, name)
        if type(value) is not int or value < 1:
            raise UsageError(f"{name}: expected a whole number of at least 1, got {value!r}")


def _check_ways(setup: Setup) -> None:
    """Check that the schedule goes with the rest, and what is computed again or offloaded with both."""
    is_merged, is_overlap = setup.is_merged, setup.schedule == "1f1b-overlap"
    why = unfit(setup.schedule, setup.pp, setup.vpp) if is_merged else ""
    if is_merged and setup.recompute == "full":
        why = "its merged layers cannot be computed again as a whole: set recompute to megascale or none"
    elif not why and is_overlap and setup.ep == 1:
        why = "there is no exchange of tokens to hide, got ep=1: take 1f1b"
    elif not why and is_overlap and setup.exchange == "all_gather":
        why = "it hides an exchange by all_to_all, got exchange=all_gather: set all_to_all"
    elif not why and is_merged and setup.zero > 1 and setup.pp > 1:
        why = f"its gradients are summed once a step, got zero={setup.zero} with pp={setup.pp}: set zero to 0 or 1"
    if why:
        raise UsageError(f"schedule {setup.schedule}: {why}")
    for name, modules in (("recompute", canonical(setup.recompute)), ("offload", canonical_offload(setup.offload))):
        if (given := getattr(setup, name)) != modules:
            raise UsageError(
                f"{name}: expected each module once, by its name and in this order: {modules!r}, got {given!r}"
            )
    if why := unfit_modules(setup.recompute, precision=setup.precision, is_merged=is_merged):
        raise UsageError(f"recompute {setup.recompute}: {why}")
    if why := unfit_offload(setup.offload, setup.recompute):
        raise UsageError(f"offload {setup.offload}: {why}")
