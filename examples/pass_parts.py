"""Forward passes in parts: where one waits for its tokens, another may go on; and the backward pass of each, in the same parts.

A layer's parts are a generator. It yields where something is under way that the next part waits for, with all tensors that
the next part takes from this one, and gets them back. Whoever runs it alone gives back the same (:func:`run_parts`). Whoever
runs two of them in turns cuts their graphs there (:class:`CutPass`): what the next part gets are leaves, whose gradients the
backward pass of this part begins with. So the backward pass has parts too, last first, and goes from one to the next where a
gradient is under way.

All of it runs on one thread, in an order that the program says: calls of all groups are issued in one order on all ranks, as
several communicators on one device need it. Rejected: a thread for each pass, whose calls would meet in any order.

A part must leave no context open (autocast, :class:`~commlayer.integrations.remat.Rematerialise`) when it yields: contexts
belong to a thread, and what runs in between would be in it too.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

import torch

from commlayer.integrations.moe.dispatcher import Parts
from commlayer.profiles.errors import UsageError

__all__ = ["CutPass", "Parts", "carrying", "run_parts"]

_Result = TypeVar("_Result")


def run_parts(parts: Parts[_Result]) -> _Result:
    """Run all parts, one after the other, in one graph."""
    try:
        crossing = next(parts)
        while True:
            crossing = parts.send(crossing)
    except StopIteration as end:
        result: _Result = end.value
        return result


def carrying(parts: Parts[_Result], *own: torch.Tensor) -> Parts[tuple[_Result, tuple[torch.Tensor, ...]]]:
    """``parts`` of something inside, with tensors of one's own that cross as well; returns both."""
    try:
        crossing = next(parts)
        while True:
            tensors = yield (*crossing, *own)
            own = tuple(tensors[len(crossing) :])
            crossing = parts.send(tensors[: len(crossing)])
    except StopIteration as end:
        return end.value, own


class CutPass:
    """The forward pass of one micro-batch, part by part, and its backward pass.

    Args:
        parts: of the forward pass.
    """

    def __init__(self, parts: Parts[torch.Tensor]) -> None:
        self._parts = parts
        self._given: tuple[torch.Tensor, ...] | None = None  # of the next part; None: nothing has run
        self._cuts: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        self._result: torch.Tensor | None = None

    @property
    def result(self) -> torch.Tensor:
        """The result of the forward pass. Raises UsageError before its last part has run."""
        if self._result is None:
            raise UsageError("result of a pass whose parts have not all run: call forward() until it returns False")
        return self._result

    def forward(self) -> bool:
        """Run the next part; whether another one follows."""
        try:
            crossing = next(self._parts) if self._given is None else self._parts.send(self._given)
        except StopIteration as end:
            self._result, self._given = end.value, None
            return False
        self._given = self._cut(crossing)
        return True

    def _cut(self, crossing: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaves = {id(x): x.detach().requires_grad_() for x in crossing if x.requires_grad}
        self._cuts.append([(x, leaves[id(x)]) for x in {id(x): x for x in crossing}.values() if id(x) in leaves])
        return tuple(leaves.get(id(x), x) for x in crossing)

    def backward(self, gradient: torch.Tensor | None) -> Generator[None, None, None]:
        """Run the backward pass from the result, part by part: yields where another one follows.

        ``gradient``: of the result; None: it is a scalar. Gradients are added to those of the leaves, as by ``backward()``.
        """
        roots: list[tuple[torch.Tensor, torch.Tensor | None]] = [(self.result, gradient)]
        self._result = None
        while True:
            trained = [(x, of_x) for x, of_x in roots if x.requires_grad]
            if trained:  # not behind a first stage that is frozen
                tensors, gradients = zip(*trained, strict=True)
                torch.autograd.backward(tensors, gradients)
            if not self._cuts:
                return
            yield
            roots = [(x, leaf.grad) for x, leaf in self._cuts.pop() if leaf.grad is not None]
