"""Tokens that several ranks hold: MoNTA's plans and shares of the tokens, against the mixture's definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference_moe import reference_moe
from synthetic_profiles import synthetic_profile

from commlayer.collectives import GroupCommunicator
from commlayer.communicator import Communicator
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.dispatcher import TokenDispatcher
from commlayer.integrations.moe.experts import GroupedExperts
from commlayer.integrations.moe.replicated_tokens import ReplicatedDispatcher, run_shares
from commlayer.profiles.errors import TensorError, UsageError
from commlayer.scheduler.decision import Policy
from commlayer.scheduler.plan import Strategy
from commlayer.testing.plugin import ClusterFactory

HIDDEN, WIDTH, EXPERTS, TOP_K = 8, 12, 4, 2
EP, ETP = 2, 2


def tokens(source: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, indices, weights, and the gradient of the output of the ``source``-th group of holders."""
    generator = torch.Generator().manual_seed(source)
    x = torch.randn(num_tokens, HIDDEN, generator=generator)
    weights, indices = torch.rand(num_tokens, EXPERTS, generator=generator).topk(TOP_K)
    return x.requires_grad_(), indices, weights.requires_grad_(), torch.randn(num_tokens, HIDDEN, generator=generator)


def differences(
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor, GroupedExperts], source: int, num_tokens: int, etp_rank: int
) -> list[str]:
    reference = GroupedExperts(HIDDEN, WIDTH, count=EXPERTS)
    triples = list(zip(reference.w_gate.unbind(), reference.w_up.unbind(), reference.w_down.unbind(), strict=True))
    wanted: Any = None
    for each in range(EP):
        x, indices, weights, gradient = tokens(each, num_tokens)
        out = reference_moe(x, indices, weights, triples)
        out.backward(gradient)
        if each == source:
            wanted = out, x.grad, weights.grad
    out, of_x, of_weights, experts = found
    pairs: dict[str, Any] = {"out": (out, wanted[0]), "x": (of_x, wanted[1]), "weights": (of_weights, wanted[2])}
    for name, parameter in experts.named_parameters():
        whole = getattr(reference, name).grad.split(EXPERTS // EP)[source]
        pairs[name] = parameter.grad, whole.chunk(ETP, 2 if name == "w_down" else 1)[etp_rank]
    return [name for name, (got, want) in pairs.items() if not torch.allclose(got, want, rtol=1e-5, atol=1e-5)]


def job(strategy: Strategy | None, num_tokens: int) -> tuple[list[str], list[str]]:
    """``strategy`` None: dropless, by shares. What differs, and the plans that ran."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    mesh = FoldedMesh({"tp": ETP, "ep": EP, "etp": ETP})
    etp = GroupCommunicator(mesh.group("etp"), "tp")
    source = mesh.rank("ep")
    experts = GroupedExperts(
        HIDDEN, WIDTH, first=source * EXPERTS // EP, count=EXPERTS // EP, etp_rank=etp.rank, etp_size=ETP
    )
    x, indices, weights, gradient = tokens(source, num_tokens)
    plans: list[str] = []
    if strategy is None:
        both = GroupCommunicator(mesh.group("etp_ep"), "ep")
        ep = GroupCommunicator(mesh.group("ep"), "ep")
        dispatcher = TokenDispatcher(EXPERTS, ep=ep, etp=etp, etp_ep=both, kind="all_to_all", chunks=2)
        out = run_shares(dispatcher, etp, x, indices, weights, experts)
        out.backward(gradient)
    else:
        profile, policy = (
            synthetic_profile(nodes=2, ranks_per_node=2),
            Policy(strategies=(strategy,), min_slice_bytes=0),
        )
        with Communicator(mesh.group("ep"), mesh.group("etp"), profile=profile, policy=policy) as communicator:
            out = ReplicatedDispatcher(EXPERTS, communicator, etp).run(x, indices, weights, num_tokens + 1, experts)
            out.backward(gradient)
            plans = sorted(communicator.plans_run)
            with pytest.raises(TensorError, match="a capacity of 0"):
                ReplicatedDispatcher(EXPERTS, communicator, etp).run(x, indices, weights, 0, experts)
            with pytest.raises(UsageError, match="multiple of experts"):
                ReplicatedDispatcher(3, communicator, etp)
            with pytest.raises(UsageError, match="both must be one group"):
                ReplicatedDispatcher(EXPERTS, communicator, GroupCommunicator(None, "tp"))
    assert x.grad is not None
    assert weights.grad is not None
    return differences((out, x.grad, weights.grad, experts), source, num_tokens, etp.rank), plans


@pytest.mark.parametrize("strategy", [Strategy.FLAT, Strategy.HIERARCHICAL, Strategy.PIPELINED, None])
def test_replicated_tokens(emulated_cluster: ClusterFactory, strategy: Strategy | None) -> None:
    found = emulated_cluster(nodes=2, ranks_per_node=2).run(job, strategy, 5)
    assert [wrong for wrong, _ in found] == [[]] * 4
    for _, plans in found:
        assert all(strategy is not None and plan.startswith(strategy.value) for plan in plans)
        assert strategy is None or plans


def test_one_token_for_two_ranks(emulated_cluster: ClusterFactory) -> None:
    """One rank's share is empty."""
    found = emulated_cluster(nodes=2, ranks_per_node=2).run(job, None, 1)
    assert [wrong for wrong, _ in found] == [[]] * 4
