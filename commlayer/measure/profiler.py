"""Measures a cluster: every primitive over sizes, on the groups that the plans will use, through the executor they will use.

All ranks of the world run :func:`measure_cluster` together. Each time is the largest over ranks (a collective is as fast
as its slowest rank), and every decision to go on or stop rests on those agreed times.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial

import torch
import torch.distributed as dist

from commlayer.agree.discovery import discover_topology
from commlayer.measure.all_ranks import AllRanks, ProfileText
from commlayer.measure.group_prober import GroupCurve, GroupProber, group_curves
from commlayer.measure.prober import Prober
from commlayer.profiles.curve import Curve
from commlayer.profiles.errors import ClusterError, TopologyError
from commlayer.profiles.links import Peaks, Resource
from commlayer.profiles.measure import Point, Repeats, interference, sizes_between, sweep
from commlayer.profiles.profile import Interference, Profile, parse_profile
from commlayer.profiles.topology import Topology
from commlayer.scheduler.plan import Plan
from commlayer.scheduler.probes import copy_probe, exchange_probe, gather_probe, one_call_probe, side_by_side
from commlayer.transport.connect import device_type
from commlayer.transport.gloo import ONE_CALL_BYTES
from commlayer.version import __version__

__all__ = ["SweepOptions", "environment", "measure_cluster", "num_points"]

_INTERFERENCE_BYTES = 4 << 20
_PAIRS = (
    (Resource.INTER, Resource.INTRA),
    (Resource.INTER, Resource.DEVICE),
    (Resource.INTRA, Resource.DEVICE),
)
_GROUP_SHARE = 8
"""The curves of whole groups end at this fraction of the largest size: there are many of them, and their links' rates show
much earlier."""


@dataclass(frozen=True)
class SweepOptions:
    """Options of a sweep. Sizes in bytes a rank, with nccl-tests' letters: -b ``min_bytes``, -e ``max_bytes``, -f ``factor``,
    -n ``repeats.max_repeats``, -w ``repeats.warmup``, -c ``check``.

    ``group_max_bytes`` (None: an eighth of ``max_bytes``), ``group_factor`` (None: ``factor`` squared) and ``group_repeats``
    are for the curves of plans over nodes and of the backend's own calls, of which there are many.
    ``interference_rounds`` 0: pairs of resources are not measured. ``longest_us``: a curve ends at the first size that takes
    longer. ``is_probe``: leave out what few jobs plan: broadcasts inside nodes, and calls on rails.
    ``inter_gbps`` and ``intra_gbps`` are the links' rates per rank where they are known (shaped, or from a data sheet);
    None takes the largest bus bandwidth measured. ``timeout_s`` bounds every collective.
    """

    min_bytes: int = 4096
    max_bytes: int = 32 << 20
    factor: float = 2.0
    repeats: Repeats = field(default_factory=lambda: Repeats(warmup=1, min_repeats=6, max_repeats=40, budget_us=1e6))
    group_max_bytes: int | None = None
    group_factor: float | None = None
    group_repeats: Repeats = field(
        default_factory=lambda: Repeats(warmup=1, min_repeats=3, max_repeats=16, half_width=0.1, budget_us=1e5)
    )
    interference_rounds: int = 7
    check: bool = True
    longest_us: float = math.inf
    is_probe: bool = False
    inter_gbps: float | None = None
    intra_gbps: float | None = None
    timeout_s: float = 120.0


def measure_cluster(
    options: SweepOptions,
    *,
    name: str,
    kind: str,
    source: str,
    topology: Topology | None = None,
    environment: dict[str, str] | None = None,
    on_point: Callable[[Point, int], None] | None = None,
    ranks: AllRanks | None = None,
) -> Profile:
    """Measure the world's links and return their profile: rank 0's, on every rank.

    ``topology`` None discovers it; ``ranks`` None is the default process group. ``on_point`` is called after each size with
    the point and the number of wrong bytes.
    Raises ClusterError where bytes arrive wrong, TopologyError for uneven nodes or a single rank.
    """
    topology = topology or discover_topology()
    if topology.world_size < 2:
        raise TopologyError(
            "expected a cluster of two ranks or more, got one, which has no links to measure: start more, for example "
            "`torchrun --nproc-per-node 2 --no-python commlayer profile`, or `commlayer profile --emulate 2x4`"
        )
    ranks = ranks or AllRanks.default()
    with Prober(topology, options.timeout_s, ranks) as prober:
        curves = _curves(prober, options, on_point)
        # From these alone: a ring of the backend's own crosses the wire on one rank of a node only, and looks faster than it.
        peaks = _peaks(curves, options)
        if ranks.device_type == "cpu":  # plans over nodes run on the CPU only, so far
            curves += _group_curves(prober, topology, options, on_point)
        pairs = _interference(prober, curves, options.interference_rounds)
    profile = Profile.create(
        name=name,
        kind=kind,
        source=source,
        topology=topology,
        peaks=peaks,
        gather="remote",
        curves=curves,
        interference=pairs,
        environment=_environment(environment, "nccl" if ranks.device_type == "cuda" else "gloo"),
    )
    # Hosts and dates differ between ranks, and a profile must not.
    return parse_profile(ranks.from_first(ProfileText(profile.to_json()), ProfileText).json, "rank 0's profile")


def num_points(options: SweepOptions, topology: Topology) -> int:
    """How many sizes a sweep of that cluster has in total, for progress bars.

    Exact, unless Gloo's ranks stand in an order in which it has no call of its own for small exchanges: then fewer.
    """
    num_nodes, num_ranks = topology.num_nodes, topology.ranks_per_node
    e, t, link = (num_ranks, 1, Resource.INTRA) if num_nodes == 1 else (num_nodes, num_ranks, Resource.INTER)
    has_one_call = not dist.is_initialized() or device_type(None) == "cpu"
    groups = len(group_curves(topology, is_probe=options.is_probe)) * len(_group_sizes(options)) if has_one_call else 0
    return groups + sum(len(entry.sizes) for entry in _entries(options, e, t, link, has_one_call=has_one_call))


@dataclass(frozen=True, slots=True)
class _Entry:
    """One curve to measure: its key, the sizes, and the plan that stands for a size."""

    collective: str
    link: Resource
    group_size: int
    sizes: tuple[int, ...]
    make: Callable[[int], Plan]


def _entries(options: SweepOptions, e: int, t: int, link: Resource, *, has_one_call: bool) -> list[_Entry]:
    """List what is measured on ep groups of ``e`` ranks and tp groups of ``t``."""

    def sizes(share: float) -> tuple[int, ...]:
        # What the plans gather and copy of a buffer of max_bytes is smaller than it: larger sizes would only cost time. But
        # of the few sizes of a probe none may be missing, and inside a node they cost little.
        largest = options.max_bytes if options.is_probe else int(options.max_bytes * share)
        return sizes_between(options.min_bytes, max(options.min_bytes, largest), options.factor)

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
            longest_us=options.longest_us,
        )
        for entry in _entries(options, e, t, link, has_one_call=has_one_call)
    ]


def _group_sizes(options: SweepOptions) -> tuple[int, ...]:
    largest = max(options.min_bytes, options.group_max_bytes or options.max_bytes // _GROUP_SHARE)
    return sizes_between(options.min_bytes, largest, options.group_factor or options.factor**2)


def _group_curves(
    prober: Prober, topology: Topology, options: SweepOptions, on_point: Callable[[Point, int], None] | None
) -> list[Curve]:
    groups = GroupProber(prober, topology, options.timeout_s)

    def prepare(curve: GroupCurve, size: int) -> Callable[[], float]:
        return groups.runner(curve, size, check=options.check)

    def report(point: Point) -> None:
        if on_point is not None:
            on_point(point, 0)  # a wrong one has been raised

    try:
        return [
            sweep(
                curve.collective,
                curve.link,
                curve.group_size,
                _group_sizes(options),
                partial(prepare, curve),
                options.group_repeats,
                report,
                longest_us=options.longest_us,
            )
            for curve in group_curves(topology, is_probe=options.is_probe)
        ]
    finally:
        groups.close()


def _interference(prober: Prober, curves: list[Curve], rounds: int) -> list[Interference]:
    """Pairs of resources, together against alone, each kept busy for about the same time."""
    e, t, link = len(prober.grid.ep_ranks), len(prober.grid.tp_ranks), prober.grid.link
    if (
        t == 1 or not rounds or prober.device == "cuda"
    ):  # a device's steps are not seen by the host: see SweepOptions and docs
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


def environment(backend: str | None = None) -> dict[str, str]:
    """Versions, backend, host and date, for a profile or a result: where the numbers come from.

    ``backend`` None is the default process group's.
    """
    return {
        "commlayer": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "kernel": platform.release().split("-")[0],
        "machine": platform.machine(),
        "host": platform.node(),
        "backend": backend or str(dist.get_backend()),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def _environment(more: dict[str, str] | None, backend: str) -> dict[str, str]:
    return environment(backend) | (more or {})
