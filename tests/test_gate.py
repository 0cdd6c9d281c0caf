"""All that commlayer prints, and all that it reads of others, goes through the gates, which obey none of it."""

from __future__ import annotations

import ast
import io
import re
import sys
import warnings
from pathlib import Path

import pytest

from commlayer.profiles.printable import say, say_table, warn

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("commlayer", "scheduler", "profiles", "integrations")
GATES = {
    "profiles/printable.py": "of running jobs",
    "commlayer/cli/tables.py": "of commands",
    "commlayer/cli/progress_bars.py": "rich's bar, whose text is made printable there",
}
PRINTS = {
    "print",
    "click.echo",
    "click.secho",
    "click.echo_via_pager",
    "rich.print",
    "sys.exit",
    "SystemExit",
    "traceback.print_exc",
    "traceback.print_exception",
    "traceback.print_stack",
    "warnings.warn",
    "warnings.warn_explicit",
    "warnings.showwarning",
}
DECODES = {
    "array.array.frombytes",
    "gzip.decompress",
    "json.load",
    "json.loads",
    "msgspec.json.decode",
    "msgspec.json.Decoder",
    "msgspec.msgpack.decode",
    "msgspec.msgpack.Decoder",
    "zlib.decompress",
    "zlib.decompressobj",
}
DECODERS = {
    "commlayer/peer_words.py": "words of peers",
    "profiles/strict_json.py": "JSON files of ours",
    "commlayer/diagnosis/recorder_dumps.py": "dumps of torch's recorder, with more fields than are read, of another's making",
    "commlayer/readers/routing_files.py": "counts that are packed within one of these, unpacked to the size that the file says",
    "commlayer/readers/nccl_files.py": "files of NCCL's, in three forms of text",
    "commlayer/emulation/accelerators/device.py": "what the emulator tells its own processes",
    "commlayer/emulation/accelerators/starting.py": "what its own processes tell the emulator",
    "commlayer/emulation/fabric.py": "the same",
    "commlayer/emulation/fabric_process.py": "the same",
    "commlayer/emulation/protocol.py": "the same",
}
PRINTING = "|".join(name.rpartition(".")[2] for name in PRINTS)
WORDS = re.compile(rf"\b({PRINTING}|write\w*|logging|Console)\b")
"""A program without any of these words prints nothing, and need not be parsed."""
EVIL = "\x1b]0;owned\x07\x1b[2J\u202e"


def used(source: str, wanted: set[str]) -> list[str]:
    """Return the names of ``wanted`` that ``source`` reads, by whatever name it has imported them."""
    if not any(all(word in source for word in name.split(".")) for name in wanted):
        return []
    tree = ast.parse(source)
    names = imported(tree)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            first, dot, rest = spelt(node).partition(".")
            found.add(names.get(first, first) + dot + rest)
    return sorted(wanted & found)


def spelt(node: ast.expr) -> str:
    """Return the text of a name or an attribute, as ``ast.unparse`` does, which takes many times as
    long. Brackets around what is no name are left out."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{spelt(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ast.unparse(node)


def imported(tree: ast.AST) -> dict[str, str]:
    """Return the names that a module imports, and what each stands for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
    return names


def bypasses(source: str) -> list[str]:
    """Find what prints beside the gates in ``source``: ``sys.exit(text)`` does too, and a function given away by its name."""
    if not WORDS.search(source):
        return []
    tree = ast.parse(source)
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = imported(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name == "logging"]
        if not isinstance(node, (ast.Name, ast.Attribute)) or not isinstance(node.ctx, ast.Load):
            continue
        first, dot, rest = spelt(node).partition(".")
        name = names.get(first, first) + dot + rest
        call = called.get(id(node))
        is_stream = name.startswith(("sys.stdout.", "sys.stderr.", "sys.__std")) and ".write" in name
        if name == "os.write" and call is not None:
            is_stream = isinstance(call.args[0], ast.Constant) and call.args[0].value in (1, 2)
        if name in ("sys.exit", "SystemExit") and not _exits_with_words(call):
            continue
        if is_stream or name in PRINTS or name.endswith("rich.console.Console"):
            found.append(name)
    return sorted(found)


def _exits_with_words(call: ast.Call | None) -> bool:
    return call is not None and any(isinstance(each, (ast.JoinedStr, ast.BinOp)) for each in call.args)


def test_nothing_prints_beside_the_gates() -> None:
    found = {}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            if name not in GATES and (prints := bypasses(path.read_text(encoding="utf-8"))):
                found[name] = prints
    assert found == {}, "say, say_table, warn, or echo of a command"
    for name in GATES:
        assert bypasses((ROOT / name).read_text(encoding="utf-8")), f"{name} is no gate any more"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("print(x)", "print"),
        ("tell = given or print", "print"),
        ("import sys\nsys.stderr.write(x)", "sys.stderr.write"),
        ("import sys\nsys.stdout.buffer.write(x)", "sys.stdout.buffer.write"),
        ("import os\nos.write(2, x)", "os.write"),
        ("import sys\nsys.exit(f'no {x}')", "sys.exit"),
        ("raise SystemExit('no ' + x)", "SystemExit"),
        ("import warnings\nwarnings.warn(x)", "warnings.warn"),
        ("from warnings import warn as tell\ntell(x)", "warnings.warn"),
        ("import click\nclick.echo(x)", "click.echo"),
        ("from rich.console import Console\nConsole().print(x)", "rich.console.Console"),
        ("import click as c\nc.echo(x)", "click.echo"),
        ("import logging", "logging"),
        ("import traceback\ntraceback.print_exc()", "traceback.print_exc"),
    ],
)
def test_what_prints_beside_the_gates_is_found(source: str, name: str) -> None:
    assert bypasses(source) == [name]


@pytest.mark.parametrize(
    "source", ["say(x)", "import os, sys\nos.write(end, x)\nsys.exit(2)\nsys.stderr.flush()", "self.print(x)"]
)
def test_what_prints_nothing_is_not(source: str) -> None:
    assert bypasses(source) == []


def test_nothing_decodes_beside_the_gates() -> None:
    found = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if used(path.read_text(encoding="utf-8"), DECODES)
    }
    assert found == set(DECODERS), "read_words or inflated of a peer's words, parse_object or parse_record of a file"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import msgspec\nmsgspec.msgpack.decode(x)", "msgspec.msgpack.decode"),
        ("from msgspec import json as j\nread = j.decode", "msgspec.json.decode"),
        ("import zlib as z\nz.decompress(x)", "zlib.decompress"),
        ("from json import loads\nloads(x)", "json.loads"),
    ],
)
def test_what_decodes_beside_the_gates_is_found(source: str, name: str) -> None:
    assert used(source, DECODES) == [name]
    assert used("import msgspec, zlib\nzlib.compress(msgspec.json.encode(x))", DECODES) == []


def test_what_a_job_says_is_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"{EVIL}\nforged")
    say("one\ntwo", keep="\n")
    say_table(EVIL, [EVIL, ">n"], [[EVIL + "\n", "1"]], [EVIL])
    shown = capsys.readouterr().err
    assert shown.startswith("commlayer: \\x1b]0;owned\\x07\\x1b[2J\\u202e\\x0aforged\ncommlayer: one\ntwo\n")
    assert not [evil for evil in ("\x1b]", "\x1b[2J", "\x07", "\u202e") if evil in shown]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn(EVIL)
    assert str(caught[0].message) == "\\x1b]0;owned\\x07\\x1b[2J\\u202e"
    assert caught[0].filename == __file__, "a warning names who asked for it"


@pytest.mark.parametrize("stream", [None, io.StringIO(), io.TextIOWrapper(io.BytesIO(), "ascii")])
def test_a_job_goes_on_whatever_its_stderr_is(stream: io.TextIOBase | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    say("4 µs")
    say_table("µ", ["µ"], [["µ"]])
    if stream is not None:
        stream.seek(0)
        assert stream.readline() in ("commlayer: 4 µs\n", "commlayer: 4 \\xb5s\n")
        stream.close()
    say("nobody hears this")


def test_a_very_long_text_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    say("a" * 1_000_000)
    assert len(capsys.readouterr().err) < 70_000
