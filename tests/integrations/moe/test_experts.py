"""The experts' products and SwiGLU against torch's own, one process."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.integrations.moe import experts as experts_module
from commlayer.integrations.moe.experts import GroupedExperts, grouped_linear, swiglu
from commlayer.integrations.remat import Rematerialise
from commlayer.profiles.errors import TensorError

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def looped(x: torch.Tensor, weight: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return torch.cat([F.linear(part, w) for part, w in zip(x.split(rows), weight.unbind(), strict=True)])


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [[5], [3, 0, 4], [0, 0], [0, 1]], ids=str)
def test_products_and_gradients(dtype: torch.dtype, rows: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(rows), 6, generator=generator).to(dtype)
    weight = torch.randn(len(rows), 8, 6, generator=generator).to(dtype)
    mine, theirs = leaves(x, weight), leaves(x, weight)
    out, expected = grouped_linear(mine[0], mine[1], rows), looped(theirs[0], theirs[1], rows)
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    gradient = torch.randn(out.shape, generator=generator).to(dtype)
    out.backward(gradient)
    expected.backward(gradient)
    for got, wanted in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("is_frozen", [(False, True), (True, False)])
def test_what_is_frozen_gets_no_gradient(is_frozen: tuple[bool, bool]) -> None:
    x, weight = leaves(torch.randn(3, 2), torch.randn(1, 4, 2))
    for tensor, frozen in zip((x, weight), is_frozen, strict=True):
        tensor.requires_grad_(not frozen)
    grouped_linear(x, weight, [3]).sum().backward()
    assert [tensor.grad is None for tensor in (x, weight)] == list(is_frozen)


def test_gradients_that_are_expanded_or_transposed() -> None:
    x, weight = leaves(torch.randn(4, 3, dtype=torch.float64), torch.randn(2, 5, 3, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda x, w: grouped_linear(x, w, [1, 3]).t().sum(1), (x, weight))


def test_second_derivatives() -> None:
    """Also where the first one needs none itself: of a sum."""
    x, weight = leaves(torch.randn(4, 3, dtype=torch.float64), torch.randn(2, 5, 3, dtype=torch.float64))
    gate, up = leaves(torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64))
    assert torch.autograd.gradgradcheck(lambda x, w: grouped_linear(x, w, [1, 3]), (x, weight))
    assert torch.autograd.gradgradcheck(swiglu, (gate, up))
    layer = GroupedExperts(3, 5, count=2).double()
    (first,) = torch.autograd.grad(layer(x, [1, 3]).sum(), x, create_graph=True)
    assert first.requires_grad


def test_functional_gradients() -> None:
    x, weight = torch.randn(4, 3), torch.randn(2, 5, 3)
    made = torch.func.grad(
        lambda x: swiglu(grouped_linear(x, weight, [1, 3]), grouped_linear(x, weight, [1, 3])).sum()
    )(x)
    assert made.shape == x.shape


@pytest.mark.parametrize("rows", [[4], [1, 2], [1, 1, 2]], ids=str)
def test_counts_that_are_not_those_of_the_rows(rows: list[int]) -> None:
    with pytest.raises(TensorError, match="2 experts on 4 rows"):
        grouped_linear(torch.zeros(4, 3), torch.zeros(2, 5, 3), rows)


@pytest.mark.parametrize(
    "up", [torch.zeros(1, 8), torch.zeros(4, 8, dtype=torch.float64), torch.zeros(4, 8, device="meta")]
)
def test_swiglu_of_two_that_differ(up: torch.Tensor) -> None:
    with pytest.raises(TensorError, match="two alike"):
        swiglu(torch.zeros(4, 8), up)


def test_autocast_leaves_fp64_alone() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        out = grouped_linear(torch.randn(2, 3, dtype=torch.float64), torch.randn(1, 4, 3, dtype=torch.float64), [2])
    assert out.dtype == torch.float64


def test_shapes_without_memory() -> None:
    assert grouped_linear(torch.zeros(4, 3, device="meta"), torch.zeros(2, 5, 3, device="meta"), [1, 3]).shape == (4, 5)


def test_autocast_computes_in_its_dtype() -> None:
    x, weight = leaves(torch.randn(4, 8), torch.randn(2, 8, 8))
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = grouped_linear(x, weight, [2, 2]), looped(x, weight, [2, 2])
    assert out.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(out, expected)
    out.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 9), st.integers(0, 9), st.sampled_from([1, 16, 100, 1 << 18]))
def test_swiglu_by_blocks(rows: int, width: int, block_bytes: int) -> None:
    """Blocks of one row, of some, of all; nothing there."""
    gate, up = (torch.randn(rows, width, dtype=torch.float64) for _ in range(2))
    mine, theirs = leaves(gate, up), leaves(gate, up)
    kept, experts_module._BLOCK_BYTES = experts_module._BLOCK_BYTES, block_bytes
    try:
        out, expected = swiglu(*mine), F.silu(theirs[0]) * theirs[1]
        torch.testing.assert_close(
            out, expected
        )  # a vector's rest is computed in other instructions: the last bit differs
        out.square().sum().backward()
    finally:
        experts_module._BLOCK_BYTES = kept
    expected.square().sum().backward()
    for got, wanted in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)


def test_swiglu_gradients() -> None:
    gate, up = leaves(torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64))
    assert torch.autograd.gradcheck(swiglu, (gate, up))


@pytest.mark.parametrize("rows", [[0, 0], [4, 0], [1, 3]], ids=str)
def test_experts_are_their_formula(rows: list[int]) -> None:
    layer = GroupedExperts(6, 10, count=2, seed=3).double()
    x = torch.randn(sum(rows), 6, dtype=torch.float64)
    parts = [
        F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down)
        for part, gate, up, down in zip(x.split(rows), layer.w_gate, layer.w_up, layer.w_down, strict=True)
    ]
    torch.testing.assert_close(layer(x, rows), torch.cat(parts))


def test_weights_before_the_last_product_are_weights_after_it() -> None:
    layer = GroupedExperts(6, 10, count=2).double()
    x, weights = torch.randn(5, 6, dtype=torch.float64), torch.rand(5, 1, dtype=torch.float64)
    for rows in itertools.chain([[5, 0]], [[2, 3]]):
        torch.testing.assert_close(layer(x, rows, weights), layer(x, rows) * weights)


def gradients_of(layer: GroupedExperts, calls: Sequence[tuple[torch.Tensor, list[int]]], last: bool) -> list[Any]:
    layer.zero_grad()
    inputs = leaves(*(x for x, _ in calls))
    with layer.weight_gradients_last() if last else contextlib.nullcontext():
        outs = [layer(x, rows) for x, (_, rows) in zip(inputs, calls, strict=True)]
    torch.cat(outs).float().square().sum().backward()
    return [each.grad for each in (*inputs, *layer.parameters())]


@pytest.mark.parametrize("frozen", [(), ("w_up",), ("w_gate", "w_up", "w_down")], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_weight_gradients_put_off_have_the_same_bits(frozen: tuple[str, ...], autocast: bool) -> None:
    layer = GroupedExperts(6, 10, count=3)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    calls = [(torch.randn(sum(rows), 6, generator=generator), rows) for rows in ([2, 0, 3], [1, 1, 4], [0, 0, 0])]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, wanted = gradients_of(layer, calls, True), gradients_of(layer, calls, False)
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or (mine.dtype == theirs.dtype and torch.equal(mine, theirs))


def test_a_pass_for_the_gradients_of_rows_alone_leaves_nothing_for_weights() -> None:
    layer, x = GroupedExperts(6, 10, count=2), torch.ones(3, 6, requires_grad=True)
    with layer.weight_gradients_last():
        loss = layer(x, [1, 2]).square().sum()
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    found = [each.grad for each in layer.parameters()]
    (again,) = leaves(x)
    wanted = gradients_of(layer, [(again, [1, 2])], False)[1:]
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine is not None
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("how", ["put off", "at once", "rematerialised"])
def test_weight_gradients_put_off_come_behind_those_of_all_rows(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    made = experts_module._gradient_of_weight

    def noted(*given: Any) -> torch.Tensor:
        seen.append("weight")
        return made(*given)

    monkeypatch.setattr(experts_module, "_gradient_of_weight", noted)
    layer = GroupedExperts(6, 10, count=2)
    inputs = leaves(*(torch.ones(3, 6) for _ in range(3)))
    for x in inputs:
        x.register_hook(lambda _: seen.append("rows"))
    late = layer.weight_gradients_last() if how != "at once" else contextlib.nullcontext()
    with Rematerialise(is_on=how == "rematerialised"), late:
        outs = [layer(x * 1, rows) for x, rows in zip(inputs, ([1, 2], [3, 0], [2, 1]), strict=True)]
    torch.cat(outs).sum().backward()
    assert sorted(seen) == ["rows"] * 3 + ["weight"] * 9
    if how == "put off":  # those of the third call, the first in the backward pass, are made at once
        assert seen == ["weight"] * 3 + ["rows"] * 3 + ["weight"] * 6
    else:
        assert seen == [*["weight"] * 3, "rows"] * 3
