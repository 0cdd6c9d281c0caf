"""Tensors as Gloo takes them: contiguous, of a dtype it knows, in one piece; and back into what the
caller passed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from commlayer.profiles.errors import TensorError
from commlayer.transport.call_memory import as_row, plain

__all__ = [
    "MOVABLE",
    "is_dense",
    "is_plain",
    "join",
    "land",
    "landing",
    "plain_row",
    "real",
    "reals",
    "require_room",
    "spread",
]

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
    """``x`` without history, or the tensor inside it: torch's dispatcher, which would look there,
    was not asked before.

    The results of functional collectives are such wrappers, with no memory of their own. Gloo
    writes into what it is given, as autograd forbids for a parameter, when all has been sent.
    Raises TensorError for others (fake tensors, DTensor).
    """
    if type(x) in _PLAIN:
        return x.detach() if x.requires_grad else x
    wait = getattr(x, "trigger_wait", None)
    if wait is not None:
        inside: torch.Tensor = wait()
        return real(inside)
    if not isinstance(x, torch.Tensor):
        raise TensorError(f"expected a tensor, got a {type(x).__name__}: pass torch.as_tensor(x)")
    if isinstance(x, FakeTensor) or hasattr(x, "to_local"):
        raise TensorError(
            f"a {type(x).__name__} holds no bytes to move: "
            + ("pass its to_local()" if hasattr(x, "to_local") else "pass a tensor")
        )
    return x


def is_dense(x: torch.Tensor) -> bool:
    """Whether the elements of ``x`` fill one piece of memory, in whatever order.

    NCCL takes such tensors in place, and so do plans: no rank goes flat alone because its tensor
    has another memory format.
    """
    if x.layout is not _STRIDED or x.is_neg() or x.is_conj():
        return False
    if x.is_contiguous():
        return True
    filled = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1 and stride != filled:
            return False
        filled *= size
    return True


def reals(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """:func:`real` of all of them; the same list where nothing is to be done. Whatever holds
    tensors is taken, as Gloo does."""
    if type(tensors) is list:
        for x in tensors:  # not all(…), which makes a generator for what is mostly one tensor
            if type(x) is not torch.Tensor or x.requires_grad:
                break
        else:
            return tensors
    return [real(x) for x in tensors]


def is_plain(x: torch.Tensor) -> bool:
    """Whether the memory of ``x`` holds its elements as Gloo moves them, in their order."""
    return x.dtype in MOVABLE and x.layout is _STRIDED and x.is_contiguous() and not x.is_neg()


def plain_row(x: torch.Tensor) -> torch.Tensor:
    """:func:`plain` ``x`` as 1-D."""
    return as_row(plain(x))


def landing(x: torch.Tensor) -> torch.Tensor:
    """Where the call may write what belongs in ``x``: 1-D, contiguous, ``x``'s own memory where
    that is possible. Of what is written there autograd hears nothing, as of :func:`land`."""
    if x.layout is _STRIDED and x.is_contiguous() and not x.is_conj() and not x.is_neg():
        return as_row(x.data)
    require_room(x)
    return torch.empty(x.numel(), dtype=x.dtype)


def require_room(x: torch.Tensor) -> None:
    """Raises TensorError for an output of which several elements are one, such as an expanded one,
    before anything is sent."""
    if torch._debug_has_internal_overlap(x) == 1:  # what copy_ asks, too; the answer 2 is that it cannot know
        raise TensorError(
            f"an output of shape {list(x.shape)}, strides {list(x.stride())} has several elements in one place: "
            "pass x.contiguous()"
        )


def land(x: torch.Tensor, arrived: torch.Tensor) -> None:
    """Put ``arrived`` (1-D) into ``x``, unless it is there already. Autograd is not told: see
    :attr:`Verb.changes`."""
    if arrived.numel() and arrived.data_ptr() != x.data_ptr():
        x.data.copy_(arrived.view(x.shape))


def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of all ``parts`` in a row, 1-D."""
    return plain_row(parts[0]) if len(parts) == 1 else torch.cat([plain_row(part) for part in parts])


def spread(row: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """The reverse of :func:`join`; as :func:`land`."""
    at = 0
    for part in parts:
        part.data.copy_(row[at : at + part.numel()].view(part.shape))
        at += part.numel()
