"""The gradients of a model on a folded mesh, summed over the ranks that share each parameter.

The convention is the *sum*: every rank's loss is its tokens' part of the whole, ``Σ loss of a token / number of all tokens``,
so the gradient of the whole is the sum of all ranks' gradients, of dense parameters and of experts alike. Rejected: the mean,
which needs another factor for experts (:attr:`FoldedMapping.expert_gradient_scale`), and is wrong where ranks have different
numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.flat_buffers import all_reduce_flat, views_in
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.replica_gradients import sum_replica_gradients
from commlayer.integrations.parameter_marks import replicated_parameters
from commlayer.integrations.parameter_owners import owned_parameters
from commlayer.integrations.spread_parameters import local_part, mesh_ranks, refuse_fsdp1, refuse_spread, reshard
from commlayer.integrations.wire_choice import WireChoice, compressed_group, flat_policy, require_same_wire
from commlayer.scheduler.wire import WirePolicy

__all__ = ["compressed_axis", "gradient_axes", "reduce_replicated_gradients", "sum_over_etp", "synchronise_gradients"]

_COMPRESSED: WeakKeyDictionary[FoldedMesh, dict[tuple[str, WirePolicy | None], GroupCommunicator | None]] = (
    WeakKeyDictionary()
)
"""The governors, by mesh, then axis and policy: what a governor has found out in one step holds in the next."""


def gradient_axes(module: nn.Module, mesh: FoldedMesh | None) -> dict[str, list[nn.Parameter]]:
    """The parameters of ``module`` that need gradients, by the axis of a mesh over which these are summed.

    ``edp``: experts, whose gradients are those of all tokens that came to them already. ``dp_cp``: what tensor parallelism
    splits, and what every tp rank has and uses on the same tokens. ``stage``, which is dp_cp and tp together: what every tp rank
    has and uses on its own tokens. Raises UsageError where nothing says which of these a parameter is
    (:func:`~commlayer.integrations.parameter_owners.owned_parameters`).
    """
    axes: dict[str, list[nn.Parameter]] = {"dp_cp": [], "edp": [], "stage": []}
    for owned in owned_parameters(module, mesh):
        if owned.parameter.requires_grad:
            axes["edp" if owned.is_expert else "stage" if "tp" in owned.reduce_over else "dp_cp"].append(
                owned.parameter
            )
    return axes


@torch.no_grad()
def synchronise_gradients(module: nn.Module, mesh: FoldedMesh | None, wire: WireChoice = None) -> None:
    """Sum every gradient over the ranks that share its parameter, in place: one all_reduce for each axis and dtype.

    Once a step, when all gradients are there, by all ranks of a pipeline stage. A parameter without a gradient counts as zero
    and has one afterwards, also where there is nobody to sum with: an optimizer then treats it alike under every mapping. Where
    experts lie on several ranks the copies' gradients are summed too
    (:func:`~commlayer.integrations.moe.replica_gradients.sum_replica_gradients`).
    ``examples/buckets.py`` of a checkout does the same while the backward pass still runs.

    Args:
        module: what this rank holds of the model.
        mesh: the groups; None: the model is whole on this rank.
        wire: formats in which gradients may travel, such as ``bf16`` (docs/compression.md): sums are FP32. None: what
            COMMLAYER_WIRE says of dp, else their own.

    Raises PeerError and CollectiveTimeoutError as collectives do; UsageError for no such format, for a parameter of which nothing
    says over which ranks its gradient is summed (:func:`gradient_axes`), and for one that ``fully_shard`` spreads over these
    ranks, which sums its gradient itself; DisagreementError, at the first call, where ranks were given different ones.
    """
    reshard(module)
    policy = flat_policy(wire, "dp")
    axes = gradient_axes(module, mesh)
    for axis, parameters in axes.items():
        _refuse_summed(module, parameters, () if mesh is None else mesh.ranks(axis), "synchronise_gradients")
    for axis, parameters in axes.items():
        gradients = _gradients_by_dtype(parameters)
        if mesh is None or mesh.size(axis) == 1:
            continue
        for of_dtype in gradients:
            compressed = compressed_axis(mesh, axis, policy)
            group = compressed or GroupCommunicator(mesh.group(axis), "dp")
            _sum_flat(of_dtype, group, in_format=compressed is not None)
    sum_over_etp(list(replicated_parameters(module, "etp")), mesh)
    sum_replica_gradients(module)


@torch.no_grad()
def reduce_replicated_gradients(module: nn.Module, group: GroupCommunicator, over: str = "tp") -> None:
    """Sum the gradients of :func:`~commlayer.integrations.parameter_marks.replicated_parameters` over ``group``, in place: one
    all_reduce for each dtype.

    Once a step, by all ranks of the group: when all gradients are there, before they are clipped or used. A parameter
    without a gradient here counts as zero and gets the others' sum. Of a DTensor each rank's part is summed.

    Raises UsageError for a DTensor that lies over several ranks of ``group`` itself.
    """
    if group.size == 1:
        return
    reshard(module)
    parameters = list(replicated_parameters(module, over))
    _refuse_summed(module, parameters, group.ranks, "reduce_replicated_gradients")
    for of_dtype in _gradients_by_dtype(parameters):
        _sum_flat(of_dtype, group)


def sum_over_etp(parameters: Iterable[nn.Parameter], mesh: FoldedMesh | None) -> None:
    """Sum the gradients of ``parameters`` over etp, in place: experts' that its ranks hold whole and use on their own rows."""
    if mesh is not None and mesh.size("etp") > 1:
        for of_dtype in _gradients_by_dtype(parameters):
            _sum_flat(of_dtype, GroupCommunicator(mesh.group("etp"), "ep"))


def _refuse_summed(module: nn.Module, parameters: Iterable[nn.Parameter], ranks: Sequence[int], what: str) -> None:
    """Raise UsageError for a parameter whose gradient torch has summed over several of ``ranks`` already."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    named = [(names[id(parameter)], parameter) for parameter in parameters]
    refuse_fsdp1(named, what)
    refuse_spread(
        ((name, parameter) for name, parameter in named if len(set(mesh_ranks(parameter)) & set(ranks)) > 1),
        f"{what} over ranks {list(ranks)}",
        "its gradient is reduced over these ranks already, by fully_shard; call this for the other modules alone, and "
        "reduce_replicated_gradients over tp for what its ranks use on rows of their own",
    )


def _gradients_by_dtype(parameters: Iterable[nn.Parameter]) -> list[list[torch.Tensor]]:
    """The gradients, zeros where there is none yet, of each dtype together: in one order on all ranks. Of a DTensor this rank's
    part."""
    by_dtype: dict[str, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        by_dtype.setdefault(str(parameter.grad.dtype), []).append(local_part(parameter.grad))
    return [gradients for _, gradients in sorted(by_dtype.items())]


def _sum_flat(gradients: list[torch.Tensor], group: GroupCommunicator, *, in_format: bool = False) -> None:
    total = torch.cat([gradient.flatten() for gradient in gradients])
    if in_format:
        all_reduce_flat(group, total).wait()
    else:
        total = group.all_reduce(total)
    for gradient, view in zip(gradients, views_in(total, gradients), strict=True):
        gradient.copy_(view)


def compressed_axis(mesh: FoldedMesh, axis: str, policy: WirePolicy | None) -> GroupCommunicator | None:
    """The group of ``axis`` under ``policy``, None where that is native; one for all steps. Collective over it at first."""
    governors = _COMPRESSED.setdefault(mesh, {})
    if (axis, policy) not in governors:
        group, what = mesh.group(axis), f"gradients over {axis}"
        made = compressed_group(group, policy or "native", "dp", what)
        require_same_wire(group, what, made)
        governors[axis, policy] = made
    return governors[axis, policy]
