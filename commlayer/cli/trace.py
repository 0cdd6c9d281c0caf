"""``commlayer trace``: the traces of a job's ranks as one, or their dumps of torch's Flight Recorder, and
what held the job up: lanes, groups, late ranks, wrong predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from commlayer.cli.commands import Command
from commlayer.cli.failure import refuse_damaged
from commlayer.cli.option_types import DURATION_US, OUTPUT_FILE, PLACE, PROFILE, json_option
from commlayer.cli.output_files import tell
from commlayer.cli.tables import echo, echo_sentence, print_json, print_table, record, rounded
from commlayer.cli.traced_jobs import TracedJob, missing_ranks, read_jobs
from commlayer.profiles import catalog
from commlayer.profiles.counted import counted, listed
from commlayer.profiles.topology import Topology
from commlayer.traces.analyse import GroupTimes, LaneTimes, Selected, Window, group_times, lane_times, lateness, plans
from commlayer.traces.chrome_of_job import rank_events
from commlayer.traces.rank_files import write_trace
from commlayer.traces.workload import GroupWork, plan_command, workload
from commlayer.units import format_bytes, format_us

__all__ = ["trace"]

_MOST_ROWS = 16
_GROUPS = {
    "~group": "group",
    ">ranks": "num_ranks",
    "collective": "collective",
    ">calls": "num_calls",
    ">bytes, median": "median_bytes",
    ">ms, median": "median_us",
    ">worst": "worst_us",
    ">bus GB/s": "busbw_gbps",
}
_WORK = {
    "~group": "group",
    "collective": "collective",
    "nodes": "shape",
    ">calls": "num_calls",
    ">bytes, median": "median_bytes",
    ">busiest / mean": "imbalance",
}
_PLANS = {
    "collective": "collective",
    "plan": "plan",
    ">calls": "num_calls",
    ">left out: held": "num_held",
    ">predicted ms": "predicted_us",
    ">measured ms": "measured_us",
    ">ratio": "ratio",
    ">without late ranks": "ratio_together",
}
"""The columns of tables: fields of :mod:`commlayer.traces.analyse` by their headers."""


@click.command(cls=Command)
@click.argument("paths", type=click.Path(path_type=Path, exists=True), metavar="PATH...", nargs=-1, required=True)
@click.option(
    "--output",
    "-o",
    type=OUTPUT_FILE,
    help="Where the merged trace goes.  [of traces PATH/merged.json, of dumps nowhere]",
)
@click.option("--job", help="Which one, where PATH holds the files of several; the beginning of its name is enough.")
@click.option("--step", type=PLACE, help="Only calls that the program issued in this training step.")
@click.option("--since", "since_us", type=DURATION_US, help="Only calls issued so long after the first one: 2s, 150ms.")
@click.option("--until", "until_us", type=DURATION_US, help="Only calls issued before.")
@click.option("--all", "show_all", is_flag=True, help=f"Show every rank and group, not {_MOST_ROWS} of each.")
@click.option(
    "--plan",
    "profile_name",
    type=PROFILE,
    help="Say also what groups called as commands of commlayer plan, on this cluster with the ranks in its order.",
)
@json_option
def trace(
    paths: tuple[Path, ...],
    output: Path | None,
    job: str | None,
    step: int | None,
    since_us: float | None,
    until_us: float | None,
    show_all: bool,
    profile_name: str | None,
    as_json: bool,
) -> None:
    """Merge the traces that a job's ranks have written, and say where its time went.

    PATH is what COMMLAYER_TRACE named when the job ran, with the files of all machines in it. Where several replicas wrote into
    it, each has a folder of its own there, and is reported by itself. Writes one trace of all ranks,
    on one clock, for ui.perfetto.dev; prints time and bytes of each lane, which ranks come late, and what was predicted.

    Or PATHs are dumps of torch's Flight Recorder, of any backend: files, archives (tar, zip, gz) or folders, as for commlayer
    diagnose. They tell what groups called, how long that took where it is recorded, and which ranks come late.

    \b
      COMMLAYER_TRACE=trace torchrun … train.py
      commlayer trace trace
      commlayer trace trace --step 3
      commlayer trace /tmp/nccl_trace_rank_* --plan cluster.json
    """
    options = {"--output": output, "--job": job}
    refused = tuple(name for name, value in options.items() if value)
    damaged: list[str] = []
    profile = catalog.load_profile(profile_name) if profile_name is not None else None
    jobs = read_jobs(paths, job, Window(step, since_us, until_us), refused, damaged)
    work = [workload(each.ranks, Topology.parse(profile.topology)) if profile is not None else [] for each in jobs]
    for each in jobs:
        if profile is not None and (missing := missing_ranks(each.ranks)):
            each.notes.append(
                f"groups of {listed('rank', missing)} alone are unknown: --plan may count too few siblings"
            )
        target = output or (each.folder / "merged.json" if each.folder is not None else None)
        if target is not None:
            first = each.ranks[0].trace
            errors = {rank.trace.rank: rank.trace.error_ns for rank in each.ranks}
            about = {
                "job": first.job,
                "world_size": first.world_size,
                "versions": first.versions,
                "clock_error_us": {str(rank): ns / 1e3 if ns >= 0 else None for rank, ns in errors.items()},
            }
            events = (event for rank in each.ranks for event in rank_events(rank.trace, rank.calls))
            write_trace(target, events, otherData=about)
            tell("trace", target)
    _print(jobs, work, profile_name, show_all=show_all, as_json=as_json)
    refuse_damaged(damaged)


def _print(
    jobs: Sequence[TracedJob],
    work: Sequence[Sequence[GroupWork]],
    profile: str | None,
    *,
    show_all: bool,
    as_json: bool,
) -> None:
    """Print the notes, and the tables or the JSON of every job with its workload."""
    for replica, note in ((job.replica, note) for job in jobs for note in job.notes):
        echo_sentence(f"note: {replica + ': ' if replica else ''}{note}", err=True)
    if as_json:
        contents = {job.replica: _as_dict(job) for job in jobs}
        if profile is not None:
            for job, each in zip(jobs, work, strict=True):
                contents[job.replica]["workload"] = [
                    record(row, *GroupWork.__slots__) | {"command": plan_command(row, profile)} for row in each
                ]
        print_json({"replicas": contents} if len(contents) > 1 else next(iter(contents.values())))
        return
    for job, each in zip(jobs, work, strict=True):
        if job.replica:
            echo_sentence(f"replica {job.replica}")
        _show(job, show_all)
        if profile is not None and not each:
            echo_sentence(f"--plan {profile}: no size is recorded of a collective that is planned")
        elif profile is not None:
            _print_rows(_WORK, each, f"Workload: what groups called, their ranks in the order of {profile}")
            for row in each:
                echo(f"  {plan_command(row, profile)}")
            echo()


def _error_us(ranks: Sequence[Selected]) -> float:
    return max(rank.trace.error_ns for rank in ranks) / 1e3


def _as_dict(job: TracedJob) -> dict[str, Any]:
    """The content of ``--json``: times in µs."""
    ranks = job.ranks
    first = ranks[0].trace
    has_lanes = not job.is_of_dumps
    return {
        "job": first.job,
        "world_size": first.world_size,
        "ranks": [rank.trace.rank for rank in ranks],
        "missing": missing_ranks(ranks),
        "hosts": sorted({rank.trace.host for rank in ranks} - {""}),
        "versions": first.versions,
        "clock_error_us": rounded(_error_us(ranks)) if _error_us(ranks) >= 0 else None,
        "span_us": rounded(max(rank.span_ns for rank in ranks) / 1e3),
        "notes": job.notes,
        "lanes": [_lane(times) for times in lane_times(ranks)] if has_lanes else [],
        "together": next((_lane(times) for times in lane_times(ranks, together=True)), None) if has_lanes else None,
        "groups": [record(each, *GroupTimes.__slots__) for each in group_times(ranks)],
        "stragglers": [
            record(each, "rank", "host", "num_calls", "median_us", "worst_us", "worst", "num_last")
            for each in lateness(ranks, job.host_errors_ns)
        ],
        "plans": [
            record(each, "collective", "plan", "num_calls")
            | {"held_calls": each.num_held}
            | record(each, "predicted_us", "measured_us", "ratio", "ratio_together")
            for each in plans(ranks)
        ],
    }


def _lane(times: LaneTimes) -> dict[str, Any]:
    return {
        **record(times, "lane", "num_calls", "num_ranks", "busy_us", "queued_us", "held_us", "exposed_us"),
        "logical_bytes": times.logical_bytes,
        "wire_bytes": {"inter": times.inter_bytes, "intra": times.intra_bytes},
        "unknown_calls": times.num_unknown,
        "unfinished_calls": times.num_unfinished,
        **record(times, "wire_ratio"),
    }


def _show(job: TracedJob, show_all: bool) -> None:
    ranks = job.ranks
    hosts = len({rank.trace.host for rank in ranks})
    calls = counted(sum(len(rank.calls) for rank in ranks), "call")
    least = "" if job.is_size_known else "at least "
    whose = f"{len(ranks)} of {least}{counted(ranks[0].trace.world_size, 'rank')}"
    span = format_us(max(rank.span_ns for rank in ranks) / 1e3)
    if job.is_of_dumps:
        echo_sentence(f"dumps of {whose}, {calls} in {span}\n")
    else:
        name, error_us = ranks[0].trace.job, _error_us(ranks)
        within = f"within {format_us(error_us)} of rank 0's" if error_us else "are one"
        clocks = "not compared" if error_us < 0 else within
        echo_sentence(f"job {name}: {whose} on {counted(hosts, 'host')}, {calls} in {span}; clocks {clocks}\n")
        _show_lanes(ranks)
    if groups := group_times(ranks):
        shown = groups if show_all else groups[:_MOST_ROWS]
        _print_rows(_GROUPS, shown, "Groups: what a call takes once its last rank has come")
        if len(shown) < len(groups):
            echo_sentence(f"{counted(len(groups) - len(shown), 'group')} of less time not shown (--all)")
        echo()
    _show_lateness(job, show_all)
    if errors := plans(ranks):
        _print_rows(_PLANS, errors, "Predicted and measured: medians of the calls that no rank held for a higher lane")


def _show_lanes(ranks: Sequence[Selected]) -> None:
    lanes = lane_times(ranks)
    if not lanes:
        return
    together = lane_times(ranks, together=True) if len(lanes) > 1 else []
    cells = []
    for times in lanes + together:
        beyond = "≥ " if times.num_unknown else ""
        sent = [beyond + format_bytes(num_bytes) for num_bytes in (times.inter_bytes, times.intra_bytes)]
        cells.append(
            [
                times.lane or "none",
                str(times.num_calls),
                *(_cell(times, field) for field in ("busy_us", "queued_us", "held_us", "exposed_us")),
                format_bytes(times.logical_bytes),
                *(["?", "?"] if times.num_unknown == times.num_calls else sent),
                _cell(times, "wire_ratio"),
            ]
        )
    columns = ["lane", ">calls", ">busy ms", ">queued ms", ">held ms", ">exposed ms"]
    columns += [">logical", ">sent inter", ">sent intra", ">sent / logical"]
    print_table(
        columns,
        cells,
        title="Lanes: time of a rank (mean), calls and bytes of all ranks",
        dim=[len(lanes)] if together else [],
    )
    unknown = sum(times.num_unknown for times in lanes)
    if unknown:
        echo_sentence(
            f"≥: without {counted(unknown, 'call')} of the inner backend's own, which does not say what it sends"
        )
    echo()


def _show_lateness(job: TracedJob, show_all: bool) -> None:
    late = lateness(job.ranks, job.host_errors_ns)
    if not any(each.num_calls for each in late):
        return
    shown = late if show_all else late[:_MOST_ROWS]
    rows = [
        [
            str(each.rank),
            each.host or "?",
            str(each.num_calls),
            *(_cell(each, field) if each.num_calls else "–" for field in ("median_us", "worst_us", "num_last")),
            each.worst,
        ]
        for each in shown
    ]
    columns = [">rank", "host", ">calls", ">late ms, median", ">worst", ">last in", "~worst call"]
    print_table(columns, rows, title="Stragglers: how long after the first rank each one came to their calls")
    if len(shown) < len(late):
        echo_sentence(f"{counted(len(late) - len(shown), 'rank')} less often last not shown (--all)")
    worst = late[0]
    if worst.num_last:
        echo_sentence(
            f"rank {worst.rank} is last most often: in {worst.num_last} of {counted(worst.num_calls, 'call')}"
        )
    echo()


def _print_rows(columns: Mapping[str, str], rows: Sequence[Any], title: str) -> None:
    """Print fields of ``rows`` by the headers of their columns."""
    print_table(list(columns), [[_cell(each, field) for field in columns.values()] for each in rows], title=title)


def _cell(row: Any, field: str) -> str:
    """A field in the unit that its name says, times in ms; a dash where nothing is known."""
    value = getattr(row, field)
    if value is None:
        return "–"
    if field.endswith("_us"):
        return f"{value / 1e3:.3f}"
    if field.endswith("_bytes"):
        return format_bytes(value)
    digits = ".4g" if field.endswith("_gbps") else ".3f"
    return f"{value:{digits}}" if isinstance(value, float) else str(value)
