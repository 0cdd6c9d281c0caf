"""Lines of NCCL's watchdogs: read in every form of torch's and of launchers, and judged right or
not at all."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable

import pytest
from jobs_in_memory import Groups, Job, Op, Program, run
from watchdogs_in_memory import PREFIXES, RELEASES, Style, mesh_groups, watchdog_lines

from commlayer.diagnosis.diagnosis_words import in_words
from commlayer.diagnosis.findings import Cycle, Diagnosis, Mismatch
from commlayer.diagnosis.program_ends import ProgramEnd
from commlayer.diagnosis.watchdog_lines import EITHER, WatchdogLines, read_watchdog_lines
from commlayer.diagnosis.watchdog_readings import diagnose_watchdogs

EP, DP = "EXPERT_MODEL_PARALLEL_GROUP", "DATA_PARALLEL_GROUP"


def read(lines: list[str]) -> WatchdogLines:
    return read_watchdog_lines([("job.log", "\n".join(lines).encode())])


def judged(lines: list[str]) -> Diagnosis:
    ((_, diagnosis),) = diagnose_watchdogs(read(lines)).values()
    return diagnosis


# Hanging jobs


def step_program(groups: Groups, steps: int) -> Program:
    """A training step: all_to_all of experts, reductions over data, a reduction over all; every
    rank the same."""
    program: Program = {rank: [] for rank in groups["world"]}
    mark = 0
    for _ in range(steps):
        for key in (*(key for key in groups if key != "world"), "world"):
            mark += 1
            kind = "all_to_all" if key.startswith(EP) else "all_reduce"
            for rank in groups[key]:
                program[rank].append(Op(kind, key, mark, 100 + mark))
    return program


Fault = tuple[set[int], str]
"""Ranks at fault, and the group in which others wait for them."""


def skipped(random_: random.Random, groups: Groups, program: Program) -> Fault:
    """A rank leaves out one call of its experts: its numbers are behind from then on."""
    rank = random_.choice(sorted(program))
    calls = [op for op in program[rank] if op.group.startswith(EP)]
    gone = random_.choice(calls)
    program[rank] = [op for op in program[rank] if op is not gone]
    return {rank}, gone.group


def left(random_: random.Random, groups: Groups, program: Program) -> Fault:
    """A rank's program ends, or waits elsewhere, before one of its calls."""
    rank = random_.choice(sorted(program))
    at = random_.randrange(len(program[rank]))
    group = program[rank][at].group
    del program[rank][at:]
    return {rank}, group


def reordered(random_: random.Random, groups: Groups, program: Program) -> Fault:
    """A rank reduces over all before its last experts' call."""
    rank = random_.choice(sorted(program))
    ops = program[rank]
    at = max(index for index, op in enumerate(ops) if op.group.startswith(EP))
    ops.insert(at, ops.pop())
    return {rank}, ops[at + 1].group


def resized(random_: random.Random, groups: Groups, program: Program) -> Fault:
    """A rank's last reduction over all has another size. Its members' calls never end."""
    rank = random_.choice(sorted(program))
    last = program[rank][-1]
    program[rank][-1] = Op(last.kind, last.group, last.mark, last.line, sent=32)
    return {rank}, "world"


FAULTS: dict[str, Callable[[random.Random, Groups, Program], Fault]] = {
    "skipped": skipped,
    "left": left,
    "reordered": reordered,
    "resized": resized,
}


def hanging(fault: str, seed: int) -> tuple[Job, Fault]:
    random_ = random.Random(f"{fault}{seed}")
    dp, ep = random_.choice([(1, 8), (2, 4), (1, 4), (4, 4), (2, 8), (4, 8), (2, 2), (1, 2)])
    groups = mesh_groups(dp, ep)
    program = step_program(groups, 3)
    truth = FAULTS[fault](random_, groups, program)
    job = Job(groups, program)
    run(job, random_)
    if fault == "resized":  # on a device, both sizes were begun, and nobody knows how it would end
        for here in job.ranks.values():
            here.done["world"] = here.issued["world"] - 1
        job._settle = lambda: None  # type: ignore[method-assign]
    return job, truth


def verdict(diagnosis: Diagnosis, truth: Fault) -> str:
    """Tell whether the first finding names the ranks at fault and their group: right, wrong, or
    cannot tell."""
    ranks, _ = truth
    found = [*diagnosis.findings, *(each for each in diagnosis.waits if each.why != "silent")]
    cause = diagnosis.cause
    if not found and cause is not None and cause.certainty != "unknown":
        return "right" if set(cause.ranks) == ranks else "wrong"
    if not found:
        assert any("cannot tell" in sentence for sentence in diagnosis.open), in_words(diagnosis)
        return "cannot tell"
    first = found[0]
    if isinstance(first, Cycle):
        is_right = ranks <= {step.call.rank for step in first.steps}
        return "right" if is_right else "wrong"
    if isinstance(first, Mismatch):
        return "right" if set(first.odd) == ranks or len(first.calls) == 2 else "wrong"
    return "right" if {each.call.rank for each in diagnosis.waits} == ranks else "wrong"


def test_of_hanging_jobs_most_are_named_and_none_wrongly() -> None:
    """Their watchdogs' lines are all that is known of 200 hangs, of 2 to 32 ranks, as five releases
    write them, behind five launchers."""
    outcomes: Counter[tuple[str, str]] = Counter()
    wrong = []
    for fault in FAULTS:
        for seed in range(50):
            random_ = random.Random(seed)
            job, truth = hanging(fault, seed)
            style = Style(random_.choice(RELEASES), random_.choice(list(PREFIXES)))
            diagnosis = judged(watchdog_lines(job, random_, style))
            outcome = verdict(diagnosis, truth)
            outcomes[fault, outcome] += 1
            if outcome == "wrong":
                wrong.append(f"{fault} {seed} {truth}: {in_words(diagnosis)}")
    assert not wrong, wrong[0]
    rights = sum(count for (_, outcome), count in outcomes.items() if outcome == "right")
    assert rights >= 0.8 * sum(outcomes.values()), outcomes


def shared_names(lines: list[str]) -> list[str]:
    """The lines of a job whose groups of a mesh's dimension all go by one name, as torch's
    ``split_group`` gives it."""
    names: dict[str, str] = {}
    for line in lines:
        for guid, description in re.findall(r"PG GUID (\d+)\((\w+)\)", line):
            names.setdefault(description, guid)
    described = [
        re.sub(r"PG GUID \d+\((\w+)\)", lambda match: f"PG GUID {names[match[1]]}({match[1]})", line) for line in lines
    ]
    return [line.replace(f"({EP})", "(mesh_ep)").replace(f"({DP})", "(mesh_dp)") for line in described]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", range(40))
def test_what_lines_do_not_say_is_not_guessed(fault: str, seed: int) -> None:
    """Ranks without lines, lines that end early while ranks are seconds apart, and groups that
    share a name."""
    random_ = random.Random(seed)
    job, truth = hanging(fault, seed)
    ranks = sorted(job.ranks)
    style = Style(random_.choice(RELEASES[2:]), random_.choice(list(PREFIXES)))
    absent = random_.sample(ranks, random_.randrange(1, len(ranks)))
    assert verdict(judged(watchdog_lines(job, random_, style, absent=absent)), truth) != "wrong"
    assert verdict(judged(shared_names(watchdog_lines(job, random_, style))), truth) != "wrong"
    late = {rank: random_.uniform(0, 25) for rank in ranks}
    lines = watchdog_lines(job, random_, style, late_s=late)
    assert verdict(judged(lines), truth) != "wrong"
    assert verdict(judged(lines[: len(lines) // 2]), truth) != "wrong"


@pytest.mark.parametrize("seed", range(40))
def test_a_transfer_that_hangs_on_all_ranks_is_nobodys_fault(seed: int) -> None:
    random_ = random.Random(seed)
    groups = mesh_groups(*random_.choice([(1, 8), (2, 4), (2, 2), (4, 4)]))
    program = step_program(groups, 2)
    key = random_.choice(list(groups))
    for rank in groups[key]:  # all members are in the same call, and behind it nobody goes on
        ops = program[rank]
        program[rank] = ops[: 1 + max(index for index, op in enumerate(ops) if op.group == key)]
    for rank in set(groups["world"]) - set(groups[key]):
        program[rank] = program[rank][:-1]
    job = Job(groups, program)
    run(job, random_)
    for here in job.ranks.values():
        here.done[key] = here.issued[key] - 1 if key in here.issued else 0
    job._settle = lambda: None  # type: ignore[method-assign]
    late = {rank: random_.uniform(0, 25) for rank in job.ranks}
    lines = watchdog_lines(job, random_, Style((2, 7), "plain"), late_s=late)
    for shown in (lines, lines[: len(lines) // 2]):
        diagnosis = judged(shown)
        assert not diagnosis.findings, in_words(diagnosis)
        assert not diagnosis.waits, in_words(diagnosis)
        assert diagnosis.cause is None or diagnosis.cause.certainty == "unknown", in_words(diagnosis)
        assert diagnosis.has_found


# What follows without knowing who is in which group


def stopped_at(rank: int, num_calls: int, groups: Groups) -> Job:
    """A job of which one rank makes so many calls, and no more, and none is of all ranks."""
    program = {each: [op for op in ops if op.group != "world"] for each, ops in step_program(groups, 2).items()}
    program[rank] = program[rank][:num_calls]
    job = Job(groups, program)
    run(job, random.Random(1))
    return job


def pairs(size: int) -> Groups:
    """Groups of neighbours, and of ranks with one place among them, of which lines of 4 ranks tell no members."""
    rows = {f"tp {rank}": (rank, rank + 1) for rank in range(0, size, 2)}
    return {"world": tuple(range(size)), **rows, "dp 0": tuple(range(0, size, 2)), "dp 1": tuple(range(1, size, 2))}


def test_the_only_rank_in_no_call_is_named_where_all_others_wait() -> None:
    lines = watchdog_lines(stopped_at(0, 1, pairs(4)), random.Random(0), Style((2, 7), "plain"))
    cause = judged(lines).cause
    assert cause is not None
    assert (cause.what, cause.certainty, cause.ranks) == ("absent", "likely", (0,))
    assert cause.words == "rank 0 is in no call, and ranks 1, 2, 3 wait in calls that do not end"
    in_another = [re.sub(r"(Rank 0\].* Last enqueued NCCL work: )-1", r"\g<1>1", line) for line in lines]
    assert in_another != lines
    assert judged(in_another).cause is None, "it may wait in a call with a longer timeout"
    assert judged([line for line in lines if "terminated with exception" not in line]).cause is None, "too early to say"


def test_a_rank_without_a_line_is_named_and_not_blamed() -> None:
    job = stopped_at(2, 1, pairs(4))
    diagnosis = judged(watchdog_lines(job, random.Random(0), Style((2, 3), "plain"), absent=(2,)))
    assert diagnosis.cause is not None
    assert (diagnosis.cause.what, diagnosis.cause.certainty, diagnosis.cause.ranks) == ("no dump", "unknown", (2,))
    assert in_words(diagnosis).startswith("the cause cannot be told: rank 2 has left no line: it is dead or stopped")


def test_a_rank_that_ended_is_named_whatever_its_groups() -> None:
    job = stopped_at(1, 1, pairs(4))
    lines = watchdog_lines(job, random.Random(0), Style((2, 3), "plain"), absent=(1,))
    ((_, diagnosis),) = diagnose_watchdogs(read(lines), [ProgramEnd(1, "by SIGKILL")]).values()
    assert diagnosis.cause is not None
    assert (diagnosis.cause.what, diagnosis.cause.certainty, diagnosis.cause.ranks) == ("ended", "likely", (1,))


@pytest.mark.parametrize("release", [(2, 4), (2, 7)])
def test_places_in_groups_side_by_side_tell_the_mesh(release: tuple[int, int]) -> None:
    """Rank 3 leaves out a call of a pair: its partner waits there alone, and who that is follows from the other pairs."""
    groups = pairs(8)
    program = step_program(groups, 2)
    for rank in groups["world"]:  # in the second step only pairs make calls
        program[rank] = [op for at, op in enumerate(program[rank]) if at < 3 or op.group.startswith("tp")]
        program[rank].append(Op("barrier", "world", 99, 199))
    for rank in (2, 4, 6):  # these wait in their pairs, and their partners in the barrier
        program[rank + 1] = [op for op in program[rank + 1] if not (op.group.startswith("tp") and op.mark > 7)]
    job = Job(groups, program)
    run(job, random.Random(1))
    diagnosis = judged(watchdog_lines(job, random.Random(0), Style(release, "plain")))
    circles = [finding for finding in diagnosis.findings if isinstance(finding, Cycle)]
    assert circles, in_words(diagnosis)
    assert {step.call.rank for step in circles[0].steps} in ({2, 3}, {4, 5}, {6, 7})


def test_what_a_gathering_call_gathers_tells_how_many_ranks_it_is_of() -> None:
    """Rank 1 gathers alone in a group of all ranks, and the others wait in another one of all."""
    groups: dict[str, tuple[int, ...]] = {"world": (0, 1, 2, 3), "shard": (0, 1, 2, 3)}
    program = {rank: [Op("all_reduce", "world", 1, 101)] for rank in range(4)}
    program[1] = [Op("all_gather", "shard", 1, 102)]
    job = Job(groups, program)
    run(job, random.Random(1))
    diagnosis = judged(watchdog_lines(job, random.Random(0), Style((2, 7), "plain")))
    assert any(isinstance(finding, Cycle) for finding in diagnosis.findings), in_words(diagnosis)


def test_a_transfer_that_hangs_is_said_where_all_that_are_known_have_come() -> None:
    groups = mesh_groups(2, 4)
    program = step_program(groups, 2)
    job = Job(groups, program)
    run(job, random.Random(1))
    job._settle()
    for here in job.ranks.values():
        here.done["world"] = here.issued["world"] - 1
    job._settle = lambda: None  # type: ignore[method-assign]
    lines = watchdog_lines(job, random.Random(0), Style((2, 7), "plain"))
    diagnosis = judged(lines)
    assert sorted(waiter.call.rank for waiter in diagnosis.under_way) == list(range(8))
    assert not judged([line for line in lines if "[rank3]" not in line]).under_way, "rank 3 may not have come"


# Lines as people post them


OLD = """[80746] [rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation \
timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=46, NumelOut=46, Timeout(ms)=600000) ran for 600060 \
milliseconds before timing out.
[80748] [rank0]:[E321 02:07:08.465150152 ProcessGroupNCCL.cpp:1664] [PG 1 Rank 0] Exception (either an error or \
timeout) detected by watchdog at work: 1580, last enqueued NCCL work: 1582, last completed NCCL work: 1579."""
MIDDLE = """Epoch 10/10: 240it [05:55,  1.47s/it, loss=5.46][rank13]:[E218 04:54:22.864467604 ProcessGroupNCCL.cpp:616] \
[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=216, OpType=ALLTOALL_BASE, NumelIn=1379328, \
NumelOut=1572864, Timeout(ms)=600000) ran for 600045 milliseconds before timing out.
 2025-02-18 12:54 [rank13]:[E218 04:54:22.864535778 ProcessGroupNCCL.cpp:1795] [PG ID 11 PG GUID 119 Rank 1] Exception \
(either an error or timeout) detected by watchdog at work: 216, last enqueued NCCL work: 220, last completed NCCL work: \
215."""
NEW = """2026-08-08T04:21:41Z stderr F [rank368]:[E808 04:21:41.160918398 ProcessGroupNCCL.cpp:655] [Rank 3] Watchdog \
caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) \
ran for 600001 milliseconds before timing out.
[rank368]:[E808 04:21:41.161005534 ProcessGroupNCCL.cpp:2299] [PG ID 2 PG GUID 5(EXPERT_MODEL_PARALLEL_GROUP) Rank 3]  \
failure detected by watchdog at work sequence id: 5 PG status: last enqueued work: 9, last started work: 5 \
(ALLREDUCE), last completed work: 4
[rank368]:[E808 04:21:41.161011710 ProcessGroupNCCL.cpp:693] Stack trace of the failed collective:
#0 all_reduce from /usr/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:2968
#1 wrapper from /usr/lib/python3.12/site-packages/torch/distributed/c10d_logger.py:83
#2 reduce_grads from /app/train.py:482
#3 <module> from /app/train.py:900

[rank368]:[E808 04:22:41.161045406 ProcessGroupNCCL.cpp:2147] [PG ID 0 PG GUID 0(default_pg) Rank 368] Received a dump \
signal due to a collective timeout from this local rank and we will try our best to dump the debug info. Last enqueued \
NCCL work: 58, last completed NCCL work: 58.This is most likely caused by incorrect usages of collectives"""


@pytest.mark.parametrize(
    ("text", "rank", "group", "number", "enqueued", "started"),
    [
        (OLD, 0, ("1", "", 0), 1580, 1582, -1),
        (MIDDLE, 13, ("119", "", 1), 216, 220, -1),
        (NEW, 368, ("5", EP, 3), 5, 9, 5),
        (OLD.replace("1579.", "18446744073709551615."), 0, ("1", "", 0), 1580, 1582, -1),
    ],
)
def test_lines_of_each_release_are_read(
    text: str, rank: int, group: tuple[str, str, int], number: int, enqueued: int, started: int
) -> None:
    (report,) = read([text]).reports
    own = report.groups[group[0]]
    assert report.rank == rank
    assert (own.name, own.description, own.place) == group
    assert own.call is not None
    assert (own.call.number, own.enqueued, own.started) == (number, enqueued, started)
    assert own.call.noticed_ns > own.call.issued_ns > 0
    if text is NEW:
        assert str(own.site) == "/app/train.py:482 in reduce_grads"
        assert report.groups["0"].enqueued == 58


def test_lines_that_two_ranks_wrote_at_once_and_those_of_others_are_not_used() -> None:
    mixed = NEW.replace("[rank368]:", "[rank3[]:").replace("default_pg) Rank 368", "default_pg) Rank 12")
    reports = read(
        [
            mixed,
            "[rank5]:[E808 04:21:41.1 ProcessGroupNCCL.cpp:655] [PG ID 0 PG GUID 0(default_pg) Rank 7] x",
        ]
    )
    assert [report.rank for report in reports.reports] == [12]
    assert reports.reports[0].groups["0"].call is None


def test_a_file_named_by_its_rank_tells_the_rank() -> None:
    bare = re.sub(r"\[rank\d+\]:", "", NEW)
    lines = read_watchdog_lines([("logs/rank_368.txt", bare.encode())])
    assert [report.rank for report in lines.reports] == [368]
    assert "the rank is missing" in read([re.sub(r"\[rank\d+\]:", "", MIDDLE)]).remarks[0]


def test_only_the_last_failure_of_a_job_that_was_started_again_counts() -> None:
    lines = read(
        [
            NEW,
            NEW.replace("E808 04:", "E808 09:").replace("=5, OpType", "=7, OpType").replace("id: 5", "id: 7"),
        ]
    )
    (report,) = lines.reports
    assert report.groups["5"].call is not None
    assert report.groups["5"].call.number == 7
    assert "started again" in lines.remarks[0]


def test_what_ray_leaves_out_is_no_evidence() -> None:
    job, _ = hanging("left", 4)
    lines = watchdog_lines(job, random.Random(0), Style((2, 7), "ray"))
    assert judged(lines).waits
    thinned = judged([*lines[:-1], f"{lines[-1]} [repeated 14x across cluster]"])
    assert not thinned.waits
    assert "RAY_DEDUP_LOGS=0" in in_words(thinned)


def test_jobs_that_share_a_log_of_ray_are_judged_one_by_one() -> None:
    lines = []
    for name in ("Actor", "Critic"):
        job, _ = hanging("left", 4)
        shown = watchdog_lines(job, random.Random(0), Style((2, 7), "ray"))
        lines += [line.replace("(Trainer pid", f"({name} pid") for line in shown]
    results = diagnose_watchdogs(read(lines))
    assert list(results) == ["Actor", "Critic"]
    assert all(diagnosis.waits for _, diagnosis in results.values())


def test_messages_are_not_compared_by_their_numbers() -> None:
    job, _ = hanging("resized", 3)
    lines = watchdog_lines(job, random.Random(0), Style((2, 7), "plain"))
    text = in_words(judged([re.sub(r"OpType=\w+", "OpType=COALESCED", line) for line in lines]))
    assert "messages are numbered by each rank for itself" in text
    assert "differ" not in text
    assert "TORCH_FR_BUFFER_SIZE" in text


def test_the_exception_of_a_watchdog_alone_names_the_call_and_no_time() -> None:
    line = (
        "[rank1]:[E606 09:10:08.365393482 ProcessGroupNCCL.cpp:2197] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process "
        "group watchdog thread terminated with exception: [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=1, OpType=ALLGATHER, NumelIn=1, NumelOut=4, Timeout(ms)=600000) ran for 600004 milliseconds "
        "before timing out."
    )
    call = read([line]).reports[0].groups["0"].call
    assert call is not None
    assert (call.number, call.kind, call.issued_ns, call.noticed_ns) == (1, "ALLGATHER", 0, 0)


def test_ranks_that_counted_fewer_calls_of_the_group_of_all_are_named() -> None:
    """Two of eight ranks were in another library's call, as their lines posted in public show."""
    lines = []
    for rank in range(8):
        start = f"[rank{rank}]:[E810 03:04:1{rank % 2}.061727749 ProcessGroupNCCL.cpp:683]"
        group = f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
        if rank not in (0, 4):
            lines += [
                f"{start} [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=78, OpType=BROADCAST, "
                "NumelIn=80, NumelOut=80, Timeout(ms)=600000) ran for 600096 milliseconds before timing out.",
                f"{start} {group}  failure detected by watchdog at work sequence id: 78 PG status: last enqueued work: 79, "
                "last completed work: 77",
            ]
        count = 77 if rank in (0, 4) else 79
        lines.append(
            f"{start} {group} Received a dump signal due to a collective timeout from  rank 1 and we will try our best to dump "
            f"the debug info. Last enqueued NCCL work: {count}, last completed NCCL work: 77.This is most likely"
        )
    diagnosis = judged(lines)
    assert [missing.call.rank for missing in diagnosis.waits] == [0, 4]
    assert "rank 0 has not come to broadcast #78 of group default_pg" in in_words(diagnosis)
    assert diagnosis.assumed == ()


# Lines that lie in each other


def timed_out(rank: int, kind: str, group: str = "") -> str:
    """The line of a call that timed out; of the exception that a watchdog ends with in ``group``."""
    head = f"{group} Process group watchdog thread terminated with exception: " if group else ""
    return (
        f"[rank{rank}]:[E1031 10:00:00.100000000 ProcessGroupNCCL.cpp:616] {head}[Rank {rank}] Watchdog caught "
        f"collective operation timeout: WorkNCCL(SeqNum=5, OpType={kind}, NumelIn=8, NumelOut=8, "
        "Timeout(ms)=600000) ran for 600000 milliseconds before timing out."
    )


def status(rank: int, group: str) -> str:
    return (
        f"[rank{rank}]:[E1031 10:00:00.400000000 ProcessGroupNCCL.cpp:1785] {group} Exception (either an error or "
        "timeout) detected by watchdog at work: 5, last enqueued NCCL work: 5, last completed NCCL work: 4."
    )


@pytest.mark.parametrize("order", ["ABba", "ABab", "BAba"])
@pytest.mark.parametrize("has_exception", [False, True])
def test_watchdogs_of_which_lines_lie_in_each_other_swap_no_kinds(order: str, has_exception: bool) -> None:
    lines = []
    for rank, its_order in ((0, "AaBb"), (1, order)):
        dp, tp = f"[PG ID 1 PG GUID 1(dp) Rank {rank}]", f"[PG ID 2 PG GUID 2(tp) Rank {rank}]"
        each = {
            "A": timed_out(rank, "ALLREDUCE"),
            "a": status(rank, dp),
            "B": timed_out(rank, "ALLGATHER"),
            "b": status(rank, tp),
        }
        lines += [each[letter] for letter in its_order]
        if has_exception:
            lines += [timed_out(rank, "ALLREDUCE", dp), timed_out(rank, "ALLGATHER", tp)]
    diagnosis = judged(lines)
    assert diagnosis.findings == ()
    calls = {name: group.call and group.call.kind for name, group in read(lines).reports[1].groups.items()}
    assert calls == ({"1": "ALLREDUCE", "2": "ALLGATHER"} if has_exception else {"1": EITHER, "2": EITHER})
    assert ("two of the calls of rank 1 cannot be told apart" in in_words(diagnosis)) is not has_exception


def test_names_of_groups_are_shown_and_not_obeyed() -> None:
    group = "[PG ID 1 PG GUID 1\x1b[2J(d\x1b[31mp) Rank 0]"
    diagnosis = judged([timed_out(0, "ALLREDUCE"), status(0, group)])
    assert "d\\x1b[31mp" in in_words(diagnosis)
    assert "\x1b" not in in_words(diagnosis)


def test_lines_that_name_no_rank_are_told_of() -> None:
    """torch before 2.2 has no rank in front."""
    old = judged([timed_out(3, "ALLREDUCE").replace("[rank3]:", "")])
    assert old.has_found
    assert "the rank is missing in 1 line of watchdogs" in in_words(old)
    assert "nothing is wrong" not in in_words(old)
    assert diagnose_watchdogs(read(["The last enqueued work of a group is printed by the watchdog."])) == {}


def test_calls_that_count_anew_are_of_a_later_failure_however_soon() -> None:
    """Rank 2 stays away from call 50; started anew three minutes later, rank 1 does from call 5."""
    lines = []
    for minute, number, absent in ((0, 50, 2), (3, 5, 1)):
        for rank in {0, 1, 2} - {absent}:
            start = f"[rank{rank}]:[E1128 10:0{minute}:00.00000{rank} ProcessGroupNCCL.cpp:632]"
            lines += [
                f"{start} [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number}, "
                "OpType=ALLREDUCE, NumelIn=64, NumelOut=64, Timeout(ms)=60000) ran for 60020 milliseconds before timing out.",
                f"{start} [PG ID 0 PG GUID 0(default_pg) Rank {rank}]  failure detected by watchdog at work sequence id: "
                f"{number} PG status: last enqueued work: {number}, last completed work: {number - 1}",
            ]
    read = read_watchdog_lines([("job.log", "\n".join(lines).encode())])
    assert {report.rank: report.groups["0"].enqueued for report in read.reports} == {0: 5, 2: 5}
    assert read.remarks == ("lines of an earlier failure are left out: the job was started again",)
