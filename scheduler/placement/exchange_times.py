"""The times of exchanges and messages among the ranks of an expert group, by the curves of a
profile.

Curves are looked up once, at sizes a factor of the square root of two apart; what lies between
follows as between a curve's own points. So a price takes microseconds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property, lru_cache

from commlayer.profiles.profile import Profile
from commlayer.profiles.topology import Topology
from commlayer.scheduler.group_profiles import group_profile
from commlayer.scheduler.group_strategies import build
from commlayer.scheduler.placement.expert_placement import Array
from commlayer.scheduler.plan import Span, Strategy
from commlayer.scheduler.price import price
from commlayer.scheduler.rails import exchange_over
from commlayer.scheduler.traffic import Traffic

__all__ = ["ExchangeTimes", "exchange_times"]

_MOST_KEPT = 64
"""Groups and profiles, of which a job has a handful; its layers share them."""


class ExchangeTimes:
    """The times of exchanges among the ranks of one expert group. Made by :func:`exchange_times`.

    On nodes with different numbers of ranks there are no two levels, and every rank counts as a
    node of its own: what stays inside a node is then priced as if it crossed, which is too much.

    Attributes:
        profile: of the group.
        num_nodes, per_node, num_ranks: of the group.
        node_of: the node of each rank, int64 [ranks].
        has_levels: whether an exchange can go in two levels.
        flat: bytes that a rank sends in an even exchange over the whole group → µs.
        rails, inside: the same over the ranks of one place on each node, and over those of a node,
            where there are two levels; else as ``flat``.
    """

    def __init__(self, profile: Profile, shape: tuple[int, ...]) -> None:
        import numpy as np

        self.profile = profile
        nodes = shape if len(set(shape)) == 1 else (1,) * sum(shape)
        self.num_nodes, self.per_node, self.num_ranks = len(nodes), nodes[0], sum(nodes)
        self.node_of: Array = np.arange(self.num_ranks) // self.per_node
        self.has_levels = self.num_nodes > 1 and self.per_node > 1
        self.flat = _table(
            lambda size: price(build(Traffic.on_nodes("all_to_all_v", size, shape), Strategy.FLAT), profile).total_us
        )
        self.rails = self.inside = self.flat
        if self.has_levels:
            self.rails = _table(lambda size: price(exchange_over(Span.RAIL, nodes, size), profile).total_us)
            self.inside = _table(lambda size: price(exchange_over(Span.NODE, nodes, size), profile).total_us)

    def messages_us(self, sources: Array, targets: Array, sizes: Array) -> float:
        """Time messages among ranks, of ``sizes`` in bytes: those between nodes, and those inside,
        as exchanges of the rank that has most to send or to receive."""
        import numpy as np

        crosses = self.node_of[sources] != self.node_of[targets]
        most = [0.0, 0.0]
        for level, chosen in enumerate((crosses, ~crosses)):
            if chosen.any():
                most[level] = max(
                    np.bincount(ends[chosen], weights=sizes[chosen], minlength=self.num_ranks).max()
                    for ends in (sources, targets)
                )
        return self.most_us(*most)

    def most_us(self, across: float, inside: float) -> float:
        """Time messages of which a rank sends, or receives, so many bytes at most to other nodes,
        and on its own."""
        total = 0.0
        for size, table, count in (
            (across, self.flat, self.num_ranks),
            (inside, self.inside, self.per_node),
        ):
            if size > 0:  # of an even exchange a part stays where it is
                total += float(table(size * count / (count - 1)))
        return total

    @cached_property
    def us_per_byte(self) -> float:
        """The time of a byte in a large exchange over all ranks, µs."""
        return float(self.flat(float(1 << 28))) / (1 << 28)

    @cached_property
    def inside_weight(self) -> float:
        """The time of a byte inside a node over that of one between nodes; 1 where there are no two
        levels."""
        size, ranks, each = float(1 << 20), self.num_ranks, self.per_node
        if not self.has_levels:
            return 1.0
        inside_us, flat_us = float(self.inside(size)), float(self.flat(size))
        return min(1.0, inside_us / (1 - 1 / each) * (1 - each / ranks) / flat_us)


@lru_cache(maxsize=_MOST_KEPT)
def exchange_times(profile: Profile, nodes: tuple[int, ...] | None = None) -> ExchangeTimes:
    """The times of exchanges among the ranks of a group with so many ranks on each of ``nodes``, on
    the cluster of ``profile``; None: of all its ranks. Kept.

    ``profile``: of the whole cluster, from whose curves those of the group follow, or of the group
    itself. Raises PlanError for a group that is larger than the cluster, and where the profile has
    no curves for such exchanges.
    """
    shape = tuple(len(members) for members in Topology.parse(profile.topology).nodes)
    if nodes is None or sorted(nodes) == sorted(shape):
        return ExchangeTimes(profile, shape)
    return ExchangeTimes(group_profile(profile, nodes), nodes)


def _table(time_us: Callable[[int], float]) -> Callable[[Array], Array]:
    """``time_us`` of sizes, looked up between points that are computed once; nothing takes no
    time."""
    import numpy as np

    sizes = 2.0 ** np.arange(6, 38, 0.5)
    logs, times = (
        np.log(sizes),
        np.log(np.array([max(time_us(round(size)), 1e-9) for size in sizes])),
    )

    points, values = logs.tolist(), times.tolist()
    slopes = [*(np.diff(times) / np.diff(logs)).tolist(), 0.0]

    def looked_up(asked: Array) -> Array:
        if np.ndim(asked) == 0:  # most are single numbers, for which numpy is slow
            if asked <= 0:
                return 0.0
            log = min(max(math.log(asked), points[0]), points[-1])
            at = bisect_right(points, log) - 1
            return math.exp(values[at] + slopes[at] * (log - points[at]))
        return np.where(asked > 0, np.exp(np.interp(np.log(np.maximum(asked, 1e-9)), logs, times)), 0.0)

    return looked_up
