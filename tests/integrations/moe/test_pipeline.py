"""Micro-batches through a pipeline: under both schedules the same losses and gradients as without stages, whatever the sizes; in
an order that needs no buffers; with as many activations kept as promised."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from queue import Queue
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from ranks import group_with, start_with
from torch import nn

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.gradients import synchronise_gradients
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.router import RouterConfig
from commlayer.profiles.errors import CollectiveTimeoutError, PeerError, TensorError, UsageError
from commlayer.testing.plugin import ClusterFactory
from examples.attention import ParallelAttention
from examples.buckets import GradientBuckets
from examples.context_parallel import KeysAndValues, context_parallel_attention, split_sequence
from examples.language_model import ModelConfig, MoELanguageModel
from examples.pass_parts import CutPass, Parts, carrying, run_parts
from examples.pipeline_schedules import (
    Schedule,
    StageTask,
    run_overlapped_pipeline,
    run_pipeline,
    tasks_of,
)

SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b")
HIDDEN = 6


def layer(index: int, dtype: torch.dtype = torch.float64) -> nn.Linear:
    made = nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=dtype)
    generator = torch.Generator().manual_seed(index)  # threads share torch's own
    made.weight.data.copy_(torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64) / 2)
    return made


def batches(sizes: Sequence[int], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(size, HIDDEN, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def expected(num_stages: int, sizes: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The losses, and the gradient of each stage's weight."""
    layers = [layer(index) for index in range(num_stages)]
    losses = []
    for x in batches(sizes):
        for each in layers:
            x = torch.tanh(each(x))
        losses.append(x.square().sum())
    torch.stack(losses).sum().backward()
    found = [each.weight.grad for each in layers]
    return [loss.detach() for loss in losses], [gradient for gradient in found if gradient is not None]


def run_stage(
    pp: GroupCommunicator,
    sizes: Sequence[int],
    schedule: Schedule,
    *,
    dtype: torch.dtype = torch.float64,
    before: Callable[[int], None] = lambda m: None,
    two_at_once: bool = False,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    mine, inputs = layer(pp.rank, dtype), batches(sizes, dtype)

    def stage(m: int, x: torch.Tensor | None) -> torch.Tensor:
        before(m)
        assert (x is None) == (pp.rank == 0)
        y = torch.tanh(mine(inputs[m] if x is None else x))
        return y.square().sum() if pp.rank == pp.size - 1 else y

    def parts(m: int, x: torch.Tensor | None) -> Parts[torch.Tensor]:
        """The work of ``stage``, in three parts, of which the second makes nothing."""
        (y,) = yield (mine(inputs[m] if x is None else x),)
        (y,) = yield (y,)
        y = torch.tanh(y)
        return y.square().sum() if pp.rank == pp.size - 1 else y

    shapes = [(size, HIDDEN) for size in sizes]
    if two_at_once:
        losses = run_overlapped_pipeline(parts, pp, shapes, dtype=dtype, schedule=schedule)
    else:
        losses = run_pipeline(stage, pp, shapes, dtype=dtype, schedule=schedule)
    assert mine.weight.grad is not None
    return losses, mine.weight.grad


# Without buffers


class NoBuffers:
    """The messages of threads that stand for ranks, as strictly as NCCL on one communicator may take them: a rank's exchanges
    go one by one in the order in which they were issued, and each lasts until all its messages have met their other ends."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.wires: dict[tuple[int, int], Queue[tuple[torch.Tensor, threading.Event]]] = defaultdict(Queue)

    def member(self, rank: int) -> GroupCommunicator:
        return cast("GroupCommunicator", _Member(self, rank))


class _Exchange:
    def __init__(self) -> None:
        self.ended = threading.Event()

    def wait(self) -> None:
        assert self.ended.wait(20), "a deadlock"


class _Member:
    def __init__(self, network: NoBuffers, rank: int) -> None:
        self.network, self.rank, self.size = network, rank, network.size
        self._issued: Queue[Any] = Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def start_exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> _Exchange:
        exchange = _Exchange()
        self._issued.put((exchange, sends, receives))
        return exchange

    def _run(self) -> None:
        while True:
            exchange, sends, receives = self._issued.get()
            arrived = []
            for x, peer in sends:
                if x.numel():
                    arrived.append(threading.Event())
                    self.network.wires[self.rank, peer].put((x, arrived[-1]))
            for x, peer in receives:
                if x.numel():
                    sent, event = self.network.wires[peer, self.rank].get()
                    x.copy_(sent)
                    event.set()
            for event in arrived:
                event.wait()
            exchange.ended.set()


def in_threads(size: int, call: Callable[[GroupCommunicator], Any]) -> list[Any]:
    network, results = NoBuffers(size), [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = call(network.member(rank))
        except BaseException as error:  # noqa: BLE001  raised by whoever started the threads
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise errors[0]
    return results


@pytest.mark.parametrize("two_at_once", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 5])
def test_no_order_rests_on_buffers(schedule: Schedule, num_stages: int, two_at_once: bool) -> None:
    for number in (1, 2, 3, 5, 8):
        sizes = [1 + (m % 3) for m in range(number)]
        losses, gradients = expected(num_stages, sizes)
        run = partial(run_stage, sizes=sizes, schedule=schedule, two_at_once=two_at_once)
        found = in_threads(num_stages, run)
        for rank, (mine, gradient) in enumerate(found):
            torch.testing.assert_close(gradient, gradients[rank])
            torch.testing.assert_close(mine, losses if rank == num_stages - 1 else [])


# Between ranks


def between_ranks(
    sizes: Sequence[int], dtype: torch.dtype
) -> dict[tuple[Schedule, bool], tuple[list[torch.Tensor], torch.Tensor]]:
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    pp = GroupCommunicator(dist.group.WORLD, "pp")
    found = {
        (schedule, two): run_stage(pp, sizes, schedule, dtype=dtype, two_at_once=two)
        for schedule in SCHEDULES
        for two in (False, True)
    }
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("num_stages", "sizes", "dtype", "tolerance"),
    [
        (1, [2, 2], torch.float64, 1e-12),
        (2, [3], torch.float64, 1e-12),
        (3, [2, 1, 0, 3], torch.float64, 1e-12),  # one micro-batch without elements
        (3, [0, 0], torch.float64, 1e-12),
        (4, [1, 2, 3, 4, 5, 6, 7], torch.float32, 1e-5),
        (5, [2, 2], torch.bfloat16, 0.05),
    ],
)
def test_between_ranks(
    emulated_cluster: ClusterFactory, num_stages: int, sizes: list[int], dtype: torch.dtype, tolerance: float
) -> None:
    losses, gradients = expected(num_stages, sizes)
    ranks = emulated_cluster(1, num_stages, mode="loopback").run(between_ranks, sizes, dtype)
    for rank, found in enumerate(ranks):
        for mine, gradient in found.values():
            torch.testing.assert_close(gradient.double(), gradients[rank], rtol=tolerance, atol=tolerance)
            wanted = losses if rank == num_stages - 1 else []
            assert [float(loss) for loss in mine] == pytest.approx([float(loss) for loss in wanted], rel=tolerance)
        # The same bits: each adds the gradients of the same micro-batches in one order.
        for _, gradient in found.values():
            assert torch.equal(gradient, found["gpipe", False][1])


def large_messages() -> None:
    """Both neighbours send MiB at once, more than sockets take."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    pp = GroupCommunicator(dist.group.WORLD, "pp")
    for schedule in SCHEDULES:
        weight = torch.ones(1, requires_grad=True)

        def stage(m: int, x: torch.Tensor | None, weight: torch.Tensor = weight) -> torch.Tensor:
            y = (torch.ones(1 << 20) if x is None else x) * weight
            return y.sum() if pp.rank == pp.size - 1 else y

        losses = run_pipeline(stage, pp, [(1 << 20,)] * 4, schedule=schedule)
        assert [float(loss) for loss in losses] == ([1 << 20] * 4 if pp.rank == pp.size - 1 else [])
        assert weight.grad is not None
        assert float(weight.grad) == 4 << 20


def test_large_messages(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 3, mode="loopback").run(large_messages)


def a_stage_raises() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    pp = GroupCommunicator(dist.group.WORLD, "pp")

    def fail(m: int) -> None:
        if (pp.rank, m) == (1, 1):
            raise ValueError("in a stage")

    run_stage(pp, [2, 2, 2], "1f1b", before=fail)


def test_a_stage_that_raises_stops_its_neighbours(emulated_cluster: ClusterFactory) -> None:
    outcomes = emulated_cluster(1, 3, mode="loopback").run(a_stage_raises, grace_s=30.0, check=False)
    raised = [outcome.failure for outcome in outcomes]
    for failure, kind in zip(raised, ("PeerError", "ValueError", "PeerError"), strict=True):
        assert failure is not None
        assert kind in str(failure)


# What a schedule promises


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_activations_kept(num_stages: int, number: int) -> None:
    for schedule in SCHEDULES:
        for stage in range(num_stages):
            tasks = tasks_of(schedule, stage, num_stages, number)
            assert sorted(tasks) == sorted(StageTask(way, m) for way in (True, False) for m in range(number))
            assert [task.m for task in tasks if task.is_forward] == list(range(number))
            assert [task.m for task in tasks if not task.is_forward] == list(range(number))
            kept = most = 0
            for task in tasks:
                kept += 1 if task.is_forward else -1
                most = max(most, kept)
            promised = num_stages - stage if schedule == "1f1b" or num_stages == 1 else number
            assert most == min(promised, number)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("number", [1, 2, 3, 9])
def test_two_at_a_time_are_one_forward_and_one_backward(num_stages: int, number: int) -> None:
    for stage in range(num_stages):
        tasks = tasks_of("1f1b", stage, num_stages, number, in_pairs=True)
        assert sorted(tasks) == sorted(StageTask(way, m) for way in (True, False) for m in range(number))
        ahead = min(number, 2 * (num_stages - 1 - stage) + 1)
        assert [task.is_forward for task in tasks[:ahead]] == [True] * ahead
        pairs = tasks[ahead : 2 * number - ahead]
        assert pairs == [StageTask(way, m + ahead * way) for m in range(number - ahead) for way in (False, True)]


def test_passes_go_in_turns_and_the_earlier_is_ahead() -> None:
    """Each stage goes on with the other micro-batch wherever a part ends; the backward pass has the same parts, last first."""
    seen: list[str] = []

    def noted(x: torch.Tensor, m: int, part: str) -> torch.Tensor:
        seen.append(f"{m}{part}")
        x.register_hook(lambda _: seen.append(f"{m}{part.upper()}"))
        return x

    def parts(m: int, x: torch.Tensor | None) -> Parts[torch.Tensor]:
        (y,) = yield (noted(torch.ones(2, requires_grad=True) * 2, m, "a"),)
        (y,) = yield (noted(y * 3, m, "b"),)
        return noted(y * 4, m, "c").sum()

    alone = GroupCommunicator(None, "pp")
    losses = run_overlapped_pipeline(parts, alone, [(2,)] * 3, schedule="gpipe")
    assert [float(loss) for loss in losses] == [48.0] * 3
    forward, backward = "0a 1a 0b 1b 0c 1c 2a 2b 2c", "0C 0B 1C 0A 1B 2C 1A 2B 2A"
    assert " ".join(seen).startswith("0a 1a 0b 1b 0c 1c 2a")
    assert sorted(seen) == sorted(f"{forward} {backward}".split())
    for m in range(3):  # in every part the earlier micro-batch is first
        for part in "abcABC":
            assert m == 0 or seen.index(f"{m - 1}{part}") < seen.index(f"{m}{part}")
    seen.clear()
    run_overlapped_pipeline(parts, alone, [(2,)] * 4, schedule="1f1b")
    assert seen[:6] == ["0a", "0b", "0c", "0C", "1a", "0B"], "one is forward beside another that is backward"
    assert seen[-3:] == ["3C", "3B", "3A"]


def test_a_graph_that_is_cut_has_the_gradients_of_a_whole_one() -> None:
    def inner(x: torch.Tensor) -> Parts[torch.Tensor]:
        (x, kept) = yield (x * 3, x)
        (x, kept) = yield (x * kept, kept)  # crosses twice
        return x + kept.sin()

    def outer(x: torch.Tensor) -> Parts[torch.Tensor]:
        x = x.exp()
        made, (x,) = yield from carrying(inner(x.cos()), x)
        return made * x

    found = []
    for is_cut in (False, True):
        x = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
        if is_cut:
            cut = CutPass(outer(x))
            with pytest.raises(UsageError, match="have not all run"):
                cut.result  # noqa: B018
            assert [cut.forward() for _ in range(3)] == [True, True, False]
            y = cut.result.detach()
            assert len(list(cut.backward(torch.ones(5, dtype=torch.float64)))) == 2
        else:
            made = run_parts(outer(x))
            made.sum().backward()
            y = made.detach()
        found.append((y, x.grad))
    assert found[0][1] is not None
    torch.testing.assert_close(found[1], found[0], rtol=1e-14, atol=0)


def test_graphs_go_as_soon_as_they_may() -> None:
    """1F1B would keep nothing if what a finished micro-batch computed with stayed."""

    class Counted(torch.autograd.Function):
        alive = most = 0

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            Counted.alive += 1
            Counted.most = max(Counted.most, Counted.alive)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            Counted.alive -= 1
            return gradient

    weight = torch.ones(3, requires_grad=True)
    run_pipeline(lambda m, x: cast("Any", Counted).apply(weight).sum(), GroupCommunicator(None, "pp"), [(3,)] * 5)
    assert (Counted.alive, Counted.most) == (0, 1)


class _Kept:
    """An exchange keeps its tensors as long as somebody keeps the exchange."""

    def __init__(self, network: _Keeping, sends: Sequence[Any], only_sends: bool) -> None:
        self.network, self.sends, self.only_sends, self.number = network, sends, only_sends, network.started

    def wait(self) -> None:
        if self.only_sends:
            self.network.later.append(self.network.started - self.number)


class _Keeping:
    """A stage whose neighbours always answer at once."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.sent: list[weakref.ref[torch.Tensor]] = []
        self.later: list[int] = []  # how many exchanges had been started since, when one that only sends was waited for
        self.started = self.most = 0

    @property
    def alive(self) -> int:
        return sum(x() is not None for x in self.sent)

    def start_exchange(self, sends: Sequence[Any], receives: Sequence[Any]) -> _Kept:
        self.started += 1
        self.sent += [weakref.ref(x) for x, _ in sends]
        for x, _ in receives:
            x.zero_()
        self.most = max(self.most, self.alive)
        return _Kept(self, sends, not receives)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (0, 4), (1, 4), (3, 4)])
def test_what_was_sent_goes_two_turns_later(schedule: Schedule, rank: int, size: int) -> None:
    pp = _Keeping(rank, size)
    gc.disable()
    try:
        run_stage(cast("GroupCommunicator", pp), [2] * 16, schedule)
    finally:
        gc.enable()
    assert pp.most <= 4, "two turns' and this one's, and what the last task used"
    assert all(later >= 2 for later in pp.later[:-2]), "not at once"
    assert pp.alive == 0


def test_what_is_next_is_asked_for_before_computing() -> None:
    """While a stage computes, what its next task needs is under way already; but no answer is before its question was sent."""
    asked: dict[int, list[str]] = {0: [], 1: []}

    class Noting(_Member):
        def start_exchange(self, sends: Any, receives: Any) -> _Exchange:
            asked[self.rank].append(f"exchange {len(sends)} {len(receives)}")
            return super().start_exchange(sends, receives)

    network = NoBuffers(2)

    def stage_of(rank: int) -> None:
        pp = cast("GroupCommunicator", Noting(network, rank))
        run_stage(pp, [1, 1, 1], "gpipe", before=lambda m: asked[rank].append(f"forward {m}"))

    threads = [threading.Thread(target=stage_of, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    # Stage 1: micro-batch 0 and 1 are asked for before 0 is computed, 2 before 1 is.
    assert asked[1][:5] == ["exchange 0 1", "exchange 0 1", "forward 0", "exchange 0 1", "forward 1"]
    # Stage 0: what it has sent of 2 goes with asking for the gradient of 0; then that of 1 is asked for.
    assert asked[0][:7] == [
        "forward 0",
        "exchange 1 0",
        "forward 1",
        "exchange 1 0",
        "forward 2",
        "exchange 1 1",
        "exchange 0 1",
    ]


def test_refusals() -> None:
    with pytest.raises(UsageError, match="schedule must be one of gpipe, 1f1b, got 'interleaved'"):
        run_pipeline(lambda m, x: torch.zeros(()), GroupCommunicator(None, "pp"), [(1,)], schedule="interleaved")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="at least one micro-batch"):
        run_pipeline(lambda m, x: torch.zeros(()), GroupCommunicator(None, "pp"), [], schedule="1f1b")
    with pytest.raises(UsageError, match=r"run_overlapped_pipeline\(\) needs at least one"):
        run_overlapped_pipeline(lambda m, x: iter(()), GroupCommunicator(None, "pp"), [])  # type: ignore[arg-type,return-value]


def unused_input(schedule: Schedule) -> torch.Tensor:
    """A stage that does not look at what it gets: the stage before still gets its gradient, of zeros."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    pp = GroupCommunicator(dist.group.WORLD, "pp")
    weight = torch.ones(2, requires_grad=True)
    run_pipeline(lambda m, x: (weight * 2).sum() if pp.rank else weight * 2, pp, [(2,)] * 2, schedule=schedule)
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_that_uses_no_input(emulated_cluster: ClusterFactory, schedule: Schedule) -> None:
    first, last = emulated_cluster(1, 2, mode="loopback").run(unused_input, schedule)
    assert first.tolist() == [0.0, 0.0]
    assert last.tolist() == [4.0, 4.0]


# With gradients in buckets, and in a model


def with_buckets(schedule: Schedule) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    with FoldedMesh({"pp": 2}) as mesh:
        pp = GroupCommunicator(mesh.group("pp"), "pp")
        found = []
        for overlaps in (False, True):
            mine = layer(pp.rank)
            buckets = GradientBuckets(mine, mesh, bucket_bytes=1) if overlaps else None

            def stage(m: int, x: torch.Tensor | None, mine: nn.Linear = mine) -> torch.Tensor:
                y = torch.tanh(mine(batches([2, 1, 3])[m] * (dist.get_rank() + 1) if x is None else x))
                return y.square().sum() if pp.rank else y

            shapes = [(2, HIDDEN), (1, HIDDEN), (3, HIDDEN)]
            run_pipeline(stage, pp, shapes, dtype=torch.float64, schedule=schedule, gradients=buckets)
            if buckets is None:
                synchronise_gradients(mine, mesh)
            else:
                buckets.finish()
            assert mine.weight.grad is not None
            found.append(mine.weight.grad)
        torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_buckets(emulated_cluster: ClusterFactory, schedule: Schedule) -> None:
    emulated_cluster(2, 2, mode="loopback").run(with_buckets, schedule)


def model_of(degrees: dict[str, int] | None, schedule: Schedule) -> tuple[float, dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    config = ModelConfig(
        router=RouterConfig(num_experts=4, top_k=2),
        hidden=16,
        num_layers=4,
        width=16,
        shared_width=8,
        schedule=schedule,
        seed=2,
    )
    tokens = torch.randint(256, (9, 6), generator=torch.Generator().manual_seed(1))
    if degrees is None:
        model, mesh = MoELanguageModel(config), None
    else:
        dist.init_process_group("commlayer")
        mesh = FoldedMesh(degrees)
        model = MoELanguageModel(config, mesh)
    loss = float(model.train_step(tokens[:-1], tokens[1:], num_micro_batches=3))
    named = [(name, p.grad) for name, p in model.named_parameters() if "experts" not in name]
    return loss, {name: gradient.clone() for name, gradient in named if gradient is not None}


@pytest.mark.parametrize(
    ("world", "degrees"), [(4, {"pp": 2, "ep": 2}), (4, {"pp": 4}), (6, {"pp": 3, "cp": 2, "ep": 2})]
)
def test_a_model(emulated_cluster: ClusterFactory, world: int, degrees: dict[str, int]) -> None:
    loss, gradients = model_of(None, "gpipe")
    for schedule in SCHEDULES:
        for found, mine in emulated_cluster(2, world // 2, mode="loopback").run(
            model_of, degrees, schedule, timeout_s=90
        ):
            assert found == pytest.approx(loss, rel=1e-5)
            for name, gradient in mine.items():
                error = (gradient - gradients[name]).abs().max() / gradients[name].abs().max()
                assert error <= 1e-4, (schedule, name)


def two_at_a_time(degrees: dict[str, int], separate: tuple[str, ...]) -> None:
    """Losses and gradients have the same bits as where one micro-batch follows the other."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    tokens = torch.randint(256, (9, 6), generator=torch.Generator().manual_seed(1))
    with FoldedMesh(degrees, separate=separate) as mesh:
        found: dict[bool, list[torch.Tensor]] = {}
        for schedule in SCHEDULES:
            for at_once in (False, True):
                model = MoELanguageModel(
                    ModelConfig(
                        router=RouterConfig(num_experts=4, top_k=2, aux_loss_coefficient=0.01),
                        hidden=16,
                        num_layers=4,
                        width=16,
                        shared_width=8,
                        schedule=schedule,
                        chunks=1,
                        overlap_micro_batches=at_once,
                        overlap_gradients=schedule == "1f1b",
                        bucket_bytes=4096,
                    ),
                    mesh,
                )
                losses = [model.train_step(tokens[:-1], tokens[1:], num_micro_batches=n) for n in (3, 1)]
                gradients = [p.grad for p in model.parameters()]
                found[at_once] = [*losses, *(gradient for gradient in gradients if gradient is not None)]
                assert len(found[at_once]) == len(gradients) + 2
            for mine, wanted in zip(found[True], found[False], strict=True):
                assert torch.equal(mine, wanted), schedule


@pytest.mark.parametrize(("degrees", "separate"), [({"pp": 2, "ep": 2}, ("etp_ep",)), ({"cp": 2, "ep": 4}, ())])
def test_a_model_two_micro_batches_at_a_time(
    emulated_cluster: ClusterFactory, degrees: dict[str, int], separate: tuple[str, ...]
) -> None:
    emulated_cluster(2, 2, mode="loopback").run(two_at_a_time, degrees, separate)


# Keys and values, which leave before there are queries


def keys_leave_first(kind: Any) -> list[str]:
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    cp = GroupCommunicator(dist.group.WORLD, "cp")
    attention = ParallelAttention(8, 2, tp=GroupCommunicator(None, "tp"), cp=cp, kind=kind, rope_base=1e4)
    seen: list[str] = []
    start, linear = cp.start_all_gather, F.linear
    names = {id(getattr(attention, name).weight): name for name in ("q", "k", "v", "out")}

    def started(*rest: Any) -> Any:
        seen.append("gather")
        return start(*rest)

    def noted(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(names[id(weight)])
        return linear(x, weight, *rest)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cp, "start_all_gather", started)
        monkeypatch.setattr(F, "linear", noted)
        attention(torch.randn(4, 1, 8), 8).sum().backward()
    return seen


@pytest.mark.parametrize("kind", ["ulysses", "tensor"])
def test_keys_leave_before_there_are_queries(emulated_cluster: ClusterFactory, kind: str) -> None:
    for seen in emulated_cluster(1, 2, mode="loopback").run(keys_leave_first, kind):
        assert seen == ["k", "v", "gather", "q", "out"]


def early_and_late(uses: list[int] | None, num_heads: int) -> None:
    """The same as without, value and gradients, also of rows that do not divide, and of no heads."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    cp = GroupCommunicator(dist.group.WORLD, "cp")
    seq_len, heads = 7, sum(uses) if uses else num_heads
    num_kv = len(uses) if uses else num_heads
    generator = torch.Generator().manual_seed(4)
    whole = [torch.randn(seq_len, 2, n, 4, generator=generator) for n in (heads, num_kv, num_kv)]
    found = []
    for is_early in (False, True):
        q, k, v = (split_sequence(each, cp=cp).clone().requires_grad_() for each in whole)
        if is_early:
            kv = KeysAndValues(k, v, cp=cp, seq_len=seq_len)
            y = context_parallel_attention(q, kv, cp=cp, seq_len=seq_len, uses=uses)
        else:
            y = context_parallel_attention(q, k, v, cp=cp, seq_len=seq_len, uses=uses)
        y.square().sum().backward()
        found.append((y, q.grad, k.grad, v.grad))
    for early, late in zip(*found, strict=True):
        assert (early is None) == (late is None)
        if early is not None and late is not None:
            assert torch.equal(early, late)
    with pytest.raises(UsageError, match="keys without values"):
        context_parallel_attention(q, k, cp=cp, seq_len=seq_len, uses=uses)


@pytest.mark.parametrize(("uses", "num_heads"), [(None, 2), ([1, 2], 0), ([], 0)])
def test_early_and_late(emulated_cluster: ClusterFactory, uses: list[int] | None, num_heads: int) -> None:
    emulated_cluster(1, 3, mode="loopback").run(early_and_late, uses, num_heads)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_a_stage_returns_is_checked_before_it_is_sent(emulated_cluster: ClusterFactory, schedule: Any) -> None:
    """Under autocast activations are BF16 where run_pipeline was told nothing; the next stage would read them as FP32."""

    def job() -> str:
        torch.set_num_threads(1)
        start_with(5.0)
        pp = GroupCommunicator(group_with(5.0, backend="commlayer"), "pp")
        try:
            run_pipeline(lambda m, x: torch.ones(3, 8, dtype=torch.bfloat16), pp, [(3, 8)] * 2, schedule=schedule)
        except (TensorError, PeerError, CollectiveTimeoutError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    outcomes = emulated_cluster(1, 2).run(job, check=False, grace_s=30.0)
    assert "stage 0 of 2, micro-batch 0: expected activations of shape [3, 8], torch.float32" in outcomes[0].value
    assert outcomes[1].value


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_first_stage_that_is_frozen(emulated_cluster: ClusterFactory, schedule: Any) -> None:
    def job() -> bool:
        torch.set_num_threads(1)
        dist.init_process_group("commlayer")
        rank = dist.get_rank()
        torch.manual_seed(0)
        stages = [torch.nn.Linear(8, 8) for _ in range(3)]
        stages[0].requires_grad_(False)
        pp = GroupCommunicator(dist.new_group(backend="commlayer"), "pp")

        def stage(m: int, x: torch.Tensor | None) -> torch.Tensor:
            y: torch.Tensor = stages[rank](torch.ones(3, 8) if x is None else x)
            return y.sum() if rank == 2 else y

        run_pipeline(stage, pp, [(3, 8)] * 4, schedule=schedule)
        return all((p.grad is None) == (rank == 0) for p in stages[rank].parameters())

    assert emulated_cluster(1, 3).run(job) == [True] * 3
