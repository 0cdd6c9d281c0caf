"""torchft's process group between replicas, of backend ``commlayer``: planned, compressed where that is allowed, made anew with
every quorum.

    pg = planned_process_group("int8!")              # was ProcessGroupGloo(…)
    manager = Manager(pg=pg, …)

torchft makes the group between its replicas anew whenever members join or leave, over a store of each quorum, and numbers the
replicas by itself. So each such group stands alone: its ranks agree on where they run, their settings and their profile with each
other, and not with the job that each replica is. It has one rank of each replica, so sums go by messages from every site to every
other one: as many bytes as a ring's, and two waits for the links instead of two for every other site. Over how many connections,
or whether round a ring, a quorum's first calls find out. That needs no profile, and none is measured when members change.

DiLoCo and LocalSGD send whole models over it, between sites. Their FP32 sums may go in BF16 or in INT8: one rounding of what each
replica sends, and one of the sum, which is taken in FP32; all replicas hold the same bits.
"""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch.distributed as dist

from commlayer.backend.group_options import GroupOptions
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.named_plans import TRIED
from commlayer.statistics import name_replica

__all__ = ["planned_process_group"]

_VERSIONS = "torchft>=0.2,<0.3"
"""The versions whose groups are made anew by ``configure()``; those of pyproject's extra."""
_PATIENCE_S = 0.1
"""How long a new quorum waits for the old one's calls. A replica asks for a quorum after its calls: what is left hangs."""


def planned_process_group(
    wire: str | None = None,
    *,
    plan: str | None = None,
    timeout: timedelta = timedelta(seconds=60),
    options: GroupOptions | None = None,
) -> dist.ProcessGroup:
    """Make a process group for torchft's ``Manager``, in the place of ``ProcessGroupGloo``.

    An element of the sum is off by at most, in BF16: 2⁻⁸ of the magnitudes that were added, and 2⁻⁸ of the sum; in INT8: 1/253 of
    the largest magnitude in the element's block of 128, of each replica's tensor, added up, and 1/253 of that of the sum.

    Args:
        wire: in which format sums of FP32 tensors cross: ``int8!``, ``bf16!``; without ``!`` where the profile finds it faster;
            None: as they are.
        plan: one for every call to which it applies; ``auto``: by a profile, which is measured where there is none of these
            sites, in some seconds that configuring takes longer; ``flat``: as Gloo runs it; ``flat_direct``: sums in the order
            of sites, the same bits in every run. None: ``tried``, by what the first calls took, or ``auto`` where a profile is
            to say whether ``wire`` is faster.
        timeout: of each call, and of making a group anew.
        options: all options of the groups, instead of ``wire`` and ``plan``.

    Raises UsageError where torchft is not installed, or makes groups anew in another way than 0.2, and for a ``wire``,
    ``options`` or a ``timeout`` that are none.
    """
    is_given_both = (wire or plan) is not None and options is not None
    if is_given_both or not (options is None or isinstance(options, GroupOptions)):
        raise UsageError(
            f"give wire and plan, or options, a commlayer.GroupOptions; got wire {wire!r}, plan {plan!r} and options {options!r}"
        )
    _check_timeout(timeout)
    if wire is not None and not isinstance(wire, str):
        raise UsageError(f"wire must be a text such as int8! or bf16!, or None; got {wire!r}")
    try:
        groups: Any = import_module("torchft.process_group")
    except ImportError as error:
        raise UsageError(
            f"planned_process_group is for torchft, which cannot be imported ({error}): pip install '{_VERSIONS}'"
        ) from error
    if not hasattr(groups.ProcessGroupWrapper, "configure"):
        raise UsageError(
            f"planned_process_group: this torchft ({_version()}) does not make groups anew by configure(), as {_VERSIONS} does; "
            f"with a group that has nothing else its Manager would never commit a step: pip install '{_VERSIONS}'"
        )
    if options is None:
        needs_profile = wire is not None and wire != "native" and not wire.endswith("!")
        options = GroupOptions(wire=wire, plan=plan or ("auto" if needs_profile else TRIED))
    made: dist.ProcessGroup = _class_of(groups.ProcessGroupWrapper)(timeout, options)
    return made


def _version() -> str:
    try:
        return f"version {version('torchft')}"
    except PackageNotFoundError:
        return "of an unknown version"


def _check_timeout(timeout: timedelta) -> None:
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise UsageError(f"timeout: expected a timedelta above zero, such as timedelta(seconds=60), got {timeout!r}")


def _class_of(wrapper: Any) -> Any:
    class PlannedProcessGroup(wrapper):  # type: ignore[misc]  # torchft's, of which nothing is known here
        """A reconfigurable group of backend ``commlayer``, as torchft's are of Gloo and NCCL."""

        _pg: Any

        def __init__(self, timeout: timedelta, options: GroupOptions) -> None:
            super().__init__(timeout)
            self._options = options

        def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
            from commlayer.backend.new_groups import make_group

            # The ranks of a replica have a group each in every quorum.
            whose = f", rank {self._group_rank} of each replica" if self._group_rank else ""
            made = make_group(
                name=f"torchft quorum {self._quorum_id}{whose}",
                rank=rank,
                global_ranks=range(world_size),
                store=store,
                timeout=self._timeout,
                options=self._options,
                stands_alone=True,
            )
            name, _, drawn = (self._replica_id or "").partition(":")  # the user's, and what torchft has drawn
            name_replica(name or drawn[:8])
            return made

        def set_timeout(self, timeout: timedelta) -> None:
            """The timeout of calls from now on, and of making a group anew."""
            _check_timeout(timeout)
            super().set_timeout(timeout)
            if self._pg is not None:
                self.parent.set_timeout(timeout)

        def abort(self, errored: bool = True) -> None:
            """Let go of the group. After an error what is under way is broken, here and on the others."""
            group, self._pg = self._pg, None
            super().abort(errored)  # torchft's log
            if errored and group is not None:
                group.abort()  # its calls may look ended where a device has launched them, and wait for who is gone
            else:
                _let_go(group, _PATIENCE_S)

        def shutdown(self) -> None:
            """Let go of the group, once what is under way has ended."""
            group, self._pg = self._pg, None
            _let_go(group, self._timeout.total_seconds())

        def getBackendName(self) -> str:  # noqa: N802  torch's name
            return "torchft-commlayer"

    return PlannedProcessGroup


def _let_go(group: Any, patience_s: float) -> None:
    if group is not None:
        group.leave(patience_s)
