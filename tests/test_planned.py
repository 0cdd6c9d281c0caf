"""Planned groups, without processes: what a rank of one knows before it has talked to anybody."""

from __future__ import annotations

import pytest
from torch._C._distributed_c10d import HashStore

from commlayer.planned import PlannedGroup
from commlayer.settings import Settings


def rank_of(nodes: list[list[int]], rank: int, plan: str) -> PlannedGroup:
    members = sorted(member for node in nodes for member in node)
    return PlannedGroup(
        name="test",
        rank=rank,
        nodes=nodes,
        global_ranks=members,
        store=HashStore(),
        planner=None,
        settings=Settings(plan=plan),
        timeout_s=1.0,
    )


@pytest.mark.parametrize(("root", "sent"), [(0, (64, 128)), (2, (0, 64))])
def test_what_a_rank_sends_of_a_plan_is_counted_by_link_class(root: int, sent: tuple[int, int]) -> None:
    """128 bytes from the root: it scatters halves inside its node, each crosses the wire once, each node gathers."""
    group = rank_of([[0, 1], [2, 3]], 0, plan="hierarchical")
    broadcast, gather = group.plan("broadcast", 128), group.plan("all_gather", 4 * 256)
    assert broadcast is not None
    assert gather is not None
    assert group.sent_bytes(gather) == (256, 2 * 256)
    assert group.sent_bytes(broadcast, root) == sent
