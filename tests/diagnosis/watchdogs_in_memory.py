"""Lines as the watchdogs of torch's ProcessGroupNCCL write them, of jobs that run in memory, behind
prefixes of launchers.

They are those of ``torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp`` of torch 2.3 to 2.13: every rank's
watchdog of a group writes the oldest call that timed out, and how far the group has come
(``watchdogHandler``); what hears of it on all ranks, also on those that are in no call, is the monitor of
the group of all, which writes how far that one has come (``heartbeatMonitor``). No other group of a rank
writes anything. The groups of one dimension of a mesh share a description, as those of Megatron-LM
(``megatron/core/parallel_state.py``) and of torch's DeviceMesh.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta, timezone

from jobs_in_memory import Groups, Job, Op

__all__ = ["GUIDS", "RELEASES", "Style", "mesh_groups", "watchdog_lines"]

START = datetime(2026, 9, 3, 5, 20, 3, tzinfo=timezone.utc)
TYPES = {
    "all_reduce": "ALLREDUCE",
    "all_gather": "_ALLGATHER_BASE",
    "reduce_scatter": "_REDUCE_SCATTER_BASE",
    "broadcast": "BROADCAST",
    "all_to_all": "ALLTOALL_BASE",
    "barrier": "ALLREDUCE",
    "send": "SEND",
    "recv": "RECV",
}
PREFIXES = {
    "plain": "",
    "torchrun": "[default{local}]:",
    "slurm": "{node}: ",
    "ray": "(Trainer pid=58{rank}, ip=10.0.0.{node}) ",
    "kubernetes": "2026-09-03T05:20:03.110823792Z stderr F ",
}
RELEASES = [(2, 3), (2, 4), (2, 5), (2, 7), (2, 13)]
GUIDS = {"world": ("0", "default_pg")}


class Style:
    """The way in which a torch writes: ``release`` from (2, 3) on; ``prefix``: a launcher's, of
    ``PREFIXES``."""

    def __init__(self, release: tuple[int, int], prefix: str) -> None:
        self.release, self.prefix = release, PREFIXES[prefix]

    def group(self, index: int, guid: str, description: str, place: int) -> str:
        if self.release < (2, 4):
            return f"[PG {guid} Rank {place}]"
        if self.release < (2, 5):
            return f"[PG {guid} ({description}) Rank {place}]"
        return f"[PG ID {index} PG GUID {guid}({description}) Rank {place}]"

    def status(self, number: int, enqueued: int, completed: int) -> str:
        if self.release < (2, 6):
            word = "Exception (either an error or timeout) detected by watchdog at work:"
            if self.release < (2, 4):
                word = "Timeout at NCCL work:"
            done = completed or (2**64 - 1 if self.release < (2, 4) else -1)
            return f"{word} {number}, last enqueued NCCL work: {enqueued}, last completed NCCL work: {done}."
        started = f", last started work: {number} (ALLREDUCE)" if self.release >= (2, 13) else ""
        return (
            f" failure detected by watchdog at work sequence id: {number} PG status: last enqueued work: {enqueued}{started}, "
            f"last completed work: {completed or -1}"
        )


def mesh_groups(dp: int, ep: int) -> Groups:
    """The groups of a mesh of ``dp`` × ``ep`` ranks, and that of all."""
    groups = {"world": tuple(range(dp * ep))}
    groups |= {f"EXPERT_MODEL_PARALLEL_GROUP {row}": tuple(range(row * ep, row * ep + ep)) for row in range(dp)}
    return groups | {f"DATA_PARALLEL_GROUP {column}": tuple(range(column, dp * ep, ep)) for column in range(ep)}


def watchdog_lines(
    job: Job,
    random_: random.Random,
    style: Style,
    *,
    absent: Iterable[int] = (),
    late_s: Mapping[int, float] | None = None,
) -> list[str]:
    """The lines of all ranks but ``absent``, as they come in a job's log: of each call in flight,
    and of the signal to dump.

    ``late_s``: by how many seconds ranks made their last calls after the others.
    """
    job._settle()
    lines: list[tuple[datetime, str]] = []
    first = min((rank for rank in job.ranks if _in_flight(job, rank)), default=0)
    for rank in job.ranks:
        if rank in absent:
            continue
        prefix = style.prefix.format(rank=rank, local=rank % 8, node=rank // 8)
        moment = START + timedelta(seconds=random_.random() + (late_s or {}).get(rank, 0.0))

        def add(
            text: str,
            after_s: float,
            *,
            rank: int = rank,
            prefix: str = prefix,
            moment: datetime = moment,
        ) -> None:
            at = moment + timedelta(seconds=after_s)
            stamp = f"[E{at.month}{at:%d %H:%M:%S.%f}123 ProcessGroupNCCL.cpp:632]"
            if style.release < (2, 4):
                stamp = "[E ProcessGroupNCCL.cpp:1537]"
            lines.append((at, f"{prefix}[rank{rank}]:{stamp} {text}"))

        own = [(key, members) for key, members in job.groups.items() if rank in members]
        here = job.ranks[rank]
        after_s = 0.0
        for key, op, issued_at in _in_flight(job, rank):
            guid, description = _named(job, key)
            index = [each for each, _ in own].index(key)
            group = style.group(index, guid, description, job.groups[key].index(rank))
            number, done = here.numbers[op.mark], here.done.get(key, 0)
            sent, received = _elements(op, len(job.groups[key]))
            after_s = issued_at * 0.05
            place = job.groups[key].index(rank)
            timed_out = (
                f"[Rank {place}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number}, "
                f"OpType={TYPES[op.kind]}, NumelIn={sent}, NumelOut={received}, Timeout(ms)=600000) ran for 600000 milliseconds "
                "before timing out."
            )
            add(timed_out, after_s)
            add(
                f"{group} {style.status(number, here.issued.get(key, 0) or number, done)}",
                after_s + 0.0001,
            )
            add(
                "Stack trace of the failed collective:\n#0 all_reduce from /lib/python3.12/site-packages/torch/distributed/"
                f"distributed_c10d.py:2968\n#1 step from train.py:{op.line}\n",
                after_s + 0.0002,
            )
            add(
                f"{group} Process group watchdog thread terminated with exception: {timed_out}",
                after_s + 60,
            )
        issued, done = here.issued.get("world", 0), here.done.get("world", 0)
        world = style.group(0, "0", "default_pg", rank)
        source = "this local rank" if rank == first else f" rank {first}"
        add(
            f"{world} Received a dump signal due to a collective timeout from {source} and we will try our "
            f"best to dump the debug info. Last enqueued NCCL work: {issued or -1}, last completed NCCL "
            f"work: {done or -1}.This is most likely caused by incorrect usages of collectives",
            after_s + 1,
        )
    return [line for _, line in sorted(lines, key=lambda each: each[0])]


def _named(job: Job, key: str) -> tuple[str, str]:
    """The GUID and the description of a group: those of one dimension of a mesh share the latter."""
    return GUIDS.get(key) or (str(list(job.groups).index(key)), key.rpartition(" ")[0] or key.rstrip("0123456789"))


def _elements(op: Op, size: int) -> tuple[int, int]:
    """The elements that go into a call of ``size`` ranks, and those that come out of it."""
    sent = max(op.sent, 1)
    if op.kind == "all_gather":
        return sent, sent * size
    if op.kind == "reduce_scatter":
        return sent, sent // size
    return sent, sum(op.of) if op.of else sent


def _in_flight(job: Job, rank: int) -> list[tuple[str, Op, int]]:
    """The oldest call of each group that a rank has made and that has not ended."""
    here = job.ranks[rank]
    oldest: dict[str, tuple[str, Op, int]] = {}
    for op, at in here.calls:
        if op.kind in ("send", "recv"):
            if here.is_in_call and here.program[here.at].mark == op.mark:
                oldest.setdefault(op.group, (op.group, op, at))
            continue
        if here.numbers[op.mark] > here.done.get(op.group, 0):
            oldest.setdefault(op.group, (op.group, op, at))
    return list(oldest.values())
