"""Tensors in one piece of memory, and that memory as bytes: what every transport moves."""

from __future__ import annotations

import torch

from commlayer.profiles.errors import TensorError

__all__ = ["as_bytes", "plain"]

_STRIDED = torch.strided


def plain(x: torch.Tensor) -> torch.Tensor:
    """``x`` without history and contiguous: itself where it is, else a copy. Signs and conjugations put off are carried out.

    Raises TensorError for sparse tensors.
    """
    if x.layout is not _STRIDED:
        raise TensorError(
            f"expected a dense tensor, got {x.layout}: only all_reduce takes sparse tensors; use x.to_dense()"
        )
    x = x.detach() if x.requires_grad else x
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    return x.contiguous()


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of ``x`` as 1-D uint8 [bytes]; a view where ``x`` is plain. Every dtype passes, FP8 and NaN payloads too."""
    return plain(x).view(-1).view(torch.uint8)
