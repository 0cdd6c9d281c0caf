"""Copies between a GPU's memory and its host's, beside what the GPU computes: one step of a plan, on the link to the host.

Copy engines do them, which take no multiprocessors but a part of the memory's rate. What crosses to the host and what comes back
do not slow each other down: the link has a way for each. Not modelled: on machines where a GPU's network card hangs on the same
PCIe switch, what crosses between nodes uses the link as well.
"""

from __future__ import annotations

from commlayer.profiles.links import Resource
from commlayer.scheduler.legs import LegOrder, LocalLeg
from commlayer.scheduler.mapping.hardware import Gpu
from commlayer.scheduler.moves import Buffer, Moves
from commlayer.scheduler.plan import CurveKey, Cut, Gather, Op, Plan, Span, Strategy
from commlayer.scheduler.programs import PlannedCall
from commlayer.scheduler.traffic import Traffic

__all__ = ["host_copy"]

_PART = "offload"
"""The part of a step as which it counts where it is waited for."""


class _HostCopy(LocalLeg):
    """A copy over the link to the host. No profile has a curve of it."""

    def resource(self, traffic: Traffic) -> Resource:
        return Resource.HOST

    def curve_keys(self, plan: Plan) -> tuple[CurveKey, ...]:
        return ((self.op.value, Resource.HOST, 1),)

    def moves(self, place: object, tag: int, chunk: int) -> Moves:
        return Moves()


_LEGS = LegOrder(((_HostCopy("host_copy", Op.COPY, Span.SELF, Buffer.INPUT, Buffer.OUTPUT), 0),))


def host_copy(name: str, nbytes: float, gpu: Gpu) -> PlannedCall:
    """The call that copies ``nbytes`` one way, or so many each way at once."""
    traffic = Traffic(round(nbytes), 1, link=Resource.HOST)
    plan = Plan(traffic, Strategy.FLAT, 1, Gather.WHOLE, tuple(_LEGS.steps(Cut(traffic, 1))))
    us = nbytes / (gpu.host_gbps * 1e3)
    memory = min(gpu.host_gbps / (gpu.memory_gbps * gpu.memory), 0.5)
    return PlannedCall(name, plan, "", _PART, (us,), None, us, _PART, 0.0, memory)
