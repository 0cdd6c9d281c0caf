"""Types of command line values that several commands take."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
from click.shell_completion import CompletionItem

from commlayer.cli.failure import without_field
from commlayer.profiles.errors import TopologyError, UsageError
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
    "NameOrPath",
    "NameOrShape",
    "PairRate",
    "RealNumber",
    "WholeNumber",
    "given_options",
    "in_order",
    "json_option",
    "report_option",
]

Command = TypeVar("Command", bound=Callable[..., Any])
_MOST = 10**9
_DURATION = re.compile(r"\s*(\d*\.?\d+)\s*(us|µs|ms|s|m|min|h)\s*", re.IGNORECASE)
_DURATION_US = {"us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6, "m": 6e7, "min": 6e7, "h": 3.6e9}


class WholeNumber(click.IntRange):
    """A whole number in a range, and never more than what anything here could have so many of."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = int(super().convert(value, param, ctx))
        if number > _MOST:
            self.fail(f"{shortened(str(value))} is more than {_MOST:,}", param, ctx)
        return number


class RealNumber(click.FloatRange):
    """A number in a range. What Python calls nan and inf are none: each compares as if it were in every range, or in one without
    an end."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"expected a number, got {value!r}", param, ctx)
        return number


class _Bytes(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.2
    """A size such as 16MiB, as an int."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class _Duration(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.2
    """A time such as 100us, as a float of µs. The unit must be given: 100 alone has meant everything already."""

    name = "duration"

    def __init__(self, most: str = "1000h", *, may_be_none: bool = True) -> None:
        self._most, self._may_be_none = most, may_be_none

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        time_us = _as_us(value)
        if time_us is None:
            self.fail(f"expected a time with its unit, got {value!r}: for example 100us, 5ms, 30s or 2m", param, ctx)
        if time_us == 0 and not self._may_be_none:
            self.fail(f"expected a time above zero, got {value!r}", param, ctx)
        if time_us > (_as_us(self._most) or 0.0):
            self.fail(f"expected at most {self._most}, got {shortened(value)!r}", param, ctx)
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


class _NodeRate(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.2
    """A node and the rate of its network interface, such as 3:100mbit."""

    name = "node and rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, str]:
        if isinstance(value, tuple):
            return value
        node, colon, rate = str(value).partition(":")
        if not (node.isascii() and node.isdigit() and colon and rate):
            self.fail(f"expected a node's number and its rate, such as 3:100mbit, got {value!r}", param, ctx)
        return int(node), rate


class _PairRate(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.2
    """Two nodes and the rate between them, such as 0,1=100mbit; 0>1=100mbit one way."""

    name = "nodes and rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> PairRate:
        if isinstance(value, PairRate):
            return value
        match = _PAIR_RATE.fullmatch(str(value))
        if match is None:
            self.fail(
                f"expected two nodes and the rate between them, such as 0,1=100mbit, or 0>1=100mbit one way, got {value!r}",
                param,
                ctx,
            )
        return PairRate(int(match[1]), int(match[3]), match[4], match[2] == ">")


class _Shape(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.2
    """How many ranks each node has, such as 2x4 or 3+4, as it was written."""

    name = "shape"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            Topology.parse(str(value))
        except TopologyError as error:
            self.fail(without_field(error), param, ctx)
        return str(value)


class NameOrPath(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.2
    """A known name or a path. Only completes; who resolves it says what is wrong with a bad one."""

    def __init__(self, name: str, known: Callable[[], Iterable[str]]) -> None:
        self.name = name
        self._known = known

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "NAME|PATH"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        # Files first: click's bash script empties the list where it turns on the shell's own file completion.
        files = [CompletionItem(incomplete, type="file")]
        return files + [CompletionItem(name) for name in self._known() if name.startswith(incomplete)]


class NameOrShape(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.2
    """A known name, or the shape of a group of ranks such as 2x2. Only completes; who resolves it says what is wrong."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self._known = tuple(known)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "|".join([*self._known, "SHAPE"])

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in self._known if name.startswith(incomplete)]


def _profile_names() -> Iterable[str]:
    from commlayer.profiles import catalog

    return catalog.names()


class _OutputFile(click.Path):
    """A file to write. Checked when the command starts: a measurement must not be lost to a misspelt folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if not str(value):
            self.fail("expected the name of a file, got none", param, ctx)
        path = Path(str(super().convert(value, param, ctx)))
        try:
            path.exists()  # raises for a name that cannot be one
        except OSError as error:
            self.fail(f"{shortened(str(path))}: {error.strerror}", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"the folder {str(path.parent)!r} does not exist: make it first", param, ctx)
        if not os.access(path.parent, os.W_OK):
            self.fail(f"the folder {str(path.parent)!r} cannot be written to", param, ctx)
        return path


class _OutputFolder(click.Path):
    """A folder for files, which is made where there is none. Checked when the command starts, as a file is."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if not str(value):
            self.fail("expected the name of a folder, got none", param, ctx)
        path = Path(str(super().convert(value, param, ctx)))
        there = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
        if not there.is_dir():
            self.fail(f"expected a folder, got {str(there)!r}, which is none: name another", param, ctx)
        if not os.access(there, os.W_OK):
            self.fail(f"the folder {str(there)!r} cannot be written to", param, ctx)
        return path


class _Picture(_OutputFile):
    """A picture to write: .svg, .png or .pdf."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        from commlayer.drawing.style import check_picture

        path = super().convert(value, param, ctx)
        try:
            check_picture(path)
        except UsageError as error:
            self.fail(str(error), param, ctx)
        return path


class _Report(_OutputFile):
    """A page with figures to write."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        from commlayer.drawing.style import check_drawing

        try:
            check_drawing()
        except UsageError as error:
            self.fail(str(error), param, ctx)
        return super().convert(value, param, ctx)


BYTES = _Bytes()
COUNT = WholeNumber(min=1)
DELAY_US = _Duration("10s")
DURATION_US = _Duration()
NODE_RATE = _NodeRate()
PAIR_RATE = _PairRate()
NUM_GPUS = WholeNumber(1, 1 << 20)
OUTPUT_FILE = _OutputFile()
OUTPUT_FOLDER = _OutputFolder()
PICTURE = _Picture()
PLACE = WholeNumber(min=0)
POSITIVE = RealNumber(min=0, min_open=True)
PROFILE = NameOrPath("profile", _profile_names)
RATE_GBPS = RealNumber(min=1e-6, max=1e6)
REPORT = _Report()
SHAPE = _Shape()
STEP_FACTOR = RealNumber(min=1, min_open=True)
TIMEOUT_US = _Duration(may_be_none=False)


def in_order(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator; ``--help`` has them in the order in which they stand."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def given_options(ctx: click.Context) -> set[str]:
    """The names of the parameters that the user gave a value."""
    default = click.core.ParameterSource.DEFAULT
    return {name for name in ctx.params if ctx.get_parameter_source(name) not in (None, default)}


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
report_option = click.option("--report", type=REPORT, help="Write an HTML page with pictures.")
