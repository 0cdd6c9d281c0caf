"""The clusters that are known by name (clusters.json): GPUs and peaks from data sheets, efficiencies as declared.

docs/clusters.md has the sources of the latter.
"""

from __future__ import annotations

from functools import cache

import msgspec

from commlayer.profiles.errors import UsageError
from commlayer.profiles.known_names import closest_or_all
from commlayer.profiles.links import Peaks
from commlayer.profiles.printable import shortened
from commlayer.profiles.shipped import shipped_data
from commlayer.scheduler.mapping import declared_links, hardware
from commlayer.scheduler.mapping.cluster import Cluster, Gpu

__all__ = ["fitted", "from_peaks", "load", "names"]

_ASSUMED = "peaks as given, efficiencies as declared for H100 clusters (docs/clusters.md)"


def from_peaks(
    name: str,
    gpu: Gpu,
    domain: int,
    inter_gbps: float,
    intra_gbps: float,
    device_gbps: float = 0.0,
    *,
    source: str = "",
) -> Cluster:
    """A cluster of three numbers, and the declared efficiency curves.

    Args:
        domain: GPUs that NVLink joins.
        inter_gbps, intra_gbps: of one GPU, one direction, 1e9 B/s.
        device_gbps: bytes that copies copy in memory; 0: half of what ``gpu.memory_gbps`` says.

    Raises:
        ProfileError: a rate that is not positive. UsageError: a domain below 1.
    """
    return Cluster(
        name=name,
        gpu=gpu,
        domain=domain,
        peaks=Peaks(inter_gbps, intra_gbps, device_gbps or gpu.memory_gbps / 2),
        inter=declared_links.NETWORK,
        intra=declared_links.NVLINK,
        device=declared_links.MEMORY,
        source=source or _ASSUMED,
    )


class _Declared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cluster of the file. Arguments as :func:`from_peaks`; ``gpu``, ``fabric``, ``scale_up``: its names in
    :data:`hardware.GPUS`, :data:`declared_links.FABRICS` and :data:`declared_links.SCALE_UP`; ``host``: the time of
    its hosts' launches over those of the GPU's usual hosts."""

    name: str
    gpu: str
    domain: int
    inter_gbps: float
    intra_gbps: float
    source: str
    fabric: str = "infiniband"
    scale_up: str = "nvlink"
    host: float = 1.0


class _Clusters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    clusters: tuple[_Declared, ...]


@cache
def _known() -> dict[str, _Declared]:
    """The clusters of the file by name: read once."""
    shipped = shipped_data("commlayer.scheduler.mapping", "clusters.json", _Clusters, "list of clusters")
    return {each.name: each for each in shipped.clusters}


def names() -> list[str]:
    """The clusters that :func:`load` knows, sorted."""
    return sorted([*_known(), "a800-monta"])


@cache
def load(name: str) -> Cluster:
    """The declared cluster ``name``; always the same object. Raises UsageError for another name, with the closest."""
    if name == "a800-monta":
        return _monta()
    declared = _known().get(name)
    if declared is None:
        raise UsageError(
            f"cluster: expected the name of a known cluster or the path of a cluster file, got {shortened(name)!r}"
            f"{closest_or_all(name, names())}"
        )
    gpu, peaks = hardware.GPUS[declared.gpu].with_host(declared.host), (declared.inter_gbps, declared.intra_gbps)
    cluster = from_peaks(name, gpu, declared.domain, *peaks, source=declared.source).on(declared.fabric)
    return cluster.replace(intra=declared_links.SCALE_UP[declared.scale_up])


def _monta() -> Cluster:
    return Cluster(
        name="a800-monta",
        gpu=hardware.GPUS["a800"],
        domain=8,
        peaks=Peaks(25, 200, 1600),
        inter=declared_links.A800_MONTA_NETWORK,
        intra=declared_links.A800_MONTA_NVLINK,
        device=declared_links.MONTA_MEMORY,
        source="MoNTA, table 8 and figure 13; its device peak is implied by table 8's copy",
    )


def fitted(cluster: Cluster, gpus: int) -> tuple[Cluster, str]:
    """The cluster as a job of ``gpus`` GPUs uses it, and a note where that is less of each domain than there is.

    Domains that do not divide the GPUs would cut groups in two, and the slowest group counts. So as many GPUs of each are used as
    divide the job, the most that do: 64 of a rack's 72 for 256 GPUs. Left as they are: domains that hold the whole job, those of
    which nothing above a half would do, and measured ones.
    """
    domain = cluster.domain
    if cluster.measured or gpus <= domain or gpus % domain == 0:
        return cluster, ""
    used = next((size for size in range(domain - 1, domain // 2, -1) if gpus % size == 0), 0)
    if not used:
        return cluster, (
            f"domains of {domain} do not divide {gpus} GPUs: groups lie across two of them, and the slowest counts; "
            f"use a multiple of {domain}, or as much of a domain as divides"
        )
    note = f"{used} of each {domain} GPUs on NVLink are used, in {gpus // used} such domains: {domain} does not divide {gpus}"
    return cluster.replace(domain=used), note
