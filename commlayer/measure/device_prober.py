"""Runs what is measured on a device, on all ranks of the world in step, and times it by the device's clock, between two events.

Before an exchange the ranks' streams meet in a small all_reduce: what comes behind it begins on all of them together, and has
been launched by then, so that little of the host's part is timed. Ranks agree on times over Gloo, as the CPU's do.

Communicators are of the measurement alone: where a rank fails they are broken, and no call of a program's with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property, partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed has them too, but not for type checkers

from commlayer.devices.accelerator import AcceleratorDevice, AcceleratorEvent, AcceleratorStream
from commlayer.engine.runner import Runner, drive
from commlayer.failures.board import why_left
from commlayer.failures.waits import bounded
from commlayer.measure.all_ranks import AllRanks
from commlayer.measure.calls import CodedCall, GridCall, IdleCall, TimedCall
from commlayer.measure.device_calls import DeviceGroup, DeviceMessageCall, DeviceOwnCall, DeviceStepCall
from commlayer.measure.prober import Prober
from commlayer.profiles.errors import (
    BLAMING,
    ClusterError,
    CollectiveTimeoutError,
    CommlayerError,
    PeerError,
    UsageError,
)
from commlayer.profiles.links import Resource
from commlayer.profiles.topology import Topology
from commlayer.scheduler.legs import CodedLeg
from commlayer.scheduler.plan import Op, Plan
from commlayer.scheduler.probes import MESSAGE, Probe, probes_of_calls
from commlayer.scheduler.wire import Wire
from commlayer.transport.accelerators import MakeInner, registered_accelerators
from commlayer.transport.inner_messages import InnerMessenger
from commlayer.transport.nccl import Nccl, connect_now, is_usable, make_nccl
from commlayer.transport.streams import StepMessenger, StreamCall, StreamTransport

__all__ = ["DeviceLinks", "DeviceProber", "device_links"]

_ALONE_TIMES = 2
_CODED_BYTES = 1 << 13
_LEAST_PRODUCT_US, _PRODUCT_ROWS = 500.0, (256, 512, 1024, 2048, 4096, 8192)
"""The matrix products that run beside exchanges are the smallest of these that take so long: as many as are needed of ones
that fill the device."""

Span = tuple[AcceleratorEvent, AcceleratorEvent]


class DeviceLinks(NamedTuple):
    """The links between ranks as tensors of ``device`` cross them. ``backend``: what moves them, as in a profile; ``name``: of
    the device, for people and for the key of the cache. ``make``: connects some of the ranks, all of which call it."""

    device: torch.device
    backend: str
    name: str
    make: MakeInner


def device_links(device: torch.device) -> DeviceLinks:
    """The links of a CUDA device, over NCCL, or of a device that is registered, over its own inner backend.

    Raises UsageError for a device that this process has not.
    """
    if device.type == "cuda":
        if not is_usable():
            raise UsageError(
                "expected a CUDA device and a torch with NCCL, got a machine without: measure the CPU's links"
            )
        version = ".".join(map(str, torch.cuda.nccl.version()))
        name = f"{torch.cuda.get_device_name(device)}, NCCL {version}"
        return DeviceLinks(device, "nccl", name, partial(_connected_nccl, device))
    make = registered_accelerators().get(device.type)
    if make is None:
        known = ", ".join(["cuda", *registered_accelerators()])
        raise UsageError(f"expected a device whose tensors are moved here ({known}), got {device.type}")
    return DeviceLinks(device, device.type, f"{device.type} device", make)


def _connected_nccl(
    device: torch.device, store: Store, rank: int, global_ranks: Sequence[int], timeout: timedelta, name: str
) -> Nccl:
    made = make_nccl(store, rank, global_ranks, timeout, name, None, is_default=False, is_split=False)
    connect_now(made, device)
    return made


class DeviceProber(Prober):
    """A prober (see :class:`commlayer.measure.prober.Prober`) of the links of a device. ``ranks`` agree over Gloo."""

    def __init__(
        self,
        topology: Topology,
        timeout_s: float,
        ranks: AllRanks,
        links: DeviceLinks,
        groups: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        super().__init__(topology, timeout_s, ranks, groups)
        self._members = {"world": range(ranks.size)} | dict(self._members)  # where its ranks meet
        self.links, self.device = links, links.device.type
        self._accelerator = AcceleratorDevice(links.device)
        self._stream: AcceleratorStream
        self._beside: AcceleratorStream  # what computes while others exchange
        self._inners: dict[str, Nccl] = {}
        self._timed_groups: dict[str, DeviceGroup] = {}
        self._factors: list[torch.Tensor] = []

    def __enter__(self) -> DeviceProber:
        """Take the device. Where that fails here the other ranks hear of it, as of all that fails later."""
        try:
            self._stream = self._accelerator.stream(is_high=False)
            self._beside = self._accelerator.stream(is_high=False)
            # What the program has launched is not to run beside what is timed.
            self._bounded(self._accelerator.synchronize, "before measuring")
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        why = why_left(error)
        try:
            if not self.board.is_broken:  # else they have heard
                self.board.leave(why)
            with contextlib.ExitStack() as stack:  # all of them, whatever fails
                for inner in self._inners.values():
                    stack.callback(inner.backend.abort)
        finally:
            self._close_board(why, is_failure=True, is_consequence=isinstance(error, BLAMING))

    # Groups

    def _inner(self, where: str) -> Nccl:
        """The communicator of this rank's group of that name. The first call for a name is collective."""
        if where not in self._inners:
            members = [self.ranks.named[member] for member in self._members[where]]
            store = PrefixStore(f"{where}/{members[0]}", self._store)
            limit, purpose = timedelta(seconds=self._timeout_s), f"messages of {self.links.name}"

            def make() -> Nccl:
                return self.links.make(store, members.index(self.rank), members, limit, f"{where} (measured)")

            with self.board.connecting(members, where, purpose, self._timeout_s):
                self._inners[where] = bounded(make, self.board, self._timeout_s, purpose)
        return self._inners[where]

    def _group_of(self, where: str) -> DeviceGroup:
        if where not in self._timed_groups:
            members = list(self._members[where])
            nodes = [[members.index(member) for member in part] for part in self._topology.parts_of(members)]
            place = members.index(self.ranks.rank)
            self._timed_groups[where] = DeviceGroup(nodes, place, self.links.device, self._inner(where))
        return self._timed_groups[where]

    @cached_property
    def grid_runner(self) -> Runner:
        """Runs plans on the grid: its rows and columns are groups that are measured anyway. The first access is collective."""
        wanted = {Op.ALL_TO_ALL: self.grid.ep_ranks, Op.ALL_GATHER: self.grid.tp_ranks}
        lines = {op: self._line(ranks) for op, ranks in wanted.items() if len(ranks) > 1}
        return Runner(StreamTransport(self._accelerator, lambda step: lines.get(step.op), list(lines.values())))

    def _line(self, ranks: Sequence[int]) -> StepMessenger:
        places = [self.ranks.named.index(rank) for rank in ranks]
        where = next(where for where, members in self._members.items() if list(members) == places)
        return StepMessenger(InnerMessenger(self._inner(where), lambda: None), tuple(range(len(places))))

    # Calls

    def call(self, probe: Probe, size: int) -> TimedCall:
        with self._accelerator.on(self._stream):
            if isinstance(probe.leg, CodedLeg):
                return CodedCall(probe.leg.op, probe.unit.wire, size, self.links.device)
            if not probe.is_on_grid and len(self._members.get(probe.where, ())) < 2:
                return IdleCall()
            return self.on_grid(probe.plan(size)) if probe.is_on_grid else self._of_group(probe, size)

    def _of_group(self, probe: Probe, size: int) -> TimedCall:
        group = self._group_of(probe.where)
        probe = probe.among(group.size)
        if probe.leg is MESSAGE:
            return DeviceMessageCall(group, size)
        return (DeviceOwnCall if probe.is_own_call else DeviceStepCall)(group, probe.plan(size))

    def on_grid(self, plan: Plan) -> GridCall:
        return GridCall(self.grid_runner, plan, self.grid, self.links.device, self._timeout_s)

    def codes(self, wire: Wire) -> bool:
        """See :meth:`Prober.codes`: kernels need Triton, and a simulated device has some operators only."""
        can = True
        try:
            with self._accelerator.on(self._stream):
                CodedCall(Op.DECODE, wire, _CODED_BYTES, self.links.device).run()
        except (ClusterError, PeerError):
            raise
        except Exception:  # noqa: BLE001  torch's, Triton's or the simulator's: none of them says "not here" alike
            can = False
        return self.agree(float(not can)) == 0.0

    # Times

    def runner(self, probe: Probe, size: int, *, check: bool = False) -> Callable[[], float]:
        with self._accelerator.on(self._stream):
            return super().runner(probe, size, check=check)

    def timed(self, task: Callable[[], Any]) -> float:
        with self._accelerator.on(self._stream):
            self._meet()
            span = self._span(task)
        self._await(span[1])
        return self.agree(span[1].elapsed_us(span[0]))

    def times(self, calls: Iterable[tuple[Probe, TimedCall]], is_over: Callable[[], bool]) -> list[float]:
        """See :meth:`Prober.times`. All are launched, one behind the other, before the first is waited for, so ``is_over`` is
        asked once."""
        found: list[list[Span]] = []
        if is_over():
            return []
        made = list(
            calls
        )  # not while another is under way: making one may wait for the device, and so for a rank that is gone
        with self._accelerator.on(self._stream):
            for probe, call in made:
                if probe.leg.is_exchange:
                    self._meet()
                    found.append([self._span(call.run)])
                    continue
                if found:
                    self._await(found[-1][-1][1])  # likewise: some codecs wait for the device
                found.append([self._span(call.run) for _ in range(_ALONE_TIMES)])
            end = self._stream.record()
        self._await(end)
        return [min(end.elapsed_us(begin) for begin, end in spans) for spans in found]

    def time_all_reduce(self, num_bytes: int) -> float:
        """The time of one all_reduce of the inner backend's own on all ranks, µs: the largest over ranks."""
        nodes = tuple(map(len, self._topology.nodes))
        probe = next(each for each in probes_of_calls("world", nodes) if each.key[0] == "all_reduce")
        return self.runner(probe, num_bytes)()

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.ranks.size

    def _meet(self) -> None:
        """Have what is launched from now on begin on all ranks at the same time."""
        self._group_of("world").all_reduce(self._token)

    @cached_property
    def _token(self) -> torch.Tensor:
        return torch.zeros(1, device=self.links.device)

    def _span(self, task: Callable[[], Any]) -> Span:
        begin = self._stream.record_time()
        task()
        return begin, self._stream.record_time()

    def _await(self, event: AcceleratorEvent) -> None:
        """Have the host wait for ``event``, for as long as all ranks are there. Raises PeerError, CollectiveTimeoutError."""
        self._bounded(event.synchronize, "measuring")

    def _bounded(self, wait: Callable[[], object], doing: str) -> None:
        """Have the host wait for the device so. ``doing``: for messages."""
        what = f"rank {self.rank}, group of {self.size} ranks, {doing} the links of {self.links.name}"
        try:
            bounded(wait, self.board, self._timeout_s, what)
        except TimeoutError as error:
            raise CollectiveTimeoutError(f"{what}: nothing came within {self._timeout_s:g} s") from error
        except RuntimeError as error:
            if isinstance(error, CommlayerError) or not self.board.is_broken:
                raise
            raise PeerError(f"{what}: {self.board.culprit()}") from error

    # Side by side

    def ends(self, plan: Plan, rounds: int) -> dict[Resource, float]:
        return self.ends_beside(plan, rounds, 0)

    def ends_beside(self, plan: Plan | None, rounds: int, num_products: int) -> dict[Resource, float]:
        """Find, as :meth:`ends`, when the last step of each resource ended, and, as COMPUTE, the last of so many matrix products
        that run beside on a stream of their own. ``plan`` None: these alone."""
        call = None if plan is None else self.on_grid(plan)
        resources = [] if plan is None else list(dict.fromkeys(step.resource for step in plan.steps))
        resources += [Resource.COMPUTE] if num_products else []
        seen: list[list[float]] = []
        for _ in range(rounds + 1):
            found = self._ended(call, num_products)
            seen.append(self.ranks.maxima([found.get(resource, 0.0) for resource in resources]))
        middles = [sorted(column)[rounds // 2] for column in zip(*seen[1:], strict=True)]
        return dict(zip(resources, middles, strict=True))

    def _ended(self, call: GridCall | None, num_products: int) -> dict[Resource, float]:
        ends: dict[Resource, AcceleratorEvent] = {}
        with self._accelerator.on(self._stream):
            self._meet()
            begin = self._stream.record_time()
            started = None if call is None else self._started(call, ends)
            if num_products:
                self._beside.wait(begin)
                with self._accelerator.on(self._beside):
                    for _ in range(num_products):
                        torch.mm(*self._factors[:2], out=self._factors[2])
                ends[Resource.COMPUTE] = self._beside.record_time()
            if started is not None:
                started.finish()
            for end in ends.values():
                self._stream.wait(end)
            last = self._stream.record()
        self._await(last)
        return {resource: end.elapsed_us(begin) for resource, end in ends.items()}

    def _started(self, call: GridCall, ends: dict[Resource, AcceleratorEvent]) -> StreamCall:
        """Launch a plan, and note in ``ends`` when the last of each resource's steps has run."""
        started = call.start()
        assert isinstance(started, StreamCall)  # of the transport that was made here
        drive(call.plan, started)
        transport = call.runner.transport
        assert isinstance(transport, StreamTransport)  # likewise
        for resource in dict.fromkeys(step.resource for step in call.plan.steps):
            stream: Any = transport.streams[resource]  # of this device, which can be measured
            ends[resource] = stream.record_time()
        return started

    @cached_property
    def product_us(self) -> float:
        """The time of one matrix product, µs, of those that run beside exchanges. Collective."""
        dtype = torch.bfloat16 if self.links.device.type == "cuda" else torch.float32
        for rows in _PRODUCT_ROWS:
            with self._accelerator.on(self._stream):
                self._factors = [torch.ones(rows, rows, dtype=dtype, device=self.links.device) for _ in range(3)]
            found = self.ends_beside(None, 3, 2)[Resource.COMPUTE] / 2
            if found >= _LEAST_PRODUCT_US:
                break
        return found

    # The end

    def is_one_call(self, plan: Plan) -> bool:
        return False  # posting a step does not wait for it, so there is nothing to save

    def close(self) -> None:
        """Let go of connections. Collective."""
        try:
            self._bounded(self._accelerator.synchronize, "at the end of measuring")
            for inner in self._inners.values():
                inner.backend.shutdown()
            self._inners, self._timed_groups = {}, {}
        finally:
            super().close()
