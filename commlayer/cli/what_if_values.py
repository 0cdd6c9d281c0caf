"""The values of ``commlayer what-if``: listed, or from one number to another."""

from __future__ import annotations

from commlayer.profiles.errors import UsageError

__all__ = ["WORDS", "values_of"]

WORDS = ("gpu", "precision")
"""The kinds whose values are words."""
_REAL = ("inter_gbps", "intra_gbps", "inter_factor", "intra_factor", "skew")
_MUCH = 8.0


def values_of(
    kind: str, values: str | None, low: float | None, high: float | None, points: int
) -> tuple[float | int | str, ...]:
    """Return the values that ``values`` lists, or those from ``low`` to ``high``: rates at ``points`` places, all else
    doubling.

    Raises UsageError for both or neither, or for what is no number where numbers are meant.
    """
    if values is not None:
        if low is not None or high is not None:
            raise UsageError("expected --values, or --from and --to, got both: drop one side")
        return tuple(_value(kind, word.strip()) for word in values.split(","))
    if low is None or high is None:
        raise UsageError("expected --values, or --from and --to: say --values 25,50,100")
    if kind in WORDS or not low < high:
        raise UsageError(
            f"--from {low:g} --to {high:g}: expected ascending numbers, for a thing that has them; or --values"
        )
    return _spread(low, high, points) if kind in _REAL else _doubled(round(low), round(high))


def _spread(low: float, high: float, points: int) -> tuple[float, ...]:
    """Evenly, over their logarithm where they differ much."""
    places = [index / (points - 1) for index in range(1, points - 1)]
    if low > 0 and high / low >= _MUCH:
        return (low, *(low * (high / low) ** place for place in places), high)
    return (low, *(low + (high - low) * place for place in places), high)


def _doubled(low: int, high: int) -> tuple[int, ...]:
    """The values from the least on, twice as many each; the greatest last. In between most degrees would not divide."""
    found = [max(low, 1)]
    while found[-1] * 2 < high:
        found.append(found[-1] * 2)
    return (*found, high)


def _value(kind: str, word: str) -> float | int | str:
    if kind in WORDS:
        return word
    try:
        return float(word) if kind in _REAL else int(word)
    except ValueError as error:
        expected = "a number" if kind in _REAL else "a whole number"
        raise UsageError(f"--values: expected {expected} for {kind.replace('_', '-')}, got {word!r}") from error
