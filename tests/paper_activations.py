"""Two papers' closed forms of what a layer keeps for its backward pass, against which counts are held.

:class:`LayerShape` is MegaScale-MoE's (appendix A.2 and figure 20): elements of one MoE transformer layer. Symbols are the
paper's: tokens b·s over n ranks that share a sequence, hidden h, m query heads per key-value head, k experts a token, expert
width f·h. Counts are elements of one rank; small ones (logits, row maps, softmax sums) are left out. MoNTA's count bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from commlayer.scheduler.mapping.job import Recompute

__all__ = ["LayerShape", "monta_activation_bytes", "monta_parallel_activation_bytes"]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's numbers. ``tokens``: b·s, of all ``ranks`` (n) together; ``width``: f·h of one expert."""

    tokens: int
    ranks: int
    hidden: int
    heads: int
    kv_heads: int
    top_k: int
    width: int

    @property
    def unit(self) -> float:
        """bsh/n: the hidden states of one rank."""
        return self.tokens * self.hidden / self.ranks

    @property
    def _kf(self) -> float:
        return self.top_k * self.width / self.hidden

    @property
    def _key_value(self) -> float:
        """2/m: keys and values in units of the queries."""
        return 2 * self.kv_heads / self.heads

    @property
    def paper_all_kept(self) -> float:
        """``(2n + 2k + 3kf + 12 + 5/m) bsh/n``: every activation of figure 20, with tokens gathered from all ranks."""
        return (2 * self.ranks + 2 * self.top_k + 3 * self._kf + 12 + 2.5 * self._key_value) * self.unit

    @property
    def selective(self) -> float:
        """``(2kf + 4 + 2/m) bsh/n``: hidden, qkv_a2a, attn, ln2_in, fc1_out and fc3_out stay; the rest is made again."""
        return (2 * self._kf + 4 + self._key_value) * self.unit

    @property
    def autograd(self) -> float:
        """``(4kf + k + 7 + 2/m) bsh/n``: what torch's autograd keeps of this layer without rematerialisation.

        The paper's list has sums and gathered tokens that no gradient needs; with gating weights applied by the experts, torch
        keeps the product before them beside what the list has. So: hidden, ln1_out, qkv_a2a, attn, attn_a2a, ln2_in, ln2_out;
        ffn_in; fc1_out, fc3_out, SwiGLU of both, and that times the gating weights.
        """
        return (4 * self._kf + self.top_k + 7 + self._key_value) * self.unit


def monta_activation_bytes(batch: int, sequence: int, hidden: int, layers: int, heads: int, top_k: int) -> float:
    """``b s h l (13 + 21 k + 5 a s / h)``, MoNTA's equation 2: a two-matrix FFN of width 4h, and attention that keeps its scores.

    The scan of table 4 prints 59a/h for the last term; Korthikanti 2022 (arXiv:2205.05198), whose 34 + 5as/h it is at k = 1,
    and equation 2 itself have 5as/h.
    """
    return batch * sequence * hidden * layers * (13 + 21 * top_k + 5 * heads * sequence / hidden)


def monta_parallel_activation_bytes(
    batch: int,
    sequence: int,
    hidden: int,
    layers: int,
    heads: int,
    top_k: int,
    tp: int,
    recompute: Recompute,
    *,
    sequence_parallel: bool = True,
) -> float:
    """MoNTA's table 4 with pipeline, tensor and expert parallelism, derived (docs/counting.md): pp and ep change nothing.

    With sequence parallelism everything is over t: ``none``: bshl (13 + 21k + 5as/h) / t; ``selective`` (Korthikanti's: scores
    are made again): bshl (13 + 21k) / t; ``full``: 2bshl / t. Without, what norms and dropouts keep, and the inputs of products,
    are on every rank: bshl (5 + 5k + (8 + 16k + 5as/h) / t), and 2bshl.
    """
    tokens = batch * sequence * hidden * layers
    whole = 1 if sequence_parallel else tp
    if recompute == "full":
        return 2 * tokens * whole / tp
    scores = 0.0 if recompute == "selective" else 5 * heads * sequence / hidden
    return tokens * ((5 + 5 * top_k) * whole + 8 + 16 * top_k + scores) / tp
