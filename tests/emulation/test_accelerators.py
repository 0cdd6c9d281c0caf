"""Emulated accelerators: what operations are counted as, one clock for a rank, who waits, and that nothing else changes."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F  # noqa: N812  torch's own name for it
from torch.nn.attention.bias import causal_lower_right
from torch.testing._internal.two_tensor import TwoTensor

from commlayer.device_time import use_device_time
from commlayer.emulation import Accelerator, EmulatedCluster, await_device
from commlayer.emulation.accelerators import launches as operations
from commlayer.emulation.accelerators.device_clock import DeviceClock, device_clock
from commlayer.profiles.errors import UsageError
from commlayer.testing.plugin import ClusterFactory

cluster_test = pytest.mark.cluster
launches: Any = operations.Launches  # torch annotates no mode


class Time:
    """A clock's time, which passes where somebody sleeps, or is told to."""

    def __init__(self) -> None:
        self.s = 100.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.s += seconds


def clock_of(lead_s: float = 1e9, **rates: Any) -> tuple[DeviceClock, Time]:
    passing = Time()
    device = Accelerator(**{"flops_per_s": 1.0, **rates})
    return DeviceClock(device, now=passing.now, sleep=passing.sleep, lead_s=lead_s), passing


@pytest.fixture
def counted() -> Iterator[DeviceClock]:
    """A clock in the time of which FLOPs are seconds, while operations of this thread run by it."""
    clock, _ = clock_of()
    use_device_time(clock)
    try:
        with launches():
            yield clock
    finally:
        use_device_time(None)


# ---------------------------------------------------------------- the device


def test_a_device_is_declared_in_words() -> None:
    device = Accelerator.declared("4tflops", "3.35 TB/s", 100)
    assert device == Accelerator(4e12, 3.35e12, 100.0)
    assert str(device) == "an emulated accelerator of 4 TFLOP/s with memory of 3.35 TB/s"
    assert Accelerator.from_text(device.to_text()) == device
    assert Accelerator.declared("500 GFLOP/s", None, 1) == Accelerator(5e11)
    assert Accelerator.declared(None, None, 1) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("4", None, 1), "compute: expected a rate with its unit, such as 4tflops"),
        (("0tflops", None, 1), "compute: expected"),
        (("4tflops", "fast", 1), "memory: expected a rate with its unit"),
        (("4tflops", None, 0.5), "scale: expected by how many times"),
        (("4tflops", None, float("nan")), "scale: expected"),
        ((None, None, 10), "say its rate too"),
        ((None, "1tbyte", 1), "say its rate too"),
    ],
)
def test_a_device_that_cannot_be_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Accelerator.declared(*arguments)


def test_an_operation_lasts_by_its_flops_or_its_bytes_whichever_takes_longer() -> None:
    device = Accelerator(flops_per_s=100.0, bytes_per_s=10.0, scale=2.0)
    assert device.seconds(1000, 10) == 20.0
    assert device.seconds(1000, 1000) == 200.0
    assert Accelerator(100.0).seconds(0, 1 << 40) == 0.0


# ---------------------------------------------------------------- the clock


def test_operations_queue_and_the_host_waits_where_it_synchronises() -> None:
    clock, passing = clock_of()
    clock.launched(passing.s, 3.0)
    passing.s += 1.0
    clock.launched(passing.s, 2.0)  # begins when the first has ended
    assert passing.slept == []
    clock.synchronize()
    assert passing.s == 105.0
    clock.synchronize()
    assert passing.slept == [4.0]
    passing.s += 10.0
    clock.launched(passing.s, 2.0)  # the device was idle: it begins when it is launched
    clock.synchronize()
    assert passing.s == 117.0
    report = clock.report()
    assert (report.operations, report.flops, report.busy_s, report.late, report.wall_s) == (3, 7.0, 7.0, 0, 17.0)


def test_the_host_runs_ahead_by_its_lead_and_no_more() -> None:
    clock, passing = clock_of(lead_s=1.0)
    clock.launched(passing.s, 3.0)
    assert passing.slept == [2.0]
    clock.launched(passing.s, 3.0)
    assert passing.slept == [2.0, 3.0]
    clock.synchronize()
    assert passing.s == 106.0


def test_what_the_host_ends_too_late_is_counted_and_pushes_what_follows() -> None:
    clock, passing = clock_of()
    passing.s += 5.0
    clock.launched(100.0, 2.0)  # the real work took 5 s
    clock.launched(105.0, 1.0)
    clock.synchronize()
    assert passing.s == 106.0
    report = clock.report()
    assert (report.late, report.late_s, report.operations, report.slowness) == (1, 3.0, 2, 2.0)


def test_what_ran_before_hides_what_the_host_needs_for_the_next_operation() -> None:
    clock, passing = clock_of()
    clock.launched(100.0, 4.0)
    passing.s += 5.0  # five seconds of real work for an operation of two, four of which the one before lasts
    clock.launched(100.0, 2.0)
    clock.synchronize()
    assert (passing.s, clock.report().late) == (106.0, 0)


def test_a_call_waits_for_what_was_launched_before_it_and_not_for_what_came_since() -> None:
    clock, passing = clock_of()
    assert clock.busy_until() is None
    clock.launched(passing.s, 3.0)
    until = clock.busy_until()
    assert until == 103.0
    clock.launched(passing.s, 4.0)
    use_device_time(clock)
    try:
        await_device(until)
        assert passing.s == 103.0
        await_device()
        assert passing.s == 107.0
        await_device(until)
    finally:
        use_device_time(None)
    assert (passing.s, clock.busy_until()) == (107.0, None)


# ---------------------------------------------------------------- what operations cost


def flops_of(clock: DeviceClock, call: Any) -> tuple[float, int]:
    before = clock.report()
    call()
    after = clock.report()
    return after.flops - before.flops, after.operations - before.operations


def test_products_forward_and_backward(counted: DeviceClock) -> None:
    x, w, b = (torch.ones(*size, requires_grad=True) for size in ((4, 8), (8, 3), (3,)))
    assert flops_of(counted, lambda: torch.mm(x, w)) == (2 * 4 * 8 * 3, 1)
    assert flops_of(counted, lambda: torch.mm(x.detach(), w.detach(), out=torch.empty(4, 3))) == (192, 1)
    assert flops_of(counted, lambda: torch.addmm(b, x, w)) == (192, 1)
    assert flops_of(counted, lambda: F.linear(x, w.t(), b)) == (192, 1)
    y: Any = torch.mm(x, w).sum()
    assert flops_of(counted, y.backward) == (2 * 192, 2)
    left, right = torch.ones(2, 4, 8, requires_grad=True), torch.ones(2, 8, 3, requires_grad=True)
    z = torch.bmm(left, right).sum()
    assert flops_of(counted, lambda: torch.bmm(left, right)) == (2 * 192, 1)
    assert flops_of(counted, z.backward) == (4 * 192, 2)


def test_attention_forward_and_backward(counted: DeviceClock) -> None:
    q, k, v = (torch.ones(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    product = 2 * 2 * 4 * 16 * 16 * 8
    seen: list[torch.Tensor] = []
    assert flops_of(counted, lambda: seen.append(F.scaled_dot_product_attention(q, k, v))) == (2 * product, 1)
    y = seen[0].sum()
    assert flops_of(counted, y.backward) == (5 * product, 1)


def test_grouped_products_forward_and_backward(counted: DeviceClock) -> None:
    x = torch.ones(16, 8, dtype=torch.bfloat16, requires_grad=True)
    w = torch.ones(2, 8, 24, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([8, 16], dtype=torch.int32)
    seen: list[torch.Tensor] = []
    assert flops_of(counted, lambda: seen.append(F.grouped_mm(x, w, offs=ends))) == (2 * 16 * 8 * 24, 1)
    assert flops_of(counted, lambda: seen[0].backward(torch.ones(16, 24, dtype=torch.bfloat16))) == (2 * 6144, 2)
    assert flops_of(counted, lambda: F.grouped_mm(w.transpose(1, 2), w)) == (2 * 2 * 24 * 8 * 24, 1)


def test_products_in_inference_mode_count_as_often(counted: DeviceClock) -> None:
    with torch.inference_mode():
        assert flops_of(counted, lambda: F.linear(torch.ones(4, 8), torch.ones(3, 8))) == (192, 1)


def test_tensors_made_of_others_count_as_what_these_do(counted: DeviceClock) -> None:
    two = TwoTensor(torch.ones(4, 8), torch.ones(4, 8))
    assert flops_of(counted, lambda: two @ torch.nn.Parameter(torch.ones(8, 3))) == (2 * 192, 2)


def test_all_else_lasts_its_bytes_where_the_memory_has_a_rate() -> None:
    clock, _ = clock_of(bytes_per_s=1.0)
    use_device_time(clock)
    try:
        with launches():
            x = torch.ones(64)
            before = clock.report().busy_s
            x.add(x)  # x is read once, and the sum written
            assert clock.report().busy_s - before == 2 * 256
            x.view(8, 8).t().detach()
            torch.empty(1000)
            assert clock.report().busy_s - before == 2 * 256
    finally:
        use_device_time(None)


def test_values_that_the_host_reads_are_waited_for(counted: DeviceClock) -> None:
    for read in (lambda y: y[0, 0].item(), lambda y: bool((y > 0).all()), lambda y: y.nonzero()):
        y = torch.ones(4, 8) @ torch.ones(8, 3)
        left = counted._free_at - counted.now()
        assert left == 192.0
        read(y)
        assert counted.now() == counted._free_at


def test_nothing_is_emulated_without_a_device() -> None:
    assert device_clock() is None
    await_device()
    with launches():  # as in a worker that a rank has forked
        assert float((torch.ones(2, 2) @ torch.ones(2, 2)).sum()) == 8.0


# ---------------------------------------------------------------- in ranks


def busy_rank() -> dict[str, float]:
    """Two threads with a product each, and a backward pass, on a device that takes 0.2 s for a product."""
    x = torch.ones(100, 100, requires_grad=True)
    found: dict[str, float] = {}

    def work() -> None:
        x.detach() @ x.detach()

    work()  # torch starts what it needs for products
    await_device()
    cpu_s = time.process_time()
    begin = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cpu.synchronize()
    found["two threads"] = time.perf_counter() - begin
    begin = time.perf_counter()
    loss: Any = (x @ x).sum()
    loss.backward()
    await_device()
    found["forward and backward"] = time.perf_counter() - begin
    found["cpu"] = time.process_time() - cpu_s
    begin = time.perf_counter()
    weight = torch.nn.Parameter(torch.ones(100, 100))
    loss = (x.detach() @ weight).sum()
    loss.backward()
    torch.optim.SGD([weight], lr=0.1).step()
    found["step"] = time.perf_counter() - begin
    return found


@cluster_test
def test_threads_queue_backward_counts_and_a_rank_that_waits_holds_no_core(emulated_cluster: ClusterFactory) -> None:
    with emulated_cluster(1, 2, mode="loopback", compute="10mflops") as cluster:  # 2e6 FLOPs a product
        for found in cluster.run(busy_rank):
            assert found["two threads"] >= 0.4
            assert found["forward and backward"] >= 0.6
            assert found["step"] >= 0.4
            assert found["cpu"] < 0.5 * 1.0  # of a second that its device was busy
        assert [report.rank for report in cluster.device_reports] == [0, 1]
        assert {report.operations for report in cluster.device_reports} == {8}
        assert {report.flops for report in cluster.device_reports} == {8 * 2e6}


def exchanging_rank(backend: str) -> list[float]:
    """Seconds until a collective is back that was called behind a product of 0.5 s."""
    dist.init_process_group("gloo")
    group: Any = dist.new_group(backend=backend)
    x, y = torch.ones(100, 100), torch.ones(8)
    out = torch.empty_like(y)
    calls: list[Any] = [
        lambda: dist.all_reduce(y, group=group),
        lambda: dist.all_reduce(y, group=group, async_op=True).wait(),
        lambda: dist.all_to_all_single(out, y, group=group),
        lambda: dist.barrier(group=group),
    ]
    times = []
    for call in calls:
        call()
        dist.barrier()
        begin = time.perf_counter()
        x @ x
        call()
        times.append(time.perf_counter() - begin)
    await_device()
    return times


@cluster_test
@pytest.mark.parametrize("backend", ["gloo", "commlayer"])
def test_a_collective_begins_when_what_was_launched_before_is_done(
    emulated_cluster: ClusterFactory, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import commlayer.backend  # noqa: F401  before the fork

    monkeypatch.setenv("COMMLAYER_PROFILE", "none")
    with emulated_cluster(1, 2, mode="loopback", compute="4mflops") as cluster:
        for times in cluster.run(exchanging_rank, backend):
            assert min(times) >= 0.5


def waiting_threads() -> list[tuple[str, bool]]:
    """Which threads slept for a device that a call was made behind, and whether the call had ended when it was made."""
    dist.init_process_group("commlayer")
    group: Any = dist.group.WORLD
    x, peer = torch.ones(8), 1 - dist.get_rank()
    calls: dict[str, Any] = {
        "asynchronous": lambda: dist.all_reduce(x, async_op=True),
        "messages": lambda: group.start_batch([(x, peer)], [(torch.empty(8), peer)]),
        "synchronous": lambda: dist.all_reduce(x),
    }
    found = []
    for name, call in calls.items():
        passing, slept = Time(), list[str]()
        is_called = threading.Event()

        def sleep(seconds: float, slept: list[str] = slept, is_called: threading.Event = is_called) -> None:
            is_caller = threading.current_thread() is threading.main_thread()
            slept.append("caller" if is_caller else "another")
            assert is_caller or is_called.wait(60)

        clock = DeviceClock(Accelerator(1.0), now=passing.now, sleep=sleep, lead_s=1e9)
        use_device_time(clock)
        group._order.use_lane("", is_told=False)
        clock.launched(passing.s, 5.0)
        work = call()
        is_under_way = work is not None and not work.is_completed()
        is_called.set()
        if work is not None:
            work.wait()
        use_device_time(None)
        found.append((f"{name}: {slept[0]}", is_under_way))
        dist.barrier()
    return found


@cluster_test
def test_the_caller_of_an_asynchronous_call_goes_on(
    emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    import commlayer.backend  # noqa: F401  before the fork

    monkeypatch.setenv("COMMLAYER_PROFILE", "none")
    wanted = [("asynchronous: another", True), ("messages: another", True), ("synchronous: caller", False)]
    assert emulated_cluster(1, 2, mode="loopback").run(waiting_threads) == [wanted] * 2


@cluster_test
def test_subclasses_of_tensors_are_made_as_ever(emulated_cluster: ClusterFactory) -> None:
    """Attention with a bias that is a tensor without elements: of 4 queries and 8 keys."""

    def attend() -> tuple[tuple[int, ...], ...]:
        q, k = torch.ones(1, 1, 4, 8), torch.ones(1, 1, 8, 8)
        out = F.scaled_dot_product_attention(q, k, k, attn_mask=causal_lower_right(4, 8))
        return tuple(torch.Tensor(2, 3).shape), tuple(torch.nn.Parameter(torch.ones(2)).shape), tuple(out.shape)

    with emulated_cluster(1, 1, mode="loopback", compute="1gflops") as cluster:
        assert cluster.run(attend) == [((2, 3), (2,), (1, 1, 4, 8))]
        assert cluster.device_reports[0].flops == 2 * 2 * 4 * 8 * 8


@cluster_test
def test_a_program_finds_its_device_when_it_loads_torch(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import time\n"
        "import torch\n"
        "x = torch.ones(100, 100)\n"
        "begin = time.perf_counter()\n"
        "assert (x @ x).sum().item() == 1e6\n"
        "assert time.perf_counter() - begin >= 0.2\n"
        "assert torch.__spec__.loader.__class__.__module__.startswith('importlib') or 'frozen' in str(torch.__spec__.loader)\n",
        encoding="utf-8",
    )
    with emulated_cluster(1, 2, mode="loopback", compute="10mflops", scale=1) as cluster:
        assert cluster.command([sys.executable, str(program)], timeout_s=120) == 0
        assert [(report.rank, report.operations) for report in cluster.device_reports] == [(0, 1), (1, 1)]


@cluster_test
def test_nothing_changes_without_a_device(emulated_cluster: ClusterFactory) -> None:
    def look() -> tuple[bool, list[str], int]:
        names = [name for name in os.environ if name.startswith("COMMLAYER_EMULATED_")]
        return device_clock() is None, sorted(names), torch._C._len_torch_dispatch_stack()

    cluster = emulated_cluster(1, 2, mode="loopback")
    assert cluster.run(look) == [(True, ["COMMLAYER_EMULATED_LINKS"], 0)] * 2
    assert (cluster.accelerator, cluster.scale, cluster.device_reports) == (None, 1.0, [])


# ---------------------------------------------------------------- time dilation


@cluster_test
def test_rates_are_those_of_the_cluster_that_is_stood_for(emulated_cluster: ClusterFactory) -> None:
    from commlayer.emulation import rights

    if not (rights().netns and rights().shaping):
        pytest.skip(rights().reason)
    cluster: EmulatedCluster = emulated_cluster(2, 1, inter="400gbit", compute="4tflops", scale=1000, mode="netns")
    assert cluster.rates() == [{"inter": "400gbit", "intra": "unshaped"}] * 2
    cluster.shape(inter="100gbit", node=1)
    assert [rates["inter"] for rates in cluster.rates()] == ["400gbit", "100gbit"]

    def send() -> float:
        dist.init_process_group("gloo")
        x = torch.ones(1 << 20)
        begin = time.perf_counter()  # before they meet: later the first bytes may be here already
        dist.barrier()
        if dist.get_rank() == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        return time.perf_counter() - begin

    assert cluster.run(send)[1] >= 0.2  # 4 MiB at 100 Mbit/s take 0.34 s, without the bucket's first bytes
    with pytest.raises(UsageError, match="1000 times slower, is outside of what a shaped link can do"):
        cluster.shape(inter="1mbit")


def test_a_device_without_a_scale_leaves_the_wires_alone() -> None:
    with pytest.raises(UsageError, match="'400gbit' is outside of what a shaped link can do"):
        EmulatedCluster(inter="400gbit", compute="4tflops")
