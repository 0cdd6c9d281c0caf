"""The name ``deep_ep``: when it is given, to whom, and what its buffer answers without a job. Training: test_megatron.py."""

from __future__ import annotations

import re
import subprocess
import sys
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
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(DeepEPBuffer, "kind", "auto")


@pytest.mark.usefixtures("without_name")
def test_the_real_library_stays_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType("deep_ep")
    monkeypatch.setitem(sys.modules, "deep_ep", real)
    with pytest.raises(UsageError, match="DeepEP itself is installed: pass replace=True"):
        install_deep_ep()
    assert sys.modules["deep_ep"] is real
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


def test_the_pages_command_runs_an_unchanged_program(tmp_path: Path) -> None:
    (module,) = re.findall(r"torchrun \S+ \S+ -m (\S+) pretrain_gpt\.py", PAGE.read_text(encoding="utf-8"))
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom deep_ep import Buffer\nfrom deep_ep.utils import EventHandle, EventOverlap\n"
        "print(Buffer.__module__, *sys.argv[1:])\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", module, str(program), "--moe-token-dispatcher-type", "flex"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
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
