"""The audit of a job as Prometheus reads it from a file: the text exposition format, version 0.0.4.

Where one fits, a metric and its labels have the names that NVIDIA's NCCL Inspector writes with
``NCCL_INSPECTOR_PROM_DUMP=1`` (plugins/profiler/inspector in NCCL's source, its format v5.1), so
that one dashboard shows both; the rest begin with ``commlayer_``, and count in seconds and bytes
since the job's start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from commlayer.auditing.audit_files import AuditedGroup, RankAudit
from commlayer.profiles.errors import UsageError
from commlayer.profiles.links import bus_factor
from commlayer.profiles.printable import printable

__all__ = ["prometheus_text"]

_COLLECTIVES = {
    "all_gather": "AllGather",
    "all_reduce": "AllReduce",
    "all_to_all": "All2All",
    "all_to_all_v": "All2All",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "reduce_scatter": "ReduceScatter",
}
"""NCCL Inspector's names of collectives, where it has one."""
_BUS_BANDWIDTH, _EXEC_TIME = "nccl_bus_bandwidth_gbs", "nccl_collective_exec_time_microseconds"
_ABOUT = {
    _BUS_BANDWIDTH: ("gauge", "Bus bandwidth of the calls since the start, GB/s; as NCCL Inspector names it."),
    _EXEC_TIME: ("gauge", "Mean time of a call since the start, microseconds; as NCCL Inspector names it."),
    "commlayer_calls_total": ("counter", "Calls whose plan was chosen by a price."),
    "commlayer_promised_seconds_total": ("counter", "Time that the profile promised for these calls."),
    "commlayer_measured_seconds_total": ("counter", "Time that these calls took, waiting for late ranks included."),
    "commlayer_logical_bytes_total": ("counter", "Bytes that callers moved, by nccl-tests' sizes."),
    "commlayer_wire_bytes_total": ("counter", "Bytes that this rank sent, by link class."),
    "commlayer_compared_calls_total": ("counter", "Calls whose times were compared over ranks."),
    "commlayer_late_calls_total": ("counter", "Calls to which late_rank came last, of those that were compared."),
    "commlayer_late_wait_seconds_total": ("counter", "Time that the others waited for late_rank in these calls."),
    "commlayer_plan_events_total": ("counter", "Changes of the group's plans, and reasons found against them."),
    "commlayer_fabric_rate_ratio": ("gauge", "Rate of links between nodes planned with, of that at the job's start."),
    "commlayer_node_rate_ratio": ("gauge", "Rate of a node's card planned with, of the usual one."),
    "commlayer_audit_written_timestamp_seconds": ("gauge", "When the rank wrote its audit, Unix time."),
}

_UNITS = ("B", "KB", "MB", "GB", "TB")

_Labels = tuple[tuple[str, str], ...]


class _Samples:
    """Samples by metric and labels. Of several with the same ones the sum counts: a group that was
    made twice is one."""

    def __init__(self) -> None:
        self._found: dict[str, dict[_Labels, float]] = {name: {} for name in _ABOUT}

    def add(self, name: str, labels: _Labels, value: float) -> None:
        row = self._found[name]
        row[labels] = row.get(labels, 0.0) + value

    def put(self, name: str, labels: _Labels, value: float) -> None:
        self._found[name][labels] = value

    def lines(self) -> Iterator[str]:
        for name, (kind, about) in _ABOUT.items():
            samples = self._found[name]
            if samples:
                yield f"# HELP {name} {about}"
                yield f"# TYPE {name} {kind}"
                for labels, value in samples.items():
                    text = ",".join(f'{label}="{_escaped(of)}"' for label, of in labels)
                    yield f"{name}{{{text}}} {value!r}" if isinstance(value, int) else f"{name}{{{text}}} {value:.12g}"


def prometheus_text(audits: Sequence[RankAudit]) -> str:
    """Return the audits of a job's ranks as one text."""
    samples = _Samples()
    totals: dict[_Labels, list[float]] = {}  # calls, time, bytes times the bus factor; below 0: there is none
    for audit in audits:
        rank = (("rank", str(audit.rank)), ("node", audit.host))
        samples.put("commlayer_audit_written_timestamp_seconds", rank, audit.written_s)
        for group in audit.groups:
            is_said = group.description not in ("", "undefined")
            of_group: _Labels = (  # NCCL Inspector's labels of a communicator; ``rank`` and ``group`` are ours
                ("version", f"commlayer {audit.commlayer}"),
                ("slurm_job_id", audit.slurm_job_id or "unknown"),
                ("node", audit.host),
                ("gpu", "unknown"),
                ("comm_name", group.description if is_said else group.group),
                ("n_nodes", str(len(group.nodes))),
                ("nranks", str(len(group.ranks))),
                ("rank", str(audit.rank)),
                ("group", group.group),
            )
            for calls in group.calls:
                labels = (
                    *of_group,
                    ("collective", _COLLECTIVES.get(calls.collective, calls.collective)),
                    ("message_size", _size_range(calls.up_to_bytes)),
                    ("algo_proto", calls.plan),
                )
                samples.add("commlayer_calls_total", labels, calls.calls)
                samples.add("commlayer_promised_seconds_total", labels, calls.promised_us / 1e6)
                samples.add("commlayer_measured_seconds_total", labels, calls.measured_us / 1e6)
                samples.add("commlayer_logical_bytes_total", labels, calls.logical_bytes)
                if calls.wire_bytes is not None:
                    samples.add("commlayer_wire_bytes_total", (*labels, ("link", "inter")), calls.wire_bytes.inter)
                    samples.add("commlayer_wire_bytes_total", (*labels, ("link", "intra")), calls.wire_bytes.intra)
                row = totals.setdefault(labels, [0.0, 0.0, 0.0])
                row[0] += calls.calls
                row[1] += calls.measured_us
                try:
                    row[2] += calls.logical_bytes * bus_factor(calls.collective, len(group.ranks))
                except UsageError:
                    row[2] = -1.0
            if audit.rank == group.ranks[0]:
                _add_first(samples, of_group, group)
    for labels, (count, time_us, moved_bytes) in totals.items():
        samples.put(_EXEC_TIME, labels, time_us / count)
        if time_us and moved_bytes >= 0:
            samples.put(_BUS_BANDWIDTH, labels, moved_bytes / time_us / 1e3)
    return "\n".join(samples.lines()) + "\n"


def _size_range(up_to_bytes: int) -> str:
    """The size class as a range in NCCL Inspector's spelling, where KB is 1024 bytes: of one unit,
    "2-4MB"."""
    lower = up_to_bytes // 2
    power = min((max(1, lower).bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{lower // 1024**power}-{-(-up_to_bytes // 1024**power)}{_UNITS[power]}"


def _add_first(samples: _Samples, labels: _Labels, group: AuditedGroup) -> None:
    """The part that the group's first rank alone knows."""
    samples.add("commlayer_compared_calls_total", labels, sum(late.calls for late in group.late))
    samples.add("commlayer_plan_events_total", labels, len(group.events))
    samples.put("commlayer_fabric_rate_ratio", labels, group.fabric_rate)
    for late in group.late:
        of_rank = (*labels, ("late_rank", str(late.rank)))
        samples.add("commlayer_late_calls_total", of_rank, late.calls)
        samples.add("commlayer_late_wait_seconds_total", of_rank, late.waited_us / 1e6)
    for node, rate in enumerate(group.node_rates):
        samples.put("commlayer_node_rate_ratio", (*labels, ("group_node", str(node))), rate)


def _escaped(text: str) -> str:
    return printable(text, keep="").replace("\\", r"\\").replace('"', r"\"")
