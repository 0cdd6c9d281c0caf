"""DistributedDataParallel with planned gradients, for users who keep their backend (gloo, nccl) for all the rest.

    model = DistributedDataParallel(model)
    plan_ddp(model)                 # or plan_ddp(model, wire="bf16"): FP32 gradients may travel in BF16

or, with a group at hand, ``model.register_comm_hook(planned_group(), all_reduce_hook)``; with a wire format
``model.register_comm_hook(GroupCommunicator(planned_group(), wire=policy), all_reduce_hook)``.
"""

# Without `from __future__ import annotations`: register_comm_hook compares the hook's annotations with torch's classes.
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # torch.distributed has it too, but not for type checkers
from torch.nn.parallel import DistributedDataParallel

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.flat_buffers import all_reduce_flat
from commlayer.integrations.groups import check_same_ranks, planned_gradient_group
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.wire_choice import WireChoice, compressed_group, require_same_wire
from commlayer.profiles.errors import UsageError

__all__ = ["all_reduce_hook", "plan_ddp"]


def plan_ddp(
    model: DistributedDataParallel, group: dist.ProcessGroup | None = None, wire: WireChoice = None
) -> dist.ProcessGroup:
    """Average the gradients of ``model`` on a planned group from now on. Collective over all ranks of the job.

    What DDP sends besides (parameters at construction, buffers, the map of unused parameters, ``join``'s own messages)
    stays on the model's group.

    Args:
        model: one without a communication hook.
        group: a group of the same ranks, such as another model's, on whatever lane it is; None: make one, on lane dp.
        wire: formats in which gradients may travel, such as ``bf16`` (docs/compression.md); None: what COMMLAYER_WIRE says of
            dp, else their own.

    Returns:
        The group that the gradients use.

    Raises:
        GroupError: ``group`` does not have the ranks of the model's group; or it is not of backend commlayer, with a format.
        UsageError: no such format; ``model`` is not wrapped in DistributedDataParallel, or takes experts with it that differ
            between ranks.
        DisagreementError: ranks were given different ones.
        RuntimeError: torch's own; the model already has a hook.
    """
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"plan_ddp: expected a model wrapped in DistributedDataParallel, got {type(model).__name__}: wrap it first"
        )
    for name, part in model.module.named_modules():
        if not isinstance(part, MoELayer) or part.dispatcher.grid.all.size == 1:
            continue
        prefix = f"{name}.experts." if name else "experts."
        experts = [prefix + each for each, parameter in part.experts.named_parameters() if parameter.requires_grad]
        # Nothing else would say that they are averaged with other experts.
        if set(experts) - model.parameters_to_ignore:
            raise UsageError(
                f"plan_ddp: rank {dist.get_rank()}: DistributedDataParallel was given {experts[0]}, which is other experts' on "
                "other ranks: it has overwritten them by rank 0's, and would average their gradients. Make the model anew, leave "
                "its experts out of DistributedDataParallel, and call synchronise_gradients() for them (docs/moe.md)"
            )
    own = model.process_group
    if group is None:
        group = planned_gradient_group(own)
    check_same_ranks(own, group, "DistributedDataParallel")
    compressed = compressed_group(group, wire, "dp", "gradients of DistributedDataParallel")
    require_same_wire(group, "DistributedDataParallel's gradients", compressed)
    model.register_comm_hook(group if compressed is None else compressed, all_reduce_hook)
    return group


def all_reduce_hook(
    group: dist.ProcessGroup | GroupCommunicator, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: the mean of ``bucket``'s gradients over ``group``, for ``register_comm_hook(group, …)``.

    Where the plan is flat and native, gradients have the bits that DDP gives them without a hook. All ranks hold the same ones.
    """
    if isinstance(group, GroupCommunicator):
        buffer = bucket.buffer().mul_(1.0 / group.size)
        work = all_reduce_flat(group, buffer)
    else:
        # Multiplied by 1/n before the sum, as DDP's reducer does. Rejected: dividing by n, as torch's own allreduce_hook
        # does: it differs in the last bit where n is no power of two.
        buffer = bucket.buffer().mul_(1.0 / group.size())
        work = cast(dist.Work, dist.all_reduce(buffer, group=group, async_op=True))
    return work.get_future().then(_reduced)


def _reduced(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    """The bucket out of a finished all_reduce; raises what the all_reduce raised."""
    return future.value()[0].view(-1)
