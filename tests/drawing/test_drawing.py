"""Traces, figures and the report, on made-up data: what they contain, that they are self-contained and safe."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from html_page import HtmlPage, NarrowTables

from commlayer.drawing import (
    bench_figure,
    chrome_trace,
    efficiency_figure,
    plans_figure,
    save_figure,
    timeline_figure,
    write_report,
)
from commlayer.measure.results import BenchPoint, BenchResult, BenchRow
from commlayer.profiles import catalog
from commlayer.profiles.curve import prediction_error
from commlayer.profiles.errors import UsageError
from commlayer.profiles.profile import Profile
from commlayer.scheduler import Decision, Timeline, Traffic, choose, price

PROFILE = catalog.load("monta-a800-2x8")


def decide(nbytes: int = 256_000_000) -> Decision:
    return choose(Traffic(nbytes, 2, 8), PROFILE)


def measured(timeline: Timeline, factor: float = 1.1) -> Timeline:
    """The timeline as if every step had ended late."""
    return Timeline(timeline.plan, tuple((start * factor, end * factor) for start, end in timeline.spans))


def fake_row(name: str, kind: str, p50_us: float, torch_us: float, **fields: object) -> BenchRow:
    ratio = p50_us / torch_us
    return BenchRow(
        name=name,
        kind=kind,
        p50_us=p50_us,
        min_us=p50_us * 0.97,
        max_us=p50_us * 1.08,
        ratio=ratio,
        ratio_low=ratio * 0.97,
        ratio_high=ratio * 1.05,
        num_wrong=0,
        rounds=7,
        ratio_rounds=7,
        **fields,  # type: ignore[arg-type]
    )


def fake_point(nbytes: int, name: str = "pipelined×8") -> BenchPoint:
    torch_us = 3000 + nbytes / 16e6 * 1.5e6
    plan_us = 2200 + nbytes / 16e6 * 3.3e5
    rows = [
        fake_row("torch all_to_all_single", "torch", torch_us, torch_us),
        fake_row("DeepSpeed drop/gather", "baseline", 0.45 * torch_us, torch_us),
        fake_row("flat", "plan", 0.99 * torch_us, torch_us, strategy="flat", chunks=1, predicted_us=torch_us),
        fake_row(
            "hierarchical", "plan", plan_us * 1.4, torch_us, strategy="hierarchical", chunks=1, predicted_us=plan_us
        ),
        fake_row(
            name, "plan", plan_us, torch_us, strategy="pipelined", chunks=8, predicted_us=0.94 * plan_us, is_chosen=True
        ),
        fake_row("pipelined×4", "plan", plan_us * 1.04, torch_us, strategy="pipelined", chunks=4, predicted_us=plan_us),
    ]
    reason = "pipelined×8: the next best, hierarchical, is predicted 40 % slower; bottleneck inter"
    return BenchPoint(
        logical_bytes=nbytes, wire_limit_us=nbytes / 2 / 0.05e9 * 1e6 * 1.05, reason=reason, rows=tuple(rows)
    )


def fake_result(sizes: tuple[int, ...] = (2**16, 2**18, 2**20, 2**22, 2**24, 2**25), **changes: object) -> BenchResult:
    result = BenchResult(
        topology="2x4",
        profile=PROFILE.name,
        fingerprint=PROFILE.fingerprint,
        is_emulated=True,
        inter="400mbit",
        intra=None,
        environment={"date": "2025-01-31", "torch": "2.13.0", "host": "somewhere"},
        points=tuple(fake_point(size) for size in sizes),
    )
    return msgspec.structs.replace(result, **changes)


def hostile_profile() -> Profile:
    return PROFILE.replace(name="<script>alert(1)</script>", source="<img src=x onerror=alert(2)> & more")


def test_trace_has_every_step_of_every_timeline() -> None:
    chosen = decide().timeline
    trace = json.loads(json.dumps(chrome_trace({"predicted": chosen, "measured": measured(chosen)})))
    steps = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(steps) == 2 * len(chosen.plan.steps)
    assert {event["pid"] for event in steps} == {0, 1}
    assert {event["args"]["bytes"] for event in steps} == {step.bytes for step in chosen.plan.steps}
    end_us = max(event["ts"] + event["dur"] for event in steps if event["pid"] == 0)
    assert end_us == pytest.approx(chosen.total_us, abs=0.01)
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert names == ["predicted (pipelined_copy×4)", "measured (pipelined_copy×4)"]
    waits = [event["args"]["after"] for event in steps if event["name"] == "all_gather 1"]
    assert waits[0] == ["1: all_to_all 1"]


def test_trace_rows_are_the_resources() -> None:
    trace = chrome_trace({"plan": decide().timeline})
    rows = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert rows == {0: "INTER", 1: "INTRA", 2: "DEVICE"}
    by_row: dict[int, list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            by_row.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_row.values():  # a resource does one step at a time
        assert all(before[1] <= after[0] + 0.01 for before, after in pairwise(spans))


@pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
def test_figures_are_written(tmp_path: Path, ending: str) -> None:
    chosen = decide().timeline
    figures = {
        "timeline": timeline_figure(chosen, measured(chosen), "a title"),
        "plans": plans_figure({t.plan.name: t for t in decide().candidates[:3]}, chosen="flat"),
        "efficiency": efficiency_figure(PROFILE),
        "bench": bench_figure(fake_result()),
    }
    for name, figure in figures.items():
        path = tmp_path / f"{name}.{ending}"
        save_figure(figure, path)
        assert path.stat().st_size > 2000


def test_same_figure_same_bytes(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        save_figure(efficiency_figure(PROFILE), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_timeline_says_predicted_and_measured(tmp_path: Path) -> None:
    chosen = decide().timeline
    path = tmp_path / "timeline.svg"
    save_figure(timeline_figure(chosen, measured(chosen), "256 MB"), path)
    text = path.read_text(encoding="utf-8")
    assert "predicted 1.967 ms, measured 2.164 ms" in text
    for word in ("INTER", "INTRA", "DEVICE", "256 MB", "time (ms)"):
        assert word in text


def test_odd_inputs_draw() -> None:
    nothing = price(decide().candidates[0].plan, PROFILE)
    empty = Timeline(nothing.plan, ((0.0, 0.0),))
    timeline_figure(empty, empty)
    bench_figure(fake_result((2**20,)))
    points = tuple(msgspec.structs.replace(point, wire_limit_us=None) for point in fake_result().points)
    bench_figure(fake_result(points=points))
    efficiency_figure(PROFILE.replace(curves=()))
    for name in catalog.names():
        efficiency_figure(catalog.load(name))


def test_unknown_picture_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.svg, \.png, \.pdf"):
        save_figure(efficiency_figure(PROFILE), tmp_path / "picture.jpeg")


def test_drawing_leaves_matplotlib_settings_alone() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    efficiency_figure(PROFILE)
    assert dict(matplotlib.rcParams) == before


def test_import_needs_no_matplotlib() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from commlayer.drawing import chrome_trace, efficiency_figure\n"
        "from commlayer.profiles import catalog\n"
        "assert 'numpy' not in sys.modules and 'torch' not in sys.modules\n"
        "try: efficiency_figure(catalog.load('monta-a800-2x8'))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.startswith("UsageError")
    assert "pip install 'matplotlib>=3.8'" in out


def report(tmp_path: Path, **changes: Any) -> str:
    chosen = decide().timeline
    path = tmp_path / "report.html"
    timelines = [("16 MiB: pipelined_copy×4", chosen, measured(chosen)), ("1 MiB: flat", chosen, measured(chosen, 0.9))]
    write_report(path, PROFILE, fake_result(**changes), timelines)
    return path.read_text(encoding="utf-8")


def test_report_is_one_sound_self_contained_page(tmp_path: Path) -> None:
    text = report(tmp_path)
    page = HtmlPage(text)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert "script" not in page.tags
    assert all(address.startswith("#") for address in page.addresses)
    assert not re.search(r"@import|url\((?!#)", text)
    assert page.tags.count("svg") >= 4
    assert "prefers-color-scheme: dark" in text


def test_columns_of_a_report_are_visible_on_a_page_of_800_px(tmp_path: Path) -> None:
    tables = NarrowTables(report(tmp_path)).tables
    assert any("ratio to flat" in head for head, _ in tables)
    assert not [(head, width) for head, width in tables if width > 760]


def test_report_says_what_was_found(tmp_path: Path) -> None:
    text = "".join(HtmlPage(report(tmp_path)).text)
    for word in ("2x4", "emulated", "400mbit", "2025-01-31", "16 MiB", "pipelined×8", "torch all_to_all_single"):
        assert word in text
    assert fake_result().points[0].reason in text
    assert "How to read this" in text
    assert "2.13.0" in text


def test_report_escapes_everything(tmp_path: Path) -> None:
    evil = "<script>alert(3)</script>"
    path = tmp_path / "report.html"
    result = fake_result(
        profile=evil,
        topology=evil,
        inter=evil,
        environment={evil: evil},
        points=(msgspec.structs.replace(fake_point(2**20, name=evil), reason=evil),),
    )
    chosen = decide().timeline
    write_report(path, hostile_profile(), result, [(evil, chosen, measured(chosen))])
    page = HtmlPage(path.read_text(encoding="utf-8"))
    assert "script" not in page.tags
    assert "img" not in page.tags


def test_report_of_loopback_compares_nothing(tmp_path: Path) -> None:
    text = "".join(HtmlPage(report(tmp_path, inter=None)).text)
    assert "Loopback" in text
    assert "of flat" not in text
    assert "bit-equal" in text


@pytest.mark.parametrize(
    ("is_emulated", "inter", "compares"),
    [(True, "400mbit", True), (True, None, False), (False, None, True)],
)
def test_only_emulation_without_a_known_wire_is_not_comparable(
    is_emulated: bool, inter: str | None, compares: bool
) -> None:
    assert fake_result(is_emulated=is_emulated, inter=inter).is_comparable is compares


def test_report_of_an_empty_run(tmp_path: Path) -> None:
    page = HtmlPage(report(tmp_path, points=()))
    assert page.open == []
    with pytest.raises(UsageError, match="nothing to draw"):
        bench_figure(fake_result(()))


def test_report_shouts_about_wrong_bits(tmp_path: Path) -> None:
    point = fake_point(2**20)
    rows = tuple(msgspec.structs.replace(row, num_wrong=3) if row.is_chosen else row for row in point.rows)
    text = report(tmp_path, points=(msgspec.structs.replace(point, rows=rows),))
    words = "".join(HtmlPage(text).text)
    assert "3bytes not equal to torch's, the most on any rank" in words
    assert "3 bytes not equal" in words
    assert "elements" not in words


def test_report_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = HtmlPage(report(tmp_path))
    assert "svg" not in page.tags
    assert "pip install 'matplotlib>=3.8'" in "".join(page.text)


def test_a_row_and_its_report_have_one_error(tmp_path: Path) -> None:
    chosen = fake_point(2**20).chosen
    assert chosen.error == pytest.approx(prediction_error(94, 100)) == pytest.approx(-0.06)
    assert fake_point(2**20).torch.error is None
    write_report(tmp_path / "report.html", PROFILE, fake_result())
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<td>-6%</td>" in text
