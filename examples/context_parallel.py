"""Sequences over a context-parallel group, and attention over such a sequence.

A sequence of S rows is cut into 2·cp chunks; rank i has chunks i and 2·cp - 1 - i ("zigzag"). Under a causal mask a late
chunk attends to many keys and an early one to few: the two together cost the same on every rank. A tensor-parallel group
cuts each rank's rows further, into consecutive ones.

Keys and values are gathered over the group, in one call that may be started before there are queries; each rank's queries
attend to those that come before them, and no others are computed. Rejected: passing keys and values round a ring, which sends as
much, in cp - 1 small messages, and needs the softmax merged by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention.bias import causal_lower_right
from torch.utils.weak import WeakTensorKeyDictionary

from commlayer.collectives import GroupCommunicator, Pending
from commlayer.integrations.moe.routing import who
from commlayer.integrations.shares import even_rows
from commlayer.profiles.errors import TensorError, UsageError

__all__ = [
    "KeysAndValues",
    "check_valid",
    "context_parallel_attention",
    "local_rows",
    "merge_sequence",
    "positions",
    "split_sequence",
    "zigzag_merge",
    "zigzag_rows",
    "zigzag_split",
]


def zigzag_rows(seq_len: int, cp_size: int) -> tuple[int, ...]:
    """Return how many rows each rank of a context-parallel group has."""
    chunks = _chunks(seq_len, cp_size)
    return tuple(chunks[rank] + chunks[-1 - rank] for rank in range(cp_size))


def zigzag_split(x: torch.Tensor, cp: GroupCommunicator) -> torch.Tensor:
    """Take this rank's rows of ``x`` [S, …], which it has whole. Sends nothing."""
    chunks = x.split(_chunks(x.shape[0], cp.size))
    return torch.cat((chunks[cp.rank], chunks[-1 - cp.rank]))


def zigzag_merge(x: torch.Tensor, cp: GroupCommunicator, seq_len: int) -> torch.Tensor:
    """Gather all rows [S, …] in their order, from each rank's; the gradient is summed and scattered.

    Raises TensorError where ``x`` does not have this rank's rows of ``seq_len``.
    """
    if cp.size == 1:
        return x
    return _in_order(cp.all_gather(x, zigzag_rows(seq_len, cp.size)), _chunks(seq_len, cp.size))


def _in_order(gathered: torch.Tensor, chunks: Sequence[int]) -> torch.Tensor:
    """The rows of the sequence, from those of rank 0, rank 1, and so on."""
    size = len(chunks) // 2
    pieces = gathered.split([chunk for rank in range(size) for chunk in (chunks[rank], chunks[-1 - rank])])
    return torch.cat((*pieces[::2], *reversed(pieces[1::2])))


def split_sequence(x: torch.Tensor, *, cp: GroupCommunicator, tp: GroupCommunicator | None = None) -> torch.Tensor:
    """Take this rank's rows of ``x`` [S, …] (tokens, labels, positions), which it has whole: zigzag over ``cp``, then
    consecutive rows over ``tp``. Sends nothing.
    """
    x = zigzag_split(x, cp)
    return x if tp is None else x.split(even_rows(x.shape[0], tp.size))[tp.rank]


def merge_sequence(
    x: torch.Tensor, *, seq_len: int, cp: GroupCommunicator, tp: GroupCommunicator | None = None
) -> torch.Tensor:
    """Undo :func:`split_sequence`: gather [S, …] on every rank; the gradient is summed and scattered.

    Raises TensorError where ``x`` does not have this rank's rows of ``seq_len``.
    """
    if tp is not None:
        x = tp.all_gather(x, even_rows(zigzag_rows(seq_len, cp.size)[cp.rank], tp.size))
    return zigzag_merge(x, cp, seq_len)


def positions(
    seq_len: int,
    *,
    cp: GroupCommunicator,
    tp: GroupCommunicator | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return where this rank's rows lie in the sequence: int64 [rows]."""
    return split_sequence(torch.arange(seq_len, device=device), cp=cp, tp=tp)


def local_rows(
    x: torch.Tensor, seq_len: int | None, *, cp: GroupCommunicator, tp: GroupCommunicator
) -> tuple[int, tuple[int, ...]]:
    """The sequence's length, and the rows of each rank of ``tp``. ``seq_len`` None: every rank has as many rows as this one.

    Raises TensorError where ``x`` does not have this rank's rows.
    """
    if seq_len is None:
        seq_len = x.shape[0] * tp.size * cp.size
    rows = even_rows(zigzag_rows(seq_len, cp.size)[cp.rank], tp.size)
    if x.shape[0] != rows[tp.rank]:
        raise TensorError(
            f"rank {tp.rank} of {tp.size} in tp, {cp.rank} of {cp.size} in cp: expected {rows[tp.rank]} rows of a sequence of "
            f"{seq_len}, got shape {list(x.shape)}; split_sequence() splits as the layers expect"
        )
    return seq_len, rows


def check_valid(valid: torch.Tensor | None, seq_len: int, x: torch.Tensor) -> None:
    """Check a mask of a whole sequence, of which ``x`` [rows, B, …] are this rank's rows: bool [seq_len, B], or None. Raises
    TensorError.
    """
    if valid is None:
        return
    wanted = (seq_len, x.shape[1])
    if valid.dtype != torch.bool or valid.shape != wanted or valid.device != x.device:
        raise TensorError(
            f"{who()}expected valid, True where a token of the whole sequence is no padding, as torch.bool of shape "
            f"{list(wanted)} on {x.device}; got {valid.dtype} of shape {list(valid.shape)} on {valid.device}"
        )


class KeysAndValues:
    """Keys and values of all ranks of ``cp``, on their way from the moment this is made.

    What computes the queries belongs between this and :func:`context_parallel_attention`: the gather runs beside it, and so does
    its gradient's way back beside the queries' gradients. Differentiable once.

    Args:
        k: [rows, B, key-value heads, D], this rank's rows by :func:`zigzag_split`.
        v: as ``k``.
        cp: the ranks that share the sequence. Keys and values are gathered over it in one call, for one use.
        seq_len: rows of the whole sequence.

    Attributes:
        num_heads: key-value heads.

    Raises:
        TensorError: rows that do not fit.
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor, *, cp: GroupCommunicator, seq_len: int) -> None:
        self.cp, self.seq_len, self.num_heads = cp, seq_len, k.shape[2]
        self._own = k, v
        self._pending: Pending | None = None
        if cp.size > 1 and self.num_heads:  # without heads here no rank of cp has any
            self._pending = cp.start_all_gather(torch.cat((k, v), dim=2), zigzag_rows(seq_len, cp.size))

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all keys and all values, [S, B, key-value heads, D] each, in their order."""
        if self._pending is None:
            return self._own
        both = _in_order(self._pending.wait(), _chunks(self.seq_len, self.cp.size))
        keys, values = both.split(self.num_heads, dim=2)
        return keys, values


def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor | KeysAndValues,
    v: torch.Tensor | None = None,
    *,
    cp: GroupCommunicator,
    seq_len: int,
    causal: bool = True,
    uses: Sequence[int] | None = None,
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries to the keys and values of all ranks of ``cp``.

    Args:
        q: [rows, B, query heads, D], this rank's rows by :func:`zigzag_split`.
        k: [rows, B, key-value heads, D]; or keys and values together, which are on their way already.
        v: as ``k``; None with those.
        cp: the ranks that share the sequence.
        seq_len: rows of the whole sequence.
        causal: each position attends to itself and those before it.
        uses: how many consecutive query heads use each key-value head; None: equally many.
        valid: [S, B] bool of the whole sequence, True where a position is no padding; None: all are valid. No valid position
            attends to padding. The output of padding is finite, and means nothing.

    Returns:
        [rows, B, query heads, D].

    Raises:
        TensorError: rows or heads that do not fit. UsageError: keys without values.
    """
    num_kv_heads = k.num_heads if isinstance(k, KeysAndValues) else k.shape[2]
    uses = _checked_uses(q.shape[2], num_kv_heads, uses)
    if isinstance(k, torch.Tensor) and v is None:
        raise UsageError("context_parallel_attention() got keys without values: pass v, or KeysAndValues as k")
    if q.shape[2] == 0:
        return q  # nor has any other rank of cp; q, though empty, leads the backward pass on
    if isinstance(k, KeysAndValues):
        keys, values = k.wait()
    elif cp.size > 1 and v is not None:
        keys, values = zigzag_merge(torch.cat((k, v), dim=2), cp, seq_len).split(num_kv_heads, dim=2)
    else:
        keys, values = k, cast("torch.Tensor", v)
    visible = None if valid is None else _visible(positions(seq_len, cp=cp, device=q.device), valid, causal)
    if cp.size == 1 or not causal:
        return _attend(q, keys, values, uses, causal, visible)
    chunks = _chunks(seq_len, cp.size)
    ends = tuple(accumulate(chunks))
    own_chunks = (cp.rank, 2 * cp.size - 1 - cp.rank)
    sizes = [chunks[c] for c in own_chunks]
    masks = [None] * len(sizes) if visible is None else visible.split(sizes, dim=2)
    pieces = zip(q.split(sizes), masks, (ends[c] for c in own_chunks), strict=True)
    return torch.cat(
        [
            _attend(piece, keys[:end], values[:end], uses, True, None if mask is None else mask[..., :end])
            for piece, mask, end in pieces
        ]
    )


def _visible(where: torch.Tensor, valid: torch.Tensor, causal: bool) -> torch.Tensor | None:
    """The keys that the queries at positions ``where`` [rows] attend to, [B, 1, rows, S] of bool. None: padding lies behind all
    valid positions, where causal attention does not look, so it need not be hidden.

    Each query attends to itself: a softmax over nothing is NaN in some kernels.
    """
    if causal and not _has_padding_before(valid):
        return None
    own, keys = where.unsqueeze(1), torch.arange(len(valid), device=where.device)
    visible = valid.t().unsqueeze(1) | (own == keys)
    return (visible & (keys <= own) if causal else visible).unsqueeze(1)


_BEFORE: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Answers of :func:`_has_padding_before` by mask: the mask's version, and whether padding stands before a valid position."""


def _has_padding_before(valid: torch.Tensor) -> bool:
    """Whether padding stands before a valid position of ``valid`` [S, B].

    The device is asked, and waited for, once for each mask: all layers of a forward pass are given the same one.
    """
    version = -1 if valid.is_inference() else valid._version
    known = _BEFORE.get(valid)
    if known is not None and known[0] == version >= 0:
        return bool(known[1])
    has_any = bool((valid[1:] & ~valid[:-1]).any())
    _BEFORE[valid] = version, has_any
    return has_any


def _checked_uses(num_heads: int, num_kv_heads: int, uses: Sequence[int] | None) -> Sequence[int]:
    if uses is None and num_kv_heads and num_heads % num_kv_heads == 0:
        uses = (num_heads // num_kv_heads,) * num_kv_heads
    if uses is None or len(uses) != num_kv_heads or sum(uses) != num_heads:
        shares = "" if uses is None else f", used by {list(uses)}"
        raise TensorError(f"{num_heads} query heads cannot share {num_kv_heads} key-value heads{shares}")
    return uses


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    uses: Sequence[int],
    causal: bool,
    visible: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of consecutive rows; causal: the last query sits at the last key. ``visible`` says all of it, where given."""
    if q.shape[0] == 0:
        return q + 0 * (k.sum() + v.sum())  # no rows, but a way back: the gradient of k and v is a collective
    shared = len(set(uses)) == 1
    if not shared:
        k, v = _repeated(k, uses), _repeated(v, uses)
    square = q.shape[0] == k.shape[0]
    causal = causal and visible is None
    mask = causal_lower_right(q.shape[0], k.shape[0]) if causal and not square else visible
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [B, heads, rows, D]
    gqa = shared and uses[0] > 1
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and square, enable_gqa=gqa)
    return out.permute(2, 0, 1, 3)


def _repeated(x: torch.Tensor, uses: Sequence[int]) -> torch.Tensor:
    """Each head as often as it is used."""
    return torch.cat(
        [head.expand(-1, -1, times, -1) for head, times in zip(x.split(1, dim=2), uses, strict=True)], dim=2
    )


def _chunks(seq_len: int, cp_size: int) -> list[int]:
    return list(even_rows(seq_len, 2 * cp_size))
