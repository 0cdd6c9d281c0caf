"""A peer that sends a pickle, garbage or a false length where ranks tell each other who they are: nothing of it is run."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import HALF_AN_HOUR
from synthetic_profiles import synthetic_profile
from torch._C._distributed_c10d import AllgatherOptions

from commlayer import Communicator, discover_topology
from commlayer.agree import tree
from commlayer.backend import world
from commlayer.integrations.groups import planned_group
from commlayer.integrations.mesh import FoldedMesh
from commlayer.measure.all_ranks import AllRanks, ProfileText
from commlayer.measure.benchmark import world_groups
from commlayer.testing.plugin import ClusterFactory

pytestmark = pytest.mark.cluster

HOSTILE = 3


class Opens:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.path), "w")


def speak(group: Any, words: bytes, announced: int | None = None) -> None:
    """The frame that a gather puts on the wire, with any bytes. ``announced``: a length instead of theirs, and then nothing."""
    size = group.size()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    mine = len(words) if announced is None else announced
    group.allgather([lengths], [torch.tensor([mine], dtype=torch.int64)]).wait()
    if announced is not None:
        return
    padded = torch.zeros(max(int(length) for length in lengths), dtype=torch.uint8)
    padded[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    group.allgather([[torch.empty_like(padded) for _ in range(size)]], [padded]).wait()


def speak_on(groups: list[Any], words: bytes, announced: int | None = None) -> None:
    for group in groups:
        speak(group, words, announced)


def honest_communicator() -> tuple[Callable[[], object], list[Any]]:
    """Making one, and the groups over which a rank speaks for that."""
    dist.init_process_group("gloo")
    ep_group, tp_group = world_groups(discover_topology())
    profile = synthetic_profile(nodes=2, ranks_per_node=2)
    return lambda: Communicator(ep_group, tp_group, profile=profile, timeout_s=HALF_AN_HOUR), [tp_group, ep_group]


def over_the_world(task: Callable[[], object]) -> Callable[[], tuple[Callable[[], object], list[Any]]]:
    def start() -> tuple[Callable[[], object], list[Any]]:
        dist.init_process_group("gloo")
        return task, [dist.group.WORLD]

    return start


def honest_planned_group() -> tuple[Callable[[], object], list[Any]]:
    dist.init_process_group("gloo")
    group: Any = dist.new_group([0, 1, 2, 3])
    return lambda: planned_group(group), [dist.group.WORLD]


PLACES = {
    "Communicator": honest_communicator,
    "FoldedMesh": over_the_world(lambda: FoldedMesh({"tp": 2})),
    "planned_group": honest_planned_group,
    "topology": over_the_world(discover_topology),
}


def outcome(task: Callable[[], object]) -> tuple[str, str]:
    try:
        task()
    except Exception as error:  # noqa: BLE001  the tests ask which it was
        return type(error).__name__, str(error)
    return "nothing", ""


def check(found: list[tuple[str, str]], culprit: int, *words: str) -> None:
    for rank, (kind, text) in enumerate(found):
        if rank == culprit:
            continue
        assert kind == "DisagreementError", (rank, kind, text)
        for word in (f"what rank {culprit} says cannot be read", "start the same commlayer on all ranks", *words):
            assert word in text, (rank, text)


@pytest.mark.parametrize("place", PLACES)
def test_a_pickle_is_refused_and_not_run(emulated_cluster: ClusterFactory, tmp_path: Path, place: str) -> None:
    trap = tmp_path / "made by a peer"

    def job() -> tuple[str, str]:
        torch.set_num_threads(1)
        task, groups = PLACES[place]()
        if dist.get_rank() == HOSTILE:
            task = partial(speak_on, groups, pickle.dumps(Opens(trap)))
        return outcome(task)

    found = emulated_cluster(2, 2).run(job)
    assert not trap.exists(), "a rank ran what its peer sent"
    check(found, HOSTILE, "bytes")


def test_a_pickle_in_place_of_a_signature_is_refused_and_not_run(
    emulated_cluster: ClusterFactory, tmp_path: Path
) -> None:
    """The comparison of calls of COMMLAYER_DEBUG=detail, whose messages have one length."""
    trap = tmp_path / "made by a peer"

    def job() -> tuple[str, str]:
        torch.set_num_threads(1)
        os.environ["COMMLAYER_DEBUG"] = "detail"
        make, _ = honest_communicator()
        communicator: Any = make()
        if dist.get_rank() < HOSTILE:
            return outcome(lambda: communicator.all_to_all(torch.zeros(2, 4)))
        words, told = pickle.dumps(Opens(trap)), torch.zeros(1024, dtype=torch.uint8)
        told[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        communicator._signatures.gloo._allgather_base(told.new_empty(4096), told, AllgatherOptions()).wait()
        return "", ""

    for kind, text in emulated_cluster(2, 2).run(job)[:HOSTILE]:
        assert kind == "DisagreementError", text
        assert f"but rank {HOSTILE} calls" in text
    assert not trap.exists(), "a rank ran what its peer sent"


@pytest.mark.parametrize("announced", [None, 1 << 60, 0, -1])
def test_a_pickle_at_init_of_the_backend_is_refused_and_not_run(
    emulated_cluster: ClusterFactory, tmp_path: Path, announced: int | None
) -> None:
    trap = tmp_path / "made by a peer"

    def job() -> tuple[str, str]:
        torch.set_num_threads(1)
        if int(os.environ["RANK"]) == HOSTILE:

            def agree(gloo: Any, *_: Any, **__: Any) -> Any:
                words = torch.frombuffer(bytearray(pickle.dumps(Opens(trap))), dtype=torch.uint8)
                length = torch.tensor([words.numel() if announced is None else announced], dtype=torch.int64)
                for message in (length, words)[: 2 if announced is None else 1]:
                    gloo.send([message], tree.branch_of(HOSTILE, 4).parent, 0).wait()
                while (
                    len(list(tmp_path.glob("heard-*"))) < 3
                ):  # it never listens; whoever left now would be blamed for that
                    time.sleep(0.01)
                raise ConnectionAbortedError

            world.agree = agree
        heard = outcome(lambda: dist.init_process_group("commlayer", timeout=timedelta(seconds=HALF_AN_HOUR)))
        (tmp_path / f"heard-{os.environ['RANK']}").touch()
        return heard

    found = emulated_cluster(2, 2).run(job)
    assert not trap.exists(), "a rank ran what its peer sent"
    assert found[HOSTILE][0] == "ConnectionAbortedError"
    check(found, HOSTILE)


def test_a_pickle_in_place_of_rank_0s_profile_is_refused_and_not_run(
    emulated_cluster: ClusterFactory, tmp_path: Path
) -> None:
    trap = tmp_path / "made by a peer"

    def job() -> tuple[str, str]:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        if dist.get_rank() > 0:
            return outcome(lambda: AllRanks.default().from_first(ProfileText(""), ProfileText))
        words = bytearray(pickle.dumps(Opens(trap)))
        dist.broadcast(torch.tensor([len(words)], dtype=torch.int64), 0)
        dist.broadcast(torch.frombuffer(words, dtype=torch.uint8), 0)
        return "", ""

    found = emulated_cluster(2, 2).run(job)
    assert not trap.exists(), "a rank ran what its peer sent"
    check(found, 0)


@pytest.mark.parametrize("announced", [1 << 60, (1 << 20) + 1, 0, -1])
def test_a_false_length_takes_no_memory(emulated_cluster: ClusterFactory, announced: int) -> None:
    def job() -> tuple[str, str]:
        torch.set_num_threads(1)
        task, groups = honest_communicator()
        if dist.get_rank() == HOSTILE:
            task = partial(speak_on, groups, b"", announced)
        return outcome(task)

    check(emulated_cluster(2, 2).run(job), HOSTILE, f"expected 1 to 1048576 bytes, it announces {announced}")


def test_a_rank_that_speaks_for_another_is_named(emulated_cluster: ClusterFactory) -> None:
    def job() -> tuple[str, str]:
        torch.set_num_threads(1)
        task, _ = honest_communicator()
        if dist.get_rank() == HOSTILE:
            dist.get_rank = lambda group=None: 0 if group is None else 1
        return outcome(task)

    for rank, (kind, text) in enumerate(emulated_cluster(2, 2).run(job)):
        assert rank == HOSTILE or kind == "DisagreementError", text
        assert rank == HOSTILE or f"rank {HOSTILE} says that it is rank 0" in text, text
