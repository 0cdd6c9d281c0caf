"""The values of ``commlayer what-if``: listed, or from one number to another."""

from __future__ import annotations

import click

from commlayer.cli.option_types import COUNT, NUM_GPUS, RATE_GBPS, TOKENS, RealNumber
from commlayer.profiles.errors import UsageError
from commlayer.readers.cluster_files import resolve

__all__ = ["WORDS", "values_of"]

WORDS = ("gpu", "precision")
"""The kinds whose values are words."""
_FACTOR = RealNumber(min=1e-3, max=1e3)
_NUMBERS = {
    "inter_gbps": RATE_GBPS,
    "intra_gbps": RATE_GBPS,
    "inter_factor": _FACTOR,
    "intra_factor": _FACTOR,
    "skew": RealNumber(min=0, max=100),
}
"""The kinds whose values are numbers with fractions, and which ones; all others are whole numbers of at least 1."""
_WHOLE = {"gpus": NUM_GPUS, "sequence": TOKENS}
"""The kinds whose values are whole numbers of their own type."""
_MUCH = 8.0
_POINTS = 5


def values_of(
    kind: str, values: str | None, low: float | None, high: float | None, points: int | None
) -> tuple[float | int | str, ...]:
    """Return the values that ``values`` lists, or those from ``low`` to ``high``: rates at ``points`` places (five unless given),
    all else doubling.

    Raises UsageError for both or neither, for ``points`` where they would change nothing, and for what is no such number.
    """
    if points is not None and (values is not None or kind not in _NUMBERS):
        raise UsageError(
            "--points says at how many places between --from and --to rates are looked at: values that are listed, and whole "
            "numbers, which double, have none; leave it out"
        )
    if values is not None:
        if low is not None or high is not None:
            raise UsageError("expected --values, or --from and --to, got both: drop one side")
        return tuple(_value(kind, word.strip(), "--values") for word in values.split(","))
    if low is None or high is None:
        raise UsageError("expected --values, or --from and --to: say --values 25,50,100")
    if kind in WORDS or not low < high:
        raise UsageError(
            f"--from {low:g} --to {high:g}: expected ascending numbers, for a thing that has them; or --values"
        )
    ends = _number(kind, low, "--from"), _number(kind, high, "--to")
    if kind in _NUMBERS:
        return _spread(*ends, points or _POINTS)
    doubled = [int(ends[0])]  # in between most degrees would not divide
    while doubled[-1] * 2 < ends[1]:
        doubled.append(doubled[-1] * 2)
    return (*doubled, int(ends[1]))


def _spread(low: float, high: float, points: int) -> tuple[float, ...]:
    """Evenly, over their logarithm where they differ much."""
    places = [index / (points - 1) for index in range(1, points - 1)]
    if low > 0 and high / low >= _MUCH:
        return (low, *(low * (high / low) ** place for place in places), high)
    return (low, *(low + (high - low) * place for place in places), high)


def _value(kind: str, word: str, option: str) -> float | int | str:
    if kind not in WORDS:
        return _number(kind, word, option)
    if not word:
        raise UsageError(f"{option} of {kind}: expected names between commas, got none")
    if kind == "gpu":  # known before anything is searched for the values beside it
        try:
            resolve(word)
        except UsageError as error:
            raise UsageError(f"{option} of gpu: {error}") from error
    return word


def _number(kind: str, given: float | str, option: str) -> float | int:
    """The number that ``option`` says, checked as that of the option that ``kind`` is named after would be."""
    text = given if isinstance(given, str) else f"{given:.17g}"
    try:
        number: float | int = (_NUMBERS | _WHOLE).get(kind, COUNT).convert(text, None, None)
    except click.BadParameter as error:
        raise UsageError(f"{option} of {kind.replace('_', '-')}: {error.message}") from error
    return number
