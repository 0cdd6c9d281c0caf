"""Chakra execution traces (MLCommons), which ASTRA-sim and others read: a rank's step as protobuf
messages.

The schema is et_def.proto of mlcommons/chakra, of which the messages and the fields that are
written are described here; tests hold them against the file. A trace is one GlobalMetadata, then
one Node after the other, each behind its length as a varint (src/third_party/utils/protolib.py).
Attributes are those that its feeder knows (src/feeder/et_feeder_node.cpp).

``comm_size`` is nccl-tests' S: what one rank sends in an all_to_all, the gathered total of an
all_gather. Times are whole µs; what rounding leaves is carried on, so that their sum is right.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from commlayer.profiles.errors import UsageError
from commlayer.profiles.files import write_file
from commlayer.scheduler.mapping.rank_graph import RankNode

__all__ = ["COMM_TYPES", "FIELDS", "NODE_TYPES", "encoded_graph", "write_chakra"]

NODE_TYPES = {"compute": 4, "send": 5, "recv": 6, "collective": 7}
COMM_TYPES = {
    "all_reduce": 0,
    "all_gather": 2,
    "broadcast": 5,
    "all_to_all": 6,
    "all_to_all_v": 6,
    "reduce_scatter": 7,
}
FIELDS: dict[str, tuple[tuple[int, str, str], ...]] = {
    "GlobalMetadata": ((1, "version", "string"), (2, "attr", "repeated AttributeProto")),
    "AttributeProto": (
        (1, "name", "string"),
        (7, "int32_val", "int32"),
        (9, "int64_val", "int64"),
        (27, "bool_val", "bool"),
        (29, "string_val", "string"),
    ),
    "Node": (
        (1, "id", "uint64"),
        (2, "name", "string"),
        (3, "type", "int32"),
        (4, "ctrl_deps", "repeated uint64"),
        (5, "data_deps", "repeated uint64"),
        (7, "duration_micros", "uint64"),
        (10, "attr", "repeated AttributeProto"),
    ),
}
"""The fields of messages that are written: number, name, type. An enumeration is an int32 on the
wire."""
_SCALARS = {"string": 9, "int32": 5, "int64": 3, "uint64": 4, "bool": 8}
_ONE_OF = ("int32_val", "int64_val", "bool_val", "string_val")


def write_chakra(folder: Path, graphs: Mapping[int, Sequence[RankNode]]) -> list[Path]:
    """Write a trace for each rank, ``rank.<number>.et``, and the groups' ranks by the names that
    the traces have for them, ``comm_groups.json``.

    Raises:
        UsageError: a collective that Chakra has no word for; protobuf is not installed. OSError:
            the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[tuple[int, ...], str] = {}
    for nodes in graphs.values():
        for node in nodes:
            if _type(node) == "collective":
                names.setdefault(node.ranks, str(len(names) + 1))
    written = []
    for rank, nodes in graphs.items():
        written.append(folder / f"rank.{rank}.et")
        write_file(written[-1], encoded_graph(nodes, names))
    written.append(folder / "comm_groups.json")
    write_file(written[-1], json.dumps({name: list(ranks) for ranks, name in names.items()}, indent=1) + "\n")
    return written


def encoded_graph(nodes: Iterable[RankNode], groups: Mapping[tuple[int, ...], str]) -> bytes:
    """One rank's trace. ``groups``: the name of each group, by its ranks. Raises as
    :func:`write_chakra`."""
    messages = _messages()
    parts = [messages["GlobalMetadata"](version="0.0.4")]
    exact = rounded = 0.0
    for node in nodes:
        kind = _type(node)
        attributes: dict[str, dict[str, Any]] = {"is_cpu_op": {"bool_val": False}}
        if kind != "compute":
            attributes["comm_size"] = {"int64_val": node.nbytes}
        if kind == "collective":
            if node.collective not in COMM_TYPES:
                raise UsageError(f"{node.name}: Chakra knows {', '.join(COMM_TYPES)}, and no {node.collective}")
            attributes["comm_type"] = {"int64_val": COMM_TYPES[node.collective]}
            attributes["pg_name"] = {"string_val": groups[node.ranks]}
        elif kind != "compute":
            sender, receiver = node.ranks
            attributes["comm_src"], attributes["comm_dst"] = {"int32_val": sender}, {"int32_val": receiver}
            attributes["comm_tag"] = {"int32_val": node.tag}
        exact += node.us
        whole_us = round(exact - rounded)
        rounded += whole_us
        parts.append(
            messages["Node"](
                id=node.number,
                name=node.name,
                type=NODE_TYPES[kind],
                data_deps=node.after,
                duration_micros=whole_us,
                attr=[messages["AttributeProto"](**{"name": name, **value}) for name, value in attributes.items()],
            )
        )
    encoded = bytearray()
    for part in parts:  # each behind its length
        message = part.SerializeToString(deterministic=True)
        length = len(message)
        while length > 0x7F:
            encoded.append(length & 0x7F | 0x80)
            length >>= 7
        encoded.append(length)
        encoded += message
    return bytes(encoded)


def _type(node: RankNode) -> str:
    return node.collective if node.collective in NODE_TYPES else "collective"


@lru_cache(maxsize=1)
def _messages() -> dict[str, Any]:
    """The classes of the messages. Nobody generates them from a file: there is no compiler to
    install."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise UsageError("Chakra traces need protobuf: pip install 'protobuf>=5'") from error
    file = descriptor_pb2.FileDescriptorProto(
        name="commlayer/chakra.proto", package="commlayer.chakra", syntax="proto3"
    )
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        if name == "AttributeProto":
            message.oneof_decl.add(name="value")
        for number, field, kind in fields:
            plain = kind.removeprefix("repeated ")
            made = message.field.add(name=field, number=number, label=3 if kind.startswith("repeated ") else 1)
            if plain in _SCALARS:
                made.type = _SCALARS[plain]
            else:
                made.type, made.type_name = 11, f".commlayer.chakra.{plain}"
            if field in _ONE_OF:
                made.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes = message_factory.GetMessageClassesForFiles([file.name], pool)
    return {name: classes[f"commlayer.chakra.{name}"] for name in FIELDS}
