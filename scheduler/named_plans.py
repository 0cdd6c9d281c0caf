"""Plans as users name them, in ``COMMLAYER_PLAN`` and in the options of a group: what the words mean, and which mean nothing."""

from __future__ import annotations

from commlayer.profiles.errors import SettingsError
from commlayer.scheduler.moves import MAX_TAGS
from commlayer.scheduler.plan import Strategy

__all__ = ["AUTO", "TRIED", "parse_plan", "plan_words"]

AUTO = "auto"
"""The word for whatever the profile says."""
TRIED = "tried"
"""The word for a plan that is found by contests (:mod:`commlayer.scheduler.experience.contenders`)."""

_IN_CHUNKS = (Strategy.DIRECT, Strategy.PIPELINED, Strategy.RING, Strategy.PIPELINED_COPY)
_MOST_CHUNKS = MAX_TAGS // 2
"""A chunk has two steps or more, each with a tag of its own."""


def parse_plan(text: str, what: str = "COMMLAYER_PLAN") -> tuple[Strategy, int]:
    """Read the strategy and the number of chunks of a plan's name, such as ``hierarchical`` or ``pipelined:4``.

    Raises SettingsError, about ``what``, for anything else, and for chunks of a strategy that has none.
    """
    name, _, count = text.replace("×", ":").partition(":")
    try:
        strategy, chunks = Strategy(name), int(count or 1)
    except ValueError:
        chunks = 0
    if not 1 <= chunks <= _MOST_CHUNKS:
        names = ", ".join(strategy.value for strategy in Strategy)
        raise SettingsError(
            f"{what} must be one of {names}, {TRIED}, {AUTO}, up to {_MOST_CHUNKS} chunks behind a colon (pipelined:4), got "
            f"{text!r}"
        )
    if chunks > 1 and strategy not in _IN_CHUNKS:
        names = ", ".join(strategy.value for strategy in _IN_CHUNKS)
        raise SettingsError(
            f"{what}: {strategy.value} goes in one chunk, got {text!r}: leave the number out, or take one of {names}"
        )
    return strategy, chunks


def plan_words(text: str, what: str = "COMMLAYER_PLAN") -> str:
    """Return a plan's name as every rank writes it: ``Auto`` and ``pipelined×4`` are ``auto`` and ``pipelined:4``.

    Raises SettingsError as :func:`parse_plan` does.
    """
    word = text.strip().lower()
    if word in (AUTO, TRIED):
        return word
    strategy, chunks = parse_plan(word, what)
    return strategy.value if chunks == 1 else f"{strategy.value}:{chunks}"
