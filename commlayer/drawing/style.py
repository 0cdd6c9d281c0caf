"""The look of every figure, and how it becomes a file or a piece of a web page. matplotlib is
imported on first use.

Colours are Okabe and Ito's, which stay apart for colour-blind eyes; no meaning rests on colour
alone. Ink, grid and paper are four fixed colours that occur nowhere else, so that ``svg_fragment``
can exchange them for CSS variables and a report follows the reader's light or dark theme.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from commlayer.profiles.errors import UsageError
from commlayer.profiles.files import replacing
from commlayer.profiles.printable import printable
from commlayer.scheduler.plan import Op
from commlayer.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "BEYOND",
    "COLOURS",
    "FAINT",
    "FIGURE_WIDTH",
    "GRID",
    "INK",
    "MARKERS",
    "OP_COLOURS",
    "PAPER",
    "byte_axis",
    "check_drawing",
    "check_picture",
    "name_rows",
    "new_figure",
    "save_figure",
    "styled",
    "svg_fragment",
]

INK = "#1f2429"
FAINT = "#6b747e"
GRID = "#dde2e8"
PAPER = "#fefefe"

ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE = "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7"
# BLUE too: on dark paper it must be lighter
_VARIABLES = {INK: "--ink", FAINT: "--faint", GRID: "--grid", PAPER: "--paper", BLUE: "--blue"}
OP_COLOURS = {
    Op.ALL_TO_ALL: VERMILLION,
    Op.ALL_GATHER: BLUE,
    Op.COPY: GREEN,
    Op.REDUCE: ORANGE,
    Op.ENCODE: PURPLE,
    Op.DECODE: SKY,
    # The backend's own calls, of which a plan is one and no more.
    Op.REDUCE_SCATTER: ORANGE,
    Op.ALL_REDUCE: ORANGE,
    Op.BROADCAST: BLUE,
    Op.GATHER: BLUE,
    Op.SCATTER: VERMILLION,
    Op.COMPUTE: FAINT,
}
COLOURS = (VERMILLION, BLUE, GREEN, PURPLE, ORANGE, SKY)
FIGURE_WIDTH = 9.0
BEYOND = (3.0, 2.0)
"""The dashes of lines that were not measured."""
MARKERS = ("o", "s", "^", "D", "v", "P")

_FORMATS = (".svg", ".png", ".pdf")
_DPI = 160

P = ParamSpec("P")
R = TypeVar("R")


_SETTINGS: Any = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.facecolor": PAPER,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "figure.facecolor": PAPER,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "savefig.dpi": _DPI,
    "svg.fonttype": "none",  # text stays text: a report can be searched, and is half as large
    "svg.hashsalt": "commlayer",  # the same figure gives the same bytes
}


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Run ``draw`` with our settings of matplotlib, and leave the caller's as they were.

    Raises:
        UsageError: matplotlib is not installed.
    """
    from functools import wraps

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> R:
        check_drawing()
        from matplotlib import rc_context

        with rc_context(_SETTINGS):
            return draw(*args, **kwargs)

    return drawn


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure of this size in inches. Not of pyplot: that would keep every figure
    alive, and open windows."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def name_rows(axes: Axes, names: Sequence[str], height: float = 1.0, top: float = -0.5) -> None:
    """Give the y axis a row of ``height`` for each name, the first one on top, from ``top`` on."""
    axes.set_ylim(height * len(names) + top, top)
    axes.set_yticks([(row + 0.5) * height + top for row in range(len(names))], names)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def byte_axis(axes: Axes, label: str, most: int = 10) -> None:
    """Put ticks at powers of two, at most ``most`` of them."""
    low, high = (math.log2(limit) for limit in axes.get_xlim())
    step = math.ceil((high - low) / most) or 1
    exponents = range(math.ceil(low / step) * step, math.floor(high) + 1, step)
    axes.set_xticks(
        [2.0**exponent for exponent in exponents], [format_bytes(2**e) if e >= 0 else "" for e in exponents]
    )
    axes.set_xlabel(label)


def check_picture(path: str | Path) -> None:
    """Check that :func:`save_figure` could write ``path``, before the work that the figure shows.

    Raises:
        UsageError: an ending that no picture has, or matplotlib is not installed.
    """
    check_drawing()
    ending = Path(path).suffix.lower()
    if ending not in _FORMATS:
        raise UsageError(
            f"{path}: expected a picture's name to end with {', '.join(_FORMATS)}, got {ending or 'no ending'}"
        )


def check_drawing() -> None:
    """Raise UsageError where matplotlib is not installed. Does not import it."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise UsageError("figures need matplotlib, which is not installed: pip install 'matplotlib>=3.8'")


def _show_texts(figure: Figure) -> None:
    """Have names and sources of others in ``figure`` drawn as they are.

    Control characters, which SVG cannot have, are spelt out, and what stands between two dollar
    signs is no mathematics.
    """
    from matplotlib.text import Text
    from matplotlib.ticker import FixedFormatter

    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        formatter = axis.get_major_formatter()
        if isinstance(formatter, FixedFormatter):
            formatter.seq = [_as_it_is(text) for text in formatter.seq]
    for artist in figure.findobj(Text):
        text = artist.get_text()
        if text != _as_it_is(text):
            artist.set_text(_as_it_is(text))


def _as_it_is(text: str) -> str:
    return re.sub(r"(?<!\\)\$", r"\\$", printable(text))


@styled
def save_figure(figure: Figure, path: str | Path) -> None:
    """Write ``figure`` as .svg, .png or .pdf, by the ending of ``path``.

    Raises:
        UsageError: another ending.
        OSError: the file cannot be written.
    """
    check_picture(path)
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(Path(path).suffix.lower(), {})
    _show_texts(figure)
    with replacing(path) as file:
        figure.savefig(file, format=Path(path).suffix.lower()[1:], metadata=undated)


@styled
def svg_fragment(figure: Figure, prefix: str, label: str) -> str:
    """Return ``figure`` as an ``<svg>`` element for a web page.

    Args:
        prefix: put before every id, so that the figures of one page do not share any.
        label: what a screen reader says.
    """
    from html import escape

    _show_texts(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}", svg)
    svg = re.sub("<svg[^>]*", lambda tag: re.sub(r' (width|height)="[^"]*"', "", tag[0]), svg, count=1)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(label, quote=True)}"', 1)
