"""One chunk of tokens on its way through the experts, and what rematerialisation needs to send it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from commlayer.collectives import Held, Pending
from commlayer.integrations.moe.handle import Chunk, Experts
from commlayer.integrations.moe.routing import who
from commlayer.integrations.remat import Promise, promise_of, recomputable
from commlayer.profiles.errors import TensorError

if TYPE_CHECKING:
    from commlayer.integrations.moe.dispatcher import TokenDispatcher

__all__ = ["ChunkStage", "chunk_part", "returned", "split"]


class ChunkStage:
    """One chunk on its way through :meth:`TokenDispatcher.run`."""

    def __init__(self, dispatcher: TokenDispatcher, chunk: Chunk) -> None:
        self.dispatcher, self.chunk = dispatcher, chunk
        self._weights: torch.Tensor | None = None
        self._packed: list[Held] = []
        self._going: list[Pending] = []
        self._returning: Pending | None = None

    def pack(self, x: torch.Tensor, weights: torch.Tensor | None, weights_travel: bool) -> None:
        """Put the chunk's tokens in the order in which they go. The backward pass waits for their gradients here: after the
        experts of all chunks that are packed before the first is computed. Until they are sent, the rows take memory: those
        of all chunks together as much as of one."""
        dispatcher, chunk = self.dispatcher, self.chunk
        rows = [dispatcher.dispatch_preprocess(x, chunk)]
        if weights is not None and weights_travel:
            rows.append(dispatcher.row_weights(weights, chunk))
        else:
            self._weights = weights
        self._packed = [dispatcher.hold(each, chunk) for each in rows]

    def send(self) -> None:
        ways = (self.dispatcher.token_dispatch, self.dispatcher.weights_dispatch)
        self._going = [way(held, self.chunk) for way, held in zip(ways, self._packed, strict=False)]
        self._packed = []

    def exchange(self, x: torch.Tensor) -> Pending:
        return self.dispatcher.token_dispatch(self.dispatcher.dispatch_preprocess(x, self.chunk), self.chunk)

    def compute(self, experts: Experts, part_of: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
        """Run the experts on the chunk. ``part_of`` gives the chunk's tokens of all of ``x``: for when they are sent again."""
        dispatcher, chunk = self.dispatcher, self.chunk
        arrived = [dispatcher.dispatch_postprocess(pending.wait(), chunk) for pending in self._going]
        self._going = []
        promise = self._promise(arrived[0], part_of, x)
        computed = experts(arrived[0], chunk.expert_rows, arrived[1] if len(arrived) > 1 else None)
        computed = returned(computed, arrived[0].shape, arrived[0].dtype)
        self._returning = dispatcher.token_combine(dispatcher.combine_preprocess(computed, self._weights, chunk), chunk)
        if promise is not None:  # the tokens come again while the gradient of the combine travels
            self._returning.on_gradient(promise.start)

    def _promise(
        self, arrived: torch.Tensor, part_of: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> Promise | None:
        """That what arrived can be sent again."""
        source = promise_of(x)
        if source is not None:
            return recomputable(arrived, lambda made: _Arriving(self, part_of(made)), source)
        kept = x.detach()
        return recomputable(arrived, lambda: _Arriving(self, part_of(kept)), inputs=(kept,))

    def finish(self) -> torch.Tensor:
        assert self._returning is not None  # compute() came before
        returning, self._returning = self._returning, None
        return self.dispatcher.combine_postprocess(returning.wait(), self._weights, self.chunk)


def returned(computed: object, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the experts' output for rows [R, H] in the tokens' dtype: all ranks send back in one dtype, whatever
    autocast or an expert without rows has made of it here. Raises TensorError for another shape.
    """
    if not isinstance(computed, torch.Tensor) or computed.shape != tuple(shape):
        got = list(computed.shape) if isinstance(computed, torch.Tensor) else repr(computed)
        raise TensorError(
            f"{who()}the experts got rows {list(shape)} and returned {got}: expected as many, and as wide"
        )
    return computed.to(dtype)


class _Arriving:
    """A chunk's tokens on their way to the experts once more."""

    def __init__(self, stage: ChunkStage, x: torch.Tensor) -> None:
        self._stage, self._pending = stage, stage.exchange(x)

    def wait(self) -> torch.Tensor:
        return self._stage.dispatcher.dispatch_postprocess(self._pending.wait(), self._stage.chunk)


def chunk_part(sizes: list[int], j: int, x: torch.Tensor) -> torch.Tensor:
    """Cut chunk j out of all tokens [T, H] or [S, B, H]."""
    part: torch.Tensor = x.flatten(0, -2).split(sizes)[j]
    return part


def split(x: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
    return (x,) if len(sizes) == 1 else x.split(sizes)
