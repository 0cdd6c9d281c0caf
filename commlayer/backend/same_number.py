"""A number that a program tells a group: all of its ranks say the same one, or all of them hear who
said what."""

from __future__ import annotations

import time

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceOp, Work

from commlayer.backend.inner import InnerGroups
from commlayer.backend.members import Members
from commlayer.failures.waits import wait
from commlayer.profiles.errors import ClusterError, DisagreementError

__all__ = ["require_same_number", "settle_own_call"]

_MOST_NAMED = 8


def require_same_number(members: Members, inner: InnerGroups, sequence: int, call: str, number: int) -> None:
    """Return when all ranks of the group have come with the same ``number`` for ``call``, the
    ``sequence``-th of the group. Collective, in its order.

    One small all_reduce where they agree. Raises, on all ranks alike, DisagreementError that names
    who said what; CollectiveTimeoutError where a rank does not come within the group's timeout,
    PeerError where one is gone.
    """
    if members.size == 1:
        return
    if inner.signatures is not None:
        limit_s = inner.timeout.total_seconds()
        inner.signatures.compare(sequence, f"{call}({number})", limit_s)
    extremes = torch.tensor([number, -number], dtype=torch.int64)
    reducing = AllreduceOptions()
    reducing.reduceOp, reducing.timeout = ReduceOp(ReduceOp.MAX), inner.timeout
    settle_own_call(members, inner, sequence, call, inner.gloo.allreduce([extremes], reducing))
    most, least = int(extremes[0]), -int(extremes[1])
    if most == least:
        return
    everyones = torch.zeros(members.size, dtype=torch.int64)
    gathering = AllgatherOptions()
    gathering.timeout = inner.timeout
    own = torch.tensor([number], dtype=torch.int64)
    settle_own_call(members, inner, sequence, call, inner.gloo._allgather_base(everyones, own, gathering))
    raise DisagreementError(
        f"{members.who}, {call} #{sequence}: {_said(everyones.tolist(), members.global_ranks)}; expected the "
        "same number on all ranks of the group: call it alike on all of them (nothing was changed)"
    )


def settle_own_call(members: Members, inner: InnerGroups, sequence: int, call: str, work: Work) -> None:
    """Wait for a call of Gloo's own that serves ``call``, the group's ``sequence``-th. Raises
    ClusterError, as calls do."""
    planned, began = inner.planned, time.monotonic()
    try:
        wait(work, planned.board)
    except RuntimeError as error:
        limit_s = inner.timeout.total_seconds()
        explained = planned.explain(error, call, sequence, time.monotonic() - began, limit_s)
        kind = type(explained) if isinstance(explained, ClusterError) else ClusterError
        raise kind(f"{members.who}, {call} #{sequence}: {explained}") from error


def _said(numbers: list[int], ranks: list[int] | tuple[int, ...]) -> str:
    """Words such as ``ranks 0, 2 say 1, rank 1 says 4``."""
    saying: dict[int, list[int]] = {}
    for rank, number in zip(ranks, numbers, strict=True):
        saying.setdefault(number, []).append(rank)
    return ", ".join(_names(who, number) for number, who in saying.items())


def _names(who: list[int], number: int) -> str:
    if len(who) == 1:
        return f"rank {who[0]} says {number}"
    more = f" and {len(who) - _MOST_NAMED} more" if len(who) > _MOST_NAMED else ""
    return f"ranks {', '.join(map(str, who[:_MOST_NAMED]))}{more} say {number}"
