"""The rounds of an :class:`~commlayer.integrations.moe.expert_placer.ExpertPlacer`: loads are
summed over a stage, its rank 0 forecasts from them and searches, on a thread of its own, and says
in every step whether it has found something.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from commlayer.collectives import GroupCommunicator
from commlayer.failures.waits import on_a_thread
from commlayer.integrations.moe.expert_migration import moved_bytes
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.measuring import Measurements, work_of_experts
from commlayer.integrations.moe.migration_times import PlacementPromise
from commlayer.integrations.moe.observed_loads import ObservedLoads
from commlayer.integrations.moe.replica_gradients import slots_of
from commlayer.profiles.errors import CommlayerError
from commlayer.profiles.profile import Profile
from commlayer.scheduler.placement.expert_placement import Array
from commlayer.scheduler.placement.placement_price import ExpertWork, LayerLoad, PlacementPrices
from commlayer.scheduler.placement.placing import PlacementDecision, PlacementRoom, place_layer

__all__ = [
    "FAILED",
    "MOVE",
    "NOT_YET",
    "STAY",
    "PlacementAnswer",
    "PlacementRounds",
    "PlacementSearch",
    "is_spilling",
    "measured_work",
    "profile_of",
    "spills_by_llep",
]

NOT_YET, STAY, MOVE, FAILED = range(4)


@dataclass(frozen=True)
class PlacementAnswer:
    """The outcome of a search.

    Attributes:
        kind: whether anything changes: STAY, MOVE or FAILED.
        words: why.
        message: what all ranks are told: for each layer whether it spills, then all slots; None:
            nothing changes.
        promise: what the decision is expected to bring.
    """

    kind: int
    words: str
    message: Array | None = None
    promise: PlacementPromise | None = None


class PlacementRounds:
    """The rounds of one placer, one after the other. Ranks take the same steps at the same time.

    Args:
        layers: whose experts can be placed.
        optimizers: whose state goes with an expert.
        group: the ranks of the stage.
        every: steps between two decisions; 0: there are no rounds.
        horizon, profile, work: see :class:`PlacementSearch`.

    Attributes:
        loads: what has been seen of them.
        are_over: no other round begins.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        optimizers: Sequence[Optimizer],
        group: GroupCommunicator,
        every: int,
        horizon: int,
        profile: Profile | None,
        work: ExpertWork | None,
    ) -> None:
        self._optimizers, self._group, self._every = optimizers, group, every
        self.loads = ObservedLoads(layers if every else (), max(every, 1))
        self._search = PlacementSearch(layers, self.loads, horizon, profile, work)
        self.are_over = not every
        self._work: dist.Work | None = None
        self._counts: torch.Tensor | None = None  # that are being summed
        self._outcome: Future[PlacementAnswer] | None = None  # on rank 0
        self._message = torch.zeros(1 + sum(1 + slots_of(layer).num_slots for layer in layers), dtype=torch.int64)

    def advance(self) -> tuple[int, torch.Tensor, PlacementAnswer | None] | None:
        """Take the next step of a round of loads, search and answer; begin a round that is due.

        Returns what rank 0 has said, in the step in which all ranks read it: the kind of answer,
        its message, and, on rank 0, all of it.
        """
        if self._work is None:
            if self.loads.num_steps >= self._every:
                self._search.measure(self._optimizers)
                self._counts = self.loads.round()
                self._work = dist.all_reduce(self._counts, group=self._group.group, async_op=True)
            return None
        self._work.wait()
        if self._counts is not None:
            self.loads.learn(self._counts)
            self._counts = None
            if not self._group.rank:
                self._outcome = on_a_thread(self._search.decide)
            self._ask()
            return None
        kind = int(self._message[0])
        if kind == NOT_YET:
            self._ask()
            return None
        outcome = None if self._outcome is None else self._outcome.result()
        self._work = self._outcome = None
        return kind, self._message[1:], outcome

    def _ask(self) -> None:
        """Send what rank 0 has found so far to all; nobody waits for it."""
        self._message.zero_()
        if self._outcome is not None and self._outcome.done():
            outcome = self._outcome.result()
            self._message[0] = outcome.kind
            if outcome.message is not None:
                self._message[1:] = torch.as_tensor(outcome.message)
        source = self._group.ranks[0]
        self._work = dist.broadcast(self._message, source, group=self._group.group, async_op=True)

    def end(self) -> None:
        """Begin no other round, and forget loads. Sends nothing, and waits for nothing."""
        self.are_over = True
        self.loads.close()

    def drop(self) -> None:
        """Give up the round under way, once what is on its way has come."""
        work, self._work = self._work, None
        self._counts = self._outcome = None
        if work is not None:
            work.wait()


class PlacementSearch:
    """The search for all layers' placements, and the prices by which they are compared.

    Args:
        layers: whose experts can be placed.
        loads: of them.
        horizon: steps over which a migration shall pay back.
        profile: of the expert group; None: see :func:`profile_of`.
        work: what an expert costs; None: :meth:`measure` finds it.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        loads: ObservedLoads,
        horizon: int,
        profile: Profile | None,
        work: ExpertWork | None,
    ) -> None:
        self._layers = layers
        self._loads = loads
        self._horizon = horizon
        self._profile = profile
        self._works = [] if work is None else [work] * len(layers)
        self._is_measured = work is None
        self._prices: dict[tuple[Profile, ExpertWork], PlacementPrices] = {}
        self._price_spills()

    def measure(self, optimizers: Sequence[Optimizer]) -> None:
        """Find what experts cost, unless that is known. Collective over EP and ETP."""
        if not self._works:
            batches = self._loads.micro_batches
            self._works = [measured_work(layer, optimizers, batches) for layer in self._layers]
            self._price_spills()

    def _price_spills(self) -> None:
        """Have layers spill by the prices by which they are placed."""
        for layer, work in zip(self._layers, self._works, strict=False):
            if layer.dispatcher.spiller is not None:
                layer.dispatcher.spiller.price_by(work)

    def decide(self) -> PlacementAnswer:
        """Search, on a thread of rank 0: training goes on without what fails here."""
        try:
            return self._decided()
        except Exception as error:  # noqa: BLE001  said by the placer
            kind = "" if isinstance(error, CommlayerError) else f"{type(error).__name__}: "
            return PlacementAnswer(FAILED, f"{kind}{error}")

    def _decided(self) -> PlacementAnswer:
        placements = [slots_of(layer).placement for layer in self._layers]
        decisions = []
        spills: list[bool] = []
        for index, counts in enumerate(self._loads.expected(self._horizon)):
            layer = self._layers[index]
            config, spiller = layer.router.config, layer.dispatcher.spiller
            room = PlacementRoom(
                num_groups=config.num_groups or 1,
                may_copy=not spills_by_llep(layer),
                may_spill=spiller is not None and spiller.spilling.rule == "priced",
                decision_us=0.0 if spiller is None else spiller.decision_us,
            )
            # The prices of the layer are those by which it spills, where it does.
            work, own = self._works[index], None if spiller is None else spiller.spilling.work
            if self._is_measured and own is not None:
                work = replace(own, state_bytes=work.state_bytes, micro_batches=work.micro_batches)
            profile = profile_of(layer, self._profile)
            assert profile is not None  # required when the placer was made
            if (profile, work) not in self._prices:
                self._prices[profile, work] = PlacementPrices(profile, work, layer.dispatcher.grid.ep.shape)
            load, prices = LayerLoad(counts, config.top_k), self._prices[profile, work]
            decision = place_layer(load, prices, placements[index], self._horizon, room)
            decisions.append(decision)
            # By LLEP's rule always; by prices where that was chosen, and where experts stay and
            # it does already: each call decides for itself, and where nothing would be gained
            # nothing spills.
            goes_on = not decision.moves and is_spilling(layer)
            spills.append(spiller is not None and (not room.may_copy or bool(decision.spilled) or goes_on))
        settled = [each.placement.settled_from(old) for each, old in zip(decisions, placements, strict=True)]
        each_layer = list(zip(self._layers, decisions, strict=True))
        changes = any(each.moves for each in decisions) or spills != list(map(is_spilling, self._layers))
        promise = PlacementPromise(
            sum(each.chosen.migration_us for each in decisions),
            sum(_now_us(*each) - each[1].chosen.step.total_us for each in each_layer),
        )
        slots = [each.slots.reshape(-1) for each in settled]
        message = np.concatenate([np.array(spills, dtype=np.int64), *slots])
        return PlacementAnswer(MOVE if changes else STAY, _in_words(decisions), message, promise)


def measured_work(
    layer: MoELayer, optimizers: Sequence[Optimizer] = (), micro_batches: int = 1, *, tokens: int = 0
) -> ExpertWork:
    """Find what an expert of ``layer`` costs: its time is measured, its bytes are counted.
    Collective over EP and ETP: all ranks measure at once, and agree on the medians.

    ``optimizers``: whose state goes with an expert. ``tokens``: of all ranks in a call; 0: as many
    as were measured before, by the layer's calls. Raises what measuring raises here;
    DisagreementError where it failed on another rank.
    """
    weight_bytes = sum(parameter.nbytes for parameter in layer.experts.parameters()) // layer.experts.count
    state_bytes = max(0, moved_bytes(layer, optimizers) - weight_bytes)
    measured, top_k = Measurements(layer.dispatcher.grid), layer.router.config.top_k
    return work_of_experts(layer.experts, measured, top_k, tokens, state_bytes=state_bytes, micro_batches=micro_batches)


def profile_of(layer: MoELayer, profile: Profile | None) -> Profile | None:
    """The profile by which one layer's experts are placed: ``profile``, that by which it spills, or
    that by which its group plans its calls."""
    spiller = layer.dispatcher.spiller
    return profile or (spiller and spiller.spilling.profile) or layer.dispatcher.grid.ep.profile


def is_spilling(layer: MoELayer) -> bool:
    return layer.dispatcher.spiller is not None and layer.dispatcher.spiller.is_on


def spills_by_llep(layer: MoELayer) -> bool:
    spiller = layer.dispatcher.spiller
    return spiller is not None and spiller.spilling.rule == "llep"


def _now_us(layer: MoELayer, decision: PlacementDecision) -> float:
    """The price of a layer's step as it is: spilling, where it does."""
    alone = decision.best.get("spilling alone")
    if alone is None or not is_spilling(layer):
        return decision.kept.step.total_us
    return min(alone.step.total_us, decision.kept.step.total_us)


def _in_words(decisions: Sequence[PlacementDecision]) -> str:
    """Say what was decided for all layers, and why for the one that gains most."""
    best = max(decisions, key=lambda each: each.kept.total_us - each.chosen.total_us)
    forms = Counter(each.chosen.form for each in decisions)
    if set(forms) == {"keep"}:
        return best.reason()
    moved = [each for each in decisions if each.moves]
    before_us = sum(each.kept.step.total_us for each in decisions)
    after_us = sum(each.chosen.step.total_us for each in decisions)
    words = f"{sum(len(each.moves) for each in moved)} copies move in {len(moved)} of {len(decisions)} layers"
    words += f" ({', '.join(f'{number} {form}' for form, number in sorted(forms.items()))}); "
    words += f"their steps are predicted to take {after_us / 1e3:.4g} ms in place of {before_us / 1e3:.4g}"
    return f"{words}. {best.reason()}"
