"""Gradients clipped by their norm: that of the whole model, on every mapping, with experts anywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commlayer.integrations.clipping import clip_gradients
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.expert_placer import ExpertPlacer
from commlayer.integrations.moe.router import RouterConfig
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.placement.expert_placement import ExpertPlacement
from commlayer.testing.plugin import ClusterFactory
from examples.language_model import ModelConfig, MoELanguageModel
from examples.text import Corpus

CONFIG = ModelConfig(
    router=RouterConfig(num_experts=8, top_k=2),
    hidden=32,
    width=32,
    num_layers=2,
    num_heads=2,
    attention="tensor",
    chunks=1,
)


def norms(degrees: dict[str, int] | None, spare: int | None, fill: str = "") -> list[float]:
    """The norms of three steps that are clipped to half of the first one's; experts move after the first, copies too."""
    torch.set_num_threads(1)
    mesh = None
    if degrees is not None:
        dist.init_process_group("commlayer")
        mesh = FoldedMesh(degrees)
    model = MoELanguageModel(ModelConfig(**{**vars(CONFIG), "spare_slots": spare}), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    placer = None if mesh is None or spare is None else ExpertPlacer(model, optimizer, mesh, every=0)
    found: list[float] = []
    for step in range(3):
        optimizer.zero_grad()
        model.train_step(*Corpus.of(None).batch(step, 16, 4))
        found.append(float(clip_gradients(model, mesh, found[0] / 2 if found else 1e9)))
        optimizer.step()
        if placer is not None and fill and step == 0:
            placer.step()
            slots = placer.placements[0].slots[::-1].copy()
            if fill == "copies":
                slots[:, -1] = np.roll(slots[:, 0], 1)
            placer.move_to([ExpertPlacement(slots, 8)] * 2)
    return found


def test_the_norm_is_that_of_the_whole_model(emulated_cluster: ClusterFactory) -> None:
    whole = norms(None, None)
    cluster = emulated_cluster(2, 2)
    assert cluster.run(norms, {"tp": 2, "ep": 2, "etp": 2}, None) == [pytest.approx(whole, rel=1e-5)] * 4
    assert cluster.run(norms, {"pp": 2, "ep": 2}, None) == [pytest.approx(whole, rel=1e-5)] * 4
    static, moved, copied = (cluster.run(norms, {"ep": 4}, 1, fill) for fill in ("", "moved", "copies"))
    assert static == [static[0]] * 4
    assert static[0] == pytest.approx(whole, rel=1e-5)
    assert copied == [copied[0]] * 4
    assert moved[0][:2] == static[0][:2]
    assert moved[0] == pytest.approx(static[0], rel=1e-6)
    assert copied[0] == pytest.approx(static[0], rel=1e-6)


def test_a_norm_that_is_none_is_refused_or_left_alone() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match="max_norm"):
        clip_gradients(model, None, 0.0)
    assert float(clip_gradients(model, None, 1.0)) == 0.0
    model(torch.full((1, 2), float("inf"))).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    assert not clip_gradients(model, None, 1.0).isfinite()
    after = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True) if b is not None)
