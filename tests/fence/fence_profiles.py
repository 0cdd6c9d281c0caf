"""The profiles by which the fence decides: those that are shipped, and made-up ones with every curve that a plan may ask for."""

from __future__ import annotations

from collections.abc import Sequence

from commlayer.profiles import Profile, load_profile
from commlayer.profiles.curve import Curve
from commlayer.profiles.links import COLLECTIVES, Peaks, Resource, SlowLink
from commlayer.profiles.profile import Interference

__all__ = ["profiles", "small"]

_SHIPPED = ("emulated-2x4", "emulated-2x4-8to1", "emulated-2x8", "h100-eos-2x8", "h800-2x8", "monta-a800-2x8")
_SIZES = tuple(4**exponent for exponent in range(3, 15))
_LATENCY_US = {Resource.INTER: 60.0, Resource.INTRA: 11.0, Resource.DEVICE: 1.5}
_BYTES_PER_US = {Resource.INTER: 25.0, Resource.INTRA: 900.0, Resource.DEVICE: 6000.0}


def profiles() -> dict[str, Profile]:
    """Every profile, by its name."""
    emulated = load_profile("emulated-2x4")
    found = [
        *map(load_profile, _SHIPPED),
        emulated.replace(name="emulated-2x4 from 64 KiB", plan_from_bytes=1 << 16),
        _made_up("made-up 1x8", "1x8", (8,)),
        _made_up("made-up 4x4", "4x4", (4, 4, 4, 4), error=0.06, interference=True),
        _made_up("made-up 6x2", "6x2", (2,) * 6, latency_us=900.0),
        _made_up("made-up 4+2+1", "4+2+1", (4, 2, 1), error=0.02),
        _made_up("made-up 4x4 whole", "4x4", (4, 4, 4, 4), latency_us=5.0, gather="whole"),
        _made_up(
            "made-up 4x4 slow",
            "4x4",
            (4, 4, 4, 4),
            error=0.03,
            slow=(SlowLink((1,), 0.4), SlowLink((0, 2), 0.25)),
        ),
    ]
    return {profile.name: profile for profile in found}


def small() -> Profile:
    """A profile of two nodes of two ranks, of small jobs."""
    return _made_up("made-up 2x2", "2x2", (2, 2), error=0.04)


def _made_up(
    name: str,
    topology: str,
    nodes: tuple[int, ...],
    *,
    latency_us: float = _LATENCY_US[Resource.INTER],
    error: float | None = None,
    gather: str = "remote",
    interference: bool = False,
    slow: Sequence[SlowLink] = (),
) -> Profile:
    """A profile whose times are latency + bytes / rate; each collective and size of group has a rate of its own."""
    latency = _LATENCY_US | {Resource.INTER: latency_us}
    groups = {
        Resource.INTER: sorted({len(nodes), sum(nodes)} - {1}) if len(nodes) > 1 else [],
        Resource.INTRA: sorted({2, max(nodes)}),
        Resource.DEVICE: [1],
    }

    def curve(place: int, collective: str, link: Resource, group_size: int) -> Curve:
        rate = _BYTES_PER_US[link] * (1 + 0.07 * place) / (1 + 0.05 * group_size)
        start = latency[link] * (1 + 0.03 * place)
        times = tuple(start + size / rate for size in _SIZES)
        return Curve(collective, link, group_size, _SIZES, times, holdout_error=error)

    local = ("copy", "reduce")
    curves = [
        curve(place, collective, link, group_size)
        for place, collective in enumerate(COLLECTIVES)
        for link, sizes in groups.items()
        for group_size in sizes
        if (link is Resource.DEVICE) is (collective in local or collective.startswith(("encode_", "decode_")))
    ]
    pairs = (
        (Resource.INTER, Resource.INTRA, 1.3),
        (Resource.INTRA, Resource.INTER, 1.1),
        (Resource.DEVICE, Resource.INTRA, 1.5),
    )
    return Profile.create(
        name=name,
        kind="measured",
        source="made up by tests/fence",
        topology=topology,
        peaks=Peaks(0.1, 1.0, 8.0),
        gather=gather,
        curves=curves,
        interference=[Interference(*pair) for pair in pairs] if interference else (),
        slow_links=slow,
    )
