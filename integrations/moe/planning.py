"""The plan of a dispatch: whether tokens go to their experts by all_to_all, in two levels or by
all_gather, and in how many chunks.

Decided on every rank alike, from the exchanged counts, the profile's curves and the experts' own
times, which are measured at the first call and agreed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commlayer.collectives import GroupCommunicator
from commlayer.device_time import device_time
from commlayer.integrations.moe.agreement import FINEST
from commlayer.integrations.moe.dispatch_groups import ExpertGrid, WireGroups
from commlayer.integrations.moe.experts import GroupedExperts
from commlayer.integrations.moe.handle import ChoiceCounts, Experts
from commlayer.integrations.moe.levels import RowsOnLevel
from commlayer.integrations.moe.measuring import Measurements, MoveShape
from commlayer.integrations.shares import even_rows
from commlayer.integrations.wire_choice import DispatchWire
from commlayer.profiles.errors import UsageError
from commlayer.profiles.links import Resource
from commlayer.scheduler.dispatch_price import (
    INDEX_BYTES,
    WEIGHT_BYTES,
    dispatch_us,
    flat_us,
    is_worth_it,
    packed_index_bytes,
    two_level_us,
)
from commlayer.scheduler.kept import Kept
from commlayer.scheduler.overlap import choose_slices
from commlayer.scheduler.plan import Span
from commlayer.scheduler.traffic import Traffic

__all__ = ["DispatchDecision", "DispatchPlanner", "is_sharded", "puts_off", "slices_of"]

RowsOf = tuple[int, torch.dtype]
_WHOLE = (FINEST,)
_MOST_KEPT = 256


@dataclass(frozen=True, slots=True)
class DispatchDecision:
    """The choice that was made for one call, and its reason.

    ``slices``: eighths of the tokens in each chunk. ``kinds_us``: what each kind is predicted to
    take, out and back, and where there is a gradient its way too; ``slices_us``: what each is, with
    the experts, forward and backward. Empty where there was nothing to choose or to predict from.
    """

    kind: str
    slices: tuple[int, ...]
    kinds_us: dict[str, float]
    slices_us: dict[tuple[int, ...], float]
    reason: str

    @property
    def chunks(self) -> int:
        return len(self.slices)

    @property
    def name(self) -> str:
        """The decision's name, such as ``all_to_all × 4 (1:3:3:1)``."""
        shares = "" if len(set(self.slices)) == 1 else f" ({':'.join(map(str, self.slices))})"
        return f"{self.kind} × {self.chunks}{shares}"

    @property
    def predicted_us(self) -> float | None:
        """The predicted time of exchanges and experts, forward and backward."""
        return self.slices_us.get(self.slices)


class _GroupTimes:
    """The predicted times of the groups of a grid, on all of its ranks alike.

    Attributes:
        neighbours: how many groups share a node with each rank's EP group, and with its ETP group.
    """

    def __init__(self, grid: ExpertGrid, ways: WireGroups) -> None:
        self._grid, self._ways = grid, ways
        self.neighbours: tuple[tuple[int, int], ...] = ((0, 0),) * grid.all.size
        self._shapes: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] | None = None
        # A group's prediction takes 2 µs here, and 30 µs where the planner has it: one simulation
        # of slices asks for some sixty, of which six differ.
        self._slowest = Kept[tuple[Any, ...], float | None](_MOST_KEPT)

    def levels_us(self, on_levels: tuple[RowsOnLevel, RowsOnLevel], like: torch.Tensor) -> float | None:
        """One way in two levels: over the rails, and inside the nodes, of rows that all ranks know
        how many there are."""
        grid, row_bytes = self._grid, _row_bytes(like)
        times = _all_known(
            grid.ep.predicted_us("all_to_all_v", _rounded(rows.whole * row_bytes, 6), over=span)
            for rows, span in zip(on_levels, (Span.RAIL, Span.NODE), strict=True)
        )
        if times is None:
            return None
        wire = self.exchange_us(on_levels[0].whole * row_bytes, _rows_of(like))
        is_encoded = self._ways.out.has_wire or self._ways.home.has_wire
        return times[1] + (times[0] if wire is None or not is_encoded else min(times[0], wire))

    def exchange_us(self, size: float, rows_of: RowsOf | None) -> float | None:
        """The mean of the ways out and home, which may differ in their wire formats."""
        ways = dict.fromkeys((self._ways.out, self._ways.home))
        times = _all_known(self.slowest_us(way, 0, "all_to_all_v", round(size), rows_of) for way in ways)
        return None if times is None else sum(times) / len(times)

    def slowest_us(
        self, group: GroupCommunicator, axis: int, collective: str, num_bytes: int, rows_of: RowsOf | None = None
    ) -> float | None:
        """Predict the time of a call in the slowest group of this axis (0: EP, 1: ETP) of the grid, µs.

        Groups may lie differently on the nodes, and have other neighbours; all ranks must find the
        same time.
        """
        if group.size == 1:
            return 0.0
        size = _rounded(num_bytes, 6)
        key = (group, axis, collective, size, rows_of, self.neighbours)
        if key in self._slowest:
            return self._slowest[key]
        siblings_of = [each[axis] for each in self.neighbours]
        kinds = sorted(set(zip(self.everyones_shapes()[axis], siblings_of, strict=True)))
        times = _all_known(
            group.predicted_us(collective, size, shape, siblings=siblings, rows_of=rows_of) for shape, siblings in kinds
        )
        return self._slowest.add(key, None if times is None else max(times))

    def everyones_shapes(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """How the EP and ETP group of each rank of the grid lie on nodes; collective at the first
        call."""
        if self._shapes is not None:
            return self._shapes
        grid, shapes = self._grid, []
        for group in (grid.ep, grid.etp):
            own = torch.zeros(1, group.size, dtype=torch.int64)
            own[0, : len(group.shape)] = torch.tensor(group.shape)
            everyone = grid.all.all_gather(own).tolist()
            shapes.append([tuple(count for count in shape if count) for shape in everyone])
        self._shapes = shapes[0], shapes[1]
        return self._shapes


class DispatchPlanner:
    """Decides for one dispatcher. ``kind``: what the user fixed, or ``auto``. ``slices``: what the
    user fixed; None: auto.

    How each collective goes the group's own plans say; what they are predicted to take is asked of
    them (:meth:`GroupCommunicator.predicted_us`). What is decided here is which collectives a call
    makes at all, and of how many tokens each. Counts differ from step to step, so answers are kept
    under rounded ones: a cache of exact sizes, such as the planner's, would not know them again.
    """

    def __init__(
        self, grid: ExpertGrid, kind: str, slices: tuple[int, ...] | None, ways: WireGroups | None = None
    ) -> None:
        self._grid, self._kind, self._slices = grid, kind, slices
        self._ways = ways or WireGroups(grid.ep, grid.all, DispatchWire())
        self._measured = Measurements(grid)
        self._times = _GroupTimes(grid, self._ways)
        # Each of these saves something that the next one, and those of groups' times, do not. Times
        # are of one core. A whole decision: it takes 10 µs to know it again. In two levels its key
        # has more counts, so that of 150 steps of drifting routing it knew 87.
        self._decided = Kept[tuple[Any, ...], DispatchDecision](_MOST_KEPT)
        # Slices depend on fewer counts: of the other 63 steps it knew 54. Simulating them takes 1.3
        # ms.
        self._sliced = Kept[tuple[Any, ...], tuple[tuple[int, ...], dict[tuple[int, ...], float]]](_MOST_KEPT)

    def decide(self, layout: ChoiceCounts, like: torch.Tensor | None, experts: Experts | None) -> DispatchDecision:
        """One decision for calls of about the same counts, within a sixteenth. ``like`` [T, H]: the
        tokens.

        Collective where something is to be measured: with the first call, and where there is more
        to do by far.
        """
        sizes = [sum(layout.tokens), layout.most_rows, layout.most_expert_rows]
        if layout.on_levels is not None:
            sizes += [layout.most_rows_of_nodes, *(rows.crossing for rows in layout.on_levels)]
        of_tokens = None if like is None else (like.shape[1], like.dtype, like.is_cuda)
        of_call = (
            layout.indices.shape[1],
            layout.capacity,
            layout.needs_gradient,
            experts is None,
            is_sharded(experts),
            puts_off(experts, like),
        )
        self._times.neighbours = neighbours = layout.neighbours or ((0, 0),) * self._grid.all.size
        siblings = tuple(group.siblings for group in (self._ways.all_out, self._ways.all_home))
        key = (*map(_rounded, sizes), of_tokens, *of_call, neighbours, siblings)  # agreed on by all ranks
        known = self._decided.get(key)
        return self._decided.add(key, self._decide(layout, like, experts)) if known is None else known

    def _decide(self, layout: ChoiceCounts, like: torch.Tensor | None, experts: Experts | None) -> DispatchDecision:
        kind, kinds_us, why = self._choose_kind(layout, like)
        is_free = kind == "two_level" and self._kind == "auto" and self._slices is None
        if is_free and like is not None and experts is not None and not self._why_one_chunk(layout, like, experts):
            # A flat dispatch in chunks may hide more of itself behind the experts than two levels
            # save, whose tokens go at once.
            slices, slices_us = self._choose_slices(layout, like, experts)
            passes = 1 if layout.needs_gradient else 2  # slices are of both ways
            two_us = slices_us[_WHOLE] - passes * (kinds_us["all_to_all"] - kinds_us["two_level"])
            if two_us > slices_us[slices]:
                why = f"all_to_all: in chunks with the experts predicted {slices_us[slices]:.0f} µs, two_level {two_us:.0f}"
                return DispatchDecision("all_to_all", slices, kinds_us, slices_us, why)
        if layout.capacity is not None and self._slices not in (None, _WHOLE):
            raise UsageError("rows padded to a capacity go in one chunk: leave chunks out")
        if kind != "all_to_all" or layout.capacity is not None:
            return DispatchDecision(kind, _WHOLE, kinds_us, {}, why)
        if self._slices is not None:
            return DispatchDecision(kind, self._slices, kinds_us, {}, f"{why}; chunks as asked for")
        why_one = self._why_one_chunk(layout, like, experts)
        if why_one is not None or like is None or experts is None:
            return DispatchDecision(kind, _WHOLE, kinds_us, {}, f"{why}; one chunk: {why_one}")
        slices, slices_us = self._choose_slices(layout, like, experts)
        return DispatchDecision(kind, slices, kinds_us, slices_us, f"{why}; chunks by the experts' times")

    def _why_one_chunk(self, layout: ChoiceCounts, like: torch.Tensor | None, experts: Experts | None) -> str | None:
        """Why there is nothing to choose; None where there is."""
        if self._grid.ep.size == 1 or like is None or experts is None:
            return "nothing to overlap"
        if is_sharded(experts):
            return "each would gather the experts' shards anew"
        if self._times.exchange_us(layout.most_rows * _row_bytes(like), _rows_of(like)) is None:
            return "no profile of this group"
        computes_on_cores = like.is_cpu and device_time() is None
        if computes_on_cores and all(len(shape) == 1 for shape in self._times.everyones_shapes()[0]):
            return "inside a node the cores that compute also copy"
        return None

    def _choose_slices(
        self, layout: ChoiceCounts, like: torch.Tensor, experts: Experts
    ) -> tuple[tuple[int, ...], dict[tuple[int, ...], float]]:
        times, delays = self._measured.experts(experts, layout.most_expert_rows, like), puts_off(experts, like)
        sizes = _rounded(layout.most_rows), _rounded(layout.most_expert_rows)
        key = (*sizes, times, _rows_of(like), like.is_cpu, delays, self._times.neighbours)
        known = self._sliced.get(key)
        if known is not None:
            return known
        size, ep_size = layout.most_rows * _row_bytes(like), self._grid.ep.size
        rows_per_byte = layout.most_expert_rows / max(size, 1)
        traffic = Traffic(size, ep_size, link=Resource.INTER, collective="all_to_all_v", nodes=(ep_size,))
        # On a CPU what a call takes that sends next to nothing is mostly work of the cores that
        # compute. Where the wire's own latency is a large part of it, this errs towards fewer
        # chunks. An emulated accelerator's host pays it too.
        posting_us = 2 * (self._times.exchange_us(1, None) or 0.0) if like.is_cpu else 0.0
        chosen = choose_slices(
            traffic,
            lambda part: self._times.exchange_us(part, _rows_of(like)) or 0.0,
            lambda part: times.at(part * rows_per_byte),
            posting_us=posting_us,
            puts_off=delays,
        )
        return self._sliced.add(key, chosen)

    def _choose_kind(self, layout: ChoiceCounts, like: torch.Tensor | None) -> tuple[str, dict[str, float], str]:
        if self._kind != "auto":
            return self._kind, {}, f"{self._kind} as asked for"
        grid = self._grid
        if grid.all.size == 1 or layout.capacity is not None:
            return "all_to_all", {}, "all_to_all: one rank, or padded rows"
        if self._slices not in (None, _WHOLE):
            return "all_to_all", {}, "all_to_all: chunks are asked for"
        each = None if like is None else self._kinds_us(layout, like)
        if like is not None and each is not None:
            to_beat = {"all_gather": each["all_to_all"], "two_level": each["all_to_all"]}
            if layout.on_levels is not None:
                # By the size of its fullest rank all_to_all is predicted; but ranks may share their
                # node's link. No profile says whether they do, so two levels must win either way.
                sizes = (layout.most_rows, layout.most_rows_of_nodes)
                times = _all_known(self._times.exchange_us(size * _row_bytes(like), _rows_of(like)) for size in sizes)
                if times is not None:
                    passes = 2 if layout.needs_gradient else 1
                    to_beat["two_level"] -= passes * 2 * max(0.0, times[0] - times[1])
            faster = [kind for kind, flat_us in to_beat.items() if kind in each and is_worth_it(each[kind], flat_us)]
            kind = min(faster, key=lambda kind: each[kind], default="all_to_all")
            others = ", ".join(f"{other} {each[other]:.0f}" for other in each if other != kind)
            return kind, each, f"{kind}: predicted {each[kind]:.0f} µs in all, {others}"
        sent = layout.most_rows * (grid.ep.size - 1) / grid.ep.size + max(layout.gathered_rows) * (grid.etp.size > 1)
        gathered = sum(layout.tokens) * (grid.all.size - 1) / grid.all.size
        kind = "all_gather" if gathered < sent else "all_to_all"
        why = f"{kind} by rows, for want of a profile: {gathered:.0f} by all_gather, {sent:.0f} by all_to_all"
        return kind, {}, why

    def _kinds_us(self, layout: ChoiceCounts, like: torch.Tensor) -> dict[str, float] | None:
        """The price of each kind that these groups can run, µs
        (:mod:`commlayer.scheduler.dispatch_price`); None without a profile."""
        grid, ways = self._grid, self._ways
        rows_of, row_bytes, tokens = _rows_of(like), _row_bytes(like), sum(layout.tokens)
        most = max(layout.gathered_rows) * row_bytes
        times = _all_known(
            [
                ways.all_out.predicted_us("all_gather", tokens * row_bytes, rows_of=rows_of),
                ways.all_home.predicted_us("reduce_scatter", tokens * row_bytes, rows_of=rows_of),
                self._times.exchange_us(layout.most_rows * row_bytes, rows_of),
                self._times.slowest_us(grid.etp, 1, "all_gather", most),
                self._times.slowest_us(grid.etp, 1, "reduce_scatter", most),
            ]
        )
        if times is None:
            return None
        all_gather, reduce_scatter, exchange, gather_inside, scatter_inside = times
        passes, top_k = 2 if layout.needs_gradient else 1, layout.indices.shape[1]
        moves = self._measured.moves(like, tokens, MoveShape.of(grid, top_k, layout.needs_gradient))

        def told_us(each_bytes: int) -> float:
            """A number for each choice of all tokens, to all ranks."""
            return grid.all.predicted_us("all_gather", tokens * top_k * each_bytes) or 0.0

        each = {
            "all_to_all": flat_us(
                passes,
                out_us=exchange + gather_inside,
                home_us=exchange + scatter_inside,
                rows=layout.most_rows,
                row_us=moves.row_us,
            ),
            "all_gather": dispatch_us(
                passes,
                out_us=all_gather,
                home_us=reduce_scatter,
                weights_us=told_us(WEIGHT_BYTES),
                choices_us=told_us(INDEX_BYTES),
                moves_us=tokens * moves.token_us,
            ),
        }
        levels_us = None if layout.on_levels is None else self._times.levels_us(layout.on_levels, like)
        if levels_us is not None and layout.on_levels is not None:
            rails, inside = layout.on_levels
            each["two_level"] = two_level_us(
                passes,
                way_us=levels_us,
                rows=(rails.whole, inside.whole, layout.most_expert_rows),
                row_us=moves.level_us,
                weights_us=told_us(WEIGHT_BYTES),
                choices_us=told_us(packed_index_bytes(grid.num_experts)),
            )
        return each


def slices_of(chunks: int | Sequence[int] | str) -> tuple[int, ...]:
    """Read a user's ``chunks`` as the eighths of the tokens in each chunk. Raises UsageError."""
    if type(chunks) is int and chunks in (1, 2, 4, FINEST):  # True is no number of chunks
        return even_rows(FINEST, chunks)
    if isinstance(chunks, Sequence) and not isinstance(chunks, str):
        slices = tuple(chunks)
        if all(isinstance(part, int) and part > 0 for part in slices) and sum(slices) == FINEST:
            return slices
    raise UsageError(
        f"chunks must be auto, 1, 2, 4 or {FINEST}, or the eighths of the tokens in each chunk, {FINEST} together, such as "
        f"(1, 3, 3, 1); got {chunks!r}"
    )


def _rounded(count: int, leading_bits: int = 5) -> int:
    """Up to so many leading bits: with five, counts that are rounded alike differ by less than a
    sixteenth."""
    bits = max(0, count.bit_length() - leading_bits)
    return -(-count >> bits) << bits


def puts_off(experts: Experts | None, like: torch.Tensor | None) -> bool:
    """Whether a backward pass makes the products for the weights of these experts behind those for
    tokens such as ``like``."""
    is_here = isinstance(experts, GroupedExperts) and not is_sharded(experts)
    return is_here and like is not None and like.is_cpu  # a GPU's grouped products make both


def is_sharded(experts: Experts | None) -> bool:
    """Tell whether FSDP2 shards the experts: then a call of them is a collective over EDP, whose
    ranks see other counts than these.
    """
    return isinstance(experts, torch.nn.Module) and hasattr(experts, "unshard")


def _all_known(times: Iterable[float | None]) -> list[float] | None:
    listed = list(times)
    known = [time_us for time_us in listed if time_us is not None]
    return known if len(known) == len(listed) else None


def _rows_of(like: torch.Tensor) -> RowsOf:
    """The part of tokens [T, H] that decides how they may be encoded."""
    return like.shape[1], like.dtype


def _row_bytes(like: torch.Tensor) -> int:
    return like.shape[1] * like.element_size()
