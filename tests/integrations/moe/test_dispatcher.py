"""The dispatcher against the mixture's definition, one token after another, forward and backward."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference_moe import reference_combine, reference_moe

import commlayer
from commlayer.collectives import GroupCommunicator
from commlayer.integrations.moe.dispatcher import TokenDispatcher
from commlayer.integrations.moe.experts import GroupedExperts
from commlayer.integrations.moe.row_maps import combine_rows, gather_rows, make_row_map
from commlayer.profiles.errors import GroupError, TensorError, UsageError
from commlayer.testing.plugin import ClusterFactory

HIDDEN, WIDTH = 8, 12


@dataclass(frozen=True)
class Case:
    """``tokens`` of each rank, in turn; ``route``: how they choose among ``experts``."""

    tokens: tuple[int, ...] = (5, 3)
    experts: int = 4
    top_k: int = 2
    route: str = "random"
    kind: str = "all_to_all"
    chunks: int = 1
    capacity: bool = False
    weights_travel: bool = False

    def routes(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, H], indices [T, K], weights [T, K] of a rank."""
        generator = torch.Generator().manual_seed(rank)
        num_tokens = self.tokens[rank % len(self.tokens)]
        x = torch.randn(num_tokens, HIDDEN, generator=generator)
        scores = torch.rand(num_tokens, self.experts, generator=generator)
        if self.route == "one hot":
            scores[:, 0] += 2
            scores[:, 1] += 1
        weights, indices = scores.topk(self.top_k)
        if self.route == "dropped":
            indices = torch.where(torch.rand(indices.shape, generator=generator) < 0.4, -1, indices)
        elif self.route == "all dropped":
            indices = torch.full_like(indices, -1)
        return x, indices, torch.where(indices < 0, 0.0, weights)


def cases() -> Iterator[Case]:
    """Cases that may go wrong, in every way of moving it."""
    ways: list[dict[str, Any]] = [
        {},
        {"chunks": 2},
        {"chunks": 8},
        {"kind": "all_gather"},
        {"capacity": True},
        {"weights_travel": True, "chunks": 4},
        {"weights_travel": True, "kind": "all_gather"},
    ]
    shapes: list[dict[str, Any]] = [
        {},
        {"tokens": (0, 4)},
        {"tokens": (0,)},
        {"tokens": (1, 0, 0)},
        {"route": "one hot", "tokens": (8, 2)},
        {"route": "dropped"},
        {"route": "all dropped"},
        {"top_k": 1},
        {"top_k": 4},  # k = E
        {"experts": 5, "top_k": 3},  # no EP but 1 and 5 divides them
    ]
    for shape, way in itertools.product(shapes, ways):
        yield Case(**shape, **way)


Expected = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], GroupedExperts]


def expected(case: Case, world: int) -> Expected:
    """Outputs and gradients of x and of the weights for each rank, and the experts with theirs: the same in whatever way
    tokens go."""
    return _expected(Case(case.tokens, case.experts, case.top_k, case.route), world)


@functools.cache
def _expected(case: Case, world: int) -> Expected:
    experts = GroupedExperts(HIDDEN, WIDTH, count=case.experts)
    triples = list(zip(experts.w_gate.unbind(), experts.w_up.unbind(), experts.w_down.unbind(), strict=True))
    outputs, of_x, of_weights = [], [], []
    for rank in range(world):
        x, indices, weights = case.routes(rank)
        x.requires_grad_()
        weights.requires_grad_()
        out = reference_moe(x, indices, weights, triples)
        out.backward(gradient_of(out, rank))
        outputs.append(out.detach())
        of_x.append(x.grad if x.grad is not None else torch.zeros_like(x))
        of_weights.append(weights.grad if weights.grad is not None else torch.zeros_like(weights))
    return outputs, of_x, of_weights, experts


def gradient_of(out: torch.Tensor, rank: int) -> torch.Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(100 + rank))


def near(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(got, wanted, rtol=1e-5, atol=1e-5)


def check(
    case: Case, ep: GroupCommunicator, etp: GroupCommunicator | None, both: GroupCommunicator | None
) -> list[str]:
    """The differences from the reference on this rank."""
    everyone = both or ep
    dispatcher = TokenDispatcher(
        case.experts,
        ep=ep,
        etp=etp,
        etp_ep=both,
        kind=case.kind,
        chunks=case.chunks,
        weights_travel=case.weights_travel,
    )
    grid = dispatcher.grid
    experts = GroupedExperts(
        HIDDEN,
        WIDTH,
        first=grid.first_local_expert,
        count=grid.num_local_experts,
        etp_rank=grid.etp.rank,
        etp_size=grid.etp.size,
    )
    x, indices, weights = case.routes(everyone.rank)
    x.requires_grad_()
    weights.requires_grad_()
    capacity = max(case.tokens) if case.capacity else None
    handle = dispatcher.prepare(indices, capacity=capacity)
    before = gathers(dispatcher)
    out, _ = dispatcher.run(x, handle, experts, weights)
    out.backward(gradient_of(out, everyone.rank))
    outputs, of_x, of_weights, reference = expected(case, everyone.size)
    wrong = [] if gathers(dispatcher) == before else ["counts were exchanged again"]
    wrong += [] if near(out, outputs[everyone.rank]) else ["forward"]
    assert x.grad is not None
    assert weights.grad is not None
    wrong += [] if near(x.grad, of_x[everyone.rank]) else ["gradient of x"]
    kept = indices >= 0
    wrong += [] if near(weights.grad[kept], of_weights[everyone.rank][kept]) else ["gradient of the weights"]
    for name, parameter in experts.named_parameters():
        full = getattr(reference, name)
        mine = full.grad if full.grad is not None else torch.zeros_like(full)
        mine = mine[grid.first_local_expert : grid.first_local_expert + grid.num_local_experts]
        shard = 2 if name == "w_down" else 1
        mine = mine.chunk(grid.etp.size, shard)[grid.etp.rank]
        assert parameter.grad is not None, name
        wrong += [] if near(parameter.grad, mine) else [f"gradient of {name}"]
    return [f"rank {everyone.rank}, {case}: {what}" for what in wrong]


def gathers(dispatcher: TokenDispatcher) -> int:
    """all_gathers so far, where only counts travel by them."""
    gathers_tokens = dispatcher.decision is not None and dispatcher.decision.kind == "all_gather"
    if gathers_tokens or dispatcher.grid.etp.size > 1:
        return 0
    calls = [call for group in commlayer.stats()["groups"] for call in group["calls"]]
    return sum(call["calls"] for call in calls if call["collective"].startswith("all_gather"))


def alone() -> GroupCommunicator:
    return GroupCommunicator(None, "ep")


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_one_rank(case: Case) -> None:
    assert check(case, alone(), None, None) == []


def run_all(grid: tuple[int, int]) -> list[str]:
    """Every case over a grid of EP × ETP ranks, ETP innermost."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    ep_size, etp_size = grid
    ranks = torch.arange(ep_size * etp_size).view(ep_size, etp_size)
    columns = [dist.new_group(column.tolist()) for column in ranks.unbind(1)]
    lines = [dist.new_group(line.tolist()) for line in ranks.unbind(0)]
    rank = dist.get_rank()
    ep = GroupCommunicator(columns[rank % etp_size], "ep")
    etp = GroupCommunicator(lines[rank // etp_size], "ep") if etp_size > 1 else None
    both = GroupCommunicator(dist.group.WORLD, "ep") if etp_size > 1 else None
    wrong = []
    for case in cases():
        if case.experts >= ep_size:
            wrong += check(case, ep, etp, both)
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("grid", [(3, 1), (4, 1), (2, 2), (1, 3)], ids=str)
def test_several_ranks(emulated_cluster: ClusterFactory, grid: tuple[int, int]) -> None:
    world = grid[0] * grid[1]
    nodes = 2 if world % 2 == 0 else 1
    for case in cases():
        expected(case, world)  # before the fork: once, not in each rank
    found = emulated_cluster(nodes=nodes, ranks_per_node=world // nodes).run(run_all, grid)
    assert [line for lines in found for line in lines] == []


def test_counts_are_exchanged_once(emulated_cluster: ClusterFactory) -> None:
    """The counter that the cases rest on does count. Before a group's first: the number of experts."""

    def job() -> list[int]:
        dist.init_process_group("commlayer")
        dispatcher = TokenDispatcher(2, ep=GroupCommunicator(dist.group.WORLD, "ep"))
        counted = [gathers(dispatcher)]
        for _ in range(3):
            dispatcher.prepare(torch.zeros(2, 1, dtype=torch.int64))
            counted.append(gathers(dispatcher))
        return counted

    assert emulated_cluster(nodes=1, ranks_per_node=2).run(job) == [[0, 2, 3, 4]] * 2


def identity(rows: torch.Tensor, *_: object) -> torch.Tensor:
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("top_k", [1, 2, 4, 8])
def test_identity_returns_every_bit(top_k: int, dtype: torch.dtype) -> None:
    """Σ_k x/k for k a power of two, whatever x is: tiny, huge, both zeros."""
    generator = torch.Generator().manual_seed(top_k)
    x = torch.randn(300, 16, generator=generator, dtype=torch.float64) * 10.0 ** torch.randint(
        -30, 30, (300, 16), generator=generator
    )
    x[0, :4] = torch.tensor([0.0, -0.0, 1e-37, -3e38])
    x = x.to(dtype)
    indices = torch.rand(300, 8, generator=generator).topk(top_k).indices
    weights = torch.full((300, top_k), 1.0 / top_k, dtype=dtype)
    for chunks in (1, 4):
        dispatcher = TokenDispatcher(8, ep=alone(), chunks=chunks)
        out, _ = dispatcher.run(x, dispatcher.prepare(indices), identity, weights)
        assert torch.equal(out.view(torch.uint8), x.view(torch.uint8))


def test_a_gradient_that_autograd_does_not_see_may_be_told() -> None:
    dispatcher, indices = TokenDispatcher(2, ep=alone()), torch.zeros(3, 1, dtype=torch.int64)
    x = torch.ones(3, HIDDEN, requires_grad=True)
    with torch.no_grad():
        assert not dispatcher.prepare(indices, like=x).needs_gradient
        assert dispatcher.prepare(indices, like=x, needs_gradient=True).needs_gradient
    assert dispatcher.prepare(indices, like=x).needs_gradient
    assert not dispatcher.prepare(indices, like=x, needs_gradient=False).needs_gradient


@pytest.mark.parametrize("top_k", [1, 2, 3, 5])
def test_sums_are_the_references_bit_for_bit(top_k: int) -> None:
    generator = torch.Generator().manual_seed(top_k)
    x = torch.randn(50, 16, generator=generator)
    weights, indices = torch.rand(50, 6, generator=generator).topk(top_k)
    scales = torch.randn(6, generator=generator)

    def experts(rows: torch.Tensor, counts: Any, _: object) -> torch.Tensor:
        return torch.cat([part * scale for part, scale in zip(rows.split(list(counts)), scales, strict=True)])

    dispatcher = TokenDispatcher(6, ep=alone(), chunks=2)
    out, _ = dispatcher.run(x, dispatcher.prepare(indices), experts, weights)
    for token in range(50):
        choices = [x[token] * scales[expert] for expert in indices[token]]
        assert torch.equal(out[token], reference_combine(choices, list(weights[token])))


def test_several_ranks_return_the_same_bits(emulated_cluster: ClusterFactory) -> None:
    """Identity experts over EP 4: what comes back is x, and the sums do not depend on where the experts are."""

    def job() -> list[bool]:
        dist.init_process_group("commlayer")
        ep = GroupCommunicator(dist.group.WORLD, "ep")
        generator = torch.Generator().manual_seed(ep.rank)
        x = torch.randn(40 + ep.rank, 16, generator=generator)
        weights, indices = torch.rand(x.shape[0], 8, generator=generator).topk(4)
        same = []
        for chunks in (1, 8):
            dispatcher = TokenDispatcher(8, ep=ep, kind="all_to_all", chunks=chunks)
            local = TokenDispatcher(8, ep=alone())
            out, _ = dispatcher.run(x, dispatcher.prepare(indices), identity, torch.full_like(weights, 0.25))
            same.append(torch.equal(out, x))
            out, _ = dispatcher.run(x, dispatcher.prepare(indices), identity, weights)
            same.append(torch.equal(out, local.run(x, local.prepare(indices), identity, weights)[0]))
        return same

    assert emulated_cluster(nodes=2, ranks_per_node=2).run(job) == [[True] * 4] * 4


@pytest.mark.parametrize("kind", ["all_to_all", "all_gather"])
def test_weights_of_the_rows_that_experts_get(kind: str) -> None:
    """Applied to the rows and not in the combine they give the same sums, and the same gradients; what is beside is called."""
    x, indices, chosen = Case(route="dropped", tokens=(7,)).routes(0)
    dispatcher, called = TokenDispatcher(4, ep=alone(), kind=kind), list[str]()
    found = []
    for by_experts in (False, True):
        weights = chosen.clone().requires_grad_()
        handle = dispatcher.prepare(indices, like=x, weights=weights)
        rows, _ = dispatcher.dispatch(x, handle, beside=lambda: called.append("out"))
        rows = rows * dispatcher.dispatch_weights(weights, handle) if by_experts else rows
        out = dispatcher.combine(rows, handle, None if by_experts else weights, beside=lambda: called.append("home"))
        out.backward(gradient_of(out, 0))
        found.append((out.detach(), weights.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert near(*(torch.as_tensor(gradient) for _, gradient in found))
    assert called == ["out", "home"] * 2
    dispatches = [each for each in commlayer.stats()["dispatches"] if each["dispatcher"] == "TokenDispatcher"]
    assert f"{kind} × 1" in {each["kind"] for each in dispatches}


def test_gradients_are_the_derivatives() -> None:
    indices = torch.tensor([[0, 2], [2, -1], [1, 0]])
    rows = make_row_map(indices, 3)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: combine_rows(gather_rows(x, rows) ** 2, w, rows), (x, weights))
    padded = make_row_map(indices, 3, capacity=2)
    assert torch.autograd.gradcheck(lambda x, w: combine_rows(gather_rows(x, padded) ** 2, w, padded), (x, weights))


def test_infinite_rows_of_dropped_choices_stay_out() -> None:
    rows = make_row_map(torch.tensor([[0, -1], [1, 0]]), 2)
    y = torch.tensor([[float("inf")], [1.0], [2.0]])
    out = combine_rows(y, torch.tensor([[1.0, 0.0], [0.5, 0.5]]), rows)
    assert out.tolist() == [[float("inf")], [1.5]]
    y[0] = 4.0
    y[2] = float("nan")  # the row of token 1's first choice
    assert combine_rows(y, None, rows)[0].tolist() == [4.0]


def test_a_handle_is_for_one_dispatch_and_one_combine() -> None:
    dispatcher = TokenDispatcher(2, ep=alone())
    indices, x = torch.tensor([[0], [1], [0]]), torch.randn(3, 4)
    handle = dispatcher.prepare(indices)
    with pytest.raises(UsageError, match="never went"):
        dispatcher.combine(x, handle)
    rows, counts = dispatcher.dispatch(x, handle)
    assert counts == (2, 1)
    assert torch.equal(dispatcher.combine(rows, handle), x)
    with pytest.raises(UsageError, match="have come back already"):
        dispatcher.combine(rows, handle)
    again, _ = dispatcher.dispatch(x, handle)  # recompute
    assert torch.equal(again, rows)
    assert torch.equal(dispatcher.combine(again, handle), x)


def test_bad_input() -> None:
    dispatcher = TokenDispatcher(2, ep=alone())
    indices, x, weights = torch.tensor([[0], [1], [0]]), torch.randn(3, 4), torch.ones(3, 1)
    handle = dispatcher.prepare(indices)
    with pytest.raises(UsageError, match="another dispatcher"):
        TokenDispatcher(2, ep=alone()).dispatch(x, handle)
    with pytest.raises(TensorError, match=r"indices from 0 to 2: expected 0 to 1"):
        dispatcher.prepare(torch.tensor([[0], [2]]))
    with pytest.raises(TensorError, match=r"indices from -2"):
        dispatcher.prepare(torch.tensor([[-2]]))
    with pytest.raises(TensorError, match=r"\[tokens, choices\] of int64"):
        dispatcher.prepare(indices.to(torch.int32))
    with pytest.raises(TensorError, match="3 tokens of the handle"):
        dispatcher.dispatch(x[:2], handle)
    with pytest.raises(TensorError, match="NaN or Inf"):
        dispatcher.run(x, handle, identity, weights * float("nan"))
    looked_at = dispatcher.prepare(indices, like=x, weights=weights)
    with pytest.raises(TensorError, match="NaN or Inf"):  # other weights than those
        dispatcher.run(x, looked_at, identity, weights * float("nan"))
    with pytest.raises(TensorError, match=r"weights must be \[3, 1\]"):
        dispatcher.run(x, handle, identity, weights[:, 0])
    with pytest.raises(TensorError, match="an expert has 2 choices and a capacity of 1"):
        dispatcher.prepare(indices, capacity=1)
    with pytest.raises(TensorError, match="hidden size 8 got rows"):
        dispatcher.run(x, handle, GroupedExperts(8, 4, count=2), weights)
    with pytest.raises(UsageError, match="some ranks would have none"):
        TokenDispatcher(0, ep=alone())
    with pytest.raises(UsageError, match="chunks must be"):
        TokenDispatcher(2, ep=alone(), chunks=3)
    with pytest.raises(UsageError, match=r"kind \(dispatch of a layer\) must be"):
        TokenDispatcher(2, ep=alone(), kind="ring")
    with pytest.raises(UsageError, match="nearest that does is 3"):
        GroupedExperts(8, 6, etp_size=4)
    several = TokenDispatcher(2, ep=alone(), chunks=2)
    with pytest.raises(UsageError, match=r"use run\(\)"):
        several.dispatch(x, several.prepare(indices))


def test_groups_that_are_no_grid(emulated_cluster: ClusterFactory) -> None:
    def job() -> str:
        dist.init_process_group("commlayer")
        world = GroupCommunicator(dist.group.WORLD, "ep")
        with pytest.raises(GroupError) as caught:
            TokenDispatcher(2, ep=world, etp=world, etp_ep=world)
        alike = TokenDispatcher(2, ep=alone(), etp=GroupCommunicator(dist.group.WORLD, "ep"), etp_ep=world)
        object.__setattr__(alike.grid.etp, "rank", 0)
        with pytest.raises(GroupError, match="of one mapping"):
            alike.prepare(torch.zeros(1, 1, dtype=torch.int64))
        return str(caught.value)

    found = emulated_cluster(nodes=1, ranks_per_node=2).run(job)
    assert found == ["EP 2 × ETP 2 must be the size of their common group, which is 2"] * 2


def refusals() -> dict[str, list[str]]:
    """The error that each rank hears when rank 0 brings something else, and whether the next dispatch goes well."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    ep = GroupCommunicator(dist.group.WORLD, "ep")
    first = ep.rank == 0
    dispatcher = TokenDispatcher(2, ep=ep, kind="all_to_all", chunks=1)
    other = TokenDispatcher(2, ep=ep, kind="all_to_all", chunks=2)
    indices, x, weights = torch.tensor([[0], [1]]), torch.ones(2, 4), torch.ones(2, 1)

    def sound() -> bool:
        out, _ = dispatcher.run(x, dispatcher.prepare(indices, like=x), identity, weights)
        return torch.equal(out, x)

    attempts: dict[str, Any] = {
        "out of range": lambda: dispatcher.prepare(indices + 5 if first else indices),
        "NaN weights": lambda: dispatcher.prepare(indices, weights=weights * float("nan") if first else weights),
        "hidden size": lambda: dispatcher.prepare(indices, like=x[:, :3] if first else x),
        "dtype": lambda: dispatcher.prepare(indices, like=x.double() if first else x),
        "choices": lambda: dispatcher.prepare(indices.expand(2, 2) if first else indices),
        "capacity": lambda: dispatcher.prepare(indices, capacity=2 if first else None),
        "way": lambda: (other if first else dispatcher).prepare(indices),
        "tokens": lambda: dispatcher.prepare(indices, like=x[:1] if first else x),
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            found[name] = ["nothing"]
        except Exception as error:  # noqa: BLE001  what it is, is the result
            found[name] = [type(error).__name__, str(error)]
        found[name].append(str(sound()))
    return found


def test_what_one_rank_refuses_no_rank_waits_for(emulated_cluster: ClusterFactory) -> None:
    zero, one = emulated_cluster(nodes=1, ranks_per_node=2).run(refusals)
    for name in ("out of range", "NaN weights", "tokens"):
        assert zero[name][0] == "TensorError", zero[name]
        assert one[name][0] == "DisagreementError", one[name]
        assert "rank 0 refused" in one[name][1]
    for name in ("hidden size", "dtype", "choices", "capacity", "way"):
        assert zero[name][0] == one[name][0] == "DisagreementError", (name, zero[name], one[name])
        assert f"disagree on the {name}" in one[name][1]
    assert all(found[name][-1] == "True" for found in (zero, one) for name in found)


def gradient_on_one_rank() -> list[bool]:
    """Only rank 0's tokens need a gradient; rank 1 has none at all, and no tokens."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    ep = GroupCommunicator(dist.group.WORLD, "ep")
    found = []
    for kind in ("all_to_all", "all_gather"):
        dispatcher = TokenDispatcher(2, ep=ep, kind=kind)
        x = torch.ones(3 if ep.rank == 0 else 0, 4, requires_grad=ep.rank == 0)
        indices, weights = torch.zeros(x.shape[0], 1, dtype=torch.int64) + 1, torch.ones(x.shape[0], 1)
        handle = dispatcher.prepare(indices, like=x, weights=weights)
        out, _ = dispatcher.run(x, handle, lambda rows, *_: rows * 2, weights)
        out.sum().backward()
        found.append(ep.rank == 1 or (x.grad is not None and bool(x.grad.eq(2).all())))
    return found


def test_a_gradient_on_one_rank_comes_back(emulated_cluster: ClusterFactory) -> None:
    assert emulated_cluster(nodes=1, ranks_per_node=2).run(gradient_on_one_rank) == [[True, True]] * 2


def test_gradients_of_a_group_of_one_are_not_shared() -> None:
    """clip_grad_norm_ would scale them twice."""
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    (alone().all_gather(a) + alone().all_gather(b)).backward(torch.ones(2))
    assert a.grad is not None
    assert b.grad is not None
    assert a.grad.data_ptr() != b.grad.data_ptr()
