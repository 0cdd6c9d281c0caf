"""Experts that are placed anew while a model trains: the same losses, weights and optimizer state as where they stay."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commlayer import audit, stats
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe import expert_placer, placement_rounds
from commlayer.integrations.moe.expert_placer import ExpertPlacer
from commlayer.integrations.moe.expert_slots import ExpertSlots
from commlayer.integrations.moe.experts import GroupedExperts
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.observed_loads import ObservedLoads
from commlayer.integrations.moe.router import RouterConfig
from commlayer.integrations.training_state import TrainingState
from commlayer.profiles.errors import TensorError, UsageError
from commlayer.scheduler.mapping import clusters
from commlayer.scheduler.placement.expert_placement import ExpertPlacement
from commlayer.scheduler.placement.placement_price import ExpertWork
from commlayer.testing.plugin import ClusterFactory
from examples.language_model import ModelConfig, MoELanguageModel
from examples.text import Corpus

ROUTER = RouterConfig(num_experts=8, top_k=2, aux_loss_coefficient=0.01, score="sigmoid", bias_update_rate=1e-3)
CONFIG = ModelConfig(router=ROUTER, hidden=32, width=32, num_layers=2, num_heads=2, dispatch="all_to_all", chunks=2)
STEPS, BATCH = 6, 3
Found = tuple[list[float], dict[str, torch.Tensor]]


def random_placement(seed: int, before: ExpertPlacement, *, fill: bool) -> ExpertPlacement:
    """Any placement on the slots of ``before``; ``fill``: copies in all slots that are left."""
    chooser = np.random.default_rng(seed)
    experts, (ranks, each) = before.num_experts, before.slots.shape
    slots = np.full((ranks, each), -1)
    places = chooser.permutation(ranks * each)[:experts]
    slots.reshape(-1)[places] = chooser.permutation(experts)
    for rank, slot in np.argwhere(slots < 0) if fill else ():
        slots[rank, slot] = chooser.choice(np.setdiff1d(np.arange(experts), slots[rank]))
    return ExpertPlacement(slots, experts)


def skewed(model: MoELanguageModel, hot: float) -> MoELanguageModel:
    """Let expert 0 be chosen most, the next one less, and so on."""
    for layer in model.modules():
        if isinstance(layer, MoELayer) and layer.router.expert_bias is not None:
            layer.router.expert_bias.copy_(hot / torch.arange(1, ROUTER.num_experts + 1))
    return model


def expert_state(model: MoELanguageModel, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and moments of the experts that are here, by their numbers."""
    found = {}
    for name, experts in model.named_modules():
        if not isinstance(experts, GroupedExperts):
            continue
        for weight, parameter in experts.named_parameters():
            state = optimizer.state[parameter]
            kept = [parameter.detach(), *(state[key] for key in sorted(state) if state[key].shape == parameter.shape)]
            for place, expert in enumerate(experts.numbers):
                if expert >= 0:
                    found[f"{name}.{weight}.{expert}"] = torch.stack([each[place] for each in kept])
    return found


def train(
    degrees: dict[str, int],
    spare: int | None,
    moves: Sequence[int],
    *,
    fill: bool = False,
    hot: float = 0.5,
    is_sgd: bool = False,
    **more: Any,
) -> Found:
    """Train some steps, with experts on their way to another placement after each step in ``moves``."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    with FoldedMesh(degrees) as mesh:
        model = skewed(MoELanguageModel(ModelConfig(**{**vars(CONFIG), "spare_slots": spare, **more}), mesh), hot)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if is_sgd:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        placer = None if spare is None else ExpertPlacer(model, optimizer, mesh, every=0, say=lambda words: None)
        corpus, losses = Corpus.of(None), []
        for step in range(STEPS):
            tokens, labels = corpus.batch(step, 16, BATCH)
            optimizer.zero_grad()
            losses.append(model.train_step(tokens, labels).item())
            optimizer.step()
            if placer is None:
                continue
            placer.step()
            if step in moves:
                back = moves.index(step) % 3 == 2
                placer.move_to(
                    [
                        ExpertPlacement.in_order(8, mesh.size("ep"), spare or 0)
                        if back
                        else random_placement(7 * step + place, before, fill=fill)
                        for place, before in enumerate(placer.placements)
                    ]
                )
                refuse_to_load(model, optimizer, mesh)
        if placer is not None and moves:
            assert placer.num_migrations == len(moves)
            assert placer._rounds.loads.num_steps == 0, "nobody decides, and loads are kept for nobody"
            kept = optimizer.state_dict()
            optimizer.load_state_dict(kept)
            kept["expert_slots"][0] = ExpertPlacement.in_order(8, mesh.size("ep"), 3).slots.tolist()
            with pytest.raises(UsageError, match="TrainingState"):
                optimizer.load_state_dict(kept)
        return losses, expert_state(model, optimizer)


def refuse_to_load(model: MoELanguageModel, optimizer: torch.optim.Optimizer, mesh: FoldedMesh) -> None:
    """Load while experts are on their way: refused, since what is loaded would be written over when they arrive."""
    whole = TrainingState(model, optimizer, mesh)
    for part in (model, optimizer, whole):
        with pytest.raises(UsageError, match="on their way"):
            part.load_state_dict(part.state_dict())


def merged(found: Sequence[Found]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, and the state of all experts; copies have the same bits."""
    state: dict[str, torch.Tensor] = {}
    for losses, of_rank in found:
        assert losses == found[0][0]
        for name, tensor in of_rank.items():
            assert torch.equal(state.setdefault(name, tensor), tensor), name
    return found[0][0], state


@pytest.mark.parametrize(
    ("shape", "degrees", "spare", "hot"),
    [
        ((2, 2), {"ep": 4}, 0, 0.5),
        ((1, 3), {"ep": 3}, 1, 0.5),  # one sample on each rank; 8 experts on 3
        ((2, 2), {"ep": 2}, 1, 30.0),  # all tokens choose expert 0; ranks of edp; one rank without a sample
    ],
    ids=["2x2", "1x3", "edp"],
)
def test_without_copies_every_bit_is_the_same(
    emulated_cluster: ClusterFactory, shape: tuple[int, int], degrees: dict[str, int], spare: int, hot: float
) -> None:
    cluster = emulated_cluster(*shape)
    static = merged(cluster.run(partial(train, hot=hot), degrees, None, ()))
    moved = merged(cluster.run(partial(train, hot=hot), degrees, spare, (0, 2, 3)))
    assert moved[0] == static[0]
    assert moved[1].keys() == static[1].keys()
    assert all(torch.equal(tensor, static[1][name]) for name, tensor in moved[1].items())


def test_with_copies_losses_differ_by_the_order_of_sums_only(emulated_cluster: ClusterFactory) -> None:
    """Copies are equal bit for bit; :func:`merged` sees to that. SGD, because AdamW divides rounding by itself."""
    cluster = emulated_cluster(2, 2)
    static, _ = merged(cluster.run(partial(train, is_sgd=True), {"ep": 4}, None, ()))
    variants: list[dict[str, Any]] = [{}, {"chunks": "auto", "dispatch": "auto", "overlap_gradients": False}]
    for options in variants:
        losses, _ = merged(cluster.run(partial(train, fill=True, is_sgd=True, **options), {"ep": 4}, 1, (0, 2, 3)))
        assert losses == pytest.approx(static, rel=1e-6)


def decided(every: int) -> tuple[list[str], list[list[list[int]]], int, list[float]]:
    """Train with decisions of the placer's own, on a load that is almost all expert 0's and 1's."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    said: list[str] = []
    with FoldedMesh({"ep": 4}) as mesh:
        model = skewed(MoELanguageModel(ModelConfig(**{**vars(CONFIG), "spare_slots": 1}), mesh), 1.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        work = ExpertWork.of_shape(32, 32, tflops=1e-5, element_bytes=4)
        with ExpertPlacer(model, optimizer, mesh, every=every, horizon=100, work=work, say=said.append) as placer:
            corpus, losses = Corpus.of(None), []
            for step in range(3000):  # on a busy machine a search takes many steps
                if placer.num_migrations >= (2 if step < 60 else 1):
                    break
                optimizer.zero_grad()
                losses.append(model.train_step(*corpus.batch(step, 16, 4)).item())
                optimizer.step()
                placer.step()
                time.sleep(0.01)  # the search is on a thread, whose answer is waited for by nobody
            slots = [each.slots.tolist() for each in placer.placements]
        noted = stats()["placements"]
        assert [each["reason"] for each in noted] == [text.split(": ", 1)[1] for text in said]
        moved = [each for each in noted if each["copies"]]
        assert audit()["placements"] == moved
        assert len(moved) == (0 if mesh.rank("ep") else placer.num_migrations)
        for each in moved:
            assert min(each["promised_migration_us"] or 0, each["migration_us"] or 0, each["waited_us"] or 0) > 0
        with pytest.raises(UsageError, match="is closed"):
            placer.move_to(placer.placements)
        placer.step()  # nothing, and no other rank is asked
        placer.close()
    return said, slots, placer.num_migrations, losses


def test_a_skewed_load_is_seen_and_evened_out(
    emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clusters.load("h100-eos").profile_of((2, 2)).save(tmp_path / "profile.json")
    monkeypatch.setenv("COMMLAYER_PROFILE", str(tmp_path / "profile.json"))
    found = emulated_cluster(2, 2).run(decided, 3)
    said = found[0][0]
    assert said
    assert "copies move in 2 of 2 layers" in said[0]
    assert "predicted to take" in said[0]
    assert all(each[0] == [] for each in found[1:])
    assert all(each[1:3] == found[0][1:3] for each in found)
    assert found[0][2] >= 1
    # The two that have the load lay on one rank; which slots they have now depends on when was decided.
    for layer in found[0][1]:
        assert sum(not {0, 1}.isdisjoint(rank) for rank in layer) > 1


LONG = ExpertWork(row_bytes=128, row_us=1e3, weight_bytes=12288, gradient_bytes=12288, state_bytes=24576)
"""Experts that compute so long that what is lent hides behind it."""
LARGE = ExpertWork(row_bytes=128, row_us=1e3, weight_bytes=1 << 40, gradient_bytes=1 << 40, state_bytes=0)
"""Experts too large to send in every step."""


def is_spilling(layer: MoELayer) -> bool:
    assert layer.dispatcher.spiller is not None
    return layer.dispatcher.spiller.is_on


def combined(work: ExpertWork, spare: int, begins: bool) -> tuple[list[bool], list[str], list[float], list[float]]:
    """Train layers, which spill at first or not, until the placer has turned that round, and some steps more: which of them spill
    then, what was said, and the losses; and those of experts that stay."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    said: list[str] = []
    with FoldedMesh({"ep": 4}) as mesh:
        corpus = Corpus.of(None)

        def trained(model: MoELanguageModel, optimizer: torch.optim.Optimizer, step: int) -> float:
            optimizer.zero_grad()
            loss = model.train_step(*corpus.batch(step, 16, 8)).item()
            optimizer.step()
            return loss

        config = replace(CONFIG, spare_slots=spare, spilling="priced", chunks=1)
        model = skewed(MoELanguageModel(config, mesh), 1.0)
        layers = [layer for layer in model.modules() if isinstance(layer, MoELayer)]
        for layer in layers:
            assert layer.dispatcher.spiller is not None
            layer.dispatcher.spiller.is_on = begins
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses: list[float] = []
        with ExpertPlacer(model, optimizer, mesh, every=3, horizon=10**9, work=work, say=said.append) as placer:
            left = 4
            while left and len(losses) < 3000:
                losses.append(trained(model, optimizer, len(losses)))
                placer.step()
                is_decided = any(is_spilling(each) is not begins for each in layers)
                left -= is_decided and not placer.is_moving
                time.sleep(0 if is_decided else 0.01)  # as above
            spills = [is_spilling(each) for each in layers]
        assert all(is_spilling(each) for each in layers), "nobody decides any more"
        model = skewed(MoELanguageModel(CONFIG, mesh), 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return spills, said, losses, [trained(model, optimizer, step) for step in range(len(losses))]


@pytest.mark.parametrize(("work", "spills"), [(LONG, True), (LARGE, False)], ids=["long", "large"])
def test_layers_spill_or_not_as_was_chosen_on_all_ranks(
    emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, work: ExpertWork, spills: bool
) -> None:
    clusters.load("h100-eos").profile_of((2, 2)).save(tmp_path / "profile.json")
    monkeypatch.setenv("COMMLAYER_PROFILE", str(tmp_path / "profile.json"))
    found = emulated_cluster(2, 2).run(combined, work, 0 if spills else 1, not spills)
    assert all(each[0] == [spills] * 2 for each in found)
    assert ("spilling" if spills else "without copies") in found[0][1][0].split(")")[0]
    for *_, losses, static in found:
        assert losses == pytest.approx(static, rel=1e-6)


def out_of_luck(*_: Any) -> None:
    raise UsageError("out of luck")


def without_decision() -> tuple[list[str], int]:
    """Return what is printed where the search cannot be made, and how many steps' loads are kept then."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    printed: list[str] = []
    vars(expert_placer)["say_on_stderr"] = printed.append
    with FoldedMesh({"ep": 2}) as mesh:
        layer = MoELayer(32, 32, ROUTER, mesh=mesh, dispatch="all_to_all", chunks=1, spare_slots=1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)
        with pytest.raises(
            UsageError, match=r"ExpertPlacer: there is no profile of the expert group: .* every=0 to move"
        ):
            ExpertPlacer(layer, optimizer, mesh, every=2)
        profile = clusters.load("h100-eos").profile_of((2,))
        vars(placement_rounds)["place_layer"] = out_of_luck
        with ExpertPlacer(layer, optimizer, mesh, every=2, profile=profile) as placer:
            steps_after = 0
            for _ in range(3000):
                optimizer.zero_grad()
                layer(torch.randn(3, 32)).square().sum().backward()
                optimizer.step()
                placer.step()
                steps_after += placer._rounds.are_over
                if steps_after == 20:
                    break
                time.sleep(0.01)  # as above
            assert placer.num_migrations == 0
            return printed, placer._rounds.loads.num_steps


def test_a_search_that_fails_is_told_once_and_training_goes_on(
    emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMLAYER_PROFILE", "none")
    (first, kept), other = emulated_cluster(1, 2).run(without_decision)
    assert len(first) == 1
    assert "from now on: out of luck" in first[0]
    assert (kept, other) == (0, ([], 0))


# Without ranks


def test_choices_go_to_copies_in_turn() -> None:
    slots = ExpertSlots(ExpertPlacement(np.array([[0, 1], [2, 0], [-1, 0]]), 3), rank=1, source=1)
    chosen = torch.tensor([[0, 1], [0, -1], [2, 0], [0, 1]])
    assert slots.slots_of(chosen).tolist() == [[3, 1], [5, -1], [2, 0], [3, 1]]
    assert slots.by_expert(torch.tensor([5, 1, 2, 3, 9, 4])).tolist() == [12, 1, 2]
    assert slots.here == (2, 0)
    assert slots.slots_of(torch.zeros(0, 2, dtype=torch.int64)).shape == (0, 2)
    for wrong in (torch.tensor([[3, 0]]), torch.tensor([[-2, 0]]), torch.tensor([0]), torch.tensor([[0.0]])):
        with pytest.raises(TensorError, match="indices"):
            slots.slots_of(wrong)
    with pytest.raises(UsageError, match="expected a placement of 3 experts"):
        slots.move_to(ExpertPlacement.in_order(3, 3))
    with pytest.raises(UsageError, match="rank 3 of a placement"):
        ExpertSlots(slots.placement, rank=3)


@pytest.mark.parametrize("seed", range(5))
def test_shares_of_copies_differ_by_one(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(37, 6, generator=generator).topk(3).indices
    placement = random_placement(seed, ExpertPlacement.in_order(6, 3, spare=2), fill=True)
    for source in range(3):
        found = ExpertSlots(placement, 0, source).slots_of(chosen)
        assert torch.equal(torch.from_numpy(placement.phy2log)[found], chosen)
        counts = torch.bincount(found.flatten(), minlength=placement.slots.size)
        for expert in range(6):
            of_copies = counts[placement.log2phy[expert][: placement.logcnt[expert]]]
            assert int(of_copies.max() - of_copies.min()) <= 1


def test_a_layer_on_one_rank_with_slots_is_the_layer() -> None:
    plain, placed = (MoELayer(8, 12, ROUTER, spare_slots=spare) for spare in (None, 2))
    x = torch.randn(7, 8)
    assert torch.equal(plain(x), placed(x))
    assert "experts.w_gate.3" in placed.state_dict()
    plain.load_state_dict({name: tensor + 1 for name, tensor in placed.state_dict().items()})
    assert torch.equal(plain.experts.w_up[5], placed.experts.w_up[5] + 1)
    placed.load_state_dict(MoELayer(8, 12, ROUTER, spare_slots=0, seed=5).state_dict())
    assert not placed.experts.w_up[8:].any()
    with pytest.raises(RuntimeError, match=r"experts\.w_gate\.3"):
        placed.load_state_dict(
            {name: tensor for name, tensor in placed.state_dict().items() if name != "experts.w_gate.3"}
        )


def test_loads_that_are_not_looked_at_any_more_take_no_memory() -> None:
    layer = MoELayer(8, 12, ROUTER, spare_slots=1)
    loads = ObservedLoads([layer], every=2)
    for _ in range(2):
        layer(torch.randn(7, 8))
        loads.end_step()
    assert loads.num_steps == 2
    assert int(loads.round().sum()) == 2 * 7 * ROUTER.top_k
    layer(torch.randn(7, 8))
    loads.end_step()
    for _ in range(2):
        loads.close()
        assert loads.num_steps == 0
    assert not layer.dispatcher._watching


def test_a_handle_is_of_one_placement() -> None:
    layer = MoELayer(8, 12, ROUTER, spare_slots=1)
    x = torch.randn(3, 8)
    handle = layer.dispatcher.prepare(torch.tensor([[0, 1], [2, 3], [4, 5]]), like=x)
    assert layer.dispatcher.slots is not None
    layer.dispatcher.slots.move_to(ExpertPlacement.in_order(8, 1, spare=1))
    with pytest.raises(UsageError, match="experts have moved"):
        layer.dispatcher.dispatch(x, handle)
