"""The groups of a dispatch and a combine, each with the wire formats that its rows may take, there and back.

Tokens on their way to the experts bear FP8 well, with a scale for each; what comes back is summed, and goes in BF16 or wider
(DeepSeek-V3's choice, and MegaScale-MoE's warning about sums of FP8). Gradients go natively unless asked for otherwise.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.wire import WireFormat, WirePolicy, parse_wire
from commlayer.settings import Settings

__all__ = ["DispatchWire", "dispatch_wire", "number_of_wire"]

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


def dispatch_wire(wire: DispatchWire | str | None) -> DispatchWire:
    """Read what a user gives for ``wire``: a name such as ``fp8_e4m3`` is for the dispatch, and the combine may then go
    in BF16; None takes the setting ``COMMLAYER_WIRE`` of lane ep, and without it all is native. Raises UsageError.
    """
    if isinstance(wire, DispatchWire):
        return wire
    if wire is None:
        formats = Settings.from_environment().wires().get("ep", _NATIVE.formats)
    elif isinstance(wire, str):
        formats = parse_wire(wire)
    else:
        raise UsageError(
            f"wire must be a DispatchWire, such as DispatchWire(dispatch=policy), or a name such as fp8_e4m3, got {wire!r}"
        )
    combine = tuple(WireFormat.BF16 if each.is_scaled else each for each in formats)
    return DispatchWire(WirePolicy(formats), WirePolicy(tuple(dict.fromkeys(combine))))


def number_of_wire(wire: DispatchWire) -> int:
    """Return a number below 2¹⁸ that differs where ranks allow different things, but for chance."""
    return 0 if wire.is_native else 1 + zlib.crc32(repr(wire).encode()) % ((1 << 18) - 1)
