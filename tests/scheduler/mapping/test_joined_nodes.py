"""Nodes like a measured one, joined by a declared network: prices, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from commlayer.cli.main import main
from commlayer.profiles.errors import UsageError
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile
from commlayer.readers.cluster_files import resolve
from commlayer.scheduler.mapping import clusters, hardware
from commlayer.scheduler.mapping.catalog import load as load_model
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.declared_links import EFA, NETWORK
from commlayer.scheduler.mapping.job import Job
from commlayer.scheduler.mapping.variations import at_value

H100 = clusters.load("h100-eos")
MIB = 1 << 20


def one_node(*left_out: str) -> Profile:
    """The curves that `commlayer measure` takes on a node of eight, but for some collectives."""
    curves = {
        curve.key: curve
        for nodes in ((8,), (2,))
        for curve in H100.profile_of(nodes).curves
        if curve.collective not in left_out
    }
    return H100.profile_of((8,)).replace(name="node", kind="measured", curves=curves.values())


def measured(*left_out: str) -> Cluster:
    return Cluster.from_profile(one_node(*left_out), hardware.GPUS["h100"])


@pytest.mark.parametrize("nodes", [(8,), (8, 8), (8,) * 16, (1,) * 16, (4, 4)])
def test_a_joined_node_costs_what_the_cluster_does_that_it_was_measured_on(nodes: tuple[int, ...]) -> None:
    ours, theirs = measured().joined("infiniband", 50).profile_of(nodes), H100.profile_of(nodes)
    for curve in theirs.curves:
        found = ours.curve(curve.collective, curve.link, curve.group_size)
        for size in (4096, MIB, 64 * MIB):
            assert found.at(size) == pytest.approx(curve.at(size), rel=0.02)


def test_what_was_measured_in_a_node_stays_as_it_was() -> None:
    profile = one_node()
    slow = profile.replace(
        curves=[
            curve
            if curve.link is Resource.DEVICE
            else type(curve)(
                *curve.key[:1], Resource.INTRA, curve.group_size, curve.bytes, tuple(3 * us for us in curve.time_us)
            )
            for curve in profile.curves
        ]
    )
    joined = Cluster.from_profile(slow, hardware.GPUS["h100"]).joined("infiniband", 50)
    stage = joined.profile_of((8, 8)).curve("all_to_all", Resource.INTRA, 8)
    assert stage.at(MIB) == pytest.approx(3 * H100.profile_of((8,)).curve("all_to_all", Resource.INTRA, 8).at(MIB))
    # A ring through both nodes waits for the slower of its links.
    whole = joined.profile_of((8, 8)).curve("all_gather_single", Resource.INTER, 16)
    assert whole.at(512 * MIB) > 1.5 * H100.profile_of((8, 8)).curve("all_gather_single", Resource.INTER, 16).at(
        512 * MIB
    )


def test_the_network_is_the_declared_one() -> None:
    joined = measured().joined("efa", 100)
    assert joined.inter == EFA
    assert joined.peaks.inter_gbps == 100
    assert measured().joined("roce", 50).inter == NETWORK
    job = Job(model=load_model("mixtral-8x7b"), gpus=64, global_batch=64, sequence=4096)
    assert at_value(job, joined, "inter_gbps", 25.0)[1].peaks.inter_gbps == 25
    with pytest.raises(UsageError, match="were measured"):
        at_value(job, joined, "intra_gbps", 25.0)


def test_what_cannot_be_joined_is_refused() -> None:
    with pytest.raises(UsageError, match="no times of all_to_all_v or all_to_all_single or all_to_all among the 8"):
        measured("all_to_all", "all_to_all_v", "all_to_all_single").joined("infiniband", 50)
    with pytest.raises(UsageError, match="expected infiniband"):
        measured().joined("myrinet", 50)
    with pytest.raises(UsageError, match="profile of one node to join others like it, got a declared cluster"):
        H100.joined("infiniband", 50)
    two = Cluster.from_profile(H100.profile_of((8, 8)), hardware.GPUS["h100"])
    with pytest.raises(UsageError, match="got 2x8"):
        two.joined("infiniband", 50)
    with pytest.raises(UsageError, match="add --inter-gbps"):
        measured().on("roce")


def test_a_node_without_copies_has_the_memory_that_is_declared() -> None:
    joined = measured("copy").joined("infiniband", 50)
    assert joined.peaks.device_gbps == hardware.GPUS["h100"].memory_gbps / 2
    declared = H100.profile_of((8,)).curve("copy", Resource.DEVICE, 1)
    for nodes in ((8,), (4,), (8, 8)):
        copies = joined.profile_of(nodes).curve("copy", Resource.DEVICE, 1)
        assert copies.at(MIB) == pytest.approx(declared.at(MIB))


ESTIMATE = ["estimate", "-m", "mixtral-8x22b", "--gpu", "h100", "--global-batch", "64", "--sequence", "4096"]
MAPPING = ["--tp", "2", "--ep", "8", "--pp", "4"]


def test_the_commands_join_a_node_of_which_a_profile_is(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    one_node().save(path)

    def run(*options: str) -> tuple[int, str]:
        found = CliRunner().invoke(main, [*ESTIMATE, *MAPPING, "-c", str(path), *options])
        return found.exit_code, " ".join(found.output.split())

    code, said = run("-g", "64", "--inter-gbps", "50", "--fabric", "infiniband")
    assert code == 0, said
    assert "node, nodes joined by infiniband at 50 GB/s" in said
    code, said = run("-g", "64")
    assert code == 2
    assert "was measured on one node of 8 ranks: declare the network between such nodes" in said
    code, said = run("-g", "64", "--inter-gbps", "50")
    assert code == 2
    assert "add --fabric, one of infiniband" in said
    code, said = run("-g", "64", "--fabric", "roce")
    assert code == 2
    assert "add --inter-gbps" in said
    code, said = run("-g", "64", "--inter-gbps", "50", "--fabric", "infiniband", "--dispatcher", "deepep")
    assert code == 2
    assert "nobody measured deepep on it" in said


def test_a_cluster_file_joins_nodes_too(tmp_path: Path) -> None:
    one_node().save(tmp_path / "node.json")
    path = tmp_path / "cluster.json"
    content = {"name": "ours", "gpu": "h100", "profiles": ["node.json"], "inter_gbps": 50, "fabric": "roce"}
    path.write_text(json.dumps(content), encoding="utf-8")
    cluster = resolve(str(path))
    assert (cluster.name, cluster.fabric, cluster.peaks.inter_gbps) == ("ours", "roce", 50)
    for lacking in ("inter_gbps", "fabric"):
        path.write_text(json.dumps({**content, lacking: type(content[lacking])()}), encoding="utf-8")
        with pytest.raises(UsageError, match=f"{lacking}: expected it beside"):
            resolve(str(path))
