"""torch.compile must not trace into a group's methods: a process group is opaque to it.

It would try, because they are Python. Each code object is marked as skipped, with what is nested in it.
"""

from __future__ import annotations

import importlib
import pkgutil
import types
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["skip_methods"]

_is_done = False


def skip_methods() -> None:
    """Mark the backend's functions, once."""
    global _is_done
    if _is_done:
        return
    _is_done = True
    frames = torch._C._dynamo.eval_frame
    for code in _all_code():
        if hasattr(frames, "set_code_exec_strategy"):
            skip = frames._FrameAction.SKIP
            frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
        else:  # before torch 2.7
            frames.skip_code(code)  # type: ignore[attr-defined]


def _all_code() -> Iterator[types.CodeType]:
    own = [f"commlayer.backend.{found.name}" for found in pkgutil.iter_modules([str(Path(__file__).parent)])]
    for name in (*own, "commlayer.engine.progress"):
        module = importlib.import_module(name)
        for value in vars(module).values():
            if isinstance(value, types.FunctionType) and value.__module__ == module.__name__:
                yield from _nested(value.__code__)
            elif isinstance(value, type) and value.__module__ == module.__name__:
                for member in vars(value).values():
                    function = member.fget if isinstance(member, property) else member
                    if isinstance(function, types.FunctionType):
                        yield from _nested(function.__code__)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)
