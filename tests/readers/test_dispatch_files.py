"""aiconfigurator's tables of DeepEP: what is read, what an estimate makes of it, and what is refused.

The tables in tests/readers/aiconfigurator are excerpts of the published ones (NOTICE, beside them).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from commlayer.cli.main import main
from commlayer.profiles.errors import DispatchError, UsageError
from commlayer.readers.dispatch_files import read_dispatch_kernels
from commlayer.scheduler.mapping import catalog, clusters
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.software import MEGATRON, with_overlap
from commlayer.scheduler.mapping.token_routes import TokenRoutes

FOLDER = Path(__file__).parent / "aiconfigurator"
NORMAL, LOW_LATENCY = FOLDER / "wideep_deepep_normal_perf.csv", FOLDER / "wideep_deepep_ll_perf.csv"
EOS, DEEPSEEK = clusters.load("h100-eos"), catalog.load("deepseek-v3")


def routes(
    num_nodes: int, *, tokens: int = 4096, imbalance: float = 1.0, groups: int = 0, limit: int = 0
) -> TokenRoutes:
    """The ways of tokens as the table's: a token's experts are on four nodes at most."""
    shape = replace(DEEPSEEK, router_groups=groups or num_nodes, router_group_limit=limit or min(num_nodes, 4))
    ep = 8 * num_nodes
    job = Job(model=shape, gpus=ep, global_batch=ep, sequence=tokens, imbalance=imbalance)
    kernels, software = read_dispatch_kernels(NORMAL), with_overlap(MEGATRON, dispatch_precision="fp8")
    found = TokenRoutes.of(kernels, job, Setup(gpus=ep, ep=ep), (8,) * num_nodes, software)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("num_nodes", "dispatch_us", "combine_us"),
    [(1, 491.24, 972.51), (2, 843.5 + 49.73, 2099 + 50.53), (8, 5516 + 994.23, 4461 + 8048)],
)
def test_a_call_takes_what_the_table_says(num_nodes: int, dispatch_us: float, combine_us: float) -> None:
    measured = routes(num_nodes)
    assert measured.us(EOS, to_experts=True) == pytest.approx(dispatch_us, rel=1e-6)
    assert measured.us(EOS) == pytest.approx(combine_us, rel=1e-6)
    in_bf16 = replace(measured, out_bytes=measured.row_bytes)
    assert in_bf16.us(EOS, to_experts=True) == pytest.approx(combine_us, rel=1e-6)


def test_rows_beyond_the_table_s_take_the_time_of_as_many_more_tokens() -> None:
    assert routes(1, imbalance=1.25).us(EOS) == pytest.approx(routes(1, tokens=5120).us(EOS), rel=1e-6)
    # A router that keeps to half of the experts sends to fewer ranks, and so less.
    assert routes(1, groups=8, limit=4).us(EOS) < 0.8 * routes(1).us(EOS)
    # One that chooses among all eight nodes crosses to more of them than the table's four.
    assert routes(8, limit=8).us(EOS) > 1.2 * routes(8).us(EOS)


@pytest.mark.parametrize(
    ("found", "cluster", "words"),
    [
        (replace(routes(1), ranks_per_node=4), EOS, "of groups with 4 ranks on a node, only of groups with 8 ranks"),
        (replace(routes(2), num_nodes=3), EOS, "of groups on 3 of its nodes, only of groups on 1, 2, 4, 8 of"),
        (replace(routes(1), routed=(2048, 8, 256)), EOS, "of rows of 2048 elements, only of rows of 7168"),
        (replace(routes(1), routed=(7168, 8, 128)), EOS, "of 128 experts, only of 256 experts"),
        (replace(routes(1), routed=(7168, 4, 256)), EOS, "of top-4, only of top-8"),
        (routes(1), clusters.load("h200"), "on H200, only on H100"),
        (
            replace(routes(1), kernels=replace(read_dispatch_kernels(NORMAL), held_inside=16)),
            EOS,
            "kernels that hold 16 multiprocessors, only 20",
        ),
    ],
)
def test_what_nobody_measured_is_refused(found: TokenRoutes, cluster: Cluster, words: str) -> None:
    with pytest.raises(DispatchError, match=words):
        found.us(cluster)


def test_a_time_that_is_none_is_refused_with_its_file(tmp_path: Path) -> None:
    header, first, *others = Path(NORMAL).read_text(encoding="utf-8").splitlines()
    table = tmp_path / "table.csv"
    table.write_text("\n".join([header, first.rpartition(",")[0] + ",nan", *others]), encoding="utf-8")
    with pytest.raises(UsageError, match=r"table\.csv: combine: expected positive, finite times in µs, got nan"):
        read_dispatch_kernels(table)


def test_a_parquet_table_is_read_as_the_csv_is(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow.csv import read_csv
    from pyarrow.parquet import write_table

    path = tmp_path / "wideep_deepep_normal_perf.parquet"
    write_table(read_csv(NORMAL), path)
    ours, theirs = read_dispatch_kernels(path).measured, read_dispatch_kernels(NORMAL).measured
    assert ours is not None
    assert theirs is not None
    assert {key: curve.time_us for key, curve in ours.curves.items()} == {
        key: curve.time_us for key, curve in theirs.curves.items()
    }


def test_tables_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="low-latency kernels, which serve decoding"):
        read_dispatch_kernels(LOW_LATENCY)
    with pytest.raises(UsageError, match="cannot read times of a dispatcher"):
        read_dispatch_kernels(tmp_path / "none.csv")
    text = NORMAL.read_text(encoding="utf-8")
    path = tmp_path / "table.csv"
    for changed, words in (
        (text.replace("combine_notify_us", "else"), "got one without combine_notify_us"),
        (text.replace(",deepep,", ",mori,"), "expected times of deepep alone, got mori"),
        (text.replace("7168", "wide", 1), r"field \[0\].hidden_size"),
        (text.partition("\n")[0] + "\n", "expected times of deepep, got none"),
    ):
        path.write_text(changed, encoding="utf-8")
        with pytest.raises(UsageError, match=words):
            read_dispatch_kernels(path)


JOB = ["-m", "deepseek-v3", "-g", "64", "--global-batch", "64", "--sequence", "4096", "--recompute", "full"]


def run(*options: str) -> tuple[int, str]:
    found = CliRunner().invoke(main, [*options])
    return found.exit_code, " ".join(found.output.split())


def test_the_commands_take_a_table(tmp_path: Path) -> None:
    by_table = ["--dispatcher", str(NORMAL), "--ep", "8", "--pp", "8"]
    code, said = run("estimate", *JOB, "-c", "h100-eos", *by_table)
    assert code == 0, said
    assert "times of its calls by" in said
    assert "BF16 rows take as long to experts as home" in said
    # A node that was measured without DeepEP has its times with a table.
    node = tmp_path / "node.json"
    EOS.profile_of((8,)).save(node)
    joined = ["-c", str(node), "--gpu", "h100", "--inter-gbps", "50", "--fabric", "infiniband"]
    code, said = run("estimate", *JOB, *joined, *by_table)
    assert code == 0, said
    large = ["-m", "deepseek-v3", "-g", "256", "--global-batch", "256", "--sequence", "4096", "--recompute", "full"]
    search = ["search", *large, "-c", "h100-eos", "--tp", "1", "--cp", "1", "--pp", "8", "--etp", "1"]
    code, said = run(*search, "--exchange", "all_to_all", "--micro-batch", "1", "--dispatcher", str(NORMAL))
    assert code == 0, said
    assert "mappings were passed over:" in said


def test_the_commands_refuse_where_a_table_says_nothing() -> None:
    code, said = run("estimate", *JOB, "-c", "h100-eos", "--dispatcher", str(LOW_LATENCY), "--ep", "8")
    assert code == 2
    assert "serve decoding" in said
    code, said = run("estimate", *JOB, "-c", "aws-p5", "--dispatcher", str(NORMAL), "--ep", "16")
    assert code != 0
    assert "does not name its network" in said
    vary = ["--vary", "inter-factor", "--values", "0.5,1"]
    code, said = run("what-if", *JOB, "-c", "h100-eos", "--dispatcher", str(NORMAL), *vary)
    assert code == 2
    assert "has times of one network" in said
    code, said = run("estimate", *JOB, "-c", "h100-eos", "--dispatcher", "deepeep")
    assert code == 2
    assert "expected nccl, deepep" in said
