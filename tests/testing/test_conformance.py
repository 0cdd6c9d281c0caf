"""`check_communicator`: every real communicator passes it, and every wrong one is caught by the check that is meant to."""

from __future__ import annotations

import functools
import importlib
import os
import re
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_world import FakeVerbs, FakeWorld
from faulty_verbs import FaultyVerbs, InjectedFault, delay_at, fail_at, wrong_bytes_at

import commlayer
import commlayer.testing
from commlayer.emulation import EmulatedCluster
from commlayer.profiles.errors import (
    CollectiveTimeoutError,
    DisagreementError,
    PeerError,
    TensorError,
    UsageError,
)
from commlayer.testing import (
    DTYPES,
    AsyncCall,
    ConformanceError,
    ProcessGroupVerbs,
    ReduceOp,
    Verbs,
    check_communicator,
    run_on_nodes,
)

BYTES_ONLY = (torch.float8_e4m3fn, torch.int16, torch.uint16, torch.complex128)
"""Dtypes that Gloo's collectives refuse."""
ROWS = (0, 1, 5)
"""Blocks for tests of many configurations; the default has a large one too."""


def passes(verbs: Verbs, **claims: Any) -> int:
    torch.set_num_threads(1)
    return len(check_communicator(verbs, **claims))


# Communicators that keep the contract


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_fake_passes(size: int) -> None:
    counts = FakeWorld(size).run(lambda verbs: passes(verbs, dtypes=(*DTYPES, *BYTES_ONLY)))
    assert min(counts) == max(counts) > 300


def test_a_wrapper_without_faults_passes_and_so_does_a_late_rank() -> None:
    def job(verbs: FakeVerbs) -> int:
        wrapped = FaultyVerbs(
            verbs, delay_at(rank=1, call="barrier", seconds=0.05), delay_at(rank=0, call=3, seconds=0.05)
        )
        count = passes(wrapped, rows=ROWS)
        wrapped.assert_fired()
        return count

    assert min(FakeWorld(2).run(job)) > 250


@pytest.mark.cluster
@pytest.mark.parametrize("sizes", [(1,), (1, 1), (2, 1), (2, 2)], ids=str)
def test_gloo_passes(sizes: tuple[int, ...]) -> None:
    def job() -> int:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return passes(ProcessGroupVerbs())

    with EmulatedCluster(len(sizes), max(sizes)) as cluster:
        assert min(run_on_nodes(cluster, sizes, job)) > 300


FEWER: Any = {
    "dtypes": (torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool, *BYTES_ONLY),
    "reduce_dtypes": (torch.float32, torch.bfloat16, torch.int64),
    "ops": ("sum", "max"),
    "rows": ROWS,
}
"""Claims that leave a few seconds for six plans."""
PLANS = ["flat", "flat_direct", "hierarchical", "leaders", "pipelined:2", "pipelined:3"]


@pytest.mark.cluster
@pytest.mark.parametrize("sizes", [(2, 2), (1, 2)], ids=str)
def test_commlayer_passes_under_every_plan(sizes: tuple[int, ...]) -> None:
    importlib.import_module("commlayer.backend.new_groups")  # before the ranks fork, or each of them loads it

    def job() -> list[int]:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        counts = []
        for plan in PLANS:
            os.environ["COMMLAYER_PLAN"] = plan
            group = dist.new_group(backend="commlayer")
            counts.append(passes(ProcessGroupVerbs(group), **FEWER))
            moved_by = {
                row["plan"].replace("×", ":") for row in commlayer.stats()["groups"][-1]["calls"] if row["calls"]
            }
            assert plan in moved_by or (plan.startswith("pipelined") and sizes == (1, 2)), moved_by
            dist.destroy_process_group(group)
        return counts

    with EmulatedCluster(len(sizes), max(sizes)) as cluster:
        for counts in run_on_nodes(cluster, sizes, job):
            assert len(counts) == len(PLANS)
            assert min(counts) > 150


@pytest.mark.cluster
def test_a_subgroup_passes_with_its_own_ranks() -> None:
    def job() -> int:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        members = [1, 2]
        group = dist.new_group(members)
        return passes(ProcessGroupVerbs(group), rows=ROWS) if dist.get_rank() in members else 0

    with EmulatedCluster(1, 3) as cluster:
        counts = cluster.run(job)
    assert counts[0] == 0
    assert min(counts[1:]) > 250


# Communicators that do not


class Wrong(FakeVerbs):
    """A fake with one deliberate mistake, in one verb."""


class WrongBlockOrder(Wrong):
    def all_to_all(self, output: torch.Tensor, source: torch.Tensor, *splits: Any, **how: Any) -> AsyncCall | None:
        pending = super().all_to_all(output, source, *splits, **how)
        if not splits:  # right with splits: only the even form is wrong
            output.copy_(output.view(self.size, -1).flip(0).reshape(output.shape))
        return pending


class DroppedLastElement(Wrong):
    def all_gather(self, output: torch.Tensor, source: torch.Tensor, *, async_op: bool = False) -> AsyncCall | None:
        kept = output.reshape(-1)[-1:].clone()
        pending = super().all_gather(output, source, async_op=True)
        assert pending is not None
        pending.wait()  # or a rank that comes later would still write the element
        output.view(-1)[-1:] = kept
        return pending if async_op else None


class StaleBuffer(Wrong):
    """Keeps the result of the first call for the same output buffer, as a cache keyed by address would."""

    def all_to_all(self, output: torch.Tensor, *given: Any, **how: Any) -> AsyncCall | None:
        last = getattr(self, "last", (None, None))
        pending = super().all_to_all(output, *given, **how)
        if last[0] is output:
            output.copy_(last[1])
        else:
            self.last = output, output.clone()
        return pending


class MissingRank(Wrong):
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum", *, async_op: bool = False) -> AsyncCall | None:
        if self.rank == self.size - 1 and tensor.numel() == 15 and op == "sum":
            tensor.zero_()
        return super().all_reduce(tensor, op, async_op=async_op)


class RankDependentBits(Wrong):
    """Every rank adds in an order of its own."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum", *, async_op: bool = False) -> AsyncCall | None:
        if op != "sum" or not tensor.dtype.is_floating_point or async_op:
            return super().all_reduce(tensor, op, async_op=async_op)
        parts = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
        self.all_gather(parts, tensor[None])
        order = [(self.rank + step) % self.size for step in range(self.size)]
        tensor.copy_(functools.reduce(torch.add, (parts[rank] for rank in order)))
        return None


class BitsOfTheDay(Wrong):
    """The same on all ranks, another order of addition in every call."""

    def reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, op: ReduceOp = "sum", *, async_op: bool = False
    ) -> AsyncCall | None:
        if op != "sum" or not source.dtype.is_floating_point or async_op:
            return super().reduce_scatter(output, source, op, async_op=async_op)
        self.num_calls = getattr(self, "num_calls", 0) + 1
        parts = torch.empty((self.size, *source.shape), dtype=source.dtype)
        self.all_gather(parts, source[None])
        turned = (parts[(self.num_calls + step) % self.size] for step in range(self.size))
        total = functools.reduce(torch.add, turned)
        output.copy_(total.view(self.size, -1)[self.rank].view(output.shape))
        return None


class ChangedInput(Wrong):
    def all_gather(self, output: torch.Tensor, source: torch.Tensor, *, async_op: bool = False) -> AsyncCall | None:
        pending = super().all_gather(output, source, async_op=async_op)
        if pending is None and self.size > 1:
            source.zero_()
        return pending


class NoBarrier(Wrong):
    def barrier(self) -> None:
        pass


class TakesAnything(Wrong):
    def broadcast(self, tensor: torch.Tensor, root: int, *, async_op: bool = False) -> AsyncCall | None:
        return super().broadcast(tensor, root % self.size, async_op=async_op)


class SecondWaitHangs(Wrong):
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum", *, async_op: bool = False) -> AsyncCall | None:
        pending = super().all_reduce(tensor, op, async_op=async_op)
        return None if pending is None else OneWait(pending)


class OneWait:
    def __init__(self, inner: AsyncCall) -> None:
        self.inner: AsyncCall | None = inner

    def wait(self) -> object:
        if self.inner is None:
            raise RuntimeError("waited for twice")
        inner, self.inner = self.inner, None
        return inner.wait()


class MessagesOvertake(Wrong):
    """The second of two messages from the first rank to the last one goes first."""

    def send(self, tensor: torch.Tensor, to: int, *, async_op: bool = False) -> AsyncCall | None:
        if (self.rank, to) != (0, self.size - 1):
            return super().send(tensor, to, async_op=async_op)
        self.sent = [*getattr(self, "sent", []), tensor]
        if len(self.sent) == 2:
            super().send(self.sent[1], to)
            super().send(self.sent[0], to)
        elif len(self.sent) > 2:
            super().send(tensor, to)
        return Done() if async_op else None


class Done:
    def wait(self) -> None:
        pass


def seen_by(wrong: type[FakeVerbs], size: int = 3, **claims: Any) -> list[list[str]]:
    """The names of the failed checks, by rank."""
    world = FakeWorld(size, timeout_s=5)

    def job(verbs: FakeVerbs) -> list[str]:
        try:
            check_communicator(wrong(world, verbs.rank), rows=(0, 1, 5, 64), **claims)
        except ConformanceError as error:
            return [failure.name for failure in error.failures]
        return []

    return world.run(job)


@pytest.mark.parametrize(
    ("wrong", "caught_by", "fine"),
    [
        (WrongBlockOrder, r"all_to_all\[equal, \d+ rows\]", r"all_to_all\[uneven"),
        (DroppedLastElement, r"all_gather\[float32, 1 rows\]", r"all_to_all|broadcast"),
        (StaleBuffer, r"all_to_all\[same buffers twice\]", r"all_to_all\[(uneven|equal|float32)|all_gather"),
        (MissingRank, r"all_reduce\[float32, sum, 5 rows\]", r"all_reduce\[float32, (max|sum, 1) |reduce_scatter"),
        (RankDependentBits, r"all_reduce\[float32, same bits everywhere and always\]", r"all_reduce\[float32, sum"),
        (BitsOfTheDay, r"reduce_scatter\[float32, same bits always\]", r"all_reduce|reduce_scatter\[float32, sum"),
        (ChangedInput, r"all_gather\[float32, 1 rows\]", r"all_to_all"),
        (NoBarrier, r"barrier", r"all|order"),
        (TakesAnything, r"refused\[broadcast, no such root\]", r"broadcast\[root"),
        (MessagesOvertake, r"send and recv\[in order\]", r"send and recv\[(?!in order)"),
        (SecondWaitHangs, r"wait\[a second time\]", r"order|all_reduce"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_wrong_communicator_is_caught_by_the_check_that_is_meant_to(
    wrong: type[FakeVerbs], caught_by: str, fine: str
) -> None:
    by_rank = seen_by(wrong)
    failed = {name for names in by_rank for name in names}
    assert [name for name in failed if re.fullmatch(caught_by, name)], failed
    assert not [name for name in failed if re.match(fine, name)]


def test_the_error_names_rank_check_element_and_both_values() -> None:
    world = FakeWorld(2)
    with pytest.raises(ConformanceError) as caught:
        world.run(lambda verbs: check_communicator(DroppedLastElement(world, verbs.rank), rows=(5,)))
    text = str(caught.value)
    assert re.search(r"rank [01] of 2: \d+ of \d+ checks failed:", text)
    assert re.search(
        r"all_gather\[float32, 5 rows\]: rank [01]: the output: 1 of 30 elements differ, first element 29", text
    )
    assert "5a5a" in text  # what was in the buffer before


def test_a_call_that_raises_ends_the_checks_and_says_so() -> None:
    world = FakeWorld(2, timeout_s=5)

    def job(verbs: FakeVerbs) -> None:
        check_communicator(FaultyVerbs(verbs, fail_at(rank=1, call="broadcast")), rows=(1,))

    with pytest.raises(ConformanceError, match=r"(?s)broadcast.*InjectedFault.*The checks ended there") as caught:
        world.run(job)
    assert len(caught.value.failures) == 1


def test_claims_that_cannot_be_checked_are_refused() -> None:
    verbs = FakeWorld(1).ranks[0]
    with pytest.raises(UsageError, match="int64, uint8 is missing"):
        check_communicator(verbs, dtypes=[torch.float32])
    with pytest.raises(UsageError, match="sum among ops"):
        check_communicator(verbs, ops=["max"])


# The fake


def test_the_fake_names_the_rank_that_calls_something_else() -> None:
    def job(verbs: FakeVerbs) -> None:
        verbs.all_reduce(torch.zeros(2), "max" if verbs.rank else "sum")

    with pytest.raises(
        DisagreementError, match=r"rank 0 calls all_reduce\(float32, sum\), rank 1 calls all_reduce\(float32, max\)"
    ):
        FakeWorld(2).run(job)


def test_the_fake_names_splits_that_do_not_match() -> None:
    def job(verbs: FakeVerbs) -> None:
        splits = [1, 2]
        rows = torch.zeros(3)
        verbs.all_to_all(torch.empty_like(rows), rows, splits, splits)

    with pytest.raises(DisagreementError, match="rank 0 sends 2 rows to rank 1, which expects 1"):
        FakeWorld(2).run(job)


def test_the_fake_names_a_rank_that_has_left() -> None:
    def job(verbs: FakeVerbs) -> None:
        if verbs.rank == 1:
            raise KeyError("lost")
        verbs.barrier()

    world, left = FakeWorld(2), []

    def watched(verbs: FakeVerbs) -> None:
        try:
            job(verbs)
        except PeerError as error:
            left.append(str(error))
            raise

    with pytest.raises(KeyError, match="lost"):
        world.run(watched)
    assert left == ["rank 0: barrier(), call 0: rank 1 raised KeyError: 'lost'"]


def test_the_fake_blocks_and_gives_up_in_time() -> None:
    world = FakeWorld(2, timeout_s=0.1)
    released = threading.Event()

    def job(verbs: FakeVerbs) -> None:
        if verbs.rank == 1:
            released.wait(10)
            return
        try:
            verbs.recv(torch.zeros(1), 1)
        finally:
            released.set()

    with pytest.raises(
        CollectiveTimeoutError, match=r"rank 0: recv from rank 1: ranks \[1\] did not come within 0.1 s"
    ):
        world.run(job)


def test_the_fake_waits_for_a_late_rank() -> None:
    came: list[int] = []

    def job(verbs: FakeVerbs) -> bool:
        if verbs.rank == 1:
            time.sleep(0.1)
            came.append(1)
        verbs.barrier()
        return came == [1]

    assert FakeWorld(2).run(job) == [True, True]


def test_the_fake_refuses_calls_that_cannot_be() -> None:
    verbs = FakeWorld(2).ranks[0]
    with pytest.raises(TensorError, match="3 rows, which 2 ranks cannot share"):
        verbs.all_to_all(torch.zeros(3), torch.zeros(3))
    with pytest.raises(TensorError, match=r"expected 2 blocks of 3 torch\.float32, got None"):
        verbs.gather(None, torch.zeros(3), 0)
    with pytest.raises(UsageError, match="another rank than 0"):
        verbs.send(torch.zeros(3), 0)
    with pytest.raises(UsageError, match="1 or more ranks"):
        FakeWorld(0)


# Faults


def test_wrong_bytes_are_caught_in_the_blocking_and_the_asynchronous_form() -> None:
    world = FakeWorld(2)

    def job(verbs: FakeVerbs) -> list[str]:
        wrapped = FaultyVerbs(verbs, wrong_bytes_at(rank=1, call="all_to_all"))
        try:
            check_communicator(wrapped, rows=(5,))
        except ConformanceError as error:
            wrapped.assert_fired()
            return [failure.name for failure in error.failures]
        return []

    honest, lied_to = world.run(job)
    assert honest == []
    assert {"all_to_all[uneven]", "all_to_all[uneven, async]", "all_to_all[equal, 5 rows]"} <= set(lied_to)
    assert all(name.startswith("all_to_all") for name in lied_to)


def test_a_fault_strikes_the_chosen_call_once() -> None:
    verbs = FaultyVerbs(FakeWorld(1).ranks[0], fail_at(rank=0, call=1))
    verbs.barrier()
    with pytest.raises(InjectedFault, match="rank 0: all_reduce, call 1"):
        verbs.all_reduce(torch.zeros(1))
    verbs.all_reduce(torch.zeros(1))
    verbs.assert_fired()


def test_a_fault_that_never_struck_is_told() -> None:
    verbs = FaultyVerbs(FakeWorld(2).ranks[0], fail_at(rank=0, call=7), fail_at(rank=1, call=0))
    with pytest.raises(AssertionError, match=r"made 0 calls, and these faults never struck: fail at rank 0, call 7$"):
        verbs.assert_fired()


def test_a_fault_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="all_to_some"):
        fail_at(rank=0, call="all_to_some")
    with pytest.raises(UsageError, match="rank from 0 to 1"):
        FaultyVerbs(FakeWorld(2).ranks[0], fail_at(rank=2, call=0))


# Uneven nodes


@pytest.mark.cluster
def test_ranks_sit_on_uneven_nodes() -> None:
    def job() -> tuple[str, ...]:
        return tuple(
            os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        )

    with EmulatedCluster(2, 2) as cluster:
        assert run_on_nodes(cluster, (1, 2), job) == [
            ("0", "3", "0", "1", "0"),
            ("1", "3", "0", "2", "1"),
            ("2", "3", "1", "2", "1"),
        ]
        with pytest.raises(UsageError, match=r"make an EmulatedCluster\(2, 3\)"):
            run_on_nodes(cluster, (1, 3), job)


# The package


def test_the_package_loads_nothing_heavy_and_shows_its_names() -> None:
    code = "import sys, commlayer.testing, commlayer.testing.plugin; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
    assert set(commlayer.testing.__all__) <= set(dir(commlayer.testing))
    with pytest.raises(AttributeError, match="check_everything"):
        _ = commlayer.testing.check_everything
