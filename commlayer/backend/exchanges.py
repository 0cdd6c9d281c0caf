"""all_to_all, in both of c10d's forms.

What is beyond Gloo: lists of any shapes, all dtypes, tensors that are not contiguous; splits are checked before a byte moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import torch
from torch._C._distributed_c10d import AllToAllOptions, Work

from commlayer.backend.base import now, timeout_of
from commlayer.backend.moves import Moves, Tensors
from commlayer.backend.options import make
from commlayer.backend.recording import fill_plan
from commlayer.backend.tensors import MOVABLE, is_plain, join, land, landing, real, reals, spread
from commlayer.engine.plain import as_bytes
from commlayer.profiles.errors import TensorError
from commlayer.statistics import Row

__all__ = ["Exchanges"]

_TENSOR = torch.Tensor
EVEN = (Row.EVEN, 0)


class Exchanges(Moves):
    """The verbs of all_to_all."""

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = (),
        input_split_sizes: Any = (),
        opts: Any = None,
        **named: Any,
    ) -> Work:
        """Rows of ``input`` by ``input_split_sizes`` (empty: even) go to the ranks; ``output`` receives by its own.

        Splits are one whole number for each rank, in whatever holds such: see :func:`_whole_numbers`.
        """
        if (
            type(output_split_sizes) is not list or output_split_sizes
        ):  # an empty list is no array, whose truth cannot be asked
            output_split_sizes = self._splits("output", output_split_sizes)
        if type(input_split_sizes) is not list or input_split_sizes:
            input_split_sizes = self._splits("input", input_split_sizes)
        if (
            (self._is_direct or (self._never_plans_exchanges and not self._is_watched))
            and type(opts) is AllToAllOptions
            and (self._is_direct or not opts.asyncOp)
            and self._is_free_for_both(output, input, MOVABLE)
        ):
            num_bytes, sent = input.nbytes, EVEN
            if (
                input_split_sizes
                or output_split_sizes
                or output.nbytes != num_bytes
                or output.dtype is not input.dtype
                or not input.dim()
                or input.size(0) % self._size
            ):  # Gloo checks late, and not whether any is negative
                self._check_all(output, input, output_split_sizes, input_split_sizes)
                sent = self._sent_bytes(num_bytes, input_split_sizes)
            started = now()
            work = self._gloo.alltoall_base(output, input, output_split_sizes, input_split_sizes, opts)
            if opts.asyncOp:
                return self._under_way("all_to_all", num_bytes, work, opts, [output], *sent)
            return self._await("all_to_all", num_bytes, started, work, opts, *sent)
        if type(opts) is not AllToAllOptions:
            opts = make(AllToAllOptions, opts, named.pop("timeout", None), named)
        input, output = real(input), real(output)
        if not input.is_cpu:
            device = self._on_device(input)
            return device.all_to_all_single(output, input, output_split_sizes, input_split_sizes, opts)
        splits = output_split_sizes, input_split_sizes
        self._or_say_refused("all_to_all", self._check_all, output, input, *splits)
        return self._issue(opts, "all_to_all", [output], self._all_to_all, output, input, *splits, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, **named: Any) -> Work:
        """``inputs[k]`` goes to rank k, ``outputs[k]`` comes from it; shapes may all differ."""
        opts = make(AllToAllOptions, opts, named.pop("timeout", None), named)
        outputs, inputs = reals(outputs), reals(inputs)
        if inputs and not inputs[0].is_cpu:
            return self._on_device(inputs[0]).alltoall(outputs, inputs, opts)
        for name, tensors in (("output", outputs), ("input", inputs)):
            if len(tensors) != self._size:
                raise TensorError(f"{self.who}: all_to_all needs {self._size} {name} tensors, got {len(tensors)}")
        return self._issue(opts, "all_to_all", list(outputs), self._all_to_all_lists, outputs, inputs, opts)

    alltoall_base = all_to_all_single

    # How: these run in the group's order

    def _all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, received: Sequence[int], sent: Sequence[int], opts: Any
    ) -> None:
        """``received``, ``sent``: rows from and to each rank; empty: even."""
        if self._needs_look and self._all_to_all_by_plan(output, input, received, sent, opts):
            return
        num_bytes = input.nbytes
        inter, intra = self._sent_bytes(num_bytes, sent)
        if is_plain(input) and is_plain(output):
            call = self._gloo.alltoall_base
            self._flat("all_to_all", num_bytes, call, output, input, received, sent, opts, inter=inter, intra=intra)
            return
        with torch.inference_mode():
            source, target = as_bytes(input), landing(output)
            into = target.view(torch.uint8)
            received, sent = _in_bytes(output, received), _in_bytes(input, sent)
            call = self._gloo.alltoall_base
            self._flat("all_to_all", num_bytes, call, into, source, received, sent, opts, inter=inter, intra=intra)
            land(output, target)

    def _sent_bytes(self, num_bytes: int, sent: Sequence[int]) -> tuple[int, int]:
        """What this rank sends between nodes and inside its own: Gloo sends every block straight to its rank."""
        if not sent:
            return EVEN
        rows = sum(sent)
        width = num_bytes // rows if rows else 0
        inter = width * sum(map(sent.__getitem__, self._far)) if self._far else 0
        return inter, num_bytes - inter - width * sent[self._rank]

    def _all_to_all_by_plan(
        self, output: torch.Tensor, input: torch.Tensor, received: Sequence[int], sent: Sequence[int], opts: Any
    ) -> bool:
        """Compare signatures and splits, where that is asked for; run a plan, where there is one."""
        if self._signatures is not None:
            seconds = timeout_of(opts) or self._timeout_s
            self._signatures.compare(self._sequence + 1, f"all_to_all({input.dtype})", seconds)
            given, wanted = (self._elements(x, splits) for x, splits in ((input, sent), (output, received)))
            self._signatures.compare_splits(self._sequence + 1, given, wanted, "elements", seconds)
        plan = None
        if self._is_planning and self._signatures is None and self._planned.never_plans_exchanges:
            self._never_plans_exchanges = True
        elif self._is_planning:
            plan = self._planned.plan_all_to_all(max(input.nbytes, output.nbytes), timeout_s=timeout_of(opts))
        if plan is None:
            return False
        item = input.element_size()
        with torch.inference_mode():
            source, target = as_bytes(input), landing(output)
            self._sequence += 1
            started = now()
            with torch._C._profiler._RecordFunctionFast(f"commlayer:all_to_all {plan.name}"):
                self._planned.run_all_to_all(
                    plan,
                    source,
                    target.view(torch.uint8),
                    [count * item for count in self._elements(input, sent)],
                    [count * item for count in self._elements(output, received)],
                    timeout_s=timeout_of(opts),
                )
            self.counters.planned["all_to_all", plan.name].add(input.nbytes, now() - started)
            if self._planned.record is not None:
                fill_plan(self._planned, self._planned.record, self._sequence, plan, input.nbytes, (-1, -1))
            land(output, target)
        return True

    def _all_to_all_lists(self, outputs: Tensors, inputs: Tensors, opts: Any) -> None:
        if any(x.dtype != inputs[0].dtype for x in (*inputs, *outputs)):
            raise TensorError(f"{self.who}: all_to_all needs one dtype in all tensors")
        with torch.inference_mode():
            received, sent = [x.numel() for x in outputs], [x.numel() for x in inputs]
            arrived = torch.empty(sum(received), dtype=inputs[0].dtype)
            self._all_to_all(arrived, join(inputs), received, sent, opts)
            spread(arrived, outputs)

    def _elements(self, x: torch.Tensor, splits: Sequence[int]) -> list[int]:
        """Rows for each rank (empty: even) → elements."""
        if not splits:
            return [x.numel() // self._size] * self._size
        rows = sum(splits)
        return [count * x.numel() // rows if rows else 0 for count in splits]

    def _check_all(
        self, output: torch.Tensor, input: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        self._check_splits("output", output, received)
        self._check_splits("input", input, sent)
        if output.dtype != input.dtype:
            raise TensorError(f"{self.who}: all_to_all from {input.dtype} to {output.dtype}: both must be the same")
        if not (received or sent) and output.numel() != input.numel():
            raise TensorError(
                f"{self.who}: all_to_all with even splits: {input.numel()} elements go out, so as many come in, but the output "
                f"has {output.numel()}; pass split sizes if they differ"
            )

    def _splits(self, name: str, given: Any) -> list[int]:
        """``given`` as a list of int; TensorError, which the other ranks can read of, for what is none."""
        if type(given) is list:  # nearly always, of int: this takes half of the time
            try:
                return list(map(index, given))
            except TypeError:
                pass
        return self._or_say_refused("all_to_all", _split_sizes, self, name, given)  # type: ignore[no-any-return]

    def _check_splits(self, name: str, x: torch.Tensor, splits: Sequence[int]) -> None:
        """Before anything is sent: ``splits`` (empty: even) are rows of ``x`` for each rank."""
        rows = x.size(0) if x.dim() else 1
        if not splits:
            if rows % self._size:
                raise TensorError(
                    f"{self.who}: all_to_all with even splits: {rows} rows of the {name} do not divide by {self._size} ranks; "
                    f"pass {name}_split_sizes"
                )
        elif sum(splits) != rows or len(splits) != self._size or min(splits) < 0:
            raise TensorError(
                f"{self.who}: {name}_split_sizes must be {self._size} numbers that add up to the {rows} rows of the {name}, got "
                f"{list(splits)}"
            )


def _split_sizes(group: Exchanges, name: str, given: Any) -> list[int]:
    try:
        return _whole_numbers(given)
    except (TypeError, ValueError, OverflowError) as error:
        raise TensorError(
            f"{group.who}: {name}_split_sizes must be whole numbers, one for each of {group.size()} ranks, got {given!r} "
            f"({error}): pass a list of int"
        ) from error


def _whole_numbers(given: Any) -> list[int]:
    """``given`` as a list of int: a sequence, set, array or 1-D tensor of integers, or None for an empty one.

    What pybind11 makes of an argument for Gloo is taken too: of other numbers, their int, save that a Python float is none.
    Raises TypeError, ValueError, OverflowError for what has no such elements.
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


def _in_bytes(x: torch.Tensor, splits: Sequence[int]) -> list[int]:
    """Rows → bytes."""
    rows = sum(splits)
    return [count * x.nbytes // rows if rows else 0 for count in splits]
