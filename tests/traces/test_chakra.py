"""Chakra traces: complete dependencies, messages that both sides know, and the schema of mlcommons/chakra where there is one."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from commlayer.cli.main import main
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping import catalog, clusters
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.rank_graph import RankNode, group_ranks, rank_graph, stage_ranks
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import COMMLAYER, MEGATRON, with_dispatcher
from commlayer.traces.chakra import FIELDS, encoded_graph, write_chakra

pytest.importorskip("google.protobuf")

JOB = Job(model=catalog.load("mixtral-8x7b"), gpus=32, global_batch=32, sequence=4096)
CLUSTER = clusters.load("h100-eos")
SETUPS = {f"ZeRO {zero}": Setup(gpus=32, tp=2, ep=8, pp=4, vpp=2, zero=zero) for zero in (1, 2, 3)}
"""Where data parallelism shards gradients too, layers send theirs; where weights too, layers gather theirs before each pass."""
SCHEMA = "CHAKRA_SCHEMA"
"""A variable that names et_def.proto of mlcommons/chakra."""


@pytest.fixture(scope="module", params=SETUPS)
def setup(request: pytest.FixtureRequest) -> Setup:
    return SETUPS[request.param]


@pytest.fixture(scope="module")
def graphs(setup: Setup) -> dict[int, list[RankNode]]:
    estimator = Estimator(JOB, CLUSTER, MEGATRON, efficiency=0.9)
    return {rank: rank_graph(estimator, setup, stage) for stage, rank in enumerate(stage_ranks(setup))}


# The graph


def test_whatever_a_node_waits_for_comes_before_it(graphs: dict[int, list[RankNode]]) -> None:
    for nodes in graphs.values():
        assert [node.number for node in nodes] == list(range(len(nodes)))
        assert all(earlier < node.number for node in nodes for earlier in node.after)
        waited_for = {earlier for node in nodes for earlier in node.after}
        ends = [node for node in nodes if node.number not in waited_for]
        assert {node.collective for node in ends} <= {"send", "compute"}, (
            "nothing but messages and the optimizer ends a step"
        )
        computed = [node for node in nodes if node.collective == "compute"]
        for before, after in pairwise(computed):
            assert _reaches(nodes, after, before.number), "what is computed is in one order"


def _reaches(nodes: list[RankNode], node: RankNode, number: int) -> bool:
    open_, seen = [node.number], set()
    while open_:
        current = open_.pop()
        if current == number:
            return True
        if current > number and current not in seen:
            seen.add(current)
            open_ += nodes[current].after
    return False


def test_messages_are_known_to_both_sides(graphs: dict[int, list[RankNode]], setup: Setup) -> None:
    sent: Counter[tuple[Any, ...]] = Counter()
    received: Counter[tuple[Any, ...]] = Counter()
    for rank, nodes in graphs.items():
        for node in nodes:
            if node.collective in ("send", "recv"):
                assert node.ranks[node.collective == "recv"] == rank
                (sent if node.collective == "send" else received)[node.ranks, node.tag, node.nbytes] += 1
    assert sent == received
    assert set(sent.values()) == {1}
    micro_batches = setup.micro_batches(JOB)
    assert len(sent) == 2 * micro_batches * (setup.pp * setup.vpp - 1)


def test_a_graph_has_what_an_estimate_counts(graphs: dict[int, list[RankNode]], setup: Setup) -> None:
    estimate = Estimator(JOB, CLUSTER, MEGATRON, efficiency=0.9).estimate(setup)
    nodes = graphs[stage_ranks(setup)[-1]]
    counted = Counter(
        (node.axis, node.collective) for node in nodes if node.collective not in ("compute", "send", "recv")
    )
    expected: Counter[tuple[str, str]] = Counter()
    for each in estimate.traffics:
        if each.collective != "send_recv":
            expected[each.axis, each.collective] += each.count
    assert counted == expected
    working = ("attention", "experts", "dense", "memory", "head", "recompute", "host", "optimizer")
    computed_us = sum(node.us for node in nodes)
    assert computed_us == pytest.approx(sum(estimate.parts.get(part, 0.0) for part in working), rel=0.02)
    assert all(node.ranks == group_ranks(setup, node.axis, 24) for node in nodes if node.axis in ("tp", "ep", "edp"))
    assert group_ranks(setup, "ep", 27) == tuple(range(24, 32))


def test_sharded_weights_and_gradients_are_waited_for(graphs: dict[int, list[RankNode]], setup: Setup) -> None:
    """Layers that gather the next one's weights (ZeRO 3) and send gradients (ZeRO 2) do so behind what they compute, what is
    computed next waits for it, and the optimizer for all."""
    for nodes in graphs.values():
        *_, optimizer = (node for node in nodes if node.name == "optimizer")
        sharded = [node for node in nodes if node.axis == "dp_cp"]
        assert sharded
        assert all(_reaches(nodes, optimizer, node.number) for node in sharded)
        backward = [node for node in sharded if "gradients backward" in node.name]
        forward = [node for node in sharded if "parameters forward" in node.name]
        assert bool(backward) == (setup.zero >= 2)
        assert bool(forward) == (setup.zero == 3)
        assert all(any(nodes[earlier].collective == "compute" for earlier in node.after) for node in backward)
        waited_for = {earlier for node in nodes if node.collective == "compute" for earlier in node.after}
        assert {node.number for node in backward + forward} <= waited_for


@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        (Setup(gpus=32, tp=2, ep=8, pp=4, schedule="dualpipe"), "order of 1f1b"),
        (Setup(gpus=32, cp=2, ep=8, pp=4), "no ring of context parallelism"),
    ],
)
def test_what_a_graph_has_no_words_for_is_refused(setup: Setup, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        rank_graph(Estimator(JOB, CLUSTER, MEGATRON), setup, 0)


def test_modules_of_multi_token_prediction_are_refused() -> None:
    job = replace(JOB, model=replace(JOB.model, mtp_layers=1))
    with pytest.raises(UsageError, match="set mtp to 0"):
        rank_graph(Estimator(job, CLUSTER, MEGATRON), Setup(gpus=32, tp=2, ep=8, pp=2, vpp=2), 0)


def test_tokens_in_two_levels_are_refused_and_kernels_are_one_exchange() -> None:
    job = Job(model=catalog.load("deepseek-v3"), gpus=256, global_batch=32, sequence=4096)
    setup = Setup(gpus=256, ep=16, pp=16)
    with pytest.raises(UsageError, match="take the dispatcher nccl"):
        rank_graph(Estimator(job, CLUSTER, COMMLAYER), setup, 1)
    for name in ("nccl", "deepep"):
        nodes = rank_graph(Estimator(job, CLUSTER, with_dispatcher(COMMLAYER, name)), setup, 1)
        assert {node.axis for node in nodes if node.collective == "all_to_all_v"} == {"ep"}


# The file


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if not data[at - 1] & 0x80:
            return value, at


def messages(data: bytes) -> Iterator[bytes]:
    """The messages of a file, each behind its length."""
    at = 0
    while at < len(data):
        length, at = _varint(data, at)
        assert at + length <= len(data)
        yield data[at : at + length]
        at += length


def test_exchanges_of_tokens_are_all_to_alls_and_times_add_up(
    graphs: dict[int, list[RankNode]], tmp_path: Path
) -> None:
    paths = write_chakra(tmp_path / "traces", graphs)
    assert [path.name for path in paths] == ["rank.0.et", "rank.8.et", "rank.16.et", "rank.24.et", "comm_groups.json"]
    groups = json.loads(paths[-1].read_text(encoding="utf-8"))
    classes = _classes(_own_schema())
    for path, nodes in zip(paths, graphs.values(), strict=False):
        header, *written = messages(path.read_bytes())
        assert classes["GlobalMetadata"].FromString(header).version
        assert len(written) == len(nodes)
        total = 0
        for data, node in zip(written, nodes, strict=True):
            found = classes["Node"].FromString(data)
            attributes = {each.name: each for each in found.attr}
            assert (found.id, tuple(found.data_deps)) == (node.number, node.after)
            total += found.duration_micros
            if node.collective == "all_to_all_v":
                assert attributes["comm_type"].int64_val == 6
            if node.axis and node.collective not in ("send", "recv"):
                assert tuple(groups[attributes["pg_name"].string_val]) == node.ranks
                assert attributes["comm_size"].int64_val == node.nbytes
        assert total == pytest.approx(sum(node.us for node in nodes), abs=1)


def test_the_schema_is_that_of_mlcommons(graphs: dict[int, list[RankNode]]) -> None:
    """With mlcommons/chakra 21585d8 (2026-05-20) this passed."""
    from google.protobuf.unknown_fields import UnknownFieldSet

    path = os.environ.get(SCHEMA)
    if not path:
        pytest.skip(f"no schema of mlcommons/chakra here: set {SCHEMA} to its schema/protobuf/et_def.proto")
    schema, enumerations = _read_schema(Path(path).read_text(encoding="utf-8"))
    for message, fields in FIELDS.items():
        for number, name, kind in fields:
            theirs = schema[message][name]
            assert theirs[0] == number
            assert theirs[1] == kind or (kind == "int32" and theirs[1] in enumerations)
    fields_of = {
        name: [(number, field, kind) for field, (number, kind) in each.items()] for name, each in schema.items()
    }
    classes = _classes(fields_of, enumerations)
    nodes = graphs[0]
    groups = {node.ranks: "1" for node in nodes}
    _, *written = messages(encoded_graph(nodes, groups))
    kinds = [classes["Node"].FromString(data) for data in written]
    assert all(len(UnknownFieldSet(found)) == 0 for found in kinds)
    words = ("COMP_NODE", "COMM_SEND_NODE", "COMM_RECV_NODE", "COMM_COLL_NODE")
    assert {found.type for found in kinds} == {enumerations["NodeType"][word] for word in words}
    exchanged = [found for found, node in zip(kinds, nodes, strict=True) if node.collective == "all_to_all_v"]
    assert exchanged
    for found in exchanged:
        (kind,) = [each.int64_val for each in found.attr if each.name == "comm_type"]
        assert kind == enumerations["CollectiveCommType"]["ALL_TO_ALL"]


def _own_schema() -> dict[str, list[tuple[int, str, str]]]:
    return {name: list(fields) for name, fields in FIELDS.items()}


def _read_schema(text: str) -> tuple[dict[str, dict[str, tuple[int, str]]], dict[str, dict[str, int]]]:
    """Messages and enumerations of a proto3 file that nests nothing but one ``oneof``."""
    text = re.sub(r"//[^\n]*", "", text)
    schema, enumerations = {}, {}
    for kind, name, body in re.findall(r"(message|enum)\s+(\w+)\s*\{((?:[^{}]|\{[^{}]*\})*)\}", text):
        if kind == "enum":
            enumerations[name] = {word: int(number) for word, number in re.findall(r"(\w+)\s*=\s*(\d+)\s*;", body)}
        else:
            fields = re.findall(r"((?:repeated\s+)?\w+)\s+(\w+)\s*=\s*(\d+)\s*;", body)
            schema[name] = {field: (int(number), " ".join(type_.split())) for type_, field, number in fields}
    return schema, enumerations


def _classes(
    schema: dict[str, list[tuple[int, str, str]]], enumerations: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Classes that read what a schema describes, made by protobuf."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="read.proto", package="read", syntax="proto3")
    for name, fields in schema.items():
        message = file.message_type.add(name=name)
        for number, field, kind in fields:
            plain = kind.removeprefix("repeated ")
            made = message.field.add(name=field, number=number, label=3 if "repeated" in kind else 1)
            scalar = "TYPE_INT32" if plain in (enumerations or {}) else f"TYPE_{plain.upper()}"
            if plain in schema:
                made.type, made.type_name = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE, f".read.{plain}"
            else:
                made.type = getattr(descriptor_pb2.FieldDescriptorProto, scalar)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = message_factory.GetMessageClassesForFiles([file.name], pool)
    return {name: found[f"read.{name}"] for name in schema}


def test_the_command_names_its_files_and_asks_for_a_folder(tmp_path: Path) -> None:
    call = [
        "estimate",
        "-m",
        "mixtral-8x7b",
        "-c",
        "h100-eos",
        "-g",
        "16",
        "--global-batch",
        "16",
        "--sequence",
        "4096",
    ]
    call += ["--ep", "8", "--pp", "2", "--export", "chakra"]
    refused = CliRunner().invoke(main, call)
    assert refused.exit_code == 2
    assert "--output" in refused.stderr
    found = CliRunner().invoke(main, [*call, "--output", str(tmp_path / "new")])
    assert found.exit_code == 0, found.output
    assert [Path(line).name for line in found.stdout.splitlines()] == ["rank.0.et", "rank.8.et", "comm_groups.json"]
    told = json.loads(CliRunner().invoke(main, [*call, "--output", str(tmp_path / "new"), "--json"]).stdout)["export"]
    assert told["target"] == "chakra"
    assert "trainer" not in told
    assert CliRunner().invoke(main, ["search", *call[1:]]).exit_code == 2
    assert CliRunner().invoke(main, [*call[:-2], "--output", str(tmp_path)]).exit_code == 2
    assert CliRunner().invoke(main, [*call[:-1], "megatron", "--output", str(tmp_path)]).exit_code == 2
