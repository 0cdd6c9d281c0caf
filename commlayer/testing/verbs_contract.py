"""The verbs that every communicator speaks here: the contract of `check_communicator`, of the fake and of the adapters.

In all docstrings n is the number of ranks, and "row" is an index into a tensor's first dimension. Rules for every verb:

- All ranks of the communicator call the same verbs in the same order, with tensors of one dtype per call; `send` and `recv`
  concern only their two ranks. A rank with nothing to move calls all the same, with a tensor of no rows.
- A blocking call returns when its output may be read and its input written. With ``async_op=True`` the verb returns a
  `AsyncCall` at once, and no tensor of the call may be touched before its ``wait()`` has returned. Calls take effect in
  the order in which they were made, however they are waited for.
- Inputs are never changed, except where a verb says "in place".
- A call that cannot be (splits that do not add up, an output of the wrong size, a rank that does not exist) raises before
  anything is moved, and leaves the communicator usable.
- A peer that is gone, late or calling something else makes a call raise within the communicator's timeout; after that the
  communicator is not usable any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

__all__ = ["AsyncCall", "ReduceOp", "Verbs"]

ReduceOp = Literal["sum", "product", "min", "max"]
"""The reduction by which elements of several ranks become one."""


@runtime_checkable
class AsyncCall(Protocol):
    """A call under way."""

    def wait(self) -> object:
        """Return when the call's output may be read and its input written. Raises what the blocking call would have."""


class Verbs(Protocol):
    """One rank's end of a communicator."""

    @property
    def rank(self) -> int:
        """This rank, from 0 to n - 1."""

    @property
    def size(self) -> int:
        """n, the number of ranks."""

    def all_to_all(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        source_splits: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> AsyncCall | None:
        """Every rank sends a block of rows to every rank, and to itself.

        The first ``source_splits[0]`` rows of ``source`` go to rank 0, the next ``source_splits[1]`` to rank 1, …;
        ``output`` holds what came from rank 0 (``output_splits[0]`` rows), then from rank 1, …

        Args:
            output: [sum(output_splits), …], overwritten.
            source: [sum(source_splits), …]; the same row shape on all ranks.
            output_splits, source_splits: n counts each, zeros allowed; None: equal blocks, of a number of rows that n
                divides. What rank a sends to b is what b expects from a: ``source_splits[b]`` on a equals
                ``output_splits[a]`` on b.
            async_op: return a `AsyncCall` instead of waiting.

        Raises:
            Exception: splits that are not n counts or do not add up to the rows, rows that n does not divide.
        """

    def all_gather(self, output: torch.Tensor, source: torch.Tensor, *, async_op: bool = False) -> AsyncCall | None:
        """Every rank sends ``source`` to all; ``output`` holds rank 0's, then rank 1's, …

        Args:
            output: [n·S, …], overwritten.
            source: [S, …], the same shape on all ranks; S may be 0.
            async_op: return a `AsyncCall` instead of waiting.

        Raises:
            Exception: ``output`` has not n times the elements of ``source``.
        """

    def reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, op: ReduceOp = "sum", *, async_op: bool = False
    ) -> AsyncCall | None:
        """Reduce all ranks' ``source``; block r of the result is rank r's ``output``.

        Args:
            output: [S, …], overwritten.
            source: [n·S, …], the same shape on all ranks.
            op: how elements are reduced.
            async_op: return a `AsyncCall` instead of waiting.

        Raises:
            Exception: ``source`` has not n times the elements of ``output``.
        """

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum", *, async_op: bool = False) -> AsyncCall | None:
        """Reduce all ranks' ``tensor`` element by element, in place on every rank; the same bits on all of them.

        Args:
            tensor: any shape, the same on all ranks.
            op: how elements are reduced.
            async_op: return a `AsyncCall` instead of waiting.
        """

    def broadcast(self, tensor: torch.Tensor, root: int, *, async_op: bool = False) -> AsyncCall | None:
        """Rank ``root`` sends ``tensor`` to all, in place on the others.

        Args:
            tensor: any shape, the same on all ranks.
            root: who sends.
            async_op: return a `AsyncCall` instead of waiting.

        Raises:
            Exception: there is no rank ``root``.
        """

    def gather(
        self, output: torch.Tensor | None, source: torch.Tensor, root: int, *, async_op: bool = False
    ) -> AsyncCall | None:
        """Every rank sends ``source`` to rank ``root``, whose ``output`` holds rank 0's, then rank 1's, …

        Args:
            output: [n·S, …] on ``root``, overwritten; None on the others.
            source: [S, …], the same shape on all ranks.
            root: who receives.
            async_op: return a `AsyncCall` instead of waiting.

        Raises:
            Exception: there is no rank ``root``; on ``root``: ``output`` is None or of the wrong size.
        """

    def scatter(
        self, output: torch.Tensor, source: torch.Tensor | None, root: int, *, async_op: bool = False
    ) -> AsyncCall | None:
        """Rank ``root`` sends block r of ``source`` to rank r.

        Args:
            output: [S, …], overwritten; the same shape on all ranks.
            source: [n·S, …] on ``root``; None on the others.
            root: who sends.
            async_op: return a `AsyncCall` instead of waiting.

        Raises:
            Exception: there is no rank ``root``; on ``root``: ``source`` is None or of the wrong size.
        """

    def reduce(
        self, tensor: torch.Tensor, root: int, op: ReduceOp = "sum", *, async_op: bool = False
    ) -> AsyncCall | None:
        """Reduce all ranks' ``tensor`` element by element, in place on ``root``; what the others' holds then is undefined.

        Args:
            tensor: any shape, the same on all ranks.
            root: who gets the result.
            op: how elements are reduced.
            async_op: return a `AsyncCall` instead of waiting.

        Raises:
            Exception: there is no rank ``root``.
        """

    def send(self, tensor: torch.Tensor, to: int, *, async_op: bool = False) -> AsyncCall | None:
        """Send ``tensor`` to rank ``to``, which calls `recv`. Messages of one pair arrive in the order of their sending.

        A blocking send may return before the message was received, or wait until it is: do not count on either.

        Raises:
            Exception: there is no rank ``to``, or it is this one.
        """

    def recv(self, tensor: torch.Tensor, source: int, *, async_op: bool = False) -> AsyncCall | None:
        """Receive into ``tensor`` what rank ``source`` sends; as many elements as are sent, overwritten.

        Raises:
            Exception: there is no rank ``source``, or it is this one.
        """

    def barrier(self) -> None:
        """Return when all ranks have called it."""
