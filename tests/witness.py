"""A witness in every rank of a test: what `commlayer diagnose` would say of it, while it runs and at its end.

A job that ends well has nothing to be told, at any moment: every finding is a false alarm. So each rank takes its own log
again and again while its program runs, and once when it has ended; :func:`alarms` merges logs of all ranks of about one moment
into the wait-for graph, as an inquiry does, and returns what that finds. Ranks that are late are no alarm before the end.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from commlayer.diagnosis.call_logs import RankLog
from commlayer.diagnosis.diagnosis_words import in_words
from commlayer.diagnosis.findings import diagnose
from commlayer.diagnosis.inquiry import own_answer
from commlayer.diagnosis.snapshot import rank_log

__all__ = ["alarms", "testifying", "witnessed"]

T = TypeVar("T")
_EVERY_S = 0.05
_MOST = 40
"""So many moments of a job are kept, those at its beginning; a job of trainers' tests takes two seconds or three."""
_TOGETHER_NS = 1_200_000_000
"""An inquiry waits so long for the ranks' logs: no further apart are they merged."""
_AT_ONCE_NS = 100_000_000
_NUM_MIXED = 20


class _Seen(msgspec.Struct):
    """The answers of a rank while it was in a job, and its log at the end."""

    answers: list[RankLog] = []
    end: RankLog | None = None


@contextmanager
def witnessed(folder: Path) -> Iterator[None]:
    """In a rank: keep its answers, from now to the end of the block, in ``folder``, also where the block raises."""
    rank, ranks = int(os.environ["RANK"]), range(int(os.environ["WORLD_SIZE"]))
    seen = _Seen()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(_EVERY_S):
            answer = own_answer() if len(seen.answers) < _MOST else None  # none before the job's first group, and after
            if answer is not None:
                seen.answers.append(answer)
        seen.end = rank_log("", rank, ranks, "asked", {})

    # Named as one of ours: no thread of the program, which could still make calls. The last look is its, too.
    thread = threading.Thread(target=look, name="commlayer-witness", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        (folder / f"seen-{rank:05d}").write_bytes(msgspec.msgpack.encode(seen))


def testifying(fn: Callable[..., T], folder: Path) -> Callable[..., T]:
    """``fn``, as ranks call it, with a witness."""

    def call(*args: object) -> T:
        with witnessed(folder):
            return fn(*args)

    return call


def alarms(folder: Path) -> list[str]:
    """Find what is wrong in what the witnesses of a job have left in ``folder``, in words; each once."""
    seen = [msgspec.msgpack.decode(path.read_bytes(), type=_Seen) for path in sorted(folder.glob("seen-*"))]
    sentences: dict[str, None] = {}
    for logs in [*_asked(seen), *_mixed(seen)]:
        diagnosis = diagnose(logs)
        if diagnosis.findings:
            sentences[in_words(diagnosis)] = None
    end = diagnose([each.end for each in seen if each.end is not None])
    if end.findings or end.waits:
        sentences[f"at the end: {in_words(end)}"] = None
    return list(sentences)


def _asked(seen: Sequence[_Seen]) -> Iterator[list[RankLog]]:
    """For each answer, it and those of the others of about the same moment: one machine has one clock."""
    for asker in seen:
        for asked in asker.answers:
            same_job = [[log for log in each.answers if log.job == asked.job] for each in seen]
            nearest = [min(logs, key=lambda log: abs(log.now_ns - asked.now_ns)) for logs in same_job if logs]
            yield [log for log in nearest if abs(log.now_ns - asked.now_ns) < _AT_ONCE_NS]


def _mixed(seen: Sequence[_Seen]) -> Iterator[list[RankLog]]:
    """Answers of moments as far apart as those of one inquiry may be."""
    draw = random.Random(0)
    answers = [log for each in seen for log in each.answers]
    for _ in range(_NUM_MIXED if answers else 0):
        first = draw.choice(answers)
        near = [
            [log for log in each.answers if log.job == first.job and 0 <= log.now_ns - first.now_ns <= _TOGETHER_NS]
            for each in seen
        ]
        yield [draw.choice(logs) for logs in near if logs]
