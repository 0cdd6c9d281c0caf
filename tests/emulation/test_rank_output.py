"""Output of ranks is passed on line by line, behind a prefix, in whatever pieces it comes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commlayer.emulation.output import OutputStream, RankOutput, drain, error_line

Passed = Callable[..., str]


@pytest.fixture
def passed(tmp_path: Path) -> Iterator[Passed]:
    """The output that arrives if a rank writes such pieces."""
    printed = tmp_path / "printed"
    write_fd = os.open(printed, os.O_WRONLY | os.O_CREAT)

    def run(*pieces: bytes) -> str:
        stream = OutputStream(b"[rank 0] ", write_fd)
        for piece in pieces:
            os.write(stream.write_fd, piece)
            stream.take()
        os.close(stream.write_fd)
        while stream.take():
            pass
        assert not stream.is_open
        return printed.read_bytes().decode(errors="surrogateescape")

    yield run
    os.close(write_fd)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"a\nb\n"], "[rank 0] a\n[rank 0] b\n"),
        ([b"a", b"b\nc"], "[rank 0] ab\n[rank 0] c\n"),
        ([b"\n\n"], "[rank 0] \n[rank 0] \n"),
        ([b"10 %\r20 %\r", b"30 %\r", b"\n"], "[rank 0] 10 %\r[rank 0] 20 %\r[rank 0] 30 %\r\n"),
        ([b"a\r\nb"], "[rank 0] a\r\n[rank 0] b\n"),
        ([b"\xff\xfe\n"], "[rank 0] \udcff\udcfe\n"),
    ],
)
def test_lines_however_they_come(pieces: list[bytes], expected: str, passed: Passed) -> None:
    assert passed(*pieces) == expected


def test_a_line_without_an_end_is_passed_on_in_pieces(passed: Passed) -> None:
    piece = b"x" * 40_000
    lines = passed(piece, piece).splitlines()
    assert "".join(line.removeprefix("[rank 0] ") for line in lines) == "x" * 80_000


def test_the_last_words_are_the_last_lines_of_stderr() -> None:
    output = RankOutput("rank 0")
    for stream in output.streams:
        stream.target = os.open(os.devnull, os.O_WRONLY)
    os.write(output.streams[0].write_fd, b"on stdout\n")
    os.write(
        output.streams[1].write_fd, "".join(f"line {number}\n" for number in range(50)).encode() + b"\xff" + b"y" * 900
    )
    output.close_writers()
    drain(output.streams, timeout_s=10)
    words = output.last_words().splitlines()
    assert words[:-1] == [f"line {number}" for number in range(31, 50)]
    assert words[-1] == "\ufffd" + "y" * 499
    for stream in output.streams:
        os.close(stream.target)
    output.close()


def test_the_line_that_says_the_error_is_kept_and_found() -> None:
    output = RankOutput("rank 0")
    for stream in output.streams:
        stream.target = os.open(os.devnull, os.O_WRONLY)
    said = "[rank0]: commlayer.profiles.errors.CollectiveTimeoutError: rank 1 did not answer within 3 s"
    lines = ["ValueError: one before", "Traceback (most recent call last):", said, *["  a line of the diagnosis"] * 40]
    os.write(output.streams[1].write_fd, "\n".join([*lines, "[W1] a warning of C++"]).encode())
    output.close_writers()
    drain(output.streams, timeout_s=10)
    words = output.last_words()
    assert words.splitlines()[0] == said
    assert len(words.splitlines()) == 21
    assert error_line(words) == said
    for stream in output.streams:
        os.close(stream.target)
    output.close()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", ""),
        ("first\nlast\n\n", "last"),
        (
            "Traceback (most recent call last):\n  File\nKeyError: 'x'\n\nduring\n\nKeyboardInterrupt\n",
            "KeyboardInterrupt",
        ),
        ("a.b.MyError: one\n  ValueError: indented\nError in C: 7", "a.b.MyError: one"),
        ("no error: here\nMemory: 7 GB", "Memory: 7 GB"),
    ],
)
def test_the_error_is_the_last_exceptions_first_line(words: str, line: str) -> None:
    assert error_line(words) == line


def test_a_stream_that_somebody_keeps_open_holds_nobody_up() -> None:
    output = RankOutput("rank 0")  # its writing ends stay open
    drain(output.streams, timeout_s=0.05)
    assert all(stream.is_open for stream in output.streams)
    output.close()


def test_a_rank_hears_that_nobody_reads() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    stream = OutputStream(b"", write_fd)
    os.write(stream.write_fd, b"a\n")
    assert not stream.take()
    with pytest.raises(BrokenPipeError):
        os.write(stream.write_fd, b"b\n")
    os.close(stream.write_fd)
    os.close(write_fd)
