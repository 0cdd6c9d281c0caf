"""The ledger of one group: for every planned call, the time that was promised and the time it took.

Every rank keeps its own, a few additions a call; :func:`audit` reads them. A call is audited where
the plan that runs, flat ones included, was chosen by a price.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from commlayer.auditing.audit_files import (
    AuditedCalls,
    AuditedGroup,
    AuditedLateness,
    AuditedWire,
    PlanEvent,
)
from commlayer.auditing.audited_plans import AuditedChoices, AuditedPlans
from commlayer.auditing.group_audits import EVENTS_KEPT, Audit, audited_placements, ended_groups
from commlayer.calls.counters import MOST_ENDED, GroupCounters
from commlayer.calls.instruments import Instrument
from commlayer.calls.ring import Call
from commlayer.calls.under_way import settle_calls, watch_calls_under_way
from commlayer.forked_child import in_forked_child
from commlayer.profiles.counted import counted
from commlayer.scheduler.kept import Kept
from commlayer.scheduler.plan import Plan

__all__ = [
    "Ledger",
    "Sample",
    "StayedFlat",
    "audit",
    "open_ledgers",
]

_MAX_KEPT = 1024
_WINDOW = 32
_WATCHED = ("all_gather", "all_reduce", "reduce_scatter")
"""Collectives whose calls end on no rank before all have come and their bytes are through; and
whose size is the same on all."""


class StayedFlat(NamedTuple):
    """The calls of one collective that went to the backend's own: where their group lies, how many,
    of how many bytes together, and why the largest of them had no plan."""

    where: str
    collective: str
    calls: int
    logical_bytes: int
    why: str


class _Row:
    __slots__ = ("calls", "inter", "intra", "is_known", "logical_bytes", "measured_ns", "promised_us")

    def __init__(self) -> None:
        self.calls = self.logical_bytes = self.measured_ns = self.inter = self.intra = 0
        self.promised_us = 0.0
        self.is_known = True


class _Kind:
    """The calls of one collective by one plan, of one size: where they are added up, and what is
    promised for each of them.

    ``number``: of the kind, among those that ranks compare; −1: they do not. ``plan``: keeps its
    ``id`` from being another's.
    """

    __slots__ = ("number", "plan", "promised_us", "row")

    def __init__(self, row: _Row, promised_us: float, number: int, plan: Plan | None) -> None:
        self.row, self.promised_us, self.number, self.plan = row, promised_us, number, plan


class Sample(NamedTuple):
    """An audited call that ranks compare: its number among those, its kind, and its promised and
    measured time, µs."""

    number: int
    kind: int
    promised_us: float
    measured_us: float


class Ledger(Instrument):
    """The ledger of one group's calls, on the CPU or on a device. One call at a time notes itself;
    any thread reads."""

    lets_pass = True

    def __init__(self, counters: GroupCounters, planned: AuditedPlans, device: str = "") -> None:
        self._counters = counters
        self.group = f"{counters.group} on {device}" if device else counters.group
        """The group's name, or that of its calls on a device."""
        self.rank = counters.rank
        """This rank, global."""
        self._planned, self._key = weakref.ref(planned), id(planned)
        self._is_on_device = bool(device)  # of whose calls nobody on the host knows what ran beside
        self._beside, self._traffic = _Row(), watch_calls_under_way()
        self._choices: AuditedChoices | None = planned.choices  # None: the group is gone
        self._nodes = tuple(tuple(planned.global_ranks[member] for member in node) for node in planned.nodes)
        self._began_s = time.time()
        self._last: AuditedGroup | None = None  # once the group is gone
        self._rows: dict[tuple[str, str, int], _Row] = {}
        self._of_plans = Kept[tuple[int, int], _Kind](_MAX_KEPT)
        self._of_flat = Kept[tuple[str, int], _Kind](_MAX_KEPT)
        self._kinds: dict[tuple[int, str, str, int], int] = {}
        self.generation = 0
        """How often other prices came into force."""
        self.numbered = 0
        """How many calls were noted that ranks compare."""
        self._samples: deque[tuple[int, int, float, int]] = deque(maxlen=_WINDOW)
        self.late: dict[int, AuditedLateness] = {}
        self.events: deque[PlanEvent] = deque(maxlen=EVENTS_KEPT)
        self.heard: Callable[[], None] | None = None
        """Told of the calls that ranks compare, from number ``told_from`` on, when they were
        noted."""
        self.told_from = 0
        _ledgers.append(self)

    def moved(self, call: Call) -> None:
        """Note a call that has ended."""
        plan, collective, num_bytes, spent_ns = call.plan, call.collective, call.run_bytes, call.moved_ns
        kinds: Kept[Any, _Kind] = self._of_flat if plan is None else self._of_plans
        key = (collective, num_bytes) if plan is None else (id(plan), num_bytes)
        kind = kinds.get(key)
        if kind is None:
            choices = self._choices  # read once: the group may end on another thread
            if choices is None or self._last is not None:
                return
            kind = kinds.add(key, self._kind(choices, plan, collective, num_bytes))
        if not kind.promised_us:
            return
        row = kind.row
        row.calls += 1
        row.promised_us += kind.promised_us
        row.measured_ns += spent_ns
        row.logical_bytes += num_bytes
        if not self._is_on_device and self._traffic.is_beside(self._key, time.perf_counter_ns() - spent_ns):
            beside = self._beside
            beside.calls += 1
            beside.promised_us += kind.promised_us
            beside.measured_ns += spent_ns
        if call.inter_bytes >= 0:
            row.inter += call.inter_bytes
            row.intra += call.intra_bytes
        else:  # below 0: not known
            row.is_known = False
        if kind.number >= 0:
            self.numbered = number = self.numbered + 1
            self._samples.append((number, kind.number, kind.promised_us, spent_ns))
            if number >= self.told_from and self.heard is not None:
                self.heard()

    def _kind(self, choices: AuditedChoices, plan: Plan | None, collective: str, num_bytes: int) -> _Kind:
        priced = plan or choices.prices.flat_plan(collective, num_bytes)
        promised_us = None if priced is None else choices.promised_us(priced)
        if not promised_us:
            return _Kind(_Row(), 0.0, -1, plan)
        name, size_class = "flat" if plan is None else plan.name, max(0, num_bytes - 1).bit_length()
        row = self._rows.setdefault((collective, name, size_class), _Row())
        number = -1
        if collective in _WATCHED:
            number = self._kinds.setdefault((self.generation, collective, name, size_class), len(self._kinds))
        return _Kind(row, promised_us, number, plan)

    @property
    def samples(self) -> list[Sample]:
        """The latest calls that ranks compare."""
        return [
            Sample(number, kind, promised_us, spent_ns / 1000)
            for number, kind, promised_us, spent_ns in list(self._samples)
        ]

    def use_choices(self, choices: AuditedChoices) -> None:
        """Take what is promised from ``choices`` from now on."""
        self._choices = choices
        self.generation += 1
        self._of_plans.clear()
        self._of_flat.clear()

    def came_last(self, rank: int, waited_us: float) -> None:
        """Note that the others waited for global rank ``rank`` in one call, this long."""
        before = self.late.get(rank)
        calls, waited_before_us = (0, 0.0) if before is None else (before.calls, before.waited_us)
        self.late[rank] = AuditedLateness(rank=rank, calls=calls + 1, waited_us=waited_before_us + waited_us)

    def happened(self, call: int, what: str) -> None:
        """Note an event, before this call of the group."""
        self.events.append(PlanEvent(time_s=time.time(), call=call, what=what))

    def closed(self) -> None:
        """Note that the group is gone: keep what :meth:`read` says, and nothing else of it. The
        groups that have been gone for longest are added up: who did what in them is forgotten."""
        global _ended
        self._last = self.read()
        self.heard = None
        for cache in (self._of_plans, self._of_flat, self._kinds):
            cache.clear()
        self._choices = None
        with _folding:
            ended = [ledger for ledger in _ledgers if ledger._last is not None]
            for ledger in ended[:-MOST_ENDED]:
                _ended = ended_groups(_ended, ledger.read())
                _ledgers.remove(ledger)

    def read(self) -> AuditedGroup:
        """Return what is known by now."""
        choices, planned = self._choices, self._planned()
        if choices is None:
            assert self._last is not None  # which the end of the group sets first
            return self._last
        return AuditedGroup(
            group=self.group,
            description=self._counters.describe(),
            ranks=tuple(self._counters.ranks),
            nodes=self._nodes,
            began_s=self._began_s,
            profile="" if choices.prices.planner is None else choices.prices.planner.profile.name,
            fabric_rate=choices.experience.links.fabric,
            node_rates=tuple(choices.prices.rates),
            calls=tuple(
                AuditedCalls(
                    collective=collective,
                    plan=plan,
                    up_to_bytes=1 << size_class,
                    calls=row.calls,
                    promised_us=row.promised_us,
                    measured_us=row.measured_ns / 1000,
                    logical_bytes=row.logical_bytes,
                    wire_bytes=AuditedWire(inter=row.inter, intra=row.intra) if row.is_known else None,
                )
                for (collective, plan, size_class), row in sorted(self._rows.copy().items(), key=itemgetter(0))
            ),
            beside_calls=self._beside.calls,
            beside_promised_us=self._beside.promised_us,
            beside_measured_us=self._beside.measured_ns / 1000,
            held_us=0.0 if planned is None else planned.held_s * 1e6,
            comparable_calls=self.numbered,
            late=tuple(sorted(self.late.values(), key=lambda late: -late.waited_us)),
            events=tuple(self.events),
        )

    def stayed_flat(self) -> list[StayedFlat]:
        """List the collectives whose calls stayed flat by now, though the group spans nodes; empty
        where one plan was named for all calls, or the group is gone."""
        choices, stayed = self._choices, []
        if choices is None or len(self._nodes) == 1 or choices.is_forced:
            return []
        described = self._counters.describe()
        where = "" if described in ("", "undefined", "default_pg") else f"of {described} "
        where += f"over {counted(len(self._counters.ranks), 'rank')} on {counted(len(self._nodes), 'node')}"
        for collective, row in list(self._counters.flat.items()):
            sizes = [size for of, size in list(self._of_flat) if of == collective]
            why = choices.prices.why_flat(collective, max(sizes)) if sizes else ""
            if why:
                stayed.append(StayedFlat(where, collective, row.calls, row.logical_bytes, why))
        return stayed


_ledgers: list[Ledger] = []
_ended: AuditedGroup | None = None
"""The sum of the groups that are gone and have no ledger any more."""
_folding = threading.Lock()


@in_forked_child
def _in_child() -> None:
    """A forked child's calls are its own."""
    global _ended, _folding
    _folding, _ended = threading.Lock(), None  # another thread of the parent may hold it
    _ledgers.clear()


def open_ledgers() -> list[Ledger]:
    """Return the ledgers of this process, of the last groups that are gone too."""
    return list(_ledgers)


def audit() -> Audit:
    """Return promised against measured time of this rank's planned calls, by group, collective,
    plan and size, since the start, and of migrations of experts.

    Plain data (:class:`Audit`), also of groups that are destroyed: the last 64 of these each, all
    earlier ones as one group, ``ended groups``. Not collective: every rank has its own numbers.
    Which ranks came late, and when plans changed, the first rank of each group knows.
    """
    settle_calls()
    with _folding:
        ledgers, ended = list(_ledgers), _ended
    groups = [*([] if ended is None else [ended]), *(ledger.read() for ledger in ledgers)]
    return {
        "rank": ledgers[0].rank if ledgers else None,
        "groups": [_plain(msgspec.to_builtins(group)) for group in groups if group.calls or group.events],
        "placements": audited_placements(),
    }


def _plain(value: Any) -> Any:
    """Plain data with lists in place of tuples."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
