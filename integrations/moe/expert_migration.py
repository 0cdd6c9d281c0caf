"""The way of experts to other ranks while a model trains: weights, optimizer state, and, at the
switch, gradients.

Weights and state do not change between two steps of the optimizer. So what moves is copied and sent
behind one step, travels beside the next forward and backward pass, and waits beside the slots,
where it arrives, as long as these are in use. Then, before the optimizer's next step, the gradients
of that pass follow, in one exchange; what arrived is written to its slots; and the optimizer steps
each expert where it lies from then on. So nothing is computed twice, and no step is lost: the
optimizer sees the numbers that it would have seen in the old place.

Rejected: moving all after a step, while everybody waits; and sending weights beside the
computation, and then what the step has changed: the optimizer's state has changed in every element
too.

The state of a :class:`~commlayer.integrations.sharded_optimizer.ShardedOptimizer` is cut over the
ranks of edp, wherever that falls within an expert. A part of it goes from the rank that has it to
the rank that shall have it, in one message.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from commlayer.collectives import GroupCommunicator
from commlayer.failures.waits import on_a_thread
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.expert_messages import ExpertMessages
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.replica_gradients import slots_of
from commlayer.integrations.sharded_optimizer import ShardedOptimizer
from commlayer.scheduler.placement.expert_placement import ExpertMove, ExpertPlacement

__all__ = ["ExpertMigration", "Optimizer", "StagePlaces", "moved_bytes", "optimizer_of"]

Optimizer = torch.optim.Optimizer | ShardedOptimizer


@dataclass(frozen=True)
class StagePlaces:
    """The ranks of one pipeline stage by their places in EDP and EP, of this one's place in ETP: as
    members of ``group``."""

    group: GroupCommunicator
    edp: int
    ep: int
    members: tuple[tuple[int, ...], ...]
    """[EDP, EP]."""

    @classmethod
    def of(cls, mesh: FoldedMesh, group: GroupCommunicator) -> StagePlaces:
        ranks = mesh.moe_mesh.mesh
        names = mesh.moe_mesh.mesh_dim_names
        assert names is not None  # of a FoldedMesh
        for axis in ("pp", "etp"):
            ranks = ranks.movedim(names.index(axis), 0)[mesh.rank(axis)]
            names = tuple(name for name in names if name != axis)
        ranks = ranks.movedim(names.index("edp"), 0)
        members = tuple(tuple(group.ranks.index(rank) for rank in row) for row in ranks.tolist())
        return cls(group, mesh.rank("edp"), mesh.rank("ep"), members)


class _Part(NamedTuple):
    """The part of a stack of experts that one tensor has. ``flat``: its elements. ``bounds``: for
    each rank of EDP the first and the last element, not included, that it has of the stack; None:
    all ranks have all of it, each for itself."""

    flat: torch.Tensor
    bounds: tuple[tuple[int, int], ...] | None


class _Piece(NamedTuple):
    """Elements ``begin`` to ``end`` of an expert in one part of a parameter, that go from one rank
    of EDP to another."""

    source: int
    target: int
    begin: int
    end: int


class ExpertMigration:
    """One migration, of several layers at once. Sent when it is made; :meth:`switch` ends it.

    Args:
        places: the ranks of this stage.
        optimizers: all of them; those that have no expert do no harm.
        placements: the new one of each layer, with experts that stay in their slots
            (:meth:`~commlayer.scheduler.placement.expert_placement.ExpertPlacement.settled_from`),
            the same on all ranks.
        node_of: of each rank of EP: copies come from the same node where they can.

    Attributes:
        num_layers: that change. ``num_copies``: that move, of all ranks of EP. ``sent_bytes``: by
            this rank, without gradients.
        took_us: behind the switch, the time from the start until weights and state had come here,
            and what goes was gone; None where they are on a device, whose messages nobody can wait
            for on the side.
        waited_us: behind the switch, for how long the step stood still for it: for what had not
            come yet, and for gradients.
    """

    took_us: float | None = None
    waited_us: float | None = None

    def __init__(
        self,
        places: StagePlaces,
        optimizers: Sequence[Optimizer],
        placements: Mapping[MoELayer, ExpertPlacement],
        node_of: Sequence[int],
    ) -> None:
        import numpy as np

        self._places, self._optimizers = places, optimizers
        self._placements = dict(placements)
        self._moves: dict[MoELayer, tuple[ExpertMove, ...]] = {}
        for layer, placement in self._placements.items():
            self._moves[layer] = placement.moves_from(slots_of(layer).placement, np.asarray(node_of))
        self._state = ExpertMessages(places.group)
        for layer in self._placements:
            for parameter in layer.experts.parameters():
                for part in _state_of(parameter, optimizers):
                    self._name(self._state, layer, parameter, part)
        self.num_layers, self.num_copies = len(self._moves), sum(map(len, self._moves.values()))
        self.sent_bytes = self._state.num_bytes
        is_on_host = all(each.is_cpu for layer in self._placements for each in layer.experts.parameters())
        self._began_s = time.perf_counter()
        self._state.start()
        # Gloo's messages tell nobody that they have come but who waits for them.
        self._arrival: Future[float] | None = on_a_thread(self._arrived_s) if is_on_host else None

    def wait(self) -> None:
        """Wait until what was sent is here; nothing is written anywhere. Raises PeerError and
        CollectiveTimeoutError as collectives do."""
        if self._arrival is None:
            self._state.wait()
        else:
            self.took_us = (self._arrival.result() - self._began_s) * 1e6

    def _arrived_s(self) -> float:
        self._state.wait()
        return time.perf_counter()

    @torch.no_grad()
    def switch(self) -> None:
        """Wait for what was sent, have the gradients follow, write all to its slots, and dispatch
        by the new placements from then on. Collective over the stage; between a backward pass and
        the optimizer's step.

        Raises PeerError and CollectiveTimeoutError as collectives do; then all is as before.
        """
        began_s = time.perf_counter()
        self.wait()
        gradients = ExpertMessages(self._places.group)
        for layer in self._placements:
            for parameter in layer.experts.parameters():
                if parameter.requires_grad:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    self._name(gradients, layer, parameter, _Part(parameter.grad.view(-1), None))
        gradients.start()
        gradients.wait()
        for layer, placement in self._placements.items():
            self._clear(layer, placement)
        self._state.store()
        gradients.store()
        for layer, placement in self._placements.items():
            slots_of(layer).move_to(placement)
        self.waited_us = (time.perf_counter() - began_s) * 1e6

    def _name(self, messages: ExpertMessages, layer: MoELayer, parameter: nn.Parameter, part: _Part) -> None:
        """Name what goes from and to this rank of one part of a parameter: in one order on all
        ranks."""
        places, before, after = self._places, slots_of(layer).placement, self._placements[layer]
        size = parameter[0].numel()
        for move in self._moves[layer]:
            if places.ep not in (move.source, move.target):
                continue
            here, there = (
                placement.slots[rank].tolist().index(move.expert) * size
                for placement, rank in ((before, move.source), (after, move.target))
            )
            for piece in _pieces(part, len(places.members), here, there, size):
                if (piece.source, move.source) == (places.edp, places.ep):
                    peer = places.members[piece.target][move.target]
                    messages.send(_cut(part, places.edp, here + piece.begin, here + piece.end), peer)
                if (piece.target, move.target) == (places.edp, places.ep):
                    peer = places.members[piece.source][move.source]
                    messages.receive(_cut(part, places.edp, there + piece.begin, there + piece.end), peer)

    def _clear(self, layer: MoELayer, placement: ExpertPlacement) -> None:
        """Make the slots zero from which an expert has gone: weights, state and gradients."""
        before = slots_of(layer).placement.slots[self._places.ep].tolist()
        after = placement.slots[self._places.ep].tolist()
        gone = [slot for slot, (was, now) in enumerate(zip(before, after, strict=True)) if was >= 0 > now]
        for parameter in layer.experts.parameters():
            parts = _state_of(parameter, self._optimizers)
            if parameter.grad is not None:
                parts.append(_Part(parameter.grad.view(-1), None))
            size = parameter[0].numel()
            for part in parts:
                for slot in gone:
                    begin, end = _within(part, self._places.edp, slot * size, (slot + 1) * size)
                    if begin < end:
                        _cut(part, self._places.edp, begin, end).zero_()


def optimizer_of(parameter: nn.Parameter, optimizers: Sequence[Optimizer]) -> Optimizer | None:
    """Find the optimizer that steps ``parameter``; None where none does."""
    for optimizer in optimizers:
        if isinstance(optimizer, ShardedOptimizer):
            if optimizer.shard_of(parameter) is not None:
                return optimizer
        elif any(parameter is each for group in optimizer.param_groups for each in group["params"]):
            return optimizer
    return None


def moved_bytes(layer: MoELayer, optimizers: Sequence[Optimizer]) -> int:
    """Count the bytes that a rank sends of one expert: weights and the optimizer's state, or its
    part of them."""
    total = sum(
        part.flat.nbytes for parameter in layer.experts.parameters() for part in _state_of(parameter, optimizers)
    )
    return total // layer.experts.count


def _state_of(parameter: nn.Parameter, optimizers: Sequence[Optimizer]) -> list[_Part]:
    """All that goes with experts beside their gradients: their weights, and what the optimizer
    keeps for each element."""
    optimizer = optimizer_of(parameter, optimizers)
    if isinstance(optimizer, ShardedOptimizer):
        shard = optimizer.shard_of(parameter)
        assert shard is not None  # it is this one's
        return [_Part(flat, shard.bounds) for flat in shard.tensors]  # of which its step makes the model's weights
    parts = [_Part(parameter.data.view(-1), None)]
    if optimizer is not None:
        state = optimizer.state.get(parameter, {})
        parts += [
            _Part(state[name].view(-1), None)
            for name in sorted(state)
            if isinstance(state[name], torch.Tensor) and state[name].shape == parameter.shape
        ]
    return parts


def _pieces(part: _Part, num_edp: int, here: int, there: int, size: int) -> Iterator[_Piece]:
    """Cut an expert of ``size`` elements, which begins at ``here`` in its old stack and at
    ``there`` in its new one, where ranks of EDP have parts of both."""
    if part.bounds is None:
        yield from (_Piece(edp, edp, 0, size) for edp in range(num_edp))
        return
    for source, (first, last) in enumerate(part.bounds):
        for target, (low, high) in enumerate(part.bounds):
            begin, end = max(0, first - here, low - there), min(size, last - here, high - there)
            if begin < end:
                yield _Piece(source, target, begin, end)


def _within(part: _Part, edp: int, begin: int, end: int) -> tuple[int, int]:
    if part.bounds is None:
        return begin, end
    first, last = part.bounds[edp]
    return max(begin, first), min(end, last)


def _cut(part: _Part, edp: int, begin: int, end: int) -> torch.Tensor:
    """A view of elements of the stack, all of which rank ``edp`` of EDP has."""
    first = 0 if part.bounds is None else part.bounds[edp][0]
    return part.flat[begin - first : end - first]
