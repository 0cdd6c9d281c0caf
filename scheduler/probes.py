"""Probes: every curve that a leg of any strategy is timed by on a cluster, and a plan that exercises it, to be measured.

The list comes from the legs of all plans that can be chosen (:func:`commlayer.scheduler.group_strategies.candidates`),
on the groups that every cluster has: the grid of replicated tokens, the world, the ranks of a node, the ranks at one place of
every node (a rail), and two ranks of a node. A leg that is timed by a curve of its own adds that curve to what is measured.

Where nodes hold different numbers of ranks there is no grid. All nodes work at once, each among its own ranks, and the curve is
that of the fullest one; there are as many rails as the emptiest node has ranks, which is what :meth:`Cut.over_rails
<commlayer.scheduler.plan.Cut.over_rails>` counts on. A rank that has nobody to exchange with is idle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from commlayer.profiles.links import Resource
from commlayer.profiles.topology import Topology
from commlayer.scheduler.group_strategies import assembled, candidates
from commlayer.scheduler.legs import OwnCallLeg
from commlayer.scheduler.moves import Buffer
from commlayer.scheduler.plan import CurveKey, Cut, Gather, Leg, Op, Plan, Span, Step, Strategy
from commlayer.scheduler.replicated import EXCHANGE_SLICES, GATHER, LOCAL_BLOCK
from commlayer.scheduler.traffic import Traffic, link_over
from commlayer.scheduler.wire import Wire, WireFormat

__all__ = [
    "MESSAGE",
    "Probe",
    "probes",
    "probes_of_calls",
    "probes_of_grid",
    "probes_of_group",
    "side_by_side",
    "spanning_groups",
]

_GRID = "grid"
_PARTS = ("node", "rail", "pair")
"""The groups that are a part of the job."""
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all_v")
"""The order in which a profile has the backend's own calls."""
_ITEM_BYTES = 4  # sums are of float32
_ROW_ELEMENTS = 1024
"""Elements of the rows that FP8 and INT8 are measured on: about a model's hidden size."""
_WIRES = tuple(Wire(each, _ROW_ELEMENTS) for each in WireFormat)


@dataclass(frozen=True, slots=True)
class Probe:
    """A curve to measure, on which groups, and of which leg.

    ``where``: ``grid``, ``world``, ``node``, ``rail``, ``pair``, or the name of other groups that the prober was given.
    ``unit``: the smallest plan of nothing but one step of the leg.
    """

    key: CurveKey
    where: str
    unit: Plan

    @property
    def leg(self) -> Leg:
        """The leg whose steps are timed."""
        return self.unit.steps[0].leg

    @property
    def share(self) -> float:
        """How much of a call's bytes are the step's, by which its curve is looked up."""
        return self.unit.steps[0].bytes / self.unit.traffic.logical_bytes

    @property
    def is_on_grid(self) -> bool:
        """Whether it is on the grid of replicated tokens."""
        return self.where == _GRID

    @property
    def is_own_call(self) -> bool:
        """Whether it is a call of the backend's own between the ranks of a group."""
        return isinstance(self.leg, OwnCallLeg)

    def among(self, num_ranks: int) -> Probe:
        """The probe of the same leg for a node that holds another number of ranks: beside it, and as many bytes."""
        traffic = self.unit.traffic
        if traffic.nodes != (traffic.group_size,) or num_ranks == traffic.group_size:
            return self
        size = traffic.block_bytes * num_ranks
        unit = replace(
            self.unit, traffic=replace(traffic, logical_bytes=size, group_size=num_ranks, nodes=(num_ranks,))
        )
        return replace(self, unit=_alone(self.leg, unit))

    def plan(self, num_bytes: int) -> Plan:
        """The plan whose step is of ``num_bytes``, or of as many more as its ranks can divide."""
        unit = self.unit
        count = max(1, math.ceil(num_bytes / unit.steps[0].bytes))
        traffic = replace(unit.traffic, logical_bytes=unit.traffic.logical_bytes * count)
        return _alone(self.leg, replace(unit, traffic=traffic))


class _Message(OwnCallLeg):
    """A message from the first rank of two to the second, as pipelines send them."""

    def curve_keys(self, plan: Plan) -> tuple[CurveKey, ...]:
        return (("send_recv", plan.traffic.link, plan.traffic.group_size),)


MESSAGE = _Message("message", Op.BROADCAST, Span.GROUP, Buffer.INPUT, Buffer.OUTPUT)


def probes(topology: Topology, *, with_groups: bool = True, is_brief: bool = False) -> list[Probe]:
    """List what is measured on a cluster, each curve once, in the order of a profile.

    ``with_groups`` False: on the grid only. ``is_brief``: no broadcasts in a part of the job, by which few jobs plan.
    """
    nodes = tuple(map(len, topology.nodes))
    m, width = len(nodes), max(nodes)
    found = []
    if topology.is_uniform:
        found += probes_of_grid(*((m, width, Resource.INTER) if m > 1 else (width, 1, Resource.INTRA)))
    if with_groups:
        for where, (shape, _) in spanning_groups(nodes).items():
            found += probes_of_group(where, shape)
    once: dict[CurveKey, Probe] = {}
    for probe in sorted(found, key=_is_inside):
        once.setdefault(probe.key, probe)
    wanted = [
        probe for probe in once.values() if not (is_brief and probe.key[0] == "broadcast" and probe.where in _PARTS)
    ]
    return sorted(wanted, key=_place)


def spanning_groups(nodes: Sequence[int]) -> dict[str, tuple[tuple[int, ...], int]]:
    """The groups that are measured on a cluster with so many ranks on each of ``nodes``: by name the shape of a group, and how
    many such groups use a node at the same time.

    ``world``: all ranks; ``node``: the ranks of a node; ``rail``: one rank of every node; ``pair``: two ranks of a node. The
    curves of every other group follow from them (:mod:`commlayer.scheduler.group_profiles`).

    Rails over some of the nodes only are not among them. On more than two nodes they would add a fifth of the calls to the probe
    of a job's start, on which every job waits, for groups that few jobs have; those run their contending plans before their
    first call instead (:mod:`commlayer.scheduler.experience`).
    """
    largest = max(nodes)
    found = {"world": (tuple(nodes), 1)}
    if len(nodes) > 1 and largest > 1:
        found |= {"node": ((largest,), 1), "rail": ((1,) * len(nodes), min(nodes))}
    if largest > 2:
        found["pair"] = ((2,), largest // 2)
    return found


def probes_of_grid(e: int, t: int, link: Resource) -> list[Probe]:
    """List those of an all_to_all over ``e`` ranks on ``link``, whose tokens are the same on ``t`` ranks of a node.

    An exchange is one of messages, not a flat plan: a transport may run a small one of those as a call of the backend's own,
    which has a curve of its own.
    """
    traffic = Traffic(e, e, t, link)
    ways = (Strategy.HIERARCHICAL, 1), (Strategy.PIPELINED, 2), (Strategy.PIPELINED_COPY, 2), (Strategy.FLAT, 1)
    plans = [
        assembled(traffic, *way) for way in ways
    ]  # also of tokens that are not replicated, whose legs are the same
    found: dict[CurveKey, Probe] = {}
    for key, leg, plan in _timed(plans):
        is_whole = leg.is_exchange and leg.span is Span.GROUP  # then with the rank's own block, as a flat plan has it
        unit = replace(
            plan,
            traffic=replace(traffic, replication=t if leg.span is Span.HOLDERS else 1),
            strategy=Strategy.FLAT if plan.strategy is Strategy.FLAT else Strategy.HIERARCHICAL,
            chunks=1,
            gather=Gather.WHOLE if is_whole else Gather.REMOTE,
        )
        found.setdefault(key, Probe(key, _GRID, _alone(leg, unit)))
    return sorted(found.values(), key=_place)


def probes_of_group(where: str, nodes: tuple[int, ...]) -> list[Probe]:
    """List those of a group with so many ranks on each node: what its calls are timed by, and in a group of two, messages."""
    n, link = sum(nodes), link_over(nodes)
    plans = (
        plan
        for wire in _WIRES
        for collective in _COLLECTIVES
        for plan in candidates(_traffic(collective, n, link, nodes, wire), Gather.REMOTE, 0.0, 2)
    )
    found: dict[CurveKey, Probe] = {}
    for key, leg, plan in _timed(plans):
        found.setdefault(key, Probe(key, where, _alone(leg, replace(plan, chunks=1))))
    return list(found.values())


def probes_of_calls(where: str, nodes: tuple[int, ...]) -> list[Probe]:
    """List the calls of the backend's own in such a group, and a message, which is between two."""
    own = [probe for probe in probes_of_group(where, nodes) if probe.is_own_call]
    message = _alone(MESSAGE, own[0].unit)
    return [*own, *(Probe(key, where, message) for key in MESSAGE.curve_keys(message))]


def _traffic(collective: str, n: int, link: Resource, nodes: tuple[int, ...], wire: Wire) -> Traffic:
    item_bytes = 2 if wire.format.is_scaled else _ITEM_BYTES
    return Traffic(n * _ITEM_BYTES, n, 1, link, collective, nodes, wires=(wire,), element_bytes=item_bytes)


def _timed(plans: Iterable[Plan]) -> Iterator[tuple[CurveKey, Leg, Plan]]:
    """The legs of plans, with each curve that times them, but for exchanges of a rank with itself."""
    for plan in plans:
        for leg in dict.fromkeys(step.leg for step in plan.steps):
            if not leg.is_exchange or leg.span.ranks(plan.traffic) > 1:
                yield from ((key, leg, plan) for key in leg.curve_keys(plan))


def _alone(leg: Leg, plan: Plan) -> Plan:
    """``plan`` with one step, of ``leg``."""
    is_on_one_level = plan.strategy is Strategy.DIRECT
    cut = Cut(plan.traffic, gather=plan.gather, wire=plan.wire, is_on_one_level=is_on_one_level)
    return replace(plan, steps=(leg.step(cut),))


def _is_inside(probe: Probe) -> bool:
    """Whether it exchanges between some ranks of its group: then a group of just those goes before."""
    return probe.leg.is_exchange and probe.leg.span not in (Span.GROUP, Span.HOLDERS)


def _place(probe: Probe) -> tuple[int, int]:
    """The place in a profile: the grid; what ranks do alone; each group's steps, and its calls of the backend's own."""
    if probe.leg.is_exchange:
        step = len(Op) if probe.is_own_call else list(Op).index(probe.leg.op)
        return (_GRID, "alone", "world", "node", "rail", "pair").index(probe.where), step
    return int(not probe.is_on_grid), len(Op)


def side_by_side(
    num_bytes: int, group_size: int, replication: int, link: Resource, counts: dict[Resource, int]
) -> Plan:
    """Independent steps on several resources: ``counts`` says how many of each, so that all are busy equally long.

    The steps are those of a hierarchical plan for ``num_bytes``: an all_to_all of a slice, an all_gather of what crossed
    the wire, a copy of the local block.
    """
    block = max(1, -(-num_bytes // max(1, group_size - 1)))  # the remote blocks are about ``num_bytes`` together
    traffic = Traffic(block * group_size, group_size, replication, link)
    cut = Cut(traffic, gather=Gather.REMOTE)
    steps: list[Step] = []
    # Copies last: on the CPU they occupy the posting thread.
    for resource, leg in ((Resource.INTER, EXCHANGE_SLICES), (Resource.INTRA, GATHER), (Resource.DEVICE, LOCAL_BLOCK)):
        steps += [replace(leg.step(cut), resource=resource)] * counts.get(resource, 0)
    return Plan(traffic, Strategy.HIERARCHICAL, 1, Gather.REMOTE, tuple(steps))
