"""Parts of experts that spill, and the rows that are sent for them: a helper takes those of its own rank first, then its node's.

So :func:`~commlayer.scheduler.placement.spilling.spilled_cells` shares rows out; here, where only loads are known, every rank is
taken to send as many rows to each copy of an expert.
"""

from __future__ import annotations

from commlayer.scheduler.placement.expert_placement import Array, ExpertPlacement

__all__ = ["Spilled", "rows_on_the_way"]

Spilled = tuple[tuple[int, int, int, float], ...]
"""Experts' parts that are computed elsewhere: (expert, from rank, to rank, part of its rows)."""


def rows_on_the_way(
    counts: Array, placement: ExpertPlacement, spilled: Spilled, node_of: Array, inside_weight: float
) -> float:
    """Find the rows of the rank that most is sent to, as those of an exchange in which every rank sends it as many.

    Rows of a rank's own tokens are not sent. ``inside_weight``: what a row from the same node counts, where one from another
    node counts 1.
    """
    import numpy as np

    num_ranks = placement.num_ranks
    num_nodes = int(node_of[-1]) + 1
    each = num_ranks // num_nodes
    experts, ranks = placement.held
    rows = np.bincount(ranks, counts[experts] / placement.logcnt[experts], minlength=num_ranks)
    inside, across = (rows * ((each - 1) / num_ranks)).tolist(), (rows * (1 - each / num_ranks)).tolist()
    nodes = node_of.tolist()
    parts: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for expert, source, target, part in spilled:
        parts.setdefault((expert, source), []).append((target, float(counts[expert]) * part))
    for (expert, source), helpers in parts.items():
        _take(inside, across, float(counts[expert]) / int(placement.logcnt[expert]), source, helpers, nodes, each)
    weights = (each - 1) * inside_weight + (num_ranks - each)
    most = max(near * inside_weight + far for near, far in zip(inside, across, strict=True))
    rows_of_busiest = float(most) * num_ranks / max(weights, 1e-9)
    return max(rows_of_busiest, min(1.0, float(rows.max())))  # the call is made whatever it sends


def _take(
    inside: list[float],
    across: list[float],
    rows: float,
    source: int,
    helpers: list[tuple[int, float]],
    node_of: list[int],
    each: int,
) -> None:
    """Move rows of a copy on ``source``, of which every rank has as many, to its ``helpers``, in place."""
    of_rank, home = rows / len(node_of), node_of[source]
    rest: dict[int, float] = {}
    wanted: dict[int, float] = {}
    for target, moved in helpers:
        node, own = node_of[target], min(moved, of_rank)
        rest[node] = rest.get(node, of_rank * each) - own
        wanted[node] = wanted.get(node, 0.0) + moved - own
    near = {node: min(wanted[node], max(rest[node], 0.0)) for node in wanted}
    for target, moved in helpers:
        node, own = node_of[target], min(moved, of_rank)
        part = near[node] / wanted[node] if wanted[node] else 0.0
        inside[target] += (moved - own) * part
        across[target] += (moved - own) * (1 - part)
    # What is left at home: less of its node by what helpers there took, less of others by what helpers took elsewhere.
    at_home = near.get(home, 0.0) + sum(min(moved, of_rank) for target, moved in helpers if node_of[target] == home)
    inside[source] -= min(at_home, of_rank * (each - 1))
    elsewhere = sum(moved for _, moved in helpers) - at_home
    across[source] -= min(max(elsewhere, 0.0), of_rank * (len(node_of) - each))
