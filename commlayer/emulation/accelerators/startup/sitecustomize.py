"""Python's own start-up hook: a rank's program finds the emulated accelerator there when it loads torch.

A ``sitecustomize`` of the machine's own, which this one hides, is run as well.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

from commlayer.emulation.accelerators.starting import start_with_program

__all__: list[str] = []

_HERE = Path(__file__).parent


start_with_program()
_others = [path for path in sys.path if Path(path or ".").resolve() != _HERE.resolve()]
_hidden = PathFinder.find_spec("sitecustomize", _others)
if _hidden is not None and _hidden.loader is not None:
    _hidden.loader.exec_module(module_from_spec(_hidden))
