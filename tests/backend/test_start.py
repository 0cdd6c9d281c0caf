"""The start of a job against its number of ranks: what a rank asks of the store, and sends, at init and at new_group."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counting_store import CountingStore, most_messages
from ranks import HALF_AN_HOUR
from torch._C._distributed_c10d import Store, TCPStore

from commlayer.agree import tree
from commlayer.backend import world
from commlayer.failures.waits import Watched
from commlayer.testing.plugin import ClusterFactory

pytestmark = pytest.mark.cluster

GATHERS_OF_INIT, GATHERS_OF_GROUP = 3, 1
"""The gathers: what ranks must agree on, where they run, the second mesh; and of a later group the second mesh alone."""


def counted(inner: Store) -> CountingStore:
    store = CountingStore(inner)
    store.set_timeout(timedelta(seconds=60))
    return store


def messages_counted(count: list[int]) -> None:
    """Count what goes over the connections between ranks while they agree; a message is its length and its content."""

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            count[0] += 1
            return original(*arguments)

        return call

    for verb in ("send", "recv"):
        setattr(Watched, verb, counting(getattr(Watched, verb)))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_asks_the_store_little_more_than_torch_does(emulated_cluster: ClusterFactory, ranks: int) -> None:
    def job() -> dict[str, tuple[int, int]]:
        torch.set_num_threads(1)
        os.environ["COMMLAYER_PROFILE"] = "none"
        rank, host, port = int(os.environ["RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = counted(TCPStore(host, port, ranks, rank == 0, timedelta(seconds=60)))
        sent, found, before = [0], {}, [0, 0]
        messages_counted(sent)

        def record(name: str) -> None:
            # Whether a key is there is asked the more often the later it comes: what else is asked is counted.
            now = [store.operations.total() - store.operations["check"], sent[0]]
            found[name] = now[0] - before[0], now[1] - before[1]
            before[:] = now

        dist.init_process_group("commlayer", store=store, rank=rank, world_size=ranks)
        record("init")
        dist.new_group(list(range(ranks)))
        record("group")
        dist.new_group(list(range(ranks)), backend="gloo")
        record("torch")
        dist.barrier()
        return found

    for found in emulated_cluster(1, ranks).run(job):
        torchs, links = found["torch"][0], math.ceil(math.log2(ranks))
        assert torchs == 2 * ranks + 1  # an address, and for each a wait and a get
        assert found["group"][0] <= torchs + 2  # and one arrival, and the address is deleted
        # And an address, and the neighbours' of the failure detector.
        assert found["init"][0] <= torchs + 2 + 1 + 2 * links
        assert found["init"][1] <= 2 * GATHERS_OF_INIT * most_messages(ranks)
        assert found["group"][1] <= 2 * GATHERS_OF_GROUP * most_messages(ranks)
        assert found["torch"][1] == 0


# Ranks that do not agree, in a tree of eight: the root, one with children, and a leaf


def outcome() -> tuple[str, str]:
    torch.set_num_threads(1)
    os.environ.setdefault("COMMLAYER_PROFILE", "none")
    try:
        dist.init_process_group("commlayer", timeout=timedelta(seconds=HALF_AN_HOUR))
    except Exception as error:  # noqa: BLE001  the tests ask which it was
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize("culprit", [0, 4, 7])
def test_a_rank_that_differs_is_named_on_all(emulated_cluster: ClusterFactory, culprit: int) -> None:
    def job() -> tuple[str, str]:
        if os.environ["RANK"] == str(culprit):
            os.environ["COMMLAYER_REDUCTION"] = "ordered"
        return outcome()

    for kind, text in emulated_cluster(2, 4).run(job):
        assert kind == "DisagreementError", text
        assert "ranks disagree on COMMLAYER_REDUCTION" in text
        assert f"rank {culprit} has ordered" in text


@pytest.mark.parametrize("culprit", [0, 4, 7])
def test_a_rank_that_dies_while_it_agrees_is_named_on_all(emulated_cluster: ClusterFactory, culprit: int) -> None:
    def job() -> tuple[str, str]:
        if os.environ["RANK"] == str(culprit):
            tree._run = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        return outcome()

    outcomes = emulated_cluster(2, 4).run(job, check=False, grace_s=40.0)
    assert len(outcomes) == 8
    for each in outcomes:
        if each.rank != culprit:
            kind, text = each.value
            assert kind == "PeerError", text
            assert text.startswith(f"rank {culprit} died"), text


@pytest.mark.parametrize("culprit", [0, 4, 7])
def test_a_rank_that_never_agrees_is_named_on_all(
    emulated_cluster: ClusterFactory, tmp_path: Path, culprit: int
) -> None:
    def job() -> tuple[str, str]:
        if os.environ["RANK"] == str(culprit):

            def stay_away(*_: Any) -> Any:
                while len(list(tmp_path.iterdir())) < 7:
                    time.sleep(0.01)
                raise ConnectionAbortedError

            tree._run = stay_away  # type: ignore[assignment]
        agree = world.agree

        def for_five_seconds(
            gloo: Any, store: Any, rank: int, ranks: Any, _: timedelta, detector: Any, **how: Any
        ) -> world.World:
            return agree(gloo, store, rank, ranks, timedelta(seconds=5), detector, **how)

        world.agree = for_five_seconds  # type: ignore[assignment]  # whatever comes before it may take longer on a busy machine
        found = outcome()
        (tmp_path / os.environ["RANK"]).touch()
        return found

    for rank, (kind, text) in enumerate(emulated_cluster(2, 4).run(job)):
        if rank != culprit:
            assert kind == "CollectiveTimeoutError", text
            assert text.startswith(f"rank {culprit} did not answer within"), text
