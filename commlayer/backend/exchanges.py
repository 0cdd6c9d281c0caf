"""all_to_all, in both of c10d's forms.

What is beyond Gloo: lists of any shapes, all dtypes, tensors that are not contiguous; splits are
checked before a byte moves.

These are bodies of rows of the table (verbs.py), which run in the group's order, and what their
forms check before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import torch

from commlayer.backend.members import Members, Tensors
from commlayer.backend.options import timeout_of
from commlayer.backend.order import Order
from commlayer.backend.running import Calls
from commlayer.backend.tensors import is_plain, join, land, landing, spread
from commlayer.calls.counters import Row
from commlayer.calls.movement import Movement
from commlayer.profiles.errors import TensorError
from commlayer.transport.call_memory import as_bytes

__all__ = [
    "EVEN",
    "all_to_all",
    "all_to_all_lists",
    "check_lists",
    "check_splits",
    "compare_exchange",
    "in_bytes",
    "sent_bytes",
    "splits_of",
]

EVEN = (Row.EVEN, 0)


def all_to_all(
    calls: Calls, output: torch.Tensor, input: torch.Tensor, received: Sequence[int], sent: Sequence[int], opts: Any
) -> None:
    """Rows of ``input`` by ``input_split_sizes`` (empty: even) go to the ranks; ``output`` receives
    by its own."""
    if calls.needs_look and _by_plan(calls, output, input, received, sent, opts):
        return
    num_bytes = input.nbytes
    going = sent_bytes(calls.members, num_bytes, sent)
    if is_plain(input) and is_plain(output):
        call = calls.inner.gloo.alltoall_base
        calls.flat(num_bytes, call, output, input, received, sent, opts, sent=going)
        return
    with torch.inference_mode():
        source, target = as_bytes(input), landing(output)
        into = target.view(torch.uint8)
        received, sent = in_bytes(output, received), in_bytes(input, sent)
        call = calls.inner.gloo.alltoall_base
        calls.flat(num_bytes, call, into, source, received, sent, opts, sent=going)
        land(output, target)


def sent_bytes(members: Members, num_bytes: int, sent: Sequence[int]) -> tuple[int, int]:
    """Count what this rank sends between nodes and inside its own: Gloo sends every block straight
    to its rank."""
    if not sent:
        return EVEN
    rows = sum(sent)
    width = num_bytes // rows if rows else 0
    inter = width * sum(map(sent.__getitem__, members.far)) if members.far else 0
    return inter, num_bytes - inter - width * sent[members.rank]


def _by_plan(
    calls: Calls, output: torch.Tensor, input: torch.Tensor, received: Sequence[int], sent: Sequence[int], opts: Any
) -> bool:
    """Compare signatures and splits, where that is asked for; run a plan, where there is one."""
    signatures, size, timeout_s = calls.inner.signatures, calls.members.size, timeout_of(opts)
    if signatures is not None:
        compare_exchange(calls.order, output, input, received, sent, timeout_s)
    plan, planned = None, calls.inner.planned
    if calls.is_planning and planned.never_plans_exchanges:
        calls.never_plans_exchanges = signatures is None
    elif calls.is_planning:
        plan = planned.plan_all_to_all(max(input.nbytes, output.nbytes), timeout_s=timeout_s)
    if plan is None:
        return False
    with torch._C._InferenceMode(True):
        source, target = as_bytes(input), landing(output)
        into = target.view(torch.uint8)
        splits = _shares(input.nbytes, sent, size), _shares(into.nbytes, received, size)
        movement = Movement(plan, source, into, "split", splits=splits, dtype=input.dtype)
        calls.run(movement, input.nbytes, opts.timeout)
        land(output, target)
    return True


def compare_exchange(
    order: Order,
    output: torch.Tensor,
    input: torch.Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    timeout_s: float | None,
) -> None:
    """Compare an exchange, and its splits, with the other ranks': before a byte moves. In the
    group's order."""
    signatures, size = order.inner.signatures, order.members.size
    assert signatures is not None
    sequence, seconds = order.sequence + 1, timeout_s or order.inner.timeout.total_seconds()
    signatures.compare(sequence, f"all_to_all({input.dtype})", seconds)
    sent_elements, expected_elements = _shares(input.numel(), sent, size), _shares(output.numel(), received, size)
    signatures.compare_splits(sequence, sent_elements, expected_elements, "elements", seconds)


def all_to_all_lists(calls: Calls, outputs: Tensors, inputs: Tensors, opts: Any) -> None:
    """``inputs[k]`` goes to rank k, ``outputs[k]`` comes from it; shapes may all differ."""
    if any(x.dtype != inputs[0].dtype for x in (*inputs, *outputs)):
        raise TensorError(f"{calls.members.who}: all_to_all needs one dtype in all tensors")
    with torch.inference_mode():
        received, sent = [x.numel() for x in outputs], [x.numel() for x in inputs]
        arrived = torch.empty(sum(received), dtype=inputs[0].dtype)
        all_to_all(calls, arrived, join(inputs), received, sent, opts)
        spread(arrived, outputs)


def _shares(total: int, splits: Sequence[int], size: int) -> list[int]:
    """Rows for each of ``size`` ranks (empty: even) → of ``total`` elements, or bytes, each rank's."""
    if not splits:
        return [total // size] * size
    rows = sum(splits)
    width = total // rows if rows else 0
    return [count * width for count in splits]


def check_lists(members: Members, outputs: Tensors, inputs: Tensors) -> None:
    """Raises TensorError unless there is a tensor for each rank in both."""
    for name, tensors in (("output", outputs), ("input", inputs)):
        if len(tensors) != members.size:
            raise TensorError(f"{members.who}: all_to_all needs {members.size} {name} tensors, got {len(tensors)}")


def check_splits(
    members: Members, output: torch.Tensor, input: torch.Tensor, received: Sequence[int], sent: Sequence[int]
) -> None:
    """Raises TensorError, before anything is sent, for splits and tensors that do not fit
    together."""
    for name, x, splits in (("output", output, received), ("input", input, sent)):
        rows = x.size(0) if x.dim() else 1
        if splits:
            if sum(splits) != rows or len(splits) != members.size or min(splits) < 0:
                raise TensorError(
                    f"{members.who}: {name}_split_sizes must be {members.size} numbers that add up to "
                    f"the {rows} rows of the {name}, got {list(splits)}"
                )
        elif rows % members.size:
            raise TensorError(
                f"{members.who}: all_to_all with even splits: {rows} rows of the {name} do not divide "
                f"by {members.size} ranks; pass {name}_split_sizes"
            )
    if output.dtype != input.dtype:
        raise TensorError(f"{members.who}: all_to_all from {input.dtype} to {output.dtype}: both must be the same")
    if not (received or sent) and output.numel() != input.numel():
        raise TensorError(
            f"{members.who}: all_to_all with even splits: {input.numel()} elements go out, so as many come in, but the output "
            f"has {output.numel()}; pass split sizes if they differ"
        )


def splits_of(order: Order, name: str, given: Any) -> list[int]:
    """``given`` as a list of int; TensorError, which the other ranks can read of, for what is
    none."""
    if type(given) is list:  # nearly always, of int: this takes half of the time
        try:
            return list(map(index, given))
        except TypeError:
            pass
    return order.or_say_refused("all_to_all", _split_sizes, order.members, name, given)  # type: ignore[no-any-return]


def _split_sizes(members: Members, name: str, given: Any) -> list[int]:
    try:
        return _whole_numbers(given)
    except (TypeError, ValueError, OverflowError) as error:
        raise TensorError(
            f"{members.who}: {name}_split_sizes must be whole numbers, one for each of {members.size} ranks, got {given!r} "
            f"({error}): pass a list of int"
        ) from error


def _whole_numbers(given: Any) -> list[int]:
    """``given`` as a list of int: a sequence, set, array or 1-D tensor of integers, or None for an
    empty one.

    What pybind11 makes of an argument for Gloo is taken too: of other numbers, their int, save that
    a Python float is none. Raises TypeError, ValueError, OverflowError for what has no such
    elements.
    """
    if given is None:
        return []
    if isinstance(given, (str, bytes, Mapping)):
        raise TypeError(f"a {type(given).__name__} is no list of numbers")
    elements = given.tolist() if isinstance(given, torch.Tensor) else list(given)
    try:
        return list(map(index, elements))
    except TypeError:
        return [_whole_number(each) for each in elements]


def _whole_number(x: Any) -> int:
    if isinstance(x, float) or not hasattr(x, "__int__"):
        raise TypeError(f"{x!r} is no whole number")
    return int(x)


def in_bytes(x: torch.Tensor, splits: Sequence[int]) -> list[int]:
    """The bytes that rows of ``x`` have, for each rank."""
    rows = sum(splits)
    return [count * x.nbytes // rows if rows else 0 for count in splits]
