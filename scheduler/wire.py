"""Wire formats: what crosses a link in place of a tensor's own bytes, how many bytes that is, and what may be chosen.

Pure arithmetic, no torch; :mod:`commlayer.wire.codecs` does what is described here.

An *encoded* message of r rows of W elements is one contiguous run of bytes: its scales (FP32), then its payload, row after
row. Scales first, so that they are aligned wherever a message begins at a multiple of four bytes, and one message carries
all that decoding needs. Rejected: payloads and scales in two collectives (DeepEP's two buffers): twice the messages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from commlayer.profiles.errors import UsageError

__all__ = [
    "GROUP_SIZE",
    "NATIVE",
    "ROW_ELEMENTS",
    "Scaling",
    "Wire",
    "WireFormat",
    "WirePolicy",
    "parse_wire",
    "row_width",
    "wires_of_sum",
]

GROUP_SIZE = 128
"""Elements that share a scale: channels of one row (``block``), or rows of one channel (``channel``)."""
ROW_ELEMENTS = 8 * GROUP_SIZE
"""The length of the widest rows that a flat buffer is cut into: a multiple of it can be cut into such."""
_NARROWEST = 16
_SCALE_BYTES = 4


class WireFormat(str, Enum):
    """The order is from exact to coarse."""

    NATIVE = "native"  # the tensor's own bytes
    BF16 = "bf16"  # of FP32: one rounding to eight bits of precision
    INT8 = "int8"  # whole numbers to 127, with scales: half a step of error, whatever the element
    FP8_E4M3 = "fp8_e4m3"  # four bits of precision, with scales
    FP8_E5M2 = "fp8_e5m2"  # three bits and more range, with scales; for gradients

    def __str__(self) -> str:
        return self.value

    @property
    def element_bytes(self) -> int:
        """Bytes of an element on the wire; 0 for native, where the tensor says it."""
        return {"native": 0, "bf16": 2}.get(self.value, 1)

    @property
    def is_scaled(self) -> bool:
        return self not in (WireFormat.NATIVE, WireFormat.BF16)

    @property
    def unit_roundoff(self) -> float:
        """The largest relative error of rounding one element within the format's normal range: half a unit in the last
        place. Of INT8, whose error is absolute, as a part of the largest magnitude of its group."""
        return {"native": 0.0, "bf16": 2.0**-8, "int8": 1 / 254, "fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}[self.value]


class Scaling(str, Enum):
    """Which elements of FP8 or INT8 rows share a scale (MegaScale-MoE, section 5; ``block`` is DeepEP's)."""

    TOKEN = "token"  # all of a row
    BLOCK = "block"  # 128 channels of a row
    CHANNEL = "channel"  # 128 rows of a channel

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Wire:
    """How rows are encoded. ``row_elements`` is W. ``power_of_two``: scales are rounded up to a power of two.

    Raises UsageError for rows without elements.
    """

    format: WireFormat
    row_elements: int = 1
    scaling: Scaling = Scaling.TOKEN
    power_of_two: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.format, WireFormat) or not isinstance(self.scaling, Scaling):
            raise UsageError(f"expected a WireFormat and a Scaling, got {self.format!r} and {self.scaling!r}")
        if not isinstance(self.row_elements, int) or self.row_elements < 1:
            raise UsageError(f"{self.format} needs rows of at least one element, got {self.row_elements}")

    @property
    def row_multiple(self) -> int:
        """Rows that should stay together when a tensor is cut: those that share scales."""
        return GROUP_SIZE if self.format.is_scaled and self.scaling is Scaling.CHANNEL else 1

    def num_scales(self, rows: int) -> int:
        """FP32 scales of ``rows`` rows; in row-major order of (row or group of rows, block or channel)."""
        if not self.format.is_scaled or rows == 0:
            return 0
        if self.scaling is Scaling.TOKEN:
            return rows
        if self.scaling is Scaling.BLOCK:
            return rows * math.ceil(self.row_elements / GROUP_SIZE)
        return math.ceil(rows / GROUP_SIZE) * self.row_elements

    def wire_bytes(self, rows: int) -> int:
        """Bytes of ``rows`` encoded rows, scales included."""
        return self.num_scales(rows) * _SCALE_BYTES + rows * self.row_elements * self.format.element_bytes

    @property
    def is_native(self) -> bool:
        return self.format is WireFormat.NATIVE

    def ratio(self, element_bytes: int) -> float:
        """Wire bytes for each byte of a tensor of many rows, whose elements have ``element_bytes``."""
        if self.is_native:
            return 1.0
        return self.wire_bytes(GROUP_SIZE) / (GROUP_SIZE * self.row_elements * element_bytes)

    def __str__(self) -> str:
        return self.format.value


NATIVE = Wire(WireFormat.NATIVE)
"""Nothing is encoded."""


@dataclass(frozen=True, slots=True)
class WirePolicy:
    """Which wire formats a lane's transfers may take, and what is done about their errors.

    Attributes:
        formats: those that the planner may choose from. With ``native`` among them it chooses what the profile predicts to be
            fastest; without, it must take one of the others.
        scaling: of FP8 and INT8 rows.
        power_of_two: their scales are powers of two.
        non_finite: FP8 or INT8 of a tensor with NaN or infinity: ``raise`` NonFiniteError, or ``pass`` them on as they are. BF16
            has both values, and always passes them.
        error_budget: the largest relative error ‖decoded − x‖ / ‖x‖ of a call on any rank, as a fraction; where a sample
            exceeds it, its format is left for good on all ranks. None: none is measured.
        sample_every: of how many calls one is measured, on average; the first is.
        in_place: a reduce_scatter of FP32 uses its input as its buffers, and leaves it undefined (MegaScale-MoE, section 5):
            BF16 in one half, what arrives in the other. It takes no other memory, and always goes in BF16 and on one level.

    Raises UsageError for values out of range.
    """

    formats: tuple[WireFormat, ...] = (WireFormat.NATIVE,)
    scaling: Scaling = Scaling.TOKEN
    power_of_two: bool = False
    non_finite: str = "raise"
    error_budget: float | None = None
    sample_every: int = 32
    in_place: bool = False

    def __post_init__(self) -> None:
        rules = {
            "formats": (
                isinstance(self.formats, tuple)
                and bool(self.formats)
                and all(isinstance(each, WireFormat) for each in self.formats),
                f"a tuple of one or more of WireFormat's {', '.join(WireFormat)}",
            ),
            "scaling": (isinstance(self.scaling, Scaling), f"one of Scaling's {', '.join(Scaling)}"),
            "non_finite": (self.non_finite in ("raise", "pass"), "raise or pass"),
            "error_budget": (
                self.error_budget is None or (_is_number(self.error_budget) and 0 < self.error_budget < math.inf),
                "a positive fraction, or None",
            ),
            "sample_every": (_is_number(self.sample_every) and self.sample_every >= 1, "a number of at least 1"),
            "in_place": (
                not self.in_place or (self.formats == (WireFormat.BF16,) and self.error_budget is None),
                "formats=(WireFormat.BF16,) and no error_budget with it: it has no other way",
            ),
        }
        for name, (is_sound, expected) in rules.items():
            if not is_sound:
                raise UsageError(f"WirePolicy.{name}: expected {expected}, got {getattr(self, name)!r}")

    @property
    def allows_encoding(self) -> bool:
        return any(each is not WireFormat.NATIVE for each in self.formats)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@lru_cache(maxsize=1024)
def row_width(elements: int) -> int | None:
    """The widest row of 1024 elements or less that divides ``elements``, whole groups of 128 first; None where only small ones
    do."""
    groups = range(ROW_ELEMENTS, 0, -GROUP_SIZE)
    others = range(ROW_ELEMENTS, _NARROWEST - 1, -1)
    return next((width for each in (groups, others) for width in each if elements % width == 0), None)


@lru_cache(maxsize=1024)
def wires_of_sum(formats: tuple[WireFormat, ...], elements: int) -> tuple[Wire, ...]:
    """The ``formats`` of an FP32 sum of which each rank gets so many ``elements``. INT8 has a scale for each 128 of them, in the
    widest rows that divide the tensor, or in one row of 1024 or less. Without it where only small rows divide a larger one: it
    would be a single row, which one rank had to sum for all. Empty where none is left, as in a tensor of one element, whose scale
    takes more than is saved: the sum goes as it is."""
    width = row_width(elements) or elements
    usable = [each for each in formats if width <= ROW_ELEMENTS or not each.is_scaled]
    wires = [Wire(each, width, Scaling.BLOCK) if each.is_scaled else Wire(each) for each in usable]
    smaller = tuple(wire for wire in wires if wire.is_native or wire.ratio(4) < 1)
    return () if smaller == (NATIVE,) else smaller


def parse_wire(text: str) -> tuple[WireFormat, ...]:
    """``bf16`` → native or BF16, whichever is faster; ``fp8_e4m3+bf16`` likewise; ``bf16!``: always.

    Raises UsageError for an unknown name.
    """
    names = text.removesuffix("!").split("+")
    try:
        formats = tuple(WireFormat(name) for name in names)
    except ValueError:
        raise UsageError(
            f"a wire format must be one of {', '.join(WireFormat)}, several joined by +, and one ! at the very end where "
            f"native is not allowed; got {text!r}"
        ) from None
    if text.endswith("!") or WireFormat.NATIVE in formats:
        return formats
    return (WireFormat.NATIVE, *formats)
