"""Departures of a group's calls from what is usual for them: whether they have become slower or
faster, for good. Pure.

Each kind of call (collective, size, plan) has its usual ratio of measured to promised time, which
its first calls teach. Watched is by how much later calls of all kinds depart from theirs. A change
is found when the last six calls all depart to the same side, four of them by a tenth at least and
by more than calls usually scatter. One outlier, or one in two, changes nothing.

Kinds share a link, so their calls are evidence together before any one of them is known well: after
a change of plans all kinds are new, and to wait until each has taught what is usual would take five
calls of every kind. Meanwhile a kind is held against its first calls, or against the price itself.
A change has to be larger then, by more than a price is usually wrong.

Greyhound (Wu et al., "Greyhound: Hunting Fail-Slows in Hybrid-Parallel Training at Scale", USENIX
ATC 2025) finds change points of iteration times by Bayesian online detection, and believes those
that last and exceed 10 %. Here the links are measured before anything follows from a change, so a
short window with robust statistics is enough, and finds it sooner.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from statistics import median

__all__ = ["Departures"]

_LEARNT_FROM = 4
"""How many calls teach what is usual for their kind. The very first one does not: it connects, and
touches memory first."""
_SUSTAINED = 6
"""How many calls in turn have to depart."""
_LEAST = math.log(1.1)
"""The smallest departure that counts, of the logarithm of time."""
_STALE = math.log(1.6)
"""The factor by which the usual time of a kind may differ from its price: a probe is a quarter
wrong, and a busy machine more. A change must be as large where what is usual is not known well."""
_SCATTER_FROM, _LEAST_SCATTER = 64, 0.03
"""The usual scatter is that of so many earlier calls, and taken to be as large as this at least. A
change must be as large as it: that is two standard errors of the median of six, 1.25 σ/√6. No more
is asked for, because what is found is verified."""
_MAD_TO_SIGMA = 1.4826
_MOST_KINDS = 256


class _Usual:
    """The usual logarithm of measured over promised time of one kind, as far as it is known."""

    def __init__(self) -> None:
        self._learnt: list[float] = []
        self.value: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether enough calls have taught it."""
        return len(self._learnt) >= _LEARNT_FROM

    def learn(self, value: float) -> bool:
        """Learn from a call. Returns whether enough of them have taught it now."""
        self._learnt.append(value)
        self.value = median(self._learnt)
        return self.is_known

    def shift(self, by: float) -> None:
        """Expect it to be other by so much, and learn it anew."""
        self._learnt.clear()
        if self.value is not None:
            self.value += by

    def departures(self) -> list[float]:
        return [each - (self.value or 0.0) for each in self._learnt]


class Departures:
    """The departures of one group's calls, by the ratios of measured to promised time in the order
    of the calls."""

    def __init__(self) -> None:
        self._usual: dict[Hashable, _Usual] = {}
        self._recent: deque[tuple[float, bool]] = deque(maxlen=_SUSTAINED)
        """The last departures, and whether each is from what is known well."""
        self._promised: deque[float] = deque(maxlen=_SUSTAINED)
        """The departures of the same calls from their prices."""
        self._before: deque[float] = deque(maxlen=_SCATTER_FROM)
        """The departures of earlier calls, which say how much calls scatter."""
        self._stale: float | None = None
        """The usual value of a kind whose price is wrong."""
        self._believes_profile = self._believes_together = True

    def add(self, kind: Hashable, ratio: float) -> None:
        """Take the ratio of measured to promised time, above 0, of the next call, which is of this
        kind."""
        value, usual = math.log(ratio), self._usual.get(kind)
        if usual is None:
            if len(self._usual) < _MOST_KINDS:  # a group whose calls are all of another size teaches nothing
                self._usual[kind] = _Usual()
            return
        self._promised.append(value)
        if usual.value is not None:
            if len(self._recent) == _SUSTAINED and self._recent[0][1]:
                self._before.append(self._recent[0][0])
            self._recent.append((value - usual.value, usual.is_known))
        # Calls that have departed teach nothing: what is usual would become what it changed to, unseen.
        if not usual.is_known and self._departed() is None and usual.learn(value):
            self._before.extend(usual.departures())
            if self._believes_profile and usual.value is not None and abs(usual.value) > _STALE:
                self._stale = usual.value

    @property
    def is_of_prices(self) -> bool:
        """Whether :meth:`change` is that calls have always taken other times than their prices."""
        return self._stale is not None

    def change(self) -> float | None:
        """Return by what factor calls take longer now than they did, or than their prices; None
        where there is no change."""
        by = self._stale
        if by is None:
            by = self._departed()
        if by is None and self._believes_profile and self._believes_together:
            by = _sustained(self._promised, _STALE)
        return None if by is None else math.exp(by)

    def _departed(self) -> float | None:
        """Return how far the last calls all depart from what is usual for their kinds; None where
        they do not."""
        least = _LEAST if all(is_known for _, is_known in self._recent) else _STALE
        scatter = _MAD_TO_SIGMA * median(map(abs, self._before)) if self._before else 0.0
        return _sustained([departure for departure, _ in self._recent], max(least, _LEAST_SCATTER, scatter))

    def accept(self) -> None:
        """Take what is seen now for usual: links were measured and have not changed, whatever
        delays the calls."""
        by = self._departed()
        if self._stale is not None:
            self._stale, self._believes_profile = None, False
        self._believes_together = False
        if by is not None:
            for usual in self._usual.values():
                usual.shift(by)
        self._recent.clear()
        self._promised.clear()
        self._before.clear()


def _sustained(departures: Sequence[float], least: float) -> float | None:
    """The departure that half of the calls exceed, where all are to its side and it is as large as
    that."""
    if len(departures) < _SUSTAINED:
        return None
    # Of the two middle ones the lesser: half of them are no change.
    by = sorted(departures, key=abs)[(_SUSTAINED - 1) // 2]
    is_sustained = min(departures) > 0 if by > 0 else max(departures) < 0
    return by if is_sustained and abs(by) >= least else None
