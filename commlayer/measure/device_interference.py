"""How much exchanges and matrix products slow each other down on a device, each on a stream of its own."""

from __future__ import annotations

from collections.abc import Sequence

from commlayer.measure.device_prober import DeviceProber
from commlayer.profiles.curve import Curve
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Interference
from commlayer.profiles.sweep import interference
from commlayer.scheduler.probes import side_by_side

__all__ = ["beside_products"]

_MOST = 64


def beside_products(prober: DeviceProber, curves: Sequence[Curve], rounds: int, num_bytes: int) -> list[Interference]:
    """Measure the exchange between nodes, and the gather inside them, each beside matrix products that keep the device busy for
    as long. Collective.

    What a communication library moves bytes by, and what multiplies, are the same cores of a GPU, so both are slower. Of the
    sums that follow an exchange nothing is said: they are no product.
    """
    e, t, across = len(prober.grid.ep_ranks), len(prober.grid.tp_ranks), prober.grid.link
    by_key = {(curve.collective, curve.link): curve for curve in curves}
    stages = {Resource.INTER: across} | ({Resource.INTRA: Resource.INTRA} if t > 1 else {})
    found = []
    for stage, link in stages.items():  # of one node the exchange is the first stage too
        step = side_by_side(num_bytes, e, t, across, {stage: 1}).steps[0]
        one_us = by_key[step.op.value, link].at(step.bytes)
        longest = max(one_us, prober.product_us)
        num_steps, num_products = (max(1, min(_MOST, round(longest / each))) for each in (one_us, prober.product_us))
        plan = side_by_side(num_bytes, e, t, across, {stage: num_steps})
        alone = prober.ends(plan, rounds)[stage]
        products = prober.ends_beside(None, rounds, num_products)[Resource.COMPUTE]
        both = prober.ends_beside(plan, rounds, num_products)
        slow_link, slow_products = interference(alone, products, both[stage], both[Resource.COMPUTE])
        found += [
            Interference(link, Resource.COMPUTE, round(slow_link, 3)),
            Interference(Resource.COMPUTE, link, round(slow_products, 3)),
        ]
    return found
