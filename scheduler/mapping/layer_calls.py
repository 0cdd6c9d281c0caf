"""Prices of the calls of a layer: each by the plan that the run time would choose, or by a
dispatcher's kernels.

Kernels hold multiprocessors while they send (mapping/dispatch_kernels.py), which what is computed
beside them lacks.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from commlayer.profiles.errors import PlanError
from commlayer.scheduler.group_strategies import build
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.dispatch_kernels import (
    MOST_TAKEN,
    NCCL_MESSAGE_MULTIPROCESSORS,
    NCCL_MOVES,
    NCCL_MULTIPROCESSORS,
)
from commlayer.scheduler.mapping.dispatch_levels import DispatchLevels
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.pricing import Pricer
from commlayer.scheduler.mapping.software import Software
from commlayer.scheduler.mapping.step_collectives import SEND_RECV, StepCollective, layer_backward, layer_forward
from commlayer.scheduler.mapping.token_routes import TokenRoutes
from commlayer.scheduler.plan import Plan, Span, Strategy
from commlayer.scheduler.programs import PlannedCall
from commlayer.scheduler.traffic import Traffic, link_over

__all__ = ["AGAIN", "ExchangePrice", "LayerCalls", "group_nodes"]

AGAIN = "_again"
"""The end of the name of what is sent again for the backward pass."""
_PARTS = {
    "counts": "dispatch",
    "dispatch": "dispatch",
    "gather_experts": "dispatch",
    "scatter_experts": "combine",
    "combine": "combine",
    "balance": "dispatch",
    "gradients": "gradients",
    "parameters": "parameters",
    "dp": "gradients",
}
"""The part as which a call counts, by its place, or by its lane; others as their lane."""
_LEAST_OF_CHUNKS = 0.9
"""The part of an exchange's time that its chunks take together at least."""


class ExchangePrice(NamedTuple):
    """The time of one call over ``nodes``, µs, with its plan: ``name`` and busiest ``link`` in
    words. ``is_whole``: its time is not its steps'."""

    nodes: tuple[int, ...]
    us: float
    plan: Plan
    name: str
    link: str
    is_whole: bool = False


class LayerCalls:
    """Prices the calls of layers of one job on one cluster."""

    def __init__(self, job: Job, cluster: Cluster, software: Software, pricer: Pricer) -> None:
        self.job, self.cluster, self.software, self.pricer = job, cluster, software, pricer
        self._known_routes: dict[tuple[object, ...], TokenRoutes | None] = {}
        self._priced: dict[tuple[object, ...], tuple[Any, ...]] = {}
        """The fields of calls that many mappings make, by exchange, nodes and ways of tokens."""

    def call(self, setup: Setup, exchange: StepCollective) -> PlannedCall:
        """The call of an exchange (once; of messages all), by the plan that the run time would
        choose."""
        key = (exchange, group_nodes(self.cluster, setup, exchange), self.routes(setup))
        fields = self._priced.get(key)
        if fields is None:
            price = self.price(setup, exchange)
            us = price.us * (exchange.count if exchange.collective == SEND_RECV else 1)
            part = _PARTS.get(exchange.place) or _PARTS.get(exchange.lane, exchange.lane)
            profile, gpu_shares = self.cluster.profile_of(price.nodes), self._taken(price.nodes, setup, exchange, us)
            durations_us = (us,) if price.is_whole else None
            fields = (price.plan, exchange.lane, exchange.axis, durations_us, profile, us, part, *gpu_shares)
            self._priced[key] = fields
        return PlannedCall(exchange.name, *fields)

    def price(self, setup: Setup, exchange: StepCollective) -> ExchangePrice:
        """The price of one call of an exchange."""
        nodes = group_nodes(self.cluster, setup, exchange)
        collective, size = exchange.collective, exchange.logical_bytes
        routes = self.routes(setup)
        link = link_over(nodes).value
        if collective == SEND_RECV:
            # a ring's rounds together as one call: what every rank has comes to every other
            plan = build(Traffic.on_nodes("all_gather", size * sum(nodes), nodes), Strategy.FLAT)
            return ExchangePrice(nodes, self.pricer.us(SEND_RECV, size, nodes), plan, SEND_RECV, link, True)
        if routes is not None and routes.takes(exchange):
            plan = build(Traffic.on_nodes(collective, size, nodes), Strategy.FLAT)
            return ExchangePrice(nodes, routes.call_us(exchange, self.cluster), plan, routes.kernels.name, link, True)
        if exchange.over is not Span.GROUP:
            plan, us = self.pricer.over(exchange.over, size, nodes)
            return ExchangePrice(nodes, us, plan, plan.steps[0].leg.name, plan.steps[0].resource.value)
        lane = exchange.lane if self.software.lanes else ""  # who yields to nobody is not cut for it
        decision = self.pricer.decide(collective, size, nodes, lane)
        plan = decision.plan
        return ExchangePrice(nodes, decision.predicted_us, plan, plan.name, decision.bottleneck.value)

    def _taken(self, nodes: tuple[int, ...], setup: Setup, exchange: StepCollective, us: float) -> tuple[float, float]:
        """The parts of the GPU's multiprocessors, and of its memory's rate, that a call's kernels
        take."""
        gpu, routes = self.cluster.gpu, self.routes(setup)
        if routes is not None and routes.takes(exchange):
            number = routes.kernels.multiprocessors(len(nodes))
            # A row that crosses is read, put into a buffer, read by the card, written by the other one and read there; one that
            # is passed on is written there, read and put into its place.
            moved = (5 * routes.network_rows + 3 * routes.sent_rows) * routes.bytes_of(exchange)
        else:
            is_message = exchange.collective == SEND_RECV
            number = NCCL_MESSAGE_MULTIPROCESSORS if is_message else NCCL_MULTIPROCESSORS
            ranks = sum(nodes)
            moved = NCCL_MOVES * exchange.logical_bytes * (exchange.count if is_message else 1 - 1 / ranks)
        moving_us = moved / (gpu.memory_gbps * gpu.memory * 1e3)
        return min(number / gpu.multiprocessors, MOST_TAKEN), min(moving_us / us, MOST_TAKEN) if us else 0.0

    def are_posted(self, setup: Setup) -> bool:
        """Whether the software's kernels send tokens to other nodes through a thread of the host."""
        routes = self.routes(setup)
        return routes is not None and routes.are_posted(self.cluster)

    def routes(self, setup: Setup) -> TokenRoutes | None:
        """The ways of tokens by the software's kernels; None where they go by calls."""
        kernels = self.software.kernels
        if kernels is None:
            return None
        degrees = (setup.tp, setup.cp, setup.pp, setup.ep, setup.etp)
        key = (*degrees, setup.micro_batch, setup.exchange, setup.folded, setup.gpus)
        if key not in self._known_routes:
            nodes = self.cluster.nodes_of(setup.layout("ep"), setup.gpus)
            self._known_routes[key] = TokenRoutes.of(kernels, self.job, setup, nodes, self.software)
        return self._known_routes[key]

    def least_exchange_us(self, setup: Setup) -> float:
        """Bound the time for which a layer's tokens are on their way to experts and back, forward
        and backward, µs: of the flat exchange and of that in two levels the shorter one, and a part
        of it, as chunks may have faster plans than a whole."""
        passes = (layer_forward(self.job, setup, self.software), layer_backward(self.job, setup, self.software))
        exchanges = tuple(each for calls in passes for each in calls if each.lane == "ep")
        if (routes := self.routes(setup)) is not None:
            return _LEAST_OF_CHUNKS * sum(self.call(setup, each).us for each in routes.replaced(exchanges))
        found = sum(self.call(setup, each).us for each in exchanges)
        nodes = self.cluster.nodes_of(setup.layout("ep"), setup.gpus)
        levels = DispatchLevels.of(self.job, setup, self.software, nodes)
        if levels is not None:
            with contextlib.suppress(PlanError):  # as in LayerBuilder
                spans: dict[Span, float] = {}
                for each in levels.replaced(exchanges):
                    spans[each.over] = spans.get(each.over, 0.0) + self.call(setup, each).us
                found = min(found, max(spans.values()))
        return _LEAST_OF_CHUNKS * found

    def least_waits_us(self, setup: Setup) -> float:
        """Bound for how long a layer waits for attention's calls that nothing is computed beside,
        forward and backward, µs."""
        context = {"context"} if self.software.context == "gather" else set()
        forward = context | {"before_attention", "after_attention"}
        backward = forward - {"before_attention"} if setup.attention == "tensor" else forward
        return sum(
            self.call(setup, each).us
            for exchanges, places in ((layer_forward, forward), (layer_backward, backward))
            for each in exchanges(self.job, setup, self.software)
            if each.place in places and not each.name.endswith(AGAIN)
        )


def group_nodes(cluster: Cluster, setup: Setup, exchange: StepCollective) -> tuple[int, ...]:
    """Ranks of the exchange's group on each domain; of messages, the two that may be furthest
    apart."""
    layout = ((setup.gpus, 1),) if exchange.axis == "world" else setup.layout(exchange.axis)
    nodes = cluster.nodes_of(layout, setup.gpus)
    if exchange.collective != SEND_RECV or sum(nodes) == 1:
        return nodes
    return (1, 1) if len(nodes) > 1 else (2,)
