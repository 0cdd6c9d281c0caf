"""One rank of a small job whose files the fence keeps. Run as a program, by every rank: ``fence_job.py FOLDER``.

Its clocks stand still: they are replaced before anything of this project is loaded, and go on by a millisecond after each call,
so that what is written does not depend on how long anything takes, nor on how often a clock is read. ``time.monotonic`` goes on:
timeouts are measured with it, and nothing that is written.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_now_ns = 1_700_000_000_000_000_000


def _stop_clocks() -> None:
    clocks: dict[str, Callable[[], float]] = {
        "perf_counter_ns": lambda: _now_ns,
        "perf_counter": lambda: _now_ns / 1e9,
        "time_ns": lambda: _now_ns,
        "time": lambda: _now_ns / 1e9,
    }
    for name, clock in clocks.items():
        setattr(time, name, clock)


def _calls() -> Iterator[Callable[[], Any]]:
    """Yield as many calls on each rank: every collective, small and large, in three groups, and a message."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    half = dist.new_group([0, 2], group_desc="half")
    gradients = dist.new_group(list(range(size)), group_desc="mesh_dp")
    for count in (16, 4096, 300_000):
        x = torch.arange(count, dtype=torch.float32) % 251 + rank
        rows, part = x.repeat(size), torch.empty(count)
        yield lambda x=x: dist.all_reduce(x)  # type: ignore[misc]
        yield lambda x=x: dist.all_reduce(x, group=gradients)  # type: ignore[misc]
        yield lambda x=x, out=torch.empty(size * count): dist.all_gather_into_tensor(out, x)  # type: ignore[misc]  # noqa: B008
        yield lambda x=rows, out=part: dist.reduce_scatter_tensor(out, x)  # type: ignore[misc]
        yield lambda x=rows, out=torch.empty_like(rows): dist.all_to_all_single(out, x)  # type: ignore[misc]  # noqa: B008
        yield lambda x=x: dist.broadcast(x, 1)  # type: ignore[misc]
        yield lambda x=x: dist.all_reduce(x.to(torch.bfloat16), group=half) if rank in (0, 2) else None  # type: ignore[misc]
    sent = [3 * peer + rank for peer in range(size)]
    received = [3 * rank + peer for peer in range(size)]
    uneven = torch.ones(sum(sent), 8), torch.empty(sum(received), 8)
    yield lambda: dist.all_to_all_single(uneven[1], uneven[0], received, sent)
    yield lambda: dist.all_reduce(torch.ones(8), async_op=True).wait()
    yield lambda: dist.all_reduce(torch.ones(5, dtype=torch.int64), dist.ReduceOp.MAX)
    yield lambda: dist.all_gather([torch.empty(4) for _ in range(size)], torch.ones(4))
    yield lambda: dist.reduce(torch.ones(64), 0)
    yield lambda: dist.barrier()
    message = torch.ones(32)
    yield lambda: dist.send(message, 1) if rank == 0 else dist.recv(message, 0) if rank == 1 else None


def main(folder: Path) -> None:
    """Run the job, and write what this rank counted and remembers beside its audit and its trace."""
    global _now_ns
    _stop_clocks()
    import torch
    import torch.distributed as dist

    import commlayer
    from commlayer.diagnosis.inquiry import own_answer
    from commlayer.diagnosis.log_files import write_log

    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    for number, call in enumerate(_calls()):
        recorder, began_ns = commlayer.recorder(), _now_ns
        call()
        dist.barrier()  # no rank's clock goes on before all are done
        _now_ns += 1_000_000
        if recorder is not None:
            recorder.mark(f"call {number}", began_ns, _now_ns)
    log = own_answer()
    assert log is not None, "the ring of calls is there by default"
    write_log(folder, log)
    rank = dist.get_rank()
    (folder / f"stats-{rank}.json").write_text(json.dumps(commlayer.stats(), indent=1, default=str), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
