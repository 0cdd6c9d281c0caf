"""torchft's DiLoCo and LocalSGD over our process group, by the lines of its page, against its Gloo group."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from judged import compare_losses, no_alarms  # noqa: F401  a fixture

from commlayer.emulation import EmulatedCluster

pytestmark = pytest.mark.cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # a folder of programs, not a package
from sites_training import SYNC_EVERY, Trained, Way, train  # noqa: E402

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "trainers" / "torchft.md"
UNJUDGED = EmulatedCluster.run
"""Before a test's fixture has it judged: a site that breaks off is what `commlayer diagnose` is to find."""
GLOO = "ProcessGroupGloo(timeout=timedelta(seconds=20))"
EXACT = "planned_process_group()"


@pytest.fixture(autouse=True, scope="module")
def torchft() -> None:
    """Before ranks are forked; skips, and says so, where it is not installed."""
    if find_spec("torchft") is None:
        pytest.skip("NOT TESTED: torchft is not installed (extra 'torchft', make trainers)")
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
        assert one.sites[:2] == [3, 3]
        assert 0 in one.sites, "a broken synchronisation counts for nothing"
        assert one.sites[-1] == 2
        assert sum(one.losses[-SYNC_EVERY:]) < sum(one.losses[:SYNC_EVERY])
    assert agree(stayed)
