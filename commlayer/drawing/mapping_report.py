"""Reports about mappings: what a search found, one mapping in full, what would change; each one HTML file with its pictures."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from commlayer.drawing.mapping_cells import (
    MAPPING_COLUMNS,
    MEMORY_COLUMNS,
    PART_COLUMNS,
    TRAFFIC_COLUMNS,
    closed_form_words,
    closed_forms,
    exposed_share,
    job_words,
    mapping_cells,
    memory_cells,
    part_cells,
    traffic_cells,
)
from commlayer.drawing.mapping_figures import breakdown_figure, labelled, memory_figure
from commlayer.drawing.page import cards, definitions, figure, page, section, table
from commlayer.drawing.step_course import course_figure
from commlayer.profiles.counted import counted
from commlayer.profiles.files import write_file
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.job import Job
from commlayer.scheduler.mapping.result import StepEstimate, describe_validity
from commlayer.scheduler.mapping.search import SearchResult
from commlayer.units import format_us

if TYPE_CHECKING:
    from matplotlib.figure import Figure


__all__ = ["write_estimate_report", "write_search_report", "write_what_if_report"]

_Path = str | os.PathLike[str]

_GUIDE = """<dl>
<dt>mapping</dt><dd>how the GPUs are divided: TP, CP, PP and DP for attention, ETP and EP for experts, VPP chunks of layers on
each pipeline rank. Folded, the experts' degrees are free of attention's; unfolded, ETP = TP and EP is a part of DP.</dd>
<dt>step</dt><dd>all micro-batches of one optimizer step. Its parts add up to it: what computes, then what communication costs
that nothing hides, then what the pipeline waits for.</dd>
<dt>MFU</dt><dd>the model's FLOPs over the GPUs' peak; causal attention counts by half, recomputation not at all.</dd>
<dt>memory</dt><dd>of the fullest GPU; the dashed line is what a GPU has for the job.</dd>
<dt>exposed</dt><dd>the share of a step in which communication keeps the GPU waiting.</dd>
<dt>what moves</dt><dd>each collective of a step of one rank of the slowest stage. Bytes are nccl-tests' S of one call; µs are of
a call alone; ranks are nodes × ranks on each.</dd>
<dt>course</dt><dd>simulated: the step on each pipeline rank (merged: forward above, backward below), of which the slowest
takes what the table of parts says; and the passes of a layer with every call, or of a stage where gradients or weights go beside
it, with what other micro-batches compute meanwhile.</dd>
</dl>"""


def write_search_report(path: _Path, result: SearchResult, reasons: Sequence[str], cluster: Cluster) -> None:
    """Write what a search found, and its best mapping in full. Without matplotlib the page has no figures, and says so.

    Raises OSError where the file cannot be written.
    """
    best = result.best
    unfolded, folded = result.best_unfolded, result.best_folded
    other = unfolded if best.setup.folded else folded
    boxes = _cards(best)
    if other is not None:
        kind = "unfolded" if best.setup.folded else "folded"
        boxes.append((f"{other.step_us / best.step_us:.2f}×", f"as long takes a step of the best {kind} mapping"))
    rows = [mapping_cells(str(rank), each) for rank, each in enumerate(result.ranked, start=1)]
    bars = labelled(result)
    words = (
        f"{result.num_valid:,} valid mappings, {result.num_estimated:,} estimated to the end, in {result.seconds:.1f} s. All "
        "others cannot be faster, or do not fit."
    )
    parts = [
        _header(f"{result.job.model.name} on {counted(result.job.gpus, 'GPU')}", result.job, cluster, result.software),
        cards(boxes),
        section("Why this one", *(f"<p>{escape(reason)}</p>" for reason in reasons)),
        section(
            "The fastest mappings", _table(MAPPING_COLUMNS, rows, chosen=0), f'<p class="reason">{escape(words)}</p>'
        ),
        section("Where a step's time goes", figure("breakdown", lambda: breakdown_figure(bars), "Parts of the steps")),
        section("What fills the memory", figure("memory", lambda: memory_figure(bars), "Parts of the memory")),
        *_in_full(best, cluster),
        section("How to read this", _GUIDE),
    ]
    write_file(path, page(f"commlayer search: {result.job.model.name}", parts))


def write_estimate_report(path: _Path, estimate: StepEstimate, cluster: Cluster) -> None:
    """Write one mapping in full. Raises OSError where the file cannot be written."""
    warning = ""
    if not estimate.fits:
        warning = '<p class="note">This mapping does not fit in a GPU\'s memory. Its times are what it would take if it did.</p>'
    checked = [f"<p>{escape(sentence)}</p>" for sentence in describe_validity(estimate)]
    parts = [
        _header(str(estimate.setup), estimate.job, cluster, estimate.software),
        warning,
        cards(_cards(estimate), -1 if estimate.fits else 3),
        section("How far it has been checked", *checked) if checked else "",
        *_in_full(estimate, cluster),
        section("How to read this", _GUIDE),
    ]
    write_file(path, page(f"commlayer estimate: {estimate.job.model.name}", parts))


def write_what_if_report(
    path: _Path,
    title: str,
    facts: Sequence[str],
    sentences: Sequence[str],
    each_value: tuple[Sequence[str], Sequence[Sequence[str]]],
    figures: Sequence[tuple[str, Figure]],
) -> None:
    """Write the report of a what-if: what would change.

    Args:
        facts: below the title. sentences: what was found. each_value: columns and rows. figures: each with its label.

    Raises OSError where the file cannot be written.
    """
    drawn = [figure(f"figure{index}", lambda each=each: each, label) for index, (label, each) in enumerate(figures)]  # type: ignore[misc]
    parts = [
        f'<header>\n<h1>{escape(title)}</h1>\n<p class="facts">{" · ".join(map(escape, facts))}</p></header>',
        section("What was found", *(f"<p>{escape(sentence)}</p>" for sentence in sentences)) if sentences else "",
        section("Pictures", *drawn) if drawn else "",
        section("Each value", _table(*each_value)),
        section("How to read this", _GUIDE),
    ]
    write_file(path, page(title, parts))


def _header(title: str, job: Job, cluster: Cluster, software: str) -> str:
    return f'<header>\n<h1>{escape(title)}</h1>\n<p class="facts">{escape(job_words(job, cluster.name, software))}</p></header>'


def _cards(estimate: StepEstimate) -> list[tuple[str, str]]:
    used = estimate.memory.total / estimate.memory_limit
    return [
        (format_us(estimate.step_us), "a step"),
        (f"{estimate.mfu:.1%}", f"MFU, {estimate.tflops:,.0f} TFLOP/s a GPU"),
        (f"{estimate.tokens_per_s:,.0f}", "tokens a second"),
        (f"{used:.0%}", f"of the memory that a GPU has for it, {estimate.memory.total / 1e9:.1f} GB"),
        (f"{exposed_share(estimate):.1%}", "of a step waits for communication"),
    ]


def _in_full(estimate: StepEstimate, cluster: Cluster) -> Iterable[str]:
    forms = closed_form_words(closed_forms(estimate.job, estimate.setup, cluster))
    yield section(
        f"In full: {estimate.setup}",
        _table(PART_COLUMNS, part_cells(estimate)),
        _table(MEMORY_COLUMNS, memory_cells(estimate)),
    )
    yield section(
        "What moves",
        _table(TRAFFIC_COLUMNS, traffic_cells(estimate.traffics)),
        *(f'<p class="reason">{escape(words)}</p>' for words in forms),
    )
    if estimate.forward is not None or estimate.backward is not None:
        yield section("The course of a step", figure("course", lambda: course_figure(estimate), "The course of a step"))
    peaks = f"inter {cluster.peaks.inter_gbps:g} GB/s, intra {cluster.peaks.intra_gbps:g} GB/s, {cluster.domain} GPUs on NVLink"
    facts = [
        ("cluster", f"{cluster.name} ({cluster.kind}): {peaks}"),
        ("its source", cluster.source),
        ("GPU", f"{cluster.gpu.name}: {cluster.gpu.bf16_tflops:g} BF16 TFLOP/s; {cluster.gpu.source}"),
        ("model", f"{estimate.job.model.name}: {estimate.job.model.source}"),
        *[("note", note) for note in estimate.notes],
    ]
    yield section("What it rests on", definitions(facts))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], chosen: int = -1) -> str:
    """A table of text; columns as :mod:`commlayer.drawing.mapping_cells` names them."""
    looks = [
        f' style="text-align:{"right" if column.startswith(">") else "left"}{";white-space:normal" * column.startswith("~")}"'
        for column in columns
    ]
    head = "".join(f"<th{look}>{escape(column.lstrip('>~'))}</th>" for column, look in zip(columns, looks, strict=True))
    body = [
        f"<tr{' class=chosen' * (index == chosen)}>"
        + "".join(f"<td{look}>{escape(cell)}</td>" for cell, look in zip(row, looks, strict=True))
        + "</tr>"
        for index, row in enumerate(rows)
    ]
    return table(head, body)
