"""One hang in a large job, and the time and memory that its diagnosis takes.

``python benchmarks/hangs_at_scale.py`` writes what the ranks of a job leave when one of them makes two
calls in another order: dumps of torch's Flight Recorder as NCCL's ranks pickle them, and the lines of
their watchdogs, a log for each node. Then it runs ``commlayer diagnose`` on each, and prints the seconds,
the most memory of all its processes together (PSS, which counts shared pages once), and what was
found. ``--keep FOLDER`` keeps the files.

A rank is in the group of all ranks, and in those of a mesh of eight-way tensor, two-way context, sixteen-way data
and four-way pipeline parallelism, with expert parallelism among the data parallel ranks (1,024 ranks). Its calls
are random, but the same on all ranks. The ring of a rank has lost the oldest of its calls.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "diagnosis"))  # jobs in memory

from dumps_in_memory import START_NS, device_dump
from jobs_in_memory import Groups, Job, Op, Program
from rich.console import Console
from rich.progress import track
from watchdogs_in_memory import Style, watchdog_lines

MESH = {
    "tensor": (0, 1, 2),
    "context": (3,),
    "data": (4, 5, 6, 7),
    "pipeline": (8, 9),
    "tensor and context": (0, 1, 2, 3),
    "data and context": (3, 4, 5, 6, 7),
    "expert": (4, 5, 6),
    "expert data": (3, 7),
    "tensor and expert": (0, 1, 2, 4, 5, 6),
    "model": (0, 1, 2, 8, 9),
    "tensor and data": (0, 1, 2, 4, 5, 6, 7),
}
"""The groups of a rank beside that of all: the bits of its number in which the members of a group differ."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
NUM_LOST = 100
"""The calls that a ring has lost."""
NUM_LAST = 40
"""The calls at the end of the program that are run; those before have ended on all ranks."""
NODE = 8
SAMPLED_S = 0.2
"""The time between two looks at the memory of all processes."""
HANGS = ("order", "absent")


def main() -> None:
    """Write the files, diagnose them, and print what that took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=1024, help="a power of two (1024)")
    parser.add_argument("--entries", type=int, default=2000, help="of each rank's ring (2000)")
    parser.add_argument("--hang", choices=HANGS, default=HANGS[0], help="what one rank does (order)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where to write the files")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        culprit = arguments.ranks // 2 + 5
        job = large_hang(arguments.ranks, arguments.entries, arguments.hang, culprit)
        write(job, folder, arguments.entries)
        console = Console(width=200)
        console.print(f"{arguments.hang} by rank {culprit}, of {arguments.ranks} ranks in {len(job.groups)} groups")
        for kind in ("dumps", "logs"):
            console.print(measured(folder / kind), highlight=False)


def mesh_groups(num_ranks: int) -> Groups:
    """The groups of all ranks, by names such as ``data 17``."""
    num_bits = num_ranks.bit_length() - 1
    groups = {"world": tuple(range(num_ranks))}
    for name, bits in MESH.items():
        members: dict[int, list[int]] = {}
        for rank in range(num_ranks):
            members.setdefault(rank & ~sum(1 << bit for bit in bits), []).append(rank)
        if min(bits) < num_bits:
            groups |= {f"{name} {index}": tuple(ranks) for index, ranks in enumerate(members.values())}
    return groups


def large_hang(num_ranks: int, num_entries: int, hang: str, culprit: int, seed: int = 0) -> Job:
    """A job in which nobody can go on any more, because of what the rank ``culprit`` has done."""
    random_ = random.Random(seed)
    groups = mesh_groups(num_ranks)
    of_rank: dict[int, dict[str, str]] = {rank: {} for rank in range(num_ranks)}
    for key, ranks in groups.items():
        for rank in ranks:
            of_rank[rank][key.rpartition(" ")[0] or key] = key
    names = list(of_rank[0])
    lines = [
        (random_.choice(names), random_.choice(KINDS), random_.choice((64, 256, 4096)))
        for _ in range(20 * len(names))  # the places of the program, in a loop
    ]
    num_calls = num_entries + NUM_LOST
    program: Program = {}
    for rank in range(num_ranks):
        ops = [
            Op(kind, of_rank[rank][name], line, 100 + line, sent=sent, op="")
            for line, (name, kind, sent) in enumerate(lines)
        ]
        program[rank] = [replace(ops[index % len(ops)], mark=index) for index in range(num_calls)]
    job = Job(groups, program)
    _spoil(job, culprit, num_calls - NUM_LAST // 2, hang)
    first = num_calls - NUM_LAST
    for here in job.ranks.values():
        here.at = first
        for op in here.program[:first]:
            here.issued[op.group] = here.issued.get(op.group, 0) + 1
    is_going = True
    while is_going:
        before = job.clock
        is_going = sum(job.step(rank) for rank in job.ranks) > 0  # each takes its turn, all at one time
        job.clock = before + 1
    return job


def _spoil(job: Job, culprit: int, at: int, hang: str) -> None:
    """Have a rank hold up the others from about the call ``at`` on: it makes two calls in another order, or no more.

    The two are of groups that share another rank: it waits in the one, and the rank in the other.
    """
    ops = job.ranks[culprit].program
    groups = [op.group for op in ops]
    members = [set(job.groups[group]) for group in groups]
    at = next(
        place
        for place in range(at, len(ops))
        if groups[place] != groups[place + 1] and len(members[place] & members[place + 1]) > 1
    )
    if hang == "order":
        ops[at : at + 2] = [ops[at + 1], ops[at]]
    else:
        del ops[at:]


def write(job: Job, folder: Path, num_entries: int) -> None:
    """Write the dumps and the logs of all ranks, as of ten minutes and more after their last calls."""
    random_ = random.Random(1)
    frames = [
        {"name": f"call_{depth}", "filename": f"/model/layer_{depth}.py", "line": 40 + depth} for depth in range(10)
    ]
    for name in ("dumps", "logs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for rank in track(job.ranks, "writing", console=Console(stderr=True)):
        dump = device_dump(job, rank, ahead=random_.randint(0, 3), has_timing=True, most=num_entries)
        for entry in dump["entries"]:
            entry["frames"] += frames
        path = folder / "dumps" / f"nccl_trace_rank_{rank}"
        path.write_bytes(pickle.dumps(dump, protocol=2))
        written_ns = START_NS + 700 * 10**9
        os.utime(path, ns=(written_ns, written_ns))
    lines: dict[int, list[str]] = {}
    for line in watchdog_lines(job, random_, Style((2, 7), "plain")):
        rank = int(line.partition("[rank")[2].partition("]")[0])
        lines.setdefault(rank // NODE, []).append(line)
    for node, of_node in lines.items():
        (folder / "logs" / f"node{node}.log").write_text("\n".join(of_node), encoding="utf-8")


def measured(folder: Path) -> str:
    """Run ``commlayer diagnose`` on a folder, and say what that took and what it found."""
    command = [sys.executable, "-m", "commlayer", "diagnose", str(folder), "--json"]
    with tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        child = subprocess.Popen(command, stdout=output)
        most_bytes = 0
        while (ended := os.wait4(child.pid, os.WNOHANG))[0] == 0:
            most_bytes = max(most_bytes, tree_bytes(child.pid))
            time.sleep(SAMPLED_S)
        _, status, usage = ended  # with the processes that it has started
        seconds = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        answer: dict[str, Any] = json.loads(output.read() or b"{}")
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    cause = answer.get("cause") or {"words": "; ".join(answer.get("open", ["nothing"]))}
    return (
        f"{folder.name} ({num_bytes / 1e6:.0f} MB): {seconds:.1f} s, processor {usage.ru_utime + usage.ru_stime:.1f} s, "
        f"at most {most_bytes / 1e9:.2f} GB in all processes, exit status {child.returncode}: {cause['words']}"
    )


def tree_bytes(pid: int) -> int:
    """The memory of a process and of those that it has started, with each shared page counted once; 0 where it is over."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        children = [
            int(each)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for each in (task / "children").read_text(encoding="ascii").split()
        ]
    except OSError:  # it has ended
        return 0
    own = int(rollup.partition("\nPss:")[2].split()[0]) * 1024
    return own + sum(map(tree_bytes, children))


if __name__ == "__main__":
    main()
