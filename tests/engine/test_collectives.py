"""Collectives that are started and waited for later: values, gradients, and where the backward pass waits."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from commlayer.collectives import GroupCommunicator, Pending
from commlayer.integrations import planned_group
from commlayer.profiles.errors import UsageError
from commlayer.testing.plugin import ClusterFactory


def start() -> GroupCommunicator:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return GroupCommunicator(planned_group(dist.group.WORLD), "ep")


VERBS = ("all_to_all", "all_gather", "reduce_scatter")


def started_against_plain() -> None:
    ep = start()
    generator = torch.Generator().manual_seed(ep.rank)
    uneven = [rank + 1 for rank in range(ep.size)]
    for verb, rows in ((v, r) for v in VERBS for r in (None, uneven)):
        given: list[Any] = [rows]
        if verb == "all_gather":
            x = torch.randn(3 if rows is None else rows[ep.rank], 5, generator=generator)
        else:
            x = torch.randn(3 * ep.size if rows is None else sum(rows), 5, generator=generator)
        if verb == "all_to_all":  # every rank sends each rank r its r + 1 rows
            given.append(None if rows is None else [rows[ep.rank]] * ep.size)
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        pending = getattr(ep, f"start_{verb}")(mine * 2, *given)
        out, expected = pending.wait(), getattr(ep, verb)(theirs * 2, *given)
        assert torch.equal(out, expected)
        gradient = torch.randn(out.shape, generator=generator)
        out.backward(gradient)
        expected.backward(gradient)
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_started_gives_what_is_called(emulated_cluster: ClusterFactory, ranks: int) -> None:
    emulated_cluster(1, ranks).run(started_against_plain)


def in_memory_of_the_caller() -> None:
    """Without a format the verbs that write into a given tensor bring what the others bring; a lane that nobody says stays."""
    ep = start()
    plain = GroupCommunicator(ep.group)
    assert plain.lane == ("ep" if plain.size > 1 else "")  # a group of one rank has none
    assert GroupCommunicator(planned_group(dist.group.WORLD)).name == "a group without a lane"
    uneven = [rank + 1 for rank in range(plain.size)]
    for rows in (None, uneven):
        mine = 3 if rows is None else rows[plain.rank]
        total = 3 * plain.size if rows is None else sum(rows)
        x = torch.arange(5.0 * total).view(total, 5) + plain.rank
        block = x[:mine].clone()
        gathered, part, summed = torch.empty_like(x), torch.empty_like(block), x.clone()
        come = None if rows is None else [mine] * plain.size
        received = x.new_empty(total if come is None else sum(come), 5)
        plain.all_gather_into(gathered, block, rows).wait()
        plain.reduce_scatter_into(part, x, rows).wait()
        plain.all_to_all_into(received, x, rows, come).wait()
        plain.all_reduce_in_place(summed).wait()
        assert torch.equal(gathered, ep.all_gather(block, rows))
        assert torch.equal(part, ep.reduce_scatter(x, rows))
        assert torch.equal(received, ep.all_to_all(x, rows, come))
        assert torch.equal(summed, ep.all_reduce(x))


@pytest.mark.parametrize("ranks", [1, 3])
def test_verbs_in_memory_of_the_caller(emulated_cluster: ClusterFactory, ranks: int) -> None:
    emulated_cluster(1, ranks).run(in_memory_of_the_caller)


def test_verbs_in_memory_of_the_caller_of_a_rank_alone() -> None:
    alone, x = GroupCommunicator(None, "ep"), torch.arange(6.0).view(3, 2)
    for verb in ("all_gather_into", "reduce_scatter_into", "all_to_all_into"):
        out = torch.empty_like(x)
        getattr(alone, verb)(out, x).wait()
        assert torch.equal(out, x), verb
    alone.all_reduce_in_place(x).wait()
    assert torch.equal(x, torch.arange(6.0).view(3, 2))


LOG: list[str] = []
"""The events of this process: what was waited for, and what ran beside."""


class Noted(torch.autograd.Function):
    """The work beside a transfer: tells when its backward pass runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        LOG.append("beside")
        return gradient * 3


def order(is_checked: bool) -> tuple[list[str], torch.Tensor]:
    ep = start()
    wait = Pending.wait

    def watched(pending: Pending) -> torch.Tensor:
        if pending._work is not None:
            LOG.append("wait")
        return wait(pending)

    Pending.wait = watched  # type: ignore[method-assign, assignment]  # in this rank's process
    x = torch.full((ep.size, 2), float(ep.rank), requires_grad=True)
    pending = ep.start_all_to_all(x * 1)
    beside = cast("Any", Noted.apply)(x)
    out = pending.wait() + beside
    LOG.clear()
    with torch.autograd.set_detect_anomaly(is_checked):
        out.sum().backward()
    assert x.grad is not None
    return LOG, x.grad


@pytest.mark.parametrize("is_checked", [False, True], ids=["plain", "with anomaly detection"])
def test_the_backward_pass_waits_where_rows_were_sent(emulated_cluster: ClusterFactory, is_checked: bool) -> None:
    """Anomaly detection reads what a function returns, so that it must be there."""
    for log, gradient in emulated_cluster(1, 2).run(order, is_checked):
        assert log == ["beside", "wait"]
        assert torch.equal(gradient, torch.full((2, 2), 4.0))


def twice_differentiated() -> None:
    """The gradient of a sum needs none itself, so that torch's own decorator notices nothing."""
    ep = start()
    x = torch.ones(ep.size, 2, requires_grad=True)
    out = ep.start_all_to_all(x * x).wait()
    with pytest.raises(UsageError, match="create_graph"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
    out = ep.all_to_all(x**3)
    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, 6 * x.detach())


def test_a_second_derivative_is_right_or_refused(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 2).run(twice_differentiated)


def freed_and_written_over() -> None:
    """The gradients that autograd has passed on and dropped, while it is still on its way."""
    ep = start()
    x = torch.full((ep.size * 4096, 64), float(ep.rank + 1), requires_grad=True)
    pending = ep.start_all_to_all(x * 1)
    other = cast("Any", Overwriting).apply(x)
    out = pending.wait() * (ep.rank + 1) + other * 0
    out.sum().backward()
    expected = torch.arange(1.0, ep.size + 1).repeat_interleave(4096)[:, None].expand(-1, 64)
    assert torch.equal(cast("torch.Tensor", x.grad), expected)


class Overwriting(torch.autograd.Function):
    """In the backward pass, between what is started and where it is waited for, takes memory and writes to it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            torch.full_like(gradient, float("nan"))
        return gradient


def test_gradients_under_way_are_kept(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 2).run(freed_and_written_over)
