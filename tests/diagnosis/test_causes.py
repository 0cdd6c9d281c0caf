"""The cause of a hang: programs of several shapes, spoiled in one place, from dumps of torch's recorders."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from dumps_in_memory import write_dumps, write_texts
from hanging_programs import Hang, hangs, judged, stuck
from jobs_in_memory import Job, run
from program_shapes import slow_jobs

from commlayer.diagnosis import explain, in_words
from commlayer.diagnosis.findings import Diagnosis
from commlayer.profiles.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]


def written(hang: Hang, folder: Path, *, has_timing: bool = True, seed: int = 0) -> list[Path]:
    """Its dumps, with the states of NCCL's recorder, its stacks and its log."""
    job, absent = stuck(hang), hang.absent + hang.stopped
    dumps = write_dumps(folder, job, random.Random(seed), has_timing=has_timing, absent=absent, most=hang.most)
    return [*dumps, *write_texts(folder, job, hang.died, absent)]


def named(text: str) -> Hang:
    """The first program with this text in its name."""
    return next(each for each in hangs(8) if text in each.name)


@pytest.mark.parametrize("has_timing", [True, False], ids=["timing", "no timing"])
def test_causes_ranks_and_places_are_named(has_timing: bool, tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    wrong = []
    for index, hang in enumerate(hangs(8)):
        paths = written(hang, tmp_path / str(index), has_timing=has_timing, seed=index)
        verdict = judged(hang, explain(paths), has_messages=True)
        counts["programs"] += 1
        counts.update(each for each in ("cause", "ranks", "places") if getattr(verdict, each))
        if verdict.is_false:
            wrong.append(f"{hang.name}: {verdict.words}")
    assert counts["programs"] >= 60
    for what in ("cause", "ranks", "places"):
        assert counts[what] >= 0.95 * counts["programs"], (what, counts, wrong)
    assert wrong == []


@pytest.mark.parametrize(
    ("program", "what", "ranks", "words"),
    [
        ("ddp 4: ahead on rank 3", "steps", {3}, "is at another place of its steps"),
        ("broadcasts 4: behind on rank 2", "steps", {2}, "as call #14 rank 2 makes broadcast at train.py:120"),
        ("ddp 4: threads on rank 0", "threads", {0}, "give each thread a group of its own"),
        ("ep+dp 4: splits on rank 0", "splits", {0, 1}, "all members together send 144 bytes and expect 128"),
        ("ddp 4: network on rank 2", "stalled", {0, 1, 2, 3}, "all ranks have come to all_reduce #4"),
        ("ddp 4: lock on rank 1", "elsewhere", {1}, "rank 1 is at train.py:600 in step, in no call"),
        ("ddp 4: exception on rank 3", "ended", {3}, "OutOfMemoryError: CUDA out of memory"),
        ("ddp 4: killed on rank 0", "ended", {0}, "rank 0 has ended by SIGKILL"),
    ],
)
@pytest.mark.parametrize("has_timing", [True, False], ids=["timing", "no timing"])
def test_each_kind_is_named(
    program: str, what: str, ranks: set[int], words: str, has_timing: bool, tmp_path: Path
) -> None:
    cause = explain(written(named(program), tmp_path / "dumps", has_timing=has_timing)).cause
    assert cause is not None
    assert cause.what == what
    assert set(cause.ranks) == ranks
    assert words in cause.words


def test_calls_that_wait_behind_another_one_are_not_where_a_job_stalls(tmp_path: Path) -> None:
    """Without times all of them are only enqueued."""
    hang = named("broadcasts 4: network")
    verdict = judged(hang, explain(written(hang, tmp_path / "dumps", has_timing=False)), has_messages=True)
    assert (verdict.words, verdict.places) == ("stalled 0,1,2,3 (unknown)", True)


def test_programs_of_other_sizes_and_orders_are_judged_alike(tmp_path: Path) -> None:
    verdicts = [
        (hang.name, judged(hang, explain(written(hang, tmp_path / str(index), seed=index)), has_messages=True))
        for index, hang in enumerate(hangs(6, seed=1))
    ]
    assert [name for name, verdict in verdicts if verdict.is_false] == []
    rights = [verdict.cause and verdict.ranks and verdict.places for _, verdict in verdicts]
    assert sum(rights) >= 0.95 * len(rights)


@pytest.mark.parametrize("age_s", [20.0, 90.0, 300.0])
def test_sound_jobs_are_not_blamed(age_s: float, tmp_path: Path) -> None:
    """Each is seen somewhere in its program, so long after it began; its calls may take 600 s.

    After a minute ranks that are waited for are named, and it is said that they may only be late.
    """
    for index, (groups, program) in enumerate(slow_jobs(48)):
        random_ = random.Random(index)
        job = Job(groups, program)
        run(job, random_, random_.randint(1, 12))
        paths = write_dumps(tmp_path / str(index), job, random_, has_timing=bool(index % 2), age_s=age_s)
        diagnosis = explain(paths)
        if age_s < 60:
            assert not diagnosis.has_found, in_words(diagnosis)
        assert diagnosis.findings == (), in_words(diagnosis)
        cause = diagnosis.cause
        assert cause is None or cause.what in ("absent", "stalled"), in_words(diagnosis)
        if cause is not None:
            is_doubted = cause.certainty == "likely" and "it may only be late" in cause.words
            assert is_doubted or cause.certainty == "unknown", in_words(diagnosis)


def test_the_answer_begins_with_the_cause_and_ends_with_last_calls(tmp_path: Path) -> None:
    hang = named("ddp 4: skip on rank 1")
    diagnosis = explain(written(hang, tmp_path / "dumps"))
    text = in_words(diagnosis)
    assert text.startswith("likely cause: rank 1 has left out a call of group the world: as call #4 ")
    assert "all_reduce at train.py:11 in step" in text.splitlines()[0]
    assert "last calls:" in text
    assert "  group the world: " in text
    decoded = msgspec.json.decode(msgspec.json.encode(diagnosis), type=Diagnosis)
    assert decoded.cause == diagnosis.cause
    assert decoded.groups == diagnosis.groups


def test_a_rank_that_makes_no_more_calls_is_named_with_its_last_one(tmp_path: Path) -> None:
    diagnosis = explain(written(named("tp+dp 4: end on rank 2"), tmp_path / "dumps"))
    assert diagnosis.cause is not None
    assert (diagnosis.cause.what, diagnosis.cause.ranks) == ("absent", (2,))
    assert "rank 2 is in no call since all_reduce #3 at train.py:50 in step" in diagnosis.cause.words


@pytest.mark.parametrize(
    ("program", "what"),
    [
        ("circle over 3 groups", "order"),
        ("fsdp 2: skip", "skipped"),
        ("ddp 4: stop", "no dump"),
        ("tp+dp 4: dtype", "dtype"),
    ],
)
def test_dumps_of_torchs_own_recorder_on_gloo(program: str, what: str, tmp_path: Path) -> None:
    """Real processes, as the benchmark runs them."""
    command = [sys.executable, "benchmarks/hangs.py", "--recorder", "gloo", "--only", program]
    result = subprocess.run(
        [*command, "--json", str(tmp_path / "verdicts.json")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    verdicts = json.loads((tmp_path / "verdicts.json").read_text(encoding="utf-8"))["programs"]
    assert verdicts
    for verdict in verdicts:
        assert verdict["said"].startswith(what), verdict
        assert (verdict["cause"], verdict["ranks"], verdict["places"]) == (True, True, True), verdict


def test_paths_without_dumps_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no dump", encoding="utf-8")
    with pytest.raises(UsageError, match="expected logs of commlayer, dumps of torch's Flight Recorder"):
        explain([tmp_path / "notes.txt"])


def test_one_path_may_be_given_alone(tmp_path: Path) -> None:
    written(named("circle over 2 groups"), tmp_path / "dumps")
    for path in (tmp_path, str(tmp_path)):
        assert explain(path).cause is not None


def test_explaining_needs_no_torch(tmp_path: Path) -> None:
    paths = written(named("circle over 2 groups"), tmp_path / "dumps")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from commlayer.diagnosis import explain\n"
        "print(explain(sys.argv[1:]).cause.what)"
    )
    command = [sys.executable, "-c", code, *map(str, paths)]
    result = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert result.stdout == "order\n"
