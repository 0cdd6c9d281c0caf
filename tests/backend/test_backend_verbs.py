"""The table of the backend's collectives, and what a call of one costs: entries of Python functions."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlayer
import commlayer.backend.create
from commlayer.backend import patches
from commlayer.backend.device_launches import LAUNCHES
from commlayer.backend.group import CommlayerGroup
from commlayer.backend.verb_methods import Verb, add_methods, in_place
from commlayer.backend.verbs import VERBS
from commlayer.testing.plugin import ClusterFactory


def test_a_group_inherits_from_torch_alone() -> None:
    assert CommlayerGroup.__bases__ == (dist.ProcessGroup,)


@pytest.mark.parametrize("row", VERBS, ids=lambda row: row.name)
def test_a_row_is_a_method_under_all_of_its_names(row: Verb) -> None:
    methods = {vars(CommlayerGroup)[name] for name in row.names.split()}
    assert len(methods) == 1
    (method,) = methods
    assert method.__code__.co_name == method.__name__ == row.name, "what tracebacks and profiles show"
    assert method.__doc__
    assert method.__doc__ == row.body.__doc__
    # NCCL's methods of these names are called for CUDA tensors, and torch calls ours.
    assert all(hasattr(dist.ProcessGroup, name) for name in row.names.split())


def test_every_collective_of_torch_is_in_the_table() -> None:
    """Verbs that are not overridden would go to the inner Gloo, unplanned and in no order."""
    words = ("gather", "scatter", "reduce", "all_to_all", "alltoall", "broadcast")
    torchs = {name for name in vars(dist.ProcessGroup) if any(word in name for word in words)}
    rows = {name for row in VERBS for name in row.names.split()}
    on_gather = {"gather_single", "gather_into_tensor"}  # torch 2.15's: methods that call a row's
    assert on_gather <= set(vars(CommlayerGroup))
    assert torchs - rows - on_gather == set()


def test_a_row_makes_methods_of_its_own() -> None:
    def body(calls: object, tensors: object, opts: object) -> None:
        """Says hello."""

    class Group:
        pass

    add_methods(Group, [Verb("greet hail", "greeting", in_place, object, body)])
    assert vars(Group)["greet"] is vars(Group)["hail"]
    assert vars(Group)["greet"].__doc__ == "Says hello."
    assert vars(CommlayerGroup)["allreduce"].__code__.co_name == "allreduce", "the code of another row is not renamed"


def test_compilers_skip_every_module_that_a_call_passes() -> None:
    codes = set(patches._all_code())
    for row in VERBS:
        assert vars(CommlayerGroup)[row.name].__code__ in codes
        assert row.body.__code__ in codes


def test_what_is_launched_on_a_device_is_a_row_of_the_table() -> None:
    assert LAUNCHES.keys() <= {row.name for row in VERBS}


PACKAGE = f"{Path(commlayer.__file__).parent}/"


def entries(call: Callable[[], object]) -> Counter[str]:
    """How often functions of the backend, and of the rest of commlayer, are entered; the fewest of five calls, because who waits
    for long on a busy machine looks up from it."""
    return min((entries_of_one(call) for _ in range(5)), key=lambda found: sum(found.values()))


def entries_of_one(call: Callable[[], object]) -> Counter[str]:
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):  # the checkout may be named commlayer too
            found["backend" if frame.f_code.co_filename.startswith(f"{PACKAGE}backend/") else "beside"] += 1

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def test_a_forwarded_call_enters_two_functions_of_the_backend(emulated_cluster: ClusterFactory) -> None:
    """The verb, and the wait that counts it."""

    def job() -> dict[str, Counter[str]]:
        os.environ["COMMLAYER_PROFILE"] = "none"
        dist.init_process_group("commlayer")
        whole, part = torch.ones(8), torch.ones(8)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "broadcast": lambda: dist.broadcast(whole, 0),
            "all_gather": lambda: dist.all_gather_single(whole, part),
            "all_to_all": lambda: dist.all_to_all_single(whole, part),
            "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole),
            "a dtype that asks for the long way": lambda: dist.all_reduce(torch.ones(8, dtype=torch.int32)),
        }
        found = {}
        for name, call in calls.items():
            call()  # the first finds the lane out
            found[name] = entries(call)
        dist.destroy_process_group()
        return found

    (found,) = emulated_cluster(nodes=1, ranks_per_node=1).run(job)
    assert found["reduce_scatter"]["backend"] == 2  # it is Gloo's all_reduce, and something beside
    for name in ("all_reduce", "broadcast", "all_gather", "all_to_all"):
        # Beside: the note in the ring of calls, and wait() of the Work, by torch.distributed.
        assert found[name] == {"backend": 2, "beside": 2}, name
    assert found["a dtype that asks for the long way"]["backend"] > 3, "the count can see more"
