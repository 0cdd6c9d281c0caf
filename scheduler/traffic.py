"""What must move: the traffic of one collective call, in numbers that every rank knows to be equal."""

from __future__ import annotations

from dataclasses import dataclass

from commlayer.profiles.errors import PlanError
from commlayer.profiles.links import Resource

__all__ = ["DTYPE_BYTES", "Traffic", "moe_bytes"]

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes per element (MoNTA's BPE) of the dtypes that activations travel in; short names (bf16, fp8, …) are in ``moe_bytes``."""

_SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3"}


@dataclass(frozen=True, slots=True)
class Traffic:
    """An all_to_all over ``group_size`` ranks whose tokens are the same on ``replication`` ranks of each node.

    ``logical_bytes`` is the whole send buffer of one rank (MoNTA's I, nccl-tests' S): the same on every rank.
    ``group_size`` is MoNTA's e, ``replication`` its t. ``link`` is the link class that the group crosses.

    Raises PlanError for negative sizes, empty groups, and groups that do not divide the buffer.
    """

    logical_bytes: int
    group_size: int
    replication: int = 1
    link: Resource = Resource.INTER

    collective = "all_to_all"

    def __post_init__(self) -> None:
        if self.logical_bytes < 0:
            raise PlanError(f"logical_bytes must be 0 or more, got {self.logical_bytes}")
        if self.group_size < 1 or self.replication < 1:
            raise PlanError(
                f"group_size and replication must be 1 or more, got {self.group_size} and {self.replication}"
            )
        if self.logical_bytes % self.group_size:
            raise PlanError(
                f"an even all_to_all over {self.group_size} ranks needs a multiple of {self.group_size} bytes, "
                f"got {self.logical_bytes}: pad the tensor, or give a size that the group divides"
            )

    @property
    def block_bytes(self) -> int:
        """Bytes that one rank sends to each rank of the group (itself included)."""
        return self.logical_bytes // self.group_size


def moe_bytes(*, batch: int, sequence: int, hidden: int, dtype: str = "bf16", top_k: int = 1) -> int:
    """Bytes that an MoE layer's all_to_all carries: b·s·h·BPE (MoNTA eq. 3), times the choices per token.

    Raises PlanError for an unknown dtype or a size below 1.
    """
    name = _SHORT.get(dtype, dtype)
    if name not in DTYPE_BYTES:
        raise PlanError(f"unknown dtype {dtype!r}: use one of {', '.join([*DTYPE_BYTES, *_SHORT])}")
    for label, value in (("batch", batch), ("sequence", sequence), ("hidden", hidden), ("top_k", top_k)):
        if value < 1:
            raise PlanError(f"{label} must be 1 or more, got {value}")
    return batch * sequence * hidden * top_k * DTYPE_BYTES[name]
