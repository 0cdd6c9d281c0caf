"""Verbs of process groups by the names that the installed torch has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch._C._distributed_c10d import ProcessGroup

from commlayer.backend.verb_methods import Verb
from commlayer.backend.verbs import VERBS
from commlayer.transport.c10d import verb_of


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_a_torch_that_knows_a_verb_by_its_older_name_only_has_it(verb: Verb) -> None:
    """torch 2.11's groups, NCCL's too, have no ``all_gather_single``."""
    *_, oldest = verb.names.split()
    group = SimpleNamespace(**{oldest: "found"})
    assert verb_of(group, verb.name) == "found"


def test_the_present_name_comes_first() -> None:
    group = SimpleNamespace(all_gather_single="present", _allgather_base="older")
    assert verb_of(group, "all_gather_single") == "present"


def test_a_verb_that_does_not_exist_is_said_by_the_name_that_was_asked_for() -> None:
    with pytest.raises(AttributeError, match="scatter_all"):
        verb_of(SimpleNamespace(), "scatter_all")


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_the_installed_torch_has_every_verb(verb: Verb) -> None:
    assert callable(verb_of(ProcessGroup, verb.name))
