"""Waits of a group outside of its calls: that all its ranks come to make it. In the ring as calls of a track of their own.

Making a group is a call of all its members: it ends when each of them has made it. So the graph of who waits for whom needs no
other notion, and ranks of which one makes a group while the other is in a call form a circle as any two. Its track is not the
group's own: programs count the group's calls from 1.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from commlayer.calls.ring import Track, open_track
from commlayer.profiles.counted import listed
from commlayer.profiles.errors import CollectiveTimeoutError, PeerError

__all__ = ["INNER_NAME", "LIFE_KEY", "making_group", "stage"]

LIFE_KEY = "/life"
"""The end of the key of such a track."""
INNER_NAME = "inside commlayer"
"""The name, or the description, of every group inside of one of ours, by which torch's recorder notes the calls that go to it."""

_MOST_LISTED = 16


class _Makings(threading.local):
    """The tracks of what this thread makes, the innermost last."""

    def __init__(self) -> None:
        self.tracks: list[Track] = []


_makings = _Makings()


@contextmanager
def making_group(
    ring: int, kind: str, key: str, name: str, ranks: Sequence[int], numbering: str = ""
) -> Iterator[None]:
    """Inside, this rank makes a group with ``ranks`` (global), as the program asked for by ``kind``: "new_group".

    ``ring``: how many calls the ring keeps; ``key``: the group's alone in the job; ``name``: for people; ``numbering``: see
    :class:`commlayer.calls.ring.Track`.
    """
    described = f"{name} ({listed('rank', ranks, _MOST_LISTED)})"
    track = open_track(ring, f"{key}{LIFE_KEY}", name, ranks, lambda: described, str, numbering)
    call = track.note(kind, None, -1, -1, None, False)
    _makings.tracks.append(track)
    try:
        yield
    except (
        CollectiveTimeoutError,
        PeerError,
    ):  # stays in the ring: who asks a moment later is to see what it waited for
        track.is_broken = _over
        raise
    except BaseException:  # it does not wait for others any more
        track.take_back(call)
        raise
    finally:
        _makings.tracks.remove(track)
    track.done = call.number


def _over() -> bool:
    return True


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Inside, what this thread makes a group for is at this stage: "to connect for messages". Elsewhere it says nothing."""
    track = _makings.tracks[-1] if _makings.tracks else None
    if track is None:
        yield
        return
    before, track.stage = track.stage, what
    try:
        yield
    finally:
        track.stage = before
