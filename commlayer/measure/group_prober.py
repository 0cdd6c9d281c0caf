"""Measures what plans over nodes are made of, and what they compete with: steps by messages, and the backend's own calls.

On three kinds of groups, each at the same time everywhere in the cluster: the world, the ranks of a node, and the ranks at
one place of every node (a rail). A rail shares its node's wire with the other rails, as data-parallel groups do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # torch.distributed has it too, but not for type checkers

from commlayer.engine.planned import PlannedGroup
from commlayer.failures.board import FailureBoard
from commlayer.profiles.errors import ClusterError, UsageError
from commlayer.profiles.links import Resource
from commlayer.profiles.topology import Topology
from commlayer.scheduler.plan import Op, Plan, Strategy
from commlayer.scheduler.strategies import build
from commlayer.scheduler.traffic import Traffic
from commlayer.scheduler.wire import Wire, WireFormat
from commlayer.settings import Settings
from commlayer.wire.codecs import Codec

if TYPE_CHECKING:
    from commlayer.measure.prober import Prober

__all__ = ["OWN_CALLS", "GroupCurve", "GroupProber", "group_curves"]

OWN_CALLS = ("all_gather_single", "reduce_scatter_single", "all_reduce", "broadcast", "all_to_all_v")
"""The backend's own calls, which a flat plan makes."""
_STEPS = {"all_to_all": "reduce_scatter", "all_gather": "all_gather", "reduce": "reduce_scatter"}
"""Curve → the collective whose ``flat_direct`` plan has such a step."""
_ITEM_BYTES = 4  # sums are of float32
_CODED = tuple(f"{way}_{each}" for each in WireFormat if each is not WireFormat.NATIVE for way in ("encode", "decode"))
_ROW_ELEMENTS = 1024
"""Elements of the rows that FP8 is measured on: about a model's hidden size."""


@dataclass(frozen=True, slots=True)
class GroupCurve:
    """A curve to measure, and on which groups: ``world``, ``node``, ``rail``, or the name of others that the prober was given."""

    collective: str
    link: Resource
    group_size: int
    where: str


def group_curves(topology: Topology, *, is_probe: bool = False) -> list[GroupCurve]:
    """List what is measured on a cluster of equal nodes beside the steps of replicated tokens, which are not repeated here.

    ``is_probe``: of the rails nothing but the steps, and no broadcasts inside nodes.
    """
    n, m, width = topology.world_size, topology.num_nodes, topology.ranks_per_node
    link = Resource.INTER if m > 1 else Resource.INTRA
    groups = {("world", link): n}
    if m > 1 and width > 1:
        groups |= {("node", Resource.INTRA): width, ("rail", Resource.INTER): m}
    known = {("all_to_all", link, m if m > 1 else n), ("all_gather", Resource.INTRA, width if m > 1 else 1)}
    curves = [GroupCurve(name, Resource.DEVICE, 1, "world") for name in ("reduce", *_CODED)]
    for (where, on), size in groups.items():
        wanted = [GroupCurve(name, on, size, where) for name in ("all_to_all", "all_gather", *OWN_CALLS)]
        curves += [curve for curve in wanted if (curve.collective, on, size) not in known]
    if not is_probe:
        return curves
    return [
        curve
        for curve in curves
        if not (curve.where == "rail" and curve.collective in OWN_CALLS)
        and (curve.collective, curve.where) != ("broadcast", "node")
    ]


class GroupProber:
    """The groups of this rank. Making one is collective, and its connections end with it.

    ``groups``: this rank's group of each name; None: the three kinds of the module.
    """

    def __init__(
        self, prober: Prober, topology: Topology, timeout_s: float, groups: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        self._prober, self._name = prober, prober.ranks.name()
        rank = prober.ranks.rank
        if groups is None:
            place = topology.local_rank_of(rank)
            groups = {
                "world": range(topology.world_size),
                "node": topology.nodes[topology.node_of(rank)],
                "rail": [members[place] for members in topology.nodes],
            }
        self._groups: dict[str, tuple[PlannedGroup, dist.ProcessGroup]] = {}
        for where, ranks in groups.items():
            if len(ranks) > 1:
                self._groups[where] = self._group(where, tuple(ranks), topology.parts_of(ranks), timeout_s)

    def _group(
        self, where: str, ranks: tuple[int, ...], nodes: tuple[tuple[int, ...], ...], timeout_s: float
    ) -> tuple[PlannedGroup, dist.ProcessGroup]:
        rank, prefix = self._prober.ranks.rank, f"commlayer/profiler/{self._name}/{where}/{ranks[0]}"
        store = PrefixStore(prefix, self._prober.ranks.store)
        planned = PlannedGroup(
            name=where,
            rank=ranks.index(rank),
            nodes=[[ranks.index(member) for member in members] for members in nodes],
            global_ranks=ranks,
            store=store,
            planner=None,
            settings=Settings(plan=Strategy.DIRECT.value),
            timeout_s=timeout_s,
            board=FailureBoard(self._prober.detector, prefix, rank, ranks),
        )
        planned.connect_messages()  # now, not within the first sample
        return planned, planned.connect("own calls", timeout_s)

    def runner(self, curve: GroupCurve, size: int, *, check: bool) -> Callable[[], float]:
        """A callable that runs one point and returns the agreed time, µs.

        ``check``: run it on known values first. Raises ClusterError where values arrive wrong.
        """
        planned, own = self._groups[curve.where]
        call: _OwnCall | _StepCall | _CodedCall | _MessageCall
        if curve.collective == "send_recv":
            call = _MessageCall(planned, own, size)
        elif curve.collective in _CODED:
            call = _CodedCall(curve.collective, size)
        elif curve.collective in OWN_CALLS:
            call = _OwnCall(planned, own, curve.collective, size)
        else:
            call = _StepCall(planned, curve.collective, size)
        if check and self._prober.ranks.total(call.num_wrong()):
            raise ClusterError(
                f"{curve.collective} of {size} bytes on {curve.link} delivered wrong values: do not trust this link. Look "
                "for a faulty card, cable or driver, then measure again"
            )
        return lambda: self._prober.timed(call.run)

    def close(self) -> None:
        """Let go of connections."""
        for planned, _ in self._groups.values():
            planned.close()
        self._groups = {}


class _StepCall:
    """One step of a ``flat_direct`` plan."""

    def __init__(self, planned: PlannedGroup, collective: str, size: int) -> None:
        self.planned, self.collective = planned, _STEPS[collective]
        self.n = len(planned.global_ranks)
        if collective == "reduce":  # S is what is added to the first block
            size = size * self.n // (self.n - 1)
        count = -(-size // (self.n * _ITEM_BYTES))
        self.whole, self.block = torch.zeros(count * self.n), torch.zeros(count)
        shape = tuple(len(node) for node in planned.nodes)
        traffic = Traffic(count * self.n * _ITEM_BYTES, self.n, 1, planned.choices.link, self.collective, shape)
        self.plan = build(traffic, Strategy.DIRECT)
        self.step = _only(self.plan, Op(collective))

    def run(self) -> None:
        self._run(self.step)

    def _run(self, plan: Plan) -> None:
        source, target = (self.block, self.whole) if self.collective == "all_gather" else (self.whole, self.block)
        self.planned.run(plan, source, target)

    def num_wrong(self) -> int:
        """Count the wrong elements of the whole plan, on small integers."""
        rank, count = self.planned.rank, len(self.block)
        if self.collective == "all_gather":
            self.block.fill_(rank + 1.0)
            self._run(self.plan)
            expected = torch.arange(1.0, self.n + 1).repeat_interleave(count)
            return int((self.whole != expected).sum())
        self.whole.copy_(torch.arange(0.0, self.n).repeat_interleave(count) + rank)
        self._run(self.plan)
        return int((self.block != self.n * rank + self.n * (self.n - 1) / 2).sum())


class _CodedCall:
    """Encoding, or decoding, ``size`` bytes: FP32 into BF16, and back into the sum that gradients need; BF16 into FP8, with a
    scale for each row, and back."""

    def __init__(self, collective: str, size: int) -> None:
        way, _, name = collective.partition("_")
        self.is_encoding, wire_format = way == "encode", WireFormat(name)
        dtype = torch.bfloat16 if wire_format.is_scaled else torch.float32
        self.codec = Codec(Wire(wire_format, _ROW_ELEMENTS), dtype)
        rows = max(1, size // (_ROW_ELEMENTS * dtype.itemsize))
        self.rows = torch.arange(rows * _ROW_ELEMENTS).remainder_(15).view(rows, _ROW_ELEMENTS).to(dtype)
        self.decoded = torch.zeros_like(self.rows)
        self.message = torch.zeros(self.codec.wire_bytes(rows), dtype=torch.uint8)
        self.codec.encode(self.rows, self.message)

    def run(self) -> None:
        if self.is_encoding:
            self.codec.encode(self.rows, self.message)
        elif self.codec.wire.format.is_scaled:
            self.codec.decode(self.message, self.decoded)
        else:
            self.codec.add(self.message, self.decoded)

    def num_wrong(self) -> int:
        """Values beyond the format's rounding."""
        self.codec.decode(self.message, self.decoded)
        allowed = self.codec.wire.format.unit_roundoff * 15
        wrong = int(((self.decoded.float() - self.rows.float()).abs() > allowed).sum())
        self.decoded.zero_()
        return wrong


def _only(plan: Plan, op: Op) -> Plan:
    return replace(plan, steps=tuple(replace(step, after=()) for step in plan.steps if step.op is op))


class _OwnCall:
    """One call of Gloo's own."""

    def __init__(self, planned: PlannedGroup, own: dist.ProcessGroup, collective: str, size: int) -> None:
        self.own, self.collective, self.rank = own, collective, planned.rank
        self.n = len(planned.global_ranks)
        count = -(-size // (self.n * _ITEM_BYTES))
        self.whole, self.block = torch.zeros(count * self.n), torch.zeros(count)
        self.moved = torch.zeros(count * self.n)
        self._timeout = timedelta(seconds=planned.timeout_s)

    def run(self) -> None:
        self._work().wait(self._timeout)

    def _work(self) -> dist.Work:
        if self.collective == "all_gather_single":
            return self.own._allgather_base(self.whole, self.block)
        if self.collective == "reduce_scatter_single":
            return self.own._reduce_scatter_base(self.block, self.whole, dist.ReduceScatterOptions())
        if self.collective == "all_to_all_v":
            return self.own.alltoall_base(self.moved, self.whole, [], [])
        return self.own.allreduce([self.whole]) if self.collective == "all_reduce" else self.own.broadcast([self.whole])

    def num_wrong(self) -> int:
        count, ramp = len(self.block), torch.arange(0.0, self.n).repeat_interleave(len(self.block))
        self.block.fill_(float(self.rank))
        self.whole.copy_(ramp + self.rank)
        self.run()
        total = self.n * (self.n - 1) / 2
        found, expected = {
            "all_gather_single": (self.whole, ramp),
            "reduce_scatter_single": (self.block, torch.full((count,), self.n * self.rank + total)),
            "all_to_all_v": (self.moved, ramp + self.rank),
            "all_reduce": (self.whole, ramp * self.n + total),
            "broadcast": (self.whole, ramp),
        }[self.collective]
        return int((found != expected).sum())


class _MessageCall:
    """A message from the first rank of two to the second."""

    def __init__(self, planned: PlannedGroup, own: dist.ProcessGroup, size: int) -> None:
        if len(planned.global_ranks) != 2:
            raise UsageError(f"send_recv is measured on groups of two ranks, got {list(planned.global_ranks)}")
        self.own, self.rank = own, planned.rank
        self.message = torch.zeros(size, dtype=torch.uint8)
        self._timeout = timedelta(seconds=planned.timeout_s)

    def run(self) -> None:
        work = self.own.send([self.message], 1, 0) if self.rank == 0 else self.own.recv([self.message], 0, 0)
        work.wait(self._timeout)

    def num_wrong(self) -> int:
        self.message.fill_(7 if self.rank == 0 else 0)
        self.run()
        return int((self.message != 7).sum())
