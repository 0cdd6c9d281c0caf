"""search, estimate and what-if: what they print, write and refuse, and that they load neither torch nor numpy."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from commlayer.cli.main import main
from commlayer.cli.mapping_output import first_export
from commlayer.cli.what_if import values_of
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping import catalog
from commlayer.scheduler.mapping.job import Job, Setup

JOB = ("--model", "mixtral-8x7b", "--cluster", "h100-eos", "--gpus", "16", "--global-batch", "32", "--sequence", "4096")
FEW = ("--tp", "1", "--tp", "2", "--pp", "2", "--vpp", "1", "--micro-batch", "1", "--ep", "8", "--recompute", "full")
ONE = ("--tp", "2", "--ep", "8", "--pp", "2", "--recompute", "full")
PARTS = {"attention", "experts", "dense", "memory", "head", "recompute", "dispatch", "combine", "tp", "cp", "pp"} | {
    "host",
    "gradients",
    "parameters",
    "bubble",
    "optimizer",
}


def call(*arguments: str, status: int = 0) -> Result:
    result = CliRunner().invoke(main, list(arguments), prog_name="commlayer")
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    return result


def call_json(*arguments: str) -> Any:
    return json.loads(call(*arguments, "--json").stdout)


@pytest.fixture(scope="module")
def searched() -> Any:
    return call_json("search", *JOB, *FEW, "--top", "3")


# search


def test_search_ranks_what_fits_and_says_why(searched: Any) -> None:
    times = [each["step_us"] for each in searched["mappings"]]
    assert len(times) == 3
    assert times[0] == min(times)
    assert all(each["fits"] for each in searched["mappings"])
    assert searched["reasons"][0].startswith(searched["mappings"][0]["mapping"])
    assert searched["searched"]["valid"] >= searched["searched"]["estimated"] >= 3
    assert searched["job"]["model"] == "mixtral-8x7b"
    assert searched["export"] is None
    for kind in ("folded", "unfolded"):
        best = searched[f"best_{kind}"]
        assert best["setup"]["folded"] is (kind == "folded")
        assert best["step_us"] >= times[0]


def test_search_json_says_all_of_an_estimate(searched: Any) -> None:
    best = searched["mappings"][0]
    assert set(best["parts_us"]) <= PARTS
    assert sum(best["parts_us"].values()) == pytest.approx(best["step_us"], rel=1e-6)
    memory = best["memory_bytes"]
    assert memory["total"] == pytest.approx(sum(size for name, size in memory.items() if name != "total"), abs=5)
    assert memory["total"] <= best["memory_limit_bytes"]
    setup = best["setup"]
    assert setup["tp"] * setup["cp"] * setup["pp"] * setup["dp"] == 16
    assert 0 < best["mfu"] < 1
    assert best["tokens_per_s"] == pytest.approx(32 * 4096 / best["step_us"] * 1e6, rel=1e-6)


def test_search_prints_a_table_and_reasons(searched: Any) -> None:
    output = call("search", *JOB, *FEW, "--top", "3").stdout
    for each in searched["mappings"]:
        degrees = each["mapping"].split(",")[0].split()
        assert " ".join(word for word in degrees if re.sub("[A-Z]", "", word) != "1") in output
        assert f"{each['mfu']:.1%}" in output
    assert searched["reasons"][0] in output
    assert "46.7 B parameters" in output
    assert re.search(r"^(close|rough|unknown): ", output, re.MULTILINE)
    assert searched["mappings"][0]["validity"]["word"] in ("close", "rough", "unknown")
    assert searched["memory_margin"] == 0.05


def test_a_row_of_the_search_is_a_line_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = call("search", *JOB, *FEW, "--top", "3").stdout.splitlines()
    ranks = [line for line in lines if re.match(r"[123] ", line)]
    assert len(ranks) == 3
    assert all(len(line) <= 80 and " to " in line for line in ranks)


def test_estimate_says_how_far_it_was_checked() -> None:
    output = call("estimate", *JOB, "--ep", "8").stdout
    assert re.search(r"^(close|rough|unknown): a step takes [\d,]+ to [\d,]+ ms", output, re.MULTILINE)
    assert "nearest: " in output
    validity = call_json("estimate", *JOB, "--ep", "8")["estimate"]["validity"]
    low, high = validity["step_us"]
    assert low < high
    assert len(validity["nearest"]) == 3


def test_a_measured_run_is_fitted_kept_and_found_again(tmp_path: Path) -> None:
    runs = tmp_path / "runs.json"
    plain = call_json("estimate", *JOB, "--ep", "8")["estimate"]
    measured = f"{plain['step_us'] * 1.4 / 1e3} ms"
    output = call("estimate", *JOB, "--ep", "8", "--measured", measured, "--keep-run", str(runs)).stdout
    assert "the rest is taken for this run's own" in output
    fitted = call_json("estimate", *JOB, "--ep", "8", "--measured", str(runs))
    assert plain["step_us"] * 1.1 < fitted["estimate"]["step_us"] < plain["step_us"] * 1.4
    assert fitted["fit"]["factors"]["compute"] > 1
    assert fitted["fit"]["runs"][0]["measured_us"] == pytest.approx(plain["step_us"] * 1.4, rel=1e-3)
    best = call_json("search", *JOB, *FEW, "--top", "1")["mappings"][0]["step_us"]
    assert call_json("search", *JOB, *FEW, "--top", "1", "--measured", str(runs))["mappings"][0]["step_us"] > best
    call("estimate", *JOB, "--ep", "8", "--tp", "2", "--measured", measured, "--keep-run", str(runs))
    assert [run["ep"] for run in json.loads(runs.read_text(encoding="utf-8"))["runs"]] == [8, 8]
    call("estimate", *JOB, "--ep", "8", "--measured", "3 s", "--keep-run", str(runs))
    speeds = [run["measured"] for run in json.loads(runs.read_text(encoding="utf-8"))["runs"]]
    assert speeds == [measured, "3 s"]  # the first mapping again, in place of what it was


def test_a_measured_run_is_one_that_a_gpu_can_have() -> None:
    assert "which no H100 SXM 80GB has" in call("estimate", *JOB, "--ep", "8", "--measured", "1 ms", status=2).output
    rubin = ["-m", "mixtral-8x22b", "-g", "64", "-c", "vr200-nvl72", "--global-batch", "256", "--sequence", "4K"]
    rubin += ["--ep", "8", "--pp", "4", "--software", "megatron", "--measured", "900 ms"]
    assert "an MFU of 110%" in call("estimate", *rubin, status=2).output
    call("estimate", *rubin, "--precision", "fp8")  # whose peak is 4.4 times that of BF16, by which MFU counts


def test_an_option_that_changes_nothing_is_said_to() -> None:
    notes = call("estimate", *JOB, "--ep", "8", "--approximate", "--fabric", "infiniband").stderr.splitlines()
    assert any("--approximate changes nothing" in note for note in notes)
    assert any("--fabric infiniband changes nothing" in note for note in notes)
    assert "changes nothing" not in call("estimate", *JOB, "--ep", "8").stderr


def test_searches_and_variations_say_what_they_are_fitted_to(tmp_path: Path) -> None:
    runs = tmp_path / "runs.json"
    step_ms = call_json("estimate", *JOB, "--ep", "8")["estimate"]["step_us"] * 1.4 / 1e3
    call("estimate", *JOB, "--ep", "8", "--measured", f"{step_ms} ms", "--keep-run", str(runs))
    found = call_json("search", *JOB, *FEW, "--top", "3", "--measured", str(runs))
    assert found["fit"]["factors"]["compute"] > 1
    assert [each["rank_by_time"] for each in sorted(found["mappings"], key=lambda each: each["step_us"])][:1] == [1]
    vary = (
        "what-if",
        *JOB,
        *FEW,
        "--fabric",
        "infiniband",
        "--vary",
        "inter-gbps",
        "--values",
        "25,50",
        "--measured",
        str(runs),
    )
    assert call_json(*vary)["fit"]["runs"][0]["mapping"] == found["fit"]["runs"][0]["mapping"]
    notes = call(*vary).stderr
    assert "fitted to 1 measured run (+40.0% beside the estimate)" in notes
    assert "note: --software was not given" in notes


RUN = '"model": "mixtral-8x7b", "cluster": "h100-eos", "gpus": 16, "global-batch": 32, "sequence": 4096, "ep": 8'


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("[]", "expected JSON object|expected a JSON object"),
        ('{"runs": []}', "expected a measured run, got none"),
        ('{"runs": [{"model": "mixtral-8x7b"}]}', "run 1: Missing option"),
        ('{"runs": [{"modell": "x"}]}', "run 1: No such option"),
        ('{"runs": [{"model": {}}]}', r"runs\[0\]"),
        (f'{{"runs": [{{{RUN}, "measured": 2.5}}]}}', "runs.json: run 1: measured: expected a number and s"),
        (f'{{"runs": [{{{RUN}, "measured": "9e9 s"}}]}}', "runs.json: run 1: measured: a step of"),
        (f'{{"runs": [{{{RUN}, "measured": "1e-300 s"}}]}}', r"run 1: --measured 1e-300 s: an MFU of \d\S*e\+\d+%"),
    ],
)
def test_a_file_that_has_no_runs_is_refused(content: str, match: str, tmp_path: Path) -> None:
    runs = tmp_path / "runs.json"
    runs.write_text(content, encoding="utf-8")
    refused = call("estimate", *JOB, "--ep", "8", "--measured", str(runs), status=2)
    assert re.search(match, refused.stderr)


@pytest.mark.parametrize("speed", ["2.5 s", "no-such-file.json"])
def test_a_search_is_told_of_runs_by_a_file(speed: str) -> None:
    refused = call("search", *JOB, *FEW, "--measured", speed, status=2).stderr
    assert f"--measured: expected a file of runs, got '{speed}', which is none" in " ".join(refused.split())
    assert "--keep-run FILE writes one" in " ".join(refused.split())


def test_what_is_repeated_narrows_the_search(searched: Any) -> None:
    assert {each["setup"]["tp"] for each in searched["mappings"]} <= {1, 2}
    folded = call_json("search", *JOB, *FEW, "--folded", "--tp", "2", "--zero", "3")
    assert {each["setup"]["folded"] for each in folded["mappings"]} == {True}
    assert {each["setup"]["zero"] for each in folded["mappings"]} == {3}
    assert folded["best_unfolded"] is None


def test_a_note_says_of_which_mappings_it_is() -> None:
    few = ("--tp", "1", "--cp", "1", "--pp", "2", "--vpp", "1", "--micro-batch", "1", "--recompute", "full", "--folded")
    notes = call(
        "search", *JOB, *few, "--ep", "4", "--ep", "8", "--dispatcher", "deepep", "--exchange", "all_to_all"
    ).stderr
    assert len(re.findall(r"^note: of mapping [12]: deepep: a token ", notes, re.MULTILINE)) == 2
    one = call(
        "search", *JOB, *few, "--ep", "8", "--dispatcher", "deepep", "--exchange", "all_to_all", "--top", "1"
    ).stderr
    assert re.search(r"^note: deepep: a token ", one, re.MULTILINE)


def test_more_options_are_never_worse(searched: Any) -> None:
    wider = call_json("search", *JOB, *FEW, "--recompute", "megascale", "--top", "1")
    assert wider["mappings"][0]["step_us"] <= searched["mappings"][0]["step_us"]


@pytest.mark.parametrize(("software", "own"), [("megatron", "moe_act+layernorm"), ("commlayer", "megascale")])
def test_a_search_offers_the_recomputation_that_the_software_can_run(software: str, own: str) -> None:
    few = (*FEW[:-2], "--tp", "8", "--exchange", "all_to_all", "--software", software)
    shown = call_json("search", *JOB, *few)["mappings"]
    assert {each["setup"]["recompute"] for each in shown} == {"none", own, "full"}
    precise = (
        *FEW[:-2],
        "--vary",
        "precision",
        "--values",
        "bf16,fp8",
        "--software",
        software,
    )  # fp8 cannot cast again
    [points] = [way["points"] for way in call_json("what-if", *JOB, *precise)["ways"]]
    assert all(point["estimate"] for point in points)


def test_selective_recomputation_is_megatrons() -> None:
    given = (*JOB, "--ep", "8", "--pp", "2")
    named = {word: call_json("estimate", *given, "--recompute", word)["estimate"] for word in _SELECTIVE}
    assert named["selective"] == named["core_attn"]
    assert named["selective"]["setup"]["recompute"] == "core_attn"
    assert named["megascale"]["memory_bytes"]["activations"] < named["core_attn"]["memory_bytes"]["activations"]


_SELECTIVE = ("selective", "core_attn", "megascale")


def test_search_exports_the_best_that_a_trainer_can_run() -> None:
    result = call("search", *JOB, *FEW, "--export", "megatron")
    assert "--tensor-model-parallel-size" in result.stdout
    assert "MFU" not in result.stdout
    assert "mapping" in result.stderr
    exported = call_json("search", *JOB, *FEW, "--export", "torchtitan")["export"]
    assert exported["target"] == "torchtitan"
    assert exported["values"]["parallelism"]["expert_parallel_degree"] == 8


def test_an_export_takes_the_first_mapping_that_goes() -> None:
    job = Job(model=catalog.load("mixtral-8x7b"), gpus=16, global_batch=32, sequence=4096)
    unfolded, folded = Setup(gpus=16, cp=2, ep=8, folded=False), Setup(gpus=16, cp=2, ep=8)
    assert first_export("megatron", job, [unfolded, folded])[0] == 1
    with pytest.raises(UsageError, match=r"nor any other of the 2 mappings .* narrow the search"):
        first_export("megatron", job, [unfolded, unfolded])


def test_search_draws_and_reports(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, report = tmp_path / "a.svg", tmp_path / "a.html"
    result = call("search", *JOB, *FEW, "--top", "2", "--picture", str(picture), "--report", str(report))
    assert "picture: " in result.stderr
    assert "experts" in picture.read_text(encoding="utf-8")
    page = report.read_text(encoding="utf-8")
    assert page.count("<svg") == 3
    assert "Why this one" in page
    assert "<script" not in page


def test_overrides_change_the_cluster() -> None:
    slow = call_json("search", *JOB, *FEW, "--top", "1", "--fabric", "infiniband", "--inter-gbps", "1")
    fast = call_json("search", *JOB, *FEW, "--top", "1", "--fabric", "infiniband", "--inter-gbps", "100")
    assert slow["mappings"][0]["step_us"] > fast["mappings"][0]["step_us"]
    assert "100 GB/s" in fast["cluster"]
    later = call_json("estimate", *JOB, *ONE, "--gpu", "b200")
    assert later["estimate"]["step_us"] < call_json("estimate", *JOB, *ONE)["estimate"]["step_us"]


def test_a_rate_of_the_network_asks_which_network_it_is() -> None:
    failed = call("estimate", *JOB, *ONE, "--inter-gbps", "25", status=2)
    assert (
        "has InfiniBand: say what network has this rate with --fabric, one of infiniband, roce, efa, tcp"
        in failed.stderr
    )
    infiniband, efa = (call_json("estimate", *JOB, *ONE, "--fabric", name) for name in ("infiniband", "efa"))
    assert efa["estimate"]["step_us"] > infiniband["estimate"]["step_us"]


def test_clusters_are_listed() -> None:
    listed = {each["name"]: each for each in call_json("clusters")}
    assert listed["aws-p6-b200"]["fabric"] == "efa"
    assert listed["h100-eos"]["domain"] == 8
    assert all(each["source"] and each["gpu_source"] and each["fabric_source"] for each in listed.values())
    text = call("clusters").stdout
    assert all(name in text for name in listed)


def test_graphs_leave_the_host_less_to_launch() -> None:
    megatron = ("--software", "megatron")
    plain = call_json("estimate", *JOB, *ONE, *megatron)["estimate"]
    graphs = call_json("estimate", *JOB, *ONE, *megatron, "--cuda-graphs", "attention+router")["estimate"]
    assert graphs["parts_us"]["host"] < plain["parts_us"]["host"]
    assert graphs["step_us"] < plain["step_us"]
    failed = call("estimate", *JOB, *ONE, "--software", "commlayer", "--cuda-graphs", "router", status=2)
    assert "commlayer has no CUDA graphs: take --software megatron" in failed.stderr


def test_no_graph_holds_a_step_in_which_the_host_reads_counts() -> None:
    graphs = ("--software", "megatron", "--cuda-graphs", "full-iteration")
    why = "--cuda-graphs full-iteration: with ep of more than 1 the host reads in every layer how many tokens come"
    assert why in call("estimate", *JOB, *ONE, *graphs, status=2).stderr
    assert "add --capacity-factor, take kernels that do not wait" in call("search", *JOB, *graphs, status=2).stderr
    on_efa = ("--ep", "16", *graphs, "--dispatcher", "deepep", "--fabric", "efa")
    assert "with ep of more than 8 the host reads" in call("estimate", *JOB, *on_efa, status=2).stderr
    for held in (("--ep", "8", "--capacity-factor", "1"), ("--ep", "8", "--dispatcher", "hybridep"), ("--ep", "1")):
        assert not call_json("estimate", *JOB, "--tp", "2", *graphs, *held)["estimate"]["parts_us"].get("host")


def test_another_rate_asks_which_network_has_it() -> None:
    question = (
        "h100-eos has InfiniBand: say what network has this rate with --fabric, one of infiniband, roce, efa, tcp"
    )
    varied = call("what-if", *JOB, *FEW, "--vary", "inter-gbps", "--values", "1,10", status=2)
    assert f"--vary inter-gbps: {question}" in varied.stderr


# 80 columns


@pytest.mark.parametrize(
    "command",
    [
        ("estimate", *JOB, *ONE),
        ("what-if", *JOB, *FEW, "--vary", "global-batch", "--values", "1000000,2000000", "--compare", "folding"),
        (
            "plan",
            "--profile",
            "monta-a800-2x8",
            "--batch",
            "1",
            "--sequence",
            "8192",
            "--hidden",
            "8192",
            "--top-k",
            "2",
        ),
    ],
)
def test_a_row_of_a_table_is_a_line_of_80_columns(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    narrow = call(*command).stdout.splitlines()
    monkeypatch.setenv("COLUMNS", "300")
    wide = call(*command).stdout.splitlines()
    left_out = [line for line in narrow if line.startswith("left out, as there are 80 columns: ")]
    assert left_out
    tables, as_wide = _tables(narrow), _tables(wide)
    assert len(tables) == len(as_wide) > 5
    assert max(map(len, tables)) <= 80


def _tables(lines: list[str]) -> list[str]:
    """The lines of tables, also those on which a cell goes on, without sentences, which wrap."""
    return [line for line in lines if "   " in line or "──" in line]


# Bad input


def test_an_unknown_model_or_cluster_is_said_with_what_is_known() -> None:
    with_model = [word if word != "mixtral-8x7b" else "mixtral-8x7" for word in JOB]
    assert "mixtral-8x7b" in call("search", *with_model, status=2).stderr
    with_cluster = [word if word != "h100-eos" else "h100-eo" for word in JOB]
    assert "Did you mean h100-eos" in call("search", *with_cluster, status=2).stderr


def test_nothing_fits_says_what_would() -> None:
    words = [word if word != "16" else "4" for word in JOB]
    few = ("--tp", "2", "--ep", "2", "--micro-batch", "1", "--recompute", "full", "--folded")
    message = call("search", *words, *few, status=2).stderr
    assert "fits in no mapping on 4 GPUs" in message
    assert "GPUs would do" in message


def test_degrees_that_do_not_divide_are_refused() -> None:
    message = call("estimate", *JOB, "--tp", "3", status=2).stderr
    assert "does not divide" in message
    assert "nearest valid" in message


def test_a_profile_needs_a_gpu() -> None:
    words = [word if word != "h100-eos" else "monta-a800-2x8" for word in JOB]
    assert "--gpu" in call("estimate", *words, *ONE, status=2).stderr


def test_a_profile_of_cpu_ranks_is_said_to_be_none_of_a_gpu() -> None:
    words = [word if word != "h100-eos" else "emulated-2x8" for word in JOB]
    said = " ".join(call("estimate", *words, "--gpu", "h100", "--ep", "8").stderr.split())
    assert said.count("emulated-2x8 was measured on CPU ranks (Gloo)") == 1
    assert "no H100 SXM 80GB has such" in said
    assert "CPU ranks" not in call("estimate", *JOB, *ONE).stderr


def test_a_config_of_hugging_face_is_a_model(tmp_path: Path) -> None:
    config = {
        "model_type": "mixtral",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    words = [word if word != "mixtral-8x7b" else str(path) for word in JOB]
    found = call_json("estimate", *words, *ONE)
    assert found["job"]["parameters"] == call_json("estimate", *JOB, *ONE)["job"]["parameters"]


# estimate


def test_estimate_agrees_with_search(searched: Any) -> None:
    best = searched["mappings"][0]
    options: list[str] = []
    for name in ("tp", "cp", "ep", "etp", "pp", "vpp", "micro_batch", "recompute", "exchange", "zero"):
        options += [f"--{name.replace('_', '-')}", str(best["setup"][name])]
    kind = "--folded" if best["setup"]["folded"] else "--unfolded"
    assert {**call_json("estimate", *JOB, *options, kind)["estimate"], "rank_by_time": 1} == best


def test_estimate_shows_every_part_and_every_call() -> None:
    found = call_json("estimate", *JOB, *ONE)
    output = call("estimate", *JOB, *ONE).stdout
    for part in found["estimate"]["parts_us"]:
        assert part in output
    for each in found["traffics"]:
        assert each["name"] in output
        assert each["count"] >= 1
        assert each["total_us"] == pytest.approx(each["us"] * each["count"], abs=1e-2 * each["count"])
    assert {"dispatch", "combine"} <= {each["name"] for each in found["traffics"]}


def test_modules_are_offloaded_by_name() -> None:
    given = (*JOB, "--software", "megatron", "--tp", "2", "--ep", "8", "--pp", "2")
    plain, away = (
        call_json("estimate", *given, *more)["estimate"] for more in ((), ("--offload-modules", "moe_act,expert_fc1"))
    )
    assert away["setup"]["offload"] == "expert_fc1+moe_act"
    assert plain["setup"]["offload"] == "none"
    assert away["memory_bytes"]["offloaded"] > 0 == plain["memory_bytes"]["offloaded"]
    assert away["memory_bytes"]["total"] < plain["memory_bytes"]["total"]
    found = call_json(
        "search", *given, "--vpp", "1", "--micro-batch", "1", "--offload-modules", "none", "--top", "4", *_AWAY
    )
    assert {each["setup"]["offload"] for each in found["mappings"]} == {"none", "core_attn"}
    table = call("estimate", *given, *_AWAY).output
    assert "activations in the host's memory" in table
    refused = call("what-if", *JOB, "--software", "commlayer", "--vary", "gpus", "--values", "16", *_AWAY, status=2)
    assert "commlayer keeps activations on the GPU: add --software megatron" in refused.output
    help_lines = " ".join(call("estimate", "--help").stdout.split())
    assert "expert_fc1, moe_act; with --software megatron or megatron+commlayer." in help_lines
    assert "add core_attn" in call("estimate", *given, "--offload-modules", "attn_proj", status=2).output


_AWAY = ("--offload-modules", "core_attn")


def test_models_are_listed_with_what_counts_as_active() -> None:
    entries = {each["name"]: each for each in call_json("models")}
    assert list(entries) == catalog.names()
    one = entries["kimi-k3"]
    assert one["active_parameters"] - one["active_without_embedding"] == 163840 * 7168
    assert "linear attention" in one["mechanisms"]
    assert "attn_res_block_size" in one["left_out"]
    output = call("models").stdout
    assert all(name in output for name in entries)
    assert "kimi-k3 is planned without" in output
    assert "16 of 896 + shared" in output


def test_a_model_is_approximated_where_that_is_asked_for(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    fields: dict[str, Any] = {
        "num_hidden_layers": 8,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    fields |= {"vocab_size": 1000, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
    fields |= {"model_type": "newest", "first_k_dense_replace": 0, "engram_layers": 2}
    config.write_text(json.dumps(fields), encoding="utf-8")
    job = ("-m", str(config), "-c", "h100-eos", "-g", "8", "--global-batch", "8", "--sequence", "1024", "--ep", "8")
    assert "whose fields ask for" in call("estimate", *job, status=2).output
    found = call("estimate", *job, "--approximate")
    assert "is planned without what only the code of an unknown model_type says ('newest')" in found.stderr
    assert "embeddings of n-grams (fields engram_layers)" in found.stderr


def test_a_dispatcher_by_name() -> None:
    across = ("--ep", "8", "--pp", "1", "--recompute", "full", "--domain", "4", "--software", "megatron")
    flat, kernels = (call_json("estimate", *JOB, *across, "--dispatcher", name) for name in ("nccl", "deepep"))
    assert kernels["estimate"]["step_us"] < flat["estimate"]["step_us"]
    assert {each["plan"] for each in kernels["traffics"] if each["name"] in ("dispatch", "combine")} == {"deepep"}
    assert any(note.startswith("deepep: a token crosses to") for note in kernels["estimate"]["notes"])
    assert "deepep" in call("search", *JOB, *FEW, "--software", "megatron", "--dispatcher", "deepep").stdout
    assert "--dispatcher" in call("estimate", *JOB, "--dispatcher", "nvshmem", status=2).stderr


def test_what_nobody_chose_is_said_with_what_else_it_may_be() -> None:
    across = ("--cp", "2", "--ep", "8", "--unfolded", "--recompute", "full")
    found = call_json("estimate", *JOB, *across)["estimate"]
    software, dispatchers = found["notes"][-2:]
    assert re.search(
        r"as megatron runs it; by commlayer's own this mapping takes [\d,.]+ ms.*: --software comm", software
    )
    said = re.search(r"on 2 NVLink domains.*: nccl (\d+), deepep (\d+),.*: say which you run", dispatchers)
    assert said
    named = call_json("estimate", *JOB, *across, "--software", "megatron", "--dispatcher", "deepep")["estimate"]
    assert [round(each["tflops"]) for each in (found, named)] == list(map(int, said.groups()))
    assert not any("was not given" in note for note in named["notes"])
    output = call("estimate", *JOB, *ONE, "--software", "megatron").output
    assert "16 GPUs of h100-eos, megatron, nccl dispatcher: " in output
    assert "was not given" not in output  # all experts are inside a domain
    ranked = call_json("search", *JOB, *FEW, "--top", "2")["mappings"]
    assert [sum("--software was not given" in note for note in each["notes"]) for each in ranked] == [1, 0]


def test_help_has_options_under_headings() -> None:
    lines = call("search", "--help").stdout.splitlines()
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings == [
        "Job:",
        "Cluster:",
        "Software:",
        "Formats of the optimizer and of what is kept:",
        "Mappings that are searched:",
        "Options:",
    ]
    software = lines[lines.index("Software:") : lines.index(headings[3])]
    assert any(line.startswith("  --dispatcher ") for line in software)


def test_a_mapping_that_does_not_fit_is_estimated_and_said_not_to(tmp_path: Path) -> None:
    result = call("estimate", *JOB, "--ep", "8", "--json")
    assert "does not fit" in result.stderr
    assert json.loads(result.stdout)["estimate"]["fits"] is False


def test_estimate_writes_a_trace_of_the_step(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    call("estimate", *JOB, *ONE, "--trace", str(path))
    trace = json.loads(path.read_text(encoding="utf-8"))
    named = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert len(named) == 3
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    # every micro-batch passes both stages, forward and backward
    passes = [event for event in complete if re.fullmatch(r"(forward|backward) \d+", event["name"])]
    micro_batches = 32 // call_json("estimate", *JOB, *ONE)["estimate"]["setup"]["dp"]
    assert len(passes) == 2 * 2 * micro_batches
    assert {"ep", "tp"} <= {event["cat"] for event in complete}
    assert all(event["dur"] >= 0 for event in complete)


def test_estimate_exports_and_draws(tmp_path: Path) -> None:
    assert "train_batch_size" in call("estimate", *JOB, "--ep", "8", "--export", "deepspeed").stdout
    assert (
        "etp=1"
        in call("estimate", *JOB, "--tp", "2", "--etp", "2", "--ep", "8", "--export", "deepspeed", status=2).stderr
    )
    pytest.importorskip("matplotlib")
    picture, report = tmp_path / "a.svg", tmp_path / "a.html"
    printed = call("estimate", *JOB, *ONE, "--picture", str(picture), "--report", str(report)).stdout
    assert "pipeline" in picture.read_text(encoding="utf-8")
    page = report.read_text(encoding="utf-8")
    assert "In full" in page
    checked = next(line for line in printed.splitlines() if line.startswith(("close: ", "rough: ", "unknown: ")))
    assert f"<p>{checked}</p>" in page


# what-if


def test_what_if_takes_values() -> None:
    rates = ("--vary", "inter-gbps", "--values", "1,10,100")
    found = call_json("what-if", *JOB, *FEW, "--fabric", "infiniband", *rates)
    (way,) = found["ways"]
    times = [point["estimate"]["step_us"] for point in way["points"]]
    assert times == sorted(times, reverse=True)
    assert found["crossover"] is None
    assert [point["value"] for point in way["points"]] == [1, 10, 100]


def test_what_if_holds_a_mapping() -> None:
    found = call_json("what-if", *JOB, *FEW, "--vary", "sequence", "--values", "2048,4096", "--hold")
    (way,) = found["ways"]
    assert {point["estimate"]["mapping"] for point in way["points"]} == {way["held"]}


def test_what_if_compares_two_ways(tmp_path: Path) -> None:
    options = ("--vary", "global-batch", "--from", "16", "--to", "32", "--compare", "software")
    result = call("what-if", *JOB, *FEW, "--tp", "2", "--folded", *options)
    assert "megatron" in result.stdout
    found = call_json("what-if", *JOB, *FEW, "--tp", "2", "--folded", *options)
    assert [way["software"] for way in found["ways"]] == ["commlayer", "megatron"]
    assert found["crossover"]["words"]
    assert [point["value"] for point in found["ways"][0]["points"]] == [16, 32]


def test_what_if_compares_ways_by_the_software_that_was_asked_for() -> None:
    options = (
        "--tp",
        "2",
        "--pp",
        "1",
        "--ep",
        "8",
        "--micro-batch",
        "1",
        "--recompute",
        "none",
        "--software",
        "megatron",
    )
    vary = ("--vary", "inter-factor", "--values", "1", "--compare", "schedule")
    ways = call_json("what-if", *JOB[:5], "64", *JOB[6:], *options, *vary)["ways"]
    assert [way["software"] for way in ways] == ["megatron", "megatron"]
    merged = [way["points"][0]["estimate"]["mapping"] for way in ways]
    assert "1f1b-overlap" not in merged[0]
    assert "1f1b-overlap" in merged[1]


def test_what_if_compares_software_with_what_was_asked_of_it() -> None:
    options = (
        "--fabric",
        "infiniband",
        "--vary",
        "inter-gbps",
        "--values",
        "25,50",
        "--compare",
        "software",
        "--dispatcher",
        "deepep",
    )
    ways = call_json("what-if", *JOB, *FEW, "--tp", "2", "--folded", *options)["ways"]
    assert [way["software"] for way in ways] == ["commlayer, deepep dispatcher", "megatron, deepep dispatcher"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--fp8-param-gather",), "add --precision, such as fp8"),
        (("--shared-expert-overlap", "--software", "megatron"), "mixtral-8x7b has no shared experts"),
        (("--imbalance", "1.5", "--routing", "."), "--imbalance follows from --routing"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(options: tuple[str, ...], message: str) -> None:
    for command in (("estimate", *JOB, "--ep", "8"), ("search", *JOB, *FEW)):
        assert message in call(*command, *options, status=2).stderr


def test_what_if_says_why_a_value_has_no_mapping() -> None:
    (way,) = call_json("what-if", *JOB, *FEW, "--vary", "gpus", "--values", "4,16")["ways"]
    few, enough = way["points"]
    assert few["estimate"] is None
    assert "4 GPUs" in few["note"]
    assert enough["estimate"]["fits"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        table, below = call("what-if", *JOB, *FEW, "--vary", "gpus", "--values", "4,16,5").stdout.split("\n\n")[-2:]
    assert max(map(len, table.splitlines()[2:])) <= 80
    assert all(re.search(rf"^{value} +–", table, re.MULTILINE) for value in (4, 5))
    assert re.search(r"^no estimate at 4: no mapping of mixtral-8x7b onto 4 GPUs", below, re.MULTILINE)
    assert re.search(r"^no estimate at 5: ", below, re.MULTILINE)


@pytest.mark.parametrize(
    ("kind", "limits", "values"),
    [
        ("inter_gbps", (10.0, 50.0, 3), (10.0, 30.0, 50.0)),
        ("inter_factor", (0.1, 10.0, 3), (0.1, 1.0, 10.0)),
        ("gpus", (128.0, 1024.0, None), (128, 256, 512, 1024)),
        ("top_k", (2.0, 3.0, None), (2, 3)),
    ],
)
def test_values_between_two_limits(
    kind: str, limits: tuple[float, float, int | None], values: tuple[float, ...]
) -> None:
    assert values_of(kind, None, *limits) == pytest.approx(values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--vary", "inter-gbps"), "expected --values, or --from and --to"),
        (("--vary", "inter-gbps", "--values", "1", "--from", "2"), "drop one side"),
        (("--vary", "inter-gbps", "--values", "fast"), "--values of inter-gbps: 'fast' is not a valid number"),
        (("--vary", "top-k", "--values", "1.5"), "--values of top-k: '1.5' is not a valid integer"),
        (("--vary", "precision", "--from", "1", "--to", "2"), "--values"),
        (("--vary", "gpu", "--values", "h200,h900"), "--values of gpu: cluster: expected the name of a known"),
    ],
)
def test_what_if_refuses_values_that_are_none(options: tuple[str, ...], message: str) -> None:
    assert message in call("what-if", *JOB, *options, status=2).stderr


def test_what_if_reports(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report, picture = tmp_path / "a.html", tmp_path / "a.svg"
    options = ("--vary", "precision", "--values", "bf16,fp8", "--report", str(report), "--picture", str(picture))
    call("what-if", *JOB, *FEW, *options)
    assert report.read_text(encoding="utf-8").count("<svg") == 3
    assert "fp8" in picture.read_text(encoding="utf-8")


def test_a_search_of_several_lengths_is_a_variation_of_the_sequence(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = tmp_path / "a.html"
    lengths = ("--sequence", "32K", "--sequence", "8K", "--sequence", "8192")
    found = call_json("search", *JOB[:-2], *lengths, *FEW, "--report", str(report))
    varied = call_json("what-if", *JOB[:-1], "8K", *FEW, "--vary", "sequence", "--values", "8K,32768")
    assert found == varied
    assert [point["value"] for point in found["ways"][0]["points"]] == [8192, 32768]
    page = report.read_text(encoding="utf-8")
    assert "What if: tokens of a sequence" in page
    assert "32 sequences of 8192 or 32768 tokens a step" in page
    scaled = call("what-if", *JOB, *FEW, "--vary", "gpus", "--values", "16,32,64,128,256", "--hold").stdout
    assert " on 16 to 256 GPUs of h100-eos" in " ".join(scaled.split())


# All of them


@pytest.mark.parametrize("command", ["search", "estimate", "what-if"])
def test_names_are_completed(command: str) -> None:
    complete = ShellComplete(main, {}, "commlayer", "_COMMLAYER_COMPLETE")
    models = [item.value for item in complete.get_completions([command, "--model"], "mixtral-8x2")]
    assert "mixtral-8x22b" in models
    assert "h100-eos" in [item.value for item in complete.get_completions([command, "--cluster"], "h100")]


def test_nothing_heavy_is_loaded() -> None:
    program = (
        "import sys\n"
        "from commlayer.cli.main import main\n"
        f"main({['estimate', *JOB, *ONE, '--json']!r}, prog_name='commlayer', standalone_mode=False)\n"
        "heavy = [name for name in ('torch', 'numpy', 'scipy', 'matplotlib') if name in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
