"""``make bench-mappings``: steps of a small MoE model on 12 mappings, measured on an emulated cluster, and the simulated step.

The simulator gets the curves of the groups that the mappings use, and the times of products, attention and whole layers on one
rank without any sending. Nothing is fitted to a step. Writes a dated document, JSON with all that was measured, and a picture.
``--predict FILE`` predicts again from such a JSON file, and measures nothing.

With ``--compute RATE`` each rank stands for an accelerator, gradients are summed beside the backward pass, and calls are on
lanes, in the steps and in their prediction. ``--part FILE`` measures for ``--budget-s`` seconds what that file lacks yet, and
writes it there; once all is there, the document. ``--curves-from FILE``: those of an earlier run, of the same wires.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from mappings_job import BATCH, CASES, GPUS, MODEL, NODES, OVERLAPPED, RANKS, SEQUENCE, SOFTWARE, Case, shapes_of
from mappings_pictures import steps_figure
from mappings_predict import RankCompute, Row, as_json, cluster_of, fitted, layer_errors, predict, spearman
from mappings_ranks import ComputeTimes, Layer, run_compute, run_curves, run_steps

import commlayer
import commlayer.backend
import commlayer.measure.calibrate  # before the fork: ranks then start in milliseconds
from commlayer.drawing import save_figure
from commlayer.emulation import EmulatedCluster

RESULTS = Path(__file__).parent / "results"
RATE = "100mbit"
_RATE_GBPS = 0.0125
_MOST_ERROR, _LEAST_RANK = 0.15, 0.9
_MOST_ERROR_OVERLAPPED, _LEAST_RANK_OVERLAPPED = 0.2, 0.95
_MAX_BYTES = 4 << 20
_LOAD = os.getloadavg()


@dataclass(frozen=True)
class Effort:
    """Steps of each case, and seconds of each point of computation."""

    steps: int
    compute_s: float


_EFFORTS = {False: Effort(7, 0.5), True: Effort(2, 0.1)}


@dataclass(frozen=True)
class Measured:
    """``steps``: µs of every step of each case, in their order. ``curves``: profiles, by shape. ``compute``: before the steps and
    after them."""

    steps: list[list[float]]
    curves: dict[str, str]
    compute: list[ComputeTimes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps: whether it works")
    parser.add_argument("--predict", type=Path, metavar="FILE", help="predict again from the JSON of an earlier run")
    parser.add_argument(
        "--compute", default="", metavar="RATE", help="of the accelerator of each rank, such as 3gflops"
    )
    parser.add_argument("--part", type=Path, metavar="FILE", help="measure a part of what this file lacks, into it")
    parser.add_argument("--budget-s", type=float, default=60.0, help="begin nothing more after so many seconds (60)")
    parser.add_argument("--curves-from", type=Path, metavar="FILE", help="take the curves of this result")
    parser.add_argument(
        "--output", type=Path, default=RESULTS, metavar="DIR", help="folder to write to (benchmarks/results)"
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    if options.predict:
        content = json.loads(options.predict.read_text(encoding="utf-8"))
        date, facts, measured = content["date"], content["facts"], _from_json(content["measured"])
        accelerator = content.get("compute", "")
    else:
        date, accelerator = datetime.now(timezone.utc).strftime("%Y-%m-%d"), options.compute
        effort = _EFFORTS[options.quick]
        if options.part is None:
            measured = measure(effort, accelerator)
        else:
            found = measure_part(options.part, effort, accelerator, options.budget_s, options.curves_from)
            if found is None:
                return
            measured = found
        facts = _facts(time.perf_counter() - began)
    compute = fitted(_mean(measured.compute))
    software = OVERLAPPED if accelerator else SOFTWARE
    rows = predict(_cases(accelerator), measured.steps, cluster_of(measured.curves), compute, software)
    stem = options.output / f"{date}-mappings{'-accelerators' if accelerator else ''}"
    save_figure(
        steps_figure(rows, f"Predicted and measured steps: 2×4 ranks emulated, {RATE} a node"), stem.with_suffix(".svg")
    )
    result = {"rows": as_json(rows), "spearman": spearman(rows), "within": _within(rows, _target(accelerator))}
    compute_found = {"compute": accelerator, "kernel_us": compute.kernel_us, "byte_us": compute.byte_us}
    content = {"date": date, "facts": facts, **result, **compute_found, "measured": asdict(measured)}
    stem.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    text = document(date, facts, rows, measured, compute, stem.name, accelerator)
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


def _cases(accelerator: str) -> list[Case]:
    return [replace(case, overlaps=bool(accelerator)) for case in CASES]


def _target(accelerator: str) -> float:
    return _MOST_ERROR_OVERLAPPED if accelerator else _MOST_ERROR


def measure_part(
    path: Path, effort: Effort, accelerator: str, budget_s: float, curves_from: Path | None
) -> Measured | None:
    """Measure what is missing in ``path`` for so long, and return its content when all is there; None: not yet, and what is there
    is said. For a machine of which nobody has ten minutes at once."""
    began = time.perf_counter()
    kept: dict[str, Any] = {"curves": {}, "compute": [], "steps": {}}
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
    elif curves_from is not None:
        kept["curves"] = json.loads(curves_from.read_text(encoding="utf-8"))["measured"]["curves"]
    cases = _cases(accelerator)
    tasks = list(_missing(kept, cases, effort))
    left = len(tasks)
    for task in tasks:
        if time.perf_counter() - began > budget_s:
            break
        with _cluster(accelerator) as cluster:
            task(cluster)
        left -= 1
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {left} measurements are missing", flush=True)
    if left:
        return None
    steps = [kept["steps"][case.name] for case in cases]
    return _from_json({"steps": steps, "curves": kept["curves"], "compute": kept["compute"]})


def _missing(
    kept: dict[str, Any], cases: Sequence[Case], effort: Effort
) -> Iterator[Callable[[EmulatedCluster], None]]:
    """The measurements that are missing, each of which puts what it has found into ``kept``."""
    for name, groups in shapes_of(CASES).items():
        if name not in kept["curves"]:
            yield partial(_measure_curves, kept, {name: groups})
    if not kept["compute"]:
        yield partial(_measure_compute, kept, effort)
    for case in cases:
        if case.name not in kept["steps"]:
            yield partial(_measure_steps, kept, case, effort)


def _measure_curves(kept: dict[str, Any], shapes: dict[str, list[tuple[int, ...]]], cluster: EmulatedCluster) -> None:
    kept["curves"] |= cluster.run(run_curves, shapes, _MAX_BYTES, _RATE_GBPS, timeout_s=600)[0]


def _measure_compute(kept: dict[str, Any], effort: Effort, cluster: EmulatedCluster) -> None:
    kept["compute"].append(asdict(cluster.run(run_compute, effort.compute_s, timeout_s=300)[0]))


def _measure_steps(kept: dict[str, Any], case: Case, effort: Effort, cluster: EmulatedCluster) -> None:
    kept["steps"][case.name] = cluster.run(run_steps, [case], effort.steps, 1, timeout_s=900)[0][0]


def _cluster(accelerator: str) -> EmulatedCluster:
    return EmulatedCluster(NODES, RANKS, inter=RATE, mode="netns", compute=accelerator or None)


def measure(effort: Effort, accelerator: str = "") -> Measured:
    """Some minutes."""
    began = time.perf_counter()

    def say(what: str) -> None:
        print(f"{what}: since {time.perf_counter() - began:.0f} s", flush=True)

    with _cluster(accelerator) as cluster:
        say("curves")
        curves = cluster.run(run_curves, shapes_of(CASES), _MAX_BYTES, _RATE_GBPS, timeout_s=600)[0]
        say("computation")
        before = cluster.run(run_compute, effort.compute_s, timeout_s=300)[0]
        say("steps")
        steps = cluster.run(run_steps, _cases(accelerator), effort.steps, 1, timeout_s=900)[0]
        say("computation")
        after = cluster.run(run_compute, effort.compute_s, timeout_s=300)[0]
    return Measured(steps, curves, [before, after])


def _mean(found: Sequence[ComputeTimes]) -> ComputeTimes:
    def points(name: str) -> list[tuple[float, float]]:
        each = [getattr(times, name) for times in found]
        return [(same[0][0], sum(us for _, us in same) / len(same)) for same in zip(*each, strict=True)]

    layers = [
        Layer(
            first.sequence,
            first.batch,
            first.experts,
            first.top_k,
            sum(layer.forward_us for layer in (first, *rest)) / len(found),
            sum(layer.backward_us for layer in (first, *rest)) / len(found),
        )
        for first, *rest in zip(*(times.layers for times in found), strict=True)
    ]
    return ComputeTimes(points("products"), points("core_forward"), points("core_backward"), layers)


def _from_json(content: dict[str, Any]) -> Measured:
    compute = [
        ComputeTimes(
            **{
                name: [(flops, us) for flops, us in each[name]]
                for name in ("products", "core_forward", "core_backward")
            },
            layers=[Layer(**layer) for layer in each["layers"]],
        )
        for each in content["compute"]
    ]
    return Measured(content["steps"], content["curves"], compute)


def _facts(took_s: float) -> dict[str, str]:
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release().split('-')[0]}",
        "load before": f"{_LOAD[0]:.1f} processes on average over the last minute",
        "versions": f"commlayer {commlayer.__version__}, torch {torch.__version__} (Gloo), Python {platform.python_version()}",
        "command": " ".join(["python", "benchmarks/mappings.py", *sys.argv[1:]]),
        "took": f"{took_s:.0f} s",
    }


def _within(rows: Sequence[Row], most_error: float) -> int:
    return sum(abs(row.error) <= most_error for row in rows)


def document(
    date: str,
    facts: dict[str, str],
    rows: Sequence[Row],
    measured: Measured,
    compute: RankCompute,
    name: str,
    accelerator: str,
) -> str:
    """The whole result as Markdown."""
    errors, most_error = [abs(row.error) for row in rows], _target(accelerator)
    missed = [f"{row.name} ({row.error:+.1%})" for row in rows if abs(row.error) > most_error]
    rank, least_rank = spearman(rows), _LEAST_RANK_OVERLAPPED if accelerator else _LEAST_RANK
    lines = [
        f"# Predicted and measured steps, {date}",
        "",
        *_of_what(accelerator),
        "",
        *[f"- {key}: {value}" for key, value in facts.items()],
        "",
        f"The model: {MODEL.layers} layers, hidden {MODEL.hidden}, {MODEL.heads} heads ({MODEL.kv_heads} of keys),",
        f"{MODEL.experts} experts of width {MODEL.width}, {MODEL.top_k} a token, FP32; {BATCH} sequences of {SEQUENCE} tokens a",
        f"step on {GPUS} ranks. Rows are padded to a capacity of 1.0. Every call is the backend's own (flat).",
        "Gradients are summed beside the backward pass, calls are on lanes." if accelerator else "Nothing overlaps.",
        "A step ends with the sums of gradients: there is no optimizer in it.",
        "",
        f"Of {len(rows)} mappings **{_within(rows, most_error)} are predicted within {most_error:.0%}** (target: all), median",
        f"error {median(errors):.1%}, largest {max(errors):.1%}; Spearman's rank correlation **{rank:.3f}** (target",
        f"{least_rank}).",
        f"Missed: {', '.join(missed) or 'none'}." + ("" if rank >= least_rank else " The ranking is missed too."),
        "",
        "| mapping | folded | measured, ms | predicted, ms | error | computed | tokens' exchanges | tp, cp, pp | gradients |",
        "|---|---|---|---|---|---|---|---|---|",
        *map(_line, rows),
        "",
        f"![predicted and measured]({name}.svg)",
        "",
        "## What the prediction knows",
        "",
        "Curves of every shape of group that the mappings have",
        "(`benchmarks/shape_profiles.py`), all groups of a",
        f"shape at once: {', '.join(measured.curves)} (nodes × ranks on each). Computation, all ranks at once and nothing sent:",
        "products of six sizes; the attention's core of five, forward and backward; and five whole layers, from which two",
        f"numbers come: {compute.kernel_us:.0f} µs for each of the kernels that memory bounds, and",
        f"{1e-3 / max(compute.byte_us, 1e-9):.2f} GB/s. No number comes from a step.",
        "",
        "| layer alone | measured, ms | said, ms |",
        "|---|---|---|",
        *_layer_lines(measured, compute),
        "",
        f"Between its two measurements, before the steps and after them, computation changed by {_drift(measured):.1%} (median).",
        "",
    ]
    return "\n".join(lines)


def _of_what(accelerator: str) -> list[str]:
    where = f"Emulated: {NODES} nodes of {RANKS} ranks on one machine, {RATE} of wire each."
    if accelerator:
        return [
            f"{where} NOT a measurement of accelerators: products last their",
            f"FLOPs over {accelerator}, and hold no core.",
        ]
    return [where, "Each node has its own core. Real processes and bytes, a slow wire."]


def _line(row: Row) -> str:
    def of(*names: str) -> str:
        return f"{sum(row.parts_ms.get(name, 0.0) for name in names):.0f}"

    low, high = row.quartiles_ms
    work = of("attention", "experts", "dense", "memory", "head")
    sent = (of("dispatch", "combine"), of("tp", "cp", "pp", "bubble"), of("gradients"))
    cells = [
        row.name,
        "yes" if row.folded else "",
        f"{row.measured_ms:.0f} [{low:.0f}, {high:.0f}]",
        f"{row.predicted_ms:.0f}",
        f"{row.error:+.1%}",
        work,
        *sent,
    ]
    return f"| {' | '.join(cells)} |"


def _layer_lines(measured: Measured, compute: RankCompute) -> list[str]:
    times = _mean(measured.compute)
    said = layer_errors(times, compute)
    return [
        f"| {layer.batch} × {layer.sequence} tokens, {layer.experts} experts | {real / 1e3:.1f} | {ours / 1e3:.1f} |"
        for layer, (real, ours) in zip(times.layers, said, strict=True)
    ]


def _drift(measured: Measured) -> float:
    before, after = measured.compute[0], measured.compute[-1]
    pairs = zip(
        [us for _, us in (*before.products, *before.core_forward, *before.core_backward)],
        [us for _, us in (*after.products, *after.core_forward, *after.core_backward)],
        strict=True,
    )
    return median(abs(b / a - 1) for a, b in pairs)


if __name__ == "__main__":
    main()
