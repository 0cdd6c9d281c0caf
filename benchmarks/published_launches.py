"""Launches in the published runs: the numbers of mapping/host_launches.py, set by the rows, and held against
those of other models and sources.

They are three numbers: the exposed part of a launch where the host waits in every layer for counts of tokens, and where it
runs ahead, and how much longer both are on a Grace. Rows are those of Megatron-Core. Each model of a source is left out once,
and predicted by numbers that are fitted to the others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean

from papers_text import percent, prose, table
from published_predict import Outcome

from commlayer.scheduler.mapping import clusters
from commlayer.scheduler.mapping.hardware import GPUS
from commlayer.scheduler.mapping.result import StepEstimate

__all__ = ["section"]

_GRID = ((15.0, 20.0, 25.0, 30.0, 35.0), (8.0, 10.0, 12.0, 15.0, 18.0), (1.0, 1.25, 1.5, 2.0, 2.75))
"""The numbers that a fit chooses from: µs of a launch where the host waits, where it runs ahead, and the factor of a Grace."""
_TEXT = """
### Launches

Sources call runs like many of these bound by the host, which launches kernels one by one. For each launch of a layer that no
CUDA graph holds, a step is taken to be longer by {waits:g} µs where the host waits in every layer for how many tokens come
(calls of all_to_all without a capacity), by {ahead:g} µs where it does not, and by {grace:g} times as much on a Grace
(`scheduler/mapping/host_launches.py` says what is counted). No public number says these. They were set by hand, by the mean
error over the rows of Megatron-Core here, and do not have the least of it: without any it is {without}, with them {within},
and with {best}, which a fit takes of a grid ({grid}), {best_error}. Where a fit takes the end of the grid
(here {edge}), the best number may lie beyond it: the rows bound it from one side alone.

Each model of a source is left out once, and predicted by numbers that are fitted to the others: the mean error is {beyond}
then. Those fits take {chosen}. So the rows do not settle the numbers: that launches are exposed follows from them, how much only
roughly. With micro-batches of one sequence the error is {single_without} without launches, and {single} with the numbers in use.
Nothing is added for FSDP, whose rows show none of it, and MegaScale's own software is taken to run ahead.

Rejected: a layer that takes the longer of its launches and its kernels (19 % with the best of such numbers, before this was
built); launches of experts' products that cost less than others (no better); and PyTorch's own time for `nn.Linear` (13.48 µs
on a DGX H100's Xeon, 37.08 on a GB200's Grace: TransformerEngine#2053), which is a launch, not the part of it that is exposed.
Other sources say that launches matter, and that they are not all: of what the steps in NVIDIA's guide to DeepSeek-V3 on GB200
saved, 37 % is of those that concern the host alone; and CUDA graphs of attention and router shortened one Qwen3-30B's step on
16 H100 from 623 to 484 ms (TP2 PP2 EP4), and another's not at all (EP16: 41.36 s without, 42.00 s with; Megatron-Bridge,
docs/training/cuda-graphs.md and skills/nemo-mbridge-perf-cuda-graphs/card.yaml).

A host that waits cannot run ahead, and a pass takes at least {call:g} µs for each of its launching calls, of which all experts
of a rank are one. AWS's runs show it: of Qwen3-30B on 64 H100 a layer takes 17.7 ms with micro-batches of 1 and 20.5 with 4,
17.1 with merged passes, and 17.4 with 4 experts on a rank in place of 8. Of the rows of Megatron-Core above whose host
waits, one takes less on x86, at most 105 µs a call (Qwen3-235B on 256 B200, 26.04.01: it is predicted too slow by that), and the
next one 111; AWS's of Kimi-K2 and DeepSeek-V3 with micro-batches of 1 take 121 to 125: so the number is near the former.
On a Grace a call takes {grace_call:g} times as long, as one row allows (gpt-oss-120b on 64 GB200, micro-batch 1).
On p5 a call takes {p5:g} times as long, by one row (Qwen3-30B, EP32, all_to_all, micro-batch 1), whose
hosts are AMD's Milan; and exchanges of tokens over EFA take twice as long as nccl-tests' by the rows of Kimi-K2 and DeepSeek-V3
with micro-batches of 4. Rows that set the last three have no part in intervals.
"""


@dataclass(frozen=True, slots=True)
class _Row:
    """One row: its step without launches and as published, s; its launches on the step's way where the host waits for counts,
    and where it runs ahead."""

    group: tuple[str, str]
    single: bool
    grace: bool
    without_s: float
    published_s: float
    waited: float
    ahead: float

    def error(self, waits_us: float, ahead_us: float, grace: float) -> float:
        """The error of the predicted throughput with these numbers, without its sign."""
        host_s = (self.waited * waits_us + self.ahead * ahead_us) * (grace if self.grace else 1.0) * 1e-6
        return abs(self.published_s / (self.without_s + host_s) - 1)


def section(found: Sequence[Outcome]) -> str:
    """How well launches explain the rows."""
    rows = [
        _row(each, each.estimate)
        for each in found
        if each.estimate is not None and each.row.software == "megatron" and each.row.group != "later"
    ]
    own = GPUS["h100"].waited_launch_us, GPUS["h100"].exposed_launch_us, _grace_factor()
    groups: dict[tuple[str, str], list[_Row]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    beyond, lines, chosen = [], [], Counter[tuple[float, float, float]]()
    for group, left_out in sorted(groups.items()):
        choice = _fitted([row for row in rows if row.group != group])
        chosen[choice] += 1
        errors = [row.error(*choice) for row in left_out]
        beyond += errors
        each = (_mean(left_out, (0.0, 0.0, 1.0)), _mean(left_out, own), percent(mean(errors)))
        lines.append((*group, len(left_out), *each, _numbers(choice)))
    single, best = [row for row in rows if row.single], _fitted(rows)
    text = _TEXT.format(
        call=GPUS["h100"].call_launch_us,
        grace_call=GPUS["gb200"].call_launch_us / GPUS["h100"].call_launch_us,
        p5=clusters.load("aws-p5").gpu.call_launch_us / GPUS["h100"].call_launch_us,
        waits=own[0],
        ahead=own[1],
        grace=own[2],
        without=_mean(rows, (0.0, 0.0, 1.0)),
        grid="; ".join(_numbers(values) for values in _GRID),
        edge=_edges([best, *chosen]),
        best=_numbers(best),
        best_error=_mean(rows, best),
        within=_mean(rows, own),
        chosen="; ".join(f"{_numbers(choice)} in {times} of {len(groups)}" for choice, times in chosen.most_common()),
        beyond=percent(mean(beyond)),
        single_without=_mean(single, (0.0, 0.0, 1.0)),
        single=_mean(single, own),
    )
    head = ("source", "model", "rows", "without launches", "with", "fitted without these rows", "by µs, µs, factor")
    return prose(text) + "\n\n" + table(head, lines)


def _row(outcome: Outcome, estimate: StepEstimate) -> _Row:
    """Steps are linear in the exposed part of a launch, but for what else runs beside them."""
    gpu = GPUS[outcome.row.system]
    host_us = estimate.parts.get("host", 0.0) / (1 - estimate.bubble)
    waits = outcome.row.dispatcher == "nccl" and outcome.row.capacity is None and outcome.row.ep > 1
    grace = outcome.row.system.startswith("gb")
    launches = host_us / (gpu.waited_launch_us if waits else gpu.exposed_launch_us)
    return _Row(
        (outcome.row.source.split(",")[0], outcome.row.model),
        outcome.row.micro_batch == 1,
        grace,
        (estimate.step_us - host_us) * 1e-6,
        estimate.step_us * 1e-6 * outcome.predicted / outcome.published,
        launches if waits else 0.0,
        0.0 if waits else launches,
    )


def _grace_factor() -> float:
    return GPUS["gb200"].exposed_launch_us / GPUS["b200"].exposed_launch_us


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in values)


def _edges(choices: Sequence[tuple[float, float, float]]) -> str:
    """The numbers of ``choices`` that are an end of what the grid has for them."""
    ends = [
        {values[0], values[-1]} & set(column) for values, column in zip(_GRID, zip(*choices, strict=True), strict=True)
    ]
    units = (" µs where the host waits", " µs where it runs ahead", " for a Grace")
    words = [f"{number:g}{unit}" for numbers, unit in zip(ends, units, strict=True) for number in sorted(numbers)]
    return ", ".join(words) or "none"


def _fitted(rows: Sequence[_Row]) -> tuple[float, float, float]:
    return min(product(*_GRID), key=lambda choice: mean(row.error(*choice) for row in rows))


def _mean(rows: Sequence[_Row], choice: tuple[float, float, float]) -> str:
    return percent(mean(row.error(*choice) for row in rows))
