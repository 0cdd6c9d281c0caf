"""The inner groups of a group of the backend: Gloo, the engine's planned group, its calls on
devices; and who answers for it after the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, Work

from commlayer.backend.members import Noted
from commlayer.calls.instruments import Instruments
from commlayer.calls.movement import Movement
from commlayer.engine.executor import Executor
from commlayer.engine.group_plans import Choices
from commlayer.engine.planned import PlannedGroup
from commlayer.failures.forks import inherited
from commlayer.profiles.errors import GroupError
from commlayer.scheduler.call_moves import Counts

__all__ = ["ComparesCalls", "Destroyed", "DeviceCalls", "Inherited", "InnerGroups"]


class ComparesCalls(Protocol):
    """Compares the calls of a group across its ranks before they move a byte, where that is asked
    for. :class:`commlayer.agree.signature_check.SignatureCheck` does, and says what each method
    is."""

    gloo: Any

    def compare(self, sequence: int, call: str, timeout_s: float) -> None: ...
    def compare_splits(
        self, sequence: int, sent: Sequence[int], expected: Sequence[int], unit: str, timeout_s: float
    ) -> None: ...
    def refuse(self, sequence: int, call: str, why: Exception) -> None: ...


class InnerVerbs(Protocol):
    """The inner backend of a type of device. :class:`commlayer.transport.nccl.Nccl` is one."""

    def own(self, name: str, *args: Any) -> Work: ...


class DeviceCalls(Protocol):
    """A group's calls on tensors of one type of device, as the group asks for them.

    The group knows no more of devices, so that no rank without one loads what runs plans there.
    :class:`commlayer.backend.on_device.OnDevice` runs such calls, and says what each method does.
    """

    instruments: Instruments

    @property
    def inner(self) -> InnerVerbs: ...
    @property
    def plans(self) -> Executor: ...
    def issue(self, name: str, collective: str, noted: Noted, *args: Any) -> Work: ...
    def known_choices(self, device: torch.device) -> Choices: ...
    def start(self, movement: Movement) -> Work: ...
    def start_exchange(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        rows: tuple[Sequence[int], Sequence[int]],
        counts: Counts,
    ) -> Work: ...
    def start_coalescing(self) -> None: ...
    def end_coalescing(self) -> Work: ...
    def when_known(self, attach: Callable[[], None]) -> None: ...
    def use_lane(self, lane: str, cut: tuple[str, bool]) -> None: ...
    def set_timeout(self, timeout: timedelta) -> None: ...
    def finish(self, patience_s: float) -> None: ...
    def under_way_after(self, patience_s: float) -> str: ...
    def end(self, *, drain: bool) -> None: ...


class Destroyed:
    """Stands in for the inner backend of a destroyed group: whatever is asked of it is the caller's mistake."""

    def __init__(self, who: str) -> None:
        self._who = who

    def __getattr__(self, name: str) -> NoReturn:
        raise GroupError(
            f"{self._who}: {name.strip('_')} after the group was destroyed (or aborted): make another with "
            "torch.distributed.new_group, or call destroy_process_group later"
        )


class Inherited(Destroyed):
    """Stands in for the inner backends of a parent's groups in a forked child, where nothing may be asked of them."""

    def __getattr__(self, name: str) -> NoReturn:
        raise GroupError(inherited(f"{self._who}: {name.strip('_')}"))


class InnerGroups:
    """The inner groups of one group, which all of its parts look up here: at the end others stand in.

    ``gloo`` runs the collectives of CPU tensors, ``direct`` those that C++ calls without asking Python, ``planned`` the plans,
    ``on_devices`` all of other tensors, by the type of their device (CUDA's is NCCL); ``store`` is the group's own.
    """

    __slots__ = ("direct", "gloo", "on_devices", "planned", "signatures", "store")

    def __init__(
        self,
        gloo: dist.ProcessGroupGloo,
        direct: dist.ProcessGroupGloo,
        planned: PlannedGroup,
        store: Store,
        signatures: ComparesCalls | None,
    ) -> None:
        self.gloo: Any = gloo  # a Backend, whose methods torch's annotations lack, or Destroyed; so are the next three
        self.direct: Any = direct
        self.planned: Any = planned
        self.store: Any = store
        self.signatures = signatures
        self.on_devices: dict[str, DeviceCalls] = {}

    @property
    def is_ended(self) -> bool:
        """Whether :meth:`stand_in` was called."""
        return isinstance(self.gloo, Destroyed)

    @property
    def timeout(self) -> timedelta:
        """The timeout of calls that bring none of their own: where torch's own _set_pg_timeout puts it."""
        return self.gloo.options._timeout  # type: ignore[no-any-return]

    def set_timeout(self, timeout: timedelta) -> None:
        """Change :attr:`timeout`, everywhere."""
        for gloo in (self.gloo, self.direct):
            gloo._set_default_timeout(timeout)
        self.planned.timeout_s = timeout.total_seconds()
        for each in self.on_devices.values():
            each.set_timeout(timeout)

    def stand_in(self, destroyed: Destroyed) -> None:
        """Let ``destroyed`` answer whatever is asked of these groups from now on."""
        self.gloo = self.direct = self.planned = self.store = destroyed
        self.signatures, self.on_devices = None, {}
