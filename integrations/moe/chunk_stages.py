"""The chunks of one call on their way through :meth:`TokenDispatcher.run`: out, through the
experts, and home. While one is computed, others travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from commlayer.collectives import Held, Pending
from commlayer.integrations.moe.dispatch_kinds import AllToAll
from commlayer.integrations.moe.experts import GroupedExperts
from commlayer.integrations.moe.handle import Chunk, DispatchHandle, Experts
from commlayer.integrations.moe.planning import puts_off
from commlayer.integrations.moe.routing import who
from commlayer.integrations.remat import recomputable_from
from commlayer.profiles.errors import TensorError

__all__ = ["ChunkStages", "returned_rows"]


class ChunkStages:
    """All chunks of a handle. The first of them are sent when it is made.

    Args:
        handle: of the call.
        x: the tokens [T, H].
        weights: gating weights [T, K], or None.
        experts: what will work on them.
        weights_travel: the experts apply the weights, not the combine.
    """

    def __init__(
        self,
        handle: DispatchHandle,
        x: torch.Tensor,
        weights: torch.Tensor | None,
        experts: Experts,
        *,
        weights_travel: bool,
    ) -> None:
        sizes = [chunk.num_tokens for chunk in handle.chunks]
        parts = zip(
            _split(x, sizes),
            [None] * len(sizes) if weights is None else _split(weights, sizes),
            strict=True,
        )
        self._x = x
        self._parts = list(parts)
        self._stages = [_ChunkStage(handle, index, weights_travel) for index in range(len(sizes))]
        # With a gradient all are sent before the first computes, so that the link never waits for
        # experts: what arrives is kept for the backward pass anyway. Without, one ahead.
        self._ahead = len(sizes) if handle.needs_gradient and torch.is_grad_enabled() else 1
        for j in range(self._ahead):  # each is packed while those before it travel
            self._send(j)
        self._lent = handle.lent
        if self._lent is not None:  # behind the tokens, which every rank waits for first
            assert isinstance(experts, GroupedExperts)  # when the handle was prepared
            self._lent.start(experts.weights)

    def _send(self, j: int) -> None:
        self._stages[j].pack(*self._parts[j])
        self._stages[j].send()

    def compute(self, experts: Experts) -> None:
        """Run the experts on one chunk after another, and send each back."""
        grouped = experts if isinstance(experts, GroupedExperts) else None
        is_last = grouped is not None and puts_off(grouped, self._x)
        with (
            grouped.with_guests(self._lent) if grouped is not None and self._lent is not None else nullcontext(),
            grouped.weight_gradients_last() if grouped is not None and is_last else nullcontext(),
        ):
            for j, stage in enumerate(self._stages):
                if self._ahead <= j + 1 < len(self._stages):
                    self._send(j + 1)
                stage.compute(experts, self._x)

    def finish(self) -> torch.Tensor:
        """Wait for all chunks, and return the tokens [T, H]."""
        parts = [stage.finish() for stage in self._stages]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def crossing(self) -> list[torch.Tensor]:
        """List what the next part takes from this one."""
        crossing = [x for stage in self._stages for x in stage.crossing()]
        return crossing if self._lent is None else [*crossing, *self._lent.crossing]

    def carry_on(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Take back what :meth:`crossing` has listed, and return the tensors that stand behind
        it."""
        for stage in self._stages:
            tensors = stage.carry_on(tensors)
        return tensors if self._lent is None else self._lent.cut(tensors)


class _ChunkStage:
    """The chunk at ``index`` of a handle."""

    def __init__(self, handle: DispatchHandle, index: int, weights_travel: bool) -> None:
        self.chunk: Chunk = handle.chunks[index]
        self._sizes = [chunk.num_tokens for chunk in handle.chunks]
        self._index = index
        self._weights_travel = weights_travel
        self._weights: torch.Tensor | None = None
        """The weights that have not been sent: for the combine, or, where they travel apart from
        the rows, for the experts."""
        self._packed: list[tuple[Callable[[Held], Pending], Held]] = []
        self._going: list[Pending] = []
        self._returning: Pending | None = None

    def pack(self, x: torch.Tensor, weights: torch.Tensor | None) -> None:
        """Put the chunk's tokens in the order in which they go. The backward pass waits for their
        gradients here: after the experts of all chunks that are packed before the first is
        computed. Until they are sent, the rows take memory: those of all chunks together as much as
        of one."""
        chunk = self.chunk
        self._packed = [(chunk.token_dispatch, chunk.hold(chunk.dispatch_preprocess(x)))]
        if weights is not None and self._weights_travel and isinstance(chunk, AllToAll):
            self._packed.append((chunk.weights_dispatch, chunk.hold(chunk.weights_preprocess(weights))))
        else:
            self._weights = weights

    def send(self) -> None:
        self._going = [start(held) for start, held in self._packed]
        self._packed = []

    def compute(self, experts: Experts, x: torch.Tensor) -> None:
        """Run the experts on the chunk. ``x``: the tokens of all chunks, of which it is sent again
        in a recomputation."""
        chunk = self.chunk
        arrived = [chunk.dispatch_postprocess(pending.wait()) for pending in self._going]
        self._going = []
        promise = recomputable_from(x, arrived[0], lambda tokens: _Arriving(self, tokens))
        if self._weights is not None and self._weights_travel:
            arrived.append(chunk.fetch_weights(self._weights))
            self._weights = None
        computed = experts(arrived[0], chunk.expert_rows, arrived[1] if len(arrived) > 1 else None)
        computed = returned_rows(computed, arrived[0].shape, arrived[0].dtype)
        self._returning = chunk.token_combine(chunk.combine_preprocess(computed, self._weights))
        if promise is not None:  # the tokens come again while the gradient of the combine travels
            self._returning.on_gradient(promise.start)

    def send_again(self, x: torch.Tensor) -> Pending:
        """Start the exchange of the chunk once more, out of the tokens ``x`` [T, H] or [S, B, H] of
        all chunks."""
        tokens = x.flatten(0, -2).split(self._sizes)[self._index]
        return self.chunk.token_dispatch(self.chunk.dispatch_preprocess(tokens))

    def crossing(self) -> list[torch.Tensor]:
        under_way = self._going if self._returning is None else [self._returning]
        weights = [] if self._weights is None else [self._weights]
        return [*(pending.unfinished for pending in under_way), *weights]

    def carry_on(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        for pending in self._going if self._returning is None else [self._returning]:
            pending.cut(tensors[0])
            tensors = tensors[1:]
        if self._weights is not None:
            self._weights, tensors = tensors[0], tensors[1:]
        return tensors

    def finish(self) -> torch.Tensor:
        assert self._returning is not None  # compute() came before
        returning, self._returning = self._returning, None
        return self.chunk.combine_postprocess(returning.wait(), self._weights)


class _Arriving:
    """A chunk's tokens on their way to the experts once more."""

    def __init__(self, stage: _ChunkStage, x: torch.Tensor) -> None:
        self._chunk, self._pending = stage.chunk, stage.send_again(x)

    def wait(self) -> torch.Tensor:
        return self._chunk.dispatch_postprocess(self._pending.wait())


def returned_rows(computed: object, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the experts' output for rows [R, H] in the tokens' dtype: all ranks send back in one
    dtype, whatever autocast or an expert without rows has made of it here. Raises TensorError for
    another shape."""
    if not isinstance(computed, torch.Tensor) or computed.shape != tuple(shape):
        got = list(computed.shape) if isinstance(computed, torch.Tensor) else repr(computed)
        raise TensorError(
            f"{who()}the experts got rows {list(shape)} and returned {got}: expected as many, and as wide"
        )
    return computed.to(dtype)


def _split(x: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
    return (x,) if len(sizes) == 1 else x.split(sizes)
