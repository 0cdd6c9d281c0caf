"""``commlayer long-context``: expert and context parallelism from 4K to 1M tokens, three ways. Offline."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commlayer.cli.commands import Command
from commlayer.cli.mapping_options import cluster_options, model_option, read_cluster
from commlayer.cli.option_types import COUNT, PICTURE, in_order, json_option, report_option
from commlayer.cli.output_files import draw, tell
from commlayer.cli.tables import echo, print_json, print_table, rounded
from commlayer.profiles.counted import counted
from commlayer.profiles.errors import UsageError
from commlayer.readers.model_files import resolve
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.expansion import SEQUENCES, TOKENS_PER_RANK, WAYS, ContextRow, Expansion, expansion
from commlayer.scheduler.mapping.job import Job
from commlayer.scheduler.mapping.model import ModelShape
from commlayer.scheduler.mapping.recomputation import RECOMPUTE
from commlayer.scheduler.mapping.simulate import Estimator

_LENGTH = re.compile(r"(\d{1,12})([KM]?)", re.ASCII | re.IGNORECASE)
_SHIFTS = {"": 0, "K": 10, "M": 20}
_MOST_TOKENS = 1 << 30

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["long_context"]

_COLUMNS = [
    ">tokens",
    ">cp",
    ">GPUs",
    *(f">{way}: nodes" for way in WAYS),
    *(f">{way} MFU" for way in WAYS),
    "by the rule",
    "fastest",
]


_layout_options = in_order(
    click.option("--ep", type=COUNT, help="Expert parallelism.  [8, or all experts]"),
    click.option("--tp", type=COUNT, help="Tensor parallelism.  [the NVLink domain]"),
    click.option("--pp", type=COUNT, default=1, show_default=True, help="Pipeline stages."),
    click.option("--recompute", type=click.Choice(RECOMPUTE), default="full", show_default=True),
    click.option("--sequences", help="Their lengths, such as 32K,128K,1M.  [4K to 1M]"),
    click.option(
        "--tokens-per-rank",
        type=COUNT,
        help=f"Of a sequence, for each rank of cp: what makes cp grow.  [{TOKENS_PER_RANK}: MoNTA's]",
    ),
    click.option("--by-memory", is_flag=True, help="In its place the least cp with which a sequence fits."),
    click.option("--joined-nodes", type=COUNT, help="That the network joins at most.  [any number]"),
)


@click.command("long-context", cls=Command)
@model_option
@cluster_options
@_layout_options
@report_option
@click.option("--picture", type=PICTURE, help="Draw MFU over tokens (.svg, .png, .pdf).")
@json_option
def long_context(model_name: str, report: Path | None, picture: Path | None, as_json: bool, **given: Any) -> None:
    """Lay experts and context out for sequences from 4K to 1M tokens: which network it takes, and which way is fastest.

    MoNTA's horizontal expansion gives every node of a sequence experts on nodes of other sequences, its vertical one keeps
    them on the nodes that share the sequence; folded (MoE Parallel Folding) spreads them over the GPUs of each node.

    \b
      commlayer long-context -m mixtral-8x22b -c h100-eos --ep 8
      commlayer long-context -m mixtral-8x22b -c h100-eos --sequences 128K,1M --joined-nodes 16 --picture long.svg
    """
    model = resolve(model_name)
    cluster = read_cluster(given, Job(model=model, gpus=1, global_batch=1, sequence=1))
    found = _expansion(model, cluster, **given)
    is_estimated = any(layout.estimate for row in found.rows for layout in row.layouts)
    if picture is not None and is_estimated:
        draw(picture, _figure(found))
    if report is not None:
        _write_report(report, found, cluster)
    if as_json:
        print_json(_as_dict(found))
    else:
        _show(found)
    if not is_estimated:
        raise UsageError(_nothing(found))


def _nothing(found: Expansion) -> str:
    """Say why no length is estimated, and what may help."""
    notes = dict.fromkeys(f"{row.sequence}, {each.way}: {each.note}" for row in found.rows for each in row.layouts)
    first, *others = notes
    more = f" (and {counted(len(others), 'other reason')} above)" if others else ""
    return f"no length can be estimated: {first}{more}; where it does not fit, give --pp or more --ep, or another --cluster"


def _expansion(
    model: ModelShape,
    cluster: Cluster,
    *,
    ep: int | None,
    sequences: str | None,
    tokens_per_rank: int | None,
    by_memory: bool,
    **given: Any,
) -> Expansion:
    if by_memory and tokens_per_rank:
        raise UsageError("expected --by-memory or --tokens-per-rank, got both: drop one")
    estimator = Estimator(Job(model=model, gpus=1, global_batch=1, sequence=1), cluster)
    return expansion(
        model,
        cluster,
        ep=ep or min(8, model.experts),
        sequences=_lengths(sequences),
        tokens_per_rank=None if by_memory else tokens_per_rank or TOKENS_PER_RANK,
        memory_limit=estimator.memory_limit if by_memory else None,
        make=Estimator,
        **given,
    )


def _lengths(text: str | None) -> tuple[int, ...]:
    if text is None:
        return SEQUENCES
    found = [_LENGTH.fullmatch(word.strip()) for word in text.split(",")]
    lengths = [int(match[1]) << _SHIFTS[match[2].upper()] for match in found if match]
    if len(lengths) < len(found) or not all(1 <= length <= _MOST_TOKENS for length in lengths):
        raise UsageError(
            f"--sequences: expected numbers of tokens, such as 4096 or 32K,128K,1M, up to {_MOST_TOKENS >> 20}M, got {text!r}"
        )
    return tuple(lengths)


def _figure(found: Expansion) -> Figure:
    from commlayer.drawing.mapping_figures import FigureLine, curves_figure

    lines = []
    for way in WAYS:
        results = [(row.sequence, row.layout(way).estimate) for row in found.rows]
        lines.append(FigureLine(way, [(float(tokens), each.mfu if each else None) for tokens, each in results]))
    marks = [(float(found.switch_at), "vertical from here, by MoNTA's rule")] if found.switch_at else []
    title = f"{found.model.name} on {found.cluster}: tp={found.tp}, ep={found.ep}"
    return curves_figure(lines, title, "tokens of a sequence", "MFU", crossings=marks, percent=True)


def _cells(row: ContextRow) -> list[str]:
    nodes = [str(row.layout(way).network_nodes) for way in WAYS]
    shares = [f"{each.mfu:.1%}" if (each := row.layout(way).estimate) else "–" for way in WAYS]
    return [str(row.sequence), str(row.cp), str(row.job.gpus), *nodes, *shares, row.by_rule, row.fastest or "–"]


def _sentences(found: Expansion) -> list[str]:
    sentences = [
        f"Of these lengths, {found.switch_at} is the first at which cp reaches ep = {found.ep}: from there on MoNTA's rule is "
        "vertical."
        if found.switch_at
        else f"At none of these lengths cp reaches ep = {found.ep}, where MoNTA's rule becomes vertical."
    ]
    seen: set[str] = set()
    for row in found.rows:
        if row.reason not in seen:
            sentences.append(f"{row.sequence}: {row.reason}.")
            seen.add(row.reason)
        for each in row.layouts:
            if each.note and each.note not in seen:
                sentences.append(f"{row.sequence}, {each.way}: {each.note}.")
                seen.add(each.note)
    return sentences


def _show(found: Expansion) -> None:
    echo(
        f"{found.model.name} on {found.cluster}: tp {found.tp}, ep {found.ep}, pp {found.pp}; nodes: that one network must join\n"
    )
    nodes = [place for place, name in enumerate(_COLUMNS) if name.endswith(": nodes")]
    print_table(_COLUMNS, [_cells(row) for row in found.rows], spare=[2, 1, *nodes])  # GPUs and cp first
    echo()
    for sentence in _sentences(found):
        echo(sentence)


def _write_report(path: Path, found: Expansion, cluster: Cluster) -> None:
    from commlayer.drawing.mapping_report import write_what_if_report

    drawable = any(layout.estimate for row in found.rows for layout in row.layouts)
    write_what_if_report(
        path,
        f"Long context: {found.model.name}",
        [f"tp {found.tp}, ep {found.ep}, pp {found.pp}", f"{cluster.name}, {cluster.domain} GPUs on NVLink"],
        _sentences(found),
        (_COLUMNS, [_cells(row) for row in found.rows]),
        [("MFU over tokens", _figure(found))] if drawable else [],
    )
    tell("report", path)


def _as_dict(found: Expansion) -> dict[str, Any]:
    return {
        "model": found.model.name,
        "cluster": found.cluster,
        "tp": found.tp,
        "ep": found.ep,
        "pp": found.pp,
        "joined_nodes": found.joined_nodes,
        "switch_at": found.switch_at,
        "rows": [
            {
                "sequence": row.sequence,
                "cp": row.cp,
                "gpus": row.job.gpus,
                "by_rule": row.by_rule,
                "reason": row.reason,
                "fastest": row.fastest,
                "ways": {
                    layout.way: {
                        "mapping": str(layout.setup),
                        "network_nodes": layout.network_nodes,
                        "gpus": layout.gpus,
                        "step_us": rounded(layout.estimate.step_us) if layout.estimate else None,
                        "mfu": rounded(layout.estimate.mfu, 6) if layout.estimate else None,
                        "note": layout.note,
                    }
                    for layout in row.layouts
                },
            }
            for row in found.rows
        ],
    }
