"""The driver of PyTorch's own suite, on a handful of its tests. `make conformance` runs them all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("expecttest", reason="PyTorch's own tests import it")
pytestmark = pytest.mark.cluster

FOLDER = Path(__file__).parent
PASSES = ["test_all_reduce_group_sum", "test_broadcast_full_group", "test_get_rank"]
GLOO_LACKS = "test_all_to_all"
NEEDS_CUDA = "test_reduce_sum_cuda"

BACKENDS = """
import time
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

def silent(store, rank, size, timeout):  # knows its ranks, moves nothing
    return FakeProcessGroup._create_internal(rank, size)

def stuck(*_):
    time.sleep(600)

dist.Backend.register_backend("silent", silent, devices=["cpu"])
dist.Backend.register_backend("stuck", stuck, devices=["cpu"])
"""

SEVERAL = """
import contextlib, io, json, sys
import driver

results = []
for arguments in json.load(sys.stdin):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            status = driver.main(arguments)
        except SystemExit as end:
            status = end.code
    results.append([status, out.getvalue()])
json.dump(results, sys.stdout)
"""
"""Loading PyTorch's suite takes seconds: once for all tests here, and not in pytest's own process, which it changes."""

RUNS = {
    "gloo": ["--backend", "gloo", "--world", "3", "--json", "--only", *PASSES, GLOO_LACKS, NEEDS_CUDA],
    "silent": [
        "--backend",
        "silent",
        "--module",
        "made_up",
        "--world",
        "2",
        "--only",
        "test_get_rank",
        "test_broadcast",
    ],
    "stuck": [
        "--backend",
        "stuck",
        "--module",
        "made_up",
        "--world",
        "2",
        "--timeout",
        "0.5",
        "--json",
        "--only",
        *PASSES[1:],
    ],
    "unknown": ["--backend", "gloo", "--world", "2", "--only", "test_of_nothing"],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, str]]:
    """The results that the driver returned and printed, for each of RUNS."""
    folder = tmp_path_factory.mktemp("backends")
    (folder / "made_up.py").write_text(BACKENDS, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-c", SEVERAL],
        input=json.dumps(list(RUNS.values())),
        env={**os.environ, "PYTHONPATH": f"{FOLDER}:{folder}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return dict(zip(RUNS, json.loads(result.stdout), strict=True))


def statuses(output: str) -> dict[str, str]:
    (report,) = json.loads(output)
    return {outcome["name"]: outcome["status"] for outcome in report["outcomes"]}


def test_gloo_passes_what_was_recorded_and_a_failure_is_told_from_a_skip(results: dict[str, tuple[Any, str]]) -> None:
    status, output = results["gloo"]
    assert status == 0
    assert statuses(output) == {**dict.fromkeys(PASSES, "passed"), GLOO_LACKS: "failed", NEEDS_CUDA: "skipped"}
    (report,) = json.loads(output)
    assert report["nodes"] == "2+1"
    details = {outcome["name"]: outcome["detail"] for outcome in report["outcomes"]}
    assert "ProcessGroupGloo::alltoall: invalid tensor size" in details[GLOO_LACKS]


def test_a_backend_that_breaks_a_test_of_gloo_is_named_and_fails_the_run(results: dict[str, tuple[Any, str]]) -> None:
    status, output = results["silent"]
    assert status == 1
    assert "failed test_broadcast" in output
    assert "test_get_rank" not in output


def test_a_test_that_hangs_is_killed_and_the_next_one_runs(results: dict[str, tuple[Any, str]]) -> None:
    status, output = results["stuck"]
    assert status == 1
    assert statuses(output) == dict.fromkeys(PASSES[1:], "error")
    (report,) = json.loads(output)
    assert report["missing"] == PASSES[1:]
    assert "2 of 2 ranks still ran after 0.5 s" in report["outcomes"][0]["detail"]


def test_an_unknown_test_is_refused(results: dict[str, tuple[Any, str]]) -> None:
    status, _ = results["unknown"]
    assert "no test 'test_of_nothing'" in status
