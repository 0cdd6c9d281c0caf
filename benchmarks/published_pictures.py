"""The pictures of docs/published.md: predicted over published throughput, and the errors by kind of case."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from published_predict import Outcome

from commlayer.drawing.style import BLUE, FAINT, GREEN, INK, VERMILLION, new_figure, styled
from commlayer.scheduler.mapping.result import kind_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["errors_figure", "scatter_figure"]

_LOOKS = {
    "named": (INK, "o", "named in advance"),
    "open": (BLUE, "s", "first two thirds"),
    "held": (VERMILLION, "^", "held back"),
    "later": (GREEN, "D", "added later"),
}
_BAND = 0.20


@styled
def scatter_figure(outcomes: Sequence[Outcome]) -> Figure:
    """Predicted over published tokens/s of a GPU, on logarithmic axes."""
    figure = new_figure(6.6, 5.8)
    axes = figure.add_subplot()
    runs = [each for each in outcomes if each.error is not None]
    low = min(min(each.published, each.predicted) for each in runs) / 1.2
    high = max(max(each.published, each.predicted) for each in runs) * 1.2
    ends = [low, high]
    axes.fill_between(
        ends,
        [end * (1 - _BAND) for end in ends],
        [end * (1 + _BAND) for end in ends],
        color=FAINT,
        alpha=0.15,
        linewidth=0,
    )
    axes.plot(ends, ends, color=FAINT, linewidth=0.9)
    for group, (colour, marker, words) in _LOOKS.items():
        points = [(each.published, each.predicted) for each in runs if each.row.group == group]
        if points:
            axes.plot(*zip(*points, strict=True), linestyle="", marker=marker, color=colour, markersize=5, label=words)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_xlabel("published tokens/s of a GPU")
    axes.set_ylabel("predicted tokens/s of a GPU")
    axes.legend(loc="upper left", title=f"band: within {_BAND:.0%}")
    figure.suptitle("Published training runs, predicted", x=0.01, ha="left", fontweight="bold")
    return figure


@styled
def errors_figure(outcomes: Sequence[Outcome]) -> Figure:
    """Every error, a line for each kind of case, below a heading for its machine, software and precision."""
    kinds: dict[str, list[Outcome]] = defaultdict(list)
    for each in outcomes:
        if each.kind is not None:
            kinds[kind_words(each.kind)].append(each)
    lines: list[tuple[str, list[Outcome]]] = []  # from the top; a heading has no runs
    heading = ""
    for name in sorted(kinds):
        *machine, traits = name.split(", ", 4)
        if heading != (heading := ", ".join(machine)):
            lines.append((heading, []))
        lines.append((traits, kinds[name]))
    figure = new_figure(9.6, 1.2 + 0.26 * len(lines))
    axes = figure.add_subplot()
    axes.axvspan(-100 * _BAND, 100 * _BAND, color=GREEN, alpha=0.10, linewidth=0)
    axes.axvline(0, color=FAINT, linewidth=0.9)
    for group, (colour, marker, words) in _LOOKS.items():
        errors = [
            (100 * each.error, -height)
            for height, (_, runs) in enumerate(lines)
            for each in runs
            if each.row.group == group and each.error is not None
        ]
        if errors:
            axes.plot(
                *zip(*errors, strict=True),
                linestyle="",
                marker=marker,
                color=colour,
                markersize=5,
                alpha=0.75,
                label=words,
            )
    axes.set_yticks([-height for height in range(len(lines))], [words for words, _ in lines])
    for label, (_, runs) in zip(axes.get_yticklabels(), lines, strict=True):
        label.set_fontweight("normal" if runs else "bold")
    axes.set_ylim(-len(lines), 1)
    axes.set_xlabel("error: predicted over published throughput, less 1 (%)")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4)  # inside, its markers would read as rows
    figure.suptitle(f"Errors by kind of case; band: within {_BAND:.0%}", x=0.01, ha="left", fontweight="bold")
    return figure
