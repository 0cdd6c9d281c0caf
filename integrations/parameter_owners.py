"""Which ranks of a folded mesh hold which part of each parameter: what a norm, a sum of gradients and a checkpoint rest on.

Marks say it (:mod:`~commlayer.integrations.parameter_marks`), or a DTensor itself. A parameter is refused by its name where
neither says whether the ranks of tp, or of etp for experts, hold parts of it or copies. A guess would be wrong in silence:
copies that are taken for parts count several times in a norm, and of parts that are taken for copies a checkpoint keeps one.
"""

from __future__ import annotations

from torch import nn

from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.routing import who
from commlayer.integrations.parameter_marks import ParameterMarks, parameter_marks
from commlayer.integrations.spread_parameters import mesh_ranks
from commlayer.profiles.counted import counted
from commlayer.profiles.errors import UsageError

__all__ = ["owned_parameters"]


def owned_parameters(module: nn.Module, mesh: FoldedMesh | None) -> list[ParameterMarks]:
    """Return how the ranks of ``mesh`` hold each parameter of ``module``, once each, in the order of ``parameters()``.

    What a DTensor spreads over ranks of tp, or of etp, counts as not split: the DTensor says what each of them has.

    Raises UsageError, by the parameter's name: where nothing says whether the ranks of tp, or of etp, hold parts or copies; where
    an expert's mark speaks of tp; and where a DTensor lies over ranks that hold different parameters.
    """
    owned = parameter_marks(module)
    unknown: list[tuple[str, str]] = []
    for marks in owned:
        axis = "etp" if marks.is_expert else "tp"
        if mesh is None or mesh.size(axis) == 1:
            marks.is_split = False
        ranks = mesh_ranks(marks.parameter)
        if mesh is not None and ranks:
            _require_one_parameter(marks.name, ranks, mesh, is_expert=marks.is_expert)
            if len(set(ranks) & set(mesh.ranks(axis))) > 1:
                if marks.is_split:
                    raise UsageError(
                        f"{who()}{marks.name} is split over {axis} by hand, so its ranks hold different parameters, but it is a "
                        f"DTensor over ranks {list(ranks)}, which takes them for one: shard it over "
                        f'mesh.device_mesh("{"edp" if marks.is_expert else "dp_cp"}")'
                    )
                marks.is_split = False
        if marks.is_expert and "tp" in marks.reduce_over and mesh is not None and mesh.size(axis) > 1:
            raise UsageError(
                f"{who()}{marks.name} is an expert's, and its mark says that its gradient is summed over tp: call "
                'mark_replicated(module, over=("etp",)) where each rank of etp uses it on rows of its own, or over=() where all '
                "use it on the same rows"
            )
        if marks.is_split is None:
            unknown.append((marks.name, axis))
    if unknown:
        name, axis = unknown[0]
        more = "" if len(unknown) == 1 else f" (and {counted(len(unknown) - 1, 'more parameter')})"
        how = 'module, over=("etp",)' if axis == "etp" else "module"
        on_own_rows = f", mark_replicated({how}) where each uses it on rows of its own"
        raise UsageError(
            f"{who()}nothing says whether each rank of {axis} holds a part of {name}{more} or all of it: call "
            f"mark_split(module) for its module where each holds a part{on_own_rows}, or mark_replicated(module, over=()) "
            "where all hold it whole and use it on the same rows"
        )
    return owned


def _require_one_parameter(name: str, ranks: tuple[int, ...], mesh: FoldedMesh, *, is_expert: bool) -> None:
    """Raise UsageError where a DTensor lies over ranks of another pipeline stage or, of an expert, of another expert."""
    holders = set(mesh.ranks("stage"))
    if is_expert:
        own = mesh.rank("ep")
        holders = {rank for rank in holders if mesh.mapping.group_of("ep", rank).index(rank) == own}
    others = sorted(set(ranks) - holders)
    if others:
        whose = "other experts" if is_expert else "other layers"
        raise UsageError(
            f"{who()}{name} is a DTensor over ranks {list(ranks)}, of which {others} hold {whose}: shard it over "
            f'mesh.device_mesh("{"edp" if is_expert else "dp_cp"}")'
        )
