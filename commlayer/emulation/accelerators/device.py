"""The declaration of an emulated accelerator: its rates, and by how much time is dilated."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass

from commlayer.profiles.errors import UsageError

__all__ = ["Accelerator", "checked_scale", "parse_compute", "parse_memory"]

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_COMPUTE = re.compile(r"\s*(\d*\.?\d+)\s*([kmgtp]?)flops?(?:/s)?\s*", re.IGNORECASE)
_MEMORY = re.compile(r"\s*(\d*\.?\d+)\s*([kmgtp]?)(?:byte|b)(?:/s)?\s*", re.IGNORECASE)
_LARGEST_SCALE = 1e9


def _parsed(pattern: re.Pattern[str], text: str, name: str, example: str) -> float:
    match = pattern.fullmatch(text) if isinstance(text, str) else None
    rate = 0.0 if match is None else float(match[1]) * _PREFIXES[match[2].lower()]
    if rate <= 0:
        raise UsageError(f"{name}: expected a rate with its unit, such as {example}, got {text!r}")
    return rate


def parse_compute(text: str) -> float:
    """Read a rate of computation as FLOP/s, such as ``4tflops`` or ``500gflops``. Raises UsageError for what is none."""
    return _parsed(_COMPUTE, text, "compute", "4tflops or 500gflops")


def parse_memory(text: str) -> float:
    """Read a rate of memory as bytes per second, such as ``3.35tbyte``. Raises UsageError for what is none."""
    return _parsed(_MEMORY, text, "memory", "3.35tbyte or 900gbyte")


def checked_scale(scale: float) -> float:
    """Return ``scale`` if it is a number of at least 1. Raises UsageError."""
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not is_number or not math.isfinite(scale) or not 1 <= scale <= _LARGEST_SCALE:
        raise UsageError(
            f"scale: expected by how many times all is slowed down, 1 to {_LARGEST_SCALE:.0e}, got {scale!r}"
        )
    return float(scale)


def _written(rate: float, unit: str) -> str:
    for prefix in ("p", "t", "g", "m", "k"):
        if rate >= _PREFIXES[prefix]:
            return f"{rate / _PREFIXES[prefix]:.4g} {prefix.upper() if prefix != 'k' else 'k'}{unit}"
    return f"{rate:.4g} {unit}"


@dataclass(frozen=True)
class Accelerator:
    """The device that every rank stands for.

    Attributes:
        flops_per_s: how fast it multiplies matrices.
        bytes_per_s: how fast it reads and writes its memory; None: what only moves memory takes no time.
        scale: how many times slower than that device it runs here, as the wires do.
    """

    flops_per_s: float
    bytes_per_s: float | None = None
    scale: float = 1.0

    def __str__(self) -> str:
        memory = "" if self.bytes_per_s is None else f" with memory of {_written(self.bytes_per_s, 'B/s')}"
        return f"an emulated accelerator of {_written(self.flops_per_s, 'FLOP/s')}{memory}"

    def seconds(self, flops: float, num_bytes: float) -> float:
        """Return how long an operation lasts here: by its FLOPs or by its bytes, whichever takes longer."""
        by_memory = 0.0 if self.bytes_per_s is None else num_bytes / self.bytes_per_s
        return self.scale * max(flops / self.flops_per_s, by_memory)

    @classmethod
    def declared(cls, compute: str | None, memory: str | None, scale: float) -> Accelerator | None:
        """Make the device that a user's words declare; None where they declare none. Raises UsageError."""
        scale = checked_scale(scale)
        if compute is None:
            if memory is not None or scale != 1:
                raise UsageError(
                    f"memory ({memory or 'not given'}) and scale ({scale:g}) are of an emulated accelerator: say its rate "
                    "too, with compute, such as 4tflops"
                )
            return None
        return cls(parse_compute(compute), None if memory is None else parse_memory(memory), scale)

    def to_text(self) -> str:
        """Write it for an environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Accelerator:
        """Read what :meth:`to_text` wrote."""
        return cls(**json.loads(text))
