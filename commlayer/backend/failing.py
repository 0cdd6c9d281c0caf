"""Errors of the inner backends' calls, as they are raised: who, where, what, and who failed first."""

from __future__ import annotations

from time import perf_counter_ns as now
from typing import Any, NoReturn

from commlayer.backend.inner import InnerGroups
from commlayer.backend.members import Members
from commlayer.profiles.errors import ClusterError, CollectiveTimeoutError, PeerError

__all__ = ["Refused", "fail", "message_error", "timeout_of"]

_REFUSAL = "Cannot use ReduceOp"
"""How Gloo, when it is waited for, begins to say that it has not an operation for a dtype. It has sent nothing then."""


class Refused(Exception):
    """The inner backend has not this operation. The verb then goes the long way, which has, or says why not."""


def timeout_of(opts: Any) -> float | None:
    """The timeout that a call asks for, seconds; None: the group's."""
    seconds: float = opts.timeout.total_seconds()
    return seconds if seconds >= 0 else None


def fail(
    members: Members,
    inner: InnerGroups,
    error: RuntimeError,
    collective: str,
    sequence: int,
    started: int,
    timeout_s: float | None,
) -> NoReturn:
    """A wait for a collective broke: tell the other ranks, and raise what it means. ``timeout_s`` None: the group's.

    Raises Refused, PeerError, CollectiveTimeoutError, ClusterError.
    """
    if _REFUSAL in str(error):
        raise Refused(str(error)) from error
    waited_s = (now() - started) / 1e9
    limit_s = inner.timeout.total_seconds() if timeout_s is None else timeout_s
    explained = inner.planned.explain(error, collective, sequence, waited_s, limit_s)
    # What the inner backend said stays in the text: programs look for "Timed out" or "Connection closed".
    kind = type(explained) if isinstance(explained, ClusterError) else ClusterError
    raise kind(f"{members.who}, {collective} #{sequence}: {explained}. Gloo's own message: {error}") from error


def message_error(
    members: Members, inner: InnerGroups, error: RuntimeError, what: str
) -> PeerError | CollectiveTimeoutError:
    """The error to raise for a message that failed with ``error``."""
    text = str(error)
    if "timed out" in text.lower() or "timeout" in text.lower():
        return CollectiveTimeoutError(
            f"{members.who}: {what}: did not happen in time: did the other side make its call, with this tag? Gloo's own "
            f"message: {text}"
        )
    culprit = inner.planned.board.culprit() or "the peer died or closed its connection"
    return PeerError(f"{members.who}: {what}: {culprit}: look at its log. Gloo's own message: {text}")
