"""Progress of long work, on stderr, by the one process that prints. Silent where stderr is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic

from commlayer.cli.place import is_first
from commlayer.profiles.printable import printable

__all__ = ["progress", "progress_of"]


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that advances the bar by one and shows what was just done."""
    with _bar(title, total, says_done=True) as update:
        yield lambda done: update(advance=1, done=printable(done, keep=""))


@contextmanager
def progress_of(title: str) -> Iterator[Callable[[float, int], None]]:
    """Yield a function that is told how much is done and of how much, as often as it likes."""
    shown = 0.0
    with _bar(title, None, says_done=False) as update:

        def show(done: float, total: int) -> None:
            nonlocal shown
            now = monotonic()
            if now - shown >= _UPDATES_S or done >= total:
                shown = now
                update(completed=done, total=total, refresh=True)

        yield show


_UPDATES_S = 0.1


@contextmanager
def _bar(title: str, total: int | None, *, says_done: bool) -> Iterator[Callable[..., None]]:
    """A function that changes the bar as rich's ``Progress.update`` does; one that does nothing where no bar is shown.

    It is drawn at once, and its clock runs whatever the caller says. ``says_done``: behind the bar stands what was just done.
    """
    if not is_first() or not sys.stderr.isatty():
        yield lambda **_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    if says_done:
        columns.append(TextColumn("{task.fields[done]}", markup=False))
    with Progress(*columns, console=Console(stderr=True), auto_refresh=True) as bar:
        yield partial(bar.update, bar.add_task(title, total=total, done=""))
