"""A slow way between two nodes, on an emulated cluster: found by the probe, gone round, and no bit is another one for it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from linear_profiles import linear_profile

from commlayer.engine.group_plans import Choices
from commlayer.profiles.links import SlowLink
from commlayer.scheduler import Strategy
from commlayer.scheduler.decision import Planner
from commlayer.scheduler.named_plans import parse_plan
from commlayer.scheduler.slow_pairs import is_avoided, ring_order
from commlayer.scheduler.traffic import SlowPair
from commlayer.settings import Settings
from commlayer.testing.plugin import ClusterFactory

pytestmark = pytest.mark.cluster
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")


def start(**environment: str) -> Any:
    torch.set_num_threads(1)
    os.environ.update({"COMMLAYER_TRIALS": "off", **environment})
    dist.init_process_group("commlayer", timeout=timedelta(seconds=60))
    return dist.group.WORLD


def check(group: Any, count: int, dtype: torch.dtype) -> None:
    """All three collectives of whole numbers, which are exact in whatever order they are added; ``count`` elements a rank."""
    ranks = dist.get_process_group_ranks(group)
    n, me, rank = len(ranks), ranks.index(dist.get_rank()), dist.get_rank()
    ramp = torch.arange(count).remainder(16)
    whole = (ramp + rank).to(dtype)
    dist.all_reduce(whole, group=group)
    assert torch.equal(whole, (ramp * n + sum(ranks)).to(dtype))
    given = torch.cat([ramp + k + rank for k in range(n)]).to(dtype)
    block, kept = torch.empty(count, dtype=dtype), given.clone()
    dist.reduce_scatter_tensor(block, given, group=group)
    assert torch.equal(block, ((ramp + me) * n + sum(ranks)).to(dtype))
    assert torch.equal(given, kept)
    gathered = torch.empty(count * n, dtype=dtype)
    dist.all_gather_into_tensor(gathered, (ramp + rank).to(dtype), group=group)
    assert torch.equal(gathered, torch.cat([ramp + each for each in ranks]).to(dtype))


@pytest.mark.parametrize(
    "groups",
    [
        [[0, 1, 2, 3, 4, 5, 6, 7]],
        [[0, 2, 4, 6], [1, 3, 5, 7]],  # one rank of every node
        [[0, 1, 2, 4, 6, 7], [3, 5]],  # 2+1+1+2
        [[1, 2, 3, 5, 6], [0, 4, 7]],  # 1+2+1+1, and three nodes
    ],
)
def test_blocks_come_to_their_place_in_any_order_of_nodes(
    emulated_cluster: ClusterFactory, groups: list[list[int]]
) -> None:
    def job() -> set[str]:
        start(COMMLAYER_PROFILE="none", COMMLAYER_PLAN="ring")
        made = [dist.new_group(ranks) for ranks in groups]
        group: Any = next(each for each, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks)
        choices = group._planned.choices
        last = len(choices.prices.shape) - 1
        for plan, slow_pairs in (
            ("ring:3", ()),
            ("ring", ((0, 1, 0.25),)),
            ("ring:3", ((0, 1, 0.25), (last - 1, last, 0.5))[: last - 1]),
        ):
            choices._forced, choices.prices.slow_pairs = parse_plan(plan), slow_pairs
            choices._plans.clear()
            for count, dtype in (
                (1, torch.float32),
                (10_007, torch.float32),
                (4097, torch.int32),
                (999, torch.bfloat16),
            ):
                check(group, count, dtype)
        found = {choices.plan(name, 4 * 10_007 * choices.prices.size) for name in COLLECTIVES}
        return {each.name if each else "flat" for each in found}

    found = emulated_cluster(4, 2).run(job)
    assert found[groups[0][0]] == {"ring×3"}


def planned_round(slow: Iterable[SlowLink], pairs: tuple[SlowPair, ...]) -> list[str]:
    """Decide about each collective, on links that are slow in these places and of known times elsewhere; return the reasons.

    Of what a busy machine measures, all times are its processors', and no plan is better than another.
    """
    slowest = min(link.rate for link in slow)
    profile = linear_profile("4x2", direct=max(1.0, 1 / slowest / 3), ring=1 / slowest, slow=tuple(slow))
    choices = Choices((2,) * 4, Planner(profile), Settings(), slow_pairs=pairs)
    assert choices.prices.planner is not None
    decisions = [choices.prices.planner.decide(choices.prices.traffic(name, 8 << 20)) for name in COLLECTIVES]
    assert [each.plan.strategy for each in decisions] == [Strategy.RING] * 3
    return [each.reason() for each in decisions]


def test_a_slow_pair_is_found_and_gone_round(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    def job() -> tuple[str, tuple[int, ...], list[str]]:
        group = start(COMMLAYER_PROFILE="auto", COMMLAYER_CACHE=str(tmp_path))
        choices = group._planned.choices
        slow = choices.prices.job_planner.profile.slow_links
        links = ", ".join(map(str, slow))
        orders = []
        for name in COLLECTIVES:
            traffic = choices.prices.traffic(name, 8 << 20)
            assert is_avoided(traffic, (0, 1))
            orders.append(ring_order(traffic))
        reasons = planned_round(slow, choices.prices.slow_pairs)
        check(group, 100_003, torch.float32)  # by whatever plan seemed best
        choices._forced = parse_plan("ring")
        choices._plans.clear()
        check(group, 10_007, torch.float32)
        assert choices.plan("all_reduce", 8 << 20).strategy is Strategy.RING
        near: Any = [dist.new_group(ranks) for ranks in ([0, 1, 2, 3], [4, 5, 6, 7])][dist.get_rank() // 4]
        assert (near._planned.choices.prices.slow_pairs != ()) == (dist.get_rank() < 4 or "2 and 3" in links)
        (order,) = set(orders)
        return links, order, reasons

    cluster = emulated_cluster(4, 2, inter="400mbit")
    if not cluster.shaped:
        pytest.skip("links are not shaped here: no pair is slow")
    cluster.shape_pair(0, 1, "20mbit")
    found = cluster.run(job, timeout_s=120.0)
    assert len({each[:2] for each in found}) == 1
    for links, order, reasons in found:
        assert "nodes 0 and 1 have" in links
        for reason in reasons:
            assert f"node order {'-'.join(map(str, order))} avoids the slow pair 0-1" in reason
