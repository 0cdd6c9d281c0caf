"""transformers' expert parallelism with our dispatcher, against its own all_to_all on Gloo: the same losses, at every step."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from judged import compare, dispatches, no_alarms, plans  # noqa: F401  a fixture among them
from tiny_moe import BATCH, SEQUENCE, VOCABULARY, build, mixtral_config, transformers
from wrong_rows import sorted_wrongly

from commlayer.emulation import EmulatedCluster
from commlayer.integrations.transformers import SpreadExperts, register_experts
from commlayer.profiles.errors import GroupError, UsageError
from commlayer.statistics import Stats, reset_stats, stats

pytestmark = pytest.mark.cluster

STEPS = 20


@dataclass(frozen=True)
class Variant:
    """How the model is spread. ``kind``: of dispatch, by ours; None: transformers' own. ``wrong``: rows are sorted wrongly.
    ``experts_alone``: nothing else is trained, the router neither. ``dtype``: of all parameters."""

    kind: str | None = None
    tp: int = 1
    ep: int = 4
    wrong: bool = False
    experts_alone: bool = False
    dtype: str = "float32"
    steps: int = STEPS


@dataclass(frozen=True)
class Job:
    """A rank's job: variants, one after the other."""

    path: str
    variants: tuple[Variant, ...]
    backend: str = "commlayer"
    plan: str = "flat"


@dataclass(frozen=True)
class Trained:
    """The results of a rank for one variant. ``learning``: the last names of the parameters that got a gradient."""

    losses: list[float]
    learning: set[str]
    stats: Stats = field(compare=False)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint whose experts are all different."""
    folder = tmp_path_factory.mktemp("mixtral")
    build(mixtral_config()).save_pretrained(folder)
    _ = import_module("transformers.distributed").DistributedConfig  # before the fork: once, not in each rank
    return str(folder)


def loaded(path: str, variant: Variant) -> Any:
    """The model as a user of transformers loads it."""
    own = variant.kind is None
    config = import_module("transformers.distributed").DistributedConfig(
        fsdp_size=dist.get_world_size() // variant.tp,
        tp_size=variant.tp,
        ep_size=variant.ep,
        ep_implementation="all_to_all" if own else register_experts(kind=str(variant.kind)),
    )
    model = transformers().AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, variant.dtype), distributed_config=config
    )
    if variant.experts_alone:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".experts." in name)
    return model


def train(job: Job) -> list[Trained]:
    torch.set_num_threads(1)
    os.environ.update(COMMLAYER_PROFILE="none", COMMLAYER_PLAN=job.plan)
    dist.init_process_group(job.backend)
    found = []
    for variant in job.variants:
        reset_stats()
        model = loaded(job.path, variant)
        with sorted_wrongly() if variant.wrong else contextlib.nullcontext():
            losses, learning = loop(model, dist.get_rank() // variant.tp, variant.steps)
        found.append(Trained(losses, learning, stats()))
    return found


def loop(model: Any, batch: int, steps: int) -> tuple[list[float], set[str]]:
    """A plain loop over random tokens, others for every ``batch`` and at every step; the losses, and what learns."""
    # At a rate of 0.5 training is chaotic on some CPUs: sums in another order decide which of two experts a token takes.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    generator = torch.Generator().manual_seed(1 + batch)
    losses, learning = [], set()
    for _ in range(steps):
        tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        learning |= {name.split(".")[-1] for name, each in model.named_parameters() if each.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, learning


@cache
def run(job: Job, ranks_per_node: int = 2) -> list[list[Trained]]:
    """The results of each variant, of each rank."""
    with EmulatedCluster(nodes=2, ranks_per_node=ranks_per_node) as cluster:
        return list(zip(*cluster.run(train, job), strict=True))  # type: ignore[arg-type]


FEW = 6
"""Steps of variants, which differ from what is shown in the first of them already."""
STOCK = (
    Variant(),
    Variant(tp=2, steps=FEW),
    Variant(experts_alone=True, steps=FEW),
    Variant(dtype="bfloat16", steps=FEW),
)
PLANNED = (
    Variant("all_to_all"),
    Variant("two_level"),
    Variant("all_to_all", wrong=True, steps=FEW),
    Variant("two_level", wrong=True, steps=FEW),
    Variant("all_to_all", tp=2, steps=FEW),
    Variant("all_to_all", experts_alone=True, steps=FEW),
    Variant("two_level", experts_alone=True, steps=FEW),
    Variant("all_to_all", dtype="bfloat16", steps=FEW),
)


def test_losses_are_those_of_its_own_exchange(path: str) -> None:
    """Moves are exact, and transformers' own sort and sum stand around them; two levels sum in another order."""
    expected, over_tp, *_ = run(Job(path, STOCK, "gloo"))
    moved, levels, _, _, shared, *_ = run(Job(path, PLANNED))
    compare(moved, expected, steps=STEPS, tolerance=0)
    compare(levels, expected, steps=STEPS, tolerance=1e-6)
    compare(shared, over_tp, steps=FEW, tolerance=0)
    for one in (*moved, *shared):
        assert dispatches(one.stats) == {("transformers", "all_to_all × 1")}
        assert ("all_to_all", "flat") in plans(one.stats)
    for one in levels:
        assert dispatches(one.stats) == {("transformers", "two_level × 1")}
        assert ("all_to_all_v", "hierarchical") in plans(one.stats)


def test_experts_alone_learn_the_same(path: str) -> None:
    """In the first layer neither tokens nor weights need a gradient, and the experts do."""
    *_, expected, _ = run(Job(path, STOCK, "gloo"))
    *_, moved, levels, _ = run(Job(path, PLANNED))
    for ranks in (expected, moved, levels):
        assert [one.learning for one in ranks] == [{"gate_up_proj", "down_proj"}] * 4
    compare(moved, expected, steps=FEW, tolerance=0)
    compare(levels, expected, steps=FEW, tolerance=1e-6)


def test_losses_in_bf16_are_the_same(path: str) -> None:
    *_, expected = run(Job(path, STOCK, "gloo"))
    *_, moved = run(Job(path, PLANNED))
    compare(moved, expected, steps=FEW, tolerance=0)
    full, *_ = run(Job(path, STOCK, "gloo"))
    assert [one.losses[0] for one in full] != [one.losses[0] for one in expected], "nothing was in another format"


def test_rows_in_a_wrong_order_are_caught(path: str) -> None:
    """Two rows change places: the comparison must fail, even with a tolerance ten times wider."""
    expected, *_ = run(Job(path, STOCK, "gloo"))
    _, _, *broken, _, _, _, _ = run(Job(path, PLANNED))
    assert len(broken) == 2
    for each in broken:
        with pytest.raises(AssertionError, match=r"rank \d, step \d+: loss"):
            compare(each, expected, steps=FEW, tolerance=1e-5)


def test_losses_are_the_same_by_plans(path: str) -> None:
    expected, *_ = run(Job(path, STOCK, "gloo"))
    (planned,) = run(Job(path, (Variant("auto"),), plan="hierarchical"))
    compare(planned, expected, steps=STEPS, tolerance=1e-6)
    for one in planned:
        assert {(name, "hierarchical") for name in ("all_to_all", "reduce_scatter", "all_gather")} <= plans(one.stats)


def test_losses_are_the_same_on_two_nodes_of_four(path: str) -> None:
    (expected,) = run(Job(path, (Variant(ep=8),), "gloo"), 4)
    (levels,) = run(Job(path, (Variant("two_level", ep=8),)), 4)
    compare(levels, expected, steps=STEPS, tolerance=1e-6)


def test_groups_of_another_backend_are_refused_by_name(path: str) -> None:
    def job() -> str:
        dist.init_process_group("gloo")
        with pytest.raises(GroupError) as refused:
            SpreadExperts(lambda rows, *_: rows, 4, dist.group.WORLD, dist.group.WORLD)  # type: ignore[arg-type]
        return str(refused.value)

    with EmulatedCluster(nodes=1, ranks_per_node=2) as cluster:
        for words in cluster.run(job):
            assert 'backend gloo: call torch.distributed.init_process_group("commlayer")' in words


def test_names_of_its_own_are_left_alone() -> None:
    _ = transformers()
    with pytest.raises(UsageError, match="'all_to_all' is an implementation of transformers' own"):
        register_experts("all_to_all")


def test_the_page_shows_the_lines_that_a_user_adds() -> None:
    text = (Path(__file__).resolve().parent.parent.parent / "docs/trainers/transformers.md").read_text(encoding="utf-8")
    program = text.partition("# mixtral_experts.py")[2].partition("```")[0]
    ours = [line for line in program.splitlines() if "commlayer" in line or "register_experts" in line]
    assert len(ours) == 3, ours  # two of them are the backend's name and the implementation's, in place of others
