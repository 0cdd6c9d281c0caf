"""Collectives of a process group whose elements may cross the links in a wire format.

``CompressedGroup`` decides for each call, alike on all ranks: which formats its policy and its governor allow for the tensor,
which of them the planner finds fastest, native among them; then it runs that. What is native goes the group's own way.

The plans encode, send and decode by chunks: on the CPU as its messages come (:mod:`commlayer.engine.encoded`), on a device on
streams (:mod:`commlayer.engine.device_plans`). Where the group plans nothing for a device, its tensors go flat: encoded at once,
moved by one call of the group, decoded at once (:mod:`commlayer.engine.encoded_flat`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from commlayer.agree.maximum import settle_maximum
from commlayer.agree.messages import require_alike
from commlayer.engine.encoded_flat import FlatEncoded, require_finite
from commlayer.engine.plain import plain
from commlayer.engine.progress import DONE
from commlayer.profiles.errors import GroupError, TensorError, UsageError
from commlayer.profiles.links import Resource
from commlayer.scheduler.group_strategies import build
from commlayer.scheduler.plan import Plan, Strategy
from commlayer.scheduler.traffic import Traffic
from commlayer.scheduler.wire import NATIVE, Wire, WireFormat, WirePolicy
from commlayer.transport.c10d import all_gather_single, reduce_scatter_single
from commlayer.wire.codecs import Codec
from commlayer.wire.governor import Governor

__all__ = ["CompressedGroup"]

Rows = Sequence[int] | None
_BF16 = (torch.float32,)
_FP8 = (torch.float32, torch.bfloat16, torch.float16)


class CompressedGroup:
    """The collectives of ``group``, of backend ``commlayer``, under a policy. ``name`` is for messages, such as the lane.

    Tensors are [rows, …], contiguous, on the CPU or a device. All verbs are asynchronous and return a Work; sums are FP32,
    in an order that does not depend on the run, and all ranks hold the same bits. All ranks call alike, with one policy.

    Raises GroupError for a group of another backend, UsageError for what is no policy.
    """

    def __init__(self, group: dist.ProcessGroup, policy: WirePolicy, name: str) -> None:
        if dist.get_backend(group) != "commlayer":
            raise GroupError(
                f"rank {dist.get_rank()}: wire formats need a group of backend commlayer, this one has "
                f"{dist.get_backend(group)}: make one with commlayer.integrations.planned_group(group)"
            )
        if not isinstance(policy, WirePolicy):
            raise UsageError(f"policy must be a WirePolicy, such as WirePolicy((WireFormat.BF16,)), got {policy!r}")
        self.group, self.policy, self.name = cast("Any", group), policy, name
        self.governor = Governor(group, policy, name)
        self._agreed: set[tuple[object, ...]] = set()
        self._codecs: dict[tuple[Wire, torch.dtype, str], Codec] = {}

    # Verbs

    def all_reduce(self, x: torch.Tensor) -> dist.Work:
        """``x`` becomes the sum over ranks. One rounding of each rank's values (between nodes: of each node's sum), and one of
        the result."""
        self._check_output("all_reduce", x, x, x.numel())
        x = x.detach()
        plan = self._plan("all_reduce", x, x.nbytes, x)
        if plan is None:
            return cast("dist.Work", dist.all_reduce(x, group=self.group, async_op=True))
        if self._goes_flat(x):
            return self._flat(plan, x).all_reduce(x)
        return cast("dist.Work", self.group.start_encoded(plan, x, x, None, self._codec_of_call(plan.wire, x)))

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, rows: Rows = None) -> dist.Work:
        """``out`` becomes this rank's rows of the sum of all ranks' ``x`` [Σ rows, …]; None: as many for each.

        With the policy's ``in_place`` ``x`` is left undefined, and ``out`` may be this rank's rows of it.
        Raises TensorError where ``in_place`` cannot be: uneven rows, or another dtype than FP32.
        """
        blocks = self._blocks(x, rows)
        self._check_output("reduce_scatter", out, x, blocks[self.group.rank()] // x.element_size())
        if self.policy.in_place:
            return self._in_place(out, x, blocks)
        out, x = out.detach(), plain(x)
        plan = self._plan("reduce_scatter", x, x.nbytes, x)
        if plan is None:
            if len(set(blocks)) == 1:
                return cast("dist.Work", reduce_scatter_single(out, x, group=self.group, async_op=True))
            parts = list(x.split(list(rows or ())))
            return cast("dist.Work", dist.reduce_scatter(out, parts, group=self.group, async_op=True))
        if self._goes_flat(x):
            return self._flat(plan, x).reduce_scatter(out, x, blocks)
        return cast("dist.Work", self.group.start_encoded(plan, x, out, blocks, self._codec_of_call(plan.wire, x)))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, rows: Rows = None) -> dist.Work:
        """``out`` [Σ rows, …] becomes all ranks' ``x`` [rows[rank], …], each rounded once, this rank's too."""
        blocks = self._blocks(out, rows)
        self._check_output("all_gather", out, x, out.numel())
        if x.nbytes != blocks[self.group.rank()]:
            raise TensorError(
                f"rank {dist.get_rank()}, {self.name}: all_gather into {list(out.shape)}, rows {rows}, expected "
                f"this rank's rows, got shape {list(x.shape)}"
            )
        out, x = out.detach(), plain(x)
        plan = self._plan("all_gather", x, out.nbytes, out)
        if plan is None:
            if len(set(blocks)) == 1:
                return cast("dist.Work", all_gather_single(out, x, group=self.group, async_op=True))
            parts = list(out.split(list(rows or ())))
            return cast("dist.Work", dist.all_gather(parts, x, group=self.group, async_op=True))
        if self._goes_flat(x):
            return self._flat(plan, x).all_gather(out, x, blocks)
        return cast("dist.Work", self.group.start_encoded(plan, x, out, blocks, self._codec_of_call(plan.wire, x)))

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        send_rows: Rows = None,
        receive_rows: Rows = None,
        *,
        most_rows: int | None = None,
        native: Callable[[], dist.Work] | None = None,
    ) -> dist.Work:
        """``send_rows[k]`` rows of ``x`` go to rank k, ``receive_rows[k]`` of ``out`` come from it; None: even.

        To ranks of this rank's node they go as they are, where the group has other nodes. ``most_rows``: a number that all ranks
        know, of the rows that any sends or receives; None: ranks agree on one first. ``native``: starts the call where nothing
        is encoded; None: as one of the group's own.
        """
        splits = self._blocks(x, send_rows), self._blocks(out, receive_rows)
        self._check_output("all_to_all", out, x, out.numel())
        if _width(out) != _width(x):
            raise TensorError(
                f"rank {dist.get_rank()}, {self.name}: all_to_all of rows of {_width(x)} elements into rows of {_width(out)}"
            )
        out, x = out.detach(), plain(x)
        if most_rows is None:
            most_rows = self._agree(x, out)
        plan = self._plan("all_to_all_v", x, _rounded(most_rows) * _width(x) * x.element_size(), x)
        if plan is None and native is not None:
            return native()
        if plan is None:
            outs = None if receive_rows is None else list(receive_rows)
            ins = None if send_rows is None else list(send_rows)
            work = dist.all_to_all_single(out, x, outs, ins, group=self.group, async_op=True)
            return cast("dist.Work", work)
        if self._goes_flat(x):
            return self._flat(plan, x).all_to_all(out, x, splits)
        codec = self._codec_of_call(plan.wire, x)
        return cast("dist.Work", self.group.start_encoded_exchange(plan, x, out, splits, codec))

    # Deciding

    def _plan(self, collective: str, x: torch.Tensor, num_bytes: int, shaped: torch.Tensor) -> Plan | None:
        """``num_bytes``: what all ranks know; ``shaped``: of the rows to be encoded, ``x`` the values that this rank has."""
        if self.governor.formats == (WireFormat.NATIVE,) or num_bytes == 0:
            return None
        width = max(1, _width(shaped))
        self._agree_once(collective, x.dtype, width)
        usable = self._usable(x.dtype, width)
        formats = self.governor.allowed(usable, lambda each: self._error(self._wire(each, width), x))
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
        found: list[WireFormat] = []
        for each in self.policy.formats:
            if each is WireFormat.NATIVE:
                found.append(each)
            elif dtype in (_FP8 if each.is_scaled else _BF16):
                if self._wire(each, width).ratio(dtype.itemsize) < 1:
                    found.append(each)
            elif each is WireFormat.BF16 and dtype in _FP8:
                found.append(WireFormat.NATIVE)  # as few bytes as they are
        if not found:
            names = " or ".join(map(str, self.policy.formats))
            raise TensorError(
                f"rank {dist.get_rank()}, {self.name}: {names} is for floating point of 32 bits or less, in rows that are longer "
                f"than their scales; got rows of {width} elements of {dtype}: allow native too, send another dtype, or view the "
                "tensor as longer rows"
            )
        return tuple(dict.fromkeys(found))

    def _wire(self, wire_format: WireFormat, width: int) -> Wire:
        if wire_format is WireFormat.NATIVE:
            return NATIVE
        if not wire_format.is_scaled:
            return Wire(wire_format)
        return Wire(wire_format, width, self.policy.scaling, self.policy.power_of_two)

    @staticmethod
    def _error(wire: Wire, x: torch.Tensor) -> tuple[float, float]:
        """The error, of finite values. No rank must leave here alone: encoding will say that there are others."""
        return Codec(wire, x.dtype, "pass").error(x.reshape(-1, wire.row_elements))

    def _codec(self, wire: Wire, x: torch.Tensor, non_finite: str = "") -> Codec:
        key = wire, x.dtype, non_finite or self.policy.non_finite
        if key not in self._codecs:
            self._codecs[key] = Codec(*key)
        return self._codecs[key]

    def _codec_of_call(self, wire: Wire, x: torch.Tensor) -> Codec:
        """On a device what a step finds nobody hears of, so all ranks ask for NaN and infinity before anything is launched."""
        codec = self._codec(wire, x)
        if x.is_cpu:
            return codec
        require_finite(self.group, codec, x)
        return self._codec(wire, x, "pass")

    def _goes_flat(self, x: torch.Tensor) -> bool:
        """Whether this is a tensor on a device for which the group plans nothing. The same on all ranks."""
        return not x.is_cpu and not self.group.plans_on_device(x)

    def _flat(self, plan: Plan, x: torch.Tensor) -> FlatEncoded:
        return FlatEncoded(self.group, self._codec(plan.wire, x))

    def _in_place(self, out: torch.Tensor, x: torch.Tensor, blocks: Sequence[int]) -> dist.Work:
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
        return cast("dist.Work", self.group.start_in_place(plan, x.detach(), out.detach()))

    def _blocks(self, whole: torch.Tensor, rows: Rows) -> tuple[int, ...]:
        """Bytes of each rank's rows. Raises TensorError where they are not those of ``whole``."""
        size, count = self.group.size(), whole.shape[0] if whole.dim() else 0
        if rows is None:
            if not whole.dim() or count % size:
                raise TensorError(
                    f"rank {dist.get_rank()}, {self.name}: {size} must divide the rows, got shape {list(whole.shape)}: name them"
                )
            rows = (count // size,) * size
        if len(rows) != size or min(rows) < 0 or sum(rows) != count:
            raise TensorError(
                f"rank {dist.get_rank()}, {self.name}: expected {size} counts of rows, {count} together, got {list(rows)}"
            )
        row_bytes = _width(whole) * whole.element_size()
        return tuple(each * row_bytes for each in rows)

    def _check_output(self, verb: str, out: torch.Tensor, x: torch.Tensor, numel: int) -> None:
        """Check that ``out`` can take the result as it is. Raises TensorError."""
        if out.dtype != x.dtype or out.device != x.device or out.numel() != numel or not out.is_contiguous():
            raise TensorError(
                f"rank {dist.get_rank()}, {self.name}: {verb} of {x.dtype} on {x.device} needs a contiguous output of {numel} "
                f"elements of the same, got shape {list(out.shape)}, strides {list(out.stride())}, {out.dtype} on {out.device}"
            )

    # Agreeing

    def _agree(self, x: torch.Tensor, out: torch.Tensor) -> int:
        most = torch.tensor([max(x.shape[0], out.shape[0])], dtype=torch.int64)
        settle_maximum(most, self.group, f"to agree on the largest number of rows of {self.name}")
        return int(most)

    def _agree_once(self, collective: str, dtype: torch.dtype, width: int) -> None:
        """At the first call of a kind: that all ranks make the same; later ones are compared under COMMLAYER_DEBUG=detail, as all
        calls of a group are. Raises DisagreementError."""
        key = collective, dtype, width
        if key in self._agreed:
            return
        mine = {
            f"the call of {self.name} (nothing was sent)": f"{collective} of {dtype}, rows of {width} elements",
            f"the policy of {self.name} (nothing was sent)": str(self.policy),
        }
        require_alike(mine, self.group, f"to compare the first {collective} of {self.name}")
        if len(self._agreed) >= 4096:
            self._agreed.clear()
        self._agreed.add(key)


def _rounded(count: int) -> int:
    """Up to three leading bits: sizes that are a fifth apart, at most, are planned alike, and not anew in each call."""
    bits = max(0, count.bit_length() - 3)
    return -(-count >> bits) << bits


def _width(x: torch.Tensor) -> int:
    """Elements of a row."""
    width = 1
    for size in x.shape[1:]:
        width *= size
    return width
