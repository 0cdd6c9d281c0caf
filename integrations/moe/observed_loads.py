"""The loads of a model's layers while it trains: counts of its experts' choices for each step, summed over all expert groups.

Every dispatch tells these counts anyway, on the host. Kept are sums of a few neighbouring steps, so that what ranks sum up, and
remember, is small.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from commlayer.integrations.moe.expert_slots import ExpertSlots
from commlayer.integrations.moe.handle import ChoiceCounts
from commlayer.integrations.moe.layer import MoELayer
from commlayer.scheduler.placement.expert_loads import ExpertLoads
from commlayer.scheduler.placement.expert_placement import Array

__all__ = ["ObservedLoads"]

_ROWS = 16
"""The sums of steps that one round brings at most."""
_REMEMBERED = 128


class _Seen:
    """The counts of one layer in this step. Passes without a gradient are not counted: they are no part of training."""

    def __init__(self, layer: MoELayer) -> None:
        self.num_experts = layer.router.config.num_experts
        self.is_first = layer.dispatcher.grid.all.rank == 0  # the others of the group know the same counts
        self.counts, self.calls = np.zeros(self.num_experts, dtype=np.int64), 0
        self.stop = layer.dispatcher.watch(self.add)

    def add(self, layout: ChoiceCounts, slots: ExpertSlots | None) -> None:
        if layout.needs_gradient and slots is not None:
            self.counts += slots.by_expert(layout.counts.sum((0, 1, 2))).numpy()
            self.calls += 1

    def take(self) -> tuple[Array, int]:
        seen = self.counts, self.calls
        self.counts, self.calls = np.zeros_like(self.counts), 0
        return seen


class ObservedLoads:
    """The loads of ``layers``, of which a round brings at most sixteen sums of steps; ``every``: steps of a round."""

    def __init__(self, layers: Sequence[MoELayer], every: int) -> None:
        self._seen = [_Seen(layer) for layer in layers]
        self.top_k = [layer.router.config.top_k for layer in layers]
        self.stride = -(-every // _ROWS)
        self.micro_batches = 1
        self._steps: list[list[Array]] = []
        self._known: list[Array] = []

    def end_step(self) -> None:
        """Note that a step is over."""
        of_layers = [seen.take() for seen in self._seen]
        self.micro_batches = max(1, max(calls for _, calls in of_layers))
        counted = [counts * seen.is_first for seen, (counts, _) in zip(self._seen, of_layers, strict=True)]
        self._steps.append(counted)

    @property
    def num_steps(self) -> int:
        """The steps that no round has brought yet."""
        return len(self._steps)

    def close(self) -> None:
        """Look at the layers no more, and forget the steps that no round has brought. Harmless when repeated."""
        for seen in self._seen:
            seen.stop()
        self._seen, self._steps = [], []

    def round(self) -> torch.Tensor:
        """Take the sums of what has been seen here, to be added up over ranks: [rows, experts of all layers] int64."""
        rows = len(self._steps) // self.stride
        used, self._steps = self._steps[: rows * self.stride], self._steps[rows * self.stride :]
        flat = np.stack([np.concatenate(counts) for counts in used])
        return torch.from_numpy(flat.reshape(rows, self.stride, -1).sum(1))

    def learn(self, summed: torch.Tensor) -> None:
        """Remember a round, added up over ranks."""
        self._known = [*self._known, *summed.numpy()][-_REMEMBERED:]

    def expected(self, horizon: int) -> list[Array]:
        """Forecast the counts of each layer in a step, as the mean of the next ``horizon``: for each, [experts]."""
        forecasts, begin = [], 0
        flat = np.stack(self._known)
        for seen, top_k in zip(self._seen, self.top_k, strict=True):
            counts = flat[:, None, begin : begin + seen.num_experts]
            begin += seen.num_experts
            loads = ExpertLoads(counts, ("layer",), top_k, self.stride)
            forecasts.append(loads.forecast(max(1, horizon // self.stride))[0] / self.stride)
        return forecasts
