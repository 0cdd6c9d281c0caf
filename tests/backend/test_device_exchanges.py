"""Exchanges with any splits, wire formats, and what can be captured, on a device: the simulated one that torch sees."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import seen_calls, start_with
from simulated.torch_device import simulated_device
from simulated.torch_memory import TorchMemory
from simulated.torch_streams import QueueRunner, StreamDelays
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.nn.functional import all_to_all_single as differentiable

import commlayer
from commlayer.backend import group_extras
from commlayer.collectives import GroupCommunicator
from commlayer.engine.group_plans import Choices
from commlayer.integrations import plan_ddp
from commlayer.profiles.errors import (
    CollectiveTimeoutError,
    DisagreementError,
    NonFiniteError,
    PeerError,
    TensorError,
)
from commlayer.scheduler.plan import Plan, Span
from commlayer.scheduler.wire import WireFormat, WirePolicy
from commlayer.testing.plugin import ClusterFactory

LAGGING = StreamDelays(chance=0.9)
"""Nearly everything runs only when the host waits."""
CPU = torch.device("cpu")
W = 16


def planned(collective: str = "all_to_all") -> Counter[str]:
    """How many calls have run by each plan."""
    found: Counter[str] = Counter()
    for call in (call for group in commlayer.stats()["groups"] for call in group["calls"]):
        if call["collective"] == collective and call["plan"] != "flat":
            found[call["plan"]] += call["calls"]
    return found


def rows_to(sender: int, receiver: int, turn: int) -> int:
    return (3 * sender + 5 * receiver + turn) % 4


def splits(turn: int) -> tuple[list[int], list[int]]:
    """Rows that come from each rank, and that go to each; none between some."""
    me, size = dist.get_rank(), dist.get_world_size()
    return [rows_to(k, me, turn) for k in range(size)], [rows_to(me, k, turn) for k in range(size)]


def filled(rows: int, device: torch.device, dtype: torch.dtype, turn: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(17 * dist.get_rank() + turn)
    return torch.randint(-3, 9, (rows, W), generator=draw).to(dtype).to(device)


# all_to_all


def even(device: torch.device, turn: int) -> torch.Tensor:
    x = filled((turn + 1) * dist.get_world_size(), device, torch.bfloat16, turn)
    out = torch.full_like(x, 7)
    dist.all_to_all_single(out, x)
    return out


def uneven(device: torch.device, turn: int) -> torch.Tensor:
    received, sent = splits(turn)
    out = torch.full((sum(received), W), 7, dtype=torch.int64, device=device)
    dist.all_to_all_single(out, filled(sum(sent), device, torch.int64, turn), received, sent)
    return out


def careless(device: torch.device, turn: int) -> torch.Tensor:
    """Several calls under way; inputs are let go of early, and their memory is wanted at once."""
    works, outputs = [], []
    for call in range(3):
        received, sent = splits(turn + call)
        x = filled(sum(sent), device, torch.float32, call)
        outputs.append(torch.full((sum(received), W), 7.0, device=device))
        works.append(dist.all_to_all_single(outputs[-1], x, received, sent, async_op=True))
        del x
        torch.full((sum(sent), W), 5.0, device=device)
    for work in works:
        assert work is not None
        work.wait()
    return torch.cat(outputs)


def by_functional(device: torch.device, turn: int) -> torch.Tensor:
    received, sent = splits(turn)
    x = filled(sum(sent), device, torch.float32, turn).requires_grad_()
    out = functional.wait_tensor(functional.all_to_all_single_autograd(x, received, sent, dist.group.WORLD))
    (out * torch.arange(float(W), device=device)).sum().backward()
    assert x.grad is not None
    return torch.cat([out.detach(), x.grad])


def by_nn_functional(device: torch.device, turn: int) -> torch.Tensor:
    received, sent = splits(turn)
    x = filled(sum(sent), device, torch.float32, turn).requires_grad_()
    out = differentiable(torch.empty(sum(received), W, device=device), x, received, sent)
    (out * torch.arange(float(W), device=device)).sum().backward()
    assert x.grad is not None
    return torch.cat([out.detach(), x.grad])


def known(device: torch.device, turn: int) -> torch.Tensor:
    """All ranks know all counts, forward and backward."""
    assert dist.group.WORLD is not None
    size, group = dist.get_world_size(), GroupCommunicator(dist.group.WORLD, "ep")
    received, sent = splits(turn)
    everyones = [[rows_to(k, j, turn) for j in range(size)] for k in range(size)]
    x = filled(sum(sent), device, torch.float32, turn).requires_grad_()
    out = group.all_to_all(x, sent, received, everyones=everyones)
    (out * torch.arange(float(W), device=device)).sum().backward()
    assert x.grad is not None
    return torch.cat([out.detach(), x.grad])


EXCHANGES: tuple[tuple[Callable[[torch.device, int], torch.Tensor], int, int], ...] = (
    (even, 1, 0),
    (uneven, 1, 1),
    (careless, 3, 3),
    (by_functional, 2, 2),
    (by_nn_functional, 2, 2),
    (known, 2, 0),
)
"""Each with how many calls it makes, and how often ranks tell each other their counts for them."""


def every_exchange(shape: str) -> None:
    if shape:
        os.environ["COMMLAYER_TOPOLOGY"] = shape
    os.environ["COMMLAYER_PLAN"] = "hierarchical"
    device = simulated_device(LAGGING)
    dist.init_process_group("commlayer")
    for exchange, num_calls, num_told in EXCHANGES:
        for turn in range(3):
            simulated_device(StreamDelays(turn, LAGGING.chance))
            wanted = exchange(CPU, turn)
            before = planned()
            with seen_calls(group_extras, "everyones_numbers") as told:
                got = exchange(device, turn).cpu()
            assert torch.equal(got, wanted), (exchange.__name__, turn, got, wanted)
            assert len(told) == num_told, exchange.__name__
            assert planned() - before == {"hierarchical": num_calls}, exchange.__name__
    empty = torch.empty(0, W, device=device)
    dist.all_to_all_single(empty.clone(), empty, [0] * dist.get_world_size(), [0] * dist.get_world_size())
    refusals(device)
    dist.destroy_process_group()


def refusals(device: torch.device) -> None:
    size = dist.get_world_size()
    rows = torch.zeros(size, W, device=device)
    with pytest.raises(TensorError, match="input_split_sizes must be"):
        dist.all_to_all_single(rows, rows, [1] * size, [2] * size)
    sent = [1] * size
    if dist.get_rank() == 1:
        sent[0] = 2
    with pytest.raises(
        DisagreementError, match=r"rank 1 sends 128 bytes to rank 0, which expects 64; nothing was sent"
    ):
        dist.all_to_all_single(
            torch.zeros(size, W, device=device), torch.zeros(sum(sent), W, device=device), [1] * size, sent
        )
    dist.all_to_all_single(torch.empty_like(rows), rows)  # nobody is left waiting
    with pytest.raises(TensorError, match="needs contiguous tensors"):
        dist.all_to_all_single(torch.zeros(W, size, device=device).t(), rows)


@pytest.mark.parametrize(("nodes", "ranks", "shape"), [(2, 2, ""), (1, 3, "2+1")], ids=["2x2", "2+1"])
def test_every_exchange_gives_the_cpus_bits(
    nodes: int, ranks: int, shape: str, emulated_cluster: ClusterFactory
) -> None:
    emulated_cluster(nodes, ranks).run(every_exchange, shape)


def split_on_rank_0_alone() -> str:
    """The error of a call of which one rank says splits, and the others none."""
    os.environ["COMMLAYER_PLAN"] = "hierarchical"
    device = simulated_device(StreamDelays(chance=0.0))
    start_with(3.0)
    rows, ones = torch.ones(4, W, device=device), [1] * 4
    given = (ones, ones) if dist.get_rank() == 0 else (None, None)
    with pytest.raises((CollectiveTimeoutError, PeerError)) as found:
        dist.all_to_all_single(torch.empty_like(rows), rows, *given)
    return str(found.value)


def test_splits_on_some_ranks_only_end_at_the_timeout_with_names(emulated_cluster: ClusterFactory) -> None:
    """Who has splits waits for the others' counts, and these for it: nothing is agreed by then that would tell them apart."""
    words = emulated_cluster(2, 2).run(split_on_rank_0_alone)
    assert "to exchange the counts of an all_to_all" in words[0]
    for rank, text in enumerate(words):
        assert f"rank {rank} could not connect" in text or f"rank {rank}: ranks [0, 1, 2, 3] did not all come" in text
        assert "group 0" in text


# Rails and nodes


def over_levels() -> None:
    device = simulated_device(LAGGING)
    dist.init_process_group("commlayer")
    assert dist.group.WORLD is not None
    group, me = GroupCommunicator(dist.group.WORLD, "ep"), dist.get_rank()
    for span, peer in ((Span.RAIL, (me + 2) % 4), (Span.NODE, me ^ 1)):
        sent = [3 if k == peer else 1 if k == me else 0 for k in range(4)]
        found = []
        for where in (CPU, device):
            x = filled(4, where, torch.float32).requires_grad_()
            with seen_calls(group_extras, "everyones_numbers") as told:
                out = group.all_to_all(x, sent, sent, most_rows=4, over=span)
                (out * torch.arange(float(W), device=where)).sum().backward()
            assert not told
            assert x.grad is not None
            found.append(torch.cat([out.detach(), x.grad]).cpu())
        assert torch.equal(*found), span
    dist.destroy_process_group()


def test_exchanges_over_rails_and_nodes(emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMLAYER_PLAN", "hierarchical")
    emulated_cluster(2, 2).run(over_levels)


# Wire formats


def compressed(group: GroupCommunicator, device: torch.device, turn: int) -> list[torch.Tensor]:
    """Every verb, of values that rounding changes; blocks of other sizes for each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = [3 + (k + turn) % 2 for k in range(size)]
    draw = torch.Generator().manual_seed(100 * turn + rank)
    x = torch.randn(sum(rows), W, generator=draw).to(device)
    total, mine = x.clone(), x.new_empty(rows[rank], W)
    whole, own = torch.empty_like(x), x[: rows[rank]].clone()
    received, sent = splits(turn)
    out, going = x.new_empty(sum(received), W), x[: sum(sent)].clone()
    works = [
        group.all_reduce_in_place(total),
        group.reduce_scatter_into(mine, x, rows),
        group.all_gather_into(whole, own, rows),
    ]
    works.append(group.all_to_all_into(out, going, sent, received))
    del own, going
    x.new_zeros(rows[rank], W)  # where the input was
    for work in works:
        work.wait()
    return [each.cpu() for each in (total, mine, whole, out)]


def every_wire(plan: str) -> None:
    os.environ["COMMLAYER_PLAN"] = plan
    device = simulated_device(LAGGING)
    dist.init_process_group("commlayer")
    assert dist.group.WORLD is not None
    for wire in (WireFormat.BF16, WireFormat.FP8_E4M3):
        group = GroupCommunicator(dist.group.WORLD, wire=WirePolicy((wire,)), name="lane ep")
        for turn in range(2):
            simulated_device(StreamDelays(turn, LAGGING.chance))
            wanted = compressed(group, CPU, turn)
            before = {name: planned(name) for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all_v")}
            for a, b in zip(compressed(group, device, turn), wanted, strict=True):
                assert torch.equal(a, b), (wire, turn)
            for name, calls in before.items():
                ran = {plan: count for plan, count in (planned(name) - calls).items() if "/" in plan}
                assert [plan.partition("/")[2] for plan in ran] == [str(wire)], name
                assert sum(ran.values()) == 1, name
    x = torch.zeros(8, W, device=device)
    if dist.get_rank() == 2:
        x[3, 3] = float("nan")
    fp8 = GroupCommunicator(dist.group.WORLD, wire=WirePolicy((WireFormat.FP8_E4M3,)), name="lane ep")
    with pytest.raises(NonFiniteError, match="1 values that were to be sent"):
        fp8.all_reduce_in_place(x)
    passing = GroupCommunicator(
        dist.group.WORLD, wire=WirePolicy((WireFormat.FP8_E4M3,), non_finite="pass"), name="lane ep"
    )
    passing.all_reduce_in_place(x).wait()
    assert x.isnan().any()
    dist.destroy_process_group()


@pytest.mark.parametrize("plan", ["flat_direct:2", "pipelined:2"])
def test_wire_formats_give_the_cpus_bits(plan: str, emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(2, 2).run(every_wire, plan)


def losses(device: torch.device) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 6)).to(device)
    parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.004)
    plan_ddp(parallel, wire="bf16!")
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for _ in range(3):
        x, y = torch.randn(8, 24, generator=draw), torch.randn(8, 6, generator=draw)
        loss = nn.functional.mse_loss(parallel(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def gradients_in_bf16() -> None:
    os.environ["COMMLAYER_PLAN"] = "pipelined:2"
    device = simulated_device(StreamDelays(chance=0.5))
    dist.init_process_group("commlayer")
    on_cpu = losses(CPU)
    before = planned("all_reduce")
    assert losses(device) == pytest.approx(on_cpu, rel=1e-5)
    assert set(planned("all_reduce") - before) == {"pipelined×2/bf16"}
    dist.destroy_process_group()


def test_ddp_sends_gradients_in_bf16(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(2, 2).run(gradients_in_bf16)


def flat_wires() -> None:
    """Without a profile of the device nothing is planned for it: encoded at once, and moved by one call."""
    device = simulated_device(LAGGING)
    dist.init_process_group("commlayer")
    assert dist.group.WORLD is not None
    group = GroupCommunicator(dist.group.WORLD, wire=WirePolicy((WireFormat.FP8_E4M3,)), name="lane ep")
    x = torch.randn(8, W, generator=torch.Generator().manual_seed(dist.get_rank()))
    on_cpu, on_device = x.clone(), x.to(device)
    group.all_reduce_in_place(on_cpu).wait()
    before = planned("all_reduce")
    group.all_reduce_in_place(on_device).wait()
    assert torch.equal(on_device.cpu(), on_cpu)
    assert planned("all_reduce") == before
    dist.destroy_process_group()


def test_wire_formats_without_plans_go_flat(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 2).run(flat_wires)


# What can be captured


def calls_of(device: torch.device) -> Iterator[tuple[str, Plan | None, Callable[[], object]]]:
    """A call of each collective, with the plan that it gets, on tensors that there are."""
    assert dist.group.WORLD is not None
    size, group = dist.get_world_size(), dist.group.WORLD
    choices = choices_of(group)
    x, part, whole = (torch.ones(rows, W, device=device) for rows in (8, 2, 8))

    def plan(collective: str, num_bytes: int = x.nbytes, **how: Any) -> Plan | None:
        return choices.plan(collective, num_bytes, **how)

    yield "all_reduce", plan("all_reduce"), lambda: dist.all_reduce(x)
    yield "all_gather", plan("all_gather"), lambda: dist.all_gather_into_tensor(whole, part)
    yield "reduce_scatter", plan("reduce_scatter"), lambda: dist.reduce_scatter_tensor(part, x)
    yield "broadcast", plan("broadcast"), lambda: dist.broadcast(x, 1)
    ones = [2] * size
    exchange = plan("all_to_all_v", 1)
    yield "with splits", exchange, lambda: dist.all_to_all_single(whole, x, ones, ones)
    for wire in (WireFormat.BF16, WireFormat.FP8_E4M3):
        compressed_group = GroupCommunicator(group, wire=WirePolicy((wire,)), name="lane ep")
        wires = compressed_group.wires(W, x.dtype)
        encoded = plan("all_reduce", is_float=True, wires=wires, element_bytes=4)
        yield str(wire), encoded, lambda of=compressed_group: of.all_reduce_in_place(x).wait()  # type: ignore[misc]


def choices_of(group: Any) -> Choices:
    """The choices of plans for tensors on the device."""
    choices: Choices = group._inner.on_devices["simulated"].plans.choices
    return choices


def captures() -> list[tuple[str, str, str]]:
    """Every call by every plan, whose second call is watched: its name, its plan, why it cannot be captured."""
    found = []
    device = simulated_device(StreamDelays(chance=0.3))
    for forced in ("flat_direct", "hierarchical", "pipelined:2", "leaders"):
        os.environ["COMMLAYER_PLAN"] = forced
        dist.init_process_group("commlayer")
        for name, plan, call in calls_of(device):
            call()
            with (
                seen_calls(QueueRunner, "until") as waits,
                seen_calls(group_extras, "everyones_numbers") as told,
                seen_calls(TorchMemory, "take") as taken,
            ):
                call()
            is_free = not (waits or told or taken)
            objection = "" if plan is None else plan.capture_objection
            assert plan is None or is_free == (not objection), (name, plan.name, objection, waits, told, taken)
            found.append((name, "flat" if plan is None else plan.name, objection))
        torch.get_device_module(device).synchronize()
        dist.destroy_process_group()
    return found


def test_a_plan_says_whether_it_can_be_captured(emulated_cluster: ClusterFactory) -> None:
    """A plan says what its calls do: who waits for nothing on the host, and takes no memory in a second call, can be captured."""
    found = emulated_cluster(2, 2).run(captures)
    assert found[0] == found[1] == found[2] == found[3]
    objections = {(name, plan): objection for name, plan, objection in found[0]}
    assert objections["all_reduce", "pipelined×2"] == ""
    assert objections["bf16", "pipelined×2/bf16"] == ""
    assert "tell each other their splits" in objections["with splits", "hierarchical"]
    assert "NaN and infinity" in objections["fp8_e4m3", "flat_direct/fp8_e4m3"]
