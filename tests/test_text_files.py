"""Text files are read and written in an encoding that is named: the default is the machine's.

ruff's rule of this kind (PLW1514) is a preview, and does not know which variable holds a path.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("commlayer", "profiles", "scheduler", "integrations", "examples", "benchmarks", "docs", "tests")
PLACES = {"read_text": 0, "write_text": 1, "open": 3, "fdopen": 3, "NamedTemporaryFile": 2, "TemporaryFile": 2}
"""Functions that open text files, and the place of the encoding among their arguments."""
BINARY_BY_DEFAULT = ("NamedTemporaryFile", "TemporaryFile")
NAMED = re.compile(rf"\b({'|'.join(PLACES)})\b")
"""A program without any of these names opens nothing, and need not be parsed."""
OTHERS = ("os.open", "work.open")
"""Functions of such a name that open no text."""


def unnamed_encodings(text: str) -> Iterator[str]:
    """The calls of a program that open a text file without saying in which encoding."""
    if not NAMED.search(text):
        return
    for call in ast.walk(ast.parse(text)):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute | ast.Name):
            continue
        is_method = isinstance(call.func, ast.Attribute)
        name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id
        if name not in PLACES or ast.unparse(call.func) in OTHERS:
            continue
        named = {each.arg: each.value for each in call.keywords}
        is_paths = name == "open" and is_method
        is_given = len(call.args) > PLACES[name] - is_paths or not named.keys().isdisjoint({"encoding", None})
        at = 0 if is_paths or name in BINARY_BY_DEFAULT else 1
        default = ast.Constant("w+b" if name in BINARY_BY_DEFAULT else "r")
        mode = named.get("mode", call.args[at] if len(call.args) > at else default)
        is_binary = isinstance(mode, ast.Constant) and "b" in str(mode.value) and not name.endswith("_text")
        if not is_given and not is_binary:
            yield f"line {call.lineno}: {ast.unparse(call)}"


def test_every_text_file_is_opened_in_a_named_encoding() -> None:
    paths = {each.resolve() for name in FOLDERS for each in (ROOT / name).rglob("*.py")}
    found = {
        f"{path.relative_to(ROOT)}, {call}"
        for path in sorted(paths)
        for call in unnamed_encodings(path.read_text(encoding="utf-8"))
    }
    assert not found, "give encoding='utf-8'"


@pytest.mark.parametrize(
    "program",
    [
        "path.read_text()",
        "path.write_text(text)",
        "open(name)",
        "path.open('w')",
        "path.open()",
        "os.fdopen(end, 'w')",
        "tempfile.TemporaryFile('w')",
    ],
)
def test_the_check_of_encodings_can_fail(program: str) -> None:
    assert list(unnamed_encodings(program)) == [f"line 1: {program}"]


@pytest.mark.parametrize(
    "program",
    [
        "path.read_text('utf-8')",
        "path.write_text(text, encoding='utf-8')",
        "open(name, 'rb')",
        "open(name, mode='wb')",
        "path.open('ab')",
        "os.open(name, os.O_RDONLY)",
        "tempfile.TemporaryFile()",
        "open(name, **options)",
    ],
)
def test_who_names_an_encoding_or_reads_bytes_is_left_alone(program: str) -> None:
    assert list(unnamed_encodings(program)) == []
