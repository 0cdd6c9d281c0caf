"""Drift: a group's calls take longer, or shorter, than they did, by enough and for long enough to be no accident. Pure.

Each kind of call (collective, size, plan) has its usual ratio of measured to predicted time, which its first calls teach; what is
watched is by how much later calls of all kinds depart from theirs. A change is found when the last six all depart to the same
side, four of them by a tenth at least and by more than what calls usually scatter. One outlier, or one in
two, changes nothing.

Greyhound (Wu et al., "Greyhound: Hunting Fail-Slows in Hybrid-Parallel Training at Scale", USENIX ATC 2025) finds change points
of iteration times by Bayesian online detection, and believes those that last and exceed 10 %. Here a change is verified by
measuring the links before anything follows from it, so a short window with robust statistics is enough, and finds it sooner.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from statistics import median

__all__ = ["Drift"]

_LEARNT_FROM, _UNUSUAL = 4, 1
"""How many calls teach what is usual for their kind, and how many before them do not, which connect and touch memory first."""
_SUSTAINED = 6
"""How many calls in turn have to depart."""
_LEAST = math.log(1.1)
"""The smallest departure that counts, of the logarithm of time."""
_STALE = math.log(1.6)
"""The factor by which the usual time of a kind may differ from the predicted one: a probe is a quarter wrong, and a busy machine
more."""
_SCATTER_FROM, _LEAST_SCATTER = 64, 0.03
_OF_SCATTER = 1.0
"""How many times the usual scatter of one call a change must be: two standard errors of the median of so few, 1.25 σ/√6. No more,
because what is found is verified."""
_MAD_TO_SIGMA = 1.4826
_MOST_KINDS = 256


class Drift:
    """The drift of one group's calls, from the ratios of measured to predicted time in the order of the calls."""

    def __init__(self) -> None:
        self._first: dict[Hashable, list[float]] = {}
        self._usual: dict[Hashable, float] = {}
        self._recent: deque[tuple[Hashable, float]] = deque(maxlen=_SUSTAINED)
        self._before: deque[float] = deque(maxlen=_SCATTER_FROM)
        self._stale: float | None = None
        self._believes_profile = True

    def add(self, kind: Hashable, ratio: float) -> None:
        """Take the ratio of measured to predicted time, above 0, of the next call, which is of this kind."""
        value = math.log(ratio)
        usual = self._usual.get(kind)
        if usual is None:
            self._learn(kind, value)
            return
        if len(self._recent) == _SUSTAINED:
            self._before.append(self._recent[0][1])
        self._recent.append((kind, value - usual))

    def _learn(self, kind: Hashable, value: float) -> None:
        if len(self._first) >= _MOST_KINDS and kind not in self._first:
            return  # a group whose calls are all of another size teaches nothing
        first = self._first.setdefault(kind, [])
        first.append(value)
        if len(first) < _UNUSUAL + _LEARNT_FROM:
            return
        del first[:_UNUSUAL]
        usual = self._usual[kind] = median(first)
        self._before.extend(each - usual for each in first)
        if self._believes_profile and abs(usual) > _STALE:
            self._stale = usual

    @property
    def is_of_prices(self) -> bool:
        """Whether :meth:`change` is that calls have always taken other times than the profile says."""
        return self._stale is not None

    def change(self) -> float | None:
        """Return by what factor calls take longer now than they did, or than the profile says; None while there is no change."""
        if self._stale is not None:
            return math.exp(self._stale)
        if len(self._recent) < _SUSTAINED:
            return None
        values = [value for _, value in self._recent]
        by = sorted(values, key=abs)[
            (_SUSTAINED - 1) // 2
        ]  # of the two middle ones the lesser: half of them are no change
        is_sustained = min(values) > 0 if by > 0 else max(values) < 0
        if not is_sustained or abs(by) < max(_LEAST, _OF_SCATTER * self._scatter()):
            return None
        return math.exp(by)

    def _scatter(self) -> float:
        if not self._before:
            return _LEAST_SCATTER
        return max(_LEAST_SCATTER, _MAD_TO_SIGMA * median([abs(value) for value in self._before]))

    def accept(self) -> None:
        """Take what is seen now for usual: the links were measured and are as the profile says, whatever delays the calls."""
        self.begin_anew()
        self._believes_profile = False

    def begin_anew(self) -> None:
        """Forget what was usual: calls have other plans, or other predictions, from now on."""
        self.__init__()  # type: ignore[misc]  # there is nothing to keep
