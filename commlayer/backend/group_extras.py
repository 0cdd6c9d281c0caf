"""The extras of a group, which only some have beside calls of plain CPU tensors: calls on devices,
sums in wire formats, the comparison of calls.

Whoever makes groups is handed this module, and so loads none of it by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, PrefixStore, get_debug_level

from commlayer.agree.messages import everyones_numbers
from commlayer.agree.signature_check import SignatureCheck
from commlayer.backend.call_hooks import take_hooks
from commlayer.backend.create import Connector
from commlayer.backend.device_profiles import DeviceSurvey
from commlayer.backend.encoded_sums import encoded_sum
from commlayer.backend.group import CommlayerGroup
from commlayer.backend.group_options import GroupOptions
from commlayer.backend.known_plans import EncodedSum
from commlayer.backend.launcher import Launcher
from commlayer.backend.on_device import OnDevice
from commlayer.backend.world import World
from commlayer.devices.device_contract import Messenger
from commlayer.engine.device_plans import DevicePlans
from commlayer.engine.group_plans import Choices
from commlayer.engine.planned import PlannedGroup
from commlayer.failures.waits import bounded
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.decision import Planner
from commlayer.transport.accelerators import MakeInner, registered_accelerators
from commlayer.transport.c10d import is_usable
from commlayer.transport.nccl import InnerMessenger, Nccl, connect_now, like_options, make_nccl
from commlayer.wire.kernels import row_kernels

__all__ = ["give", "lacking", "signatures"]

_Connect = Callable[[str, str, timedelta, torch.device], Messenger]
"""Makes a communicator for the messages of plans, connected: its purpose, the group's lane, its
timeout, the device. Collective."""


def lacking(options: GroupOptions) -> dict[str, str]:
    """Name what this rank lacks of what ``options`` ask for, each with words.

    A rank that could not encode would refuse its first sum on CUDA alone, and the others would wait
    for it.
    """
    if options.sum_formats and is_usable():
        try:
            row_kernels()
        except UsageError as error:
            return {"wire on CUDA": f"impossible here: {error}"}
    return {}


def signatures(connector: Connector, planned: PlannedGroup, gloo: Any) -> SignatureCheck | None:
    """Make the comparison of calls where COMMLAYER_DEBUG asks for one; else None. ``gloo``: over
    which its ranks find each other."""
    if planned.settings.debug != "detail" and get_debug_level() != DebugLevel.DETAIL:
        return None
    request, control = connector.request, connector.gloo("control", beside=gloo)
    return SignatureCheck(
        control,
        connector.store,
        request.rank,
        request.global_ranks,
        request.name,
        connector.board,
        planned.explain,
    )


def give(group: CommlayerGroup, connector: Connector, options: GroupOptions, job: World) -> None:
    """Give ``group``, which is being made with ``options``, hooks of calls, sums in wire formats, CUDA's tensors
    where they can exist, and those of registered devices. Collective."""
    request, store = connector.request, connector.store
    take_hooks(group)
    encoded: EncodedSum | None = None
    if options.sum_formats and len(request.global_ranks) > 1:
        encoded = partial(encoded_sum, options.sum_formats)
        group.parts.calls.encoded_sums = partial(group.parts.known.sum_now, encoded)
    devices = _Devices(connector, options, job, encoded)
    if is_usable():
        # The ranks of one that stands alone have other numbers in the job, or are not in it.
        is_split = not request.stands_alone
        nccl = make_nccl(
            store,
            request.rank,
            request.global_ranks,
            request.timeout,
            request.name,
            options.nccl,
            is_default=request.is_default,
            is_split=is_split,
        )
        kind = dist.ProcessGroup.BackendType.NCCL
        group._register_backend(torch.device("cuda"), kind, nccl.backend)
        devices.put(group, "cuda", nccl, devices.own_nccl)
    for device_type, make in registered_accelerators().items():
        with connector.connecting(f"for tensors on {device_type}"):
            own = PrefixStore(f"{device_type}/", store)
            inner = make(own, request.rank, request.global_ranks, request.timeout, request.name)
        devices.put(group, device_type, inner, partial(devices.own_of, make))


@dataclass(frozen=True)
class _Devices:
    """Makes the calls on devices of a group, with all of its ranks. It holds no group, which must
    be freed with the last who refers to it."""

    connector: Connector
    options: GroupOptions
    job: World
    encoded: EncodedSum | None

    def put(self, group: CommlayerGroup, device_type: str, inner: Nccl, connect: _Connect) -> None:
        """Have ``group`` move tensors of a type of device by ``inner``, and by plans."""
        order, groups = group.parts.order, group.parts.inner
        members, planned, me = order.members, groups.planned, weakref.ref(group)
        choices = self._choices(device_type)
        choices.reasons = planned.choices.reasons  # one list for the statistics

        def lane() -> str:
            return order.lane_name

        def connected(purpose: str, device: torch.device) -> Messenger:
            return connect(purpose, lane(), groups.timeout, device)

        def timeout_s() -> float:
            return groups.timeout.total_seconds()

        def tell(counts: Sequence[int]) -> list[list[int]]:
            alive = me()
            assert alive is not None  # it has been called
            return everyones_numbers(alive, counts, "to exchange the counts of an all_to_all")

        survey = self._survey()
        plans = DevicePlans(
            planned.nodes,
            members.rank,
            choices,
            connected,
            lane,
            timeout_s,
            survey,
            planned,
        )
        track = group.open_track(plans, device_type)
        track.shares, track.rank = group.counters.shares, group.counters.rank
        on_device = OnDevice(Launcher(inner, plans, order, track, group.counters, tell, self.encoded))
        order.instruments.beside.append(on_device.instruments)
        groups.on_devices[device_type] = on_device

    def _choices(self, device_type: str) -> Choices:
        """The choices of plans for tensors on a device."""
        global_ranks = self.connector.request.global_ranks
        shape = tuple(map(len, self.job.nodes_of(global_ranks)))
        planner = self.job.device_planner(device_type) if len(global_ranks) > 1 else None
        # Trials are run by the host, which does not see a device's steps; connections are the
        # host's.
        settings = replace(self.job.settings, trials="off", connections=None)
        return Choices(shape, planner, settings)

    def _survey(self) -> Callable[[torch.device], Planner | None] | None:
        """Return what finds out, with all ranks, by which profile to plan for a device; None where
        that is said, or nothing is to be planned there."""
        settings, is_alone = self.job.settings, len(self.connector.request.global_ranks) == 1
        if is_alone or settings.profile not in (None, "auto") or settings.plan is not None:
            return None
        return DeviceSurvey(self.connector, self.job).planner

    def own_nccl(self, purpose: str, lane: str, timeout: timedelta, device: torch.device) -> Messenger:
        """A communicator of NCCL's, with the options that the program gave for the group's own."""
        request = self.connector.request
        own, name = PrefixStore(f"{purpose}/", self.connector.store), f"{request.name}: {purpose}"

        def make() -> Nccl:
            nccl_options, members = like_options(self.options.nccl), request.global_ranks
            made = make_nccl(
                own,
                request.rank,
                members,
                timeout,
                name,
                nccl_options,
                is_default=False,
                is_split=False,
                lane=lane,
            )
            connect_now(made, device)
            return made

        return self._messenger(make, timeout, purpose)

    def own_of(self, maker: MakeInner, purpose: str, lane: str, timeout: timedelta, device: torch.device) -> Messenger:
        """A communicator of a registered device, which knows no lanes, and connects when it is made."""
        del lane, device
        request = self.connector.request
        own, name = PrefixStore(f"{purpose}/", self.connector.store), f"{request.name}: {purpose}"
        ranks = request.global_ranks
        return self._messenger(lambda: maker(own, request.rank, ranks, timeout, name), timeout, purpose)

    def _messenger(self, make: Callable[[], Nccl], timeout: timedelta, purpose: str) -> Messenger:
        limit_s = timeout.total_seconds()
        with self.connector.connecting(purpose):
            return InnerMessenger(bounded(make, self.connector.board, limit_s, purpose))
