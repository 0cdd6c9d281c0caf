"""Traffic from the options of a command line, on a profile's cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from commlayer.profiles.errors import TopologyError, UsageError
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile
from commlayer.profiles.topology import Topology
from commlayer.scheduler.group_profiles import fits, is_on_every_node
from commlayer.scheduler.traffic import Traffic, dtype_bytes, moe_bytes
from commlayer.scheduler.wire import NATIVE, Wire, parse_wire
from commlayer.units import EXBIBYTE, format_bytes

__all__ = ["GROUPS", "check_siblings", "group_traffic", "size_of", "traffic_for", "wires_for", "words"]

_ROW_ELEMENTS = 1024
"""The elements of rows that share scales, where --hidden says nothing."""
GROUPS = ("world", "node", "rail")
"""The groups that may call: all ranks, those of a node, one on each node."""


def size_of(
    nbytes: int | None, batch: int | None, sequence: int | None, hidden: int | None, dtype: str, top_k: int
) -> int:
    parts = {"--batch": batch, "--sequence": sequence, "--hidden": hidden}
    named = [name for name, value in parts.items() if value is not None]
    if nbytes is not None:
        if named:
            raise UsageError(
                f"expected --bytes or {', '.join(parts)}, got --bytes and {', '.join(named)}: drop one side"
            )
        return nbytes
    if batch is None or sequence is None or hidden is None:
        missing = ", ".join(name for name in parts if name not in named)
        raise UsageError(
            f"expected --bytes, or all of {', '.join(parts)}, got {', '.join(named) or 'none of them'}: add "
            f"{'--bytes 16MiB, say' if not named else missing}"
        )
    size = moe_bytes(batch=batch, sequence=sequence, hidden=hidden, dtype=dtype, top_k=top_k)
    if size >= EXBIBYTE:
        raise UsageError(f"--batch {batch} --sequence {sequence} --hidden {hidden}: expected less than 1 EiB together")
    return size


def traffic_for(
    profile: Profile, nbytes: int, tp: int | None = None, ep: int | None = None, link: str | None = None
) -> Traffic:
    """Make the traffic, by default between all nodes, with tokens replicated over each whole node.

    Raises:
        UsageError: groups that do not fit on the profile's cluster.
        PlanError: a size that the group does not divide.
    """
    topology = Topology.parse(profile.topology)
    crossed = Resource(link) if link else Resource.INTER if topology.num_nodes > 1 else Resource.INTRA
    is_inter = crossed is Resource.INTER
    if tp is None:
        tp = topology.ranks_per_node if is_inter else 1
    if ep is None:
        ep = topology.num_nodes if is_inter else topology.ranks_per_node // tp
    largest = max(len(node) for node in topology.nodes)
    if tp > largest:
        raise UsageError(
            f"--tp {tp}: expected at most {largest}, the ranks on a node of {profile.name} ({profile.topology}): tokens "
            "are replicated inside a node"
        )
    if is_inter and ep > topology.num_nodes:
        raise UsageError(
            f"--ep {ep}: expected at most {topology.num_nodes}, the nodes of {profile.name} ({profile.topology}): a group "
            "that crosses nodes has one rank on each. For a group inside a node: --link intra"
        )
    if not is_inter and ep * tp > largest:
        raise UsageError(
            f"--ep {ep} --tp {tp}: expected at most {largest} ranks inside a node of {profile.name} ({profile.topology})"
        )
    return Traffic(nbytes, ep, tp, crossed)


def wires_for(text: str | None, dtype: str, row_elements: int | None) -> tuple[tuple[Wire, ...], int]:
    """Return the formats that ``--wire`` allows for elements of ``dtype``, and the bytes of an element. Raises
    UsageError for formats that are none, or that have no fewer bytes.
    """
    if text is None:
        return (NATIVE,), 0
    element_bytes = dtype_bytes(dtype)
    wires = []
    for each in parse_wire(text):
        if each.element_bytes >= element_bytes:
            raise UsageError(
                f"--wire {each} of --dtype {dtype} has no fewer bytes: name the tensor's dtype, such as fp32"
            )
        wires.append(Wire(each, row_elements or _ROW_ELEMENTS) if each.is_scaled else Wire(each))
    return tuple(wires), element_bytes


def group_traffic(
    profile: Profile,
    collective: str,
    nbytes: int,
    group: str | None,
    others: Mapping[str, object],
    wires: tuple[tuple[Wire, ...], int] = ((NATIVE,), 0),
) -> Traffic:
    """Make the traffic of a collective of the backend. ``others``: options that are for the all_to_all only. ``wires``: see
    :func:`wires_for`.

    Raises:
        UsageError: one of those was given; a group that the cluster does not have.
    """
    for option, value in others.items():
        if value is not None:
            raise UsageError(f"{option} is for --collective all_to_all, got it with {collective}: use --group")
    if collective == "broadcast" and wires[0] != (NATIVE,):
        raise UsageError("--wire: a broadcast goes in its tensor's own format: leave it out")
    topology = Topology.parse(profile.topology)
    cluster = sizes = tuple(len(node) for node in topology.nodes)
    if group is not None and group not in GROUPS:
        sizes = _shape_within(profile, sizes, group)
    elif group == "node":
        sizes = sizes[:1]
    elif group == "rail":
        if len(sizes) == 1:
            raise UsageError(f"--group rail: {profile.name} has one node ({profile.topology}): use --group node")
        sizes = (1,) * len(sizes)
    link = Resource.INTER if len(sizes) > 1 else Resource.INTRA
    is_everywhere = is_on_every_node(cluster, sizes)
    return Traffic(
        nbytes,
        sum(sizes),
        1,
        link,
        collective,
        sizes,
        wires=wires[0],
        element_bytes=wires[1],
        rates=profile.node_rates if is_everywhere else (),
        slow_pairs=profile.slow_pairs if is_everywhere else (),
    )


def check_siblings(profile: Profile, sizes: Sequence[int], siblings: int) -> None:
    """Raise UsageError for more groups on a node at a time than its ranks, or all ranks, make up. ``sizes``: of one group, its
    ranks on each node."""
    topology = Topology.parse(profile.topology)
    on_node = max(len(node) for node in topology.nodes) // min(sizes)
    most = min(on_node, topology.world_size // sum(sizes))
    if siblings > most:
        raise UsageError(
            f"--siblings {siblings}: expected at most {most}: the ranks of {profile.name} ({profile.topology}) make up no more "
            f"groups of {'+'.join(map(str, sizes))} that use one node"
        )


def _shape_within(profile: Profile, cluster: Sequence[int], group: str) -> tuple[int, ...]:
    """Read a shape such as 2x2 or 3+1. Raises UsageError for what is none, or does not fit the profile's cluster."""
    try:
        sizes = tuple(len(node) for node in Topology.parse(group).nodes)
    except TopologyError as error:
        raise UsageError(
            f"--group: expected {', '.join(GROUPS)}, or how many of its ranks each node holds, such as 2x2 or 3+1, got {group!r}"
        ) from error
    if not fits(cluster, sizes):
        raise UsageError(f"--group {group}: such a group does not fit {profile.name} ({profile.topology})")
    if sum(sizes) < 2:
        raise UsageError(
            f"--group {group}: expected a group of two ranks or more, which have something to tell each other"
        )
    return sizes


def words(traffic: Traffic) -> str:
    """Describe the traffic for people."""
    size = format_bytes(traffic.logical_bytes)
    if traffic.collective == "all_to_all":
        return (
            f"all_to_all of {size} a rank, ep {traffic.group_size} over {traffic.link.value}, tp {traffic.replication}"
        )
    where = "one node" if len(traffic.nodes) == 1 else f"nodes of {'+'.join(map(str, traffic.nodes))}"
    return f"{traffic.collective} of {size} over {traffic.group_size} ranks on {where}"
