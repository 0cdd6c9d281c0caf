"""The choice of a placement: keep what is, migrate experts, replicate some, send weights along, or
several of these; and why.

Five *forms* are compared on one price: keeping, a placement without copies, one with copies, a
placement on top of which weights are sent along in every step, and that alone.

Nothing is chosen that is not predicted faster than keeping, by more than the error of the curves in
what differs and by more than one in a hundred: loads are forecasts, and a migration that returns
little is a risk. A decision depends on the load and the profile alone, so ranks that agree on these
agree on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from commlayer.profiles.counted import counted
from commlayer.profiles.errors import UsageError
from commlayer.profiles.profile import Profile
from commlayer.scheduler.placement.eplb import balanced_packs, eplb_placement
from commlayer.scheduler.placement.expert_loads import ExpertLoads
from commlayer.scheduler.placement.expert_placement import Array, ExpertMove, ExpertPlacement
from commlayer.scheduler.placement.placement_price import (
    ExpertWork,
    LayerLoad,
    LayerPrice,
    PlacementPrices,
)
from commlayer.scheduler.placement.placement_search import LEAST_GAIN, Placer, relabelled
from commlayer.scheduler.placement.spilled_rows import Spilled

__all__ = [
    "PlacementCandidate",
    "PlacementDecision",
    "PlacementForm",
    "PlacementKind",
    "PlacementRoom",
    "place",
    "place_layer",
]

PlacementKind = Literal["keep", "eplb", "greedy", "local", "spill"]
PlacementForm = Literal["keep", "without copies", "with copies", "with spilling", "spilling alone"]
_MANY, _FEW = 8, 2
"""How many exchanges are looked for; fewer from a packing that is even already."""


@dataclass(frozen=True, slots=True)
class PlacementCandidate:
    """A placement that was priced. ``form``: what it does. ``migration_us``: once. ``total_us``: of
    all steps of the horizon and the migration."""

    kind: PlacementKind
    form: PlacementForm
    placement: ExpertPlacement
    step: LayerPrice
    migration_us: float
    total_us: float
    spilled: Spilled = ()


@dataclass(frozen=True)
class PlacementDecision:
    """The decision for one layer.

    ``moves``: which expert goes from which rank to which. ``spilled``: whose weights go along in
    each step. ``candidates``: all that were priced, keeping first. ``error``: of the curves, as a
    fraction.
    """

    chosen: PlacementCandidate
    candidates: tuple[PlacementCandidate, ...]
    moves: tuple[ExpertMove, ...]
    moved_bytes: int
    horizon: int
    error: float

    @property
    def placement(self) -> ExpertPlacement:
        return self.chosen.placement

    @property
    def spilled(self) -> Spilled:
        return self.chosen.spilled

    @property
    def kept(self) -> PlacementCandidate:
        return self.candidates[0]

    @property
    def best(self) -> dict[PlacementForm, PlacementCandidate]:
        """The fastest candidate of each form, the fastest form first. Of keeping there is one; of
        what was not found, none."""
        best: dict[PlacementForm, PlacementCandidate] = {}
        for each in sorted(self.candidates, key=_total_us):
            best.setdefault(each.form, each)
        return best

    @property
    def gain(self) -> float:
        """The part of the time of all steps that is predicted to be saved, migration included; 0.0
        where all is kept."""
        return 1 - self.chosen.total_us / self.kept.total_us if self.kept.total_us else 0.0

    def reason(self) -> str:
        """Say what was decided, why, and what is expected of it."""
        keep, chosen = self.kept.step, self.chosen.step
        before = f"the busiest rank has {keep.busiest:.2f} times the mean, a step takes {_ms(keep.total_us)}"
        if self.chosen.kind == "keep":
            best = min(self.candidates, key=_total_us)
            if best.kind == "keep":
                return f"keep: {before}, and no placement is predicted to save anything over {self.horizon} steps"
            gain = 1 - best.total_us / self.kept.total_us
            saved = f"{best.kind} ({best.form}) would save {gain:.1%} over {self.horizon} steps"
            return f"keep: {before}; {saved}, less than the curves and a forecast allow to promise"
        parts = {
            "computation": keep.compute_us - chosen.compute_us,
            "exchanges": keep.exchange_us - chosen.exchange_us,
        }
        costs = {
            "replicas' gradients": chosen.gradient_us,
            "weights that go along": chosen.spill_us,
        }
        hidden_us = chosen.sent_us - chosen.spill_us
        saves = ", ".join(f"{_ms(us)} of {name}" for name, us in parts.items() if us > 0) or "nothing"
        spends = ", ".join(f"{_ms(us)} of {name}" for name, us in costs.items() if us > 0)
        words = f"{self.chosen.kind} ({self.chosen.form}): {before}; then {chosen.busiest:.2f} times, and "
        words += f"{_ms(chosen.total_us)}: saves {saves} a step"
        words += f", costs {spends}" if spends else ""
        words += f", hides {_ms(hidden_us)} of weights that go along behind computation" if hidden_us > 0 else ""
        if self.moves:
            pays = self.chosen.migration_us / max(keep.total_us - chosen.total_us, 1e-9)
            words += (
                f"; {counted(len(self.moves), 'copy moves', 'copies move')}, {self.moved_bytes / 1e9:.3g} GB, "
                f"once {_ms(self.chosen.migration_us)}, paid back after {max(1, round(pays))} of "
                f"{counted(self.horizon, 'step')}"
            )
        others = ", ".join(
            f"{form} {_ms(each.total_us / self.horizon)}"
            for form, each in self.best.items()
            if form != self.chosen.form
        )
        return f"{words}. A step with its part of the migration: {_ms(self.chosen.total_us / self.horizon)}; {others}"


@dataclass(frozen=True, slots=True)
class PlacementRoom:
    """The room that a placement has: ``spare_bytes`` of memory on each rank for replicas; groups of
    experts to which routing is limited (EPLB's hierarchy). ``may_copy``: whether an expert may lie
    on several ranks. ``may_spill``: whether weights may go along in a step; ``decision_us``: what
    deciding on that takes in each micro-batch, on the ranks themselves."""

    spare_bytes: int = 0
    num_groups: int = 1
    may_copy: bool = True
    may_spill: bool = True
    decision_us: float = 0.0

    def spare_slots(self, work: ExpertWork) -> int:
        """Count the replicas that fit on a rank, with their gradients and their optimizer's
        state."""
        return self.spare_bytes // work.copy_bytes if work.copy_bytes else 0


def place(
    loads: ExpertLoads | Array,
    profile: Profile,
    horizon: int,
    *,
    work: ExpertWork,
    top_k: int | None = None,
    before: tuple[ExpertPlacement, ...] | None = None,
    room: PlacementRoom | None = None,
    prices: PlacementPrices | None = None,
) -> tuple[PlacementDecision, ...]:
    """Decide for every layer where its experts shall lie in the next ``horizon`` steps.

    Args:
        loads: recorded, of which the forecast counts; or the expected counts of a step, [layers,
            experts], with ``top_k``.
        profile: of the expert group: its ranks on its nodes are those of the profile's topology.
        before: where experts lie now, for each layer; unless given, in order.
        room: for replicas; unless given, none.
        prices: of the same profile and work, made before: their tables take some milliseconds.

    Raises:
        UsageError: a horizon below one, loads without choices of a token, placements of other
            layers, experts or ranks.
        PlanError: a profile without curves for such exchanges.
    """
    if horizon < 1:
        raise UsageError(f"a horizon of {horizon} steps: expected at least one")
    prices, room = prices or PlacementPrices(profile, work), room or PlacementRoom()
    if isinstance(loads, ExpertLoads):
        expected, top_k = loads.forecast(horizon), loads.top_k
    else:
        expected = loads
    if top_k is None or expected.ndim != 2:
        raise UsageError("expected counts [layers, experts] and top_k, or recorded loads, which have both")
    spare = room.spare_slots(work)
    experts = expected.shape[1]
    before = before or (ExpertPlacement.in_order(experts, prices.times.num_ranks, spare),) * len(expected)
    if len(before) != len(expected):
        raise UsageError(f"expected a placement for each of {len(expected)} layers, got {len(before)}")
    return tuple(
        place_layer(LayerLoad(counts, top_k), prices, placement, horizon, room)
        for counts, placement in zip(expected, before, strict=True)
    )


def place_layer(
    load: LayerLoad,
    prices: PlacementPrices,
    before: ExpertPlacement,
    horizon: int,
    room: PlacementRoom,
) -> PlacementDecision:
    """Decide for one layer; see :func:`place`."""
    placer = Placer(prices, load, before, horizon)
    keep = _priced(placer, "keep", before)
    has_busy = keep.step.busiest > 1 + LEAST_GAIN  # else there is nothing to even out
    others = _candidates(placer, room) if has_busy else []
    error = prices.times.profile.error

    def is_sure(each: PlacementCandidate) -> bool:
        """Whether the gain is left where every curve errs against it by the profile's error, in
        what differs."""
        doubt_us = horizon * each.step.doubt_us(keep.step, error) + error * each.migration_us
        return keep.total_us - each.total_us > max(doubt_us, LEAST_GAIN * keep.total_us)

    chosen = min(filter(is_sure, others), key=_total_us, default=keep)
    moves = chosen.placement.moves_from(before, prices.times.node_of)
    moved_bytes = len(moves) * (prices.work.weight_bytes + prices.work.state_bytes)
    return PlacementDecision(chosen, (keep, *others), moves, moved_bytes, horizon, error)


def _candidates(placer: Placer, room: PlacementRoom) -> list[PlacementCandidate]:
    prices, before = placer.prices, placer.before
    node_of = prices.times.node_of
    candidates = []
    slots = before.slots.size
    packed = None
    if slots <= before.num_experts * before.num_ranks and not before.num_experts % room.num_groups:
        eplb = eplb_placement(
            placer.load.counts,
            slots,
            before.num_ranks,
            num_nodes=prices.times.num_nodes,
            num_groups=room.num_groups,
        )
        packed = relabelled(eplb, before, node_of)
        candidates.append(_priced(placer, "eplb", packed))
    if slots > before.num_experts and not before.num_experts % before.num_ranks:
        packed = relabelled(_packed(placer), before, node_of)
    has_room = slots > int(before.logcnt.sum())  # then replicas do what exchanges would
    moved = [_priced(placer, "local", placer.exchanged(before, _FEW if has_room else _MANY))]
    if packed is not None:
        moved.append(_priced(placer, "greedy", packed if has_room else placer.exchanged(packed, _FEW)))
    candidates += moved
    best = min(moved, key=_total_us)
    if room.may_copy and (best.placement.slots < 0).any():
        candidates.append(_priced(placer, best.kind, placer.replicated(best.placement)))
    if not room.may_copy:
        candidates = [each for each in candidates if not each.placement.has_replicas]
    if not room.may_spill:
        return candidates
    # What may be sent along on top of where experts lie, and of the best placements without and
    # with copies.
    bases = {before: None}
    for form in ("without copies", "with copies"):
        of_form = [each for each in candidates if each.form == form]
        if of_form:
            bases[min(of_form, key=_total_us).placement] = None
    parts = [(base, spilled) for base in bases if (spilled := placer.spilled(base))]
    spilling = [_priced(placer, "spill", base, spilled, room.decision_us) for base, spilled in parts]
    return [*candidates, *spilling]


def _total_us(candidate: PlacementCandidate) -> float:
    return candidate.total_us


def _packed(placer: Placer) -> ExpertPlacement:
    """One copy of each expert, packed evenly, beside the empty slots."""
    import numpy as np

    before = placer.before
    rank_of = balanced_packs(placer.load.counts, before.num_ranks)
    slots = np.full_like(before.slots, -1)
    each = before.num_experts // before.num_ranks
    slots[:, :each] = np.argsort(rank_of, kind="stable").reshape(before.num_ranks, each)
    return ExpertPlacement(slots, before.num_experts)


def _priced(
    placer: Placer,
    kind: PlacementKind,
    placement: ExpertPlacement,
    spilled: Spilled = (),
    decision_us: float = 0.0,
) -> PlacementCandidate:
    is_as_before = (placement.copies == placer.before.copies).all()
    form: PlacementForm
    if spilled:
        form = "spilling alone" if is_as_before else "with spilling"
    elif is_as_before:
        form = "keep"
    else:
        form = "with copies" if placement.has_replicas else "without copies"
    step, migration_us = placer.step(placement, spilled), placer.migration_us(placement)
    decisions_us = decision_us * placer.prices.work.micro_batches
    return PlacementCandidate(
        kind,
        form,
        placement,
        replace(step, spill_us=step.spill_us + decisions_us),
        migration_us,
        placer.total_us(placement, spilled) + placer.horizon * decisions_us,
        spilled,
    )


def _ms(us: float) -> str:
    return f"{us / 1e3:.4g} ms"
