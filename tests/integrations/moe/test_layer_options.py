"""Options of an MoE layer: what is none, or does not go together, is refused by the constructor; all else trains."""

from __future__ import annotations

from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commlayer.communicator import Communicator
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.router import RouterConfig
from commlayer.profiles.errors import GroupError, UsageError
from commlayer.scheduler.mapping import clusters
from commlayer.testing.plugin import ClusterFactory

ROUTER = RouterConfig(num_experts=8, top_k=2)
PADDED = RouterConfig(num_experts=8, top_k=2, capacity_factor=1.25, pad_to_capacity=True)
WRONG: dict[str, tuple[Any, ...]] = {
    "hidden": (0, -1, 1.5, "8", None),
    "width": (0, 2.5, "8", None),
    "router": (None, {"num_experts": 4}),
    "mesh": ("ep",),
    "shared_width": (-1, 1.5, None),
    "dispatch": ("all_to_some", None),
    "chunks": (0, 3, "two", None, (1, 2)),
    "weights_at": ("router", None),
    "tokens": ("shared", None),
    "wire": ("int3", 5),
    "communicator": ("ep",),
    "spare_slots": (-1, 1.5, True),
    "spilling": ("sometimes", 5),
    "sequence": ("tp", 5),
    "balance": ("dp", 5),
    "seed": ("x", 1.5, None),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_value_that_is_none_is_refused_by_its_name(name: str, value: object) -> None:
    given: dict[str, Any] = {"hidden": 8, "width": 8, "router": ROUTER} | {name: value}
    with pytest.raises(UsageError, match="a wire format" if value == "int3" else name):
        MoELayer(**given)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "tp has one"),
        ({"tokens": "sharded"}, "take tokens='replicated'"),
        ({"router": ROUTER}, "pad_to_capacity=True"),
        ({"dispatch": "all_gather"}, "do not look at dispatch"),
        ({"chunks": 1}, "do not look at chunks"),
        ({"weights_at": "experts"}, "do not look at weights_at"),
        ({"wire": "bf16"}, "do not look at wire"),
        ({"spare_slots": 0}, "do not look at spare_slots"),
        ({"spilling": "llep"}, "do not look at spilling"),
    ],
)
def test_a_communicator_that_would_be_left_out_is_refused(more: dict[str, Any], words: str) -> None:
    communicator = Communicator.__new__(Communicator)  # options are looked at before it is
    given: dict[str, Any] = {"router": PADDED, "tokens": "replicated", "communicator": communicator} | more
    with pytest.raises(UsageError, match=words):
        MoELayer(8, 8, **given)


VALUES: dict[str, tuple[Any, ...]] = {
    "dispatch": ("all_to_all", "all_gather", "two_level"),
    "chunks": (2, (1, 3, 3, 1)),
    "weights_at": ("experts",),
    "tokens": ("replicated",),
    "wire": ("fp8_e4m3!",),
    "spare_slots": (1,),
    "spilling": ("priced", "llep"),
    "router": (PADDED, RouterConfig(num_experts=7, top_k=3, capacity_factor=1.0)),
}


def all_pairs() -> list[dict[str, Any]]:
    each = [(name, value) for name, values in VALUES.items() for value in values]
    return [{one[0]: one[1], other[0]: other[1]} for one, other in combinations(each, 2) if one[0] != other[0]]


def trained(degrees: dict[str, int]) -> list[str]:
    """Why each pair of options is refused; empty where two uneven steps were trained."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer", timeout=timedelta(seconds=60))
    found = []
    with FoldedMesh(degrees) as mesh:
        for given in all_pairs():
            try:
                layer = MoELayer(16, 16, mesh=mesh, **({"router": ROUTER} | given))
            except (UsageError, GroupError) as error:
                found.append(str(error))
                continue
            seed = mesh.rank("ep") if "tokens" in given else dist.get_rank()
            x = torch.rand(24, 16, generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                layer.router.weight[0] = 1.0  # most tokens choose this expert
            for _ in range(2):
                layer(x.requires_grad_()).sum().backward()
            assert x.grad is not None
            assert bool(x.grad.isfinite().all()), given
            found.append("")
    return found


REFUSED = {
    frozenset(("dispatch", "chunks")): "brings all tokens at once",
    frozenset(("router", "chunks")): "padded to a capacity go in one chunk",
    frozenset(("router", "spilling")): "nothing to spill",
}


@pytest.mark.cluster
@pytest.mark.parametrize("ep", [4, 2])
def test_any_two_options_are_refused_at_once_or_train(
    emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ep: int
) -> None:
    """Where EP is the job, and where it is a part of it, on one node, whose ranks have not two levels."""
    clusters.load("h100-eos").profile_of((2, 2) if ep == 4 else (1, 1, 1, 1)).save(tmp_path / "profile.json")
    monkeypatch.setenv("COMMLAYER_PROFILE", str(tmp_path / "profile.json"))
    everyones = (emulated_cluster(2, 2) if ep == 4 else emulated_cluster(4, 1)).run(trained, {"ep": ep})
    for given, *words in zip(all_pairs(), *everyones, strict=True):
        has_levels = ep == 4
        is_padded = given.get("router") is PADDED
        expected = REFUSED.get(frozenset(given), "")
        if "router" in given and not is_padded:
            expected = ""
        if given.get("dispatch") == "all_to_all":
            expected = ""
        if given.get("dispatch") == "two_level" and not has_levels and "chunks" not in given:
            expected = "two_level needs several nodes"
        assert all((expected in each) if expected else not each for each in words), (given, words)
