"""A program: what one rank computes, which calls it issues and which it waits for, in order.

A layer of a model is one, a stage of a pipeline is several behind each other, and so is whatever somebody writes down to ask
what its calls cost. All ranks run the same program. :func:`run_alone` times one whose calls are not in each other's way;
:func:`commlayer.scheduler.conflicts.simulate` one where they are, with lanes and without.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import count
from operator import attrgetter

from commlayer.profiles.errors import InternalError, UsageError
from commlayer.profiles.profile import Profile
from commlayer.scheduler.lanes import level_of
from commlayer.scheduler.plan import Plan

__all__ = ["Breakdown", "Compute", "Issue", "Item", "PlannedCall", "Wait", "numbered", "run_alone"]


@dataclass(frozen=True, slots=True, eq=False)
class PlannedCall:
    """One collective call; two of them are never the same one, whatever they have in common.

    Attributes:
        lane: "" is no lane, and waits for nobody.
        group: whose calls run first in, first out; "" is one group for each lane.
        durations_us: what each step takes alone, µs, instead of what the profile says: the rounds of a ring.
        profile: of its group, where that is another than the program's: groups that lie differently on the nodes may be of one
            size.
        us: of the whole call alone, for :func:`run_alone`; unless given nobody knows, and its times are no numbers.
        part: of a step, as what it counts where it is waited for (:class:`Breakdown`).
        multiprocessors, memory: the part of a GPU's, and of its memory's rate, that its kernels take while it runs, 0 up to 1,
            which what is computed beside it lacks.

    Raises UsageError for a lane that does not exist, or a part that is none.
    """

    name: str
    plan: Plan
    lane: str = ""
    group: str = ""
    durations_us: tuple[float, ...] | None = None
    profile: Profile | None = None
    us: float = math.nan
    part: str = ""
    multiprocessors: float = 0.0
    memory: float = 0.0

    def __post_init__(self) -> None:
        level_of(self.lane)
        for part in (self.multiprocessors, self.memory):
            if not 0 <= part < 1:
                raise UsageError(f"{self.name}: expected parts of the GPU from 0 up to 1, got {part}")

    @property
    def row(self) -> str:
        """The lane to which its time counts; where it has none, its part of a step."""
        return self.lane or self.part


@dataclass(frozen=True, slots=True)
class Compute:
    """The program computes for ``us`` µs (alone: what is posted meanwhile, and busy links, may lengthen it).

    ``name``: what it is; of a training step the part that it counts as (:class:`Breakdown`). ``is_streaming``: the memory's
    rate bounds it, of which calls leave it a part; else the multiprocessors do.
    """

    us: float
    name: str = ""
    is_streaming: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.us < float("inf"):
            raise UsageError(f"Compute.us: expected a time of at least 0 µs, got {self.us}")


@dataclass(frozen=True, slots=True)
class Issue:
    """The program issues ``call``, and goes on at once."""

    call: PlannedCall


@dataclass(frozen=True, slots=True)
class Wait:
    """The program waits until ``call``, which it has issued, has ended."""

    call: PlannedCall


Item = Compute | Issue | Wait
"""A program is a sequence of these. A synchronous call is an Issue and its Wait."""


_BUT_NAME = attrgetter(*(field.name for field in fields(PlannedCall)[1:]))
"""All of a call but its name, in order: dataclasses.replace takes several times as long, and searches make many calls."""


def numbered(program: Iterable[Item]) -> Iterator[Item]:
    """``program`` with another call for each Issue, and a number behind its name: a layer's program may be in it many times."""
    numbers = count()
    under_way: dict[PlannedCall, PlannedCall] = {}
    for item in program:
        if isinstance(item, Issue):
            under_way[item.call] = call = PlannedCall(f"{item.call.name} #{next(numbers)}", *_BUT_NAME(item.call))
            yield Issue(call)
        else:
            yield Wait(under_way.pop(item.call)) if isinstance(item, Wait) else item


@dataclass(slots=True)
class Breakdown:
    """The parts of a program's time, µs: by part of a step; what is waited for by lane (what has none, by its part), and by link
    class."""

    total_us: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)
    links: dict[str, float] = field(default_factory=dict)

    def wait(self, call: PlannedCall, us: float) -> None:
        """``us`` µs were waited for ``call``; the total has them already."""
        for kind, key in (
            (self.parts, call.part),
            (self.exposed, call.row),
            (self.links, call.plan.traffic.link.value),
        ):
            kind[key] = kind.get(key, 0.0) + us

    def add(self, other: Breakdown, times: float = 1.0) -> None:
        """``times`` another one's."""
        self.total_us += times * other.total_us
        for mine, its in ((self.parts, other.parts), (self.exposed, other.exposed), (self.links, other.links)):
            for key, us in its.items():
                mine[key] = mine.get(key, 0.0) + times * us

    def expose(self, part: str, lane: str, us: float, links: dict[str, float]) -> None:
        """The program is longer by ``us`` µs of communication, ``links`` of them by link class."""
        self.add(Breakdown(us, {part: us}, {lane: us}, links))


def run_alone(program: Sequence[Item]) -> Breakdown:
    """The times of ``program`` where nothing else is on the links: calls of a group run first in, first out, others beside them.

    Never longer than :func:`commlayer.scheduler.conflicts.simulate` says, which also lets calls of different groups slow each
    other. Raises InternalError for a Wait for what was not issued.
    """
    found = Breakdown()
    now = 0.0
    free: dict[str, float] = {}
    ends: dict[PlannedCall, float] = {}
    for item in program:
        if isinstance(item, Compute):
            now += item.us
            found.parts[item.name] = found.parts.get(item.name, 0.0) + item.us
            continue
        call = item.call
        if isinstance(item, Issue):
            ends[call] = free[call.group] = max(now, free.get(call.group, 0.0)) + call.us
            continue
        if call not in ends:
            raise InternalError(f"{call.name} is waited for before it is issued")
        exposed = max(0.0, ends.pop(call) - now)
        now += exposed
        found.wait(call, exposed)
    found.total_us = now
    return found
