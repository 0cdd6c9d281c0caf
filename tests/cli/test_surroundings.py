"""Every command where its surroundings are bad: a closed or full stdout, another encoding, nested, huge and hostile files."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from synthetic_profiles import synthetic_profile

import commlayer.cli.profiles
from commlayer.auditing.audit_files import RankAudit, audit_name, write_audit
from commlayer.cli.main import main
from commlayer.diagnosis.call_logs import GroupLog, RankLog
from commlayer.diagnosis.log_files import log_name, write_log
from commlayer.profiles.errors import InternalError
from commlayer.readers.routing_files import routing_path, write_routing
from commlayer.traces.call_records import rank_name
from commlayer.traces.rank_files import RankTrace, write_trace
from examples.synthetic_loads import synthetic_loads

EVIL = "\x1b]0;owned\x07\x1b[2J\u202e"
JOB = "-m mixtral-8x7b -c h100-eos -g 16 --global-batch 32 --sequence 4096"
MAPPING = "--tp 2 --ep 8 --pp 2 --recompute full"
PLACE = "-c h100-eos --shape 2x4 -m deepseekmoe-16b"
PRINTS = {
    "help": "--help",
    "help of profiles": "profiles --help",
    "help of search": "search --help",
    "profiles list": "profiles list",
    "profiles list as JSON": "profiles list --json",
    "profiles show": "profiles show {profile}",
    "profiles validate": "profiles validate {profile}",
    "profiles diff": "profiles diff {profile} {profile}",
    "profiles tuner": "profiles tuner emulated-2x4",
    "plan": "plan -p {profile} -b 1MiB",
    "plan as JSON": "plan -p {profile} -b 1MiB --json",
    "trace": "trace {traces} -o {out}/merged.json",
    "audit": "audit {audits}",
    "audit for Prometheus": "audit {audits} --prometheus",
    "routing show": "routing show {routing}",
    "routing replay": f"routing replay {{routing}} {PLACE}",
    "diagnose": "diagnose {logs}",
    "estimate": f"estimate {JOB} {MAPPING}",
    "search": f"search {JOB} {MAPPING}",
    "clusters": "clusters",
    "what-if": f"what-if {JOB} {MAPPING} --vary inter-factor --values 0.5,1",
}
READS = {
    "profiles show": ("profiles show {bad}", "p.json"),
    "profiles validate": ("profiles validate {profile} {bad}", "p.json"),
    "profiles diff": ("profiles diff {profile} {bad}", "p.json"),
    "profiles export": ("profiles export {bad} -o {out}/exported", "p.json"),
    "profiles import": ("profiles import {bad} -o {out}/new.json", "p.json"),
    "profiles tuner": ("profiles tuner {bad}", "p.json"),
    "plan": ("plan -p {bad} -b 1MiB", "p.json"),
    "trace": ("trace {bad.parent}", rank_name(0)),
    "audit": ("audit {bad}", audit_name(0)),
    "routing show": ("routing show {bad}", "r.json"),
    "routing show of a folder": ("routing show {bad.parent}", routing_path("", 0).name),
    "routing replay": (f"routing replay {{bad}} {PLACE}", "r.json"),
    "diagnose": ("diagnose {bad.parent}", log_name(0)),
    "estimate, cluster": (f"estimate {JOB.replace('h100-eos', '{bad}')} {MAPPING}", "c.json"),
    "estimate, model": (f"estimate {JOB.replace('mixtral-8x7b', '{bad}')} {MAPPING}", "m.json"),
    "search, routing": (f"search {JOB} {MAPPING} --routing {{bad}}", "r.json"),
    "what-if, cluster": (f"what-if {JOB.replace('h100-eos', '{bad}')} --vary gpus --values 16", "c.json"),
}
NESTED = {
    "array": "[" * 100_000,
    "objects": '{"format": ' * 50_000,
    "behind a field": '{"x": ' + "[" * 100_000,
    "digits": '{"format": ' + "9" * 10_000 + "}",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sound file or folder of each kind that commands read; what they say of themselves is hostile."""
    folder = tmp_path_factory.mktemp("files")
    found = {name: folder / name for name in ("profile", "routing", "traces", "audits", "logs", "out")}
    for name in ("traces", "audits", "logs", "out"):
        found[name].mkdir()
    profile = synthetic_profile(error=0.01).replace(name=EVIL, source=EVIL, environment={EVIL: EVIL})
    profile.save(found["profile"])
    write_routing(found["routing"], synthetic_loads("zipf", experts=64, layers=1, steps=4, tokens=256, top_k=6, seed=1))
    trace = RankTrace(
        job=EVIL,
        rank=0,
        world_size=1,
        host=EVIL,
        pid=1,
        versions={},
        readings=(),
        opened_ns=0,
        closed_ns=9,
        num_dropped=0,
        calls=(),
        marks=(),
    )
    write_trace(found["traces"] / rank_name(0), [], commlayer=trace)
    audit = RankAudit(
        job=EVIL, rank=0, world_size=1, host=EVIL, pid=1, commlayer=EVIL, written_s=1.0, is_final=True, groups=()
    )
    write_audit(found["audits"], audit)
    groups = (GroupLog(key="g", name=EVIL, ranks=(0,)),)
    write_log(found["logs"], RankLog(job=EVIL, rank=0, ranks=(0,), reason="signal", host=EVIL, groups=groups))
    return found


def words(command: str, files: dict[str, Path], **more: Path) -> list[str]:
    """Return the arguments of ``command``, with files for their names."""
    return [word.format(**files, **more) for word in command.split()]


class Refusing(io.RawIOBase):
    """A file that takes nothing, behind a stdout."""

    def __init__(self, number: int) -> None:
        self.error = OSError(number, os.strerror(number))

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        raise self.error


def called(arguments: list[str], stdout: io.TextIOBase | None, monkeypatch: pytest.MonkeyPatch) -> tuple[object, str]:
    """Return the exit status of the program in this process, and what it says on stderr."""
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", errors)
    try:
        with pytest.raises(SystemExit) as ended:
            main(arguments, prog_name="commlayer")
    finally:
        monkeypatch.undo()
    return ended.value.code, errors.getvalue()


@pytest.mark.parametrize("name", PRINTS)
@pytest.mark.parametrize(
    ("number", "said"),
    [(0, "Bad file descriptor"), (errno.ENOSPC, "No space left on device"), (errno.EPIPE, "")],
    ids=["closed", "full", "broken pipe"],
)
def test_a_stdout_that_takes_nothing_is_said(
    name: str, number: int, said: str, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stdout = io.TextIOWrapper(io.BufferedWriter(Refusing(number)), "utf-8", write_through=True) if number else None
    status, errors = called(words(PRINTS[name], files), stdout, monkeypatch)
    assert status == 1, errors
    told = [line for line in errors.splitlines() if not line.startswith(("note: ", "trace: "))]
    assert told == ([f"error: output: {said}"] if said else [])


@pytest.mark.parametrize("name", PRINTS)
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_output_is_printed_in_any_encoding_and_obeyed_in_none(
    name: str, encoding: str, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    stdout = io.TextIOWrapper(written, encoding, write_through=True)
    status, errors = called(words(PRINTS[name], files), stdout, monkeypatch)
    assert status == 0, errors
    text = written.getvalue().decode("utf-8" if "help" in name else encoding)  # click takes ASCII for a mistake
    assert text
    for shown in (text, errors):
        assert not [char for char in shown if char != "\n" and unicodedata.category(char)[0] == "C"]
    if "--json" in PRINTS[name]:
        assert json.loads(text)


def refused(arguments: list[str]) -> str:
    """Return what a command says that refuses a file with status 2."""
    result = CliRunner().invoke(main, arguments, prog_name="commlayer")
    told = result.stdout + result.stderr if "validate" in arguments else result.stderr
    assert result.exit_code == 2, f"{result.output}\n{result.exception!r}"
    assert "a bug of commlayer" not in told
    assert len(told) < 6000, "nobody reads so much"
    assert not [char for char in told if char != "\n" and unicodedata.category(char)[0] == "C"]
    return told


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("kind", NESTED)
def test_a_nested_file_is_refused_by_its_name(name: str, kind: str, files: dict[str, Path], tmp_path: Path) -> None:
    command, file = READS[name]
    bad = tmp_path / file
    bad.write_text(NESTED[kind], encoding="utf-8")
    assert file in refused(words(command, files, bad=bad))


@pytest.mark.parametrize("name", READS)
def test_a_huge_file_is_refused_before_it_is_read(name: str, files: dict[str, Path], tmp_path: Path) -> None:
    command, file = READS[name]
    bad = tmp_path / file
    with bad.open("wb") as sparse:
        sparse.truncate(1 << 43)
    assert "bytes, got a larger file" in refused(words(command, files, bad=bad))


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("value", ["x" * 200_000, EVIL * 9_000], ids=["long", "hostile"])
def test_a_long_value_is_not_quoted_whole(name: str, value: str, files: dict[str, Path], tmp_path: Path) -> None:
    command, file = READS[name]
    bad = tmp_path / file
    for content in ({"format": value}, {value: 1}, {"model_type": value}, {"commlayer": {"format": 1, "job": value}}):
        bad.write_text(json.dumps(content), encoding="utf-8")
        assert file in refused(words(command, files, bad=bad))


@pytest.mark.parametrize("field", ["name", "kind", "source", "topology", "gather", "fingerprint", "created"])
def test_a_long_field_of_a_profile_is_not_quoted_whole(field: str, files: dict[str, Path], tmp_path: Path) -> None:
    bad = tmp_path / "p.json"
    bad.write_text(
        json.dumps({**json.loads(files["profile"].read_text(encoding="utf-8")), field: "x" * 200_000}), encoding="utf-8"
    )
    assert "p.json" in refused(["profiles", "show", str(bad)])


def options() -> Iterator[tuple[str, click.Command, str]]:
    """Every command with every option of it that takes a value."""

    def walk(command: click.Command, path: str) -> Iterator[tuple[str, click.Command, str]]:
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                yield from walk(found, f"{path} {name}".strip())
            return
        for option in command.params:
            if isinstance(option, click.Option) and not option.is_flag:
                yield path, command, option.opts[0]

    return walk(main, "")


def test_no_command_quotes_the_whole_of_a_long_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that would start ranks only read their options."""
    for path, command, option in options():
        if path in ("demo", "measure", "bench", "emulate", "routing record", "doctor"):
            monkeypatch.setattr(command, "callback", lambda **given: None)
        for value in ("x" * 100_000, EVIL * 5000):
            result = CliRunner().invoke(main, [*path.split(), option, value], prog_name="commlayer")
            assert result.exit_code in (0, 2), f"{path} {option}: {result.output[:2000]} {result.exception!r}"
            assert len(result.output) < 6000, f"{path} {option}"
            assert not [char for char in result.output if char != "\n" and unicodedata.category(char)[0] == "C"]


ERRORS = {
    "of arithmetic": (ZeroDivisionError("division by zero"), 3, "ZeroDivisionError: division by zero"),
    "of recursion": (RecursionError("too deep"), 3, "RecursionError: too deep"),
    "of an attribute": (AttributeError("no such"), 3, "AttributeError: no such"),
    "of ours": (InternalError("a bug"), 3, "a bug"),
    "of memory": (MemoryError(), 1, "there is not enough memory for this"),
    "of the system": (OSError(errno.EIO, "Input/output error", "there"), 1, "there: Input/output error"),
    "of the system, nowhere": (ConnectionResetError(errno.ECONNRESET, "reset by peer"), 1, "reset by peer"),
    "long": (KeyError("x" * 200_000), 3, "KeyError: 'xx"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_whatever_is_raised_is_a_message_and_a_status(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error, status, said = ERRORS[name]

    def fail(*given: object, **more: object) -> None:
        raise error

    monkeypatch.setattr(commlayer.cli.profiles.list_, "callback", fail)
    result = CliRunner().invoke(main, ["profiles", "list"], prog_name="commlayer")
    assert result.exit_code == status
    assert result.stderr.startswith(f"error: {said}")
    assert ("please report it" in result.stderr) == (status == 3)
    assert "Traceback" not in result.stderr
    assert len(result.stderr) < 3000
    traced = CliRunner().invoke(main, ["--traceback", "profiles", "list"], prog_name="commlayer")
    assert traced.exit_code == status
    assert "Traceback" in traced.stderr


def test_a_file_of_ours_is_never_opened_as_a_closed_stdout(tmp_path: Path, files: dict[str, Path]) -> None:
    """The number of a descriptor that the shell has closed is the next one to be given away: run as a program."""
    import subprocess

    out = tmp_path / "merged.json"
    command = f'"{sys.executable}" -m commlayer trace "{files["traces"]}" -o "{out}" >&- 2>&-'
    done = subprocess.run(["sh", "-c", command], check=False, timeout=60, env=os.environ)
    assert done.returncode == 1
    assert json.loads(out.read_bytes())
