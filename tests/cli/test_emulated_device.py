"""The words of ``commlayer emulate`` about emulated accelerators."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from commlayer.cli.emulated_device import describe_computation, describe_device
from commlayer.emulation import Accelerator, DeviceReport

ROOT = Path(__file__).resolve().parents[2]


def report(rank: int, late: int = 0, late_s: float = 0.0, cpu_s: float = 0.1) -> DeviceReport:
    return DeviceReport(rank, 10, 4e12, 2.0, late, late_s, cpu_s, 4.0)


def test_which_device_is_stood_for_is_said_before() -> None:
    assert describe_device(None) == ""
    assert describe_device(Accelerator(4e12)) == (
        "; each rank an emulated accelerator of 4 TFLOP/s; NOT a measurement of one"
    )
    assert describe_device(Accelerator(4e12, 3.35e12, 100.0)) == (
        "; each rank an emulated accelerator of 4 TFLOP/s with memory of 3.35 TB/s; accelerators and wires run 100 times slower "
        "than that (time dilation); NOT a measurement of one"
    )


def test_times_are_also_those_of_the_cluster_that_is_stood_for() -> None:
    said = describe_computation(Accelerator(4e12, scale=100.0), [report(0)], 1, 12.0)
    assert said == (
        "took 12.00 s, 120 ms of the cluster's time\n"
        "rank 0: 10 operations, 4e+12 FLOPs, busy for 2.00 s (20 ms of the cluster's time) of 4.00 s; none late; 100 ms of a core"
    )


def test_what_was_late_and_which_scale_would_give_it_time() -> None:
    said = describe_computation(Accelerator(4e12, scale=10.0), [report(0), report(1, 5, 3.0)], 3, 1.0).splitlines()
    assert said[1].startswith("2 of 3 ranks report an emulated accelerator")
    assert "rank 1: 10 operations" in said[3]
    assert "50.0% of them late, by 3.00 s in all" in said[3]
    assert said[4] == (
        "LATE: on this machine operations take up to 2.50 times as long as declared (rank 1): --scale 28 gives them time"
    )


def test_full_cores_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    said = describe_computation(Accelerator(4e12), [report(0, cpu_s=4.0), report(1, cpu_s=3.0)], 2, 1.0)
    assert "the ranks used 88% of this machine's cores" in said
    assert "--scale 2.5 halves that" in said


def test_no_rank_may_report() -> None:
    assert describe_computation(Accelerator(4e12), [], 4, 1.0).splitlines()[1].startswith("0 of 4 ranks report")


@pytest.mark.cluster
def test_a_program_is_told_of_before_and_after(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\nassert (torch.ones(100, 100) @ torch.ones(100, 100)).sum().item() == 1e6\n", encoding="utf-8"
    )
    options = ["--mode=loopback", "--nodes=1", "--ranks-per-node=2", "--compute=4gflops", "--scale=100"]
    command = [sys.executable, "-m", "commlayer", "emulate", *options, "--", sys.executable, str(program)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (
        "; each rank an emulated accelerator of 4 GFLOP/s; accelerators and wires run 100 times slower" in done.stderr
    )
    assert "rank 0: 1 operations, 2e+06 FLOPs, busy for 50 ms (500 µs of the cluster's time)" in done.stderr
    assert "rank 1: 1 operations, 2e+06 FLOPs, busy for 50 ms" in done.stderr
