"""What to do: traffic → plans → price → decision. Pure: no torch, no input or output, nothing but arithmetic on a profile."""

from __future__ import annotations

from commlayer.scheduler.choose import Decision, Planner, Policy, choose
from commlayer.scheduler.plan import Buffer, Gather, Op, Plan, Step, Strategy
from commlayer.scheduler.price import Timeline, price
from commlayer.scheduler.strategies import build
from commlayer.scheduler.traffic import Traffic, moe_bytes

__all__ = [
    "Buffer",
    "Decision",
    "Gather",
    "Op",
    "Plan",
    "Planner",
    "Policy",
    "Step",
    "Strategy",
    "Timeline",
    "Traffic",
    "build",
    "choose",
    "moe_bytes",
    "price",
]
