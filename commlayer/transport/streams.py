"""Plans on a device: a stream for each resource and lane, events between them, no wait of the host.

The same on every device (:mod:`commlayer.devices.device_contract`): what CUDA runs is what the
simulated device proves. Steps are launched in plan order, which is the same on all ranks, and so is
the order in which communicators get messages: those of two ranks cannot wait for each other
crosswise. A step waits for an event of an earlier one only where that runs on another stream.

An all_gather whose slices are equal is the communicator's own, in place, one per block (NVLS and
the copy engines serve NCCL's); unequal slices and all else are grouped messages, so that no bytes
are padded and nothing is packed first.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch

from commlayer.devices.device_contract import Device, Received, Stream, StreamEvent, TimedEvent
from commlayer.profiles.errors import InternalError, UsageError
from commlayer.profiles.links import Resource
from commlayer.scheduler.moves import Moves
from commlayer.scheduler.plan import Op, Plan, Step
from commlayer.transport.call_memory import Buffers, Reducer
from commlayer.transport.contract import Coder
from commlayer.transport.nccl import is_high_priority
from commlayer.transport.stream_lanes import StreamLane
from commlayer.transport.stream_scripts import BoundScript, StepMessenger, StreamScript, StreamStep, bind, buffers_on

__all__ = ["StreamCall", "StreamTimes", "StreamTransport", "is_high_priority_of"]


def is_high_priority_of(resource: Resource, lane: str = "") -> bool:
    """Whether the stream of a resource has high priority: those of the lanes ep, tp and pp have.

    Without a lane INTER alone has: what it sends is what the other stages wait for. In a lower lane
    it has not, or its stages would go before those of a higher one. A priority decides which
    waiting work begins first; it stops no kernel that runs.

    Raises UsageError for a lane that does not exist.
    """
    return is_high_priority(lane) if lane else resource is Resource.INTER


class StreamTransport:
    """Runs plans of one lane on the streams of a device. ``line_of`` says which communicator
    carries a step.

    The streams are the transport's, so that the caller's never waits for a stage that it does not
    need. ``lines`` are all communicators, to be closed with it. ``among``: its place among the
    lanes of the device, which may change between calls; None: its calls hold nobody, and nobody
    holds them.
    """

    def __init__(
        self,
        device: Device,
        line_of: Callable[[Step], StepMessenger | None],
        lines: Sequence[StepMessenger],
        lane: str = "",
        among: StreamLane | None = None,
    ) -> None:
        self.device, self.lane = device, lane
        self.among = among
        self._line_of, self._lines = line_of, tuple(lines)
        self.streams: dict[Resource, Stream] = {
            each: device.stream(is_high=is_high_priority_of(each, lane))
            for each in Resource
            if each is not Resource.HOST
        }
        self.ended: dict[Resource, StreamEvent] = {}
        """The end of the latest call on each stream: calls share staging memory, whichever stream
        they are made on."""
        self._is_in_graph = False
        self.latest: weakref.ref[StreamCall] | None = None  # the call holds the program's memory
        self.latest_plan: Plan | None = None
        self.announced: tuple[StreamLane, Stream] | None = None  # the latest call that was: where, on which stream
        self._staged: list[weakref.ref[torch.Tensor]] = []
        self._of_graphs: list[torch.Tensor] = []  # staging memory that a graph may be replayed on

    def calls_before(self) -> Mapping[Resource, StreamEvent]:
        """:attr:`ended`, as far as a call may wait for it.

        What is captured in a graph waits for nothing outside, which has run before, and nothing
        outside waits for a part of it.
        """
        if self.device.is_capturing is not self._is_in_graph:
            self._is_in_graph = not self._is_in_graph
            self.ended.clear()
            self._of_graphs = [memory for each in self._staged if (memory := each()) is not None]
        return self.ended

    def under_way(self) -> str:
        """The latest call in words, while some of what was launched has not run; empty afterwards.
        Does not wait."""
        plan = self.latest_plan
        if plan is None or self._is_in_graph or all(ended.is_done() for ended in self.ended.values()):
            return ""
        return f"{plan.traffic.collective} by plan {plan.name}"

    def waited_for(self, call: StreamCall) -> None:
        """The caller has waited for ``call``: in a graph, all that comes later in it comes after
        it, and so after all before the latest call; another graph begins anew."""
        if self._is_in_graph and self.latest is not None and call is self.latest():
            self.ended.clear()

    def compile(self, plan: Plan, steps: Sequence[Moves]) -> StreamScript:
        """Find out which steps of this rank wait for which, and what goes in which message.

        A step in which this rank does nothing is not launched: who would wait for it waits for what
        it would have waited for. Of several steps of one stream the last is waited for.
        """
        compiled: list[StreamStep] = []
        for planned, moves in zip(plan.steps, steps, strict=True):
            line = self._line_of(planned) if moves.sends or moves.receives else None
            if line is None and (moves.sends or moves.receives):
                raise InternalError(
                    f"step {planned.op.value} of chunk {planned.chunk} has messages, and no communicator"
                )
            compiled.append(StreamStep(planned.resource, moves, line, may_gather=planned.op is Op.ALL_GATHER))
        reached: list[set[int]] = []
        for index, planned in enumerate(plan.steps):
            here = compiled[index]
            before = set[int]().union(*(reached[earlier] for earlier in planned.after))
            reached.append(before if here.is_empty else {index})
            latest = {compiled[earlier].resource: earlier for earlier in sorted(before)}
            latest.pop(here.resource, None)
            here.waits_for = () if here.is_empty else tuple(latest.values())
            for earlier in here.waits_for:
                compiled[earlier].is_awaited = True
        used = {step.resource: step for step in compiled if not step.is_empty}
        for step in used.values():
            step.is_last = True
        touched = tuple((each, buffers_on(each, compiled)) for each in Resource if each in used)
        last = len(compiled) - 1
        posted = tuple(index for index, step in enumerate(compiled) if index == last or not step.is_empty)
        return StreamScript(plan, tuple(compiled), touched, posted)

    def start(
        self,
        script: StreamScript,
        buffers: Buffers,
        timeout_s: float,
        reduce: Reducer | None = None,
        coder: Coder | None = None,
        mark: int = 0,
    ) -> StreamCall:
        del mark, timeout_s  # messages have no heads; no wait of the host is here that a timeout would bound
        return StreamCall(self, script, bind(script, buffers, reduce, coder))

    def memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Memory for a buffer of calls. What is there when a graph is captured stays there: it may
        be replayed at any time.

        Raises UsageError while a graph is captured, whose memory is another's afterwards.
        """
        del device
        if self.device.is_capturing:
            raise UsageError(
                "a planned call needs staging memory: make it once, as large, before it is captured in a graph"
            )
        made = self.device.empty(num_bytes)
        self._staged = [each for each in self._staged if each() is not None] + [weakref.ref(made)]
        return made

    def abort(self, why: str | None = None) -> None:
        del why  # a torn communicator tells its peers that, and nothing else
        with contextlib.ExitStack() as stack:  # all of them, whatever fails
            stack.callback(self._leave_lanes, is_broken=True)  # the last
            for line in self._lines:
                stack.callback(line.messenger.abort)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for line in self._lines:
                stack.callback(line.messenger.close)
            self._lines = ()
            self.device.synchronize()
        self._leave_lanes()

    def _leave_lanes(self, *, is_broken: bool = False) -> None:
        if self.among is not None:
            self.among.leave()
        if is_broken and self.announced is not None:
            among, stream = self.announced
            self.announced = None
            # On a device on which nothing can be launched any more it holds nobody.
            with contextlib.suppress(RuntimeError):
                among.give_back(stream)


class StreamCall:
    """See :class:`~commlayer.transport.contract.StartedPlan`. ``times``: filled with events, where
    somebody wants to know."""

    def __init__(
        self, transport: StreamTransport, script: StreamScript, bound: BoundScript, times: StreamTimes | None = None
    ) -> None:
        self._transport, self._script, self._steps = transport, script, bound.steps
        self.times = times
        self._is_timing_steps = times is not None and times.has_steps
        if times is not None and times.has_steps:
            times.sent_bytes = tuple(sum(each.region.size for each in step.moves.sends) for step in script.steps)
        self._ended: dict[int, StreamEvent] = {}
        self._last: dict[Resource, StreamEvent] = {}
        self._lane = lane = transport.among
        self._holds: Sequence[float] = () if lane is None else lane.holds(script.plan)
        self._announced_until = -1
        ready, before = transport.device.current.record(), transport.calls_before()
        transport.latest, transport.latest_plan = weakref.ref(self), script.plan
        for resource, tensors in bound.kept:
            stream = transport.streams[resource]
            stream.wait(ready)
            for other, event in before.items():
                if other is not resource:
                    stream.wait(event)
            for tensor in tensors:
                stream.keep(tensor)
            if times is not None:
                times.began.append(stream.record_time())
        if lane is not None and lane.is_awaited and bound.kept:
            self._announced_until = len(script.steps) - 1
            crosses = any(resource is Resource.INTER for resource, _ in bound.kept)
            stream = transport.streams[bound.kept[0][0]]
            stream.launch(lane.begun(crosses=crosses))
            transport.announced = lane, stream

    @property
    def steps(self) -> Sequence[Moves]:
        return [step.moves for step in self._script.steps]

    def require(self, earlier: int, index: int) -> None:
        """Nothing: the script says for which steps of other streams a step waits."""

    def post(self, index: int) -> None:
        step, (communicate, local), lane = self._script.steps[index], self._steps[index], self._lane
        if not step.is_empty:
            stream = self._transport.streams[step.resource]
            for earlier in step.waits_for:
                stream.wait(self._ended[earlier])
            began = stream.record_time() if self._is_timing_steps else None
            if communicate is not None:
                if lane is not None and self._holds and self._holds[index]:
                    lane.hold(stream, self._holds[index], crosses=step.resource is Resource.INTER)
                self._communicate(stream, communicate)
            if local is not None:
                stream.launch(local)
            if self.times is not None and began is not None:
                self.times.steps[index] = began, stream.record_time()
            if step.is_last:  # not when the call is waited for: the next one may begin before
                self._ended[index] = self._note_end(step.resource, stream)
            elif step.is_awaited:
                self._ended[index] = stream.record()
        if lane is not None and index == self._announced_until:
            self.then(lane.ended())

    def _communicate(self, stream: Stream, enqueue: Callable[[], Sequence[Received]]) -> None:
        with self._transport.device.on(stream):
            for work in enqueue():
                work.wait()

    def _note_end(self, resource: Resource, stream: Stream) -> StreamEvent:
        ended: StreamEvent
        if self.times is None:
            ended = stream.record()
        else:
            self.times.ended.append(timed := stream.record_time())
            ended = timed
        self._transport.ended[resource] = self._last[resource] = ended
        return ended

    def post_all(self) -> None:
        """Start every step in which this rank has something to do."""
        for index in self._script.posted:
            self.post(index)

    @property
    def is_done(self) -> bool:
        """Whether all of it has run. Does not wait."""
        return all(ended.is_done() for ended in self._last.values())

    def then(self, work: Callable[[], object]) -> None:
        """Launch ``work`` behind the whole call, as its last part."""
        for resource in list(self._last):
            stream = self._transport.streams[resource]
            for other, event in self._last.items():
                if other is not resource:
                    stream.wait(event)
            stream.launch(work)
            self._last = {}
            self._note_end(resource, stream)
            if self.times is not None:  # another thread may look meanwhile
                self.times.ended = self.times.ended[-1:]
            return
        self._transport.device.current.launch(work)  # a call that moves nothing

    def finish(self) -> None:
        current = self._transport.device.current
        for ended in self._last.values():
            current.wait(ended)
        self._transport.waited_for(self)


class StreamTimes:
    """The times of one call. It holds none of the program's memory, so it may be kept until the
    call has run.

    ``began``: the first points of its streams, at which all that it waits for has run; ``ended``:
    the last ones. Where ``has_steps``: ``steps`` has the beginning and the end of each step in
    which this rank had something to do, by its number, and ``sent_bytes`` what it sends in each
    step.
    """

    __slots__ = ("began", "ended", "has_steps", "sent_bytes", "steps")

    def __init__(self, *, has_steps: bool) -> None:
        self.began: list[TimedEvent] = []
        self.ended: list[TimedEvent] = []
        self.steps: dict[int, tuple[TimedEvent, TimedEvent]] = {}
        self.sent_bytes: tuple[int, ...] = ()
        self.has_steps = has_steps

    @property
    def is_done(self) -> bool:
        """Whether the call has run. Does not wait."""
        return all(each.is_done() for each in self.ended)
