"""Who failed: turns a broken wait into an error that names the rank that died, also on ranks that never spoke to it.

A rank that dies is seen at once only by those who wait for it; the others wait for *those*, and would blame the wrong
rank. So the first to see a failure writes it to the group's store before it raises, closes its connections (which wakes
whoever waits for it), and the next ones read the store first.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from commlayer.profiles.errors import ClusterError, CollectiveTimeoutError, PeerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed has it too, but not for type checkers

__all__ = ["Failure", "FailureBoard", "Wait"]


@dataclass(frozen=True, slots=True)
class Wait:
    """What a rank was waiting for when it failed; all of it goes into the message."""

    rank: int
    peers: tuple[int, ...]
    group: str
    collective: str
    plan: str
    step: str
    chunk: int
    sequence: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank}, group {self.group}, collective {self.collective} #{self.sequence}, plan {self.plan}, "
            f"step {self.step} of chunk {self.chunk}, waiting for {self.awaited}"
        )

    @property
    def awaited(self) -> str:
        """The rank, or the ranks one of which has failed (a collective call of the backend does not say which)."""
        ranks = ", ".join(map(str, self.peers))
        return f"rank {ranks}" if len(self.peers) == 1 else f"one of ranks {ranks}"


@dataclass(frozen=True, slots=True)
class Failure:
    """How the wait ended: what the backend raised, after how long, and how long it was allowed to take, seconds."""

    cause: BaseException
    waited_s: float
    timeout_s: float

    @property
    def is_timeout(self) -> bool:
        return self.waited_s >= self.timeout_s or "timed out" in str(self.cause).lower()


class FailureBoard:
    """The place where ranks of one Communicator write and read who failed first."""

    def __init__(self, store: Store, key: str, rank: int) -> None:
        self._store = store
        self._key = key
        self._rank = rank

    def explain(self, wait: Wait, failure: Failure) -> ClusterError:
        """The error to raise for a broken wait. Never raises itself; reports to the others what this rank saw."""
        known = self._read(settle_s=0.2)
        if isinstance(known, dict) and known["culprit"] != self._rank:
            return PeerError(
                f"rank {known['culprit']} {known['what']} (seen by rank {known['seen_by']}); here: {wait}. "
                f"This Communicator cannot be used any more: look at the log of rank {known['culprit']}, restart the job"
            )
        what = (
            f"did not answer within {failure.timeout_s:g} s" if failure.is_timeout else "died or closed its connection"
        )
        if known is None and len(wait.peers) == 1:
            self._write({"culprit": wait.peers[0], "what": what, "seen_by": self._rank})
        note = (
            ""
            if known != "gone"
            else " The store cannot be reached either: perhaps the rank that hosts it (rank 0) is gone."
        )
        text = f"{wait.awaited} {what}; here: {wait}.{note} Look at the log of {wait.awaited}, then restart the job"
        return CollectiveTimeoutError(text) if failure.is_timeout else PeerError(text)

    def _read(self, settle_s: float) -> dict[str, object] | str | None:
        """What is written: a report, None, or "gone" when the store does not answer.

        A short wait lets the rank next to the dead one write first.
        """
        until = time.monotonic() + settle_s
        try:
            while True:
                if self._store.check([self._key]):
                    report: dict[str, object] = json.loads(self._store.get(self._key))
                    return report
                if time.monotonic() > until:
                    return None
                time.sleep(0.02)
        except Exception:  # noqa: BLE001  any failure of the store means the same here, and the first error matters more
            return "gone"

    def _write(self, report: dict[str, object]) -> None:
        try:
            self._store.compare_set(self._key, "", json.dumps(report))
        except Exception:  # noqa: BLE001  see _read
            return
