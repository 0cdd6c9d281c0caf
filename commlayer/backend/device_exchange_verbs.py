"""The verbs of a group on a device's tensors whose ranks bring different sizes, and those in a wire format.

An all_to_all in two levels needs the counts of all ranks, on the host, before it is launched: with splits its ranks tell them
once for each call, and the host waits for that, not for the device. Where all splits are even, or the caller knows everybody's
counts, as a dispatch of tokens does, nothing is told. The other verbs need only this rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import AllToAllOptions, Work

from commlayer.backend.arithmetic import AVG
from commlayer.backend.device_verbs import DeviceVerbs, LaunchedWork, is_dense
from commlayer.backend.members import Members
from commlayer.backend.own_sums import wires_of_own_sum
from commlayer.calls.counters import GroupCounters
from commlayer.engine.device_plans import DevicePlans
from commlayer.engine.device_splits import Counts, DeviceSplits
from commlayer.engine.group_plans import Choices
from commlayer.profiles.errors import DisagreementError, TensorError
from commlayer.scheduler.plan import Plan, Span
from commlayer.scheduler.rails import exchange_over
from commlayer.scheduler.wire import WireFormat
from commlayer.transport.nccl import Nccl
from commlayer.wire.codecs import Codec

__all__ = ["DeviceExchangeVerbs", "TellCounts"]

TellCounts = Callable[[Sequence[int]], list[list[int]]]
"""Tells all ranks of a group this one's numbers, over the host, and returns everybody's. Collective."""


class DeviceExchangeVerbs(DeviceVerbs):
    """:class:`DeviceVerbs` with these. ``tell`` exchanges counts. ``sum_formats``: the formats in which the group's own FP32 sums
    may go (its ``GroupOptions``); none: as they are."""

    def __init__(
        self,
        inner: Nccl,
        plans: DevicePlans,
        counters: GroupCounters,
        members: Members,
        tell: TellCounts,
        sum_formats: tuple[WireFormat, ...] = (),
    ) -> None:
        super().__init__(inner, plans, counters)
        self._members, self._tell, self._sum_formats = members, tell, sum_formats
        self._splits = DeviceSplits(plans)

    @property
    def choices(self) -> Choices:
        """The choices of plans for these tensors."""
        return self._plans.choices

    def find_out(self, device: torch.device) -> None:
        """See :meth:`commlayer.engine.device_plans.DevicePlans.find_out`."""
        self._plans.find_out(device)

    # all_to_all

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, received: Sequence[int], sent: Sequence[int], opts: Any
    ) -> Work:
        """Rows of ``input`` by ``sent`` (empty: even) go to the ranks; ``output`` receives by ``received``.

        Whether a call has splits, like its dtype, is the same on all ranks. They have been checked.
        """
        if self._is_coalescing:  # communicators are not made inside a block
            return self._inner_all_to_all(output, input, received, sent, opts)
        self._require_alike("all_to_all", output, input)
        self.find_out(input.device)
        if not self._may_plan_exchanges:
            return self._inner_all_to_all(output, input, received, sent, opts)
        if received or sent:
            counts = self._told(_bytes_of(input, sent, self._size), _bytes_of(output, received, self._size))
        else:
            counts = ((input.nbytes // self._size,) * self._size,) * self._size
        return self._by_counts(output, input, counts) or self._inner_all_to_all(output, input, received, sent, opts)

    def start_known_exchange(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        rows: tuple[Sequence[int], Sequence[int]],
        counts: Counts,
    ) -> Work:
        """An all_to_all of which all ranks know ``counts``, in bytes; ``rows`` that go to each rank, and come from it."""
        self.find_out(source.device)
        work = self._by_counts(target, source, counts) if self._may_plan_exchanges else None
        return work or self._inner_all_to_all(target, source, list(rows[1]), list(rows[0]), AllToAllOptions())

    def start_over(
        self,
        span: Span,
        source: torch.Tensor,
        target: torch.Tensor,
        splits: tuple[Sequence[int], Sequence[int]],
        most: int,
    ) -> Work:
        """See :meth:`commlayer.backend.encodings.Encodings.start_over`."""
        plan = exchange_over(span, self.choices.shape, most)
        launched = self._splits.over(plan, source, target, (tuple(splits[0]), tuple(splits[1])))
        return self._counted(plan, "all_to_all_v", source.nbytes, launched, [target])

    @property
    def _may_plan_exchanges(self) -> bool:
        """Whether an all_to_all of any size has a plan. The same on all ranks."""
        choices = self.choices
        if choices.size == 1 or len(choices.shape) == 1:
            return False
        return self._forced is not None if choices.is_forced else choices.two_level_may_pay

    @property
    def _forced(self) -> Plan | None:
        return self.choices.plan("all_to_all_v", 1)  # the size decides nothing

    def _by_counts(self, output: torch.Tensor, input: torch.Tensor, counts: Counts) -> Work | None:
        """The call by its plan; None: the inner backend's own. The same on all ranks, for they know the same counts."""
        largest = max(*map(sum, counts), *map(sum, zip(*counts, strict=True)))
        if not largest:
            return None
        choices = self.choices
        plan = self._forced if choices.is_forced else choices.plan("all_to_all_v", 1 << (largest - 1).bit_length())
        if plan is None:
            return None
        for name, x in (("input", input), ("output", output)):
            if not x.is_contiguous():
                raise TensorError(
                    f"{self._members.who}: all_to_all on {x.device} needs contiguous tensors, got strides {list(x.stride())} for "
                    f"the {name}: call contiguous() before"
                )
        launched = self._splits.all_to_all(plan, input.detach(), output.detach(), counts)
        return self._counted(plan, "all_to_all", input.nbytes, launched, [output])

    def _inner_all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, received: Sequence[int], sent: Sequence[int], opts: Any
    ) -> Work:
        work: Work = self.__getattr__("all_to_all_single")(output, input, received, sent, opts)
        return work

    def _told(self, sent: Sequence[int], received: Sequence[int]) -> Counts:
        """Everybody's counts, in bytes. Raises DisagreementError, on all ranks, where two of them do not fit together."""
        size = self._size
        everyones = self._tell([*sent, *received])
        counts = tuple(tuple(each[:size]) for each in everyones)
        for sender, row in enumerate(counts):
            for receiver, count in enumerate(row):
                expected = everyones[receiver][size + sender]
                if count != expected:
                    ranks = self._members.global_ranks
                    raise DisagreementError(
                        f"{self._members.who}: all_to_all: rank {ranks[sender]} sends {count} bytes to rank {ranks[receiver]}, "
                        f"which expects {expected}; nothing was sent: make the splits of both fit"
                    )
        return counts

    # Wire formats

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> Work:
        """See :meth:`DeviceVerbs.allreduce`; in a wire format where the group's options have one for the sum."""
        x = tensors[0]
        if not self._sum_formats or len(tensors) > 1:
            return super().allreduce(tensors, opts)
        work = self._encoded_sum("all_reduce", x, x, opts.reduceOp.op)
        return super().allreduce(tensors, opts) if work is None else work

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        """See :meth:`DeviceVerbs.reduce_scatter_single`; likewise."""
        if not self._sum_formats or input.nbytes != self._size * output.nbytes:
            return super().reduce_scatter_single(output, input, opts)
        self._require_alike("reduce_scatter", output, input)
        work = self._encoded_sum("reduce_scatter", input, output, opts.reduceOp.op)
        return super().reduce_scatter_single(output, input, opts) if work is None else work

    def _encoded_sum(self, collective: str, source: torch.Tensor, target: torch.Tensor, op: Any) -> Work | None:
        """Launch one of the group's own sums in a format, where that is chosen; None where it is not. NaN and infinity pass."""
        if self._is_coalescing or not is_dense(source) or not is_dense(target):
            return None
        wires = wires_of_own_sum(self._sum_formats, source, target, op)
        if not wires:
            return None
        self.find_out(source.device)
        plan = self.choices.plan(
            collective, source.nbytes, is_float=True, wires=wires, element_bytes=source.element_size()
        )
        if plan is None or plan.wire.is_native:
            return None
        blocks = None if collective == "all_reduce" else (target.nbytes,) * self._size
        call, sent = self._splits.encoded(plan, source, target, blocks, Codec(plan.wire, source.dtype, "pass"))
        if op == AVG:
            self._divide(call, target)
        return self._counted(plan, collective, plan.traffic.logical_bytes, (call, sent), [target])

    def start_encoded(
        self, plan: Plan, source: torch.Tensor, target: torch.Tensor, blocks: Sequence[int] | None, codec: Codec
    ) -> Work:
        """See :meth:`commlayer.backend.encodings.Encodings.start`."""
        launched = self._splits.encoded(plan, source, target, blocks, codec)
        return self._counted(plan, plan.traffic.collective, plan.traffic.logical_bytes, launched, [target])

    def start_encoded_exchange(
        self,
        plan: Plan,
        source: torch.Tensor,
        target: torch.Tensor,
        splits: tuple[Sequence[int], Sequence[int]],
        codec: Codec,
    ) -> Work:
        """See :meth:`commlayer.backend.encodings.Encodings.start_exchange`."""
        own = tuple(splits[0]), tuple(splits[1])
        launched = self._splits.encoded_exchange(plan, source, target, own, codec)
        return self._counted(plan, plan.traffic.collective, source.nbytes, launched, [target])

    def _counted(self, plan: Plan, collective: str, num_bytes: int, launched: Any, outputs: Any) -> Work:
        call, sent = launched
        self._counters.planned[collective, plan.name].add(num_bytes, 0, *sent)
        return LaunchedWork(self._plans, call, outputs)


def _bytes_of(x: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Rows for each of ``size`` ranks (empty: even) → bytes."""
    if not splits:
        return [x.nbytes // size] * size
    rows = sum(splits)
    return [count * x.nbytes // rows if rows else 0 for count in splits]
