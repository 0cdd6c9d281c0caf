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
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from commlayer.collectives import GroupCommunicator
from commlayer.failures.waits import on_a_thread
from commlayer.integrations.moe.expert_messages import ExpertMessages
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.replica_gradients import slots_of
from commlayer.scheduler.placement.expert_placement import ExpertMove, ExpertPlacement

__all__ = ["ExpertMigration", "moved_bytes", "optimizer_of"]


class ExpertMigration:
    """One migration, of several layers at once. Sent when it is made; :meth:`switch` ends it.

    Args:
        group: the ranks of this stage, those of EP among them.
        optimizers: all of them; those that have no expert do no harm.
        placements: the new one of each layer, with experts that stay in their slots
            (:meth:`~commlayer.scheduler.placement.expert_placement.ExpertPlacement.settled_from`),
            the same on all ranks. Copies come from the same node where they can.

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
        group: GroupCommunicator,
        optimizers: Sequence[Optimizer],
        placements: Mapping[MoELayer, ExpertPlacement],
    ) -> None:
        self._group, self._optimizers = group, optimizers
        self._placements = dict(placements)
        self._moves: dict[MoELayer, tuple[ExpertMove, ...]] = {}
        for layer, placement in self._placements.items():
            nodes = layer.dispatcher.grid.ep.nodes
            node_of = [next(a for a, members in enumerate(nodes) if k in members) for k in range(placement.num_ranks)]
            self._moves[layer] = placement.moves_from(slots_of(layer).placement, np.array(node_of))
        self._state = ExpertMessages(group)
        for layer in self._placements:
            for parameter in layer.experts.parameters():
                for stack in _state_of(parameter, optimizers):
                    self._name(self._state, layer, stack)
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
        gradients = ExpertMessages(self._group)
        for layer in self._placements:
            for parameter in layer.experts.parameters():
                if parameter.requires_grad:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    self._name(gradients, layer, parameter.grad)
        gradients.start()
        gradients.wait()
        for layer, placement in self._placements.items():
            self._clear(layer, placement)
        self._state.store()
        gradients.store()
        for layer, placement in self._placements.items():
            slots_of(layer).move_to(placement)
        self.waited_us = (time.perf_counter() - began_s) * 1e6

    def _name(self, messages: ExpertMessages, layer: MoELayer, stack: torch.Tensor) -> None:
        """Name what goes from and to this rank of one stack of experts: in one order on all
        ranks."""
        ep, before, after = layer.dispatcher.grid.ep, slots_of(layer).placement, self._placements[layer]
        for move in self._moves[layer]:
            if ep.rank == move.source:
                slot = before.slots[move.source].tolist().index(move.expert)
                messages.send(stack[slot], self._group.ranks.index(ep.ranks[move.target]))
            if ep.rank == move.target:
                slot = after.slots[move.target].tolist().index(move.expert)
                messages.receive(stack[slot], self._group.ranks.index(ep.ranks[move.source]))

    def _clear(self, layer: MoELayer, placement: ExpertPlacement) -> None:
        """Make the slots zero from which an expert has gone: weights, state and gradients."""
        rank = slots_of(layer).rank
        before, after = (each.slots[rank].tolist() for each in (slots_of(layer).placement, placement))
        gone = [slot for slot, (was, now) in enumerate(zip(before, after, strict=True)) if was >= 0 > now]
        for parameter in layer.experts.parameters():
            stacks = _state_of(parameter, self._optimizers)
            if parameter.grad is not None:
                stacks.append(parameter.grad)
            for stack in stacks:
                for slot in gone:
                    stack[slot].zero_()


def optimizer_of(parameter: nn.Parameter, optimizers: Sequence[Optimizer]) -> Optimizer | None:
    """Find the optimizer that steps ``parameter``; None where none does."""
    for optimizer in optimizers:
        if any(parameter is each for group in optimizer.param_groups for each in group["params"]):
            return optimizer
    return None


def moved_bytes(layer: MoELayer, optimizers: Sequence[Optimizer]) -> int:
    """Count the bytes that a rank sends of one expert: weights and the optimizer's state."""
    total = sum(stack.nbytes for parameter in layer.experts.parameters() for stack in _state_of(parameter, optimizers))
    return total // layer.experts.count


def _state_of(parameter: nn.Parameter, optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    """All that goes with experts beside their gradients, in stacks of slots: their weights, and what
    the optimizer keeps for each element."""
    stacks = [parameter.data]
    optimizer = optimizer_of(parameter, optimizers)
    if optimizer is not None:
        state = optimizer.state.get(parameter, {})
        kept = [state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor)]
        stacks += [tensor for tensor in kept if tensor.shape == parameter.shape]
    return stacks
