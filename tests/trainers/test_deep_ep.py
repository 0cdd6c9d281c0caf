"""The name ``deep_ep``: when it is given, to whom, and what its buffer answers without a job. Training: test_megatron.py."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from commlayer.integrations import deep_ep
from commlayer.integrations.deep_ep import DeepEPBuffer, install_deep_ep
from commlayer.profiles.errors import TensorError, UsageError

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "trainers" / "megatron.md"
MEGATRONS = "megatron.core.transformer.moe.fused_a2a"


@pytest.fixture
def without_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deep_ep", "deep_ep.utils", MEGATRONS):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # also what a test leaves there goes
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(DeepEPBuffer, "kind", "auto")
    find = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> ModuleSpec | None:
        return find(name, package) if name != "deep_ep" or name in sys.modules else None

    monkeypatch.setattr("importlib.util.find_spec", found)  # the real one may be installed here


@pytest.mark.usefixtures("without_name")
def test_the_real_library_stays_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType("deep_ep")
    monkeypatch.setitem(sys.modules, "deep_ep", real)
    with pytest.raises(UsageError, match="DeepEP itself is installed: pass replace=True"):
        install_deep_ep(kind="all_gather")
    assert sys.modules["deep_ep"] is real
    assert DeepEPBuffer.kind == "auto"
    monkeypatch.setitem(sys.modules, "deep_ep.utils", ModuleType("deep_ep.utils"))
    install_deep_ep(kind="two_level", replace=True)
    assert vars(sys.modules["deep_ep"])["Buffer"] is DeepEPBuffer
    assert DeepEPBuffer.kind == "two_level"


@pytest.mark.usefixtures("without_name")
def test_megatron_may_not_have_looked_for_it_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MEGATRONS, ModuleType(MEGATRONS))
    with pytest.raises(UsageError, match="call this before any import of megatron"):
        install_deep_ep()
    assert "deep_ep" not in sys.modules


@pytest.mark.usefixtures("without_name")
def test_a_kind_that_there_is_not_is_refused_before_anything_is_changed() -> None:
    with pytest.raises(UsageError, match="kind must be auto, all_to_all or all_gather or two_level, got 'ring'"):
        install_deep_ep(kind="ring")
    assert "deep_ep" not in sys.modules
    assert DeepEPBuffer.kind == "auto"


@pytest.mark.usefixtures("without_name")
def test_the_stand_in_is_found_and_says_what_it_is() -> None:
    install_deep_ep()
    for name in ("deep_ep", "deep_ep.utils"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.name == name
    install_deep_ep(kind="all_gather")
    assert DeepEPBuffer.kind == "all_gather"
    package: Any = sys.modules["deep_ep"]
    with pytest.raises(
        AttributeError, match=r"deep_ep has no topk: it is commlayer's stand-in .* offers Buffer, Config,"
    ):
        package.topk  # noqa: B018
    with pytest.raises(
        AttributeError, match=r"deep_ep\.Buffer has no low_latency_dispatch: .* offers .*combine, dispatch,"
    ):
        buffer(2).low_latency_dispatch()


def test_the_pages_command_runs_an_unchanged_program(tmp_path: Path) -> None:
    (module,) = re.findall(r"torchrun \S+ \S+ -m (\S+) pretrain_gpt\.py", PAGE.read_text(encoding="utf-8"))
    if PathFinder.find_spec("deep_ep") is not None:
        pytest.skip("NOT TESTED: DeepEP itself is installed, in whose place this command puts nothing")
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom deep_ep import Buffer\nfrom deep_ep.utils import EventHandle, EventOverlap\nimport beside_it\n"
        "print(Buffer.__module__, *sys.argv[1:])\n",
        encoding="utf-8",
    )
    (tmp_path / "beside_it.py").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [sys.executable, "-m", module, "../program.py", "--moe-token-dispatcher-type", "flex"]
    path = os.pathsep.join([str(PAGE.parent.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": path},
        timeout=100,
    )
    assert ran.stdout == f"{deep_ep.__name__} --moe-token-dispatcher-type flex\n", ran.stderr


def buffer(size: int) -> Any:
    """A buffer of a group of this size, of which only the layout is asked."""

    def refuse(error: Exception) -> None:
        raise error

    made = DeepEPBuffer.__new__(DeepEPBuffer)
    vars(made).update(group_size=size, rank=0, _tokens=SimpleNamespace(refuse=refuse))
    return made


def test_a_layout_counts_each_token_once_for_a_rank() -> None:
    choices = torch.tensor([[0, 1], [3, 0], [-1, 2], [-1, -1]])
    per_rank, nothing, per_expert, in_rank, _ = buffer(2).get_dispatch_layout(choices, 4)
    assert per_rank.tolist() == [2, 2]
    assert nothing is None
    assert per_expert.tolist() == [2, 1, 1, 1]
    assert in_rank.tolist() == [[True, False], [True, True], [False, True], [False, False]]
    assert deep_ep._targets(in_rank, 2).tolist() == [[0, -1], [0, 1], [1, -1], [-1, -1]]


def test_choices_of_no_expert_are_refused() -> None:
    with pytest.raises(TensorError, match="a token chose expert 4, there are 4"):
        buffer(2).get_dispatch_layout(torch.tensor([[0, 4]]), 4)
    with pytest.raises(UsageError, match="3 experts on 2 ranks"):
        buffer(2).get_dispatch_layout(torch.tensor([[0, 1]]), 3)
    with pytest.raises(TensorError, match=r"topk_idx must be \[T, K\] int64"):
        buffer(2).get_dispatch_layout(torch.tensor([[0.0, 1.0]]), 4)


def test_tensors_that_do_not_fit_are_refused_where_the_others_hear_of_it() -> None:
    x, experts, weights, in_rank = torch.ones(3, 4), torch.zeros(3, 2).long(), torch.ones(3, 2), torch.ones(3, 2).bool()
    made = buffer(2)

    def dispatch(x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, in_rank: torch.Tensor) -> None:
        made.dispatch(
            x,
            topk_idx=experts,
            topk_weights=weights,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=torch.zeros(4, dtype=torch.int32),
        )

    for wrong in (
        (x[:2], experts, weights, in_rank),
        (x, experts[:2], weights, in_rank),
        (x, experts, weights[:, :1], in_rank),
        (x, experts, weights, in_rank[:, :1]),
        (x, experts, weights, in_rank.int()),
    ):
        with pytest.raises(TensorError, match=r"expected x \[T, H\], .* is_token_in_rank \[T, 2\] bool, got"):
            dispatch(*wrong)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(TensorError, match="weights hold NaN or Inf"):
            dispatch(x, experts, weights.index_fill(0, torch.tensor([1]), bad), in_rank)


def test_a_handle_takes_as_many_tokens_as_it_was_made_for() -> None:
    handle = deep_ep._Way(SimpleNamespace(num_tokens=3), 2)  # type: ignore[arg-type]
    with pytest.raises(TensorError, match=r"tokens \[2, 4\] are to go the way of a handle of 3 tokens"):
        buffer(2).dispatch(torch.ones(2, 4), handle=handle)


@pytest.mark.parametrize("trains", [True, False])
def test_a_dispatch_is_priced_with_the_gradient_that_comes_back(trains: bool) -> None:
    """Asked inside a function of autograd, as Megatron asks, where no gradient is recorded."""
    asked: list[bool] = []

    def prepare(*_: object, needs_gradient: bool, **__: object) -> None:
        asked.append(needs_gradient)
        raise InterruptedError

    made = buffer(2)
    made._tokens.prepare = prepare

    class Dispatch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            choices, weights, in_rank = torch.zeros(3, 2).long(), torch.ones(3, 2), torch.ones(3, 2).bool()
            counts = torch.zeros(4, dtype=torch.int32)
            made.dispatch(x, None, None, None, in_rank, counts, choices, weights)
            return x

    with pytest.raises(InterruptedError):
        Dispatch.apply(torch.ones(3, 4, requires_grad=trains))  # type: ignore[no-untyped-call]
    assert asked == [trains]
