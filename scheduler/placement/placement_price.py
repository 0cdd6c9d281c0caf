"""The price of a placement: the time of a step of one MoE layer where experts lie so, under a load,
by measured curves.

Added up are, for each micro-batch, dispatch and combine with the same of their gradients, and the
computation of the slowest rank; and for each step what replicas' gradients take. Rows that
exchanges move in memory count as they were measured. Exchanges end with the rank that has most to
receive; a token goes once to each node that holds any of its experts, where that is faster than
once for each choice (:mod:`commlayer.scheduler.rails`). What runs side by side follows from how the
layer runs it (:mod:`commlayer.scheduler.placement.step_timeline`): weights that are lent, and their
gradients, beside the computation, so that they count only where they take longer; sums of replicas'
gradients behind the backward pass, beside nothing.

Copies share their rows evenly, wherever tokens come from. Helpers take rows of their own rank
first, then of their node, so what spills also spares exchanges.

How many tokens reach a node follows from the loads alone, which do not say what experts are chosen
together. Two models are known: choices that are drawn independently, and experts that are taken or
left independently. The smaller part of tokens that stay away counts, since each leaves something
out that keeps choices apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from commlayer.profiles.errors import UsageError
from commlayer.profiles.profile import Profile
from commlayer.scheduler.dispatch_price import flat_us, is_worth_it, two_level_us
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
        puts_off: whether the backward pass makes the products for weights' gradients while those of
            rows travel.
        move_us: what moving a row in memory takes, forward and backward, where it is exchanged
            flat.
        level_move_us: the same of a row on a rail, inside a node, or of an expert, where tokens go
            in two levels.

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
        """The memory of one copy of an expert that is trained: weights, gradient, and the
        optimizer's state."""
        return self.weight_bytes + self.gradient_bytes + self.state_bytes

    @classmethod
    def of_shape(
        cls,
        hidden: int,
        width: int,
        *,
        tflops: float,
        element_bytes: int = 2,
        micro_batches: int = 1,
    ) -> ExpertWork:
        """Make the work of a SwiGLU expert: three matrices, whose products run at ``tflops`` as
        they are measured."""
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
    """One layer's choices in a step: ``counts`` [experts] of all ranks' tokens; each token has
    ``top_k``."""

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
    """Sums over the experts of each rank, or node: of rows, and of the logarithms of the parts of
    tokens that choose none."""

    rows: Array
    none: Array

    def reached(self, load: LayerLoad) -> Array:
        """The part of tokens that have an expert there, for each of these ranks or nodes."""
        import numpy as np

        share = np.minimum(self.rows / max(load.choices, 1e-300), 1.0)
        reached: Array = 1 - np.minimum(np.exp(self.none), (1 - share) ** load.top_k)
        return reached


@dataclass(frozen=True, slots=True)
class LayerPrice:
    """The time of a layer's step, µs: all exchanges of tokens, the slowest rank's computation,
    replicas' gradients, spilling.

    ``spill_us``: what weights that go along, and their gradients, make the step longer, with the
    time to decide on them where it is known; ``sent_us``: what they take, most of it beside
    computation. ``risk_us``: how much longer the step were if these took longer by the profile's
    error. ``hidden_us``: computation that runs beside exchanges. ``levels``: whether tokens go in
    two levels. ``busiest``: the busiest rank's rows over the mean.
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
        """The time by which curves that err by ``error`` may be wrong in what this step does and
        ``other``, in which nothing spills, does not. What errs in exchanges of one kind errs in
        both alike; one and two levels are of other curves."""
        exchange_us = abs(self.exchange_us - other.exchange_us)
        gradient_us = abs(self.gradient_us - other.gradient_us)
        if self.levels != other.levels:
            exchange_us = max(self.exchange_us, other.exchange_us)
        return error * (exchange_us + gradient_us + self.spill_us) + self.risk_us


class Exchanges(NamedTuple):
    """All exchanges of a step, µs; those of them beside which products for weights' gradients may
    run; and whether they go in two levels. Of any one shape."""

    us: Array
    beside_us: Array
    levels: Array


class PlacementPrices:
    """Prices of placements on the ranks of an expert group, which are those of its nodes in order.

    ``nodes``: how many ranks the group has on each of its nodes, in the cluster of ``profile``;
    None: all ranks of that cluster.

    Attributes:
        times: of exchanges over the group, with its ranks and nodes.

    Raises UsageError and PlanError as :func:`exchange_times` does.
    """

    def __init__(self, profile: Profile, work: ExpertWork, nodes: Sequence[int] | None = None) -> None:
        self.work = work
        self.times = exchange_times(profile, None if nodes is None else tuple(nodes))
        self._latest: tuple[LayerLoad, ExpertPlacement, tuple[Totals, Totals]] | None = None

    def totals(self, load: LayerLoad, placement: ExpertPlacement, spilled: Spilled = ()) -> tuple[Totals, Totals]:
        """The totals of ranks and of nodes; ``spilled`` as for :meth:`layer`."""
        import numpy as np

        before = self._totals_before(load, placement)
        if not spilled:
            return before
        both = []
        for (rows, none), node_of in zip(before, (None, self.times.node_of.tolist()), strict=True):
            changed: dict[tuple[int, int], float] = {}
            for expert, source, target, part in spilled:
                for rank, more in ((source, -part), (target, part)):
                    key = expert, rank if node_of is None else node_of[rank]
                    changed[key] = changed.get(key, 0.0) + more
            new_rows, new_none = rows.tolist(), none.tolist()
            for (expert, at), more in changed.items():
                per_place = 1 if node_of is None else self.times.per_node
                copies = placement.copies[expert, at * per_place : (at + 1) * per_place].sum()
                share = float(copies) / float(placement.logcnt[expert])
                chosen, counts = float(load.chosen_by[expert]), float(load.counts[expert])
                new_rows[at] += counts * more
                new_none[at] += math.log1p(-min(chosen * max(share + more, 0.0), 1 - 1e-12))
                new_none[at] -= math.log1p(-min(chosen * share, 1 - 1e-12))
            both.append(Totals(np.array(new_rows), np.array(new_none)))
        return both[0], both[1]

    def _totals_before(self, load: LayerLoad, placement: ExpertPlacement) -> tuple[Totals, Totals]:
        """The same where nothing spills; those of the latest load and placement are known, as a
        search asks for them often."""
        if self._latest is not None and self._latest[0] is load and self._latest[1] is placement:
            return self._latest[2]
        import numpy as np

        experts, ranks = placement.held
        parts = 1.0 / placement.logcnt[experts]
        times, both = self.times, []
        nodes = times.node_of[ranks]
        for where, count in ((ranks, times.num_ranks), (nodes, times.num_nodes)):
            expert, at, share = experts, where, parts
            if count != times.num_ranks:  # several copies may be there
                places = experts * count + where
                together = np.bincount(places, parts, minlength=placement.num_experts * count)
                key = np.flatnonzero(together > 0)
                expert, at, share = key // count, key % count, together[key]
            none = np.log1p(-np.minimum(load.chosen_by[expert] * share, 1 - 1e-12))
            rows = np.bincount(at, load.counts[expert] * share, minlength=count)
            both.append(Totals(rows, np.bincount(at, none, minlength=count)))
        self._latest = load, placement, (both[0], both[1])
        return self._latest[2]

    def exchanges(self, load: LayerLoad, most_rows: Array, rank_reach: Array, node_reach: Array) -> Exchanges:
        """Time all exchanges of a step, flat or in two levels, with the rows that are moved in
        memory, by the busiest rank's rows and the largest parts of tokens that have an expert on
        one rank, and on one node. Arrays of any one shape."""
        import numpy as np

        work, times, batches = self.work, self.times, self.work.micro_batches
        size = work.row_bytes / batches
        flat_way = times.flat(most_rows * size) * batches
        flat = flat_us(_PASSES, out_us=flat_way, home_us=flat_way, rows=most_rows, row_us=work.move_us)
        if not times.has_levels:
            return Exchanges(flat, flat_way, np.zeros_like(flat, dtype=bool))
        on_rails, in_nodes = load.tokens * node_reach / times.per_node, load.tokens * rank_reach
        rails = times.rails(on_rails * size) * batches
        both = two_level_us(
            _PASSES,
            way_us=rails + times.inside(in_nodes * size) * batches,
            rows=(on_rails, in_nodes, most_rows),
            row_us=work.level_move_us,
        )
        levels = is_worth_it(both, flat)
        return Exchanges(np.where(levels, both, flat), np.where(levels, rails, flat_way), levels)

    def step_us(self, exchanges: Exchanges, most_rows: Array) -> Array:
        """Time a step in which nothing spills and there are no replicas, but for what each expert
        takes whatever its rows. Arrays of any one shape."""
        import numpy as np

        compute_us = most_rows * (self.work.row_us * (1 + _BACKWARD))
        hidden_us = np.minimum(exchanges.beside_us, compute_us / (1 + _BACKWARD)) if self.work.puts_off else 0.0
        total_us: Array = exchanges.us + compute_us - hidden_us
        return total_us

    def layer(self, load: LayerLoad, placement: ExpertPlacement, spilled: Spilled = ()) -> LayerPrice:
        """Price one layer's step under ``load``.

        ``spilled``: whose weights go along in each micro-batch, and whose gradients come back.

        Raises UsageError for a placement of other experts, or on another number of ranks.
        """
        if (placement.num_experts, placement.num_ranks) != (len(load.counts), self.times.num_ranks):
            raise UsageError(
                f"a placement on the profile's {self.times.num_ranks} ranks of {len(load.counts)} experts: "
                f"got {placement.num_experts} experts on {placement.num_ranks} ranks"
            )
        import numpy as np

        ranks, nodes = self.totals(load, placement, spilled)
        most_rows = ranks.rows.max()
        if spilled:
            times = self.times
            most_rows = rows_on_the_way(load.counts, placement, spilled, times.node_of, times.inside_weight)
        reach = ranks.reached(load).max(), nodes.reached(load).max()
        exchanges = self.exchanges(load, most_rows, *reach)
        work, guest_rows, num_guests = self.work, np.zeros(self.times.num_ranks), np.zeros(self.times.num_ranks)
        for expert, _, target, part in spilled:
            guest_rows[target] += load.counts[expert] * part
            num_guests[target] += 1
        num_experts = np.bincount(placement.held[1], minlength=self.times.num_ranks)
        row_us = work.row_us / work.micro_batches
        inside_us = float(exchanges.us) / _EXCHANGES - float(exchanges.beside_us)
        batch = MicroBatch(
            exchange_us=float(exchanges.us) / (_EXCHANGES * work.micro_batches),
            inside_us=inside_us / work.micro_batches,
            own_us=(ranks.rows - guest_rows) * row_us + num_experts * work.expert_us,
            guests_us=guest_rows * row_us + num_guests * work.expert_us,
            puts_off=work.puts_off,
        )
        there_us, back_us = self._lent_us(spilled)
        error, batches = 1 + self.times.profile.error, work.micro_batches
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

    def gradients_us(self, placement: ExpertPlacement) -> float:
        """Time the sums of replicas' gradients in a step: every copy's to the ranks of all others,
        which all add them up."""
        if not placement.has_replicas:
            return 0.0
        import numpy as np

        experts, ranks = placement.held
        has_more = placement.logcnt[experts] > 1
        experts, ranks = experts[has_more], ranks[has_more]
        at = experts * self.times.num_nodes + self.times.node_of[ranks]
        near = np.bincount(at)[at]  # copies on the same node, this one included
        inside = np.bincount(ranks, near - 1).max()
        across = np.bincount(ranks, placement.logcnt[experts] - near).max()
        each = self.work.gradient_bytes
        return self.times.most_us(across * each, inside * each)

    def _lent_us(self, spilled: Spilled) -> tuple[float, float]:
        """Time the weights that go along in a micro-batch, and their gradients on the way back."""
        import numpy as np

        if not spilled:
            return 0.0, 0.0
        sources, targets = (
            np.array([each[1] for each in spilled]),
            np.array([each[2] for each in spilled]),
        )
        there = self.times.messages_us(sources, targets, np.full(len(spilled), self.work.weight_bytes))
        if self.work.gradient_bytes == self.work.weight_bytes:
            return there, there  # the rank that sends most is the one that gets most back
        return there, self.times.messages_us(targets, sources, np.full(len(spilled), self.work.gradient_bytes))

    def migration_us(self, before: ExpertPlacement, after: ExpertPlacement) -> float:
        """Time the way to another placement, once: weights and the optimizer's state of every copy
        that is new on its rank."""
        import numpy as np

        _, sources, targets, _ = after.sent_from(before, self.times.node_of)
        return self.times.messages_us(
            sources, targets, np.full(len(targets), self.work.weight_bytes + self.work.state_bytes)
        )
