"""What a benchmark run found: plain data, readable and writable without torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

__all__ = ["BenchResult", "Point", "Row"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One way of moving one size.

    ``kind`` is "plan" for a candidate of ours, "torch" for torch.distributed's own all_to_all_single (what ``ratio`` is
    relative to), "baseline" for what other software does. Times are µs, each the largest over all ranks; ``ratio`` is the
    median over rounds of time / torch's time of the same round, so that slow drifts of a noisy machine cancel.
    """

    name: str
    kind: str
    p50_us: float
    min_us: float
    max_us: float
    ratio: float
    ratio_low: float
    ratio_high: float
    num_wrong: int
    rounds: int
    strategy: str | None = None
    chunks: int | None = None
    gather: str | None = None
    wire: str | None = None
    predicted_us: float | None = None
    is_chosen: bool = False


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """All rows of one size. ``wire_limit_us``: the inter link's peak alone, nothing else; None where it is not known."""

    logical_bytes: int
    wire_limit_us: float | None
    reason: str
    rows: tuple[Row, ...]

    @property
    def chosen(self) -> Row:
        return next(row for row in self.rows if row.is_chosen)

    @property
    def torch(self) -> Row:
        return next(row for row in self.rows if row.kind == "torch")

    @property
    def best(self) -> Row:
        """The fastest of our candidates, as measured."""
        return min((row for row in self.rows if row.kind == "plan"), key=lambda row: row.p50_us)


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run on one cluster. ``inter`` and ``intra`` are the shaped rates of a node ("400mbit"), None where unshaped."""

    topology: str
    profile: str
    fingerprint: str
    is_emulated: bool
    inter: str | None
    intra: str | None
    environment: dict[str, str]
    points: tuple[Point, ...]

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"

    def save(self, path: Path) -> None:
        path.write_text(self.to_json(), encoding="utf-8")
