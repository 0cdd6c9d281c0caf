"""Megatron-Core's groups, which communicate at the same time along each axis of its mesh, told of each other."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

import torch.distributed as dist

from commlayer.agree.messages import ControlMessage, Peers
from commlayer.agree.tree import gather_by_tree
from commlayer.integrations.neighbours import is_planned, use_neighbours
from commlayer.profiles.errors import DisagreementError, GroupError, UsageError
from commlayer.settings import Settings

__all__ = ["tell_megatron_neighbours"]

_GETTERS: Mapping[str, tuple[str, dict[str, bool]]] = {
    "tp": ("get_tensor_model_parallel_group", {}),
    "cp": ("get_context_parallel_group", {}),
    "dp": ("get_data_parallel_group", {}),
    "pp": ("get_pipeline_model_parallel_group", {}),
    "tp_cp": ("get_tensor_and_context_parallel_group", {}),
    "mp": ("get_model_parallel_group", {}),
    "dp_cp": ("get_data_parallel_group", {"with_context_parallel": True}),
    "tp_dp_cp": ("get_tensor_and_data_parallel_group", {"with_context_parallel": True}),
    "ep": ("get_expert_model_parallel_group", {}),
    "expt_tp": ("get_expert_tensor_parallel_group", {}),
    "tp_ep": ("get_expert_tensor_and_model_parallel_group", {}),
    "tp_ep_pp": ("get_expert_tensor_model_pipeline_parallel_group", {}),
    "expt_dp": ("get_expert_data_parallel_group", {}),
}
"""The groups of Megatron-Core that training steps use, as a ProcessGroupCollection names them, and who has them otherwise."""


class _Memberships(ControlMessage, frozen=True):
    """A rank's groups by axis: the ranks of those of which it is the first, which says it for all; of others their first rank."""

    first_of: dict[str, tuple[int, ...]]
    member_of: dict[str, int]


def tell_megatron_neighbours(groups: object | None = None) -> dict[str, int]:
    """Tell Megatron-Core's groups that those of the same axis communicate at the same time, as training steps do.

    Collective: **all** ranks of the job call this after ``initialize_model_parallel`` and before training. Megatron makes its
    groups one after the other, in which a group sees nothing of the others; here ranks tell each other which they are in, in
    whatever order its axes lie. Groups that are not of backend ``commlayer``, and those of one rank, stay as they are.

    Args:
        groups: a ``ProcessGroupCollection``, or whatever else has some of its attributes (tp, cp, dp, pp, tp_cp, mp, dp_cp,
            tp_dp_cp, ep, expt_tp, tp_ep, tp_ep_pp, expt_dp), of which any may be missing or None; None: the groups of
            ``megatron.core.parallel_state``.

    Returns:
        By axis, how many groups of it share this rank's node, at most; of the axes that have such groups.

    Raises:
        UsageError: no groups are given, and Megatron-Core is not installed or has made none; what stands under an axis is no
            group.
        GroupError: there is no default process group of backend ``commlayer``.
        DisagreementError, CollectiveTimeoutError, PeerError: ranks have groups that others do not know of, or did not come.
    """
    if not dist.is_initialized() or dist.group.WORLD is None or not is_planned(dist.group.WORLD):
        raise GroupError(
            'tell_megatron_neighbours() needs init_process_group("commlayer"): nobody else knows which ranks share a node'
        )
    groups = _groups_of_megatron() if groups is None else groups
    own: dict[str, Any] = {}
    for axis in _GETTERS:
        group = groups.get(axis) if isinstance(groups, Mapping) else getattr(groups, axis, None)
        if group is None or group is dist.GroupMember.NON_GROUP_MEMBER:
            continue
        if not isinstance(group, dist.ProcessGroup):
            raise UsageError(f"rank {dist.get_rank()}: expected a process group as {axis} of {groups!r}, got {group!r}")
        if group.size() > 1 and is_planned(group):
            own[axis] = group
    everyones = _groups_of_all_ranks(own)
    siblings: dict[str, int] = {}
    # In the order of _GETTERS on every rank: of two groups nobody waits in another order.
    for axis, group in own.items():
        use_neighbours(group, everyones[axis])
        siblings[axis] = group.siblings
    return siblings


def _groups_of_all_ranks(own: Mapping[str, Any]) -> dict[str, list[tuple[int, ...]]]:
    """The ranks of all groups of the job, by axis. Collective over the job; what is raised, all ranks raise."""
    rank = dist.get_rank()
    members = {axis: tuple(dist.get_process_group_ranks(group)) for axis, group in own.items()}
    said = _Memberships(
        {axis: ranks for axis, ranks in members.items() if ranks[0] == rank},
        {axis: ranks[0] for axis, ranks in members.items() if ranks[0] != rank},
    )
    timeout_s, purpose = Settings.from_environment().timeout_s, "to tell Megatron's groups of each other"
    messages = gather_by_tree(said, _Memberships, Peers.of(None), timeout_s, purpose)
    by_axis: dict[str, list[tuple[int, ...]]] = {}
    for sender, each in enumerate(messages):
        for axis, ranks in each.first_of.items():
            knows = f"a group of the ranks {list(ranks)}"
            if axis not in _GETTERS or tuple(ranks[:1]) != (sender,) or len(set(ranks)) < len(ranks):
                _disagree(axis, sender, knows, sender, "no such group")
            for rank in ranks[1:]:
                other = messages[rank].member_of.get(axis) if 0 <= rank < len(messages) else None
                if other != sender:
                    instead = "of no group" if other is None else f"of a group of which rank {other} is the first"
                    _disagree(axis, sender, knows, rank, instead)
            by_axis.setdefault(axis, []).append(ranks)
        for axis, first in each.member_of.items():
            if not 0 <= first < len(messages) or sender not in messages[first].first_of.get(axis, ()):
                _disagree(axis, sender, f"a group of which rank {first} is the first", first, "nothing of it")
    return by_axis


def _disagree(axis: str, rank: int, knows: str, other: int, knows_instead: str) -> NoReturn:
    raise DisagreementError(
        f"ranks disagree on the groups of axis {axis!r}: rank {rank} knows {knows}, rank {other} {knows_instead}; call "
        "tell_megatron_neighbours() with the same mesh's groups on all ranks"
    )


def _groups_of_megatron() -> dict[str, Any]:
    try:
        state: ModuleType = importlib.import_module("megatron.core.parallel_state")
    except ImportError as error:
        raise UsageError(
            f"rank {dist.get_rank()}: megatron.core.parallel_state cannot be imported ({error}): install megatron-core, or pass "
            "the groups, such as a ProcessGroupCollection"
        ) from error
    by_axis = {}
    for axis, (name, options) in _GETTERS.items():
        if hasattr(state, name):  # else this version does not know it
            with suppress(AssertionError):  # "… group is not initialized"
                by_axis[axis] = getattr(state, name)(**options)
    if not any(by_axis.values()):
        raise UsageError(
            f"rank {dist.get_rank()}: Megatron-Core has made no groups: call initialize_model_parallel() before "
            "tell_megatron_neighbours(), or pass the groups"
        )
    return by_axis
