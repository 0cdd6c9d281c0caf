"""Progress of long work, on stderr, by the one process that prints. Silent where stderr is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from commlayer.cli.place import is_first
from commlayer.profiles.printable import printable

__all__ = ["progress", "progress_of"]


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that advances the bar by one and shows what was just done."""
    if not is_first() or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[done]}", markup=False), console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total, done="")
        yield lambda done: bar.update(task, advance=1, done=printable(done, keep=""))


_UPDATES_S = 0.1


@contextmanager
def progress_of(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that is told how much is done and of how much, as often as it likes."""
    if not is_first() or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from time import monotonic

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task(title, total=None)
        shown = 0.0

        def update(done: int, total: int) -> None:
            nonlocal shown
            now = monotonic()
            if now - shown < _UPDATES_S and done < total:
                return
            shown = now
            bar.update(task, completed=done, total=total, refresh=True)

        yield update
