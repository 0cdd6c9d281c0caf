"""The time of one micro-batch of a layer: its exchanges, its computation and what is lent, some of it side by side.

A forward pass sends tokens out, computes, and sends rows home; weights that are lent set out behind the tokens and travel while a
rank computes with its own experts. A backward pass brings the gradients of outputs, and computes those of guests first; their
weights' gradients then travel while the rank computes with its own experts, and sends the gradients of rows back. Products for
weights' gradients that are put off (:meth:`~commlayer.integrations.moe.experts.GroupedExperts.weight_gradients_last`) run beside
that.

Transfers that meet on the links share these: they end together, as if one had gone behind the other. Nothing else is taken to be
hidden: chunks, and what other layers do meanwhile, are the same under every placement.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from commlayer.scheduler.placement.expert_placement import Array

__all__ = ["MicroBatch"]


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch, all in µs.

    Attributes:
        exchange_us: all tokens, one way.
        inside_us: the part of it, inside nodes, that gradients of rows take before products that were put off begin.
        own_us, guests_us: forward computation of each rank, [ranks], with the experts that lie there, and with guests.
        puts_off: whether products for the gradients of own weights run beside the gradients of rows.
    """

    exchange_us: float
    inside_us: float
    own_us: Array
    guests_us: Array
    puts_off: bool

    @cached_property
    def computed_us(self) -> float:
        """The slowest rank's computation, forward and backward."""
        return 3 * float((self.own_us + self.guests_us).max())

    def total_us(self, lend_us: float, return_us: float) -> float:
        """Time the micro-batch, where weights that are lent take ``lend_us``, and gradients on their way back ``return_us``."""
        import numpy as np

        own, guests = self.own_us, self.guests_us
        waited: Array = np.where(guests > 0, own.clip(lend_us), own)
        forward_us = float((waited + guests).max())
        of_rows = 2 * guests + own if self.puts_off else 2 * (guests + own)
        came_back_us = 2 * float(guests.max()) + return_us
        backward_us = max(float(of_rows.max()), came_back_us) + self.exchange_us
        if self.puts_off:
            backward_us = max(backward_us, float((of_rows + own).max()) + self.inside_us)
        return 3 * self.exchange_us + forward_us + backward_us
