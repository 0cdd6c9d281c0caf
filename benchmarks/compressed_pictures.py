"""The pictures of the benchmark of compressed collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from commlayer.drawing.style import BLUE, FAINT, GREEN, INK, MARKERS, ORANGE, VERMILLION, new_figure, styled
from commlayer.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["choice_figure", "error_figure", "training_figure"]

_WIDTH = 9.0
_OF_WAY = {"native": (VERMILLION, "o"), "bf16": (BLUE, "s"), "fp8_e4m3": (GREEN, "^")}


@styled
def error_figure(found: Sequence[Mapping[str, Any]]) -> Figure:
    """Relative error over ranks."""
    figure = new_figure(_WIDTH, 4.2)
    axes = figure.add_subplot()
    ranks = [each["ranks"] for each in found]
    ways = {"bf16 ring": (VERMILLION, "o"), "bf16 all_to_all, FP32 sums": (BLUE, "s"), "fp32": (FAINT, "^")}
    labels = {"bf16 ring": "ring with BF16 sums", "fp32": "FP32 reduce_scatter (Gloo)"}
    for name, (colour, marker) in ways.items():
        axes.plot(ranks, [each[name] for each in found], color=colour, marker=marker, label=labels.get(name, name))
    axes.axhline(2.0**-8, color=INK, linewidth=0.8, linestyle=":")
    axes.annotate("half a unit in BF16's last place: 2⁻⁸", (ranks[0], 2.0**-8), (0, 4), textcoords="offset points")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ranks, [str(each) for each in ranks])
    axes.set_xlabel("ranks")
    axes.set_ylabel("‖sum − FP64 sum‖ / ‖FP64 sum‖")
    axes.legend(loc="center right")
    figure.suptitle(
        "BF16 on the wire and FP32 in the sums: the error does not grow", x=0.01, ha="left", fontweight="bold"
    )
    return figure


@styled
def choice_figure(found: Sequence[Mapping[str, Any]]) -> Figure:
    """Each format's time over the choice's, for each cluster and collective."""
    panels = list(dict.fromkeys((each["cluster"], each["collective"]) for each in found))
    figure = new_figure(_WIDTH, 2.9 * ((len(panels) + 1) // 2))
    for place, (cluster, collective) in enumerate(panels):
        axes = figure.add_subplot((len(panels) + 1) // 2, 2, place + 1)
        rows = [each for each in found if (each["cluster"], each["collective"]) == (cluster, collective)]
        sizes = sorted({each["size"] for each in rows})
        for way, (colour, marker) in _OF_WAY.items():
            mine = [each for each in rows if each["way"] == way]
            if mine:
                axes.plot(
                    [each["size"] for each in mine],
                    [each["ratio"] for each in mine],
                    color=colour,
                    marker=marker,
                    label=way,
                )
        chosen = [each for each in rows if each["way"] == "chosen"]
        for each in chosen:
            name = each["plan"].partition("/")[2] or "native"
            where: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "top"}
            axes.text(each["size"], 1.0, name, **where, fontsize=7.5, fontweight="bold")
        axes.axhline(1.0, color=INK, linewidth=0.9)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_ylim(min(0.7, axes.get_ylim()[0]), 1.25 * axes.get_ylim()[1])
        axes.set_yticks([tick for tick in (0.5, 1, 2, 4) if tick < axes.get_ylim()[1]], minor=False)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xticks(sizes, [format_bytes(each) for each in sizes], fontsize=8)
        axes.set_title(f"{collective}, {cluster}", fontsize=10)
        if place % 2 == 0:
            axes.set_ylabel("time / the choice's")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    figure.suptitle("What each format takes over what was chosen (named above)", x=0.01, ha="left", fontweight="bold")
    return figure


@styled
def training_figure(found: Mapping[str, Sequence[float]]) -> Figure:
    """Loss curves over each other, and how far apart they are."""
    figure = new_figure(_WIDTH, 5.4)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    native = next(iter(found.values()))
    for (name, losses), colour, marker in zip(found.items(), (INK, BLUE, ORANGE), MARKERS, strict=False):
        top.plot(losses, color=colour, label=name, linewidth=1.3, marker=marker, markevery=50, markersize=4)
        if losses is not native:
            apart = [100 * (mine / theirs - 1) for mine, theirs in zip(losses, native, strict=True)]
            bottom.plot(apart, color=colour, linewidth=0.9, marker=marker, markevery=50, markersize=4)
    top.set_ylabel("loss")
    top.legend()
    bottom.axhline(0, color=INK, linewidth=0.8)
    bottom.set_ylabel("against native (%)")
    bottom.set_xlabel("step")
    figure.suptitle("Training a small MoE model with compressed collectives", x=0.01, ha="left", fontweight="bold")
    return figure
