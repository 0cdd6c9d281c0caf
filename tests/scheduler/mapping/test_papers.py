"""Three papers' tables beside what we predict: the parts of benchmarks/papers.py that must hold in every change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.scheduler import Strategy
from commlayer.scheduler.mapping.calibrated import FACTORS

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture(scope="module")
def predictions() -> list[Any]:
    """Tables 3 and 5, and the legible rows of table 4, with the frozen factors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        from papers_data import TABLE_3, TABLE_4, TABLE_5
        from papers_folding import SOFTWARE_OF, Prediction, predict

        rows = [row for row in (*TABLE_3, *TABLE_4, *TABLE_5) if row.quality == "printed"]
        return [Prediction(row, predict(row, FACTORS[row.model], SOFTWARE_OF[row.method])) for row in rows]


# MoE Parallel Folding


def test_only_the_unfolded_rows_of_table_3_are_fitted() -> None:
    from papers_data import CALIBRATION

    assert all((row.table, row.method) == ("table 3", "MCore") for row in CALIBRATION)
    assert len(CALIBRATION) == 4
    assert [row.model for row in CALIBRATION] == list(FACTORS)


def test_what_a_calibration_writes_is_the_module_that_estimates_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import papers_folding

    shipped = papers_folding.CALIBRATED.read_text(encoding="utf-8")
    monkeypatch.setattr(papers_folding, "CALIBRATED", tmp_path / "calibrated.py")
    papers_folding.freeze(FACTORS)
    written = (tmp_path / "calibrated.py").read_text(encoding="utf-8")
    day = re.compile(r"on \d{4}-\d\d-\d\d,")
    assert day.sub("", written) == day.sub("", shipped)


def test_the_frozen_factors_are_those_of_this_model(predictions: list[Any]) -> None:
    """A change of the model needs `make papers ARGS=--calibrate`."""
    for each in predictions:
        if each.row.is_calibration:
            assert each.estimate.mfu == pytest.approx(each.row.mfu, rel=2e-3), each.row.name


_LLAMA = "llama3-8x70b"


def pipelined(predictions: list[Any]) -> dict[str, float]:
    """Errors of the predicted rows of MCore, folded or not."""
    rows = [each for each in predictions if each.row.method in ("MCore", "folded") and not each.row.is_calibration]
    return {each.row.name: each.error for each in rows}


def test_predicted_rows_are_close(predictions: list[Any]) -> None:
    from papers_folding import TOLERANCE

    errors = {name: error for name, error in pipelined(predictions).items() if _LLAMA not in name}
    assert len(errors) == 19
    assert {name: error for name, error in errors.items() if abs(error) > TOLERANCE} == {}
    assert sum(map(abs, errors.values())) / len(errors) < TOLERANCE / 2


def test_predicted_rows_with_few_rows_for_large_experts_are_close(predictions: list[Any]) -> None:
    from papers_folding import TOLERANCE

    errors = {name: error for name, error in pipelined(predictions).items() if _LLAMA in name}
    assert len(errors) == 3
    assert {name: error for name, error in errors.items() if abs(error) > TOLERANCE} == {}


def test_folded_beats_unfolded_and_methods_rank_as_published(predictions: list[Any]) -> None:
    from papers_folding import checks

    found = {check.name: check for check in checks(predictions, [])}
    for name, check in found.items():
        if name.startswith(("folded beats", "the ranking")):
            assert check.holds, f"{name}: {check.details}"
    assert sum(name.startswith(("folded beats", "the ranking")) for name in found) == 2


def test_fp8_is_faster_as_published(predictions: list[Any]) -> None:
    from papers_data import FP8_TFLOPS
    from papers_folding import TOLERANCE, fp8_rows

    rows = fp8_rows(FACTORS)
    assert {(method, precision): theirs for method, precision, theirs, _ in rows} == FP8_TFLOPS
    for method, precision, theirs, ours in rows:
        assert ours == pytest.approx(theirs, rel=TOLERANCE), f"{method} {precision}"


def test_every_row_has_a_valid_setup() -> None:
    from papers_data import TABLE_1, TABLE_3, TABLE_4, TABLE_5
    from papers_folding import job_of, setup_of

    names = [row.name for row in (*TABLE_3, *TABLE_4, *TABLE_5)]
    assert len(set(names)) == len(names) == 20 + 62 + 8
    assert len(TABLE_1) == 20
    for row in (*TABLE_3, *TABLE_4, *TABLE_5):
        setup, job = setup_of(row), job_of(row)
        assert setup.micro_batches(job) >= 1, row.name
        assert setup.etp == (1 if row.method == "folded" else row.tp)
        assert setup.vpp == 1 or setup.micro_batches(job) % setup.pp == 0, row.name


# MegaScale-MoE


def test_what_megascale_measures_holds() -> None:
    from papers_megascale import checks, dispatch_kinds, gains, synchronisation

    for check in checks(gains(), dispatch_kinds(), synchronisation()):
        assert check.holds, f"{check.name}: {check.details}"


def test_sequence_parallel_attention_sends_no_more_between_nodes() -> None:
    """Appendix A.1: what crosses nodes is as much, so that only what crosses NVLink is added; and eq. 10 of H100s is about 1."""
    from papers_megascale import inter_over_intra, synchronisation

    for each in synchronisation():
        assert each.tensor_us < min(each.sequence_us, each.hierarchical_us) < each.tensor_us * 4
        assert each.plan.startswith("pipelined")
    assert inter_over_intra(8, 8, 50, 450) == pytest.approx(450 / 50 / 8 * 8 * 7 / (8 * 7))
    assert inter_over_intra(8, 4, 50, 450) == pytest.approx(1 / 8 * (450 / 50) * (8 * 3) / (4 * 7))


# MoNTA


def test_table_8_from_our_plans() -> None:
    from papers_monta import table_8

    for strategy, collective, megabytes, latency_ms, ours, ours_ms in table_8():
        assert ours == megabytes, (strategy, collective)
        assert ours_ms == pytest.approx(latency_ms, rel=2e-3), (strategy, collective)  # printed to three places


def test_without_launches_the_prices_are_those_of_price() -> None:
    from papers_monta import O3, Contention, plan_of, times_us

    from commlayer.profiles import catalog
    from commlayer.scheduler import price

    contention = Contention(gather_beside_copy=1.7, copy_beside_gather=1.3, exchange_beside_gather=1.2)
    profile = contention.on(catalog.load("monta-a800-2x8"))
    assert times_us(256_000_000, contention)[O3] == pytest.approx(price(plan_of(256_000_000, O3), profile).total_us)


def test_the_stated_contention_chooses_as_the_paper() -> None:
    from papers_monta import CONSTANT, MEASURED, O3, PAPER, STATED, is_papers, selection, times_us, volume

    assert selection(STATED) == PAPER == selection(CONSTANT)
    assert is_papers(STATED)
    ratios = [
        times[O3] / times[Strategy.FLAT] for times in (times_us(volume(256), each) for each in (STATED, CONSTANT))
    ]
    assert ratios[0] == pytest.approx(MEASURED["O3", 256], rel=0.1)
    assert ratios[1] > 1.15 * MEASURED["O3", 256]  # so that explanation does not hold


@settings(max_examples=60)
@given(gather=st.floats(1, 20), copy=st.floats(1, 20))
def test_contention_of_all_gather_and_copy_alone_never_does(gather: float, copy: float) -> None:
    """O2 does not have it, and O3 loses or gains in proportion to its bytes."""
    from papers_monta import O1, O2, Contention, selection

    contention = Contention(gather_beside_copy=gather, copy_beside_gather=copy)
    chosen = selection(contention)
    assert O1 not in chosen.values()
    if contention.loss > 1:
        assert set(chosen.values()) == {O2}


def test_the_range_of_launch_costs_ends_where_a_choice_turns() -> None:
    from papers_monta import STATED, Contention, is_papers, launch_range

    slowdown = STATED.gather_beside_copy
    found = launch_range(slowdown)
    assert found is not None
    low, high = found
    assert low < STATED.launch_us < high
    for us, holds in ((low * 1.01, True), (low * 0.99, False), (high * 0.99, True), (high * 1.01, False)):
        assert is_papers(Contention(slowdown, slowdown, us)) is holds
    assert launch_range(1.2) is None
    assert launch_range(2.2) is None
