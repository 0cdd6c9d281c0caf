"""Reports about mappings: what a search found, one mapping in full, what would change; each one
HTML file with its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from commlayer.drawing.mapping_cells import (
    MAPPING_COLUMNS,
    MEMORY_COLUMNS,
    PART_COLUMNS,
    TRAFFIC_COLUMNS,
    TRAFFIC_SPARE,
    exposed_share,
    job_words,
    mapping_cells,
    memory_cells,
    part_cells,
    traffic_cells,
)
from commlayer.drawing.mapping_figures import breakdown_figure, labelled, memory_figure
from commlayer.drawing.page import drawing, write_page
from commlayer.drawing.step_course import course_figure
from commlayer.profiles.counted import counted
from commlayer.profiles.files import StrPath
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.result import StepEstimate, describe_validity
from commlayer.scheduler.mapping.search import SearchResult
from commlayer.units import format_us

if TYPE_CHECKING:
    from matplotlib.figure import Figure


__all__ = ["write_estimate_report", "write_search_report", "write_what_if_report"]


def write_search_report(path: StrPath, result: SearchResult, reasons: Sequence[str], cluster: Cluster) -> None:
    """Write what a search found, and its best mapping in full. Without matplotlib the page has no
    figures, and says so.

    Raises OSError where the file cannot be written.
    """
    best = result.best
    unfolded, folded = result.best_unfolded, result.best_folded
    other = unfolded if best.setup.folded else folded
    boxes = _cards(best)
    if other is not None:
        kind = "unfolded" if best.setup.folded else "folded"
        boxes.append((f"{other.step_us / best.step_us:.2f}×", f"as long takes a step of the best {kind} mapping"))
    bars = labelled(result)
    write_page(
        path,
        "search.html",
        title=f"commlayer search: {result.job.model.name}",
        heading=f"{result.job.model.name} on {counted(result.job.gpus, 'GPU')}",
        facts=[job_words(result.job, cluster.name, result.software)],
        summary=boxes,
        reasons=reasons,
        result=result,
        ranking=(MAPPING_COLUMNS, [mapping_cells(str(rank), each) for rank, each in enumerate(result.shown, start=1)]),
        breakdown=drawing("breakdown", lambda: breakdown_figure(bars), "Parts of the steps"),
        memory=drawing("memory", lambda: memory_figure(bars), "Parts of the memory"),
        full=_in_full(best, cluster),
    )


def write_estimate_report(path: StrPath, estimate: StepEstimate, cluster: Cluster) -> None:
    """Write one mapping in full. Raises OSError where the file cannot be written."""
    write_page(
        path,
        "estimate.html",
        title=f"commlayer estimate: {estimate.job.model.name}",
        heading=str(estimate.setup),
        facts=[job_words(estimate.job, cluster.name, estimate.software)],
        estimate=estimate,
        summary=_cards(estimate),
        checked=list(describe_validity(estimate)),
        full=_in_full(estimate, cluster),
    )


def write_what_if_report(
    path: StrPath,
    title: str,
    facts: Sequence[str],
    sentences: Sequence[str],
    each_value: tuple[Sequence[str], Sequence[Sequence[str]]],
    figures: Sequence[tuple[str, Figure]],
) -> None:
    """Write the report of a what-if: what would change.

    Args:
        facts: below the title. sentences: what was found. each_value: columns and rows. figures:
            each with its label.

    Raises OSError where the file cannot be written.
    """
    write_page(
        path,
        "what_if.html",
        title=title,
        heading=title,
        facts=facts,
        sentences=sentences,
        drawings=[
            drawing(f"figure{index}", lambda each=each: each, label)  # type: ignore[misc]
            for index, (label, each) in enumerate(figures)
        ],
        each_value=each_value,
        full=None,
    )


def _cards(estimate: StepEstimate) -> list[tuple[str, str]]:
    used = estimate.memory.total / estimate.memory_limit
    return [
        (format_us(estimate.step_us), "a step"),
        (f"{estimate.mfu:.1%}", f"MFU, {estimate.tflops:,.0f} TFLOP/s a GPU"),
        (f"{estimate.tokens_per_s:,.0f}", "tokens a second"),
        (f"{used:.0%}", f"of the memory that a GPU has for it, {estimate.memory.total / 1e9:.1f} GB"),
        (f"{exposed_share(estimate):.1%}", "of a step waits for communication"),
    ]


def _in_full(estimate: StepEstimate, cluster: Cluster) -> dict[str, object]:
    """One mapping in full, for mapping.html. A table is its columns and rows."""
    has_course = estimate.forward is not None or estimate.backward is not None
    peaks = f"inter {cluster.peaks.inter_gbps:g} GB/s, intra {cluster.peaks.intra_gbps:g} GB/s, {cluster.domain} GPUs on NVLink"
    facts = [
        ("cluster", f"{cluster.name} ({cluster.kind}): {peaks}"),
        ("its source", cluster.source),
        ("GPU", f"{cluster.gpu.name}: {cluster.gpu.bf16_tflops:g} BF16 TFLOP/s; {cluster.gpu.source}"),
        ("model", f"{estimate.job.model.name}: {estimate.job.model.source}"),
        *[("note", note) for note in estimate.notes],
    ]
    return {
        "setup": str(estimate.setup),
        "parts": (PART_COLUMNS, part_cells(estimate)),
        "memory": (MEMORY_COLUMNS, memory_cells(estimate)),
        "traffic": (TRAFFIC_COLUMNS, traffic_cells(estimate.traffics)),
        "traffic_spare": TRAFFIC_SPARE,
        "course": drawing("course", lambda: course_figure(estimate), "The course of a step") if has_course else None,
        "facts": facts,
    }
