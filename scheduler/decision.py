"""The decision: price every candidate, take the fastest, but no elaborate plan for a gain smaller than the profile's error.

Everything here depends only on the traffic's rank-invariant numbers, the profile and the policy, so that every rank
decides alike without talking.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from commlayer.profiles.curve import median
from commlayer.profiles.errors import PlanError, UsageError
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile
from commlayer.scheduler.group_profiles import group_profile
from commlayer.scheduler.group_strategies import candidates, finer_plans
from commlayer.scheduler.kept import Kept
from commlayer.scheduler.lanes import CHUNKS_IN_FLIGHT, LanePolicy, level_of
from commlayer.scheduler.plan import Gather, Plan, Strategy
from commlayer.scheduler.price import Timeline, curve_of, curves_of, price
from commlayer.scheduler.replicated import can_drop
from commlayer.scheduler.slow_pairs import is_avoided, ring_order
from commlayer.scheduler.traffic import Traffic
from commlayer.scheduler.wire import WireFormat

__all__ = ["Decision", "Planner", "Policy", "choose"]

_MAX_DECISIONS = 256
"""A decision keeps all its alternatives, up to some 100 KB, and a dropless MoE layer may ask for a new size each step."""
_OF_HELD_OUT = 0.5
"""The part of a curve's hold-out error that its predictions between two measured sizes are taken to have."""
_OF_SAME_LEGS = 0.25
"""The part of the tolerance that holds between plans of the same legs, in one chunk or several."""
_MAX_GROUPS = 64
"""Shapes of groups, of which a job has a handful."""
_OVER_NODES = (Strategy.HIERARCHICAL, Strategy.PIPELINED)
_MOST_BASES = 3
_BASES = ("measured", "interpolated", "derived")
"""The bases of curves, the most certain first."""
_EXACTNESS = {wire_format: place for place, wire_format in enumerate(WireFormat)}
_SIMPLICITY = {strategy: place for place, strategy in enumerate(Strategy)}


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy of a decision: what the chooser may do.

    ``gather`` None follows the profile. ``tolerance`` None takes the error of the curves: a simpler plan is preferred
    when it is predicted slower by no more than this fraction. ``min_slice_bytes`` is MoNTA's I_minimal. Where there is
    nothing to move, or less than ``min_bytes`` (None: the profile's ``plan_from_bytes``), the plan is flat, also if
    ``strategies`` lacks it. ``lanes`` says how finely traffic is cut that others go before.

    Raises UsageError for a value out of its range.
    """

    strategies: tuple[Strategy, ...] = tuple(Strategy)
    max_chunks: int = 32
    min_slice_bytes: int = 4096
    min_bytes: int | None = None
    gather: Gather | None = None
    interference: bool = True
    tolerance: float | None = None
    lanes: LanePolicy = field(default_factory=LanePolicy)

    def __post_init__(self) -> None:
        rules = {
            "strategies": (
                len(self.strategies) > 0 and all(isinstance(strategy, Strategy) for strategy in self.strategies),
                f"one or more of Strategy's {', '.join(strategy.value for strategy in Strategy)}",
            ),
            "max_chunks": (self.max_chunks >= 1, "at least 1"),
            "min_bytes": (self.min_bytes is None or self.min_bytes >= 0, "at least 0, or None for the profile's"),
            "min_slice_bytes": (self.min_slice_bytes >= 0, "at least 0"),
            "gather": (
                self.gather is None or isinstance(self.gather, Gather),
                "Gather.WHOLE, Gather.REMOTE, or None for the profile's",
            ),
            "tolerance": (
                self.tolerance is None or 0 <= self.tolerance < math.inf,
                "a fraction of at least 0, or None for the profile's error",
            ),
        }
        for name, (sound, expected) in rules.items():
            if not sound:
                raise UsageError(f"Policy.{name}: expected {expected}, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen plan, every alternative with its predicted timeline, and why.

    ``margin`` is how much slower the best plan of any other strategy or wire format is predicted, as a fraction of the chosen
    time; negative where the simpler plan was kept although another is predicted faster by less than ``tolerance``.
    ``unyielding``: the plan that would run if nobody went before this traffic, where it is another. ``basis``: what the
    curves of the chosen plan rest on, the least certain of them: ``measured``, ``interpolated`` or ``derived``. ``unpriced``:
    why a wire format that was allowed is not among the candidates; else empty.
    """

    traffic: Traffic
    timeline: Timeline
    candidates: tuple[Timeline, ...]
    margin: float
    tolerance: float
    min_bytes: int
    profile_name: str
    policy: Policy
    unpriced: str = ""
    unyielding: Timeline | None = None
    basis: str = "measured"

    @property
    def plan(self) -> Plan:
        return self.timeline.plan

    @property
    def predicted_us(self) -> float:
        return self.timeline.total_us

    @property
    def bottleneck(self) -> Resource:
        return self.timeline.bottleneck

    def reason(self) -> str:
        """One sentence: why this plan."""
        slow = [f"node {node} of the group has {rate:.0%}" for node, rate in enumerate(self.traffic.rates) if rate < 1]
        links = f"; of the usual rate {', '.join(slow)}" if slow else ""
        if self.traffic.logical_bytes >= max(1, self.min_bytes):  # else it did not matter what goes which way
            links += "".join(f"; {self._way(a, b, rate)}" for a, b, rate in self.traffic.slow_pairs)
        basis = "" if self.basis == "measured" else f"; by {self.basis} curves"
        return f"{self.plan.name}: {self._because()}{links}{basis}"

    def _way(self, a: int, b: int, rate: float) -> str:
        """The part of the reason that says what this plan does about a slow way between two nodes."""
        pair = f"the slow pair {a}-{b} of the group ({rate:.0%} of the usual rate)"
        is_avoidable = is_avoided(self.traffic, (a, b))
        order = "-".join(map(str, ring_order(self.traffic)))
        if self.plan.strategy is Strategy.RING:
            return f"node order {order} {'avoids' if is_avoidable else 'does not avoid'} {pair}"
        if not is_avoidable:
            return f"no order of its {len(self.traffic.nodes)} nodes avoids {pair}"
        if all(timeline.plan.strategy is not Strategy.RING for timeline in self.candidates):
            return f"{pair} is used, for no plan of this traffic goes round the nodes"
        return f"{pair} is used, for going round it in the node order {order} is not predicted faster"

    def _because(self) -> str:
        traffic = self.traffic
        if self.unyielding is not None:
            other = self.unyielding
            costs = self.predicted_us / other.total_us - 1.0
            return (
                f"lane {traffic.lane} yields to others between chunks, so they are fine ones; {other.plan.name} would be "
                f"{max(costs, 0.0):.1%} faster"
            )
        if len(self.candidates) == 1:
            if traffic.logical_bytes == 0:
                return "the only plan for this traffic (nothing to move)"
            if traffic.logical_bytes < self.min_bytes:
                whose = "the profile" if self.policy.min_bytes is None else "the policy"
                return f"the only plan below {self.min_bytes} bytes, says {whose}"
            if can_drop(traffic):
                return "the only plan that the policy allows"
            crossing = f"group size {traffic.group_size} over {traffic.link.value}"
            return f"the only plan for this traffic (replication {traffic.replication}, {crossing})"
        where = f"bottleneck {self.bottleneck.value}"
        rivals = [rival for rival in self.candidates if _kind(rival.plan) != _kind(self.plan)]
        best = min(rivals or self.candidates, key=lambda rival: rival.total_us)
        if best.total_us < self.predicted_us:
            gain = 1.0 - best.total_us / self.predicted_us
            limit = "the profile's own error" if self.policy.tolerance is None else "the policy's tolerance"
            kind = "simpler plan" if rivals else "plan of fewer chunks"
            return (
                f"{best.plan.name} is predicted {gain:.1%} faster, which is less than {limit} of {self.tolerance:.1%}, "
                f"so the {kind} stays; {where}"
            )
        if not rivals:
            return f"the fastest of {len(self.candidates)} plans that the policy allows; {where}"
        return f"the best of another strategy, {best.plan.name}, is predicted {self.margin:.1%} slower; {where}"


def choose(traffic: Traffic, profile: Profile, policy: Policy | None = None) -> Decision:
    """Price all candidates and decide. Raises PlanError where the profile cannot price the traffic."""
    policy = policy or Policy()
    gather = policy.gather or Gather(profile.gather)
    min_bytes = profile.plan_from_bytes if policy.min_bytes is None else policy.min_bytes
    allowed = policy.strategies
    if traffic.logical_bytes < max(1, min_bytes):
        is_native = any(wire.is_native for wire in traffic.wires)
        allowed = (Strategy.FLAT,) if is_native else (Strategy.DIRECT,)
    plans = candidates(traffic, gather, policy.min_slice_bytes, policy.max_chunks, allowed)
    priced, unpriced = _priced(list(plans), profile, policy)
    if not priced:
        names = ", ".join(strategy.value for strategy in allowed)
        which = "and it does not apply" if len(allowed) == 1 else "and none of them applies"
        is_ring = Strategy.RING in allowed and not traffic.slow_pairs
        why = " (ring goes round slow pairs of nodes, and no pair is slow)" if is_ring else ""
        raise PlanError(
            unpriced or f"no plan: the policy allows only {names}, {which} to {traffic}{why}: allow flat too"
        )
    tolerance = _error([t.plan for t in priced], profile) if policy.tolerance is None else policy.tolerance
    best_us = min(timeline.total_us for timeline in priced)
    # The simplest strategy within the tolerance; of the plans with its legs the one of the fewest chunks, within a part of
    # the tolerance only: they err by the same curves, and so alike.
    simplest = min((t for t in priced if t.total_us <= best_us * (1.0 + tolerance)), key=_simplicity)
    alike = [t for t in priced if _legs(t.plan) == _legs(simplest.plan)]
    most_us = min(t.total_us for t in alike) * (1.0 + tolerance * _OF_SAME_LEGS)
    chosen = min((t for t in alike if t.total_us <= most_us), key=_simplicity)
    unyielding = None
    if level_of(traffic.lane):
        fine = _yielding(chosen, priced, profile, policy)
        chosen, unyielding = fine, None if fine is chosen else chosen
    rivals = [t.total_us for t in priced if _kind(t.plan) != _kind(chosen.plan)]
    margin = min(rivals) / chosen.total_us - 1.0 if rivals and chosen.total_us > 0 else 0.0
    basis = max((curve.basis for curve in curves_of(chosen.plan, profile)), key=_BASES.index, default=_BASES[0])
    return Decision(
        traffic, chosen, priced, margin, tolerance, min_bytes, profile.name, policy, unpriced, unyielding, basis
    )


def _priced(plans: Sequence[Plan], profile: Profile, policy: Policy) -> tuple[tuple[Timeline, ...], str]:
    """The timelines, and why a wire format was left out: the profile may be older than it.

    Plans by leaders are left out too where it has no curve to price them by, but where there is nothing else.
    """
    found, unpriced, refused = [], "", None
    for plan in plans:
        try:
            found.append(price(plan, profile, interference=policy.interference))
        except PlanError as error:  # noqa: PERF203
            if plan.strategy is Strategy.LEADERS:
                refused = error
                continue
            if plan.wire.is_native:
                raise
            unpriced = (
                f"{plan.wire} is left out: profile {profile.name!r} does not know what it costs; measure the cluster again "
                "with this version's commlayer measure"
            )
    if refused is not None and not found:
        raise refused
    return tuple(found), unpriced


def _yielding(chosen: Timeline, priced: Sequence[Timeline], profile: Profile, policy: Policy) -> Timeline:
    """The plan whose exchanges on the slowest link are smallest, because a higher lane waits for one that is under way.

    Among plans in the format of ``chosen`` that keep its speed and the link's, as the lanes' policy says; ``chosen`` where none
    has smaller ones.
    """
    most_us = chosen.total_us * (1 + policy.lanes.most_loss)
    fast = [t for t in priced if t.plan.wire == chosen.plan.wire and t.total_us <= most_us]
    # Of chunks that are no smaller than the speed asks for, and of the chosen plan: pieces cost less than chunks do.
    bases = {t.plan.name: t.plan for t in sorted(fast, key=lambda t: t.plan.chunks) if t.plan.strategy in _OVER_NODES}
    found = [chosen]

    def fills_link(coarsest: Plan, cut: float) -> bool:
        return _fills_link(coarsest, profile, policy.lanes.efficiency, cut)

    for plan in [chosen.plan, *list(bases.values())[:_MOST_BASES]]:
        for finer in finer_plans(plan, policy.min_slice_bytes, fills_link):
            if _largest_on_link(finer) >= _largest_on_link(found[-1].plan):
                break
            if _fills_link(finer, profile, policy.lanes.efficiency):
                timeline = price(finer, profile, interference=policy.interference)
                if timeline.total_us <= most_us:
                    found.append(timeline)
                    break
    return found[-1]


def _largest_on_link(plan: Plan) -> float:
    """Bytes of the largest exchange on the slowest link."""
    return max(step.bytes for step in plan.steps if step.resource is plan.traffic.link)


def _fills_link(plan: Plan, profile: Profile, efficiency: float, cut: float = 1.0) -> bool:
    """Whether its exchanges on the slowest link, each ``cut`` times smaller and as many as are there at once, have
    ``efficiency`` of what a long one has."""
    for step in {id(s.leg): s for s in plan.steps if s.resource is plan.traffic.link}.values():
        curve = curve_of(step, plan, profile)
        at_once = step.bytes / cut * CHUNKS_IN_FLIGHT
        if curve is not None and curve.algbw_gbps(at_once) < efficiency * curve.algbw_gbps(curve.bytes[-1]):
            return False
    return True


def _kind(plan: Plan) -> tuple[Strategy, WireFormat]:
    """Plans of one kind differ in their chunks."""
    return plan.strategy, plan.wire.format


def _legs(plan: Plan) -> tuple[Strategy, WireFormat]:
    """A hierarchical plan is a pipelined one of one chunk; and one that goes round the nodes is timed by the same curves."""
    is_grouped = plan.traffic.collective != "all_to_all" and plan.strategy in (Strategy.PIPELINED, Strategy.RING)
    return Strategy.HIERARCHICAL if is_grouped else plan.strategy, plan.wire.format


def _simplicity(timeline: Timeline) -> tuple[int, int, int]:
    """The rank in simplicity: exact, rounded, rounded more; then fewer stages, then fewer chunks."""
    plan = timeline.plan
    return _EXACTNESS[plan.wire.format], _SIMPLICITY[plan.strategy], plan.chunks


def _error(plans: list[Plan], profile: Profile) -> float:
    """The error of the curves that these plans rest on, as a fraction: half their median hold-out error, for a point is left out
    between two that are as far apart again as those it is usually found between; 0.0 where none states one."""
    simple = [plan for plan in plans if plan.chunks == 1] or plans[:1]  # chunks look the same curves up
    curves = {curve.key: curve.holdout_error for plan in simple for curve in curves_of(plan, profile)}
    errors = [error for error in curves.values() if error is not None]
    return _OF_HELD_OUT * median(errors) if errors else 0.0


class Planner:
    """Decisions of one profile and policy, each made once: a repeated question costs a dictionary look-up.

    The latest 256 are kept.
    """

    def __init__(self, profile: Profile, policy: Policy | None = None) -> None:
        self.profile = profile
        self.policy = policy or Policy()
        self._decisions = Kept[Traffic, Decision](_MAX_DECISIONS)
        self._of_groups = Kept[tuple[tuple[int, ...], int, float], Planner](_MAX_GROUPS)

    def of_group(self, nodes: tuple[int, ...], siblings: int = 0, rate: float = 0.0) -> Planner:
        """The planner of a group of the cluster with so many ranks on each of ``nodes``; kept.

        ``siblings``, ``rate``, and what is raised: see :func:`commlayer.scheduler.group_profiles.group_profile`.
        """
        key = nodes, siblings, rate
        found = self._of_groups.get(key)
        if found is None:
            profile = group_profile(self.profile, nodes, siblings, rate)
            found = self if profile is self.profile else Planner(profile, self.policy)
            self._of_groups.add(key, found)
        return found

    def decide(self, traffic: Traffic) -> Decision:
        """The decision for this traffic; cached. Raises PlanError as :func:`choose` does."""
        decision = self._decisions.get(traffic)
        if decision is None:
            decision = self._decisions.add(traffic, choose(traffic, self.profile, self.policy))
        return decision
