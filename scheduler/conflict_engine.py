"""The clock of :mod:`commlayer.scheduler.conflicts`: calls under way, and what happens next. The rules are stated
there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from commlayer.profiles.errors import InternalError
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile
from commlayer.scheduler.lanes import CHUNKS_IN_FLIGHT, LANES, LanePolicy, longest_hold_us
from commlayer.scheduler.plan import Plan
from commlayer.scheduler.step_model import Load, speeds

__all__ = ["Course", "Engine"]

_NEVER = math.inf
_ROUNDING = 1e-12
"""A step with less than this part of it left has ended: two that end together must not differ by a rounding."""
_COMPUTING = Load(Resource.COMPUTE, 0.0)


@dataclass(slots=True)
class _Line:
    """The steps of one call on one resource, in plan order: ``posted`` of them were posted, ``done`` have ended."""

    steps: list[int]
    posted: int = 0
    done: int = 0

    def head(self) -> int:
        """The next step to post."""
        return self.steps[min(self.posted, len(self.steps) - 1)]


@dataclass(slots=True)
class Course:
    """A call under way. ``start`` and ``end`` of each step, µs; ``began``: when its group came to it."""

    plan: Plan
    loads: Sequence[Load]
    level: int
    issued: float
    lines: dict[Resource, _Line]
    start: list[float]
    end: list[float]
    unfinished: int
    began: float = _NEVER
    ended: float = _NEVER
    held_us: float = 0.0
    held: int = -1  # the step at whose edge it is held
    held_since: float = 0.0
    due: float = 0.0  # when that goes at the latest
    cleared: int = -1  # the latest step that was held, and goes now
    kinds: list[int] = field(default_factory=list)  # of each exchange, by number; -1 for what is none
    in_flight: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Running:
    """What occupies a resource: a step of a call, or the program's computation (``course`` None)."""

    course: Course | None
    index: int
    load: Load
    left_us: float  # of its time alone


class Engine:
    """Time goes on only in ``compute`` and ``wait``. ``profile`` None: resources do not slow each other down."""

    def __init__(self, profile: Profile | None, policy: LanePolicy | None, posting_us: float) -> None:
        self.now = 0.0
        self.busy_us: dict[Resource, float] = {}
        self._profile, self._policy, self._posting_us = profile, policy, posting_us
        self._groups: dict[str, deque[Course]] = {}
        self._running: list[_Running] = []
        self._issued = [0] * (max(LANES.values()) + 1)
        self._crossing = [0] * len(self._issued)  # of those, the calls that go between nodes
        self._next_due = [0.0] * len(self._issued)
        self._debt = (0.0, 0.0)  # an instant, and what was posted then costs whoever computes from then on
        self._stretches: dict[tuple[Resource, frozenset[Resource]], float] = {}

    def issue(self, plan: Plan, loads: Sequence[Load], level: int, group: str) -> Course:
        """Queue a call in its group, and post what may be posted now."""
        lines: dict[Resource, _Line] = {}
        kinds: dict[object, int] = {}
        numbers = []
        for index, (step, load) in enumerate(zip(plan.steps, loads, strict=True)):
            lines.setdefault(step.resource, _Line([])).steps.append(index)
            kind = step.op, step.resource, step.source, step.target
            numbers.append(kinds.setdefault(kind, len(kinds)) if load.is_exchange else -1)
        size = len(plan.steps)
        course = Course(plan, loads, level, self.now, lines, [_NEVER] * size, [_NEVER] * size, size, kinds=numbers)
        self._issued[level] += 1
        self._crossing[level] += plan.traffic.link is Resource.INTER
        self._groups.setdefault(group, deque()).append(course)
        self._settle()
        return course

    def compute(self, us: float) -> None:
        """The program computes, which takes ``us`` alone."""
        since, debt_us = self._debt
        task = _Running(None, -1, _COMPUTING, us + debt_us if us and since == self.now else us)
        self._running.append(task)
        while task.left_us > 0:
            self._advance()
        self._running.remove(task)

    def wait(self, course: Course) -> None:
        """Go on until ``course`` has ended."""
        while course.ended == _NEVER:
            self._advance()

    def _advance(self) -> None:
        """To the next end of a step, of the computation or of a hold."""
        rates = self._rates()
        ends = [task.left_us / rate for task, rate in zip(self._running, rates, strict=True)]
        due = min((course.due for course in self._active() if course.held >= 0), default=_NEVER)
        passed = min([*ends, due - self.now])
        if passed == _NEVER:
            raise InternalError("calls are under way, and none of them can go on")
        passed = max(passed, 0.0)
        for resource in dict.fromkeys(task.load.resource for task in self._running):
            self.busy_us[resource] = self.busy_us.get(resource, 0.0) + passed
        for task, rate, end in zip(self._running, rates, ends, strict=True):
            task.left_us -= passed * rate
            if end <= passed or task.left_us <= task.load.alone_us * _ROUNDING:
                task.left_us = 0.0
        self.now = due if due <= self.now + passed else self.now + passed
        self._settle()

    def _rates(self) -> list[float]:
        """How fast each running task goes, relative to its time alone."""
        busy = frozenset(task.load.resource for task in self._running)
        shared: dict[Resource, Iterator[float]] = {}
        for resource in busy:
            shared[resource] = iter(speeds([task.load for task in self._running if task.load.resource is resource]))
        return [next(shared[task.load.resource]) / self._stretch(task.load.resource, busy) for task in self._running]

    def _stretch(self, resource: Resource, busy: frozenset[Resource]) -> float:
        """How many times as long ``resource`` takes in the company of ``busy``; in one order, so that sums repeat."""
        if self._profile is None:
            return 1.0
        found = self._stretches.get((resource, busy))
        if found is None:
            others = [other for other in Resource if other in busy and other is not resource]
            found = math.prod(self._profile.slowdown(resource, other) for other in others)
            self._stretches[resource, busy] = found
        return found

    def _active(self) -> list[Course]:
        return [queue[0] for queue in self._groups.values() if queue]

    def _settle(self) -> None:
        """All that happens without time going on: steps end, calls begin, are posted, are let go."""
        while True:
            changed = False
            for task in [task for task in self._running if task.course is not None and task.left_us <= 0]:
                self._running.remove(task)
                self._finish(task)
                changed = True
            for queue in self._groups.values():
                while queue and queue[0].ended == _NEVER and not queue[0].unfinished:
                    course = queue.popleft()
                    course.began = min(course.began, self.now)
                    course.ended = self.now
                    self._issued[course.level] -= 1
                    self._crossing[course.level] -= course.plan.traffic.link is Resource.INTER
                    changed = True
            for course in self._active():
                course.began = min(course.began, self.now)
                changed |= self._let_go(course)
                for line in sorted(course.lines.values(), key=_Line.head):  # in plan order, as the executor posts
                    changed |= self._post(course, line)
            if not changed:
                return

    def _finish(self, task: _Running) -> None:
        course = task.course
        assert course is not None  # the caller chose those of calls
        course.end[task.index] = self.now
        course.unfinished -= 1
        line = course.lines[task.load.resource]
        line.done += 1
        if course.kinds[task.index] >= 0:
            course.in_flight[course.kinds[task.index]] -= 1
        if line.done < line.posted:
            self._start(course, line)

    def _post(self, course: Course, line: _Line) -> bool:
        """Post the next step of a line, where it may be; whether anything happened."""
        if line.posted == len(line.steps):
            return False
        index = line.steps[line.posted]
        if any(course.end[earlier] == _NEVER for earlier in course.plan.steps[index].after):
            return False
        kind = course.kinds[index]
        if course.held >= 0 and (kind >= 0 or index > course.held):
            return False
        if kind >= 0:
            if not self._may_go(course, index, kind):
                return course.held == index
            course.in_flight[kind] = course.in_flight.get(kind, 0) + 1
        line.posted += 1
        self._charge()
        if line.posted == line.done + 1:
            self._start(course, line)
        return True

    def _may_go(self, course: Course, index: int, kind: int) -> bool:
        """Whether an exchange has a credit and no higher lane holds it; begins the hold where one does."""
        if self._policy is None or not course.level:
            return True
        if course.in_flight.get(kind, 0) >= CHUNKS_IN_FLIGHT:
            return False
        if course.cleared == index or not self._is_above(course, index):
            return True
        longest = longest_hold_us(course.loads[index].alone_us, self._policy)
        if longest <= 0:
            return True
        # Several groups of a lane share what the lane keeps, as commlayer.engine.lanes does it: each has its own place in time.
        due = self._next_due[course.level] = max(self.now, self._next_due[course.level]) + longest
        course.held, course.held_since, course.due = index, self.now, due
        return False

    def _let_go(self, course: Course) -> bool:
        """End the hold of ``course`` where nothing above it is issued any more, or its time is over."""
        if course.held < 0 or (self._is_above(course, course.held) and self.now < course.due):
            return False
        course.held_us += self.now - course.held_since
        if self.now < course.due:
            self._next_due[course.level] = min(self._next_due[course.level], self.now)
        course.cleared, course.held = course.held, -1
        return True

    def _is_above(self, course: Course, index: int) -> bool:
        """Whether a higher call is issued that step ``index`` may meet: what leaves the node, only those that leave it too."""
        crosses = course.plan.steps[index].resource is Resource.INTER
        return any((self._crossing if crosses else self._issued)[: course.level])

    def _start(self, course: Course, line: _Line) -> None:
        index = line.steps[line.done]
        course.start[index] = self.now
        self._running.append(_Running(course, index, course.loads[index], course.loads[index].alone_us))

    def _charge(self) -> None:
        """What posting costs: the computation that is under way, or begins at once, is longer by as much."""
        for task in self._running:
            if task.course is None:
                task.left_us += self._posting_us
                return
        since, debt_us = self._debt
        self._debt = self.now, self._posting_us + (debt_us if since == self.now else 0.0)
