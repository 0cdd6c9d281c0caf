"""The document of the benchmark of compressed collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common import machine, versions

from commlayer.units import format_bytes, format_us

__all__ = ["document"]

_TIMED = ["| collective | size | way | plan | time | / first way | rounds | wrong |", "|---" * 8 + "|"]


def document(date: str, found: Mapping[str, Any]) -> str:
    lines = [
        f"# Compressed collectives, emulated, {date}",
        "",
        "Made by `make bench-compressed`. Emulated clusters on one machine: real processes and bytes, wires slowed to 400",
        "Mbit/s a node and direction. All ranks share the machine's cores, so quote the ratios, not the times.",
        "",
        f"- machine: {machine()}",
        f"- versions: {versions()}",
        "- every way runs alternately with the others, in a new order each round; ratio: the median over rounds of its time over",
        "  the first way's of the same round, with quartiles; wrong: elements that differ from the first way's, small integers,",
        "  which are exact in every format here",
    ]
    for part, section in _SECTIONS.items():
        if part in found:
            lines += ["", *section(found[part], date)]
    return "\n".join(lines) + "\n"


def _error(found: Sequence[Mapping[str, Any]], date: str) -> list[str]:
    columns = [name for name in found[0] if name != "ranks"]
    return [
        "## Error of the sums",
        "",
        "Normal numbers; relative to the FP64 sum. The last column is the largest error of any element over the sum of one BF16",
        "rounding (2⁻⁸ of its size, half a unit at most) of each input: at most 1.",
        "",
        f"![error over ranks]({date}-compressed-error.svg)",
        "",
        f"| ranks | {' | '.join(columns)} |",
        "|---" * (1 + len(columns)) + "|",
        *(f"| {each['ranks']} | {' | '.join(f'{each[name]:.3g}' for name in columns)} |" for each in found),
    ]


def _timed(found: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"| {row['collective']} | {format_bytes(row['size'])} | {row['way']} | {row['plan']} | {format_us(row['p50_us'])} | "
        f"{row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}] | {row['rounds']} | {row['num_wrong']} |"
        for row in found
    ]


def _gradients(found: Sequence[Mapping[str, Any]], date: str) -> list[str]:
    del date
    return [
        "## Gradient synchronisation, 2×4",
        "",
        "Target: reduce_scatter of 32 MiB with BF16 allowed at most 0.30 of torch's.",
        "",
        *_TIMED,
        *_timed(found),
    ]


def _dispatch(found: Sequence[Mapping[str, Any]], date: str) -> list[str]:
    del date
    return [
        "## Dispatch, 2×4",
        "",
        "Target: 16 MiB with FP8 allowed, encoding and decoding included, at most 0.70 of BF16.",
        "",
        *_TIMED,
        *_timed(found),
    ]


def _choice(found: Sequence[Mapping[str, Any]], date: str) -> list[str]:
    lines = [
        "## What the planner chooses",
        "",
        "Native, BF16 and FP8 are allowed; FP32 reduce_scatter, BF16 all_to_all. A ratio above 1: the choice is faster. Behind =",
        "the same plan ran, and what differs is noise. Target: the best of the other plans at least 0.95.",
        "",
        f"![each format over the choice]({date}-compressed-choice.svg)",
        "",
        "| cluster | collective | size | chosen | time | native | bf16 | fp8_e4m3 | best |",
        "|---" * 9 + "|",
    ]
    keys = dict.fromkeys((row["cluster"], row["collective"], row["size"]) for row in found)
    for key in keys:
        rows = {row["way"]: row for row in found if (row["cluster"], row["collective"], row["size"]) == key}
        chosen = rows["chosen"]
        others = [row["ratio"] for row in rows.values() if row["plan"] != chosen["plan"]]
        cells = [_against(rows.get(way), chosen) for way in ("native", "bf16", "fp8_e4m3")]
        lines.append(
            f"| {key[0]} | {key[1]} | {format_bytes(key[2])} | {chosen['plan']} | {format_us(chosen['p50_us'])} | "
            f"{' | '.join(cells)} | {min(others, default=1.0):.3f} |"
        )
    return lines


def _against(row: Mapping[str, Any] | None, chosen: Mapping[str, Any]) -> str:
    if row is None:
        return ""
    mark = " =" if row["plan"] == chosen["plan"] else ""
    return f"{row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]{mark}"


def _memory(found: Mapping[str, Mapping[str, int]], date: str) -> list[str]:
    del date
    return [
        "## Memory",
        "",
        "Anonymous memory that a reduce_scatter adds to a rank whose tensors exist, through Gloo, as a share of the input. In",
        "place the output is a part of the input. Target: at most 1 %.",
        "",
        "| way | input | added | share |",
        "|---|---|---|---|",
        *(
            f"| {way} | {format_bytes(each['buffer_bytes'])} | {format_bytes(each['added_bytes'])} | "
            f"{each['added_bytes'] / each['buffer_bytes']:.2%} |"
            for way, each in found.items()
        ),
    ]


def _training(found: Mapping[str, Sequence[float]], date: str) -> list[str]:
    native = next(iter(found.values()))
    last = {name: sum(losses[-20:]) / 20 for name, losses in found.items()}
    base = sum(native[-20:]) / 20
    return [
        "## Training",
        "",
        "The example trainer (docs/moe_training.md), 2 layers, 8 experts, top 2, EP 4, AdamW, 300 steps, FP32 activations. Final",
        "loss: the mean of the last 20 steps. Target: within 1 % of native.",
        "",
        f"![loss curves]({date}-compressed-training.svg)",
        "",
        "| | first loss | final loss | against native |",
        "|---|---|---|---|",
        *(
            f"| {name} | {losses[0]:.4f} | {last[name]:.4f} | {100 * (last[name] / base - 1):+.2f} % |"
            for name, losses in found.items()
        ),
    ]


_SECTIONS: dict[str, Callable[[Any, str], list[str]]] = {
    "error": _error,
    "gradients": _gradients,
    "dispatch": _dispatch,
    "choice": _choice,
    "memory": _memory,
    "training": _training,
}
