"""Values for conformance checks: made from seeds that all ranks know, and compared bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commlayer.testing.verbs_contract import ReduceOp
from commlayer.transport.call_memory import as_row, plain

__all__ = ["bits", "expect_bits", "expect_sum", "fractions", "integers", "reduced", "stale"]

_STALE_BYTE = 0x5A


def _generator(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(key) & (1 << 62) - 1)  # the hash of integers is the same in all processes


def bits(shape: tuple[int, ...], dtype: torch.dtype, *key: int) -> torch.Tensor:
    """Make random bytes, so that NaNs with payloads and denormals are among the values; bool holds 0 and 1."""
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=_generator(*key)).bool()
    data = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=_generator(*key))
    return data.view(dtype).view(shape)


def integers(shape: tuple[int, ...], dtype: torch.dtype, op: ReduceOp, *key: int) -> torch.Tensor:
    """Make small integers, which every dtype holds and of which every order of reduction gives the same: powers of two for
    products, else from -4 to 4 (from 0 where there is no sign)."""
    low = 0 if dtype is torch.uint8 else -4
    values = torch.randint(low, 5, shape, generator=_generator(*key))
    if op == "product":
        values = values.remainder(2) + 1
    return values.to(dtype)


def fractions(shape: tuple[int, ...], dtype: torch.dtype, *key: int) -> torch.Tensor:
    """Make values of very different size, whose sum depends on the order of addition in its last bits."""
    generator = _generator(*key)
    exponents = torch.randint(-6, 7, shape, generator=generator)
    return torch.ldexp(torch.randn(shape, generator=generator), exponents).to(dtype)


def reduced(parts: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """Return what a reduction of `integers` must give."""
    stack = torch.stack([part.to(torch.int64) for part in parts])
    if op == "sum":
        total = stack.sum(0)
    elif op == "product":
        total = stack.prod(0)
    else:
        total = stack.amin(0) if op == "min" else stack.amax(0)
    return total.to(parts[0].dtype)


def stale(like: torch.Tensor) -> torch.Tensor:
    """Make an output buffer with something in it that is no result."""
    buffer = torch.empty_like(like, memory_format=torch.contiguous_format)
    buffer.view(-1).view(torch.uint8).fill_(1 if like.dtype is torch.bool else _STALE_BYTE)
    return buffer


def expect_bits(got: torch.Tensor, wanted: torch.Tensor, rank: int, what: str = "the output") -> None:
    """Raise AssertionError with the first element whose bits differ."""
    ours, theirs = (as_row(plain(each.cpu())) for each in (got, wanted))
    a, b = ours.view(torch.uint8), theirs.view(torch.uint8)
    if torch.equal(a, b):
        return
    size = got.dtype.itemsize
    wrong = (a != b).view(-1, size).any(1).nonzero().view(-1)
    first = int(wrong[0])
    raise AssertionError(
        f"rank {rank}: {what}: {len(wrong)} of {got.numel()} elements differ, first element {first}: expected "
        f"{_shown(theirs, first)}, got {_shown(ours, first)}"
    )


def _shown(flat: torch.Tensor, index: int) -> str:
    raw = flat[index : index + 1].view(torch.uint8).tolist()
    return f"{flat[index].item()} (bytes {bytes(raw).hex()})"


def expect_sum(got: torch.Tensor, parts: Sequence[torch.Tensor], rank: int) -> None:
    """Raise AssertionError where ``got`` is further from the sum of ``parts`` than additions in its dtype can bring it."""
    stack = torch.stack([part.to(torch.float64) for part in parts])
    bound = len(parts) * torch.finfo(got.dtype).eps * stack.abs().sum(0) + torch.finfo(got.dtype).tiny
    error = (got.detach().cpu().to(torch.float64) - stack.sum(0)).abs()
    if bool((error > bound).any()):
        worst = int((error / bound).argmax())
        raise AssertionError(
            f"rank {rank}: element {worst} of the sum is {got.view(-1)[worst].item()}, which is "
            f"{error.view(-1)[worst].item():g} from the sum in float64; rounding explains {bound.view(-1)[worst].item():g}"
        )
