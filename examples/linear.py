"""Linear layers whose weight is split over a tensor-parallel group, with sequence parallelism.

Activations are [S, B, H]: rows are positions, so that a shard of the sequence is a shard of rows.
All ranks of the group agree on who has which rows by one rule,
:func:`~commlayer.integrations.shares.even_rows`.

Weights are drawn whole on every rank, from generators in the same state, and each rank keeps its
slice: a model starts with the same weights whatever the size of the group. That needs memory for
one whole weight at a time; where it is too much, make the layer on ``device="meta"``, then
``to_empty()`` and ``load_full()``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.moe.routing import who
from commlayer.integrations.parameter_marks import mark_replicated, mark_split
from commlayer.integrations.shares import even_rows, gather_shares
from commlayer.integrations.spread_parameters import fill_whole, is_dtensor
from commlayer.integrations.wire_choice import WireChoice
from commlayer.profiles.errors import TensorError, UsageError
from commlayer.scheduler.mapping.divisors import divisors, nearest
from examples.layer_wires import wired

__all__ = [
    "ColumnParallelLinear",
    "ReplicatedLinear",
    "RowParallelLinear",
    "gather_sequence",
]


def gather_sequence(x: torch.Tensor, tp: GroupCommunicator, total_rows: int | None = None) -> torch.Tensor:
    """Gather all rows of the group from each rank's [rows, …]; the gradient is summed and
    scattered.

    ``total_rows``: rows of all ranks together, split by :func:`even_rows`. None: every rank has as
    many as this one, which nobody checks: where the group does not divide them, give it. Raises
    TensorError where ``x`` does not have its share.
    """
    return _by_token(tp.all_gather, x, None if total_rows is None else even_rows(total_rows, tp.size))


def _by_token(
    move: Callable[[torch.Tensor, Sequence[int] | None], torch.Tensor], x: torch.Tensor, rows: Sequence[int] | None
) -> torch.Tensor:
    """``move(x, rows)`` of [S, B, H] as one of [S · B, H]: the same bytes, and what shares a scale
    on the wire is a token."""
    tokens = x.shape[1:-1].numel()
    if x.dim() < 3 or tokens == 0:
        return move(x, rows)
    y = move(x.flatten(0, -2), None if rows is None else [count * tokens for count in rows])
    return y.view(y.shape[0] // tokens, *x.shape[1:])


class _Linear(nn.Module):
    """A weight [out_features, in_features], of which this rank has slice ``tp.rank`` along ``dim``;
    None: all of it. The arguments are those of :class:`ColumnParallelLinear`."""

    dim: int | None
    """The dimension along which the weight is split; None: every rank has all of it."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: GroupCommunicator,
        sequence_parallel: bool = True,
        bias: bool = False,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        wire: WireChoice = None,
        gradient_wire: WireChoice = None,
    ) -> None:
        super().__init__()
        dim, self.sequence_parallel = self.dim, sequence_parallel
        self.tp = tp if dim is None else wired(tp, wire, gradient_wire)
        self.in_features, self.out_features = in_features, out_features
        if dim is not None and (out_features, in_features)[dim] % tp.size:
            name, features = (("out_features", out_features), ("in_features", in_features))[dim]
            sizes = " and ".join(map(str, nearest(tp.size, divisors(features))))
            raise UsageError(
                f"{who()}{name}={features} cannot be split over tp={tp.size}; the nearest sizes of tp that "
                f"divide it: {sizes}"
            )
        dtype = torch.get_default_dtype() if dtype is None else dtype
        device = torch.get_default_device() if device is None else torch.device(device)
        shape = (out_features, in_features)
        if device.type == "meta":
            full = torch.empty(shape, dtype=dtype, device=device)
        else:
            # Drawn in float32 (or 64) on the generator's device: the same values for every dtype
            # and device of the weight.
            source = torch.device("cpu") if generator is None else generator.device
            full = torch.empty(shape, dtype=dtype if dtype is torch.float64 else torch.float32, device=source)
            bound = 1 / math.sqrt(in_features)
            full.uniform_(-bound, bound, generator=generator)
        self.weight = nn.Parameter(self.shard(full).to(device, dtype, copy=True))
        num_biases = out_features // tp.size if dim == 0 else out_features
        self.bias = nn.Parameter(torch.zeros(num_biases, dtype=dtype, device=device)) if bias else None
        if dim is not None:
            mark_split(self, "weight", *(["bias"] if bias and dim == 0 else []))
        if bias and dim == 1:
            # Whole on every rank; with sequence parallelism each rank's gradient is that of its rows.
            mark_replicated(self, "bias", over=("tp",) if sequence_parallel else ())

    def shard(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's slice, a view, of a whole weight, or of anything else of its shape, such as
        its gradient."""
        if tuple(whole.shape) != (self.out_features, self.in_features):
            raise TensorError(
                f"{who()}expected a whole weight [{self.out_features}, {self.in_features}], got shape {list(whole.shape)}"
            )
        return whole if self.dim is None else whole.chunk(self.tp.size, self.dim)[self.tp.rank]

    @torch.no_grad()
    def load_full(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Take this rank's slice of a whole weight and bias. Raises TensorError for another
        shape."""
        if self.weight.is_meta:
            raise UsageError(f"{who()}the layer is on the meta device and has no memory: call to_empty(device=…) first")
        fill_whole(self.weight, self.shard(weight))
        if bias is None:
            return
        if self.bias is None or tuple(bias.shape) != (self.out_features,):
            has = "no bias" if self.bias is None else f"a bias [{self.out_features}]"
            raise TensorError(f"{who()}the layer has {has}, got one of shape {list(bias.shape)}")
        fill_whole(self.bias, bias.chunk(self.tp.size)[self.tp.rank] if self.dim == 0 else bias)

    @torch.no_grad()
    def full_weight(self) -> torch.Tensor:
        """The whole weight, a copy without gradient.

        All ranks of the group call it, and where ``fully_shard`` spreads the weight all ranks that
        hold a part of it.
        """
        weight = _whole(self.weight)
        if self.dim is None:
            return weight.clone()
        return self._exact.all_gather(weight.movedim(self.dim, 0)).movedim(0, self.dim).contiguous()

    @torch.no_grad()
    def full_bias(self) -> torch.Tensor | None:
        """The whole bias, a copy without gradient, or None. All ranks of the group call it, as
        :meth:`full_weight`."""
        if self.bias is None:
            return None
        bias = _whole(self.bias)
        return self._exact.all_gather(bias) if self.dim == 0 else bias.clone()

    @property
    def _exact(self) -> GroupCommunicator:
        """For what is not to be rounded, whatever wire formats the activations take."""
        return self.tp.with_wire(None, None)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.tp.lane}={self.tp.size}"


class ColumnParallelLinear(_Linear):
    """A linear layer, ``x @ weight.T``, split by its outputs: each rank computes ``out_features /
    tp.size`` of the outputs, of all rows.

    Args:
        in_features: of the whole weight.
        out_features: of the whole weight; ``tp.size`` must divide it.
        tp: the ranks that share the weight.
        sequence_parallel: the input is this rank's rows [S/tp, B, in]: they are gathered, and their
            gradient is reduce-scattered. False: the input is [S, B, in], equal on all ranks, and
            its gradient is summed.
        bias: zeros at first.
        gather_output: return all outputs [S, B, out], equal on all ranks, for code that goes on
            with them alike on all ranks.
        generator: in the same state on all ranks; None: torch's own CPU generator, likewise.
        dtype: of the weight; None: torch's default.
        device: of the weight; None: torch's default.
        wire: formats in which the rows of a sequence may travel in the forward pass, such as
            ``fp8_e4m3``; None: those of ``tp``, else what COMMLAYER_WIRE says of its lane, else
            their own. See docs/compression.md.
        gradient_wire: the same for their gradients;
            :func:`~examples.layer_wires.tensor_parallel_wire` has both.

    Raises:
        UsageError: ``tp.size`` does not divide ``out_features``; no such format.
    """

    dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: GroupCommunicator,
        sequence_parallel: bool = True,
        bias: bool = False,
        gather_output: bool = False,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        wire: WireChoice = None,
        gradient_wire: WireChoice = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            tp=tp,
            sequence_parallel=sequence_parallel,
            bias=bias,
            generator=generator,
            dtype=dtype,
            device=device,
            wire=wire,
            gradient_wire=gradient_wire,
        )
        self.gather_output = gather_output

    def forward(self, x: torch.Tensor, total_rows: int | None = None) -> torch.Tensor:
        """Return [S, B, out_features / tp.size], or all features. ``total_rows``: S, needed where
        tp does not divide it."""
        gathered = gather_sequence(x, self.tp, total_rows) if self.sequence_parallel else self.tp.copy_to_group(x)
        y = F.linear(gathered, self.weight, self.bias)
        return gather_shares(y, self._exact, self.out_features, dim=-1) if self.gather_output else y


class RowParallelLinear(_Linear):
    """A linear layer, ``x @ weight.T``, split by its inputs: each rank has ``in_features /
    tp.size`` of the inputs, of all rows; the products are summed.

    Args:
        in_features: of the whole weight; ``tp.size`` must divide it.
        out_features: of the whole weight.
        tp: the ranks that share the weight.
        sequence_parallel: each rank gets its rows of the sum, [S/tp, B, out], by :func:`even_rows`.
            False: all of it.
        bias: zeros at first; whole on every rank, added to the sum.
        generator, dtype, device, wire, gradient_wire: as of :class:`ColumnParallelLinear`.

    Raises:
        UsageError: ``tp.size`` does not divide ``in_features``; no such format.
    """

    dim = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [S/tp, B, out_features] for ``x`` [S, B, in_features / tp.size]; without sequence
        parallelism [S, B, out_features].
        """
        partial = F.linear(x, self.weight)
        if self.sequence_parallel:
            y = _by_token(self.tp.reduce_scatter, partial, even_rows(partial.shape[0], self.tp.size))
        else:
            y = self.tp.reduce_from_group(partial)
        return y if self.bias is None else y + self.bias


class ReplicatedLinear(_Linear):
    """A linear layer, ``x @ weight.T``, on this rank's rows, with the whole weight on every rank.

    Its gradient is that of this rank's rows: :func:`reduce_replicated_gradients` sums it over the
    group.
    """

    dim = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: GroupCommunicator,
        bias: bool = False,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, tp=tp, bias=bias, generator=generator, dtype=dtype, device=device)
        mark_replicated(self, "weight", *(["bias"] if bias else []))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return […, out_features] for ``x`` […, in_features]. Sends nothing."""
        return F.linear(x, self.weight, self.bias)


def _whole(x: torch.Tensor) -> torch.Tensor:
    """Return the whole of a DTensor, gathered over its mesh; any other tensor as it is. Without gradient."""
    tensor: Any = x.detach()
    full: torch.Tensor = tensor.full_tensor() if is_dtensor(x) else tensor
    return full
