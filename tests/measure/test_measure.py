from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import HALF_AN_HOUR
from torch._C._distributed_c10d import PrefixStore  # torch.distributed has it too, but not for type checkers
from torch.distributed.distributed_c10d import _get_default_store

from commlayer.agree.discovery import discover_topology
from commlayer.engine import connections
from commlayer.measure import interference as interference_measured
from commlayer.measure import profiler
from commlayer.measure.all_ranks import AllRanks
from commlayer.measure.calls import CodedCall, GridCall, GroupCall
from commlayer.measure.harness import HostGroup, HostHarness
from commlayer.measure.interference import measure_interference
from commlayer.measure.prober import Prober
from commlayer.measure.profiler import SweepOptions, measure_cluster, num_points
from commlayer.profiles.curve import Curve
from commlayer.profiles.errors import ClusterError, CommlayerError, TopologyError, UsageError
from commlayer.profiles.links import Resource
from commlayer.profiles.nccl_table import COLUMNS, NcclRow
from commlayer.profiles.profile import Profile
from commlayer.profiles.sweep import (
    MAX_SLOWDOWN,
    Point,
    Repeats,
    interference,
    measure,
    sizes_between,
    summarize,
    sweep,
)
from commlayer.profiles.topology import Topology
from commlayer.scheduler.broadcast import Scatter
from commlayer.scheduler.plan import Plan
from commlayer.scheduler.probes import MESSAGE, Probe, probes, probes_of_calls, probes_of_grid
from commlayer.testing.plugin import ClusterFactory
from commlayer.transport.gloo import is_one_call

UNHURRIED = settings(deadline=None)  # a busy machine is no failure


class Script:
    """Plays a list of times, the last one for ever, and counts the runs."""

    def __init__(self, *times_us: float) -> None:
        self.times_us = times_us
        self.num_runs = 0

    def __call__(self) -> float:
        self.num_runs += 1
        return self.times_us[min(self.num_runs, len(self.times_us)) - 1]


def test_steady_times_stop_as_soon_as_the_median_has_an_interval() -> None:
    run = Script(500.0, 100.0)
    samples = measure(run, Repeats(warmup=2))
    # 5 times hold the median between their extremes with 93.75 % only; 6 with 96.9 %
    assert (samples.num, run.num_runs) == (6, 8)
    assert (samples.p50_us, samples.p99_us, samples.mean_us, samples.cv) == (100.0, 100.0, 100.0, 0.0)
    assert (samples.half_width, samples.num_outliers) == (0.0, 0)


def test_fewer_repeats_suffice_for_less_confidence() -> None:
    assert measure(Script(1.0), Repeats(min_repeats=5, confidence=0.9)).num == 5


def test_noisy_times_go_on_until_the_bound() -> None:
    samples = measure(Script(*[100.0, 200.0] * 30), Repeats(max_repeats=40))
    assert samples.num == 40
    assert samples.half_width > 0.05


def test_the_budget_ends_a_slow_measurement_at_the_least_number_of_repeats() -> None:
    samples = measure(Script(*[5e5, 9e5] * 20), Repeats(min_repeats=5, budget_us=2e6))
    assert samples.num == 5


def test_two_runs_suffice_when_each_takes_over_half_of_the_budget() -> None:
    run = Script(1.5e6)
    samples = measure(run, Repeats(warmup=3, min_repeats=5, budget_us=2e6))
    assert samples.num == 2
    assert run.num_runs == 3  # one warm-up, which took most of the budget, was enough
    assert samples.half_width == math.inf


def test_one_hiccup_does_not_cut_a_measurement_short() -> None:
    samples = measure(Script(100.0, 100.0, 1.9e6, 100.0), Repeats(warmup=0, min_repeats=5, budget_us=2e6))
    assert samples.num >= 5
    assert samples.num_outliers == 1
    assert samples.p99_us == 100.0
    assert max(samples.raw) == 1.9e6


@UNHURRIED
@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=60), st.integers(0, 3), st.integers(1, 6))
def test_ranks_that_hear_the_same_times_run_equally_often(times: list[float], warmup: int, least: int) -> None:
    repeats = Repeats(warmup=warmup, min_repeats=least, max_repeats=30)
    runs = [Script(*times) for _ in range(2)]
    first, second = (measure(run, repeats) for run in runs)
    assert first == second
    assert runs[0].num_runs == runs[1].num_runs <= warmup + 30
    assert first.num >= min(least, 2)


def test_outliers_are_counted_and_left_out() -> None:
    steady = [98.0, 99.0, 100.0, 101.0, 102.0]
    samples = summarize([*steady, 400.0])
    assert (samples.num, samples.num_outliers) == (6, 1)
    assert (samples.p50_us, samples.p99_us) == (100.0, 102.0)
    assert samples.mean_us == 100.0
    assert samples.cv == pytest.approx(math.sqrt(2.5) / 100)
    assert samples.raw == (*steady, 400.0)
    assert summarize(steady).num_outliers == 0


def test_a_coarse_clock_makes_no_outliers_of_a_tick() -> None:
    assert summarize([100.0] * 5 + [100.5]).num_outliers == 0
    assert summarize([100.0] * 5 + [110.0]).num_outliers == 1


@UNHURRIED
@given(st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=50))
def test_statistics_stay_within_the_times(times: list[float]) -> None:
    samples = summarize(times)
    assert min(times) <= samples.p50_us <= samples.p99_us <= max(times)
    assert samples.num == len(times)
    assert samples.num_outliers < samples.num
    assert samples.half_width >= 0
    assert (samples.half_width == math.inf) == (len(times) < 6)


@pytest.mark.parametrize("time_us", [0.0, -1.0, math.nan, math.inf])
def test_a_run_must_return_a_time(time_us: float) -> None:
    with pytest.raises(UsageError, match="positive, finite time in us"):
        measure(lambda: time_us, Repeats())
    with pytest.raises(UsageError, match="positive, finite"):
        interference(1.0, 1.0, time_us, 1.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"warmup": -1},
        {"min_repeats": 0},
        {"max_repeats": 4},
        {"confidence": 1.0},
        {"half_width": 0.0},
        {"budget_us": 0.0},
    ],
)
def test_repeats_out_of_range_are_refused_by_name(fields: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=rf"Repeats\.{next(iter(fields))}: expected .*, got "):
        Repeats(**fields)  # type: ignore[arg-type]


def test_a_sweep_makes_a_curve_and_reports_each_point() -> None:
    points: list[Point] = []
    prepared: list[int] = []

    def prepare(nbytes: int) -> Callable[[], float]:
        prepared.append(nbytes)
        return lambda: 10 + nbytes / 1000

    curve = sweep(
        "all_to_all", Resource.INTER, 2, [1000, 4000, 16000], prepare, Repeats(), points.append, source="a test"
    )
    assert prepared == [1000, 4000, 16000] == [point.nbytes for point in points]
    assert curve.time_us == curve.p50_us == curve.p99_us == (11.0, 14.0, 26.0)
    assert curve.samples == (6, 6, 6)
    assert (curve.key, curve.source) == (("all_to_all", Resource.INTER, 2), "a test")
    # left out, 4000 is predicted as the geometric mean of its neighbours
    assert curve.holdout_error == pytest.approx(math.sqrt(11 * 26) / 14 - 1)


@pytest.mark.parametrize("sizes", [[], [0, 1], [2, 2], [2, 1]])
def test_a_sweep_refuses_sizes_that_make_no_curve(sizes: list[int]) -> None:
    with pytest.raises(UsageError, match="expected sizes"):
        sweep("all_to_all", Resource.INTER, 2, sizes, lambda _: lambda: 1.0, Repeats())


def test_sizes_follow_nccl_tests() -> None:
    assert sizes_between(1024, 8192, 2) == (1024, 2048, 4096, 8192)
    assert sizes_between(1024, 8191, 2) == (1024, 2048, 4096)
    assert sizes_between(7, 7, 4) == (7,)
    assert sizes_between(1, 4, 1.25) == (1, 2, 3, 4)
    for wrong in [(0, 8, 2.0), (8, 4, 2.0), (1, 8, 1.0), (1, 8, math.nan)]:
        with pytest.raises(UsageError, match="a largest one that is no smaller"):
            sizes_between(*wrong)


def test_a_row_has_nccl_tests_columns() -> None:
    point = Point("all_gather", Resource.INTRA, 8, 64_000_000, summarize([400.0] * 6))
    row = NcclRow.of(point, dtype="bfloat16", element_bytes=2, num_wrong=0)
    assert row.algbw_gbps == pytest.approx(160)
    assert row.busbw_gbps == pytest.approx(140)
    rates, times, quality = ("400.0", "160.0", "140.0"), ("400.0", "400.0"), ("0.0", "0")
    assert row.cells() == ("64000000", "32000000", "bfloat16", *rates, "0", *times, *quality)
    assert len(row.cells()) == len(COLUMNS)
    assert NcclRow.of(point).cells()[6] == "N/A"


def together(alone_a_us: float, alone_b_us: float, slow_a: float, slow_b: float) -> tuple[float, float]:
    """The fluid model forwards: when two steps that start together end."""
    both_a, both_b = alone_a_us * slow_a, alone_b_us * slow_b
    if both_a <= both_b:
        return both_a, both_a + alone_b_us - both_a / slow_b
    return both_b + alone_a_us - both_b / slow_a, both_b


TIMES = st.floats(1, 1e6)
SLOWDOWNS = st.floats(1, 5)


@UNHURRIED
@given(TIMES, TIMES, SLOWDOWNS, SLOWDOWNS)
def test_interference_inverts_the_fluid_model(a_us: float, b_us: float, slow_a: float, slow_b: float) -> None:
    beside = together(a_us, b_us, slow_a, slow_b)
    found = interference(a_us, b_us, *beside)
    # what the longer one lost is a small difference of large times when the other was very short
    tolerance = 1e-10 * max(beside) / min(beside)
    assert found[0] == pytest.approx(slow_a, rel=tolerance)
    assert found[1] == pytest.approx(slow_b, rel=tolerance)


@UNHURRIED
@given(TIMES, TIMES, TIMES, TIMES)
def test_interference_of_any_times_is_a_slowdown(a: float, b: float, beside_a: float, beside_b: float) -> None:
    slowdowns = interference(a, b, beside_a, beside_b)
    assert all(1 <= slowdown <= max(MAX_SLOWDOWN, beside_a / a, beside_b / b) for slowdown in slowdowns)


def test_interference_by_example() -> None:
    assert interference(10, 10, 10, 10) == (1.0, 1.0)
    assert interference(10, 10, 9, 9.5) == (1.0, 1.0)  # faster together is noise
    assert interference(10, 10, 15, 15) == (1.5, 1.5)
    # a ends at 15; until then b did 15 / 1.5 = 10 of its 20, and the rest takes 10 more
    assert interference(10, 20, 15, 25) == (1.5, 1.5)
    # one after the other: b stood still while a ran
    assert interference(10, 10, 10, 20) == (1.0, MAX_SLOWDOWN)


# The profiler, on the ranks of emulated clusters


_STEPS = ("all_to_all", "all_to_all_single", "all_gather", "copy")
_BY_LEADERS = ("gather", "leaders", "scatter")
_OWN_CALLS = ("all_gather_single", "reduce_scatter_single", "all_reduce", "broadcast", "all_to_all_v")
_CODED = {f"{way}_{wire}" for way in ("encode", "decode") for wire in ("bf16", "int8", "fp8_e4m3", "fp8_e5m2")}
_QUICK = {"max_bytes": 1 << 20, "factor": 4.0, "interference_rounds": 1, "timeout_s": 20.0}


def options(**changes: Any) -> SweepOptions:
    repeats = Repeats(warmup=0, min_repeats=2, max_repeats=2)
    return SweepOptions(**{**_QUICK, "repeats": repeats, **changes})


def join() -> Topology:
    """On a rank: enter the world."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return discover_topology()


def profiled() -> tuple[Profile, int, list[tuple[str, int]]]:
    interference_measured._NUM_BYTES = 1 << 16  # what comes of it is not looked at
    topology = join()
    seen: list[tuple[str, int]] = []

    def on_point(point: Point) -> None:
        seen.append((point.collective, point.nbytes))

    profile = measure_cluster(
        options(), name="p", kind="emulated", source="a test", topology=topology, on_point=on_point
    )
    return profile, num_points(options(), topology), seen


@pytest.mark.cluster
def test_messages_and_the_one_call_have_curves_of_their_own(emulated_cluster: ClusterFactory) -> None:
    for profile, announced, seen in emulated_cluster(2, 2).run(profiled):
        sizes = {curve.key: curve.bytes for curve in profile.curves}
        own = {key: sizes.pop(key) for key in list(sizes) if key[0] not in _STEPS or key[1:] == (Resource.INTER, 4)}
        own |= {key: sizes.pop(key) for key in [("all_to_all", Resource.INTRA, 2), ("all_gather", Resource.INTER, 2)]}
        assert sizes == {
            ("all_to_all", Resource.INTER, 2): (4096, 16384, 65536, 262144, 1 << 20),
            ("all_to_all_single", Resource.INTER, 2): (4096, 16384, 65536),  # above, a flat exchange is messages too
            ("all_gather", Resource.INTRA, 2): (4096, 16384, 65536, 262144),
            ("copy", Resource.DEVICE, 1): (4096, 16384, 65536, 262144),
        }
        assert len(profile.interference) == 6
        steps = {*_STEPS, *_BY_LEADERS, *_OWN_CALLS, "reduce", *_CODED}
        assert {key[0] for key in own} == steps - {"all_to_all_single", "copy"}
        assert {key[1:] for key in own if key[0] == "all_reduce"} == {
            (Resource.INTER, 4),  # the world
            (Resource.INTRA, 2),  # a node
            (Resource.INTER, 2),  # a rail
        }
        assert announced == len(seen) == sum(map(len, [*sizes.values(), *own.values()]))
        assert seen == [(curve.collective, size) for curve in profile.curves for size in curve.bytes]


def test_the_curve_of_the_one_call_stands_for_nothing_but_itself() -> None:
    curves = [
        Curve("all_to_all", Resource.INTER, 2, (1 << 20, 1 << 22), (1000.0, 4000.0)),
        Curve("all_to_all_single", Resource.INTER, 2, (1024,), (1000.0,)),  # slow, and last of its link
        Curve("all_gather", Resource.INTRA, 4, (1 << 20, 1 << 22), (1000.0, 4000.0)),
        Curve("copy", Resource.DEVICE, 1, (1 << 20, 1 << 22), (1000.0, 4000.0)),
    ]
    assert profiler.peaks_of(curves, options()).inter_gbps == pytest.approx((1 << 20) / 2 / 1000 / 1e3)
    probed: list[tuple[int, ...]] = []
    measured = (Resource.INTER, Resource.INTRA, Resource.DEVICE)

    def ends(plan: Plan, rounds: int, num_products: int) -> dict[Resource, float]:
        assert (rounds, num_products) == (7, 0)
        probed.append(tuple(sum(step.resource is resource for step in plan.steps) for resource in measured))
        return dict.fromkeys(Resource, 1.0)

    grid = SimpleNamespace(ep_ranks=(0, 4), tp_ranks=(0, 1, 2, 3), link=Resource.INTER)
    prober: Any = SimpleNamespace(grid=grid, harness=None, ends=ends)
    measure_interference(prober, curves, 7)
    # 4 MiB gathered and copied take 4 ms each, the exchange of a slice of 2 MiB takes 2 ms: twice as many keep up
    assert (2, 1, 0) in probed
    assert (2, 0, 1) in probed
    assert (0, 1, 1) in probed


@pytest.mark.parametrize(
    ("shape", "changes", "expected"),
    [
        # The steps of replicated tokens, and those of whole groups: the sum in memory; on the world, a node, a rail and, in
        # nodes of more than two ranks, a pair five calls of the backend's own, and the exchange and the gather by messages that
        # are not among the first; three of plans by leaders on the world. Then encoding and decoding of four wire formats.
        ("2x4", {}, 5 + 3 + 4 + 4 + 2 * (1 + 10 + 6 + 6 + 7 + 8)),
        ("2x1", {}, 5 + 3 + 4 + 2 * (1 + 6 + 8)),
        ("1x4", {}, 5 + 3 + 4 + 2 * (1 + 6 + 7 + 8)),
        ("3x2", {}, 5 + 3 + 4 + 4 + 2 * (1 + 10 + 6 + 6 + 8)),
        ("2x4", {"min_bytes": 1 << 18}, 2 + 1 + 1 + 38),  # too large for the one call
        ("2x4", {"min_bytes": 1 << 17, "max_bytes": 1 << 17}, 1 + 1 + 1 + 1 + 38),
        ("3x4", {"min_bytes": 1 << 17, "max_bytes": 1 << 17}, 1 + 1 + 1 + 38),  # rounded up to a multiple of 3
    ],
)
def test_the_number_of_points_is_known_before(shape: str, changes: dict[str, int], expected: int) -> None:
    assert num_points(options(**changes), Topology.parse(shape)) == expected


def moved_by_hand(size: int) -> tuple[list[bool], int, int]:
    """Which probe is one call; the wrong bytes of a sound exchange of messages, and of one that moves nothing."""
    with Prober(join(), 20.0) as prober:
        plans = [probe.plan(size) for probe in probes_of_grid(2, 2, Resource.INTER)[:2]]
        transport: Any = prober.grid_runner.transport
        calls = [is_one_call(plan, transport.channels) for plan in plans]
        sound = prober.on_grid(plans[0]).num_wrong()
        prober.grid_runner.launch = lambda *_: lambda: None  # type: ignore[method-assign]
        return calls, sound, prober.on_grid(plans[0]).num_wrong()


@pytest.mark.cluster
@pytest.mark.parametrize("size", [2, 4096])
def test_small_exchanges_by_messages_are_checked(emulated_cluster: ClusterFactory, size: int) -> None:
    for calls, sound, broken in emulated_cluster(2, 2).run(moved_by_hand, size):
        assert calls == [False, True]
        assert sound == 0
        assert broken > 0


def each_probed_once() -> list[tuple[str, bool, int, int]]:
    """Each probe, also that of a new leg: whether it took time; how many values are wrong, and are where nothing runs."""
    Scatter.curve_keys = lambda *_: (("send", Resource.INTRA, 2),)  # type: ignore[method-assign]
    topology = join()
    found = []
    with Prober(topology, 20.0) as prober:
        for probe in [*probes(topology), *probes_of_calls("node", (2,))[-1:]]:
            took = prober.runner(probe, 4096, check=True)() > 0
            call: Any = prober.call(probe, 4096)
            sound = call.num_wrong()
            nothing: Any = SimpleNamespace(run=lambda *_: None)
            if isinstance(call, CodedCall):
                call.message.zero_()
            elif isinstance(call, GridCall):
                call.run = nothing.run  # type: ignore[method-assign]
            else:
                call.run = call._run = nothing.run
            found.append((probe.key[0], took, sound, prober.ranks.total(call.num_wrong())))
    return found


@pytest.mark.cluster
def test_every_probe_runs_and_is_checked(emulated_cluster: ClusterFactory) -> None:
    for found in emulated_cluster(2, 2).run(each_probed_once):
        names = {name for name, *_ in found}
        assert names == {*_STEPS, *_BY_LEADERS, *_OWN_CALLS, "reduce", *_CODED, "send", "send_recv"}
        assert [(name, took, wrong) for name, took, wrong, _ in found] == [(name, True, 0) for name, *_ in found]
        assert all(broken for *_, broken in found), found


def measured_on_a_broken_link() -> str:
    """Closing what was under way must not wait for the timeout."""
    topology = join()
    GridCall.run = lambda *_: None  # type: ignore[method-assign]
    try:
        measure_cluster(options(timeout_s=HALF_AN_HOUR), name="p", kind="emulated", source="a test", topology=topology)
    except ClusterError as error:
        return str(error)
    return "no error"


@pytest.mark.cluster
def test_wrong_bytes_end_the_sweep_with_advice(emulated_cluster: ClusterFactory) -> None:
    for message in emulated_cluster(2, 1).run(measured_on_a_broken_link):
        assert "all_to_all of 4096 bytes delivered" in message
        assert "Look for a faulty card, cable or driver" in message


def failing_probe() -> tuple[str, set[str]]:
    """Rank 0 fails between two calls, the others wait for it in the second."""
    topology = join()
    probers = [
        Prober(topology, HALF_AN_HOUR) for _ in range(2)
    ]  # kept: to drop one would tear what its peers still connect
    keys = {prober.grid_runner.transport.board.key for prober in probers}  # type: ignore[attr-defined]
    plan = probes_of_grid(2, 1, Resource.INTER)[0].plan(4096)
    try:
        with Prober(topology, HALF_AN_HOUR) as prober:
            call = prober.on_grid(plan)
            call.run()
            dist.barrier()
            if dist.get_rank() == 0:
                raise ZeroDivisionError("mine")
            call.run()
    except (ZeroDivisionError, CommlayerError) as error:
        return f"{type(error).__name__}: {error}", keys
    return "no error", keys


@pytest.mark.cluster
def test_a_failing_probe_keeps_its_error_and_wakes_the_others(emulated_cluster: ClusterFactory) -> None:
    (first, keys), (second, _) = emulated_cluster(2, 1).run(failing_probe)
    assert first == "ZeroDivisionError: mine"
    assert second.startswith("PeerError: rank 0 left with ZeroDivisionError: mine")
    assert len(keys) == 2  # a board each: what one Prober reports is not read by the next


_OWN_OF_TWO = probes_of_calls("world", (1, 1))


def broken_own_call(topology: Topology, probe: Probe) -> str:
    """Rank 0 has left the group, its connections still open, when the other waits in it."""
    try:
        with Prober(topology, 5.0) as prober:
            call = prober.call(probe, 1 << 22)
            call.run()
            dist.barrier()
            if dist.get_rank() == 0:
                assert isinstance(prober.harness, HostHarness)
                prober.harness.planned("world").board.leave("left with a test")
                dist.barrier()
                raise ZeroDivisionError
            try:
                call.run()
            finally:
                dist.barrier()
    except (ZeroDivisionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def broken_own_calls() -> list[str]:
    topology = join()
    return [broken_own_call(topology, probe) for probe in _OWN_OF_TWO]


@pytest.mark.cluster
def test_a_rank_that_waits_in_a_call_of_the_backends_own_hears_of_a_failure(emulated_cluster: ClusterFactory) -> None:
    _, heard = emulated_cluster(2, 1).run(broken_own_calls)
    for probe, error in zip(_OWN_OF_TWO, heard, strict=True):
        name = "send_recv" if probe.leg is MESSAGE else probe.plan(8).traffic.collective
        assert error.startswith("PeerError: rank 0 left with a test; here: rank 1, group world, collective"), error
        assert f"collective {name} #2" in error


def failing_own_call() -> tuple[str, bool]:
    """Rank 0 fails between two own calls, the other waits for it in the second; and whether they bury the group."""
    topology = join()
    buried: list[object] = []
    connections.bury = buried.extend  # type: ignore[attr-defined, assignment]
    try:
        with Prober(topology, HALF_AN_HOUR) as prober:
            call = prober.call(_OWN_OF_TWO[0], 4096)
            assert isinstance(call, GroupCall)
            assert call.is_own
            assert isinstance(call.group, HostGroup)
            own = call.group.own
            call.run()
            dist.barrier()
            if dist.get_rank() == 0:
                raise ZeroDivisionError("mine")
            call.run()
    except (ZeroDivisionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", own in buried
    return "no error", False


@pytest.mark.cluster
def test_a_failure_between_own_calls_is_told_to_those_who_wait_in_them(emulated_cluster: ClusterFactory) -> None:
    (first, *_), (second, is_buried) = emulated_cluster(2, 1).run(failing_own_call)
    assert first == "ZeroDivisionError: mine"
    assert second.startswith("PeerError: rank 0 left with ZeroDivisionError: mine"), second
    assert is_buried


def failing_in_a_part(is_on_grid: bool) -> str:
    """Ranks 2 and 3 measure; the first of them fails, and the other waits for it."""
    join()
    me, members = dist.get_rank(), (2, 3)
    group = dist.new_group(list(members))
    if me not in members:
        dist.barrier()
        return ""
    store = PrefixStore("part", _get_default_store())
    ranks = AllRanks(members.index(me), 2, store, group, "cpu", members)
    probe = probes_of_grid(2, 1, Resource.INTER)[0] if is_on_grid else _OWN_OF_TWO[0]
    try:
        with Prober(Topology.parse("2x1"), HALF_AN_HOUR, ranks) as prober:
            call = prober.call(probe, 1 << 22)
            call.run()
            if me == 2:
                raise ZeroDivisionError("mine")
            call.run()
    except (ZeroDivisionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()
    return "no error"


@pytest.mark.cluster
@pytest.mark.parametrize("is_on_grid", [True, False])
def test_the_ranks_of_a_measurement_of_some_are_named_as_in_the_job(
    emulated_cluster: ClusterFactory, is_on_grid: bool
) -> None:
    *_, first, second = emulated_cluster(2, 2).run(failing_in_a_part, is_on_grid)
    assert first == "ZeroDivisionError: mine"
    assert second.startswith("PeerError: rank 2 left with ZeroDivisionError: mine; here: rank 3, group"), second


def leaving(is_failing: bool) -> tuple[str, bool, bool]:
    """How a measurement ends that fails, or whose end fails; and whether its detector was open before, and is after."""
    join()
    try:
        with Prober(Topology.parse("2x1"), 5.0) as prober:
            prober.call(probes_of_grid(2, 1, Resource.INTER)[0], 4096).run()
            was_open = prober.detector.is_open
            dist.barrier()
            if is_failing:
                raise ZeroDivisionError("mine")

            def fail() -> None:
                raise ZeroDivisionError("closing")

            prober.grid_runner.transport.close = fail  # type: ignore[method-assign]
    except ZeroDivisionError as error:
        return str(error), was_open, prober.detector.is_open
    return "no error", was_open, False


@pytest.mark.cluster
@pytest.mark.parametrize("is_failing", [True, False])
def test_a_measurement_that_fails_closes_its_detector(emulated_cluster: ClusterFactory, is_failing: bool) -> None:
    why = "mine" if is_failing else "closing"
    assert emulated_cluster(2, 1).run(leaving, is_failing) == [(why, True, False)] * 2


def test_a_cluster_of_one_rank_is_told_how_to_be_larger() -> None:
    with pytest.raises(TopologyError, match=r"two ranks or more, got one.*start more, for example `torchrun"):
        measure_cluster(options(), name="p", kind="measured", source="", topology=Topology.parse("1x1"))
