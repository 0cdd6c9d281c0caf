"""The picture of what links can do: efficiency over size, from the curves of a profile."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from commlayer.drawing.style import (
    BEYOND,
    COLOURS,
    FAINT,
    FIGURE_WIDTH,
    MARKERS,
    byte_axis,
    new_figure,
    styled,
)
from commlayer.profiles.curve import Curve
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

__all__ = ["efficiency_figure"]

_POINTS = 120
"""Points of a line."""
_REACH = 4.0
"""The factor by which extrapolated lines go on beyond what was measured."""


@styled
def efficiency_figure(profile: Profile) -> Figure:
    """Draw bus bandwidth over the link's peak, against bytes: markers were measured, dashed lines
    are extrapolated.

    A panel for each class of links and number of ranks that was measured.
    """
    from numpy import geomspace

    panels: dict[tuple[Resource, int], list[Curve]] = {}
    order = {link: index for index, link in enumerate(Resource)}
    for curve in sorted(profile.curves, key=lambda curve: (order[curve.link], curve.group_size)):
        panels.setdefault((curve.link, curve.group_size), []).append(curve)
    # A colour and a marker for each collective, the same in all panels; no two have both in common.
    names = dict.fromkeys(curve.collective for curve in profile.curves)
    looks = {
        name: (COLOURS[i % len(COLOURS)], MARKERS[(i + i // len(COLOURS)) % len(MARKERS)])
        for i, name in enumerate(names)
    }
    num_rows, num_columns = max(1, math.ceil(len(panels) / 2)), min(2, max(1, len(panels)))
    figure = new_figure(FIGURE_WIDTH, 1.2 + 2.5 * num_rows)
    figure.suptitle(f"{profile.name}: {profile.kind}, {profile.topology}")
    grid = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for axes, ((link, size), curves) in zip(grid, panels.items(), strict=False):
        for curve in curves:
            colour, marker = looks[curve.collective]
            first, last = curve.bytes[0], curve.bytes[-1]
            beyond = {"linewidth": 1.1, "linestyle": (0, BEYOND)}
            for sizes, look in (
                (curve.bytes, {"linestyle": "", "marker": marker, "markersize": 4.5}),
                (geomspace(first, last, _POINTS), {"linewidth": 1.6}),
                (geomspace(first / _REACH, first, _POINTS), beyond),
                (geomspace(last, last * _REACH, _POINTS), beyond),
            ):
                shares = [curve.efficiency(each, profile.peaks.of(link)) for each in sizes]
                axes.plot(sizes, shares, color=colour, **look)
        axes.axhline(1.0, color=FAINT, linewidth=1.0)
        axes.text(0.004, 1.0, "peak", transform=axes.get_yaxis_transform(), color=FAINT, va="bottom")
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, max(1.08, 1.05 * axes.dataLim.y1))
        byte_axis(axes, "size S, as nccl-tests counts it", most=6)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_title(link.value if size == 1 else f"{link.value}, {size} ranks")
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for row in grid[::num_columns]:
        row.set_ylabel("bus bandwidth / peak")
    from matplotlib.lines import Line2D

    handles: list[Artist] = [
        Line2D([], [], color=colour, marker=marker, markersize=4.5, linewidth=1.6, label=name)
        for name, (colour, marker) in looks.items()
    ]
    handles.append(Line2D([], [], color=FAINT, linewidth=1.1, linestyle=(0, BEYOND), label="extrapolated"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure
