"""Data that packages of ours ship as JSON files beside their modules."""

from __future__ import annotations

from typing import TypeVar

from commlayer.profiles.strict_json import convert, parse_object

__all__ = ["shipped_data"]

_T = TypeVar("_T")


def shipped_data(package: str, name: str, kind: type[_T], what: str) -> _T:
    """Read the JSON object in the file ``name`` of ``package`` as a ``kind``; ``what`` it is, messages say.

    Raises:
        UsageError: the shipped file is damaged.
    """
    from importlib.resources import files  # lazy: `commlayer --help` needs no data

    where = f"{package}/{name}"
    return convert(parse_object((files(package) / name).read_bytes(), where, what), kind, where, {})
