"""Runs plans on all ranks of the world in step, and times them."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore  # torch.distributed has it too, but not for type checkers

from commlayer.agree.discovery import Grid
from commlayer.engine.runner import GridRunner
from commlayer.engine.tracing import traced_on_grid
from commlayer.failures.board import FailureBoard
from commlayer.failures.detector import FailureDetector, job_detector
from commlayer.measure.all_ranks import AllRanks
from commlayer.profiles.errors import ClusterError
from commlayer.profiles.links import Resource
from commlayer.profiles.topology import Topology
from commlayer.scheduler.plan import Buffer, Plan
from commlayer.scheduler.replicated import replicated_moves
from commlayer.transport.connect import connect

__all__ = ["Prober", "world_grid"]


class Prober:
    """Runs plans on all ranks of the world in step, and times them. Making and closing one is collective.

    As a context manager it is closed at the end of the block, or aborted where the block raises: closing waits for the
    other ranks, and would hide the error behind its own.
    """

    def __init__(self, topology: Topology, timeout_s: float, ranks: AllRanks | None = None) -> None:
        self.ranks = ranks or AllRanks.default()
        self.grid = world_grid(topology, self.ranks.rank)
        self.device = self.ranks.device_type
        self._where = self.ranks.device
        name, everyone = self.ranks.name(), tuple(range(self.ranks.size))  # ranks of the grid, not of the job
        given = self.ranks.detector or job_detector(everyone)
        shared = given if given is not None and given.ranks == everyone else None
        store = PrefixStore(f"commlayer/profiler/{name}", self.ranks.store)
        self.detector = shared or FailureDetector(store, self.ranks.rank, everyone, timeout_s)
        self._is_owner = shared is None
        board = FailureBoard(self.detector, f"profiler/{name}", self.ranks.rank, everyone)
        transport = connect(self.grid, self.device, board, store, timeout_s)
        self.grid_runner = GridRunner(transport, self.grid.ep_index, self.grid.tp_index, timeout_s)
        self._timeout_s = timeout_s

    def __enter__(self) -> Prober:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            why = None if isinstance(error, ClusterError) else f"left with {type(error).__name__}: {error}"
            self.grid_runner.transport.abort(why)  # wakes up the ranks that wait for this one

    def runner(self, plan: Plan) -> Callable[[], float]:
        """A callable that runs ``plan`` once and returns the agreed time, µs."""
        source, target = self._buffers(plan)

        def run() -> float:
            return self.timed(lambda: self.grid_runner.run(plan, source, target))

        return run

    def timed(self, task: Callable[[], Any]) -> float:
        """The time of ``task`` in µs, all ranks starting together: the largest over ranks, equal on all of them."""
        self.ranks.barrier()
        begin = time.perf_counter()
        task()
        if self.device == "cuda":
            torch.cuda.current_stream().synchronize()
        return self.agree((time.perf_counter() - begin) * 1e6)

    def agree(self, value: float) -> float:
        """The largest ``value`` over ranks."""
        return self.ranks.maximum(value)

    def ends(self, plan: Plan, rounds: int) -> dict[Resource, float]:
        """Find when the last step of each resource ended, µs from the call; the median over rounds of the largest over ranks."""
        source, target = self._buffers(plan)
        seen: dict[Resource, list[float]] = {step.resource: [] for step in plan.steps}
        for _ in range(rounds + 1):
            self.ranks.barrier()
            timeline = traced_on_grid(self.grid_runner, plan, source, target)
            for resource, values in seen.items():
                spans = zip(plan.steps, timeline.spans, strict=True)
                values.append(self.agree(max(end for step, (_, end) in spans if step.resource is resource)))
        return {resource: sorted(values[1:])[rounds // 2] for resource, values in seen.items()}

    def check(self, plan: Plan) -> int:
        """Run ``plan`` on known bytes; how many bytes arrived wrong, on all ranks together."""
        size = plan.traffic.logical_bytes
        e, ep = plan.traffic.group_size, self.grid.ep_index
        block = plan.traffic.block_bytes
        expected = torch.cat([_pattern(size, k)[ep * block : (ep + 1) * block] for k in range(e)]).to(self._where)
        source, target = _pattern(size, ep).to(self._where), torch.zeros(size, dtype=torch.uint8, device=self._where)
        steps = replicated_moves(plan, ep, self.grid.tp_index)
        for move in steps:  # an all_gather sends from the output what an earlier all_to_all would have brought
            for message in move.sends:
                if message.region.buffer is Buffer.OUTPUT:
                    here = slice(message.region.start, message.region.stop)
                    target[here] = expected[here]
        self.grid_runner.run(plan, source, target)
        wrong = 0
        for move in steps:
            for region in [m.region for m in move.receives] + [copy.target for copy in move.copies]:
                here = slice(region.start, region.stop)
                wrong += int((target[here] != expected[here]).sum())
        return self.ranks.total(wrong)

    def is_one_call(self, plan: Plan) -> bool:
        """Whether the transports of all ranks run ``plan`` as one call of the backend's own."""
        return self.agree(float(self.grid_runner.transport.whole(plan, self._timeout_s) is None)) == 0.0

    def close(self) -> None:
        """Let go of connections. Collective."""
        self.grid_runner.transport.close()
        if self._is_owner:
            self.detector.close("it has measured what it wanted")

    def _buffers(self, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
        size = plan.traffic.logical_bytes
        source = torch.zeros(size, dtype=torch.uint8, device=self._where)
        return source, torch.zeros_like(source)  # touched, so that page faults are not timed


def world_grid(topology: Topology, rank: int) -> Grid:
    """All ranks: one row for each node, so that ep groups cross nodes and tp groups fill them.

    Raises TopologyError for uneven nodes.
    """
    topology.ranks_per_node  # noqa: B018  raises for uneven nodes, naming them
    if topology.num_nodes == 1:
        rows = tuple((member,) for member in topology.nodes[0])
        return Grid(rows, topology.nodes[0].index(rank), 0, Resource.INTRA, topology)
    node = topology.node_of(rank)
    return Grid(topology.nodes, node, topology.nodes[node].index(rank), Resource.INTER, topology)


def _pattern(size: int, row: int) -> torch.Tensor:
    """Bytes that differ by place and by sender: a misplaced or foreign byte shows. The period is a prime."""
    place = torch.arange(65_521, dtype=torch.int64)
    tile = ((place * 7 + (place >> 8) * 31 + row * 101) & 255).to(torch.uint8)
    return tile.repeat(-(-size // tile.numel()))[:size]
