"""Several groups of the backend at once, and what is agreed when they are made."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from commlayer.backend.patches import answer_to
from commlayer.measure import calibrate
from commlayer.profiles.errors import CollectiveTimeoutError, DisagreementError
from commlayer.profiles.profile import read_profile
from commlayer.testing.plugin import ClusterFactory

pytestmark = pytest.mark.cluster

COUNT = 40_000


def start(timeout_s: float = 15.0, **environment: str) -> int:
    torch.set_num_threads(1)
    os.environ.update({"COMMLAYER_PLAN": "hierarchical", **environment})
    dist.init_process_group("commlayer", timeout=timedelta(seconds=timeout_s))
    return dist.get_rank()


def test_groups_that_connect_on_several_threads_do_not_wait_for_each_other(emulated_cluster: ClusterFactory) -> None:
    """Their first planned calls are asynchronous, and the main thread makes another group meanwhile."""

    def job() -> None:
        start()
        groups = [dist.new_group([0, 1, 2, 3]) for _ in range(4)]
        tensors = [torch.ones(COUNT) for _ in groups]
        works: list[Any] = [dist.all_reduce(x, group=g, async_op=True) for x, g in zip(tensors, groups, strict=True)]
        dist.new_group([0, 1, 2, 3])
        for work in works:
            work.wait()
        assert all(torch.equal(x, torch.full((COUNT,), 4.0)) for x in tensors)

    emulated_cluster(2, 2).run(job)


def test_operators_that_ask_gloo_themselves_do_not_meet_what_is_queued(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        rank = start()
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        for _ in range(20):
            tensors = [torch.ones(COUNT) for _ in range(4)]
            works: list[Any] = [dist.all_reduce(x, async_op=True) for x in tensors]
            out = torch.empty(400)
            part = torch.full((100,), float(rank))
            gathered = torch.ops._c10d_functional.all_gather_into_tensor_out(part, 4, name, out=out)
            torch.ops._c10d_functional.wait_tensor(gathered)
            for work in works:
                work.wait()
            assert torch.equal(out, torch.arange(4.0).repeat_interleave(100))
            assert all(x[0] == 4 for x in tensors)

    emulated_cluster(2, 2).run(job)


def test_torchs_timeout_of_a_group_reaches_planned_calls(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        rank = start(timeout_s=30.0)
        x = torch.ones(COUNT)
        dist.all_reduce(x)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
        if rank == 3:
            return
        with pytest.raises(CollectiveTimeoutError, match="within 1 s"):
            dist.all_reduce(x)

    emulated_cluster(2, 2).run(job)


def test_overlapping_splits_find_each_other(emulated_cluster: ClusterFactory) -> None:
    """A rank of two splits has made another number of them than its peers."""

    def job() -> float:
        rank = start()
        world: Any = dist.group.WORLD
        total = 0.0
        for members in ([0, 1], [1, 2], [2, 3]):
            if rank in members:
                group = world.split_group(members)
                x = torch.ones(4)
                group.allreduce([x]).wait()
                total += x[0].item()
        return total

    assert emulated_cluster(2, 2).run(job) == [2.0, 4.0, 4.0, 2.0]


def test_parts_of_a_job_probe_by_themselves(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    """The default group is Gloo's; ranks are in different numbers of ours, and each of them measures."""

    def job() -> list[str]:
        torch.set_num_threads(1)
        os.environ.update(COMMLAYER_PROFILE="auto", COMMLAYER_CACHE=str(tmp_path))
        dist.init_process_group("gloo")
        dist.new_group([0, 1], backend="commlayer")
        group = dist.new_group([0, 1, 2, 3], backend="commlayer")
        x = torch.ones(1 << 20)
        dist.all_reduce(x, group=group)
        assert x[0] == 4
        return sorted(path.name.partition("-")[0] for path in tmp_path.iterdir())

    assert emulated_cluster(2, 2).run(job)[0] == ["1x2", "2x2"]


def test_a_probe_is_kept_and_found_again(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    cluster = emulated_cluster(1, 2)

    def job() -> str:
        torch.set_num_threads(1)
        os.environ.update(COMMLAYER_PROFILE="auto", COMMLAYER_CACHE=str(tmp_path / "new"))
        calibrate.why_stale = lambda *_: ""  # type: ignore[attr-defined]  # how busy the machine is now is not the question
        dist.init_process_group("commlayer")
        group: Any = dist.group.WORLD
        return str(group._planned.choices.prices.planner.profile.fingerprint)

    first, second = cluster.run(job), cluster.run(job)
    assert len({*first, *second}) == 1
    (kept,) = (tmp_path / "new").glob("*.json")
    kept.write_text("damaged", encoding="utf-8")
    third = cluster.run(job)
    assert len(set(third)) == 1
    assert third[0] != first[0]


def test_a_probe_is_found_by_a_job_whose_hosts_have_other_names_and_checked(
    emulated_cluster: ClusterFactory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Hosts have other names, as the pods of a Kubernetes job have each time."""
    cluster = emulated_cluster(2, 2)

    def job(pod: str) -> str:
        torch.set_num_threads(1)
        os.environ.update(COMMLAYER_PROFILE="auto", COMMLAYER_CACHE=str(tmp_path / "new"))
        name = f"{pod}-{socket.gethostname()}"
        socket.gethostname = lambda: name
        if (
            pod == "second"
        ):  # whether links take as long as they did on a machine that is busy otherwise is not the question
            calibrate.why_stale = lambda *_: ""  # type: ignore[attr-defined]
        dist.init_process_group("commlayer")
        group: Any = dist.group.WORLD
        assert group._planned.choices.prices.planner.profile.topology == "2x2"
        return str(group._planned.choices.prices.planner.profile.fingerprint)

    first, second = cluster.run(job, "first"), cluster.run(job, "second")
    assert len({*first, *second}) == 1
    (kept,) = (tmp_path / "new").glob("*.json")
    profile = read_profile(kept)
    faster = [
        msgspec.structs.replace(curve, time_us=tuple(time / 1000 for time in curve.time_us), p50_us=(), p99_us=())
        for curve in profile.curves
    ]
    profile.replace(curves=faster).save(kept)  # as if the network had been a thousand times as fast
    capfd.readouterr()
    third = cluster.run(job, "third")
    assert len(set(third)) == 1
    assert read_profile(kept).fingerprint == third[0] != first[0]
    assert capfd.readouterr().err.count("does not hold any more and is measured again") == 1


def test_a_user_without_a_home_only_keeps_nothing(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        torch.set_num_threads(1)

        def nowhere() -> Path:
            raise RuntimeError("Could not determine home directory.")

        Path.home = nowhere  # type: ignore[method-assign]
        os.environ.pop("XDG_CACHE_HOME", None)
        os.environ["COMMLAYER_PROFILE"] = "auto"
        dist.init_process_group("commlayer")
        x = torch.ones(COUNT)
        dist.all_reduce(x)
        assert x[0] == 2

    emulated_cluster(1, 2).run(job)


def test_ranks_that_differ_in_what_makes_groups_are_told(emulated_cluster: ClusterFactory) -> None:
    def job() -> str:
        intra = "gloo" if os.environ["RANK"] == "1" else "shared"
        with pytest.raises(DisagreementError) as caught:
            start(COMMLAYER_INTRA=intra)
        return str(caught.value)

    for text in emulated_cluster(1, 2).run(job):
        assert "COMMLAYER_INTRA" in text
        assert "rank 1" in text


def test_another_name_reaches_device_meshes(emulated_cluster: ClusterFactory) -> None:
    def job() -> str:
        from torch.distributed.device_mesh import init_device_mesh

        torch.set_num_threads(1)
        os.environ["COMMLAYER_PROFILE"] = "none"
        answer_to("gloo")
        init_device_mesh("cpu", (2,))
        return str(dist.get_backend())

    assert emulated_cluster(1, 2).run(job) == ["commlayer"] * 2
