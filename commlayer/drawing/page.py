"""The parts of a report: the page with its style sheet, sections, figures, and the guide of `commlayer bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape
from typing import TYPE_CHECKING

from commlayer.profiles.errors import UsageError
from commlayer.profiles.printable import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["GUIDE", "STYLE", "cards", "definitions", "figure", "page", "section", "table"]

STYLE = """
:root { color-scheme: light dark; --ink: #1f2429; --faint: #6b747e; --grid: #dde2e8; --paper: #fefefe; --tint: #f3f6f9;
  --accent: #0072b2; --good: #00795a; --bad: #b3261e; --bar: #9cc3dd; --blue: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --faint: #97a1ab; --grid: #323a42; --paper: #14181c;
  --tint: #1c2227; --accent: #5db5e8; --good: #4cc79f; --bad: #ff8a80; --bar: #2f6a8f; --blue: #3b9de0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", sans-serif;
  overflow-wrap: anywhere; }
main { max-width: 1080px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .8rem; padding-bottom: .3rem; border-bottom: 1px solid var(--grid); }
.badge { font-size: .8rem; font-weight: 600; vertical-align: middle; padding: .15rem .55rem; border-radius: 1rem;
  border: 1px solid var(--accent); color: var(--accent); }
.facts, .reason { color: var(--faint); margin: .35rem 0 .8rem; }
.note { border-left: 3px solid var(--accent); background: var(--tint); padding: .55rem .9rem; margin: .9rem 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: .8rem; margin: 1.4rem 0 0; }
.card { background: var(--tint); border: 1px solid var(--grid); border-radius: .5rem; padding: .8rem .9rem; }
.card b { display: block; font-size: 1.55rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.card span { color: var(--faint); font-size: .86rem; line-height: 1.35; display: block; }
.card.bad b, .bad { color: var(--bad); font-weight: 600; }
.ok { color: var(--good); }
details { margin: .5rem 0; }
summary { cursor: pointer; padding: .2rem 0; font-variant-numeric: tabular-nums; }
details > .reason { margin: .3rem 0 .6rem 1.05rem; }
.scroll, figure { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem; margin-bottom: 1rem; }
th, td { text-align: right; padding: .3rem .45rem; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th { color: var(--faint); font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
tr.chosen td { font-weight: 650; background: var(--tint); }
tr.baseline td:first-child, tr.limit td { color: var(--faint); }
tr.limit td { font-style: italic; }
td.bar { min-width: 90px; width: 14%; padding-left: .2rem; }
td.bar i { display: block; height: .7rem; background: var(--bar); border-radius: 2px; }
tr.chosen td.bar i { background: var(--accent); }
tr.limit td.bar i { background: none; border: 1px dashed var(--faint); }
figure { margin: 1rem 0 1.6rem; }
figure svg { width: 100%; min-width: 620px; height: auto; display: block; }
dl { display: grid; grid-template-columns: fit-content(20rem) 1fr; gap: .25rem 1.2rem; margin: 0; }
dt { color: var(--faint); }
dd { margin: 0; }
@media (max-width: 640px) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .5rem; } }
@media print { details { break-inside: avoid; } }
"""

GUIDE = """<dl>
<dt>size</dt><dd>the whole send buffer of one rank; its tokens are the same on all ranks of a node.</dd>
<dt>flat</dt><dd>one all_to_all of the whole buffer, as torch.distributed does it: every copy of the tokens crosses the
wire.</dd>
<dt>hierarchical</dt><dd>each rank sends only its slice between the nodes, then the node gathers the slices.</dd>
<dt>pipelined</dt><dd>the same in chunks: while one chunk is gathered inside the node, the next crosses the wire.</dd>
<dt>pipelined_copy</dt><dd>also the copy to the final place is a stage of the pipeline.</dd>
<dt>predicted</dt><dd>from the profile alone, before the run.</dd>
<dt>measured</dt><dd>median over rounds of the slowest rank's time.</dd>
<dt>error</dt><dd>predicted over measured, less 1: negative means slower than promised.</dd>
<dt>ratio to flat</dt><dd>median over rounds of the time over torch's time in the same round, so that slow drifts of a noisy
machine cancel. Smaller is better; the bars show it.</dd>
<dt>wire limit</dt><dd>the bytes that must cross between the nodes, at the link's peak, and nothing else: no plan can be
faster.</dd>
<dt>wrong</dt><dd>bytes that differ from torch's result, the most on any rank.</dd>
<dt>timelines</dt><dd>one row for each resource: INTER is the wire between nodes, INTRA the links inside one, DEVICE copies in
memory. The pale bar above is the prediction, the full bar below what one rank measured; the numbers count
chunks. INTER and INTRA side by side is the overlap that makes a pipeline pay.</dd>
<dt>efficiency</dt><dd>bus bandwidth (as nccl-tests defines it) over the link's peak. Markers were measured; dashed lines are
fitted as latency + bandwidth beyond what was measured.</dd>
</dl>"""


def page(title: str, parts: Iterable[str], style: str = "") -> str:
    """Return one HTML file without anything from outside. ``parts``: its elements; empty ones are left out. ``style``: rules of
    its own, beside those of all pages."""
    text = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )
    return printable(text)  # HTML has no control characters, whatever names and sources of others have


def section(title: str, *parts: str) -> str:
    """Return a section of a page: ``parts`` are elements, ``title`` is text."""
    inner = "\n".join(parts)
    return f"<section>\n<h2>{escape(title)}</h2>\n{inner}\n</section>"


def cards(items: Iterable[tuple[str, str]], bad: int = -1) -> str:
    """Show each value and what it is in a row of boxes; the one at ``bad`` is marked."""
    boxes = [
        f'<div class="card{" bad" if index == bad else ""}"><b>{escape(value)}</b><span>{escape(words)}</span></div>'
        for index, (value, words) in enumerate(items)
    ]
    return f'<div class="cards">{"".join(boxes)}</div>'


def definitions(facts: Iterable[tuple[str, str]]) -> str:
    """List names and what they are."""
    lines = [f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts]
    return f"<dl>{''.join(lines)}</dl>"


def table(head: str, rows: Iterable[str]) -> str:
    """Return a table that scrolls where the page is narrow: ``head`` is the cells of its first row, ``rows`` are elements."""
    body = "\n".join(rows)
    named = head.replace("<th></th>", '<th aria-label="as a bar"></th>').replace("<th", '<th scope="col"')
    # Who has no mouse scrolls what has the focus.
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{named}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def figure(name: str, draw: Callable[[], Figure], label: str = "") -> str:
    """Return the figure that ``draw`` draws as an element, or a sentence why there is none. ``name``: unique on the
    page. ``label``: what a screen reader says.
    """
    from commlayer.drawing.style import svg_fragment

    try:
        return f"<figure>{svg_fragment(draw(), f'{name}-', label or name)}</figure>"
    except UsageError as error:  # no matplotlib: the tables are worth a report by themselves
        return f'<p class="note">No figure: {escape(str(error))}</p>'
