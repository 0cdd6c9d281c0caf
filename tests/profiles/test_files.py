"""Files that others may have put there or write at the same time: refused without waiting, replaced in one step."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import stat
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic_profiles import synthetic_profile

from commlayer.profiles import catalog
from commlayer.profiles.errors import ProfileError, ProfileNotFoundError, UsageError
from commlayer.profiles.files import read_file, replacing, write_file
from commlayer.profiles.profile import Profile, read_profile
from commlayer.readers import cluster_files, model_files
from commlayer.readers.routing_files import read_routing
from commlayer.traces.call_records import rank_name
from commlayer.traces.rank_files import read_folder, write_trace

_LONG = "x" * 5000


def _bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


ODD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "FIFO": (os.mkfifo, "got a FIFO"),
    "directory": (Path.mkdir, "got a directory"),
    "socket": (_bound, "got a socket"),
    "device": (lambda path: path.symlink_to("/dev/null"), "got a device"),
}


@pytest.mark.timeout(20)  # without the check a FIFO is waited for
@pytest.mark.parametrize("kind", ODD)
def test_only_regular_files_are_read(
    kind: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, words = ODD[kind]
    monkeypatch.chdir(tmp_path_factory.mktemp("odd"))  # names of sockets are short
    make(Path("odd.json"))
    with pytest.raises(OSError, match=words):
        read_file("odd.json")
    with pytest.raises(ProfileError, match=f"odd.json: cannot read the profile: expected a regular file, {words}"):
        catalog.load_profile("odd.json")
    with pytest.raises(UsageError, match=f"odd.json: cannot read the cluster file: .*{words}"):
        cluster_files.resolve("odd.json")
    if kind != "directory":  # of which a model's config.json is read
        with pytest.raises(UsageError, match=words):
            model_files.resolve("odd.json")


@pytest.mark.timeout(20)
def test_a_trace_that_is_a_fifo_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / rank_name(0))
    with pytest.raises(UsageError, match=r"rank-00000.json: cannot read the trace of a rank: expected a regular file"):
        list(read_folder(tmp_path))


def test_a_file_larger_than_the_bound_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    path.write_bytes(b"12345")
    assert read_file(path, most_bytes=5) == b"12345"
    with pytest.raises(OSError, match="expected at most 4 bytes"):
        read_file(path, most_bytes=4)
    with path.open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(ProfileError, match="expected at most"):
        read_profile(path)


def test_a_large_file_is_not_read_before_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sparse.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    most = 1 << 50
    for given, words in ((most, r"begins with \{"), (4096, "expected at most 4096 bytes, got a larger file")):
        with pytest.raises(OSError, match=words):
            read_file(path, given, begins=b"{")
    tracemalloc.start()
    with path.open("wb") as file:
        file.truncate(1 << 30)
    for read in (read_routing, lambda path: list(read_folder(path.parent))):
        path = path.rename(tmp_path / rank_name(0))
        with pytest.raises(UsageError, match=r"begins with \{"):
            read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (_LONG, r"got 'x{100}….*5000 characters"),
        (f"/tmp/{_LONG}", "cannot read the profile: File name too long"),
        (f"{_LONG}.json", "cannot read the profile: File name too long"),
        ("a\0b", "got 'a"),
        ("/a\0b", "cannot read the profile: expected a path, got text with a NUL character"),
        ("/\ud800", "cannot read the profile: expected a path, got text that no file system has"),
        ("/etc/passwd/x", "cannot read the profile: Not a directory"),
    ],
)
def test_a_name_that_no_profile_can_have_is_an_ordinary_error(name: str, words: str) -> None:
    with pytest.raises(ProfileError, match=words) as caught:
        catalog.load_profile(name)
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()
    with pytest.raises(UsageError):
        cluster_files.resolve(name)
    with pytest.raises(UsageError):
        model_files.resolve(name)


def test_a_name_alone_that_is_too_long_is_not_found() -> None:
    with pytest.raises(ProfileNotFoundError):
        catalog.load_profile(_LONG)


# Writing


def test_what_is_written_has_the_mode_that_the_umask_says(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    before = os.umask(0o027)
    try:
        write_file(path, "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_draft_is_a_file_that_nobody_else_has_made(tmp_path: Path) -> None:
    """Under a name that can be guessed, another user's link would be followed."""
    victim, path = tmp_path / "victim", tmp_path / "out.json"
    victim.write_text("mine", encoding="utf-8")
    guesses = [f".out.json.{os.getpid()}.tmp", f".out.json.{os.getpid()}"]
    for guess in guesses:
        (tmp_path / guess).symlink_to(victim)
    synthetic_profile().save(path)
    assert victim.read_text(encoding="utf-8") == "mine"
    path.unlink()
    write_trace(path, [])
    assert victim.read_text(encoding="utf-8") == "mine"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(["victim", "out.json", *guesses])


def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old", encoding="utf-8")

    def interrupted() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["out.json"]
    with pytest.raises(FileNotFoundError) as caught:
        write_file(tmp_path / "no" / "out.json", "x")
    assert caught.value.filename == str(tmp_path / "no" / "out.json")


def test_a_name_as_long_as_a_name_may_be_can_be_written(tmp_path: Path) -> None:
    write_file(tmp_path / ("n" * 255), "x")
    assert os.listdir(tmp_path) == ["n" * 255]


def test_a_link_is_followed_and_a_device_stays_one(tmp_path: Path) -> None:
    target, link, null = tmp_path / "target", tmp_path / "link", tmp_path / "null"
    target.write_text("old", encoding="utf-8")
    link.symlink_to(target)
    write_file(link, "new")
    assert (target.read_text(encoding="utf-8"), link.is_symlink()) == ("new", True)
    null.symlink_to("/dev/null")
    write_file(null, "gone")
    assert null.is_char_device()


@pytest.mark.timeout(20)
def test_a_fifo_that_nobody_reads_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "fifo")
    with pytest.raises(OSError, match="No such device or address"):
        write_file(path, "x")
    read = [sys.executable, "-c", f"print(open({str(path)!r}).read())"]
    with subprocess.Popen(read, stdout=subprocess.PIPE, text=True) as reader:
        is_read = os.open(path, os.O_WRONLY)  # returns when the reader has opened it
        write_file(path, "to the reader")
        os.close(is_read)
        assert reader.communicate()[0] == "to the reader\n"
    assert path.is_fifo()


def test_the_first_one_wins_where_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_file(path, "first", new_only=True)
    with pytest.raises(FileExistsError):
        write_file(path, "second", new_only=True)
    assert path.read_text(encoding="utf-8") == "first"
    assert os.listdir(tmp_path) == ["out.json"]


def test_the_first_one_wins_also_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    test_the_first_one_wins_where_that_is_asked_for(tmp_path)


def _profile(writer: int) -> Profile:
    """The content, of another size for each writer, so that a mix of two would show."""
    return synthetic_profile().replace(source=f"writer {writer} " + "…" * 20_000 * writer)


def _write_often(path: str, writer: int, start: Any, new_only: bool) -> None:
    profile = _profile(writer)
    start.wait()
    try:
        for _ in range(1 if new_only else 40):
            profile.save(path, new_only=new_only)
    except FileExistsError:
        sys.exit(7)


@pytest.mark.parametrize("new_only", [False, True])
def test_processes_that_write_at_once_never_leave_a_mix(tmp_path: Path, new_only: bool) -> None:
    path = tmp_path / "cluster.json"
    context = multiprocessing.get_context("fork")
    start = context.Barrier(5)
    writers = [context.Process(target=_write_often, args=(str(path), k, start, new_only)) for k in range(1, 5)]
    for writer in writers:
        writer.start()
    start.wait()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            seen.add(read_profile(path).source.split(" …")[0])  # raises for a half, or a mix
    for writer in writers:
        writer.join()
    last = read_profile(path)
    assert last in [_profile(k) for k in range(1, 5)]
    assert os.listdir(tmp_path) == ["cluster.json"]
    codes = sorted(writer.exitcode or 0 for writer in writers)
    assert codes == ([0, 7, 7, 7] if new_only else [0, 0, 0, 0])
    if new_only:
        assert len(seen) <= 1


def test_a_profile_with_half_a_character_is_refused(tmp_path: Path) -> None:
    """It could be read, and neither printed nor written again."""
    content = json.loads(synthetic_profile().to_json()) | {"source": "\ud800"}
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ProfileError, match=r"expected Unicode text, got \\ud800"):
        read_profile(path)
