"""The parts that jobs of many ranks in these tests share: dtypes, a timeout that nobody waits for, how a rank stays away, which
calls were made, and what a stream that is held must do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from commlayer.devices.accelerator import AcceleratorDevice

__all__ = [
    "DTYPES",
    "HALF_AN_HOUR",
    "ONE_OF_EACH_SIZE",
    "be_absent",
    "check_holds",
    "one_by_one",
    "seen_calls",
    "start_with",
    "tell",
    "wait_until",
]

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
"""The dtypes that collectives must move which only move bytes."""
ONE_OF_EACH_SIZE = [
    *(torch.bool, torch.float8_e5m2, torch.bfloat16),
    *(torch.float32, torch.int64, torch.complex128),
]
"""Some of these: items have 1, 2, 4, 8 and 16 bytes, and of a bool's bytes few are allowed. Plans see
bytes alone: what depends on a dtype is decided before a plan is sought, in every layout alike."""
HALF_AN_HOUR = 1800.0
"""A timeout in seconds that no test waits for: a job that ends before the time limit of its run ends for another reason."""


def tell(what: str) -> None:
    """Say ``what`` to the ranks that wait for it, through the store of the job."""
    _get_default_store().add(what, 1)


def wait_until(what: str, count: int = 1) -> None:
    """Wait until ``count`` ranks have told ``what``. It asks again and again: a wait in the store keeps others from asking."""
    while _get_default_store().add(what, 0) < count:
        time.sleep(0.01)


def be_absent(count: int) -> None:
    """Stay alive and call nothing until ``count`` other ranks have told that they are ``done``."""
    wait_until("done", count)


def one_by_one(job: Callable[..., object], cases: Iterable[tuple[Any, ...]]) -> None:
    """Do ``job`` with each of these arguments, in one start of the processes, which takes longer than most jobs. An error names
    the arguments."""
    for case in cases:
        with _naming(case):
            job(*case)


@contextmanager
def _naming(case: tuple[Any, ...]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise AssertionError(f"with {', '.join(map(str, case))}: {type(error).__name__}: {error}") from error


def start_with(timeout_s: float) -> None:
    """Make the job's group of the backend, and give it this timeout once all ranks have come: a short one is of the calls that a
    test waits for, and no limit of how long a busy machine takes to start a process."""
    dist.init_process_group("commlayer", timeout=timedelta(seconds=max(timeout_s, 60.0)))
    tell("has come")
    wait_until("has come", dist.get_world_size())
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))


def group_with(timeout_s: float, ranks: Sequence[int] | None = None, **options: Any) -> Any:
    """Make a group of these ranks, of all where none are given, and give it this timeout once all of them have made it: as in
    `start_with`, it is no limit of how long a busy machine takes to connect them."""
    group: Any = dist.new_group(ranks, timeout=timedelta(seconds=max(timeout_s, 60.0)), **options)
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        tell(made := f"has made {group.group_name}")
        wait_until(made, group.size())
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
    return group


def meet(victim: int) -> None:
    """Let all ranks come to the calls in which one dies. The victim waits until nobody is in the barrier any more: a death
    right behind a barrier may reach others in it."""
    dist.barrier()
    await_others(victim)


def await_others(victim: int) -> None:
    """Have the victim wait until all ranks are done with what came before: its death would end that too. Others go on at once."""
    tell("is done with what came before")
    if dist.get_rank() == victim:
        wait_until("is done with what came before", dist.get_world_size())


@contextmanager
def seen_calls(owner: object, name: str) -> Iterator[list[str]]:
    """List the calls of ``owner.name`` inside: its name, once for each."""
    found: list[str] = []
    original: Callable[..., object] = getattr(owner, name)

    def note(*args: object, **named: object) -> object:
        found.append(name)
        return original(*args, **named)

    setattr(owner, name, note)
    try:
        yield found
    finally:
        setattr(owner, name, original)


def check_holds(device: AcceleratorDevice, long_us: float) -> None:
    """Check that a held stream goes on when nothing is busy any more, or after its time; ``long_us`` is longer than any test."""
    side, busy = device.stream(is_high=False), torch.ones(48, dtype=torch.uint8, device=device.device)
    device.synchronize()
    side.hold(busy, 1, long_us)
    end = side.record()
    assert not end.is_done()
    busy.zero_()
    end.synchronize()
    busy.fill_(1)
    device.synchronize()
    side.hold(busy, 1, 1000.0)
    side.hold(busy, 2, long_us)
    device.synchronize()
