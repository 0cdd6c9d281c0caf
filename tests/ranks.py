"""The parts that jobs of many ranks in these tests share: dtypes, a timeout that nobody waits for, and how a rank stays away."""

from __future__ import annotations

import time

import torch
from torch.distributed.distributed_c10d import _get_default_store

__all__ = ["DTYPES", "HALF_AN_HOUR", "be_absent", "tell", "wait_until"]

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
