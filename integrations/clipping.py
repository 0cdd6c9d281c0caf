"""Gradients clipped by their norm over a folded mesh: every parameter counts once, whatever ranks hold it, or parts of it."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.routing import who
from commlayer.integrations.parameter_marks import ParameterMarks
from commlayer.integrations.parameter_owners import owned_parameters
from commlayer.integrations.spread_parameters import first_row, local_part, refuse_fsdp1, reshard, shard_groups, summed
from commlayer.profiles.errors import UsageError

__all__ = ["clip_gradients"]


@torch.no_grad()
def clip_gradients(module: nn.Module, mesh: FoldedMesh | None, max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their norm over the whole model is ``max_norm`` at most, and return the norm that they had, a
    float64 scalar, the same on all ranks.

    Once a step, when gradients are summed, before the optimizer; collective over all ranks of the job. What all ranks of tp hold
    whole counts once, and so does what all ranks of etp hold; what is split over them counts with all its parts. Of a DTensor,
    such as ``fully_shard`` makes, all shards count once. Experts count by their numbers: one that lies on several ranks
    counts once, and where it lies does not change a bit. A norm that is NaN or infinite scales nothing: whether to step
    is the trainer's choice.

    Args:
        module: what this rank holds of the model.
        mesh: the groups; None: the model is whole on this rank, but for what DTensors spread over their own meshes.

    Raises UsageError for a ``max_norm`` that is not above 0, for a parameter of which nothing says whether ranks hold parts or
    copies (:func:`~commlayer.integrations.parameter_owners.owned_parameters`), and for one of FSDP1; PeerError and
    CollectiveTimeoutError as collectives do.
    """
    if not 0 < max_norm < math.inf:
        raise UsageError(f"{who()}max_norm must be above 0 and finite, got {max_norm}")
    reshard(module)
    refuse_fsdp1(module.named_parameters(), "clip_gradients")
    trained = [owned for owned in owned_parameters(module, mesh) if owned.parameter.requires_grad]
    squares = _squares(module, trained, mesh)
    split = _over(mesh, "tp", squares[:1])
    of_experts = _over(mesh, "etp_ep", squares[2:])
    total = _over(mesh, "pp", split[0] + squares[1] + of_experts.sum())
    norm = total.sqrt()
    if bool(norm.isfinite()) and float(norm) > max_norm:
        for owned in trained:
            if owned.parameter.grad is not None:
                local_part(owned.parameter.grad).mul_(max_norm / float(norm))
    return norm


def _over(mesh: FoldedMesh | None, axis: str, squares: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks of ``axis``, on the lane of what the step waits for."""
    if mesh is None or mesh.size(axis) == 1:
        return squares
    return GroupCommunicator(mesh.group(axis), "pp" if axis == "pp" else "ep").all_reduce(squares.contiguous())


_SPLIT, _WHOLE, _OF_EXPERTS, _FIRST_NUMBERED = range(4)
"""Places in the squares of a rank: of what tp splits, of what it does not, of experts without numbers; then of each number."""


def _squares(module: nn.Module, trained: list[ParameterMarks], mesh: FoldedMesh | None) -> torch.Tensor:
    """Add up the squares of this rank's gradients, each in its place; of a DTensor those of all its shards. float64."""
    first, layers = _FIRST_NUMBERED, [part for part in module.modules() if isinstance(part, MoELayer)]
    numbered: dict[int, tuple[MoELayer, int]] = {}
    for layer in layers:
        numbered.update((id(parameter), (layer, first)) for parameter in layer.experts.parameters(recurse=False))
        first += layer.router.config.num_experts
    device = next((owned.parameter.device for owned in trained), torch.device("cpu"))
    # By the groups that shards lie on: plain parameters have none. All ranks of a group see the same ones in the same order.
    by_groups: dict[tuple[dist.ProcessGroup, ...], torch.Tensor] = {}
    for owned in trained:
        gradient = None if owned.parameter.grad is None else summed(owned.parameter.grad)
        groups = shard_groups(owned.parameter if gradient is None else gradient)
        if groups not in by_groups:
            by_groups[groups] = torch.zeros(first, dtype=torch.float64, device=device)
        if gradient is None:
            continue
        if id(owned.parameter) in numbered:
            _add_by_number(by_groups[groups], gradient, *numbered[id(owned.parameter)])
            continue
        place = _OF_EXPERTS if owned.is_expert else _SPLIT if owned.is_split else _WHOLE
        # Experts are summed over etp and ep at once: what all ranks of etp hold whole counts on the first of them.
        if place != _OF_EXPERTS or owned.is_split or mesh is None or mesh.rank("etp") == 0:
            by_groups[groups][place] += local_part(gradient).double().square().sum().to(device)
    total = torch.zeros(first, dtype=torch.float64, device=device)
    for groups, squares in by_groups.items():
        for group in groups:
            dist.all_reduce(squares, group=group)
        total += squares
    return total


def _add_by_number(squares: torch.Tensor, gradient: torch.Tensor, layer: MoELayer, first: int) -> None:
    """Add the squares of a layer's experts, each in the place of its number behind ``first``: those whose home is here."""
    experts, slots = layer.experts, layer.dispatcher.slots
    begin = first_row(gradient)
    for row, of_expert in enumerate(local_part(gradient), start=begin):
        expert = experts.numbers[row]
        if expert >= 0 and (slots is None or int(slots.placement.homes[expert]) == slots.rank):
            squares[first + expert] += of_expert.double().square().sum().to(squares.device)
