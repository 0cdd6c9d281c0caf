"""Bytes that commlayer moves equal what Gloo moves, bit for bit: verbs × dtypes × splits × world sizes × nodes × plans.

One start of the processes covers all verbs, splits and plans of a layout; in some layouts all
dtypes, in the others one of each size. Every rank compares its own outputs, and the statistics say
that the forced plan really ran. (Reductions here are of integer values, which any order adds to the
same.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from faulty_verbs import FaultyVerbs, wrong_bytes_at
from ranks import ONE_OF_EACH_SIZE

import commlayer
import commlayer.backend.create
import commlayer.measure.calibrate  # before the ranks fork, or each of them loads it
from commlayer.emulation import EmulatedCluster, rights
from commlayer.testing import ProcessGroupVerbs, Verbs, run_on_nodes
from commlayer.testing.move_checks import patterns
from commlayer.testing.payload import bits, integers, stale
from commlayer.testing.verbs_contract import ReduceOp

pytestmark = pytest.mark.cluster

TWO_LEVEL = {"all_gather", "reduce_scatter", "all_reduce", "broadcast"}
"""Collectives that have plans over nodes where several nodes are, and a node has several ranks."""
DIRECT = {"all_gather", "reduce_scatter", "all_reduce"}
"""Collectives that have a direct form of their own."""
GLOO_MOVES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
]
GLOO_REFUSES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.uint16, torch.complex128]
"""Gloo's own result for these is that of their bytes."""
DTYPES = [*GLOO_MOVES, *GLOO_REFUSES]
LAYOUTS_OF_EVERY_DTYPE = [(2, 2), (2, 3), (1, 2, 2, 1)]
LAYOUTS = [
    *[
        (1,),
        (2,),
        (1, 1),
        (1, 2),
        (1, 1, 1),
        (2, 2),
        (1, 2, 1),
        (2, 3),
        (3, 3),
        (1, 2, 2, 1),
        (3, 1),
        (5, 1),
        (3, 4),
        (2, 4, 1),
    ],
    *[(8,), (4, 4), (2, 2, 2, 2)],
]
WIDTH = 3


Result = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class Side:
    """Who computes results: a communicator, and whether tensors pass through it as bytes."""

    verbs: Verbs
    as_bytes: bool = False

    @property
    def rank(self) -> int:
        return self.verbs.rank

    def seen(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(torch.uint8) if self.as_bytes else tensor


def block(rows: int, dtype: torch.dtype, *key: int) -> torch.Tensor:
    return bits((rows, WIDTH), dtype, *key)


def moves_of(side: Side, dtype: torch.dtype) -> Iterator[Result]:
    """Every move of one dtype."""
    n = side.verbs.size
    name = str(dtype)
    yield f"all_to_all {name}", all_to_all(side, dtype, patterns(n)["uneven"])
    yield f"all_gather {name}", all_gather(side, dtype, 5)
    yield f"broadcast {name}", broadcast(side, dtype, 5, n // 2)
    yield f"gather {name}", gather(side, dtype, n - 1)
    yield f"scatter {name}", scatter(side, dtype, n // 2)


def shapes_of(side: Side) -> Iterator[Result]:
    """Every split, size and root, in one dtype."""
    n, dtype = side.verbs.size, torch.float32
    for name, counts in patterns(n).items():
        yield f"all_to_all {name}", all_to_all(side, dtype, counts)
    for rows in (0, 1, 257, 5000):
        yield f"all_to_all equal {rows}", all_to_all(side, dtype, [[rows] * n] * n)
        yield f"all_gather {rows}", all_gather(side, dtype, rows)
        yield f"broadcast {rows}", broadcast(side, dtype, rows, rows % n)
    for root in range(n):
        yield f"broadcast from {root}", broadcast(side, dtype, 257, root)


def reductions(side: Side) -> Iterator[Result]:
    """Integer values only: exact in every order."""
    n = side.verbs.size
    ops: tuple[ReduceOp, ...] = ("sum", "max")
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for rows in (1, 257):
            for op in ops:
                tensor = integers((rows, WIDTH), dtype, op, side.rank)
                side.verbs.all_reduce(tensor, op)
                yield f"all_reduce {dtype} {op} {rows}", tensor
                source = integers((n * rows, WIDTH), dtype, op, side.rank)
                output = stale(source[:rows])
                side.verbs.reduce_scatter(output, source, op)
                yield f"reduce_scatter {dtype} {op} {rows}", output


def all_to_all(side: Side, dtype: torch.dtype, counts: Sequence[Sequence[int]]) -> torch.Tensor:
    sent, received = counts[side.rank], [row[side.rank] for row in counts]
    output = stale(torch.empty((sum(received), WIDTH), dtype=dtype))
    side.verbs.all_to_all(side.seen(output), side.seen(block(sum(sent), dtype, side.rank)), received, sent)
    return output


def all_gather(side: Side, dtype: torch.dtype, rows: int) -> torch.Tensor:
    output = stale(torch.empty((side.verbs.size * rows, WIDTH), dtype=dtype))
    side.verbs.all_gather(side.seen(output), side.seen(block(rows, dtype, side.rank)))
    return output


def broadcast(side: Side, dtype: torch.dtype, rows: int, root: int) -> torch.Tensor:
    tensor = block(rows, dtype, side.rank)
    side.verbs.broadcast(side.seen(tensor), root)
    return tensor


def gather(side: Side, dtype: torch.dtype, root: int) -> torch.Tensor:
    source = block(5, dtype, side.rank)
    output = stale(torch.empty((side.verbs.size * 5, WIDTH), dtype=dtype))
    side.verbs.gather(side.seen(output) if side.rank == root else None, side.seen(source), root)
    return output


def scatter(side: Side, dtype: torch.dtype, root: int) -> torch.Tensor:
    source = block(side.verbs.size * 5, dtype, side.rank)
    output = stale(torch.empty((5, WIDTH), dtype=dtype))
    side.verbs.scatter(side.seen(output), side.seen(source) if side.rank == root else None, root)
    return output


def all_results(verbs: Verbs, dtypes: Sequence[torch.dtype], *, is_gloo: bool) -> dict[str, torch.Tensor]:
    results: dict[str, torch.Tensor] = {}
    for dtype in dtypes:
        results.update(moves_of(Side(verbs, is_gloo and dtype in GLOO_REFUSES), dtype))
    results.update(shapes_of(Side(verbs)))
    results.update(reductions(Side(verbs)))
    return results


def different(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Names of results whose bits differ."""
    assert list(got) == list(wanted)
    return [name for name in got if not torch.equal(as_bytes(got[name]), as_bytes(wanted[name]))]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def plans_for(sizes: Sequence[int]) -> dict[str, set[str]]:
    """Plans to force on nodes of these sizes, and the collectives to which they must apply there."""
    plans: dict[str, set[str]] = {"flat": set(), "flat_direct": DIRECT if sum(sizes) > 1 else set()}
    if len(sizes) > 1:
        two_level = TWO_LEVEL if max(sizes) > 1 else set()
        all_to_all = {"all_to_all"} if two_level else set()
        plans |= {"hierarchical": two_level | all_to_all, "leaders": two_level}
        plans |= {"pipelined:2": two_level, "pipelined:3": two_level}
    return plans


Ran = dict[str, set[str]]
"""Plan asked for → collectives that it moved."""


def compare(plans: Sequence[str], dtypes: Sequence[torch.dtype]) -> tuple[int, list[str], Ran]:
    """On a rank: how many results there are, which differ from Gloo's, and which plans ran."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    wanted = all_results(ProcessGroupVerbs(), dtypes, is_gloo=True)
    wrong: list[str] = []
    ran: Ran = {}
    for plan in plans:
        os.environ["COMMLAYER_PLAN"] = plan
        group = dist.new_group(backend="commlayer")
        got = all_results(ProcessGroupVerbs(group), dtypes, is_gloo=False)
        wrong += [f"{plan}: {name}" for name in different(got, wanted)]
        ran[plan] = {
            row["collective"]
            for row in commlayer.stats()["groups"][-1]["calls"]
            if row["calls"] and row["plan"].replace("×", ":") == plan
        }
        dist.destroy_process_group(group)
    return len(wanted), wrong, ran


def check(sizes: Sequence[int], *, cyclic: bool = False) -> None:
    with EmulatedCluster(len(sizes), max(sizes)) as cluster:
        if cyclic and not cluster.shaped:
            pytest.skip(rights().reason)  # ranks dealt out to nodes in turn need nodes that are namespaces
        plans = plans_for(sizes)
        dtypes = DTYPES if sizes in LAYOUTS_OF_EVERY_DTYPE else ONE_OF_EACH_SIZE
        for num_results, wrong, ran in run_on_nodes(cluster, sizes, compare, list(plans), dtypes, cyclic=cyclic):
            assert num_results > 5 * len(dtypes) + 40
            assert wrong == []
            assert {plan: must - ran[plan] for plan, must in plans.items() if must - ran[plan]} == {}


@pytest.mark.parametrize("sizes", LAYOUTS, ids=lambda sizes: "+".join(map(str, sizes)))
def test_moves_equal_gloos_bit_for_bit(sizes: tuple[int, ...]) -> None:
    check(sizes)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 1, 3)], ids=lambda sizes: "+".join(map(str, sizes)))
def test_moves_equal_gloos_where_neighbouring_ranks_are_on_different_nodes(sizes: tuple[int, ...]) -> None:
    check(sizes, cyclic=True)


def test_a_wrong_result_would_be_seen() -> None:
    def job() -> list[str]:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        honest = all_results(ProcessGroupVerbs(), DTYPES, is_gloo=True)
        liar = FaultyVerbs(ProcessGroupVerbs(), wrong_bytes_at(rank=1, call="all_to_all"))
        return different(all_results(liar, DTYPES, is_gloo=True), honest)

    with EmulatedCluster(2, 1) as cluster:
        honest, lied_to = cluster.run(job)
    assert honest == []
    assert {"all_to_all torch.bool", "all_to_all uneven", "all_to_all equal 5000"} <= set(lied_to)
    assert all(name.startswith("all_to_all") for name in lied_to)
