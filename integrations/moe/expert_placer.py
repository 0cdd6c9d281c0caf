"""Experts placed anew while a model trains: who decides, when all ranks switch, and what is said of
it.

A *round* begins every so many steps. Ranks sum up the loads that they have seen since the last one;
rank 0 of the stage forecasts from them and searches, on a thread of its own, while training goes
on; then it announces what it found, and all ranks begin to send
(:mod:`~commlayer.integrations.moe.expert_migration`), and switch before the optimizer's next step.

Where a layer spills by prices, the same decision says whether it does until the next one:
placements and spilling are compared, and used together, at the same prices. Ranks turn spilling on
and off in the step in which all have read the announcement.

Sums, announcements and experts travel on a group of the placer's own, on the lowest lane. What a
rank does in a step follows from how many steps there were, and from what rank 0 has announced in
the step before, which all ranks read in the same step. So all switch at the same step, or none
does. Rejected: an appointment in the store (:mod:`commlayer.agree.appointments`), for calls that
ranks make apart from each other, and which must exchange nothing; here steps are what all ranks
make together, and a message of some bytes, which nobody waits for, is cheaper than threads that ask
a store.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from commlayer.agree.messages import require_alike
from commlayer.collectives import GroupCommunicator
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.expert_migration import ExpertMigration, moved_bytes
from commlayer.integrations.moe.expert_spilling import require_prices
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.migration_times import MigrationTimes, PlacementPromise, note_decision
from commlayer.integrations.moe.placement_rounds import (
    FAILED,
    MOVE,
    PlacementAnswer,
    PlacementRounds,
    is_spilling,
    profile_of,
    spills_by_llep,
)
from commlayer.integrations.moe.planning import is_sharded
from commlayer.integrations.moe.replica_gradients import placed_layers, slots_of
from commlayer.integrations.moe.routing import who
from commlayer.integrations.spread_parameters import is_dtensor
from commlayer.profiles.errors import UsageError
from commlayer.profiles.printable import say as say_on_stderr
from commlayer.profiles.profile import Profile
from commlayer.scheduler.placement.expert_placement import ExpertPlacement
from commlayer.scheduler.placement.placement_price import ExpertWork

__all__ = ["ExpertPlacer"]

_SLOTS = "expert_slots"


@dataclass(frozen=True)
class _Announced:
    """The reason of a migration, what is promised of it, and which layers spill once experts have
    moved (None: all that may, as a program that places experts knows no prices)."""

    reason: str
    promise: PlacementPromise | None = None
    spills: Sequence[bool] | None = None


class ExpertPlacer(AbstractContextManager["ExpertPlacer", None]):
    """The placer of a model's experts, called once in every training step, after the optimizer::

        model = …                     # with MoELayer(…, mesh=mesh, spare_slots=1)
        placer = ExpertPlacer(model, optimizer, mesh, every=50)
        for step in …:
            optimizer.zero_grad()
            loss_of(batch).backward()
            optimizer.step()
            placer.step()

    All ranks of the job make it, and call :meth:`step`, alike. Losses are those of experts in
    order: bit for bit without copies where tokens go by all_to_all and in the same chunks, and else
    up to the order of sums (docs/placement.md).

    Args:
        model: with MoE layers that were made with ``spare_slots``.
        optimizer: torch's, or several of them; elementwise ones, as SGD and Adam are. What it
            keeps for each element goes with an expert.
        mesh: of the model.
        every: steps between two decisions; 0: experts move only by :meth:`move_to`.
        horizon: steps over which a migration shall pay back; None: until the next decision.
        profile: of the expert group; None: the one by which the group plans its calls.
        work: what an expert costs; None: measured in the first round.
        say: told what was decided, in one line, on rank 0 of the stage; None: standard error.

    Attributes:
        num_migrations: that were made.

    Raises:
        UsageError: nothing that could be placed: layers without ``spare_slots``, one rank of EP,
            rows that are padded to a capacity, experts that FSDP shards, no profile to decide by;
            or a number below its least.
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
        _check(self._layers, mesh, every, horizon)
        self._say = say or say_on_stderr
        for layer in self._layers if every else ():
            prices_by, nodes = profile_of(layer, profile), layer.dispatcher.grid.ep.shape
            require_prices(
                prices_by,
                nodes,
                "ExpertPlacer",
                "pass profile=, or every=0 to move experts by hand",
            )
        # A group of this stage's ranks for the placer alone: nothing queues behind experts that
        # move.
        stages = mesh.mapping.groups("stage")
        groups = [dist.new_group(list(ranks), backend="commlayer", group_desc="expert placement") for ranks in stages]
        (own,) = (each for each, ranks in zip(groups, stages, strict=True) if dist.get_rank() in ranks)
        self._group, self._world = GroupCommunicator(own, "dp"), dist.group.WORLD
        pays_within = horizon or max(every, 1)
        self._rounds = PlacementRounds(self._layers, self._optimizers, self._group, every, pays_within, profile, work)
        self._migration: tuple[ExpertMigration, _Announced] | None = None
        self._migration_times = MigrationTimes(self._group)
        self._steps = 0
        self._is_closed = False
        self.num_migrations = 0
        self._hooks = _hook(self, self._optimizers)

    @property
    def placements(self) -> tuple[ExpertPlacement, ...]:
        """Where the experts of each layer lie now."""
        return tuple(slots_of(layer).placement for layer in self._layers)

    @property
    def is_moving(self) -> bool:
        """Whether experts are on their way, to be computed elsewhere from the optimizer's next step
        on."""
        return self._migration is not None

    def step(self) -> None:
        """Note that a training step is over, and do what is due: mostly nothing. Collective over
        the stage, once a step, after the optimizer's.

        Raises PeerError and CollectiveTimeoutError as collectives do.
        """
        self._steps += 1
        for layer in self._layers:
            slots_of(layer).has_summed = False
        if self._is_closed:
            return
        self._migration_times.end_step(is_moving=self.is_moving)
        if not self._rounds.are_over:
            self._rounds.loads.end_step()
            answer = None if self.is_moving else self._rounds.advance()
            if answer is not None:
                kind, message, outcome = answer
                self._hear(kind, message.tolist(), outcome)
        self._migration_times.begin_step()

    def move_to(self, placements: Sequence[ExpertPlacement], reason: str = "as told") -> None:
        """Begin to move all layers' experts to ``placements``, the same on all ranks; they are used
        from the optimizer's next step on. Collective over the stage, behind an optimizer's step.

        Raises UsageError for placements of other layers, experts, ranks or slots, for copies in a
        layer that spills by LLEP's rule, while experts are on their way, and after :meth:`close`;
        DisagreementError where ranks have others.
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
        for index, (layer, new) in enumerate(zip(self._layers, settled, strict=True)):
            if new.has_replicas and spills_by_llep(layer):
                raise UsageError(
                    f"{who()}layer {index} spills by LLEP's rule, which knows no copies of experts: "
                    "expected a placement with one copy of each, or a layer with spilling='priced'"
                )
        said = {f"the placement of layer {at}": str(each.slots.tolist()) for at, each in enumerate(settled)}
        if self._group.group is not None:
            require_alike(said, self._group.group, "to move experts")
        self._rounds.drop()  # the next one finds the group as all ranks know it
        _let_spill(self._layers)  # what was decided was of other placements
        self._start(settled, _Announced(reason))

    def close(self) -> None:
        """Give up what is under way, destroy the placer's group, and leave the optimizer alone from
        now on. Experts stay where they are, and cannot be moved any more. Collective over the
        stage. Harmless when repeated.

        Raises PeerError and CollectiveTimeoutError as collectives do, where something was under
        way.
        """
        if self._is_closed:
            return
        migration, self._migration = self._migration, None
        for undo in self._hooks:
            undo()
        self._hooks, self._is_closed = [], True
        self._rounds.end()
        for layer in self._layers:
            slots_of(layer).are_changing = False
        if not dist.is_initialized() or dist.group.WORLD is not self._world:
            return  # the group went with its default group
        _let_spill(self._layers)
        if migration is not None:
            migration[0].wait()  # all ranks have sent theirs: a group is destroyed with nothing on its way
        self._rounds.drop()
        self._migration_times.close()
        dist.destroy_process_group(self._group.group)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:  # others may know of no error, or be gone: the group ends with the default group
            self._world = None
        self.close()

    def _hear(self, kind: int, message: list[int], outcome: PlacementAnswer | None) -> None:
        """Carry out what rank 0 has said: a migration, where experts move, and whether each layer
        spills from then on. No layer ceases to until experts have moved: the busiest rank would get
        all its rows at once."""
        if kind == FAILED:
            self._rounds.end()
            _let_spill(self._layers)  # no later decision turns it on again
            if outcome is not None:
                say_on_stderr(f"experts stay where they are from now on: {outcome.words}")
            return
        words, promise = ("", None) if outcome is None else (outcome.words, outcome.promise)
        if kind == MOVE:
            spills, slots = list(map(bool, message[: len(self._layers)])), message[len(self._layers) :]
            placements = []
            for before in self.placements:
                size = before.slots.size
                here, slots = np.array(slots[:size], dtype=np.int64), slots[size:]
                placements.append(ExpertPlacement(here.reshape(before.slots.shape), before.num_experts, before.homes))
            if any((new.slots != old.slots).any() for new, old in zip(placements, self.placements, strict=True)):
                both = zip(spills, self._layers, strict=True)
                _let_spill(self._layers, [shall or is_spilling(layer) for shall, layer in both])
                self._start(placements, _Announced(words, promise, spills))
                return
            _let_spill(self._layers, spills)
        if outcome is not None:
            note_decision(self._steps, 0, 0, moved_bytes(self._layers[0], self._optimizers), words)
            self._say(f"experts, step {self._steps}: {words}")

    def _start(self, placements: Sequence[ExpertPlacement], announced: _Announced) -> None:
        both = zip(self._layers, placements, strict=True)
        changed = {layer: new for layer, new in both if (new.slots != slots_of(layer).placement.slots).any()}
        self._migration_times.begins()
        migration = ExpertMigration(self._group, self._optimizers, changed)
        self._migration = migration, announced
        for layer in self._layers:
            slots_of(layer).are_changing = True

    def _switch(self) -> None:
        """Switch, where experts are on their way: before the optimizer's step, whose hooks call
        this. Collective over the stage. Raises UsageError where gradients of copies were
        forgotten."""
        for layer in self._layers:
            if slots_of(layer).placement.has_replicas and not slots_of(layer).has_summed:
                raise UsageError(
                    f"{who()}experts lie on several ranks, and their gradients were not summed: call "
                    "synchronise_gradients, or sum_replica_gradients(model), before "
                    "the optimizer's step"
                )
        under_way, self._migration = self._migration, None
        if under_way is None:
            return
        migration, announced = under_way
        migration.switch()
        if announced.spills is not None:
            _let_spill(self._layers, announced.spills)
        for layer in self._layers:
            slots_of(layer).are_changing = False
        self.num_migrations += 1
        noted = None
        if not self._group.rank:
            copy_bytes = moved_bytes(self._layers[0], self._optimizers)
            noted = note_decision(self._steps, migration.num_layers, migration.num_copies, copy_bytes, announced.reason)
            self._say(f"experts, step {self._steps}: {announced.reason}")
        self._migration_times.switched(migration, noted, announced.promise)


def _let_spill(layers: Sequence[MoELayer], spills: Sequence[bool] | None = None) -> None:
    """Turn spilling on and off; None: on. Alike on all ranks, between the same two steps."""
    for index, layer in enumerate(layers):
        if layer.dispatcher.spiller is not None:
            layer.dispatcher.spiller.is_on = spills is None or spills[index]


def _check(layers: Sequence[MoELayer], mesh: FoldedMesh, every: int, horizon: int | None) -> None:
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
                "experts that FSDP shards cannot be placed: their slots are cut over ranks; leave them out of fully_shard"
            )


def _hook(placer: ExpertPlacer, optimizers: Sequence[Optimizer]) -> list[Callable[[], object]]:
    """Have the optimizers switch before a step, and know slots in their states. Returns what undoes
    each hook. An optimizer keeps its hooks, which must not keep the model."""
    me = weakref.ref(placer)

    def switch(*_: Any) -> None:
        if (placer := me()) is not None:
            placer._switch()

    def add_slots(_: Any, state: dict[str, Any]) -> None:
        """Write into an optimizer's own state, which is of slots, what lies in these."""
        if (placer := me()) is not None:
            state[_SLOTS] = [each.slots.tolist() for each in placer.placements]

    def refuse_other_slots(_: Any, state: dict[str, Any]) -> None:
        """Refuse an optimizer's own state where experts lie in other slots now: moments would be
        other experts'."""
        if (placer := me()) is None:
            return
        for layer in placer._layers:
            slots_of(layer).require_still()
        if _SLOTS in state and state[_SLOTS] != [each.slots.tolist() for each in placer.placements]:
            raise UsageError(
                f"{who()}the optimizer's state is of experts in other slots than they lie in now: save and "
                "load it by TrainingState, which knows experts by their numbers"
            )

    handles: list[Callable[[], object]] = []
    for optimizer in optimizers:
        handles.append(optimizer.register_step_pre_hook(switch).remove)
        handles.append(optimizer.register_state_dict_post_hook(add_slots).remove)
        handles.append(optimizer.register_load_state_dict_pre_hook(refuse_other_slots).remove)
    return handles
