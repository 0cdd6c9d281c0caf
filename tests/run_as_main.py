"""A program, or a module, run as the main one of this process: what launchers do after they have prepared it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

__all__ = ["run_as_main"]


def run_as_main(arguments: Sequence[str], usage: str) -> None:
    """Run ``PROGRAM.py ARGUMENTS…`` as ``python PROGRAM.py`` does, or ``-m MODULE ARGUMENTS…`` as ``python -m MODULE``.

    Raises SystemExit, with ``usage``, where neither is given.
    """
    words = list(arguments)
    is_module = words[:1] == ["-m"]
    if len(words) < 1 + is_module:
        raise SystemExit(usage)
    if is_module:
        sys.argv = words[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    if not getattr(
        sys.flags, "safe_path", False
    ):  # as python PROGRAM.py has it: -m has put the working directory there
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    runpy.run_path(words[0], run_name="__main__")
