"""``commlayer audit``: what a job's calls were promised to take and took, who came late, and how
its plans changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from commlayer.auditing.audit_files import audit_name, read_audits
from commlayer.auditing.audit_words import (
    AUDIT_COLUMNS,
    PLACEMENT_COLUMNS,
    call_cells,
    event_lines,
    group_lines,
    placement_cells,
    signed_us,
)
from commlayer.auditing.job_audit import CallTotals, GroupTotals, JobAudit, merge_audits
from commlayer.cli.commands import Command
from commlayer.cli.failure import refuse_damaged
from commlayer.cli.option_types import REPORT, json_option
from commlayer.cli.output_files import tell
from commlayer.cli.replicas import of_replicas
from commlayer.cli.tables import echo, echo_sentence, print_json, print_table, record, rounded
from commlayer.profiles.counted import counted, listed

__all__ = ["audit_command"]

_MOST_ROWS, _MOST_GROUPS = 40, 16


@click.command("audit", cls=Command)
@click.argument("path", type=click.Path(path_type=Path, exists=True), metavar="PATH")
@click.option("--output", "-o", type=REPORT, help="Write a page with pictures, in HTML.")
@click.option(
    "--job", default="", help="Which one, where PATH holds the files of several; the beginning of its name is enough."
)
@click.option(
    "--all", "show_all", is_flag=True, help=f"Show every row, not the {_MOST_ROWS} in which most time was lost or won."
)
@click.option("--prometheus", "as_prometheus", is_flag=True, help="Print Prometheus text instead of tables.")
@json_option
def audit_command(
    path: Path, output: Path | None, job: str, show_all: bool, as_prometheus: bool, as_json: bool
) -> None:
    """Hold what a job's calls were promised to take against what they took.

    PATH is a rank's file, or the folder that COMMLAYER_AUDIT named when the job ran, with the files of all machines in it; the
    job may still run. Where several replicas wrote into it, each has a folder of its own there, and is reported by itself.
    Prints, for each group, collective, plan and size, the promised and the measured time; how much of the
    difference was waiting for ranks that came late; which links are slow; when plans changed; and what migrations of
    experts, and steps behind them, were promised to take and took.

    \b
      COMMLAYER_AUDIT=audit torchrun … train.py
      commlayer audit audit -o audit.html
      commlayer audit audit --prometheus > /var/lib/node_exporter/commlayer.prom
    """
    if as_prometheus and as_json:
        raise click.UsageError("--prometheus and --json are two ways to print the same: choose one")
    refused = tuple(name for name, value in (("--output", output), ("--job", job)) if value)
    sources = of_replicas(path, audit_name("*"), refused) if path.is_dir() else [("", path)]
    damaged: list[str] = []
    audits = {name: read_audits(where, job, damaged) for name, where in sources}
    merged = {name: merge_audits(each) for name, each in audits.items()}
    notes = {name: _notes(each, is_folder=path.is_dir()) for name, each in merged.items()}
    if output is not None:
        from commlayer.drawing.audit_report import write_audit_report

        ((name, one),) = merged.items()
        write_audit_report(output, one, notes[name])
        tell("report", output)
    for name, lines in notes.items():
        for line in lines:
            echo_sentence(f"note: {name + ': ' if name else ''}{line}", err=True)
    if as_prometheus:
        from commlayer.auditing.prometheus import prometheus_text

        echo(prometheus_text([audit for each in audits.values() for audit in each]).removesuffix("\n"))
    elif as_json:
        content = {name: _as_dict(each, notes[name]) for name, each in merged.items()}
        print_json({"replicas": content} if len(content) > 1 else next(iter(content.values())))
    else:
        for name, each in merged.items():
            if name:
                echo_sentence(f"replica {name}")
            _show(each, show_all)
    refuse_damaged(damaged)


def _notes(audit: JobAudit, *, is_folder: bool) -> list[str]:
    """The cautions that a reader of these files must know before believing them."""
    notes = []
    if audit.missing and is_folder:
        notes.append(
            f"no file of {listed('rank', audit.missing, most=8)} of {audit.world_size}: killed before it wrote one, or not "
            "copied from another machine"
        )
    if audit.unfinished:
        notes.append(
            f"{listed('rank', audit.unfinished, most=8)} did not write at the end: still running, or killed; what came in the "
            "last half minute is not here"
        )
    if not audit.groups and not audit.placements:
        notes.append("no call was audited here: calls are whose plan was chosen by a price, flat ones included")
    return notes


def _show(audit: JobAudit, show_all: bool) -> None:
    hosts = len(set(audit.hosts.values()))
    echo_sentence(
        f"job {audit.job}: {len(audit.hosts)} of {counted(audit.world_size, 'rank')} on {counted(hosts, 'host')}, "
        f"{counted(len(audit.groups), 'group')}\n"
    )
    rows = [(group, calls) for group in audit.groups for calls in group.calls]
    # The time by which a rank's calls took longer than promised, mean over ranks.
    lost_us = [(calls.measured_us - calls.promised_us) / len(group.told) for group, calls in rows]
    largest = sorted(range(len(rows)), key=lambda index: -abs(lost_us[index]))
    shown = sorted(largest[: None if show_all else _MOST_ROWS])
    if shown:
        columns = [*AUDIT_COLUMNS, ">lost a rank", ">worst rank"]
        cells = []
        for index in shown:
            calls = rows[index][1]
            worst = f"{calls.worst_rank} (×{calls.worst_ratio:.2f})" if calls.worst_rank >= 0 else "–"
            cells.append([*call_cells(*rows[index]), signed_us(lost_us[index]), worst])
        print_table(columns, cells, title="Promised and measured: mean of a call, over ranks")
        if len(shown) < len(rows):
            echo_sentence(f"{counted(len(rows) - len(shown), 'row')} with less difference not shown (--all)")
        echo()
    groups = audit.groups if show_all else sorted(audit.groups, key=lambda group: -abs(group.lost_us))[:_MOST_GROUPS]
    for group in groups:
        echo_sentence(
            f" {counted(len(group.ranks), 'rank')} on {counted(len(group.nodes), 'node')}, profile {group.profile or '(none)'}",
            lead=group.name,
        )
        for line in group_lines(group):
            echo_sentence(f"  {line}")
        for line in event_lines(group):
            echo_sentence(f"  {line}")
    if audit.placements:
        echo()
        cells = [placement_cells(rank, each) for rank, each in audit.placements]
        print_table(PLACEMENT_COLUMNS, cells, title="Migrations of experts, and steps behind them", spare=(6, 2))
    if len(groups) < len(audit.groups):
        echo_sentence(f"{counted(len(audit.groups) - len(groups), 'group')} with less difference not shown (--all)")


def _as_dict(audit: JobAudit, notes: Sequence[str]) -> dict[str, Any]:
    """For ``--json``: times in µs, of all ranks together where it says ``total``, else means over
    ranks."""
    return {
        "job": audit.job,
        "world_size": audit.world_size,
        "ranks": sorted(audit.hosts),
        "missing": audit.missing,
        "unfinished": audit.unfinished,
        "hosts": sorted(set(audit.hosts.values())),
        "written_s": rounded(audit.written_s),
        "notes": list(notes),
        "groups": [_group(group) for group in audit.groups],
        "placements": [{"rank": rank} | msgspec.structs.asdict(each) for rank, each in audit.placements],
    }


def _group(group: GroupTotals) -> dict[str, Any]:
    return {
        **record(group, "group", "description", "ranks", "nodes", "profile"),
        **record(group, "promised_us", "measured_us", "lost_us", "late_us", "plan_us"),
        "beside_calls": group.beside.rank_calls,
        "beside_promised_us": rounded(group.beside.promised_us),
        "beside_measured_us": rounded(group.beside.measured_us),
        **record(group, "alone_ratio", "held_us", "comparable_calls", "compared_calls", "fabric_rate"),
        "slow_nodes": [record(node, "node", "host", "ranks", "rate") for node in group.slow_nodes],
        "calls": [_calls(calls) for calls in group.calls],
        "late": group.late,
        "events": group.events,
    }


def _calls(calls: CallTotals) -> dict[str, Any]:
    return {
        **record(calls, "collective", "plan", "up_to_bytes", "num_calls", "promised_each_us", "measured_each_us"),
        **record(calls, "ratio", "worst_rank", "worst_ratio"),
        "total_calls": calls.rank_calls,
        "total_logical_bytes": calls.logical_bytes,
        "total_wire_bytes": None
        if calls.inter_bytes is None
        else {"inter": calls.inter_bytes, "intra": calls.intra_bytes},
    }
