"""FSDP2 with planned parameters and gradients, for users who keep their backend (gloo, nccl) for all the rest.

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    plan_fsdp(model)                # or plan_fsdp(model, wire="bf16"): FP32 gradients may travel in BF16

or per module, with a group at hand: ``module.set_custom_all_gather(PlannedAllGather(group))`` and
``module.set_custom_reduce_scatter(PlannedReduceScatter(group))``.

The classes are torch's protocol for replaced communication, which torch keeps in a private module for now.

What FSDP2 does with them (torch 2.13), on which the wire formats rest: it allocates both tensors of a call by
:meth:`allocate`, flat, and of one dtype: parameters in ``param_dtype`` (uint8 where a module mixes dtypes), gradients in
``reduce_dtype``. The input of an all_gather is this rank's slice of its output, a copy of the sharded parameters. The input
of a reduce_scatter is a buffer that nobody reads again, so that the policy's ``in_place`` may destroy it; torch only holds it
until the gradients are used. A reduce_scatter is synchronous; an all_gather is, unless ``unshard(async_op=True)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from commlayer.integrations.flat_buffers import all_gather_flat, reduce_scatter_flat
from commlayer.integrations.groups import check_same_ranks, planned_gradient_group
from commlayer.integrations.wire_choice import WireChoice, compressed_group, require_same_wire
from commlayer.profiles.errors import UsageError
from commlayer.profiles.printable import say

__all__ = ["PlannedAllGather", "PlannedReduceScatter", "plan_fsdp"]


class _Planned:
    """The parts that both have: the planned group, plain buffers, and the check that FSDP's own group has the same ranks."""

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

    Args:
        group: has the ranks over which the module is sharded: all ranks of a 1-D mesh, the shard dimension of HSDP's.
        wire: formats in which parameters may travel. All ranks compute with the same rounded ones; the sharded parameters, which
            the optimizer steps, are never rounded. None: their own, whatever COMMLAYER_WIRE says.

    Raises GroupError for a group of another backend with a format, UsageError for no such format.
    """

    def __init__(self, group: dist.ProcessGroup, wire: WireChoice = None) -> None:
        super().__init__(group)
        wire = "native" if wire is None else wire  # it changes what is computed: only where the program asks for it
        self.compressed = compressed_group(group, wire, "dp", "parameters of FSDP2")

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
        if self.compressed is None:
            work: dist.Work | None = dist.all_gather_into_tensor(
                output_tensor, input_tensor, group=self.group, async_op=async_op
            )
            return work
        return _waited(all_gather_flat(self.compressed, output_tensor, input_tensor), async_op)


class PlannedReduceScatter(_Planned, ReduceScatter):
    """FSDP2's reduce_scatter of gradients on a planned group; for ``FSDPModule.set_custom_reduce_scatter``.

    Args:
        group: as for :class:`PlannedAllGather`.
        wire: formats in which gradients may travel, such as ``bf16`` where they are FP32; the sum is FP32, divided after it.
            None: what COMMLAYER_WIRE says of dp, else their own. ``in_place`` is allowed.

    Raises GroupError for a group of another backend with a format, UsageError for no such format.
    """

    def __init__(self, group: dist.ProcessGroup, wire: WireChoice = None) -> None:
        super().__init__(group)
        self.compressed = compressed_group(group, wire, "dp", "gradients of FSDP2")

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` [n·s] over ranks with ``op`` (FSDP asks for AVG, or SUM); slice r [s] goes to rank r.

        Raises GroupError where ``group``, FSDP's own, has other ranks than the planned one; UsageError with a format for an
        ``op`` that is neither SUM nor AVG, such as ``set_gradient_divide_factor`` makes FSDP ask for.
        """
        self.check(group)
        if self.compressed is None:
            work: dist.Work | None = dist.reduce_scatter_tensor(
                output_tensor, input_tensor, op=op, group=self.group, async_op=async_op
            )
            return work
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise UsageError(
                f"rank {dist.get_rank()}: with a wire format gradients are summed or averaged, got {op}: leave the factor of "
                "set_gradient_divide_factor out, or wire"
            )
        started = reduce_scatter_flat(self.compressed, output_tensor, input_tensor)
        if op == dist.ReduceOp.AVG:
            started = _Divided(started, output_tensor, self.group.size())
        return _waited(started, async_op)


class _Divided(dist.Work):
    """A sum under way, of which whoever waits makes the mean."""

    def __init__(self, work: dist.Work, total: torch.Tensor, count: int) -> None:
        super().__init__()
        self._work: dist.Work | None = work
        self._total, self._count = total, count

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._work is not None:
            self._work.wait(timeout)
            self._work = None
            self._total.div_(self._count)
        return True


def _waited(work: dist.Work, async_op: bool) -> dist.Work | None:
    if async_op:
        return work
    work.wait()
    return None


def plan_fsdp(
    model: torch.nn.Module,
    group: dist.ProcessGroup | None = None,
    wire: WireChoice = None,
    parameter_wire: WireChoice = None,
) -> dist.ProcessGroup:
    """Make all FSDP2 modules in ``model`` move parameters and gradients on a planned group. Call it after ``fully_shard``.

    Collective over the ranks of ``group``; over all ranks of the job where that is None. All modules must be sharded over the
    same ranks; where they are not, set the objects per module instead. A module whose parameters are on several meshes (a block
    with experts on a mesh of their own, as torchtitan shards it) cannot have them, and goes on by its meshes' own groups: planned
    where these are of backend ``commlayer``. Rank 0 says so, once. HSDP's all_reduce between replicas stays on the mesh's own
    group: torch has no object for it.

    Args:
        model: contains at least one module that went through ``fully_shard``.
        group: a planned group of the ranks over which the modules are sharded, on whatever lane it is; None: make one of all
            ranks, on lane dp.
        wire: of gradients, see :class:`PlannedReduceScatter`.
        parameter_wire: of parameters, see :class:`PlannedAllGather`.

    Returns:
        The group that parameters and gradients use.

    Raises:
        DisagreementError: ranks were given different formats.
        UsageError: no module of ``model`` went through ``fully_shard``; no such format.
        GroupError: ``group`` is not of backend commlayer, with a format. At the first forward: a module is sharded over other
            ranks than ``group``'s.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise UsageError(
            f"no module of this {type(model).__name__} is an FSDPModule: call torch.distributed.fsdp.fully_shard first "
            "(FullyShardedDataParallel, FSDP1, cannot replace its collectives; give it a process_group of backend commlayer)"
        )
    if group is None:
        group = planned_gradient_group()
    all_gather, reduce_scatter = PlannedAllGather(group, parameter_wire), PlannedReduceScatter(group, wire)
    require_same_wire(group, "FSDP2's parameters and gradients", all_gather.compressed, reduce_scatter.compressed)
    unplanned: list[Sequence[Any]] = []
    for module in modules:
        # One for each mesh; none in a torch that knows one mesh only. Of several it takes no object, which would not know of
        # which mesh a call is.
        parameter_groups: Sequence[Any] = getattr(module._get_fsdp_state(), "_fsdp_param_groups", ())
        if len(parameter_groups) > 1:
            unplanned.append(parameter_groups)
        else:
            module.set_custom_all_gather(all_gather)
            module.set_custom_reduce_scatter(reduce_scatter)
    if unplanned and dist.get_rank() == 0:
        meshes = [each.mesh_info for parameter_groups in unplanned for each in parameter_groups]
        own = [getattr(mesh, "shard_process_group", None) or mesh.replicate_process_group for mesh in meshes]
        names = " and ".join(sorted({dist.get_backend(each) for each in own}))
        if names == "commlayer":
            is_encoded = all_gather.compressed or reduce_scatter.compressed
            how = "which the backend commlayer plans" + (", in no wire format" if is_encoded else "")
        else:
            how = (
                f'of backend {names}, which are not planned: start the job with init_process_group("commlayer"), or '
                "COMMLAYER_AS, to have them planned"
            )
        say(
            f"plan_fsdp leaves {len(unplanned)} of {len(modules)} FSDP modules as they are: their parameters are on several "
            "meshes (experts on one of their own), and torch takes no custom communication there. They go by their meshes' "
            f"groups, {how}"
        )
    return group
