"""Programs of :mod:`hanging_programs` as real processes on torch's Gloo, recorded by torch's own Flight Recorder.

Each rank is a forked process. It makes its calls from lines of a program ``train.py`` that is made up, so
that the recorder notes these places. When all ranks are where they stay, they write their dumps.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import queue
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch._dynamo  # else each rank imports it at its first call, for seconds
import torch.distributed as dist
from hanging_programs import AWAY, Hang, stuck
from jobs_in_memory import Groups, Op

__all__ = ["record"]

_LATER_S = 100.0
"""How much later than they were written the dumps are dated, so that their calls are overdue."""
_PATIENCE_S = 3.0
_FAILED = 255
_DTYPES = {"float32": torch.float32, "int8": torch.int8, "int32": torch.int32, "": torch.float32}


def record(hang: Hang, folder: Path) -> list[Path]:
    """Run the program until it hangs, and return the dumps of its ranks (but those it leaves out)."""
    folder.mkdir(parents=True)
    progress = mmap.mmap(-1, 2 * len(hang.program) + 1)
    pids = [_forked(hang, rank, folder, progress) for rank in hang.program]
    try:
        _await_hang(hang, progress)
        progress[-1] = 1
        writing = [rank for rank in hang.program if rank not in hang.stopped]
        until = time.monotonic() + _PATIENCE_S
        while not all(progress[len(pids) + rank] for rank in writing) and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        progress.close()
    later = time.time() + _LATER_S
    paths = [path for path in sorted(folder.glob("rank_*")) if path.suffix != ".part"]
    for path in paths:
        os.utime(path, (later, later))
    dumps = [path for path in paths if int(path.name[5:]) not in hang.absent]
    return [*dumps, *sorted(folder.glob("stack_rank_*"))]


def _await_hang(hang: Hang, progress: mmap.mmap) -> None:
    """Wait until every rank is where it stays in memory; where calls differ, some are not."""
    ends = [here.at + here.is_in_call for here in stuck(hang).ranks.values()]
    until = time.monotonic() + 10.0
    before, since = b"", time.monotonic()
    while time.monotonic() < until:
        now = progress[: len(ends)]
        if now != before:
            before, since = now, time.monotonic()
        if list(now) == [1 + end for end in ends]:
            break
        if all(now) and time.monotonic() - since > _PATIENCE_S / 2:
            break
        time.sleep(0.01)
    time.sleep(0.1)  # from the count of a call to its record it is some microseconds


def _forked(hang: Hang, rank: int, folder: Path, progress: mmap.mmap) -> int:
    pid = os.fork()
    if pid:
        return pid
    with suppress(BaseException):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        _run(hang, rank, folder, progress)
    os._exit(0)


def _run(hang: Hang, rank: int, folder: Path, progress: mmap.mmap) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(hang.most)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=len(hang.program),
        timeout=timedelta(seconds=60),
    )
    groups = {
        name: dist.group.WORLD if name == "world" else dist.new_group(list(ranks), group_desc=name)
        for name, ranks in hang.groups.items()
    }
    path = folder / f"rank_{rank}"

    def write(*_: Any) -> None:
        content = torch._C._distributed_c10d._dump_fr_trace(True)  # type: ignore[attr-defined]
        if hang.causes == {"elsewhere"}:
            with (folder / f"stack_rank_{rank}.txt").open("w", encoding="utf-8") as stacks:
                faulthandler.dump_traceback(stacks, all_threads=True)
        path.with_suffix(".part").write_bytes(content)
        path.with_suffix(".part").rename(path)
        progress[len(hang.program) + rank] = 1
        time.sleep(60)

    # Gloo aborts a process in which sizes differ, on a thread of its own: the rank writes its dump then.
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(write)
    ctypes.CDLL(None).signal(signal.SIGABRT, handler)

    def await_word() -> None:
        while not progress[-1]:
            time.sleep(0.005)
        write()

    threading.Thread(target=await_word, daemon=True).start()
    progress[rank] = 1
    try:
        _run_ops(hang, rank, groups, progress)
        progress[rank] = 1 + len(hang.program[rank])
    except RuntimeError:
        progress[rank] = _FAILED
    if rank in hang.stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


def _run_ops(hang: Hang, rank: int, groups: dict[str, Any], progress: mmap.mmap) -> None:
    """Run the steps of a rank's program, those of another thread on one, beside the step before or after them.

    The calls of a group are made in the order of the program, however busy the machine is.
    """
    ops = hang.program[rank]
    has_threads = any(op.thread for op in ops)
    made = {name: group._get_sequence_number_for_group() for name, group in groups.items() if rank in hang.groups[name]}
    thread = ThreadPoolExecutor(1)
    beside: Future[None] | None = None
    for at, op in enumerate(ops):
        progress[rank] = 2 + at
        following = ops[at + 1] if at + 1 < len(ops) else op
        before = made.get(op.group, 0) if has_threads else 0
        if has_threads and op.kind not in (*AWAY, "wait"):
            made[op.group] += 1
        if op.thread:
            if beside is None:
                beside = thread.submit(_made, op, groups, hang.groups, before)
            _await_calls(groups[op.group], made[op.group])
            continue
        if following.thread:
            beside = thread.submit(_made, following, groups, hang.groups, made[following.group])
        _made(op, groups, hang.groups, before)
        if beside is not None and (not following.thread or op.kind == "wait"):
            beside.result()
            beside = None


def _await_calls(group: Any, number: int) -> None:
    """Wait until this process has made so many calls of a group, as one thread calls before another."""
    while group._get_sequence_number_for_group() < number:
        time.sleep(0.001)


def _made(op: Op, groups: dict[str, Any], members: Groups, before: int) -> None:
    """Make the call of ``op`` from its line of the program, behind so many of its group, or wait there."""
    if op.kind in ("lock", "load"):
        lock = threading.Lock()
        lock.acquire()
        _at_line(op.line)(lock.acquire if op.kind == "lock" else queue.Queue().get)
    elif op.kind not in (*AWAY, "wait"):  # a blocking call has ended, and a thread is waited for elsewhere
        _await_calls(groups[op.group], before)
        _called(op, groups[op.group], members[op.group])


def _called(op: Op, group: Any, members: tuple[int, ...]) -> None:
    width = torch.tensor([], dtype=_DTYPES[op.dtype]).element_size()
    tensor = torch.ones(max(op.sent // width, 1), dtype=_DTYPES[op.dtype])
    call = _at_line(op.line)
    size = len(members)
    if op.kind == "barrier":
        call(dist.barrier, group=group)
    elif op.kind == "all_gather":
        output = torch.empty(size * len(tensor), dtype=tensor.dtype)
        call(dist.all_gather_into_tensor, output, tensor, group=group)
    elif op.kind == "reduce_scatter":
        output = torch.empty(len(tensor) // size, dtype=tensor.dtype)
        call(dist.reduce_scatter_tensor, output, tensor, group=group)
    elif op.kind == "all_to_all":
        to, of = ([part // width for part in parts or ()] for parts in (op.to, op.of))
        call(dist.all_to_all_single, tensor.new_empty(sum(of)), tensor, of, to, group=group)
    elif op.kind == "broadcast":
        call(dist.broadcast, tensor, op.root, group=group)
    elif op.kind in ("send", "recv"):
        call(getattr(dist, op.kind), tensor, op.peer, group=group, tag=op.tag)
    else:
        call(dist.all_reduce, tensor, group=group)


def _at_line(line: int) -> FunctionType:
    """A function ``step`` that stands at this line of ``train.py``, and calls what it is given."""
    source = "\n" * (line - 1) + "def step(call, *args, **options): return call(*args, **options)"
    names: dict[str, Any] = {}
    exec(compile(source, "train.py", "exec"), names)  # the text is the one above
    function: FunctionType = names["step"]
    return function
