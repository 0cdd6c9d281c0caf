"""The pages about jobs that hang: their programs and commands are run in an empty folder, and answer as the pages say."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from dumps_in_memory import write_dumps
from jobs_in_memory import Job, Op, run

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "hang.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs" / "diagnose.md").read_text(encoding="utf-8")
LAUNCHING = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
FOLDER = "/home/me"
"""The folder in which the page's programs were run, by what the page shows."""
MOST_S = 200.0


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def commands(folder: Path, **programs: str) -> dict[str, str]:
    """Put ``commlayer``, ``python`` and scripts that stand in for other programs onto the path. Returns the environment."""
    folder.mkdir()
    main = "from commlayer.cli.main import main; main(prog_name='commlayer')"
    programs = {"commlayer": f'exec "{sys.executable}" -c "{main}" "$@"\n', **programs}
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}", encoding="utf-8")
        (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def said_before(end: str, script: str, folder: Path, environment: dict[str, str]) -> str:
    """Return what the commands print up to the line that begins with ``end``; then they are ended."""
    with subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        watchdog = threading.Timer(MOST_S, os.killpg, (process.pid, signal.SIGKILL))
        watchdog.start()
        said = []
        for line in process.stdout:
            if line.startswith(end):
                break
            said.append(line)
        watchdog.cancel()
        assert process.poll() is None, "a launcher whose script is over ends what prints the answer"
        os.killpg(process.pid, signal.SIGKILL)
    return "".join(said)


def test_the_page_is_read_at_once() -> None:
    assert len(PAGE.splitlines()) <= 60


def test_the_jobs_commands_print_the_pages_answer(tmp_path: Path) -> None:
    """A second stands for the page's minute and a half, by the dates of dumps."""
    pytest.importorskip("torch")
    folder = tmp_path / "empty"
    folder.mkdir()
    for program in blocks(PAGE, "python"):
        name = re.match(r"# (\w+\.py)", program)
        assert name
        (folder / name[1]).write_text(program, encoding="utf-8")
    module = folder / "dump_on_hang.py"
    shown = module.read_text(encoding="utf-8")
    written = "        file.write(dump)\n"
    assert shown.count(written) == shown.count("long_s=90") == 1
    later = "    os.utime(prefix + os.environ['RANK'], (time.time() + 90,) * 2)\n"
    module.write_text(shown.replace("long_s=90", "long_s=1").replace(written, written + later), encoding="utf-8")
    (script,) = blocks(PAGE, "bash")
    torchrun = f'exec "{sys.executable}" -m torch.distributed.run "$@"\n'
    environment = commands(tmp_path / "bin", torchrun=torchrun)
    said = said_before("ranks 0 and 1 wait", script, folder, environment).replace(str(folder), FOLDER)
    (answer,) = blocks(PAGE, "text")
    assert said.split() == answer.split()


# The lines for launchers, with dumps of a job that ran in memory


@pytest.fixture
def rank(tmp_path: Path) -> str:
    """A script that stands in for a rank of NCCL: it writes its dump where torch does, and fails."""
    a, b = Op("all_reduce", "dp", 1, 10), Op("all_gather", "tp", 2, 20)
    job = Job({"dp": (0, 1), "tp": (0, 1)}, {0: [a, b], 1: [b, a]})
    run(job, random.Random(1))
    write_dumps(tmp_path / "written", job, random.Random(1), has_timing=True)
    return f'cp -p {tmp_path}/written/*trace_rank_$RANK* "$TORCH_FR_DUMP_TEMP_FILE$RANK"; exit 1'


ANSWER = "cause: ranks 0 and 1 make their calls of groups the dp, the tp in different orders"


def test_a_batch_job_of_slurm_prints_the_answer(tmp_path: Path, rank: str) -> None:
    (script,) = [block for block in blocks(REFERENCE, "bash") if "#SBATCH" in block]
    (task,) = [block for block in blocks(LAUNCHING, "bash") if block.startswith("# task.sh")]
    (tmp_path / "task.sh").write_text(task, encoding="utf-8")
    tasks = 'for SLURM_PROCID in 0 1; do export SLURM_PROCID SLURM_LOCALID=$SLURM_PROCID; "$@" & done; wait; exit 1\n'
    environment = commands(tmp_path / "bin", srun=tasks, scontrol="echo node7\n", python=rank)
    slurm = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "4242",
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "node7",
    }
    said = said_before("last calls:", script, tmp_path, {**environment, **slurm})
    assert ANSWER in said
    assert sorted(path.name for path in (tmp_path / "dumps-4242").iterdir()) == ["trace_rank_0", "trace_rank_1"]


def test_a_pod_of_kubernetes_prints_the_answer(tmp_path: Path, rank: str) -> None:
    yaml = pytest.importorskip("yaml", reason="NOT TESTED: PyYAML is not installed (extra 'trainers' brings it)")
    container = yaml.safe_load(blocks(REFERENCE, "yaml")[0])
    assert container["command"] == ["bash", "-c"]
    (script,) = container["args"]
    (tmp_path / "dumps").mkdir()
    agent = f"for RANK in 0 1; do ({rank}) & done; wait; exit 1\n"
    environment = commands(tmp_path / "bin", torchrun=agent)
    said = said_before("last calls:", script.replace("/dumps", str(tmp_path / "dumps")), tmp_path, environment)
    assert ANSWER in said
