"""Compressed collectives on emulated clusters: values against FP64 and against the flat form, every plan, the same bits."""

from __future__ import annotations

import itertools
import os
import re
import signal
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import one_by_one, start_with

import commlayer
import commlayer.backend.create  # once, before ranks are forked
from commlayer.collectives import GroupCommunicator
from commlayer.engine.encoded_flat import FlatEncoded
from commlayer.integrations import planned_group
from commlayer.profiles.errors import (
    CollectiveTimeoutError,
    DisagreementError,
    NonFiniteError,
    PeerError,
    TensorError,
    UsageError,
)
from commlayer.scheduler.wire import Scaling, Wire, WireFormat, WirePolicy
from commlayer.statistics import reset_stats
from commlayer.testing.plugin import ClusterFactory
from commlayer.wire.codecs import Codec

BF16, E4M3, E5M2, NATIVE = WireFormat.BF16, WireFormat.FP8_E4M3, WireFormat.FP8_E5M2, WireFormat.NATIVE
INT8 = WireFormat.INT8
PLANS = ("flat_direct", "flat_direct:3", "hierarchical", "pipelined:2")
ROUNDING = {BF16: 2.0**-8, INT8: 1 / 254 + 2.0**-8, E4M3: 2.0**-4, E5M2: 2.0**-3}
W = 160


def start(plan: str | None = None, **policy: Any) -> Any:
    torch.set_num_threads(1)
    if plan:
        os.environ["COMMLAYER_PLAN"] = plan
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    reset_stats()
    return GroupCommunicator(planned_group(dist.group.WORLD), wire=WirePolicy(**policy), name="dp")


def everyones(x: torch.Tensor) -> list[torch.Tensor]:
    """The same tensor of all ranks, natively."""
    sizes = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, x)
    return sizes  # type: ignore[return-value]


def check_same_bits(x: torch.Tensor) -> None:
    assert all(torch.equal(theirs, x) for theirs in everyones(x))


def rows_of(n: int, *, is_even: bool) -> list[int]:
    return [5] * n if is_even else [(0, 7, 1, 140, 3, 2, 9, 4)[k] for k in range(n)]


def sums_are_right(plan: str, formats: tuple[WireFormat, ...]) -> None:
    """reduce_scatter and all_reduce against FP64, in every dtype, even and uneven; twice for the same bits."""
    group = start(plan, formats=formats)
    n, rank = dist.get_world_size(), dist.get_rank()
    dtypes = (torch.float32,) if formats == (BF16,) else (torch.float32, torch.bfloat16, torch.float16)
    for dtype, is_even in itertools.product(dtypes, (True, False)):
        rows = rows_of(n, is_even=is_even)
        x = torch.randn(sum(rows), W, generator=torch.Generator().manual_seed(rank)).to(dtype)
        whole = everyones(x)
        expected = torch.stack(whole).double().sum(0)
        bound = bound_of(whole, formats[0], dtype)
        outs = [x.new_empty(rows[rank], W) for _ in range(2)]
        for out in outs:
            group.reduce_scatter_into(out, x, None if is_even else rows).wait()
        assert torch.equal(*outs)
        first = sum(rows[:rank])
        mine = slice(first, first + rows[rank])
        assert ((outs[0].double() - expected[mine]).abs() <= bound[mine]).all()
        total = x.clone()
        group.all_reduce_in_place(total).wait()
        again = x.clone()
        group.all_reduce_in_place(again).wait()
        assert torch.equal(total, again)
        check_same_bits(total)
        result = bound + (expected.abs() + bound).amax(1, keepdim=True) * ROUNDING[formats[0]]
        assert ((total.double() - expected).abs() <= result).all()
    if group.group.shape == (2, 2):  # everywhere else some plans do not apply, and another runs
        ran = {call["plan"] for each in commlayer.stats()["groups"] for call in each["calls"]}
        assert f"{plan.replace(':', '×')}/{formats[0]}" in ran


def bound_of(whole: list[torch.Tensor], wire: WireFormat, dtype: torch.dtype) -> torch.Tensor:
    """Half a unit of the format for each input (FP8, INT8: of its row's largest), the sum's own rounding, and two of a node's sum
    in the tensor's dtype."""
    stacked = torch.stack(whole).double().abs()
    each = stacked if wire is BF16 else stacked.amax(2, keepdim=True).expand_as(stacked)
    own = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    return each.sum(0) * (ROUNDING[wire] * 1.01 + own) + 1e-6


def test_sums(emulated_cluster: ClusterFactory) -> None:
    cases = [(plan, (wire,)) for plan in PLANS for wire in (BF16, E4M3, E5M2)]
    emulated_cluster(2, 2).run(one_by_one, sums_are_right, cases)


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 3), (3, 1), (3, 2)])
def test_sums_on_other_shapes(emulated_cluster: ClusterFactory, nodes: int, ranks: int) -> None:
    cases = [("hierarchical", (BF16,)), ("flat_direct:2", (E4M3,))]
    emulated_cluster(nodes, ranks).run(one_by_one, sums_are_right, cases)


def sums_on_uneven_nodes(shape: str, plan: str, formats: tuple[WireFormat, ...]) -> None:
    os.environ["COMMLAYER_TOPOLOGY"] = shape
    sums_are_right(plan, formats)
    ran = {call["plan"] for each in commlayer.stats()["groups"] for call in each["calls"]}
    assert f"{plan.replace(':', '×')}/{formats[0]}" in ran


@pytest.mark.parametrize("shape", ["1+2", "3+1", "2+1+1"])
def test_sums_where_nodes_hold_different_numbers_of_ranks(emulated_cluster: ClusterFactory, shape: str) -> None:
    cases = [(shape, *case) for case in (("hierarchical", (E4M3,)), ("pipelined:3", (BF16,)), ("pipelined:2", (E4M3,)))]
    emulated_cluster(1, sum(map(int, shape.split("+")))).run(one_by_one, sums_on_uneven_nodes, cases)


def gathers_are_right(plan: str, scaling: Scaling, wire: WireFormat = E4M3) -> None:
    """Every rank holds what encoding and decoding makes of each block, the owner's copy too."""
    n = 4
    group = start(plan, formats=(wire,), scaling=scaling)
    rank = dist.get_rank()
    for dtype, is_even in itertools.product((torch.float32, torch.bfloat16), (True, False)):
        rows = rows_of(n, is_even=is_even)
        x = torch.randn(rows[rank], W, generator=torch.Generator().manual_seed(rank)).to(dtype)
        out = x.new_empty(sum(rows), W)
        group.all_gather_into(out, x, None if is_even else rows).wait()
        check_same_bits(out)
        expected = torch.cat(everyones(x)).double()
        assert ((out.double() - expected).abs() <= expected.abs().amax() * 2.0**-4).all()
        if scaling is not Scaling.CHANNEL and rows[rank]:  # whose groups are cut with the chunks
            mine, codec = out.split(rows)[rank], Codec(Wire(wire, W, scaling), dtype)
            message = torch.empty(codec.wire_bytes(rows[rank]), dtype=torch.uint8)
            codec.encode(x, message)
            codec.decode(message, decoded := torch.empty_like(x))
            assert torch.equal(mine, decoded)


def shared_scales_on_uneven_nodes(shape: str, plan: str, wire: WireFormat) -> None:
    """Whoever encodes 128 rows that share scales, wherever its node cuts a block, finds the scales of the block's own groups."""
    os.environ["COMMLAYER_TOPOLOGY"] = shape
    group, n, rank = start(plan, formats=(wire,), scaling=Scaling.CHANNEL), dist.get_world_size(), dist.get_rank()
    rows = [(130, 600, 0, 50, 500, 20)[k] for k in range(n)]
    generator = torch.Generator().manual_seed(rank)
    for dtype in (torch.float32, torch.bfloat16):
        x = (torch.randn(rows[rank], W, generator=generator) * 2.0 ** (rank % 5)).to(dtype)
        out = x.new_empty(sum(rows), W)
        group.all_gather_into(out, x, rows).wait()
        codec = Codec(Wire(wire, W, Scaling.CHANNEL), dtype)
        for mine, block in zip(out.split(rows), everyones(x), strict=True):
            codec.encode(block, message := torch.empty(codec.wire_bytes(len(block)), dtype=torch.uint8))
            codec.decode(message, decoded := torch.empty_like(block))
            assert torch.equal(mine, decoded)
        data = torch.randn(sum(rows), W, generator=generator).to(dtype)
        whole = everyones(data)
        expected = torch.stack(whole).double().sum(0)
        group.reduce_scatter_into(part := data.new_empty(rows[rank], W), data, rows).wait()
        first, coarse = sum(rows[:rank]), torch.stack(whole).double().abs().amax() * ROUNDING[wire] * n
        assert ((part.double() - expected[first : first + rows[rank]]).abs() <= coarse).all()
        group.all_reduce_in_place(data).wait()
        check_same_bits(data)
        assert ((data.double() - expected).abs() <= 2 * coarse + expected.abs().amax() * ROUNDING[wire]).all()
    ran = {(call["collective"], call["plan"]) for each in commlayer.stats()["groups"] for call in each["calls"]}
    wanted = {(verb, f"{plan.replace(':', '×')}/{wire}") for verb in ("all_gather", "reduce_scatter", "all_reduce")}
    assert wanted <= ran, ran


@pytest.mark.parametrize("shape", ["3+1", "2+1+3", "2+3"])
def test_rows_that_share_scales_where_nodes_hold_different_numbers_of_ranks(
    emulated_cluster: ClusterFactory, shape: str
) -> None:
    cases = [(shape, "hierarchical", E4M3), (shape, "pipelined:3", E5M2)]
    emulated_cluster(1, sum(map(int, shape.split("+")))).run(one_by_one, shared_scales_on_uneven_nodes, cases)


def test_gathers(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(2, 2).run(one_by_one, gathers_are_right, list(itertools.product(PLANS, Scaling)))


def exchanges_are_right(plan: str, wire: WireFormat) -> None:
    """Native inside the node, encoded between nodes, uneven, with ranks that send nothing."""
    group = start(plan, formats=(wire,))
    n, rank = dist.get_world_size(), dist.get_rank()
    nodes = group.group.shape
    node = [i for i, count in enumerate(nodes) for _ in range(count)]
    for dtype in (torch.float32, torch.bfloat16):
        if wire is BF16 and dtype is torch.bfloat16:
            continue
        counts = [[(3 * i + 5 * j) % 4 * (i != 1) for j in range(n)] for i in range(n)]
        counts[0][n - 1] = 150
        if n > 2:  # one rank has nothing to send, and nothing comes
            counts[2] = [0] * n
            for row in counts:
                row[2] = 0
        send, receive = counts[rank], [row[rank] for row in counts]
        x = torch.randn(sum(send), W, generator=torch.Generator().manual_seed(rank)).to(dtype)
        out = x.new_empty(sum(receive), W)
        group.all_to_all_into(out, x, send, receive).wait()
        sent = everyones(x)
        for k, part in enumerate(out.split(receive)):
            first = sum(counts[k][:rank])
            expected = sent[k][first : first + receive[k]]
            if k == rank or (node[k] == node[rank] and len(nodes) > 1):
                assert torch.equal(part, expected)
            elif len(part):
                biggest = expected.double().abs().amax(1, keepdim=True)
                assert ((part.double() - expected.double()).abs() <= biggest * ROUNDING[wire]).all()
                assert not torch.equal(part, expected)


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (1, 3), (3, 1)])
def test_exchanges(emulated_cluster: ClusterFactory, nodes: int, ranks: int) -> None:
    cases = list(itertools.product(("flat_direct", "flat_direct:3"), (BF16, E4M3, E5M2)))
    emulated_cluster(nodes, ranks).run(one_by_one, exchanges_are_right, cases)


def test_int8_in_every_collective(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        one_by_one(sums_are_right, [("flat_direct", (INT8,)), ("pipelined:2", (INT8,))])
        gathers_are_right("hierarchical", Scaling.BLOCK, INT8)
        exchanges_are_right("flat_direct:3", INT8)

    emulated_cluster(2, 2).run(job)


def flat_gives_the_same(scaling: Scaling) -> None:
    """The plain form, which devices use, against the plans on one level, bit for bit."""
    group = start("flat_direct", formats=(E4M3,), scaling=scaling)
    n, rank = dist.get_world_size(), dist.get_rank()
    flat = FlatEncoded(group.group, Codec(Wire(E4M3, W, scaling), torch.float32))
    rows = rows_of(n, is_even=False)
    x = torch.randn(sum(rows), W, generator=torch.Generator().manual_seed(rank))
    blocks = [count * W * 4 for count in rows]
    out, expected = x.new_empty(2, rows[rank], W)
    group.reduce_scatter_into(out, x, rows).wait()
    flat.reduce_scatter(expected, x, blocks).wait()
    assert torch.equal(out, expected)
    mine = x[: rows[rank]].contiguous()
    whole, expected = torch.empty_like(x), torch.empty_like(x)
    group.all_gather_into(whole, mine, rows).wait()
    flat.all_gather(expected, mine, blocks).wait()
    assert torch.equal(whole, expected)
    received, expected = x.new_empty(2, rows[rank] * n, W)
    group.all_to_all_into(received, x, rows, [rows[rank]] * n).wait()
    flat.all_to_all(expected, x, (blocks, [blocks[rank]] * n)).wait()
    for k, (theirs, plain) in enumerate(zip(received.split(rows[rank]), expected.split(rows[rank]), strict=True)):
        assert k == rank or torch.equal(theirs, plain)
    total, expected = x.clone(), x.clone()
    group.all_reduce_in_place(total).wait()
    flat.all_reduce(expected).wait()
    assert torch.equal(total, expected)


def test_flat_form(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 3).run(one_by_one, flat_gives_the_same, [(scaling,) for scaling in Scaling])


def in_place_is_right(count: int) -> None:
    """Every rank's block, separate and within the input, against the rounded inputs summed in FP32 in rank order."""
    group = start(formats=(BF16,), in_place=True)
    n, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(n * count, generator=torch.Generator().manual_seed(rank))
    expected = torch.zeros(count)
    for theirs in everyones(x):
        expected += theirs[rank * count : (rank + 1) * count].bfloat16()
    within, apart, out = x.clone(), x.clone(), torch.empty(count)
    group.reduce_scatter_into(within[rank * count : (rank + 1) * count], within).wait()
    group.reduce_scatter_into(out, apart).wait()
    assert torch.equal(out, expected)
    assert torch.equal(within[rank * count : (rank + 1) * count], expected)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_in_place(emulated_cluster: ClusterFactory, ranks: int) -> None:
    emulated_cluster(1, ranks).run(one_by_one, in_place_is_right, [(count,) for count in (1, 3, 40_001)])


def refusals() -> None:
    group = start(formats=(E4M3,))
    rank = dist.get_rank()
    for dtype in (torch.int32, torch.float64, torch.complex64):
        with pytest.raises(TensorError, match="allow native too"):
            group.all_reduce_in_place(torch.ones(8, 16, dtype=dtype))
    with pytest.raises(TensorError, match="longer rows"):
        group.all_reduce_in_place(torch.ones(8))  # a scale for each element
    with pytest.raises(TensorError, match="must divide the rows"):
        group.reduce_scatter_into(torch.empty(1, 16), torch.ones(3, 16))
    with pytest.raises(TensorError, match="are 2 together"):
        group.reduce_scatter_into(torch.empty(1, 16), torch.ones(3, 16), [1, 1])
    exact = GroupCommunicator(group.group, wire=WirePolicy((NATIVE, E4M3)), name="dp")
    whole = torch.full((8,), rank, dtype=torch.int64)
    exact.all_reduce_in_place(whole).wait()  # integers go as they are
    assert whole.tolist() == [1] * 8
    short = torch.full((8,), float(rank))
    exact.all_reduce_in_place(short).wait()  # and what would not be fewer bytes
    assert short.tolist() == [1.0] * 8
    uneven = GroupCommunicator(group.group, wire=WirePolicy((BF16,), in_place=True), name="dp")
    with pytest.raises(TensorError, match="in_place"):
        uneven.reduce_scatter_into(torch.empty(rank + 1), torch.ones(3), [1, 2])
    uneven.reduce_scatter_into(torch.empty(0), torch.ones(0)).wait()
    for out in (torch.empty(2, 16).bfloat16(), torch.empty(3, 16), torch.empty(16, 2).t()):
        with pytest.raises(TensorError, match="needs a contiguous output of 32 elements"):
            group.reduce_scatter_into(out, torch.ones(4, 16))
    with pytest.raises(TensorError, match="needs a contiguous output"):
        group.all_reduce_in_place(torch.ones(16, 8).t())
    with pytest.raises(TensorError, match="expected this rank's rows"):
        group.all_gather_into(torch.empty(4, 16), torch.ones(3, 16))
    with pytest.raises(TensorError, match="into rows of 8"):
        group.all_to_all_into(torch.empty(4, 8), torch.ones(4, 16))
    with pytest.raises(UsageError, match="autograd may still need"):
        uneven.reduce_scatter(torch.ones(4))
    with pytest.raises(UsageError, match="autograd may still need"):
        GroupCommunicator(group.group, gradient_wire=uneven.wire)
    with pytest.raises(UsageError, match="wire must be a WirePolicy"):
        GroupCommunicator(group.group, wire=BF16)  # type: ignore[arg-type]
    wide = torch.ones(32, 4).t()  # an input may have any strides
    out = torch.empty(2, 32)
    group.reduce_scatter_into(out, wide).wait()
    assert torch.equal(out, torch.full((2, 32), 2.0))
    needing = torch.ones(4, 32, requires_grad=True)
    group.reduce_scatter_into(out, needing).wait()
    assert torch.equal(out, torch.full((2, 32), 2.0))


def test_refusals(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 2).run(refusals)


def one_dtype_is_different() -> str:
    group = start(formats=(E4M3,))
    x = torch.ones(8, 16, dtype=torch.bfloat16 if dist.get_rank() == 1 else torch.float32)
    with pytest.raises(DisagreementError, match="nothing was sent") as found:
        group.all_reduce_in_place(x)
    return str(found.value)


def test_ranks_that_differ_in_dtype_hear_of_it(emulated_cluster: ClusterFactory) -> None:
    texts = emulated_cluster(1, 3).run(one_dtype_is_different)
    for text in texts:
        assert re.search(r"rank 0 has .*float32.*, rank 1 has .*bfloat16", text)
        assert "rank 2" not in text


class _Late:
    """The waits in which all ranks agree before a call, one of which a rank does not come to."""

    def __init__(self) -> None:
        start_with(3.0)
        self.group: Any = GroupCommunicator(dist.group.WORLD, wire=WirePolicy((BF16,), error_budget=0.5), name="dp")

    def formats(self) -> None:
        self.group.governor.allowed((BF16,), lambda _: (0.0, 1.0))

    def rows(self) -> None:
        self.group._forward.wire.agree_rows(torch.ones(4, 8), torch.ones(4, 8))

    def kind(self) -> None:
        self.group._forward.wire._agree_once("all_reduce", torch.float32, 8)


def one_rank_does_not_come(wait: str, *, dies: bool) -> str:
    late = _Late()
    if dist.get_rank() == 1:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.distributed_c10d._get_default_store().wait(["heard"], timedelta(seconds=60))
        return ""
    with pytest.raises((PeerError, CollectiveTimeoutError)) as found:
        getattr(late, wait)()
    if not dies:
        dist.distributed_c10d._get_default_store().set("heard", "")
    return f"{type(found.value).__name__}: {found.value}"


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize(
    ("wait", "purpose"),
    [
        ("formats", "to agree on the error of bf16 of dp"),
        ("rows", "to agree on the largest number of rows of dp"),
        ("kind", "to compare the first all_reduce of dp"),
    ],
)
def test_a_rank_that_does_not_agree_is_named_with_what_was_to_be_agreed(
    emulated_cluster: ClusterFactory, wait: str, purpose: str, *, dies: bool
) -> None:
    cluster = emulated_cluster(1, 2, mode="loopback")
    text = cluster.run(partial(one_rank_does_not_come, wait, dies=dies), check=False, grace_s=40)[0].value
    assert text.startswith(f"{'PeerError' if dies else 'CollectiveTimeoutError'}: rank 0"), text
    assert purpose in text
    assert "rank 1 " in text
    assert "group 0" in text


def one_rank_has_nan(policy: dict[str, Any]) -> str:
    group = start(formats=(E4M3,), **policy)
    x = torch.ones(8, 16)
    if dist.get_rank() == 1:
        x[3, 2] = float("nan")
    with pytest.raises((NonFiniteError, RuntimeError)) as found:
        group.all_reduce_in_place(x).wait()
    return f"{type(found.value).__name__}: {found.value}"


@pytest.mark.parametrize("policy", [{}, {"error_budget": 0.5, "sample_every": 1}], ids=["plain", "sampled"])
def test_nan_ends_the_call_on_all_ranks(emulated_cluster: ClusterFactory, policy: dict[str, Any]) -> None:
    texts = emulated_cluster(1, 3).run(one_rank_has_nan, policy)
    assert texts[1].startswith("NonFiniteError")
    assert all("NonFiniteError" in text for text in texts)  # the others read why


def nan_in_the_flat_form() -> None:
    """All ranks refuse, before anything is sent; the group goes on."""
    group = start()
    flat = FlatEncoded(group.group, Codec(Wire(E4M3, 16), torch.float32))
    x = torch.ones(8, 16)
    if dist.get_rank() == 1:
        x[3, 2] = float("nan")
    with pytest.raises(NonFiniteError, match="1 values"):
        flat.all_reduce(x)
    with pytest.raises(NonFiniteError, match="1 values"):
        flat.all_to_all(torch.empty_like(x), x, ([256, 256], [256, 256]))
    flat.all_reduce(fine := torch.ones(8, 16)).wait()
    assert torch.equal(fine, torch.full((8, 16), 2.0))


def test_nan_is_refused_by_all_where_calls_are_flat(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 2).run(nan_in_the_flat_form)


def nan_passes() -> None:
    group = start(formats=(E4M3,), non_finite="pass")
    x = torch.ones(8, 16)
    if dist.get_rank() == 1:
        x[3, 2], x[4, 5], x[5, 5] = float("nan"), float("inf"), -float("inf")
    group.all_reduce_in_place(x).wait()
    assert x[3, 2].isnan()
    assert x[4, 5] == float("inf")
    assert x[5, 5] == -float("inf")
    assert x.isfinite().sum() == x.numel() - 3
    torch.testing.assert_close(x[0], torch.full((16,), 3.0))


def test_nan_and_infinity_pass_where_the_policy_says_so(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 3).run(nan_passes)


def budget_is_kept() -> tuple[list[str], int]:
    group = start(formats=(NATIVE, E4M3, BF16), error_budget=0.01, sample_every=4)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with pytest.warns(UserWarning, match="more than the budget") if dist.get_rank() == 0 else _nothing():
        group.all_reduce_in_place(torch.randn(8, 16, generator=generator)).wait()
    watched: Any = GroupCommunicator(
        group.group, wire=WirePolicy((E4M3,), error_budget=0.05, sample_every=3), name="ep"
    )
    calls = 0
    while watched.governor.formats == (E4M3,) and calls < 40:
        x = torch.randn(8, 16, generator=generator)
        if calls > 4 and dist.get_rank() == 1:  # one rank's values alone go bad: smaller than scales reach
            x *= 1e-9
        watched.all_reduce_in_place(x).wait()
        calls += 1
        assert calls > 5 or 0.01 < watched.governor.errors[E4M3] < 0.05
    assert watched.governor.formats == (NATIVE,)
    assert watched.governor.errors[E4M3] > 0.05
    return [str(each) for each in group.governor.formats], calls


class _nothing:  # noqa: N801  a context
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def test_a_format_beyond_its_budget_is_left_by_all_at_once(emulated_cluster: ClusterFactory) -> None:
    found = emulated_cluster(1, 3).run(budget_is_kept)
    assert all(each == found[0] for each in found)
    assert 5 < found[0][1] < 40
    assert found[0][0] == ["native", "bf16"]
