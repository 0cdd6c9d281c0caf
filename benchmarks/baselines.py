"""Baselines: how other software moves replicated tokens, written with torch.distributed alone.

Shapes: [e, C, H] tokens for e expert ranks, replicated over the t ranks of the tp group; C divides by what is cut.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["BASELINES"]


def deepspeed_drop_gather(x: torch.Tensor, ep_group: dist.ProcessGroup, tp_group: dist.ProcessGroup) -> torch.Tensor:
    """DeepSpeed's way (MoNTA table 1): drop tokens to a slice, all_to_all, gather them again; one after the other."""
    part = _drop(x, tp_group)
    moved = torch.empty_like(part)
    dist.all_to_all_single(moved, part, group=ep_group)
    return torch.cat(_gather(moved, tp_group), dim=1)


def monta_fixed_chunks(
    x: torch.Tensor, ep_group: dist.ProcessGroup, tp_group: dist.ProcessGroup, chunks: int = 4
) -> torch.Tensor:
    """MoNTA as released: a fixed number of chunks (four), all all_to_all issued first, then chunk by chunk wait, gather
    the whole, copy to its place."""
    output = torch.empty_like(x)
    pending = []
    for chunk in x.chunk(chunks, dim=1):
        part = _drop(chunk, tp_group)
        moved = torch.empty_like(part)
        pending.append((dist.all_to_all_single(moved, part, group=ep_group, async_op=True), moved, part))
    start = 0
    for work, moved, _part in pending:
        work.wait()
        for piece in _gather(moved, tp_group):
            output.narrow(1, start, piece.shape[1]).copy_(piece)
            start += piece.shape[1]
    return output


def _drop(x: torch.Tensor, tp_group: dist.ProcessGroup) -> torch.Tensor:
    width = x.shape[1] // dist.get_world_size(tp_group)
    return x.narrow(1, dist.get_rank(tp_group) * width, width).contiguous()


def _gather(x: torch.Tensor, tp_group: dist.ProcessGroup) -> list[torch.Tensor]:
    pieces = [torch.empty_like(x) for _ in range(dist.get_world_size(tp_group))]
    dist.all_gather(pieces, x, group=tp_group)
    return pieces


BASELINES = {"DeepSpeed drop/gather": deepspeed_drop_gather, "MoNTA released, 4 chunks": monta_fixed_chunks}
"""The baselines by name. Four chunks, and the ranks of a node, have to divide the tokens."""
