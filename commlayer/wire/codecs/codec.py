"""The Codec, which encodes rows for the wire, decodes them, and adds them up. It checks, and picks the path for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commlayer.profiles.errors import TensorError, UsageError
from commlayer.scheduler.wire import Wire, WireFormat
from commlayer.wire.codecs.cpu_rows import HostRows
from commlayer.wire.codecs.encoded_rows import DeviceRowPath, EncodedRows, RowPath, non_finite_error, row_path_of
from commlayer.wire.codecs.scratch import TILE_ELEMENTS

__all__ = ["Codec"]

_SCALED_FROM = (torch.float32, torch.bfloat16, torch.float16)


class Codec:
    """Encodes rows of ``dtype`` as ``wire`` says, and decodes them.

    Rows are [r, W] with W = ``wire.row_elements``; BF16 has no scales, so there rows may have any width, and any shape where
    no index is given. Encoded messages are 1-D uint8, possibly a slice of a larger buffer, that begin at a multiple of four
    bytes (two for BF16): the scales (FP32), then the payload, row after row; :meth:`wire_bytes` long.

    ``non_finite`` is what FP8 and INT8 do with NaN and infinity: ``raise``, or ``pass`` them on (docs/codecs.md). BF16 has both
    and passes them. All methods may be called from any thread, in inference mode or out of it; none keeps history for gradients.
    Of empty rows nothing is written.

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
        if dtype not in (_SCALED_FROM if wire.format.is_scaled else (torch.float32,)):
            takes = "float32, bfloat16 and float16" if wire.format.is_scaled else "float32"
            raise TensorError(f"{wire.format} encodes {takes}, got {dtype}: send it native")
        self.wire = wire
        self.dtype = dtype
        self.non_finite = non_finite
        self._is_scaled = wire.format.is_scaled

    def on_bytes(self) -> RowCoder:
        """Return the same for tensors that are given as their bytes."""
        return RowCoder(self)

    def wire_bytes(self, rows: int) -> int:
        """Return the bytes of ``rows`` encoded rows of ``wire.row_elements``, scales included."""
        return self.wire.wire_bytes(rows)

    def encode(self, rows: torch.Tensor, out: torch.Tensor, index: torch.Tensor | None = None) -> None:
        """Write the message of ``rows`` to ``out`` (uint8); with ``index`` (int64 [n]) that of rows[index[0]],
        rows[index[1]], …

        ``rows`` may have any strides; what is not contiguous is copied first. Raises NonFiniteError for NaN or infinity where
        they are not passed, before anything is written (on a GPU the host waits for that); TensorError for a wrong dtype,
        width, size, device or index, UsageError for CUDA tensors without Triton.
        """
        rows = rows.detach()
        _check_rows(rows, self.wire, self.dtype, contiguous=False)
        if not self._accept(out, rows, index):
            return
        encoded = EncodedRows(out, self.wire, self.dtype, index)
        rows, passes = rows.contiguous(), self.non_finite == "pass" or not self._is_scaled
        if rows.is_cpu:
            HostRows.encode(rows, encoded, passes=passes)
            return
        if not passes:
            sent = rows if index is None else rows[index]
            if not bool(sent.isfinite().all()):
                raise non_finite_error(sent, self.wire)
        _device_path(rows).encode(rows, encoded)

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, index: torch.Tensor | None = None) -> None:
        """Write the rows of a message to ``out`` [r, W] (``dtype``, contiguous); with ``index`` row i goes to out[index[i]].

        Of rows that go to the same place one wins. Raises TensorError for a wrong dtype, width, size, device or index,
        UsageError for CUDA tensors without Triton.
        """
        out = out.detach()
        _check_rows(out, self.wire, self.dtype, contiguous=True)
        if self._accept(encoded, out, index):
            _path(out).decode(EncodedRows(encoded, self.wire, self.dtype, index), out)

    def add(
        self,
        encoded: torch.Tensor,
        into: torch.Tensor,
        *,
        weights: torch.Tensor | None = None,
        index: torch.Tensor | None = None,
    ) -> None:
        """Add the rows of a message to ``into`` [n, W]: row i, times ``weights`` [i] (FP32), to row ``index`` [i], or to row i.

        ``into`` is contiguous, FP32 or of ``dtype``. Decoded rows enter in FP32. Sums are in FP32 and in the order of the
        rows, also where an index comes more than once, so they have the same bits in every run; in a narrower ``into`` they
        are rounded once, at the end.

        Raises TensorError for a wrong dtype, width, size, device or index, UsageError for CUDA tensors without Triton.
        """
        into = into.detach()
        weights = None if weights is None else weights.detach()
        _check_rows(into, self.wire, torch.float32, self.dtype, contiguous=True)
        if weights is not None:
            if into.dim() != 2:
                raise TensorError(f"weights are of rows [n, W], got shape {list(into.shape)}")
            count = into.shape[0] if index is None else index.shape[0]
            if weights.dtype is not torch.float32 or list(weights.shape) != [count] or not weights.is_contiguous():
                raise TensorError(
                    f"expected weights float32 [{count}], contiguous, one for each row, got {weights.dtype} "
                    f"{list(weights.shape)}"
                )
        if self._accept(encoded, into, index):
            _path(into).add(EncodedRows(encoded, self.wire, self.dtype, index), into, weights)

    def error(self, rows: torch.Tensor) -> tuple[float, float]:
        """Return (sum of squares of what encoding and decoding changes, sum of squares of ``rows``), in FP64, of finite
        elements.

        It allocates, and on a GPU the host waits for it: for a sample of the calls. Raises as :meth:`encode` does.
        """
        rows = rows.detach()
        _check_rows(rows, self.wire, self.dtype, contiguous=False)
        rows = rows.contiguous()
        size = self.wire_bytes(rows.shape[0]) if self._is_scaled else 2 * rows.numel()
        encoded = torch.empty(size, dtype=torch.uint8, device=rows.device)
        decoded = torch.empty_like(rows)
        self.encode(rows, encoded)
        self.decode(encoded, decoded)
        step = TILE_ELEMENTS if rows.is_cpu else max(1, rows.numel())
        of_error, of_rows = 0.0, 0.0
        for before, after in zip(rows.view(-1).split(step), decoded.view(-1).split(step), strict=True):
            is_finite = before.isfinite()
            x = torch.where(is_finite, before, 0).double()
            change = torch.where(is_finite, after, 0).double().sub_(x)
            of_error += float(change.dot(change))
            of_rows += float(x.dot(x))
        return of_error, of_rows

    def _accept(self, message: torch.Tensor, rows: torch.Tensor, index: torch.Tensor | None) -> bool:
        """Whether there is anything to do; TensorError where message, rows and index do not fit together."""
        if index is not None:
            if rows.dim() != 2 or index.dim() != 1 or index.dtype is not torch.int64 or index.device != rows.device:
                raise TensorError(
                    f"an index is int64 [n], of rows [r, W] on the same device; got {index.dtype} {list(index.shape)} on "
                    f"{index.device} of {list(rows.shape)} on {rows.device}"
                )
            if index.numel():
                lowest, highest = torch.aminmax(index)
                height = rows.shape[0]
                if index.is_cuda:  # where nothing waits: a wrong entry is a device assertion
                    is_inside = (lowest >= 0) & (highest < height)
                    torch._assert_async(is_inside, "commlayer: an index of rows is out of range")
                elif int(lowest) < 0 or int(highest) >= height:
                    raise TensorError(
                        f"an index of {height} rows goes from 0 to {height - 1}, got {int(lowest)} to {int(highest)}"
                    )
        if self._is_scaled:
            expected = self.wire_bytes(rows.shape[0] if index is None else index.shape[0])
            _check_message(message, rows, expected, 4)
        else:
            expected = 2 * (rows.numel() if index is None else index.shape[0] * rows.shape[1])
            _check_message(message, rows, expected, 2)
        return expected > 0


class RowCoder:
    """A codec on the bytes of a tensor, as a plan moves them: see
    :class:`commlayer.transport.contract.Coder`."""

    def __init__(self, codec: Codec) -> None:
        self.codec, self.width = codec, codec.wire.row_elements

    def encode(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.codec.encode(self._rows(source), target)

    def decode(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.codec.decode(source, self._rows(target))

    def add(self, target: torch.Tensor, sources: Sequence[torch.Tensor], coded: Sequence[bool]) -> None:
        into = self._rows(target)
        total = into if into.dtype is torch.float32 else torch.empty_like(into, dtype=torch.float32)
        first, *rest = zip(sources, coded, strict=True)
        if first[1]:
            total.zero_()  # −0 in all sources becomes +0, as in any sum that begins with zero
            self.codec.add(first[0], total)
        else:
            total.copy_(self._rows(first[0]))
        for source, is_coded in rest:
            if is_coded:
                self.codec.add(source, total)
            else:
                total.add_(self._rows(source))
        if total is not into:
            into.copy_(total)

    def _rows(self, data: torch.Tensor) -> torch.Tensor:
        return data.view(self.codec.dtype).view(-1, self.width)


def _check_rows(rows: torch.Tensor, wire: Wire, *dtypes: torch.dtype, contiguous: bool) -> None:
    """Raise TensorError for rows that are not of ``dtypes``, not [r, W] where there are scales, or not contiguous."""
    if rows.dtype not in dtypes:
        raise TensorError(f"expected rows of {' or '.join(map(str, dict.fromkeys(dtypes)))}, got {rows.dtype}")
    if wire.format is not WireFormat.BF16 and (rows.dim() != 2 or rows.shape[1] != wire.row_elements):
        raise TensorError(f"expected rows [r, {wire.row_elements}], got shape {list(rows.shape)}")
    if contiguous and not rows.is_contiguous():
        raise TensorError(f"rows are written in place and must be contiguous, got strides {list(rows.stride())}")


def _check_message(message: torch.Tensor, rows: torch.Tensor, expected: int, multiple: int) -> None:
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


def _device_path(rows: torch.Tensor) -> type[DeviceRowPath]:
    path = row_path_of(rows.device.type)
    if path is not None:
        return path
    from commlayer.wire.kernels import row_kernels

    return row_kernels()


def _path(rows: torch.Tensor) -> type[RowPath]:
    return HostRows if rows.is_cpu else _device_path(rows)
