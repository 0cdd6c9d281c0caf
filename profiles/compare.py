"""Comparison of two profiles, in a form that a table can show."""

from __future__ import annotations

import msgspec

from commlayer.profiles.counted import counted
from commlayer.profiles.curve import Curve
from commlayer.profiles.profile import Profile

__all__ = ["Difference", "diff"]

_MISSING = "(none)"


class Difference(msgspec.Struct, frozen=True):
    """One field in which profile ``a`` and profile ``b`` differ.

    Attributes:
        field: where, e.g. "peaks.inter_gbps" or "curves[all_to_all inter 2]".
        a, b: the two values as text; "(none)" where a profile lacks the field.
        change: b / a - 1 where both are numbers, else None. For a curve, at the size in bytes where it changes most.
    """

    field: str
    a: str
    b: str
    change: float | None = None


def diff(a: Profile, b: Profile) -> list[Difference]:
    """List all differences between two profiles, fingerprint aside; an empty list when their content is equal."""
    differences = [
        Difference(name, getattr(a, name), getattr(b, name))
        for name in ("name", "kind", "source", "topology", "gather")
        if getattr(a, name) != getattr(b, name)
    ]
    for name in a.peaks.__struct_fields__:
        differences += _numbers(f"peaks.{name}", getattr(a.peaks, name), getattr(b.peaks, name))
    differences += _numbers("plan_from_bytes", a.plan_from_bytes, b.plan_from_bytes)
    differences += _curves(a, b)
    pairs_a = {f"{entry.resource} beside {entry.other}": entry.slowdown for entry in a.interference}
    pairs_b = {f"{entry.resource} beside {entry.other}": entry.slowdown for entry in b.interference}
    for pair in sorted(pairs_a.keys() | pairs_b.keys()):
        differences += _numbers(f"interference[{pair}]", pairs_a.get(pair), pairs_b.get(pair))
    for key in sorted(a.environment.keys() | b.environment.keys()):
        in_a, in_b = a.environment.get(key, _MISSING), b.environment.get(key, _MISSING)
        if in_a != in_b:
            differences.append(Difference(f"environment.{key}", in_a, in_b))
    return differences


def _numbers(field: str, a: float | None, b: float | None) -> list[Difference]:
    if a == b:
        return []
    change = None if not a or b is None else b / a - 1
    text_a, text_b = (_MISSING if value is None else f"{value:g}" for value in (a, b))
    return [Difference(field, text_a, text_b, change)]


def _curves(a: Profile, b: Profile) -> list[Difference]:
    curves_a, curves_b = {curve.key: curve for curve in a.curves}, {curve.key: curve for curve in b.curves}
    differences = []
    for key in sorted(curves_a.keys() | curves_b.keys()):
        curve_a, curve_b = curves_a.get(key), curves_b.get(key)
        if curve_a != curve_b:
            differences.append(_curve(f"curves[{' '.join(map(str, key))}]", curve_a, curve_b))
    return differences


def _curve(field: str, a: Curve | None, b: Curve | None) -> Difference:
    if a is None or b is None:
        sizes_a, sizes_b = (_MISSING if curve is None else counted(len(curve.bytes), "size") for curve in (a, b))
        return Difference(field, sizes_a, sizes_b)
    changes = {size: b.at(size) / a.at(size) - 1 for size in sorted({*a.bytes, *b.bytes})}
    size = max(changes, key=lambda nbytes: abs(changes[nbytes]))
    if changes[size] == 0:
        return Difference(field, "same times", "same times, but other sizes, notes or errors", 0.0)
    return Difference(field, f"{a.at(size):.6g} us at {size} B", f"{b.at(size):.6g} us at {size} B", changes[size])
