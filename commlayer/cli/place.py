"""The place where a command runs: on an emulated cluster that it builds, or under torchrun, which
has started it on every rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import click

from commlayer.cli.option_types import DELAY_US, SHAPE, TIMEOUT_US, in_order
from commlayer.cli.tables import said_warnings
from commlayer.profiles.errors import ProfileMismatchError, TopologyError, UsageError
from commlayer.profiles.topology import Topology

__all__ = [
    "Emulation",
    "Place",
    "check_has_links",
    "check_place",
    "emulation",
    "is_first",
    "place_of",
    "place_options",
    "read_place",
    "run_job",
]

Result = TypeVar("Result")
Emulation = Literal["netns", "loopback"]

_COLLECTIVE_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Place:
    """The place where a command runs. ``emulate`` None: this process is one rank under torchrun.
    Rates as tc writes them; None is unshaped.
    """

    emulate: Topology | None
    inter: str | None = None
    intra: str | None = None
    delay_us: float = 0.0
    timeout_s: float = 600.0
    device: str | None = None
    """The device whose links are asked for: cpu or cuda; None: as it is."""

    @property
    def inter_gbps(self) -> float | None:
        """The inter link's peak per rank, where it is shaped: the node's rate, shared by its
        ranks."""
        return self._share(self.inter)

    @property
    def intra_gbps(self) -> float | None:
        return self._share(self.intra)

    def _share(self, rate: str | None) -> float | None:
        from commlayer.emulation import parse_rate

        if rate is None or self.emulate is None:
            return None
        return parse_rate(rate) / 1e9 / self.emulate.ranks_per_node


place_options = in_order(
    click.option("--emulate", type=SHAPE, help="Build a cluster of this shape, 2x4, instead of using torchrun's."),
    click.option("--inter", metavar="RATE", help="Rate of an emulated node's interface.  [400mbit]"),
    click.option("--intra", metavar="RATE", help="Rate of an emulated node's loopback.  [unshaped]"),
    click.option("--delay", type=DELAY_US, default=0.0, help="One-way delay between emulated nodes: 100us, 1ms."),
    click.option("--timeout", type=TIMEOUT_US, default="10m", show_default=True, help="Kill an emulated run after."),
)
"""Add the options that say where, which :func:`read_place` reads."""


def read_place(given: dict[str, Any]) -> Place:
    """Take what ``place_options`` gave out of ``given``, and return the place. Raises as
    :func:`place_of`."""
    return place_of(*(given.pop(name) for name in ("emulate", "inter", "intra", "delay", "timeout")))


def place_of(emulate: str | None, inter: str | None, intra: str | None, delay: float, timeout: float) -> Place:
    """Check the options. Raises UsageError where they contradict each other or the environment."""
    if emulate is not None:
        topology = Topology.parse(emulate)
        topology.ranks_per_node  # noqa: B018  the emulator builds even nodes: raises, naming the uneven ones
        inter = inter or "400mbit"
        from commlayer.emulation.modes import decide_mode, link_spec

        with said_warnings():  # where the machine grants no namespaces, on stderr, once
            mode = decide_mode("auto", link_spec(inter, intra, delay))
        if mode == "netns":
            return Place(topology, inter, intra, delay, timeout / 1e6)
        return Place(topology, timeout_s=timeout / 1e6)
    if inter or intra or delay:
        raise UsageError("--inter, --intra and --delay shape an emulated cluster: add --emulate 2x4, or leave them out")
    if "RANK" not in os.environ:
        raise UsageError(
            "no cluster: start this command on every rank with torchrun (torchrun --nnodes 2 --nproc-per-node 8 "
            "--no-python commlayer …), or add --emulate 2x4 to build one on this machine"
        )
    return Place(None)


def check_has_links(place: Place, option: str = "--emulate") -> None:
    """Refuse an emulated cluster of one rank before it is built. Raises TopologyError: there are no
    links to measure.

    ``option``: by which it was asked for.
    """
    if place.emulate is not None and place.emulate.world_size < 2:
        raise TopologyError(
            f"{option} {place.emulate.shape}: expected two ranks or more, got one, which has no links to measure; "
            f"say {option} 2x4, for example"
        )


def is_first() -> bool:
    """Tell whether this process is the one that prints: rank 0, or no rank at all."""
    return os.environ.get("RANK", "0") == "0"


def emulation() -> Emulation | None:
    """Return by what means an emulated cluster runs this rank; None on a rank of no such cluster.

    Asked on the ranks, not taken from the options: `commlayer emulate` starts ranks that look like
    torchrun's, and a machine without namespaces runs them on loopback whatever was asked for.
    """
    mode = os.environ.get("COMMLAYER_EMULATED")
    return None if mode is None else "netns" if mode == "netns" else "loopback"


def run_job(place: Place, job: Callable[..., Result], *arguments: Any) -> Result | None:
    """Run ``job(*arguments)`` on every rank, with torch.distributed initialised, and return rank
    0's result.

    None on the other ranks of torchrun. Raises what the emulated cluster raises when a rank fails.
    """
    if place.emulate is None:
        result = _as_rank(job, arguments, place.device)
        return result if is_first() else None
    import commlayer.measure.benchmark  # noqa: F401  load torch before the fork: ranks then start in milliseconds
    from commlayer.emulation import EmulatedCluster

    cluster = EmulatedCluster(
        place.emulate.num_nodes,
        place.emulate.ranks_per_node,
        inter=place.inter,
        intra=place.intra,
        delay_us=place.delay_us,
    )
    with cluster:
        results: list[Result] = cluster.run(_as_rank, job, arguments, place.device, timeout_s=place.timeout_s)
        return results[0]


def _as_rank(job: Callable[..., Result], arguments: tuple[Any, ...], device: str | None = None) -> Result:
    import torch
    import torch.distributed as dist

    has_cuda = torch.cuda.is_available() and emulation() is None
    if device == "cuda" and not has_cuda:
        raise UsageError(
            "--device cuda: expected a CUDA device for each rank, got none: leave it out, or say --device cpu"
        )
    if has_cuda and device in (None, "cuda"):
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if has_cuda and device is None else "gloo", timeout=_COLLECTIVE_TIMEOUT)
    try:
        return job(*arguments)
    finally:
        if sys.exc_info()[0] is None:  # after a failure there is nobody to say goodbye to
            dist.destroy_process_group()


def check_place(place: Place, profile_topology: str, profile_name: str) -> None:
    """Refuse a profile of another shape before a cluster is built. Raises ProfileMismatchError
    naming both."""
    if place.emulate is not None and place.emulate.shape != profile_topology:
        raise ProfileMismatchError(
            f"--emulate {place.emulate.shape}: profile {profile_name!r} is of shape {profile_topology}; choose a profile of "
            "this shape (`commlayer profiles list`), or leave --profile out to measure first"
        )
