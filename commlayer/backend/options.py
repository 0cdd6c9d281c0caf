"""torch's option objects, from whatever form of a call was used.

A verb of a ProcessGroup can be called with an options object (torch.distributed and C++ do), or with its fields spelt out
(``group.broadcast(tensor, root=1)``). The first is recognised by type before this module is asked.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import ReduceOp

__all__ = ["like", "make", "with_op"]

Options = TypeVar("Options")


def make(kind: type[Options], opts: Any, timeout: timedelta | None, named: dict[str, Any]) -> Options:
    """Options of ``kind``; ``opts`` may be one, a reduce operation, a root, a timeout or None. Asynchronous, as torch's are.

    Raises TypeError for another kind of options, and for a keyword that no form of the call has.
    """
    opts = named.pop("opts", opts)
    if isinstance(opts, kind) and timeout is None and not named:
        return opts
    made: Any = opts if isinstance(opts, kind) else kind()
    if isinstance(opts, timedelta):
        timeout = opts
    elif isinstance(opts, (ReduceOp, ReduceOp.RedOpType)):
        made.reduceOp = opts
    elif isinstance(opts, int):
        made.rootRank = opts
    elif opts is not None and not isinstance(opts, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(opts).__name__}")
    if "op" in named:
        made.reduceOp = named.pop("op")
    if "root" in named:
        made.rootRank = named.pop("root")
    if timeout is not None:
        made.timeout = timeout
    if named:
        raise TypeError(f"unexpected arguments {', '.join(named)}")
    return made  # type: ignore[no-any-return]


def like(kind: type[Options], opts: Any) -> Options:
    """New options of ``kind`` with the timeout of ``opts``."""
    made: Any = kind()
    made.timeout = opts.timeout
    return made  # type: ignore[no-any-return]


def with_op(kind: type[Options], opts: Any, op: Any) -> Options:
    """New options of ``kind`` with the timeout of ``opts`` and another operation."""
    made: Any = like(kind, opts)
    made.reduceOp = op
    if hasattr(opts, "rootRank") and hasattr(made, "rootRank"):
        made.rootRank = opts.rootRank
    return made  # type: ignore[no-any-return]
