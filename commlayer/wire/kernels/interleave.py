"""The placing copy of a pipelined all_to_all: what arrived chunk by chunk goes to where the whole tensor has it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl

from commlayer.profiles.errors import TensorError

__all__ = ["interleave", "interleave_chunks"]

_TILE = 1024
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit
def interleave_chunks(staged, out, bounds, first_chunk, num_blocks, block_words, tile: tl.constexpr):
    """One program for a piece of one block's slice of one chunk."""
    chunk, block = first_chunk + tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin, end = tl.load(bounds + chunk), tl.load(bounds + chunk + 1)
    offset = tl.program_id(2) * tile + tl.arange(0, tile)
    inside = offset < end - begin
    word = tl.load(staged + begin * num_blocks + block * (end - begin) + offset, mask=inside, other=0)
    tl.store(out + block * block_words + begin + offset, word, mask=inside)


def interleave(staged: torch.Tensor, out: torch.Tensor, bounds: Sequence[int], chunk: int | None = None) -> None:
    """Copy what ``staged`` holds as [chunks][blocks][slice bytes] to ``out`` [blocks][block bytes]; both 1-D uint8.

    Chunk c is the bytes from bounds[c] to bounds[c + 1] of every block, so slices need not be equal; the last bound is the
    bytes of a block. ``chunk``: only that one, as it arrives.

    Raises TensorError for bounds or sizes that do not fit together.
    """
    if len(bounds) < 2 or bounds[0] != 0 or any(a > b for a, b in pairwise(bounds)):
        raise TensorError(f"bounds of chunks rise from 0 to the bytes of a block, got {list(bounds)}")
    if staged.numel() != out.numel() or out.numel() % max(1, bounds[-1]):
        raise TensorError(
            f"expected two buffers of blocks of {bounds[-1]} bytes, got {staged.numel()} and {out.numel()} bytes"
        )
    if out.numel() == 0:
        return
    places = [*bounds, staged.storage_offset(), out.storage_offset(), staged.data_ptr(), out.data_ptr()]
    word = next(size for size in _WORDS if not any(place % size for place in places))
    in_words = torch.tensor([bound // word for bound in bounds], device=out.device)
    longest = max(b - a for a, b in pairwise(bounds)) // word
    num_blocks = out.numel() // bounds[-1]
    chunks = (0, len(bounds) - 1) if chunk is None else (chunk, 1)
    grid = (chunks[1], num_blocks, triton.cdiv(longest, _TILE))
    buffers = staged.view(_WORDS[word]), out.view(_WORDS[word])
    interleave_chunks[grid](*buffers, in_words, chunks[0], num_blocks, bounds[-1] // word, tile=_TILE)
