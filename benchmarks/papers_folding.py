"""MoE Parallel Folding's tables, predicted: one compute efficiency a model is fitted to the MCore rows of table 3, and
nothing else.

What is fitted: a factor on the declared rates of matrix products and attention, such that the estimate of the row's
mapping has the published MFU. Four rows, four models, four numbers; they are frozen in
``scheduler/mapping/calibrated.py``. Links, memory, kernels' launches and everything else are as declared for the
cluster, from other sources (docs/clusters.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from papers_data import (
    CALIBRATION,
    FP8_TFLOPS,
    METHODS,
    PEAK_TFLOPS,
    TABLE_3,
    TABLE_4,
    TABLE_5,
    VPP,
    Check,
    Method,
    Row,
)

from commlayer.profiles.curve import prediction_error
from commlayer.scheduler.mapping import catalog, clusters
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.recomputation import Recompute
from commlayer.scheduler.mapping.result import StepEstimate
from commlayer.scheduler.mapping.search import SearchResult, search
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import MEGATRON, Software
from commlayer.scheduler.mapping.space import Space

__all__ = [
    "CALIBRATED",
    "CLUSTER",
    "SOFTWARE_OF",
    "TOLERANCE",
    "Prediction",
    "Searched",
    "as_json",
    "calibrate",
    "checks",
    "fp8_rows",
    "freeze",
    "job_of",
    "predict",
    "predict_all",
    "searched",
    "setup_of",
    "summary",
]

CLUSTER = "h100-eos"
CALIBRATED = Path(__file__).parents[1] / "scheduler" / "mapping" / "calibrated.py"
_FROZEN = '''"""Factors on a GPU's declared rates of products and attention, by model: with them estimates have a published MFU.

Written by `make papers ARGS=--calibrate` on {date}, for {cluster}. The rows: MoE Parallel Folding (arXiv:2504.14960), table 3,
MCore without folding.
"""

FACTORS = {{
{rows}
}}
'''
TOLERANCE = 0.15

_MEGATRON = replace(MEGATRON, host="unknown")
"""Megatron without launches of the host: these are in the fitted factors, as the rows that they are fitted to have them.
Rejected: launches as of other software, and factors fitted anew, with mean errors of 5.1, 1.9 and 5.5 %."""
_FSDP = replace(_MEGATRON, name="fsdp", overlaps_gradients=False, overlaps_parameters=False)
SOFTWARE_OF: dict[Method, Software] = {
    "FSDP": _FSDP,
    "FSDP+EP": replace(_FSDP, name="fsdp+ep", overlaps_parameters=True),
    "TP+EP+DP": _MEGATRON,
    "MCore": _MEGATRON,
    "folded": _MEGATRON,
}
"""Section 4.2: FSDP's communication "cannot be effectively overlapped", FSDP+EP's "cannot be fully overlapped"."""
_RECOMPUTE: tuple[Recompute, ...] = ("none", "megascale", "full")


@dataclass(frozen=True, slots=True)
class Prediction:
    """A row and our estimate of it. ``low``, ``high``: with FSDP's traffic not hidden at all, and as far as possible."""

    row: Row
    estimate: StepEstimate
    low: float | None = None
    high: float | None = None

    @property
    def error(self) -> float | None:
        """The error of the predicted MFU; None where nothing was published."""
        return None if self.row.mfu is None else prediction_error(self.estimate.mfu, self.row.mfu)


def job_of(row: Row) -> Job:
    """Section 4.2: capacity factor 1 against imbalance."""
    model = catalog.load(row.model)
    return Job(model=model, gpus=row.gpus, global_batch=row.global_batch, sequence=row.sequence, capacity_factor=1.0)


def setup_of(row: Row, recompute: Recompute = "none") -> Setup:
    """The row's mapping, with what it leaves open as papers_data.ASSUMPTIONS say."""
    return Setup(
        gpus=row.gpus,
        tp=row.tp,
        cp=row.cp,
        pp=row.pp,
        ep=row.ep,
        etp=row.etp or row.tp,
        vpp=VPP[row.model, row.pp] if row.pp > 1 else 1,
        recompute=recompute,
        precision=row.precision,
        zero=3 if row.method.startswith("FSDP") else 1,
        folded=row.method == "folded",
    )


def predict(row: Row, efficiency: float, software: Software | None = None) -> StepEstimate:
    """With the least recomputation that fits; with the most where nothing does."""
    cluster = clusters.load(CLUSTER)
    estimator = Estimator(job_of(row), cluster, software or SOFTWARE_OF[row.method], efficiency=efficiency)
    for recompute in _RECOMPUTE:
        setup = setup_of(row, recompute)
        if estimator.memory(setup).total <= estimator.memory_limit:
            break
    return estimator.estimate(setup)


def calibrate(row: Row) -> float:
    """The factor for which the estimate of ``row`` has the published MFU: by bisection, for MFU rises with it."""
    if row.mfu is None:
        raise ValueError(f"{row.name} has no MFU to be fitted to")
    low, high = 0.05, 2.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (middle, high) if predict(row, middle).mfu < row.mfu else (low, middle)
    return round((low + high) / 2, 4)


def freeze(factors: Mapping[str, float]) -> None:
    """Write calibrated.py, whose factors estimates of these models take by default."""
    rows = "\n".join(
        f'    "{row.model}": {factors[row.model]},  # MFU {row.mfu} on {row.gpus} GPUs: {setup_of(row)}'
        for row in CALIBRATION
    )
    CALIBRATED.write_text(_FROZEN.format(date=date.today(), cluster=CLUSTER, rows=rows), encoding="utf-8")


def predict_all(factors: Mapping[str, float], rows: Iterable[Row] = (*TABLE_3, *TABLE_4, *TABLE_5)) -> list[Prediction]:
    """Every row, with the frozen factors; FSDP's with its bounds."""
    found = []
    for row in rows:
        factor = factors[row.model]
        estimate = predict(row, factor)
        low = high = None
        if row.method.startswith("FSDP"):
            low = predict(row, factor, _FSDP).mfu
            hides = replace(_FSDP, overlaps_gradients=True, overlaps_parameters=True)
            high = predict(row, factor, hides).mfu
        found.append(Prediction(row, estimate, low, high))
    return found


def fp8_rows(factors: Mapping[str, float]) -> list[tuple[str, str, float, float]]:
    """Table 2: method, precision, published and predicted TFLOP/s."""
    found = []
    for (method, precision), published in FP8_TFLOPS.items():
        base = next(row for row in TABLE_3 if (row.model, row.method) == ("mixtral-8x22b", method))
        row = replace(base, precision="fp8") if precision == "fp8" else base
        found.append((method, precision, published, predict(row, factors[row.model]).mfu * PEAK_TFLOPS))
    return found


# What must hold


def checks(found: Sequence[Prediction], fp8: Sequence[tuple[str, str, float, float]]) -> list[Check]:
    """Everything that part 3 of the reproduction asks for."""
    return [_folding_wins(found), _ranking(found), *_within(found), _fp8(fp8)]


def _folding_wins(found: Sequence[Prediction]) -> Check:
    """Every pair of an unfolded and a folded row of the same table, model, GPUs and sequence."""
    mfu = {_pair(each.row): each.estimate.mfu for each in found}
    pairs = [(key, mfu[key]) for key in mfu if key[-1] == "folded"]
    gains = {key: folded / mfu[(*key[:-1], "MCore")] - 1 for key, folded in pairs if (*key[:-1], "MCore") in mfu}
    lost = [" ".join(map(str, key[:-1])) for key, gain in gains.items() if gain <= 0]
    details = f"not for {', '.join(lost)}" if lost else f"by {min(gains.values()):.1%} to {max(gains.values()):.1%}"
    return Check(f"folded beats unfolded in each of {len(gains)} pairs", not lost, details)


def _pair(row: Row) -> tuple[str, str, int, int, str]:
    return row.table, row.model, row.gpus, row.sequence, row.method


def _ranking(found: Sequence[Prediction]) -> Check:
    """Table 1: methods of a model in the published order; one that ran out of memory has no place in it."""
    wrong = []
    for model in dict.fromkeys(row.model for row in TABLE_3):
        mine = {each.row.method: each for each in found if (each.row.table, each.row.model) == ("table 3", model)}
        ran = [method for method in METHODS if mine[method].row.mfu is not None]
        by_paper = sorted(ran, key=lambda method: -(mine[method].row.mfu or 0.0))
        by_us = sorted(ran, key=lambda method: -mine[method].estimate.mfu)
        if by_paper != by_us:
            wrong.append(f"{model}: published {' > '.join(by_paper)}, predicted {' > '.join(by_us)}")
    return Check("the ranking of methods in table 1", not wrong, "; ".join(wrong) or "for all four models")


def _within(found: Sequence[Prediction]) -> list[Check]:
    return [_close(name, [each for each in found if belongs(each.row)]) for name, belongs in _MUST_BE_CLOSE.items()]


_MUST_BE_CLOSE: dict[str, Callable[[Row], bool]] = {
    "folded rows of table 3": lambda row: row.table == "table 3" and row.method == "folded",
    "legible rows of table 4": lambda row: row.table == "table 4" and row.quality == "printed",
    "rows of table 5": lambda row: row.table == "table 5",
}


def _close(name: str, found: Sequence[Prediction]) -> Check:
    errors = {each.row.name: each.error for each in found if each.error is not None}
    far = [f"{row} {error:+.1%}" for row, error in errors.items() if abs(error) > TOLERANCE]
    mean = sum(map(abs, errors.values())) / len(errors)
    details = f"mean error {mean:.1%}, largest {max(errors.values(), key=abs):+.1%}"
    if far:
        details += f"; not {', '.join(far)}"
    return Check(f"MFU within {TOLERANCE:.0%}: {len(errors)} {name}", not far, details)


def summary(found: Sequence[Prediction]) -> list[tuple[str, int, float, float]]:
    """The errors by method: how many rows were predicted, their mean error without its sign, and the largest."""
    result: list[tuple[str, int, float, float]] = []
    for method in METHODS:
        errors = [
            each.error
            for each in found
            if each.error is not None and each.row.method == method and not each.row.is_calibration
        ]
        result.append((method, len(errors), sum(map(abs, errors)) / len(errors), max(errors, key=abs)))
    return result


def _fp8(rows: Sequence[tuple[str, str, float, float]]) -> Check:
    errors = {
        f"{method} {precision}": ours / theirs - 1 for method, precision, theirs, ours in rows if precision == "fp8"
    }
    details = ", ".join(f"{name} {error:+.1%}" for name, error in errors.items())
    return Check(
        f"FP8 (table 2) within {TOLERANCE:.0%}", all(abs(error) <= TOLERANCE for error in errors.values()), details
    )


# The search


@dataclass(frozen=True, slots=True)
class Searched:
    """The mappings that the search finds for a model and cluster of table 3, and where the paper's mapping is in it.

    ``best``: the fastest setup of each of the first mappings, in order; a mapping is TP, CP, EP, ETP and PP. ``place``:
    of the paper's, from 1; None: behind those that were ranked. ``place_without_cp``: among mappings with CP 1, as all of
    table 3.
    """

    row: Row
    best: tuple[StepEstimate, ...]
    place: int | None
    place_without_cp: int | None
    paper: StepEstimate
    result: SearchResult


def searched(row: Row, factors: Mapping[str, float], top: int = 60) -> Searched:
    """Over what the paper's trainer offers: any degrees and chunks, micro-batches of one sequence, Megatron's
    recomputation (none or full: its selective kind changes nothing where attention is fused), folded or not as the row
    is."""
    estimator = Estimator(job_of(row), clusters.load(CLUSTER), _MEGATRON, efficiency=factors[row.model])
    found = []
    for cp in (None, (1,)):
        space = Space(
            cp=cp,
            micro_batch=(1,),
            recompute=("none", "full"),
            exchange=("all_to_all",),
            folded=(row.method == "folded",),
        )
        result = search(estimator.job, estimator, space, top=top)
        fastest: dict[tuple[int, ...], StepEstimate] = {}
        for estimate in result.ranked:
            fastest.setdefault(_degrees(estimate.setup), estimate)
        found.append((result, fastest))
    (result, fastest), (_, without_cp) = found
    own = _degrees(setup_of(row))
    return Searched(
        row=row,
        best=tuple(fastest.values())[:3],
        place=_place(own, list(fastest)),
        place_without_cp=_place(own, list(without_cp)),
        paper=estimator.estimate(setup_of(row)),
        result=result,
    )


def _place(own: tuple[int, ...], ranked: Sequence[tuple[int, ...]]) -> int | None:
    return ranked.index(own) + 1 if own in ranked else None


def _degrees(setup: Setup) -> tuple[int, ...]:
    return setup.tp, setup.cp, setup.ep, setup.etp, setup.pp


def as_json(found: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Rows for the result file."""
    return [
        {
            "row": each.row.name,
            "mapping": str(each.estimate.setup),
            "published": each.row.mfu,
            "predicted": round(each.estimate.mfu, 4),
            "error": None if each.error is None else round(each.error, 4),
            "fitted": each.row.is_calibration,
            "quality": each.row.quality,
            "memory_gib": round(each.estimate.memory.total / 2**30, 1),
            "fits": each.estimate.fits,
            "parts": {name: round(us / each.estimate.step_us, 4) for name, us in each.estimate.parts.items()},
        }
        for each in found
    ]
