"""The MoE layer on one CUDA device, without communication: against the CPU (`make test-gpu`)."""

from __future__ import annotations

import pytest
import torch
from on_one_gpu import needs_cuda

from commlayer.integrations.moe.experts import GroupedExperts, grouped_linear, has_grouped_mm
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.router import RouterConfig
from commlayer.integrations.remat import Rematerialise

pytestmark = needs_cuda


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("is_on", [False, True])
def test_a_layer_gives_what_it_gives_on_the_cpu(chunks: int, is_on: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    config = RouterConfig(num_experts=8, top_k=2)
    found = []
    for device in ("cpu", "cuda"):
        layer = MoELayer(64, 96, config, chunks=chunks, weights_at="experts", shared_width=32).to(device)
        x = torch.randn(100, 64, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
        with Rematerialise(is_on=is_on):
            out = layer(x)
        out.square().sum().backward()
        found.append([out, x.grad, *(parameter.grad for parameter in layer.parameters())])
    for on_cpu, on_cuda in zip(*found, strict=True):
        assert on_cpu is not None
        assert on_cuda is not None
        torch.testing.assert_close(on_cuda.cpu(), on_cpu, rtol=1e-4, atol=1e-4)


def test_the_grouped_product_is_the_loop() -> None:
    if not has_grouped_mm(torch.zeros(1, 8, device="cuda", dtype=torch.bfloat16), 8):
        pytest.skip(
            f"torch {torch.__version__} has no grouped product for {torch.cuda.get_device_name()}: the loop runs there, and "
            "the other tests cover it"
        )
    x = torch.randn(48, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(3, 32, 64, device="cuda", dtype=torch.bfloat16)
    rows = (16, 0, 32)
    loop = torch.cat([part @ w.t() for part, w in zip(x.split(rows), weight, strict=True)])
    torch.testing.assert_close(grouped_linear(x, weight, rows), loop)


def test_experts_in_bf16_have_gradients() -> None:
    experts = GroupedExperts(64, 96, count=3).to("cuda", torch.bfloat16)
    experts(torch.randn(48, 64, device="cuda", dtype=torch.bfloat16), (16, 0, 32)).sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.isfinite().all())
        assert not bool(parameter.grad[1].any())
