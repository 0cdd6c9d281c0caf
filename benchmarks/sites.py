"""``make bench-sites``: the outer synchronisation of torchft's DiLoCo between sites with slow links, and what it costs in loss.

Sites are nodes of an emulated cluster with one rank each, 100 or 500 Mbit/s a site, 50 ms from one to another. An all_reduce of
64 MiB of FP32 goes over torchft's Gloo group, over 20 such groups in parallel (a part of the tensor each), and over ours in FP32,
BF16 and INT8, alternately in one job; a time is the slowest site's, a ratio is of one round. Before that each of ours makes the
calls in which its plans take turns, until one is kept. Losses are of 300 steps of a tiny
model, whose outer synchronisation is DiLoCo's every fourth step, over Gloo and over ours, on the same data.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torchft.coordination
import torchft.local_sgd
import torchft.process_group  # once, before ranks are forked
from common import add_output, dated_stem, facts, write_results
from sites_training import SYNC_EVERY, Site, Way, train
from torch.distributed.distributed_c10d import AllreduceOptions

import commlayer
from commlayer.emulation import EmulatedCluster
from commlayer.integrations.torchft import planned_process_group

LIMIT = timedelta(seconds=120)
GROUPS = 20
CASES = ((2, "100mbit"), (2, "500mbit"), (4, "100mbit"), (4, "500mbit"))
DELAY_US = 50_000.0
MIB = 64
STEPS, TAIL = 300, 20
OURS = {"FP32": None, "BF16": "bf16!", "INT8": "int8!"}
WAYS = ("Gloo", f"{GROUPS} × Gloo", *OURS)
TARGETS = {"FP32": 1.0, "INT8": 0.35}


class ManyGroups:
    """Gloo groups in parallel, each of which gets a part of a tensor."""

    def __init__(self, configure: Any) -> None:
        self.groups = [torchft.process_group.ProcessGroupGloo(timeout=LIMIT) for _ in range(GROUPS)]
        with ThreadPoolExecutor(GROUPS) as pool:  # each waits for the links many times
            list(pool.map(configure, self.groups, (f"many {number}" for number in range(GROUPS))))

    def allreduce(self, tensors: list[torch.Tensor], options: AllreduceOptions) -> Any:
        parts = tensors[0].chunk(len(self.groups))
        works = [group.allreduce([part], options) for group, part in zip(self.groups, parts, strict=True)]
        return _Together(works)


class _Together:
    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def timed(rounds: int, mib: int, ways: Sequence[str]) -> tuple[list[dict[str, float]], dict[str, str]]:
    """The seconds that each way takes here, by round, and the plan of each of ours. An eighth of the tensor goes before, over
    connections still slow."""
    torch.set_num_threads(1)
    os.environ["COMMLAYER_PROFILE"] = "none"
    site = Site()

    def configure(group: Any, name: str) -> None:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}/{name}"
        group.configure(address, f"site_{site.rank}", site.rank, site.count, 1, 0, 1, list(range(site.count)))

    groups: dict[str, Any] = {}
    for way in ways:
        if way in OURS:
            groups[way] = planned_process_group(OURS[way], timeout=LIMIT)
        elif way == "Gloo":
            groups[way] = torchft.process_group.ProcessGroupGloo(timeout=LIMIT)
        else:
            groups[way] = ManyGroups(configure)
            continue
        configure(groups[way], way)
    x, options = torch.randn(mib << 18, generator=torch.Generator().manual_seed(site.rank)), AllreduceOptions()
    for group in groups.values():
        group.allreduce([x[: len(x) // 8].clone()], options).wait()
    plans = {way: _settled(groups[way], x, options) for way in ways if way in OURS}
    found = []
    for _ in range(rounds):
        seconds, expected = {}, x
        for way, group in groups.items():
            y = x.clone()
            groups["Gloo"].barrier().wait()
            began = time.perf_counter()
            group.allreduce([y], options).wait()
            seconds[way] = time.perf_counter() - began
            if way == "Gloo":
                expected = y
            _check(way, y, expected)
        found.append(seconds)
    groups["Gloo"].barrier().wait()  # a group that is let go of must not be in use
    for way in plans:
        groups[way].shutdown()
    site.end()
    return found, plans


def _settled(group: Any, x: torch.Tensor, options: AllreduceOptions) -> str:
    """Call the group until a plan has run twice in a row, which it does once it is kept; returns its name."""
    latest: str | None = None
    before = Counter[str]()
    while True:
        group.allreduce([x.clone()], options).wait()
        calls = Counter[str]()
        for each in (call for told in commlayer.stats()["groups"] for call in told["calls"]):
            calls[each["plan"]] += each["calls"]
        (ran,) = calls - before if before else (None,)
        if ran is not None and ran == latest:
            return str(ran)
        latest, before = ran, calls


def _check(way: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Every way is right, to what its format rounds: normal numbers, in blocks whose largest is below 6, from a few sites."""
    bound = {"BF16": 2.0**-3, "INT8": 0.25}.get(way, 1e-5)
    worst = float((got - expected).abs().max())
    assert worst <= bound, f"{way}: an element is off by {worst}"


def measured(sites: int, rate: str, rounds: int, mib: int, ways: Sequence[str]) -> dict[str, Any]:
    with EmulatedCluster(nodes=sites, ranks_per_node=1, inter=rate, delay_us=DELAY_US) as cluster:
        ranks = cluster.run(timed, rounds, mib, ways, timeout_s=600 + 90 * rounds)
    times = {way: [max(rank[0][number][way] for rank in ranks) for number in range(rounds)] for way in ways}
    return {"sites": sites, "rate": rate, "seconds": times, "plans": ranks[0][1]}


def trained(sites: int) -> dict[str, Any]:
    """The mean loss of the last steps over all sites, by way."""
    ways = {"Gloo": "ProcessGroupGloo(timeout=timedelta(seconds=20))"}
    ways |= {name: f"planned_process_group({wire!r}, timeout=timedelta(seconds=20))" for name, wire in OURS.items()}
    with EmulatedCluster(nodes=sites, ranks_per_node=1) as cluster:
        ranks = cluster.run(train, [Way(pg, steps=STEPS) for pg in ways.values()], timeout_s=300)
    losses = {
        name: sum(sum(rank[place].losses[-TAIL:]) / TAIL for rank in ranks) / sites for place, name in enumerate(ways)
    }
    return {"sites": sites, "loss": losses, "first": sum(rank[0].losses[0] for rank in ranks) / sites}


def quartiles(values: Sequence[float]) -> str:
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return f"{median(values):.3f} [{low:.3f}, {high:.3f}]"


def ratios(case: dict[str, Any], way: str, other: str) -> list[float]:
    seconds = case["seconds"]
    return [mine / theirs for mine, theirs in zip(seconds[way], seconds[other], strict=True)]


def document(cases: Sequence[dict[str, Any]], losses: Sequence[dict[str, Any]], what: dict[str, str], mib: int) -> str:
    lines = [
        "# Outer synchronisation between sites",
        "",
        f"An all_reduce of {mib} MiB of FP32 over one rank of each site, 50 ms from site to site; median and quartiles of",
        "the rounds' ratios. Emulated on one machine: ratios count, not times.",
        "",
        *(f"- {name}: {value}" for name, value in what.items()),
        "",
        f"| sites | a site's rate | | of Gloo's time | of {GROUPS} Gloo groups' | target | seconds | plan |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        for way in list(case["seconds"])[1:]:
            against = "" if way not in OURS else quartiles(ratios(case, way, WAYS[1]))
            target = f"≤ {TARGETS[way]:g}" if way in TARGETS else ""
            lines.append(
                f"| {case['sites']} | {case['rate']} | {way} | {quartiles(ratios(case, way, 'Gloo'))} | {against} | {target} | "
                f"{median(case['seconds'][way]):.2f} of {median(case['seconds']['Gloo']):.2f} | {case['plans'].get(way, '')} |"
            )
    if not losses:
        return "\n".join(lines) + "\n"
    lines += [
        "",
        f"The loss of a tiny model after {STEPS} steps of DiLoCo, mean of the last {TAIL} steps and of all sites,",
        f"which synchronise every {SYNC_EVERY} steps.",
        "",
        "| sites | at first | Gloo | " + " | ".join(f"{name}: against Gloo" for name in OURS) + " |",
        "|---" * (3 + len(OURS)) + "|",
    ]
    for one in losses:
        loss = one["loss"]
        apart = " | ".join(f"{100 * (loss[name] / loss['Gloo'] - 1):+.3f} %" for name in OURS)
        lines.append(f"| {one['sites']} | {one['first']:.4f} | {loss['Gloo']:.6f} | {apart} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="of each way, in turn (default 3)")
    parser.add_argument("--mib", type=int, default=MIB, help=f"of the tensor (default {MIB})")
    parser.add_argument("--case", help="one of them only, sites and a rate, such as 4x100mbit, and no losses")
    parser.add_argument("--ways", help=f"those of ours to time, of {','.join(OURS)} (default all)")
    parser.add_argument("--quick", action="store_true", help="one case, two sites at 500 Mbit/s, and no losses")
    add_output(parser)
    args = parser.parse_args()
    names = {f"{sites}x{rate}": (sites, rate) for sites, rate in CASES}
    if args.case not in (None, *names):
        parser.error(f"--case must be one of {', '.join(names)}, got {args.case!r}")
    ours = args.ways.split(",") if args.ways else list(OURS)
    if unknown := set(ours) - set(OURS):
        parser.error(f"--ways: there is no {', '.join(sorted(unknown))}; there are {', '.join(OURS)}")
    is_part = args.quick or args.case or args.ways
    load = os.getloadavg()[0]
    losses = [] if is_part else [trained(sites) for sites in (2, 4)]
    cases = []
    for case in [names[args.case]] if args.case else CASES[1:2] if args.quick else CASES:
        cases.append(measured(*case, args.rounds, args.mib, [*WAYS[:2], *ours]))
        print(json.dumps(cases[-1]), file=sys.stderr, flush=True)
    text = document(cases, losses, facts(Path(__file__).name, load), args.mib)
    print(text)
    if not is_part:
        write_results(dated_stem(args.output, "sites"), {"cases": cases, "losses": losses}, text)


if __name__ == "__main__":
    main()
