"""A pipeline stage: its layers for one micro-batch, and what only the first and the last micro-batch of a step meet.

The gradients of a layer are final with its last micro-batch. Their sums run beside what is left of the backward pass: of the
layers below, and with interleaved chunks of the other micro-batches that go through these before (pp of them go through each
chunk, of which the last one is laid out here and the others count as computation). Sharded weights are gathered likewise beside
the first forward pass. What a layer has is issued when its backward pass has ended, in as many calls as the software makes of
it, but no more than two for each axis: the engine's time grows with them, and large calls are as efficient as larger ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from commlayer.scheduler.conflicts import Forecast
from commlayer.scheduler.mapping.calls import Exchange, step_exchanges
from commlayer.scheduler.mapping.job import Setup
from commlayer.scheduler.mapping.layer_build import LayerBuilder
from commlayer.scheduler.mapping.layer_program import Course, Finish, Move, Part, Send, Work, run
from commlayer.scheduler.mapping.layer_work import head_work
from commlayer.scheduler.mapping.stage_parameters import layers_of

__all__ = ["Edge", "Stage", "boundary_us", "ends_course", "gradient_edge", "parameter_edge", "stages_of"]

_MOST_CALLS = 2
"""Of one axis for each layer, in the simulation."""
Template = Callable[[bool], tuple[list[Part], float]]
"""One layer, with experts or a dense FFN: its program, and the µs of its course."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline rank: its index, and for each of its layers whether it has experts, in order."""

    index: int
    layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """What is exposed of a step's gradients (or weights): ``us``, by link class; the course that says so, if it was simulated."""

    us: float
    links: dict[str, float]
    forecast: Forecast | None = None


def stages_of(builder: LayerBuilder, setup: Setup) -> tuple[Stage, ...]:
    """The first, the second and the last stage, as far as there are so many: those between are as the second, or have less."""
    found = []
    for index in sorted({0, min(1, setup.pp - 1), setup.pp - 1}):
        dense, moe = layers_of(builder.job.model, setup, index)
        found.append(Stage(index, (False,) * dense + (True,) * moe))
    return tuple(found)


def ends_course(builder: LayerBuilder, setup: Setup, stage: Stage) -> Course:
    """Of embedding, head and loss, and what ZeRO-2 and 3 send for them, with one micro-batch, forward and backward."""
    parts: list[Part] = []
    if stage.index == setup.pp - 1:
        times = head_work(builder.job, setup, builder.compute)
        parts += [Work("head", times.forward), Work("head", times.backward)]
    course = run(parts)
    sent = setup.micro_batches(builder.job)
    for exchange in step_exchanges(builder.job, setup, builder.software, stage=stage.index):
        if exchange.place in ("embedding", "head", "loss") or _is_of_every_micro_batch(exchange, setup):
            if exchange.axis == "world":
                continue  # one number a step
            move = builder.move(setup, exchange)
            us = move.us * exchange.count / sent
            course.total_us += us
            course.wait(move, us)
    return course


def _is_of_every_micro_batch(exchange: Exchange, setup: Setup) -> bool:
    return (exchange.place == "gradients" and setup.zero >= 2) or (exchange.place == "parameters" and setup.zero == 3)


def boundary_us(builder: LayerBuilder, setup: Setup) -> tuple[float, str]:
    """Of one activation to the next stage, µs, and over which link class; 0.0 without a pipeline."""
    if setup.pp == 1:
        return 0.0, "inter"
    nodes = builder.cluster.nodes_of(((2, setup.gpus // setup.pp),))
    exchanges = step_exchanges(builder.job, setup, builder.software, stage=0)
    size = next((each.logical_bytes for each in exchanges if each.place == "boundary"), 0)
    return builder.pricer.us("send_recv", size, nodes), "inter" if len(nodes) > 1 else "intra"


def gradient_edge(
    builder: LayerBuilder, setup: Setup, stage: Stage, template: Template, *, is_bound: bool = False
) -> Edge:
    """What is exposed of the sums of gradients behind the last micro-batch. ``template``: a layer's backward pass.

    ``is_bound``: without the mutual hindrance of calls, which is quicker and never longer.
    """
    if setup.zero >= 2:
        return Edge(0.0, {})
    wanted = _of_place(builder, setup, stage, "gradients")
    if not builder.software.overlaps_gradients:
        return _exposed(builder, setup, wanted)
    layers = stage.layers[::-1]
    sends = _spread(builder, setup, wanted, len(layers), lambda j, n: -(-(j + 1) * len(layers) // n) - 1)
    parts: list[Part] = []
    pending: list[Move] = []
    plain, others = 0.0, _others(builder, setup)
    for place, is_moe in enumerate(layers):
        layer, us = template(is_moe)
        filler = others * us
        plain += filler + us
        parts += [*([Work("filler", filler)] if filler else []), *layer]
        parts += [Send(move) for move in sends[place]]
        pending += sends[place]
    parts += [Finish(move) for move in pending]
    return _edge(builder, parts, pending, plain, is_bound)


def parameter_edge(
    builder: LayerBuilder, setup: Setup, stage: Stage, template: Template, *, is_bound: bool = False
) -> Edge:
    """What is exposed of the gathering of weights before the first micro-batch. ``template``: a layer's forward pass."""
    if setup.zero not in (1, 2):
        return Edge(0.0, {})
    wanted = _of_place(builder, setup, stage, "parameters")
    if not builder.software.overlaps_parameters:
        return _exposed(builder, setup, wanted)
    sends = _spread(builder, setup, wanted, len(stage.layers), lambda j, n: j * len(stage.layers) // n)
    moves = [move for layer in sends for move in layer]
    parts: list[Part] = [Send(move) for move in moves]
    plain, others = 0.0, _others(builder, setup)
    for place, is_moe in enumerate(stage.layers):
        layer, us = template(is_moe)
        filler = others * us
        plain += filler + us
        parts += [Finish(move) for move in sends[place]]
        parts += [*layer, *([Work("filler", filler)] if filler else [])]
    return _edge(builder, parts, moves, plain, is_bound)


def _of_place(builder: LayerBuilder, setup: Setup, stage: Stage, place: str) -> list[Exchange]:
    exchanges = step_exchanges(builder.job, setup, builder.software, stage=stage.index)
    return [each for each in exchanges if each.place == place]


def _exposed(builder: LayerBuilder, setup: Setup, wanted: Sequence[Exchange]) -> Edge:
    course = Course()
    for exchange in wanted:
        move = builder.move(setup, exchange)
        course.wait(move, move.us * exchange.count)
    return Edge(sum(course.links.values()), course.links)


def _spread(
    builder: LayerBuilder, setup: Setup, wanted: Sequence[Exchange], layers: int, place_of: Callable[[int, int], int]
) -> list[list[Move]]:
    """For each layer what is sent with it: the calls of one kind in order, as evenly as layers are."""
    found: list[list[Move]] = [[] for _ in range(layers)]
    for exchange in wanted:
        together = -(-exchange.count // (layers * _MOST_CALLS))
        number = -(-exchange.count // together)
        whole = replace(exchange, logical_bytes=exchange.logical_bytes * exchange.count // number, count=1)
        for j in range(number):
            found[place_of(j, number)].append(builder.move(setup, whole))
    return found


def _others(builder: LayerBuilder, setup: Setup) -> int:
    """Micro-batches that go through a chunk of layers beside that whose gradients (or weights) these are."""
    return setup.pp - 1 if setup.vpp > 1 and setup.micro_batches(builder.job) >= setup.pp else 0


def _edge(builder: LayerBuilder, parts: list[Part], moves: Sequence[Move], plain: float, is_bound: bool) -> Edge:
    if not any(move.us for move in moves):
        return Edge(0.0, {})
    parts = [part for part in parts if isinstance(part, Work) or part.move.us]
    if is_bound:
        course, forecast = run(parts), None
    else:
        course, forecast = builder.simulated(parts)
    us = max(0.0, course.total_us - plain)
    waited: dict[str, float] = {}
    for move in moves:
        if move.plan is not None:
            link = move.plan.traffic.link.value
            waited[link] = waited.get(link, 0.0) + move.us
    whole = sum(waited.values())
    return Edge(us, {link: us * part / whole for link, part in waited.items()}, forecast)
