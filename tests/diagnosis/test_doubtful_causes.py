"""Causes that must not be claimed: dumps of torch's recorders that say less than they seem to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from commlayer.diagnosis.diagnosis_words import in_words
from commlayer.diagnosis.dump_readings import diagnose_dumps
from commlayer.diagnosis.findings import Diagnosis
from commlayer.diagnosis.recorder_dumps import CallFrame, Dump, Entry

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


def dump(
    rank: int,
    groups: dict[str, tuple[int, ...]],
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
        group_ranks=groups,
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
