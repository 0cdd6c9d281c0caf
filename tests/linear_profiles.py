"""Profiles whose times are bytes over a rate, with slow links, for tests of what is decided where some links are slow."""

from __future__ import annotations

from commlayer.profiles.curve import Curve
from commlayer.profiles.links import Peaks, Resource, SlowLink
from commlayer.profiles.profile import Profile
from commlayer.profiles.topology import Topology
from commlayer.scheduler.legs import OwnCallLeg
from commlayer.scheduler.plan import Op
from commlayer.scheduler.probes import probes

__all__ = ["linear_profile"]

_RATES = {Resource.INTER: 6.25, Resource.INTRA: 500.0, Resource.DEVICE: 2000.0}  # bytes a microsecond and rank
_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26)


def linear_profile(shape: str, *, direct: float = 1.0, ring: float = 1.0, slow: tuple[SlowLink, ...] = ()) -> Profile:
    """Links without latency, as measured where slow pairs make exchanges and rings between nodes take so much longer."""
    curves = []
    for probe in probes(Topology.parse(shape)):
        is_ring = isinstance(probe.leg, OwnCallLeg) and probe.leg.op is not Op.ALL_TO_ALL
        slower = (ring if is_ring else direct) if probe.key[1] is Resource.INTER else 1.0
        unit = Curve(*probe.key, bytes=(1,), time_us=(1.0,))
        share = probe.leg.share_of_link(probe.unit.traffic, unit)
        times = tuple(size * share * slower / _RATES[probe.key[1]] for size in _SIZES)
        curves.append(Curve(*probe.key, bytes=_SIZES, time_us=times))
    peaks = Peaks(_RATES[Resource.INTER] / direct / 1e3, _RATES[Resource.INTRA] / 1e3, _RATES[Resource.DEVICE] / 1e3)
    return Profile.create(
        name="linear",
        kind="emulated",
        source="a test",
        topology=shape,
        peaks=peaks,
        gather="remote",
        curves=curves,
        slow_links=slow,
    )
