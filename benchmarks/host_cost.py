"""The cost of a call on the host: the backend `commlayer` with flat calls against Gloo, through torch.distributed.

Every rank holds a group of each backend, and they take turns in blocks of calls, so that drifts of a noisy machine hit
both. Printed are low percentiles of the time of one call and their ratio: with more than one rank on few cores, higher
ones show the scheduler of the operating system.

    python benchmarks/host_cost.py --ranks 1 2 --calls 4000
    python benchmarks/host_cost.py --planned --calls 400
    python benchmarks/host_cost.py --ring --ranks 1
    python benchmarks/host_cost.py --device simulated --calls 400

``--planned`` counts processor time instead, of calls that are forced into two levels on two nodes of two ranks: of the caller's
thread, and of the whole process, with Gloo's threads.

``--ring`` compares calls of one group with those that are not noted in the ring of calls (commlayer/calls/ring.py).

``--device simulated`` counts processor time of calls on the simulated device, for each strategy, above the inner backend's own
(host_cost_device.py).

``--watching calls`` and ``--watching steps`` compare planned calls of 1 KiB, or training steps, on an emulated cluster, with the
ring, the audit and the watch for drift and without (host_cost_watching.py).

Else ranks run on loopback: nothing here says anything about a network.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from host_cost_device import print_device
from host_cost_watching import WAYS, print_parts, print_watching

import commlayer.backend.new_groups  # noqa: F401  ranks are forked: what is imported here they need not import
from commlayer.calls.ring import Silent
from commlayer.emulation import EmulatedCluster

Call = Callable[[dist.ProcessGroup], object]
PERCENTILES = (1, 5, 25, 50)


def calls(size: int) -> dict[str, Call]:
    """The timed calls, by name; each makes its tensors once."""
    small, block = torch.ones(4), torch.ones(256 * size)
    out, gathered, part = torch.empty(256 * size), torch.empty(256 * size), torch.empty(256)
    even = [256] * size

    def asynchronous(group: dist.ProcessGroup) -> None:
        work = dist.all_reduce(small, group=group, async_op=True)
        assert work is not None
        work.wait()

    return {
        "all_reduce 16 B": lambda group: dist.all_reduce(small, group=group),
        "all_reduce 16 B, async_op": asynchronous,
        "all_gather_single 1 KiB": lambda group: dist.all_gather_single(gathered, part, group=group),
        "reduce_scatter_single 1 KiB": lambda group: dist.reduce_scatter_single(part, gathered, group=group),
        "all_to_all_single 1 KiB": lambda group: dist.all_to_all_single(out, block, group=group),
        "all_to_all_single 1 KiB, splits": lambda group: dist.all_to_all_single(out, block, even, even, group=group),
        "broadcast 16 B": lambda group: dist.broadcast(small, 0, group=group),
        "barrier": lambda group: dist.barrier(group=group),
    }


def measure(num_calls: int, block: int = 50) -> dict[str, dict[str, list[float]]]:
    """On a rank: the times of single calls, µs, by name and backend."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    # A rank and the threads of its groups on one core: else a group is fast or slow by where its threads happen to land.
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    os.environ["COMMLAYER_PROFILE"] = "none"
    dist.init_process_group("gloo")
    groups = {"gloo": dist.group.WORLD, "commlayer": dist.new_group(backend="commlayer")}
    times: dict[str, dict[str, list[float]]] = {}
    gc.disable()
    for name, call in calls(dist.get_world_size()).items():
        found: dict[str, list[float]] = {backend: [] for backend in groups}
        for _ in range(num_calls // block):
            for backend, group in groups.items():
                assert group is not None
                for _ in range(3):
                    call(group)
                for _ in range(block):
                    began = time.perf_counter_ns()
                    call(group)
                    found[backend].append((time.perf_counter_ns() - began) / 1000)
        times[name] = found
    return times


def measure_ring(num_calls: int, block: int = 50) -> dict[str, dict[str, list[float]]]:
    """On a rank: the times of single calls, µs, by name, with the ring of calls and without, in blocks that take turns."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    os.environ["COMMLAYER_PROFILE"] = "none"
    dist.init_process_group("commlayer")
    group: Any = dist.group.WORLD
    tracks = {"without": Silent(), "with": group._order.track}
    times: dict[str, dict[str, list[float]]] = {}
    gc.disable()
    for name, call in calls(dist.get_world_size()).items():
        found: dict[str, list[float]] = {kind: [] for kind in tracks}
        for _ in range(num_calls // block):
            for kind, track in tracks.items():
                group._order.track = track
                for _ in range(3):
                    call(group)
                for _ in range(block):
                    began = time.perf_counter_ns()
                    call(group)
                    found[kind].append((time.perf_counter_ns() - began) / 1000)
        times[name] = found
    return times


def print_ring(ranks: int, num_calls: int) -> None:
    with EmulatedCluster(1, ranks, mode="loopback") as cluster:
        times = cluster.run(measure_ring, num_calls, timeout_s=600)[0]
    print(f"\n{ranks} rank{'s' if ranks > 1 else ''}: µs of one call without the ring, and what it adds")
    print(f"{'':32}" + "".join(f"{f'p{p}':>18}" for p in PERCENTILES))
    for name, found in times.items():
        cells = []
        for percent in PERCENTILES:
            without, with_it = (percentile(found[kind], percent) for kind in ("without", "with"))
            cells.append(f"{without:9.1f} {with_it - without:+8.2f}")
        print(f"{name:32}" + "".join(cells))


def measure_planned(num_calls: int, block: int = 20) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """On a rank: processor time of a call, µs, by name and backend: of this thread and of the process, per block of calls."""
    torch.set_num_threads(1)
    os.environ.update(COMMLAYER_PROFILE="none", COMMLAYER_PLAN="hierarchical")
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    groups = {"gloo": dist.group.WORLD, "commlayer": dist.new_group(backend="commlayer")}
    whole, part = torch.ones(256 * size), torch.ones(256)
    splits = [256] * size
    planned: dict[str, Call] = {
        "all_gather_single 1 KiB a rank": lambda group: dist.all_gather_single(whole, part, group=group),
        "all_reduce 4 KiB": lambda group: dist.all_reduce(whole, group=group),
        "all_to_all_single 1 KiB blocks, splits": lambda group: dist.all_to_all_single(
            torch.empty_like(whole), whole, splits, splits, group=group
        ),
    }
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, call in planned.items():
        found[name] = {backend: [] for backend in groups}
        for turn in range(num_calls // block + 1):
            for backend, group in groups.items():
                assert group is not None
                began = time.thread_time_ns(), time.process_time_ns()
                for _ in range(block):
                    call(group)
                spent = time.thread_time_ns() - began[0], time.process_time_ns() - began[1]
                if turn:  # the first connects
                    found[name][backend].append((spent[0] / block / 1000, spent[1] / block / 1000))
    return found


def print_planned(num_calls: int) -> None:
    with EmulatedCluster(2, 2, mode="loopback") as cluster:
        found = cluster.run(measure_planned, num_calls, timeout_s=600)[0]
    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, 2x2 ranks, median processor time of a call on rank 0, µs"
    )
    print(f"{'':42}{'caller: gloo / two levels':>30}{'process: gloo / two levels':>30}")
    for name, by_backend in found.items():
        cells = []
        for which in (0, 1):
            gloo, ours = (
                percentile([pair[which] for pair in by_backend[backend]], 50) for backend in ("gloo", "commlayer")
            )
            cells.append(f"{gloo:.0f} / {ours:.0f}")
        print(f"{name:42}" + "".join(f"{cell:>30}" for cell in cells))


def percentile(values: list[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Host cost of a call on the backend commlayer against Gloo.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--calls", type=int, default=4000, help="timed calls of each kind on each backend")
    parser.add_argument("--planned", action="store_true", help="processor time of calls in two levels, instead")
    parser.add_argument("--ring", action="store_true", help="what the ring of calls adds to a call, instead")
    parser.add_argument(
        "--device", choices=("simulated",), help="calls on a device, by plan and by its inner backend, instead"
    )
    parser.add_argument(
        "--watching", choices=("calls", "steps", "parts"), help="what ring, audit and watch add, instead"
    )
    parser.add_argument("--ways", nargs="+", default=WAYS[1:], choices=WAYS[1:], help="for --watching: which of them")
    parser.add_argument("--cluster", default="2x4", help="for --watching: nodes × ranks of a node (default 2x4)")
    parser.add_argument("--rounds", type=int, default=20, help="for --watching: rounds in which all ways take turns")
    parser.add_argument("--block", type=int, default=100, help="for --watching: calls, or steps, of a way in a round")
    options = parser.parse_args()
    if options.device:
        print_device(options)
        return
    if options.watching == "parts":
        print_parts(options)
        return
    if options.watching:
        print_watching(options)
        return
    if options.ring:
        for ranks in options.ranks:
            print_ring(ranks, options.calls)
        return
    if options.planned:
        print_planned(options.calls)
        return
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, µs of one call on rank 0, gloo / commlayer = ratio")
    for ranks in options.ranks:
        with EmulatedCluster(1, ranks, mode="loopback") as cluster:
            times = cluster.run(measure, options.calls, timeout_s=600)[0]
        print(f"\n{ranks} rank{'s' if ranks > 1 else ''}" + "".join(f"{f'p{p}':>26}" for p in PERCENTILES))
        for name, found in times.items():
            cells = []
            for percent in PERCENTILES:
                gloo, ours = (percentile(found[backend], percent) for backend in ("gloo", "commlayer"))
                cells.append(f"{gloo:9.1f} /{ours:7.1f} ={ours / gloo:5.2f}")
            print(f"{name:32}" + "".join(f"{cell:>26}" for cell in cells))


if __name__ == "__main__":
    main()
