"""The work of all ranks of a group at an appointment: they time their links, and plan by what these
can do now."""

from __future__ import annotations

from collections.abc import Callable

from commlayer.auditing.audited_plans import AuditedChoices, AuditedPlans
from commlayer.profiles.errors import InternalError
from commlayer.profiles.pairs import pair_rounds
from commlayer.profiles.topology import Topology
from commlayer.scheduler.experience.experience import CONFIRM, MEASURE, TRY, LinksSeen
from commlayer.scheduler.experience.link_rates import LinkTimes, card_gbps
from commlayer.scheduler.group_profiles import most_siblings

__all__ = ["LinkChecks"]

_MEASURED_US, _LEAST_BYTES, _MOST_BYTES = 2e4, 64 << 10, 8 << 20
"""How long a message between two nodes takes that is measured, if the profile is right; and how
large it is."""
_MOST_LOOKS = 6
"""How often such a message usually goes between two nodes."""


class LinkChecks:
    """The work of one group's ranks; where its calls run, between two of them.

    Attributes:
        measured_bytes: the size of a message between two nodes that is measured.
        measuring_us: how long measuring usually takes.
        seen: the links as they were seen at the last appointment; None: it is not kept yet, or has
            been settled.
        are_plans_tried: whether plans are tried since that appointment.
    """

    def __init__(
        self,
        planned: AuditedPlans,
        time_links: Callable[[int], LinkTimes],
        use_choices: Callable[[AuditedChoices], None],
    ) -> None:
        assert planned.choices.prices.job_planner is not None
        self._profile = planned.choices.prices.job_planner.profile
        self._planned, self._time_links, self._use_choices = planned, time_links, use_choices
        num_bytes = card_gbps(self._profile) * 1e3 * _MEASURED_US
        self.measured_bytes = round(min(max(num_bytes, _LEAST_BYTES), _MOST_BYTES))
        self.measuring_us = _MOST_LOOKS * len(pair_rounds(len(planned.nodes), 3)) * _MEASURED_US
        self.seen: LinksSeen | None = None
        self.are_plans_tried = False

    def keep(self, purpose: str, value: float) -> None:
        """Do what an appointment was made for: measure, measure again to confirm what was seen, or
        try the plans of calls to come, for ``value`` µs."""
        if purpose == TRY:
            # Whatever they are priced at; unless links have changed since they were measured, which
            # trials would take for wrong prices.
            self.measure(1.0)
            choices = self._planned.choices
            if self.seen is not None and not self.seen.has_changed and choices.experience.suspected is None:
                self.are_plans_tried = True
                self._use_choices(choices.doubted(value))
        elif purpose in (MEASURE, CONFIRM):
            self.measure(value, is_second=purpose == CONFIRM)
        else:
            raise InternalError(f"nobody knows what an appointment to {purpose!r} is for")

    def measure(self, slowdown: float, *, is_second: bool = False) -> None:
        """Time the links, with all ranks, and plan by what they can do now. ``is_second``: to
        confirm what was seen."""
        choices = self._planned.choices
        cluster = tuple(map(len, Topology.parse(self._profile.topology).nodes))
        seen = choices.experience.look_at_links(
            self._look,
            expected_us=self.measured_bytes / (card_gbps(self._profile) * 1e3),
            siblings=choices.prices.siblings or most_siblings(cluster, choices.prices.shape),
            slowdown=slowdown,
            is_second=is_second,
        )
        if seen.has_changed:
            self._use_choices(choices.at_other_rates(seen.rates))
        self.seen = seen

    def _look(self, larger: float) -> LinkTimes:
        """Time links by a message that is so many times larger, and say what the usual one would
        have taken."""
        num_bytes = min(round(self.measured_bytes * larger), _MOST_BYTES)
        return self._time_links(num_bytes).over(num_bytes / self.measured_bytes)
