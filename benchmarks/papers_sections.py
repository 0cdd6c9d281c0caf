"""The page's sections about MegaScale-MoE and MoNTA."""

from __future__ import annotations

from collections.abc import Sequence

from papers_data import MEGASCALE_GAIN
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
from papers_text import percent, prose, table

from commlayer.scheduler import Strategy

__all__ = ["megascale_section", "monta_section"]

_NAMES = {O1: "O1", O2: "O2", O3: "O3"}


def megascale_section(found: Sequence[Gain], kinds: Sequence[Kind], synchronised: Sequence[Synchronised]) -> str:
    crossing = table(
        ("k", *(str(each.top_k) for each in kinds)),
        (
            ("two all_to_all, µs", *(f"{each.all_to_all_us:.0f}" for each in kinds)),
            ("all_gather and reduce_scatter, µs", *(f"{each.all_gather_us:.0f}" for each in kinds)),
        ),
    )
    ratio = table(
        ("model", "R inside the node", "R over the network"),
        ((name, f"{inside:.2f}", f"{beyond:.2f}") for name, inside, beyond in ratios()),
    )
    published = " to ".join(map(percent, MEGASCALE_GAIN))
    return "\n\n".join(
        [
            "## MegaScale-MoE",
            "### SP+EP over TP+TP (figure 13)",
            prose(_GAIN.format(published=published)),
            _gains(found),
            "### Tokens gathered or exchanged (figure 7)",
            "Mixtral-8x7B's hidden size, 8192 tokens, eight H800, by the library's own calls; the paper: all_gather from "
            "k > 6.",
            crossing,
            "### Parameter synchronisation (figure 14)",
            prose(_SYNC),
            _synchronisation(synchronised),
            "### Compute over communication (equations 5 to 9)",
            "R of equation 8 on eight H800, in bytes and FLOPs: 200 GB/s inside a node, 50 GB/s over a card. Above 1 "
            "dispatch and combine can hide.",
            ratio,
        ]
    )


def _gains(found: Sequence[Gain]) -> str:
    return table(
        ("model", "layers", "TP+TP MFU", "SP+EP MFU", "gain", "off by a factor of"),
        (
            (
                each.model,
                each.layers,
                percent(each.tensor.mfu),
                percent(each.sequence_expert.mfu),
                percent(each.gain, signed=True),
                f"{each.factor:.2f}" if each.factor != 1 else "inside",
            )
            for each in found
        ),
    )


def _synchronisation(found: Sequence[Synchronised]) -> str:
    return table(
        ("groups", "attention MB", "FFN, ms", "TP, ms", "SP, ms", "SP by A.1's steps, ms", "difference", "eq. 10"),
        (
            (
                each.groups,
                each.megabytes,
                f"{each.ffn_us / 1e3:.1f}",
                f"{each.tensor_us / 1e3:.2f}",
                f"{each.sequence_us / 1e3:.2f}",
                f"{each.hierarchical_us / 1e3:.2f} ({each.plan})",
                percent(each.difference, signed=True),
                f"{each.inter_over_intra:.2f}",
            )
            for each in found
        ),
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


def monta_section() -> str:
    eight = table(
        ("strategy", "collective", "MB", "printed, ms", "ours: MB", "ms"),
        (
            (name, collective, f"{size:.0f}", latency, f"{ours:.0f}", f"{ms:.4f}")
            for name, collective, size, latency, ours, ms in table_8()
        ),
    )
    ranges = table(
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
            prose(
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
    return table(head, rows)


def _checked() -> str:
    """The prediction of the stated contention where the paper measured."""
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
    return table(head, rows) + "\n\n" + prose(text)
