"""The files of a job that are waited for: each time that some have come, they are diagnosed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result
from test_evidence import circle, in_one_call

from commlayer.cli.main import main
from commlayer.diagnosis import explaining
from commlayer.diagnosis.explaining import SETTLED_S, Watch

CIRCLE = "ranks 0 and 1 make their calls of groups the dp, the tp in different orders"
NOTHING = "no dumps, files calls-*.json or logs of a hang came into"
LINE = "WorkNCCL(SeqNum=1\n"
Steps = dict[float, Callable[[], object]]


class Clock:
    """Stands still while anybody works. In ``steps`` is what others do, by the second in which they do it."""

    def __init__(self, steps: Steps) -> None:
        self.now, self.steps = 0.0, dict(steps)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for moment in [each for each in self.steps if each <= self.now]:
            self.steps.pop(moment)()


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[Steps], Clock]:
    def start(steps: Steps) -> Clock:
        clock = Clock(steps)
        monkeypatch.setattr(explaining, "time", SimpleNamespace(sleep=clock.sleep, monotonic=clock.monotonic))
        return clock

    return start


def watch(folder: Path, seconds: float = 100, status: int = 1) -> Result:
    result = CliRunner().invoke(main, ["diagnose", str(folder), "--watch", str(seconds)])
    assert result.exit_code == status, result.output
    return result


def put(folder: Path, dump: Path, *, part: int | None = None) -> None:
    folder.mkdir(exist_ok=True)
    (folder / dump.name).write_bytes(dump.read_bytes()[:part])


def test_dumps_that_come_one_by_one_are_diagnosed_together(tmp_path: Path, at: Callable[[Steps], Clock]) -> None:
    first, second = circle(tmp_path / "ranks")
    folder = tmp_path / "dumps"
    folder.mkdir()
    clock = at({5: lambda: put(folder, first), 15: lambda: put(folder, second)})
    moments = [clock.now for _ in Watch([folder]).each(60)]
    assert moments == [15 + SETTLED_S]
    at({5: lambda: circle(folder)})
    assert watch(folder).stdout.count("likely cause: ") == 1


def test_a_folder_may_come_later(tmp_path: Path, at: Callable[[Steps], Clock]) -> None:
    at({5: lambda: circle(tmp_path / "dumps")})
    assert CIRCLE in watch(tmp_path / "dumps").stdout
    missing = CliRunner().invoke(main, ["diagnose", str(tmp_path / "nowhere")])
    assert missing.exit_code == 2
    assert "nowhere does not exist" in missing.output


def test_files_from_before_are_left_out(tmp_path: Path, at: Callable[[Steps], Clock]) -> None:
    """Rank 2 has left a dump of an earlier job; that of rank 0 is written over."""
    in_one_call(tmp_path, 3)
    at({})
    alone = watch(tmp_path, status=2)
    assert NOTHING in alone.stderr
    assert "; 3 files from before left out" in alone.stderr
    at({5: lambda: circle(tmp_path)})
    assert "logs of ranks 0 and 1 of 2" in watch(tmp_path).stdout


def test_a_second_hang_is_answered_and_the_same_answer_is_not_said_twice(
    tmp_path: Path, at: Callable[[Steps], Clock]
) -> None:
    def hang_again() -> None:
        for path in tmp_path.iterdir():
            path.unlink()
        in_one_call(tmp_path, 4, absent=(1,))

    at({5: lambda: circle(tmp_path), 30: lambda: circle(tmp_path), 60: hang_again})
    said = watch(tmp_path).stdout
    assert said.count("likely cause: ") == 2
    assert said.index(CIRCLE) < said.index("rank 1 has left no dump or log")


def test_a_half_written_file_is_named_and_diagnosed_later(tmp_path: Path, at: Callable[[Steps], Clock]) -> None:
    first, second = circle(tmp_path / "ranks")
    folder = tmp_path / "dumps"

    def put_both() -> None:
        for each in (first, second):
            put(folder, each)

    at({5: lambda: put(folder, first, part=200), 40: put_both})
    result = watch(folder)
    assert "got a damaged or foreign file" in result.stderr
    assert CIRCLE in result.stdout


def test_an_interrupt_ends_the_wait_and_not_the_answer(tmp_path: Path, at: Callable[[Steps], Clock]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    at({5: interrupt})
    assert NOTHING in watch(tmp_path, status=2).stderr
    at({5: lambda: circle(tmp_path), 6: interrupt})
    assert CIRCLE in watch(tmp_path).stdout


def test_files_that_tell_of_no_hang_are_not_awaited(tmp_path: Path, at: Callable[[Steps], Clock]) -> None:
    log = tmp_path / "train.log"

    def grow(text: str) -> None:
        with log.open("a", encoding="utf-8") as file:
            file.write(text)

    grow("step\n")
    at({5: lambda: (tmp_path / "config.yaml").write_text("a: 1\n", encoding="utf-8"), 6: lambda: grow("step\n")})
    assert list(Watch([tmp_path]).each(60)) == []
    clock = at({5: lambda: circle(tmp_path), **{float(moment): lambda: grow("step\n") for moment in range(6, 60)}})
    assert [clock.now for _ in Watch([tmp_path]).each(60)] == [5 + SETTLED_S], "a log that grows delays nothing"


def test_a_log_counts_where_lines_of_a_hang_are_new(tmp_path: Path, at: Callable[[Steps], Clock]) -> None:
    log = tmp_path / "job.log"

    def grow(text: str) -> None:
        with log.open("a", encoding="utf-8") as file:
            file.write(text)

    grow("step\n" * 30_000 + LINE)
    steps: Steps = {float(moment): lambda: grow("step\n") for moment in range(1, 90)}
    clock = at({**steps, 20.2: lambda: grow(LINE), 50.2: lambda: log.write_text(LINE, encoding="utf-8")})
    assert [clock.now for _ in Watch([tmp_path]).each(90)] == [20.5 + SETTLED_S, 50.5 + SETTLED_S]


def test_files_that_still_change_are_diagnosed_in_the_end(tmp_path: Path, at: Callable[[Steps], Clock]) -> None:
    at({float(moment): lambda: circle(tmp_path) for moment in range(5, 60)})
    assert list(Watch([tmp_path]).each(50)) == [[tmp_path]]
