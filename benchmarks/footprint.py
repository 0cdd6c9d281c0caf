"""Threads and descriptors of a rank against the number of groups that it is in: the backend commlayer, and torch's own Gloo.

    python benchmarks/footprint.py
    python benchmarks/footprint.py --groups 1 5 20 --cluster 2x4 --json footprint.json

Every rank of an emulated cluster makes groups of all ranks, and uses each of them for nothing (``made``), for small calls only, which
no plan pays for (``flat``), for messages, flat calls, calls by a plan and asynchronous ones (``planned``), or for those and
all_to_alls of which the ranks must agree whether a plan pays (``exchanges``). Plans are forced, so that no links are measured.

What a thread is for is told by where it waits and by its name; what a descriptor is for, by the kernel's tables. The numbers are
the largest of any rank, without what the process had before it joined. They do not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import commlayer.backend.create  # noqa: F401  ranks are forked: what is imported here they need not import
from commlayer.emulation import EmulatedCluster

BACKENDS = ("gloo", "commlayer")
USES = ("made", "flat", "planned", "exchanges")
_TIMEOUT = timedelta(seconds=120)
_PLANNED_ELEMENTS = 1 << 18
_LISTENING = "0A"


def threads() -> Counter[str]:
    """The threads of this process, by kind: those of Python by name, without what is a group's own, others by the system's name."""
    ours = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        name = ours.get(int(task.name))
        found[_kind(name) if name else f"native {(task / 'comm').read_text().strip()}"] += 1
    return found


def _kind(name: str) -> str:
    """The thread of a group's calls is called by its group."""
    return re.sub(r"^commlayer (?!end)\S+", "commlayer calls", name)


def descriptors() -> Counter[str]:
    """The open files of this process, by kind."""
    tables = {inode: kind for table in ("tcp", "tcp6") for inode, kind in _sockets(table)}
    tables |= {row.split()[6]: "unix" for row in Path("/proc/self/net/unix").read_text().splitlines()[1:]}
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # that of the listing
            continue
        socket = re.fullmatch(r"socket:\[(\d+)\]", link)
        found[f"socket, {tables.get(socket[1], 'other')}" if socket else re.sub(r":\[\d+\]|\d+", "", link)] += 1
    return found


def _sockets(table: str) -> Iterator[tuple[str, str]]:
    for line in Path(f"/proc/self/net/{table}").read_text(errors="replace").splitlines()[1:]:
        row = line.split()
        yield row[9], "tcp, listening" if row[3] == _LISTENING else "tcp"


def use(group: Any, how: str) -> None:
    """Call what ``how`` says in ``group``, a group of all ranks."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if how == "made":
        return
    dist.all_reduce(torch.ones(4), group=group)
    dist.barrier(group)
    if how == "flat":
        return
    got = torch.zeros(4)
    work = dist.irecv(got, group=group, group_src=(rank - 1) % size)
    dist.send(torch.ones(4), group=group, group_dst=(rank + 1) % size)
    work.wait()
    x = torch.ones(_PLANNED_ELEMENTS)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x, group=group, async_op=True).wait()
    if how == "exchanges":
        for _ in range(2):
            dist.all_to_all_single(torch.empty_like(x), x, group=group)


def job(backend: str, num_groups: list[int], how: str) -> list[dict[str, Any]]:
    """On every rank: the threads and descriptors of so many groups, one number after the other."""
    torch.set_num_threads(1)
    if how == "planned" or how == "exchanges":
        os.environ |= {"COMMLAYER_PROFILE": "none", "COMMLAYER_PLAN": "hierarchical"}
    else:
        os.environ["COMMLAYER_PROFILE"] = "none"
    before, found, groups = (threads(), descriptors()), [], []
    dist.init_process_group(backend, timeout=_TIMEOUT)
    for number in num_groups:
        while len(groups) < number:
            groups.append(dist.new_group(list(range(dist.get_world_size()))))
            use(groups[-1], how)
        dist.barrier()
        now = threads(), descriptors()
        found.append({"groups": number} | {name: dict(a - b) for name, a, b in zip(("threads", "descriptors"), now, before)})
        dist.barrier()
    dist.destroy_process_group()
    return found


def run(cluster: EmulatedCluster, backend: str, num_groups: list[int], how: str) -> list[dict[str, Any]]:
    """For each number of groups, the counts of the rank that has the most descriptors, and the most threads of any rank."""
    ranks = cluster.run(job, backend, num_groups, how)
    rows = []
    for each in zip(*ranks):
        most = max(each, key=lambda found: sum(found["descriptors"].values()))
        rows.append(most | {"backend": backend, "use": how, "threads": max((f["threads"] for f in each), key=lambda t: sum(t.values()))})
    return rows


def print_rows(rows: list[dict[str, Any]], *, is_detailed: bool) -> None:
    print(f"{'use':>10} {'backend':>10} {'groups':>7} {'threads':>8} {'descriptors':>12}")
    for row in rows:
        sums = sum(row["threads"].values()), sum(row["descriptors"].values())
        print(f"{row['use']:>10} {row['backend']:>10} {row['groups']:>7} {sums[0]:>8} {sums[1]:>12}")
        if is_detailed:
            for name in ("threads", "descriptors"):
                print(f"{'':>12}{name}: " + ", ".join(f"{n} {kind}" for kind, n in sorted(row[name].items())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 5, 20])
    parser.add_argument("--cluster", default="2x4", help="nodes x ranks of each (default 2x4)")
    parser.add_argument("--use", nargs="+", choices=USES, default=list(USES))
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--detail", action="store_true", help="what they are for")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    cluster = EmulatedCluster(*map(int, options.cluster.split("x")))
    rows = [
        row for how in options.use for backend in options.backend for row in run(cluster, backend, sorted(options.groups), how)
    ]
    print_rows(rows, is_detailed=options.detail)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
