"""Calls that a thread of this rank has waited in for long, of which somebody is told before any
timeout passes.

The failure detector's thread looks at the ring about once a second. Of the ranks that wait in one
call, the first in the group's order asks all ranks and prints one line: each begins to look a
moment after the one before it, and the first that asks marks the call in the job's store.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from time import monotonic
from time import perf_counter_ns as now
from typing import NamedTuple

from commlayer.calls.ring import ANY, MESSAGES, Track, opened_tracks, recorded_calls, waiting_threads

__all__ = ["LongWait", "LongWaits", "waits_of_this_rank"]

_LOOK_S = 1.0
_LOOKS = 4
"""How often a wait is looked at, at least, before it is a long one."""
_NEXT_RANK_S = 0.02
_LAST_RANK_S = 2.0
_COVERED_S = 10.0
"""After a question to all ranks the next one waits for so long: the first has perhaps told of this
wait too."""


class LongWait(NamedTuple):
    """A thread's wait in a call. ``key``: of its group; ``place``: of this rank in the group;
    ``since_ns``: when it began, by ``perf_counter_ns``; ``peer``, ``tag``: of a message."""

    key: str
    place: int
    kind: str
    number: int
    since_ns: int
    peer: int = ANY
    tag: int = 0

    @property
    def claim(self) -> str:
        """The call's name in the job: the same on all ranks that wait in it."""
        if self.kind in MESSAGES:
            return f"{self.key}/{self.kind}/{self.place}/{self.peer}/{self.tag}/{self.number}"
        return f"{self.key}/{self.number}"


def waits_of_this_rank(rank: int, numbering: str = "") -> list[LongWait]:
    """List what threads of this process wait in now: synchronous calls, and waits for earlier ones.

    This process is ``rank`` in the ``numbering`` of some groups (see
    :class:`commlayer.calls.ring.Track`): those of others, in which it has another number, are left
    out.
    """

    def is_of_it(track: Track) -> bool:
        return track.numbering == numbering and rank in track.ranks and not track.is_broken()

    waits = []
    open_tracks = [track for track in opened_tracks() if is_of_it(track)]
    if any(track.issued > track.done for track in open_tracks):
        busy = set(open_tracks)
        for call in recorded_calls():
            track = call.track
            if track in busy and not call.is_message and not call.is_async and call.number > track.done:
                place = track.ranks.index(rank)
                waits.append(LongWait(track.key, place, call.collective, call.number, call.issued_ns))
    for wait in waiting_threads().values():
        track = wait.track
        done = track.settled.get((wait.kind, wait.peer, wait.tag), 0) if wait.kind in MESSAGES else track.done
        if is_of_it(track) and wait.number > done:
            place = track.ranks.index(rank)
            waits.append(LongWait(track.key, place, wait.kind, wait.number, wait.since_ns, wait.peer, wait.tag))
    return waits


class LongWaits:
    """Looks for waits of ``rank`` (of this ``numbering``) that are longer than ``limit_s``, and
    tells ``say`` of each, once.

    ``answered_s``: when all ranks were asked last, by ``time.monotonic``.
    """

    def __init__(
        self,
        rank: int,
        limit_s: float,
        say: Callable[[LongWait], None],
        answered_s: Callable[[], float],
        numbering: str = "",
    ) -> None:
        self.rank, self.numbering, self.limit_s = rank, numbering, limit_s
        self._say, self._answered_s = weakref.WeakMethod(say), weakref.WeakMethod(answered_s)
        self._told: set[str] = set()

    def look(self) -> float:
        """Tell of the waits that are long by now; return after how many seconds to look again."""
        look_s = min(_LOOK_S, self.limit_s / _LOOKS)
        say, answered_s = self._say(), self._answered_s()
        if say is None or answered_s is None:
            return _LOOK_S
        waits = waits_of_this_rank(self.rank, self.numbering)
        self._told &= {wait.claim for wait in waits}
        again_s = look_s
        for wait in waits:
            # Others look up to ``look_s`` later: from then on, one after the other.
            due_s = self.limit_s + look_s + min(wait.place * _NEXT_RANK_S, _LAST_RANK_S)
            left_s = due_s - (now() - wait.since_ns) / 1e9
            if left_s > 0:
                again_s = min(again_s, left_s)
            elif wait.claim not in self._told and monotonic() - answered_s() > _COVERED_S:
                self._told.add(wait.claim)
                say(wait)
        return again_s
