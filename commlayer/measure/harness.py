"""Where calls are measured: what connects the ranks, holds the calls' tensors and times them.

The prober asks a harness for groups and times, and knows no more of where they come from:
:class:`HostHarness` goes over Gloo, or whatever the process group of the ranks is, by the host's
clock; :class:`commlayer.measure.device_harness.DeviceHarness` over a device's own backend, by its
clock.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed has them too, but not for type checkers

from commlayer.agree.discovery import Grid
from commlayer.engine.planned import PlannedGroup
from commlayer.engine.runner import Runner
from commlayer.engine.tracing import traced
from commlayer.failures.board import FailureBoard, phase
from commlayer.measure.all_ranks import AllRanks
from commlayer.measure.calls import GridCall, TimedCall, TimedGroup
from commlayer.measure.host_group import HostGroup
from commlayer.profiles.errors import ClusterError, InternalError
from commlayer.profiles.links import Resource
from commlayer.profiles.topology import Topology
from commlayer.scheduler.plan import Strategy
from commlayer.scheduler.probes import Probe
from commlayer.scheduler.wire import Wire
from commlayer.settings import Settings
from commlayer.transport.connect import connect

__all__ = ["ALONE_TIMES", "MEASURING", "Harness", "HostHarness"]

ALONE_TIMES = 2
"""How often is timed what ranks do alone: it takes little time, so that the faster of two counts."""
MEASURING = "the links were being measured"


@dataclass(eq=False)
class Harness(ABC):
    """Connects the groups of a measurement, runs their calls and times them.

    ``members``: by name, the group of that name that this rank is in. ``board`` hears of failures.
    ``timeout_s`` bounds each wait.
    """

    topology: Topology
    ranks: AllRanks
    members: Mapping[str, Sequence[int]]
    store: Store
    board: FailureBoard
    timeout_s: float

    @property
    def device(self) -> torch.device:
        """Where calls' tensors are."""
        return self.ranks.device

    @abstractmethod
    def begin(self) -> None:
        """Make ready to measure."""

    def on(self) -> contextlib.AbstractContextManager[object]:
        """Return a block in which calls are made: what it launches goes where they are timed."""
        return contextlib.nullcontext()

    @abstractmethod
    def group(self, where: str) -> TimedGroup:
        """This rank's group of that name. The first call for a name is collective."""

    @abstractmethod
    def connect_grid(self, grid: Grid) -> Runner:
        """Connect the grid of replicated tokens, and return what runs plans on it. Collective."""

    def encodes(self, wire: Wire) -> bool:
        """Whether this rank can encode in this format where its tensors are."""
        return True

    @abstractmethod
    def time_us(self, task: Callable[[], Any]) -> float:
        """The time of ``task`` on this rank, µs, all ranks starting together. Collective."""

    @abstractmethod
    def times_us(self, calls: Iterable[tuple[Probe, TimedCall]], is_over: Callable[[], bool]) -> list[float]:
        """See :meth:`commlayer.measure.prober.Prober.times`. Collective."""

    @abstractmethod
    def ends_us(self, call: GridCall | None, num_products: int) -> dict[Resource, float]:
        """When the last step of each resource ended on this rank, µs from the common start.

        ``num_products``: of so many matrix products that run beside, the last one's end is
        COMPUTE's. Collective.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of connections. Collective."""

    @abstractmethod
    def leave(self, error: BaseException, why: str) -> None:
        """Let go of connections after ``error``, so that no other rank waits for this one."""

    def _places(self, where: str) -> tuple[list[int], list[list[int]]]:
        """The members of this rank's group of that name, and where on its nodes they are, as ranks of the group."""
        members = list(self.members[where])
        return members, [[members.index(member) for member in part] for part in self.topology.parts_of(members)]


@dataclass(eq=False)
class HostHarness(Harness):
    """Groups over the ranks' own process group, timed by the host's clock."""

    _groups: dict[str, PlannedGroup] = field(default_factory=dict, init=False)
    _grid_runner: Runner | None = field(default=None, init=False)

    def begin(self) -> None:
        """Nothing is to be made ready."""

    def group(self, where: str) -> HostGroup:
        return HostGroup(self.planned(where))

    def planned(self, where: str) -> PlannedGroup:
        """The connections of :meth:`group`."""
        if where not in self._groups:
            members, nodes = self._places(where)
            ranks = tuple(self.ranks.named[member] for member in members)
            board, key = self.board, f"{where}/{ranks[0]}"
            planned = self._groups[where] = PlannedGroup(
                name=where,
                rank=members.index(self.ranks.rank),
                nodes=nodes,
                global_ranks=ranks,
                store=PrefixStore(key, self.store),
                planner=None,
                settings=Settings(plan=Strategy.DIRECT.value),
                timeout_s=self.timeout_s,
                board=FailureBoard(board.detector, f"{board.key}/{key}", board.rank, ranks),
            )
            planned.connect_messages()  # now, not within the first sample
            planned.connect_own_calls()
        return self._groups[where]

    def connect_grid(self, grid: Grid) -> Runner:
        transport = connect(grid, self.ranks.device_type, self.board, self.store, self.timeout_s)
        self._grid_runner = Runner(transport)
        return self._grid_runner

    def time_us(self, task: Callable[[], Any]) -> float:
        self.ranks.barrier()
        return self._time_us(task)

    def times_us(self, calls: Iterable[tuple[Probe, TimedCall]], is_over: Callable[[], bool]) -> list[float]:
        """``is_over()`` is asked before each call, and is a barrier."""
        times: list[float] = []
        for probe, call in calls:
            with phase(f"{MEASURING}, {probe.key[0]} on {probe.key[1]}"):
                if is_over():
                    break
                repeats = 1 if probe.leg.is_exchange else ALONE_TIMES
                times.append(min(self._time_us(call.run) for _ in range(repeats)))
        return times

    def _time_us(self, task: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        task()
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return (time.perf_counter() - begin) * 1e6

    def ends_us(self, call: GridCall | None, num_products: int) -> dict[Resource, float]:
        if call is None or num_products:
            raise InternalError("matrix products are timed beside exchanges on a device, not on the host")
        self.ranks.barrier()
        timeline = traced(call.plan, call.start())
        ends: dict[Resource, float] = {}
        for step, (_, end) in zip(call.plan.steps, timeline.spans, strict=True):
            ends[step.resource] = max(end, ends.get(step.resource, 0.0))
        return ends

    def close(self) -> None:
        self._close_groups()
        if self._grid_runner is not None:
            self._grid_runner.transport.close()

    def leave(self, error: BaseException, why: str) -> None:
        is_known = isinstance(error, ClusterError)
        for planned in self._groups.values():
            planned.tell(error)
        self._close_groups()
        if self._grid_runner is not None:
            self._grid_runner.transport.abort(None if is_known else why)  # wakes up the ranks that wait for this one
        elif not is_known:
            self.board.leave(why)

    def _close_groups(self) -> None:
        for planned in self._groups.values():
            planned.close()
        self._groups = {}
