"""The Communicator on emulated clusters: real processes, real bytes, every plan against torch.distributed's own result."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import DTYPES, HALF_AN_HOUR, ONE_OF_EACH_SIZE, be_absent, meet, tell
from synthetic_profiles import synthetic_profile

from commlayer import Communicator, discover_topology
from commlayer.calls.ring import opened_tracks, recorded_calls
from commlayer.emulation import EmulatedCluster, RanksFailedError
from commlayer.measure.benchmark import world_groups
from commlayer.profiles.errors import (
    ClusterError,
    CollectiveTimeoutError,
    DisagreementError,
    GroupError,
    PeerError,
    PlanError,
    ProfileMismatchError,
    ProfileNotFoundError,
    SettingsError,
    TensorError,
    UsageError,
)
from commlayer.scheduler import Gather, Op, Plan, Policy, Strategy, Traffic, build
from commlayer.testing.plugin import ClusterFactory

pytestmark = pytest.mark.cluster

OF_REPLICATED = [
    strategy for strategy in Strategy if strategy not in (Strategy.DIRECT, Strategy.LEADERS, Strategy.RING)
]


def start(profile: Any = None, timeout_s: float = 20.0, **options: Any) -> tuple[Communicator, Any, Any]:
    """On a rank: the process group, its ep and tp groups, a Communicator over them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    topology = discover_topology()
    ep_group, tp_group = world_groups(topology)
    if profile is None:
        profile = synthetic_profile(nodes=topology.num_nodes, ranks_per_node=topology.ranks_per_node)
    return Communicator(ep_group, tp_group, profile=profile, timeout_s=timeout_s, **options), ep_group, tp_group


def tokens(communicator: Communicator, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bytes (NaN payloads included), the same on the ranks of a node, different between nodes."""
    generator = torch.Generator().manual_seed(1000 * seed + communicator.grid.ep_index)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def by_torch(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """torch.distributed's flat result, moved as bytes (Gloo refuses some dtypes)."""
    source = as_bytes(x)
    target = torch.empty_like(source)
    dist.all_to_all_single(target, source, group=group)
    return target


def all_plans(traffic: Traffic) -> list[Plan]:
    plans = [build(traffic, Strategy.FLAT)]
    if traffic.group_size > 1 and traffic.replication > 1:
        for gather in Gather:
            plans.append(build(traffic, Strategy.HIERARCHICAL, gather=gather))
            for chunks in (1, 3, 4):
                plans.append(build(traffic, Strategy.PIPELINED, chunks, gather))
                plans.append(build(traffic, Strategy.PIPELINED_COPY, chunks, gather))
    return plans


def check_all_plans(communicator: Communicator, ep_group: Any, x: torch.Tensor) -> None:
    expected = by_torch(x, ep_group)
    size = x.numel() * x.element_size()
    traffic = Traffic(size, len(communicator.grid.ep_ranks), len(communicator.grid.tp_ranks))
    for plan in [None, *all_plans(traffic)]:
        got = communicator.all_to_all(x, plan=plan)
        assert got.shape == x.shape
        assert got.dtype == x.dtype
        assert torch.equal(as_bytes(got), expected), (plan and plan.name, x.shape, x.dtype)


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "dtypes"),
    [
        (2, 4, DTYPES),
        (3, 3, ONE_OF_EACH_SIZE),
        (2, 1, ONE_OF_EACH_SIZE),
        (4, 2, ONE_OF_EACH_SIZE),
    ],
    ids=["2x4", "3x3", "2x1", "4x2"],
)
def test_every_plan_equals_flat_in_every_dtype(
    emulated_cluster: ClusterFactory, nodes: int, ranks_per_node: int, dtypes: list[torch.dtype]
) -> None:
    def job() -> None:
        communicator, ep_group, _ = start()
        for dtype in dtypes:
            check_all_plans(communicator, ep_group, tokens(communicator, (2 * nodes, 3, 5), dtype))
        communicator.close()

    emulated_cluster(nodes=nodes, ranks_per_node=ranks_per_node).run(job)


SHAPES = [(2,), (2, 1), (0, 8), (2, 0), (6, 7, 11), (4, 333), (2, 3, 5, 7), (128, 1024), (2, 300_007)]


def test_every_plan_equals_flat_in_every_shape(emulated_cluster: ClusterFactory) -> None:
    """One token, none, sizes that neither ranks nor chunks divide, one and many dimensions; also not contiguous."""

    def job() -> None:
        communicator, ep_group, _ = start()
        for shape in SHAPES:
            x = tokens(communicator, shape, torch.float32)
            check_all_plans(communicator, ep_group, x)
        transposed = tokens(communicator, (33, 6), torch.bfloat16).t()
        strided = tokens(communicator, (8, 40), torch.float32)[::2, 3:17]
        expanded = tokens(communicator, (1, 9), torch.int64).expand(4, 9)
        for x in (transposed, strided, expanded):
            assert not x.is_contiguous()
            check_all_plans(communicator, ep_group, x)
        communicator.close()

    emulated_cluster(nodes=2, ranks_per_node=4).run(job)


def test_the_comparison_can_fail(emulated_cluster: ClusterFactory) -> None:
    """A plan without its last step must be caught by the very check that the matrix uses."""

    def job() -> bool:
        communicator, ep_group, _ = start()
        x = tokens(communicator, (8, 1000), torch.float32)
        whole = build(Traffic(x.numel() * 4, 2, 4), Strategy.HIERARCHICAL)
        wrong = Plan(whole.traffic, whole.strategy, 1, whole.gather, whole.steps[:-1])
        same = torch.equal(as_bytes(communicator.all_to_all(x, plan=wrong)), by_torch(x, ep_group))
        dist.barrier()
        return same

    assert emulated_cluster(nodes=2, ranks_per_node=4).run(job) == [False] * 8


def test_forward_and_backward_equal_torchs(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        from torch.distributed.nn.functional import all_to_all_single

        communicator, ep_group, _ = start()
        for strategy in (None, *OF_REPLICATED):
            for async_op in (False, True):
                generator = torch.Generator().manual_seed(communicator.grid.ep_index)
                x = torch.randn(6, 50, 7, generator=generator, requires_grad=True)
                weight = torch.randn(6, 50, 7, generator=generator)
                plan = build(Traffic(x.numel() * 4, 2, 4), strategy, 3) if strategy else None
                if async_op:
                    y = communicator.all_to_all(x, plan=plan, async_op=True).wait()
                else:
                    y = communicator.all_to_all(x, plan=plan)
                (y * y * weight).sum().backward()
                reference = x.detach().clone().requires_grad_()
                z = all_to_all_single(torch.empty_like(reference), reference, group=ep_group)
                (z * z * weight).sum().backward()
                assert torch.equal(y, z)
                assert x.grad is not None
                assert reference.grad is not None
                assert torch.equal(x.grad, reference.grad)
        communicator.close()

    emulated_cluster(nodes=2, ranks_per_node=4).run(job)


def test_gradients_of_gradients(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        communicator, _, _ = start()
        x = torch.full((4, 3), 2.0 + communicator.grid.ep_index, requires_grad=True)
        (first,) = torch.autograd.grad(communicator.all_to_all(x**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert torch.equal(second, 6 * x.detach())
        communicator.close()

    emulated_cluster(nodes=2, ranks_per_node=2).run(job)


def test_async_and_sync_calls_keep_their_order(emulated_cluster: ClusterFactory) -> None:
    """Many calls in flight, sizes mixed, ranks delayed at random; waited for in another order."""

    def job() -> None:
        communicator, ep_group, _ = start()
        inputs = [tokens(communicator, (2, 1 + 997 * i), torch.bfloat16, seed=i) for i in range(12)]
        expected = [by_torch(x, ep_group) for x in inputs]
        delays = torch.Generator().manual_seed(dist.get_rank())
        results: list[Any] = []
        for i, x in enumerate(inputs):
            time.sleep(float(torch.rand(1, generator=delays)) * 0.01)
            results.append(communicator.all_to_all(x, async_op=True) if i % 3 else communicator.all_to_all(x))
        for i in reversed(range(12)):
            got = results[i].wait() if i % 3 else results[i]
            assert torch.equal(as_bytes(got), expected[i]), i
        communicator.close()

    emulated_cluster(nodes=2, ranks_per_node=4).run(job)


def test_its_calls_are_in_the_ring(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        communicator, _, _ = start()
        (track,) = (each for each in opened_tracks() if each.describe() == "Communicator on lane ep")
        x = tokens(communicator, (4, 300), torch.bfloat16)
        communicator.all_to_all(x)
        communicator.all_to_all(x, async_op=True).wait()
        communicator.trace(x)
        assert (track.issued, track.done, track.ranks) == (3, 3, (0, 1, 2, 3))
        calls = [call for call in recorded_calls() if call.track is track]
        assert [(call.number, call.collective, call.sent_bytes, call.is_async) for call in calls] == [
            (1, "all_to_all", x.nbytes, False),
            (2, "all_to_all", x.nbytes, True),
            (3, "all_to_all", x.nbytes, False),
        ]
        assert all(call.plan is not None and 0 < call.started_ns < call.ended_ns for call in calls)
        assert {call.code.co_filename for call in calls} == {__file__}
        communicator.close()
        assert track not in opened_tracks()

    emulated_cluster(nodes=2, ranks_per_node=2).run(job)


def test_two_communicators_on_the_same_ranks_do_not_meet(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        first, ep_group, tp_group = start()
        second = Communicator(ep_group, tp_group, profile=synthetic_profile(nodes=2, ranks_per_node=2))
        a, b = (tokens(first, (2, 5000), torch.float32, seed=s) for s in (1, 2))
        work = first.all_to_all(a, async_op=True)
        got_b = second.all_to_all(b)
        assert torch.equal(as_bytes(work.wait()), by_torch(a, ep_group))
        assert torch.equal(as_bytes(got_b), by_torch(b, ep_group))
        first.close()
        second.close()

    emulated_cluster(nodes=2, ranks_per_node=2).run(job)


def test_what_is_not_replicated_goes_flat(emulated_cluster: ClusterFactory) -> None:
    def job() -> dict[str, int]:
        communicator, ep_group, _ = start()
        generator = torch.Generator().manual_seed(dist.get_rank())  # different on every rank
        x = torch.randn(4, 100_000, generator=generator)
        assert torch.equal(as_bytes(communicator.all_to_all(x, replicated=False)), by_torch(x, ep_group))
        alone = Communicator(ep_group, profile=synthetic_profile(nodes=2, ranks_per_node=1))
        assert torch.equal(as_bytes(alone.all_to_all(x)), by_torch(x, ep_group))
        assert dict(alone.plans_run) == {"flat": 1}
        communicator.close()
        return dict(communicator.plans_run)

    assert emulated_cluster(nodes=2, ranks_per_node=2).run(job) == [{"flat": 1}] * 4


def test_the_chosen_plan_runs_and_is_the_same_on_all_ranks(emulated_cluster: ClusterFactory) -> None:
    def job() -> dict[str, int]:
        communicator, _, _ = start()
        for size in (2, 4096, 1 << 20):
            communicator.all_to_all(torch.zeros(2, size, dtype=torch.uint8))
        communicator.close()
        return dict(communicator.plans_run)

    runs = emulated_cluster(nodes=2, ranks_per_node=4).run(job)
    assert all(run == runs[0] for run in runs)
    assert runs[0].pop("flat") >= 1
    assert sum(runs[0].values()) >= 1
    assert all(name.startswith(("hierarchical", "pipelined")) for name in runs[0])


def test_inter_and_intra_stages_overlap() -> None:
    """On a slow wire the first chunk is gathered long before the last one has crossed."""

    def job() -> tuple[float, float]:
        communicator, _, _ = start()
        x = tokens(communicator, (2, 2 << 20), torch.uint8)
        plan = build(Traffic(x.numel(), 2, 2), Strategy.PIPELINED, 8)
        dist.barrier()
        timeline = communicator.trace(x, plan)
        ends = {(step.op, step.chunk): end for step, (_, end) in zip(plan.steps, timeline.spans, strict=True)}
        communicator.close()
        return ends[Op.ALL_GATHER, 0], ends[Op.ALL_TO_ALL, 7]

    with EmulatedCluster(2, 2, inter="100mbit") as cluster:
        if not cluster.shaped:
            pytest.skip("no rights to shape links here, so there is no slow wire to overlap with")
        ends = cluster.run(job)
    last_exchange = max(
        exchanged for _, exchanged in ends
    )  # flows share the wire unevenly: the last of all ranks counts
    assert all(gathered < last_exchange for gathered, _ in ends)


def test_on_loopback_with_a_declared_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rights to make namespaces the same program runs, with COMMLAYER_TOPOLOGY set by the emulator."""

    def job() -> str:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        from commlayer.profiles.topology import Topology

        ep_group, tp_group = world_groups(Topology.parse(os.environ["COMMLAYER_TOPOLOGY"]))
        communicator = Communicator(ep_group, tp_group, profile=synthetic_profile(nodes=2, ranks_per_node=2))
        check_all_plans(communicator, ep_group, tokens(communicator, (4, 1000), torch.float32))
        communicator.close()
        return communicator.grid.topology.shape

    with EmulatedCluster(2, 2, mode="loopback") as cluster:
        assert cluster.run(job) == ["2x2"] * 4


# Bad input: a clear error, on the rank that made it, and nothing hangs.


def raised(task: Callable[[], object]) -> tuple[str, str]:
    try:
        task()
    except Exception as error:  # noqa: BLE001  the tests ask which it was
        return type(error).__name__, str(error)
    return "nothing", ""


def test_bad_tensors_profiles_and_groups_are_named(emulated_cluster: ClusterFactory) -> None:
    def job() -> dict[str, tuple[str, str]]:
        communicator, ep_group, tp_group = start()
        good = synthetic_profile(nodes=2, ranks_per_node=2)
        here = {
            "odd": raised(lambda: communicator.all_to_all(torch.zeros(3, 4))),
            "scalar": raised(lambda: communicator.all_to_all(torch.tensor(1.0))),
            "meta": raised(lambda: communicator.all_to_all(torch.zeros(2, device="meta"))),
            "unknown": raised(lambda: Communicator(ep_group, tp_group, profile="emulated-2x44")),
            "none": raised(lambda: Communicator(ep_group, tp_group)),
            "auto": raised(lambda: Communicator(ep_group, tp_group, profile="auto")),
            "timeout 0": raised(lambda: Communicator(ep_group, tp_group, profile=good, timeout_s=0)),
            "timeout nan": raised(lambda: Communicator(ep_group, tp_group, profile=good, timeout_s=float("nan"))),
            "timeout inf": raised(lambda: Communicator(ep_group, tp_group, profile=good, timeout_s=float("inf"))),
            "shape": raised(lambda: Communicator(ep_group, tp_group, profile="monta-a800-2x8")),
            "swapped": raised(
                lambda: Communicator(tp_group, ep_group, profile=synthetic_profile(nodes=2, ranks_per_node=2))
            ),
        }
        first_half = dist.new_group([0, 1])
        if dist.get_rank() > 1:
            here["outside"] = raised(lambda: Communicator(first_half, profile="monta-a800-2x8"))
        communicator.all_to_all(torch.zeros(2, 4))  # none of it has harmed it
        communicator.close()
        here["closed"] = raised(lambda: communicator.all_to_all(torch.zeros(2, 4)))
        return here

    for rank, here in enumerate(emulated_cluster(nodes=2, ranks_per_node=2).run(job)):
        expected = {
            "odd": (TensorError, "first dimension that 2 divides, got shape [3, 4]"),
            "scalar": (TensorError, "got shape []"),
            "meta": (TensorError, "moves cpu tensors, got one on meta"),
            "unknown": (ProfileNotFoundError, "emulated-2x44"),
            "none": (ProfileNotFoundError, "commlayer measure"),
            "auto": (ProfileNotFoundError, "profile 'auto' is for the backend"),
            "timeout 0": (UsageError, "timeout_s: expected a positive, finite number of seconds, or None, got 0"),
            "timeout nan": (UsageError, "got nan"),
            "timeout inf": (UsageError, "got inf"),
            "shape": (ProfileMismatchError, "2x8"),
            "swapped": (GroupError, "crosses nodes"),
            "closed": (ClusterError, "closed"),
        }
        if rank > 1:
            expected["outside"] = (GroupError, f"rank {rank} is not a member of the ep group")
        for case, (kind, words) in expected.items():
            assert here[case][0] == kind.__name__, (case, here[case])
            assert words in here[case][1], (case, here[case])


def test_ranks_with_different_profiles_or_policies_disagree(emulated_cluster: ClusterFactory) -> None:
    def job() -> list[tuple[str, str]]:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        ep_group, tp_group = world_groups(discover_topology())
        odd = dist.get_rank() == 3
        profiles = [synthetic_profile(ranks_per_node=2, name=name) for name in ("ours", "theirs")]
        outcomes = [raised(lambda: Communicator(ep_group, tp_group, profile=profiles[odd]))]
        policy = Policy(max_chunks=2 if odd else 32)
        outcomes.append(raised(lambda: Communicator(ep_group, tp_group, profile=profiles[0], policy=policy)))
        return outcomes

    for about_profile, about_policy in emulated_cluster(nodes=2, ranks_per_node=2).run(job):
        assert about_profile[0] == about_policy[0] == DisagreementError.__name__
        assert "profile" in about_profile[1]
        assert "rank 3 has theirs" in about_profile[1]
        assert "policy" in about_policy[1]
        assert "max_chunks=2" in about_policy[1]


def test_detail_names_both_ranks_and_both_calls(
    emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMLAYER_DEBUG", "detail")

    def job() -> list[tuple[str, str]]:
        communicator, ep_group, _ = start()
        x = tokens(communicator, (2, 700), torch.float32)
        assert torch.equal(as_bytes(communicator.all_to_all(x)), by_torch(x, ep_group))
        rows = 4 if dist.get_rank() == 2 else 2
        outcomes = [raised(lambda: communicator.all_to_all(torch.zeros(rows, 8)))]
        dist.barrier()
        different = torch.full((2, 8), float(dist.get_rank()))
        outcomes.append(raised(lambda: communicator.all_to_all(different)))
        (track,) = (each for each in opened_tracks() if each.describe() == "Communicator on lane ep")
        assert (track.issued, track.done) == (1, 1), "refused on all ranks: they are not waited for"
        return outcomes

    outcomes = emulated_cluster(nodes=2, ranks_per_node=2).run(job)
    for about_shape, about_bytes in outcomes:
        assert about_shape[0] == DisagreementError.__name__
        for words in ("rank 0 calls", "rank 2 calls", "sizes [4, 8]", "sizes [2, 8]"):
            assert words in about_shape[1]
        assert about_bytes[0] == DisagreementError.__name__
        assert "declared replicated" in about_bytes[1]
        assert "replicated=False" in about_bytes[1]


@pytest.mark.parametrize("size", [512, 4 << 20])
def test_a_rank_that_dies_in_a_call_is_named_by_all_others(emulated_cluster: ClusterFactory, size: int) -> None:
    """Rank 5 is killed in the call, after its receives where it posts them itself; ranks that never spoke to it are told."""

    def job() -> tuple[str, str]:
        communicator, _, _ = start(timeout_s=HALF_AN_HOUR)
        x = torch.zeros(2, size // 2, dtype=torch.uint8)
        communicator.all_to_all(x)
        meet(5)
        if dist.get_rank() == 5:
            transport = communicator._runner.transport
            original = transport.start

            def start_and_die(*arguments: Any) -> Any:
                original(*arguments)
                os.kill(os.getpid(), signal.SIGKILL)

            transport.start = start_and_die  # type: ignore[method-assign, assignment]  # a fault
        name, text = raised(lambda: communicator.all_to_all(x))
        if name != "nothing":
            again = raised(lambda: communicator.all_to_all(x))
            assert again[0] == "ClusterError"
            assert "broken by an earlier failure" in again[1]
        return name, text

    outcomes = emulated_cluster(nodes=2, ranks_per_node=4).run(job, check=False, grace_s=30.0)
    assert outcomes[5].failure is not None
    assert outcomes[5].failure.signal == signal.SIGKILL
    involved = {1} if size == 512 else {0, 1, 2, 3, 4, 6, 7}  # flat pairs ranks 1 and 5 only
    for outcome in outcomes:
        if outcome.rank in involved:
            assert outcome.failure is None, outcome.failure
            name, text = outcome.value
            assert name in (PeerError.__name__, CollectiveTimeoutError.__name__), (outcome.rank, name, text)
            assert "rank 5" in text, (outcome.rank, text)
            assert "group " in text
            assert "plan " in text
            assert "chunk " in text


def test_a_death_while_calls_are_compared_is_named_by_all(emulated_cluster: ClusterFactory) -> None:
    """COMMLAYER_DEBUG=detail, whose exchanges go over the caller's groups: also ranks that do not talk to the dead one."""

    def job() -> tuple[str, str]:
        os.environ["COMMLAYER_DEBUG"] = "detail"
        communicator, _, _ = start(timeout_s=HALF_AN_HOUR)
        x = torch.zeros(2, 64, dtype=torch.uint8)
        communicator.all_to_all(x)
        meet(5)
        if dist.get_rank() == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return raised(lambda: communicator.all_to_all(x))

    for outcome in emulated_cluster(nodes=2, ranks_per_node=4).run(job, check=False, grace_s=30.0):
        if outcome.rank != 5:
            assert outcome.failure is None, outcome.failure
            name, text = outcome.value
            assert name == PeerError.__name__
            assert "rank 5 died" in text


def test_a_rank_that_never_calls_ends_in_a_timeout_that_names_it(emulated_cluster: ClusterFactory) -> None:
    def job() -> tuple[str, str]:
        communicator, _, _ = start(timeout_s=3.0)
        dist.barrier()  # whoever has started calls; its time is not another's start
        if dist.get_rank() == 2:
            be_absent(3)
            return "absent", ""
        outcome = raised(lambda: communicator.all_to_all(torch.zeros(2, 1 << 20, dtype=torch.uint8)))
        tell("done")
        return outcome

    outcomes = emulated_cluster(nodes=2, ranks_per_node=2).run(job)
    for rank, (name, text) in enumerate(outcomes):
        if rank != 2:
            assert name in (CollectiveTimeoutError.__name__, PeerError.__name__), (rank, name, text)
            assert "rank 2 did not answer within 3 s" in text, (rank, text)


def test_a_misspelt_variable_is_an_error(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        os.environ["COMMLAYER_PROFIL"] = "x"
        start()

    with pytest.raises(RanksFailedError, match="did you mean COMMLAYER_PROFILE") as caught:
        emulated_cluster(nodes=2, ranks_per_node=1).run(job)
    assert isinstance(caught.value.__cause__, SettingsError)


def test_ranks_in_unequal_numbers_of_groups_find_each_other(emulated_cluster: ClusterFactory) -> None:
    """It is so in any trainer: here node leaders have a group that the others are not in."""

    def job() -> None:
        dist.init_process_group("gloo")
        dist.new_group([0, 2])
        ep_group, tp_group = world_groups(discover_topology())
        for _ in range(2):
            with Communicator(ep_group, tp_group, profile=synthetic_profile(ranks_per_node=2), timeout_s=10.0) as it:
                check_all_plans(it, ep_group, tokens(it, (4, 1000), torch.float32))

    emulated_cluster(nodes=2, ranks_per_node=2).run(job)


def test_a_plan_for_other_traffic_is_refused(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        communicator, ep_group, _ = start()
        x = torch.arange(4096, dtype=torch.int16).view(4, -1)
        half = build(Traffic(4096, 2, 2), Strategy.HIERARCHICAL)
        whole = build(Traffic(8192, 2, 2), Strategy.HIERARCHICAL)
        for call in (
            lambda: communicator.all_to_all(x, plan=half),
            lambda: communicator.all_to_all(x, plan=whole, replicated=False),
            lambda: communicator.trace(x, half),
        ):
            name, text = raised(call)
            assert name == PlanError.__name__, text
            assert "was built for" in text
        assert torch.equal(communicator.all_to_all(x, plan=whole), by_torch(x, ep_group).view(x.dtype).view_as(x))
        communicator.close()

    emulated_cluster(nodes=2, ranks_per_node=2).run(job)


def test_conjugate_and_negative_views_are_resolved(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        communicator, ep_group, _ = start()
        x = torch.randn(4, 10, dtype=torch.complex64, generator=torch.Generator().manual_seed(dist.get_rank() // 2))
        for view in (x.conj(), x.conj().imag):
            got = communicator.all_to_all(view)
            assert communicator.trace(view).total_us > 0
            expected = torch.empty(view.shape, dtype=view.dtype)
            dist.all_to_all_single(expected, view.resolve_conj().resolve_neg().contiguous(), group=ep_group)
            assert torch.equal(got, expected)
        communicator.close()

    emulated_cluster(nodes=2, ranks_per_node=2).run(job)


def test_a_rank_without_a_profile_is_named_by_the_others_at_once(emulated_cluster: ClusterFactory) -> None:
    def job() -> tuple[str, str]:
        dist.init_process_group("gloo")
        ep_group, tp_group = world_groups(discover_topology())
        mine = "missing.json" if dist.get_rank() == 3 else synthetic_profile(ranks_per_node=2)
        outcome = raised(lambda: Communicator(ep_group, tp_group, profile=mine, timeout_s=HALF_AN_HOUR))
        dist.barrier()  # nobody left early
        return outcome

    for rank, (name, text) in enumerate(emulated_cluster(nodes=2, ranks_per_node=2).run(job)):
        assert name == ("ProfileNotFoundError" if rank == 3 else "ClusterError"), text
        assert "missing.json" in text
        assert rank == 3 or "rank 3" in text


def test_a_rank_that_does_not_come_to_make_one_is_missed_within_the_timeout(emulated_cluster: ClusterFactory) -> None:
    def job() -> tuple[str, str]:
        dist.init_process_group("gloo")
        ep_group, tp_group = world_groups(discover_topology())
        if dist.get_rank() == 1:
            be_absent(1)
            return "absent", ""
        outcome = raised(
            lambda: Communicator(ep_group, tp_group, profile=synthetic_profile(ranks_per_node=1), timeout_s=1.0)
        )
        tell("done")
        return outcome

    name, text = emulated_cluster(nodes=2, ranks_per_node=1).run(job)[0]
    assert name == CollectiveTimeoutError.__name__
    assert "ranks [0, 1] did not all come to make a Communicator within 1 s" in text


@pytest.mark.parametrize("where", ["in the body", "in the call"])
def test_a_rank_that_raises_tells_the_others_why(emulated_cluster: ClusterFactory, where: str) -> None:
    def job() -> tuple[str, str]:
        communicator, _, _ = start(timeout_s=HALF_AN_HOUR)
        x = torch.zeros(2, 1 << 20, dtype=torch.uint8)
        dist.barrier()  # all have connected

        def body() -> None:
            with communicator:
                if dist.get_rank() == 1:
                    if where == "in the body":
                        raise ValueError("boom")
                    communicator._runner.stage = fail  # type: ignore[method-assign, assignment]
                    communicator._runner.start = fail  # type: ignore[method-assign, assignment]
                communicator.all_to_all(x)

        def fail(*_: object) -> None:
            raise ValueError("boom")

        outcome = raised(body)
        tell("done")
        be_absent(4)  # all processes stay: nobody learns of it by a closed socket
        return outcome

    for rank, (name, text) in enumerate(emulated_cluster(nodes=2, ranks_per_node=2).run(job)):
        if rank == 1:
            assert (name, text) == ("ValueError", "boom")
        else:
            assert name == PeerError.__name__, (rank, text)
            assert "rank 1 left with ValueError: boom" in text, (rank, text)


def test_whoever_calls_first_does_not_blame_an_innocent_rank(emulated_cluster: ClusterFactory) -> None:
    """Rank 2 is absent. Rank 1 starts first and waits for ranks 0 and 3, which start later and wait for rank 2."""

    def job() -> tuple[str, str]:
        communicator, _, _ = start(timeout_s=3.0)
        if dist.get_rank() == 2:
            be_absent(3)
            return "absent", ""
        time.sleep(0.0 if dist.get_rank() == 1 else 0.4)
        outcome = raised(lambda: communicator.all_to_all(torch.zeros(2, 1 << 20, dtype=torch.uint8)))
        tell("done")
        return outcome

    for rank, (name, text) in enumerate(emulated_cluster(nodes=2, ranks_per_node=2).run(job)):
        if rank != 2:
            assert name in (CollectiveTimeoutError.__name__, PeerError.__name__), (rank, name, text)
            assert text.startswith("rank 2 "), (rank, text)


def detectors(patience_s: float) -> int:
    """The detectors that still watch after so long."""
    threads = [thread for thread in threading.enumerate() if thread.name == "commlayer-detector"]
    for thread in threads:
        thread.join(patience_s)
    return sum(thread.is_alive() for thread in threads)


def closed_in_vain() -> tuple[str, int]:
    """The other rank does not come to close its own: what is raised, and the detectors that still watch."""
    communicator, *_ = start(timeout_s=1.0)
    try:
        if dist.get_rank() == 1:
            be_absent(1)
            return "", detectors(0.0)
        with pytest.raises(ClusterError, match="every rank of the grid must close it") as error:
            communicator.close()
        tell("done")
        return str(error.value), detectors(5.0)
    finally:
        dist.barrier()


@pytest.mark.cluster
def test_a_communicator_whose_close_fails_has_let_go_of_its_detector(emulated_cluster: ClusterFactory) -> None:
    (error, mine), (_, theirs) = emulated_cluster(2, 1).run(closed_in_vain)
    assert "rank 0: not all of ranks [0, 1] (group ep)" in error
    assert (mine, theirs) == (0, 1)


def test_of_more_than_two_ranks_in_one_call_the_dead_one_is_named(emulated_cluster: ClusterFactory) -> None:
    def job() -> tuple[str, str]:
        communicator, _, _ = start(timeout_s=HALF_AN_HOUR)
        x = torch.zeros(4, 100, dtype=torch.uint8)
        communicator.all_to_all(x)
        meet(2)
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return raised(lambda: communicator.all_to_all(x))

    outcomes = emulated_cluster(nodes=4, ranks_per_node=1).run(job, check=False, grace_s=30.0)
    for outcome in outcomes:
        if outcome.rank != 2:
            name, text = outcome.value
            assert name == PeerError.__name__, text
            assert text.startswith("rank 2 died"), (outcome.rank, text)


def test_a_failed_trace_breaks_the_communicator(emulated_cluster: ClusterFactory) -> None:
    def job() -> list[tuple[str, str]]:
        communicator, _, _ = start(timeout_s=2.0)
        if dist.get_rank() == 1:
            be_absent(1)
            return []
        x = torch.zeros(2, 1 << 20, dtype=torch.uint8)
        outcomes = [raised(lambda: communicator.trace(x))]
        outcomes += [raised(call) for call in (lambda: communicator.trace(x), lambda: communicator.all_to_all(x))]
        communicator.close()
        tell("done")
        return [*outcomes, raised(lambda: communicator.trace(x))]

    first, *broken, closed = emulated_cluster(nodes=2, ranks_per_node=1).run(job)[0]
    assert first[0] == CollectiveTimeoutError.__name__
    assert "rank 1 did not answer" in first[1]
    for name, text in broken:
        assert name == "ClusterError"
        assert "broken by an earlier failure" in text
    assert "closed" in closed[1]


def test_a_pending_call_does_not_keep_a_dead_program_alive() -> None:
    code = """
import time
from commlayer.engine.progress import ProgressQueue
ProgressQueue("test", str).submit("sleep", None, time.sleep, (60,))
raise SystemExit(7)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 7
