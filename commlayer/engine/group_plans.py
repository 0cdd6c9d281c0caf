"""Which plan a collective of one group gets. Pure: every rank of the group finds the same, and asks
nobody."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from commlayer.profiles.errors import PlanError
from commlayer.profiles.links import Resource
from commlayer.profiles.printable import warn
from commlayer.scheduler.decision import Planner
from commlayer.scheduler.experience.experience import Experience
from commlayer.scheduler.experience.link_rates import LinkRates, profile_at
from commlayer.scheduler.group_profiles import pairs_on
from commlayer.scheduler.group_strategies import build
from commlayer.scheduler.kept import Kept
from commlayer.scheduler.named_plans import TRIED, parse_plan
from commlayer.scheduler.plan import Plan, Span, Strategy
from commlayer.scheduler.price import price
from commlayer.scheduler.rails import exchange_over
from commlayer.scheduler.traffic import SlowPair, Traffic
from commlayer.scheduler.wire import NATIVE, Wire
from commlayer.settings import Settings

__all__ = ["CallPrices", "Choices"]

_MAX_KEPT = 1024
_SMALLEST_BYTES, _LARGEST_BYTES = 64, 4 << 20
"""Between these blocks of an all_to_all a two-level plan is looked for."""
_CLEAR_GAIN = 1.5
_SUMS = ("all_reduce", "reduce_scatter")
_PLANNED = (*_SUMS, "all_gather", "broadcast", "all_to_all_v")
_OF_PLANS = {"all_to_all": "all_to_all_v"}
"""The planner's name of a collective of the backend, where it is something else."""


class CallPrices:
    """Predicts what calls of one group take.

    ``shape``: how many of the group's ranks each node holds. ``job_planner``, the job's: its profile
    says what a group of that shape can do; None: nothing is known. ``planner`` is the group's own.
    ``rates``: of each of its nodes' cards, as a fraction of the usual one; empty: all alike.
    ``slow_pairs``: two of its nodes each, and the rate of the way between them. ``siblings``: how
    many groups of its shape use a node at the same time; 0: as many as its ranks make up. ``lane``:
    one that others go before, so that calls are cut finely; else empty.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        job_planner: Planner | None,
        lane: str = "",
        rates: tuple[float, ...] = (),
        slow_pairs: tuple[SlowPair, ...] = (),
    ) -> None:
        self.shape, self.size, self.lane = shape, sum(shape), lane
        self.rates = rates if min(rates, default=1.0) < 1.0 else ()
        self.slow_pairs = slow_pairs
        self._slowest = min(rates, default=0.0)  # 0.0: perhaps the slowest of all
        self._others: dict[tuple[tuple[int, ...], int], CallPrices] = {}
        self.use(job_planner, 0)

    def use(self, job_planner: Planner | None, siblings: int) -> None:
        """Predict by this profile of the job, for so many groups of this shape that use a node at the
        same time. Raises UsageError for a negative number.

        The planner of the group is the job's own, which says what it lacks, for one that does not fit
        its profile's cluster.
        """
        self.job_planner, self.siblings, self.planner = job_planner, siblings, job_planner
        if job_planner is not None and self.size > 1:
            with contextlib.suppress(PlanError):
                self.planner = job_planner.of_group(self.shape, siblings, self._slowest)
        self._others.clear()
        self.__dict__.pop("two_level_may_pay", None)

    def use_lane(self, lane: str) -> None:
        """Predict for calls that are cut finely for ``lane``, or not ("")."""
        self.lane = lane
        self._others.clear()

    @property
    def link(self) -> Resource:
        """The slowest link class that the group crosses."""
        return Resource.INTER if len(self.shape) > 1 else Resource.INTRA

    def traffic(
        self,
        collective: str,
        num_bytes: int,
        is_ordered: bool = False,
        wires: tuple[Wire, ...] = (NATIVE,),
        element_bytes: int = 0,
        lane: str | None = None,
    ) -> Traffic:
        """The traffic of a call of the group. ``lane`` None: as :attr:`lane`."""
        return Traffic(
            num_bytes,
            self.size,
            1,
            self.link,
            collective,
            self.shape,
            is_ordered,
            wires=wires,
            element_bytes=element_bytes,
            lane=self.lane if lane is None else lane,
            rates=self.rates,
            slow_pairs=self.slow_pairs,
        )

    def predicted_us(
        self,
        collective: str,
        num_bytes: int,
        shape: tuple[int, ...] | None = None,
        *,
        siblings: int = 0,
        wires: tuple[Wire, ...] = (NATIVE,),
        element_bytes: int = 0,
        over: Span = Span.GROUP,
    ) -> float | None:
        """Predict what a call takes, moved as it would be; None where no profile says it. As in
        :meth:`Choices.plan`.

        ``over``: of an all_to_all_v, among the ranks of each rail or node only
        (:mod:`commlayer.scheduler.rails`).

        ``shape``: of any group of the same job, whatever nodes it is on, with so many ``siblings``:
        the same on ranks of several groups. A group of one rank takes no time.
        """
        if over is not Span.GROUP:
            return self._over_us(over, num_bytes)
        if shape is not None:
            if sum(shape) == 1:
                return 0.0
            other = self._others.get((shape, siblings))
            if other is None:  # for its own shape too: other groups of that shape know other nodes
                pairs = () if self.job_planner is None else pairs_on(self.job_planner.profile, shape)
                other = self._others[shape, siblings] = CallPrices(shape, self.job_planner, self.lane, slow_pairs=pairs)
                if siblings:
                    other.use(self.job_planner, siblings)
            return other.predicted_us(collective, num_bytes, wires=wires, element_bytes=element_bytes)
        if self.planner is None or num_bytes == 0:
            return None if self.planner is None else 0.0
        try:
            decision = self.planner.decide(self.traffic(collective, num_bytes, False, wires, element_bytes))
        except PlanError:
            return None
        if not decision.plan.wire.is_native:
            return decision.predicted_us
        if collective == "all_to_all_v" and not self.two_level_may_pay:  # then it is not asked for, and stays flat
            flat = [t.total_us for t in decision.candidates if t.plan.strategy is Strategy.FLAT]
            return flat[0] if flat else decision.predicted_us
        return decision.predicted_us

    def _over_us(self, span: Span, num_bytes: int) -> float | None:
        if self.planner is None or self.job_planner is None or num_bytes == 0:
            return None if self.planner is None else 0.0
        try:  # by the shape's pairs, as with ``shape``: ranks of several groups compare the two
            pairs = pairs_on(self.job_planner.profile, self.shape)
            plan = exchange_over(span, self.shape, num_bytes, pairs)
            return price(plan, self.planner.profile).total_us
        except PlanError:
            return None

    def flat_plan(self, collective: str, num_bytes: int) -> Plan | None:
        """Return the backend's own call of ``collective``, in its name for it, as a plan that can be
        priced; None where it moves nothing between ranks, or no profile prices anything."""
        if self.planner is None or not num_bytes or self.size == 1:
            return None
        try:
            return build(self.traffic(_OF_PLANS.get(collective, collective), num_bytes), Strategy.FLAT)
        except PlanError:
            return None

    def why_flat(self, collective: str, num_bytes: int) -> str:
        """Say why a plain tensor's call of ``collective``, in the backend's name for it, goes to the
        backend's own, by the profile; "" where a plan is predicted to be better."""
        collective = _OF_PLANS.get(collective, collective)
        if collective not in _PLANNED or self.planner is None:
            return ""
        if collective == "all_to_all_v" and not self.two_level_may_pay:
            return f"two levels are predicted to be {_CLEAR_GAIN - 1:.0%} faster at no size, which agreeing on sizes asks for"
        try:
            decision = self.planner.decide(self.traffic(collective, num_bytes))
        except PlanError as error:
            return str(error).partition("; it has ")[0]
        return decision.reason() if decision.plan.strategy is Strategy.FLAT else ""

    @cached_property
    def two_level_may_pay(self) -> bool:
        """Whether a two-level all_to_all is predicted to win clearly at any size: the profile says
        it.

        Clearly, because its ranks then agree on a size with every call, which costs something where
        flat is chosen too.
        """
        size = _SMALLEST_BYTES * self.size
        while self.planner is not None and size <= _LARGEST_BYTES * self.size:
            with contextlib.suppress(PlanError):
                decision = self.planner.decide(self.traffic("all_to_all_v", size))
                flat = next(each for each in decision.candidates if each.plan.strategy is Strategy.FLAT)
                if flat.total_us / decision.predicted_us >= _CLEAR_GAIN:
                    return True
            size *= 4
        return False


class Choices:
    """Chooses the plans of one group's calls, by their ``prices``.

    ``shape``, ``job_planner``, ``lane``, ``rates``, ``slow_pairs``: see :class:`CallPrices`. Without
    a planner nothing is planned, unless ``settings.plan`` names one plan for all calls to which it
    applies, or ``settings.reduction`` asks for ordered sums.

    ``experience``: what calls and trials have shown of its prices. ``reasons`` counts by its text why
    a call was not planned. ``is_tried``: plans take turns, and the fastest is found out.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        job_planner: Planner | None,
        settings: Settings,
        lane: str = "",
        rates: tuple[float, ...] = (),
        slow_pairs: tuple[SlowPair, ...] = (),
    ) -> None:
        self.prices = CallPrices(shape, job_planner, lane, rates, slow_pairs)
        self.reasons: Counter[str] = Counter()
        self.is_tried = settings.plan == TRIED
        self._forced = parse_plan(settings.plan) if settings.plan and not self.is_tried else None
        self.is_forced = self._forced is not None
        """Whether one plan is named for all calls."""
        self._is_ordered = settings.reduction == "ordered"
        self._plans = Kept[tuple[object, ...], Plan | str](_MAX_KEPT)
        self.experience = Experience(LinkRates(1.0, self.prices.rates))
        self._given_rates = rates
        self._at_start: Choices | None = None
        self._warned: set[str] = set()
        self._settings = settings

    @property
    def agreed(self) -> Choices:
        """The choices by the profile that all ranks of the job agreed on: what predicts for
        decisions that others share."""
        return self._at_start or self

    def use_lane(self, lane: str) -> None:
        """Cut calls finely for ``lane``, one that others go before, or not ("")."""
        for choices in (self, self.agreed):
            choices.prices.use_lane(lane)

    def use_siblings(self, siblings: int) -> None:
        """Plan for so many groups of this shape that use a node at the same time. The same on all
        ranks, between the same calls.

        Raises UsageError for a negative number.
        """
        for choices in dict.fromkeys((self, self.agreed)):
            choices._plan_by(choices.prices.job_planner, siblings)

    def use_planner(self, job_planner: Planner) -> None:
        """Plan by this profile of the job from now on. The same on all ranks, between the same
        calls."""
        self._plan_by(job_planner, self.prices.siblings)

    def _plan_by(self, job_planner: Planner | None, siblings: int) -> None:
        self.prices.use(job_planner, siblings)
        self.experience.forget_prices()
        self._plans.clear()

    def at_other_rates(self, links: LinkRates) -> Choices:
        """Return the choices of the same group where links between nodes have other rates than the
        job's profile says.

        What trials taught is forgotten: it was learnt at the rates that were.
        """
        start = self.agreed.prices.job_planner
        assert start is not None
        job_planner = Planner(profile_at(start.profile, links.fabric), start.policy)
        new = self._anew(job_planner, links.nodes or (1.0,) * len(self.prices.shape))
        new.experience = self.experience.after(links)
        return new

    def doubted(self, budget_us: float) -> Choices:
        """Return the same choices by prices that calls have shown to be wrong: the fastest plan of
        every strategy is tried before the next call of its size, for so long in all, µs."""
        assert self.prices.job_planner is not None
        new = self._anew(self.prices.job_planner, self._given_rates)
        new.experience = self.experience.doubted(budget_us)
        return new

    def _anew(self, job_planner: Planner, rates: tuple[float, ...]) -> Choices:
        prices = self.prices
        new = Choices(prices.shape, job_planner, self._settings, prices.lane, rates, prices.slow_pairs)
        new.reasons, new._at_start = self.reasons, self.agreed
        new.prices.use(job_planner, prices.siblings)
        return new

    def settle(self, rounds: Sequence[Sequence[float]]) -> None:
        """Take what the plans of the pending trial took in each round, µs, equal on all ranks, and
        decide by it from now on."""
        self.experience.learn(rounds)
        self._plans.clear()

    @property
    def is_planning(self) -> bool:
        """Whether any call may get a plan."""
        return self.prices.size > 1 and (
            self.prices.planner is not None or self._forced is not None or self._is_ordered or self.is_tried
        )

    def plan(
        self,
        collective: str,
        num_bytes: int,
        *,
        is_float: bool = False,
        wires: tuple[Wire, ...] = (NATIVE,),
        element_bytes: int = 0,
        lane: str | None = None,
        is_in_turn: bool = False,
    ) -> Plan | None:
        """The plan for a call, or None: flat, which is the backend's own call.

        ``collective``: all_gather (``num_bytes`` is the gathered total), reduce_scatter (the whole
        input of a rank), all_reduce, broadcast (the tensor), all_to_all_v (an agreed bound).
        ``is_float``: whether the order of sums shows.
        ``wires``: forms that its elements, of ``element_bytes`` each, may go in; one that cannot be
        priced warns once.
        ``lane``: instead of the one that was told last. ``is_in_turn``: the call runs before any
        other is asked for, and ``experience.ran`` is told what it took, so that plans may take
        turns.
        """
        is_plain = wires == (NATIVE,)
        prices = self.prices
        is_unplanned = prices.planner is None and self._forced is None and not (self._is_ordered or self.is_tried)
        if prices.size == 1 or (is_plain and is_unplanned):
            return None
        is_ordered = self._is_ordered and is_float and collective in _SUMS
        lane = prices.lane if lane is None else lane
        # Hashing a wire is a call of Python, which a plain tensor's call need not pay.
        key = collective, num_bytes, is_ordered, lane, None if is_plain else (wires, element_bytes)
        choice = self._plans.get(key)
        if choice is None:
            traffic = prices.traffic(collective, num_bytes, is_ordered, wires, element_bytes, lane)
            choice = self._plans.add(key, self._decide(traffic))
        if self.is_tried and is_in_turn and not isinstance(choice, str):
            return self._in_turn(choice)
        if isinstance(choice, str):
            self.reasons[choice] += 1
            return None
        return None if choice.strategy is Strategy.FLAT else choice

    def _in_turn(self, plan: Plan) -> Plan:
        """The plan whose turn it is among those that contend for calls of about the size of those
        of ``plan``, the simplest."""
        connections = self._settings.connections
        contender = self.experience.contender(plan, None if connections is None else (connections,))
        if contender is None:
            return plan
        key = plan.traffic, plan.wire, contender
        choice = self._plans.get(key)
        if choice is None:
            choice = self._plans.add(key, contender.plan(plan.traffic, plan.wire))
        assert isinstance(choice, Plan)  # no reason why there is none is kept under such a key
        return choice

    def promised_us(self, plan: Plan) -> float | None:
        """Predict what the plan takes, µs, by the profile and by what trials have taught; None
        where no profile says it."""
        planner = self.prices.planner
        if planner is None:
            return None
        try:
            return price(plan, planner.profile).total_us * self.experience.factor(plan)
        except PlanError:
            return None

    def _decide(self, traffic: Traffic) -> Plan | str:
        """The plan, or why there is none."""
        if traffic.logical_bytes == 0:
            return "nothing to move"
        encoded = [wire for wire in traffic.wires if not wire.is_native]
        wire = NATIVE if NATIVE in traffic.wires else encoded[0]
        if traffic.is_ordered:
            return self._connected(build(traffic, Strategy.DIRECT, wire=wire))  # the only one that sums in rank order
        planner = self.prices.planner
        try:
            if self._forced is not None or self.is_tried:
                return self._connected(build(traffic, *(self._forced or (Strategy.DIRECT, 1)), wire=wire))
            if planner is None:
                return self._unplanned(traffic, wire, encoded)
            decision = planner.decide(traffic)
            if decision.unpriced:
                self._warn(decision.unpriced)
            if self._settings.trials != "off":
                is_wanted = self._settings.trials == "on"
                self.experience.find_trial(planner, traffic, is_wanted=is_wanted)
            return self._connected(self.experience.best(decision))
        except PlanError as error:
            if not wire.is_native:  # there is nothing else that may run
                return build(traffic, Strategy.DIRECT, wire=wire)
            return str(error).partition("; it has ")[0]  # of what the profile has, the list would be read at every exit

    def _connected(self, plan: Plan) -> Plan:
        """``plan`` over as many connections as the settings say."""
        connections = self._settings.connections or 1
        return plan if connections == 1 or plan.strategy is Strategy.FLAT else replace(plan, connections=connections)

    def _unplanned(self, traffic: Traffic, wire: Wire, encoded: list[Wire]) -> Plan | str:
        why = "there is no profile (COMMLAYER_PROFILE=none)"
        if not wire.is_native:
            return build(traffic, Strategy.DIRECT, wire=wire)
        if encoded:
            self._warn(f"{encoded[0]} is allowed, but {why} to say where it is faster")
        return why

    def _warn(self, why: str) -> None:
        if why not in self._warned:
            self._warned.add(why)
            warn(
                f"commlayer: {why}. Until then tensors go in their own format; a format with ! behind it is used always",
                stacklevel=2,
            )
