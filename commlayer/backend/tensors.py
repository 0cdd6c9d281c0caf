"""Tensors as Gloo takes them: contiguous, of a dtype it knows, in one piece; and back into what the caller passed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from commlayer.plain import plain
from commlayer.profiles.errors import TensorError

__all__ = ["MOVABLE", "flat", "is_plain", "join", "land", "landing", "real", "reals", "spread"]

MOVABLE = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.bool,
    }
)
"""Dtypes that Gloo's collectives move by themselves; all others travel as bytes (uint8 views)."""

_STRIDED = torch.strided
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def real(x: torch.Tensor) -> torch.Tensor:
    """``x``, or the tensor inside it: torch's dispatcher, which would look there, is not asked on the way to here.

    The results of functional collectives are such wrappers, with no memory of their own. Raises TensorError for others
    (fake tensors, DTensor).
    """
    if type(x) in _PLAIN:
        return x
    wait = getattr(x, "trigger_wait", None)
    if wait is not None:
        inside: torch.Tensor = wait()
        return real(inside)
    if isinstance(x, FakeTensor) or hasattr(x, "to_local"):
        raise TensorError(
            f"a {type(x).__name__} holds no bytes to move: "
            + ("pass its to_local()" if hasattr(x, "to_local") else "pass a tensor")
        )
    return x


def reals(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """:func:`real` of all of them; the same list where nothing is to be done."""
    if all(type(x) is torch.Tensor for x in tensors):
        return tensors
    return [real(x) for x in tensors]


def is_plain(x: torch.Tensor) -> bool:
    """Whether Gloo moves ``x`` as it is."""
    return x.dtype in MOVABLE and x.layout is _STRIDED and x.is_contiguous()


def flat(x: torch.Tensor) -> torch.Tensor:
    """:func:`plain` ``x`` as 1-D."""
    return plain(x).view(-1)


def landing(x: torch.Tensor) -> torch.Tensor:
    """Where the call may write what belongs in ``x``: 1-D, contiguous, ``x``'s own memory where that is possible."""
    if x.layout is _STRIDED and x.is_contiguous() and not x.is_conj() and not x.is_neg():
        return x.detach().view(-1)
    return torch.empty(x.numel(), dtype=x.dtype)


def land(x: torch.Tensor, arrived: torch.Tensor) -> None:
    """Put ``arrived`` (1-D) into ``x``, unless it is there already."""
    if arrived.numel() and arrived.data_ptr() != x.data_ptr():
        x.detach().copy_(arrived.view(x.shape))


def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of all ``parts`` in a row, 1-D."""
    return flat(parts[0]) if len(parts) == 1 else torch.cat([flat(part) for part in parts])


def spread(row: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """The reverse of :func:`join`."""
    at = 0
    for part in parts:
        part.detach().copy_(row[at : at + part.numel()].view(part.shape))
        at += part.numel()
