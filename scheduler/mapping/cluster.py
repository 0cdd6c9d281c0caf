"""A cluster, perhaps one that nobody has: GPUs, NVLink domains and a network; and a profile for any group of its ranks.

A *declared* cluster states a peak rate and an efficiency for each link, from public measurements; the curves of a group
follow from its shape (:mod:`commlayer.scheduler.mapping.group_curves`). A *measured* one has profiles of `commlayer measure`,
from whose curves those of other groups follow (:mod:`commlayer.scheduler.group_profiles`). A *joined* one
has a profile of one node, and a declared network between such nodes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from commlayer.profiles.errors import PlanError, UsageError
from commlayer.profiles.links import Peaks, Resource
from commlayer.profiles.profile import Interference, Profile
from commlayer.profiles.topology import Topology, shape_text
from commlayer.scheduler.group_profiles import group_profile
from commlayer.scheduler.mapping.declared_links import FABRICS, Link, Points
from commlayer.scheduler.mapping.group_curves import curves_of_group
from commlayer.scheduler.mapping.group_shapes import GroupLayout, worst_shape
from commlayer.scheduler.mapping.hardware import Gpu
from commlayer.scheduler.mapping.measured_links import link_in_node, memory_link

__all__ = ["Cluster", "Gpu", "Link", "Points"]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs in NVLink domains, and a network between them with a card for each GPU.

    Attributes:
        domain: GPUs that NVLink joins (8 in a node; 72 in a rack): what the rest of this code calls a node.
        peaks: of one GPU, one direction (:class:`~commlayer.profiles.links.Peaks`).
        inter, intra, device: what calls reach of them; None in a measured cluster that is not joined. ``device``: of copies and
            sums in memory.
        fabric: the network's kind, of :data:`~commlayer.scheduler.mapping.declared_links.FABRICS`; empty: not known, or measured.
        interference: slowdowns of resources that work side by side; nothing listed, nothing slowed.
        measured: profiles instead, each for its own shape (:meth:`from_profile`).

    Raises:
        UsageError: a number out of its range, or neither links nor profiles.
    """

    name: str
    gpu: Gpu
    domain: int
    peaks: Peaks
    inter: Link | None = None
    intra: Link | None = None
    device: Link | None = None
    fabric: str = ""
    interference: tuple[Interference, ...] = ()
    source: str = ""
    measured: tuple[Profile, ...] = ()
    _profiles: dict[tuple[int, ...], Profile] = field(default_factory=dict, init=False, repr=False, compare=False)
    _nodes: dict[tuple[GroupLayout, int], tuple[int, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _shapes: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """A cache of what :mod:`commlayer.scheduler.mapping.group_curves` computes once for many groups."""

    def __post_init__(self) -> None:
        if type(self.domain) is not int or self.domain < 1:
            raise UsageError(
                f"cluster {self.name!r}, domain: expected a whole number of at least 1, got {self.domain!r}"
            )
        if not self.measured and None in (self.inter, self.intra, self.device):
            raise UsageError(f"cluster {self.name!r}: expected inter, intra and device, or a measured profile")
        if self.intra is not None and 0 < self.intra.mesh < self.domain:
            raise UsageError(
                f"cluster {self.name!r}, domain: expected at most the {self.intra.mesh} GPUs of the mesh that its links were "
                f"measured in, got {self.domain}"
            )

    @classmethod
    def from_profile(cls, profile: Profile, gpu: Gpu, *more: Profile) -> Cluster:
        """The cluster on which ``profile`` was measured.

        Args:
            more: profiles of the same machines with fewer nodes, or fewer ranks on each: for groups of those shapes, whose curves
                else follow from those of ``profile`` (:func:`~commlayer.scheduler.group_profiles.group_profile`).

        Raises:
            UsageError: a profile of nodes with different numbers of ranks, or one of more ranks on a node than ``profile``.
        """
        domain = Topology.parse(profile.topology).ranks_per_node
        for other in more:
            if Topology.parse(other.topology).ranks_per_node > domain:
                raise UsageError(
                    f"expected profiles of at most {domain} ranks on a node beside {profile.name!r} ({profile.topology}), got "
                    f"{other.name!r} ({other.topology}): give the one with the most ranks first"
                )
        return cls(
            name=profile.name,
            gpu=gpu,
            domain=domain,
            peaks=profile.peaks,
            interference=profile.interference,
            source=profile.source,
            measured=(profile, *more),
        )

    def joined(self, fabric: str, inter_gbps: float) -> Cluster:
        """Nodes like the measured one, between which there is a declared network, of FABRICS, with so
        many GB/s for each GPU. Groups inside a node are as measured; in others what goes through a
        node is, as far as its links and copies were measured.

        Raises:
            UsageError: an unknown fabric; a cluster that was not measured on one node; a profile that
                lacks times of which those over several nodes are made.
        """
        if fabric not in FABRICS:
            raise UsageError(f"fabric: expected {', '.join(FABRICS)}, got {fabric!r}")
        if not self.is_one_node:
            raise UsageError(
                f"cluster {self.name!r}: expected a profile of one node to join others like it, got "
                f"{', '.join(profile.topology for profile in self.measured) or 'a declared cluster'}"
            )
        intra, (device, device_gbps) = link_in_node(self.measured[0], self.domain), memory_link(self.measured[0])
        return self.replace(
            name=f"{self.name}, nodes joined by {fabric} at {inter_gbps:g} GB/s",
            peaks=Peaks(inter_gbps, intra.gbps, device_gbps or self.gpu.memory_gbps / 2),
            inter=FABRICS[fabric].link,
            intra=intra,
            device=device,
            fabric=fabric,
            source=f"in a node {self.source}; between nodes declared: {FABRICS[fabric].link.source}",
        )

    @property
    def is_one_node(self) -> bool:
        """Whether the cluster was measured, on one node."""
        return bool(self.measured) and all(Topology.parse(profile.topology).num_nodes == 1 for profile in self.measured)

    @property
    def kind(self) -> Literal["declared", "profile"]:
        return "profile" if self.measured else "declared"

    def on(self, fabric: str) -> Cluster:
        """The same cluster on a network of another kind, of FABRICS. Raises UsageError for an unknown one, or a measured
        cluster."""
        if fabric not in FABRICS:
            raise UsageError(f"fabric: expected {', '.join(FABRICS)}, got {fabric!r}")
        if self.measured:
            why = "a profile of one node has none: add --inter-gbps" if self.is_one_node else "leave --fabric out"
            raise UsageError(f"cluster {self.name!r} was measured, and its fabric is in its curves: {why}")
        return self.replace(fabric=fabric, inter=FABRICS[fabric].link)

    def replace(self, **changes: Any) -> Cluster:
        """A copy with other fields. Raises UsageError for a field that does not exist."""
        names = [each.name for each in fields(self) if each.init]
        for name in changes:
            if name not in names:
                raise UsageError(f"cluster {self.name!r}: expected one of the fields {', '.join(names)}, got {name!r}")
        return replace(self, **changes)

    def nodes_of(self, layout: GroupLayout, ranks: int = 0) -> tuple[int, ...]:
        """How many ranks each domain holds of the slowest group of an axis: all of them end together, with that one.

        Which one is the slowest: :func:`commlayer.scheduler.mapping.group_shapes.slowest`. Ranks fill domain after domain.

        Args:
            layout: (size, stride) of each part of the group that holds rank 0 (``Setup.layout``).
            ranks: GPUs of the job, which bound how many other groups there are; 0: any number, the worst of all alignments.

        Returns:
            Always the same object for the same shape, so that it can be looked up by identity.

        Raises:
            UsageError: a size or a stride below 1, parts that do not nest, fewer ranks than the group reaches.
        """
        nodes = self._nodes.get((layout, ranks))
        if nodes is None:
            nodes = worst_shape(layout, self.domain, ranks)
            nodes = self._nodes[layout, ranks] = self._shapes.setdefault(nodes, nodes)
        return nodes

    def profile_of(self, nodes: tuple[int, ...]) -> Profile:
        """A profile with every curve that plans of a group on ``nodes`` are priced by; the same object for the same nodes.

        Raises:
            PlanError: a measured cluster on which no such group was measured; a group that does not fit the domains.
        """
        profile = self._profiles.get(nodes)
        if profile is None:
            profile = self._profiles[nodes] = _profile_of(self, nodes)
        return profile

    def link(self, link: Resource) -> Link:
        """Look up what is declared for ``link``. Raises PlanError for a measured cluster, and for a resource that is no link."""
        declared = {Resource.INTER: self.inter, Resource.INTRA: self.intra, Resource.DEVICE: self.device}.get(link)
        if declared is None:
            raise PlanError(
                f"cluster {self.name!r}: nothing is declared for {link}: it was measured, or that is no link"
            )
        return declared


def measured_shapes(profile: Profile) -> tuple[tuple[int, ...], ...]:
    """The groups that `commlayer measure` measures: all ranks, those of one node, one rank on each node.

    A curve's key has the size of its group, not its shape: groups of other shapes and the same size must not use it.
    """
    topology = Topology.parse(profile.topology)
    num, each = topology.num_nodes, topology.ranks_per_node
    return tuple(dict.fromkeys([(each,) * num, (each,), (1,) * num]))


def _profile_of(cluster: Cluster, nodes: tuple[int, ...]) -> Profile:
    if cluster.measured and (cluster.inter is None or len(nodes) == 1):
        profile = _measured_of(cluster, nodes)
        if cluster.device is None:
            return profile
        known = {curve.key for curve in profile.curves}  # a joined cluster has the copies that its profile lacks
        lacking = [curve for curve in curves_of_group(cluster, (1,)) if curve.key not in known]
        return profile.replace(curves=(*profile.curves, *lacking)) if lacking else profile
    if not nodes or min(nodes) < 1 or max(nodes) > cluster.domain:
        raise PlanError(
            f"cluster {cluster.name!r}: expected 1 to {cluster.domain} ranks on each node, got the group "
            f"{shape_text(nodes)}"
        )
    shape = shape_text(nodes)
    curves = {curve.key: curve for curve in curves_of_group(cluster, nodes)}
    if cluster.measured:
        inside = _measured_of(cluster, (max(nodes),)).curves
        curves |= {curve.key: curve for curve in inside if curve.link is not Resource.INTER}
    return Profile.create(
        name=f"{cluster.name} {shape}",
        kind="published",
        source=f"declared: {cluster.source}",
        topology=shape,
        peaks=cluster.peaks,
        gather="remote",
        curves=curves.values(),
        interference=cluster.interference,
    )


def _measured_of(cluster: Cluster, nodes: tuple[int, ...]) -> Profile:
    for profile in cluster.measured:
        if nodes in measured_shapes(profile):
            return profile
    for profile in cluster.measured:
        with contextlib.suppress(PlanError):
            return group_profile(profile, nodes)
    have = "; ".join(f"{p.name!r}: {', '.join(map(str, measured_shapes(p)))}" for p in cluster.measured)
    raise PlanError(
        f"cluster {cluster.name!r} was measured, but a group of {sum(nodes)} ranks on nodes {nodes} does not fit it; measured "
        f"were {have}. Choose degrees whose groups fit, or plan with a declared cluster"
    )
