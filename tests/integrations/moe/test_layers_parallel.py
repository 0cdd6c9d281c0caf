"""Parallel linear layers and attention against plain ones on one process: values, gradients, and what they send."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.gradients import reduce_replicated_gradients
from commlayer.integrations.parameter_marks import mark_replicated, replicated_parameters
from commlayer.integrations.shares import even_rows
from commlayer.profiles.errors import TensorError, UsageError
from commlayer.statistics import reset_stats, stats
from commlayer.testing.plugin import ClusterFactory
from examples.attention import ParallelAttention, apply_rope, head_shares
from examples.context_parallel import (
    context_parallel_attention,
    merge_sequence,
    positions,
    split_sequence,
    zigzag_merge,
    zigzag_rows,
)
from examples.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)

WORLD = 4
GRIDS = ((1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (1, 4), (2, 2))
"""(tp, cp)."""
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 4e-2}
Kind = Literal["ulysses", "tensor"]


def start() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


class Grids:
    """Groups of backend commlayer for every tp and cp; tp's ranks are neighbours. All ranks make all groups."""

    def __init__(self) -> None:
        self.groups: dict[tuple[int, ...], Any] = {}

    def __call__(self, tp: int, cp: int) -> tuple[GroupCommunicator, GroupCommunicator] | None:
        """This rank's communicators; None where the grid leaves it out."""
        found = None
        for base in range(0, WORLD - tp * cp + 1, tp * cp):
            rows = [tuple(base + i * tp + k for k in range(tp)) for i in range(cp)]
            columns = [tuple(row[k] for row in rows) for k in range(tp)]
            mine = [self.of(ranks) for ranks in (*rows, *columns)]
            for row, column in itertools.product(range(cp), range(tp)):
                if rows[row][column] == dist.get_rank():
                    found = GroupCommunicator(mine[row], "tp"), GroupCommunicator(mine[cp + column], "cp")
        return found

    def of(self, ranks: tuple[int, ...]) -> Any:
        if len(ranks) == 1:
            return None
        if ranks not in self.groups:
            self.groups[ranks] = dist.new_group(list(ranks), backend="commlayer")
        return self.groups[ranks]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_close(
    got: torch.Tensor | None, expected: torch.Tensor | None, what: object, beside: torch.Tensor | None = None
) -> None:
    """Within the dtype's tolerance of the largest expected value, or of ``beside``'s, where what is expected is nothing but
    rounding errors."""
    assert got is not None
    assert expected is not None
    assert got.shape == expected.shape, f"{what}: {got.shape}, expected {expected.shape}"
    if expected.numel():
        scale = (expected if beside is None else beside).abs().max().clamp(min=1e-30)
        error = ((got - expected).abs().max() / scale).item()
        assert error <= TOLERANCE[got.dtype], f"{what}: off by {error:.2g}"


def alone(lane: str = "tp") -> GroupCommunicator:
    return GroupCommunicator(None, lane)


def pretended(size: int, rank: int = 0, lane: str = "tp") -> GroupCommunicator:
    """One of ``size`` ranks that never sends: for what needs no peers."""
    communicator = alone(lane)
    communicator.size, communicator.rank = size, rank
    return communicator


def elements_sent() -> float:
    """float32 elements that this rank has sent to others since reset_stats(), where all ranks get equal parts."""
    groups = (group for group in stats()["groups"] if group["description"] == "counted")
    calls = (call for group in groups for call in group["calls"])
    return sum(call["logical_bytes"] for call in calls) / 4 * (WORLD - 1) / WORLD


# The reference: one process, one head after the other, the softmax written out


@dataclass(frozen=True)
class Case:
    tp: int
    cp: int
    kind: Kind
    num_heads: int
    num_kv_heads: int
    seq_len: int
    batch: int
    causal: bool
    dtype: torch.dtype = torch.float64
    rope_base: float | None = 100.0
    hidden: int = 12
    head_dim: int = 4

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Activations, and the gradient of the output: both whole."""
        generator = seeded(1)
        x = torch.randn(self.seq_len, self.batch, self.hidden, generator=generator, dtype=torch.float64)
        return x.to(self.dtype), torch.randn(x.shape, generator=generator, dtype=torch.float64).to(self.dtype)

    def model(self, tp: GroupCommunicator, cp: GroupCommunicator) -> ParallelAttention:
        return ParallelAttention(
            self.hidden, self.num_heads, self.num_kv_heads, tp=tp, cp=cp, kind=self.kind, causal=self.causal,
            head_dim=self.head_dim, rope_base=self.rope_base, generator=seeded(), dtype=self.dtype,
        )  # fmt: skip


def rotated(x: torch.Tensor, base: float) -> torch.Tensor:
    """[S, B, D] turned by position, as complex numbers."""
    half = x.shape[-1] // 2
    angles = torch.outer(
        torch.arange(len(x), dtype=torch.float64), base ** (-torch.arange(half, dtype=torch.float64) / half)
    )
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.exp(1j * angles)[:, None]
    return torch.cat((turned.real, turned.imag), -1).to(x.dtype)


def reference(case: Case, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    q, k, v = ((x @ weights[name].T).unflatten(-1, (-1, case.head_dim)) for name in ("q", "k", "v"))
    heads = []
    for head in range(case.num_heads):
        kv = head * case.num_kv_heads // case.num_heads
        one, other = q[:, :, head], k[:, :, kv]
        if case.rope_base is not None:
            one, other = rotated(one, case.rope_base), rotated(other, case.rope_base)
        scores = torch.einsum("sbd,tbd->bst", one, other) / case.head_dim**0.5
        if case.causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        heads.append(torch.einsum("bst,tbd->sbd", scores.softmax(-1), v[:, :, kv]))
    return torch.cat(heads, -1) @ weights["out"].T


def expected_of(case: Case) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The reference's output, and its input and weights, leaves with gradients: the same for every grid and kind."""
    return _expected_of(replace(case, tp=1, cp=1, kind="ulysses"))


@cache
def _expected_of(case: Case) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    x, gradient = case.inputs()
    x.requires_grad_()
    weights = case.model(alone(), alone("cp")).full_weights()
    for weight in weights.values():
        weight.requires_grad_()
    y = reference(case, x, weights)
    y.backward(gradient)
    return y.detach(), x, weights


def check_attention(case: Case, tp: GroupCommunicator, cp: GroupCommunicator, again: bool = False) -> None:
    """Compare this rank's part. ``again``: compute the layer a second time in the backward pass."""
    y, x, weights = expected_of(case)
    model = case.model(tp, cp)
    for name, weight in model.full_weights().items():
        assert torch.equal(weight, weights[name]), f"{case}: {name} starts differently"
    mine = split_sequence(x.detach(), cp=cp, tp=tp).requires_grad_()
    even = case.seq_len % (tp.size * cp.size) == 0
    seq_len = None if even else case.seq_len
    got = checkpoint(model, mine, seq_len, use_reentrant=False) if again else model(mine, seq_len)
    got.backward(split_sequence(case.inputs()[1], cp=cp, tp=tp))
    reduce_replicated_gradients(model, tp)
    assert_close(got.detach(), split_sequence(y, cp=cp, tp=tp), (case, "output"))
    assert x.grad is not None
    assert_close(mine.grad, split_sequence(x.grad, cp=cp, tp=tp), (case, "input's gradient"))
    for name, weight in weights.items():
        layer: Any = model.get_submodule(name)
        # The softmax over one key is 1, whatever the scores: then queries and keys have gradients of 0, but for rounding.
        beside = weights["v"].grad if case.seq_len == 1 and name in ("q", "k") else None
        assert_close(cp.all_reduce(layer.weight.grad), layer.shard(weight.grad), (case, f"{name}'s gradient"), beside)


HEADS = ((4, 4), (4, 2), (4, 1), (6, 2), (6, 3), (6, 6), (12, 3), (2, 1))
"""(query heads, key-value heads). 6 over tp 4 is uneven, 2 over 3 or 4 leaves ranks without heads."""


def attention_cases(kind: Kind) -> Iterator[Case]:
    for (tp, cp), (num_heads, num_kv_heads) in itertools.product(GRIDS, HEADS):
        if kind == "ulysses" or num_heads % tp == 0:
            case = (tp, cp, kind, num_heads, num_kv_heads)
            yield Case(*case, seq_len=24, batch=2, causal=True)
            yield Case(*case, seq_len=13, batch=1, causal=True)
            yield Case(*case, seq_len=13, batch=2, causal=False, rope_base=None)
    for tp, cp in GRIDS:
        case = (tp, cp, kind, 12, 3)
        yield Case(*case, seq_len=3, batch=1, causal=True)  # ranks without tokens
        yield Case(*case, seq_len=1, batch=1, causal=False)
        yield Case(*case, seq_len=26, batch=2, causal=True, dtype=torch.float32)
        yield Case(*case, seq_len=26, batch=2, causal=False, dtype=torch.float32)
        yield Case(*case, seq_len=26, batch=2, causal=True, dtype=torch.bfloat16)


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["ulysses", "tensor"])
def test_attention_is_that_of_one_process(emulated_cluster: ClusterFactory, kind: Kind) -> None:
    def job() -> int:
        start()
        grids, num_checked = Grids(), 0
        for case in attention_cases(kind):
            grid = grids(case.tp, case.cp)
            if grid is not None:
                check_attention(case, *grid)
                num_checked += 1
        grid = grids(2, 2)
        assert grid is not None
        check_attention(Case(2, 2, kind, 4, 2, seq_len=13, batch=2, causal=True), *grid, again=True)
        return num_checked

    num_cases = list(attention_cases(kind))
    num_without_three = sum(case.tp != 3 for case in num_cases)  # the fourth rank has no part in a group of three
    assert emulated_cluster(2, 2).run(job) == [len(num_cases)] * 3 + [num_without_three]


@pytest.mark.cluster
def test_the_comparison_can_fail(emulated_cluster: ClusterFactory) -> None:
    """Each of these is a mistake that one can make with the layers."""

    def job() -> None:
        start()
        grid = Grids()(2, 2)
        assert grid is not None
        case = Case(2, 2, "ulysses", 4, 2, seq_len=16, batch=1, causal=True)
        y, x, weights = expected_of(case)
        model = case.model(*grid)
        tp, cp = grid
        consecutive = x.detach().chunk(4)[dist.get_rank()]  # as if cp were not zigzag
        got = model(consecutive).detach()
        if dist.get_rank() != 0:  # the first rows are the first either way
            with pytest.raises(AssertionError, match="off by"):
                assert_close(got, y.chunk(4)[dist.get_rank()], "rows")
        model(split_sequence(x.detach(), cp=cp, tp=tp)).backward(split_sequence(case.inputs()[1], cp=cp, tp=tp))
        gradient = model.q.weight.grad
        assert gradient is not None
        with pytest.raises(AssertionError, match="off by"):  # not summed over tp
            assert_close(cp.all_reduce(gradient), weights["q"].grad, "q")

    emulated_cluster(2, 2).run(job)


# Linear layers


def check_linear(tp: GroupCommunicator, num_rows: int, sequence_parallel: bool, gather: bool, bias: bool) -> None:
    """A column-parallel layer, a nonlinearity and a row-parallel layer; or the first alone, with its output gathered."""
    what = (tp.size, num_rows, sequence_parallel, gather, bias)
    generator = seeded(2)
    options: Any = {
        "bias": bias,
        "dtype": torch.float64,
        "generator": generator,
        "sequence_parallel": sequence_parallel,
    }
    first = ColumnParallelLinear(5, 12, tp=tp, gather_output=gather, **options)
    second = RowParallelLinear(12, 7, tp=tp, **options)
    generator = seeded(2)
    plain = [
        ReplicatedLinear(i, o, tp=alone(), dtype=torch.float64, generator=generator) for i, o in ((5, 12), (12, 7))
    ]
    biases = [torch.randn(n, dtype=torch.float64, generator=generator) for n in (12, 7)]
    layers: Any = (first, second)
    for layer, whole, shift in zip(layers, plain, biases, strict=True):
        assert torch.equal(layer.full_weight(), whole.full_weight())
        layer.load_full(whole.full_weight(), shift if bias else None)
        assert torch.equal(layer.full_bias(), shift) if bias else layer.full_bias() is None
        shift.requires_grad_()
    x = torch.randn(num_rows, 2, 5, dtype=torch.float64, generator=generator).requires_grad_()
    hidden = F.linear(x, plain[0].weight, biases[0] if bias else None)
    expected = hidden if gather else F.linear(hidden.tanh(), plain[1].weight, biases[1] if bias else None)
    gradient = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    expected.backward(gradient)

    def mine(t: torch.Tensor) -> torch.Tensor:
        return t.detach().split(even_rows(num_rows, tp.size))[tp.rank] if sequence_parallel else t.detach()

    own = mine(x).clone().requires_grad_()
    total = num_rows if num_rows % tp.size else None
    got = first(own, total) if gather else second(first(own, total).tanh())
    got.backward(gradient if gather else mine(gradient))
    reduce_replicated_gradients(nn.ModuleList([first, second]), tp)
    assert_close(got.detach(), expected.detach() if gather else mine(expected), (what, "output"))
    assert x.grad is not None
    assert_close(own.grad, mine(x.grad), (what, "input's gradient"))
    for layer, whole, shift in list(zip(layers, plain, biases, strict=True))[: 1 if gather else 2]:
        assert_close(layer.weight.grad, layer.shard(whole.weight.grad), (what, "weight's gradient"))
        if bias:
            assert shift.grad is not None
            own_part = shift.grad.chunk(tp.size)[tp.rank] if layer is first else shift.grad
            assert_close(layer.bias.grad, own_part, (what, "bias's gradient"))


@pytest.mark.cluster
def test_linear_layers_helpers_and_replicated_gradients(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        start()
        grids = Grids()
        for size in (1, 2, 3, 4):
            grid = grids(size, 1)
            switches = itertools.product((12, 7, 2), (True, False), (True, False), (True, False))
            for num_rows, sequence_parallel, gather, bias in switches if grid else ():
                assert grid is not None
                check_linear(grid[0], num_rows, sequence_parallel, gather, bias)
        for (tp_size, cp_size), seq_len in itertools.product(GRIDS, (16, 13, 3, 0)):
            grid = grids(tp_size, cp_size)
            if grid is not None:
                check_sequences(*grid, seq_len)
        grid = grids(4, 1)
        assert grid is not None
        check_replicated(grid[0])
        check_meta(grid[0])

    emulated_cluster(2, 2).run(job)


def check_sequences(tp: GroupCommunicator, cp: GroupCommunicator, seq_len: int) -> None:
    where = positions(seq_len, cp=cp, tp=tp)
    assert torch.equal(merge_sequence(where, seq_len=seq_len, cp=cp, tp=tp), torch.arange(seq_len))
    whole = torch.arange(seq_len * 3.0).view(seq_len, 3)
    assert torch.equal(split_sequence(whole, cp=cp, tp=tp), whole[where])
    own = split_sequence(whole, cp=cp).requires_grad_()
    (zigzag_merge(own, cp, seq_len) * whole).sum().backward()  # every rank's loss counts
    assert own.grad is not None
    assert torch.equal(own.grad, cp.size * own.detach())


def check_replicated(tp: GroupCommunicator) -> None:
    """Norms and layers of two dtypes, copied and converted; a parameter without a gradient on some ranks."""
    norm, plain = nn.LayerNorm(3), nn.Linear(3, 3)
    mark_replicated(norm, "weight")
    norm = copy.deepcopy(norm)  # drops attributes of parameters: hence mark_replicated
    model: Any = nn.ModuleList([norm, ReplicatedLinear(3, 2, tp=tp, bias=True), plain])
    model[2].bias.reduce_over = ("tp",)
    model[1].double()
    marked: list[Any] = list(replicated_parameters(model))
    assert [id(p) for p in marked] == [id(p) for p in (model[0].weight, model[1].weight, model[1].bias, model[2].bias)]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, tp.rank + 1.0)
    if tp.rank == 1:
        model[1].bias.grad = None
    counting = [parameter.grad for parameter in marked]
    reduce_replicated_gradients(model, tp)
    for parameter, before in zip(marked, counting, strict=True):
        assert parameter.grad is before or before is None  # in place: optimizers and DDP keep views of them
        assert (parameter.grad == (8.0 if parameter is model[1].bias else 10.0)).all()
    assert (model[0].bias.grad == tp.rank + 1.0).all()
    assert list(replicated_parameters(model, "ep")) == []


def check_meta(tp: GroupCommunicator) -> None:
    made = ParallelAttention(8, 4, 2, tp=tp, kind="tensor", generator=seeded())
    empty = ParallelAttention(8, 4, 2, tp=tp, kind="tensor", device="meta")
    with pytest.raises(UsageError, match="to_empty"):
        empty.load_full(made.full_weights())
    empty.to_empty(device="cpu").load_full(made.full_weights())
    for parameter, other in zip(empty.parameters(), made.parameters(), strict=True):
        assert torch.equal(parameter, other)
    assert len(list(replicated_parameters(empty))) == 2  # k and v: two heads on four ranks


# Volumes


@pytest.mark.cluster
def test_attention_sends_what_megascale_s_equations_say(emulated_cluster: ClusterFactory) -> None:
    """Equation 1 is the forward pass of one rank. Equation 2 as printed is forward and backward: half of it is forward."""

    def job() -> dict[str, tuple[float, float]]:
        start()
        tp = GroupCommunicator(dist.new_group(backend="commlayer", group_desc="counted"), "tp")
        volumes = {}
        for name, (kind, heads, kv_heads) in MODELS.items():
            model = ParallelAttention(SHAPE["h"], heads, kv_heads, tp=tp, kind=kind)
            reset_stats()
            y = model(torch.randn(SHAPE["s"] // WORLD, SHAPE["b"], SHAPE["h"], requires_grad=True))
            forward = elements_sent()
            y.sum().backward()
            volumes[name] = forward, elements_sent()
        return volumes

    results = emulated_cluster(2, 2).run(job)
    first = results[0]
    assert results == [first] * WORLD
    b, s, h, n = SHAPE["b"], SHAPE["s"], SHAPE["h"], WORLD
    equation_1 = 2 * b * s * h * (n - 1) / n
    assert first["tensor"] == (equation_1, 2 * equation_1)
    for m in (1, 2):
        equation_2 = equation_1 * (2 + 2 / m) / n
        assert first[f"m={m}"] == (equation_2 / 2, equation_2)
    # m = 8 leaves one key-value head for four ranks: each sends it to all the others, as often as if there were four of them.
    copies = equation_1 * (2 + 2 / 8 * 4) / n
    assert first["m=8"] == (copies / 2, copies)


SHAPE = {"b": 2, "s": 16, "h": 32}
MODELS: dict[str, tuple[Kind, int, int]] = {
    "tensor": ("tensor", 8, 8),
    "m=1": ("ulysses", 8, 8),
    "m=2": ("ulysses", 8, 4),
    "m=8": ("ulysses", 8, 1),
}


@pytest.mark.cluster
def test_the_program_in_the_docs_prints_the_same_losses_on_any_number_of_ranks(
    emulated_cluster: ClusterFactory,
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "layers.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(# train_layers.py\n.*?)```", page, re.DOTALL)
    assert found is not None
    program = compile(found[1], "train_layers.py", "exec")

    def job() -> str:
        torch.set_num_threads(1)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(program, {"__name__": "__main__"})
        return printed.getvalue()

    losses = []
    for nodes, ranks_per_node in ((1, 2), (2, 2), (2, 4)):
        output = emulated_cluster(nodes, ranks_per_node).run(job)[0]
        losses.append([float(line.split()[-1]) for line in output.splitlines() if line.startswith("step")])
    assert len(losses[0]) == 3
    assert losses[0][2] < losses[0][0]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], abs=2e-5)


# Without processes


def test_even_rows() -> None:
    assert even_rows(7, 3) == (3, 2, 2)
    assert even_rows(2, 4) == (1, 1, 0, 0)
    assert even_rows(0, 2) == (0, 0)


def test_every_rank_gets_the_heads_it_needs_and_no_more() -> None:
    for (num_heads, num_kv_heads), parts in itertools.product(HEADS, (1, 2, 3, 4, 5)):
        shares = head_shares(num_heads, num_kv_heads, parts)
        assert [head for share in shares for head in share.q] == list(range(num_heads))
        for share in shares:
            used = [head * num_kv_heads // num_heads for head in share.q]
            assert list(share.kv) == sorted(set(used))
            assert list(share.uses) == [used.count(head) for head in share.kv]


@pytest.mark.parametrize("cp", [1, 2, 4, 5])
def test_zigzag_balances_the_pairs_that_are_computed(cp: int) -> None:
    seq_len = 40 * cp
    pairs = [(positions(seq_len, cp=pretended(cp, rank, "cp")) + 1).sum().item() for rank in range(cp)]
    assert set(pairs) == {sum(range(seq_len + 1)) / cp}
    assert sum(zigzag_rows(seq_len + 3, cp)) == seq_len + 3


def test_no_masked_chunk_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk of queries meets exactly the keys up to its end."""
    seen = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append((q.shape[2], k.shape[2]))
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    for rank in range(4):
        cp = pretended(4, rank, "cp")
        monkeypatch.setattr(cp, "all_gather", lambda x, rows: x.new_zeros(sum(rows), *x.shape[1:]))
        q = torch.zeros(10, 1, 2, 4)
        context_parallel_attention(q, q, q, cp=cp, seq_len=40)
    assert seen == [(5, 5), (5, 40), (5, 10), (5, 35), (5, 15), (5, 30), (5, 20), (5, 25)]


def test_rotation_depends_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64, generator=seeded())

    def score(i: int, j: int) -> torch.Tensor:
        return (apply_rope(q, torch.tensor([i]), 1e4) * apply_rope(k, torch.tensor([j]), 1e4)).sum()

    torch.testing.assert_close(score(3, 1), score(1003, 1001))
    assert not torch.isclose(score(3, 1), score(4, 1))


def test_a_linear_layer_that_refuses_names_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    with pytest.raises(UsageError, match=r"^rank 3: out_features=10 cannot be split"):
        ColumnParallelLinear(4, 10, tp=pretended(4))
    layer = ReplicatedLinear(2, 4, tp=alone())
    with pytest.raises(TensorError, match=r"^rank 3: expected a whole weight"):
        layer.load_full(torch.zeros(2, 2))
    with pytest.raises(TensorError, match=r"^rank 3: the layer has no bias"):
        layer.load_full(torch.zeros(4, 2), torch.zeros(4))
    with pytest.raises(UsageError, match=r"^rank 3: the layer is on the meta device"):
        layer.to("meta").load_full(torch.zeros(4, 2))


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(UsageError, match=r"out_features=10 cannot be split over tp=4; the nearest .*: 2 and 5"):
        ColumnParallelLinear(4, 10, tp=pretended(4))
    with pytest.raises(UsageError, match=r"in_features=6 cannot be split over tp=8; the nearest .*: 6"):
        RowParallelLinear(6, 4, tp=pretended(8))
    with pytest.raises(UsageError, match=r"num_heads=6 cannot be split over tp=4 .* kind='ulysses'"):
        ParallelAttention(12, 6, tp=pretended(4), kind="tensor")
    with pytest.raises(UsageError, match="num_heads=6 must be a multiple of num_kv_heads=4"):
        ParallelAttention(12, 6, 4, tp=alone())
    with pytest.raises(UsageError, match="give head_dim"):
        ParallelAttention(10, 4, tp=alone())
    with pytest.raises(UsageError, match="even head_dim, got 3"):
        ParallelAttention(12, 4, tp=alone(), rope_base=1e4)
    with pytest.raises(UsageError, match="kind must be one of ulysses, tensor, got 'ring'"):
        ParallelAttention(12, 4, tp=alone(), kind="ring")  # type: ignore[arg-type]
    with pytest.raises(TensorError, match=r"whole weight \[4, 2\], got shape \[2, 2\]"):
        ReplicatedLinear(2, 4, tp=alone()).load_full(torch.zeros(2, 2))
    with pytest.raises(TensorError, match=r"no bias, got one of shape \[4\]"):
        ReplicatedLinear(2, 4, tp=alone()).load_full(torch.zeros(4, 2), torch.zeros(4))
    with pytest.raises(
        TensorError, match=r"rank 1 of 2 in tp, .*: expected 3 rows of a sequence of 7, got shape \[4, 1"
    ):
        ParallelAttention(12, 4, tp=pretended(2, 1))(torch.zeros(4, 1, 12), seq_len=7)
    q = torch.zeros(2, 1, 4, 2)
    with pytest.raises(TensorError, match="4 query heads cannot share 3 key-value heads"):
        context_parallel_attention(q, q[:, :, :3], q[:, :, :3], cp=alone("cp"), seq_len=2)
