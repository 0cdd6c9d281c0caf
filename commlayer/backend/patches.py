"""Functions of torch.distributed that look at a backend's *name* or class where they mean what it
can do.

- ``monitored_barrier`` refuses every backend that is not named gloo, although it then only calls
  the group's method. It is wrapped when the first group of ours is made; other groups see torch's
  own.
- ``_set_pg_timeout`` sets the timeout of the registered backends of the classes that it knows. Ours
  wait elsewhere too.
- ``batch_isend_irecv`` puts messages into one block for groups of exactly torch's class. One by
  one, on a device, two ranks that send to each other before they receive wait for ever; on the CPU,
  one that is refused leaves a batch half sent, and the next one pairs wrongly.
- A backend is registered for types of devices before anybody may ask whether the machine has any;
  ``ShardedTensor.gather`` makes tensors on one that is not the CPU, if there is one. The list is
  corrected when a group is made.
- ``_new_process_group_helper`` asks a backend for a group on its members only. The ranks that call
  ``new_group`` for a group that they are not in say with which list (called_lists.py).
- ``_store_based_barrier``, behind making a group where TORCH_DIST_INIT_BARRIER is 1, waits its
  whole timeout for a rank that is dead (store_barrier.py).
- ``init_process_group`` waits for the process that hosts the job's store as long as torch's client
  does, twice the timeout, and names nobody. For groups of this backend the store is made by
  store_host.py.
- ``torch.compile`` would trace into a group's methods, because they are Python; a process group is
  opaque to it. Each code object is marked as skipped, with what is nested in it.
- ``init_process_group`` and ``new_group`` are wrapped once more where ``COMMLAYER_AS`` is set:
  programs that accept known names only (accelerate, the HF Trainer) then get this backend under the
  name ``gloo`` or ``nccl``.

Rejected: a name that compares equal to "gloo". It would answer wrongly to everybody else who asks.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

__all__ = [
    "answer_to",
    "correct_devices",
    "teach_store",
    "teach_torch",
]

_MARK, _ALIAS_MARK = "_commlayer_wraps", "_commlayer_translates"


def _replace(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]], mark: str = _MARK) -> None:
    """Put ``make(original)`` in the place of a function of torch.distributed, once for each
    ``mark``."""
    original = getattr(c10d, name)
    if hasattr(original, mark):
        return
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, mark, original)
    for module in [module for key, module in sys.modules.items() if key.startswith("torch.distributed")]:
        if getattr(module, name, None) is original:  # device_mesh has names of its own for it
            setattr(module, name, wrapper)


def teach_store() -> None:
    """Let ``init_process_group`` of this backend wait no longer than its timeout for the job's
    store, and say whose it is."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
            if "commlayer" not in str(backend).lower():
                return original(backend, *args, **kwargs)
            from commlayer.backend.store_host import own_store_waits

            with own_store_waits():
                return original(backend, *args, **kwargs)

        return init_process_group

    _replace("init_process_group", make)


def correct_devices() -> None:
    """Let torch know for which types of devices this backend has collectives in this process."""
    from commlayer.transport.c10d import is_usable  # this module may be imported inside ``import torch``

    dist.Backend.backend_capability["commlayer"] = ["cpu", "cuda"] if is_usable() else ["cpu"]


def _wrapped_monitored_barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``torch.distributed.monitored_barrier`` work on groups of this backend."""

    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        from commlayer.backend.group import CommlayerGroup

        own = group if group is not None else c10d.GroupMember.WORLD
        if not isinstance(own, CommlayerGroup):
            return original(group, timeout, wait_all_ranks)
        limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
        limit = c10d.default_pg_timeout if limit is None else limit
        return own.monitored_barrier(limit, wait_all_ranks)

    return monitored_barrier


def _wrapped_set_pg_timeout(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch's ``_set_pg_timeout`` reach all that a group of this backend waits with, not its
    registered backend alone."""

    def _set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
        from commlayer.backend.group import CommlayerGroup

        own = group if group is not None else c10d.GroupMember.WORLD
        original(timeout, group)
        if isinstance(own, CommlayerGroup):
            own.set_timeout(timeout)

    return _set_pg_timeout


def _wrapped_batch_isend_irecv(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``batch_isend_irecv`` post messages as one block on groups of this backend too: all of
    them or none."""

    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        from commlayer.backend.group import CommlayerGroup

        first = p2p_op_list[0] if p2p_op_list else None
        group = getattr(first, "group", None) or c10d.GroupMember.WORLD
        if first is None or not isinstance(group, CommlayerGroup):
            return original(p2p_op_list)  # type: ignore[no-any-return]
        c10d._check_p2p_op_list(p2p_op_list)
        for each in p2p_op_list:
            tensor = torch.view_as_real(each.tensor) if each.tensor.is_complex() else each.tensor
            group.require_message("send" if each.op is dist.isend else "recv", tensor, each.group_peer)
        if first.tensor.is_cpu:
            return original(p2p_op_list)  # type: ignore[no-any-return]
        device = first.tensor.device
        group._start_coalescing(device)
        try:
            for each in p2p_op_list:
                peer = {"group_dst" if each.op is dist.isend else "group_src": each.group_peer}
                each.op(each.tensor, group=each.group, tag=each.tag, **peer)
        finally:
            work = group._end_coalescing(device)
        return [work]

    return batch_isend_irecv


def _wrapped_new_process_group_helper(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a rank that calls ``new_group`` for a group of this backend that it is not in compare its
    list with the others'."""

    def _new_process_group_helper(
        group_size: int,
        group_rank: int | None,
        global_ranks_in_group: list[int],
        backend: Any,
        store: Any,
        group_name: str,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        from commlayer.backend.joining import call_from_outside

        if global_ranks_in_group and c10d.get_rank() not in global_ranks_in_group and "commlayer" in str(backend):
            timeout = kwargs.get("timeout") or c10d.default_pg_timeout
            call_from_outside(str(group_name), global_ranks_in_group, c10d.get_rank(), timeout)
        return original(group_size, group_rank, global_ranks_in_group, backend, store, group_name, *args, **kwargs)

    return _new_process_group_helper


def _wrapped_store_based_barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let the barrier behind making a group (TORCH_DIST_INIT_BARRIER=1) end when a rank of a job of
    this backend fails."""

    def _store_based_barrier(
        rank: int, store: Any, group_name: str, rendezvous_count: int, timeout: timedelta, *args: Any, **kwargs: Any
    ) -> Any:
        from commlayer.backend.store_barrier import wait_at_barrier
        from commlayer.failures.detector import job_detector

        detector = job_detector([rank])
        # Fewer ranks have just made the group together; a death elsewhere in the job is not
        # theirs.
        if detector is None or rendezvous_count != len(detector.ranks):
            return original(rank, store, group_name, rendezvous_count, timeout, *args, **kwargs)
        return wait_at_barrier(original, detector, store, group_name, rendezvous_count, timeout)

    return _store_based_barrier


_WRAPPED = {
    "monitored_barrier": _wrapped_monitored_barrier,
    "_set_pg_timeout": _wrapped_set_pg_timeout,
    "batch_isend_irecv": _wrapped_batch_isend_irecv,
    "_new_process_group_helper": _wrapped_new_process_group_helper,
    "_store_based_barrier": _wrapped_store_based_barrier,
}
"""The wrappers of torch's functions, by the names of those."""


def teach_torch() -> None:
    """Make all the changes that groups of this backend need, once: when the first is made."""
    _skip_methods()
    for name, make in _WRAPPED.items():
        _replace(name, make)


def answer_to(alias: str) -> None:
    """Make ``init_process_group`` and ``new_group`` build this backend where ``alias`` is asked
    for.

    An ``alias`` that is neither gloo nor nccl raises SettingsError when a group is made, not
    before: it must not make ``import torch`` fail.
    """

    def translated(backend: Any, default: str | None) -> Any:
        if alias not in ("gloo", "nccl"):
            from commlayer.profiles.errors import SettingsError

            raise SettingsError(f"COMMLAYER_AS must be one of gloo, nccl, got {alias!r}")
        if backend is None:
            return default
        names = [part.rpartition(":")[2] for part in str(backend).lower().split(",")]
        return "commlayer" if alias in names else backend

    def init(original: Callable[..., Any]) -> Callable[..., Any]:
        def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
            wanted = translated(backend, "commlayer")
            result = original(wanted, *args, **kwargs)
            if wanted != backend:
                how = f"made a group of the backend commlayer, which get_backend() reports; {alias} works inside it"
            else:
                other = next((name for name in ("gloo", "nccl") if name in str(backend).lower()), None)
                how = "made a group of that backend, which is not planned"
                how += "" if other is None else f": COMMLAYER_AS={other} would have it planned"
            if str(backend).lower() != "commlayer" and dist.get_rank() == 0:
                from commlayer.profiles.printable import say  # this module is imported inside ``import torch``

                say(f'COMMLAYER_AS={alias}: init_process_group("{backend}") {how}')
            return result

        return init_process_group

    def new(original: Callable[..., Any]) -> Callable[..., Any]:
        def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
            # Without a backend torch takes the default group's, which is ours already.
            return original(ranks, timeout, translated(backend, None), *args, **kwargs)

        return new_group

    _replace("init_process_group", init, _ALIAS_MARK)
    _replace("new_group", new, _ALIAS_MARK)


_is_done = False


def _skip_methods() -> None:
    """Keep torch.compile out of the backend's functions. Once."""
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
    own = [f"commlayer.backend.{each.name}" for each in pkgutil.iter_modules([str(Path(__file__).parent)])]
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
