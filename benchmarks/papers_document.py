"""docs/papers.md: the tables, and what they mean."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from papers_data import AFTERWARDS, ASSUMPTIONS, CALIBRATION, MEGASCALE_GAIN, Check
from papers_folding import CLUSTER, TOLERANCE, Prediction, Searched, summary
from papers_megascale import Gain, Kind, Synchronised, ratios
from papers_monta import (
    CONSTANT,
    MEASURED,
    O1,
    O2,
    O3,
    PAPER,
    STATED,
    TABLE_8_BYTES,
    Contention,
    launch_range,
    rows_of,
    table_8,
)

from commlayer.scheduler import Strategy
from commlayer.scheduler.mapping.explain import compare

__all__ = ["document"]

_GIB = 2.0**30
_NAMES = {O1: "O1", O2: "O2", O3: "O3"}


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
        _prose(_HEAD),
        _table(("", "what must hold", "seen"), ((("yes" if c.holds else "**no**"), c.name, c.details) for c in held)),
        _folding(factors, found, fp8),
        _searched(places),
        _megascale(*megascale),
        _monta(),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


_HEAD = """
# The papers, predicted

`make papers` writes this page. It sets every number that three papers publish beside what the planner predicts without
having been on their clusters: MoE Parallel Folding (arXiv:2504.14960) on up to 1,024 H100, MegaScale-MoE
(arXiv:2505.11432) on H800, MoNTA (arXiv:2411.00662) on 16 A800. Four numbers are fitted, to four rows, which are named;
all other rows are predictions.
"""


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _prose(text: str) -> str:
    """Paragraphs and items, laid out anew; items are paragraphs here, and follow each other without a blank line there."""
    found = []
    for block in map(str.strip, text.split("\n\n")):
        indent = "  " if block.startswith("- ") else ""
        whole = " ".join(block.split()) if not block.startswith("#") else block
        laid = textwrap.fill(whole, 128, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        found.append(laid)
    return "\n\n".join(found).replace("\n\n- ", "\n- ").replace("\n- ", "\n\n- ", 1)


def _percent(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "–"
    return f"{value:+.1%}" if signed else f"{value:.1%}"


# MoE Parallel Folding


def _folding(
    factors: Mapping[str, float], found: Sequence[Prediction], fp8: Sequence[tuple[str, str, float, float]]
) -> str:
    calibration = _table(
        ("model", "GPUs", "mapping", "published MFU", "factor"),
        (
            (row.model, row.gpus, f"TP{row.tp} EP{row.ep} PP{row.pp}", _percent(row.mfu), f"{factors[row.model]:.4f}")
            for row in CALIBRATION
        ),
    )
    assumptions = _table(("assumption", "why"), ASSUMPTIONS)
    tables = [_rows(found, table) for table in ("table 3", "table 4", "table 5")]
    return "\n\n".join(
        [
            "## MoE Parallel Folding",
            _prose(_FOLDING.format(cluster=CLUSTER)),
            "### What is fitted",
            calibration,
            "### What the paper leaves open",
            assumptions,
            "### What was changed after looking",
            _prose(_NOT_BLIND),
            _table(("change", "what it was seen by"), AFTERWARDS),
            "### Every row",
            _prose(_ROWS),
            *tables,
            _fp8(fp8),
            _summary(found),
            "![Predicted over published MFU](pictures/papers-mfu.svg)",
            "![Strong scaling](pictures/papers-scaling.svg)",
            _parts(found),
            _prose(_LIMITS.format(inside=_inside(found)) + _far(found)),
        ]
    )


_FOLDING = """
Cluster `{cluster}` (docs/clusters.md), software `megatron`: flat NCCL collectives, gradients and weights beside the
computation. For each model one factor on the GPU's rates of matrix products and attention is fitted by bisection, such
that the estimate of its **unfolded MCore row of table 3** has the published MFU, and frozen in
`scheduler/mapping/calibrated.json`. No other row is fitted.
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


def _rows(found: Sequence[Prediction], table: str) -> str:
    mine = [each for each in found if each.row.table == table]
    head = ("model", "method", "GPUs", "mapping", "published", "predicted", "error", "")
    return f"**{table.capitalize()}**\n\n" + _table(head, map(_row, mine))


def _row(each: Prediction) -> tuple[str, ...]:
    row, setup = each.row, each.estimate.setup
    long = f", {row.sequence // 1024}K" if row.sequence != 4096 else ""
    mapping = f"TP{row.tp} CP{row.cp} EP{row.ep} ETP{setup.etp} PP{row.pp}{long}"
    notes = ["fitted"] if row.is_calibration else []
    notes += [row.quality] if row.quality != "printed" else []
    notes += [f"bounds {each.low:.1%} to {each.high:.1%}"] if each.low is not None and each.high is not None else []
    notes += [f"recompute {setup.recompute}"] if setup.recompute != "none" else []
    notes += [] if each.estimate.fits else [f"needs {each.estimate.memory.total / _GIB:.0f} GiB"]
    error = "" if row.is_calibration else _percent(each.error, signed=True)
    published = "out of memory" if row.mfu is None else _percent(row.mfu)
    predicted = _percent(each.estimate.mfu)
    return row.model, row.method, str(row.gpus), mapping, published, predicted, error, "; ".join(notes)


def _fp8(rows: Sequence[tuple[str, str, float, float]]) -> str:
    cells = (
        (method, precision, f"{theirs:.1f}", f"{ours:.1f}", _percent(ours / theirs - 1, signed=True))
        for method, precision, theirs, ours in rows
    )
    head = ("Mixtral-8x22B, 128 GPUs", "precision", "published TFLOP/s", "predicted", "error")
    return "**Table 2** (the factor is that of the BF16 row)\n\n" + _table(head, cells)


def _summary(found: Sequence[Prediction]) -> str:
    cells = ((method, num, _percent(mean), _percent(most, signed=True)) for method, num, mean, most in summary(found))
    return "**All predicted rows by method**\n\n" + _table(("method", "rows", "mean error", "largest"), cells)


def _far(found: Sequence[Prediction]) -> str:
    """What to know of pipelined rows that are further off than they may be."""
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
    return "**Where the predicted time goes**, parts of a step that nothing hides\n\n" + _table(("", *names), rows)


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
    why = _prose("\n\n".join(f"- {_why(each)}" for each in places if (each.place or 99) > 3))
    return "\n\n".join(["### Is the paper's best mapping found?", _prose(_SEARCH), _table(head, rows), why])


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
    return f"{each.row.model}, {each.row.method}: {best.setup} against {compare(best, paper)} {room}."


# MegaScale-MoE


def _megascale(found: Sequence[Gain], kinds: Sequence[Kind], synchronised: Sequence[Synchronised]) -> str:
    gains = _table(
        ("model", "layers", "TP+TP MFU", "SP+EP MFU", "gain", "off by a factor of"),
        (
            (
                each.model,
                each.layers,
                _percent(each.tensor.mfu),
                _percent(each.sequence_expert.mfu),
                _percent(each.gain, signed=True),
                f"{each.factor:.2f}" if each.factor != 1 else "inside",
            )
            for each in found
        ),
    )
    crossing = _table(
        ("k", *(str(each.top_k) for each in kinds)),
        (
            ("two all_to_all, µs", *(f"{each.all_to_all_us:.0f}" for each in kinds)),
            ("all_gather and reduce_scatter, µs", *(f"{each.all_gather_us:.0f}" for each in kinds)),
        ),
    )
    synchronisation = _table(
        ("groups", "attention MB", "FFN, ms", "TP, ms", "SP, ms", "SP by A.1's steps, ms", "difference", "eq. 10"),
        (
            (
                each.groups,
                each.megabytes,
                f"{each.ffn_us / 1e3:.1f}",
                f"{each.tensor_us / 1e3:.2f}",
                f"{each.sequence_us / 1e3:.2f}",
                f"{each.hierarchical_us / 1e3:.2f} ({each.plan})",
                _percent(each.difference, signed=True),
                f"{each.inter_over_intra:.2f}",
            )
            for each in synchronised
        ),
    )
    ratio = _table(
        ("model", "R inside the node", "R over the network"),
        ((name, f"{inside:.2f}", f"{beyond:.2f}") for name, inside, beyond in ratios()),
    )
    published = " to ".join(map(_percent, MEGASCALE_GAIN))
    return "\n\n".join(
        [
            "## MegaScale-MoE",
            "### SP+EP over TP+TP (figure 13)",
            _prose(_GAIN.format(published=published)),
            gains,
            "### Tokens gathered or exchanged (figure 7)",
            "Mixtral-8x7B's hidden size, 8192 tokens, eight H800, by the library's own calls; the paper: all_gather from "
            "k > 6.",
            crossing,
            "### Parameter synchronisation (figure 14)",
            _prose(_SYNC),
            synchronisation,
            "### Compute over communication (equations 5 to 9)",
            "R of equation 8 on eight H800, in bytes and FLOPs: 200 GB/s inside a node, 50 GB/s over a card. Above 1 "
            "dispatch and combine can hide.",
            ratio,
        ]
    )


_GAIN = """
One node of eight H800, global batch 32 of 8192 tokens, nothing hidden behind anything, as many layers as both ways have
memory for, compute at the median of the four factors above. Published for the six models together: {published}; the paper
does not say which model has which. The right column says by what factor 1 + gain lies outside of that range. We are too
kind to SP+EP, or too hard on TP+TP: exchanges are priced by NCCL's bus bandwidths on H100 carried over to an H800's
NVLink, and what else a layer does (routing, scatter and gather of rows, launches) takes longer in the paper's runs than
here, which makes every gain in communication a smaller part of the whole.
"""

_SYNC = """
10 GB of FFN parameters and 384 to 1536 MB of attention on each GPU, one byte count for gradients and one for weights
(both BF16). The sizes are read as SP's, where each GPU has all of attention; TP has an eighth. Both send the same over
the network; SP adds what crosses NVLink. On an H800 that takes longer than the network part (equation 10 below 1), so it
is what the difference consists of. Published: 0.3 % to 3.1 %.
"""


# MoNTA


def _monta() -> str:
    eight = _table(
        ("strategy", "collective", "MB", "printed, ms", "ours: MB", "ms"),
        (
            (name, collective, f"{size:.0f}", latency, f"{ours:.0f}", f"{ms:.4f}")
            for name, collective, size, latency, ours, ms in table_8()
        ),
    )
    ranges = _table(
        ("all_gather and copy slow each other by", "launch cost, µs: table 8's volumes", "half of them"),
        (
            (f"{slowdown:.2f}", _ends(launch_range(slowdown)), _ends(launch_range(slowdown, 1 << 27)))
            for slowdown in (1.5, 1.55, 1.6, 1.65, 1.7, 1.75, 1.8, 1.85, 1.9)
        ),
    )
    return "\n\n".join(
        [
            "## MoNTA",
            "### Table 8",
            "From the plans' steps and the profile `monta-a800-2x8`, at a sequence of 8K:",
            eight,
            "### Its choice among O1, O2 and O3",
            _prose(
                _CHOICE.format(
                    constant=_needle(), slowdown=STATED.gather_beside_copy, launch=STATED.launch_us, loss=STATED.loss
                )
            ),
            ranges,
            _choices(),
            "![Where the choice is the paper's](pictures/papers-monta.svg)",
            _checked(),
        ]
    )


_CHOICE = """
The paper measures O1 as the best up to 16K, O2 from 32K to 128K and O3 at 256K (4 chunks, figure 14). By its own
equations O3 would never be slower than O2, nor O2 than O1. What it names as the reason: all_gather and the copy contend
for memory, launches cost a fixed time, hosts of different nodes are not aligned. With what sizes of these do our prices
choose alike?

- **A constant contention of all_gather and copy alone cannot do it.** O2 runs its copies behind the all_gathers, so such
  a contention never touches it, and it stays faster than O1 at every size. Nor can it turn O2 into O3 between 128K and
  256K. While a copy of d µs runs beside an all_gather it takes g·d, in which the all_gather does the work of g·d/f:
  hiding it loses g·(1 − 1/f)·d and saves d, and which of the two is larger does not depend on the size.

- **With a fixed cost as well it holds in a wide range.** A step of a pipeline that waits for a step of another resource
  pays a launch: the all_gather of each chunk, and its copy in O3, where it has a stream of its own; in O2 it follows on
  the same stream, and O1 is one stream. The table says between which launch costs all seven choices are the paper's.
  Stated, and used below: a slowdown of {slowdown:g} both ways and {launch:g} µs. What matters of the two slowdowns is
  g·(1 − 1/f), {loss:.2f} there.

- **Constant contention of all three resources could do it too**, with no launch cost at all: all_to_all with PXN also
  uses NVLink. The range is a needle, for instance {constant}. But then O3 at 256K would take 0.30 of the baseline, and
  the paper measured 0.253.
"""


def _needle() -> str:
    return (
        f"all_to_all {CONSTANT.exchange_beside_gather:g} times slower beside all_gather and "
        f"{CONSTANT.exchange_beside_copy:g} beside the copy, "
        f"all_gather {CONSTANT.gather_beside_exchange:g} and the copy {CONSTANT.copy_beside_exchange:g} beside all_to_all"
    )


def _ends(found: tuple[float, float] | None) -> str:
    return "none" if found is None else f"{found[0]:.0f} to {found[1]:.0f}"


def _choices() -> str:
    blank, stated = rows_of(Contention()), rows_of(STATED)
    rows = []
    for (sequence, free, by_equations), (_, times, chosen) in zip(blank, stated, strict=True):
        alone = " ".join(f"{free[each] / 1e3:.2f}" for each in (O1, O2, O3))
        ours = " ".join(f"{times[each] / 1e3:.2f}" for each in (O1, O2, O3))
        rows.append((f"{sequence}K", _NAMES[PAPER[sequence]], _NAMES[by_equations], alone, _NAMES[chosen], ours))
    head = ("sequence", "paper", "equations alone", "O1 O2 O3, ms", "with the stated contention", "O1 O2 O3, ms")
    return _table(head, rows)


def _checked() -> str:
    """What the stated contention says where the paper measured."""
    by_sequence = {
        what: {sequence: times for sequence, times, _ in rows_of(contention)}
        for what, contention in (("alone", Contention()), ("stated", STATED), ("constant", CONSTANT))
    }
    strategies = {"O1": O1, "O2": O2, "O3": O3}
    rows = []
    for (name, sequence), measured in MEASURED.items():
        cells = [
            f"{times[sequence][strategies[name]] / times[sequence][Strategy.FLAT]:.3f}"
            for times in by_sequence.values()
        ]
        rows.append((f"{name} over the baseline at {sequence}K", measured, *cells))
    head = ("", "measured by the paper", "equations alone", "with the stated contention", "constant, all three")
    text = (
        f"Volumes are table 8's, {TABLE_8_BYTES / 1e6:.0f} MB at 8K; b·s·h·2 bytes with b = 1 is half of that. "
        f"Efficiencies between and below the "
        "sizes that the paper prints are extrapolated as for any profile. That O1 at 8K is measured faster than its own "
        "equation says belongs to "
        "the baseline, which took longer than in table 8."
    )
    return _table(head, rows) + "\n\n" + _prose(text)
