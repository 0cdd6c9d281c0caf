"""The cost on the host of planned calls on a simulated device, above the bare call of its inner backend, for each strategy.

Two devices. On the simulated one: all that the caller's thread does, of which most is the simulator's own work, in Python, for
each operator, event and message. On the null device, whose streams, events, messengers and inner backend take everything and do
nothing: what this package adds on any device, where a launch costs what the device's own library takes for it. There it is stated
above two calls: the same group's that is not planned, and torch's own of a group that is nothing but that inner backend.

All ways take turns in blocks on one group, on the same tensor, as gradients' buckets are; see host_cost.py.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import commlayer.backend.new_groups  # noqa: F401  ranks are forked: what is imported here they need not import
from commlayer.backend.launcher import Launcher
from commlayer.backend.on_device import OnDevice
from commlayer.emulation import EmulatedCluster
from commlayer.engine.device_plans import DevicePlans
from commlayer.engine.group_plans import Choices
from commlayer.settings import Settings
from commlayer.transport.nccl import Nccl

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # what its helpers are shared with
from simulated.torch_device import simulated_device
from simulated.torch_streams import StreamDelays

__all__ = ["print_device"]

STRATEGIES = ("flat_direct", "hierarchical", "leaders", "pipelined:2", "pipelined:4")
INNER = "inner"
BARE = "bare"
NULL = "null"
TARGET_US = 40.0
ELEMENTS = 1024

Times = dict[str, dict[str, list[float]]]


class Nothing:
    """A device, its streams, events and messengers, and an inner backend, that do nothing; it has memory, of ``device``."""

    is_capturing = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    @property
    def current(self) -> Nothing:
        return self

    def on(self, stream: object) -> contextlib.nullcontext[None]:
        return _AS_IT_IS

    def launch(self, work: object) -> None:
        return None

    def record(self) -> Nothing:
        return self

    def record_time(self) -> Nothing:
        return self

    def wait(self, *arguments: object) -> None:
        return None

    def keep(self, tensor: object) -> None:
        return None

    def exchange(self, sends: object, receives: object) -> Nothing:
        return self

    def all_gather(self, whole: object, mine: object) -> Nothing:
        return self

    def allreduce(self, tensors: object, opts: object) -> Nothing:
        return self


_AS_IT_IS = contextlib.nullcontext()


def measure_device(num_calls: int, block: int = 10) -> tuple[Times, dict[str, int]]:
    """On a rank: the caller's processor time of single calls, µs, by device and strategy; and how many steps each plan has."""
    torch.set_num_threads(1)
    device = simulated_device(StreamDelays(chance=0.0))
    os.environ["COMMLAYER_PROFILE"] = "none"
    dist.init_process_group("commlayer")
    group: Any = dist.group.WORLD
    place = group._inner.on_devices[device.type]
    nodes = place.plans.nodes
    nothing: Any = Nothing(device)
    shape = tuple(map(len, nodes))
    idle = DevicePlans(
        nodes, dist.get_rank(), place.plans.choices, lambda purpose, on: nothing, lambda: "", lambda: 0.0
    )
    on_nothing = OnDevice(Launcher(Nccl(nothing), idle, place.order, place.track, group.counters, lambda mine: []))
    ways_of = {"simulated": place, NULL: on_nothing}
    plans = {"simulated": place.plans, NULL: idle}
    choices = {name: Choices(shape, None, Settings(plan=name)) for name in STRATEGIES}
    choices[INNER] = Choices(shape, None, Settings())
    x = torch.ones(ELEMENTS, device=device)
    ways: dict[str, tuple[str, ...]] = {"simulated": (INNER, *STRATEGIES), NULL: (BARE, INNER, *STRATEGIES)}
    choices[BARE] = choices[INNER]  # who has no group of ours asks nobody
    times: Times = {where: {name: [] for name in names} for where, names in ways.items()}
    gc.disable()
    for turn in range(num_calls // block + 1):
        for where, names in ways.items():
            for name in names:
                group._inner.on_devices[device.type], plans[where].choices = ways_of[where], choices[name]
                given = nothing if name == BARE else None
                for _ in range(block):
                    began = time.thread_time_ns()
                    work = dist.all_reduce(x, group=given, async_op=True)
                    assert work is not None
                    work.wait()
                    if turn:  # the first connects
                        times[where][name].append((time.thread_time_ns() - began) / 1000)
                torch.get_device_module(device).synchronize()
                _do_nothing_on(idle, nothing)
    group._inner.on_devices[device.type] = place
    steps = {}
    for name in STRATEGIES:
        plan = choices[name].plan("all_reduce", x.nbytes, is_float=True)
        assert plan is not None
        steps[name] = len(plan.steps)
    dist.destroy_process_group()
    return times, steps


def _do_nothing_on(idle: DevicePlans, nothing: Any) -> None:
    """Put streams that do nothing in the place of those that connecting has made."""
    if idle.connections.messengers:
        transport = idle.connections.transport
        transport.device, transport.streams = nothing, dict.fromkeys(transport.streams, nothing)


def print_device(options: argparse.Namespace) -> None:
    """Measure on two nodes of two ranks, and print a table."""
    with EmulatedCluster(2, 2, mode="loopback") as cluster:
        times, steps = cluster.run(measure_device, options.calls, timeout_s=90)[0]
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {machine}, 2x2 ranks, {len(times[NULL][BARE])} calls "
        f"each: processor time of the caller of an all_reduce of {ELEMENTS * 4} bytes on rank 0, µs, median (quartiles)"
    )
    print(f"on the null device, torch's own of a group that does nothing: {_quartiles(times[NULL][BARE])}")
    for where, found in times.items():
        print(f"on the {where} device, not planned: {_quartiles(found[INNER])}")
    bases = {
        "null: above torch's own": (NULL, BARE),
        "null: above not planned": (NULL, INNER),
        "simulated: above not planned": ("simulated", INNER),
    }
    print(f"\n| strategy | steps | {' | '.join(bases)} | at most {TARGET_US:g} above torch's own |")
    print("|---" * (len(bases) + 3) + "|")
    for name in STRATEGIES:
        above = [_above(times[where][name], times[where][base]) for where, base in bases.values()]
        verdict = "yes" if _median(above[0]) <= TARGET_US else "no"
        print(f"| {name} | {steps[name]} | {' | '.join(map(_quartiles, above))} | {verdict} |")


def _above(values: list[float], base: list[float]) -> list[float]:
    bare = _median(base)
    return [each - bare for each in values]


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _quartiles(values: list[float]) -> str:
    ordered = sorted(values)
    low, middle, high = (ordered[len(ordered) * part // 4] for part in (1, 2, 3))
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"
