"""EPLB's placements, after the description that its authors give of them (github.com/deepseek-ai/EPLB): the reference to beat.

It balances computation: experts that are popular get replicas, and copies are packed so that all GPUs have about as many rows.
*Hierarchical*, where nodes divide the groups of experts to which routing is limited: groups are packed to nodes first, then
experts are replicated within each node, then copies packed to the node's GPUs. *Global*: replicas and packing know neither groups
nor nodes. It knows no network, and nothing of where experts lie now.
"""

from __future__ import annotations

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.placement.expert_placement import Array, ExpertPlacement

__all__ = ["balanced_packs", "eplb_placement", "replicated_copies"]


def balanced_packs(loads: Array, num_packs: int) -> Array:
    """Pack items to packs of equally many, the heaviest first, each to the lightest pack with room: the pack of each item.

    Raises UsageError where packs cannot have equally many.
    """
    import heapq

    import numpy as np

    if num_packs < 1 or len(loads) % num_packs:
        raise UsageError(f"{len(loads)} items: expected as many for each of {num_packs} packs")
    room = len(loads) // num_packs
    pack_of = [0] * len(loads)
    lightest = [(0.0, pack) for pack in range(num_packs)]
    held = [0] * num_packs
    numbers = loads.tolist()  # single entries of an array are slow
    for item in np.argsort(-loads, kind="stable").tolist():
        load, pack = heapq.heappop(lightest)
        pack_of[item] = pack
        held[pack] += 1
        if held[pack] < room:
            heapq.heappush(lightest, (load + numbers[item], pack))
    return np.array(pack_of, dtype=np.int64)


def replicated_copies(loads: Array, num_copies: int, most: int) -> Array:
    """Count the copies that each expert gets, [experts]: each further one goes to the expert whose copies have most to do.

    No expert gets more than ``most``: of as many as there are ranks, one more would have nothing to do. Raises UsageError for
    fewer copies than experts, or more than that allows.
    """
    import heapq

    import numpy as np

    if not len(loads) <= num_copies <= len(loads) * most:
        raise UsageError(f"expected 1 to {most} copies of each of {len(loads)} experts, got {num_copies} in all")
    numbers = loads.tolist()  # as above
    copies = [1] * len(numbers)
    busiest = [(-load, expert) for expert, load in enumerate(numbers)]
    heapq.heapify(busiest)
    for _ in range(num_copies - len(loads)):
        while copies[busiest[0][1]] == most:
            heapq.heappop(busiest)
        _, expert = busiest[0]
        copies[expert] += 1
        heapq.heapreplace(busiest, (-numbers[expert] / copies[expert], expert))
    return np.array(copies, dtype=np.int64)


def eplb_placement(
    loads: Array, num_slots: int, num_ranks: int, *, num_nodes: int = 1, num_groups: int = 1
) -> ExpertPlacement:
    """Place experts as EPLB does: hierarchically where ``num_nodes`` divides ``num_groups``, else globally.

    Args:
        loads: [experts], of any unit.
        num_slots: of all ranks together; as many on each.

    Raises:
        UsageError: numbers that do not divide, fewer slots than experts, or so many that a rank would get an expert twice.
    """
    import numpy as np

    experts = len(loads)
    if num_ranks < 1 or num_slots % num_ranks or num_nodes < 1 or num_ranks % num_nodes or experts % num_groups:
        raise UsageError(
            f"expected ranks to divide {num_slots} slots, {num_nodes} nodes to divide {num_ranks} ranks, and {num_groups} "
            f"groups to divide {experts} experts"
        )
    if num_groups % num_nodes:
        num_nodes = num_groups = 1
    size = experts // num_groups
    node_of_group = balanced_packs(loads.reshape(num_groups, size).sum(1), num_nodes)
    slots = []
    for node in range(num_nodes):
        groups = np.flatnonzero(node_of_group == node)
        members = (groups[:, None] * size + np.arange(size)).reshape(-1)
        copies = replicated_copies(loads[members], num_slots // num_nodes, num_ranks // num_nodes)
        experts_of_copies = np.repeat(members, copies)
        loads_of_copies = np.repeat(loads[members] / copies, copies)
        rank_of = balanced_packs(loads_of_copies, num_ranks // num_nodes)
        on_ranks = experts_of_copies[np.argsort(rank_of, kind="stable")].reshape(num_ranks // num_nodes, -1)
        if not _separate(on_ranks):
            # Dealt out in turn: no expert has more copies than there are ranks.
            on_ranks = experts_of_copies.reshape(-1, num_ranks // num_nodes).T
        slots.append(on_ranks)
    return ExpertPlacement(np.concatenate(slots), experts)


def _separate(slots: Array) -> bool:
    """Exchange copies in place until no rank has an expert twice: a second one would do nothing there. Whether that went.

    The description does not rule that out; a packing that is a little less even costs less than a copy without use.
    """
    import numpy as np

    ordered = np.sort(slots, axis=1)
    for rank in np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(1)):
        row = slots[rank]
        for slot in range(len(row)):
            if not (row[:slot] == row[slot]).any():
                continue
            for other in np.roll(np.arange(len(slots)), -rank - 1)[:-1]:
                takes = [at for at in range(len(row)) if slots[other, at] not in row]
                if takes and row[slot] not in slots[other]:
                    row[slot], slots[other, takes[0]] = slots[other, takes[0]], row[slot]
                    break
            else:
                return False
    return True
