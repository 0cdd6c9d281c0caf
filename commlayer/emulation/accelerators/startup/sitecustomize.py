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


def _run_the_hidden_one() -> None:
    others = [path for path in sys.path if Path(path or ".").resolve() != _HERE.resolve()]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


start_with_program()
_run_the_hidden_one()
