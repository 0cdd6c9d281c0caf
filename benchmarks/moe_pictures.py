"""The pictures of the MoE benchmarks, in the repository's style."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moe_tables import PHASES, Breakdown, KindRow, LayerRow

from commlayer.drawing.style import BLUE, FAINT, GREEN, INK, ORANGE, PAPER, PURPLE, SKY, VERMILLION, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["breakdown_figure", "kinds_figure", "layer_figure"]

_WIDTH = 9.0
_OF_PHASE = dict(zip(PHASES, (PURPLE, GREEN, VERMILLION, SKY, ORANGE), strict=True))
_OF_KIND = {
    "all_to_all": (VERMILLION, "o", "all_to_all there and back"),
    "all_gather": (BLUE, "s", "all_gather, reduce_scatter"),
}


@styled
def breakdown_figure(found: Sequence[Breakdown], title: str) -> Figure:
    """A stacked bar for each way, as figure 5 of MoE Parallel Folding."""
    figure = new_figure(_WIDTH, 1.8 + 0.55 * len(found))
    axes = figure.add_subplot()
    names = ["\n".join([*each.way.split(": "), each.mapping]) for each in found]
    left = [0.0] * len(found)
    longest = max(each.total_ms for each in found) or 1.0
    for name in PHASES:
        widths = [each.phases_ms[name] for each in found]
        axes.barh(names, widths, left=left, color=_OF_PHASE[name], label=name, height=0.66)
        for place, (start, width) in enumerate(zip(left, widths, strict=True)):
            if width > 0.06 * longest:
                dark = name in ("dispatch", "permute")
                axes.text(
                    start + width / 2,
                    place,
                    f"{width:.0f}",
                    ha="center",
                    va="center_baseline",
                    color="white" if dark else INK,
                )
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, total in enumerate(left):
        axes.text(total + 0.01 * longest, place, f"{total:.0f}", va="center_baseline", fontweight="bold")
    axes.set_xlim(0, 1.1 * longest)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(
        "forward and backward, mean over ranks (ms)\ndispatch, combine: what is not hidden behind computing"
    )
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    figure.legend(loc="outside lower center", ncols=len(PHASES))
    return figure


@styled
def layer_figure(rows: Sequence[LayerRow], title: str) -> Figure:
    """The ratios of one width, with quartiles, and the targets."""
    shown = [row for row in rows if row.ratio is not None]
    figure = new_figure(_WIDTH, 1.3 + 0.32 * len(shown))
    axes = figure.add_subplot()
    for place, row in enumerate(shown):
        assert row.ratio is not None  # filtered above
        colour = FAINT if row.way in ("plain", "DeepSpeed") else BLUE if row.way == "planned" else SKY
        spread = [[row.ratio.middle - row.ratio.low], [row.ratio.high - row.ratio.middle]]
        axes.barh(
            place, row.ratio.middle, color=colour, height=0.66, xerr=spread, error_kw={"elinewidth": 1.0, "capsize": 2}
        )
        label = axes.text(
            row.ratio.high + 0.02, place, f"{row.ratio.middle:.2f}", va="center_baseline", fontweight="bold"
        )
        label.set_bbox({"facecolor": PAPER, "edgecolor": "none", "pad": 1.0})  # a line may pass behind it
    names = [f"{row.way}, {row.mapping}" + (f": {row.chosen}" if row.way == "planned" else "") for row in shown]
    axes.set_yticks(range(len(shown)), names)
    axes.axvline(1.0, color=FAINT, linewidth=1.0)
    axes.axvline(0.75, color=INK, linewidth=1.1, linestyle=(0, (3, 2)))
    axes.text(0.75, 1.0, "target 0.75", transform=axes.get_xaxis_transform(), ha="center", va="bottom", color=FAINT)
    axes.set_xlim(0, 1.1 * max(row.ratio.high for row in shown if row.ratio is not None))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("time / plain layer with EP over all ranks: median and quartiles over rounds")
    axes.set_title(f"{title}\n")
    return figure


@styled
def kinds_figure(rows: Sequence[KindRow], title: str) -> Figure:
    """Time over k of both kinds, measured and predicted, as MegaScale-MoE's figure 7; the chosen one is filled."""
    worlds = sorted({row.ranks for row in rows})
    figure = new_figure(_WIDTH, 4.2)
    panels = figure.subplots(1, len(worlds), squeeze=False)[0]
    for axes, ranks in zip(panels, worlds, strict=True):
        mine = [row for row in rows if row.ranks == ranks]
        ks = [row.top_k for row in mine]
        for kind, (colour, marker, name) in _OF_KIND.items():
            times = [row.both_ms[kind] for row in mine]
            spread = [[each.middle - each.low for each in times], [each.high - each.middle for each in times]]
            middles = [each.middle for each in times]
            axes.errorbar(ks, middles, yerr=spread, color=colour, linewidth=1.8, capsize=2, elinewidth=0.8)
            axes.plot(ks, middles, linestyle="", marker=marker, markersize=7, color=colour, markerfacecolor="white")
            taken = [(row.top_k, row.both_ms[kind].middle) for row in mine if row.chosen == kind]
            if taken:
                axes.plot(*zip(*taken, strict=True), linestyle="", marker=marker, markersize=7, color=colour)
            predicted = [(row.top_k, row.predicted_ms[kind]) for row in mine if kind in row.predicted_ms]
            if predicted:
                axes.plot(*zip(*predicted, strict=True), color=colour, linewidth=1.1, linestyle=(0, (3, 2)))
            if axes is panels[0]:
                axes.plot([], [], color=colour, marker=marker, markersize=7, linewidth=1.8, label=name)
        axes.set_title(f"{ranks} ranks")
        axes.set_xticks(ks)
        axes.set_ylim(0)
        axes.set_xlabel("k, experts of a token")
    panels[0].set_ylabel("dispatch and combine, forward and backward (ms)")
    panels[0].plot([], [], color=FAINT, linewidth=1.1, linestyle=(0, (3, 2)), label="predicted")
    panels[0].plot([], [], color=FAINT, linestyle="", marker="o", markersize=7, label="filled: chosen")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    figure.legend(loc="outside lower center", ncols=4)
    return figure
