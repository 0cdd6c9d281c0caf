"""Groups of any shape on an emulated cluster: planned from prices, tried where these are uncertain, right to the bit."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commlayer.scheduler.plan import Strategy
from commlayer.testing.plugin import ClusterFactory

pytestmark = pytest.mark.cluster

COUNT = 1 << 16


def start(**environment: str) -> int:
    torch.set_num_threads(1)
    os.environ.update({"COMMLAYER_PROFILE": "emulated-2x4", "COMMLAYER_TRIALS": "off", **environment})
    dist.init_process_group("commlayer", timeout=timedelta(seconds=30))
    return dist.get_rank()


def new_group(all_groups: list[list[int]]) -> Any:
    """This rank's group, of which all are made by all ranks."""
    made = [dist.new_group(ranks) for ranks in all_groups]
    return next(group for group, ranks in zip(made, all_groups, strict=True) if dist.get_rank() in ranks)


def check_sums(group: Any, count: int = COUNT) -> None:
    """All_reduce, reduce_scatter and all_gather of whole numbers are exact, in whatever order they are summed."""
    ranks = dist.get_process_group_ranks(group)
    n, mine = len(ranks), ranks.index(dist.get_rank())
    ramp = torch.arange(float(count)).remainder(64)
    whole = ramp + dist.get_rank()
    dist.all_reduce(whole, group=group)
    assert torch.equal(whole, ramp * n + sum(ranks))
    block = torch.empty(count)
    dist.reduce_scatter_tensor(block, torch.cat([ramp + k for k in range(n)]) + dist.get_rank(), group=group)
    assert torch.equal(block, (ramp + mine) * n + sum(ranks))
    gathered = torch.empty(count * n)
    dist.all_gather_into_tensor(gathered, ramp + dist.get_rank(), group=group)
    assert torch.equal(gathered, torch.cat([ramp + rank for rank in ranks]))


@pytest.mark.parametrize(
    "groups",
    [
        [[0, 2, 4, 6], [1, 3, 5, 7]],  # gradients beside tensor parallelism of two
        [[0, 1, 4, 5], [2, 3, 6, 7]],
        [[0, 1, 2, 4, 5, 6], [3, 7]],
        [[0, 1, 2, 4], [3, 5, 6, 7]],  # 3+1 and 1+3
    ],
)
def test_collectives_of_parts_of_nodes_are_planned_from_a_price(
    emulated_cluster: ClusterFactory, groups: list[list[int]]
) -> None:
    def job() -> tuple[int, list[str]]:
        start()
        group = new_group(groups)
        check_sums(group)
        choices = group._planned.choices
        found = [choices.plan(name, 4 * COUNT * 4) for name in ("all_reduce", "reduce_scatter", "all_gather")]
        return len(dist.get_process_group_ranks(group)), [
            *choices.reasons,
            *(str(plan and plan.name) for plan in found),
        ]

    for size, plans in emulated_cluster(2, 4).run(job):
        assert not [reason for reason in plans if "expected a curve" in reason]
        assert size == 2 or plans[-2].startswith(("hierarchical", "pipelined", "flat_direct"))


def test_plans_that_contend_are_tried_and_every_rank_takes_the_same(emulated_cluster: ClusterFactory) -> None:
    def job() -> tuple[float, float, str]:
        start(COMMLAYER_TRIALS="on")
        group = new_group([[0, 2, 4, 6], [1, 3, 5, 7]])
        for _ in range(2):
            check_sums(group)
        choices = group._planned.choices
        spent = choices.experience.spent_us
        check_sums(group)
        plan = choices.plan("reduce_scatter", 4 * COUNT * 4)
        return spent, choices.experience.spent_us, plan.name if plan else "flat"

    found = emulated_cluster(2, 4).run(job)
    for ranks in (found[0::2], found[1::2]):  # of one group
        assert len(set(ranks)) == 1
        assert 0 < ranks[0][0] == ranks[0][1]  # once


def test_a_forced_plan_and_trials_that_are_off_run_nothing_first(emulated_cluster: ClusterFactory) -> None:
    def job() -> list[float]:
        start(COMMLAYER_PLAN="hierarchical", COMMLAYER_TRIALS="on")
        group = new_group([[0, 2, 4, 6], [1, 3, 5, 7]])
        check_sums(group)
        plan = group._planned.choices.plan("all_reduce", COUNT * 4)
        assert plan.strategy is Strategy.HIERARCHICAL
        return [group._planned.choices.experience.spent_us]

    assert emulated_cluster(2, 4).run(job) == [[0.0]] * 8


def test_ranks_that_disagree_on_trials_hear_of_it(emulated_cluster: ClusterFactory) -> None:
    from commlayer.profiles.errors import DisagreementError

    def job() -> str:
        try:
            start(COMMLAYER_TRIALS="on" if os.environ["RANK"] == "1" else "auto", COMMLAYER_PROFILE="none")
        except DisagreementError as error:
            return str(error)
        return ""

    assert all("COMMLAYER_TRIALS" in text for text in emulated_cluster(1, 2).run(job))
