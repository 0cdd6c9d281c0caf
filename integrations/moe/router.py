"""The router: which experts each token goes to, with what weight, and what training adds to keep
them evenly used.

A fixed seed gives the same routing under every mapping, bit for bit, because nothing that is
decided for a token depends on which tokens lie beside it:

- A matrix product's last bits may change with the number of rows (MKL's do: 1, 3 or 31 rows differ
  from 1024), and a row's with its place where the experts do not fill the kernel's tiles (MKL's do
  with 5, 7 or 8). So logits are computed in blocks of one fixed shape. Rejected: FP64 sums rounded
  to FP32, which are only nearly independent, and a broadcast product and sum, which needs T·E·H
  elements.
- Among equal scores the expert of the lowest index wins. torch.topk promises no order; argmax
  promises the first.
- Dropping depends on the other tokens by its nature; ``drop_scope="sequence"`` makes it independent
  of the mapping.

Shapes: T tokens, V of them valid (no padding), H hidden, E experts, K choices per token, G groups
of experts, D devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.moe.balance import (
    attach_loss,
    device_balance_loss,
    expert_balance_loss,
    step_bias,
    usage,
)
from commlayer.integrations.moe.capacity import RoutedChoices, gather_choices, keep_within
from commlayer.integrations.moe.routing import Routing, ValidTokens, count_choices, refuse_any, who
from commlayer.integrations.moe.routing_config import RouterConfig
from commlayer.integrations.moe.scoring import choose_experts, fixed_shape_logits, score, weigh
from commlayer.profiles.errors import DisagreementError, TensorError, UsageError

__all__ = ["Router", "RouterConfig", "Routing"]


class Router(torch.nn.Module):
    """Scores tokens against experts and chooses.

    ``weight`` [E, H] is the only parameter; ``expert_bias`` [E] a buffer, with loss-free balancing,
    which stays FP32 when the model is cast. Scores are computed in FP32 (FP64 for float64 tokens)
    whatever the tokens' dtype, also under autocast.

    Args:
        config: what is chosen, and how.
        hidden_size: H.
        sequence: the ranks that share a sequence, for ``drop_scope="sequence"``. None: this rank
            has whole sequences.
        balance: the ranks whose tokens are balanced together: by the losses, and in
            :meth:`update_bias`. None: this one. All ranks add the same loss; averaging gradients
            over them, as data parallelism does, counts it once.
        generator: draws the weight, on its own device: the same on every rank and device. None:
            torch's global one.
        device: of the parameter.
        dtype: of the parameter.

    Attributes:
        loss_scale: what attached losses are multiplied with in the backward pass: set it where the
            main loss is scaled (FP16).
        step_tokens: how many valid tokens all micro-batches of a step have together, those of the
            ranks of ``balance`` too. Set, the attached losses of a call count by its share of them,
            so that all calls of a step add up to one mean. None: they count whole.
    """

    def __init__(
        self,
        config: RouterConfig,
        hidden_size: int,
        *,
        sequence: GroupCommunicator | None = None,
        balance: GroupCommunicator | None = None,
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
        self.step_tokens: int | torch.Tensor | None = None
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

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor | None = None, valid: torch.Tensor | None = None
    ) -> Routing:
        """Route tokens ``x`` [T, H].

        Args:
            positions: [T] int64: of the tokens in their sequence, where a capacity drops choices
                and ranks do not hold consecutive slices in rank order (context parallelism in
                zigzag).
            valid: [T] bool, True where a token is no padding; None: all are valid. Padding chooses
                no experts (its indices are −1, its weights 0), takes none of their capacity, counts
                in no loss, and its values are not looked at. Only the rows that ``pad_to_capacity``
                fills up are those of all tokens: their number must not depend on the data.

        Collective over ``sequence`` where it is dropped from the sequence, and over ``balance``
        where a loss is on and the module trains: also with no tokens.

        Raises:
            TensorError: ``x``, ``positions`` or ``valid`` has another shape, dtype or device;
                logits are NaN or infinite. (Not looked for while a CUDA graph is captured.)
            DisagreementError: only some ranks of the sequence pass positions; another rank of
                ``sequence`` or ``balance`` refused its tokens.
        """
        config = self.config
        tokens, logits, positions, refused = self._logits(x, positions, valid)
        is_refused = refused is not None
        try:
            with torch.autocast(logits.device.type, enabled=False):
                scores, probabilities = score(logits, config)
                indices = choose_experts(scores.detach(), self.expert_bias, config)
                weights = weigh(scores.gather(1, indices), config)
                chosen = count_choices(indices, config.num_experts)
                losses, scale = self._losses(logits, probabilities, chosen, is_refused)
                indices, weights, limits = self._drop(indices, weights, positions, tokens.num_padding, is_refused)
        except DisagreementError:
            if refused is None:
                raise
        if refused is not None:  # not before: the other ranks would wait for this one in what the above exchanges
            raise refused
        if config.attach_losses and losses:
            weights = attach_loss(weights, torch.stack(list(losses.values())).sum(), scale)
            losses = {name: loss.detach() for name, loss in losses.items()}
        counts = chosen if config.is_dropless else count_choices(indices, config.num_experts)
        indices, weights = tokens.put_back(indices, -1), tokens.put_back(weights)
        return Routing(indices, weights, counts, chosen, *limits, losses, tokens)

    def update_bias(self, counts: torch.Tensor) -> None:
        """Update the balancing bias after an optimizer step: raise the bias of experts with less
        than the mean of ``counts`` [E], lower the others'.

        ``counts``: the sum of ``Routing.chosen`` since the last update; the ranks of ``balance``
        are summed here. Collective.
        """
        rate = self.config.bias_update_rate
        if self.expert_bias is None or rate is None:
            raise UsageError("this router has no bias: set bias_update_rate in its RouterConfig")
        if counts.shape != self.expert_bias.shape or counts.is_floating_point():
            raise TensorError(
                f"{who()}expected integer counts of {self.config.num_experts} experts, got {counts.dtype} of shape "
                f"{list(counts.shape)}: pass the sum of Routing.chosen"
            )
        step_bias(self.expert_bias, counts, rate, self.balance)

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, {self.config}"

    def _logits(
        self, x: torch.Tensor, positions: torch.Tensor | None, valid: torch.Tensor | None
    ) -> tuple[ValidTokens, torch.Tensor, torch.Tensor | None, TensorError | None]:
        """The valid tokens, their logits [V, E] and positions; or of other tokens, which are zero,
        and why this rank refuses its own."""
        try:
            self._check(x, positions)
            tokens = ValidTokens() if valid is None else ValidTokens.of(valid, x)
            with torch.autocast(x.device.type, enabled=False):
                logits = fixed_shape_logits(tokens.take_tokens(x), self.weight)
            refuse_any(  # by the numbers that the caller knows
                tokens.put_back(~logits.isfinite()),
                tokens.put_back(logits.detach()),
                "router logits that are NaN or infinite: check the input and the weight",
            )
        except TensorError as refused:
            logits = fixed_shape_logits(self.weight.new_zeros(1, self.hidden_size), self.weight)
            zero = None if positions is None else torch.zeros(1, dtype=torch.int64, device=logits.device)
            return ValidTokens(), logits, zero, refused
        return tokens, logits, None if positions is None else tokens.take(positions), None

    def _check(self, x: torch.Tensor, positions: torch.Tensor | None) -> None:
        if x.dim() != 2 or x.shape[1] != self.hidden_size:
            raise TensorError(
                f"{who()}expected tokens [tokens, {self.hidden_size}], got shape {list(x.shape)}: flatten batch and "
                "sequence, and make the router with the model's hidden size"
            )
        if not x.is_floating_point() or x.device != self.weight.device:
            raise TensorError(
                f"{who()}expected floating tokens on {self.weight.device}, got {x.dtype} on {x.device}: convert or move them"
            )
        if positions is not None and (positions.shape != x.shape[:1] or positions.dtype != torch.int64):
            raise TensorError(
                f"{who()}expected int64 positions [{len(x)}], got {positions.dtype} of shape {list(positions.shape)}"
            )

    def _drop(
        self,
        indices: torch.Tensor,
        weights: torch.Tensor,
        positions: torch.Tensor | None,
        num_padding: int,
        is_refused: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int | None, int | None, int | None]]:
        """Indices and weights of what is kept; and the capacity of an expert, of a device, and the
        rows to fill up to."""
        config = self.config
        if config.is_dropless:
            return indices, weights, (None, None, None)
        by_position = config.drop_policy == "position"
        priority = torch.zeros_like(weights) if by_position else weights.detach()
        choices = RoutedChoices(indices, priority, positions, num_padding)
        own = slice(None)
        if config.drop_scope == "sequence" and self.sequence is not None:
            choices, own = gather_choices(choices, self.sequence, is_refused=is_refused)
        per_expert, per_device = config.capacities(choices.indices.numel())
        keep = torch.ones_like(choices.indices, dtype=torch.bool)
        if per_expert is not None:
            keep = keep_within(choices.indices, choices, config.num_experts, per_expert)
        if per_device is not None and config.num_devices is not None:  # of what its experts have kept
            devices = choices.indices // (config.num_experts // config.num_devices)
            keep = keep_within(devices.masked_fill(~keep, -1), choices, config.num_devices, per_device)
        keep = keep[own]
        # Ranks have other numbers of valid tokens, and must send equally many rows: so these are of
        # all tokens.
        of_all, _ = config.capacities(choices.indices.numel() + choices.num_padding * config.top_k)
        limits = per_expert, per_device, of_all if config.pad_to_capacity else None
        return indices.masked_fill(~keep, -1), weights.masked_fill(~keep, 0.0), limits

    def _losses(
        self, logits: torch.Tensor, probabilities: torch.Tensor, chosen: torch.Tensor, is_refused: bool
    ) -> tuple[dict[str, torch.Tensor], float | torch.Tensor]:
        """The losses, and what they are multiplied with where they are attached."""
        config = self.config
        aux, device_aux, z = config.aux_loss_coefficient, config.device_aux_loss_coefficient, config.z_loss_coefficient
        if not self.training or not (aux or device_aux or z):
            return {}, 1.0
        used = usage(logits, probabilities, chosen, self.balance, is_refused=is_refused)
        losses = {}
        if aux:
            losses["aux"] = aux * expert_balance_loss(used)
        if device_aux and config.num_devices is not None:
            losses["device_aux"] = device_aux * device_balance_loss(used, config.num_devices)
        if z:
            losses["z"] = z * used.squared_logsumexp
        share = 1.0 if self.step_tokens is None else used.num_tokens / self.step_tokens
        return losses, self.loss_scale * share

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Router:
        bias = self.expert_bias
        cast("Any", super())._apply(fn, recurse)
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype.itemsize < 4:
            self.expert_bias = bias.to(self.expert_bias.device)  # a BF16 bias near 1 would swallow steps of 0.001
        return self
