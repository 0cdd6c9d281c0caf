"""The pages about jobs that hang: their programs and commands are run in an empty folder, and answer as the pages say."""

from __future__ import annotations

import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
    programs = {"commlayer": f'exec "{sys.executable}" -c "{main}" "$@" 2> >(tee {folder}/waits >&2)\n', **programs}
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
        assert process.poll() is None, "a launcher whose script is over ends what prints the answer"
        os.killpg(process.pid, signal.SIGTERM)  # not SIGKILL: torchrun's workers are in sessions of their own
        process.stdout.read()  # until all that print have ended
        watchdog.cancel()
    return "".join(said)


def test_the_page_is_read_at_once() -> None:
    assert len(PAGE.splitlines()) <= 60


def test_the_jobs_commands_print_the_pages_answer(tmp_path: Path) -> None:
    """A second stands for the page's 84, by the dates of dumps."""
    pytest.importorskip("torch")
    folder = tmp_path / "empty"
    folder.mkdir()
    for program in blocks(PAGE, "python"):
        name = re.match(r"# (\w+\.py)", program)
        assert name
        (folder / name[1]).write_text(program, encoding="utf-8")
    module = folder / "dump_on_hang.py"
    shown = module.read_text(encoding="utf-8")
    written = "_dump_fr_trace())\n"
    assert shown.count(written) == shown.count("7e5") == 1
    later = " " * 12 + "os.utime(prefix + os.environ['RANK'], (time.time() + 90,) * 2)\n"
    module.write_text(shown.replace("7e5", "7e3").replace(written, written + later), encoding="utf-8")
    (script,) = blocks(PAGE, "bash")
    torchrun = f'exec "{sys.executable}" -m torch.distributed.run "$@"\n'
    environment = commands(tmp_path / "bin", torchrun=torchrun)
    said = said_before("ranks 0 and 1 wait", script, folder, environment).replace(str(folder), FOLDER)
    (answer,) = blocks(PAGE, "text")
    assert said.split() == answer.split()


Step = Sequence[Callable[[], object]]
Look = Callable[[Sequence[Step]], list[Any]]


class Over(Exception):
    """The end of the time that a test lets the module look for."""


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    """Returns what runs the page's module as rank 0, on a recorder of the test's own. Before each look one step's actions are
    done."""
    calls: list[dict[str, Any]] = []
    recorder = SimpleNamespace(_dump_fr_trace=lambda *_: pickle.dumps({"entries": calls}))
    for name, module in (("torch", object()), ("torch._C", object()), ("torch._C._distributed_c10d", recorder)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{tmp_path}/trace_rank_")
    monkeypatch.setenv("RANK", "0")
    (source,) = [block for block in blocks(PAGE, "python") if block.startswith("# dump_on_hang.py")]
    program: dict[str, Any] = {}

    def run_steps(steps: Sequence[Step]) -> list[Any]:
        left = iter(steps)

        def sleep(_: float) -> None:
            step = next(left, None)
            if step is None:
                raise Over
            for action in step:
                action()

        exec(source.partition("threading.Thread")[0], program)
        program["time"] = SimpleNamespace(sleep=sleep, time_ns=time.time_ns)
        with pytest.raises(Over):
            program["dump_on_hang"]()
        return calls

    run_steps([])
    return run_steps


def waits(calls: list[Any], number: int, seconds: float, *, retired: bool = False) -> None:
    created_ns = time.time_ns() - int(seconds * 1e9)
    calls[:] = [{"record_id": number, "time_created_ns": created_ns, "timeout_ms": 120_000, "retired": retired}]


def dates_from(path: Path, seconds: float) -> None:
    """Have a file be as if written so many seconds from now."""
    path.touch()
    os.utime(path, (time.time() + seconds,) * 2)


def test_the_module_dumps_at_each_hang_and_at_no_sound_pause(tmp_path: Path, look: Look) -> None:
    dump, other, calls = tmp_path / "trace_rank_0", tmp_path / "trace_rank_1", look([])
    for path in (dump, other):
        dates_from(path, -3600)  # an earlier job's
    has_dumped = []

    def see() -> None:
        has_dumped.append(dump.stat().st_size > 0)
        written = dump.stat().st_mtime
        dump.write_bytes(b"")
        os.utime(dump, (written, written))

    look(
        [
            [partial(waits, calls, 3, 80)],
            [see, partial(waits, calls, 3, 90, retired=True)],
            [see, partial(waits, calls, 4, 86)],
            [see, partial(waits, calls, 4, 88)],
            [see, partial(waits, calls, 5, 86)],
            [see, partial(waits, calls, 6, 1), partial(dates_from, other, 40)],
            [see, partial(dates_from, dump, 41)],
            [see],
        ]
    )
    assert has_dumped == [False, False, True, False, True, True, False]


# The lines for launchers, with dumps of a job that ran in memory


@pytest.fixture
def rank(tmp_path: Path) -> str:
    """A script that stands in for a rank of NCCL: it writes its dump where torch does, and fails."""
    a, b = Op("all_reduce", "dp", 1, 10), Op("all_gather", "tp", 2, 20)
    job = Job({"dp": (0, 1), "tp": (0, 1)}, {0: [a, b], 1: [b, a]})
    run(job, random.Random(1))
    write_dumps(tmp_path / "written", job, random.Random(1), has_timing=True)
    awaited = f"until grep -q waiting {tmp_path}/bin/waits; do sleep 0.1; done"
    return f'{awaited}; cp -p {tmp_path}/written/*trace_rank_$RANK* "$TORCH_FR_DUMP_TEMP_FILE$RANK"; exit 1'


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
