"""Placements of experts: how long a solution takes, and what ways of placing predict to gain under synthetic loads (no cluster).

    make bench-placement

Solutions and EPLB's are timed alternately, also by the time of the processor, which other work on the machine disturbs less.
Steps are predicted, by the declared links of a cluster that nobody needs to have; the oracle decides by what the loads will be
until its next decision, with the same candidates.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import quantiles
from typing import Any

from common import add_output, dated_stem, machine, write_results

from commlayer.scheduler.mapping import clusters
from commlayer.scheduler.placement.eplb import eplb_placement
from commlayer.scheduler.placement.load_replay import REPLAY_WAYS, LoadReplay, replay_loads
from commlayer.scheduler.placement.placement_price import ExpertWork, PlacementPrices
from commlayer.scheduler.placement.placing import PlacementRoom, place
from examples.synthetic_loads import LOAD_KINDS, synthetic_loads

CLUSTER, HIDDEN, WIDTH, TFLOPS = "h100-eos", 2048, 1408, 400.0
TOKENS = 4096
REPEATS = 30
STEPS, EVERY, PERIOD = 256, 16, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of each solution (default %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each load that is run again (default %(default)s)")
    given = parser.parse_args()
    solved, replayed = solutions(given.repeats), replays(given.steps)
    content = {"machine": machine(), "solutions": solved, "replays": replayed}
    write_results(dated_stem(given.output, "placement"), content, document(solved, replayed))


def solutions(repeats: int) -> list[dict[str, Any]]:
    """Time solutions for 256 experts on 64 ranks, one layer and 64; in turn."""
    work = ExpertWork.of_shape(HIDDEN, WIDTH, tflops=TFLOPS)
    profile = clusters.load(CLUSTER).profile_of((8,) * 8)
    prices = PlacementPrices(profile, work)
    loads = synthetic_loads("zipf", experts=256, layers=64, steps=4, tokens=TOKENS * 64, exponent=0.6).window(4)
    one = loads[:1]

    def solved(counts: Any, spare: int) -> Callable[[], object]:
        room = PlacementRoom(spare * work.copy_bytes)
        return lambda: place(counts, profile, 200, work=work, top_k=8, room=room, prices=prices)

    tasks = {
        "EPLB, one layer": lambda: eplb_placement(one[0], 256, 64),
        "one layer": solved(one, 0),
        "one layer, a replica's room on each rank": solved(one, 1),
        "64 layers": solved(loads, 0),
        "64 layers, a replica's room on each rank": solved(loads, 1),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in tasks}
    for turn in range(repeats + 1):
        for name, task in tasks.items():
            if name.startswith("64") and turn > max(4, repeats // 6):
                continue
            began, began_cpu = time.perf_counter(), time.process_time()
            task()
            if turn:  # the first one loads
                times[name].append(((time.perf_counter() - began) * 1e3, (time.process_time() - began_cpu) * 1e3))
    found = []
    for name, taken in times.items():
        row: dict[str, Any] = {"what": name, "samples": len(taken)}
        for kind, values in zip(("", "cpu_"), zip(*taken, strict=True), strict=True):
            row[f"{kind}low_ms"], row[f"{kind}ms"], row[f"{kind}high_ms"] = quantiles(values, n=4, method="inclusive")
        found.append(row)
    return found


def replays(steps: int) -> list[dict[str, Any]]:
    """Run each kind of load again under each way of placing, 64 experts on 16 ranks of two nodes."""
    work = ExpertWork.of_shape(HIDDEN, WIDTH, tflops=TFLOPS)
    prices = PlacementPrices(clusters.load(CLUSTER).profile_of((8, 8)), work)
    found = []
    for kind in LOAD_KINDS:
        for spare in (0, 1):
            loads = synthetic_loads(
                kind,  # type: ignore[arg-type]
                experts=64,
                steps=steps,
                tokens=TOKENS * 16,
                top_k=6,
                period=PERIOD,
                seed=1,
            )
            room = PlacementRoom(spare * work.copy_bytes)
            ways: dict[str, LoadReplay] = {}
            for way in REPLAY_WAYS:
                ways[way] = replay_loads(loads, prices, way, every=EVERY, room=room)  # type: ignore[arg-type]
            static = ways["static"].total_us
            row: dict[str, Any] = {"kind": kind, "spare": spare, "static_ms": static / steps / 1e3}
            row |= {way: each.total_us / static for way, each in ways.items()}
            row["lost"] = ways["place"].total_us / ways["oracle"].total_us - 1
            row["migrations"] = ways["place"].num_migrations
            row["migration"] = ways["place"].migration_us / ways["place"].total_us
            found.append(row)
    return found


def document(solved: list[dict[str, Any]], replayed: list[dict[str, Any]]) -> str:
    lines = [
        "# Placement of experts",
        "",
        f"Written by `make bench-placement`. {machine()}",
        "",
        "## How long a solution takes",
        "",
        "256 experts on 64 ranks, 8 on each of 8 nodes, Zipf 0.6. One core. Medians, and quartiles in brackets. Times of",
        "the processor are those of an idle machine, more or less; the others also wait for what else runs.",
        "",
        "| what | ms | ms of the processor |",
        "|---|---|---|",
    ]
    for row in solved:
        times = (
            f"{row[f'{kind}ms']:.2f} [{row[f'{kind}low_ms']:.2f}–{row[f'{kind}high_ms']:.2f}]" for kind in ("", "cpu_")
        )
        lines.append(f"| {row['what']} | {' | '.join(times)} |")
    lines += [
        "",
        "## What placing is predicted to gain",
        "",
        f"64 experts on 2 nodes of 8 ranks, top-6, {TOKENS} tokens a rank, experts of {HIDDEN} × {WIDTH} at",
        f"{TFLOPS:g} TFLOP/s, links as declared of {CLUSTER}; a decision every {EVERY} steps, which has to pay back in as many.",
        "Nothing was run: all times are predicted, over those of experts that stay in order. LLEP's rule sees each step's own",
        "load, has its authors' thresholds, and sends weights and their gradients in every step in which rows spill. Lost to the",
        "oracle is what a decision by forecast loses against one that knows the future.",
        "",
        "| loads | room for replicas | static | EPLB | LLEP | ours | oracle | migrations | of the time | lost to the oracle |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in replayed:
        ratios = " | ".join(f"{row[way]:.3f}" for way in ("eplb", "llep", "place", "oracle"))
        lines.append(
            f"| {row['kind']} | {row['spare']} | {row['static_ms']:.2f} ms | {ratios} | {row['migrations']} | "
            f"{row['migration']:.2%} | {row['lost']:.1%} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
