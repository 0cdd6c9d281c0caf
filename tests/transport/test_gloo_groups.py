"""Groups of Gloo that run one call at a time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from commlayer.transport.gloo_groups import gloo_in_order


class OptionsWithoutName:
    """The fields of Gloo's options in torch 2.6 and 2.7; others cannot be set."""

    __slots__ = ("_devices", "_threads", "_timeout")


class GlooWithoutName:
    """Gloo as torch 2.6 has it: with options that take no name. Makes a group of today's torch from them."""

    _Options = OptionsWithoutName
    create_default_device = staticmethod(dist.ProcessGroupGloo.create_default_device)
    create_device = staticmethod(dist.ProcessGroupGloo.create_device)

    def __new__(cls, store: Any, rank: int, size: int, options: OptionsWithoutName) -> Any:
        todays: Any = real_gloo._Options()
        for field in OptionsWithoutName.__slots__:
            setattr(todays, field, getattr(options, field))
        return real_gloo(store, rank, size, todays)


real_gloo: Any = dist.ProcessGroupGloo


def test_a_group_is_made_where_options_have_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupGloo", GlooWithoutName)
    group: Any = gloo_in_order(HashStore(), 0, 1, timedelta(seconds=9))
    assert (group.rank(), group.size(), group.options._threads) == (0, 1, 1)
