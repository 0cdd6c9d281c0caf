"""Measures a cluster: every primitive over sizes, on the groups that the plans will use, through
the executor they will use.

All ranks of the world run :func:`measure_cluster` together. What they measure is listed in
:mod:`commlayer.scheduler.probes`, each curve over the sizes that :class:`SweepOptions` gives it.
Each time is the largest over ranks (a collective is as fast as its slowest rank), and every
decision to go on or stop rests on those agreed times.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from commlayer.agree.discovery import Identity, discover_topology, node_identity
from commlayer.failures.board import phase
from commlayer.measure.all_ranks import AllRanks, ProfileText
from commlayer.measure.calls import CodedCall, TimedCall
from commlayer.measure.device_harness import DeviceHarness, DeviceLinks, device_links
from commlayer.measure.harness import MEASURING, HostHarness
from commlayer.measure.interference import measure_interference
from commlayer.measure.link_times import time_links
from commlayer.measure.prober import Prober
from commlayer.profiles.curve import Curve
from commlayer.profiles.errors import ClusterError, InternalError, PeerError, TopologyError
from commlayer.profiles.links import Peaks, Resource, SlowLink
from commlayer.profiles.pairs import MOST_PAIR_ROUNDS, slow_links
from commlayer.profiles.profile import MEASURED_ON, Profile, parse_profile
from commlayer.profiles.survey import Ladder, SurveyLimits, Wanted, survey
from commlayer.profiles.sweep import Point, Repeats, sizes_between, sweep
from commlayer.profiles.topology import Topology
from commlayer.scheduler.group_profiles import link_load
from commlayer.scheduler.legs import CodedLeg
from commlayer.scheduler.plan import Op, Strategy
from commlayer.scheduler.probes import Probe, probes
from commlayer.scheduler.wire import Wire
from commlayer.transport.gloo import ONE_CALL_BYTES, GlooTransport, is_one_call
from commlayer.version import __version__

__all__ = [
    "HOSTS",
    "UNFINISHED",
    "SweepOptions",
    "complete_profile",
    "measure_cluster",
    "node_hosts",
    "num_points",
    "peaks_of",
    "run_environment",
]

_PAIR_BYTES, _PAIR_REPEATS = 1 << 20, 2
"""A node's bytes, and how often, for the rates of nodes' cards: more than a wire takes in a
burst."""
_PAIR_LOOKS = 3
"""How often a link that seems slow is looked at: a busy machine delays one by chance, but hardly
the same one each time."""
_LARGE = 4
"""Sizes of this part of the largest one on a link, and more, show the rate of a stream."""
HOSTS = "hosts"
"""The entry of a profile's environment that says on which nodes it found slow links, in their
order."""
UNFINISHED = "unfinished"
"""The entry of a profile's environment that says how many curves a probe left out when its time was
up."""
_CODED_BYTES = 1 << 13
"""The bytes that are encoded to see whether a device can."""
_GROUP_SHARE = 8
"""The curves of whole groups end at this fraction of the largest size: there are many of them, and
their links' rates show much earlier."""


@dataclass(frozen=True)
class SweepOptions:
    """Options of a sweep. Sizes in bytes a rank, with nccl-tests' letters: -b ``min_bytes``, -e
    ``max_bytes``, -f ``factor``, -n ``repeats.max_repeats``, -w ``repeats.warmup``, -c ``check``.

    ``group_max_bytes`` (None: an eighth of ``max_bytes``), ``group_factor`` (None: ``factor``
    squared) and ``group_repeats`` are for the curves of plans over nodes and of the backend's own
    calls, of which there are many. ``interference_rounds`` 0: pairs of resources are not measured.
    ``longest_us``: a curve ends at the first size that takes longer. ``is_probe``: spend little
    time, as :mod:`commlayer.profiles.survey` does. Then ``longest_us`` is what the largest size
    should take, nothing is timed again when ``budget_s`` is over, and when ``deadline_s`` is, no
    further call begins, but for the first curve of each link: other curves may be missing.
    ``repeats`` do not count, nothing is checked, and what few jobs plan is left out: broadcasts in
    a part of the job. ``inter_gbps`` and ``intra_gbps`` are the links' rates per rank where they
    are known (shaped, or from a data sheet); None takes the largest bus bandwidth measured.
    ``timeout_s`` bounds every collective.
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
    budget_s: float = 0.0
    deadline_s: float = math.inf
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
    on_point: Callable[[Point], None] | None = None,
    ranks: AllRanks | None = None,
    links: DeviceLinks | None = None,
) -> Profile:
    """Measure the world's links and return their profile: rank 0's, on every rank.

    ``topology`` None discovers it; ``ranks`` None is the default process group. ``on_point`` is
    called after each size. ``links``: those of a device, by its transport and its clock; None: the
    CPU's, or of NCCL's ranks those of their GPUs. Where nodes hold different numbers of ranks,
    pairs of resources are not measured: there is no grid to do it on. Raises ClusterError where
    bytes arrive wrong, TopologyError for a single rank.
    """
    topology = topology or discover_topology()
    if topology.world_size < 2:
        raise TopologyError(
            "expected a cluster of two ranks or more, got one, which has no links to measure: start more, for example "
            "`torchrun --nproc-per-node 2 --no-python commlayer measure`, or `commlayer measure --emulate 2x4`"
        )
    ranks = ranks or AllRanks.default()
    if links is None and ranks.device_type == "cuda":
        links = device_links(ranks.device)
    clock = _ProbeClock(ranks, options.deadline_s)
    with Prober(topology, options.timeout_s, ranks, links=links) as prober:
        sweeps = _possible(prober, _sweeps(options, topology))
        curves = _swept(prober, sweeps, options, topology, clock, on_point)
        of_peaks = {each.probe.key for each in sweeps if _shows_peak(each.probe, topology)}
        by_steps = [curve for curve in curves if curve.key in of_peaks] or curves
        # A device's cards are not compared: the CPU's measurement does that.
        slow = _slow_links(prober, clock) if topology.num_nodes > 2 and links is None else ()
        pairs = measure_interference(prober, by_steps, options.interference_rounds) if topology.is_uniform else []
    hosts = {HOSTS: node_hosts(topology, ranks)} if slow else {}
    unfinished = _unfinished(len(sweeps) - len(curves))
    where = run_environment("gloo" if links is None else links.backend)
    where |= {} if links is None else {MEASURED_ON: links.name}
    profile = Profile.create(
        gather="remote",
        name=name,
        kind=kind,
        source=source,
        topology=topology,
        peaks=peaks_of(by_steps, options),
        curves=curves,
        interference=pairs,
        slow_links=slow,
        environment=where | hosts | unfinished | (environment or {}),
    )
    return _of_first(profile, ranks)


def _unfinished(num_missing: int) -> dict[str, str]:
    """Return the entry of a profile's environment that counts its missing curves; empty where none
    is missing."""
    return {UNFINISHED: str(num_missing)} if num_missing else {}


def complete_profile(
    profile: Profile,
    options: SweepOptions,
    *,
    topology: Topology,
    ranks: AllRanks,
    links: DeviceLinks | None = None,
    as_kept: Callable[[Profile], Profile] = lambda measured: measured,
) -> Profile:
    """``profile`` with the curves that a probe left out when its time was up. Only these are
    measured, by ranks that all have it. Collective.

    ``links``: as of :func:`measure_cluster`. ``as_kept``: what is done to a profile of such
    ``options`` before it is kept. Raises what :func:`measure_cluster` raises.
    """
    known = {curve.key for curve in profile.curves}
    clock = _ProbeClock(ranks, options.deadline_s)
    with Prober(topology, options.timeout_s, ranks, links=links) as prober:
        sweeps = _possible(prober, [each for each in _sweeps(options, topology) if each.probe.key not in known])
        curves = _swept(prober, sweeps, options, topology, clock)
    measured = as_kept(profile.replace(curves=curves))
    unfinished = _unfinished(len(sweeps) - len(curves))
    environment = {name: value for name, value in profile.environment.items() if name != UNFINISHED} | unfinished
    completed = profile.replace(curves=[*profile.curves, *measured.curves], environment=environment)
    return _of_first(completed, ranks)


def num_points(options: SweepOptions, topology: Topology) -> int:
    """How many sizes a sweep of that cluster has in total, for progress bars.

    The most that it may be: fewer where a device has no call of its own for small exchanges, or
    lacks a wire format.
    """
    return sum(len(each.sizes) for each in _sweeps(options, topology))


class _Sweep(NamedTuple):
    """One sweep: the probe, its sizes, and how often each is timed."""

    probe: Probe
    sizes: tuple[int, ...]
    repeats: Repeats


def _sweeps(options: SweepOptions, topology: Topology) -> list[_Sweep]:
    """List all that is measured on a cluster."""
    smallest, group_factor = options.min_bytes, options.group_factor or options.factor**2
    group_largest = max(smallest, options.group_max_bytes or options.max_bytes // _GROUP_SHARE)
    group_sizes = sizes_between(smallest, group_largest, group_factor)
    sweeps = []
    for probe in probes(topology, is_brief=options.is_probe):
        if not _shows_peak(probe, topology):
            sweeps.append(_Sweep(probe, group_sizes, options.group_repeats))
            continue
        # What the plans gather and copy of a buffer of max_bytes is smaller than it: larger sizes would only cost time. But of
        # the few sizes of a probe none may be missing, and inside a node they cost little.
        largest = options.max_bytes if options.is_probe else int(options.max_bytes * probe.share)
        sizes = sizes_between(smallest, max(smallest, largest), options.factor)
        if _is_one_call(probe):
            sizes = tuple(size for size in sizes if probe.plan(size).traffic.logical_bytes <= ONE_CALL_BYTES)
        sweeps.append(_Sweep(probe, sizes, options.repeats))
    return [each for each in sweeps if each.sizes]


def _possible(prober: Prober, sweeps: Sequence[_Sweep]) -> list[_Sweep]:
    """Leave out what is not there on every rank: a flat exchange may have no call of its own, a
    device no form of a wire format. Collective."""
    harness, possible = prober.harness, []
    verdicts: dict[Wire, bool] = {}  # in one order on all ranks

    def is_everywhere(is_here: bool) -> bool:
        return prober.ranks.maximum(float(not is_here)) == 0.0

    for each in sweeps:
        if isinstance(each.probe.leg, CodedLeg) and isinstance(harness, DeviceHarness):
            wire = each.probe.unit.wire
            if wire not in verdicts:
                verdicts[wire] = is_everywhere(_encodes(harness, wire))
            if not verdicts[wire]:
                continue
        if _is_one_call(each.probe):
            # On a device posting a step does not wait for it, so there is nothing to save.
            transport = None if isinstance(harness, DeviceHarness) else prober.grid_runner.transport
            is_one = isinstance(transport, GlooTransport) and is_one_call(each.probe.plan(1), transport.channels)
            if not is_everywhere(is_one):
                continue
        possible.append(each)
    return possible


def _encodes(harness: DeviceHarness, wire: Wire) -> bool:
    """Whether this rank can encode in this format on its device: kernels need Triton, and a
    simulated device has some operators only."""
    try:
        with harness.on():
            CodedCall(Op.DECODE, wire, _CODED_BYTES, harness.device).run()
    except (ClusterError, PeerError):
        raise
    except Exception:  # noqa: BLE001  torch's, Triton's or the simulator's: none of them says "not here" alike
        return False
    return True


def _is_one_call(probe: Probe) -> bool:
    """Whether it is the flat exchange of the grid, which transports run as a call of the backend's
    own where they have one."""
    return probe.is_on_grid and probe.unit.strategy is Strategy.FLAT


def _shows_peak(probe: Probe, topology: Topology) -> bool:
    """Whether links' rates are taken from its curve: a ring of the backend's own crosses the wire
    on one rank of a node only, and looks faster than it; and among all ranks of uneven nodes no two
    cards carry as much."""
    if topology.is_uniform:
        return probe.is_on_grid
    return probe.leg.op is Op.COPY or (probe.where in ("node", "rail") and not probe.is_own_call)


class _ProbeClock:
    """The time that is gone since a probe began, on which all ranks agree: the longest of any."""

    def __init__(self, ranks: AllRanks, deadline_s: float) -> None:
        self._ranks, self._began, self.deadline_us = ranks, time.monotonic(), deadline_s * 1e6

    @property
    def mine_us(self) -> float:
        """Return the time that has passed for this rank, µs."""
        return (time.monotonic() - self._began) * 1e6

    def is_over(self, until_us: float) -> bool:
        """Whether so much time is gone; the same on all ranks. Collective, and no rank returns
        before all have asked."""
        return self._ranks.maximum(self.mine_us) >= until_us


def _swept(
    prober: Prober,
    sweeps: Sequence[_Sweep],
    options: SweepOptions,
    topology: Topology,
    clock: _ProbeClock,
    on_point: Callable[[Point], None] | None = None,
) -> list[Curve]:
    """The curves of ``sweeps``; of a probe those for which there was time."""
    if not options.is_probe:
        return [
            sweep(
                *probe.key,
                sizes,
                partial(prober.runner, probe, check=options.check),
                repeats,
                on_point,
                longest_us=options.longest_us,
            )
            for probe, sizes, repeats in sweeps
        ]
    calls_at_hand: dict[Wanted, TimedCall] = {}

    def ready(call: Wanted) -> tuple[Probe, TimedCall]:
        index, size = call
        probe = sweeps[index].probe
        made = calls_at_hand.get(call) or prober.call(probe, size)
        if size in sweeps[index].sizes[:-1]:  # the largest would take memory until the end
            calls_at_hand[call] = made
        return probe, made

    def run(calls: Sequence[Wanted], until_us: float) -> tuple[Sequence[float], float]:
        times = prober.harness.times_us(map(ready, calls), partial(clock.is_over, until_us))
        *agreed, spent_us = prober.ranks.maxima([*times, clock.mine_us])
        return agreed, spent_us

    nodes = [len(members) for members in topology.nodes]
    ladders = [Ladder(each.sizes, each.probe.key[1], link_load(each.probe, nodes)) for each in sweeps]
    surveyed = survey(ladders, run, SurveyLimits(options.budget_s * 1e6, options.longest_us, clock.deadline_us))
    curves = []
    for place, each in enumerate(sweeps):
        if rungs := surveyed.curve(place):
            sizes, times_us, samples = zip(*rungs, strict=True)
            curves.append(Curve.from_samples(*each.probe.key, sizes, times_us, samples=samples))
    return curves


def _of_first(profile: Profile, ranks: AllRanks) -> Profile:
    """Rank 0's profile, on every rank: hosts and dates differ between ranks, and a profile must
    not."""
    return parse_profile(ranks.from_first(ProfileText(profile.to_json()), ProfileText).json, "rank 0's profile")


def node_hosts(topology: Topology, ranks: AllRanks) -> str:
    """The nodes' hosts in their order, without network namespaces, which have another name each
    time. Collective.

    Asked of the ranks: a declared topology has no hosts.
    """
    identities = [theirs.text for theirs in ranks.gather(Identity(node_identity()), Identity)]
    return " ".join(identities[members[0]].split("/")[0] for members in topology.nodes)


def _slow_links(prober: Prober, clock: _ProbeClock) -> tuple[SlowLink, ...]:
    """The cards and pairs that are slower than the others each time; one look is enough where none
    is. None, where there is no time to look so often.

    Ranks at the same place of two nodes exchange, as many as the emptiest node has.
    """
    if not isinstance(prober.harness, HostHarness):
        raise InternalError("pairs of nodes are timed between CPU ranks, not on a device")
    slow: tuple[SlowLink, ...] = ()
    for look in range(_PAIR_LOOKS):
        if clock.is_over(clock.deadline_us):
            return ()
        with phase(f"{MEASURING}, node {prober.topology.node_of(prober.ranks.rank)} with others one by one"):
            links = time_links(prober.harness.planned("world"), _PAIR_BYTES, MOST_PAIR_ROUNDS, _PAIR_REPEATS)
        seen = slow_links(links.taken_us)
        before = {link.nodes for link in slow}
        slow = tuple(link for link in seen if not look or link.nodes in before)
        if not slow:
            break
    return slow


def peaks_of(curves: Sequence[Curve], options: SweepOptions) -> Peaks:
    """The rates of links: those that ``options`` states, else the largest bus bandwidth of any
    curve at large sizes."""
    best: dict[Resource, float] = {}
    longest: dict[Resource, int] = {}
    for curve in curves:
        longest[curve.link] = max(curve.bytes[-1], longest.get(curve.link, 0))
    for curve in curves:
        # At large sizes only: of a smaller one a wire takes a burst on credit, which a stream pays back.
        large = [size for size in curve.bytes if size * _LARGE >= longest[curve.link]]
        best[curve.link] = max([best.get(curve.link, 0.0), *map(curve.busbw_gbps, large)])
    known = {Resource.INTER: options.inter_gbps, Resource.INTRA: options.intra_gbps, Resource.DEVICE: None}
    rates = {link: known[link] or best.get(link) for link in known}
    fallback = best.get(Resource.INTRA) or max(best.values())
    return Peaks(*(rates[link] or fallback for link in (Resource.INTER, Resource.INTRA, Resource.DEVICE)))


def run_environment(backend: str | None = None) -> dict[str, str]:
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
