"""Appointments: all members keep one at the same call, or none does, whatever is slow, stopped or dead."""

from __future__ import annotations

import random
import threading

import pytest

from commlayer.agree import appointments
from commlayer.agree.appointments import Appointment, Appointments
from commlayer.profiles.errors import InternalError


class Gone(Exception):
    """The error of a member that has waited for too long."""


class FakeStore:
    """A store of one process. ``lose`` makes every request from then on fail."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.is_lost = False

    def _ask(self) -> None:
        if self.is_lost:
            raise RuntimeError("connection reset by peer")

    def set(self, key: str, value: str | bytes) -> None:
        with self.lock:
            self._ask()
            self.values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        with self.lock:
            self._ask()
            return self.values[key]

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            self._ask()
            value = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(value).encode()
            return value

    def check(self, keys: list[str]) -> bool:
        with self.lock:
            self._ask()
            return all(key in self.values for key in keys)


def refuse(waited_s: float) -> None:
    if waited_s > 2.0:
        raise Gone


def members(size: int, store: FakeStore | None = None) -> list[Appointments]:
    store = store or FakeStore()
    return [Appointments(lambda: store, member, size, refuse) for member in range(size)]


def turn_all(everyone: list[Appointments]) -> None:
    for member in everyone[1:]:
        member.turn()
    everyone[0].turn()
    for member in everyone[1:]:
        member.turn()


def kept_by(member: Appointments, calls: int) -> list[tuple[int, Appointment]]:
    """The appointments that a member keeps in its next calls, and at which."""
    found = []
    for _ in range(calls):
        appointment = member.next_call()
        if appointment is not None:
            found.append((member.calls, appointment))
            assert member.is_open
            member.end()
    return found


@pytest.mark.parametrize("size", [2, 3, 8])
def test_all_keep_an_appointment_at_its_call(size: int) -> None:
    everyone = members(size)
    for member in everyone:
        kept_by(member, 5)
    made = everyone[0].make("switch", 0.5, 3)
    turn_all(everyone)
    assert made.call == 8
    assert [kept_by(member, 10) for member in everyone] == [[(8, made)]] * size


def test_a_member_that_has_passed_the_call_has_it_called_off() -> None:
    everyone = members(3)
    made = everyone[0].make("switch", 0.0, 2)
    kept_by(everyone[2], made.call)  # it never looked
    turn_all(everyone)
    assert [kept_by(member, 10) for member in everyone] == [[], [], []]
    assert not any(member.is_open for member in everyone)


def test_a_member_that_does_not_answer_has_it_called_off() -> None:
    everyone = members(3)
    everyone[0].make("switch", 0.0, 2, patience_s=-1.0)
    everyone[1].turn()
    everyone[0].turn()
    everyone[2].turn()  # too late: it answers, and nobody counts any more
    turn_all(everyone)
    assert [kept_by(member, 10) for member in everyone] == [[], [], []]


def test_appointments_follow_each_other() -> None:
    everyone = members(2)
    calls = []
    for number in range(5):
        made = everyone[0].make("switch", float(number), 3)
        turn_all(everyone)
        calls.append([kept_by(member, 4) for member in everyone])
        assert calls[-1] == [[(made.call, made)]] * 2


def test_a_member_whose_call_comes_first_waits_for_the_decision() -> None:
    leader, member = members(2)
    made = leader.make("switch", 0.0, 1)
    member.turn()
    found: list[Appointment | None] = []
    thread = threading.Thread(target=lambda: found.append(member.next_call()))
    thread.start()
    leader.turn()
    member.turn()
    thread.join(10)
    assert found == [made]
    assert leader.next_call() == made


def test_a_second_appointment_beside_an_open_one_is_refused() -> None:
    leader, _ = members(2)
    leader.make("switch", 0.0, 5)
    with pytest.raises(InternalError, match="still open"):
        leader.make("switch", 0.0, 5)


def test_a_wait_for_a_decision_that_never_comes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appointments, "time", Clock())
    leader, member = members(2)
    leader.make("switch", 0.0, 1)
    member.turn()
    with pytest.raises(Gone):
        member.next_call()


def test_a_lost_store_ends_a_wait_and_says_so() -> None:
    store = FakeStore()
    leader, member = members(2, store)
    leader.make("switch", 0.0, 1)
    member.turn()
    store.is_lost = True
    with pytest.raises(RuntimeError, match="connection reset"):
        member.turn()
    for each in (leader, member):
        each.lost = RuntimeError("connection reset by peer")
        with pytest.raises(RuntimeError, match="does not answer any more"):
            each.next_call()


class Clock:
    """Time as the module under test sees it: it goes on only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Job:
    """Members of which each makes calls and talks to the store, one step at a time, in an order that the seed decides.

    ``fate`` befalls one of them, or the store, at a moment that the seed decides: it dies, it is stopped for good, or the store
    is lost.
    """

    CALLS = 40

    def __init__(self, seed: int, fate: str, clock: Clock) -> None:
        self.rng, self.clock, self.fate, self.store = random.Random(seed), clock, fate, FakeStore()
        size = self.rng.choice([2, 3, 5])
        self.everyone = [
            Appointments(lambda: self.store, member, size, self.let_others_go_on) for member in range(size)
        ]
        self.kept: list[dict[int, int]] = [{} for _ in range(size)]
        self.calls = [0] * size  # that were made, and went on
        self.ended: set[int] = set()
        self.victim, self.moment, self.steps = self.rng.randrange(size), self.rng.randrange(150), 0

    def run(self) -> None:
        while len(self.ended) < len(self.everyone):
            self.step()

    def step(self) -> None:
        self.befall()
        member = self.rng.randrange(len(self.everyone))
        if self.rng.random() < 0.6:
            self.talk(member)
        elif member not in self.ended:
            self.call(member)

    def befall(self) -> None:
        self.steps += 1
        if self.steps == self.moment and self.fate == "the store is lost":
            self.store.is_lost = True
        elif self.steps == self.moment and self.fate:
            self.ended.add(self.victim)

    def is_silent(self, member: int) -> bool:
        return member == self.victim and self.steps >= self.moment and self.fate in ("one dies", "one is stopped")

    def talk(self, member: int) -> None:
        if self.is_silent(member):
            return
        each = self.everyone[member]
        try:
            if member == 0 and not each.is_open and self.rng.random() < 0.5:
                each.make("switch", 0.0, self.rng.randrange(1, 12))
            each.turn()
        except RuntimeError as error:
            each.lost = error

    def call(self, member: int) -> None:
        each = self.everyone[member]
        try:
            appointment = each.next_call()
        except (Gone, RuntimeError):
            self.ended.add(member)
            return
        self.calls[member] += 1
        if appointment is not None:
            each.end()
            self.kept[member][self.calls[member]] = appointment.number
        if self.calls[member] == self.CALLS:
            self.ended.add(member)

    def let_others_go_on(self, waited_s: float) -> None:
        """The events while a member waits for a decision: the others' threads talk."""
        if waited_s > 8.0:  # more than the leader's patience
            raise Gone
        for _ in range(3):
            self.befall()
            self.talk(self.rng.randrange(len(self.everyone)))


@pytest.mark.parametrize("fate", ["", "one dies", "one is stopped", "the store is lost"])
def test_nobody_keeps_what_another_does_not(fate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each call all who come to it keep the same appointment, or none, in hundreds of orders of what members do."""
    num_kept = 0
    for seed in range(300):
        clock = Clock()
        monkeypatch.setattr(appointments, "time", clock)
        monkeypatch.setattr(appointments, "_POLL_S", 0.1)
        job = Job(seed, fate, clock)
        job.run()
        for number in range(1, Job.CALLS + 1):
            kept = {mine.get(number) for mine, calls in zip(job.kept, job.calls, strict=True) if calls >= number}
            assert len(kept) <= 1, f"seed {seed}, call {number}: {kept}"
        if not fate:
            assert set(job.calls) == {Job.CALLS}, f"seed {seed}"
        num_kept += len(job.kept[0])
    assert num_kept > 300, "hardly an appointment was kept: the test shows nothing"


def test_calls_that_pass_by_come_to_the_same_appointment() -> None:
    everyone = members(3)
    everyone[0].make("measure", 1.0, 5)
    turn_all(everyone)
    for place, member in enumerate(everyone):
        found = []
        for call in range(8):
            if call % 3 == place and member.pass_by():
                continue
            appointment = member.next_call()
            if appointment is not None:
                found.append(member.calls)
                member.end()
        assert (found, member.calls) == ([5], 8)
