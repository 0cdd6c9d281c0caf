"""The audit of a job, merged from those of its ranks: what the plans are to blame for, and what
late ranks are.

A call's time on one rank holds the wait for the rank that came last. Of the calls that ranks
compare (those that end on none before all have come) the group's first rank knows by how much the
last rank's time was shorter than the others': that was waiting. It compares as many of them as it
comes to; what was lost to late ranks in all follows from their share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from commlayer.auditing.audit_files import (
    AuditedCalls,
    AuditedGroup,
    AuditedLateness,
    AuditedPlacement,
    PlanEvent,
    RankAudit,
)
from commlayer.profiles.counted import listed

__all__ = ["CallTotals", "GroupTotals", "JobAudit", "SlowNode", "merge_audits", "summed_lateness"]


@dataclass
class CallTotals:
    """Calls of one collective by one plan and size class, of all ranks that told.

    ``promised_us``, ``measured_us``, the bytes: sums over ranks and calls; ``num_calls``: of the
    rank that made the most; ``rank_calls``: of all ranks together. ``worst_rank``: whose calls took
    the most of what was promised, ``worst_ratio``. ``inter_bytes`` and ``intra_bytes`` are None
    where a rank does not know them.
    """

    collective: str
    plan: str
    up_to_bytes: int
    num_calls: int = 0
    rank_calls: int = 0
    promised_us: float = 0.0
    measured_us: float = 0.0
    logical_bytes: int = 0
    inter_bytes: int | None = 0
    intra_bytes: int | None = 0
    worst_rank: int = -1
    worst_ratio: float = 0.0

    @property
    def ratio(self) -> float:
        """Measured over promised time."""
        return self.measured_us / self.promised_us

    @property
    def promised_each_us(self) -> float:
        """The time that was promised for a call, µs."""
        return self.promised_us / self.rank_calls

    @property
    def measured_each_us(self) -> float:
        """The time that a call took, µs."""
        return self.measured_us / self.rank_calls

    def add(self, rank: int, calls: AuditedCalls) -> None:
        """Add the calls of one rank."""
        self.num_calls = max(self.num_calls, calls.calls)
        self.rank_calls += calls.calls
        self.promised_us += calls.promised_us
        self.measured_us += calls.measured_us
        self.logical_bytes += calls.logical_bytes
        wire = calls.wire_bytes
        if wire is None or self.inter_bytes is None or self.intra_bytes is None:
            self.inter_bytes = self.intra_bytes = None
        else:
            self.inter_bytes += wire.inter
            self.intra_bytes += wire.intra
        ratio = calls.measured_us / calls.promised_us
        if ratio > self.worst_ratio:
            self.worst_rank, self.worst_ratio = rank, ratio


@dataclass
class SlowNode:
    """A node by whose slower card a group plans: its place in the group, its host, its ranks, its
    rate of the usual one."""

    node: int
    host: str
    ranks: tuple[int, ...]
    rate: float

    def __str__(self) -> str:
        on = f" ({self.host})" if self.host else ""
        return f"node {self.node} of the group{on}, {listed('rank', self.ranks)}: {self.rate:.0%} of the usual rate"


@dataclass
class GroupTotals:
    """One group of a job. ``told``: the ranks whose files are there. ``has_first``: also that of
    its first rank, which alone knows ``late``, ``events`` and rates."""

    group: str
    description: str
    ranks: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...]
    profile: str = ""
    began_s: float = 0.0
    ended_s: float = 0.0
    fabric_rate: float = 1.0
    slow_nodes: list[SlowNode] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    has_first: bool = False
    calls: list[CallTotals] = field(default_factory=list)
    comparable_calls: int = 0
    beside: CallTotals = field(default_factory=lambda: CallTotals("", "", 1))
    """The calls that ran beside those of other groups of their ranks."""
    held_us: float = 0.0
    """For how long chunks were held for lanes that go before, of all ranks."""
    late: list[AuditedLateness] = field(default_factory=list)
    events: list[PlanEvent] = field(default_factory=list)

    @property
    def promised_us(self) -> float:
        """The time that was promised for a rank's calls, mean over ranks, µs."""
        return sum(calls.promised_us for calls in self.calls) / max(1, len(self.told))

    @property
    def measured_us(self) -> float:
        """The time that a rank's calls took, mean over ranks, µs."""
        return sum(calls.measured_us for calls in self.calls) / max(1, len(self.told))

    @property
    def lost_us(self) -> float:
        """The time by which a rank's calls took longer than was promised, µs; below 0: shorter."""
        return self.measured_us - self.promised_us

    @property
    def compared_calls(self) -> int:
        """How many calls the first rank has compared."""
        return sum(late.calls for late in self.late)

    @property
    def late_us(self) -> float | None:
        """How long a rank waited for ranks that came late, µs, in all comparable calls; None where
        none was compared."""
        if not self.compared_calls:
            return None
        return sum(late.waited_us for late in self.late) * max(1.0, self.comparable_calls / self.compared_calls)

    @property
    def plan_us(self) -> float | None:
        """The rest of :attr:`lost_us`, which plans, links and what shares these are to blame for,
        µs; None where nobody knows who came late."""
        return None if self.late_us is None else self.lost_us - self.late_us

    @property
    def alone_ratio(self) -> float:
        """Measured over promised of the calls that ran beside none of another group; 0: there are
        none."""
        promised_us = sum(calls.promised_us for calls in self.calls) - self.beside.promised_us
        measured_us = sum(calls.measured_us for calls in self.calls) - self.beside.measured_us
        has_some = self.beside.rank_calls < sum(calls.rank_calls for calls in self.calls)
        return max(measured_us, 0.0) / promised_us if has_some and promised_us > 0 else 0.0

    @property
    def name(self) -> str:
        """The group's name for people: with its description, where it has one."""
        return f"{self.description} ({self.group})" if self.has_description else f"group {self.group}"

    @property
    def has_description(self) -> bool:
        """Whether the program has described the group."""
        return self.description not in ("", "undefined", self.group)


@dataclass
class JobAudit:
    """The audit of a job. ``missing``: ranks without a file. ``placements``: what the first rank of
    a pipeline stage told of each migration of experts, behind its number."""

    job: str
    world_size: int
    hosts: dict[int, str]
    missing: list[int]
    written_s: float
    unfinished: list[int]
    groups: list[GroupTotals]
    placements: list[tuple[int, AuditedPlacement]] = field(default_factory=list)


def merge_audits(audits: Sequence[RankAudit]) -> JobAudit:
    """Merge the audits of the ranks of one job, at least one."""
    hosts = {audit.rank: audit.host for audit in audits}
    groups: dict[tuple[str, tuple[int, ...]], GroupTotals] = {}
    rows: dict[tuple[str, tuple[int, ...], str, str, int], CallTotals] = {}
    for audit in audits:
        for group in audit.groups:
            key = group.group, group.ranks
            totals = groups.get(key)
            if totals is None:
                totals = groups[key] = GroupTotals(group.group, group.description, group.ranks, group.nodes)
            _add(totals, audit, group)
            for calls in group.calls:
                row = rows.get((*key, calls.collective, calls.plan, calls.up_to_bytes))
                if row is None:
                    row = CallTotals(calls.collective, calls.plan, calls.up_to_bytes)
                    rows[(*key, calls.collective, calls.plan, calls.up_to_bytes)] = row
                    totals.calls.append(row)
                row.add(audit.rank, calls)
    for totals in groups.values():
        totals.calls.sort(key=lambda calls: (calls.collective, calls.up_to_bytes, calls.plan))
        totals.events.sort(key=lambda event: (event.time_s, event.call))
        for node in totals.slow_nodes:
            node.host = next((hosts[rank] for rank in node.ranks if rank in hosts), "")
    first = audits[0]
    return JobAudit(
        job=first.job,
        world_size=first.world_size,
        hosts=hosts,
        missing=[rank for rank in range(first.world_size) if rank not in hosts],
        written_s=max(audit.written_s for audit in audits),
        unfinished=[audit.rank for audit in audits if not audit.is_final],
        groups=list(groups.values()),
        placements=[(audit.rank, each) for audit in audits for each in audit.placements],
    )


def _add(totals: GroupTotals, audit: RankAudit, group: AuditedGroup) -> None:
    """Add what one rank knows of the group beside its calls. A group may be there twice: destroyed,
    and made again."""
    if audit.rank not in totals.told:
        totals.told.append(audit.rank)
    totals.began_s = min(totals.began_s or group.began_s, group.began_s)
    totals.ended_s = max(totals.ended_s, audit.written_s)
    totals.profile = group.profile
    totals.held_us += group.held_us
    totals.beside.rank_calls += group.beside_calls
    totals.beside.promised_us += group.beside_promised_us
    totals.beside.measured_us += group.beside_measured_us
    if audit.rank != group.ranks[0]:
        return
    totals.has_first = True
    totals.fabric_rate = group.fabric_rate
    totals.slow_nodes = [
        SlowNode(node, "", group.nodes[node], rate) for node, rate in enumerate(group.node_rates) if rate < 1.0
    ]
    totals.comparable_calls += group.comparable_calls
    totals.late = summed_lateness([*totals.late, *group.late])
    totals.events += group.events


def summed_lateness(lateness: Iterable[AuditedLateness]) -> list[AuditedLateness]:
    """Add up what is known of each rank; those for which most was waited first."""
    by_rank: dict[int, AuditedLateness] = {}
    for late in lateness:
        before = by_rank.get(late.rank)
        if before is not None:
            late = AuditedLateness(
                rank=late.rank, calls=before.calls + late.calls, waited_us=before.waited_us + late.waited_us
            )
        by_rank[late.rank] = late
    return sorted(by_rank.values(), key=lambda late: (-late.waited_us, late.rank))
