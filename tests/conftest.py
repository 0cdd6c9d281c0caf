"""Settings of the whole suite: property tests have no deadline, because the machines that run them are shared; which tests run by
default, and in which order; with --every-variant all of them run, and none may skip."""

from __future__ import annotations

import functools
import gc
import math
import os
import sys
from collections.abc import Generator, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import unsteady

# A job of the backend that finds no profile measures one and keeps it in the user's cache: only tests of that do so.
os.environ.setdefault("COMMLAYER_PROFILE", "none")
os.environ.setdefault("COMMLAYER_TRIALS", "off")
os.environ.setdefault("COMMLAYER_REPLAN", "off")
# Images of containers switch bytecode files off. Each process that tests start would then compile this package again, and each of
# pytest's workers would rewrite the asserts of all test files.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Tables are as wide as a pipe's, also where a user exports the width of his terminal; pytest-xdist does so for its workers.
os.environ.pop("COLUMNS", None)

try:
    from hypothesis import settings
except ImportError:  # tests/gpu also runs with a GPU machine's own packages (see CONTRIBUTING.md), and needs none of it
    pass
else:
    settings.register_profile("commlayer", deadline=None)
    settings.load_profile("commlayer")


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep temporary files among pytest's own, which it removes: jobs whose calls time out leave some."""
    folder = str(tmp_path_factory.mktemp("temporary"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr("tempfile.tempdir", folder)
        yield


@pytest.fixture(autouse=True)
def whole_probes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that measures its links in a test measures all of them, however busy the machine is."""
    if "emulated_cluster" in request.fixturenames or request.node.get_closest_marker("cluster"):
        from commlayer.measure import calibrate

        _load_for_ranks()
        import huge_pages

        huge_pages.gather()
        for name in ("PROBE", "DEVICE_PROBE"):
            monkeypatch.setattr(calibrate, name, replace(getattr(calibrate, name), deadline_s=math.inf))


@functools.cache
def _load_for_ranks() -> None:
    """Do once, before ranks are forked, what each of them would do when it makes its first group."""
    import encodings.idna  # noqa: F401  of each host's name

    import commlayer.backend.new_groups  # noqa: F401  and all that it imports
    from commlayer.backend import patches
    from commlayer.calls import instruments

    for name in (*instruments.OWN, instruments.INQUIRIES):
        import_module(name)
    patches.teach_torch()


_SWITCH = "--every-variant"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(_SWITCH, action="store_true", help="also tests marked trainers, and whatever skips fails")
    unsteady.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    unsteady.register(config, [_SWITCH] if config.getoption(_SWITCH) else [])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    return _failed_where_skipped((yield), item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    return _failed_where_skipped((yield), collector.config)


def pytest_collection_finish() -> None:
    """Exempt what is imported from searches for cycles: each would look at half a million objects that stay."""
    gc.collect()
    gc.freeze()


def _failed_where_skipped(report: Any, config: pytest.Config) -> Any:
    if report.skipped and not hasattr(report, "wasxfail") and config.getoption(_SWITCH):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome, report.longrepr = "failed", f"{_SWITCH}: nothing may be skipped here: {why}"
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Leave out variants, unless they are asked for; put tests of the simulated device before all others of each worker, and
    those of diagnoses before these.

    torch's autograd counts devices at a process's first backward pass, and ranks are forked from the process that runs the tests:
    once one of them has made such a pass there, no rank can train on that device any more. Workers take contiguous shares.
    Diagnoses look at the threads of this process, of which faulthandler shows a hundred: simulated devices leave theirs behind.
    """
    if not config.getoption(_SWITCH):
        left_out = [item for item in items if item.get_closest_marker("trainers")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    first = [item for item in items if "diagnosis" in item.path.parts]
    first += [item for item in items if hasattr(getattr(item, "module", None), "simulated_device")]
    taken = set(first)
    others = [item for item in items if item not in taken]
    items.clear()
    # Shares are as large as pytest-xdist makes them: with one test more its worker would have trained before.
    for left in range(num_workers, 0, -1):
        share, ahead = (len(first) + len(others)) // left, -(-len(first) // left)
        items += [*first[:ahead], *others[: share - ahead]]
        del first[:ahead], others[: share - ahead]
