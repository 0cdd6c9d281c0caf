"""A plan's steps bound to the memory of a call: which slices of it each message, copy and sum
takes, found out once.

Calls on the same memory again, as those of gradients' buckets are, run what is bound here, and
build nothing. What is bound holds the memory, so whoever keeps it lets go of it when the tensors of
the call are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from commlayer.devices.device_contract import Addressed, Messenger, Received
from commlayer.profiles.links import Resource
from commlayer.scheduler.moves import Message, Moves, Reduction, Region
from commlayer.scheduler.plan import Buffer
from commlayer.transport.call_memory import Buffers, Reducer
from commlayer.transport.contract import Coder

__all__ = ["BoundScript", "BoundStep", "bind"]

Work = Callable[[], object]


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


class _Line(Protocol):
    @property
    def messenger(self) -> Messenger: ...
    @property
    def places(self) -> tuple[int, ...]: ...


class _Step(Protocol):
    """The part of a compiled step that is looked at here."""

    @property
    def moves(self) -> Moves: ...
    @property
    def line(self) -> _Line | None: ...
    @property
    def sends(self) -> Sequence[Message]: ...
    @property
    def receives(self) -> Sequence[Message]: ...
    @property
    def gathers(self) -> Sequence[tuple[Region, Region]]: ...


class _Script(Protocol):
    @property
    def steps(self) -> Sequence[_Step]: ...
    @property
    def touched(self) -> Sequence[tuple[Resource, frozenset[Buffer]]]: ...


def bind(script: _Script, buffers: Buffers, reduce: Reducer | None, coder: Coder | None) -> BoundScript:
    """Find out what each step of ``script`` does to ``buffers``. Talks to nobody."""
    binder = _Binder(buffers, reduce, coder)
    memory = []
    for resource, touched in script.touched:
        memories = {
            id(each): each.tensor for buffer, each in buffers.items() if buffer in touched
        }  # in place: one of both
        memory.append((resource, tuple(memories.values())))
    return BoundScript(tuple(binder.step(step) for step in script.steps), tuple(memory))


class _Binder:
    def __init__(self, buffers: Buffers, reduce: Reducer | None, coder: Coder | None) -> None:
        self._buffers, self._reduce, self._coder = buffers, reduce, coder

    def step(self, step: _Step) -> BoundStep:
        local = self._local(step.moves)
        if not local:
            return BoundStep(self._messages(step), None)
        return BoundStep(self._messages(step), local[0] if len(local) == 1 else partial(_run_all, local))

    def _messages(self, step: _Step) -> Callable[[], Sequence[Received]] | None:
        if step.line is None or not (step.sends or step.receives or step.gathers):
            return None
        messenger = step.line.messenger
        if step.gathers:
            parts = [(self._part(gathered), self._part(own)) for own, gathered in step.gathers]
            return lambda: [messenger.all_gather(gathered, own) for gathered, own in parts]
        places = step.line.places
        sends, receives = self._addressed(step.sends, places), self._addressed(step.receives, places)
        return partial(_exchange, messenger, sends, receives)

    def _addressed(self, messages: Sequence[Message], places: Sequence[int]) -> list[Addressed]:
        return [(places[message.peer], self._part(message.region)) for message in messages]

    def _local(self, moves: Moves) -> list[Work]:
        """The rank's work on its own memory, in the order in which moves say it."""
        part, coder = self._part, self._coder
        local: list[Work] = [partial(part(copy.target).copy_, part(copy.source), True) for copy in moves.copies]
        local += [self._summing(reduction) for reduction in moves.reductions]
        if moves.encodes or moves.decodes:
            assert coder is not None  # whoever starts a plan with a wire format says how to encode
            local += [partial(coder.encode, part(each.source), part(each.target)) for each in moves.encodes]
            local += [partial(coder.decode, part(each.source), part(each.target)) for each in moves.decodes]
        return local

    def _summing(self, reduction: Reduction) -> Work:
        target, sources = reduction.target, reduction.sources
        coded = [source.buffer in (Buffer.ENCODED, Buffer.ARRIVED) for source in sources]
        if True in coded:
            assert self._coder is not None  # as above
            return partial(self._coder.add, self._part(target), [self._part(source) for source in sources], coded)
        assert self._reduce is not None  # whoever starts a plan with sums says how to sum
        dtype = self._reduce.dtype
        return partial(
            self._reduce.reduce, self._part(target, dtype), [self._part(source, dtype) for source in sources]
        )

    def _part(self, region: Region, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return self._buffers[region.buffer][region.start, region.stop, dtype]


def _exchange(messenger: Messenger, sends: Sequence[Addressed], receives: Sequence[Addressed]) -> Sequence[Received]:
    return (messenger.exchange(sends, receives),)


def _run_all(works: Sequence[Work]) -> None:
    for work in works:
        work()
