"""Gradients clipped by their norm over a folded mesh: every parameter counts once, whatever ranks hold it, or parts of it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.gradients import gradient_axes
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.routing import who
from commlayer.profiles.errors import UsageError

__all__ = ["clip_gradients"]


@torch.no_grad()
def clip_gradients(module: nn.Module, mesh: FoldedMesh | None, max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their norm over the whole model is ``max_norm`` at most, and return the norm that they had, a
    float64 scalar, the same on all ranks.

    Once a step, when gradients are summed, before the optimizer; collective over all ranks of the job. Whole parameters
    count once, those that tp or etp cuts with all their parts, experts by their numbers: one that lies on several ranks
    counts once, and where it lies does not change a bit. A norm that is NaN or infinite scales nothing: whether to step
    is the trainer's choice. A :class:`~commlayer.integrations.sharded_optimizer.ShardedOptimizer` sums gradients only in its own
    step: parameters that it steps cannot be clipped by this.

    Args:
        module: what this rank holds of the model.
        mesh: the groups; None: the model is whole on this rank.

    Raises UsageError for a ``max_norm`` that is not above 0; PeerError and CollectiveTimeoutError as collectives do.
    """
    if not 0 < max_norm < math.inf:
        raise UsageError(f"{who()}max_norm must be above 0 and finite, got {max_norm}")
    axes = gradient_axes(module)
    layers = [part for part in module.modules() if isinstance(part, MoELayer)]
    # Where all ranks of tp hold the same tokens, the router and shared experts are whole on each of them.
    held = {id(each) for layer in layers if layer.holders.size > 1 for each in _beside_experts(layer)}
    whole = [*axes["stage"], *(each for each in axes["dp_cp"] if id(each) in held)]
    device = next((each.device for of_axis in axes.values() for each in of_axis), torch.device("cpu"))
    cut = _squares((each for each in axes["dp_cp"] if id(each) not in held), device)
    total = _over(mesh, "tp", cut) + _squares(whole, device)
    numbered = {id(parameter) for layer in layers for parameter in layer.experts.parameters()}
    others = _squares((parameter for parameter in axes["edp"] if id(parameter) not in numbered), device)
    by_expert = [_squares_by_expert(layer, device) for layer in layers]
    together = _over(mesh, "etp_ep", torch.cat([others.view(1), *by_expert]))
    total = _over(mesh, "pp", total + together.sum())
    norm = total.sqrt()
    if bool(norm.isfinite()) and float(norm) > max_norm:
        for parameter in (each for of_axis in axes.values() for each in of_axis):
            if parameter.grad is not None:
                parameter.grad.mul_(max_norm / float(norm))
    return norm


def _over(mesh: FoldedMesh | None, axis: str, squares: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks of ``axis``, on the lane of what the step waits for."""
    if mesh is None or mesh.size(axis) == 1:
        return squares
    return GroupCommunicator(mesh.group(axis), "pp" if axis == "pp" else "ep").all_reduce(squares.contiguous())


def _squares(parameters: Iterable[nn.Parameter], device: torch.device) -> torch.Tensor:
    """The sum of the squares of all gradients, on ``device`` also where there is none: what ranks sum up lies alike on all."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        if parameter.grad is not None:
            total += parameter.grad.double().square().sum().to(device)
    return total


def _beside_experts(layer: MoELayer) -> list[nn.Parameter]:
    return [*layer.router.parameters(), *(() if layer.shared is None else layer.shared.parameters())]


def _squares_by_expert(layer: MoELayer, device: torch.device) -> torch.Tensor:
    """[all experts of the layer]: those whose home is here; zero for the others."""
    experts, slots = layer.experts, layer.dispatcher.slots
    found = torch.zeros(layer.router.config.num_experts, dtype=torch.float64, device=device)
    for place, expert in enumerate(experts.numbers):
        if expert < 0 or (slots is not None and int(slots.placement.homes[expert]) != slots.rank):
            continue
        for parameter in experts.parameters():
            if parameter.grad is not None:
                found[expert] += parameter.grad[place].double().square().sum().to(device)
    return found
