"""Cases whose facts are kept as goldens, how goldens are written and read, and how facts are compared with them.

A golden file holds one line of JSON for each case, ``[key, facts]``, in the order of the cases; it is compressed. It holds
texts, not hashes, so that a check that fails can show what was before and what is now.
"""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "MODELS",
    "Case",
    "Difference",
    "Facts",
    "changes",
    "differences",
    "read_golden",
    "rounded",
    "sampled",
    "write_golden",
]

GOLDENS = Path(__file__).with_name("goldens")
MODELS = 25
"""The models of the catalogue from which cases are drawn, its first ones: one that is added behind them
moves no case."""
_DIGITS = 14
"""Significant digits of a number in a golden file: rounding then stays below the tolerance."""
_TOLERANCE = 1e-12
"""The largest relative difference of two equal numbers. Processors may differ in the last bits, where they fuse operations."""

Facts = dict[str, Any]
"""The facts of a case by name: texts, whole numbers, floats, and lists and mappings of these."""


class Case(NamedTuple):
    """One case. ``key`` says in words what is asked, and is like no other of its section; ``facts`` finds the answer."""

    key: str
    facts: Callable[[], Facts]


class Difference(NamedTuple):
    """A fact that is not as it was. ``old`` or ``new`` is the word "nothing" where only the other one exists."""

    key: str
    fact: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.key}\n    {self.fact}\n        old: {self.old}\n        new: {self.new}"


def sampled(cases: Sequence[Case], every: int) -> Sequence[Case]:
    """Return each ``every``-th case. A prime number of these meets all values of a grid."""
    return cases[::every]


def write_golden(section: str, facts: Mapping[str, Facts]) -> int:
    """Write the golden file of a section, and return its size in bytes."""
    lines = (json.dumps([key, rounded(each)], ensure_ascii=False, separators=(",", ":")) for key, each in facts.items())
    path = GOLDENS / f"{section}.xz"
    path.write_bytes(lzma.compress("\n".join([*lines, ""]).encode(), preset=9 | lzma.PRESET_EXTREME))
    return path.stat().st_size


def read_golden(section: str) -> dict[str, Facts]:
    """Read the golden file of a section: the facts of its cases, by their keys. Empty where there is no such file."""
    path = GOLDENS / f"{section}.xz"
    if not path.exists():
        return {}
    return dict(json.loads(line) for line in lzma.decompress(path.read_bytes()).decode().splitlines())


def rounded(value: Any) -> Any:
    """Return a fact as a golden file holds it: floats of 14 significant digits, lists in place of tuples."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(key): rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    return value


def differences(cases: Sequence[Case], golden: Mapping[str, Facts]) -> Iterator[Difference]:
    """Find the facts of ``cases`` and yield what differs from the golden ones."""
    for case in cases:
        yield from changes(case.key, golden.get(case.key), rounded(case.facts()))


def changes(key: str, old: Any, new: Any, fact: str = "") -> Iterator[Difference]:
    """Yield where two facts differ: floats by more than 1e-12 of their size, everything else at all."""
    if isinstance(old, (int, float)) and isinstance(new, (int, float)) and float in (type(old), type(new)):
        if not math.isclose(old, new, rel_tol=_TOLERANCE):
            yield Difference(key, fact, f"{old!r}", f"{new!r} ({_relative(old, new)})")
    elif isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in [*old, *(name for name in new if name not in old)]:
            inner = f"{fact}.{name}" if fact else name
            yield from changes(key, old.get(name), new.get(name), inner)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, (before, now) in enumerate(zip(old, new, strict=True)):
            yield from changes(key, before, now, f"{fact}[{place}]")
    elif old != new:
        yield Difference(key, fact or "the case", _shown(old), _shown(new))


def _relative(old: float, new: float) -> str:
    return "was 0" if old == 0 else f"{new / old - 1:+.2e}"


def _shown(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value, ensure_ascii=False)
