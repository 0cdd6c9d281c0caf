"""The Codec: what encodes rows for the wire, decodes them, and adds them up. It checks, and picks the path for the device."""

from __future__ import annotations

import torch

from commlayer.codecs import cpu
from commlayer.codecs.fp8 import grid_shape
from commlayer.codecs.scratch import TILE_ELEMENTS
from commlayer.profiles.errors import NonFiniteError, TensorError, UsageError
from commlayer.scheduler.wire import Wire, WireFormat

__all__ = ["Codec"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Codec:
    """Encodes rows of ``dtype`` as ``wire`` says, and decodes them.

    Rows are [r, W] with W = ``wire.row_elements``; a BF16 wire has no scales, so there rows may have any width (and any shape
    where no index is given). Encoded messages are 1-D uint8, possibly a slice of a larger buffer, that begin at a multiple of
    four bytes (two for BF16): the scales (FP32), then the payload, row after row; :meth:`wire_bytes` long.

    ``non_finite`` is what FP8 does with NaN and infinity: ``raise``, or ``pass`` them on (docs/codecs.md). BF16 has both and
    passes them. All methods may be called from any thread, in inference mode or out of it; none keeps history for gradients.

    Raises UsageError for the native format, which there is nothing to encode in, and TensorError for a dtype that does not go
    into the format.
    """

    def __init__(self, wire: Wire, dtype: torch.dtype, non_finite: str = "raise") -> None:
        if wire.format is WireFormat.NATIVE:
            raise UsageError("a native wire carries the tensor's own bytes: there is nothing to encode")
        if non_finite not in ("raise", "pass"):
            raise UsageError(f"non_finite must be raise or pass, got {non_finite!r}")
        if wire.format is WireFormat.BF16 and dtype in (torch.bfloat16, torch.float16):
            raise TensorError(f"{dtype} is already as small as BF16: send it native")
        if dtype not in (_FLOATS if wire.format.is_scaled else (torch.float32,)):
            takes = "float32, bfloat16 and float16" if wire.format.is_scaled else "float32"
            raise TensorError(f"{wire.format} encodes {takes}, got {dtype}: send it native")
        self.wire = wire
        self.dtype = dtype
        self.non_finite = non_finite
        self._is_scaled = wire.format.is_scaled

    def wire_bytes(self, rows: int) -> int:
        """Bytes of ``rows`` encoded rows, scales included."""
        return self.wire.wire_bytes(rows)

    def encode(self, rows: torch.Tensor, out: torch.Tensor, index: torch.Tensor | None = None) -> None:
        """``out`` (uint8) gets the message of ``rows``; with ``index`` (int64 [n]) that of rows[index[0]], rows[index[1]], …

        ``rows`` may have any strides; what is not contiguous is copied first. Raises NonFiniteError for NaN or infinity where
        they are not passed, before anything is written; TensorError for a wrong dtype, width, size or index.
        """
        self._check_rows(rows, index)
        rows = rows.contiguous()
        if not self._is_scaled:
            self._check_encoded(out, 2 * (rows.numel() if index is None else len(index) * rows[0:1].numel()))
            _encode_bf16(rows, out.view(torch.bfloat16), index)
            return
        count = len(rows if index is None else index)
        self._check_encoded(out, self.wire_bytes(count))
        if count == 0:
            return
        scales, has_marks = cpu.find_scales(rows, self.wire, index)
        if has_marks and self.non_finite == "raise":
            raise _non_finite(rows if index is None else rows[index], self.wire)
        wire_scales, payload = self._split(out, count)
        wire_scales.copy_(scales)
        cpu.write_payload(rows, self.wire, scales, payload, index, has_marks)

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, index: torch.Tensor | None = None) -> None:
        """``out`` [r, W] (``dtype``, contiguous) gets the rows of a message; with ``index`` row i goes to out[index[i]].

        Of rows that go to the same place one wins. Raises TensorError for a wrong dtype, width, size or index.
        """
        self._check_target(out, (self.dtype,), index)
        if not self._is_scaled:
            self._decode_bf16(encoded, out, index)
            return
        count = len(out if index is None else index)
        self._check_encoded(encoded, self.wire_bytes(count))
        if count == 0:
            return
        scales, codes = self._split(encoded, count)
        for (top, bottom, left, right), wide in cpu.decode_tiles(codes, scales, self.wire, self.dtype):
            if index is None:
                out[top:bottom, left:right].copy_(wide)
            else:
                out[:, left:right].index_copy_(0, index[top:bottom], wide.to(out.dtype))

    def add(
        self,
        encoded: torch.Tensor,
        into: torch.Tensor,
        *,
        weights: torch.Tensor | None = None,
        index: torch.Tensor | None = None,
    ) -> None:
        """``into`` [n, W] += the rows of a message: row i, times ``weights`` [i] (FP32), to row ``index`` [i], or to row i.

        ``into`` is contiguous, FP32 or of ``dtype``. Sums are in FP32 and in the order of the rows, also where an index comes
        more than once; in a narrower ``into`` they are rounded once, at the end. Decoded rows enter in FP32.

        Raises TensorError for a wrong dtype, width, size or index.
        """
        self._check_target(into, (torch.float32, self.dtype), index)
        if not self._is_scaled and weights is None and index is None:  # sums of gradients: one pass
            self._check_encoded(encoded, 2 * into.numel())
            torch.add(into, encoded.view(torch.bfloat16).view(into.shape), out=into)
            return
        count = len(into if index is None else index)
        self._check_weights(weights, count)
        self._check_encoded(encoded, self.wire_bytes(count) if self._is_scaled else 2 * count * into[0:1].numel())
        if count == 0:
            return
        if index is not None and into.dtype is not torch.float32:
            touched, index = index.unique(return_inverse=True)
            total = into[touched].float()
            self._add_tiles(encoded, total, weights, index)
            into[touched] = total.to(into.dtype)
        else:
            self._add_tiles(encoded, into, weights, index)

    def error(self, rows: torch.Tensor) -> tuple[float, float]:
        """(sum of squares of what encoding and decoding changes, sum of squares of ``rows``), in FP64, of finite elements.

        Raises NonFiniteError as :meth:`encode` does.
        """
        rows = rows.contiguous() if self._is_scaled else rows.contiguous().view(1, -1)
        encoded = torch.empty(
            2 * rows.numel() if not self._is_scaled else self.wire_bytes(len(rows)), dtype=torch.uint8
        )
        decoded = torch.empty_like(rows)
        self.encode(rows, encoded)
        self.decode(encoded, decoded)
        of_error, of_rows = 0.0, 0.0
        for before, after in zip(
            rows.view(-1).split(TILE_ELEMENTS), decoded.view(-1).split(TILE_ELEMENTS), strict=True
        ):
            x = torch.where(before.isfinite(), before, 0).double()
            change = torch.where(before.isfinite(), after, 0).double() - x
            of_error += float(change.dot(change))
            of_rows += float(x.dot(x))
        return of_error, of_rows

    def _add_tiles(
        self, encoded: torch.Tensor, into: torch.Tensor, weights: torch.Tensor | None, index: torch.Tensor | None
    ) -> None:
        count = len(into if index is None else index)
        if self._is_scaled:
            scales, codes = self._split(encoded, count)
            tiles = cpu.decode_tiles(codes, scales, self.wire, self.dtype)
        else:
            wide = encoded.view(torch.bfloat16).view(count, -1).float()
            tiles = iter([((0, count, 0, wide.shape[1]), wide)])
        for (top, bottom, left, right), wide in tiles:
            if weights is not None:
                wide.mul_(weights[top:bottom].unsqueeze(1))
            if index is not None:
                into[:, left:right].index_add_(0, index[top:bottom], wide)
                continue
            target = into[top:bottom, left:right]
            if target.dtype is torch.float32:
                target.add_(wide)
            else:
                target.copy_(wide.add_(target))

    def _decode_bf16(self, encoded: torch.Tensor, out: torch.Tensor, index: torch.Tensor | None) -> None:
        if index is None:
            self._check_encoded(encoded, 2 * out.numel())
            out.copy_(encoded.view(torch.bfloat16).view(out.shape))
            return
        self._check_encoded(encoded, 2 * len(index) * out[0:1].numel())
        out.index_copy_(0, index, encoded.view(torch.bfloat16).view(len(index), -1).float())

    def _split(self, encoded: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the scales, as a matrix, and of the payload [r, W] (uint8)."""
        end = 4 * self.wire.num_scales(rows)
        scales = encoded[:end].view(torch.float32).view(grid_shape(self.wire, rows))
        return scales, encoded[end:].view(rows, self.wire.row_elements)

    def _check_rows(self, rows: torch.Tensor, index: torch.Tensor | None) -> None:
        if rows.dtype is not self.dtype:
            raise TensorError(f"this codec encodes {self.dtype}, got {rows.dtype}")
        self._check_shape(rows, index)

    def _check_target(self, out: torch.Tensor, dtypes: tuple[torch.dtype, ...], index: torch.Tensor | None) -> None:
        if out.dtype not in dtypes:
            raise TensorError(f"expected rows of {' or '.join(map(str, dict.fromkeys(dtypes)))}, got {out.dtype}")
        if not out.is_contiguous():
            raise TensorError(f"decoding needs contiguous rows, got strides {list(out.stride())}")
        self._check_shape(out, index)

    def _check_shape(self, rows: torch.Tensor, index: torch.Tensor | None) -> None:
        width = self.wire.row_elements
        if self._is_scaled and (rows.dim() != 2 or rows.shape[1] != width):
            raise TensorError(f"expected rows [r, {width}], got shape {list(rows.shape)}")
        if index is None:
            return
        if rows.dim() != 2 or index.dim() != 1 or index.dtype is not torch.int64 or index.device != rows.device:
            raise TensorError(
                f"an index is int64 [n], of rows [r, W] on the same device; got {index.dtype} {list(index.shape)} on "
                f"{index.device} of {list(rows.shape)} on {rows.device}"
            )
        if len(index):
            low, high = (int(value) for value in torch.aminmax(index))
            if low < 0 or high >= len(rows):
                raise TensorError(f"an index of {len(rows)} rows goes from 0 to {len(rows) - 1}, got {low} to {high}")

    def _check_weights(self, weights: torch.Tensor | None, count: int) -> None:
        if weights is not None and (weights.dtype is not torch.float32 or list(weights.shape) != [count]):
            raise TensorError(
                f"expected weights float32 [{count}], one for each row, got {weights.dtype} {list(weights.shape)}"
            )

    def _check_encoded(self, encoded: torch.Tensor, expected: int) -> None:
        if encoded.dtype is not torch.uint8 or encoded.dim() != 1 or encoded.numel() != expected:
            raise TensorError(
                f"expected an encoded message of {expected} bytes (uint8, 1-D), got {encoded.dtype} {list(encoded.shape)}"
            )
        multiple = 4 if self._is_scaled else 2
        if encoded.storage_offset() % multiple or not encoded.is_contiguous():
            raise TensorError(
                f"an encoded message is contiguous and begins at a multiple of {multiple} bytes of its buffer, got an offset "
                f"of {encoded.storage_offset()} and a stride of {encoded.stride(0)}"
            )


def _encode_bf16(rows: torch.Tensor, target: torch.Tensor, index: torch.Tensor | None) -> None:
    if index is None:
        target.view(rows.shape).copy_(rows)
        return
    target = target.view(len(index), -1)
    step = max(1, TILE_ELEMENTS // max(1, rows.shape[1]))
    for part, places in zip(target.split(step), index.split(step), strict=True):
        part.copy_(rows.index_select(0, places))


def _non_finite(rows: torch.Tensor, wire: Wire) -> NonFiniteError:
    is_bad = ~rows.isfinite()
    first = int(is_bad.any(1).nonzero()[0])
    return NonFiniteError(
        f"{int(is_bad.sum())} of {rows.numel()} elements to be sent as {wire.format} are NaN or infinity, the first in row "
        f"{first}: find where they come from, or allow them with non_finite='pass'"
    )
