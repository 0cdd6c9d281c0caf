"""Who calls it: trainers, and MoE layers later. Names are loaded on first use (PEP 562); they load torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commlayer.integrations.ddp import all_reduce_hook as all_reduce_hook
    from commlayer.integrations.ddp import plan_ddp as plan_ddp
    from commlayer.integrations.fsdp import PlannedAllGather as PlannedAllGather
    from commlayer.integrations.fsdp import PlannedReduceScatter as PlannedReduceScatter
    from commlayer.integrations.fsdp import plan_fsdp as plan_fsdp
    from commlayer.integrations.groups import planned_group as planned_group

_HOME = {
    "PlannedAllGather": "fsdp",
    "PlannedReduceScatter": "fsdp",
    "all_reduce_hook": "ddp",
    "plan_ddp": "ddp",
    "plan_fsdp": "fsdp",
    "planned_group": "groups",
}

__all__ = [
    "PlannedAllGather",
    "PlannedReduceScatter",
    "all_reduce_hook",
    "plan_ddp",
    "plan_fsdp",
    "planned_group",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
