"""Bad input, as a stranger types it: each command refuses it, names what was typed, and says what is expected."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from commlayer.cli.commands import Command, CommandGroup, is_repeatable
from commlayer.cli.failure import as_typed
from commlayer.cli.main import main
from commlayer.cli.option_types import COUNT, DELAY_US, RATE_GBPS, TIMEOUT_US
from commlayer.cli.plan import plan
from commlayer.cli.search import search_command

JOB = "-m mixtral-8x7b -c h100-eos -g 16 --global-batch 32 --sequence 4096"
LENGTHLESS = JOB.partition(" --sequence")[0]
MAPPING = "--tp 2 --ep 8 --pp 2"
DEGREES = f"{MAPPING} --recompute full"
PROFILE = "-p emulated-2x4 --collective all_reduce --bytes 1MiB"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="commlayer")


def refused(*arguments: str) -> str:
    """Return what stderr says, on one line. stdout stays empty: nobody takes nonsense for an answer."""
    result = run(*arguments)
    assert result.exit_code == 2, f"{result.output}\n{result.exception!r}"
    assert not result.stdout
    return " ".join(result.stderr.split())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "list.json").write_text("[1, 2]", encoding="utf-8")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    return tmp_path


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("command", "says"),
    [
        # numbers that cannot be
        (f"estimate {JOB} --efficiency nan", "'--efficiency': expected a number, got 'nan'"),
        (f"estimate {JOB} --inter-gbps inf", "'--inter-gbps': inf is not in the range"),
        (f"estimate {JOB} --domain 100000000000", "'--domain': 100000000000 is more than 1,000,000,000"),
        (f"estimate {JOB} --mtp 100000", "mtp_layers: expected at most layers=32"),
        (f"estimate {JOB} --imbalance 1e9", "--imbalance 1e+09: expected at most 4, the experts of mixtral-8x7b over"),
        (
            f"estimate {JOB} --ep 2 --imbalance 2 --capacity-factor 1",
            "--imbalance: with --capacity-factor every expert has",
        ),
        (f"search {JOB} --capacity-factor 1 --routing empty", "--routing: with --capacity-factor every expert has"),
        (
            f"what-if {JOB} --capacity-factor 1 --vary skew --values 0,1",
            "--capacity-factor: every expert has as many rows then",
        ),
        (f"estimate {JOB} --ep 2 --imbalance 3", "--imbalance 3: expected at most ep=2"),
        (f"search {JOB} --ep 1 --ep 2 --imbalance 3", "--imbalance 3: expected at most ep=2"),
        (
            "plan -p emulated-2x4 --batch 1000000000 --sequence 1000000000 --hidden 9",
            "expected less than 1 EiB together",
        ),
        ("plan -p emulated-2x4 --batch 0 --sequence 1 --hidden 9", "'--batch': 0 is not in the range"),
        ("measure --emulate 2x2 --factor 1.0000001", "a factor that makes at most 1000 sizes"),
        ("measure --emulate 2x2 --timeout 0s", "'--timeout': expected a time above zero"),
        ("emulate --delay 99h -- true", "'--delay': expected at most 10s, got '99h'"),
        (f"estimate {JOB} --capacity-factor 1e300", "'--capacity-factor': 1e+300 is not in the range"),
        (f"estimate {JOB} --recompute nope", "'--recompute': expected none, megascale, full, or some of"),
        ("demo --shape 100000x100000", "'--shape': expected \"NODESxRANKS\""),
        # options of which one would be ignored
        (f"estimate {JOB} --folded --unfolded", "expected --folded or --unfolded, got both"),
        (f"search {JOB} --folded --unfolded", "expected --folded or --unfolded, got both"),
        (f"what-if {JOB} --vary skew --values 0,1 --imbalance 2", "--imbalance: --vary skew takes its place"),
        (f"what-if {JOB} --vary precision --values bf16 --precision bf16", "--precision: --vary precision takes"),
        (f"what-if {JOB} --vary inter-gbps --values 1,2 --points 3", "--points says at how many places"),
        (f"what-if {JOB} --vary gpus --from 8 --to 16 --points 3", "--points says at how many places"),
        ("emulate --memory 1tbyte -- true", "--memory and --scale are of the accelerator whose rate --compute gives"),
        (
            f"estimate {JOB} {MAPPING} --recompute mlp",
            "--recompute mlp of mixtral-8x7b: mlp is of layers without experts",
        ),
        (
            f"estimate {JOB} {MAPPING} --precision fp8 --recompute moe_act",
            "--recompute moe_act of mixtral-8x7b: precision fp8 is fp8-delayed on H100",
        ),
        (
            f"estimate {JOB} --software megatron --dispatcher deepep --dispatch-precision fp8",
            "--dispatch-precision: with ep=1 and etp=1 no token goes to another rank",
        ),
        # what cannot be on that cluster
        (f"plan {PROFILE} --group 2x2 --siblings 7", "--siblings 7: expected at most 2"),
        (f"plan {PROFILE} --siblings 2", "--siblings 2: expected at most 1"),
        ("profiles show nope", "got 'nope'. `commlayer profiles list` shows all"),
        ("profiles show emulated-2x44", "Did you mean emulated-2x4, emulated-"),
        ("emulate --inter foo -- true", "--inter: expected a rate with its unit, got 'foo'"),
        # values of what-if
        (
            f"what-if {JOB} --vary gpus --from 1 --to 1e300",
            "--to of gpus: '1.0000000000000001e+300' is not a valid integer",
        ),
        (f"what-if {JOB} --vary gpus --from -5 --to 5", "'--from': -5.0 is not in the range x>=0"),
        (f"what-if {JOB} --vary gpus --values 1000000000", "--values of gpus: 1000000000 is not in the range"),
        (f"what-if {JOB} --vary gpu --values h200,", "--values of gpu: expected names between commas"),
        (f"what-if {JOB} --vary skew --values 1e300", "--values of skew: 1e+300 is not in the range"),
        (f"what-if {JOB} --vary inter-gbps --values nan", "--values of inter-gbps: expected a number, got 'nan'"),
        # sequences
        (f"search {LENGTHLESS} --sequence abc", "'abc' is not a valid integer"),
        (f"search {LENGTHLESS} --sequence 0K", "'--sequence': 0 is not in the range x>=1"),
        (f"search {LENGTHLESS} --sequence 999999999999M", "is more than"),
        (f"search {LENGTHLESS} --sequence 4K --sequence 8K --top 3", "--top is of one --sequence: leave it out"),
        (f"search {LENGTHLESS} --sequence 4K --sequence 8K --export megatron", "--export is of one --sequence"),
        (f"what-if {JOB} --vary sequence --values 4K,", "--values of sequence: '' is not a valid integer"),
        # files and folders
        ("demo --output /dev/null", "'--output': expected a folder, got '/dev/null', which is none"),
        ("demo --output empty/below", "which is none: name another"),
        ("plan -p emulated-2x4 --bytes 1MiB --trace " + 300 * "x", "File name too long"),
        ("profiles export emulated-2x4 -o empty", "expected a folder, got"),
        (
            "profiles import list.json -o new.json",
            "list.json, as NCCL Inspector's entry 1: field (the whole): expected object, got int",
        ),
        ("profiles import bytes -o new.json", "bytes: expected UTF-8 text with times of NCCL, got other bytes at 0"),
        ("profiles import empty -o new.json --collective nope", "--collective: expected one of all_reduce"),
    ],
)
def test_bad_input_is_refused_in_the_words_of_who_typed_it(command: str, says: str) -> None:
    assert says in refused(*command.split())


def test_a_file_without_a_name_is_refused_before_anything_is_done() -> None:
    for option in ("--trace", "--picture", "--report"):
        told = refused("estimate", *JOB.split(), *DEGREES.split(), option, "")
        assert f"'{option}': expected the name of a file, got none" in told
    assert "'-o' / '--output': expected the name of a folder, got none" in refused("demo", "-o", "")


def test_fp8_dispatch_is_of_tokens_that_go_to_parts_of_experts_too() -> None:
    options = "--etp 2 --tp 2 --pp 2 --recompute full --software megatron --dispatch-precision fp8 --json"
    assert run("estimate", *JOB.split(), *options.split()).exit_code == 0


def test_help_names_no_range_without_an_end() -> None:
    """An IntRange or FloatRange of click that has no ends says so in Python's words."""
    for name in ("estimate", "search", "what-if", "plan", "measure", "bench", "emulate", "trace"):
        assert "None" not in run(name, "--help").stdout


@pytest.mark.parametrize("kind", [COUNT, RATE_GBPS])
@pytest.mark.parametrize("text", ["nan", "inf", "-1", "1e400", "", "abc", "9" * 400])
def test_what_is_no_number_is_refused(kind: click.ParamType, text: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(click.BadParameter):
        kind.convert(text, None, None)


def test_times_have_a_least_and_a_most() -> None:
    assert DELAY_US.convert("10s", None, None) == 1e7
    assert DELAY_US.convert("0us", None, None) == 0
    for kind, text in ((DELAY_US, "11s"), (TIMEOUT_US, "0s"), (TIMEOUT_US, "99999999h")):
        with pytest.raises(click.BadParameter):
            kind.convert(text, None, None)


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("Policy.tolerance: expected a fraction", "--tolerance: expected a fraction"),
        ("max_chunks: expected at least 1", "--max-chunks: expected at least 1"),
        ("profile: expected a name", "--profile: expected a name"),
        ("max_chunks 0: expected at least 1", "--max-chunks 0: expected at least 1"),
        ("elsewhere: expected", "elsewhere: expected"),
        ("a sentence without a field", "a sentence without a field"),
    ],
)
def test_errors_name_the_option_that_was_typed(message: str, typed: str) -> None:
    assert as_typed(message, plan) == typed
    assert as_typed(message, None) == message
    assert as_typed(message, click.Group("group", commands={"plan": plan, "search": search_command})) == typed


def all_commands(command: click.Command = main, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Walk the program: each command with the words that call it."""
    yield path, command
    if isinstance(command, click.Group):
        with click.Context(command) as context:
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                yield from all_commands(found, *path, name)


def test_an_option_of_one_value_is_refused_twice_by_every_command() -> None:
    for path, command in all_commands():
        assert isinstance(command, (Command, CommandGroup)), path
        for option in command.params:
            if isinstance(option, click.Option):
                one, other = [option.opts[0], "4"], [option.opts[-1], "5"]
                taken = [word for word in (*one, *other) if not option.is_flag or word.startswith("-")]
                told = f"Option {option.get_error_hint(click.Context(command))} takes one value, and was given 2 times"
                with nullcontext() if is_repeatable(option) else pytest.raises(click.UsageError, match=re.escape(told)):
                    command.refuse_repeated(click.Context(command), taken)


def test_help_cuts_no_sentence_short_and_says_what_a_search_looks_at() -> None:
    for path, command in all_commands():
        if isinstance(command, CommandGroup):
            assert "..." not in run(*path, "--help").stdout.partition("ommands")[2], path
    told = " ".join(run("search", "--help").stdout.split())
    for words in (
        "of a micro-batch. [1, 2, 4, 8]",
        "products. [bf16]",
        "shards. [1]",
        "commlayer: none, megascale, full; megatron: none, moe_act+layernorm, full;",
    ):
        assert words in told


def test_the_last_of_two_values_does_not_win_silently() -> None:
    told = refused("estimate", *JOB.split(), *DEGREES.split(), "--tp", "4")
    assert "Option '--tp' takes one value, and was given 2 times: give it once." in told
    assert run("search", *JOB.split(), "--tp", "1", "--tp", "2", "--ep", "8", "--pp", "2").exit_code == 0
    assert run("profiles", "list", "--json", "--json").exit_code == 0


def test_a_file_counts_once_and_says_itself_of_what_it_is(here: Path) -> None:
    assert run("profiles", "export", "emulated-2x4", "-o", "times").exit_code == 0
    one, other = "times/all_reduce_inter_8.json", "times/../times/all_reduce_inter_8.json"
    assert "expected each file once" in refused("profiles", "import", one, other, "-o", "new.json")
    of_another = refused("profiles", "import", one, "--collective", "broadcast", "-o", "new.json")
    assert "--collective: times/all_reduce_inter_8.json says itself" in of_another
    assert not (here / "new.json").exists()
