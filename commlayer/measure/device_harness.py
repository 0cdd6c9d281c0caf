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
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed has them too, but not for type checkers

from commlayer.agree.discovery import Grid
from commlayer.calls.movement import Movement
from commlayer.devices.accelerator import AcceleratorDevice, AcceleratorEvent
from commlayer.devices.device_contract import Messenger
from commlayer.engine.device_plans import DevicePlans
from commlayer.engine.group_plans import Choices
from commlayer.engine.runner import Runner, drive
from commlayer.failures.waits import bounded
from commlayer.measure.calls import CALL_OPTIONS, GridCall, TimedCall, TimedGroup, begin_own
from commlayer.measure.harness import ALONE_TIMES, Harness
from commlayer.profiles.errors import CollectiveTimeoutError, CommlayerError, PeerError, UsageError
from commlayer.profiles.links import Resource
from commlayer.scheduler.plan import Op, Plan, Strategy
from commlayer.scheduler.probes import Probe
from commlayer.settings import Settings
from commlayer.transport.accelerators import MakeInner, registered_accelerators
from commlayer.transport.c10d import is_usable
from commlayer.transport.contract import StartedPlan
from commlayer.transport.nccl import InnerMessenger, Nccl, connect_now, make_nccl
from commlayer.transport.stream_scripts import StepMessenger
from commlayer.transport.streams import StreamCall, StreamTransport

__all__ = ["DeviceGroup", "DeviceHarness", "DeviceLinks", "device_links"]

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
        self.rank, self.device, self.inner = rank, device, inner
        self.size = sum(map(len, nodes))
        self.messenger: Messenger = InnerMessenger(inner, lambda: None)  # it is the group's to close
        choices = Choices(tuple(map(len, nodes)), None, Settings(plan=Strategy.DIRECT.value))
        self._plans = DevicePlans(nodes, rank, choices, lambda *_: self.messenger, lambda: "", lambda: 0.0)

    def prepare(self, plan: Plan) -> None:
        self._plans.prepare(plan, self.device)

    def run(self, plan: Plan, source: torch.Tensor, target: torch.Tensor) -> None:
        self._plans.run(Movement(plan, source, target)).under_way.finish()

    def run_own(self, collective: str, source: torch.Tensor, target: torch.Tensor) -> None:
        verbs: Any = self.inner.verbs or self.inner.backend
        begin_own(self.inner.backend, verbs, collective, source, target, CALL_OPTIONS[collective]()).wait()

    def send(self, message: torch.Tensor) -> None:
        is_sender, parts = self.rank == 0, [(1 - self.rank, message)]
        self.messenger.exchange(parts if is_sender else [], [] if is_sender else parts).wait()


@dataclass(eq=False)
class DeviceHarness(Harness):
    """Groups over a device's own backend, timed by the device's clock. ``ranks`` agree over Gloo,
    and meet in their group ``world``. ``factors``: those of the matrix products that run beside
    exchanges, and the result."""

    links: DeviceLinks
    factors: list[torch.Tensor] = field(default_factory=list, init=False)
    _groups: dict[str, DeviceGroup] = field(default_factory=dict, init=False)

    def begin(self) -> None:
        self._accelerator = AcceleratorDevice(self.device)
        self._stream = self._accelerator.stream(is_high=False)
        self._beside = self._accelerator.stream(is_high=False)  # what computes while others exchange
        # What the program has launched is not to run beside what is timed.
        self._bounded(self._accelerator.synchronize, "before measuring")
        with self.on():
            self._token = torch.zeros(1, device=self.device)

    def on(self) -> contextlib.AbstractContextManager[object]:
        return self._accelerator.on(self._stream)

    # Groups

    def group(self, where: str) -> DeviceGroup:
        """This rank's group of that name. The first call for a name is collective."""
        if where in self._groups:
            return self._groups[where]
        places, nodes = self._places(where)
        member, ranks = places.index(self.ranks.rank), [self.ranks.global_ranks[place] for place in places]
        store = PrefixStore(f"{where}/{ranks[0]}", self.store)
        limit, purpose = timedelta(seconds=self.timeout_s), f"messages of {self.links.name}"

        def make() -> Nccl:
            return self.links.make(store, member, ranks, limit, f"{where} (measured)")

        with self.board.connecting(ranks, where, purpose, self.timeout_s):
            inner = bounded(make, self.board, self.timeout_s, purpose)
        self._groups[where] = DeviceGroup(nodes, member, self.device, inner)
        return self._groups[where]

    def connect_grid(self, grid: Grid) -> Runner:
        """Return what runs plans on the grid, whose rows and columns are groups that are measured
        anyway."""
        lines: dict[Op, StepMessenger] = {}
        for op, ranks in ((Op.ALL_TO_ALL, grid.ep_ranks), (Op.ALL_GATHER, grid.tp_ranks)):
            if len(ranks) > 1:
                places = [self.ranks.global_ranks.index(rank) for rank in ranks]
                where = next(where for where, members in self.members.items() if list(members) == places)
                lines[op] = StepMessenger(self.group(where).messenger, tuple(range(len(places))))
        return Runner(StreamTransport(self._accelerator, lambda step: lines.get(step.op), list(lines.values())))

    # Times

    def time_us(self, task: Callable[[], Any]) -> float:
        with self.on():
            begin, end = self._span(task, is_together=True)
        self._bounded(end.synchronize, "measuring")
        return end.elapsed_us(begin)

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
                is_together = probe.leg.is_exchange
                if times and not is_together:  # likewise: some codecs wait for the device
                    self._bounded(times[-1][-1][1].synchronize, "measuring")
                repeats = 1 if is_together else ALONE_TIMES
                times.append([self._span(call.run, is_together=is_together) for _ in range(repeats)])
            end = self._stream.record()
        self._bounded(end.synchronize, "measuring")
        return [min(end.elapsed_us(begin) for begin, end in spans) for spans in times]

    def _span(self, task: Callable[[], Any], *, is_together: bool) -> Span:
        """Launch ``task``; ``is_together``: to begin on all ranks at the same time."""
        if is_together:
            self.group("world").run_own("all_reduce", self._token, self._token)
        begin = self._stream.record_time()
        task()
        return begin, self._stream.record_time()

    def _bounded(self, wait: Callable[[], object], doing: str) -> None:
        """Have the host wait for the device, for as long as all ranks are there. ``doing``: for
        messages. Raises PeerError, CollectiveTimeoutError."""
        what = f"rank {self.board.rank}, group of {self.ranks.size} ranks, {doing} the links of {self.links.name}"
        try:
            bounded(wait, self.board, self.timeout_s, what)
        except TimeoutError as error:
            raise CollectiveTimeoutError(f"{what}: nothing came within {self.timeout_s:g} s") from error
        except RuntimeError as error:
            if isinstance(error, CommlayerError) or not self.board.is_broken:
                raise
            raise PeerError(f"{what}: {self.board.judge.culprit()}") from error

    # Side by side

    def ends_us(self, call: GridCall | None, num_products: int) -> dict[Resource, float]:
        ends: dict[Resource, AcceleratorEvent] = {}
        started: StartedPlan | None = None
        with self.on():
            self.group("world").run_own("all_reduce", self._token, self._token)  # all begin together
            begin = self._stream.record_time()
            if call is not None:
                started = call.start()
                assert isinstance(started, StreamCall)  # of the transport that was made here
                drive(call.plan, started)
                transport = call.runner.transport
                assert isinstance(transport, StreamTransport)  # likewise
                for resource in dict.fromkeys(step.resource for step in call.plan.steps):
                    stream: Any = transport.streams[resource]  # of this device, which can be measured
                    ends[resource] = stream.record_time()
            if num_products:
                self._beside.wait(begin)
                with self._accelerator.on(self._beside):
                    for _ in range(num_products):
                        torch.mm(*self.factors[:2], out=self.factors[2])
                ends[Resource.COMPUTE] = self._beside.record_time()
            if started is not None:
                started.finish()
            for end in ends.values():
                self._stream.wait(end)
            last = self._stream.record()
        self._bounded(last.synchronize, "measuring")
        return {resource: end.elapsed_us(begin) for resource, end in ends.items()}

    # The end

    def close(self, error: BaseException | None = None, why: str = "") -> None:
        """See :meth:`HostHarness.close`."""
        if error is None:
            self._bounded(self._accelerator.synchronize, "at the end of measuring")
            for group in self._groups.values():
                group.inner.backend.shutdown()
            self._groups = {}
            return
        if not self.board.is_broken:  # else they have heard
            self.board.leave(why)
        with contextlib.ExitStack() as stack:  # all of them, whatever fails
            for group in self._groups.values():
                stack.callback(group.inner.backend.abort)
