"""``commlayer routing``: record how tokens choose experts, look at it, and predict steps under
other placements."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commlayer.cli.commands import CommandGroup
from commlayer.cli.mapping_options import resolve_shape
from commlayer.cli.option_types import (
    BYTES,
    COUNT,
    OUTPUT_FILE,
    PICTURE,
    PLACE,
    POSITIVE,
    PROFILE,
    SHAPE,
    NameOr,
    in_order,
    json_option,
)
from commlayer.cli.output_files import draw
from commlayer.cli.progress_bars import progress_of
from commlayer.cli.tables import echo_sentence, print_json, print_table, rounded, said_warnings
from commlayer.profiles.counted import counted
from commlayer.profiles.errors import UsageError
from commlayer.profiles.topology import Topology
from commlayer.readers.model_files import resolve as resolve_model
from commlayer.scheduler.mapping import catalog, clusters

if TYPE_CHECKING:
    from commlayer.scheduler.placement.expert_loads import ExpertLoads
    from commlayer.scheduler.placement.load_replay import LoadReplay
    from commlayer.scheduler.placement.placement_price import PlacementPrices

__all__ = ["routing"]

_PATH = click.argument("path", type=click.Path(exists=True, path_type=Path), metavar="FILE|FOLDER")
_LAYER = click.option("--layer", type=PLACE, default=0, show_default=True, help="Of the picture, by its place.")
_SHOWN = 5


@click.group(cls=CommandGroup, no_args_is_help=True)
def routing() -> None:
    """Record how tokens choose experts, show it, and predict steps under other placements of the
    experts."""


@routing.command("record", context_settings={"allow_interspersed_args": False})
@click.option("-o", "--output", type=OUTPUT_FILE, required=True, help="The routing file to write.")
@click.option("--shape", type=SHAPE, default="2x2", show_default=True, help="Nodes x ranks on each, emulated.")
@click.option("--inter", metavar="RATE", default="400mbit", show_default=True, help="Rate of a node's interface.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
def record(output: Path, shape: str, inter: str, command: tuple[str, ...]) -> None:
    """Run a training on an emulated cluster, and keep how its tokens chose.

    Where you train on a cluster of your own, set COMMLAYER_ROUTING to a folder instead: the other
    commands take that folder, too.

    \b
      commlayer routing record -o routing.json --shape 2x4 -- python train.py
    """
    topology = Topology.parse(shape)
    from commlayer.emulation import EmulatedCluster
    from commlayer.readers.routing_files import read_routing_folder, write_routing

    with tempfile.TemporaryDirectory() as folder:
        with said_warnings("commlayer routing: "):
            cluster = EmulatedCluster(topology.num_nodes, topology.ranks_per_node, inter=inter)
        with cluster:
            cluster.command(["env", f"COMMLAYER_ROUTING={folder}", *command], check=True, prefix=True)
        if not any(Path(folder).iterdir()):
            raise UsageError(
                f"{command[0]}: expected a program whose ranks train with commlayer's MoE layer or dispatcher, and that ends; "
                "got one that ended, and recorded nothing"
            )
        loads = read_routing_folder(folder)
    write_routing(output, loads)
    echo_sentence(
        f"{output}: {counted(loads.num_steps, 'step')} of {counted(loads.num_layers, 'layer')} with {loads.num_experts} experts",
        err=True,
    )


@routing.command("show")
@_PATH
@click.option(
    "--ranks", type=COUNT, default=8, show_default=True, help="Ranks over which experts are laid out in order."
)
@_LAYER
@click.option("--picture", type=PICTURE, help="Draw a layer's load by expert and by rank over time (.svg, .png, .pdf).")
@json_option
def show(path: Path, ranks: int, layer: int, picture: Path | None, as_json: bool) -> None:
    """Show recorded routing: which experts are popular in each layer, and what that makes of ranks.

    \b
      commlayer routing show routing.json --ranks 4 --picture load.svg
    """
    loads = _read(path)
    if ranks > loads.num_experts:
        raise UsageError(f"--ranks {ranks}: expected at most the {loads.num_experts} experts")
    import numpy as np

    # Choices of each rank's experts, [steps, layers, ranks], where they lie in order.
    sizes = [len(part) for part in np.array_split(np.arange(loads.num_experts), ranks)]
    by_rank = np.add.reduceat(loads.counts, np.cumsum([0, *sizes[:-1]]), axis=2)
    if picture is not None:
        from commlayer.drawing.figures import loads_figure

        if layer >= loads.num_layers:
            raise UsageError(f"--layer {layer}: expected one of 0 to {loads.num_layers - 1}")
        draw(picture, loads_figure(loads, layer, {f"{counted(ranks, 'rank')}, experts in order": by_rank[:, layer]}))
    rows = [_layer_row(loads, by_rank, index) for index in range(loads.num_layers)]
    if as_json:
        names = ("steps", "stride", "experts", "top_k", "source")
        values = (loads.num_steps, loads.stride, loads.num_experts, loads.top_k, loads.source)
        print_json({**dict(zip(names, values, strict=True)), "ranks": ranks, "layers": rows})
        return
    echo_sentence(
        f"{counted(loads.num_steps, 'step')} of {counted(loads.stride, 'call')}, {loads.num_experts} experts, "
        f"top-{loads.top_k}: {loads.source}\n"
    )
    print_table(
        ["layer", ">choices a step", ">busiest / mean", ">its worst step", "~most popular experts"],
        [
            [
                row["name"],
                f"{row['choices']:,.0f}",
                f"{row['busiest']:.2f}",
                f"{row['worst']:.2f}",
                ", ".join(f"{expert} ({share:.1%})" for expert, share in row["popular"]),
            ]
            for row in rows
        ],
    )


_place_options = in_order(
    click.option(
        "--cluster", "-c", "cluster_name", type=NameOr("cluster", "PATH", clusters.names), help="A declared cluster."
    ),
    click.option("--shape", type=SHAPE, help="Of the expert group on it, such as 2x8."),
    click.option("--profile", type=PROFILE, help="A measured profile of the group instead."),
    click.option(
        "--model", "-m", "model_name", type=NameOr("model", "PATH", catalog.names), help="Whose experts' sizes count."
    ),
    click.option("--hidden", type=COUNT, help="Of a token, in place of --model."),
    click.option("--width", type=COUNT, help="Of an expert's inner layer, in place of --model."),
    click.option("--tflops", type=POSITIVE, help="That experts' products reach.  [the cluster's GPU's]"),
    click.option("--tokens", type=COUNT, help="Scale the loads to so many tokens a step, of all ranks."),
    click.option("--micro-batches", type=COUNT, default=1, show_default=True, help="Of a step."),
)


@routing.command("replay")
@_PATH
@_place_options
@click.option("--every", type=COUNT, default=16, show_default=True, help="Steps between two decisions.")
@click.option("--horizon", type=COUNT, help="Steps in which a migration shall pay back.  [--every]")
@click.option("--spare", type=BYTES, default=0, help="Memory of each rank for replicas, such as 2GB.  [0]")
@_LAYER
@click.option("--picture", type=PICTURE, help="Draw a layer's load by rank, before and after (.svg, .png, .pdf).")
@json_option
def replay_command(path: Path, picture: Path | None, layer: int, as_json: bool, **given: Any) -> None:
    """Predict steps of recorded routing: with experts where they are, as EPLB places them, with
    rows that spill by LLEP's rule, and as commlayer places experts.

    \b
      commlayer routing replay routing.json -c h100-eos --shape 2x8 -m deepseek-v3 --tokens 65536 --spare 4GB
      commlayer routing replay routing.json --profile mine.json --hidden 2048 --width 1408 --tflops 300
    """
    from commlayer.scheduler.placement.load_replay import replay_loads
    from commlayer.scheduler.placement.placing import PlacementRoom

    loads = _scaled(_read(path), given.pop("tokens"))
    every, horizon, room = given.pop("every"), given.pop("horizon"), PlacementRoom(given.pop("spare"))
    model_name = given["model_name"]
    prices = _prices(**given)
    if prices.times.num_ranks > loads.num_experts:
        raise UsageError(
            f"{path} has {loads.num_experts} experts for {prices.times.num_ranks} ranks: expected at least "
            "as many experts as ranks: take a smaller group (--shape), or record a model with more experts"
        )
    if model_name is not None and (experts := resolve_model(model_name).experts) != loads.num_experts:
        echo_sentence(
            f"note: {model_name} has {counted(experts, 'expert')}, and {path} {loads.num_experts}: the model says no more than "
            "how large an expert is",
            err=True,
        )
    if layer >= loads.num_layers:
        raise UsageError(f"--layer {layer}: expected one of 0 to {loads.num_layers - 1}")
    replays = []
    for way in ("static", "eplb", "llep", "place"):
        with progress_of(way) as progress:
            replays.append(replay_loads(loads, prices, way, every=every, horizon=horizon, room=room, progress=progress))
    if picture is not None:
        from commlayer.drawing.figures import loads_figure

        panels = {f"ranks, {each.way}": each.rank_rows[:, layer] for each in (replays[0], replays[-1])}
        draw(picture, loads_figure(loads, layer, panels))
    if as_json:
        print_json([_as_dict(each, replays[0]) for each in replays])
        return
    echo_sentence(
        f"{counted(loads.num_steps, 'step')} on {prices.times.profile.name}, a decision every {every} of them; "
        "predicted, nothing was run\n"
    )
    columns = ["placement", ">mean step", ">/ static", ">busiest / mean", ">migrations", ">each takes"]
    rows = []
    for each in replays:
        content = _as_dict(each, replays[0])
        took = f"{content['migration_us'] / each.num_migrations / 1e3:,.2f} ms" if each.num_migrations else "–"
        step, ratio = f"{content['step_us'] / 1e3:,.2f} ms", f"{content['of_static']:.3f}"
        rows.append([each.way, step, ratio, f"{each.busiest:.2f}", str(each.num_migrations), took])
    print_table(columns, rows)


def _as_dict(each: LoadReplay, static: LoadReplay) -> dict[str, Any]:
    return {
        "placement": each.way,
        "step_us": rounded(each.total_us / len(each.step_us)),
        "of_static": rounded(each.total_us / static.total_us, 6),
        "busiest": rounded(each.busiest),
        "migrations": each.num_migrations,
        "migration_us": rounded(each.migration_us),
    }


def _read(path: Path) -> ExpertLoads:
    from commlayer.readers.routing_files import read_routing

    return read_routing(path)


def _layer_row(loads: ExpertLoads, by_rank: Any, place: int) -> dict[str, Any]:
    counts, rows = loads.counts[:, place], by_rank[:, place]
    total = counts.sum()
    if not total:
        return {"name": loads.layers[place], "choices": 0, "busiest": 1.0, "worst": 1.0, "popular": []}
    each = rows[rows.sum(1) > 0]
    ratios = each.max(1) / each.mean(1)
    shares = counts.sum(0) / total
    popular = [(int(expert), rounded(float(shares[expert]), 4)) for expert in (-shares).argsort(kind="stable")[:_SHOWN]]
    return {
        "name": loads.layers[place],
        "choices": float(total) / loads.num_steps,
        "busiest": rounded(float(ratios.mean())),
        "worst": rounded(float(ratios.max())),
        "popular": popular,
    }


def _scaled(loads: ExpertLoads, tokens: int | None) -> ExpertLoads:
    """The loads with so many tokens a step, in whole choices of which none are lost.

    Each load is rounded down, and what is missing goes to those that lost most. Raises UsageError
    for loads of no choices.
    """
    from dataclasses import replace

    if not loads.counts.any():
        raise UsageError("expected recorded choices, got none in any step: record a training that routes tokens")
    if tokens is None:
        return loads
    mean = float(loads.counts.sum()) / loads.num_steps / loads.num_layers / loads.top_k
    exact = loads.counts * (tokens / mean)
    counts = exact.astype("int64")  # rounds down
    missing = exact.sum(-1, keepdims=True).round().astype("int64") - counts.sum(-1, keepdims=True)
    loss_rank = (exact - counts).argsort(-1, kind="stable")[..., ::-1].argsort(-1)  # 0: lost most
    return replace(loads, counts=counts + (loss_rank < missing))


def _prices(
    cluster_name: str | None,
    shape: str | None,
    profile: str | None,
    model_name: str | None,
    hidden: int | None,
    width: int | None,
    tflops: float | None,
    micro_batches: int,
) -> PlacementPrices:
    from commlayer.scheduler.placement.placement_price import ExpertWork, PlacementPrices

    group, rate = resolve_shape(cluster_name, shape, profile)
    tflops = tflops or rate
    if model_name is not None:
        model = resolve_model(model_name)
        hidden, width = hidden or model.hidden, width or model.width
    if hidden is None or width is None or tflops is None:
        raise UsageError(
            "expected --model, or --hidden and --width; and --tflops where --profile says nothing of a GPU"
        )
    return PlacementPrices(group, ExpertWork.of_shape(hidden, width, tflops=tflops, micro_batches=micro_batches))
