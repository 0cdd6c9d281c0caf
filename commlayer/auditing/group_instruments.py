"""The instruments that a new group is given: its ledger, its watch, its shadow, the job's recorder;
and what is told at the end.

Nothing that runs calls imports this module: it is named in :data:`commlayer.calls.instruments.OWN`.
"""

from __future__ import annotations

from functools import partial

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from commlayer.auditing.at_exit import agreed_job, audit_report, note_job_over, open_audit_report
from commlayer.auditing.first_step import tell_after_first_step
from commlayer.auditing.job_traces import begin, end
from commlayer.auditing.ledger import Ledger
from commlayer.auditing.shadow import Shadow
from commlayer.auditing.watch import GroupWatch
from commlayer.calls.instruments import Instrument, NewGroup
from commlayer.statistics import print_at_exit

__all__ = ["attach", "attach_of_calls"]


class _JobFiles(Instrument):
    """Has the job's trace and audit written when the group ends that they were opened with."""

    lets_pass = True

    def __init__(self, group: NewGroup) -> None:
        self._gloo, self._is_default = group.gloo, group.is_default
        self._world_size = len(group.ranks)

    def closing(self, *, with_others: bool) -> None:
        end(self._gloo, self._world_size, with_others=with_others)

    def closed(self) -> None:
        if self._is_default:
            note_job_over()


def attach(group: NewGroup) -> None:
    """Give ``group`` the instruments that its settings ask for. Collective over the group. Raises
    what connecting does.

    A group that stands alone has no files: its ranks have other numbers each time it is made, and
    those of the job belong to its replica.
    """
    attach_of_calls(group)
    settings = group.settings
    if group.stands_alone:
        if settings.stats == "1":
            print_at_exit(group.rank, settings.replica or "")
        return
    group.instruments.add_here(_JobFiles(group))
    with group.connecting("to record calls", "comparing clocks to record calls"):
        members = group.planned.global_ranks
        begin(settings, group.gloo, members, group.planned.rank, group.world_size, group.planned.board)
    # From the default group on, or from the first group where the default one is another backend's.
    if (settings.audit or settings.stats == "1") and (group.is_default or audit_report() is None):
        open_audit_report(  # before the statistics: what is registered last is printed first
            job=agreed_job(group.store if group.is_default else _get_default_store()) if settings.audit else "",
            rank=group.rank,
            world_size=group.world_size,
            folder=settings.in_replica(settings.audit),
            is_printed=settings.stats == "1",
        )
    if settings.stats == "1":
        print_at_exit(group.rank, settings.replica or "")
    if group.is_of_job and group.rank == 0 and len(group.planned.nodes) > 1:
        tell_after_first_step(is_new_job=group.is_default)


def attach_of_calls(group: NewGroup) -> None:
    """Give ``group``, its CPU calls or those on a device, the instruments that watch what plans
    do."""
    planned, instruments, settings = group.planned, group.instruments, group.settings
    ledger = None
    if group.is_planning and planned.choices.prices.planner is not None and group.options.audit is not False:
        ledger = Ledger(group.counters, planned, group.device)
        instruments.add_here(ledger)
        can_change = len(planned.nodes) > 1 and not planned.choices.is_forced
        if settings.replan != "off" and can_change:
            store = PrefixStore(f"replan{f' on {group.device}' if group.device else ''}/", group.store)
            watch = GroupWatch(planned, ledger, store, group.calls.plan_anew, group.time_links)
            if group.device:
                watch.in_turn = partial(group.order.in_turn, "re-planning")
            else:
                group.order.may_pass = watch.appointments.pass_by
            instruments.add_here(watch)
    if settings.shadow is not None:
        instruments.add_here(Shadow(group, settings.shadow, ledger))
