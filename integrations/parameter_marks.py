"""Marks of parameters: which are experts', which each rank holds a part of, and which all ranks hold whole.

Whether the ranks of tensor parallelism hold parts of a parameter or copies of it cannot be seen in the parameter. The layers of
this package mark their own parameters; users mark theirs.
:func:`~commlayer.integrations.parameter_owners.owned_parameters` reads the marks.

Marks are kept with the module, by the parameter's name: torch drops attributes of parameters in deepcopy(), to_empty(),
fully_shard() and some conversions. The parameters have them as attributes too, for code that sees no modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from commlayer.profiles.errors import UsageError

__all__ = [
    "ParameterMarks",
    "holds_experts",
    "is_expert",
    "mark_experts",
    "mark_replicated",
    "mark_split",
    "parameter_marks",
    "replicated_parameters",
]


def mark_split(module: nn.Module, *names: str) -> None:
    """Say that each rank holds a part of its own of ``module``'s own parameters: each rank of tp, or of etp for experts.

    For example the weight of a linear layer whose outputs are shared out over tp.

    Args:
        module: their module. Its submodules are not meant.
        names: of the parameters; none: all of them.
    """
    _mark(module, names, None)


def mark_replicated(module: nn.Module, *names: str, over: tuple[str, ...] = ("tp",)) -> None:
    """Say that all ranks of tp, or of etp for experts, hold ``module``'s own parameters whole, and over which groups their
    gradients must be summed, beyond the data-parallel one.

    Args:
        module: their module, for example a LayerNorm. Its submodules are not meant.
        names: of the parameters; none: all of them.
        over: names of the groups: ``("tp",)``, or ``("etp",)`` for experts, where each rank uses the parameters on rows of its
            own, as a norm under sequence parallelism; ``()`` where all ranks use them on the same rows, so that their gradients
            are equal already.
    """
    _mark(module, names, over)


def _mark(module: nn.Module, names: tuple[str, ...], over: tuple[str, ...] | None) -> None:
    """Mark parameters as replicated, with sums ``over`` groups; None: as split."""
    sums, split = dict(getattr(module, "reduce_over", {})), set(getattr(module, "split_parameters", ()))
    for name in names or [name for name, _ in module.named_parameters(recurse=False)]:
        parameter = cast("Any", module.get_parameter(name))
        sums.pop(name, None)
        split.discard(name)
        if over is None:
            split.add(name)
            vars(parameter).pop("reduce_over", None)
        else:
            sums[name] = parameter.reduce_over = over
        parameter.is_split = over is None
    cast("Any", module).reduce_over, cast("Any", module).split_parameters = sums, split


@dataclass
class ParameterMarks:
    """A parameter, and what its marks say.

    Attributes:
        name: in the module that was asked for.
        is_expert: it is an expert's: the ranks of ep hold different ones.
        is_split: each rank of tp, or of etp for an expert, holds a part of its own; False: all ranks hold it whole; None: no
            mark says so.
        reduce_over: the groups over which the gradient of a replicated parameter must be summed, beyond the data-parallel one.
    """

    name: str
    parameter: nn.Parameter
    is_expert: bool = False
    is_split: bool | None = None
    reduce_over: tuple[str, ...] = ()


def parameter_marks(module: nn.Module) -> list[ParameterMarks]:
    """Read the marks of all parameters in ``module``, each once, in the order of ``parameters()``.

    Raises UsageError where two modules share a parameter and mark it differently.
    """
    by_parameter: dict[int, ParameterMarks] = {}
    experts = {id(each) for part in module.modules() if holds_experts(part) for each in part.parameters()}
    for prefix, part in module.named_modules():
        sums, split = getattr(part, "reduce_over", {}), getattr(part, "split_parameters", ())
        for own_name, parameter in part.named_parameters(recurse=False):
            name = f"{prefix}.{own_name}" if prefix else own_name
            is_split: bool | None = own_name in split
            if not is_split and own_name not in sums:  # the parameter's own attributes say it
                is_split = False if hasattr(parameter, "reduce_over") else getattr(parameter, "is_split", None)
            over = sums.get(own_name, getattr(parameter, "reduce_over", ()))
            marks = by_parameter.get(id(parameter))
            if marks is None:
                of_expert = id(parameter) in experts or is_expert(parameter)
                by_parameter[id(parameter)] = ParameterMarks(name, parameter, of_expert, is_split, over)
            elif marks.is_split is None:
                marks.is_split, marks.reduce_over = is_split, over
            elif is_split is not None and (is_split, over) != (marks.is_split, marks.reduce_over):
                raise UsageError(
                    f"{marks.name} and {name} are one parameter, and the two modules mark it differently "
                    f"(mark_split, or mark_replicated with its groups): {_words(marks.is_split, marks.reduce_over)}, "
                    f"and {_words(is_split, over)}; give both the same mark"
                )
    return list(by_parameter.values())


def _words(is_split: bool, over: tuple[str, ...]) -> str:
    return "split" if is_split else f"replicated over {over}"


def replicated_parameters(module: nn.Module, over: str = "tp") -> Iterator[nn.Parameter]:
    """The parameters in ``module`` that :func:`mark_replicated`, or an attribute ``reduce_over`` of their own, marks with
    ``over``, and that need gradients. Each once, in the order of ``parameters()``."""
    for marks in parameter_marks(module):
        if marks.parameter.requires_grad and over in marks.reduce_over:
            yield marks.parameter


def mark_experts(module: nn.Module) -> None:
    """Mark all parameters of ``module`` as experts' (``is_expert``), for
    :meth:`~commlayer.integrations.mesh.FoldedMesh.gradient_group`.

    Where etp has several ranks, say also what each of them holds: by :func:`mark_split` or :func:`mark_replicated`.

    What replaces parameters (fully_shard, to_empty(), deepcopy()) drops their mark: call it again after those. Loading does
    not; nor does :func:`commlayer.integrations.gradients.gradient_axes` forget, which looks at modules too.
    """
    if not holds_experts(module):  # load_state_dict(assign=True) replaces parameters
        module.register_load_state_dict_post_hook(_mark_parameters)
    for part in module.modules():
        part._commlayer_holds_experts = True  # type: ignore[assignment]
    _mark_parameters(module)


def holds_experts(module: nn.Module) -> bool:
    """Tell whether :func:`mark_experts` was called for it."""
    return bool(getattr(module, "_commlayer_holds_experts", False))


def is_expert(parameter: torch.Tensor) -> bool:
    """Tell whether the parameter itself is marked as an expert's."""
    return bool(getattr(parameter, "is_expert", False))


def _mark_parameters(module: nn.Module, _: object = None) -> None:
    for parameter in module.parameters():
        parameter.is_expert = True  # type: ignore[attr-defined]
