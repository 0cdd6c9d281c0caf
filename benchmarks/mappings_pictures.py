"""The picture of ``make bench-mappings``: every mapping's step, measured, and predicted by parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mappings_predict import Row

from commlayer.drawing.style import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, SKY, VERMILLION, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["steps_figure"]

_KINDS = {
    "computation": (("attention", "experts", "dense", "memory", "head", "recompute"), GREEN),
    "dispatch, combine": (("dispatch", "combine"), VERMILLION),
    "tp": (("tp",), SKY),
    "cp": (("cp",), BLUE),
    "pp": (("pp", "bubble"), PURPLE),
    "gradients": (("gradients", "parameters"), ORANGE),
}


@styled
def steps_figure(rows: Sequence[Row], title: str) -> Figure:
    """A stacked bar of what was predicted, with a mark for what was measured and its quartiles."""
    figure = new_figure(9.0, 1.6 + 0.42 * len(rows))
    axes = figure.add_subplot()
    names = [row.name for row in rows]
    left = [0.0] * len(rows)
    for label, (parts, color) in _KINDS.items():
        widths = [sum(row.parts_ms.get(part, 0.0) for part in parts) for row in rows]
        axes.barh(names, widths, left=left, color=color, label=label, height=0.62)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    places = range(len(rows))
    low = [max(0.0, row.measured_ms - row.quartiles_ms[0]) for row in rows]
    high = [max(0.0, row.quartiles_ms[1] - row.measured_ms) for row in rows]
    axes.errorbar(
        [row.measured_ms for row in rows],
        places,
        xerr=[low, high],
        fmt="D",
        color=INK,
        markersize=5,
        capsize=3,
        label="measured: median and quartiles",
    )
    longest = max(max(left), max(row.quartiles_ms[1] for row in rows))
    for place, row in enumerate(rows):
        end = max(left[place], row.quartiles_ms[1])
        axes.text(end + 0.012 * longest, place, f"{row.error:+.0%}", va="center_baseline", color=INK)
    axes.set_xlim(0, 1.12 * longest)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.grid(color=FAINT, axis="x")
    axes.set_xlabel("one training step, without the optimizer (ms); right: predicted against measured")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    figure.legend(loc="outside lower center", ncols=4)
    return figure
