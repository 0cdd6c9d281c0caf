"""A cluster by its name or from a JSON file (docs/clusters.md)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from commlayer.profiles.errors import UsageError
from commlayer.profiles.files import read_file
from commlayer.profiles.known_names import closest, is_path
from commlayer.profiles.printable import shortened
from commlayer.profiles.profile import Interference, read_profile
from commlayer.profiles.strict_json import parse_object
from commlayer.scheduler.mapping import hardware
from commlayer.scheduler.mapping.cluster import Cluster, Gpu, Link
from commlayer.scheduler.mapping.clusters import from_peaks, load, names

__all__ = ["parse", "resolve"]


def resolve(name_or_path: str) -> Cluster:
    """A known cluster by its name, or any by the path of its file (what contains "/", ends with ".json" or exists).

    Raises UsageError: neither; or a file that is not a sound cluster.
    """
    if name_or_path in names() or not is_path(name_or_path):
        return load(name_or_path)
    try:
        data = read_file(name_or_path)
    except FileNotFoundError as error:
        raise UsageError(f"{shortened(name_or_path)}: expected a cluster file, got no such file") from error
    except OSError as error:
        raise UsageError(
            f"{shortened(name_or_path)}: cannot read the cluster file: {error.strerror or error}"
        ) from error
    return parse(data, name_or_path)


def parse(text: bytes | str, where: str) -> Cluster:
    """The cluster of a JSON text; ``where`` begins every message, and profiles are looked for beside it.

    Raises UsageError: names the field and the reason.
    """
    content = parse_object(text, shortened(where), "cluster")
    if content.get("format") == "commlayer-profile":
        raise UsageError(
            f"{where}: this is a profile, which says nothing about GPUs. Write a cluster file beside it: "
            f'{{"name": …, "gpu": "h100", "profiles": ["{Path(where).name}"]}} (docs/clusters.md)'
        )
    _refuse_unknown(where, "", content, _File.__struct_fields__)
    gpu, links = content.get("gpu"), {name: content.get(name) for name in ("inter", "intra", "device")}
    if isinstance(gpu, dict):
        _refuse_unknown(where, "gpu.", gpu, [field.name for field in fields(Gpu)])
    for name, link in links.items():
        if isinstance(link, dict):
            _refuse_unknown(where, f"{name}.", link, [field.name for field in fields(Link)])
    try:
        return _built(msgspec.convert(content, _File), Path(where).parent)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {str(error).replace('Expected', 'expected', 1)}") from error
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


class _PeaksFile(msgspec.Struct, forbid_unknown_fields=True):
    inter_gbps: float
    intra_gbps: float
    device_gbps: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            rate = getattr(self, name)
            if not 1e-6 <= rate <= 1e6 and (rate or name != "device_gbps"):  # as --inter-gbps
                raise ValueError(f"{name}: expected a number of GB/s from 1e-06 to 1e+06, got {rate:g}")


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The file: either ``domain`` and ``peaks``, or ``profiles``; beside profiles of one node,
    ``inter_gbps`` and ``fabric`` are of the network that joins such nodes."""

    name: str
    gpu: str | Gpu
    domain: int = 0
    peaks: _PeaksFile | None = None
    inter: Link | None = None
    intra: Link | None = None
    device: Link | None = None
    fabric: str = ""
    interference: tuple[Interference, ...] = ()
    profiles: tuple[str, ...] = ()
    inter_gbps: float = 0.0
    source: str = ""


def _built(file: _File, folder: Path) -> Cluster:
    gpu = file.gpu
    if isinstance(gpu, str):
        if gpu not in hardware.GPUS:
            raise UsageError(
                f"gpu: expected one of {', '.join(hardware.GPUS)}, or an object with its numbers, got {gpu!r}"
                f"{closest(gpu, hardware.GPUS)}"
            )
        gpu = hardware.GPUS[gpu]
    if file.profiles:
        given = [
            name for name in ("domain", "peaks", "inter", "intra", "device", "interference") if getattr(file, name)
        ]
        if given:
            raise UsageError(f"{given[0]}: expected it not beside profiles, which say it")
        first, *more = (read_profile(folder / path) for path in file.profiles)
        cluster = Cluster.from_profile(first, gpu, *more).replace(name=file.name)
        if not file.inter_gbps and not file.fabric:
            return cluster
        if not file.inter_gbps or not file.fabric:
            raise UsageError(
                f"{'inter_gbps' if file.fabric else 'fabric'}: expected it beside "
                f"{'fabric' if file.fabric else 'inter_gbps'}: the network that joins nodes like the measured one has both"
            )
        return cluster.joined(file.fabric, file.inter_gbps).replace(name=file.name)
    if file.inter_gbps:
        raise UsageError("inter_gbps: expected it beside profiles of one node, else in peaks")
    if not file.domain or file.peaks is None:
        raise UsageError("expected domain, of at least 1, and peaks; or profiles")
    peaks = file.peaks
    cluster = from_peaks(
        file.name, gpu, file.domain, peaks.inter_gbps, peaks.intra_gbps, peaks.device_gbps, source=file.source
    )
    if file.fabric:
        cluster = cluster.on(file.fabric)
    links = {name: link for name in ("inter", "intra", "device") if (link := getattr(file, name)) is not None}
    return cluster.replace(**links, interference=file.interference)


def _refuse_unknown(where: str, prefix: str, content: dict[str, Any], known: Iterable[str]) -> None:
    for name in content:
        if name not in (names := list(known)):
            raise UsageError(
                f"{where}: field {prefix}{name}: unknown field; expected some of {', '.join(names)}{closest(name, names)}"
            )
