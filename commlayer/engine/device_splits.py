"""Calls of one group on tensors of a device whose ranks bring different sizes, and those in a wire format, launched on streams.

Beside :class:`commlayer.engine.device_plans.DevicePlans`, whose communicators and memory they use. All sizes are known before a
call is launched, on the host: those of this rank, and for an all_to_all in two levels those of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from commlayer.engine.device_plans import DevicePlans
from commlayer.engine.encoded import RowCoder
from commlayer.engine.reducers import reducer
from commlayer.engine.runner import Prepared, Sent
from commlayer.scheduler.encoded_moves import encoded_moves, exchange_moves
from commlayer.scheduler.group_moves import Group, owned_blocks
from commlayer.scheduler.kept import Kept
from commlayer.scheduler.moves import Moves
from commlayer.scheduler.plan import Buffer, Plan
from commlayer.scheduler.rails import SplitRows
from commlayer.scheduler.two_level import TwoLevel
from commlayer.transport.contract import Coder, Reducer
from commlayer.transport.streams import StreamCall
from commlayer.wire.codecs import Codec

__all__ = ["Counts", "DeviceSplits"]

Counts = tuple[tuple[int, ...], ...]
"""Bytes that each member of a group sends to each other one."""
Splits = tuple[tuple[int, ...], tuple[int, ...]]
Launched = tuple[StreamCall, Sent]
_MAX_KEPT = 64
"""Exchanges whose moves are kept: some kilobytes each, and a dropless layer never has the same splits again."""
_Found = tuple[Sequence[Moves], Mapping[Buffer, int]]


class DeviceSplits:
    """Launches them on the streams of ``plans``. One call at a time, in the same order on all ranks; contiguous tensors.

    Each returns the call, and what this rank sends in it; see :meth:`commlayer.engine.device_plans.DevicePlans.launch`.
    """

    def __init__(self, plans: DevicePlans) -> None:
        self.plans = plans
        self._kept = Kept[tuple[object, ...], Prepared](_MAX_KEPT)

    def all_to_all(self, plan: Plan, source: torch.Tensor, target: torch.Tensor, counts: Counts) -> Launched:
        """An all_to_all in two levels, of which all ranks know ``counts``: nobody tells them on the way."""

        def moves() -> _Found:
            me = self.plans.rank
            place = TwoLevel(self.plans.nodes, me, counts[me], [sent[me] for sent in counts])
            steps, transit = place.known(counts)
            return steps, {Buffer.STAGING: place.staging_bytes, Buffer.TRANSIT: transit}

        return self._launch(plan, (counts,), moves, source, target)

    def over(self, plan: Plan, source: torch.Tensor, target: torch.Tensor, splits: Splits) -> Launched:
        """An all_to_all among the ranks of each rail or node: see :meth:`commlayer.engine.planned.PlannedGroup.run_over`."""
        rows = SplitRows(self.plans.rank, *splits)
        return self._launch(plan, splits, lambda: (plan.moves(rows), {}), source, target)

    def encoded(
        self, plan: Plan, source: torch.Tensor, target: torch.Tensor, blocks: Sequence[int] | None, codec: Codec
    ) -> Launched:
        """An all_gather, reduce_scatter or all_reduce in a wire format: see :meth:`commlayer.engine.encoded.EncodedGroup.run`."""
        if blocks is None:
            blocks = owned_blocks(plan, self.plans.nodes, plan.traffic.cut_bytes(plan.wire))
        owned = tuple(blocks)

        def moves() -> _Found:
            steps, staging, encoded, arrived = encoded_moves(plan, Group(self.plans.nodes, self.plans.rank, owned))
            return steps, {Buffer.STAGING: staging, Buffer.ENCODED: encoded, Buffer.ARRIVED: arrived}

        reduce = reducer(source.dtype, "sum")
        return self._launch(plan, ("blocks", owned), moves, source, target, reduce, RowCoder(codec))

    def encoded_exchange(
        self, plan: Plan, source: torch.Tensor, target: torch.Tensor, splits: Splits, codec: Codec
    ) -> Launched:
        """An all_to_all in a wire format: see :meth:`commlayer.engine.encoded.EncodedGroup.run_exchange`."""

        def moves() -> _Found:
            group = Group(self.plans.nodes, self.plans.rank, ())
            steps, encoded, arrived = exchange_moves(plan, group, *splits)
            return steps, {Buffer.ENCODED: encoded, Buffer.ARRIVED: arrived}

        return self._launch(plan, splits, moves, source, target, None, RowCoder(codec))

    def _launch(
        self,
        plan: Plan,
        key: tuple[object, ...],
        moves: Callable[[], _Found],
        source: torch.Tensor,
        target: torch.Tensor,
        reduce: Reducer | None = None,
        coder: Coder | None = None,
    ) -> Launched:
        runner = self.plans.runner_on(source.device)
        prepared = self._kept.get((id(plan), *key))
        if prepared is None:  # not the runner's own, of which other calls' plans are kept too
            steps, sizes = moves()
            sizes = {buffer: size for buffer, size in sizes.items() if size}
            prepared = self._kept.add((id(plan), *key), runner.prepare(plan, steps, sizes))
        return self.plans.start(prepared, source, target, reduce, coder), prepared.sent
