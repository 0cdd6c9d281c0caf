"""Estimates: steps of the papers' rows, of the published rows, and of random setups; and what the papers' other tables need."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from fence_cases import MODELS, Case, Facts

from commlayer.profiles.errors import CommlayerError
from commlayer.scheduler import COMMLAYER, MEGATRON, PLANNED, Estimator, Job, Space, StepEstimate
from commlayer.scheduler.mapping import catalog, clusters
from commlayer.scheduler.mapping.calibrated import FACTORS
from commlayer.scheduler.mapping.job import Setup
from commlayer.scheduler.mapping.software import with_dispatcher
from commlayer.scheduler.mapping.space import families
from commlayer.scheduler.mapping.validity import checked_rows

__all__ = ["cases"]

_BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
_JOBS, _SETUPS_PER_JOB = 58, 4
"""Random jobs, and setups of each."""
_MOST_FAMILIES = 400
"""Families of setups of a job that are drawn from: the first ones, for large jobs have ten thousands."""
_CLUSTERS = ["a100", "b200-hgx", "b300-hgx", "gb200-nvl72", "gb300-nvl72", "h100-eos", "h20", "h200", "h800"]
"""The clusters from which cases are drawn: one that is added to the catalogue moves no case."""
_SOFTWARE = {
    "commlayer": COMMLAYER,
    "megatron": MEGATRON,
    "planned": PLANNED,
    "megatron with deepep": with_dispatcher(MEGATRON, "deepep"),
}


class _Asked(NamedTuple):
    """A random setup of a random job. ``software``: by its name in ``_SOFTWARE``."""

    job: Job
    cluster: str
    software: str
    setup: Setup


def cases() -> list[Case]:
    """Every case, in a fixed order."""
    if _BENCHMARKS not in sys.path:
        sys.path.append(_BENCHMARKS)  # its modules import each other by their bare names
    checked = Case("checked rows", lambda: {row.key: [row.error, *row.kind] for row in checked_rows()})
    found = [checked, *_of_papers(), *_published(), *_at_random()]
    assert len({case.key for case in found}) == len(found)
    return found


def _of_papers() -> Iterator[Case]:
    from papers_data import TABLE_3, TABLE_4, TABLE_5
    from papers_folding import predict

    for number, row in enumerate((*TABLE_3, *TABLE_4, *TABLE_5)):

        def estimated(row: Any = row) -> Facts:
            return _facts(predict(row, FACTORS[row.model]))

        yield Case(f"papers: {number} {row.table} {row.model} {row.method} {row.gpus} GPUs {row.precision}", estimated)
    yield Case("papers: MoE Parallel Folding, table 2", _folding_fp8)
    yield Case("papers: MegaScale-MoE, figures 7 and 14", _megascale)
    yield Case("papers: MegaScale-MoE, figure 13", _megascale_gains)
    yield Case("papers: MoNTA, tables 8 and 9", _monta)


def _folding_fp8() -> Facts:
    from papers_folding import fp8_rows

    return {"rows": fp8_rows(FACTORS)}


def _megascale() -> Facts:
    from papers_megascale import dispatch_kinds, ratios, synchronisation

    return {
        "dispatch kinds": [asdict(each) for each in dispatch_kinds()],
        "synchronisation": [asdict(each) for each in synchronisation()],
        "ratios": ratios(),
    }


def _megascale_gains() -> Facts:
    from papers_megascale import gains

    return {each.model: {"layers": each.layers, "gain": each.gain} for each in gains()}


def _monta() -> Facts:
    from papers_monta import checks, table_8

    return {"table 8": table_8(), "checks": [[each.name, each.holds, each.details] for each in checks()]}


def _published() -> Iterator[Case]:
    from published_data import load
    from published_predict import predict

    for row in load():

        def predicted(row: Any = row) -> Facts:
            outcome = predict(row)
            if outcome.estimate is None:
                return {"reason": outcome.reason}
            checked = outcome.checked
            return _facts(outcome.estimate) | {
                "predicted tokens/s": outcome.predicted,
                "passes, us": outcome.passes_us,
                "left out": outcome.left_out,
                "kind": str(checked and checked.kind),
            }

        yield Case(f"published: {row.key}", predicted)


def _at_random() -> Iterator[Case]:
    for number in range(_JOBS):
        for nth in range(_SETUPS_PER_JOB):
            yield Case(f"at random: job {number}, setup {nth}", partial(_random_facts, number, nth))


def _random_facts(number: int, nth: int) -> Facts:
    asked = _drawn(number)
    if nth >= len(asked):
        return {"none": "the job has fewer families of setups"}
    job, cluster, software, setup = asked[nth]
    words = {"job": _without_model(job), "cluster": cluster, "software": software, "setup": str(setup)}
    try:
        return words | _facts(_estimator(number).estimate(setup))
    except CommlayerError as error:
        return words | {"error": f"{type(error).__name__}: {error}"}


def _without_model(job: Job) -> str:
    size = f"{job.gpus} GPUs, {job.global_batch} × {job.sequence}"
    return f"{job.model.name}, {size}, capacity {job.capacity_factor}, imbalance {job.imbalance}"


@cache
def _estimator(number: int) -> Estimator:
    job, cluster, software, _ = _drawn(number)[0]
    return Estimator(job, clusters.load(cluster), _SOFTWARE[software])


@cache
def _drawn(number: int) -> list[_Asked]:
    """The setups of a random job; of a job that has none on its cluster, none."""
    draw = random.Random(f"job {number}")
    gpus = draw.choice((8, 16, 32, 64, 128, 256, 1024))
    capacity = draw.choice((None, None, 1.0, 1.5))
    job = Job(
        model=catalog.load(draw.choice(sorted(catalog.names()[:MODELS]))),
        gpus=gpus,
        global_batch=gpus * draw.choice((1, 2, 4, 8)),
        sequence=draw.choice((2048, 4096, 8192, 32768)),
        capacity_factor=capacity,
        imbalance=1.0 if capacity else draw.choice((1.0, 1.0, 1.3)),
    )
    cluster = draw.choice(_CLUSTERS)
    software = draw.choice(sorted(_SOFTWARE))
    pipelines = draw.choice((("1f1b",), ("1f1b", "1f1b-overlap"), ("dualpipe", "1f1b"), ("1f1b", "dualpipev")))
    space = Space(
        recompute=draw.choice((("none",), ("megascale", "full"), ("none", "mlp+layernorm"), ("none", "core_attn"))),
        precision=draw.choice((("bf16",), ("bf16", "fp8"))),
        attention=draw.choice((("tensor",), ("tensor", "ulysses"))),
        zero=draw.choice(((1,), (0, 1), (1, 2, 3))),
        schedule=pipelines,  # type: ignore[arg-type]  # words of PipelineSchedule
        offload=draw.choice((("none",), ("none",), ("core_attn",))),
        pipeline_layout=draw.choice(("even", "auto")),
    )
    found = list(islice(families(job, clusters.load(cluster), space), _MOST_FAMILIES))
    chosen = draw.sample(found, min(len(found), _SETUPS_PER_JOB))
    members = [list(family.members()) for family in chosen]
    return [_Asked(job, cluster, software, draw.choice(each)) for each in members if each]


def _facts(estimate: StepEstimate) -> Facts:
    """All fields of an estimate; of its hundreds of collectives what they sum up to, by name and axis."""
    traffics: dict[str, list[float]] = {}
    for each in estimate.traffics:
        sums = traffics.setdefault(f"{each.name} {each.axis} {each.lane} {each.collective} {each.plan}", [0.0] * 3)
        for place, value in enumerate((each.count, each.count * each.logical_bytes, each.count * each.us)):
            sums[place] += value
    courses = {"forward": estimate.forward, "backward": estimate.backward, "merged": estimate.merged}
    return {
        "software": estimate.software,
        "step_us": estimate.step_us,
        "tokens_per_s": estimate.tokens_per_s,
        "mfu": estimate.mfu,
        "tflops": estimate.tflops,
        "bubble": estimate.bubble,
        "memory": asdict(estimate.memory),
        "memory_limit": estimate.memory_limit,
        "parts": estimate.parts,
        "exposed_us": estimate.exposed_us,
        "links_us": estimate.links_us,
        "bottleneck": estimate.bottleneck,
        "interval_us": estimate.interval_us,
        "validity": None if estimate.validity is None else estimate.validity.word,
        "notes": estimate.notes,
        "traffics: calls, bytes, us": traffics,
        "ranks": [sum(values) for values in zip(*estimate.ranks, strict=True)],
        "courses, us": {name: _course(each) for name, each in courses.items() if each is not None},
    }


def _course(forecast: Any) -> Mapping[str, float]:
    return {"total": forecast.total_us, "exposed": forecast.exposed_us, "calls": float(len(forecast.calls))}
