"""SimAI's workload, read by the rules of its reader (``Workload::initialize_workload``)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from commlayer.cli.main import main
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping import catalog, clusters
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.rank_graph import rank_graph
from commlayer.scheduler.mapping.simai_workload import simai_workload
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import COMMLAYER, MEGATRON

JOB = Job(model=catalog.load("mixtral-8x7b"), gpus=32, global_batch=32, sequence=4096)
CLUSTER = clusters.load("h100-eos")
SETUP = Setup(gpus=32, tp=2, ep=8, pp=2, vpp=2)
COLLECTIVES = ("ALLREDUCE", "ALLTOALL", "ALLGATHER", "REDUCESCATTER")
GROUPS = {"": "own", "_EP": "EP", "_DP_EP": "DP_EP"}


class Piece(NamedTuple):
    ns: int
    collective: str
    group: str
    nbytes: int


class Row(NamedTuple):
    name: str
    forward: Piece
    inputs: Piece
    weights: Piece


def read(text: str) -> tuple[dict[str, int], list[Row]]:
    """The first line by its words, then as many rows as the second one says, of 12 fields each, separated by any white space."""
    first, second, rest = text.split("\n", 2)
    policy, *words = first.split()
    assert policy == "HYBRID_TRANSFORMER_FWD_IN_BCKWD"
    numbers = (
        "model_parallel_NPU_group",
        "ep",
        "pp",
        "vpp",
        "ga",
        "all_gpus",
        "checkpoints",
        "checkpoint_initiates",
        "pp_comm",
    )
    known = tuple(f"{name}:" for name in numbers)
    assert tuple(words[::2]) == known
    header = {word.rstrip(":"): int(number) for word, number in zip(words[::2], words[1::2], strict=True)}
    assert all(header[name] > 0 for name in ("model_parallel_NPU_group", "ep", "pp", "vpp", "ga", "all_gpus"))
    assert (header["pp_comm"] > 0) is (header["pp"] > 1)
    fields = rest.split()
    count = int(second)
    assert len(fields) == 12 * count
    rows = []
    for at in range(0, len(fields), 12):
        name, dependency, *cells, update = fields[at : at + 12]
        assert int(dependency) == -1
        assert int(update) >= 0
        rows.append(Row(name, *(_piece(cells[index : index + 3]) for index in (0, 3, 6))))
    return header, rows


def _piece(cells: list[str]) -> Piece:
    ns, word, nbytes = int(cells[0]), cells[1], int(cells[2])
    assert ns >= 1
    if word == "NONE":
        assert nbytes == 0
        return Piece(ns, "", "", 0)
    collective = next(each for each in COLLECTIVES if word.startswith(each))
    return Piece(ns, collective, GROUPS[word.removeprefix(collective)], nbytes)


def test_a_workload_has_what_the_estimate_counts() -> None:
    estimator = Estimator(JOB, CLUSTER, MEGATRON, efficiency=0.9)
    header, rows = read(simai_workload(estimator, SETUP))
    micro_batches = SETUP.micro_batches(JOB)
    assert header["ga"] == micro_batches
    assert (header["model_parallel_NPU_group"], header["ep"], header["pp"], header["vpp"]) == (2, 8, 2, 2)
    pieces = [each for row in rows for each in (row.forward, row.inputs)]
    exchanged = Counter((each.group, each.nbytes) for each in pieces if each.collective == "ALLTOALL")
    layers = JOB.model.layers // SETUP.pp
    expected: Counter[tuple[str, int]] = Counter()
    for each in estimator.estimate(SETUP).traffics:
        if each.collective == "all_to_all_v":
            expected["EP", each.logical_bytes] += each.count
    assert exchanged == expected
    assert sum(exchanged.values()) % (layers * micro_batches) == 0
    summed = Counter(row.weights.collective + row.weights.group for row in rows if row.weights.collective)
    assert summed["REDUCESCATTERDP_EP"] == summed["ALLGATHERDP_EP"] > 0
    computed_us = sum(each.ns for row in rows for each in (row.forward, row.inputs, row.weights)) / 1e3
    parts = estimator.estimate(SETUP).parts
    working = sum(
        parts.get(part, 0.0) for part in ("attention", "experts", "dense", "memory", "recompute", "host", "optimizer")
    )
    assert computed_us == pytest.approx(working, rel=0.02)


def test_a_layer_goes_backward_from_the_last_row_to_the_first() -> None:
    _, rows = read(simai_workload(Estimator(JOB, CLUSTER, MEGATRON), SETUP))
    start = next(index for index, row in enumerate(rows) if row.name.startswith("moe_"))
    names = [row.name for row in rows[start:]]
    length = names[1:].index(names[0]) + 1
    layer = names[:length]
    assert [name.endswith("_backward") for name in layer] == sorted(name.endswith("_backward") for name in layer)
    backward = [name for name in reversed(layer) if name.endswith("_backward")]
    assert backward.index("moe_combine_gradient_backward") < backward.index("moe_dispatch_gradient_backward")


@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        (Setup(gpus=32, cp=2, ep=8, pp=4), "context parallelism, cp=2"),
        (Setup(gpus=32, tp=2, etp=2, ep=4, pp=4), "split experts"),
        (Setup(gpus=32, ep=8, pp=4, vpp=2, schedule="1f1b-overlap"), "the schedule 1f1b-overlap"),
        (Setup(gpus=32, ep=8, zero=3), "zero=3"),
    ],
)
def test_what_it_has_no_words_for_is_refused(setup: Setup, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        simai_workload(Estimator(JOB, CLUSTER, MEGATRON), setup)


def test_modules_of_multi_token_prediction_are_refused() -> None:
    job = replace(JOB, model=replace(JOB.model, mtp_layers=1))
    with pytest.raises(UsageError, match="multi-token prediction, mtp=1"):
        simai_workload(Estimator(job, CLUSTER, MEGATRON), SETUP)
    with pytest.raises(UsageError, match="set mtp to 0"):
        rank_graph(Estimator(job, CLUSTER, MEGATRON), SETUP, 0)


def test_groups_of_tp_and_dp_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="take the software megatron"):
        simai_workload(Estimator(JOB, CLUSTER, COMMLAYER), SETUP)


def test_the_command_prints_nothing_but_the_workload() -> None:
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
    found = CliRunner().invoke(main, [*call, "--ep", "8", "--pp", "2", "--software", "megatron", "--export", "simai"])
    assert found.exit_code == 0, found.output
    assert read(found.stdout)[0]["all_gpus"] == 16
    assert "not hidden here" in found.stderr
