"""RMSNorm that keeps its input for the backward pass and nothing else of that size.

torch's own keeps the normalised rows beside the input on the CPU (2.13: it is made of smaller operators there). Shapes: […, H].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from commlayer.integrations.remat import recomputable
from commlayer.transfers import differentiable_once

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, ``weight ⊙ x / sqrt(mean(x²) + eps)``, over the last dimension (Zhang and
    Sennrich 2019, equation 4), in FP32 or wider.

    Its output is made again in the backward pass, under :class:`commlayer.integrations.remat.Rematerialise`.
    """

    def __init__(self, hidden: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.hidden, self.eps = hidden, eps
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``x`` […, H]; the result has its dtype."""
        y = _normalise(x, self.weight, self.eps)
        source = x.detach()
        recomputable(y, lambda: _forward(source, self.weight, self.eps)[0], inputs=(source,))
        return y

    def extra_repr(self) -> str:
        return f"{self.hidden}, eps={self.eps}"


def _forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype), scale


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y, scale = _forward(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normalised = x.to(scale.dtype) * scale
        gradient = gradient.to(scale.dtype)
        of_weight = (gradient * normalised).flatten(0, -2).sum(0).to(weight.dtype)
        inner = gradient * weight
        of_x = scale * (inner - normalised * (inner * normalised).mean(-1, keepdim=True))
        return of_x.to(x.dtype), of_weight, None


_normalise: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] = cast("Any", _Normalise.apply)
