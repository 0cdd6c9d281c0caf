"""The order of a group's calls: which run now, which are queued, which are under way, and on which
lane.

A call of plain tensors, with nothing queued and no plans, signatures, lanes or records to look at,
goes to Gloo in the verb itself (``is_direct``; verb_methods.py). It takes no lock: without calls
under way there is only its caller's thread, unless a program issues on one group from several
threads that nothing orders, and then ranks do not agree on an order anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from time import perf_counter_ns as now
from typing import Any

import torch
from torch._C._distributed_c10d import ReduceOp, Work

from commlayer.agree.signature_words import signature_words
from commlayer.backend.inner import DeviceCalls, InnerGroups
from commlayer.backend.members import Members, Noted
from commlayer.backend.same_number import require_same_number, settle_own_call
from commlayer.backend.works import IssuedWork
from commlayer.calls.instruments import Instruments
from commlayer.calls.ring import Call, Track
from commlayer.calls.under_way import calls_under_way
from commlayer.device_time import await_device
from commlayer.engine.lane_holds import Issued, lanes
from commlayer.engine.planned import PlannedGroup
from commlayer.engine.progress import DONE, ProgressQueue, QueuedCall
from commlayer.profiles.errors import DisagreementError, TensorError, UsageError
from commlayer.profiles.links import Resource
from commlayer.scheduler.lanes import lane_of, level_of
from commlayer.scheduler.plan import Plan

__all__ = ["Order"]

_profiling = torch._C._autograd._profiler_enabled
_record = torch._C._profiler._RecordFunctionFast

_MOST_SIBLINGS = 1 << 20


class Order:
    """One group's calls, in the order in which the program makes them, the same on all ranks.

    ``track``: its calls in the ring of the process, and ``instruments``: who listens to them.
    ``call``: the one that runs now.
    ``latest``: the asynchronous call that the inner backend has under way; ``coalescing``: the
    works of an open coalesced block;
    ``sequence``: how many collectives this rank has run. ``needs_look``: calls have plans or
    signatures to look at.
    ``may_pass``: asked before a call that never has a plan goes straight to Gloo; where it says no
    the call takes the long way, because an instrument wants to be heard before it.
    """

    def __init__(self, members: Members, inner: InnerGroups, track: Track, *, needs_look: bool) -> None:
        self.members, self.inner, self.needs_look = members, inner, needs_look
        self.track = track
        self.instruments = Instruments()
        me = weakref.ref(self)
        self.instruments.changed = lambda: order._decide_directness() if (order := me()) is not None else None
        self.lane = GroupLane(inner.planned)
        self.progress = ProgressQueue(f"commlayer {members.name[:8]}", lambda: members.who)
        self.latest: IssuedWork | None = None
        self.coalescing: list[Work] | None = None
        self.sequence = 0
        self.call: Call | None = None
        self.may_pass: Callable[[], bool] | None = None
        self.under_way, self.key = calls_under_way(), id(inner.planned)
        self.is_watched = False
        """Whether a lane or an instrument wants to see every call."""
        self.is_direct = False
        """Whether plain tensors may go to Gloo as they are. Not until the lane is known, at the
        first call: torch describes a group after it has made it."""

    # Issuing

    def issue(self, opts: Any, label: str, noted: Noted, outputs: Any, task: QueuedCall, *args: Any) -> Work:
        """Run ``task(*args)`` in this order: now, or, for an asynchronous call, on the progress
        thread.

        ``noted``: the call's arguments, for the ring.
        """
        dtype, sent, received, splits = noted
        call = self.track.note(label, dtype, sent, received, opts, opts.asyncOp, splits, depth=4)
        if self.instruments.issued:
            self._tell_issued(call)
        if self.lane.name is None:
            self.use_lane_of_group()
        issued = None
        if self.lane.is_on:
            issued, task, args = self._enter_lane(call, outputs, task, args)
        queued = call, issued, task, args
        if call.is_async:
            return self._queue(outputs, *queued)
        began, progress = now(), self.progress
        try:
            if self.latest is not None:
                self.latest.settle()
            if progress.pending:
                progress.run(label, self._run, queued)
            else:  # what progress.run does then
                with progress.running:
                    self._run(*queued)
        except BaseException:
            self._leave_lane(issued)  # perhaps it never ran
            raise
        finally:
            for heard in self.instruments.waited:
                heard(call, began, now())
        return DONE

    def _tell_issued(self, call: Call) -> None:
        try:
            for hear in self.instruments.issued:
                hear(call)
        except UsageError:
            self.track.take_back(call)
            raise

    def _enter_lane(
        self, call: Call, outputs: Any, task: QueuedCall, args: tuple[Any, ...]
    ) -> tuple[Issued | None, QueuedCall, tuple[Any, ...]]:
        """Have the call enter the group's lane. Returns it as the lane knows it, and what runs
        it."""
        if call.begins_after_s is None:
            return self.lane.enter(outputs), task, args
        # It holds nobody before: a link is not to be idle for what cannot go yet.
        return None, self._run_on_lane, (outputs, task, args)

    def _leave_lane(self, issued: Issued | None) -> None:
        if issued is not None:
            lanes().leave(issued)

    def _queue(self, outputs: Any, call: Call, issued: Issued | None, task: QueuedCall, args: tuple[Any, ...]) -> Work:
        """Have the progress thread run an asynchronous call in its turn."""
        label = call.collective
        try:
            if self.latest is not None:  # tasks read and write tensors outside the inner backend, too
                self.progress.submit(label, None, self.latest.settle, ())
            if _profiling():  # the progress thread is not: the caller's trace shows at least who asked for what
                with _record(f"commlayer:{label} (queued)"):
                    pass
            work = self.progress.submit(label, outputs, self._run, (call, issued, task, args))
        except BaseException:
            self._leave_lane(issued)
            raise
        work.call, work.instruments = call, self.instruments
        if self.coalescing is not None:
            self.coalescing.append(work)
        return work

    # Running

    def _run(self, call: Call, issued: Issued | None, task: QueuedCall, args: tuple[Any, ...]) -> None:
        """Run ``task(*args)``, which is ``call``, to its end, on the thread whose turn it is.

        ``issued``: the call on its lane, which it leaves then; None: it is on none.
        """
        instruments = self.instruments
        if call.begins_after_s is not None:
            await_device(call.begins_after_s)
        self.call, call.started_ns = call, now()
        try:
            for hear in instruments.began:  # here, and not where calls are issued: all ranks run them in one order
                hear(call)
            if self.under_way.is_watched:
                self.under_way.begin(call, self.key)
            task(*args)
            self.track.done = call.number
        except UsageError as error:
            call.error = type(error).__name__
            self.track.take_back(call)
            self.say_refused(call.collective, error)
            raise
        except BaseException as error:
            call.error = type(error).__name__
            raise
        finally:
            self.call, call.ended_ns = None, now()
            if self.under_way.is_watched:
                self.under_way.end(call, call.ended_ns)
            if issued is not None:
                lanes().leave(issued)
            for hear in instruments.ended:
                hear(call)

    def _run_on_lane(self, outputs: Any, task: QueuedCall, args: tuple[Any, ...]) -> None:
        """Run a task that enters its lane only now."""
        issued = self.lane.enter(outputs)
        try:
            task(*args)
        finally:
            lanes().leave(issued)

    @property
    def ended(self) -> int:
        """How many calls have ended: also the one that is under way, which nobody may have waited
        for yet."""
        latest, done = self.latest, self.track.done
        return latest.call.number if latest is not None and latest.has_come else done

    def or_say_refused(self, label: str, task: Callable[..., Any], *args: Any) -> Any:
        """``task(*args)``; where that refuses the call, the ranks that wait to compare theirs can
        read so."""
        try:
            return task(*args)
        except UsageError as error:
            self.say_refused(label, error)
            raise

    def compare(
        self,
        collective: str,
        tensor: torch.Tensor | None,
        num_bytes: int,
        *,
        limit_s: float | None = None,
        op: ReduceOp.RedOpType | None = None,
        root: int | None = None,
        sizes: tuple[int, ...] | None = None,
        plan: Plan | None = None,
        where: str = "",
    ) -> None:
        """Compare the call that comes next with the other ranks', where that is asked for, before a
        byte of it moves. ``limit_s`` None: within the group's timeout."""
        signatures = self.inner.signatures
        if signatures is None:
            return
        from_rank = None if root is None else self.members.global_ranks[root]
        words = signature_words(collective, tensor, num_bytes, op=op, root=from_rank, sizes=sizes, plan=plan)
        if limit_s is None:
            limit_s = self.inner.timeout.total_seconds()
        signatures.compare(self.sequence + 1, words + where, limit_s)

    def say_refused(self, label: str, error: UsageError) -> None:
        """Have those who wait to compare their calls read that this rank has refused its own."""
        if self.inner.signatures is not None:
            self.inner.signatures.refuse(self.sequence + 1, label, error)

    def in_turn(self, label: str, task: Callable[[], None]) -> None:
        """Run ``task()``, in which the ranks of the group meet on the host, in the turn of the
        group's CPU calls."""
        if self.latest is not None:
            self.latest.settle()
        self.progress.run(label, task, ())

    def settle_own(self, label: str, work: Work) -> None:
        """Wait for a call of Gloo's own, in this order, that serves ``label``. Raises ClusterError,
        as calls do."""
        settle_own_call(self.members, self.inner, self.sequence, label, work)

    # Lanes and devices

    def use_lane(self, lane: str, *, is_told: bool) -> None:
        """Put traffic, from the next call on, on ``lane``. ``is_told``: the program says so.
        UsageError for none that exists."""
        self.lane.use(lane, is_told=is_told)
        for each in self.inner.on_devices.values():
            each.use_lane(lane, self.lane.cut)
        # What is queued was called before: on every rank it keeps the plan that it would have had.
        if self.progress.pending and not self.progress.is_progress_thread():
            self.progress.submit("use_lane", None, self.inner.planned.use_lane, self.lane.cut)
        else:
            self.inner.planned.use_lane(*self.lane.cut)
        self._decide_directness()

    def _decide_directness(self) -> None:
        self.is_watched = self.lane.is_on or self.instruments.is_watched
        self.is_direct = not (self.needs_look or self.is_watched or self.lane.name is None)

    def use_siblings(self, siblings: int) -> None:
        """Plan, from the next call on, for so many groups that use a node at the same time.
        Collective: all ranks say the same.

        Raises UsageError for what is no number of groups, before anybody is told; else as
        :func:`require_same_number`.
        """
        if type(siblings) is not int or not 0 <= siblings <= _MOST_SIBLINGS:
            raise UsageError(
                f"{self.members.who}: use_siblings expects how many groups share a node, or 0 for all of them, got {siblings!r}"
            )
        if self.latest is not None:
            self.latest.settle()
        # After what is queued, and before anything else: some plans are looked up by the thread
        # that calls.
        call = self.track.note("use_siblings", None, -1, -1, None, False)
        try:
            self.progress.run("use_siblings", self._take_siblings, (siblings,))
        except DisagreementError:  # all ranks raise it
            self.track.take_back(call)
            raise
        self.track.done = call.number
        self.lane.follow_links()

    def _take_siblings(self, siblings: int) -> None:
        self.sequence += 1
        require_same_number(self.members, self.inner, self.sequence, "use_siblings", siblings)
        for plans in (self.inner.planned, *(each.plans for each in self.inner.on_devices.values())):
            plans.choices.use_siblings(siblings)

    def use_lane_of_group(self) -> None:
        """The lane that the group's description says: for a call before anybody has said one."""
        self.use_lane(lane_of(self.members.describe()), is_told=False)

    @property
    def lane_name(self) -> str:
        """The class of traffic; "" for none."""
        return lane_of(self.members.describe()) if self.lane.name is None else self.lane.name

    def on_device(self, tensor: torch.Tensor) -> DeviceCalls:
        """The calls of a tensor that is not on the CPU."""
        inner = self.inner.on_devices.get(tensor.device.type)
        if inner is not None:
            if self.lane.name is None:
                self.use_lane_of_group()
            return inner
        has = " and ".join(["CPU", *(name.upper() if name == "cuda" else name for name in self.inner.on_devices)])
        has += "" if "cuda" in self.inner.on_devices else " (torch has no CUDA here, or no NCCL)"
        raise TensorError(f"{self.members.who}: no collectives for tensors on {tensor.device}: this group has {has}")


class GroupLane:
    """``name`` None: nobody has said yet; "" is none. ``is_on``: whether calls are announced and
    held. ``is_told``: the program has said the lane, and not only a group's description."""

    __slots__ = ("_bytes_per_s", "_crosses", "_planned", "_wanted", "is_on", "is_told", "level", "name")

    def __init__(self, planned: PlannedGroup) -> None:
        self._planned = planned
        self._wanted = planned.settings.lanes if len(planned.global_ranks) > 1 else "off"
        self._bytes_per_s = self._rate()
        self._crosses = planned.choices.prices.link is Resource.INTER
        self.name: str | None = None
        self.is_on = self.is_told = False
        self.level = 0

    def _rate(self) -> float:
        """The group's share of the slowest link that it crosses, by its profile; 0.0 without
        one."""
        planner = self._planned.choices.prices.planner
        return 0.0 if planner is None else planner.profile.peaks.of(self._planned.choices.prices.link) * 1e9

    def follow_links(self) -> None:
        """Take the group's share of its links anew: so long as its bytes take there, so long are
        lower lanes held."""
        self._bytes_per_s = self._rate()

    def use(self, name: str, *, is_told: bool) -> None:
        """Raises UsageError for a lane that does not exist."""
        level = level_of(name)
        self.name, self.level, self.is_told = name, level, is_told
        # A name alone must cost a program nothing: without a profile there are no chunks to hold.
        is_wanted = self._wanted == "on" or (self._wanted == "auto" and (is_told or self._bytes_per_s > 0))
        self.is_on = is_wanted and bool(name)

    @property
    def cut(self) -> tuple[str, bool]:
        """For :meth:`PlannedGroup.use_lane`: the lane on which calls are held, and whether they are
        cut finely for it."""
        return (self.name or "") if self.is_on else "", self.is_told or self._wanted == "on"

    @property
    def cut_for(self) -> str:
        """The lane for which a call that is made now is cut finely; "" for none."""
        name, is_cut = self.cut
        return name if is_cut and level_of(name) else ""

    def enter(self, outputs: Any) -> Issued:
        """A call with these outputs is issued; :meth:`commlayer.engine.lane_holds.Lanes.leave`
        takes what is returned."""
        expected_s = _num_bytes(outputs) / self._bytes_per_s if self._bytes_per_s else None
        return lanes().enter(self.level, expected_s, crosses=self._crosses)

    def hold(self, num_bytes: int) -> int:
        """See :meth:`commlayer.engine.lane_holds.Lanes.hold_whole`."""
        if not self.is_on:
            return 0
        return lanes().hold_whole(self.level, num_bytes, self._bytes_per_s, crosses=self._crosses)


def _num_bytes(outputs: Any) -> int:
    if isinstance(outputs, torch.Tensor):
        return outputs.numel() * outputs.element_size()
    return sum(map(_num_bytes, outputs)) if isinstance(outputs, Iterable) else 0
