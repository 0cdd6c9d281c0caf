"""NCCL's tuner tables: which algorithm and protocol NCCL takes for which sizes, from decisions.

A table of NCCL's example plugin (plugins/tuner/example, ``NCCL_TUNER_CONFIG_FILE``) and one of NCCLX's built-in tuner
(comms/ncclx/meta/tuner, ``NCCLX_TUNER_CONFIG_FILE``) have a row for each range of sizes. In both the first row that matches wins,
and where none does NCCL chooses as it always does. Sizes are nccl-tests' S in the first, and S over the ranks in the second.

What a plan is to NCCL. Both know five collectives, none of them all_to_all. ``flat`` is NCCL's own call: no row, so that NCCL
chooses. A two-level all_reduce (``hierarchical``, ``pipelined``) is its ``tree``, which sums inside each node and crosses the
network once for each; NCCL cuts it into chunks of its own. ``ring`` is its ``ring``, in NCCL's own order of nodes. No other plan
has a counterpart: two-level all_gathers and reduce_scatters (NCCL's ``pat`` has one rank on each node), leaders, messages from
everyone to everyone, other wire formats. Plans say nothing about protocols; rows of plans have ``simple``, whose bandwidth is the
highest.

The example plugin sets the number of channels to 1 before it looks for a row, which NCCL takes as it
is; only 0 leaves the number to NCCL (plugins/tuner/example/plugin.c of 2.28 to 2.30,
``pluginGetCollInfo``; src/enqueue.cc, ``ncclGetAlgoInfo``). The -1 that its README has for that leaves
the 1. So rows have 0, and :data:`ONE_CHANNEL` says what to change for calls without a row. NCCLX's
tuner leaves the number as NCCL has it where a row has -1 (``metaTunerGetCollInfo``), as its README
says. What may follow the ranks of a node is left out: there its versions have other columns, and
0 is the size of chunks in one, and a number of pipelined operations that no call has in another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from commlayer.profiles.counted import counted
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.decision import Decision
from commlayer.scheduler.plan import Strategy
from commlayer.scheduler.wire import NATIVE

__all__ = [
    "ONE_CHANNEL",
    "TUNED",
    "TunerRow",
    "nccl_table",
    "ncclx_table",
    "rows_of_decisions",
]

TUNED = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "broadcast": "broadcast",
}
"""Collectives that a tuner is asked about, and its names for them."""
ONE_CHANNEL = (
    "NCCL's example plugin gives calls without a row one channel: before building it, write 0 for the 1 "
    "in its line *nChannels = 1;"
)
"""The change without which the plugin makes calls slow that no row is about."""
_OF_PLANS = {
    ("all_reduce", Strategy.HIERARCHICAL): "tree",
    ("all_reduce", Strategy.PIPELINED): "tree",
    ("all_reduce", Strategy.RING): "ring",
    ("all_gather", Strategy.RING): "ring",
    ("reduce_scatter", Strategy.RING): "ring",
    ("broadcast", Strategy.RING): "ring",
}
_Way = tuple[str, str]
"""Algorithm and protocol."""
_LONGEST = 255
"""The example plugin reads a line of at most so many characters, and takes the rest for another one."""


class TunerRow(NamedTuple):
    """NCCL's choice from ``min_bytes`` to ``max_bytes`` (both included; nccl-tests' S) on so many nodes and ranks."""

    collective: str
    min_bytes: int
    max_bytes: int
    algorithm: str
    protocol: str
    num_nodes: int
    num_ranks: int

    def has(self, collective: str, nbytes: int) -> bool:
        """Whether the row is about a call of so many bytes."""
        return self.collective == collective and self.min_bytes <= nbytes <= self.max_bytes


def rows_of_decisions(decisions: Iterable[Decision]) -> tuple[list[TunerRow], list[str]]:
    """Make rows of what was decided at several sizes, and say what NCCL cannot be told.

    A decision holds up to the next size, the last one at its own only. Raises UsageError for a collective that no tuner knows.
    """
    rows: list[TunerRow] = []
    untold: list[str] = []
    ordered = sorted(
        decisions, key=lambda each: (each.traffic.collective, each.traffic.nodes, each.traffic.logical_bytes)
    )
    for (collective, nodes), group in groupby(ordered, key=lambda each: (each.traffic.collective, each.traffic.nodes)):
        _check(collective)
        found = list(group)
        choices: list[tuple[int, _Way | None]] = []
        for each in found:
            plan = each.plan
            algorithm = _OF_PLANS.get((collective, plan.strategy)) if plan.wire == NATIVE else None
            if algorithm is None and (plan.strategy is not Strategy.FLAT or plan.wire != NATIVE):
                untold.append(f"{collective} of {counted(each.traffic.logical_bytes, 'byte')} by {plan.name}")
            choices.append((each.traffic.logical_bytes, None if algorithm is None else (algorithm, "simple")))
        rows += _rows(collective, choices, len(nodes), sum(nodes))
    return rows, untold


def _check(collective: str) -> None:
    if collective not in TUNED:
        raise UsageError(
            f"NCCL's tuner is asked about {', '.join(TUNED)}, and never about {collective}: it has no table for it"
        )


def _rows(
    collective: str, choices: Sequence[tuple[int, _Way | None]], num_nodes: int, num_ranks: int
) -> list[TunerRow]:
    """Sizes in order with what is chosen at each; neighbours with one choice are one row."""
    rows = []
    place = 0
    for choice, group in groupby(choices, key=lambda each: each[1]):
        length = len(list(group))
        behind = place + length
        if choice is not None:
            last = choices[behind][0] - 1 if behind < len(choices) else choices[-1][0]
            rows.append(TunerRow(collective, choices[place][0], last, choice[0], choice[1], num_nodes, num_ranks))
        place = behind
    return rows


def nccl_table(rows: Iterable[TunerRow], comments: Sequence[str] = ()) -> str:
    """Write the file of NCCL's example plugin; NCCL chooses the number of channels, and rows are for
    any number of pipelined operations and any buffers."""
    header = "collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff"
    lines = [
        f"{TUNED[row.collective]},{row.min_bytes},{row.max_bytes},{row.algorithm},{row.protocol},0,{row.num_nodes},"
        f"{row.num_ranks},-1,-1"
        for row in rows
    ]
    return _text([header, *comments], lines)


def ncclx_table(rows: Iterable[TunerRow], comments: Sequence[str] = ()) -> str:
    """Write the CSV of NCCLX's tuner, whose sizes are of one rank: ranges without their end, so that neighbours never overlap.

    Raises UsageError for nodes that hold different numbers of ranks, which nLocalRanks cannot say.
    """
    lines = []
    for row in rows:
        if row.num_ranks % row.num_nodes:
            raise UsageError(f"NCCLX counts ranks of each node: {row.num_ranks} on {row.num_nodes} nodes are uneven")
        first, behind = row.min_bytes // row.num_ranks, -(-(row.max_bytes + 1) // row.num_ranks)
        where = f"{row.num_nodes},{row.num_ranks // row.num_nodes}"
        lines.append(f"{TUNED[row.collective]},[{first},{behind}),{row.algorithm},{row.protocol},-1,{where}")
    columns = "collective,bytesPerRank,algorithm,protocol,channels,nNodes,nLocalRanks"
    return _text([columns, *comments], lines)


def _text(comments: Sequence[str], lines: Sequence[str]) -> str:
    above = [f"# {' '.join(comment.split())}"[: _LONGEST - 1] for comment in comments]
    return "\n".join([*above, *lines]) + "\n"
