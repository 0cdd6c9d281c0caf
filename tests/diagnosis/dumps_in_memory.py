"""Dumps as torch's Flight Recorder writes them for NCCL, of jobs that run in memory.

A call begins on a rank when the one before it has ended there.
"""

from __future__ import annotations

import json
import os
import pickle
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs_in_memory import KINDS, Job, Op

__all__ = ["device_dump", "write_dumps", "write_texts"]

CALLS = (*KINDS, "send", "recv")

START_NS = 1_795_000_000_000_000_000
_NAMES = {"all_gather": "_all_gather_base", "reduce_scatter": "_reduce_scatter_base", "barrier": "all_reduce_barrier"}
_DTYPES = {"float32": ("Float", 4), "int8": ("Char", 1), "int32": ("Int", 4), "": ("Float", 4)}


def device_dump(job: Job, rank: int, *, ahead: int, has_timing: bool, most: int = 2000) -> dict[str, Any]:
    """The dump of a rank. ``ahead``: how many more calls its host has enqueued than its
    device has begun; ``has_timing``: the recorder notes what has begun; ``most``: entries that its ring keeps."""
    here = job.ranks[rank]
    numbers: dict[str, int] = {}
    entries = []
    places = {key: place for place, key in enumerate(job.groups)}
    end = here.at + ahead + here.is_in_call
    # A host that waits for its device, or elsewhere, enqueues nothing more.
    stops = (at for at, op in enumerate(here.program) if at >= here.at and op.kind not in CALLS)
    enqueued = here.program[: min(end, next(stops, end))]
    open_groups: set[str] = set()
    for index, op in enumerate(enqueued):
        if op.kind not in CALLS:
            continue
        line = f"{op.group} messages" if op.kind in ("send", "recv") else op.group
        numbers[line] = numbers.get(line, 0) + 1
        has_ended = index < here.at and (not op.is_async or job._is_over(rank, op, here.numbers[op.mark]))
        has_begun = index < here.at + here.is_in_call and (has_ended or line not in open_groups)
        open_groups |= set() if has_ended else {line}
        entries.append(_entry(job, rank, op, numbers[line], index, has_ended, has_begun and has_timing))
        entries[-1]["pg_id"] = places[op.group]  # looked up, as large jobs have thousands of groups
    groups = {key: ranks for key, ranks in job.groups.items() if rank in ranks}
    return {
        "version": "2.10",
        "pg_config": {
            key: {"name": key, "desc": f"the {key}", "ranks": str(list(ranks))} for key, ranks in groups.items()
        },
        "pg_status": {},
        "nccl_comm_state": {},
        "entries": entries[-most:],
    }


def _entry(job: Job, rank: int, op: Op, number: int, index: int, has_ended: bool, has_begun: bool) -> dict[str, Any]:
    is_message = op.kind in ("send", "recv")
    name = _NAMES.get(op.kind, op.kind)
    if is_message:
        members = sorted(job.groups[op.group])
        arrow = "->" if op.kind == "send" else "<-"
        name = f"{op.kind} {members.index(rank)}{arrow}{members.index(op.peer)}"
    dtype, width = _DTYPES[op.dtype]
    sent, received = ([op.sent] if parts is None else parts for parts in (op.to, op.of))
    created_ns = START_NS + 1000 * index
    return {
        "record_id": index,
        "process_group": (op.group, f"the {op.group}"),
        "collective_seq_id": 0 if is_message else number,
        "p2p_seq_id": number if is_message else 0,
        "op_id": index + 1,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": created_ns,
        "input_sizes": [[sum(part // width for part in sent)]],
        "input_dtypes": [dtype],
        "output_sizes": [[sum(part // width for part in received)]],
        "output_dtypes": [dtype],
        "state": "completed" if has_ended else "started" if has_begun else "scheduled",
        "time_discovered_started_ns": created_ns + 100 if has_begun else None,
        "time_discovered_completed_ns": created_ns + 200 if has_ended else None,
        "retired": has_ended,
        "timeout_ms": 600_000,
        "is_p2p": is_message,
        "frames": [
            {"name": op.kind, "filename": "/lib/torch/distributed/distributed_c10d.py", "line": 7},
            {"name": "step", "filename": "train.py", "line": op.line},
        ],
        "thread_id": str(77 + op.thread),
    }


def write_dumps(
    folder: Path,
    job: Job,
    random_: random.Random,
    *,
    has_timing: bool,
    age_s: float = 700.0,
    absent: tuple[int, ...] = (),
    most: int = 2000,
) -> list[Path]:
    """Write the dumps of all ranks but ``absent`` as of ``age_s`` after their first calls.

    Hosts have enqueued 0 to 3 calls more than have begun.
    """
    folder.mkdir(exist_ok=True)
    paths = []
    for rank in job.ranks:
        if rank in absent:
            continue
        dump = device_dump(job, rank, ahead=random_.randint(0, 3), has_timing=has_timing, most=most)
        is_json = random_.random() < 0.3
        path = folder / (f"trace_rank_{rank}.json" if is_json else f"nccl_trace_rank_{rank}")
        path.write_bytes(json.dumps(dump).encode() if is_json else pickle.dumps(dump, protocol=2))
        written_ns = START_NS + int(age_s * 1e9)
        os.utime(path, ns=(written_ns, written_ns))
        paths.append(path)
    return paths


def write_texts(folder: Path, job: Job, died: Mapping[int, Sequence[str]], stopped: Sequence[int]) -> list[Path]:
    """Write the stacks of ranks, where one waits in no call, and the job's log, where ranks have died."""
    away = {rank: _waiting_op(job, rank) for rank in job.ranks}
    paths = []
    if any(op is not None and op.kind in ("lock", "load") for op in away.values()):
        for rank, op in away.items():
            if op is None or rank in stopped:
                continue
            inside = {
                "lock": '"/lib/python3.11/threading.py", line 8 in acquire',
                "load": '"/lib/python3.11/queue.py", line 9 in get',
            }.get(op.kind, '"/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 7 in wait')
            path = folder / f"stack_rank_{rank}.txt"
            path.write_text(
                "Current thread 0x00007f08 (most recent call first):\n"
                f'  File {inside}\n  File "train.py", line {op.line} in step\n  File "train.py", line 1 in <module>\n',
                encoding="utf-8",
            )
            paths.append(path)
    if died:
        others = [f"[rank{rank}]: {_BROKEN}" for rank in list(job.ranks)[:2] if rank not in died]
        lines = [*(line for of_rank in died.values() for line in of_rank), *others]
        path = folder / "job.log"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        paths.append(path)
    return paths


_BROKEN = "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0."
"""The last line of a program that ends because another one has."""


def _waiting_op(job: Job, rank: int) -> Op | None:
    """The step in which a rank is; None: its program has ended."""
    here = job.ranks[rank]
    return here.program[here.at] if here.at < len(here.program) else None
