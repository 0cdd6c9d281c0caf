"""The floors: integrations → commlayer (runtime) → scheduler → profiles, and what each floor may load.

The contracts are import-linter's, in pyproject.toml. Every check here is also shown to fail on what it forbids.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("commlayer", "profiles", "scheduler", "integrations")
FOLDERS = (*FLOORS, "tests", "benchmarks")
HEAVY = {"torch", "numpy", "scipy", "matplotlib"}


def run_python(code: str, *arguments: str, where: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter whose first import path is ``where``."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)


# Contracts


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    return run_python(
        "import sys; from importlinter.cli import lint_imports as l; sys.exit(l(no_cache=True))", where=root
    )


def test_the_import_contracts_hold() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("profiles/links.py", "import commlayer.scheduler.plan", "profiles import no other floor"),
        ("profiles/curve.py", "from commlayer.settings import Settings", "profiles import no other floor"),
        ("profiles/sweep.py", "def later() -> None:\n    import torch", "profiles import no other floor"),
        ("scheduler/price.py", "from commlayer.engine import runner", "the scheduler imports profiles only"),
        ("scheduler/moves.py", "import numpy", "the scheduler imports profiles only"),
        ("scheduler/plan.py", "import commlayer.integrations", "the scheduler imports profiles only"),
        ("scheduler/mapping/compute.py", "def later() -> None:\n    import pathlib", "the scheduler opens no files"),
        ("scheduler/decision.py", "from commlayer.profiles import files", "the scheduler opens no files"),
        ("integrations/moe/layer.py", "import commlayer.emulation", "trainers import no leaf"),
        ("integrations/moe/layer.py", "import examples.train", "trainers import no leaf"),
        ("commlayer/failures/waits.py", "import commlayer.emulation", "rooms import what is below them"),
        ("commlayer/backend/order.py", "import commlayer.emulation", "rooms import what is below them"),
        (
            "scheduler/price.py",
            "import commlayer.scheduler.mapping.job",
            "what runs and prices calls imports no planner",
        ),
        ("commlayer/engine/runner.py", "import commlayer.integrations", "the runtime does not know its integrations"),
        (
            "commlayer/drawing/style.py",
            "from commlayer.transport import contract",
            "drawing and emulation do without torch",
        ),
        ("commlayer/transport/contract.py", "import commlayer.engine.planned", "rooms import what is below them"),
        (
            "commlayer/backend/order.py",
            "def later() -> None:\n    from commlayer.auditing import ledger",
            "what runs calls does not know who listens",
        ),
        ("commlayer/calls/ring.py", "import commlayer.statistics", "what runs calls does not know who listens"),
        (
            "commlayer/auditing/watch.py",
            "def later() -> None:\n    from commlayer.engine import planned",
            "who listens to calls does not know what runs them",
        ),
        (
            "commlayer/engine/planned.py",
            "def later() -> None:\n    from commlayer.wire import codecs",
            "a planned call on the CPU needs no device",
        ),
        ("commlayer/a_new_module.py", "", "rooms import what is below them"),
    ],
)
def test_a_forbidden_import_breaks_its_contract(tmp_path: Path, module: str, line: str, broken: str) -> None:
    for floor in FLOORS:
        shutil.copytree(ROOT / floor, tmp_path / floor, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert [text for text in result.stdout.splitlines() if text.startswith(broken) and " BROKEN" in text]


# What importing a floor loads: contracts see static imports only

LOADED = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        importlib.import_module(found.name)
print("\\n".join(sys.modules))
"""


def loaded_by(*packages: str) -> set[str]:
    """The modules in memory after every module of ``packages`` was imported."""
    result = run_python(LOADED, *packages)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def strangers(loaded: set[str], *floors: str) -> set[str]:
    """The wrong ones of ``loaded``: heavy libraries, and modules of commlayer that are not on ``floors``."""
    ours = {name for name in loaded if name.startswith("commlayer.")}
    return loaded & HEAVY | {name for name in ours if not f"{name}.".startswith(tuple(f"{floor}." for floor in floors))}


@pytest.mark.parametrize(
    "floors", [("commlayer.profiles",), ("commlayer.scheduler", "commlayer.profiles")], ids=["profiles", "scheduler"]
)
def test_importing_an_offline_floor_loads_nothing_heavy_and_nothing_above_it(floors: tuple[str, ...]) -> None:
    assert not strangers(loaded_by(*floors), *floors)


def test_the_check_of_loaded_modules_can_fail() -> None:
    assert strangers(loaded_by("commlayer.profiles", "numpy.version"), "commlayer.profiles") == {"numpy"}
    assert strangers(loaded_by("commlayer.units"), "commlayer.profiles") >= {"commlayer.units"}
    assert "commlayer.scheduler.plan" in strangers(loaded_by("commlayer.scheduler.plan"), "commlayer.profiles")


@pytest.mark.parametrize("package", ["commlayer.drawing", "commlayer.emulation"])
def test_drawing_and_emulation_load_nothing_heavy_when_imported(package: str) -> None:
    result = run_python(f"import sys, {package}; print(' '.join(sys.modules))")
    assert result.returncode == 0, result.stderr
    assert not HEAVY & set(result.stdout.split())


# The scheduler is arithmetic: the contract "files" sees modules that it would open files with, this sees the calls

OPENING = {"__import__", "compile", "eval", "exec", "input", "open", "print"}
READING = {"load_profile", "open", "read_bytes", "read_text", "save", "write", "write_bytes", "write_text"}


def input_and_output(source: str) -> list[str]:
    """Calls of builtins and of methods that read or write something outside the program, and JSON that is parsed."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and node.id in OPENING | {"load_profile"}:
            found.append(node.id)
        elif isinstance(node, ast.Attribute):
            is_parsed = node.attr in ("load", "loads") and isinstance(node.value, ast.Name) and node.value.id == "json"
            found += [ast.unparse(node)] * (node.attr in READING or is_parsed)
        elif isinstance(node, ast.ImportFrom):
            found += [alias.name for alias in node.names if alias.name in READING]
    return found


def test_the_scheduler_reads_and_writes_nothing() -> None:
    paths = [path for path in modules() if path.is_relative_to(ROOT / "scheduler")]
    assert len(paths) > 20
    assert {path: io for path in paths if (io := input_and_output(path.read_text(encoding="utf-8")))} == {}


def test_the_check_of_input_and_output_can_fail() -> None:
    bad = "import json\nfrom a import load_profile\ndef f(p):\n    json.loads(p.read_text()); print(open(p))\n"
    assert sorted(input_and_output(bad)) == ["json.loads", "load_profile", "open", "p.read_text", "print"]
    assert input_and_output("import json\nfrom a import catalog\njson.dumps(catalog.load('x'))\n") == []


# `import scheduler` works in a checkout, and finds a trainer's own module (or none) everywhere else


FOLDER = re.compile(r"(?<![\w.])(profiles|scheduler|integrations)\b")
"""The name of a folder that is not within another's: a program without any need not be parsed."""


def bare_imports(source: str) -> list[str]:
    """Imports of a floor by its folder's name instead of through commlayer."""
    if not FOLDER.search(source):
        return []
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append(node.module or "")
    return [name for name in found if name.split(".")[0] in ("profiles", "scheduler", "integrations")]


def modules() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def test_no_module_imports_a_floor_by_its_folder() -> None:
    assert {path: bare for path in modules() if (bare := bare_imports(path.read_text(encoding="utf-8")))} == {}


def test_the_check_of_bare_imports_can_fail() -> None:
    bad = "import os, scheduler\ndef f():\n    from profiles.curve import Curve\nfrom integrations import moe\n"
    assert bare_imports(bad) == ["scheduler", "integrations", "profiles.curve"]
    assert bare_imports("from commlayer.scheduler import plan\nfrom commlayer import profiles") == []
