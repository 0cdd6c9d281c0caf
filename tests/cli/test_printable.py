"""The contents of files and variables are printed so that a terminal shows it and obeys none of it."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from synthetic_profiles import synthetic_profile

from commlayer.cli.main import main
from commlayer.cli.progress_bars import progress
from commlayer.profiles.errors import CollectiveTimeoutError, CommlayerError, ProfileError
from commlayer.profiles.printable import printable, shortened
from commlayer.profiles.profile import parse_profile, read_profile
from commlayer.statistics import print_stats
from commlayer.traces.call_records import rank_name
from commlayer.traces.rank_files import RankTrace, write_trace

EVIL = "\x1b]0;owned\x07\x1b[31m\x9b2J\x7f\u202e[bold]x[/bold] \\[red] café"
SHOWN = "\\x1b]0;owned\\x07\\x1b[31m\\x9b2J\\x7f\\u202e[bold]x[/bold] \\[red] café"


@given(st.text(st.characters()))
def test_whatever_is_printed_can_be_shown(text: str) -> None:
    shown = printable(text)
    shown.encode()  # no half of a surrogate pair
    assert not [char for char in shown if char not in "\n\t" and unicodedata.category(char)[0] == "C"]
    assert printable(shown) == shown


def test_what_a_terminal_shows_stays_as_it_is() -> None:
    text = "4.2 µs ≥ 3 × \N{NO-BREAK SPACE}→ 日本 é\n\tnext [bold]"
    assert printable(text) == text
    assert printable("a\nb", keep="") == "a\\x0ab"
    assert printable("\ud800 \U000e0001 \u2028") == "\\ud800 \\U000e0001 \\u2028"


def test_a_long_text_shows_its_ends_and_how_long_it_is() -> None:
    assert shortened("a" * 200) == "a" * 200
    assert shortened("b" + "a" * 4998 + "c") == "b" + "a" * 99 + "…" + "a" * 49 + "c (5000 characters)"


def test_errors_are_fit_to_be_printed() -> None:
    assert str(CommlayerError(EVIL)) == SHOWN
    assert str(CollectiveTimeoutError(EVIL)) == SHOWN  # also an OSError, which has a text of its own
    assert str(ProfileError("one\ntwo")) == "one\ntwo"
    content = json.loads(synthetic_profile().to_json()) | {EVIL: 1}
    with pytest.raises(ProfileError) as caught:
        parse_profile(json.dumps(content), EVIL)
    assert str(caught.value).startswith(SHOWN)
    assert str(caught.value).count("owned") == 2
    assert "\x1b" not in str(caught.value)


@pytest.fixture
def evil_files(tmp_path: Path) -> dict[str, str]:
    """A profile, a cluster, a model and traces that say EVIL wherever there is room for a text."""
    profile = synthetic_profile(error=0.01)
    profile = profile.replace(name=EVIL, source=f"{EVIL} source", environment={"host": EVIL, EVIL: "x"})
    paths = {name: str(tmp_path / f"{name}.json") for name in ("profile", "cluster", "model", "damaged")}
    profile.save(paths["profile"])
    cluster = {"name": EVIL, "gpu": "h100", "domain": 8, "peaks": {"inter_gbps": 50, "intra_gbps": 450}, "source": EVIL}
    Path(paths["cluster"]).write_text(json.dumps(cluster), encoding="utf-8")
    model = {
        "layers": 4,
        "hidden": 1024,
        "heads": 16,
        "kv_heads": 16,
        "head_dim": 64,
        "width": 4096,
        "vocabulary": 1000,
    }
    model |= {"experts": 8, "top_k": 2}
    Path(paths["model"]).write_text(
        json.dumps({"format": "commlayer-model", "name": EVIL, **model, "source": EVIL}), encoding="utf-8"
    )
    Path(paths["damaged"]).write_text(
        json.dumps({**json.loads(Path(paths["profile"]).read_text(encoding="utf-8")), EVIL: 1}), encoding="utf-8"
    )
    folder = tmp_path / "trace"
    folder.mkdir()
    trace = RankTrace(
        job=EVIL,
        rank=0,
        world_size=2,
        host=EVIL,
        pid=1,
        versions={"torch": EVIL},
        readings=(),
        opened_ns=0,
        closed_ns=1000,
        num_dropped=0,
        calls=(),
        marks=(),
    )
    write_trace(folder / rank_name(0), [], commlayer=trace)
    return paths | {"trace": str(folder)}


JOB = ["--model", "{model}", "--cluster", "{cluster}", "--gpus", "8", "--global-batch", "8", "--sequence", "1024"]
COMMANDS: dict[str, tuple[list[str], int]] = {
    "show": (["profiles", "show", "{profile}"], 0),
    "validate": (["profiles", "validate", "{profile}", "{damaged}"], 2),
    "diff": (["profiles", "diff", "{profile}", "monta-a800-2x8"], 1),
    "show damaged": (["profiles", "show", "{damaged}"], 2),
    "show nothing": (["profiles", "show", EVIL], 2),
    "plan": (["plan", "--profile", "{profile}", "--bytes", "1MiB"], 0),
    "plan without its curve": (["plan", "--profile", "{profile}", "--bytes", "1MiB", "--tp", "3", "--ep", "7"], 2),
    "trace": (["trace", "{trace}"], 0),
    "trace of no job": (["trace", "{trace}", "--job", EVIL + "x"], 2),
    "estimate": (["estimate", *JOB, "--ep", "8"], 0),
    "search": (["search", *JOB], 0),
    "what-if": (["what-if", *JOB, "--vary", "inter-factor", "--values", "0.5,1"], 0),
    "no option": (["plan", "--profile", "{profile}", "--bytes", EVIL], 2),
}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_prints_what_a_terminal_would_obey(evil_files: dict[str, str], name: str, as_json: bool) -> None:
    arguments, status = COMMANDS[name]
    given = [argument.format(**evil_files) if "{" in argument else argument for argument in arguments]
    result = CliRunner().invoke(main, given + ["--json"] * as_json, color=False)
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    assert "owned" in result.output
    hidden = {char for char in result.output if char != "\n" and unicodedata.category(char)[0] == "C"}
    assert not hidden
    if not as_json:
        assert "[bold]x[/bold]" in result.output  # no markup


def test_json_says_the_same_text(evil_files: dict[str, str]) -> None:
    result = CliRunner().invoke(main, ["profiles", "show", evil_files["profile"], "--json"])
    found = json.loads(result.stdout)
    assert (found["name"], found["environment"]["host"]) == (EVIL, EVIL)


def test_doctor_shows_a_profile_s_name(evil_files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMLAYER_PROFILE", evil_files["profile"])
    result = CliRunner().invoke(main, ["doctor"])
    assert "owned" in result.output
    assert "\x1b]" not in result.output
    assert "\x9b" not in result.output
    monkeypatch.setenv("COMMLAYER_PROFILE", EVIL)
    result = CliRunner().invoke(main, ["doctor"])
    assert "owned" in result.output
    assert "\x1b]" not in result.output


def test_progress_shows_what_was_done(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress("reading", 1) as advance:
        advance(EVIL)
    shown = capsys.readouterr().err
    assert "[bold]x[/bold]" in shown
    assert "\x1b]0" not in shown


def test_statistics_of_a_group_show_its_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    call: Any = {"collective": EVIL, "plan": "flat", "calls": 1, "logical_bytes": 1, "wire_bytes": None, "time_us": 1.0}
    group: Any = {"group": "0", "description": "", "ranks": [0], "calls": [call], "unplanned": {EVIL: 1}}
    print_stats({"rank": 0, "groups": [group], "dispatches": [], "placements": [], "spills": []})
    shown = capsys.readouterr().err
    assert "\x1b]" not in shown
    assert "[bold]x[/bold]" in shown


def test_the_file_keeps_what_its_maker_wrote(evil_files: dict[str, str]) -> None:
    assert read_profile(evil_files["profile"]).name == EVIL


@pytest.mark.parametrize(
    "command", [["profiles", "show", "{profile}"], ["plan", "-p", "{profile}", "-b", "1MiB"]], ids=["profile", "plan"]
)
@pytest.mark.parametrize("text", [EVIL, "costs $x^$ and $"], ids=["escapes", "dollars"])
def test_a_picture_shows_a_source_as_it_is(tmp_path: Path, command: list[str], text: str) -> None:
    """SVG is XML, which has no control characters; between dollars matplotlib reads mathematics."""
    profile, picture = str(tmp_path / "p.json"), tmp_path / "p.svg"
    synthetic_profile(error=0.01).replace(name=text, source=text).save(profile)
    arguments = [word.format(profile=profile) for word in command]
    result = CliRunner().invoke(main, [*arguments, "--picture", str(picture)])
    assert result.exit_code == 0, result.output
    ElementTree.fromstring(picture.read_text(encoding="utf-8"))
