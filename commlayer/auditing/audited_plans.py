"""The interface to who plans and runs a group's calls, as far as audits use it: those who listen to
calls import no engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from commlayer.failures.board import FailureBoard
from commlayer.scheduler.decision import Planner
from commlayer.scheduler.experience.experience import Experience
from commlayer.scheduler.experience.link_rates import LinkRates
from commlayer.scheduler.plan import Plan
from commlayer.settings import Settings

__all__ = ["AuditedChoices", "AuditedPlans", "AuditedPrices"]


class AuditedPrices(Protocol):
    """Predicts what a group's calls take; :class:`commlayer.engine.group_plans.CallPrices` describes
    each of these."""

    shape: tuple[int, ...]
    rates: tuple[float, ...]
    siblings: int
    planner: Planner | None
    job_planner: Planner | None

    def flat_plan(self, collective: str, num_bytes: int) -> Plan | None: ...
    def why_flat(self, collective: str, num_bytes: int) -> str: ...


class AuditedChoices(Protocol):
    """Chooses the plans of a group's calls; :class:`commlayer.engine.group_plans.Choices` describes
    each of these."""

    experience: Experience

    @property
    def prices(self) -> AuditedPrices: ...
    @property
    def is_forced(self) -> bool: ...
    def promised_us(self, plan: Plan) -> float | None: ...
    def at_other_rates(self, links: LinkRates) -> AuditedChoices: ...
    def doubted(self, budget_us: float) -> AuditedChoices: ...


class AuditedPlans(Protocol):
    """Runs the plans of a group's calls, on the CPU or on a device; see
    :class:`commlayer.engine.planned.PlannedGroup`."""

    rank: int
    held_s: float

    @property
    def choices(self) -> AuditedChoices: ...
    @property
    def name(self) -> str: ...
    @property
    def nodes(self) -> Sequence[Sequence[int]]: ...
    @property
    def global_ranks(self) -> Sequence[int]: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def board(self) -> FailureBoard: ...
    @property
    def timeout_s(self) -> float: ...
    def explain(
        self, error: RuntimeError, collective: str, sequence: int, waited_s: float, timeout_s: float
    ) -> Exception: ...
