"""A message of encoded rows: what its bytes are, and which rows of a tensor they hold."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from commlayer.profiles.errors import NonFiniteError
from commlayer.scheduler.wire import Wire

__all__ = ["DeviceRowPath", "EncodedRows", "RowPath", "non_finite_error", "register_row_path", "row_path_of"]


class EncodedRows(NamedTuple):
    """Rows as they travel: the scales (FP32), then the payload, row after row.

    ``message``: uint8; ``dtype``: of the rows when they are not encoded, which sets the largest finite value. Row i of the
    message comes from, or goes to, row ``places`` [i] of a tensor, or row i where there are no places.
    """

    message: torch.Tensor
    wire: Wire
    dtype: torch.dtype
    places: torch.Tensor | None = None

    def num_rows(self, rows: torch.Tensor) -> int:
        """How many rows the message holds, of a tensor ``rows`` [r, W]."""
        return rows.shape[0] if self.places is None else self.places.shape[0]

    def parts(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the scales (FP32) and the payload (uint8) of ``count`` rows, both 1-D."""
        end = 4 * self.wire.num_scales(count)
        return self.message[:end].view(torch.float32), self.message[end:]


def non_finite_error(rows: torch.Tensor, wire: Wire) -> NonFiniteError:
    """Make the error for ``rows`` [r, W] that have NaN or infinity: how many, and the first row."""
    is_bad = ~rows.isfinite()
    first = int(is_bad.any(1).nonzero()[0])
    return NonFiniteError(
        f"{int(is_bad.sum())} of {rows.numel()} elements to be sent as {wire.format} are NaN or infinity, the first in row "
        f"{first}: find where they come from, or allow them with non_finite='pass'"
    )


class RowPath(Protocol):
    """The path of a :class:`commlayer.wire.codecs.Codec` on one kind of device; it has checked the arguments."""

    @staticmethod
    def decode(encoded: EncodedRows, out: torch.Tensor) -> None:
        """Write the rows of a message to ``out`` [r, W], or to those of its rows at the places."""

    @staticmethod
    def add(encoded: EncodedRows, into: torch.Tensor, weights: torch.Tensor | None) -> None:
        """Add the rows of a message, weighted, to the rows of ``into`` [n, W] at the places; in the message's order."""


class DeviceRowPath(RowPath, Protocol):
    """The same on a device, where nothing that it launches can raise: NaN and infinity are passed on."""

    @staticmethod
    def encode(rows: torch.Tensor, encoded: EncodedRows) -> None:
        """Write the message of ``rows`` [r, W], or of those at the places."""


_registered: dict[str, type[DeviceRowPath]] = {}


def register_row_path(device_type: str, path: type[DeviceRowPath]) -> None:
    """Have codecs encode and decode tensors of ``device_type``, which has no kernels of its own, by ``path``."""
    _registered[device_type] = path


def row_path_of(device_type: str) -> type[DeviceRowPath] | None:
    """The path that was registered for a type of device."""
    return _registered.get(device_type)
