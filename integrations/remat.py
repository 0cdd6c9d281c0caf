"""Selective activation rematerialisation: what is cheap to make again is not kept for the backward pass, but made there.

MegaScale-MoE, section 4.1 and appendix A.2. A layer says of a tensor how it can be made again::

    with Rematerialise():
        normed = norm(x)
        recomputable(normed, lambda: norm(x))
        …

Whatever autograd would save of ``normed`` from then on, a view too, it saves as that promise, and the first gradient that
needs it has it made, once for all that do. A recomputation may communicate: all ranks' backward passes run in one order.
Outside of ``with`` the call does nothing.

Rejected: ``torch.utils.checkpoint``, whose unit is a function of which everything is done again, the products of the experts
too; and its selective form, which decides by operator, so it cannot tell the product to keep from the one to make again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import torch

from commlayer.profiles.errors import InternalError

__all__ = ["Later", "Promise", "Rematerialise", "promise_of", "recomputable"]


class Later(Protocol):
    """A tensor under way, such as :class:`commlayer.collectives.Pending`."""

    def wait(self) -> torch.Tensor:
        """Return it when it may be used."""


Make = Callable[..., "torch.Tensor | Later"]
"""Of no arguments, or of the source."""


class Promise:
    """How a tensor can be made again. ``uses``: how many saved tensors and other promises will ask for it."""

    def __init__(self, tensor: torch.Tensor, make: Make, source: Promise | None) -> None:
        self._make, self._source = make, source
        self._original = weakref.ref(tensor)
        self._made: torch.Tensor | Later | None = None
        self._shape, self.offset = tensor.shape, tensor.storage_offset()
        self.uses = 0
        if source is not None:
            source.uses += 1

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in the memory of the promised one, which is still there."""
        original = self._original()
        return original is not None and _key(original) == _key(tensor)

    def start(self) -> None:
        """Begin to make the tensor, where it is not there yet, for uses to come."""
        if self._made is None:
            with torch.no_grad():
                self._made = self._make() if self._source is None else self._make(self._source.take())

    def take(self) -> torch.Tensor:
        """The tensor, for one use."""
        self.start()
        made = self._made
        if not isinstance(made, torch.Tensor):
            assert made is not None  # start() has seen to it
            with torch.no_grad():
                made = made.wait()
        if made.shape != self._shape:
            raise InternalError(f"a recomputation gave {list(made.shape)} for {list(self._shape)}")
        self.uses -= 1
        self._made = made if self.uses > 0 else None  # the backward pass may come again: then it is made again
        return made.contiguous()


class _Saved:
    """In place of a saved tensor: which part of a promised one it is."""

    def __init__(self, promise: Promise, tensor: torch.Tensor) -> None:
        promise.uses += 1
        self._promise, self._dtype = promise, tensor.dtype
        self._size, self._stride = tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset() - promise.offset

    def get(self) -> torch.Tensor:
        return self._promise.take().as_strided(self._size, self._stride, self._offset)


_active: list[Rematerialise] = []


class Rematerialise:
    """While this is entered, :func:`recomputable` tensors are not saved for the backward pass.

    ``kept_bytes`` counts what autograd saves all the same, each storage once, parameters not; ``promised_bytes`` what it does
    not. ``is_on=False`` only counts: for comparison.
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
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        _active.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _active.remove(self)
        self._hooks.__exit__(kind, error, trace)
        self._promises.clear()  # those that are needed live in what was saved

    def promise(self, tensor: torch.Tensor, make: Make, source: Promise | None) -> Promise | None:
        """See :func:`recomputable`."""
        if not self.is_on or tensor.numel() == 0 or not tensor.is_contiguous():
            return None
        found = self._promises[_key(tensor)] = Promise(tensor, make, source)
        return found

    def find(self, tensor: torch.Tensor) -> Promise | None:
        """The promise of the memory in which ``tensor`` lies."""
        found = self._promises.get(_key(tensor))
        return found if found is not None and found.covers(tensor) else None

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        key, size = _key(tensor), tensor.untyped_storage().nbytes()
        promise = self.find(tensor)
        if promise is not None:
            self._promised[key] = size
            return _Saved(promise, tensor)
        if not isinstance(tensor, torch.nn.Parameter) and not isinstance(tensor._base, torch.nn.Parameter):
            self._kept[key] = size
        return tensor

    @staticmethod
    def _unpack(saved: torch.Tensor | _Saved) -> torch.Tensor:
        return saved.get() if isinstance(saved, _Saved) else saved


def recomputable(tensor: torch.Tensor, make: Make, source: Promise | None = None) -> Promise | None:
    """Promise that ``make()`` gives ``tensor`` again, bit for bit, in the backward pass.

    ``make`` runs without autograd, and must hold neither ``tensor`` nor what is promised itself, which would be kept then:
    it gets the latter as its argument, where ``source`` is its promise. It may return what is under way, and has ``wait()``.
    Returns the promise, whose ``start()`` begins early; None where nothing was promised.
    """
    return _active[-1].promise(tensor, make, source) if _active else None


def promise_of(tensor: torch.Tensor) -> Promise | None:
    """The promise in whose memory ``tensor`` lies, if there is one."""
    return _active[-1].find(tensor) if _active else None


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
