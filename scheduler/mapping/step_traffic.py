"""Every collective of a step with its price, for people to read."""

from __future__ import annotations

from dataclasses import replace

from commlayer.scheduler.mapping.calls import SEND_RECV, Exchange, whole_step
from commlayer.scheduler.mapping.job import Setup
from commlayer.scheduler.mapping.layers import LayerBuilder, group_nodes
from commlayer.scheduler.mapping.result import Traffics

__all__ = ["traffics_of"]


def traffics_of(builder: LayerBuilder, setup: Setup, stage: int) -> tuple[Traffics, ...]:
    """Every collective of a step of one rank, equal ones together, in order of first use."""
    counted: dict[Exchange, int] = {}
    for exchange in whole_step(builder.job, setup, builder.software, stage=stage):
        key = replace(exchange, count=1)
        counted[key] = counted.get(key, 0) + exchange.count
    return tuple(_traffic(builder, setup, exchange, count) for exchange, count in counted.items())


def _traffic(builder: LayerBuilder, setup: Setup, exchange: Exchange, count: int) -> Traffics:
    nodes = group_nodes(builder.cluster, setup, exchange)
    name, axis, lane, collective, size = (
        exchange.name,
        exchange.axis,
        exchange.lane,
        exchange.collective,
        exchange.logical_bytes,
    )
    if collective == SEND_RECV:
        us = builder.pricer.us(SEND_RECV, size, nodes)
        return Traffics(
            name, axis, lane, collective, size, nodes, count, us, SEND_RECV, "inter" if len(nodes) > 1 else "intra"
        )
    decision = builder.pricer.decide(collective, size, nodes, lane if builder.software.lanes else "")
    us, plan, link = decision.predicted_us, decision.plan.name, decision.bottleneck.value
    return Traffics(name, axis, lane, collective, size, nodes, count, us, plan, link)
