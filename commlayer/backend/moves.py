"""Collectives that move the same bytes to or from all: all_gather, broadcast, gather, scatter, in all of c10d's forms.

What is beyond Gloo: outputs are checked by their number of elements, as NCCL does, not by shape; all_gather takes lists of
unequal tensors; all dtypes travel; nothing has to be contiguous.

Which inner call is made depends only on what all ranks know alike (numbers of elements, dtype). Layout is a rank's own
affair, so it is put right by local copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    BroadcastOptions,
    GatherOptions,
    ScatterOptions,
    Work,
)

from commlayer.backend.base import GroupBase, now
from commlayer.backend.options import make
from commlayer.backend.tensors import MOVABLE, flat, is_plain, land, landing, real, reals, require_room, spread
from commlayer.engine.plain import as_bytes, require_dense
from commlayer.profiles.errors import TensorError

__all__ = ["Moves"]

Tensors = Sequence[torch.Tensor]
_TENSOR = torch.Tensor


class Moves(GroupBase):
    """The verbs that move."""

    # all_gather

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, **named: Any) -> Work:
        """``output`` holds n times the elements of ``input``, in any shape; block k comes from rank k."""
        if self._is_direct and type(opts) is AllgatherOptions and self._is_free_for_both(output, input, MOVABLE):
            started = now()
            try:
                work = self._gloo._allgather_base(output, input, opts)
            except RuntimeError:  # shapes or dtypes that Gloo does not take; nothing was sent
                pass
            else:
                if opts.asyncOp:
                    return self._under_way("all_gather", output.nbytes, work, opts, [output])
                return self._await("all_gather", output.nbytes, started, work, opts)
        if type(opts) is not AllgatherOptions:
            opts = make(AllgatherOptions, opts, named.pop("timeout", None), named)
        input, output = real(input), real(output)
        if not input.is_cpu:
            return self._on_device(input).all_gather_single(output, input, opts)
        return self._issue(opts, "all_gather", [output], self._all_gather, output, input, opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None, **named: Any) -> Work:
        """:meth:`all_gather_single` of each pair, as one call."""
        opts = make(AllgatherOptions, opts, named.pop("timeout", None), named)
        outputs, inputs = reals(outputs), reals(inputs)
        if inputs and not inputs[0].is_cpu:
            return self._on_device(inputs[0]).all_gather_single_coalesced(outputs, inputs, opts)
        return self._issue(opts, "all_gather", list(outputs), self._all_gather_each, outputs, inputs, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **named: Any) -> Work:
        """``outputs[0]`` is a list of n tensors, whose k-th has as many elements as the input of rank k."""
        opts = make(AllgatherOptions, opts, named.pop("timeout", None), named)
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        outputs, inputs = [reals(row) for row in outputs], self._some("all_gather", inputs)
        if not inputs[0].is_cpu:
            return self._on_device(inputs[0]).allgather(outputs, inputs, opts)
        self._one_list("all_gather", outputs, inputs)
        return self._issue(opts, "all_gather", outputs[0], self._all_gather_list, outputs[0], inputs[0], opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None, **named: Any) -> Work:
        """``outputs[k][i]`` becomes input i of rank k."""
        opts = make(AllgatherOptions, opts, named.pop("timeout", None), named)
        outputs, inputs = [reals(row) for row in outputs], reals(inputs)
        if inputs and not inputs[0].is_cpu:
            return self._on_device(inputs[0]).allgather_coalesced(outputs, inputs, opts)
        if len(outputs) != self._size or any(len(row) != len(inputs) for row in outputs):
            raise TensorError(
                f"{self.who}: all_gather_coalesced of {len(inputs)} tensors needs {self._size} output lists of as many, got "
                f"lists of {[len(row) for row in outputs]}"
            )
        return self._issue(
            opts, "all_gather", [list(row) for row in outputs], self._all_gather_rows, outputs, inputs, opts
        )

    # broadcast, gather, scatter

    def broadcast(self, tensors: Any = None, opts: Any = None, timeout: Any = None, **named: Any) -> Work:
        """The tensors of rank ``opts.rootRank`` become those of all."""
        if self._is_direct and type(opts) is BroadcastOptions and type(tensors) is list and len(tensors) == 1:
            tensor = tensors[0]
            if self._is_free_for(tensor, MOVABLE):
                started, work = now(), self._gloo.broadcast(tensors, opts)
                if opts.asyncOp:
                    return self._under_way("broadcast", tensor.nbytes, work, opts, tensors)
                return self._await("broadcast", tensor.nbytes, started, work, opts)
        if type(opts) is not BroadcastOptions:
            tensors = named.pop("tensor", tensors)
            opts = make(BroadcastOptions, opts, timeout, named)
        tensors = self._some("broadcast", tensors)
        if not tensors[0].is_cpu:
            return self._on_device(tensors[0]).broadcast(tensors, opts)
        return self._issue(opts, "broadcast", tensors, self._broadcast, tensors, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, **named: Any) -> Work:
        """The inputs of all ranks, on rank ``opts.rootRank``; elsewhere ``outputs`` is empty."""
        opts = make(GatherOptions, opts, timeout, named)
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        outputs, inputs = [reals(row) for row in outputs], self._some("gather", inputs)
        if not inputs[0].is_cpu:
            return self._on_device(inputs[0]).gather(outputs, inputs, opts)
        return self._issue(opts, "gather", outputs[0] if outputs else [], self._gather, outputs, inputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, **named: Any) -> Work:
        """Input k of rank ``opts.rootRank`` goes to rank k; elsewhere ``inputs`` is empty."""
        opts = make(ScatterOptions, opts, timeout, named)
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        outputs, inputs = self._some("scatter", outputs), [reals(row) for row in inputs]
        if not outputs[0].is_cpu:
            return self._on_device(outputs[0]).scatter(outputs, inputs, opts)
        return self._issue(opts, "scatter", outputs, self._scatter, outputs, inputs, opts)

    # c10d's other names

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    # How: these run in the group's order

    def _all_gather(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> None:
        if output.numel() != self._size * input.numel() or output.dtype != input.dtype:
            raise TensorError(
                f"{self.who}: all_gather of {input.numel()} elements of {input.dtype} over {self._size} ranks needs an output of "
                f"{self._size * input.numel()}, got {output.numel()} of {output.dtype}"
            )
        num_bytes = output.nbytes
        plan = self._look("all_gather", input, num_bytes, timeout=opts.timeout) if self._needs_look else None
        if plan is None and is_plain(output) and is_plain(input):
            if output.dim() != 1 or input.dim() != 1:
                output, input = output.detach().view(-1), input.detach().view(-1)
            self._flat("all_gather", num_bytes, self._gloo._allgather_base, output, input, opts)
            return
        with torch.inference_mode():
            source, target = flat(input), landing(output)
            if plan is not None:
                self._run_plan(plan, "all_gather", num_bytes, source, target, opts)
            else:
                into, part = _carried(target), _carried(source)
                self._flat("all_gather", num_bytes, self._gloo._allgather_base, into, part, opts)
            land(output, target)

    def _all_gather_each(self, outputs: Tensors, inputs: Tensors, opts: Any) -> None:
        if len(outputs) != len(inputs):
            raise TensorError(f"{self.who}: all_gather of {len(inputs)} tensors into {len(outputs)}: expected as many")
        for output, part in zip(outputs, inputs, strict=True):
            self._all_gather(output, part, opts)

    def _all_gather_list(self, outputs: Tensors, input: torch.Tensor, opts: Any) -> None:
        sizes = [output.numel() for output in outputs]
        if sizes[self._rank] != input.numel() or any(output.dtype != input.dtype for output in outputs):
            raise TensorError(
                f"{self.who}: all_gather of {input.numel()} elements of {input.dtype} needs as many in output {self._rank}, "
                f"and the same dtype in all; got outputs of {sizes} elements, {sorted({str(o.dtype) for o in outputs})}"
            )
        num_bytes = sum(sizes) * input.element_size()
        if len(set(sizes)) > 1:
            self._all_gather_uneven(outputs, input, sizes, num_bytes, opts)
            return
        plan = self._look("all_gather", input, num_bytes, timeout=opts.timeout) if self._needs_look else None
        is_fitting = plan is None and is_plain(input) and all(o.shape == input.shape and is_plain(o) for o in outputs)
        if is_fitting:
            self._flat("all_gather", num_bytes, self._gloo.allgather, [outputs], [input], opts)
            return
        with torch.inference_mode():
            source = flat(input)
            gathered = torch.empty(sum(sizes), dtype=input.dtype)
            if plan is not None:
                self._run_plan(plan, "all_gather", num_bytes, source, gathered, opts)
            else:
                into, part = _carried(gathered), _carried(source)
                self._flat("all_gather", num_bytes, self._gloo._allgather_base, into, part, opts)
            spread(gathered, outputs)

    def _all_gather_uneven(
        self, outputs: Tensors, input: torch.Tensor, sizes: list[int], num_bytes: int, opts: Any
    ) -> None:
        """Padded to the largest: one call. All ranks know all sizes, from their outputs."""
        if self._needs_look:
            self._look("all_gather", input, num_bytes, sizes=tuple(sizes), timeout=opts.timeout, plannable=False)
        with torch.inference_mode():
            widest = max(sizes) * input.element_size()
            padded = torch.empty(widest, dtype=torch.uint8)
            source = as_bytes(input)
            padded[: source.numel()] = source
            gathered = torch.empty(self._size * widest, dtype=torch.uint8)
            self._flat("all_gather", num_bytes, self._gloo._allgather_base, gathered, padded, opts)
            for row, output in zip(gathered.view(self._size, widest), outputs, strict=True):
                spread(row[: output.nbytes].view(output.dtype), [output])

    def _all_gather_rows(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> None:
        for i, part in enumerate(inputs):
            self._all_gather_list([row[i] for row in outputs], part, opts)

    def _broadcast(self, tensors: Tensors, opts: Any) -> None:
        for tensor in tensors:
            self._broadcast_one(tensor, opts)

    def _broadcast_one(self, tensor: torch.Tensor, opts: Any) -> None:
        plan, num_bytes = None, tensor.nbytes
        self._require_root("broadcast from", opts)
        if self._needs_look:
            plan = self._look("broadcast", tensor, num_bytes, root=opts.rootRank, timeout=opts.timeout)
        if plan is None and is_plain(tensor):
            self._flat("broadcast", num_bytes, self._gloo.broadcast, [tensor], opts)
            return
        require_room(tensor)
        with torch.inference_mode():
            moved = flat(tensor)
            if plan is not None:
                self._run_plan(plan, "broadcast", num_bytes, moved, moved, opts, root=opts.rootRank)
            else:
                self._flat("broadcast", num_bytes, self._gloo.broadcast, [_carried(moved)], opts)
            land(tensor, moved)

    def _gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> None:
        if len(inputs) != 1:
            raise TensorError(f"{self.who}: gather takes one input, got {len(inputs)}")
        self._require_root("gather to", opts)
        source, is_root = inputs[0], opts.rootRank == self._rank
        if is_root:
            self._one_list("gather", outputs, inputs)
            self._same_size("gather", source, outputs[0])
        if self._needs_look:
            self._look("gather", source, source.nbytes, root=opts.rootRank, timeout=opts.timeout, plannable=False)
        num_bytes = source.nbytes * self._size
        with torch.inference_mode():
            sink = [landing(x) for x in outputs[0]] if is_root else []
            into = [[_carried(x) for x in sink]] if is_root else []
            self._flat("gather", num_bytes, self._gloo.gather, into, [_carried(flat(source))], opts)
            for output, arrived in zip(outputs[0] if is_root else (), sink, strict=True):
                land(output, arrived)

    def _scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> None:
        if len(outputs) != 1:
            raise TensorError(f"{self.who}: scatter takes one output, got {len(outputs)}")
        self._require_root("scatter from", opts)
        output, is_root = outputs[0], opts.rootRank == self._rank
        if is_root:
            self._one_list("scatter", inputs, outputs)
            self._same_size("scatter", output, inputs[0])
        if self._needs_look:
            self._look("scatter", output, output.nbytes, root=opts.rootRank, timeout=opts.timeout, plannable=False)
        with torch.inference_mode():
            sink = landing(output)
            parts = [[_carried(flat(x)) for x in inputs[0]]] if is_root else []
            self._flat("scatter", output.nbytes * self._size, self._gloo.scatter, [_carried(sink)], parts, opts)
            land(output, sink)

    # Checks

    def _some(self, verb: str, tensors: Any, *, may_be_sparse: bool = False) -> list[torch.Tensor]:
        """:func:`reals` of one tensor or several; TensorError for none."""
        found = reals([tensors] if isinstance(tensors, torch.Tensor) else tensors)
        if not found:
            raise TensorError(f"{self.who}: {verb} of no tensors: expected at least one")
        if not may_be_sparse:
            for x in found:
                require_dense(x)
        return found

    def _require_root(self, what: str, opts: Any) -> None:
        if not 0 <= opts.rootRank < self._size:
            raise TensorError(
                f"{self.who}: {what} root {opts.rootRank}: expected a rank of the group, 0 to {self._size - 1}"
            )

    def _one_list(self, verb: str, lists: Sequence[Tensors], singles: Tensors) -> None:
        if len(lists) != 1 or len(singles) != 1 or len(lists[0]) != self._size:
            raise TensorError(
                f"{self.who}: {verb} needs one list of {self._size} tensors and one tensor, got lists of "
                f"{[len(each) for each in lists]} and {len(singles)} tensors"
            )

    def _same_size(self, verb: str, one: torch.Tensor, many: Tensors) -> None:
        if any(x.numel() != one.numel() or x.dtype != one.dtype for x in many):
            raise TensorError(
                f"{self.who}: {verb} moves {one.numel()} elements of {one.dtype} for each rank, got tensors of "
                f"{[x.numel() for x in many]} elements, {sorted({str(x.dtype) for x in many})}"
            )


def _carried(x: torch.Tensor) -> torch.Tensor:
    """A flat tensor in a dtype that Gloo moves."""
    return x if x.dtype in MOVABLE else x.view(torch.uint8)
