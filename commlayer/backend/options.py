"""torch's option objects, from whatever form of a call was used.

A verb of a ProcessGroup can be called with an options object (torch.distributed and C++ do), or
with its fields spelt out (``group.broadcast(tensor, root=1)``, ``group.reduce(tensor, 1, op)``).
The first is recognised by type before this module is asked.
"""

from __future__ import annotations

from datetime import timedelta
from operator import index
from typing import Any, TypeVar

from torch._C._distributed_c10d import ReduceOp

__all__ = ["like", "make", "timeout_of", "with_op"]

Options = TypeVar("Options")


def make(kind: type[Options], opts: Any, timeout: Any, named: dict[str, Any]) -> Options:
    """Options of ``kind``; ``opts`` may be one, a reduce operation, a root, a timeout or None.
    Asynchronous, as torch's are.

    ``timeout``: what stands behind ``opts``, which is an operation where that is a root. Raises
    TypeError for another kind of options, and for a keyword that no form of the call has.
    """
    opts = named.pop("opts", opts)
    if isinstance(opts, kind) and timeout is None and not named:
        return opts
    made: Any = opts if isinstance(opts, kind) else kind()
    for value in (opts, timeout, named.pop("op", None), named.pop("root", None)):
        if value is not None and value is not made:
            _put(value, made)
    if named:
        raise TypeError(f"unexpected arguments {', '.join(named)}")
    return made  # type: ignore[no-any-return]


def _put(given: Any, made: Any) -> None:
    """Write ``given`` where its type says that it belongs: a number is a root."""
    is_op = isinstance(given, (ReduceOp, ReduceOp.RedOpType))
    if isinstance(given, timedelta):
        made.timeout = given
    elif is_op and hasattr(made, "reduceOp"):
        made.reduceOp = given
    elif not is_op and hasattr(given, "__index__") and hasattr(made, "rootRank"):
        made.rootRank = index(given)
    else:
        raise TypeError(f"expected {type(made).__name__}, got {type(given).__name__}")


def timeout_of(opts: Any) -> float | None:
    """The timeout that a call asks for, seconds; None: the group's."""
    seconds: float = opts.timeout.total_seconds()
    return seconds if seconds >= 0 else None


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
