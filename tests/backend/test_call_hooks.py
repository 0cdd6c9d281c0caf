"""Hooks before and after a group's calls, gather_single, and what torch 2.15 asks of a group."""

from __future__ import annotations

import gc
import weakref
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import AllreduceOptions, GatherOptions

from commlayer.backend import call_hooks
from commlayer.backend.call_hooks import HOOK_NAMES, CallHooks, take_hooks
from commlayer.backend.verbs import VERBS
from commlayer.profiles.errors import TensorError, UsageError
from commlayer.testing.plugin import ClusterFactory

HAS_HOOKS = hasattr(c10d, "PreHookArgs")


@pytest.fixture
def torch_with_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15's types of hooks, of plain Python."""
    names = Enum("HookOpName", sorted(HOOK_NAMES.values()))  # type: ignore[misc]
    fake = SimpleNamespace(HookOpName=names, PreHookArgs=SimpleNamespace, PostHookArgs=SimpleNamespace)
    monkeypatch.setattr(call_hooks, "c10d", fake)


class Group:
    """Verbs that note that they were called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def allreduce(self, tensors: Any, opts: Any = None) -> str:
        self.called.append("allreduce")
        return "work"

    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> str:
        self.called.append("gathered")
        return "work"

    all_gather_single = _allgather_base

    def send(self, tensors: Any, peer: int, tag: int = 0) -> str:
        self.called.append("send")
        return "sent"


VERBS_OF_GROUP = ("allreduce", "all_gather_single _allgather_base", "send")


def test_every_verb_has_torchs_name_of_it() -> None:
    assert {row.name for row in VERBS} | {"barrier", "send", "recv"} == set(HOOK_NAMES)


@pytest.mark.skipif(not HAS_HOOKS, reason="this torch has no hooks of calls")
def test_torch_has_these_names() -> None:
    assert all(hasattr(c10d.HookOpName, name) for name in HOOK_NAMES.values())  # type: ignore[attr-defined]


@pytest.mark.usefixtures("torch_with_hooks")
def test_hooks_run_around_a_call_by_either_name_in_the_order_of_their_ids() -> None:
    group, seen = Group(), list[tuple[Any, ...]]()
    hooks = CallHooks(group, VERBS_OF_GROUP)
    x, whole = torch.ones(2), torch.zeros(4)
    hooks.add("pre", 9, lambda told: seen.append(("second", told.op_id)))
    hooks.add(
        "pre",
        3,
        lambda told: seen.append(
            (told.name.name, told.op_id, told.async_op, told.root, len(told.input_tensors), len(told.output_tensors))
        ),
    )
    hooks.add("post", 1, lambda told: seen.append((told.name.name, told.op_id, told.work)))
    opts = AllreduceOptions()
    opts.asyncOp = False
    assert group.allreduce([x], opts) == "work"
    assert group._allgather_base(whole, x) == "work"
    assert group.send([x], 1) == "sent"
    assert seen == [
        ("ALLREDUCE", 0, False, -1, 1, 0),
        ("second", 0),
        ("ALLREDUCE", 0, "work"),
        ("ALLGATHER_BASE", 1, False, -1, 1, 1),
        ("second", 1),
        ("ALLGATHER_BASE", 1, "work"),
        ("SEND", 2, True, 1, 1, 0),
        ("second", 2),
        ("SEND", 2, "sent"),
    ]
    assert group.called == ["allreduce", "gathered", "send"]
    hooks.remove("pre", 3)
    hooks.remove("pre", 9)
    hooks.remove("post", 1)
    hooks.remove("post", 1)  # again, as in torch
    group.allreduce([x])
    assert len(seen) == 9


@pytest.mark.usefixtures("torch_with_hooks")
def test_a_group_takes_hooks_by_torchs_methods() -> None:
    verbs = (*(row.name for row in VERBS), "barrier", "send", "recv")
    group: Any = type("All", (), {name: lambda self, *args: "work" for name in verbs})()
    take_hooks(group)
    seen = list[str]()
    group.register_pre_hook(hook_id=7, hook=lambda told: seen.append(f"before {told.name.name}"))
    group.register_post_hook(7, lambda told: seen.append(told.work))
    assert group.barrier() == "work"
    group.unregister_pre_hook(7)
    group.unregister_post_hook(7)
    group.barrier()
    assert seen == ["before BARRIER", "work"]


@pytest.mark.usefixtures("torch_with_hooks")
def test_hooks_do_not_keep_their_group_alive() -> None:
    gc.disable()
    try:
        group = Group()
        gone, hooks = weakref.ref(group), CallHooks(group, VERBS_OF_GROUP)
        hooks.add("pre", 1, lambda told: None)
        group.allreduce([torch.ones(1)])
        del group
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.skipif(HAS_HOOKS, reason="this torch has hooks of calls")
def test_a_torch_without_hooks_says_so() -> None:
    group: Any = Group()
    take_hooks(group)
    with pytest.raises(UsageError, match=r"came with torch 2\.15"):
        group.register_pre_hook(1, print)
    with pytest.raises(UsageError, match=r"came with torch 2\.15"):
        group.unregister_post_hook(1)


def answers() -> dict[str, Any]:
    """Return what a group of two ranks answers, and check what it does."""
    dist.init_process_group("commlayer")
    group: Any = dist.group.WORLD
    rank, size = dist.get_rank(), dist.get_world_size()
    told: dict[str, Any] = {"supports": group.supports_reconfigure()}
    for name, ask in (("handle", group.get_reconfigure_handle), ("reconfigure", lambda: group.reconfigure(None))):
        with pytest.raises(UsageError, match="keeps its ranks"):
            ask()
        told[name] = True
    opts = GatherOptions()
    opts.rootRank = 1
    for x in (torch.full((2, 3), float(rank)), torch.zeros(0), torch.tensor(float(rank))):
        out = x.new_full((size * x.numel(),), -1.0)
        group.gather_single(out if rank == 1 else x.new_empty(0), x, opts).wait()
        if rank == 1:
            assert torch.equal(out, torch.cat([torch.full((x.numel(),), float(each)) for each in range(size)]))
    if rank == 1:
        for wrong in (torch.zeros(3), torch.zeros(4, dtype=torch.int64), torch.zeros(4, 2)[:, 0], None):
            with pytest.raises(TensorError, match="gather_single expected"):
                group.gather_single(wrong, torch.ones(2), opts)
    dist.barrier()
    if HAS_HOOKS:
        seen = list[str]()
        group.register_pre_hook(7, lambda args: seen.append(args.name.name))
        dist.all_reduce(torch.ones(2))
        dist.barrier()
        dist.all_gather([torch.ones(2) for _ in range(size)], torch.ones(2))
        dist.all_to_all_single(torch.ones(size), torch.ones(size))
        dist.broadcast(torch.ones(2), 0)
        assert seen == ["ALLREDUCE", "BARRIER", "ALLGATHER", "ALLTOALL_BASE", "BROADCAST"]
        group.unregister_pre_hook(7)
        dist.barrier()
        assert len(seen) == 5
    dist.destroy_process_group()
    return told


def test_a_group_answers_for_itself(emulated_cluster: ClusterFactory) -> None:
    """Not the Gloo inside of it, which says that it can be reconfigured, by a handle without an address."""
    for told in emulated_cluster(2, 1).run(answers):
        assert told == {"supports": False, "handle": True, "reconfigure": True}
