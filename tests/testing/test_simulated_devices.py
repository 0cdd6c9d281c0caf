"""Simulated devices: the order of streams, memory that is handed on, communicators, deadlocks in words, and both judges."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from simulated.communicators import SimulatedCommunicator, SimulatedMessenger
from simulated.judge import RaceJudge
from simulated.machine import Deadlock, SimulatedDevice, SimulatedMachine, SimulatedProgram
from simulated.simulated_memory import SPOILT

from commlayer.devices.device_contract import Addressed
from commlayer.profiles.errors import UsageError

SEEDS = range(60)


def machine_of(size: int, seed: int = 0, **how: object) -> SimulatedMachine:
    return SimulatedMachine(size, seed, **how)  # type: ignore[arg-type]


def test_a_stream_runs_in_order_and_two_streams_in_any() -> None:
    orders = set()
    for seed in SEEDS:
        machine = machine_of(1, seed)
        device, ran = machine.devices[0], list[str]()
        other = device.stream(is_high=True)
        for name in "ab":
            device.main.launch(partial(ran.append, name))
            other.launch(partial(ran.append, name.upper()))
        device.synchronize()
        assert [name for name in ran if name.islower()] == ["a", "b"]
        assert [name for name in ran if name.isupper()] == ["A", "B"]
        orders.add("".join(ran))
    assert orders == {"abAB", "aAbB", "aABb", "AabB", "AaBb", "ABab"}, "all six come, each with some seed"


def test_a_seed_gives_the_same_order_again() -> None:
    def order(seed: int) -> list[int]:
        machine = machine_of(1, seed)
        ran = list[int]()
        streams = [machine.devices[0].stream(is_high=False) for _ in range(5)]
        for number in range(50):
            streams[number % 5].launch(partial(ran.append, number))
        machine.devices[0].synchronize()
        return ran

    assert order(7) == order(7)
    assert order(7) != order(8)


def test_a_stream_that_waits_runs_after_the_event() -> None:
    for seed in SEEDS:
        device, ran = machine_of(1, seed).devices[0], list[str]()
        other = device.stream(is_high=False)
        device.main.launch(partial(ran.append, "first"))
        event = device.main.record()
        other.wait(event)
        other.launch(partial(ran.append, "second"))
        device.main.launch(partial(ran.append, "beside"))
        event.synchronize()
        assert event.is_done()
        assert "first" in ran
        device.synchronize()
        assert ran.index("first") < ran.index("second")


def test_the_current_stream_is_that_of_the_innermost_block() -> None:
    device = machine_of(1).devices[0]
    inner = device.stream(is_high=True)
    assert device.current is device.main
    with device.on(inner):
        assert device.current is inner
        with device.on(device.main):
            assert device.current is device.main
    assert device.current is device.main


# Memory


def test_memory_goes_to_the_next_allocation_of_its_stream_at_once_and_is_spoilt() -> None:
    device = machine_of(1, eagerness=0.0).devices[0]
    x = device.empty(700)
    assert x.numel() == 700
    assert x.eq(SPOILT).all(), "nobody has written it"
    x.fill_(1)
    place = x.data_ptr()
    view = x[10:20]
    del x
    assert device.empty(700).data_ptr() != place, "a view holds it"
    del view
    y = device.empty(600)
    assert y.data_ptr() == place, "of the same size, rounded up to 512 bytes"
    assert device.memory.handed_on == 1
    device.synchronize()
    assert y.eq(SPOILT).all()


def test_memory_of_another_stream_is_not_handed_on() -> None:
    device = machine_of(1).devices[0]
    x = device.empty(100)
    place = x.data_ptr()
    del x
    with device.on(device.stream(is_high=False)):
        assert device.empty(100).data_ptr() != place


def test_memory_that_a_stream_keeps_is_handed_on_when_the_stream_has_run() -> None:
    device = machine_of(1, eagerness=0.0).devices[0]
    other = device.stream(is_high=False)
    x = device.empty(100)
    place = x.data_ptr()
    other.launch(partial(x.add_, 1))
    other.keep(x)
    del x
    y = device.empty(100)
    assert y.data_ptr() != place
    device.synchronize()
    assert device.empty(100).data_ptr() == place


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_missing_keep_is_a_wrong_result(is_kept: bool) -> None:
    wrong = 0
    for seed in SEEDS:
        device = machine_of(1, seed).devices[0]
        other, result = device.stream(is_high=False), torch.zeros(64, dtype=torch.uint8)
        x = device.empty(64)
        device.main.launch(partial(x.fill_, 7))
        other.wait(device.main.record())
        other.launch(partial(result.copy_, x))
        if is_kept:
            other.keep(x)
        del x
        device.empty(64)
        device.synchronize()
        wrong += not result.eq(7).all()
    assert wrong == 0 if is_kept else wrong > 5


# Communicators


def ring(
    machine: SimulatedMachine, messenger: SimulatedMessenger, rank: int, results: list[torch.Tensor]
) -> SimulatedProgram:
    """Each rank sends what it holds to the next one, three times."""
    device, size = machine.devices[rank], len(machine.devices)
    x = device.empty(32)
    device.main.launch(partial(x.fill_, rank))
    for _ in range(3):
        y = device.empty(32)
        messenger.exchange([((rank + 1) % size, x)], [((rank - 1) % size, y)]).wait()
        x = y
        yield None
    device.main.launch(partial(results[rank].copy_, x))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_exchanges_meet_in_the_order_of_the_communicator(size: int) -> None:
    for seed in SEEDS:
        machine = machine_of(size, seed)
        communicator = SimulatedCommunicator(machine, "ring", range(size))
        results = [torch.zeros(32, dtype=torch.uint8) for _ in range(size)]
        machine.run([ring(machine, communicator.messenger(rank), rank, results) for rank in range(size)])
        assert [int(result[0]) for result in results] == [(rank - 3) % size for rank in range(size)]


def test_an_all_gather_is_in_the_order_of_ranks_in_place_or_not() -> None:
    for seed in SEEDS:
        machine = machine_of(3, seed)
        communicator = SimulatedCommunicator(machine, "all", range(3))

        def gather(rank: int, machine: SimulatedMachine, messenger: SimulatedMessenger) -> SimulatedProgram:
            device = machine.devices[rank]
            whole, own = device.empty(12), device.empty(4)
            mine = whole[4 * rank : 4 * rank + 4] if rank else own
            device.main.launch(partial(mine.fill_, rank))
            messenger.all_gather(whole, mine).wait()
            result = torch.zeros(12, dtype=torch.uint8)
            device.main.launch(partial(result.copy_, whole))
            yield device.main.record()
            return result.tolist()

        messengers = [communicator.messenger(rank) for rank in range(3)]
        programs = [gather(rank, machine, messengers[rank]) for rank in range(3)]
        assert machine.run(programs) == [[0] * 4 + [1] * 4 + [2] * 4] * 3


def sends(device: SimulatedDevice, messenger: SimulatedMessenger, rank: int, size: int) -> None:
    mine: list[Addressed] = [(1 - rank, device.empty(size))]
    messenger.exchange(mine, [(1 - rank, device.empty(16))])


def test_messages_of_different_sizes_are_refused_with_both_ends() -> None:
    machine = machine_of(2)
    communicator = SimulatedCommunicator(machine, "pair", range(2))

    def program(rank: int) -> SimulatedProgram:
        sends(machine.devices[rank], communicator.messenger(rank), rank, 16 + 16 * rank)
        yield None

    with pytest.raises(UsageError, match="pair: rank 1 sends 32 bytes in its exchange 1, and rank 0 receives 16"):
        machine.run([program(0), program(1)])


def crosswise(machine: SimulatedMachine, rank: int, *, on_two_streams: bool) -> SimulatedProgram:
    """Two communicators, of which rank 0 uses a before b, and rank 1 b before a."""
    device = machine.devices[rank]
    ends = [communicator.messenger(rank) for communicator in machine.communicators]
    for end in ends if rank == 0 else ends[::-1]:
        with device.on(device.stream(is_high=False) if on_two_streams else device.main):
            x, y = device.empty(16), device.empty(16)
            end.exchange([(1 - rank, x)], [(1 - rank, y)]).wait()
        yield None


def cross(seed: int, *, on_two_streams: bool, slots: int | None) -> None:
    machine = machine_of(2, seed, slots=slots)
    for name in "ab":
        SimulatedCommunicator(machine, name, range(2))
    machine.run([crosswise(machine, rank, on_two_streams=on_two_streams) for rank in range(2)])


def test_communicators_in_different_order_on_one_stream_are_a_deadlock_in_words() -> None:
    for seed in SEEDS:
        with pytest.raises(Deadlock) as caught:
            cross(seed, on_two_streams=False, slots=None)
        text = str(caught.value)
        assert "rank 0's stream of communicator a (1) waits for ranks 1 in exchange 1 of communicator a" in text, text
        assert "rank 1's stream of communicator b (2) waits for ranks 0 in exchange 1 of communicator b" in text, text


def test_on_two_streams_it_is_one_only_where_the_device_has_no_room_for_both() -> None:
    found = list[str]()
    for seed in SEEDS:
        cross(seed, on_two_streams=True, slots=None)
        cross(seed, on_two_streams=True, slots=2)
        try:
            cross(seed, on_two_streams=True, slots=1)
        except Deadlock as error:
            found.append(str(error))
    assert found, "with some seed each rank begins with the other one"
    assert all("room on the device" in text for text in found)


def test_a_rank_that_does_not_come_is_named() -> None:
    machine = machine_of(3)
    communicator = SimulatedCommunicator(machine, "all", range(3))

    def program(rank: int) -> SimulatedProgram:
        if rank != 1:
            device, other = machine.devices[rank], 2 - rank
            parts = [(place, device.empty(8)) for place in (1, other)]
            communicator.messenger(rank).exchange(parts, [(place, device.empty(8)) for place in (1, other)]).wait()
            yield device.main.record()

    with pytest.raises(Deadlock, match=r"ranks \[0, 2\] wait\n(?s:.*) ranks 1 in exchange 1 of communicator all"):
        machine.run([program(rank) for rank in range(3)])


def test_there_is_a_program_for_each_rank() -> None:
    with pytest.raises(UsageError, match="2 programs"):
        machine_of(2).run([])


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"size": 0}, "size \\(how many ranks\\): expected a whole number of at least 1, got 0"),
        ({"size": 2.0}, "size .* got 2.0"),
        ({"size": True}, "size .* got True"),
        ({"seed": None}, "seed: expected a whole number, got None"),
        ({"seed": "7"}, "seed: expected a whole number, got '7'"),
        ({"slots": 0}, "slots .* of at least 1, got 0"),
        ({"slots": 1.5}, "slots .* got 1.5"),
        ({"eagerness": -0.1}, "eagerness: expected a number of at least 0, or None, got -0.1"),
        ({"eagerness": float("nan")}, "eagerness: .* got nan"),
        ({"eagerness": "1"}, "eagerness: .* got '1'"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(how: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        machine_of(**{"size": 1, **how})  # type: ignore[arg-type]


# The judge of races


@pytest.mark.parametrize("is_ordered", [True, False])
def test_the_judge_finds_a_race_that_has_not_happened(is_ordered: bool) -> None:
    judge = RaceJudge()
    device = machine_of(1, eagerness=1e9, watcher=judge).devices[0]  # all runs at once, in the order of the program
    other, x = device.stream(is_high=False), device.empty(64)
    device.main.launch(partial(x.fill_, 1))
    if is_ordered:
        other.wait(device.main.record())
    other.launch(partial(x[16:32].add_, 1))
    device.synchronize()
    assert x[20] == 2
    assert bool(judge.races) != is_ordered
    if not is_ordered:
        assert "usual (1): add_ writing to 1 times 16 bytes" in judge.races[0]
        assert "in fill_, and no event orders the two" in judge.races[0]


def test_the_judge_takes_parts_of_a_tensor_for_what_they_are() -> None:
    judge = RaceJudge()
    device = machine_of(1, watcher=judge).devices[0]
    other, x = device.stream(is_high=False), device.empty(64)
    other.wait(device.main.record())
    device.main.launch(partial(x[:32].fill_, 1))
    other.launch(partial(x[32:].fill_, 2))
    device.synchronize()
    assert judge.races == []
