"""The calls that measurements make between a group's own: two members swap bytes, all find the largest of their values."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from commlayer.engine.planned import PlannedGroup
from commlayer.failures.waits import wait

__all__ = ["largest", "swap"]


def largest(planned: PlannedGroup, values: Sequence[float], timeout_s: float, what: str) -> list[float]:
    """Return each value's largest over ranks, so that all of them decide alike. Collective over the group.

    ``what`` it is for stands in its errors. Raises PeerError and CollectiveTimeoutError as a call does.
    """
    found, options = torch.tensor(values, dtype=torch.float64), dist.AllreduceOptions()
    options.reduceOp, options.timeout = dist.ReduceOp(dist.ReduceOp.MAX), timedelta(seconds=timeout_s)
    began = time.monotonic()
    try:
        wait(planned.connect_own_calls().allreduce([found], options), planned.board)
    except RuntimeError as error:
        raise planned.explain(error, what, 0, time.monotonic() - began, timeout_s) from error
    return [float(value) for value in found]


def swap(
    planned: PlannedGroup,
    peer: int,
    data: torch.Tensor,
    arrived: torch.Tensor,
    *,
    timeout_s: float,
    what: str,
    tag: int = 0,
) -> None:
    """Send ``data`` to member ``peer`` while its own arrives; errors as of :func:`largest`."""
    own, limit, began = planned.connect_own_calls(), timedelta(seconds=timeout_s), time.monotonic()
    try:
        for work in [own.recv([arrived], peer, tag), own.send([data], peer, tag)]:
            planned.wait_for_message(work, limit)
    except RuntimeError as error:
        raise planned.explain(error, what, 0, time.monotonic() - began, timeout_s) from error
