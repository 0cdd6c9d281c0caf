"""Megatron-Core's groups, told of each other: by a collection such as its own, and by itself where it is installed."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commlayer.integrations import tell_megatron_neighbours
from commlayer.profiles.errors import DisagreementError, GroupError, UsageError
from commlayer.testing.plugin import ClusterFactory

pytestmark = pytest.mark.cluster

TP = [[0, 1], [2, 3], [4, 5], [6, 7]]
DP = [[0, 2, 4, 6], [1, 3, 5, 7]]
EP = [[0, 1, 2, 3], [4, 5, 6, 7]]
EXPERT_DP = [[0, 4], [1, 5], [2, 6], [3, 7]]


def start(profile: str = "emulated-2x4") -> int:
    torch.set_num_threads(1)
    os.environ.update({"COMMLAYER_PROFILE": profile, "COMMLAYER_TRIALS": "off"})
    dist.init_process_group("commlayer", timeout=timedelta(seconds=30))
    return dist.get_rank()


def make(rank: int, groups: list[list[int]]) -> Any:
    """This rank's group, as Megatron makes it: all groups in turn, on all ranks."""
    made = [dist.new_group(ranks) for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)


def test_a_collection_tells_its_groups(emulated_cluster: ClusterFactory) -> None:
    def job() -> tuple[dict[str, int], bool]:
        rank = start()
        made = {"tp": make(rank, TP), "dp": make(rank, DP), "ep": make(rank, EP), "expt_dp": make(rank, EXPERT_DP)}
        made["cp"] = make(rank, [[each] for each in range(8)])  # of one rank: nobody to talk to
        made["dp_cp"] = made["dp"]
        first = dist.new_group([0, 4])
        embedding = first if rank in (0, 4) else dist.GroupMember.NON_GROUP_MEMBER
        collection = SimpleNamespace(**made, pp=None, mp=embedding)
        before = made["expt_dp"].predicted_us("all_reduce", 1 << 20)
        told = tell_megatron_neighbours(collection)
        x = torch.ones(1 << 14)
        dist.all_reduce(x, group=made["dp"])
        assert x[0] == 4
        assert made["tp"].siblings == 2
        return told, bool(made["expt_dp"].predicted_us("all_reduce", 1 << 20) == before)

    for rank, (told, is_same) in enumerate(emulated_cluster(2, 4).run(job)):
        also = {"mp": 1} if rank in (0, 4) else {}
        assert told == {"tp": 2, "dp": 2, "dp_cp": 2, "ep": 1, "expt_dp": 4} | also
        assert is_same  # four siblings is what their shape makes up


def test_ranks_that_disagree_hear_of_it(emulated_cluster: ClusterFactory) -> None:
    """All of them, and before anything is told."""

    def job() -> str:
        rank = start()
        groups = {"tp": make(rank, TP), "dp": make(rank, DP)}
        wrong = {"tp": groups["tp"]} if rank == 3 else groups
        with pytest.raises(DisagreementError) as caught:
            tell_megatron_neighbours(wrong)
        assert groups["tp"].siblings == 0
        swapped = {"tp": groups["dp"], "dp": groups["tp"]} if rank == 0 else groups
        with pytest.raises(DisagreementError, match="ranks disagree on the groups of axis"):
            tell_megatron_neighbours(swapped)
        return str(caught.value)

    found = emulated_cluster(2, 4).run(job)
    assert len(set(found)) == 1
    assert "axis 'dp': rank 1 knows a group of the ranks [1, 3, 5, 7], rank 3 of no group" in found[0]


def test_what_is_no_group_is_refused(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        start("none")
        with pytest.raises(UsageError, match=r"rank \d: expected a process group as tp of .*, got 4"):
            tell_megatron_neighbours({"tp": 4})
        with (
            mock.patch.dict(sys.modules, {"megatron.core.parallel_state": None}),
            pytest.raises(UsageError, match="install megatron-core, or pass the groups"),
        ):
            tell_megatron_neighbours()
        with (
            mock.patch.dict(sys.modules, {"megatron.core.parallel_state": without_groups()}),
            pytest.raises(UsageError, match="call initialize_model_parallel"),
        ):
            tell_megatron_neighbours()

    emulated_cluster(1, 2).run(job)
    with pytest.raises(GroupError, match="init_process_group"):
        tell_megatron_neighbours({})


def without_groups() -> ModuleType:
    """A parallel_state in which nothing is initialised, as Megatron's getters say it."""

    def get() -> None:
        raise AssertionError("tensor model parallel group is not initialized")

    state: Any = ModuleType("megatron.core.parallel_state")
    state.__spec__ = mock.Mock()
    state.get_tensor_model_parallel_group = get
    return state  # type: ignore[no-any-return]


def test_megatrons_own_groups(emulated_cluster: ClusterFactory) -> None:
    pytest.importorskip("megatron.core.parallel_state")

    def job() -> dict[str, int]:
        start()
        from megatron.core import parallel_state  # type: ignore[import-not-found, import-untyped, unused-ignore]

        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=2, expert_model_parallel_size=4, expert_tensor_parallel_size=1
        )
        told = tell_megatron_neighbours()
        parallel_state.destroy_model_parallel()
        return told

    for told in emulated_cluster(2, 4).run(job):
        assert {axis: told[axis] for axis in ("tp", "dp", "dp_cp", "ep", "expt_dp")} == {
            "tp": 2,
            "dp": 2,
            "dp_cp": 2,
            "ep": 1,
            "expt_dp": 4,
        }
