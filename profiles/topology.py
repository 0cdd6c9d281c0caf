"""The topology of a job, which rank sits on which node: discovered from the ranks' identities, or declared as a shape."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from commlayer.profiles.counted import counted
from commlayer.profiles.errors import TopologyError

__all__ = ["Topology", "shape_text"]

_EXPECTED = 'expected "NODESxRANKS" such as "2x4", or the ranks of each node such as "3+4"'
# A typing error such as 2x80000000 should be an answer, not a machine that swaps.
_MAX_RANKS = 1 << 20


@dataclass(frozen=True)
class Topology:
    """The ranks of each node. Frozen and hashable.

    Attributes:
        nodes: for each node its ranks in increasing order; nodes are ordered by their lowest rank. A node's ranks need
            not be contiguous.
        hostnames: one name per node, or empty when the topology was declared. Only for people to read: two topologies
            with the same nodes are equal, whatever the nodes are called.
        shape: "2x4" when all nodes are alike, else "3+4". It says how many ranks, not which.
        num_nodes, world_size: the numbers of nodes, and of ranks on all nodes together.
        is_uniform: whether all nodes have the same number of ranks.

    Raises:
        TopologyError: no nodes, an empty node, ranks that are not 0 … world_size-1 each exactly once, an order other
            than the one above, or a number of hostnames that is not the number of nodes.
    """

    nodes: tuple[tuple[int, ...], ...]
    hostnames: tuple[str, ...] = field(default=(), compare=False)
    shape: str = field(init=False, repr=False, compare=False)
    num_nodes: int = field(init=False, repr=False, compare=False)
    world_size: int = field(init=False, repr=False, compare=False)
    is_uniform: bool = field(init=False, repr=False, compare=False)
    _places: dict[int, tuple[int, int]] = field(init=False, repr=False, compare=False)
    """The node of each rank, and its position there."""

    def __post_init__(self) -> None:
        if not self.nodes or not all(self.nodes):
            raise TopologyError(f"expected at least one node and at least one rank on each, got {self.nodes}")
        sizes = [len(node) for node in self.nodes]
        places = {rank: (node, at) for node, ranks in enumerate(self.nodes) for at, rank in enumerate(ranks)}
        if places.keys() != set(range(sum(sizes))):
            raise TopologyError(f"expected each rank from 0 to {sum(sizes) - 1} exactly once, got {self.nodes}")
        if any(list(node) != sorted(node) for node in self.nodes) or list(self.nodes) != sorted(self.nodes):
            raise TopologyError(
                f"expected each node's ranks in increasing order, and the nodes by their lowest rank, got {self.nodes}"
            )
        if self.hostnames and len(self.hostnames) != len(self.nodes):
            raise TopologyError(
                f"expected one hostname for each of {len(self.nodes)} nodes, or none, got {self.hostnames}"
            )
        derived = {
            "shape": shape_text(sizes),
            "num_nodes": len(sizes),
            "world_size": len(places),
            "is_uniform": len(set(sizes)) == 1,
            "_places": places,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Read a declared shape: "2x4" (2 nodes of 4 ranks), or "3+4" (first node 3 ranks, second 4).

        The ranks of a node are contiguous.

        Raises:
            TopologyError: text that is neither.
        """
        compact = text.strip()
        if match := re.fullmatch(r"(\d{1,7})[xX](\d{1,7})", compact, re.ASCII):
            sizes = [int(match[2])] * min(int(match[1]), _MAX_RANKS + 1)  # more nodes are refused as these are
        elif re.fullmatch(r"\d{1,7}(\+\d{1,7})+", compact, re.ASCII):
            sizes = [int(size) for size in compact.split("+")]
        else:
            raise TopologyError(f"topology: {_EXPECTED}, got {text!r}")
        if not sizes or not all(sizes) or sum(sizes) > _MAX_RANKS:
            raise TopologyError(
                f"topology: {_EXPECTED}, with 1 rank or more on every node and at most {_MAX_RANKS} together, got {text!r}"
            )
        edges = accumulate(sizes, initial=0)
        return cls(tuple(tuple(range(first, behind)) for first, behind in pairwise(edges)))

    @classmethod
    def from_identities(cls, identities: Sequence[str]) -> Topology:
        """Build from one identity string per rank, in rank order; ranks with one identity share a node.

        The identities become the hostnames.

        Raises:
            TopologyError: no identities.
        """
        if not identities:
            raise TopologyError("expected one identity per rank, got none: there is no rank to place")
        members: dict[str, list[int]] = {}
        for rank, identity in enumerate(identities):
            members.setdefault(identity, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in members.values()), hostnames=tuple(members))

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node.

        Raises:
            TopologyError: nodes with different numbers of ranks; it names them.
        """
        if not self.is_uniform:
            sizes = ", ".join(f"{_named(self, node)} has {len(ranks)}" for node, ranks in enumerate(self.nodes))
            raise TopologyError(
                f"expected the same number of ranks on every node, got {self.shape}: {sizes}. Start as many ranks on "
                "each node, or use a strategy that does not need equal nodes (flat)"
            )
        return len(self.nodes[0])

    def _place(self, rank: int) -> tuple[int, int]:
        place = self._places.get(rank)
        if place is None:
            raise TopologyError(f"expected a rank from 0 to {self.world_size - 1} (topology {self.shape}), got {rank}")
        return place

    def node_of(self, rank: int) -> int:
        """The index of the node on which ``rank`` sits."""
        return self._place(rank)[0]

    def local_rank_of(self, rank: int) -> int:
        """The position of ``rank`` among the ranks of its node."""
        return self._place(rank)[1]

    def spans(self, ranks: Iterable[int]) -> int:
        """Count the nodes that ``ranks`` touch."""
        return len({self.node_of(rank) for rank in ranks})

    def parts_of(self, ranks: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """Divide ``ranks`` by node: those on each node that has any, in order of the nodes; in a node in the order given."""
        members: dict[int, list[int]] = {}
        for rank in ranks:
            members.setdefault(self.node_of(rank), []).append(rank)
        return tuple(tuple(members[node]) for node in sorted(members))

    def describe(self) -> str:
        """Several lines for people: the shape, then each node with its ranks (as ranges)."""
        uneven = "" if self.is_uniform else ", uneven"
        head = f"{self.shape}: {counted(self.world_size, 'rank')} on {counted(self.num_nodes, 'node')}{uneven}"
        lines = [head]
        for node, ranks in enumerate(self.nodes):
            runs: list[list[int]] = []
            for rank in ranks:
                if runs and rank == runs[-1][1] + 1:
                    runs[-1][1] = rank
                else:
                    runs.append([rank, rank])
            ranges = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
            lines.append(f"  {_named(self, node)}: {counted(len(ranks), 'rank')} ({ranges})")
        return "\n".join(lines)


def _named(topology: Topology, node: int) -> str:
    return f"node {node} ({topology.hostnames[node]})" if topology.hostnames else f"node {node}"


def shape_text(sizes: Sequence[int]) -> str:
    """Write numbers of ranks, one for each node, as "2x4" when all are alike, else as "3+4"."""
    return f"{len(sizes)}x{sizes[0]}" if len(set(sizes)) == 1 else "+".join(map(str, sizes))
