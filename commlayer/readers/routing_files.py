"""Routing files: expert loads on disk (docs/placement.md has the format).

JSON, so that anything reads it; a layer's counts are one text, base64 of zlib of little-endian 32-bit numbers, because a number
for each expert, layer and step would be hundreds of megabytes. A checksum over all of it finds what was cut or edited.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from commlayer.profiles.errors import UsageError
from commlayer.profiles.files import StrPath, read_file, write_file
from commlayer.profiles.printable import shortened
from commlayer.profiles.strict_json import convert, parse_object, pretty, require_field
from commlayer.scheduler.placement.expert_loads import ExpertLoads
from commlayer.scheduler.placement.expert_placement import Array

__all__ = ["ROUTING_FORMAT", "read_routing", "read_routing_folder", "routing_path", "write_routing"]

ROUTING_FORMAT: Final = "commlayer-routing"
_VERSION: Final = 1
_MOST_NUMBERS = 1 << 28
_MOST_BYTES = 1 << 30
_LARGEST = (1 << 32) - 1

_Count = Annotated[int, msgspec.Meta(ge=1)]


class _Layer(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    counts: str


class _RoutingFile(msgspec.Struct, forbid_unknown_fields=True):
    format: Literal["commlayer-routing"]
    version: Literal[1]
    source: str
    experts: _Count
    top_k: _Count
    steps: _Count
    stride: _Count
    layers: list[_Layer]
    checksum: str


def write_routing(path: StrPath, loads: ExpertLoads) -> None:
    """Write loads in one step. Raises OSError; UsageError for a count that does not fit into 32 bits."""
    if loads.counts.max() > _LARGEST:
        raise UsageError(
            f"expert loads: expected counts of at most {_LARGEST}, got {loads.counts.max()}: keep more, shorter steps"
        )
    packed = [zlib.compress(loads.counts[:, place].astype("<u4").tobytes(), 6) for place in range(loads.num_layers)]
    content = {
        "format": ROUTING_FORMAT,
        "version": _VERSION,
        "source": loads.source,
        "experts": loads.num_experts,
        "top_k": loads.top_k,
        "steps": loads.num_steps,
        "stride": loads.stride,
        "layers": [
            {"name": name, "counts": base64.b64encode(data).decode()}
            for name, data in zip(loads.layers, packed, strict=True)
        ],
    }
    write_file(path, pretty({**content, "checksum": _checksum(content)}) + "\n")


def read_routing(path: StrPath) -> ExpertLoads:
    """Read loads from a file, or from a folder in which ranks wrote them (:func:`read_routing_folder`).

    Raises:
        UsageError: no such file, or one that is damaged, foreign or newer: names the file, the field and the reason.
    """
    where = shortened(os.fspath(path))
    if os.path.isdir(path):
        return read_routing_folder(path)
    try:
        data = read_file(path, _MOST_BYTES, begins=b"{")
    except OSError as error:
        raise UsageError(
            f"{where}: cannot read the routing: {error.strerror or error}. `commlayer routing record` makes such a file"
        ) from error
    content = parse_object(data, where, "commlayer routing")
    require_field(content, "format", ROUTING_FORMAT, where, ": this is no routing file")
    version = content.get("version")
    if isinstance(version, int) and version > _VERSION:
        raise UsageError(
            f"{where}: field version: expected at most {_VERSION}, got {shortened(str(version))}: a newer commlayer wrote it. "
            "Upgrade commlayer"
        )
    file = convert(content, _RoutingFile, where, {"version": str(_VERSION)})
    if file.checksum != _checksum({name: value for name, value in content.items() if name != "checksum"}):
        raise UsageError(
            f"{where}: field checksum: it is not that of the content, which was cut or edited. Record it again"
        )
    if not file.layers or file.steps * file.experts * len(file.layers) > _MOST_NUMBERS:
        raise UsageError(
            f"{where}: field layers: expected at least one, and at most {_MOST_NUMBERS} counts in all, got {len(file.layers)} "
            f"layers with {file.steps} steps of {file.experts} experts"
        )
    import numpy as np

    counts = np.stack([_unpacked(layer, place, file, where) for place, layer in enumerate(file.layers)], 1)
    try:
        return ExpertLoads(counts, tuple(layer.name for layer in file.layers), file.top_k, file.stride, file.source)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def read_routing_folder(folder: StrPath) -> ExpertLoads:
    """Read the files that the ranks of a job wrote with ``COMMLAYER_ROUTING``, and add them up; where they lie in folders of
    replicas in there, those of all replicas.

    Raises UsageError: no such file in the folder, or files that do not go together.
    """
    paths = sorted(Path(folder).glob("routing-*.json")) or sorted(Path(folder).glob("*/routing-*.json"))
    if not paths:
        raise UsageError(
            f"{shortened(os.fspath(folder))}: expected files such as routing-00000.json, got none: run the job with "
            "COMMLAYER_ROUTING set to this folder, and let it end"
        )
    return ExpertLoads.added([read_routing(path) for path in paths])


def routing_path(folder: StrPath, rank: int) -> Path:
    """The file of one rank."""
    return Path(folder) / f"routing-{rank:05d}.json"


def _unpacked(layer: _Layer, place: int, file: _RoutingFile, where: str) -> Array:
    import numpy as np

    expected = 4 * file.steps * file.experts
    reader = zlib.decompressobj()
    try:
        data = reader.decompress(base64.b64decode(layer.counts, validate=True), expected + 1)
    except (zlib.error, binascii.Error, ValueError) as error:
        raise UsageError(
            f"{where}: field layers[{place}].counts: expected base64 of zlib, got a damaged text ({error})"
        ) from error
    if len(data) != expected or not reader.eof:
        raise UsageError(
            f"{where}: field layers[{place}].counts: expected {expected} bytes ({file.steps} steps of {file.experts} experts), "
            f"got {'more' if len(data) > expected else len(data)}"
        )
    return np.frombuffer(data, "<u4").reshape(file.steps, file.experts).astype(np.int64)


def _checksum(content: object) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
