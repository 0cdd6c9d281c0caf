"""Trials: the plans that contend for a group's call, run by all of its ranks, and settled by what
they took."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from commlayer.calls.instruments import NewGroup
from commlayer.engine.group_plans import Choices
from commlayer.engine.planned import PlannedGroup
from commlayer.measure.calls import GroupCall
from commlayer.measure.harness import HostGroup
from commlayer.profiles.errors import ClusterError
from commlayer.profiles.printable import warn
from commlayer.scheduler.plan import Plan, Strategy

__all__ = ["attach", "attach_of_calls", "connected", "judge", "run_pending"]

_WHAT = "the trial of its plans"
_PATIENCE_S = 30.0
"""How long connections of a plan that only contends are waited for, where the group's timeout is
longer."""


def attach(group: NewGroup) -> None:
    """Have what runs the calls of a group that is being made run its trials, too."""
    group.calls.use_trials(connected=connected, run_pending=run_pending, judge=judge)


def attach_of_calls(group: NewGroup) -> None:
    """Do nothing: trials are run by the host, which does not see a device's steps."""


def run_pending(planned: PlannedGroup, timeout_s: float | None = None) -> None:
    """Run the plans of the trial that is pending in a group, and settle it. Collective over the
    group, between calls.

    They run in turn, on tensors of their own; what counts is the fastest time of each, the largest
    over ranks. ``timeout_s`` bounds each wait, None: the group's. Raises PeerError and
    CollectiveTimeoutError as a call does.
    """
    trial = planned.choices.experience.pending
    if trial is None:
        return
    rounds: list[list[float]] = []
    with torch._C._InferenceMode(True):
        planned.connected()  # now, not within the first time
        meeting = HostGroup(planned, timeout_s)
        calls = [  # each with a group that numbers its plan's calls
            GroupCall(HostGroup(planned, timeout_s), plan, is_own=plan.strategy is Strategy.FLAT)
            for plan in trial.plans
        ]
        while len(rounds) < trial.runs and sum(map(sum, rounds)) <= trial.longest_us:
            times_us = []
            for call in calls:
                meeting.largest([0.0], _WHAT)  # all start together
                begin = time.perf_counter()
                call.run()
                times_us.append((time.perf_counter() - begin) * 1e6)
            rounds.append(meeting.largest(times_us, _WHAT))
        planned.choices.settle(rounds)


def judge(planned: PlannedGroup, plan: Plan, time_us: float) -> None:
    """Tell the group's experience what the call of ``plan`` took that just ran in its turn.
    Collective over the group.

    Raises PeerError and CollectiveTimeoutError as a call does.
    """
    planned.choices.experience.ran(plan, time_us, lambda times: HostGroup(planned).largest(times, _WHAT))


def connected(planned: PlannedGroup, choices: Choices, plan: Plan, anew: Callable[[], Plan | None]) -> Plan | None:
    """``plan``, which contends, once its connections are there; where they cannot be made,
    ``anew()``, and plans over so many contend no more. Collective over the group.

    Raises PeerError and CollectiveTimeoutError as a call does; ClusterError where no plan takes
    fewer.
    """
    chosen: Plan | None = plan
    while chosen is not None and choices.experience.is_contested and chosen.connections > planned.connections.number:
        connections = chosen.connections
        why = _refused(planned, connections)
        if not why:
            return chosen
        if not choices.experience.leave_out_connections(connections):
            raise ClusterError(f"group {planned.name}: {why}: name fewer connections, or none")
        if planned.connections.most >= connections:  # not in another contest of this group
            planned.connections.most = connections - 1
            warn(f"commlayer: group {planned.name}: {why}. Plans over fewer contend without them", stacklevel=2)
        chosen = anew()
    return chosen


def _refused(planned: PlannedGroup, connections: int) -> str:
    """Make so many connections; say why that cannot be. All ranks have them then, or none has."""
    if connections > planned.connections.most:
        return "so many connections could not be made before"
    planned.connected()
    why = planned.connections.shortage(connections)  # before anybody connects: Gloo takes a lack of descriptors ill
    groups: list[dist.ProcessGroup] = []
    if not (refused := _who_cannot(planned, why)):
        groups, why = planned.connections.try_more(connections, min(planned.timeout_s, _PATIENCE_S))
        refused = _who_cannot(planned, why)
    if not refused:
        planned.connections.widen(groups)
        return ""
    reason = why or f"rank {planned.global_ranks[refused - 1]} cannot, and says why"
    return f"{connections} connections between two ranks cannot be made: {reason}"


def _who_cannot(planned: PlannedGroup, why: str) -> int:
    """The last member that has a reason ``why`` it cannot, counted from 1; 0: all can."""
    return int(HostGroup(planned).largest([planned.rank + 1.0 if why else 0.0], _WHAT)[0])
