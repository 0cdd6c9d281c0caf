"""Errors of ours on their way out of a program: one message and an exit status instead of a
traceback."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import click

from commlayer.cli.standard_streams import give_up_stdout
from commlayer.cli.tables import echo_sentence
from commlayer.profiles.errors import CommlayerError, InternalError, UsageError
from commlayer.profiles.printable import shortened

__all__ = ["CommandFailure", "as_typed", "failure_of", "fitting", "refuse_damaged", "wants_traceback", "without_field"]

_NAMED = re.compile(r"(?:[A-Z]\w*\.)?([a-z]\w*)(?=(?: [\w+.\-]+)?: )")
"""A field, or a field and its value, before a colon: how errors begin that say which of several is
wrong."""
_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF, errno.EIO)
"""Why writing to stdout fails, of which Python does not say what file it was: a full disk, a closed
descriptor."""
_BUG = "this is a bug of commlayer: please report it with what `commlayer --traceback …` prints"
_MOST_IN_LINE = 2000
"""The most characters of a line of a message: a sentence that names every known model has fewer."""


class CommandFailure(click.ClickException):
    """A failure of the command: ``message``, with ``exit_code`` as the program's status."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click documents it as settable

    def show(self, file: Any = None) -> None:
        echo_sentence(f" {self.format_message()}", lead="error:", colour="red", file=file, err=file is None)


def failure_of(error: Exception, command: click.Command | None) -> CommandFailure:
    """Turn whatever ``command`` has raised into a message and an exit status.

    2: wrong usage, or a file that is not sound; 1: the surroundings failed; 3: a bug of ours, which
    is every error that we have not raised on purpose.
    """
    if isinstance(error, CommlayerError):
        status = 2 if isinstance(error, UsageError) else 3 if isinstance(error, InternalError) else 1
        text = as_typed(str(error), command)
    elif isinstance(error, OSError):
        status, where = 1, error.filename
        if where is None and error.errno in _OUTPUT:
            give_up_stdout()
            where = "output"
        reason = error.strerror or str(error) or type(error).__name__
        text = reason if where is None else f"{where}: {reason}"
    elif isinstance(error, MemoryError):
        status, text = 1, "there is not enough memory for this"
    else:
        status, text = 3, f"{type(error).__name__}: {error}"
    hint = f"\n{_BUG}" if status == 3 else ""
    return CommandFailure(fitting(text) + hint, status)


def refuse_damaged(damaged: Sequence[str]) -> None:
    """End the command, which has printed what sound files say, with the errors of those that are
    not; without any: do nothing."""
    if damaged:
        raise CommandFailure("\n".join(map(fitting, damaged)), 2)


def fitting(message: str) -> str:
    """``message`` with the middle of a line left out that quotes a very long value."""
    return "\n".join(shortened(line, _MOST_IN_LINE) for line in message.split("\n"))


def as_typed(message: str, command: click.Command | None) -> str:
    """The message of an error, with the option that was typed in place of the field that it begins
    with: whoever typed --capacity-factor has never seen capacity_factor, or
    Policy.capacity_factor."""
    match = _NAMED.match(message)
    option = dict(_options(command)).get(match[1]) if match and command is not None else None
    return message if match is None or option is None else option + message[match.end() :]


def without_field(error: Exception) -> str:
    """The message of an error without the field that it begins with, for who puts the option before
    it."""
    message = str(error)
    match = _NAMED.match(message)
    return message if match is None else message[match.end() :].removeprefix(": ")


def _options(command: click.Command) -> Iterator[tuple[str, str]]:
    """The fields that options of ``command`` and of its subcommands set, with their names on the
    command line."""
    for each in command.commands.values() if isinstance(command, click.Group) else ():
        yield from _options(each)
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            option = max(parameter.opts, key=len)
            yield option.removeprefix("--").replace("-", "_"), option
            yield str(parameter.name), option


def wants_traceback(ctx: click.Context) -> bool:
    """Tell whether the user asked for a traceback, by ``--traceback`` or
    ``COMMLAYER_DEBUG=detail``."""
    return bool(ctx.params.get("traceback")) or os.environ.get("COMMLAYER_DEBUG") == "detail"
