"""A model whose batch holds padding computes the same on every mapping as on one process: the loss, the norm of the gradients,
and every gradient. And one process computes the same as without the padding.

In FP64, so that what differs by more than rounding shows. The data's seed is one under which no two experts are nearly as good.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_mappings import error, shard

from commlayer.integrations.clipping import clip_gradients
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.router import RouterConfig
from commlayer.integrations.shares import even_rows
from commlayer.profiles.errors import TensorError
from commlayer.testing.plugin import ClusterFactory
from examples.language_model import ModelConfig, MoELanguageModel

TOLERANCE = 1e-9
"""The largest difference, relative to the largest magnitude in the reference's whole tensor."""
SEQUENCE, BATCH = 16, 4
Z_AND_CAPACITY = {"z_loss_coefficient": 0.1, "capacity_factor": 0.8, "drop_scope": "sequence"}
LOSSES: dict[str, dict[str, Any]] = {
    "none": {},
    "aux": {"aux_loss_coefficient": 3.0, "device_aux_loss_coefficient": 2.0, "num_devices": 4},
    "z": {"z_loss_coefficient": 0.1},
    "z and capacity": Z_AND_CAPACITY,
    "z and capacity by position": {**Z_AND_CAPACITY, "drop_policy": "position"},
}


def no_padding() -> torch.Tensor:
    return torch.ones(SEQUENCE, BATCH, dtype=torch.bool)


def ragged() -> torch.Tensor:
    """Padding at the end, at the beginning, in the middle, and nowhere."""
    valid = no_padding()
    valid[11:, 0] = False
    valid[:7, 1] = False
    valid[4:9, 2] = False
    return valid


def one_valid_token() -> torch.Tensor:
    valid = ~no_padding()
    valid[5, 2] = True
    return valid


def a_rank_with_none() -> torch.Tensor:
    """One chunk of those that cp deals out, in half of the sequences, is valid: some ranks of dp, of cp and of tp have none."""
    valid = ~no_padding()
    valid[8:12, 2:] = True
    return valid


PADDING: dict[str, Callable[[], torch.Tensor]] = {
    "no padding": no_padding,
    "ragged": ragged,
    "one valid token": one_valid_token,
    "a rank with none": a_rank_with_none,
}


@dataclass(frozen=True)
class Case:
    """``padding`` and ``losses`` by their names; ``model``: fields of the configuration that change nothing."""

    degrees: tuple[tuple[str, int], ...]
    padding: str
    losses: str
    micro_batches: int = 1
    model: tuple[tuple[str, Any], ...] = ()

    def config(self) -> ModelConfig:
        router = RouterConfig(num_experts=8, top_k=2, **LOSSES[self.losses])
        shape: dict[str, Any] = {"hidden": 16, "num_heads": 4, "num_kv_heads": 2, "width": 12, "shared_width": 8}
        return ModelConfig(
            router=router,
            num_layers=max(2, dict(self.degrees).get("pp", 1)),
            vocabulary=32,
            seed=3,
            **shape,
            **dict(self.model),
        )

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, labels of which some do not count, and which tokens are valid."""
        generator = torch.Generator().manual_seed(1)
        tokens, labels = torch.randint(32, (2, SEQUENCE, BATCH), generator=generator)
        valid = PADDING[self.padding]()
        if self.padding != "one valid token":
            labels = labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.2, -100)
        return tokens, labels, valid


def model_of(case: Case, mesh: FoldedMesh | None) -> MoELanguageModel:
    model = MoELanguageModel(case.config(), mesh).double()
    for layer in model._layers():
        layer.moe.router.weight.data.mul_(20)  # drawn small: without this, all experts are nearly as good
    return model


@dataclass(frozen=True)
class Step:
    loss: torch.Tensor
    norm: torch.Tensor
    gradients: dict[str, torch.Tensor]


def step(model: MoELanguageModel, case: Case, columns: list[int] | None = None) -> Step:
    tokens, labels, valid = (whole if columns is None else whole[:, columns] for whole in case.batch())
    loss = model.train_step(tokens, labels, valid=valid, num_micro_batches=case.micro_batches)
    norm = clip_gradients(model, model.mesh, 1e9)
    return Step(loss, norm, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


@cache
def on_one_process(case: Case, columns: tuple[int, ...]) -> Step:
    torch.set_num_threads(1)
    return step(model_of(case, None), case, list(columns))


def expected(case: Case, dp: int) -> Step:
    """The step on one process, with the same sequences in each micro-batch, which balance losses look at together. Under a
    capacity the sequences of one rank of dp compete within each of its micro-batches, which ``cases`` makes one sequence."""
    per_rank, micro_batches = BATCH // dp, case.micro_batches
    stages = tuple(degree for degree in case.degrees if degree[0] == "pp")  # of which depends how many layers there are
    parts = even_rows(per_rank, micro_batches)
    if "capacity" in case.losses:
        assert set(parts) == {1}
        return on_one_process(replace(case, degrees=stages, micro_batches=BATCH, model=()), tuple(range(BATCH)))
    columns = [
        rank * per_rank + sum(parts[:m]) + i
        for m in range(micro_batches)
        for rank in range(dp)
        for i in range(parts[m])
    ]
    return on_one_process(replace(case, degrees=stages, model=()), tuple(columns))


def wrong(mesh: FoldedMesh, case: Case) -> list[str]:
    """The differences on this rank. Collective."""
    model, wanted = model_of(case, mesh), expected(case, mesh.size("dp"))
    found = step(model, case)
    errors = {
        name: error(got, right, right)
        for name, got, right in (("loss", found.loss, wanted.loss), ("norm", found.norm, wanted.norm))
    }
    for name, gradient in found.gradients.items():
        whole = wanted.gradients[name]
        # The softmax over one key is 1, whatever the scores: then queries and keys have gradients of 0, but for rounding.
        is_nothing = case.padding == "one valid token" and name.endswith(("attention.q.weight", "attention.k.weight"))
        beside = wanted.gradients[name[:-8] + "v.weight"] if is_nothing else whole
        errors[name] = error(gradient, shard(model, name, whole), beside)
    assert len(errors) > 10
    return [
        f"rank {dist.get_rank()}, {case}: {name} off by {off:.2g}"
        for name, off in errors.items()
        if not off <= TOLERANCE
    ]


def run(cluster: ClusterFactory, world: int, cases: list[Case]) -> None:
    for case in cases:
        dp = world
        for name, size in case.degrees:
            dp //= size if name in ("tp", "cp", "pp") else 1
        expected(case, dp)  # before the fork: once, not on each rank

    def job() -> list[str]:
        torch.set_num_threads(1)
        dist.init_process_group("commlayer")
        lines = []
        for degrees, alike in groupby(cases, lambda case: case.degrees):
            with FoldedMesh(dict(degrees)) as mesh:
                lines += [line for case in alike for line in wrong(mesh, case)]
        dist.destroy_process_group()
        return lines

    nodes = 2 if world >= 4 else 1
    found = cluster(nodes=nodes, ranks_per_node=world // nodes).run(job, timeout_s=240)
    assert [line for lines in found for line in lines] == []


MAPPINGS: dict[int, list[dict[str, int]]] = {
    2: [{}, {"ep": 2}, {"tp": 2, "ep": 2}, {"tp": 2, "etp": 2}, {"cp": 2, "ep": 2}, {"pp": 2}],
    4: [
        {"ep": 4},
        {"tp": 2, "cp": 2, "ep": 4},
        {"tp": 2, "etp": 2, "ep": 2},
        {"cp": 4, "ep": 4},
        {"tp": 4, "etp": 4},
        {"cp": 2, "ep": 4},  # across CP and DP
        {"pp": 2, "ep": 2},
        {"pp": 2, "tp": 2, "ep": 2},
        {"pp": 4},
    ],
    8: [{"tp": 2, "cp": 2, "ep": 4}, {"pp": 2, "tp": 2, "cp": 2, "ep": 4}, {"cp": 2, "ep": 2, "etp": 2}],
}


def cases(world: int, padding: str) -> list[Case]:
    found = []
    for degrees in MAPPINGS[world]:
        dp = world // (degrees.get("tp", 1) * degrees.get("cp", 1) * degrees.get("pp", 1))
        for losses in ("aux", "z and capacity", "z and capacity by position"):
            micro_batches = BATCH // dp if "capacity" in losses else min(2, BATCH // dp)
            found.append(Case(tuple(degrees.items()), padding, losses, micro_batches))
    return found


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("world", MAPPINGS)
def test_every_mapping_computes_the_same(emulated_cluster: ClusterFactory, world: int, padding: str) -> None:
    run(emulated_cluster, world, cases(world, padding))


def test_options_compute_the_same(emulated_cluster: ClusterFactory) -> None:
    """Other attention, schedules, ways of tokens, experts that spill: with padding too."""
    options: list[tuple[tuple[tuple[str, int], ...], dict[str, Any]]] = [
        ((("tp", 2), ("cp", 2), ("ep", 4)), {"attention": "tensor"}),
        ((("pp", 2), ("ep", 2)), {"schedule": "1f1b", "overlap_gradients": False}),
        ((("pp", 2), ("ep", 2)), {"schedule": "1f1b", "overlap_micro_batches": True}),
        ((("cp", 2), ("ep", 4)), {"overlap_micro_batches": True}),
        ((("ep", 4),), {"dispatch": "all_gather"}),
        ((("ep", 4),), {"dispatch": "two_level"}),
        ((("ep", 4),), {"dispatch": "all_to_all", "chunks": 4, "spilling": "llep"}),
    ]
    found = []
    for degrees, model in options:
        dp = 4 // (dict(degrees).get("tp", 1) * dict(degrees).get("cp", 1) * dict(degrees).get("pp", 1))
        micro_batches = min(2, BATCH // dp)
        found += [Case(degrees, padding, "z", micro_batches, tuple(model.items())) for padding in PADDING]
    run(emulated_cluster, 4, found)


# One process, against no padding at all


def alone(case: Case, column: int, valid: torch.Tensor) -> tuple[Step, int]:
    """A step of one sequence, of which nothing but its valid tokens is left, and how many of its labels count."""
    tokens, labels, _ = case.batch()
    rows = valid[:, column]
    mine = labels[rows, column].unsqueeze(1)
    model = model_of(case, None)
    loss = model.train_step(tokens[rows, column].unsqueeze(1), mine)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Step(loss, loss, found), int((mine != -100).sum())


def test_one_process_computes_what_it_does_without_the_padding() -> None:
    """Padding at the beginning and at the end: positions are relative, so a sequence may lie anywhere."""
    case = Case((), "ragged", "none")  # of losses that look at several sequences together
    valid = ragged()
    valid[:, 2] = False  # padding in the middle would close up
    tokens, labels, _ = case.batch()
    model = model_of(case, None)
    loss = model.train_step(tokens, labels, valid=valid)
    steps = [alone(case, column, valid) for column in (0, 1, 3)]
    total = sum(number for _, number in steps)
    wanted = sum(found.loss * number for found, number in steps) / total
    assert error(loss, torch.as_tensor(wanted), loss) <= TOLERANCE
    for name, parameter in model.named_parameters():
        gradient = sum((found.gradients[name] * (number / total) for found, number in steps), torch.zeros(()))
        assert error(parameter.grad, gradient, gradient) <= TOLERANCE, name


def test_what_lies_in_padding_is_not_looked_at() -> None:
    case = Case((), "ragged", "aux")
    tokens, labels, valid = case.batch()
    found = []
    for filler in (0, -1, 10**9):
        model = model_of(case, None)
        loss = model.train_step(tokens.masked_fill(~valid, filler), labels.masked_fill(~valid, filler), valid=valid)
        found.append([loss, *(p.grad for p in model.parameters())])
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_the_loss_is_the_mean_over_labels_that_count(micro_batches: int) -> None:
    """Not over all tokens; and not the mean of the micro-batches' means, which have other numbers of them."""
    case = Case((), "no padding", "z")
    tokens, labels, _ = case.batch()
    labels[2:, 0] = -100
    model = model_of(case, None)
    loss = model.train_step(tokens, labels, num_micro_batches=micro_batches)
    logits = model(tokens).flatten(0, 1)
    assert error(loss, torch.nn.functional.cross_entropy(logits, labels.flatten()).detach(), loss) <= TOLERANCE


def test_a_batch_of_padding_alone_is_nothing_and_not_nan() -> None:
    case = Case((), "ragged", "aux")
    tokens, labels, valid = case.batch()
    model = model_of(case, None)
    assert float(model.train_step(tokens, labels, valid=torch.zeros_like(valid))) == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    ("valid", "message"),
    [
        (torch.ones(SEQUENCE, BATCH), r"as torch.bool of shape \[16, 4\]; got torch.float32 of shape \[16, 4\]"),
        (torch.ones(BATCH, SEQUENCE, dtype=torch.bool), r"got torch.bool of shape \[4, 16\]"),
    ],
)
def test_masks_that_do_not_fit(valid: torch.Tensor, message: str) -> None:
    case = Case((), "ragged", "z")
    tokens, labels, _ = case.batch()
    with pytest.raises(TensorError, match=message):
        model_of(case, None).train_step(tokens, labels, valid=valid)
