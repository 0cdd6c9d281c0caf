"""Calls that the backend takes and Gloo does not: dtypes, operations, shapes, uneven lists, layouts; and clear refusals.

Every result is held against one computed from all ranks' inputs, which each rank can make for itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import DTYPES
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed.distributed_c10d import _coalescing_manager

from commlayer.profiles.errors import TensorError
from commlayer.testing.plugin import ClusterFactory

pytestmark = pytest.mark.cluster

ADDABLE = [dtype for dtype in DTYPES if "float8" not in str(dtype)]
Op = Any


def start() -> tuple[int, int, Any]:
    """On a rank: its number, the number of ranks, the default group (for the verbs that torch hides behind views)."""
    torch.set_num_threads(1)
    os.environ["COMMLAYER_PROFILE"] = "none"
    dist.init_process_group("commlayer")
    return dist.get_rank(), dist.get_world_size(), dist.group.WORLD


def payload(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """The tensor of ``rank``: random bytes, NaN payloads included."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, so that sums and products of a few are exact in every dtype; negative ones where there are."""
    generator = torch.Generator().manual_seed(rank)
    signed = dtype.is_signed
    values = torch.randint(-3 if signed else 0, 4, (count,), generator=generator)
    if dtype.is_complex:
        return torch.complex(values.double(), values.flip(0).double()).to(dtype)
    return values.to(dtype)


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    assert torch.equal(raw(got), raw(expected)), (got, expected)


def run(cluster: ClusterFactory, job: Callable[[], Any], nodes: int = 2, ranks_per_node: int = 2) -> list[Any]:
    return cluster(nodes=nodes, ranks_per_node=ranks_per_node).run(job)


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (1, 3), (1, 1)])
def test_every_dtype_is_moved(emulated_cluster: ClusterFactory, nodes: int, ranks_per_node: int) -> None:
    """Called on the group itself: torch.distributed would show it complex numbers as pairs."""

    def job() -> None:
        rank, size, group = start()
        for dtype in DTYPES:
            mine, all_of_them = payload(rank, 6, dtype), [payload(r, 6, dtype) for r in range(size)]
            gathered = torch.empty(6 * size, dtype=dtype)
            group._allgather_base(gathered, mine).wait()
            same(gathered, torch.cat(all_of_them))
            parts = [torch.empty(6, dtype=dtype) for _ in range(size)]
            group.allgather([parts], [mine]).wait()
            same(torch.cat(parts), torch.cat(all_of_them))

            blocks = [payload(r, 2 * size, dtype, seed=1) for r in range(size)]
            swapped = torch.empty(2 * size, dtype=dtype)
            group.alltoall_base(swapped, blocks[rank], [], []).wait()
            same(swapped, torch.cat([block[2 * rank : 2 * rank + 2] for block in blocks]))

            sent = mine.clone()
            group.broadcast(sent, root=size - 1).wait()
            same(sent, all_of_them[-1])

            at_root = [[torch.empty(6, dtype=dtype) for _ in range(size)]] if rank == 0 else []
            options = dist.GatherOptions()
            group.gather(at_root, [mine], options).wait()
            if rank == 0:
                same(torch.cat(at_root[0]), torch.cat(all_of_them))
            back = torch.empty(6, dtype=dtype)
            group.scatter([back], at_root, dist.ScatterOptions()).wait()
            same(back, mine)

            right, left = (rank + 1) % size, (rank - 1) % size
            came = torch.empty(6, dtype=dtype)
            if size > 1:
                works = [group.send([mine], right, 3), group.recv([came], left, 3)]
                for work in works:
                    work.wait()
                same(came, all_of_them[left])

    run(emulated_cluster, job, nodes, ranks_per_node)


def expected_reduction(op: Op, parts: list[torch.Tensor]) -> torch.Tensor | None:
    """The reduction of ``parts`` in Python's own exact numbers; None where it is refused."""
    dtype = parts[0].dtype
    name = op.name
    whole = [p.tolist() for p in parts]

    def fold(combine: Callable[[Any, Any], Any]) -> list[Any]:
        row = list(whole[0])
        for other in whole[1:]:
            row = [combine(a, b) for a, b in zip(row, other, strict=True)]
        return row

    if dtype is torch.bool:
        logic: dict[str, Callable[[Any, Any], Any]] = {
            "SUM": lambda a, b: a or b,
            "MAX": lambda a, b: a or b,
            "BOR": lambda a, b: a or b,
            "PRODUCT": lambda a, b: a and b,
            "MIN": lambda a, b: a and b,
            "BAND": lambda a, b: a and b,
            "BXOR": lambda a, b: a != b,
        }
        return torch.tensor(fold(logic[name]), dtype=dtype) if name in logic else None
    if name.startswith("B") and (dtype.is_floating_point or dtype.is_complex):
        return None
    if dtype.is_complex and name not in ("SUM", "AVG"):
        return None
    if dtype is torch.uint64 and name == "AVG":
        return None
    if name == "AVG":
        total = fold(lambda a, b: a + b)
        if dtype.is_floating_point or dtype.is_complex:
            return torch.tensor([t / len(parts) for t in total], dtype=dtype)
        return torch.tensor([int(t / len(parts)) for t in total], dtype=dtype)
    combine: dict[str, Callable[[Any, Any], Any]] = {
        "SUM": lambda a, b: a + b,
        "PRODUCT": lambda a, b: a * b,
        "MIN": min,
        "MAX": max,
        "BAND": lambda a, b: a & b,
        "BOR": lambda a, b: a | b,
        "BXOR": lambda a, b: a ^ b,
    }
    return torch.tensor(fold(combine[name]), dtype=dtype)


OPS = ["SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR"]


def test_every_dtype_is_reduced_or_refused(emulated_cluster: ClusterFactory) -> None:
    def job() -> int:
        rank, size, group = start()
        checked = 0
        for dtype in ADDABLE:
            parts = [numbers(r, 2 * size, dtype) for r in range(size)]
            for name in OPS:
                op = getattr(dist.ReduceOp, name)
                expected = expected_reduction(op, parts)
                mine = parts[rank].clone()
                if expected is None:
                    with pytest.raises(TensorError, match=f"ReduceOp.{name}"):
                        group.allreduce([mine], op).wait()
                    continue
                group.allreduce([mine], op).wait()
                same(mine, expected)
                scattered = torch.empty(2, dtype=dtype)
                options = dist.ReduceScatterOptions()
                options.reduceOp = op
                group._reduce_scatter_base(scattered, parts[rank].clone(), options).wait()
                same(scattered, expected[2 * rank : 2 * rank + 2])
                at_root = parts[rank].clone()
                group.reduce([at_root], root=1, op=op).wait()
                if rank == 1:
                    same(at_root, expected)
                checked += 1
        return checked

    assert run(emulated_cluster, job) == [len(ADDABLE) * len(OPS) - 26] * 4


def test_fp8_is_not_summed(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        _, _, group = start()
        x = torch.ones(4).to(torch.float8_e4m3fn)
        with pytest.raises(TensorError, match=r"float8_e4m3fn: cast to torch\.bfloat16"):
            dist.all_reduce(x)
        with pytest.raises(TensorError, match="float8_e4m3fn"):
            group.reduce([x], root=0).wait()

    run(emulated_cluster, job, 1, 2)


def test_premul_sum(emulated_cluster: ClusterFactory) -> None:
    """FSDP2 with expert parallelism asks for it."""

    def job() -> None:
        rank, size, group = start()
        op = _make_nccl_premul_sum(0.25)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.complex64):
            x = torch.full((4,), rank + 1).to(dtype)
            group.allreduce([x], op).wait()
            same(x, torch.full((4,), sum(range(1, size + 1)) * 0.25).to(dtype))
        out, whole = torch.empty(2), torch.arange(2.0 * size)
        dist.reduce_scatter_single(out, whole, op=op)
        same(out, whole[2 * rank : 2 * rank + 2] * size * 0.25)
        with pytest.raises(TensorError, match="floating"):
            dist.all_reduce(torch.ones(2, dtype=torch.int32), op=op)

    run(emulated_cluster, job)


def test_outputs_are_checked_by_number_of_elements(emulated_cluster: ClusterFactory) -> None:
    """DeepSpeed passes a flat output with an N-D input, others a stack."""

    def job() -> None:
        rank, size, _ = start()
        mine = torch.arange(6.0).view(2, 3) + 10 * rank
        expected = torch.cat([(torch.arange(6.0) + 10 * r) for r in range(size)])
        shapes = [(6 * size,), (size, 2, 3), (2 * size, 3), (3, 2 * size), (size, 6)]
        for shape in [*shapes, shapes[rank]]:  # in the end another one on each rank
            out = torch.empty(shape)
            dist.all_gather_single(out, mine)
            same(out.view(-1), expected)
            part = torch.empty(2, 3)
            dist.reduce_scatter_single(part, out)
            same(part, mine * size)
            flat = torch.empty(6)
            dist.reduce_scatter_single(flat, out)
            same(flat.view(2, 3), mine * size)
        listed = [torch.empty(6) for _ in range(size)]
        dist.all_gather(listed, mine)
        same(torch.cat(listed), expected)
        with pytest.raises(TensorError, match=rf"needs an output of {6 * size}, got 5"):
            dist.all_gather_single(torch.empty(5), mine)
        with pytest.raises(TensorError, match="reduce_scatter of 6 elements"):
            dist.reduce_scatter_single(torch.empty(4), mine)
        dist.barrier()  # nothing of the refused calls was sent

    run(emulated_cluster, job)


def test_uneven_lists(emulated_cluster: ClusterFactory) -> None:
    """Megatron's all_gather of unequal parts, and its reverse; also empty ones."""

    def job() -> None:
        rank, size, group = start()
        counts = [3, 0, 5, 1][:size]
        for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.float8_e5m2, torch.bool):
            outputs = [torch.empty(c, dtype=dtype) for c in counts]
            dist.all_gather(outputs, payload(rank, counts[rank], dtype))
            for r in range(size):
                same(outputs[r], payload(r, counts[r], dtype))
        for dtype in (torch.float32, torch.float16, torch.int64, torch.int16, torch.complex64, torch.bool):
            for name in ("SUM", "MAX", "AVG"):
                op = getattr(dist.ReduceOp, name)
                parts = [[numbers(10 * r + k, counts[k], dtype) for k in range(size)] for r in range(size)]
                expected = expected_reduction(op, [row[rank] for row in parts])
                out = torch.empty(counts[rank], dtype=dtype)
                if expected is None:
                    continue
                dist.reduce_scatter(out, parts[rank], op=op)
                same(out, expected)
        with pytest.raises(TensorError, match=f"needs as many in output {rank}"):
            group.allgather([[torch.empty(c) for c in counts]], [torch.empty(9)]).wait()

    run(emulated_cluster, job)


def count(source: int, target: int) -> int:
    """How much rank ``source`` sends to rank ``target``: nothing in some pairs."""
    return (2 * source + 3 * target) % 5


def test_all_to_all_of_any_lists_and_splits(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        rank, size, _ = start()
        for dtype in (torch.float32, torch.uint16, torch.float8_e4m3fn, torch.complex64, torch.bool):
            inputs = [payload(10 * rank + k, 4 * count(rank, k), dtype).view(-1, 2, 2) for k in range(size)]
            outputs = [torch.empty(2, count(k, rank), 2, dtype=dtype) for k in range(size)]  # another shape
            dist.all_to_all(outputs, inputs)
            for k in range(size):
                same(outputs[k], payload(10 * k + rank, 4 * count(k, rank), dtype))
            sent, received = [count(rank, k) for k in range(size)], [count(k, rank) for k in range(size)]
            source = torch.cat(inputs)
            target = torch.empty(sum(received), 2, 2, dtype=dtype)
            dist.all_to_all_single(target, source, received, sent)
            same(target, torch.cat([output.reshape(-1, 2, 2) for output in outputs]))

    run(emulated_cluster, job)


def test_wrong_splits_are_refused_before_anything_is_sent(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        rank, size, _ = start()
        if rank == 0:  # alone: nobody else must be needed to find it
            with pytest.raises(
                TensorError, match=r"rank 0.*input_split_sizes must be 2 numbers that add up to the 4 rows"
            ):
                dist.all_to_all_single(torch.empty(4), torch.empty(4), [2, 2], [2, 1])
            with pytest.raises(TensorError, match="output_split_sizes"):
                dist.all_to_all_single(torch.empty(4), torch.empty(4), [5, -1], [2, 2])
            with pytest.raises(TensorError, match="3 rows of the input do not divide by 2 ranks"):
                dist.all_to_all_single(torch.empty(4), torch.empty(3))
            with pytest.raises(TensorError, match=r"4 elements go out.*the output has 2"):
                dist.all_to_all_single(torch.empty(2), torch.empty(4))
            with pytest.raises(TensorError, match="2 output tensors, got 1"):
                dist.all_to_all([torch.empty(1)], [torch.empty(1)] * 2)
        x, out = torch.full((size,), float(rank)), torch.empty(size)
        dist.all_to_all_single(out, x)
        assert out.tolist() == [0.0, 1.0]

    run(emulated_cluster, job, 1, 2)


def test_layout_does_not_matter(emulated_cluster: ClusterFactory) -> None:
    """Transposed, strided and expanded tensors as inputs, strided ones as outputs; on one rank only, too."""

    def job() -> None:
        rank, size, group = start()
        base = torch.arange(24.0).view(4, 6) + 100 * rank
        everyone = [torch.arange(24.0).view(4, 6) + 100 * r for r in range(size)]
        turns: list[Callable[[torch.Tensor], torch.Tensor]]
        turns = [lambda x: x.t(), lambda x: x[::2, 1:4], lambda x: x[:1].expand(4, 6)]
        for turn in turns:
            mine, theirs = turn(base), [turn(x) for x in everyone]
            if rank % 2:
                mine = mine.contiguous()  # the others must not notice
            strided = torch.zeros(2 * size, *mine.shape)[::2]
            dist.all_gather_single(strided, mine)
            same(strided, torch.stack(theirs))
            total = torch.zeros(*mine.shape, 2)[..., 0].copy_(mine)
            dist.all_reduce(total)
            same(total, torch.stack(theirs).sum(0))
            sent = torch.zeros(*mine.shape, 2)[..., 1].copy_(mine)
            dist.broadcast(sent, src=1)
            same(sent, theirs[1])
            parts = [torch.zeros(*mine.shape, 2)[..., 0] for _ in range(size)]
            dist.all_gather(parts, mine)
            same(torch.stack(parts), torch.stack(theirs))
            out = torch.zeros(*mine.shape, 2)[..., 0]
            dist.reduce_scatter(out, [mine] * size)
            same(out, torch.stack(theirs).sum(0))
            came = torch.zeros(*mine.shape, 2)[..., 0]
            work = dist.isend(mine, (rank + 1) % size)
            dist.recv(came, (rank - 1) % size)
            assert work is not None
            work.wait()
            same(came, theirs[(rank - 1) % size])
        conjugate = torch.complex(base, base).conj()
        gathered = torch.empty(size, 4, 6, dtype=torch.complex64)
        group._allgather_base(gathered, conjugate).wait()
        same(gathered, torch.stack([torch.complex(x, -x) for x in everyone]))

    run(emulated_cluster, job)


def test_coalesced(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        rank, size, group = start()
        xs = [torch.full((3,), rank + 1.0), torch.full((2, 2), 2.0 * rank), torch.zeros(0)]
        dist.all_reduce_coalesced(xs)
        total = sum(range(size))
        assert xs[0].tolist() == [total + size] * 3
        assert xs[1].tolist() == [[2 * total] * 2] * 2
        for tensors in ([torch.full((3,), float(rank))], [torch.full((3,), float(rank)), torch.zeros(1)]):
            dist.all_reduce_coalesced(tensors, op=dist.ReduceOp.AVG)
            assert tensors[0].tolist() == [total / size] * 3
            group.allreduce_coalesced(tensors).wait()  # SUM, in torch's way to call without options
            assert tensors[0].tolist() == [total] * 3
        with pytest.raises(TypeError, match="expected AllgatherOptions, got AllreduceOptions"):
            group.all_gather_single_coalesced([], [], dist.AllreduceOptions())
        ins = [torch.full((2,), float(rank)), torch.full((1,), rank, dtype=torch.int16)]
        outs = [torch.empty(2 * size), torch.empty(size, dtype=torch.int16)]
        group.all_gather_single_coalesced(outs, ins).wait()
        assert outs[1].tolist() == list(range(size))
        back = [torch.empty(2), torch.empty(1, dtype=torch.int16)]
        group.reduce_scatter_single_coalesced(back, outs).wait()
        assert back[0].tolist() == [rank * size] * 2
        assert back[1].tolist() == [rank * size]
        rows = [[torch.empty(2), torch.empty(1, dtype=torch.int16)] for _ in range(size)]
        group.allgather_coalesced(rows, ins).wait()
        assert [row[1].item() for row in rows] == list(range(size))
        with _coalescing_manager():
            a, b = torch.ones(2), torch.ones(3)
            dist.all_reduce(a)
            dist.all_reduce(b)
        assert a.sum() + b.sum() == 5 * size
        came, gone = torch.empty(2), torch.full((2,), float(rank))
        with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            dist.isend(gone, (rank + 1) % size)
            dist.irecv(came, (rank - 1) % size)
            c = torch.ones(1)
            dist.all_reduce(c)
        manager.wait()
        assert came.tolist() == [(rank - 1) % size] * 2
        assert c.item() == size

    run(emulated_cluster, job)


def test_sparse_gradients(emulated_cluster: ClusterFactory) -> None:
    def job() -> list[float]:
        rank, _, _ = start()
        x = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.tensor([rank + 1.0]), (4,))
        dist.all_reduce(x)
        found: list[float] = x.to_dense().tolist()
        return found

    assert run(emulated_cluster, job) == [[1.0, 2.0, 3.0, 4.0]] * 4


def test_tensors_of_inference_mode_and_parameters(emulated_cluster: ClusterFactory) -> None:
    """A result that needs a copy back must not trip over autograd, on either thread."""

    def job() -> None:
        rank, size, _ = start()
        with torch.inference_mode():
            x, out = torch.full((2, 2), rank, dtype=torch.int16).t(), torch.empty(2, 2 * size, dtype=torch.int16).t()
        for async_op in (False, True):
            work = dist.all_gather_single(out, x, async_op=async_op)
            if work is not None:
                work.wait()
            assert out[:, 0].tolist() == [r for r in range(size) for _ in range(2)]
        weight = torch.nn.Parameter(torch.ones(3, 2).t())
        dist.all_reduce(weight, async_op=True).wait()
        assert weight.sum() == 6 * size

    run(emulated_cluster, job, 1, 2)
