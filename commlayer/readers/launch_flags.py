"""The flags of a launch line, as a shell gives them to a trainer: arrays, variables and quotes among them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from commlayer.profiles.errors import UsageError
from commlayer.profiles.printable import shortened
from commlayer.readers.launch_variables import logical_text, split_words, substituted, unread_expansion

__all__ = ["ON_LINE", "Flags", "LaunchFormat", "is_assigned", "read_flags"]


ON_LINE = " of the launch line"


class Flags(dict[str, list[str]]):
    """The values of each flag, by its name with hyphens; and where it was said, for messages.

    ``asked``: the flags whose values somebody has asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._origins: dict[str, str] = {}
        self.asked: set[str] = set()

    def add(self, name: str, values: list[str], origin: str) -> None:
        """Enter a flag; ``origin``: how a message names it."""
        self[name.replace("_", "-")] = values
        self._origins[name.replace("_", "-")] = origin

    def origin(self, name: str) -> str:
        """The flag as whoever wrote it finds it again."""
        return self._origins.get(name, f"--{name}{ON_LINE}")

    def value(self, name: str, default: str | None = None) -> str:
        """The value of a flag, or ``default`` where it is not given. Raises UsageError for a flag without its value."""
        if name not in self and default is not None:
            return default
        return self.values_of(name, most=1)[0]

    def values_of(self, name: str, most: int | None = None) -> tuple[str, ...]:
        """The first values of a flag, ``most`` of them. Raises UsageError for a flag without its value, and for one that only
        the shell knows."""
        self.asked.add(name)
        if not self.get(name):
            raise UsageError(
                f"{self.origin(name)}: expected a value behind it, got none: write it as the shell gets it"
            )
        values = tuple(self[name][:most])
        if unread := next(filter(None, map(unread_expansion, values)), ""):
            raise UsageError(
                f"{self.origin(name)}: neither the text nor the environment says what {shortened(unread)} holds: write its "
                "value out, as echo prints it in front of the launch line"
            )
        return values

    def whole(self, name: str, least: int = 1, default: str = "1") -> int:
        """A whole number of at least ``least``. Raises UsageError for another."""
        return self.wholes(name, least, (default,), most=1)[0]

    def wholes(
        self, name: str, least: int = 1, default: tuple[str, ...] = (), most: int | None = None
    ) -> tuple[int, ...]:
        """Whole numbers of at least ``least``, ``most`` of them. Raises UsageError for others."""
        values = self.values_of(name, most) if name in self else default
        for text in values:
            if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
                raise UsageError(
                    f"{self.origin(name)}: expected a whole number of at least {least}, got {shortened(text)!r}"
                )
        return tuple(map(int, values))

    def real(self, name: str, most: float = math.inf) -> str:
        """A finite number from 0 to ``most``, as it is written. Raises UsageError for another."""
        text = self.value(name)
        try:
            is_number = 0 <= float(text) <= most and math.isfinite(float(text))
        except ValueError:
            is_number = False
        if not is_number:
            expected = "of at least 0" if most == math.inf else f"from 0 to {most:g}"
            raise UsageError(f"{self.origin(name)}: expected a number {expected}, got {shortened(text)!r}")
        return text

    def one_of(self, name: str, words: Mapping[str, object] | tuple[str, ...], default: str) -> str:
        """A word of ``words``, or ``default``. Raises UsageError for another."""
        text = self.value(name, default)
        if text not in words and text != default:
            raise UsageError(f"{self.origin(name)}: expected one of {', '.join(words)}, got {shortened(text)!r}")
        return text

    def some_of(self, name: str, words: Collection[str], default: tuple[str, ...]) -> tuple[str, ...]:
        """Words of ``words``, or ``default``. Raises UsageError for another."""
        values = self.values_of(name) if name in self else default
        for text in values:
            if text not in words:
                raise UsageError(f"{self.origin(name)}: expected some of {', '.join(words)}, got {shortened(text)!r}")
        return values


@dataclass(frozen=True)
class LaunchFormat:
    """The flags of one trainer.

    Attributes:
        read: flags that are read.
        changing: flags that change a step or its memory, and that no option has.
        options: of the command, by the names of its parameters.
        shape: fields of the model's shape that the flags say.
        unlike: flags that are read, but say what no option has.
        remarks: sentences on what is the nearest thing and not the same.
    """

    read: frozenset[str]
    changing: frozenset[str]
    options: Callable[[Flags], Iterator[tuple[str, object]]]
    shape: Callable[[Flags], Mapping[str, str]]
    unlike: Callable[[Flags], tuple[str, ...]]
    remarks: Callable[[Flags], tuple[str, ...]] = lambda _: ()


_COMPUTED = r"""["']?(\$\(|`)(?![^)`\n]*\s--)"""
"""Matches the output of a command that has no flags of its own, which fills a variable."""


def is_assigned(word: str, text: str) -> bool:
    """Whether ``text`` says what a variable of the shell holds; nobody can of what is given to a script itself."""
    name = re.match(r"\$\{?(\w+)", word)
    return bool(name and re.search(rf"(?<!\w){name[1]}\+?=(?!{_COMPUTED})", text))


def read_flags(text: str, variables: Mapping[str, str]) -> tuple[Flags, list[str]]:
    """The values of each flag, the last time that it is given, with those of ``variables`` in their places; and variables of
    the shell in the place of flags. Raises UsageError for quotes that do not end."""
    found = Flags()
    expanded: list[str] = []
    values: list[str] = []
    for word in _words(logical_text(text)):
        if word.startswith("--") and len(word) > 2:
            name, has_value, value = word[2:].partition("=")
            values = _values_in(value, variables) if has_value else []
            found.add(name, values, f"--{shortened(name)}{ON_LINE}")
        elif word in _ENDS:
            values = []  # of no flag
        else:
            inner = _values_in(word, variables)
            holds_flags = word.startswith("$") and any(each.startswith("--") for each in inner)
            is_unread = word.startswith("$") and any(map(unread_expansion, inner))
            if word.endswith(_ARRAY) or holds_flags or (values and is_unread):
                expanded.append(word)
            else:
                values.extend(inner)
    return found, expanded


def _values_in(word: str, variables: Mapping[str, str]) -> list[str]:
    """The values that a word stands for: several, or none, where a variable holds a list."""
    value = substituted(word, variables)
    return [value] if value == word else value.split()


# What an assignment, ``NAME=value`` or ``NAME+=value``, gives; and whether that holds flags.
_ASSIGNED = re.compile(r"[A-Za-z_]\w*\+?=(.*)", re.DOTALL)
_HOLDS_OPTIONS = re.compile(r"(^|\s)--[a-z][a-z0-9_-]*(\s|$)")
_ARRAY = ("[@]}", "[*]}", "$@", "$*")
"""The ends of words that stand for several."""
_ENDS = ("(", ")", "|", ";", "&", "&&", "||", ">", ">>", "2>&1")
"""Words of a shell behind which nothing is a value of the flag before them."""


def _words(text: str, is_inner: bool = False) -> Iterator[str]:
    """The words of a shell's text, those inside arrays and inside variables that hold options among them. Raises UsageError
    for quotes that do not end."""
    for word in split_words(text):
        if is_last_word := word.endswith(";") and word != ";":
            word = word[:-1]
        assigned = _ASSIGNED.fullmatch(word)
        if assigned and not is_inner and _HOLDS_OPTIONS.search(assigned[1]):
            yield from (";", *_words(assigned[1], is_inner=True), ";")
            continue
        if assigned:
            word = assigned[1]
            yield ";"
        if word.startswith("(") and word.count("(") > word.count(")"):
            word = word[1:]
            yield "("
        is_last = word.count(")") > word.count("(")
        if word := word[: len(word) - is_last]:
            yield word
        yield from (")",) * is_last
        yield from (";",) * is_last_word
