"""Links inside a node as a profile of it has measured them, in the form in which links are declared:
what calls reach of a peak. So nodes like the measured one can be joined by a network that nobody has
measured (:meth:`commlayer.scheduler.mapping.cluster.Cluster.joined`)."""

from __future__ import annotations

from itertools import pairwise

from commlayer.profiles.curve import Curve
from commlayer.profiles.errors import UsageError
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile
from commlayer.scheduler.mapping.declared_links import MEMORY, NVLINK, Link, Points

__all__ = ["link_in_node", "memory_link"]

_RINGS = ("all_gather_single", "reduce_scatter_single", "all_gather")
_MESSAGES = ("all_to_all_v", "all_to_all_single", "all_to_all")


def link_in_node(profile: Profile, ranks: int) -> Link:
    """The links between ``ranks`` ranks of a node, by the profile's curves of a group of all of them.

    The times of one hop and of one message more, which one group does not show, are those declared
    for NVLink.

    Raises:
        UsageError: the profile has no times of a ring, or none of messages, over such a group.
    """
    rings, messages = (_first(profile, names, ranks) for names in (_RINGS, _MESSAGES))
    peak = max(profile.peaks.intra_gbps, *(rate for each in (rings, messages) for rate in _rates(each)))
    return Link(
        ring=_points(rings, peak),
        messages=_points(messages, peak),
        gbps=peak,
        latency_us=min(rings.time_us[0], messages.time_us[0]),
        hop_us=NVLINK.hop_us,
        message_us=NVLINK.message_us,
        measured_hops=ranks - 1,
        source=f"{profile.name}: {profile.source}",
    )


def memory_link(profile: Profile) -> tuple[Link, float]:
    """The rates of copies in memory as measured, and their peak in GB/s; without copies in the
    profile the declared ones, and 0."""
    copies = profile.find("copy", Resource.DEVICE, 1)
    if copies is None:
        return MEMORY, 0.0
    peak = max(profile.peaks.device_gbps, *_rates(copies))
    points = _points(copies, peak)
    latency_us = copies.time_us[0]
    return Link(ring=points, messages=points, gbps=peak, latency_us=latency_us, source=profile.source), peak


def _first(profile: Profile, names: tuple[str, ...], ranks: int) -> Curve:
    for name in names:
        curve = profile.find(name, Resource.INTRA, ranks)
        if curve is not None:
            return curve
    raise UsageError(
        f"{profile.name!r} has no times of {' or '.join(names)} among the {ranks} ranks of its node, from which "
        "calls over several nodes follow: measure them with commlayer measure, or import them"
    )


def _sent(curve: Curve, size: int) -> float:
    """Bytes that one rank sends in a call of S bytes: its own part stays; a copy sends all."""
    return size if curve.group_size == 1 else size * (curve.group_size - 1) / curve.group_size


def _rates(curve: Curve) -> list[float]:
    return [_sent(curve, size) / us / 1e3 for size, us in zip(curve.bytes, curve.time_us, strict=True)]


def _points(curve: Curve, peak_gbps: float) -> Points:
    """(bytes that a rank sends, fraction of the peak); of sizes that take equally long the largest."""
    samples = [
        (_sent(curve, size), us) for size, us in zip(curve.bytes, curve.time_us, strict=True) if _sent(curve, size) >= 1
    ]
    kept = [before for before, after in pairwise(samples) if after[1] > before[1] * (1 + 1e-9)] + samples[-1:]
    return tuple((sent, sent / us / 1e3 / peak_gbps) for sent, us in kept)
