"""The parameters of one layer by part, for tests."""

from __future__ import annotations

from commlayer.scheduler.mapping.layer_table import LayerCut, layer_table
from commlayer.scheduler.mapping.model import ModelShape

__all__ = ["layer_parts"]

_PARTS = ("sharded", "keys_values", "copied", "norms", "router", "shared", "dense_ffn", "experts")


def layer_parts(model: ModelShape) -> dict[str, int]:
    """Parameters of a layer with experts, and its dense FFN (that only some layers have) beside
    these."""
    found = dict.fromkeys(_PARTS, 0)
    for is_moe in (True, False):
        for each in (weight for op in layer_table(model, LayerCut(), is_moe) for weight in op.weights):
            if is_moe or each.part == "dense_ffn":
                found[each.part] += each.elements
    return found
