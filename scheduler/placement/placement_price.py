"""The price of a placement: the time of a step of one MoE layer where experts lie so, under a load, by measured curves.

Added up are, for each micro-batch, dispatch and combine with the same of their gradients, and the computation of the slowest
rank; and for each step what replicas' gradients take. Rows that exchanges move in memory count as they were measured. Exchanges
end with the rank that has most to receive; a token goes once to each node that holds any of its experts, where that is faster
than once for each choice (:mod:`commlayer.scheduler.rails`). What runs side by side follows from how the layer runs it
(:mod:`commlayer.scheduler.placement.step_timeline`): weights that are lent, and their gradients, beside the computation, so that
they count only where they take longer; sums of replicas' gradients behind the backward pass, beside nothing.

Copies share their rows evenly, wherever tokens come from. Helpers take rows of their own rank first, then of their node, so what
spills also spares exchanges.

How many tokens reach a node follows from the loads alone, which do not say what experts are chosen together. Two models are
known: choices that are drawn independently, and experts that are taken or left independently. The smaller part of tokens
that stay away counts, since each leaves something out that keeps choices apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from commlayer.profiles.errors import UsageError
from commlayer.profiles.profile import Profile
from commlayer.scheduler.dispatch_price import dispatch_us, is_worth_it
from commlayer.scheduler.placement.exchange_times import exchange_times
from commlayer.scheduler.placement.expert_placement import Array, ExpertPlacement
from commlayer.scheduler.placement.spilled_rows import Spilled, rows_on_the_way
from commlayer.scheduler.placement.step_timeline import MicroBatch

__all__ = ["Exchanges", "ExpertWork", "LayerLoad", "LayerPrice", "PlacementPrices", "Totals"]

_PASSES = 2
"""Forward and backward: a step trains."""
_EXCHANGES = 2 * _PASSES
"""Dispatch, combine, and the same of their gradients."""
_BACKWARD = 2.0
_OPTIMIZER_BYTES = 12
"""Of a parameter: FP32 weights and two moments."""


@dataclass(frozen=True, kw_only=True)
class ExpertWork:
    """The work and the bytes of one expert of a layer.

    Attributes:
        row_bytes: of a token on the wire.
        row_us: forward computation of one row; the backward pass takes twice that.
        expert_us: of each expert of a rank, whatever its rows (launches).
        weight_bytes, gradient_bytes: of one expert, as they are sent.
        state_bytes: of its optimizer, which go with every copy.
        micro_batches: of a step, each with its own exchanges.
        puts_off: whether the backward pass makes the products for weights' gradients while those of rows travel.
        move_us: what moving a row in memory takes, forward and backward, where it is exchanged flat.
        level_move_us: the same of a row on a rail, inside a node, or of an expert, where tokens go in two levels.

    Raises:
        UsageError: a number out of its range.
    """

    row_bytes: int
    row_us: float
    weight_bytes: int
    gradient_bytes: int
    state_bytes: int
    expert_us: float = 0.0
    micro_batches: int = 1
    puts_off: bool = False
    move_us: float = 0.0
    level_move_us: float = 0.0

    def __post_init__(self) -> None:
        times = (self.row_us, self.expert_us, self.move_us, self.level_move_us)
        numbers = (*times, self.weight_bytes, self.gradient_bytes, self.state_bytes)
        if self.row_bytes < 1 or self.micro_batches < 1 or not all(0 <= number < float("inf") for number in numbers):
            raise UsageError(f"expected rows of at least a byte, a micro-batch, and nothing below 0, got {self}")

    @property
    def copy_bytes(self) -> int:
        """The memory of one copy of an expert that is trained: weights, gradient, and the optimizer's state."""
        return self.weight_bytes + self.gradient_bytes + self.state_bytes

    @classmethod
    def of_shape(
        cls, hidden: int, width: int, *, tflops: float, element_bytes: int = 2, micro_batches: int = 1
    ) -> ExpertWork:
        """Make the work of a SwiGLU expert: three matrices, whose products run at ``tflops`` as they are measured."""
        if min(hidden, width, element_bytes) < 1 or not tflops > 0:
            raise UsageError(
                f"expected positive sizes and TFLOP/s, got {hidden}, {width}, {element_bytes} and {tflops}"
            )
        parameters = 3 * hidden * width
        return cls(
            row_bytes=hidden * element_bytes,
            row_us=2 * parameters / (tflops * 1e6),
            weight_bytes=parameters * element_bytes,
            gradient_bytes=parameters * element_bytes,
            state_bytes=parameters * _OPTIMIZER_BYTES,
            micro_batches=micro_batches,
        )


@dataclass(frozen=True)
class LayerLoad:
    """One layer's choices in a step: ``counts`` [experts] of all ranks' tokens; each token has ``top_k``."""

    counts: Array
    top_k: int

    def __post_init__(self) -> None:
        import numpy as np

        counts = np.asarray(self.counts, dtype=np.float64)
        if (
            counts.ndim != 1
            or not 1 <= self.top_k <= len(counts)
            or not (counts >= 0).all()
            or not np.isfinite(counts).all()
        ):
            raise UsageError(
                f"a layer's load: expected a number of at least 0 for each expert, and 1 to that many choices, got shape "
                f"{list(counts.shape)} and {self.top_k}"
            )
        object.__setattr__(self, "counts", counts)

    @cached_property
    def choices(self) -> float:
        return float(self.counts.sum())

    @cached_property
    def tokens(self) -> float:
        return self.choices / self.top_k

    @cached_property
    def chosen_by(self) -> Array:
        """The part of all tokens that have each expert among their choices, [experts]."""
        import numpy as np

        return np.minimum(self.counts / max(self.tokens, 1e-300), 1 - 1e-12)


class Totals(NamedTuple):
    """Sums over the experts of each rank, or node: of rows, and of the logarithms of the parts of tokens that choose none."""

    rows: Array
    none: Array


@dataclass(frozen=True, slots=True)
class LayerPrice:
    """The time of a layer's step, µs: all exchanges of tokens, the slowest rank's computation, replicas' gradients, spilling.

    ``spill_us``: what weights that go along, and their gradients, make the step longer, with the time to decide on them where it
    is known; ``sent_us``: what they take, most of it beside computation. ``risk_us``: how much longer the step were if these took
    longer by the profile's error. ``hidden_us``: computation that runs beside exchanges. ``levels``: whether tokens go in two
    levels. ``busiest``: the busiest rank's rows over the mean.
    """

    exchange_us: float
    compute_us: float
    gradient_us: float = 0.0
    spill_us: float = 0.0
    sent_us: float = 0.0
    risk_us: float = 0.0
    hidden_us: float = 0.0
    levels: bool = False
    busiest: float = 1.0

    @property
    def total_us(self) -> float:
        return self.exchange_us + self.compute_us + self.gradient_us + self.spill_us - self.hidden_us

    def doubt_us(self, other: LayerPrice, error: float) -> float:
        """The time by which curves that err by ``error`` may be wrong in what this step does and ``other``, in which nothing
        spills, does not. What errs in exchanges of one kind errs in both alike; one and two levels are of other curves."""
        exchange_us, gradient_us = abs(self.exchange_us - other.exchange_us), abs(self.gradient_us - other.gradient_us)
        if self.levels != other.levels:
            exchange_us = max(self.exchange_us, other.exchange_us)
        return error * (exchange_us + gradient_us + self.spill_us) + self.risk_us


class Exchanges(NamedTuple):
    """All exchanges of a step, µs; those of them beside which products for weights' gradients may run; and whether they go in two
    levels. Of any one shape."""

    us: Array
    beside_us: Array
    levels: Array


class PlacementPrices:
    """Prices of placements on the ranks of an expert group, which are those of its nodes in order.

    ``nodes``: how many ranks the group has on each of its nodes, in the cluster of ``profile``; None: all ranks of that cluster.

    Raises UsageError and PlanError as :func:`exchange_times` does.
    """

    def __init__(self, profile: Profile, work: ExpertWork, nodes: Sequence[int] | None = None) -> None:
        self.work, self._times = work, exchange_times(profile, None if nodes is None else tuple(nodes))
        times = self._times
        self.profile, self.num_nodes, self.per_node = times.profile, times.num_nodes, times.per_node
        self.num_ranks, self.node_of, self.has_levels = times.num_ranks, times.node_of, times.has_levels
        self._latest: tuple[LayerLoad, ExpertPlacement, tuple[Totals, Totals]] | None = None

    # One layer's step

    def totals(self, load: LayerLoad, placement: ExpertPlacement, spilled: Spilled = ()) -> tuple[Totals, Totals]:
        """The totals of ranks and of nodes; ``spilled`` as for :meth:`layer`."""
        import numpy as np

        before = self._totals_before(load, placement)
        if not spilled:
            return before
        found = []
        for (rows, none), node_of in zip(before, (None, self.node_of.tolist()), strict=True):
            changed: dict[tuple[int, int], float] = {}
            for expert, source, target, part in spilled:
                for rank, more in ((source, -part), (target, part)):
                    key = expert, rank if node_of is None else node_of[rank]
                    changed[key] = changed.get(key, 0.0) + more
            new_rows, new_none = rows.tolist(), none.tolist()
            for (expert, at), more in changed.items():
                held = placement.copies[expert]
                copies = held[at] if node_of is None else held[at * self.per_node : (at + 1) * self.per_node].sum()
                share = float(copies) / float(placement.logcnt[expert])
                chosen, counts = float(load.chosen_by[expert]), float(load.counts[expert])
                new_rows[at] += counts * more
                new_none[at] += math.log1p(-min(chosen * max(share + more, 0.0), 1 - 1e-12))
                new_none[at] -= math.log1p(-min(chosen * share, 1 - 1e-12))
            found.append(Totals(np.array(new_rows), np.array(new_none)))
        return found[0], found[1]

    def _totals_before(self, load: LayerLoad, placement: ExpertPlacement) -> tuple[Totals, Totals]:
        """The same where nothing spills; those of the latest load and placement are known, as a search asks for them often."""
        if self._latest is not None and self._latest[0] is load and self._latest[1] is placement:
            return self._latest[2]
        import numpy as np

        experts, ranks = placement.held
        parts = 1.0 / placement.logcnt[experts]
        found = []
        for where, count in ((ranks, self.num_ranks), (self.node_of[ranks], self.num_nodes)):
            expert, at, share = experts, where, parts
            if count != self.num_ranks:  # several copies may be there
                together = np.bincount(experts * count + where, parts, minlength=placement.num_experts * count)
                key = np.flatnonzero(together > 0)
                expert, at, share = key // count, key % count, together[key]
            none = np.log1p(-np.minimum(load.chosen_by[expert] * share, 1 - 1e-12))
            rows = np.bincount(at, load.counts[expert] * share, minlength=count)
            found.append(Totals(rows, np.bincount(at, none, minlength=count)))
        self._latest = load, placement, (found[0], found[1])
        return self._latest[2]

    def reached(self, load: LayerLoad, totals: Totals) -> Array:
        """The part of tokens that have an expert there, for each of these ranks or nodes."""
        import numpy as np

        share = np.minimum(totals.rows / max(load.choices, 1e-300), 1.0)
        found: Array = 1 - np.minimum(np.exp(totals.none), (1 - share) ** load.top_k)
        return found

    def exchanges(self, load: LayerLoad, most_rows: Array, rank_reach: Array, node_reach: Array) -> Exchanges:
        """Time all exchanges of a step, flat or in two levels, with the rows that are moved in memory, by the busiest rank's rows
        and the largest parts of tokens that have an expert on one rank, and on one node. Arrays of any one shape."""
        import numpy as np

        work, batches = self.work, self.work.micro_batches
        size = work.row_bytes / batches
        beside_flat = self._times.flat(most_rows * size) * batches
        flat = dispatch_us(_PASSES, out_us=beside_flat, home_us=beside_flat, moves_us=most_rows * work.move_us)
        if not self.has_levels:
            return Exchanges(flat, beside_flat, np.zeros_like(flat, dtype=bool))
        on_rails, in_nodes = load.tokens * node_reach / self.per_node, load.tokens * rank_reach
        rails = self._times.rails(on_rails * size) * batches
        way = rails + self._times.inside(in_nodes * size) * batches
        moves_us = (on_rails + in_nodes + most_rows) * work.level_move_us
        both = dispatch_us(_PASSES, out_us=way, home_us=way, moves_us=moves_us)
        levels = is_worth_it(both, flat)
        return Exchanges(np.where(levels, both, flat), np.where(levels, rails, beside_flat), levels)

    def compute_us(self, most_rows: Array) -> Array:
        """Time what the slowest rank computes in a step, but for what each expert takes whatever its rows."""
        return most_rows * (self.work.row_us * (1 + _BACKWARD))

    def step_us(self, exchanges: Exchanges, most_rows: Array) -> Array:
        """Time a step in which nothing spills and there are no replicas. Arrays of any one shape."""
        import numpy as np

        compute_us = self.compute_us(most_rows)
        hidden_us = np.minimum(exchanges.beside_us, compute_us / (1 + _BACKWARD)) if self.work.puts_off else 0.0
        found: Array = exchanges.us + compute_us - hidden_us
        return found

    def layer(self, load: LayerLoad, placement: ExpertPlacement, spilled: Spilled = ()) -> LayerPrice:
        """Price one layer's step under ``load``.

        ``spilled``: whose weights go along in each micro-batch, and whose gradients come back.

        Raises UsageError for a placement of other experts, or on another number of ranks.
        """
        if (placement.num_experts, placement.num_ranks) != (len(load.counts), self.num_ranks):
            raise UsageError(
                f"a placement on the profile's {self.num_ranks} ranks of {len(load.counts)} experts: got {placement.num_experts} "
                f"experts on {placement.num_ranks} ranks"
            )
        ranks, nodes = self.totals(load, placement, spilled)
        moved = rows_on_the_way(load.counts, placement, spilled, self.node_of, self._inside_weight) if spilled else None
        reach = self.reached(load, ranks).max(), self.reached(load, nodes).max()
        exchanges = self.exchanges(load, ranks.rows.max() if moved is None else moved, *reach)
        batch = self._micro_batch(load, placement, spilled, ranks.rows, exchanges)
        there_us, back_us = self._lent_us(spilled)
        error, batches = 1 + self.profile.error, self.work.micro_batches
        quick_us, total_us = batch.total_us(0.0, 0.0), batch.total_us(there_us, back_us)
        late_us = batch.total_us(there_us * error, back_us * error) if spilled else total_us
        exchange_us, compute_us = float(exchanges.us), batch.computed_us * batches
        mean = float(ranks.rows.mean())
        return LayerPrice(
            exchange_us=exchange_us,
            compute_us=compute_us,
            gradient_us=self.gradients_us(placement),
            spill_us=(total_us - quick_us) * batches,
            sent_us=(there_us + back_us) * batches,
            risk_us=(late_us - total_us) * batches,
            hidden_us=exchange_us + compute_us - quick_us * batches,
            levels=bool(exchanges.levels),
            busiest=float(ranks.rows.max()) / mean if mean else 1.0,
        )

    def _micro_batch(
        self, load: LayerLoad, placement: ExpertPlacement, spilled: Spilled, rows: Array, exchanges: Exchanges
    ) -> MicroBatch:
        import numpy as np

        work, guests, number = self.work, np.zeros(self.num_ranks), np.zeros(self.num_ranks)
        for expert, _, target, part in spilled:
            guests[target] += load.counts[expert] * part
            number[target] += 1
        held = np.bincount(placement.held[1], minlength=self.num_ranks)
        row_us, batches = work.row_us / work.micro_batches, work.micro_batches
        inside_us = float(exchanges.us) / _EXCHANGES - float(exchanges.beside_us)
        return MicroBatch(
            exchange_us=float(exchanges.us) / (_EXCHANGES * batches),
            inside_us=inside_us / batches,
            own_us=(rows - guests) * row_us + held * work.expert_us,
            guests_us=guests * row_us + number * work.expert_us,
            puts_off=work.puts_off,
        )

    @cached_property
    def _inside_weight(self) -> float:
        """What a byte inside a node takes of the time of one between nodes."""
        size, ranks, each = float(1 << 20), self.num_ranks, self.per_node
        if not self.has_levels:
            return 1.0
        inside_us, flat_us = (float(table(size)) for table in (self._times.inside, self._times.flat))
        return min(1.0, inside_us / (1 - 1 / each) * (1 - each / ranks) / flat_us)

    # What is sent beside tokens

    def gradients_us(self, placement: ExpertPlacement) -> float:
        """Time the sums of replicas' gradients in a step: every copy's to the ranks of all others, which all add them up."""
        if not placement.has_replicas:
            return 0.0
        import numpy as np

        experts, ranks = placement.held
        has_more = placement.logcnt[experts] > 1
        experts, ranks = experts[has_more], ranks[has_more]
        at = experts * self.num_nodes + self.node_of[ranks]
        near = np.bincount(at)[at]  # copies on the same node, this one included
        inside = np.bincount(ranks, near - 1).max()
        across = np.bincount(ranks, placement.logcnt[experts] - near).max()
        each = self.work.gradient_bytes
        return self._most_us(across * each, inside * each)

    def _lent_us(self, spilled: Spilled) -> tuple[float, float]:
        """Time the weights that go along in a micro-batch, and their gradients on the way back."""
        import numpy as np

        if not spilled:
            return 0.0, 0.0
        sources, targets = np.array([each[1] for each in spilled]), np.array([each[2] for each in spilled])
        there = self.sent_us(sources, targets, np.full(len(spilled), self.work.weight_bytes))
        if self.work.gradient_bytes == self.work.weight_bytes:
            return there, there  # the rank that sends most is the one that gets most back
        return there, self.sent_us(targets, sources, np.full(len(spilled), self.work.gradient_bytes))

    def migration_us(self, before: ExpertPlacement, after: ExpertPlacement) -> float:
        """Time the way to another placement, once: weights and the optimizer's state of every copy that is new on its rank."""
        import numpy as np

        _, sources, targets, _ = after.sent_from(before, self.node_of)
        return self.sent_us(sources, targets, np.full(len(targets), self.work.weight_bytes + self.work.state_bytes))

    def sent_us(self, sources: Array, targets: Array, sizes: Array) -> float:
        """Time messages among ranks: those between nodes, and those inside, as exchanges of the rank that has most to send or to
        receive."""
        import numpy as np

        crosses = self.node_of[sources] != self.node_of[targets]
        most = [0.0, 0.0]
        for place, chosen in enumerate((crosses, ~crosses)):
            if chosen.any():
                most[place] = max(
                    np.bincount(ends[chosen], weights=sizes[chosen], minlength=self.num_ranks).max()
                    for ends in (sources, targets)
                )
        return self._most_us(*most)

    def _most_us(self, across: float, inside: float) -> float:
        """Time messages of which a rank sends, or receives, so many bytes at most to other nodes, and on its own."""
        total = 0.0
        times = self._times
        for size, table, count in ((across, times.flat, self.num_ranks), (inside, times.inside, self.per_node)):
            if size > 0:  # of an even exchange a part stays where it is
                total += float(table(size * count / (count - 1)))
        return total

    @cached_property
    def us_per_byte(self) -> float:
        """The time of a byte in a large exchange over all ranks, µs."""
        return float(self._times.flat(float(1 << 28))) / (1 << 28)
