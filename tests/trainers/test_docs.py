"""The programs in docs/trainers and docs/launching.md run, and give the losses that they give on Gloo."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path

import torch

from commlayer.statistics import Stats, stats

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
PAGES = [*sorted(DOCS.glob("trainers/*.md")), DOCS / "launching.md"]


def programs() -> dict[str, str]:
    """The blocks whose first line is a comment with a file's name, by that name."""
    found: dict[str, str] = {}
    for page in PAGES:
        for block in re.findall(r"^```\w+\n(# \S+\.\w+\n.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S):
            name = block.split()[1]
            assert name not in found, f"two programs are called {name}"
            found[name] = block
    return found


PROGRAMS = programs()


def imports(program: str) -> set[str]:
    """The libraries that a program imports, to be loaded once, before the ranks are forked."""
    nodes = list(ast.walk(ast.parse(program)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def perform(path: Path, environment: dict[str, str], arguments: list[str]) -> tuple[str, Stats]:
    """A rank's job: the program as if called from the shell. Returns what it printed, and commlayer's statistics."""
    os.environ.update(environment)
    os.chdir(path.parent)
    torch.set_num_threads(1)
    sys.argv = [str(path), *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        kept = runpy.run_path(str(path), run_name="__main__")
    del kept
    return printed.getvalue(), stats()
