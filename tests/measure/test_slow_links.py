"""Nodes whose cards differ, on an emulated cluster: found by the probe, and spared by sums that stay right."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commlayer.calls.movement import Movement
from commlayer.emulation import EmulatedCluster
from commlayer.measure.harness import HostGroup, HostHarness
from commlayer.scheduler import Strategy, build
from commlayer.testing.plugin import ClusterFactory

pytestmark = pytest.mark.cluster
SLOW = 2


def start(cache: Path) -> Any:
    torch.set_num_threads(1)
    os.environ.update({"COMMLAYER_PROFILE": "auto", "COMMLAYER_CACHE": str(cache), "COMMLAYER_TRIALS": "off"})
    dist.init_process_group("commlayer", timeout=timedelta(seconds=60))
    return dist.group.WORLD


def cluster_with_a_slow_card(emulated_cluster: ClusterFactory) -> EmulatedCluster:
    cluster = emulated_cluster(3, 2, inter="400mbit")
    if not cluster.shaped:
        pytest.skip("links are not shaped here: no card is slow")
    cluster.shape(inter="40mbit", node=SLOW)
    return cluster


def test_a_slow_card_is_found_and_owns_less_of_a_sum(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    def job() -> tuple[tuple[float, ...], str]:
        group: Any = start(tmp_path)
        rank, n = dist.get_rank(), dist.get_world_size()
        choices = group._planned.choices
        links = choices.prices.job_planner.profile.slow_links
        for count, chunks in ((100_003, 4), (17, 2), (1 << 16, 7)):
            plan = build(choices.prices.traffic("all_reduce", 4 * count), Strategy.PIPELINED, chunks)
            assert plan.is_duplex
            x = torch.arange(count).remainder(64).float() + rank
            group._planned.run(Movement(plan, x, x))
            assert torch.equal(x, torch.arange(count).remainder(64).float() * n + sum(range(n)))
        dist.all_reduce(x)
        far = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [4, 5])]
        pair: Any = far[0] if rank in (0, 2) else far[1] if rank in (1, 3) else None
        if pair is not None:
            assert pair._planned.choices.prices.rates == ()  # it does not touch the slow node
            assert pair._planned.choices.prices.predicted_us("all_gather", 1 << 20) < choices.prices.predicted_us(
                "all_gather", 1 << 20
            )
        return choices.prices.rates, " ".join(str(link) for link in links)

    found = cluster_with_a_slow_card(emulated_cluster).run(job, timeout_s=120.0)
    for rates, names in found:
        assert rates[:SLOW] == (1.0, 1.0)
        assert rates[SLOW] < 0.5
        assert names.startswith(f"node {SLOW}'s card has")
        assert "nodes" not in names  # those that talk to it are not blamed


def test_doctor_names_the_slow_link_of_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from commlayer.cli.doctor_checks import all_findings
    from commlayer.profiles.catalog import load_profile
    from commlayer.profiles.links import SlowLink

    path = tmp_path / "cluster.json"
    profile = load_profile("emulated-2x4").replace(slow_links=[SlowLink((1,), 0.25)])
    profile.save(path)
    monkeypatch.setenv("COMMLAYER_PROFILE", str(path))
    (found,) = (finding for finding in all_findings() if finding.name == "slow link")
    assert found.mark == "warn"
    assert found.value == "node 1's card has 25% of the usual rate"
    assert "look at its card" in found.advice
    profile.replace(slow_links=[SlowLink((0, 1), 0.25)]).save(path)
    (found,) = (finding for finding in all_findings() if finding.name == "slow link")
    assert found.value == "nodes 0 and 1 have 25% of the usual rate"
    assert "go round the nodes in an order that avoids it" in found.advice


def test_a_slow_node_without_a_rate_is_refused() -> None:
    from click.testing import CliRunner

    from commlayer.cli.main import main

    words = "--slow-node 4:10mbit: expected a node of 0 to 1, got 4"
    assert (
        words
        in CliRunner().invoke(main, ["emulate", "--mode=loopback", "--slow-node", "4:10mbit", "--", "true"]).output
    )
    result = CliRunner().invoke(main, ["emulate", "--slow-node", "3", "--", "true"])
    assert result.exit_code == 2
    assert "expected a node's number and its rate, such as 3:100mbit, got '3'" in result.output


@pytest.mark.parametrize("pair", ["0-1=100mbit", "0,1", "0,=100mbit", "0,1="])
def test_a_slow_pair_that_is_none_is_refused(pair: str) -> None:
    from click.testing import CliRunner

    from commlayer.cli.main import main

    result = CliRunner().invoke(main, ["emulate", "--slow-pair", pair, "--", "true"])
    assert result.exit_code == 2
    assert "such as 0,1=100mbit, or 0>1=100mbit one way, got" in result.output


def test_a_slow_pair_of_the_command_is_said_and_holds(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from commlayer.cli.main import main
    from commlayer.emulation import rights

    if not rights().shaping:
        pytest.skip("links are not shaped here: no pair is slow")
    words = [
        "emulate",
        "--nodes",
        "3",
        "--ranks-per-node",
        "1",
        "--slow-pair",
        "0,1=100mbit",
        "--slow-pair",
        "2>1=1gbit",
    ]
    result = CliRunner().invoke(
        main, [*words, "--", "sh", "-c", "echo $COMMLAYER_EMULATED_LINKS >> " + str(tmp_path / "links")]
    )
    assert result.exit_code == 0, result.output
    assert "between nodes 0 and 1 100mbit, from node 2 to 1 1gbit" in result.output
    assert "0>1 100mbit, 1>0 100mbit, 2>1 1gbit" in (tmp_path / "links").read_text(encoding="utf-8")
    result = CliRunner().invoke(main, ["emulate", "--slow-pair", "0,5=100mbit", "--", "true"])
    assert result.exit_code == 2
    assert "--slow-pair 0,5=100mbit: expected two different ones of 0 to 1, got 0 and 5" in result.output


@pytest.mark.parametrize("victims", [(4, 5), (0, 1)])
@pytest.mark.parametrize("step", ["pair_times", "times"])
def test_a_node_that_dies_while_it_is_measured_is_named_by_all_others(
    emulated_cluster: ClusterFactory, tmp_path: Path, victims: tuple[int, int], step: str
) -> None:
    def job() -> tuple[str, str]:
        if int(os.environ["RANK"]) in victims:

            def die(*_: Any, **__: Any) -> Any:
                os.kill(os.getpid(), signal.SIGKILL)

            if step == "pair_times":
                HostGroup.swap_us = die  # type: ignore[method-assign]
            else:
                HostHarness._time_us = die  # type: ignore[method-assign]
        try:
            start(tmp_path)
        except RuntimeError as error:
            return type(error).__name__, str(error)
        raise AssertionError("a node was killed, and nobody noticed")

    for outcome in emulated_cluster(3, 2).run(job, check=False, grace_s=40.0):
        if outcome.rank not in victims:
            assert outcome.failure is None, outcome.failure
            kind, text = outcome.value
            assert kind == "PeerError", text
            assert any(f"rank {victim} died" in text for victim in victims), text
            assert "the links were being measured" in text
            assert ("with others one by one" in text) == (step == "pair_times"), text


def test_a_trial_in_which_a_rank_dies_names_it(emulated_cluster: ClusterFactory) -> None:
    def job() -> tuple[str, str]:
        os.environ.update({"COMMLAYER_PROFILE": "emulated-2x4", "COMMLAYER_TRIALS": "on"})
        dist.init_process_group("commlayer", timeout=timedelta(seconds=60))
        if dist.get_rank() == 5:
            HostGroup.largest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
        try:
            dist.all_reduce(torch.ones(1 << 16))
        except RuntimeError as error:
            return type(error).__name__, str(error)
        raise AssertionError("a rank was killed, and nobody noticed")

    for outcome in emulated_cluster(2, 4).run(job, check=False, grace_s=40.0):
        if outcome.rank != 5:
            assert outcome.failure is None, outcome.failure
            kind, text = outcome.value
            assert (kind, "rank 5 died" in text) == ("PeerError", True), text
