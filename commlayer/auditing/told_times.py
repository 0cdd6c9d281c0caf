"""The times of their latest calls, as the ranks of a group tell them each other, and compared call
by call.

Of the times of one call the shortest is that of the rank that came last, and waited for nobody:
that one can be held against what was promised.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from commlayer.auditing.ledger import Ledger, Sample
from commlayer.peer_words import read_times

__all__ = ["TELL_EVERY", "ComparedCall", "ToldTimes"]

TELL_EVERY = 4
"""After how many calls a rank tells what they took; or sooner, when it is looked at."""
_MOST_TELLERS = 64
"""How many ranks of a group tell, evenly spread: the first one reads them all."""


class ComparedCall(NamedTuple):
    """A call whose times were compared. ``last``: the member that came last; ``last_us``: that
    one's time; ``waited_us``: for how long the others waited for it."""

    sample: Sample
    last: int
    last_us: float
    waited_us: float


class ToldTimes:
    """The times that member ``member`` of a group of ``size`` tells, in the group's store, and
    those that it reads there.

    ``store``: a client of it that nobody else in this process waits on. On the thread of the watch.
    """

    def __init__(self, store: Callable[[], Any], ledger: Ledger, member: int, size: int) -> None:
        self._store, self._ledger, self._member = store, ledger, member
        every = -(-size // _MOST_TELLERS)
        self._others = list(range(every, size, every))
        self._is_telling = member % every == 0
        self._told = self._compared = 0
        self._have_all_told = False
        ledger.told_from = TELL_EVERY

    def tell(self) -> bool:
        """Tell what the latest calls took. Returns whether there were any since the last time."""
        ledger = self._ledger
        if ledger.numbered == self._told:
            return False
        if self._is_telling:
            self._store().set(f"times/{self._member}", _window_of(ledger.samples).tobytes())
        self._told = ledger.numbered
        ledger.told_from = self._told + TELL_EVERY
        return True

    def forget(self) -> None:
        """Compare none of the calls that there were until now."""
        self._compared = self._ledger.numbered

    def compare(self) -> Iterator[ComparedCall]:
        """Compare the calls of which all ranks have told by now, each once; none while a rank has
        told nothing yet."""
        keys = [f"times/{member}" for member in self._others]
        self._have_all_told = self._have_all_told or self._store().check(keys)
        if not self._have_all_told:
            return
        windows = {0: _window_of(self._ledger.samples)}
        for member, data in zip(self._others, self._store().multi_get(keys), strict=True):
            windows[member] = read_times(bytes(data), f"rank {member} of the group")
        for sample in self._ledger.samples:
            if sample.number <= self._compared:
                continue
            behind = {member: int(window[0]) - sample.number for member, window in windows.items()}
            if min(behind.values()) < 0:  # a rank has not told of it yet
                continue
            known = {  # but by those who have forgotten it
                member: window[-1 - behind[member]]
                for member, window in windows.items()
                if behind[member] < len(window) - 1 and window[-1 - behind[member]]
            }
            if not known:
                continue
            self._compared = sample.number
            last = min(known, key=known.__getitem__)
            yield ComparedCall(sample, last, known[last], median(known.values()) - known[last])


def _window_of(samples: Sequence[Sample]) -> array[float]:
    """The number of the latest call, and the times of those up to it, µs: what ranks tell each
    other."""
    return array("d", [samples[-1].number if samples else 0, *(each.measured_us for each in samples)])
