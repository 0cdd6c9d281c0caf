"""Planned collectives of one group of CPU ranks: which plan a call gets, and running it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import Store  # torch.distributed has it too, but not for type checkers

from commlayer.scheduler.choose import Planner
from commlayer.scheduler.plan import Plan
from commlayer.settings import Settings

__all__ = ["PlannedGroup"]


class PlannedGroup:
    """Plans and runs the collectives of one group.

    ``nodes``: for each node that the group touches, its members as ranks *of the group*. ``global_ranks[i]`` is member i's
    rank in the job (for error messages). ``store`` is the group's own. ``planner`` None: nothing is planned.
    Not thread-safe: one call at a time, in the same order on all ranks.
    """

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        nodes: Sequence[Sequence[int]],
        global_ranks: Sequence[int],
        store: Store,
        planner: Planner | None,
        settings: Settings,
        timeout_s: float,
    ) -> None:
        self.name, self.rank, self.global_ranks = name, rank, tuple(global_ranks)
        self.nodes = tuple(tuple(node) for node in nodes)
        self.planner, self.settings, self.timeout_s = planner, settings, timeout_s

    def plan(self, collective: str, num_bytes: int, *, item_bytes: int = 1, is_float: bool = False) -> Plan | None:
        """The plan for a call, or None: flat, which is the backend's own call. Talks to nobody; equal on all ranks.

        ``collective``: all_gather (``num_bytes`` is the gathered total), reduce_scatter (the whole input of a rank),
        all_reduce, broadcast (the tensor).
        """
        return None

    def plan_all_to_all(self, num_bytes: int) -> Plan | None:
        """As :meth:`plan` for an all_to_all with any splits; ``num_bytes`` is the larger of what this rank sends and
        receives, which may differ between ranks. Collective."""
        return None

    def run(
        self,
        plan: Plan,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        op: str = "sum",
        root: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        """Run ``plan``; returns when the output may be used.

        Contiguous tensors of one dtype. all_gather: source [s], target [n·s]; reduce_scatter: source [n·s], target [s];
        all_reduce and broadcast: source is target, in place. ``op``: sum, product, min, max, band, bor, bxor.
        Raises PeerError, CollectiveTimeoutError (naming rank, group, collective, plan, step, chunk, peers).
        """
        raise NotImplementedError

    def run_all_to_all(
        self,
        plan: Plan,
        source: torch.Tensor,
        target: torch.Tensor,
        source_bytes: Sequence[int],
        target_bytes: Sequence[int],
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Run an all_to_all plan: ``source_bytes[k]`` of source go to member k, ``target_bytes[k]`` come from it."""
        raise NotImplementedError

    def explain(self, error: RuntimeError, collective: str, sequence: int, waited_s: float, timeout_s: float) -> Exception:
        """The error to raise where the backend's own (flat) call failed: names this rank, group, collective, sequence,
        and the rank that failed first where it can be found. Tells the other ranks."""
        raise NotImplementedError

    def abort(self, why: str | None = None) -> None:
        """After a failure: wake up the ranks that wait for this one."""

    def close(self) -> None:
        """Let go of connections. Not collective."""
