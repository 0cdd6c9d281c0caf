"""How much two resources slow each other down: pairs of links, and on a device each link beside matrix products."""

from __future__ import annotations

from collections.abc import Sequence

from commlayer.measure.device_harness import DeviceHarness
from commlayer.measure.prober import Prober
from commlayer.profiles.curve import Curve
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Interference
from commlayer.profiles.sweep import interference
from commlayer.scheduler.probes import side_by_side

__all__ = ["all_interference", "between_links"]

_PAIRS = (
    (Resource.INTER, Resource.INTRA),
    (Resource.INTER, Resource.DEVICE),
    (Resource.INTRA, Resource.DEVICE),
)
_NUM_BYTES = 4 << 20
_MOST_STEPS = 64
_LEAST_PRODUCT_US, _PRODUCT_ROWS = 500.0, (256, 512, 1024, 2048, 4096, 8192)
"""The matrix products that run beside exchanges are the smallest of these that take so long: as many as are needed of ones
that fill the device."""


def all_interference(prober: Prober, curves: Sequence[Curve], rounds: int) -> list[Interference]:
    """Measure pairs of resources; on a device also exchanges beside matrix products. None in 0 rounds. Collective."""
    if not rounds:
        return []
    pairs = between_links(prober, curves, rounds)
    if isinstance(prober.harness, DeviceHarness):
        pairs += _beside_products(prober, prober.harness, curves, rounds)
    return pairs


def between_links(prober: Prober, curves: Sequence[Curve], rounds: int) -> list[Interference]:
    """Measure pairs of resources together against alone, each kept busy for about the same time. Collective."""
    e, t, link = len(prober.grid.ep_ranks), len(prober.grid.tp_ranks), prober.grid.link
    if t == 1:
        return []
    unit = side_by_side(_NUM_BYTES, e, t, link, {resource: 1 for pair in _PAIRS for resource in pair})
    by_key = {(curve.collective, curve.link): curve for curve in curves}
    alone = {step.resource: by_key[step.op.value, step.resource].at(step.bytes) for step in unit.steps}
    pairs = []
    for a, b in _PAIRS:
        counts = dict(zip((a, b), _balanced(alone[a], alone[b]), strict=True))
        plans = [side_by_side(_NUM_BYTES, e, t, link, c) for c in ({a: counts[a]}, {b: counts[b]}, counts)]
        only_a, only_b, both = (prober.ends(plan, rounds) for plan in plans)
        pairs += _of_pair(a, b, only_a | only_b, both, {a: a, b: b})
    return pairs


def _beside_products(
    prober: Prober, harness: DeviceHarness, curves: Sequence[Curve], rounds: int
) -> list[Interference]:
    """Measure the exchange between nodes, and the gather inside them, each beside matrix products that keep the device busy for
    as long. Collective.

    What a communication library moves bytes by, and what multiplies, are the same cores of a GPU, so both are slower. Of the
    sums that follow an exchange nothing is said: they are no product.
    """
    e, t, across = len(prober.grid.ep_ranks), len(prober.grid.tp_ranks), prober.grid.link
    by_key = {(curve.collective, curve.link): curve for curve in curves}
    stages = {Resource.INTER: across} | ({Resource.INTRA: Resource.INTRA} if t > 1 else {})
    product_us = _product_us(prober, harness)
    pairs = []
    for stage, link in stages.items():  # of one node the exchange is the first stage too
        step = side_by_side(_NUM_BYTES, e, t, across, {stage: 1}).steps[0]
        num_steps, num_products = _balanced(by_key[step.op.value, link].at(step.bytes), product_us)
        plan = side_by_side(_NUM_BYTES, e, t, across, {stage: num_steps})
        alone = prober.ends(plan, rounds) | prober.ends(None, rounds, num_products)
        both = prober.ends(plan, rounds, num_products)
        pairs += _of_pair(stage, Resource.COMPUTE, alone, both, {stage: link, Resource.COMPUTE: Resource.COMPUTE})
    return pairs


def _product_us(prober: Prober, harness: DeviceHarness) -> float:
    """Choose the matrix products that run beside exchanges, and return the time of one, µs. Collective."""
    time_us = 0.0
    for rows in _PRODUCT_ROWS:
        harness.size_products(rows)
        time_us = prober.ends(None, 3, 2)[Resource.COMPUTE] / 2
        if time_us >= _LEAST_PRODUCT_US:
            break
    return time_us


def _balanced(*alone_us: float) -> list[int]:
    """How many of each are to run one after the other, so that all take about as long as the longest one."""
    return [max(1, min(_MOST_STEPS, round(max(alone_us) / each))) for each in alone_us]


def _of_pair(
    a: Resource,
    b: Resource,
    alone: dict[Resource, float],
    both: dict[Resource, float],
    links: dict[Resource, Resource],
) -> list[Interference]:
    """How much ``a`` and ``b`` slow each other down, by when each ended; ``links``: their names in the profile."""
    slow_a, slow_b = interference(alone[a], alone[b], both[a], both[b])
    return [
        Interference(links[a], links[b], round(slow_a, 3)),
        Interference(links[b], links[a], round(slow_b, 3)),
    ]
