"""The wire formats of a group's calls: which one a call takes, decided alike on all ranks, and starting it.

For each call a :class:`WireDecider` finds which formats its policy and its governor allow for the tensor, and which of them the
planner finds fastest, native among them. What is native goes the group's own way.

The plans encode, send and decode by chunks: on the CPU as its messages come (:mod:`commlayer.engine.encoded`), on a device on
streams (:mod:`commlayer.engine.device_plans`). Where the group plans nothing for a device, its tensors go flat: encoded at once,
moved by one call of the group, decoded at once (:mod:`commlayer.engine.encoded_flat`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from commlayer.agree.maximum import settle_maximum
from commlayer.agree.messages import require_alike
from commlayer.calls.movement import Movement
from commlayer.engine.encoded_flat import FlatEncoded, require_finite
from commlayer.engine.progress import DONE
from commlayer.profiles.errors import TensorError
from commlayer.profiles.links import Resource
from commlayer.scheduler.group_strategies import build
from commlayer.scheduler.plan import Plan, Strategy
from commlayer.scheduler.traffic import Traffic
from commlayer.scheduler.wire import NATIVE, Wire, WireFormat, WirePolicy
from commlayer.wire.codecs import Codec
from commlayer.wire.governor import Governor

__all__ = ["WireDecider", "row_elements"]

_BF16 = (torch.float32,)
_FP8 = (torch.float32, torch.bfloat16, torch.float16)


class WireDecider:
    """Decides in which format each call of ``group`` goes, under a policy. ``name`` is for messages, such as the lane.

    Tensors are [rows, …], contiguous, on the CPU or a device. All ranks decide alike, with one policy.
    """

    def __init__(self, group: dist.ProcessGroup, policy: WirePolicy, name: str) -> None:
        self.group, self.policy, self.name = cast("Any", group), policy, name
        self.governor = Governor(group, policy, name)
        self._agreed: set[tuple[object, ...]] = set()
        self._codecs: dict[tuple[Wire, torch.dtype, str], Codec] = {}

    # Starting

    def start(
        self,
        plan: Plan,
        out: torch.Tensor,
        x: torch.Tensor,
        blocks: Sequence[int] | None = None,
        splits: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> dist.Work:
        """Start a call by a plan of :meth:`plan`: an all_to_all with ``splits``, the bytes that go to each rank, and that come
        from it; else an all_gather, reduce_scatter or all_reduce (``out`` is ``x``).

        ``blocks``: the bytes that each rank owns; None: as the plan deals them out, in an all_reduce. In an all_to_all rows go
        as they are to ranks of this rank's node, where the group has other nodes.
        """
        codec = self._codec(plan.wire, x)
        if x.is_cpu or self.group.plans_on_device(x):
            if not x.is_cpu:
                # What a step finds there nobody hears of, so all ranks ask for NaN and infinity before they launch.
                require_finite(self.group, codec, x)
                codec = self._codec(plan.wire, x, "pass")
            if splits is None:
                movement = Movement(plan, x, out, "encoded", blocks=blocks, codec=codec)
            else:
                movement = Movement(plan, x, out, "encoded exchange", splits=splits, codec=codec)
            return cast("dist.Work", self.group.start_planned(movement))
        flat = FlatEncoded(self.group, codec)
        if splits is not None:
            return flat.all_to_all(out, x, splits)
        if blocks is None:
            return flat.all_reduce(x)
        return (flat.all_gather if plan.traffic.collective == "all_gather" else flat.reduce_scatter)(out, x, blocks)

    # Deciding

    def plan(self, collective: str, x: torch.Tensor, num_bytes: int, shaped: torch.Tensor) -> Plan | None:
        """Find the plan of a call in a wire format; None: it goes as it is.

        ``num_bytes``: what all ranks know; ``shaped``: of the rows to be encoded, ``x`` the values that this rank has.
        """
        if self.governor.formats == (WireFormat.NATIVE,) or num_bytes == 0:
            return None
        width = max(1, row_elements(shaped))
        self._agree_once(collective, x.dtype, width)
        usable = self._usable(x.dtype, width)

        def error(wire_format: WireFormat) -> tuple[float, float]:
            # Of finite values: no rank must leave here alone, and encoding will say that there are others.
            wire = self._wire(wire_format, width)
            return Codec(wire, x.dtype, "pass").error(x.reshape(-1, wire.row_elements))

        formats = self.governor.allowed(usable, error)
        if formats == (WireFormat.NATIVE,):
            return None
        wires = tuple(self._wire(each, width) for each in formats)
        plan: Plan | None = self.group.encoded_plan(collective, num_bytes, wires, x.element_size(), x)
        return None if plan is None or plan.wire.is_native else plan

    def wires(self, width: int, dtype: torch.dtype) -> tuple[Wire, ...]:
        """The forms that the policy allows rows of ``width`` elements: equal on all ranks of all groups that have it, unlike what
        the governor has left of them."""
        return tuple(self._wire(each, width) for each in self._usable(dtype, width))

    def _usable(self, dtype: torch.dtype, width: int) -> tuple[WireFormat, ...]:
        """The formats that the policy allows for rows of ``width`` elements. Raises TensorError where it allows nothing."""
        formats: list[WireFormat] = []
        for each in self.policy.formats:
            if each is WireFormat.NATIVE:
                formats.append(each)
            elif dtype in (_FP8 if each.is_scaled else _BF16):
                if self._wire(each, width).ratio(dtype.itemsize) < 1:
                    formats.append(each)
            elif each is WireFormat.BF16 and dtype in _FP8:
                formats.append(WireFormat.NATIVE)  # as few bytes as they are
        if not formats:
            names = " or ".join(map(str, self.policy.formats))
            raise TensorError(
                f"rank {dist.get_rank()}, {self.name}: {names} is for floating point of 32 bits or less, in rows that are longer "
                f"than their scales; got rows of {width} elements of {dtype}: allow native too, send another dtype, or view the "
                "tensor as longer rows"
            )
        return tuple(dict.fromkeys(formats))

    def _wire(self, wire_format: WireFormat, width: int) -> Wire:
        if wire_format is WireFormat.NATIVE:
            return NATIVE
        if not wire_format.is_scaled:
            return Wire(wire_format)
        return Wire(wire_format, width, self.policy.scaling, self.policy.power_of_two)

    def _codec(self, wire: Wire, x: torch.Tensor, non_finite: str = "") -> Codec:
        key = wire, x.dtype, non_finite or self.policy.non_finite
        if key not in self._codecs:
            self._codecs[key] = Codec(*key)
        return self._codecs[key]

    def start_in_place(self, out: torch.Tensor, x: torch.Tensor, blocks: Sequence[int]) -> dist.Work:
        """Start a reduce_scatter in the memory of ``x``, which is left undefined; ``out`` may be this rank's rows of it.

        Raises TensorError for uneven ``blocks``, in bytes, or another dtype than FP32.
        """
        if x.dtype is not torch.float32 or len(set(blocks)) > 1 or not x.is_cpu or not x.is_contiguous():
            raise TensorError(
                f"rank {dist.get_rank()}, {self.name}: in_place is for contiguous FP32 tensors on the CPU, as many rows "
                f"for each rank; got {x.dtype} on {x.device}, {list(blocks)} bytes: leave in_place out"
            )
        self._agree_once("reduce_scatter in place", x.dtype, x.numel())
        if not x.numel():
            return DONE
        size, wire = self.group.size(), Wire(WireFormat.BF16)
        nodes = (size,)  # the scheme has one level, and moves of its own
        traffic = Traffic(x.nbytes, size, 1, Resource.INTRA, "reduce_scatter", nodes, wires=(wire,), element_bytes=4)
        plan = build(traffic, Strategy.DIRECT, wire=wire)
        movement = Movement(plan, x.detach(), out.detach(), "in place")
        return cast("dist.Work", self.group.start_planned(movement))

    # Agreeing

    def agree_rows(self, x: torch.Tensor, out: torch.Tensor) -> int:
        """Agree on the largest number of rows that any rank sends or receives. Collective."""
        most = torch.tensor([max(x.shape[0], out.shape[0])], dtype=torch.int64)
        settle_maximum(most, self.group, f"to agree on the largest number of rows of {self.name}")
        return int(most)

    def _agree_once(self, collective: str, dtype: torch.dtype, width: int) -> None:
        """At the first call of a kind: that all ranks make the same; later ones are compared under COMMLAYER_DEBUG=detail, as all
        calls of a group are. Raises DisagreementError."""
        key = collective, dtype, width
        if key in self._agreed:
            return
        own_words = {
            f"the call of {self.name} (nothing was sent)": f"{collective} of {dtype}, rows of {width} elements",
            f"the policy of {self.name} (nothing was sent)": str(self.policy),
        }
        require_alike(own_words, self.group, f"to compare the first {collective} of {self.name}")
        if len(self._agreed) >= 4096:
            self._agreed.clear()
        self._agreed.add(key)


def row_elements(x: torch.Tensor) -> int:
    """Elements of a row."""
    return math.prod(x.shape[1:])
