"""Checks of the arguments of a codec, and the errors that they raise."""

from __future__ import annotations

import torch

from commlayer.profiles.errors import NonFiniteError, TensorError, UsageError
from commlayer.scheduler.wire import Wire, WireFormat

__all__ = [
    "check_codec",
    "check_index",
    "check_message",
    "check_rows",
    "check_weights",
    "non_finite_error",
]

_SCALED_FROM = (torch.float32, torch.bfloat16, torch.float16)


def check_codec(wire: Wire, dtype: torch.dtype, non_finite: str) -> None:
    """Raise UsageError for the native format or an unknown ``non_finite``, TensorError for a dtype that has no place in it."""
    if wire.format is WireFormat.NATIVE:
        raise UsageError("a native wire carries the tensor's own bytes: there is nothing to encode")
    if non_finite not in ("raise", "pass"):
        raise UsageError(f"non_finite must be raise or pass, got {non_finite!r}")
    if wire.format is WireFormat.BF16 and dtype in (torch.bfloat16, torch.float16):
        raise TensorError(f"{dtype} is already as small as BF16: send it native")
    if dtype not in (_SCALED_FROM if wire.format.is_scaled else (torch.float32,)):
        takes = "float32, bfloat16 and float16" if wire.format.is_scaled else "float32"
        raise TensorError(f"{wire.format} encodes {takes}, got {dtype}: send it native")


def check_rows(rows: torch.Tensor, wire: Wire, *dtypes: torch.dtype, contiguous: bool) -> None:
    """Raise TensorError for rows that are not of ``dtypes``, not [r, W] where there are scales, or not contiguous."""
    if rows.dtype not in dtypes:
        raise TensorError(f"expected rows of {' or '.join(map(str, dict.fromkeys(dtypes)))}, got {rows.dtype}")
    if wire.format is not WireFormat.BF16 and (rows.dim() != 2 or rows.shape[1] != wire.row_elements):
        raise TensorError(f"expected rows [r, {wire.row_elements}], got shape {list(rows.shape)}")
    if contiguous and not rows.is_contiguous():
        raise TensorError(f"rows are written in place and must be contiguous, got strides {list(rows.stride())}")


def check_index(index: torch.Tensor, rows: torch.Tensor) -> None:
    """Raise TensorError for what is no map to ``rows``. On a GPU nothing waits: there a wrong entry is a device assertion."""
    if rows.dim() != 2 or index.dim() != 1 or index.dtype is not torch.int64 or index.device != rows.device:
        raise TensorError(
            f"an index is int64 [n], of rows [r, W] on the same device; got {index.dtype} {list(index.shape)} on "
            f"{index.device} of {list(rows.shape)} on {rows.device}"
        )
    if index.numel() == 0:
        return
    lowest, highest = torch.aminmax(index)
    if index.is_cuda:
        torch._assert_async((lowest >= 0) & (highest < rows.shape[0]), "commlayer: an index of rows is out of range")
    elif int(lowest) < 0 or int(highest) >= rows.shape[0]:
        raise TensorError(
            f"an index of {rows.shape[0]} rows goes from 0 to {rows.shape[0] - 1}, got {int(lowest)} to {int(highest)}"
        )


def check_weights(weights: torch.Tensor, count: int) -> None:
    """Raise TensorError unless there is one FP32 weight for each of ``count`` rows, in one piece."""
    if weights.dtype is not torch.float32 or list(weights.shape) != [count] or not weights.is_contiguous():
        raise TensorError(
            f"expected weights float32 [{count}], contiguous, one for each row, got {weights.dtype} {list(weights.shape)}"
        )


def check_message(message: torch.Tensor, rows: torch.Tensor, expected: int, multiple: int) -> None:
    """Raise TensorError unless ``message`` is ``expected`` bytes on the device of ``rows``, beginning at ``multiple``."""
    if message.dtype is not torch.uint8 or message.dim() != 1 or message.shape[0] != expected:
        raise TensorError(
            f"expected an encoded message of {expected} bytes (uint8, 1-D), got {message.dtype} {list(message.shape)}"
        )
    if message.storage_offset() % multiple or not message.is_contiguous():
        raise TensorError(
            f"an encoded message is contiguous and begins at a multiple of {multiple} bytes of its buffer, got an offset of "
            f"{message.storage_offset()} and a stride of {message.stride(0)}"
        )
    if message.device != rows.device:
        raise TensorError(f"rows and message must be on one device, got {rows.device} and {message.device}")


def non_finite_error(rows: torch.Tensor, wire: Wire) -> NonFiniteError:
    """Make the error for ``rows`` [r, W] that have NaN or infinity: how many, and the first row."""
    is_bad = ~rows.isfinite()
    first = int(is_bad.any(1).nonzero()[0])
    return NonFiniteError(
        f"{int(is_bad.sum())} of {rows.numel()} elements to be sent as {wire.format} are NaN or infinity, the first in row "
        f"{first}: find where they come from, or allow them with non_finite='pass'"
    )
