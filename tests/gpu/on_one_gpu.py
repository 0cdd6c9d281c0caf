"""Jobs of several ranks on one GPU, which all tests of this folder share, and the reasons for which they skip.

NCCL refuses two ranks on one device, unless they seem to be on different hosts: each gets its own ``NCCL_HOSTID``, and
NCCL talks over sockets on the loopback. That shows that bytes and order are right. Its times mean nothing: the ranks
take turns on the device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import commlayer.backend  # noqa: F401 - registers the backend also where commlayer is not installed, only on the path

LIMIT_S = 80.0
"""Seconds within which all ranks of a job have to end."""

_NCCL = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
}
FEW_BLOCKS = {"NCCL_MAX_CTAS": "2"}  # the kernels of all ranks and communicators must fit on the device together
_SEES = f"torch {torch.__version__} sees {torch.cuda.device_count()} devices"

needs_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"needs a CUDA device: {_SEES}"),
]
needs_nccl = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not dist.is_nccl_available(),
        reason=f"needs a CUDA device and NCCL: {_SEES}, and {'has' if dist.is_nccl_available() else 'lacks'} NCCL",
    ),
]


def run_ranks(job: Callable[..., None], size: int, folder: Path, *args: Any, **how: Any) -> None:
    """Run ``job(rank, *args)`` on ``size`` ranks, which join as ``how`` says; raises the first rank's error, and ends all
    ranks in any case."""
    context = spawn(_rank_main, (job, size, str(folder / "store"), args, how), nprocs=size, join=False)
    until = time.monotonic() + LIMIT_S
    try:
        while not context.join(timeout=max(until - time.monotonic(), 0.1)):
            assert time.monotonic() < until, f"the ranks did not end within {LIMIT_S:g} s"
    finally:
        for process in context.processes:
            process.kill()


def _rank_main(
    rank: int, job: Callable[..., None], size: int, store: str, args: tuple[Any, ...], how: dict[str, Any]
) -> None:
    _join(rank, size, store, **how)
    job(rank, *args)
    dist.destroy_process_group()


def _join(
    rank: int,
    size: int,
    store: str,
    backend: str = "commlayer",
    device: str = "cuda:0",
    nccl: Mapping[str, str] = FEW_BLOCKS,
    **variables: str,
) -> None:
    """Have a rank join the world on its device; ``variables`` of commlayer by what follows ``COMMLAYER_`` in their names,
    and NCCL's own beside those that every job has."""
    for name in [name for name in os.environ if name.startswith("COMMLAYER_")]:
        del os.environ[name]
    os.environ.update(_NCCL, **nccl, NCCL_HOSTID=f"commlayer-rank-{rank}")
    os.environ.update({f"COMMLAYER_{name.upper()}": value for name, value in variables.items()})
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(torch.device(device))
    limit = timedelta(seconds=LIMIT_S / 2)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
