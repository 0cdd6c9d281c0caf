"""Who waits for whom, found in the logs of ranks: every seeded fault, and nothing in programs that are right."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from jobs_in_memory import Groups, Job, Op, Program, legal_program, run
from msgspec.structs import replace as replace_log

from commlayer.diagnosis.call_logs import RankLog, Site, ThreadLog
from commlayer.diagnosis.diagnosis_words import in_words, one_line
from commlayer.diagnosis.findings import Cycle, Diagnosis, Mismatch, Missing, diagnose
from commlayer.diagnosis.graph import Graph


def diagnosed(job: Job, reason: str = "timeout", absent: tuple[int, ...] = ()) -> Diagnosis:
    """The diagnosis when nobody can go on: ranks whose program is over have left."""
    gone = {
        rank: "its program has ended" for rank, here in job.ranks.items() if here.at >= len(here.program)
    } | dict.fromkeys(absent, "died")
    return diagnose([job.log(rank, reason, gone) for rank in job.ranks if rank not in absent])


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_of_a_legal_program_gives_an_alarm(seed: int) -> None:
    """A hundred programs a seed, seen at one moment and with each rank at a moment of its own; who sees later knows of others'
    ends, too."""
    for index in range(100):
        random_ = random.Random(seed * 1000 + index)
        groups, program = legal_program(random_, random_.randint(2, 8), random_.randint(1, 30))
        job = Job(groups, program)
        logs = {}
        for rank in random_.sample(list(job.ranks), len(job.ranks)):
            run(job, random_, random_.randint(0, 12))
            ended = [each for each, here in job.ranks.items() if each != rank and here.at >= len(here.program)]
            logs[rank] = job.log(rank, gone=dict.fromkeys(ended, "it destroyed its process group"))
        assert diagnose(list(logs.values())).findings == (), in_words(diagnose(list(logs.values())))
        assert diagnose([job.log(rank) for rank in job.ranks]).findings == ()
        run(job, random_)
        assert all(here.at == len(here.program) for here in job.ranks.values()), "the program was not legal"


def started(num_ranks: int, groups: Groups, program: Program) -> Diagnosis:
    job = Job({"world": tuple(range(num_ranks)), **groups}, program)
    run(job, random.Random(1))
    return diagnosed(job)


def test_wrong_order_over_two_groups_is_a_circle_of_two() -> None:
    groups: Groups = {"dp": (0, 1), "tp": (0, 1)}
    a, b = Op("all_reduce", "dp", 1, 10), Op("all_gather", "tp", 2, 20)
    found = started(3, groups, {0: [a, b], 1: [b, a], 2: [Op("barrier", "world", 3, 30)]})
    (cycle,) = (each for each in found.findings if isinstance(each, Cycle))
    assert [step.call.rank for step in cycle.steps] == [0, 1]
    assert [(step.call.kind, step.site.line, step.missing.rank) for step in cycle.steps] == [
        ("all_reduce", 10, 1),
        ("all_gather", 20, 0),
    ]
    assert cycle.behind == (2,), "rank 2 waits for both"
    text = in_words(found)
    assert "ranks 0 and 1 wait for each other, in a circle of 2" in text
    assert "rank 0 waits in all_reduce #1 (float32, 64 B, SUM) of group dp, at train.py:10 in step" in text
    assert "for rank 1, which has not come to all_reduce #1 of group dp" in text


def test_a_large_group_is_looked_through_once_for_all_who_wait_in_it() -> None:
    """The needs of a group grow with its ranks, and not with their pairs."""
    call = Op("all_reduce", "world", 1, 10)
    num_ranks, num_late = 128, 4
    job = Job(
        {"world": tuple(range(num_ranks))}, {rank: [call] if rank >= num_late else [] for rank in range(num_ranks)}
    )
    for rank in job.ranks:
        job.step(rank)
    graph = Graph([job.log(rank) for rank in job.ranks])
    late = [node for each in graph.blocked for node in graph.late(each)]
    assert {node.rank for node in late} == set(range(num_late))
    assert len(late) == num_late * (num_ranks - num_late)
    assert sum(map(len, graph._needs.values())) <= num_ranks + num_late


def test_a_circle_of_the_last_ranks_of_a_large_job_is_found() -> None:
    """The first ranks wait for it, and are in no circle."""
    groups: Groups = {"dp": (98, 99), "tp": (98, 99)}
    a, b, all_ranks = Op("all_reduce", "dp", 1, 10), Op("all_gather", "tp", 2, 20), Op("barrier", "world", 3, 30)
    program = {rank: [all_ranks] for rank in range(98)} | {98: [a, b], 99: [b, a]}
    (cycle,) = started(100, groups, program).findings
    assert isinstance(cycle, Cycle)
    assert [step.call.rank for step in cycle.steps] == [98, 99]


def test_wrong_order_over_three_groups_is_a_circle_of_three() -> None:
    groups: Groups = {"a": (0, 1), "b": (1, 2), "c": (2, 0)}
    a, b, c = (Op("all_reduce", name, index, 10 * index) for index, name in enumerate("abc", 1))
    found = started(3, groups, {0: [a, c], 1: [b, a], 2: [c, b]})
    (cycle,) = (each for each in found.findings if isinstance(each, Cycle))
    assert sorted(step.call.rank for step in cycle.steps) == [0, 1, 2]
    assert not [each for each in found.findings if isinstance(each, Missing)], "those are consequences"


def test_the_smallest_of_two_circles_is_told() -> None:
    """The smaller one is found of two circles: of 0, 1 and 2, and of 1 and 2 alone."""
    groups: Groups = {"a": (0, 1), "b": (1, 2)}
    ops = {name: Op("all_reduce", name, index, 10 * index) for index, name in enumerate(groups, 1)}
    both = Op("all_reduce", "world", 9, 90)
    found = started(
        4,
        groups,
        {0: [ops["a"], both], 1: [ops["b"], ops["a"]], 2: [both, ops["b"]], 3: [Op("all_reduce", "world", 8, 80)]},
    )
    (cycle,) = (each for each in found.findings if isinstance(each, Cycle))
    assert sorted(step.call.rank for step in cycle.steps) == [1, 2]
    assert cycle.behind == (0, 3)


def test_a_wait_between_two_asynchronous_calls_is_a_circle() -> None:
    """Without the wait, a host synchronisation, both orders would be right."""
    groups: Groups = {"dp": (0, 1), "tp": (0, 1)}
    a, b = Op("all_reduce", "dp", 1, 10, is_async=True), Op("all_reduce", "tp", 2, 20, is_async=True)
    wait_a, wait_b = Op("wait", "dp", 1, 11), Op("wait", "tp", 2, 21)
    assert started(2, groups, {0: [a, b, wait_a, wait_b], 1: [b, a, wait_b, wait_a]}).findings == ()
    found = started(2, groups, {0: [a, wait_a, b, wait_b], 1: [b, wait_b, a, wait_a]})
    (cycle,) = found.findings
    assert isinstance(cycle, Cycle)
    assert [step.site.line for step in cycle.steps] == [11, 21]
    assert "called at train.py:10 in step and waited for at train.py:11 in step" in in_words(found)


def test_a_message_against_a_collective_is_a_circle() -> None:
    both = Op("all_reduce", "world", 1, 10)
    found = started(
        2, {}, {0: [Op("recv", "world", 2, 5, peer=1), both], 1: [both, Op("send", "world", 2, 15, peer=0)]}
    )
    (cycle,) = found.findings
    assert isinstance(cycle, Cycle)
    assert {step.call.kind for step in cycle.steps} == {"recv", "all_reduce"}
    assert "which has not come to send #1 to rank 0 of group world" in in_words(found)


def test_two_that_send_before_they_receive_wait_for_each_other() -> None:
    program = {
        rank: [Op("send", "world", 1, 5, peer=1 - rank), Op("recv", "world", 2, 6, peer=1 - rank)] for rank in (0, 1)
    }
    (cycle,) = started(2, {}, program).findings
    assert isinstance(cycle, Cycle)


def test_a_rank_that_left_a_call_out_and_ended_is_missing() -> None:
    call = Op("all_reduce", "world", 1, 10)
    found = started(3, {}, {0: [call], 1: [], 2: [call]})
    (missing,) = found.findings
    assert isinstance(missing, Missing)
    assert (missing.call.rank, missing.why, missing.how) == (1, "gone", "its program has ended")
    assert [waiter.site.line for waiter in missing.waiting] == [10, 10]


def test_a_rank_that_died_without_a_log_is_missing() -> None:
    call = Op("all_reduce", "world", 1, 10)
    job = Job({"world": (0, 1, 2)}, {0: [call], 1: [call], 2: []})
    run(job, random.Random(1))
    (missing,) = diagnosed(job, absent=(2,)).findings
    assert isinstance(missing, Missing)
    assert (missing.call.rank, missing.how) == (2, "died")
    assert diagnosed(job, absent=(2,)).without == (2,)


def test_a_rank_that_computes_is_late_and_no_alarm_before_the_timeout() -> None:
    call = Op("all_reduce", "world", 1, 10)
    job = Job({"world": (0, 1)}, {0: [call], 1: [call]})
    job.step(0)
    for reason, is_wrong in (("signal", False), ("timeout", True)):
        found = diagnose([job.log(0, reason), job.log(1, reason)])
        assert found.findings == ()
        assert found.has_found is is_wrong
        (missing,) = found.waits
        assert (missing.call.rank, missing.why) == (1, "late")
        assert "rank 1 is at train.py:999 in load, in no call" in in_words(found)
    (missing,) = diagnose([job.log(0, "timeout")]).waits
    assert (missing.call.rank, missing.why) == (1, "silent")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"kind": "reduce_scatter"}, "collective"),
        ({"dtype": "int32"}, "dtype"),
        ({"op": "MAX"}, "operation"),
        ({"sent": 128}, "size"),
    ],
)
def test_calls_that_differ_are_named(change: dict[str, object], what: str) -> None:
    call = Op("all_reduce", "world", 1, 10)
    odd = replace(call, line=11, **change)  # type: ignore[arg-type]  # fields by name
    found = started(3, {}, {0: [call], 1: [odd], 2: [call]})
    (mismatch,) = found.findings
    assert isinstance(mismatch, Mismatch)
    assert (mismatch.what, mismatch.odd) == (what, (1,))
    text = in_words(found)
    assert f"rank 1 differs in call #1 of group world: {what} differs" in text
    assert "train.py:11 in step" in text
    assert "train.py:10 in step" in text


def test_splits_that_do_not_meet_name_both_ranks() -> None:
    calls = {rank: Op("all_to_all", "world", 1, 10, op="", to=(4, 4, 4), of=(4, 4, 4), sent=12) for rank in range(3)}
    calls[2] = replace(calls[2], of=(4, 8, 4))
    (mismatch,) = started(3, {}, {rank: [call] for rank, call in calls.items()}).findings
    assert isinstance(mismatch, Mismatch)
    assert mismatch.what == "splits"
    assert mismatch.words == "splits differ: rank 1 sends 4 bytes to rank 2, which expects 8"


def test_a_call_left_out_is_hinted_at() -> None:
    calls = [Op("all_reduce", "world", index, index, sent=64 * index) for index in range(1, 5)]
    found = started(3, {}, {0: calls, 1: [calls[0], *calls[2:]], 2: calls})
    mismatch = found.findings[0]
    assert isinstance(mismatch, Mismatch)
    assert mismatch.number == 2
    assert mismatch.hint == "rank 1 goes on as if it had left out 1 call of this group"
    found = started(3, {}, {0: calls, 1: [calls[0], replace(calls[0], mark=9), *calls[1:]], 2: calls})
    mismatch = found.findings[0]
    assert isinstance(mismatch, Mismatch)
    assert mismatch.hint == "rank 1 goes on as if it had made 1 call of this group too many"


# Seeded faults in random programs


def blocking(program: Program) -> Program:
    """The same program without asynchronous calls."""
    return {rank: [replace(op, is_async=False) for op in ops if op.kind != "wait"] for rank, ops in program.items()}


Fault = Callable[[random.Random, Groups, Program], set[int]]
"""Spoils a program, and returns the ranks that have to be named."""


def two_groups(random_: random.Random, groups: Groups, program: Program) -> set[int]:
    first, second = random_.sample(sorted(program), 2)
    groups |= {"r0": (first, second), "r1": (first, second)}
    calls = [Op("all_reduce", f"r{index}", 9000 + index, 500 + index) for index in range(2)]
    program[first] += calls
    program[second] += reversed(calls)
    return {first, second}


def three_groups(random_: random.Random, groups: Groups, program: Program) -> set[int]:
    ranks = random_.sample(sorted(program), 3)
    groups |= {f"r{index}": (ranks[index], ranks[(index + 1) % 3]) for index in range(3)}
    calls = [Op("all_reduce", f"r{index}", 9000 + index, 500 + index) for index in range(3)]
    for index, rank in enumerate(ranks):
        program[rank] += [calls[index], calls[index - 1]]
    return set(ranks)


def missing_rank(random_: random.Random, groups: Groups, program: Program) -> set[int]:
    culprit = random_.randrange(len(program))
    for rank in program:
        program[rank] += [] if rank == culprit else [Op("all_reduce", "world", 9000, 500)]
    return {culprit}


def odd_call(call: Op, kinds: tuple[str, ...], **change: Any) -> Fault:
    """All ranks make ``call``, and one call of those kinds is another on one rank."""

    def spoil(random_: random.Random, groups: Groups, program: Program) -> set[int]:
        sizes = (4,) * len(program)
        for ops in program.values():
            ops.append(replace(call, to=sizes, of=sizes) if call.kind == "all_to_all" else call)
        places = [(rank, at) for rank, ops in program.items() for at, op in enumerate(ops) if op.kind in kinds]
        rank, at = random_.choice(places)
        splits = {"of": (5,) * len(program)} if call.kind == "all_to_all" else {}
        program[rank][at] = replace(program[rank][at], line=777, **(splits or change))
        return {rank}

    return spoil


def host_sync(random_: random.Random, groups: Groups, program: Program) -> set[int]:
    first, second = random_.sample(range(len(program)), 2)
    groups |= {"h1": (first, second), "h2": (first, second)}
    a, b = (Op("all_reduce", f"h{i}", 9000 + i, 500 + i, is_async=True) for i in (1, 2))
    waits = [Op("wait", each.group, each.mark, each.line + 100) for each in (a, b)]
    program[first] += [a, waits[0], b, waits[1]]
    program[second] += [b, waits[1], a, waits[0]]
    return {first, second}


def message_against_collective(random_: random.Random, groups: Groups, program: Program) -> set[int]:
    first, second = random_.sample(range(len(program)), 2)
    both = Op("barrier", "world", 9000, 500, dtype="", op="")
    program[first].append(Op("send", "world", 9001, 501, peer=second))
    for rank in program:
        program[rank].append(both)
    program[second].append(Op("recv", "world", 9001, 502, peer=first))
    return {first, second}


REDUCE = Op("all_reduce", "world", 9000, 500)
FAULTS: dict[str, tuple[Fault, type[object]]] = {
    "two groups": (two_groups, Cycle),
    "three groups": (three_groups, Cycle),
    "missing": (missing_rank, Missing),
    "splits": (odd_call(replace(REDUCE, kind="all_to_all", op="", sent=12), ("all_to_all",)), Mismatch),
    "dtype": (odd_call(REDUCE, ("all_reduce", "all_gather"), dtype="int8"), Mismatch),
    "root": (odd_call(replace(REDUCE, kind="broadcast", op="", root=0), ("broadcast",), root=99), Mismatch),
    "host": (host_sync, Cycle),
    "message": (message_against_collective, Cycle),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", range(10))
def test_seeded_faults_are_named_with_their_places(fault: str, seed: int) -> None:
    """Behind a random program that is right."""
    random_ = random.Random(f"{fault}{seed}")
    groups, legal = legal_program(random_, random_.randint(3, 8), 20)
    program = blocking(legal)
    spoil, kind = FAULTS[fault]
    culprits = spoil(random_, groups, program)
    job = Job(groups, program)
    run(job, random_)
    found = diagnosed(job)
    assert found.findings, f"{fault} was not found"
    first = found.findings[0]
    assert type(first) is kind
    text = in_words(found)
    if isinstance(first, Cycle):
        named = {step.call.rank for step in first.steps}
        assert all(f"rank {step.call.rank} waits in" in text and str(step.site) in text for step in first.steps)
    elif isinstance(first, Missing):
        named = {first.call.rank}
        assert all(str(waiter.site) in text for waiter in first.waiting)
    else:
        pair = groups[first.group]  # of two that differ either may be meant
        named = set(pair) if len(pair) == 2 else set(first.odd)
        assert "train.py:777 in step" in text
    assert culprits <= named


def with_thread(log: RankLog, thread: int, name: str, line: int) -> RankLog:
    """The log with another thread of the program, which is in no call that is in the ring yet."""
    return replace_log(
        log, threads=(*log.threads, ThreadLog(ident=thread, name=name, site=Site("train.py", line, "side")))
    )


def called_from(log: RankLog, thread: int, *numbers: int, group: str) -> RankLog:
    """The log with these calls of a group made by another thread."""
    key = next(index for index, each in enumerate(log.groups) if each.key == group)
    calls = tuple(
        replace_log(call, thread=thread) if call.group == key and call.number in numbers else call for call in log.calls
    )
    return replace_log(log, calls=calls)


def test_a_thread_that_waits_in_a_call_is_told_of_where_its_rank_is_late_elsewhere() -> None:
    """Rank 0 leaves a call out that a thread of rank 1 makes, whose main thread waits for that thread, outside of calls."""
    side, barrier = Op("all_reduce", "pair", 1, 10), Op("barrier", "world", 2, 20)
    job = Job({"world": (0, 1), "pair": (0, 1)}, {0: [barrier], 1: [side]})
    run(job, random.Random(1))
    logs = [job.log(rank, "timeout") for rank in (0, 1)]
    logs[1] = called_from(with_thread(logs[1], 8, "side", 9), 8, 1, group="pair")
    found = diagnose(logs)
    assert found.findings == ()
    held, late = found.waits
    assert (held.call.rank, held.why) == (0, "held")
    assert (late.call.rank, late.why) == (1, "late")
    text = in_words(found)
    assert "rank 0 has not come to all_reduce #1 of group pair, for which a thread of rank 1 waits:" in text
    assert "  rank 0 waits in barrier #1 of group world, at train.py:20 in step" in text
    assert one_line(found).startswith("rank 0 has not come to all_reduce #1 of group pair")


def test_who_waits_behind_a_rank_that_waits_is_in_the_answer() -> None:
    """A pipeline: rank 2 waits for rank 1, which waits for rank 0, in no call."""
    program = {
        0: [],
        1: [Op("recv", "world", 1, 10, peer=0), Op("send", "world", 2, 11, peer=2)],
        2: [Op("recv", "world", 1, 12, peer=1)],
    }
    job = Job({"world": (0, 1, 2)}, program)
    job.ranks[0].program.append(Op("send", "world", 3, 13, peer=1))
    for rank in (1, 2):
        job.step(rank)
    found = diagnose([job.log(rank, "timeout") for rank in range(3)])
    (missing,) = found.waits
    assert (missing.call.rank, missing.why) == (0, "late")
    assert [each.call.rank for each in missing.behind] == [2]
    assert "  behind it rank 2 waits in recv #1 from rank 1" in in_words(found)


def test_two_threads_in_calls_of_one_group_are_told() -> None:
    job = Job({"world": (0, 1)}, {0: [Op("barrier", "world", 1, 10)], 1: [Op("barrier", "world", 1, 10)]})
    job.step(0)
    log = job.log(0, "timeout")
    second = replace_log(log.calls[0], number=2, kind="all_gather", thread=8, site=Site("train.py", 30, "save"))
    log = replace_log(with_thread(log, 8, "saver", 30), calls=(*log.calls, second))
    log = replace_log(log, groups=tuple(replace_log(each, issued=2) for each in log.groups))
    found = diagnose([log, job.log(1, "timeout")])
    (shared,) = found.shared
    assert (shared.group, shared.ranks) == ("world", (0,))
    text = in_words(found)
    assert "rank 0 uses group world from several threads at once:" in text
    assert "  rank 0 in all_gather #2 (float32, 64 B" in text
    assert diagnose([job.log(0, "timeout"), job.log(1, "timeout")]).shared == ()


def test_calls_that_differ_where_several_threads_make_them_are_hinted_at() -> None:
    calls = [Op("all_reduce", "world", 1, 10), Op("all_gather", "world", 2, 11)]
    job = Job({"world": (0, 1)}, {0: calls, 1: calls[::-1]})
    run(job, random.Random(1))
    logs = [job.log(rank, "timeout") for rank in (0, 1)]
    extra = [replace_log(log.calls[-1], number=2, thread=8) for log in logs]
    logs = [
        replace_log(
            with_thread(log, 8, "saver", 30),
            calls=(*log.calls, call),
            groups=tuple(replace_log(each, issued=2) for each in log.groups),
        )
        for log, call in zip(logs, extra, strict=True)
    ]
    mismatch = diagnose(logs).findings[0]
    assert isinstance(mismatch, Mismatch)
    assert mismatch.hint.endswith(
        "ranks 0, 1 make calls of this group from several threads: give each thread a group of its own"
    )
