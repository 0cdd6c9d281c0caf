"""Triton kernels for rows on a GPU: what :mod:`commlayer.wire.codecs` runs there.

They need Triton, the extra ``triton``. Importing this package does not load Triton; :func:`row_kernels` does.
With TRITON_INTERPRET=1 in the environment before Triton is loaded they run on CPU tensors, in its interpreter: that is how
tests/wire/test_kernels.py holds them against the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commlayer.profiles.errors import UsageError

if TYPE_CHECKING:
    from commlayer.wire.kernels import rows

__all__ = ["row_kernels"]


def row_kernels() -> type[rows.RowKernels]:
    """Return the object that encodes, decodes and adds rows with kernels. Raises UsageError without Triton."""
    try:
        from commlayer.wire.kernels.rows import RowKernels
    except ImportError as error:
        raise UsageError(
            f"rows on a GPU are encoded by Triton kernels, and Triton could not be loaded ({error}): "
            "pip install 'triton>=3.2', or send CUDA tensors native"
        ) from error
    return RowKernels
