"""Programs that name CUDA devices on a machine without any: what they get, and how they are run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron_on_cpu import _CpuForCuda
from run_as_main import run_as_main

HELPERS = Path(__file__).resolve().parents[1]


def test_tensors_of_a_cuda_device_are_on_the_cpu_and_say_otherwise() -> None:
    with _CpuForCuda():
        x = torch.zeros(2, device="cuda")
        y = torch.ones(2).to(torch.device("cuda", 3), torch.bfloat16)
        assert x.cuda() is x
        assert x.type() == "torch.cuda.FloatTensor"
        assert y.type() == "torch.cuda.BFloat16Tensor"
        assert x.type(torch.float64).dtype is torch.float64
        assert torch.zeros(2, device="meta").device.type == "meta"
    assert {x.device.type, y.device.type} == {"cpu"}
    assert x.type() == "torch.FloatTensor"


def outcome(tmp_path: Path, *words: str) -> tuple[int, str]:
    (tmp_path / "program.py").write_text("import sys\nprint(__name__, *sys.argv)\n", encoding="utf-8")
    code = "import sys; from run_as_main import run_as_main; run_as_main(sys.argv[1:], 'how to use it')"
    ran = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(HELPERS)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return ran.returncode, ran.stdout + ran.stderr


def test_a_program_or_a_module_is_run_as_the_main_one(tmp_path: Path) -> None:
    assert outcome(tmp_path, "program.py", "-m", "x") == (0, "__main__ program.py -m x\n")
    assert outcome(tmp_path, "-m", "program", "x") == (0, f"__main__ {tmp_path / 'program.py'} x\n")


@pytest.mark.parametrize("words", [[], ["-m"]])
def test_without_either_its_use_is_said(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="how to use it"):
        run_as_main(words, "how to use it")
