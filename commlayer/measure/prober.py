"""Runs what is measured on all ranks of the world in step, checks it, and times it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any

from torch._C._distributed_c10d import PrefixStore  # torch.distributed has it too, but not for type checkers

from commlayer.agree.discovery import Grid, Identity
from commlayer.engine.runner import Runner
from commlayer.failures.board import FailureBoard, why_left
from commlayer.failures.detector import FailureDetector, job_detector
from commlayer.measure.all_ranks import AllRanks
from commlayer.measure.calls import CodedCall, GridCall, GroupCall, IdleCall, MessageCall, TimedCall
from commlayer.measure.device_harness import DeviceHarness, DeviceLinks
from commlayer.measure.harness import HostHarness
from commlayer.profiles.errors import BLAMING, ClusterError
from commlayer.profiles.links import Resource
from commlayer.profiles.topology import Topology
from commlayer.scheduler.legs import CodedLeg
from commlayer.scheduler.plan import Plan
from commlayer.scheduler.probes import MESSAGE, Probe

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
        self.ranks = ranks = ranks or AllRanks.default()
        everyone, rank = ranks.global_ranks, ranks.global_ranks[ranks.rank]
        name = ranks.from_first(Identity(uuid.uuid4().hex), Identity).text  # another one each time
        job = ranks.detector or job_detector(everyone)
        shared = job if job is not None and set(everyone) <= set(job.ranks) else None
        store = PrefixStore(f"commlayer/profiler/{name}", ranks.store)
        self.detector = shared or FailureDetector(store, rank, everyone, timeout_s)
        self._is_owner = shared is None
        self.board = FailureBoard(self.detector, f"profiler/{name}", rank, everyone)
        self.topology, self._timeout_s = topology, timeout_s
        if groups is None:
            node, local_rank = topology.nodes[topology.node_of(ranks.rank)], topology.local_rank_of(ranks.rank)
            rail = [members[local_rank] for members in topology.nodes if local_rank < len(members)]
            groups = {
                "node": node,
                "rail": rail if len(rail) == topology.num_nodes else (),
                "pair": node[local_rank // 2 * 2 :][:2],
            }
        self._members = {"world": range(ranks.size)} | dict(groups)
        common = topology, ranks, self._members, store, self.board, timeout_s
        self.harness: HostHarness | DeviceHarness = (
            HostHarness(*common, ranks.device) if links is None else DeviceHarness(*common, links.device, links)
        )

    def __enter__(self) -> Prober:
        """Take the device, if any. Where that fails here the other ranks hear of it, as of all that
        fails later."""
        if isinstance(self.harness, DeviceHarness):
            try:
                self.harness.begin()
            except BaseException as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_failure = error is not None
        why = "it has measured what it wanted" if error is None else why_left(error)
        try:
            self.harness.close(error, why)
        finally:
            self.board.close()
            if self._is_owner:
                self.detector.close(why, is_failure=is_failure, is_consequence=isinstance(error, BLAMING))

    @cached_property
    def grid(self) -> Grid:
        """The grid of replicated tokens: one row for each node, so that ep groups cross nodes and
        tp groups fill them.

        Raises TopologyError for uneven nodes, which have none.
        """
        topology = self.topology
        topology.ranks_per_node  # noqa: B018  raises for uneven nodes, naming them
        nodes = [tuple(self.ranks.global_ranks[member] for member in members) for members in topology.nodes]
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
        return self.ranks.maximum(self.harness.time_us(task))

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
