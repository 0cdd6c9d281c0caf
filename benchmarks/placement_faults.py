"""``make bench-placement-faults``: ranks killed while experts are on their way to other ranks, in small jobs of real processes.

Each trial is a job on an emulated cluster that trains a small model, saves a checkpoint, and goes on with its experts
moving after every second step. At one point of one migration one rank ends as by ``kill -9``: before or when it has
sent what moves, beside the next forward and backward pass, before or when it has sent the gradients that follow, before
it writes what arrived, when it has switched. Then another job loads the checkpoint and makes the step behind it.
Counted are hangs (a survivor that comes back neither with an error nor otherwise), errors that do not name the victim,
and checkpoints that do not load, or from which the next loss is another. There have to be none of any. A trial's seed
says all about it. ``--json FILE`` keeps every trial.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import common  # noqa: F401  finds examples/
import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from commlayer.emulation import EmulatedCluster
from commlayer.emulation.outcomes import RankOutcome
from commlayer.integrations import ExpertPlacer, FoldedMesh, RouterConfig, TrainingState
from commlayer.integrations.moe.expert_messages import ExpertMessages
from commlayer.integrations.moe.expert_slots import ExpertSlots
from commlayer.scheduler.placement.expert_placement import ExpertPlacement
from examples.language_model import ModelConfig, MoELanguageModel
from examples.text import Corpus

SHAPES = ((2, 2), (1, 3), (3, 1))
POINTS = (
    "before it sends",
    "when it has sent",
    "beside the next pass",
    "before it sends gradients",
    "when it has sent gradients",
    "before it writes",
    "when it has switched",
)
_LATEST_S = 0.03
"""How long after it has sent a rank dies at the latest, beside the next pass."""
_SAVED_AFTER, _STEPS, _PATIENCE_S = 2, 12, 25.0
_INTER = "400mbit"


@dataclass(frozen=True)
class Trial:
    """One job. ``migration``: which one the victim does not outlive, from 1. ``delay_s``: of a death beside the next pass."""

    seed: int
    shape: tuple[int, int]
    victim: int
    point: str
    migration: int
    delay_s: float


@dataclass
class Found:
    """The outcome of a trial. ``after_s``: from the first survivor's error to the last one's. ``named``: for each survivor."""

    trial: Trial
    is_struck: bool = False
    hung: list[int] = field(default_factory=list)
    named: dict[int, bool] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    resumed: str = ""

    @property
    def is_good(self) -> bool:
        return self.is_struck and not self.hung and all(self.named.values()) and self.resumed == "same loss"


def draw(seed: int) -> Trial:
    """The trial of a seed."""
    pick = random.Random(seed)
    shape = pick.choice(SHAPES)
    return Trial(
        seed,
        shape,
        pick.randrange(shape[0] * shape[1]),
        POINTS[seed % len(POINTS)],
        pick.randint(1, 3),
        pick.uniform(0.0, _LATEST_S),
    )


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arm(trial: Trial) -> None:
    """On the victim: die at the point of the trial. A migration starts two exchanges, of what moves and of gradients."""
    start, store, move_to = ExpertMessages.start, ExpertMessages.store, ExpertSlots.move_to
    seen = {"starts": 0}

    def struck(place: str, migration: int) -> None:
        if (place, migration) == (trial.point, trial.migration):
            _die()

    def starting(messages: ExpertMessages) -> None:
        seen["starts"] += 1
        migration, what = (seen["starts"] + 1) // 2, "" if seen["starts"] % 2 else " gradients"
        struck(f"before it sends{what}", migration)
        start(messages)
        struck(f"when it has sent{what}", migration)
        if (trial.point, trial.migration, what) == ("beside the next pass", migration, ""):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # nobody handles it: the kernel ends the process
            signal.setitimer(signal.ITIMER_REAL, max(trial.delay_s, 1e-6))

    def storing(messages: ExpertMessages) -> None:
        struck("before it writes", seen["starts"] // 2)
        store(messages)

    def moving(slots: ExpertSlots, placement: ExpertPlacement) -> None:
        move_to(slots, placement)
        struck("when it has switched", seen["starts"] // 2)

    ExpertMessages.start = starting  # type: ignore[method-assign, assignment]
    ExpertMessages.store = storing  # type: ignore[method-assign, assignment]
    ExpertSlots.move_to = moving  # type: ignore[method-assign, assignment]


def _prepared(mesh: FoldedMesh, seed: int) -> tuple[MoELanguageModel, torch.optim.Optimizer]:
    router = RouterConfig(num_experts=6, top_k=2)
    config = ModelConfig(router=router, hidden=32, width=32, num_layers=2, num_heads=2, spare_slots=1, seed=seed)
    model = MoELanguageModel(config, mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _step(model: MoELanguageModel, optimizer: torch.optim.Optimizer, step: int) -> float:
    optimizer.zero_grad()
    loss = model.train_step(*Corpus.of(None).batch(step, 16, 4)).item()
    optimizer.step()
    return loss


def job(trial: Trial, folder: str) -> tuple[float, float, str]:
    """On every rank, until the victim dies: the loss behind the checkpoint, the time of the error, and its text."""
    torch.set_num_threads(1)
    if int(os.environ["RANK"]) == trial.victim:
        _arm(trial)
    dist.init_process_group("commlayer", timeout=timedelta(seconds=60))
    behind = float("nan")
    try:
        mesh = FoldedMesh({"ep": dist.get_world_size()})
        model, optimizer = _prepared(mesh, 0)
        placer = ExpertPlacer(model, optimizer, mesh, every=0, say=lambda words: None)
        for step in range(_STEPS):
            loss = _step(model, optimizer, step)
            placer.step()
            behind = loss if step == _SAVED_AFTER else behind
            if step + 1 == _SAVED_AFTER:
                save_checkpoint({"training": TrainingState(model, optimizer, mesh)}, checkpoint_id=folder)
            elif step >= _SAVED_AFTER and step % 2 == 0:
                placer.move_to([_any_placement(10 * step + at, each) for at, each in enumerate(placer.placements)])
    except RuntimeError as error:
        return behind, time.monotonic(), f"{type(error).__name__}: {error}"
    return behind, time.monotonic(), ""


def _any_placement(seed: int, before: ExpertPlacement) -> ExpertPlacement:
    chooser = np.random.default_rng(seed)
    slots = np.full(before.slots.size, -1)
    slots[chooser.permutation(slots.size)[: before.num_experts]] = chooser.permutation(before.num_experts)
    return ExpertPlacement(slots.reshape(before.slots.shape), before.num_experts)


def resume(folder: str) -> float:
    """On every rank of another job: the loss behind the checkpoint, of a model that began otherwise."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    with FoldedMesh({"ep": dist.get_world_size()}) as mesh:
        model, optimizer = _prepared(mesh, 5)
        load_checkpoint({"training": TrainingState(model, optimizer, mesh)}, checkpoint_id=folder)
        return _step(model, optimizer, _SAVED_AFTER)


def run(trial: Trial, cluster: EmulatedCluster) -> Found:
    """Run one trial, and load its checkpoint."""
    found = Found(trial)
    with tempfile.TemporaryDirectory() as folder:
        outcomes: Sequence[RankOutcome] = cluster.run(
            job, trial, folder, check=False, grace_s=_PATIENCE_S, timeout_s=_PATIENCE_S + 60
        )
        losses = set()
        for outcome in outcomes:
            if outcome.rank == trial.victim:
                found.is_struck = outcome.failure is not None and outcome.failure.signal in (
                    signal.SIGKILL,
                    signal.SIGALRM,
                )
            elif outcome.failure is not None or outcome.value is None:
                found.hung.append(outcome.rank)
            else:
                behind, _, text = outcome.value
                losses.add(behind)
                found.texts[outcome.rank] = text
                found.named[outcome.rank] = f"rank {trial.victim} " in text.split("; here:")[0]
        try:
            again = set(cluster.run(resume, folder, timeout_s=_PATIENCE_S + 60))
            found.resumed = "same loss" if again == losses else f"losses {losses} and then {again}"
        except RuntimeError as error:
            found.resumed = f"{type(error).__name__}: {error}"
    return found


def report(found: Sequence[Found], console: Console) -> bool:
    """Print the table; whether nothing went wrong."""
    table = Table(title="Ranks killed while experts move")
    for column in ("", "trials", "struck", "survivors", "named", "hung", "checkpoint loads"):
        table.add_column(column, justify="left" if not column else "right")
    kinds: tuple[tuple[str, Callable[[Trial], object]], ...] = (
        ("", lambda trial: "all"),
        ("", lambda trial: trial.point),
        ("shape ", lambda trial: f"{trial.shape[0]}×{trial.shape[1]}"),
        ("migration ", lambda trial: trial.migration),
        ("victim ", lambda trial: "rank 0" if trial.victim == 0 else "another"),
    )
    for prefix, of in kinds:
        rows: dict[str, list[Found]] = {}
        for each in found:
            rows.setdefault(f"{prefix}{of(each.trial)}", []).append(each)
        for name, members in rows.items():
            named = [is_named for each in members for is_named in each.named.values()]
            counts = (
                len(members),
                sum(each.is_struck for each in members),
                len(named) + sum(len(each.hung) for each in members),
                sum(named),
                sum(len(each.hung) for each in members),
                sum(each.resumed == "same loss" for each in members),
            )
            table.add_row(name, *map(str, counts))
    console.print(table)
    is_met = all(each.is_good for each in found)
    console.print("targets (every rank struck, every error names it, none hangs, all checkpoints load): ", end="")
    console.print("met" if is_met else "MISSED")
    return is_met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="the first trial's seed")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="begin no trial after so long")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(width=110) if not Console().is_terminal else Console()
    found: list[Found] = []
    until = time.monotonic() + options.budget_s
    clusters: dict[tuple[int, int], EmulatedCluster] = {}
    try:
        for trial in track(
            list(map(draw, range(options.seed, options.seed + options.trials))), "trials", console=console
        ):
            if time.monotonic() > until:
                break
            if trial.shape not in clusters:
                clusters[trial.shape] = EmulatedCluster(*trial.shape, inter=_INTER)
            found.append(run(trial, clusters[trial.shape]))
            if not found[-1].is_good:
                console.print(str(found[-1])[:2000], highlight=False, soft_wrap=True, markup=False)
    except KeyboardInterrupt:
        console.print(f"interrupted after {len(found)} of {options.trials} trials")
    finally:
        for cluster in clusters.values():
            cluster.close()
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=1), encoding="utf-8")
    sys.exit(0 if found and report(found, console) else 1)


if __name__ == "__main__":
    os.environ.setdefault("COMMLAYER_PROFILE", "none")
    main()
