"""Stacks of programs, and outputs of NCCL's RAS: read, and said with what calls tell."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_watchdog_lines import hanging, read
from watchdogs_in_memory import Style, watchdog_lines

from commlayer.cli.main import main
from commlayer.diagnosis.diagnosis_words import in_words
from commlayer.diagnosis.findings import Missing
from commlayer.diagnosis.program_stacks import has_stacks, read_stacks, with_places
from commlayer.diagnosis.ras_output import RasOutput, diagnose_ras, read_ras
from commlayer.diagnosis.watchdog_readings import diagnose_watchdogs
from commlayer.profiles.errors import UsageError

SAMPLE = (Path(__file__).parent / "ras_sample.json").read_bytes()
PY_SPY = """Process 4711: python train.py
Python v3.12.4 (/usr/bin/python3.12)

Thread 0x7F2B1C (active): "Thread-3 (_worker)"
    run (threading.py:1012)
Thread 4711 (idle): "MainThread"
    wait (threading.py:355)
    __next__ (torch/utils/data/dataloader.py:210)
    load (batches.py:31)
        Arguments:
            size: 4
    <module> (train.py:88)
"""
FAULT = """rank 5 got SIGUSR2
Thread 0x00007f5c1b7fe640 (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 359 in wait

Current thread 0x00007f5c8a1b4740 (most recent call first):
  File "/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 2968 in all_reduce
  File "/app/train.py", line 41 in step
  File "/app/train.py", line 88 in <module>

Extension modules: numpy (total: 1)
[rank6]: also
Thread 0x00007f5c8a1b4740 [MainThread] (most recent call first):
  File "/app/checkpoint.py", line 7 in save
  File "/app/train.py", line 90 in <module>
"""


def test_stacks_of_py_spy_tell_where_the_main_thread_is() -> None:
    (place,) = read_stacks("dumps/stack_rank_3.txt", PY_SPY.encode())
    assert (place.rank, str(place.site), place.inside.line) == (3, "batches.py:31 in load", 355)
    assert not place.is_in_call
    assert read_stacks("stack.txt", PY_SPY.encode()) == [], "nobody knows whose they are"


def test_stacks_of_faulthandler_tell_whose_they_are_above() -> None:
    five, six = read_stacks("job.log", FAULT.encode())
    assert (five.rank, str(five.site), five.is_in_call) == (5, "/app/train.py:41 in step", True)
    assert (six.rank, str(six.site), six.is_in_call) == (6, "/app/checkpoint.py:7 in save", False)


def test_a_rank_that_a_log_names_some_lines_before_is_not_the_stacks() -> None:
    log = "[rank3]: loss 1.5\n" + "step\n" * 4 + FAULT.partition("\n")[2]
    assert [place.rank for place in read_stacks("job.log", log.encode())] == [6]


def test_the_place_of_a_rank_that_others_wait_for_is_said_with_its_call() -> None:
    job, (ranks, _) = hanging("left", 4)
    ((_, diagnosis),) = diagnose_watchdogs(read(watchdog_lines(job, random.Random(0), Style((2, 7), "plain")))).values()
    (rank,) = ranks
    places = read_stacks(f"rank_{rank}.txt", PY_SPY.encode())
    text = in_words(with_places(diagnosis, places))
    assert f"rank {rank} is at batches.py:31 in load, in no call" in text
    in_call = read_stacks(f"rank_{rank}.txt", FAULT.partition("Extension")[0].encode())
    assert "in no call" not in in_words(with_places(diagnosis, in_call))


def test_places_are_shown_and_not_obeyed() -> None:
    for text in (PY_SPY, FAULT):
        hostile = text.replace("batches.py", "\x1b]0;x\x07batches.py").replace("in save", "in \x1b[31msave")
        places = read_stacks("job.log", f"rank 3\n{hostile}".encode())
        assert places
        assert all(str(place).isprintable() for place in places)


# RAS


LATER = ("05:20:03", "05:21:03")
"""The time in the sample, and another one a minute later."""


def ras(*changes: tuple[str, str]) -> RasOutput:
    text = SAMPLE.decode()
    for before, after in changes:
        text = text.replace(before, after)
    return read_ras("ras.json", text.encode())


def twice(content: object) -> list[RasOutput]:
    """Two outputs of one content, a minute apart."""
    text = json.dumps(content)
    return [read_ras("ras.json", each.encode()) for each in (text, text.replace(*LATER))]


def test_a_rank_with_a_lower_count_is_named_by_its_rank_in_the_job() -> None:
    ((_, diagnosis),) = diagnose_ras([ras(), ras(LATER)]).values()
    (missing,) = diagnosis.waits
    assert (missing.call.rank, missing.call.kind, missing.call.number) == (3, "all_reduce", 120)
    assert diagnosis.has_found
    assert missing.doubt == "it may be in a message, which RAS does not count"
    ((_, moved),) = diagnose_ras([ras(), ras(('"AllReduce": 119', '"AllReduce": 118'), LATER)]).values()
    assert not moved.has_found
    assert "the job makes progress" in in_words(moved)


@pytest.mark.parametrize("other", [(), (("05:20:03", "05:20:04"),)], ids=["a copy", "too soon"])
def test_one_output_does_not_tell_who_is_late(other: tuple[tuple[str, str], ...]) -> None:
    for outputs in ([ras()], [ras(), ras(*other)]):
        ((_, diagnosis),) = diagnose_ras(outputs).values()
        assert not diagnosis.has_found, "it may only be late"
        assert "take another a minute later" in in_words(diagnosis)


def test_a_job_that_goes_on_elsewhere_does_not_hang() -> None:
    later = ras(('"AllReduce": 57', '"AllReduce": 58'), LATER)
    ((_, diagnosis),) = diagnose_ras([ras(), later]).values()
    assert not diagnosis.has_found
    assert "the job makes progress" in in_words(diagnosis)


def test_counts_that_stand_still_alike_are_open() -> None:
    even = ('"AllReduce": 119', '"AllReduce": 120')
    ((_, diagnosis),) = diagnose_ras([ras(even), ras(even, LATER)]).values()
    assert not diagnosis.has_found
    assert "nothing is wrong" not in in_words(diagnosis)
    gone_on = ras(even, ('"AllReduce": 57', '"AllReduce": 58'), LATER)
    assert "nothing is wrong" in in_words(diagnose_ras([ras(even), gone_on])[""][1])


def test_ranks_in_a_circle_over_two_communicators_are_found() -> None:
    content = json.loads(SAMPLE)
    content["communicators"][0]["ranks"][2]["collective_counts"]["AllReduce"] = 56  # job's rank 2 is behind here
    text = in_words(diagnose_ras(twice(content))[""][1])
    assert "ranks 2 and 3 wait for each other, in a circle of 2" in text


def test_dead_and_silent_ranks_are_told() -> None:
    content = json.loads(SAMPLE)
    whole = content["communicators"][0]
    gone = whole["ranks"].pop(1)
    whole["missing_ranks"] = [{**gone, "status": {"unresponsive": True, "considered_dead": True}}]
    (_, diagnosis) = diagnose_ras(twice(content))[""]
    (finding,) = (each for each in diagnosis.findings if isinstance(each, Missing))
    assert (finding.call.rank, finding.how) == (1, "RAS considers it dead")
    (_, once) = diagnose_ras(twice(content)[:1])[""]
    assert once.has_found
    assert "RAS considers rank 1 dead" in in_words(once)
    whole["missing_ranks"][0]["status"]["considered_dead"] = False
    assert "rank 1 did not answer RAS" in in_words(diagnose_ras(twice(content))[""][1])
    (_, once) = diagnose_ras(twice(content)[:1])[""]
    assert not once.has_found
    assert "rank 1 did not answer RAS" in in_words(once)
    assert "nothing is wrong" not in in_words(once)


TEXT = """NCCL version 2.28.3 compiled with CUDA 12.8
CUDA runtime version 12080, driver version 12080

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         4         8         8   RUNNING  MISMATCH

Errors
======

Warnings
========

#0-0 (cf264af53edbe986) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 27
  Rank 3 has launched up to operation 26 -- GPU 3 managed by process 2487962 on node 10.0.0.1

"""


def test_outputs_that_follow_each_other_in_a_text_are_compared(tmp_path: Path) -> None:
    (tmp_path / "ras.txt").write_text(TEXT, encoding="utf-8")
    assert CliRunner().invoke(main, ["diagnose", str(tmp_path)]).exit_code == 0, "it may only be late"
    (tmp_path / "ras.txt").write_text(TEXT + TEXT, encoding="utf-8")
    result = CliRunner().invoke(main, ["diagnose", str(tmp_path)])
    assert result.exit_code == 1
    assert "2 outputs of NCCL's RAS" in result.output
    assert result.stdout.startswith("logs of ranks")
    assert "\nlikely cause: rank 3 is in no recorded call (it may be in a message, which RAS does not " in result.stdout
    assert "rank 3 has not come to all_reduce #27" in result.output


def test_the_text_of_ras_says_the_same() -> None:
    output = read_ras("ras.txt", TEXT.encode())
    ((_, diagnosis),) = diagnose_ras([output, output]).values()
    (missing,) = diagnosis.waits
    assert (missing.call.rank, missing.call.number) == (3, 27)
    assert len(missing.waiting) == 7
    incomplete = TEXT.replace(
        "MISMATCH\n  Comm",
        "INCOMPLETE\n  Missing communicator data from 1 rank\n  Rank 5 -- GPU 5\n  C",
    )
    assert read_ras("ras.txt", incomplete.encode()).communicators[0].silent == {5}


JOB_FAULTS = """DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 5

#0-0 (cf264af53edbe986) ERROR
  Asynchronous error on 1 rank
  Rank 2 reported unhandled system error -- GPU 2 managed by process 2487962 on node 10.0.0.1

"""


def test_processes_and_errors_that_a_text_names_are_told() -> None:
    output = read_ras("ras.txt", TEXT.replace("Warnings\n", JOB_FAULTS + "Warnings\n").encode())
    assert output.communicators[0].silent == {5}
    text = in_words(diagnose_ras([output])[""][1])
    assert "RAS writes DEAD: 1 job process is considered dead" in text
    assert "Process 3487984 on node 172.16.64.213 managing GPU 5" in text
    assert "ERROR of communicator 0xcf264af53edbe986: Asynchronous error on 1 rank; Rank 2 reported" in text
    assert "rank 5 did not answer RAS" in text


def test_counts_are_of_the_communicator_and_the_kind_above_them() -> None:
    status = "  Communicator ranks have different status\n  2 ranks have status FINALIZE\n  Rank 1 -- GPU 1\n"
    second = f"#0-1 (ab) MISMATCH\n{status}"
    output = read_ras("ras.txt", (TEXT + second).encode())
    assert [each.counts.get(1) for each in output.communicators] == [{"AllReduce": 27}, None]


def test_ranks_that_ras_does_not_list_are_not_taken_to_be_even() -> None:
    """It lists those of rare counts alone."""
    text = TEXT.replace("  7 ranks", "  5 ranks").replace("  Rank 3 has", "  3 ranks have").replace(" -- GPU 3", "")
    assert "3 ranks have launched up to operation 26" in text
    (_, diagnosis) = diagnose_ras([read_ras("ras.txt", text.encode())] * 2)[""]
    assert not diagnosis.waits
    assert "cannot tell which ranks of communicator 0xcf264af53edbe986 have launched fewer AllReduce" in in_words(
        diagnosis
    )
    listed = text.replace("operation 26", "operation 26\n  Rank 1 -- GPU 1\n  Rank 3 -- GPU 3\n  Rank 4 -- GPU 4")
    (_, diagnosis) = diagnose_ras([read_ras("ras.txt", listed.encode())] * 2)[""]
    assert {missing.call.rank for missing in diagnosis.waits} == {1, 3, 4}


def test_one_text_in_two_places_is_one_output(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ras.txt").write_text(TEXT, encoding="utf-8")
    assert CliRunner().invoke(main, ["diagnose", str(tmp_path)]).exit_code == 0
    (tmp_path / "a" / "ras.txt").rename(tmp_path / "a" / "ras2.txt")
    assert CliRunner().invoke(main, ["diagnose", str(tmp_path)]).exit_code == 1


def test_names_of_communicators_are_bounded_and_shown() -> None:
    text = in_words(diagnose_ras([ras(("0x77aa", "0x\\u001b[31m"))])[""][1])
    assert "\x1b" not in text
    with pytest.raises(UsageError, match="64"):
        ras(("0x77aa", "a" * 65))


@pytest.mark.parametrize("text", [PY_SPY, FAULT, TEXT])
def test_every_shortened_text_is_read(text: str) -> None:
    for end in range(0, len(text), 3):
        data = text[:end].encode()
        assert len(read_stacks("rank_1.txt", data)) <= 3 if has_stacks(data) else True
        diagnose_ras([read_ras("ras.txt", data)])
