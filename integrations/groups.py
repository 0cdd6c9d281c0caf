"""The groups of a trainer's hook: a planned one beside one that the user already has, and the one
line that a hook says when it first plans: what, how, and from which profile."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from commlayer.agree.messages import ControlMessage, Peers, gather_messages
from commlayer.backend import world
from commlayer.collectives import GroupCommunicator
from commlayer.profiles.errors import DisagreementError, GroupError
from commlayer.profiles.printable import say
from commlayer.settings import Settings

__all__ = [
    "check_same_ranks",
    "expert_communicator",
    "planned_from",
    "planned_gradient_group",
    "planned_group",
    "say_first",
]

_said: set[str] = set()


class _Ranks(ControlMessage, frozen=True):
    """The global ranks of the group that a rank has passed."""

    ranks: tuple[int, ...]


def planned_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Make a process group with backend ``commlayer`` over the ranks of ``group``, which stays as
    it is.

    Collective over **all** ranks of the job, as ``torch.distributed.new_group`` is, also where
    ``group`` is a smaller one: each rank passes the group that it is in, and gets the planned group
    of the same ranks.

    Args:
        group: the group whose traffic shall be planned; None: all ranks.

    Raises:
        GroupError: there is no default process group, or this rank is not in ``group``.
        DisagreementError: a rank's words cannot be read, or are of no group that it can be in; it
            names the rank.
        CollectiveTimeoutError, PeerError: not all ranks of the job came.
    """
    import commlayer.backend  # noqa: F401  # makes the backend's name valid, also where no entry point was installed

    if not dist.is_initialized():
        raise GroupError("planned_group() needs a process group: call torch.distributed.init_process_group first")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):  # GroupMember.NON_GROUP_MEMBER
        raise GroupError(
            f"rank {dist.get_rank()} passed planned_group() a group that it is not in: every rank passes the group that it "
            "belongs to, such as mesh.get_group('dp')"
        )
    # Which groups the others are in. Rejected: new_group(use_local_synchronization=True), which
    # makes a group's name from the number of groups that a rank is in; ranks in different numbers
    # of groups then wait for each other for ever.
    own = tuple(dist.get_process_group_ranks(group))
    timeout_s = Settings.from_environment().timeout_s
    messages = gather_messages(_Ranks(own), _Ranks, Peers.of(None), timeout_s, "to make planned groups")
    everyones = [each.ranks for each in messages]
    for rank, ranks in enumerate(everyones):  # every rank would make a group that cannot be
        if rank not in ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(len(everyones))):
            raise DisagreementError(
                f"rank {rank} says that its group has ranks {list(ranks)}: expected different ranks from 0 "
                f"to {len(everyones) - 1}, {rank} among them; look whether something else than a rank of "
                "this job has come in as it"
            )
    # Collective over the job: all ranks make all groups, in one order.
    made: dict[tuple[int, ...], dist.ProcessGroup] = {
        ranks: dist.new_group(list(ranks), backend="commlayer", group_desc="commlayer")
        for ranks in sorted(set(everyones))
    }
    return made[own]


def planned_gradient_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Make a :func:`planned_group` of ``group``'s ranks on lane dp."""
    made = planned_group(group)
    # Held, but not cut more finely: perhaps nobody goes before. COMMLAYER_LANES=on, or
    # use_lane("dp"), cuts.
    made.use_lane("dp", fine=False)  # type: ignore[attr-defined]
    return made


def expert_communicator(group: dist.ProcessGroup, whose: str, advice: str) -> GroupCommunicator:
    """A communicator of a trainer's ``group`` for tokens on their way to experts. Raises GroupError
    for a group of several ranks that is another backend's; ``whose`` it is and ``advice`` are for
    the message.
    """
    if group.size() > 1 and (backend := dist.get_backend(group)) not in GroupCommunicator.backends:
        raise GroupError(f"rank {dist.get_rank()}: {whose} has backend {backend}: {advice}")
    return GroupCommunicator(group, "ep")


def check_same_ranks(wanted: dist.ProcessGroup, planned: dist.ProcessGroup, whose: str) -> None:
    """Raise GroupError unless both groups have the same ranks in the same order. ``whose``: who
    uses ``wanted``."""
    expected, got = dist.get_process_group_ranks(wanted), dist.get_process_group_ranks(planned)
    if expected != got:
        raise GroupError(
            f"rank {dist.get_rank()}: the planned group has ranks {got}, but {whose} communicates among ranks {expected}; "
            "make the planned group with planned_group() of that very group"
        )


def planned_from(group: GroupCommunicator) -> str:
    """Name the profile that ``group`` plans from, in words for a line's end: the job's, or the
    group's own, where the default group is another backend's."""
    job = world.current()
    if job is not None and job.planner is not None:
        return f"from profile {job.planner.profile.name}"
    return "without a profile" if group.profile is None else f"from profile {group.profile.name}"


def say_first(whose: str, text: Callable[[], str]) -> None:
    """Print what ``text`` returns on stderr, the first time that ``whose`` planning is spoken of;
    on the job's rank 0 alone."""
    if whose in _said:
        return
    _said.add(whose)
    if dist.get_rank() == 0:
        say(text())
