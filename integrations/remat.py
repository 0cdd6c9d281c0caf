"""Selective activation rematerialisation: what is cheap to make again is not kept for the backward pass, but made there.

MegaScale-MoE, section 4.1 and appendix A.2. A layer says of a tensor how it can be made again::

    with Rematerialise():
        normed = norm(x)
        recomputable(normed, lambda: norm(x), inputs=(x,))
        …

Whatever autograd would save of ``normed`` from then on, a view too, it saves as that promise, and the first gradient that
needs it has it made, once for all that do. Outside of ``with`` the call does nothing.

A recomputation that communicates must run on all ranks of its group, and as often: autograd may have saved something on one
rank and nothing on another, which has no rows. So it is started by a hook that every rank has (:meth:`Promise.start`), not by
the first that needs it.

Rejected: ``torch.utils.checkpoint``, whose unit is a function of which everything is done again, the products of the experts
too; and its selective form, which decides by operator, so it cannot tell the product to keep from the one to make again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch

from commlayer.profiles.errors import InternalError, UsageError

__all__ = [
    "Later",
    "Promise",
    "Rematerialise",
    "is_rematerialising",
    "promise_of",
    "recomputable",
    "recomputable_from",
]


class Later(Protocol):
    """A tensor under way, such as :class:`commlayer.collectives.Pending`."""

    def wait(self) -> torch.Tensor:
        """Return it when it may be used."""


Make = Callable[..., "torch.Tensor | Later"]
"""The type of functions that make a tensor again: of no arguments, or of the source."""


class Promise:
    """The promise that a tensor can be made again. A backward pass takes it as often as it was saved or is another's source."""

    def __init__(
        self, tensor: torch.Tensor, make: Make, source: Promise | None, inputs: Sequence[torch.Tensor], forget: Any
    ) -> None:
        self._make, self._source = make, source
        self._inputs = [(tensor_read.detach(), tensor_read._version) for tensor_read in inputs]
        self._original = weakref.ref(tensor, forget)
        self._version, self._shape, self.offset = tensor._version, tensor.shape, tensor.storage_offset()
        self._made: torch.Tensor | Later | None = None
        self.num_uses = self._num_taken = 0  # uses: by who takes it in the backward pass
        if source is not None:
            source.num_uses += 1

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in the memory of the promised one, which is still there and unchanged."""
        original = self._original()
        return original is not None and _key(original) == _key(tensor) and original._version == self._version

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is all of the promised one, in another shape perhaps."""
        is_whole = tensor.numel() == self._shape.numel() and tensor.storage_offset() == self.offset
        return is_whole and tensor.is_contiguous() and self.covers(tensor)

    def start(self) -> None:
        """Make the tensor anew: for a recomputation that communicates, once in each backward pass, on all ranks."""
        if any(tensor._version != version for tensor, version in self._inputs):
            raise UsageError(
                "a tensor that a recomputation needs was changed in place after the forward pass: add out of place there, or "
                "leave Rematerialise out"
            )
        with torch.no_grad():
            self._made = self._make() if self._source is None else self._make(self._source.take())
        self._num_taken = 0

    def take(self) -> torch.Tensor:
        """Return the tensor, for one use."""
        if self._made is None:
            self.start()
        made = self._made
        if not isinstance(made, torch.Tensor):
            assert made is not None  # start() has seen to it
            with torch.no_grad():
                made = made.wait()
        if made.shape != self._shape:
            raise InternalError(f"a recomputation gave {list(made.shape)} for {list(self._shape)}")
        self._num_taken += 1
        self._made = made if self._num_taken < self.num_uses else None
        return made.contiguous()


class _Saved:
    """In place of a saved tensor: which part of a promised one it is."""

    def __init__(self, promise: Promise, tensor: torch.Tensor) -> None:
        promise.num_uses += 1
        self._promise = promise
        self._size, self._stride = tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset() - promise.offset

    def get(self) -> torch.Tensor:
        return self._promise.take().as_strided(self._size, self._stride, self._offset)


class _Kept:
    """A saved tensor, with torch's own check that nobody has changed it, which hooks switch off."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version  # itself, it would hold what saved it

    def get(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise UsageError(
                "a tensor that the backward pass needs was changed in place: it is at version "
                f"{self._tensor._version}, expected {self._version}; work out of place there"
            )
        return self._tensor


class _Entered(threading.local):
    """The blocks entered on this thread, the innermost last: as torch's own hooks."""

    def __init__(self) -> None:
        self.stack: list[Rematerialise] = []


_entered = _Entered()


class Rematerialise:
    """A context in which :func:`recomputable` tensors are not saved for the backward pass.

    ``kept_bytes`` counts what autograd saves all the same, each storage once, parameters not; ``promised_bytes`` what it does
    not. ``is_on=False`` only counts: for comparison. Each is entered once (UsageError).
    """

    def __init__(self, *, is_on: bool = True) -> None:
        self.is_on = is_on
        self._promises: dict[int, Promise] = {}
        self._kept: dict[int, int] = {}
        self._promised: dict[int, int] = {}
        self._hooks: Any = None

    @property
    def kept_bytes(self) -> int:
        return sum(self._kept.values())

    @property
    def promised_bytes(self) -> int:
        return sum(self._promised.values())

    def __enter__(self) -> Rematerialise:
        if self._hooks is not None:
            raise UsageError("this Rematerialise was entered before: make another")
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.get())
        self._hooks.__enter__()
        _entered.stack.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _entered.stack.remove(self)
        self._hooks.__exit__(kind, error, trace)
        self._promises.clear()  # those that are needed live in what was saved

    def promise(
        self, tensor: torch.Tensor, make: Make, source: Promise | None, inputs: Sequence[torch.Tensor]
    ) -> Promise | None:
        """Make a promise in this context; see :func:`recomputable`."""
        if not self.is_on or not torch.is_grad_enabled() or not tensor.is_contiguous():
            return None
        key, promises = _key(tensor), weakref.ref(self)

        def forget(_: object) -> None:  # its memory is somebody else's now
            owner = promises()
            if owner is not None and owner._promises.get(key) is own():
                owner._promises.pop(key, None)

        promise = Promise(tensor, make, source, inputs, forget)
        own = weakref.ref(promise)
        if tensor.numel():  # what is empty has no memory to be known by
            self._promises[key] = promise
        return promise

    def find(self, tensor: torch.Tensor) -> Promise | None:
        """The promise of the memory in which ``tensor`` lies."""
        promise = self._promises.get(_key(tensor)) if tensor.numel() else None
        return promise if promise is not None and promise.covers(tensor) else None

    def _pack(self, tensor: torch.Tensor) -> _Kept | _Saved:
        key, size = _key(tensor), tensor.untyped_storage().nbytes()
        promise = self.find(tensor)
        if promise is not None:
            self._promised[key] = size
            return _Saved(promise, tensor)
        if not isinstance(tensor, torch.nn.Parameter) and not isinstance(tensor._base, torch.nn.Parameter):
            self._kept[key] = size
        return _Kept(tensor)


def recomputable(
    tensor: torch.Tensor, make: Make, source: Promise | None = None, *, inputs: Sequence[torch.Tensor] = ()
) -> Promise | None:
    """Promise that ``make()`` gives ``tensor`` again, bit for bit, in the backward pass.

    ``make`` runs without autograd, and must hold neither ``tensor`` nor what is promised itself, which would be kept then:
    it gets the latter as its argument, where ``source`` is its promise. It may return what is under way, and has ``wait()``.
    ``inputs``: what else it reads, so that a change in place is noticed (UsageError in the backward pass).

    Returns the promise; None where nothing was promised. Where ``make`` communicates, have a hook of the result's gradient call
    its :meth:`~Promise.start`.
    """
    return _entered.stack[-1].promise(tensor, make, source, inputs) if _entered.stack else None


def recomputable_from(
    x: torch.Tensor, tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor | Later]
) -> Promise | None:
    """Promise that ``make(x)`` gives ``tensor`` again. ``x`` is made again itself where it is all of what was promised
    before, in another shape perhaps; else it is kept. As :func:`recomputable`.
    """
    source = promise_of(x)
    if source is not None:
        return recomputable(tensor, make, source)
    detached = x.detach()
    return recomputable(tensor, lambda: make(detached), inputs=(detached,))


def is_rematerialising() -> bool:
    """Tell whether this thread is in a :class:`Rematerialise` that saves memory."""
    return any(entered.is_on for entered in _entered.stack)


def promise_of(tensor: torch.Tensor) -> Promise | None:
    """The promise of which ``tensor`` is all, in another shape perhaps."""
    promise = _entered.stack[-1].find(tensor) if _entered.stack else None
    return promise if promise is not None and promise.is_of(tensor) else None


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
