"""A pipeline stage: its layers for one micro-batch, and what only the first and the last micro-batch of a step meet.

The gradients of a layer are final with its last micro-batch. Their sums run beside what is left of the backward pass: of the
layers below, and with interleaved chunks of the other micro-batches that go through these before (pp of them go through each
chunk, of which the last one is laid out here and the others count as computation). Sharded weights are gathered likewise beside
the first forward pass. What a layer has is issued when its backward pass has ended, in as many calls as the software makes of
it, but no more than two for each axis: the engine's time grows with them, and large calls are as efficient as larger ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from commlayer.scheduler.conflicts import Forecast
from commlayer.scheduler.mapping.job import Setup
from commlayer.scheduler.mapping.layer_calls import group_nodes
from commlayer.scheduler.mapping.layer_work import head_work
from commlayer.scheduler.mapping.layers import LayerBuilder, sequence
from commlayer.scheduler.mapping.parameters import Stage
from commlayer.scheduler.mapping.step_collectives import SEND_RECV, StepCollective, step_exchanges
from commlayer.scheduler.programs import Breakdown, Compute, Issue, Item, PlannedCall, Wait, run_alone
from commlayer.scheduler.traffic import link_over

__all__ = ["Exposed", "boundary_us", "ends", "exposed_gradients", "exposed_parameters"]

_MOST_CALLS = 2
"""The most calls of one axis for each layer, in the simulation."""
_SIZES = 16
"""The sizes at which bounds are priced, between one power of two bytes and the next."""
_FINER = 0.95
"""The part of a plan's time at which it is bounded: lanes may have finer cuts than all candidates, but hardly faster ones."""
Template = Callable[[bool], tuple[list[Item], float]]
"""One layer, with experts or a dense FFN: its program, and the µs that it takes."""


@dataclass(frozen=True, slots=True)
class Exposed:
    """The exposed part of a step's gradients (or weights): ``us``, by link class; the forecast of it, if it was simulated."""

    us: float
    links: dict[str, float]
    forecast: Forecast | None = None


def ends(builder: LayerBuilder, setup: Setup, stage: Stage) -> Breakdown:
    """Time embedding, head and loss, and what ZeRO-2 and 3 send for them, with one micro-batch, forward and backward."""
    parts: list[Item] = []
    has = {"head": stage.ends.head, "modules": stage.ends.modules}
    if any(has.values()):
        times = head_work(builder.job, setup, builder.compute, **has)
        parts += [Compute(times.forward, "head"), Compute(times.backward, "head")]
    found = run_alone(parts)
    sent = setup.micro_batches(builder.job) // setup.copies
    of_every_micro_batch = [
        "embedding",
        "head",
        "loss",
        *["gradients"] * (setup.zero >= 2),
        *["parameters"] * (setup.zero == 3),
    ]
    for exchange in step_exchanges(builder.job, setup, builder.software, stage=stage.number):
        if exchange.place in of_every_micro_batch and exchange.axis != "world":  # over the world one number a step
            call = builder.calls.call(setup, exchange)
            us = call.us * exchange.count / sent
            found.total_us += us
            found.wait(call, us)
    return found


def boundary_us(builder: LayerBuilder, setup: Setup) -> tuple[float, str]:
    """Time the sending of one activation to the next stage, µs, and over which link class; 0.0 without a pipeline."""
    if setup.pp == 1:
        return 0.0, "inter"
    exchanges = step_exchanges(builder.job, setup, builder.software, stage=0)
    boundary = next(each for each in exchanges if each.place == "boundary")
    nodes = group_nodes(builder.cluster, setup, boundary)
    return builder.pricer.us("send_recv", boundary.logical_bytes, nodes), link_over(nodes).value


def exposed_gradients(
    builder: LayerBuilder, setup: Setup, stage: Stage, template: Template, *, is_bound: bool = False
) -> Exposed:
    """Time what is exposed of the sums of gradients behind the last micro-batch. ``template``: a layer's backward pass.

    ``is_bound``: without the mutual hindrance of calls, which is quicker and never longer.
    """
    if setup.zero >= 2:
        return Exposed(0.0, {})
    wanted = _of_place(builder, setup, stage, "gradients")
    if not builder.software.overlaps_gradients:
        return _exposed(builder, setup, wanted)
    layers = stage.kinds[::-1]
    sends = _spread(builder, setup, wanted, len(layers), lambda j, n: -(-(j + 1) * len(layers) // n) - 1)
    parts: list[Item] = []
    pending: list[PlannedCall] = []
    plain, others = 0.0, passing(builder, setup)
    for place, is_moe in enumerate(layers):
        layer, us = template(is_moe)
        filler = others * us
        plain += filler + us
        parts += [*([Compute(filler, "filler")] if filler else []), *layer]
        parts += [Issue(call) for call in sends[place]]
        pending += sends[place]
    parts += [Wait(call) for call in pending]
    return _simulated(builder, parts, pending, plain, is_bound)


def exposed_parameters(
    builder: LayerBuilder, setup: Setup, stage: Stage, template: Template, *, is_bound: bool = False
) -> Exposed:
    """Time what is exposed of the gathering of weights before the first micro-batch. ``template``: a layer's forward pass."""
    if setup.zero not in (1, 2):
        return Exposed(0.0, {})
    wanted = _of_place(builder, setup, stage, "parameters")
    if not builder.software.overlaps_parameters:
        return _exposed(builder, setup, wanted)
    sends = _spread(builder, setup, wanted, stage.layers, lambda j, n: j * stage.layers // n)
    calls = [call for layer in sends for call in layer]
    parts: list[Item] = [Issue(call) for call in calls]
    plain, others = 0.0, passing(builder, setup)
    for place, is_moe in enumerate(stage.kinds):
        layer, us = template(is_moe)
        filler = others * us
        plain += filler + us
        parts += [Wait(call) for call in sends[place]]
        parts += [*layer, *([Compute(filler, "filler")] if filler else [])]
    return _simulated(builder, parts, calls, plain, is_bound)


def _of_place(builder: LayerBuilder, setup: Setup, stage: Stage, place: str) -> list[StepCollective]:
    exchanges = step_exchanges(builder.job, setup, builder.software, stage=stage.number)
    return [each for each in exchanges if each.place == place]


def _exposed(builder: LayerBuilder, setup: Setup, wanted: Sequence[StepCollective]) -> Exposed:
    found = Breakdown()
    for exchange in wanted:
        call = builder.calls.call(setup, exchange)
        found.wait(call, call.us * exchange.count)
    return Exposed(sum(found.links.values()), found.links)


def _spread(
    builder: LayerBuilder,
    setup: Setup,
    wanted: Sequence[StepCollective],
    layers: int,
    place_of: Callable[[int, int], int],
) -> list[list[PlannedCall]]:
    """For each layer what is sent with it: the calls of one kind in order, as evenly as layers are."""
    found: list[list[PlannedCall]] = [[] for _ in range(layers)]
    for exchange in wanted:
        whole, number = _together(exchange, layers)
        for j in range(number):
            found[place_of(j, number)].append(builder.calls.call(setup, whole))
    return found


def _together(exchange: StepCollective, layers: int) -> tuple[StepCollective, int]:
    """One of the calls as which these are simulated, and how many there are."""
    together = -(-exchange.count // (layers * _MOST_CALLS))
    number = -(-exchange.count // together)
    return replace(exchange, logical_bytes=exchange.logical_bytes * exchange.count // number, count=1), number


def _least_us(builder: LayerBuilder, setup: Setup, exchange: StepCollective) -> float:
    """A time that no plan of one such call is below, by the plans for a size a little smaller: few sizes are ever priced."""
    nodes = group_nodes(builder.cluster, setup, exchange)
    if sum(nodes) == 1 or exchange.logical_bytes < 1:
        return 0.0
    if exchange.collective == SEND_RECV:
        return builder.pricer.us(SEND_RECV, exchange.logical_bytes, nodes)
    size = int(2 ** (math.floor(math.log2(exchange.logical_bytes) * _SIZES) / _SIZES))
    decision = builder.pricer.decide(exchange.collective, size, nodes)
    return _FINER * min(each.total_us for each in decision.candidates)


def least_exposed(builder: LayerBuilder, setup: Setup, stage: Stage) -> dict[str, tuple[float, bool]]:
    """Bound, for ``gradients`` and ``parameters``, what the busiest axis takes in a step, µs, and whether passes may hide it;
    where they may not, what all axes take one after the other. Nothing, where the layers send them with every micro-batch."""
    software = builder.software
    hidden = {"gradients": software.overlaps_gradients, "parameters": software.overlaps_parameters}
    found = {"gradients": (0.0, False), "parameters": (0.0, False)}
    exchanges = step_exchanges(builder.job, setup, software, stage=stage.number) if setup.zero < 3 else ()
    for place, hides in hidden.items():
        if place == "gradients" if setup.zero == 2 else setup.zero == 0 and place == "parameters":
            continue
        axes: dict[str, float] = {}
        for exchange in exchanges:
            if exchange.place == place:
                whole, number = _together(exchange, stage.layers) if hides else (exchange, exchange.count)
                axes[exchange.axis] = axes.get(exchange.axis, 0.0) + _least_us(builder, setup, whole) * number
        found[place] = (max(axes.values(), default=0.0), True) if hides else (sum(axes.values()), False)
    return found


def passing(builder: LayerBuilder, setup: Setup) -> int:
    """Micro-batches that go through a chunk of layers beside that whose gradients (or weights) these are."""
    return setup.pp - 1 if setup.vpp > 1 and setup.micro_batches(builder.job) >= setup.pp else 0


def _simulated(
    builder: LayerBuilder, parts: list[Item], calls: Sequence[PlannedCall], plain: float, is_bound: bool
) -> Exposed:
    if not any(call.us for call in calls):
        return Exposed(0.0, {})
    program = sequence(parts)
    times, forecast = (run_alone(program), None) if is_bound else builder.simulated(program)
    us = max(0.0, times.total_us - plain)
    waited: dict[str, float] = {}
    for call in calls:
        link = call.plan.traffic.link.value
        waited[link] = waited.get(link, 0.0) + call.us
    whole = sum(waited.values())
    return Exposed(us, {link: us * part / whole for link, part in waited.items()}, forecast)
