"""Hooks that a program registers on a group, and that run before and after each of its calls (torch 2.15 and later).

torch runs hooks in C++, between its operators and a backend. The calls of a Python group do not pass there, so a group runs its
own. A group without hooks pays nothing: its verbs are wrapped when the first hook is registered.

torch's own consumers in C++ (``FlightRecorderHook``, ``NanCheckHook``) register with the C++ object, of which Python hears
nothing. They see no call of this backend; ``commlayer diagnose --flight-recorder`` writes dumps of its ring.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from commlayer.backend.verbs import VERBS
from commlayer.profiles.errors import UsageError

__all__ = ["HOOK_NAMES", "CallHooks", "take_hooks"]

HOOK_NAMES = {
    "all_gather_single": "ALLGATHER_BASE",
    "all_gather_single_coalesced": "ALLGATHER_INTO_TENSOR_COALESCED",
    "allgather": "ALLGATHER",
    "allgather_coalesced": "ALLGATHER_COALESCED",
    "all_to_all_single": "ALLTOALL_BASE",
    "alltoall": "ALLTOALL",
    "allreduce": "ALLREDUCE",
    "allreduce_coalesced": "ALLREDUCE_COALESCED",
    "barrier": "BARRIER",
    "broadcast": "BROADCAST",
    "gather": "GATHER",
    "recv": "RECV",
    "reduce": "REDUCE",
    "reduce_scatter": "REDUCE_SCATTER",
    "reduce_scatter_single": "REDUCE_SCATTER_BASE",
    "reduce_scatter_single_coalesced": "REDUCE_SCATTER_TENSOR_COALESCED",
    "scatter": "SCATTER",
    "send": "SEND",
}
"""torch's ``HookOpName`` of each verb, by the verb's first name."""
_INPUT_FIRST = frozenset({"allreduce", "allreduce_coalesced", "broadcast", "reduce", "send"})
"""Verbs whose only tensors are their input."""

Hook = Callable[[Any], None]


class CallHooks:
    """The hooks of one group, run in the order of their ids. ``group``: whose verbs are wrapped at the first hook."""

    def __init__(self, group: Any, verbs: Iterable[str]) -> None:
        self._pre: dict[int, Hook] = {}
        self._post: dict[int, Hook] = {}
        self._numbers = itertools.count()
        me = weakref.ref(group)  # the wrappers are the group's own attributes: they must not keep it alive
        for names in verbs:
            first = names.split()[0]
            wrapped = self._wrapped(first, getattr(type(group), first), me)
            for name in names.split():
                setattr(group, name, wrapped)

    def add(self, when: str, hook_id: int, hook: Hook) -> None:
        """Have ``hook`` run ``pre`` or ``post`` calls; one of the same id is replaced, as in torch."""
        hooks = self._pre if when == "pre" else self._post
        hooks[hook_id] = hook

    def remove(self, when: str, hook_id: int) -> None:
        (self._pre if when == "pre" else self._post).pop(hook_id, None)

    def _wrapped(self, verb: str, call: Callable[..., Any], group: Callable[[], Any]) -> Callable[..., Any]:
        name = getattr(c10d.HookOpName, HOOK_NAMES[verb])  # type: ignore[attr-defined]  # torch 2.15

        @functools.wraps(call)
        def hooked(*args: Any, **named: Any) -> Any:
            number = next(self._numbers)
            opts = next((each for each in (*args, *named.values()) if hasattr(each, "asyncOp")), None)
            is_async = bool(getattr(opts, "asyncOp", verb in ("send", "recv")))
            if self._pre:
                before = c10d.PreHookArgs()  # type: ignore[attr-defined]  # torch 2.15
                before.name, before.op_id, before.async_op = name, number, is_async
                if verb in ("send", "recv"):
                    before.root = int(args[1]) if len(args) > 1 else -1
                else:
                    before.root = int(getattr(opts, "rootRank", -1))
                before.input_tensors, before.output_tensors = _tensors_of(verb, args)
                for _, hook in sorted(self._pre.items()):
                    hook(before)
            work = call(group(), *args, **named)
            if self._post:
                after = c10d.PostHookArgs()  # type: ignore[attr-defined]  # torch 2.15
                after.name, after.op_id, after.async_op, after.work = name, number, is_async, work
                for _, hook in sorted(self._post.items()):
                    hook(after)
            return work

        return hooked


def take_hooks(group: Any) -> None:
    """Let a program register hooks on ``group``, by torch's methods: they run in the order of their
    ids, with torch's ``PreHookArgs`` before a call, or its ``PostHookArgs`` once it was issued."""
    me, made = weakref.ref(group), list[CallHooks]()

    def hooks() -> CallHooks:
        _require_hooks()
        if not made:
            made.append(CallHooks(me(), [*(row.names for row in VERBS), "barrier", "send", "recv"]))
        return made[0]

    for when in ("pre", "post"):
        setattr(group, f"register_{when}_hook", lambda hook_id, hook, when=when: hooks().add(when, hook_id, hook))
        setattr(group, f"unregister_{when}_hook", lambda hook_id, when=when: hooks().remove(when, hook_id))


def _tensors_of(verb: str, args: tuple[Any, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The inputs and the outputs of a call, flat."""
    if not args or verb == "barrier":
        return [], []
    first = _flat(args[0])
    if verb in _INPUT_FIRST:
        return first, []
    if verb == "recv":
        return [], first
    return _flat(args[1]) if len(args) > 1 else [], first


def _flat(argument: Any) -> list[torch.Tensor]:
    """Return the tensors in an argument of a verb, also of nested lists, in their order."""
    if isinstance(argument, torch.Tensor):
        return [argument]
    return [x for each in argument for x in _flat(each)] if isinstance(argument, (list, tuple)) else []


def _require_hooks() -> None:
    """Raises UsageError where this torch has no hooks of calls."""
    if not hasattr(c10d, "PreHookArgs"):
        raise UsageError(f"hooks of a group's calls came with torch 2.15, this is {torch.__version__}")
