"""The profile of one shape of group, measured on all groups of a mapping's axis at the same time.

``commlayer measure`` measures all ranks, whole nodes, and one rank of every node. Mappings have other
groups: two ranks of a node, two on each of two nodes. A curve's key has the size of its group and
not its shape, so each shape gets a profile of its own, of which a
:class:`commlayer.scheduler.mapping.cluster.Cluster` takes several.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from commlayer.agree.discovery import discover_topology
from commlayer.measure.all_ranks import AllRanks, ProfileText
from commlayer.measure.prober import Prober
from commlayer.measure.profiler import SweepOptions, peaks_of, run_environment
from commlayer.profiles.errors import UsageError
from commlayer.profiles.profile import Profile, parse_profile
from commlayer.profiles.sweep import sizes_between, sweep
from commlayer.profiles.topology import Topology, shape_text
from commlayer.scheduler.probes import probes_of_calls

__all__ = ["measure_groups"]


def measure_groups(
    groups: Sequence[Sequence[int]],
    options: SweepOptions,
    *,
    name: str,
    source: str,
    collectives: Sequence[str] | None = None,
) -> Profile:
    """Measure the profile of one group's shape, by all ``groups`` at once, as a training step uses them.

    Collective over the ranks of the default process group, which is Gloo's.

    Args:
        groups: every rank of the job is in one, such as :meth:`FoldedMapping.groups
            <commlayer.scheduler.mapping.folded.FoldedMapping.groups>` gives them.
        options: sizes (``min_bytes`` to ``max_bytes`` by ``factor``), ``repeats``, ``check``,
            ``longest_us``, ``timeout_s``, and the peaks where they are known.
        collectives: curves to measure, by their names in a profile; None: the backend's own calls, and
            in groups of two ``send_recv``.

    Returns:
        Its topology is the shape of one group: ``2x2`` is two ranks on each of two nodes.

    Raises:
        UsageError: groups that are not of one shape, or do not hold every rank once; an unknown
            collective.
        ClusterError: values arrive wrong.
    """
    topology, ranks = discover_topology(), AllRanks.default()
    shape = _shape_of(groups, topology)
    known = {probe.key[0]: probe for probe in probes_of_calls("groups", tuple(map(len, shape.nodes)))}
    *own, message = known
    default = [*own, *([message] if len(groups[0]) == 2 else [])]
    wanted = default if collectives is None else collectives
    for collective in wanted:
        if collective not in known:
            raise UsageError(f"collectives: expected some of {', '.join(own)} or {message}, got {collective!r}")
    sizes = sizes_between(options.min_bytes, options.max_bytes, options.factor)
    own_group = next(group for group in groups if ranks.rank in group)
    with Prober(topology, options.timeout_s, ranks, {"groups": own_group}) as prober:
        curves = [
            sweep(
                *known[collective].key,
                sizes,
                partial(prober.runner, known[collective], check=options.check),
                options.repeats,
                longest_us=options.longest_us,
            )
            for collective in wanted
        ]
    profile = Profile.create(
        name=name,
        kind="emulated",
        source=source,
        topology=shape,
        peaks=peaks_of(curves, options),
        gather="remote",
        curves=curves,
        environment=run_environment("gloo"),
    )
    text = ranks.from_first(ProfileText(profile.to_json()), ProfileText).json
    return parse_profile(text, "rank 0's profile")  # hosts and dates differ between ranks


def _shape_of(groups: Sequence[Sequence[int]], topology: Topology) -> Topology:
    """Find how ranks lie on nodes, which is the same for every one of ``groups``.

    Raises UsageError where it is not.
    """
    if sorted(rank for group in groups for rank in group) != list(range(topology.world_size)):
        raise UsageError(
            f"groups: expected each of {topology.world_size} ranks in one group, got "
            f"{[list(group) for group in groups]}"
        )
    shapes = [tuple(map(len, topology.parts_of(group))) for group in groups]
    if len(groups[0]) < 2 or len({tuple(sorted(shape)) for shape in shapes}) > 1:
        raise UsageError(
            "groups: expected groups of two ranks or more that lie alike on the nodes, got "
            f"{', '.join(map(str, shapes))} ranks on their nodes: measure each shape by itself"
        )
    return Topology.parse(shape_text(shapes[0]))
