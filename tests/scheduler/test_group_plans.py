"""Plans over nodes, without processes: their moves on simulated ranks, their prices against closed forms."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.engine.group_plans import Choices
from commlayer.profiles.curve import Curve
from commlayer.profiles.errors import PlanError, SettingsError
from commlayer.profiles.links import Peaks, Resource
from commlayer.profiles.profile import Profile
from commlayer.scheduler import Buffer, Gather, Op, Plan, Policy, Strategy, Traffic, build, choose, price
from commlayer.scheduler.group_moves import Group, Layout, even_blocks, group_moves, owned_blocks
from commlayer.scheduler.group_strategies import candidates
from commlayer.scheduler.moves import ALIGN, MAX_TAGS, Message, Moves, Region
from commlayer.scheduler.named_plans import parse_plan, plan_words
from commlayer.scheduler.plan import owned_by_node
from commlayer.scheduler.slow_pairs import ring_order
from commlayer.scheduler.two_level import TwoLevel
from commlayer.settings import Settings

Nodes = tuple[tuple[int, ...], ...]
Array = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass
class Rank:
    """One simulated rank. ``posted`` are its sends, by (peer, tag)."""

    moves: list[Moves]
    buffers: dict[Buffer, Array]
    step: int = 0
    posted: dict[tuple[int, int], Region] = field(default_factory=dict)
    waiting: list[list[Message]] = field(default_factory=list)

    def view(self, region: Region) -> Array:
        assert 0 <= region.start <= region.stop <= len(self.buffers[region.buffer]), region
        return self.buffers[region.buffer][region.start : region.stop]


class Simulation:
    """Runs the executor's loop on every rank; messages are delivered as late as the waits allow, or at random before.

    A message is read from the sender's memory when it is delivered: what overwrites it too early shows.
    """

    def __init__(self, plan: Plan, ranks: list[Rank], seed: int) -> None:
        self.plan, self.ranks, self.chooser = plan, ranks, random.Random(seed)
        for rank in ranks:
            rank.waiting = [list(moves.receives) for moves in rank.moves]

    def run(self) -> None:
        count = len(self.plan.steps)
        while any(rank.step < count for rank in self.ranks):
            order = self.chooser.sample(range(len(self.ranks)), len(self.ranks))
            advanced = [self.advance(me) for me in order]
            assert any(advanced), f"{self.plan.name}: all ranks wait for each other"
        for me in range(len(self.ranks)):
            arrived = [self.deliver(me, step) for step in range(count)]
            assert all(arrived), f"{self.plan.name}: rank {me} waits for ever"
        assert not any(rank.posted for rank in self.ranks), "messages that nobody receives"

    def deliver(self, me: int, step: int) -> bool:
        """Deliver what rank ``me`` waits for in a step; False when a sender has not got so far."""
        left = []
        for message in self.ranks[me].waiting[step]:
            sender = self.ranks[message.peer]
            if (me, message.tag) not in sender.posted:
                left.append(message)
                continue
            source = sender.view(sender.posted.pop((me, message.tag)))
            target = self.ranks[me].view(message.region)
            assert len(source) == len(target), (self.plan.name, message)
            target[:] = source
        self.ranks[me].waiting[step] = left
        return not left

    def advance(self, me: int) -> bool:
        """Post one step, if its waits allow."""
        rank = self.ranks[me]
        if rank.step == len(self.plan.steps):
            return False
        if not all(self.deliver(me, earlier) for earlier in self.plan.steps[rank.step].after):
            return False
        self.post(rank, rank.moves[rank.step])
        rank.step += 1
        if self.chooser.random() < 0.3:
            self.deliver(me, self.chooser.randrange(rank.step))
        return True

    def post(self, rank: Rank, moves: Moves) -> None:
        for message in moves.sends:
            key = message.peer, message.tag
            assert key not in rank.posted, f"two messages under one tag: {message}"
            rank.posted[key] = message.region
        for copy in moves.copies:
            rank.view(copy.target)[:] = rank.view(copy.source).copy()
        for reduction in moves.reductions:
            total = rank.view(reduction.sources[0]).copy()
            target = rank.view(reduction.target)
            for source in reduction.sources[1:]:
                total = total + rank.view(source)
                target[:] = total  # as in-place sums do: a target that is a later source would show
            target[:] = total


def simulate(plan: Plan, ranks: list[Rank], seed: int) -> None:
    Simulation(plan, ranks, seed).run()


def bytes_of(rank: int, size: int) -> Array:
    return np.random.default_rng(rank).integers(0, 256, size, dtype=np.uint8)


def nodes_of(sizes: list[int], shuffle: int) -> Nodes:
    """Members dealt out to nodes in a random order, each node's in increasing order."""
    members = list(range(sum(sizes)))
    random.Random(shuffle).shuffle(members)
    edges = [0, *accumulate(sizes)]
    return tuple(tuple(sorted(members[start:stop])) for start, stop in pairwise(edges))


def traffic_of(collective: str, size: int, nodes: Nodes) -> Traffic:
    link = Resource.INTER if len(nodes) > 1 else Resource.INTRA
    return Traffic(size, sum(map(len, nodes)), 1, link, collective, tuple(map(len, nodes)))


def plans_of(traffic: Traffic) -> list[Plan]:
    """The plans of a case that apply; the property tests would be empty without any."""
    wanted = [
        (Strategy.DIRECT, 1, 1, ""),
        (Strategy.DIRECT, 4, 1, "dp"),
        (Strategy.HIERARCHICAL, 1, 1, ""),
        (Strategy.LEADERS, 1, 1, ""),
        (Strategy.PIPELINED, 2, 1, ""),
        (Strategy.PIPELINED, 5, 1, "cp"),
        (Strategy.PIPELINED, 5, 1, ""),
        (Strategy.PIPELINED, 1, 3, "dp"),
        (Strategy.PIPELINED, 3, 2, "dp"),
        (Strategy.PIPELINED, 4, 5, "pp"),
        (Strategy.PIPELINED, 8, 1, ""),
        (Strategy.RING, 1, 1, ""),
        (Strategy.RING, 3, 1, "dp"),
        (Strategy.RING, 5, 1, ""),
    ]
    found = [
        build(replace(traffic, lane=lane), strategy, chunks, pieces=pieces)
        for strategy, chunks, pieces, lane in wanted
        if applies(traffic, strategy, chunks, pieces)
    ]
    slow = replace(traffic, slow_pairs=((0, 1, 0.25),) if len(traffic.nodes) > 1 else ())
    return [*found, *(build(slow, Strategy.RING, chunks) for chunks in (1, 4) if applies(slow, Strategy.RING, chunks))]


def applies(traffic: Traffic, strategy: Strategy, chunks: int, pieces: int = 1) -> bool:
    try:
        build(traffic, strategy, chunks, pieces=pieces)
    except PlanError:
        return False
    return True


UNEVEN = ([3, 1], [1, 3], [2, 1, 3], [5, 1], [5, 3], [1, 1, 2], [1, 3, 3])
shapes = st.one_of(
    st.sampled_from(UNEVEN),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.tuples(st.integers(2, 5), st.integers(1, 4)).map(lambda shape: [shape[1]] * shape[0]),
).filter(lambda sizes: 1 < sum(sizes) <= 10)


@given(shapes, st.integers(0, 1000), st.integers(0, 400), st.integers(0, 1000))
def test_all_gather(sizes: list[int], shuffle: int, block: int, seed: int) -> None:
    nodes, n = nodes_of(sizes, shuffle), sum(sizes)
    expected = np.concatenate([bytes_of(rank, block) for rank in range(n)])
    for plan in plans_of(traffic_of("all_gather", n * block, nodes)):
        ranks = []
        for rank in range(n):
            moves, staging = group_moves(plan, Group(nodes, rank, (block,) * n))
            assert staging == 0
            buffers = {Buffer.INPUT: bytes_of(rank, block), Buffer.OUTPUT: np.zeros(n * block, np.uint8)}
            ranks.append(Rank(list(moves), buffers))
        simulate(plan, ranks, seed)
        for done in ranks:
            assert np.array_equal(done.buffers[Buffer.OUTPUT], expected), plan.name


@given(shapes, st.integers(0, 1000), st.integers(0, 400), st.integers(0, 1000))
def test_reduce_scatter(sizes: list[int], shuffle: int, block: int, seed: int) -> None:
    nodes, n = nodes_of(sizes, shuffle), sum(sizes)
    total = np.sum([bytes_of(rank, n * block) for rank in range(n)], axis=0, dtype=np.uint8)
    for plan in plans_of(traffic_of("reduce_scatter", n * block, nodes)):
        ranks = []
        for rank in range(n):
            moves, staging = group_moves(plan, Group(nodes, rank, (block,) * n))
            buffers = {
                Buffer.INPUT: bytes_of(rank, n * block),
                Buffer.OUTPUT: np.zeros(block, np.uint8),
                Buffer.STAGING: np.zeros(staging, np.uint8),
            }
            ranks.append(Rank(list(moves), buffers))
        simulate(plan, ranks, seed)
        for index, done in enumerate(ranks):
            mine = np.asarray(total)[index * block : (index + 1) * block]
            assert np.array_equal(done.buffers[Buffer.OUTPUT], mine), plan.name
            assert np.array_equal(done.buffers[Buffer.INPUT], bytes_of(index, n * block)), "the input was changed"


@given(
    shapes,
    st.integers(0, 1000),
    st.integers(1, 3000),
    st.integers(0, 1000),
    st.lists(st.sampled_from([1.0, 1.0, 0.7, 0.25, 0.05]), min_size=5, max_size=5),
)
def test_all_reduce_in_place(sizes: list[int], shuffle: int, size: int, seed: int, rates: list[float]) -> None:
    nodes, n = nodes_of(sizes, shuffle), sum(sizes)
    total = np.sum([bytes_of(rank, size) for rank in range(n)], axis=0, dtype=np.uint8)
    traffic = traffic_of("all_reduce", size, nodes)
    unequal = replace(traffic, rates=tuple(rates[: len(sizes)]))
    for plan in [*plans_of(traffic), *plans_of(unequal)]:
        ranks = []
        for rank in range(n):
            moves, staging = group_moves(plan, Group(nodes, rank, owned_blocks(plan, nodes)))
            content = bytes_of(rank, size)
            buffers = {Buffer.INPUT: content, Buffer.OUTPUT: content, Buffer.STAGING: np.zeros(staging, np.uint8)}
            ranks.append(Rank(list(moves), buffers))
        simulate(plan, ranks, seed)
        for done in ranks:
            assert np.array_equal(done.buffers[Buffer.OUTPUT], total), plan.name


@pytest.mark.parametrize(
    ("rates", "owned"),
    [
        ((1.0, 1.0, 1.0, 0.25), (1 / 3, 1 / 3, 1 / 3, 0.0)),
        ((1.0, 1.0, 1.0, 1.0), (0.25, 0.25, 0.25, 0.25)),
        ((0.5, 1.0, 0.5), (0.0, 1.0, 0.0)),
        ((1.0, 1.0, 1.0, 0.75), (0.3, 0.3, 0.3, 0.1)),
    ],
)
def test_a_slow_card_owns_as_much_as_lets_all_cards_end_together(
    rates: tuple[float, ...], owned: tuple[float, ...]
) -> None:
    m = len(rates)
    traffic = Traffic.on_nodes("all_reduce", 1 << 20, (2,) * m, rates=rates)
    found = owned_by_node(traffic, is_duplex=True)
    assert found == pytest.approx(owned)
    assert owned_by_node(traffic, is_duplex=False) == (1 / m,) * m
    times = [(1 + (m - 2) * part) / rate for part, rate in zip(found, rates, strict=True)]
    assert all(
        time == pytest.approx(max(times)) or part in (0.0, max(found)) for time, part in zip(times, found, strict=True)
    )
    plan = build(traffic, Strategy.PIPELINED, 4)
    assert plan.is_duplex
    blocks = owned_blocks(plan, tuple((2 * k, 2 * k + 1) for k in range(m)))
    assert sum(blocks) == 1 << 20
    shares = [sum(blocks[2 * k : 2 * k + 2]) / (1 << 20) for k in range(m)]
    assert shares == pytest.approx(owned, abs=0.001)
    crossing = sum(step.bytes for step in plan.steps if step.resource is Resource.INTER)
    equal = build(replace(traffic, rates=()), Strategy.PIPELINED, 4)
    unaware = sum(step.bytes for step in equal.steps if step.resource is Resource.INTER)
    slowest = min(rates)  # the rails' curve is of the slowest card
    assert crossing / unaware == pytest.approx(max(times) * slowest / (2 * (m - 1) / m))


def test_rates_change_no_plan_that_cannot_gain_by_them() -> None:
    rates = (1.0, 0.25)
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        for nodes in ((2, 2), (4, 4)):
            plain = Traffic.on_nodes(collective, 1 << 20, nodes)
            for strategy, chunks in ((Strategy.HIERARCHICAL, 1), (Strategy.PIPELINED, 4)):
                if not applies(plain, strategy, chunks):
                    continue
                known = build(replace(plain, rates=rates), strategy, chunks)
                assert known.steps == build(plain, strategy, chunks).steps
                assert not known.is_duplex


@pytest.mark.parametrize("rates", [(1.0,), (1.0, 0.0), (1.0, 1.5)])
def test_rates_that_cannot_be_are_refused(rates: tuple[float, ...]) -> None:
    with pytest.raises(PlanError, match="expected a rate above 0 and at most 1 for each of 2 nodes"):
        Traffic.on_nodes("all_reduce", 1 << 20, (2, 2), rates=rates)


@given(shapes, st.integers(0, 1000), st.integers(1, 3000), st.integers(0, 9), st.integers(0, 1000))
def test_broadcast(sizes: list[int], shuffle: int, size: int, root: int, seed: int) -> None:
    nodes, n = nodes_of(sizes, shuffle), sum(sizes)
    root %= n
    for plan in plans_of(traffic_of("broadcast", size, nodes)):
        ranks = []
        for rank in range(n):
            moves, _ = group_moves(plan, Group(nodes, rank, even_blocks(size, n)), root)
            content = bytes_of(rank, size)
            ranks.append(Rank(list(moves), {Buffer.INPUT: content, Buffer.OUTPUT: content}))
        simulate(plan, ranks, seed)
        for done in ranks:
            assert np.array_equal(done.buffers[Buffer.OUTPUT], bytes_of(root, size)), plan.name


@given(
    st.sampled_from([*UNEVEN, [2, 2], [3, 3], [2, 2, 2], [3, 3, 3]]),
    st.integers(0, 1000),
    st.integers(0, 1000),
    st.sampled_from([0, 1, 40]),
)
def test_two_level_all_to_all(shape: list[int], shuffle: int, seed: int, largest: int) -> None:
    nodes, n = nodes_of(shape, shuffle), sum(shape)
    chooser = random.Random(seed)
    sizes = [[chooser.choice([0, chooser.randint(0, largest)]) for _ in range(n)] for _ in range(n)]
    plan = build(traffic_of("all_to_all_v", 1, nodes), Strategy.HIERARCHICAL)
    contents = [[bytes_of(100 * i + j, sizes[i][j]) for j in range(n)] for i in range(n)]
    calls = [TwoLevel(nodes, rank, sizes[rank], [row[rank] for row in sizes]) for rank in range(n)]
    ranks = []
    for rank, call in enumerate(calls):
        here = nodes[call.a]
        counts = [calls[peer].counts()[call.i] for peer in here]  # what each local rank tells this one
        sorted_, passed, transit = call.after(counts)
        before = call.before()
        staging = np.zeros(call.staging_bytes, np.uint8)
        own = np.array([count for row in call.counts() for count in row], np.int64).view(np.uint8)
        staging[: len(own)] = own
        moves = [before[0], sorted_, Moves(passed.sends, before[2].receives), before[3]]
        buffers = {
            Buffer.INPUT: np.concatenate(contents[rank]),
            Buffer.OUTPUT: np.zeros(sum(row[rank] for row in sizes), np.uint8),
            Buffer.STAGING: staging,
            Buffer.TRANSIT: np.zeros(transit, np.uint8),
        }
        ranks.append(Rank(moves, buffers))
    simulate(plan, ranks, seed)
    for rank, call in enumerate(calls):
        assert np.array_equal(ranks[rank].buffers[Buffer.OUTPUT], np.concatenate([row[rank] for row in contents]))
        region = call.counts_region
        told = (
            ranks[rank]
            .view(Region(Buffer.STAGING, region.start, region.stop))
            .view(np.int64)
            .reshape(len(nodes[call.a]), -1)
        )
        for place, peer in enumerate(nodes[call.a]):
            if peer != rank:
                assert told[place].tolist() == calls[peer].counts()[call.i]


@pytest.mark.parametrize("shape", [*UNEVEN, [2, 2], [3, 3, 3]], ids=str)
def test_a_two_level_all_to_all_is_priced_by_its_busiest_relay_and_card(shape: list[int]) -> None:
    nodes, n, m, width = nodes_of(shape, 1), sum(shape), len(shape), max(shape)
    sizes = [[840] * n] * n
    calls = [TwoLevel(nodes, rank, sizes[rank], [row[rank] for row in sizes]) for rank in range(n)]
    _, sort, pass_on, _ = build(traffic_of("all_to_all_v", 840 * n, nodes), Strategy.HIERARCHICAL).steps
    come, out = [0] * n, [0] * m
    for rank, call in enumerate(calls):
        sorted_, passed, _ = call.after([calls[peer].counts()[call.i] for peer in nodes[call.a]])
        come[rank] = sum(message.region.size for message in sorted_.receives)
        out[call.a] += sum(message.region.size for message in passed.sends)
        messages = [(message.peer, message.tag) for message in passed.sends]
        assert len(messages) == len(set(messages)) <= -(-(n - len(nodes[call.a])) // len(nodes[call.a]))
    assert max(come) == pytest.approx(sort.bytes * (width - 1) / width)
    assert max(out) == pytest.approx(pass_on.bytes * (m - 1) / m * min(shape))


@given(st.sampled_from(UNEVEN), st.integers(0, 1000), st.integers(0, 100_000))
def test_every_node_owns_as_much_of_a_sum_as_the_others(sizes: list[int], shuffle: int, size: int) -> None:
    nodes, n = nodes_of(sizes, shuffle), sum(sizes)
    over_nodes, on_one_level = (
        owned_blocks(build(replace(traffic_of("all_reduce", n, nodes), logical_bytes=size or 1), strategy), nodes)
        for strategy in (Strategy.PIPELINED, Strategy.DIRECT)
    )
    assert sum(over_nodes) == max(size, 1)
    assert all(edge % ALIGN == 0 for edge in list(accumulate(over_nodes))[:-1])
    for members in nodes:
        assert abs(sum(over_nodes[k] for k in members) - size / len(nodes)) < ALIGN * n
        assert all(abs(over_nodes[k] - size / len(nodes) / len(members)) < 2 * ALIGN for k in members)
    assert on_one_level == even_blocks(max(size, 1), n)


@given(
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
    st.sampled_from(UNEVEN),
    st.integers(0, 1000),
    st.tuples(st.integers(1, 8), st.integers(1, 4)),
)
def test_the_busiest_card_carries_what_the_steps_sizes_say(
    collective: str, sizes: list[int], shuffle: int, cuts: tuple[int, int]
) -> None:
    """A step's size is that of an exchange between one rank of every node, as many at once as the emptiest node has ranks."""
    nodes, n, m, size = nodes_of(sizes, shuffle), sum(sizes), len(sizes), 1 << 20
    plan = build(traffic_of(collective, n * size, nodes), Strategy.PIPELINED, cuts[0], pieces=cuts[1])
    blocks = (size,) * n if collective != "all_reduce" else owned_blocks(plan, nodes)
    node_of = {rank: a for a, members in enumerate(nodes) for rank in members}
    through: dict[str, list[list[int]]] = {}
    for rank in range(n):
        for step, moves in zip(plan.steps, group_moves(plan, Group(nodes, rank, blocks))[0], strict=True):
            away = [m.region.size for m in moves.sends if node_of[m.peer] != node_of[rank]]
            come = [m.region.size for m in moves.receives if node_of[m.peer] != node_of[rank]]
            assert step.resource is Resource.INTER or not away + come
            if step.resource is Resource.INTER:
                cards = through.setdefault(step.leg.name, [[0, 0] for _ in nodes])
                cards[node_of[rank]][0] += sum(away)
                cards[node_of[rank]][1] += sum(come)
    for name, cards in through.items():
        expected = sum(s.bytes for s in plan.steps if s.leg.name == name) * (m - 1) / m * min(sizes)
        assert max(map(max, cards)) == pytest.approx(expected, rel=0.01)


@given(
    st.sampled_from(UNEVEN),
    st.lists(st.integers(0, 5000), min_size=8, max_size=8),
    st.integers(1, 5),
    st.sampled_from([64, 100, 640]),
)
def test_every_node_cuts_a_block_at_multiples_of_the_same_length(
    sizes: list[int], lengths: list[int], chunks: int, align: int
) -> None:
    """Rows that share scales stay together, wherever a node of another size cuts; and all of a block is handled once."""
    nodes, n = nodes_of(sizes, 0), sum(sizes)
    layout = Layout(nodes, lengths[:n], chunks, align)
    for a, b in product(range(len(nodes)), repeat=2):
        pieces = [
            piece for i in range(len(nodes[a])) for chunk in range(chunks) for piece in layout.pieces(b, a, i, chunk)
        ]
        assert all(piece.start % align == 0 for piece in pieces)
        for owner in nodes[b]:
            covered = sorted((piece.start, piece.stop) for piece in pieces if piece.owner == owner)
            assert list(accumulate((stop - start for start, stop in covered), initial=0))[:-1] == [
                s for s, _ in covered
            ]
            assert sum(stop - start for start, stop in covered) == lengths[owner]


@given(
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
    st.sampled_from([sizes for sizes in UNEVEN if len(sizes) > 2] + [[2, 2, 2, 2], [1] * 5, [2] * 5]),
    st.integers(1, 5),
)
def test_a_ring_uses_each_edge_of_its_order_and_no_other_one(collective: str, sizes: list[int], chunks: int) -> None:
    nodes, n, m, size = nodes_of(sizes, 7), sum(sizes), len(sizes), 1 << 16
    traffic = replace(traffic_of(collective, n * size, nodes), slow_pairs=((0, 1, 0.25),))
    plan = build(traffic, Strategy.RING, chunks)
    blocks = (size,) * n if collective != "all_reduce" else owned_blocks(plan, nodes)
    node_of = {rank: a for a, members in enumerate(nodes) for rank in members}
    over: dict[tuple[int, int], int] = {}
    for rank in range(n):
        for step, moves in zip(plan.steps, group_moves(plan, Group(nodes, rank, blocks))[0], strict=True):
            for message in moves.sends:
                edge = node_of[rank], node_of[message.peer]
                assert (step.resource is Resource.INTER) == (edge[0] != edge[1])
                over[edge] = over.get(edge, 0) + message.region.size
    order = ring_order(traffic)
    edges = {(a, b) for a, b in over if a != b}
    assert edges == set(zip(order, (*order[1:], order[0]), strict=True))
    assert (m < 4) or not edges & {(0, 1), (1, 0)}
    expected = sum(step.bytes for step in plan.steps if step.resource is Resource.INTER) * (m - 1) / m * min(sizes)
    assert max(over[edge] for edge in edges) == pytest.approx(expected, rel=0.01)


@given(st.integers(0, 10_000), st.integers(1, 9))
def test_even_blocks_cover_everything_and_cut_no_element(size: int, parts: int) -> None:
    blocks = even_blocks(size, parts)
    assert sum(blocks) == size
    assert all(edge % ALIGN == 0 for edge in list(accumulate(blocks))[:-1])


def test_a_node_sends_each_byte_once_over_the_wire() -> None:
    """Hierarchy saves bytes: of an all_gather, (m−1)/m of the total enters a node, instead of l times that."""
    nodes, block, n = ((0, 1, 2, 3), (4, 5, 6, 7)), 1024, 8
    node_of = {rank: a for a, members in enumerate(nodes) for rank in members}

    def crossing(strategy: Strategy) -> int:
        plan = build(traffic_of("all_gather", n * block, nodes), strategy)
        moves = [group_moves(plan, Group(nodes, rank, (block,) * n))[0] for rank in range(4)]
        sends = [(rank, m) for rank in range(4) for step in moves[rank] for m in step.sends]
        return sum(m.region.size for rank, m in sends if node_of[m.peer] != node_of[rank])

    assert crossing(Strategy.HIERARCHICAL) == 4 * block
    assert crossing(Strategy.DIRECT) == 16 * block


# What applies


@pytest.mark.parametrize(
    ("collective", "nodes", "strategy", "why"),
    [
        ("broadcast", (2, 2), Strategy.DIRECT, "flat form"),
        ("all_to_all_v", (2, 3), Strategy.LEADERS, "something else for each other"),
        ("all_reduce", (2,), Strategy.LEADERS, "several nodes"),
        ("all_gather", (4,), Strategy.HIERARCHICAL, "several nodes"),
        ("all_gather", (1, 1), Strategy.HIERARCHICAL, "several ranks on one"),
        ("all_reduce", (2, 2), Strategy.PIPELINED_COPY, "replicated"),
        ("all_reduce", (2, 2), Strategy.RING, "over three to 32 nodes"),
        ("all_gather", (2,) * 33, Strategy.RING, "over three to 32 nodes"),
        ("broadcast", (2, 2, 2), Strategy.RING, "it is an all_gather, a reduce_scatter or an all_reduce"),
    ],
)
def test_a_plan_that_does_not_apply_says_why(
    collective: str, nodes: tuple[int, ...], strategy: Strategy, why: str
) -> None:
    with pytest.raises(PlanError, match=why):
        build(Traffic(4096, sum(nodes), 1, Resource.INTER, collective, nodes), strategy)


@pytest.mark.parametrize("chunks", [4000, 9999, 10**9])
def test_a_plan_of_more_messages_than_tags_is_none(chunks: int) -> None:
    """A call that began with it would break in the middle of a job."""
    for traffic in (Traffic(1 << 30, 4, 1, Resource.INTER, "all_reduce", (2, 2)), Traffic(1 << 30, 4, 2)):
        with pytest.raises(PlanError, match=r"more than 16384 message tags.*use fewer chunks"):
            build(traffic, Strategy.PIPELINED, chunks)


def test_replicated_tokens_of_many_nodes_get_no_plan_that_could_not_run() -> None:
    found = list(candidates(Traffic(1 << 30, 512, 8), Gather.REMOTE, 0, 32))
    assert {plan.strategy for plan in found} >= {Strategy.FLAT, Strategy.HIERARCHICAL, Strategy.PIPELINED}
    assert max(plan.chunks for plan in found) == 12
    assert all(len(plan.steps) * plan.tags_per_step <= MAX_TAGS for plan in found)


def test_too_many_chunks_for_all_calls_leave_them_flat_and_say_why() -> None:
    choices = Choices((2, 2), None, Settings(plan="pipelined:8000"))
    assert choices.plan("all_reduce", 1 << 20) is None
    ((reason, times),) = choices.reasons.items()
    assert "use fewer chunks" in reason
    assert times == 1


def test_candidates_over_thousands_of_nodes_are_those_that_can_be_told_apart() -> None:
    nodes = (2,) * 6000
    found = [
        plan.name
        for plan in candidates(Traffic(1 << 30, 12000, 1, Resource.INTER, "broadcast", nodes), Gather.WHOLE, 0, 2)
    ]
    assert found == ["flat"]


def test_ordered_sums_are_direct_ones_only() -> None:
    traffic = Traffic(4096, 4, 1, Resource.INTER, "all_reduce", (2, 2), is_ordered=True)
    assert build(traffic, Strategy.DIRECT).name == "flat_direct"
    for strategy in (Strategy.FLAT, Strategy.HIERARCHICAL):
        with pytest.raises(PlanError, match="order"):
            build(traffic, strategy)


def test_traffic_refuses_nodes_that_do_not_add_up() -> None:
    with pytest.raises(PlanError, match="number of them on each node"):
        Traffic(4096, 4, 1, Resource.INTER, "all_reduce", (2, 3))
    with pytest.raises(PlanError, match="expected all_to_all or one of"):
        Traffic(4096, 4, 1, Resource.INTER, "all_reduced", (2, 2))


@pytest.mark.parametrize("text", ["pipelined:4", "pipelined×4"])
def test_a_plan_by_name(text: str) -> None:
    assert parse_plan(text) == (Strategy.PIPELINED, 4)


@pytest.mark.parametrize("text", ["Auto", " tried ", "flat:1", "PIPELINED×4"])
def test_a_plan_is_written_in_one_way(text: str) -> None:
    assert plan_words(text) == text.strip().lower().replace("×", ":").removesuffix(":1")


def test_chunks_of_a_plan_that_has_none() -> None:
    with pytest.raises(SettingsError, match="leaders goes in one chunk, got 'leaders:2': leave the number out"):
        parse_plan("leaders:2")


@pytest.mark.parametrize("text", ["pipeline", "pipelined:0", "pipelined:x", "", "pipelined:8193"])
def test_no_plan_of_that_name(text: str) -> None:
    with pytest.raises(SettingsError, match="COMMLAYER_PLAN must be one of"):
        parse_plan(text)


# Prices


def linear_profile(latency_us: float = 100.0, inter: float = 12.5, intra: float = 250.0) -> Profile:
    """2×4; every operation takes latency + bytes / rate; ``inter`` and ``intra`` in bytes per µs and rank."""
    sizes = tuple(4**k for k in range(3, 15))

    def curve(collective: str, link: Resource, group_size: int, rate: float, more_us: float = latency_us) -> Curve:
        return Curve(collective, link, group_size, sizes, tuple(more_us + size / rate for size in sizes))

    inter_, intra_, device = Resource.INTER, Resource.INTRA, Resource.DEVICE
    return Profile.create(
        name="linear",
        kind="measured",
        source="made up",
        topology="2x4",
        peaks=Peaks(inter / 1e3 * 4, intra / 1e3 * 4, 10.0),
        gather="remote",
        curves=[
            curve("all_gather", inter_, 2, inter * 2),
            curve("all_to_all", inter_, 2, inter * 2),
            curve("all_gather", intra_, 4, intra),
            curve("all_to_all", intra_, 4, intra),
            curve("copy", device, 1, 5000.0, 1.0),
            curve("reduce", device, 1, 5000.0, 1.0),
            *(curve(name, inter_, 8, inter) for name in ("all_gather", "all_to_all")),
            *(curve(name, inter_, 8, inter * 4) for name in ("all_gather_single", "all_to_all_v")),
            *(curve(name, inter_, 8, inter * 2) for name in ("reduce_scatter_single", "all_reduce", "broadcast")),
        ],
    )


def test_an_all_gather_over_nodes_costs_its_two_stages() -> None:
    size = 1 << 20
    plan = build(Traffic(size, 8, 1, Resource.INTER, "all_gather", (4, 4)), Strategy.HIERARCHICAL)
    expected = 100 + size / 4 / 25 + 100 + size / 250
    assert price(plan, linear_profile(), interference=False).total_us == pytest.approx(expected, rel=1e-3)


def test_an_all_reduce_in_chunks_hides_the_stage_inside_nodes() -> None:
    profile, size = linear_profile(latency_us=1.0), 1 << 24
    traffic = Traffic(size, 8, 1, Resource.INTER, "all_reduce", (4, 4))
    whole, chunked = (
        price(build(traffic, s, n), profile).total_us for s, n in [(Strategy.HIERARCHICAL, 1), (Strategy.PIPELINED, 16)]
    )
    wire = 2 * size / 4 / 25
    assert wire < chunked < whole
    assert chunked < wire + (whole - wire) / 4


@pytest.mark.parametrize("nodes", [(3, 1), (2, 2)])
def test_beyond_what_was_measured_no_call_on_uneven_nodes_is_faster_than_the_card(nodes: tuple[int, ...]) -> None:
    """Two sizes whose times hardly differ would promise any size for nothing."""
    profile, size = linear_profile(), 1 << 24
    own = Curve("all_gather_single", Resource.INTER, 4, (1 << 10, 1 << 20), (1000.0, 1100.0))
    flat = profile.replace(topology="+".join(map(str, nodes)), curves=[own])
    plan = build(Traffic(size, 4, 1, Resource.INTER, "all_gather", nodes), Strategy.FLAT)
    card_us = size * 3 / 4 / min(nodes) / (flat.peaks.inter_gbps * 1e3)
    total_us = price(plan, flat).total_us
    assert total_us == pytest.approx(card_us if len(set(nodes)) > 1 else own.at(size))
    assert own.at(size) < card_us
    within = build(Traffic(1 << 20, 4, 1, Resource.INTER, "all_gather", nodes), Strategy.FLAT)
    assert price(within, flat).total_us == pytest.approx(1100.0)


def test_small_messages_stay_flat_and_large_ones_do_not() -> None:
    profile = linear_profile()
    for collective in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all_v"):
        small = choose(Traffic(1024, 8, 1, Resource.INTER, collective, (4, 4)), profile)
        assert small.plan.strategy is Strategy.FLAT, collective
    for collective in ("reduce_scatter", "all_reduce", "broadcast"):
        large = choose(Traffic(32 << 20, 8, 1, Resource.INTER, collective, (4, 4)), profile, Policy(max_chunks=8))
        assert large.plan.strategy is Strategy.PIPELINED, large.reason()
        assert large.bottleneck is Resource.INTER


def test_a_profile_without_the_curve_says_which_one_is_missing() -> None:
    with pytest.raises(PlanError, match="all_gather_single on inter for group size 6"):
        choose(Traffic(1 << 20, 6, 1, Resource.INTER, "all_gather", (3, 3)), linear_profile())


def test_steps_wait_for_their_own_chunk_and_gathers_for_the_one_before() -> None:
    plan = build(Traffic(1 << 20, 8, 1, Resource.INTER, "all_reduce", (4, 4)), Strategy.PIPELINED, 4)
    for step in plan.steps:
        for earlier in (plan.steps[index] for index in step.after):
            is_gather = step.op is earlier.op is Op.ALL_GATHER and step.resource is earlier.resource
            assert step.chunk - earlier.chunk == (1 if is_gather else 0)
    assert sum(step.op is Op.REDUCE for step in plan.steps) == 8
    assert math.isclose(
        sum(s.bytes for s in plan.steps if s.op is Op.ALL_GATHER and s.resource is Resource.INTRA), 1 << 20
    )
