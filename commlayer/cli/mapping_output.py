"""Output that the commands about mappings share: estimates as JSON, a mapping for a trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from commlayer.cli.tables import echo, echo_sentence, rounded
from commlayer.profiles.counted import counted
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping import parameters
from commlayer.scheduler.mapping.exports import Export, export
from commlayer.scheduler.mapping.hardware import Gpu
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.result import StepEstimate, Traffics
from commlayer.scheduler.mapping.software import MEGATRON, Software

__all__ = ["estimate_dict", "export_dict", "first_export", "job_dict", "print_export", "traffics_dict"]


def job_dict(job: Job) -> dict[str, Any]:
    sizes = parameters.count(job.model)
    return {
        "model": job.model.name,
        "parameters": sizes.total,
        "active_parameters": sizes.active,
        "gpus": job.gpus,
        "global_batch": job.global_batch,
        "sequence": job.sequence,
        "tokens": job.tokens,
        "mtp_layers": job.model.mtp_layers,
        "capacity_factor": job.capacity_factor,
        "imbalance": job.imbalance,
        "most_popular_expert": None if job.loads is None else rounded(max(job.loads.shares), 6),
    }


def estimate_dict(estimate: StepEstimate) -> dict[str, Any]:
    """Return an estimate for ``--json``: times in µs, memory in bytes, the rest fractions."""
    setup, memory = estimate.setup, estimate.memory
    validity: dict[str, Any] | None = None
    if (known := estimate.validity) is not None:
        ends_us, fitted = estimate.interval_us, known.fitted
        validity = {
            "word": known.word,
            "kind": known.kind._asdict(),
            "step_us": [rounded(us) for us in ends_us],
            "likely_us": None if known.is_unseen else rounded(estimate.likely_us),
            "tokens_per_s": [rounded(estimate.job.tokens / us * 1e6) for us in reversed(ends_us)],
            "mfu": [rounded(estimate.mfu * estimate.step_us / us, 6) for us in reversed(ends_us)],
            "num_of_kind": known.num_rows,
            "num_sources": known.num_sources,
            "is_new_machine": known.is_new,
            "is_new_attention": known.is_new_attention,
            "fitted": fitted and {"differences": fitted.differences, "num_pairs": fitted.num_pairs},
            "nearest": [
                {"row": row.key, "error": row.error, "differs": list(known.kind.differs(row.kind))}
                for row in known.nearest
            ],
        }
    return {
        "mapping": str(setup),
        "setup": {**asdict(setup), "dp": setup.dp, "edp": setup.edp},
        "step_us": rounded(estimate.step_us),
        "tokens_per_s": rounded(estimate.tokens_per_s),
        "mfu": rounded(estimate.mfu, 6),
        "tflops": rounded(estimate.tflops),
        "bubble": rounded(estimate.bubble, 6),
        "bottleneck": estimate.bottleneck,
        "link": estimate.link,
        "links_us": {link: rounded(us) for link, us in estimate.links_us.items()},
        "parts_us": {name: rounded(us) for name, us in estimate.parts.items()},
        "exposed_us": {lane: rounded(us) for lane, us in estimate.exposed_us.items()},
        "memory_bytes": {**{name: round(size) for name, size in asdict(memory).items()}, "total": round(memory.total)},
        "memory_limit_bytes": round(estimate.memory_limit),
        "fits": estimate.fits,
        "notes": list(estimate.notes),
        "validity": validity,
    }


def traffics_dict(traffics: Sequence[Traffics]) -> list[dict[str, Any]]:
    return [{**asdict(each), "us": rounded(each.us), "total_us": rounded(each.us * each.count)} for each in traffics]


def export_dict(exported: Export | None) -> dict[str, Any] | None:
    if exported is None:
        return None
    return {"target": exported.target, "values": exported.values, "notes": list(exported.notes)}


def first_export(
    trainer: str,
    job: Job,
    setups: Sequence[Setup],
    software: Software = MEGATRON,
    make: Callable[[Setup], Export] | None = None,
    gpu: Gpu | None = None,
) -> tuple[int, Export]:
    """Find the first of ``setups`` that ``trainer`` can run, as that software was planned, and its place.

    Raises UsageError where it can run none.
    """
    refusal: UsageError | None = None
    for place, setup in enumerate(setups):
        exported = _export(make or (lambda setup: export(trainer, job, setup, software, gpu)), setup)
        if isinstance(exported, Export):
            return place, exported
        refusal = refusal or exported
    if len(setups) == 1:
        raise UsageError(str(refusal))
    others = f"(nor any other of the {counted(len(setups), 'mapping')} that were looked at)"
    raise UsageError(f"{refusal} {others}: narrow the search to what it can run")


def _export(make: Callable[[Setup], Export], setup: Setup) -> Export | UsageError:
    try:
        return make(setup)
    except UsageError as error:
        return error


def print_export(exported: Export) -> None:
    """Print the configuration alone on stdout, what to know of it on stderr."""
    for note in exported.notes:
        echo_sentence(f"note: {note}", err=True)
    echo(exported.text)
