"""Decisions what to do: traffic → plans → price → decision. Pure: no torch, no input or output, nothing but arithmetic on a
profile.

Plans of one call are loaded with the package. What mappings, steps and wire formats need is loaded on first use (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

# Not on first use: a module has the name of its function here (choose, price), and whoever imports such a module first would
# put it in the place of the function.
from commlayer.scheduler.choose import Decision, Planner, Policy, choose
from commlayer.scheduler.plan import Buffer, Gather, Op, Plan, Step, Strategy
from commlayer.scheduler.price import Timeline, price
from commlayer.scheduler.strategies import build
from commlayer.scheduler.traffic import Traffic, moe_bytes

if TYPE_CHECKING:
    from commlayer.scheduler.activations import LayerShape as LayerShape
    from commlayer.scheduler.lanes import LanePolicy as LanePolicy
    from commlayer.scheduler.mapping.cluster import Cluster as Cluster
    from commlayer.scheduler.mapping.expansion import expansion as expansion
    from commlayer.scheduler.mapping.explain import explain as explain
    from commlayer.scheduler.mapping.folded import FoldedMapping as FoldedMapping
    from commlayer.scheduler.mapping.job import Job as Job
    from commlayer.scheduler.mapping.job import Setup as Setup
    from commlayer.scheduler.mapping.model import ModelShape as ModelShape
    from commlayer.scheduler.mapping.result import StepEstimate as StepEstimate
    from commlayer.scheduler.mapping.search import SearchResult as SearchResult
    from commlayer.scheduler.mapping.search import search as search
    from commlayer.scheduler.mapping.simulate import Estimator as Estimator
    from commlayer.scheduler.mapping.software import COMMLAYER as COMMLAYER
    from commlayer.scheduler.mapping.software import MEGATRON as MEGATRON
    from commlayer.scheduler.mapping.software import PLANNED as PLANNED
    from commlayer.scheduler.mapping.space import Space as Space
    from commlayer.scheduler.mapping.variations import ALTERNATIVES as ALTERNATIVES
    from commlayer.scheduler.mapping.variations import Variation as Variation
    from commlayer.scheduler.mapping.variations import compare as compare
    from commlayer.scheduler.mapping.variations import what_if as what_if
    from commlayer.scheduler.wire import Scaling as Scaling
    from commlayer.scheduler.wire import Wire as Wire
    from commlayer.scheduler.wire import WireFormat as WireFormat
    from commlayer.scheduler.wire import WirePolicy as WirePolicy

_HOME = {
    "ALTERNATIVES": "mapping.variations:ALTERNATIVES",
    "COMMLAYER": "mapping.software:COMMLAYER",
    "Cluster": "mapping.cluster:Cluster",
    "Estimator": "mapping.simulate:Estimator",
    "FoldedMapping": "mapping.folded:FoldedMapping",
    "Job": "mapping.job:Job",
    "LanePolicy": "lanes:LanePolicy",
    "LayerShape": "activations:LayerShape",
    "MEGATRON": "mapping.software:MEGATRON",
    "ModelShape": "mapping.model:ModelShape",
    "PLANNED": "mapping.software:PLANNED",
    "Scaling": "wire:Scaling",
    "SearchResult": "mapping.search:SearchResult",
    "Setup": "mapping.job:Setup",
    "Space": "mapping.space:Space",
    "StepEstimate": "mapping.result:StepEstimate",
    "Variation": "mapping.variations:Variation",
    "Wire": "wire:Wire",
    "WireFormat": "wire:WireFormat",
    "WirePolicy": "wire:WirePolicy",
    "compare": "mapping.variations:compare",
    "expansion": "mapping.expansion:expansion",
    "explain": "mapping.explain:explain",
    "search": "mapping.search:search",
    "what_if": "mapping.variations:what_if",
}

__all__ = [
    "ALTERNATIVES",
    "COMMLAYER",
    "MEGATRON",
    "PLANNED",
    "Buffer",
    "Cluster",
    "Decision",
    "Estimator",
    "FoldedMapping",
    "Gather",
    "Job",
    "LanePolicy",
    "LayerShape",
    "ModelShape",
    "Op",
    "Plan",
    "Planner",
    "Policy",
    "Scaling",
    "SearchResult",
    "Setup",
    "Space",
    "Step",
    "StepEstimate",
    "Strategy",
    "Timeline",
    "Traffic",
    "Variation",
    "Wire",
    "WireFormat",
    "WirePolicy",
    "build",
    "choose",
    "compare",
    "expansion",
    "explain",
    "moe_bytes",
    "price",
    "search",
    "what_if",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    module, attribute = _HOME[name].split(":")
    value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
