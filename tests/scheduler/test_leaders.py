"""Plans by leaders: how many messages cross, what their steps cost, and what a profile says of them.

What they move is simulated in test_group_plans.
"""

from __future__ import annotations

import random

import pytest

from commlayer.profiles.catalog import load_profile
from commlayer.profiles.curve import Curve
from commlayer.profiles.errors import PlanError
from commlayer.profiles.links import Peaks, Resource
from commlayer.profiles.profile import Profile
from commlayer.scheduler import Plan, Policy, Strategy, Traffic, build, choose, price
from commlayer.scheduler.decision import Planner
from commlayer.scheduler.group_moves import Group, group_moves, owned_blocks
from commlayer.scheduler.group_profiles import group_profile
from commlayer.scheduler.leaders import LeaderPlace, staging_of_leaders
from commlayer.scheduler.moves import Message
from commlayer.scheduler.price import curve_of

COLLECTIVES = ["all_gather", "all_reduce", "reduce_scatter", "broadcast"]
SHAPES = [(4, 4), (5, 1), (3, 1), (2, 1, 3), (1, 1, 2)]
S = 960 * 64


def crossing(plan: Plan, nodes: tuple[tuple[int, ...], ...]) -> dict[str, list[tuple[int, Message]]]:
    """The messages of each leg between nodes, each with its sender."""
    traffic, node_of = plan.traffic, {rank: a for a, members in enumerate(nodes) for rank in members}
    n = traffic.group_size
    blocks = (traffic.logical_bytes // n,) * n if traffic.collective != "all_reduce" else owned_blocks(plan, nodes)
    found: dict[str, list[tuple[int, Message]]] = {}
    for rank in range(n):
        for step, moves in zip(plan.steps, group_moves(plan, Group(nodes, rank, blocks), root=n - 1)[0], strict=True):
            away = [(rank, message) for message in moves.sends if node_of[message.peer] != node_of[rank]]
            assert not away or step.resource is Resource.INTER
            found.setdefault(step.leg.name, []).extend(away)
    return {name: sent for name, sent in found.items() if sent}


def in_order(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    edges = [sum(shape[:a]) for a in range(len(shape) + 1)]
    return tuple(tuple(range(edges[a], edges[a + 1])) for a in range(len(shape)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_message_crosses_between_each_two_nodes(collective: str, shape: tuple[int, ...]) -> None:
    nodes, m = in_order(shape), len(shape)
    plan = build(Traffic.on_nodes(collective, S, shape), Strategy.LEADERS)
    (sent,) = crossing(plan, nodes).values()
    assert len(sent) == (m - 1 if collective == "broadcast" else m * (m - 1))
    others = build(Traffic.on_nodes(collective, S, shape), Strategy.HIERARCHICAL)
    assert len(sent) < sum(map(len, crossing(others, nodes).values()))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_busiest_leader_sends_or_gets_what_the_steps_size_says(collective: str, shape: tuple[int, ...]) -> None:
    nodes, m = in_order(shape), len(shape)
    plan = build(Traffic.on_nodes(collective, S, shape), Strategy.LEADERS)
    ((name, sent),) = crossing(plan, nodes).items()
    out, into = [0] * sum(shape), [0] * sum(shape)
    for rank, message in sent:
        out[rank] += message.region.size
        into[message.peer] += message.region.size
    (size,) = (step.bytes for step in plan.steps if step.leg.name == name)
    assert max(*out, *into) == pytest.approx(size * (m - 1) / m)


def test_ranks_of_nodes_in_any_order_find_their_blocks_in_few_messages() -> None:
    members = list(range(8))
    random.Random(3).shuffle(members)
    nodes = tuple(sorted(map(tuple, (sorted(members[:5]), sorted(members[5:])))))
    plan = build(Traffic.on_nodes("all_gather", S, tuple(map(len, nodes))), Strategy.LEADERS)
    (sent,) = crossing(plan, nodes).values()
    assert len({(rank, message.peer, message.tag) for rank, message in sent}) == len(sent) <= 8


def test_an_older_profile_prices_leaders_by_its_exchanges_and_no_lower() -> None:
    profile = load_profile("emulated-2x4")
    assert profile.find("leaders", Resource.INTER, 2) is None
    for collective in ("all_gather", "all_reduce", "reduce_scatter"):
        for size in (1 << 16, 1 << 20, 1 << 22):
            decision = Planner(profile).decide(Traffic.on_nodes(collective, size, (4, 4)))
            assert Strategy.LEADERS in {each.plan.strategy for each in decision.candidates}
            assert decision.plan.strategy is not Strategy.LEADERS


def profile_of(leaders_us: float) -> Profile:
    """Two nodes of four, where every exchange takes 1 ms and its bytes, and one between leaders ``leaders_us``."""
    sizes = (1 << 10, 1 << 20)

    def curve(name: str, link: Resource, ranks: int, least_us: float) -> Curve:
        return Curve(name, link, ranks, sizes, (least_us + 1, least_us + 1024), holdout_error=0.02)

    inter, intra = Resource.INTER, Resource.INTRA
    own = ("all_gather_single", "reduce_scatter_single", "all_reduce", "broadcast", "all_to_all_v")
    curves = [curve(name, link, n, 5000.0) for name in own for link, n in ((inter, 8), (inter, 2), (intra, 4))]
    curves += [
        curve(name, link, n, 1000.0)
        for name in ("all_gather", "all_to_all")
        for link, n in ((inter, 8), (inter, 2), (intra, 4), (intra, 2))
    ]
    curves += [curve("gather", intra, 4, 100.0), curve("scatter", intra, 4, 100.0)]
    curves += [curve("leaders", inter, 2, leaders_us)]
    curves += [curve(name, Resource.DEVICE, 1, 1.0) for name in ("copy", "reduce")]
    return Profile.create(
        name="made up",
        kind="emulated",
        source="a test",
        topology="2x4",
        peaks=Peaks(1.0, 10.0, 100.0),
        gather="whole",
        curves=tuple(curves),
    )


@pytest.mark.parametrize("collective", ["all_gather", "all_reduce", "reduce_scatter", "broadcast"])
def test_the_price_alone_chooses_between_leaders_and_shares(collective: str) -> None:
    traffic = Traffic.on_nodes(collective, 1 << 12, (4, 4))
    assert Planner(profile_of(100.0)).decide(traffic).plan.strategy is Strategy.LEADERS
    assert Planner(profile_of(9000.0)).decide(traffic).plan.strategy is not Strategy.LEADERS


def test_leaders_are_left_out_where_the_profile_has_no_curve_for_them() -> None:
    """One that names the rails of uneven groups' exchanges, but was never inside a node."""
    profile = profile_of(100.0)
    lacking = {("gather", 4), ("scatter", 4), ("all_to_all", 4)}
    kept = [each for each in profile.curves if (each.collective, each.group_size) not in lacking]
    profile, traffic = profile.replace(curves=kept), Traffic.on_nodes("all_gather", 1 << 12, (4, 4))
    found = {timeline.plan.strategy for timeline in choose(traffic, profile).candidates}
    assert Strategy.HIERARCHICAL in found
    assert Strategy.LEADERS not in found
    with pytest.raises(PlanError, match="all_to_all"):
        choose(traffic, profile, Policy(strategies=(Strategy.LEADERS,)))


@pytest.mark.parametrize("shape", SHAPES)
def test_leaders_that_would_need_much_memory_are_refused(shape: tuple[int, ...]) -> None:
    for collective in ("all_reduce", "reduce_scatter"):
        n = sum(shape)
        small = Traffic.on_nodes(collective, n << 12, shape)
        plan, needed = build(small, Strategy.LEADERS), staging_of_leaders(small)
        nodes = in_order(shape)
        blocks = [1 << 12] * n
        places = [LeaderPlace(plan, nodes, rank, blocks, 0) for rank in range(n)]
        assert max(place.staging_bytes for place in places) == needed
        with pytest.raises(PlanError, match="MiB beside the tensor"):
            build(Traffic.on_nodes(collective, 64 << 20, shape), Strategy.LEADERS)
    build(Traffic.on_nodes("all_gather", 64 << 20, shape), Strategy.LEADERS)


def test_siblings_leaders_share_the_card() -> None:
    """A curve is measured with one leader on each node; of two gradient groups each has its own."""
    profile = profile_of(100.0)
    plan = build(Traffic.on_nodes("all_gather", 1 << 12, (2, 2)), Strategy.LEADERS)
    (step,) = (step for step in plan.steps if step.resource is Resource.INTER)
    measured = profile.curve("leaders", Resource.INTER, 2)
    for siblings in (1, 2):
        curve = curve_of(step, plan, group_profile(profile, (2, 2), siblings))
        assert curve is not None
        assert curve.at(1 << 14) == pytest.approx(measured.at(siblings << 14), rel=1e-6)
    assert price(plan, group_profile(profile, (2, 2))).total_us > 0
