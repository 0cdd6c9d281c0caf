"""Expert loads over time: how many choices each expert of each layer got, and what is to be expected next.

Array are kept as they were, and shares follow from them: a mean of shares would count a step of few tokens as much as one of
many. A forecast is a mean of what was, weighted towards the end: nothing that was recorded says where popularity wanders to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.placement.expert_placement import Array

__all__ = ["ExpertLoads"]


@dataclass(frozen=True, eq=False)
class ExpertLoads:
    """The choices of every expert, by step and layer.

    Attributes:
        counts: [steps, layers, experts], whole numbers of at least 0: choices of all tokens that are counted together.
        layers: a name for each.
        top_k: choices of a token; counts over it are tokens.
        stride: calls of the layer (micro-batches) that a step's counts add up.
        source: where they come from, for people.

    Raises:
        UsageError: counts of another shape, or below 0; no step, layer or expert at all.
    """

    counts: Array
    layers: tuple[str, ...]
    top_k: int
    stride: int = 1
    source: str = ""
    num_steps: int = field(init=False)
    num_layers: int = field(init=False)
    num_experts: int = field(init=False)

    def __post_init__(self) -> None:
        import numpy as np

        counts = np.asarray(self.counts)
        if counts.ndim != 3 or 0 in counts.shape or counts.shape[1] != len(self.layers):
            raise UsageError(
                f"expert loads: expected counts [steps, {len(self.layers)} layers, experts], got shape {list(counts.shape)}"
            )
        if not np.issubdtype(counts.dtype, np.integer) or counts.min() < 0:
            raise UsageError(
                f"expert loads: expected whole numbers of at least 0, got {counts.dtype} from {counts.min()}"
            )
        if not 1 <= self.top_k <= counts.shape[2] or self.stride < 1:
            raise UsageError(
                f"expert loads: expected 1 to {counts.shape[2]} choices of a token and a stride of at least 1, got {self.top_k} "
                f"and {self.stride}"
            )
        object.__setattr__(self, "counts", counts.astype(np.int64))
        for name, number in zip(("num_steps", "num_layers", "num_experts"), counts.shape, strict=True):
            object.__setattr__(self, name, number)

    def between(self, first: int, last: int) -> ExpertLoads:
        """Cut the steps ``first`` to ``last`` out, the latter not included. Raises UsageError where there are none."""
        if not 0 <= first < last <= self.num_steps:
            raise UsageError(f"steps {first} to {last} of {self.num_steps}: expected at least one of them")
        return ExpertLoads(self.counts[first:last], self.layers, self.top_k, self.stride, self.source)

    def window(self, steps: int) -> Array:
        """Average the last ``steps`` steps, all alike: [layers, experts]. Raises UsageError for fewer than one step."""
        if steps < 1:
            raise UsageError(f"a window of {steps} steps: expected at least one")
        mean: Array = self.counts[-steps:].mean(0)
        return mean

    def moving_average(self, half_life: float) -> Array:
        """Average all steps, of which one ``half_life`` steps ago counts half as much as the last one: [layers, experts]."""
        import numpy as np

        if not half_life > 0:
            raise UsageError(f"a half-life of {half_life} steps: expected a positive number")
        weights = 0.5 ** (np.arange(self.num_steps)[::-1] / half_life)
        mean: Array = np.einsum("s,sle->le", weights / weights.sum(), self.counts)
        return mean

    def forecast(self, horizon: int) -> Array:
        """Forecast the mean counts of the next ``horizon`` steps: [layers, experts].

        The moving average of the half-life that would have forecast the recorded steps best: half a step to all of them. Which
        one that is, says the record itself, by the error at every step over the steps after it; so a load that jumps is followed
        at once, and one that only trembles is not. A record of fewer than four steps is averaged.
        """
        import numpy as np

        if horizon < 1:
            raise UsageError(f"a horizon of {horizon} steps: expected at least one")
        if self.num_steps < 4:
            return self.window(self.num_steps)
        counts = self.counts[-_LONGEST:].astype(np.float64)
        lives = [life for life in _HALF_LIVES if life < 2 * len(counts)]
        # A record shorter than twice the horizon is judged by about as many steps as leave half of it.
        ahead = min(horizon, max(1, len(counts) // 2))
        until = np.concatenate([np.zeros_like(counts[:1]), np.cumsum(counts, 0)])
        errors = {}
        for life in lives:
            decay, mean, weight = 0.5 ** (1 / life), np.zeros_like(counts[0]), 0.0
            distances = []
            for step in range(len(counts) - ahead):
                mean, weight = mean * decay + counts[step], weight * decay + 1
                future = (until[step + 1 + ahead] - until[step + 1]) / ahead
                distances.append(float(np.abs(mean / weight - future).mean()))
            errors[life] = sum(distances) / len(distances)
        return self.moving_average(min(lives, key=errors.__getitem__))

    def popularity(self) -> tuple[float, ...]:
        """The shares of the most popular expert, the next one and so on, as the layers have them on average.

        Which expert that is differs from layer to layer; a mean over experts of the same number would hide the skew.
        """
        import numpy as np

        sums = self.counts.sum(0).astype(np.float64)
        sums = np.sort(sums[sums.sum(1) > 0], axis=1)[:, ::-1]
        if not len(sums):
            raise UsageError("expert loads without a single choice: there is no popularity to tell")
        shares = (sums / sums.sum(1, keepdims=True)).mean(0)
        return tuple(float(share) for share in shares)

    @classmethod
    def added(cls, parts: Sequence[ExpertLoads]) -> ExpertLoads:
        """Add loads of groups that ran side by side, layer by layer (by name), up to the shortest record.

        Layers that only some parts have, as those of a pipeline's stages, are put beside each other. Raises UsageError for parts
        with other experts or choices, or no part.
        """
        import numpy as np

        if not parts:
            raise UsageError("expected loads to add, got none")
        first, stride = parts[0], max(part.stride for part in parts)
        for other in parts[1:]:
            own, theirs = ((part.num_experts, part.top_k) for part in (first, other))
            if own != theirs:
                raise UsageError(f"loads of one model: expected (experts, choices of a token) {own}, got {theirs}")
        thinned = [part.with_stride(stride) for part in parts]
        steps = min(part.num_steps for part in thinned)
        sums: dict[str, Array] = {}
        for part in thinned:
            for layer, name in enumerate(part.layers):
                sums[name] = sums.get(name, 0) + part.counts[:steps, layer]
        return cls(np.stack(list(sums.values()), 1), tuple(sums), first.top_k, stride, first.source)

    def with_stride(self, stride: int) -> ExpertLoads:
        """Add up steps until each has ``stride`` calls; what is left over at the end is dropped. Raises UsageError where that
        does not go, or nothing would be left."""
        times, steps = stride // self.stride, self.num_steps * self.stride // stride
        if stride % self.stride or steps < 1:
            raise UsageError(
                f"loads with {self.stride} calls a step, {self.num_steps} of them: cannot be added up to steps of {stride} calls"
            )
        shape = (steps, times, self.num_layers, self.num_experts)
        counts = self.counts[: steps * times].reshape(shape).sum(1)
        return ExpertLoads(counts, self.layers, self.top_k, stride, self.source)


_HALF_LIVES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_LONGEST = 128
"""The steps of a record in which half-lives are tried."""
