"""Types of command line values that several commands take."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import click
from click.shell_completion import CompletionItem

from commlayer.cli.failure import without_field
from commlayer.profiles.errors import UsageError
from commlayer.profiles.printable import shortened
from commlayer.profiles.topology import Topology
from commlayer.units import parse_bytes

__all__ = [
    "BYTES",
    "COUNT",
    "DELAY_US",
    "DURATION_US",
    "NODE_RATE",
    "NUM_GPUS",
    "OUTPUT_FILE",
    "OUTPUT_FOLDER",
    "PAGE",
    "PAIR_RATE",
    "PICTURE",
    "PLACE",
    "POSITIVE",
    "PROFILE",
    "RATE_GBPS",
    "REPORT",
    "SHAPE",
    "STEP_FACTOR",
    "TIMEOUT_US",
    "TOKENS",
    "NameOr",
    "PairRate",
    "Parsed",
    "RealNumber",
    "WholeNumber",
    "given_options",
    "headings",
    "in_order",
    "json_option",
    "report_option",
    "size_options",
]

Command = TypeVar("Command", bound=Callable[..., Any])
_MOST = 10**9
_DURATION = re.compile(r"\s*(\d*\.?\d+)\s*(us|µs|ms|s|m|min|h)\s*", re.IGNORECASE)
_DURATION_US = {"us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6, "m": 6e7, "min": 6e7, "h": 3.6e9}


_TOKENS = re.compile(r"(\d{1,12})([KM])", re.ASCII | re.IGNORECASE)
_TOKEN_SHIFTS = {"K": 10, "M": 20}


class WholeNumber(click.IntRange):
    """A whole number in a range, and never more than what anything here could have so many of."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = int(super().convert(value, param, ctx))
        if number > _MOST:
            self.fail(f"{shortened(str(value))} is more than {_MOST:,}", param, ctx)
        return number


class _TokenCount(WholeNumber):
    """A number of tokens, such as 4096, 128K or 1M: K is 1,024 and M 1,024 K."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = _TOKENS.fullmatch(value.strip()) if isinstance(value, str) else None
        if match:
            value = int(match[1]) << _TOKEN_SHIFTS[match[2].upper()]
        return super().convert(value, param, ctx)


class RealNumber(click.FloatRange):
    """A number in a range. What Python calls nan and inf are none: each compares as if it were in
    every range, or in one without an end."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"expected a number, got {value!r}", param, ctx)
        return number


class Parsed(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.2
    """A text that ``parse`` reads, which raises UsageError for one that cannot be.

    ``metavar``: what ``--help`` shows for it; None: the type's name.
    """

    def __init__(self, name: str, parse: Callable[[str], Any], metavar: str | None = None) -> None:
        self.name, self._parse, self._metavar = name, parse, metavar

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value  # a default, which is of the right type
        try:
            return self._parse(value)
        except UsageError as error:
            self.fail(without_field(error), param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str | None:
        return self._metavar


def _duration(text: str, most: str = "1000h", *, may_be_none: bool = True) -> float:
    """Read a time such as 100us, in µs. The unit must be there: 100 alone has meant everything
    already."""
    time_us = _as_us(text)
    if time_us is None:
        raise UsageError(f"expected a time with its unit, got {text!r}: for example 100us, 5ms, 30s or 2m")
    if time_us == 0 and not may_be_none:
        raise UsageError(f"expected a time above zero, got {text!r}")
    if time_us > (_as_us(most) or 0.0):
        raise UsageError(f"expected at most {most}, got {shortened(text)!r}")
    return time_us


def _as_us(text: str) -> float | None:
    """A time such as 100us in µs; None: it is none."""
    match = _DURATION.fullmatch(text)
    return None if match is None else float(match[1]) * _DURATION_US[match[2].lower()]


_PAIR_RATE = re.compile(r"([0-9]+)([,>])([0-9]+)[=:](.+)", re.ASCII)


class PairRate(NamedTuple):
    """The rate between two nodes, or from the first to the second one only."""

    sender: int
    receiver: int
    rate: str
    is_one_way: bool

    def __str__(self) -> str:
        return f"{self.sender}{'>' if self.is_one_way else ','}{self.receiver}={self.rate}"


def _node_rate(text: str) -> tuple[int, str]:
    """Read a node and the rate of its network interface, such as 3:100mbit."""
    node, colon, rate = text.partition(":")
    if not (node.isascii() and node.isdigit() and colon and rate):
        raise UsageError(f"expected a node's number and its rate, such as 3:100mbit, got {text!r}")
    return int(node), rate


def _pair_rate(text: str) -> PairRate:
    """Read two nodes and the rate between them, such as 0,1=100mbit; 0>1=100mbit one way."""
    match = _PAIR_RATE.fullmatch(text)
    if match is None:
        raise UsageError(
            f"expected two nodes and the rate between them, such as 0,1=100mbit, or 0>1=100mbit one way, got {text!r}"
        )
    return PairRate(int(match[1]), int(match[3]), match[4], match[2] == ">")


def _shape(text: str) -> str:
    """Check how many ranks each node has, such as 2x4 or 3+4; it stays as it was written."""
    Topology.parse(text)
    return text


class NameOr(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.2
    """A known name, or ``other``: a PATH, or a SHAPE of a group of ranks such as 2x2.

    Only completes; who resolves it says what is wrong with a bad one. The names are shown where
    they are few: of a path there may be any number.
    """

    def __init__(self, name: str, other: Literal["PATH", "SHAPE"], known: Callable[[], Iterable[str]]) -> None:
        self.name, self._other, self._known = name, other, known

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "NAME|PATH" if self._other == "PATH" else "|".join([*self._known(), self._other])

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        # Files first: click's bash script empties the list where it turns on the shell's own file
        # completion.
        files = [CompletionItem(incomplete, type="file")] if self._other == "PATH" else []
        return files + [CompletionItem(name) for name in self._known() if name.startswith(incomplete)]


def _profile_names() -> Iterable[str]:
    from commlayer.profiles import catalog

    return catalog.names()


class _Output(click.Path):
    """A file to write, or a folder for files, which is made where there is none.

    Checked when the command starts, as far as its kind tells: a measurement must not be lost to a misspelt folder.
    """

    def __init__(self, kind: Literal["file", "folder", "page", "picture", "report"]) -> None:
        self._kind, self._is_folder = kind, kind == "folder"
        super().__init__(path_type=Path, dir_okay=self._is_folder, writable=not self._is_folder)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if not str(value):
            self.fail(f"expected the name of a {'folder' if self._is_folder else 'file'}, got none", param, ctx)
        path = Path(str(super().convert(value, param, ctx)))
        try:
            path.exists()  # raises for a name that cannot be one
            if self._kind == "page" and path.suffix.lower() not in (".html", ".htm"):
                raise UsageError(f"expected the name of a page, which ends with .html, got {shortened(path.name)!r}")
            if self._kind in ("picture", "report"):
                from commlayer.drawing.style import check_drawing, check_picture

                check_picture(path) if self._kind == "picture" else check_drawing()
        except OSError as error:
            self.fail(f"{shortened(str(path))}: {error.strerror}", param, ctx)
        except UsageError as error:
            self.fail(str(error), param, ctx)
        folder = path.parent
        if self._is_folder:
            folder = next(each for each in (path, *path.absolute().parents) if os.path.lexists(each))
            if not folder.is_dir():
                self.fail(f"expected a folder, got {str(folder)!r}, which is none: name another", param, ctx)
        elif not folder.is_dir():
            self.fail(f"the folder {str(folder)!r} does not exist: make it first", param, ctx)
        if not os.access(folder, os.W_OK):
            self.fail(f"the folder {str(folder)!r} cannot be written to", param, ctx)
        return path


BYTES = Parsed("size", parse_bytes)
COUNT = WholeNumber(min=1)
DELAY_US = Parsed("duration", partial(_duration, most="10s"))
DURATION_US = Parsed("duration", _duration)
NODE_RATE = Parsed("node and rate", _node_rate)
PAIR_RATE = Parsed("nodes and rate", _pair_rate)
NUM_GPUS = WholeNumber(1, 1 << 20)
OUTPUT_FILE = _Output("file")
OUTPUT_FOLDER = _Output("folder")
PAGE = _Output("page")
PICTURE = _Output("picture")
PLACE = WholeNumber(min=0)
POSITIVE = RealNumber(min=0, min_open=True)
PROFILE = NameOr("profile", "PATH", _profile_names)
RATE_GBPS = RealNumber(min=1e-6, max=1e6)
REPORT = _Output("report")
SHAPE = Parsed("shape", _shape)
STEP_FACTOR = RealNumber(min=1, min_open=True)
TIMEOUT_US = Parsed("duration", partial(_duration, may_be_none=False))
TOKENS = _TokenCount(min=1)


headings: dict[click.Parameter, str] = {}
"""The heading in ``--help`` of parameters that have another than *Options*."""


def in_order(*options: Callable[[Command], Command] | str) -> Callable[[Command], Command]:
    """Several options as one decorator; ``--help`` has them in the order in which they stand, a string as the
    heading of those behind it."""

    def decorate(command: Command) -> Command:
        behind: list[click.Parameter] = []
        for option in reversed(options):
            if isinstance(option, str):
                headings.update((parameter, option) for parameter in behind if parameter not in headings)
                behind = []
                continue
            known = len(vars(command).get("__click_params__", ()))
            command = option(command)
            behind += vars(command)["__click_params__"][known:]
        return command

    return decorate


def given_options(ctx: click.Context) -> set[str]:
    """The names of the parameters that the user gave a value."""
    default = click.core.ParameterSource.DEFAULT
    return {name for name in ctx.params if ctx.get_parameter_source(name) not in (None, default)}


def size_options(smallest: str, largest: str, factor: float) -> Callable[[Command], Command]:
    """The options that say which sizes are measured, by nccl-tests' letters, with these
    defaults."""
    shown: dict[str, Any] = {"show_default": True}
    return in_order(
        click.option("-b", "--min-bytes", type=BYTES, default=smallest, help="Smallest size, a rank.", **shown),
        click.option("-e", "--max-bytes", type=BYTES, default=largest, help="Largest size, a rank.", **shown),
        click.option(
            "-f", "--factor", type=STEP_FACTOR, default=factor, help="Each size over the one before.", **shown
        ),
    )


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
report_option = click.option("--report", type=REPORT, help="Write an HTML page with pictures.")
