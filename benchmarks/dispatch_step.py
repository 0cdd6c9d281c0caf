"""One dispatch there and back, timed: what comparisons of the dispatcher's kinds are made of."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from commlayer.integrations.moe.dispatcher import TokenDispatcher

__all__ = ["DispatchStep", "dispatch_step"]


@dataclass(frozen=True)
class DispatchStep:
    """Times of the slowest rank, ms, from the exchange of counts on, forward and both ways; the rows that came, what came home,
    and the tokens' gradient."""

    forward_ms: float
    both_ms: float
    rows: torch.Tensor
    out: torch.Tensor
    gradient: torch.Tensor


def dispatch_step(
    dispatcher: TokenDispatcher, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
) -> DispatchStep:
    """Send the tokens [T, H] to experts that do nothing and back, and the tokens themselves as gradient of what came home."""
    tokens, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    dist.barrier()
    begin = time.perf_counter()
    handle = dispatcher.prepare(indices, like=tokens, weights=weights)
    rows, _ = dispatcher.dispatch(tokens, handle)
    out = dispatcher.combine(rows, handle, weights)
    middle = time.perf_counter()
    out.backward(x)
    end = time.perf_counter()
    times = torch.tensor([middle - begin, end - begin], dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    forward_s, both_s = times.tolist()
    assert tokens.grad is not None  # the tokens require it
    return DispatchStep(forward_s * 1e3, both_s * 1e3, rows.detach(), out.detach(), tokens.grad)
