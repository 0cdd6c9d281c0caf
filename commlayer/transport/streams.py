"""Plans on a device: a stream for each resource and lane, events between them, no wait of the host.

The same on every device (:mod:`commlayer.devices.device_contract`): what CUDA runs is what the simulated device proves. Steps are
launched in plan order, which is the same on all ranks, and so is the order in which communicators get messages: those of two
ranks cannot wait for each other crosswise. A step waits for an event of an earlier one only where that runs on another stream.

An all_gather whose slices are equal is the communicator's own, in place, one per block (NVLS and the copy engines serve NCCL's);
unequal slices and all else are grouped messages, so that no bytes are padded and nothing is packed first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from commlayer.devices.device_contract import Addressed, Device, Messenger, Received, StreamEvent
from commlayer.profiles.errors import InternalError
from commlayer.profiles.links import Resource
from commlayer.scheduler.moves import Message, Moves, Reduction, Region
from commlayer.scheduler.plan import Buffer, Op, Plan, Step
from commlayer.transport.contract import Buffers, Coder, Reducer, Whole
from commlayer.transport.nccl import is_high_priority

__all__ = ["StepMessenger", "StreamCall", "StreamScript", "StreamTransport", "is_high_priority_of"]


def is_high_priority_of(resource: Resource, lane: str = "") -> bool:
    """Whether the stream of a resource has high priority: those of the lanes ep, tp and pp have.

    Without a lane INTER alone has: what it sends is what the other stages wait for. In a lower lane it has not, or its stages
    would go before those of a higher one. A priority decides which waiting work begins first; it stops no kernel that runs.

    Raises UsageError for a lane that does not exist.
    """
    return is_high_priority(lane) if lane else resource is Resource.INTER


@dataclass(frozen=True)
class StepMessenger:
    """A communicator for one kind of step. ``places``: the rank in its group of each peer that moves speak of."""

    messenger: Messenger
    places: tuple[int, ...]

    @property
    def is_in_order(self) -> bool:
        """Whether peers and ranks in the group are the same, so that its own collectives may be used."""
        return self.places == tuple(range(len(self.places)))


class StreamStep:
    """One step as it is launched. ``waits_for``: earlier steps of other streams; ``is_awaited``: one of another waits for it;
    ``is_last``: of its stream."""

    __slots__ = ("gathers", "is_awaited", "is_last", "line", "moves", "receives", "resource", "sends", "waits_for")

    def __init__(self, resource: Resource, moves: Moves, line: StepMessenger | None, *, may_gather: bool) -> None:
        self.resource, self.moves, self.line = resource, moves, line
        self.waits_for: tuple[int, ...] = ()
        self.is_awaited = self.is_last = False
        may_gather = may_gather and line is not None and line.is_in_order
        self.gathers = _equal_slices(moves, len(line.places)) if line is not None and may_gather else ()
        # Messages have no tags there: both ends name those of a pair in one order.
        self.sends = () if self.gathers else tuple(sorted(moves.sends, key=_tag))
        self.receives = () if self.gathers else tuple(sorted(moves.receives, key=_tag))

    @property
    def is_empty(self) -> bool:
        """Whether this rank has nothing to do in it."""
        moves = self.moves
        return not any((moves.sends, moves.receives, moves.copies, moves.reductions, moves.encodes, moves.decodes))


@dataclass(frozen=True)
class StreamScript:
    """A plan as it is launched. ``resources``: those whose streams it needs."""

    plan: Plan
    steps: tuple[StreamStep, ...]
    resources: tuple[Resource, ...]


class StreamTransport:
    """Runs plans of one lane on the streams of a device. ``line_of`` says which communicator carries a step.

    The streams are the transport's, so that the caller's never waits for a stage that it does not need. ``lines`` are all
    communicators, to be closed with it.
    """

    def __init__(
        self,
        device: Device,
        line_of: Callable[[Step], StepMessenger | None],
        lines: Sequence[StepMessenger],
        lane: str = "",
    ) -> None:
        self.device, self.lane = device, lane
        self._line_of, self._lines = line_of, tuple(lines)
        self.streams = {each: device.stream(is_high=is_high_priority_of(each, lane)) for each in Resource}
        self.ended: dict[Resource, StreamEvent] = {}
        """The end of the latest call on each stream: calls share staging memory, whichever stream they are made on."""

    def compile(self, plan: Plan, steps: Sequence[Moves]) -> StreamScript:
        """Find out which steps of this rank wait for which, and what goes in which message.

        A step in which this rank does nothing is not launched: who would wait for it waits for what it would have waited for. Of
        several steps of one stream the last is waited for.
        """
        compiled = [self._compiled(step, moves) for step, moves in zip(plan.steps, steps, strict=True)]
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
        return StreamScript(plan, tuple(compiled), tuple(each for each in Resource if each in used))

    def _compiled(self, step: Step, moves: Moves) -> StreamStep:
        line = self._line_of(step) if moves.sends or moves.receives else None
        if line is None and (moves.sends or moves.receives):
            raise InternalError(f"step {step.op.value} of chunk {step.chunk} has messages, and no communicator")
        return StreamStep(step.resource, moves, line, may_gather=step.op is Op.ALL_GATHER)

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
        return StreamCall(self, script, buffers, reduce, coder)

    def memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Memory for a buffer of calls."""
        del device
        return self.device.empty(num_bytes)

    def whole(self, plan: Plan, timeout_s: float) -> Whole | None:
        del plan, timeout_s  # posting a step does not wait for it here: there is nothing to save
        return None

    def abort(self, why: str | None = None) -> None:
        del why  # a torn communicator tells its peers that, and nothing else
        with contextlib.ExitStack() as stack:  # all of them, whatever fails
            for line in self._lines:
                stack.callback(line.messenger.abort)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for line in self._lines:
                stack.callback(line.messenger.close)
            self._lines = ()
            self.device.synchronize()


class StreamCall:
    """See :class:`~commlayer.transport.contract.Call`."""

    def __init__(
        self,
        transport: StreamTransport,
        script: StreamScript,
        buffers: Buffers,
        reduce: Reducer | None,
        coder: Coder | None,
    ) -> None:
        self._transport, self._script, self._buffers = transport, script, buffers
        self._reduce, self._coder = reduce, coder
        self._ended: dict[int, StreamEvent] = {}
        self._last: dict[Resource, StreamEvent] = {}
        ready = transport.device.current.record()
        for resource in script.resources:
            stream = transport.streams[resource]
            stream.wait(ready)
            for other, event in transport.ended.items():
                if other is not resource:
                    stream.wait(event)
            for buffer in buffers.values():
                stream.keep(buffer.tensor)

    @property
    def steps(self) -> Sequence[Moves]:
        return [step.moves for step in self._script.steps]

    def require(self, earlier: int, index: int) -> None:
        """Nothing: the script says for which steps of other streams a step waits."""

    def post(self, index: int) -> None:
        step = self._script.steps[index]
        if step.is_empty:
            return
        stream = self._transport.streams[step.resource]
        for earlier in step.waits_for:
            stream.wait(self._ended[earlier])
        if step.sends or step.receives or step.gathers:
            with self._transport.device.on(stream):
                for work in self._communicate(step):
                    work.wait()
        local = self._local(step.moves)
        if local:
            stream.launch(partial(_run_all, local))
        if step.is_awaited or step.is_last:
            self._ended[index] = ended = stream.record()
            if step.is_last:  # not when the call is waited for: the next one may begin before
                self._transport.ended[step.resource] = self._last[step.resource] = ended

    @property
    def is_done(self) -> bool:
        """Whether all of it has run. Does not wait."""
        return all(ended.is_done() for ended in self._last.values())

    def then(self, work: Callable[[], object]) -> None:
        """Launch ``work`` behind the whole call, as its last part."""
        for resource, ended in self._last.items():
            stream = self._transport.streams[resource]
            for other, event in self._last.items():
                if other is not resource:
                    stream.wait(event)
            stream.launch(work)
            ended = stream.record()
            self._transport.ended[resource], self._last = ended, {resource: ended}
            return
        self._transport.device.current.launch(work)  # a call that moves nothing

    def finish(self) -> None:
        current = self._transport.device.current
        for ended in self._last.values():
            current.wait(ended)

    def _communicate(self, step: StreamStep) -> list[Received]:
        assert step.line is not None  # compiled so
        messenger = step.line.messenger
        if step.gathers:
            return [messenger.all_gather(self._part(whole), self._part(mine)) for mine, whole in step.gathers]
        places = step.line.places
        return [messenger.exchange(self._addressed(step.sends, places), self._addressed(step.receives, places))]

    def _addressed(self, messages: Sequence[Message], places: Sequence[int]) -> list[Addressed]:
        return [(places[message.peer], self._part(message.region)) for message in messages]

    def _local(self, moves: Moves) -> list[Callable[[], object]]:
        """The rank's work on its own memory, in the order in which moves say it."""
        return list(
            chain(
                (partial(self._part(copy.target).copy_, self._part(copy.source), True) for copy in moves.copies),
                (self._summing(reduction) for reduction in moves.reductions),
                self._recoding(moves),
            )
        )

    def _summing(self, reduction: Reduction) -> Callable[[], object]:
        target, sources = reduction.target, reduction.sources
        coded = [source.buffer in (Buffer.ENCODED, Buffer.ARRIVED) for source in sources]
        if True in coded:
            assert self._coder is not None  # whoever starts a plan with a wire format says how to encode
            return partial(self._coder.add, self._part(target), [self._part(source) for source in sources], coded)
        assert self._reduce is not None  # whoever starts a plan with sums says how to sum
        dtype = self._reduce.dtype
        return partial(
            self._reduce.reduce, self._part(target, dtype), [self._part(source, dtype) for source in sources]
        )

    def _recoding(self, moves: Moves) -> list[Callable[[], object]]:
        if not (moves.encodes or moves.decodes):
            return []
        assert self._coder is not None  # as above
        encodes = [
            partial(self._coder.encode, self._part(each.source), self._part(each.target)) for each in moves.encodes
        ]
        decodes = [
            partial(self._coder.decode, self._part(each.source), self._part(each.target)) for each in moves.decodes
        ]
        return [*encodes, *decodes]

    def _part(self, region: Region, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return self._buffers[region.buffer].part(region.start, region.stop, dtype)


def _tag(message: Message) -> int:
    return message.tag


def _run_all(works: Sequence[Callable[[], object]]) -> None:
    for work in works:
        work()


def _equal_slices(moves: Moves, size: int) -> tuple[tuple[Region, Region], ...]:
    """(my slice, the whole) for each contiguous run of equal slices in the order of ranks; empty where there are others.

    All members find the same, for each sees all slices.
    """
    by_tag: dict[int, dict[int, Region]] = {}
    mine: dict[int, Region] = {message.tag: message.region for message in moves.sends}
    for message in moves.receives:
        by_tag.setdefault(message.tag, {})[message.peer] = message.region
    spans = []
    for tag, others in by_tag.items():
        own = mine.get(tag)
        absent = set(range(size)) - others.keys()
        if own is None or len(absent) != 1:
            return ()
        regions = [others.get(peer, own) for peer in range(size)]
        first = regions[0].start
        wanted = [Region(own.buffer, first + peer * own.size, first + (peer + 1) * own.size) for peer in range(size)]
        if regions != wanted:
            return ()
        spans.append((own, Region(own.buffer, first, wanted[-1].stop)))
    return tuple(spans)
