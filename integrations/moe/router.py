"""The router: which experts each token goes to, with what weight, and what training adds to keep them evenly used.

A fixed seed gives the same routing under every mapping, bit for bit, because nothing that is decided for a token depends on
which tokens lie beside it:

- A matrix product's last bits may change with the number of rows (MKL's do: 1, 3 or 31 rows differ from 1024), and a row's
  with its place where the experts do not fill the kernel's tiles (MKL's do with 5, 7 or 8). So logits are computed in blocks
  of one fixed shape. Rejected: FP64 sums rounded to FP32, which are only nearly independent, and a broadcast product and
  sum, which needs T·E·H elements.
- Among equal scores the expert of the lowest index wins. torch.topk promises no order; argmax promises the first.
- Dropping depends on the other tokens by its nature; ``drop_scope="sequence"`` makes it independent of the mapping.

Shapes: T tokens, H hidden, E experts, K choices per token, G groups of experts, D devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from commlayer.integrations.moe.balance import (
    attach_loss,
    device_balance_loss,
    expert_balance_loss,
    step_bias,
    usage,
)
from commlayer.integrations.moe.capacity import Choices, Gathering, Limits, gather_choices
from commlayer.profiles.errors import TensorError, UsageError

__all__ = ["Router", "RouterConfig", "Routing"]

_TINY = 1e-20
"""Keeps a sum of scores from being 0, as in DeepSeek-V3 and Megatron-Core."""
_TILE_EXPERTS = 16
_BLOCK_TOKENS_CPU, _BLOCK_TOKENS = 128, 1024
"""The fixed shape of a block of logits. 128 rows cost the CPU no time; an accelerator wants fewer, larger products."""


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How tokens choose experts.

    Args:
        num_experts: E, of the whole layer.
        top_k: K, choices per token.
        score: ``softmax`` over the experts, or ``sigmoid`` of each logit.
        order: ``softmax_topk``: probabilities over all experts, then the K highest. ``topk_softmax``: the K highest logits,
            then softmax over these; the weights sum to 1. Only for ``score="softmax"``.
        normalise: divide the K scores by their sum. One choice is left as it is: its weight would be 1 whatever the router
            thinks, and the router would not learn (so in Megatron-Core and DeepSeek-V3).
        scaling_factor: multiplies the weights, after normalising.
        num_groups: G; experts are taken from the ``top_groups`` best groups of consecutive experts alone. A group counts as
            its highest score; with a bias as the sum of its two highest, as in DeepSeek-V3's inference code (``Gate``).
        top_groups: see ``num_groups``.
        bias_update_rate: loss-free balancing: a bias per expert is added to the scores for the choice, not for the weights;
            :meth:`Router.update_bias` moves it by this much. 0: there is a bias, which stays. None: there is none. Only for
            ``score="sigmoid"``.
        aux_loss_coefficient: of the balance loss per expert; see :func:`balance.expert_balance_loss`.
        device_aux_loss_coefficient: of the balance loss per device; see :func:`balance.device_balance_loss`.
        z_loss_coefficient: of the mean of ``logsumexp(logits)²`` (ST-MoE, Zoph et al. 2022, equation 5).
        attach_losses: losses join the backward pass through the weights, and ``Routing.losses`` only reports them. False:
            ``Routing.losses`` carries gradients, and the caller adds them to the main loss.
        num_devices: D; the experts of a device are consecutive.
        capacity_factor: an expert takes ``ceil(capacity_factor · T·K / E)`` choices; the others are dropped. None: dropless.
        device_capacity_factor: a device takes ``ceil(device_capacity_factor · T·K / D)`` of what its experts kept.
        drop_scope: T counts, and choices compete within, the tokens of one call (``subsequence``), or those of all ranks
            that share the sequence (``sequence``).
        drop_policy: which are kept: those of the highest weight (``probability``), or the earliest (``position``).
        pad_to_capacity: the dispatcher is to fill every expert's rows up to the capacity, for static shapes.

    Raises:
        UsageError: what does not go together, and what to change.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    order: Literal["softmax_topk", "topk_softmax"] = "softmax_topk"
    normalise: bool = True
    scaling_factor: float = 1.0
    num_groups: int | None = None
    top_groups: int | None = None
    bias_update_rate: float | None = None
    aux_loss_coefficient: float = 0.0
    device_aux_loss_coefficient: float = 0.0
    z_loss_coefficient: float = 0.0
    attach_losses: bool = True
    num_devices: int | None = None
    capacity_factor: float | None = None
    device_capacity_factor: float | None = None
    drop_scope: Literal["subsequence", "sequence"] = "subsequence"
    drop_policy: Literal["probability", "position"] = "probability"
    pad_to_capacity: bool = False

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "num_groups", "top_groups", "num_devices"):
            value = getattr(self, name)
            is_whole = type(value) is int and value >= 1
            _require(value is None or is_whole, f"{name} must be an int, 1 or more, got {value!r}")
        for name in ("scaling_factor", "capacity_factor", "device_capacity_factor"):
            value = getattr(self, name)
            is_positive = isinstance(value, (int, float)) and 0 < value < math.inf
            _require(value is None or is_positive, f"{name} must be a positive number, got {value!r}")
        rates = "aux_loss_coefficient", "device_aux_loss_coefficient", "z_loss_coefficient", "bias_update_rate"
        for name in rates:
            value = getattr(self, name)
            is_rate = isinstance(value, (int, float)) and 0 <= value < math.inf
            _require(value is None or is_rate, f"{name} must be a number, 0 or more, got {value!r}")
        for name, words in _WORDS.items():
            value = getattr(self, name)
            _require(value in words, f"{name} must be {words[0]!r} or {words[1]!r}, got {value!r}")
        self._check_choice()
        self._check_groups()
        self._check_devices()

    def _check_choice(self) -> None:
        _require(
            self.top_k <= self.num_experts,
            f"top_k {self.top_k} of {self.num_experts} experts: choose {self.num_experts} at most",
        )
        if self.order == "topk_softmax":
            _require(self.score == "softmax", "order='topk_softmax' is for score='softmax': a sigmoid has no order")
            _require(self.normalise, "order='topk_softmax' always normalises: leave normalise, or use 'softmax_topk'")
            _require(
                self.top_k > 1,
                "order='topk_softmax' with top_k 1 gives every token the weight 1, and the router learns nothing: "
                "use order='softmax_topk'",
            )
        _require(
            self.bias_update_rate is None or self.score == "sigmoid",
            "bias_update_rate is for score='sigmoid': use that, or balance by aux_loss_coefficient",
        )

    def _check_groups(self) -> None:
        groups, top = self.num_groups, self.top_groups
        if groups is None or top is None:
            _require(groups is top, f"set num_groups ({groups}) and top_groups ({top}) together, or neither")
            return
        _require(
            self.num_experts % groups == 0,
            f"{self.num_experts} experts in {groups} groups: num_groups must divide num_experts",
        )
        _require(top <= groups, f"top_groups {top} of {groups} groups: choose {groups} at most")
        within = top * (self.num_experts // groups)
        _require(
            self.top_k <= within,
            f"top_k {self.top_k} from {top} groups with {within} experts together: raise top_groups or lower top_k",
        )

    def _check_devices(self) -> None:
        if self.num_devices is None:
            per_device = self.device_capacity_factor is not None or self.device_aux_loss_coefficient > 0
            _require(not per_device, "device_capacity_factor and device_aux_loss_coefficient need num_devices")
        else:
            _require(
                self.num_experts % self.num_devices == 0,
                f"{self.num_experts} experts on {self.num_devices} devices: num_devices must divide num_experts",
            )
        _require(
            self.capacity_factor is not None or not self.pad_to_capacity,
            "pad_to_capacity needs a capacity_factor: without one there is no capacity to pad to",
        )

    @property
    def is_dropless(self) -> bool:
        return self.capacity_factor is None and self.device_capacity_factor is None

    @property
    def limits(self) -> Limits:
        return Limits(self.num_experts, self.capacity_factor, self.num_devices, self.device_capacity_factor)


_WORDS = {
    "score": ("softmax", "sigmoid"),
    "order": ("softmax_topk", "topk_softmax"),
    "drop_scope": ("subsequence", "sequence"),
    "drop_policy": ("probability", "position"),
}


def _require(is_so: bool, message: str) -> None:
    if not is_so:
        raise UsageError(message)


@dataclass(frozen=True, eq=False)
class Routing:
    """Where tokens go.

    ``indices`` [T, K] int64: the expert of each choice, best first; −1 where it was dropped. ``weights`` [T, K] float32
    (float64 for float64 tokens): differentiable; 0 where it was dropped. ``counts`` [E] int64: kept choices per expert;
    ``chosen`` [E]: before dropping. ``capacity``, ``device_capacity``: what an expert, a device takes of one drop scope (of all
    ranks that share the sequence, under ``drop_scope="sequence"``); None: everything. ``is_padded``: the dispatcher is to pad
    to the capacity. ``losses``: ``aux``, ``device_aux``, ``z``, scalars with their coefficients, as far as they are on.
    """

    indices: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    chosen: torch.Tensor
    capacity: int | None = None
    device_capacity: int | None = None
    is_padded: bool = False
    losses: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def num_experts(self) -> int:
        return self.counts.numel()

    @property
    def dropped(self) -> int:
        """How many choices were dropped. (Waits for the device.)"""
        return int((self.indices < 0).sum())

    @classmethod
    def of(cls, indices: torch.Tensor, weights: torch.Tensor, num_experts: int) -> Routing:
        """What another router decided: ``indices`` [T, K], −1 where a choice is dropped, and floating ``weights`` [T, K].

        Raises:
            TensorError: shapes or types that do not fit, indices out of range, a token that chooses an expert twice, weights
                that are NaN or infinite.
        """
        _check_shapes(indices, weights)
        out_of_range = (indices < -1) | (indices >= num_experts)
        _refuse_any(
            out_of_range, indices, f"experts out of range: expected 0 to {num_experts - 1}, or -1 for a dropped one"
        )
        experts = indices.sort(-1).values
        twice = (experts[:, 1:] == experts[:, :-1]) & (experts[:, 1:] >= 0)
        _refuse_any(twice, experts, "a token chooses one expert twice: expected K different experts")
        _refuse_any(
            ~weights.isfinite(), weights, "weights that are NaN or infinite: check the router's input and parameters"
        )
        weights = weights.masked_fill(indices < 0, 0.0)
        counts = _count(indices, num_experts)
        return cls(indices.long(), weights if weights.dtype == torch.float64 else weights.float(), counts, counts)


def _check_shapes(indices: torch.Tensor, weights: torch.Tensor) -> None:
    if indices.dim() != 2 or indices.shape != weights.shape:
        raise TensorError(
            f"{_who()}expected indices and weights of one shape [tokens, choices], got {list(indices.shape)} and "
            f"{list(weights.shape)}"
        )
    if indices.dtype not in (torch.int64, torch.int32) or not weights.is_floating_point():
        raise TensorError(
            f"{_who()}expected integer indices and floating weights, got {indices.dtype} and {weights.dtype}: convert them"
        )


def _refuse_any(bad: torch.Tensor, values: torch.Tensor, message: str) -> None:
    """Raise TensorError where ``bad`` [T, ·] has a True; names the first. Waits for the device, so not during capture."""
    if bad.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    if bool(bad.any()):
        token, place = bad.nonzero()[0].tolist()
        where = f"first {values[token, place].item()} at token {token}, {int(bad.any(-1).sum())} of {len(bad)} tokens"
        raise TensorError(f"{_who()}{message} ({where})")


def _who() -> str:
    return f"rank {dist.get_rank()}: " if dist.is_available() and dist.is_initialized() else ""


class Router(torch.nn.Module):
    """Scores tokens against experts and chooses.

    ``weight`` [E, H] is the only parameter; ``expert_bias`` [E] a buffer, with loss-free balancing, which stays FP32 when the
    model is cast. Scores are computed in FP32 (FP64 for float64 tokens) whatever the tokens' dtype, also under autocast.

    Args:
        config: what is chosen, and how.
        hidden_size: H.
        sequence: the ranks that share a sequence, for ``drop_scope="sequence"``. None: this rank has whole sequences.
        balance: the ranks whose tokens are balanced together: by the losses, and in :meth:`update_bias`. None: this one. All
            ranks add the same loss; averaging gradients over them, as data parallelism does, counts it once.
        generator: draws the weight, on its own device: the same on every rank and device. None: torch's global one.
        device: of the parameter.
        dtype: of the parameter.

    ``loss_scale`` is what attached losses are multiplied with in the backward pass: set it where the main loss is scaled (FP16,
    accumulation).
    """

    def __init__(
        self,
        config: RouterConfig,
        hidden_size: int,
        *,
        sequence: Gathering | None = None,
        balance: Gathering | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if hidden_size < 1:
            raise UsageError(f"hidden_size must be 1 or more, got {hidden_size}")
        self.config, self.hidden_size = config, hidden_size
        self.sequence, self.balance = sequence, balance
        self.loss_scale: float | torch.Tensor = 1.0
        self.weight = torch.nn.Parameter(torch.empty(config.num_experts, hidden_size, device=device, dtype=dtype))
        has_bias = config.bias_update_rate is not None
        bias = torch.zeros(config.num_experts, device=device) if has_bias else None
        self.expert_bias: torch.Tensor | None
        self.register_buffer("expert_bias", bias)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the weight anew, from N(0, 0.02²) as Megatron-Core does; the bias becomes 0."""
        device = self.weight.device if generator is None else generator.device
        if not self.weight.is_meta:
            self.weight.copy_(torch.empty(self.weight.shape, device=device).normal_(std=0.02, generator=generator))
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> Routing:
        """Route tokens ``x`` [T, H].

        ``positions`` [T] int64: of the tokens in their sequence, where a capacity drops choices and ranks do not hold
        consecutive slices in rank order (context parallelism in zigzag).

        Collective over ``sequence`` where it is dropped from the sequence, and over ``balance`` where a loss is on and the
        module trains: also with no tokens.

        Raises:
            TensorError: ``x`` has another hidden size, dtype or device; logits are NaN or infinite. (Not looked for while a
                CUDA graph is captured.)
            DisagreementError: only some ranks of the sequence pass positions.
        """
        self._check(x, positions)
        config = self.config
        with torch.autocast(x.device.type, enabled=False):
            logits = fixed_shape_logits(x, self.weight)
            _refuse_any(
                ~logits.isfinite(), logits, "router logits that are NaN or infinite: check the input and the weight"
            )
            scores, probabilities = score(logits, config)
            indices = self._choose(scores.detach())
            weights = weigh(scores.gather(1, indices), config)
            chosen = _count(indices, config.num_experts)
            losses = self._losses(logits, probabilities, chosen)
            indices, weights, capacities = self._drop(indices, weights, positions)
        if config.attach_losses and losses:
            weights = attach_loss(weights, torch.stack(list(losses.values())).sum(), self.loss_scale)
            losses = {name: loss.detach() for name, loss in losses.items()}
        counts = chosen if config.is_dropless else _count(indices, config.num_experts)
        return Routing(indices, weights, counts, chosen, *capacities, config.pad_to_capacity, losses)

    def update_bias(self, counts: torch.Tensor) -> None:
        """After an optimizer step: raise the bias of experts with less than the mean of ``counts`` [E], lower the others'.

        ``counts``: the sum of ``Routing.chosen`` since the last update; the ranks of ``balance`` are summed here. Collective.
        """
        rate = self.config.bias_update_rate
        if self.expert_bias is None or rate is None:
            raise UsageError("this router has no bias: set bias_update_rate in its RouterConfig")
        if counts.shape != self.expert_bias.shape or counts.is_floating_point():
            raise TensorError(
                f"{_who()}expected integer counts of {self.config.num_experts} experts, got {counts.dtype} of shape "
                f"{list(counts.shape)}: pass the sum of Routing.chosen"
            )
        step_bias(self.expert_bias, counts, rate, self.balance)

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, {self.config}"

    def _check(self, x: torch.Tensor, positions: torch.Tensor | None) -> None:
        if x.dim() != 2 or x.shape[1] != self.hidden_size:
            raise TensorError(
                f"{_who()}expected tokens [tokens, {self.hidden_size}], got shape {list(x.shape)}: flatten batch and "
                "sequence, and make the router with the model's hidden size"
            )
        if not x.is_floating_point() or x.device != self.weight.device:
            raise TensorError(
                f"{_who()}expected floating tokens on {self.weight.device}, got {x.dtype} on {x.device}: convert or move them"
            )
        if positions is not None and (positions.shape != x.shape[:1] or positions.dtype != torch.int64):
            raise TensorError(
                f"{_who()}expected int64 positions [{len(x)}], got {positions.dtype} of shape {list(positions.shape)}"
            )

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        config, bias = self.config, self.expert_bias
        if bias is not None:
            scores = scores + bias
        if config.num_groups is not None and config.top_groups is not None:
            scores = limit_to_groups(scores, config.num_groups, config.top_groups, 1 if bias is None else 2)
        return first_highest(scores, config.top_k)

    def _drop(
        self, indices: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int | None, int | None]]:
        config = self.config
        if config.is_dropless:
            return indices, weights, (None, None)
        by_position = config.drop_policy == "position"
        choices = Choices(indices, torch.zeros_like(weights) if by_position else weights.detach(), positions)
        mine = slice(None)
        if config.drop_scope == "sequence" and self.sequence is not None:
            choices, mine = gather_choices(choices, self.sequence)
        keep = config.limits.keep(choices)[mine]
        capacities = config.limits.capacities(choices.indices.numel())
        return indices.masked_fill(~keep, -1), weights.masked_fill(~keep, 0.0), capacities

    def _losses(
        self, logits: torch.Tensor, probabilities: torch.Tensor, chosen: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        config = self.config
        aux, device_aux, z = config.aux_loss_coefficient, config.device_aux_loss_coefficient, config.z_loss_coefficient
        if not self.training or not (aux or device_aux or z):
            return {}
        used = usage(logits, probabilities, chosen, self.balance)
        losses = {}
        if aux:
            losses["aux"] = aux * expert_balance_loss(used)
        if device_aux and config.num_devices is not None:
            losses["device_aux"] = device_aux * device_balance_loss(used, config.num_devices)
        if z:
            losses["z"] = z * used.squared_logsumexp
        return losses

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Router:
        bias = self.expert_bias
        cast("Any", super())._apply(fn, recurse)
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype.itemsize < 4:
            self.expert_bias = bias.to(self.expert_bias.device)  # a BF16 bias near 1 would swallow steps of 0.001
        return self


def fixed_shape_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x`` [T, H] times ``weight`` [E, H]: logits [T, E] in FP32 or FP64, whose rows depend on nothing but the token."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    num_experts = weight.shape[0]
    columns = pad(weight.to(dtype), (0, 0, 0, -num_experts % _TILE_EXPERTS)).t()
    block_tokens = _BLOCK_TOKENS_CPU if x.device.type == "cpu" else _BLOCK_TOKENS
    blocks = []
    for block in x.split(block_tokens):
        full = block.to(dtype)
        if len(block) < block_tokens:  # padding by nothing would copy all the same
            full = pad(full, (0, 0, 0, block_tokens - len(block)))
        blocks.append((full @ columns)[: len(block), :num_experts])
    return torch.cat(blocks)


def score(logits: torch.Tensor, config: RouterConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [T, E], by which experts are chosen and weighed, and probabilities [T, E], which sum to 1, for the losses."""
    if config.score == "sigmoid":
        # In FP64: the FP32 one's last bit depends on where an element lies on the CPU (vector body or scalar tail).
        scores = logits.double().sigmoid().to(logits.dtype)
        return scores, scores / (scores.sum(-1, keepdim=True) + _TINY)
    probabilities = logits.softmax(-1)
    return (logits if config.order == "topk_softmax" else probabilities), probabilities


def weigh(scores: torch.Tensor, config: RouterConfig) -> torch.Tensor:
    """The chosen experts' scores [T, K] → weights [T, K]."""
    if config.order == "topk_softmax":
        scores = scores.softmax(-1)
    elif config.normalise and config.top_k > 1:
        scores = scores / (scores.sum(-1, keepdim=True) + _TINY)
    return scores * config.scaling_factor


def first_highest(scores: torch.Tensor, number: int) -> torch.Tensor:
    """The indices of the ``number`` highest scores of each row, highest first, among equal ones the lowest index first."""
    scores, chosen = scores.clone(), []
    for _ in range(number):
        highest = scores.argmax(-1, keepdim=True)
        scores.scatter_(-1, highest, -math.inf)
        chosen.append(highest)
    return torch.cat(chosen, -1)


def limit_to_groups(scores: torch.Tensor, num_groups: int, top_groups: int, num_summed: int) -> torch.Tensor:
    """``scores`` [T, E] with −inf outside of the best groups: those with the highest sum of ``num_summed`` best scores."""
    grouped = scores.view(len(scores), num_groups, scores.shape[1] // num_groups)
    of_group = grouped.topk(min(num_summed, grouped.shape[2])).values.sum(-1)
    outside = torch.ones_like(of_group, dtype=torch.bool).scatter(1, first_highest(of_group, top_groups), False)
    return grouped.masked_fill(outside.unsqueeze(-1), -math.inf).view_as(scores)


def _count(indices: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Choices per expert [E]; dropped ones (−1) are left out."""
    flat = indices.flatten().long()
    counts = flat.new_zeros(num_experts + 1).scatter_add_(0, flat + 1, torch.ones_like(flat))
    return counts[1:].contiguous()
