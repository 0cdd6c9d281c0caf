"""The chunks of one call on their way through :meth:`TokenDispatcher.run`: out, through the
experts, and home. While one is computed, others travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from commlayer.collectives import Pending
from commlayer.integrations.moe.dispatch_kinds import AllToAll
from commlayer.integrations.moe.experts import GroupedExperts
from commlayer.integrations.moe.handle import DispatchHandle, Experts
from commlayer.integrations.moe.planning import puts_off
from commlayer.integrations.moe.routing import who
from commlayer.integrations.remat import recomputable_from
from commlayer.profiles.errors import TensorError, UsageError

__all__ = ["ChunkStages", "returned_rows"]


class ChunkStages:
    """All chunks of a handle. The first of them are sent when it is made.

    Args:
        handle: of the call.
        x: the tokens [T, H].
        weights: gating weights [T, K], or None.
        experts: what will work on them.
        weights_travel: the experts apply the weights, not the combine.

    Raises UsageError where the tokens of the handle have gone already.
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
        if handle.use.dispatched:
            raise UsageError("run: the tokens of this handle have gone already: prepare another")
        handle.use.dispatched = handle.use.combined = 1
        x = handle.in_graph(x)
        sizes = [chunk.num_tokens for chunk in handle.chunks]
        self._x, self._experts = x, experts
        self._parts = x.split(sizes) if len(sizes) > 1 else (x,)
        self._stages = [_ChunkStage(handle, index, sizes, weights_travel) for index in range(len(sizes))]
        if weights is not None:
            weights = handle.in_graph(weights)
            of_chunks = weights.split(sizes) if len(sizes) > 1 else (weights,)
            for stage, of_chunk in zip(self._stages, of_chunks, strict=True):
                stage.weights = of_chunk
        # With a gradient all are sent before the first computes, so that the link never waits for
        # experts: what arrives is kept for the backward pass anyway. Without, one ahead.
        self._ahead = len(sizes) if handle.needs_gradient and torch.is_grad_enabled() else 1
        for j in range(self._ahead):  # each is packed while those before it travel
            self._stages[j].send(self._parts[j])
        self._lent = handle.lent
        if self._lent is not None:  # behind the tokens, which every rank waits for first
            assert isinstance(experts, GroupedExperts)  # when the handle was prepared
            self._lent.start(experts.weights)

    def compute(self) -> None:
        """Run the experts on one chunk after another, and send each back."""
        experts = self._experts
        with ExitStack() as blocks:
            if isinstance(experts, GroupedExperts) and self._lent is not None:
                blocks.enter_context(experts.with_guests(self._lent))
            if isinstance(experts, GroupedExperts) and puts_off(experts, self._x):
                blocks.enter_context(experts.weight_gradients_last())
            for j, stage in enumerate(self._stages):
                if self._ahead <= j + 1 < len(self._stages):
                    self._stages[j + 1].send(self._parts[j + 1])
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
    """The chunk at ``index`` of a handle, whose chunks have ``sizes`` tokens.

    Attributes:
        weights: those that have not been sent: for the combine, or, where they travel apart from
            the rows, for the experts.
    """

    def __init__(self, handle: DispatchHandle, index: int, sizes: list[int], weights_travel: bool) -> None:
        self._chunk = handle.chunks[index]
        self._sizes, self._index = sizes, index
        self._weights_travel = weights_travel
        self.weights: torch.Tensor | None = None
        self._under_way: list[Pending] = []

    def send(self, x: torch.Tensor) -> None:
        """Send the chunk's tokens. The backward pass waits for their gradients here: after the
        experts of all chunks that are sent before the first is computed."""
        chunk = self._chunk
        self._under_way = [chunk.token_dispatch(chunk.dispatch_preprocess(x))]
        if self.weights is not None and self._weights_travel and isinstance(chunk, AllToAll):
            self._under_way.append(chunk.weights_dispatch(self.weights))
            self.weights = None

    def compute(self, experts: Experts, x: torch.Tensor) -> None:
        """Run the experts on the chunk, and send it back. ``x``: the tokens of all chunks, of which
        it is sent again in a recomputation."""
        chunk = self._chunk
        arrived = [chunk.dispatch_postprocess(pending.wait()) for pending in self._under_way]
        self._under_way = []
        promise = recomputable_from(x, arrived[0], self._send_again)
        if self.weights is not None and self._weights_travel:
            arrived.append(chunk.fetch_weights(self.weights))
            self.weights = None
        computed = experts(arrived[0], chunk.expert_rows, arrived[1] if len(arrived) > 1 else None)
        computed = returned_rows(computed, arrived[0].shape, arrived[0].dtype)
        returning = chunk.token_combine(chunk.combine_preprocess(computed, self.weights))
        if promise is not None:  # the tokens come again while the gradient of the combine travels
            returning.on_gradient(promise.start)
        self._under_way = [returning]

    def _send_again(self, x: torch.Tensor) -> Pending:
        """Start the exchange of the chunk once more, out of the tokens ``x`` [T, H] or [S, B, H] of
        all chunks."""
        chunk = self._chunk
        tokens = x.flatten(0, -2).split(self._sizes)[self._index]
        sent = chunk.token_dispatch(chunk.dispatch_preprocess(tokens))
        return Pending(sent.unfinished, None, lambda _: chunk.dispatch_postprocess(sent.wait()))

    def crossing(self) -> list[torch.Tensor]:
        weights = [] if self.weights is None else [self.weights]
        return [*(pending.unfinished for pending in self._under_way), *weights]

    def carry_on(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        for pending in self._under_way:
            pending.cut(tensors[0])
            tensors = tensors[1:]
        if self.weights is not None:
            self.weights, tensors = tensors[0], tensors[1:]
        return tensors

    def finish(self) -> torch.Tensor:
        (returning,) = self._under_way
        self._under_way = []
        return self._chunk.combine_postprocess(returning.wait(), self.weights)


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
