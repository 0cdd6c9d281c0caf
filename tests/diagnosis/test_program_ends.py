"""How programs have ended, from the text log of a job: by themselves, and not as a consequence."""

from __future__ import annotations

import random

import pytest
from hanging_programs import hangs, stuck
from watchdogs_in_memory import Style, watchdog_lines

from commlayer.diagnosis.findings import Diagnosis, Missing, NamedCall
from commlayer.diagnosis.program_ends import ProgramEnd, has_ends, read_ends, with_ends
from commlayer.diagnosis.watchdog_lines import read_watchdog_lines
from commlayer.diagnosis.watchdog_readings import diagnose_watchdogs

TRACEBACK = """[rank3]: Traceback (most recent call last):
[rank3]:   File "/app/train.py", line 41, in <module>
[rank3]:     loss = step(batch)
[rank1]: Traceback (most recent call last):
[rank3]:   File "/usr/lib/python3.11/site-packages/torch/nn/modules/module.py", line 7, in forward
[rank3]:     return inner()
[rank3]: ValueError: expected 4 rows, got 3
[rank1]: torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.
"""
FAILURE = """Root Cause (first observed failure):
[0]:
  time      : 2026-09-03_05:20:03
  host      : node1
  rank      : 5 (local_rank: 1)
  exitcode  : {code} (pid: 4242)
  error_file: <N/A>
"""


def test_an_exception_ends_its_rank_and_one_of_a_broken_call_does_not() -> None:
    data = TRACEBACK.encode()
    assert has_ends(data)
    assert read_ends(data) == [ProgramEnd(3, "by ValueError: expected 4 rows, got 3 at /app/train.py:41 in <module>")]


@pytest.mark.parametrize("prefix", ["", "(Trainer pid=58, ip=10.0.0.1) ", "2026-09-03T05:20:03Z stderr F "])
def test_launchers_may_write_before_a_line(prefix: str) -> None:
    data = "".join(f"{prefix}{line}\n" for line in TRACEBACK.splitlines()).encode()
    assert [end.rank for end in read_ends(data)] == [3]


@pytest.mark.parametrize(("code", "ranks"), [(-9, [5]), (-11, [5]), (-6, []), (-15, []), (1, [])])
def test_a_signal_of_its_own_ends_a_rank_and_not_one_of_watchdogs_and_launchers(code: int, ranks: list[int]) -> None:
    assert [end.rank for end in read_ends(FAILURE.format(code=code).encode())] == ranks


def test_what_an_exception_says_is_shown_and_not_obeyed() -> None:
    (end,) = read_ends(TRACEBACK.replace("4 rows", "\x1b[2J4 rows").encode())
    assert "\x1b" not in end.how


def test_only_who_is_waited_for_is_gone() -> None:
    """A rank in a call may have ended after the hang began."""
    waits = tuple(
        Missing(call=NamedCall(rank=rank, group="g", kind="all_reduce", number=2), why=why, waiting=())
        for rank, why in ((0, "silent"), (1, "held"), (2, "late"))
    )
    before = Diagnosis(findings=(), waits=waits, ranks=(0, 1, 2), without=(0,), is_timeout=True)
    after = with_ends(before, [ProgramEnd(rank, "by SIGKILL") for rank in (0, 1)])
    assert [(each.call.rank, each.why) for each in after.findings if isinstance(each, Missing)] == [(0, "gone")]
    assert [each.call.rank for each in after.waits] == [1, 2]


def test_beside_lines_of_watchdogs_a_death_is_named() -> None:
    hang = next(each for each in hangs(4) if each.name == "ddp 4: exception on rank 3")
    lines = watchdog_lines(stuck(hang), random.Random(0), Style((2, 3), "slurm"), absent=(3,))
    read = read_watchdog_lines([("job.log", "\n".join(lines).encode())])
    for ends, ranks in (([ProgramEnd(3, "by SIGKILL")], [3]), ([], [])):
        ((_, diagnosis),) = diagnose_watchdogs(read, ends).values()
        assert [each.call.rank for each in diagnosis.findings if isinstance(each, Missing)] == ranks
