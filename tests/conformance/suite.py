"""PyTorch's own DistributedTest suite, loaded from the installed wheel with its gates open, one test at a time.

The suite decides at import, from BACKEND in the environment, which of its tests a backend gets: most by comparing with
"gloo", some with "mpi", some by tables of names. A backend that it has never heard of is refused most tests without a
word (65 pass instead of 126). So it is imported here, unchanged, with a BACKEND that equals all three names.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from witness import alarms, witnessed

from commlayer.emulation import EmulatedCluster, RankOutcome, RanksTimedOutError
from commlayer.testing.nodes import outcomes_on_nodes

__all__ = ["NODES", "Outcome", "Suite"]

NODES = {2: (1, 1), 3: (2, 1), 4: (2, 2)}
"""World size → ranks of each emulated node: two nodes wherever possible, so that two-level paths run."""

_STAYS_AWAY = "ranks stay away from a barrier, whose timeout is tested"
WRONG_ON_PURPOSE: dict[str, str] = {
    "test_barrier_timeout_full_group": _STAYS_AWAY,
    "test_barrier_timeout_global": _STAYS_AWAY,
    "test_barrier_timeout_group": _STAYS_AWAY,
    "test_monitored_barrier_failure_order": _STAYS_AWAY,
    "test_monitored_barrier_gloo": _STAYS_AWAY,
    "test_monitored_barrier_gloo_rank_0_timeout": _STAYS_AWAY,
    "test_monitored_barrier_gloo_subgroup": _STAYS_AWAY,
    "test_monitored_barrier_wait_all_ranks": _STAYS_AWAY,
}
"""Tests in which ranks wait for calls that others do not make: nobody is to say that nothing is wrong there."""

_MODULE = "torch.testing._internal.distributed.distributed_test"
_TAIL_CHARS = 4000
_GRACE_S = 1.0


class _OpenGate(str):
    """The name of a backend that also equals the names whose gates it shall pass."""

    __slots__ = ("_also",)
    _also: tuple[str, ...]

    def __new__(cls, name: str, also: Sequence[str]) -> _OpenGate:
        gate = super().__new__(cls, name)
        gate._also = tuple(also)
        return gate

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, str(other)) or other in self._also

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        # Tables of names are sets: a lookup first compares hashes, so the gate has to have that of the name it stands for.
        # Only "gloo" stands in such tables as something that is offered ("mpi" stands in those of what is not).
        return hash("gloo") if "gloo" in self._also else str.__hash__(self)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test: passed, failed (a rank raised or ended wrongly), error (it hung), or skipped."""

    name: str
    status: str
    seconds: float
    detail: str = ""


class Suite:
    """The suite for one backend and world size.

    Attributes:
        names: all tests, sorted.
        closed: test → reason, of those that the suite itself keeps from this backend.
    """

    def __init__(self, backend: str, world_size: int, gates: Sequence[str] = ("gloo", "mpi")) -> None:
        self.backend, self.world_size = backend, world_size
        # skip_if_small_worldsize and skip_if_odd_worldsize read this when a test runs, and let "mpi" through. They guard
        # groups of two ranks out of three or more, which a world of two does not have.
        at_run_time = "mpi" if "mpi" in gates and world_size > 2 else backend
        self._environment = {
            "BACKEND": at_run_time,
            "WORLD_SIZE": str(world_size),
        }
        module = _load(_OpenGate(backend, gates), self._environment)
        self._case: Any = type(
            "Conformance", (_Meeting, module.TestDistBackend, module.DistributedTest._DistTestBase), {}
        )
        self.names = sorted(name for name in dir(self._case) if name.startswith("test_"))
        self.closed = {
            name: str(test.__unittest_skip_why__)
            for name in self.names
            if getattr(test := getattr(self._case, name), "__unittest_skip__", False)
        }

    def run(self, name: str, cluster: EmulatedCluster, timeout_s: float) -> Outcome:
        """Run one test in forked ranks on ``cluster``; kills them after ``timeout_s`` seconds."""
        if name in self.closed:
            return Outcome(name, "skipped", 0.0, self.closed[name])
        start = time.monotonic()
        sizes = NODES[self.world_size]
        with tempfile.TemporaryDirectory(prefix="commlayer-conformance-") as folder:
            for sub in ("barrier", "test_dir", "init_dir"):
                (Path(folder) / sub).mkdir()
            try:
                outcomes = outcomes_on_nodes(
                    cluster, sizes, self._in_rank, name, Path(folder), timeout_s=timeout_s, grace_s=_GRACE_S
                )
            except RanksTimedOutError as error:
                detail = f"{error}\n{_logs(Path(folder))}"
                return Outcome(name, "error", time.monotonic() - start, detail)
            status, detail = _judge(outcomes)
            found = alarms(Path(folder)) if status == "passed" and name not in WRONG_ON_PURPOSE else []
            if found:
                status, detail = "alarmed", "\n".join(found)
            if status != "passed" and status != "skipped":
                detail = f"{detail}\n{_logs(Path(folder))}"
        return Outcome(name, status, time.monotonic() - start, detail)

    def _in_rank(self, name: str, folder: Path) -> str:
        """In a rank: the suite's own start, test and end. Returns why the test was skipped, or an empty string."""
        rank = int(os.environ["RANK"])
        log = os.open(folder / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        torch.set_num_threads(1)
        os.environ.update(self._environment, TEMP_DIR=str(folder), INIT_METHOD=f"file://{folder}/init_dir/shared")
        ours, pipe = multiprocessing.Pipe()
        try:
            with witnessed(folder):
                self._case._run(rank, name, str(folder / "rendezvous"), pipe)
        except SystemExit as end:
            status = end.code
        else:
            raise AssertionError(f"{name} neither ended nor raised")
        return _meaning(status, ours)


def _load(backend: _OpenGate, environment: dict[str, str]) -> ModuleType:
    """A new copy of the suite's module, whose constant BACKEND is ``backend``."""
    try:
        # Read when torch's test tools are loaded: the command that they would name does not exist here.
        with mock.patch.dict(os.environ, PYTORCH_PRINT_REPRO_ON_FAILURE="0"):
            from torch.testing._internal.common_distributed import DistTestCases
    except ModuleNotFoundError as error:
        raise SystemExit(f"PyTorch's own tests need {error.name}: pip install {error.name}") from error

    DistTestCases.backend_feature["plugin"].add(str.__str__(backend))  # where available backends of third parties stand
    sys.modules.pop(_MODULE, None)
    # A plain dict for the time of the import: the real os.environ would turn the open gate into a plain string.
    with mock.patch.object(os, "environ", {**os.environ, **environment, "BACKEND": backend}):
        module = importlib.import_module(_MODULE)
    if type(module.BACKEND) is not _OpenGate:
        raise RuntimeError(
            f"the suite of torch {torch.__version__} no longer takes its BACKEND from the environment: read {_MODULE} and "
            "adapt tests/conformance/suite.py"
        )
    return module


class _Meeting:
    """Stands before the suite's own base classes: how its ranks meet before and after a test."""

    def _barrier(self, wait_for: int | None = None, timeout: float = 30.0) -> None:
        """The work of the suite's file barrier, polling every 2 ms instead of 100: two of them frame each test."""
        folder = Path(os.environ["TEMP_DIR"]) / "barrier"
        count = getattr(self, "_meetings", 0) + 1
        self._meetings = count
        (folder / f"{count}.{os.getpid()}").touch()
        expected = dist.get_world_size() if wait_for is None else wait_for
        deadline = time.monotonic() + timeout
        while (arrived := len(list(folder.glob(f"{count}.*")))) < expected:
            if time.monotonic() > deadline:
                raise RuntimeError(f"barrier {count}: {arrived} of {expected} ranks came within {timeout:g} s")
            time.sleep(0.002)


def _meaning(code: Any, pipe: Any) -> str:
    """The meaning of a rank's exit status to the suite: fine, skipped (the reason is returned), or failed (raises)."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    if not code:
        return ""
    for skip in TEST_SKIPS.values():
        if skip.exit_code == code:
            return skip.message
    raise AssertionError(pipe.recv() if pipe.poll() else f"the rank exited with status {code}")


def _judge(outcomes: Sequence[RankOutcome]) -> tuple[str, str]:
    """The verdict of the suite's own parent: a failure of any rank fails; else rank 0 says whether it was skipped."""
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    if failures:
        first = [failure for failure in failures if not failure.by_cluster] or failures
        return "failed", first[0].describe()
    reason: str = outcomes[0].value
    return ("skipped", reason) if reason else ("passed", "")


def _logs(folder: Path) -> str:
    texts = (
        (path.name, path.read_text(errors="replace", encoding="utf-8").strip()) for path in sorted(folder.glob("*.log"))
    )
    return "\n".join(f"--- {name}\n{text[-_TAIL_CHARS:]}" for name, text in texts if text)
