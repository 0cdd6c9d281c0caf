"""Tensors in one piece of memory, and that memory as bytes: what every transport moves."""

from __future__ import annotations

import torch

from commlayer.profiles.errors import TensorError

__all__ = ["as_bytes", "as_row", "plain", "require_dense"]

_STRIDED = torch.strided


def plain(x: torch.Tensor) -> torch.Tensor:
    """``x`` without history and contiguous: itself where it is, else a copy. Signs and conjugations put off are carried out.

    Raises TensorError for sparse tensors.
    """
    require_dense(x)
    x = x.detach() if x.requires_grad else x
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    return x.contiguous()


def require_dense(x: torch.Tensor) -> None:
    """Raises TensorError for sparse tensors."""
    if x.layout is not _STRIDED:
        raise TensorError(
            f"expected a dense tensor, got {x.layout}: only all_reduce takes sparse tensors; use x.to_dense()"
        )


def as_row(x: torch.Tensor) -> torch.Tensor:
    """The elements of ``x``, which is contiguous, as a 1-D view with stride 1.

    ``x.view(-1)`` keeps the stride of a tensor of one or no elements, which is contiguous with any, and torch views bytes only
    where it is 1.
    """
    return x.as_strided((x.numel(),), (1,))


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of ``x`` as 1-D uint8 [bytes]; a view where ``x`` is plain. Every dtype passes, FP8 and NaN payloads too."""
    if x.layout is not _STRIDED or not x.is_contiguous() or x.is_conj() or x.is_neg() or x.requires_grad:
        x = plain(x)
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)  # as_row, without a call
