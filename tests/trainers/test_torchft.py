"""torchft's DiLoCo and LocalSGD over our process group, by the lines of its page, against its Gloo group."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d
from judged import compare_losses, no_alarms  # noqa: F401  a fixture

from commlayer.emulation import EmulatedCluster
from commlayer.integrations import planned_process_group

pytestmark = pytest.mark.cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # a folder of programs, not a package
from sites_training import SYNC_EVERY, Site, Trained, Way, train  # noqa: E402

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "trainers" / "torchft.md"
UNJUDGED = EmulatedCluster.run
"""Before a test's fixture has it judged: a site that breaks off is what `commlayer diagnose` is to find."""
GLOO = "ProcessGroupGloo(timeout=timedelta(seconds=20))"
EXACT = "planned_process_group()"


@pytest.fixture(autouse=True, scope="module")
def torchft() -> None:
    """Before ranks are forked; skips, and says so, where it is not installed."""
    if find_spec("torchft") is None:
        pytest.skip("NOT TESTED: torchft is not installed (extra 'torchft')")
    for name in ("torchft.local_sgd", "torchft.coordination", "torchft.process_group"):
        import_module(name)


def shown() -> str:
    """The process group that the page tells the user to make."""
    (line,) = re.findall(r"^pg = (planned_process_group\(.*\)) ", PAGE.read_text(encoding="utf-8"), re.M)
    return str(line)


def on_sites(count: int, *ways: Way, run: Callable[..., Any] | None = None) -> list[list[Trained]]:
    """The results of all sites, for each way."""
    with EmulatedCluster(nodes=count, ranks_per_node=1) as cluster:
        results = (run or EmulatedCluster.run)(cluster, train, ways, timeout_s=100)
        return [list(each) for each in zip(*results, strict=True)]


def every_call() -> None:
    """Each call of torchft's process groups, on a group of two sites."""
    site = Site()
    pg: Any = eval(EXACT, {"planned_process_group": planned_process_group})
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}/calls"
    pg.configure(address, f"site_{site.rank}", site.rank, 2, 1, 0, 1, [0, 1])
    pg.set_timeout(timedelta(seconds=15))
    assert (pg.size(), pg.getBackendName(), pg.errored()) == (2, "torchft-commlayer", None)
    zero, one = torch.arange(8.0), torch.arange(8.0) + 100
    mine, both = (zero, one)[site.rank], zero + one
    half = slice(4 * site.rank, 4 * site.rank + 4)

    pg.allreduce([x := mine.clone()], c10d.AllreduceOptions()).wait()
    assert torch.equal(x, both)
    several = [mine.clone(), mine.clone()[:3]]
    pg.allreduce_coalesced(several, c10d.AllreduceCoalescedOptions()).wait()
    assert torch.equal(several[0], both)
    assert torch.equal(several[1], both[:3])
    pg.allgather([outs := [torch.empty(8), torch.empty(8)]], [mine], c10d.AllgatherOptions()).wait()
    assert torch.equal(torch.cat(outs), torch.cat([zero, one]))
    pg.allgather_into_tensor_coalesced([whole := torch.empty(16)], [mine], c10d.AllgatherOptions()).wait()
    assert torch.equal(whole, torch.cat([zero, one]))
    pg.reduce_scatter([part := torch.empty(4)], [list(mine.split(4))], c10d.ReduceScatterOptions()).wait()
    assert torch.equal(part, both[half])
    pg.reduce_scatter_tensor_coalesced([part := torch.empty(4)], [mine], c10d.ReduceScatterOptions()).wait()
    assert torch.equal(part, both[half])
    pg.alltoall_base(out := torch.empty(8), mine, [], [], c10d.AllToAllOptions()).wait()
    assert torch.equal(out, torch.cat([zero[half], one[half]]))
    pg.broadcast([x := mine.clone()], c10d.BroadcastOptions()).wait()
    assert torch.equal(x, zero)
    pg.broadcast_one(x := mine.clone(), 1).wait()
    assert torch.equal(x, one)
    if site.rank == 0:
        pg.send([mine], 1, 3).wait()
    else:
        pg.recv([x := torch.empty(8)], 0, 3).wait()
        assert torch.equal(x, zero)
    pg.barrier().wait()
    pg.shutdown()
    site.end()


def test_every_call_of_torchfts_groups_is_there() -> None:
    with EmulatedCluster(nodes=2, ranks_per_node=1) as cluster:
        cluster.run(every_call)


def plans(trained: Trained) -> set[str]:
    assert trained.stats is not None
    return {
        call["plan"]
        for group in trained.stats["groups"]
        for call in group["calls"]
        if call["collective"] == "all_reduce"
    }


def losses(trained: list[Trained]) -> list[list[float]]:
    return [one.losses for one in trained]


def agree(trained: list[Trained]) -> bool:
    return all(torch.equal(one.parameters, trained[0].parameters) for one in trained)


def test_losses_are_those_over_gloo() -> None:
    ways = [Way(pg, algorithm) for algorithm in ("DiLoCo", "LocalSGD") for pg in (GLOO, EXACT, shown())]
    results = on_sites(2, *ways)
    for stock, exact, coarse in (results[:3], results[3:]):
        compare_losses(losses(exact), losses(stock), tolerance=0)
        compare_losses(losses(coarse), losses(stock), tolerance=0.01)
        assert agree(stock)
        assert agree(exact)
        assert agree(coarse), "all sites hold the same bits"
        assert not torch.equal(coarse[0].parameters, exact[0].parameters), "something was rounded"
        assert all(one.sites == [2] * (len(one.losses) // SYNC_EVERY) for one in coarse)
    assert plans(results[1][0]) >= {"flat_direct"}
    assert plans(results[2][0]) >= {"flat_direct/int8"}


def test_the_others_go_on_where_a_site_breaks_off() -> None:
    """In the middle of a synchronisation: that one is not committed, and the next has one site less."""
    (results,) = on_sites(3, Way(shown(), leaves_at=2, steps=6 * SYNC_EVERY), run=UNJUDGED)
    *stayed, left = results
    assert len(left.losses) < 3 * SYNC_EVERY
    for one in stayed:
        assert 0 in one.sites, "a broken synchronisation counts for nothing"
        counted = [count for count in one.sites if count]
        assert counted == sorted(counted, reverse=True), "nobody comes back"
        assert (counted[0], counted[-1]) == (3, 2)
        assert sum(one.losses[-SYNC_EVERY:]) < sum(one.losses[:SYNC_EVERY])
    assert agree(stayed)
