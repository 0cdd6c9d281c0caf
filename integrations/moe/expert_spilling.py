"""Spilling of one dispatcher: between the exchange of counts and that of tokens, who computes rows
of whom for this call.

The counts that ranks tell each other anyway are all that a decision needs
(:mod:`commlayer.scheduler.placement.spilling`). Where the load is so even that nothing can pay, by
whole numbers that all ranks have alike, nothing more happens. Else every rank decides, and they
compare what they found, in one small exchange, before a token moves: prices are floating-point
numbers, which other processors may round otherwise, and a rank that sent its tokens elsewhere would
hang all of them. What tokens reach on two levels, which changes with the decision, is told in the
same exchange.

For this call the ranks then have *guests* behind their own experts; choices of what spills are
changed into choices of guests, and all that comes after, in whatever way tokens go, knows experts
of this call alone.

Shapes: T tokens of this rank, K choices of each, P places: experts in order, or the slots of all
ranks.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np
import torch

from commlayer.agree.messages import ControlMessage, Peers, from_first
from commlayer.integrations.moe.agreement import FINEST
from commlayer.integrations.moe.dispatch_groups import ExpertGrid
from commlayer.integrations.moe.expert_slots import ExpertSlots
from commlayer.integrations.moe.experts import GroupedExperts
from commlayer.integrations.moe.handle import ChoiceCounts
from commlayer.integrations.moe.lent_experts import LentExperts
from commlayer.integrations.moe.levels import RowsOnLevel
from commlayer.integrations.moe.measuring import Measurements, work_of_experts
from commlayer.integrations.moe.routing import who
from commlayer.profiles.errors import DisagreementError, PlanError, UsageError
from commlayer.profiles.profile import Profile, parse_profile
from commlayer.scheduler.placement.exchange_times import exchange_times
from commlayer.scheduler.placement.expert_placement import Array, ExpertPlacement
from commlayer.scheduler.placement.placement_price import ExpertWork, PlacementPrices
from commlayer.scheduler.placement.spilling import (
    SpillDecision,
    SpilledRows,
    Spilling,
    decide_spill,
    spilled_cells,
)
from commlayer.statistics import count_spill

__all__ = ["ExpertSpiller", "require_prices"]

_REFUSED = -1
_REMEMBERED = 9
"""How many decisions are remembered for how long one takes."""


class _Curves(ControlMessage, frozen=True):
    """The profile of an expert group, and how many ranks this has on each of its nodes."""

    profile: str
    nodes: tuple[int, ...]


class ExpertSpiller:
    """The spilling of one dispatcher, over the ranks of ``grid``.

    Attributes:
        decision: of the latest call whose load was uneven; None before the first, and where it was
            made before spilling was turned off.
        is_on: whether anything may spill; all ranks change it between the same two calls.

    Raises:
        UsageError: prices are asked for, and no profile says what exchanges of this expert group
            take.
    """

    def __init__(
        self,
        grid: ExpertGrid,
        slots: ExpertSlots | None,
        spilling: Spilling,
        used_by: str = "TokenDispatcher",
    ) -> None:
        self.spilling = spilling
        self._used_by = used_by
        self._grid, self._slots = grid, slots
        self._profile = None if spilling.rule == "llep" else spilling.profile or grid.ep.profile
        if spilling.rule == "priced" and grid.ep.size > 1:
            instead = "take spilling='llep', which knows no prices"
            require_prices(self._profile, grid.ep.shape, "spilling='priced'", instead)
        self._measured = Measurements(grid)
        self._prices: PlacementPrices | None = None
        self._work: ExpertWork | None = spilling.work
        self.is_on = True
        nodes = grid.ep.nodes
        if grid.etp.size > 1:  # whose EP groups may lie otherwise
            nodes = (tuple(range(grid.ep.size)),)
        self._node_of = [next(a for a, members in enumerate(nodes) if k in members) for k in range(grid.ep.size)]
        self.decision: SpillDecision | None = None
        self._took_us: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def decision_us(self) -> float:
        """The time of this rank's latest decisions, and of what a call's choices become by them,
        µs, median; 0: none yet."""
        took_us = tuple(self._took_us)  # a placer asks on a thread of its own
        return median(took_us) if took_us else 0.0

    @property
    def number(self) -> int:
        """A number below 2¹⁸ of how this is set up, which all ranks must have alike: different ones
        differ, but for chance."""
        rule, thresholds, work = self.spilling.rule, self.spilling.thresholds, self.spilling.work
        profile = None if self.spilling.profile is None else self.spilling.profile.fingerprint
        return 1 + zlib.crc32(repr((rule, thresholds, profile, work)).encode()) % ((1 << 18) - 1)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it decides by numbers, and talks to others
    def spill(self, layout: ChoiceCounts, experts: GroupedExperts) -> tuple[ChoiceCounts, LentExperts | None]:
        """Decide for one call: how its choices go then, and what this rank lends and is lent (None:
        no rank does). Collective where the load is uneven.

        Raises DisagreementError where ranks decided differently.
        """
        if not self.is_on:
            self.decision = None  # an earlier one is no longer what is done
        if not (self.is_on and self.spilling.is_for(layout.gathered_rows)):
            return layout, None
        if self.spilling.rule == "priced" and self._prices is None:
            profile, nodes = self._agreed_curves()
            top_k, tokens = layout.indices.shape[1], sum(layout.tokens)
            work = self._work or work_of_experts(experts, self._measured, top_k, tokens)
            self._prices = PlacementPrices(profile, work, nodes)
        message = torch.zeros(1 + self._grid.num_reached, dtype=torch.int64)
        began = time.perf_counter()
        try:
            decision = self._decide(layout)
            spilled = self._spilled(layout, decision.parts) if decision.parts else layout
            message[0] = zlib.crc32(repr(decision.parts).encode())
            if decision.parts and spilled.grid.levels is not None:
                reached = spilled.grid.levels.reached(spilled.indices).cpu()
                message[1 : 1 + len(reached)] = reached
            self._took_us.append((time.perf_counter() - began) * 1e6)
        except Exception:  # the others must hear of it before it is raised, or they wait for this rank
            message[0] = _REFUSED
            self._grid.all.all_gather(message.unsqueeze(0))
            raise
        everyone = self._grid.all.all_gather(message.unsqueeze(0))
        _require_one(self._grid, everyone[:, 0].tolist(), decision)
        self.decision = decision
        self._count(decision, experts)
        if not decision.parts:
            return layout, None
        if spilled.grid.levels is not None:
            spilled = replace(spilled, on_levels=RowsOnLevel.of_call(spilled.grid.levels, everyone[:, 1:]))
        return spilled, self._lent(decision.parts)

    def _count(self, decision: SpillDecision, experts: GroupedExperts) -> None:
        each, rank = sum(weight[0].nbytes for weight in experts.weights), self._grid.ep.rank
        sources, targets = decision.ends
        count_spill(
            self._used_by,
            self._grid.all.ranks,
            decision.rule,
            experts=len(decision.parts),
            rows=sum(part.rows for part in decision.parts),
            weight_bytes=(each * sources.count(rank), each * targets.count(rank)),
            reason=decision.reason(),
        )

    def price_by(self, work: ExpertWork) -> None:
        """Price by ``work``, which all ranks have alike, from the next uneven call on, unless the
        rule came with its own."""
        if self.spilling.work is None and self.spilling.rule == "priced":
            self._work, self._prices = replace(work, micro_batches=1), None

    def _decide(self, layout: ChoiceCounts) -> SpillDecision:
        if self._slots is None:
            placement = ExpertPlacement.in_order(self._grid.num_experts, self._grid.ep.size)
        else:
            placement = self._slots.placement
        counts, (experts, ranks) = layout.counts.sum((0, 1, 2)).numpy(), placement.held
        rows = np.zeros((placement.num_experts, placement.num_ranks), dtype=np.int64)
        rows[experts, ranks] = counts[_places(self._slots, experts, ranks)]
        return decide_spill(rows, placement, layout.indices.shape[1], self.spilling, self._prices)

    # What a decision means for a call

    def _spilled(self, layout: ChoiceCounts, parts: Sequence[SpilledRows]) -> ChoiceCounts:
        """The counts and choices of a call with guests."""
        grid = self._grid
        places = _places(self._slots, *(np.array([part[at] for part in parts]) for at in (0, 1))).tolist()
        spilled = [(place, part.target, part.rows) for place, part in zip(places, parts, strict=True)]
        before = layout.counts.numpy()
        cells = spilled_cells(before, spilled, self._node_of)
        targets = [part.target for part in parts]
        widened = grid.with_guests([targets.count(rank) for rank in range(grid.ep.size)])
        # Places are numbered anew, each rank's guests in turn behind its own.
        own, coming = np.arange(grid.num_experts), []
        shift = at = 0
        for each, num_guests in zip(grid.experts, widened.guests, strict=True):
            own[at : at + each] += shift
            at += each
            coming.append(iter(range(at + shift, at + shift + num_guests)))
            shift += num_guests
        guests = [next(coming[target]) for target in targets]
        counts = np.zeros((*before.shape[:-1], widened.num_experts), dtype=before.dtype)
        counts[..., own] = before
        for at, place in enumerate(places):
            counts[..., own[place]] -= cells[at]
            counts[..., guests[at]] = cells[at]
        rank, more = grid.ep.rank, grid.etp.rank
        indices = _renumbered(layout.indices, before[rank, more], own, guests, places, cells[:, rank, more])
        return replace(layout, grid=widened, indices=indices, counts=torch.from_numpy(counts), on_levels=None)

    def _lent(self, parts: Sequence[SpilledRows]) -> LentExperts | None:
        rank = self._grid.ep.rank
        own = [part for part in parts if part.source == rank]
        places = _places(self._slots, np.array([part.expert for part in own], dtype=np.int64), np.full(len(own), rank))
        here = (places - self._grid.first_local_expert).tolist()
        lent = [(place, part.target) for place, part in zip(here, own, strict=True)]
        guests = [part.source for part in parts if part.target == rank]
        return LentExperts(self._grid.ep, lent, guests) if lent or guests else None

    # Prices

    def _agreed_curves(self) -> tuple[Profile, tuple[int, ...]]:
        """The profile by which all ranks price, and the ranks on each node that it is for.
        Collective.

        The expert groups that share tokens over ETP may lie on other nodes, and have other
        profiles: then all take those of the first rank, because all must decide alike.
        """
        grid = self._grid
        assert self._profile is not None  # required when this was made
        digest = zlib.crc32(repr((self._profile.fingerprint, grid.ep.shape)).encode())
        if len(set(grid.all.all_gather(torch.tensor([digest])).tolist())) == 1:
            return self._profile, grid.ep.shape
        own, peers = _Curves(self._profile.to_json(), grid.ep.shape), Peers.of(grid.all.group)
        curves = from_first(own, _Curves, peers, None, "to agree on the prices by which experts spill")
        return parse_profile(curves.profile, f"the profile that rank {grid.all.ranks[0]} prices by"), curves.nodes


def _places(slots: ExpertSlots | None, experts: Array, ranks: Array) -> Array:
    """The place of each expert's copy on a rank, among those of all ranks."""
    if slots is None:
        return experts
    held = slots.placement.slots
    at = (held[ranks] == np.asarray(experts)[:, None]).argmax(1)
    return ranks * held.shape[1] + at


def _require_one(grid: ExpertGrid, digests: Sequence[int], decision: SpillDecision) -> None:
    """Raise DisagreementError where the ranks' decisions have different digests."""
    own = digests[grid.all.rank]
    other = next((place for place, digest in enumerate(digests) if digest != own), None)
    if other is None:
        return
    ranks = f"rank {grid.all.ranks[grid.all.rank]}: rank {grid.all.ranks[other]}"
    if digests[other] == _REFUSED:
        raise DisagreementError(f"{ranks} could not decide which experts spill, so nothing was sent: look at its log")
    raise DisagreementError(
        f"{ranks} decided otherwise which experts spill, so nothing was sent. Here: {decision.reason()}. "
        "Other processors or versions may price differently: take spilling='llep', which knows no prices"
    )


def require_prices(profile: Profile | None, nodes: Sequence[int], what: str, instead: str) -> None:
    """Raise UsageError unless ``profile`` can price exchanges of an expert group with so many ranks
    on each of ``nodes``.

    ``what`` was asked for, and ``instead`` says what else to do: for the message.
    """
    if profile is None:
        raise UsageError(
            f"{who()}{what}: there is no profile of the expert group: name one in COMMLAYER_PROFILE, or {instead}"
        )
    try:
        exchange_times(profile, tuple(nodes))
    except PlanError as error:
        raise UsageError(f"{who()}{what}: {error}; or {instead}") from error


def _renumbered(
    indices: torch.Tensor,
    counts: Array,
    own: Array,
    guests: Sequence[int],
    places: Sequence[int],
    moved: Array,
) -> torch.Tensor:
    """The choices ``indices`` [T, K] of places as those of places and guests; of each part of the
    tokens the first choices of a place stay, and the others go to its helpers in turn. ``counts``
    [F, P] of this rank's choices, ``moved`` [parts, F].

    What counts say is worked out in numpy, for which so few numbers are quick; choices are touched
    on their device, once each.
    """
    device = indices.device
    numbers_of_choices = torch.from_numpy(np.append(own, -1)).to(device)[indices].reshape(-1)
    of_places = counts.sum(0)
    ends = of_places.cumsum() + (indices.numel() - of_places.sum())  # dropped choices are the first when sorted
    order = torch.sort(indices.reshape(-1), stable=True).indices
    sequences, positions = [], []
    for place in dict.fromkeys(places):
        helpers = [at for at, each in enumerate(places) if each == place]
        numbers = [own[place], *(guests[at] for at in helpers)]
        stay = counts[:, place] - moved[helpers].sum(0)
        repeats = np.vstack([stay, moved[helpers]]).T  # [F, 1 + helpers]
        sequences.append(np.tile(numbers, FINEST).repeat(repeats.reshape(-1)))
        positions.append(np.arange(ends[place] - len(sequences[-1]), ends[place]))
    at, numbers_there = (torch.from_numpy(np.concatenate(each)).to(device) for each in (positions, sequences))
    numbers_of_choices[order[at]] = numbers_there
    return numbers_of_choices.view(indices.shape)
