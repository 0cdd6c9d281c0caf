"""Checks how the suite treats a test that fails beside others and passes alone: see unsteady.py."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
FIRST_TIME = """
from pathlib import Path
import pytest

def is_first_time(name):
    marker = Path(__file__).with_name(name)
    if marker.exists():
        return False
    marker.touch()
    return True

"""
UNSTEADY = FIRST_TIME + "def test_races():\n    print('beside others')\n    assert not is_first_time('raced')\n"
IN_A_FIXTURE = (
    FIRST_TIME
    + "@pytest.fixture\ndef part():\n    assert not is_first_time('part')\n\ndef test_has_a_part(part): pass\n"
)
FAILS = "def test_fails(): assert False\n"
PASSES = "def test_passes(): pass\n"
SKIPS_ALONE = (
    FIRST_TIME + "def test_skips():\n    if not is_first_time('met'): pytest.skip('alone')\n    assert False\n"
)
DIES = FIRST_TIME + "import os\n\ndef test_ends_its_worker():\n    if is_first_time('dead'):\n        os._exit(3)\n"


def outcome(folder: Path, *tests: str, options: tuple[str, ...] = ("--second-try",)) -> tuple[int, str, str]:
    """The exit status, what was printed, and what the file says, of ``tests``, one file each, beside the suite's conftest.py."""
    for name in ("conftest.py", "unsteady.py"):
        shutil.copy(HERE / name, folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = trainers: x\n", encoding="utf-8")
    for nth, text in enumerate(tests):
        (folder / f"test_{nth}.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:commlayer", *options]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=200)
    written = folder / "out" / "unsteady.md"
    return ran.returncode, ran.stdout + ran.stderr, written.read_text(encoding="utf-8") if written.exists() else ""


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "workers"])
def test_what_passes_alone_is_listed_and_passes(workers: tuple[str, ...], tmp_path: Path) -> None:
    status, printed, written = outcome(tmp_path, UNSTEADY, IN_A_FIXTURE, PASSES, options=("--second-try", *workers))
    assert status == 0, printed
    assert "UNSTEADY test_0.py::test_races" in printed
    assert "UNSTEADY test_1.py::test_has_a_part" in printed
    assert re.search(r"1 passed, 2 unsteady in", printed), printed
    assert written.count("## With all others") == written.count("## Alone, where it passed") == 2
    assert "assert not is_first_time('raced')" in written
    assert "beside others" in written
    assert "1 passed" in written


def test_what_fails_again_has_failed(tmp_path: Path) -> None:
    status, printed, written = outcome(tmp_path, FAILS, UNSTEADY)
    assert status == 1, printed
    assert re.search(r"1 failed, 1 unsteady in", printed), printed
    assert "FAILED test_0.py::test_fails" in printed
    assert "test_fails" not in written


def test_one_that_skips_alone_has_failed(tmp_path: Path) -> None:
    status, printed, written = outcome(tmp_path, SKIPS_ALONE)
    assert status == 1, printed
    assert not written


def test_one_that_ends_its_worker_is_tried_too(tmp_path: Path) -> None:
    status, printed, _ = outcome(tmp_path, DIES, PASSES, options=("--second-try", "-n", "2"))
    assert status == 0, printed
    assert "UNSTEADY test_0.py::test_ends_its_worker" in printed


def test_many_failures_are_not_tried_again(tmp_path: Path) -> None:
    many = "import pytest\n\n@pytest.mark.parametrize('nth', range(13))\ndef test_fails(nth): assert False\n"
    status, printed, _ = outcome(tmp_path, many)
    assert status == 1, printed
    assert "13 tests failed: more than 12 are not tried again" in printed
    assert "trying again" not in printed


def test_an_earlier_list_does_not_stay(tmp_path: Path) -> None:
    outcome(tmp_path, UNSTEADY)
    status, _, written = outcome(tmp_path, UNSTEADY)
    assert status == 0
    assert not written


def test_a_run_that_stopped_at_its_first_failure_has_failed(tmp_path: Path) -> None:
    status, printed, _ = outcome(tmp_path, UNSTEADY, PASSES, options=("--second-try", "-x"))
    assert status != 0, printed
    assert "trying again" not in printed


def test_without_the_option_a_failure_is_one(tmp_path: Path) -> None:
    status, printed, _ = outcome(tmp_path, UNSTEADY, options=())
    assert status == 1, printed


def test_the_targets_ask_for_it() -> None:
    makefile = (HERE.parent / "Makefile").read_text(encoding="utf-8")
    assert "pytest --second-try" in makefile
