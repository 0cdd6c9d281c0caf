"""The workload of a job: what its groups called, how large and where, as ``commlayer plan`` takes it.

Sizes are those that were recorded. Dumps have no choice of experts. The sizes of each rank of an
all_to_all are recorded.
"""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from commlayer.profiles.errors import UsageError
from commlayer.profiles.topology import Topology
from commlayer.scheduler.traffic import GROUP_COLLECTIVES
from commlayer.traces.analyse import Selected, matched_calls

__all__ = ["GroupWork", "plan_command", "workload"]

_PLANNED = {name: name for name in GROUP_COLLECTIVES} | {"all_to_all": "all_to_all_v"}
"""The collectives that are planned, by their names here; plan's all_to_all is that of replicated tokens."""


@dataclass(frozen=True, slots=True)
class GroupWork:
    """The calls of one collective in all groups of one name that lie alike on nodes.

    ``collective``: plan's name; ``nodes``: how many of its ranks each node has; ``siblings``: the most of
    these groups that use one node; ``imbalance``: bytes of the busiest rank of an all_to_all over the
    mean of its ranks, median of calls; None where not all ranks recorded theirs.
    """

    group: str
    collective: str
    nodes: tuple[int, ...]
    siblings: int
    num_calls: int
    median_bytes: int
    imbalance: float | None

    @property
    def shape(self) -> str:
        """The nodes as --group takes them, such as 2x4 or 3+1."""
        is_even = len(set(self.nodes)) == 1
        return f"{len(self.nodes)}x{self.nodes[0]}" if is_even else "+".join(map(str, self.nodes))


@dataclass(slots=True)
class _Calls:
    """The calls of a row, as they are gathered."""

    members: set[tuple[int, ...]] = field(default_factory=set)
    sizes: list[int] = field(default_factory=list)
    imbalances: list[float] = field(default_factory=list)


def workload(ranks: Sequence[Selected], topology: Topology) -> list[GroupWork]:
    """Sum up the calls whose sizes are recorded, those that moved most bytes in all first.

    Args:
        topology: on which node each rank of the job lies.

    Raises:
        UsageError: a group with a rank that the topology does not have.
    """
    node_of = {rank: index for index, node in enumerate(topology.nodes) for rank in node}
    rows: defaultdict[tuple[str, str, tuple[int, ...]], _Calls] = defaultdict(_Calls)
    for (group, members, *_), shared in matched_calls(ranks).items():
        sizes = [call.logical_bytes for call, _ in shared.values()]
        collective = _PLANNED.get(next(iter(shared.values()))[0].collective)
        if collective is None or len(members) < 2 or not any(sizes):
            continue
        if beyond := [rank for rank in members if rank not in node_of]:
            raise UsageError(
                f"expected ranks of the profile's {topology.world_size}, got rank {beyond[0]} in a group: take a profile "
                "of a cluster as large as the job"
            )
        on_nodes = Counter(node_of[rank] for rank in members)
        row = rows[group, collective, tuple(on_nodes[node] for node in sorted(on_nodes))]
        row.members.add(members)
        row.sizes.append(max(sizes))
        if collective == "all_to_all_v" and len(sizes) == len(members):
            row.imbalances.append(max(sizes) * len(sizes) / sum(sizes))
    work = {
        GroupWork(
            group=group,
            collective=collective,
            nodes=nodes,
            siblings=_siblings(row.members, node_of),
            num_calls=len(row.sizes),
            median_bytes=round(median(row.sizes)),
            imbalance=median(row.imbalances) if row.imbalances else None,
        ): sum(row.sizes)
        for (group, collective, nodes), row in rows.items()
    }
    return sorted(work, key=lambda each: (-work[each], each.group, each.collective, each.nodes))


def plan_command(work: GroupWork, profile: str) -> str:
    """Return the command that prices a call of the row on a profile."""
    options = f"--collective {work.collective} --bytes {work.median_bytes} --group {work.shape}"
    return f"commlayer plan --profile {shlex.quote(profile)} {options} --siblings {work.siblings}"


def _siblings(groups: set[tuple[int, ...]], node_of: dict[int, int]) -> int:
    """The most groups that use one node."""
    used: Counter[int] = Counter()
    for members in groups:
        used.update({node_of[rank] for rank in members})
    return max(used.values())
