"""The rates of the links between a group's nodes: what messages between each two of them say, and
the profile they make.

All cards may have become slower or faster alike (the fabric), or single ones (a node's card); the
two ask for different plans. Pure: who sends the messages (:mod:`commlayer.measure.link_times`)
tells their times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from commlayer.profiles.curve import Curve
from commlayer.profiles.links import Peaks, Resource
from commlayer.profiles.pairs import Pair, slow_links
from commlayer.profiles.profile import Profile
from commlayer.profiles.topology import Topology

__all__ = ["AS_PRICED", "LinkRates", "LinkTimes", "card_gbps", "profile_at", "rates_from"]

_UNCHANGED = 1.6
"""A rate within this factor of the profile's is the profile's: the peak that a busy job's probe
found was seen a third below the link's own, and a decision is no finer."""
_UNCHANGED_CARD = 1.25
"""The same of one card beside the others, which are measured together with it."""
_LEAST, _MOST = 1e-3, 1e3
_HELD_OUT = 0.5
"""The least hold-out error of a curve that was scaled, as of one that was probed: trials are to
decide between near plans."""


@dataclass(frozen=True)
class LinkRates:
    """The rates of cards, as fractions of what the profile says is usual.

    ``fabric``: of all alike. ``nodes``: of each of the group's nodes beside that; empty: all alike.
    """

    fabric: float = 1.0
    nodes: tuple[float, ...] = ()

    def differs(self, other: LinkRates) -> bool:
        """Whether these rates are other than those, by more than they are known to."""
        return any(self.slower(other)) or any(other.slower(self))

    def slower(self, other: LinkRates) -> list[bool]:
        """Say which of these rates, the fabric's first, are lower than those, by more than they are
        known to."""
        alike = (1.0,) * max(len(self.nodes), len(other.nodes))
        nodes = zip(self.nodes or alike, other.nodes or alike, strict=True)
        fabric = other.fabric > _UNCHANGED * self.fabric
        return [fabric, *(theirs > _UNCHANGED_CARD * mine for mine, theirs in nodes)]

    def __str__(self) -> str:
        changes = [] if self.fabric == 1.0 else [f"links between nodes have {self.fabric:.0%} of the profile's rate"]
        changes += [
            f"node {node} of the group has {rate:.0%} of the others' rate"
            for node, rate in enumerate(self.nodes)
            if rate < 1.0
        ]
        return "; ".join(changes) or "links between nodes are as the profile says"


AS_PRICED = LinkRates()
"""The rates of links that are as the profile says."""


class LinkTimes(NamedTuple):
    """How long pairs of nodes took to send each other some bytes at once, µs.

    ``certain_us``: without the time in which a thread of theirs was ready and waited for a
    processor, as far as the kernel tells that.
    """

    taken_us: dict[Pair, float]
    certain_us: dict[Pair, float]

    def shorter(self, other: LinkTimes) -> LinkTimes:
        """Return the shorter time of each pair, of two measurements."""
        return LinkTimes(
            *({pair: min(mine[pair], theirs[pair]) for pair in mine} for mine, theirs in zip(self, other, strict=True))
        )

    def over(self, factor: float) -> LinkTimes:
        """Return the times of so many times fewer bytes."""
        return LinkTimes(*({pair: time_us / factor for pair, time_us in each.items()} for each in self))

    def least_us(self, slower: list[bool]) -> dict[Pair, float]:
        """Return the least that those pairs can have taken that seem to be slower; of others what
        they took.

        ``slower``: whether the fabric is, to which all pairs belong, then each node's card.
        """
        cards = {node for node, is_slower in enumerate(slower[1:]) if is_slower}
        return {
            pair: self.certain_us[pair] if slower[0] or cards & set(pair) else time_us
            for pair, time_us in self.taken_us.items()
        }


def card_gbps(profile: Profile) -> float:
    """Return the rate of a usual node's card, GB/s: of as many ranks as the emptiest node has,
    where none is slower than others."""
    ranks = min(len(members) for members in Topology.parse(profile.topology).nodes)
    return profile.peaks.inter_gbps * ranks / min(profile.node_rates, default=1.0)


def rates_from(times_us: Mapping[Pair, float], expected_us: float, *, siblings: int, slowdown: float) -> LinkRates:
    """Find the rates by exchanges of each two nodes, µs, of which one on usual, idle cards takes
    ``expected_us``.

    ``siblings`` groups may have shared the cards meanwhile, or not. Within what that leaves open,
    the group's own calls decide, which have become ``slowdown`` times as slow.
    """
    slow = {link.nodes[0]: link.rate for link in slow_links(times_us) if len(link.nodes) == 1}
    num_nodes = 1 + max(node for pair in times_us for node in pair)
    best_us = sorted(min(time for pair, time in times_us.items() if node in pair) for node in range(num_nodes))
    lowest = expected_us / best_us[len(best_us) // 2]
    highest = lowest * siblings
    fabric = 1.0
    if not lowest / _UNCHANGED <= 1.0 <= highest * _UNCHANGED:
        fabric = min(max(1.0 / slowdown, lowest), highest)
    nodes = tuple(slow.get(node, 1.0) for node in range(num_nodes)) if slow else ()
    return LinkRates(min(max(fabric, _LEAST), _MOST), nodes)


def profile_at(profile: Profile, fabric: float) -> Profile:
    """Return the profile of the same cluster whose cards all have ``fabric`` times their rate.

    Latencies stay what they are: a small size takes as long as before, and a large one as long as
    one did that is as much larger as the links are slower.
    """
    if fabric == 1.0:
        return profile
    curves = [_at(curve, fabric) if curve.link is Resource.INTER else curve for curve in profile.curves]
    peaks = profile.peaks
    return profile.replace(
        name=f"{profile.name} at {fabric:.0%}",
        source=f"{profile.source}; between nodes at {fabric:.3g} times its rates, as measured in a running job",
        peaks=Peaks(peaks.inter_gbps * fabric, peaks.intra_gbps, peaks.device_gbps),
        curves=curves,
    )


def _at(curve: Curve, fabric: float) -> Curve:
    """The curve by which a size takes as long as one did that is as much larger as the links are
    slower."""
    points = {max(1, round(size * fabric)): time_us for size, time_us in zip(curve.bytes, curve.time_us, strict=True)}
    return msgspec.structs.replace(
        curve,
        bytes=tuple(points),
        time_us=tuple(points.values()),
        p50_us=(),
        p99_us=(),
        samples=(),
        holdout_error=max(curve.holdout_error or 0.0, _HELD_OUT),
        basis="derived",
    )
