"""How far estimates are said to have been checked; and the published rows that this rests on."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from commlayer.profiles.errors import UsageError
from commlayer.profiles.shipped import shipped_data
from commlayer.scheduler.mapping import catalog, clusters
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.result import describe_validity, kind_words
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import COMMLAYER, MEGATRON, with_dispatcher
from commlayer.scheduler.mapping.validity import (
    COVERAGE,
    NEAREST,
    CaseKind,
    CheckedRow,
    CheckedRows,
    assess,
    cautions,
    checked_rows,
    kind_of,
)

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
KIND = CaseKind("hopper", "bf16", "deepep", "between", "none", False, False, "deepseek-v3", "mla", 671, 1024)
JOB = Job(model=catalog.load("deepseek-v3"), gpus=1024, global_batch=8192, sequence=4096)


def rows(errors: list[float], **changes: Any) -> list[CheckedRow]:
    return [CheckedRow(f"row {index}", KIND._replace(**changes), error) for index, error in enumerate(errors)]


def test_the_word_says_how_near_the_published_runs_are() -> None:
    three = [0.1, -0.1, 0.2]
    assert assess(KIND, rows(three)).word == "checked"
    assert assess(KIND, rows(three[:2])).word == "unchecked"
    assert assess(KIND, rows(three, dispatcher="nccl")).word == "interpolated"
    assert assess(KIND, rows(three, dispatcher="nccl", precision="fp8")).word == "unchecked"
    assert assess(KIND, rows(three, generation="blackwell")).word == "unchecked"
    assert assess(KIND, rows(three, family="kimi-k2", billions=1026, gpus=16)).word == "checked"  # a model is no kind


def test_a_checked_kind_has_a_run_of_a_like_model() -> None:
    three = [0.1, -0.1, 0.2]
    assert assess(KIND, rows(three, attention="gqa")).word == "interpolated"
    assert assess(KIND, rows(three, billions=223)).word == "interpolated"
    assert assess(KIND, rows(three, billions=224)).word == "checked"
    assert assess(KIND, [*rows(three, attention="gqa"), *rows([0.0])]).word == "checked"
    spread = [row for index in range(20) for row in rows([index / 100], attention="gqa", gpus=1024 + 8 * index)]
    assert assess(KIND, spread).num_rows == 20  # all of its kind, where none is of a like model
    assert assess(KIND, [*rows([0.0]), *spread]).num_rows == NEAREST


def test_what_no_public_number_explains_is_said_in_plain_words() -> None:
    kind = KIND._replace(generation="blackwell", dispatcher="nccl", short=True)
    far = rows([0.4, 0.5, 1.0], generation="blackwell", dispatcher="nccl")
    (said,) = cautions(kind, far)
    assert said.startswith(
        "tokens by NCCL's all_to_all on Blackwell: the prediction is likely too fast: for 3 published runs"
    )
    assert "+40% to +100%, half of them by more than +50%, and no public number that we found explains it" in said
    assert not cautions(KIND, far)
    assert not cautions(kind, far[:2])
    assert not cautions(kind, rows([0.1, 0.1, 0.4], generation="blackwell", dispatcher="nccl"))


def test_estimates_of_such_cases_have_the_caution_among_their_notes() -> None:
    cluster = clusters.load("b200-hgx")
    job = Job(model=catalog.load("gpt-oss-120b"), gpus=64, global_batch=1280, sequence=4096)
    found = Estimator(job, cluster, MEGATRON).estimate(Setup(gpus=64, ep=8, micro_batch=4))
    assert found.validity is not None
    assert cautions(found.validity.kind)
    assert set(cautions(found.validity.kind)) <= set(found.notes)


def test_runs_of_the_same_model_come_first() -> None:
    """The model's own runs, of its kind or not far from it, make the interval that as many runs of others would widen."""
    mine = rows([0.01 * index for index in range(5)]) + rows([-0.01 * index for index in range(5)], precision="fp8")
    others = rows([0.5, 0.6, 0.7], family="mixtral-8x7b", attention="gqa", billions=47)
    found = assess(KIND, others + mine)
    assert (found.word, found.low, found.high) == ("checked", -0.04, 0.04)
    assert not {row.kind.family for row in found.nearest} - {KIND.family}


def test_the_interval_is_that_of_the_nearest_errors() -> None:
    far = [CheckedRow("far", KIND._replace(generation="ampere"), 5.0)]
    near = rows([index / 100 for index in range(20)])  # all as near: names decide nothing
    found = assess(KIND, near + far)
    assert (found.low, found.high, found.num_rows) == (0.01, 0.18, 20)  # a tenth of 21 outside, at each end
    assert found.interval(100.0) == (101.0, 118.0)
    nearer = assess(KIND, near[:NEAREST] + rows([4.0], gpus=512) + far)
    assert (nearer.low, nearer.high, nearer.num_rows) == (0.0, 0.08, NEAREST)
    few = assess(KIND, rows([0.0, 0.1, 0.2]) + far * 9)
    assert few.num_rows == 12  # the nine farthest are as far
    assert few.high == 5.0
    assert [row.key for row in few.nearest] == ["row 0", "row 1", "row 2"]


def test_without_rows_nothing_is_known() -> None:
    found = assess(KIND, [])
    assert (found.word, found.low, found.high, found.nearest) == ("unchecked", -1.0, math.inf, ())


def test_intervals_hold_what_they_promise() -> None:
    """Errors from one place, each beside the interval of the others."""
    chance = random.Random(7)
    held = []
    for _ in range(40):
        drawn = rows([chance.gauss(0.05, 0.2) for _ in range(20)])
        held += [
            found.low <= row.error <= found.high
            for row in drawn
            for found in [assess(KIND, [other for other in drawn if other is not row])]
        ]
    assert sum(held) / len(held) >= COVERAGE - 0.01


def test_kinds_follow_from_the_cluster_and_the_software() -> None:
    setup = Setup(gpus=1024, tp=2, pp=8, ep=64, vpp=4, precision="fp8")
    kind = kind_of(JOB, setup, clusters.load("h100-eos"), with_dispatcher(MEGATRON, "deepep"), 40e6)
    assert kind == CaseKind("hopper", "fp8", "deepep", "between", "none", False, False, "deepseek-v3", "mla", 671, 1024)
    inside = kind_of(JOB, Setup(gpus=1024, ep=8, zero=3), clusters.load("a100"), COMMLAYER, 1e6)
    assert inside == CaseKind(
        "ampere", "bf16", "chunks", "inside", "chunks", True, True, "deepseek-v3", "mla", 671, 1024
    )
    chunked = replace(JOB, model=catalog.load("llama4-maverick"))
    assert kind_of(chunked, Setup(gpus=1024), clusters.load("a100"), MEGATRON, 1e6)[7:10] == (
        *("llama4-maverick", "windows", 401),
    )
    assert kind_of(JOB, Setup(gpus=1024), clusters.load("gb200-nvl72"), MEGATRON, 40e6)[:4] == (
        *("blackwell", "bf16", "nccl", "alone"),
    )
    assert (
        kind_words(inside)
        == "Ampere, BF16, experts inside a node, chunks, overlap chunks, short layers, sharded weights"
    )


def test_estimates_carry_it_and_say_it() -> None:
    estimator = Estimator(JOB, clusters.load("h100-eos"), with_dispatcher(MEGATRON, "deepep"))
    found = estimator.estimate(Setup(gpus=1024, tp=2, pp=8, ep=64, vpp=4))
    assert found.validity is not None
    low, high = found.interval_us
    assert low < high
    assert low >= found.step_us * found.mfu
    first, *nearest = describe_validity(found)
    assert first.startswith(f"{found.validity.word}: ")
    assert f"{low / 1e3:,.0f} to {high / 1e3:,.0f} ms" in first
    assert len(nearest) == 3
    assert all(line.startswith("nearest: ") for line in nearest)


def test_shipped_rows_are_sound() -> None:
    known = checked_rows()
    assert len({row.key for row in known}) == len(known) >= 40
    assert all(-1 < row.error < 5 and row.kind.gpus >= 1 for row in known)


def test_the_shipped_rows_are_as_their_generator_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from published import ROWS, rows_text

    text = ROWS.read_text(encoding="utf-8")
    assert rows_text(checked_rows()) == text
    assert json.loads(text)["kind"] == list(CaseKind._fields)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda text: text[:-20], r"mapping/checked_rows.json: line \d+, column \d+: expected JSON"),
        (lambda text: text.replace('"rows"', '"row"'), "field row: unknown field"),
        (lambda text: text.replace(", false, ", ', "no", ', 1), r"field rows\[0\]\[1\]\[5\]: expected bool, got str"),
    ],
    ids=["cut off", "another field", "another type"],
)
def test_a_damaged_list_of_rows_is_refused(
    damage: Callable[[str], str], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (files("commlayer.scheduler.mapping") / "checked_rows.json").read_text(encoding="utf-8")
    (tmp_path / "checked_rows.json").write_text(damage(text), encoding="utf-8")
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    with pytest.raises(UsageError, match=match):
        shipped_data("commlayer.scheduler.mapping", "checked_rows.json", CheckedRows, "list of published runs")


def test_published_rows_are_sound_and_a_third_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from published_data import load

    found = load()
    can = [row for row in found if not row.cannot]
    assert len(can) >= 40
    held = sum(row.group == "held" for row in found) / sum(not row.named for row in found)
    assert 0.25 < held < 0.45
    assert all(row.source and row.place for row in found)


def test_a_row_whose_degrees_do_not_divide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from published_data import Published

    with pytest.raises(ValueError, match="do not divide"):
        Published(
            key="k", source="s", place="p", model="m", system="h100", gpus=12, global_batch=8, published=1.0, tp=8
        )
