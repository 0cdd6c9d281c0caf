"""Libraries of kernels that dispatch tokens to experts in one call, by the rates that they reach.

Published rates count what stays on a rank, or in a node, as sent ("logical bandwidth"); here that is taken out. Nothing was
fitted to a training throughput. :mod:`commlayer.scheduler.mapping.token_routes` has what such a call sends, and its time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from commlayer.profiles.errors import DispatchError
from commlayer.scheduler.mapping.dispatch_times import DispatchTimes
from commlayer.scheduler.mapping.hardware import Architecture, Gpu

__all__ = [
    "DEEPEP",
    "DEEPEP_V2",
    "DISPATCH_KERNELS",
    "HYBRIDEP",
    "MOST_TAKEN",
    "NCCL_EP",
    "NCCL_MESSAGE_MULTIPROCESSORS",
    "NCCL_MOVES",
    "NCCL_MULTIPROCESSORS",
    "ROW_BYTES",
    "UCCL_EP",
    "DispatchKernels",
]


ROW_BYTES = 14336
"""The bytes of the rows that the published tables are of: DeepSeek-V3's 7,168 elements in BF16."""


_CHUNKS = ((8, 6, 6), (16, 20, 12), (64, 8, 8), (math.inf, 12, 8))
"""The rows that a sender's kernel puts on the network at once: for groups of at most so many ranks, of those on their way to
experts and of those that come home (deepseek-ai/DeepEP, deep_ep/buffers/legacy.py, get_dispatch_config and
get_combine_config, which Megatron-Core leaves as they are)."""
_TWICE_NVLINK = ("blackwell", "rubin")
"""GPUs whose rates are taken to be Blackwell's."""
_LARGEST_CHUNK = 32
"""The largest chunk that DeepEP's test tries (tests/legacy/test_internode.py)."""


def _of_chunk(*crossing_gbps: float) -> float:
    """The mean time of the test's largest chunk, µs, at the rates that its calls reach across a card."""
    return sum(_LARGEST_CHUNK * ROW_BYTES / (rate * 1e3) for rate in crossing_gbps) / len(crossing_gbps)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchKernels:
    """One library: the parts of the links' peaks that its large calls reach, with rows of :data:`ROW_BYTES`.

    Attributes:
        network: of a GPU's card, counting what crosses it.
        inside: of NVLink, counting what leaves a GPU; ``inside_blackwell``: there, where NVLink is twice as fast.
        held_inside, held_across: multiprocessors that a call holds, in a node and between nodes.
        network_row_bytes, inside_row_bytes: what a row costs beyond its own bytes, as bytes.
        prepare_us: of a forward dispatch before its rows go.
        posted_us, posted_blackwell_us: of each chunk of rows that a thread of the host posts, where it has to
            (:class:`~commlayer.scheduler.mapping.declared_links.NetworkKind`), on Hopper and on Blackwell;
            0: it cannot, or nobody has published it.
        not_posted: why these are 0.
        chunks: rows of such a chunk, by the group's largest number of ranks: to experts, and home.
        permutes: the calls put rows into the order of experts and back, and into blocks of as many as products in FP8 want
            (Megatron-Core, transformer/moe: fused_a2a.py, dispatch_with_permute; moe_utils.py, skip_routed_expert_padding);
            rates are of whole calls with such a copy.
        megatron: its name in Megatron-Core's flexible dispatcher.
        on_amd: it runs on AMD's GPUs too.
        measured: times of its calls, in place of rates; None: nobody gave any.
        assumed: about which of these numbers the source says nothing, and what they were taken from.
    """

    name: str
    network: float
    inside: float
    held_inside: int
    held_across: int
    network_row_bytes: float = 0.0
    inside_row_bytes: float = 0.0
    prepare_us: float = 0.0
    posted_us: float = 0.0
    posted_blackwell_us: float = 0.0
    not_posted: str = ""
    chunks: tuple[tuple[float, int, int], ...] = _CHUNKS
    permutes: bool = False
    on_amd: bool = False
    inside_blackwell: float | None = None
    megatron: str
    measured: DispatchTimes | None = None
    assumed: str = ""
    source: str

    def inside_of(self, architecture: Architecture) -> float:
        """The part of NVLink's peak that calls reach among GPUs of a generation."""
        found = self.inside_blackwell if architecture in _TWICE_NVLINK else None
        return self.inside if found is None else found

    def check(self, gpu: Gpu) -> None:
        """Raises DispatchError for a GPU that the kernels do not run on, whatever the mapping."""
        if gpu.architecture == "cdna" and not self.on_amd:
            raise DispatchError(
                f"{self.name} does not run on {gpu.name}, which is AMD's: take nccl (RCCL) or uccl (UCCL-EP); MORI-EP, AMD's "
                "own, is not modelled, as no table of its rates was found"
            )

    def post_us(self, rows: float, num_ranks: int, architecture: Architecture, *, to_experts: bool) -> float:
        """The time in which a thread of the host posts rows to other nodes, chunk after chunk, µs.

        Raises DispatchError for kernels whose rows no thread of the host posts, or not at a known rate.
        """
        if not self.posted_us:
            raise DispatchError(
                f"{self.name} has no time between nodes of a network whose cards no GPU can post to: {self.not_posted}; "
                "take another dispatcher, or experts inside a node"
            )
        chunk = next(rows for most, *rows in self.chunks if num_ranks <= most)[not to_experts]
        return rows / chunk * (self.posted_blackwell_us if architecture in _TWICE_NVLINK else self.posted_us)

    def sent_bytes(self, row_bytes: float, *, crosses: bool) -> float:
        """The bytes that a row takes the time of, where one of :data:`ROW_BYTES` takes that of its own."""
        beyond = self.network_row_bytes if crosses else self.inside_row_bytes
        return (row_bytes + beyond) * ROW_BYTES / (ROW_BYTES + beyond)

    def multiprocessors(self, num_nodes: int) -> int:
        """The multiprocessors that a call of a group on so many nodes holds."""
        return self.held_across if num_nodes > 1 else self.held_inside


DEEPEP = DispatchKernels(
    name="deepep",
    # EP 32 over 4 nodes: dispatch 58, combine 57 GB/s, of which 3/4 cross; EP 64 over 8: 51 and 50, of which 7/8 cross: 43.5,
    # 42.8, 44.6 and 43.8 of a card's 50 GB/s. (EP 16 over 2 nodes waits for NVLink: 43 GB/s, half of which cross.)
    network=0.87,
    # EP 8: 153 and 158 GB/s, 7/8 of which leave the GPU: 134 and 138 of an H800's 200.
    inside=0.68,
    # 8 B200, BF16: with 16 and 24 multiprocessors 348 and 494 GB/s, combine 302 and 420, so some 388 with 20, 7/8 of which leave
    # the GPU: it is the multiprocessors that bound it there, as on GB200 (branch hybrid-ep, docs/README_Hybrid-EP.md).
    inside_blackwell=0.38,
    # Megatron-Core's default for it, and what DeepSeek-V3 trained with (arXiv:2412.19437, section 3.2.2: 20 of 132).
    held_inside=20,
    held_across=20,
    # Rows of 7,168 and of 2,048 elements in BF16, dispatch and combine, 24 multiprocessors: 85 and 68, 59 and 59 GB/s between two
    # nodes, 335 and 326, 302 and 287 in a node (NVIDIA-NeMo/Automodel, docs/deepep_vs_hybridep_benchmark.md, H100, 2026-07-22):
    # a line through the mean times of a row.
    network_row_bytes=1830,
    inside_row_bytes=740,
    # The same: layout 39 µs, and 35 µs in which the host waits for how many rows will come.
    prepare_us=74,
    # On EFA, with NVSHMEM by libfabric, whose thread on the host posts: awslabs/awsome-distributed-ai, ep-backend-comparison
    # (commit 95b939c), rows of 14,336 bytes: p5.48xlarge, dispatch and combine, 4 nodes 43.7 and 46.1 GB/s, 8 nodes 39.6 and
    # 39.2; p6-b300, 2 nodes 126.6 and 106.4, 4 nodes 97.1 and 95.4, 8 nodes 84.2 and 73.1, 16 nodes 74.7, of which 1/2, 3/4, 7/8
    # and 15/16 cross. Each chunk is followed by a signal that has to wait until it has arrived (DeepEP#574: one queue pair,
    # whose fence "is costly and quiets" it). That this alone is what these calls take, at the largest chunk, is assumed: it
    # makes smaller chunks, which trainers have, as slow as they can be.
    posted_us=_of_chunk(43.7 * 3 / 4, 46.1 * 3 / 4, 39.6 * 7 / 8, 39.2 * 7 / 8),
    posted_blackwell_us=_of_chunk(
        126.6 / 2, 106.4 / 2, 97.1 * 3 / 4, 95.4 * 3 / 4, 84.2 * 7 / 8, 73.1 * 7 / 8, 74.7 * 15 / 16
    ),
    megatron="deepep",
    source="deepseek-ai/DeepEP, docs/legacy.md, performance of normal kernels: H800, 400 Gb/s cards, 4096 tokens, hidden 7168, "
    "top-8 in 4 groups",
)
HYBRIDEP = DispatchKernels(
    name="hybridep",
    # H100, 400 Gb/s cards, 4096 tokens, BF16, 8 multiprocessors, times of the whole call: of 32 ranks on 4 nodes 46.5 and 50.7
    # GB/s, of which 3/4 cross, of 64 on 8 nodes 41.5 and 47.7, of which 7/8 do: 0.70, 0.76, 0.73 and 0.83 of 50 GB/s.
    network=0.75,
    # GB200, 8 to 36 ranks, 32 multiprocessors, times of the whole call in BF16: dispatch 546 … 479, combine 569 … 448 GB/s; of 32
    # ranks 484 and 465, 31/32 of which leave the GPU: 469 and 450 of 900.
    inside=0.51,
    # The defaults of its configuration (csrc/hybrid_ep/config.cuh).
    held_inside=24,
    held_across=8,
    # As DeepEP's: 367 and 364, 325 and 304 GB/s with 24 multiprocessors in a node; between nodes with 8 of them dispatch 86 and
    # 65. Combine falls from 77 to 34 there, which that page's own training runs do not show: it is taken like dispatch.
    network_row_bytes=2040,
    inside_row_bytes=1000,
    permutes=True,
    not_posted="it finds no network card that it knows, and ends with an error (NVIDIA-NeMo/Megatron-Bridge#3343, on EFA)",
    megatron="hybridep",
    source="deepseek-ai/DeepEP, branch hybrid-ep, docs/README_Hybrid-EP.md, its tables of H100 and GB200",
)
DEEPEP_V2 = replace(
    DEEPEP,
    name="deepepv2",
    # H100 or H800, 400 Gb/s cards: EP 16 on 2 nodes 90 and 81 GB/s, half of which cross, EP 32 on 4 nodes 61 and 61, of which
    # 3/4 do: 45, 40.5, 45.75 and 45.75 of 50 GB/s.
    network=0.885,
    # 8 Blackwell GPUs, 24 multiprocessors: 643 and 675 GB/s, 7/8 of which leave the GPU: 563 and 591 of 900.
    inside_blackwell=0.64,
    held_inside=24,
    # 12 on 2 nodes, 6 on 4: the larger one.
    held_across=12,
    posted_us=0.0,
    posted_blackwell_us=0.0,
    not_posted="nobody has published its rates there",
    megatron="deepepv2",
    assumed="its rate inside a node of Hopper, its rates for small rows and what comes before a dispatch are those of DeepEP's "
    "first release",
    source="deepseek-ai/DeepEP, README.md at dd758ca, performance: 8192 tokens, hidden 7168, top-8, FP8 dispatch, BF16 combine",
)
UCCL_EP = replace(
    DEEPEP,
    name="uccl",
    # 8 MI300X a node, ConnectX-7 cards of 400 Gb/s, BF16 dispatch and combine: EP 16 82 and 78 GB/s, EP 32 61 and 60, EP 64 53
    # and 51, of which 1/2, 3/4 and 7/8 cross: 41, 39, 45.75, 45, 46.4 and 44.6 of 50 GB/s.
    network=0.87,
    # EP 8, 7/8 of which leave the GPU: MI300X 295 and 304 GB/s: 258 and 266 of 448; H200 320 and 319: 280 and 279 of 450.
    inside=0.60,
    # 8 B200: dispatch 280, combine 426 GB/s: 245 and 373 of 900.
    inside_blackwell=0.34,
    # On EFA, the comparison that DeepEP's are from: p5.48xlarge, dispatch and combine, 4 nodes 38.2 and 30.2 GB/s, 8 nodes 29.9
    # and 26.7; p6-b300, 2 nodes 91.9 and 59.6, 4 nodes 102.1 and 95.3, 8 nodes 93.9 and 90.5.
    posted_us=_of_chunk(38.2 * 3 / 4, 30.2 * 3 / 4, 29.9 * 7 / 8, 26.7 * 7 / 8),
    posted_blackwell_us=_of_chunk(91.9 / 2, 59.6 / 2, 102.1 * 3 / 4, 95.3 * 3 / 4, 93.9 * 7 / 8, 90.5 * 7 / 8),
    # uccl-project/uccl at da914a2, ep/bench/buffer.py, get_dispatch_config and get_combine_config.
    chunks=((8, 6, 6), (16, 20, 12), (32, 32, 8), (64, 28, 20), (math.inf, 20, 12)),
    on_amd=True,
    assumed="what comes before a dispatch, its rates for small rows and its multiprocessors are DeepEP's",
    source="uccl-project/uccl, ep/README.md, normal kernels: 4096 tokens, hidden 7168, top-8",
)
NCCL_EP = replace(
    HYBRIDEP,
    name="ncclep",
    # Its high-throughput kernels are made from Hybrid-EP's, with 16 multiprocessors at most (NVIDIA/nccl, contrib/nccl_ep,
    # device/hybridep_configs.cuh).
    held_inside=16,
    held_across=16,
    not_posted="nobody has published its rates there",
    megatron="ncclep",
    assumed="large calls are Hybrid-EP's, from which its kernels are made, as NVIDIA publishes rates for few tokens only",
)
NCCL_MULTIPROCESSORS = 16
"""Multiprocessors that a collective call of NCCL's holds: "16 or more" without offload to switches (NVIDIA, on NCCL 2.27)."""
NCCL_MESSAGE_MULTIPROCESSORS = 2
"""The channels of one message between two GPUs (NCCL, src/graph/paths.cc, ncclTopoGetNchannels: 2 for NVLink and for PCIe)."""
NCCL_MOVES = 4
"""How often NCCL reads or writes what leaves a rank: into a buffer there, and out of one where it arrives."""
MOST_TAKEN = 0.5
"""The largest part of a GPU that one call is taken to hold; GPUs with few multiprocessors get fewer channels."""
DISPATCH_KERNELS = {each.name: each for each in (DEEPEP, HYBRIDEP, DEEPEP_V2, UCCL_EP, NCCL_EP)}
"""The known libraries, by name."""
