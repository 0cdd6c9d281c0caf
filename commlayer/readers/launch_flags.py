"""The flags of a launch line, as a shell gives them to a trainer: arrays, variables and quotes among them."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from commlayer.profiles.errors import UsageError
from commlayer.profiles.printable import shortened

__all__ = ["Flags", "LaunchFormat", "is_assigned", "read_flags", "variables_of"]


_ON_LINE = " of the launch line"


class Flags(dict[str, list[str]]):
    """The values of each flag, by its name with hyphens; and where it was said, for messages."""

    def __init__(self) -> None:
        super().__init__()
        self._origins: dict[str, str] = {}

    def add(self, name: str, values: list[str], origin: str) -> None:
        """Enter a flag; ``origin``: how a message names it."""
        self[name.replace("_", "-")] = values
        self._origins[name.replace("_", "-")] = origin

    def origin(self, name: str) -> str:
        """The flag as whoever wrote it finds it again."""
        return self._origins.get(name, f"--{name}{_ON_LINE}")

    def short_origin(self, name: str) -> str:
        """The flag without where it stands, for lists."""
        return self.origin(name).removesuffix(_ON_LINE)

    def like(self, name: str, other: str) -> str:
        """``other`` written as the flag ``name`` is."""
        return f"--{other}" if self.origin(name).startswith("--") else other

    def value(self, name: str, default: str | None = None) -> str:
        """The value of a flag, or ``default`` where it is not given. Raises UsageError for a flag without its value."""
        if name not in self and default is not None:
            return default
        if not self.get(name):
            raise UsageError(
                f"{self.origin(name)}: expected a value behind it, got none: write it as the shell gets it"
            )
        text = self[name][0]
        if _EXPANSION.fullmatch(text):
            raise UsageError(
                f"{self.origin(name)}: neither the text nor the environment says what {shortened(text)} holds: export it, "
                "or write its value out"
            )
        return text

    def whole(self, name: str, least: int = 1, default: str = "1") -> int:
        """A whole number of at least ``least``. Raises UsageError for another."""
        text = self.value(name, default)
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
            raise UsageError(
                f"{self.origin(name)}: expected a whole number of at least {least}, got {shortened(text)!r}"
            )
        return int(text)

    def real(self, name: str) -> str:
        """A number of at least 0, as it is written. Raises UsageError for another."""
        text = self.value(name)
        try:
            is_number = 0 <= float(text) < math.inf
        except ValueError:
            is_number = False
        if not is_number:
            raise UsageError(f"{self.origin(name)}: expected a number of at least 0, got {shortened(text)!r}")
        return text

    def one_of(self, name: str, words: Mapping[str, object] | tuple[str, ...], default: str) -> str:
        """A word of ``words``, or ``default``. Raises UsageError for another."""
        text = self.value(name, default)
        if text not in words and text != default:
            raise UsageError(f"{self.origin(name)}: expected one of {', '.join(words)}, got {shortened(text)!r}")
        return text


def _no_words(_: Flags) -> tuple[str, ...]:
    return ()


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
    unlike: Callable[[Flags], tuple[str, ...]] = _no_words
    remarks: Callable[[Flags], tuple[str, ...]] = _no_words


def variables_of(text: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of the shell that hold one word: what ``text`` assigns, else what ``environment``
    has, else a default in ``${NAME:-word}``."""
    text = _COMMENT.sub("", text)
    found = {**dict(_DEFAULT.findall(text)), **environment}
    for name, quoted, plain in _ONE_WORD.findall(text):
        found[name] = _substituted(quoted or plain, found)
    return found


def _substituted(word: str, variables: Mapping[str, str]) -> str:
    """The word with the value of the variable that it is; as it is where nobody says what that holds."""
    variable = _EXPANSION.fullmatch(word)
    name = variable and (variable[1] or variable[2])
    return variables.get(name, word) if name else word


def is_assigned(word: str, text: str) -> bool:
    """Whether ``text`` says what a variable of the shell holds; nobody can of what is given to a script itself."""
    variable = _EXPANSION.fullmatch(word)
    name = variable and (variable[1] or variable[2])
    return bool(name and re.search(rf"(?<!\w){re.escape(name)}\+?=", text))


def read_flags(text: str, variables: Mapping[str, str]) -> tuple[Flags, list[str]]:
    """The values of each flag, the last time that it is given, with those of ``variables`` in their places; and variables of
    the shell in the place of flags. Raises UsageError for quotes that do not end."""
    found = Flags()
    expanded: list[str] = []
    values: list[str] = []
    for word in _words(text):
        if word.startswith("--") and len(word) > 2:
            name, has_value, value = word[2:].partition("=")
            values = [_substituted(value, variables)] if has_value else []
            found.add(name, values, f"--{shortened(name)}{_ON_LINE}")
        elif word in _ENDS:
            values = []  # of no flag
        elif word.endswith(_ARRAY) or (values and _EXPANSION.fullmatch(word)):
            expanded.append(word)
        else:
            values.append(_substituted(word, variables))
    return found, expanded


# What an assignment, ``NAME=value`` or ``NAME+=value``, gives; and whether that holds flags.
_ASSIGNED = re.compile(r"[A-Za-z_]\w*\+?=(.*)", re.DOTALL)
_HOLDS_OPTIONS = re.compile(r"(^|\s)--[a-z][a-z0-9_-]*(\s|$)")
_EXPANSION = re.compile(r"\$(\w+|[@*])|\$\{(\w+).*\}")
"""A variable, or all that was given to a script: its name alone."""
_COMMENT = re.compile(r"(?m)(?:^|(?<=\s))#.*$")
_ONE_WORD = re.compile(r"""(?<![\w-])([A-Za-z_]\w*)=(?:["']([^"'\s]*)["']|([^\s"'();]+))""")
"""An assignment of one word."""
_DEFAULT = re.compile(r"\$\{(\w+):[-=]([^}\s$]+)\}")
"""A variable with what it is where nobody has set it."""
_ARRAY = ("[@]}", "[*]}", "$@", "$*")
"""The ends of words that stand for several."""
_ENDS = ("(", ")", "|", ";", "&", "&&", "||", ">", ">>", "2>&1")
"""Words of a shell behind which nothing is a value of the flag before them."""


def _words(text: str, is_variable: bool = False) -> Iterator[str]:
    """The words of a shell's text, those inside arrays and inside variables that hold options among them. Raises UsageError
    for quotes that do not end."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UsageError(f"cannot read the launch line: {error}: quote it as a shell would") from error
    for word in words:
        assigned = _ASSIGNED.fullmatch(word)
        if assigned and not is_variable and _HOLDS_OPTIONS.search(assigned[1]):
            yield from (";", *_words(assigned[1], is_variable=True), ";")
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
