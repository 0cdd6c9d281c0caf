"""How many elements one MoE transformer layer keeps for its backward pass (MegaScale-MoE, appendix A.2 and figure 20).

Symbols as in the paper: tokens b·s over n ranks that share a sequence, hidden h, m query heads per key-value head, k experts a
token, expert width f·h. All counts are elements of one rank; small ones (logits, row maps, softmax sums) are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LayerShape"]


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
