"""A made-up cluster with known times, for tests of what plans on a profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from commlayer.profiles.curve import Curve
from commlayer.profiles.links import Peaks, Resource
from commlayer.profiles.profile import Interference, Profile

__all__ = ["synthetic_profile"]

_SIZES = tuple(4**k for k in range(3, 15))
_LATENCY_US = {"inter": 100.0, "intra": 50.0, "device": 5.0}
_BYTES_PER_US = {"inter": 50.0, "intra": 400.0, "device": 2000.0}


def synthetic_profile(
    latency_us: Mapping[str, float] | None = None,
    bytes_per_us: Mapping[str, float] | None = None,
    *,
    nodes: int = 2,
    ranks_per_node: int = 4,
    gather: str = "remote",
    interference: Iterable[Interference] = (),
    error: float | None = None,
    name: str = "synthetic",
) -> Profile:
    """Make a profile of nodes × ranks_per_node whose times are latency + bytes / rate, sampled at powers of four.

    ``latency_us`` and ``bytes_per_us`` override single links ("inter", "intra", "device"). ``error`` is the hold-out error
    of every curve. It describes no machine: use it to test decisions, never to make them.
    """
    latency = _LATENCY_US | dict(latency_us or {})
    rate = _BYTES_PER_US | dict(bytes_per_us or {})

    def curve(collective: str, link: Resource, group_size: int) -> Curve:
        times = tuple(latency[link.value] + size / rate[link.value] for size in _SIZES)
        return Curve(collective, link, group_size, _SIZES, times, holdout_error=error)

    return Profile.create(
        name=name,
        kind="measured",
        source="made up by commlayer.testing",
        topology=f"{nodes}x{ranks_per_node}",
        peaks=Peaks(rate["inter"] / 1e3, rate["intra"] / 1e3, rate["device"] / 1e3),
        gather=gather,
        curves=(
            curve("all_to_all", Resource.INTER, nodes),
            curve("all_gather", Resource.INTRA, ranks_per_node),
            curve("copy", Resource.DEVICE, 1),
        ),
        interference=tuple(interference),
    )
