"""Train a small MoE language model on any mapping: ``python -m examples.train`` in a checkout,
alone or on ranks.

The losses are the same under every mapping, up to rounding; with a balance loss and several
micro-batches they depend on dp. docs/moe_training.md takes it apart.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import click
import torch
import torch.distributed as dist

from commlayer import recorder, stats
from commlayer.cli.commands import Command
from commlayer.cli.failure import failure_of, wants_traceback
from commlayer.cli.option_types import RealNumber, in_order, json_option
from commlayer.cli.place import is_first
from commlayer.cli.progress_bars import progress
from commlayer.cli.tables import echo, print_json, print_table, rounded
from commlayer.errors import CommlayerError, UsageError
from commlayer.integrations import ExpertPlacer, FoldedMapping, FoldedMesh, RouterConfig
from commlayer.profiles.counted import counted
from commlayer.statistics import SpillStats
from commlayer.units import format_bytes
from examples.block import MoETransformerLayer
from examples.language_model import ModelConfig, MoELanguageModel
from examples.text import VOCABULARY, Corpus

__all__ = ["TrainOptions", "Trained", "main", "train"]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of a training run. ``text``: a file; None: sentences of a small grammar.
    ``sequence``, ``batch``: of a whole step. ``optimizer``: ``adamw``, or ``sgd`` with momentum
    0.9, which hands rounding on more gently: AdamW divides every gradient by its size, the smallest
    ones too, which are rounding alone. ``place_experts``: steps between two decisions where experts
    lie, of a model with ``spare_slots``; None: they stay in order.
    """

    steps: int = 50
    sequence: int = 64
    batch: int = 8
    micro_batches: int = 1
    lr: float = 3e-3
    optimizer: Literal["adamw", "sgd"] = "adamw"
    seed: int = 0
    text: Path | None = None
    place_experts: int | None = None


@dataclass(frozen=True)
class Trained:
    """The record of a training run. ``losses``: of every step, before its update; the same on all
    ranks. ``dispatch``: how often tokens went which way, in how many chunks, on this rank, and why
    in the end. ``step_us``: the median step. ``migrations``: how often experts of this rank's stage
    moved. ``spills``: what of them went along with rows.
    """

    losses: list[float]
    dispatch: dict[str, int]
    reason: str
    step_us: float
    migrations: int
    spills: list[SpillStats]


def train(
    config: ModelConfig,
    options: TrainOptions,
    mesh: FoldedMesh | None,
    say: Callable[[int, float], None] = lambda step, loss: None,
) -> Trained:
    """Train from scratch. Collective over all ranks; ``mesh`` None: on this one. ``say``: told
    every step's loss.

    Raises:
        UsageError: sizes that do not go together, or with the mesh or the text; experts that shall
            be placed, and cannot.
    """
    with _said_once():
        if config.spilling is not None and (mesh is None or mesh.size("ep") == 1):
            raise UsageError(
                "all experts lie on one rank: there is nowhere to spill them; start several ranks, with --ep"
            )
        model = MoELanguageModel(config, mesh)
        corpus = Corpus.of(options.text, options.seed)
        corpus.batch(0, options.sequence, options.batch)
    optimizer: torch.optim.Optimizer
    if options.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    with _said_once():
        placer = None
        if options.place_experts is not None:
            if mesh is None:
                raise UsageError(
                    "all experts lie on one rank: there is nowhere to place them; start several ranks, with --ep"
                )
            placer = ExpertPlacer(model, optimizer, mesh, every=options.place_experts)
    losses: list[float] = []
    times: list[float] = []
    dispatch: Counter[str] = Counter()
    reason = ""
    layers = [layer for layer in model.layers.values() if isinstance(layer, MoETransformerLayer)]
    with placer or nullcontext(), progress("training", options.steps) as advance:
        for step in range(options.steps):
            started, began_ns = time.perf_counter(), time.perf_counter_ns()
            tokens, labels = corpus.batch(step, options.sequence, options.batch)
            optimizer.zero_grad()
            loss = model.train_step(tokens, labels, num_micro_batches=options.micro_batches)
            optimizer.step()
            if placer is not None:
                placer.step()
            losses.append(loss.item())
            times.append((time.perf_counter() - started) * 1e6)
            if (recording := recorder()) is not None:
                recording.mark(f"step {step}", began_ns, time.perf_counter_ns())
            for decision in (layer.moe.dispatcher.decision for layer in layers):
                if decision is not None:
                    dispatch[decision.name] += 1
                    reason = decision.reason
            say(step, losses[-1])
            advance(f"loss {losses[-1]:.4f}")
    step_us = statistics.median(times) if times else 0.0
    migrations = placer.num_migrations if placer is not None else 0
    return Trained(losses, dict(dispatch), reason, step_us, migrations, stats()["spills"])


# The program


class _Program(Command):
    """Turns errors into exit statuses, as ``commlayer`` does."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CommlayerError as error:
            if wants_traceback(ctx):
                raise
            raise failure_of(error, None) from error


@contextmanager
def _said_once() -> Iterator[None]:
    """Around what fails on all ranks alike: one of them says so."""
    try:
        yield
    except UsageError:
        if is_first():
            raise
        sys.exit(2)


_Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def _option(name: str, default: Any, kind: Any, text: str | None = None, field: str = "") -> _Decorator:
    """An option whose default its help shows; ``field``: its name in the program."""
    names = [name, field] if field else [name]
    return click.option(*names, default=default, show_default=True, type=kind, help=text)


def _whole(name: str, default: int, text: str, field: str = "") -> _Decorator:
    return _option(name, default, click.IntRange(min=1), text, field)


class _Chunks(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.2
    name = "chunks"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if str(value) not in ("auto", "1", "2", "4", "8"):
            self.fail(f"expected auto, 1, 2, 4 or 8, got {value!r}", param, ctx)
        return "auto" if value == "auto" else int(value)


_EPILOG = """\
\b
  python -m examples.train
  torchrun --nproc-per-node 8 -m examples.train --tp 2 --cp 2 --ep 4
  commlayer emulate -- python -m examples.train --pp 2 --tp 2 --ep 4

\b
Exit status: 0 done, 1 the surroundings failed, 2 wrong usage, 3 a bug of ours.
"""


_mapping_options = in_order(
    _whole("--tp", 1, "Tensor parallelism of attention; its ranks also share the sequence."),
    _whole("--cp", 1, "Context parallelism."),
    _whole("--pp", 1, "Pipeline stages."),
    _whole("--ep", 1, "Expert parallelism. It may cross tp, cp and dp."),
    _whole("--etp", 1, "Tensor parallelism of experts."),
)
"""How the ranks are divided."""

_model_options = in_order(
    _whole("--steps", 50, "Training steps."),
    _whole("--layers", 2, "Transformer layers.", "num_layers"),
    _whole("--hidden", 64, "Size of an activation."),
    _whole("--heads", 4, "Query heads.", "num_heads"),
    _whole("--kv-heads", 2, "Key-value heads.", "num_kv_heads"),
    _whole("--width", 128, "Inner width of an expert."),
    _option("--shared-width", 0, click.IntRange(min=0), "Of shared experts."),
    _whole("--experts", 8, "Experts of a layer.", "num_experts"),
    _whole("--top-k", 2, "Experts of a token."),
    _option(
        "--aux-loss",
        0.01,
        RealNumber(min=0),
        "Coefficient of the balance loss.",
        "aux_loss_coefficient",
    ),
)
"""The options that say what is trained, and for how long."""

_run_options = in_order(
    _whole("--sequence", 64, "Bytes of a sample."),
    _whole("--batch", 8, "Samples of a step, on all ranks together."),
    _whole("--micro-batches", 1, "Parts in which a rank's samples go through the pipeline."),
    _option("--schedule", "gpipe", click.Choice(["gpipe", "1f1b"]), "Of the pipeline."),
    click.option(
        "--overlap/--no-overlap",
        "overlap_gradients",
        default=True,
        show_default=True,
        help="Sum gradients beside the backward pass, or after it.",
    ),
    _option("--lr", 3e-3, RealNumber(min=0), "Learning rate."),
    _option("--optimizer", "adamw", click.Choice(["adamw", "sgd"]), "sgd: momentum 0.9."),
    _option("--seed", 0, click.IntRange(min=0), "Of weights and batches."),
    _option("--dispatch", "auto", click.Choice(["auto", "all_to_all", "all_gather", "two_level"])),
    _option("--chunks", "auto", _Chunks(), "Slices of tokens: auto, 1, 2, 4, 8."),
    click.option(
        "--place-experts",
        metavar="EVERY",
        type=click.IntRange(min=1),
        help="Decide every so many steps where experts lie, by their loads.  [they stay in order]",
    ),
    click.option(
        "--spare-slots",
        type=click.IntRange(min=0),
        help="Room on each rank for copies of experts that are placed.  [0]",
    ),
    click.option(
        "--spill",
        "spilling",
        type=click.Choice(["priced", "llep"]),
        help="Where routing is uneven, weights of busy experts go along to idle ranks: where that is predicted to pay, or by "
        "LLEP's rule.  [they stay]",
    ),
    _option("--attention", "ulysses", click.Choice(["ulysses", "tensor"]), "What tp splits."),
    _option(
        "--backend",
        "commlayer",
        click.Choice(["commlayer", "gloo"]),
        "Of the default group. The mesh's are commlayer's anyway.",
    ),
    click.option(
        "--text",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Train on this file.  [a grammar]",
    ),
)
"""On what, and how."""


@click.command(
    cls=_Program,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog=_EPILOG,
)
@_mapping_options
@_model_options
@_run_options
@click.option("--traceback", is_flag=True, help="On an error, show where in the code it arose.")
@json_option
def main(backend: str, traceback: bool, as_json: bool, **options: Any) -> None:
    """Train a small MoE language model on bytes of text, on any mapping of the ranks that torchrun
    started, or alone.

    dp and edp are what the other degrees leave of the ranks. The losses do not depend on the
    mapping.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    with _said_once():
        mapping = FoldedMapping(world_size, **{name: options.pop(name) for name in ("tp", "cp", "pp", "ep", "etp")})
        config = _config(options)
    wanted = TrainOptions(**options)
    every = max(wanted.steps // 10, 1)

    def say(step: int, loss: float) -> None:
        if is_first() and not as_json and (step % every == 0 or step == wanted.steps - 1):
            echo(f"step {step:4}  loss {loss:.5f}")

    if is_first() and not as_json:
        echo(str(mapping))
    if "RANK" not in os.environ:
        _report(mapping, train(config, wanted, None, say), as_json)
        return
    import commlayer.backend  # noqa: F401  # makes the name valid, also where no entry point was installed

    dist.init_process_group(backend)
    with FoldedMesh(mapping, backend=None if backend == "commlayer" else "commlayer") as mesh:
        trained = train(config, wanted, mesh, say)
        if is_first():
            _report(mapping, trained, as_json)
    dist.destroy_process_group()


def _config(options: dict[str, Any]) -> ModelConfig:
    """Takes what the model needs out of ``options``; the seed stays there, for the batches."""
    router = RouterConfig(**{name: options.pop(name) for name in ("num_experts", "top_k", "aux_loss_coefficient")})
    spare_slots = options.pop("spare_slots")
    if options["place_experts"] is None and spare_slots is not None:
        raise UsageError("--spare-slots are for experts that are placed: add --place-experts")
    if options["place_experts"] is not None:
        options["spare_slots"] = spare_slots or 0
    of_the_run = {field.name for field in fields(TrainOptions)}
    of_the_model: dict[str, Any] = {name: options.pop(name) for name in list(options) if name not in of_the_run}
    return ModelConfig(router=router, vocabulary=VOCABULARY, seed=options["seed"], **of_the_model)


def _report(mapping: FoldedMapping, trained: Trained, as_json: bool) -> None:
    calls: dict[tuple[str, str, str], list[float]] = {}
    for group in stats()["groups"]:
        for call in group["calls"]:
            key = group["description"].removeprefix("folded "), call["collective"], call["plan"]
            total = calls.setdefault(key, [0, 0, 0.0])
            for index, name in enumerate(("calls", "logical_bytes", "time_us")):
                total[index] += call[name]  # type: ignore[literal-required]
    if as_json:
        names = ("group", "collective", "plan", "calls", "logical_bytes", "time_us")
        moved = [dict(zip(names, (*key, *total), strict=True)) for key, total in sorted(calls.items())]
        degrees = asdict(mapping) | {"dp": mapping.dp, "edp": mapping.edp}
        print_json({"mapping": degrees, **asdict(trained), "calls": moved})
        return
    ways = "; ".join(f"{way}: {times} times" for way, times in trained.dispatch.items())
    echo(f"a step takes {rounded(trained.step_us / 1e3)} ms (median)")
    echo(f"dispatch: {ways} ({trained.reason})")
    if trained.migrations:
        echo(f"experts moved {counted(trained.migrations, 'time')}")
    for spill in trained.spills:
        echo(
            f"experts spilled in {spill['spilled']} of {counted(spill['calls'], 'uneven call')}, "
            f"{counted(spill['rows'], 'row')} ({spill['reason']})"
        )
    rows = [
        (*key, f"{number:.0f}", format_bytes(int(size)), f"{time_us / number / 1e3:.2f}")
        for key, (number, size, time_us) in sorted(calls.items())
    ]
    if rows:
        columns = ("group", "collective", "plan", ">calls", ">bytes", ">ms each")
        print_table(columns, rows, title="what rank 0 moved")


if __name__ == "__main__":
    main()
