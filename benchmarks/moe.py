"""``make bench-moe``: the MoE layer, planned and overlapped, against plain torch.distributed calls and DeepSpeed's, emulated.

layer: 2 × 4 ranks, 400 Mbit/s between the nodes: the layer forward and backward, with EP over all ranks and inside each node.
kinds: one node: tokens by all_to_all against all_gather and reduce_scatter, for k = 1 to 8, and which one is chosen.
host: what the dispatcher costs without communication, against index_select and index_add.

Everything that is compared runs alternately in one run, after its results were compared. Writes a dated document, JSON and
pictures. With --quick each part takes about a minute, which says whether it works, not how fast it is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from moe_document import Found, document
from moe_host import run_host
from moe_kinds import run_kinds
from moe_layer import INTER, Shape, run_layer
from moe_pictures import breakdown_figure, kinds_figure, layer_figure
from moe_tables import KindRow

import commlayer
import commlayer.backend
import commlayer.measure.calibrate  # before the fork: ranks then start in milliseconds
from commlayer.drawing import save_figure
from commlayer.emulation import EmulatedCluster
from commlayer.measure.profiler import SweepOptions, measure_cluster

RESULTS = Path(__file__).parent / "results"
PARTS = ("host", "kinds", "layer")


@dataclass(frozen=True)
class Effort:
    """Longest times in seconds: ``budget_s`` ends the rounds, ``timeout_s`` the ranks."""

    rounds: int
    budget_s: float
    timeout_s: float


_EFFORTS = {
    False: {
        "layer": Effort(15, 210, 420),
        "kinds": Effort(15, 40, 180),
        "host": Effort(41, 0, 0),
        "sweep": Effort(1, 0, 240),
    },
    True: {
        "layer": Effort(2, 20, 300),
        "kinds": Effort(3, 8, 120),
        "host": Effort(9, 0, 0),
        "sweep": Effort(1, 0, 240),
    },
}
_SWEEP = SweepOptions(min_bytes=4096, max_bytes=16 << 20, factor=4.0, group_max_bytes=32 << 20, longest_us=1.5e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be given again")
    parser.add_argument("--quick", action="store_true", help="few rounds: whether it works")
    parser.add_argument(
        "--profile",
        choices=("sweep", "auto"),
        default="sweep",
        help="plan by a sweep like that of `commlayer \
profile` (default), or by the short probe that a job makes by itself",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="where to write the numbers (default: beside the document)"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, metavar="DIR", help="folder to write to (benchmarks/results)"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    stem = options.out / f"{date}-moe"
    found, began, failed = Found(), time.perf_counter(), 0
    for part in PARTS:
        if options.part is None or part in options.part:
            print(f"{part}: since {time.perf_counter() - began:.0f} s", flush=True)
            try:
                _RUN[part](found, options)
            except Exception as error:  # noqa: BLE001  one part must not lose the others
                failed += 1
                print(f"{part}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                found.failed[part] = f"{type(error).__name__}: {' '.join(str(error).splitlines()[:2])}"
    pictures = _pictures(found, stem)
    facts = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release().split('-')[0]}",
        "load before": f"{_LOAD[0]:.1f} processes on average over the last minute",
        "versions": f"commlayer {commlayer.__version__}, torch {torch.__version__} (Gloo), Python {platform.python_version()}",
        "command": " ".join(["python", "benchmarks/moe.py", *sys.argv[1:]]),
        "took": f"{time.perf_counter() - began:.0f} s",
    }
    path = options.json or stem.with_suffix(".json")
    path.write_text(json.dumps({"date": date, "facts": facts} | asdict(found), indent=1) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(document(date, facts, found, pictures), encoding="utf-8")
    print(stem.with_suffix(".md").read_text(encoding="utf-8"))
    sys.exit(1 if failed else 0)


_LOAD = os.getloadavg()


def _host(found: Found, options: argparse.Namespace) -> None:
    found.host = run_host(_EFFORTS[options.quick]["host"].rounds)


def _kinds(found: Found, options: argparse.Namespace) -> None:
    effort = _EFFORTS[options.quick]["kinds"]
    for ranks in (4, 8):

        def run(profile: str, ranks: int = ranks) -> list[KindRow]:
            return run_kinds(ranks, range(1, 9), profile, effort.rounds, effort.budget_s, effort.timeout_s)

        found.kinds += _profiled(found, options, (1, ranks), run)


def _layer(found: Found, options: argparse.Namespace) -> None:
    effort = _EFFORTS[options.quick]["layer"]
    found.layer = _profiled(
        found,
        options,
        (2, 4),
        lambda profile: run_layer(Shape(), profile, effort.rounds, effort.budget_s, effort.timeout_s),
    )


_RUN: dict[str, Callable[[Found, argparse.Namespace], None]] = {"host": _host, "kinds": _kinds, "layer": _layer}


def _profiled(found: Found, options: argparse.Namespace, nodes: tuple[int, int], run: Callable[[str], Any]) -> Any:
    """``run`` with a profile of a cluster of ``nodes``, measured now: what a job finds in its cache may be of another day."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["COMMLAYER_CACHE"] = folder
        if options.profile == "auto":
            return run("auto")
        path = f"{folder}/profile.json"
        inter = INTER if nodes[0] > 1 else None
        with EmulatedCluster(*nodes, inter=inter, mode="netns") as cluster:
            took_s = cluster.run(_sweep, path, timeout_s=_EFFORTS[options.quick]["sweep"].timeout_s)[0]
        found.sweeps[f"{nodes[0]}x{nodes[1]}"] = took_s
        print(f"links of {nodes[0]}x{nodes[1]} measured in {took_s:.0f} s", flush=True)
        return run(path)


def _sweep(path: str) -> float:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    begin = time.perf_counter()
    profile = measure_cluster(_SWEEP, name="bench-moe", kind="emulated", source="make bench-moe")
    if dist.get_rank() == 0:
        profile.save(path)
    return time.perf_counter() - begin


def _pictures(found: Found, stem: Path) -> dict[str, str]:
    figures = {}
    if found.layer is not None:
        shape = f"2×4 ranks emulated, hidden {found.layer.shape.hidden}, expert width {found.layer.width}"
        figures["breakdown"] = breakdown_figure(found.layer.breakdowns, f"Where the MoE layer's time goes: {shape}")
        rows = [row for row in found.layer.rows if row.width == found.layer.width]
        figures["layer"] = layer_figure(rows, f"MoE layer: {shape}")
    if found.kinds:
        figures["kinds"] = kinds_figure(found.kinds, "Tokens to experts inside one emulated node, by k")
    names = {}
    for name, figure in figures.items():
        path = stem.with_name(f"{stem.name}-{name}.svg")
        save_figure(figure, path)
        names[name] = path.name
    return names


if __name__ == "__main__":
    main()
