"""``commlayer plan``: what would be chosen for a traffic on a cluster, against which alternatives, and why. Offline."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from commlayer.cli.commands import Command
from commlayer.cli.option_types import OUTPUT_FILE, PICTURE, given_options, json_option
from commlayer.cli.output_files import draw, write_chrome
from commlayer.cli.plan_options import (
    check_strategies,
    policy_of,
    policy_options,
    refuse_ignored,
    traffic_options,
)
from commlayer.cli.tables import echo_sentence, print_json, print_table, record, rounded
from commlayer.cli.traffic_options import check_siblings, group_traffic, size_of, traffic_for, wires_for, words
from commlayer.profiles import catalog
from commlayer.profiles.counted import counted
from commlayer.profiles.errors import UsageError
from commlayer.profiles.profile import Profile
from commlayer.scheduler.decision import Decision, choose
from commlayer.scheduler.group_profiles import group_profile
from commlayer.scheduler.plan import Strategy
from commlayer.scheduler.price import Timeline
from commlayer.scheduler.traffic import Traffic
from commlayer.scheduler.wire import Wire
from commlayer.units import format_bytes

__all__ = ["as_dict", "best_of_each", "plan"]

_BEST_COUNTS = 3
"""How many chunk counts of one strategy the table shows without --all."""


@click.command(cls=Command)
@traffic_options
@policy_options
@click.option("--all", "show_all", is_flag=True, help="Show every chunk count, not the best of each strategy.")
@click.option("--trace", type=OUTPUT_FILE, help="Write a Chrome/Perfetto trace of the best plans.")
@click.option("--picture", type=PICTURE, help="Draw the best plans (.svg, .png, .pdf).")
@json_option
@click.pass_context
def plan(ctx: click.Context, /, profile_name: str, trace: Path | None, picture: Path | None, **options: Any) -> None:
    """Choose how to move a collective on a cluster, and say why.

    Prices every candidate (strategy and number of chunks) on the profile, without running anything. An all_to_all is that
    of tokens that are replicated inside nodes (--tp, --ep); the other collectives are those of the backend, whose ranks
    all hold data of their own: of all ranks, of a node, of one rank on each node (--group world, node, rail), or of any others,
    by how many of them each node holds: --group 2x2 is two ranks on each of two nodes.

    \b
      commlayer plan --profile monta-a800-2x8 --bytes 256e6
      commlayer plan --profile h100-eos-2x8 --batch 4 --sequence 4096 --hidden 7168 --top-k 8 --json
      commlayer plan --profile cluster.json --collective all_reduce --bytes 32MiB
      commlayer plan --profile cluster.json --collective all_reduce --bytes 16MiB --group 2x2
      commlayer plan --profile cluster.json --collective reduce_scatter --bytes 32MiB --dtype fp32 --wire bf16
    """
    refuse_ignored(given_options(ctx), options)
    profile = catalog.load_profile(profile_name)
    traffic = _traffic(profile, options)
    if traffic.collective != "all_to_all":
        siblings = options["siblings"] or 0
        check_siblings(profile, traffic.nodes, siblings)
        profile = group_profile(profile, traffic.nodes, siblings)
    decision = choose(traffic, profile, policy_of(options))
    check_strategies(decision, options["strategies"])
    if trace is not None:
        from commlayer.traces.chrome_of_plan import chrome_trace

        write_chrome(trace, chrome_trace(best_of_each(decision)))
    if picture is not None:
        from commlayer.drawing.figures import plans_figure

        title = f"{traffic.collective} of {format_bytes(traffic.logical_bytes)} on {profile.name} ({profile.kind})"
        draw(picture, plans_figure(best_of_each(decision), title, chosen=decision.plan.name))
    if options["as_json"]:
        print_json(as_dict(decision, profile))
    else:
        _show(decision, profile, options["show_all"])


def _traffic(profile: Profile, options: Mapping[str, Any]) -> Traffic:
    nbytes = size_of(**{name: options[name] for name in ("nbytes", "batch", "sequence", "hidden", "dtype", "top_k")})
    collective, wire = options["collective"], options["wire"]
    groups = {name: options[name] for name in ("tp", "ep", "link")}
    if collective == "all_to_all":
        if wire is not None:
            raise UsageError(
                "--wire is for tokens that every rank has of its own, got it with --collective all_to_all, whose tokens are "
                "replicated inside nodes: use --collective all_to_all_v"
            )
        return traffic_for(profile, nbytes, **groups)
    others = {f"--{name}": value for name, value in groups.items()}
    wires = wires_for(wire, options["dtype"], options["hidden"])
    return group_traffic(profile, collective, nbytes, options["group"], others, wires)


def as_dict(decision: Decision, profile: Profile) -> dict[str, Any]:
    """Return the decision for ``--json``; times in µs, ``margin`` and ``tolerance`` as fractions."""
    traffic = decision.traffic
    return {
        "profile": record(profile, "name", "fingerprint", "kind", "topology"),
        "traffic": {
            "collective": traffic.collective,
            "bytes": traffic.logical_bytes,
            "tp": traffic.replication,
            "ep": traffic.group_size,
            "link": traffic.link.value,
            "nodes": list(traffic.nodes),
        },
        "decision": {
            **_candidate(decision.timeline),
            **record(decision, "margin", "tolerance", "basis"),
            "reason": decision.reason(),
            "unpriced": decision.unpriced,
        },
        "candidates": [{**_candidate(timeline), "stages": _stages(timeline)} for timeline in decision.candidates],
    }


def _candidate(timeline: Timeline) -> dict[str, Any]:
    plan = timeline.plan
    return {
        "strategy": plan.strategy.value,
        "chunks": plan.chunks,
        "wire": str(plan.wire),
        "gather": plan.gather.value,
        "predicted_us": rounded(timeline.total_us),
        "bottleneck": timeline.bottleneck.value,
        "is_extrapolated": timeline.is_extrapolated,
        "capture_objection": plan.capture_objection,
    }


def _stages(timeline: Timeline) -> list[dict[str, Any]]:
    """Equal steps together: how many, the bytes of each, and the mean and summed time that they occupy their resource."""
    spent: dict[tuple[str, str, float], list[float]] = {}
    for step, (start, end) in zip(timeline.plan.steps, timeline.spans, strict=True):
        spent.setdefault((step.op.value, step.resource.value, step.bytes), []).append(end - start)
    return [
        {
            "op": op,
            "resource": resource,
            "count": len(times),
            "bytes": nbytes,
            "each_us": rounded(sum(times) / len(times)),
            "busy_us": rounded(sum(times)),
        }
        for (op, resource, nbytes), times in spent.items()
    ]


def best_of_each(decision: Decision) -> dict[str, Timeline]:
    """Find the fastest plan of each strategy by its name, and the chosen one, from simple to elaborate."""
    groups = groupby(decision.candidates, key=_kind)
    best = [min(group, key=lambda timeline: timeline.total_us) for _, group in groups]
    chosen = _kind(decision.timeline)
    best = [decision.timeline if _kind(timeline) == chosen else timeline for timeline in best]
    return {timeline.plan.name: timeline for timeline in best}


def _kind(timeline: Timeline) -> tuple[Strategy, Wire]:
    return timeline.plan.strategy, timeline.plan.wire


def _show(decision: Decision, profile: Profile, show_all: bool) -> None:
    echo_sentence(f"{words(decision.traffic)}; profile {profile.name} ({profile.kind}, {profile.topology})\n")
    shown: list[Timeline] = []
    for _, group in groupby(decision.candidates, key=_kind):
        members = list(group)
        ranked = sorted(members, key=lambda timeline: timeline.total_us)[: None if show_all else _BEST_COUNTS]
        shown += [member for member in members if member in ranked or member is decision.timeline]
    flat_us = next((t.total_us for t in decision.candidates if t.plan.strategy is Strategy.FLAT), 0.0)
    rows = []
    for timeline in shown:
        marks = ["◀ chosen"] * (timeline is decision.timeline) + ["extrapolated"] * timeline.is_extrapolated
        ratio = f"{timeline.total_us / flat_us:.3f}" if flat_us else "–"
        name, chunks, wire = timeline.plan.strategy.value, str(timeline.plan.chunks), str(timeline.plan.wire)
        cells = [name, chunks, wire, f"{timeline.total_us / 1e3:.3f}", ratio, timeline.bottleneck.value]
        rows.append([*cells, ", ".join(marks)])
    is_one_wire = len({timeline.plan.wire for timeline in shown}) == 1
    print_table(
        ["strategy", ">chunks", "wire", ">predicted ms", ">/ flat", "bottleneck", ""],
        rows,
        bold=[index for index, timeline in enumerate(shown) if timeline is decision.timeline],
        spare=(2, 4, 5) if is_one_wire else (4, 5),
    )
    hidden = len(decision.candidates) - len(shown)
    if hidden:
        echo_sentence(f"{counted(hidden, 'slower chunk count')} not shown (--all)")
    if any(timeline.is_extrapolated for timeline in shown):
        echo_sentence(
            "extrapolated: a step lies outside the measured sizes of its curve, where latency + bandwidth is fitted"
        )
    if decision.unpriced:
        echo_sentence(decision.unpriced)
    objection = decision.plan.capture_objection
    echo_sentence(f"on a device, in a CUDA graph: {f'no, for {objection}' if objection else 'yes'}")
    echo_sentence(decision.reason())
