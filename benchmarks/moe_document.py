"""The MoE benchmarks' result as a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moe_kinds import HIDDEN, NUM_EXPERTS, NUM_TOKENS
from moe_layer import LayerResult
from moe_tables import PHASES, HostRow, KindRow, LayerRow, Spread, table

__all__ = ["Found", "document"]

_MARGIN = 1.1
"""The dispatcher takes all_gather where it is predicted faster by more than a tenth; so much may the choice lose."""
_HOST_TARGET, _PLANNED_TARGET, _FOLDED_TARGET = 1.3, 0.75, 0.4


@dataclass
class Found:
    """The runs. ``sweeps``: seconds that a cluster's profile took. ``failed``: parts that broke off, and why."""

    host: list[HostRow] = field(default_factory=list)
    kinds: list[KindRow] = field(default_factory=list)
    layer: LayerResult | None = None
    sweeps: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def document(date: str, facts: Mapping[str, str], found: Found, pictures: Mapping[str, str]) -> str:
    """In Markdown; ``pictures``: file names by figure."""
    lines = [
        f"# MoE layer and dispatcher, emulated, {date}",
        "",
        "Made by `make bench-moe`. Emulated clusters on one machine: real processes and bytes, wires slowed to 400 Mbit/s a node",
        "and direction. All ranks share the machine's cores, so quote the ratios, not the times. What is compared ran",
        "alternately in one run, in a new order each round; brackets hold the quartiles over rounds. Before anything was timed,",
        "outputs and all gradients were compared with the plain layer's: *differs* is the largest difference over the largest",
        "value.",
        "",
        *(f"- {name}: {value}" for name, value in facts.items()),
    ]
    if found.sweeps:
        took = ", ".join(f"{name} in {seconds:.0f} s" for name, seconds in found.sweeps.items())
        lines.append(f"- planned by a profile measured right before: {took}")
    lines += [f"- **{part} broke off**: {why}" for part, why in found.failed.items()]
    if found.layer is not None:
        lines += ["", "## The layer", "", *_layer(found.layer, pictures)]
    if found.kinds:
        lines += ["", "## all_to_all, or all_gather and reduce_scatter", "", *_kinds(found.kinds, pictures)]
    if found.host:
        lines += ["", "## The dispatcher alone", "", *_host(found.host)]
    return "\n".join(lines) + "\n"


def _layer(result: LayerResult, pictures: Mapping[str, str]) -> list[str]:
    shape = result.shape
    lines = [
        f"2 nodes of 4 ranks; hidden {shape.hidden}, {shape.num_experts} experts, top-{shape.top_k}, {shape.num_tokens} tokens a",
        f"rank, FP32. At expert width {result.width} the experts alone take {result.experts_ms:.0f} ms forward and backward, and",
        f"four all_to_alls alone {result.exchange_ms:.0f} ms (calibrated at the start of the run). Plain: Megatron's order on",
        "Gloo, nothing planned, nothing overlapped. Planned: dispatch and chunks auto. The other ways have theirs forced.",
        "Predicted: exchanges and experts, without permutes. Cores: what all processes computed, over the machine's cores: the",
        "least that it can take here, however well it overlaps. Ratio: over plain with EP 8 at the same width.",
        "",
        *_targets(result.rows),
        "",
        *_rows(result.rows),
        "",
        "EP inside a node keeps every expert twice (EDP 2). A training step then averages the experts' gradients over the nodes",
        f"once, however many layers' passes it accumulates: {result.gradients_ms:.0f} ms at this width, not in the times above.",
        "",
        "Where the time goes, ms, the mean over ranks. Dispatch and combine are what is not hidden behind computing: posting,",
        "and waiting for rows and for slower ranks. Permute includes the exchange of counts and the weighted sum.",
        "",
        *table(
            ["way", "mapping", *PHASES, "total"],
            [
                [each.way, each.mapping, *(f"{each.phases_ms[name]:.0f}" for name in PHASES), f"{each.total_ms:.0f}"]
                for each in result.breakdowns
            ],
        ),
    ]
    return lines + [f"\n![{name}]({pictures[name]})" for name in ("layer", "breakdown") if name in pictures]


def _rows(rows: Sequence[LayerRow]) -> list[str]:
    head = [
        "width",
        "way",
        "mapping",
        "chosen",
        "predicted",
        "time, ms",
        "forward, ms",
        "cores, ms",
        "ratio",
        "rounds",
        "differs",
    ]
    cells = []
    for row in rows:
        start = [str(row.width), row.way, row.mapping, row.chosen]
        if row.time_ms is None or row.ratio is None:
            cells.append([*start, "", f"not run: {row.why_not}", *[""] * 5])
            continue
        predicted = "" if row.predicted_ms is None else f"{row.predicted_ms:.0f}"
        forward = "" if row.forward_ms is None else f"{row.forward_ms:.0f}"
        cores = "" if row.cores_ms is None else f"{row.cores_ms:.0f}"
        cells.append(
            [*start, predicted, _ms(row.time_ms), forward, cores, str(row.ratio), str(row.rounds), row.checked]
        )
    return table(head, cells)


def _targets(rows: Sequence[LayerRow]) -> list[str]:
    """Said for each width: planned over plain, and EP inside the node over EP across."""
    lines = []
    for width in dict.fromkeys(row.width for row in rows):
        times = {(row.way, row.mapping): row.time_ms for row in rows if row.width == width and row.time_ms is not None}
        planned = next(r.ratio for r in rows if (r.width, r.way, r.mapping) == (width, "planned", "EP 8"))
        assert planned is not None  # it always runs
        line = f"- width {width}: planned / plain, EP 8: {planned.middle:.3f} ({_met(planned.middle, _PLANNED_TARGET)})"
        for way in ("planned", "plain"):
            inside, across = times[way, "EP 4"], times[way, "EP 8"]
            ratio = inside.middle / across.middle
            line += f"; {way} EP 4 / {way} EP 8: {ratio:.3f} ({_met(ratio, _FOLDED_TARGET)})"
        lines.append(line)
    return lines


def _met(value: float, target: float) -> str:
    return f"target {target:g}: {'met' if value <= target else 'missed'}"


def _kinds(rows: Sequence[KindRow], pictures: Mapping[str, str]) -> list[str]:
    lines = [
        f"One node, {NUM_TOKENS} tokens a rank of hidden {HIDDEN}, FP32, {NUM_EXPERTS} experts that do nothing. Predicted:",
        "dispatch, combine and their gradients, with what is moved in memory; not the exchange of counts, which both have.",
        "Chosen / faster: the chosen one's time, forward and backward, over the better one's; the dispatcher leaves all_to_all",
        f"only for a tenth, so {_MARGIN:g} is as promised.",
        "",
        f"- chosen within the margin: {sum(row.loss <= _MARGIN for row in rows)} of {len(rows)}",
        "",
    ]
    head = ["ranks", "k", "predicted a2a", "predicted ag+rs", "a2a, ms", "ag+rs, ms", "forward", "forward"]
    cells = []
    for row in rows:
        predicted = [
            f"{row.predicted_ms[kind]:.1f}" if row.predicted_ms else "" for kind in ("all_to_all", "all_gather")
        ]
        both = [_ms(row.both_ms[kind], 1) for kind in ("all_to_all", "all_gather")]
        forward = [f"{row.forward_ms[kind].middle:.1f}" for kind in ("all_to_all", "all_gather")]
        start = [str(row.ranks), str(row.top_k), *predicted, *both, *forward]
        cells.append([*start, row.chosen, f"{row.loss:.2f}", str(row.rounds), row.checked])
    lines += table([*head, "chosen", "chosen / faster", "rounds", "differs"], cells)
    return lines + ([f"\n![kinds]({pictures['kinds']})"] if "kinds" in pictures else [])


def _host(rows: Sequence[HostRow]) -> list[str]:
    cells = [
        [
            row.what,
            _ms(row.bare_ms, 2),
            _ms(row.ours_ms, 2),
            str(row.ratio),
            _met(row.ratio.middle, _HOST_TARGET),
        ]
        for row in rows
    ]
    head = ["what", "index_select, index_add, ms", "dispatcher, ms", "ratio", ""]
    return [
        "One rank, 4096 tokens of hidden 1024, FP32, top-2 of 8 experts, one thread, nothing sent: dispatch and combine with",
        f"gating weights. {rows[0].rounds} rounds.",
        "",
        *table(head, cells),
    ]


def _ms(value: Spread, digits: int = 0) -> str:
    return f"{value.middle:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"
