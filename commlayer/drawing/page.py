"""HTML pages from the templates beside this module: whatever is put into one is text, and
escaped."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from commlayer.profiles.counted import counted
from commlayer.profiles.errors import UsageError
from commlayer.profiles.files import StrPath, write_file
from commlayer.profiles.printable import printable
from commlayer.units import format_bytes, format_us

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Drawing", "drawing", "pages", "render", "write_page"]


class Drawing(NamedTuple):
    """A figure as an element of a page, or why there is none."""

    svg: Markup | None
    why_none: str = ""


@cache
def pages() -> Environment:
    """The templates. Loaded once, when the first page is written."""
    templates = Environment(
        loader=PackageLoader("commlayer.drawing"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["one_line"] = partial(printable, keep="")
    templates.filters["plain_name"] = lambda column: column.lstrip(">~")
    templates.filters["thousands"] = "{:,}".format
    templates.filters["size"] = format_bytes
    templates.filters["time"] = format_us
    templates.filters["counted"] = counted
    return templates


def render(template: str, **values: object) -> str:
    """Write the page of that template: one file without anything from outside."""
    text = pages().get_template(template).render(values)
    return printable(text.lstrip())  # HTML has no control characters, whatever names and sources of others have


def write_page(path: StrPath, template: str, **values: object) -> None:
    """Write the page of that template to ``path``, whose file it replaces. Raises OSError."""
    write_file(path, render(template, **values))


def drawing(name: str, draw: Callable[[], Figure], label: str = "") -> Drawing:
    """Draw the figure that ``draw`` makes. ``name``: unique on the page. ``label``: what a screen
    reader says."""
    from commlayer.drawing.style import svg_fragment

    try:
        return Drawing(Markup(svg_fragment(draw(), f"{name}-", label or name)))
    except UsageError as error:  # no matplotlib: the tables are worth a page by themselves
        return Drawing(None, str(error))
