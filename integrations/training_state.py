"""The state of a training run by names that no mapping changes: what a checkpoint has, whatever ranks it is loaded on.

A name is a parameter's, and an expert's has the expert's number: ``model.layers.0.moe.experts.w_gate.17``. So it says nothing of
where an expert lies, on how many ranks, or in how many copies. Ranks have the entries of what they hold; what several
hold is equal on all of them, and saved once. What is split over tp or etp keeps the cut in its name (``….tp0of2``): it can be
loaded only where the same degree cuts it. So do experts that :func:`~commlayer.integrations.parameter_marks.mark_experts` marks
in modules of a user's own (``….ep0of4``): no number of them is known. A DTensor is saved by its shards, under one name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from commlayer.agree.messages import ControlMessage, Peers, Reason, gather_messages
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.expert_migration import optimizer_of
from commlayer.integrations.moe.experts import GroupedExperts
from commlayer.integrations.moe.routing import who
from commlayer.integrations.parameter_marks import holds_experts
from commlayer.integrations.parameter_owners import owned_parameters
from commlayer.integrations.spread_parameters import (
    fill_whole,
    first_row,
    is_dtensor,
    local_part,
    refuse_fsdp1,
    reshard,
)
from commlayer.profiles.counted import counted
from commlayer.profiles.errors import TensorError, UsageError
from commlayer.settings import Settings

__all__ = ["TrainingState"]

_BEGIN_ELSEWHERE = (torch.optim.ASGD, torch.optim.NAdam, torch.optim.Rprop)
"""Optimizers whose state does not begin with zeros: a product or a rate is in it."""


class _CanLoad(ControlMessage, frozen=True):
    """Why a rank cannot take a state; None: it can."""

    trouble: Reason | None = None


class TrainingState:
    """The state of a model and its optimizers, for ``torch.distributed.checkpoint``, which takes it as it is::

        state = TrainingState(model, optimizer, mesh)
        dcp.save({"training": state}, checkpoint_id="step-1000")
        dcp.load({"training": state}, checkpoint_id="step-1000")    # on other ranks, another EP, other placements of experts

    Options of optimizers, such as learning rates, are not in it, nor is where experts lie: they are loaded to where they lie now.
    :meth:`state_dict` is collective over the stage, and :meth:`load_state_dict` over all ranks of ``mesh``: where one cannot
    load, none does.

    Args:
        model: with its MoE layers in order, or placed.
        optimizer: torch's, or several of them.
        mesh: of the model; None: it is whole on this rank, but for what DTensors spread over their own meshes.

    Raises UsageError for parameters of FSDP1. :meth:`state_dict` raises it for a parameter of which nothing says whether ranks
    hold parts or copies (:func:`~commlayer.integrations.parameter_owners.owned_parameters`), and for experts that a DTensor cuts
    along another dim than the first.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        mesh: FoldedMesh | None,
    ) -> None:
        refuse_fsdp1(model.named_parameters(), "TrainingState")
        self._model, self._mesh = model, mesh
        self._optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return all tensors of which this rank has a part to save, by name: those of the model and its optimizers themselves.

        An optimizer that has made no step gets its state here, of zeros: what is loaded needs a place. Raises UsageError for one
        whose gradients are there already, or whose state begins with other numbers, as NAdam's does.
        """
        reshard(self._model)
        for optimizer in self._optimizers:
            _begin(optimizer)
        entries = dict(self._buffers())
        for _, names, tensors in self._entries():
            for row, name in names.items():
                for key, tensor in tensors.items():
                    of_expert = tensor if row is None or tensor.shape != tensors[""].shape else tensor[row]
                    label = name if of_expert is not tensor or row is None else _without_number(name)
                    entries[_key(label, key)] = of_expert.detach()
        return entries

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take the entries of ``state`` that belong here; it may have more.

        Raises UsageError where one is missing, and while an ExpertPlacer moves experts; TensorError where one has another shape;
        where a rank raises one of these, UsageError on all others, which names the rank and its reason. Then nothing has been
        changed anywhere.
        """
        self._together(self._prepare)
        own = self.state_dict()
        self._together(lambda: _require_fit(own, state))
        for name, tensor in own.items():
            loaded = state[name]
            if is_dtensor(loaded):
                if local_part(loaded).data_ptr() != local_part(tensor).data_ptr():
                    tensor.copy_(loaded)
            elif is_dtensor(tensor) or loaded.data_ptr() != tensor.data_ptr():
                fill_whole(tensor, loaded)

    def _prepare(self) -> None:
        """Let optimizers begin. Raises UsageError where what is loaded would not stay, or has no place or no name."""
        owned_parameters(self._model, self._mesh)
        for part in self._model.modules():
            if isinstance(part, GroupedExperts) and part.slots is not None:
                part.slots.require_still()
        for optimizer in self._optimizers:
            _begin(optimizer)

    def _together(self, task: Callable[[], object]) -> None:
        """Do ``task`` on all ranks of the mesh, and raise on all of them where it raises on one: a rank that went on alone would
        wait for the others in the next collective, or train from another state than they."""
        failure: Exception | None = None
        try:
            task()
        except Exception as error:  # noqa: BLE001  told to the others, and raised
            failure = error
        if self._mesh is not None and self._mesh.size("world") > 1:
            answer = _CanLoad(None if failure is None else Reason.of(failure))
            peers, timeout_s = Peers.of(self._mesh.group("world")), Settings.from_environment().timeout_s
            answers = gather_messages(answer, _CanLoad, peers, timeout_s, "to load a training state")
            wrong = [(rank, each.trouble) for rank, each in zip(peers.ranks, answers, strict=True) if each.trouble]
            if wrong and failure is None:
                more = f", and {counted(len(wrong) - 1, 'more rank')} cannot" if len(wrong) > 1 else ""
                raise UsageError(
                    f"{who()}nothing was loaded on any rank, for rank {wrong[0][0]} cannot take the state{more}: {wrong[0][1]}"
                )
        if failure is not None:
            raise failure

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every buffer by its name, with a cut where its module holds other parameters than that of another rank."""
        split = {id(owned.parameter) for owned in owned_parameters(self._model, self._mesh) if owned.is_split}
        for prefix, part in self._model.named_modules():
            cut = self._cut("ep") + self._cut("etp") if holds_experts(part) else ""
            if not cut and any(id(parameter) in split for parameter in part.parameters(recurse=False)):
                cut = self._cut("tp")
            for name, buffer in part.named_buffers(recurse=False):
                yield f"model.{prefix}.{name}{cut}" if prefix else f"model.{name}{cut}", buffer

    def _entries(self) -> Iterator[tuple[nn.Parameter, dict[int | None, str], dict[str, torch.Tensor]]]:
        """Every parameter; the names of its parts by their place in it, None for the whole; its tensors: itself ("") and its
        optimizer's."""
        experts = {
            id(parameter): (f"{prefix}.{name}" if prefix else name, holder)
            for prefix, holder in self._model.named_modules()
            if isinstance(holder, GroupedExperts)
            for name, parameter in holder.named_parameters(recurse=False)
        }
        for owned in owned_parameters(self._model, self._mesh):
            parameter = owned.parameter
            tensors = {"": parameter.data}
            optimizer = optimizer_of(parameter, self._optimizers)
            if optimizer is not None:
                state = optimizer.state.get(parameter, {})
                tensors |= {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
            names: dict[int | None, str]
            if id(parameter) in experts:
                label, holder = experts[id(parameter)]
                cuts = self._cut("etp")
                placements = getattr(parameter, "placements", ())
                if any(not each.is_shard(0) and not each.is_replicate() for each in placements):
                    raise UsageError(
                        f"{who()}TrainingState names each expert of {owned.name} by its number, but a DTensor cuts the experts "
                        f"themselves, as {tuple(placements)}: shard the stack along its first dim alone, as fully_shard does by "
                        "default"
                    )
                first = first_row(parameter)
                here = range(first, first + local_part(parameter).shape[0])
                names = {
                    row: f"{label}.{holder.numbers[stacked]}{cuts}"
                    for row, stacked in enumerate(here)
                    if holder.numbers[stacked] >= 0
                }
                tensors = {key: local_part(tensor) for key, tensor in tensors.items()}
            else:
                # Each rank of ep has an expert of its own, whose number nobody knows.
                cuts = self._cut("ep") if owned.is_expert else ""
                cuts += self._cut("etp" if owned.is_expert else "tp") if owned.is_split else ""
                names = {None: owned.name + cuts}
            yield parameter, names, tensors

    def _cut(self, axis: str) -> str:
        if self._mesh is None or self._mesh.size(axis) == 1:
            return ""
        return f".{axis}{self._mesh.rank(axis)}of{self._mesh.size(axis)}"


def _require_fit(own: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    """Raises UsageError where ``state`` lacks one of ``own``, TensorError where it has one of another shape."""
    missing = [name for name in own if name not in state]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UsageError(
            f"{who()}the state lacks {missing[0]}{more}: it is of another model or optimizer, or of "
            "one rank alone; load it by torch.distributed.checkpoint, or put the ranks' states together"
        )
    for name, tensor in own.items():
        if state[name].shape != tensor.shape:
            raise TensorError(
                f"{who()}{name}: expected {list(tensor.shape)}, the state has {list(state[name].shape)}: it is of another model"
            )
        if is_dtensor(state[name]) and not is_dtensor(tensor):
            raise TensorError(
                f"{who()}{name}: expected a plain tensor, the state has a DTensor: load it by torch.distributed.checkpoint, or "
                "give the state its full_tensor()"
            )


def _key(name: str, key: str) -> str:
    return f"optimizer.{name}.{key}" if key else f"model.{name}"


def _without_number(name: str) -> str:
    """The name of all experts' parameter: what an optimizer keeps once for all of them, such as how many steps there were."""
    label, _, number = name.rpartition(".")
    return label if number.isdigit() else _without_number(label)


def _begin(optimizer: Optimizer) -> None:
    """Let an optimizer make its state, by a step with gradients of zeros at a learning rate of zero."""
    parameters = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    keeps_nothing = isinstance(optimizer, torch.optim.SGD) and not any(
        group["momentum"] for group in optimizer.param_groups
    )
    if optimizer.state or not parameters or keeps_nothing:
        return
    if any(parameter.grad is not None for parameter in parameters):
        raise UsageError(f"{who()}an optimizer before its first step, and gradients are there: call zero_grad() first")
    if isinstance(optimizer, _BEGIN_ELSEWHERE):
        raise UsageError(
            f"{who()}{type(optimizer).__name__} before its first step: its state does not begin with zeros, and only a step "
            "makes it; make one first, also where a checkpoint is loaded then"
        )
    rates: list[Any] = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter in parameters:
        parameter.grad = None
        for tensor in optimizer.state[parameter].values():
            if isinstance(tensor, torch.Tensor):
                tensor.zero_()  # the number of steps too: there was none
