"""Which answers of a job's ranks the witness holds together: those of one moment, and of one group that stands alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from jobs_in_memory import Job, Op
from witness import _Seen, alarms

from commlayer.diagnosis.call_logs import RankLog


def _asked_in(group: str, rank: int, job: str) -> RankLog:
    """The answer of a rank that has come to a call of ``group`` to which the other has not come."""
    simulated = Job({group: (0, 1)}, {rank: [Op("all_reduce", group)], 1 - rank: []})
    simulated.step(rank)
    answer = msgspec.structs.replace(simulated.log(rank, "asked"), job=job)
    return msgspec.structs.replace(answer, threads=())


@pytest.mark.parametrize(("jobs", "num_alarms"), [(("one", "next"), 0), (("one", "one"), 1)])
def test_answers_of_two_groups_that_stand_alone_are_not_merged(
    tmp_path: Path, jobs: tuple[str, str], num_alarms: int
) -> None:
    """A rank may be in the group of the next quorum before another has made this one: they do not wait for each other."""
    for rank, group in enumerate(("quorum 1", "quorum 2")):
        seen = _Seen(answers=[_asked_in(group, rank, jobs[rank])])
        (tmp_path / f"seen-{rank:05d}").write_bytes(msgspec.msgpack.encode(seen))

    sentences = alarms(tmp_path)

    assert len(sentences) == num_alarms, sentences
