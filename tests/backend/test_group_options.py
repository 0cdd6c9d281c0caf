"""Options of one group (pg_options): what is taken, what is refused, what they do, and that ranks must give the same."""

from __future__ import annotations

import copy
import os
import warnings
from collections import Counter
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from simulated.torch_device import simulated_device
from simulated.torch_streams import StreamDelays
from torch.distributed.device_mesh import init_device_mesh

from commlayer.backend import group_extras
from commlayer.backend.group_options import GroupOptions, options_of
from commlayer.profiles.errors import DisagreementError, PeerError, SettingsError, UsageError
from commlayer.scheduler.mapping import clusters
from commlayer.scheduler.wire import WireFormat, wires_of_sum
from commlayer.settings import Settings
from commlayer.statistics import stats
from commlayer.testing.plugin import ClusterFactory

COUNT = 40_000


# What is taken


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lane": ({"lane": "sidewalk"}, r"lane: expected one of .*'ep'.*got 'sidewalk'"),
    "plan": ({"plan": "fastest"}, r"GroupOptions.plan must be one of flat, .*auto, .*got 'fastest'"),
    "chunks": ({"plan": "pipelined:none"}, r"GroupOptions.plan must be one of"),
    "more chunks than messages can be told apart": ({"plan": "pipelined:8193"}, r"up to 8192 chunks"),
    "chunks of a plan that has none": (
        {"plan": "hierarchical:4"},
        r"hierarchical goes in one chunk, got 'hierarchical:4'",
    ),
    "a plan of Communicators": (
        {"plan": "pipelined_copy:2"},
        r"pipelined_copy is for tokens that a Communicator moves",
    ),
    "nothing to watch": ({"replan": "audit", "audit": False}, r"replan: 'audit' compares .*audit=False keeps neither"),
    "nothing to change": ({"replan": "on", "plan": "ring:2"}, r"replan: 'on' changes plans .*plan 'ring:2' stays"),
    "nothing to compare": ({"shadow": 3, "plan": "flat"}, r"shadow: it is for calls that go by a plan"),
    "nothing to share out": ({"connections": 2, "plan": "flat"}, r"connections: it is for calls that go by a plan"),
    "no text": ({"plan": 4}, r"plan: expected the name of a plan, .*got 4"),
    "fp8": ({"wire": "fp8_e4m3"}, r"FP8 keeps three or four bits.*TokenDispatcher"),
    "format": ({"wire": "int3"}, r"a wire format must be one of native, bf16"),
    "wire": ({"wire": 16}, r"wire: expected bf16, int8, one of them with a ! behind it, or native, .*got 16"),
    "faster by no profile": (
        {"wire": "int8", "plan": "flat_direct"},
        r"nothing would be encoded: give wire='int8!', or plan",
    ),
    "reduction": ({"reduction": "random"}, r"reduction: expected one of 'native', 'ordered'"),
    "audit": ({"audit": "yes"}, r"audit: expected True or False, .*got 'yes'"),
    "replan": ({"replan": "maybe"}, r"replan: expected one of 'on', 'audit', 'off'"),
    "shadow": ({"shadow": -1}, r"shadow: expected a whole number from 0"),
    "nccl": ({"nccl": GroupOptions()}, r"nccl: expected ProcessGroupNCCL.Options"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_is_none_is_refused(name: str) -> None:
    given, words = REFUSED[name]
    with pytest.raises(UsageError, match=words):
        GroupOptions(**given)


def test_what_torch_hands_on_is_read() -> None:
    ours = GroupOptions(lane="ep")
    assert options_of(ours) is ours
    assert options_of(None).words() == {}
    assert options_of(dist.ProcessGroupGloo._Options()).nccl is None  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"must be a commlayer\.GroupOptions.*got \{'lane': 'ep'\}"):
        options_of({"lane": "ep"})


def test_options_stand_above_settings() -> None:
    job = Settings(plan="flat", shadow=8, replan="off")
    assert GroupOptions().over(job) is job
    changed = GroupOptions(plan="auto", shadow=0, reduction="ordered", replan="on").over(job)
    assert (changed.plan, changed.shadow, changed.reduction, changed.replan) == (None, None, "ordered", "on")
    assert GroupOptions(plan="pipelined:4").over(job).plan == "pipelined:4"


@pytest.mark.parametrize(("text", "plan"), [("auto", None), ("AUTO", None), ("Tried", "tried"), ("ring×4", "ring:4")])
def test_the_environment_takes_the_words_that_options_take(text: str, plan: str | None) -> None:
    assert Settings.from_environment({"COMMLAYER_PLAN": text}).plan == plan
    assert (GroupOptions(plan=text).over(Settings())).plan == plan


@pytest.mark.parametrize("text", ["fastest", "flat:2"])
def test_the_environment_names_no_such_plan(text: str) -> None:
    with pytest.raises(SettingsError, match="COMMLAYER_PLAN"):
        Settings.from_environment({"COMMLAYER_PLAN": text})


def test_an_empty_variable_counts_as_one_that_is_not_set() -> None:
    assert Settings.from_environment({"COMMLAYER_PLAN": ""}) == Settings.from_environment({})


def test_options_are_one_object_and_say_what_they_are() -> None:
    options = GroupOptions(lane="dp", wire="bf16!")
    assert copy.deepcopy(options) is options
    assert repr(options) == "GroupOptions(lane='dp', wire='bf16!')"


SAME_WORDS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"plan": "Auto"}, {"plan": "auto"}),
    ({"plan": "pipelined×4"}, {"plan": " Pipelined:4"}),
    ({"plan": "flat:1"}, {"plan": "flat"}),
    ({"wire": "BF16"}, {"wire": "bf16"}),
    ({"wire": "native+bf16"}, {"wire": "bf16+native"}),
    ({"wire": "bf16+int8!"}, {"wire": "int8+bf16!"}),
    ({"wire": "int8+bf16"}, {"wire": " bf16+int8+bf16 "}),
    ({"audit": 1}, {"audit": True}),
    ({"lane": "ep", "shadow": 3}, {"shadow": 3, "lane": "ep"}),
)


@pytest.mark.parametrize(("one", "other"), SAME_WORDS)
def test_what_means_the_same_is_told_in_the_same_words(one: dict[str, Any], other: dict[str, Any]) -> None:
    ours, theirs = GroupOptions(**one), GroupOptions(**other)
    assert ours.words() == theirs.words() != {}
    assert ours.sum_formats == theirs.sum_formats, "of several formats that are equally fast the first is taken"


def test_what_differs_is_told_in_other_words() -> None:
    options = [GroupOptions(plan=each) for each in ("auto", "flat", "pipelined:2", "pipelined:4")]
    options += [GroupOptions(wire=each) for each in ("bf16", "bf16!", "native")]
    options += [GroupOptions(audit=each) for each in (True, False)]
    assert len({str(each.words()) for each in options}) == len(options)


@pytest.mark.parametrize("elements", [1031, 2 * 1031, 15 * 1031])
def test_what_would_be_a_single_long_row_goes_in_no_format_with_scales(elements: int) -> None:
    native, bf16, int8 = WireFormat.NATIVE, WireFormat.BF16, WireFormat.INT8
    assert wires_of_sum((int8,), elements) == ()
    assert wires_of_sum((native, int8), elements) == ()
    assert [each.format for each in wires_of_sum((bf16, int8), elements)] == [bf16]
    assert [each.row_elements for each in wires_of_sum((int8,), 1021)] == [1021], "a short row is no burden"
    assert [each.row_elements for each in wires_of_sum((int8,), 16 * 1031)] == [16]


# What they do


def moved(description: str) -> set[tuple[str, str]]:
    """Which collectives of the groups of this description went by which plans."""
    groups = [group for group in stats()["groups"] if group["description"] == description]
    return {(call["collective"], call["plan"]) for group in groups for call in group["calls"]}


def start() -> int:
    torch.set_num_threads(1)
    os.environ["COMMLAYER_PROFILE"] = "none"
    dist.init_process_group("commlayer", timeout=timedelta(seconds=15))
    return dist.get_rank()


@pytest.mark.cluster
def test_a_group_goes_by_its_own_options(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        rank = start()
        world: Any = dist.group.WORLD
        coarse: Any = dist.new_group(
            pg_options=GroupOptions(lane="dp", wire="bf16!", plan="hierarchical"), group_desc="coarse"
        )
        plain: Any = dist.new_group(group_desc="plain")
        assert (coarse.lane, plain.lane, world.lane) == ("dp", "", "")
        assert coarse.lane_is_told
        assert repr(coarse.options) == "GroupOptions(lane='dp', wire='bf16!', plan='hierarchical')"
        exact = torch.arange(4096.0) % 256 + rank  # BF16 has these numbers, and their sums after rounding
        wanted, mean = torch.arange(4096.0) % 256 * 4 + 6, torch.arange(4096.0) % 256 + 1.5
        for group in (coarse, plain):
            total = exact.clone()
            dist.all_reduce(total, group=group)
            assert (total - wanted).abs().max() <= (0 if group is plain else 1024 * 2**-7)
            total = exact.clone()
            dist.all_reduce(total, dist.ReduceOp.AVG, group=group, async_op=True).wait()
            assert (total - mean).abs().max() <= (0 if group is plain else 1024 * 2**-7)
            part = torch.empty(1024)
            dist.reduce_scatter_tensor(part, exact, group=group)
            assert (part - wanted[rank * 1024 :][:1024]).abs().max() <= (0 if group is plain else 1024 * 2**-7)
            dist.all_reduce(torch.ones(64, dtype=torch.int64), group=group)  # has no format
            whole = torch.empty(4096)
            dist.all_gather_into_tensor(whole, exact[:1024] + 2**-10, group=group)
            assert torch.equal(whole[:1024], exact[:1024] - rank + 2**-10), "what is gathered goes as it is"
        fine: Any = dist.new_group(pg_options=GroupOptions(wire="int8!"), group_desc="fine")
        for count in (4096, 1000, 7, 1):  # rows of blocks, of blocks with an end, one row, and too few for a scale
            total = torch.arange(float(count)) % 100 + rank
            dist.all_reduce(total, group=fine)
            apart = (total - torch.arange(float(count)) % 100 * 4 - 6).abs().max()
            assert apart <= (4 * 103 + 403 + 4) / 254 * (count > 1)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for _ in range(2):
                total = torch.arange(1031.0) % 100 + rank  # a prime: it would be one row, and one rank's sum
                dist.all_reduce(total, group=fine)
                assert torch.equal(total, torch.arange(1031.0) % 100 * 4 + 6)
        assert [str(each.message) for each in heard if "1031 FP32 elements" in str(each.message)], "it is told"
        assert len(heard) == 1, "once"
        part = torch.empty(1024)
        dist.reduce_scatter_tensor(part, exact, group=fine)
        assert 0 < (part - wanted[rank * 1024 :][:1024]).abs().max() <= 4 * 258 / 254 + 1e-3
        assert moved("fine") == {
            ("all_reduce", "flat_direct/int8"),
            ("all_reduce", "flat"),
            ("reduce_scatter", "flat_direct/int8"),
        }
        assert moved("plain") == {(name, "flat") for name in ("all_reduce", "reduce_scatter", "all_gather")}
        assert moved("coarse") == {
            ("all_reduce", "hierarchical/bf16"),
            ("reduce_scatter", "hierarchical/bf16"),
            ("all_reduce", "hierarchical"),
            ("all_gather", "hierarchical"),
        }

    emulated_cluster(2, 2).run(job)


def in_int8(device: torch.device, given: torch.Tensor) -> None:
    """The same of INT8, in several orders of the streams: every collective that has a format, by every operation that has."""
    group: Any = dist.new_group(pg_options=GroupOptions(wire="int8!"), group_desc="int8")
    for seed in range(3):
        simulated_device(StreamDelays(seed, chance=0.9))
        found = []
        for where in (torch.device("cpu"), device):
            x = given.to(where)
            tensors = []
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                tensors += [x.clone(), x.new_empty(256)]
                dist.all_reduce(tensors[-2], op, group=group)
                dist.reduce_scatter_tensor(tensors[-1], x, op, group=group)
            found.append([each.cpu() for each in tensors])
        assert all(map(torch.equal, *found)), seed
    exact = given.to(device)
    dist.all_reduce(exact, group=dist.new_group(group_desc="exact"))
    apart = (found[1][0] - exact.cpu()).abs().max()
    assert 0 < apart < 0.1, "rounded, by eight bits"
    calls = [call for each in stats()["groups"] if each["description"] == "int8" for call in each["calls"]]
    assert {(call["collective"], call["plan"], call["calls"]) for call in calls} == {
        (collective, "flat_direct/int8", 12) for collective in ("all_reduce", "reduce_scatter")
    }


@pytest.mark.cluster
def test_a_groups_sums_take_its_format_on_a_device_too(emulated_cluster: ClusterFactory) -> None:
    """The CPU's bits, by the same plan; what is gathered is not rounded. Ranks may write the format as they like."""

    def job() -> None:
        device, rank = simulated_device(StreamDelays(chance=0.0)), int(os.environ["RANK"])
        torch.set_num_threads(1)
        os.environ["COMMLAYER_PROFILE"] = "none"
        dist.init_process_group("commlayer", pg_options=GroupOptions(wire="BF16!" if rank else "bf16!"))
        given = torch.randn(512, generator=torch.Generator().manual_seed(rank))
        found = []
        for where in (torch.device("cpu"), device):
            x = given.to(where)
            total, part, whole = x.clone(), x.new_empty(256), x.new_empty(1024)
            dist.all_reduce(total)
            dist.reduce_scatter_tensor(part, x, dist.ReduceOp.AVG)
            dist.all_gather_into_tensor(whole, x)
            found.append([each.cpu() for each in (total, part, whole)])
        assert all(map(torch.equal, *found))
        total, part, whole = found[1]
        exact = whole[:512] + whole[512:]
        assert not torch.equal(total, exact), "rounded"
        assert torch.allclose(total, exact, atol=0.1)
        assert torch.allclose(part, exact.chunk(2)[rank] / 2, atol=0.1)
        assert torch.equal(whole.chunk(2)[rank], given), "not rounded"
        calls = [call for group in stats()["groups"] for call in group["calls"] if call["plan"] == "flat_direct/bf16"]
        assert {(call["collective"], call["calls"]) for call in calls} == {("all_reduce", 2), ("reduce_scatter", 2)}
        in_int8(device, given)
        dist.destroy_process_group()

    emulated_cluster(1, 2).run(job)


SWEPT: dict[str, tuple[Any, ...]] = {
    "lane": ("dp",),
    "wire": ("bf16", "int8!", "native"),
    "plan": ("auto", "tried", "flat", "hierarchical", "leaders", "ring:2", "pipelined:2"),
    "reduction": ("ordered",),
    "audit": (False,),
    "replan": ("on", "audit", "off"),
    "shadow": (1,),
    "connections": (2,),
}


def all_pairs() -> list[dict[str, Any]]:
    each = [(name, value) for name, values in SWEPT.items() for value in values]
    return [{one[0]: one[1], other[0]: other[1]} for one, other in combinations(each, 2) if one[0] != other[0]]


def refusal(given: dict[str, Any]) -> str:
    """Why these options are refused; empty where they are taken."""
    try:
        GroupOptions(**given)
    except UsageError as error:
        return str(error)
    return ""


def test_two_options_of_which_one_leaves_the_other_nothing_to_do() -> None:
    refused = [(given, words) for given in all_pairs() if (words := refusal(given))]
    assert all(any(f"GroupOptions.{name}" in words for name in given) for given, words in refused)
    assert Counter(tuple(sorted(given)) for given, _ in refused) == {
        ("plan", "wire"): 6,  # bf16 where it is faster, and a plan without a profile to say so
        ("plan", "replan"): 10,
        ("audit", "replan"): 2,
        ("plan", "shadow"): 1,
        ("connections", "plan"): 1,
    }


@pytest.mark.cluster
def test_any_two_options_that_are_taken_work_together(
    emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The sums and what is gathered; with a profile that knows the group."""

    def job() -> None:
        torch.set_num_threads(1)
        dist.init_process_group("commlayer", timeout=timedelta(seconds=60))
        rank = dist.get_rank()
        exact = torch.arange(8192.0) % 64 + rank
        for given in all_pairs():
            if refusal(given):
                continue
            options = GroupOptions(**given)
            group = dist.new_group(pg_options=options)
            total, whole = exact.clone(), torch.empty(4 * 2048)
            dist.all_reduce(total, group=group)
            dist.all_gather_into_tensor(whole, exact[:2048], group=group)
            apart = 4.0 if options.sum_formats else 0.0
            assert ((total - (exact - rank) * 4 - 6).abs() <= apart).all(), given
            assert torch.equal(whole, torch.cat([exact[:2048] - rank + each for each in range(4)])), given
            dist.destroy_process_group(group)

    clusters.load("h100-eos").profile_of((2, 2)).save(tmp_path / "profile.json")
    monkeypatch.setenv("COMMLAYER_PROFILE", str(tmp_path / "profile.json"))
    emulated_cluster(2, 2).run(job)


@pytest.mark.cluster
def test_a_dim_of_a_mesh_has_its_own(emulated_cluster: ClusterFactory) -> None:
    """Options that a trainer's mesh gives on: one object for all groups of a dim; and a part that a group is split into."""

    def job() -> None:
        start()
        dp, ep = GroupOptions(lane="dp", reduction="ordered"), GroupOptions(lane="ep")
        override = {"dp": dp, "ep": ("commlayer", ep)}
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"), backend_override=override)  # type: ignore[arg-type]
        groups: dict[str, Any] = {name: mesh.get_group(name) for name in ("dp", "ep")}
        assert {name: (group.lane, group.options) for name, group in groups.items()} == {
            "dp": ("dp", dp),
            "ep": ("ep", ep),
        }
        for group in groups.values():
            dist.all_reduce(torch.ones(COUNT), group=group)
        assert (moved("mesh_dp"), moved("mesh_ep")) == ({("all_reduce", "flat_direct")}, {("all_reduce", "flat")})
        world: Any = dist.group.WORLD
        part = world.split_group([0, 1, 2, 3], opts=GroupOptions(lane="cp"))
        assert part.lane == "cp"
        dist.all_reduce(torch.ones(1), group=part)  # no rank ends while another connects

    emulated_cluster(2, 2).run(job)


@pytest.mark.cluster
def test_ranks_must_give_the_same(emulated_cluster: ClusterFactory) -> None:
    def job() -> str:
        rank = start()
        options = GroupOptions(lane="ep", plan="flat" if rank == 2 else None)
        # A rank that still waits for the others' notes when one of them leaves quotes what that one has said.
        with pytest.raises((DisagreementError, PeerError)) as refused:
            dist.new_group(pg_options=options)
        return str(refused.value)

    for words in emulated_cluster(2, 2).run(job):
        assert "ranks disagree on pg_options of the group" in words
        assert "(plan): rank 0 has nothing, rank 2 has 'flat'" in words


def test_a_rank_that_cannot_encode_on_cuda_says_so_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it refuses its first sum alone, and they wait for it."""

    def without_triton() -> None:
        raise UsageError("Triton could not be loaded")

    options = GroupOptions(wire="int8!")
    monkeypatch.setattr(group_extras, "row_kernels", without_triton)
    monkeypatch.setattr(group_extras, "is_usable", lambda: False)
    assert not group_extras.lacking(options), "on the CPU nobody needs it"
    monkeypatch.setattr(group_extras, "is_usable", lambda: True)
    assert group_extras.lacking(options).keys() == {"wire on CUDA"}
    assert "Triton could not be loaded" in group_extras.lacking(options)["wire on CUDA"]
    assert not group_extras.lacking(GroupOptions(lane="ep")), "nothing is encoded"
    monkeypatch.setattr(group_extras, "row_kernels", lambda: None)
    assert not group_extras.lacking(options)


@pytest.mark.cluster
def test_what_are_no_options_is_refused_by_name(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        start()
        with pytest.raises(UsageError, match=r"must be a commlayer\.GroupOptions"):
            dist.new_group(pg_options={"lane": "ep"})

    emulated_cluster(1, 2).run(job)
