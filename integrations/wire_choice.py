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

from commlayer.agree.messages import require_alike
from commlayer.collectives import GroupCommunicator
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.wire import Scaling, WireFormat, WirePolicy, parse_wire
from commlayer.settings import Settings

__all__ = [
    "DispatchWire",
    "WireChoice",
    "compressed_group",
    "dispatch_wire",
    "flat_policy",
    "require_same_wire",
    "wire_policy",
]

WireChoice = WirePolicy | str | None
"""A policy; formats as :func:`commlayer.scheduler.wire.parse_wire` reads them; None: what COMMLAYER_WIRE says."""
_NATIVE = WirePolicy()


@dataclass(frozen=True, slots=True)
class DispatchWire:
    """The wire formats that rows of a dispatcher may take: to the experts and back, and their gradients in the backward pass.

    ``dispatch_gradient`` is of the rows that ``dispatch`` sent, and travels as the combine does; ``combine_gradient`` the other
    way round.
    """

    dispatch: WirePolicy = _NATIVE
    combine: WirePolicy = _NATIVE
    dispatch_gradient: WirePolicy = _NATIVE
    combine_gradient: WirePolicy = _NATIVE

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not isinstance(getattr(self, name), WirePolicy):
                raise UsageError(f"DispatchWire.{name}: expected a WirePolicy, got {getattr(self, name)!r}")

    @property
    def is_native(self) -> bool:
        policies = (self.dispatch, self.combine, self.dispatch_gradient, self.combine_gradient)
        return not any(policy.allows_encoding for policy in policies)


def wire_policy(wire: WireChoice, lane: str, *, scaling: Scaling = Scaling.TOKEN) -> WirePolicy | None:
    """Return the policy that ``wire`` means for a lane, None where it allows native alone. ``scaling``: where it is no
    policy itself.

    Raises UsageError for formats that are none, SettingsError for a malformed COMMLAYER_WIRE.
    """
    if isinstance(wire, WirePolicy):
        policy = wire
    elif wire is None or isinstance(wire, str):
        formats = _formats(wire, lane)
        policy = WirePolicy() if formats is None else WirePolicy(formats, scaling)
    else:
        raise UsageError(f"wire must be a WirePolicy, a text such as 'bf16' or 'fp8_e4m3+bf16', or None; got {wire!r}")
    return policy if policy.allows_encoding or policy.in_place else None


def _formats(wire: str | None, lane: str) -> tuple[WireFormat, ...] | None:
    """The formats that a user's text names, or else COMMLAYER_WIRE for the lane; None: neither says anything."""
    return Settings.from_environment().wires().get(lane) if wire is None else parse_wire(wire)


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


def compressed_group(group: dist.ProcessGroup, wire: WireChoice, lane: str, what: str) -> GroupCommunicator | None:
    """Return ``group`` under what ``wire`` means for a lane's flat buffers; None where that is native. ``what``:
    travels, for messages.

    Raises GroupError for a group of another backend, where a format is allowed; as :func:`wire_policy`.
    """
    policy = flat_policy(wire, lane)
    if policy is None or group.size() == 1:
        return None
    return GroupCommunicator(group, wire=policy, name=f"lane {lane}, {what}")


def require_same_wire(group: dist.ProcessGroup, what: str, *ways: GroupCommunicator | None) -> None:
    """Check that all ranks of ``group`` were given the same policies for ``what``: else some would encode, and others
    not. Collective; nothing for groups of another backend, which have none. Raises DisagreementError.
    """
    if group.size() == 1 or dist.get_backend(group) != "commlayer":
        return
    formats = "; ".join("native" if way is None else str(way.wire) for way in ways)
    require_alike(
        {f"the wire formats of {what} (given to it, or by COMMLAYER_WIRE)": formats},
        group,
        f"to compare the formats of {what}",
    )


def dispatch_wire(wire: DispatchWire | str | None) -> DispatchWire:
    """Read what a user gives for ``wire``: a name such as ``fp8_e4m3`` is for the dispatch, and the combine may then go
    in BF16; None takes the setting ``COMMLAYER_WIRE`` of lane ep, and without it all is native. Raises UsageError.

    Tokens on their way to the experts bear FP8 well, with a scale for each; what comes back is summed, and goes in BF16 or wider
    (DeepSeek-V3's choice, and MegaScale-MoE's warning about sums of FP8). Gradients go natively unless asked for otherwise.
    """
    if isinstance(wire, DispatchWire):
        return wire
    if wire is not None and not isinstance(wire, str):
        raise UsageError(
            f"wire must be a DispatchWire, such as DispatchWire(dispatch=policy), or a name such as fp8_e4m3, got {wire!r}"
        )
    formats = _formats(wire, "ep") or _NATIVE.formats
    combine = tuple(WireFormat.BF16 if each.is_scaled else each for each in formats)
    return DispatchWire(WirePolicy(formats), WirePolicy(tuple(dict.fromkeys(combine))))
