"""What a training step takes where its calls meet on the links: several plans on one timeline, with lanes and without.

``price`` predicts one call that has the cluster to itself. In a step several are under way: while a layer's experts
exchange tokens, the gradients of the layer before are summed. MoNTA (section "Communication Conflict", figure 11) finds
where they meet between nodes: EP's all_to_all with the gradients of W1 and W3, CP's transfers with those of the
attention's output, PP's with those of QKV and with CP's; and asks for priorities, EP ≪ PP ≪ CP ≪ DP, so that the
exchange of experts keeps its speed. That is the order of :data:`commlayer.scheduler.lanes.LANES`. This module says what
it is worth, and what it costs the others.

The model, of one representative rank: all ranks run the same program, and the profile's curves were measured with all
of them at it.

- A program computes, issues calls and waits for calls, one after the other. The calls of one group run first in, first
  out.
- The steps of a call run as in ``price``: on each resource in plan order, one at a time. Alone, a call takes exactly
  what it says.
- Steps of different calls share a resource (:mod:`commlayer.scheduler.step_model`), and resources slow each other down
  as the profile says, COMPUTE among them.
- With lanes, an exchange of a lower lane is not posted while a higher lane has issued work, but for no longer than
  ``longest_hold_us``; of each kind ``CHUNKS_IN_FLIGHT`` are posted at a time. What is posted goes on: nothing is
  pre-empted, so a higher lane finds so many chunks in its way at most. While a call is held nothing behind that step in
  its plan is posted either, as in the executor, whose one loop is where it is held.

Not modelled, beside what the step model leaves out: ranks that differ, and the patience of :mod:`commlayer.engine.lanes`, by
which a higher call that waits for a late rank stops holding others.

Rejected: priority as a share of the link (weights). No link here obeys one, and the runtime can only delay what it has
not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commlayer.profiles.errors import UsageError
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile
from commlayer.scheduler.conflict_engine import Course, Engine
from commlayer.scheduler.lanes import LanePolicy, level_of
from commlayer.scheduler.plan import Plan
from commlayer.scheduler.price import Timeline
from commlayer.scheduler.step_model import Load, loads_of

__all__ = ["Call", "CallTimes", "Compute", "Forecast", "Issue", "Item", "Wait", "simulate", "slowdown"]


@dataclass(frozen=True, slots=True)
class Call:
    """One collective call. ``name`` is its own in a program.

    ``lane``: "" is no lane, and waits for nobody. ``group``: whose calls run first in, first out; "" is one group for
    each lane. ``durations_us``: what each step takes alone, µs, instead of what the profile says. ``profile``: of its
    group, where that is another than the program's: groups that lie differently on the nodes may be of one size.

    Raises UsageError for a lane that does not exist.
    """

    name: str
    plan: Plan
    lane: str = ""
    group: str = ""
    durations_us: tuple[float, ...] | None = None
    profile: Profile | None = None

    def __post_init__(self) -> None:
        level_of(self.lane)


@dataclass(frozen=True, slots=True)
class Compute:
    """The program computes for ``us`` µs (alone: what is posted meanwhile, and busy links, may lengthen it)."""

    us: float
    name: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.us < float("inf"):
            raise UsageError(f"Compute.us: expected a time of at least 0 µs, got {self.us}")


@dataclass(frozen=True, slots=True)
class Issue:
    """The program issues ``call``, and goes on at once."""

    call: Call


@dataclass(frozen=True, slots=True)
class Wait:
    """The program waits until ``call``, which it has issued, has ended."""

    call: Call


Item = Compute | Issue | Wait
"""A program is a sequence of these. A synchronous call is an Issue and its Wait."""


@dataclass(frozen=True, slots=True)
class CallTimes:
    """The predicted course of one call, µs from the start of the program.

    ``start_us``: when its group came to it, ``spans[i]``: when step i occupied its resource, ``held_us``: for how long
    it was held in all, ``exposed_us``: for how long the program waited for it.
    """

    call: Call
    issued_us: float
    start_us: float
    end_us: float
    held_us: float
    exposed_us: float
    spans: tuple[tuple[float, float], ...]

    @property
    def total_us(self) -> float:
        """From its issue to its end, µs."""
        return self.end_us - self.issued_us

    @property
    def timeline(self) -> Timeline:
        """For the drawer: the spans of its steps, in the program's time."""
        return Timeline(self.call.plan, self.spans)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predicted course of a program.

    ``total_us``: until the program and all calls have ended. ``computed``: (name, start, end) of each Compute, µs,
    ``waited`` of each Wait, by the call's name. ``busy_us``: for how long each resource had something to do,
    ``peak_us``: for how long it would have had at its link's peak.
    """

    calls: dict[str, CallTimes]
    total_us: float
    computed: tuple[tuple[str, float, float], ...]
    waited: tuple[tuple[str, float, float], ...]
    busy_us: dict[Resource, float]
    peak_us: dict[Resource, float]

    @property
    def exposed_us(self) -> float:
        """For how long the program waited, µs: what communication costs the step."""
        return sum(end - start for _, start, end in self.waited)

    def link_use(self, link: Resource) -> float:
        """The bytes that crossed ``link`` over what it could have carried at its peak in ``total_us``; 0.0 where
        nothing was known.
        """
        return self.peak_us.get(link, 0.0) / self.total_us if self.total_us else 0.0


def simulate(
    program: Sequence[Item],
    profile: Profile,
    policy: LanePolicy | None = None,
    *,
    posting_us: float = 0.0,
    interference: bool = True,
    by_connection: bool = True,
) -> Forecast:
    """Predict the course of ``program`` on the cluster that ``profile`` describes.

    ``policy`` None: without lanes, all calls are alike. The plans are taken as they are: whether a lower lane's call is
    cut finely is the chooser's decision, so a comparison needs two programs. ``posting_us``: what each step that is
    posted costs the processor that computes, µs; the program's computation is longer by as much (waiting is not: the
    processor is free then). ``by_connection``: see :func:`~commlayer.scheduler.step_model.loads_of`. Other slowdowns,
    also of COMPUTE beside a link, are ``profile.replace(interference=…)``.

    Deterministic. Raises UsageError for a Wait for what was not issued, a name issued twice, or a cost below 0;
    PlanError where the profile cannot price a plan.
    """
    if not 0 <= posting_us < float("inf"):
        raise UsageError(f"posting_us: expected a cost of at least 0 µs, got {posting_us}")
    loads = _loads(program, profile, by_connection=by_connection)
    engine = Engine(profile if interference else None, policy, posting_us)
    courses: dict[str, Course] = {}
    computed, waited = [], []
    for item in program:
        began = engine.now
        if isinstance(item, Compute):
            engine.compute(item.us)
            computed.append((item.name, began, engine.now))
        elif isinstance(item, Issue):
            call = item.call
            group = call.group or f"lane {call.lane}"
            courses[call.name] = engine.issue(call.plan, loads[call.name], level_of(call.lane), group)
        else:
            engine.wait(courses[item.call.name])
            waited.append((item.call.name, began, engine.now))
    for course in courses.values():
        engine.wait(course)
    issued = [item.call for item in program if isinstance(item, Issue)]
    exposed = dict.fromkeys(courses, 0.0)
    for name, start, end in waited:
        exposed[name] += end - start
    peak_us: dict[Resource, float] = {}
    for load in (load for call in issued for load in loads[call.name]):
        peak_us[load.resource] = peak_us.get(load.resource, 0.0) + load.peak_us
    times = {call.name: _times(call, courses[call.name], exposed[call.name]) for call in issued}
    return Forecast(times, engine.now, tuple(computed), tuple(waited), dict(engine.busy_us), peak_us)


def slowdown(
    call: Call,
    profile: Profile,
    beside: Sequence[Call],
    policy: LanePolicy | None = None,
    *,
    by_connection: bool = True,
) -> float:
    """How many times as long ``call`` takes, from issue to end, beside calls that have just been issued; 1.0: nothing
    is lost.

    The worst moment for it: what they may have on the links at once is there. With ``policy`` None there are no lanes.
    ``beside`` must last for as long as ``call`` does, or the answer is of a mixture. Raises as :func:`simulate`.
    """
    alone = simulate([Issue(call)], profile, policy, by_connection=by_connection).total_us
    program: list[Item] = [*(Issue(other) for other in beside), Issue(call), Wait(call)]
    together = simulate(program, profile, policy, by_connection=by_connection).calls[call.name].total_us
    return together / alone if alone else 1.0


def _loads(program: Sequence[Item], profile: Profile, *, by_connection: bool) -> dict[str, tuple[Load, ...]]:
    """Those of every call, by its name; a step's calls mostly share a few plans, which are looked at once each."""
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
            kept[key] = loads_of(call.plan, call.profile or profile, call.durations_us, by_connection=by_connection)
        found[call.name] = kept[key]
    return found


def _times(call: Call, course: Course, exposed_us: float) -> CallTimes:
    spans = tuple(zip(course.start, course.end, strict=True))
    return CallTimes(call, course.issued, course.began, course.ended, course.held_us, exposed_us, spans)
