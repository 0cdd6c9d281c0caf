"""The one loop that runs every plan, on every transport, and plans as this rank runs them.

For each step in plan order: require what it waits for, ask the gate, post it. On the CPU ``require`` waits on the host while
Gloo's threads move what was posted; on CUDA it makes one stream wait for an event of another, and the host runs ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from commlayer.profiles.errors import PlanError
from commlayer.scheduler.moves import MAX_TAGS, Buffer, Moves
from commlayer.scheduler.plan import Plan
from commlayer.scheduler.replicated import replicated_moves, staging_bytes
from commlayer.transport.contract import Call, Coder, Reducer, Transport, Whole

__all__ = ["GridRunner", "Prepared", "Runner", "Sent", "drive", "require_tags"]

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
    """A plan as this rank runs it: its moves, the bytes of the buffers that it needs beside input and output, what it sends.

    The plan is kept, so that its id stays its own. ``whole``: the plan as one call of the backend's own, where that is cheaper.
    """

    plan: Plan
    steps: tuple[Moves, ...]
    sizes: Mapping[Buffer, int] = field(default_factory=dict)
    sent: Sent = _NOTHING
    whole: Whole | None = None


def require_tags(plan: Plan, num_steps: int) -> None:
    """Raises PlanError where a call of the plan would need more message tags than one call may have."""
    if num_steps * plan.tags_per_step > MAX_TAGS:
        raise PlanError(
            f"{plan.name} over {plan.traffic.group_size} ranks needs more than {MAX_TAGS} message tags: use fewer chunks"
        )


def drive(plan: Plan, call: Call, gate: Gate | None = None, reveal: Callable[[int], None] | None = None) -> None:
    """Post every step of a call that has been started, each after those that it waits for, and when ``gate`` lets it.

    ``reveal``: called with a step's index when what it waits for has ended, before it is posted: some calls learn only then
    what it moves.
    """
    for index, step in enumerate(plan.steps):
        for earlier in step.after:
            call.require(earlier, index)
        if reveal is not None:
            reveal(index)
        if gate is not None:
            gate(index)
        call.post(index)


class Runner:
    """Prepares plans and starts them on one rank, one call at a time, and keeps what was prepared, and memory.

    Plans are kept by identity: hashing one of a hundred steps costs more than posting it.
    """

    def __init__(self) -> None:
        self._prepared: dict[tuple[int, Hashable], Prepared] = {}
        self._memory: dict[Buffer, torch.Tensor] = {}

    def prepared(self, plan: Plan, key: Hashable, prepare: Callable[[Plan], Prepared]) -> Prepared:
        """``prepare(plan)``, made once for each ``key``. Raises PlanError where the plan needs too many message tags."""
        found = self._prepared.get((id(plan), key))
        if found is None:
            found = prepare(plan)
            require_tags(plan, len(found.steps))
            if len(self._prepared) >= _MAX_KEPT:
                self._prepared.clear()
            self._prepared[id(plan), key] = found
        return found

    def start(
        self,
        transport: Transport,
        prepared: Prepared,
        source: torch.Tensor,
        target: torch.Tensor,
        timeout_s: float,
        reduce: Reducer | None = None,
        coder: Coder | None = None,
    ) -> Call:
        """Begin a call from ``source`` to ``target``, both 1-D uint8 [bytes] on one device. To be driven, and finished."""
        buffers = {Buffer.INPUT: source, Buffer.OUTPUT: target}
        for buffer, size in prepared.sizes.items():
            buffers[buffer] = self.stage(size, buffer, source.device)
        return transport.start(prepared.plan, prepared.steps, buffers, timeout_s, reduce, coder)

    def stage(self, needed: int, buffer: Buffer, device: torch.device) -> torch.Tensor:
        """Memory for a call [bytes], kept between calls: allocating (and first touching) it costs as much as a copy."""
        kept = self._memory.get(buffer)
        if kept is None or kept.numel() < needed or kept.device != device:
            # A tensor that is made in inference mode can be written in it only, and this one is kept.
            with torch.inference_mode(False):
                kept = self._memory[buffer] = torch.empty(needed, dtype=torch.uint8, device=device)
        return kept[:needed]


class GridRunner(Runner):
    """Runs the all_to_all of replicated tokens on one rank of a grid: (``ep_index``, ``tp_index``)."""

    def __init__(self, transport: Transport, ep_index: int, tp_index: int, timeout_s: float) -> None:
        super().__init__()
        self.transport = transport
        self._place = ep_index, tp_index
        self._timeout_s = timeout_s

    def run(self, plan: Plan, source: torch.Tensor, target: torch.Tensor) -> None:
        """Run ``plan`` from ``source`` to ``target``, both 1-D uint8 [logical bytes] on one device, not overlapping.

        Raises PeerError or CollectiveTimeoutError, naming rank, group, plan, step and chunk.
        """
        whole = self.meaning(plan).whole
        if whole is not None:
            whole(source, target)
            return
        self.issue(plan, source, target)()

    def issue(self, plan: Plan, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        """Start every step of ``plan``; call what is returned before the output is used or the input changed.

        On the CPU that waits on the host; on a device it makes the stream that is current *then* wait.
        """
        call = self.begin(plan, source, target)
        drive(plan, call)
        return call.finish

    def begin(self, plan: Plan, source: torch.Tensor, target: torch.Tensor) -> Call:
        """A call of ``plan`` in steps, to be driven by the caller."""
        return self.start(self.transport, self.meaning(plan), source, target, self._timeout_s)

    def meaning(self, plan: Plan) -> Prepared:
        """The plan as this rank runs it."""
        return self.prepared(plan, None, self._prepare)

    def _prepare(self, plan: Plan) -> Prepared:
        staging = staging_bytes(plan)
        return Prepared(
            plan,
            replicated_moves(plan, *self._place),
            {Buffer.STAGING: staging} if staging else {},
            whole=self.transport.whole(plan, self._timeout_s),
        )
