"""The governor of wire formats, which watches what a format does to the values, and leaves it where the error exceeds
its budget.

One call in ``sample_every``, on average, measures the relative error ‖decoded − x‖ / ‖x‖ of its own tensor on each rank; the
largest over ranks decides, so that all ranks leave a format at the same call. Rejected: each rank by itself, which would be a
deadlock; every call, which would cost as much as encoding once more; and every n-th call, which would look at the same bucket
of a model's gradients for ever where their number divides n. So chance decides, by a generator that all ranks have alike.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from commlayer.agree.maximum import settle_maximum
from commlayer.profiles.printable import warn
from commlayer.scheduler.wire import WireFormat, WirePolicy

__all__ = ["Governor"]

Measure = Callable[[WireFormat], tuple[float, float]]
"""The type of functions that measure a format: the squared norms of this rank's error, and of its tensor."""


class Governor:
    """The formats that a policy still allows for one kind of transfer.

    Attributes:
        formats: those that remain.
        errors: the latest measured relative error of each format, the largest over ranks.
    """

    def __init__(self, group: dist.ProcessGroup, policy: WirePolicy, name: str) -> None:
        self._group, self._policy, self._name = group, policy, name
        self.formats = policy.formats
        self.errors: dict[WireFormat, float] = {}
        self._calls = 0
        self._chance = random.Random(0)

    def allowed(self, usable: Sequence[WireFormat], measure: Measure) -> tuple[WireFormat, ...]:
        """Return those of ``usable`` that this call may take. Collective where a sample is due. Samples every format
        that may be chosen, the coarsest first: each that stays within the budget says so, and each that does not is
        left for good.
        """
        policy = self._policy
        self._calls += 1
        is_due = self._calls == 1 or self._chance.random() * policy.sample_every < 1
        if policy.error_budget is not None and is_due:
            for wire_format in sorted(usable, key=list(WireFormat).index, reverse=True):
                if wire_format is not WireFormat.NATIVE and wire_format in self.formats:
                    self._judge(wire_format, measure, policy.error_budget)
        return tuple(each for each in usable if each in self.formats) or (WireFormat.NATIVE,)

    def _judge(self, wire_format: WireFormat, measure: Measure, budget: float) -> None:
        error, norm = measure(wire_format)
        own_error = math.sqrt(error / norm) if norm > 0 else 0.0
        worst = torch.tensor([own_error if math.isfinite(own_error) else math.inf], dtype=torch.float64)
        settle_maximum(worst, self._group, f"to agree on the error of {wire_format} of {self._name}")
        self.errors[wire_format] = float(worst)
        if self.errors[wire_format] <= budget:
            return
        self.formats = tuple(each for each in self.formats if each is not wire_format) or (WireFormat.NATIVE,)
        if self._group.rank() == 0:
            warn(
                f"commlayer: {self._name}: {wire_format} has a relative error of {self.errors[wire_format]:.2g} in call "
                f"{self._calls}, more than the budget of {budget:.2g}: it is not used any more; from now on "
                f"{' or '.join(map(str, self.formats))}",
                stacklevel=2,
            )
