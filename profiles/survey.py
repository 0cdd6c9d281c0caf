"""A survey: few sizes of many curves in little time, which is all that a job can spend at its
start.

The calls go in rounds, each call once a round. Ranks have to agree on times once a round then, not
after every call; and if the machine hiccups, that spoils one time of a curve, not all of them. The
largest size of a link's first curve tells the link's rate, and by that the others' largest size is
chosen, so that none of these takes more than some four times as long as was asked for; where the
size below took that long already, none larger is measured, but for a link's first curve. Where a
curve's largest size is not the largest that was asked for, the curve goes on there at the link's
rate, or its own if that is much lower.

What comes first, and so what is left out where time is short: each curve's sizes but the largest
once; these again; the largest once; those whose two times differ a third time; the largest again,
the fastest first. The first curve of each link comes before the others, and is timed once whatever
that costs. Behind the deadline no other call begins, and a curve of which nothing was timed is not
there. All ranks run this, and whatever it decides rests on times on which they have agreed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from commlayer.profiles.curve import median
from commlayer.profiles.links import Resource

__all__ = ["Ladder", "Rung", "Survey", "SurveyLimits", "Wanted", "survey"]

Wanted = tuple[int, int]
"""A call to be timed: the place of its curve, and its size in bytes."""
_LEAST_GROWTH = 4
"""The largest size is at least this many times the one before: nearer to that, it would not show
the link's rate."""
_MUCH_MORE = 2.0
"""A curve's own sizes, which are noisy, are believed on its rate where they say so many times what
the link's rate says: Gloo's broadcast crosses a card several times."""
_FIRST_LONGEST = 4
"""The first call of a link may take so many times as long as the others, since all of them rest on
it."""
_USUAL = 0.5
"""The part of the longest time that a largest call takes as a rule, which is kept back for it."""
_ALIKE = 1.3
"""Two times of a call are enough where the slower is no more than this many times the faster."""
_MOST_TIMES = 3


class Ladder(NamedTuple):
    """The sizes of a curve, increasing: the last is the most that is measured. ``load``: bytes
    through the link for each byte."""

    sizes: tuple[int, ...]
    link: Resource
    load: float


@dataclass(frozen=True)
class SurveyLimits:
    """``budget_us``: when so much time is gone nothing is timed a second time. ``longest_us``: the
    largest call of a curve should take no longer. ``deadline_us``: when so much time is gone no
    call begins, but for the first curve of each link."""

    budget_us: float
    longest_us: float
    deadline_us: float = math.inf


class Rung(NamedTuple):
    """A point of a curve. ``samples`` 0: it was not measured, but follows from the others."""

    size: int
    time_us: float
    samples: int


@dataclass
class Survey:
    """The agreed times in µs of each call, in the order in which they were taken; what a byte takes
    on each link; and when the last round ended."""

    ladders: Sequence[Ladder]
    times_us: dict[Wanted, list[float]] = field(default_factory=dict)
    us_per_byte: dict[Resource, float] = field(default_factory=dict)
    spent_us: float = 0.0

    def curve(self, place: int) -> list[Rung]:
        """The curve of that ladder; empty where time was up before any of its sizes was timed."""
        measured = [
            Rung(size, self.time_us((place, size)), len(self.times_us[place, size])) for size in self.sizes(place)
        ]
        last, most = measured[-1] if measured else None, self.ladders[place].sizes[-1]
        if last is None or last.size == most:
            return measured
        return [*measured, Rung(most, last.time_us + (most - last.size) * self.slope_us(place), 0)]

    def sizes(self, place: int) -> tuple[int, ...]:
        """The sizes of a curve that were measured, increasing."""
        return tuple(sorted(size for at, size in self.times_us if at == place))

    def time_us(self, call: Wanted) -> float:
        """The median of three times, the faster of two: others' work only adds to one, and the
        first call warms up."""
        times = self.times_us[call]
        return median(times) if len(times) >= _MOST_TIMES else min(times)

    def slope_us(self, place: int) -> float:
        """How much longer each byte more takes, µs: by the link's rate; or, where that is not known
        or the two largest sizes so far say much more, by those."""
        sizes, ladder = self.sizes(place)[-2:], self.ladders[place]
        slower, faster = (self.time_us((place, size)) for size in (sizes[-1], sizes[0]))
        own = max(0.0, slower - faster) / max(1, sizes[-1] - sizes[0])
        of_link = self.us_per_byte.get(ladder.link, 0.0) * ladder.load
        return own if own > of_link * _MUCH_MORE else of_link

    @property
    def overhead_us(self) -> float:
        """The cost of timing a call, beside the time of the call itself."""
        times = [time for each in self.times_us.values() for time in each]
        return max(0.0, self.spent_us - sum(times)) / max(1, len(times))


def survey(
    ladders: Sequence[Ladder],
    run: Callable[[Sequence[Wanted], float], tuple[Sequence[float], float]],
    limits: SurveyLimits,
) -> Survey:
    """Time the calls of each curve.

    ``run(calls, until_us)`` times calls one after the other, and begins none when so much time is
    gone since the beginning, µs. It returns the times of those that it made, and how much time is
    gone. All ranks have agreed on all of that.
    """
    result = Survey(ladders)

    def go(calls: Sequence[Wanted], until_us: float = limits.deadline_us) -> None:
        if calls and result.spent_us < until_us:
            times, result.spent_us = run(calls, until_us)
            for call, time_us in zip(calls, times, strict=False):  # of the last ones none where time is up
                result.times_us.setdefault(call, []).append(time_us)

    tall = [place for place, ladder in enumerate(ladders) if len(ladder.sizes) > 1]
    firsts = {ladders[place].link: place for place in reversed(tall)}
    small = [(place, size) for place, ladder in enumerate(ladders) for size in ladder.sizes[:-1] or ladder.sizes]
    small.sort(key=lambda call: call[0] not in firsts.values())
    needed = [call for call in small if call[0] in firsts.values()]
    go(needed, math.inf)
    go(small[len(needed) :])
    reserved_us = len(tall) * (limits.longest_us * _USUAL + result.overhead_us)
    go(_affordable(result, small, limits.budget_us - reserved_us))
    largest = []
    for place in firsts.values():  # as if the time of the size below were all bandwidth
        below = ladders[place].sizes[-2]
        most = _FIRST_LONGEST * limits.longest_us / result.time_us((place, below)) * below
        largest.append((place, _grown(ladders[place], most)))
    go(largest, math.inf)
    result.us_per_byte = {link: result.slope_us(place) / ladders[place].load for link, place in firsts.items()}
    tall = [place for place in tall if place not in firsts.values()]
    measured = [place for place in tall if len(result.sizes(place)) == len(ladders[place].sizes) - 1]
    others = []
    for place in measured:
        below, most = ladders[place].sizes[-2:]
        left_us, us_per_byte = limits.longest_us - result.time_us((place, below)), result.slope_us(place)
        if left_us > 0:  # else the size below the largest takes as long already as the largest should
            others.append((place, _grown(ladders[place], below + left_us / us_per_byte if us_per_byte else most)))
    go(others)
    twice = [(call, times) for call in small if 1 < len(times := result.times_us.get(call, ())) < _MOST_TIMES]
    unsure = [call for call, times in twice if max(times) > min(times) * _ALIKE]
    go(_affordable(result, unsure, limits.budget_us))
    largest = [(place, result.sizes(place)[-1]) for place in (*firsts.values(), *(place for place, _ in others))]
    go(_affordable(result, sorted(largest, key=result.time_us), limits.budget_us))
    return result


def _affordable(result: Survey, calls: Iterable[Wanted], budget_us: float) -> list[Wanted]:
    """The first of ``calls`` that fit into what is left of the budget, if they take as long as
    before: of those made before."""
    fitting, left_us = [], budget_us - result.spent_us
    for call in (call for call in calls if call in result.times_us):
        left_us -= min(result.times_us[call]) + result.overhead_us
        if left_us < 0:
            break
        fitting.append(call)
    return fitting


def _grown(ladder: Ladder, size: float) -> int:
    below, most = ladder.sizes[-2:]
    return int(min(most, max(size, below * _LEAST_GROWTH)))
