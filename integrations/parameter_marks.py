"""Marks of parameters that say over which groups their gradients are summed: experts', and those that every rank has whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

__all__ = ["holds_experts", "is_expert", "mark_experts", "mark_replicated", "replicated_parameters"]


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


def mark_experts(module: nn.Module) -> None:
    """Mark all parameters of ``module`` as experts' (``is_expert``), for
    :meth:`~commlayer.integrations.mesh.FoldedMesh.gradient_group`.

    What replaces parameters (fully_shard, to_empty(), deepcopy()) drops their mark: call it again after those. Loading does
    not; nor does :func:`commlayer.integrations.gradients.gradient_axes` forget, which looks at modules too.
    """
    if not holds_experts(module):
        module.register_load_state_dict_post_hook(_mark_loaded)
    for part in module.modules():
        part._commlayer_holds_experts = True  # type: ignore[assignment]
    _mark_parameters(module)


def holds_experts(module: nn.Module) -> bool:
    """Tell whether :func:`mark_experts` was called for it."""
    return bool(getattr(module, "_commlayer_holds_experts", False))


def is_expert(parameter: torch.Tensor) -> bool:
    """Tell whether the parameter itself is marked as an expert's."""
    return bool(getattr(parameter, "is_expert", False))


def _mark_loaded(module: nn.Module, _: object) -> None:
    _mark_parameters(module)  # load_state_dict(assign=True) replaces them


def _mark_parameters(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.is_expert = True  # type: ignore[attr-defined]
