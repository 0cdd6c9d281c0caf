"""Errors of ours on their way out of a program: one message and an exit status instead of a traceback."""

from __future__ import annotations

import os
from typing import Any

import click

from commlayer.cli.tables import echo
from commlayer.profiles.errors import InternalError, UsageError

__all__ = ["CommandFailure", "exit_code", "wants_traceback"]


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


def wants_traceback(ctx: click.Context) -> bool:
    """Tell whether the user asked for a traceback, by ``--traceback`` or ``COMMLAYER_DEBUG=detail``."""
    return bool(ctx.params.get("traceback")) or os.environ.get("COMMLAYER_DEBUG") == "detail"
