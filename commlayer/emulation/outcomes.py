"""Outcomes of the ranks of one run, and the errors that report them."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commlayer.profiles.counted import counted
from commlayer.profiles.errors import RankFailedError

__all__ = ["RankFailure", "RankOutcome", "RanksFailedError", "RanksTimedOutError", "exit_status"]


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank."""

    rank: int
    node: int
    exitcode: int | None
    """Exit status, None if a signal ended the rank."""
    signal: int | None
    """The signal that ended the rank, None if it exited."""
    exception: BaseException | None
    """The exception that the rank's function raised; None if nothing, or if it cannot be pickled (the traceback is
    there anyway).
    """
    traceback: str
    """The rank's own traceback as text, or what is known instead of one."""
    reason: str
    """One line, such as ``raised ValueError: …``, ``exited with code 3``, ``killed by signal 9 (SIGKILL)``."""
    by_cluster: bool = False
    """True if the cluster killed the rank, because another had failed or the time was up."""

    def describe(self) -> str:
        """Describe the failure with rank, node and traceback, several lines."""
        return _describe([self])


@dataclass(frozen=True)
class RankOutcome:
    """The outcome of one rank: a value or a failure."""

    rank: int
    node: int
    value: Any
    """The value that the function returned; None if the rank failed."""
    failure: RankFailure | None

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.failure is None


class RanksFailedError(RankFailedError):
    """The error of a run in which ranks failed; ``failures`` in the order of time, the first one is the cause.

    Attributes:
        failures: one `RankFailure` for each failed rank, the first to fail first.
        results: what the ranks that finished returned, by rank; None where a rank failed.
    """

    def __init__(self, message: str, failures: Sequence[RankFailure], results: Sequence[Any]) -> None:
        super().__init__(message)
        self.failures = list(failures)
        self.results = list(results)


class RanksTimedOutError(RanksFailedError, TimeoutError):
    """The error of a run whose ranks were still running when the time was up; all were killed."""


def signal_name(number: int) -> str:
    """Name a signal, such as ``9 (SIGKILL)``."""
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:
        return str(number)


def exit_status(failures: Sequence[RankFailure]) -> int:
    """The status of a run: that of the first process that failed, 128 + n if signal n ended it, 0 if none failed."""
    if not failures:
        return 0
    return failures[0].exitcode or 128 + (failures[0].signal or 0)


def _describe(failures: Sequence[RankFailure]) -> str:
    """Every failure, in order; those that tell the same story in one paragraph with the first of them."""
    groups: dict[tuple[str, str], list[RankFailure]] = {}
    for failure in failures:
        story = re.sub(r"(?i)thread 0x[0-9a-f]+", "thread", failure.traceback.rstrip())
        groups.setdefault((failure.reason, story), []).append(failure)
    lines: list[str] = []
    for (reason, story), members in groups.items():
        names = ", ".join(f"rank {failure.rank} (node {failure.node})" for failure in members)
        lines += [f"{names}: {reason}", *(f"    {line}" for line in story.splitlines())]
    return "\n".join(lines)


def failed_error(outcomes: Sequence[RankOutcome], failures: Sequence[RankFailure]) -> RanksFailedError:
    """Make the error of a run in which ranks failed; chained to the first rank's own exception."""
    head = f"{len(failures)} of {counted(len(outcomes), 'rank')} failed, first rank {failures[0].rank}"
    message = f"{head}:\n{_describe(failures)}"
    error = RanksFailedError(message, failures, [outcome.value for outcome in outcomes])
    error.__cause__ = failures[0].exception
    return error


def timed_out_error(
    outcomes: Sequence[RankOutcome], failures: Sequence[RankFailure], running: Sequence[int], timeout_s: float
) -> RanksTimedOutError:
    """Make the error of a run that was not done in time; it names the ranks that were running and where they hung."""
    names = ", ".join(str(rank) for rank in running)
    head = (
        f"{len(running)} of {counted(len(outcomes), 'rank')} still ran after {timeout_s:g} s and were killed: rank {names} "
        "(a larger timeout_s= gives them longer)"
    )
    message = f"{head}:\n{_describe(failures)}"
    return RanksTimedOutError(message, failures, [outcome.value for outcome in outcomes])
