"""Programs for simulated devices: every plan that applies to a group, called again and again, with other data each time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from commlayer.profiles.errors import PlanError
from commlayer.profiles.links import Resource
from commlayer.scheduler.group_strategies import build
from commlayer.scheduler.plan import Gather, Plan, Span, Strategy
from commlayer.scheduler.rails import exchange_over
from commlayer.scheduler.traffic import Traffic
from commlayer.scheduler.wire import NATIVE, Wire, WireFormat
from simulated.plan_calls import DeviceCall

__all__ = [
    "DEVICE_COLLECTIVES",
    "call_of",
    "every_program",
    "exchanges",
    "nodes_of",
    "plans_of",
    "replicated",
    "traffic_of",
    "turns",
]

DEVICE_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
"""The collectives whose plans go over nodes, beside exchanges."""
_TURNS = 4
_WIRES = (NATIVE, Wire(WireFormat.BF16, 16), Wire(WireFormat.FP8_E4M3, 16))
_WAYS = (
    (Strategy.DIRECT, 1, 1),
    (Strategy.DIRECT, 3, 1),
    (Strategy.HIERARCHICAL, 1, 1),
    (Strategy.LEADERS, 1, 1),
    (Strategy.PIPELINED, 3, 1),
    (Strategy.PIPELINED, 2, 3),
    (Strategy.RING, 1, 1),
    (Strategy.RING, 2, 1),
)


def nodes_of(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node, where nodes hold so many."""
    edges = [0, *accumulate(shape)]
    return tuple(tuple(range(start, stop)) for start, stop in pairwise(edges))


def traffic_of(collective: str, shape: tuple[int, ...], wire: Wire = NATIVE, lane: str = "") -> Traffic:
    """320 bytes for each rank: blocks of whole rows, and of whole cells of the judge of races."""
    size = sum(shape)
    return Traffic(
        size * 320,
        size,
        1,
        Resource.INTER if len(shape) > 1 else Resource.INTRA,
        collective,
        shape,
        wires=(wire,),
        element_bytes=4,
        lane=lane,
    )


def plans_of(collective: str, shape: tuple[int, ...]) -> Iterator[Plan]:
    """Yield the plans that apply, by messages: flat is one call of the communicator's own."""
    for wire in _WIRES:
        for lane in ("", "dp"):
            for strategy, chunks, pieces in _WAYS:
                traffic = traffic_of(collective, shape, wire, lane)
                if strategy is Strategy.RING and len(shape) > 2:
                    traffic = replace(traffic, slow_pairs=((0, 1, 0.25),))
                try:
                    yield build(traffic, strategy, chunks, wire=wire, pieces=pieces)
                except PlanError:
                    continue


def call_of(plan: Plan, seed: int) -> DeviceCall:
    """A call of a plan of :func:`plans_of`."""
    is_native = plan.wire.is_native
    dtype = torch.int32 if is_native else torch.float32
    root = seed % plan.traffic.group_size if plan.traffic.collective == "broadcast" else 0
    return DeviceCall("whole" if is_native else "encoded", plan, nodes_of(plan.traffic.nodes), dtype, root, seed=seed)


def _exchange(kind: str, plan: Plan, shape: tuple[int, ...], seed: int) -> DeviceCall:
    """Rows of 64 bytes from everybody to everybody, where the plan's span reaches, and none between some."""
    nodes, size = nodes_of(shape), sum(shape)
    node_of = {member: node for node, members in enumerate(nodes) for member in members}

    def rows(sender: int, receiver: int) -> int:
        return 64 * ((3 * sender + 5 * receiver + seed) % 4) if reaches(sender, receiver) else 0

    def reaches(sender: int, receiver: int) -> bool:
        if kind != "over" or sender == receiver:
            return True
        near = node_of[sender] == node_of[receiver]
        return near if plan.steps[0].leg.span is Span.NODE else not near and sender % 2 == receiver % 2

    splits = tuple(
        (tuple(rows(me, other) for other in range(size)), tuple(rows(other, me) for other in range(size)))
        for me in range(size)
    )
    dtype = torch.int32 if plan.wire.is_native else torch.float32
    return DeviceCall(kind, plan, nodes, dtype, splits=splits, seed=seed)


def replicated() -> Iterator[list[DeviceCall]]:
    """The all_to_all of replicated tokens, by every plan."""
    for e, t in ((2, 2), (2, 3), (3, 2)):
        traffic = Traffic(e * t * 192, e, t, Resource.INTER)
        for gather in Gather:
            for plan in (
                build(traffic, Strategy.HIERARCHICAL, gather=gather),
                build(traffic, Strategy.PIPELINED, 3, gather),
                build(traffic, Strategy.PIPELINED_COPY, 3, gather),
            ):
                yield turns(DeviceCall("replicated", plan, nodes_of((t,) * e)))


def turns(call: DeviceCall) -> list[DeviceCall]:
    """The call again and again, each time with other data and another root."""
    n = call.size
    return [replace(call, seed=turn, root=(call.root + turn) % n if call.root else 0) for turn in range(_TURNS)]


def exchanges() -> Iterator[list[DeviceCall]]:
    """Exchange rows: in two levels, in their own format between the ranks of a node and of a rail, in others between all."""
    for shape in ((2, 2), (3,), (3, 3), (2, 1, 3)):
        if len(shape) > 1:
            plan = build(traffic_of("all_to_all_v", shape), Strategy.HIERARCHICAL)
            yield [_exchange("split", plan, shape, turn) for turn in range(_TURNS)]
        for span in (Span.NODE, Span.RAIL) if len(set(shape)) == 1 and len(shape) > 1 else ():
            plan = exchange_over(span, shape, 4096)
            yield [_exchange("over", plan, shape, turn) for turn in range(_TURNS)]
        for wire in _WIRES[1:] if len(set(shape)) == 1 else ():
            plan = build(traffic_of("all_to_all_v", shape, wire), Strategy.DIRECT, wire=wire)
            yield [_exchange("encoded exchange", plan, shape, turn) for turn in range(_TURNS)]


def every_program(shape: tuple[int, ...]) -> Iterator[list[DeviceCall]]:
    """Programs of a group on nodes of that shape: every collective by every plan that applies."""
    for collective in DEVICE_COLLECTIVES:
        for number, plan in enumerate(plans_of(collective, shape)):
            yield turns(call_of(plan, number))
