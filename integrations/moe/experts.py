"""The experts of one rank: SwiGLU MLPs, run as one grouped matrix product each way where the device
has it.

Shapes: R rows sorted by expert, L local experts, H hidden, F expert width; ETP ranks each hold
F/ETP of every expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

from commlayer.integrations.moe.expert_slots import ExpertSlots
from commlayer.integrations.moe.lent_experts import LentExperts
from commlayer.integrations.parameter_marks import mark_experts, mark_split
from commlayer.integrations.remat import is_rematerialising, recomputable
from commlayer.integrations.spread_parameters import refuse_spread
from commlayer.profiles.errors import TensorError, UsageError
from commlayer.scheduler.overlap import LATER_CHUNKS
from commlayer.transfers import differentiable_once

__all__ = ["GroupedExperts", "WeightGradients", "grouped_linear", "has_grouped_mm", "swiglu"]

Later = tuple["WeightGradients", int]
"""Where the product for the gradient of a weight is put off to, and its place there."""
_BLOCK_BYTES = 1 << 18
"""The bytes that SwiGLU works on at a time of each of its five tensors: together they stay in a
core's cache."""


def has_grouped_mm(x: torch.Tensor, out_features: int) -> bool:
    """Whether torch has a grouped kernel for rows ``x`` [R, in]: BF16 on CUDA, capability 8.0 or
    newer, lines of 16 bytes.

    On the CPU torch's is a loop of its own, slower than ours by the offsets that it needs.
    """
    return (
        x.is_cuda
        and x.dtype is torch.bfloat16
        and hasattr(F, "grouped_mm")
        and x.shape[0] > 0
        and x.shape[1] % 8 == out_features % 8 == 0
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )


class WeightGradients:
    """The products for the gradients of weights that a backward pass has put off, until it makes
    them at once.

    What waits for the gradients of rows, such as their way back to other ranks, then waits for
    these products no longer, and may run beside them. :meth:`put_off` takes weights before anything
    is computed with them; their gradients are made behind all of that, in the order in which
    autograd would have added them up.
    """

    def __init__(self) -> None:
        self._put_off: dict[int, list[tuple[torch.Tensor, torch.Tensor, Sequence[int]]]] = {}
        self._pass = -1  # autograd's number of the backward pass that has put them off

    def put_off(self, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return ``weights``, which all need a gradient, for :func:`grouped_linear`, which is to be
        told this and their place."""
        return _put_off(self, *weights)

    def add(self, place: int, gradient: torch.Tensor, x: torch.Tensor, rows: Sequence[int]) -> None:
        now = torch._C._current_graph_task_id()
        if now != self._pass:
            self._put_off.clear()  # a pass for the gradients of rows alone never came to the weights: what it left is not theirs
            self._pass = now
        self._put_off.setdefault(place, []).append((gradient, x, rows))

    def added(self, place: int, dtype: torch.dtype, total: torch.Tensor | None) -> torch.Tensor | None:
        """Add to ``total``, what was not put off of the gradient of this place's weight, what was;
        None: nothing is there."""
        for gradient, x, rows in self._put_off.pop(place, ()):
            made = _gradient_of_weight(gradient, x, rows, (len(rows), gradient.shape[1], x.shape[1])).to(dtype)
            total = made if total is None else total + made
        return total


class _PutOff(torch.autograd.Function):
    """In the backward pass comes behind all that was computed with the weights, and makes what was
    put off there."""

    @staticmethod
    def forward(ctx: Any, later: WeightGradients, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.later, ctx.dtypes = later, [weight.dtype for weight in weights]
        ctx.set_materialize_grads(False)
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        places = enumerate(zip(ctx.dtypes, gradients, strict=True))
        return None, *(ctx.later.added(place, dtype, gradient) for place, (dtype, gradient) in places)


_put_off: Callable[..., tuple[torch.Tensor, ...]] = cast("Any", _PutOff.apply)


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, rows: Sequence[int], later: Later | None = None
) -> torch.Tensor:
    """Multiply ``x`` [R, in] by each expert's ``weight`` [L, out, in], transposed: [R, out].
    ``rows``: how many each expert has. ``later``: where the product for the gradient of ``weight``
    is put off to, and its place there.

    Under autocast in its dtype. Raises TensorError for ``rows`` that are not those of ``x`` and
    ``weight``, and for two dtypes.
    """
    if len(rows) != weight.shape[0] or sum(rows) != x.shape[0]:
        raise TensorError(f"{weight.shape[0]} experts on {x.shape[0]} rows, got counts {list(rows)}")
    device = x.device.type
    is_wide = torch.float64 in (x.dtype, weight.dtype)  # which autocast leaves alone, as torch's own products do
    if not is_wide and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight = x.to(dtype), weight.to(dtype)
    if x.dtype != weight.dtype:
        raise TensorError(f"experts of {weight.dtype} got tokens of {x.dtype}: convert one of them")
    if has_grouped_mm(x, weight.shape[1]):
        offsets = torch.tensor(rows, device=x.device).cumsum(0).to(torch.int32)
        out: torch.Tensor = F.grouped_mm(x, weight.transpose(1, 2), offs=offsets)
        if out.requires_grad:  # torch's backward refuses a gradient whose strides are 0, such as that of a sum
            out.register_hook(torch.Tensor.contiguous)
        return out
    return _loop(x, weight, rows, later)


class _GroupedLinear(torch.autograd.Function):
    """One product after another, each into its place. Rejected: torch.cat of the products, and a
    gradient of each expert's slice, which torch pads with zeros to all weights: both copy what is
    there already."""

    @staticmethod
    def forward(
        x: torch.Tensor,
        weight: torch.Tensor,
        rows: Sequence[int],
        later: Later | None,
    ) -> torch.Tensor:
        rows = list(rows)
        out = x.new_empty(x.shape[0], weight.shape[1])
        for part, w, product in zip(x.split(rows), weight.unbind(), out.split(rows), strict=True):
            torch.mm(part, w.t(), out=product)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, weight, rows, ctx.later = inputs
        ctx.save_for_backward(x, weight)
        ctx.rows = list(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        of_x = of_weight = None
        if torch.is_grad_enabled():  # a gradient of this gradient is asked for: nothing is written in place then
            parts, pieces = gradient.split(ctx.rows), x.split(ctx.rows)
            of_x = _loop(gradient, weight.transpose(1, 2), ctx.rows, None)
            return of_x, torch.stack([part.t() @ piece for part, piece in zip(parts, pieces, strict=True)]), None, None
        if ctx.needs_input_grad[0]:
            of_x = torch.empty_like(x)
            for part, w, product in zip(gradient.split(ctx.rows), weight.unbind(), of_x.split(ctx.rows), strict=True):
                torch.mm(part, w, out=product)
        if ctx.needs_input_grad[1] and ctx.later is not None:
            later, place_of_weight = ctx.later
            later.add(place_of_weight, gradient, x, ctx.rows)
        elif ctx.needs_input_grad[1]:
            of_weight = _gradient_of_weight(gradient, x, ctx.rows, weight.shape)
        return of_x, of_weight, None, None


def _gradient_of_weight(
    gradient: torch.Tensor, x: torch.Tensor, rows: Sequence[int], shape: Sequence[int]
) -> torch.Tensor:
    """Also of experts without rows: their weights get a gradient of zeros, as on every other
    rank."""
    of_weight = x.new_empty(shape)
    for part, piece, product in zip(gradient.split(rows), x.split(rows), of_weight.unbind(), strict=True):
        torch.mm(part.t(), piece, out=product)
    return of_weight


_loop: Callable[..., torch.Tensor] = cast("Any", _GroupedLinear.apply)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute ``silu(gate) ⊙ up``, of which nothing but the two is kept. Raises TensorError for
    another shape, dtype or device of the two.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device or gate.dim() == 0:
        raise TensorError(
            f"swiglu of {list(gate.shape)} ({gate.dtype}, {gate.device}) and {list(up.shape)} ({up.dtype}, {up.device}): "
            "expected two alike, with rows"
        )
    return _swiglu(gate, up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(gate)
        for g, u, product in _blocks(gate, up, out):
            torch.mul(F.silu(g), u, out=product)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():  # as above
            sigmoid = torch.sigmoid(gate)
            return gradient * up * sigmoid * (1 + gate * (1 - sigmoid)), gradient * F.silu(gate)
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        for grad, g, u, gate_place, up_place in _blocks(gradient, gate, up, of_gate, of_up):
            torch.mul(grad, F.silu(g), out=up_place)
            torch.ops.aten.silu_backward(grad * u, g, grad_input=gate_place)
        return of_gate, of_up


def _blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Rows of all that stay in a core's cache between two steps; on a GPU, which has no such loop,
    all rows."""
    size = tensors[0].shape[0]
    if tensors[0].is_cpu:
        size = max(1, _BLOCK_BYTES // max(1, tensors[0][:1].numel() * tensors[0].element_size()))
    return zip(*(tensor.split(max(1, size)) for tensor in tensors), strict=True)


_swiglu: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = cast("Any", _SwiGLU.apply)


class GroupedExperts(nn.Module):
    """The experts of one rank: ``w_down · (silu(w_gate · x) ⊙ w_up · x)`` for each expert on its
    rows.

    Weights are drawn expert by expert, each from a seed of its own, and cut: they are the same
    under every mapping.

    Args:
        hidden, width: H and F.
        first, count: which of the model's experts are here.
        slots: the same where experts can be placed anew, in place of ``first`` and ``count``; an
            empty slot has weights of zero. ``state_dict()`` then has an entry for each expert that
            is here, by its number (``w_gate.17``), wherever it lies.
        etp_rank, etp_size: which shard of each; the outputs are partial sums then, which the
            dispatcher adds up.
        seed: of the weights.

    Raises:
        UsageError: ETP does not divide the width.
    """

    _calls = 0
    _put_off: Mapping[int, tuple[torch.Tensor, Later]] = MappingProxyType({})
    """The weights whose gradients are put off, by their places among all three."""
    _lent: LentExperts | None = None

    def __init__(
        self,
        hidden: int,
        width: int,
        *,
        first: int = 0,
        count: int = 1,
        etp_rank: int = 0,
        etp_size: int = 1,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        slots: ExpertSlots | None = None,
    ) -> None:
        super().__init__()
        self.slots = slots
        if slots is not None:
            first, count = 0, len(slots.here)
        if hidden < 1 or width < 1 or count < 1:
            raise UsageError(f"{count} experts of hidden size {hidden} and width {width}: all three must be 1 or more")
        if width % etp_size:
            fitting = [size for size in range(1, etp_size + 1) if width % size == 0]
            raise UsageError(
                f"expert width {width} over ETP {etp_size}: ETP must divide it; the nearest that does is {fitting[-1]}"
            )
        self.hidden, self.width, self.first, self.count = hidden, width, first, count
        self._shard = shard = slice(etp_rank * (width // etp_size), (etp_rank + 1) * (width // etp_size))
        drawn: tuple[list[torch.Tensor], ...] = ([], [], [])
        for expert in self.numbers:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + max(expert, 0))
            shapes = ((width, hidden), (width, hidden), (hidden, width))
            gate, up, down = (torch.randn(*shape, generator=generator) * shape[1] ** -0.5 for shape in shapes)
            of_expert = gate[shard].clone(), up[shard].clone(), down[:, shard].contiguous()
            for weights, weight in zip(drawn, of_expert, strict=True):
                weights.append(weight if expert >= 0 else torch.zeros_like(weight))
        # [L, F/ETP, H], the same, and [L, H, F/ETP]
        self.w_gate, self.w_up, self.w_down = (nn.Parameter(torch.stack(each).to(dtype)) for each in drawn)
        mark_experts(self)
        mark_split(self)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The number of the expert in each place of this rank's weights; −1: none."""
        return tuple(range(self.first, self.first + self.count)) if self.slots is None else self.slots.here

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.slots is None:
            cast("Any", super())._save_to_state_dict(destination, prefix, keep_vars)
            return
        _refuse_spread(self, prefix)
        for name, parameter in self.named_parameters(recurse=False):
            for row, expert in enumerate(self.numbers):
                if expert >= 0:
                    of_expert = parameter[row]
                    destination[f"{prefix}{name}.{expert}"] = of_expert if keep_vars else of_expert.detach()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool, *found: list[str]
    ) -> None:
        """Takes experts by their numbers too, whether they can be placed here or not; those of
        other ranks are left alone."""
        if self.slots is not None:
            self.slots.require_still()
        names = [name for name, _ in self.named_parameters(recurse=False)]
        of_experts = [key for name in names for key in state_dict if key.startswith(f"{prefix}{name}.")]
        entries = {key: value for key, value in state_dict.items() if key not in set(of_experts)}
        by_number = bool(of_experts) or self.slots is not None
        if by_number:
            _refuse_spread(self, prefix)
        for name, parameter in self.named_parameters(recurse=False) if by_number else ():
            keys = [f"{prefix}{name}.{expert}" if expert >= 0 else None for expert in self.numbers]
            missing = [key for key in keys if key is not None and key not in state_dict]
            found[0].extend(missing)  # as torch's own: missing, unexpected, errors
            entries.pop(prefix + name, None)
            entries[prefix + name] = torch.stack(
                [
                    state_dict.get(key, parameter[row]).to(parameter) if key else torch.zeros_like(parameter[row])
                    for row, key in enumerate(keys)
                ]
            ).detach()
        cast("Any", super())._load_from_state_dict(entries, prefix, local_metadata, strict, *found)

    # What torch does with parameters that are moved or copied keeps nothing that was added to them.

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> GroupedExperts:
        cast("Any", super())._apply(fn, recurse)
        mark_experts(self)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        cast("Any", super()).__setstate__(state)
        mark_experts(self)

    def forward(self, x: torch.Tensor, rows: Sequence[int], weights: torch.Tensor | None = None) -> torch.Tensor:
        """Run the experts on ``x`` [R, H], of which each expert has its number of ``rows``.
        ``weights`` [R, 1]: multiply each row by its gating weight between SwiGLU and ``w_down``,
        where MegaScale-MoE does (its section 4.1), so that no output need be kept for it.

        In a block of :meth:`with_guests` the rows of guests come behind those of own experts, which
        are computed first. Raises TensorError for another hidden size or number of experts.
        """
        lent = self._lent
        count = self.count if lent is None else self.count + lent.num_guests
        if x.dim() != 2 or x.shape[1] != self.hidden or len(rows) != count:
            raise TensorError(
                f"{count} experts of hidden size {self.hidden} got rows {list(x.shape)} for {len(rows)} experts"
            )
        self._calls += 1
        own_weights = self.weights if lent is None else lent.own
        products = [self._put_off.get(place, (weight, None)) for place, weight in enumerate(own_weights)]
        if self._calls > LATER_CHUNKS:
            products = [(weight, None) for weight, _ in products]
        if lent is None:
            return _computed(x, rows, weights, products)
        sizes = [sum(rows[: self.count]), sum(rows[self.count :])]
        (own, of_guests), of_each = x.split(sizes), (None, None) if weights is None else weights.split(sizes)
        computed = _computed(own, rows[: self.count], of_each[0], products)
        guests = [(weight, None) for weight in lent.guests()]
        return torch.cat([computed, _computed(of_guests, rows[self.count :], of_each[1], guests)])

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        """``w_gate``, ``w_up`` and ``w_down``, which are lent in this order."""
        return self.w_gate, self.w_up, self.w_down

    @contextmanager
    def with_guests(self, lent: LentExperts) -> Iterator[None]:
        """Compute, in this block, the rows of ``lent``'s guests too, and with own weights that have
        gone through it."""
        self._lent = lent
        try:
            yield
        finally:
            self._lent = None

    @contextmanager
    def weight_gradients_last(self) -> Iterator[None]:
        """Put off the products for the weights' gradients of the first two calls in this block,
        which are the last ones in the backward pass, until those for the rows of all calls are
        made.

        The backward pass then makes them while the rows' gradients travel, and keeps the rows of
        two calls and their gradients so long. Those of later calls are made at once, while the
        gradients that follow them arrive. Where activations are rematerialised, to save memory, and
        where torch compiles, nothing is put off, nor are a GPU's grouped products. Gradients have
        the same bits either way.
        """
        trained = [place for place, weight in enumerate(self.weights) if weight.requires_grad]
        self._calls = 0
        if trained and torch.is_grad_enabled() and not (is_rematerialising() or torch.compiler.is_compiling()):
            later = WeightGradients()
            own = self.weights if self._lent is None else self._lent.own
            weights = later.put_off(*(own[place] for place in trained))
            self._put_off = {
                place: (weight, (later, number))
                for number, (place, weight) in enumerate(zip(trained, weights, strict=True))
            }
        try:
            yield
        finally:
            self._put_off = {}


def _refuse_spread(experts: GroupedExperts, prefix: str) -> None:
    refuse_spread(
        ((prefix + name, parameter) for name, parameter in experts.named_parameters(recurse=False)),
        "a state_dict() that has experts by their numbers",
        "no rank has whole experts; make the layer without spare_slots, or save and load it by TrainingState",
    )


def _computed(
    x: torch.Tensor,
    rows: Sequence[int],
    weights: torch.Tensor | None,
    products: Sequence[tuple[torch.Tensor, Later | None]],
) -> torch.Tensor:
    """Run experts on their ``rows`` of ``x``, by the three weights and where their gradients are put off to."""
    (w_gate, gate_later), (w_up, up_later), (w_down, down_later) = products
    gate, up = grouped_linear(x, w_gate, rows, gate_later), grouped_linear(x, w_up, rows, up_later)
    inner = swiglu(gate, up)
    source = gate.detach(), up.detach()
    promise = recomputable(inner, lambda: swiglu(*source), inputs=source)  # before it is used, as everywhere
    if weights is not None:
        weights = weights.to(inner.dtype)
        inner = inner * weights
        kept_weights = weights.detach()
        recomputable(inner, lambda made: made * kept_weights, promise, inputs=(kept_weights,))
    return grouped_linear(inner, w_down, rows, down_later)
