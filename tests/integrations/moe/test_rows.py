"""Sums over choices and their gradients: where there is nothing, by blocks, and as on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from commlayer.integrations.moe import row_maps
from commlayer.integrations.moe.row_maps import combine_rows, make_row_map, spread_rows

HIDDEN = 3


MAPS = {
    "no tokens": make_row_map(torch.zeros(0, 2, dtype=torch.int64), 4),
    "no tokens, padded": make_row_map(torch.zeros(0, 2, dtype=torch.int64), 4, capacity=2),
    "no rows": make_row_map(torch.full((4, 2), -1), 4),
    "one choice, dropped": make_row_map(torch.full((4, 1), -1), 4),
    "some dropped": make_row_map(torch.tensor([[0, -1], [1, 2], [-1, -1]]), 4),
    "some dropped, padded": make_row_map(torch.tensor([[0, -1], [1, 2], [-1, -1]]), 4, capacity=2),
    "one choice": make_row_map(torch.tensor([[0], [1], [1]]), 4),
}


@pytest.mark.parametrize("block_bytes", [1, 1 << 20, None], ids=["a row at a time", "blocks", "as on a GPU"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MAPS)
def test_sums_and_their_gradients_by_blocks(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, block_bytes: int | None
) -> None:
    """Against the sum over choices one by one, in FP64."""
    if block_bytes is None:
        monkeypatch.setattr(row_maps, "_is_on_host", lambda _: False)
    else:
        monkeypatch.setattr(row_maps, "_BLOCK_BYTES", block_bytes)
    map_, generator = MAPS[name], torch.Generator().manual_seed(0)
    num_tokens, top_k = map_.row_of_choice.shape
    y = torch.randn(map_.token_of_row.shape[0], HIDDEN, generator=generator).to(dtype)
    weights = torch.rand(num_tokens, top_k, generator=generator)
    gradient = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    out, (of_rows, of_weights) = combine_rows(y, weights, map_), spread_rows(gradient, y, weights, map_, of_rows=True)
    expected, row_gradients = torch.zeros(num_tokens, HIDDEN).double(), torch.zeros(y.shape).double()
    weight_gradients = torch.zeros(weights.shape).double()
    for token, k in itertools.product(range(num_tokens), range(top_k)):
        if map_.is_kept is None or map_.is_kept[token, k]:
            row = int(map_.row_of_choice[token, k])
            expected[token] += weights[token, k].double() * y[row].double()
            row_gradients[row] += weights[token, k].double() * gradient[token].double()
            weight_gradients[token, k] = gradient[token].double() @ y[row].double()
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    found = (out, of_rows, of_weights)
    for mine, reference in zip(found, (expected, row_gradients, weight_gradients), strict=True):
        assert mine is not None
        torch.testing.assert_close(mine.double(), reference, rtol=tolerance, atol=tolerance)
