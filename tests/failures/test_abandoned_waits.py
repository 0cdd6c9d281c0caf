"""Calls that a bounded wait has let go of do not take the program down when it ends."""

from __future__ import annotations

import subprocess
import sys
import time
from textwrap import dedent
from typing import Any

import pytest

from commlayer.failures import waits

ENDING = dedent(
    """
    from datetime import timedelta
    from torch.distributed import HashStore
    from commlayer.failures import endings, waits

    class Broken:
        has_abandoned, is_broken, has_leaver = False, True, False

    def asking(count):
        # Comes back from C++, and asks for the interpreter's lock, while the program ends: one of them at every moment of that.
        return lambda: HashStore().wait(["never"], timedelta(milliseconds=60 + 4 * count))

    for count in range(100):
        try:
            waits.bounded(asking(count), Broken(), 30.0, "a test")
        except RuntimeError:
            pass
    raise RuntimeError("a rank died")
    """
)


def test_a_program_ends_by_its_own_error() -> None:
    """It ended in SIGABRT ("terminate called without an active exception")."""
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60.0, check=False)
    assert done.returncode == 1, done.stderr
    assert "RuntimeError: a rank died" in done.stderr


def test_what_never_ends_is_not_waited_for() -> None:
    """Each abandoned wait is joined at most as long as all of them may take."""
    joined: list[float] = []

    class Stuck:
        def is_alive(self) -> bool:
            return True

        def join(self, patience_s: float) -> None:
            joined.append(patience_s)

    stuck: list[Any] = [Stuck(), Stuck()]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(waits, "_asked", stuck)
        began = time.monotonic()
        assert waits.join_abandoned(0.25)
        assert all(patience_s <= 0.25 for patience_s in joined)
        patched.setattr(waits, "_asked", [])
        assert not waits.join_abandoned(30.0)
    assert len(joined) == 2
    assert time.monotonic() - began < 30.0
