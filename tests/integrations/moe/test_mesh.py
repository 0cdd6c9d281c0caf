"""The folded mesh: its groups against brute force and against Megatron-Core, and the real groups in real processes."""

from __future__ import annotations

import json
import random
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.parameter_marks import mark_experts
from commlayer.profiles.errors import DisagreementError, GroupError
from commlayer.profiles.links import Resource
from commlayer.profiles.topology import Topology
from commlayer.scheduler.mapping.folded import ATTENTION_AXES, AXES, MOE_AXES, FoldedMapping
from commlayer.testing.plugin import ClusterFactory

PAGE = Path(__file__).resolve().parents[3] / "docs" / "mesh.md"


# Ranks


def degrees(world_size: int) -> Iterator[dict[str, int]]:
    """Every choice of tp, cp, pp, ep, etp that the world has room for."""
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for pp in sizes:
        pairs = [pair for pair in product(sizes, repeat=2) if world_size % (pair[0] * pair[1] * pp) == 0]
        for (tp, cp), (etp, ep) in product(pairs, repeat=2):
            yield {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}


def of(world_size: int, choice: dict[str, Any], **orders: Any) -> FoldedMapping:
    return FoldedMapping(world_size, **choice, **orders)


def some_degrees(world_size: int, count: int = 12) -> list[dict[str, int]]:
    found = list(degrees(world_size))
    return random.Random(world_size).sample(found, min(count, len(found)))


def nested_loops(mapping: FoldedMapping) -> list[dict[str, int]]:
    """The coordinates of every rank, counted out by loops: the last axis of an order is the outermost loop."""
    places: list[dict[str, int]] = [{} for _ in range(mapping.world_size)]
    for order in (mapping.attention_order, mapping.moe_order):
        outermost_first = order.split("-")[::-1]
        sizes = {axis: getattr(mapping, axis) for axis in outermost_first}
        rank = 0
        for a in range(sizes[outermost_first[0]]):
            for b in range(sizes[outermost_first[1]]):
                for c in range(sizes[outermost_first[2]]):
                    for d in range(sizes[outermost_first[3]]):
                        places[rank].update(zip(outermost_first, (a, b, c, d), strict=True))
                        rank += 1
        assert rank == mapping.world_size
    return places


def groups_by_hand(mapping: FoldedMapping, places: list[dict[str, int]], axis: str) -> list[tuple[int, ...]]:
    """Ranks are in one group where they agree on every other axis of the side to which ``axis`` belongs."""
    side = ATTENTION_AXES if set(AXES[axis]) <= set(ATTENTION_AXES) else MOE_AXES
    members: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places):
        members.setdefault(tuple(place[other] for other in side if other not in AXES[axis]), []).append(rank)
    return sorted(map(tuple, members.values()))


def check_against_brute_force(mapping: FoldedMapping) -> None:
    places = nested_loops(mapping)
    assert [mapping.coordinates(rank) for rank in range(mapping.world_size)] == places
    for axis in AXES:
        groups = mapping.groups(axis)
        assert groups == groups_by_hand(mapping, places, axis), (mapping, axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mapping.world_size))
        assert {len(group) for group in groups} == {mapping.size(axis)}
        of_rank = {rank: group for group in groups for rank in group}
        for rank in {0, mapping.world_size // 2, mapping.world_size - 1}:
            assert mapping.group_of(axis, rank) == of_rank[rank]


def check_properties(mapping: FoldedMapping) -> None:
    assert mapping.tp * mapping.cp * mapping.dp == mapping.etp * mapping.ep * mapping.edp
    assert all(stage_by_moe(mapping, stage[-1]) == list(stage) for stage in mapping.groups("stage"))
    assert mapping.expert_gradient_scale == pytest.approx(mapping.tp / (mapping.etp * mapping.ep))
    for axes in (ATTENTION_AXES, MOE_AXES):
        for one, other in permutations(axes, 2):
            mine = mapping.group_of(one, mapping.world_size // 2)
            assert set(mine) & set(mapping.group_of(other, mapping.world_size // 2)) == {mapping.world_size // 2}


def stage_by_moe(mapping: FoldedMapping, rank: int) -> list[int]:
    """All ranks that one reaches from ``rank`` over the groups etp, ep and edp."""
    reached = {rank}
    for axis in ("etp", "ep", "edp"):
        reached = {peer for one in reached for peer in mapping.group_of(axis, one)}
    return sorted(reached)


@pytest.mark.parametrize("world_size", range(1, 65))
def test_groups_of_hundreds_of_mappings_against_brute_force(world_size: int) -> None:
    for choice in some_degrees(world_size):
        mapping = of(world_size, choice)
        check_against_brute_force(mapping)
        check_properties(mapping)


def test_pipeline_groups_are_those_of_both_mappings_in_the_papers_best_ones() -> None:
    """The errata: by the paper's listing 1 those of the first two differ."""
    for world_size, tp, ep, pp in ((128, 2, 8, 8), (128, 4, 8, 8), (256, 8, 8, 16), (64, 2, 4, 4)):
        mapping = FoldedMapping(world_size, tp=tp, ep=ep, pp=pp)
        assert mapping.groups("pp") == [tuple(range(r, world_size, world_size // pp)) for r in range(world_size // pp)]
        check_against_brute_force(mapping)


@pytest.mark.parametrize("world_size", [8, 12])
def test_every_order_is_right_or_refused(world_size: int) -> None:
    seen = {"right": 0, "refused": 0}
    orders = list(product(permutations(ATTENTION_AXES), permutations(MOE_AXES)))
    for choice in some_degrees(world_size, 12):
        for attention, moe in random.Random(1).sample(orders, 40):
            names = {"attention_order": "-".join(attention), "moe_order": "-".join(moe)}
            agree = pipeline_by_hand(world_size, choice, attention) == pipeline_by_hand(world_size, choice, moe)
            if agree:
                check_against_brute_force(of(world_size, choice, **names))
            else:
                with pytest.raises(GroupError, match="pipeline groups of attention and MoE layers differ"):
                    of(world_size, choice, **names)
            seen["right" if agree else "refused"] += 1
    assert min(seen.values()) > 20


def pipeline_by_hand(world_size: int, choice: dict[str, int], order: tuple[str, ...]) -> set[frozenset[int]]:
    sizes = choice | {
        "dp": world_size // (choice["tp"] * choice["cp"] * choice["pp"]),
        "edp": world_size // (choice["etp"] * choice["ep"] * choice["pp"]),
    }
    outermost_first = order[::-1]
    members: dict[tuple[int, ...], set[int]] = {}
    for rank, place in enumerate(product(*(range(sizes[axis]) for axis in outermost_first))):
        key = tuple(at for axis, at in zip(outermost_first, place, strict=True) if axis != "pp")
        members.setdefault(key, set()).add(rank)
    return {frozenset(group) for group in members.values()}


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
def test_groups_are_those_of_megatron_core(order: str) -> None:
    parallel_state = pytest.importorskip(
        "megatron.core.parallel_state", reason="NOT TESTED: megatron-core is not installed"
    )
    ours = {"attention_order": order.replace("-ep", ""), "moe_order": order.replace("-cp", "")}
    ours["moe_order"] = ours["moe_order"].replace("tp", "etp").replace("dp", "edp")
    num_compared = 0
    for world_size in (1, 4, 6, 8, 16, 24, 64):
        for choice in some_degrees(world_size, 40):
            try:
                mapping = of(world_size, choice, **ours)
            except GroupError:
                assert order != "tp-cp-ep-dp-pp"
                continue
            num_compared += 1
            dense = parallel_state.RankGenerator(
                tp=mapping.tp, cp=mapping.cp, dp=mapping.dp, pp=mapping.pp, ep=1, order=order
            )
            expert = parallel_state.RankGenerator(
                tp=mapping.etp, ep=mapping.ep, dp=mapping.edp, pp=mapping.pp, cp=1, order=order
            )
            names = [(dense, axis, axis.replace("_", "-")) for axis in ("tp", "cp", "dp", "pp", "tp_cp", "dp_cp")]
            names += [(expert, *pair) for pair in (("etp", "tp"), ("ep", "ep"), ("edp", "dp"), ("pp", "pp"))]
            names += [(expert, "etp_ep", "tp-ep"), (dense, "stage", "tp-cp-dp")]
            for generator, axis, theirs in names:
                expected = sorted(tuple(sorted(group)) for group in generator.get_ranks(theirs))
                assert mapping.groups(axis) == expected, (mapping, axis)
    assert num_compared > 60


# Errors


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"ep": 3, "etp": 2}, "etp=2 × ep=3 × pp=1 = 6 does not divide world_size 16; nearest valid: ep 2 or 4"),
        ({"tp": 3, "pp": 2}, "tp=3 × cp=1 × pp=2 = 6 does not divide world_size 16; nearest valid: tp 2 or 4"),
        ({"pp": 5, "ep": 2}, "tp=1 × cp=1 × pp=5 = 5 does not divide world_size 16; nearest valid: pp 4 or 8"),
        ({"tp": 32}, "tp=32 × cp=1 × pp=1 = 32 does not divide world_size 16; nearest valid: tp 16"),
        ({"tp": 3, "cp": 3}, "tp=3 × cp=3 × pp=1 = 9 does not divide world_size 16; nearest valid: tp=4, cp=4, pp=1"),
        ({"tp": 3, "pp": 3, "ep": 8}, "nearest valid: tp=4, cp=1, pp=2"),  # pp=4 would leave no room for ep
        ({"ep": 3, "etp": 5, "pp": 2}, "etp=5 × ep=3 × pp=2 = 30 does not divide world_size 16; nearest valid: etp=4, ep=2"),
        ({"ep": 0}, "ep: expected a whole number of at least 1, got 0; the nearest that divides world_size 16 is 1"),
        ({"cp": -2}, "cp: expected a whole number of at least 1, got -2; the nearest that divides world_size 16 is 1"),
        ({"etp": 4.4}, "etp: expected a whole number of at least 1, got 4.4; the nearest that divides world_size 16 is 4"),
        ({"tp": "2"}, "tp: expected a whole number of at least 1, got '2'"),
        ({"tp": True}, "tp: expected a whole number of at least 1, got True"),
        ({"pp": float("nan")}, "pp: expected a whole number of at least 1, got nan"),
        ({"attention_order": "tp-cp-ep-dp-pp"}, "attention_order: expected tp, cp, dp, pp each once, innermost first"),
        ({"moe_order": None}, "moe_order: expected etp, ep, edp, pp each once, innermost first, such as 'etp-ep-edp-pp'"),
    ],
)  # fmt: skip
def test_degrees_that_cannot_be_are_named_with_the_nearest_that_can(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(GroupError, match=re.escape(message)):
        FoldedMapping(16, **choice)


@pytest.mark.parametrize("world_size", [0, -4, 2.0, None])
def test_a_world_that_cannot_be(world_size: Any) -> None:
    with pytest.raises(
        GroupError, match=re.escape(f"world_size: expected a whole number of at least 1, got {world_size}")
    ):
        FoldedMapping(world_size)


@pytest.mark.parametrize("world_size", [12, 16, 60])
def test_what_an_error_proposes_is_valid_and_nothing_is_nearer(world_size: int) -> None:
    sizes = range(1, 9)
    for tp, pp, ep in product(sizes, repeat=3):
        choice = {"tp": tp, "pp": pp, "ep": ep}
        try:
            of(world_size, choice)
        except GroupError as error:
            proposed = str(error).split("nearest valid: ")[1]
        else:
            continue
        if "=" in proposed:  # several degrees at once
            change = {axis: int(size) for axis, size in re.findall(r"(\w+)=(\d+)", proposed)}
            if world_size % ep == 0:  # else another error follows this one
                of(world_size, choice | change)
        for axis, values in re.findall(r"(\w+) ([\d or]+)", proposed):
            for value in map(int, values.split(" or ")):
                between = range(min(value, choice[axis]) + 1, max(value, choice[axis]))
                assert fits(world_size, choice | {axis: value}, axis)
                assert not any(fits(world_size, choice | {axis: other}, axis) for other in between)


def fits(world_size: int, choice: dict[str, int], axis: str) -> bool:
    dense, expert = world_size % (choice["tp"] * choice["pp"]), world_size % (choice["ep"] * choice["pp"])
    return not {"tp": dense, "ep": expert, "pp": dense or expert}[axis]


def test_pipeline_groups_that_differ_are_shown() -> None:
    with pytest.raises(GroupError) as caught:
        FoldedMapping(16, tp=4, pp=2, ep=2, attention_order="tp-cp-pp-dp", moe_order="etp-ep-pp-edp")
    assert "that of rank 0 is [0, 4] by attention_order 'tp-cp-pp-dp', but [0, 2] by moe_order" in str(caught.value)
    assert "write pp last in both" in str(caught.value)
    FoldedMapping(16, tp=4, pp=2, ep=4, attention_order="tp-cp-pp-dp", moe_order="etp-ep-pp-edp")  # these agree


def test_unknown_axes_and_ranks() -> None:
    mapping = FoldedMapping(4)
    for ask in (mapping.groups, mapping.size, lambda axis: mapping.group_of(axis, 0)):
        with pytest.raises(GroupError, match=r"expected one of the axes tp, cp, .* world, got 'xp'"):
            ask("xp")
    for rank in (-1, 4):
        with pytest.raises(GroupError, match=f"expected a rank from 0 to 3, got {rank}"):
            mapping.group_of("tp", rank)
        with pytest.raises(GroupError, match=f"got {rank}"):
            mapping.coordinates(rank)


def test_the_pure_part_does_without_torch() -> None:
    code = "import sys, commlayer.scheduler.mapping.folded; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


# Description


def test_describe_says_which_groups_cross_nodes() -> None:
    description = FoldedMapping(8, tp=2, ep=4).describe(Topology.parse("2x4"), rank=5)
    shown = {row.axis: (row.size, row.num_groups, row.num_inside, row.link, row.ranks) for row in description.rows}
    assert list(shown) == list(AXES)
    assert shown["tp"] == (2, 4, 4, Resource.INTRA, (4, 5))
    assert shown["cp"] == (1, 8, 8, Resource.DEVICE, (5,))
    assert shown["dp"] == (4, 2, 0, Resource.INTER, (1, 3, 5, 7))
    assert shown["ep"] == (4, 2, 2, Resource.INTRA, (4, 5, 6, 7))
    assert shown["edp"] == (2, 4, 0, Resource.INTER, (1, 5))
    lines = str(description).splitlines()
    assert lines[0] == "8 ranks: attention tp 2 × cp 1 × dp 4 × pp 1, MoE etp 1 × ep 4 × edp 2 × pp 1; on 2x4"
    assert lines[1].split() == ["axis", "size", "groups", "inside", "a", "node", "slowest", "link", "with", "rank", "5"]
    assert [line.split() for line in lines if line.startswith(("ep ", "edp", "cp"))] == [
        ["cp", "1", "8", "all", "-", "5"],
        ["ep", "4", "2", "all", "intra", "4", "5", "6", "7"],
        ["edp", "2", "4", "none", "inter", "1", "5"],
    ]


def test_describe_on_uneven_nodes_names_the_groups_that_cross() -> None:
    description = FoldedMapping(6, tp=3, ep=2).describe(Topology.parse("2+4"))
    tp = description.row("tp")
    assert [(group.ranks, group.num_nodes, group.link) for group in tp.groups] == [
        ((0, 1, 2), 2, Resource.INTER),
        ((3, 4, 5), 1, Resource.INTRA),
    ]
    assert tp.link is Resource.INTER
    assert "1 of 2" in str(description)
    assert "tp crosses nodes in 0 1 2\n" in str(description)
    in_json = json.loads(description.to_json())
    assert in_json["rows"][0]["groups"][0] == {"ranks": [0, 1, 2], "num_nodes": 2, "link": "inter"}


def test_describe_shortens_long_groups_and_long_lists() -> None:
    text = str(FoldedMapping(32, tp=2).describe(Topology(tuple((r, 31 - r) for r in range(16)))))
    assert "0 1 2 3 4 5 … 31" in text
    text = str(FoldedMapping(30, tp=2).describe(Topology.parse("+".join(["3"] * 10))))
    assert re.search(r"^tp crosses nodes in 2 3 \| 8 9 \| 14 15 \| 20 21 \| 1 more$", text, re.M)


@pytest.mark.parametrize("world_size", [8, 12, 24])
def test_describe_against_brute_force(world_size: int) -> None:
    shapes = [f"{n}x{world_size // n}" for n in range(1, world_size + 1) if world_size % n == 0]
    for choice, shape in product(some_degrees(world_size, 10), [*shapes, f"3+{world_size - 3}"]):
        topology = Topology.parse(shape)
        mapping = of(world_size, choice)
        for row in mapping.describe(topology).rows:
            for group, ranks in zip(row.groups, mapping.groups(row.axis), strict=True):
                nodes = {topology.node_of(rank) for rank in ranks}
                slowest = "inter" if len(nodes) > 1 else "intra" if len(ranks) > 1 else "device"
                assert (group.ranks, group.link, group.num_nodes) == (ranks, slowest, len(nodes))


def test_describe_refuses_another_world() -> None:
    with pytest.raises(GroupError, match="the mapping has 8 ranks, but the topology 2x2 has 4"):
        FoldedMapping(8).describe(Topology.parse("2x2"))
    with pytest.raises(GroupError, match="got 8"):
        FoldedMapping(8).describe(Topology.parse("2x4"), rank=8)


# Real processes


def start(backend: str = "gloo") -> int:
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    return dist.get_rank()


def check_groups(mesh: FoldedMesh) -> None:
    """Every axis: the ranks, the place of this rank, and a sum over them; and the meshes are made of these groups."""
    me = dist.get_rank()
    for axis in AXES:
        ranks, group = mesh.mapping.group_of(axis, me), mesh.group(axis)
        assert tuple(dist.get_process_group_ranks(group)) == ranks == mesh.ranks(axis)
        assert (mesh.size(axis), mesh.rank(axis)) == (dist.get_world_size(group), dist.get_rank(group))
        total = torch.tensor([2.0**me])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(2.0**rank for rank in ranks), axis
        alone = mesh.device_mesh(axis)
        assert (tuple(alone.mesh.tolist()), alone.mesh_dim_names) == (ranks, (axis,))
        assert alone.get_group() is group
    for whole, axes in ((mesh.attention_mesh, ATTENTION_AXES), (mesh.moe_mesh, MOE_AXES)):
        assert sorted(whole.mesh.flatten().tolist()) == list(range(dist.get_world_size()))
        for axis in axes:
            assert whole.get_group(axis) is mesh.group(axis)
            assert whole.get_local_rank(axis) == mesh.rank(axis) == mesh.mapping.coordinates(me)[axis]
            assert tuple(whole[axis].mesh.tolist()) == mesh.ranks(axis)


@pytest.mark.cluster
def test_groups_and_meshes_on_two_nodes(emulated_cluster: ClusterFactory) -> None:
    def job() -> list[str]:
        me = start()
        num_default = len(dist.distributed_c10d._world.pg_map)
        with FoldedMesh({"tp": 2, "ep": 2, "etp": 1, "pp": 2}) as mesh:
            check_groups(mesh)
            assert mesh.attention_mesh.mesh_dim_names == ("pp", "dp", "cp", "tp")
            assert mesh.moe_mesh.mesh_dim_names == ("pp", "edp", "ep", "etp")
            assert mesh.attention_mesh["dp", "tp"].mesh.tolist() == [[0, 1], [2, 3]] if me < 4 else [[4, 5], [6, 7]]
            assert mesh.group("world") is dist.group.WORLD
            assert mesh.group("ep") is mesh.group("tp"), "the same ranks: one group"
            assert mesh.group("etp") is mesh.group("cp")
            assert mesh.ranks("dp") == mesh.ranks("edp")
            assert mesh.group("dp") is mesh.group("edp"), "one lane: one group"
            assert mesh.group("stage") is not mesh.group("etp_ep"), "gradients do not queue before tokens"
            assert mesh.group("model") is mesh.group("tp")
            assert mesh.describe().row("pp").link is Resource.INTER
            shown = [str(mesh.describe(Topology.parse("1x8")))]
        with pytest.raises(GroupError, match="the group tp of this FoldedMesh was destroyed"):
            mesh.group("tp")
        mesh.destroy()
        assert len(dist.distributed_c10d._world.pg_map) == num_default
        dist.barrier()  # the default group lives
        mapping = FoldedMapping(8, cp=2, etp=2, attention_order="cp-tp-dp-pp", moe_order="ep-etp-edp-pp")
        mesh = FoldedMesh(mapping, timeout=timedelta(seconds=30), separate=["etp"])
        check_groups(mesh)
        assert mesh.attention_mesh.mesh_dim_names == ("pp", "dp", "tp", "cp")
        assert mesh.group("world") is not dist.group.WORLD
        assert mesh.group("etp") is not mesh.group("cp")
        assert mesh.ranks("etp") == mesh.ranks("cp")
        dist.destroy_process_group()
        mesh.destroy()  # nothing is left to destroy
        return shown

    shown = emulated_cluster(2, 4).run(job)
    assert {text[0].splitlines()[0] for text in shown} == {
        "8 ranks: attention tp 2 × cp 1 × dp 2 × pp 2, MoE etp 1 × ep 2 × edp 2 × pp 2; on 1x8"
    }


@pytest.mark.cluster
def test_groups_of_an_odd_world_and_what_ranks_disagree_on(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        with pytest.raises(GroupError, match="init_process_group first"):
            FoldedMesh({"tp": 3})
        me = start()
        with pytest.raises(GroupError, match="the mapping has 8 ranks, but the job has 6"):
            FoldedMesh(FoldedMapping(8))
        with pytest.raises(GroupError, match="expected degrees of tp, cp, pp, ep, etp, got 'dp'"):
            FoldedMesh({"dp": 2})
        with pytest.raises(GroupError, match=r"separate: expected axes of tp, .*, got 'xp'"):
            FoldedMesh({}, separate=["xp"])
        with pytest.raises(GroupError, match=r"tp=4 .* does not divide world_size 6; nearest valid: tp 3 or 6"):
            FoldedMesh({"tp": 4})
        with pytest.raises(DisagreementError, match=r"rank 0 asks for .*tp=3.*, rank 4 for .*tp=2"):
            FoldedMesh({"tp": 2 if me == 4 else 3})
        mesh = FoldedMesh({"tp": 3, "ep": 2, "etp": 3}, backend="commlayer")
        check_groups(mesh)
        assert dist.get_backend(mesh.group("world")) == "commlayer"
        mesh.destroy()
        with pytest.raises(GroupError, match=r"backend: expected one that torch knows \(.*gloo.*\), got 'cpu:glue'"):
            FoldedMesh({"tp": 3}, backend="cpu:glue")
        check_groups(FoldedMesh({"tp": 3, "ep": 2}))

    emulated_cluster(2, 3).run(job)


# Gradients: the scale, shown on a layer whose gradients autograd computes through real collectives

WIDTH, NUM_TOKENS = 6, 4


def expert_layer(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ up) @ down


def moe_weights(num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    up, down = torch.randn(2, num_experts, WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    return torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64), up, down


def tokens_of(rank: int, num_experts: int) -> torch.Tensor:
    """[E, T, H]: T tokens for every expert, other ones on every rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(num_experts, NUM_TOKENS, WIDTH, generator=generator, dtype=torch.float64)


def expected_gradients(mapping: FoldedMapping) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """On one process: the mean over the shards (tp groups) of the mean over each shard's tokens."""
    weights = moe_weights(mapping.ep)
    dense, up, down = (weight.requires_grad_() for weight in weights)
    losses = []
    for shard in mapping.groups("tp"):
        x = torch.cat([tokens_of(rank, mapping.ep) for rank in shard], dim=1)
        losses.append(expert_layer(x @ dense, up, down).square().sum() / x[..., 0].numel())
    torch.stack(losses).mean().backward()
    return tuple(weight.grad for weight in (dense, up, down))  # type: ignore[return-value]


CALLS: dict[str, Any] = {
    "all_to_all": dist.all_to_all_single,
    "all_gather": dist.all_gather_into_tensor,
    "reduce_scatter": dist.reduce_scatter_tensor,
}
BACKWARD = {"all_to_all": "all_to_all", "all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}


def move(x: torch.Tensor, name: str, group: dist.ProcessGroup) -> torch.Tensor:
    rows = {"all_to_all": len(x), "all_gather": len(x) * group.size(), "reduce_scatter": len(x) // group.size()}[name]
    out = x.new_empty(rows, *x.shape[1:])
    CALLS[name](out, x.contiguous(), group=group)
    return out


class Move(torch.autograd.Function):
    """A collective with the one that takes its gradients back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.back = BACKWARD[name], group
        return move(x, name, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return move(grads[0], *ctx.back), None, None


moved: Any = Move.apply


@pytest.mark.cluster
@pytest.mark.parametrize("choice", [{"tp": 2, "ep": 4}, {"cp": 2, "ep": 2, "etp": 2}], ids=str)
def test_dense_and_expert_gradients_have_one_scale(emulated_cluster: ClusterFactory, choice: dict[str, int]) -> None:
    def job() -> float:
        me = start()
        mesh = FoldedMesh(choice)
        expected_dense, expected_up, expected_down = expected_gradients(mesh.mapping)
        dense, up, down = moe_weights(mesh.size("ep"))
        columns = slice(*(WIDTH // mesh.size("etp") * place for place in (mesh.rank("etp"), mesh.rank("etp") + 1)))
        mine = mesh.rank("ep")
        layer = torch.nn.ParameterDict({"dense": dense, "up": up[mine, :, columns], "down": down[mine, columns]})
        mark_experts(torch.nn.ParameterList([layer["up"], layer["down"]]))
        # [E, T, H] → this expert's tokens of all ranks of ep, then of etp; a shard of the expert; and the same way back
        x = tokens_of(me, mesh.size("ep")) @ layer["dense"]
        x = moved(x, "all_to_all", mesh.group("ep"))
        x = moved(x, "all_gather", mesh.group("etp"))
        out = moved(expert_layer(x, layer["up"], layer["down"]), "reduce_scatter", mesh.group("etp"))
        out = moved(out, "all_to_all", mesh.group("ep"))
        (out.square().sum() / (out[..., 0].numel() * mesh.size("tp"))).backward()

        dist.all_reduce(layer["dense"].grad, group=mesh.group("tp"))  # sequence parallelism: tp ranks have other tokens
        for parameter in layer.values():
            group = mesh.gradient_group(parameter)
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad *= mesh.gradient_scale(parameter) / dist.get_world_size(group)
        torch.testing.assert_close(layer["dense"].grad, expected_dense)
        torch.testing.assert_close(layer["up"].grad, expected_up[mine, :, columns])
        torch.testing.assert_close(layer["down"].grad, expected_down[mine, columns])
        return mesh.expert_gradient_scale

    scales = emulated_cluster(2, 4).run(job)
    assert set(scales) == {0.5 if "tp" in choice else 0.25}


@pytest.mark.cluster
def test_fsdp2_shards_over_the_gradient_groups(emulated_cluster: ClusterFactory) -> None:
    import torch._dynamo  # which FSDP2 loads: once, before ranks are forked

    def job() -> None:
        me = start("commlayer")  # a gradient divide factor is a PREMUL_SUM, which Gloo does not have
        mesh = FoldedMesh({"ep": 2})
        dense, expert = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        for module in (dense, expert):
            torch.nn.init.ones_(module.weight)
        fully_shard(dense, mesh=mesh.device_mesh("dp_cp"))
        sharded = fully_shard(expert, mesh=mesh.device_mesh("edp"))
        mark_experts(expert)
        assert mesh.gradient_group(expert.weight) is mesh.expert_gradient_group
        assert mesh.gradient_group(dense.weight) is mesh.dense_gradient_group
        sharded.set_gradient_divide_factor(mesh.size("dp_cp"))
        x = torch.full((1, 4), 1.0 + me)
        dense(x).sum().backward()
        expert(x).sum().backward()
        mean = sum(1.0 + rank for rank in range(4)) / 4
        assert dense.weight.grad.full_tensor()[0, 0].item() == pytest.approx(mean)  # type: ignore[union-attr]
        part = sum(1.0 + rank for rank in mesh.ranks("edp")) / 4
        assert expert.weight.grad.full_tensor()[0, 0].item() == pytest.approx(part)  # type: ignore[union-attr]

    emulated_cluster(2, 2).run(job)


# The page


@pytest.mark.cluster
def test_the_program_of_the_page_runs(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(# folded\.py\n.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    path = tmp_path / "folded.py"
    path.write_text(program, encoding="utf-8")

    def job() -> Any:
        torch.set_num_threads(1)
        left = runpy.run_path(str(path), run_name="__main__")
        return left["loss"].item()

    losses = emulated_cluster(2, 4).run(job)
    assert len(losses) == 8
    assert all(loss > 0 for loss in losses)


def test_the_table_of_the_page_is_what_describe_prints() -> None:
    shown = str(FoldedMapping(8, tp=2, ep=4).describe(Topology.parse("2x4")))
    assert shown in PAGE.read_text(encoding="utf-8")
