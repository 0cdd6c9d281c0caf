"""The traffic of one collective call, in numbers that every rank knows to be equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commlayer.profiles.errors import PlanError
from commlayer.profiles.links import Resource
from commlayer.scheduler.wire import NATIVE, Wire

__all__ = ["DTYPE_BYTES", "GROUP_COLLECTIVES", "SlowPair", "Traffic", "dtype_bytes", "link_over", "moe_bytes"]

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

SlowPair = tuple[int, int, float]
"""Two nodes, and the rate of the way between them, as a fraction of the usual one."""
_LEAST_CUT = 64
"""Bytes; a cache line, as where nothing is encoded."""
_SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3"}


GROUP_COLLECTIVES = ("all_gather", "all_reduce", "all_to_all_v", "broadcast", "reduce_scatter")
"""The collectives that are planned over the nodes of a group whose ranks all hold tokens of their own."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """One collective over ``group_size`` ranks, in rank-invariant numbers.

    ``logical_bytes`` is nccl-tests' S: all_to_all the whole send buffer of one rank (MoNTA's I), all_gather the gathered
    total, reduce_scatter the whole input of one rank, all_reduce and broadcast the tensor, all_to_all_v an agreed bound of
    what a rank sends or receives. ``link`` is the slowest link class that the group crosses.

    An ``all_to_all`` is even, and its tokens may be the same on ``replication`` ranks of each node (MoNTA's t, with its e as
    ``group_size``). The other collectives are planned over ``nodes``: how many ranks of the group each node holds.
    ``is_ordered`` asks for sums in FP32 and in rank order (only all_reduce and reduce_scatter have any).

    ``rates``: of each node's card, as a fraction of the usual one; empty where all are alike. ``slow_pairs``: two nodes, by
    their places, and the rate of the way between them, of the usual one too, where that is slower than their cards. ``wires``
    are the forms that its elements, of ``element_bytes`` each, may cross the links in. ``lane``: its class of traffic, "" for
    none (:mod:`commlayer.scheduler.lanes`); of some, others go before it at the edges of its chunks.

    Raises PlanError for negative sizes, empty groups, nodes that do not add up to the group, an unknown collective, and
    an even all_to_all whose group does not divide the buffer.
    """

    logical_bytes: int
    group_size: int
    replication: int = 1
    link: Resource = Resource.INTER
    collective: str = "all_to_all"
    nodes: tuple[int, ...] = ()
    is_ordered: bool = False
    wires: tuple[Wire, ...] = (NATIVE,)
    element_bytes: int = 0
    lane: str = ""
    rates: tuple[float, ...] = ()
    slow_pairs: tuple[SlowPair, ...] = ()

    def __post_init__(self) -> None:
        if self.logical_bytes < 0:
            raise PlanError(f"logical_bytes must be 0 or more, got {self.logical_bytes}")
        if self.group_size < 1 or self.replication < 1:
            raise PlanError(
                f"group_size and replication must be 1 or more, got {self.group_size} and {self.replication}"
            )
        if self.collective == "all_to_all":
            if self.wires != (NATIVE,):
                raise PlanError("tokens that are replicated inside nodes go in their own format")
            if self.logical_bytes % self.group_size:
                raise PlanError(
                    f"an even all_to_all over {self.group_size} ranks needs a multiple of {self.group_size} bytes, "
                    f"got {self.logical_bytes}: pad the tensor, or give a size that the group divides"
                )
            return
        if self.collective not in GROUP_COLLECTIVES:
            raise PlanError(f"expected all_to_all or one of {', '.join(GROUP_COLLECTIVES)}, got {self.collective!r}")
        if sum(self.nodes) != self.group_size or min(self.nodes, default=0) < 1:
            raise PlanError(
                f"{self.collective} over {self.group_size} ranks needs the number of them on each node, got {self.nodes}"
            )
        if self.rates and (len(self.rates) != len(self.nodes) or not all(0 < rate <= 1 for rate in self.rates)):
            raise PlanError(
                f"expected a rate above 0 and at most 1 for each of {len(self.nodes)} nodes, got {self.rates}"
            )
        if not all(0 <= a < b < len(self.nodes) and 0 < rate < 1 for a, b, rate in self.slow_pairs):
            raise PlanError(
                f"expected two of {len(self.nodes)} nodes in their order, and a rate between 0 and 1, for each slow pair, got "
                f"{self.slow_pairs}"
            )

    @classmethod
    def on_nodes(
        cls,
        collective: str,
        logical_bytes: int,
        nodes: tuple[int, ...],
        lane: str = "",
        rates: tuple[float, ...] = (),
        slow_pairs: tuple[SlowPair, ...] = (),
    ) -> Traffic:
        """The traffic of a group with so many ranks on each of ``nodes``."""
        link = link_over(nodes)
        return cls(logical_bytes, sum(nodes), 1, link, collective, nodes, lane=lane, rates=rates, slow_pairs=slow_pairs)

    def __str__(self) -> str:
        """In words, for messages."""
        what = f"{self.collective} of {self.logical_bytes} bytes over {self.group_size} ranks"
        if self.collective == "all_to_all":
            copies = f", replicated on {self.replication} ranks of each node" if self.replication > 1 else ""
            return f"{what} ({self.link.value} links){copies}"
        where = "one node" if len(self.nodes) == 1 else f"nodes of {'+'.join(map(str, self.nodes))}"
        return f"{what} on {where}{', summed in rank order' if self.is_ordered else ''}"

    def row_bytes(self, wire: Wire) -> int:
        """Bytes of what must not be cut when it is encoded: a row, or the rows that share scales."""
        return self.element_bytes * wire.row_elements * wire.row_multiple

    def cut_bytes(self, wire: Wire) -> int:
        """Multiples of what encoded blocks are cut at, bytes: whole rows, and not too few of them."""
        row = self.row_bytes(wire)
        return -(-_LEAST_CUT // row) * row

    @property
    def node_rates(self) -> tuple[float, ...]:
        """The rate of each node's card, as a fraction of the usual one."""
        return self.rates or (1.0,) * len(self.nodes)

    @property
    def is_uniform(self) -> bool:
        """Whether every node holds the same number of the group's ranks."""
        return len(set(self.nodes)) <= 1

    @property
    def num_slices(self) -> int:
        """Into how many slices ranks cut a chunk: one for each holder of the same tokens, else one for each rank."""
        return self.replication if self.collective == "all_to_all" else self.group_size

    @property
    def block_bytes(self) -> int:
        """Bytes that one rank sends to each rank of the group (itself included)."""
        return self.logical_bytes // self.group_size


def link_over(nodes: Sequence[int]) -> Resource:
    """The slowest link class that a group with so many ranks on each of ``nodes`` crosses."""
    return Resource.INTER if len(nodes) > 1 else Resource.INTRA


def dtype_bytes(dtype: str) -> int:
    """Bytes of an element of ``dtype``, short names (bf16, fp8, …) too. Raises PlanError for an unknown one."""
    name = _SHORT.get(dtype, dtype)
    if name not in DTYPE_BYTES:
        raise PlanError(f"unknown dtype {dtype!r}: use one of {', '.join([*DTYPE_BYTES, *_SHORT])}")
    return DTYPE_BYTES[name]


def moe_bytes(*, batch: int, sequence: int, hidden: int, dtype: str = "bf16", top_k: int = 1) -> int:
    """Bytes that an MoE layer's all_to_all carries: b·s·h·BPE (MoNTA eq. 3), times the choices per token.

    Raises PlanError for an unknown dtype or a size below 1.
    """
    element_bytes = dtype_bytes(dtype)
    for label, value in (("batch", batch), ("sequence", sequence), ("hidden", hidden), ("top_k", top_k)):
        if value < 1:
            raise PlanError(f"{label} must be 1 or more, got {value}")
    return batch * sequence * hidden * top_k * element_bytes
