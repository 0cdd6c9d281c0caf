"""A dispatcher that sorts wrongly, to show that a comparison of losses notices: two rows change places."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from commlayer.integrations.moe import dispatch_kinds, levels, row_maps
from commlayer.integrations.moe.row_maps import Permutation, RowMap

__all__ = ["sorted_wrongly"]


@contextlib.contextmanager
def sorted_wrongly() -> Iterator[None]:
    """Inside, the first and the last row of every map, and of every order by expert, change places."""

    def wrong_map(*args: Any, **options: Any) -> RowMap:
        made = row_maps.make_row_map(*args, **options)
        _swap(made.token_of_row)
        return made

    def wrong_order(*args: Any) -> Permutation | None:
        found = row_maps.regroup(*args)
        if found is not None:
            _swap(found.order)
            _swap(found.inverse)
        return found

    with contextlib.ExitStack() as patches:
        for module in (levels, dispatch_kinds):
            patches.enter_context(mock.patch.object(module, "make_row_map", wrong_map))
        patches.enter_context(mock.patch.object(dispatch_kinds, "regroup", wrong_order))
        yield


def _swap(places: torch.Tensor) -> None:
    if places.numel():
        ends = torch.tensor([0, -1])
        places[ends] = places[ends.flip(0)]
