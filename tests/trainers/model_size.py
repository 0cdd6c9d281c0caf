"""The size of a trainer's model, and of a rank's part of a batch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Size"]


@dataclass(frozen=True)
class Size:
    """``width``: of an expert; ``layers``: all with experts."""

    batch: int = 2
    sequence: int = 12
    vocabulary: int = 64
    hidden: int = 32
    width: int = 48
    num_experts: int = 8
    top_k: int = 2
    layers: int = 1
