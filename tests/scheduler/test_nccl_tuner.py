"""NCCL's tuner tables: what a plan is to NCCL, and the same choice at each size when its readers' rules are followed.

The two readers here follow plugins/tuner/example/plugin.c of NCCL 2.30 and comms/ncclx/meta/tuner of torchcomms.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from commlayer.cli.main import main
from commlayer.profiles import catalog
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.decision import Decision, choose
from commlayer.scheduler.nccl_tuner import (
    TUNED,
    TunerRow,
    nccl_table,
    ncclx_table,
    rows_of_decisions,
)
from commlayer.scheduler.plan import Strategy
from commlayer.scheduler.traffic import Traffic

PROFILE = catalog.load("emulated-2x8")
NODES = (8, 8)
SIZES = [1024 << power for power in range(18)]
ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")


class Parsed(NamedTuple):
    collective: str
    low: int
    behind: int  # the first size that is not meant
    algorithm: str
    protocol: str


def read_by_nccl(text: str, num_nodes: int, num_ranks: int) -> list[Parsed]:
    """The rows that the example plugin has for a communicator: lines of 255 characters, 8 to 10 fields."""
    found = []
    for line in text.encode().splitlines(keepends=True):
        for start in range(0, len(line), 255):  # fgets into 256 bytes
            part = line[start : start + 255].decode()
            if part[0] in "#\n" or not part.strip("\n"):
                continue
            fields = [field.strip(" \t") for field in part.strip("\n").split(",") if field][:10]
            assert 8 <= len(fields) <= 10, part
            collective, low, high, algorithm, protocol, channels, nodes, ranks, pipelined, registered = fields
            assert collective in TUNED.values()
            assert algorithm in ALGORITHMS
            assert protocol in PROTOCOLS
            assert (int(pipelined), int(registered)) == (-1, -1)
            given = 1 if int(channels) == -1 else int(channels)  # *nChannels = 1; a row's own, unless it is -1
            assert given == 0, "NCCL takes any other number as it is"
            if int(nodes) in (-1, num_nodes) and int(ranks) in (-1, num_ranks):
                found.append(Parsed(collective, int(low), int(high) + 1, algorithm, protocol))
    return found


def read_by_ncclx(text: str, num_nodes: int, num_local: int) -> list[Parsed]:
    """The rows that NCCLX has for a communicator: commas in brackets part nothing, all numbers whole, no empty range."""
    found = []
    for line in text.splitlines():
        if not line.strip() or line.strip().startswith("#"):
            continue
        fields = [field.strip() for field in re.split(r",(?![^\[(]*[\])])", line)]
        assert len(fields) == 7, line  # an eighth is the size of chunks in one version, and another filter in one
        match = re.fullmatch(r"\[(\d+),(\d+)\)", fields[1])
        assert match is not None
        low, behind = map(int, match.groups())
        assert low <= behind
        assert fields[0] in TUNED.values()
        assert fields[2] in ALGORITHMS
        assert fields[3] in PROTOCOLS
        assert int(fields[4]) == -1
        if (int(fields[5]), int(fields[6])) == (num_nodes, num_local):
            found.append(Parsed(fields[0], low, behind, fields[2], fields[3]))
    return found


def choice(rows: Sequence[Parsed], collective: str, size: int) -> tuple[str, str] | None:
    """The first row that matches wins; None where NCCL chooses."""
    for row in rows:
        if row.collective == TUNED[collective] and row.low <= size < row.behind:
            return row.algorithm, row.protocol
    return None


@pytest.fixture(scope="module")
def decisions() -> list[Decision]:
    return [choose(Traffic.on_nodes(collective, size, NODES), PROFILE) for collective in TUNED for size in SIZES]


def test_a_table_chooses_at_each_size_what_was_decided(decisions: list[Decision]) -> None:
    rows, untold = rows_of_decisions(decisions)
    by_nccl = read_by_nccl(nccl_table(rows, ["x" * 400, "two\nlines"]), 2, 16)
    by_ncclx = read_by_ncclx(ncclx_table(rows), 2, 8)
    told = 0
    for each in decisions:
        size, collective = each.traffic.logical_bytes, each.traffic.collective
        two_level = each.plan.strategy in (Strategy.HIERARCHICAL, Strategy.PIPELINED)
        expected = ("tree", "simple") if two_level and collective == "all_reduce" else None
        assert choice(by_nccl, collective, size) == expected
        assert choice(by_ncclx, collective, size // 16) == expected
        told += expected is not None
    others = [each for each in decisions if each.plan.strategy is not Strategy.FLAT]
    assert told > 5
    assert len(untold) == len(others) - told
    assert read_by_nccl(nccl_table(rows), 4, 32) == []


def test_rows_of_several_algorithms_go_through_both_tables() -> None:
    rows = [
        TunerRow("all_reduce", 3000, 65535, "tree", "ll", 2, 16),
        TunerRow("all_reduce", 65536, (1 << 20) - 1, "ring", "ll128", 2, 16),
        TunerRow("all_reduce", 1 << 20, 1 << 26, "nvls_tree", "simple", 2, 16),
    ]
    by_nccl, by_ncclx = read_by_nccl(nccl_table(rows), 2, 16), read_by_ncclx(ncclx_table(rows), 2, 8)
    for size in (3000, 8192, 65536, 1 << 20, 1 << 26):
        (row,) = (each for each in rows if each.has("all_reduce", size))
        assert choice(by_nccl, "all_reduce", size) == (row.algorithm, row.protocol)
        assert choice(by_ncclx, "all_reduce", size // 16) == (row.algorithm, row.protocol)
    for size in (2999, (1 << 26) + 16):
        assert choice(by_nccl, "all_reduce", size) is None
        assert choice(by_ncclx, "all_reduce", size // 16) == (
            None if size > 3000 else ("tree", "ll")
        )  # one unit of a rank


def test_what_a_tuner_cannot_be_told_is_refused() -> None:
    exchange = choose(Traffic.on_nodes("all_to_all_v", 1 << 20, NODES), PROFILE)
    with pytest.raises(UsageError, match="never about all_to_all_v"):
        rows_of_decisions([exchange])
    with pytest.raises(UsageError, match="uneven"):
        ncclx_table([TunerRow("all_reduce", 1, 2, "ring", "ll", 2, 3)])


def test_the_command_takes_a_profile() -> None:
    found = CliRunner().invoke(main, ["profiles", "tuner", "emulated-2x8"])
    assert found.exit_code == 0, found.output
    assert [row.algorithm for row in read_by_nccl(found.stdout, 2, 16)] == ["tree"]
    assert "have no counterpart in NCCL" in found.stderr
    assert "calls without a row one channel" in " ".join(found.stderr.split())
    assert "calls without a row one channel" in found.stdout
    for_ncclx = CliRunner().invoke(main, ["profiles", "tuner", "emulated-2x8", "--format", "ncclx"])
    assert "one channel" not in for_ncclx.output
    for sizes in (("-b", "0"), ("-b", "8KiB", "-e", "4KiB")):
        assert CliRunner().invoke(main, ["profiles", "tuner", "emulated-2x8", *sizes]).exit_code == 2
    refused = CliRunner().invoke(main, ["profiles", "tuner", "h100-eos-2x8"])
    assert refused.exit_code == 2
    assert "import its times first" in refused.stderr
