"""The start and the end of a rank's emulated accelerator: it comes when torch does, and tells the cluster what it did.

Emulation loads no torch itself. A forked rank mostly has it; a program loads it, or does not. Which device it is comes in
``COMMLAYER_EMULATED_COMPUTE``; reports go into the folder ``COMMLAYER_EMULATED_REPORTS``, a file for each rank.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from commlayer.emulation.accelerators.device import Accelerator
from commlayer.emulation.accelerators.device_clock import DeviceClock, DeviceReport, device_clock

__all__ = ["DEVICE", "REPORTS", "STARTUP_FOLDER", "computing", "load_before_fork", "read_reports", "start_with_program"]

DEVICE, REPORTS = "COMMLAYER_EMULATED_COMPUTE", "COMMLAYER_EMULATED_REPORTS"
STARTUP_FOLDER = str(Path(__file__).parent / "startup")
_LAUNCHES = "commlayer.emulation.accelerators.launches"  # by name: it loads torch, and so is loaded after torch alone


def computing(call: Callable[[], Any]) -> Any:
    """Return ``call()``, run on the accelerator that the environment names. In a forked rank, which ends without ``atexit``."""
    _start_when_torch_loads()
    try:
        return call()
    finally:
        _write_report()


def start_with_program() -> None:
    """Start the accelerator in a rank's program, from ``sitecustomize``. A launcher, such as torchrun, is no rank."""
    if DEVICE in os.environ and "RANK" in os.environ:
        _start_when_torch_loads()
        atexit.register(_write_report)


def load_before_fork() -> None:
    """Load what ranks will need where torch is there already: forked, they have it."""
    if "torch" in sys.modules:
        importlib.import_module(_LAUNCHES)


def _start_when_torch_loads() -> None:
    if "torch" in sys.modules:
        _start()
    else:
        sys.meta_path.insert(0, _TorchFinder())


def _start() -> None:
    clock = DeviceClock(Accelerator.from_text(os.environ[DEVICE]), int(os.environ["RANK"]))
    importlib.import_module(_LAUNCHES).start_launches(clock)


class _TorchFinder(MetaPathFinder):
    """Finds torch once, as the others do, with a loader that starts the accelerator behind it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _TorchLoader(spec.loader)
        return spec


class _TorchLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None  # it is being loaded by it
        module.__spec__.loader = module.__loader__ = self._loader  # what torch and inspect ask for is torch's own
        self._loader.exec_module(module)
        _start()


def _write_report() -> None:
    """In one step: whoever reads the folder finds whole files."""
    clock, folder = device_clock(), os.environ.get(REPORTS)
    if clock is None or folder is None:
        return
    clock.synchronize()
    part = Path(folder, f"{clock.rank}.part")
    part.write_text(json.dumps(asdict(clock.report())), encoding="utf-8")
    part.replace(part.with_suffix(".json"))


def read_reports(folder: str) -> list[DeviceReport]:
    """Return what the ranks wrote, by rank: those that ended by themselves and had loaded torch."""
    reports = [DeviceReport(**json.loads(path.read_text(encoding="utf-8"))) for path in Path(folder).glob("*.json")]
    return sorted(reports, key=lambda report: report.rank)
