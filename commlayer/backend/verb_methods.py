"""The forms of c10d's collectives: how arguments come, and from a row of the table (verbs.py) the
method that takes them.

A call that nothing has to be done for must cost no more than Gloo's own through torch's dispatcher,
which is about 3 µs. After a thread switch, and Gloo makes two in every call, Python runs from cold
caches, and every attribute costs three times what a loop would measure. So the forms that programs
call most have a direct path: plain tensors go to Gloo in the method itself, where
:class:`commlayer.backend.order.Order` says that nothing is in the way. Its conditions are written
out in each form for that reason: a function that asks them is one more entry of Python in every
call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from time import perf_counter_ns as now
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.autograd.graph import increment_version

from commlayer.backend.exchanges import EVEN, check_splits, sent_bytes, splits_of
from commlayer.backend.members import Members, Noted, Tensors
from commlayer.backend.options import make
from commlayer.backend.order import Order
from commlayer.backend.running import Calls, Refused
from commlayer.backend.tensors import real, reals

__all__ = [
    "ONE_EACH_RANK",
    "Direct",
    "Method",
    "Verb",
    "add_methods",
    "exchange",
    "in_place",
    "lists_in",
    "lists_out",
    "pair",
    "pairs",
    "rows_out",
]

ONE_EACH_RANK = -1
"""One change for each rank of the group: Gloo copies a block at a time."""
_STRIDED = torch.strided
_TENSOR = torch.Tensor
Method = Callable[..., Work]


@dataclass(frozen=True)
class Direct:
    """When and how a call goes to Gloo as it is: see the forms for what all of them ask."""

    inner: Callable[[Any], Callable[..., Work]]
    """Gloo's call, of the inner Gloo group."""
    dtypes: frozenset[torch.dtype]
    scatters: bool = False
    """For a :func:`pair`, whether ``input``, not ``output``, has a block for each rank. Its bytes
    are counted then, and it goes as it is only in one dimension, in the dtype of ``output``, while
    the caller waits."""
    fits: Callable[[torch.Tensor, Any], bool] | None = None
    """A further question to an :func:`in_place`, where nobody waits to be told: whether Gloo takes
    a tensor with these options."""
    refuses: type[Exception] = Refused
    """The error that Gloo raises for what it does not take, when it is called: nothing was sent
    then, and the call goes the long way."""


@dataclass(frozen=True)
class Verb:
    """A collective of c10d, in one of its forms."""

    names: str
    """torch's, of the methods; NCCL's of the first name is called for CUDA tensors."""
    collective: str
    """The name that it has in statistics, traces and errors."""
    form: Callable[[Verb], Method]
    options: Any
    """torch's options for it, of which one is made from whatever a call has."""
    body: Callable[..., None]
    """Runs it on CPU tensors, in the group's order: ``body(calls, *tensors, opts)``. Its docstring
    is the method's."""
    direct: Direct | None = None
    check: Callable[..., None] | None = None
    """``check(members, *tensors)`` refuses, before the call is queued, what the body could not be
    given."""
    is_rooted: bool = False
    """Whether only one rank, ``opts.rootRank``, has the list of tensors."""
    may_be_sparse: bool = False
    title: str = ""
    """The name that it has in errors about its arguments, where that is not ``collective``."""
    also: tuple[Any, ...] = ()
    """Other options of torch's that are taken."""
    changes: int = 0
    """The changes of each output of which a call on the CPU tells autograd (``Tensor._version``): a
    number, or :data:`ONE_EACH_RANK`; as many as Gloo's. A backward pass refuses a tensor that was
    saved for it and has changed since. Bodies tell of none: how a call runs must not be seen
    there."""

    @property
    def name(self) -> str:
        """The first name."""
        return self.names.split()[0]

    @property
    def task(self) -> Callable[..., None]:
        """``body``, and then what it tells autograd."""
        body, changes = self.body, self.changes
        if not changes:
            return body

        def task(calls: Calls, outputs: Any, *args: Any) -> None:
            body(calls, outputs, *args)
            written = [outputs] if isinstance(outputs, torch.Tensor) else outputs
            if written and not isinstance(written[0], torch.Tensor):
                written = [each for row in written for each in row]
            increment_version(written * (calls.members.size if changes == ONE_EACH_RANK else changes))

        return task


def _noted_lists(outputs: Any, inputs: Any, row: Verb) -> Noted:
    """Describe a call of lists of tensors, or of one list and one tensor.

    They are not checked yet: of what makes no sense nothing is noted.
    """
    try:
        dtype = _first(inputs).dtype if _has_any(inputs) else _first(outputs).dtype
        if row.is_rooted:  # only the root has the list
            return dtype, -1, -1, None
        sent, received = _num_bytes(inputs), _num_bytes(outputs)
        if isinstance(inputs, torch.Tensor):  # all_gather: a tensor comes from each rank
            return dtype, sent, received, ([_num_bytes(x) for x in outputs], None)
        if isinstance(outputs, torch.Tensor) or not _is_row(outputs) or not _is_row(inputs):
            return dtype, sent, received, None
        return dtype, sent, received, ([_num_bytes(x) for x in outputs], [_num_bytes(x) for x in inputs])
    except Exception:  # noqa: BLE001  the verb says what is wrong with them
        return None, -1, -1, None


def _num_bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()  # nbytes is not defined for sparse ones
    return sum(map(_num_bytes, tensors))


def _is_row(tensors: Any) -> bool:
    return all(isinstance(x, torch.Tensor) for x in tensors)


def _has_any(tensors: Any) -> bool:
    return isinstance(tensors, torch.Tensor) or any(map(_has_any, tensors))


def _first(tensors: Any) -> torch.Tensor:
    if isinstance(tensors, torch.Tensor):
        return tensors
    return next(_first(each) for each in tensors if _has_any(each))


def add_methods(group: type, rows: Iterable[Verb]) -> None:
    """Give ``group`` the method of each row, by all names; the first is what tracebacks and
    profiles show."""
    for row in rows:
        made: Any = row.form(row)
        made.__name__, made.__qualname__, made.__doc__ = row.name, f"{group.__name__}.{row.name}", row.body.__doc__
        made.__code__ = made.__code__.replace(co_name=row.name)
        for name in row.names.split():
            setattr(group, name, made)


class _Parts:
    """A group of the backend, as far as a form uses it."""

    _members: Members
    _order: Order
    _calls: Calls


_NEVER = Direct(attrgetter("_none"), frozenset())
"""The direct path of a row that has none: there is no tensor of these dtypes."""


def in_place(row: Verb) -> Method:
    """``tensors`` (a list, mostly of one) change in place."""
    options, collective, body = row.options, row.collective, row.task
    title, takes_as_it_is = row.title or row.collective, row.direct is not None
    direct = row.direct or _NEVER
    inner, dtypes, fits, refuses = direct.inner, direct.dtypes, direct.fits, direct.refuses

    def verb(self: _Parts, tensors: Any = None, opts: Any = None, timeout: Any = None, **named: Any) -> Work:
        order = self._order
        x: Any = tensors[0] if type(tensors) is list and len(tensors) == 1 else None
        is_plain = (
            type(x) is _TENSOR
            and x.dtype in dtypes
            and x.is_cpu
            and x.layout is _STRIDED
            and x.is_contiguous()
            and not x.is_neg()
            and not x.requires_grad
        )
        if (
            is_plain
            and order.is_direct
            and type(opts) is options
            and order.latest is None
            and not order.progress.pending
        ):
            if not opts.asyncOp:
                num_bytes, track = x.nbytes, order.track
                started = now()
                call = track.note(collective, x.dtype, num_bytes, num_bytes, opts, False, None, started)
                try:
                    work = self._calls.wait(call, num_bytes, started, inner(order.inner.gloo)(tensors, opts), opts)
                    track.done = call.number
                    return work
                except refuses:
                    track.take_back(call)
            elif fits is None or fits(x, opts):
                num_bytes = x.nbytes
                work = inner(order.inner.gloo)(tensors, opts)
                call = order.track.note(collective, x.dtype, num_bytes, num_bytes, opts, True)
                return self._calls.under_way(call, num_bytes, work, opts, tensors)
        if type(opts) is not options or not takes_as_it_is:
            tensors = named.pop("tensor", tensors)
            opts = make(type(opts) if isinstance(opts, row.also) else options, opts, timeout, named)
        if is_plain:
            return order.issue(
                opts, collective, (x.dtype, x.nbytes, x.nbytes, None), tensors, body, self._calls, tensors, opts
            )
        tensors = self._members.some(title, tensors, may_be_sparse=row.may_be_sparse)
        num_bytes = -1 if any(x.layout is not _STRIDED for x in tensors) else _num_bytes(tensors)
        noted = tensors[0].dtype, num_bytes, num_bytes, None
        if not tensors[0].is_cpu:
            return order.on_device(tensors[0]).issue(row.name, collective, noted, tensors, opts)
        return order.issue(opts, collective, noted, tensors, body, self._calls, tensors, opts)

    return verb


def _issued_pair(row: Verb) -> Method:
    """Makes what takes one tensor that goes and one that comes into the group's order, or to NCCL;
    ``splits`` of an exchange."""
    collective, body = row.collective, row.task

    def issue(
        self: _Parts, output: torch.Tensor, input: torch.Tensor, opts: Any, splits: tuple[list[int], ...] = ()
    ) -> Work:
        order = self._order
        input, output = real(input), real(output)
        noted = input.dtype, _num_bytes(input), _num_bytes(output), splits or None
        if not (input.is_cpu and output.is_cpu):
            on_device = order.on_device(output if input.is_cpu else input)
            if splits:
                check_splits(self._members, output, input, *splits)
            return on_device.issue(row.name, collective, noted, output, input, *splits, opts)
        if splits:
            order.or_say_refused(collective, check_splits, self._members, output, input, *splits)
        return order.issue(opts, collective, noted, [output], body, self._calls, output, input, *splits, opts)

    return issue


def pair(row: Verb) -> Method:
    """``input`` goes, ``output`` comes: one tensor each."""
    options, collective, body, issue = row.options, row.collective, row.task, _issued_pair(row)
    direct = row.direct or _NEVER
    inner, dtypes, scatters, refuses = direct.inner, direct.dtypes, direct.scatters, direct.refuses

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
        is_plain = (
            type(opts) is options
            and type(input) is _TENSOR is type(output)
            and input.dtype in dtypes
            and input.is_cpu
            and output.is_cpu
            and input.layout is _STRIDED is output.layout
            and input.is_contiguous()
            and output.is_contiguous()
            and not (input.is_neg() or output.is_neg() or input.requires_grad or output.requires_grad)
        )
        if (
            is_plain
            and order.is_direct
            and order.latest is None
            and not order.progress.pending
            and (
                not scatters
                or (
                    not opts.asyncOp
                    and input.dtype is output.dtype
                    and input.dim() == 1 == output.dim()
                    and input.nbytes == self._members.size * output.nbytes
                )
            )
        ):
            track, sent, received, is_async = order.track, input.nbytes, output.nbytes, opts.asyncOp
            started = now()
            call = track.note(collective, input.dtype, sent, received, opts, is_async, None, started)
            try:
                work = inner(order.inner.gloo)(output, input, opts)
            except refuses:
                track.take_back(call)
            else:
                num_bytes = sent if scatters else received
                if is_async:
                    return self._calls.under_way(call, num_bytes, work, opts, [output])
                try:
                    work = self._calls.wait(call, num_bytes, started, work, opts)
                    track.done = call.number
                    return work
                except Refused:
                    track.take_back(call)
        if is_plain:
            noted = input.dtype, input.nbytes, output.nbytes, None
            return order.issue(opts, collective, noted, [output], body, self._calls, output, input, opts)
        if type(opts) is not options:
            opts = make(options, opts, timeout, named)
        return issue(self, output, input, opts)

    return verb


def pairs(row: Verb, outputs_of: Callable[[Any], Any] = reals) -> Method:
    """``inputs`` go, ``outputs`` come: several tensors each, as one call."""
    options, collective, body = row.options, row.collective, row.task
    check = row.check

    def verb(self: _Parts, outputs: Any, inputs: Any, opts: Any = None, *, timeout: Any = None, **named: Any) -> Work:
        opts = make(options, opts, timeout, named)
        outputs, inputs = outputs_of(outputs), reals(inputs)
        noted, order = _noted_lists(outputs, inputs, row), self._order
        if inputs and not inputs[0].is_cpu:
            return order.on_device(inputs[0]).issue(row.name, collective, noted, outputs, inputs, opts)
        if check is not None:
            check(self._members, outputs, inputs)
        return order.issue(opts, collective, noted, outputs, body, self._calls, outputs, inputs, opts)

    return verb


def _lists(lists: Iterable[Tensors]) -> list[list[torch.Tensor]]:
    return [reals(each) for each in lists]


def lists_out(row: Verb) -> Method:
    """``inputs`` is one tensor, ``outputs`` a list of one for each rank, in a list; or both without
    that list around them."""
    return _one_list(row, is_out=True)


def lists_in(row: Verb) -> Method:
    """``outputs`` is one tensor, ``inputs`` a list of one for each rank, in a list; or both without
    that list around them."""
    return _one_list(row, is_out=False)


def _one_list(row: Verb, *, is_out: bool) -> Method:
    options, collective, body = row.options, row.collective, row.task
    is_rooted = row.is_rooted

    def verb(self: _Parts, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, **named: Any) -> Work:
        opts = make(options, opts, timeout, named)
        singles, lists = (inputs, outputs) if is_out else (outputs, inputs)
        if isinstance(singles, torch.Tensor):
            singles, lists = [singles], [lists] if not is_rooted or lists else []
        singles, lists = self._members.some(collective, singles), _lists(lists)
        outputs, inputs = (lists, singles) if is_out else (singles, lists)
        order = self._order
        if not singles[0].is_cpu:
            noted = _noted_lists(outputs, inputs, row)
            return order.on_device(singles[0]).issue(row.name, collective, noted, outputs, inputs, opts)
        if not is_rooted:
            self._members.require_one_list(collective, lists, singles)
            outputs, inputs = outputs[0], inputs[0]
        filled = singles if not is_out else lists[0] if lists else []
        noted = _noted_lists(outputs, inputs, row)
        return order.issue(opts, collective, noted, filled, body, self._calls, outputs, inputs, opts)

    return verb


rows_out = partial(pairs, outputs_of=_lists)
"""The form in which ``inputs`` are several tensors, and ``outputs`` for each rank a list of as
many."""


def exchange(row: Verb) -> Method:
    """``input`` goes and ``output`` comes in parts, by splits: a whole number for each rank, in
    whatever holds such; empty: even.

    Also direct where no call of this kind is ever planned; then only while the caller waits, and
    the queue keeps the order.
    """
    options, collective, issue = row.options, row.collective, _issued_pair(row)
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
            and not (input.is_neg() or output.is_neg() or input.requires_grad or output.requires_grad)
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
            if order.may_pass is None or order.may_pass():
                track, is_async = order.track, opts.asyncOp
                splits = output_split_sizes, input_split_sizes
                started = now()
                call = track.note(collective, input.dtype, num_bytes, output.nbytes, opts, is_async, splits, started)
                work = inner(order.inner.gloo)(output, input, output_split_sizes, input_split_sizes, opts)
                if is_async:
                    return calls.under_way(call, num_bytes, work, opts, [output], sent)
                work = calls.wait(call, num_bytes, started, work, opts, sent)
                track.done = call.number
                return work
        if type(opts) is not options:
            opts = make(options, opts, timeout, named)
        return issue(self, output, input, opts, (output_split_sizes, input_split_sizes))

    return verb
