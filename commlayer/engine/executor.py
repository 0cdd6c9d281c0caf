"""Runs a plan: the one loop that serves every transport.

For each step in plan order: require what it waits for, post it. On the CPU ``require`` waits on the host while Gloo's
threads move what was posted; on CUDA it makes one stream wait for an event of another, and the host runs ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from commlayer.engine.lanes import Gate
from commlayer.scheduler.moves import Moves
from commlayer.scheduler.plan import Buffer, Plan
from commlayer.scheduler.price import Timeline
from commlayer.scheduler.replicated import replicated_moves, staging_bytes
from commlayer.transport.contract import Call, Transport, Whole

__all__ = ["Executor", "drive"]

_MAX_PREPARED = 256


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What a plan means on this rank. The plan is kept, so that its id stays its own."""

    plan: Plan
    steps: tuple[Moves, ...]
    staging_bytes: int
    whole: Whole | None


def drive(plan: Plan, call: Call, gate: Gate | None = None) -> None:
    """Post every step of a call that has been started, each after those that it waits for, and when ``gate`` lets it."""
    for index, step in enumerate(plan.steps):
        for earlier in step.after:
            call.require(earlier, index)
        if gate is not None:
            gate(index)
        call.post(index)


class Executor:
    """Executes plans on one rank of a grid, one after the other."""

    def __init__(self, transport: Transport, ep_index: int, tp_index: int, timeout_s: float) -> None:
        self.transport = transport
        self._place = ep_index, tp_index
        self._timeout_s = timeout_s
        self._staging: torch.Tensor | None = None
        # By identity: hashing a plan of a hundred steps costs more than posting one.
        self._prepared: dict[int, _Prepared] = {}

    def run(self, plan: Plan, source: torch.Tensor, target: torch.Tensor) -> None:
        """Run ``plan`` from ``source`` to ``target``, both 1-D uint8 [logical bytes] on one device, not overlapping.

        Raises PeerError or CollectiveTimeoutError, naming rank, group, plan, step and chunk.
        """
        prepared = self._prepared.get(id(plan)) or self._prepare(plan)
        if prepared.whole is not None:
            prepared.whole(source, target)
            return
        self.issue(plan, source, target)()

    def issue(self, plan: Plan, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        """Start every step of ``plan``; call what is returned before the output is used or the input changed.

        On the CPU that waits on the host; on a device it makes the stream that is current *then* wait.
        """
        prepared = self._prepared.get(id(plan)) or self._prepare(plan)
        call = self._start(prepared, source, target)
        drive(plan, call)
        return call.finish

    def trace(self, plan: Plan, source: torch.Tensor, target: torch.Tensor) -> Timeline:
        """Run ``plan`` like :meth:`run` and return when each step really started and ended, as seen by this rank.

        Costs a thread per resource and a wake-up per step, so it is for pictures and audits, not for timing.
        """
        from commlayer.engine.tracing import traced, traced_whole

        prepared = self._prepared.get(id(plan)) or self._prepare(plan)
        if prepared.whole is not None:
            return traced_whole(plan, partial(prepared.whole, source, target))
        return traced(plan, self._start(prepared, source, target))

    def _start(self, prepared: _Prepared, source: torch.Tensor, target: torch.Tensor) -> Call:
        buffers = {Buffer.INPUT: source, Buffer.OUTPUT: target}
        if prepared.staging_bytes:
            buffers[Buffer.STAGING] = self._stage(prepared.staging_bytes, source.device)
        return self.transport.start(prepared.plan, prepared.steps, buffers, self._timeout_s)

    def _prepare(self, plan: Plan) -> _Prepared:
        if len(self._prepared) >= _MAX_PREPARED:
            self._prepared.clear()
        prepared = _Prepared(
            plan,
            replicated_moves(plan, *self._place),
            staging_bytes(plan),
            self.transport.whole(plan, self._timeout_s),
        )
        self._prepared[id(plan)] = prepared
        return prepared

    def _stage(self, needed: int, device: torch.device) -> torch.Tensor:
        """Staging memory, kept between calls: allocating (and first touching) it costs as much as the copy itself."""
        if self._staging is None or self._staging.numel() < needed or self._staging.device != device:
            with torch.inference_mode(
                False
            ):  # a tensor made in that mode can be written in it only, and this one is kept
                self._staging = torch.empty(needed, dtype=torch.uint8, device=device)
        return self._staging[:needed]
