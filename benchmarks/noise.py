"""``make bench-noise``: minutes of noise and no change of any link, after which plans must be what they were.

Mixed collectives on an emulated cluster of 400 Mbit/s a node, while processes that come and go keep the cores busy and the delay
between nodes wanders by up to 30 % to either side, every tenth of a second to four seconds. Whatever the watch finds then is no
change of a link: plans that are made anew for other rates are false switches, of which there have to be none. What it measured in
vain, and plans that it tried, are counted too. ``--json FILE`` has the events. The status is 1 where there was a false switch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import facts
from replan import FAST, a_round, call

import commlayer
import commlayer.auditing.watch  # before the fork, as the next ones: ranks then start in milliseconds
import commlayer.measure.calibrate
import commlayer.measure.link_times
from commlayer.emulation import EmulatedCluster

DELAY_US, LATENCY_CHANGE = 200.0, 0.3
_LONGEST_BURST_S, _MOST_BUSY = 4.0, 3
_BUSY = "import sys, time\nuntil = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < until: pass"
_SWITCHED = "plans are made anew"


class Noise:
    """Noise for as long as it is entered: busy processes, and another delay now and then."""

    def __init__(self, cluster: EmulatedCluster, seed: int) -> None:
        self._cluster, self._rng = cluster, random.Random(seed)
        self._busy: list[subprocess.Popen[bytes]] = []
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._keep_busy, self._wander)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        for process in self._busy:
            process.kill()
            process.wait()

    def _keep_busy(self) -> None:
        rng = random.Random(self._rng.random())
        while not self._is_over.wait(rng.uniform(0.1, _LONGEST_BURST_S)):
            self._busy = [process for process in self._busy if process.poll() is None]
            if len(self._busy) < _MOST_BUSY:
                seconds = rng.uniform(0.1, _LONGEST_BURST_S)
                self._busy.append(subprocess.Popen([sys.executable, "-S", "-c", _BUSY, str(seconds)]))

    def _wander(self) -> None:
        rng = random.Random(self._rng.random())
        while not self._is_over.wait(rng.uniform(0.1, _LONGEST_BURST_S)):
            self._cluster.delay(DELAY_US * (1.0 + rng.uniform(-LATENCY_CHANGE, LATENCY_CHANGE)))


def job(seconds: float, sizes: list[int], cache: str) -> dict[str, Any]:
    """One rank: calls for so long, and what happened to plans meanwhile."""
    torch.set_num_threads(1)
    os.environ["COMMLAYER_CACHE"] = cache
    dist.init_process_group("commlayer", timeout=timedelta(seconds=120))
    until, num_calls = time.monotonic() + seconds, 0
    is_on = torch.ones(1)
    while is_on.item():
        for name, num_bytes in a_round(sizes):
            call(name, num_bytes)
            num_calls += 1
        is_on.fill_(time.monotonic() < until)
        dist.broadcast(is_on, 0)
    groups = commlayer.audit()["groups"]
    events = groups[0]["events"] if groups else []
    dist.destroy_process_group()
    return {"calls": num_calls, "events": events}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="2x4", help="nodes × ranks of a node (default 2x4)")
    parser.add_argument("--seconds", type=float, default=600.0, help="of noise (default 600)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 1024, 4096], help="sizes of the tensors in KiB")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all events there, too")
    arguments = parser.parse_args()
    nodes, ranks = map(int, arguments.cluster.split("x"))
    sizes = [kib << 10 for kib in arguments.kib]
    about = facts("noise.py", os.getloadavg()[0])
    with (
        tempfile.TemporaryDirectory() as cache,
        EmulatedCluster(nodes, ranks, inter=FAST, delay_us=DELAY_US) as cluster,
    ):
        cluster.run(job, 0.0, sizes, cache, timeout_s=300.0)  # which measures the links, before there is noise
        with Noise(cluster, arguments.seed):
            results = cluster.run(job, arguments.seconds, sizes, cache, timeout_s=arguments.seconds + 300.0)
    events = results[0]["events"]
    num_false = sum(_SWITCHED in event["what"] for event in events)
    print(*(f"{name}: {value}" for name, value in about.items()), sep="\n")
    print(
        f"{results[0]['calls']} calls in {arguments.seconds:g} s of noise: {num_false} false switches, {len(events)} events"
    )
    for event in events:
        print(f"before call {event['call']}: {event['what']}")
    if arguments.json:
        arguments.json.write_text(json.dumps(about | {"ranks": results}, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if num_false else 0)


if __name__ == "__main__":
    main()
