"""Which ranks take part, on which nodes: topology discovery, and the grid that an all_to_all of replicated tokens needs.

The grid has one row for each rank of the all_to_all's group (ep) and one column for each holder of the same tokens (tp):
rank (i, j) exchanges with column j and gathers with row i. Every rank describes itself once, when a Communicator is
made; all checks are made on the gathered descriptions, so that every rank raises the same error.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from commlayer.profiles.errors import DisagreementError, GroupError
from commlayer.profiles.links import Resource
from commlayer.profiles.topology import Topology

__all__ = ["Grid", "Member", "describe_self", "discover_topology", "form_grid"]


@dataclass(frozen=True)
class Member:
    """What a rank says of itself when a Communicator is made."""

    rank: int
    identity: str
    ep_ranks: tuple[int, ...]
    tp_ranks: tuple[int, ...]
    agreed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Grid:
    """The ranks of one all_to_all of replicated tokens: ``ranks[i][j]`` is global rank of row i (ep), column j (tp)."""

    ranks: tuple[tuple[int, ...], ...]
    ep_index: int
    tp_index: int
    link: Resource
    topology: Topology

    @property
    def ep_ranks(self) -> tuple[int, ...]:
        return tuple(row[self.tp_index] for row in self.ranks)

    @property
    def tp_ranks(self) -> tuple[int, ...]:
        return self.ranks[self.ep_index]


def node_identity() -> str:
    """Hostname and network namespace: equal for two ranks exactly when they talk without a wire between them."""
    try:
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:  # not Linux, or no /proc
        namespace = platform.system()
    return f"{socket.gethostname()}/{namespace}"


def discover_topology(group: dist.ProcessGroup | None = None) -> Topology:
    """Which rank of ``group`` (default: the world) sits on which node. Collective: every rank of the group calls it."""
    identities: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(identities, node_identity(), group=group)
    return Topology.from_identities(identities)


def describe_self(
    ep_group: dist.ProcessGroup, tp_group: dist.ProcessGroup | None, agreed: dict[str, str]
) -> list[Member]:
    """Exchange descriptions over the grid and return all of them. Collective over both groups.

    Raises GroupError where this rank is in neither group.
    """
    rank = dist.get_rank()
    for name, group in (("ep", ep_group), ("tp", tp_group)):
        # torch gives ranks outside a group the GroupMember.NON_GROUP_MEMBER object, in which their rank is -1
        if group is not None and dist.get_rank(group) < 0:
            raise GroupError(f"rank {rank} is not a member of the {name} group: pass the group that holds this rank")
    ep_ranks = tuple(dist.get_process_group_ranks(ep_group))
    tp_ranks = tuple(dist.get_process_group_ranks(tp_group)) if tp_group is not None else (rank,)
    me = Member(rank, node_identity(), ep_ranks, tp_ranks, agreed)
    row: list[Any] = [me]
    if tp_group is not None:
        row = [None] * len(tp_ranks)
        dist.all_gather_object(row, me, group=tp_group)
    rows: list[Any] = [None] * len(ep_ranks)
    dist.all_gather_object(rows, row, group=ep_group)
    return [member for each in rows for member in each]


def form_grid(members: Sequence[Member], rank: int, declared: Topology | None = None) -> Grid:
    """Check the descriptions and lay out the grid. Pure, and the same on every rank.

    Raises GroupError where the groups do not form a grid of nodes × holders; DisagreementError where ranks differ in
    what they must agree on (profile, policy, versions).
    """
    by_rank = {member.rank: member for member in members}
    me = by_rank[rank]
    _check_agreed(members)
    for peer in me.ep_ranks:
        if peer not in by_rank or by_rank[peer].ep_ranks.index(peer) != me.ep_ranks.index(peer):
            raise GroupError(
                f"rank {rank}: its ep group {list(me.ep_ranks)} lists rank {peer}, which describes another group"
            )
    rows = tuple(by_rank[peer].tp_ranks for peer in me.ep_ranks)
    column = me.tp_ranks.index(rank)
    for peer, row in zip(me.ep_ranks, rows, strict=True):
        if len(row) != len(me.tp_ranks) or row.index(peer) != column:
            raise GroupError(
                f"the tp groups of ranks {rank} {list(me.tp_ranks)} and {peer} {list(row)} do not line up: every rank of "
                "an ep group must be at the same place of a tp group of the same size"
            )
    for holder in me.tp_ranks:
        expected = tuple(row[me.tp_ranks.index(holder)] for row in rows)
        if by_rank[holder].ep_ranks != expected:
            raise GroupError(
                f"the ep group of rank {holder} is {list(by_rank[holder].ep_ranks)}, but its place in the tp groups asks "
                f"for {list(expected)}: build ep groups from ranks at the same place of each tp group"
            )
    topology = declared or Topology.from_identities([by_rank[r].identity for r in sorted(by_rank)])
    place = {r: i for i, r in enumerate(sorted(by_rank))} if declared is None else {r: r for r in by_rank}
    return Grid(rows, me.ep_ranks.index(rank), column, _link(rows, topology, place), topology)


def _link(rows: Sequence[Sequence[int]], topology: Topology, place: dict[int, int]) -> Resource:
    """The link class of the ep group; the tp groups must lie inside nodes."""
    if max(place.values()) >= topology.world_size:
        raise GroupError(
            f"the declared topology {topology.shape} has {topology.world_size} ranks, but rank {max(place)} takes part"
        )
    for row in rows:
        if topology.spans([place[r] for r in row]) > 1:
            raise GroupError(
                f"the tp group {list(row)} crosses nodes ({topology.describe()}): tokens must be replicated over ranks of "
                "one node, or declare the real layout with COMMLAYER_TOPOLOGY"
            )
    columns = list(zip(*rows, strict=True))
    spans = {topology.spans([place[r] for r in column]) for column in columns}
    if spans == {1}:
        return Resource.INTRA
    if spans == {len(rows)}:
        return Resource.INTER
    raise GroupError(
        f"the ep groups {[list(column) for column in columns]} put several ranks on one node ({topology.describe()}): "
        "this version plans groups with one rank on each node, or all ranks on one"
    )


def _check_agreed(members: Sequence[Member]) -> None:
    for key, value in members[0].agreed.items():
        others = [member for member in members if member.agreed.get(key) != value]
        if others:
            raise DisagreementError(
                f"ranks disagree on {key}: rank {members[0].rank} has {value}, "
                + ", ".join(f"rank {member.rank} has {member.agreed.get(key)}" for member in others)
                + ": start all ranks with the same one"
            )


def versions() -> dict[str, str]:
    """What must be equal on all ranks for their plans to be equal, beside profile and policy."""
    from commlayer import __version__

    return {"commlayer version": __version__, "torch version": str(torch.__version__)}
