"""The protocol between the parent, the ranks and the fabric process: one JSON object a message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from commlayer.profiles.errors import CommlayerError, InternalError, RightsError, UsageError

__all__ = ["CONTROL_ADDRESS", "MESSAGE_BYTES", "LinkSpec", "error_reply", "raise_reply"]

CONTROL_ADDRESS = "\0commlayer-emulation"
"""Abstract Unix address, in every node's own namespace, where the fabric listens for requests."""

MESSAGE_BYTES = 65_536
"""The size of the largest message."""


@dataclass(frozen=True)
class LinkSpec:
    """The wanted properties of the wires. Rates in bytes per second (None: unshaped); delay one way, between nodes."""

    inter: int | None
    intra: int | None
    delay_us: float
    delay_by: str
    """The means of delay: ``none``, ``netem`` (the kernel's) or ``relay`` (ours)."""
    scale: float = 1.0
    """How many times slower the wires run here than those that they stand for: rates and delay are of the latter."""

    @property
    def slowed_delay_us(self) -> float:
        """The delay that the wires have here."""
        return self.delay_us * self.scale

    def slowed(self, rate: int | None) -> int | None:
        """The rate that a wire has here which stands for one of ``rate``."""
        return None if rate is None else max(1, round(rate / self.scale))


def error_reply(error: Exception) -> dict[str, Any]:
    """The reply that makes `raise_reply` raise this error at the other end."""
    # pyroute2's NetlinkError is what the kernel answered, as an OSError is; named, because pyroute2 may be absent.
    refused = isinstance(error, OSError) or type(error).__name__ == "NetlinkError"
    kind = "usage" if isinstance(error, UsageError) else "rights" if refused else "internal"
    text = str(error) if isinstance(error, CommlayerError) else f"{type(error).__name__}: {error}"
    return {"error": text, "kind": kind}


def raise_reply(reply: dict[str, Any]) -> None:
    """Raise the error that a reply of the fabric carries, if it carries one."""
    if "error" in reply:
        kinds: dict[str, type[CommlayerError]] = {"usage": UsageError, "rights": RightsError}
        raise kinds.get(reply["kind"], InternalError)(reply["error"])
