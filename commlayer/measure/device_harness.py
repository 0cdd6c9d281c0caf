"""Connects and times what is measured on a device: by the device's clock, between two events.

Before an exchange the ranks' streams meet in a small all_reduce: what comes behind it begins on all
of them together, and has been launched by then, so that little of the host's part is timed. Ranks
agree on times over Gloo, as the CPU's do.

Communicators are of the measurement alone: where a rank fails they are broken, and no call of a
program's with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed has them too, but not for type checkers

from commlayer.agree.discovery import Grid
from commlayer.calls.movement import Movement
from commlayer.devices.accelerator import AcceleratorDevice, AcceleratorEvent, AcceleratorStream
from commlayer.devices.device_contract import Messenger
from commlayer.engine.device_plans import DevicePlans
from commlayer.engine.group_plans import Choices
from commlayer.engine.runner import Runner, drive
from commlayer.failures.waits import bounded
from commlayer.measure.calls import CALL_OPTIONS, CodedCall, GridCall, TimedCall, TimedGroup, begin_own
from commlayer.measure.harness import ALONE_TIMES, Harness
from commlayer.profiles.errors import (
    ClusterError,
    CollectiveTimeoutError,
    CommlayerError,
    PeerError,
    UsageError,
)
from commlayer.profiles.links import Resource
from commlayer.scheduler.plan import Op, Plan, Strategy
from commlayer.scheduler.probes import Probe
from commlayer.scheduler.wire import Wire
from commlayer.settings import Settings
from commlayer.transport.accelerators import MakeInner, registered_accelerators
from commlayer.transport.c10d import is_usable
from commlayer.transport.nccl import InnerMessenger, Nccl, connect_now, make_nccl
from commlayer.transport.streams import StepMessenger, StreamCall, StreamTransport

__all__ = ["DeviceGroup", "DeviceHarness", "DeviceLinks", "device_links"]

_CODED_BYTES = 1 << 13

Span = tuple[AcceleratorEvent, AcceleratorEvent]


class DeviceLinks(NamedTuple):
    """The links between ranks as tensors of ``device`` cross them. ``backend``: what moves them, as
    in a profile; ``name``: of the device, for people and for the key of the cache. ``make``:
    connects some of the ranks, all of which call it."""

    device: torch.device
    backend: str
    name: str
    make: MakeInner


def device_links(device: torch.device) -> DeviceLinks:
    """The links of a CUDA device, over NCCL, or of a device that is registered, over its own inner
    backend.

    Raises UsageError for a device that this process has not.
    """
    if device.type == "cuda":
        if not is_usable():
            raise UsageError(
                "expected a CUDA device and a torch with NCCL, got a machine without: measure the CPU's links"
            )
        version = ".".join(map(str, torch.cuda.nccl.version()))
        name = f"{torch.cuda.get_device_name(device)}, NCCL {version}"

        def connected(store: Store, rank: int, global_ranks: Sequence[int], timeout: timedelta, name: str) -> Nccl:
            made = make_nccl(store, rank, global_ranks, timeout, name, None, is_default=False, is_split=False)
            connect_now(made, device)
            return made

        return DeviceLinks(device, "nccl", name, connected)
    make = registered_accelerators().get(device.type)
    if make is None:
        known = ", ".join(["cuda", *registered_accelerators()])
        raise UsageError(f"expected a device whose tensors are moved here ({known}), got {device.type}")
    return DeviceLinks(device, device.type, f"{device.type} device", make)


class DeviceGroup(TimedGroup):
    """A group whose calls are timed on ``device``: launched on the stream that is current, which
    then waits for them.

    ``inner``, the communicator of the backend's own calls, carries the messages of its plans too,
    for one call runs at a time. ``nodes``: the members on each, as ranks of the group; this is
    ``rank``.
    """

    def __init__(self, nodes: Sequence[Sequence[int]], rank: int, device: torch.device, inner: Nccl) -> None:
        self.rank, self.device = rank, device
        self.size = sum(map(len, nodes))
        self._backend: Any = inner.backend
        self._verbs: Any = inner.verbs or inner.backend
        self._messenger: Messenger = InnerMessenger(inner, lambda: None)  # it is the group's to close
        choices = Choices(tuple(map(len, nodes)), None, Settings(plan=Strategy.DIRECT.value))
        self._plans = DevicePlans(nodes, rank, choices, lambda *_: self._messenger, lambda: "", lambda: 0.0)

    def prepare(self, plan: Plan) -> None:
        self._plans.prepare(plan, self.device)

    def run(self, plan: Plan, source: torch.Tensor, target: torch.Tensor) -> None:
        self._plans.run(Movement(plan, source, target)).under_way.finish()

    def run_own(self, collective: str, source: torch.Tensor, target: torch.Tensor) -> None:
        begin_own(self._backend, self._verbs, collective, source, target, CALL_OPTIONS[collective]()).wait()

    def send(self, message: torch.Tensor) -> None:
        is_sender, parts = self.rank == 0, [(1 - self.rank, message)]
        self._messenger.exchange(parts if is_sender else [], [] if is_sender else parts).wait()


@dataclass(eq=False)
class DeviceHarness(Harness):
    """Groups over a device's own backend, timed by the device's clock. ``ranks`` agree over
    Gloo."""

    links: DeviceLinks
    _inners: dict[str, Nccl] = field(default_factory=dict, init=False)
    _groups: dict[str, DeviceGroup] = field(default_factory=dict, init=False)
    _factors: list[torch.Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.members = {"world": range(self.ranks.size)} | dict(self.members)  # where its ranks meet
        self._accelerator = AcceleratorDevice(self.links.device)
        self._stream: AcceleratorStream
        self._beside: AcceleratorStream  # what computes while others exchange

    @property
    def device(self) -> torch.device:
        return self.links.device

    def begin(self) -> None:
        self._stream = self._accelerator.stream(is_high=False)
        self._beside = self._accelerator.stream(is_high=False)
        # What the program has launched is not to run beside what is timed.
        self._bounded(self._accelerator.synchronize, "before measuring")

    def on(self) -> contextlib.AbstractContextManager[object]:
        return self._accelerator.on(self._stream)

    # Groups

    def _inner(self, where: str) -> Nccl:
        """The communicator of this rank's group of that name. The first call for a name is
        collective."""
        if where not in self._inners:
            members = [self.ranks.named[member] for member in self.members[where]]
            store = PrefixStore(f"{where}/{members[0]}", self.store)
            limit, purpose = timedelta(seconds=self.timeout_s), f"messages of {self.links.name}"

            def make() -> Nccl:
                return self.links.make(store, members.index(self.board.rank), members, limit, f"{where} (measured)")

            with self.board.connecting(members, where, purpose, self.timeout_s):
                self._inners[where] = bounded(make, self.board, self.timeout_s, purpose)
        return self._inners[where]

    def group(self, where: str) -> DeviceGroup:
        if where not in self._groups:
            members, nodes = self._places(where)
            member = members.index(self.ranks.rank)
            self._groups[where] = DeviceGroup(nodes, member, self.device, self._inner(where))
        return self._groups[where]

    def connect_grid(self, grid: Grid) -> Runner:
        """Return what runs plans on the grid, whose rows and columns are groups that are measured
        anyway."""
        wanted = {Op.ALL_TO_ALL: grid.ep_ranks, Op.ALL_GATHER: grid.tp_ranks}
        lines = {op: self._line(ranks) for op, ranks in wanted.items() if len(ranks) > 1}
        return Runner(StreamTransport(self._accelerator, lambda step: lines.get(step.op), list(lines.values())))

    def _line(self, ranks: Sequence[int]) -> StepMessenger:
        places = [self.ranks.named.index(rank) for rank in ranks]
        where = next(where for where, members in self.members.items() if list(members) == places)
        return StepMessenger(InnerMessenger(self._inner(where), lambda: None), tuple(range(len(places))))

    def encodes(self, wire: Wire) -> bool:
        """See :meth:`HostHarness.encodes`: kernels need Triton, and a simulated device has some
        operators only."""
        try:
            with self.on():
                CodedCall(Op.DECODE, wire, _CODED_BYTES, self.device).run()
        except (ClusterError, PeerError):
            raise
        except Exception:  # noqa: BLE001  torch's, Triton's or the simulator's: none of them says "not here" alike
            return False
        return True

    # Times

    def time_us(self, task: Callable[[], Any]) -> float:
        with self.on():
            self._meet()
            span = self._span(task)
        self._await(span[1])
        return span[1].elapsed_us(span[0])

    def times_us(self, calls: Iterable[tuple[Probe, TimedCall]], is_over: Callable[[], bool]) -> list[float]:
        """See :meth:`HostHarness.times_us`. All are launched, one behind the other, before the first is
        waited for, so ``is_over`` is asked once."""
        times: list[list[Span]] = []
        if is_over():
            return []
        # Not while another is under way: making one may wait for the device, and so for a rank that is gone.
        made = list(calls)
        with self.on():
            for probe, call in made:
                if probe.leg.is_exchange:
                    self._meet()
                    times.append([self._span(call.run)])
                    continue
                if times:
                    self._await(times[-1][-1][1])  # likewise: some codecs wait for the device
                times.append([self._span(call.run) for _ in range(ALONE_TIMES)])
            end = self._stream.record()
        self._await(end)
        return [min(end.elapsed_us(begin) for begin, end in spans) for spans in times]

    def _meet(self) -> None:
        """Have what is launched from now on begin on all ranks at the same time."""
        self.group("world").run_own("all_reduce", self._token, self._token)

    @cached_property
    def _token(self) -> torch.Tensor:
        return torch.zeros(1, device=self.device)

    def _span(self, task: Callable[[], Any]) -> Span:
        begin = self._stream.record_time()
        task()
        return begin, self._stream.record_time()

    def _await(self, event: AcceleratorEvent) -> None:
        """Have the host wait for ``event``, for as long as all ranks are there. Raises PeerError,
        CollectiveTimeoutError."""
        self._bounded(event.synchronize, "measuring")

    def _bounded(self, wait: Callable[[], object], doing: str) -> None:
        """Have the host wait for the device so. ``doing``: for messages."""
        what = f"rank {self.board.rank}, group of {self.ranks.size} ranks, {doing} the links of {self.links.name}"
        try:
            bounded(wait, self.board, self.timeout_s, what)
        except TimeoutError as error:
            raise CollectiveTimeoutError(f"{what}: nothing came within {self.timeout_s:g} s") from error
        except RuntimeError as error:
            if isinstance(error, CommlayerError) or not self.board.is_broken:
                raise
            raise PeerError(f"{what}: {self.board.culprit()}") from error

    # Side by side

    def ends_us(self, call: GridCall | None, num_products: int) -> dict[Resource, float]:
        ends: dict[Resource, AcceleratorEvent] = {}
        with self.on():
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

    def size_products(self, rows: int) -> None:
        """Have the matrix products that run beside exchanges be of so many rows and columns."""
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        with self.on():
            self._factors = [torch.ones(rows, rows, dtype=dtype, device=self.device) for _ in range(3)]

    # The end

    def close(self) -> None:
        self._bounded(self._accelerator.synchronize, "at the end of measuring")
        for inner in self._inners.values():
            inner.backend.shutdown()
        self._inners, self._groups = {}, {}

    def leave(self, error: BaseException, why: str) -> None:
        if not self.board.is_broken:  # else they have heard
            self.board.leave(why)
        with contextlib.ExitStack() as stack:  # all of them, whatever fails
            for inner in self._inners.values():
                stack.callback(inner.backend.abort)
