"""The profile of any group of a measured cluster, from the curves of the groups that are measured everywhere.

A sweep measures four kinds of group (:func:`commlayer.scheduler.probes.spanning_groups`): all ranks, one rank of every node,
the ranks of a node, and two ranks of a node. A curve of any other group follows from two of them, which span what matters:
between nodes from all ranks and one rank of every node, inside nodes from the whole node and two of its ranks. Both are
looked up at equal bytes through the link that they share, the node's card or its memory, so that bandwidth is the measured
one whatever number of ranks share it; and between the two, time is linear in the number of rounds (ranks less one), which is
what latency adds up over.

Slow pairs of nodes were in the way of what was measured between nodes, and may not be in the way of a group; nor of all plans of
one that has them. So where a profile names some, curves between nodes are as if there were none, by what they cost the measured
step; what they cost a plan's steps is added where it is priced (:mod:`commlayer.scheduler.slow_pairs`).

Siblings. Groups of one shape are active together, as the gradient groups of tensor parallelism are: all ranks of a node that such
groups can have, unless the job says otherwise. They share the card, so their bytes go through it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from commlayer.profiles.curve import Curve
from commlayer.profiles.errors import PlanError, UsageError
from commlayer.profiles.links import Peaks, Resource
from commlayer.profiles.profile import Profile
from commlayer.profiles.topology import Topology, shape_text
from commlayer.scheduler.legs import OwnCallLeg
from commlayer.scheduler.plan import CurveKey, Leg, Op, Span, owned_parts
from commlayer.scheduler.probes import Probe, probes_of_group, spanning_groups
from commlayer.scheduler.slow_pairs import direct_hindrance, ring_hindrance
from commlayer.scheduler.traffic import SlowPair, Traffic, link_over

__all__ = ["fits", "group_profile", "is_on_every_node", "link_load", "most_siblings", "pairs_on"]

_LEAST_OF_REFERENCE = 0.5
"""The least that a group of fewer ranks than any measured one takes, of the time of the smallest measured one."""


def group_profile(profile: Profile, nodes: tuple[int, ...], siblings: int = 0, rate: float = 0.0) -> Profile:
    """The profile of a group with so many ranks on each of ``nodes``, on the cluster that ``profile`` describes.

    ``siblings``: how many groups of this shape, this one among them, use a node at the same time; 0: as many as its ranks make
    up. ``rate``: of the slowest card that the group uses, as a fraction of the cluster's usual one; 0.0: the slowest of all.
    Returns ``profile`` itself where it has that group as measured. Raises UsageError for a negative number of siblings,
    PlanError for a group that is larger than the cluster.
    """
    cluster = Topology.parse(profile.topology)
    sizes = tuple(len(members) for members in cluster.nodes)
    nodes = tuple(sorted(nodes, reverse=True))  # in whatever order: a curve's key does not say
    most = most_siblings(sizes, nodes)
    if siblings < 0:
        raise UsageError(f"siblings: expected how many groups share a node, or 0 for all of them, got {siblings}")
    if not fits(sizes, nodes):
        raise PlanError(
            f"profile {profile.name!r} ({profile.topology}): a group of {shape_text(nodes)} does not fit a cluster of that shape"
        )
    count = siblings or most
    spanning = spanning_groups(sorted(sizes, reverse=True))
    slowest = min(profile.node_rates, default=1.0)
    measured = {where: _Shape(*each, slowest, *_hindrances(profile, where)) for where, each in spanning.items()}
    references = list(measured.values())
    wanted = _Shape(nodes, count, rate or slowest)
    # Profiles of an earlier version, such as those that are shipped, have no curves of two ranks of a node.
    has_pairs = any(curve.link is Resource.INTRA and curve.group_size == 2 for curve in profile.curves)
    if wanted in references and (nodes != (2,) or has_pairs):
        return profile
    curves = {curve.key: curve for curve in profile.curves if curve.link is Resource.DEVICE}
    for probe in probes_of_group("group", nodes):
        if probe.leg.is_exchange and probe.key not in curves:
            derived = _derived(profile, probe, wanted, references)
            curves |= {} if derived is None else {derived.key: derived}
    # Of a card's rate a rank of the emptiest node has most (Peaks), of the memory's one of the fullest least.
    inter, intra = max(1.0, min(sizes) / (min(nodes) * count)), max(1.0, max(sizes) / (max(nodes) * count))
    # On uneven nodes the peak is that of the rails' curves; on even ones a pair slows rails down as much as all ranks.
    slowed = measured.get("rail", measured["world"]).direct
    peaks = Peaks(
        profile.peaks.inter_gbps * inter * wanted.rate / slowest * slowed,
        profile.peaks.intra_gbps * intra,
        profile.peaks.device_gbps,
    )
    suffix = "" if count == most else f", {count} at once"
    return profile.replace(
        name=f"{profile.name} for {shape_text(nodes)}{suffix}",
        topology=shape_text(nodes),
        peaks=peaks,
        curves=tuple(curves.values()),
        slow_links=(),
    )


def _hindrances(profile: Profile, where: str) -> tuple[float, float]:
    """The factors by which slow pairs slowed down what was measured of such a group: its direct exchanges, its rings."""
    nodes = tuple(len(members) for members in Topology.parse(profile.topology).nodes)
    if not profile.slow_pairs or where not in ("world", "rail"):
        return 1.0, 1.0
    nodes = nodes if where == "world" else (1,) * len(nodes)
    traffic = Traffic.on_nodes("all_gather", 1, nodes, rates=profile.node_rates, slow_pairs=profile.slow_pairs)
    direct = direct_hindrance(traffic, owned_parts(traffic, is_duplex=False))
    return direct, ring_hindrance(traffic, range(len(nodes)))


def link_load(probe: Probe, cluster: Sequence[int]) -> float:
    """The bytes through a node's link for each byte by which a curve of that cluster is looked up, all groups of its kind at
    once."""
    shape, siblings = spanning_groups(cluster).get(probe.where, (tuple(cluster), 1))
    return _Shape(shape, siblings, 1.0).load(probe.leg, probe.key)


def fits(cluster: Sequence[int], nodes: Sequence[int]) -> bool:
    """Whether a group with so many ranks on each of ``nodes`` has room on a cluster with so many on each of its own."""
    ours, theirs = sorted(nodes, reverse=True), sorted(cluster, reverse=True)
    return len(ours) <= len(theirs) and all(mine <= there for mine, there in zip(ours, theirs, strict=False))


def is_on_every_node(cluster: Sequence[int], nodes: Sequence[int]) -> bool:
    """Whether a group with so many ranks on each of ``nodes`` has some on every node of the cluster, in the cluster's order.

    Of any other group nobody can say by its shape on which nodes it is.
    """
    return len(nodes) == len(cluster) and all(mine <= there for mine, there in zip(nodes, cluster, strict=True))


def pairs_on(profile: Profile, nodes: tuple[int, ...]) -> tuple[SlowPair, ...]:
    """The profile's slow pairs that a group of that shape has for certain: all of them where it is on every node, else none."""
    cluster = tuple(len(members) for members in Topology.parse(profile.topology).nodes)
    return profile.slow_pairs if is_on_every_node(cluster, nodes) else ()


def most_siblings(cluster: Sequence[int], nodes: Sequence[int]) -> int:
    """The number of groups on ``nodes`` that the ranks of a node of ``cluster`` make up, at least 1."""
    room = (there // here for there, here in zip(sorted(cluster)[::-1], sorted(nodes)[::-1], strict=False))
    return max(1, min(room))


@dataclass(frozen=True)
class _Shape:
    """A kind of group: its ranks on each node, how many such groups use a node at the same time, and its slowest card's rate.

    ``direct``, ``ring``: by how much longer a step between nodes takes for slow pairs.
    """

    nodes: tuple[int, ...]
    siblings: int
    rate: float
    direct: float = 1.0
    ring: float = 1.0

    def load(self, leg: Leg, key: CurveKey) -> float:
        """The bytes through a node's link, for its rate, for each byte by which the leg's curve is looked up.

        A step between nodes of different sizes is looked up by what as many rails as the emptiest one has ranks would carry
        (:meth:`commlayer.scheduler.plan.Cut.over_rails`), and a ring's share of the link is that of a rank of the emptiest.
        """
        link = link_over(self.nodes)
        traffic = Traffic(sum(self.nodes), sum(self.nodes), 1, link, "all_gather", self.nodes)
        unit = Curve(*key, bytes=(1,), time_us=(1.0,))
        is_ring = isinstance(leg, OwnCallLeg) and leg.op is not Op.ALL_TO_ALL
        is_of_emptiest = is_ring or leg.span in (Span.RAIL, Span.LEADERS)
        active = (min if is_of_emptiest else max)(self.nodes) * self.siblings
        load = leg.share_of_link(traffic, unit) * active
        hindrance = self.ring if is_ring else self.direct
        return load / self.rate * hindrance if key[1] is Resource.INTER else load


@dataclass(frozen=True)
class _Reference:
    """A measured curve of the same kind of step, and the bytes through the link for each of those that it is looked up by."""

    curve: Curve
    load: float

    @property
    def rounds(self) -> int:
        return self.curve.group_size - 1

    def at(self, size: float, load: float) -> float:
        """The time at as many bytes through the link as ``size`` bytes are at ``load``, µs."""
        return self.curve.at(size * load / self.load)


def _derived(profile: Profile, probe: Probe, wanted: _Shape, shapes: Sequence[_Shape]) -> Curve | None:
    """The curve of a step of the group ``wanted``; None where the profile has nothing to make it of."""
    collective, link, size = probe.key
    by_size: dict[int, _Reference] = {}  # the measured curves of such a step on its link
    for shape in shapes:
        number = sum(shape.nodes)
        if link_over(shape.nodes) is not link or number in by_size:
            continue
        curve = profile.find(collective, link, number)
        if curve is not None:
            # leaders: one of each node, alone
            measured = replace(shape, siblings=1) if probe.leg.span is Span.LEADERS else shape
            by_size[number] = _Reference(curve, measured.load(probe.leg, (collective, link, number)))
    references = sorted(by_size.values(), key=lambda each: abs(each.rounds + 1 - size))
    if not references:
        return None
    near, load, rounds = references[0], wanted.load(probe.leg, probe.key), size - 1
    is_alike = near.rounds == rounds
    if is_alike and abs(near.load / load - 1.0) < 1e-9:
        return near.curve
    far = None if is_alike or len(references) < 2 else references[1]
    errors = [near.curve.holdout_error, None if far is None else far.curve.holdout_error]
    sizes = sorted({max(1, round(at * near.load / load)) for at in near.curve.bytes})
    times = accumulate((_time_us(at, load, rounds, near, far) for at in sizes), max)
    is_between = is_alike or (far is not None and min(near.rounds, far.rounds) < rounds < max(near.rounds, far.rounds))
    return Curve(
        *probe.key,
        tuple(sizes),
        tuple(times),
        holdout_error=max((error for error in errors if error is not None), default=None),
        source=near.curve.source,
        basis="interpolated" if is_between else "derived",
    )


def _time_us(size: float, load: float, rounds: int, near: _Reference, far: _Reference | None) -> float:
    time_us = near.at(size, load)
    if far is None:
        return time_us
    slope = (far.at(size, load) - time_us) / (far.rounds - near.rounds)
    return max(time_us + slope * (rounds - near.rounds), time_us * _LEAST_OF_REFERENCE)
