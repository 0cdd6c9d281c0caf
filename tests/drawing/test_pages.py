"""The pages as HTML: sound, readable without scripts, in light and in dark, however long the names on them are."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from html_page import NarrowTables
from jinja2 import UndefinedError

from commlayer.auditing.audit_files import AuditedCalls, AuditedGroup, AuditedLateness, PlanEvent, RankAudit
from commlayer.auditing.job_audit import merge_audits
from commlayer.cli.main import main
from commlayer.diagnosis.call_logs import CallLog, GroupLog, RankLog, Site, ThreadLog
from commlayer.diagnosis.findings import diagnose
from commlayer.drawing.audit_report import write_audit_report
from commlayer.drawing.page import pages, render
from commlayer.drawing.waits_page import waits_page

LONG = "a_name_without_a_place_to_break_" * 8
VOID = {"meta", "br", "hr", "img", "link", "input", "col"}
PARENTS = {
    "style": {"head"},
    "title": {"head", "svg", "g", "text", "path", "rect"},
    "li": {"ul", "ol"},
    "dt": {"dl"},
    "dd": {"dl"},
    "thead": {"table"},
    "tbody": {"table"},
    "tr": {"thead", "tbody"},
    "td": {"tr"},
    "th": {"tr"},
    "summary": {"details"},
    "h1": {"main", "header", "section"},
}
"""The elements that HTML allows in few places, and where; ``style`` of a drawing is its own affair."""
NO_BLOCKS = {"p", "h1", "h2", "summary", "span"}
BLOCKS = {"div", "p", "table", "figure", "section", "header", "h1", "h2", "pre", "dl", "details"}


class Reader(HTMLParser):
    """Reads a page, and keeps what is wrong with it."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.wrong: list[str] = []
        self.open: list[str] = []
        self.ids: list[str] = []
        self.count: dict[str, int] = {}
        self.title = ""
        self.feed(text)
        self.close()
        self.wrong += [f"<{tag}> is never closed" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        inside, given = self.open[-1] if self.open else "", dict(attrs)
        self.count[tag] = self.count.get(tag, 0) + 1
        is_drawn = "svg" in self.open
        if tag in PARENTS and inside not in PARENTS[tag] and not is_drawn:
            self.wrong.append(f"<{tag}> in <{inside}>")
        if tag in BLOCKS and inside in NO_BLOCKS:
            self.wrong.append(f"<{tag}> in <{inside}>")
        if len(given) != len(attrs):
            self.wrong.append(f"<{tag}> has an attribute twice")
        if tag in ("svg", "img") and not is_drawn and not (given.get("aria-label") or given.get("alt")):
            self.wrong.append(f"<{tag}> has no words")
        if tag == "th" and given.get("scope") != "col":
            self.wrong.append("<th> says not of what it is the head")
        if tag == "script" or any(name.startswith("on") for name in given):
            self.wrong.append(f"<{tag}> runs something")
        for name in ("src", "href", "xlink:href"):
            if not (given.get(name) or "#").startswith("#"):
                self.wrong.append(f"{name}={given[name]} is outside")
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "title" and "svg" not in self.open:
            self.title += data


def audit_page(folder: Path, name: str = LONG) -> str:
    calls = AuditedCalls(
        collective=name[:64], plan=name[:64], up_to_bytes=1 << 22, calls=10, promised_us=1e4, measured_us=2e4,
        logical_bytes=1 << 20, wire_bytes=None,
    )  # fmt: skip
    group = AuditedGroup(
        group=name, description=name, ranks=(0, 1), nodes=((0,), (1,)), began_s=1e9, profile=name, fabric_rate=0.5,
        node_rates=(1.0, 0.5), calls=(calls,), comparable_calls=10, late=(AuditedLateness(rank=1, calls=10, waited_us=5e4),),
        events=(PlanEvent(time_s=1e9 + 5, call=7, what=name),),
    )  # fmt: skip
    job = merge_audits(
        [
            RankAudit(
                job=name, rank=rank, world_size=2, host=name, pid=1, slurm_job_id="", commlayer="0", written_s=1e9 + 9,
                is_final=True, groups=(group,),
            )
            for rank in (0, 1)
        ]
    )  # fmt: skip
    write_audit_report(folder / "page.html", job, ["a note"])
    return (folder / "page.html").read_text(encoding="utf-8")


def circle_page(_: Path, name: str = LONG) -> str:
    logs = []
    for rank in (0, 1):
        names = [f"{each}{name}" for each in ("a", "b")]
        site = Site(f"/{name}/train.py", 10 + rank, name)
        groups = tuple(
            GroupLog(key=each, name=each, ranks=(0, 1), issued=int(place == rank)) for place, each in enumerate(names)
        )
        call = CallLog(group=rank, number=1, kind="all_reduce", site=site, thread=7)
        threads = (ThreadLog(ident=7, name="MainThread", site=site),)
        log = RankLog(job="", rank=rank, ranks=(0, 1), reason="timeout", groups=groups, calls=(call,), threads=threads)
        logs.append(msgspec.structs.replace(log, host=name))
    found = diagnose(logs)
    assert found.has_cause
    return waits_page(logs, found)


PARTS = """
{% extends "page.html" %}
{% from "parts.html" import cards, definitions, section, table, text_table %}
{% block main %}
<h1>Parts</h1>
{% call section(long) %}
{{ cards([(long, long)]) }}
{{ definitions([(long, long)]) }}
{% call table(["name", ""]) %}<tr><td>{{ long }}</td><td></td></tr>{% endcall %}
{{ text_table(["~name", ">value"], [[long, "1"]], 0) }}
{% include "bench_guide.html" %}
<figure><svg role="img" aria-label="a circle"><circle r="1"/></svg></figure>
{% endcall %}
{% endblock %}
"""


def parts_page(_: Path) -> str:
    return pages().from_string(PARTS.lstrip()).render(title=LONG, long=LONG).lstrip()


@pytest.mark.parametrize("draw", [audit_page, circle_page, parts_page])
def test_a_page_is_sound(draw: Callable[[Path], str], tmp_path: Path) -> None:
    text = draw(tmp_path)
    found = Reader(text)
    assert found.wrong == []
    assert len(found.ids) == len(set(found.ids))
    assert found.title
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert found.count["h1"] == found.count["main"] == 1
    assert found.count["svg"] >= 1


@pytest.mark.parametrize("draw", [audit_page, circle_page, parts_page])
def test_a_page_has_every_colour_in_light_and_in_dark(draw: Callable[[Path], str], tmp_path: Path) -> None:
    text = draw(tmp_path)
    light, dark = (set(re.findall(r"(--[a-z]+):", part)) for part in text.split("prefers-color-scheme: dark", 1))
    assert set(re.findall(r"var\((--[a-z]+)\)", text)) <= light & dark


@pytest.mark.parametrize("draw", [audit_page, circle_page, parts_page])
def test_no_name_makes_a_page_wider(draw: Callable[[Path], str], tmp_path: Path) -> None:
    """Text breaks anywhere; what does not break scrolls by itself."""
    text = draw(tmp_path)
    assert re.search(r"body \{[^}]*overflow-wrap: anywhere", text)
    assert re.search(r"\.scroll, figure \{ overflow-x: auto", text)
    assert text.count("<table>") == text.count('<div class="scroll" tabindex="0"><table>')
    assert text.count("<svg") == text.count("<figure><svg")


_USABLE_PX = 800 - 2 * 20
"""The width of a page of 800 px without its padding."""


def mappings_page(folder: Path, _: str) -> str:
    job = "-m mixtral-8x22b -c h100-eos -g 128 --global-batch 256 --sequence 4096 --software megatron --tp 2 --ep 8 --pp 8"
    page = folder / "page.html"
    shown = CliRunner().invoke(main, ["search", *job.split(), "--recompute", "full", "--report", str(page)])
    assert shown.exit_code == 0, shown.output
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize("draw", [mappings_page, audit_page, circle_page])
def test_columns_that_matter_are_visible_on_a_page_of_800_px(draw: Callable[[Path, str], str], tmp_path: Path) -> None:
    tables = NarrowTables(draw(tmp_path, "pipelined_copy×12")).tables
    assert tables
    assert not [(head, width) for head, width in tables if width > _USABLE_PX]


def test_no_template_lets_text_through_unescaped() -> None:
    """A drawing alone is markup (Drawing.svg); whatever else a template is given is text."""
    names = [name for name in pages().list_templates() if name.endswith(".html")]
    assert {"audit.html", "bench.html", "estimate.html", "search.html", "waits.html", "what_if.html"} <= set(names)
    for name in names:
        source, *_ = pages().loader.get_source(pages(), name)  # type: ignore[union-attr]  # there is one
        assert not re.search(r"\|\s*safe|autoescape", source), name
    evil = "<i>'\"&"
    assert pages().from_string("{{ evil }}").render(evil=evil) == "&lt;i&gt;&#39;&#34;&amp;"


def test_a_value_that_a_template_lacks_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'heading' is undefined"):
        render("what_if.html", title="words")


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ("<style></style>", "<style> in <main>"),
        ("<p><table></table></p>", "<table> in <p>"),
        ("<svg></svg>", "<svg> has no words"),
        ("<div>", "</main> closes nothing"),
        ("<table><tr></tr></table>", "<tr> in <table>"),
        ('<a href="https://example.org"></a>', "href=https://example.org is outside"),
        ('<b onclick="x"></b>', "<b> runs something"),
    ],
)
def test_what_is_wrong_is_found(body: str, wrong: str) -> None:
    assert wrong in Reader(f"<html><body><main>{body}</main></body></html>").wrong
