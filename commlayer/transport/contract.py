"""The contract of a way of moving bytes: a transport compiles plans and starts calls, a call posts
the steps of a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist

from commlayer.scheduler.moves import MAX_TAGS, Moves
from commlayer.scheduler.plan import Plan
from commlayer.transport.call_memory import Buffers, Reducer

__all__ = [
    "CALLS_IN_FLIGHT",
    "FIRST_TAG",
    "CallMismatch",
    "Channel",
    "Coder",
    "Script",
    "SizeMismatch",
    "StartedPlan",
    "Transport",
    "break_connections",
]

CALLS_IN_FLIGHT = 1 << 15
"""Calls whose messages have tags of their own."""
FIRST_TAG = 1 << 30
"""The first tag of calls. Below it are those of programs, whose messages may go over the same
connections."""
_ABORT_TAG = FIRST_TAG + MAX_TAGS * CALLS_IN_FLIGHT


class SizeMismatch(RuntimeError):
    """A message has come of another size than was expected: ranks have made different calls."""

    def __init__(self, expected_bytes: int, got_bytes: int, peer: int) -> None:
        super().__init__(f"expected {expected_bytes} bytes from member {peer} of the group, got {got_bytes}")
        self.expected_bytes, self.got_bytes, self.peer = expected_bytes, got_bytes, peer


class CallMismatch(SizeMismatch):
    """A message of another call has come than was expected: of other elements, with another
    operation, or another root."""

    def __init__(self, expected: int, got: int, expected_bytes: int, got_bytes: int, peer: int) -> None:
        super().__init__(expected_bytes, got_bytes, peer)
        self.expected, self.got = expected, got


@dataclass(frozen=True)
class Channel:
    """A process group of our own, for one kind of step: ``peers[i]`` is (global rank, rank in the
    group) of index i."""

    name: str
    group: dist.ProcessGroup
    peers: tuple[tuple[int, int], ...]

    @cached_property
    def is_in_order(self) -> bool:
        """Whether indices and ranks in the group are the same, so that the group's own collectives
        may be used."""
        return all(index == member for index, (_, member) in enumerate(self.peers))


class Coder(Protocol):
    """Turns bytes of a tensor into encoded messages and back. All arguments are 1-D uint8
    [bytes]."""

    def encode(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """``source``, whole rows of the tensor, becomes one message in ``target``."""

    def decode(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """The message in ``source`` becomes rows of the tensor in ``target``."""

    def add(self, target: torch.Tensor, sources: Sequence[torch.Tensor], coded: Sequence[bool]) -> None:
        """``target`` becomes the sum of ``sources`` in their order, in FP32; ``coded[i]``: whether
        the i-th is a message."""


class Script(Protocol):
    """A plan's moves as a transport posts them, found out once: see :meth:`Transport.compile`."""

    @property
    def plan(self) -> Plan:
        """The plan."""


class StartedPlan(Protocol):
    """One plan under way on one rank."""

    @property
    def steps(self) -> Sequence[Moves]:
        """The moves of this rank in each step; of some calls they are all known only at the end."""

    def require(self, earlier: int, index: int) -> None:
        """Step ``index`` must not start before step ``earlier`` has ended (on the host, or on the
        device's stream)."""

    def post(self, index: int) -> None:
        """Start step ``index``."""

    def finish(self) -> None:
        """Return when the output may be used (on a device: by the current stream) and the input may
        be changed."""


class Transport(Protocol):
    def compile(self, plan: Plan, steps: Sequence[Moves]) -> Script:
        """Find out how ``steps``, this rank's moves in each step of ``plan``, are posted here.
        Talks to nobody."""

    def start(
        self,
        script: Any,
        buffers: Buffers,
        timeout_s: float,
        reduce: Reducer | None = None,
        coder: Coder | None = None,
        mark: int = 0,
    ) -> StartedPlan:
        """Begin a call of ``script``, which this transport compiled. Calls of one transport must be
        started in the same order on all ranks, from one thread at a time.

        ``reduce`` runs the steps' reductions, where the plan has any, ``coder`` those of encoded
        messages. ``mark``: of the call (:mod:`commlayer.transport.marks`), where messages can carry
        it.
        """

    def memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Memory for a buffer of calls, on ``device``: 1-D uint8 [num_bytes]."""

    def abort(self, why: str | None = None) -> None:
        """After a failure: wake up the ranks that wait for this one, and tell them ``why`` where
        the failure is ours."""

    def close(self) -> None:
        """Let go of connections. Collective. Raises ClusterError where a rank does not come."""


def break_connections(group: dist.ProcessGroup, peers: Sequence[int]) -> None:
    """Make Gloo close every connection of ``group``; ``peers`` are the other ranks of it.

    Each in turn, because a receive from one that is gone already is refused, and closes nothing.
    """
    for peer in peers:
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
