"""How far estimates are said to have been checked; and the published rows that this rests on."""

from __future__ import annotations

import json
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
from commlayer.scheduler.mapping.result import StepEstimate, describe_validity, kind_words
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import COMMLAYER, MEGATRON, with_dispatcher
from commlayer.scheduler.mapping.validity import (
    CLOSE,
    COVERAGE,
    EXTREMES,
    LINEAR_RUN,
    ROUGH,
    TRAITS,
    CaseKind,
    CheckedRow,
    CheckedRows,
    Validity,
    assess,
    cautions,
    checked_rows,
    fitted_errors,
    kind_of,
)

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
KIND = CaseKind(
    generation="hopper",
    fabric="infiniband",
    software="megatron",
    precision="bf16",
    dispatcher="deepep",
    experts="between",
    overlap="none",
    fused=False,
    short=False,
    sharded=False,
    attention="mla",
    family="deepseek-v3",
    gpus=1024,
)
JOB = Job(model=catalog.load("deepseek-v3"), gpus=1024, global_batch=8192, sequence=4096)


def changed(**changes: Any) -> CaseKind:
    return KIND._replace(**changes)


def rows(errors: list[float], source: str = "a", **changes: Any) -> list[CheckedRow]:
    return [
        CheckedRow(f"{source} {index}", source, KIND._replace(**changes), error) for index, error in enumerate(errors)
    ]


def sources(count: int, **changes: Any) -> list[CheckedRow]:
    """Runs of so many sources, with errors from 0.00 to 0.19 each."""
    return [
        row for number in range(count) for row in rows([index / 100 for index in range(20)], f"s{number}", **changes)
    ]


def width(found: Validity) -> float:
    return (1 + found.high) / (1 + found.low)


def test_a_source_has_one_vote_however_many_runs_it_published() -> None:
    one = [*rows([0.0] * 90, "many"), *sources(3)]
    assert assess(KIND, one).high == assess(KIND, [*rows([0.0], "few"), *sources(3)]).high
    assert assess(KIND, one).high > 0.1


def test_an_interval_narrows_with_near_sources_not_with_near_runs() -> None:
    widths = [width(assess(KIND, sources(count))) for count in (1, 2, 4, 8)]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 1.2
    assert width(assess(KIND, rows([0.0, 0.1] * 50))) == width(assess(KIND, rows([0.0, 0.1])))


def test_the_interval_leaves_a_tenth_of_the_votes_outside_at_each_end() -> None:
    found = assess(KIND, sources(40))
    assert found.low == 0.0  # the estimate itself: a tenth of the runs would end at 0.01
    assert found.middle == pytest.approx(0.09)
    assert found.high == pytest.approx(0.18)
    assert found.interval(100.0) == pytest.approx((100.0, 118.0))


def test_each_trait_that_differs_weakens_a_source() -> None:
    far = rows([3.0], "far")
    assert assess(KIND, [*sources(8), *far]).high == 3.0  # one vote of nine
    one = KIND._replace(precision="fp8")
    assert assess(one, [*sources(8, precision="fp8"), *far]).high < 1.0
    assert {len(KIND.differs(changed(**{name: "other"}))) for name in TRAITS} == {1}
    assert not KIND.differs(KIND._replace(gpus=8))


def test_cluster_sizes_of_one_run_have_one_interval() -> None:
    known = [row for size in (8, 64, 512) for row in rows([0.1, 0.2, -0.1], f"at {size}", gpus=size)]
    ends = {assess(KIND._replace(gpus=size), known).interval(1.0) for size in (8, 64, 512, 4096)}
    assert len(ends) == 1


def test_an_estimate_lies_in_its_interval() -> None:
    slower = [row for number in range(30) for row in rows([0.3, 0.4, 0.5], f"s{number}")]
    found = assess(KIND, slower)
    assert (found.low, found.middle) == (0.0, 0.4)
    faster = [row._replace(error=-row.error) for row in slower]
    assert assess(KIND, faster).high == 0.0
    for row in checked_rows():
        validity = assess(row.kind)
        assert validity.low <= 0.0 <= validity.high


@pytest.mark.parametrize("trait", ["generation", "fabric"])
def test_a_machine_that_no_run_was_on_is_unknown(trait: str) -> None:
    found = assess(changed(**{trait: "new"}), sources(40))
    assert found.is_new
    assert found.word == "unknown"
    assert found.interval(1.0) == pytest.approx(EXTREMES)
    assert not assess(KIND._replace(fabric="measured"), sources(40)).is_new
    assert not assess(KIND._replace(software="new", dispatcher="new"), sources(40)).is_new


def test_a_network_with_the_curves_of_a_known_one_differs_and_is_not_new() -> None:
    roce = changed(fabric="roce")
    assert roce.differs(KIND) == ("fabric",)
    assert not assess(roce, sources(40)).is_new
    assert assess(changed(fabric="efa"), sources(40)).is_new


def test_an_attention_that_no_run_had_may_be_slower_and_not_faster() -> None:
    known, new = assess(KIND, sources(40)), assess(changed(attention="compressed"), sources(40))
    assert new.is_new_attention
    assert not known.is_new_attention
    assert new.low == known.low
    assert new.high >= (1 + known.high) * LINEAR_RUN - 1
    said = describe_validity(estimate_with(new))[0]
    assert "no published run of a model with compressed attention" in said
    assert "in half of them" not in said
    assert "in half of them" in describe_validity(estimate_with(known))[0]


@pytest.mark.parametrize(
    ("model", "attention", "note"),
    [
        ("deepseek-v3.2", "indexed", "no published run with it is known"),
        ("deepseek-v4-flash", "compressed", "2 published runs with it took 1.00 to 1.05 times"),
        ("qwen3-next-80b-a3b", "linear", f"took {LINEAR_RUN:g} times as long"),
        ("deepseek-v3", "mla", ""),
    ],
)
def test_an_attention_without_measured_kernels_is_one_of_its_own(model: str, attention: str, note: str) -> None:
    job = Job(model=catalog.load(model), gpus=64, global_batch=64, sequence=4096)
    cluster = clusters.load("h100-eos")
    assert kind_of(job, Setup(gpus=64), cluster, MEGATRON, 1e6).attention == attention
    notes = [each for each in Estimator(job, cluster, MEGATRON).notes if "flash attention" in each]
    assert any(note in each for each in notes) == bool(note)


def test_the_word_is_that_of_the_width() -> None:
    found = assess(KIND, sources(40))
    words = [
        replace(found, low=-0.1, high=0.9 * ratio - 1).word for ratio in (1.0, CLOSE - 0.01, CLOSE + 0.01, ROUGH + 0.01)
    ]
    assert words == ["close", "close", "rough", "unknown"]


def test_a_run_that_is_named_as_nearest_says_how_it_differs() -> None:
    known = [*rows([0.1], "other", precision="fp8"), *rows([0.2], "same", gpus=64), *rows([0.3], "same size")]
    found = assess(KIND, known)
    assert [row.source for row in found.nearest] == ["same size", "same", "other"]
    assert (found.num_rows, found.num_sources) == (2, 2)
    first, *lines = describe_validity(estimate_with(found))
    assert "2 published runs of this kind" in first
    assert [line.rpartition("; ")[2] for line in lines] == ["of this kind", "of this kind", "differs in precision"]
    none = assess(KIND._replace(family="kimi-k2"), known)
    first, *lines = describe_validity(estimate_with(none))
    assert "by published runs that differ from this kind" in first
    assert "in 1 trait or more" in first
    assert not any(line.endswith("of this kind") for line in lines)


def estimate_with(validity: Validity) -> StepEstimate:
    job = Job(model=catalog.load("mixtral-8x7b"), gpus=8, global_batch=16, sequence=4096)
    found = Estimator(job, clusters.load("h100-eos"), MEGATRON).estimate(Setup(gpus=8, ep=8), detail=False)
    return replace(found, validity=validity)


def test_intervals_of_a_source_that_is_left_out_hold_more_than_they_promise() -> None:
    """The shipped runs, each beside the interval that all other sources give it."""
    known = checked_rows()
    inside: dict[str, list[bool]] = {}
    for row in known:
        validity = assess(row.kind, [other for other in known if other.source != row.source])
        inside.setdefault(row.source, []).append(validity.low <= row.error <= validity.high)
    assert len(inside) >= 8
    assert sum(map(sum, inside.values())) / len(known) >= COVERAGE
    assert sum(sum(each) / len(each) for each in inside.values()) / len(inside) >= COVERAGE


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


def test_without_rows_nothing_is_known() -> None:
    found = assess(KIND, [])
    assert (found.word, found.is_new, found.nearest) == ("unknown", True, ())
    assert found.interval(1.0) == pytest.approx(EXTREMES)


def test_kinds_follow_from_the_cluster_and_the_software() -> None:
    setup = Setup(gpus=1024, tp=2, pp=8, ep=64, vpp=4, precision="fp8")
    kind = kind_of(JOB, setup, clusters.load("h100-eos"), with_dispatcher(MEGATRON, "deepep"), 40e6)
    assert kind == KIND._replace(precision="fp8")
    deepep, eos = with_dispatcher(MEGATRON, "deepep"), clusters.load("h100-eos")
    for unfit in (
        {"etp": 2, "ep": 32},
        {"exchange": "all_gather"},
    ):  # which its kernels do not dispatch, as a note says
        assert kind_of(JOB, replace(setup, **unfit), eos, deepep, 40e6).dispatcher == "nccl"
    inside = kind_of(JOB, Setup(gpus=1024, ep=8, zero=3), clusters.load("a100"), COMMLAYER, 1e6)
    ours = KIND._replace(software="commlayer", dispatcher="chunks", overlap="chunks", short=True, sharded=True)
    assert inside == ours._replace(generation="ampere", experts="inside")
    chunked = replace(JOB, model=catalog.load("llama4-maverick"))
    windows = kind_of(chunked, Setup(gpus=1024), clusters.load("a100"), MEGATRON, 1e6)
    assert (windows.family, windows.attention) == ("llama4-maverick", "windows")
    alone = kind_of(JOB, Setup(gpus=1024), clusters.load("gb200-nvl72"), MEGATRON, 40e6)
    assert (alone.generation, alone.dispatcher, alone.experts) == ("blackwell", "nccl", "alone")
    said = "Ampere, infiniband, commlayer, BF16, experts inside a node, chunks, overlap chunks, short layers"
    assert kind_words(inside) == f"{said}, sharded weights"


def test_kernels_are_no_trait_without_expert_parallelism() -> None:
    cluster, deepep = clusters.load("h100-eos"), with_dispatcher(MEGATRON, "deepep")
    for setup in (Setup(gpus=1024), Setup(gpus=1024, tp=2, etp=2)):
        assert kind_of(JOB, setup, cluster, deepep, 40e6) == kind_of(JOB, setup, cluster, MEGATRON, 40e6)
    assert kind_of(JOB, Setup(gpus=1024, ep=8), cluster, deepep, 40e6).dispatcher == "deepep"


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
    assert low <= found.likely_us <= high
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
    assert rows_text(checked_rows(), fitted_errors()) == text
    assert json.loads(text)["kind"] == list(CaseKind._fields)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda text: text[:-20], r"mapping/checked_rows.json: line \d+, column \d+: expected JSON"),
        (lambda text: text.replace('"rows"', '"row"'), "field row: unknown field"),
        (lambda text: text.replace(", false, ", ', "no", ', 1), r"field rows\[0\]\[2\]\[7\]: expected bool, got str"),
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


def test_nothing_is_made_of_blind_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from published_data import BLIND, load

    blind = load(BLIND)
    assert len(blind) >= 8
    known = {(row.model, row.system, row.published) for row in load()}
    assert not known & {(row.model, row.system, row.published) for row in blind}
    assert not {row.key for row in checked_rows()} & {row.key for row in blind}


def test_a_row_whose_degrees_do_not_divide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from published_data import Published

    with pytest.raises(ValueError, match="do not divide"):
        Published(
            key="k", source="s", place="p", model="m", system="h100", gpus=12, global_batch=8, published=1.0, tp=8
        )
