"""Measures a cluster: every primitive over sizes, on the groups that the plans will use, through the executor they will use.

All ranks of the world run :func:`measure_cluster` together. Each time is the largest over ranks (a collective is as fast
as its slowest rank), and every decision to go on or stop rests on those agreed times.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from commlayer.connect import connect, device_type
from commlayer.executor import Executor
from commlayer.failures import FailureBoard
from commlayer.groups import Grid, discover_topology
from commlayer.profiles.curve import Curve
from commlayer.profiles.errors import ClusterError, TopologyError
from commlayer.profiles.links import Peaks, Resource
from commlayer.profiles.measure import Point, Repeats, interference, sizes_between, sweep
from commlayer.profiles.profile import Interference, Profile, parse_profile
from commlayer.profiles.topology import Topology
from commlayer.scheduler.moves import moves
from commlayer.scheduler.plan import Buffer, Plan
from commlayer.scheduler.probes import copy_probe, exchange_probe, gather_probe, one_call_probe, side_by_side
from commlayer.transport import ONE_CALL_BYTES

__all__ = ["Prober", "SweepOptions", "environment", "measure_cluster", "num_points"]

_INTERFERENCE_BYTES = 4 << 20
_serial = count()
"""Numbers the Probers of a job, each with a failure board of its own. Making one is collective: ranks count alike."""
_PAIRS = (
    (Resource.INTER, Resource.INTRA),
    (Resource.INTER, Resource.DEVICE),
    (Resource.INTRA, Resource.DEVICE),
)


@dataclass(frozen=True)
class SweepOptions:
    """What to sweep. Sizes in bytes a rank, with nccl-tests' letters: -b ``min_bytes``, -e ``max_bytes``, -f ``factor``,
    -n ``repeats.max_repeats``, -w ``repeats.warmup``, -c ``check``.

    ``peaks`` are the links' rates per rank where they are known (shaped, or from a data sheet); None takes the largest
    bus bandwidth measured. ``timeout_s`` bounds every collective.
    """

    min_bytes: int = 4096
    max_bytes: int = 32 << 20
    factor: float = 2.0
    repeats: Repeats = field(default_factory=lambda: Repeats(warmup=1, min_repeats=6, max_repeats=60, budget_us=1.2e6))
    interference_rounds: int = 7
    check: bool = True
    inter_gbps: float | None = None
    intra_gbps: float | None = None
    timeout_s: float = 120.0


class Prober:
    """Runs plans on all ranks of the world in step, and times them. Making and closing one is collective.

    As a context manager it is closed at the end of the block, or aborted where the block raises: closing waits for the
    other ranks, and would hide the error behind its own.
    """

    def __init__(self, topology: Topology, timeout_s: float) -> None:
        self.grid = world_grid(topology)
        self.device = device_type(None)
        self._where = (
            torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")
        )
        board = FailureBoard(_get_default_store(), f"commlayer/failure/profiler/{next(_serial)}", dist.get_rank())
        transport = connect(self.grid, self.device, board, timeout_s)
        self.executor = Executor(transport, self.grid.ep_index, self.grid.tp_index, timeout_s)
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
            self.executor.transport.abort(why)  # wakes up the ranks that wait for this one

    def runner(self, plan: Plan) -> Callable[[], float]:
        """A callable that runs ``plan`` once and returns the agreed time, µs."""
        source, target = self._buffers(plan)

        def run() -> float:
            return self.timed(lambda: self.executor.run(plan, source, target))

        return run

    def timed(self, task: Callable[[], Any]) -> float:
        """The time of ``task`` in µs, all ranks starting together: the largest over ranks, equal on all of them."""
        dist.barrier()
        begin = time.perf_counter()
        task()
        if self.device == "cuda":
            torch.cuda.current_stream().synchronize()
        return self.agree((time.perf_counter() - begin) * 1e6)

    def agree(self, value: float) -> float:
        """The largest ``value`` over ranks."""
        agreed = torch.tensor([value], dtype=torch.float64, device=self._where)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return float(agreed)

    def ends(self, plan: Plan, rounds: int) -> dict[Resource, float]:
        """By resource: when its last step ended, µs from the call; the median over rounds of the largest over ranks."""
        source, target = self._buffers(plan)
        seen: dict[Resource, list[float]] = {step.resource: [] for step in plan.steps}
        for _ in range(rounds + 1):
            dist.barrier()
            timeline = self.executor.trace(plan, source, target)
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
        steps = moves(plan, ep, self.grid.tp_index)
        for move in steps:  # an all_gather sends from the output what an earlier all_to_all would have brought
            for message in move.sends:
                if message.region.buffer is Buffer.OUTPUT:
                    here = slice(message.region.start, message.region.stop)
                    target[here] = expected[here]
        self.executor.run(plan, source, target)
        wrong = 0
        for move in steps:
            for region in [m.region for m in move.receives] + [copy.target for copy in move.copies]:
                here = slice(region.start, region.stop)
                wrong += int((target[here] != expected[here]).sum())
        total = torch.tensor([wrong], dtype=torch.int64, device=self._where)
        dist.all_reduce(total)
        return int(total)

    def is_one_call(self, plan: Plan) -> bool:
        """Whether the transports of all ranks run ``plan`` as one call of the backend's own."""
        return self.agree(float(self.executor.transport.whole(plan, self._timeout_s) is None)) == 0.0

    def close(self) -> None:
        """Let go of connections. Collective."""
        self.executor.transport.close()

    def _buffers(self, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
        size = plan.traffic.logical_bytes
        source = torch.zeros(size, dtype=torch.uint8, device=self._where)
        return source, torch.zeros_like(source)  # touched, so that page faults are not timed


def world_grid(topology: Topology) -> Grid:
    """All ranks: one row for each node, so that ep groups cross nodes and tp groups fill them.

    Raises TopologyError for uneven nodes.
    """
    topology.ranks_per_node  # noqa: B018  raises for uneven nodes, naming them
    rank = dist.get_rank()
    if topology.num_nodes == 1:
        rows = tuple((member,) for member in topology.nodes[0])
        return Grid(rows, topology.nodes[0].index(rank), 0, Resource.INTRA, topology)
    node = topology.node_of(rank)
    return Grid(topology.nodes, node, topology.nodes[node].index(rank), Resource.INTER, topology)


def measure_cluster(
    options: SweepOptions,
    *,
    name: str,
    kind: str,
    source: str,
    topology: Topology | None = None,
    environment: dict[str, str] | None = None,
    on_point: Callable[[Point, int], None] | None = None,
) -> Profile:
    """Measure the world's links and return their profile: rank 0's, on every rank.

    ``topology`` None discovers it. ``on_point`` is called after each size with the point and the number of wrong bytes.
    Raises ClusterError where bytes arrive wrong, TopologyError for uneven nodes or a single rank.
    """
    topology = topology or discover_topology()
    if topology.world_size < 2:
        raise TopologyError(
            "expected a cluster of two ranks or more, got one, which has no links to measure: start more, for example "
            "`torchrun --nproc-per-node 2 --no-python commlayer profile`, or `commlayer profile --emulate 2x4`"
        )
    with Prober(topology, options.timeout_s) as prober:
        curves = _curves(prober, options, on_point)
        pairs = _interference(prober, curves, options.interference_rounds)
    profile = Profile.create(
        name=name,
        kind=kind,
        source=source,
        topology=topology,
        peaks=_peaks(curves, options),
        gather="remote",
        curves=curves,
        interference=pairs,
        environment=_environment(environment),
    )
    agreed = [profile.to_json()]  # hosts and dates differ between ranks, and a profile must not
    dist.broadcast_object_list(agreed)
    return parse_profile(agreed[0], "rank 0's profile")


def num_points(options: SweepOptions, topology: Topology) -> int:
    """How many sizes a sweep of that cluster has in total, for progress bars.

    Exact, unless Gloo's ranks stand in an order in which it has no call of its own for small exchanges: then fewer.
    """
    num_nodes, num_ranks = topology.num_nodes, topology.ranks_per_node
    e, t, link = (num_ranks, 1, Resource.INTRA) if num_nodes == 1 else (num_nodes, num_ranks, Resource.INTER)
    has_one_call = not dist.is_initialized() or device_type(None) == "cpu"
    return sum(len(entry.sizes) for entry in _entries(options, e, t, link, has_one_call=has_one_call))


@dataclass(frozen=True, slots=True)
class _Entry:
    """One curve to measure: its key, the sizes, and the plan that stands for a size."""

    collective: str
    link: Resource
    group_size: int
    sizes: tuple[int, ...]
    make: Callable[[int], Plan]


def _entries(options: SweepOptions, e: int, t: int, link: Resource, *, has_one_call: bool) -> list[_Entry]:
    """What is measured on ep groups of ``e`` ranks and tp groups of ``t``."""

    def sizes(share: float) -> tuple[int, ...]:
        largest = max(options.min_bytes, int(options.max_bytes * share))
        return sizes_between(options.min_bytes, largest, options.factor)

    # What the plans gather and copy of a buffer of max_bytes is smaller than it: larger sizes would only cost time.
    exchange = partial(exchange_probe, group_size=e, link=link)
    entries = [_Entry("all_to_all", link, e, sizes(1.0), exchange)]
    one_call = partial(one_call_probe, group_size=e, link=link)
    small = tuple(size for size in sizes(1.0) if one_call(size).traffic.logical_bytes <= ONE_CALL_BYTES)
    if small and has_one_call:
        entries.append(_Entry("all_to_all_single", link, e, small, one_call))
    if t > 1:
        gather = partial(gather_probe, group_size=e, replication=t, link=link)
        entries.append(_Entry("all_gather", Resource.INTRA, t, sizes((e - 1) / e), gather))
    copy = partial(copy_probe, group_size=e, link=link)
    entries.append(_Entry("copy", Resource.DEVICE, 1, sizes(1 / e), copy))
    return entries


def _curves(prober: Prober, options: SweepOptions, on_point: Callable[[Point, int], None] | None) -> list[Curve]:
    e, t, link = len(prober.grid.ep_ranks), len(prober.grid.tp_ranks), prober.grid.link
    has_one_call = prober.is_one_call(one_call_probe(1, e, link))
    wrong = 0

    def prepare(collective: str, make: Callable[[int], Plan], size: int) -> Callable[[], float]:
        nonlocal wrong
        plan = make(size)
        wrong = prober.check(plan) if options.check else 0
        if wrong:
            raise ClusterError(
                f"{collective} of {size} bytes delivered {wrong} wrong bytes, all ranks together: do not trust this "
                "link. Look for a faulty card, cable or driver, then measure again"
            )
        return prober.runner(plan)

    def report(point: Point) -> None:
        if on_point is not None:
            on_point(point, wrong)

    return [
        sweep(
            entry.collective,
            entry.link,
            entry.group_size,
            entry.sizes,
            partial(prepare, entry.collective, entry.make),
            options.repeats,
            report,
        )
        for entry in _entries(options, e, t, link, has_one_call=has_one_call)
    ]


def _interference(prober: Prober, curves: list[Curve], rounds: int) -> list[Interference]:
    """Pairs of resources, together against alone, each kept busy for about the same time."""
    e, t, link = len(prober.grid.ep_ranks), len(prober.grid.tp_ranks), prober.grid.link
    if t == 1 or prober.device == "cuda":  # a device's steps are not seen by the host: see SweepOptions and docs
        return []
    unit = side_by_side(_INTERFERENCE_BYTES, e, t, link, {resource: 1 for pair in _PAIRS for resource in pair})
    by_key = {(curve.collective, curve.link): curve for curve in curves}
    alone = {step.resource: by_key[step.op.value, step.resource].at(step.bytes) for step in unit.steps}
    found = []
    for a, b in _PAIRS:
        longest = max(alone[a], alone[b])
        counts = {r: max(1, min(64, round(longest / alone[r]))) for r in (a, b)}
        plans = [side_by_side(_INTERFERENCE_BYTES, e, t, link, c) for c in ({a: counts[a]}, {b: counts[b]}, counts)]
        only_a, only_b, both = (prober.ends(plan, rounds) for plan in plans)
        slow_a, slow_b = interference(only_a[a], only_b[b], both[a], both[b])
        found += [Interference(a, b, round(slow_a, 3)), Interference(b, a, round(slow_b, 3))]
    return found


def _peaks(curves: list[Curve], options: SweepOptions) -> Peaks:
    best: dict[Resource, float] = {}
    for curve in curves:
        fastest = max(curve.busbw_gbps(size) for size in curve.bytes)
        best[curve.link] = max(fastest, best.get(curve.link, 0.0))
    known = {Resource.INTER: options.inter_gbps, Resource.INTRA: options.intra_gbps, Resource.DEVICE: None}
    rates = {link: known[link] or best.get(link) for link in known}
    fallback = best.get(Resource.INTRA) or max(best.values())
    return Peaks(*(rates[link] or fallback for link in (Resource.INTER, Resource.INTRA, Resource.DEVICE)))


def environment() -> dict[str, str]:
    """Versions, backend, host and date, for a profile or a result: where the numbers come from."""
    from commlayer import __version__

    return {
        "commlayer": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "kernel": platform.release().split("-")[0],
        "machine": platform.machine(),
        "host": platform.node(),
        "backend": str(dist.get_backend()),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def _environment(more: dict[str, str] | None) -> dict[str, str]:
    return environment() | (more or {})


def _pattern(size: int, row: int) -> torch.Tensor:
    """Bytes that differ by place and by sender: a misplaced or foreign byte shows. The period is a prime."""
    place = torch.arange(65_521, dtype=torch.int64)
    tile = ((place * 7 + (place >> 8) * 31 + row * 101) & 255).to(torch.uint8)
    return tile.repeat(-(-size // tile.numel()))[:size]
