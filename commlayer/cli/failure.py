"""Errors of ours on their way out of a program: one message and an exit status instead of a traceback."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import click

from commlayer.cli.tables import echo
from commlayer.profiles.errors import InternalError, UsageError

__all__ = ["CommandFailure", "as_typed", "exit_code", "wants_traceback", "without_field"]

_NAMED = re.compile(r"(?:[A-Z]\w*\.)?([a-z]\w*)(?=(?: [\w+.\-]+)?: )")
"""A field, or a field and its value, before a colon: how errors begin that say which of several is wrong."""


class CommandFailure(click.ClickException):
    """A failure of the command: ``message``, with ``exit_code`` as the program's status."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click documents it as settable

    def show(self, file: Any = None) -> None:
        echo(f" {self.format_message()}", lead="error:", colour="red", file=file, err=file is None)


def exit_code(error: Exception) -> int:
    """Return the exit status. 2: wrong usage or a bad file; 3: a bug of ours; 1: the surroundings failed."""
    if isinstance(error, UsageError):
        return 2
    return 3 if isinstance(error, InternalError) else 1


def as_typed(message: str, command: click.Command | None) -> str:
    """The message of an error, with the option that was typed in place of the field that it begins with: whoever typed
    --capacity-factor has never seen capacity_factor, or Policy.capacity_factor."""
    found = _NAMED.match(message)
    option = dict(_options(command)).get(found[1]) if found and command is not None else None
    return message if found is None or option is None else option + message[found.end() :]


def without_field(error: Exception) -> str:
    """The message of an error without the field that it begins with, for who puts the option before it."""
    message = str(error)
    found = _NAMED.match(message)
    return message if found is None else message[found.end() :].removeprefix(": ")


def _options(command: click.Command) -> Iterator[tuple[str, str]]:
    """The fields that options of ``command`` and of its subcommands set, with their names on the command line."""
    for each in command.commands.values() if isinstance(command, click.Group) else ():
        yield from _options(each)
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            option = max(parameter.opts, key=len)
            yield option.removeprefix("--").replace("-", "_"), option
            yield str(parameter.name), option


def wants_traceback(ctx: click.Context) -> bool:
    """Tell whether the user asked for a traceback, by ``--traceback`` or ``COMMLAYER_DEBUG=detail``."""
    return bool(ctx.params.get("traceback")) or os.environ.get("COMMLAYER_DEBUG") == "detail"
