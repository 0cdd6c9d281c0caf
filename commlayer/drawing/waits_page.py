"""A page about a job that hangs: the circle of ranks that wait for each other, who is missing, which calls differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import PurePath

from commlayer.diagnosis.call_logs import RankLog, Site
from commlayer.diagnosis.diagnosis_words import call_words, headline, in_words, ranks_words, short_call
from commlayer.diagnosis.findings import Cycle, Diagnosis, Mismatch, Missing
from commlayer.drawing.page import cards, page, section, table

__all__ = ["waits_page"]

_WIDTH, _BOX, _HEIGHT = 1000.0, 300.0, 84.0
_ROOM = 160.0
_MOST_BOXES = 12
_MOST_ROWS = 256
_STYLE = """
.waits rect { fill: var(--tint); stroke: var(--accent); stroke-width: 1.4; }
.waits .lost rect { stroke: var(--bad); stroke-dasharray: 6 4; }
.waits text { fill: var(--ink); font: 13px system-ui, "Segoe UI", sans-serif; }
.waits .behind { fill: var(--paper); stroke: none; }
.waits .rank { font-weight: 700; font-size: 15px; }
.waits .place, .waits .needs { fill: var(--faint); font-size: 12px; }
.waits path { fill: none; stroke: var(--bad); stroke-width: 2; }
.waits polygon { fill: var(--bad); }
pre { white-space: pre-wrap; background: var(--tint); padding: .7rem .9rem; font-size: .86rem; }
th.place, td.place { white-space: normal; min-width: 14rem; text-align: left; }
"""

Point = tuple[float, float]


def waits_page(logs: Sequence[RankLog], found: Diagnosis) -> str:
    """Return the page, one HTML file without anything from outside."""
    parts = ["<h1>Who waits for whom</h1>", _summary(found)]
    for finding in found.findings:
        title = headline(finding)
        if isinstance(finding, Cycle):
            parts.append(section(title, _circle(finding)))
        elif isinstance(finding, Missing):
            parts.append(section(title, _star(finding)))
        else:
            parts.append(section(title, _differences(finding)))
    parts += [section(headline(missing), _star(missing)) for missing in found.waits]
    parts.append(section("In words", f"<pre>{escape(in_words(found))}</pre>"))
    parts.append(section("The last call of each rank", _ranks(logs)))
    return page("Who waits for whom", parts, _STYLE)


def _summary(found: Diagnosis) -> str:
    kinds = {"circles": Cycle, "calls that differ": Mismatch, "missing ranks": Missing}
    items = [(str(sum(isinstance(each, kind) for each in found.findings)), words) for words, kind in kinds.items()]
    items.append((str(len(found.waits)), "ranks that others wait for"))
    items.append((f"{len(found.ranks) - len(found.without)} of {len(found.ranks)}", "ranks left a log"))
    return cards(items)


# Pictures


def _circle(cycle: Cycle) -> str:
    steps = cycle.steps[:_MOST_BOXES]
    places, height = _around(len(steps))
    lines = []
    for number, step in enumerate(steps):
        there = places[(number + 1) % len(steps)]
        lines.append(_arrow(places[number], there, f"needs {short_call(step.missing)}"))
    boxes = [
        _box(place, f"rank {step.call.rank}", f"in {short_call(step.call)} of group {step.call.group}", step.site)
        for place, step in zip(places, steps, strict=True)
    ]
    label = f"{ranks_words(sorted({step.call.rank for step in cycle.steps}))} wait for each other"
    behind = f'<p class="reason">{escape(ranks_words(cycle.behind))} wait for these.</p>' if cycle.behind else ""
    return _svg([*lines, *boxes], height, label) + behind


def _star(missing: Missing) -> str:
    """The rank that is missing on the right, and those that wait for it."""
    waiters = missing.waiting[: _MOST_BOXES // 2]
    height = max(len(waiters), 1) * (_HEIGHT + 30) + 30
    centre = (_WIDTH - _BOX / 2 - 10, height / 2)
    lines, boxes = [], []
    for number, waiter in enumerate(waiters):
        place = (_BOX / 2 + 10, 15 + (_HEIGHT + 30) * (number + 0.5))
        needs = f"needs {short_call(missing.call)}" if number == 0 else ""
        lines.append(_arrow(place, centre, needs, bend=0.0))
        call = waiter.call
        boxes.append(_box(place, f"rank {call.rank}", f"in {short_call(call)} of group {call.group}", waiter.site))
    held = "".join(f"in {short_call(each.call)} of group {each.call.group}" for each in missing.held[:1])
    states = {"gone": missing.how or "has ended", "late": "in no call", "silent": "left no log", "held": held}
    state = states[missing.why]
    boxes.append(_box(centre, f"rank {missing.call.rank}", state, missing.at, is_lost=True))
    more = len(missing.waiting) - len(waiters)
    rest = f'<p class="reason">and {more} more that wait.</p>' if more > 0 else ""
    return _svg([*lines, *boxes], height, f"rank {missing.call.rank} is missing") + rest


def _around(count: int) -> tuple[list[Point], float]:
    """Places of boxes on an ellipse that is wide enough, and the picture's height."""
    if count <= 2:
        return [(_BOX / 2 + 10, 100.0), (_WIDTH - _BOX / 2 - 10, 100.0)][:count], 200.0
    tall = max(150.0, (_HEIGHT + 24) * math.ceil(count / 2) / 2 + 40)
    wide = _WIDTH / 2 - _BOX / 2 - 10
    turns = [2 * math.pi * number / count - math.pi / 2 for number in range(count)]
    middle = tall + _HEIGHT / 2 + 10
    return [(_WIDTH / 2 + wide * math.cos(turn), middle + tall * math.sin(turn)) for turn in turns], 2 * middle


def _arrow(start: Point, end: Point, words: str, bend: float = 0.12) -> str:
    if start == end:  # a rank that waits for itself
        x, y = start[0], start[1] + _HEIGHT / 2 + 6
        return _curve((x - 60, y), (x, y + 70), (x + 60, y))
    (x1, y1), (x2, y2) = _edge(start, end), _edge(end, start)
    cx, cy = (x1 + x2) / 2 - (y2 - y1) * bend, (y1 + y2) / 2 + (x2 - x1) * bend
    is_level, is_wide = abs(y2 - y1) < 1, abs(x2 - x1) > _ROOM
    if is_level and is_wide and bend:  # two boxes: there and back, above and below
        cy = y1 + math.copysign(70, x1 - x2)
    x, y = (x1 + 2 * cx + x2) / 4, (y1 + 2 * cy + y2) / 4
    if is_level and not is_wide:  # no room for words between them
        y = y1 - _HEIGHT / 2 - 12
    return _curve((x1, y1), (cx, cy), (x2, y2)) + _label((x, y), words)


def _curve(start: Point, by: Point, end: Point) -> str:
    """A curve with a head at its end."""
    length = math.dist(by, end) or 1.0
    dx, dy = (end[0] - by[0]) / length, (end[1] - by[1]) / length
    head = [end, *((end[0] - 12 * dx + side * dy, end[1] - 12 * dy - side * dx) for side in (5, -5))]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in head)
    d = f"M{start[0]:.0f},{start[1]:.0f} Q{by[0]:.0f},{by[1]:.0f} {end[0] - 6 * dx:.1f},{end[1] - 6 * dy:.1f}"
    return f'<path d="{d}"/><polygon points="{points}"/>'


def _label(middle: Point, words: str) -> str:
    if not words:
        return ""
    x, y, width = middle[0], middle[1], 6.6 * len(words) + 10
    behind = f'<rect class="behind" x="{x - width / 2:.0f}" y="{y - 10:.0f}" width="{width:.0f}" height="19"/>'
    return f'{behind}<text class="needs" x="{x:.0f}" y="{y + 4:.0f}" text-anchor="middle">{escape(words)}</text>'


def _edge(inside: Point, towards: Point) -> Point:
    """Where the line between the middles of two boxes leaves the first one."""
    dx, dy = towards[0] - inside[0], towards[1] - inside[1]
    share = min((_BOX / 2 + 6) / abs(dx) if dx else math.inf, (_HEIGHT / 2 + 6) / abs(dy) if dy else math.inf)
    return inside[0] + dx * share, inside[1] + dy * share


def _box(place: Point, title: str, words: str, site: Site | None, *, is_lost: bool = False) -> str:
    x, y = place[0] - _BOX / 2, place[1] - _HEIGHT / 2
    where = "" if site is None else f"{PurePath(site.file).name}:{site.line} in {site.function.rpartition('.')[2]}"
    full = "" if site is None else f"<title>{escape(str(site))}</title>"
    return (
        f"<g{' class=' + chr(34) + 'lost' + chr(34) if is_lost else ''}>{full}"
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{_BOX:.0f}" height="{_HEIGHT:.0f}" rx="8"/>'
        f'<text class="rank" x="{x + 14:.0f}" y="{y + 25:.0f}">{escape(title)}</text>'
        f'<text x="{x + 14:.0f}" y="{y + 47:.0f}">{escape(_cut(words))}</text>'
        f'<text class="place" x="{x + 14:.0f}" y="{y + 68:.0f}">{escape(_cut(where))}</text></g>'
    )


def _cut(text: str, most: int = 42) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _svg(parts: Sequence[str], height: float, label: str) -> str:
    return (
        f'<figure><svg class="waits" role="img" aria-label="{escape(label, quote=True)}" '
        f'viewBox="0 0 {_WIDTH:.0f} {height:.0f}">{"".join(parts)}</svg></figure>'
    )


# Tables


def _differences(found: Mismatch) -> str:
    head = '<th>rank</th><th>call</th><th class="place">place</th>'
    rows = [
        f"<tr{' class=' + chr(34) + 'chosen' + chr(34) if call.rank in found.odd else ''}><td>{call.rank}</td>"
        f'<td>{escape(call_words(call))}</td><td class="place">{escape(str(call.site))}</td></tr>'
        for call in found.calls[:_MOST_ROWS]
    ]
    hint = f'<p class="note">{escape(found.hint)}</p>' if found.hint else ""
    return f'<p class="reason">{escape(found.words)}</p>{hint}{table(head, rows)}'


def _ranks(logs: Sequence[RankLog]) -> str:
    head = (
        "<th>rank</th><th>host</th><th>last call</th><th>state</th>"
        '<th class="place">place</th><th class="place">the program is at</th>'
    )
    rows = []
    for log in logs[:_MOST_ROWS]:
        call = max(log.calls, key=lambda each: each.issued_ns, default=None)
        at = next((thread.site for thread in log.threads if call is None or thread.ident == call.thread), None)
        cells = [str(log.rank), log.host]
        if call is None:
            cells += ["–", "–", "–"]
        else:
            cells += [f"{call.kind} #{call.number} of group {log.groups[call.group]}", call.state, str(call.site)]
        cells.append("–" if at is None else str(at))
        inside = "".join(
            f"<td{' class=' + chr(34) + 'place' + chr(34) if place > 3 else ''}>{escape(cell)}</td>"
            for place, cell in enumerate(cells)
        )
        rows.append(f"<tr>{inside}</tr>")
    return table(head, rows)
