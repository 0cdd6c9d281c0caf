"""Figures of expert loads: each expert's share over time, and each rank's, under one placement and under another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commlayer.drawing.figures import FIGURE_WIDTH
from commlayer.drawing.style import new_figure, styled
from commlayer.scheduler.placement.expert_loads import ExpertLoads

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["loads_figure"]

_BRIGHTEST = 4.0
"""Times the mean, from which on all is of one colour."""


@styled
def loads_figure(loads: ExpertLoads, layer: int, ranks: dict[str, Any]) -> Figure:
    """Draw one layer: its experts over time, and for each name of ``ranks`` an array [steps, ranks] of rows."""
    panels = {"experts": loads.counts[:, layer], **ranks}
    figure = new_figure(FIGURE_WIDTH, 1.4 + 1.7 * len(panels))
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, rows) in zip(grid, panels.items(), strict=True):
        image = axes.imshow(
            (rows / rows.mean(1, keepdims=True).clip(1e-9)).T,
            aspect="auto",
            interpolation="nearest",
            origin="lower",
            cmap="cividis",
            vmin=0,
            vmax=_BRIGHTEST,
        )
        axes.grid(visible=False)
        axes.set_title(name)
        axes.set_ylabel("expert" if name == "experts" else "rank")
    grid[-1].set_xlabel("step" if loads.stride == 1 else f"step of {loads.stride} calls")
    figure.colorbar(image, ax=list(grid), label="choices, times the mean", extend="max")
    figure.suptitle(f"{loads.layers[layer]}: {loads.source}")
    return figure
