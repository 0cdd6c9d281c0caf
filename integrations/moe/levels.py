"""Two-level dispatch: a token goes once to each node that holds any of its experts, and there to the ranks that hold them.

Between nodes it goes over the rail, to the rank of the same place on that node, which passes it on: once to each rank of its node
that holds any of its experts. Those ranks make the rows of their experts, which are the same rows in the same order as a flat
all_to_all brings. The way back sums at each stop: over the experts of a rank, over the ranks of a node, over nodes.

Shapes: T tokens of this rank, K choices of each, E experts, H hidden; D rows that this rank holds to pass on (tokens of its rail
with an expert on this node), A rows that arrive here (tokens with an expert of this rank), R rows of its experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.moe.row_maps import RowMap, make_row_map
from commlayer.profiles.errors import GroupError

__all__ = ["Levels", "RowsOnLevel", "TwoLevelWay", "two_level_way"]

_MOST_KEPT = 64


@dataclass(frozen=True, slots=True)
class Levels:
    """The two levels of an EP group, ``rank`` being this one: ``nodes``, its ranks on each node, equally many, and several of
    both. ``experts``: how many each rank holds.
    """

    nodes: tuple[tuple[int, ...], ...]
    rank: int
    experts: tuple[int, ...]

    @classmethod
    def of(cls, ep: GroupCommunicator, etp: GroupCommunicator, experts: tuple[int, ...]) -> Levels | None:
        """The levels of these groups, on all their ranks alike; None where they have not two, or two that differ."""
        return None if cls.objection(ep, etp) else cls(ep.nodes, ep.rank, experts)

    @staticmethod
    def objection(ep: GroupCommunicator, etp: GroupCommunicator) -> str:
        """Why a dispatch over these groups cannot go in two levels; empty where it can."""
        shape = ep.shape
        if etp.size > 1:
            return f"ETP has {etp.size} ranks: a row that is passed on inside a node has no shards to be gathered"
        if len(shape) == 1:
            return f"the {ep.size} ranks of EP lie on one node"
        if max(shape) == 1:
            return f"each of {len(shape)} nodes holds one rank of EP: inside them there is nobody to pass a token on to"
        if len(set(shape)) > 1:
            return f"the nodes hold {' and '.join(map(str, shape))} ranks of EP: rails need as many on every node"
        return ""

    @classmethod
    def require(cls, ep: GroupCommunicator, etp: GroupCommunicator) -> None:
        """Raises GroupError where a dispatch over these groups cannot go in two levels."""
        objection = cls.objection(ep, etp)
        if objection:
            raise GroupError(
                f"rank {ep.ranks[ep.rank]}: a dispatch of kind two_level needs several nodes, and on each as many ranks of "
                f"EP, at least 2; here {objection}: take kind all_to_all, or auto"
            )

    @property
    def width(self) -> int:
        """The number of ranks on each node."""
        return len(self.nodes[0])

    @property
    def here(self) -> int:
        """The number of this rank's node."""
        return next(a for a, members in enumerate(self.nodes) if self.rank in members)

    @property
    def rail(self) -> tuple[int, ...]:
        """The ranks of this one's place, on each node."""
        rail = self.nodes[self.here].index(self.rank)
        return tuple(members[rail] for members in self.nodes)

    def reached(self, indices: torch.Tensor) -> torch.Tensor:
        """Count this rank's tokens ``indices`` [T, K] that have any expert on each node, and on each rank: [nodes + EP]."""
        size, m = len(self.experts), len(self.nodes)
        ranks = tuple(range(size))
        table = _table(self.experts, ranks, indices.device)
        order = _in_order_of_nodes(self.nodes, indices.device)
        by_rank = _hits(table[indices], size)
        by_node = by_rank.index_select(1, order).view(-1, m, size // m).any(2)
        return torch.cat([by_node, by_rank], 1).sum(0)


@dataclass(frozen=True, slots=True)
class RowsOnLevel:
    """The rows that ranks exchange on one level of a call: ``crossing``, the most that any rank sends to others or receives from
    them; ``whole``, the buffer of a rank that sends so many in an even exchange among the ``ranks`` of a rail, or a node. (On
    rails it is also that of an even exchange over the whole group, of which as many cross between nodes.)
    """

    crossing: int
    ranks: int

    @property
    def whole(self) -> int:
        return -(-self.crossing * self.ranks // (self.ranks - 1))

    @classmethod
    def of_call(cls, levels: Levels, reached: torch.Tensor) -> tuple[RowsOnLevel, RowsOnLevel]:
        """Count rows on rails, and inside nodes. ``reached`` [EP, nodes + EP]: :meth:`Levels.reached` of each rank, which all
        ranks know: so they find the same here."""
        m, width = len(levels.nodes), levels.width
        counts, ranks = reached.numpy(), np.array(levels.nodes)  # [node, place]
        rails = counts[:, :m][ranks] * ~np.eye(m, dtype=bool)[:, None]  # [node, place, to node]
        # The rank of a place passes on what its whole rail has for each rank of its node: [node, from place, to place]
        inside = counts[:, m:][ranks].sum(0)[:, ranks].swapaxes(0, 1) * ~np.eye(width, dtype=bool)
        most = [
            max(int(rows.sum(2).max()), int(rows.sum(sent).max())) for rows, sent in ((rails, 0), (inside, 1))
        ]  # what each sends, and what each receives
        return cls(most[0], m), cls(most[1], width)


@dataclass(frozen=True, slots=True, eq=False)
class TwoLevelWay:
    """The way of a call's tokens in two levels, but for the rows that experts get of what arrives.

    ``rails``: of this rank's tokens, which go to which node; ``inside``: of the D rows that it holds, which go to which rank of
    its node. ``…_send``, ``…_receive``: rows for each EP rank, and from each. ``weights``: where in the weights [ΣT · K] of all
    ranks those of the A rows lie, [A, K']. ``…_rows``: see :class:`RowsOnLevel`.
    """

    rails: RowMap
    rail_send: tuple[int, ...]
    rail_receive: tuple[int, ...]
    inside: RowMap
    inside_send: tuple[int, ...]
    inside_receive: tuple[int, ...]
    weights: torch.Tensor
    rail_rows: RowsOnLevel
    inside_rows: RowsOnLevel


def two_level_way(
    levels: Levels,
    everyones: torch.Tensor,
    tokens: Sequence[int],
    sizes: tuple[RowsOnLevel, RowsOnLevel],
    capacity: int | None,
) -> tuple[TwoLevelWay, RowMap]:
    """Find the way of a call, and the rows [R] of this rank's experts in what arrives here [A].

    ``everyones`` [ΣT, K]: the experts that the tokens of all ranks chose, −1 for none; ``tokens``: how many each rank has.
    ``capacity``: each source has exactly so many rows for each expert, as in a flat exchange.
    """
    size, device = len(levels.experts), everyones.device
    by_source = everyones.split(list(tokens))
    node_of = tuple(a for k in range(size) for a, members in enumerate(levels.nodes) if k in members)
    # Out: this rank's tokens, once for each node.
    to_nodes = _hits(_table(levels.experts, node_of, device)[by_source[levels.rank]], len(levels.nodes))
    # Held: the tokens of the rail that have an expert on this node, in the order of nodes; once for each rank here.
    place_of = tuple(levels.nodes[levels.here].index(k) if node_of[k] == levels.here else -1 for k in range(size))
    places = _table(levels.experts, place_of, device)
    held = [_hits(places[by_source[source]], levels.width) for source in levels.rail]
    held = [to_ranks[to_ranks.any(1)] for to_ranks in held]
    to_ranks = torch.cat(held)
    # Arriving: from each rank of this node what it holds, of those the tokens that have an expert of this rank.
    order = [members[rail] for rail in range(levels.width) for members in levels.nodes]
    weights, rows, arriving = _arriving(levels, by_source, order, capacity)
    per_place = [sum(arriving[at : at + len(levels.nodes)]) for at in range(0, size, len(levels.nodes))]
    return (
        TwoLevelWay(
            _row_map(to_nodes),
            _spread(to_nodes.sum(0).tolist(), levels.rail, size),
            _spread([rows_of.shape[0] for rows_of in held], levels.rail, size),
            _row_map(to_ranks),
            _spread(to_ranks.sum(0).tolist(), levels.nodes[levels.here], size),
            _spread(per_place, levels.nodes[levels.here], size),
            weights,
            *sizes,
        ),
        rows,
    )


def _arriving(
    levels: Levels, by_source: Sequence[torch.Tensor], order: Sequence[int], capacity: int | None
) -> tuple[torch.Tensor, RowMap, list[int]]:
    """Map what arrives here, sources in ``order``: where its weights lie, the rows that this rank's experts get of it, sorted by
    expert, then source, then token, and how many come from each source."""
    size, count = len(levels.experts), levels.experts[levels.rank]
    first = sum(levels.experts[: levels.rank])
    starts = [sum(part.shape[0] for part in by_source[:source]) for source in range(size)]
    keys, tokens, arriving = [], [], []
    for source in order:
        local = by_source[source] - first
        local = torch.where((local >= 0) & (local < count), local, -1)
        is_here = (local >= 0).any(1)
        local = local[is_here]
        keys.append(torch.where(local >= 0, local * size + source, -1))
        tokens.append(is_here.nonzero().squeeze(1) + starts[source])
        arriving.append(local.shape[0])
    # Few of a token's choices are here: the combine is to look at no more columns than that.
    key, choices = torch.cat(keys).sort(dim=1, descending=True, stable=True)
    most = int((key >= 0).sum(1).max()) if key.numel() else 0
    top_k = key.shape[1]
    weights = torch.cat(tokens).unsqueeze(1) * top_k + choices[:, :most]
    return weights, make_row_map(key[:, :most].contiguous(), count * size, capacity), arriving


@lru_cache(maxsize=_MOST_KEPT)
def _in_order_of_nodes(nodes: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([rank for members in nodes for rank in members], device=device)


@lru_cache(maxsize=_MOST_KEPT)
def _table(experts: tuple[int, ...], value_of_rank: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[E + 1]: the value of the rank that holds each expert, and −1 for expert −1; every call looks into it."""
    values = torch.tensor([*value_of_rank, -1]).repeat_interleave(torch.tensor([*experts, 1]))
    return values.to(device)


def _hits(places: torch.Tensor, count: int) -> torch.Tensor:
    """Whether any of a token's choices is at each of ``count`` places: [T, K] → [T, count]. −1: nowhere."""
    hits = torch.zeros(places.shape[0], count + 1, dtype=torch.bool, device=places.device)
    return hits.scatter_(1, places.masked_fill(places < 0, count), True)[:, :count]


def _row_map(hits: torch.Tensor) -> RowMap:
    """The rows of tokens that go once to each place: sorted by place, then token."""
    columns = torch.arange(hits.shape[1], device=hits.device).expand_as(hits)
    return make_row_map(torch.where(hits, columns, -1), hits.shape[1])


def _spread(counts: Sequence[int], ranks: Sequence[int], size: int) -> tuple[int, ...]:
    """``counts`` of ``ranks``, among all of a group of ``size``."""
    spread = [0] * size
    for rank, count in zip(ranks, counts, strict=True):
        spread[rank] = count
    return tuple(spread)
