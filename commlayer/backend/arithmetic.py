"""Reductions of dtypes and operations that Gloo does not have, carried by those that it has.

Gloo reduces FP16, BF16, FP32, FP64, int8, uint8, int32 and int64, with SUM, PRODUCT, MIN, MAX; AVG
on floats only, the bitwise operations on integers only. Everything else travels as one of these
(see :func:`carrier`):

- int16, uint16, uint32 travel one size wider, uint64 as int64: sums and products wrap as they would
  in the dtype itself;
- bool as uint8: SUM, MAX and BOR are "or", PRODUCT, MIN and BAND "and", as in NCCL; BXOR is parity;
- complex as pairs of reals: SUM, AVG and PREMUL_SUM, what can be said of them;
- AVG of integers is the sum divided by the number of ranks, towards zero, as in NCCL;
- PREMUL_SUM is a SUM of what each rank has multiplied by its factor.

FP8 is refused: a sum of two FP8 numbers rarely is one, and every hop would round again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import ReduceOp

from commlayer.profiles.errors import InternalError, TensorError

__all__ = ["FLOATS", "GLOO_REDUCES", "PLAN_NAMES", "Carrier", "carrier", "is_summed_by_plans", "reduce_rows"]

Convert = Callable[[torch.Tensor], torch.Tensor]

SUM, AVG, PRODUCT, MIN, MAX = ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX
BAND, BOR, BXOR, PREMUL_SUM = ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR, ReduceOp.PREMUL_SUM

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64})
_NUMBERS = FLOATS | _INTEGERS
_BITWISE = (BAND, BOR, BXOR)

GLOO_REDUCES: dict[ReduceOp.RedOpType, frozenset[torch.dtype]] = {
    SUM: _NUMBERS,
    PRODUCT: _NUMBERS,
    MIN: _NUMBERS,
    MAX: _NUMBERS,
    AVG: FLOATS,
    BAND: _INTEGERS,
    BOR: _INTEGERS,
    BXOR: _INTEGERS,
    PREMUL_SUM: frozenset(),
}
"""The operations and dtypes that Gloo reduces by itself."""

PLAN_NAMES: dict[ReduceOp.RedOpType, str] = {
    SUM: "sum",
    PRODUCT: "product",
    MIN: "min",
    MAX: "max",
    BAND: "band",
    BOR: "bor",
    BXOR: "bxor",
    AVG: "sum",  # and a division after it
}
"""The names that plans have for them."""


def is_summed_by_plans(op: Any, dtype: torch.dtype) -> bool:
    """Whether a plan on a device reduces so: an average of floats only, and bitwise operations of
    integers only."""
    return dtype in _SUMMED_BY_PLANS.get(op, ())


_SUMMED_BY_PLANS: dict[Any, frozenset[torch.dtype]] = {
    **dict.fromkeys((SUM, PRODUCT, MIN, MAX), _NUMBERS),
    **dict.fromkeys(_BITWISE, _INTEGERS),
    AVG: FLOATS - {torch.float16},  # of a sum that half precision may not hold; NCCL divides before it adds
}
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_BOOL_OPS = {SUM: MAX, MAX: MAX, BOR: MAX, PRODUCT: MIN, MIN: MIN, BAND: MIN, BXOR: BXOR}


@dataclass(frozen=True)
class Carrier:
    """How a tensor is reduced: ``load`` it, reduce with ``op`` (which Gloo has), ``store`` the
    result.

    ``load`` takes a contiguous tensor and may return a view of it; ``store`` takes what was
    reduced.
    """

    op: ReduceOp.RedOpType
    load: Convert
    store: Convert


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def carrier(op: Any, dtype: torch.dtype, group_size: int) -> Carrier:
    """How to reduce ``dtype`` with ``op`` (a ReduceOp) over ``group_size`` ranks. Raises
    TensorError for what cannot be."""
    kind = op.op
    if dtype in GLOO_REDUCES[kind]:
        return Carrier(kind, _same, _same)
    if dtype.is_complex:
        return _complex(op, dtype, group_size)
    if dtype is torch.bool:
        if kind not in _BOOL_OPS:
            raise _cannot(kind, torch.bool)
        return Carrier(_BOOL_OPS[kind], lambda x: x.view(torch.uint8), lambda x: x.view(torch.bool))
    if kind == PREMUL_SUM and dtype in FLOATS:
        factor = op.factor
        return Carrier(SUM, lambda x: (x * factor).to(x.dtype), _same)
    if dtype in _INTEGERS or dtype in _WIDER or dtype is torch.uint64:
        return _integer(kind, dtype, group_size)
    raise _cannot(kind, dtype)


def _complex(op: Any, dtype: torch.dtype, group_size: int) -> Carrier:
    if op.op not in (SUM, AVG, PREMUL_SUM) or dtype is torch.complex32:
        raise _cannot(op.op, dtype)
    real = carrier(op, dtype.to_real(), group_size)
    return Carrier(
        real.op,
        lambda x: real.load(torch.view_as_real(x.resolve_conj())),
        lambda x: torch.view_as_complex(real.store(x)),
    )


def _integer(kind: ReduceOp.RedOpType, dtype: torch.dtype, group_size: int) -> Carrier:
    if kind == PREMUL_SUM:
        raise _cannot(kind, dtype)
    if dtype is torch.uint64:
        return _unsigned_64(kind)
    wide = _WIDER.get(dtype, dtype)
    divide: Convert = partial(torch.div, other=group_size, rounding_mode="trunc") if kind == AVG else _same
    return Carrier(
        SUM if kind == AVG else kind,
        lambda x: x.to(wide),
        lambda x: divide(x).to(dtype),
    )


def _unsigned_64(kind: ReduceOp.RedOpType) -> Carrier:
    """The values as int64: sums, products and bits are the same; for the order of MIN and MAX the
    sign bit is turned over."""
    if kind == AVG:
        raise _cannot(kind, torch.uint64)
    if kind in (MIN, MAX):
        lowest = torch.iinfo(torch.int64).min
        return Carrier(kind, lambda x: x.view(torch.int64) ^ lowest, lambda x: (x ^ lowest).view(torch.uint64))
    return Carrier(kind, lambda x: x.view(torch.int64), lambda x: x.view(torch.uint64))


def _cannot(kind: ReduceOp.RedOpType, dtype: torch.dtype) -> TensorError:
    name = kind.name
    if "float8" in str(dtype) or "float4" in str(dtype):
        advice = (
            "cast to torch.bfloat16 first, or move the tensors (all_gather, all_to_all) and add them in a wider dtype"
        )
    elif kind in _BITWISE:
        advice = "bitwise operations need integers or bool: pass x.view(torch.int32) or the like"
    elif dtype.is_complex:
        advice = "complex numbers have SUM, AVG and PREMUL_SUM only: reduce torch.view_as_real(x) if you mean the parts"
    elif kind == PREMUL_SUM:
        advice = "PREMUL_SUM needs a floating dtype"
    else:
        advice = "cast it to a dtype that can be"
    return TensorError(f"cannot use ReduceOp.{name} with {dtype}: {advice}")


_ROWS: dict[ReduceOp.RedOpType, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    SUM: torch.add,
    PRODUCT: torch.mul,
    MIN: torch.minimum,
    MAX: torch.maximum,
    BAND: torch.bitwise_and,
    BOR: torch.bitwise_or,
    BXOR: torch.bitwise_xor,
}


def reduce_rows(rows: torch.Tensor, kind: ReduceOp.RedOpType) -> torch.Tensor:
    """[n, s] → [s], in the order of the rows; 16-bit floats are accumulated in FP32 and rounded
    once."""
    if kind == AVG:
        return (reduce_rows(rows.double() if rows.dtype is torch.float64 else rows.float(), SUM) / len(rows)).to(
            rows.dtype
        )
    if kind not in _ROWS:
        raise InternalError(f"reduce_rows was asked for {kind.name}: a carrier never asks for it")
    is_half = rows.dtype in (torch.float16, torch.bfloat16)
    total = rows[0].float() if is_half else rows[0].clone()
    for row in rows[1:]:
        total = _ROWS[kind](total, row)
    return total.to(rows.dtype)
