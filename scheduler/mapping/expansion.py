"""Expert and context parallelism for sequences from 4K to 1M tokens: side by side, along each other, or folded into a node.

MoNTA (section "Cluster Expansion", figure 12) lays a node of t GPUs as one tensor-parallel group, and ep and cp over
nodes:

- *horizontal*: EP ⊥ CP. Each of the cp nodes of a sequence exchanges tokens with ep nodes of other sequences. The network
  must join cp · ep nodes.
- *vertical*: EP ∥ CP. The ep nodes that exchange tokens are those that share the sequence. The network must join max(cp, ep)
  nodes.

The paper's rule: horizontal while cp < ep and the network joins cp · ep nodes, "larger than 32K but smaller than 256K" tokens;
vertical from cp ≥ ep. Nothing crosses below: with cp = 1 the two are the same.

The third way came later (MoE Parallel Folding, arXiv:2504.14960): *folded*, with experts spread over the GPUs of a node, where
attention is tensor parallel. No token leaves its node for an expert while ep is at most the domain; the network joins the cp
nodes of a sequence (more where etp · ep spans several domains).

As setups (:class:`~commlayer.scheduler.mapping.job.Setup`): horizontal is ``folded=False``; vertical is folded with etp = tp,
which lays ep along cp; folded has etp = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping import memory
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.model import ModelShape
from commlayer.scheduler.mapping.recomputation import Recompute
from commlayer.scheduler.mapping.result import StepEstimate
from commlayer.scheduler.mapping.search import Estimates
from commlayer.scheduler.mapping.software import COMMLAYER, Software

__all__ = [
    "SEQUENCES",
    "TOKENS_PER_RANK",
    "WAYS",
    "ContextLayout",
    "ContextRow",
    "Expansion",
    "Way",
    "cp_by_memory",
    "cp_by_tokens",
    "expansion",
    "network_nodes",
    "recommend",
]

Way = Literal["horizontal", "vertical", "folded"]
WAYS: tuple[Way, ...] = ("horizontal", "vertical", "folded")
SEQUENCES = tuple(1024 * 2**power for power in range(2, 11))
"""4K to 1M tokens."""
TOKENS_PER_RANK = 32 * 1024
"""Tokens of a sequence for each rank of cp (a node): MoNTA's 256K tokens, from which on cp ≥ ep = 8."""


@dataclass(frozen=True, kw_only=True)
class ContextLayout:
    """One way at one sequence length.

    Attributes:
        network_nodes: that one switch network must join, for ep and cp together.
        gpus: the fewest on which it can be laid. setup: on as many as all three ways can.
        estimate: where an estimator was given and it fits; ``note`` says why not.
    """

    way: Way
    network_nodes: int
    gpus: int
    setup: Setup
    estimate: StepEstimate | None
    note: str


@dataclass(frozen=True, kw_only=True)
class ContextRow:
    """One sequence length. ``by_rule``: MoNTA's choice of the first two, and its ``reason``. ``fastest``: of those that
    the network joins by their estimates; None without. At equal times that of the rule, then the one that is named first."""

    sequence: int
    cp: int
    job: Job
    layouts: tuple[ContextLayout, ...]
    by_rule: Way
    reason: str
    fastest: Way | None

    def layout(self, way: Way) -> ContextLayout:
        """The layout of one way."""
        return next(layout for layout in self.layouts if layout.way == way)


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """A model from the shortest to the longest sequence. ``switch_at``: the first sequence with cp ≥ ep, from which on
    expansion is vertical; None where none is so long. ``joined_nodes``: by the network, at most; None: any number."""

    model: ModelShape
    cluster: str
    tp: int
    ep: int
    pp: int
    joined_nodes: int | None
    rows: tuple[ContextRow, ...]
    switch_at: int | None


def cp_by_tokens(sequence: int, tokens_per_rank: int = TOKENS_PER_RANK) -> int:
    """The least power of two of ranks that have at most ``tokens_per_rank`` tokens each."""
    return _power_of_two(-(-sequence // tokens_per_rank))


def cp_by_memory(
    model: ModelShape,
    sequence: int,
    *,
    tp: int,
    ep: int,
    pp: int,
    recompute: Recompute,
    memory_limit: float,
    software: Software = COMMLAYER,
) -> int:
    """The least power of two of cp with which one sequence fits, laid out horizontally with as many GPUs as that takes.

    Raises UsageError where no cp does: weights, gradients and optimizer alone are too much.
    """
    cp, needed = 1, math.inf
    while sequence % (2 * cp * tp) == 0:
        setup = Setup(gpus=tp * cp * ep * pp, tp=tp, cp=cp, pp=pp, ep=ep, etp=tp, recompute=recompute, folded=False)
        job = Job(model=model, gpus=setup.gpus, global_batch=setup.dp * pp, sequence=sequence)
        needed = min(needed, memory.estimate(job, setup, software.gradient_bytes, software=software).total)
        if needed <= memory_limit:
            return cp
        cp *= 2
    raise UsageError(
        f"{model.name} with a sequence of {sequence} tokens fits with no cp: the least needs {needed / 1e9:.1f} GB of "
        f"{memory_limit / 1e9:.1f} GB (tp={tp}, ep={ep}, pp={pp}, recompute={recompute}); take a higher pp or ep"
    )


def network_nodes(way: Way, *, tp: int, cp: int, ep: int, domain: int) -> int:
    """How many nodes one switch network must join for ep and cp together.

    MoNTA, with nodes of one tp group each: cp · ep (horizontal), max(cp, ep) (vertical). Folded: the nodes of a sequence's tp
    · cp GPUs, or of an expert group's ep GPUs if those are more. With several tp groups in a node as many fewer nodes.
    """
    gpus = {"horizontal": tp * cp * ep, "vertical": tp * max(cp, ep), "folded": max(tp * cp, ep)}[way]
    return -(-gpus // domain)


def recommend(*, tp: int, cp: int, ep: int, domain: int, joined_nodes: int | None = None) -> tuple[Way, str]:
    """MoNTA's rule, and its reason. ``joined_nodes``: by the network, at most; None: any number."""
    wide = network_nodes("horizontal", tp=tp, cp=cp, ep=ep, domain=domain)
    narrow = network_nodes("vertical", tp=tp, cp=cp, ep=ep, domain=domain)
    if cp >= ep:
        return (
            "vertical",
            f"cp={cp} ≥ ep={ep}: those who share a sequence hold all experts; a network of {narrow} nodes is enough",
        )
    if joined_nodes is not None and wide > joined_nodes:
        return (
            "vertical",
            f"cp={cp} < ep={ep}, but horizontal needs a network of {wide} nodes, and it joins {joined_nodes}",
        )
    if cp == 1:
        return "horizontal", "cp=1: horizontal and vertical are the same"
    return (
        "horizontal",
        f"cp={cp} < ep={ep}: an expert group has sequences of its own; it needs a network of {wide} nodes",
    )


def expansion(
    model: ModelShape,
    cluster: Cluster,
    *,
    ep: int,
    tp: int | None = None,
    pp: int = 1,
    sequences: Sequence[int] = SEQUENCES,
    tokens_per_rank: int | None = TOKENS_PER_RANK,
    memory_limit: float | None = None,
    recompute: Recompute = "megascale",
    micro_batches: int | None = None,
    joined_nodes: int | None = None,
    make: Callable[[Job, Cluster], Estimates] | None = None,
    software: Software = COMMLAYER,
) -> Expansion:
    """Compute what each way needs and takes, from the shortest to the longest sequence.

    Estimates are on as many GPUs as all ways can be laid on, with the same sequences a step: attention is the same in all
    three.

    Args:
        tp: the domain unless given.
        tokens_per_rank: of a sequence, on each rank of cp; None: cp follows from memory, and needs ``memory_limit`` (bytes of
        a GPU).
        micro_batches: of each data-parallel rank in a step; 4 · pp unless given.
        joined_nodes: by the network, at most; None: any number.
        make: an estimator of a job; without one nothing is estimated.
        software: whose memory counts, where cp follows from it.

    Raises:
        UsageError: sequences or degrees out of their range, or a sequence that fits with no cp.
    """
    tp, micro_batches = tp or cluster.domain, micro_batches or 4 * pp
    numbers = {"ep": ep, "tp": tp, "pp": pp, "micro_batches": micro_batches, "tokens_per_rank": tokens_per_rank or 1}
    for name, value in {**numbers, **{f"sequences[{i}]": value for i, value in enumerate(sequences)}}.items():
        if type(value) is not int or value < 1:
            raise UsageError(f"{name}: expected a whole number of at least 1, got {value!r}")
    if not sequences or (tokens_per_rank is None and memory_limit is None):
        raise UsageError("expected at least one sequence; and tokens_per_rank, or memory_limit from which cp follows")
    rows = []
    for sequence in sorted(set(sequences)):
        if memory_limit is not None and tokens_per_rank is None:
            cp = cp_by_memory(
                model, sequence, tp=tp, ep=ep, pp=pp, recompute=recompute, memory_limit=memory_limit, software=software
            )
        else:
            cp = cp_by_tokens(sequence, tokens_per_rank or TOKENS_PER_RANK)
        degrees = _Degrees(tp, cp, ep, pp, recompute)
        rows.append(_row(model, cluster, sequence, degrees, micro_batches, joined_nodes, make))
    return Expansion(
        model=model,
        cluster=cluster.name,
        tp=tp,
        ep=ep,
        pp=pp,
        joined_nodes=joined_nodes,
        rows=tuple(rows),
        switch_at=next((row.sequence for row in rows if row.cp >= ep), None),
    )


class _Degrees(NamedTuple):
    tp: int
    cp: int
    ep: int
    pp: int
    recompute: Recompute

    def etp(self, way: Way) -> int:
        return 1 if way == "folded" else self.tp

    def gpus(self, way: Way) -> int:
        """The fewest on which this way can be laid."""
        attention, experts = self.tp * self.cp, self.etp(way) * self.ep
        return self.pp * (attention * self.ep if way == "horizontal" else math.lcm(attention, experts))

    def setup(self, way: Way, gpus: int) -> Setup:
        return Setup(
            gpus=gpus,
            tp=self.tp,
            cp=self.cp,
            pp=self.pp,
            ep=self.ep,
            etp=self.etp(way),
            recompute=self.recompute,
            folded=way != "horizontal",
        )


def _row(
    model: ModelShape,
    cluster: Cluster,
    sequence: int,
    degrees: _Degrees,
    micro_batches: int,
    joined_nodes: int | None,
    make: Callable[[Job, Cluster], Estimates] | None,
) -> ContextRow:
    tp, cp, ep, pp, _ = degrees
    gpus = math.lcm(*(degrees.gpus(way) for way in WAYS))
    batch = gpus // (tp * cp * pp) * micro_batches
    job = Job(model=model, gpus=gpus, global_batch=batch, sequence=sequence)
    estimator = make(job, cluster) if make else None
    layouts = []
    for way in WAYS:
        setup = degrees.setup(way, gpus)
        estimate, note = _estimate(estimator, setup)
        nodes = network_nodes(way, tp=tp, cp=cp, ep=ep, domain=cluster.domain)
        layouts.append(
            ContextLayout(
                way=way, network_nodes=nodes, gpus=degrees.gpus(way), setup=setup, estimate=estimate, note=note
            )
        )
    by_rule, reason = recommend(tp=tp, cp=cp, ep=ep, domain=cluster.domain, joined_nodes=joined_nodes)
    known = [
        (layout.estimate.step_us, layout.way != by_rule, index)
        for index, layout in enumerate(layouts)
        if layout.estimate and (joined_nodes is None or layout.network_nodes <= joined_nodes)
    ]
    return ContextRow(
        sequence=sequence,
        cp=cp,
        job=job,
        layouts=tuple(layouts),
        by_rule=by_rule,
        reason=reason,
        fastest=layouts[min(known)[2]].way if known else None,
    )


def _estimate(estimator: Estimates | None, setup: Setup) -> tuple[StepEstimate | None, str]:
    if estimator is None:
        return None, ""
    try:
        needed = estimator.memory(setup).total
        if needed > estimator.memory_limit:
            return None, f"does not fit: {needed / 1e9:.1f} GB of {estimator.memory_limit / 1e9:.1f} GB"
        return estimator.estimate(setup), ""
    except UsageError as error:
        return None, str(error)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
