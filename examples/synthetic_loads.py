"""Synthetic expert loads: even, Zipf, drifting and bursty; the same for the same seed, on every machine."""

from __future__ import annotations

from typing import Literal, get_args

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.placement.expert_loads import ExpertLoads
from commlayer.scheduler.placement.expert_placement import Array

__all__ = ["LOAD_KINDS", "LoadKind", "synthetic_loads"]

LoadKind = Literal["uniform", "zipf", "drifting", "bursty"]
LOAD_KINDS: tuple[str, ...] = get_args(LoadKind)


def synthetic_loads(
    kind: LoadKind,
    *,
    experts: int,
    layers: int = 1,
    steps: int = 64,
    tokens: int = 4096,
    top_k: int = 8,
    exponent: float = 1.0,
    period: int = 64,
    seed: int = 0,
) -> ExpertLoads:
    """Draw loads of one kind.

    Kinds:
        uniform: every expert is as popular as the others; what differs is chance.
        zipf: the i-th most popular expert's share is proportional to 1/i^exponent; which one that is, each layer draws.
        drifting: zipf, whose order changes: within ``period`` steps every expert's popularity wanders to another's.
        bursty: zipf; once in ``period`` steps on average one expert of a layer gets as much as all others together, for two to
            eight steps.

    Args:
        tokens: of a step; each has ``top_k`` choices, and no expert more than all of them.

    Raises:
        UsageError: an unknown kind, or a number that cannot be.
    """
    import numpy as np

    if kind not in LOAD_KINDS:
        raise UsageError(f"the kind of loads: expected one of {', '.join(LOAD_KINDS)}, got {kind!r}")
    if min(experts, layers, steps, tokens, top_k, period) < 1 or top_k > experts or not 0 <= exponent < 100:
        raise UsageError(
            f"loads of {experts} experts, {layers} layers, {steps} steps of {tokens} tokens, top-{top_k}, period {period}, "
            f"exponent {exponent}: expected at least 1 of each, no more choices than experts, and an exponent of at least 0"
        )
    draw = np.random.default_rng(seed)
    ranks = np.stack([draw.permutation(experts) for _ in range(layers)])
    zipf = (np.arange(experts) + 1.0) ** -(0.0 if kind == "uniform" else exponent)
    popularity = np.broadcast_to(zipf[ranks], (steps, layers, experts)).copy()
    if kind == "drifting":
        for turn in range(0, steps, period):
            target = np.log(zipf[np.stack([draw.permutation(experts) for _ in range(layers)])])
            origin = np.log(popularity[turn])
            part = (np.arange(1, min(period, steps - turn) + 1) / period)[:, None, None]
            popularity[turn : turn + period] = np.exp(origin + part * (target - origin))
            popularity[turn + period :] = np.exp(target)
    elif kind == "bursty":
        chances: Array = draw.random((steps, layers))
        for step, layer in np.argwhere(chances < 1.0 / period):
            expert, length = draw.integers(experts), draw.integers(2, 9)
            popularity[step : step + length, layer, expert] += zipf.sum()
    shares = popularity / popularity.sum(-1, keepdims=True)
    counts = draw.multinomial(tokens * top_k, shares)
    names = tuple(f"layer {layer}" for layer in range(layers))
    source = f"synthetic: {kind}, exponent {exponent:g}, seed {seed}"
    return ExpertLoads(_limited(counts, tokens), names, top_k, source=source)


def _limited(counts: Array, tokens: int) -> Array:
    """Array of which no expert has more than one choice of each token; what is too much goes to the others."""
    import numpy as np

    limited: Array = counts.clip(max=tokens)
    for step, layer in np.argwhere((counts > tokens).any(-1)):
        row = limited[step, layer]
        over = int(counts[step, layer].sum() - row.sum())
        while over:  # as evenly as it goes among those that have room
            room = np.flatnonzero(row < tokens)
            each = max(1, over // len(room))
            for expert in room[:over]:
                moved = min(each, over, tokens - int(row[expert]))
                row[expert] += moved
                over -= moved
    return limited
