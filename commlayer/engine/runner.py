"""The one loop that runs every plan, on every transport, and plans as this rank runs them.

For each step in plan order: require what it waits for, ask the gate, post it. On the CPU
``require`` waits on the host while Gloo's threads move what was posted; on CUDA it makes one stream
wait for an event of another, and the host runs ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from commlayer.profiles.errors import PlanError
from commlayer.scheduler.kept import Kept
from commlayer.scheduler.moves import MAX_TAGS, Buffer, Moves
from commlayer.scheduler.plan import Plan
from commlayer.transport.call_memory import CallMemory, Reducer
from commlayer.transport.contract import Coder, Script, StartedPlan, Transport

__all__ = ["Prepared", "Runner", "Sent", "drive", "require_tags"]

_MAX_KEPT = 1024
Gate = Callable[[int], object]


class Sent(NamedTuple):
    """Bytes that this rank sends in a call: between nodes, and inside its own."""

    inter: int
    intra: int

    @classmethod
    def by(cls, steps: Sequence[Moves], near: Collection[int]) -> Sent:
        """Add up what ``steps`` send; ``near``: the members of the group on this rank's node."""
        inter = intra = 0
        for message in (message for step in steps for message in step.sends):
            if message.peer in near:
                intra += message.region.size
            else:
                inter += message.region.size
        return cls(inter, intra)


_NOTHING = Sent(0, 0)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan as this rank runs it: its moves, the bytes of the buffers that it needs beside input
    and output, what it sends.

    The plan is kept, so that its id stays its own. ``script``: the moves as the transport posts
    them.
    """

    plan: Plan
    steps: tuple[Moves, ...]
    script: Script
    sizes: Mapping[Buffer, int] = field(default_factory=dict)
    sent: Sent = _NOTHING


def require_tags(plan: Plan, num_steps: int) -> None:
    """Raises PlanError where a call of the plan would need more message tags than one call may
    have."""
    if num_steps * plan.tags_per_step > MAX_TAGS:
        raise PlanError(
            f"{plan.name} over {plan.traffic.group_size} ranks needs more than {MAX_TAGS} message tags: use fewer chunks"
        )


def drive(plan: Plan, call: StartedPlan, gate: Gate | None = None) -> None:
    """Post every step of a call that has been started, each after those that it waits for, and when
    ``gate`` lets it."""
    for index, step in enumerate(plan.steps):
        for earlier in step.after:
            call.require(earlier, index)
        if gate is not None:
            gate(index)
        call.post(index)


class Runner:
    """Prepares plans and starts them on one rank's transport, one call at a time, and keeps what
    was prepared, and memory.

    ``near``: the members of the group on this rank's node. Plans are kept by identity: hashing one
    of a hundred steps costs more than posting it.
    """

    def __init__(self, transport: Transport, near: Collection[int] = ()) -> None:
        self.transport = transport
        self.kept = Kept[tuple[int, Hashable], Prepared](_MAX_KEPT)
        self._near = near
        self.memory: dict[Buffer, CallMemory] = {}
        """The latest memory of each buffer that calls need beside their own: see :meth:`stage`."""

    def prepared(
        self, plan: Plan, key: Hashable, moves: Callable[[], tuple[Sequence[Moves], Mapping[Buffer, int]]]
    ) -> Prepared:
        """``plan`` with the steps and sizes of buffers that ``moves()`` returns, made once for each
        ``key``.

        Raises PlanError where it needs too many message tags.
        """
        prepared = self.kept.get((id(plan), key))
        if prepared is None:
            prepared = self.kept.add((id(plan), key), self.prepare(plan, *moves()))
        return prepared

    def prepare(self, plan: Plan, steps: Sequence[Moves], sizes: Mapping[Buffer, int]) -> Prepared:
        """``plan`` with these steps and sizes of buffers, for one call; not kept. Raises as
        :meth:`prepared`."""
        require_tags(plan, len(steps))
        sent, script = Sent.by(steps, self._near), self.transport.compile(plan, steps)
        return Prepared(plan, tuple(steps), script, sizes, sent)

    def start(
        self,
        prepared: Prepared,
        source: CallMemory,
        target: CallMemory,
        timeout_s: float,
        reduce: Reducer | None = None,
        coder: Coder | None = None,
        mark: int = 0,
    ) -> StartedPlan:
        """Begin a call from ``source`` to ``target``, on one device, with its ``mark``. To be
        driven, and finished."""
        buffers = self.buffers(prepared, source, target)
        return self.transport.start(prepared.script, buffers, timeout_s, reduce, coder, mark)

    def launch(
        self, prepared: Prepared, source: torch.Tensor, target: torch.Tensor, timeout_s: float
    ) -> Callable[[], None]:
        """Start every step of a call from ``source`` to ``target``, both 1-D uint8 [bytes] on one
        device, not overlapping.

        Call what is returned before the output is used or the input changed. On the CPU that waits
        on the host; on a device it makes the stream that is current *then* wait. Raises PeerError
        or CollectiveTimeoutError, as that does.
        """
        call = self.start(prepared, CallMemory(source), CallMemory(target), timeout_s)
        drive(prepared.plan, call)
        return call.finish

    def buffers(self, prepared: Prepared, source: CallMemory, target: CallMemory) -> dict[Buffer, CallMemory]:
        """The memory of a call: its own, and what it needs beside."""
        buffers = {Buffer.INPUT: source, Buffer.OUTPUT: target}
        for buffer, size in prepared.sizes.items():
            buffers[buffer] = self.stage(size, buffer, source.tensor.device)
        return buffers

    def stage(self, needed: int, buffer: Buffer, device: torch.device) -> CallMemory:
        """At least ``needed`` bytes for a call, kept between calls: allocating (and first touching)
        them costs as much as a copy."""
        memory = self.memory.get(buffer)
        if memory is None or memory.tensor.numel() < needed or memory.tensor.device != device:
            memory = self.memory[buffer] = CallMemory(self.transport.memory(needed, device))
        return memory
