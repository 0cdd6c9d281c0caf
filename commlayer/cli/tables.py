"""Output of commands: lines, JSON, and tables that are readable on a terminal and in a pipe. rich is imported on first use.

All of it goes through here, because names, sources and hosts come from files that others have made: what a terminal would obey
is spelt out, and nothing is markup.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from commlayer.profiles.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "cell_text",
    "echo",
    "echo_json",
    "echo_sentence",
    "print_grid",
    "print_json",
    "print_table",
    "record",
    "rounded",
    "said_warnings",
    "wrapped",
]

_PIPE_WIDTH = 160
_LEAST_LINE = 40
"""The columns of a line of words on a terminal that is narrower."""
_EASY_WRAPPED, _LEAST_WRAPPED = 48, 16
"""How narrow a column of text that wraps becomes before spare columns are left out, and at all."""


def echo(text: str = "", *, lead: str = "", colour: str | None = None, err: bool = False, file: Any = None) -> None:
    """Write a line, ``lead`` before the rest in bold and in ``colour``, to stdout, or to stderr, or to ``file``."""
    styled = click.style(printable(lead), fg=colour, bold=True) if lead else ""
    _write(styled + printable(text) + "\n", file=file or (sys.stderr if err else sys.stdout))


def echo_sentence(
    sentence: str = "", *, lead: str = "", colour: str | None = None, err: bool = False, file: Any = None
) -> None:
    """Write sentences as :func:`echo` does, in lines of whole words where a terminal is narrower than they are."""
    text = wrapped(lead + sentence, file or (sys.stderr if err else sys.stdout))
    echo(text[len(lead) :], lead=text[: len(lead)], colour=colour, err=err, file=file)


def wrapped(text: str, stream: Any, *, before: int = 0) -> str:
    """Break every line of ``text`` into lines of whole words, as wide as the terminal of ``stream``; each begins where its line
    did. ``before``: columns that are taken on the first. Unchanged in a pipe, whose reader has no known width."""
    if not stream.isatty() and "COLUMNS" not in os.environ:
        return text
    width = max(shutil.get_terminal_size().columns, _LEAST_LINE)
    lines: list[str] = []
    for line in (" " * before + text).split("\n"):
        indent = " " * (0 if before and not lines else len(line) - len(line.lstrip()))
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(lines)[before:]


def _write(text: str, *, file: Any = None, color: bool | None = None) -> None:
    # Without a file, click takes a stream of ASCII for a mistake, and writes UTF-8.
    click.echo(text, nl=False, file=file or sys.stdout, color=color)  # noqa: TID251  the one place


def _print(console: Console, *texts: Table | Text, soft_wrap: bool = False) -> None:
    """Write what rich makes of ``texts``; their cells are of :func:`cell_text`."""
    with console.capture() as written:  # rich's own writing ends the program itself where a pipe is closed
        for each in texts:
            console.print(each, soft_wrap=soft_wrap)
    _write(written.get(), color=True)  # rich has left colours out where there are none


def echo_json(text: str) -> None:
    """Write ``text``, which is JSON and ends its last line, to stdout. What would not be printed is written as ``\\u001b``."""
    if not text.isascii():  # JSON allows only control characters of C1 and above to stand for themselves
        import json

        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        # Other characters are escaped that the stream does not have, or that a terminal does not
        # show.
        shown = {char for char in set(text) if printable(char) == char and char.encode(encoding, "ignore")} | {"\n"}
        text = "".join(char if char in shown else json.dumps(char)[1:-1] for char in text)
    _write(text.replace("\x7f", "\\u007f"))


@contextmanager
def said_warnings(lead: str = "") -> Iterator[None]:
    """Say on stderr, after ``lead``, what warns inside, once it is done."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        echo_sentence(f"{lead}warning: {warning.message}", err=True)


def print_json(content: Any) -> None:
    """Write ``content`` (anything msgspec encodes) to stdout as indented JSON."""
    import msgspec

    echo_json(msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n")


def rounded(value: float, digits: int = 3) -> float:
    """Round µs to the nanosecond, for JSON: more digits would only pretend."""
    return round(value, digits)


def record(row: Any, *names: str) -> dict[str, Any]:
    """Fields of ``row`` for JSON: times to the nanosecond, other fractions to six digits. A field
    ``num_calls`` is ``calls``."""
    values = {name.removeprefix("num_"): getattr(row, name) for name in names}
    return {
        name: rounded(value, 3 if name.endswith("_us") else 6) if isinstance(value, float) else value
        for name, value in values.items()
    }


def _is_width_known() -> bool:
    """Whether stdout is a terminal, or somebody said how wide what shows it is."""
    return sys.stdout.isatty() or "COLUMNS" in os.environ


def _console() -> Console:
    """Return rich's console on the present stdout. In a pipe it is wide, so that no cell is cut where nobody can widen it."""
    from rich.console import Console

    width = None if _is_width_known() else _PIPE_WIDTH
    return Console(width=width, highlight=False, emoji=False, markup=False)


def cell_text(text: str, style: str = "") -> Text:
    """Make ``text`` fit for a cell: on one line, no markup, nothing that a terminal obeys."""
    from rich.text import Text

    return Text(printable(text, keep=""), style=style)


def print_grid(grid: Table) -> None:
    """Print a table of rich's, whose cells are of :func:`cell_text`."""
    _print(_console(), grid)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    bold: Sequence[int] = (),
    dim: Sequence[int] = (),
    spare: Sequence[int] = (),
) -> None:
    """Print one table. One that is too wide for the terminal without its spare columns is folded: each row has lines of its own.
    In a pipe it is as wide as it is: a number cut short is another.

    Args:
        columns: the headers. One that begins with ">" stands above a right-aligned column (without the ">"); one that
            begins with "~" above a column whose text wraps, and takes the width that is left.
        rows: the cells, as text. Nothing in them is markup.
        title: a line above.
        bold, dim: indices of rows to set so.
        spare: indices of columns to leave out, the first ones first, where a row would not fit into one line of the terminal;
            a line below says which.
    """
    out, cells, left_out = _console(), [list(row) for row in rows], list[int]()
    for column in spare:
        if _needed_width(columns, cells, left_out, _EASY_WRAPPED) <= out.width:
            break
        left_out.append(column)
    if title:
        echo_sentence(lead=title)
    needed = _needed_width(columns, cells, left_out, _LEAST_WRAPPED)
    if needed > out.width and _is_width_known():
        # Each row as its first cell, or its number and the next one, and below that the others
        # with their names.
        names = [column.lstrip(">~") for column in columns]
        num_heads = 1 + (names[0] in ("", "#"))
        for row in cells:
            echo_sentence(lead=" ".join(filter(None, row[:num_heads])) or names[0])
            others = [f"{name} {cell}".strip() for name, cell in zip(names, row, strict=True) if cell][num_heads:]
            if others:
                echo_sentence(f"  {', '.join(others)}")
        heads = " and ".join(filter(None, names[:num_heads]))
        about = f", the first its {heads}" if heads else ""
        echo_sentence(f"each row has lines of its own{about}, as there are {out.width} columns")
        return
    terminal, out.width = out.width, max(out.width, needed)
    _print(out, _table(columns, cells, bold, dim, left_out))
    if left_out:
        omitted = ", ".join(columns[column].lstrip(">~") for column in sorted(left_out))
        echo_sentence(f"left out, as there are {terminal} columns: {omitted}")


def _needed_width(columns: Sequence[str], rows: Sequence[Sequence[str]], left_out: Sequence[int], wrapped: int) -> int:
    """How wide a table is whose text that wraps has ``wrapped`` columns at most; all else is whole."""
    out = _console()
    table = _table(columns, rows, (), (), left_out)
    for column in table.columns:
        column.max_width = None if column.no_wrap else wrapped
    return table.__rich_measure__(out, out.options.update(max_width=1 << 14)).maximum


def _table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    bold: Sequence[int],
    dim: Sequence[int],
    left_out: Sequence[int],
) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    shown = [index for index in range(len(columns)) if index not in left_out]
    for column in (columns[index] for index in shown):
        table.add_column(
            cell_text(column.lstrip(">~")),
            justify="right" if column.startswith(">") else "left",
            no_wrap=not column.startswith("~"),
            overflow="fold",
        )
    for number, row in enumerate(rows):
        style = "bold" if number in bold else "dim" if number in dim else None
        table.add_row(*(cell_text(row[index]) for index in shown), style=style)
    return table
