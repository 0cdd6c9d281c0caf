"""Settings of the whole suite: property tests have no deadline, because the machines that run them are shared."""

from __future__ import annotations

import os
from typing import Any

# A job of the backend that finds no profile measures one and keeps it in the user's cache: only tests of that do so.
os.environ.setdefault("COMMLAYER_PROFILE", "none")
os.environ.setdefault("COMMLAYER_TRIALS", "off")
os.environ.setdefault("COMMLAYER_REPLAN", "off")
# Tables are as wide as a pipe's, also where a user exports the width of his terminal; pytest-xdist does so for its workers.
os.environ.pop("COLUMNS", None)

try:
    from hypothesis import settings
except ImportError:  # tests/gpu also runs with a GPU machine's own packages (see CONTRIBUTING.md), and needs none of it
    pass
else:
    settings.register_profile("commlayer", deadline=None)
    settings.load_profile("commlayer")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Put tests of the simulated device before all others of each worker, and those of diagnoses before these.

    torch's autograd counts devices at a process's first backward pass, and ranks are forked from the process that runs the tests:
    once one of them has made such a pass there, no rank can train on that device any more. Workers take contiguous shares.
    Diagnoses look at the threads of this process, of which faulthandler shows a hundred: simulated devices leave theirs behind.
    """
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    first = [item for item in items if "diagnosis" in item.path.parts]
    first += [item for item in items if hasattr(getattr(item, "module", None), "simulated_device")]
    taken = set(first)
    others = [item for item in items if item not in taken]
    items.clear()
    for worker in range(num_workers):
        for each in (first, others):
            items += each[len(each) * worker // num_workers : len(each) * (worker + 1) // num_workers]
