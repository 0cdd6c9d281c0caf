"""The house: no import circle, and a list of rooms for who looks for one.

The arrows between rooms are a contract of import-linter's (tests/test_layers.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parent.parent
Circles = set[frozenset[str]]


def imports_of(package: str, *, types: bool) -> dict[str, set[str]]:
    """Which modules of ``package`` each of them imports, also inside functions; ``types``: and under ``TYPE_CHECKING``."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=not types, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def reached(module: str, imports: Mapping[str, set[str]]) -> set[str]:
    """Every module that ``module`` imports, itself or through others: ``module`` too where it is on a circle."""
    found: set[str] = set()
    ahead = [module]
    while ahead:
        new = imports[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def circles(imports: Mapping[str, set[str]]) -> Circles:
    """The largest sets of modules of which each imports all others, itself or through others."""
    reach = {module: reached(module, imports) for module in imports}
    return {
        frozenset(other for other in ahead if module in reach[other])
        for module, ahead in reach.items()
        if module in ahead
    }


@pytest.mark.parametrize("types", [False, True], ids=["at run time", "with those for types"])
def test_no_imports_go_in_circles(types: bool) -> None:
    assert circles(imports_of("commlayer", types=types)) == set(), (
        "a circle: move what both need into a module below them"
    )


CIRCLED = {
    "__init__": "",
    "a": "from circled.b import B\n",
    "b": "def later():\n    from circled import c\n\nclass B: ...\n",
    "c": "import circled.a\n",
    "d": "from typing import TYPE_CHECKING\nimport circled.a\nif TYPE_CHECKING:\n    from circled.e import E\n",
    "e": "import circled.d\n\nclass E: ...\n",
    "f": "import circled.e\n",
}


def test_the_check_of_circles_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "circled").mkdir()
    for name, text in CIRCLED.items():
        (tmp_path / "circled" / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    first = frozenset({"circled.a", "circled.b", "circled.c"})
    assert circles(imports_of("circled", types=False)) == {first}
    assert circles(imports_of("circled", types=True)) == {first, frozenset({"circled.d", "circled.e"})}


# docs/house.md


def rooms_on_disk() -> set[str]:
    """Every folder with modules, as the repository has it: through no link."""
    tops = [ROOT / name for name in ("commlayer", "profiles", "scheduler", "integrations")]
    inits = [init for top in tops for init in top.rglob("__init__.py")]
    linked = [ROOT / "commlayer" / name for name in ("profiles", "scheduler", "integrations")]
    own = [init for init in inits if not any(init.is_relative_to(link) for link in linked)]
    return {f"{init.parent.relative_to(ROOT).as_posix()}/" for init in own}


def rooms_listed(text: str) -> list[str]:
    """The words before the colon of each line of the list."""
    return re.findall(r"^ *- `([\w/]+/)`: ", text, re.M)


def test_every_room_is_in_the_list_once() -> None:
    listed = rooms_listed((ROOT / "docs" / "house.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(rooms_on_disk())


def test_the_check_of_the_list_can_fail() -> None:
    text = "- `commlayer/`: all\n  - `commlayer/cli/`: words\n`commlayer/backend/`: no item of the list\n"
    assert rooms_listed(text) == ["commlayer/", "commlayer/cli/"]


def strange_folders(tests: Path, rooms: set[str]) -> set[str]:
    """Folders with tests that have no room's name, as ``commlayer/<room>/`` or, below another floor, ``<floor>/``."""
    known = {room.removeprefix("commlayer/") for room in rooms}
    folders = {
        f"{test.parent.relative_to(tests).as_posix()}/" for test in tests.rglob("test_*.py") if test.parent != tests
    }
    return folders - known


def test_tests_lie_in_folders_of_the_rooms_names() -> None:
    assert strange_folders(ROOT / "tests", rooms_on_disk()) == {"conformance/", "fence/", "gpu/", "trainers/"}


def test_the_check_of_tests_folders_can_fail(tmp_path: Path) -> None:
    for name in ("test_all.py", "cli/test_words.py", "sausages/test_skin.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert strange_folders(tmp_path, {"commlayer/cli/", "profiles/"}) == {"sausages/"}


# Names of modules

_NAMED_AFTER = ("commlayer/cli/", "benchmarks/")
"""Modules with the name of a command, or of what is measured: the same word for the same thing as the module that does it."""


def ambiguous(modules: Iterable[str]) -> dict[str, list[str]]:
    """Names that several modules have, with their paths, where not all but one are named after the one."""
    found: dict[str, list[str]] = {}
    for path in modules:
        found.setdefault(path.rpartition("/")[2], []).append(path)
    return {
        name: paths
        for name, paths in found.items()
        if name != "__init__.py" and sum(not path.startswith(_NAMED_AFTER) for path in paths) > 1
    }


def test_a_module_s_name_means_one_thing() -> None:
    folders = ("commlayer", "profiles", "scheduler", "integrations", "examples", "benchmarks", "tests")
    found = {each.resolve().relative_to(ROOT).as_posix() for name in folders for each in (ROOT / name).rglob("*.py")}
    assert set(ambiguous(sorted(found))) == {"errors.py"}  # one exports what the other defines


def test_the_check_of_names_can_fail() -> None:
    twice = ["commlayer/emulation/ranks.py", "tests/ranks.py"]
    assert ambiguous([*twice, "commlayer/cli/plan.py", "scheduler/plan.py"]) == {"ranks.py": twice}
