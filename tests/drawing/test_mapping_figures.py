"""Figures and reports of mappings, on made-up estimates: what they show, and that a page is sound and safe."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from commlayer.drawing.mapping_cells import closed_forms, mapping_cells, nodes_words, part_cells
from commlayer.drawing.mapping_figures import (
    PARTS,
    FigureLine,
    breakdown_figure,
    curves_figure,
    mapping_name,
    memory_figure,
)
from commlayer.drawing.mapping_report import write_estimate_report, write_what_if_report
from commlayer.drawing.step_course import course_figure, pipeline_tasks, step_trace
from commlayer.drawing.style import save_figure
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.conflicts import Compute, Issue, Item, PlannedCall, Wait, simulate
from commlayer.scheduler.mapping import catalog, clusters
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.pricing import Pricer
from commlayer.scheduler.mapping.result import Memory, StepEstimate, Traffics
from commlayer.scheduler.plan import Strategy

pytest.importorskip("matplotlib")

CLUSTER = clusters.load("h100-eos")
JOB = Job(model=catalog.load("mixtral-8x7b"), gpus=32, global_batch=64, sequence=4096)
SETUP = Setup(gpus=32, tp=2, ep=8, pp=4, recompute="selective")


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


class _Page(HTMLParser):
    """Tags that were never closed, ids, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in ("meta", "use", "path", "image", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


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
    assert mapping_name(SETUP) == "TP2 EP8 PP4 DP4\nmicro-batch 1, recompute selective"


def test_cells_say_what_does_not_fit() -> None:
    assert mapping_cells("1", made_up())[5] == "76.0 of 80.0"
    assert mapping_cells("1", made_up(limit=60e9))[5].endswith("!")
    assert part_cells(made_up())[-1][:2] == ["the step", "1,000.00"]
    assert nodes_words((8, 8, 4)) == "2x8+1x4"


def test_closed_forms_leave_out_groups_of_one() -> None:
    assert closed_forms(JOB, Setup(gpus=32, pp=4), CLUSTER) == {}
    assert set(closed_forms(JOB, SETUP, CLUSTER)) == {
        "attention_by_tp",
        "attention_by_sp",
        "ffn_by_ep",
        "ffn_by_tp",
        "compute_over_communication",
    }


# The course of a step


def test_trace_has_pipeline_and_passes() -> None:
    trace = step_trace(with_courses())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    threads = {(event["pid"], event["tid"]): event for event in trace["traceEvents"] if event["name"] == "thread_name"}
    names = [event["args"]["name"] for event in threads.values()]
    assert names[:5] == ["stage 0", "stage 1", "stage 2", "stage 3", "the step's end"]
    assert names[5:8] == ["program", "ep", "INTRA"]
    calls = [event for event in events if event["cat"] == "ep"]
    assert {event["name"] for event in calls} == {"dispatch #0", "dispatch #1"}
    assert all(event["args"]["bytes"] == 2**25 for event in calls)
    assert any(event["name"] == "other micro-batches" for event in events)
    assert any(event["name"].startswith("wait for dispatch") for event in events)


def test_the_drawn_pipeline_lasts_as_long_as_the_step() -> None:
    estimate = made_up()
    tasks = pipeline_tasks(estimate)
    count = SETUP.micro_batches(JOB)
    assert len(tasks) == 2 * SETUP.pp * count
    work = sum(us for part, us in estimate.parts.items() if part not in ("bubble", "optimizer"))
    assert max(task.end for task in tasks) == pytest.approx(work * (count + SETUP.pp - 1) / count)
    assert pipeline_tasks(made_up(Setup(gpus=32, tp=2, ep=8))) == []


def test_course_is_drawn(tmp_path: Path) -> None:
    shown = texts(course_figure(with_courses(), "a title"), tmp_path)
    for word in ("a title", "stage 3", "program", "ep", "forward of a layer", "backward of a layer"):
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
        page = _Page(text)
        assert page.open == []
        assert "script" not in page.tags
        assert page.ids
        assert len(page.ids) == len(set(page.ids))
        assert "svg" in page.tags
    assert "does not fit" in next(iter(_reports(tmp_path)))
