"""Who holds which part of a parameter is said by marks or by a DTensor, and never guessed: in norms, sums and checkpoints."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.clipping import clip_gradients
from commlayer.integrations.gradients import gradient_axes, synchronise_gradients
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.router import RouterConfig
from commlayer.integrations.parameter_marks import (
    mark_experts,
    mark_replicated,
    mark_split,
    parameter_marks,
    replicated_parameters,
)
from commlayer.integrations.training_state import TrainingState
from commlayer.profiles.errors import UsageError
from commlayer.testing.plugin import ClusterFactory
from examples.buckets import GradientBuckets
from examples.linear import ColumnParallelLinear, RowParallelLinear


def start() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")


class Dense(nn.Module):
    """Layers without sequence parallelism: split ones, and an embedding, a norm and a bias that are whole on every rank of tp."""

    def __init__(self, tp: GroupCommunicator, *, marked: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.up = ColumnParallelLinear(8, 16, tp=tp, sequence_parallel=False, bias=True)
        self.down = RowParallelLinear(16, 8, tp=tp, sequence_parallel=False, bias=True)
        if marked:
            mark_replicated(self.embedding, over=())
            mark_replicated(self.norm, over=())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.tanh(self.up(self.norm(self.embedding(tokens)))))
        return out


TOKENS = torch.arange(12).view(6, 2) % 11


def trained(tp: GroupCommunicator) -> Dense:
    model = Dense(tp)
    (model(TOKENS) - 1).square().sum().backward()
    return model


def alone() -> GroupCommunicator:
    return GroupCommunicator(None, "tp")


def whole_counts_once() -> None:
    start()
    one = trained(alone())
    norm = float(clip_gradients(one, None, 1.0))
    for with_buckets in (False, True):
        with FoldedMesh({"tp": 2}) as mesh:
            model = trained(GroupCommunicator(mesh.group("tp"), "tp"))
            if with_buckets:
                GradientBuckets(model, mesh).finish()
            else:
                synchronise_gradients(model, mesh)
            assert float(clip_gradients(model, mesh, 1.0)) == pytest.approx(norm, rel=1e-5)
            for name, parameter in model.named_parameters():
                wanted = one.get_parameter(name).grad
                assert wanted is not None
                if name.startswith("up") or name == "down.weight":
                    wanted = wanted.chunk(2, int(name == "down.weight"))[mesh.rank("tp")]
                torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-6)


def test_what_every_rank_of_tp_holds_whole_counts_once(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(2, 1).run(whole_counts_once)


def replicated_tokens() -> None:
    """Router and shared experts, where all ranks of tp bring the same tokens."""
    start()
    router = RouterConfig(num_experts=4, top_k=2)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))
    one = MoELayer(8, 12, router, shared_width=4)
    one(x).square().sum().backward()
    with FoldedMesh({"tp": 2, "ep": 2}) as mesh:
        layer = MoELayer(8, 12, router, mesh=mesh, shared_width=4, tokens="replicated")
        layer(x).square().sum().backward()
        synchronise_gradients(layer, mesh)
        norm = float(clip_gradients(one, None, 1e9))
        assert float(clip_gradients(layer, mesh, 1e9)) == pytest.approx(norm, rel=1e-5)


def test_router_and_shared_experts_of_replicated_tokens_count_once(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(2, 1).run(replicated_tokens)


def unmarked() -> None:
    start()
    with FoldedMesh({"tp": 2}) as mesh:
        model = Dense(GroupCommunicator(mesh.group("tp"), "tp"), marked=False)
        model(TOKENS).sum().backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        calls: list[Callable[[], object]] = [
            partial(clip_gradients, model, mesh, 1.0),
            partial(synchronise_gradients, model, mesh),
            partial(GradientBuckets, model, mesh),
            TrainingState(model, optimizer, mesh).state_dict,
        ]
        for call in calls:
            with pytest.raises(UsageError) as caught:
                call()
            text = str(caught.value)
            assert text.startswith(
                f"rank {dist.get_rank()}: nothing says whether each rank of tp holds a part of embedding.weight"
            )
            assert "(and 2 more parameters)" in text
            assert "mark_split" in text
            assert "mark_replicated(module, over=())" in text
        model.embedding.requires_grad_(False)
        model.norm.requires_grad_(False)
        with pytest.raises(UsageError, match=r"embedding\.weight"):
            TrainingState(model, optimizer, mesh).state_dict()  # what is frozen is saved too
        assert len(gradient_axes(model, None)["dp_cp"]) == 4


def test_a_parameter_that_nothing_is_said_of_is_refused_by_its_name(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(2, 1).run(unmarked)


class OwnExpert(nn.Module):
    """An expert of a user: etp splits the weight; its ranks use the bias on the same rows, the scale each on its own."""

    def __init__(self, number: int, etp: int, part: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(torch.randn(4, 6, generator=generator).chunk(etp, 1)[part])
        self.bias = nn.Parameter(torch.randn(4, generator=generator))
        self.scale = nn.Parameter(torch.randn(3, generator=generator))
        self.number: torch.Tensor
        self.register_buffer("number", torch.tensor(number))
        mark_experts(self)


def own_experts() -> None:
    start()
    with FoldedMesh({"ep": 2, "etp": 2}) as mesh:
        ep, etp = mesh.rank("ep"), mesh.rank("etp")
        model = nn.ModuleDict({"expert": OwnExpert(ep, 2, etp)})
        expert: Any = model["expert"]
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        with pytest.raises(
            UsageError, match=r"each rank of etp holds a part of expert\.weight \(and 2 more parameters\)"
        ):
            clip_gradients(model, mesh, 1.0)
        mark_split(expert, "weight")
        mark_replicated(expert, "bias", "scale")
        with pytest.raises(UsageError, match=r"expert\.bias is an expert's, and its mark says .* summed over tp"):
            synchronise_gradients(model, mesh)
        mark_replicated(expert, "bias", over=())
        mark_replicated(expert, "scale", over=("etp",))
        model = copy.deepcopy(model)  # drops what torch keeps with parameters
        expert = model["expert"]
        wholes = [OwnExpert(number, 1, 0) for number in range(2)]
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        expert.scale.grad = expert.scale.detach() * (0.25 + 0.5 * etp)  # the shares of two ranks
        synchronise_gradients(model, mesh)
        torch.testing.assert_close(expert.scale.grad, expert.scale.detach())
        expert.scale.grad = expert.scale.detach() * (0.25 + 0.5 * etp)
        GradientBuckets(model, mesh).finish()
        torch.testing.assert_close(expert.scale.grad, expert.scale.detach())
        norm = math.sqrt(sum(float(each.double().square().sum()) for whole in wholes for each in whole.parameters()))
        assert float(clip_gradients(model, mesh, norm / 2)) == pytest.approx(norm, rel=1e-6)
        assert float(clip_gradients(model, mesh, 1e9)) == pytest.approx(norm / 2, rel=1e-6)


def test_experts_marked_by_hand_count_once_where_all_ranks_of_etp_hold_them(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(2, 2).run(own_experts)


# Checkpoints


class Model(nn.Module):
    def __init__(self, mesh: FoldedMesh | None, seed: int) -> None:
        super().__init__()
        tp = alone() if mesh is None else GroupCommunicator(mesh.group("tp"), "tp")
        self.dense = Dense(tp)
        self.dense.up.weight.requires_grad_(False)
        self.expert = OwnExpert(0 if mesh is None else mesh.rank("ep"), 1, 0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(seed)


def saved_and_loaded(folder: str) -> list[str]:
    start()
    with FoldedMesh({"tp": 2, "ep": 2}) as mesh:
        model = Model(mesh, seed=1)
        save_checkpoint(
            {"training": TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh)}, checkpoint_id=folder
        )
        other = Model(mesh, seed=5)
        other.expert.number.add_(7)
        load_checkpoint(
            {"training": TrainingState(other, torch.optim.SGD(other.parameters(), lr=0.1), mesh)}, checkpoint_id=folder
        )
        for (name, loaded), was in zip(other.state_dict().items(), model.state_dict().values(), strict=True):
            assert torch.equal(loaded, was), name
        return list(FileSystemReader(folder).read_metadata().state_dict_metadata)


def test_names_in_a_checkpoint_say_what_each_rank_has(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    """Frozen parameters, experts without numbers and their buffers keep their cut; what every rank has whole has none."""
    names = emulated_cluster(2, 2).run(saved_and_loaded, str(tmp_path / "checkpoint"))[0]
    found = {name.removeprefix("training.model.") for name in names}
    cut = {f"dense.{name}.tp{rank}of2" for name in ("up.weight", "up.bias", "down.weight") for rank in range(2)}
    cut |= {f"expert.{name}.ep{rank}of2" for name in ("weight", "bias", "scale", "number") for rank in range(2)}
    assert found == cut | {"dense.embedding.weight", "dense.norm.weight", "dense.norm.bias", "dense.down.bias"}


# Marks


def test_marks_that_contradict_each_other_are_refused_by_name() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embedding"].weight
    mark_replicated(model["embedding"])
    (marks,) = parameter_marks(model)
    assert (marks.name, marks.is_split, marks.reduce_over) == ("embedding.weight", False, ("tp",))
    assert list(replicated_parameters(model)) == [model["head"].weight]
    mark_split(model["head"])
    with pytest.raises(UsageError, match=re.escape("embedding.weight and head.weight are one parameter")):
        parameter_marks(model)
    mark_split(model["embedding"])  # the latest mark of a module holds
    (marks,) = parameter_marks(copy.deepcopy(model))
    assert (marks.is_split, marks.reduce_over) == (True, ())
    assert not list(replicated_parameters(model))
