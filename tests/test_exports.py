"""Public names: what `__all__` promises exists, the lazy packages keep their promises, the drawn error tree is the real one."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import commlayer
import commlayer.errors
from commlayer.profiles import errors

MODULES = ["commlayer", *sorted(found.name for found in pkgutil.walk_packages(commlayer.__path__, "commlayer."))]
LAZY = [
    "commlayer",
    "commlayer.drawing",
    "commlayer.integrations",
    "commlayer.profiles",
    "commlayer.scheduler",
    "commlayer.testing",
]


def place(name: str) -> tuple[int, str]:
    """The order of names that ruff keeps in `__all__`: CONSTANTS, Classes, functions."""
    return 0 if name.isupper() else 1 if name[0].isupper() else 2, name


def test_every_floor_was_found() -> None:
    assert {"commlayer.profiles.curve", "commlayer.scheduler.plan", "commlayer.integrations"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_all_is_importable_and_sorted(name: str) -> None:
    module = importlib.import_module(name)
    public: list[str] = getattr(module, "__all__", [])
    assert public == sorted(set(public), key=place)
    for promised in public:
        assert getattr(module, promised, None) is not None, f"{name}.__all__ promises {promised}"


# Lazy packages


@pytest.fixture(params=LAZY)
def lazy(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def imported_for_type_checkers(module: ModuleType) -> set[str]:
    """The names that type checkers see of a package: the names under ``if TYPE_CHECKING:``, and those that it loads at once."""
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [*tree.body, *(inner for block in blocks for inner in block.body)]
    own = [node for node in imports if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("commlayer")]
    return {alias.asname or alias.name for node in own for alias in node.names} - {"lazy_names"}


def test_a_lazy_package_shows_its_names_before_it_loads_them(lazy: ModuleType) -> None:
    assert set(lazy.__all__) <= set(dir(lazy))
    assert dir(lazy) == sorted(dir(lazy))


def test_type_checkers_see_the_same_names(lazy: ModuleType) -> None:
    assert imported_for_type_checkers(lazy) == set(lazy.__all__)


def test_an_unknown_name_is_an_attribute_error_that_names_it(lazy: ModuleType) -> None:
    with pytest.raises(AttributeError, match=rf"{lazy.__name__}.*'all_to_some'"):
        _ = lazy.all_to_some
    assert not hasattr(lazy, "all_to_some")


def test_an_unknown_name_of_commlayer_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=", ".join(commlayer.__all__)):
        _ = commlayer.Comunicator


# Errors


def drawn_tree(text: str) -> dict[str, set[str]]:
    """Each class of a drawn tree with its bases: the one it hangs from, and those named as "(also …)"."""
    tree: dict[str, set[str]] = {}
    above: list[str] = []  # the path from the root to the last class
    for line in text.splitlines():
        found = re.match(r"    (?P<branch>[│├└─ ]*)(?P<name>[A-Z]\w+)(?: \(also (?P<also>\w+)\))?(?:  |$)", line)
        if found is None:
            continue
        del above[len(found["branch"]) // 4 :]
        tree[found["name"]] = {*above[-1:], *([found["also"]] if found["also"] else [])}
        above.append(found["name"])
    return tree


def defined_tree(module: ModuleType) -> dict[str, set[str]]:
    classes = [kind for _, kind in inspect.getmembers(module, inspect.isclass) if kind.__module__ == module.__name__]
    return {kind.__name__: {base.__name__ for base in kind.__bases__} - {"Exception"} for kind in classes}


def test_the_drawn_error_tree_is_the_real_one() -> None:
    assert drawn_tree(errors.__doc__ or "") == defined_tree(errors)
    assert sorted(defined_tree(errors)) == [name for name in errors.__all__ if not name.isupper()]
    assert errors.__all__ == commlayer.errors.__all__


def test_the_check_of_the_error_tree_can_fail() -> None:
    text = errors.__doc__ or ""
    assert drawn_tree(text.replace("(also ValueError)", "")) != defined_tree(errors)
    assert drawn_tree(text.replace("│   ├── PlanError", "├── PlanError")) != defined_tree(errors)
    assert drawn_tree(re.sub(r".*GroupError.*\n", "", text)) != defined_tree(errors)


# One name, one thing

Meanings = dict[str, dict[int, set[str]]]

EACH_HAS_ITS_OWN = {
    "attach": "of a module of instruments: what gives them to a new group",
    "attach_of_calls": "the same, to a group's calls on a device",
    "explain": "of what a package answers: why a mapping was chosen, why a job hangs",
    "load": "of a catalogue: the entry of that name",
    "main": "of a program: what `python -m` and a console script run",
    "names": "of a catalogue: those of its entries",
    "resolve": "of a catalogue: the entry of that name, or what a file holds",
}
"""Names that say the same of each module that has them."""


def meanings(modules: list[ModuleType]) -> Meanings:
    """For each public name the different things that it stands for, each with the modules that have it in ``__all__``."""
    found: Meanings = {}
    for module in modules:
        for name in getattr(module, "__all__", []):
            found.setdefault(name, {}).setdefault(id(getattr(module, name)), set()).add(module.__name__)
    return found


def doubled(modules: list[ModuleType]) -> dict[str, list[set[str]]]:
    return {name: list(things.values()) for name, things in meanings(modules).items() if len(things) > 1}


def test_a_public_name_stands_for_one_thing() -> None:
    found = doubled([importlib.import_module(name) for name in MODULES])
    more = {name: where for name, where in found.items() if name not in EACH_HAS_ITS_OWN}
    assert more == {}, "one name for several things: rename all of them but one"


def test_the_check_of_names_can_fail() -> None:
    one, other = ModuleType("one"), ModuleType("other")
    for module in (one, other):
        vars(module).update(__all__=["Shape", "shared"], Shape=type("Shape", (), {}), shared=place)
    assert doubled([one, other]) == {"Shape": [{"one"}, {"other"}]}


def test_no_public_name_is_one_of_torchs_work() -> None:
    assert "Work" not in commlayer.__all__
    assert "Work" not in importlib.import_module("commlayer.integrations").__all__
