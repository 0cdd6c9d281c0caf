"""Encoding and decoding of rows on the simulated device that torch sees: the CPU's, launched on the current stream."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlayer.wire.codecs.cpu_rows import HostRows
from commlayer.wire.codecs.encoded_rows import EncodedRows
from simulated.torch_simulator import require_simulator

__all__ = ["SimulatedRows"]


class SimulatedRows:
    """The rows of its tensors (see :class:`commlayer.wire.codecs.encoded_rows.DeviceRowPath`)."""

    @staticmethod
    def encode(rows: torch.Tensor, encoded: EncodedRows) -> None:
        """Write the message of ``rows``; NaN and infinity are passed on."""
        source, message = _host(rows), _on_host(encoded)
        _launch("encode rows", lambda: HostRows.encode(source, message, passes=True))

    @staticmethod
    def decode(encoded: EncodedRows, out: torch.Tensor) -> None:
        message, target = _on_host(encoded), _host(out)
        _launch("decode rows", lambda: HostRows.decode(message, target))

    @staticmethod
    def add(encoded: EncodedRows, into: torch.Tensor, weights: torch.Tensor | None) -> None:
        message, target = _on_host(encoded), _host(into)
        factors = None if weights is None else _host(weights)
        _launch("add rows", lambda: HostRows.add(message, target, factors))


def _launch(label: str, work: Callable[[], object]) -> None:
    made = require_simulator()
    made.runner.launch(made.current.queue, label, work)


def _host(x: torch.Tensor) -> torch.Tensor:
    """The CPU tensor with the same memory."""
    return require_simulator().memory.alias(x)


def _on_host(encoded: EncodedRows) -> EncodedRows:
    places = None if encoded.places is None else _host(encoded.places)
    return encoded._replace(message=_host(encoded.message), places=places)
