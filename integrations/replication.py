"""Gradients of parameters that every rank of a group has, and uses on rows of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from commlayer.collectives import GroupCommunicator

__all__ = ["mark_replicated", "reduce_replicated_gradients", "replicated_parameters"]


def mark_replicated(module: nn.Module, *names: str, over: tuple[str, ...] = ("tp",)) -> None:
    """Say that the gradients of ``module``'s own parameters must be summed over groups beyond the dense data-parallel one.

    For parameters that all ranks of those groups hold and use on different rows: a norm under sequence parallelism.

    Args:
        module: their module, for example a LayerNorm. Its submodules are not meant.
        names: of the parameters; none: all of them.
        over: names of the groups.
    """
    # Kept with the module: torch drops attributes of parameters in deepcopy(), to_empty() and some conversions. The
    # attribute is for code that only sees parameters.
    marks = dict(getattr(module, "reduce_over", {}))
    for name in names or [name for name, _ in module.named_parameters(recurse=False)]:
        marks[name] = over
        cast("Any", module.get_parameter(name)).reduce_over = over
    cast("Any", module).reduce_over = marks


def replicated_parameters(module: nn.Module, over: str = "tp") -> Iterator[nn.Parameter]:
    """The parameters in ``module`` that :func:`mark_replicated`, or an attribute ``reduce_over`` of their own, marks with
    ``over``. Each once, in the order of ``parameters()``."""
    seen: set[int] = set()
    for submodule in module.modules():
        marks = getattr(submodule, "reduce_over", {})
        for name, parameter in submodule.named_parameters(recurse=False):
            groups = marks.get(name, getattr(parameter, "reduce_over", ()))
            if over in groups and parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


@torch.no_grad()
def reduce_replicated_gradients(module: nn.Module, group: GroupCommunicator, over: str = "tp") -> None:
    """Sum the gradients of :func:`replicated_parameters` over ``group``, in place: one all_reduce for each dtype.

    Once a step, by all ranks of the group: when all gradients are there, before they are clipped or used. A parameter
    without a gradient here counts as zero and gets the others' sum.
    """
    if group.size == 1:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in replicated_parameters(module, over):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for _, gradients in sorted(by_dtype.items(), key=lambda item: str(item[0])):
        total = group.all_reduce(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
