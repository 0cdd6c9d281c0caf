"""Measurements of the work on one rank at the first call: the experts, and rows that are moved in
memory.

All ranks measure at the same time, as they will work, so that what they share (cores, memory) is
shared here too. These times are prices that no profile has; what doubts a price is
:mod:`commlayer.scheduler.experience`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import torch

from commlayer.device_time import await_device
from commlayer.integrations.moe.dispatch_groups import ExpertGrid
from commlayer.integrations.moe.experts import GroupedExperts
from commlayer.integrations.moe.handle import Experts
from commlayer.integrations.moe.levels import Levels, RowsOnLevel, TwoLevelWay, two_level_way
from commlayer.integrations.moe.row_maps import RowMap, combine_rows, gather_rows, make_row_map, spread_rows
from commlayer.integrations.shares import even_rows
from commlayer.profiles.errors import DisagreementError
from commlayer.scheduler.overlap import ExpertTimes
from commlayer.scheduler.placement.placement_price import ExpertWork

__all__ = ["Measurements", "MoveShape", "MoveTimes", "measure_experts", "measure_moves", "work_of_experts"]

_FEWEST_TOKENS, _MOST_BYTES = 512, 64 << 20
_REPEATS = 5
_FEWEST_ROWS, _TRUST = 64, 2
"""Experts are measured on as many rows at least; and all anew where a call has this many times more
than were measured."""
_PARTS = (8, 2, 1)
"""The divisors of a call's rows: the fractions 1/8, 1/2 and all are timed."""
_PRICED_ROWS = 1024
"""The most rows on which experts are measured for prices: as many as their times grow in proportion
from, on most devices."""


@dataclass(frozen=True, slots=True)
class MoveShape:
    """The parameters on which the time of moving a row depends: ``top_k`` choices of
    ``num_experts``, of which each of ``ranks`` has ``num_local``. ``is_sorted``: what arrives has
    to be sorted by expert. ``needs_gradient``: it goes back through all. ``nodes``: the ranks on
    each, where tokens may go in two levels.
    """

    ranks: int
    top_k: int
    num_experts: int
    num_local: int
    is_sorted: bool
    needs_gradient: bool
    nodes: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, grid: ExpertGrid, top_k: int, needs_gradient: bool) -> MoveShape:
        """Make that of calls over ``grid``."""
        most = max(grid.experts)
        nodes = () if grid.levels is None else grid.levels.nodes
        return cls(grid.all.size, top_k, grid.num_experts, most, most * grid.etp.size > 1, needs_gradient, nodes)


@dataclass(frozen=True, slots=True)
class MoveTimes:
    """µs that each kind takes in memory: all_to_all for a row that a rank sends, all_gather for a
    token of any rank, two_level for a row on a rail, inside a node, or of an expert; measured with
    ``tokens`` of all ranks."""

    row_us: float
    token_us: float
    tokens: int
    level_us: float = 0.0


class Measurements:
    """The measurements on which all ranks of a grid agree. Each method is collective where
    something is to be measured: all ranks ask with the same numbers, and so find alike whether it
    is.
    """

    def __init__(self, grid: ExpertGrid) -> None:
        self._grid = grid
        self._experts: dict[tuple[Any, ...], ExpertTimes] = {}

    @property
    def num_local_experts(self) -> float:
        """How many experts a rank has: the median, of which the measured times are. Not this
        rank's, as others may have one more, and all must find the same."""
        return median(self._grid.experts)

    def moves(self, like: torch.Tensor, tokens: int, shape: MoveShape) -> MoveTimes:
        """Return the times of moving rows, for ``tokens`` of all ranks such as ``like``; shared by
        all layers on the same group, and measured anew for calls of more than twice as many tokens.
        Raises as :meth:`experts`.
        """
        owner: object = self._grid.all.group or self._grid.all
        shared = _moves_of_group.setdefault(owner, {})
        key = (shape, *_kind_of(like))
        # Few tokens would make a row look dear; more than 64 MiB add nothing.
        most = max(_MOST_BYTES // max(1, like.shape[1] * like.element_size()), 1)
        wanted = min(max(tokens, _FEWEST_TOKENS), most)
        if key not in shared or wanted > _TRUST * shared[key].tokens:
            count = 3 if shape.nodes else 2
            times = self._agreed("rows cost in memory", count, lambda: measure_moves(like, wanted, shape))
            shared[key] = MoveTimes(times[0], times[1], wanted, *times[2:])
        return shared[key]

    def moves_in_training(self, like: torch.Tensor, tokens: int, top_k: int) -> MoveTimes:
        """Return those of calls that have a gradient; see :meth:`moves`."""
        return self.moves(like, tokens, MoveShape.of(self._grid, top_k, needs_gradient=True))

    def experts(self, experts: Experts, most_rows: int, like: torch.Tensor) -> ExpertTimes:
        """Return the times of experts, for up to ``most_rows`` rows on a rank; measured anew for
        more than twice as many.

        Raises what measuring raises on this rank; DisagreementError where it failed on another.
        """
        known = self._experts.get(_kind_of(like))
        if known is None or most_rows > _TRUST * known.rows[-1]:
            most = max(most_rows, _FEWEST_ROWS)
            sizes = sorted({max(most // part, 1) for part in _PARTS})
            count = self._grid.num_local_experts
            times = self._agreed("its experts take", len(sizes), lambda: measure_experts(experts, count, like, sizes))
            known = self._experts[_kind_of(like)] = ExpertTimes(tuple(sizes), times)
        return known

    def _agreed(self, what: str, count: int, measure: Callable[[], Sequence[float]]) -> tuple[float, ...]:
        """The medians over all ranks."""
        group, error = self._grid.all, None
        try:
            times = list(measure())
        except Exception as caught:  # noqa: BLE001  the others must hear of it before it is raised, or they wait for this rank
            error, times = caught, [float("nan")] * count
        everyone = group.all_gather(torch.tensor([times], dtype=torch.float64))
        if error is not None:
            raise error
        failed = everyone.isnan().any(1).nonzero().flatten().tolist()
        if failed:
            raise DisagreementError(
                f"rank {group.ranks[group.rank]}: rank {group.ranks[failed[0]]} failed while it measured what {what}: "
                "look at its log"
            )
        return tuple(median(column.tolist()) for column in everyone.unbind(1))


def work_of_experts(
    experts: GroupedExperts,
    measured: Measurements,
    top_k: int,
    tokens: int = 0,
    *,
    state_bytes: int = 0,
    micro_batches: int = 1,
) -> ExpertWork:
    """Find what one of a rank's experts costs, for prices of placements. Collective: see
    :meth:`Measurements.experts`.

    ``tokens``: of all ranks in a call, each with ``top_k`` choices, by which rows are moved in
    memory to be timed; 0: as many as were before. ``state_bytes``: of an optimizer, which go with
    an expert.
    """
    like = experts.w_gate.new_empty(0, experts.hidden)
    times = measured.experts(experts, _PRICED_ROWS, like)
    moves = measured.moves_in_training(like, tokens, top_k)
    row_us = max(0.0, (times.times_us[-1] - times.times_us[0]) / max(1, times.rows[-1] - times.rows[0]))
    weight_bytes = sum(parameter.nbytes for parameter in experts.parameters()) // experts.count
    return ExpertWork(
        row_bytes=experts.hidden * experts.w_gate.element_size(),
        row_us=row_us,
        expert_us=max(0.0, times.times_us[0] - row_us * times.rows[0]) / measured.num_local_experts,
        weight_bytes=weight_bytes,
        gradient_bytes=weight_bytes,
        state_bytes=state_bytes,
        micro_batches=micro_batches,
        puts_off=experts.w_gate.is_cpu,  # a GPU's grouped products make gradients of rows and weights together
        move_us=moves.row_us,
        level_move_us=moves.level_us,
    )


_moves_of_group: WeakKeyDictionary[Any, dict[tuple[Any, ...], MoveTimes]] = WeakKeyDictionary()


def _kind_of(like: torch.Tensor) -> tuple[Any, ...]:
    return like.shape[1], like.dtype, like.device.type


def measure_moves(like: torch.Tensor, tokens: int, shape: MoveShape) -> tuple[float, ...]:
    """Time what a call of ``shape`` does beside the exchanges, done with ``tokens`` of all ranks
    such as ``like`` [T, H], whose choices are spread evenly: µs for a row that is exchanged, for a
    token that is gathered, and, where there are two levels, for a row of any; medians.

    Buffers are made as the call makes them: pages of new memory may cost more than what is written
    there.
    """
    own = max(1, tokens // shape.ranks)
    choices = torch.arange(own * shape.ranks * shape.top_k, device=like.device) % shape.num_experts
    choices = choices.view(own * shape.ranks, shape.top_k)
    sent = make_row_map(choices[:own], shape.num_experts)
    local = torch.where(choices < shape.num_local, choices, -1).sort(1, descending=True).values
    here = make_row_map(local[:, : max(1, int((local >= 0).sum(1).max()))], shape.num_local)
    with torch.no_grad():
        exchanged_us = median(_time_us(lambda: _exchange(like, sent, shape), like) for _ in range(_REPEATS))
        gathered_us = median(_time_us(lambda: _gather(like, here, own, shape), like) for _ in range(_REPEATS))
        times = exchanged_us / max(1, own * shape.top_k), gathered_us / (own * shape.ranks)
        if not shape.nodes:
            return times
        # In two levels choices are drawn: neighbouring experts share a rank.
        levels = Levels(shape.nodes, 0, even_rows(shape.num_experts, shape.ranks))
        drawn = torch.rand(own * shape.ranks, shape.num_experts, generator=torch.Generator().manual_seed(0))
        choices = drawn.topk(shape.top_k).indices.to(like.device)
        reached = torch.stack([levels.reached(part) for part in choices.split(own)]).cpu()
        sizes = RowsOnLevel.of_call(levels, reached)
        way, rows = two_level_way(levels, choices, [own] * shape.ranks, sizes, None)
        counted = sum(each.token_of_row.shape[0] for each in (way.rails, way.inside, rows))
        passed_on_us = median(_time_us(lambda: _pass_on(like, way, rows, shape), like) for _ in range(_REPEATS))
    return *times, passed_on_us / max(1, counted)


def _pass_on(like: torch.Tensor, way: TwoLevelWay, rows: RowMap, shape: MoveShape) -> torch.Tensor:
    """The moves of two_level; what would arrive is copied."""
    maps = way.rails, way.inside
    out = like.new_ones(way.rails.row_of_choice.shape[0], like.shape[1])
    arrived = _out(out, maps, rows)
    weights, gathered = _weights(like, *rows.row_of_choice.shape), gather_rows(arrived, rows)
    out = _home(combine_rows(gathered, weights, rows), maps)
    if not shape.needs_gradient:
        return out
    of_rows, _ = spread_rows(_out(out, maps, rows), gathered, weights, rows, of_rows=True)
    assert of_rows is not None  # asked for
    return _home(combine_rows(of_rows, None, rows), maps)


def _out(x: torch.Tensor, maps: tuple[RowMap, RowMap], rows: RowMap) -> torch.Tensor:
    """Tokens, out on two levels; as many arrive as the last map has."""
    for each in maps:
        gather_rows(x, each)
        arrives = maps[1] if each is maps[0] else rows
        x = x.new_ones(arrives.row_of_choice.shape[0], x.shape[1])
    return x


def _home(x: torch.Tensor, maps: tuple[RowMap, RowMap]) -> torch.Tensor:
    """Sums, home on two levels."""
    for each in reversed(maps):
        x = combine_rows(x.new_ones(each.token_of_row.shape[0], x.shape[1]), None, each)
    return x


def _exchange(like: torch.Tensor, rows: RowMap, shape: MoveShape) -> torch.Tensor:
    """The moves of all_to_all; what would arrive is copied."""
    tokens, top_k = rows.row_of_choice.shape
    weights, x = _weights(like, tokens, top_k), like.new_ones(tokens, like.shape[1])
    back = _there_and_back(gather_rows(x, rows), shape)
    out = combine_rows(back, weights, rows)
    if not shape.needs_gradient:
        return out
    of_rows, _ = spread_rows(out, back, weights, rows, of_rows=True)
    assert of_rows is not None  # asked for
    return combine_rows(_there_and_back(of_rows, shape), None, rows)


def _weights(like: torch.Tensor, tokens: int, top_k: int) -> torch.Tensor:
    """The weights as the router makes them: in FP32 at least."""
    return like.new_ones(tokens, top_k, dtype=torch.promote_types(like.dtype, torch.float32))


def _there_and_back(rows: torch.Tensor, shape: MoveShape) -> torch.Tensor:
    arrived = rows.clone()
    if shape.is_sorted:
        order = torch.arange(arrived.shape[0] - 1, -1, -1, device=rows.device)
        arrived = arrived.index_select(0, order).index_select(0, order)
    return arrived.clone()


def _gather(like: torch.Tensor, rows: RowMap, own: int, shape: MoveShape) -> torch.Tensor:
    """The moves of all_gather; what would arrive is written."""
    tokens, top_k = rows.row_of_choice.shape
    weights, x = _weights(like, tokens, top_k), like.new_ones(tokens, like.shape[1])
    gathered = gather_rows(x, rows)
    summed = combine_rows(gathered, weights, rows)
    if not shape.needs_gradient:
        return summed[:own].clone()
    of_rows, _ = spread_rows(torch.ones_like(summed), gathered, weights, rows, of_rows=True)
    assert of_rows is not None  # asked for
    return combine_rows(of_rows, None, rows)[:own].clone()


def measure_experts(experts: Experts, num_experts: int, like: torch.Tensor, sizes: Sequence[int]) -> list[float]:
    """Time a forward pass, in µs, of ``experts`` on each number of rows, spread evenly over them;
    the median of five."""
    times = []
    # Dropout in the experts must draw, in a recomputation of the forward pass, what it drew there.
    with torch.no_grad(), torch.random.fork_rng(devices=[like.device] if like.is_cuda else []):
        for size in sizes:
            rows = like.new_zeros(size, like.shape[1])
            counts = [size // num_experts + (expert < size % num_experts) for expert in range(num_experts)]
            times.append(median(_time_us(lambda: experts(rows, counts, None), rows) for _ in range(_REPEATS)))  # noqa: B023
    return times


def _time_us(call: Callable[[], torch.Tensor], like: torch.Tensor) -> float:
    """The time that ``call`` takes on the device of ``like``."""
    synchronize = partial(torch.cuda.synchronize, like.device) if like.is_cuda else await_device
    synchronize()
    started = time.perf_counter()
    call()
    synchronize()
    return (time.perf_counter() - started) * 1e6
