"""Figures and reports of mappings, on made-up estimates: what they show, and that a page is sound and safe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from html_page import HtmlPage
from hypothesis import given
from hypothesis import strategies as st

from commlayer.drawing.mapping_cells import mapping_cells, nodes_words, part_cells, short_mappings
from commlayer.drawing.mapping_figures import (
    PARTS,
    FigureLine,
    breakdown_figure,
    curves_figure,
    mapping_name,
    memory_figure,
)
from commlayer.drawing.mapping_report import write_estimate_report, write_what_if_report
from commlayer.drawing.pipeline_course import (
    SPAN_COLOURS,
    RankSpan,
    SpanKind,
    drawn_spans,
    rank_spans,
    steady_state,
)
from commlayer.drawing.step_course import course_figure, step_trace
from commlayer.drawing.style import save_figure
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.conflicts import Compute, Issue, Item, PlannedCall, Wait, simulate
from commlayer.scheduler.mapping import catalog, clusters
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.pipeline_schedule import StageTimes
from commlayer.scheduler.mapping.pricing import Pricer
from commlayer.scheduler.mapping.result import Memory, StepEstimate, Traffics
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.plan import Strategy
from commlayer.traces.chrome_of_plan import slice_times

pytest.importorskip("matplotlib")

CLUSTER = clusters.load("h100-eos")
JOB = Job(model=catalog.load("mixtral-8x7b"), gpus=32, global_batch=64, sequence=4096)
SETUP = Setup(gpus=32, tp=2, ep=8, pp=4, recompute="megascale")


def made_up(setup: Setup = SETUP, limit: float = 80e9, **changes: Any) -> StepEstimate:
    parts = {"attention": 300e3, "experts": 500e3, "dispatch": 90e3, "combine": 80e3, "bubble": 25e3, "optimizer": 5e3}
    return replace(
        StepEstimate(
            job=JOB,
            setup=setup,
            cluster="h100-eos",
            software="commlayer",
            step_us=sum(parts.values()),
            mfu=0.45,
            tflops=445.0,
            memory=Memory(weights=10e9, gradients=20e9, optimizer=15e9, activations=30e9, buffers=1e9),
            memory_limit=limit,
            parts=parts,
            exposed_us={"ep": 170e3},
            traffics=(Traffics("dispatch", "ep", "ep", "all_to_all_v", 2**25, (8,), 128, 200.0, "flat", "intra"),),
            bubble=0.025,
            bottleneck="compute",
            ranks=(StageTimes(10e3, 20e3, 9e3), StageTimes(10e3, 20e3, 9e3)) * 2,
        ),
        **changes,
    )


def with_courses() -> StepEstimate:
    decision = Pricer(CLUSTER, (Strategy.FLAT,)).decide("all_to_all_v", 2**25, (8,))
    calls = [PlannedCall(f"dispatch #{index}", decision.plan, "ep") for index in range(2)]
    program: list[Item] = [Compute(200.0, "attention"), *(Issue(call) for call in calls), Compute(50.0, "filler")]
    course = simulate([*program, *(Wait(call) for call in calls)], CLUSTER.profile_of((8,)))
    return made_up(forward=course, backward=course)


def texts(figure: Any, tmp_path: Path) -> str:
    path = tmp_path / "figure.svg"
    save_figure(figure, path)
    return " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text(encoding="utf-8")))


def lengths(figure: Any) -> list[float]:
    """The widths of the bars, each with all of its parts, from the top."""
    found: dict[int, float] = {}
    for patch in figure.axes[0].patches:
        row = round(patch.get_y() + patch.get_height() / 2)
        found[row] = found.get(row, 0.0) + patch.get_width()
    return [found[row] for row in sorted(found)]


def test_breakdown_has_every_part_and_the_time_of_each(tmp_path: Path) -> None:
    figure = breakdown_figure({"one": made_up(), "two": made_up(step_us=2e6, parts={"attention": 1.4e6, "tp": 0.6e6})})
    shown = texts(figure, tmp_path)
    for part in ("attention", "experts", "dispatch", "combine", "bubble", "tp"):
        assert part in shown
    assert "1 s, MFU 45.0%" in shown
    assert "2 s, MFU 45.0%" in shown
    assert lengths(figure) == pytest.approx([1.0, 2.0])  # seconds


def test_parts_too_small_to_see_are_put_together(tmp_path: Path) -> None:
    parts = {"attention": 1e6, "pp": 100.0, "cp": 200.0}
    figure = breakdown_figure({"one": made_up(parts=parts, step_us=sum(parts.values()))})
    assert "other" in texts(figure, tmp_path)
    assert lengths(figure) == pytest.approx([1000.3])  # ms


def test_every_part_of_an_estimate_has_a_colour() -> None:
    assert len(set(PARTS.values())) == len(PARTS)


def test_memory_is_drawn_against_the_limit(tmp_path: Path) -> None:
    shown = texts(memory_figure({"fits": made_up(), "not": made_up(limit=60e9)}), tmp_path)
    assert shown.count("76.0 GB") == 2
    assert shown.count("does not fit") == 1
    assert "what a GPU has for it" in shown


@pytest.mark.parametrize("limit", [60e9, 80e9, 200e9])
def test_words_in_bars_stay_inside(limit: float) -> None:
    """Measured on the drawn picture, with the fonts of this machine."""
    narrow = Memory(weights=9e9, gradients=12e9, optimizer=8e9, activations=11e9, buffers=6e9)
    setup = Setup(gpus=32, tp=2, ep=8, pp=4, recompute="megascale", exchange="all_gather", precision="fp8", zero=0)
    long = f"1  {mapping_name(setup)}"
    figures = [memory_figure({long: made_up(limit=limit), "2": made_up(limit=limit, memory=narrow)})]
    figures.append(
        breakdown_figure({long: made_up(), "2": made_up(parts={"gradients": 9e4, "parameters": 7e4, "tp": 3e4})})
    )
    count = 0
    for figure in figures:
        figure.draw_without_rendering()
        axes = figure.axes[0]
        bars = [bar.get_window_extent() for bar in axes.patches]
        written = [text.get_window_extent() for text in axes.texts if text.get_bbox_patch()]
        for box in written:
            count += 1
            assert any(bar.x0 <= box.x0 and box.x1 <= bar.x1 and bar.y0 <= box.y0 and box.y1 <= bar.y1 for bar in bars)
    assert count >= 2


def test_curves_mark_where_they_cross(tmp_path: Path) -> None:
    lines = [FigureLine("a", [(1.0, 0.2), (16.0, 0.5)]), FigureLine("b", [(1.0, 0.4), (16.0, None)])]
    figure = curves_figure(lines, "t", "GB/s", "MFU", crossings=[(4.0, "they meet")], percent=True)
    shown = texts(figure, tmp_path)
    assert "they meet" in shown
    assert "40%" in shown
    assert figure.axes[0].get_xscale() == "log"
    words = texts(
        curves_figure([FigureLine("a", [(0.0, 1.0), (1.0, 2.0)])], "t", "x", "y", words=["bf16", "fp8"]), tmp_path
    )
    assert "fp8" in words


@pytest.mark.parametrize("draw", [breakdown_figure, memory_figure])
def test_nothing_to_draw_is_an_error(draw: Any) -> None:
    with pytest.raises(UsageError, match="nothing to draw"):
        draw({})
    with pytest.raises(UsageError, match="nothing to draw"):
        curves_figure([FigureLine("a", [(1.0, None)])], "t", "x", "y")


def test_names_leave_out_degrees_of_one() -> None:
    assert mapping_name(SETUP) == "TP2 EP8 PP4 DP4\nmicro-batch 1, recompute megascale"


def test_short_names_tell_mappings_apart() -> None:
    names, same = short_mappings(
        [SETUP, replace(SETUP, folded=False, ep=4, etp=2), Setup(gpus=32, recompute="megascale")]
    )
    assert names == ["TP2 EP8 PP4 DP4", "TP2 EP4 ETP2 PP4 DP4 unfolded", "DP32"]
    assert same == "micro-batch 1, recompute megascale"
    assert short_mappings([]) == ([], "")
    assert short_mappings([Setup(gpus=1)])[0] == ["DP1"]


def test_cells_say_what_does_not_fit() -> None:
    assert mapping_cells("1", made_up())[5] == "76.0 of 80.0"
    assert mapping_cells("1", made_up(limit=60e9))[5].endswith("!")
    assert part_cells(made_up())[-1][:2] == ["the step", "1,000.00"]
    assert nodes_words((8, 8, 4)) == "2x8+1x4"


# The course of a step


def test_trace_has_pipeline_and_passes() -> None:
    trace = step_trace(with_courses())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    threads = {(event["pid"], event["tid"]): event for event in trace["traceEvents"] if event["name"] == "thread_name"}
    names = [event["args"]["name"] for event in threads.values()]
    assert names[:4] == [f"pipeline rank {rank}" for rank in range(4)]
    assert names[4:8] == ["program", "ep", "ep", "INTRA"]  # two calls of a lane overlap
    calls = [event for event in events if event["cat"] == "ep"]
    assert {event["name"] for event in calls} == {"dispatch #0", "dispatch #1"}
    assert all(event["args"]["bytes"] == 2**25 for event in calls)
    assert any(event["name"] == "other micro-batches" for event in events)
    assert any(event["name"].startswith("wait for dispatch") for event in events)


PIPELINES = {
    "1f1b": {"pp": 4},
    "interleaved": {"pp": 4, "vpp": 2},
    "merged": {"pp": 4, "vpp": 2, "schedule": "1f1b-overlap"},
    "dualpipe": {"pp": 4, "schedule": "dualpipe"},
    "dualpipev": {"pp": 4, "schedule": "dualpipev"},
    "without ZeRO, recomputed": {"pp": 2, "zero": 0, "recompute": "full"},
}


@pytest.fixture(scope="module")
def estimated() -> dict[str, StepEstimate]:
    estimator = Estimator(JOB, CLUSTER, efficiency=0.9)
    return {name: estimator.estimate(Setup(gpus=32, ep=4, **way)) for name, way in PIPELINES.items()}  # type: ignore[arg-type]


@pytest.mark.parametrize("way", PIPELINES)
def test_the_drawn_pipeline_adds_up_to_the_estimate(estimated: dict[str, StepEstimate], way: str) -> None:
    """Each rank lasts as long as the step, and the slowest one takes for each part what the table and the cards say."""
    estimate = estimated[way]
    ranks = rank_spans(estimate)
    assert len(ranks) == estimate.setup.pp
    for spans in ranks:
        assert spans[0].start == 0
        assert all(left.end == pytest.approx(right.start) for left, right in pairwise(spans))
        assert spans[-1].end == pytest.approx(estimate.step_us)
    worked = ("forward", "backward", "weights", "merged")
    slowest = max(ranks, key=lambda spans: took(spans, *worked))
    parts = dict(estimate.parts)
    assert took(slowest, "wait") == pytest.approx(parts.pop("bubble") + parts.pop("pp"), abs=1.0)  # µs
    for edge in ("parameters", "gradients", "optimizer"):
        assert took(slowest, edge) == pytest.approx(parts.pop(edge, 0.0))
    assert took(slowest, *worked) == pytest.approx(sum(parts.values()), abs=1.0)
    assert ("merged" in {span.kind for span in slowest}) == estimate.setup.is_merged
    assert took(slowest, "weights") > 0


@pytest.mark.parametrize("way", PIPELINES)
def test_a_long_step_is_drawn_without_what_repeats(estimated: dict[str, StepEstimate], way: str) -> None:
    assert steady_state(rank_spans(estimated[way])) is None  # 8 micro-batches
    setup = estimated[way].setup
    long = Estimator(replace(JOB, global_batch=8 * setup.dp * setup.pp * 8), CLUSTER, efficiency=0.9).estimate(setup)
    ranks = rank_spans(long)
    steady = steady_state(ranks)
    assert steady is not None
    assert steady.end - steady.start > long.step_us / 2
    for spans in ranks:
        inside = {span.kind for span in spans if steady.start <= span.start and span.end <= steady.end}
        assert not inside & {"parameters", "gradients", "optimizer"}
        drawn = list(drawn_spans(steady, spans))
        assert len(drawn) < len(spans) / 2
        assert drawn[0].start == 0
        assert drawn[-1].end == pytest.approx(long.step_us - (steady.end - steady.start) + steady.gap_us)
        gaps = [right.start - left.end for left, right in pairwise(drawn) if right.start - left.end > 1.0]
        assert gaps == [pytest.approx(steady.gap_us)]
        backward = [span for span in spans if span.kind in ("backward", "merged")]
        forward = [span for span in spans if span.kind in ("forward", "merged")]
        # Every rank goes forward and backward by turns in what is left out, and is drawn doing so at each of its ends.
        assert len([span for span in backward if span.start < steady.start]) >= 4
        assert len([span for span in forward if span.start >= steady.end]) >= 4


def test_no_ranks_have_no_steady_state() -> None:
    assert steady_state([]) is None


def took(spans: list[RankSpan], *kinds: str) -> float:
    return sum(span.end - span.start for span in spans if span.kind in kinds)


def test_no_pipeline_and_one_that_is_too_long_are_not_drawn() -> None:
    assert rank_spans(made_up(Setup(gpus=32, tp=2, ep=8))) == []
    long = replace(JOB, global_batch=64_000)
    assert rank_spans(made_up(job=long)) == []


def test_every_kind_of_span_has_a_colour() -> None:
    assert {*get_args(SpanKind)} - {"merged"} == set(SPAN_COLOURS)
    assert len(set(SPAN_COLOURS.values())) == len(SPAN_COLOURS)


def dropped(events: Iterable[dict[str, Any]]) -> int:
    """Count the slices that Perfetto drops: those that begin inside another one of their thread, and end after it.

    Times are read as whole nanoseconds, cut off.
    """
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            start = int(event["ts"] * 1e3)
            threads.setdefault((event["pid"], event["tid"]), []).append((start, start + int(event["dur"] * 1e3)))
    bad = 0
    for slices in threads.values():
        inside: list[int] = []
        for start, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while inside and inside[-1] <= start:
                inside.pop()
            if inside and end > inside[-1]:
                bad += 1
            else:
                inside.append(end)
    return bad


@pytest.mark.parametrize("way", PIPELINES)
def test_perfetto_drops_no_slice_of_a_trace(estimated: dict[str, StepEstimate], way: str) -> None:
    assert dropped(step_trace(estimated[way])["traceEvents"]) == 0


def test_the_checker_of_traces_finds_what_overlaps_by_a_nanosecond() -> None:
    def event(ts: float, dur: float, tid: int = 0) -> dict[str, Any]:
        return {"ph": "X", "pid": 0, "tid": tid, "ts": ts, "dur": dur}

    assert dropped([event(0, 4), event(1, 2), event(1, 1), event(4, 2)]) == 0
    assert dropped([event(0, 4), event(3.999, 2)]) == 1
    assert dropped([event(0, 4), event(3.999, 2, tid=1)]) == 0


@given(st.integers(0, 10**13), st.integers(0, 10**13))
def test_times_of_slices_are_whole_nanoseconds_however_they_are_read(start: int, length: int) -> None:
    times = slice_times((start, start + length))
    for us, ns in ((times["ts"], start), (times["dur"], length)):
        assert int(us * 1e3) == round(us * 1e3) == ns


def test_course_is_drawn(tmp_path: Path) -> None:
    shown = texts(course_figure(with_courses(), "a title"), tmp_path)
    for word in (
        "a title",
        "rank 3",
        "weight gradients",
        "other micro-batches",
        "program",
        "ep",
        "forward of a layer",
        "backward of a layer",
    ):
        assert word in shown


def test_an_estimate_without_courses_says_so() -> None:
    with pytest.raises(UsageError, match="no course"):
        course_figure(made_up())


# Reports


def _reports(tmp_path: Path) -> Iterator[str]:
    evil = "<script>alert(1)</script>"
    model = replace(JOB.model, name=evil)
    first, second = tmp_path / "estimate.html", tmp_path / "what_if.html"
    estimate = replace(with_courses(), job=replace(JOB, model=model), notes=(evil,), memory_limit=60e9)
    write_estimate_report(first, estimate, CLUSTER)
    yield first.read_text(encoding="utf-8")
    drawn = [(evil, breakdown_figure({evil: estimate})), ("memory", memory_figure({"one": estimate}))]
    write_what_if_report(second, evil, [evil], [evil], (["~what", ">value"], [[evil, "1"]]), drawn)
    yield second.read_text(encoding="utf-8")


def test_reports_are_sound_and_safe_pages(tmp_path: Path) -> None:
    for text in _reports(tmp_path):
        page = HtmlPage(text)
        assert page.open == []
        assert "script" not in page.tags
        assert page.ids
        assert len(page.ids) == len(set(page.ids))
        assert "svg" in page.tags
    assert "does not fit" in next(iter(_reports(tmp_path)))
