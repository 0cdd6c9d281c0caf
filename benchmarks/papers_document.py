"""docs/papers.md: the tables, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from papers_data import AFTERWARDS, ASSUMPTIONS, CALIBRATION, Check
from papers_folding import CLUSTER, TOLERANCE, Prediction, Searched, summary
from papers_megascale import Gain, Kind, Synchronised
from papers_sections import megascale_section, monta_section
from papers_text import percent, prose, table

from commlayer.scheduler.mapping.explain import compare_estimates

__all__ = ["document"]

_GIB = 2.0**30


def document(
    *,
    factors: Mapping[str, float],
    found: Sequence[Prediction],
    fp8: Sequence[tuple[str, str, float, float]],
    places: Sequence[Searched],
    megascale: tuple[Sequence[Gain], Sequence[Kind], Sequence[Synchronised]],
    held: Sequence[Check],
) -> str:
    """The whole page."""
    parts = [
        prose(_HEAD),
        table(("", "what must hold", "seen"), ((("yes" if c.holds else "**no**"), c.name, c.details) for c in held)),
        _folding(factors, found, fp8),
        _searched(places),
        megascale_section(*megascale),
        monta_section(),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


_HEAD = """
# The papers, predicted

`make papers` writes this page. It sets every number that three papers publish beside what the planner predicts without
having been on their clusters: MoE Parallel Folding (arXiv:2504.14960) on up to 1,024 H100, MegaScale-MoE
(arXiv:2505.11432) on H800, MoNTA (arXiv:2411.00662) on 16 A800. Four numbers are fitted, to four rows, which are named;
all other rows are predictions.
"""


# MoE Parallel Folding


def _folding(
    factors: Mapping[str, float], found: Sequence[Prediction], fp8: Sequence[tuple[str, str, float, float]]
) -> str:
    calibration = table(
        ("model", "GPUs", "mapping", "published MFU", "factor"),
        (
            (row.model, row.gpus, f"TP{row.tp} EP{row.ep} PP{row.pp}", percent(row.mfu), f"{factors[row.model]:.4f}")
            for row in CALIBRATION
        ),
    )
    assumptions = table(("assumption", "why"), ASSUMPTIONS)
    tables = [_rows(found, which) for which in ("table 3", "table 4", "table 5")]
    return "\n\n".join(
        [
            "## MoE Parallel Folding",
            prose(_FOLDING.format(cluster=CLUSTER)),
            "### What is fitted",
            calibration,
            "### What the paper leaves open",
            assumptions,
            "### What was changed after looking",
            prose(_NOT_BLIND),
            table(("change", "what it was seen by"), AFTERWARDS),
            "### Every row",
            prose(_ROWS),
            *tables,
            _fp8(fp8),
            _summary(found),
            "![Predicted over published MFU](pictures/papers-mfu.svg)",
            "![Strong scaling](pictures/papers-scaling.svg)",
            _parts(found),
            prose(_LIMITS.format(inside=_inside(found)) + _far(found)),
        ]
    )


_FOLDING = """
Cluster `{cluster}` (docs/clusters.md), software `megatron`: flat NCCL collectives, gradients and weights beside the
computation. For each model one factor on the GPU's rates of matrix products and attention is fitted by bisection, such
that the estimate of its **unfolded MCore row of table 3** has the published MFU, and frozen in
`scheduler/mapping/calibrated.py`. No other row is fitted.
"""

_NOT_BLIND = """
These predictions are not blind: the model got what follows after its first ones had been seen. Each is physics that it
lacked, none is a number chosen for a row, and the four factors were fitted again.
"""

_ROWS = """
*error* is predicted over published, less 1. *fitted* marks the four rows above. *assigned*: in the scan of table 4,
labels and values have slipped against each other after the first rows; values were given back by their order (models and
methods in table 3's order), by their numbers of GPUs, and by table 3's values nearby. Printed whole are Mixtral-8x22B's
MCore, folded and FSDP+EP rows; Llama3's folded values at both ends are in the text. Qwen2's rows of table 5 repeat
Mixtral's in the scan and are left out. *bounds*, of FSDP: nothing hidden, and weights and gradients hidden as far as the
links allow.
"""

_LIMITS = """
What to know about these rows:

- **FSDP+EP** is not blind. The paper says that its communication "cannot be fully overlapped"; of the three readings
  (nothing hidden; weights prefetched; gradients too) the middle one was taken after the rows had been seen.
  {inside} published values lie between the two others.

- **Out of memory** in the paper are Llama3-8x70B's FSDP and TP+EP+DP. The latter fits here with full recomputation only.
  For FSDP we count less than the GPU has; what the paper's implementation keeps beside the shards is not described.

- **Llama3-8x70B on 128 GPUs** (*misprint*) cannot be: EP8 PP16 leaves no data parallelism to shard the optimizer over, so
  3.6 billion parameters take 18 bytes each, 65 GB, and activations the rest and more; by our count it fits with full
  recomputation only. MCore's row of the same block begins at 256, so the first folded value is counted there.

- **Strong scaling** falls faster in the paper than here from 512 GPUs on: what a step pays once (clipping, the
  optimizer's kernels, stragglers among a thousand GPUs) is only partly modelled.
"""


def _rows(found: Sequence[Prediction], which: str) -> str:
    mine = [each for each in found if each.row.table == which]
    head = ("model", "method", "GPUs", "mapping", "published", "predicted", "error", "")
    return f"**{which.capitalize()}**\n\n" + table(head, map(_row, mine))


def _row(each: Prediction) -> tuple[str, ...]:
    row, setup = each.row, each.estimate.setup
    long = f", {row.sequence // 1024}K" if row.sequence != 4096 else ""
    mapping = f"TP{row.tp} CP{row.cp} EP{row.ep} ETP{setup.etp} PP{row.pp}{long}"
    notes = ["fitted"] if row.is_calibration else []
    notes += [row.quality] if row.quality != "printed" else []
    notes += [f"bounds {each.low:.1%} to {each.high:.1%}"] if each.low is not None and each.high is not None else []
    notes += [f"recompute {setup.recompute}"] if setup.recompute != "none" else []
    notes += [] if each.estimate.fits else [f"needs {each.estimate.memory.total / _GIB:.0f} GiB"]
    error = "" if row.is_calibration else percent(each.error, signed=True)
    published = "out of memory" if row.mfu is None else percent(row.mfu)
    predicted = percent(each.estimate.mfu)
    return row.model, row.method, str(row.gpus), mapping, published, predicted, error, "; ".join(notes)


def _fp8(rows: Sequence[tuple[str, str, float, float]]) -> str:
    cells = (
        (method, precision, f"{theirs:.1f}", f"{ours:.1f}", percent(ours / theirs - 1, signed=True))
        for method, precision, theirs, ours in rows
    )
    head = ("Mixtral-8x22B, 128 GPUs", "precision", "published TFLOP/s", "predicted", "error")
    return "**Table 2** (the factor is that of the BF16 row)\n\n" + table(head, cells)


def _summary(found: Sequence[Prediction]) -> str:
    cells = ((method, num, percent(mean), percent(most, signed=True)) for method, num, mean, most in summary(found))
    return "**All predicted rows by method**\n\n" + table(("method", "rows", "mean error", "largest"), cells)


def _far(found: Sequence[Prediction]) -> str:
    """The caution about pipelined rows that are further off than they may be."""
    pipelined = [each for each in found if each.row.method in ("MCore", "folded") and each.row.quality == "printed"]
    far = [f"{each.row.name} ({each.error:+.1%})" for each in pipelined if abs(each.error or 0.0) > TOLERANCE]
    if not far:
        return ""
    return (
        f"\n\n- **Further off than {TOLERANCE:.0%}**: {', '.join(far)}. What a weight gradient's product adds to an FP32 "
        f"sum in memory is not "
        "charged: with few rows for each expert's large matrices, as there, it takes as long as the product."
    )


def _inside(found: Sequence[Prediction]) -> str:
    mine = [each for each in found if each.row.method == "FSDP+EP"]
    inside = [each for each in mine if (each.low or 0.0) <= (each.row.mfu or 0.0) <= (each.high or 0.0)]
    return f"{len(inside)} of {len(mine)}"


def _parts(found: Sequence[Prediction]) -> str:
    """Where the time of table 3's pipelined mappings goes."""
    mine = [each for each in found if each.row.table == "table 3" and each.row.method in ("MCore", "folded")]
    names = [name for name in mine[0].estimate.parts if any(_share(each, name) >= 0.005 for each in mine)]
    rows = ((f"{each.row.model}, {each.row.method}", *(f"{_share(each, name):.1%}" for name in names)) for each in mine)
    return "**Where the predicted time goes**, parts of a step that nothing hides\n\n" + table(("", *names), rows)


def _share(each: Prediction, name: str) -> float:
    return each.estimate.parts.get(name, 0.0) / each.estimate.step_us


# The search


def _searched(places: Sequence[Searched]) -> str:
    rows = (
        (
            f"{each.row.model}, {each.row.gpus} GPUs, {each.row.method}",
            str(each.paper.setup),
            _place(each.place),
            _place(each.place_without_cp),
            f"{each.best[0].setup} ({each.best[0].mfu:.1%})",
        )
        for each in places
    )
    head = ("", "the paper's best", "its place", "with CP 1", "ours")
    why = prose("\n\n".join(f"- {_why(each)}" for each in places if (each.place or 99) > 3))
    return "\n\n".join(["### Is the paper's best mapping found?", prose(_SEARCH), table(head, rows), why])


_SEARCH = """
The search over everything that the paper's trainer offers (any degrees, CP too, any chunks, micro-batches of one
sequence, recomputation none or full), folded or unfolded as the row is. A *mapping* is TP, CP, EP, ETP and PP; its place
is among distinct mappings. All of table 3 has CP 1, hence the second count. Where the paper's is not among the first
three, the breakdown says what the first one saves. Two causes recur: ours use the last gigabytes of memory, and a
published run had to fit with what allocators and libraries really take; and context parallelism of 2 in place of TP 2
costs fewer bytes with grouped queries, which by the paper's account was never the best at 4K tokens.
"""


def _place(place: int | None) -> str:
    return "later" if place is None else str(place)


def _why(each: Searched) -> str:
    best, paper = each.best[0], each.paper
    room = f"Memory: {best.memory.total / _GIB:.0f} against {paper.memory.total / _GIB:.0f} GiB of {best.memory_limit / _GIB:.0f}"
    return f"{each.row.model}, {each.row.method}: {best.setup} against {compare_estimates(best, paper)} {room}."


# MegaScale-MoE
