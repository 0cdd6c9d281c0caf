"""Decisions: which plan a profile and a policy choose for a traffic, what it is predicted to take, and the reason."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from fence_cases import Case, Facts
from fence_profiles import profiles

from commlayer.profiles import Profile
from commlayer.profiles.errors import CommlayerError
from commlayer.profiles.links import Resource
from commlayer.scheduler import Gather, LanePolicy, Planner, Policy, Scaling, Strategy, Traffic, Wire, WireFormat

__all__ = ["cases"]

NATIVE = Wire(WireFormat.NATIVE)
SIZES = (
    *(1, 64, 1000, 4096, 12_345, 65_536, 250_000, 1 << 20, 3_000_001, 1 << 24),
    *(50_000_000, 1 << 27, 1 << 28, 1_000_000_000),
)
POLICIES = {
    "": Policy(),
    "tolerance 0": Policy(tolerance=0.0),
    "tolerance 0.3": Policy(tolerance=0.3),
    "no interference": Policy(interference=False),
    "4 chunks": Policy(max_chunks=4),
    "slices of 64 KiB": Policy(min_slice_bytes=1 << 16),
    "from 0 bytes": Policy(min_bytes=0),
    "from 1 MiB": Policy(min_bytes=1 << 20),
    "whole gather": Policy(gather=Gather.WHOLE),
    "remote gather": Policy(gather=Gather.REMOTE),
    "flat": Policy(strategies=(Strategy.FLAT,)),
    "not flat": Policy(strategies=tuple(each for each in Strategy if each is not Strategy.FLAT)),
    "whole plans": Policy(strategies=(Strategy.FLAT, Strategy.DIRECT, Strategy.HIERARCHICAL, Strategy.LEADERS)),
    "fine lanes": Policy(lanes=LanePolicy(efficiency=0.6, most_loss=0.5)),
}
BF16, INT8 = Wire(WireFormat.BF16), Wire(WireFormat.INT8, 1024, Scaling.BLOCK)
E4M3, E5M2 = Wire(WireFormat.FP8_E4M3, 256, Scaling.BLOCK), Wire(WireFormat.FP8_E5M2, 1024)
CHANNELS = Wire(WireFormat.FP8_E4M3, 128, Scaling.CHANNEL)
WIRES = {
    "": ((NATIVE,), 0),
    "native+bf16 of float32": ((NATIVE, BF16), 4),
    "bf16 of float32": ((BF16,), 4),
    "native+int8 of float32": ((NATIVE, INT8), 4),
    "native+fp8_e4m3 of bfloat16": ((NATIVE, E4M3), 2),
    "native+bf16+fp8_e5m2 of float32": ((NATIVE, BF16, E5M2), 4),
    "fp8_e4m3 by channels of bfloat16": ((CHANNELS,), 2),
}
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all_v", "broadcast", "reduce_scatter")
LANES = ("", "", "ep", "pp", "cp", "dp")
_PER_GROUP = 110
"""Decisions of each profile and collective over nodes."""
_UNPRICED = 12
"""The same of a profile without the curves of groups, which can price few of them."""
_PER_GRID = 110
"""Decisions of each profile about tokens that are replicated."""


class _Shape(NamedTuple):
    """A group: its ranks on each node, how many such groups share a node (0: all of them), and its links' rates."""

    nodes: tuple[int, ...]
    siblings: int = 0
    rates: tuple[float, ...] = ()
    slow_pairs: tuple[tuple[int, int, float], ...] = ()


def cases() -> list[Case]:
    """Every case, in a fixed order."""
    found: dict[str, Case] = {}
    for profile in profiles().values():
        of_profile = [_of_replicated_tokens(profile), *(_over_nodes(profile, each) for each in COLLECTIVES)]
        found |= {case.key: case for each in of_profile for case in each}
    return list(found.values())


def _of_replicated_tokens(profile: Profile) -> Iterator[Case]:
    between = [
        curve.group_size
        for curve in profile.curves
        if curve.link is Resource.INTER and curve.collective == "all_to_all"
    ]
    inside = [
        curve.group_size
        for curve in profile.curves
        if curve.link is Resource.INTRA and curve.collective == "all_gather"
    ]
    groups = [(e, t, Resource.INTER) for e in between for t in inside] * 4
    groups += [(3, 2, Resource.INTER), (2, 1, Resource.INTER), (1, 1, Resource.INTRA), (max(inside), 1, Resource.INTRA)]
    for (e, t, link), size, policy in _some(f"{profile.name} replicated", [groups, SIZES, list(POLICIES)], _PER_GRID):
        traffic = Traffic(-(-size // e) * e, e, t, link)
        key = f"{profile.name} | {traffic} | {policy}"
        yield Case(key, partial(_decided, profile, POLICIES[policy], None, traffic))


def _over_nodes(profile: Profile, collective: str) -> Iterator[Case]:
    grid = [_shapes(profile), SIZES, list(POLICIES), list(WIRES), LANES, (False, False, True)]
    can_price = any(curve.collective == "all_to_all_v" for curve in profile.curves)
    count = _PER_GROUP if can_price else _UNPRICED
    for shape, size, policy, wires, lane, is_ordered in _some(f"{profile.name} {collective}", grid, count):
        is_sum = collective in ("all_reduce", "reduce_scatter")
        formats, element_bytes = WIRES[wires if collective != "broadcast" else ""]
        traffic = Traffic(
            _whole(size, collective, sum(shape.nodes), element_bytes),
            sum(shape.nodes),
            1,
            Resource.INTER if len(shape.nodes) > 1 else Resource.INTRA,
            collective,
            shape.nodes,
            is_ordered and is_sum,
            formats,
            element_bytes,
            lane,
            shape.rates,
            shape.slow_pairs,
        )
        words = [f"{shape.siblings} siblings"] if shape.siblings else []
        words += [f"rates {shape.rates}"] if shape.rates else []
        words += [f"slow pairs {shape.slow_pairs}"] if shape.slow_pairs else []
        words += [f"lane {lane}"] if lane else []
        words += [f"as {wires}"] if element_bytes else []
        key = f"{profile.name} | {traffic} | {', '.join(words)} | {policy}"
        yield Case(key, partial(_decided, profile, POLICIES[policy], shape, traffic))


def _shapes(profile: Profile) -> Sequence[_Shape]:
    """The groups on a profile's cluster, and one that does not fit it."""
    of_two = [
        _Shape((4, 4)),
        _Shape((2, 2)),
        _Shape((2, 2), 1),
        _Shape((1, 1)),
        _Shape((4,)),
        _Shape((2,)),
        _Shape((3, 1)),
    ]
    if "2x" in profile.topology:
        return [*of_two, *of_two[:5], _Shape((4, 4), rates=(1.0, 0.5)), _Shape((4, 4, 4)), _Shape((8, 8)), _Shape((1,))]
    if profile.topology == "1x8":
        return [_Shape((8,)), _Shape((4,)), _Shape((3,)), _Shape((2,), 2), _Shape((1,)), _Shape((4, 4))]
    if profile.topology == "4x4":
        slow = ((0, 2, 0.3),)
        wide = [_Shape((4,) * 4), _Shape((4,) * 4, rates=(1.0, 0.4, 1.0, 0.8)), _Shape((4,) * 4, slow_pairs=slow)]
        narrow = [
            _Shape((1,) * 4),
            _Shape((2,) * 4),
            _Shape((4, 4, 2)),
            _Shape((1,) * 4, slow_pairs=((0, 1, 0.05), *slow)),
        ]
        return [*wide, *narrow, *of_two[:5]]
    if profile.topology == "6x2":
        slow_ways = ((0, 1, 0.2), (2, 5, 0.4))
        return [
            _Shape((2,) * 6),
            _Shape((2,) * 6, slow_pairs=slow_ways),
            _Shape((1,) * 6),
            _Shape((2,) * 3),
            _Shape((2, 1)),
        ]
    return [_Shape((4, 2, 1)), _Shape((4, 2)), _Shape((2, 1)), _Shape((1, 1, 1)), _Shape((2, 2), 1), _Shape((4,))]


def _whole(size: int, collective: str, group_size: int, element_bytes: int) -> int:
    """The size, or the next one above it that ranks can share: whole rows of encoded elements, and a block for each rank."""
    unit = 128 * 1024 * group_size if element_bytes == 2 else 1024 * max(1, element_bytes) * group_size
    if element_bytes:
        return -(-size // unit) * unit
    return -(-size // group_size) * group_size if collective in ("all_gather", "reduce_scatter") else size


def _some(seed: str, grid: Sequence[Sequence[Any]], count: int) -> Iterator[tuple[Any, ...]]:
    """Draw so many places of a grid, each of which is another one; always the same ones for a seed."""
    for number in random.Random(seed).sample(range(math.prod(map(len, grid))), count):
        place = []
        for values in grid:
            number, index = divmod(number, len(values))
            place.append(values[index])
        yield tuple(place)


def _decided(profile: Profile, policy: Policy, shape: _Shape | None, traffic: Traffic) -> Facts:
    try:
        planner = Planner(profile, policy)
        if shape is not None:
            planner = planner.of_group(shape.nodes, shape.siblings, min(shape.rates, default=0.0))
        decision = planner.decide(traffic)
    except CommlayerError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "plan": decision.plan.name,
        "us": decision.predicted_us,
        "reason": decision.reason(),
        "candidates": len(decision.candidates),
        "all candidates, us": sum(each.total_us for each in decision.candidates),
        "tolerance": decision.tolerance,
    } | ({"unpriced": decision.unpriced} if decision.unpriced else {})
