"""Measures the groups of one axis of a mapping: the backend's own calls on all groups at once, as a training step makes them.

`commlayer profile` measures all ranks, whole nodes, and one rank of every node. Mappings have other groups: two ranks of a node,
two on each of two nodes. A curve's key has the size of its group and not its shape, so each shape gets a profile of its own;
:class:`commlayer.scheduler.mapping.cluster.Cluster` takes several.
"""

from __future__ import annotations

from collections.abc import Sequence

from commlayer.agree.discovery import discover_topology
from commlayer.measure.all_ranks import AllRanks, ProfileText
from commlayer.measure.group_prober import OWN_CALLS, GroupCurve, GroupProber
from commlayer.measure.prober import Prober
from commlayer.measure.profiler import SweepOptions, environment
from commlayer.profiles.curve import Curve
from commlayer.profiles.errors import UsageError
from commlayer.profiles.links import Peaks, Resource
from commlayer.profiles.measure import sizes_between, sweep
from commlayer.profiles.profile import Profile, parse_profile
from commlayer.profiles.topology import Topology

__all__ = ["measure_groups"]


def measure_groups(
    groups: Sequence[Sequence[int]],
    options: SweepOptions,
    *,
    name: str,
    kind: str,
    source: str,
    collectives: Sequence[str] | None = None,
    topology: Topology | None = None,
    ranks: AllRanks | None = None,
) -> Profile:
    """The profile of one group's shape, measured on all ``groups`` at the same time. Collective over all ranks.

    Args:
        groups: of which every rank of the job is in one, such as :meth:`FoldedMapping.groups
            <commlayer.scheduler.mapping.folded.FoldedMapping.groups>` gives them.
        options: sizes (``min_bytes`` to ``max_bytes`` by ``factor``), ``repeats``, ``check``, ``longest_us``, ``timeout_s``, and
            the peaks where they are known; the rest is of :func:`~commlayer.measure.profiler.measure_cluster`.
        collectives: curves to measure, by their names in a profile; None: the backend's own calls, and in groups of two
            ``send_recv``.
        topology: of the job; None: discovered. ranks: None: the default process group.

    Returns:
        Its topology is the shape of one group: ``2x2`` is two ranks on each of two nodes.

    Raises:
        UsageError: groups that are not of one shape, or do not hold every rank once; an unknown collective.
        ClusterError: values arrive wrong.
    """
    topology = topology or discover_topology()
    ranks = ranks or AllRanks.default()
    shape = _shape_of(groups, topology)
    size = len(groups[0])
    wanted = (*OWN_CALLS, *(["send_recv"] if size == 2 else [])) if collectives is None else tuple(collectives)
    for collective in wanted:
        if collective not in (*OWN_CALLS, "send_recv"):
            raise UsageError(f"collectives: expected some of {', '.join(OWN_CALLS)} or send_recv, got {collective!r}")
    link = Resource.INTER if shape.num_nodes > 1 else Resource.INTRA
    sizes = sizes_between(options.min_bytes, options.max_bytes, options.factor)
    mine = next(group for group in groups if ranks.rank in group)
    with Prober(topology, options.timeout_s, ranks) as prober:
        probes = GroupProber(prober, topology, options.timeout_s, {"groups": mine})
        try:
            curves = [
                sweep(
                    collective,
                    link,
                    size,
                    sizes,
                    lambda nbytes, collective=collective: probes.runner(  # type: ignore[misc]
                        GroupCurve(collective, link, size, "groups"), nbytes, check=options.check
                    ),
                    options.repeats,
                    longest_us=options.longest_us,
                )
                for collective in wanted
            ]
        finally:
            probes.close()
    profile = Profile.create(
        name=name,
        kind=kind,
        source=source,
        topology=shape,
        peaks=_peaks(curves, options),
        gather="remote",
        curves=curves,
        environment=environment("gloo"),
    )
    # Hosts and dates differ between ranks, and a profile must not.
    return parse_profile(ranks.from_first(ProfileText(profile.to_json()), ProfileText).json, "rank 0's profile")


def _shape_of(groups: Sequence[Sequence[int]], topology: Topology) -> Topology:
    """Find how ranks lie on nodes, which is the same for every one of ``groups``. Raises UsageError where it is not."""
    if sorted(rank for group in groups for rank in group) != list(range(topology.world_size)):
        raise UsageError(
            f"groups: expected each of {topology.world_size} ranks in one group, got {[list(group) for group in groups]}"
        )
    shapes = [tuple(len(part) for part in topology.parts_of(group)) for group in groups]
    if len(groups[0]) < 2 or len({tuple(sorted(shape)) for shape in shapes}) > 1:
        raise UsageError(
            f"groups: expected groups of two ranks or more that lie alike on the nodes, got {', '.join(map(str, shapes))} ranks "
            "on their nodes: measure each shape by itself"
        )
    uniform = len(set(shapes[0])) == 1
    return Topology.parse(f"{len(shapes[0])}x{shapes[0][0]}" if uniform else "+".join(map(str, shapes[0])))


def _peaks(curves: Sequence[Curve], options: SweepOptions) -> Peaks:
    """Find the peaks: what is known, else the fastest call; the same for links that these groups do not use."""
    fastest = max(curve.busbw_gbps(size) for curve in curves for size in curve.bytes)
    return Peaks(options.inter_gbps or fastest, options.intra_gbps or fastest, fastest)
