"""Links as they are declared: what public benchmarks reach of their peaks, each with its source.

Nothing here was measured by us. An efficiency is bytes that one rank sends over the link in one call → fraction of the peak, at
the peak of the hardware that was measured; see :class:`Link` for how it is carried over to a faster or a slower link.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from commlayer.profiles.errors import UsageError

__all__ = [
    "A800_MONTA_NETWORK",
    "A800_MONTA_NVLINK",
    "EFA",
    "FABRICS",
    "MEMORY",
    "MONTA_MEMORY",
    "NETWORK",
    "NVLINK",
    "NVLINK5",
    "NVLINK6",
    "SCALE_UP",
    "XGMI",
    "Link",
    "NetworkKind",
    "Points",
    "check_number",
]

Points = tuple[tuple[float, float], ...]
"""(bytes, fraction of the peak), by increasing bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The parts of a link's peak that calls reach.

    The argument of ``ring`` and ``messages`` is what one rank sends over this link in the whole call, in bytes; the fraction
    is of ``gbps``, with all latencies of the group that was measured. Beyond the points: a latency and a bandwidth, fitted
    to the nearest (as :class:`~commlayer.profiles.curve.Curve`). A link that is k times as fast as ``gbps`` takes for k
    times the bytes the same time: exact for a latency and a bandwidth, and a faster link does not shorten the latency.

    Attributes:
        gbps: the peak of the link that was measured, GB/s.
        ring: of the backend's own calls, whose ranks pass blocks on (all_gather, reduce_scatter, all_reduce, broadcast).
        messages: where each rank sends to each other (all_to_all, steps of plans, send and receive).
        latency_us: the least time of a call over this link.
        hop_us: of each hop of a ring or a tree beyond ``measured_hops``.
        message_us: of each message of a rank beyond ``measured_hops``.
        measured_hops: hops and messages of a rank in the group that the points were measured on (8 ranks: 7).
        mesh: GPUs of which each has a link of its own to each other one, so that a group of fewer has a part of ``gbps``; 0: a
            switch, through which any two have all of it.

    Raises:
        UsageError: fractions that are not in (0, 1], sizes that do not increase, a time that falls with bytes.
    """

    ring: Points
    messages: Points
    gbps: float
    latency_us: float
    hop_us: float = 0.0
    message_us: float = 0.0
    measured_hops: int = 1
    mesh: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("ring", "messages"):
            points: Points = getattr(self, name)
            if not points:
                raise UsageError(f"{name}: expected at least one point (bytes, fraction of the peak), got none")
            for index, (size, fraction) in enumerate(points):
                if not 1 <= size < math.inf:
                    raise UsageError(f"{name}[{index}]: expected a size of at least 1 byte, got {size!r}")
                check_number(f"{name}[{index}]", fraction, 0, 1)
            for index, ((before, slow), (after, fast)) in enumerate(pairwise(points), 1):
                if after <= before:
                    raise UsageError(f"{name}[{index}]: expected sizes that increase, got {after:g} after {before:g}")
                if after / fast < before / slow:
                    raise UsageError(
                        f"{name}[{index}]: expected that more bytes take no less time, got {fast:g} of the peak at "
                        f"{after:g} bytes after {slow:g} at {before:g}"
                    )
        check_number("gbps", self.gbps, 0, math.inf)
        for name in ("latency_us", "hop_us", "message_us", "measured_hops", "mesh"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name}: expected at least 0, got {getattr(self, name)!r}")

    def used_by(self, ranks: int) -> float:
        """The part of the peak that a group of so many ranks can use."""
        return min(1.0, (ranks - 1) / (self.mesh - 1)) if self.mesh > 1 and ranks > 1 else 1.0


def check_number(what: str, value: float, least: float, most: float) -> None:
    """Raise UsageError for a number that is not above ``least``, and at most ``most`` (below infinity)."""
    if not (least < value <= most and value < math.inf):
        expected = "a positive number" if most == math.inf else f"more than {least:g} and at most {most:g}"
        raise UsageError(f"{what}: expected {expected}, got {value!r}")


_MIB = 1 << 20
_GIB = 1 << 30


def _scaled(points: Points, factor: float) -> Points:
    return tuple((size, fraction * factor) for size, fraction in points)


def _capped(points: Points, most: float) -> Points:
    return tuple((size, min(fraction, most)) for size, fraction in points)


_NETWORK_RING: Points = (
    # NVIDIA/nccl-tests#232: two nodes, one H100 and so one 400 Gb/s card each at work: bus bandwidth of an all_reduce of S
    # bytes, of which each card carries S: 18.5, 27.2, 36.2, 39.9 and 41.3 GB/s of 50.
    (2.0 * _MIB, 0.37),
    (4.0 * _MIB, 0.54),
    (8.0 * _MIB, 0.72),
    (16.0 * _MIB, 0.80),
    (32.0 * _MIB, 0.83),
    # NVIDIA/nccl-tests#290, a maintainer of NCCL: 46 to 48 GB/s per 400 Gb/s card over a ring, at large sizes.
    (1.0 * _GIB, 0.94),
)
NETWORK = Link(
    ring=_NETWORK_RING,
    # NVIDIA, GTC 2025, session S72583, slide "All-to-all Communication Bandwidth": bus bandwidth 48 GB/s of 32 GPUs on four
    # DGX H100, of which 24/31 cross a card: 37.2 GB/s, 0.744 of its peak, at large sizes. MoNTA has 0.741 for another
    # generation (table 8). Smaller sizes: by as much below the ring as large ones are (0.744 / 0.94), which is our
    # assumption; it gives 0.43 at 4 MiB and 0.63 at 16 MiB, and MoNTA's table 8 has 0.427 and 0.633.
    messages=_scaled(_NETWORK_RING, 0.744 / 0.94),
    gbps=50.0,
    latency_us=17.0,  # NVIDIA/nccl-tests#293: an all_reduce of 8 bytes between two nodes, 17 µs
    hop_us=4.0,  # NCCL src/graph/tuning.cc, hwLat, network, ring, LL128
    message_us=1.0,  # assumed: the order of magnitude of posting one send and one receive
    measured_hops=1,
    source="NVIDIA/nccl-tests#232, #290, #293; NVIDIA GTC 2025 S72583; NCCL's tuning.cc; a message's cost is assumed",
)
"""InfiniBand or RoCE, a card for each GPU."""

_EFA_RING: Points = (
    # aws-samples/awsome-distributed-training, micro-benchmarks/nccl-tests/README.md (commit 0162aac, read 2026-11-28): an
    # all_reduce of 4 MiB to 16 GiB over two p5.48xlarge, 8 H100 and 400 GB/s of EFA each: 168.6, 298.1, 601.5, 1468, 4608,
    # 17286 and 66132 µs. Of S bytes each GPU's card sends S/8. At large sizes NVLink may be what the call waits for.
    (0.5 * _MIB, 0.062),
    (2.0 * _MIB, 0.141),
    (8.0 * _MIB, 0.279),
    (32.0 * _MIB, 0.457),
    (128.0 * _MIB, 0.583),
    (512.0 * _MIB, 0.621),
    (2.0 * _GIB, 0.649),
)
_EFA_IN_TRAINING = 0.5
"""The part of nccl-tests' rate over EFA that exchanges of tokens reach in a training: set by AWS's runs of Kimi-K2 and
DeepSeek-V3 on p6-b300 with micro-batches of 4 (docs/published.md), whose mean error is 23 % without it, 9 % with 0.5 and
7 % with 0.45. No source says why. Over InfiniBand published runs show none of it."""
EFA = Link(
    ring=_EFA_RING,
    messages=(
        # Small calls: half the time of the all_reduce above, which crosses twice, one after the other: assumed.
        (0.5 * _MIB, 0.124),
        (2.0 * _MIB, 0.282),
        # awslabs/awsome-distributed-ai, micro-benchmarks/expert-parallelism/ep-backend-comparison (commit 95b939c, read
        # 2026-11-28), nccl-tests' alltoall of 64 MiB: bus bandwidth 104.9 GB/s of 16 ranks on two p6-b300 (33.6 MB a card of 100
        # GB/s, so half of that here), 45.1 and 40.4 of 32 and 64 ranks on four and eight p5.48xlarge (50.3 and 58.7 MB a card),
        # less a microsecond for each message. At large sizes 53.9 and 51.1, of which 24/31 and 56/63 cross: 0.835 and 0.908.
        *_scaled(((16.8e6, 0.567), (50.3e6, 0.710), (58.7e6, 0.743), (4.0 * _GIB, 0.871)), _EFA_IN_TRAINING),
    ),
    gbps=50.0,
    latency_us=69.0,
    hop_us=16.0,
    message_us=1.0,
    measured_hops=1,
    source="AWS's awsome-distributed-training, nccl-tests of all_reduce on two p5.48xlarge; all_to_all: its "
    "ep-backend-comparison, p5.48xlarge and p6-b300, of which trainings reach half; "
    "a hop's time by the ratio of latencies (69 to 17 µs): assumed",
)
"""AWS's Elastic Fabric Adapter under NCCL, by libfabric."""


_TCP_GBPS, _TCP_REACHED, _TCP_US = 12.5, 0.6, 46.0
_TCP_RING: Points = tuple(
    (size * _MIB, size * _MIB / (_TCP_US * _TCP_GBPS * 1e3 + size * _MIB / _TCP_REACHED))
    for size in (1.0, 16.0, 1024.0)
)
TCP = Link(
    # NVIDIA/nccl#209: NCCL by sockets does not reliably reach more than 60 % of the wire's speed at 32 Gb/s, also at large sizes;
    # NVIDIA/nccl-tests#82: a broadcast of 8 bytes, 46 µs. A line of both.
    ring=_TCP_RING,
    messages=_scaled(_TCP_RING, 0.744 / 0.94),
    gbps=_TCP_GBPS,
    latency_us=_TCP_US,
    hop_us=_TCP_US,
    message_us=1.0,
    source="NVIDIA/nccl#209 and NVIDIA/nccl-tests#82; sizes between by a latency and a bandwidth, messages by as much below "
    "rings as on InfiniBand, and a hop as long as a small call: assumed",
)
"""NCCL over sockets, without RDMA."""


class NetworkKind(NamedTuple):
    """A kind of network between domains.

    ``link``: what calls reach of it. ``words``: for people to read. ``by_host``: a thread of the host posts what a library's
    kernels send, as no GPU can ring such a card itself. ``has_rdma``: cards write into the memory of another node's
    GPUs, which a library's kernels need.
    """

    link: Link
    words: str
    by_host: bool = False
    has_rdma: bool = True


FABRICS = {
    "infiniband": NetworkKind(NETWORK, "InfiniBand"),
    "roce": NetworkKind(
        NETWORK, "Ethernet with RDMA; curves as of InfiniBand, which public tables do not tell from it"
    ),
    "efa": NetworkKind(EFA, "AWS's Elastic Fabric Adapter", by_host=True),
    "tcp": NetworkKind(TCP, "Ethernet without RDMA, by sockets", has_rdma=False),
}
"""The known fabrics, by the names that --fabric and a cluster file have."""

_NVLINK_RING: Points = (
    # ml-engineering (stas00), network, all_reduce of 1 to 32 MiB on 8 H200: bus bandwidth 39.9, 64.5, 107, 156, 220 and 276
    # GB/s of 450; each GPU sends 1.75·S. (Its two turns have twice the hops of an all_gather: a little too slow for one.)
    (1.75 * _MIB, 0.089),
    (3.5 * _MIB, 0.143),
    (7.0 * _MIB, 0.238),
    (14.0 * _MIB, 0.346),
    (28.0 * _MIB, 0.489),
    (56.0 * _MIB, 0.613),
    # Above, that all_reduce sums in the switch (NVLS), which no all_gather does. MoNTA, table 8, all_gather over 8 A800 of
    # 64 and 256 MB: 0.726 and 0.776 of 200 GB/s; the same fractions for 450/200 times the bytes.
    (126e6, 0.726),
    (504e6, 0.776),
    # ml-engineering, 8 H200, 16 GiB over rings: all_gather 361.4, reduce_scatter 362.9, all_reduce 367.2 GB/s of 450.
    (14.0 * _GIB, 0.803),
)
NVLINK = Link(
    ring=_NVLINK_RING,
    # The same slide of NVIDIA's: 320 GB/s on 8 H100 (0.711), 210 on 8 A100 (0.70), 640 on 8 B200 (0.711) at large sizes.
    # Smaller ones as for the network: by as much below the ring. DeepEP's own kernels: 153 to 158 of an H800's 200 GB/s.
    messages=_scaled(_NVLINK_RING, 0.711 / 0.803),
    gbps=450.0,
    latency_us=12.0,  # deepseek-ai/DeepEP#303: an all_reduce of 4 bytes on 8 H20, 12.5 µs
    hop_us=1.9,  # NCCL src/graph/tuning.cc, hwLat, NVLink, ring, LL128
    message_us=0.3,  # assumed
    measured_hops=7,
    source="ml-engineering (stas00), network; MoNTA table 8; NVIDIA GTC 2025 S72583; NCCL's tuning.cc; a message's cost is "
    "assumed",
)
"""NVLink 3 and 4 through switches."""

NVLINK5 = Link(
    # ml-engineering, 8 B200, 8 GiB over rings: 682 GB/s of 900 (0.758). The slide's NVL72 bar: 680 without sums in the switch.
    ring=_capped(NVLINK.ring, 0.758),
    messages=_capped(NVLINK.messages, 0.711),
    gbps=450.0,
    latency_us=NVLINK.latency_us,
    hop_us=NVLINK.hop_us,
    message_us=NVLINK.message_us,
    measured_hops=7,
    source=f"{NVLINK.source}; its curve as of NVLink 4 up to 0.758, which 8 B200 reach",
)
"""NVLink 5: B200, and GB200's racks of 72 (NVIDIA's slide has 640 GB/s for all_to_all there too)."""

NVLINK6 = replace(NVLINK5, source=f"{NVLINK5.source}; of NVLink 6 nothing is published: assumed to be as NVLink 5")
"""NVLink 6: Vera Rubin's racks of 72."""

_XGMI_REACHED = 0.698
XGMI = Link(
    # ml-engineering (stas00), network: an all_reduce of 4 GiB on 8 MI300X: bus bandwidth 312.9 GB/s of 448, on two 47.7 of 64.
    ring=_capped(NVLINK.ring, _XGMI_REACHED),
    messages=_capped(NVLINK.messages, _XGMI_REACHED * 0.711 / 0.803),
    gbps=448.0,
    latency_us=NVLINK.latency_us,
    hop_us=NVLINK.hop_us,
    message_us=NVLINK.message_us,
    measured_hops=7,
    mesh=8,
    source="ml-engineering (stas00), network: all_reduce on MI300X at 4 GiB; smaller calls, latencies and all_to_all beside "
    "rings as on NVLink: assumed, as no table of RCCL's was found",
)
"""AMD's Infinity Fabric: each of eight GPUs has a link to each other one."""

SCALE_UP = {"nvlink": NVLINK, "nvlink5": NVLINK5, "nvlink6": NVLINK6, "xgmi": XGMI}
"""The links inside a domain, by the names that clusters.json has."""

_MONTA_ALL_TO_ALL: Points = ((4e6, 0.427), (16e6, 0.633), (128e6, 0.741))
A800_MONTA_NETWORK = Link(
    # Table 8: all_to_all over two nodes of 8, 32 and 256 MB, of which half cross. Nothing else is published: rings alike.
    ring=_MONTA_ALL_TO_ALL,
    messages=_MONTA_ALL_TO_ALL,
    gbps=25.0,
    latency_us=0.0,
    source="MoNTA table 8, all_to_all; its latency is in its points; rings, hops and messages beyond are not published",
)
# Table 8: all_gather over 8 ranks of 64 and 256 MB, of which each sends 7/8; 8192 MB as its text reads figure 13.
_MONTA_ALL_GATHER: Points = ((56e6, 0.726), (224e6, 0.776), (7168e6, 0.803))
A800_MONTA_NVLINK = Link(
    ring=_MONTA_ALL_GATHER,
    messages=_MONTA_ALL_GATHER,
    gbps=200.0,
    latency_us=0.0,
    measured_hops=7,
    source="MoNTA table 8 and figure 13, all_gather; its latency is in its points",
)
MONTA_MEMORY = Link(
    ring=((64e6, 0.80),), messages=((64e6, 0.80),), gbps=1600.0, latency_us=0.0, source="MoNTA table 8, copy of 64 MB"
)

_COPIES: Points = ((1.0 * _MIB, 0.17), (64e6, 0.80))
MEMORY = Link(
    # 64 MB: MoNTA table 8. 1 MiB: a kernel of 4 µs, which is our assumption.
    ring=_COPIES,
    messages=_COPIES,
    gbps=1675.0,
    latency_us=3.0,
    source="MoNTA table 8 at 64 MB; small copies take a kernel's launch, assumed 3 to 4 µs",
)
"""Copies and sums in a GPU's memory; the peak is half of what the memory reads and writes."""
