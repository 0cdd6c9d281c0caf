"""The closed forms of MegaScale-MoE (arXiv:2505.11432) for communication, in elements; times an element's bytes they are bytes.

They are here to be tested against: what a mapping sends is counted from its calls, not from these.

Symbols: micro-batch b, sequence s, hidden h, a group of n ranks, m query heads per key-value head, k experts a token, expert
width h_ffn. All volumes are what one rank sends, which is what it receives, in the forward pass of one layer; the paper counts
two collectives of a layer each: all_gather and reduce_scatter (equations 1 and 4), the all_to_all before attention and the one
after it (2), dispatch and combine (3).
"""

from __future__ import annotations

from dataclasses import dataclass

from commlayer.profiles.errors import UsageError

__all__ = [
    "Ratio",
    "compute_over_communication",
    "expert_parallel_ffn",
    "sequence_parallel_attention_sent",
    "tensor_parallel_attention",
    "tensor_parallel_ffn",
]


def tensor_parallel_attention(tokens: int, hidden: int, ranks: int) -> float:
    """Equation 1: ``2bsh(n-1)/n`` elements. ``tokens``: b·s."""
    _check(ranks)
    return 2 * tokens * hidden * (ranks - 1) / ranks


def sequence_parallel_attention_sent(tokens: int, hidden: int, ranks: int, heads_per_key: float) -> float:
    """``bsh(n-1)/n · (2+2/m)/n`` elements: an all_to_all of (1+2/m) bsh/n queries, keys and values, and one of bsh/n outputs.

    ``heads_per_key``: m. Equation 2 as printed has twice that, while equations 1, 3 and 4 agree with their calls.
    """
    _check(ranks)
    return tokens * hidden * (ranks - 1) / ranks * (2 + 2 / heads_per_key) / ranks


def expert_parallel_ffn(tokens: int, hidden: int, ranks: int, top_k: int) -> float:
    """Equation 3: ``2k/n · bsh(n-1)/n`` elements, dispatch and combine by all_to_all with even routing."""
    _check(ranks)
    return 2 * top_k / ranks * tokens * hidden * (ranks - 1) / ranks


def tensor_parallel_ffn(tokens: int, hidden: int, ranks: int) -> float:
    """Equation 4: ``2bsh(n-1)/n`` elements; also dispatch by all_gather and combine by reduce_scatter."""
    return tensor_parallel_attention(tokens, hidden, ranks)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Equations 5 to 9, times in seconds. ``limit``: equation 9, of many ranks."""

    communication_s: float
    compute_s: float
    limit: float

    @property
    def value(self) -> float:
        """R, equations 7 and 8."""
        return self.compute_s / self.communication_s


def compute_over_communication(
    tokens: int,
    hidden: int,
    width: int,
    top_k: int,
    ranks: int,
    *,
    bytes_per_s: float,
    flops_per_s: float,
    element_bytes: int = 2,
) -> Ratio:
    """The experts' matrix products over dispatch and combine, in one forward pass (section 7).

    The paper prints bandwidth in elements/s and peak in multiply-adds/s. Here bandwidth is bytes/s of elements of
    ``element_bytes``, and peak is FLOP/s, two to a multiply-add: ``R = 3 h_ffn bytes_per_s / (element_bytes · flops_per_s) ·
    n/(n-1)``; with BF16 the two factors cancel, and 3/2 h_ffn · bandwidth/peak is right with bytes and FLOPs, too.

    Raises UsageError for one rank, which sends nothing.
    """
    if ranks < 2:
        raise UsageError(f"ranks: expected at least 2 for anything to be sent, got {ranks}")
    elements_per_s, products_per_s = bytes_per_s / element_bytes, flops_per_s / 2
    return Ratio(
        communication_s=expert_parallel_ffn(tokens, hidden, ranks, top_k) / elements_per_s,
        compute_s=3 * top_k * tokens * hidden * width / ranks / products_per_s,
        limit=1.5 * width * elements_per_s / products_per_s,
    )


def _check(ranks: int) -> None:
    if ranks < 1:
        raise UsageError(f"expected a group of at least 1 rank, got {ranks}")
