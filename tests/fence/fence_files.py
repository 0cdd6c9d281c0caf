"""Files: audits, traces, logs of calls and counters of a small job on two emulated nodes, whose clocks stand still.

Compared are their bytes. Masked is what is another one in every process, for which there is no seam: the job's name, process and
thread numbers, the host's name, versions, and the folder of a program's file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from fence_cases import Case, Facts
from fence_profiles import small

from commlayer.emulation import EmulatedCluster

__all__ = ["cases"]

_ROOT = Path(__file__).parents[2]
_PROGRAM = Path(__file__).with_name("fence_job.py")
_SETTINGS = {
    "by a profile": {},
    "by a named plan, compared": {"PLAN": "pipelined:4", "DEBUG": "detail", "SHADOW": "1"},
    "in lanes, in BF16, over two connections": {"WIRE": "dp=bf16", "LANES": "on", "CONNECTIONS": "2"},
    "in the order of ranks": {"REDUCTION": "ordered", "INTRA": "gloo"},
}
"""Jobs, and their settings beside those that all have."""
_MASKS = (
    (r'"(job)": ?"[^"]*"', r'"\1": "a job"'),
    (r'"(host)": ?"[^"]*"', r'"\1": "a host"'),
    (r'("name": ?"rank \d+) \([^"]*\)"', r'\1 (a host)"'),
    (r'"(thread|ident|main)": ?\d+', r'"\1": 1'),
    (r'("host": "a host",\s*"pid": ?)\d+', r"\g<1>1"),
    (r'"(python|torch|numpy|commlayer)": ?"[^"]*"', r'"\1": "a version"'),
    (r'"[^"]*/(fence_job\.py)"', r'"\1"'),
)
_TIMEOUT_S = 120.0


def cases() -> list[Case]:
    """A case for each job: the content of all files of all ranks."""
    return [Case(f"a job {words}", partial(_files, settings)) for words, settings in _SETTINGS.items()]


def _files(settings: dict[str, str]) -> Facts:
    with TemporaryDirectory() as name:
        folder = Path(name)
        small().save(folder / "profile")
        given = {"PROFILE": str(folder / "profile"), "AUDIT": str(folder / "audit"), "TRACE": str(folder / "trace")}
        _run(folder, given | {"TRIALS": "off", "REPLAN": "off"} | settings)
        return {path.relative_to(folder).as_posix(): _masked(path) for path in sorted(folder.rglob("*.json"))}


def _run(folder: Path, settings: dict[str, str]) -> None:
    """Run the job. Its ranks are new processes, whose clocks are stopped before they load anything."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COMMLAYER_")}
    path = os.pathsep.join([str(_ROOT), *filter(None, [inherited.get("PYTHONPATH")])])
    ours = {f"COMMLAYER_{name}": value for name, value in settings.items()}
    variables = inherited | ours | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    with mock.patch.dict(os.environ, variables, clear=True), EmulatedCluster(2, 2, mode="loopback") as cluster:
        program = [sys.executable, str(_PROGRAM), str(folder)]
        cluster.command(program, timeout_s=_TIMEOUT_S, check=True, prefix=True)


def _masked(path: Path) -> Facts:
    """The content of a file, and a hash of its bytes, which also tells how it is laid out."""
    text = path.read_text(encoding="utf-8")
    for pattern, replacement in _MASKS:
        text = re.sub(pattern, replacement, text)
    return {"content": json.loads(text), "bytes": hashlib.sha256(text.encode()).hexdigest()[:24]}
