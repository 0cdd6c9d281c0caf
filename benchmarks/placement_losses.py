"""``make bench-placement-losses``: the losses of 300 steps in which experts move ten times, against those where they stay.

A small model trains on 2 × 2 emulated ranks, with a checkpoint in the middle, from which the same ranks go on, and three
others. Without copies of experts losses shall have the same bits as with experts in order; with copies only sums are in
another order, by 1e-6 of a loss at most. Rounding grows over steps, as training takes what differs further apart. So that it
is told from an error, two runs are beside: the same with copies in FP64, where rounding is some 1e-16, and FP32 with experts
in order on three ranks, which changes the order of sums, too, and has neither copies nor migrations.

Copies are compared bit by bit at the ends. Writes a dated document, JSON and a picture. Losses only, nothing is timed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import add_output, dated_stem, facts, today, write_results
from rich.progress import track

from commlayer.emulation import EmulatedCluster
from commlayer.integrations import ExpertPlacer, FoldedMesh, RouterConfig, TrainingState
from commlayer.integrations.moe.experts import GroupedExperts
from commlayer.scheduler.placement.expert_placement import ExpertPlacement
from examples.language_model import ModelConfig, MoELanguageModel
from examples.text import Corpus

TARGET = 1e-6
_SHOWN = (6, 30, 60, 90, 120, 150, 200, 250, 300)
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Way:
    """``copies``: every slot that is left is filled with one."""

    name: str
    copies: bool
    dtype: str


WAYS = (Way("without copies", False, "fp32"), Way("with copies", True, "fp32"), Way("with copies", True, "fp64"))


@dataclass(frozen=True)
class Compared:
    """The outcome of one way. Differences are of each step's loss from that of experts in order on 2 × 2 ranks, as fractions of
    it: ``same`` on these ranks, migrations, checkpoint and new start included; ``other`` of the second half on three ranks;
    ``in_order`` of experts in order on three ranks, from the beginning. ``copies``: at the end, beside one of each expert."""

    way: Way
    migrations: int
    first_loss: float
    last_loss: float
    same: list[float]
    other: list[float]
    in_order: list[float]
    copies: int = 0

    @property
    def equal_bits(self) -> bool:
        return not any(self.same)

    def first_beyond(self, limit: float = TARGET) -> int | None:
        """The first step, counted from 1, whose loss on the same ranks differs by more than ``limit``; None where none does."""
        return next((step for step, apart in enumerate(self.same, start=1) if apart > limit), None)


@dataclass(frozen=True)
class _Found:
    """The outcome on one rank: losses, migrations, and a digest of every expert that it holds, with its optimizer's state.
    ``copies``: on all ranks, beside one of each."""

    losses: list[float]
    migrations: int
    digests: dict[str, str]
    copies: int = 0


# On every rank


def train(
    folder: str, way: Way, degrees: dict[str, int], first: int, last: int, *, every: int, load: bool, save: bool
) -> _Found:
    """Make the steps from ``first`` to ``last``; experts move in the middle of every ``every`` steps; 0: they stay."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    with FoldedMesh(degrees) as mesh:
        router = RouterConfig(num_experts=8, top_k=2, aux_loss_coefficient=0.01)
        shape: dict[str, Any] = {"hidden": 32, "width": 32, "num_layers": 2, "num_heads": 2}
        config = ModelConfig(router=router, **shape, spare_slots=1, dispatch="all_to_all", chunks=1)
        model = MoELanguageModel(config, mesh).to(_DTYPES[way.dtype])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        placer = ExpertPlacer(model, optimizer, mesh, every=0, say=lambda words: None)
        state = TrainingState(model, optimizer, mesh)
        if load:
            from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint

            load_checkpoint({"training": state}, checkpoint_id=folder)
        corpus, losses = Corpus.of(None), []
        for step in range(first, last):
            optimizer.zero_grad()
            losses.append(model.train_step(*corpus.batch(step, 16, 6)).item())
            optimizer.step()
            placer.step()
            if every and step % every == every // 2:
                chooser = np.random.default_rng(step)
                placer.move_to([shuffled(each, chooser, copies=way.copies) for each in placer.placements])
        if save:
            from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

            save_checkpoint({"training": state}, checkpoint_id=folder)
        return _Found(losses, placer.num_migrations, _digests(model, optimizer))


def shuffled(before: ExpertPlacement, chooser: np.random.Generator, *, copies: bool) -> ExpertPlacement:
    """Any placement on the slots of ``before``; ``copies``: in all slots that are left."""
    experts, (ranks, each) = before.num_experts, before.slots.shape
    slots = np.full((ranks, each), -1)
    slots.reshape(-1)[chooser.permutation(ranks * each)[:experts]] = chooser.permutation(experts)
    for rank, slot in np.argwhere(slots < 0) if copies else ():
        slots[rank, slot] = chooser.choice(np.setdiff1d(np.arange(experts), slots[rank]))
    return ExpertPlacement(slots, experts)


def _digests(model: MoELanguageModel, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    found = {}
    for name, experts in model.named_modules():
        if not isinstance(experts, GroupedExperts):
            continue
        for place, expert in enumerate(experts.numbers):
            digest = hashlib.sha256()
            for parameter in experts.parameters() if expert >= 0 else ():
                for tensor in (parameter.detach(), optimizer.state[parameter]["momentum_buffer"]):
                    digest.update(tensor[place].numpy().tobytes())
            if expert >= 0:
                found[f"{name}.{expert}"] = digest.hexdigest()
    return found


# The program


def compare(way: Way, four: EmulatedCluster, three: EmulatedCluster, steps: int, moves: int) -> Compared:
    """Run one way: experts in order on ``four`` ranks, and ``three``; and moving, half of the steps before a checkpoint.

    Raises RuntimeError where copies of an expert are not equal.
    """
    half = steps // 2

    def run(
        cluster: EmulatedCluster, begin: int, end: int, *, every: int = 0, load: bool = False, save: bool = False
    ) -> _Found:
        degrees = {"ep": cluster.world_size}
        job = partial(train, folder, way, degrees, begin, end, every=every, load=load, save=save)
        return _agreed(cluster.run(job, timeout_s=600))

    with tempfile.TemporaryDirectory() as folder:
        stays, elsewhere = run(four, 0, steps), run(three, 0, steps)
        every = steps // moves
        before = run(four, 0, half, every=every, save=True)
        after = run(four, half, steps, every=every, load=True)
        other = run(three, half, steps, every=every, load=True)
    return Compared(
        way,
        before.migrations + after.migrations,
        stays.losses[0],
        stays.losses[-1],
        _apart(before.losses + after.losses, stays.losses),
        _apart(other.losses, stays.losses[half:]),
        _apart(elsewhere.losses, stays.losses),
        after.copies,
    )


def _agreed(found: Sequence[_Found]) -> _Found:
    """Return the first rank's outcome. Raises RuntimeError where another has other losses, or copies of an expert differ."""
    digests: dict[str, str] = {}
    for rank, each in enumerate(found):
        unequal = [name for name, digest in each.digests.items() if digests.setdefault(name, digest) != digest]
        if unequal or each.losses != found[0].losses:
            raise RuntimeError(f"rank {rank} has other losses than rank 0, or other bits of {unequal}")
    return replace(found[0], copies=sum(len(each.digests) for each in found) - len(digests))


def _apart(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True)]


def document(known: dict[str, str], found: Sequence[Compared], steps: int) -> str:
    first = found[0]
    lines = [
        f"# Losses while experts move, {today()}",
        "",
        f"{steps} steps of SGD with momentum, {first.migrations} migrations of both layers, a checkpoint in the middle and a",
        f"new start from it, on 2 × 2 emulated ranks; the loss falls from {first.first_loss:.3f} to {first.last_loss:.3f}.",
        "Differences are of a step's loss from that with experts in order on 2 × 2 ranks, as fractions of it. *In order on 3",
        "ranks* has no migration and no copy: it is what another order of sums alone makes of the same training. All ranks had",
        "the same losses, and all copies of an expert the same bits of weights and momentum.",
        "",
        *[f"- {name}: {text}" for name, text in known.items()],
        "",
        "| | same bits on 2 × 2 | largest on 2 × 2 | beyond 1e-6 from step | going on on 3 ranks | in order on 3 ranks |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {_named(each)} | {'yes' if each.equal_bits else 'no'} | {max(each.same):.1e} | "
        f"{each.first_beyond() or 'never'} | {max(each.other):.1e} | {max(each.in_order):.1e} |"
        for each in found
    ]
    shown = [step for step in _SHOWN if step <= steps]
    lines += ["", f"| largest up to step | {' | '.join(map(str, shown))} |", f"|---|{'---|' * len(shown)}"]
    for label, apart in _courses(found).items():
        numbers = " | ".join(f"{max(apart[:step]):.1e}" for step in shown)
        lines.append(f"| {label} | {numbers} |")
    lines += ["", f"![The largest difference up to each step]({today()}-placement-losses.svg)"]
    return "\n".join(lines) + "\n"


def _named(each: Compared) -> str:
    return f"{each.way.name}, {each.way.dtype.upper()}"


def _courses(found: Sequence[Compared]) -> dict[str, list[float]]:
    """The differences of each step, by what they are of, where there are any."""
    courses = {f"{_named(each)}, on 2 × 2 ranks": each.same for each in found if not each.equal_bits}
    return courses | {f"in order on 3 ranks, {each.way.dtype.upper()}": each.in_order for each in found}


def draw(found: Sequence[Compared], path: Path) -> None:
    """Draw each step's difference, the largest so far."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "commlayer"  # the same names in every run
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for label, apart in _courses(found).items():
        largest = np.maximum.accumulate(apart)
        shown = np.where(largest > 0, largest, np.nan)  # a logarithmic axis has no 0
        axes.plot(range(1, len(apart) + 1), shown, "--" if label.startswith("in order") else "-", label=label)
    axes.axhline(TARGET, color="grey", linewidth=0.8, linestyle=":")
    axes.set(yscale="log", xlabel="step", ylabel="largest difference of the loss so far")
    axes.set_title("What another order of sums makes of the losses", loc="left")
    axes.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of training (default %(default)s)")
    parser.add_argument("--moves", type=int, default=10, help="migrations in these (default %(default)s)")
    add_output(parser)
    options = parser.parse_args()
    if options.moves < 2 or options.steps < 3 * options.moves:
        parser.error("expected two moves or more, and three steps or more for each")
    stem, known = dated_stem(options.output, "placement-losses"), facts("placement_losses.py", os.getloadavg()[0])
    with EmulatedCluster(2, 2) as four, EmulatedCluster(1, 3) as three:
        ways = track(WAYS, description="training", transient=True)
        found = [compare(way, four, three, options.steps, options.moves) for way in ways]
    text = document(known, found, options.steps)
    write_results(stem, {"date": today(), "facts": known, "ways": [asdict(each) for each in found]}, text)
    draw(found, stem.with_suffix(".svg"))
    print(text)


if __name__ == "__main__":
    os.environ.setdefault("COMMLAYER_PROFILE", "none")
    main()
