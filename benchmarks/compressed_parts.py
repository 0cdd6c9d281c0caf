"""The program of each rank in the parts of the benchmark of compressed collectives."""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from moe_tables import ratios

import commlayer.backend
import commlayer.measure.calibrate  # noqa: F401  # before the fork: ranks then start in milliseconds
from commlayer.collectives import GroupCommunicator
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.router import RouterConfig
from commlayer.scheduler.wire import Wire, WireFormat, WirePolicy
from examples.language_model import ModelConfig
from examples.train import TrainOptions, train

__all__ = ["CHOICE_SIZES", "Timed", "choices", "dispatches", "errors_of", "gradients", "peaks_of", "trained"]

NATIVE, BF16, FP8 = WireFormat.NATIVE, WireFormat.BF16, WireFormat.FP8_E4M3
CHOICE_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
MEMORY_BYTES = 128 << 20
_GRADIENT_BYTES, _DISPATCH_BYTES, _HIDDEN = 32 << 20, 16 << 20, 1024
Rows = list[int]
_ROUNDS, _BUDGET_S = 15, 40.0
_ERROR_ELEMENTS = 1 << 12
_INTEGERS = 8
"""Values up to this are exact in every format here: results can be compared."""


@dataclass(frozen=True)
class Timed:
    """One way of one collective and size. Times are medians over rounds of the slowest rank, µs; ``ratio`` the median over rounds
    of its time over the first way's of the same round, with quartiles. ``plan``: that ran; ``num_wrong``: of its elements."""

    collective: str
    size: int
    way: str
    plan: str
    p50_us: float
    ratio: float
    ratio_low: float
    ratio_high: float
    rounds: int
    num_wrong: int


def start(profile: str) -> dist.ProcessGroup:
    """The backend as default, and a group of Gloo's own."""
    torch.set_num_threads(1)
    os.environ["COMMLAYER_PROFILE"] = profile
    dist.init_process_group("commlayer")
    gloo = dist.new_group(backend="gloo")
    assert isinstance(gloo, dist.ProcessGroup)
    return gloo


def policies(*formats: WireFormat) -> GroupCommunicator:
    group = dist.group.WORLD
    assert group is not None
    return GroupCommunicator(group, wire=WirePolicy(formats), name="benchmark")


Ways = Mapping[str, tuple[Callable[[], torch.Tensor], Callable[[], str]]]
"""Each way's call, which returns its output, and what plan it runs."""


def alternately(collective: str, size: int, ways: Ways, gloo: dist.ProcessGroup) -> list[Timed]:
    """All ways in a new order each round. The first is what the others are compared with, in values and in time."""
    names = list(ways)
    expected = ways[names[0]][0]().clone()
    wrong = {}
    for name in names:
        different = (ways[name][0]() != expected).sum()
        dist.all_reduce(different, group=gloo)
        wrong[name] = int(different)
    times: dict[str, list[float]] = {name: [] for name in names}
    chooser, spent = random.Random(size), 0.0
    while len(times[names[0]]) < 5 or (spent < _BUDGET_S and len(times[names[0]]) < _ROUNDS):
        order = chooser.sample(names, len(names))  # the same on all ranks
        for name in order:
            dist.barrier(gloo)
            begin = time.perf_counter()
            ways[name][0]()
            took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX, group=gloo)
            times[name].append(float(took) * 1e6)
            spent += float(took)
    return [_row(collective, size, name, ways[name][1](), times, names[0], wrong[name]) for name in names]


def _row(
    collective: str, size: int, name: str, plan: str, times: Mapping[str, Sequence[float]], base: str, wrong: int
) -> Timed:
    ratio, rounds = ratios(times[name], times[base]), len(times[name])
    p50_us = median(times[name])
    return Timed(collective, size, name, plan, p50_us, ratio.middle, ratio.low, ratio.high, rounds, wrong)


def _plan_of(
    group: GroupCommunicator, collective: str, size: int, width: int, dtype: torch.dtype | None
) -> Callable[[], str]:
    """``dtype`` None: natively."""

    def name() -> str:
        wires = (Wire(NATIVE),) if dtype is None else group.wires(width, dtype)
        made: Any = group.group
        plan = made.encoded_plan(collective, size, wires, 4 if dtype is None else dtype.itemsize, torch.empty(0))
        return "flat" if plan is None else str(plan.name)

    return name


def scattered(group: Any, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    dist.reduce_scatter_single(out, x, group=group)
    return out


def scattered_compressed(group: GroupCommunicator, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    group.reduce_scatter_into(out, x).wait()
    return out


def scattered_in_place(
    group: GroupCommunicator, out: torch.Tensor, x: torch.Tensor, again: torch.Tensor
) -> torch.Tensor:
    again.copy_(x)
    return scattered_compressed(group, out, again)


def reduced(group: Any, total: torch.Tensor) -> torch.Tensor:
    total.fill_(1.0)
    dist.all_reduce(total, group=group)
    return total


def reduced_compressed(group: GroupCommunicator, total: torch.Tensor) -> torch.Tensor:
    total.fill_(1.0)
    group.all_reduce_in_place(total).wait()
    return total


def exchanged(group: Any, out: torch.Tensor, x: torch.Tensor, send: Rows, receive: Rows) -> torch.Tensor:
    dist.all_to_all_single(out, x, receive, send, group=group)
    return out


def exchanged_compressed(
    group: GroupCommunicator, out: torch.Tensor, x: torch.Tensor, send: Rows, receive: Rows, most: int
) -> torch.Tensor:
    group.all_to_all_into(out, x, send, receive, most_rows=most).wait()
    return out


def _unnamed() -> str:
    return ""


def gradients(profile: str) -> list[Timed]:
    """Small integers: their sums are exact, and so are the integers in BF16."""
    gloo = start(profile)
    n, rank = dist.get_world_size(), dist.get_rank()
    rows = []
    for size in (1 << 20, _GRADIENT_BYTES):
        generator = torch.Generator().manual_seed(rank)
        x = torch.randint(0, _INTEGERS, (size // 4,), generator=generator).float()
        out, again, total = torch.empty(len(x) // n), x.clone(), x.clone()
        bf16 = policies(NATIVE, BF16)
        in_place = GroupCommunicator(bf16.group, wire=WirePolicy((BF16,), in_place=True), name="in place")
        ways: Ways = {
            "torch, FP32": (partial(scattered, gloo, out, x), _unnamed),
            "commlayer, FP32": (partial(scattered, None, out, x), _plan_of(bf16, "reduce_scatter", size, 1, None)),
            "commlayer, BF16 allowed": (
                partial(scattered_compressed, bf16, out, x),
                _plan_of(bf16, "reduce_scatter", size, 1, x.dtype),
            ),
            "commlayer, BF16 in place (and a copy)": (
                partial(scattered_in_place, in_place, out, x, again),
                lambda: "flat_direct/bf16",
            ),
        }
        rows += alternately("reduce_scatter", size, ways, gloo)
        ways = {
            "torch, FP32": (partial(reduced, gloo, total), _unnamed),
            "commlayer, FP32": (partial(reduced, None, total), _plan_of(bf16, "all_reduce", size, 1, None)),
            "commlayer, BF16 allowed": (
                partial(reduced_compressed, bf16, total),
                _plan_of(bf16, "all_reduce", size, 1, x.dtype),
            ),
        }
        rows += alternately("all_reduce", size, ways, gloo)
    return rows


def dispatches(profile: str) -> list[Timed]:
    """Splits with as many rows for every rank; and uneven ones, of which the first rank gets most."""
    gloo = start(profile)
    n, rank = dist.get_world_size(), dist.get_rank()
    count = _DISPATCH_BYTES // (2 * _HIDDEN)
    uneven = [[count // n + (count // 4 if j == 0 else -(count // 4) // (n - 1)) for j in range(n)] for _ in range(n)]
    fp8 = GroupCommunicator(policies(NATIVE).group, wire=WirePolicy((NATIVE, FP8), power_of_two=True), name="dispatch")
    rows = []
    for name, splits in (("all_to_all, even", [[count // n] * n] * n), ("all_to_all, one hot rank", uneven)):
        send, receive = splits[rank], [row[rank] for row in splits]
        generator = torch.Generator().manual_seed(rank)
        x = torch.randint(0, _INTEGERS, (sum(send), _HIDDEN), generator=generator).bfloat16()
        out = torch.empty(sum(receive), _HIDDEN, dtype=torch.bfloat16)
        most = max(*(sum(row) for row in splits), *(sum(row[j] for row in splits) for j in range(n)))
        ways: Ways = {
            "commlayer, BF16": (partial(exchanged, None, out, x, send, receive), lambda: "flat"),
            "torch, BF16": (partial(exchanged, gloo, out, x, send, receive), _unnamed),
            "commlayer, FP8 allowed": (
                partial(exchanged_compressed, fp8, out, x, send, receive, most),
                _plan_of(fp8, "all_to_all_v", most * 2 * _HIDDEN, _HIDDEN, x.dtype),
            ),
        }
        rows += alternately(name, x.nbytes, ways, gloo)
    return rows


def choices(profile: str, sizes: Sequence[int]) -> list[Timed]:
    """The planner's choice, then each format by itself: the first row of each collective and size is the choice."""
    gloo = start(profile)
    n = dist.get_world_size()
    by_format = {"native": (NATIVE,), "bf16": (BF16,), "fp8_e4m3": (FP8,)}
    rows = []
    for size in sizes:
        x = torch.ones(size // (4 * _HIDDEN), _HIDDEN)
        out = torch.empty(len(x) // n, _HIDDEN)
        groups = {"chosen": policies(NATIVE, BF16, FP8)} | {name: policies(*each) for name, each in by_format.items()}
        ways: Ways = {
            name: (
                partial(scattered_compressed, group, out, x),
                _plan_of(group, "reduce_scatter", x.nbytes, _HIDDEN, x.dtype),
            )
            for name, group in groups.items()
        }
        rows += alternately("reduce_scatter", size, ways, gloo)
        t = torch.ones(size // (2 * _HIDDEN), _HIDDEN, dtype=torch.bfloat16)
        moved, even = torch.empty_like(t), [len(t) // n] * n
        groups = {"chosen": policies(NATIVE, FP8), "native": policies(NATIVE), "fp8_e4m3": policies(FP8)}
        ways = {
            name: (
                partial(exchanged_compressed, group, moved, t, even, even, len(t)),
                _plan_of(group, "all_to_all_v", t.nbytes, _HIDDEN, t.dtype),
            )
            for name, group in groups.items()
        }
        rows += alternately("all_to_all", size, ways, gloo)
    return rows


def errors_of() -> dict[str, float]:
    """Relative errors ‖sum − FP64 sum‖ / ‖FP64 sum‖ over all ranks: ours and a ring's, of normal numbers with one sign."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    n, rank = dist.get_world_size(), dist.get_rank()
    gloo = dist.new_group(backend="gloo")
    x = torch.randn(n * _ERROR_ELEMENTS, generator=torch.Generator().manual_seed(rank))
    exact = x.double()
    dist.all_reduce(exact, group=gloo)
    expected = exact.view(n, -1)[rank]
    out = torch.empty(_ERROR_ELEMENTS)
    policies(BF16).reduce_scatter_into(out, x).wait()
    found = {"bf16 all_to_all, FP32 sums": out, "bf16 ring": bf16_ring(x, gloo), "fp32": torch.empty_like(out)}
    dist.reduce_scatter_single(found["fp32"], x, group=gloo)
    errors = {}
    for name, result in found.items():
        norms = torch.stack([(result.double() - expected).square().sum(), expected.square().sum()])
        dist.all_reduce(norms, group=gloo)
        errors[name] = float((norms[0] / norms[1]).sqrt())
    # One BF16 rounding of each input: |error| ≤ 2^-8 · Σ|x|, element for element.
    bound = x.double().abs()
    dist.all_reduce(bound, group=gloo)
    worst = ((out.double() - expected).abs() / (bound.view(n, -1)[rank] * 2.0**-8)).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=gloo)
    return errors | {"largest error over one rounding of each input": float(worst)}


def bf16_ring(x: torch.Tensor, group: Any) -> torch.Tensor:
    """A ring reduce_scatter whose partial sums are BF16."""
    n, rank = dist.get_world_size(), dist.get_rank()
    blocks = x.bfloat16().view(n, -1)
    partial = blocks[(rank - 1) % n].clone()
    for step in range(1, n):
        arrived = torch.empty_like(partial)
        works = [
            dist.isend(partial, (rank + 1) % n, group=group),
            dist.irecv(arrived, (rank - 1) % n, group=group),
        ]
        for work in works:
            assert work is not None
            work.wait()
        partial = arrived + blocks[(rank - 1 - step) % n]
    return partial.float()


class _Watch:
    """The largest anonymous memory of this process while it is entered, bytes beyond what it had."""

    def __enter__(self) -> _Watch:
        self.before = self.largest = _anonymous()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.largest = max(self.largest, _anonymous())

    def _look(self) -> None:
        while not self._over.wait(0.0005):
            self.largest = max(self.largest, _anonymous())


def _anonymous() -> int:
    """The memory that is neither a file's nor shared."""
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    return int(match[1]) * 1024 if match else 0


def peaks_of(way: str) -> dict[str, int]:
    """Measure what one reduce_scatter adds to this rank's memory, its tensors already there: through Gloo alone, and with
    everything connected by a call of a small tensor."""
    torch.set_num_threads(1)
    os.environ["COMMLAYER_INTRA"] = "gloo"
    os.environ["COMMLAYER_PLAN"] = "flat_direct"
    dist.init_process_group("commlayer")
    group = dist.group.WORLD
    assert group is not None
    formats = (NATIVE,) if way == "native" else (BF16,)
    compressed = GroupCommunicator(group, wire=WirePolicy(formats, in_place=way == "bf16 in place"), name=way)
    n = dist.get_world_size()
    x = torch.ones(MEMORY_BYTES // 4)
    out = x.view(n, -1)[dist.get_rank()] if way == "bf16 in place" else torch.ones(len(x) // n)
    small = torch.ones(1 << 16)
    compressed.reduce_scatter_into(torch.ones(len(small) // n), small).wait()
    with _Watch() as watch:
        compressed.reduce_scatter_into(out, x).wait()
    assert torch.equal(out, torch.full_like(out, n))
    return {"buffer_bytes": x.nbytes, "added_bytes": watch.largest - watch.before}


def trained(wire: str) -> list[float]:
    """The losses of 300 steps."""
    torch.set_num_threads(1)
    if wire:
        os.environ["COMMLAYER_WIRE"] = wire
    dist.init_process_group("commlayer")
    config = ModelConfig(router=RouterConfig(num_experts=8, top_k=2, aux_loss_coefficient=0.01), hidden=64, width=128)
    options = TrainOptions(steps=300, sequence=64, batch=16, seed=1)
    with FoldedMesh({"ep": 4}) as mesh:
        return train(config, options, mesh).losses
