"""The gradients of experts that lie on several ranks: summed over their copies, so that all of
these stay equal.

Each copy has the gradient of the rows that came to it. Every rank sends its copy's to the ranks of
all others, in one exchange of all layers, and adds them up in the order of ranks: the same sum, bit
for bit, everywhere. Rejected: a group for each set of ranks that share an expert, of which every
placement would make new ones; and a sum at the expert's home that is sent back, which takes two
exchanges, one after the other, and saves bytes only from three copies on, and not those of the
busiest rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.moe.expert_messages import ExpertMessages
from commlayer.integrations.moe.expert_slots import ExpertSlots
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.spread_parameters import refuse_spread

__all__ = ["placed_layers", "slots_of", "sum_replica_gradients"]


def placed_layers(module: nn.Module) -> list[MoELayer]:
    """List the MoE layers in ``module`` whose experts can be placed anew, in its order."""
    return [part for part in module.modules() if isinstance(part, MoELayer) and part.dispatcher.slots is not None]


def slots_of(layer: MoELayer) -> ExpertSlots:
    """The slots of a layer whose experts can be placed anew."""
    slots = layer.dispatcher.slots
    assert slots is not None
    return slots


@torch.no_grad()
def sum_replica_gradients(module: nn.Module) -> None:
    """Sum the gradients of every expert over its copies, in place. Collective over EP, once a step,
    when each copy's own are there: those of
    :func:`~commlayer.integrations.gradients.synchronise_gradients`, which calls it itself, or those
    of this rank alone, where something else sums over edp later.

    A parameter without a gradient counts as zero. Without copies nothing is sent. Raises UsageError
    for experts that ``fully_shard`` spreads over ranks; PeerError and CollectiveTimeoutError as
    collectives do.
    """
    groups: dict[dist.ProcessGroup | None, tuple[GroupCommunicator, list[MoELayer]]] = {}
    for layer in placed_layers(module):
        slots = slots_of(layer)
        slots.has_summed = True
        if slots.placement.has_replicas:
            refuse_spread(
                layer.experts.named_parameters(),
                "sum_replica_gradients",
                "no rank has the whole gradient of an expert's copy; leave placed experts out of fully_shard",
            )
            ep = layer.dispatcher.grid.ep
            groups.setdefault(ep.group, (ep, []))[1].append(layer)
    for ep, layers in groups.values():
        messages = ExpertMessages(ep)
        shared = [each for layer in layers for each in _shared_gradients(layer)]
        for gradient, ranks in shared:
            for peer in set(ranks) - {ep.rank}:
                messages.send(gradient, peer)
                messages.receive(gradient, peer)
        messages.start()
        messages.wait()
        came = {peer: iter(messages.received(peer)) for peer in range(ep.size)}
        for gradient, ranks in shared:
            parts = [gradient if rank == ep.rank else next(came[rank]) for rank in ranks]
            total = parts[0].to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
            for part in parts[1:]:
                total += part
            gradient.copy_(total)


def _shared_gradients(layer: MoELayer) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """The gradients in this rank's slots of experts that lie elsewhere too, and the ranks of all
    their copies: by expert, so that two ranks name what they share in one order."""
    slots = slots_of(layer)
    placement = slots.placement
    for expert, slot in sorted((expert, slot) for slot, expert in enumerate(slots.here)):
        if expert < 0 or placement.logcnt[expert] < 2:
            continue
        ranks = placement.copies[expert].nonzero()[0].tolist()
        for parameter in layer.experts.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                yield parameter.grad[slot], ranks
