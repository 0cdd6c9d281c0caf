"""Libraries of kernels that dispatch tokens to experts in one call, by the rates that they reach.

Published rates count what stays on a rank, or in a node, as sent ("logical bandwidth"); here that is taken out. Nothing was
fitted to a training throughput. :mod:`commlayer.scheduler.mapping.token_routes` has what such a call sends, and its time.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "DEEPEP",
    "DISPATCH_KERNELS",
    "HYBRIDEP",
    "MOST_TAKEN",
    "NCCL_MESSAGE_MULTIPROCESSORS",
    "NCCL_MOVES",
    "NCCL_MULTIPROCESSORS",
    "DispatchKernels",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchKernels:
    """One library: the parts of the links' peaks that its large calls reach.

    ``network``: of a GPU's card, counting what crosses it. ``inside``: of NVLink, counting what leaves a GPU. ``held_inside``,
    ``held_across``: multiprocessors that a call holds, in a node and between nodes.
    """

    name: str
    network: float
    inside: float
    held_inside: int
    held_across: int
    source: str

    def multiprocessors(self, num_nodes: int) -> int:
        """The multiprocessors that a call of a group on so many nodes holds."""
        return self.held_across if num_nodes > 1 else self.held_inside


DEEPEP = DispatchKernels(
    name="deepep",
    # EP 32 over 4 nodes: dispatch 58, combine 57 GB/s, of which 3/4 cross; EP 64 over 8: 51 and 50, of which 7/8 cross: 43.5,
    # 42.8, 44.6 and 43.8 of a card's 50 GB/s. (EP 16 over 2 nodes waits for NVLink: 43 GB/s, half of which cross.)
    network=0.87,
    # EP 8: 153 and 158 GB/s, 7/8 of which leave the GPU: 134 and 138 of an H800's 200. 8 B200, 24 multiprocessors: 494 and 420,
    # which is 0.48 and 0.41 of 900: with so few it is the multiprocessors that bound it there, as on GB200.
    inside=0.68,
    # Megatron-Core's default for it, and what DeepSeek-V3 trained with (arXiv:2412.19437, section 3.2.2: 20 of 132).
    held_inside=20,
    held_across=20,
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
    source="deepseek-ai/DeepEP, branch hybrid-ep, docs/README_Hybrid-EP.md, its tables of H100 and GB200",
)
NCCL_MULTIPROCESSORS = 16
"""Multiprocessors that a collective call of NCCL's holds: "16 or more" without offload to switches (NVIDIA, on NCCL 2.27)."""
NCCL_MESSAGE_MULTIPROCESSORS = 2
"""The channels of one message between two GPUs (NCCL, src/graph/paths.cc, ncclTopoGetNchannels: 2 for NVLink and for PCIe)."""
NCCL_MOVES = 4
"""How often NCCL reads or writes what leaves a rank: into a buffer there, and out of one where it arrives."""
MOST_TAKEN = 0.5
"""The largest part of a GPU that one call is taken to hold; GPUs with few multiprocessors get fewer channels."""
DISPATCH_KERNELS = {each.name: each for each in (DEEPEP, HYBRIDEP)}
"""The known libraries, by name."""
