"""Rows of choices through a dispatcher, for trainers that sort the tokens and sum the experts'
outputs themselves.

Where tokens go by all_to_all in one chunk, a trainer's own sort and weighted sum stand around the
exchanges, and its losses stay what they were, bit for bit. The other kinds sum a node's, or a
rank's, outputs before they send them, and so take the weights.

Shapes: T tokens of this rank, K choices of each, N = T·K rows of choices, R rows that this rank's
experts receive, H hidden.
"""

from __future__ import annotations

import torch

from commlayer.integrations.moe.dispatch_kinds import AllToAll
from commlayer.integrations.moe.handle import DispatchHandle

__all__ = ["experts_of_rows", "moves_choices", "return_choices", "send_choices"]


def moves_choices(handle: DispatchHandle) -> bool:
    """Tell whether each choice is a row of its own, which goes out and comes back: all_to_all, in
    one chunk. The same on all ranks."""
    return handle.kind == "all_to_all" and len(handle.chunks) == 1


def send_choices(rows: torch.Tensor, handle: DispatchHandle, *, by_expert: bool = True) -> torch.Tensor:
    """Send rows [N, H], one for each choice, sorted by expert, to their experts: [R, H], sorted by
    expert, then by rank; or, not ``by_expert``, as they arrive: by rank, then by expert.
    Collective, and differentiable."""
    chunk = _only(handle)
    if handle.needs_gradient and not rows.requires_grad and torch.is_grad_enabled():
        rows = rows.detach().requires_grad_()  # its gradient is a collective too
    arrived = chunk.token_dispatch(rows).wait()
    return chunk.dispatch_postprocess(arrived) if by_expert else arrived


def experts_of_rows(handle: DispatchHandle) -> torch.Tensor:
    """Make the local expert of each row [R] that arrives, in the order in which they do."""
    chunk = _only(handle)
    experts = torch.arange(len(chunk.expert_rows)).repeat_interleave(torch.tensor(chunk.expert_rows))
    return experts if chunk.by_expert is None else experts[chunk.by_expert.inverse.cpu()]


def return_choices(rows: torch.Tensor, handle: DispatchHandle, *, by_expert: bool = True) -> torch.Tensor:
    """Bring the experts' outputs [R, H], in the order of :func:`send_choices`, back to the places
    of what that sent: [N, H]. Collective, and differentiable."""
    chunk = _only(handle)
    if by_expert:
        rows = chunk.combine_preprocess(rows, None)
    return chunk.token_combine(rows).wait()


def _only(handle: DispatchHandle) -> AllToAll:
    (chunk,) = handle.chunks
    assert isinstance(chunk, AllToAll)  # as moves_choices tells
    return chunk
