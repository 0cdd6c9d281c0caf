"""A page about a job that hangs: the circle of ranks that wait for each other, who is missing,
which calls differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

from commlayer.diagnosis.call_logs import RankLog, Site
from commlayer.diagnosis.diagnosis_words import call_words, headline, in_words, ranks_words, short_call
from commlayer.diagnosis.findings import Cycle, Diagnosis, Mismatch, Missing, NamedCall
from commlayer.drawing.page import render

__all__ = ["waits_page"]

_WIDTH, _BOX, _HEIGHT = 1000.0, 300.0, 84.0
_ROOM = 160.0
_MOST_BOXES = 12
_MOST_ROWS = 256

Point = tuple[float, float]


class _Arrow(NamedTuple):
    """A curve with a head at its end, and words of ``width`` around (``x``, ``y``), if any."""

    path: str
    head: str
    words: str
    x: float
    y: float
    width: float


class _Box(NamedTuple):
    """A rank: what it does, and where; ``full``: that place, uncut."""

    x: float
    y: float
    title: str
    words: str
    where: str
    full: str
    is_lost: bool
    width: float = _BOX
    height: float = _HEIGHT


class _Picture(NamedTuple):
    """Ranks and for whom they wait. ``rest``: who else does."""

    arrows: list[_Arrow]
    boxes: list[_Box]
    height: float
    label: str
    rest: str
    width: float = _WIDTH


def waits_page(logs: Sequence[RankLog], diagnosis: Diagnosis) -> str:
    """Return the page, one HTML file without anything from outside."""
    return render(
        "waits.html",
        title="Who waits for whom",
        summary=_summary(diagnosis),
        findings=[(headline(each), each, _picture(each)) for each in (*diagnosis.findings, *diagnosis.waits)],
        words=in_words(diagnosis),
        ranks=[_cells(log) for log in logs[:_MOST_ROWS]],
        call_words=call_words,
        most_rows=_MOST_ROWS,
    )


def _summary(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    kinds = {"circles": Cycle, "calls that differ": Mismatch, "missing ranks": Missing}
    items = [(str(sum(isinstance(each, kind) for each in diagnosis.findings)), words) for words, kind in kinds.items()]
    items.append((str(len(diagnosis.waits)), "ranks that others wait for"))
    items.append((f"{len(diagnosis.ranks) - len(diagnosis.without)} of {len(diagnosis.ranks)}", "ranks left a log"))
    return items


# Pictures


def _picture(finding: Cycle | Missing | Mismatch) -> _Picture | None:
    """Draw who waits for whom, a missing rank on the right, and those that wait for it; None for
    calls that differ."""
    if isinstance(finding, Cycle):
        return _circle(finding)
    if not isinstance(finding, Missing):
        return None
    waiters = finding.waiting[: _MOST_BOXES // 2]
    height = max(len(waiters), 1) * (_HEIGHT + 30) + 30
    centre = (_WIDTH - _BOX / 2 - 10, height / 2)
    arrows, boxes = [], []
    for number, waiter in enumerate(waiters):
        at = (_BOX / 2 + 10, 15 + (_HEIGHT + 30) * (number + 0.5))
        needs = f"needs {short_call(finding.call)}" if number == 0 else ""
        arrows.append(_arrow(at, centre, needs, bend=0.0))
        boxes.append(_waiter_box(at, waiter.call, waiter.site))
    held = "".join(f"in {short_call(each.call)} of group {each.call.group}" for each in finding.held[:1])
    states = {"gone": finding.how or "has ended", "late": "in no call", "silent": "left no dump or log", "held": held}
    name = f"rank {finding.call.rank}"
    boxes.append(_box(centre, name, states[finding.why], finding.at, is_lost=True))
    more = len(finding.waiting) - len(waiters)
    return _Picture(arrows, boxes, height, f"{name} is missing", f"and {more} more that wait." if more > 0 else "")


def _circle(cycle: Cycle) -> _Picture:
    steps = cycle.steps[:_MOST_BOXES]
    count, middle = len(steps), 100.0
    places = [(_BOX / 2 + 10, middle), (_WIDTH - _BOX / 2 - 10, middle)][:count]
    if count > 2:  # on an ellipse that is wide enough
        tall = max(150.0, (_HEIGHT + 24) * math.ceil(count / 2) / 2 + 40)
        wide = _WIDTH / 2 - _BOX / 2 - 10
        middle = tall + _HEIGHT / 2 + 10
        turns = [2 * math.pi * number / count - math.pi / 2 for number in range(count)]
        places = [(_WIDTH / 2 + wide * math.cos(turn), middle + tall * math.sin(turn)) for turn in turns]
    arrows = [
        _arrow(here, there, f"needs {short_call(step.missing)}")
        for here, there, step in zip(places, [*places[1:], *places[:1]], steps, strict=True)
    ]
    boxes = [_waiter_box(at, step.call, step.site) for at, step in zip(places, steps, strict=True)]
    label = f"{ranks_words(sorted({step.call.rank for step in cycle.steps}))} wait for each other"
    rest = f"{ranks_words(cycle.behind)} wait for these." if cycle.behind else ""
    return _Picture(arrows, boxes, 2 * middle, label, rest)


def _arrow(start: Point, end: Point, words: str, bend: float = 0.12) -> _Arrow:
    if start == end:  # a rank that waits for itself
        x, y = start[0], start[1] + _HEIGHT / 2 + 6
        return _Arrow(*_curve((x - 60, y), (x, y + 70), (x + 60, y)), "", 0.0, 0.0, 0.0)
    (x1, y1), (x2, y2) = _edge(start, end), _edge(end, start)
    cx, cy = (x1 + x2) / 2 - (y2 - y1) * bend, (y1 + y2) / 2 + (x2 - x1) * bend
    is_level, is_wide = abs(y2 - y1) < 1, abs(x2 - x1) > _ROOM
    if is_level and is_wide and bend:  # two boxes: there and back, above and below
        cy = y1 + math.copysign(70, x1 - x2)
    x, y = (x1 + 2 * cx + x2) / 4, (y1 + 2 * cy + y2) / 4
    if is_level and not is_wide:  # no room for words between them
        y = y1 - _HEIGHT / 2 - 12
    return _Arrow(*_curve((x1, y1), (cx, cy), (x2, y2)), words, x, y, 6.6 * len(words) + 10)


def _curve(start: Point, by: Point, end: Point) -> tuple[str, str]:
    """The path of a curve, and the corners of the head at its end."""
    length = math.dist(by, end) or 1.0
    dx, dy = (end[0] - by[0]) / length, (end[1] - by[1]) / length
    head = [end, *((end[0] - 12 * dx + side * dy, end[1] - 12 * dy - side * dx) for side in (5, -5))]
    path = f"M{start[0]:.0f},{start[1]:.0f} Q{by[0]:.0f},{by[1]:.0f} {end[0] - 6 * dx:.1f},{end[1] - 6 * dy:.1f}"
    return path, " ".join(f"{x:.1f},{y:.1f}" for x, y in head)


def _edge(inside: Point, towards: Point) -> Point:
    """Where the line between the middles of two boxes leaves the first one."""
    dx, dy = towards[0] - inside[0], towards[1] - inside[1]
    share = min((_BOX / 2 + 6) / abs(dx) if dx else math.inf, (_HEIGHT / 2 + 6) / abs(dy) if dy else math.inf)
    return inside[0] + dx * share, inside[1] + dy * share


def _box(place: Point, title: str, words: str, site: Site | None, *, is_lost: bool = False) -> _Box:
    where = "" if site is None else f"{PurePath(site.file).name}:{site.line} in {site.function.rpartition('.')[2]}"
    return _Box(
        x=place[0] - _BOX / 2,
        y=place[1] - _HEIGHT / 2,
        title=title,
        words=_cut(words),
        where=_cut(where),
        full="" if site is None else str(site),
        is_lost=is_lost,
    )


def _waiter_box(place: Point, call: NamedCall, site: Site) -> _Box:
    return _box(place, f"rank {call.rank}", f"in {short_call(call)} of group {call.group}", site)


def _cut(text: str, most: int = 42) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _cells(log: RankLog) -> list[str]:
    """The row of a rank: its last call, where that was made, and where the program is."""
    call = max(log.calls, key=lambda each: each.issued_ns, default=None)
    at = next((thread.site for thread in log.threads if call is None or thread.ident == call.thread), None)
    cells = [str(log.rank), log.host]
    if call is None:
        cells += ["–", "–", "–"]
    else:
        cells += [f"{call.kind} #{call.number} of group {log.groups[call.group]}", call.state, str(call.site)]
    return [*cells, "–" if at is None else str(at)]
