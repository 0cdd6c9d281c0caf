"""The course of a step on every pipeline rank: forward, backward, weight gradients, waits, and a step's edges.

A rank's spans lie end to end from the start of the step to its end. Those of the slowest rank, which is the one that an estimate
counts, add up to what it says: micro-batches, bubble and sends (waits), exposed weights before, exposed gradients and optimizer
behind. The formula of 1F1B supposes one ratio of forward to backward at all ranks, so the slowest one's is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from commlayer.drawing.style import FAINT, PAPER
from commlayer.scheduler.mapping.pipeline_orders import Task, timetable
from commlayer.scheduler.mapping.pipeline_schedule import StageTimes, hops
from commlayer.scheduler.mapping.result import StepEstimate
from commlayer.units import format_us

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "MOST_RANKS",
    "SPAN_COLOURS",
    "RankSpan",
    "SpanKind",
    "SteadyState",
    "draw_ranks",
    "drawn_spans",
    "pipeline_tasks",
    "rank_spans",
    "steady_state",
]

SpanKind = Literal["forward", "backward", "weights", "merged", "wait", "parameters", "gradients", "optimizer"]
SPAN_COLOURS = {
    "forward": "#7db8d8",
    "backward": "#009e73",
    "weights": "#8fcbb6",
    "wait": "#4f5963",
    "parameters": "#dba9c6",
    "gradients": "#a04a7b",
    "optimizer": "#8b949e",
}
"""Colours of what a rank does, as in the other figures. A merged task has forward's above and backward's below."""
_MOST_TASKS = 60_000
MOST_RANKS = 16
"""The ranks that are drawn."""
_MANY = 100
"""Bars in a row that edges would hide."""
_BAR = 0.78
_AT_EDGES = 4
"""The passes of a rank that are drawn of a steady state at each of its ends, or more."""
_GAP = 0.06
"""The width of the gap that stands for a steady state, as a share of what is drawn."""
_SHORT_US = 1e-3
"""The shortest wait, µs: what is shorter is a rounding error."""


class RankSpan(NamedTuple):
    """A pipeline rank is busy, or waits, from ``start`` to ``end``, µs since the start of the step. ``words``: for people."""

    kind: SpanKind
    start: float
    end: float
    words: str


def pipeline_tasks(estimate: StepEstimate) -> list[Task]:
    """Every task of every rank, in order of the schedule, from the first one on; none where there is no pipeline, or one too long
    to be looked at.

    Sends between ranks take what the estimate adds for each, unless that would make the tasks longer than the estimate says.
    """
    setup = estimate.setup
    count = setup.micro_batches(estimate.job)
    uneven = setup.vpp > 1 and count % setup.pp
    if setup.pp == 1 or not estimate.ranks or uneven or 3 * setup.pipeline.num_chunks * count > _MOST_TASKS:
        return []
    stages: Sequence[StageTimes] = estimate.ranks
    if not setup.is_merged:  # forward and backward are in one ratio on all ranks
        slowest = max(stages, key=lambda each: each.alone_us)
        share = slowest.forward_us / slowest.alone_us
        stages = [
            StageTimes(share * each.alone_us, (1 - share) * each.alone_us, each.weights_us, each.merged_us)
            for each in stages
        ]
    sends = hops(setup.pp, count, setup.vpp, setup.schedule)
    send_us = estimate.parts.get("pp", 0.0) / max(1, sum(sends))

    pipeline = setup.schedule, stages, count, setup.vpp
    tasks = timetable(*pipeline, send_us=send_us)
    if send_us and max(task.end for task in tasks) > _pipeline_us(estimate) + _SHORT_US:
        tasks = timetable(*pipeline)
    return tasks


def rank_spans(estimate: StepEstimate) -> list[list[RankSpan]]:
    """Take the step apart on every pipeline rank, end to end; empty where :func:`pipeline_tasks` is."""
    tasks = pipeline_tasks(estimate)
    if not tasks:
        return []
    before = estimate.parts.get("parameters", 0.0)
    behind = max(before + _pipeline_us(estimate), before + max(task.end for task in tasks))
    ranks = []
    for rank in range(estimate.setup.pp):
        spans = [RankSpan("parameters", 0.0, before, "gathering of weights, exposed")] if before else []
        now = before
        for task in (task for task in tasks if task.rank == rank):
            start, end, slot = task.start + before, task.end + before, task.slot
            if start > now + _SHORT_US:
                spans.append(RankSpan("wait", now, start, "wait"))
            if slot.kind == "merged" and slot.partner is not None:
                names = f"forward {slot.micro_batch} with backward {slot.partner[1]}"
                spans.append(RankSpan("merged", start, end, names))
            elif (
                slot.kind == "backward"
            ):  # ends with its share of weight gradients, though every layer ends with its own
                times = estimate.ranks[rank]
                middle = end - (end - start) * times.weights_us / times.backward_us
                spans.append(RankSpan("backward", start, middle, f"backward {slot.micro_batch}"))
                spans.append(RankSpan("weights", middle, end, f"weight gradients {slot.micro_batch}"))
            elif slot.kind == "weights":
                spans.append(RankSpan("weights", start, end, f"weight gradients {slot.micro_batch}"))
            else:
                kind: SpanKind = "forward" if slot.kind == "forward" else "backward"
                spans.append(RankSpan(kind, start, end, f"{kind} {slot.micro_batch}"))
            now = end
        if behind > now + _SHORT_US:
            spans.append(RankSpan("wait", now, behind, "wait"))
        ranks.append([*spans, *_edges(estimate, behind)])
    return ranks


class SteadyState(NamedTuple):
    """The part of a step that repeats, and is not drawn: from ``start`` to ``end``, µs.

    A gap as wide as ``gap_us`` stands for it.
    """

    start: float
    end: float
    gap_us: float

    @property
    def shift_us(self) -> float:
        """The time that is added to what lies behind the gap, µs: negative, it is drawn earlier."""
        return self.gap_us - (self.end - self.start)


def steady_state(ranks: Sequence[Sequence[RankSpan]]) -> SteadyState | None:
    """Choose what a drawing of a long step leaves out; None where that is less than half of the step.

    It is the time in which every rank goes forward and backward by turns, but for four passes at each end.
    """
    start, end = 0.0, float("inf")
    for spans in ranks:
        backward = [span.start for span in spans if span.kind in ("backward", "merged")]
        forward = [span.start for span in spans if span.kind in ("forward", "merged")]
        if len(backward) <= 2 * _AT_EDGES or len(forward) <= 2 * _AT_EDGES:
            return None
        start, end = max(start, backward[_AT_EDGES]), min(end, forward[-_AT_EDGES])
    step_us = max((spans[-1].end for spans in ranks), default=0.0)
    if not ranks or end - start < step_us / 2:
        return None
    return SteadyState(start, end, _GAP * (step_us - (end - start)))


def draw_ranks(axes: Axes, estimate: StepEstimate, ranks: Sequence[Sequence[RankSpan]], unit_us: float) -> None:
    """Draw a row for each of the first 16 ranks, of a long step without its steady state.

    The title says how long the slowest one waits, which is the estimate's.
    """
    shown = ranks[:MOST_RANKS]
    steady = steady_state(ranks)
    if steady is not None:
        shown = [list(drawn_spans(steady, spans)) for spans in shown]
        _mark(axes, steady, len(shown), estimate.step_us, unit_us)
    for row, spans in enumerate(shown):
        for kind in (*SPAN_COLOURS, "merged"):
            own = [(span.start / unit_us, (span.end - span.start) / unit_us) for span in spans if span.kind == kind]
            parts = [(SPAN_COLOURS.get(kind, FAINT), -_BAR / 2, _BAR)]
            if kind == "merged":  # forward and backward at once
                parts = [(SPAN_COLOURS["forward"], -_BAR / 2, _BAR / 2), (SPAN_COLOURS["backward"], 0.0, _BAR / 2)]
            for colour, low, height in parts:
                edge = PAPER if len(own) < _MANY else colour
                axes.broken_barh(own, (row + low, height), color=colour, linewidth=0.3, edgecolor=edge)
    left_out = f" (the first {len(shown)} of {len(ranks)} ranks)" if len(shown) < len(ranks) else ""
    bubble, sends = (estimate.parts.get(part, 0.0) for part in ("bubble", "pp"))
    waits = f"the slowest rank waits {format_us(bubble + sends)}: bubble {format_us(bubble)}, sends {format_us(sends)}"
    axes.set_title(
        f"the step on each pipeline rank{left_out}   {format_us(estimate.step_us)}, {waits}", fontsize=9.5, pad=3
    )


def drawn_spans(steady: SteadyState, spans: Sequence[RankSpan]) -> Iterator[RankSpan]:
    """Cut the steady state out of ``spans``, and move what comes behind it to where it is drawn."""
    for span in spans:
        if span.start < steady.start:
            yield span._replace(end=min(span.end, steady.start))
        if span.end > steady.end:
            start = max(span.start, steady.end)
            yield span._replace(start=start + steady.shift_us, end=span.end + steady.shift_us)


def _mark(axes: Axes, steady: SteadyState, num_rows: int, step_us: float, unit_us: float) -> None:
    """Write into the gap for how long it stands, and label the axis with the step's own times."""
    low, high = steady.start / unit_us, (steady.start + steady.gap_us) / unit_us
    axes.axvspan(low, high, color=FAINT, alpha=0.15, linewidth=0)
    words = f"{format_us(steady.end - steady.start)} of the same"
    axes.text((low + high) / 2, (num_rows - 1) / 2, words, rotation=90, ha="center", va="center", fontsize=8)
    shift = steady.shift_us / unit_us
    axes.set_xlim(0, 1.01 * (step_us / unit_us + shift))
    spacing = axes.get_xticks()[1] - axes.get_xticks()[0]
    times = [spacing * tick for tick in range(int(step_us / unit_us / spacing) + 1)]
    drawn = {time: time for time in times if time < low}
    drawn |= {time: time + shift for time in times if time >= steady.end / unit_us}
    axes.set_xticks(list(drawn.values()), [f"{time:,g}" for time in drawn])


def _pipeline_us(estimate: StepEstimate) -> float:
    """The time from the first task to the last, µs: the step without its edges."""
    return estimate.step_us - sum(estimate.parts.get(part, 0.0) for part in ("parameters", "gradients", "optimizer"))


def _edges(estimate: StepEstimate, start: float) -> Iterator[RankSpan]:
    kinds: tuple[SpanKind, ...] = ("gradients", "optimizer")
    for kind in kinds:
        if us := estimate.parts.get(kind, 0.0):
            yield RankSpan(kind, start, start + us, "sum of gradients, exposed" if kind == "gradients" else kind)
            start += us
