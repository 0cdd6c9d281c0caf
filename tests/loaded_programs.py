"""Programs of several ranks that begin from one interpreter with everything loaded, and end as programs do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["run_loaded"]

_LAUNCHER = """
import json, os, sys
text, modules, jobs = json.loads(sys.argv[1])
for module in modules:
    __import__(module)
statuses, code = [], compile(text, "<program>", "exec")
for job in jobs:
    children = []
    for arguments, said in job:
        child = os.fork()
        if child == 0:
            to = os.open(said, os.O_WRONLY | os.O_CREAT)
            os.dup2(to, 2)
            os.close(to)
            break
        children.append(child)
    else:
        statuses.append([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
        continue
    sys.argv[1:] = arguments
    exec(code, {"__name__": "__main__"})
    break
else:
    print(json.dumps(statuses))
"""


def run_loaded(
    program: str,
    modules: Sequence[str],
    jobs: Sequence[Sequence[Sequence[str]]],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path,
    timeout_s: float = 90.0,
) -> list[list[tuple[int, str]]]:
    """Run ``program``, Python's text, as each rank of one job after another; ``jobs`` has the arguments of each rank.

    The ranks are forked from an interpreter that has imported ``modules``, which takes longer than most jobs. Each ends as an
    interpreter does: by its own status, after its threads, its handlers and its objects are gone. Returns the status and the
    stderr of each rank; ``folder`` is for the latter.

    Raises subprocess.TimeoutExpired, after killing the ranks, where all jobs together take longer than ``timeout_s``.
    """
    said = [[str(folder / f"stderr-{i}-{k}") for k, _ in enumerate(job)] for i, job in enumerate(jobs)]
    given = [list(zip(map(list, job), paths, strict=True)) for job, paths in zip(jobs, said, strict=True)]
    launcher = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, json.dumps([program, list(modules), given])],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        statuses = json.loads(launcher.communicate(timeout=timeout_s)[0])
    finally:
        if launcher.returncode is None:
            os.killpg(launcher.pid, 9)
            launcher.communicate()
    return [
        [(status, Path(path).read_text(encoding="utf-8")) for status, path in zip(of_job, paths, strict=True)]
        for of_job, paths in zip(statuses, said, strict=True)
    ]
