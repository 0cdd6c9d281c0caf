"""Requests of processes inside the cluster: another rate."""

from __future__ import annotations

import enum
import json
import os
import socket

from commlayer.emulation.protocol import CONTROL_ADDRESS, MESSAGE_BYTES, raise_reply
from commlayer.profiles.errors import RightsError, UsageError
from commlayer.profiles.printable import say

__all__ = ["KEEP", "NO_SHAPING", "Keep", "delay_message", "pair_message", "request_shape", "shape_message"]

NO_SHAPING = "ranks run on loopback, whose rate cannot be shaped: this needs mode='netns'"
_PATIENCE_S = 10.0
_LONGEST_DELAY_US = 10e6


class Keep(enum.Enum):
    """The rate of a link that shall stay as it is (None means unshaped)."""

    KEEP = "keep"


KEEP = Keep.KEEP


def shape_message(inter: str | Keep | None, intra: str | Keep | None, node: int | None) -> dict[str, object]:
    """The request that the fabric understands."""
    rates = {name: rate for name, rate in (("inter", inter), ("intra", intra)) if not isinstance(rate, Keep)}
    return {"op": "shape", "rates": rates, "node": node}


def pair_message(sender: int, receiver: int, rate: str | None) -> dict[str, object]:
    """The request for another rate of what one node sends to another one."""
    return {"op": "shape_pair", "nodes": [sender, receiver], "rate": rate}


def delay_message(delay_us: float) -> dict[str, object]:
    """The request for another delay between nodes; raises UsageError for one that cannot be."""
    if not 0 < delay_us <= _LONGEST_DELAY_US:
        raise UsageError(f"delay_us: expected more than 0 and at most {_LONGEST_DELAY_US:.0f}, got {delay_us!r}")
    return {"op": "delay", "delay_us": delay_us}


def request_shape(*, inter: str | Keep | None = KEEP, intra: str | Keep | None = KEEP, node: int | None = None) -> None:
    """Change rates of the emulated cluster in which this process runs; back when the new rate is in force, and said on stderr.

    Works in a rank, in a program that a rank became, and in their children: the cluster listens inside every node.

    Args:
        inter: new rate of the network interface, each direction; None: unshaped; left out: as it is.
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
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(_PATIENCE_S)
        try:
            line.connect(CONTROL_ADDRESS)
            line.send(json.dumps(shape_message(inter, intra, node)).encode())
            reply = line.recv(MESSAGE_BYTES)
        except OSError as error:
            raise RightsError(f"the emulated cluster of this rank does not answer: {error}") from error
    if not reply:
        raise RightsError("the emulated cluster of this rank is gone")
    raise_reply(json.loads(reply))
    say(f"emulated cluster: {_in_words(inter, intra, node)} from now on")


def _in_words(inter: str | Keep | None, intra: str | Keep | None, node: int | None) -> str:
    rates = ", ".join(
        f"{name} {rate or 'unshaped'}"
        for name, rate in (("inter", inter), ("intra", intra))
        if not isinstance(rate, Keep)
    )
    return f"{'all nodes' if node is None else f'node {node}'}: {rates or 'as before'}"
