"""The file of one rank's audit, ``COMMLAYER_AUDIT/audit-rank-00003.json``: its schema, written in
one step and read strictly.

Loads no torch: ``commlayer audit`` reads the files of a job that ran elsewhere. They may come from
anybody: what is read is bounded in size, is data and nothing else, and every number in it is
finite.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from commlayer.profiles.errors import ProfileError, UsageError
from commlayer.profiles.files import read_file, write_file
from commlayer.profiles.printable import shortened
from commlayer.profiles.strict_json import convert, parse_object, require_field
from commlayer.readers.job_files import JobFiles

__all__ = [
    "AUDIT_FORMAT",
    "AUDIT_VERSION",
    "AuditedCalls",
    "AuditedGroup",
    "AuditedLateness",
    "AuditedPlacement",
    "AuditedWire",
    "PlanEvent",
    "RankAudit",
    "audit_name",
    "read_audits",
    "write_audit",
]

AUDIT_FORMAT: Final = "commlayer-audit"
AUDIT_VERSION: Final = 1
_MOST_BYTES = 16 << 20
"""The largest file that is read: a thousand rows of a thousand groups have some 200 KB a group at
most."""
_MOST_RANKS = 1 << 20

_Text = Annotated[str, Meta(max_length=4096)]
_Count = Annotated[int, Meta(ge=0, le=1 << 62)]
_Rank = Annotated[int, Meta(ge=0, lt=_MOST_RANKS)]
_Us = Annotated[float, Meta(ge=0, le=1e18)]
_UnixS = Annotated[float, Meta(ge=0, le=1e11)]
_Rate = Annotated[float, Meta(gt=0, le=1e9)]


class AuditedWire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bytes that a rank sent, by link class."""

    inter: _Count
    intra: _Count


class AuditedCalls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The calls of one collective by one plan, of sizes up to ``up_to_bytes`` (a power of two, and
    more than half of that).

    ``promised_us``, ``measured_us``: sums over ``calls``, from a call's start to its end, without
    waiting in the queue. ``logical_bytes``, ``wire_bytes``: as in
    :class:`commlayer.calls.counters.CallStats`.
    """

    collective: _Text
    plan: _Text
    up_to_bytes: Annotated[int, Meta(ge=1, le=1 << 62)]
    calls: Annotated[int, Meta(ge=1, le=1 << 62)]
    promised_us: Annotated[float, Meta(gt=0, le=1e18)]
    measured_us: _Us
    logical_bytes: _Count
    wire_bytes: AuditedWire | None


class AuditedLateness(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How often a global rank came last, and how long the others waited for it in all."""

    rank: _Rank
    calls: _Count
    waited_us: _Us


class PlanEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Something that happened to a group's plans, at a Unix time, before one of its calls."""

    time_s: _UnixS
    call: _Count
    what: _Text


class AuditedGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One group as one of its ranks knows it. ``late`` and ``events`` are known on its first rank.

    ``nodes``: its global ranks, by node. ``began_s``: when it was made, Unix time. ``profile``: by
    which it plans now; ``fabric_rate``: the rate of links between nodes by which it plans, of that
    at its start; ``node_rates``: that of the card of each of ``nodes`` beside the usual one, empty
    where all are alike. ``comparable_calls``: those that ranks compare, of which ``late`` counts as
    many as were compared. ``beside_calls``: calls that ran beside one of another group of this
    rank, with what they were promised to take and took; ``held_us``: for how long chunks were held
    for lanes that go before the group's.
    """

    group: _Text
    description: _Text
    ranks: Annotated[tuple[_Rank, ...], Meta(min_length=1, max_length=_MOST_RANKS)]
    nodes: tuple[tuple[_Rank, ...], ...]
    began_s: _UnixS
    profile: _Text
    fabric_rate: _Rate
    node_rates: tuple[_Rate, ...]
    calls: tuple[AuditedCalls, ...]
    comparable_calls: _Count
    late: tuple[AuditedLateness, ...]
    events: tuple[PlanEvent, ...]
    beside_calls: _Count = 0
    beside_promised_us: _Us = 0.0
    beside_measured_us: _Us = 0.0
    held_us: _Us = 0.0

    def __post_init__(self) -> None:
        members = set(self.ranks)
        if len(members) < len(self.ranks):
            raise ValueError("ranks: expected each rank once")
        if sorted(rank for node in self.nodes for rank in node) != sorted(self.ranks):
            raise ValueError("nodes: expected each of the group's ranks on one node")
        if self.node_rates and len(self.node_rates) != len(self.nodes):
            raise ValueError(f"node_rates: expected one for each of {len(self.nodes)} nodes, or none")
        if not members.issuperset(late.rank for late in self.late):
            raise ValueError("late: expected ranks of the group")


class AuditedPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One migration of experts: see :class:`commlayer.statistics.PlacementStats`."""

    step: _Count
    layers: _Count
    copies: _Count
    copy_bytes: _Count
    reason: _Text
    promised_migration_us: _Us | None
    migration_us: _Us | None
    waited_us: _Us | None
    step_before_us: _Us | None
    promised_step_us: _Us | None
    step_us: _Us | None


class RankAudit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The audit of one rank: who it is, when it was written (Unix time), and what its groups did
    until then.

    ``job``: the same on all ranks of a job, and of no other. ``is_final``: whether it was written
    when the job had ended.
    """

    format: Literal["commlayer-audit"] = AUDIT_FORMAT
    version: Literal[1] = AUDIT_VERSION
    job: _Text
    rank: _Rank
    world_size: Annotated[int, Meta(ge=1, le=_MOST_RANKS)]
    host: _Text
    pid: _Count
    slurm_job_id: _Text = ""
    commlayer: _Text
    written_s: _UnixS
    is_final: bool
    groups: tuple[AuditedGroup, ...]
    placements: tuple[AuditedPlacement, ...] = ()

    def __post_init__(self) -> None:
        if self.rank >= self.world_size:
            raise ValueError(f"rank: expected one below {self.world_size}")
        for index, group in enumerate(self.groups):
            if self.rank not in group.ranks:
                raise ValueError(f"groups[{index}]: expected a group of rank {self.rank}")


def audit_name(rank: int | str) -> str:
    """The name of the file of a rank; of ``"*"``, the pattern of all names."""
    return f"audit-rank-{rank:0>5}.json" if isinstance(rank, int) else f"audit-rank-{rank}.json"


def write_audit(folder: Path, audit: RankAudit) -> Path:
    """Write the rank's file, whole or not at all; an earlier one of the same rank is replaced.
    Raises OSError."""
    path = folder / audit_name(audit.rank)
    write_file(path, msgspec.json.format(msgspec.json.encode(audit), indent=1) + b"\n")
    return path


def read_audits(path: Path, job: str = "", damaged: list[str] | None = None) -> list[RankAudit]:
    """Read one file, or those of a folder, by rank; arguments and errors as of
    :meth:`commlayer.readers.job_files.JobFiles.read_all`. The error of a file that is not sound names its field.
    """
    return list(_FILES.read_all(path, job, damaged)) if path.is_dir() else [_read(path)]


def _read(path: Path) -> RankAudit:
    where = shortened(str(path))
    try:
        data = read_file(path, _MOST_BYTES)
    except FileNotFoundError as error:
        raise UsageError(f"{where}: expected an audit's file, or a folder of them, got no such file") from error
    except OSError as error:
        raise UsageError(f"{where}: cannot read the audit: {error.strerror or error}") from error
    try:
        content = parse_object(data, where, "commlayer audit")
        require_field(content, "format", AUDIT_FORMAT, where, ": this is not a rank's audit")
        require_field(content, "version", AUDIT_VERSION, where, ": read it with the commlayer that wrote it")
        return convert(content, RankAudit, where, {})
    except ProfileError as error:  # of its field
        raise UsageError(str(error)) from error


_FILES = JobFiles(
    pattern=re.compile(r"audit-rank-(\d{1,7})\.json"),
    name=audit_name,
    remedy="run the job with COMMLAYER_AUDIT={folder}, and collect the files of all machines",
    read=_read,
    world_size=lambda audit: audit.world_size,
)
