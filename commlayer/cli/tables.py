"""What commands print: JSON, and tables that are readable on a terminal and in a pipe. rich is imported on first use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["console", "print_json", "print_table", "rounded"]

_PIPE_WIDTH = 160


def print_json(content: Any) -> None:
    """Write ``content`` (anything msgspec encodes) to stdout as indented JSON."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(content), indent=2).decode())


def rounded(value: float, digits: int = 3) -> float:
    """For JSON: µs to the nanosecond. More digits would only pretend."""
    return round(value, digits)


def console() -> Console:
    """rich's console on the present stdout. In a pipe it is wide, so that no cell is cut where nobody can widen it."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    return Console(width=width, highlight=False, emoji=False, markup=False)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    bold: Sequence[int] = (),
    dim: Sequence[int] = (),
) -> None:
    """Print one table.

    Args:
        columns: the headers. One that begins with ">" stands above a right-aligned column (without the ">"); one that
            begins with "~" above a column whose text wraps, and takes the width that is left.
        rows: the cells, as text. Nothing in them is markup.
        title: a line above.
        bold, dim: indices of rows to set so.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(
            Text(column.lstrip(">~")),
            justify="right" if column.startswith(">") else "left",
            no_wrap=not column.startswith("~"),
            overflow="fold",
        )
    for index, row in enumerate(rows):
        style = "bold" if index in bold else "dim" if index in dim else None
        table.add_row(*(Text(cell) for cell in row), style=style)
    out = console()
    if title:
        out.print(Text(title, style="bold"))
    out.print(table)
