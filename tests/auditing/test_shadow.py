"""COMMLAYER_SHADOW on an emulated cluster: legal programs pass, every flipped byte is found, and the group goes on flat.

One start of the processes covers many plans and calls: a test forgets that a group has gone flat, and goes on.
"""

from __future__ import annotations

import os
import random
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import DTYPES
from step_flips import flipped_in_step

import commlayer
from commlayer import GroupCommunicator, WireFormat, WirePolicy
from commlayer.auditing.shadow import Shadow
from commlayer.profiles.errors import DisagreementError
from commlayer.scheduler.named_plans import parse_plan
from commlayer.scheduler.wire import Scaling
from commlayer.testing.payload import bits
from commlayer.testing.plugin import ClusterFactory

pytestmark = pytest.mark.cluster

PLANS = ["flat_direct", "hierarchical", "leaders", "pipelined:3", "ring:2"]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.int16, torch.bool]
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]


def start(every: str = "1", plan: str = "hierarchical", **environment: str) -> Any:
    torch.set_num_threads(1)
    os.environ.update({"COMMLAYER_PLAN": plan, "COMMLAYER_SHADOW": every, **environment})
    dist.init_process_group("commlayer", timeout=timedelta(seconds=30))
    warnings.filterwarnings("error", ".*differs from flat")
    return dist.group.WORLD


def use_plan(group: Any, plan: str) -> None:
    """Have all calls from now on go by ``plan`` where it applies."""
    group._planned.choices._forced = parse_plan(plan)
    group._planned.choices._plans.clear()


def forget(group: Any) -> None:
    """Plan again, as if nothing had differed."""
    group.instruments.find(Shadow).is_over, group._calls.is_planning, group._calls.instead = False, True, None


def floats(shape: tuple[int, ...], dtype: torch.dtype, *key: int) -> torch.Tensor:
    seed = sum(7919**place * (each + 1) for place, each in enumerate(key))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exchange(rank: int, n: int) -> tuple[list[int], list[int]]:
    return [(5 * rank + 3 * b) % 7 for b in range(n)], [(5 * a + 3 * rank) % 7 for a in range(n)]


def moves(dtype: torch.dtype, async_op: bool) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    mine, tensor = bits((37, 3), dtype, rank), bits((101, 2), dtype, rank)
    everyones = mine.new_empty((37 * n, 3))
    sent, received = exchange(rank, n)
    out = mine.new_empty((sum(received), 3))
    works = [
        dist.all_gather_into_tensor(everyones, mine, async_op=async_op),
        dist.broadcast(tensor, 1, async_op=async_op),
        dist.all_to_all_single(
            out,
            bits((sum(sent), 3), dtype, rank),
            received,
            sent,
            async_op=async_op,
        ),
    ]
    for work in works:
        if async_op:
            work.wait()


def sums(dtype: torch.dtype, op: Any, async_op: bool) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    if op == dist.ReduceOp.AVG and not dtype.is_floating_point:
        return
    draw = floats if dtype.is_floating_point else bits
    x, source = draw((1001,), dtype, rank), draw((n * 130,), dtype, rank)
    part = x.new_empty(130)
    for work in (
        dist.all_reduce(x, op, async_op=async_op),
        dist.reduce_scatter_tensor(part, source, op, async_op=async_op),
    ):
        if async_op:
            work.wait()


def legal_programs() -> tuple[int, set[str]]:
    group = start()
    shadow = group.instruments.find(Shadow)
    for plan in PLANS:
        use_plan(group, plan)
        for dtype in DTYPES:
            moves(dtype, dtype in (torch.int8, torch.float32))
        for dtype in (*FLOATS, *INTEGERS):
            for op in OPS:
                sums(dtype, op, op == dist.ReduceOp.SUM)
    n = dist.get_world_size()
    x = torch.full((256,), float("nan"))
    x[::2] = float("inf") if dist.get_rank() == 0 else 1.0
    dist.all_reduce(x)
    gathered = torch.empty(n * 50)  # in place: the input lies in the output
    dist.all_gather_into_tensor(gathered, gathered[dist.get_rank() * 50 :][:50])
    assert not shadow.is_over
    assert shadow.num_compared == shadow.count
    ran = {f"{call['collective']} {call['plan']}" for each in commlayer.stats()["groups"] for call in each["calls"]}
    return shadow.count, {each for each in ran if not each.endswith("flat")}


@pytest.mark.parametrize(("nodes", "ranks", "num_plans"), [(2, 2, 12), (3, 2, 15)])
def test_legal_programs_raise_no_alarm(
    emulated_cluster: ClusterFactory, nodes: int, ranks: int, num_plans: int
) -> None:
    found = emulated_cluster(nodes, ranks, mode="loopback").run(legal_programs, timeout_s=110.0)
    assert len({count for count, _ in found}) == 1
    assert found[0][0] > 300
    assert len(found[0][1]) >= num_plans, found[0][1]


def legal_compressed_programs() -> int:
    group = start()
    n, rank = dist.get_world_size(), dist.get_rank()
    rows = [(0, 7, 1, 140)[k] for k in range(n)]
    for wire, scaling in [
        (WireFormat.BF16, Scaling.TOKEN),
        *((WireFormat.FP8_E4M3, scaling) for scaling in Scaling),
        (WireFormat.FP8_E5M2, Scaling.TOKEN),
        (WireFormat.INT8, Scaling.BLOCK),
    ]:
        compressed = GroupCommunicator(
            group, wire=WirePolicy((wire,), scaling, power_of_two=wire is WireFormat.FP8_E5M2), name="dp"
        )
        for plan in ("flat_direct:2", "hierarchical", "pipelined:3"):
            use_plan(group, plan)
            for dtype in (torch.float32,) if wire is WireFormat.BF16 else (torch.float32, torch.bfloat16):
                x = floats((sum(rows), 160), dtype, rank)
                out, whole = x.new_empty(rows[rank], 160), torch.empty_like(x)
                received = x.new_empty(rows[rank] * n, 160)
                works = [
                    compressed.reduce_scatter_into(out, x, rows),
                    compressed.all_gather_into(whole, x[: rows[rank]], rows),
                ]
                works += [compressed.all_to_all_into(received, x, rows, [rows[rank]] * n)]
                total = x.clone()
                works += [compressed.all_reduce_in_place(total)]
                for work in works:
                    work.wait()
    in_place = GroupCommunicator(group, wire=WirePolicy((WireFormat.BF16,), in_place=True), name="dp")
    x = floats((n * 333,), torch.float32, rank)
    in_place.reduce_scatter_into(x[rank * 333 : (rank + 1) * 333], x).wait()
    shadow = group.instruments.find(Shadow)
    assert not shadow.is_over
    assert shadow.count == shadow.num_compared
    return shadow.count  # type: ignore[no-any-return]


def test_legal_compressed_programs_raise_no_alarm(emulated_cluster: ClusterFactory) -> None:
    found = emulated_cluster(2, 2, mode="loopback").run(legal_compressed_programs, timeout_s=110.0)
    assert len(set(found)) == 1
    assert found[0] >= 100


# Corruptions


class Calls:
    """The calls that are corrupted: each returns its result and what it should be."""

    def __init__(self, group: Any) -> None:
        self.group, self.n, self.rank = group, dist.get_world_size(), dist.get_rank()

    def all_gather(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty(self.n * 600, dtype=torch.int32)
        given = [bits((600,), torch.int32, k, seed) for k in range(self.n)]
        dist.all_gather_into_tensor(out, given[self.rank])
        return out, torch.cat(given)

    def broadcast(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = bits((1000,), torch.bfloat16, self.rank, seed)
        work = dist.broadcast(x, seed % self.n, async_op=True)
        assert work is not None
        work.wait()
        return x.view(torch.int16), bits((1000,), torch.bfloat16, seed % self.n, seed).view(torch.int16)

    def all_reduce_integers(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        given = [bits((777,), torch.int64, k, seed) for k in range(self.n)]
        x = given[self.rank].clone()
        dist.all_reduce(x)
        return x, torch.stack(given).sum(0)

    def all_reduce_floats(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        given = [torch.full((901,), float(k + seed)) for k in range(self.n)]
        x = given[self.rank].clone()
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        return x, torch.stack(given).sum(0)

    def reduce_scatter(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        given = [torch.full((self.n * 300,), float(k + seed)) for k in range(self.n)]
        out = torch.empty(300)
        dist.reduce_scatter_tensor(out, given[self.rank])
        return out, torch.full((300,), float(sum(range(self.n)) + self.n * seed))

    def all_to_all(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [[bits((a + b + 1, 50), torch.int32, a, b, seed) for b in range(self.n)] for a in range(self.n)]
        wanted = [parts[a][self.rank] for a in range(self.n)]
        out = torch.empty(sum(map(len, wanted)), 50, dtype=torch.int32)
        counts = [len(part) for part in wanted]
        dist.all_to_all_single(out, torch.cat(parts[self.rank]), counts, counts)
        return out, torch.cat(wanted)

    def compressed_gather(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        policy = WirePolicy((WireFormat.FP8_E4M3,))
        given = [torch.full((6, 128), float(k + seed)) for k in range(self.n)]
        out = torch.empty(6 * self.n, 128)
        GroupCommunicator(self.group, wire=policy, name="dp").all_gather_into(out, given[self.rank]).wait()
        return out, torch.cat(given)  # one number is its row's largest, and so not rounded


@contextmanager
def heard(messages: list[str]) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages += [str(each.message) for each in caught if "differs from flat" in str(each.message)]


def is_right(result: torch.Tensor, expected: torch.Tensor, name: str) -> bool:
    """Encoding divides by a scale and multiplies by it again."""
    return torch.allclose(result, expected, rtol=1e-6) if name == "compressed_gather" else torch.equal(result, expected)


CORRUPTIONS = 24


def every_corruption_is_caught() -> list[tuple[str, str, Any, list[str], str]]:
    """The call of each corruption, its plan, what was flipped where, what was said, and whether it is well."""
    group = start()
    calls, shadow, chooser = Calls(group), group.instruments.find(Shadow), random.Random(17)
    names = sorted(name for name in vars(Calls) if not name.startswith("_"))
    found = []
    for number in range(CORRUPTIONS):
        name, plan = names[number % len(names)], PLANS[chooser.randrange(4)]
        plan = "hierarchical" if name == "all_to_all" or (name == "compressed_gather" and plan == "leaders") else plan
        plan = "leaders" if name == "broadcast" and plan == "flat_direct" else plan
        liar, choice = chooser.randrange(calls.n), chooser.randrange(1 << 20)
        # Of a sum the highest byte: what is less than its bound cannot be told from another order of terms.
        choice = choice | 3 if name in ("all_reduce_floats", "reduce_scatter", "compressed_gather") else choice
        use_plan(group, plan)
        from_step = (
            1 if name == "all_to_all" else 0
        )  # its first step tells counts: other ranks would wait for what never comes
        said: list[str] = []
        flip = flipped_in_step(group._planned, choice, mask=0x40, from_step=from_step)
        with heard(said), flip if calls.rank == liar else nullcontext() as lie:
            result, expected = getattr(calls, name)(number)
            assert is_right(result, expected, name), f"{name}, {plan}: not the right result"
            assert result.untyped_storage().resizable(), f"{name}, {plan}: comparing has changed its storage"
        struck = [None] * calls.n
        dist.all_gather_object(struck, lie is not None and lie.is_done)
        was_over = [None] * calls.n
        dist.all_gather_object(was_over, shadow.is_over)
        result, expected = getattr(calls, name)(number + 100)
        assert is_right(result, expected, name), f"{name}, {plan}: the group does not go on"
        assert group._calls.is_planning != shadow.is_over
        forget(group)
        found.append((name, plan, (liar, struck[liar]), said, str(set(was_over))))
    return found


def test_every_flipped_byte_is_caught_and_named(emulated_cluster: ClusterFactory) -> None:
    by_rank = emulated_cluster(2, 2, mode="loopback").run(every_corruption_is_caught, timeout_s=110.0)
    assert all(not said for found in by_rank[1:] for *_, said, _ in found), "one warning, not one of each rank"
    for name, plan, (liar, is_done), said, was_over in by_rank[0]:
        assert is_done, f"{name}, {plan}: nothing was flipped"
        assert was_over == "{True}", f"{name}, {plan}: the flip of rank {liar} was not caught by all"
        assert len(said) == 1
        assert re.search(r"planned call \d+: \w+ by .*first in element \d+ of rank \d", said[0])
        assert plan.partition(":")[0] in said[0]


def sampled_alike(every: int) -> list[int]:
    group = start(str(every), COMMLAYER_TRIALS="off")
    shadow, chosen = group.instruments.find(Shadow), []
    check = shadow.before

    def noted(call: Any) -> Any:
        number, sample = shadow.count, check(call)
        if sample is not None:
            chosen.append(number)
        return sample

    shadow.before = noted
    rank, program = dist.get_rank(), random.Random(3)
    for _ in range(60):
        kind, is_async = program.randrange(4), program.random() < 0.5
        x = torch.ones(program.randrange(1, 3000))
        if kind == 0:
            work = dist.all_reduce(x, async_op=is_async)
        elif kind == 1:
            work = dist.broadcast(x, 1, async_op=is_async)
        elif kind == 2:
            work = dist.reduce(x, 0, async_op=is_async)  # never planned
        else:
            work = dist.all_to_all_single(
                torch.empty(4 * (rank + 1)), torch.ones(10), [rank + 1] * 4, [1, 2, 3, 4], async_op=is_async
            )
        if work is not None and program.random() < 0.5:
            work.wait()
    dist.barrier()
    return chosen


def test_all_ranks_compare_the_same_calls(emulated_cluster: ClusterFactory) -> None:
    found = emulated_cluster(2, 2, mode="loopback").run(sampled_alike, 4)
    assert all(each == found[0] for each in found)
    assert 8 <= len(found[0]) <= 16


def queued_behind_a_difference() -> list[str]:
    """Compressed calls look for their plan when they are made: some are under way when an earlier one is found to differ."""
    group = start()
    rank, n = dist.get_rank(), dist.get_world_size()
    compressed = GroupCommunicator(group, wire=WirePolicy((WireFormat.FP8_E4M3,)), name="dp")
    compressed.all_reduce_in_place(torch.ones(8, 128)).wait()  # ranks have agreed on it
    said: list[str] = []
    flip = flipped_in_step(group._planned, 3, mask=0x7F)
    with heard(said), flip if rank == 1 else nullcontext():
        tensors = [torch.full((8, 128), float(number + rank)) for number in range(5)]
        outs = [torch.empty(8 * n, 128) for _ in range(5)]
        works = [compressed.all_reduce_in_place(x) for x in tensors]
        works += [
            compressed.all_gather_into(out, x.clone()) for out, x in zip(outs, torch.ones(5, 8, 128), strict=True)
        ]
        for work in works:
            work.wait()
    for number, x in enumerate(tensors):
        assert torch.allclose(x, torch.full((8, 128), float(sum(range(n)) + n * number)), rtol=0.2)
    assert all(torch.equal(out, torch.ones_like(out)) for out in outs)
    return said


def test_calls_that_are_queued_behind_a_difference_go_flat(emulated_cluster: ClusterFactory) -> None:
    cluster = emulated_cluster(2, 2, mode="loopback")
    said = cluster.run(queued_behind_a_difference)
    assert [len(each) for each in said] == [1, 0, 0, 0]


def with_other_settings() -> str:
    os.environ["COMMLAYER_SHADOW"] = "2" if dist.is_initialized() or os.environ["RANK"] == "0" else "3"
    try:
        dist.init_process_group("commlayer", timeout=timedelta(seconds=30))
    except DisagreementError as error:
        return str(error)
    return ""


def test_ranks_with_other_numbers_are_told_so(emulated_cluster: ClusterFactory) -> None:
    found = emulated_cluster(1, 2, mode="loopback").run(with_other_settings)
    assert all("COMMLAYER_SHADOW" in each for each in found)
