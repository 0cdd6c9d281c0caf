"""A second try for what failed: each failed test runs once more, alone, when all others are done.

A test that passes then is *unsteady*: it raced with its neighbours, or with the machine. It does not fail the run, but it is
named in the last lines, and the file ``out/unsteady.md`` has what both tries printed. A test that fails again has failed.

Rejected: pytest-rerunfailures, which tries again at once, in the same process and beside the same neighbours.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["SECOND_TRY", "SecondTry"]

SECOND_TRY = "--second-try"
MOST = 12
"""More failures than this are no matter of luck, and are not tried again."""
_LIMIT_S = 600.0


class SecondTry:
    """Runs failed tests once more when a session ends. ``options`` are passed on to pytest, beside the test's name."""

    def __init__(self, config: pytest.Config, options: Sequence[str] = ()) -> None:
        self._config, self._options = config, tuple(options)
        self._path = config.rootpath / "out" / "unsteady.md"

    @pytest.hookimpl(trylast=True)  # behind pytest-xdist, which ends its workers here
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Try again what failed, and let the session pass where all of it passes now."""
        self._path.unlink(missing_ok=True)
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        has_stopped = session.shouldfail or session.shouldstop  # -x and --maxfail: other tests have not run
        if terminal is None or exitstatus != pytest.ExitCode.TESTS_FAILED or has_stopped:
            return
        reports = [*terminal.stats.get("failed", ()), *terminal.stats.get("error", ())]
        names = sorted({report.nodeid for report in reports if isinstance(report, pytest.TestReport)})
        if len(names) > MOST:
            terminal.write_line(f"\n{len(names)} tests failed: more than {MOST} are not tried again")
            return
        unsteady = {}
        for name in names:
            terminal.write_line(f"\ntrying again, alone: {name}")
            has_passed, printed = self._try(name)
            if has_passed:
                unsteady[name] = printed
        self._tell(terminal, unsteady)
        if not any(terminal.stats.get(kind) for kind in ("failed", "error")):
            session.testsfailed = 0
            session.exitstatus = pytest.ExitCode.OK

    def _try(self, name: str) -> tuple[bool, str]:
        """Whether a test passes in a process of its own, and what was printed."""
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *self._options, name]
        try:
            ran = subprocess.run(
                command, capture_output=True, text=True, check=False, cwd=self._config.rootpath, timeout=_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return False, f"did not end within {_LIMIT_S:g} s"
        # One that skips alone says nothing of why it failed before.
        has_passed = ran.returncode == 0 and re.search(r"\b1 passed", ran.stdout) is not None
        return has_passed, ran.stdout + ran.stderr

    def _tell(self, terminal: Any, unsteady: dict[str, str]) -> None:
        """Move the reports of unsteady tests from the failed ones to their own list, and write the file."""
        pages = []
        for kind in ("failed", "error"):
            others = []
            for report in terminal.stats.pop(kind, ()):
                if report.nodeid not in unsteady:
                    others.append(report)
                    continue
                terminal.stats.setdefault("unsteady", []).append(report)
                pages += [f"# {report.nodeid}", "## With all others", report.longreprtext]
                pages += [text for _, text in report.sections]
                pages += ["## Alone, where it passed", unsteady[report.nodeid]]
            if others:
                terminal.stats[kind] = others
        if pages:
            self._path.parent.mkdir(exist_ok=True)
            self._path.write_text("\n\n".join(pages) + "\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        names = sorted({report.nodeid for report in terminalreporter.stats.get("unsteady", ())})
        if names:
            terminalreporter.section("unsteady: failed beside others, passed alone", yellow=True)
            for name in names:
                terminalreporter.write_line(f"UNSTEADY {name}")
            terminalreporter.write_line(f"what both tries printed: {self._path}")


def register(config: pytest.Config, options: Sequence[str] = ()) -> None:
    """Have ``config``'s session try again, where that was asked for; workers of pytest-xdist leave it to their controller."""
    if config.getoption(SECOND_TRY) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondTry(config, options), "second-try")


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        SECOND_TRY,
        action="store_true",
        help="run what failed once more, alone, at the end; what passes then is listed as unsteady, in out/unsteady.md too",
    )
