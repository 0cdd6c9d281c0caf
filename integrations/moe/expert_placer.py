"""Experts placed anew while a model trains: who decides, when all ranks switch, and what is said of it.

A *round* begins every so many steps. Ranks sum up the loads that they have seen since the last one; rank 0 of the stage forecasts
from them and searches, on a thread of its own, while training goes on; then it announces what it found, and all ranks begin to
send (:mod:`~commlayer.integrations.moe.expert_migration`), and switch before the optimizer's next step.

Where a layer spills by prices, the same decision says whether it does until the next one: placements and spilling are compared,
and used together, at the same prices. Ranks turn spilling on and off in the step in which all have read the announcement.

Sums, announcements and experts travel on a group of the placer's own, on the lowest lane. What a rank does in a step follows
from how many steps there were, and from what rank 0 has announced in the step before, which all ranks read in the same step. So
all switch at the same step, or none does. Rejected: an appointment in the store
(:mod:`commlayer.agree.appointments`), for calls that ranks make apart from each other, and which must exchange nothing;
here steps are what all ranks make together, and a message of some bytes, which nobody waits for, is cheaper than
threads that ask a store.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commlayer.agree.messages import ControlMessage, Peers, from_first, require_alike
from commlayer.auditing.placements import audit_placement
from commlayer.collectives import GroupCommunicator
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.expert_migration import ExpertMigration, Optimizer, StagePlaces, moved_bytes
from commlayer.integrations.moe.expert_slots import ExpertSlots
from commlayer.integrations.moe.expert_spilling import require_prices
from commlayer.integrations.moe.expert_work import measured_work
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.migration_times import MigrationTimes, PlacementPromise
from commlayer.integrations.moe.observed_loads import ObservedLoads
from commlayer.integrations.moe.planning import is_sharded
from commlayer.integrations.moe.replica_gradients import placed_layers
from commlayer.integrations.moe.routing import who
from commlayer.integrations.sharded_optimizer import ShardedOptimizer
from commlayer.integrations.spread_parameters import is_dtensor
from commlayer.profiles.errors import CommlayerError, UsageError
from commlayer.profiles.printable import say as say_on_stderr
from commlayer.profiles.profile import Profile
from commlayer.scheduler.placement.expert_placement import Array, ExpertPlacement
from commlayer.scheduler.placement.placement_price import ExpertWork, LayerLoad, PlacementPrices
from commlayer.scheduler.placement.placing import PlacementDecision, PlacementRoom, place_layer
from commlayer.settings import Settings
from commlayer.statistics import PlacementStats, note_placement

__all__ = ["ExpertPlacer"]

_NOT_YET, _KEEP, _MOVE, _FAILED = range(4)
_SLOTS = "expert_slots"


class _Nodes(ControlMessage, frozen=True):
    """The node of each rank of an expert group."""

    of_ranks: tuple[int, ...]


class ExpertPlacer:
    """The placer of a model's experts, called once in every training step, after the optimizer::

        model = MoELanguageModel(ModelConfig(…, spare_slots=1), mesh)
        placer = ExpertPlacer(model, optimizer, mesh, every=50)
        for step in …:
            optimizer.zero_grad()
            loss = model.train_step(tokens, labels)
            optimizer.step()
            placer.step()

    All ranks of the job make it, and call :meth:`step`, alike. Losses are those of experts in order: bit for bit without
    copies where tokens go by all_to_all and in the same chunks, and else up to the order of sums (docs/placement.md).

    Args:
        model: with MoE layers that were made with ``spare_slots``.
        optimizer: torch's, a ShardedOptimizer over edp, or several of them; elementwise ones, as SGD and Adam are. What it keeps
            for each element goes with an expert.
        mesh: of the model.
        every: steps between two decisions; 0: experts move only by :meth:`move_to`.
        horizon: steps over which a migration shall pay back; None: until the next decision.
        profile: of the expert group; None: the one by which the group plans its calls.
        work: what an expert costs; None: measured in the first round.
        say: told what was decided, in one line, on rank 0 of the stage; None: standard error.

    Attributes:
        num_migrations: that were made.

    Raises:
        UsageError: nothing that could be placed: layers without ``spare_slots``, one rank of EP, rows that are padded to a
            capacity, experts that FSDP shards, a ShardedOptimizer over other ranks than edp, no profile to decide by; or a
            number below its least.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        mesh: FoldedMesh,
        *,
        every: int = 50,
        horizon: int | None = None,
        profile: Profile | None = None,
        work: ExpertWork | None = None,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self._layers = placed_layers(model)
        self._optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        _check(self._layers, self._optimizers, mesh, every, horizon)
        self._every, self._horizon = every, horizon or max(every, 1)
        self._profile, self._work, self._say = profile, work, say or say_on_stderr
        for layer in self._layers if every else ():
            nodes = layer.dispatcher.grid.ep.shape
            require_prices(
                self._profile_of(layer), nodes, "ExpertPlacer", "pass profile=, or every=0 to move experts by hand"
            )
        self._group, self._world = GroupCommunicator(_own_group(mesh), "dp"), dist.group.WORLD
        self._places = StagePlaces.of(mesh, self._group)
        self._node_of = self._agreed_nodes()
        self._loads = ObservedLoads(self._layers if every else (), max(every, 1))
        self._works: list[ExpertWork] = []
        self._prices: dict[tuple[Profile, ExpertWork], PlacementPrices] = {}
        self._spills: list[bool] | None = None  # what is announced of spilling, while experts are on their way
        self._round: _Summing | _Deciding | None = None
        self._migration: ExpertMigration | None = None
        self._migration_times = MigrationTimes(self._group)
        self._reason = ""
        self._promise: PlacementPromise | None = None
        self._steps = 0
        self._is_off = self._is_closed = False
        self.num_migrations = 0
        self._handles = self._hook()
        if work is not None:
            self._price_spills([work] * len(self._layers))

    @property
    def placements(self) -> tuple[ExpertPlacement, ...]:
        """Where the experts of each layer lie now."""
        return tuple(_slots_of(layer).placement for layer in self._layers)

    @property
    def is_moving(self) -> bool:
        """Whether experts are on their way, to be computed elsewhere from the optimizer's next step on."""
        return self._migration is not None

    def step(self) -> None:
        """Note that a training step is over, and do what is due: mostly nothing. Collective over the stage, once a step, after
        the optimizer's.

        Raises PeerError and CollectiveTimeoutError as collectives do.
        """
        self._steps += 1
        for layer in self._layers:
            _slots_of(layer).has_summed = False
        if self._is_closed:
            return
        self._migration_times.end_step(is_moving=self.is_moving)
        if self._every and not self._is_off:
            self._loads.end_step()
            if self._migration is None:
                self._decide_on()
        self._migration_times.begin_step()

    def _decide_on(self) -> None:
        if self._round is not None:
            self._go_on(self._round)
        elif self._loads.num_steps >= self._every:
            self._begin_round()

    def move_to(self, placements: Sequence[ExpertPlacement], reason: str = "as told") -> None:
        """Begin to move all layers' experts to ``placements``, the same on all ranks; they are used from the
        optimizer's next step on. Collective over the stage, behind an optimizer's step.

        Raises UsageError for placements of other layers, experts, ranks or slots, for copies in a layer that spills by LLEP's
        rule, while experts are on their way, and after :meth:`close`; DisagreementError where ranks have others.
        """
        if self._is_closed:
            raise UsageError(f"{who()}this ExpertPlacer is closed, and moves no experts any more: make another one")
        if self.is_moving:
            raise UsageError(
                f"{who()}experts are on their way already: move them again after the optimizer's next step"
            )
        if len(placements) != len(self._layers):
            raise UsageError(
                f"{who()}expected a placement for each of {len(self._layers)} layers, got {len(placements)}"
            )
        settled = [new.settled_from(old) for new, old in zip(placements, self.placements, strict=True)]
        for place, (layer, new) in enumerate(zip(self._layers, settled, strict=True)):
            if new.has_replicas and _spills_by_llep(layer):
                raise UsageError(
                    f"{who()}layer {place} spills by LLEP's rule, which knows no copies of experts: expected a placement "
                    "with one copy of each, or a layer with spilling='priced'"
                )
        told = {f"the placement of layer {place}": str(each.slots.tolist()) for place, each in enumerate(settled)}
        if self._group.group is not None:
            require_alike(told, self._group.group, "to move experts")
        self._end_round()
        self._let_spill([True] * len(self._layers))  # what was decided was of other placements
        self._start(settled, reason, None)

    def close(self) -> None:
        """Give up what is under way, destroy the placer's group, and leave the optimizer alone from now on. Experts stay where
        they are, and cannot be moved any more. Collective over the stage. Harmless when repeated.

        Raises PeerError and CollectiveTimeoutError as collectives do, where something was under way.
        """
        if self._is_closed:
            return
        migration, under_way = self._leave()
        self._let_spill([True] * len(self._layers))
        if not dist.is_initialized() or dist.group.WORLD is not self._world:
            return  # the group went with its default group
        if migration is not None:
            migration.wait()  # all ranks have sent theirs: a group is destroyed with nothing on its way
        if under_way is not None:
            under_way.wait()
        self._migration_times.close()
        dist.destroy_process_group(self._group.group)

    def _leave(self) -> tuple[ExpertMigration | None, _Summing | _Deciding | None]:
        """Let go of the optimizer and of loads. Sends nothing; what is under way is the caller's."""
        for handle in self._handles:
            handle()
        found = self._migration, self._round
        self._handles, self._round, self._migration, self._is_off, self._is_closed = [], None, None, True, True
        self._loads.close()
        self._note_changing()
        return found

    def __enter__(self) -> ExpertPlacer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._is_closed:
            self._leave()  # others may know of no error, or be gone: the group ends with the default group

    # Rounds

    def _end_round(self) -> None:
        """Give up a round; what it has sent is waited for, so that the next one finds the group as all ranks know it."""
        under_way, self._round = self._round, None
        if under_way is not None:
            under_way.wait()

    def _begin_round(self) -> None:
        if self._work is None and not self._works:
            micro_batches = self._loads.micro_batches
            self._works = [measured_work(layer, self._optimizers, micro_batches) for layer in self._layers]
            self._price_spills(self._works)
        summed = self._loads.round()
        self._round = _Summing(summed, dist.all_reduce(summed, group=self._group.group, async_op=True))

    def _go_on(self, under_way: _Summing | _Deciding) -> None:
        """Do what the next step of a round is."""
        if isinstance(under_way, _Summing):
            under_way.wait()
            self._loads.learn(under_way.counts)
            self._round = _Deciding(self._group, self._message_size, self._decide)
            self._round.ask()
            return
        answer = under_way.answer()
        if answer == _NOT_YET:
            under_way.ask()
            return
        self._round = None
        found = under_way.found  # on rank 0
        if answer == _FAILED:
            self._is_off = True
            self._loads.close()
            self._let_spill([True] * len(self._layers))  # no later decision turns it on again
            if found is not None:
                say_on_stderr(f"experts stay where they are from now on: {found.words}")
        elif answer == _MOVE:
            self._take(under_way.told, found)
        elif found is not None:
            self._tell(found.words, 0, 0)

    @property
    def _message_size(self) -> int:
        return sum(1 + _slots_of(layer).num_slots for layer in self._layers)

    def _take(self, told: torch.Tensor, found: _Answer | None) -> None:
        """Do what rank 0 has announced: a migration, where experts move, and whether each layer spills from then on. No layer
        ceases to until experts have moved: the busiest rank would get all its rows at once."""
        spills, slots = told[: len(self._layers)].bool().tolist(), told[len(self._layers) :]
        placements = self._announced(slots)
        words, promise = ("", None) if found is None else (found.words, found.promise)
        if any((new.slots != old.slots).any() for new, old in zip(placements, self.placements, strict=True)):
            self._spills = spills
            self._let_spill(
                [more or self._is_spilling(layer) for more, layer in zip(spills, self._layers, strict=True)]
            )
            self._start(placements, words, promise)
            return
        self._let_spill(spills)
        if found is not None:
            self._tell(words, 0, 0)

    def _price_spills(self, works: Sequence[ExpertWork]) -> None:
        """Have layers spill by the prices by which they are placed."""
        for layer, work in zip(self._layers, works, strict=True):
            if layer.dispatcher.spiller is not None:
                layer.dispatcher.spiller.price_by(work)

    def _let_spill(self, spills: Sequence[bool]) -> None:
        """Turn spilling on and off. Alike on all ranks, between the same two steps."""
        for layer, is_on in zip(self._layers, spills, strict=True):
            if layer.dispatcher.spiller is not None:
                layer.dispatcher.spiller.is_on = is_on

    def _announced(self, slots: torch.Tensor) -> list[ExpertPlacement]:
        parts = slots.split([_slots_of(layer).num_slots for layer in self._layers])
        return [
            ExpertPlacement(part.numpy().reshape(before.slots.shape), before.num_experts, before.homes)
            for part, before in zip(parts, self.placements, strict=True)
        ]

    def _decide(self) -> _Answer:
        """Search, on the thread of rank 0."""
        import numpy as np

        decisions = []
        for place, (counts, before) in enumerate(
            zip(self._loads.expected(self._horizon), self.placements, strict=True)
        ):
            config = self._layers[place].router.config
            load, spiller = LayerLoad(counts, config.top_k), self._layers[place].dispatcher.spiller
            may_spill = spiller is not None and spiller.spilling.rule == "priced"
            decision_us = 0.0 if spiller is None else spiller.decision_us
            room = PlacementRoom(
                num_groups=config.num_groups or 1,
                may_copy=not _spills_by_llep(self._layers[place]),
                may_spill=may_spill,
                decision_us=decision_us,
            )
            decisions.append(place_layer(load, self._prices_of(place), before, self._horizon, room))
        settled = [each.placement.settled_from(old) for each, old in zip(decisions, self.placements, strict=True)]
        spills = [self._shall_spill(place, decision) for place, decision in enumerate(decisions)]
        changes = any(each.moves for each in decisions) or spills != [
            self._is_spilling(layer) for layer in self._layers
        ]
        promise = PlacementPromise(
            sum(each.chosen.migration_us for each in decisions),
            sum(self._now_us(place, each) - each.chosen.step.total_us for place, each in enumerate(decisions)),
        )
        told = np.concatenate([np.array(spills, dtype=np.int64), *(each.slots.reshape(-1) for each in settled)])
        return _Answer(_MOVE if changes else _KEEP, _said(decisions), told, promise)

    def _shall_spill(self, place: int, decision: PlacementDecision) -> bool:
        """Whether a layer spills from now on: by LLEP's rule always; by prices where that was chosen, and where experts stay and
        it does already: each call decides for itself, and where nothing would be gained nothing spills."""
        layer = self._layers[place]
        spiller = layer.dispatcher.spiller
        if spiller is None:
            return False
        return spiller.spilling.rule == "llep" or bool(decision.spilled) or (not decision.moves and spiller.is_on)

    def _now_us(self, place: int, decision: PlacementDecision) -> float:
        """The price of a layer's step as it is: spilling, where it does."""
        alone = decision.best.get("spilling alone")
        if alone is None or not self._is_spilling(self._layers[place]):
            return decision.kept.step.total_us
        return min(alone.step.total_us, decision.kept.step.total_us)

    @staticmethod
    def _is_spilling(layer: MoELayer) -> bool:
        return layer.dispatcher.spiller is not None and layer.dispatcher.spiller.is_on

    def _prices_of(self, place: int) -> PlacementPrices:
        """The prices of one layer: those by which it spills, where it does."""
        layer = self._layers[place]
        spilling = None if layer.dispatcher.spiller is None else layer.dispatcher.spiller.spilling
        work = self._work or self._works[place]
        if self._work is None and spilling is not None and spilling.work is not None:
            work = replace(spilling.work, state_bytes=work.state_bytes, micro_batches=work.micro_batches)
        profile = self._profile_of(layer)
        assert profile is not None  # required when this was made
        if (profile, work) not in self._prices:
            self._prices[profile, work] = PlacementPrices(profile, work, layer.dispatcher.grid.ep.shape)
        return self._prices[profile, work]

    def _profile_of(self, layer: MoELayer) -> Profile | None:
        """The profile by which one layer's experts are placed."""
        spiller = layer.dispatcher.spiller
        return self._profile or (spiller and spiller.spilling.profile) or layer.dispatcher.grid.ep.profile

    # Migrations

    def _start(self, placements: Sequence[ExpertPlacement], reason: str, promise: PlacementPromise | None) -> None:
        wanted: Mapping[MoELayer, ExpertPlacement] = {
            layer: placement
            for layer, placement in zip(self._layers, placements, strict=True)
            if (placement.slots != _slots_of(layer).placement.slots).any()
        }
        self._reason, self._promise = reason, promise
        self._migration_times.begins()
        self._migration = ExpertMigration(self._places, self._optimizers, wanted, self._node_of)
        self._note_changing()

    def _note_changing(self) -> None:
        for layer in self._layers:
            _slots_of(layer).are_changing = self.is_moving

    def _before_optimizer(self) -> None:
        """Switch, where experts are on their way. Raises UsageError where gradients of copies were forgotten."""
        for layer in self._layers:
            if _slots_of(layer).placement.has_replicas and not _slots_of(layer).has_summed:
                raise UsageError(
                    f"{who()}experts lie on several ranks, and their gradients were not summed: call synchronise_gradients, "
                    "GradientBuckets.finish, or sum_replica_gradients(model) before the optimizer's step"
                )
        migration, self._migration = self._migration, None
        if migration is None:
            return
        migration.switch()
        if self._spills is not None:
            self._let_spill(self._spills)
            self._spills = None
        self._note_changing()
        self.num_migrations += 1
        noted = None if self._group.rank else self._tell(self._reason, migration.num_layers, migration.num_copies)
        self._migration_times.switched(migration, noted, self._promise)

    def _tell(self, reason: str, layers: int, copies: int) -> PlacementStats:
        """Note a decision, on rank 0, and say it."""
        noted: PlacementStats = {
            "step": self._steps,
            "layers": layers,
            "copies": copies,
            "copy_bytes": moved_bytes(self._layers[0], self._optimizers),
            "reason": reason,
            "promised_migration_us": None,
            "migration_us": None,
            "waited_us": None,
            "step_before_us": None,
            "promised_step_us": None,
            "step_us": None,
        }
        note_placement(noted)
        if copies:
            audit_placement(noted)
        self._say(f"experts, step {self._steps}: {reason}")
        return noted

    def _hook(self) -> list[Callable[[], object]]:
        me = weakref.ref(self)  # an optimizer keeps its hooks, which must not keep the model

        def called(*_: Any) -> None:
            placer = me()
            if placer is not None:
                placer._before_optimizer()

        handles: list[Callable[[], object]] = []
        for optimizer in self._optimizers:
            if isinstance(optimizer, ShardedOptimizer):
                handles.append(optimizer.call_before_reduction(called))
                inner = optimizer.optimizer
            else:
                handles.append(optimizer.register_step_pre_hook(called).remove)
                inner = optimizer
            handles.append(inner.register_state_dict_post_hook(_state_in_slots(me)).remove)
            handles.append(inner.register_load_state_dict_pre_hook(_refuse_other_slots(me)).remove)
        return handles

    def _agreed_nodes(self) -> tuple[int, ...]:
        """The node of each rank of EP as rank 0 has them: other expert groups may lie otherwise."""
        nodes = self._layers[0].dispatcher.grid.ep.nodes
        mine = tuple(
            next(a for a, members in enumerate(nodes) if rank in members) for rank in range(sum(map(len, nodes)))
        )
        timeout_s = Settings.from_environment().timeout_s
        peers = Peers.of(self._group.group)
        return from_first(_Nodes(mine), _Nodes, peers, timeout_s, "to make an ExpertPlacer").of_ranks


@dataclass(frozen=True)
class _Answer:
    """The outcome of a search: whether anything changes, why, what is told of it (for each layer whether it spills; then all
    slots), and what is promised."""

    kind: int
    words: str
    told: Array | None = None
    promise: PlacementPromise | None = None


class _Summing:
    """The first part of a round: loads are summed over the stage."""

    def __init__(self, counts: torch.Tensor, work: dist.Work) -> None:
        self.counts, self._work = counts, work

    def wait(self) -> None:
        self._work.wait()


class _Deciding:
    """The second part of a round: rank 0 searches, and says in every step whether it has found something."""

    def __init__(self, group: GroupCommunicator, size: int, decide: Callable[[], _Answer]) -> None:
        self._group = group
        self._work: dist.Work | None = None
        self._told = torch.zeros(1 + size, dtype=torch.int64)
        self.found: _Answer | None = None
        self._thread: threading.Thread | None = None
        if not group.rank:
            self._thread = threading.Thread(target=self._search, args=(decide,), name="commlayer placer", daemon=True)
            self._thread.start()

    @property
    def told(self) -> torch.Tensor:
        """What was sent behind the answer."""
        return self._told[1:]

    def ask(self) -> None:
        """Send what rank 0 has found so far to all; nobody waits for it."""
        if not self._group.rank:
            self._told.zero_()
            if self.found is not None:
                self._told[0] = self.found.kind
                if self.found.told is not None:
                    self._told[1:] = torch.as_tensor(self.found.told)
        source = self._group.ranks[0]
        self._work = dist.broadcast(self._told, source, group=self._group.group, async_op=True)

    def answer(self) -> int:
        """Return what was sent: whether there is a decision, and which."""
        self.wait()
        return int(self._told[0])

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()

    def _search(self, decide: Callable[[], _Answer]) -> None:
        try:
            self.found = decide()
        except Exception as error:  # noqa: BLE001  training goes on without it
            kind = "" if isinstance(error, CommlayerError) else f"{type(error).__name__}: "
            self.found = _Answer(_FAILED, f"{kind}{error}")


def _check(
    layers: Sequence[MoELayer], optimizers: Sequence[Optimizer], mesh: FoldedMesh, every: int, horizon: int | None
) -> None:
    if not layers:
        raise UsageError("no MoE layer of the model can be placed: make it with spare_slots=0, or more for copies")
    if every < 0 or (horizon is not None and horizon < 1):
        raise UsageError(f"expected every of 0 or more and a horizon of at least 1, got {every} and {horizon}")
    if mesh.size("ep") == 1:
        raise UsageError("the experts lie on one rank of EP: there is nowhere to place them")
    for layer in layers:
        if layer.router.config.pad_to_capacity:
            raise UsageError(
                "rows are padded to a capacity, so every expert has as many: there is nothing to place; leave pad_to_capacity "
                "out, or the ExpertPlacer"
            )
        if is_sharded(layer.experts) or any(is_dtensor(each) for each in layer.experts.parameters()):
            raise UsageError(
                "experts that FSDP shards cannot be placed: their slots are cut over ranks; leave them out of fully_shard, "
                "and share the optimizer's state out by ShardedOptimizer over edp"
            )
    for optimizer in optimizers:
        if isinstance(optimizer, ShardedOptimizer):
            of_experts = any(optimizer.shard_of(each) for layer in layers for each in layer.experts.parameters())
            if of_experts and optimizer.ranks != mesh.ranks("edp"):
                raise UsageError(
                    f"the experts' ShardedOptimizer is over ranks {list(optimizer.ranks)}: expected edp, "
                    f"{list(mesh.ranks('edp'))}; give the experts one of their own over mesh.group('edp')"
                )


def _state_in_slots(me: weakref.ref[ExpertPlacer]) -> Callable[[Any, dict[str, Any]], None]:
    """A hook that writes into an optimizer's own state, which is of slots, what lies in these."""

    def hook(_: Any, state: dict[str, Any]) -> None:
        if (placer := me()) is not None:
            state[_SLOTS] = [each.slots.tolist() for each in placer.placements]

    return hook


def _refuse_other_slots(me: weakref.ref[ExpertPlacer]) -> Callable[[Any, dict[str, Any]], None]:
    """A hook that refuses an optimizer's own state where experts lie in other slots now: moments would be other experts'."""

    def hook(_: Any, state: dict[str, Any]) -> None:
        placer = me()
        for layer in () if placer is None else placer._layers:
            _slots_of(layer).require_still()
        if placer is not None and _SLOTS in state and state[_SLOTS] != [e.slots.tolist() for e in placer.placements]:
            raise UsageError(
                f"{who()}the optimizer's state is of experts in other slots than they lie in now: save and load it by "
                "TrainingState, which knows experts by their numbers"
            )

    return hook


def _own_group(mesh: FoldedMesh) -> dist.ProcessGroup:
    """A group of this stage's ranks for the placer alone, so that nothing queues behind experts that move."""
    mine: dist.ProcessGroup | None = None
    for ranks in mesh.mapping.groups("stage"):
        made = dist.new_group(list(ranks), backend="commlayer", group_desc="expert placement")
        if dist.get_rank() in ranks:
            mine = made
    assert mine is not None  # every rank is in one stage
    return mine


def _slots_of(layer: MoELayer) -> ExpertSlots:
    slots = layer.dispatcher.slots
    assert slots is not None  # of layers that can be placed
    return slots


def _spills_by_llep(layer: MoELayer) -> bool:
    spiller = layer.dispatcher.spiller
    return spiller is not None and spiller.spilling.rule == "llep"


def _said(decisions: Sequence[PlacementDecision]) -> str:
    """Say what was decided for all layers, and why for the one that gains most."""
    best = max(decisions, key=lambda each: each.kept.total_us - each.chosen.total_us)
    forms = Counter(each.chosen.form for each in decisions)
    if set(forms) == {"keep"}:
        return best.reason()
    moved = [each for each in decisions if each.moves]
    before_us, after_us = (sum(getattr(each, name).step.total_us for each in decisions) for name in ("kept", "chosen"))
    words = f"{sum(len(each.moves) for each in moved)} copies move in {len(moved)} of {len(decisions)} layers"
    words += f" ({', '.join(f'{number} {form}' for form, number in sorted(forms.items()))}); "
    words += f"their steps are predicted to take {after_us / 1e3:.4g} ms in place of {before_us / 1e3:.4g}"
    return f"{words}. {best.reason()}"
