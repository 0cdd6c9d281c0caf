"""The maximum of the call before, agreed on in the background."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.autograd.profiler import profile

from commlayer.agree.maximum import AgreedMaximum


class Group:
    """Stands for a Gloo group: an operation of torch's shows whether the profiler would see the call."""

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> None:
        tensors[0].neg()


def test_a_profiler_does_not_see_what_may_end_after_it() -> None:
    agreed = AgreedMaximum(cast(Any, Group()), cast(Any, None))
    with profile() as seen:
        agreed.exchange(5, 1.0)
        torch.ones(1).cos()
    names = {event.name for event in seen.function_events or ()}
    assert "aten::neg" not in names
    assert "aten::cos" in names, "what comes after it is seen again"
