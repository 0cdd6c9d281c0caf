"""Plans as they are launched on streams: steps that are compiled once, and then bound to the memory
of a call: which slices of it each message, copy and sum takes.

Calls on the same memory again, as those of gradients' buckets are, run what is bound here, and
build nothing. What is bound holds the memory, so whoever keeps it lets go of it when the tensors of
the call are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from commlayer.devices.device_contract import Addressed, Messenger, Received
from commlayer.profiles.links import Resource
from commlayer.scheduler.moves import Message, Moves, Region
from commlayer.scheduler.plan import Buffer, Plan
from commlayer.transport.call_memory import Buffers, Reducer
from commlayer.transport.contract import Coder

__all__ = ["BoundScript", "BoundStep", "StepMessenger", "StreamScript", "StreamStep", "bind", "buffers_on"]

Work = Callable[[], object]


@dataclass(frozen=True)
class StepMessenger:
    """A communicator for one kind of step. ``places``: the rank in its group of each peer that
    moves speak of."""

    messenger: Messenger
    places: tuple[int, ...]

    @property
    def is_in_order(self) -> bool:
        """Whether peers and ranks in the group are the same, so that its own collectives may be
        used."""
        return self.places == tuple(range(len(self.places)))


class StreamStep:
    """One step as it is launched. ``waits_for``: earlier steps of other streams; ``is_awaited``:
    one of another waits for it;
    ``is_last``: of its stream; ``is_empty``: this rank has nothing to do in it."""

    __slots__ = (
        "gathers",
        "is_awaited",
        "is_empty",
        "is_last",
        "line",
        "moves",
        "receives",
        "resource",
        "sends",
        "waits_for",
    )

    def __init__(self, resource: Resource, moves: Moves, line: StepMessenger | None, *, may_gather: bool) -> None:
        self.resource, self.moves, self.line = resource, moves, line
        self.waits_for: tuple[int, ...] = ()
        self.is_awaited = self.is_last = False
        may_gather = may_gather and line is not None and line.is_in_order
        self.gathers = _equal_slices(moves, len(line.places)) if line is not None and may_gather else ()
        # Messages have no tags there: both ends name those of a pair in one order.
        self.sends = () if self.gathers else tuple(sorted(moves.sends, key=_tag))
        self.receives = () if self.gathers else tuple(sorted(moves.receives, key=_tag))
        done = moves.sends, moves.receives, moves.copies, moves.reductions, moves.encodes, moves.decodes
        self.is_empty = not any(done)


@dataclass(frozen=True)
class StreamScript:
    """A plan as it is launched. ``touched``: the resources whose streams it needs, with the buffers
    that each uses; ``posted``: the steps in which this rank has something to do, and the last."""

    plan: Plan
    steps: tuple[StreamStep, ...]
    touched: tuple[tuple[Resource, frozenset[Buffer]], ...]
    posted: tuple[int, ...]

    @property
    def resources(self) -> tuple[Resource, ...]:
        """The resources whose streams it needs."""
        return tuple(resource for resource, _ in self.touched)


class BoundStep(NamedTuple):
    """A step's parts, None where there is none: ``communicate`` enqueues its messages, ``local`` is
    work on the rank's memory."""

    communicate: Callable[[], Sequence[Received]] | None
    local: Work | None


class BoundScript(NamedTuple):
    """A script's steps as they are run on the memory of a call. ``kept``: what memory the stream of
    each resource uses."""

    steps: tuple[BoundStep, ...]
    kept: tuple[tuple[Resource, tuple[torch.Tensor, ...]], ...]


def bind(script: StreamScript, buffers: Buffers, reduce: Reducer | None, coder: Coder | None) -> BoundScript:
    """Find out what each step of ``script`` does to ``buffers``. Talks to nobody."""
    binder = _Binder(buffers, reduce, coder)
    memory = []
    for resource, touched in script.touched:
        # Where a call is in place, input and output are one.
        memories = {id(each): each.tensor for buffer, each in buffers.items() if buffer in touched}
        memory.append((resource, tuple(memories.values())))
    return BoundScript(tuple(binder.step(step) for step in script.steps), tuple(memory))


class _Binder:
    def __init__(self, buffers: Buffers, reduce: Reducer | None, coder: Coder | None) -> None:
        self._buffers, self._reduce, self._coder = buffers, reduce, coder

    def step(self, step: StreamStep) -> BoundStep:
        """The step's messages, and the rank's work on its own memory in the order in which moves say it."""
        part, coder, moves = self._part, self._coder, step.moves
        local: list[Work] = [partial(part(copy.target).copy_, part(copy.source), True) for copy in moves.copies]
        for reduction in moves.reductions:
            coded = [source.buffer in (Buffer.ENCODED, Buffer.ARRIVED) for source in reduction.sources]
            if True in coded:
                assert coder is not None  # whoever starts a plan with a wire format says how to encode
                local.append(
                    partial(coder.add, part(reduction.target), [part(each) for each in reduction.sources], coded)
                )
            else:
                assert self._reduce is not None  # whoever starts a plan with sums says how to sum
                dtype = self._reduce.dtype
                sources = [part(each, dtype) for each in reduction.sources]
                local.append(partial(self._reduce.reduce, part(reduction.target, dtype), sources))
        if moves.encodes or moves.decodes:
            assert coder is not None  # as above
            local += [partial(coder.encode, part(each.source), part(each.target)) for each in moves.encodes]
            local += [partial(coder.decode, part(each.source), part(each.target)) for each in moves.decodes]
        if len(local) > 1:
            return BoundStep(self._messages(step), partial(_run_all, local))
        return BoundStep(self._messages(step), local[0] if local else None)

    def _messages(self, step: StreamStep) -> Callable[[], Sequence[Received]] | None:
        if step.line is None or not (step.sends or step.receives or step.gathers):
            return None
        messenger = step.line.messenger
        if step.gathers:
            parts = [(self._part(gathered), self._part(own)) for own, gathered in step.gathers]
            return lambda: [messenger.all_gather(gathered, own) for gathered, own in parts]
        places = step.line.places
        sends, receives = (
            [(places[message.peer], self._part(message.region)) for message in messages]
            for messages in (step.sends, step.receives)
        )
        return partial(_exchange, messenger, sends, receives)

    def _part(self, region: Region, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return self._buffers[region.buffer][region.start, region.stop, dtype]


def _exchange(messenger: Messenger, sends: Sequence[Addressed], receives: Sequence[Addressed]) -> Sequence[Received]:
    return (messenger.exchange(sends, receives),)


def _run_all(works: Sequence[Work]) -> None:
    for work in works:
        work()


def _tag(message: Message) -> int:
    return message.tag


def buffers_on(resource: Resource, steps: Sequence[StreamStep]) -> frozenset[Buffer]:
    """The buffers that the stream of a resource uses; the output always, for a call's last part may
    run there."""
    regions: list[Region] = []
    for moves in (step.moves for step in steps if step.resource is resource):
        regions += [message.region for message in (*moves.sends, *moves.receives)]
        regions += [end for copy in moves.copies for end in (copy.source, copy.target)]
        regions += [end for each in moves.reductions for end in (*each.sources, each.target)]
        regions += [end for encode in moves.encodes for end in (encode.source, encode.target)]
        regions += [end for decode in moves.decodes for end in (decode.source, decode.target)]
    return frozenset([Buffer.OUTPUT, *(region.buffer for region in regions)])


def _equal_slices(moves: Moves, size: int) -> tuple[tuple[Region, Region], ...]:
    """(my slice, the whole) for each contiguous run of equal slices in the order of ranks; empty
    where there are others.

    All members find the same, for each sees all slices, and sends its own to all others: on nodes
    of other sizes the rank of the smallest exchanges with all, who exchange with it alone.
    """
    by_tag: dict[int, dict[int, Region]] = {}
    sent: dict[int, list[Region]] = {}
    for message in moves.sends:
        sent.setdefault(message.tag, []).append(message.region)
    own_slices = {tag: regions[0] for tag, regions in sent.items() if regions == regions[:1] * (size - 1)}
    for message in moves.receives:
        by_tag.setdefault(message.tag, {})[message.peer] = message.region
    spans = []
    for tag, others in by_tag.items():
        own = own_slices.get(tag)
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
