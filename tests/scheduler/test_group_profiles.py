"""Curves of groups that no sweep has measured, from those that it has; without processes."""

from __future__ import annotations

from itertools import product

import pytest

from commlayer.engine.group_plans import Choices
from commlayer.profiles.catalog import load_profile
from commlayer.profiles.curve import Curve
from commlayer.profiles.errors import PlanError, UsageError
from commlayer.profiles.links import Peaks, Resource, SlowLink, bus_factor
from commlayer.profiles.profile import Profile
from commlayer.profiles.topology import Topology
from commlayer.scheduler import Policy, Strategy, Traffic, build, choose, price
from commlayer.scheduler.decision import Planner
from commlayer.scheduler.group_profiles import group_profile, most_siblings
from commlayer.scheduler.probes import probes, spanning_groups
from commlayer.settings import Settings

SIZES = tuple(4096 << (2 * k) for k in range(8))
CARD = 50.0  # bytes a microsecond
MEMORY = 4000.0
ROUND_US = 40.0


def ideal(shape: str, *, without: str = "") -> Profile:
    """A cluster whose steps take a latency a round, and their bytes through the card, or memory; ``without``: a group."""
    sizes = tuple(len(node) for node in Topology.parse(shape).nodes)
    groups = spanning_groups(sizes)
    active_of = {(sum(nodes), len(nodes) > 1): max(nodes) * siblings for nodes, siblings in groups.values()}
    curves = []
    for probe in probes(Topology.parse(shape)):
        collective, link, n = probe.key
        if probe.where == without:
            continue
        rate = {Resource.INTER: CARD, Resource.INTRA: MEMORY, Resource.DEVICE: MEMORY}[link]
        active = active_of.get((n, link is Resource.INTER), 1)
        unit = Curve(*probe.key, bytes=(1,), time_us=(1.0,))
        share = probe.leg.share_of_link(probe.unit.traffic, unit) if probe.leg.is_exchange else 1.0
        times = tuple((n - 1) * ROUND_US + size * share * active / rate + 1.0 for size in SIZES)
        curves.append(Curve(collective, link, n, SIZES, times, holdout_error=0.05))
    return Profile.create(
        name=f"ideal-{shape}",
        kind="measured",
        source="made up",
        topology=shape,
        peaks=Peaks(CARD / max(sizes) / 1e3, MEMORY / max(sizes) / 1e3, MEMORY / 1e3),
        gather="remote",
        curves=curves,
    )


@pytest.mark.parametrize(("shape", "nodes"), [("2x4", (2, 2)), ("4x4", (2, 2, 2, 2)), ("2x8", (4, 4)), ("2x8", (2, 2))])
def test_a_call_of_half_a_node_is_found_between_all_ranks_and_one_of_every_node(
    shape: str, nodes: tuple[int, ...]
) -> None:
    profile, n = ideal(shape), sum(nodes)
    found = group_profile(profile, nodes)
    width = Topology.parse(shape).ranks_per_node
    for collective in ("all_gather_single", "reduce_scatter_single", "all_reduce"):
        curve = found.curve(collective, Resource.INTER, n)
        siblings = width // nodes[0]  # a ring crosses each card once, and so many rings do at the same time
        for size in (64 << 10, 4 << 20):
            expected = (n - 1) * ROUND_US + size * bus_factor(collective, n) * siblings / CARD
            assert curve.at(size) == pytest.approx(expected, rel=0.12)  # between powers of four a curve is a chord
        assert curve.basis == "interpolated"


def test_an_uneven_group_brings_as_many_bytes_through_the_card_as_its_plans_say() -> None:
    found, size = group_profile(ideal("2x4"), (3, 1)), 4 << 20
    assert found.peaks.inter_gbps * 1e3 == pytest.approx(CARD)  # one rank of the emptier node has it alone
    assert found.peaks.intra_gbps * 1e3 == pytest.approx(MEMORY / 3)
    ring = found.curve("all_gather_single", Resource.INTER, 4)
    assert ring.at(size) == pytest.approx(3 * ROUND_US + size * 3 / 4 / CARD, rel=0.12)
    rail = found.curve("all_gather", Resource.INTER, 2)
    assert rail.at(size) == pytest.approx(ROUND_US + size / 2 / CARD, rel=0.12)
    for collective, through_card in (("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_reduce", 1.0)):
        plan = build(Traffic.on_nodes(collective, size, (3, 1)), Strategy.PIPELINED, 4)
        inter_us = price(plan, found, interference=False).busy_us()[Resource.INTER]
        assert inter_us == pytest.approx(size * through_card / CARD, rel=0.15)


def test_fewer_siblings_share_the_card_among_fewer() -> None:
    profile, size = ideal("2x4"), 4 << 20
    times = [
        group_profile(profile, (1, 1), siblings).curve("all_gather", Resource.INTER, 2).at(size)
        for siblings in (1, 2, 4)
    ]
    assert times[0] * 4 == pytest.approx(times[2], rel=0.1)
    assert times[0] * 2 == pytest.approx(times[1], rel=0.1)
    peaks = [group_profile(profile, (1, 1), siblings).peaks.inter_gbps for siblings in (1, 2, 4)]
    assert peaks == pytest.approx([CARD / 1e3, CARD / 2e3, CARD / 4e3])


@pytest.mark.parametrize("shape", ["2x4", "3x1", "1x4", "2x8"])
def test_a_group_that_is_measured_has_the_profile_itself(shape: str) -> None:
    profile = ideal(shape)
    for nodes, _ in spanning_groups([len(node) for node in Topology.parse(shape).nodes]).values():
        assert group_profile(profile, nodes) is profile


def test_every_collective_of_every_group_has_a_price() -> None:
    for shape, count in (("2x4", (2,)), ("4x4", (1, 2, 3, 4)), ("1x8", (1,))):
        profile = ideal(shape)
        width = Topology.parse(shape).ranks_per_node
        shapes = {nodes for k in (*count, 1) for nodes in product(range(1, width + 1), repeat=k) if sum(nodes) > 1}
        for nodes in shapes:
            found = group_profile(profile, nodes)
            for collective in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all_v"):
                decision = choose(Traffic.on_nodes(collective, 1 << 20, nodes), found, Policy())
                assert decision.predicted_us > 0
                assert decision.basis == ("measured" if found is profile else decision.basis)


def test_an_older_profile_prices_two_ranks_of_a_node_too() -> None:
    profile = load_profile("emulated-2x4")  # measured before pairs were
    decision = choose(Traffic.on_nodes("all_reduce", 1 << 20, (2,)), group_profile(profile, (2,)))
    assert decision.basis == "derived"


def test_what_a_price_rests_on_is_in_its_reason() -> None:
    profile = ideal("2x4")
    decision = choose(Traffic.on_nodes("all_gather", 1 << 20, (3, 3)), group_profile(profile, (3, 3)))
    assert decision.basis == "interpolated"
    assert decision.reason().endswith("; by interpolated curves")
    measured = choose(Traffic.on_nodes("all_gather", 1 << 20, (4, 4)), profile)
    assert measured.basis == "measured"
    assert "curves" not in measured.reason()


def test_a_profile_without_one_of_the_kinds_gives_derived_curves_and_without_both_none() -> None:
    older = ideal("2x4", without="pair")
    found = group_profile(older, (2, 2))
    assert found.curve("all_to_all", Resource.INTRA, 2).basis == "derived"
    bare = older.replace(curves=[curve for curve in older.curves if curve.link is not Resource.INTRA])
    with pytest.raises(PlanError, match="expected a curve of all_gather on intra for group size 2"):
        group_profile(bare, (2, 2)).curve("all_gather", Resource.INTRA, 2)


def test_curves_of_groups_never_fall() -> None:
    profile = load_profile("emulated-2x8")
    for nodes in ((2, 2), (3, 5), (7,), (1, 8), (8, 1), (6, 6)):
        for curve in group_profile(profile, nodes).curves:  # Curve itself refuses times that fall
            assert curve.at(1 << 20) <= curve.at(1 << 22)


def test_bad_groups_are_refused() -> None:
    profile = ideal("2x4")
    for nodes in ((5,), (2, 2, 2), (4, 5)):
        with pytest.raises(PlanError, match="does not fit"):
            group_profile(profile, nodes)
    with pytest.raises(UsageError, match="siblings"):
        group_profile(profile, (2, 2), -1)


def test_siblings_are_as_many_as_fit() -> None:
    assert most_siblings((4, 4), (2, 2)) == 2
    assert most_siblings((4, 4), (3, 1)) == 1
    assert most_siblings((3, 1), (1, 1)) == 1
    assert most_siblings((8,), (2,)) == 4


def test_a_planner_keeps_the_planners_of_its_groups() -> None:
    planner = Planner(ideal("2x4"))
    assert planner.of_group((2, 2)) is planner.of_group((2, 2))
    assert planner.of_group((2, 2)) is not planner.of_group((2, 2), 1)
    assert planner.of_group((4, 4)) is planner


def test_ranks_of_several_groups_predict_a_shape_alike() -> None:
    """The ranks of one that touches a slow node, of one that does not, and of one whose siblings were told."""
    planner = Planner(ideal("4x2").replace(slow_links=[SlowLink((3,), 0.25)]))
    groups = [Choices((1, 1), planner, Settings(), rates=rates) for rates in ((1.0, 1.0), (1.0, 0.25), ())]
    groups.append(Choices((2, 2, 2, 2), planner, Settings(), rates=(1.0, 1.0, 1.0, 0.25)))
    groups[0].use_siblings(1)
    asked = [choices.prices.predicted_us("all_to_all_v", 1 << 20, (1, 1)) for choices in groups]
    assert len(set(asked)) == 1
    own = [choices.prices.predicted_us("all_to_all_v", 1 << 20) for choices in groups[:2]]
    assert own[0] != own[1]
