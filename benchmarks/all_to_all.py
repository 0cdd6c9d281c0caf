"""``make bench``: the all_to_all of replicated tokens on emulated clusters, written up as a dated document and JSON.

For each cluster: measure it, then run every candidate plan (in our form and in MoNTA's), torch.distributed's flat
all_to_all, DeepSpeed's drop/gather and MoNTA's released fixed chunks, alternately in one run. About half an hour on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import msgspec
from baselines import BASELINES
from common import add_output, dated_stem, machine, today, versions

from commlayer.cli.bench import bench_job
from commlayer.cli.place import Place, place_of, run_job
from commlayer.measure.benchmark import BenchOptions
from commlayer.measure.results import BenchPoint, BenchResult, BenchRow
from commlayer.profiles.profile import Profile
from commlayer.scheduler.plan import Gather
from commlayer.units import format_bytes, format_us

SIZES = tuple(2**k for k in range(16, 26))


@dataclass(frozen=True)
class Cluster:
    """``key`` names its files. ``target``: chosen / flat at 16 MiB that was promised, where something was."""

    key: str
    shape: str
    inter: str
    intra: str | None
    words: str
    target: float | None = None


CLUSTERS = (
    Cluster("2x4", "2x4", "400mbit", None, "links inside a node as fast as loopback is", 0.24),
    Cluster("2x4-8to1", "2x4", "400mbit", "3200mbit", "intra eight times inter, the ratio of MoNTA's A800 cluster"),
    Cluster("2x8", "2x8", "400mbit", None, "links inside a node as fast as loopback is", 0.16),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cluster", action="append", choices=[c.key for c in CLUSTERS], help="only these (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds a size, at least (default 5)")
    add_output(parser)
    options = parser.parse_args()
    wanted = [c for c in CLUSTERS if not options.cluster or c.key in options.cluster]
    date = today()
    stem = dated_stem(options.output, "all-to-all")
    found: list[tuple[Cluster, Profile, BenchResult]] = []
    for cluster in wanted:
        profile, result = measured(cluster, options.rounds)
        found.append((cluster, profile, result))
        # After each cluster: what has been measured must not be lost to what fails later.
        profile.save(options.output / f"{date}-{cluster.key}-profile.json")
        draw(result, options.output / f"{date}-{cluster.key}.svg")
        content = {each.key: msgspec.to_builtins(points) for each, _, points in found}
        stem.with_suffix(".json").write_bytes(msgspec.json.encode(content) + b"\n")
        stem.with_suffix(".md").write_text(document(date, found), encoding="utf-8")
    print(stem.with_suffix(".md").read_text(encoding="utf-8"))


def measured(cluster: Cluster, rounds: int) -> tuple[Profile, BenchResult]:
    print(f"{cluster.key}: measuring, then running every way of {len(SIZES)} sizes", flush=True)
    place = place_of(cluster.shape, cluster.inter, cluster.intra, delay=0.0, timeout=1800e6)
    if place.inter is None:
        raise SystemExit("this machine grants no network namespaces: there are no shaped links to benchmark")
    options = BenchOptions(SIZES, rounds, gathers=tuple(Gather), baselines=BASELINES)
    found = run_job(replace(place, timeout_s=1800.0), job, options, place, f"emulated-{cluster.key}")
    if found is None:
        raise SystemExit("run this once, not under torchrun: it starts its own ranks")
    return found


def job(options: BenchOptions, place: Place, name: str) -> tuple[Profile, BenchResult]:
    profile, result, _ = bench_job(None, options, place)
    return profile.replace(name=name), result


def draw(result: BenchResult, path: Path) -> None:
    from commlayer.drawing import bench_figure, save_figure

    save_figure(bench_figure(result), path)


def document(date: str, found: Sequence[tuple[Cluster, Profile, BenchResult]]) -> str:
    """The write-up: set-up, targets, then a table for each cluster."""
    rounds = [min(row.rounds for row in point.rows) for _, _, result in found for point in result.points]
    least, most = min(rounds), max(rounds)
    ratio_most = max(row.ratio_rounds for _, _, result in found for point in result.points for row in point.rows)
    lines = [
        f"# all_to_all of replicated tokens, emulated, {date}",
        "",
        "Made by `make bench`. Emulated clusters on one machine: real processes and bytes, wires slowed to 400 Mbit/s a node and",
        "direction. All ranks share the machine's cores, so quote the ratios, not the times.",
        "",
        f"- machine: {machine()}",
        f"- versions: {versions()}",
        "- tokens: bf16, replicated over the ranks of a node (TP = ranks per node, EP = nodes); sizes are bytes a rank",
        "- each way is first compared with torch.distributed's result, byte for byte; then all run alternately, in a new order",
        f"  each round; {least} to {most} rounds, more for small sizes; the ratio of the chosen plan rests on up to",
        f"  {ratio_most}, in most of which it and torch's own run alone, short calls several in a row",
        "- `whole`: the form of the plans that MoNTA describes, which gathers and copies the whole tensor",
        "- times are medians over rounds of the slowest rank; a ratio is the median over rounds of time / torch's flat time of",
        "  the same round, with the quartiles in brackets",
        "",
        "## Targets",
        "",
        "| what | " + " | ".join(cluster.key for cluster, _, _ in found) + " | target |",
        "|---" * (len(found) + 2) + "|",
    ]
    lines += [f"| {what} | " + " | ".join(values) + f" | {target} |" for what, values, target in targets(found)]
    for cluster, profile, result in found:
        lines += [
            "",
            f"## {cluster.key}: {cluster.words}",
            "",
            f"![time and ratio over size]({date}-{cluster.key}.svg)",
            "",
        ]
        lines += [
            f"Profile: [{profile.name}]({date}-{cluster.key}-profile.json), hold-out error {profile.error:.1%}.",
            "",
        ]
        lines += table(result)
    return "\n".join(lines) + "\n"


def targets(found: Sequence[tuple[Cluster, Profile, BenchResult]]) -> list[tuple[str, list[str], str]]:
    """The promises of the project's first part, as measured."""
    points = [result.points for _, _, result in found]
    large = [next(p for p in each if p.logical_bytes == 16 << 20) for each in points]
    promised = [f"≤ {cluster.target} ({cluster.key})" for cluster, _, _ in found if cluster.target is not None]
    overhead = [[p.chosen.p50_us / p.best.p50_us for p in each] for each in points]
    errors = [[abs(e) for p in each if (e := p.chosen.error) is not None] for each in points]
    return [
        ("chosen / flat, 16 MiB", [f"{p.chosen.ratio:.3f} ({p.chosen.name})" for p in large], ", ".join(promised)),
        ("wire limit / flat, 16 MiB", [limit_ratio(p) for p in large], ""),
        ("chosen / flat, worst size", [f"{max(p.chosen.ratio for p in each):.3f}" for each in points], "≤ 1.05"),
        ("chosen / best candidate, median", [f"{median(each):.3f}" for each in overhead], "≤ 1.05"),
        ("chosen / best candidate, worst", [f"{max(each):.3f}" for each in overhead], "≤ 1.20"),
        ("predicted against measured, chosen, median", [f"{median(each):.1%}" for each in errors], "≤ 15 %"),
        ("predicted against measured, chosen, worst", [f"{max(each):.1%}" for each in errors], ""),
        ("wrong bytes, all ways and sizes", [str(wrong(each)) for each in points], "0"),
    ]


def limit_ratio(point: BenchPoint) -> str:
    return "" if point.wire_limit_us is None else f"{point.wire_limit_us / point.torch.p50_us:.3f}"


def wrong(points: Sequence[BenchPoint]) -> int:
    return sum(row.num_wrong for point in points for row in point.rows)


def table(result: BenchResult) -> list[str]:
    """One line a size: what was chosen, how it did, and the other ways as ratios to torch's flat all_to_all."""
    baselines = [row.name for row in result.points[-1].rows if row.kind == "baseline"]
    lines = [
        "| size | torch flat | wire limit | chosen | predicted | measured | chosen / flat | best candidate | "
        "best of MoNTA's form | " + " | ".join(f"{name} / flat" for name in baselines) + " |",
        "|---" * (9 + len(baselines)) + "|",
    ]
    for point in result.points:
        chosen, best = point.chosen, point.best
        others = {row.name: row for row in point.rows}
        cells = [
            format_bytes(point.logical_bytes),
            format_us(point.torch.p50_us),
            "" if point.wire_limit_us is None else format_us(point.wire_limit_us),
            chosen.name,
            format_us(chosen.predicted_us or 0.0),
            format_us(chosen.p50_us),
            f"{chosen.ratio:.3f} [{chosen.ratio_low:.3f}, {chosen.ratio_high:.3f}]",
            f"{best.name}, {best.ratio:.3f}",
            *(f"{row.name.removesuffix(' whole')}, {row.ratio:.3f}" for row in monta_best(point)),
            *(f"{others[name].ratio:.3f}" if name in others else "" for name in baselines),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def monta_best(point: BenchPoint) -> list[BenchRow]:
    """The fastest plan of MoNTA's form, as measured: what its own search could at best have chosen."""
    rows = [row for row in point.rows if row.kind == "plan" and row.gather == Gather.WHOLE.value]
    return [min(rows, key=lambda row: row.p50_us)]


if __name__ == "__main__":
    main()
