"""The calls of a group on tensors of one type of device, in the order in which the program makes
them.

A call is launched where it is made, and the host waits for nothing. What a plan cannot do as it is
(an operation that it does not know, a tensor that is not in one piece, a coalesced block) goes to
the inner backend, which on CUDA is NCCL. Of a planned call events say when it ran, where an
instrument wants to know: that is read when a later call is made, or somebody asks. Of a call that
goes to the inner backend as it is, nothing more is known here than that it was launched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from time import perf_counter_ns as now
from typing import Any

import torch
from torch._C._distributed_c10d import AllToAllOptions, ReduceOp, Work

from commlayer.backend.arithmetic import AVG, PLAN_NAMES, is_summed_by_plans
from commlayer.backend.known_plans import EncodedSum
from commlayer.backend.launched_calls import LOOK_S, LaunchedCalls, LaunchedWork
from commlayer.backend.members import Noted
from commlayer.backend.order import Order
from commlayer.backend.tensors import is_dense
from commlayer.calls.counters import GroupCounters
from commlayer.calls.instruments import Instruments
from commlayer.calls.movement import Movement
from commlayer.calls.ring import Call, Track
from commlayer.engine.device_plans import DevicePlans
from commlayer.engine.group_plans import Choices
from commlayer.engine.progress import HostWork
from commlayer.profiles.errors import DisagreementError, TensorError, UsageError
from commlayer.scheduler.call_moves import Counts
from commlayer.scheduler.plan import Plan
from commlayer.scheduler.wire import Wire
from commlayer.transport.c10d import verb_of
from commlayer.transport.nccl import Nccl, use_lane
from commlayer.transport.streams import StreamCall

__all__ = ["OnDevice", "TellCounts"]

TellCounts = Callable[[Sequence[int]], list[list[int]]]
"""Tells all ranks of a group this one's numbers, over the host, and returns everybody's.
Collective."""


class OnDevice:
    """A group's tensors on one type of device: the inner backend's calls, those by plan, and who
    listens to both.

    ``order``: of the group's CPU calls, in whose turn ranks compare what they are about to call;
    ``track``: the calls on this device in the ring. ``tell`` exchanges counts. ``encoded``:
    chooses the format of the group's own FP32 sums; None: they go as they are. ``launches``: see
    :data:`commlayer.backend.device_launches.LAUNCHES`. ``is_planning``: whether
    calls may have plans; ``instead``: runs a call flat whose plan was chosen before that was
    stopped. ``is_coalescing``: a coalesced block is open.
    """

    def __init__(
        self,
        inner: Nccl,
        plans: DevicePlans,
        order: Order,
        track: Track,
        counters: GroupCounters,
        tell: TellCounts,
        launches: Mapping[str, Callable[..., Work]],
        encoded: EncodedSum | None = None,
    ) -> None:
        self.inner, self.plans, self.order, self.track, self.counters = inner, plans, order, track, counters
        self.members = order.members
        self._backend: Any = inner.backend
        self._verbs: Any = inner.verbs or inner.backend
        self._tell, self._launches, self._encoded = tell, launches, encoded
        self.is_planning, self.is_coalescing = True, False
        self.instead: Callable[[Movement], None] | None = None
        self.sequence = 0
        self.instruments = Instruments()
        self.launched = LaunchedCalls(plans, track, counters, self.instruments)

    # Issuing

    def issue(self, name: str, collective: str, noted: Noted, *args: Any) -> Work:
        """Launch a call of the verb ``name``; ``args``: its tensors (and splits), and torch's
        options."""
        launch = self._launches.get(name)
        if launch is None:
            return self._issue(collective, noted, args[-1], self._own_compared, name, collective, *args)
        return self._issue(collective, noted, args[-1], launch, self, *args)

    def _issue(self, collective: str, noted: Noted, opts: Any, body: Callable[..., Work], *args: Any) -> Work:
        launched = self.launched
        if launched.pending:
            launched.settle()
        dtype, sent, received, splits = noted
        # The host waits for no call of a device, whatever the program does: to those who look for
        # hangs none is a wait.
        launched.launching = call = self.track.note(collective, dtype, sent, received, opts, True, splits, depth=5)
        instruments = self.instruments
        try:
            for hear in instruments.issued:
                hear(call)
            call.started_ns = now()
            # While a graph is captured nobody may wait, or launch what is not of it.
            if instruments.began and not self.plans.connections.is_capturing:
                for hear in instruments.began:
                    hear(call)
            self.sequence = call.sequence = self.sequence + 1
            work = body(*args)
        except UsageError as error:
            self._refused(call, error)
            raise
        except BaseException as error:
            self._failed(call, error)
            raise
        finally:
            launched.launching = None
        self._end(call)
        if not launched.pending:
            self.track.done = call.number
        return work

    def _refused(self, call: Call, error: UsageError) -> None:
        self._failed(call, error)
        self.track.take_back(call)
        if call.sequence:
            self.sequence -= 1
        self.order.say_refused(call.collective, error)

    def _failed(self, call: Call, error: BaseException) -> None:
        call.error = type(error).__name__
        self._end(call)

    def _end(self, call: Call) -> None:
        """Tell of its end, unless that is told when the device has run the call, or has been."""
        pending = self.launched.pending
        if not call.ended_ns and not (pending and pending[-1].call is call):
            call.ended_ns = now()
            for hear in self.instruments.ended:
                hear(call)

    def _own_compared(self, name: str, collective: str, *args: Any) -> Work:
        opts = args[-1]
        op = opts.reduceOp.op if hasattr(opts, "reduceOp") else None
        root = opts.rootRank if hasattr(opts, "rootRank") else None
        self.compare(collective, None, 0, op=op, root=root)
        return self.own(name, *args)

    def own(self, name: str, *args: Any) -> Work:
        """Call the inner backend's verb ``name``: the backend's, or where that has not the name,
        that of the process group around it."""
        verb = getattr(self._backend, name, None)
        work: Work = (verb_of(self._verbs, name) if verb is None else verb)(*args)
        return work

    def own_sparse(self, *args: Any) -> Work:
        """All_reduce a sparse tensor, by the verb that knows of them."""
        work: Work = self._verbs.allreduce(*args)
        return work

    # Deciding

    def known_choices(self, device: torch.device) -> Choices:
        """The choices of plans, once it is known by what to plan: before the first call that could
        have one. Collective then, later nothing."""
        self.plans.find_out(device)
        return self.plans.choices

    def use_lane(self, lane: str, cut: tuple[str, bool]) -> None:
        """Put calls from now on on ``lane``; ``cut``: see :attr:`GroupLane.cut`."""
        use_lane(self.inner, lane)
        self.plans.use_lane(*cut)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the timeout of calls that bring none of their own."""
        self._backend._set_default_timeout(timeout)
        self.plans.connections.set_timeout(timeout)

    def when_known(self, attach: Callable[[], None]) -> None:
        """Call ``attach`` once it is known by what to plan: now, or at the first call that could
        have a plan."""
        if not self.plans.is_unknown:
            attach()
        else:
            self.plans.found_out = attach

    def plan_anew(self, choices: Choices) -> None:
        """Plan by ``choices`` from the next call on. In the group's order; the host waits for calls
        by the earlier ones."""
        self.finish(self.plans.timeout_s)
        self.plans.choices = choices

    def stop_planning(self, instead: Callable[[Movement], None]) -> None:
        """Use no plans any more. ``instead`` runs calls whose plans were chosen before."""
        self.is_planning, self.instead = False, instead

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return self.members.size

    def look(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        num_bytes: int,
        *,
        op: ReduceOp.RedOpType | None = None,
        root: int | None = None,
        fits: bool = True,
    ) -> Plan | None:
        """The plan for the call that is launched now; None: the inner backend's own. Compares
        signatures, where that is asked for. ``fits``: whether the sizes are those of a plan."""
        assert self.launched.launching is not None
        collective, plan = self.launched.launching.collective, None
        is_compared = self.order.inner.signatures is not None
        may_plan = fits and self.is_planning and not self.is_coalescing and is_dense(output)
        if may_plan and (input is output or is_dense(input)) and (op is None or is_summed_by_plans(op, input.dtype)):
            # The ranks find out together by what to plan: not where they make different calls.
            if is_compared and self.plans.is_unknown:
                self.compare(collective, input, num_bytes, op=op, root=root)
            plan = self.plans.plan(collective, input, num_bytes)
        if is_compared:
            self.compare(collective, input, num_bytes, op=op, root=root, plan=plan)
        return plan

    def compare(
        self,
        collective: str,
        tensor: torch.Tensor | None,
        num_bytes: int,
        *,
        op: ReduceOp.RedOpType | None = None,
        root: int | None = None,
        plan: Plan | None = None,
    ) -> None:
        """Compare a call with the other ranks', where that is asked for, before anything of it is
        launched."""
        if self.order.inner.signatures is not None:
            words: dict[str, Any] = {"op": op, "root": root, "plan": plan, "where": " on a device"}
            self.meet(collective, partial(self.order.compare, collective, tensor, num_bytes, **words))

    def meet(self, collective: str, compare: Callable[[], None]) -> None:
        """``compare()`` a call with the other ranks', in the turn of the group's CPU calls, as one
        of them."""
        order = self.order

        def task() -> None:
            compare()
            order.sequence += 1

        order.in_turn(collective, task)

    def require_alike(self, collective: str, output: torch.Tensor, input: torch.Tensor) -> None:
        """Raises TensorError, before anything is launched, for tensors of two devices or of two
        dtypes."""
        if output.device != input.device or output.dtype is not input.dtype:
            raise TensorError(
                f"{collective} expected an output of {input.dtype} on {input.device}, as the input is, got one of {output.dtype} "
                f"on {output.device}"
            )

    def sum_encoded(
        self, source: torch.Tensor, target: torch.Tensor, op: ReduceOp.RedOpType, outputs: Any
    ) -> Work | None:
        """Launch one of the group's own sums in a format, where that is chosen; None where it is
        not. NaN and infinity pass."""
        if self._encoded is None or not self.is_planning or self.is_coalescing:
            return None
        if not is_dense(source) or not is_dense(target):
            return None
        assert self.launched.launching is not None
        collective = self.launched.launching.collective

        def ask(collective: str, num_bytes: int, wires: tuple[Wire, ...], element_bytes: int) -> Plan | None:
            if self.plans.is_unknown:
                self.compare(collective, source, num_bytes, op=op)
            choices = self.known_choices(source.device)
            return choices.plan(collective, num_bytes, is_float=True, wires=wires, element_bytes=element_bytes)

        movement = self._encoded(ask, collective, source, target, op, self.size)
        if movement is None:
            return None
        self.compare(collective, source, source.nbytes, op=op, plan=movement.plan)
        return self.launch(movement, movement.plan.traffic.logical_bytes, outputs, is_mean=op == AVG)

    def told(self, sent: Sequence[int], received: Sequence[int]) -> Counts:
        """Everybody's counts, in bytes. Raises DisagreementError, on all ranks, where two of them
        do not fit together."""
        size = self.size
        everyones = self._tell([*sent, *received])
        counts = tuple(tuple(each[:size]) for each in everyones)
        for sender, row in enumerate(counts):
            for receiver, count in enumerate(row):
                expected = everyones[receiver][size + sender]
                if count != expected:
                    ranks = self.members.global_ranks
                    raise DisagreementError(
                        f"{self.members.who}: all_to_all: rank {ranks[sender]} sends {count} bytes to rank {ranks[receiver]}, "
                        f"which expects {expected}; nothing was sent: make the splits of both fit"
                    )
        return counts

    # Launching

    def launch_sum(self, plan: Plan, source: torch.Tensor, target: torch.Tensor, op: Any, outputs: Any) -> Work:
        """Launch a reduction by ``plan`` for the call that is made now."""
        movement = Movement(plan, source, target, op=PLAN_NAMES[op])
        return self.launch(movement, plan.traffic.logical_bytes, outputs, is_mean=op == AVG)

    def launch(self, movement: Movement, num_bytes: int, outputs: Any, *, is_mean: bool = False) -> Work:
        """Launch a plan for the call that is made now; count ``num_bytes``. ``is_mean``: a sum
        becomes a mean."""
        call, plans, plan = self.launched.launching, self.plans, movement.plan
        assert call is not None
        call.plan, call.run_bytes = plan, num_bytes
        if self.instruments.moving and not plans.connections.is_capturing:
            for hear in self.instruments.moving:
                hear(call, movement)
        ran = plans.run(movement, issued=call)
        started: StreamCall = ran.under_way
        call.logical_bytes += num_bytes
        call.inter_bytes, call.intra_bytes = ran.sent
        self.counters.planned[call.collective, plan.name].add(num_bytes, 0, *ran.sent)
        times = started.times
        if times is not None:
            self.launched.add(call, times)
            if call.is_awaited:
                self._await(call)
        if is_mean:
            # A tensor that was made in inference mode is written in it only.
            target = movement.target
            with torch._C._InferenceMode(True) if target.is_inference() else contextlib.nullcontext():
                started.then(partial(target.data.div_, self.size))
        return LaunchedWork(plans.connections, started, outputs)

    def _await(self, call: Call) -> None:
        """Have the host wait for the end of the latest call. Raises CollectiveTimeoutError,
        PeerError as calls do."""
        limit_s = self.plans.timeout_s
        self.finish(limit_s)
        if not call.ended_ns:
            error = RuntimeError("Timed out waiting for the device")
            raise self.plans.explain(error, call.collective, call.sequence, limit_s, limit_s)

    def start(self, movement: Movement) -> Work:
        """Launch a call of a plan that is known already, in a wire format, or over rails or
        nodes."""
        noted = movement.source.dtype, -1, -1, None  # ranks may have sizes of their own
        return self._issue(movement.plan.traffic.collective, noted, None, self._launch_known, movement)

    def _launch_known(self, movement: Movement) -> Work:
        plan, source, outputs = movement.plan, movement.source, [movement.target]
        collective = plan.traffic.collective
        is_even = collective in ("all_reduce", "reduce_scatter")
        self.compare(collective, source if is_even else None, source.nbytes if is_even else 0, plan=plan)
        if self.instead is not None:  # the plan was looked up when the call was made
            self.instead(movement)
            return HostWork(outputs)
        return self.launch(
            movement, plan.traffic.logical_bytes if collective != "all_to_all_v" else source.nbytes, outputs
        )

    def start_exchange(
        self, source: torch.Tensor, target: torch.Tensor, rows: tuple[Sequence[int], Sequence[int]], counts: Counts
    ) -> Work:
        """Launch an all_to_all of which all ranks know ``counts``, in bytes; ``rows`` that go to
        each rank, and come from it."""
        noted = source.dtype, source.nbytes, target.nbytes, (list(rows[1]), list(rows[0]))
        return self._issue("all_to_all", noted, None, self._launch_exchange, source, target, rows, counts)

    def _launch_exchange(
        self, source: torch.Tensor, target: torch.Tensor, rows: tuple[Sequence[int], Sequence[int]], counts: Counts
    ) -> Work:
        self.compare("all_to_all", None, 0)
        self.plans.find_out(source.device)
        may_plan = self.is_planning and not self.plans.never_plans_exchanges
        work = self.by_counts(target, source, counts) if may_plan else None
        if work is not None:
            return work
        return self.own("all_to_all_single", target, source, list(rows[1]), list(rows[0]), AllToAllOptions())

    def by_counts(self, output: torch.Tensor, input: torch.Tensor, counts: Counts) -> Work | None:
        """An all_to_all by its plan; None: the inner backend's own. The same on all ranks, for they
        know the same counts."""
        largest = max(*map(sum, counts), *map(sum, zip(*counts, strict=True)))
        plan = self.plans.plan_exchange(largest) if largest else None
        if plan is None:
            return None
        for name, x in (("input", input), ("output", output)):
            if not x.is_contiguous():
                raise TensorError(
                    f"{self.members.who}: all_to_all on {x.device} needs contiguous tensors, got strides {list(x.stride())} for "
                    f"the {name}: call contiguous() before"
                )
        me = self.members.rank
        splits = counts[me], [row[me] for row in counts]
        movement = Movement(plan, input.detach(), output.detach(), "split", splits=splits, counts=counts)
        return self.launch(movement, input.nbytes, [output])

    def finish(self, patience_s: float) -> None:
        """Wait so long for planned calls that are noted to be under way, and take note of them."""
        self.launched.finish(patience_s)

    # Blocks, barriers and messages, which are the inner backend's

    def start_coalescing(self) -> None:
        """Give the inner backend all calls until :meth:`end_coalescing`, which waits for them as
        one."""
        self.is_coalescing = True
        self._backend._start_coalescing()

    def end_coalescing(self) -> Work:
        """End the block."""
        self.is_coalescing = False
        work: Work = self._backend._end_coalescing()
        return work

    # The end

    def under_way_after(self, patience_s: float) -> str:
        """Wait so long for what was launched; what has not run by then in words, empty: all has, or
        the device has failed, on which nothing runs any more."""
        until = monotonic() + patience_s
        try:
            while (words := self.plans.connections.under_way()) and monotonic() < until:
                sleep(LOOK_S)
            return words or self.inner.under_way_after(max(0.001, until - monotonic()))
        except RuntimeError:  # a device's error, which whoever waits for its work is told
            return ""

    def end(self, *, drain: bool) -> None:
        """Let go of communicators, when what was launched has run (``drain``), or at once."""
        self.launched.pending.clear()
        self.plans.found_out = None
        with contextlib.ExitStack() as stack:  # both, whatever fails
            stack.callback(self.inner.backend.shutdown if drain else self.inner.backend.abort)
            stack.callback(self.plans.end, drain=drain)
            stack.callback(self.track.close)
            stack.callback(self.instruments.closed)
