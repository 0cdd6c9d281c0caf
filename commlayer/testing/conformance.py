"""One conformance function that every communicator must pass: real ones, wrapped ones, fakes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from commlayer.profiles.errors import CommlayerError, UsageError
from commlayer.testing.conformance_checks import checks
from commlayer.testing.move_checks import ROWS, Claims, short
from commlayer.testing.verbs_contract import ReduceOp, Verbs

__all__ = ["DTYPES", "OPS", "REDUCE_DTYPES", "ConformanceError", "FailedCheck", "check_communicator"]

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.bool,
)
"""The dtypes that a communicator is expected to move unless told otherwise: Gloo's."""
REDUCE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
"""The dtypes that it is expected to reduce."""
OPS: tuple[ReduceOp, ...] = ("sum", "product", "min", "max")
"""The reductions that it is expected to have."""
_REQUIRED = {torch.float32, torch.uint8, torch.int64}
"""Checks of other matters than dtypes use these."""


@dataclass(frozen=True)
class FailedCheck:
    """A check that a communicator did not pass, as one rank saw it."""

    name: str
    reason: str


class ConformanceError(CommlayerError, AssertionError):
    """The error of a communicator that does not keep the contract of `Verbs`.

    Attributes:
        failures: the checks that failed on this rank, in their order.
    """

    def __init__(self, message: str, failures: Sequence[FailedCheck]) -> None:
        super().__init__(message)
        self.failures = tuple(failures)

    def __reduce__(self) -> tuple[type[ConformanceError], tuple[str, tuple[FailedCheck, ...]]]:
        return type(self), (str(self), self.failures)


def check_communicator(
    verbs: Verbs,
    *,
    dtypes: Iterable[torch.dtype] = DTYPES,
    reduce_dtypes: Iterable[torch.dtype] = REDUCE_DTYPES,
    ops: Iterable[ReduceOp] = OPS,
    rows: Iterable[int] = ROWS,
    device: torch.device | str = "cpu",
    one_clock: bool = True,
) -> list[str]:
    """Check that a communicator keeps the contract of `Verbs`. Collective: every rank calls it,
    with the same arguments.

    Splits (no tokens at all, one token, one hot rank, to itself only, uneven, …), sizes, dtypes,
    every root, blocking and asynchronous calls and their order, refusals. Moves are compared bit by
    bit. Reductions of integer values must be exact; sums of fractions within rounding, with the
    same bits on all ranks (all_reduce) and in every run.

    A check that finds a wrong result does not end the others. One in which a call raised does: the
    ranks may be out of step from there on. Each rank reports what it saw; other ranks may have seen
    other failures, or none.

    Args:
        verbs: this rank's end; for a torch process group `ProcessGroupVerbs(group)`.
        dtypes: what the communicator claims to move; float32, uint8 and int64 must be among them.
        reduce_dtypes: what it claims to reduce: floating point, int8, int16, int32, int64 and uint8
            can be checked.
        ops: the reductions that it claims.
        rows: rows of a rank's block, of three elements each.
        device: where the tensors are.
        one_clock: all ranks are on one machine, so that times can be compared to check the barrier.

    Returns:
        The names of the checks, all passed.

    Raises:
        ConformanceError: names every failed check, with what was expected and got.
        UsageError: claims that cannot be checked.
    """
    claims = Claims(tuple(dtypes), tuple(reduce_dtypes), tuple(ops), torch.device(device), one_clock, tuple(rows))
    if missing := _REQUIRED - set(claims.dtypes):
        raise UsageError(f"dtypes: expected {_names(_REQUIRED)} among them, {_names(missing)} is missing")
    if {torch.float32} - set(claims.reduce_dtypes) or "sum" not in claims.ops:
        raise UsageError(
            "expected float32 among reduce_dtypes and sum among ops: checks of order rely on that reduction"
        )
    passed: list[str] = []
    failed: list[FailedCheck] = []
    for name, check in checks(verbs, claims):
        failure, usable = _run(name, check, verbs.rank)
        if failure is None:
            passed.append(name)
        else:
            failed.append(failure)
        if not usable:
            break
    if failed:
        lines = [f"  {each.name}: {each.reason}" for each in failed]
        head = f"rank {verbs.rank} of {verbs.size}: {len(failed)} of {len(passed) + len(failed)} checks failed"
        end = () if usable else ("The checks ended there: after a call that raised, ranks may be out of step.",)
        raise ConformanceError("\n".join([f"{head}:", *lines, *end]), failed)
    return passed


def _run(name: str, check: Callable[[], None], rank: int) -> tuple[FailedCheck | None, bool]:
    """How the check failed, and whether the communicator can be used after it."""
    try:
        check()
    except AssertionError as error:
        return FailedCheck(name, str(error)), True
    except Exception as error:  # noqa: BLE001 - whatever a communicator raises is its failure, and is reported
        where = traceback.extract_tb(error.__traceback__)[-1]
        line = f"{where.filename}:{where.lineno}"
        return FailedCheck(name, f"rank {rank}: raised {type(error).__name__} at {line}: {error}"), False
    return None, True


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(map(short, dtypes)))
