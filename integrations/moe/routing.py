"""The decisions of a router, which experts each token goes to, and checks of those that another
router made.

Shapes: T tokens, V of them valid (no padding), E experts, K choices per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from commlayer.integrations.remat import recomputable_from
from commlayer.profiles.errors import TensorError

__all__ = ["Routing", "ValidTokens", "count_choices", "refuse_any", "who"]


@dataclass(frozen=True, slots=True, eq=False)
class ValidTokens:
    """The valid tokens among T, the others being padding.

    Padding is taken out before tokens are routed, and zeros are put in its place afterwards. So an
    MoE layer computes the same with padding as without, and padding is neither sent nor computed.
    Rejected: padding as tokens whose choices are dropped, which an all_gather would send, and
    shared experts would compute.

    ``places`` [V] int64: where the valid tokens lie; None: all are valid. ``num_padding``: T − V.
    """

    places: torch.Tensor | None = None
    num_padding: int = 0

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # how many there are depends on the data
    def of(cls, valid: torch.Tensor, x: torch.Tensor) -> ValidTokens:
        """Find the valid ones of tokens ``x`` [T, H] by the mask ``valid`` [T] of bool, True where
        a token is no padding. Waits for the device where the mask is on one.

        Raises TensorError for a mask of another shape, dtype or device.
        """
        if valid.dtype != torch.bool or valid.shape != x.shape[:1] or valid.device != x.device:
            raise TensorError(
                f"{who()}expected valid, True where a token is no padding, as torch.bool of shape [{len(x)}] on {x.device}; got "
                f"{valid.dtype} of shape {list(valid.shape)} on {valid.device}"
            )
        places = valid.nonzero().squeeze(1)
        return cls() if len(places) == len(x) else cls(places, len(x) - len(places))

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Take the rows of the valid tokens: [T, …] → [V, …]."""
        return x if self.places is None else x.index_select(0, self.places)

    def take_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Take valid tokens [V, H] of ``x`` [T, H]; under
        :class:`~commlayer.integrations.remat.Rematerialise` they are not kept, but taken again."""
        valid = self.take(x)
        if valid is not x:
            recomputable_from(x, valid, self.take)
        return valid

    def put_back(self, y: torch.Tensor, padding: float = 0) -> torch.Tensor:
        """Put rows back where :meth:`take` took them, and ``padding`` in all others: [V, …] → [T,
        …]."""
        if self.places is None:
            return y
        padded = y.new_full((len(y) + self.num_padding, *y.shape[1:]), padding)
        return padded.index_put((self.places,), y)  # index_copy would keep y for the backward pass


@dataclass(frozen=True, eq=False)
class Routing:
    """The routing of tokens: the experts that they go to, with weights.

    ``indices`` [T, K] int64: the expert of each choice, best first; −1 where it was dropped, and
    for padding. ``weights`` [T, K] float32 (float64 for float64 tokens): differentiable; 0 where
    the index is −1. ``counts`` [E] int64: kept choices per expert; ``chosen`` [E]: before dropping.
    ``capacity``, ``device_capacity``: what an expert, a device takes of one drop scope (of all
    ranks that share the sequence, under ``drop_scope="sequence"``); None: everything.
    ``padded_rows``: how many rows the dispatcher is to send to each expert, filled up with zeros;
    None: as many as choose it. ``losses``: ``aux``, ``device_aux``, ``z``, scalars with their
    coefficients, as far as they are on. ``valid_tokens``: which tokens are no padding.
    """

    indices: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    chosen: torch.Tensor
    capacity: int | None = None
    device_capacity: int | None = None
    padded_rows: int | None = None
    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    valid_tokens: ValidTokens = field(default_factory=ValidTokens)

    @property
    def num_experts(self) -> int:
        return self.counts.numel()

    @property
    def dropped(self) -> int:
        """The number of choices that were dropped, padding's not among them. (Waits for the
        device.)"""
        return int((self.valid_tokens.take(self.indices) < 0).sum())

    @classmethod
    def of(cls, indices: torch.Tensor, weights: torch.Tensor, num_experts: int) -> Routing:
        """Make a routing of what another router decided: ``indices`` [T, K], −1 where a choice is
        dropped, and floating ``weights`` [T, K].

        Raises:
            TensorError: shapes or types that do not fit, indices out of range, a token that chooses
                an expert twice, weights that are NaN or infinite.
        """
        if indices.dim() != 2 or indices.shape != weights.shape:
            raise TensorError(
                f"{who()}expected indices and weights of one shape [tokens, choices], got "
                f"{list(indices.shape)} and {list(weights.shape)}"
            )
        if indices.dtype not in (torch.int64, torch.int32) or not weights.is_floating_point():
            raise TensorError(
                f"{who()}expected integer indices and floating weights, got {indices.dtype} and "
                f"{weights.dtype}: convert them"
            )
        out_of_range = (indices < -1) | (indices >= num_experts)
        refuse_any(
            out_of_range, indices, f"experts out of range: expected 0 to {num_experts - 1}, or -1 for a dropped one"
        )
        experts = indices.sort(-1).values
        twice = (experts[:, 1:] == experts[:, :-1]) & (experts[:, 1:] >= 0)
        refuse_any(twice, experts, "a token chooses one expert twice: expected K different experts")
        refuse_any(
            ~weights.isfinite(), weights, "weights that are NaN or infinite: check the router's input and parameters"
        )
        weights = weights.masked_fill(indices < 0, 0.0)
        counts = count_choices(indices, num_experts)
        return cls(indices.long(), weights if weights.dtype == torch.float64 else weights.float(), counts, counts)


def refuse_any(bad: torch.Tensor, values: torch.Tensor, message: str) -> None:
    """Raise TensorError where ``bad`` [T, ·] has a True; names the first. Waits for the device, so
    not during capture."""
    if bad.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    if bool(bad.any()):
        token, column = bad.nonzero()[0].tolist()
        where = f"first {values[token, column].item()} at token {token}, {int(bad.any(-1).sum())} of {len(bad)} tokens"
        raise TensorError(f"{who()}{message} ({where})")


def who() -> str:
    return f"rank {dist.get_rank()}: " if dist.is_available() and dist.is_initialized() else ""


def count_choices(indices: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count choices per expert [E]; dropped ones (−1) are left out."""
    flat = indices.flatten().long()
    counts = flat.new_zeros(num_experts + 1).scatter_add_(0, flat + 1, torch.ones_like(flat))
    return counts[1:].contiguous()
