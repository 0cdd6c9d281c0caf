"""all_to_all, in both of c10d's forms.

What is beyond Gloo: lists of any shapes, all dtypes, tensors that are not contiguous; splits are checked before a byte moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any

import torch
from torch._C._distributed_c10d import AllToAllOptions, Work

from commlayer.backend.base import timeout_of
from commlayer.backend.moves import Moves, Tensors
from commlayer.backend.options import make
from commlayer.backend.tensors import as_bytes, is_plain, join, land, landing, real, reals, spread
from commlayer.profiles.errors import TensorError

__all__ = ["Exchanges"]


class Exchanges(Moves):
    """The verbs of all_to_all."""

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        **named: Any,
    ) -> Work:
        """Rows of ``input`` by ``input_split_sizes`` (empty: even) go to the ranks; ``output`` receives by its own."""
        if type(opts) is not AllToAllOptions:
            opts = make(AllToAllOptions, opts, named.pop("timeout", None), named)
        if type(input) is not torch.Tensor or type(output) is not torch.Tensor:
            input, output = real(input), real(output)
        if not input.is_cpu:
            device = self._on_device(input)
            return device.all_to_all_single(output, input, output_split_sizes, input_split_sizes, opts)
        received = self._splits("output", output, output_split_sizes)
        sent = self._splits("input", input, input_split_sizes)
        if output.dtype != input.dtype:
            raise TensorError(f"{self.who}: all_to_all from {input.dtype} to {output.dtype}: both must be the same")
        return self._issue(opts, "all_to_all", [output], self._all_to_all, output, input, received, sent, opts)

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
        self, output: torch.Tensor, input: torch.Tensor, received: list[int], sent: list[int], opts: Any
    ) -> None:
        """``received``, ``sent``: elements from and to each rank; empty: even."""
        if self._needs_look:
            self._all_to_all_looked_at(output, input, received, sent, opts)
        elif not received and not sent and is_plain(input) and is_plain(output):
            self._all_to_all_flat(input.nbytes, input.nbytes, output, input, [], [], opts)
        else:
            self._all_to_all_as_bytes(output, input, received, sent, opts)

    def _all_to_all_looked_at(
        self, output: torch.Tensor, input: torch.Tensor, received: list[int], sent: list[int], opts: Any
    ) -> None:
        sent = sent or [input.numel() // self._size] * self._size
        received = received or [output.numel() // self._size] * self._size
        if self._signatures is not None:
            seconds = timeout_of(opts) or self._timeout_s
            self._signatures.compare(self._sequence + 1, f"all_to_all({input.dtype})", seconds)
            self._signatures.compare_splits(self._sequence + 1, sent, received, "elements", seconds)
        plan = self._planned.plan_all_to_all(max(input.nbytes, output.nbytes)) if self._is_planning else None
        if plan is None:
            self._all_to_all_as_bytes(output, input, received, sent, opts)
            return
        item = input.element_size()
        with torch.inference_mode():
            source, target = as_bytes(input), landing(output)
            self._sequence += 1
            started = perf_counter_ns()
            with torch._C._profiler._RecordFunctionFast(f"commlayer:all_to_all {plan.name}"):
                self._planned.run_all_to_all(
                    plan,
                    source,
                    target.view(torch.uint8),
                    [count * item for count in sent],
                    [count * item for count in received],
                    timeout_s=timeout_of(opts),
                )
            self.counters.row("all_to_all", plan.name).add(input.nbytes, perf_counter_ns() - started)
            land(output, target)

    def _all_to_all_as_bytes(
        self, output: torch.Tensor, input: torch.Tensor, received: list[int], sent: list[int], opts: Any
    ) -> None:
        item = input.element_size()
        with torch.inference_mode():
            source, target = as_bytes(input), landing(output)
            sent, received = [count * item for count in sent], [count * item for count in received]
            self._all_to_all_flat(input.nbytes, source.numel(), target.view(torch.uint8), source, received, sent, opts)
            land(output, target)

    def _all_to_all_lists(self, outputs: Tensors, inputs: Tensors, opts: Any) -> None:
        if any(x.dtype != inputs[0].dtype for x in (*inputs, *outputs)):
            raise TensorError(f"{self.who}: all_to_all needs one dtype in all tensors")
        with torch.inference_mode():
            received, sent = [x.numel() for x in outputs], [x.numel() for x in inputs]
            arrived = torch.empty(sum(received), dtype=inputs[0].dtype)
            self._all_to_all(arrived, join(inputs), received, sent, opts)
            spread(arrived, outputs)

    def _all_to_all_flat(
        self,
        num_bytes: int,
        total: int,
        output: torch.Tensor,
        input: torch.Tensor,
        received: list[int],
        sent: list[int],
        opts: Any,
    ) -> None:
        """Gloo's own, which sends every block straight to its rank: so what crosses which link is known here.

        Where one rank passes splits and another does not, both forms meet on the wire; Gloo sends the same messages.
        """
        row = self.counters.row("all_to_all")
        before = row.inter, row.intra
        self._flat("all_to_all", num_bytes, self._gloo.alltoall_base, output, input, received, sent, opts)
        block = total // self._size
        row.inter, row.intra = before
        if row.inter >= 0:
            row.inter += sum(sent[peer] for peer in self._far) if sent else block * len(self._far)
            row.intra += sum(sent[peer] for peer in self._near) if sent else block * len(self._near)

    def _splits(self, name: str, x: torch.Tensor, splits: Sequence[int]) -> list[int]:
        """Rows → elements for each rank; empty: even. Raises before anything is sent."""
        rows = x.size(0) if x.dim() else x.numel()
        if not splits:
            if rows % self._size:
                raise TensorError(
                    f"{self.who}: all_to_all with even splits: {rows} rows of the {name} do not divide by {self._size} ranks; "
                    f"pass {name}_split_sizes"
                )
            return []
        if len(splits) != self._size or sum(splits) != rows or min(splits) < 0:
            raise TensorError(
                f"{self.who}: {name}_split_sizes must be {self._size} numbers that add up to the {rows} rows of the {name}, got "
                f"{list(splits)}"
            )
        width = x.numel() // rows if rows else 0
        return [count * width for count in splits]
