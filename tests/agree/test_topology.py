from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.profiles.errors import TopologyError, UsageError
from commlayer.profiles.links import COLLECTIVES, Peaks, Resource, bus_factor
from commlayer.profiles.topology import Topology

UNHURRIED = settings(deadline=None)  # a busy machine is no failure


@UNHURRIED
@given(st.integers(1, 9), st.integers(1, 9))
def test_a_uniform_shape_reads_back_as_itself(num_nodes: int, num_ranks: int) -> None:
    topology = Topology.parse(f"{num_nodes}x{num_ranks}")
    assert topology.shape == f"{num_nodes}x{num_ranks}"
    assert (topology.num_nodes, topology.ranks_per_node) == (num_nodes, num_ranks)
    assert topology.world_size == num_nodes * num_ranks


@UNHURRIED
@given(st.lists(st.integers(1, 6), min_size=2, max_size=6))
def test_every_listed_shape_reads_back_as_the_same_nodes(sizes: list[int]) -> None:
    topology = Topology.parse("+".join(map(str, sizes)))
    assert [len(node) for node in topology.nodes] == sizes
    assert Topology.parse(topology.shape) == topology
    assert topology.is_uniform == (len(set(sizes)) == 1)


@UNHURRIED
@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=20))
def test_ranks_with_one_identity_share_a_node(identities: list[str]) -> None:
    topology = Topology.from_identities(identities)
    assert topology.world_size == len(identities)
    for rank, identity in enumerate(identities):
        node = topology.node_of(rank)
        assert topology.hostnames[node] == identity
        assert topology.nodes[node][topology.local_rank_of(rank)] == rank
        for other, its_identity in enumerate(identities):
            assert (node == topology.node_of(other)) == (identity == its_identity)
            assert (
                (node, topology.local_rank_of(rank)) == (topology.node_of(other), topology.local_rank_of(other))
            ) == (rank == other)
    assert topology.spans(range(len(identities))) == topology.num_nodes == len(set(identities))
    assert [node[0] for node in topology.nodes] == sorted(node[0] for node in topology.nodes)


def test_interleaved_ranks_are_described_truthfully() -> None:
    topology = Topology.from_identities(["east", "west", "east", "west", "east", "east"])
    assert topology.nodes == ((0, 2, 4, 5), (1, 3))
    assert topology.shape == "4+2"
    assert topology.describe() == (
        "4+2: 6 ranks on 2 nodes, uneven\n  node 0 (east): 4 ranks (0, 2, 4-5)\n  node 1 (west): 2 ranks (1, 3)"
    )
    assert Topology.parse("1x1").describe() == "1x1: 1 rank on 1 node\n  node 0: 1 rank (0)"


def test_what_the_nodes_are_called_does_not_make_another_topology() -> None:
    named = Topology.from_identities(["a", "a", "b", "b"])
    declared = Topology.parse(" 2X2 ")
    assert named == declared
    assert hash(named) == hash(declared)


def test_uneven_nodes_are_refused_by_name_where_they_must_be_even() -> None:
    with pytest.raises(TopologyError, match=r"got 3\+4: node 0 has 3, node 1 has 4"):
        _ = Topology.parse("3+4").ranks_per_node
    with pytest.raises(TopologyError, match=r"node 1 \(b\) has 1"):
        _ = Topology.from_identities(["a", "a", "b"]).ranks_per_node


@pytest.mark.parametrize(
    "text", ["", "2", "x", "2x", "0x4", "2x0", "-2x4", "2x4x1", "3+", "3+0", "2.5x4", "2x4+3", "٢x٤", "900000x900000"]
)
def test_a_malformed_shape_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(TopologyError, match='"2x4"') as caught:
        Topology.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ((), "at least one node"),
        (((0,), ()), "at least one rank"),
        (((0, 1), (1, 2)), "exactly once"),
        (((0, 1), (3,)), "exactly once"),
        (((1, 0), (2, 3)), "increasing order"),
        (((2, 3), (0, 1)), "lowest rank"),
    ],
)
def test_nodes_that_are_no_placement_are_refused(nodes: tuple[tuple[int, ...], ...], reason: str) -> None:
    with pytest.raises(TopologyError, match=reason):
        Topology(nodes)


def test_other_misuse_is_refused() -> None:
    with pytest.raises(TopologyError, match="hostname"):
        Topology(((0,), (1,)), hostnames=("only one",))
    with pytest.raises(TopologyError, match="got none"):
        Topology.from_identities([])
    for rank in (-1, 8):
        with pytest.raises(TopologyError, match=rf"from 0 to 7 \(topology 2x4\), got {rank}"):
            Topology.parse("2x4").node_of(rank)


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("all_to_all_single", 0.75),
        ("send", 1),
        ("copy", 1),
    ],
)
def test_bus_factors_are_nccl_tests(collective: str, factor: float) -> None:
    assert bus_factor(collective, 4) == factor


def test_bus_factor_refuses_what_it_does_not_know() -> None:
    with pytest.raises(UsageError, match=r"all_to_all.*'alltoall'"):
        bus_factor("alltoall", 2)
    with pytest.raises(UsageError, match="group_size 0"):
        bus_factor("all_to_all", 0)
    assert all(bus_factor(collective, 1) >= 0 for collective in COLLECTIVES)


def test_a_resource_is_the_string_it_is_called() -> None:
    by_name: dict[str, int] = {Resource.INTER: 1}
    assert by_name["inter"] == {"inter": 1}[Resource.INTER] == 1
    assert f"{Resource.INTRA}" == str(Resource.INTRA) == "intra"


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_a_peak_must_be_a_rate(value: float) -> None:
    with pytest.raises(ValueError, match="intra_gbps: expected a positive number"):
        Peaks(25, value, 1600)


def test_peaks_are_looked_up_by_link() -> None:
    peaks = Peaks(25, 200, 1600)
    assert [peaks.of(link) for link in (Resource.INTER, Resource.INTRA, Resource.DEVICE)] == [25.0, 200.0, 1600.0]
    with pytest.raises(UsageError, match="compute"):
        peaks.of(Resource.COMPUTE)
