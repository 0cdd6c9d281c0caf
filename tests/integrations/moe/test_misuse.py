"""Faults on one rank, or in one mode, is told on all: no garbage, no wait until a timeout."""

from __future__ import annotations

import copy
import io
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from commlayer.collectives import GroupCommunicator
from commlayer.integrations import (
    FoldedMesh,
    GroupedExperts,
    MoELayer,
    Router,
    RouterConfig,
    TokenDispatcher,
    mark_experts,
)
from commlayer.integrations.gradients import gradient_axes
from commlayer.integrations.moe.agreement import number_of
from commlayer.profiles.errors import CommlayerError, DisagreementError, TensorError, UsageError
from commlayer.testing.plugin import ClusterFactory

HIDDEN = 8
ROUTER = RouterConfig(num_experts=4, top_k=2, aux_loss_coefficient=0.01)


def start() -> tuple[FoldedMesh, GroupCommunicator]:
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    mesh = FoldedMesh({"ep": dist.get_world_size()})
    return mesh, GroupCommunicator(mesh.group("ep"), "ep")


def tokens(count: int = 6) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank()))


# Dtypes


def one_autocast(autocast_ranks: Sequence[int], is_stepwise: bool) -> float:
    """All tokens go to rank 0's expert; the experts leave rows that are none as they are."""
    _, ep = start()
    weight = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(9))

    def experts(rows: torch.Tensor, *_: object) -> torch.Tensor:
        return rows @ weight if rows.shape[0] else rows

    dispatcher, x = TokenDispatcher(2, ep=ep), tokens()
    indices, weights = torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dist.get_rank() in autocast_ranks):
        handle = dispatcher.prepare(indices, like=x, weights=weights)
        if is_stepwise:
            rows, _ = dispatcher.dispatch(x, handle)
            out = dispatcher.combine(experts(rows), handle, weights)
        else:
            out, _ = dispatcher.run(x, handle, experts, weights)
    assert out.dtype == torch.float32
    return float((out - x @ weight).abs().max())


@pytest.mark.parametrize("is_stepwise", [False, True])
@pytest.mark.parametrize("autocast_ranks", [(0, 1), (0,), (1,)], ids=str)
def test_outputs_go_back_in_the_tokens_dtype(
    emulated_cluster: ClusterFactory, autocast_ranks: Sequence[int], is_stepwise: bool
) -> None:
    """Whatever dtype each rank's experts return: Gloo takes a shorter message for a longer one, and leaves the rest as it was."""
    errors = emulated_cluster(1, 2).run(one_autocast, autocast_ranks, is_stepwise)
    assert max(errors) < 0.1  # BF16's


# Modes of torch


def inference(dispatch: str) -> tuple[bool, bool]:
    mesh, _ = start()
    layer = MoELayer(HIDDEN, 12, ROUTER, mesh=mesh, dispatch=dispatch)  # type: ignore[arg-type]
    x = tokens()
    expected = layer(x).detach()
    with torch.inference_mode():
        same = torch.equal(layer(x), expected)
    layer(x.requires_grad_()).sum().backward()  # the group is as good as before
    return same, x.grad is not None


@pytest.mark.parametrize("dispatch", ["all_to_all", "all_gather", "auto"])
def test_inference_mode(emulated_cluster: ClusterFactory, dispatch: str) -> None:
    assert emulated_cluster(1, 2).run(inference, dispatch) == [(True, True)] * 2


def compiled() -> bool:
    """On rank 0, which takes a processor for half a minute. The other calls the layer as it is, and decides the same."""
    mesh, _ = start()
    layer, x = MoELayer(HIDDEN, 12, ROUTER, mesh=mesh), tokens()
    called = torch.compile(layer, backend="eager") if dist.get_rank() == 0 else layer
    return torch.equal(called(x), layer(x))


def test_compile_leaves_the_decision_alone(
    emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COMMLAYER_PROFILE", "auto")
    monkeypatch.setenv("COMMLAYER_CACHE", str(tmp_path))
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))  # ranks are forked: imports happen once
    assert all(emulated_cluster(1, 2).run(compiled, timeout_s=120))


# Refusals


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except CommlayerError as error:
        return f"{type(error).__name__}: {error}"
    return "went well"


def one_refuses(what: str) -> tuple[str, str]:
    """On rank 1, in a layer whose router exchanges something before counts are; then all is well again."""
    mesh, ep = start()
    config = ROUTER
    options: dict[str, Any] = {"balance": ep}
    if what == "sequence":
        config = RouterConfig(num_experts=4, top_k=2, capacity_factor=1.0, drop_scope="sequence")
        options = {"sequence": ep}
    layer = MoELayer(HIDDEN, 12, config, mesh=mesh, **options)
    x = tokens()
    bad = x * float("nan")
    if what == "hidden":
        bad = torch.zeros(6, HIDDEN + 1)
    if what == "scalar":
        bad = torch.zeros(())
    said = refused(lambda: layer(bad if dist.get_rank() == 1 else x))
    layer(x).sum().backward()
    return said, refused(lambda: layer(x))


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("balance", "NaN or infinite"),
        ("sequence", "NaN or infinite"),
        ("hidden", rf"expected tokens \[tokens, {HIDDEN}\]"),
        ("scalar", rf"expected tokens \[tokens, {HIDDEN}\]"),
    ],
)
def test_what_one_rank_refuses_all_hear_of(emulated_cluster: ClusterFactory, what: str, reason: str) -> None:
    found = emulated_cluster(1, 2).run(one_refuses, what)
    (other, then), (own, then_own) = found
    assert own.startswith("TensorError")
    assert re.search(reason, own)
    assert other.startswith("DisagreementError")
    assert "refused" in other
    assert then == then_own == "went well"


def one_of_four_refuses() -> tuple[str, str]:
    """The ranks of another ep group hear of it through what the router exchanges."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    mesh = FoldedMesh({"ep": 2})
    layer = MoELayer(HIDDEN, 12, ROUTER, mesh=mesh, balance=GroupCommunicator(dist.group.WORLD, "dp"))
    x = tokens()
    said = refused(lambda: layer(x.double() * float("nan") if dist.get_rank() == 1 else x))
    return said.split(":")[0], refused(lambda: layer(x))


def test_a_wider_balance_group_hears_of_a_refusal(emulated_cluster: ClusterFactory) -> None:
    found = emulated_cluster(2, 2).run(one_of_four_refuses)
    assert [said for said, _ in found] == ["DisagreementError", "TensorError", "DisagreementError", "DisagreementError"]
    assert {then for _, then in found} == {"went well"}


def other_experts() -> str:
    _, ep = start()
    indices = torch.zeros(3, 1, dtype=torch.int64)
    said = [refused(lambda: TokenDispatcher(2 + dist.get_rank(), ep=ep).prepare(indices)) for _ in range(2)]
    assert said[0] == said[1]  # a second time too
    assert refused(lambda: TokenDispatcher(2, ep=ep).prepare(indices)) == "went well"
    return said[0]


def test_another_number_of_experts(emulated_cluster: ClusterFactory) -> None:
    for said in emulated_cluster(1, 2).run(other_experts):
        assert said.startswith("DisagreementError: ranks disagree on the number of experts: rank 0 says 2, rank 1 3")


def no_tensor() -> str:
    _, ep = start()
    dispatcher = TokenDispatcher(2, ep=ep)
    indices: Any = torch.zeros(3, 1, dtype=torch.int64) if dist.get_rank() == 0 else [[0], [1], [1]]
    try:
        dispatcher.prepare(indices)
    except Exception as error:  # noqa: BLE001  whose type is asked for
        return type(error).__name__
    return "went well"


def test_indices_that_are_no_tensor(emulated_cluster: ClusterFactory) -> None:
    assert emulated_cluster(1, 2).run(no_tensor)[0] == DisagreementError.__name__


def weights_on_one_rank() -> bool:
    _, ep = start()
    dispatcher, x = TokenDispatcher(2, ep=ep, kind="all_gather"), tokens()
    weights = torch.full((6, 1), 2.0, requires_grad=dist.get_rank() == 0)
    handle = dispatcher.prepare(torch.zeros(6, 1, dtype=torch.int64), like=x, weights=weights)
    rows, _ = dispatcher.dispatch(x, handle)
    out = dispatcher.combine(rows, handle, weights)
    out.sum().backward()
    if dist.get_rank() != 0:
        return weights.grad is None
    return weights.grad is not None and torch.allclose(weights.grad[:, 0], x.sum(1), atol=1e-5)


def test_weights_that_need_a_gradient_on_one_rank(emulated_cluster: ClusterFactory) -> None:
    assert all(emulated_cluster(1, 2).run(weights_on_one_rank))


# One process


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights_at": "expert"}, "weights_at must be combine or experts, got 'expert'"),
        ({"tokens": "replicate"}, "tokens must be sharded or replicated, got 'replicate'"),
        ({"mesh": {"ep": 1}}, "mesh must be a FoldedMesh"),
        ({"chunks": True}, "chunks must be auto"),
        ({"shared_width": -1}, "shared_width must be a whole number, 0 or more, got -1"),
        ({"dispatch": "a2a"}, "dispatch of a layer"),
    ],
    ids=str,
)
def test_options_that_are_none(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        MoELayer(HIDDEN, 12, ROUTER, **options)


@pytest.mark.parametrize(("hidden", "width"), [(0, 4), (4, 0), (4, -2)])
def test_experts_of_no_size(hidden: int, width: int) -> None:
    with pytest.raises(UsageError, match="1 or more"):
        GroupedExperts(hidden, width)


def test_padded_rows_in_chunks_are_refused_at_once() -> None:
    padded = RouterConfig(num_experts=4, top_k=2, capacity_factor=1.0, pad_to_capacity=True)
    with pytest.raises(UsageError, match="in one chunk"):
        MoELayer(HIDDEN, 12, padded, chunks=4)


def test_tokens_of_another_dtype() -> None:
    layer = MoELayer(HIDDEN, 12, ROUTER)
    with pytest.raises(TensorError, match=r"float32 got tokens of torch\.float64"):
        layer(torch.randn(3, HIDDEN, dtype=torch.float64))


@pytest.mark.parametrize(
    "returned", [None, torch.zeros(6, HIDDEN + 1), torch.zeros(5, HIDDEN)], ids=["none", "wide", "few"]
)
def test_experts_that_return_something_else(returned: torch.Tensor | None) -> None:
    dispatcher = TokenDispatcher(1, ep=GroupCommunicator(None, "ep"))
    x = torch.zeros(6, HIDDEN)
    handle = dispatcher.prepare(torch.zeros(6, 1, dtype=torch.int64))
    with pytest.raises(TensorError, match="expected as many, and as wide"):
        dispatcher.run(x, handle, lambda *_: returned)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"indices": torch.zeros(6, dtype=torch.int64)}, "indices must be"),
        ({"indices": torch.full((6, 1), 2)}, "indices from 2 to 2"),
        ({"capacity": 5}, "an expert has 6 choices"),
        ({"like": torch.zeros(5, HIDDEN)}, r"indices of \[6, 1\] for tokens \[5, 8\]: expected"),
        ({"weights": torch.zeros(6, 2)}, "weights must be"),
    ],
    ids=["dimensions", "range", "capacity", "tokens", "weights"],
)
def test_what_a_rank_refuses_names_it(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], said: str) -> None:
    dispatcher = TokenDispatcher(1, ep=GroupCommunicator(None, "ep"))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda *_: 3)
    with pytest.raises(TensorError, match=f"^rank 3: {said}"):
        dispatcher.prepare(**{"indices": torch.zeros(6, 1, dtype=torch.int64), **change})
    handle = dispatcher.prepare(torch.zeros(6, 1, dtype=torch.int64))
    with pytest.raises(TensorError, match=r"^rank 3: expected the 6 tokens of the handle"):
        dispatcher.dispatch(torch.zeros(5, HIDDEN), handle)


def test_losses_are_there_for_logs() -> None:
    layer = MoELayer(HIDDEN, 12, ROUTER)
    layer(torch.randn(6, HIDDEN))
    assert layer.routing is not None
    assert set(layer.routing.losses) == {"aux"}
    assert not layer.routing.losses["aux"].requires_grad


def test_a_communicator_is_copied_as_itself() -> None:
    group = GroupCommunicator(None, "ep")
    assert copy.copy(group) is copy.deepcopy(group) is group


def test_a_group_is_not_saved_with_a_module() -> None:
    with pytest.raises(UsageError, match=r"state_dict\(\)"):
        torch.save(MoELayer(HIDDEN, 12, ROUTER), io.BytesIO())


def test_a_router_that_refuses_does_so_last() -> None:
    """The router has taken part by then in what its ranks exchange, and leaves none of them waiting."""
    calls = []

    class Watched(GroupCommunicator):
        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            calls.append((x.shape, x.dtype))
            return x.clone()

    router = Router(ROUTER, HIDDEN, balance=Watched(None, "ep"))
    router(torch.randn(6, HIDDEN))
    expected = list(calls)
    for bad in (torch.full((6, HIDDEN), float("nan")), torch.zeros(6, HIDDEN + 1), torch.zeros(6, HIDDEN).long()):
        calls.clear()
        with pytest.raises(TensorError):
            router(bad)
        assert calls == expected != []


# Marks


def is_marked(module: nn.Module) -> bool:
    axes = gradient_axes(module, None)
    return not axes["dp_cp"] and len(axes["edp"]) == len(list(module.parameters()))


def test_experts_stay_marked() -> None:
    layer = GroupedExperts(HIDDEN, 12, count=2)
    for changed in (
        copy.deepcopy(layer),
        copy.deepcopy(layer).to(torch.bfloat16),
        copy.deepcopy(layer).to("meta").to_empty(device="cpu"),
    ):
        assert all(getattr(parameter, "is_expert", False) for parameter in changed.parameters())
    loaded = copy.deepcopy(layer)
    loaded.load_state_dict(copy.deepcopy(layer).state_dict(), assign=True)
    assert all(getattr(parameter, "is_expert", False) for parameter in loaded.parameters())


def test_the_number_of_a_setup_is_an_int64_however_much_is_asked_for() -> None:
    """A wire format, eight chunks and every flag: each part still makes a difference."""
    parts = [(1 << 18) - 1, 3, 1, *[1] * 8, 1, 1, 1, 1, 1]
    found = {number_of([*parts[:place], parts[place] - 1, *parts[place + 1 :]]) for place in range(len(parts))}
    found.add(number_of(parts))
    assert len(found) == len(parts) + 1
    assert torch.tensor(sorted(found)).dtype == torch.int64


def test_what_is_added_to_experts_belongs_to_them() -> None:
    layer = GroupedExperts(HIDDEN, 12, count=2)
    layer.adapter = nn.Linear(HIDDEN, HIDDEN)
    assert is_marked(layer)


def test_own_experts_stay_marked() -> None:
    layer = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    assert not is_marked(layer)
    mark_experts(layer)
    assert is_marked(layer)
    assert is_marked(copy.deepcopy(layer))
    assert is_marked(nn.utils.parametrizations.weight_norm(copy.deepcopy(layer)[0]))
    layer.load_state_dict({name: torch.zeros_like(value) for name, value in layer.state_dict().items()}, assign=True)
    assert all(getattr(parameter, "is_expert", False) for parameter in layer.parameters())


def test_python_m_commlayer() -> None:
    found = subprocess.run([sys.executable, "-m", "commlayer", "--version"], capture_output=True, text=True, check=True)
    assert "commlayer" in found.stdout
