"""How much two resources slow each other down: links, and on a device each link beside products.

What a communication library moves bytes by, and what multiplies matrices, are the same cores of a
GPU, so both are slower. Of the sums that follow an exchange nothing is said: they are no product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commlayer.measure.device_harness import DeviceHarness
from commlayer.measure.prober import Prober
from commlayer.profiles.curve import Curve
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Interference
from commlayer.profiles.sweep import interference
from commlayer.scheduler.probes import side_by_side

__all__ = ["measure_interference"]

_OF_LINKS = (
    (Resource.INTER, Resource.INTRA),
    (Resource.INTER, Resource.DEVICE),
    (Resource.INTRA, Resource.DEVICE),
)
_BESIDE_PRODUCTS = ((Resource.INTER, Resource.COMPUTE), (Resource.INTRA, Resource.COMPUTE))
_NUM_BYTES = 4 << 20
_MOST_STEPS = 64
_LEAST_PRODUCT_US, _PRODUCT_ROWS = 500.0, (256, 512, 1024, 2048, 4096, 8192)
"""The matrix products that run beside exchanges are the smallest of these that take so long: as
many as are needed of ones that fill the device."""


def measure_interference(prober: Prober, curves: Sequence[Curve], rounds: int) -> list[Interference]:
    """Measure pairs of resources together against alone, each kept busy for about the same time.

    None in 0 rounds. Collective.
    """
    if not rounds:
        return []
    grid, harness = prober.grid, prober.harness
    e, t, across = len(grid.ep_ranks), len(grid.tp_ranks), grid.link
    names = {resource: resource for resource in Resource} | {Resource.INTER: across}
    by_key = {(curve.collective, curve.link): curve for curve in curves}
    pairs: tuple[tuple[Resource, Resource], ...] = _OF_LINKS if t > 1 else ()
    product_us = 0.0
    if isinstance(harness, DeviceHarness):
        pairs += _BESIDE_PRODUCTS if t > 1 else _BESIDE_PRODUCTS[:1]
        dtype = torch.bfloat16 if harness.device.type == "cuda" else torch.float32
        for rows in _PRODUCT_ROWS:
            with harness.on():
                harness.factors = [torch.ones(rows, rows, dtype=dtype, device=harness.device) for _ in range(3)]
            product_us = prober.ends(None, 3, 2)[Resource.COMPUTE] / 2
            if product_us >= _LEAST_PRODUCT_US:
                break

    def alone_us(resource: Resource) -> float:
        if resource is Resource.COMPUTE:
            return product_us
        step = side_by_side(_NUM_BYTES, e, t, across, {resource: 1}).steps[0]
        return by_key[step.op.value, names[resource]].at(step.bytes)

    def ends(counts: dict[Resource, int]) -> dict[Resource, float]:
        steps = dict(counts)
        num_products = steps.pop(Resource.COMPUTE, 0)
        plan = side_by_side(_NUM_BYTES, e, t, across, steps) if steps else None
        return prober.ends(plan, rounds, num_products)

    results = []
    for a, b in pairs:
        times_us = {resource: alone_us(resource) for resource in (a, b)}
        longest_us = max(times_us.values())
        counts = {
            resource: max(1, min(_MOST_STEPS, round(longest_us / time_us))) for resource, time_us in times_us.items()
        }
        only_a, only_b, both = ends({a: counts[a]}), ends({b: counts[b]}), ends(counts)
        slow_a, slow_b = interference(only_a[a], only_b[b], both[a], both[b])
        results += [
            Interference(names[a], names[b], round(slow_a, 3)),
            Interference(names[b], names[a], round(slow_b, 3)),
        ]
    return results
