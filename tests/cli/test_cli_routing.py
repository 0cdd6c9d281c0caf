"""The command routing, and the planner's options that read what it records."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from commlayer.cli.main import main
from commlayer.cli.routing import _scaled
from commlayer.readers.routing_files import read_routing, write_routing
from examples.synthetic_loads import synthetic_loads

JOB = ("-m", "mixtral-8x7b", "-c", "h100-eos", "-g", "16", "--global-batch", "32", "--sequence", "4096")
ONE = ("--tp", "1", "--pp", "2", "--vpp", "1", "--micro-batch", "1", "--ep", "8", "--recompute", "full")
PLACE = ("-c", "h100-eos", "--shape", "2x4", "-m", "deepseekmoe-16b", "--tokens", "65536")


def call(*arguments: str, status: int = 0) -> Result:
    result = CliRunner().invoke(main, list(arguments), prog_name="commlayer")
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    return result


def call_json(*arguments: str) -> Any:
    return json.loads(call(*arguments, "--json").stdout)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("routing") / "routing.json"
    write_routing(path, synthetic_loads("zipf", experts=8, layers=2, steps=20, tokens=512, top_k=2, seed=1))
    return str(path)


def test_show_says_who_is_popular(file: str, tmp_path: Path) -> None:
    found = call_json("routing", "show", file, "--ranks", "4", "--picture", str(tmp_path / "load.svg"))
    loads = read_routing(file)
    assert [layer["name"] for layer in found["layers"]] == ["layer 0", "layer 1"]
    for place, layer in enumerate(found["layers"]):
        assert layer["popular"][0][0] == loads.counts[:, place].sum(0).argmax()
        rows = loads.counts[:, place].reshape(20, 4, 2).sum(-1)
        assert layer["busiest"] == pytest.approx((rows.max(1) / rows.mean(1)).mean(), abs=1e-3)
    assert "<svg" in (tmp_path / "load.svg").read_text(encoding="utf-8")
    text = call("routing", "show", file, "--ranks", "4").stdout
    assert "20 steps of 1 call, 8 experts, top-2" in text
    assert "layer 1" in text


def test_replay_predicts_four_ways(file: str, tmp_path: Path) -> None:
    picture = tmp_path / "ranks.svg"
    static, eplb, llep, ours = call_json("routing", "replay", file, *PLACE, "--every", "5", "--picture", str(picture))
    assert [each["placement"] for each in (static, eplb, llep, ours)] == ["static", "eplb", "llep", "place"]
    assert (static["of_static"], static["migrations"]) == (1.0, 0)
    assert ours["of_static"] < min(1.0, eplb["of_static"])
    assert (llep["migrations"], llep["busiest"] < static["busiest"]) == (0, True)
    assert "ranks, place" in picture.read_text(encoding="utf-8")
    told = call("routing", "replay", file, *PLACE)
    assert "predicted, nothing was run" in told.stdout
    assert f"note: deepseekmoe-16b has 64 experts, and {file} 8: the model says no more" in told.stderr


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("show", "FILE", "--ranks", "9"), "at most the 8 experts"),
        (("show", "FILE", "--layer", "2", "--picture", "x.svg"), "one of 0 to 1"),
        (("replay", "FILE"), "--cluster and --shape"),
        (("replay", "FILE", "-c", "h100-eos", "--shape", "1x4"), "--hidden and --width"),
        (("replay", "FILE", *PLACE, "--layer", "5"), "one of 0 to 1"),
        (
            ("replay", "FILE", "-c", "h100-eos", "--shape", "2x8", "-m", "deepseekmoe-16b", "--tokens", "65536"),
            "8 experts for 16 ranks: expected at least as many experts as ranks",
        ),
    ],
)
def test_misuse_is_told(file: str, arguments: tuple[str, ...], match: str) -> None:
    assert match in call("routing", *(file if word == "FILE" else word for word in arguments), status=2).stderr


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("{}", encoding="utf-8")
    assert "this is no routing file" in call("routing", "show", str(tmp_path / "r.json"), status=2).stderr


def test_mappings_are_searched_under_recorded_routing(file: str) -> None:
    even, skewed = (call_json("search", *JOB, *ONE, "--top", "1", *more) for more in ((), ("--routing", file)))
    assert skewed["mappings"][0]["step_us"] > 1.1 * even["mappings"][0]["step_us"]
    assert even["job"]["most_popular_expert"] is None
    assert skewed["job"]["most_popular_expert"] == pytest.approx(read_routing(file).popularity()[0], abs=1e-6)
    assert "skewed routing" in call("search", *JOB, *ONE, "--top", "1", "--routing", file).stdout
    other = call("search", "-m", "deepseek-v3", *JOB[2:], "--routing", file, status=2)
    assert f"--routing {file}: expected choices among the 256 experts of deepseek-v3, got 8" in other.stderr


def test_skew_is_varied() -> None:
    points = call_json("what-if", *JOB, *ONE, "--vary", "skew", "--from", "0", "--to", "1", "--points", "3")["ways"][0][
        "points"
    ]
    assert [point["value"] for point in points] == [0.0, 0.5, 1.0]
    times = [point["estimate"]["step_us"] for point in points]
    assert times == sorted(times)
    assert times[2] > 1.2 * times[0]
    assert (
        "--values of skew: -1.0 is not in the range"
        in call("what-if", *JOB, *ONE, "--vary", "skew", "--values", "-1", status=2).stderr
    )


PROGRAM = """
import os
from commlayer.readers.routing_files import routing_path, write_routing
from examples.synthetic_loads import synthetic_loads
rank = int(os.environ["RANK"])
if rank % 2 == 0:  # one of each expert group
    loads = synthetic_loads("zipf", experts=4, steps=3, top_k=1, tokens=8)
    write_routing(routing_path(os.environ["COMMLAYER_ROUTING"], rank), loads)
"""


def test_record_adds_up_what_ranks_wrote(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    call("routing", "record", "-o", str(path), "--shape", "1x4", "--", sys.executable, "-c", PROGRAM)
    one = synthetic_loads("zipf", experts=4, steps=3, top_k=1, tokens=8)
    assert (read_routing(path).counts == 2 * one.counts).all()


def test_a_program_without_experts_is_told(tmp_path: Path) -> None:
    path = str(tmp_path / "r.json")
    assert "recorded nothing" in call("routing", "record", "-o", path, "--shape", "1x1", "--", "true", status=2).stderr


@pytest.mark.parametrize("tokens", ["1", "8"])
def test_loads_are_scaled_to_few_tokens_without_losing_them(file: str, tokens: str) -> None:
    rows = call_json("routing", "replay", file, *PLACE[:-1], tokens)
    assert [row["placement"] for row in rows] == ["static", "eplb", "llep", "place"]
    assert _scaled(read_routing(file), int(tokens)).counts.sum(-1).tolist() == [[2 * int(tokens)] * 2] * 20


def test_routing_without_a_choice_is_refused(file: str, tmp_path: Path) -> None:
    loads = read_routing(file)
    write_routing(tmp_path / "none.json", replace(loads, counts=0 * loads.counts))
    told = call("routing", "replay", str(tmp_path / "none.json"), *PLACE, status=2).stderr
    assert "expected recorded choices, got none in any step" in told
