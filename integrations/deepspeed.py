"""DeepSpeed's MoE layers: tokens that all ranks of a tensor-parallel group hold by one plan of a
Communicator, others by our dispatcher.

Without tensor parallelism see :mod:`commlayer.integrations.deepspeed_tokens`.

Behind tensor parallelism DeepSpeed sends tokens to its experts in three steps, each after the
other: a rank drops what others send, all_to_all between the ranks that hold different experts, and
gathers the rest from its node. That is MoNTA's hierarchical plan, once forward and once back; here
it is a :class:`commlayer.Communicator`'s all_to_all, which chooses among all of its plans, in
chunks too. It moves the same bytes to the same places, so training is the same bit for bit.

DeepSpeed's layer stays: its own ``forward`` runs, in which the three names mean other functions for
the layers that are planned. Rejected: a copy of that method, which would be of one version; other
functions in DeepSpeed's module, which are for all layers of the process, planned or not.

Everything else of DeepSpeed's (ZeRO's and the experts' gradients, the all_to_alls of AutoEP) goes
through torch.distributed, and is planned there.
"""

from __future__ import annotations

import importlib
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commlayer.backend import world
from commlayer.collectives import GroupCommunicator
from commlayer.communicator import Communicator
from commlayer.integrations.deepspeed_tokens import dispatching_forward, sends_places
from commlayer.integrations.groups import expert_communicator, planned_from, say_first
from commlayer.integrations.moe.dispatcher import TokenDispatcher
from commlayer.integrations.moe.routing import who
from commlayer.integrations.wire_choice import DispatchWire
from commlayer.profiles.errors import GroupError, ProfileMismatchError, UsageError
from commlayer.scheduler.decision import Policy
from commlayer.scheduler.named_plans import TRIED, parse_plan
from commlayer.scheduler.plan import Strategy

__all__ = ["plan_deepspeed_moe"]

_Mover = Communicator | TokenDispatcher | str
"""The mover of a layer's tokens; or why its own calls move them."""
_IN_CHUNKS = (Strategy.PIPELINED, Strategy.PIPELINED_COPY)
_OF_REPLICATED = (Strategy.FLAT, Strategy.HIERARCHICAL, *_IN_CHUNKS)
"""The strategies that an all_to_all of replicated tokens has."""


def plan_deepspeed_moe(model: nn.Module, *, kind: str = "auto", wire: DispatchWire | str | None = None) -> None:
    """Have DeepSpeed's MoE layers in ``model`` exchange their tokens on lane ep, by our dispatcher,
    and replicated ones by a Communicator's plans.

    Collective: on all ranks alike, after ``deepspeed.initialize``, or whatever else has made the
    layers' groups; these must be of backend ``commlayer``, which
    ``deepspeed.init_distributed(dist_backend="commlayer")`` makes them. A layer of
    ``deepspeed.moe`` behind tensor parallelism, whose experts are sharded too, is given a
    :class:`commlayer.Communicator` where the job plans from a profile of its grid's shape; else its
    three steps stay, each planned by the backend. One without tensor parallelism is given a
    :class:`~commlayer.integrations.TokenDispatcher`, where the job plans from a profile; else its
    even all_to_all stays.

    Args:
        model: the engine, or what it was made of.
        kind, wire: of layers without tensor parallelism, as
            :class:`~commlayer.integrations.TokenDispatcher` takes them.

    Raises:
        UsageError: DeepSpeed is not installed, or of a version whose layer sends in another way;
            ``model`` has no MoE layer, or one without groups.
        GroupError: the groups are of another backend.
    """
    sharded = _imported("deepspeed.moe.sharded_moe").MOELayer
    layers = [module for module in model.modules() if isinstance(module, sharded)]
    if not layers:
        # A stage of DeepSpeed's pipeline, or an engine of one, may have none: others have them, and
        # make their groups' Communicators without this rank.
        pipe = _imported("deepspeed.pipe").PipelineModule
        if any(isinstance(module, pipe) for module in model.modules()):
            return
        raise UsageError(f"{who()}{type(model).__name__} has no MoE layer of DeepSpeed's: nothing is to be planned")
    made: dict[tuple[int, int], _Mover] = {}
    for layer in layers:
        group = layer.ep_group
        if group is None:
            raise UsageError(f"{who()}a MoE layer of DeepSpeed's has no groups yet: call deepspeed.initialize() first")
        ep = expert_communicator(  # from now on this is the group's lane
            group,
            "DeepSpeed's expert parallel group",
            'call deepspeed.init_distributed(dist_backend="commlayer") first',
        )
        if _key(layer) not in made:
            made[_key(layer)] = _mover(layer, ep, kind, wire)
        mover = made[_key(layer)]
        if isinstance(mover, Communicator):
            layer.forward = MethodType(_planned_forward(type(layer), mover), layer)
        elif isinstance(mover, TokenDispatcher):
            layer.forward = MethodType(dispatching_forward(mover), layer)
    first = made[_key(layers[0])]
    if not isinstance(first, TokenDispatcher):  # which says it with its first tokens, when their way is known
        ep = GroupCommunicator(layers[0].ep_group, "ep")
        is_planned = isinstance(first, Communicator)
        how = "replicated tokens by a Communicator" if is_planned else f"by DeepSpeed's own calls, because {first}"
        exchange = f"DeepSpeed's MoE layers exchange tokens over EP {ep.size}"
        say_first("DeepSpeed", lambda: f"{exchange}, planned {planned_from(ep)}; {how}")


def _key(layer: Any) -> tuple[int, int]:
    """The group of a layer, and how many experts each of its ranks has: layers that have both alike
    share what moves tokens."""
    return id(layer.ep_group), layer.num_local_experts


def _mover(layer: Any, ep: GroupCommunicator, kind: str, wire: DispatchWire | str | None) -> _Mover:
    """Make what moves the tokens of a layer; or say why nothing does but its own calls.
    Collective."""
    if ep.size == 1:
        return "all experts are here"
    job, device_type = world.current(), next(layer.parameters()).device.type
    planner = None if job is None else job.cpu_planner if device_type == "cpu" else job.device_planner(device_type)
    if job is None or planner is None:
        return f"there is no profile of the links of {device_type} tensors"
    groups, bwc = _imported("deepspeed.utils.groups"), _imported("deepspeed.utils.bwc")
    if bwc.bwc_tensor_model_parallel_world_size(groups.mpu) == 1:
        if layer.use_tutel or not sends_places(type(layer)):
            return "this layer puts tokens into their places in another way"
        number = ep.size * layer.num_local_experts
        return TokenDispatcher(number, ep=ep, kind=kind, wire=wire, used_by="DeepSpeed")
    if groups._get_expert_model_parallel_world_size() == 1:
        return "experts are not sharded over the tensor-parallel ranks, which each need a part of the tokens only"
    tp_group = bwc.bwc_tensor_model_parallel_group(groups.mpu)
    policy = _forced(job.settings.plan)
    try:
        return Communicator(layer.ep_group, tp_group, profile=planner.profile, device=device_type, policy=policy)
    except (GroupError, ProfileMismatchError) as error:  # of what all ranks have told each other
        return str(error)


def _forced(plan: str | None) -> Policy | None:
    """Make the policy of a plan that COMMLAYER_PLAN names; None where none, or none that replicated
    tokens have."""
    if plan is None or plan == TRIED:
        return None
    strategy, chunks = parse_plan(plan)
    if strategy not in _OF_REPLICATED:
        return None
    chunks = max(2, chunks) if strategy in _IN_CHUNKS else chunks
    return Policy(strategies=(strategy,), max_chunks=chunks, min_bytes=0, min_slice_bytes=1)


class _Exchange:
    """A Communicator in the place of DeepSpeed's autograd function ``_AllToAll``."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def apply(self, _: dist.ProcessGroup, rows: torch.Tensor) -> torch.Tensor:
        """Exchange rows [E, capacity, H], which the tensor-parallel ranks all hold, and get them
        so."""
        return self._communicator.all_to_all(rows)


def _unchanged(rows: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """``rows``, in the place of DeepSpeed's drop_tokens and gather_tokens."""
    return rows


def _planned_forward(layer: type[Any], communicator: Communicator) -> FunctionType:
    """The layer's own ``forward``, in which dropping, exchanging and gathering are one exchange."""
    stock: Any = layer.forward
    names = {"drop_tokens": _unchanged, "gather_tokens": _unchanged, "_AllToAll": _Exchange(communicator)}
    missing = sorted(set(names) - set(stock.__code__.co_names))
    if missing:
        raise UsageError(
            f"{who()}the forward pass of DeepSpeed's {layer.__name__} does not use {', '.join(missing)}: this version of it "
            "sends tokens in another way; leave plan_deepspeed_moe() out, and the backend plans its calls one by one"
        )
    made = FunctionType(
        stock.__code__, {**stock.__globals__, **names}, stock.__name__, stock.__defaults__, stock.__closure__
    )
    made.__kwdefaults__ = stock.__kwdefaults__
    return made


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{who()}{module} cannot be imported ({error}): install deepspeed") from error
