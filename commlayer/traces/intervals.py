"""Arithmetic of time intervals: pairs (start, end) of one unit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import TypeVar

__all__ = ["Interval", "length", "rows_without_overlap", "union"]

Interval = tuple[int, int]
_T = TypeVar("_T")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same moments as disjoint intervals in order; empty ones are left out."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> int:
    """Return how long at least one of them lasts."""
    return sum(end - start for start, end in union(intervals))


def rows_without_overlap(items: Sequence[tuple[Interval, _T]]) -> list[list[tuple[Interval, _T]]]:
    """Lay ``items`` out in as few rows as hold them without two of one row at a time; each row in
    order."""
    rows: list[list[tuple[Interval, _T]]] = []
    busy: list[tuple[int, int]] = []  # (end, row), a heap, and beside it the rows whose last one has ended
    idle: list[int] = []
    for item in sorted(items, key=lambda item: item[0]):
        start, end = item[0]
        while busy and busy[0][0] <= start:
            heappush(idle, heappop(busy)[1])
        row = heappop(idle) if idle else len(rows)
        if row == len(rows):
            rows.append([])
        rows[row].append(item)
        heappush(busy, (end, row))
    return rows
