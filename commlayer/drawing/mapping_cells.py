"""Estimates as rows of tables: the same cells on a terminal and in a report.

A column whose name begins with ">" is right-aligned, with "~" it wraps (:mod:`commlayer.cli.tables`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from commlayer.profiles.counted import counted
from commlayer.scheduler.mapping import parameters
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.result import StepEstimate, Traffics
from commlayer.scheduler.mapping.search import SearchResult
from commlayer.scheduler.mapping.software import named_dispatcher
from commlayer.units import format_bytes

__all__ = [
    "JOB_NUMBERS",
    "MAPPING_COLUMNS",
    "MAPPING_SPARE",
    "MEMORY_COLUMNS",
    "PART_COLUMNS",
    "TRAFFIC_COLUMNS",
    "TRAFFIC_SPARE",
    "exposed_share",
    "interval_words",
    "job_words",
    "mapping_cells",
    "memory_cells",
    "nodes_words",
    "other_bests",
    "part_cells",
    "short_mappings",
    "speed_cells",
    "traffic_cells",
]

MAPPING_COLUMNS = [">#", "~mapping", ">step ms", ">tokens/s", ">MFU", ">memory GB", ">exposed", ">bubble", ">within ms"]
MAPPING_SPARE = (3, 7, 6, 5)
"""Columns that a narrow terminal leaves out: tokens/s, bubble, exposed, memory."""
PART_COLUMNS = ["part of the step", ">ms", ">share"]
MEMORY_COLUMNS = ["memory of the fullest GPU", ">GB", ">share"]
TRAFFIC_COLUMNS = ["what moves", "axis", "collective", ">bytes", "ranks", ">calls", "plan", ">µs a call", ">ms", "link"]
TRAFFIC_SPARE = (9, 1, 6, 7)
"""Columns that a narrow terminal leaves out: link, axis, plan, µs a call."""

JOB_NUMBERS = {"gpus": "GPU", "global_batch": "sequence", "sequence": "token"}
"""The numbers of a job that its description has, and what each counts."""
_GB = 1e9


def job_words(job: Job, cluster: str, software: str, varied: Mapping[str, Sequence[int]] | None = None) -> str:
    """Describe a job: what is trained, on what. ``varied``: the values of a field that has several."""
    sizes = parameters.count(job.model)
    values = {name: (getattr(job, name),) for name in JOB_NUMBERS} | dict(varied or {})
    counts = []
    for name, word in JOB_NUMBERS.items():  # few values are named each, of many the first and the last
        *others, last = values[name]
        which = f"{', '.join(map(str, others))} or {last}" if len(others) < 4 else f"{others[0]} to {last}"
        counts.append(f"{which} {word}s" if others else counted(last, word))
    gpus, sequences, tokens = counts
    words = (
        f"{job.model.name} ({sizes.total / 1e9:.4g} B parameters, {sizes.active / 1e9:.4g} B active) on "
        f"{gpus} of {cluster}, {named_dispatcher(software)}: {sequences} of {tokens} a step"
    )
    if job.capacity_factor is not None:
        words += f", capacity factor {job.capacity_factor:g}"
    if job.loads is not None:
        return f"{words}, skewed routing (the most popular expert gets {max(job.loads.shares):.1%})"
    return words + (f", imbalance {job.imbalance:g}" if job.imbalance != 1 else "")


def exposed_share(estimate: StepEstimate) -> float:
    """Return the share of a step that waits for communication."""
    return sum(estimate.exposed_us.values()) / estimate.step_us


def speed_cells(estimate: StepEstimate) -> list[str]:
    """Return the cells of a mapping and its speed: from ``~mapping`` to ``>MFU`` of :data:`MAPPING_COLUMNS`."""
    speed = f"{estimate.step_us / 1e3:,.1f}", f"{estimate.tokens_per_s:,.0f}", f"{estimate.mfu:.1%}"
    return [str(estimate.setup), *speed]


def short_mappings(setups: Sequence[Setup]) -> tuple[list[str], str]:
    """Name each mapping by its degrees that are not 1 and the words that not all have; also return those that all have."""
    every = [str(setup).split(", ") for setup in setups]
    same = [word for word in every[0][1:] if all(word in words for words in every)] if every else []
    names = []
    for degrees, *words in every:
        shown = [degree for degree in degrees.split() if degree.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ") != "1"]
        names.append(" ".join([*shown, *(word for word in words if word not in same)]) or "DP1")
    return names, ", ".join(same)


def mapping_cells(rank: str, estimate: StepEstimate) -> list[str]:
    """A row of :data:`MAPPING_COLUMNS`."""
    memory = f"{estimate.memory.total / _GB:.1f} of {estimate.memory_limit / _GB:.1f}" + " !" * (not estimate.fits)
    shares = f"{exposed_share(estimate):.1%}", f"{estimate.bubble:.1%}"
    return [rank, *speed_cells(estimate), memory, *shares, interval_words(estimate)]


def interval_words(estimate: StepEstimate) -> str:
    """The interval of a step in ms, by published runs of its kind; empty where nobody asked."""
    if estimate.validity is None:
        return ""
    low, high = (us / 1e3 for us in estimate.interval_us)
    return f"{low:,.0f} to {high:,.0f}" if low >= 100 else f"{low:.3g} to {high:.3g}"


def other_bests(result: SearchResult) -> dict[str, StepEstimate]:
    """Return the best folded and the best unfolded mapping, where the ranking does not show it."""
    shown = {estimate.setup for estimate in result.shown}
    others = {"folded": result.best_folded, "unfolded": result.best_unfolded}
    return {kind: best for kind, best in others.items() if best is not None and best.setup not in shown}


def part_cells(estimate: StepEstimate) -> list[list[str]]:
    """Rows of :data:`PART_COLUMNS`; parts that take nothing are left out."""
    rows = [[name, f"{us / 1e3:,.2f}", f"{us / estimate.step_us:.1%}"] for name, us in estimate.parts.items() if us > 0]
    return [*rows, ["the step", f"{estimate.step_us / 1e3:,.2f}", ""]]


def memory_cells(estimate: StepEstimate) -> list[list[str]]:
    """Rows of :data:`MEMORY_COLUMNS`."""
    memory, limit = estimate.memory, estimate.memory_limit
    parts = ("weights", "gradients", "optimizer", "activations", "buffers")
    rows = [[name, f"{getattr(memory, name) / _GB:.2f}", f"{getattr(memory, name) / limit:.1%}"] for name in parts]
    return [
        *rows,
        ["all", f"{memory.total / _GB:.2f}", f"{memory.total / limit:.1%}"],
        ["what a GPU has for it", f"{limit / _GB:.2f}", ""],
        *[["activations in the host's memory", f"{memory.offloaded / _GB:.2f}", ""]] * (memory.offloaded > 0),
    ]


def traffic_cells(traffics: Sequence[Traffics]) -> list[list[str]]:
    """Rows of :data:`TRAFFIC_COLUMNS`."""
    return [
        [
            each.name,
            each.axis,
            each.collective,
            format_bytes(each.logical_bytes),
            nodes_words(each.nodes),
            str(each.count),
            each.plan,
            f"{each.us:,.1f}",
            f"{each.us * each.count / 1e3:,.2f}",
            each.bottleneck,
        ]
        for each in traffics
    ]


def nodes_words(nodes: Sequence[int]) -> str:
    """Ranks of a group on each node: 16x8, or 4x8+1x4."""
    return "+".join(f"{len(list(equal))}x{each}" for each, equal in groupby(nodes))
