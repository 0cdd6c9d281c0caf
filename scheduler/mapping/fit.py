"""What fits in memory, and on how many GPUs something would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from commlayer.scheduler.mapping import memory
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.result import Memory
from commlayer.scheduler.mapping.software import COMMLAYER, Software
from commlayer.scheduler.mapping.space import RECOMPUTE, Space, setups, simplicity

__all__ = ["MOST_GPUS", "Fit", "describe_memory", "smallest_fit"]

MOST_GPUS = 65_536
"""Up to here :func:`smallest_fit` looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The fewest GPUs on which a job fits, and the setup that takes the least memory there."""

    gpus: int
    setup: Setup
    memory: Memory


def smallest_fit(
    job: Job,
    cluster: Cluster,
    space: Space | None = None,
    *,
    memory_limit: float,
    software: Software = COMMLAYER,
    most_gpus: int = MOST_GPUS,
) -> Fit | None:
    """The smallest number of GPUs on which ``job`` fits in memory, whatever its own is; None where not even ``most_gpus`` do.

    Looked at are the divisors of the domain, then 1, 2, 3, 4, 6, 8, 12 … domains (powers of two, and those times 1.5): what
    clusters come in. ``memory_limit``: bytes that a GPU has for a job.
    """
    lean = _leanest(space or Space())
    for gpus in _sizes(cluster.domain, most_gpus):
        asked = replace(job, gpus=gpus)
        sizes = (
            (memory.estimate(asked, setup, software.gradient_bytes, software=software), setup)
            for setup in setups(asked, cluster, lean)
        )
        least = min(sizes, key=lambda found: (found[0].total, simplicity(found[1])), default=None)
        if least is not None and least[0].total <= memory_limit:
            return Fit(gpus=gpus, setup=least[1], memory=least[0])
    return None


def describe_memory(needed: Memory) -> str:
    """Its parts, the largest first."""
    names = ("weights", "gradients", "optimizer", "activations", "buffers")
    parts = sorted(((getattr(needed, name), name) for name in names), reverse=True)
    return ", ".join(f"{name} {size / 1e9:.1f}" for size, name in parts)


def _leanest(space: Space) -> Space:
    """``space`` without what never takes less memory than what is left."""
    recompute = max(space.recompute, key=RECOMPUTE.index)
    return replace(
        space,
        micro_batch=space.micro_batch if space.micro_batch and 1 not in space.micro_batch else (1,),
        vpp=space.vpp or (1,),
        recompute=(recompute,),
        zero=(max(space.zero),),
    )


def _sizes(domain: int, most: int) -> Iterator[int]:
    """Numbers of GPUs that clusters come in, ascending."""
    yield from (gpus for gpus in range(1, domain) if domain % gpus == 0 and gpus <= most)
    domains = 1
    while domains * domain <= most:
        yield domains * domain
        if domains > 1 and domains * domain * 3 // 2 <= most:
            yield domains * domain * 3 // 2
        domains *= 2
