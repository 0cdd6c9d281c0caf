"""Which groups communicate at the same time, told by lists, meshes and the folded mesh."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import await_others
from torch.distributed.device_mesh import init_device_mesh

from commlayer.collectives import GroupCommunicator
from commlayer.integrations import FoldedMesh, TokenDispatcher, tell_neighbours, use_neighbours
from commlayer.profiles.errors import DisagreementError, GroupError, PeerError, UsageError
from commlayer.testing.plugin import ClusterFactory

pytestmark = pytest.mark.cluster


def start(profile: str = "emulated-2x4") -> int:
    torch.set_num_threads(1)
    os.environ.update({"COMMLAYER_PROFILE": profile, "COMMLAYER_TRIALS": "off"})
    dist.init_process_group("commlayer", timeout=timedelta(seconds=30))
    return dist.get_rank()


def siblings(group: Any) -> int:
    return int(group._planned.choices.prices.siblings)


def test_groups_on_one_node_are_counted(emulated_cluster: ClusterFactory) -> None:
    def job() -> list[int]:
        rank = start()
        pairs = [[0, 4], [1, 5], [2, 6], [3, 7]]
        made = [dist.new_group(ranks) for ranks in pairs]
        mine: Any = made[rank % 4]
        seen, times = [siblings(mine)], []
        for known in (pairs, [pairs[rank % 4]]):
            use_neighbours(mine, known)
            seen.append(siblings(mine))
            times.append(mine._planned.choices.prices.predicted_us("all_gather", 1 << 20))
        assert times[1] < times[0] / 2  # alone on the card
        x = torch.ones(1 << 16)
        dist.all_reduce(x, group=mine)
        assert x[0] == 2
        return seen

    assert emulated_cluster(2, 4).run(job) == [[0, 4, 1]] * 8


def test_meshes_tell_their_dimensions(emulated_cluster: ClusterFactory) -> None:
    def job() -> list[int]:
        start()
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        tell_neighbours(mesh)
        seen = [siblings(mesh.get_group("dp")), siblings(mesh.get_group("tp"))]
        with FoldedMesh({"tp": 2, "cp": 1, "pp": 1, "ep": 2, "etp": 1}) as folded:
            seen += [siblings(folded.group("dp")), siblings(folded.group("ep"))]
        return seen

    assert emulated_cluster(2, 4).run(job) == [[2, 2, 2, 2]] * 8


def test_what_was_kept_before_follows(emulated_cluster: ClusterFactory) -> None:
    """A dispatcher decides anew, alike on ranks whose groups have other neighbours; a lane holds by the rate."""

    def job() -> tuple[list[dict[str, float]], list[float]]:
        rank = start()
        mine: Any = [dist.new_group(list(range(first, 8, 2))) for first in (0, 1)][rank % 2]
        etp: Any = [dist.new_group([first, first + 1]) for first in range(0, 8, 2)][rank // 2]
        both = GroupCommunicator(dist.group.WORLD, "ep")
        dispatcher = TokenDispatcher(8, ep=GroupCommunicator(mine, "ep"), etp=GroupCommunicator(etp, "ep"), etp_ep=both)
        decided, rates = [], []
        for siblings in (0, 1, 0):
            if rank % 2:  # of one of the two EP groups: all ranks decide by the slower one
                mine.use_siblings(siblings)
            rates.append(mine._order.lane._bytes_per_s)
            dispatcher.prepare(torch.arange(16).view(8, 2) % 8, like=torch.zeros(8, 256))
            assert dispatcher.decision is not None
            decided.append(dict(dispatcher.decision.kinds_us))
        mine.use_siblings(1)
        dispatcher.prepare(torch.arange(16).view(8, 2) % 8, like=torch.zeros(8, 256))
        assert dispatcher.decision is not None
        return [*decided, dict(dispatcher.decision.kinds_us)], rates

    found = emulated_cluster(2, 4).run(job)
    for decided, _ in found:
        assert decided == found[0][0]
    unsaid, some, again, all_alone = (each["all_to_all"] for each in found[0][0])
    assert unsaid == again
    assert all_alone < some == unsaid
    for rank, (_, rates) in enumerate(found):
        assert rates[0] == rates[2]
        assert (rates[1] > rates[0]) == bool(rank % 2)


@pytest.mark.parametrize("debug", ["off", "detail"])
def test_ranks_that_say_different_numbers_hear_who_did(emulated_cluster: ClusterFactory, debug: str) -> None:
    def job() -> tuple[str, int]:
        os.environ["COMMLAYER_DEBUG"] = debug
        rank = start()
        group: Any = dist.group.WORLD
        group.use_siblings(2)
        work = dist.all_reduce(torch.ones(1 << 12), async_op=True)
        with pytest.raises(DisagreementError) as caught:
            group.use_siblings(3 if rank == 5 else 1)
        work.wait()
        x = torch.ones(1 << 14)
        dist.all_reduce(x)
        assert x[0] == 8
        return str(caught.value), siblings(group)

    for rank, (message, kept) in enumerate(emulated_cluster(2, 4).run(job)):
        assert kept == 2
        if debug == "off":
            assert f"rank {rank}" in message
            assert "use_siblings #3" in message
            assert "ranks 0, 1, 2, 3, 4, 6, 7 say 1, rank 5 says 3" in message
        else:
            assert "rank 0 calls #3 use_siblings(1), but rank 5 calls #3 use_siblings(3)" in message


def test_a_rank_that_does_not_come_is_named(emulated_cluster: ClusterFactory) -> None:
    def job() -> str:
        rank = start("none")
        group: Any = dist.group.WORLD
        dist.all_reduce(torch.ones(1))
        await_others(1)
        if rank == 1:
            os._exit(9)
        with pytest.raises(PeerError) as caught:
            group.use_siblings(1)
        return str(caught.value)

    outcomes = emulated_cluster(1, 3).run(job, check=False, grace_s=30.0)
    for outcome in (outcomes[0], outcomes[2]):
        assert "use_siblings #2" in outcome.value
        assert "rank 1 died" in outcome.value


def test_lists_that_cannot_be_are_refused(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        start("none")
        group: Any = dist.new_group([0, 1])
        with pytest.raises(UsageError, match=r"rank \d: expected groups of the job's ranks without common ones"):
            use_neighbours(group, [[0, 1], [1, 2]])
        with pytest.raises(UsageError, match=r"\[0, 1\] among them"):
            use_neighbours(group, [[0], [1]])
        for wrong in ([[0, 1], [7]], [[0, 1], []]):
            with pytest.raises(UsageError, match="without common ones"):
                use_neighbours(group, wrong)
        for no_lists in (None, [0, 1], [group]):
            with pytest.raises(UsageError, match="expected lists of ranks"):
                use_neighbours(group, no_lists)  # type: ignore[arg-type]
        use_neighbours(group, (ranks for ranks in [[0, 1]]))  # type: ignore[arg-type]
        for number in (-1, 1.5, "a", True, 10**30, None):
            with pytest.raises(UsageError, match="use_siblings expects how many groups"):
                group.use_siblings(number)
        other = dist.new_group([0, 1], backend="gloo")
        with pytest.raises(GroupError, match="needs a group of backend commlayer"):
            use_neighbours(other, [[0, 1]])

    emulated_cluster(1, 2).run(job)
