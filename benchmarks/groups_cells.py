"""The cells of ``make bench-groups``, and how times become rows: which groups, which plans are tried, error and regret. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from commlayer.profiles.curve import prediction_error
from commlayer.scheduler.group_strategies import candidates
from commlayer.scheduler.mapping.folded import FoldedMapping
from commlayer.scheduler.plan import Gather, Plan, Strategy
from commlayer.scheduler.price import Timeline
from commlayer.scheduler.traffic import Traffic
from commlayer.units import format_bytes, format_us

__all__ = ["Cell", "Versus", "Way", "contenders", "is_swept", "layouts", "sizes_of", "summary", "unpriced"]

SIZES = (1 << 20, 4 << 20, 16 << 20)
_MOST_BYTES, _MOST_OF_RANKS = 32 << 20, 128 << 20
"""Bytes of all siblings, and of all ranks, together: larger cells would take most of the run, on slowed wires."""
_FURTHER = 1
"""Plans that are tried beside the chosen one, flat, and the best-priced of each strategy."""
_COLUMNS = ("layout", "groups", "swept", "collective", "size", "chosen", "predicted", "measured", "error", "best")


def layouts(world: int) -> dict[str, list[tuple[int, ...]]]:
    """The sibling groups of each layout on ``world`` ranks, by a name that says whose: every rank is in one of them.

    Layouts whose groups another has too, which depends on the world, are left out.
    """
    mappings = {
        "DP, dp": (FoldedMapping(world), "dp"),
        "TP2×DP, dp": (FoldedMapping(world, tp=2), "dp"),
        "TP2×EP2×EDP, edp": (FoldedMapping(world, tp=2, etp=2, ep=2), "edp"),
        "CP2×DP, cp": (FoldedMapping(world, cp=2), "cp"),
        "TP2×DP×PP2, dp": (FoldedMapping(world, tp=2, pp=2), "dp"),
        f"EP{world // 2}×EDP2, edp": (FoldedMapping(world, ep=world // 2), "edp"),
    }
    found: dict[str, list[tuple[int, ...]]] = {}
    for name, (mapping, axis) in mappings.items():
        groups = mapping.groups(axis)
        if groups not in found.values():
            found[name] = groups
    return found


def is_swept(shape: Sequence[int], nodes: Sequence[int]) -> bool:
    """Whether the sweep of a cluster measures groups of ``shape``: all ranks, a whole node, one rank of each node."""
    return tuple(shape) in (tuple(nodes), (nodes[0],), (1,) * len(nodes))


def sizes_of(groups: Sequence[Sequence[int]], sizes: Iterable[int] = SIZES) -> list[int]:
    """The sizes that ``groups`` run at once."""
    ranks = sum(map(len, groups))
    return [size for size in sizes if len(groups) * size <= _MOST_BYTES and ranks * size <= _MOST_OF_RANKS]


def contenders(priced: Sequence[Timeline], chosen: str) -> list[Timeline]:
    """The plans to try of those that were priced, each once: flat, ``chosen``, the best-priced of each strategy, and the best
    of what is left."""
    ranked = {timeline.plan.name: timeline for timeline in sorted(priced, key=lambda timeline: timeline.total_us)}
    best = {timeline.plan.strategy: name for name, timeline in reversed(ranked.items())}
    wanted = dict.fromkeys([Strategy.FLAT.value, chosen, *best.values()])
    further = [name for name in ranked if name not in wanted]
    return [ranked[name] for name in [*wanted, *further[:_FURTHER]] if name in ranked]


def unpriced(traffic: Traffic) -> list[Plan]:
    """The plans to try where nothing has a price: one of each strategy, chunks of a quarter."""
    return list({plan.strategy: plan for plan in candidates(traffic, Gather.WHOLE, 4096, 4)}.values())


@dataclass
class Way:
    """One plan of a cell. ``predicted_us`` None: it has no price. ``times_us``: of each round, the slowest rank's."""

    plan: str
    predicted_us: float | None
    times_us: list[float] = field(default_factory=list)

    @property
    def measured_us(self) -> float:
        """The median over rounds."""
        return median(self.times_us)


@dataclass
class Cell:
    """One collective of one size on all siblings of a layout at once. ``reason``: why it was not planned; empty where it was.
    ``num_wrong``: elements of all plans' results that are not flat's."""

    layout: str
    shape: tuple[int, ...]
    siblings: int
    is_swept: bool
    collective: str
    size: int
    chosen: str
    reason: str
    ways: list[Way]
    num_wrong: int = 0

    @property
    def of_chosen(self) -> Way:
        """The way that a caller gets."""
        return next(way for way in self.ways if way.plan == self.chosen)

    @property
    def best(self) -> Way:
        """The way that was measured fastest."""
        return min(self.ways, key=lambda way: way.measured_us)

    @property
    def error(self) -> float | None:
        """How far the chosen plan's price is from its time, as a fraction of the time; None where nothing was planned."""
        way = self.of_chosen
        if self.reason or way.predicted_us is None:
            return None
        return abs(prediction_error(way.predicted_us, way.measured_us))

    @property
    def regret(self) -> float:
        """How much longer the chosen plan takes than the best, as a fraction."""
        return self.of_chosen.measured_us / self.best.measured_us - 1.0

    def as_row(self) -> dict[str, Any]:
        """For JSON, with what follows from the times."""
        derived = {"error": self.error, "regret": self.regret, "measured_us": self.of_chosen.measured_us}
        return {**vars(self), "ways": [vars(way) for way in self.ways], "best": self.best.plan, **derived}


@dataclass(frozen=True)
class Versus:
    """One collective against torch's on Gloo, in alternate rounds. ``ratio``: median and quartiles of time / torch's time."""

    cluster: str
    layout: str
    collective: str
    size: int
    plan: str
    torch_us: float
    time_us: float
    ratio: tuple[float, float, float]
    rounds: int
    num_wrong: int


def summary(cells: Sequence[Cell]) -> dict[str, float | None]:
    """How many cells were planned from a price, errors of these prices, regrets of all cells; fractions."""
    errors = [cell.error for cell in cells if cell.error is not None]
    regrets = [cell.regret for cell in cells]
    return {
        "cells": len(cells),
        "planned": sum(not cell.reason for cell in cells) / len(cells),
        "error median": median(errors) if errors else None,
        "error 90 %": quantiles(errors, n=10, method="inclusive")[8] if len(errors) > 1 else None,
        "regret median": median(regrets),
        "regret worst": max(regrets),
        "wrong elements": sum(cell.num_wrong for cell in cells),
    }


def summary_table(by_cluster: Mapping[str, Sequence[Cell]]) -> list[str]:
    """A line for each cluster, for all together, and for the shapes that no sweep measures."""
    every = [cell for cells in by_cluster.values() for cell in cells]
    rows: dict[str, Sequence[Cell]] = {**by_cluster, "all": every}
    rows["shapes that no sweep measures"] = [cell for cell in every if not cell.is_swept]
    found = {name: summary(cells) for name, cells in rows.items() if cells}
    heads = list(summary(every)) if every else []
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name, numbers in found.items():
        cells = [str(value) if isinstance(value, int) else _percent(value) for value in numbers.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def cell_table(cells: Sequence[Cell]) -> list[str]:
    """A line for each cell, and under them why some were not planned."""
    lines = [f"| {' | '.join(_COLUMNS)} | regret | rounds |", "|---" * (len(_COLUMNS) + 2) + "|"]
    for cell in cells:
        way, groups = cell.of_chosen, f"{cell.siblings} of {'+'.join(map(str, cell.shape))}"
        texts = [
            cell.layout,
            groups,
            "yes" if cell.is_swept else "no",
            cell.collective,
            format_bytes(cell.size),
            f"{cell.chosen}, no price" if cell.reason else cell.chosen,
            "" if way.predicted_us is None else format_us(way.predicted_us),
            format_us(way.measured_us),
            _percent(cell.error),
            f"{cell.best.plan} {format_us(cell.best.measured_us)}",
            _percent(cell.regret),
            str(len(way.times_us)),
        ]
        lines.append(f"| {' | '.join(texts)} |")
    reasons = sorted({cell.reason for cell in cells if cell.reason})
    return lines + ([""] + [f"- not planned: {reason}" for reason in reasons] if reasons else [])


def versus_table(rows: Sequence[Versus]) -> list[str]:
    """A line for each comparison with torch."""
    lines = [
        "| cluster | layout | collective | size | plan by nodes of the groups | torch | commlayer | / torch | rounds | wrong |"
    ]
    lines.append("|---" * 10 + "|")
    for row in rows:
        middle, low, high = row.ratio
        lines.append(
            f"| {row.cluster} | {row.layout} | {row.collective} | {format_bytes(row.size)} | {row.plan} | "
            f"{format_us(row.torch_us)} | {format_us(row.time_us)} | {middle:.3f} [{low:.3f}, {high:.3f}] | "
            f"{row.rounds} | {row.num_wrong} |"
        )
    return lines


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
