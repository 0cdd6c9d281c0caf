"""The folded mesh: every group of a :class:`FoldedMapping` as a torch process group and as a DeviceMesh."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from commlayer.agree.discovery import discover_topology
from commlayer.agree.messages import ControlMessage, Peers, gather_messages
from commlayer.integrations.neighbours import is_planned, use_neighbours
from commlayer.integrations.parameter_marks import is_expert
from commlayer.integrations.spread_parameters import mesh_ranks
from commlayer.profiles.errors import DisagreementError, GroupError, UsageError
from commlayer.profiles.topology import Topology
from commlayer.scheduler.lanes import lane_of, level_of
from commlayer.scheduler.mapping.describe import MeshDescription
from commlayer.scheduler.mapping.folded import AXES, FoldedMapping
from commlayer.settings import Settings

__all__ = ["FoldedMesh", "pipeline_stage"]

_DEGREES = ("tp", "cp", "pp", "ep", "etp")
_STAGES: dict[str, int] = {}
"""The pipeline stage of this rank, by the names of the groups of its experts that a mesh with several stages has made."""


def pipeline_stage(group: dist.ProcessGroup | None) -> int | None:
    """The pipeline stage whose experts ``group`` has, ``ep`` or ``etp_ep`` of a :class:`FoldedMesh`; None, where there is one
    stage, or the group is of no mesh."""
    return None if group is None else _STAGES.get(group.group_name)


class _Arguments(ControlMessage, frozen=True):
    """The mesh that a rank asks for."""

    text: str


class FoldedMesh(AbstractContextManager["FoldedMesh", None]):
    """Process groups and DeviceMeshes of attention (tp cp dp pp) and MoE layers (etp ep edp pp) over the same ranks.

    Ready when constructed. Axes whose groups have the same ranks share one process group (tp 1 and cp 1: one group of the
    rank alone; dp = cp of one rank: one group for dp and dp_cp), unless their traffic is on lanes of which one goes before the
    other (docs/lanes.md): calls on one group queue behind each other. ``separate`` gives an axis groups of its own. The
    default group is that of axis ``world``, and of others on no lower lane, where backend and timeout are its own. A group of
    one rank is a real one, on which every collective works: code for an axis need not ask whether it is used.

    Attributes:
        mapping: which ranks form which group.
        attention_mesh: DeviceMesh with dims named tp, cp, dp, pp, outermost first: ("pp", "dp", "cp", "tp") by default.
        moe_mesh: the same for ("pp", "edp", "ep", "etp").
    """

    def __init__(
        self,
        mapping: FoldedMapping | Mapping[str, int],
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
        device_type: str | None = None,
        separate: Collection[str] = (),
    ) -> None:
        """Make all groups. Collective over all ranks of the job, which pass equal arguments.

        Args:
            mapping: a mapping of as many ranks as the job has, or its degrees: ``{"tp": 2, "ep": 4}``.
            backend: as ``torch.distributed.new_group``; None: that of the default group.
            timeout: as ``torch.distributed.new_group``; None: the backend's own.
            device_type: of the DeviceMeshes; None: ``cuda`` where there is one, else ``cpu``.
            separate: axes that share their groups with no other axis, so that their calls do not queue behind those of
                another one: ``("ep",)`` where the all_to_all shall overlap the gradients of dp.

        Raises:
            GroupError: no default process group, a mapping of another number of ranks, degrees that cannot be, an unknown
                axis or backend.
            DisagreementError: ranks passed different arguments, or a rank's words cannot be read; it names them.
            CollectiveTimeoutError, PeerError: not all ranks came.
        """
        if not dist.is_initialized():
            raise GroupError("FoldedMesh needs a process group: call torch.distributed.init_process_group first")
        self.mapping = _as_mapping(mapping, dist.get_world_size())
        for axis in separate:
            if axis not in AXES:
                raise GroupError(f"separate: expected axes of {', '.join(AXES)}, got {axis!r}")
        _check_backend(backend)
        own = _Arguments(f"{self.mapping!r}, backend={backend}, timeout={timeout}, separate={sorted(separate)}")
        timeout_s = Settings.from_environment().timeout_s
        everyones = gather_messages(own, _Arguments, Peers.of(None), timeout_s, "to make a FoldedMesh")
        for rank, other in enumerate(everyones):
            if other != everyones[0]:  # they would make groups that never meet
                raise DisagreementError(
                    f"ranks disagree on the FoldedMesh: rank 0 asks for {everyones[0].text}, rank {rank} for {other.text}: pass "
                    "the same arguments on all ranks"
                )
        self._world: dist.ProcessGroup | None = dist.group.WORLD
        self._rank = dist.get_rank()
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._of_experts: set[str] = set()
        try:
            self._make_groups(backend, timeout, frozenset(separate))
        except BaseException:
            self.destroy()
            raise
        self._device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        self.attention_mesh = self._mesh(self.mapping.attention_order)
        self.moe_mesh = self._mesh(self.mapping.moe_order)

    def _make_groups(self, backend: str | None, timeout: timedelta | None, separate: Collection[str]) -> None:
        """Collective: all ranks make all groups, in the order of AXES, then of their lowest rank."""
        shared: dict[tuple[int, tuple[tuple[int, ...], ...]], dist.ProcessGroup] = {}
        if backend is None and timeout is None and self._world is not None:
            shared[0, (tuple(range(self.mapping.world_size)),)] = self._world
        for axis in AXES:
            level = level_of(lane_of(f"folded {axis}")) if self.mapping.size(axis) > 1 else 0
            key = level, tuple(self.mapping.groups(axis))
            if axis in separate or key not in shared:
                for ranks in key[1]:
                    made = dist.new_group(list(ranks), timeout=timeout, backend=backend, group_desc=f"folded {axis}")
                    if self._rank in ranks:
                        self._groups[axis] = made
                        if is_planned(made):
                            use_neighbours(made, key[1])
                if axis not in separate:
                    shared[key] = self._groups[axis]
            else:
                self._groups[axis] = shared[key]
        if self.mapping.size("pp") > 1:
            self._of_experts = {self._groups[axis].group_name for axis in ("ep", "etp_ep")}
            _STAGES.update(dict.fromkeys(self._of_experts, self.rank("pp")))

    def _mesh(self, order: str) -> DeviceMesh:
        """The groups that exist already, as one mesh. Rejected: init_device_mesh, which makes all of them once more."""
        dims = order.split("-")[::-1]
        ranks = torch.arange(self.mapping.world_size).view([self.mapping.size(dim) for dim in dims])
        groups = [self.group(dim) for dim in dims]
        return DeviceMesh.from_group(groups, self._device_type, mesh=ranks, mesh_dim_names=tuple(dims))

    def group(self, axis: str) -> dist.ProcessGroup:
        """This rank's process group of ``axis``: one of ``AXES``, such as "ep", "dp_cp" or "stage".

        Raises GroupError for an unknown axis, and after :meth:`destroy`.
        """
        if axis not in AXES:
            raise GroupError(f"expected one of the axes {', '.join(AXES)}, got {axis!r}")
        if axis not in self._groups:
            raise GroupError(f"the group {axis} of this FoldedMesh was destroyed: make another FoldedMesh")
        return self._groups[axis]

    def ranks(self, axis: str) -> tuple[int, ...]:
        """The ranks of this rank's group of ``axis``, in increasing order, which is their order in the group."""
        return self.mapping.group_of(axis, self._rank)

    def rank(self, axis: str) -> int:
        """The place of this rank in its group of ``axis``."""
        return self.ranks(axis).index(self._rank)

    def size(self, axis: str) -> int:
        """The number of ranks in each group of ``axis``."""
        return self.mapping.size(axis)

    def device_mesh(self, axis: str) -> DeviceMesh:
        """A DeviceMesh of one dim over this rank's group of ``axis``: for fully_shard, "dp_cp" (dense) and "edp" (experts)."""
        return DeviceMesh.from_group(self.group(axis), self._device_type, mesh_dim_names=(axis,))

    @property
    def dense_gradient_group(self) -> dist.ProcessGroup:
        """The replicas of a dense parameter: data and context parallel ranks together."""
        return self.group("dp_cp")

    @property
    def expert_gradient_group(self) -> dist.ProcessGroup:
        """The replicas of an expert's parameter."""
        return self.group("edp")

    @property
    def expert_gradient_scale(self) -> float:
        """The factor for the mean over :attr:`expert_gradient_group`; see :class:`FoldedMapping`."""
        return self.mapping.expert_gradient_scale

    def gradient_group(self, parameter: torch.Tensor) -> dist.ProcessGroup:
        """The group over which the gradient of ``parameter`` is averaged: a dense one's, or an expert's
        (:func:`~commlayer.integrations.parameter_marks.mark_experts`).

        Raises UsageError for a DTensor that lies over edp, as experts do, and has no mark of an expert's.
        """
        return self.expert_gradient_group if self._is_expert(parameter) else self.dense_gradient_group

    def gradient_scale(self, parameter: torch.Tensor) -> float:
        """The factor for the mean over :meth:`gradient_group`, and raises as it does: 1 for a dense parameter."""
        return self.expert_gradient_scale if self._is_expert(parameter) else 1.0

    def _is_expert(self, parameter: torch.Tensor) -> bool:
        lies_as_experts = mesh_ranks(parameter) == self.ranks("edp") != self.ranks("dp_cp")
        if lies_as_experts and self.size("edp") > 1 and not is_expert(parameter):
            raise UsageError(
                f"rank {self._rank}: a parameter {list(parameter.shape)} is sharded over edp, as experts are, but has no mark of "
                "an expert's: fully_shard makes new parameters; call mark_experts(module) after it"
            )
        return is_expert(parameter)

    def describe(self, topology: Topology | None = None) -> MeshDescription:
        """Describe which groups stay inside a node, and the slowest link that each crosses; print it, or read its rows.

        Args:
            topology: None: discover it, which is collective over all ranks of the job.

        Raises:
            GroupError: a topology of another number of ranks.
        """
        return self.mapping.describe(discover_topology() if topology is None else topology, self._rank)

    def destroy(self) -> None:
        """Destroy every group that was made here, on all ranks alike. The default group stays. Harmless when repeated."""
        groups = dict.fromkeys(self._groups.values())
        self._groups = {}
        for name in self._of_experts:
            _STAGES.pop(name, None)
        if dist.is_initialized() and dist.group.WORLD is self._world:  # else they went with their default group
            for group in groups:
                if group is not self._world:
                    dist.destroy_process_group(group)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()

    def __repr__(self) -> str:
        return f"FoldedMesh({self.mapping})"


def _as_mapping(mapping: FoldedMapping | Mapping[str, int], world_size: int) -> FoldedMapping:
    if isinstance(mapping, FoldedMapping):
        if mapping.world_size != world_size:
            raise GroupError(
                f"the mapping has {mapping.world_size} ranks, but the job has {world_size}: make it with "
                f"world_size={world_size}, or pass its degrees alone"
            )
        return mapping
    for name in mapping:
        if name not in _DEGREES:
            raise GroupError(
                f"expected degrees of {', '.join(_DEGREES)}, got {name!r}: dp and edp are what the others leave of the world"
            )
    tp, cp, pp, ep, etp = (mapping.get(name, 1) for name in _DEGREES)
    return FoldedMapping(world_size, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)


def _check_backend(backend: str | None) -> None:
    """Raise GroupError for a backend ("gloo", "cpu:gloo,cuda:nccl") that torch does not know: it would fail on an assert."""
    if backend is None:
        return
    if "commlayer" in backend:
        import commlayer.backend  # noqa: F401  # makes the name valid, also where no entry point was installed
    for part in backend.split(","):
        if not dist.is_backend_available(part.split(":")[-1]):
            known = ", ".join(name for name in dist.Backend.backend_list if dist.is_backend_available(name))
            raise GroupError(f"backend: expected one that torch knows ({known}), got {backend!r}")
