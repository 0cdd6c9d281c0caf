"""The pictures of docs/papers.md: MoNTA's choice, and what MoE Parallel Folding publishes over what we predict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from papers_folding import Prediction
from papers_monta import (
    O1,
    O2,
    O3,
    PAPER,
    STATED,
    TABLE_8_BYTES,
    Contention,
    edges,
    is_papers,
    launch_range,
    rows_of,
)

from commlayer.drawing.style import BLUE, FAINT, GREEN, INK, ORANGE, SKY, VERMILLION, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["monta_figure", "scaling_curves", "scaling_figure", "scatter_figure"]

Curves = dict[str, dict[str, list[tuple[int, float, float]]]]

_WIDTH = 9.6
_STRATEGIES = {O1: ("O1", VERMILLION, "o"), O2: ("O2", BLUE, "s"), O3: ("O3", GREEN, "^")}
_METHODS = {
    "MCore": (VERMILLION, "o"),
    "folded": (BLUE, "s"),
    "TP+EP+DP": (GREEN, "^"),
    "FSDP+EP": (ORANGE, "D"),
    "FSDP": (FAINT, "v"),
}


@styled
def monta_figure() -> Figure:
    """For which contention and launch cost the choice is the paper's; and what each strategy takes, without them and with."""
    figure = new_figure(_WIDTH, 7.2)
    panels = figure.subplots(2, 2)
    _draw_launch(panels[0][0])
    _draw_slowdowns(panels[0][1])
    titles = ("By the paper's equations alone", f"With the stated contention: {_words(STATED)}")
    for axes, contention, title in zip(panels[1], (Contention(), STATED), titles, strict=True):
        _draw_times(axes, contention, title)
    figure.suptitle(
        "MoNTA's choice: O1 to 16K, O2 from 32K to 128K, O3 at 256K", x=0.01, ha="left", fontweight="bold", fontsize=11
    )
    return figure


def _words(contention: Contention) -> str:
    return f"×{contention.gather_beside_copy:g} each, {contention.launch_us:g} µs"


def _draw_launch(axes: Axes) -> None:
    slowdowns = [1.50 + 0.01 * step for step in range(41)]
    for at_8k, colour, words in (
        (TABLE_8_BYTES, BLUE, "table 8's volumes"),
        (1 << 27, ORANGE, "half of them: b·s·h·2 bytes"),
    ):
        found = [(slowdown, launch_range(slowdown, at_8k)) for slowdown in slowdowns]
        inside = [(slowdown, ends) for slowdown, ends in found if ends is not None]
        places = [slowdown for slowdown, _ in inside]
        lows, highs = [ends[0] for _, ends in inside], [ends[1] for _, ends in inside]
        axes.fill_between(places, lows, highs, color=colour, alpha=0.35, linewidth=1.0, label=words)
    axes.plot([STATED.gather_beside_copy], [STATED.launch_us], marker="*", markersize=11, color=INK, linestyle="")
    axes.annotate("stated", (STATED.gather_beside_copy, STATED.launch_us), (7, -3), textcoords="offset points")
    axes.annotate(
        "left of it: O3 from 128K or sooner", (0.03, 0.06), xycoords="axes fraction", color=FAINT, fontsize=8.5
    )
    axes.annotate("right of it:\nO2 at 256K", (0.80, 0.55), xycoords="axes fraction", color=FAINT, fontsize=8.5)
    axes.annotate("above: O1 at 32K", (0.03, 0.90), xycoords="axes fraction", color=FAINT, fontsize=8.5)
    axes.set_xlim(1.4, 2.0)
    axes.set_ylim(0, 600)
    axes.set_xlabel("all_gather and copy slow each other by")
    axes.set_ylabel("launch of a step behind another resource's (µs)")
    axes.set_title("Where all seven choices are the paper's")
    axes.legend(loc="upper right")


def _draw_slowdowns(axes: Axes) -> None:
    for launch_us, colour in ((210.0, SKY), (250.0, BLUE), (400.0, VERMILLION)):
        places, lows, highs = [], [], []
        for step in range(21):
            copy = 1.0 + 0.1 * step
            grid = [1 / (1 - 0.04 * loss / copy) for loss in range(24)]  # g·(1 − 1/f) = 0.00, 0.04 … 0.92
            ends = edges(lambda gather: is_papers(Contention(gather, copy, launch_us)), grid)  # noqa: B023
            if ends is not None:
                places.append(copy)
                lows.append(ends[0])
                highs.append(ends[1])
        axes.fill_between(
            places, lows, highs, color=colour, alpha=0.35, linewidth=1.0, label=f"launch {launch_us:g} µs"
        )
    axes.plot(
        [STATED.copy_beside_gather], [STATED.gather_beside_copy], marker="*", markersize=11, color=INK, linestyle=""
    )
    axes.set_xlim(1, 3)
    axes.set_ylim(1, 5)
    axes.set_xlabel("copy beside all_gather takes … times as long (g)")
    axes.set_ylabel("all_gather beside copy … times as long (f)")
    axes.set_title("What matters of both is g·(1 − 1/f)")
    axes.legend(loc="upper right")


def _draw_times(axes: Axes, contention: Contention, title: str) -> None:
    rows = rows_of(contention)
    places = range(len(rows))
    for strategy, (name, colour, marker) in _STRATEGIES.items():
        ratios = [times[strategy] / times[O1] for _, times, _ in rows]
        axes.plot(places, ratios, color=colour, marker=marker, markerfacecolor="white", label=name)
        taken = [(place, ratios[place]) for place in places if rows[place][2] is strategy]
        if taken:
            axes.plot(*zip(*taken, strict=True), color=colour, marker=marker, linestyle="")
    for place, (sequence, _, chosen) in enumerate(rows):
        name = _STRATEGIES[PAPER[sequence]][0]
        colour = INK if chosen is PAPER[sequence] else VERMILLION
        axes.text(
            place, 1.0, name, transform=axes.get_xaxis_transform(), ha="center", va="top", color=colour, fontsize=8.5
        )
    axes.set_xticks(list(places), [f"{sequence}K" for sequence, _, _ in rows])
    axes.set_ylim(0.6, 2.4)
    axes.set_xlabel("sequence; above: the paper's choice, filled: ours")
    axes.set_ylabel("time / O1's")
    axes.set_title(title)
    axes.legend(loc="center right")


@styled
def scatter_figure(found: Sequence[Prediction]) -> Figure:
    """Predicted over published MFU."""
    figure = new_figure(6.6, 5.8)
    axes = figure.add_subplot()
    top = 60
    axes.fill_between(
        [0, top], [0, top * 0.85], [0, top * 1.15], color=FAINT, alpha=0.15, linewidth=0, label="within 15 %"
    )
    axes.plot([0, top], [0, top], color=FAINT, linewidth=0.9)
    for method, (colour, marker) in _METHODS.items():
        mine = [
            (100 * each.row.mfu, 100 * each.estimate.mfu)
            for each in found
            if each.row.method == method
            and each.row.mfu is not None
            and each.row.quality != "misprint"
            and not each.row.is_calibration
        ]
        axes.plot(*zip(*mine, strict=True), linestyle="", marker=marker, color=colour, markersize=5.5, label=method)
    fitted = [100 * each.row.mfu for each in found if each.row.is_calibration and each.row.mfu is not None]
    axes.plot(fitted, fitted, linestyle="", marker="o", markersize=9, markerfacecolor="none", color=INK, label="fitted")
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)
    axes.set_xlabel("published MFU (%)")
    axes.set_ylabel("predicted MFU (%)")
    axes.legend(loc="upper left")
    figure.suptitle("MoE Parallel Folding: every published row", x=0.01, ha="left", fontweight="bold")
    return figure


def scaling_curves(found: Sequence[Prediction]) -> Curves:
    """Table 4 by model and method: (GPUs, published, predicted)."""
    curves: Curves = {}
    for each in found:
        row = each.row
        if row.table == "table 4" and row.mfu is not None and row.quality != "misprint":
            curves.setdefault(row.model, {}).setdefault(row.method, []).append((row.gpus, row.mfu, each.estimate.mfu))
    return {model: {method: sorted(points) for method, points in methods.items()} for model, methods in curves.items()}


@styled
def scaling_figure(curves: Curves) -> Figure:
    """MFU over GPUs at a global batch of 1024."""
    figure = new_figure(_WIDTH, 6.8)
    panels = [axes for line in figure.subplots(2, 2) for axes in line]
    for axes, (model, methods) in zip(panels, curves.items(), strict=True):
        for method, points in methods.items():
            colour, marker = _METHODS[method]
            gpus = [each[0] for each in points]
            axes.plot(gpus, [100 * each[1] for each in points], color=colour, marker=marker, label=method)
            axes.plot(
                gpus, [100 * each[2] for each in points], color=colour, linestyle=(0, (3, 2)), marker="x", markersize=5
            )
        ticks = sorted({each[0] for points in methods.values() for each in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(each) for each in ticks])
        axes.set_ylim(0, 60)
        axes.set_title(model)
        axes.set_xlabel("GPUs")
        axes.set_ylabel("MFU (%)")
    panels[0].plot([], [], color=INK, linestyle=(0, (3, 2)), marker="x", markersize=5, label="predicted")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    figure.suptitle("Strong scaling: published (solid), predicted (dashed)", x=0.01, ha="left", fontweight="bold")
    return figure
