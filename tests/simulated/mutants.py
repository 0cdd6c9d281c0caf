"""Mutants of what runs plans on streams: one wait, record or keep is left out at a time, to see whether anybody notices."""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

from simulated.communicators import ArrivedMessages
from simulated.machine import SimulatedEvent, SimulatedStream

__all__ = ["OrderingSite", "ordering_lines", "ordering_sites", "without"]

_OPERATIONS: tuple[tuple[type, str], ...] = (
    (SimulatedStream, "wait"),
    (SimulatedStream, "record"),
    (SimulatedStream, "keep"),
    (ArrivedMessages, "wait"),
)


class OrderingSite(NamedTuple):
    """A line of a module that orders streams, by one of the operations of the contract."""

    module: str
    line: int
    operation: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.operation}"


def ordering_sites(module: str, run: Callable[[], object]) -> set[OrderingSite]:
    """The lines of ``module`` (its full name) that order streams while ``run()`` runs."""
    found: set[OrderingSite] = set()

    def see(site: OrderingSite) -> bool:
        found.add(site)
        return True

    with _asking(module, see):
        run()
    return found


def ordering_lines(module: ModuleType) -> set[int]:
    """The lines in a module's source that call for such an operation, whether or not anything has run them."""
    names = {name for _, name in _OPERATIONS}
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call)]
    return {node.lineno for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr in names}


@contextlib.contextmanager
def without(site: OrderingSite) -> Iterator[None]:
    """Leave out what the site does: a wait waits for nothing, an event is done from the beginning, memory is not kept."""
    with _asking(site.module, lambda seen: seen != site):
        yield


@contextlib.contextmanager
def _asking(module: str, may: Callable[[OrderingSite], bool]) -> Iterator[None]:
    """Ask ``may`` before each operation that a line of ``module`` calls for."""
    originals = [(owner, name, getattr(owner, name)) for owner, name in _OPERATIONS]
    for owner, name, original in originals:
        setattr(owner, name, _guarded(module, may, f"{owner.__name__}.{name}", original))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _guarded(module: str, may: Callable[[OrderingSite], bool], operation: str, original: Callable[..., Any]) -> Any:
    def guarded(self: Any, *args: Any) -> Any:
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__") == module and not may(OrderingSite(module, caller.f_lineno, operation)):
            return _done(self)
        return original(self, *args)

    return guarded


def _done(owner: Any) -> SimulatedEvent | None:
    if not isinstance(owner, SimulatedStream):
        return None
    event = SimulatedEvent(owner)
    event.is_past = True
    return event
