"""Decisions what to do: traffic → plans → price → decision. Pure: no torch, no input or output, nothing but arithmetic on a
profile.

Plans of one call are loaded with the package. What mappings, steps and wire formats need is loaded on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commlayer.profiles.lazy_names import lazy_names

# Not on first use: a module has the name of its function here (choose, price), and whoever imports such a module first would
# put it in the place of the function.
from commlayer.scheduler.decision import Decision, Planner, Policy, choose
from commlayer.scheduler.group_strategies import build
from commlayer.scheduler.plan import Buffer, Gather, Op, Plan, Step, Strategy
from commlayer.scheduler.price import Timeline, price
from commlayer.scheduler.traffic import Traffic, moe_bytes

if TYPE_CHECKING:
    from commlayer.scheduler.lanes import LanePolicy
    from commlayer.scheduler.mapping.cluster import Cluster
    from commlayer.scheduler.mapping.explain import explain
    from commlayer.scheduler.mapping.folded import FoldedMapping
    from commlayer.scheduler.mapping.job import Job, Setup
    from commlayer.scheduler.mapping.model import ModelShape
    from commlayer.scheduler.mapping.result import StepEstimate
    from commlayer.scheduler.mapping.search import SearchResult, search
    from commlayer.scheduler.mapping.simulate import Estimator
    from commlayer.scheduler.mapping.software import COMMLAYER, MEGATRON, PLANNED
    from commlayer.scheduler.mapping.space import Space
    from commlayer.scheduler.mapping.variations import ALTERNATIVES, Alternative, Variation, vary
    from commlayer.scheduler.placement.expert_loads import ExpertLoads
    from commlayer.scheduler.placement.expert_placement import ExpertPlacement
    from commlayer.scheduler.placement.llep import LlepRule
    from commlayer.scheduler.placement.placement_price import ExpertWork
    from commlayer.scheduler.placement.placing import PlacementDecision, PlacementRoom, place
    from commlayer.scheduler.placement.spilling import SpillDecision, Spilling
    from commlayer.scheduler.wire import Scaling, Wire, WireFormat, WirePolicy

__all__ = [
    "ALTERNATIVES",
    "COMMLAYER",
    "MEGATRON",
    "PLANNED",
    "Alternative",
    "Buffer",
    "Cluster",
    "Decision",
    "Estimator",
    "ExpertLoads",
    "ExpertPlacement",
    "ExpertWork",
    "FoldedMapping",
    "Gather",
    "Job",
    "LanePolicy",
    "LlepRule",
    "ModelShape",
    "Op",
    "PlacementDecision",
    "PlacementRoom",
    "Plan",
    "Planner",
    "Policy",
    "Scaling",
    "SearchResult",
    "Setup",
    "Space",
    "SpillDecision",
    "Spilling",
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
    "explain",
    "moe_bytes",
    "place",
    "price",
    "search",
    "vary",
]

__getattr__, __dir__ = lazy_names(__name__)
