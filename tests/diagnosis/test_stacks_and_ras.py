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


def ras(change: str = "", by: str = "") -> RasOutput:
    return read_ras("ras.json", SAMPLE.decode().replace(change, by).encode())


def test_a_rank_with_a_lower_count_is_named_by_its_rank_in_the_job() -> None:
    ((_, diagnosis),) = diagnose_ras([ras(), ras()]).values()
    (missing,) = diagnosis.waits
    assert (missing.call.rank, missing.call.kind, missing.call.number) == (3, "all_reduce", 120)
    assert diagnosis.has_found
    ((_, once),) = diagnose_ras([ras()]).values()
    assert not once.has_found, "it may only be late"
    assert "take another a minute later" in in_words(once)
    ((_, moved),) = diagnose_ras([ras(), ras('"AllReduce": 119', '"AllReduce": 118')]).values()
    assert not moved.has_found


def test_ranks_in_a_circle_over_two_communicators_are_found() -> None:
    content = json.loads(SAMPLE)
    content["communicators"][0]["ranks"][2]["collective_counts"]["AllReduce"] = 56  # job's rank 2 is behind here
    output = read_ras("ras.json", json.dumps(content).encode())
    text = in_words(diagnose_ras([output, output])[""][1])
    assert "ranks 2 and 3 wait for each other, in a circle of 2" in text


def test_dead_and_silent_ranks_are_told() -> None:
    content = json.loads(SAMPLE)
    whole = content["communicators"][0]
    gone = whole["ranks"].pop(1)
    whole["missing_ranks"] = [{**gone, "status": {"unresponsive": True, "considered_dead": True}}]
    output = read_ras("ras.json", json.dumps(content).encode())
    (_, diagnosis) = diagnose_ras([output, output])[""]
    (finding,) = (each for each in diagnosis.findings if isinstance(each, Missing))
    assert (finding.call.rank, finding.how) == (1, "RAS considers it dead")
    whole["missing_ranks"][0]["status"]["considered_dead"] = False
    output = read_ras("ras.json", json.dumps(content).encode())
    assert "rank 1 did not answer RAS" in in_words(diagnose_ras([output, output])[""][1])


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


@pytest.mark.parametrize("text", [PY_SPY, FAULT, TEXT])
def test_every_shortened_text_is_read(text: str) -> None:
    for end in range(0, len(text), 3):
        data = text[:end].encode()
        assert len(read_stacks("rank_1.txt", data)) <= 3 if has_stacks(data) else True
        diagnose_ras([read_ras("ras.txt", data)])
