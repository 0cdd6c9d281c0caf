"""What a trainer's software does with a mapping: how its collectives move, and what it hides behind what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.plan import Strategy

__all__ = ["COMMLAYER", "MEGATRON", "SOFTWARE", "Software", "software"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """How a step is run.

    Attributes:
        strategies: by which collectives may move; flat alone is what NCCL does without us.
        gradient_bytes: of an element in the sums of gradients: 4 (FP32) or 2.
        context: how context parallelism meets keys and values: ``ring`` (blocks beside the attention of those before them)
            or ``gather`` (all of them, then the attention).
        overlaps_gradients: their sums run beside the backward pass of the last micro-batch.
        overlaps_parameters: sharded weights are gathered beside the forward pass.
        lanes: traffic yields by class (:mod:`commlayer.scheduler.lanes`).
        hides_dispatch: tokens go to experts in chunks, beside the experts' work (:mod:`commlayer.scheduler.overlap`).
    """

    name: str
    strategies: tuple[Strategy, ...]
    gradient_bytes: int = 4
    context: Literal["ring", "gather"] = "ring"
    overlaps_gradients: bool = True
    overlaps_parameters: bool = True
    lanes: bool = False
    hides_dispatch: bool = False


MEGATRON = Software(name="megatron", strategies=(Strategy.FLAT,))
COMMLAYER = Software(
    name="commlayer", strategies=tuple(Strategy), context="gather", lanes=True, hides_dispatch=True, overlaps_parameters=False
)
SOFTWARE = {entry.name: entry for entry in (COMMLAYER, MEGATRON)}


def software(name: str) -> Software:
    """By name. Raises UsageError for an unknown one."""
    if name not in SOFTWARE:
        raise UsageError(f"software: expected {' or '.join(SOFTWARE)}, got {name!r}")
    return SOFTWARE[name]
