"""The process group that torchft's Manager gets: what may be asked of it, with and without torchft."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from commlayer.backend.group_options import GroupOptions
from commlayer.integrations import planned_process_group, torchft
from commlayer.profiles.errors import UsageError


class Wrapper:
    """The part of torchft's ProcessGroupWrapper that ours is made with."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def configure(self) -> None:
        """Make the group anew, as torchft 0.2 does."""


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("torchft.process_group")
    module.ProcessGroupWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "torchft", ModuleType("torchft"))
    monkeypatch.setitem(sys.modules, "torchft.process_group", module)


CHOSEN: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "nothing": ({}, {"plan": "'tried'"}),
    "always": ({"wire": "int8!"}, {"wire": "'int8!'", "plan": "'tried'"}),
    "native": ({"wire": "native"}, {"wire": "'native'", "plan": "'tried'"}),
    "where faster": ({"wire": "bf16"}, {"wire": "'bf16'", "plan": "'auto'"}),
    "a plan": ({"wire": "bf16!", "plan": "auto"}, {"wire": "'bf16!'", "plan": "'auto'"}),
    "options": ({"options": GroupOptions(reduction="ordered")}, {"reduction": "'ordered'"}),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_a_format_that_needs_no_profile_has_none_measured(wrapped: None, name: str) -> None:
    given, words = CHOSEN[name]
    group: Any = planned_process_group(timeout=timedelta(seconds=7), **given)
    assert group._options.words() == words
    assert group.timeout == timedelta(seconds=7)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"wire": "int3!"}, "a wire format must be one of native, bf16, int8"),
    "fp8": ({"wire": "fp8_e4m3!"}, "FP8 keeps three or four bits"),
    "no text": ({"wire": 8}, "wire must be a text such as int8!"),
    "plan": ({"plan": "fastest"}, "GroupOptions.plan must be one of"),
    "no options": ({"options": {"wire": "int8!"}}, "or options, a commlayer.GroupOptions; got wire None"),
    "no time": ({"timeout": timedelta(seconds=-1)}, "timeout: expected a timedelta above zero"),
    "a number": ({"timeout": 60}, "timeout: expected a timedelta above zero"),
    "both": ({"wire": "int8!", "options": GroupOptions()}, "give wire and plan, or options"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_is_none_is_refused(wrapped: None, name: str) -> None:
    given, words = REFUSED[name]
    with pytest.raises(UsageError, match=words):
        planned_process_group(**given)


def test_without_torchft_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft.process_group", None)
    with pytest.raises(UsageError, match=r"cannot be imported.*pip install 'torchft>=0.2,<0.3'"):
        planned_process_group()


def test_a_torchft_whose_groups_are_made_anew_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchft 0.3, by what its wrapper has and has not."""

    class ProcessGroupWrapper:
        def reconfigure(self) -> None: ...

    newer = SimpleNamespace(ProcessGroupWrapper=ProcessGroupWrapper)
    monkeypatch.setitem(sys.modules, "torchft", SimpleNamespace(process_group=newer))
    monkeypatch.setitem(sys.modules, "torchft.process_group", newer)
    with pytest.raises(UsageError, match=r"by configure\(\).*never commit a step: pip install 'torchft>=0.2,<0.3'"):
        planned_process_group()


def test_the_extra_takes_the_versions_that_are_taken() -> None:
    pyproject = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'torchft = ["{torchft._VERSIONS}"]' in pyproject
