"""``make bench-lanes``: an expert all_to_all beside gradients, with lanes, without, and with plain torch; and what lanes cost.

conflict: 2 MiB a rank of an all_to_all, three times, while 32 MiB of FP32 gradients are being reduced, on 2 × 4 and 2 × 8 ranks.
overhead: an all_to_all and an all_reduce on a lane, with nobody on another, against the same group on none.
prediction: what the conflict model says of the first.

All ways take turns in one run, in a new order each round, after their results were compared. Writes a dated document and JSON.
The step of a whole model is benchmarks/lanes_step.py.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from common import add_output, dated_stem, machine, measure_links, today, versions, write_results

from commlayer.emulation import EmulatedCluster
from commlayer.profiles.links import Resource
from commlayer.scheduler.conflicts import Compute, Forecast, Issue, PlannedCall, Wait, simulate
from commlayer.scheduler.group_strategies import build
from commlayer.scheduler.lanes import LanePolicy
from commlayer.scheduler.plan import Plan, Strategy
from commlayer.scheduler.traffic import Traffic

INTER, _RATE = "200mbit", 25e6
"""The wire, and its bytes a second."""
CLUSTERS = {"2x4": (4, 10), "2x8": (8, 6)}
"""Ranks of each of two nodes, and rounds."""
GRADIENTS, EXPERTS = 32 << 20, 2 << 20
SIZES = (64 << 10, 1 << 20)
NUM_CALLS, LEAD_S, GAP_S = 3, 0.2, 0.1
WAYS = ("lanes", "no lanes", "torch")
_OVERHEAD_ROUNDS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", action="append", choices=list(CLUSTERS), help="only these")
    parser.add_argument("--profile", help="a profile of the cluster instead of a sweep at the beginning")
    add_output(parser)
    options = parser.parse_args()
    stem = dated_stem(options.output, "lanes")
    found: dict[str, Any] = {}
    for key in options.cluster or CLUSTERS:
        ranks, rounds = CLUSTERS[key]
        print(f"{key} …", flush=True)
        with (
            tempfile.TemporaryDirectory() as folder,
            EmulatedCluster(2, ranks, inter=INTER, mode="netns") as cluster,
        ):
            profile = options.profile or f"{folder}/profile.json"
            if options.profile is None:
                cluster.run(measure_links, profile, "make bench-lanes", timeout_s=900)
            by_rank = cluster.run(conflict, profile, rounds, timeout_s=1500)
            overhead = cluster.run(overheads, profile, timeout_s=600)
            found[key] = {"inter": INTER, **together(by_rank), "overhead": slowest(overhead)}
        write_results(stem, found, document(found))
    print(stem.with_suffix(".md").read_text(encoding="utf-8"))


# On every rank


def start(profile: str) -> None:
    torch.set_num_threads(1)
    os.environ["COMMLAYER_PROFILE"] = profile
    dist.init_process_group("commlayer")


class Groups:
    """A group for gradients and one for experts of each way; ``lanes`` and ``no lanes`` share theirs."""

    def __init__(self) -> None:
        self.ours: tuple[Any, Any] = (dist.new_group(backend="commlayer"), dist.new_group(backend="commlayer"))
        self.torch = (dist.new_group(backend="gloo"), dist.new_group(backend="gloo"))

    def of(self, way: str) -> tuple[Any, Any]:
        if way == "torch":
            return self.torch
        for group, lane in zip(self.ours, ("dp", "ep"), strict=True):
            group.use_lane(lane if way == "lanes" else "")
        return self.ours

    def plan(self, way: str) -> Plan:
        group = self.of(way)[0]
        plan: Plan = group._planned.choices.plan("all_reduce", GRADIENTS, is_float=True)
        return plan


def sent_bytes() -> int:
    """The bytes that have left this node so far, headers and all: every rank of a node sees the same."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if line.split(":")[0].strip() != "lo")


def conflict(profile: str, rounds: int) -> dict[str, Any]:
    """Seconds of each way's rounds, as this rank saw them."""
    start(profile)
    groups, rank = Groups(), dist.get_rank()
    gradients, x = torch.empty(GRADIENTS // 4), torch.arange(EXPERTS // 4) % 1000 + 7.0 * rank
    out = torch.empty_like(x)
    found: dict[str, Any] = {
        way: {"experts": [], "both": [], "gradients": [], "link_use": [], "link_use_beside": []} for way in WAYS
    }
    alone: list[list[float]] = []

    def experts(group: Any) -> float:
        begin = time.perf_counter()
        dist.all_to_all_single(out, x, group=group)
        return time.perf_counter() - begin

    def beside(way: str) -> None:
        dp, ep = groups.of(way)
        gradients.fill_(rank + 1.0)
        dist.barrier()
        begin, sent = time.perf_counter(), sent_bytes()
        work = dist.all_reduce(gradients, group=dp, async_op=True)
        time.sleep(LEAD_S)
        times = []
        during = took = 0.0
        for _ in range(NUM_CALLS):
            before = sent_bytes()
            times.append(experts(ep))
            during, took = during + sent_bytes() - before, took + times[-1]
            time.sleep(GAP_S)
        work.wait()
        total = time.perf_counter() - begin
        assert bool((gradients == sum(range(1, dist.get_world_size() + 1))).all()), way
        found[way]["experts"].append(times)
        found[way]["both"].append(total)
        found[way]["link_use"].append((sent_bytes() - sent) / _RATE / total)
        found[way]["link_use_beside"].append(during / _RATE / took)

    for way in WAYS:  # connects, compares, warms up
        dp, ep = groups.of(way)
        gradients.fill_(1.0)
        dist.all_reduce(gradients, group=dp)
        experts(ep)
        if way == WAYS[0]:
            wanted = out.clone()
        assert torch.equal(out, wanted), way
    for index in range(rounds):
        dist.barrier()
        alone.append([experts(groups.of("lanes")[1]) for _ in range(NUM_CALLS)])
        for way in random.Random(index).sample(WAYS, len(WAYS)):
            beside(way)
            dp, _ = groups.of(way)
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(gradients, group=dp)
            found[way]["gradients"].append(time.perf_counter() - begin)
    plans = {way: groups.plan(way).name for way in WAYS[:2]}
    return {"alone": alone, "ways": found, "plans": plans, "predicted": predicted(groups)}


def predicted(groups: Groups) -> dict[str, dict[str, float]]:
    """The prediction of the conflict model of the same program, ms."""
    planner = groups.ours[0]._planned.choices.prices.planner
    world, shape = dist.get_world_size(), groups.ours[0].shape
    flat = build(Traffic(EXPERTS, world, 1, Resource.INTER, "all_to_all_v", shape), Strategy.FLAT)
    found = {}
    for way, policy in (("lanes", LanePolicy()), ("no lanes", None)):
        dp = PlannedCall("gradients", groups.plan(way), lane="dp", group="dp")
        program: list[Compute | Issue | Wait] = [Issue(dp), Compute(LEAD_S * 1e6)]
        for nth in range(NUM_CALLS):
            ep = PlannedCall(f"experts {nth}", flat, lane="ep", group="ep")
            program += [Issue(ep), Wait(ep), Compute(GAP_S * 1e6)]
        forecast: Forecast = simulate([*program, Wait(dp)], planner.profile, policy)
        calls = [forecast.calls[f"experts {nth}"].total_us for nth in range(NUM_CALLS)]
        found[way] = {"experts": median(calls) / 1e3, "both": forecast.total_us / 1e3}
    return found


def overheads(profile: str) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each call and size on a lane and on none, by turns."""
    start(profile)
    group: Any = dist.new_group(backend="commlayer")
    found: dict[str, list[tuple[float, float]]] = {}
    for size in SIZES:
        x, out = torch.ones(size // 4), torch.empty(size // 4)
        calls: dict[str, Callable[[], object]] = {
            "all_to_all": lambda x=x, out=out: dist.all_to_all_single(out, x, group=group),  # type: ignore[misc]
            "all_reduce": lambda x=x: dist.all_reduce(x, group=group),  # type: ignore[misc]
        }
        for name, call in calls.items():
            times: dict[str, list[float]] = {"ep": [], "": []}
            for index in range(_OVERHEAD_ROUNDS):
                for lane in random.Random(index).sample(["ep", ""], 2):
                    group.use_lane(lane)
                    call()
                    dist.barrier(group=group)
                    begin = time.perf_counter()
                    for _ in range(3):
                        call()
                    times[lane].append((time.perf_counter() - begin) / 3)
            found[f"{name} {size >> 10} KiB"] = list(zip(times["ep"], times[""], strict=True))
    return found


# Together


def together(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The seconds of each call and round: the slowest rank's time, seconds; of the link the mean over nodes."""

    def worst(pick: Callable[[Mapping[str, Any]], Any]) -> Any:
        values = [pick(rank) for rank in by_rank]
        if isinstance(values[0][0], list):
            return [[max(each) for each in zip(*calls, strict=True)] for calls in zip(*values, strict=True)]
        return [max(each) for each in zip(*values, strict=True)]

    ways: dict[str, Any] = {}
    for way in WAYS:
        ways[way] = {key: worst(partial(_seen, way, key)) for key in ("experts", "both", "gradients")}
        for key in ("link_use", "link_use_beside"):
            ways[way][key] = [
                sum(each) / len(by_rank) for each in zip(*(r["ways"][way][key] for r in by_rank), strict=True)
            ]
    return {
        "alone": worst(lambda rank: rank["alone"]),
        "ways": ways,
        "plans": by_rank[0]["plans"],
        "predicted": by_rank[0]["predicted"],
    }


def _seen(way: str, key: str, rank: Mapping[str, Any]) -> Any:
    return rank["ways"][way][key]


def slowest(by_rank: Sequence[Mapping[str, list[tuple[float, float]]]]) -> dict[str, list[tuple[float, float]]]:
    return {
        name: [
            (max(a for a, _ in each), max(b for _, b in each)) for each in zip(*(r[name] for r in by_rank), strict=True)
        ]
        for name in by_rank[0]
    }


def spread(values: Sequence[float]) -> str:
    low, _, high = quantiles(values, n=4)
    return f"{median(values):.3f} [{low:.3f}, {high:.3f}]"


def document(found: Mapping[str, Any]) -> str:
    lines = [
        f"# Lanes, emulated, {today()}",
        "",
        "Made by `make bench-lanes`. Emulated clusters on one machine: real processes and bytes, slowed wires. All ranks share",
        "the machine's cores, so quote the ratios, not the times. Medians over rounds with quartiles, the slowest rank's times;",
        "ratios are of one round.",
        "",
        f"- machine: {machine()}",
        f"- versions: {versions()}",
        f"- {EXPERTS >> 20} MiB a rank of an all_to_all, {NUM_CALLS} times {GAP_S:g} s apart, {LEAD_S:g} s after",
        f"  {GRADIENTS >> 20} MiB of gradients were issued",
        "- link use: bytes with headers that left a node, over its rate",
    ]
    for key, cluster in found.items():
        lines += ["", *_section(key, cluster)]
    return "\n".join(lines) + "\n"


def _section(key: str, cluster: Mapping[str, Any]) -> list[str]:
    alone = [median(calls) for calls in cluster["alone"]]
    ways = cluster["ways"]
    rows = []
    for way in WAYS:
        each = ways[way]
        mine = [median(calls) for calls in each["experts"]]
        rows.append(
            f"| {way} | {cluster['plans'].get(way, 'Gloo')} | {1e3 * median(mine):.0f} | "
            f"{spread([a / b for a, b in zip(mine, alone, strict=True)])} | "
            f"{spread([a / b for a, b in zip(each['both'], ways['no lanes']['both'], strict=True)])} | "
            f"{spread([a / b for a, b in zip(each['gradients'], ways['no lanes']['gradients'], strict=True)])} | "
            f"{spread(each['link_use_beside'])} | {spread(each['link_use'])} |"
        )
    predicted = [
        f"| {way} | {said['experts']:.0f} | {1e3 * median([median(c) for c in ways[way]['experts']]):.0f} | {said['both']:.0f} | "
        f"{1e3 * median(ways[way]['both']):.0f} | {said['both'] / 1e3 / median(ways[way]['both']):.3f} |"
        for way, said in cluster["predicted"].items()
    ]
    overhead = [f"| {name} | {spread([a / b for a, b in pairs])} |" for name, pairs in cluster["overhead"].items()]
    return [
        f"## {key}, {cluster['inter']} a node and direction",
        "",
        f"The all_to_all alone: {1e3 * median(alone):.0f} ms.",
        "",
        "| way | plan of the gradients | experts, ms | / alone | gradients with them / without lanes "
        "| gradients alone / without lanes | link use while both run | link use of it all |",
        "|---" * 8 + "|",
        *rows,
        "",
        "Predicted by the conflict model and measured, ms:",
        "",
        "| way | experts, predicted | measured | gradients with them, predicted | measured | predicted / measured |",
        "|---" * 6 + "|",
        *predicted,
        "",
        "On a lane against on none, nobody on another:",
        "",
        "| call | time / without lanes |",
        "|---|---|",
        *overhead,
    ]


if __name__ == "__main__":
    main()
