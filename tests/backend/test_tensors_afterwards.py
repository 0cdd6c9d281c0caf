"""A call leaves nothing on the tensors that it was given but the values of its outputs: afterwards they are as after Gloo.

Trainers free and take memory again by ``resize_`` of a storage, and save tensors for a backward pass, which refuses those that
have changed since. Every verb runs on Gloo and on groups of each plan, wire format and order of sums; a dtype that Gloo refuses
is held against its call of FP32. Storages' owners are counted without Python's collector: no cycle of references may hold one.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import DTYPES
from simulated.torch_device import simulated_device
from simulated.torch_streams import StreamDelays
from synthetic_profiles import synthetic_profile

import commlayer
import commlayer.backend.create
from commlayer import Communicator, GroupCommunicator, GroupOptions, WireFormat, WirePolicy
from commlayer.testing.plugin import ClusterFactory
from commlayer.transport.c10d import all_gather_single, reduce_scatter_single

pytestmark = pytest.mark.cluster

WAYS: dict[str, dict[str, Any]] = {
    "no plan": {},
    **{plan: {"plan": plan} for plan in ("flat_direct", "hierarchical", "pipelined:2", "leaders", "ring")},
    "over two connections": {"plan": "pipelined:2", "connections": 2},
    "ordered sums": {"reduction": "ordered"},
    "sums in BF16": {"wire": "bf16!"},
    "sums in INT8": {"wire": "int8!"},
    "every call compared": {"plan": "hierarchical", "shadow": 1},
}
"""The options of the groups whose calls are compared with Gloo's."""
SIZES = (64, 1 << 15)
"""Elements of the larger side of a call: messages inside a node go in a line of a socket, or through shared memory."""
_PATIENCE_S = 60.0


class Trace(NamedTuple):
    """The visible state of a tensor beside its values; ``changes`` and ``owners`` count from before the call."""

    is_resizable: bool
    changes: int
    owners: int
    requires_grad: bool
    is_leaf: bool
    is_pinned: bool
    has_moved: bool


Call = Callable[[Any, bool], Any]
Case = tuple[list[torch.Tensor], Call]
"""The tensors of a call, inputs and outputs, and the call itself: on a group, asynchronous or not. It returns its works.
"""
Make = Callable[[int], torch.Tensor]


class Cases:
    """Every verb of c10d on tensors that ``make`` fills; ``count``: elements of the larger side."""

    def __init__(self, make: Make, count: int) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.make, self.count, self.part = make, count, count // self.size

    def __getitem__(self, verb: str) -> Callable[[], Case]:
        case: Callable[[], Case] = getattr(self, verb)
        return case

    def wholes(self, number: int) -> list[torch.Tensor]:
        return [self.make(self.count) for _ in range(number)]

    def parts(self, number: int) -> list[torch.Tensor]:
        return [self.make(self.part) for _ in range(number)]

    def all_reduce(self) -> Case:
        (x,) = self.wholes(1)
        return [x], lambda group, is_async: dist.all_reduce(x, group=group, async_op=is_async)

    def all_reduce_coalesced(self) -> Case:
        some = [*self.wholes(1), *self.parts(1)]
        return some, lambda group, _: group.allreduce_coalesced(some)

    def reduce(self) -> Case:
        (x,) = self.wholes(1)
        return [x], lambda group, is_async: dist.reduce(x, 0, group=group, async_op=is_async)

    def broadcast(self) -> Case:
        (x,) = self.wholes(1)
        return [x], lambda group, is_async: dist.broadcast(x, 1, group=group, async_op=is_async)

    def all_gather_single(self) -> Case:
        (out,), (x,) = self.wholes(1), self.parts(1)
        return [out, x], lambda group, is_async: all_gather_single(out, x, group=group, async_op=is_async)

    def all_gather_single_coalesced(self) -> Case:
        outs, xs = self.wholes(2), self.parts(2)
        return [*outs, *xs], lambda group, _: group.allgather_into_tensor_coalesced(outs, xs)

    def all_gather(self) -> Case:
        outs, (x,) = self.parts(self.size), self.parts(1)
        return [*outs, x], lambda group, is_async: dist.all_gather(outs, x, group=group, async_op=is_async)

    def all_gather_coalesced(self) -> Case:
        rows, xs = [self.parts(2) for _ in range(self.size)], self.parts(2)
        return [*chain(*rows), *xs], lambda group, _: group.allgather_coalesced(rows, xs)

    def gather(self) -> Case:
        outs, (x,) = self.parts(self.size if self.rank == 0 else 0), self.parts(1)
        return [*outs, x], lambda group, is_async: dist.gather(x, outs or None, 0, group=group, async_op=is_async)

    def scatter(self) -> Case:
        (out,), xs = self.parts(1), self.parts(self.size if self.rank == 0 else 0)
        return [out, *xs], lambda group, is_async: dist.scatter(out, xs or None, 0, group=group, async_op=is_async)

    def reduce_scatter_single(self) -> Case:
        (out,), (x,) = self.parts(1), self.wholes(1)
        return [out, x], lambda group, is_async: reduce_scatter_single(out, x, group=group, async_op=is_async)

    def reduce_scatter_single_coalesced(self) -> Case:
        outs, xs = self.parts(2), self.wholes(2)
        return [*outs, *xs], lambda group, _: group.reduce_scatter_tensor_coalesced(outs, xs)

    def reduce_scatter(self) -> Case:
        (out,), xs = self.parts(1), self.parts(self.size)
        return [out, *xs], lambda group, is_async: dist.reduce_scatter(out, xs, group=group, async_op=is_async)

    def all_to_all_single(self) -> Case:
        out, x = self.wholes(2)
        return [out, x], lambda group, is_async: dist.all_to_all_single(out, x, group=group, async_op=is_async)

    def all_to_all_splits(self) -> Case:
        out, x = self.wholes(2)
        splits = [x.size(0) // self.size] * self.size

        def exchange(group: Any, is_async: bool) -> Any:
            return dist.all_to_all_single(out, x, splits, splits, group=group, async_op=is_async)

        return [out, x], exchange

    def all_to_all(self) -> Case:
        outs, xs = self.parts(self.size), self.parts(self.size)
        return [*outs, *xs], lambda group, is_async: dist.all_to_all(outs, xs, group=group, async_op=is_async)

    def messages(self) -> Case:
        out, x = self.wholes(2)

        def exchange(group: Any, _: bool) -> Any:
            to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
            return dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, x, to, group=group), dist.P2POp(dist.irecv, out, source, group=group)]
            )

        return [out, x], exchange


VERBS = [name for name, method in vars(Cases).items() if getattr(method, "__annotations__", {}).get("return") == "Case"]


def owners_of(x: torch.Tensor) -> int:
    """How many tensors, and handles of Python, hold the storage of ``x``."""
    return int(torch._C._storage_Use_Count(x.untyped_storage()._cdata))


def traces(case: Callable[[], Case], group: Any, *, is_async: bool) -> list[Trace]:
    """Make a call on ``group`` and tell what can be seen of its tensors when nobody holds its Work any more."""
    tensors, call = case()
    before = [(x._version, owners_of(x), x.data_ptr()) for x in tensors]
    works = call(group, is_async)
    for work in works if isinstance(works, list) else [works]:
        if work is not None:
            work.wait()
    del works, work
    until = time.monotonic() + _PATIENCE_S  # a thread of the group, or of Gloo, may be on its way out of the call
    while any(owners_of(x) > owners for x, (_, owners, _) in zip(tensors, before, strict=True)):
        if time.monotonic() > until:
            break
        time.sleep(0.001)
    return [
        Trace(
            is_resizable=x.untyped_storage().resizable(),
            changes=x._version - version,
            owners=owners_of(x) - owners,
            requires_grad=x.requires_grad,
            is_leaf=x.is_leaf,
            is_pinned=x.is_pinned(),
            has_moved=x.data_ptr() != place,
        )
        for x, (version, owners, place) in zip(tensors, before, strict=True)
    ]


def compared(
    makers: Sequence[tuple[str, Make]], sizes: Sequence[int], ways: dict[str, dict[str, Any]], *, is_alike: bool = True
) -> list[str]:
    """On a rank: what differs from Gloo. ``is_alike`` False: Gloo refuses these tensors, and is given FP32."""
    torch.set_num_threads(1)
    os.environ["COMMLAYER_PROFILE"] = "none"
    gc.disable()
    dist.init_process_group("gloo")
    gloo, wrong = dist.group.WORLD, []
    groups = {
        way: dist.new_group(backend="commlayer", pg_options=GroupOptions(**options)) for way, options in ways.items()
    }
    for name, make in makers:
        for count in sizes:
            for verb in VERBS:
                if "float8" in name and "reduce" in verb:
                    continue  # nobody sums them
                case = Cases(make, count)[verb]
                known = case if is_alike else Cases(torch.ones, count)[verb]
                for is_async in (False, True):
                    wanted = traces(known, gloo, is_async=is_async)
                    for way, group in groups.items():
                        got = traces(case, group, is_async=is_async)
                        what = f"{'asynchronous ' if is_async else ''}{verb} of {count} {name}, {way}"
                        wrong += [f"{what}: {each}" for each in differences(got, wanted)]
    require_plans()
    dist.destroy_process_group()
    return wrong


def require_plans() -> None:
    """Fail where all calls of this rank were flat."""
    planned = {call["plan"] for group in commlayer.stats()["groups"] for call in group["calls"]}
    assert planned - {"flat"}, planned


def differences(got: Sequence[Trace], wanted: Sequence[Trace]) -> list[str]:
    """For each tensor that differs, its place and what it has and should have."""
    return [
        f"tensor {place}: {field} is {a}, on Gloo {b}"
        for place, (mine, gloos) in enumerate(zip(got, wanted, strict=True))
        for field, a, b in zip(Trace._fields, mine, gloos, strict=True)
        if a != b
    ]


def require_none(found: list[list[str]]) -> None:
    """Fail with the first few differences of each rank."""
    assert not any(found), "\n".join(line for rank in found for line in rank[:5])


def of_dtype(dtype: torch.dtype) -> tuple[str, Make]:
    return str(dtype).removeprefix("torch."), lambda count: torch.ones(count).to(dtype)


def test_every_verb_by_every_plan(emulated_cluster: ClusterFactory) -> None:
    def job() -> list[str]:
        return compared([of_dtype(torch.float32)], SIZES, WAYS)

    require_none(emulated_cluster(nodes=2, ranks_per_node=2).run(job))


def test_every_dtype(emulated_cluster: ClusterFactory) -> None:
    gloos = [torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64]
    ours = [dtype for dtype in DTYPES if dtype not in (*gloos, torch.float32)]
    ways = {way: WAYS[way] for way in ("no plan", "hierarchical")}

    def job_of(dtypes: list[torch.dtype], *, is_alike: bool) -> Callable[[], list[str]]:
        def job() -> list[str]:
            return compared([of_dtype(dtype) for dtype in dtypes], SIZES[:1], ways, is_alike=is_alike)

        return job

    require_none(emulated_cluster(nodes=2, ranks_per_node=2).run(job_of(gloos, is_alike=True)))
    require_none(emulated_cluster(nodes=2, ranks_per_node=2).run(job_of(ours, is_alike=False)))


def test_parameters_and_other_layouts(emulated_cluster: ClusterFactory) -> None:
    """Gloo refuses most of them: what is told to autograd is what the verb tells of plain tensors."""

    def square(count: int) -> torch.Tensor:
        side = int(count**0.5)
        assert side * side == count
        return torch.ones(side, side).t()

    def parameter(count: int) -> torch.Tensor:
        return torch.nn.Parameter(torch.ones(count))

    def trace_of(make: Make, group: Any, verb: str) -> list[Trace]:
        return traces(Cases(make, 64)[verb], group, is_async=True)

    def job() -> list[str]:
        torch.set_num_threads(1)
        os.environ["COMMLAYER_PROFILE"] = "none"
        gc.disable()
        dist.init_process_group("gloo")
        wrong = []
        for way in ("no plan", "hierarchical", "sums in BF16"):
            group = dist.new_group(backend="commlayer", pg_options=GroupOptions(**WAYS[way]))
            for verb in VERBS:
                wanted = trace_of(torch.ones, dist.group.WORLD, verb)
                got = trace_of(square, group, verb)
                wrong += [f"{verb} transposed, {way}: {each}" for each in differences(got, wanted)]
                got = [each._replace(requires_grad=not each.requires_grad) for each in trace_of(parameter, group, verb)]
                wrong += [f"{verb} of Parameters, {way}: {each}" for each in differences(got, wanted)]
        require_plans()
        dist.destroy_process_group()
        return wrong

    require_none(emulated_cluster(nodes=2, ranks_per_node=2).run(job))


def test_a_storage_is_freed_and_taken_again_between_calls(emulated_cluster: ClusterFactory) -> None:
    """FSDP1 does so with the parameters of a layer, and Megatron-Core with what it offloads."""

    def job() -> None:
        torch.set_num_threads(1)
        os.environ.update(COMMLAYER_PROFILE="none", COMMLAYER_PLAN="hierarchical")
        dist.init_process_group("commlayer")
        rank, size = dist.get_rank(), dist.get_world_size()
        out, x = torch.empty(size << 14), torch.empty(1 << 14)
        for turn in range(3):
            out.untyped_storage().resize_(out.nbytes)
            x.untyped_storage().resize_(x.nbytes)
            x.fill_(rank + turn)
            all_gather_single(out, x)
            assert out.view(size, -1)[:, 0].tolist() == [turn + r for r in range(size)]
            out.untyped_storage().resize_(0)
            x.untyped_storage().resize_(0)
        dist.destroy_process_group()

    emulated_cluster(nodes=2, ranks_per_node=2).run(job)


def test_what_is_no_verb_of_c10d(emulated_cluster: ClusterFactory) -> None:
    """A Communicator's, and a GroupCommunicator's in memory of the caller: they have nothing to be held against, so nothing at
    all may be left."""

    def afterwards(tensors: Sequence[torch.Tensor], call: Callable[[], object], *, is_in_place: bool) -> list[str]:
        before = [(x._version, owners_of(x)) for x in tensors]
        call()
        until = time.monotonic() + _PATIENCE_S
        while [owners_of(x) for x in tensors] != [owners for _, owners in before] and time.monotonic() < until:
            time.sleep(0.001)
        return [
            f"tensor {place}: resizable {x.untyped_storage().resizable()}, changed {x._version - version} times, "
            f"{owners_of(x) - owners} owners more"
            for place, (x, (version, owners)) in enumerate(zip(tensors, before, strict=True))
            if not x.untyped_storage().resizable()
            or owners_of(x) != owners
            or (x._version != version and not is_in_place)
        ]

    def compressed_calls(group: GroupCommunicator, size: int) -> list[str]:
        part, whole, other = torch.ones(8, 128), torch.ones(8 * size, 128), torch.ones(8 * size, 128)
        return [
            *afterwards([whole, part], lambda: group.all_gather_into(whole, part).wait(), is_in_place=False),
            *afterwards([part, whole], lambda: group.reduce_scatter_into(part, whole).wait(), is_in_place=False),
            *afterwards([whole, other], lambda: group.all_to_all_into(whole, other).wait(), is_in_place=False),
            *afterwards([whole], lambda: group.all_reduce_in_place(whole).wait(), is_in_place=True),
        ]

    def job() -> list[str]:
        torch.set_num_threads(1)
        os.environ.update(COMMLAYER_PROFILE="none", COMMLAYER_PLAN="hierarchical")
        gc.disable()
        dist.init_process_group("commlayer")
        group: Any = dist.group.WORLD
        size, wrong = dist.get_world_size(), list[str]()
        ep, tp = (dist.new_subgroups_by_enumeration(each)[0] for each in ([[0, 2], [1, 3]], [[0, 1], [2, 3]]))
        with Communicator(ep, tp, profile=synthetic_profile(nodes=2, ranks_per_node=2)) as communicator:
            for count in (64, 1 << 16):
                x = torch.ones(count)
                wrong += afterwards([x], partial(communicator.all_to_all, x), is_in_place=False)
        for wire in (WireFormat.BF16, WireFormat.INT8):
            wrong += compressed_calls(GroupCommunicator(group, wire=WirePolicy((wire,)), name="dp"), size)
        dist.destroy_process_group()
        return wrong

    require_none(emulated_cluster(nodes=2, ranks_per_node=2).run(job))


def test_plans_on_a_device_tell_autograd_of_no_change(emulated_cluster: ClusterFactory) -> None:
    """NCCL's kernels, too, write into an output and tell nobody."""

    def job() -> list[str]:
        os.environ.update(COMMLAYER_PROFILE="none", COMMLAYER_PLAN="hierarchical")
        device = simulated_device(StreamDelays(chance=0.0))
        dist.init_process_group("commlayer")
        wrong, group = [], dist.group.WORLD
        verbs = Cases(lambda count: torch.ones(count, device=device), 64)
        for verb in ("all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single", "all_to_all_single"):
            tensors, call = verbs[verb]()
            before = [x._version for x in tensors]
            for _ in range(2):  # the second is a kept call
                call(group, True).wait()
            changes = [x._version - version for x, version in zip(tensors, before, strict=True)]
            wrong += [f"{verb}: {changes}"] if any(changes) else []
        x = torch.ones(64, device=device)
        version = x._version
        dist.all_reduce(x, dist.ReduceOp.AVG)
        wrong += ["AVG"] if x._version != version else []
        require_plans()
        dist.destroy_process_group()
        return wrong

    require_none(emulated_cluster(nodes=2, ranks_per_node=2).run(job))
