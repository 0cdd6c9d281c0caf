"""What all collectives of a group share: its state, the order of its calls, errors, statistics.

A call that nothing has to be done for must cost no more than Gloo's own through torch's dispatcher, which is about 3 µs.
After a thread switch, and Gloo makes two in every call, Python runs from cold caches, and every attribute costs three times
what a loop would measure. So the verbs have a direct path: a call of plain tensors, nothing queued, no plans
nor signatures to look at, goes to Gloo in the verb itself (see ``_is_direct``). It takes no lock: without calls under way
there is only its caller's thread, unless a program issues on one group from several threads that nothing orders, and then
ranks do not agree on an order anyway.

The module is long because one class holds what every call passes through; what needs none of its state is in lane.py,
recording.py, issued.py and progress.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from time import perf_counter_ns as now
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ReduceOp, Store, Work

from commlayer.backend.issued import IssuedWork
from commlayer.backend.lane import GroupLane
from commlayer.backend.recording import fill_flat, fill_plan, new_record, run_recorded, waiting
from commlayer.backend.signature import SignatureCheck, described
from commlayer.engine.lanes import Issued, lanes
from commlayer.engine.planned import PlannedGroup
from commlayer.engine.progress import DONE, ProgressQueue, QueuedWork, Task
from commlayer.failures.forks import inherited
from commlayer.failures.waits import SLICE, wait
from commlayer.profiles.errors import ClusterError, GroupError, TensorError, UsageError
from commlayer.scheduler.lanes import lane_of
from commlayer.scheduler.plan import Plan
from commlayer.statistics import GroupCounters, Row
from commlayer.traces.recorder import Recorder, recorder
from commlayer.transport.nccl import Inner, Nccl
from commlayer.transport.nccl import use_lane as use_nccl_lane

__all__ = ["Destroyed", "GroupBase", "Inherited", "Refused", "now", "timeout_of"]

_profiling = torch._C._autograd._profiler_enabled
_record = torch._C._profiler._RecordFunctionFast
Call = Callable[..., Work]


_EVEN = Row.EVEN
_TENSOR, _STRIDED = torch.Tensor, torch.strided
_REFUSAL = "Cannot use ReduceOp"
"""How Gloo, when it is waited for, begins to say that it has not an operation for a dtype. It has sent nothing then."""


class Refused(Exception):
    """The inner backend has not this operation. The verb then goes the long way, which has, or says why not."""


class Destroyed:
    """Stands in for the inner backend of a destroyed group: whatever is asked of it is the caller's mistake."""

    def __init__(self, who: str) -> None:
        self._who = who

    def __getattr__(self, name: str) -> NoReturn:
        raise GroupError(
            f"{self._who}: {name.strip('_')} after the group was destroyed (or aborted): make another with "
            "torch.distributed.new_group, or call destroy_process_group later"
        )


class Inherited(Destroyed):
    """The same in a forked child, for the groups of its parent."""

    def __getattr__(self, name: str) -> NoReturn:
        raise GroupError(inherited(f"{self._who}: {name.strip('_')}"))


_ProcessGroup: Any = dist.ProcessGroup  # its annotations lack the forms in which torch itself calls it


class GroupBase(_ProcessGroup):  # type: ignore[misc]  # hence Any
    """State of a group, and how a call is run. The verbs are in the subclasses.

    CUDA tensors go to an inner NCCL group, where there is one.
    """

    _nccl: Nccl | None = None
    _direct: Any = None

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        global_ranks: Sequence[int],
        store: Store,
        gloo: dist.ProcessGroupGloo,
        planned: PlannedGroup,
        is_planning: bool,
        signatures: SignatureCheck | None,
    ) -> None:
        super().__init__(rank, len(global_ranks))
        self._name, self._rank, self._size = name, rank, len(global_ranks)
        self._global_ranks = tuple(global_ranks)
        self._store: Any = store  # these two also Destroyed, in the end
        self._planned: Any = planned
        self._gloo: Any = gloo  # a Backend, whose methods torch's annotations lack, or Destroyed
        self._signatures = signatures
        self._is_planning = is_planning and self._size > 1
        self._needs_look = self._is_planning or signatures is not None
        self._lane = GroupLane(planned)
        self._is_watched = False
        self._is_direct = (
            False  # until the lane is known, at the first call: torch describes a group after it has made it
        )
        self._never_plans_exchanges = False  # found out at the first all_to_all
        me = weakref.ref(self)  # what outlives a group, or is shared with threads, must not keep it alive
        self._progress = ProgressQueue(f"commlayer {name[:8]}", lambda: group.who if (group := me()) else name)
        self._coalescing: list[Work] | None = None
        self._latest: IssuedWork | None = None  # asynchronous, under way in the inner backend
        self._sequence = 0
        self.counters = GroupCounters(name, global_ranks[rank], list(global_ranks))
        self.counters.reasons = lambda: planned.choices.reasons
        self.counters.describe = lambda: group.group_desc if (group := me()) else ""
        node_of = {member: index for index, members in enumerate(planned.nodes) for member in members}
        self._far = [member for member in range(self._size) if node_of[member] != node_of[rank]]
        self.counters.shares = len(self._far) / self._size, (self._size - len(self._far) - 1) / self._size

    @property
    def who(self) -> str:
        """This rank and group, for messages."""
        desc = self.group_desc
        desc = f" ({desc})" if desc and desc != "undefined" else ""
        return f"rank {self._global_ranks[self._rank]}, group {self._name}{desc}"

    def use_direct(self, direct: Any) -> None:
        """The inner Gloo that C++ calls without asking Python. Once, by whoever makes the group."""
        self._direct = direct

    def use_nccl(self, nccl: Nccl) -> None:
        """Send CUDA tensors to ``nccl``. Once, by whoever makes the group."""
        self._nccl = nccl

    def _on_device(self, tensor: torch.Tensor) -> Inner:
        """The inner backend of a tensor that is not on the CPU."""
        if tensor.is_cuda and self._nccl is not None:
            if self._lane.name is None:
                self._use_lane(lane_of(self.group_desc), is_told=False)
            return self._nccl.backend
        has = "CPU and CUDA" if self._nccl is not None else "CPU (torch has no CUDA here, or no NCCL)"
        raise TensorError(f"{self.who}: no collectives for tensors on {tensor.device}: this group has {has}")

    # The direct path (see above). That the verbs call these for it does not show in benchmarks/host_cost.py.

    def _is_free_for(self, tensor: Any, dtypes: frozenset[torch.dtype]) -> bool:
        """Whether Gloo moves ``tensor`` as it is, and nothing is queued or under way."""
        return (
            type(tensor) is _TENSOR
            and tensor.dtype in dtypes
            and tensor.is_cpu
            and tensor.layout is _STRIDED
            and tensor.is_contiguous()
            and not tensor.requires_grad
            and self._latest is None
            and not self._progress.pending
        )

    def _is_free_for_both(self, output: Any, input: Any, dtypes: frozenset[torch.dtype]) -> bool:
        """As :meth:`_is_free_for`; Gloo itself refuses an ``output`` of another dtype."""
        return (
            type(input) is _TENSOR is type(output)
            and input.dtype in dtypes
            and input.is_cpu
            and input.is_contiguous()
            and output.is_contiguous()
            and not (output.requires_grad or input.requires_grad)
            and self._latest is None
            and not self._progress.pending
        )

    # Order

    def _issue(self, opts: Any, label: str, outputs: Any, task: Task, *args: Any) -> Work:
        """Run ``task(*args)`` in this group's order: now, or, for an asynchronous call, on the progress thread."""
        if self._signatures is not None:
            task, args = self._or_say_refused, (label, task, *args)
        if self._lane.name is None:
            self._use_lane(lane_of(self.group_desc), is_told=False)
        recording = recorder()
        if recording is not None:
            return self._issue_recorded(recording, opts, label, outputs, task, args)
        return self._issue_on_lane(opts, label, outputs, task, args)

    def _issue_recorded(
        self, recording: Recorder, opts: Any, label: str, outputs: Any, task: Task, args: tuple[Any, ...]
    ) -> Work:
        record = new_record(self._planned, self.lane, self.group_desc, label)
        recording.add(record)
        args = self._planned, record, task, *args
        if not opts.asyncOp:
            done: list[Work] = []
            waiting(
                recording,
                record,
                lambda: done.append(self._issue_on_lane(opts, label, outputs, run_recorded, args)),
            )
            return done[0]
        work = self._issue_on_lane(opts, label, outputs, run_recorded, args)
        if isinstance(work, QueuedWork):
            work.watch = partial(waiting, recording, record)
        return work

    def _issue_on_lane(self, opts: Any, label: str, outputs: Any, task: Task, args: tuple[Any, ...]) -> Work:
        if not self._lane.is_on:
            return self._enqueue(opts, label, outputs, task, args)
        call = self._lane.enter(outputs)
        try:
            return self._enqueue(opts, label, outputs, self._leaving, (call, task, *args))
        except BaseException:  # perhaps not queued, and so never run
            lanes().leave(call)
            raise

    def _leaving(self, call: Issued, task: Task, *args: Any) -> None:
        try:
            task(*args)
        finally:
            lanes().leave(call)

    def use_lane(self, lane: str, *, fine: bool = True) -> None:
        """From the next call on this group's traffic is of ``lane``, one of ep, pp, cp, dp, tp, or none (""). The same on all
        ranks, between the same calls. ``fine``: calls that others go before are cut more finely than their own speed asks for;
        False: they are held at the edges that they have, unless ``COMMLAYER_LANES=on`` cuts all.

        Where nobody says a lane the group's description does, if it is one that is known, and calls are not cut.
        Raises UsageError for a lane that does not exist.
        """
        self._use_lane(lane, is_told=fine)

    def _use_lane(self, lane: str, *, is_told: bool) -> None:
        self._lane.use(lane, is_told=is_told)
        if self._nccl is not None:
            use_nccl_lane(self._nccl, lane)
        # What is queued was called before: on every rank it keeps the plan that it would have had.
        if self._progress.pending and not self._progress.is_progress_thread():
            self._progress.submit("use_lane", None, self._planned.use_lane, self._lane.cut)
        else:
            self._planned.use_lane(*self._lane.cut)
        self._is_watched = self._lane.is_on or recorder() is not None
        self._is_direct = not self._needs_look and not self._is_watched

    @property
    def lane(self) -> str:
        """The class of traffic; "" for none."""
        return lane_of(self.group_desc) if self._lane.name is None else self._lane.name

    @property
    def lane_is_told(self) -> bool:
        """Whether :meth:`use_lane` has said it."""
        return self._lane.is_told

    def _enqueue(self, opts: Any, label: str, outputs: Any, task: Task, args: tuple[Any, ...]) -> Work:
        latest = self._latest
        if not opts.asyncOp:
            if latest is not None:
                latest.settle()
            self._progress.run(label, task, args)
            return DONE
        if latest is not None:  # tasks read and write tensors outside the inner backend, too
            self._progress.submit(label, None, latest.settle, ())
        if _profiling():  # the progress thread is not profiled: the caller's trace shows at least who asked for what
            with _record(f"commlayer:{label} (queued)"):
                pass
        work = self._progress.submit(label, outputs, task, args)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _or_say_refused(self, label: str, task: Callable[..., Any], *args: Any) -> Any:
        """``task(*args)``; where that refuses the call, the ranks that wait to compare theirs can read so."""
        try:
            return task(*args)
        except UsageError as error:
            if self._signatures is not None:
                self._signatures.refuse(self._sequence + 1, label, error)
            raise

    # Deciding

    def _look(
        self,
        collective: str,
        tensor: torch.Tensor | None,
        num_bytes: int,
        *,
        op: ReduceOp.RedOpType | None = None,
        root: int | None = None,
        sizes: tuple[int, ...] | None = None,
        timeout: timedelta | None = None,
        plannable: bool = True,
    ) -> Plan | None:
        """The plan for a call, or None: flat. Compares signatures first, where that is asked for.

        Only for calls of which ``num_bytes`` and the dtype are equal on all ranks.
        """
        plan = None
        if plannable and self._is_planning and tensor is not None:
            plan = self._planned.plan(collective, num_bytes, is_float=tensor.dtype.is_floating_point)
        if self._signatures is not None:
            from_rank = None if root is None else self._global_ranks[root]
            call = described(collective, tensor, num_bytes, op, from_rank, sizes, plan)
            seconds = self._timeout_s if timeout is None or timeout.total_seconds() < 0 else timeout.total_seconds()
            self._signatures.compare(self._sequence + 1, call, seconds)
        return plan

    # Running

    def _flat(
        self, collective: str, num_bytes: int, call: Call, *args: Any, inter: int = Row.UNKNOWN, intra: int = 0
    ) -> None:
        """The inner backend's own call. ``args[-1]`` are its options; ``inter``, ``intra``: the bytes it sends (see Row)."""
        record = self._planned.record
        if record is None:
            self._lane.hold(num_bytes)
        else:
            record.held_ns += self._lane.hold(num_bytes)
            fill_flat(self._planned, record, self._sequence + 1, num_bytes, self._flat_sent(num_bytes, inter, intra))
        if _profiling():
            with _record(f"commlayer:{collective} flat"):
                self._await(collective, num_bytes, now(), call(*args), args[-1], inter, intra)
        else:
            self._await(collective, num_bytes, now(), call(*args), args[-1], inter, intra)

    def _flat_sent(self, num_bytes: int, inter: int, intra: int) -> tuple[int, int]:
        if inter != _EVEN:
            return inter, intra
        far, near = self.counters.shares
        return int(num_bytes * far), int(num_bytes * near)

    def _await(
        self,
        collective: str,
        num_bytes: int,
        started: int,
        work: Work,
        opts: Any,
        inter: int = Row.UNKNOWN,
        intra: int = 0,
    ) -> Work:
        """Wait for the inner backend's ``work``, and count it. Where issuing it raised, it was refused: nothing was sent."""
        self._sequence += 1
        try:
            work.wait(SLICE)
        except RuntimeError:
            try:
                wait(work, self._planned.board)
            except RuntimeError as error:
                self._fail(error, collective, started, opts)
        row = self.counters.flat[collective]  # row.add, without the call
        row.calls += 1
        row.logical_bytes += num_bytes
        row.time_ns += now() - started
        if inter >= 0:
            row.inter += inter
            row.intra += intra
        elif inter == _EVEN:
            row.even += num_bytes
        else:
            row.is_known = False
        return DONE

    def _under_way(
        self,
        collective: str,
        num_bytes: int,
        work: Work,
        opts: Any,
        outputs: Any,
        inter: int = Row.UNKNOWN,
        intra: int = 0,
    ) -> Work:
        """An asynchronous call that has just been issued."""
        self._sequence += 1
        sequence, started = self._sequence, now()

        def end(error: RuntimeError | None) -> None:
            if error is not None:
                self._fail(error, collective, started, opts, sequence)
            self.counters.flat[collective].time_ns += now() - started
            if self._latest is issued:  # it holds the call's tensors
                self._latest = None

        self.counters.flat[collective].add(num_bytes, 0, inter, intra)
        issued = IssuedWork(self._progress, collective, outputs, work, self._planned.board, end)
        self._latest = issued
        if self._coalescing is not None:
            self._coalescing.append(issued)
        return issued

    def _run_plan(
        self,
        plan: Plan,
        collective: str,
        num_bytes: int,
        source: torch.Tensor,
        target: torch.Tensor,
        opts: Any,
        *,
        op: str = "sum",
        root: int = 0,
    ) -> None:
        """Run a plan on contiguous tensors."""
        self._sequence += 1
        started = now()
        # Plans write into views, and keep buffers between calls; the mode in which the caller is must not matter to either.
        with torch.inference_mode(), _record(f"commlayer:{collective} {plan.name}"):
            self._planned.run(plan, source, target, op=op, root=root, timeout_s=timeout_of(opts))
        spent = now() - started
        inter, intra = self._planned.sent_bytes(plan, root)
        if self._planned.record is not None:
            fill_plan(self._planned, self._planned.record, self._sequence, plan, num_bytes, (inter, intra))
        self.counters.planned[collective, plan.name].add(num_bytes, spent, inter, intra)

    # Failing

    @property
    def _timeout_s(self) -> float:
        seconds: float = self._gloo.options._timeout.total_seconds()  # where torch's own _set_pg_timeout puts it
        return seconds

    def _fail(
        self, error: RuntimeError, collective: str, started: int, opts: Any, sequence: int | None = None
    ) -> NoReturn:
        """A wait broke: say who, where, and what; tell the other ranks. ``sequence``: of the call, where not the latest."""
        if _REFUSAL in str(error):
            raise Refused(str(error)) from error
        waited_s = (now() - started) / 1e9
        seconds = timeout_of(opts)
        timeout_s = self._timeout_s if seconds is None else seconds
        number = sequence or self._sequence
        explained = self._planned.explain(error, collective, number, waited_s, timeout_s)
        # What the inner backend said stays in the text: programs look for "Timed out" or "Connection closed".
        kind = type(explained) if isinstance(explained, ClusterError) else ClusterError
        raise kind(f"{self.who}, {collective} #{number}: {explained}. Gloo's own message: {error}") from error


def timeout_of(opts: Any) -> float | None:
    """The timeout that a call asks for, seconds; None: the group's."""
    seconds: float = opts.timeout.total_seconds()
    return seconds if seconds >= 0 else None
