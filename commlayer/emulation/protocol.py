"""The protocol between the parent, the ranks and the fabric process: one JSON object a message.

Processes inside the cluster may ask for other rates, too.
"""

from __future__ import annotations

import enum
import json
import os
import socket
from dataclasses import dataclass
from typing import Any

from commlayer.profiles.errors import CommlayerError, InternalError, RightsError, UsageError
from commlayer.profiles.printable import say

__all__ = [
    "CONTROL_ADDRESS",
    "KEEP",
    "LONGEST_DELAY_US",
    "MESSAGE_BYTES",
    "NO_SHAPING",
    "Keep",
    "LinkSpec",
    "delay_message",
    "error_reply",
    "pair_message",
    "raise_reply",
    "request_shape",
    "shape_message",
]

CONTROL_ADDRESS = "\0commlayer-emulation"
"""Abstract Unix address, in every node's own namespace, where the fabric listens for requests."""

MESSAGE_BYTES = 65_536
"""The size of the largest message."""
LONGEST_DELAY_US = 10e6
"""The longest delay between nodes, one way."""
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class LinkSpec:
    """The wanted properties of the wires. Rates in bytes per second (None: unshaped); delay one
    way, between nodes."""

    inter: int | None
    intra: int | None
    delay_us: float
    delay_by: str
    """The means of delay: ``none``, ``netem`` (the kernel's) or ``relay`` (ours)."""
    scale: float = 1.0
    """How many times slower the wires run here than those that they stand for: rates and delay are
    of the latter."""

    @property
    def slowed_delay_us(self) -> float:
        """The delay that the wires have here."""
        return self.delay_us * self.scale

    def slowed(self, rate: int | None) -> int | None:
        """The rate that a wire has here which stands for one of ``rate``."""
        return None if rate is None else max(1, round(rate / self.scale))


def error_reply(error: Exception) -> dict[str, Any]:
    """The reply that makes `raise_reply` raise this error at the other end."""
    # pyroute2's NetlinkError is what the kernel answered, as an OSError is; named, because pyroute2
    # may be absent.
    refused = isinstance(error, OSError) or type(error).__name__ == "NetlinkError"
    kind = "usage" if isinstance(error, UsageError) else "rights" if refused else "internal"
    text = str(error) if isinstance(error, CommlayerError) else f"{type(error).__name__}: {error}"
    return {"error": text, "kind": kind}


def raise_reply(reply: dict[str, Any]) -> None:
    """Raise the error that a reply of the fabric carries, if it carries one."""
    if "error" in reply:
        kinds: dict[str, type[CommlayerError]] = {"usage": UsageError, "rights": RightsError}
        raise kinds.get(reply["kind"], InternalError)(reply["error"])


NO_SHAPING = "ranks run on loopback, whose rate cannot be shaped: this needs mode='netns'"


class Keep(enum.Enum):
    """The rate of a link that shall stay as it is (None means unshaped)."""

    KEEP = "keep"


KEEP = Keep.KEEP


def shape_message(inter: str | Keep | None, intra: str | Keep | None, node: int | None) -> dict[str, Any]:
    """The request for other rates."""
    rates = {name: rate for name, rate in (("inter", inter), ("intra", intra)) if not isinstance(rate, Keep)}
    return {"op": "shape", "rates": rates, "node": node}


def pair_message(sender: int, receiver: int, rate: str | None) -> dict[str, object]:
    """The request for another rate of what one node sends to another one."""
    return {"op": "shape_pair", "nodes": [sender, receiver], "rate": rate}


def delay_message(delay_us: float) -> dict[str, object]:
    """The request for another delay between nodes; raises UsageError for one that cannot be."""
    if not 0 < delay_us <= LONGEST_DELAY_US:
        raise UsageError(f"delay_us: expected more than 0 and at most {LONGEST_DELAY_US:.0f}, got {delay_us!r}")
    return {"op": "delay", "delay_us": delay_us}


def request_shape(*, inter: str | Keep | None = KEEP, intra: str | Keep | None = KEEP, node: int | None = None) -> None:
    """Change rates of the emulated cluster in which this process runs; back when the new rate is in
    force, and said on stderr.

    Works in a rank, in a program that a rank became, and in their children: the cluster listens
    inside every node.

    Args:
        inter: new rate of the network interface, each direction; None: unshaped; left out: as it
            is.
        intra: the same for the loopback.
        node: the node whose links change; None: all.

    Raises:
        UsageError: not a rate, no such node, or this process is in no emulated cluster.
        RightsError: the cluster runs on loopback, where nothing can be shaped; or it is gone.
    """
    mode = os.environ.get("COMMLAYER_EMULATED")
    if mode is None:
        raise UsageError("request_shape is for ranks of an emulated cluster; outside, call EmulatedCluster.shape")
    if mode != "netns":
        raise RightsError(NO_SHAPING)
    message = shape_message(inter, intra, node)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(_PATIENCE_S)
        try:
            line.connect(CONTROL_ADDRESS)
            line.send(json.dumps(message).encode())
            reply = line.recv(MESSAGE_BYTES)
        except OSError as error:
            raise RightsError(f"the emulated cluster of this rank does not answer: {error}") from error
    if not reply:
        raise RightsError("the emulated cluster of this rank is gone")
    raise_reply(json.loads(reply))
    rates = ", ".join(f"{name} {rate or 'unshaped'}" for name, rate in message["rates"].items())
    where = "all nodes" if node is None else f"node {node}"
    say(f"emulated cluster: {where}: {rates or 'as before'} from now on")
