"""The check of a cached profile when a job starts: some all_reduces, which must take about as long
as it says. Pure.

The profile's key says that nodes are of the same kind, not that the network between them is as fast
as in the job that measured it. No group has made calls yet, and so none has an :class:`Experience`
to ask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from commlayer.profiles.curve import Curve
from commlayer.profiles.profile import Profile

__all__ = ["why_stale"]

_MOST_OFF = 2.5
"""How far a time may be off, either way. A probe's own curves are a quarter wrong, and a busy
machine is easily twice as slow. On a network that is four times as slow or as fast, an all_reduce
shows about three times, for latency counts too."""
_SUSPECT, _MOST_OFF_TWICE = 1.6, 2.0
"""Where calls are so many times faster or slower, but not :data:`_MOST_OFF`, a larger size decides,
by less; or the same once more where there is none. In a smaller call latency counts for more, and a
card lets some of the first calls pass at once."""
_COLLECTIVE = "all_reduce"
_FIRST_US, _LARGER_US = 1e5, 2.5e5
"""The check takes the largest size that should be as fast as this: the link is the greater part of
its time."""
_ROUNDS, _MORE_ROUNDS, _ROUNDS_OF_LARGER = 3, 5, 2
_ENOUGH_US = 8e4
"""After so much time the check is over, so that a link that has become much slower costs a round or
two."""


def why_stale(profile: Profile, num_ranks: int, time_all_reduce: Callable[[int], float]) -> str:
    """Say how far ``profile`` is off; "" where it holds, or has no curve to check. Collective; the
    same on all ranks.

    ``time_all_reduce``: the time of one all_reduce of so many bytes on all ``num_ranks`` of them,
    µs: the largest over ranks, and equal on all.
    """
    of_all_ranks = (each for each in profile.curves if each.collective == _COLLECTIVE and each.group_size == num_ranks)
    curve = next(of_all_ranks, None)
    if curve is None:
        return ""
    num_bytes, most_off = _size_for(curve, _FIRST_US), _MOST_OFF
    times = _timed(time_all_reduce, num_bytes, _ROUNDS)
    if _times_off(times, curve.at(num_bytes)) > _MOST_OFF:  # perhaps a hiccup of the machine
        times += _timed(time_all_reduce, num_bytes, _MORE_ROUNDS)
    if _SUSPECT <= _times_off(times, curve.at(num_bytes)) <= _MOST_OFF:
        num_bytes, most_off = _size_for(curve, _LARGER_US), _MOST_OFF_TWICE
        times = _timed(time_all_reduce, num_bytes, _ROUNDS_OF_LARGER)
    expected_us = curve.at(num_bytes)
    if _times_off(times, expected_us) <= most_off:
        return ""
    seen_us = min(times) if min(times) > expected_us else median(times)
    return f"an {_COLLECTIVE} of {num_bytes} bytes takes {seen_us:.0f} µs, and it says {expected_us:.0f}"


def _size_for(curve: Curve, time_us: float) -> int:
    """The largest size that should take at most ``time_us``, of the smallest one measured and its
    doubles up to the largest."""
    smallest, largest = curve.bytes[0], curve.bytes[-1]
    sizes = [smallest << k for k in range((largest // smallest).bit_length())] + [largest]
    return max((size for size in sizes if curve.at(size) <= time_us), default=smallest)


def _times_off(times: Sequence[float], expected_us: float) -> float:
    """How many times slower the fastest call was than expected, or the usual one faster.

    A busy machine makes single calls slow, and a card lets single ones pass at once.
    """
    return max(min(times) / expected_us, expected_us / median(times))


def _timed(time_all_reduce: Callable[[int], float], num_bytes: int, rounds: int) -> list[float]:
    times: list[float] = []
    while len(times) < rounds and sum(times) < _ENOUGH_US:
        times.append(time_all_reduce(num_bytes))
    return times
