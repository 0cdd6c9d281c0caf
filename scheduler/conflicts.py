"""The time of a training step whose calls meet on the links: several plans on one timeline, with lanes and without.

``price`` predicts one call that has the cluster to itself. In a step several are under way: while a layer's experts
exchange tokens, the gradients of the layer before are summed. MoNTA (section "Communication Conflict", figure 11) finds
where they meet between nodes: EP's all_to_all with the gradients of W1 and W3, CP's transfers with those of the
attention's output, PP's with those of QKV and with CP's; and asks for priorities, EP ≪ PP ≪ CP ≪ DP, so that the
exchange of experts keeps its speed. That is the order of :data:`commlayer.scheduler.lanes.LANES`. This module says what
it is worth, and what it costs the others.

The model, of one representative rank: all ranks run the same program (:mod:`commlayer.scheduler.programs`), and the profile's
curves were measured with all of them at it.

- A program computes, issues calls and waits for calls, one after the other. The calls of one group run first in, first
  out.
- The steps of a call run as in ``price``: on each resource in plan order, one at a time. Alone, a call takes exactly
  what it says.
- Steps of different calls share a resource (:mod:`commlayer.scheduler.step_model`), and resources slow each other down
  as the profile says, COMPUTE among them.
- What is computed while calls run lacks the multiprocessors that their kernels hold, or where the memory bounds it the rate
  at which they move rows there: it goes on at 1 less their parts.
- With lanes, an exchange of a lower lane is not posted while a higher lane has issued work, but for no longer than
  ``longest_hold_us``; of each leg ``CHUNKS_IN_FLIGHT`` are posted at a time. What is posted goes on: nothing is
  pre-empted, so a higher lane waits for that many chunks at most. While a call is held nothing behind that step in
  its plan is posted either, as in the executor, whose one loop is where it is held.

Not modelled, beside what the step model leaves out: ranks that differ, and the patience of :mod:`commlayer.engine.lane_holds`, by
which a higher call that waits for a late rank stops holding others.

Rejected: priority as a share of the link (weights). No link here obeys one, and the runtime can only delay what it has
not sent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from commlayer.profiles.errors import InternalError, UsageError
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile
from commlayer.scheduler.lanes import CHUNKS_IN_FLIGHT, LANES, LanePolicy, level_of, longest_hold_us
from commlayer.scheduler.plan import Plan
from commlayer.scheduler.price import Timeline
from commlayer.scheduler.programs import Compute, Issue, Item, PlannedCall, Wait
from commlayer.scheduler.step_model import Load, loads_of, speeds

__all__ = ["CallTimes", "Compute", "Forecast", "Issue", "Item", "PlannedCall", "Wait", "simulate", "slowdown"]


@dataclass(frozen=True, slots=True)
class CallTimes:
    """The predicted course of one call, µs from the start of the program.

    ``start_us``: when its group came to it, ``spans[i]``: when step i occupied its resource, ``held_us``: for how long
    it was held in all, ``exposed_us``: for how long the program waited for it.
    """

    call: PlannedCall
    issued_us: float
    start_us: float
    end_us: float
    held_us: float
    exposed_us: float
    spans: tuple[tuple[float, float], ...]

    @property
    def total_us(self) -> float:
        """Its time from its issue to its end, µs."""
        return self.end_us - self.issued_us

    @property
    def timeline(self) -> Timeline:
        """For the drawer: the spans of its steps, in the program's time."""
        return Timeline(self.call.plan, self.spans)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predicted course of a program.

    ``total_us``: until the program and all calls have ended. ``computed``: (name, start, end) of each Compute, µs,
    ``waited`` of each Wait, by the call's name. ``busy_us``: for how long each resource had something to do.
    """

    calls: dict[str, CallTimes]
    total_us: float
    computed: tuple[tuple[str, float, float], ...]
    waited: tuple[tuple[str, float, float], ...]
    busy_us: dict[Resource, float]

    @property
    def exposed_us(self) -> float:
        """For how long the program waited, µs: what communication costs the step."""
        return sum(end - start for _, start, end in self.waited)


def simulate(
    program: Sequence[Item],
    profile: Profile,
    policy: LanePolicy | None = None,
    *,
    interference: bool = True,
) -> Forecast:
    """Predict the course of ``program`` on the cluster that ``profile`` describes.

    ``policy`` None: without lanes, all calls are alike. The plans are taken as they are: whether a lower lane's call is
    cut finely is the chooser's decision, so a comparison needs two programs. Slowdowns, also of COMPUTE beside a link,
    are ``profile.replace(interference=…)``.

    Deterministic. Raises UsageError for a Wait for what was not issued, and for a name issued twice; PlanError where
    the profile cannot price a plan.
    """
    loads = _loads(program, profile)
    clock = _Clock(profile if interference else None, policy)
    issued: dict[str, _CallState] = {}
    computed, waited = [], []
    for item in program:
        began = clock.now
        if isinstance(item, Compute):
            clock.compute(item)
            computed.append((item.name, began, clock.now))
        elif isinstance(item, Issue):
            issued[item.call.name] = clock.issue(item.call, loads[item.call.name])
        else:
            while issued[item.call.name].ended == _NEVER:
                clock.advance()
            waited.append((item.call.name, began, clock.now))
    for each in issued.values():
        while each.ended == _NEVER:
            clock.advance()
    exposed = dict.fromkeys(issued, 0.0)
    for name, start, end in waited:
        exposed[name] += end - start
    times = {name: each.times(exposed[name]) for name, each in issued.items()}
    return Forecast(times, clock.now, tuple(computed), tuple(waited), dict(clock.busy_us))


def slowdown(
    call: PlannedCall,
    profile: Profile,
    beside: Sequence[PlannedCall],
    policy: LanePolicy | None = None,
) -> float:
    """How many times as long ``call`` takes, from issue to end, beside calls that have just been issued; 1.0: nothing
    is lost.

    The worst moment for it: what they may have on the links at once is there. With ``policy`` None there are no lanes.
    ``beside`` must last for as long as ``call`` does, or the answer is of a mixture. Raises as :func:`simulate`.
    """
    alone = simulate([Issue(call)], profile, policy).total_us
    program: list[Item] = [*(Issue(other) for other in beside), Issue(call), Wait(call)]
    together = simulate(program, profile, policy).calls[call.name].total_us
    return together / alone if alone else 1.0


def _loads(program: Sequence[Item], profile: Profile) -> dict[str, tuple[Load, ...]]:
    """The loads of every call, by its name; a step's calls mostly share a few plans, which are looked at once each."""
    kept: dict[tuple[int, tuple[float, ...] | None], tuple[Load, ...]] = {}
    found: dict[str, tuple[Load, ...]] = {}
    for item in program:
        if isinstance(item, Wait) and item.call.name not in found:
            raise UsageError(f"the program waits for call {item.call.name!r}, which it has not issued")
        if not isinstance(item, Issue):
            continue
        call = item.call
        if call.name in found:
            raise UsageError(f"the program issues call {call.name!r} twice: give each call a name of its own")
        key = id(call.plan), call.durations_us
        if key not in kept:
            kept[key] = loads_of(call.plan, call.profile or profile, call.durations_us)
        found[call.name] = kept[key]
    return found


_NEVER = math.inf
_ROUNDING = 1e-12
"""A step with less than this part of it left has ended: two that end together must not differ by a rounding."""
_COMPUTING = Load(Resource.COMPUTE, 0.0)
_LEAST_LEFT = 0.1
"""The part of the GPU that is left to compute beside however many calls: kernels beyond wait for theirs."""


@dataclass(slots=True)
class _Line:
    """The steps of one call on one resource, in plan order: ``posted`` of them were posted, ``done`` have ended."""

    steps: list[int]
    posted: int = 0
    done: int = 0

    def head(self) -> int:
        """The next step to post; there must be one."""
        return self.steps[self.posted]


@dataclass(slots=True)
class _CallState:
    """A call that was issued. ``start`` and ``end`` of each step, µs; ``began``: when its group came to it."""

    call: PlannedCall
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
    legs: list[int] = field(default_factory=list)  # of its steps, as _shape has them
    in_flight: dict[int, int] = field(default_factory=dict)

    def times(self, exposed_us: float) -> CallTimes:
        """Give the times as they are told, once it has ended."""
        spans = tuple(zip(self.start, self.end, strict=True))
        return CallTimes(self.call, self.issued, self.began, self.ended, self.held_us, exposed_us, spans)


@dataclass(slots=True)
class _Running:
    """An occupant of a resource: a step of a call, or the program's computation (``state`` None)."""

    state: _CallState | None
    index: int
    load: Load
    left_us: float  # of its time alone
    is_streaming: bool = False


def _shape(plan: Plan) -> tuple[dict[Resource, list[int]], list[int]]:
    """The steps of a plan on each resource, in plan order; and the leg of each exchange, by number, -1 for what is none."""
    steps: dict[Resource, list[int]] = {}
    legs: dict[int, int] = {}
    for index, step in enumerate(plan.steps):
        steps.setdefault(step.resource, []).append(index)
    return steps, [legs.setdefault(id(step.leg), len(legs)) if step.leg.is_exchange else -1 for step in plan.steps]


class _Holds:
    """Counts the calls that are issued on each lane, and holds those that ``policy`` has wait for them; None: nobody waits."""

    def __init__(self, policy: LanePolicy | None) -> None:
        self.policy = policy
        self._issued = [0] * (max(LANES.values()) + 1)
        self._crossing = [0] * len(self._issued)  # of those, the calls that go between nodes
        self._next_due = [0.0] * len(self._issued)

    def count(self, state: _CallState, change: int) -> None:
        """Count a call that is issued (1), or has ended (-1)."""
        self._issued[state.level] += change
        if state.call.plan.traffic.link is Resource.INTER:
            self._crossing[state.level] += change

    def may_post(self, state: _CallState, index: int, leg: int, now: float) -> bool:
        """Whether an exchange has a credit and no higher lane holds it; begins the hold where one does."""
        if self.policy is None or not state.level:
            return True
        if state.in_flight.get(leg, 0) >= CHUNKS_IN_FLIGHT:
            return False
        if state.cleared == index or not self._is_above(state, index):
            return True
        longest = longest_hold_us(state.loads[index].alone_us, self.policy)
        if longest <= 0:
            return True
        # Several groups of a lane share what the lane keeps, as commlayer.engine.lane_holds has it: each in its own time.
        due = self._next_due[state.level] = max(now, self._next_due[state.level]) + longest
        state.held, state.held_since, state.due = index, now, due
        return False

    def let_go(self, state: _CallState, now: float) -> bool:
        """End the hold of ``state`` where nothing above it is issued any more, or its time is over."""
        if self._is_above(state, state.held) and now < state.due:
            return False
        state.held_us += now - state.held_since
        if now < state.due:
            self._next_due[state.level] = min(self._next_due[state.level], now)
        state.cleared, state.held = state.held, -1
        return True

    def _is_above(self, state: _CallState, index: int) -> bool:
        """Whether a higher call is issued that step ``index`` may meet: what leaves the node, only those that leave it too."""
        crosses = state.call.plan.steps[index].resource is Resource.INTER
        return any((self._crossing if crosses else self._issued)[: state.level])


class _Clock:
    """The clock of a step, which lets happen what is next, by the rules above. Time goes on only in ``compute`` and ``advance``.

    ``profile`` None: resources do not slow each other down.
    """

    def __init__(self, profile: Profile | None, policy: LanePolicy | None) -> None:
        self.now = 0.0
        self.busy_us: dict[Resource, float] = {}
        self._profile, self._holds = profile, _Holds(policy)
        self._groups: dict[str, deque[_CallState]] = {}
        self._running: list[_Running] = []
        self._shapes: dict[int, tuple[dict[Resource, list[int]], list[int]]] = {}
        self._speeds: dict[tuple[int, ...], tuple[list[float], tuple[Resource, ...]]] = {}

    def issue(self, call: PlannedCall, loads: Sequence[Load]) -> _CallState:
        """Queue a call in its group, and post what may be posted now."""
        plan, level = call.plan, level_of(call.lane)
        shape = self._shapes.get(id(plan))
        if shape is None:
            shape = self._shapes[id(plan)] = _shape(plan)
        lines, size = {resource: _Line(steps) for resource, steps in shape[0].items()}, len(plan.steps)
        state = _CallState(call, loads, level, self.now, lines, [_NEVER] * size, [_NEVER] * size, size, legs=shape[1])
        self._holds.count(state, 1)
        self._groups.setdefault(call.group or f"lane {call.lane}", deque()).append(state)
        self._settle()
        return state

    def compute(self, work: Compute) -> None:
        """The program computes, which takes ``work.us`` alone."""
        task = _Running(None, -1, _COMPUTING, work.us, work.is_streaming)
        self._running.append(task)
        while task.left_us > 0:
            self.advance()
        self._running.remove(task)

    def advance(self) -> None:
        """To the next end of a step, of the computation or of a hold."""
        running = self._running
        rates, busy = self._rates()
        ends = [task.left_us / rate for task, rate in zip(running, rates, strict=True)]
        due = _NEVER
        if self._holds.policy is not None:  # without one nothing is held
            heads = (queue[0] for queue in self._groups.values() if queue)
            due = min((state.due for state in heads if state.held >= 0), default=_NEVER)
        passed = min([*ends, due - self.now])
        if passed == _NEVER:
            raise InternalError("calls are under way, and none of them can go on")
        passed = max(passed, 0.0)
        for resource in busy:
            self.busy_us[resource] = self.busy_us.get(resource, 0.0) + passed
        is_settled = due == _NEVER
        for task, rate, end in zip(running, rates, ends, strict=True):
            task.left_us -= passed * rate
            if end <= passed or task.left_us <= task.load.alone_us * _ROUNDING:
                task.left_us = 0.0
                is_settled = is_settled and task.state is None  # a step has ended, not the computation
        self.now = due if due <= self.now + passed else self.now + passed
        if not is_settled:
            self._settle()

    def _rates(self) -> tuple[list[float], tuple[Resource, ...]]:
        """How fast each running task goes, relative to its time alone, and the resources at work. What the same loads reach
        side by side is computed once: they meet again in every layer."""
        key = tuple([id(task.load) for task in self._running])
        known = self._speeds.get(key)
        if known is None:
            loads = [task.load for task in self._running]
            busy = tuple(dict.fromkeys(load.resource for load in loads))
            shared = {each: iter(speeds([load for load in loads if load.resource is each])) for each in busy}
            stretches = dict.fromkeys(busy, 1.0)
            if self._profile is not None:
                for resource in busy:  # by the others in one order, so that products repeat
                    others = [other for other in Resource if other in busy and other is not resource]
                    stretches[resource] = math.prod(self._profile.slowdown(resource, other) for other in others)
            rates = [next(shared[load.resource]) / stretches[load.resource] for load in loads]
            known = self._speeds[key] = rates, busy
        rates, busy = known
        if len(rates) > 1:
            for place, task in enumerate(self._running):
                if task.state is None:  # the program computes, beside calls
                    calls = {id(other.state): other.state.call for other in self._running if other.state is not None}
                    occupied = sum(
                        call.memory if task.is_streaming else call.multiprocessors for call in calls.values()
                    )
                    slowed = rates[place] * max(_LEAST_LEFT, 1.0 - occupied)
                    rates = [*rates[:place], slowed, *rates[place + 1 :]]
        return rates, busy

    def _settle(self) -> None:
        """All that happens without time going on: steps end, calls begin, are posted, are let go."""
        changed = True
        while changed:
            changed = False
            for task in [task for task in self._running if task.left_us <= 0 and task.state is not None]:
                self._running.remove(task)
                self._finish(task)
                changed = True
            for queue in self._groups.values():
                while queue and not queue[0].unfinished:
                    state = queue.popleft()
                    state.began, state.ended = min(state.began, self.now), self.now
                    self._holds.count(state, -1)
                    changed = True
            for state in [queue[0] for queue in self._groups.values() if queue]:
                state.began = min(state.began, self.now)
                changed = (state.held >= 0 and self._holds.let_go(state, self.now)) or changed
                lines = [line for line in state.lines.values() if line.posted < len(line.steps)]
                if len(lines) > 1:  # in plan order, as the executor posts
                    lines.sort(key=_Line.head)
                for line in lines:
                    changed = self._post(state, line) or changed

    def _finish(self, task: _Running) -> None:
        state = task.state
        assert state is not None  # the caller chose those of calls
        state.end[task.index] = self.now
        state.unfinished -= 1
        line = state.lines[task.load.resource]
        line.done += 1
        if state.legs[task.index] >= 0:
            state.in_flight[state.legs[task.index]] -= 1
        if line.done < line.posted:
            self._start(state, line)

    def _post(self, state: _CallState, line: _Line) -> bool:
        """Post the next step of a line, where it may be; whether anything happened."""
        index = line.head()
        after = state.call.plan.steps[index].after
        if after and any(state.end[earlier] == _NEVER for earlier in after):
            return False
        leg = state.legs[index]
        if state.held >= 0 and (leg >= 0 or index > state.held):
            return False
        if leg >= 0:
            if not self._holds.may_post(state, index, leg, self.now):
                return state.held == index
            state.in_flight[leg] = state.in_flight.get(leg, 0) + 1
        line.posted += 1
        if line.posted == line.done + 1:
            self._start(state, line)
        return True

    def _start(self, state: _CallState, line: _Line) -> None:
        index = line.steps[line.done]
        state.start[index] = self.now
        self._running.append(_Running(state, index, state.loads[index], state.loads[index].alone_us))
