"""The inner groups of a group of the backend: Gloo, NCCL, the engine's planned group; and who answers for it after the end."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from commlayer.agree.signature_check import SignatureCheck
from commlayer.engine.planned import PlannedGroup
from commlayer.failures.forks import inherited
from commlayer.profiles.errors import GroupError

if TYPE_CHECKING:
    from commlayer.backend.on_device import OnDevice

__all__ = ["Destroyed", "Inherited", "InnerGroups"]


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
    """The same in a forked child, for the groups of its parent."""

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
        signatures: SignatureCheck | None,
    ) -> None:
        self.gloo: Any = gloo  # a Backend, whose methods torch's annotations lack, or Destroyed; so are the next three
        self.direct: Any = direct
        self.planned: Any = planned
        self.store: Any = store
        self.signatures = signatures
        self.on_devices: dict[str, OnDevice] = {}

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
            each.inner.backend._set_default_timeout(timeout)
            each.plans.set_timeout(timeout)

    def stand_in(self, destroyed: Destroyed) -> None:
        """Let ``destroyed`` answer whatever is asked of these groups from now on."""
        self.gloo = self.direct = self.planned = self.store = destroyed
        self.signatures, self.on_devices = None, {}
