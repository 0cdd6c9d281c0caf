"""Ranks that end in good order after their last call: calls for which nothing more is needed from them go on."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from ranks import HALF_AN_HOUR, start_with, tell, wait_until

from commlayer.failures import endings
from commlayer.failures.detector import job_detector, leave_all
from commlayer.profiles.errors import PeerError
from commlayer.testing.plugin import ClusterFactory

LEAVER = 2


def await_end_of(rank: int) -> None:
    """Wait until this rank has heard that ``rank`` is no more."""
    detector = job_detector(range(dist.get_world_size()))
    assert detector is not None
    with detector.knowledge.changed:
        assert detector.knowledge.changed.wait_for(
            lambda: rank in detector.knowledge.left or rank in detector.knowledge.gone, 60.0
        )


def leave(way: str) -> None:
    if way == "destroy":
        dist.destroy_process_group()
        return
    if way == "_exit":
        os._exit(0)
    endings._end_all()  # as at a program's end, which a rank of a test cluster never has
    leave_all("its program has ended", is_failure=False)
    os.kill(os.getpid(), signal.SIGKILL)


def gathered(late: int) -> list[float]:
    """Collect at rank 0 what each has; rank ``late`` comes when the leaver, which has done its part, is no more."""
    rank = dist.get_rank()
    found = [torch.zeros(1000) for _ in range(3)] if rank == 0 else None
    if rank == late:
        await_end_of(LEAVER)
    dist.gather(torch.full((1000,), float(rank)), found)
    return [] if found is None else [float(each.sum()) / 1000 for each in found]


@pytest.mark.cluster
@pytest.mark.parametrize("way", ["destroy", "_exit", "end"])
def test_a_rank_that_ends_after_its_part_breaks_no_call(emulated_cluster: ClusterFactory, way: str) -> None:
    def job() -> tuple[list[float], str]:
        torch.set_num_threads(1)
        start_with(HALF_AN_HOUR)
        found = gathered(late=1)
        tell("is done")
        if dist.get_rank() == LEAVER:
            leave(way)
            return found, ""
        wait_until("is done", 3)
        await_end_of(LEAVER)
        with pytest.raises(PeerError) as error:
            dist.all_reduce(torch.ones(4))
        tell("is done")
        return found, str(error.value)

    outcomes = emulated_cluster(3, 1).run(job, check=False, grace_s=70.0, timeout_s=100.0)
    for outcome in outcomes[:2]:
        assert outcome.failure is None, outcome.failure
        _, said = outcome.value
        assert "rank 2 has left the job (" in said
    assert outcomes[0].value[0] == [0.0, 1.0, 2.0]


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["synchronous", "asynchronous"])
def test_a_rank_that_ends_in_the_middle_of_a_call_wakes_those_who_wait_for_it(
    emulated_cluster: ClusterFactory, kind: str
) -> None:
    """Half of its bytes may have gone: what has begun to arrive ends with nothing else before the timeout."""

    def job() -> str:
        torch.set_num_threads(1)
        start_with(HALF_AN_HOUR)
        rank, x = dist.get_rank(), torch.ones(1 << 20)
        dist.all_reduce(x)
        if rank == LEAVER:
            if kind == "asynchronous":
                dist.all_reduce(x, async_op=True)
            else:
                threading.Thread(target=dist.all_reduce, args=(x,), daemon=True).start()
                while dist.group.WORLD._order.track.issued < 2:  # type: ignore[union-attr]
                    pass
            os._exit(0)
        if rank == 1:
            await_end_of(LEAVER)
        with pytest.raises(PeerError) as error:
            dist.all_reduce(x)
        return str(error.value)

    outcomes = emulated_cluster(3, 1).run(job, check=False, grace_s=70.0, timeout_s=100.0)
    for outcome in outcomes[:2]:
        assert outcome.failure is None, outcome.failure
        assert "rank 2" in outcome.value
