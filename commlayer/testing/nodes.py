"""Uneven nodes on an emulated cluster: as many seats on every node, of which some stay empty.

    sizes = (3, 4)                                       # ranks 0-2 on node 0, ranks 3-6 on node 1
    with EmulatedCluster(len(sizes), max(sizes)) as cluster:
        results = run_on_nodes(cluster, sizes, job)

The emulated cluster itself has equal nodes. A process whose seat stays empty returns at once; the
others get ranks without gaps, so that they meet a job of `sum(sizes)` ranks on nodes that really
differ.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from commlayer.emulation import EmulatedCluster, RankOutcome
from commlayer.profiles.errors import UsageError

__all__ = ["outcomes_on_nodes", "run_on_nodes"]

T = TypeVar("T")


def run_on_nodes(
    cluster: EmulatedCluster,
    sizes: Sequence[int],
    fn: Callable[..., T],
    *args: Any,
    cyclic: bool = False,
    timeout_s: float = 120.0,
) -> list[T]:
    """Call ``fn(*args)`` in ``sizes[n]`` processes of node n; the results by rank.

    ``cyclic``: deal the ranks out to one node after the other, as Slurm's ``--distribution=cyclic``
    does, instead of filling node after node. Where nodes are not namespaces (mode loopback) the
    ranks find ``COMMLAYER_TOPOLOGY`` declared.

    Raises:
        UsageError: the cluster has other nodes, or too few seats on one; cyclic ranks on loopback,
        which cannot be declared.
        RanksFailedError, RanksTimedOutError: as `EmulatedCluster.run`; they number the seats of the
        cluster, not the ranks.
    """
    job = _Seated(tuple(sizes), cluster, fn, args, cyclic)
    values = cluster.run(job, timeout_s=timeout_s)
    return [values[seat] for seat in job.seats]


def outcomes_on_nodes(
    cluster: EmulatedCluster,
    sizes: Sequence[int],
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    grace_s: float = 5.0,
) -> list[RankOutcome]:
    """Run as :func:`run_on_nodes` does, and return one `RankOutcome` per rank instead of raising
    where ranks fail.

    Raises RanksTimedOutError when the time is up.
    """
    job = _Seated(tuple(sizes), cluster, fn, args)
    outcomes = cluster.run(job, timeout_s=timeout_s, grace_s=grace_s, check=False)
    return [outcomes[seat] for seat in job.seats]


class _Seated:
    """The body of every process of the cluster: an empty seat returns None, the others learn their
    new rank."""

    def __init__(
        self,
        sizes: tuple[int, ...],
        cluster: EmulatedCluster,
        fn: Callable[..., Any],
        args: Sequence[Any],
        cyclic: bool = False,
    ) -> None:
        if len(sizes) != cluster.nodes or not all(0 < size <= cluster.ranks_per_node for size in sizes):
            raise UsageError(
                f"expected 1 to {cluster.ranks_per_node} ranks for each of the {cluster.nodes} nodes of {cluster}, got "
                f"{sizes}: make an EmulatedCluster({len(sizes)}, {max(sizes, default=1)})"
            )
        if cyclic and not cluster.shaped:
            raise UsageError(
                "cyclic ranks need nodes that are namespaces: a declared topology has the ranks of a node in a row"
            )
        self._sizes, self._fn, self._args = sizes, fn, args
        self._declare = not cluster.shaped
        places = [(node, local) for node, size in enumerate(sizes) for local in range(size)]
        if cyclic:
            places.sort(key=lambda place: (place[1], place[0]))
        self.seats = [node * cluster.ranks_per_node + local for node, local in places]
        """The cluster's own rank of each of our ranks."""

    def __call__(self) -> Any:
        seat, node = int(os.environ["RANK"]), int(os.environ["GROUP_RANK"])
        if seat not in self.seats:
            return None
        os.environ["RANK"] = str(self.seats.index(seat))
        os.environ["WORLD_SIZE"] = str(len(self.seats))
        os.environ["LOCAL_WORLD_SIZE"] = str(self._sizes[node])
        if self._declare:
            is_one = len(self._sizes) == 1
            os.environ["COMMLAYER_TOPOLOGY"] = f"1x{self._sizes[0]}" if is_one else "+".join(map(str, self._sizes))
        return self._fn(*self._args)
