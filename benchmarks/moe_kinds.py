"""all_gather and reduce_scatter against all_to_all for the dispatch, over k, on one emulated node."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from dispatch_step import DispatchStep, dispatch_step
from moe_tables import KindRow, spread

from commlayer.collectives import GroupCommunicator
from commlayer.emulation import EmulatedCluster
from commlayer.integrations import FoldedMesh
from commlayer.integrations.moe.dispatcher import TokenDispatcher

__all__ = ["HIDDEN", "NUM_EXPERTS", "NUM_TOKENS", "run_kinds"]

NUM_EXPERTS, NUM_TOKENS, HIDDEN = 8, 1024, 512
_KINDS = ("all_to_all", "all_gather")  # inside a node there are no two levels
_TOLERANCE = 1e-5


def run_kinds(
    ranks: int, ks: Sequence[int], profile: str, rounds: int, budget_s: float, timeout_s: float
) -> list[KindRow]:
    """``budget_s``: for all of ``ks`` together. ``profile``: as COMMLAYER_PROFILE."""
    with EmulatedCluster(1, ranks, mode="netns") as cluster:
        found: list[KindRow] = cluster.run(_on_rank, tuple(ks), profile, rounds, budget_s, timeout_s=timeout_s)[0]
    return found


def _on_rank(ks: Sequence[int], profile: str, rounds: int, budget_s: float) -> list[KindRow]:
    os.environ["COMMLAYER_PROFILE"] = profile
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = FoldedMesh({"ep": dist.get_world_size()}, backend="commlayer")
    rows = []
    for k in ks:
        rows.append(_Comparison(mesh, k).row(rounds, budget_s / len(ks)))
        if dist.get_rank() == 0:
            print(f"kinds: {dist.get_world_size()} ranks, k {k} of {ks[-1]}: {rows[-1].chosen}", flush=True)
    return rows


class _Comparison:
    """Both kinds of one k. The experts do nothing: rows come back as they went."""

    def __init__(self, mesh: FoldedMesh, k: int) -> None:
        self.k = k
        ep = GroupCommunicator(mesh.group("ep"), "ep")
        self.dispatchers = {kind: TokenDispatcher(NUM_EXPERTS, ep=ep, kind=kind, chunks=1) for kind in _KINDS}
        self.choosing = TokenDispatcher(NUM_EXPERTS, ep=ep, chunks=1)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
        scores = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator)
        top, self.indices = scores.topk(k)
        self.weights = top / top.sum(1, keepdim=True)

    def step(self, kind: str) -> DispatchStep:
        """One call, there and back; times of the slowest rank."""
        return dispatch_step(self.dispatchers[kind], self.x, self.indices, self.weights)

    def row(self, rounds: int, budget_s: float) -> KindRow:
        error = self._error()
        if error > _TOLERANCE:
            raise RuntimeError(f"k {self.k}: the kinds' results differ by {error:.1e}")
        self.choosing.prepare(self.indices, like=self.x.detach().requires_grad_())
        decision = self.choosing.decision
        assert decision is not None  # prepare() made it
        times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _KINDS}
        chooser, order, began = random.Random(self.k), list(_KINDS), time.perf_counter()
        while not times[_KINDS[0]] or (len(times[_KINDS[0]]) < rounds and self._goes_on(began, budget_s)):
            chooser.shuffle(order)  # the same on all ranks
            for kind in order:
                step = self.step(kind)
                times[kind].append((step.forward_ms, step.both_ms))
        return KindRow(
            dist.get_world_size(),
            self.k,
            {kind: us / 1e3 for kind, us in decision.kinds_us.items()},
            {kind: spread([forward for forward, _ in each]) for kind, each in times.items()},
            {kind: spread([both for _, both in each]) for kind, each in times.items()},
            decision.kind,
            len(times[_KINDS[0]]),
            f"{error:.0e}",
        )

    @staticmethod
    def _goes_on(began: float, budget_s: float) -> bool:
        spent = torch.tensor([time.perf_counter() - began])
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        return float(spent) < budget_s

    def _error(self) -> float:
        """Both kinds' outputs and gradients against the tokens themselves: the weights sum to 1, and experts do nothing."""
        worst = torch.zeros(1)
        for _ in range(2):  # the first call connects
            for kind in _KINDS:
                step = self.step(kind)
                for each in (step.out, step.gradient):
                    worst = torch.maximum(worst, (each - self.x).abs().max())
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return float(worst)
