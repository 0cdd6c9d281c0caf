"""One collective call of a training step, before anybody has priced it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.lanes import LANES
from commlayer.scheduler.traffic import GROUP_COLLECTIVES

if TYPE_CHECKING:
    from commlayer.scheduler.mapping.job import Job, Setup
    from commlayer.scheduler.mapping.model import ModelShape

__all__ = [
    "SEND_RECV",
    "Exchange",
    "axis_size",
    "head_sizes",
    "kept",
    "kv_heads_needed",
    "kv_heads_of_rank",
    "mirrored",
    "rows_of_rank",
]

SEND_RECV = "send_recv"
"""The collective of messages between two ranks: the stages of a pipeline, the neighbours in a ring."""
_DEGREES = frozenset({"tp", "cp", "dp", "pp", "etp", "ep", "edp"})
_MIRRORS = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}


@dataclass(frozen=True, slots=True)
class Exchange:
    """``count`` calls of one kind by one rank.

    Attributes:
        name: what it is; of a gradient's way back with ``_gradient`` behind it, of what is sent once more for the backward pass
            with ``_again``.
        axis: whose group, of :meth:`Setup.layout <commlayer.scheduler.mapping.job.Setup.layout>`.
        lane: its class of traffic.
        collective: one of GROUP_COLLECTIVES, or ``send_recv`` for messages.
        logical_bytes: of one call, nccl-tests' S: the gathered total, the whole input of a reduce_scatter, the tensor of an
            all_reduce or a message, and what a rank sends in an all_to_all_v (its bound, the busiest rank's, where routing is
            uneven).
        place: where in a layer or a step: ``before_attention``, ``context``, ``after_attention``, ``router``, ``counts``,
            ``dispatch``, ``gather_experts``, ``scatter_experts``, ``combine``, ``before_ffn``, ``after_ffn``, ``gradients``,
            ``parameters``, ``boundary``, ``embedding``, ``head``, ``loss``. A gradient has its activation's.

    Raises:
        UsageError: a lane or a collective that does not exist, or a negative number.
    """

    name: str
    axis: str
    lane: str
    collective: str
    logical_bytes: int
    place: str
    count: int = 1

    def __post_init__(self) -> None:
        if self.lane not in LANES or (self.collective not in GROUP_COLLECTIVES and self.collective != SEND_RECV):
            raise UsageError(
                f"{self.name}: expected a lane of {', '.join(LANES)} and a collective of {', '.join(GROUP_COLLECTIVES)} or "
                f"{SEND_RECV}, got {self.lane!r} and {self.collective!r}"
            )
        if self.logical_bytes < 0 or self.count < 0:
            raise UsageError(
                f"{self.name}: expected no negative numbers, got {self.count} × {self.logical_bytes} bytes"
            )

    def times(self, count: int) -> Exchange:
        """So many times as many calls."""
        return replace(self, count=self.count * count)

    def renamed(self, suffix: str, collective: str = "", logical_bytes: int = -1) -> Exchange:
        """With another name, and another collective and size where they are given."""
        size = self.logical_bytes if logical_bytes < 0 else logical_bytes
        name, kind = self.name + suffix, collective or self.collective
        return Exchange(name, self.axis, self.lane, kind, size, self.place, self.count)


def mirrored(exchange: Exchange) -> Exchange:
    """The way back of what it moved: all_gather and reduce_scatter are each other's, others their own."""
    collective = _MIRRORS.get(exchange.collective, exchange.collective)
    return exchange.renamed("_gradient", collective)


def kept(setup: Setup, *exchanges: Exchange) -> tuple[Exchange, ...]:
    """Those that have somebody to talk to, and something to say."""
    return tuple(each for each in exchanges if each.count and each.logical_bytes and axis_size(setup, each.axis) > 1)


def axis_size(setup: Setup, axis: str) -> int:
    """Ranks of a group of ``axis``. Raises GroupError for an unknown one."""
    if axis in _DEGREES:  # most of them, and the search asks for millions
        return int(getattr(setup, axis))
    return math.prod(size for size, _ in setup.layout(axis))


def rows_of_rank(job: Job, setup: Setup) -> int:
    """Positions of a sequence on one rank between the sharded parts: the fullest rank's where cp·tp does not divide them."""
    return -(-job.sequence // (setup.cp * setup.tp))


@lru_cache(maxsize=1024)
def kv_heads_of_rank(heads: int, kv_heads: int, parts: int) -> tuple[int, ...]:
    """How many key-value heads each of ``parts`` ranks needs for its query heads, which lie consecutively and as even as can
    be: a head that two ranks need counts on both."""
    shared_by, stop, found = heads // kv_heads, 0, []
    for part in range(parts):
        start, stop = stop, stop + heads // parts + (part < heads % parts)
        found.append(-(-stop // shared_by) - start // shared_by if stop > start else 0)
    return tuple(found)


def kv_heads_needed(model: ModelShape, tp: int) -> tuple[int, ...]:
    """How many heads of keys and values each tp rank attends with; latent attention expands as many as it has queries."""
    return kv_heads_of_rank(model.heads, model.heads if model.latent else model.kv_heads, tp)


def head_sizes(model: ModelShape) -> tuple[int, int, int]:
    """Elements of a query, of a key and its value together, and of a value, of one head."""
    latent, size = model.latent, model.head_dim
    if latent is None:
        return size, 2 * size, size
    key = latent.nope_dim + latent.rope_dim
    return key, key + latent.value_dim, latent.value_dim
