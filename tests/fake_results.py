"""Results of the collectives of the in-process fake: every rank's part in, every rank's result out.
Slow and obvious."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commlayer.profiles.errors import DisagreementError
from commlayer.transport.call_memory import as_bytes

__all__ = ["Contribution", "complete"]


@dataclass(frozen=True)
class Contribution:
    """The part of one rank in a collective."""

    verb: str
    agreed: tuple[Any, ...]  # dtype, root, op: equal on all ranks
    source: torch.Tensor | None = None
    target: torch.Tensor | None = None
    source_splits: tuple[int, ...] = ()
    target_splits: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.verb}({', '.join(str(value).removeprefix('torch.') for value in self.agreed)})"


def complete(parts: Sequence[Contribution]) -> None:
    """Compute the collective of all ranks' parts, by rank, into their targets.

    Raises DisagreementError where ranks call different things, or sizes do not match.
    """
    for rank, part in enumerate(parts):
        if (part.verb, part.agreed) != (parts[0].verb, parts[0].agreed):
            raise DisagreementError(f"rank 0 calls {parts[0]}, rank {rank} calls {part}: all must call the same")
    results = _RESULTS[parts[0].verb](parts)
    for part, result in zip(parts, results, strict=True):
        if result is not None and part.target is not None:
            part.target.copy_(result.view(part.target.dtype).view(part.target.shape))


def _bytes(tensor: torch.Tensor | None) -> torch.Tensor:
    """The elements as 1-D uint8, which torch can slice and join for every dtype."""
    assert tensor is not None  # checked by the rank that brought it
    return as_bytes(tensor)


def _sources(parts: Sequence[Contribution]) -> list[torch.Tensor]:
    sources = [_bytes(part.source) for part in parts]
    for rank, source in enumerate(sources):
        if len(source) != len(sources[0]):
            raise DisagreementError(
                f"{parts[0]}: rank 0 brings {len(sources[0])} bytes, rank {rank} brings {len(source)}: sizes must be equal"
            )
    return sources


def _all_to_all(parts: Sequence[Contribution]) -> list[torch.Tensor | None]:
    ranks = range(len(parts))
    for a in ranks:
        for b in ranks:
            if parts[a].source_splits[b] != parts[b].target_splits[a]:
                raise DisagreementError(
                    f"all_to_all: rank {a} sends {parts[a].source_splits[b]} rows to rank {b}, which expects "
                    f"{parts[b].target_splits[a]}"
                )
    blocks = []
    for part in parts:
        data, rows = _bytes(part.source), sum(part.source_splits)
        row_bytes = len(data) // rows if rows else 0
        blocks.append(data.split([count * row_bytes for count in part.source_splits]))
    return [torch.cat([blocks[a][b] for a in ranks]) for b in ranks]


def _all_gather(parts: Sequence[Contribution]) -> list[torch.Tensor | None]:
    return [torch.cat(_sources(parts))] * len(parts)


def _root_of(parts: Sequence[Contribution]) -> int:
    root: int = parts[0].agreed[1]
    return root


def _gather(parts: Sequence[Contribution]) -> list[torch.Tensor | None]:
    root = _root_of(parts)
    return [torch.cat(_sources(parts)) if rank == root else None for rank in range(len(parts))]


def _scatter(parts: Sequence[Contribution]) -> list[torch.Tensor | None]:
    data = _bytes(parts[_root_of(parts)].source)
    return list(data.view(len(parts), -1).unbind(0)) if len(data) else [data] * len(parts)


def _broadcast(parts: Sequence[Contribution]) -> list[torch.Tensor | None]:
    return [_sources(parts)[_root_of(parts)].clone()] * len(parts)


def _reduced(parts: Sequence[Contribution]) -> torch.Tensor:
    _sources(parts)  # of equal sizes
    combine = _COMBINE[parts[0].agreed[-1]]
    total: torch.Tensor | None = None
    for part in parts:
        assert part.source is not None
        values = part.source.detach().reshape(-1)
        total = values.clone() if total is None else combine(total, values)
    assert total is not None
    return total


def _reduce(parts: Sequence[Contribution]) -> list[torch.Tensor | None]:
    return [_reduced(parts) if rank == _root_of(parts) else None for rank in range(len(parts))]


def _reduce_scatter(parts: Sequence[Contribution]) -> list[torch.Tensor | None]:
    total = _reduced(parts)
    return list(total.view(len(parts), -1).unbind(0)) if len(total) else [total] * len(parts)


_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}

_RESULTS: dict[str, Callable[[Sequence[Contribution]], list[torch.Tensor | None]]] = {
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "broadcast": _broadcast,
    "all_reduce": lambda parts: [_reduced(parts)] * len(parts),
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "barrier": lambda parts: [None] * len(parts),
}
