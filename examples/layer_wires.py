"""Wire formats of the example's layers: of a whole model, by lane, and of tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.wire_choice import DispatchWire, WireChoice, wire_policy
from commlayer.scheduler.wire import Scaling, WirePolicy, parse_wire

__all__ = ["LaneWires", "tensor_parallel_wire", "wired"]


@dataclass(frozen=True, kw_only=True)
class LaneWires:
    """The formats of a whole model's traffic, by lane; each None: what COMMLAYER_WIRE says of the lane, else native.

    Attributes:
        ep: tokens on their way to experts, and home.
        tp: what parallel layers send in the forward pass.
        tp_gradient: what they send in the backward pass.
        dp: gradients of parameters.
    """

    ep: DispatchWire | str | None = None
    tp: WireChoice = None
    tp_gradient: WireChoice = None
    dp: WireChoice = None


def tensor_parallel_wire(wire: str = "fp8_e4m3") -> tuple[WirePolicy, WirePolicy]:
    """The policies of activations and of their gradients, ``wire`` and ``gradient_wire`` of the parallel layers
    (MegaScale-MoE, section 5): a scale for each token forward, and for each channel of 128 tokens backward.

    Raises UsageError for formats that are none.
    """
    formats = parse_wire(wire)
    return WirePolicy(formats, Scaling.TOKEN), WirePolicy(formats, Scaling.CHANNEL)


def wired(
    communicator: GroupCommunicator, wire: WireChoice = None, gradient_wire: WireChoice = None
) -> GroupCommunicator:
    """Make a communicator of the same group and lane under these policies; FP8 of tp with the scales of
    :func:`tensor_parallel_wire`, of other lanes with one for 128 elements of a row.

    Without either it is ``communicator`` itself, where that has policies of its own, or COMMLAYER_WIRE says nothing of its lane.
    Raises as :func:`wire_policy`.
    """
    has_its_own = communicator.has_wire
    if communicator.size == 1 or communicator.group is None or (wire is None and gradient_wire is None and has_its_own):
        return communicator
    scalings = (Scaling.TOKEN, Scaling.CHANNEL) if communicator.lane == "tp" else (Scaling.BLOCK, Scaling.BLOCK)
    forth = wire_policy(wire, communicator.lane, scaling=scalings[0])
    back = wire_policy(gradient_wire, communicator.lane, scaling=scalings[1])
    if forth is None and back is None and not has_its_own:
        return communicator
    return communicator.with_wire(forth, back)
