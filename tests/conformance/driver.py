"""Run PyTorch's own DistributedTest suite on a backend, and compare with what Gloo passes. See docs/conformance.md.

    python tests/conformance/driver.py                           # backend commlayer, world 4, 3 and 2
    python tests/conformance/driver.py --backend gloo --world 4
    python tests/conformance/driver.py --plan hierarchical       # force one plan wherever it applies
    python tests/conformance/driver.py --record                  # run Gloo, and write expected.json anew

Exit status: 0, 1 where a test failed that Gloo passes (or that MPI passes, of those that only MPI gets), 2 for a
mistake in the arguments.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the witness is among what tests share

from suite import NODES, Outcome, Suite

from commlayer.cli.progress_bars import progress
from commlayer.cli.tables import print_json, print_table
from commlayer.emulation import EmulatedCluster

EXPECTED = Path(__file__).with_name("expected.json")
_STATUSES = ("passed", "failed", "error", "alarmed", "skipped")


class WorldSet(msgspec.Struct, forbid_unknown_fields=True):
    """The expectations at one world size, names of tests."""

    gloo: list[str]
    """Pass on Gloo with the gates open."""
    mpi_only: list[str]
    """Kept from Gloo as shipped and open to MPI: the all_to_all tests. Gloo passes some of them all the same."""


class Expected(msgspec.Struct, forbid_unknown_fields=True):
    """The recorded sets; world sizes as text, because JSON keys are."""

    torch: str
    worlds: dict[str, WorldSet]


@dataclass(frozen=True)
class Report:
    """One backend at one world size."""

    backend: str
    world_size: int
    nodes: str
    seconds: float
    outcomes: tuple[Outcome, ...]
    missing: tuple[str, ...]
    """Expected to pass, did not."""
    gained: tuple[str, ...]
    """Passed without being expected."""

    @property
    def counts(self) -> Counter[str]:
        """status → number of tests."""
        return Counter(outcome.status for outcome in self.outcomes)


def run_world(backend: str, world_size: int, only: Sequence[str], timeout_s: float) -> tuple[list[Outcome], float]:
    """All tests (or those in ``only``) in turn, each in ranks of its own on one emulated cluster."""
    suite = Suite(backend, world_size)
    names = _chosen(suite, only)
    sizes = NODES[world_size]
    started = time.monotonic()
    outcomes = []
    with (
        EmulatedCluster(len(sizes), max(sizes)) as cluster,
        progress(f"{backend}, world {world_size}", len(names)) as advance,
    ):
        for name in names:
            outcomes.append(suite.run(name, cluster, timeout_s))
            advance(f"{outcomes[-1].status} {name}")
    return outcomes, time.monotonic() - started


def _chosen(suite: Suite, only: Sequence[str]) -> list[str]:
    unknown = [name for name in only if name not in suite.names]
    if unknown:
        raise SystemExit(f"no test {unknown[0]!r} in the suite of torch {torch.__version__}")
    return list(only) or suite.names


def mpi_only(world_size: int, outcomes: Sequence[Outcome]) -> list[str]:
    """Tests that the suite keeps from Gloo and gives to MPI, and that were not skipped when they ran."""
    for_gloo = Suite("gloo", world_size, gates=()).closed
    for_mpi = Suite("gloo", world_size, gates=("mpi",)).closed
    skipped = {outcome.name for outcome in outcomes if outcome.status == "skipped"}
    return sorted(name for name in for_gloo if name not in for_mpi and name not in skipped)


def compare(outcomes: Sequence[Outcome], expected: WorldSet, backend: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(missing, gained): tests that should have passed and did not, and the reverse."""
    wanted = set(expected.gloo) | (set() if backend == "gloo" else set(expected.mpi_only))
    missing = tuple(each.name for each in outcomes if each.name in wanted and each.status != "passed")
    gained = tuple(each.name for each in outcomes if each.name not in wanted and each.status == "passed")
    return missing, gained


def read_expected() -> Expected:
    """The recorded sets; ends the program where they belong to another torch."""
    if not EXPECTED.exists():
        raise SystemExit(f"no {EXPECTED}: record it with --record (runs the suite on gloo)")
    expected = msgspec.json.decode(EXPECTED.read_bytes(), type=Expected)
    if expected.torch != torch.__version__.split("+")[0]:
        raise SystemExit(
            f"{EXPECTED.name} was recorded with torch {expected.torch}, this is {torch.__version__}: record it anew with "
            "--record, and read what changed"
        )
    return expected


def record(worlds: Sequence[int], timeout_s: float) -> None:
    """Run Gloo and write expected.json."""
    sets = {}
    for world_size in worlds:
        outcomes, _ = run_world("gloo", world_size, (), timeout_s)
        passed = [outcome.name for outcome in outcomes if outcome.status == "passed"]
        sets[str(world_size)] = WorldSet(passed, mpi_only(world_size, outcomes))
    content = Expected(torch.__version__.split("+")[0], sets)
    EXPECTED.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    for size, each in sets.items():
        print(
            f"world {size}: {len(each.gloo)} pass on gloo; {len(set(each.gloo) | set(each.mpi_only))} with those for MPI"
        )


def show(reports: Sequence[Report], verbose: bool) -> None:
    """The table, then every test that should have passed with what it said."""
    columns = ("backend", "ranks", *(f">{status}" for status in _STATUSES), ">missing", ">gained", ">s")
    rows = [
        (
            report.backend,
            report.nodes,
            *(str(report.counts[status]) for status in _STATUSES),
            str(len(report.missing)),
            str(len(report.gained)),
            f"{report.seconds:.0f}",
        )
        for report in reports
    ]
    print_table(columns, rows, title=f"DistributedTest of torch {torch.__version__}; missing: should pass and did not")
    for report in reports:
        for outcome in report.outcomes:
            if outcome.name in report.missing or (verbose and outcome.status in ("failed", "error", "alarmed")):
                print(
                    f"\n{report.backend}, world {report.world_size}: {outcome.status} {outcome.name}\n{outcome.detail}"
                )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    options = _parser().parse_args(arguments)
    if options.record:
        record(options.world, options.timeout)
        return 0
    if options.plan:
        os.environ["COMMLAYER_PLAN"] = options.plan
    expected = read_expected()
    if options.backend != "gloo":
        for module in options.module:
            importlib.import_module(module)
    reports = []
    for world_size in options.world:
        outcomes, seconds = run_world(options.backend, world_size, options.only, options.timeout)
        missing, gained = compare(outcomes, expected.worlds[str(world_size)], options.backend)
        nodes = "+".join(map(str, NODES[world_size]))
        reports.append(Report(options.backend, world_size, nodes, seconds, tuple(outcomes), missing, gained))
    if options.json:
        print_json([_as_json(report) for report in reports])
    else:
        show(reports, options.verbose)
    return int(any(report.missing for report in reports))


def _as_json(report: Report) -> dict[str, Any]:
    return {**asdict(report), "counts": {status: report.counts[status] for status in _STATUSES}}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="commlayer", help="name for init_process_group")
    parser.add_argument(
        "--module",
        nargs="+",
        default=["commlayer.backend.new_groups"],
        help="imported before the ranks fork: registers the backend, and loads what it would load in every rank",
    )
    parser.add_argument("--world", type=int, nargs="+", choices=sorted(NODES), default=[4, 3, 2])
    parser.add_argument("--only", nargs="+", default=(), metavar="TEST", help="these tests instead of all")
    parser.add_argument("--plan", help="force a plan (sets COMMLAYER_PLAN), such as hierarchical or pipelined:2")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="kill a test's ranks after that")
    parser.add_argument("--record", action="store_true", help="run gloo and write expected.json")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument(
        "--verbose", action="store_true", help="show every failed test, not only those that should pass"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
