"""Collectives that reduce: all_reduce, reduce, reduce_scatter, in all of c10d's forms.

What is beyond Gloo: the dtypes and operations of :mod:`commlayer.backend.arithmetic`, outputs checked by their number of
elements, lists of unequal tensors in reduce_scatter, tensors that are not contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    Work,
)

from commlayer.backend.arithmetic import AVG, FLOATS, NATIVE, PLAN_NAMES, carrier, reduce_rows
from commlayer.backend.base import Refused, now
from commlayer.backend.exchanges import Exchanges
from commlayer.backend.moves import Tensors
from commlayer.backend.options import like, make, with_op
from commlayer.backend.tensors import flat, join, land, real, reals, require_room, spread
from commlayer.failures.waits import reduce_scatter
from commlayer.profiles.errors import TensorError
from commlayer.scheduler.plan import Plan

__all__ = ["Reductions"]

_STRIDED = torch.strided
_TENSOR = torch.Tensor


class Reductions(Exchanges):
    """The verbs that reduce."""

    def allreduce(self, tensors: Any = None, opts: Any = None, timeout: Any = None, **named: Any) -> Work:
        """Every element becomes its reduction over all ranks, the same bits on every rank. In place."""
        if self._is_direct and type(opts) is AllreduceOptions and type(tensors) is list and len(tensors) == 1:
            tensor = tensors[0]
            # Asking for the operation costs as much as all this together. Gloo has those that floats commonly get, and says
            # before it sends anything where it has not.
            if self._is_free_for(tensor, FLOATS):
                if not opts.asyncOp:
                    try:
                        return self._await(
                            "all_reduce", tensor.nbytes, now(), self._gloo.allreduce(tensors, opts), opts
                        )
                    except Refused:
                        pass
                elif self._is_native(tensor, opts):
                    work = self._gloo.allreduce(tensors, opts)
                    return self._under_way("all_reduce", tensor.nbytes, work, opts, tensors)
        if type(opts) is not AllreduceOptions:
            tensors = named.pop("tensor", tensors)
            opts = make(AllreduceOptions, opts, timeout, named)
        tensors = self._some("all_reduce", tensors, may_be_sparse=True)
        if not tensors[0].is_cpu:
            return self._on_device(tensors[0]).allreduce(tensors, opts)
        return self._issue(opts, "all_reduce", tensors, self._all_reduce, tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None, timeout: Any = None, **named: Any) -> Work:
        """:meth:`allreduce` of all ``tensors`` (one dtype), as one call."""
        kind = AllreduceOptions if isinstance(opts, AllreduceOptions) else AllreduceCoalescedOptions
        opts = make(kind, opts, timeout, named)
        tensors = self._some("all_reduce_coalesced", tensors, may_be_sparse=True)
        if not tensors[0].is_cpu:
            return self._on_device(tensors[0]).allreduce_coalesced(tensors, opts)
        return self._issue(opts, "all_reduce", list(tensors), self._all_reduce_joined, tensors, opts)

    def reduce(self, tensors: Any = None, opts: Any = None, timeout: Any = None, **named: Any) -> Work:
        """As :meth:`allreduce`, but only rank ``opts.rootRank`` gets the result; the others' tensors are undefined after it."""
        tensors = named.pop("tensor", tensors)
        opts = make(ReduceOptions, opts, timeout, named)
        tensors = self._some("reduce", tensors)
        if not tensors[0].is_cpu:
            return self._on_device(tensors[0]).reduce(tensors, opts)
        return self._issue(opts, "reduce", tensors, self._reduce, tensors, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, **named: Any) -> Work:
        """``input`` holds n times the elements of ``output``, in any shape; rank k gets the reduction of block k."""
        if (
            self._is_direct
            and type(opts) is ReduceScatterOptions
            and not opts.asyncOp
            and self._is_free_for_both(output, input, FLOATS)
            and input.dtype is output.dtype
            and input.dim() == 1 == output.dim()
            and input.nbytes == self._size * output.nbytes
        ):
            try:  # see allreduce
                work = reduce_scatter(self._gloo, output, input, opts)
                return self._await("reduce_scatter", input.nbytes, now(), work, opts)
            except Refused:
                pass
        if type(opts) is not ReduceScatterOptions:
            opts = make(ReduceScatterOptions, opts, named.pop("timeout", None), named)
        input, output = real(input), real(output)
        if not input.is_cpu:
            return self._on_device(input).reduce_scatter_single(output, input, opts)
        return self._issue(opts, "reduce_scatter", [output], self._reduce_scatter, output, input, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, **named: Any
    ) -> Work:
        """:meth:`reduce_scatter_single` of each pair, as one call."""
        opts = make(ReduceScatterOptions, opts, named.pop("timeout", None), named)
        outputs, inputs = reals(outputs), reals(inputs)
        if inputs and not inputs[0].is_cpu:
            return self._on_device(inputs[0]).reduce_scatter_single_coalesced(outputs, inputs, opts)
        return self._issue(opts, "reduce_scatter", list(outputs), self._reduce_scatter_each, outputs, inputs, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, **named: Any) -> Work:
        """``inputs[0]`` is a list of n tensors; rank k gets the reduction of the k-th. They may differ in size."""
        opts = make(ReduceScatterOptions, opts, timeout, named)
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        outputs, inputs = self._some("reduce_scatter", outputs), [reals(row) for row in inputs]
        if not outputs[0].is_cpu:
            return self._on_device(outputs[0]).reduce_scatter(outputs, inputs, opts)
        self._one_list("reduce_scatter", inputs, outputs)
        return self._issue(opts, "reduce_scatter", outputs, self._reduce_scatter_list, outputs[0], inputs[0], opts)

    # c10d's other names

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # How: these run in the group's order

    def _is_native(self, tensor: torch.Tensor, opts: Any) -> bool:
        return tensor.dtype in NATIVE[opts.reduceOp.op]

    def _all_reduce(self, tensors: Tensors, opts: Any) -> None:
        tensor, op = tensors[0], opts.reduceOp.op
        if (
            len(tensors) > 1 or tensor.layout is not _STRIDED
        ):  # sparse, or a tensor for each of a rank's devices: Gloo's own
            self._all_reduce_unusual(tensors, op, opts)
            return
        if tensor.dtype not in NATIVE[op] or not tensor.is_contiguous():
            with torch.inference_mode():
                self._all_reduce_carried(tensor, opts)
            return
        num_bytes = tensor.nbytes
        plan = self._look("all_reduce", tensor, num_bytes, op=op, timeout=opts.timeout) if self._needs_look else None
        if plan is None:
            self._flat("all_reduce", num_bytes, self._gloo.allreduce, tensors, opts)
        else:
            self._reduce_by_plan(plan, "all_reduce", num_bytes, flat(tensor), flat(tensor), op, opts)

    def _all_reduce_unusual(self, tensors: Tensors, op: ReduceOp.RedOpType, opts: Any) -> None:
        num_bytes = sum(x._nnz() * x.element_size() if x.is_sparse else x.nbytes for x in tensors)
        if self._needs_look:  # the number of non-zero elements differs between ranks
            self._look("all_reduce", None, 0, op=op, timeout=opts.timeout, plannable=False)
        self._flat("all_reduce", num_bytes, self._gloo.allreduce, tensors, opts)

    def _all_reduce_carried(self, tensor: torch.Tensor, opts: Any) -> None:
        how = carrier(opts.reduceOp, tensor.dtype, self._size)
        require_room(tensor)
        moved = how.load(flat(tensor))
        self._all_reduce([moved.view(-1)], with_op(AllreduceOptions, opts, how.op))
        land(tensor, how.store(moved).view(-1))

    def _all_reduce_joined(self, tensors: Tensors, opts: Any) -> None:
        if any(x.dtype != tensors[0].dtype for x in tensors):
            raise TensorError(
                f"{self.who}: all_reduce_coalesced needs one dtype, got {sorted({str(x.dtype) for x in tensors})}"
            )
        if any(x.layout is not _STRIDED for x in tensors):
            options = with_op(AllreduceCoalescedOptions, opts, opts.reduceOp)
            self._flat("all_reduce", 0, self._gloo.allreduce_coalesced, tensors, options)
            return
        with torch.inference_mode():
            if len(tensors) == 1:
                self._all_reduce(tensors, _plain(opts))
                return
            joined = join(tensors)
            self._all_reduce([joined], _plain(opts))
            spread(joined, tensors)

    def _reduce(self, tensors: Tensors, opts: Any) -> None:
        tensor, op = tensors[0], opts.reduceOp.op
        if len(tensors) != 1:
            raise TensorError(f"{self.who}: reduce takes one tensor, got {len(tensors)}")
        self._require_root("reduce to", opts)
        if tensor.dtype not in NATIVE[op] or not tensor.is_contiguous():
            with torch.inference_mode():
                how = carrier(opts.reduceOp, tensor.dtype, self._size)
                moved = how.load(flat(tensor))
                self._reduce([moved.view(-1)], with_op(ReduceOptions, opts, how.op))
                if opts.rootRank == self._rank:
                    land(tensor, how.store(moved).view(-1))
            return
        if self._needs_look:
            self._look(
                "reduce", tensor, tensor.nbytes, op=op, root=opts.rootRank, timeout=opts.timeout, plannable=False
            )
        self._flat("reduce", tensor.nbytes, self._gloo.reduce, tensors, opts)

    def _reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> None:
        if input.numel() != self._size * output.numel() or output.dtype != input.dtype:
            raise TensorError(
                f"{self.who}: reduce_scatter of {input.numel()} elements of {input.dtype} over {self._size} ranks needs "
                f"{self._size} times the elements of the output, which has {output.numel()} of {output.dtype}"
            )
        op = opts.reduceOp.op
        if input.dtype not in NATIVE[op] or not (input.is_contiguous() and output.is_contiguous()):
            with torch.inference_mode():
                self._reduce_scatter_carried(output, input, opts)
            return
        num_bytes = input.nbytes
        plan = self._look("reduce_scatter", input, num_bytes, op=op, timeout=opts.timeout) if self._needs_look else None
        output, input = output.detach().view(-1), input.detach().view(-1)
        if plan is None:
            self._flat("reduce_scatter", num_bytes, reduce_scatter, self._gloo, output, input, opts)
        else:
            self._reduce_by_plan(plan, "reduce_scatter", num_bytes, input, output, op, opts)

    def _reduce_scatter_carried(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> None:
        how = carrier(opts.reduceOp, input.dtype, self._size)
        moved = how.load(flat(input))
        part = torch.empty_like(moved.view(self._size, -1)[0]) if moved.numel() else moved
        self._reduce_scatter(part.view(-1), moved.view(-1), with_op(ReduceScatterOptions, opts, how.op))
        shape = (-1, *moved.shape[1:])  # complex numbers are pairs
        land(output, how.store(part.view(shape) if part.numel() else moved).view(-1))

    def _reduce_scatter_each(self, outputs: Tensors, inputs: Tensors, opts: Any) -> None:
        if len(outputs) != len(inputs):
            raise TensorError(
                f"{self.who}: reduce_scatter of {len(inputs)} tensors into {len(outputs)}: expected as many"
            )
        for output, part in zip(outputs, inputs, strict=True):
            self._reduce_scatter(output, part, opts)

    def _reduce_scatter_list(self, output: torch.Tensor, inputs: Tensors, opts: Any) -> None:
        sizes = [x.numel() for x in inputs]
        if sizes[self._rank] != output.numel() or any(x.dtype != output.dtype for x in inputs):
            raise TensorError(
                f"{self.who}: reduce_scatter into {output.numel()} elements of {output.dtype} needs as many in input "
                f"{self._rank}, and the same dtype in all; got inputs of {sizes} elements, "
                f"{sorted({str(x.dtype) for x in inputs})}"
            )
        with torch.inference_mode():
            if len(set(sizes)) == 1:
                self._reduce_scatter(output, join(inputs), opts)
            else:
                self._reduce_scatter_uneven(output, inputs, sizes, opts)

    def _reduce_scatter_uneven(self, output: torch.Tensor, inputs: Tensors, sizes: list[int], opts: Any) -> None:
        """Every block straight to the rank that wants it, which reduces them in rank order."""
        op = opts.reduceOp.op
        num_bytes = sum(sizes) * output.element_size()
        if self._needs_look:
            self._look(
                "reduce_scatter", output, num_bytes, op=op, sizes=tuple(sizes), timeout=opts.timeout, plannable=False
            )
        how = carrier(opts.reduceOp, output.dtype, self._size)
        moved = how.load(join(inputs))
        width = moved[:1].nbytes  # of one element as it travels
        arrived = torch.empty((self._size, output.numel(), *moved.shape[1:]), dtype=moved.dtype)
        source, target = moved.view(-1).view(torch.uint8), arrived.view(-1).view(torch.uint8)
        sent, received = [size * width for size in sizes], [output.numel() * width] * self._size
        options = like(AllToAllOptions, opts)
        self._flat("reduce_scatter", num_bytes, self._gloo.alltoall_base, target, source, received, sent, options)
        land(output, how.store(reduce_rows(arrived, how.op)).view(-1))

    def _reduce_by_plan(
        self,
        plan: Plan,
        collective: str,
        num_bytes: int,
        source: torch.Tensor,
        target: torch.Tensor,
        op: ReduceOp.RedOpType,
        opts: Any,
    ) -> None:
        self._run_plan(plan, collective, num_bytes, source, target, opts, op=PLAN_NAMES[op])
        if op == AVG:
            with torch.inference_mode():
                target.div_(self._size)


def _plain(opts: Any) -> AllreduceOptions:
    """AllreduceOptions of the same content: Gloo's two calls take different ones."""
    return opts if type(opts) is AllreduceOptions else with_op(AllreduceOptions, opts, opts.reduceOp)
