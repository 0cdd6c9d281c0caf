"""The variables of a launch script that hold one text, without running the script.

Only plain assignments are read, up to the launch line. A variable whose text depends on what runs before it has no value here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from commlayer.profiles.errors import UsageError

__all__ = ["flags_of_commands", "logical_text", "split_words", "substituted", "unread_expansion", "variables_of"]

_COMMENT = re.compile(r"""('[^']*'|"(?:\\.|[^"\\])*"|\\.)|(?<![^\s;&|()])#[^\n]*""", re.DOTALL)
"""Quoted text, or a comment, which begins a word."""
_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)(?:(:?)-([^${}`]*))?\}")
"""A variable, with what stands for one that is not set, or behind a colon for one that is empty, too."""
_EXPANSION = re.compile(r"\$\{[^}]*\}?|\$\w+|\$\S*|`[^`]*`?")
"""Any text that a shell replaces."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_PUNCTUATION = "();<>|&\n"
_DECLARE = ("export", "local", "declare", "readonly", "typeset")
_OPEN = ("if", "for", "while", "until", "case", "select")
_CLOSE = ("fi", "done", "esac")
_BETWEEN = ("then", "else", "elif", "do", "!", "time")
_SETS_NAMES = ("for", "select", "read", "unset", "let", "mapfile", "readarray")
"""Commands whose words are names of variables that they change."""
_LAUNCH = re.compile(
    r"(.*/)?(torchrun|deepspeed|run_train\.sh|(pre)?train\w*\.py)|torch\.distributed\.\w+|torchtitan\.train"
)
"""A word that only a launch line has."""


def logical_text(text: str) -> str:
    """The text without comments, and with continued lines joined."""
    return _COMMENT.sub(lambda found: found[1] or "", text).replace("\\\n", " ")


def split_words(text: str, punctuation: str = "") -> list[str]:
    """The words of a shell's text without their quotes; words of ``punctuation`` by themselves.

    Raises UsageError for quotes that do not end.
    """
    lexer = shlex.shlex(text, posix=True, punctuation_chars=punctuation)
    lexer.whitespace = "".join(each for each in lexer.whitespace if each not in punctuation)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError as error:
        raise UsageError(f"cannot read the launch line: {error}: quote it as a shell would") from error


def substituted(word: str, variables: Mapping[str, str]) -> str:
    """The word with the values of its variables; those that nobody knows stay as they are written."""

    def value(expansion: re.Match[str]) -> str:
        held = variables.get(expansion[1] or expansion[2])
        if held is None or (not held and expansion[3]):
            return expansion[0] if expansion[4] is None else expansion[4]
        return held

    return _VARIABLE.sub(value, word)


def unread_expansion(word: str) -> str:
    """The first part of a substituted word that still depends on the shell; empty where none does."""
    expansion = _EXPANSION.search(word)
    return expansion[0] if expansion else ""


def variables_of(text: str, environment: Mapping[str, str], is_handed_on: bool = False) -> dict[str, str]:
    """The variables of the shell at the launch line: what ``text`` assigns, else what ``environment`` has.

    A name without one certain value stands for itself, ``$NAME``: assigned twice with different values, by ``+=``, in a
    condition or a loop, or with what only the shell computes.

    Args:
        text: the script.
        environment: the values of names that the text does not assign.
        is_handed_on: read also assignments in front of a command, which that command sees, and its own words do not.
    """
    values = dict(environment)
    assigned: dict[str, str] = {}
    depth = 0
    for words, is_conditional in _statements(split_words(logical_text(text), _PUNCTUATION)):
        while words and words[0] in (*_OPEN, *_CLOSE, *_BETWEEN):
            depth += (words[0] in _OPEN) - (words[0] in _CLOSE)
            if words[0] in _SETS_NAMES:
                break
            words = words[1:]
        if words and words[0] in _SETS_NAMES:
            values.update((word.partition("=")[0], f"${word.partition('=')[0]}") for word in words[1:])
            continue
        is_declared = bool(words) and words[0] in _DECLARE
        assignments = [_ASSIGNMENT.fullmatch(word) for word in words[is_declared:]]
        is_plain = is_declared or all(assignments)
        for assignment in assignments:
            if assignment is None:
                if is_plain:
                    continue  # an option, or a name alone
                break
            name, plus, value = assignment.groups()
            value = substituted(value, values)
            is_certain = not (plus or is_conditional or depth or unread_expansion(value))
            is_certain &= is_plain or is_handed_on
            if not is_certain or assigned.setdefault(name, value) != value:
                assigned[name] = value = f"${name}"
            values[name] = value
        if any(_LAUNCH.fullmatch(word) for word in words) and not is_plain:
            break
    return values


def flags_of_commands(text: str) -> Iterator[tuple[bool, str, dict[str, str]]]:
    """For each command of a script with flags of its own: whether it is a launch line, its first word, and the words behind
    each flag. Flags inside arrays and variables are of none; those on a line by themselves are of the command before them."""
    for words, _ in _statements(split_words(logical_text(text), _PUNCTUATION)):
        while words and (words[0] in (*_OPEN, *_BETWEEN, *_DECLARE) or _ASSIGNMENT.fullmatch(words[0])):
            words = words[1:]
        if not words or words[0].startswith("-"):
            continue
        is_launch = any(map(_LAUNCH.fullmatch, words)) and any(word.startswith(("--", "$")) for word in words)
        flags: dict[str, str] = {}
        name = ""
        for word in words[1:]:
            if word.startswith("--"):
                name, _, value = word[2:].replace("_", "-").partition("=")
                flags[name] = value
            elif name:
                flags[name] = f"{flags[name]} {word}".strip()
        if is_launch or flags:
            yield is_launch, words[0], flags


def _statements(words: list[str]) -> Iterator[tuple[list[str], bool]]:
    """The words of each command, and whether it runs only after another's success or failure. What is assigned in
    parentheses, such as an array, is a dollar sign: no one text."""
    statement: list[str] = []
    is_conditional = False
    depth = 0
    for word in words:
        if word in ("{", "}") and not depth:
            yield statement, is_conditional
            statement = []
            continue
        if word.strip(_PUNCTUATION):
            if not depth:
                statement.append(word)
            continue
        for each in word:
            if each == "(" and (depth or statement):
                if not depth and "=" in statement[-1]:
                    statement[-1] += "$"
                depth += 1
            elif each == ")" and depth:
                depth -= 1
            elif each not in "<>" and not depth:
                yield statement, is_conditional
                statement = []
                is_conditional = "&&" in word or "||" in word
    yield statement, is_conditional
