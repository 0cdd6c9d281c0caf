"""Load balance of experts: auxiliary losses, the bias of loss-free balancing, and how a loss joins the backward pass.

Shapes: T tokens, K choices per token, E experts, D devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.moe.routing import who
from commlayer.profiles.errors import DisagreementError, TensorError

__all__ = ["Usage", "attach_loss", "device_balance_loss", "expert_balance_loss", "step_bias", "usage"]


@dataclass(frozen=True, slots=True, eq=False)
class Usage:
    """The use of experts by T tokens, maybe of several ranks.

    ``fractions`` [E] of the T·K choices, before any are dropped; no gradient. ``probabilities`` [E]: the tokens' mean, which
    sums to 1. ``squared_logsumexp``: the mean over tokens of ``logsumexp(logits)²``. ``num_tokens``: T, a scalar. All are 0
    where there are no tokens.
    """

    fractions: torch.Tensor
    probabilities: torch.Tensor
    squared_logsumexp: torch.Tensor
    num_tokens: torch.Tensor


def usage(
    logits: torch.Tensor,
    probabilities: torch.Tensor,
    chosen: torch.Tensor,
    over: GroupCommunicator | None,
    *,
    is_refused: bool = False,
) -> Usage:
    """Count how much each expert is used, by ``logits`` and ``probabilities`` [T, E] and the choices per expert
    ``chosen`` [E]; over the tokens of all ranks of ``over`` (one all_reduce), so that it does not depend on how tokens
    are spread.

    Raises DisagreementError on every rank where one comes with ``is_refused``: its tokens are none.
    """
    num_tokens, num_experts = logits.shape
    sums = torch.cat(
        [
            probabilities.sum(0),
            chosen.to(logits.dtype),
            logits.logsumexp(-1).square().sum().view(1),
            logits.new_tensor([num_tokens]),
        ]
    )
    if over is not None:
        # Every rank's loss is the same function of the total, so the gradient of all their losses is `size` times that of
        # this rank's: the backward pass needs no communication, and no rank can be missing from it.
        # In FP64, whatever the logits are here: all ranks send as many bytes.
        refused = sums.new_tensor([is_refused], dtype=torch.float64)
        total = over.all_reduce(torch.cat([sums.detach().double(), refused]))
        if total[-1] > 0:
            raise DisagreementError(
                f"{who()}a rank whose tokens are balanced with these refused its own: look at its log"
            )
        sums = total[:-1].to(sums.dtype) + over.size * (sums - sums.detach())
    probability, count, squared, tokens = sums.split([num_experts, num_experts, 1, 1])
    divisor = tokens.clamp(min=1)
    fractions, mean_squared = count / count.sum().clamp(min=1), (squared / divisor).squeeze(0)
    return Usage(fractions, probability / divisor, mean_squared, tokens.squeeze(0))


def expert_balance_loss(usage: Usage) -> torch.Tensor:
    """The auxiliary loss of experts, ``E · Σ_i f_i · P_i``: 1 where all experts are used evenly, E where one gets
    everything (with K = 1).

    f_i is the fraction of the choices that fell on expert i, P_i the mean of its probability. Switch Transformer (Fedus et
    al. 2021), equations 4 to 6, with K choices per token as in DeepSeek-V2, equations 23 to 25: dividing by K keeps 1 as the
    balanced value. Gradients go through P alone.
    """
    return usage.fractions.numel() * (usage.fractions * usage.probabilities).sum()


def device_balance_loss(usage: Usage, num_devices: int) -> torch.Tensor:
    """The auxiliary loss of devices, ``D · Σ_d F_d · P_d``, with F_d and P_d the sums of f and P over the E/D
    consecutive experts of device d.

    MegaScale-MoE, section 3.2, "we treat the experts placed on the same GPU as a group"; DeepSeek-V2, equations 26 to 28,
    which take the mean of E·f over a group: the same number.
    """
    fractions = usage.fractions.view(num_devices, -1).sum(1)
    return num_devices * (fractions * usage.probabilities.view(num_devices, -1).sum(1)).sum()


@torch.no_grad()
def step_bias(bias: torch.Tensor, counts: torch.Tensor, rate: float, over: GroupCommunicator | None) -> None:
    """Step the balancing bias in place, ``bias += rate · sign(mean(counts) − counts)``, with counts [E] summed over the
    ranks of ``over``.

    Loss-free balancing (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", algorithm 1;
    DeepSeek-V3, section 2.1.2).
    """
    if over is not None:
        counts = over.all_reduce(counts)
    missing = counts.sum() - counts * counts.numel()  # E times (mean − count), in integers: an even count has sign 0
    bias.add_(missing.sign().to(bias.dtype), alpha=rate)


def attach_loss(output: torch.Tensor, loss: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Return ``output`` unchanged; whenever a gradient flows back through it, ``scale · loss`` is differentiated as well.

    So ``attach_loss(y, loss)`` and then ``main(y).backward()`` give the gradients of ``main(y) + scale · loss`` though no
    caller hands the loss on (as Megatron-Core's MoEAuxLossAutoScaler). Where nothing flows back through the output the loss
    counts for nothing. ``scale``: what the main loss is multiplied with, by a gradient scaler or for accumulation.

    Raises:
        TensorError: ``loss`` is no scalar.
    """
    if loss.dim() != 0:
        raise TensorError(f"expected a loss without dimensions, got shape {list(loss.shape)}: sum or average it first")
    return cast("torch.Tensor", cast("Any", _AttachLoss.apply)(output, loss, scale))


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, loss: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
        ctx.scale = scale
        ctx.like = loss.detach()
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradient, torch.ones_like(ctx.like) * ctx.scale, None
