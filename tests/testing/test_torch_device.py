"""The simulated device that torch sees: streams, memory, collectives, and training on it against training on the CPU.

Registering the device changes a process for good, so everything here runs in processes of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import start_with
from simulated.torch_device import simulated_device
from simulated.torch_streams import StreamDelays
from training import MODELS, Breaks, train

from commlayer.emulation import RanksFailedError
from commlayer.profiles.errors import ClusterError, CollectiveTimeoutError, TensorError, UsageError
from commlayer.testing.plugin import ClusterFactory

SEEDS = range(4)
LAGGING = StreamDelays(chance=0.9, idle_s=0.2)
"""Nearly everything runs only when the host waits."""


def alone(job: Callable[..., Any], emulated_cluster: ClusterFactory) -> Any:
    return emulated_cluster(1, 1).run(job)[0]


# One process


def operators() -> None:
    device = simulated_device(StreamDelays(seed=1))
    x = torch.arange(10.0, device=device)
    assert str(x.device) == "simulated:0"
    view = x.view(2, 5)[:, 1:3].t()
    view.mul_(2)
    assert x.tolist() == [0, 2, 4, 3, 4, 5, 12, 14, 8, 9]
    assert (x.sum().item(), x[x > 10].tolist(), (x > 10).nonzero().flatten().tolist()) == (61.0, [12, 14], [6, 7])
    assert torch.equal(
        torch.cat([x, x]).reshape(4, 5).to(torch.bfloat16).cpu(), torch.cat([x.cpu()] * 2).reshape(4, 5).bfloat16()
    )
    out = torch.empty(0, device=device)
    assert torch.add(x, 1, out=out) is out
    assert out.tolist() == (x.cpu() + 1).tolist()
    assert torch.empty(3, 0, device=device).sum(1).tolist() == [0, 0, 0]
    assert x.clone().fill_(3).resize_(12).shape == (12,)
    assert torch.isnan(torch.empty(3, device=device)).all()
    with pytest.raises(
        TensorError, match=r"aten::add.Tensor: expected all tensors on the device simulated, got one on cpu"
    ):
        x + torch.ones(10)
    w = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    (torch.nn.functional.layer_norm(x[:4] @ w, (4,)) ** 2).sum().backward()
    here = w.detach().cpu().requires_grad_()
    (torch.nn.functional.layer_norm(x[:4].cpu() @ here, (4,)) ** 2).sum().backward()
    assert w.grad is not None
    assert here.grad is not None
    assert torch.equal(w.grad.cpu(), here.grad)
    assert torch.get_device_module(device).memory_allocated() > 0


def streams() -> None:
    """A stream that does not wait for another reads what was there before, under some seed; one that waits never does."""
    device = simulated_device(LAGGING)
    module = torch.get_device_module(device)
    found: dict[bool, set[float]] = {True: set(), False: set()}
    for seed in range(20):
        simulated_device(StreamDelays(seed, LAGGING.chance, LAGGING.idle_s))
        for waits in (True, False):
            x = torch.zeros(4, device=device)
            module.synchronize()
            side = module.Stream()
            x.fill_(1)
            if waits:
                side.wait_stream(module.current_stream())
            with module.stream(side):
                y = x * 2
                event = module.Event().record()
            event.wait()
            found[waits].add((y + 0)[0].item())
    assert found == {True: {2.0}, False: {0.0, 2.0}}


def memory() -> None:
    """Memory that another stream still reads is handed on, unless that stream was recorded."""
    device = simulated_device(LAGGING)
    module = torch.get_device_module(device)
    found: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(20):
        simulated_device(StreamDelays(seed, LAGGING.chance, LAGGING.idle_s))
        for records in (True, False):
            side = module.Stream()
            x = torch.ones(1000, device=device)
            side.wait_stream(module.current_stream())
            with module.stream(side):
                y = x * 2
            if records:
                x.record_stream(side)
            del x
            torch.full((1000,), 5.0, device=device)
            side.synchronize()
            found[records].append(y[7].item())
    assert set(found[True]) == {2.0}
    assert any(value != 2 for value in found[False])  # 10, or twice what is not a number


def ending() -> None:
    device = simulated_device(timeout_s=0.5)
    module = torch.get_device_module(device)
    with pytest.raises(UsageError, match="one simulated device"):
        module.set_device(1)
    simulator = module.current_stream().simulator
    never = module.Event()
    never.record(simulator.new_stream("a stream that waits"))
    module.synchronize()
    stuck = simulator.new_stream("a stream of a test")
    simulator.runner.launch_steps(stuck.queue, "work that never ends", lambda: iter([lambda: False]))
    with pytest.raises(
        CollectiveTimeoutError,
        match=r"nothing has moved on the simulated device for 0.5 s; first in its streams: a stream of a test: work that never",
    ):
        module.synchronize()


def failing() -> None:
    device = simulated_device()
    index = torch.tensor([5], device=device)
    torch.zeros(2, device=device).index_select(0, index)  # which the device finds out later
    with pytest.raises(ClusterError, match=r"the simulated device failed.*index out of range"):
        torch.get_device_module(device).synchronize()


@pytest.mark.parametrize("job", [operators, streams, memory, ending, failing])
def test_one_process(emulated_cluster: ClusterFactory, job: Callable[[], None]) -> None:
    alone(job, emulated_cluster)


# Collectives


def collectives() -> None:
    """Each against the CPU's, by the same group."""
    device = simulated_device(StreamDelays(seed=3, chance=0.5))
    dist.init_process_group("commlayer")
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for run in _calls(rank, size, dtype):
            wanted, got = run(torch.device("cpu")), run(device)
            for a, b in zip(wanted, got, strict=True):
                assert torch.equal(a, b.cpu()), (run, dtype, a, b)
    dist.barrier()
    with pytest.raises(TensorError, match=r"all_reduce expected a contiguous tensor, got strides \(1, 3\)"):
        dist.all_reduce(torch.ones(2, 3, device=device).t())
    dist.destroy_process_group()


def _calls(rank: int, size: int, dtype: torch.dtype) -> list[Callable[[torch.device], Sequence[torch.Tensor]]]:
    def mine(device: torch.device, *shape: int) -> torch.Tensor:
        count = math.prod(shape)
        return (torch.arange(count).view(shape) % 7 + rank).to(dtype).to(device)

    def all_reduce(device: torch.device) -> Sequence[torch.Tensor]:
        largest, total = mine(device, 5, 3), mine(device, 5, 3)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        dist.all_reduce(total)
        return [largest, total]

    def broadcast(device: torch.device) -> Sequence[torch.Tensor]:
        x = mine(device, 9)
        dist.broadcast(x, size - 1)
        return [x]

    def gathers(device: torch.device) -> Sequence[torch.Tensor]:
        whole = torch.zeros(size * 4, dtype=dtype, device=device)
        dist.all_gather_into_tensor(whole, mine(device, 4))
        parts = [torch.zeros(k + 1, dtype=dtype, device=device) for k in range(size)]
        dist.all_gather(parts, mine(device, rank + 1))
        return [whole, *parts]

    def scatters(device: torch.device) -> Sequence[torch.Tensor]:
        out, uneven = torch.zeros(4, dtype=dtype, device=device), torch.zeros(rank + 1, dtype=dtype, device=device)
        dist.reduce_scatter_tensor(out, mine(device, size * 4))
        dist.reduce_scatter(uneven, [mine(device, k + 1) for k in range(size)])
        return [out, uneven]

    def all_to_all(device: torch.device) -> Sequence[torch.Tensor]:
        sent, received = [k + 1 for k in range(size)], [rank + 1] * size
        out = torch.zeros(sum(received), 3, dtype=dtype, device=device)
        dist.all_to_all_single(out, mine(device, sum(sent), 3), received, sent)
        even = torch.zeros(2 * size, dtype=dtype, device=device)
        dist.all_to_all_single(even, mine(device, 2 * size))
        return [out, even]

    def messages(device: torch.device) -> Sequence[torch.Tensor]:
        x = torch.zeros(6, dtype=dtype, device=device)
        group: Any = dist.group.WORLD
        group.start_batch([(mine(device, 6), (rank + 1) % size)], [(x, (rank - 1) % size)]).wait()
        return [x]

    return [all_reduce, broadcast, gathers, scatters, all_to_all, messages]


def test_collectives(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 3).run(collectives)


def kept() -> list[bool]:
    """Whether tensors that the program lets go of outlive the call that reads them: as they are, and with that left out."""
    device = simulated_device(LAGGING)
    dist.init_process_group("commlayer")
    size = dist.get_world_size()

    def is_right() -> bool:
        whole = torch.zeros(size * 500, device=device)
        work = dist.all_gather_into_tensor(whole, torch.ones(500, device=device), async_op=True)
        assert work is not None
        for _ in range(3):
            torch.full((500,), 7.0, device=device)
        work.wait()
        return whole.eq(1).all().item() is True

    found = [all(is_right() for _ in range(10))]
    _without_keeping()
    found.append(all(is_right() for _ in range(10)))
    return found


def _without_keeping() -> None:
    from simulated import torch_communicator

    made = torch_communicator.EnqueuedWork.__init__

    def keep_nothing(self: Any, told: Any, label: str, end: Any, outputs: Any, kept: Any) -> None:
        del kept
        made(self, told, label, end, outputs, None)

    torch_communicator.EnqueuedWork.__init__ = keep_nothing  # type: ignore[method-assign]


def test_tensors_of_a_call_are_kept(emulated_cluster: ClusterFactory) -> None:
    for right, without in emulated_cluster(1, 2).run(kept):
        assert right
        assert not without


def absent() -> None:
    device = simulated_device()
    start_with(2.0)
    if dist.get_rank() == 0:
        x = torch.ones(3, device=device)
        dist.all_reduce(x)
        x.cpu()


def test_a_rank_that_does_not_come(emulated_cluster: ClusterFactory) -> None:
    with pytest.raises(RanksFailedError) as raised:
        emulated_cluster(1, 2).run(absent)
    found = re.search(
        r"(\w+): rank 0: the simulated device failed.*rank 0, group 0 of 2 ranks.*: all_reduce, call 1",
        str(raised.value),
    )
    assert found, str(raised.value)
    assert found[1] in ("CollectiveTimeoutError", "PeerError")


# Training


def training(kind: str) -> tuple[list[float], list[list[float]]]:
    torch.set_num_threads(1)
    simulated_device()
    dist.init_process_group("commlayer")
    wanted = train(kind, torch.device("cpu"))
    found = []
    for seed in SEEDS:
        device = simulated_device(StreamDelays(seed, chance=0.5))
        found.append(train(kind, device))
    dist.destroy_process_group()
    return wanted, found


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("kind", list(MODELS))
def test_losses_are_the_cpus(emulated_cluster: ClusterFactory, kind: str, nodes: int) -> None:
    """At 2 and 4 ranks, under several seeds. The CPU's collectives may add what four ranks have in another order."""
    for wanted, found in emulated_cluster(nodes, 2).run(training, kind):
        assert all(math.isfinite(loss) for loss in wanted)
        assert all(losses == found[0] for losses in found)
        assert found[0] == pytest.approx(wanted, rel=1e-5, abs=0)
        if kind != "moe" and nodes == 1:
            assert found[0] == wanted


# What a wait that is left out becomes


def _no_wait_before(patch: pytest.MonkeyPatch) -> None:
    """Leave out that a communicator waits for the stream of its caller."""
    from simulated.torch_simulator import TorchStream

    waits: Any = TorchStream.wait_event

    def wait_event(self: Any, event: Any) -> None:
        if not self.queue.name.startswith("the communicator"):
            waits(self, event)

    patch.setattr(TorchStream, "wait_event", wait_event)


def _no_wait_after(patch: pytest.MonkeyPatch) -> None:
    """Leave out that waiting for what is gathered or summed makes a stream wait."""
    from simulated.torch_communicator import EnqueuedWork

    waits: Any = EnqueuedWork.wait

    def wait(self: Any, timeout: timedelta = timedelta(0)) -> bool:
        is_left_out = any(name in self._label for name in ("all_reduce", "all_gather", "reduce_scatter"))
        return is_left_out or waits(self, timeout)

    patch.setattr(EnqueuedWork, "wait", wait)


def _no_wait_for_sums(patch: pytest.MonkeyPatch) -> None:
    """The same for sums alone: ranks that misread how many rows they get would wait for each other."""
    from simulated.torch_communicator import EnqueuedWork

    waits: Any = EnqueuedWork.wait
    patch.setattr(EnqueuedWork, "wait", lambda self, *timeout: "all_reduce" in self._label or waits(self, *timeout))


def _no_events(patch: pytest.MonkeyPatch) -> None:
    """Leave out that the streams of FSDP wait for each other, and for the default stream."""
    from simulated.torch_simulator import TorchStream

    waits: Any = TorchStream.wait_event

    def wait_event(self: Any, event: Any) -> None:
        if not self.queue.name.startswith("stream"):
            waits(self, event)

    patch.setattr(TorchStream, "wait_event", wait_event)
    patch.setattr(TorchStream, "wait_stream", lambda self, stream: None)


def broken(kind: str, breaks: Breaks) -> tuple[list[float], list[list[float]]]:
    torch.set_num_threads(1)
    simulated_device()
    dist.init_process_group("commlayer")
    wanted = train(kind, torch.device("cpu"))
    delays = [StreamDelays(seed, LAGGING.chance, LAGGING.idle_s) for seed in SEEDS]
    return wanted, [train(kind, simulated_device(each), breaks) for each in delays]


@pytest.mark.parametrize(
    ("kind", "breaks"),
    [
        ("ddp", _no_wait_before),
        ("fsdp", _no_wait_before),
        ("fsdp", _no_wait_after),
        ("fsdp", _no_events),
        ("moe", _no_wait_for_sums),
    ],
)
def test_a_wait_left_out_is_found(emulated_cluster: ClusterFactory, kind: str, breaks: Breaks) -> None:
    text = ""
    try:
        results = emulated_cluster(1, 2).run(broken, kind, breaks)
    except RanksFailedError as error:  # DDP itself may notice: what its ranks tell each other is wrong too
        results, text = [], str(error)
    assert (
        "reducer.cpp" in text
        if not results
        else any(losses != pytest.approx(wanted, rel=1e-3) for wanted, found in results for losses in found)
    )


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"memory_bytes": 0}, "memory_bytes: expected a whole number of at least 1, got 0"),
        ({"memory_bytes": 1e9}, "memory_bytes: .* got 1000000000.0"),
        ({"timeout_s": 0}, "timeout_s: expected a number of seconds above 0, got 0"),
        ({"timeout_s": float("inf")}, "timeout_s: .* got inf"),
        ({"timeout_s": "60"}, "timeout_s: .* got '60'"),
    ],
)
def test_a_device_that_cannot_be_is_refused_before_it_is_made(how: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        simulated_device(**how)
