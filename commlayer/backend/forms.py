"""The forms of c10d's collectives: how arguments come, and from a row of the table (verbs.py) the method that takes them.

A call that nothing has to be done for must cost no more than Gloo's own through torch's dispatcher, which is about 3 µs.
After a thread switch, and Gloo makes two in every call, Python runs from cold caches, and every attribute costs three times
what a loop would measure. So the forms that programs call most have a direct path: plain tensors go to Gloo in the method
itself, where :class:`commlayer.backend.order.Order` says that nothing is in the way. Its conditions are written out in each
form for that reason: a function that asks them is one more entry of Python in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from time import perf_counter_ns as now
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from commlayer.backend.calls import Calls
from commlayer.backend.exchanges import EVEN, check_splits, sent_bytes, splits_of
from commlayer.backend.failing import Refused
from commlayer.backend.members import Members
from commlayer.backend.options import make
from commlayer.backend.order import Order
from commlayer.backend.tensors import real, reals

__all__ = [
    "Direct",
    "Method",
    "Verb",
    "exchange",
    "in_place",
    "lists_in",
    "lists_out",
    "method",
    "pair",
    "pairs",
    "rows_out",
]

_STRIDED = torch.strided
_TENSOR = torch.Tensor
Method = Callable[..., Work]


@dataclass(frozen=True)
class Direct:
    """When and how a call goes to Gloo as it is: see the forms for what all of them ask."""

    inner: Callable[[Any], Callable[..., Work]]
    """Gloo's call, of the inner Gloo group."""
    dtypes: frozenset[torch.dtype]
    counts_input: bool = False
    """Whether the bytes of a call are those of its input, not of its output."""
    fits: Callable[..., Any] | None = None
    """What is asked besides, of the members and the arguments of the inner call."""
    refuses: type[Exception] = Refused
    """What Gloo raises for what it does not take, when it is called: nothing was sent then, and the call goes the long way."""


@dataclass(frozen=True)
class Verb:
    """A collective of c10d, in one of its forms."""

    name: str
    """torch's, of the method; NCCL's is called by it for CUDA tensors."""
    collective: str
    """What statistics, traces and errors call it."""
    form: Callable[[Verb], Method]
    options: Any
    """torch's options for it, of which one is made from whatever a call has."""
    body: Callable[..., None]
    """Runs it on CPU tensors, in the group's order: ``body(calls, *tensors, opts)``."""
    does: str
    """Who sends what, and what changes in place."""
    title: str = ""
    """What errors about its arguments call it, where that is not ``collective``."""
    may_be_sparse: bool = False
    check: Callable[..., None] | None = None
    """``check(members, *tensors)`` refuses, before the call is queued, what the body could not be given."""
    direct: Direct | None = None
    also: tuple[Any, ...] = ()
    """Other options of torch's that are taken."""
    is_rooted: bool = False
    """Whether only one rank, ``opts.rootRank``, has the list of tensors."""


def method(row: Verb) -> Method:
    """The method of a row, with its name in tracebacks and profiles."""
    made: Any = row.form(row)
    made.__name__, made.__qualname__, made.__doc__ = row.name, f"CommlayerGroup.{row.name}", row.does
    made.__code__ = made.__code__.replace(co_name=row.name)
    return made  # type: ignore[no-any-return]


class _Parts:
    """What a form uses of a group."""

    _members: Members
    _order: Order
    _calls: Calls


_NEVER = Direct(attrgetter("_none"), frozenset())
"""Of a row without a direct path: there is no tensor of these dtypes."""


def in_place(row: Verb) -> Method:
    """``tensors`` (a list, mostly of one) change in place."""
    options, collective, body, title = row.options, row.collective, row.body, row.title or row.collective
    direct = row.direct or _NEVER
    inner, dtypes, fits, refuses = direct.inner, direct.dtypes, direct.fits, direct.refuses
    takes_as_it_is = row.direct is not None

    def verb(self: _Parts, tensors: Any = None, opts: Any = None, timeout: Any = None, **named: Any) -> Work:
        order = self._order
        if order.is_direct and type(opts) is options and type(tensors) is list and len(tensors) == 1:
            x = tensors[0]
            if (
                type(x) is _TENSOR
                and x.dtype in dtypes
                and x.is_cpu
                and x.layout is _STRIDED
                and x.is_contiguous()
                and not x.requires_grad
                and order.latest is None
                and not order.progress.pending
            ):
                if not opts.asyncOp:
                    try:
                        started = now()
                        work = inner(order.inner.gloo)(tensors, opts)
                        return self._calls.wait(collective, x.nbytes, started, work, opts)
                    except refuses:
                        pass
                elif fits is None or fits(x, opts):
                    work = inner(order.inner.gloo)(tensors, opts)
                    return self._calls.under_way(collective, x.nbytes, work, opts, tensors)
        if type(opts) is not options or not takes_as_it_is:
            tensors = named.pop("tensor", tensors)
            opts = make(type(opts) if isinstance(opts, row.also) else options, opts, timeout, named)
        tensors = self._members.some(title, tensors, may_be_sparse=row.may_be_sparse)
        if not tensors[0].is_cpu:
            return getattr(order.on_device(tensors[0]), row.name)(tensors, opts)  # type: ignore[no-any-return]
        return order.issue(opts, collective, tensors, body, self._calls, tensors, opts)

    return verb


def pair(row: Verb) -> Method:
    """``input`` goes, ``output`` comes: one tensor each."""
    options, collective, body = row.options, row.collective, row.body
    direct = row.direct or _NEVER
    inner, dtypes, fits, refuses = direct.inner, direct.dtypes, direct.fits, direct.refuses
    counts_input = direct.counts_input

    def verb(
        self: _Parts,
        output: torch.Tensor,
        input: torch.Tensor,
        opts: Any = None,
        *,
        timeout: Any = None,
        **named: Any,
    ) -> Work:
        order = self._order
        if (
            order.is_direct
            and type(opts) is options
            and type(input) is _TENSOR is type(output)
            and input.dtype in dtypes
            and input.is_cpu
            and input.is_contiguous()
            and output.is_contiguous()
            and not (output.requires_grad or input.requires_grad)
            and order.latest is None
            and not order.progress.pending
            and (fits is None or fits(self._members, output, input, opts))
        ):
            started = now()
            try:
                work = inner(order.inner.gloo)(output, input, opts)
            except refuses:
                pass
            else:
                num_bytes = input.nbytes if counts_input else output.nbytes
                if opts.asyncOp:
                    return self._calls.under_way(collective, num_bytes, work, opts, [output])
                try:
                    return self._calls.wait(collective, num_bytes, started, work, opts)
                except Refused:
                    pass
        if type(opts) is not options:
            opts = make(options, opts, timeout, named)
        input, output = real(input), real(output)
        if not input.is_cpu:
            return getattr(order.on_device(input), row.name)(output, input, opts)  # type: ignore[no-any-return]
        return order.issue(opts, collective, [output], body, self._calls, output, input, opts)

    return verb


def pairs(row: Verb) -> Method:
    """``inputs`` go, ``outputs`` come: several tensors each, as one call."""
    options, collective, body, check = row.options, row.collective, row.body, row.check

    def verb(self: _Parts, outputs: Any, inputs: Any, opts: Any = None, *, timeout: Any = None, **named: Any) -> Work:
        opts = make(options, opts, timeout, named)
        outputs, inputs = reals(outputs), reals(inputs)
        if inputs and not inputs[0].is_cpu:
            return getattr(self._order.on_device(inputs[0]), row.name)(outputs, inputs, opts)  # type: ignore[no-any-return]
        if check is not None:
            check(self._members, outputs, inputs)
        return self._order.issue(opts, collective, outputs, body, self._calls, outputs, inputs, opts)

    return verb


def lists_out(row: Verb) -> Method:
    """``inputs`` is one tensor, ``outputs`` a list of one for each rank, in a list; or both without that list around them."""
    options, collective, body, is_rooted = row.options, row.collective, row.body, row.is_rooted

    def verb(self: _Parts, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, **named: Any) -> Work:
        opts = make(options, opts, timeout, named)
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs] if outputs or not is_rooted else [], [inputs]
        outputs, inputs = [reals(each) for each in outputs], self._members.some(collective, inputs)
        if not inputs[0].is_cpu:
            return getattr(self._order.on_device(inputs[0]), row.name)(outputs, inputs, opts)  # type: ignore[no-any-return]
        if is_rooted:
            filled = outputs[0] if outputs else []
            return self._order.issue(opts, collective, filled, body, self._calls, outputs, inputs, opts)
        self._members.require_one_list(collective, outputs, inputs)
        return self._order.issue(opts, collective, outputs[0], body, self._calls, outputs[0], inputs[0], opts)

    return verb


def rows_out(row: Verb) -> Method:
    """``inputs`` are several tensors, ``outputs`` for each rank a list of as many."""
    options, collective, body, check = row.options, row.collective, row.body, row.check

    def verb(self: _Parts, outputs: Any, inputs: Any, opts: Any = None, *, timeout: Any = None, **named: Any) -> Work:
        opts = make(options, opts, timeout, named)
        outputs, inputs = [reals(each) for each in outputs], reals(inputs)
        if inputs and not inputs[0].is_cpu:
            return getattr(self._order.on_device(inputs[0]), row.name)(outputs, inputs, opts)  # type: ignore[no-any-return]
        if check is not None:
            check(self._members, outputs, inputs)
        return self._order.issue(opts, collective, outputs, body, self._calls, outputs, inputs, opts)

    return verb


def lists_in(row: Verb) -> Method:
    """``outputs`` is one tensor, ``inputs`` a list of one for each rank, in a list; or both without that list around them."""
    options, collective, body, is_rooted = row.options, row.collective, row.body, row.is_rooted

    def verb(self: _Parts, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, **named: Any) -> Work:
        opts = make(options, opts, timeout, named)
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs] if inputs or not is_rooted else []
        outputs, inputs = self._members.some(collective, outputs), [reals(each) for each in inputs]
        if not outputs[0].is_cpu:
            return getattr(self._order.on_device(outputs[0]), row.name)(outputs, inputs, opts)  # type: ignore[no-any-return]
        if is_rooted:
            return self._order.issue(opts, collective, outputs, body, self._calls, outputs, inputs, opts)
        self._members.require_one_list(collective, inputs, outputs)
        return self._order.issue(opts, collective, outputs, body, self._calls, outputs[0], inputs[0], opts)

    return verb


def exchange(row: Verb) -> Method:
    """``input`` goes and ``output`` comes in parts, by splits: a whole number for each rank, in whatever holds such; empty: even.

    Also direct where no call of this kind is ever planned; then only while the caller waits, and the queue keeps the order.
    """
    options, collective, body = row.options, row.collective, row.body
    direct = row.direct or _NEVER
    inner, dtypes = direct.inner, direct.dtypes

    def verb(
        self: _Parts,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = (),
        input_split_sizes: Any = (),
        opts: Any = None,
        *,
        timeout: Any = None,
        **named: Any,
    ) -> Work:
        order, calls = self._order, self._calls
        # An empty list is no array, whose truth cannot be asked.
        if type(output_split_sizes) is not list or output_split_sizes:
            output_split_sizes = splits_of(order, "output", output_split_sizes)
        if type(input_split_sizes) is not list or input_split_sizes:
            input_split_sizes = splits_of(order, "input", input_split_sizes)
        if (
            (order.is_direct or (calls.never_plans_exchanges and not order.is_watched))
            and type(opts) is options
            and (order.is_direct or not opts.asyncOp)
            and type(input) is _TENSOR is type(output)
            and input.dtype in dtypes
            and input.is_cpu
            and input.is_contiguous()
            and output.is_contiguous()
            and not (output.requires_grad or input.requires_grad)
            and order.latest is None
            and not order.progress.pending
        ):
            num_bytes, sent = input.nbytes, EVEN
            if (
                input_split_sizes
                or output_split_sizes
                or output.nbytes != num_bytes
                or output.dtype is not input.dtype
                or not input.dim()
                or input.size(0) % self._members.size
            ):  # Gloo checks late, and not whether any is negative
                check_splits(self._members, output, input, output_split_sizes, input_split_sizes)
                sent = sent_bytes(self._members, num_bytes, input_split_sizes)
            started = now()
            work = inner(order.inner.gloo)(output, input, output_split_sizes, input_split_sizes, opts)
            if opts.asyncOp:
                return calls.under_way(collective, num_bytes, work, opts, [output], *sent)
            return calls.wait(collective, num_bytes, started, work, opts, *sent)
        if type(opts) is not options:
            opts = make(options, opts, timeout, named)
        input, output = real(input), real(output)
        splits = output_split_sizes, input_split_sizes
        if not input.is_cpu:
            return getattr(order.on_device(input), row.name)(output, input, *splits, opts)  # type: ignore[no-any-return]
        order.or_say_refused(collective, check_splits, self._members, output, input, *splits)
        return order.issue(opts, collective, [output], body, calls, output, input, *splits, opts)

    return verb
