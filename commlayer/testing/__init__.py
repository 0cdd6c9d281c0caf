"""Tools for testing code that runs on a cluster.

The pytest fixture `emulated_cluster` (see `commlayer.emulation`), jobs on uneven nodes, and
`check_communicator`, which every communicator must pass. See docs/testing.md. Names are loaded on
first use: pytest loads this package with its plugin, and must not load torch for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commlayer.profiles.lazy_names import lazy_names

if TYPE_CHECKING:
    from commlayer.testing.conformance import (
        DTYPES,
        OPS,
        REDUCE_DTYPES,
        ConformanceError,
        FailedCheck,
        check_communicator,
    )
    from commlayer.testing.nodes import outcomes_on_nodes, run_on_nodes
    from commlayer.testing.process_group import ProcessGroupVerbs
    from commlayer.testing.verbs_contract import AsyncCall, ReduceOp, Verbs

__all__ = [
    "DTYPES",
    "OPS",
    "REDUCE_DTYPES",
    "AsyncCall",
    "ConformanceError",
    "FailedCheck",
    "ProcessGroupVerbs",
    "ReduceOp",
    "Verbs",
    "check_communicator",
    "outcomes_on_nodes",
    "run_on_nodes",
]

__getattr__, __dir__ = lazy_names(__name__)
