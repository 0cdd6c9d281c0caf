"""The cost of calls that are audited, watched for drift and remembered: the same calls, and training steps, with and without.

All ways take turns in one job, in blocks: what a group keeps for the ring of calls, its ledger and its watch is taken from it and
given back between blocks, on all ranks before the same call. ``--ranks`` and the other options are host_cost.py's.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from common import measure_links

import commlayer.measure.calibrate  # noqa: F401  before the fork, as the others: ranks then start in milliseconds
from commlayer.auditing import watch as watching
from commlayer.auditing.ledger import Ledger
from commlayer.auditing.shadow import Shadow
from commlayer.auditing.watch import GroupWatch
from commlayer.backend.group import CommlayerGroup
from commlayer.calls.ring import Silent
from commlayer.emulation import EmulatedCluster
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.router import RouterConfig
from commlayer.measure.profiler import SweepOptions
from commlayer.profiles.catalog import load_profile
from commlayer.scheduler.mapping.folded import FoldedMapping
from commlayer.statistics import stats
from commlayer.traces.call_records import CallRecords
from examples.language_model import ModelConfig, MoELanguageModel
from examples.text import Corpus

__all__ = ["WAYS", "print_parts", "print_watching"]

WAYS = ("nothing", "ring", "audit", "drift", "replan", "trace", "shadow")
"""Nothing; the ring of calls; and the ledger, as with COMMLAYER_REPLAN=off; and the watch, as with =audit, and as with
=on; and records with their steps, as with COMMLAYER_TRACE; and one call in a hundred compared, as with
COMMLAYER_SHADOW=100: everything. What a call tells the ring is made also where the ring is silent."""
_SWEEP = SweepOptions(min_bytes=1024, max_bytes=1 << 20, factor=8.0, interference_rounds=0, group_max_bytes=1 << 20)
_Found = dict[str, dict[str, list[tuple[float, float]]]]


class Parts:
    """The listeners to the calls of this rank's groups, which are taken away and given back."""

    def __init__(self) -> None:
        groups: list[Any] = [each for each in dist.distributed_c10d._world.pg_map if isinstance(each, CommlayerGroup)]
        self._kept = [
            (
                group,
                group._order.track,
                group.instruments.find(GroupWatch),
                group.instruments.find(Ledger),
                (group.instruments.find(CallRecords), group.instruments.find(Shadow)),
                getattr(group.instruments.find(Ledger), "heard", None),
            )
            for group in groups
        ]
        self._silent = Silent()

    def use(self, way: str) -> None:
        """Have all groups keep what ``way`` asks for, from the next call on."""
        level = WAYS.index(way)
        for group, track, watch, ledger, (records, shadow), heard in self._kept:
            group._order.track = track if level >= 1 else self._silent
            for instrument, least in ((ledger, 2), (watch, 3), (records, 5), (shadow, 6)):
                if instrument is not None:
                    group.instruments.remove(instrument)
                    if level >= least:
                        group.instruments.add(instrument)
            if watch is not None:
                ledger.heard = heard if level >= 3 else None
                if watch.lead is not None:
                    watch.lead.is_replanning = level >= 4
                (watching._watching.add if level >= 3 else watching._watching.discard)(watch)


def _begin(profile: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(COMMLAYER_PROFILE=profile, COMMLAYER_TRIALS="off", COMMLAYER_REPLAN="on")
    os.environ.update(COMMLAYER_TRACE=str(Path(profile).parent / "trace"), COMMLAYER_SHADOW="100")
    dist.init_process_group("commlayer")


def _in_turn(rounds: int, given: Sequence[str], block: Callable[[], int]) -> dict[str, list[tuple[float, float]]]:
    """Run blocks of the ``given`` ways in turn; ``block`` returns how many calls it made.

    Returns µs a call: on the clock, and of this process's processor time.
    """
    parts = Parts()
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in given}
    for turn in range(rounds + 1):
        ways = given if turn % 2 else given[::-1]  # what drifts in a round then hits each alike
        for way in ways:
            parts.use(way)
            dist.barrier()
            began = time.perf_counter(), time.process_time()
            calls = block()
            spent = time.perf_counter() - began[0], time.process_time() - began[1]
            if turn:  # the first connects
                found[way].append((spent[0] / calls * 1e6, spent[1] / calls * 1e6))
    return found


def measure_calls(profile: str, rounds: int, ways: Sequence[str], num_calls: int) -> tuple[_Found, list[str]]:
    """On a rank: times of small calls, by kind and way; which plans they had."""
    _begin(profile)
    size = dist.get_world_size()
    one, whole, into = torch.ones(256), torch.ones(256 * size), torch.empty(256 * size)
    kinds: dict[str, Callable[[], object]] = {
        "all_reduce 1 KiB": lambda: dist.all_reduce(one),
        "all_gather 1 KiB a rank": lambda: dist.all_gather_single(into, one),
        "all_to_all 1 KiB a rank": lambda: dist.all_to_all_single(into, whole),
    }
    found = {}
    for name, call in kinds.items():

        def block(call: Callable[[], object] = call) -> int:
            for _ in range(num_calls):
                call()
            return num_calls

        found[name] = _in_turn(rounds, ways, block)
    plans = [f"{call['collective']} {call['plan']}" for group in stats()["groups"] for call in group["calls"]]
    dist.destroy_process_group()
    return found, plans


def measure_steps(profile: str, rounds: int, ways: Sequence[str], num_steps: int) -> tuple[_Found, list[str]]:
    """On a rank: times of training steps of a small MoE model, by way."""
    _begin(profile)
    size = dist.get_world_size()
    mapping = FoldedMapping(size, ep=size // 2, moe_order="pp-etp-edp-ep")
    mesh = FoldedMesh(mapping)
    router = RouterConfig(num_experts=8, top_k=2)
    config = ModelConfig(router=router, hidden=128, num_layers=2, width=256, overlap_gradients=True)
    model = MoELanguageModel(config, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, labels = Corpus.of(None).batch(0, 64, 2 * size)

    def block() -> int:
        for _ in range(num_steps):
            optimizer.zero_grad()
            model.train_step(tokens, labels, num_micro_batches=1)
            optimizer.step()
        return num_steps

    found = {"a training step": _in_turn(rounds, ways, block)}
    plans = [f"{call['collective']} {call['plan']}" for group in stats()["groups"] for call in group["calls"]]
    dist.destroy_process_group()
    return found, plans


def measure_parts(profile: str, rounds: int, num_calls: int) -> dict[str, list[float]]:
    """On a rank: times of what a planned all_reduce of 1 KiB does for the ring, the audit and the watch, without the call, µs."""
    _begin(profile)
    dist.all_reduce(torch.ones(256))
    group: Any = dist.group.WORLD
    order, ledger = group._order, group.instruments.find(Ledger)
    watch = group.instruments.find(GroupWatch)

    def ring() -> None:
        order.track.done = order.track.note("all_reduce", torch.float32, 1024, 1024, None, False, depth=1).number

    flat = {"plan": None, "collective": "all_reduce", "run_bytes": 1024, "moved_ns": 900_000}
    flat |= {"inter_bytes": 1024, "intra_bytes": 0}

    def audit() -> None:
        call: Any = SimpleNamespace(**flat)
        order.under_way.begin(call, order.key)
        order.under_way.end(call, time.perf_counter_ns())
        ledger.moved(call)

    parts: dict[str, Callable[[], object]] = {"ring": ring, "audit": audit, "drift": watch.appointments.pass_by}
    found: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name, part in parts.items():
            began = time.thread_time_ns()
            for _ in range(num_calls):
                part()
            found[name].append((time.thread_time_ns() - began) / num_calls / 1e3)
    return found


def print_parts(options: argparse.Namespace) -> None:
    """Measure and print what each part does in a call."""
    with _cluster(2, 1) as (cluster, path):
        found = cluster.run(measure_parts, path, options.rounds, options.block, timeout_s=600)[0]
    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, {options.rounds} rounds of {options.block}: "
        "µs in a call, median [quartiles]"
    )
    for name, times in found.items():
        ordered = sorted(times)
        low, high = ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]
        print(f"{name:8}{median(ordered):8.2f} [{low:.2f}, {high:.2f}]")


@contextmanager
def _cluster(nodes: int, ranks: int) -> Iterator[tuple[EmulatedCluster, str]]:
    """A cluster, and the path of its profile, by which the smallest calls are planned too."""
    with tempfile.TemporaryDirectory() as folder, EmulatedCluster(nodes, ranks, inter="400mbit") as cluster:
        path = Path(folder) / "profile.json"
        cluster.run(measure_links, str(path), "host_cost.py", _SWEEP, timeout_s=300)
        load_profile(str(path)).replace(plan_from_bytes=64).save(path)
        yield cluster, str(path)


def print_watching(options: argparse.Namespace) -> None:
    """Measure and print what the options of host_cost.py ask for."""
    nodes, ranks = map(int, options.cluster.split("x"))
    with _cluster(nodes, ranks) as (cluster, path):
        measured = measure_steps if options.watching == "steps" else measure_calls
        ways = WAYS[0], *options.ways
        found, plans = cluster.run(measured, path, options.rounds, ways, options.block, timeout_s=600)[0]
    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, {options.cluster}, {options.rounds} rounds of {options.block}"
    )
    print("plans:", ", ".join(sorted(set(plans))))
    print(
        f"{'µs with nothing; ratio to it: median [quartiles], of all':56}"
        + "".join(f"{way:>28}" for way in options.ways)
    )
    for name, by_way in found.items():
        for index, clock in enumerate(("clock", "processor")):
            base = [each[index] for each in by_way["nothing"]]
            cells = "".join(f"{_ratios([each[index] for each in by_way[way]], base):>28}" for way in options.ways)
            print(f"{f'{name}, {clock}: {median(base):.0f}':56}{cells}")


def _ratios(ours: list[float], base: list[float]) -> str:
    """Ratios of blocks of one round; and of the sums, in which the watch's thread, which works eight times a second, is whole."""
    ratios = sorted(mine / theirs for mine, theirs in zip(ours, base, strict=True))
    low, high = ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]
    return f"{median(ratios):.3f} [{low:.3f}, {high:.3f}] {sum(ours) / sum(base):.3f}"
