"""The check of a cached profile when a job starts: some all_reduces, which must take about as long as it says.

Its key says that nodes are of the same kind, not that the network between them is as fast as in the job that measured it.
"""

from __future__ import annotations

from typing import Protocol

from commlayer.profiles.curve import Curve
from commlayer.profiles.profile import Profile

__all__ = ["MOST_OFF", "drift"]

MOST_OFF = 2.5
"""How far a time may be off, either way. A probe's own curves are a quarter wrong, and a busy machine is easily twice as slow; of
a network that is four times as slow or as fast an all_reduce of this size, in which latency counts too, shows three times."""
_COLLECTIVE = "all_reduce"
_LONGEST_US = 2e4
"""The check takes the largest size that was measured to be as fast as this: of that the link is the greater part."""
_ROUNDS = 3
_MORE_ROUNDS = 5
_ENOUGH_US = 8e4
"""When so much time is spent it is over, so that a link that has become much slower costs a round or two."""


class Timing(Protocol):
    """All ranks of a job, as this check needs them: :class:`commlayer.measure.all_ranks.AllRanks` is one."""

    @property
    def size(self) -> int: ...

    def time_all_reduce(self, num_bytes: int) -> float:
        """The time of one all_reduce, µs: the largest over ranks, and equal on all of them."""


def drift(profile: Profile, ranks: Timing) -> str:
    """Say how far ``profile`` is off; empty where it holds, or has no curve to check. Collective; the same on all ranks."""
    curve = _checked_curve(profile, ranks.size)
    if curve is None:
        return ""
    fast_enough = [place for place, time_us in enumerate(curve.time_us) if time_us <= _LONGEST_US]
    place = fast_enough[-1] if fast_enough else 0
    num_bytes, expected_us = curve.bytes[place], curve.time_us[place]
    times: list[float] = []
    for rounds in (_ROUNDS, _MORE_ROUNDS):  # a hiccup of the machine is no drift
        times += _timed(ranks, num_bytes, rounds)
        slower, faster = min(times) / expected_us, expected_us / max(times)
        if max(slower, faster) <= MOST_OFF:
            return ""
    seen_us = min(times) if slower > faster else max(times)
    return f"an {_COLLECTIVE} of {num_bytes} bytes takes {seen_us:.0f} µs, and it says {expected_us:.0f}"


def _checked_curve(profile: Profile, size: int) -> Curve | None:
    """The curve of the backend's own call on all ranks."""
    found = [each for each in profile.curves if each.collective == _COLLECTIVE and each.group_size == size]
    return found[0] if found else None


def _timed(ranks: Timing, num_bytes: int, rounds: int) -> list[float]:
    times: list[float] = []
    while len(times) < rounds and sum(times) < _ENOUGH_US:
        times.append(ranks.time_all_reduce(num_bytes))
    return times
