"""The resources that a collective occupies, their peak rates, and nccl-tests' bus factors.

Units, once for the whole code base: ``_gbps`` is gigaBYTES per second (1e9 bytes), ``_us`` microseconds.
"""

from __future__ import annotations

import math
from enum import Enum

import msgspec

from commlayer.profiles.errors import ProfileError, UsageError

__all__ = ["COLLECTIVES", "Peaks", "Resource", "SlowLink", "bus_factor"]


class Resource(str, Enum):
    """The resource that a step occupies while it runs. A resource does one step at a time.

    The first three are also the link classes on which curves are measured. ``host`` is the way between a device's memory and its
    host's, on which only planned steps have copies.
    """

    INTER = "inter"
    INTRA = "intra"
    DEVICE = "device"
    COMPUTE = "compute"
    HOST = "host"

    def __str__(self) -> str:
        return self.value


class Peaks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Peak rates of one RANK, one direction, when all ranks of a node move at once; of uneven nodes the emptiest one's.

    A network card of 0.05 GB/s that four ranks share has ``inter_gbps`` 0.0125. ``device_gbps`` counts the bytes that a
    copy copies: a copy reads and writes, so it is half of what the memory is specified for.

    Raises:
        ProfileError: a rate that is not a positive, finite number.
    """

    inter_gbps: float
    intra_gbps: float
    device_gbps: float

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise ProfileError(f"{name}: expected a positive number of GB/s, got {value!r}")
            msgspec.structs.force_setattr(self, name, float(value))  # 25 and 25.0 must give one fingerprint

    def of(self, link: Resource) -> float:
        """The peak of ``link`` in GB/s; COMPUTE has none (UsageError)."""
        if link not in ("inter", "intra", "device"):
            raise UsageError(f"expected the link class inter, intra or device, got {link}: only links have a peak rate")
        return float(getattr(self, f"{Resource(link).value}_gbps"))


class SlowLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A link between nodes that is slower than the others: a node's card, or the way between two nodes.

    Attributes:
        nodes: one node, whose card it is, or two; by their place in the topology.
        rate: of what the cluster's nodes usually have, a fraction below 1.

    Raises:
        ProfileError: other numbers of nodes, a rate out of its range.
    """

    nodes: tuple[int, ...]
    rate: float

    def __post_init__(self) -> None:
        if len(self.nodes) not in (1, 2) or min(self.nodes) < 0 or len(set(self.nodes)) < len(self.nodes):
            raise ProfileError(f"nodes: expected one node, or two different ones, got {self.nodes}")
        if not 0 < self.rate < 1:
            raise ProfileError(f"rate: expected a fraction of the usual rate between 0 and 1, got {self.rate}")
        msgspec.structs.force_setattr(self, "rate", float(self.rate))

    def __str__(self) -> str:
        where = (
            f"node {self.nodes[0]}'s card has"
            if len(self.nodes) == 1
            else f"nodes {self.nodes[0]} and {self.nodes[1]} have"
        )
        return f"{where} {self.rate:.0%} of the usual rate"


_SHARED = frozenset(
    {
        "all_gather",
        "all_gather_single",
        "all_to_all",
        "all_to_all_single",
        "all_to_all_v",
        "gather",
        "leaders",
        "reduce_scatter",
        "reduce_scatter_single",
        "scatter",
    }
)
_WIRE_FORMATS = ("bf16", "int8", "fp8_e4m3", "fp8_e5m2")
_CODED = frozenset(f"{way}_{wire}" for way in ("encode", "decode") for wire in _WIRE_FORMATS)
_WHOLE = frozenset({"broadcast", "copy", "recv", "reduce", "send", "send_recv"}) | _CODED

#: The operations that a curve can describe. ``all_to_all``, ``all_gather``, ``gather`` and ``scatter`` are steps by messages, as
#: most plans run them, and ``leaders`` is an all_to_all between one rank of each node; ``…_single`` (torch's names),
#: ``all_to_all_v``, ``all_reduce`` and ``broadcast`` are calls of the backend's own; ``reduce`` on a device is the sum of blocks
#: in memory, with S what is added to the first block; ``encode_bf16`` and so on turn a tensor of S bytes into a wire format,
#: ``decode_bf16`` and so on what was S bytes back (BF16 into a sum of FP32).
COLLECTIVES: tuple[str, ...] = tuple(sorted({"all_reduce"} | _SHARED | _WHOLE))


def bus_factor(collective: str, group_size: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests' PERFORMANCE.md defines it.

    With n ranks: all_reduce 2(n-1)/n; all_gather, reduce_scatter, all_to_all (also _single, _v), gather, scatter and leaders
    (n-1)/n with S the gathered (whole) buffer; send, recv, broadcast, reduce and the local operations 1.

    Raises:
        UsageError: an unknown collective, or a group of fewer than one rank.
    """
    if group_size < 1:
        raise UsageError(f"expected a group of at least one rank, got group_size {group_size} for {collective}")
    if collective in _SHARED:
        return (group_size - 1) / group_size
    if collective in _WHOLE:
        return 1.0
    if collective == "all_reduce":
        return 2 * (group_size - 1) / group_size
    raise UsageError(f"expected one of {', '.join(COLLECTIVES)}, got the collective {collective!r}")
