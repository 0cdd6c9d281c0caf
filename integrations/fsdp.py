"""FSDP2 with planned parameters and gradients, for users who keep their backend (gloo, nccl) for all the rest.

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    plan_fsdp(model)

or per module, with a group at hand: ``module.set_custom_all_gather(PlannedAllGather(group))`` and
``module.set_custom_reduce_scatter(PlannedReduceScatter(group))``.

The classes are torch's protocol for replaced communication, which torch keeps in a private module for now.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from commlayer.integrations.groups import check_same_ranks, planned_group
from commlayer.profiles.errors import UsageError

__all__ = ["PlannedAllGather", "PlannedReduceScatter", "plan_fsdp"]


class _Planned:
    """What both have: the planned group, plain buffers, and the check that FSDP's own group has the same ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._checked: set[str] = set()

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A fresh buffer, as FSDP2's default does."""
        return torch.empty(*size, dtype=dtype, device=device)

    def check(self, group: dist.ProcessGroup) -> None:
        """Raise GroupError where FSDP communicates among other ranks than ours (once per group of FSDP's)."""
        if group.group_name not in self._checked:
            check_same_ranks(group, self.group, "this FSDPModule")
            self._checked.add(group.group_name)


class PlannedAllGather(_Planned, AllGather):
    """FSDP2's all_gather of parameters on a planned group; for ``FSDPModule.set_custom_all_gather``.

    ``group`` has the ranks over which the module is sharded: all ranks of a 1-D mesh, the shard dimension of HSDP's.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``input_tensor`` [s] of every rank into ``output_tensor`` [n·s], whose slice of this rank it may be.

        Raises GroupError where ``group``, FSDP's own, has other ranks than the planned one.
        """
        self.check(group)
        work: dist.Work | None = dist.all_gather_into_tensor(
            output_tensor, input_tensor, group=self.group, async_op=async_op
        )
        return work


class PlannedReduceScatter(_Planned, ReduceScatter):
    """FSDP2's reduce_scatter of gradients on a planned group; for ``FSDPModule.set_custom_reduce_scatter``.

    ``group``: as for :class:`PlannedAllGather`.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` [n·s] over ranks with ``op`` (FSDP asks for AVG, or SUM); slice r [s] goes to rank r.

        Raises GroupError where ``group``, FSDP's own, has other ranks than the planned one.
        """
        self.check(group)
        work: dist.Work | None = dist.reduce_scatter_tensor(
            output_tensor, input_tensor, op=op, group=self.group, async_op=async_op
        )
        return work


def plan_fsdp(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Let all FSDP2 modules in ``model`` move parameters and gradients on a planned group. Call it after ``fully_shard``.

    Collective over all ranks of the job where ``group`` is None. All modules must be sharded over the same ranks; where
    they are not (experts on a mesh of their own), set the objects per module instead. HSDP's all_reduce between replicas
    stays on the mesh's own group: torch has no object for it.

    Args:
        model: contains at least one module that went through ``fully_shard``.
        group: a planned group of the ranks over which the modules are sharded; None: make one of all ranks.

    Returns:
        The group that parameters and gradients use.

    Raises:
        UsageError: no module of ``model`` went through ``fully_shard``.
        GroupError: at the first forward; a module is sharded over other ranks than ``group``'s.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise UsageError(
            f"no module of this {type(model).__name__} is an FSDPModule: call torch.distributed.fsdp.fully_shard first "
            "(FullyShardedDataParallel, FSDP1, cannot replace its collectives; give it a process_group of backend commlayer)"
        )
    if group is None:
        group = planned_group()
    all_gather, reduce_scatter = PlannedAllGather(group), PlannedReduceScatter(group)
    for module in modules:
        module.set_custom_all_gather(all_gather)
        module.set_custom_reduce_scatter(reduce_scatter)
    return group
