"""The wheel that users install: every package, the catalogue, and nothing beside `commlayer` in site-packages."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import commlayer

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parent.parent
LINKS = ("profiles", "scheduler", "integrations")
NOT_SOURCE = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "dist", "out", "site", "tests", "docs", "examples", "benchmarks"
)


@pytest.fixture(scope="module")
def project() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def packages_on_disk(root: Path, folders: dict[str, str]) -> set[str]:
    """Every folder with an ``__init__.py``, named by the map from packages to folders; links are followed by the map only."""
    found = set()
    for package, folder in folders.items():
        for current, children, files in os.walk(root / folder):  # os.walk does not enter links
            children[:] = [child for child in children if child != "__pycache__"]
            if "__init__.py" in files:
                found.add(".".join([package, *Path(current).relative_to(root / folder).parts]))
    return found


def test_the_list_of_packages_equals_the_folders(project: Any) -> None:
    setuptools = project["tool"]["setuptools"]
    listed = setuptools["packages"]
    assert listed == sorted(set(listed))
    assert set(listed) == packages_on_disk(ROOT, setuptools["package-dir"])


def test_a_folder_without_an_init_holds_no_modules(project: Any) -> None:
    """It would work in a checkout, as a namespace package, and be missing from the wheel."""
    for folder in project["tool"]["setuptools"]["package-dir"].values():
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path


def test_the_check_of_the_list_can_fail(tmp_path: Path) -> None:
    for name in ("a", "a/b", "b_on_disk"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "a" / "link").symlink_to("../b_on_disk")
    (tmp_path / "a" / "data").mkdir()
    assert packages_on_disk(tmp_path, {"x": "a", "x.link": "b_on_disk"}) == {"x", "x.b", "x.link"}


@pytest.mark.parametrize("name", LINKS)
def test_the_links_are_relative(name: str) -> None:
    link = ROOT / "commlayer" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert (link / "__init__.py").exists()


def test_one_version(project: Any) -> None:
    assert project["project"]["version"] == commlayer.__version__
    assert f"## {commlayer.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("[", "")


def test_constraints_pin_what_the_project_asks_for(project: Any) -> None:
    """Set-up installs each of our own requirements at one version; their own requirements are theirs."""
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split("\n") if "==" in line
    )
    extras = project["project"]["optional-dependencies"]
    asked = project["project"]["dependencies"] + extras["dev"]
    for name in (
        "deepspeed",
        "docs",
        "emulation",
        "plots",
        "trainers",
        "triton",
        "torchft",
        "torchtitan",
    ):  # what dev, or make trainers, asks for
        asked += extras[name]
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in asked} - {"commlayer"}
    assert names == set(pins)


# The wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of the tree: building leaves folders behind."""
    pytest.importorskip("setuptools", reason="building a wheel needs setuptools (in the dev extra)")
    place = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, place / "source", symlinks=True, ignore=NOT_SOURCE)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(place), str(place / "source")], check=True)
    (built,) = place.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_puts_only_commlayer_into_site_packages(contents: set[str]) -> None:
    information = f"commlayer-{commlayer.__version__}.dist-info"
    assert {name.split("/")[0] for name in contents} == {"commlayer", information}
    assert f"{information}/licenses/LICENSE" in contents


def test_the_wheel_has_every_module_and_data_file(contents: set[str], project: Any) -> None:
    expected = {"commlayer/py.typed"}
    for package, folder in project["tool"]["setuptools"]["package-dir"].items():
        expected |= {
            f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}"
            for pattern in ("*.py", "*.json", "*.html", "*.css", "py.typed")
            for path in (ROOT / folder).rglob(pattern)
            if not any(parent.is_symlink() for parent in path.parents)
        }
    assert {
        "commlayer/drawing/templates/page.html",
        "commlayer/profiles/catalog/monta-a800-2x8.json",
        "commlayer/scheduler/mapping/checked_rows.json",
    } <= expected
    assert {name for name in contents if name.startswith("commlayer/")} == expected


def test_the_unpacked_wheel_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = """
import json, commlayer.scheduler, commlayer.cli.main, commlayer.integrations
from commlayer.profiles import catalog
from commlayer.scheduler.mapping.validity import checked_rows
assert checked_rows()
print(json.dumps([commlayer.__file__, [catalog.load(name).name for name in catalog.names()]]))
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    where, names = json.loads(result.stdout)
    assert Path(where).is_relative_to(tmp_path)
    assert names == sorted(path.stem for path in (ROOT / "profiles" / "catalog").glob("*.json"))
