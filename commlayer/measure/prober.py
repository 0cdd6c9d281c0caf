"""Runs what is measured on all ranks of the world in step, checks it, and times it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any

from torch._C._distributed_c10d import PrefixStore  # torch.distributed has it too, but not for type checkers

from commlayer.agree.discovery import Grid
from commlayer.engine.runner import Runner
from commlayer.failures.board import FailureBoard, phase, why_left
from commlayer.failures.detector import FailureDetector, job_detector
from commlayer.measure.all_ranks import AllRanks
from commlayer.measure.calls import CodedCall, GridCall, GroupCall, IdleCall, MessageCall, TimedCall
from commlayer.measure.device_harness import DeviceHarness, DeviceLinks
from commlayer.measure.harness import MEASURING, HostHarness
from commlayer.measure.link_times import time_links
from commlayer.profiles.errors import BLAMING, ClusterError, InternalError
from commlayer.profiles.links import Resource
from commlayer.profiles.pairs import MOST_PAIR_ROUNDS, Pair
from commlayer.profiles.topology import Topology
from commlayer.scheduler.legs import CodedLeg
from commlayer.scheduler.plan import Plan
from commlayer.scheduler.probes import MESSAGE, Probe, probes_of_calls
from commlayer.scheduler.wire import Wire
from commlayer.transport.gloo import GlooTransport

__all__ = ["Prober"]


class Prober:
    """Runs plans and calls on all ranks of the world in step, and times them. Making and closing
    one is collective.

    ``links``: those of a device, timed by its clock, for which ``ranks`` agree over Gloo; None:
    those of the ranks' own process group, timed by the host's.

    Groups are made when they are first needed, by all ranks at once: the grid of replicated tokens,
    and those of ``groups``, by name this rank's group; None: the world, its node, its rail (the
    ranks at its place of every node), and its pair, two ranks of its node. Each kind runs at the
    same time everywhere in the cluster: a rail shares its node's wire with the other rails, as
    data-parallel groups do. A rank whose group has no other, or that is in none of that name, waits
    while the others are timed: so it is where nodes hold different numbers of ranks.

    As a context manager it is closed at the end of the block, or aborted where the block raises:
    closing waits for the other ranks, and would hide the error behind its own.
    """

    def __init__(
        self,
        topology: Topology,
        timeout_s: float,
        ranks: AllRanks | None = None,
        groups: Mapping[str, Sequence[int]] | None = None,
        links: DeviceLinks | None = None,
    ) -> None:
        self.ranks = ranks or AllRanks.default()
        name, everyone = self.ranks.name(), self.ranks.named
        rank = everyone[self.ranks.rank]
        job = self.ranks.detector or job_detector(everyone)
        shared = job if job is not None and set(everyone) <= set(job.ranks) else None
        store = PrefixStore(f"commlayer/profiler/{name}", self.ranks.store)
        self.detector = shared or FailureDetector(store, rank, everyone, timeout_s)
        self._is_owner = shared is None
        self.board = FailureBoard(self.detector, f"profiler/{name}", rank, everyone)
        self._topology, self._timeout_s = topology, timeout_s
        self._members = _groups(topology, self.ranks.rank) if groups is None else groups
        common = topology, self.ranks, self._members, store, self.board, timeout_s
        self.harness: HostHarness | DeviceHarness = (
            HostHarness(*common) if links is None else DeviceHarness(*common, links)
        )

    def __enter__(self) -> Prober:
        """Take the device, if any. Where that fails here the other ranks hear of it, as of all that
        fails later."""
        try:
            self.harness.begin()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        why = why_left(error)
        try:
            self.harness.leave(error, why)
        finally:
            self._close_board(why, is_failure=True, is_consequence=isinstance(error, BLAMING))

    def close(self) -> None:
        """Let go of connections. Collective."""
        try:
            self.harness.close()
        finally:
            self._close_board("it has measured what it wanted")

    def _close_board(self, why: str, *, is_failure: bool = False, is_consequence: bool = False) -> None:
        self.board.close()
        if self._is_owner:
            self.detector.close(why, is_failure=is_failure, is_consequence=is_consequence)

    @cached_property
    def grid(self) -> Grid:
        """The grid of replicated tokens: one row for each node, so that ep groups cross nodes and
        tp groups fill them.

        Raises TopologyError for uneven nodes, which have none.
        """
        topology = self._topology
        topology.ranks_per_node  # noqa: B018  raises for uneven nodes, naming them
        nodes = [tuple(self.ranks.named[member] for member in members) for members in topology.nodes]
        node, local_rank = topology.node_of(self.ranks.rank), topology.local_rank_of(self.ranks.rank)
        if topology.num_nodes == 1:
            return Grid(tuple((member,) for member in nodes[0]), local_rank, 0, Resource.INTRA, topology)
        return Grid(tuple(nodes), node, local_rank, Resource.INTER, topology)

    @cached_property
    def grid_runner(self) -> Runner:
        """Runs plans on the grid. The first access is collective."""
        return self.harness.connect_grid(self.grid)

    # Calls

    def call(self, probe: Probe, size: int) -> TimedCall:
        """One size of a probe, ready to run. Collective."""
        if probe.is_on_grid:
            return self.on_grid(probe.plan(size))
        with self.harness.on():
            if isinstance(probe.leg, CodedLeg):
                return CodedCall(probe.leg.op, probe.unit.wire, size, self.harness.device)
            if len(self._members.get(probe.where, ())) < 2:
                return IdleCall()
            group = self.harness.group(probe.where)
            probe = probe.among(group.size)
            if probe.leg is MESSAGE:
                return MessageCall(group, size)
            return GroupCall(group, probe.plan(size), is_own=probe.is_own_call)

    def on_grid(self, plan: Plan) -> GridCall:
        """A plan on the grid, ready to run."""
        with self.harness.on():
            return GridCall(self.grid_runner, plan, self.grid, self.harness.device, self._timeout_s)

    def codes(self, wire: Wire) -> bool:
        """Whether every rank can encode in this format where its tensors are. Collective."""
        return self.agree(float(not self.harness.encodes(wire))) == 0.0

    def is_one_call(self, plan: Plan) -> bool:
        """Whether the transports of all ranks run ``plan`` as one call of the backend's own.
        Collective."""
        if isinstance(self.harness, DeviceHarness):
            return False  # posting a step does not wait for it, so there is nothing to save
        transport = self.grid_runner.transport
        is_one = isinstance(transport, GlooTransport) and transport.is_one_call(plan)
        return self.agree(float(not is_one)) == 0.0

    # Times

    def runner(self, probe: Probe, size: int, *, check: bool = False) -> Callable[[], float]:
        """A callable that runs one size of a probe once and returns the agreed time, µs.
        Collective.

        ``check``: run it on known values first. Raises ClusterError where they arrive wrong.
        """
        call = self.call(probe, size)
        with self.harness.on():
            wrong = self.ranks.total(call.num_wrong()) if check else 0
        if wrong:
            collective, link, _ = probe.key
            values = f"on {link} delivered wrong values"
            raise ClusterError(
                f"{collective} of {size} bytes "
                f"{f'delivered {wrong} wrong bytes, all ranks together' if probe.is_on_grid else values}: do not trust this "
                "link. Look for a faulty card, cable or driver, then measure again"
            )
        return lambda: self.timed(call.run)

    def timed(self, task: Callable[[], Any]) -> float:
        """The time of ``task`` in µs, all ranks starting together: the largest over ranks, equal on
        all of them."""
        return self.agree(self.harness.time_us(task))

    def times(self, calls: Iterable[tuple[Probe, TimedCall]], is_over: Callable[[], bool]) -> list[float]:
        """The time that each call takes this rank, µs: one after the other, all ranks starting
        together.

        None begins when time is up: ``is_over()`` is asked by all ranks, and says the same to all.
        What ranks do alone takes little time, so that the faster of two counts. Collective.
        """
        return self.harness.times_us(calls, is_over)

    def agree(self, value: float) -> float:
        """The largest ``value`` over ranks."""
        return self.ranks.maximum(value)

    def ends(self, plan: Plan | None, rounds: int, num_products: int = 0) -> dict[Resource, float]:
        """Find when the last step of each resource ended, µs from the call; the median over rounds
        of the largest over ranks.

        ``num_products``: matrix products that run beside, on a device, and whose end is COMPUTE's.
        ``plan`` None: these alone.
        """
        call = None if plan is None else self.on_grid(plan)
        resources = [] if plan is None else list(dict.fromkeys(step.resource for step in plan.steps))
        resources += [Resource.COMPUTE] if num_products else []
        seen: list[list[float]] = []
        for _ in range(rounds + 1):
            ends = self.harness.ends_us(call, num_products)
            seen.append(self.ranks.maxima([ends[resource] for resource in resources]))
        medians = [sorted(column)[rounds // 2] for column in zip(*seen[1:], strict=True)]
        return dict(zip(resources, medians, strict=True))

    def pair_times(self, num_bytes: int, repeats: int) -> Mapping[Pair, float]:
        """Time, for each two nodes, how long they take to send each other ``num_bytes`` at once,
        µs: the least of ``repeats``.

        Ranks at the same place of both nodes exchange, as many as the emptiest node has.
        Collective.
        """
        if not isinstance(self.harness, HostHarness):
            raise InternalError("pairs of nodes are timed between CPU ranks, not on a device")
        node = self._topology.node_of(self.ranks.rank)
        with phase(f"{MEASURING}, node {node} with others one by one"):
            world = self.harness.planned("world")
            return time_links(world, num_bytes, MOST_PAIR_ROUNDS, repeats).taken_us

    def time_all_reduce(self, num_bytes: int) -> float:
        """The time of one all_reduce of the backend's own on all ranks, µs: the largest over ranks.
        Collective."""
        nodes = tuple(map(len, self._topology.nodes))
        probe = next(each for each in probes_of_calls("world", nodes) if each.key[0] == "all_reduce")
        return self.runner(probe, num_bytes)()

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.ranks.size


def _groups(topology: Topology, rank: int) -> dict[str, Sequence[int]]:
    """This rank's group of each name that is measured on a cluster."""
    local_rank = topology.local_rank_of(rank)
    rail = [members[local_rank] for members in topology.nodes if local_rank < len(members)]
    return {
        "world": range(topology.world_size),
        "node": topology.nodes[topology.node_of(rank)],
        "rail": rail if len(rail) == topology.num_nodes else (),
        "pair": topology.nodes[topology.node_of(rank)][local_rank // 2 * 2 :][:2],
    }
