"""Replays of what groups were told of their calls, and what they decided: one case a name, its
answers as lines of text.

Each case draws its sequence from a seed: noise, a change of links, a busy processor, wrong prices.
The answers are kept in ``replays/experience.json``; ``python tests/auditing/experience_replays.py``
writes them anew.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from commlayer.agree.appointments import Appointment
from commlayer.auditing import watch as watching
from commlayer.auditing.ledger import Sample
from commlayer.engine.group_plans import Choices
from commlayer.profiles.catalog import load_profile
from commlayer.profiles.profile import Profile
from commlayer.scheduler.decision import Planner
from commlayer.scheduler.experience.link_rates import LinkTimes, card_gbps
from commlayer.scheduler.experience.start_check import why_stale
from commlayer.scheduler.plan import Plan, Strategy
from commlayer.scheduler.wire import NATIVE, Wire, WireFormat
from commlayer.settings import Settings

GOLDENS = Path(__file__).parent / "replays" / "experience.json"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def coarse(error: float) -> Profile:
    """A measured cluster of four nodes whose profile says that it knows its times no better than
    that."""
    profile = load_profile("emulated-2x4")
    curves = [msgspec.structs.replace(curve, holdout_error=error) for curve in profile.curves]
    return profile.replace(curves=curves)


def name_of(plan: Plan | None) -> str:
    return "flat" if plan is None else plan.name


def number(value: float | None) -> str:
    return "none" if value is None else f"{value:.9g}"


# Trials


def trials(seed: int) -> Iterator[str]:
    """A group's calls of many sizes, by choices whose trials take times that the profile does not
    know."""
    pick = random.Random(seed)
    profile = coarse(pick.choice((0.02, 0.1, 0.25, 0.6, 1.5)))
    settings = Settings(trials=pick.choice(("auto", "on")))
    choices = Choices(pick.choice(((2, 2), (4, 4), (3, 4), (1, 1))), Planner(profile), settings)
    if pick.random() < 0.3:
        choices = choices.doubted(pick.choice((3e5, 1e6, 3e6)))
    wrong = {strategy: pick.uniform(0.4, 3.0) for strategy in Strategy}
    for _ in range(25):
        collective, size = pick.choice(COLLECTIVES), 1 << pick.randrange(10, 26)
        size -= pick.choice((0, 0, size // 4))
        if pick.random() < 0.05:
            choices.use_siblings(pick.randrange(1, 4))
            yield "other siblings"
        plan = choices.plan(collective, size, is_float=True, is_in_turn=True)
        yield f"{collective} {size}: {name_of(plan)}"
        if (trial := choices.experience.pending) is not None:
            plans = " ".join(each.name for each in trial.plans)
            yield f"  try {plans}, {trial.runs} times, {number(trial.longest_us)} µs, also at {trial.holds_at}"
            rounds = [
                [
                    timeline.total_us * wrong[timeline.plan.strategy] * pick.lognormvariate(0.0, 0.2)
                    for timeline in trial.contenders
                ]
                for _ in range(pick.randrange(1, trial.runs + 1))
            ]
            choices.settle(rounds)
            plan = choices.plan(collective, size, is_float=True)
            yield f"  then {name_of(plan)}, spent {number(choices.experience.spent_us)}"
        priced = plan or choices.prices.flat_plan(collective, size)
        promised_us = None if priced is None else choices.promised_us(priced)
        yield f"  promised {number(promised_us)}"


# Plans that take turns


def contests(seed: int) -> Iterator[str]:
    """A group's first calls where plans take turns, with other ranks that are slower now and
    then."""
    pick = random.Random(seed)
    settings = Settings(plan="tried", connections=pick.choice((None, None, 3)))
    choices = Choices(pick.choice(((1, 1), (2, 2), (1, 1, 1), (4,), (3, 4))), None, settings)
    wires = pick.choice(((NATIVE,), (NATIVE, Wire(WireFormat.INT8, 128))))
    wrong = {(strategy, count): pick.uniform(1.0, 2.5) for strategy in Strategy for count in (1, 2, 3, 4, 8)}
    for call in range(80):
        collective, size = pick.choice(COLLECTIVES[:2]), (1 << pick.randrange(19, 23)) * 3
        ask = partial(
            choices.plan,
            collective,
            size,
            is_float=True,
            wires=wires,
            element_bytes=4,
            is_in_turn=pick.random() < 0.9,
        )
        plan = ask()
        if call == 30 and pick.random() < 0.5:
            yield f"left out: {choices.experience.leave_out_connections(pick.choice((2, 4, 8)))}"
            plan = ask()
        yield f"{collective} {size}: {name_of(plan)} {choices.experience.is_contested}"
        if plan is not None and choices.experience.is_contested:
            taken_us = size / 1e3 * wrong[plan.strategy, plan.connections] * pick.lognormvariate(0.0, 0.05)
            agree = partial(_with_slower, [pick.uniform(0.9, 1.2) for _ in range(32)])
            choices.experience.ran(plan, taken_us, agree)


def _with_slower(by: list[float], times: list[float]) -> list[float]:
    """The times of this rank and another one, which takes so many times as long: the larger
    ones."""
    return [max(time_us, time_us * factor) for time_us, factor in zip(times, by, strict=False)]


# A job whose links change, on the first rank of a group


@dataclass
class Job:
    """The world of one replay: how fast links are, what delays calls beside them, and what was said
    of all that."""

    pick: random.Random
    said: list[str] = field(default_factory=list)
    fabric: float = 1.0
    nodes: tuple[float, ...] = (1.0, 1.0)
    busy: float = 1.0
    """The factor by which calls take longer because of busy processors, which messages of
    measurements wait for too."""
    prices: float = 1.0
    scatter: float = 0.05
    samples: list[Sample] = field(default_factory=list)
    calls: int = 0
    generation: int = 0
    planned_for: float = 1.0
    """The rate of links between nodes by which plans are priced."""

    def make_calls(self, count: int) -> None:
        for _ in range(count):
            self.calls += 1
            kind = self.pick.randrange(6)
            promised_us = 4000.0 * (kind + 1) / self.planned_for
            slower = self.busy * self.prices * self.planned_for / self.fabric / min(self.nodes)
            taken_us = promised_us * slower * self.pick.lognormvariate(0.0, self.scatter)
            self.samples.append(Sample(self.calls, 10 * self.generation + kind, promised_us, taken_us))
        del self.samples[:-32]

    def times_of_links(self, planned: Any, num_bytes: int) -> LinkTimes:
        usual_us = num_bytes / (card_gbps(planned.choices.agreed.prices.job_planner.profile) * 1e3) / self.fabric
        taken, certain = {}, {}
        count = len(self.nodes)
        for pair in [(a, b) for a in range(count) for b in range(a + 1, count)]:
            us = usual_us / min(self.nodes[node] for node in pair) * self.pick.uniform(1.0, 1.15)
            taken[pair], certain[pair] = us * self.busy, us
        return LinkTimes(taken, certain)


class OwnLedger:
    """The part of a ledger that a watch reads and writes."""

    def __init__(self, job: Job) -> None:
        self.job, self.heard, self.told_from = job, None, 0

    @property
    def samples(self) -> list[Sample]:
        return list(self.job.samples)

    @property
    def numbered(self) -> int:
        return self.job.calls

    def came_last(self, rank: int, waited_us: float) -> None:
        pass

    def use_choices(self, choices: Choices) -> None:
        self.job.generation += 1
        planner = choices.prices.planner
        assert planner is not None
        self.job.planned_for = planner.profile.peaks.inter_gbps / coarse(0.1).peaks.inter_gbps
        plan = choices.plan("all_reduce", 1 << 20, is_float=True)
        trial = choices.experience.pending
        tried = " ".join(each.name for each in trial.plans) if trial is not None else "nothing"
        self.job.said.append(
            f"plans by {planner.profile.name}, rates {choices.prices.rates}: {name_of(plan)}, trying {tried}"
        )

    def happened(self, call: int, what: str) -> None:
        self.job.said.append(f"before call {call}: {what}")


class OwnAppointments:
    """Appointments of a group that is one rank: made, and kept or missed as the replay says."""

    def __init__(self, job: Job) -> None:
        self.job, self.number = job, 0
        self.due: Appointment | None = None

    @property
    def calls(self) -> int:
        return self.job.calls

    @property
    def is_open(self) -> bool:
        return self.due is not None

    def make(self, purpose: str, value: float, ahead: int, patience_s: float) -> None:
        self.number += 1
        self.due = Appointment(self.number, self.calls + ahead, purpose, value)
        self.job.said.append(
            f"call {self.calls}: {purpose} {number(value)} in {ahead} calls, waiting {number(patience_s)} s"
        )

    def turn(self) -> None:
        pass

    def pass_by(self) -> bool:
        return False

    def next_call(self) -> Appointment | None:
        return self.due

    def end(self) -> None:
        self.due = None


class NoThread(list[Any]):
    """The watches of a process that has no thread which wakes for them."""

    add, discard = list.append, list.remove

    def wake(self) -> None:
        pass


@contextmanager
def alone() -> Iterator[None]:
    """No thread of a watch."""
    before = watching._watching
    watching._watching = NoThread()  # type: ignore[assignment]
    yield
    watching._watching = before


def jobs(seed: int, kind: str) -> Iterator[str]:
    """A job of some minutes, by the clock of the replay: which appointments its first rank makes,
    and what comes of them."""
    pick = random.Random(f"{seed} {kind}")
    shape = (2, 2, 2) if kind == "card" else (4, 4)
    profile = coarse(0.1)
    if kind == "card":
        profile = profile.replace(topology="3x4")
    job = Job(pick, nodes=(1.0,) * len(shape), scatter=0.3 if kind == "noise" else 0.05)
    settings = Settings(replan="audit" if kind == "audit" else "on", trials="off" if seed % 3 == 2 else "auto")
    choices = Choices(shape, Planner(profile), settings)
    places = [tuple(range(sum(shape[:node]), sum(shape[: node + 1]))) for node in range(len(shape))]
    detector = SimpleNamespace(ranks=range(sum(shape)), left=(), gone=())
    planned: Any = SimpleNamespace(
        choices=choices, global_ranks=list(range(sum(shape))), rank=0, settings=settings, nodes=tuple(places),
        name="0", timeout_s=30.0, board=SimpleNamespace(detector=detector, is_broken=False),
    )  # fmt: skip

    def plan_anew(choices: Choices) -> None:
        planned.choices = choices

    with alone():
        yield from replayed(job, kind, planned, plan_anew)


def replayed(job: Job, kind: str, planned: Any, plan_anew: Callable[[Choices], None]) -> Iterator[str]:
    """Run the job of a replay, and yield what is said in it."""
    pick, ledger = job.pick, OwnLedger(job)
    watch: Any = watching.GroupWatch(planned, ledger, None, plan_anew, partial(job.times_of_links, planned))  # type: ignore[arg-type]
    watch._store = SimpleNamespace(check=lambda keys: True, multi_get=lambda keys: [])
    appointments, lead = OwnAppointments(job), watch.lead
    watch.appointments = lead.appointments = appointments
    watch.times._others = []
    lead._pace.clear()
    lead._pace.append((0, 0.0))
    now_s = 0.0
    for step in range(400):
        change(job, kind, step)
        job.make_calls(pick.randrange(1, 6))
        now_s += 0.25 + 0.5 * (pick.random() < 0.1)
        if appointments.is_open and pick.random() < 0.8:
            if pick.random() < 0.1:
                appointments.due = None
                job.said.append("called off")
            else:
                watch.began(None)
        lead.turn(now_s, 0.25, 0.0)
        for text in job.said:
            yield f"{number(now_s)} s: {text}"
        job.said.clear()
    watch.ending()


def change(job: Job, kind: str, step: int) -> None:
    """Change the links, or what else delays calls, at this step of the replay."""
    pick = job.pick
    if kind == "fabric" and step in (60, 200):
        job.fabric = pick.choice((0.15, 0.3, 0.5)) if step == 60 else 1.0
    elif kind == "faster" and step == 80:
        job.fabric = pick.choice((3.0, 8.0))
    elif kind == "card" and step in (50, 250):
        job.nodes = (1.0, pick.choice((0.25, 0.5)), 1.0) if step == 50 else (1.0,) * 3
    elif kind in ("busy", "audit") and step in (40, 160, 300):
        job.busy = 1.0 if job.busy != 1.0 else pick.uniform(1.5, 5.0)
    elif kind == "hiccups":
        job.busy = 5.0 if step % 40 < 3 else 1.0
    elif kind == "prices" and step == 0:
        job.prices = pick.choice((0.3, 2.0, 4.0))
    elif kind == "prices" and step == 250:
        job.fabric = 0.3
    elif kind == "busy while links change" and step in (60, 120, 240):
        job.busy, job.fabric = {60: (4.0, 0.25), 120: (1.0, 0.25), 240: (1.0, 1.0)}[step]


# The check of a profile when a job starts


class Timed:
    """Ranks whose all_reduces take such times."""

    size = 8

    def __init__(self, pick: random.Random, profile: Profile, factor: float, scatter: float) -> None:
        self._pick, self._factor, self._scatter = pick, factor, scatter
        self._curve = next(c for c in profile.curves if c.collective == "all_reduce" and c.group_size == self.size)
        self.asked: list[int] = []

    def time_all_reduce(self, num_bytes: int) -> float:
        self.asked.append(num_bytes)
        return self._curve.at(num_bytes) * self._factor * self._pick.lognormvariate(0.0, self._scatter)


def checks(seed: int) -> Iterator[str]:
    pick = random.Random(seed)
    profile = load_profile("emulated-2x4")
    for _ in range(40):
        factor, scatter = pick.choice((0.2, 0.4, 0.55, 0.7, 1.0, 1.4, 1.8, 2.2, 3.0, 9.0)), pick.choice((0.0, 0.1, 0.6))
        ranks = Timed(pick, profile, factor, scatter)
        yield f"{factor} {scatter}: {why_stale(profile, ranks.size, ranks.time_all_reduce) or 'it holds'}, asked {ranks.asked}"


KINDS = ("quiet", "noise", "fabric", "faster", "card", "busy", "hiccups", "prices", "busy while links change", "audit")


@dataclass(frozen=True)
class Replay:
    name: str
    answers: Callable[[], list[str]]


def replays() -> list[Replay]:
    made = [Replay(f"trials {seed}", lambda seed=seed: list(trials(seed))) for seed in range(24)]  # type: ignore[misc]
    made += [Replay(f"contests {seed}", lambda seed=seed: list(contests(seed))) for seed in range(16)]  # type: ignore[misc]
    made += [
        Replay(f"{kind} {seed}", lambda seed=seed, kind=kind: list(jobs(seed, kind)))  # type: ignore[misc]
        for kind in KINDS
        for seed in range(6)
    ]
    made += [Replay(f"checks {seed}", lambda seed=seed: list(checks(seed))) for seed in range(3)]  # type: ignore[misc]
    return made


if __name__ == "__main__":
    GOLDENS.write_text(
        json.dumps({each.name: each.answers() for each in replays()}, indent=1, ensure_ascii=False) + "\n",
        encoding="utf-8",
    )
