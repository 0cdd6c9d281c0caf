"""Where calls are measured: what connects the ranks, holds the calls' tensors and times them.

The prober asks a harness for groups and times, and knows no more of where they come from:
:class:`HostHarness` goes over Gloo, or whatever the process group of the ranks is, by the host's
clock; :class:`commlayer.measure.device_harness.DeviceHarness` over a device's own backend, by its
clock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed has them too, but not for type checkers

from commlayer.agree.discovery import Grid
from commlayer.calls.movement import Movement
from commlayer.engine.planned import PlannedGroup
from commlayer.engine.runner import Runner
from commlayer.engine.tracing import traced
from commlayer.failures.board import FailureBoard, phase
from commlayer.failures.waits import bounded_reduce_scatter, wait
from commlayer.measure.all_ranks import AllRanks
from commlayer.measure.calls import CALL_OPTIONS, GridCall, TimedCall, TimedGroup, begin_own
from commlayer.profiles.errors import ClusterError, InternalError
from commlayer.profiles.links import Resource
from commlayer.profiles.topology import Topology
from commlayer.scheduler.plan import Plan, Strategy
from commlayer.scheduler.probes import Probe
from commlayer.settings import Settings
from commlayer.transport.connect import connect

__all__ = ["ALONE_TIMES", "MEASURING", "Harness", "HostGroup", "HostHarness"]

ALONE_TIMES = 2
"""How often is timed what ranks do alone: it takes little time, so that the faster of two
counts."""
MEASURING = "the links were being measured"


@dataclass(eq=False)
class Harness:
    """The ranks of a measurement, and what both kinds of harness do alike.

    ``members``: by name, the group of that name that this rank is in. ``board`` hears of failures.
    ``timeout_s`` bounds each wait. ``device``: where calls' tensors are.
    """

    topology: Topology
    ranks: AllRanks
    members: Mapping[str, Sequence[int]]
    store: Store
    board: FailureBoard
    timeout_s: float
    device: torch.device

    def _places(self, where: str) -> tuple[list[int], list[list[int]]]:
        """The members of this rank's group of that name; and of each node, as ranks of the group."""
        members = list(self.members[where])
        parts = self.topology.parts_of(members)
        return members, [[members.index(member) for member in part] for part in parts]


class HostGroup(TimedGroup):
    """The calls that measurements make in a group of CPU ranks: plans, Gloo's own calls, messages.

    ``timeout_s`` bounds each wait; None: the group's own. Making one is collective, and so is each
    call but messages, which two members exchange. All raise PeerError and CollectiveTimeoutError,
    in which a call is numbered among those of this object.
    """

    def __init__(self, planned: PlannedGroup, timeout_s: float | None = None) -> None:
        self.planned = planned
        self.timeout_s = timeout_s or planned.timeout_s
        self.rank, self.size = planned.rank, len(planned.global_ranks)
        self.device = torch.device("cpu")
        self.own: Any = planned.connections.of_own_calls()
        self._num_calls = 0

    def prepare(self, plan: Plan) -> None:
        self.planned.prepare(plan)

    def run(self, plan: Plan, source: torch.Tensor, target: torch.Tensor) -> None:
        self.planned.run(Movement(plan, source, target), timeout_s=self.timeout_s)

    def run_own(self, collective: str, source: torch.Tensor, target: torch.Tensor) -> None:
        options = CALL_OPTIONS[collective]()
        options.timeout = timedelta(seconds=self.timeout_s)

        def run() -> None:
            if collective == "reduce_scatter":
                work = bounded_reduce_scatter(self.own, target, source, options)
            else:
                work = begin_own(self.own, self.own, collective, source, target, options)
            wait(work, self.planned.board)

        self._num_calls += 1
        self._explained(run, collective, self._num_calls)

    def send(self, message: torch.Tensor) -> None:
        own, limit = self.own, timedelta(seconds=self.timeout_s)

        def send() -> None:
            work = own.send([message], 1, 0) if self.rank == 0 else own.recv([message], 0, 0)
            self.planned.connections.wait_for_message(work, limit)

        self._num_calls += 1
        self._explained(send, "send_recv", self._num_calls)

    def swap_us(self, peer: int, num_bytes: int, tag: int, what: str) -> float:
        """Send so many bytes to member ``peer`` while its own arrive, and return the time, µs.

        Errors say ``what`` it is for.
        """
        data, arrived = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
        limit = timedelta(seconds=self.timeout_s)

        def swap() -> None:
            for work in [self.own.recv([arrived], peer, tag), self.own.send([data], peer, tag)]:
                self.planned.connections.wait_for_message(work, limit)

        begin = time.perf_counter()
        self._explained(swap, what)
        return (time.perf_counter() - begin) * 1e6

    def largest(self, values: Sequence[float], what: str) -> list[float]:
        """Return each value's largest over ranks, so that all of them decide alike.

        Errors say ``what`` it is for.
        """
        result, options = torch.tensor(values, dtype=torch.float64), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        options.timeout = timedelta(seconds=self.timeout_s)
        self._explained(lambda: wait(self.own.allreduce([result], options), self.planned.board), what)
        return [float(value) for value in result]

    def _explained(self, call: Callable[[], object], what: str, number: int = 0) -> None:
        """Make a call of Gloo's own; where it fails, name the rank that failed first."""
        began = time.monotonic()
        try:
            call()
        except RuntimeError as error:
            waited_s = time.monotonic() - began
            raise self.planned.explain(error, what, number, waited_s, self.timeout_s) from error


@dataclass(eq=False)
class HostHarness(Harness):
    """Groups over the ranks' own process group, timed by the host's clock."""

    _groups: dict[str, PlannedGroup] = field(default_factory=dict, init=False)
    _grid_runner: Runner | None = field(default=None, init=False)

    def on(self) -> contextlib.AbstractContextManager[object]:
        """Return a block in which calls are made: what it launches goes where they are timed."""
        return contextlib.nullcontext()

    def group(self, where: str) -> HostGroup:
        """This rank's group of that name. The first call for a name is collective."""
        return HostGroup(self.planned(where))

    def planned(self, where: str) -> PlannedGroup:
        """The connections of :meth:`group`."""
        if where not in self._groups:
            members, nodes = self._places(where)
            ranks = tuple(self.ranks.global_ranks[member] for member in members)
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
            planned.connected()  # now, not within the first sample
            planned.connections.of_own_calls()
        return self._groups[where]

    def connect_grid(self, grid: Grid) -> Runner:
        """Connect the grid of replicated tokens, and return what runs plans on it. Collective."""
        transport = connect(grid, self.ranks.device_type, self.board, self.store, self.timeout_s)
        self._grid_runner = Runner(transport)
        return self._grid_runner

    def time_us(self, task: Callable[[], Any]) -> float:
        """The time of ``task`` on this rank, µs, all ranks starting together. Collective."""
        self.ranks.group.barrier().wait()
        return self._time_us(task)

    def times_us(self, calls: Iterable[tuple[Probe, TimedCall]], is_over: Callable[[], bool]) -> list[float]:
        """The time that each call takes this rank, µs: one after the other, all ranks starting
        together.

        None begins when time is up: ``is_over()`` is asked by all ranks, and says the same to all:
        here before each call, as a barrier. What ranks do alone takes little time, so that the
        faster of two counts. Collective.
        """
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
        """When the last step of each resource ended on this rank, µs from the common start.

        ``num_products``: of so many matrix products that run beside, the last one's end is
        COMPUTE's. Collective. Raises InternalError for products, which a host does not time.
        """
        if call is None or num_products:
            raise InternalError("matrix products are timed beside exchanges on a device, not on the host")
        self.ranks.group.barrier().wait()
        timeline = traced(call.plan, call.start())
        ends: dict[Resource, float] = {}
        for step, (_, end) in zip(call.plan.steps, timeline.spans, strict=True):
            ends[step.resource] = max(end, ends.get(step.resource, 0.0))
        return ends

    def close(self, error: BaseException | None = None, why: str = "") -> None:
        """Let go of connections: collective, or after ``error``, so that no other rank waits for
        this one, which leaves because of ``why``."""
        for planned in self._groups.values():
            if error is not None:
                planned.tell(error)
        for planned in self._groups.values():
            planned.close()
        self._groups = {}
        is_known = isinstance(error, ClusterError)
        if self._grid_runner is not None and error is None:
            self._grid_runner.transport.close()
        elif self._grid_runner is not None:
            # It wakes up the ranks that wait for this one.
            self._grid_runner.transport.abort(None if is_known else why)
        elif error is not None and not is_known:
            self.board.leave(why)
