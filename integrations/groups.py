"""A planned process group beside one that the user already has."""

from __future__ import annotations

import torch.distributed as dist

from commlayer.profiles.errors import GroupError

__all__ = ["check_same_ranks", "planned_group"]


def planned_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Make a process group with backend ``commlayer`` over the ranks of ``group``, which stays as it is.

    Collective over **all** ranks of the job, as ``torch.distributed.new_group`` is, also where ``group`` is a smaller one:
    each rank passes the group that it is in, and gets the planned group of the same ranks.

    Args:
        group: the group whose traffic shall be planned; None: all ranks.

    Raises:
        GroupError: there is no default process group, or this rank is not in ``group``.
    """
    import commlayer.backend  # noqa: F401  # makes the backend's name valid, also where no entry point was installed

    if not dist.is_initialized():
        raise GroupError("planned_group() needs a process group: call torch.distributed.init_process_group first")
    if group is None or group is dist.group.WORLD:
        return _new_group(tuple(range(dist.get_world_size())))
    if not isinstance(group, dist.ProcessGroup):  # GroupMember.NON_GROUP_MEMBER
        raise GroupError(
            f"rank {dist.get_rank()} passed planned_group() a group that it is not in: every rank passes the group that it "
            "belongs to, such as mesh.get_group('dp')"
        )
    # Which groups the others are in. Rejected: new_group(use_local_synchronization=True), which makes a group's name from
    # the number of groups that a rank is in; ranks in different numbers of groups then wait for each other for ever.
    mine = tuple(dist.get_process_group_ranks(group))
    everyones: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    ours = None
    # Collective over the job: all ranks make all groups, in one order.
    for ranks in sorted(set(everyones)):
        made = _new_group(ranks)
        ours = made if ranks == mine else ours
    if ours is None:
        raise GroupError(f"rank {dist.get_rank()} is not in its own group of ranks {mine}")
    return ours


def _new_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(list(ranks), backend="commlayer", group_desc="commlayer")
    return group


def check_same_ranks(wanted: dist.ProcessGroup, planned: dist.ProcessGroup, whose: str) -> None:
    """Raise GroupError unless both groups have the same ranks in the same order. ``whose``: who uses ``wanted``."""
    expected, got = dist.get_process_group_ranks(wanted), dist.get_process_group_ranks(planned)
    if expected != got:
        raise GroupError(
            f"rank {dist.get_rank()}: the planned group has ranks {got}, but {whose} communicates among ranks {expected}; "
            "make the planned group with planned_group() of that very group"
        )
