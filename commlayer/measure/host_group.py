"""A group of CPU ranks in which calls are timed, and in which measurements agree between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commlayer.calls.movement import Movement
from commlayer.engine.planned import PlannedGroup
from commlayer.failures.waits import bounded_reduce_scatter, wait
from commlayer.measure.calls import CALL_OPTIONS
from commlayer.scheduler.plan import Plan

__all__ = ["HostGroup"]


class HostGroup:
    """The calls that measurements make in a group of CPU ranks: plans, Gloo's own calls, messages.

    ``timeout_s`` bounds each wait; None: the group's own. Making one is collective, and so is each
    call but messages, which two members exchange. All raise PeerError and CollectiveTimeoutError,
    in which a call is numbered among those of this object.
    """

    def __init__(self, planned: PlannedGroup, timeout_s: float | None = None) -> None:
        self.planned = planned
        self.timeout_s = timeout_s or planned.timeout_s
        self.rank, self.size = planned.rank, len(planned.global_ranks)
        self.device = torch.device("cpu")
        self.own: Any = planned.connect_own_calls()
        self._num_calls = 0

    def prepare(self, plan: Plan) -> None:
        """Do what the first call of ``plan`` would otherwise do while it is timed."""
        self.planned.prepare(plan)

    def run(self, plan: Plan, source: torch.Tensor, target: torch.Tensor) -> None:
        """Run ``plan`` once."""
        self.planned.run(Movement(plan, source, target), timeout_s=self.timeout_s)

    def run_own(self, collective: str, source: torch.Tensor, target: torch.Tensor) -> None:
        """Run a collective once, by a call of Gloo's own."""
        self._num_calls += 1
        self._explained(
            lambda: wait(self._work(collective, source, target), self.planned.board), collective, self._num_calls
        )

    def _work(self, collective: str, source: torch.Tensor, target: torch.Tensor) -> Any:
        options = CALL_OPTIONS[collective]()
        options.timeout = timedelta(seconds=self.timeout_s)
        if collective == "all_gather":
            return self.own._allgather_base(target, source, options)
        if collective == "reduce_scatter":
            return bounded_reduce_scatter(self.own, target, source, options)
        if collective == "all_to_all_v":
            return self.own.alltoall_base(target, source, [], [], options)
        verb = self.own.allreduce if collective == "all_reduce" else self.own.broadcast
        return verb([target], options)

    def send(self, message: torch.Tensor) -> None:
        """Send ``message`` from the first of two ranks to the second."""
        own, limit = self.own, timedelta(seconds=self.timeout_s)

        def send() -> None:
            work = own.send([message], 1, 0) if self.rank == 0 else own.recv([message], 0, 0)
            self.planned.wait_for_message(work, limit)

        self._num_calls += 1
        self._explained(send, "send_recv", self._num_calls)

    def swap(self, peer: int, data: torch.Tensor, arrived: torch.Tensor, tag: int, what: str) -> None:
        """Send ``data`` to member ``peer`` while its own arrives. Errors say ``what`` it is for."""
        limit = timedelta(seconds=self.timeout_s)

        def swap() -> None:
            for work in [self.own.recv([arrived], peer, tag), self.own.send([data], peer, tag)]:
                self.planned.wait_for_message(work, limit)

        self._explained(swap, what)

    def largest(self, values: Sequence[float], what: str) -> list[float]:
        """Return each value's largest over ranks, so that all of them decide alike.

        Errors say ``what`` it is for.
        """
        result, options = torch.tensor(values, dtype=torch.float64), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        options.timeout = timedelta(seconds=self.timeout_s)
        self._explained(lambda: wait(self.own.allreduce([result], options), self.planned.board), what)
        return [float(value) for value in result]

    def _explained(self, call: Callable[[], object], what: str, number: int = 0) -> None:
        """Make a call of Gloo's own; where it fails, name the rank that failed first."""
        began = time.monotonic()
        try:
            call()
        except RuntimeError as error:
            waited_s = time.monotonic() - began
            raise self.planned.explain(error, what, number, waited_s, self.timeout_s) from error
