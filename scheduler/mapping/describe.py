"""The links that the groups of a mesh cross on a cluster: which stay inside a node, and the slowest link of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from commlayer.profiles.links import Resource
from commlayer.profiles.topology import Topology

__all__ = ["AxisDescription", "GroupDescription", "MeshDescription", "describe_groups"]

_SHOWN_RANKS = 8  # of a group, in the table
_SHOWN_GROUPS = 4  # of those that cross nodes while others of their axis do not


class GroupDescription(msgspec.Struct, frozen=True):
    """One group. ``link`` is the slowest link class between two of its ranks; ``device`` for a rank alone."""

    ranks: tuple[int, ...]
    num_nodes: int
    link: Resource


class AxisDescription(msgspec.Struct, frozen=True):
    """All groups of one axis."""

    axis: str
    size: int
    groups: tuple[GroupDescription, ...]
    mine: int  # index of the group of the rank for which the mesh was described

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    @property
    def num_inside(self) -> int:
        """How many groups stay inside one node."""
        return sum(group.num_nodes == 1 for group in self.groups)

    @property
    def link(self) -> Resource:
        """The slowest link class that any group of this axis crosses."""
        crossed = {group.link for group in self.groups}
        return next(link for link in (Resource.INTER, Resource.INTRA, Resource.DEVICE) if link in crossed)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The group of the rank for which the mesh was described."""
        return self.groups[self.mine].ranks


class MeshDescription(msgspec.Struct, frozen=True):
    """A mesh on a topology. Print it for people (``str``), read ``rows``, or save ``to_json()``."""

    title: str
    topology: str
    rank: int
    rows: tuple[AxisDescription, ...]

    def row(self, axis: str) -> AxisDescription:
        """The row of ``axis``. Raises KeyError where there is none."""
        return {row.axis: row for row in self.rows}[axis]

    def to_json(self) -> str:
        """Write it as text, with every group, its nodes and its link."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"

    def __str__(self) -> str:
        head = ("axis", "size", "groups", "inside a node", "slowest link", f"with rank {self.rank}")
        table = [head, *map(_cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]
        mixed = [_crossing(row) for row in self.rows if 0 < row.num_inside < row.num_groups]
        return "\n".join([f"{self.title}; on {self.topology}", *lines, *mixed])


def describe_groups(
    title: str, groups: Mapping[str, Sequence[tuple[int, ...]]], topology: Topology, rank: int
) -> MeshDescription:
    """Describe ``groups``, by axis. Every rank of ``topology`` is in one group of each axis.

    Args:
        title: stands above the table.
        rank: whose groups the table shows.
    """
    rows = []
    for axis, of_axis in groups.items():
        described = tuple(_describe(ranks, topology) for ranks in of_axis)
        mine = next(index for index, ranks in enumerate(of_axis) if rank in ranks)
        rows.append(AxisDescription(axis, len(of_axis[0]), described, mine))
    return MeshDescription(title, topology.shape, rank, tuple(rows))


def _describe(ranks: tuple[int, ...], topology: Topology) -> GroupDescription:
    num_nodes = topology.spans(ranks)
    link = Resource.INTER if num_nodes > 1 else Resource.INTRA if len(ranks) > 1 else Resource.DEVICE
    return GroupDescription(ranks, num_nodes, link)


def _cells(row: AxisDescription) -> tuple[str, ...]:
    if row.num_inside in (0, row.num_groups):
        inside = "all" if row.num_inside else "none"
    else:
        inside = f"{row.num_inside} of {row.num_groups}"
    link = "-" if row.link is Resource.DEVICE else row.link.value
    return row.axis, str(row.size), str(row.num_groups), inside, link, _ranks(row.ranks)


def _crossing(row: AxisDescription) -> str:
    crossing = [_ranks(group.ranks) for group in row.groups if group.num_nodes > 1]
    more = f" | {len(crossing) - _SHOWN_GROUPS} more" if len(crossing) > _SHOWN_GROUPS else ""
    return f"{row.axis} crosses nodes in {' | '.join(crossing[:_SHOWN_GROUPS])}{more}"


def _ranks(ranks: Sequence[int]) -> str:
    """Write a long group as "0 2 4 6 … 62"."""
    if len(ranks) <= _SHOWN_RANKS:
        return " ".join(map(str, ranks))
    return f"{' '.join(map(str, ranks[: _SHOWN_RANKS - 2]))} … {ranks[-1]}"
