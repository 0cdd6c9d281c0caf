"""Names that README.md and docs/ show are importable from where they import it: three modules, and a list of documented ones."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

PUBLIC = {"commlayer", "commlayer.integrations", "commlayer.scheduler"}
DOCUMENTED = {
    "commlayer.emulation": "a tool of its own: docs/emulation.md",
    "commlayer.calls.instruments": "for who listens to calls himself: docs/tracing.md",
    "commlayer.calls.ring": "the call that he hears of: docs/tracing.md",
    "commlayer.diagnosis": "a call for launchers: docs/diagnose.md",
    "commlayer.integrations.transformers": "for one trainer: docs/trainers/transformers.md",
    "commlayer.scheduler.conflicts": "the words of a simulated program, Call, Issue and Wait: docs/conflicts.md",
    "commlayer.scheduler.mapping": "modules that count: docs/counting.md, docs/clusters.md",
    "commlayer.testing": "for tests: docs/testing.md",
}
"""Modules beside those three from which the documentation imports, and why."""

_BESIDE = ("examples", "fake_world", "faulty_verbs", "megatron_on_cpu", "simulated", "witness")
"""What pages show of a checkout that no wheel has: examples, and modules of tests."""
_FROM = re.compile(rf"^[ \t]*from ((?:commlayer|{'|'.join(_BESIDE)})\b[\w.]*) import (\([^)]*\)|[^\n#]+)", re.M)
_IMPORT = re.compile(r"^[ \t]*import (commlayer[\w.]*)", re.M)
_DOTTED = re.compile(r"`(commlayer(?:\.\w+)+)")


def imports(text: str) -> Iterator[tuple[str, str]]:
    """Each module of ours that a page imports, with each name that it takes from there ("" for the module itself)."""
    for module in _IMPORT.findall(text):
        yield module, ""
    for module, names in _FROM.findall(text):
        for name in names.strip("() \n").split(","):
            if name.strip():
                yield module, name.split()[0]


def shown(pages: list[Path]) -> list[tuple[str, str, str]]:
    found = {(page.relative_to(ROOT).as_posix(), *each) for page in pages for each in imports(page.read_text("utf-8"))}
    return sorted(found)


SHOWN = shown(PAGES)


def has(module: str, name: str) -> bool:
    """Whether ``from module import name`` works."""
    try:
        return (
            not name
            or hasattr(importlib.import_module(module), name)
            or bool(importlib.import_module(f"{module}.{name}"))
        )
    except ImportError:
        return False


def resolves(dotted: str) -> bool:
    """Whether ``commlayer.a.b`` is a module, or a name in one (of one)."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for name in parts[count:]:
            found = getattr(found, name, None)
        return found is not None
    return False


def test_imports_are_found_however_they_are_laid_out() -> None:
    text = (
        "import commlayer\n    from commlayer.scheduler import Job, search  # words\nfrom commlayer import (\n    A, B as C,\n)\n"
        "see from commlayer import Nothing\n"
    )
    assert sorted(imports(text)) == [
        ("commlayer", ""),
        ("commlayer", "A"),
        ("commlayer", "B"),
        ("commlayer.scheduler", "Job"),
        ("commlayer.scheduler", "search"),
    ]
    assert len(SHOWN) > 40
    assert {page for page, _, _ in SHOWN} >= {
        "README.md",
        "docs/search.md",
        "docs/trainers/torch.md",
    }
    assert {module.partition(".")[0] for _, module, _ in SHOWN} == {"commlayer", *_BESIDE}


def test_the_documentation_imports_from_public_modules() -> None:
    modules = {module for _, module, _ in SHOWN if not module.startswith(_BESIDE)}
    assert modules - PUBLIC <= set(DOCUMENTED), [each for each in SHOWN if each[1] not in PUBLIC | set(DOCUMENTED)]
    assert set(DOCUMENTED) <= modules, "nothing imports from it any more: take it out of the list"


@pytest.mark.parametrize(("page", "module", "name"), SHOWN)
def test_what_the_documentation_imports_is_there(page: str, module: str, name: str) -> None:
    assert has(module, name), f"{page}: from {module} import {name}"
    if name and module in PUBLIC:
        assert name in importlib.import_module(module).__all__, f"{page}: {module}.__all__ lacks {name}"


def test_the_checks_of_names_can_fail() -> None:
    assert not has("commlayer.scheduler", "searched")
    assert not has("commlayer.schedule", "search")
    assert resolves("commlayer.scheduler.search")
    assert not resolves("commlayer.scheduler.searched")


def test_names_in_the_prose_exist() -> None:
    dotted = {(page.name, name) for page in PAGES for name in _DOTTED.findall(page.read_text("utf-8"))}
    files = (".md", ".json")
    assert [each for each in sorted(dotted) if not each[1].endswith(files) and not resolves(each[1])] == []


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has after ``code``."""
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    return set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


def test_importing_commlayer_loads_nothing_of_it_but_what_loads_its_names() -> None:
    loaded = loaded_by("import commlayer; dir(commlayer)")
    own = {"commlayer", "commlayer.profiles", "commlayer.profiles.lazy_names"}
    assert {name for name in loaded if name.startswith("commlayer")} == own
    assert loaded.isdisjoint({"ast", "inspect", "dataclasses"})


def test_every_name_of_the_scheduler_does_without_torch_and_numpy() -> None:
    loaded = loaded_by("import commlayer.scheduler as s\nfor name in s.__all__: getattr(s, name)")
    assert "commlayer.scheduler.mapping.search" in loaded
    assert loaded.isdisjoint({"torch", "numpy", "scipy"})


def test_a_function_is_not_replaced_by_the_module_of_its_name() -> None:
    loaded_by(
        "import commlayer.scheduler.price, commlayer.scheduler.decision, commlayer.scheduler.mapping.search\n"
        "from commlayer.scheduler import choose, price, search\n"
        "assert callable(choose) and callable(price) and callable(search)"
    )
