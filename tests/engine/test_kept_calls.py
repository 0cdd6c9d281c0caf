"""Calls on the same tensors again: found while the tensors and their memory are there, and forgotten with them."""

from __future__ import annotations

import gc
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from simulated.torch_device import simulated_device
from simulated.torch_streams import StreamDelays

from commlayer.engine.kept_calls import KeptCall, KeptCalls
from commlayer.testing.plugin import ClusterFactory
from commlayer.transport import stream_scripts


def call_on(*tensors: torch.Tensor) -> KeptCall:
    """A call that holds slices of tensors, as bound steps do."""
    return cast("KeptCall", ([x.detach()[:1] for x in tensors], None))


def test_a_call_is_found_while_its_memory_is_where_it_was() -> None:
    kept, x, y = KeptCalls(), torch.zeros(8), torch.zeros(8)
    call = call_on(x, y)
    kept.add("both", x, y, call)
    assert kept.find("both", x, y) is call
    assert kept.find("other", x, y) is None
    y.data = torch.zeros(8)
    assert kept.find("both", x, y) is None
    kept.clear()
    assert kept.find("both", x, y) is None


def test_a_call_goes_with_either_of_its_tensors() -> None:
    kept, x, y = KeptCalls(), torch.zeros(8), torch.zeros(8)
    kept.add("both", x, y, call_on(x, y))
    kept.add("one", x, x, call_on(x))
    del y
    gc.collect()
    assert len(kept) == 1
    del x
    gc.collect()
    assert len(kept) == 0


def test_the_oldest_goes_where_there_are_too_many() -> None:
    kept, tensors = KeptCalls(most=2), [torch.zeros(1) for _ in range(3)]
    for index, x in enumerate(tensors):
        kept.add(index, x, x, call_on(x))
    assert [kept.find(index, x, x) is not None for index, x in enumerate(tensors)] == [False, True, True]


# On a device


def again() -> tuple[int, list[float], int]:
    """How many steps of calls were bound, its sums, and what memory a tensor leaves behind that is gone."""
    device = simulated_device(StreamDelays(seed=2, chance=0.5))
    dist.init_process_group("commlayer")
    step, bound = stream_scripts._Binder.step, 0

    def counted(self: Any, each: Any) -> Any:
        nonlocal bound
        bound += 1
        return step(self, each)

    stream_scripts._Binder.step = counted  # type: ignore[method-assign, assignment]
    module, x, sums = torch.get_device_module(device), torch.ones(1000, device=device), []
    for _ in range(4):
        dist.all_reduce(x)
        sums.append(x[-1].item())
        x.fill_(len(sums) + 1.0)

    def held_after_another() -> int:
        y = torch.ones(5000, device=device)
        dist.all_reduce(y)
        assert y[-1].item() == 2.0
        del y
        for _ in range(3):  # handles of calls go with later ones
            module.synchronize()
            dist.all_reduce(x)
        module.synchronize()
        held: int = module.memory_allocated()
        return held

    first = held_after_another()  # with the staging memory of so large a call, which is kept
    left = held_after_another() - first
    dist.destroy_process_group()
    return bound, sums, left


def test_the_same_call_again_builds_nothing(emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMLAYER_PLAN", "flat_direct")
    for bound, sums, left in emulated_cluster(1, 2).run(again):
        assert sums == [2.0, 4.0, 6.0, 8.0]
        # Of 12 calls: the three steps of x's first, of those of two larger tensors, and of x's first with more staging memory.
        assert bound == 12
        assert left == 0
