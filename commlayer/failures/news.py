"""The word on the terminal that a rank has failed, printed when it is heard of.

The error that names the rank is raised by a call, some tens of milliseconds later, and printed when
the program ends. Launchers are often quicker: torchrun looks ten times a second whether a rank has
ended, and then sends SIGTERM to the others, which ends them with what they knew
(:mod:`commlayer.failures.last_words`).
"""

from __future__ import annotations

import contextlib
import threading

from commlayer.failures.failure_records import Absent, Gone, Left, Record
from commlayer.failures.knowledge import blame_of
from commlayer.profiles.printable import say

__all__ = ["FailureNews"]


class FailureNews:
    """The failures that the rank ``rank`` says it has heard of: the first one, and before that a
    first consequence of another."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._has_told_consequence = False
        self.has_heard = False
        """Whether it is known who has failed first."""
        self._printed = threading.Event()

    def observe(self, record: Record) -> None:
        """Print who has failed where ``record`` says so of another rank: whoever started the ranks
        may end this one before a call raises it."""
        if isinstance(record, Absent) and record.seen_by == self._rank:
            self.has_heard = True  # its own error says it
            return
        if not isinstance(record, (Gone, Left, Absent)):
            return
        is_other = isinstance(record, Absent) or record.rank != self._rank
        if is_other and not (isinstance(record, Left) and not record.is_failure):
            verdict = blame_of(record)
            is_consequence = isinstance(record, Left) and record.is_consequence
            self.heard(verdict.culprit, verdict.fate(self._rank), is_consequence=is_consequence)

    def heard(self, who: str, what: str, *, is_consequence: bool = False) -> None:
        """Print that ``who`` ("rank 3") has failed, "died: …" or "left with …", if that is news.

        Never waits: who reads may be slow. ``is_consequence``: of another rank's failure, which may
        be heard of later.
        """
        if self.has_heard or (is_consequence and self._has_told_consequence):
            return
        self._has_told_consequence = True
        self.has_heard = not is_consequence
        text = f"rank {self._rank}: {who} {what}. Look at the log of {who}"
        thread = threading.Thread(target=self._print, args=(text,), name="commlayer-news", daemon=True)
        with contextlib.suppress(RuntimeError):  # as many threads as may be, or the interpreter is ending
            thread.start()

    def await_printed(self, seconds: float) -> None:
        """Return when it has been printed who has failed first, or after ``seconds``."""
        self._printed.wait(seconds)

    def _print(self, text: str) -> None:
        say(text, keep="\n")
        if self.has_heard:
            self._printed.set()
