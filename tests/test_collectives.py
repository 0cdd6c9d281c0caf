"""Collectives that are started and waited for later: values, gradients, and where the backward pass waits."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import commlayer.backend.create  # noqa: F401  # once, before ranks are forked
from commlayer import collectives
from commlayer.collectives import GroupCommunicator, Pending
from commlayer.integrations import planned_group
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
    for verb, is_held, rows in ((v, h, r) for v in VERBS for h in (False, True) for r in (None, uneven)):
        given: list[Any] = [rows]
        if verb == "all_gather":
            x = torch.randn(3 if rows is None else rows[ep.rank], 5, generator=generator)
        else:
            x = torch.randn(3 * ep.size if rows is None else sum(rows), 5, generator=generator)
        if verb == "all_to_all":  # every rank sends each rank r its r + 1 rows
            given.append(None if rows is None else [rows[ep.rank]] * ep.size)
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        pending = getattr(ep, f"start_{verb}")(ep.hold(mine * 2) if is_held else mine * 2, *given)
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
    emulated_cluster(1, ranks).run(started_against_plain, timeout_s=60)


class Watched(Pending):
    """Tells when it is waited for."""

    log: list[str] = []  # noqa: RUF012  # one for the process

    def wait(self) -> torch.Tensor:
        if self._work is not None:
            self.log.append("wait")
        return super().wait()


class Noted(torch.autograd.Function):
    """The work beside a transfer: tells when its backward pass runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Watched.log.append("beside")
        return gradient * 3


def order(is_held: bool, is_checked: bool) -> tuple[list[str], torch.Tensor]:
    ep = start()
    collectives.Pending = Watched  # type: ignore[misc]  # in this rank's process
    x = torch.full((ep.size, 2), float(ep.rank), requires_grad=True)
    sent = ep.hold(x * 1) if is_held else None
    beside = cast("Any", Noted.apply)(x)  # between what is held and where it is sent
    pending = ep.start_all_to_all(x * 1 if sent is None else sent)
    out = pending.wait() + beside
    Watched.log.clear()
    with torch.autograd.set_detect_anomaly(is_checked):
        out.sum().backward()
    assert x.grad is not None
    return Watched.log, x.grad


@pytest.mark.parametrize(
    ("is_held", "is_checked", "expected"),
    [(False, False, ["wait", "beside"]), (True, False, ["beside", "wait"]), (True, True, ["wait", "beside"])],
    ids=["not held", "held", "held, with anomaly detection"],
)
def test_the_backward_pass_waits_where_rows_were_held(
    emulated_cluster: ClusterFactory, is_held: bool, is_checked: bool, expected: list[str]
) -> None:
    """Anomaly detection reads what a function returns, so that it must be there."""
    for log, gradient in emulated_cluster(1, 2).run(order, is_held, is_checked, timeout_s=60):
        assert log == expected
        assert torch.equal(gradient, torch.full((2, 2), 4.0))


def held_twice() -> str:
    ep = start()
    x = torch.ones(ep.size, 2, requires_grad=True)
    held = ep.hold(x * 1)
    first = ep.start_all_to_all(held).wait()
    try:
        ep.start_all_to_all(held)
    except Exception as error:  # noqa: BLE001  # whose type and text are asked for
        first.sum().backward()
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_what_is_held_is_sent_once(emulated_cluster: ClusterFactory) -> None:
    for said in emulated_cluster(1, 2).run(held_twice, timeout_s=60):
        assert said.startswith("UsageError")
        assert "hold" in said
