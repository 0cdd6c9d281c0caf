"""SimAI's workload: what one rank of a pipeline stage computes and sends in a step, as the text that its simulator reads.

Format: ``initialize_workload`` of astra-sim-alibabacloud/astra-sim/workload/Workload.cc, aliyun/SimAI. A line of the degrees, one
of the number of rows, then a row for each piece of a layer: its name, a dependency that is not used (-1), and for forward, for
the gradients of inputs and for those of weights the computation in ns, a collective and its bytes; at last the time of an update.
A simulation goes through all rows forward, then through all of them from the last to the first. So a layer is the rows of its
forward pass, then those of its backward pass from the last to the first, each with nothing in the other direction. All
micro-batches of a step are there, one behind the other, as AICB writes them; bubble and messages between stages follow from the
first line.

Bytes are nccl-tests' S. A row's collective runs when its computation has ended: what overlaps in an estimate does not here.
Forward and backward, a collective is among the tp ranks, or with ``_EP`` the ep ranks; for weights among dp, or ``_DP_EP`` edp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping.job import Setup
from commlayer.scheduler.mapping.offloading import KEPT
from commlayer.scheduler.mapping.parameters import stages
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.step_collectives import StepCollective, step_exchanges
from commlayer.scheduler.programs import Compute, Issue, Item
from commlayer.scheduler.rails import is_one_of_two

__all__ = ["simai_workload"]

_WORDS = {
    "all_reduce": "ALLREDUCE",
    "all_gather": "ALLGATHER",
    "reduce_scatter": "REDUCESCATTER",
    "all_to_all": "ALLTOALL",
    "all_to_all_v": "ALLTOALL",
}
_LAYERS = {"tp": "", "tp_cp": "", "model": "", "ep": "_EP", "etp_ep": "_EP"}
_WEIGHTS = {"dp": "", "dp_cp": "", "stage": "", "edp": "_DP_EP"}
_UPDATE_NS = 100
"""The time of an update as AICB writes it, whatever is updated: the optimizer has a row of its own."""
_MOST_ROWS = 1_000_000


class _Piece(NamedTuple):
    name: str
    us: float = 0.0
    collective: str = "NONE"
    nbytes: int = 0


def simai_workload(estimator: Estimator, setup: Setup) -> str:
    """The workload of the mapping: of a stage with the most layers, as SimAI has one for all.

    Raises:
        UsageError: what it has no word for (context parallelism, split experts, other schedules than 1F1B, offloading, tokens in
            two levels, data parallelism over tp ranks too, tied embeddings over stages); more than a million rows.
        GroupError: degrees that do not divide the batch.
    """
    job, software = estimator.job, estimator.software
    setup.check(job)
    refusals = {
        f"context parallelism, cp={setup.cp}": setup.cp > 1,
        f"split experts, etp={setup.etp}": setup.etp > 1,
        f"multi-token prediction, mtp={job.model.mtp_layers}": job.model.mtp_layers > 0,
        f"the schedule {setup.schedule}": setup.schedule != "1f1b",
        f"activations in the host's memory, offload={setup.offload}": setup.offload != KEPT,
        f"layers that send their own gradients, zero={setup.zero}": setup.zero > 1,
    }
    if reasons := [reason for reason, stands in refusals.items() if stands]:
        raise UsageError(f"SimAI's workload has no words for {', '.join(reasons)}")
    count = setup.micro_batches(job)
    stage = max(stages(job.model, setup.pipeline), key=lambda each: each.layers)
    exchanges = step_exchanges(job, setup, software, stage=stage.number)
    rows = [
        _weights_row(setup, each)
        for each in exchanges
        if each.place in ("gradients", "parameters")
        for _ in range(each.count)
    ]
    head_forward, head_backward, optimizer_us = estimator.ends_us(setup)
    rows.append(_row("optimizer", weights=_Piece("", optimizer_us)))
    layers = {is_moe: _layer_rows(estimator, setup, is_moe) for is_moe in set(stage.kinds)}
    passing = [row for is_moe in stage.kinds for row in layers[is_moe]]
    if stage.ends.head:
        passing.append(_row("head", _Piece("", head_forward), _Piece("", head_backward)))
    if len(rows) + count * len(passing) > _MOST_ROWS:
        raise UsageError(
            f"more than {_MOST_ROWS:,} rows: take a smaller batch, of which a step is made in the same way"
        )
    rows += passing * count
    return "\n".join([_first_line(estimator, setup, exchanges, count), str(len(rows)), *rows]) + "\n"


def _first_line(estimator: Estimator, setup: Setup, exchanges: Sequence[StepCollective], count: int) -> str:
    boundary = next((each.logical_bytes for each in exchanges if each.place == "boundary"), 0)
    numbers = {
        "model_parallel_NPU_group": setup.tp,
        "ep": setup.ep,
        "pp": setup.pp,
        "vpp": setup.vpp,
        "ga": count,
        "all_gpus": setup.gpus,
        "checkpoints": 0,
        "checkpoint_initiates": 0,
    }
    words = [f"{name}: {number}" for name, number in numbers.items()]
    if setup.pp > 1 and not boundary:
        size = estimator.job.sequence // setup.tp * setup.micro_batch * estimator.job.model.hidden
        boundary = size * estimator.software.activation_bytes
    return " ".join(["HYBRID_TRANSFORMER_FWD_IN_BCKWD", *words, f"pp_comm: {boundary}"])


def _layer_rows(estimator: Estimator, setup: Setup, is_moe: bool) -> list[str]:
    forward, backward = (list(_pieces(program)) for program in estimator.programs(setup, is_moe))
    kind = "moe" if is_moe else "dense"
    rows = [_row(f"{kind}_{each.name}", forward=each) for each in forward]
    return rows + [_row(f"{kind}_{each.name}_backward", inputs=each) for each in reversed(backward)]


def _pieces(program: Sequence[Item]) -> Iterator[_Piece]:
    """Computation and the call behind it; what is computed while nothing is issued goes together."""
    us, name = 0.0, ""
    for item in program:
        if isinstance(item, Compute):
            us, name = us + item.us, name or item.name
        elif isinstance(item, Issue):
            call, traffic = item.call, item.call.plan.traffic
            if is_one_of_two(call.plan):
                raise UsageError(
                    f"SimAI's workload has no words for {call.name} in two levels: take the dispatcher nccl"
                )
            word = _word(_LAYERS, traffic.collective, call.group, call.name)
            yield _Piece(call.name, us, word, traffic.logical_bytes)
            us, name = 0.0, ""
    if us:
        yield _Piece(name or "compute", us)


def _weights_row(setup: Setup, exchange: StepCollective) -> str:
    name, piece = exchange.name, _Piece("", 0.0, "", exchange.logical_bytes)
    if exchange.axis == "tp":  # copies of what tp does not split: its ranks are those of the other two directions
        return _row(name, inputs=piece._replace(collective=_word(_LAYERS, exchange.collective, "tp", name)))
    if exchange.axis == "stage" and setup.tp > 1:
        raise UsageError(
            f"SimAI's workload has no group of tp and dp ranks together, over which {name} goes: take the software megatron"
        )
    return _row(name, weights=piece._replace(collective=_word(_WEIGHTS, exchange.collective, exchange.axis, name)))


def _word(groups: dict[str, str], collective: str, axis: str, name: str) -> str:
    if collective not in _WORDS or axis not in groups:
        raise UsageError(f"SimAI's workload has no word for {name}, {collective} over {axis}")
    return _WORDS[collective] + groups[axis]


_NOTHING = _Piece("")


def _row(name: str, forward: _Piece = _NOTHING, inputs: _Piece = _NOTHING, weights: _Piece = _NOTHING) -> str:
    cells = [f"{max(1, round(1e3 * each.us))}\t{each.collective}\t{each.nbytes}" for each in (forward, inputs, weights)]
    return "\t".join([name.replace(" ", "_"), "-1", *cells, str(_UPDATE_NS)])
