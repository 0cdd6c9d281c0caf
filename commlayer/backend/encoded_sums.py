"""A group's own sums in a wire format: all_reduce and reduce_scatter where its options allow one
(``GroupOptions(wire=…)``), on the CPU and on devices."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch._C._distributed_c10d import ReduceOp

from commlayer.backend.arithmetic import AVG, SUM
from commlayer.backend.known_plans import AskPlan
from commlayer.calls.movement import Movement
from commlayer.profiles.printable import warn
from commlayer.scheduler.wire import NATIVE, Wire, WireFormat, wires_of_sum
from commlayer.wire.codecs import Codec

__all__ = ["encoded_sum", "wires_of_own_sum"]


def encoded_sum(
    formats: tuple[WireFormat, ...],
    ask: AskPlan,
    collective: str,
    source: torch.Tensor,
    target: torch.Tensor,
    op: ReduceOp.RedOpType,
    size: int,
) -> Movement | None:
    """The movement of a sum over ``size`` ranks in one of ``formats``, where ``ask`` chooses one;
    None: it goes as it is. An all_reduce (source is target) or a reduce_scatter; NaN and infinity
    pass."""
    wires = wires_of_own_sum(formats, source, target, op)
    plan = ask(collective, source.nbytes, wires, source.element_size()) if wires else None
    if plan is None or plan.wire.is_native:
        return None
    blocks = None if collective == "all_reduce" else (target.nbytes,) * size
    codec = Codec(plan.wire, source.dtype, "pass")
    return Movement(plan, source, target, "encoded", blocks=blocks, codec=codec)


def wires_of_own_sum(
    formats: tuple[WireFormat, ...], source: torch.Tensor, target: torch.Tensor, op: ReduceOp.RedOpType
) -> tuple[Wire, ...]:
    """Return those of ``formats`` in which the sum of ``source`` into ``target`` may go; empty: as
    it is. The same on all ranks. Warns once for a size that goes as it is where the options do not
    allow that."""
    if source.dtype is not torch.float32 or op not in (SUM, AVG) or not source.numel():
        return ()
    wires = wires_of_sum(formats, target.numel())
    if not wires:
        _warn(formats, target.numel())
    return wires


@lru_cache(maxsize=1024)
def _warn(formats: tuple[WireFormat, ...], elements: int) -> None:
    if elements > 1 and NATIVE.format not in formats:
        names = " or ".join(map(str, formats))
        warn(
            f"commlayer: a sum of {elements} FP32 elements for each rank goes as it is and not in {names}: no width from 16 to "
            "1024 divides that number into rows with scales; pad the tensor, or allow bf16 too",
            stacklevel=2,
        )
