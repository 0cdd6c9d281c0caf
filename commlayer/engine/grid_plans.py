"""Plans of the all_to_all of a grid, of ranks with other tokens × ranks with the same ones: which one a
call gets, and running it."""

from __future__ import annotations

from time import perf_counter_ns as now

import torch
import torch.distributed as dist

from commlayer.agree.discovery import Grid
from commlayer.calls.counters import GroupCounters
from commlayer.engine.progress import StreamWork
from commlayer.engine.runner import Prepared, Runner
from commlayer.engine.tracing import traced
from commlayer.profiles.errors import PlanError
from commlayer.scheduler.decision import Decision, Planner
from commlayer.scheduler.group_moves import moves_of_call
from commlayer.scheduler.kept import Kept
from commlayer.scheduler.plan import Plan
from commlayer.scheduler.price import Timeline
from commlayer.scheduler.traffic import Traffic
from commlayer.transport.call_memory import CallMemory

__all__ = ["GridPlans", "Works"]

_MAX_PLANS = 1024
"""Sizes whose plan is kept at hand."""
Works = list[dist.Work]
"""Where an asynchronous call leaves its work: what a :class:`~commlayer.transfers.Pending` waits
for."""


class GridPlans:
    """Chooses by ``planner`` and runs the plans of one grid's calls, and counts what it has run.

    Sizes are those of a rank's tensor; ``replicated``: ranks with the same tokens hold the same one.
    """

    def __init__(self, grid: Grid, planner: Planner, runner: Runner, counters: GroupCounters, timeout_s: float) -> None:
        self._grid, self._planner, self._runner = grid, planner, runner
        self._counters, self._timeout_s = counters, timeout_s
        self._plans = Kept[tuple[int, bool], Plan](_MAX_PLANS)

    def decide(self, num_bytes: int, replicated: bool) -> Decision:
        """The decision for a call. Talks to nobody."""
        return self._planner.decide(self._traffic(num_bytes, replicated))

    def plan(self, num_bytes: int, replicated: bool) -> Plan:
        """The plan that :meth:`decide` chooses, without asking again what was asked before: a small
        message is as short as this look-up."""
        plan = self._plans.get((num_bytes, replicated))
        if plan is None:
            plan = self._plans.add((num_bytes, replicated), self.decide(num_bytes, replicated).plan)
        return plan

    def require(self, plan: Plan, num_bytes: int, replicated: bool) -> None:
        """Raises PlanError for a plan that was built for other calls."""
        expected = self._traffic(num_bytes, replicated)
        if plan.traffic != expected:
            raise PlanError(
                f"rank {dist.get_rank()}: {plan.name} was built for {plan.traffic}, but this call moves {expected}: build it "
                "with that traffic, or leave plan out"
            )

    def run(self, plan: Plan, source: torch.Tensor, target: torch.Tensor) -> None:
        """Run a call to its end. One of no bytes only keeps its place in the queue."""
        if source.numel():
            started = now()
            self._runner.launch(self._prepared(plan), source, target, self._timeout_s)()
            self._counters.planned["all_to_all", plan.name].add(source.numel(), now() - started)

    def launch(self, plan: Plan, source: torch.Tensor, target: torch.Tensor, works: Works) -> None:
        """Launch a call on a device, and leave its work in ``works``."""
        join = self._runner.launch(self._prepared(plan), source, target, self._timeout_s) if source.numel() else None
        works.append(StreamWork(join))
        self._counters.planned["all_to_all", plan.name].add(source.numel(), 0)  # the host does not see how long

    def trace(self, plan: Plan, source: torch.Tensor) -> Timeline:
        """Run a call to its end, and return the times of its steps, as this rank saw them."""
        data = CallMemory(source), CallMemory(torch.empty_like(source))
        return traced(plan, self._runner.start(self._prepared(plan), *data, self._timeout_s))

    def _prepared(self, plan: Plan) -> Prepared:
        grid = self._grid
        return self._runner.prepared(plan, None, lambda: moves_of_call(plan, grid.rows, grid.member))

    def _traffic(self, num_bytes: int, replicated: bool) -> Traffic:
        grid = self._grid
        return Traffic(num_bytes, len(grid.ep_ranks), len(grid.tp_ranks) if replicated else 1, grid.link)
