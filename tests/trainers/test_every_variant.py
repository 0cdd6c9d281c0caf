"""make trainers fails where something skips, and runs what make test leaves out."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = """
import pytest

def test_runs(): pass

@pytest.mark.trainers
def test_variant(): pass

def test_skips(): pytest.skip("NOT TESTED: one is not installed")

@pytest.mark.xfail
def test_fails_as_is_known(): assert False
"""


def outcome(tmp_path: Path, *options: str) -> tuple[int, str]:
    """The exit status and what was printed of four tests beside the suite's conftest.py."""
    for name in ("conftest.py", "unsteady.py"):
        shutil.copy(HERE.parent / name, tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = trainers: x\n", encoding="utf-8")
    (tmp_path / "test_four.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "test_whole.py").write_text('import pytest\npytest.importorskip("nobody_has_it")\n', encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:commlayer", str(tmp_path), *options]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=100)
    return ran.returncode, ran.stdout + ran.stderr


def test_whatever_skips_fails_where_all_are_asked_for(tmp_path: Path) -> None:
    status, printed = outcome(tmp_path, "--every-variant", "--continue-on-collection-errors")
    assert status != 0, printed
    assert "nothing may be skipped here: Skipped: could not import 'nobody_has_it'" in printed
    assert "nothing may be skipped here: Skipped: NOT TESTED: one is not installed" in printed
    assert re.search(r"1 failed, 2 passed, 1 xfailed, 1 error", printed), printed


def test_variants_are_left_out_and_counted_by_default(tmp_path: Path) -> None:
    status, printed = outcome(tmp_path)
    assert status == 0, printed
    assert re.search(r"1 passed, 2 skipped, 1 deselected, 1 xfailed", printed), printed


def test_the_target_asks_for_all() -> None:
    makefile = (HERE.parent.parent / "Makefile").read_text(encoding="utf-8")
    assert "pytest tests/trainers --every-variant" in makefile
