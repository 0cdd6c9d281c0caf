"""Runs what is measured on all ranks of the world in step, checks it, and times it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore  # torch.distributed has it too, but not for type checkers

from commlayer.agree.discovery import Grid
from commlayer.agree.messages import ControlMessage
from commlayer.engine.planned import PlannedGroup
from commlayer.engine.runner import Runner
from commlayer.engine.tracing import traced
from commlayer.failures.board import FailureBoard, phase, why_left
from commlayer.failures.detector import FailureDetector, job_detector
from commlayer.measure.all_ranks import AllRanks
from commlayer.measure.calls import CodedCall, GridCall, IdleCall, MessageCall, OwnCall, StepCall, TimedCall
from commlayer.measure.group_calls import swap
from commlayer.profiles.errors import BLAMING, ClusterError
from commlayer.profiles.links import Resource
from commlayer.profiles.pairs import Pair, pair_rounds
from commlayer.profiles.topology import Topology
from commlayer.scheduler.legs import CodedLeg
from commlayer.scheduler.plan import Plan, Strategy
from commlayer.scheduler.probes import MESSAGE, Probe
from commlayer.scheduler.wire import Wire
from commlayer.settings import Settings
from commlayer.transport.connect import connect
from commlayer.transport.gloo import GlooTransport

__all__ = ["Prober"]

_ALONE_TIMES = 2
_MEASURING = "the links were being measured"


class _PairTime(ControlMessage, frozen=True):
    """Two nodes of which a rank has timed an exchange, and the time in µs."""

    pair: Pair
    time_us: float


class _PairTimes(ControlMessage, frozen=True):
    """The exchanges that a rank has timed; none for one that waited."""

    times: tuple[_PairTime, ...]


class Prober:
    """Runs plans and calls on all ranks of the world in step, and times them. Making and closing one is collective.

    Groups are made when they are first needed, by all ranks at once: the grid of replicated tokens, and those of ``groups``, by
    name this rank's group; None: the world, its node, its rail (the ranks at its place of every node), and its pair, two ranks of
    its node. Each kind runs at the same time everywhere in the cluster: a rail shares its node's wire with the other rails, as
    data-parallel groups do. A rank whose group has no other, or that is in none of that name, waits while the others are timed:
    so it is where nodes hold different numbers of ranks.

    As a context manager it is closed at the end of the block, or aborted where the block raises: closing waits for the
    other ranks, and would hide the error behind its own.
    """

    def __init__(
        self,
        topology: Topology,
        timeout_s: float,
        ranks: AllRanks | None = None,
        groups: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.ranks = ranks or AllRanks.default()
        name, everyone = self.ranks.name(), self.ranks.named
        self.rank = everyone[self.ranks.rank]
        self.device = self.ranks.device_type
        given = self.ranks.detector or job_detector(everyone)
        shared = given if given is not None and set(everyone) <= set(given.ranks) else None
        self._store = PrefixStore(f"commlayer/profiler/{name}", self.ranks.store)
        self.detector = shared or FailureDetector(self._store, self.rank, everyone, timeout_s)
        self._is_owner = shared is None
        self.board = FailureBoard(self.detector, f"profiler/{name}", self.rank, everyone)
        self._topology, self._timeout_s = topology, timeout_s
        self._members = _groups(topology, self.ranks.rank) if groups is None else groups
        self._groups: dict[str, PlannedGroup] = {}

    def __enter__(self) -> Prober:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        is_known, why = isinstance(error, ClusterError), why_left(error)
        try:
            for planned in self._groups.values():
                planned.tell(error)
            self._close_groups()
            if self._is_on_grid:
                self.grid_runner.transport.abort(None if is_known else why)  # wakes up the ranks that wait for this one
            elif not is_known:
                self.board.leave(why)
        finally:
            self._close_board(why, is_failure=True, is_consequence=isinstance(error, BLAMING))

    @cached_property
    def grid(self) -> Grid:
        """The grid of replicated tokens. Raises TopologyError for uneven nodes, which have none."""
        return _world_grid(self._topology, self.ranks.rank, self.ranks.named)

    @cached_property
    def grid_runner(self) -> Runner:
        """Runs plans on the grid. The first access is collective."""
        return Runner(connect(self.grid, self.device, self.board, self._store, self._timeout_s))

    @property
    def _is_on_grid(self) -> bool:
        return "grid_runner" in self.__dict__

    def runner(self, probe: Probe, size: int, *, check: bool = False) -> Callable[[], float]:
        """A callable that runs one size of a probe once and returns the agreed time, µs. Collective.

        ``check``: run it on known values first. Raises ClusterError where they arrive wrong.
        """
        call = self.call(probe, size)
        if check and (wrong := self.ranks.total(call.num_wrong())):
            collective, link, _ = probe.key
            values = f"on {link} delivered wrong values"
            raise ClusterError(
                f"{collective} of {size} bytes "
                f"{f'delivered {wrong} wrong bytes, all ranks together' if probe.is_on_grid else values}: do not trust this "
                "link. Look for a faulty card, cable or driver, then measure again"
            )
        return lambda: self.timed(call.run)

    def call(self, probe: Probe, size: int) -> TimedCall:
        """One size of a probe, ready to run. Collective."""
        if probe.is_on_grid:
            return self.on_grid(probe.plan(size))
        if isinstance(probe.leg, CodedLeg):
            return CodedCall(probe.leg.op, probe.unit.wire, size)
        if len(self._members.get(probe.where, ())) < 2:
            return IdleCall()
        planned = self._group(probe.where)
        probe = probe.among(len(planned.global_ranks))
        if probe.leg is MESSAGE:
            return MessageCall(planned, size)
        return OwnCall(planned, probe.plan(size)) if probe.is_own_call else StepCall(planned, probe.plan(size))

    def codes(self, wire: Wire) -> bool:
        """Whether every rank can encode in this format where its tensors are. Collective."""
        del wire
        return True

    def on_grid(self, plan: Plan) -> GridCall:
        """A plan on the grid, ready to run."""
        return GridCall(self.grid_runner, plan, self.grid, self.ranks.device, self._timeout_s)

    def _group(self, where: str) -> PlannedGroup:
        """This rank's group of that name. The first call for a name is collective."""
        if where not in self._groups:
            members = list(self._members[where])
            ranks = tuple(self.ranks.named[member] for member in members)
            planned = self._groups[where] = PlannedGroup(
                name=where,
                rank=members.index(self.ranks.rank),
                nodes=[[members.index(member) for member in part] for part in self._topology.parts_of(members)],
                global_ranks=ranks,
                store=PrefixStore(f"{where}/{ranks[0]}", self._store),
                planner=None,
                settings=Settings(plan=Strategy.DIRECT.value),
                timeout_s=self._timeout_s,
                board=FailureBoard(self.detector, f"{self.board.key}/{where}/{ranks[0]}", self.rank, ranks),
            )
            planned.connect_messages()  # now, not within the first sample
            planned.connect_own_calls()
        return self._groups[where]

    def timed(self, task: Callable[[], Any]) -> float:
        """The time of ``task`` in µs, all ranks starting together: the largest over ranks, equal on all of them."""
        self.ranks.barrier()
        return self.agree(self._time_us(task))

    def times(self, calls: Iterable[tuple[Probe, TimedCall]], is_over: Callable[[], bool]) -> list[float]:
        """The time that each call takes this rank, µs: one after the other, all ranks starting together. None begins when time
        is up: ``is_over()`` is asked before each, by all ranks, says the same to all, and so is their barrier.

        What ranks do alone takes little time, so that the faster of two counts. Collective.
        """
        found: list[float] = []
        for probe, call in calls:
            with phase(f"{_MEASURING}, {probe.key[0]} on {probe.key[1]}"):
                if is_over():
                    break
                repeats = 1 if probe.leg.is_exchange else _ALONE_TIMES
                found.append(min(self._time_us(call.run) for _ in range(repeats)))
        return found

    def _time_us(self, task: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        task()
        if self.device == "cuda":
            torch.cuda.current_stream().synchronize()
        return (time.perf_counter() - begin) * 1e6

    def agree(self, value: float) -> float:
        """The largest ``value`` over ranks."""
        return self.ranks.maximum(value)

    def ends(self, plan: Plan, rounds: int) -> dict[Resource, float]:
        """Find when the last step of each resource ended, µs from the call; the median over rounds of the largest over ranks."""
        call = self.on_grid(plan)
        seen: dict[Resource, list[float]] = {step.resource: [] for step in plan.steps}
        for _ in range(rounds + 1):
            self.ranks.barrier()
            timeline = traced(plan, call.start())
            for resource, values in seen.items():
                spans = zip(plan.steps, timeline.spans, strict=True)
                values.append(self.agree(max(end for step, (_, end) in spans if step.resource is resource)))
        return {resource: sorted(values[1:])[rounds // 2] for resource, values in seen.items()}

    def pair_times(self, num_bytes: int, repeats: int) -> dict[Pair, float]:
        """Time, for each two nodes, how long they take to send each other ``num_bytes`` at once, µs: the least of ``repeats``.

        Ranks at the same place of both nodes exchange, as many as the emptiest node has. Collective.
        """
        planned = self._group("world")
        planned.connect_own_calls()  # by all ranks, of which some wait in every round
        places = min(map(len, self._topology.nodes))
        data = torch.zeros(max(1, num_bytes // places), dtype=torch.uint8)
        node, place = self._topology.node_of(self.ranks.rank), self._topology.local_rank_of(self.ranks.rank)
        arrived = torch.empty_like(data)
        mine: list[_PairTime] = []
        for pairs in pair_rounds(self._topology.num_nodes):
            pair = next((pair for pair in pairs if node in pair), None) if place < places else None
            times = []
            for _ in range(repeats):
                with phase(f"{_MEASURING}, node {node} with others one by one"):
                    self.ranks.barrier()
                    begin = time.perf_counter()
                    if pair is not None:
                        peer = self._topology.nodes[sum(pair) - node][place]
                        swap(
                            planned, peer, data, arrived, timeout_s=self._timeout_s, what="send_recv between two nodes"
                        )
                times.append((time.perf_counter() - begin) * 1e6)
            if pair is not None:
                mine.append(_PairTime(pair, min(times)))
        found: dict[Pair, float] = {}
        for told in self.ranks.gather(_PairTimes(tuple(mine)), _PairTimes):
            for each in told.times:
                found[each.pair] = max(each.time_us, found.get(each.pair, 0.0))
        return found

    def is_one_call(self, plan: Plan) -> bool:
        """Whether the transports of all ranks run ``plan`` as one call of the backend's own."""
        transport = self.grid_runner.transport
        is_one = isinstance(transport, GlooTransport) and transport.is_one_call(plan)
        return self.agree(float(not is_one)) == 0.0

    def close(self) -> None:
        """Let go of connections. Collective."""
        try:
            self._close_groups()
            if self._is_on_grid:
                self.grid_runner.transport.close()
        finally:
            self._close_board("it has measured what it wanted")

    def _close_groups(self) -> None:
        for planned in self._groups.values():
            planned.close()
        self._groups = {}

    def _close_board(self, why: str, *, is_failure: bool = False, is_consequence: bool = False) -> None:
        self.board.close()
        if self._is_owner:
            self.detector.close(why, is_failure=is_failure, is_consequence=is_consequence)


def _groups(topology: Topology, rank: int) -> dict[str, Sequence[int]]:
    place = topology.local_rank_of(rank)
    rail = [members[place] for members in topology.nodes if place < len(members)]
    return {
        "world": range(topology.world_size),
        "node": topology.nodes[topology.node_of(rank)],
        "rail": rail if len(rail) == topology.num_nodes else (),
        "pair": topology.nodes[topology.node_of(rank)][place // 2 * 2 :][:2],
    }


def _world_grid(topology: Topology, rank: int, named: Sequence[int]) -> Grid:
    """All ranks: one row for each node, so that ep groups cross nodes and tp groups fill them. ``named``: their global ranks.

    Raises TopologyError for uneven nodes.
    """
    topology.ranks_per_node  # noqa: B018  raises for uneven nodes, naming them
    nodes = [tuple(named[member] for member in members) for members in topology.nodes]
    node, place = topology.node_of(rank), topology.local_rank_of(rank)
    if topology.num_nodes == 1:
        return Grid(tuple((member,) for member in nodes[0]), place, 0, Resource.INTRA, topology)
    return Grid(tuple(nodes), node, place, Resource.INTER, topology)
