"""Wire formats as users of the integrations write them: a word, a policy, or nothing.

    plan_ddp(model, wire="bf16")      native or BF16, whichever the profile predicts to be faster
    plan_ddp(model, wire="bf16!")     always BF16
    plan_ddp(model, wire=WirePolicy((WireFormat.NATIVE, WireFormat.BF16), error_budget=0.01))
    COMMLAYER_WIRE=dp=bf16            for programs that say nothing; "native" in the program overrides it

Nothing is encoded that neither the program nor that variable allows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist

from commlayer.agree.maximum import is_agreed
from commlayer.collectives import GroupCommunicator
from commlayer.compressed import CompressedGroup
from commlayer.integrations.moe.ways import DispatchWire
from commlayer.profiles.errors import DisagreementError, UsageError
from commlayer.scheduler.wire import Scaling, WirePolicy, parse_wire
from commlayer.settings import Settings

__all__ = [
    "LaneWires",
    "WireChoice",
    "compressed_group",
    "require_same_wire",
    "tensor_parallel_wire",
    "wire_policy",
    "wired",
]

WireChoice = WirePolicy | str | None
"""A policy; formats as :func:`commlayer.scheduler.wire.parse_wire` reads them; None: what COMMLAYER_WIRE says."""


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


def wire_policy(wire: WireChoice, lane: str, *, scaling: Scaling = Scaling.TOKEN) -> WirePolicy | None:
    """Return the policy that ``wire`` means for a lane, None where it allows native alone. ``scaling``: where it is no
    policy itself.

    Raises UsageError for formats that are none, SettingsError for a malformed COMMLAYER_WIRE.
    """
    if wire is None:
        formats = Settings.from_environment().wires().get(lane)
        policy = WirePolicy() if formats is None else WirePolicy(formats, scaling)
    elif isinstance(wire, str):
        policy = WirePolicy(parse_wire(wire), scaling)
    elif isinstance(wire, WirePolicy):
        policy = wire
    else:
        raise UsageError(f"wire must be a WirePolicy, a text such as 'bf16' or 'fp8_e4m3+bf16', or None; got {wire!r}")
    return policy if policy.allows_encoding or policy.in_place else None


def flat_policy(wire: WireChoice, lane: str) -> WirePolicy | None:
    """Return the policy that ``wire`` means for flat buffers, as :func:`wire_policy` does for rows. They have no
    tokens: FP8 has a scale for each block of 128 elements there. Where ``wire`` is no policy, NaN and infinity pass:
    gradients may hold them on purpose, for a GradScaler to see.
    """
    policy = wire_policy(wire, lane, scaling=Scaling.BLOCK)
    if policy is None:
        return None
    if not isinstance(wire, WirePolicy):
        policy = replace(policy, non_finite="pass")
    return replace(policy, scaling=Scaling.BLOCK) if policy.scaling is Scaling.TOKEN else policy


def compressed_group(group: dist.ProcessGroup, wire: WireChoice, lane: str, what: str) -> CompressedGroup | None:
    """Return ``group`` under what ``wire`` means for a lane's flat buffers; None where that is native. ``what``:
    travels, for messages.

    Raises GroupError for a group of another backend, where a format is allowed; as :func:`wire_policy`.
    """
    policy = flat_policy(wire, lane)
    if policy is None or group.size() == 1:
        return None
    return CompressedGroup(group, policy, f"lane {lane}, {what}")


def require_same_wire(group: dist.ProcessGroup, what: str, *ways: CompressedGroup | None) -> None:
    """Check that all ranks of ``group`` were given the same policies for ``what``: else some would encode, and others
    not. Collective; nothing for groups of another backend, which have none. Raises DisagreementError.
    """
    if group.size() == 1 or dist.get_backend(group) != "commlayer":
        return
    mine = "; ".join("native" if way is None else str(way.policy) for way in ways)
    if not is_agreed(f"{what}: {mine}", group):
        raise DisagreementError(
            f"rank {dist.get_rank()}: ranks differ in the wire formats of {what}. Here: {mine}. Give all ranks the same, also in "
            "COMMLAYER_WIRE"
        )


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
