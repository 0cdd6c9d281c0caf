"""Checkpoints by names that no mapping changes: saved on some ranks, loaded on others, with experts anywhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.expert_placer import ExpertPlacer
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.router import RouterConfig
from commlayer.integrations.training_state import TrainingState
from commlayer.profiles.errors import TensorError, UsageError
from commlayer.scheduler.placement.expert_placement import ExpertPlacement
from commlayer.testing.plugin import ClusterFactory
from examples.language_model import ModelConfig, MoELanguageModel
from examples.text import Corpus

ROUTER = RouterConfig(num_experts=8, top_k=2)
CONFIG = ModelConfig(router=ROUTER, hidden=32, width=32, num_layers=2, num_heads=2, dispatch="all_to_all", chunks=1)


def reversed_experts(before: ExpertPlacement) -> ExpertPlacement:
    slots = before.slots.copy()
    slots[slots >= 0] = before.num_experts - 1 - slots[slots >= 0]
    return ExpertPlacement(slots, before.num_experts)


def train(
    folder: str, degrees: dict[str, int], spare: int | None, first: int, last: int, *, load: bool, save: bool
) -> list[float]:
    """Train the steps from ``first`` to ``last``; experts are elsewhere after each second one, where they can be."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    with FoldedMesh(degrees) as mesh:
        model = MoELanguageModel(ModelConfig(**{**vars(CONFIG), "spare_slots": spare, "seed": 7 * load}), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        placer = None if spare is None else ExpertPlacer(model, optimizer, mesh, every=0, say=lambda words: None)
        state = TrainingState(model, optimizer, mesh)
        if load:
            load_checkpoint({"training": state}, checkpoint_id=folder)
        corpus, losses = Corpus.of(None), []
        for step in range(first, last):
            optimizer.zero_grad()
            losses.append(model.train_step(*corpus.batch(step, 16, 6)).item())
            optimizer.step()
            if placer is not None:
                placer.step()
                if step % 2 == 0:
                    placer.move_to([reversed_experts(each) for each in placer.placements])
        if save:
            save_checkpoint({"training": state}, checkpoint_id=folder)
        return losses


def test_a_run_goes_on_on_other_ranks_with_experts_elsewhere(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    whole = emulated_cluster(2, 2).run(partial(train, load=False, save=False), folder, {"ep": 4}, None, 0, 8)[0]
    begun = emulated_cluster(2, 2).run(partial(train, load=False, save=True), folder, {"ep": 4}, 0, 0, 4)[0]
    assert begun == whole[:4]
    names = FileSystemReader(folder).read_metadata().state_dict_metadata
    assert sum(".w_up." in name and name.startswith("training.model") for name in names) == 2 * 8
    for shape, degrees, spare in (((1, 3), {"ep": 3}, 1), ((1, 2), {"tp": 2, "ep": 2}, None)):
        gone_on = emulated_cluster(*shape).run(partial(train, load=True, save=False), folder, degrees, spare, 4, 8)
        assert gone_on == [gone_on[0]] * len(gone_on)
        assert gone_on[0] == pytest.approx(whole[4:], rel=2e-5)
    again = emulated_cluster(2, 2).run(partial(train, load=True, save=False), folder, {"ep": 4}, 1, 4, 8)[0]
    assert again == whole[4:]  # the same ranks of EP: bit for bit


def half_a_state() -> tuple[str, bool]:
    """The error of a rank where rank 1 alone has a state that lacks an entry, and whether a whole one is taken then."""
    dist.init_process_group("commlayer")
    with FoldedMesh({"ep": 3}) as mesh:
        layer = MoELayer(8, 12, ROUTER, mesh=mesh, spare_slots=1)
        state = TrainingState(layer, torch.optim.AdamW(layer.parameters(), lr=1e-2), mesh)
        saved = {name: tensor + 1 for name, tensor in state.state_dict().items()}
        was = layer.router.weight.clone()
        lacking = {name: tensor for name, tensor in saved.items() if name != "model.router.weight"}
        with pytest.raises(UsageError) as caught:
            state.load_state_dict(lacking if dist.get_rank() == 1 else saved)
        assert torch.equal(layer.router.weight, was), "one rank took what another refused"
        state.load_state_dict(saved)
        return str(caught.value), torch.equal(layer.router.weight, was + 1)


def test_where_one_rank_cannot_load_none_does(emulated_cluster: ClusterFactory) -> None:
    found = emulated_cluster(1, 3).run(half_a_state)
    assert all(is_loaded for _, is_loaded in found)
    assert found[1][0].startswith("rank 1: the state lacks model.router.weight")
    for rank in (0, 2):
        assert found[rank][0].startswith(
            f"rank {rank}: nothing was loaded on any rank, for rank 1 cannot take the state"
        )
        assert "UsageError: rank 1: the state lacks model.router.weight" in found[rank][0]


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    layer = MoELayer(8, 12, ROUTER, spare_slots=1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    state = TrainingState(layer, optimizer, None)
    saved = {name: tensor.clone() for name, tensor in state.state_dict().items()}
    assert "optimizer.experts.w_down.3.momentum_buffer" in saved
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(UsageError, match=r"lacks model\.experts\.w_up\.5:"):
        state.load_state_dict({name: tensor for name, tensor in saved.items() if name != "model.experts.w_up.5"})
    wrong = {name: tensor + 1 for name, tensor in saved.items()} | {"model.experts.w_down.7": torch.zeros(2)}
    with pytest.raises(TensorError, match=r"w_down\.7: expected \[8, 12\], the state has \[2\]"):
        state.load_state_dict(wrong)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in state.state_dict().items())
    fresh = MoELayer(8, 12, ROUTER)
    fresh(torch.ones(2, 8)).sum().backward()
    of_fresh = TrainingState(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9), None)
    with pytest.raises(UsageError, match="gradients are there"):
        of_fresh.state_dict()


@pytest.mark.parametrize("kind", [torch.optim.ASGD, torch.optim.NAdam, torch.optim.Rprop])
def test_an_optimizer_that_begins_with_other_numbers_than_zero_makes_a_step_first(
    kind: Callable[..., torch.optim.Optimizer],
) -> None:
    layer = MoELayer(8, 12, ROUTER)
    optimizer = kind(layer.parameters())
    state = TrainingState(layer, optimizer, None)
    with pytest.raises(UsageError, match="before its first step"):
        state.state_dict()
    layer(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    saved = {name: tensor.clone() for name, tensor in state.state_dict().items()}
    state.load_state_dict({name: tensor + 1 for name, tensor in saved.items()})
    assert all(torch.equal(tensor, saved[name] + 1) for name, tensor in state.state_dict().items())


@pytest.mark.parametrize(
    "kind", [torch.optim.Adam, torch.optim.Adamax, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Adadelta]
)
def test_a_state_that_is_saved_before_the_first_step_is_that_of_a_fresh_optimizer(
    kind: Callable[..., torch.optim.Optimizer],
) -> None:
    weights = []
    for is_saved in (False, True):
        layer = MoELayer(8, 12, ROUTER)
        optimizer = kind(layer.parameters())
        if is_saved:
            TrainingState(layer, optimizer, None).state_dict()
        layer(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        weights.append(layer.experts.w_up.detach())
    assert torch.equal(*weights)
