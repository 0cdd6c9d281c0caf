"""Experts that spill while a model trains: the same results and gradients as where they stay, in whatever way tokens go."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from reference_moe import reference_moe
from torch import nn

from commlayer import stats
from commlayer.collectives import GroupCommunicator
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe import expert_spilling
from commlayer.integrations.moe.agreement import _see
from commlayer.integrations.moe.dispatch_groups import ExpertGrid
from commlayer.integrations.moe.dispatcher import TokenDispatcher
from commlayer.integrations.moe.expert_placer import ExpertPlacer
from commlayer.integrations.moe.expert_spilling import ExpertSpiller
from commlayer.integrations.moe.experts import GroupedExperts
from commlayer.integrations.moe.handle import ChoiceCounts
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.lent_experts import _Way
from commlayer.integrations.moe.router import RouterConfig
from commlayer.integrations.moe.routing import Routing
from commlayer.integrations.remat import Rematerialise
from commlayer.profiles.curve import Curve
from commlayer.profiles.errors import DisagreementError, UsageError
from commlayer.profiles.links import Peaks
from commlayer.profiles.profile import Profile
from commlayer.profiles.topology import Topology, shape_text
from commlayer.scheduler.mapping import clusters
from commlayer.scheduler.placement.expert_placement import ExpertPlacement
from commlayer.scheduler.placement.llep import LlepRule
from commlayer.scheduler.placement.placement_price import ExpertWork
from commlayer.scheduler.placement.spilling import SpillDecision, Spilling
from commlayer.scheduler.probes import probes
from commlayer.testing import run_on_nodes
from commlayer.testing.plugin import ClusterFactory
from examples.language_model import ModelConfig, MoELanguageModel
from examples.text import Corpus

EAGER = Spilling("llep", thresholds=LlepRule(imbalance=1.0, capacity=1.0, least_rows=1))
"""Spills all that is over the mean."""
HIDDEN, WIDTH, TOP_K = 16, 24, 2


def priced(*shape: int) -> Spilling:
    """Spill by prices of experts that compute long, so that it pays to send weights. Without a shape: by the group's curves."""
    work = ExpertWork(row_bytes=128, row_us=1e3, weight_bytes=9216, gradient_bytes=9216, state_bytes=0)
    return Spilling("priced", profile=clusters.load("h100-eos").profile_of(shape) if shape else None, work=work)


class Drawn(nn.Module):
    """A router whose choices are given."""

    def __init__(self, config: RouterConfig, indices: torch.Tensor, weights: torch.Tensor) -> None:
        super().__init__()
        self.config, self.indices, self.weights = config, indices, weights

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor | None = None, valid: torch.Tensor | None = None
    ) -> Routing:
        counts = torch.bincount(self.indices[self.indices >= 0], minlength=self.config.num_experts)
        return Routing(self.indices, self.weights, counts, counts)  # which does not mind an expert that is chosen twice


def drawn(experts: int, rank: int, *, hot: float = 0.6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choices of a rank's tokens, of which rank 1 has none: most of them of expert 0, some of one expert twice, some dropped.
    Their weights, and the tokens."""
    tokens = (37, 0, 52, 41, 29)[rank % 5]
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randint(experts, (tokens, TOP_K), generator=generator)
    indices[torch.rand(tokens, TOP_K, generator=generator) < hot] = 0
    indices[torch.rand(tokens, TOP_K, generator=generator) < 0.1] = -1
    weights = torch.rand(tokens, TOP_K, generator=generator, dtype=torch.float64)
    return indices, weights, torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)


def layer_of(mesh: FoldedMesh | None, experts: int, rank: int, hot: float = 0.6, **more: Any) -> MoELayer:
    config = RouterConfig(num_experts=experts, top_k=TOP_K)
    layer = MoELayer(HIDDEN, WIDTH, config, mesh=mesh, **more).double()
    layer.router = Drawn(config, *drawn(experts, rank, hot=hot)[:2])  # type: ignore[assignment]  # as a router is used
    return layer


def passed(layer: MoELayer, tokens: torch.Tensor, *, remat: bool = False, times: int = 1) -> list[torch.Tensor]:
    """The output, and the gradients of tokens and of the experts' weights."""
    layer.zero_grad()
    x = tokens.clone().requires_grad_()
    with Rematerialise(is_on=remat):
        out = layer(x)
    for left in reversed(range(times)):
        out.sin().sum().backward(retain_graph=left > 0)
    grads = [x.grad, *(weight.grad for weight in layer.experts.weights)]
    assert all(grad is not None for grad in grads)
    return [out.detach(), *(grad / times for grad in grads if grad is not None)]


def apart(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(mine, theirs, strict=True))


def expected(experts: int, rank: int, size: int, hot: float = 0.6) -> list[torch.Tensor]:
    """The same of the slow reference, in one process: of all experts' weights."""
    whole = layer_of(None, experts, 0).experts
    weights = [weight.detach().clone().requires_grad_() for weight in whole.weights]
    found: list[torch.Tensor] = []
    for source in range(size):
        indices, gates, tokens = drawn(experts, source, hot=hot)
        x = tokens.requires_grad_()
        out = reference_moe(x, indices, gates, list(zip(*(w.unbind() for w in weights), strict=True)))
        out.sin().sum().backward()
        if source == rank:
            assert x.grad is not None
            found = [out.detach(), x.grad]
    return found + [w.grad for w in weights if w.grad is not None]


WAYS: tuple[dict[str, Any], ...] = (
    {"dispatch": "all_to_all", "chunks": 1},
    {"dispatch": "all_to_all", "chunks": (1, 3, 3, 1)},
    {"dispatch": "all_gather"},
    {"dispatch": "two_level"},
    {"dispatch": "auto", "weights_at": "experts"},
)


def spilled(
    degrees: dict[str, int], experts: int, ways: Sequence[dict[str, Any]], spilling: Spilling
) -> tuple[list[float], list[int], Any]:
    """The largest differences from the reference; what spilled of each call; statistics."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    errors, rows, rank = [], [], dist.get_rank()
    with FoldedMesh(degrees) as mesh:
        tokens, right = drawn(experts, rank)[2], expected(experts, rank, dist.get_world_size())
        for way in ways:
            layer = layer_of(mesh, experts, rank, spilling=spilling, **way)
            here = slice(layer.experts.first, layer.experts.first + layer.experts.count)
            theirs = [*right[:2], *(grad[here] for grad in right[2:])]
            calls = [passed(layer, tokens), passed(layer, tokens, remat=True), passed(layer, tokens, times=2)]
            with torch.no_grad():
                calls.append([layer(tokens), *theirs[1:]])
            errors += [apart(mine, theirs) for mine in calls]
            decision = layer.dispatcher.spill_decision
            assert decision is not None
            rows.append(sum(part.rows for part in decision.parts))
            assert layer.dispatcher.spiller is not None
            assert layer.dispatcher.spiller.decision_us > 0
    return errors, rows, stats()["spills"]


def test_results_and_gradients_are_the_references(emulated_cluster: ClusterFactory) -> None:
    found = emulated_cluster(2, 2).run(spilled, {"ep": 4}, 8, WAYS, EAGER)
    for errors, rows, (counted,) in found:
        assert max(errors) < 1e-12
        assert rows == found[0][1]
        assert min(rows) > 20
        assert counted["calls"] == counted["spilled"] == 4 * len(WAYS)
        assert counted["rows"] == 4 * sum(rows)
        assert "rows of" in counted["reason"]
    lent, guests = ([each[2][0][name] for each in found] for name in ("lent_bytes", "guest_bytes"))
    assert sum(lent) == sum(guests) > 0
    assert lent[0] == max(lent) > guests[0], "the rank of the hot expert"
    assert guests[1] > 0, "a rank without tokens helps too"


@pytest.mark.parametrize(
    ("shape", "degrees", "experts"), [((1, 3), {"ep": 3}, 7), ((2, 2), {"ep": 2, "etp": 2}, 4)], ids=["7 on 3", "etp"]
)
def test_odd_numbers_of_ranks_and_shards_of_experts(
    emulated_cluster: ClusterFactory, shape: tuple[int, int], degrees: dict[str, int], experts: int
) -> None:
    if "etp" in degrees:
        for errors in emulated_cluster(*shape).run(beside_experts_that_stay, degrees, experts, EAGER):
            assert max(errors) < 1e-12
        return
    for rule in (EAGER, priced(3)):
        for errors, rows, _ in emulated_cluster(*shape).run(spilled, degrees, experts, WAYS[:3], rule):
            assert max(errors) < 1e-12
            assert min(rows) > 0


def beside_experts_that_stay(degrees: dict[str, int], experts: int, spilling: Spilling) -> list[float]:
    """The differences from a layer whose experts stay."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    rank = dist.get_rank()
    with FoldedMesh(degrees) as mesh:
        tokens, found = drawn(experts, rank)[2], []
        for way in WAYS[:3]:
            layer = layer_of(mesh, experts, rank, spilling=spilling, **way)
            found.append(apart(passed(layer, tokens), passed(layer_of(mesh, experts, rank, **way), tokens)))
            assert layer.dispatcher.spill_decision is not None
            assert layer.dispatcher.spill_decision.parts
    return found


def measured(sizes: tuple[int, ...]) -> Profile:
    """A profile with all curves that are measured on such nodes; nothing of them takes long."""
    topology = Topology.parse(shape_text(sizes))
    return Profile.create(
        name="quick",
        kind="measured",
        source="made up",
        topology=topology,
        peaks=Peaks(8.0, 8.0, 8.0),
        gather="remote",
        curves=[Curve(*probe.key, (1024, 1 << 24), (1.0, 2000.0)) for probe in probes(topology)],
    )


GROUPS: dict[str, tuple[tuple[int, ...], dict[str, int], Spilling]] = {
    "a node of two": ((2, 2), {"ep": 2}, priced()),
    "a node of two, by a profile of both": ((2, 2), {"ep": 2}, replace(priced(), profile=measured((2, 2)))),
    "nodes of one rank and of three": ((1, 3), {"ep": 4}, priced()),
    "ETP between groups on one node and on two": ((1, 3), {"ep": 2, "etp": 2}, priced()),
}


@pytest.mark.cluster
@pytest.mark.parametrize("name", GROUPS)
def test_prices_are_those_of_the_expert_group(
    emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """The group is a part of the job, its nodes differ, or groups that share tokens differ."""
    sizes, degrees, spilling = GROUPS[name]
    measured(sizes).save(tmp_path / "profile.json")
    monkeypatch.setenv("COMMLAYER_PROFILE", str(tmp_path / "profile.json"))
    cluster = emulated_cluster(len(sizes), max(sizes))
    for errors in run_on_nodes(cluster, sizes, beside_experts_that_stay, degrees, 6, spilling):
        assert max(errors) < 1e-12


def even() -> tuple[bool, list[Any]]:
    """Whether nothing was decided under an even load, and what was counted."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    with FoldedMesh({"ep": 4}) as mesh:
        layer = layer_of(mesh, 8, dist.get_rank(), spilling=priced(2, 2))
        choices = torch.arange(16).view(8, 2) % 8
        layer.router = Drawn(layer.router.config, choices, torch.ones(8, 2).double())  # type: ignore[assignment]  # as above
        layer(torch.ones(8, HIDDEN).double()).sum().backward()
        return layer.dispatcher.spill_decision is None, stats()["spills"]


def test_an_even_load_decides_nothing(emulated_cluster: ClusterFactory) -> None:
    assert emulated_cluster(2, 2).run(even) == [(True, [])] * 4


# In training

ROUTER = RouterConfig(num_experts=8, top_k=2, aux_loss_coefficient=0.01, score="sigmoid", bias_update_rate=1e-3)
CONFIG = ModelConfig(router=ROUTER, hidden=32, width=32, num_layers=2, num_heads=2, dispatch="all_to_all", chunks=1)
STEPS = 12


def trained(mesh: FoldedMesh, config: ModelConfig, *, moves: bool) -> list[float]:
    """The losses of some steps under a hot expert. Where experts move, they do so three times, with steps after each."""
    model = MoELanguageModel(config, mesh)
    for layer in model.modules():
        if isinstance(layer, MoELayer) and layer.router.expert_bias is not None:
            layer.router.expert_bias.copy_(1.0 / torch.arange(1, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    placer = ExpertPlacer(model, optimizer, mesh, every=0, say=lambda words: None) if moves else None
    corpus, losses = Corpus.of(None), []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(model.train_step(*corpus.batch(step, 16, 8), num_micro_batches=2).item())
        optimizer.step()
        if placer is not None:
            placer.step()
            if step % 4 == 1:
                placer.move_to([with_copies(step + at, each) for at, each in enumerate(placer.placements)])
    return losses


def train(config: ModelConfig, degrees: dict[str, int], moves: bool) -> tuple[list[float], list[float], int]:
    """The losses where experts stay, and where they spill, and how many rows did."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    with FoldedMesh(degrees, separate=("etp_ep",) if config.overlap_micro_batches else ()) as mesh:
        static = trained(mesh, replace(config, spilling=None, spare_slots=None), moves=False)
        return static, trained(mesh, config, moves=moves), sum(each["rows"] for each in stats()["spills"])


def with_copies(seed: int, before: ExpertPlacement) -> ExpertPlacement:
    """All slots full: of experts in any order, and of copies."""
    chooser, (ranks, each) = np.random.default_rng(seed), before.slots.shape
    slots = np.full((ranks, each), -1)
    slots[:, : each - 1] = chooser.permutation(before.num_experts).reshape(ranks, each - 1)
    for row in slots:
        row[-1] = chooser.choice(np.setdiff1d(np.arange(before.num_experts), row))
    return ExpertPlacement(slots, before.num_experts)


TRAINED: dict[str, tuple[dict[str, int], dict[str, Any], bool]] = {
    "llep": ({"ep": 4}, {"spilling": EAGER}, False),
    "priced, placed, with copies": ({"ep": 4}, {"spilling": priced(2, 2), "spare_slots": 1}, True),
    "a pipeline": ({"ep": 2, "pp": 2}, {"spilling": EAGER, "schedule": "1f1b"}, False),
    "two at a time": ({"ep": 4}, {"spilling": EAGER, "overlap_micro_batches": True}, False),
    "edp, dropping": (
        {"ep": 2},
        {
            "spilling": EAGER,
            "router": replace(ROUTER, capacity_factor=1.5, device_aux_loss_coefficient=0.01, num_devices=2),
        },
        False,
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_losses_are_those_of_experts_that_stay(emulated_cluster: ClusterFactory, name: str) -> None:
    degrees, more, moves = TRAINED[name]
    static, losses, rows = emulated_cluster(2, 2).run(train, replace(CONFIG, **more), degrees, moves)[0]
    assert rows > 0
    assert losses == pytest.approx(static, rel=1e-6)


# What goes wrong


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except (UsageError, DisagreementError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def wrong() -> list[str]:
    """Collect what ranks say where rank 2 decides something else, cannot decide, has another rule, or other experts; and then
    nothing is wrong."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    rank, said = dist.get_rank(), []
    with FoldedMesh({"ep": 4}) as mesh:
        layer, tokens = layer_of(mesh, 8, rank, spilling=EAGER), drawn(8, rank)[2]
        right = vars(expert_spilling)["decide_spill"]

        def other(*given: Any) -> SpillDecision:
            decision: SpillDecision = right(*given)
            return replace(decision, parts=())

        def failing(*given: Any) -> SpillDecision:
            raise UsageError("out of luck")

        for broken in (other, failing):
            if rank == 2:
                vars(expert_spilling)["decide_spill"] = broken
            said.append(raised(lambda: layer(tokens)))
            vars(expert_spilling)["decide_spill"] = right
        said.append(raised(lambda: layer_of(mesh, 8, rank, spilling="llep" if rank == 2 else EAGER)(tokens)))
        layer.experts.w_up.requires_grad_(rank != 2)
        said.append(raised(lambda: layer(tokens)))
        layer.experts.w_up.requires_grad_(True)
        layer(tokens).sum().backward()
        dispatcher, indices = layer.dispatcher, drawn(8, rank)[0]
        handle = dispatcher.prepare(indices, like=tokens, experts=layer.experts)
        said.append(raised(lambda: dispatcher.dispatch(tokens, handle)))
        said.append(raised(lambda: dispatcher.prepare(indices, like=tokens)))
        said.append(raised(lambda: layer_of(mesh, 8, rank, spilling="priced")))
        small = replace(priced(), profile=clusters.load("h100-eos").profile_of((3,)))
        said.append(raised(lambda: layer_of(mesh, 8, rank, spilling=small)))
    return said


def test_what_ranks_decide_differently_is_found_before_a_token_moves(
    emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMLAYER_PROFILE", "none")
    for rank, said in enumerate(emulated_cluster(2, 2).run(wrong)):
        assert "decided otherwise which experts spill" in said[0]
        assert f"rank {0 if rank == 2 else 2} decided" in said[0]
        assert "out of luck" in said[1] if rank == 2 else "rank 2 could not decide" in said[1]
        assert "disagree on the way" in said[2]
        assert "disagree on the way" in said[3]
        assert "use run()" in said[4]
        assert "expected GroupedExperts" in said[5]
        assert said[6].startswith(
            f"UsageError: rank {rank}: spilling='priced': there is no profile of the expert group"
        )
        assert "COMMLAYER_PROFILE" in said[6]
        assert "a group of 2x2 does not fit a cluster of that shape; or take spilling='llep'" in said[7]


def test_what_does_not_go_together_is_refused() -> None:
    padded = RouterConfig(num_experts=4, top_k=2, capacity_factor=1.0, pad_to_capacity=True)
    with pytest.raises(UsageError, match="nothing to spill"):
        MoELayer(8, 12, padded, spilling="llep")
    with pytest.raises(UsageError, match="priced or llep"):
        MoELayer(8, 12, ROUTER, spilling="sometimes")
    experts = GroupedExperts(8, 12, count=4)
    dispatcher = TokenDispatcher(4, ep=GroupCommunicator(None, "ep"), spilling="llep")
    indices = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(UsageError, match="padded to a capacity"):
        dispatcher.prepare(indices, experts=experts, capacity=3)
    vars(experts)["unshard"] = None  # as FSDP2's class has it
    with pytest.raises(UsageError, match="FSDP shards"):
        dispatcher.prepare(indices, experts=experts)
    alone = MoELayer(8, 12, ROUTER, spilling="priced")
    alone(torch.randn(5, 8)).sum().backward()
    assert alone.dispatcher.spill_decision is None


def group(rank: int, size: int) -> Any:
    """The numbers of a group, two ranks of which share a node."""
    nodes = (tuple(range(min(2, size))), *((each,) for each in range(2, size)))
    return SimpleNamespace(rank=rank, size=size, ranks=tuple(range(size)), nodes=nodes, shape=tuple(map(len, nodes)))


@pytest.mark.parametrize("seed", range(12))
def test_all_ranks_find_the_same_counts_which_are_those_of_their_choices(seed: int) -> None:
    ranks, experts = 3, 7
    choices = [drawn(experts, seed + rank, hot=0.4)[0] for rank in range(ranks)]
    grids = [ExpertGrid(experts, group(rank, ranks), group(0, 1), group(rank, ranks)) for rank in range(ranks)]
    counts = torch.stack([_see(each, grids[0], None).counts for each in choices]).unsqueeze(1)
    made = []
    for grid, indices in zip(grids, choices, strict=True):
        spiller = ExpertSpiller(grid, None, EAGER)
        layout = ChoiceCounts(grid, indices, None, tuple(map(len, choices)), counts)
        decision = spiller._decide(layout)
        made.append(spiller._spilled(layout, decision.parts))
        assert decision.parts
        assert torch.equal(_see(made[-1].indices, made[-1].grid, None).counts, made[-1].counts[grid.ep.rank, 0])
        assert ((made[-1].indices < 0) == (indices < 0)).all()
        rows = list(layout.gathered_rows)
        for part in decision.parts:
            rows[part.source] -= part.rows
            rows[part.target] += part.rows
        assert list(made[-1].gathered_rows) == rows
        assert made[-1].grid.num_local_experts == grid.num_local_experts + decision.ends[1].count(grid.ep.rank)
    assert all(torch.equal(each.counts, made[0].counts) for each in made)


def dies(point: str) -> str:
    """On every rank, until rank 1, which helps, dies: what the others hear."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if rank == 1:
        setattr(_Way, point, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    dist.init_process_group("commlayer")
    mesh = FoldedMesh({"ep": 3})
    layer = layer_of(mesh, 6, rank, spilling=EAGER)
    try:
        for _ in range(3):
            layer(drawn(6, rank)[2]).sum().backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.cluster
@pytest.mark.parametrize("point", ["send", "send_back"])
def test_a_helper_that_dies_is_named(emulated_cluster: ClusterFactory, point: str) -> None:
    outcomes = emulated_cluster(1, 3).run(dies, point, check=False, grace_s=20.0)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.value is not None, outcome.failure
        assert outcome.value.startswith("PeerError")
        assert "rank 1 " in outcome.value
