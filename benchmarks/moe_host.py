"""The cost of the dispatcher on the host: one rank, nothing sent, against bare index_select and index_add."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch
from moe_tables import HostRow, ratios, spread

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.moe.dispatcher import TokenDispatcher

__all__ = ["run_host"]

NUM_TOKENS, TOP_K, HIDDEN, NUM_EXPERTS = 4096, 2, 1024, 8
Pass = Callable[[], tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]


class _Moves:
    """Tokens to rows by expert and back, weighted; ``bare`` and ``ours`` return output and gradients."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
        top, self.indices = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator).topk(TOP_K)
        self.weights = top / top.sum(1, keepdim=True)
        self.gradient = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
        self.dispatcher = TokenDispatcher(NUM_EXPERTS, ep=GroupCommunicator(None, "ep"))

    def bare(self, with_map: bool, backward: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        order = self.order if not with_map else self.indices.reshape(-1).argsort(stable=True)
        x, weights = self._inputs(backward)
        tokens = order // TOP_K
        rows = x.index_select(0, tokens)
        gates = weights.reshape(-1).index_select(0, order).unsqueeze(1)
        out = torch.zeros_like(self.x).index_add(0, tokens, rows * gates)
        return self._back(out, x, weights, backward)

    def ours(self, with_map: bool, backward: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        handle = self.dispatcher.prepare(self.indices) if with_map else self.handle
        x, weights = self._inputs(backward)
        rows, _ = self.dispatcher.dispatch(x, handle)
        return self._back(self.dispatcher.combine(rows, handle, weights), x, weights, backward)

    def prepared(self) -> None:
        """Maps made before, for what is timed without them."""
        self.order = self.indices.reshape(-1).argsort(stable=True)
        self.handle = self.dispatcher.prepare(self.indices)

    def _inputs(self, backward: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x.detach().requires_grad_(backward), self.weights.detach().requires_grad_(backward)

    def _back(
        self, out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, backward: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        if backward:
            out.backward(self.gradient)
        return out.detach(), x.grad, weights.grad


def run_host(rounds: int) -> list[HostRow]:
    """Forward, and forward with backward; both with the map from the choices, and without it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        moves = _Moves()
        moves.prepared()
        return [
            _row(moves, what, with_map, backward, rounds)
            for what, with_map, backward in (
                ("dispatch + combine, forward", False, False),
                ("the same with its map of the choices", True, False),
                ("forward and backward", False, True),
                ("the same with its map of the choices", True, True),
            )
        ]
    finally:
        torch.set_num_threads(threads)


def _row(moves: _Moves, what: str, with_map: bool, backward: bool, rounds: int) -> HostRow:
    for mine, theirs in zip(moves.ours(with_map, backward), moves.bare(with_map, backward), strict=True):
        if mine is not None and theirs is not None and not torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4):
            raise RuntimeError(f"{what}: not what index_select and index_add give")
    times: dict[str, list[float]] = {"bare": [], "ours": []}
    calls = {"bare": moves.bare, "ours": moves.ours}
    chooser, order = random.Random(0), list(calls)
    for _ in range(rounds):
        chooser.shuffle(order)
        for name in order:
            begin = time.perf_counter()
            calls[name](with_map, backward)
            times[name].append((time.perf_counter() - begin) * 1e3)
    bare, ours = times["bare"], times["ours"]
    return HostRow(what, spread(bare), spread(ours), ratios(ours, bare), rounds)
