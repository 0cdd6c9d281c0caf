"""torchtitan with our token dispatcher, by the lines of its page, against torchtitan as it is on Gloo: the same losses."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from judged import (  # noqa: F401  fixtures among them
    check_words,
    compare,
    dispatches,
    no_alarms,
    nothing_is_light,
    plans,
    said,
)
from synthetic_profiles import synthetic_profile
from tiny_titan import Run, Trained, load, train

from commlayer.emulation import EmulatedCluster

pytestmark = pytest.mark.cluster

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "trainers" / "torchtitan.md"


@pytest.fixture(autouse=True, scope="module")
def torchtitan() -> None:
    load()


def on_two_nodes(run: Run, ranks_per_node: int = 2) -> list[Trained]:
    with EmulatedCluster(nodes=2, ranks_per_node=ranks_per_node) as cluster:
        return cluster.run(train, run)


def stock_of(run: Run) -> Run:
    return replace(run, alias=None, override=None, options=(), plan="flat", checkpointed=False, wrong=False, steps=20)


@cache
def stock(run: Run, ranks_per_node: int) -> list[Trained]:
    return on_two_nodes(stock_of(run), ranks_per_node)


def shown() -> Run:
    """The lines that the page tells the user to add: the variable, and the option."""
    text = PAGE.read_text(encoding="utf-8")
    (alias,) = re.findall(r"on CPUs it is `(\w+)`", text)
    (override,) = set(re.findall(r"--override\.imports (\S+)$", text, re.M))
    return Run(alias=alias, override=override)


def options(**given: str) -> tuple[tuple[str, str], ...]:
    return tuple(given.items())


# Each with its ranks on a node, its tolerance, and the kind of dispatch that is to be counted. Variants that a user may ask for
# differ from what is shown in the first step already: they take few.
CASES = {
    "as shown, checkpointed": (Run(checkpointed=True, steps=3), 2, 0, "all_to_all × 1"),
    "as shown, 2x4": (Run(ep=8), 4, 0, "all_to_all × 1"),
    "sharded experts, 2x4": (Run(ep=4, steps=3), 4, 0, "all_to_all × 1"),
    "planned": (Run(plan="hierarchical", steps=3), 2, 1e-6, "all_to_all × 1"),
    "two levels": (Run(options=options(kind="two_level"), steps=3), 2, 1e-6, "two_level × 1"),
    "two levels, 2x4": (Run(options=options(kind="two_level"), ep=8), 4, 1e-6, "two_level × 1"),
    "gathered": (Run(options=options(kind="all_gather"), steps=3), 2, 1e-6, "all_gather × 1"),
}


@pytest.mark.usefixtures("nothing_is_light")
def test_the_lines_of_the_page_train_as_torchtitan_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Losses are the same by a profile without curves for a plan; and it says what is planned, what stayed flat, and no more."""
    path = tmp_path / "cluster.json"
    synthetic_profile(nodes=2, ranks_per_node=2).save(path)
    expected, known = on_two_nodes(stock_of(shown())), said(capfd)
    run = replace(shown(), plan="", environment=(("COMMLAYER_PROFILE", str(path)),))
    trained = on_two_nodes(run)
    compare(trained, expected, steps=run.steps, tolerance=0)
    for one in trained:
        assert dispatches(one.stats) == {("torchtitan", "all_to_all × 1")}
    planned = "torchtitan's tokens go over 4 ranks by all_to_all × 1, planned from profile synthetic"
    check_words(said(capfd), known, 'COMMLAYER_AS=gloo: init_process_group("gloo") made a group', planned)


@pytest.mark.trainers
@pytest.mark.parametrize("name", CASES)
def test_losses_are_torchtitans(name: str) -> None:
    run, ranks_per_node, tolerance, kind = CASES[name]
    run = replace(run, alias=shown().alias, override=shown().override)
    trained = on_two_nodes(run, ranks_per_node)
    compare(trained, stock(run, ranks_per_node), steps=run.steps, tolerance=tolerance)
    for one in trained:
        assert dispatches(one.stats) == {("torchtitan", kind)}
        moved = plans(one.stats)
        if run.plan == "hierarchical":
            assert {("all_to_all", "hierarchical"), ("reduce_scatter", "hierarchical")} <= moved
        if kind == "two_level × 1":
            assert ("all_to_all_v", "hierarchical") in moved


@pytest.mark.trainers
@pytest.mark.parametrize("kind", ["all_to_all", "two_level"])
def test_rows_in_a_wrong_order_are_caught(kind: str) -> None:
    """Two rows of some fifty change places: the comparison must fail, also with the tolerance of other orders of sums."""
    run = replace(shown(), options=options(kind=kind), wrong=True, steps=3)
    broken = on_two_nodes(run)
    with pytest.raises(AssertionError, match=r"rank \d, step \d+: loss"):
        compare(broken, stock(run, 2), steps=run.steps, tolerance=1e-6)


@pytest.mark.trainers
def test_a_group_of_another_backend_is_refused_by_name() -> None:
    run = replace(shown(), alias=None)
    with pytest.raises(Exception, match="start the job with COMMLAYER_AS=gloo"):
        on_two_nodes(run)
