"""A cluster that nobody may have: GPUs, NVLink domains, a network, each with a declared efficiency; a profile for any group."""

from __future__ import annotations

from dataclasses import dataclass

from commlayer.profiles.links import Peaks
from commlayer.profiles.profile import Profile

__all__ = ["Cluster", "Gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """``bf16_tflops``, ``fp8_tflops``: dense peaks (fp8 0: it has none). ``memory_bytes``; ``memory_gbps``: reads and writes, 1e9 B/s."""

    name: str
    bf16_tflops: float
    fp8_tflops: float
    memory_bytes: float
    memory_gbps: float


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """``domain``: GPUs that NVLink joins (a node; 72 in a rack). ``peaks``: per GPU and direction (links.Peaks)."""

    name: str
    gpu: Gpu
    domain: int
    peaks: Peaks
    source: str = ""

    def nodes_of(self, layout: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
        """How many ranks of a group (Setup.layout) each domain holds."""
        raise NotImplementedError

    def profile_of(self, nodes: tuple[int, ...]) -> Profile:
        """A profile with every curve that plans of a group on ``nodes`` are priced by; the same object for the same nodes."""
        raise NotImplementedError
