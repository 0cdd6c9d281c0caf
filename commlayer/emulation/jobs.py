"""The processes of one run, and the environment that each of them gets: torchrun's, and a little of
ours."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from commlayer.emulation.accelerators.device import Accelerator
from commlayer.emulation.accelerators.starting import DEVICE, REPORTS, STARTUP_FOLDER, computing
from commlayer.emulation.forked_ranks import RankJob
from commlayer.emulation.namespaces import RankSpaces, node_address
from commlayer.emulation.output import RankOutput
from commlayer.profiles.errors import ClusterError

__all__ = ["ClusterLayout", "make_jobs", "pick_port"]

_FIRST_PORT, _NUM_PORTS = 29_500, 1_000
_LOOPBACK_PORTS = range(20_000, 30_000)
"""Below those that Linux hands out by itself, from 32768 on: between the choice of a port and its
use nobody is given it."""
_MOST_TRIES = 100
_TORCHRUN = ("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT")
"""The variables from which torchrun takes its options when they are not on its command line."""
_REMOVED = ("COMMLAYER_TOPOLOGY", "RANK", "LOCAL_RANK", "WORLD_SIZE", DEVICE, REPORTS, *_TORCHRUN)
"""The variables that a rank must not inherit from a parent that runs under torchrun or in a cluster
itself."""


@dataclass(frozen=True)
class ClusterLayout:
    """The layout of a run: which ranks there are, and on what they run."""

    nodes: int
    ranks_per_node: int
    mode: Literal["netns", "loopback"]
    links: str = ""
    """The rates that it began with, for a profile's cache: two clusters of one shape may differ in
    nothing else."""
    accelerator: Accelerator | None = None
    """The device that every rank stands for."""

    @property
    def master_address(self) -> str:
        """Node 0's address."""
        return "127.0.0.1" if self.mode == "loopback" else node_address(0)


def pick_port(layout: ClusterLayout, num_runs: int) -> int:
    """A port that is free on node 0.

    In a private network any is; another one each run, because connections of the last run linger.
    On loopback one is drawn, which somebody else might draw too before rank 0 takes it: there is no
    way to hand it over. Rejected: one that the kernel names, which it names to the next socket as
    well, of which a job opens dozens.
    """
    if layout.mode == "netns":
        return _FIRST_PORT + num_runs % _NUM_PORTS
    for _ in range(_MOST_TRIES):
        port = secrets.choice(_LOOPBACK_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ClusterError(
        f"expected a free port on 127.0.0.1, got none of {_MOST_TRIES} between {_LOOPBACK_PORTS.start} and "
        f"{_LOOPBACK_PORTS.stop - 1}: see `ss -tln` for what holds them"
    )


def make_jobs(
    layout: ClusterLayout,
    spaces: Sequence[RankSpaces | None],
    port: int,
    *,
    call: Callable[[], Any] | None = None,
    argv: Sequence[str] = (),
    per_node: bool = False,
    prefix: bool = False,
    reports: str = "",
) -> list[RankJob]:
    """One job per rank, by rank (or per node; a job's rank is then the node's first). ``prefix``:
    with pipes for its output.
    ``reports``: the folder in which ranks tell what their accelerators did."""
    jobs = []
    emulated: dict[str, str] = {}
    if layout.accelerator is not None:
        emulated = {DEVICE: layout.accelerator.to_text(), REPORTS: reports}
        if call is None:
            paths = [STARTUP_FOLDER, *filter(None, [os.environ.get("PYTHONPATH")])]
            emulated["PYTHONPATH"] = os.pathsep.join(paths)
        else:
            call = partial(computing, call)
    for node in range(layout.nodes):
        for local_rank in range(1 if per_node else layout.ranks_per_node):
            rank = node * layout.ranks_per_node + local_rank
            environment = _environment(layout, node, None if per_node else local_rank, port) | emulated
            if prefix and "PYTHONUNBUFFERED" not in os.environ:
                # Into a pipe Python would write late, and a killed rank's words never.
                environment["PYTHONUNBUFFERED"] = "1"
            jobs.append(
                RankJob(
                    rank=rank,
                    node=node,
                    environment=environment,
                    removed=_REMOVED,
                    spaces=spaces[node],
                    call=call,
                    argv=tuple(argv),
                    output=RankOutput(f"node {node}" if per_node else f"rank {rank}") if prefix else None,
                )
            )
    return jobs


def _environment(layout: ClusterLayout, node: int, local_rank: int | None, port: int) -> dict[str, str]:
    netns = layout.mode == "netns"
    values: dict[str, object] = {
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": layout.nodes,
        "LOCAL_WORLD_SIZE": layout.ranks_per_node,
        "MASTER_ADDR": layout.master_address,
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "eth0" if netns else "lo",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "COMMLAYER_EMULATED": layout.mode,
        "COMMLAYER_EMULATED_LINKS": layout.links,
    }
    if not netns:
        values["COMMLAYER_TOPOLOGY"] = f"{layout.nodes}x{layout.ranks_per_node}"
    if local_rank is None:
        torchrun = (layout.nodes, node, layout.ranks_per_node, layout.master_address, port)
        values.update(zip(_TORCHRUN, torchrun, strict=True))
    else:
        values["RANK"] = node * layout.ranks_per_node + local_rank
        values["LOCAL_RANK"] = local_rank
        values["WORLD_SIZE"] = layout.nodes * layout.ranks_per_node
    return {name: str(value) for name, value in values.items()}
