"""Better placements than one that is given: exchanges of two experts, replicas, and weights that go
along in each step.

Each searches by the price itself (:mod:`commlayer.scheduler.placement.placement_price`). Of an
exchange only what it changes is computed, for all exchanges of the busiest rank's experts with
those of light ranks at once, because a search over hundreds of experts has milliseconds. Its moves
count with the bytes that they send, shared out over all ranks; what they take together is priced at
the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from commlayer.scheduler.placement.expert_placement import Array, ExpertPlacement
from commlayer.scheduler.placement.placement_price import (
    LayerLoad,
    LayerPrice,
    PlacementPrices,
    Totals,
)
from commlayer.scheduler.placement.spilled_rows import Spilled

__all__ = ["LEAST_GAIN", "Placer", "relabelled"]

LEAST_GAIN = 0.01
"""The part of a step's time that is worth another placement, or weights that go along."""
_LIGHT = 6
"""The light ranks with which the busiest one exchanges."""
_MOST_SPILLED = 32
_PATIENCE = 2
"""Prices of ever more replicas, or spilled parts, without a gain, after which no more are tried."""

_State = TypeVar("_State")


@dataclass(frozen=True)
class Placer:
    """The search for one layer: its load, where its experts lie, and over how many steps a
    migration pays back.

    What was priced once is known from then on, because searches begin and end with placements that
    are candidates, too.
    """

    prices: PlacementPrices
    load: LayerLoad
    before: ExpertPlacement
    horizon: int
    _steps: dict[tuple[ExpertPlacement, Spilled], LayerPrice] = field(default_factory=dict, init=False, repr=False)
    _ways_us: dict[ExpertPlacement, float] = field(default_factory=dict, init=False, repr=False)

    def step(self, placement: ExpertPlacement, spilled: Spilled = ()) -> LayerPrice:
        """The price of a step."""
        key = placement, spilled
        if key not in self._steps:
            self._steps[key] = self.prices.layer(self.load, placement, spilled)
        return self._steps[key]

    def migration_us(self, placement: ExpertPlacement) -> float:
        """The price of the way there."""
        if placement not in self._ways_us:
            self._ways_us[placement] = self.prices.migration_us(self.before, placement)
        return self._ways_us[placement]

    def total_us(self, placement: ExpertPlacement, spilled: Spilled = ()) -> float:
        """The price of ``horizon`` steps, and of the way there."""
        return self.horizon * self.step(placement, spilled).total_us + self.migration_us(placement)

    def exchanged(self, placement: ExpertPlacement, most: int = 12) -> ExpertPlacement:
        """Exchange experts of the busiest rank, or give some to an empty slot, as long as that
        pays, ``most`` times at most."""
        slots = placement.slots.copy()
        layer = _Exchanges(self, placement, slots)
        for _ in range(most):
            if not layer.exchange_best():
                break
        return ExpertPlacement(slots, placement.num_experts, self.before.homes)

    def replicated(self, placement: ExpertPlacement) -> ExpertPlacement:
        """Fill empty slots with replicas of what the busiest rank has most of, as many as pay.

        Which comes next follows from rows; how many there shall be, from the price after one, two,
        four and so on.
        """
        placements = (
            ExpertPlacement(slots, placement.num_experts, self.before.homes)
            for slots in _sampled(self._with_replicas(placement))
        )
        return _cheapest(placement, placements, self.total_us)

    def _with_replicas(self, placement: ExpertPlacement) -> Iterator[Array]:
        """Slots with one more replica each time: on the lightest rank of the home's node, unless
        one elsewhere has much less to do, because gradients go between nodes then."""
        import numpy as np

        slots, counts, copies = placement.slots.copy(), self.load.counts, placement.logcnt.copy()
        rows_of = np.append(counts / copies, -1.0)  # of a copy; the last one: an empty slot's
        holds, rows = placement.copies > 0, rows_of[:-1] @ placement.copies
        node_of = self.prices.times.node_of
        is_near = node_of[None] == node_of[placement.homes][:, None]
        room = (slots < 0).sum(1)
        while True:
            busy = int(rows.argmax())
            expert = int(slots[busy, rows_of[slots[busy]].argmax()])
            free = np.where((room > 0) & ~holds[expert], rows, np.inf)
            far = near = int(free.argmin())
            each = counts[expert] / (copies[expert] + 1)
            if not free[far] + each < rows[busy]:
                return
            if not is_near[expert, far]:
                near = int(np.where(is_near[expert], free, np.inf).argmin())
            target = near if free[near] < free[far] + each / 2 else far
            slots[target, (slots[target] < 0).argmax()] = expert
            rows[holds[expert]] -= rows_of[expert] - each
            rows[target] += each
            rows_of[expert] = each
            holds[expert, target] = True
            copies[expert] += 1
            room[target] -= 1
            yield slots.copy()

    def spilled(self, placement: ExpertPlacement) -> Spilled:
        """Send parts of the busiest ranks' experts along with their weights, to be computed on
        light ranks, as many as pay.

        Looked for are parts that go to any rank; and, unless these even out the load beside the
        computation, parts that go to ranks of the same node, where weights are cheap, and more from
        there to any rank.
        """
        plain = self.step(placement)
        # Fewer rows save their part at most.
        most_us = (plain.exchange_us + plain.compute_us) * (1 - 1 / plain.busiest)
        if most_us <= LEAST_GAIN * plain.total_us:
            return ()
        anywhere = self._spilled_from(placement)
        step = self.step(placement, anywhere)
        is_even = step.busiest < 1 + LEAST_GAIN and step.spill_us + step.risk_us < LEAST_GAIN * step.total_us
        if is_even or not self.prices.times.has_levels:
            return anywhere  # no other parts could gain more than is worth a search
        near = self._spilled_from(placement, stays_near=True)
        parts = {anywhere, near, self._spilled_from(placement, near)} if near else {anywhere}
        return min(sorted(parts), key=lambda each: self.step(placement, each).total_us)

    def _spilled_from(self, placement: ExpertPlacement, begin: Spilled = (), *, stays_near: bool = False) -> Spilled:
        """The best of ever more parts beside what ``begin`` sends. ``stays_near``: to ranks of the
        same node only."""
        more_parts = _sampled(self._with_spilled(placement, begin, stays_near))
        return _cheapest(begin, more_parts, lambda spilled: self.step(placement, spilled).total_us)

    def _with_spilled(self, placement: ExpertPlacement, begin: Spilled, stays_near: bool) -> Iterator[Spilled]:
        """One more part each time, of the busiest rank's largest expert, until one of the two ranks
        has the mean, or this one the mean of its node, which is as far as its neighbours take
        it."""
        import numpy as np

        counts, shares, parts = self.load.counts, placement.even_shares(), {}
        for expert, source, target, part in begin:
            parts[expert, source, target] = part
            shares[expert, source] -= part
            shares[expert, target] += part
        rows, node_of = counts @ shares, self.prices.times.node_of
        means = np.full(len(rows), rows.mean())
        if stays_near:
            means = (np.bincount(node_of, rows) / np.bincount(node_of))[node_of]
        for _ in range(_MOST_SPILLED - len(begin)):
            source = int((rows - (means if stays_near else 0.0)).argmax())
            target = int(np.where(node_of == node_of[source], rows, np.inf).argmin() if stays_near else rows.argmin())
            of_rank = counts * shares[:, source] * placement.copies[:, source]  # not what was sent there
            expert = int(of_rank.argmax())
            moved = min(
                float(of_rank[expert]),
                float(rows[source] - means[source]),
                float(means[target] - rows[target]),
            )
            if moved <= 0 or placement.copies[expert, target]:
                return
            part = moved / float(counts[expert])
            shares[expert, source] -= part
            shares[expert, target] += part
            rows[source] -= moved
            rows[target] += moved
            parts[expert, source, target] = parts.get((expert, source, target), 0.0) + part
            yield tuple((*key, part) for key, part in parts.items())


def _cheapest(first: _State, states: Iterable[_State], price_us: Callable[[_State], float]) -> _State:
    """Return the cheapest of ``first`` and ``states``. Gives up after :data:`_PATIENCE` states in a row
    that are no cheaper."""
    best, best_us, misses = first, price_us(first), 0
    for state in states:
        us = price_us(state)
        misses += 1
        if us < best_us:
            best, best_us, misses = state, us, 0
        if misses == _PATIENCE:
            break
    return best


def _sampled(states: Iterator[_State]) -> Iterator[_State]:
    """The first of ``states``, the second, the fourth and so on, in steps of at most eight; and the
    last one."""
    wanted, last, number = 1, None, 0
    for number, state in enumerate(states, start=1):
        last = state
        if number == wanted:
            yield state
            wanted, last = number + min(number, 8), None
    if last is not None:
        yield last


class _Exchanges:
    """The slots of a search, changed in place, and the sums that prices need of them."""

    def __init__(self, placer: Placer, placement: ExpertPlacement, slots: Array) -> None:
        import numpy as np

        self.placer, self.slots, self.prices, self.load = placer, slots, placer.prices, placer.load
        copies = placement.logcnt
        # One more entry for an empty slot, −1: of no rows, and at home everywhere.
        self.rows_of = np.append(self.load.counts / copies, 0.0)
        self.none_of = np.append(np.log1p(-self.load.chosen_by / copies), 0.0)
        self.holds = np.vstack([placement.copies > 0, np.zeros((1, placement.num_ranks), dtype=bool)])
        work, times = self.prices.work, self.prices.times
        each_us = (work.weight_bytes + work.state_bytes) * times.us_per_byte / times.num_ranks
        away = np.where(placer.before.copies > 0, 0.0, each_us)
        self.move_us = np.vstack([away, np.zeros((1, placement.num_ranks))])
        shape = (times.num_nodes, -1)
        rows, none = self.rows_of[slots].sum(1), self.none_of[slots].sum(1)
        self.ranks, self.nodes = (
            Totals(rows, none),
            Totals(rows.reshape(shape).sum(1), none.reshape(shape).sum(1)),
        )

    def exchange_best(self) -> bool:
        """Do the exchange of the busiest rank that gains most. Whether there was one."""
        import numpy as np

        busy = int(self.ranks.rows.argmax())
        light = np.argsort(self.ranks.rows, kind="stable")[:_LIGHT]
        light = light[light != busy]
        own, theirs = self.slots[busy][:, None, None], self.slots[light][None]
        us = self._step_us(busy, light, own, theirs)
        us += self.move_us[own, light[None, :, None]] - self.move_us[own, busy]
        us += self.move_us[theirs, busy] - self.move_us[theirs, light[None, :, None]]
        us[
            np.broadcast_to(
                (own < 0) | self.holds[own, light[None, :, None]] | self.holds[theirs, busy],
                us.shape,
            )
        ] = np.inf
        at, rank, slot = np.unravel_index(int(us.argmin()), us.shape)
        if not us[at, rank, slot] < self._now_us() * (1 - 1e-9):
            return False
        self._exchange(busy, int(at), int(light[rank]), int(slot))
        return True

    def _now_us(self) -> float:
        most = self.ranks.rows.max()
        reach = [totals.reached(self.load).max() for totals in (self.ranks, self.nodes)]
        return self.placer.horizon * float(self.prices.step_us(self.prices.exchanges(self.load, most, *reach), most))

    def _step_us(self, busy: int, light: Array, mine: Array, theirs: Array) -> Array:
        """The price of all steps after each exchange, [slots of the busy rank, light ranks, their
        slots]."""

        rows, none = (of[theirs] - of[mine] for of in (self.rows_of, self.none_of))
        node_of = self.prices.times.node_of
        here, there = node_of[busy], node_of[light]
        crosses = (there != here)[None, :, None]
        ranks = self._largest(self.ranks, busy, light, rows, none)
        nodes = self._largest(self.nodes, here, there, rows * crosses, none * crosses)
        exchanges = self.prices.exchanges(self.load, ranks[0], ranks[1], nodes[1])
        return self.placer.horizon * self.prices.step_us(exchanges, ranks[0])

    def _largest(self, totals: Totals, busy: int, light: Array, rows: Array, none: Array) -> tuple[Array, Array]:
        """The most rows, and the largest part of tokens, of any rank or node, where the busy one
        gets so much more, and a light one so much less."""
        import numpy as np

        index, shown = np.arange(len(totals.rows)), light[None, :, None]
        others = (index[None] != busy) & (index[None] != light[:, None])
        reach = totals.reached(self.load)
        most = [np.where(others, of[None], 0.0).max(1)[None, :, None] for of in (totals.rows, reach)]
        changed = (
            Totals(totals.rows[busy] + rows, totals.none[busy] + none),
            Totals(totals.rows[shown] - rows, totals.none[shown] - none),
        )
        largest = np.maximum(np.maximum(changed[0].rows, changed[1].rows), most[0])
        reached = [each.reached(self.load) for each in changed]
        return largest, np.maximum(np.maximum(*reached), most[1])

    def _exchange(self, busy: int, at: int, rank: int, slot: int) -> None:
        node_of = self.prices.times.node_of
        busy_one, light_one = int(self.slots[busy, at]), int(self.slots[rank, slot])
        self.slots[busy, at], self.slots[rank, slot] = light_one, busy_one
        for expert, source, target in ((busy_one, busy, rank), (light_one, rank, busy)):
            ends = (source, target), node_of[[source, target]]
            for totals, (begin, end) in zip((self.ranks, self.nodes), ends, strict=True):
                for sums, each in zip(totals, (self.rows_of, self.none_of), strict=True):
                    sums[begin] -= each[expert]
                    sums[end] += each[expert]
            if expert >= 0:
                self.holds[expert, source], self.holds[expert, target] = False, True


def relabelled(placement: ExpertPlacement, before: ExpertPlacement, node_of: Array) -> ExpertPlacement:
    """Give each rank's experts to the rank that has most of them already: as good a placement, and
    fewer moves.

    Nodes are matched first, so that experts that share a node still do.
    """
    import numpy as np

    theirs = np.vstack(
        [before.copies, np.zeros((1, before.num_ranks), dtype=np.int64)]
    )  # the last row: of an empty slot
    common = theirs[placement.slots].sum(1)  # [its ranks, ranks as they were]
    num_nodes = int(node_of[-1]) + 1
    per_node = len(node_of) // num_nodes
    of_nodes = common.reshape(num_nodes, per_node, num_nodes, per_node).sum((1, 3))
    slots = np.empty_like(placement.slots)
    for node, old_node in _matched(of_nodes):
        first, at = node * per_node, old_node * per_node
        for begin, there in _matched(common[first : first + per_node, at : at + per_node]):
            slots[at + there] = placement.slots[first + begin]
    return ExpertPlacement(slots, placement.num_experts, before.homes)


def _matched(common: Array) -> Iterator[tuple[int, int]]:
    """Pairs of rows and columns, each once, the largest entry that is left first; of equal ones the
    first."""
    import numpy as np

    rows, columns = set(range(common.shape[0])), set(range(common.shape[1]))
    for entry in np.argsort(-common, axis=None, kind="stable").tolist():
        row, column = divmod(entry, common.shape[1])
        if row in rows and column in columns:
            rows.remove(row)
            columns.remove(column)
            yield row, column
            if not rows:
                return
