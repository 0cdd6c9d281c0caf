"""Results of a benchmark run: plain data, readable and writable without torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from commlayer.profiles.curve import prediction_error
from commlayer.profiles.files import write_file

__all__ = ["BenchPoint", "BenchResult", "BenchRow"]


class BenchRow(msgspec.Struct, frozen=True, kw_only=True):
    """One way of moving one size.

    ``kind`` is "plan" for a candidate of ours, "torch" for torch.distributed's own all_to_all_single (what ``ratio`` is
    relative to), "baseline" for what other software does. Times are µs, each the largest over all ranks, over the
    ``rounds`` in which every way ran, so that rows of one point compare; ``ratio`` is the median over rounds of time /
    torch's time of the same round, so that slow drifts of a noisy machine cancel; ``ratio_low`` and ``ratio_high`` are the
    quartiles of those. The chosen plan's ratio rests on more rounds, of it and torch's own alone, in which short
    calls are timed several in a row: ``ratio_rounds`` in all.
    ``num_wrong``: bytes that differ from torch's result, the most on any rank.
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
    ratio_rounds: int
    strategy: str | None = None
    chunks: int | None = None
    gather: str | None = None
    wire: str | None = None
    predicted_us: float | None = None
    is_chosen: bool = False

    @property
    def error(self) -> float | None:
        """The error of the predicted time; None where nothing was predicted."""
        return None if self.predicted_us is None else prediction_error(self.predicted_us, self.p50_us)


class BenchPoint(msgspec.Struct, frozen=True, kw_only=True):
    """All rows of one size. ``wire_limit_us``: the bytes that cross between nodes at the inter link's rate, nothing else;
    None where that rate is not known."""

    logical_bytes: int
    wire_limit_us: float | None
    reason: str
    rows: tuple[BenchRow, ...]

    @property
    def chosen(self) -> BenchRow:
        """The plan that the decision took. Raises LookupError in a result without one."""
        return self._only("chosen", lambda row: row.is_chosen)

    @property
    def torch(self) -> BenchRow:
        """torch.distributed's own all_to_all. Raises LookupError in a result without it."""
        return self._only("torch", lambda row: row.kind == "torch")

    @property
    def best(self) -> BenchRow:
        """The fastest of our candidates, as measured."""
        return min((row for row in self.rows if row.kind == "plan"), key=lambda row: row.p50_us)

    def _only(self, what: str, wanted: Callable[[BenchRow], bool]) -> BenchRow:
        for row in self.rows:
            if wanted(row):
                return row
        raise LookupError(f"no {what} row among the results of {self.logical_bytes} bytes")


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run on one cluster. ``inter`` and ``intra`` are the shaped rates of a node ("400mbit"), None where unshaped or not
    known; ``environment`` is the run's, not the profile's."""

    topology: str
    profile: str
    fingerprint: str
    is_emulated: bool
    inter: str | None
    intra: str | None
    environment: dict[str, str]
    points: tuple[BenchPoint, ...]

    @property
    def is_comparable(self) -> bool:
        """Whether times may be shown beside each other. Emulation without a shaped wire is only loopback: what its times
        say holds for no cluster."""
        return not self.is_emulated or self.inter is not None

    @property
    def num_wrong(self) -> int:
        """Wrong bytes of all rows of all sizes."""
        return sum(row.num_wrong for point in self.points for row in point.rows)

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"

    def save(self, path: Path) -> None:
        write_file(path, self.to_json())
