"""A judge of races that does not need them to happen: torch's CUDA sanitizer, fed with what a simulated machine runs.

The sanitizer keeps a vector clock for each stream, and compares every access to memory with those before it. It is made for the
events that torch reports of a GPU, and takes the same ones from here. Where it finds two accesses that nothing orders, that is a
race in every order of the streams, whether or not its bytes came out right in this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.cuda._sanitizer import EventHandler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from simulated.machine import SimulatedEvent, SimulatedStream, Watcher

__all__ = ["RaceJudge"]

_CELL = 16
"""Bytes that the sanitizer sees as one tensor: memory that two streams write is to begin and end at multiples of it."""


class _Accesses(TorchDispatchMode):
    """The tensors that operators read and write, as their schemas say."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: list[torch.Tensor] = []
        self.writes: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        given = [*zip(arguments, args, strict=False)]
        given += [(argument, kwargs[argument.name]) for argument in arguments[len(args) :] if argument.name in kwargs]
        for argument, value in given:
            alias = argument.alias_info
            if alias is not None and not alias.is_write:
                continue  # a view of it
            into = self.reads if alias is None else self.writes
            into += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        return func(*args, **kwargs)


class RaceJudge(Watcher):
    """Finds accesses of a machine's streams to its devices' memory that no event orders. ``races``: each in words."""

    def __init__(self) -> None:
        self._handler = EventHandler()
        self._events: dict[SimulatedEvent, int] = {}
        self.races: list[str] = []

    def ran(self, stream: SimulatedStream, work: Callable[[], object]) -> None:
        with _Accesses() as seen:
            work()
        self.moved(stream, _name(work), seen.reads, seen.writes)

    def moved(
        self, stream: SimulatedStream, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        memory = stream.device.memory
        written = {cell for tensor in writes if memory.holds(tensor) for cell in _cells(tensor)}
        read = {cell for tensor in reads if memory.holds(tensor) for cell in _cells(tensor)} - written
        names = {cell: [what] for cell in written | read}
        found = self._handler._handle_kernel_launch(stream.number, read, written, set(), what, names)
        if found:
            error: Any = found[0]
            before = error.previous_access
            self.races.append(
                f"{stream}: {what} {error.current_access.type} {len(found)} times {_CELL} bytes that stream number "
                f"{before.stream} was {before.type}, in {before.operator}, and no event orders the two"
            )

    def recorded(self, event: SimulatedEvent) -> None:
        number = self._events[event] = len(self._events) + 1
        self._handler._handle_event_creation(number)
        self._handler._handle_event_record(number, event.stream.number)

    def waited(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        if event in self._events:  # else a mutant's, which was never recorded
            self._handler._handle_event_wait(self._events[event], stream.number)


def _cells(tensor: torch.Tensor) -> Iterator[int]:
    if tensor.numel() == 0:
        return iter(())
    if not tensor.is_contiguous():
        raise AssertionError("the judge of races sees contiguous tensors only")
    first = tensor.data_ptr()
    return iter(range(first // _CELL, (first + tensor.nbytes - 1) // _CELL + 1))


def _name(work: Callable[[], object]) -> str:
    inner = getattr(work, "func", work)
    return str(getattr(inner, "__name__", inner))
