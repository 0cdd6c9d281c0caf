"""One layer as a program: what is computed, what is sent, and what of that waits for what. Forward and backward.

The same words as :mod:`commlayer.scheduler.conflicts` (compute, issue, wait), before names and profiles are bound, so that a
layer is made once and laid out as often as a stage has it. What is sent is said by :mod:`commlayer.scheduler.mapping.calls`
alone.

What is hidden, and behind what:

- ``tensor``: in the backward pass of the projections the sequence is gathered again beside the product for the input's gradient,
  whose sum is scattered beside the product for the weight's (Megatron-LM's asynchronous linear layer).
- ``context`` of the kind ``ring``: keys and values travel beside the attention's core; of the kind ``gather`` before it.
- tokens on their way to experts in chunks beside the experts' work, where the software does that (scheduler/overlap.py) and the
  experts are whole (etp 1).
- what ``selective`` recomputation sends again is issued at the beginning of the layer's backward pass (MegaScale-MoE, figure 8b).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from commlayer.profiles.errors import InternalError
from commlayer.profiles.profile import Profile
from commlayer.scheduler import conflicts
from commlayer.scheduler.plan import Plan

__all__ = ["Course", "Finish", "Move", "Part", "Send", "Work", "bind", "run", "sequence"]


@dataclass(frozen=True, slots=True)
class Work:
    """``us`` µs of computation, that count as ``part`` of a step."""

    part: str
    us: float


@dataclass(frozen=True, slots=True)
class Move:
    """A call before it is issued: ``us`` alone, by ``plan`` on a group whose curves are in ``profile``.

    ``part``: of a step, as what it counts where it is waited for. ``durations_us``: of the plan's steps, where their curves do
    not say it: the rounds of a ring. Two moves are two calls: they are told apart by identity.
    """

    name: str
    part: str
    axis: str
    lane: str
    us: float
    plan: Plan | None = field(compare=False)
    profile: Profile | None = field(compare=False)
    durations_us: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """Issue ``move`` and go on."""

    move: Move


@dataclass(frozen=True, slots=True)
class Finish:
    """Wait for ``move``."""

    move: Move


Part = Work | Send | Finish


@dataclass(slots=True)
class Course:
    """How a sequence of parts goes by itself: ``total_us``; µs by part; what is exposed, by lane; and by link class."""

    total_us: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)
    links: dict[str, float] = field(default_factory=dict)

    def wait(self, move: Move, us: float) -> None:
        """``us`` µs were waited for ``move``."""
        link = "inter" if move.plan is None else move.plan.traffic.link.value
        for kind, key in ((self.parts, move.part), (self.exposed, move.lane), (self.links, link)):
            kind[key] = kind.get(key, 0.0) + us

    def add(self, other: Course, times: float = 1.0) -> None:
        """``times`` of another."""
        self.total_us += times * other.total_us
        for mine, its in ((self.parts, other.parts), (self.exposed, other.exposed), (self.links, other.links)):
            for key, us in its.items():
                mine[key] = mine.get(key, 0.0) + times * us


def sequence(*items: Part | Sequence[Part]) -> list[Part]:
    """One flat list; work of no length and moves of no time are left out."""
    found: list[Part] = []
    for item in items:
        for part in (item,) if isinstance(item, Work | Send | Finish) else item:
            if part.us if isinstance(part, Work) else part.move.us:
                found.append(part)  # noqa: PERF401  a comprehension of all this says less
    return found


def run(parts: Sequence[Part]) -> Course:
    """The course where nothing else is on the links: calls of an axis run first in, first out, others beside them.

    Never longer than :func:`commlayer.scheduler.conflicts.simulate` says, which also lets calls of different axes slow each
    other.
    """
    course = Course()
    now = 0.0
    free: dict[str, float] = {}
    ends: dict[int, float] = {}
    for part in parts:
        if isinstance(part, Work):
            now += part.us
            course.parts[part.part] = course.parts.get(part.part, 0.0) + part.us
            continue
        move = part.move
        if isinstance(part, Send):
            ends[id(move)] = free[move.axis] = max(now, free.get(move.axis, 0.0)) + move.us
            continue
        if id(move) not in ends:
            raise InternalError(f"{move.name} is waited for before it is issued")
        exposed = max(0.0, ends.pop(id(move)) - now)
        now += exposed
        course.wait(move, exposed)
    course.total_us = now
    return course


def bind(parts: Sequence[Part], name: str, number: Callable[[], int]) -> Iterator[conflicts.Item]:
    """As items of a program for :func:`~commlayer.scheduler.conflicts.simulate`; every call gets a name of its own."""
    calls: dict[int, conflicts.Call] = {}
    for part in parts:
        if isinstance(part, Work):
            yield conflicts.Compute(part.us, f"{name}{part.part}")
        elif isinstance(part, Send):
            calls[id(part.move)] = call = _call(part.move, f"{name}{part.move.name} #{number()}")
            yield conflicts.Issue(call)
        else:
            yield conflicts.Wait(calls.pop(id(part.move)))


def _call(move: Move, name: str) -> conflicts.Call:
    if move.plan is None:
        raise InternalError(f"{move.name} has no plan, and cannot be part of a program")
    return conflicts.Call(name, move.plan, move.lane, move.axis, move.durations_us, move.profile)
