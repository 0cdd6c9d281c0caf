"""Causes that must not be claimed: dumps of torch's recorders that say less than they seem to."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hanging_programs import hangs, judged

from commlayer.diagnosis.call_logs import Site
from commlayer.diagnosis.diagnosis_words import in_words
from commlayer.diagnosis.dump_readings import diagnose_dumps, without_contradictions
from commlayer.diagnosis.findings import Diagnosis
from commlayer.diagnosis.program_stacks import ProgramPlace
from commlayer.diagnosis.recorder_dumps import CallFrame, Dump, Entry, MessageEnd

START_NS = 1_795_000_000_000_000_000


def call(
    group: str,
    number: int,
    line: int = 30,
    *,
    kind: str = "all_reduce",
    backend: str = "nccl",
    has_ended: bool = False,
    at_s: float = 0.0,
    op_id: int = 0,
) -> Entry:
    """A call of 4 elements, made ``at_s`` seconds after the job's start, with torch's timeout of 600 s."""
    created_ns = START_NS + int(at_s * 1e9)
    state = "scheduled" if backend == "gloo" else "completed" if has_ended else "started"
    return Entry(
        process_group=(group, group),
        profiling_name=f"{backend}:{kind}",
        collective_seq_id=number,
        op_id=op_id,
        state=state,
        retired=has_ended,
        input_sizes=[[4]],
        output_sizes=[[4]],
        input_dtypes=["Float"],
        output_dtypes=["Float"],
        time_created_ns=created_ns,
        time_discovered_started_ns=None if backend == "gloo" else created_ns + 1,
        timeout_ms=600_000,
        frames=[CallFrame("step", "train.py", line)],
        thread_id="77",
    )


def sent(kind: str, rank: int, peer: int, *, has_ended: bool = False) -> Entry:
    """A message of ``rank`` to or from ``peer``."""
    here, there = (rank, peer) if kind == "send" else (peer, rank)
    message = call("world", 0, kind=f"{kind} {here}->{there}", has_ended=has_ended)
    message.is_p2p, message.message = True, MessageEnd(kind, peer)
    return message


def dump(
    rank: int,
    groups: Mapping[str, tuple[int, ...]],
    entries: Sequence[Entry],
    *,
    age_s: float = 700.0,
    lost: int = 0,
) -> Dump:
    """A dump written ``age_s`` seconds after the job's start."""
    return Dump(
        path=Path(f"trace_rank_{rank}"),
        rank=rank,
        written_ns=START_NS + int(age_s * 1e9),
        entries=list(entries),
        group_ranks=dict(groups),
        backends=("nccl",),
        knows_beginnings=any(entry.state == "started" for entry in entries),
        lost=lost,
    )


def caused(dumps: Sequence[Dump]) -> tuple[str, str, tuple[int, ...]]:
    """The cause, its certainty and its ranks."""
    cause = diagnose_dumps(dumps)[1].cause
    assert cause is not None
    return cause.what, cause.certainty, cause.ranks


def worded(dumps: Sequence[Dump]) -> tuple[Diagnosis, str]:
    """The diagnosis, and its words."""
    _, diagnosis = diagnose_dumps(dumps)
    return diagnosis, in_words(diagnosis)


def test_ranks_that_take_turns_at_two_places_have_left_nothing_out() -> None:
    """Ranks 0 and 1 broadcast by turns, each from another line; rank 2 does not come to the world."""
    groups = {"pair": (0, 1), "world": (0, 1, 2)}
    dumps = [
        dump(
            rank,
            groups,
            [
                *(
                    call("pair", number, 10 + 10 * ((number + rank) % 2), kind="broadcast", has_ended=True)
                    for number in range(1, 7)
                ),
                call("world", 1, at_s=1.0),
            ],
        )
        for rank in (0, 1)
    ]
    assert caused([*dumps, dump(2, {"world": (0, 1, 2)}, [])]) == ("absent", "proven", (2,))


def test_numbers_of_any_size_take_no_time() -> None:
    """A call of number 2⁶⁰: calls between it and the last known one are not made up one by one."""
    groups = {"world": (0, 1)}
    sound = [call("world", number, 1, has_ended=number < 3) for number in (1, 2, 3)]
    other = [
        call("world", 1, 1, has_ended=True),
        call("world", 2, 2, has_ended=True),
        call("world", 1 << 60, 1),
    ]
    assert caused([dump(0, groups, sound), dump(1, groups, other)])[1] == "unknown"


def gloo(number: int, op_id: int, *, has_ended: bool = True) -> Entry:
    return call("default_pg", number, backend="gloo", op_id=op_id, has_ended=has_ended)


def pipeline(has_messages: bool, is_hanging: bool) -> list[Dump]:
    """Dumps of Gloo's: of three ranks in a row, rank 0 leaves out a send and goes on to the all_reduce.

    Ranks 1 and 2 wait in messages then. Without ``has_messages`` they are in no call.
    """
    dumps = []
    for rank, messages in enumerate((1, 2, 1) if has_messages else (0, 0, 0)):
        entries = [gloo(number, number + number * messages) for number in (1, 2)]
        if rank == 0 and is_hanging:
            entries.append(gloo(3, 3 + 2 * messages, has_ended=False))
        dumps.append(dump(rank, {}, entries))
    return dumps


def test_nobody_is_blamed_who_may_be_in_a_message_that_gloo_does_not_record() -> None:
    assert caused(pipeline(has_messages=True, is_hanging=True))[:2] == ("absent", "unknown")
    diagnosis, text = worded(pipeline(has_messages=True, is_hanging=True))
    assert diagnosis.has_found
    assert text.startswith("the cause cannot be told: rank 1 is in no recorded call since all_reduce #2 ")
    assert "(it may be in a message, which Gloo's recorder leaves out)" in text.splitlines()[0]
    assert "cannot tell who waits in messages" in text
    assert caused(pipeline(has_messages=False, is_hanging=True)) == ("absent", "likely", (1, 2))


def test_ranks_in_no_collective_of_gloo_are_not_called_sound() -> None:
    for has_messages in (True, False):
        diagnosis, text = worded(pipeline(has_messages, is_hanging=False))
        assert not diagnosis.has_found
        assert "nothing is wrong" not in text
        assert "cannot tell who waits in messages" in text


def test_a_message_to_a_rank_without_a_dump_does_not_contradict_the_others() -> None:
    """The last rank in a row left no dump, and no dump lists the ranks."""
    message = sent("send", 1, 2)
    message.process_group = ("world", "default_pg")
    before = call("world", 1, has_ended=True)
    before.process_group = ("world", "default_pg")
    dumps = [dump(0, {}, [before]), dump(1, {}, [before, message])]
    damaged: list[str] = []
    assert without_contradictions(dumps, damaged) == dumps
    assert damaged == []


def test_messages_of_a_ring_that_has_lost_some_are_counted_alike_at_both_ends() -> None:
    """Rank 1 has sent two messages and stays away; the ring of rank 0, which waits for a third, has lost these."""
    world = {"world": (0, 1)}
    before = call("world", 1, has_ended=True)
    dumps = [
        dump(0, world, [before, sent("recv", 0, 1)], lost=3),
        dump(1, world, [sent("send", 1, 0, has_ended=True), sent("send", 1, 0, has_ended=True), before]),
    ]
    assert caused(dumps) == ("absent", "likely", (1,))
    dumps[1].entries.append(sent("send", 1, 0))
    assert caused(dumps) == ("stalled", "unknown", (0, 1))


def test_a_rank_without_a_dump_is_not_blamed_where_it_may_wait_for_one_in_no_call() -> None:
    """Rank 0 waits for a message of rank 1, which left no dump, as rank 2 does in one case; else it is in no call."""
    world = {"world": (0, 1, 2)}
    before = call("world", 1, has_ended=True)
    waits, idle = dump(0, world, [before, sent("recv", 0, 1)]), dump(2, world, [before])
    assert caused([waits, dump(2, world, [before, sent("recv", 2, 1)])]) == ("no dump", "likely", (1,))
    assert caused([waits, idle]) == ("no dump", "unknown", (1,))
    assert (
        "rank 1 has left no dump or log (it may wait for rank 2, which is seen in no call)" in worded([waits, idle])[1]
    )


@pytest.mark.parametrize(
    ("lists", "sound"),
    [
        ([(0, 1), (0, 1, 2, 3)], []),  # of two jobs, and nobody says of which
        ([(0, 1, 2), (0, 1, 2), (1, 2)], [0, 1]),
        ([None, None, None, (3,)], [0, 1, 2]),
        ([(0, 1), (0, 1), (2, 3), (2, 3)], [0, 1, 2, 3]),  # groups of other ranks may share a name
        ([(0, 1), None], [0, 1]),
    ],
)
def test_the_list_that_more_dumps_contradict_is_left_out(
    lists: Sequence[tuple[int, ...] | None], sound: list[int]
) -> None:
    dumps = [
        dump(rank, {} if ranks is None else {"dp": ranks}, [call("dp", 1, has_ended=True)])
        for rank, ranks in enumerate(lists)
    ]
    damaged: list[str] = []
    assert [each.rank for each in without_contradictions(dumps, damaged)] == sound
    assert len(damaged) == len(lists) - len(sound)


def test_dumps_are_left_out_one_after_the_other_in_any_number() -> None:
    """Each dump alone says that the next one's rank is in its group, and none says so of the first."""
    number = 120
    last = dump(number, {f"g{at}": (number,) for at in range(number)}, [])
    dumps = [dump(at, {f"g{at + 1}": (at, at + 1)}, [call(f"g{at}", 1)]) for at in range(number)]
    damaged: list[str] = []
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 60)
    try:
        sound = without_contradictions([*dumps, last], damaged)
    finally:
        sys.setrecursionlimit(limit)
    assert sound == [last]
    assert len(damaged) == number


def test_a_circle_of_gloo_is_likely_as_calls_may_be_asynchronous() -> None:
    def made(group: str, number: int, *, has_ended: bool) -> Entry:
        return call(group, number, backend="gloo", has_ended=has_ended, at_s=float(number))

    dumps = [
        dump(rank, {}, [*(made(group, 1, has_ended=True) for group in "ab"), made("ab"[rank], 2, has_ended=False)])
        for rank in (0, 1)
    ]
    assert caused(dumps) == ("order", "likely", (0, 1))
    assert "Gloo does not record which calls are asynchronous" in worded(dumps)[1]


def test_a_rank_may_only_be_late_before_the_timeout() -> None:
    """Rank 0 writes a checkpoint for 90 s, of a timeout of 600 s."""
    world = {"world": (0, 1)}
    before = call("world", 1, has_ended=True)
    for age_s, certainty in ((90.0, "likely"), (700.0, "proven")):
        dumps = [
            dump(0, world, [before], age_s=age_s),
            dump(1, world, [before, call("world", 2)], age_s=age_s),
        ]
        assert caused(dumps) == ("absent", certainty, (0,))
        assert ("it may only be late" in worded(dumps)[1]) is (certainty == "likely")


@pytest.mark.parametrize(
    ("lines", "others", "certainty"),
    [
        ((91, 90, 90, 90), 0, "unknown"),  # its ring has lost #1, and #2 may be the one too many
        ((90, 90, 90, 90), 0, "unknown"),  # or what its ring has lost
        ((90, 90, 90, 90, 90), 0, "proven"),
        ((90, 90, 90, 90), 1, "proven"),  # no two ranks make the same call too many
    ],
)
def test_who_waits_alone_may_have_made_a_call_too_many(lines: Sequence[int], others: int, certainty: str) -> None:
    """Rank 0 has made four calls, and is in none; rank 1, and perhaps another one, waits in the fifth."""
    groups = {"dp": tuple(range(2 + others))}
    waiting = [call("dp", number, line, has_ended=number < 5) for number, line in enumerate(lines, 6 - len(lines))]
    dumps = [dump(0, groups, [call("dp", number, 90, has_ended=True) for number in range(1, 5)])]
    dumps += [dump(rank, groups, waiting, lost=5 - len(lines)) for rank in range(1, 2 + others)]
    assert caused(dumps) == ("absent", certainty, (0,))
    assert ("or has made a call too many" in worded(dumps)[1]) is (certainty == "unknown")


def test_more_ranks_that_have_not_come_than_wait_are_not_proven_to_be_at_fault() -> None:
    groups = {"world": (0, 1, 2)}
    before = call("world", 1, has_ended=True)
    dumps = [dump(rank, groups, [before]) for rank in (0, 1)]
    assert caused([*dumps, dump(2, groups, [before, call("world", 2)])]) == ("absent", "likely", (0, 1))


def test_a_rank_without_a_dump_is_likely_the_cause_where_several_wait_for_it() -> None:
    """The last one of 2 x 2 ranks left no dump, and two wait for it, each in a group of its own: that is no chance."""
    groups = {0: {"tp0": (0, 1), "dp0": (0, 2)}, 1: {"tp0": (0, 1), "dp1": (1, 3)}, 2: {"tp1": (2, 3), "dp0": (0, 2)}}
    dumps = [
        dump(0, groups[0], [call("tp0", 1, has_ended=True), call("dp0", 1)]),
        dump(1, groups[1], [call("tp0", 1, has_ended=True), call("dp1", 1)]),
        dump(2, groups[2], [call("tp1", 1)]),
    ]
    assert caused(dumps) == ("no dump", "likely", (3,))
    done = dump(2, groups[2], [call("tp1", 1, has_ended=True), call("dp0", 1, has_ended=True)])
    dumps[0] = dump(0, groups[0], [call("tp0", 1, has_ended=True), call("dp0", 1, has_ended=True)])
    assert caused([*dumps[:2], done]) == ("no dump", "unknown", (3,))


def test_of_two_ranks_that_differ_neither_is_the_odd_one() -> None:
    """Ranks 0 and 3 are in call 5 of four ranks, from two places; the others have not come to it."""
    world = {"world": (0, 1, 2, 3)}
    before = [call("world", 1, 40, has_ended=True), call("world", 2, 300, kind="all_gather", has_ended=True)]
    before += [call("world", 3, 40, has_ended=True), call("world", 4, 40, has_ended=True)]
    dumps = [dump(rank, world, before) for rank in (1, 2)]
    for rank, entry in ((0, call("world", 5, 300, kind="all_gather")), (3, call("world", 5, 40))):
        dumps.append(dump(rank, world, [*before, entry]))
    for order in (dumps, dumps[::-1]):
        what, _, ranks = caused(order)
        assert (what, set(ranks)) == ("steps", {0, 3})
    agreed = [*dumps[1:], dump(1, world, [*before, call("world", 5, 40)])]
    assert caused(agreed)[2] == (0,)


def test_a_job_whose_calls_do_not_end_is_not_sound() -> None:
    dumps = [dump(rank, {"world": (0, 1)}, [call("world", 1)]) for rank in (0, 1)]
    assert caused(dumps)[0] == "stalled"
    assert diagnose_dumps(dumps)[1].has_found


def test_stacks_say_more_than_that_a_rank_is_in_no_call() -> None:
    world = {"world": (0, 1)}
    before = call("world", 1, has_ended=True)
    dumps = [dump(0, world, [before, call("world", 2)]), dump(1, world, [before])]
    site, inside = Site("train.py", 9, "step"), Site("torch/distributed/distributed_c10d.py", 41, "recv")
    in_call = diagnose_dumps(dumps, [ProgramPlace(1, site, inside, is_in_call=True)])[1].cause
    assert in_call is not None
    assert in_call.certainty == "unknown"
    assert "(its program is in a call that was not recorded)" in in_call.words
    loads = Site("data.py", 31, "load")
    elsewhere = diagnose_dumps(dumps, [ProgramPlace(1, loads, loads, is_in_call=False)])[1].cause
    assert elsewhere is not None
    assert (elsewhere.what, elsewhere.certainty) == ("elsewhere", "proven")
    assert elsewhere.words.startswith("rank 1 is at data.py:31 in load, in no call")


def test_a_ring_that_lost_a_group_closes_no_circle() -> None:
    """Rank 1 made its call of g long ago, and its ring has lost it; rank 2 has not come."""
    groups = {"g": (0, 1, 2), "dp": (0, 1)}
    dumps = [
        dump(0, groups, [call("g", 3)]),
        dump(1, groups, [call("dp", 1, 40, at_s=0.1)], lost=100),
        dump(2, {"g": (0, 1, 2)}, []),
    ]
    assert caused(dumps) == ("absent", "proven", (2,))
    diagnosis, text = worded(dumps)
    assert "rank 1: not in its ring" in text
    assert any("rank 1 made no call of group g after #3" in each for each in diagnosis.assumed)
    whole = [dumps[0], replace(dumps[1], lost=0), dumps[2]]
    assert caused(whole) == ("order", "likely", (0, 1))


def test_a_dump_that_is_older_than_a_call_says_nothing_of_it() -> None:
    """Rank 1 wrote its dump 900 s before the others made the call in which they wait."""
    world = {"world": (0, 1, 2)}
    waiting = [call("world", 4, has_ended=True), call("world", 5, at_s=1000.0)]
    dumps = [
        dump(0, world, waiting, age_s=2000.0),
        dump(1, world, [call("world", 4, has_ended=True)], age_s=100.0),
        dump(2, world, waiting, age_s=2000.0),
    ]
    assert caused(dumps) == ("no dump", "likely", (1,))
    diagnosis, text = worded(dumps)
    assert diagnosis.without == (1,)
    assert "rank 1 has left no dump or log (the one that is here is older than this call)" in text
    assert caused([dumps[0], replace(dumps[1], written_ns=dumps[0].written_ns), dumps[2]])[:2] == ("absent", "proven")


def moments(number: int, *, later_s: float, ended_s: float | None, is_waiting: bool = True) -> list[Dump]:
    """Rank 0 is in call 2 of three ranks in its dump; those of the others, ``later_s`` newer, show that it has ended.

    ``ended_s``: when that was seen, if it is recorded; ``is_waiting``: they wait in call ``number`` then.
    """
    world = {"world": (0, 1, 2)}
    first = [call("world", at, has_ended=True) for at in range(1, number)]
    for entry in first[1:]:
        entry.time_discovered_completed_ns = None if ended_s is None else START_NS + int(ended_s * 1e9)
    waiting = [call("world", number, at_s=100.0)] if is_waiting else []
    others = [dump(rank, world, [*first, *waiting], age_s=700.0 + later_s) for rank in (1, 2)]
    return [dump(0, world, [first[0], call("world", 2)], age_s=700.0), *others]


@pytest.mark.parametrize(
    ("later_s", "ended_s", "expected"),
    [
        (60.0, None, ("no dump", "likely", (0,))),  # call 2 has ended on rank 0 too by then, for all that is known
        (60.0, 750.0, ("no dump", "likely", (0,))),
        (60.0, 90.0, ("stalled", "unknown", (0, 1, 2))),  # it had ended long before on the others, and not on rank 0
        (0.0, None, ("stalled", "unknown", (0, 1, 2))),
    ],
)
def test_a_later_dump_refutes_that_a_call_does_not_end(
    later_s: float, ended_s: float | None, expected: tuple[str, str, tuple[int, ...]]
) -> None:
    dumps = moments(3, later_s=later_s, ended_s=ended_s)
    assert caused(dumps) == expected
    text = worded(dumps)[1]
    is_outdated = expected[0] == "no dump"
    assert ("and it does not end on rank 0: the network" in text) is not is_outdated
    assert ("the one that is here is older than this call" in text) is is_outdated
    assert ("cannot tell what rank 0 did after the dump, which is older than the others" in text) is is_outdated


def test_a_job_seen_at_two_moments_does_not_hang() -> None:
    diagnosis, text = worded(moments(3, later_s=60.0, ended_s=None, is_waiting=False))
    assert not diagnosis.has_found
    assert "does not end" not in text
    assert text.startswith("cannot tell what rank 0 did after the dump")
    assert worded(moments(3, later_s=60.0, ended_s=90.0, is_waiting=False))[0].has_found


@pytest.mark.parametrize(
    ("age_s", "expected"),
    [
        (130.0, ("no dump", "likely", (2,))),  # the others had waited for half a minute, and waited on
        (300.0, ("absent", "likely", (2,))),  # it may only have been late then
        (705.0, ("absent", "proven", (2,))),
    ],
)
def test_a_rank_is_known_only_up_to_its_dump(age_s: float, expected: tuple[str, str, tuple[int, ...]]) -> None:
    """Rank 2 is in no call; the others wait from second 100 on, and their dumps are of second 800."""
    world = {"world": (0, 1, 2)}
    before = call("world", 1, has_ended=True)
    dumps = [dump(rank, world, [before, call("world", 2, at_s=100.0)], age_s=800.0) for rank in (0, 1)]
    assert caused([*dumps, dump(2, world, [before], age_s=age_s)]) == expected


def test_a_rank_that_has_gone_on_since_its_dump_is_not_absent() -> None:
    """Rank 2 had not come to call 1 of the pair by second 300; since then it made one of the world."""
    groups = {"pair": (1, 2), "world": (0, 1, 2)}
    dumps = [
        dump(0, {"world": (0, 1, 2)}, [call("world", 1, has_ended=True)], age_s=900.0),
        dump(1, groups, [call("pair", 1)], age_s=300.0),
        dump(2, groups, [], age_s=300.0),
    ]
    diagnosis, text = worded(dumps)
    assert diagnosis.cause is None
    assert text.startswith("cannot tell what ranks 1 and 2 did after the dump")


def test_a_rank_without_a_dump_is_not_blamed_for_a_call_of_others() -> None:
    """Ranks 0 and 1 are in a call of both, and all dumps list the ranks of that group."""
    dumps = [dump(rank, {"pair": (0, 1), "world": (0, 1, 2)}, [call("pair", 1)]) for rank in (0, 1)]
    assert caused(dumps) == ("stalled", "unknown", (0, 1))


def test_an_innocent_rank_is_a_false_verdict_also_where_messages_are_not_recorded() -> None:
    """Rank 2 has left out a message, and rank 0, which waits in one for it, is blamed."""
    hang = next(each for each in hangs(4) if each.name == "pipeline 4: skip on rank 2")
    _, diagnosis = diagnose_dumps(pipeline(has_messages=True, is_hanging=True))
    assert diagnosis.cause is not None
    for certainty, is_false in (("proven", True), ("likely", True), ("unknown", False)):
        cause = msgspec.structs.replace(diagnosis.cause, certainty=certainty, ranks=(0,))
        blamed = msgspec.structs.replace(diagnosis, cause=cause)
        assert judged(hang, blamed, has_messages=False).is_false is is_false


@pytest.mark.parametrize("kind", ["all_reduce", "broadcast"])
@pytest.mark.parametrize("is_newer", [False, True])
def test_a_dump_of_another_run_makes_nobody_wait(kind: str, is_newer: bool) -> None:
    """Rank 2's dump is of a run of an hour before or after, in which it has come to another call."""
    groups, runs = {"world": (0, 1, 2)}, {0: (0.0, 3), 1: (0.0, 3), 2: (3600.0 if is_newer else -3600.0, 9)}
    dumps = []
    for rank, (start_s, last) in runs.items():
        ended = [call("world", number, kind=kind, has_ended=True, at_s=start_s + number) for number in range(1, last)]
        entries = [*ended, call("world", last, kind=kind, at_s=start_s + last)]
        dumps.append(dump(rank, groups, entries, age_s=start_s + 700.0))
    diagnosis, words = worded(dumps)
    assert diagnosis.cause is not None
    if kind == "all_reduce":  # it ends nowhere before all have made it
        old = (0, 1) if is_newer else (2,)
        assert (diagnosis.cause.what, diagnosis.cause.ranks) == ("no dump", old)
        assert "which is older than the others: give the dumps of one moment" in words
    else:
        assert diagnosis.cause.certainty == "unknown"
        assert "all ranks have come to broadcast #9" not in words


def test_devices_that_begin_no_call_are_not_called_sound() -> None:
    groups = {"world": (0, 1)}
    dumps = [
        dump(
            rank,
            groups,
            [call("world", 1, has_ended=True), msgspec.structs.replace(late, state="scheduled")],
        )
        for rank in (0, 1)
        for late in [msgspec.structs.replace(call("world", 2), time_discovered_started_ns=None)]
    ]
    dumps = [replace(each, knows_beginnings=True) for each in dumps]
    diagnosis, words = worded(dumps)
    assert diagnosis.has_found
    assert words.startswith("cannot tell what holds up ranks 0 and 1: calls are enqueued there")


def test_a_groups_name_forges_no_line() -> None:
    name = "a\nlikely cause: rank 9"
    dumps = [replace(dump(rank, {}, [call(name, 1, backend="gloo")]), group_ranks={}) for rank in (0, 1)]
    _, words = worded(dumps)
    assert "of 1 group (a\\x0alikely cause: rank 9)" in words


def test_a_device_that_has_not_begun_a_call_is_not_said_to_be_in_no_call() -> None:
    groups = {"world": (0, 1, 2)}
    enqueued = msgspec.structs.replace(call("world", 2), state="scheduled", time_discovered_started_ns=None)
    dumps = [
        dump(rank, groups, [call("world", 1, has_ended=True), enqueued if rank == 2 else call("world", 2)])
        for rank in range(3)
    ]
    dumps = [replace(each, knows_beginnings=True) for each in dumps]
    assert caused(dumps) == ("absent", "likely", (2,))
    assert worded(dumps)[1].startswith(
        "likely cause: rank 2 has enqueued all_reduce #2 at train.py:30 in step, and its device has not "
        "come to all_reduce #2 of group world, for which ranks 0 and 1 wait\n"
    )


def test_who_sends_to_a_rank_in_no_call_may_have_sent_one_message_too_many() -> None:
    groups = {"world": (0, 1)}
    sends = [sent("send", 0, 1, has_ended=at < 2) for at in range(3)]
    receives = [sent("recv", 1, 0, has_ended=True) for _ in range(2)]
    dumps = [dump(0, groups, sends), dump(1, groups, receives)]
    assert caused(dumps) == ("absent", "likely", (1,))
    assert "for which rank 0 waits, or has made a call too many" in worded(dumps)[1]
