"""``make bench-compressed``: collectives in BF16 and FP8 against native ones, emulated.

error: of BF16 all_to_all with FP32 sums, and of a BF16 ring, against the FP64 sum, for 2 to 64 ranks.
gradients: 2 × 4 ranks, 400 Mbit/s between the nodes: a reduce_scatter of 32 MiB of FP32 a rank, against torch's on Gloo.
dispatch: the same cluster: an all_to_all of 16 MiB of BF16 a rank in FP8, encoded and decoded, against BF16.
choice: what the planner takes, native, BF16 or FP8, over sizes, on that cluster and inside one node, against each by itself.
memory: what a reduce_scatter of 64 MiB takes beside its tensors, in place and not.
training: 300 steps of a small MoE model, BF16 gradients and FP8 dispatch against native.

What is compared in time runs alternately in one run, after its results were compared. Writes a dated document, JSON and pictures.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import add_output, dated_stem, measure_links, today, write_results
from compressed_document import document
from compressed_parts import (
    CHOICE_SIZES,
    Timed,
    choices,
    dispatches,
    errors_of,
    gradients,
    peaks_of,
    trained,
)
from compressed_pictures import choice_figure, error_figure, training_figure

from commlayer.drawing import save_figure
from commlayer.emulation import EmulatedCluster

PARTS = ("error", "gradients", "dispatch", "choice", "memory", "training")
INTER = "400mbit"
RANKS = (2, 4, 8, 16, 32, 64)
CLUSTERS = {"2x4": (2, 4, INTER), "1x4": (1, 4, None)}
TRAINING = {
    "native": "",
    "bf16 gradients": "dp=bf16!",
    "bf16 gradients, fp8 dispatch": "dp=bf16!,ep=fp8_e4m3!",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="only these; others stay as the JSON has them")
    add_output(parser)
    options = parser.parse_args()
    stem = dated_stem(options.output, "compressed")
    path = stem.with_suffix(".json")
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for part in options.part or PARTS:
        print(f"{part} …", flush=True)
        results[part] = _MEASURES[part]()
        write_results(stem, results, document(today(), results))
    _draw(stem, results)
    print(stem.with_suffix(".md").read_text(encoding="utf-8"))


def _draw(stem: Path, results: dict[str, Any]) -> None:
    for part, figure in (("error", error_figure), ("choice", choice_figure), ("training", training_figure)):
        if part in results:
            save_figure(figure(results[part]), stem.with_name(f"{stem.name}-{part}.svg"))


def measure_error() -> list[dict[str, Any]]:
    found = []
    for ranks in RANKS:
        with EmulatedCluster(1, ranks, mode="loopback") as cluster:
            found.append({"ranks": ranks, **cluster.run(errors_of, timeout_s=300)[0]})
    return found


def on_profile(key: str, measure: Callable[..., list[Timed]], *given: Any) -> list[dict[str, Any]]:
    """``measure`` on a cluster whose links have been measured just before."""
    nodes, ranks, inter = CLUSTERS[key]
    with (
        tempfile.TemporaryDirectory() as folder,
        EmulatedCluster(nodes, ranks, inter=inter, mode="netns") as cluster,
    ):
        profile = f"{folder}/profile.json"
        cluster.run(measure_links, profile, "make bench-compressed", timeout_s=600)
        return [asdict(row) for row in cluster.run(measure, profile, *given, timeout_s=900)[0]]


def measure_choice() -> list[dict[str, Any]]:
    return [{"cluster": key, **row} for key in CLUSTERS for row in on_profile(key, choices, CHOICE_SIZES)]


def measure_memory() -> dict[str, dict[str, int]]:
    found = {}
    for name in ("native", "bf16", "bf16 in place"):
        with EmulatedCluster(1, 4, mode="loopback") as cluster:  # new processes: what is kept between calls counts
            found[name] = cluster.run(peaks_of, name, timeout_s=300)[0]
    return found


def measure_training() -> dict[str, list[float]]:
    found = {}
    for name, wire in TRAINING.items():
        with EmulatedCluster(2, 2, mode="loopback") as cluster:
            found[name] = cluster.run(trained, wire, timeout_s=900)[0]
    return found


_MEASURES: dict[str, Callable[[], Any]] = {
    "error": measure_error,
    "gradients": lambda: on_profile("2x4", gradients),
    "dispatch": lambda: on_profile("2x4", dispatches),
    "choice": measure_choice,
    "memory": measure_memory,
    "training": measure_training,
}


if __name__ == "__main__":
    os.environ.setdefault("COMMLAYER_PROFILE", "none")  # the parts that plan name their own
    main()
