"""Attention with its tokens, or its heads, over a tensor-parallel group, and its sequence over a
context-parallel one.

Both kinds take and return this rank's rows [S/(cp·tp), B, H] and compute the same; they differ in
what stays and what moves.

``ulysses`` (DeepSpeed-Ulysses; sequence-parallel attention in MegaScale-MoE): every rank has all
    weights and projects its own tokens. One all_to_all takes queries, keys and values from tokens
    to heads; another takes the outputs back.
``tensor`` (Megatron): every rank has the weights of its heads. Tokens are gathered before, and the
    outputs of all ranks are summed and scattered after.

MegaScale-MoE's equations 1 and 2 compare what they move; see docs/layers.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal, get_args

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.remat import recomputable, recomputable_from
from commlayer.integrations.shares import even_rows
from commlayer.integrations.wire_choice import WireChoice
from commlayer.profiles.errors import UsageError
from examples.context_parallel import (
    KeysAndValues,
    check_valid,
    context_parallel_attention,
    local_rows,
    positions,
)
from examples.layer_wires import wired
from examples.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    gather_sequence,
)

__all__ = ["HeadShare", "ParallelAttention", "apply_rope", "head_shares"]

Kind = Literal["ulysses", "tensor"]


@dataclass(frozen=True, slots=True)
class HeadShare:
    """One rank's query heads, the key-value heads that they need, and how many of them use each."""

    q: range
    kv: range
    uses: tuple[int, ...]


def head_shares(num_heads: int, num_kv_heads: int, parts: int) -> tuple[HeadShare, ...]:
    """Divide the heads among ranks: consecutive query heads, as even as can be. Ranks may need the
    same key-value head."""
    per_kv = num_heads // num_kv_heads
    stops = [sum(even_rows(num_heads, parts)[:part]) for part in range(parts + 1)]
    shares = []
    for start, stop in pairwise(stops):
        kv = range(start // per_kv, -(-stop // per_kv)) if stop > start else range(0)
        uses = tuple(min(stop, (head + 1) * per_kv) - max(start, head * per_kv) for head in kv)
        shares.append(HeadShare(range(start, stop), kv, uses))
    return tuple(shares)


class ParallelAttention(nn.Module):
    """Self-attention without bias: ``q``, ``k``, ``v`` and ``out`` are its linear layers.

    Args:
        hidden: size of an activation.
        num_heads: query heads.
        num_kv_heads: key-value heads, each shared by ``num_heads / num_kv_heads`` consecutive query
            heads; None: as many.
        tp: the ranks that share tokens (``ulysses``) or heads (``tensor``).
        cp: the ranks that share the sequence before that, zigzag; None: this rank has all of it.
        kind: see the module. With ``ulysses`` any number of heads will do, and ranks may have fewer
            than others.
        causal: each position attends to itself and those before it.
        head_dim: None: ``hidden / num_heads``.
        rope_base: base of rotary position embeddings of queries and keys, such as 10000; None: no
            rotation.
        generator: in the same state on all ranks, see :mod:`examples.linear`.
        dtype: of the weights; None: torch's default.
        device: of the weights; None: torch's default.
        wire: formats in which what is sent over ``tp`` may travel in the forward pass; None: those
            of ``tp``, else what COMMLAYER_WIRE says of its lane, else its own. Of ``cp`` the last
            two hold.
        gradient_wire: the same for gradients. See
            :func:`~examples.layer_wires.tensor_parallel_wire`.

    Raises:
        UsageError: heads that cannot be shared so.

    Parameters that every rank has whole (all with ``ulysses``; ``k`` and ``v`` with ``tensor``
    where tp does not divide their heads) are marked for
    :func:`~commlayer.integrations.gradients.reduce_replicated_gradients`.
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        tp: GroupCommunicator,
        cp: GroupCommunicator | None = None,
        kind: Kind = "ulysses",
        causal: bool = True,
        head_dim: int | None = None,
        rope_base: float | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        wire: WireChoice = None,
        gradient_wire: WireChoice = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = _checked_head_dim(hidden, num_heads, num_kv_heads, head_dim, rope_base is not None)
        if kind not in get_args(Kind):
            raise UsageError(f"kind must be one of {', '.join(get_args(Kind))}, got {kind!r}")
        if kind == "tensor" and num_heads % tp.size:
            raise UsageError(
                f"num_heads={num_heads} cannot be split over tp={tp.size} with kind='tensor': take kind='ulysses', or a tp that "
                "divides it"
            )
        self.tp = wired(tp, wire, gradient_wire)
        self.cp = GroupCommunicator(None, "cp") if cp is None else wired(cp)
        self.kind, self.causal, self.rope_base = kind, causal, rope_base
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.shares = head_shares(num_heads, num_kv_heads, tp.size)
        self._exchange = _HeadExchange(self.tp, self.shares)

        def column(num: int, whole: bool) -> ColumnParallelLinear | ReplicatedLinear:
            layer = ReplicatedLinear if whole else ColumnParallelLinear
            return layer(hidden, num * head_dim, tp=tp, generator=generator, dtype=dtype, device=device)

        whole_kv = kind == "ulysses" or num_kv_heads % tp.size != 0
        self.q = column(num_heads, kind == "ulysses")
        self.k, self.v = column(num_kv_heads, whole_kv), column(num_kv_heads, whole_kv)
        row = (
            ReplicatedLinear
            if kind == "ulysses"
            else partial(RowParallelLinear, wire=wire, gradient_wire=gradient_wire)
        )
        self.out = row(num_heads * head_dim, hidden, tp=tp, generator=generator, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor, seq_len: int | None = None, valid: torch.Tensor | None = None) -> torch.Tensor:
        """Compute attention for this rank's rows [rows, B, hidden], which it has by
        ``split_sequence(…, cp=cp, tp=tp)``.

        Args:
            seq_len: rows of the whole sequence. None: all ranks have equally many, which nobody
                checks: where cp·tp does not divide the sequence, give it.
            valid: [S, B] bool of the whole sequence, the same on all ranks that share it: True
                where a position is no padding; None: all are valid. No valid position attends to
                padding, whose own output means nothing.

        Raises TensorError where ``x`` does not have this rank's rows, or ``valid`` not the
        sequence's.
        """
        seq_len, rows = local_rows(x, seq_len, cp=self.cp, tp=self.tp)
        check_valid(valid, seq_len, x)
        return (self._ulysses if self.kind == "ulysses" else self._tensor)(x, seq_len, rows, valid)

    def load_full(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's slices of the whole weights ``q``, ``k``, ``v`` and ``out``, as
        :meth:`full_weights` returns them."""
        for name in ("q", "k", "v", "out"):
            self.get_submodule(name).load_full(weights[name])  # type: ignore[operator]

    def full_weights(self) -> dict[str, torch.Tensor]:
        """Return the whole weights, as copies without gradient. All ranks of ``tp`` call it."""
        return {name: getattr(self, name).full_weight() for name in ("q", "k", "v", "out")}

    def _ulysses(self, x: torch.Tensor, seq_len: int, rows: Sequence[int], valid: torch.Tensor | None) -> torch.Tensor:
        # Keys and values first: where tp has one rank they are what cp gathers, beside the queries'
        # projection.
        k, v = self._rotated(self._heads(self.k(x)), seq_len, self.tp), self._heads(self.v(x))
        early = self._start(k, v, seq_len) if self.tp.size == 1 else None
        # Before the exchange: afterwards ranks that share a key head would each rotate it.
        q = self._rotated(self._heads(self.q(x)), seq_len, self.tp)
        q, k, v = self._exchange.to_heads(q, k, v, rows)
        attended = self._attend(q, early or self._start(k, v, seq_len), seq_len, valid)
        joined = self._exchange.to_rows(attended, rows)
        y: torch.Tensor
        if self.tp.size == 1:  # the same memory
            y = self.out(joined)
            return y
        source = attended.detach()
        promise = recomputable(joined, lambda: self._exchange.to_rows(source, rows), inputs=(source,))
        y = self.out(joined)
        if promise is not None and y.requires_grad:  # all ranks exchange again, and as often
            y.register_hook(lambda _: promise.start())
        return y

    def _tensor(self, x: torch.Tensor, seq_len: int, rows: Sequence[int], valid: torch.Tensor | None) -> torch.Tensor:
        local, promise = x, None
        x = gather_sequence(x, self.tp, sum(rows))
        if self.tp.size > 1:  # else it is the same memory
            shape = local.shape
            promise = recomputable_from(local, x, lambda made: gather_sequence(made.view(shape), self.tp, sum(rows)))
        weights: tuple[torch.Tensor, torch.Tensor] = self.k.weight, self.v.weight
        if self.k.dim is None:  # all ranks have them whole: this one uses a part
            kv = self.shares[self.tp.rank].kv
            own = slice(kv.start * self.head_dim, kv.stop * self.head_dim)
            weights = weights[0][own], weights[1][own]
        k, v = (self._heads(F.linear(x, weight)) for weight in weights)
        early = self._start(self._rotated(k, seq_len), v, seq_len)
        q = self._rotated(self._heads(F.linear(x, self.q.weight)), seq_len)
        attended = self._attend(q, early, seq_len, valid)
        if promise is not None and attended.requires_grad:  # all ranks gather again, and as often
            attended.register_hook(lambda _: promise.start())
        y: torch.Tensor = self.out(attended.flatten(2))
        return y

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        heads: torch.Tensor = x.unflatten(2, (-1, self.head_dim))
        return heads

    def _rotated(self, x: torch.Tensor, seq_len: int, tp: GroupCommunicator | None = None) -> torch.Tensor:
        """With position embeddings of this rank's rows of ``tp``; None: of all its rows."""
        if self.rope_base is None:
            return x
        return apply_rope(x, positions(seq_len, cp=self.cp, tp=tp, device=x.device), self.rope_base)

    def _start(self, k: torch.Tensor, v: torch.Tensor, seq_len: int) -> KeysAndValues:
        return KeysAndValues(k, v, cp=self.cp, seq_len=seq_len)

    def _attend(self, q: torch.Tensor, kv: KeysAndValues, seq_len: int, valid: torch.Tensor | None) -> torch.Tensor:
        uses, causal = self.shares[self.tp.rank].uses, self.causal
        return context_parallel_attention(q, kv, cp=self.cp, seq_len=seq_len, causal=causal, uses=uses, valid=valid)


class _HeadExchange:
    """The exchange of rows for heads between the ranks of ``tp``, whose heads are ``shares``.

    Its rows are [B, D]: those of one head lie together, a rank's heads one behind the other.
    """

    def __init__(self, tp: GroupCommunicator, shares: Sequence[HeadShare]) -> None:
        self._tp, self._shares = tp, shares
        self._num_sent = [len(share.q) + 2 * len(share.kv) for share in shares]

    def to_heads(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Send [own rows, B, all heads, D] to [all rows, B, own heads, D]: each rank gets the heads
        that it needs, no more."""
        if self._tp.size == 1:
            return q, k, v
        wanted = [(t, heads) for share in self._shares for t, heads in ((q, share.q), (k, share.kv), (v, share.kv))]
        sent = torch.cat([t[:, :, heads.start : heads.stop].permute(2, 0, 1, 3) for t, heads in wanted])
        own = self._shares[self._tp.rank]
        sizes = (len(own.q), len(own.kv), len(own.kv))
        receive_rows = [sum(sizes) * num_rows for num_rows in rows]
        send_rows = [number * rows[self._tp.rank] for number in self._num_sent]
        most = max(max(self._num_sent) * sum(rows), max(rows) * sum(self._num_sent))
        received = self._exchange(sent.flatten(0, 1), send_rows, receive_rows, most)
        blocks = zip(received.split(receive_rows), rows, strict=True)
        joined = torch.cat([block.unflatten(0, (sum(sizes), num)).permute(1, 2, 0, 3) for block, num in blocks])
        q, k, v = joined.split(sizes, dim=2)
        return q, k, v

    def to_rows(self, out: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Send [all rows, B, own heads, D] to [own rows, B, all heads · D]."""
        if self._tp.size == 1:
            return out.flatten(2)
        own, num_heads = rows[self._tp.rank], [len(share.q) for share in self._shares]
        sent = torch.cat([block.permute(2, 0, 1, 3).flatten(0, 1) for block in out.split(list(rows))])
        send_rows = [out.shape[2] * num_rows for num_rows in rows]
        most = max(max(num_heads) * sum(rows), sum(num_heads) * max(rows))
        received = self._exchange(sent, send_rows, [number * own for number in num_heads], most)
        heads: torch.Tensor = received.unflatten(0, (sum(num_heads), own))
        return heads.permute(1, 2, 0, 3).flatten(2)

    def _exchange(
        self,
        sent: torch.Tensor,
        send_rows: Sequence[int],
        receive_rows: Sequence[int],
        most_rows: int,
    ) -> torch.Tensor:
        """Rows [B, D] as B rows [D]: what shares a scale on the wire is a head of a token.
        ``most_rows``: of any rank."""
        batch = sent.shape[1]
        moved = self._tp.all_to_all(
            sent.flatten(0, 1),
            [count * batch for count in send_rows],
            [count * batch for count in receive_rows],
            most_rows=most_rows * batch,
        )
        return moved.view(sum(receive_rows), batch, sent.shape[2])


def apply_rope(x: torch.Tensor, where: torch.Tensor, base: float) -> torch.Tensor:
    """Rotate ``x`` [rows, B, heads, D] by its rows' positions ``where`` [rows]; dimension i is
    paired with i + D/2.

    Angles and products in float32, or float64 where ``x`` is.
    """
    half = x.shape[-1] // 2
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    frequencies = base ** (-torch.arange(half, device=x.device, dtype=dtype) / half)
    angles = (where.to(dtype)[:, None] * frequencies)[:, None, None, :]
    first, second = x.to(dtype).chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _checked_head_dim(hidden: int, num_heads: int, num_kv_heads: int, head_dim: int | None, rotated: bool) -> int:
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise UsageError(f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}, and both positive")
    if head_dim is None:
        if hidden % num_heads:
            raise UsageError(f"hidden={hidden} is not a multiple of num_heads={num_heads}: give head_dim")
        head_dim = hidden // num_heads
    if rotated and head_dim % 2:
        raise UsageError(f"rotary position embeddings need an even head_dim, got {head_dim}")
    return head_dim
