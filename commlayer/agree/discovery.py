"""Which ranks take part, on which nodes: topology discovery, and the grid that an all_to_all of
replicated tokens needs.

The grid has one row for each rank of the all_to_all's group (ep) and one column for each holder of
the same tokens (tp): rank (i, j) exchanges with column j and gathers with row i. Every rank
describes itself once, when a Communicator is made; all checks are made on the gathered
descriptions, so that every rank raises the same error.
"""

from __future__ import annotations

import itertools
import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist

from commlayer.agree.messages import ControlMessage, Peers, Reason, check_alike, gather_grid, gather_messages
from commlayer.profiles.errors import ClusterError, DisagreementError, GroupError, TopologyError
from commlayer.profiles.links import Resource
from commlayer.profiles.topology import Topology
from commlayer.settings import Settings
from commlayer.version import __version__

__all__ = ["Grid", "Identity", "Member", "describe_self", "discover_topology", "form_grid", "grid_key"]


class Identity(ControlMessage, frozen=True):
    """Where a rank runs: what :func:`node_identity` says."""

    text: str


class Member(ControlMessage, frozen=True):
    """A rank as it describes itself when a Communicator is made."""

    rank: int
    identity: str
    ep_ranks: tuple[int, ...]
    tp_ranks: tuple[int, ...]
    agreed: dict[str, str] = msgspec.field(default_factory=dict)
    serial: int = 0  # how many this process has described before: no two grids of a job share (rank, serial)
    failure: Reason | None = None  # why it cannot take part


@dataclass(frozen=True)
class Grid:
    """The ranks of one all_to_all of replicated tokens: ``ranks[i][j]`` is global rank of row i
    (ep), column j (tp)."""

    ranks: tuple[tuple[int, ...], ...]
    ep_index: int
    tp_index: int
    link: Resource
    topology: Topology

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The members of each row: numbers that go through the grid row by row."""
        width = len(self.tp_ranks)
        return tuple(tuple(range(row * width, (row + 1) * width)) for row in range(len(self.ranks)))

    @property
    def member(self) -> int:
        """This rank, as one of those members."""
        return self.ep_index * len(self.tp_ranks) + self.tp_index

    @property
    def ep_ranks(self) -> tuple[int, ...]:
        return tuple(row[self.tp_index] for row in self.ranks)

    @property
    def tp_ranks(self) -> tuple[int, ...]:
        return self.ranks[self.ep_index]


def node_identity() -> str:
    """Hostname and network namespace: equal for two ranks exactly when they talk without a wire
    between them."""
    try:
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:  # not Linux, or no /proc
        namespace = platform.system()
    return f"{socket.gethostname()}/{namespace}"


def discover_topology(timeout_s: float | None = None) -> Topology:
    """Which rank of the world sits on which node: as ``COMMLAYER_TOPOLOGY`` declares, else by host
    and network namespace.

    Collective: every rank calls it. Raises TopologyError for a declaration of another number of
    ranks.
    """
    settings = Settings.from_environment()
    own, purpose = Identity(node_identity()), "to discover the topology"
    everyones = gather_messages(own, Identity, Peers.of(None), timeout_s or settings.timeout_s, purpose)
    identities = [theirs.text for theirs in everyones]
    return declared_topology(settings, len(identities)) or Topology.from_identities(identities)


def declared_topology(settings: Settings, world_size: int) -> Topology | None:
    """The topology that ``COMMLAYER_TOPOLOGY`` declares, if it does. Raises TopologyError for one
    of another size."""
    if settings.topology is None:
        return None
    declared = Topology.parse(settings.topology)
    if declared.world_size != world_size:
        raise TopologyError(
            f"COMMLAYER_TOPOLOGY declares {declared.shape}, {declared.world_size} ranks, but the job has {world_size}: correct "
            "it, or unset it to discover the topology"
        )
    return declared


_serials = itertools.count()


def describe_self(
    ep_group: dist.ProcessGroup,
    tp_group: dist.ProcessGroup | None,
    agreed: dict[str, str],
    timeout_s: float,
    failure: Reason | None = None,
) -> list[Member]:
    """Exchange descriptions over the grid and return all of them. Collective over both groups.

    ``failure``: why this rank cannot take part. It comes all the same and says so, or the others
    would wait for it. Raises GroupError where this rank is in neither group, DisagreementError
    where a rank's words cannot be read or are not of itself.
    """
    rank = dist.get_rank()
    for name, group in (("ep", ep_group), ("tp", tp_group)):
        # torch gives ranks outside a group the GroupMember.NON_GROUP_MEMBER object, in which their
        # rank is -1
        if group is not None and dist.get_rank(group) < 0:
            raise GroupError(f"rank {rank} is not a member of the {name} group: pass the group that holds this rank")
    ep_ranks = tuple(dist.get_process_group_ranks(ep_group))
    tp_ranks = tuple(dist.get_process_group_ranks(tp_group)) if tp_group is not None else (rank,)
    me = Member(rank, node_identity(), ep_ranks, tp_ranks, agreed, next(_serials), failure)
    purpose = "to make a Communicator"
    row = None if tp_group is None else Peers.of(tp_group)
    rows = gather_grid(me, Member, row, Peers.of(ep_group), timeout_s, purpose)
    _check_told(rows)
    return [member for each in rows for _, member in each]


def _check_told(rows: Sequence[Sequence[tuple[int, Member]]]) -> None:
    """Raise DisagreementError for a description that no process group can give: what follows relies
    on it."""
    seen: dict[int, Member] = {}
    for row in rows:
        ranks = tuple(rank for rank, _ in row)
        for rank, member in row:
            is_in_both = rank in member.ep_ranks and member.tp_ranks == ranks
            if member.rank != rank or not is_in_both or seen.setdefault(rank, member) != member:
                raise DisagreementError(
                    f"rank {rank} says that it is rank {member.rank} of the ep group {list(member.ep_ranks)} and the tp group "
                    f"{list(member.tp_ranks)}: expected rank {rank}, an ep group that holds it, the tp group {list(ranks)}, and "
                    "the same words to everybody; look whether something else than a rank of this job has come in as it"
                )


def grid_key(members: Sequence[Member]) -> str:
    """A name for what is made of ``members``: the same on all of them, and another one each
    time."""
    first = min(members, key=lambda member: member.rank)
    return f"commlayer/{first.rank}/{first.serial}"


def form_grid(members: Sequence[Member], rank: int, declared: Topology | None = None) -> Grid:
    """Check the descriptions and lay out the grid. Pure, and the same on every rank.

    Raises ClusterError where a member could not take part; GroupError where the groups do not form
    a grid of nodes × holders; DisagreementError where ranks differ in what they must agree on
    (profile, policy, versions).
    """
    by_rank = {member.rank: member for member in members}
    me = by_rank[rank]
    for member in members:
        if member.failure is not None:
            raise ClusterError(f"rank {member.rank} could not make its Communicator: {member.failure}")
    check_alike([(member.rank, member.agreed) for member in members])
    for peer in me.ep_ranks:
        if peer not in by_rank or by_rank[peer].ep_ranks.index(peer) != me.ep_ranks.index(peer):
            raise GroupError(
                f"rank {rank}: its ep group {list(me.ep_ranks)} lists rank {peer}, which describes another group: pass the "
                "same group on all its ranks"
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
    ranks = sorted(by_rank)
    if declared is not None and ranks[-1] >= declared.world_size:
        raise GroupError(
            f"the declared topology {declared.shape} has {declared.world_size} ranks, but rank {ranks[-1]} takes part: "
            "correct COMMLAYER_TOPOLOGY"
        )
    # A grid may be a part of the cluster that was declared.
    nodes = [by_rank[r].identity if declared is None else f"node {declared.node_of(r)}" for r in ranks]
    topology = Topology.from_identities(nodes)
    index_of = {r: i for i, r in enumerate(ranks)}
    return Grid(rows, me.ep_ranks.index(rank), column, _link(rows, topology, index_of), topology)


def _link(rows: Sequence[Sequence[int]], topology: Topology, place: dict[int, int]) -> Resource:
    """The link class of the ep group; the tp groups must lie inside nodes."""
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


def versions() -> dict[str, str]:
    """The versions that must be equal on all ranks for their plans to be equal, beside profile and
    policy."""
    return {"commlayer version": __version__, "torch version": str(torch.__version__)}
